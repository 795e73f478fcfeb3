/*
 * Newcomers of elastic jobs wait here, and are let in when the ranks regroup: the job's next run begins with them and
 * without those that have gone. job.c puts newcomers into the row; agent_regroup() is agent.h's, for control/.
 */
#include "agent/round/round.h"
#include "base/log.h"
#include <openssl/crypto.h>
#include <stdio.h>

/* Newcomers that are told in one go that their time is over. */
#define EXPIRE_MAX 64

/* -- Newcomers ----------------------------------------------------------------------------------------------------- */

static bool is_same(const char *name, const uint8_t *secret_digest, const char *other,
		    const uint8_t *others_digest)
{
	return !strcmp(name, other) &&
	       !CRYPTO_memcmp(secret_digest, others_digest, SECRET_DIGEST_LEN);
}

bool agent_job_is(const struct agent_job *job, const char *name, const uint8_t *secret_digest)
{
	return is_same(job->owner.name, job->owner.secret_digest, name, secret_digest);
}

bool agent_newcomer_is_for(const struct agent_newcomer *newcomer, const char *job,
			   const uint8_t *secret_digest)
{
	return is_same(newcomer->job, newcomer->secret_digest, job, secret_digest);
}

static bool is_for(const struct agent_newcomer *newcomer, const struct agent_job *job)
{
	return agent_newcomer_is_for(newcomer, job->owner.name, job->owner.secret_digest);
}

/* Those that wait for one job: a rank asks with each request how many. */
struct agent_waiting {
	struct map_entry entry; /* agent->waiting */
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	struct list newcomers;
	uint32_t n;
};

uint64_t agent_newcomers_hash(const char *job, const uint8_t *secret_digest)
{
	uint64_t hashes[2] = { map_hash_string(job), map_hash(secret_digest, SECRET_DIGEST_LEN) };

	return map_hash(hashes, sizeof(hashes));
}

static struct agent_waiting *waiting_find(const struct agent *agent, const char *job,
					  const uint8_t *secret_digest)
{
	struct map_entry *entry =
		map_find(&agent->waiting, agent_newcomers_hash(job, secret_digest));

	for (; entry; entry = map_find_next(entry)) {
		struct agent_waiting *waiting = container_of(entry, struct agent_waiting, entry);

		if (is_same(waiting->job, waiting->secret_digest, job, secret_digest))
			return waiting;
	}
	return NULL;
}

const struct list *agent_newcomers_of(const struct agent *agent, const char *job,
				      const uint8_t *secret_digest)
{
	const struct agent_waiting *waiting = waiting_find(agent, job, secret_digest);

	return waiting ? &waiting->newcomers : NULL;
}

static int waiting_add(struct agent_newcomer *newcomer)
{
	struct agent *agent = newcomer->agent;
	struct agent_waiting *waiting = waiting_find(agent, newcomer->job, newcomer->secret_digest);
	int r;

	if (!waiting) {
		waiting = calloc(1, sizeof(*waiting));
		if (!waiting)
			return error_origin(-ENOMEM);
		memcpy(waiting->job, newcomer->job, sizeof(waiting->job));
		memcpy(waiting->secret_digest, newcomer->secret_digest, SECRET_DIGEST_LEN);
		list_init(&waiting->newcomers);
		r = map_add(&agent->waiting,
			    agent_newcomers_hash(waiting->job, waiting->secret_digest),
			    &waiting->entry);
		if (r) {
			free(waiting);
			return error_trace(r);
		}
	}
	waiting->n++;
	list_push_back(&waiting->newcomers, &newcomer->of_job);
	return 0;
}

static void waiting_remove(struct agent_newcomer *newcomer)
{
	struct agent *agent = newcomer->agent;
	struct agent_waiting *waiting = waiting_find(agent, newcomer->job, newcomer->secret_digest);

	list_remove(&newcomer->of_job);
	if (--waiting->n)
		return;
	map_remove(&agent->waiting, &waiting->entry);
	free(waiting);
}

/* Through servers a job outlives its daemons, or could not do without a rank: whoever is in it has to. */
static int check_fit(struct agent_newcomer *newcomer, const struct agent_job *job,
		     struct failure *failure)
{
	if (!job->distributed)
		return 0;
	newcomer->cannot_resume = newcomer->member->charge(newcomer->member, true);
	if (!newcomer->cannot_resume)
		return 0;
	return failure_set(
		failure, -EOPNOTSUPP,
		"job %s goes through servers, and lets no newcomer in that can take part in "
		"no restart: %s",
		job->owner.name, newcomer->cannot_resume);
}

uint32_t agent_elastic_n_waiting(const struct agent_job *job)
{
	uint32_t max = job->shape.max_ranks ? job->shape.max_ranks : JOB_RANKS_MAX;
	uint32_t vacant = max - MIN(max, agent_elastic_size(job));
	const struct agent_waiting *waiting =
		list_empty(&job->agent->newcomers)
			? NULL
			: waiting_find(job->agent, job->owner.name, job->owner.secret_digest);

	return waiting ? MIN(waiting->n, vacant) : 0;
}

bool agent_elastic_waits(const struct agent_job *job)
{
	uint32_t max = job->shape.max_ranks ? job->shape.max_ranks : JOB_RANKS_MAX;

	return job->shape.elastic && (agent_elastic_n_waiting(job) ||
				      (job->membership.n_joiners && agent_elastic_size(job) < max));
}

/* It is let in, or gives up: it is in the row no more. */
static void take_out(struct agent_newcomer *newcomer)
{
	newcomer->member->newcomer = NULL;
	list_remove(&newcomer->link);
	waiting_remove(newcomer);
	newcomer->agent->hooks->newcomer_gone(newcomer);
	free(newcomer);
}

void agent_elastic_forget(struct agent_member *member)
{
	take_out(member->newcomer);
}

void agent_newcomer_fail(struct agent_newcomer *newcomer, const struct failure *failure)
{
	struct agent_member *member = newcomer->member;

	take_out(newcomer);
	member->ended(member, 0, failure);
}

void agent_elastic_close(struct agent *agent, const struct failure *failure)
{
	struct agent_newcomer *newcomer, *next;

	agent->hooks->newcomers_gone(agent);
	loop_timer_cancel(&agent->newcomers_timer);
	list_for_each_safe (newcomer, next, &agent->newcomers, link) {
		if (failure)
			agent_newcomer_fail(newcomer, failure);
		else
			take_out(newcomer);
	}
}

void agent_elastic_end(struct agent_job *job)
{
	struct agent_newcomer *newcomer, *next;
	struct failure failure;

	(void)failure_set(&failure, -ECANCELED,
			  "job %s has ended, and had not let this newcomer in", job->owner.name);
	list_for_each_safe (newcomer, next, &job->agent->newcomers, link)
		if (job->shape.elastic && is_for(newcomer, job))
			agent_newcomer_fail(newcomer, &failure);
}

static void on_newcomers_timer(struct loop_timer *timer)
{
	struct agent *agent = container_of(timer, struct agent, newcomers_timer);
	uint64_t now_ns = clock_now_ns(), next_ns = CLOCK_NEVER;
	struct agent_newcomer *newcomer, *next;
	struct failure failure;
	unsigned n = 0;
	char time[32];

	list_for_each_safe (newcomer, next, &agent->newcomers, link) {
		if (newcomer->deadline_ns > now_ns) {
			next_ns = MIN(next_ns, newcomer->deadline_ns);
			continue;
		}
		if (n++ == EXPIRE_MAX) {
			next_ns = now_ns;
			break;
		}
		(void)agent_time_text(time, newcomer->timeout_ms * NSEC_PER_MSEC);
		(void)failure_set(
			&failure, -ETIMEDOUT,
			"no elastic job %s of this secret, on this node or through servers, "
			"has let a newcomer in within %s: its ranks let them in when they "
			"regroup",
			newcomer->job, time);
		agent_newcomer_fail(newcomer, &failure);
	}
	/* Those whose time is over, too, not before the next turn. */
	if (next_ns != CLOCK_NEVER)
		(void)loop_timer_set(agent->params.loop, timer, MAX(next_ns, now_ns + 1));
}

struct agent_job *agent_elastic_find(struct agent *agent, const char *name,
				     const uint8_t *secret_digest)
{
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		if (job->state == JOB_RUNNING && job->shape.elastic &&
		    agent_job_is(job, name, secret_digest))
			return job;
	return NULL;
}

int agent_elastic_wait(struct agent *agent, struct agent_member *member,
		       const struct agent_join *join, struct failure *failure)
{
	_cleanup_(freep) struct agent_newcomer *newcomer = calloc(1, sizeof(*newcomer));
	struct loop_timer *timer = &agent->newcomers_timer;
	struct agent_job *job;
	int r = 0;

	if (!newcomer)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", join->job);
	memcpy(newcomer->secret_digest, join->secret_digest, SECRET_DIGEST_LEN);
	newcomer->timeout_ms = join->timeout_ms;
	newcomer->deadline_ns = clock_now_ns() + join->timeout_ms * NSEC_PER_MSEC;
	timer->expired = on_newcomers_timer;
	if (!timer->loop || timer->at_ns > newcomer->deadline_ns)
		r = loop_timer_set(agent->params.loop, timer, newcomer->deadline_ns);
	if (r)
		return failure_set(failure, r, "job %s: %s", join->job, strerror(-r));
	newcomer->agent = agent;
	newcomer->member = member;
	newcomer->process = join->process;
	newcomer->uid = join->uid;
	newcomer->cannot_resume = join->cannot_resume;
	(void)snprintf(newcomer->job, sizeof(newcomer->job), "%s", join->job);
	job = agent_elastic_find(agent, newcomer->job, newcomer->secret_digest);
	if (job && check_fit(newcomer, job, failure))
		return failure->status;
	if (waiting_add(newcomer))
		return failure_set(failure, -ENOMEM, "job %s: out of memory", join->job);
	member->job = NULL;
	list_init(&member->declarations);
	list_push_back(&agent->newcomers, &newcomer->link);
	log_info("job %s: pid %u waits to be let in", join->job, join->pid);
	member->newcomer = TAKE_PTR(newcomer);
	agent_uninformed_let_in(member->newcomer);
	if (!job && member->newcomer)
		agent->hooks->newcomer_waits(member->newcomer);
	return 0;
}

/* -- Regrouping ---------------------------------------------------------------------------------------------------- */

void agent_regroup(struct agent_member *member)
{
	struct agent_job *job = member->job;
	struct failure failure = { 0 };

	if (!job->shape.elastic)
		(void)failure_set(&failure, -EINVAL, "job %s is not elastic", job->owner.name);
	else if (member->leaving || member->regrouping)
		(void)failure_set(&failure, -EALREADY, "rank %u %s already", member->rank,
				  member->leaving ? "leaves" : "regroups");
	else if (job->n_pending[member->index])
		(void)failure_set(&failure, -EBUSY,
				  "rank %u of job %s has operations under way: wait for them first",
				  member->rank, job->owner.name);
	if (failure.status) {
		member->refused(member, &failure);
		return;
	}
	member->regrouping = true;
	if (!job->membership.n_regrouping++) {
		job->membership.regroup_by_ns = clock_now_ns() + job->request_timeout_ns;
		agent_job_watch(job, job->membership.regroup_by_ns);
	}
	agent_elastic_try(job);
}

uint64_t agent_elastic_expire(struct agent_job *job, uint64_t now_ns)
{
	struct agent_ranks_text late = { 0 };
	struct failure failure;
	char time[32];

	if (job->state != JOB_RUNNING || !job->membership.n_regrouping)
		return CLOCK_NEVER;
	if (job->membership.regroup_by_ns > now_ns)
		return job->membership.regroup_by_ns;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i] && !job->members[i]->regrouping)
			agent_ranks_add(&late, job->members[i]->rank);
	(void)failure_set(&failure, -ETIME, "%s did not regroup with the others within %s",
			  agent_ranks_end(&late), agent_time_text(time, job->request_timeout_ns));
	/* A rank may have much to give back: the others are dropped in turns to come. */
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i] && !job->members[i]->regrouping) {
			job->agent->hooks->rank_is_late(job, i, &failure);
			return now_ns;
		}
	return CLOCK_NEVER;
}

/* The next run, without members. */
static int next_run(struct agent_job *job, uint32_t size, uint32_t local_size, uint32_t node,
		    uint32_t n_nodes, uint32_t membership, struct agent_job **ret_next)
{
	struct agent_join join = {
		.job = job->owner.name,
		.size = size,
		.local_size = local_size,
		.node = node,
		.n_nodes = n_nodes,
		.force_distributed = job->distributed,
		.min_servers = job->shape.min_servers,
		.part_bytes = job->shape.part_bytes,
		.request_timeout_ms = job->shape.request_timeout_ms,
		.gpu_reduce = job->shape.gpu_reduce,
		.gpu_roots = job->shape.gpu_roots,
		.elastic = true,
		.min_ranks = job->shape.min_ranks,
		.max_ranks = job->shape.max_ranks,
		.uid = job->owner.uid,
		.account = job->memory.account,
	};
	int r;

	memcpy(join.secret_digest, job->owner.secret_digest, SECRET_DIGEST_LEN);
	r = agent_job_make(job->agent, &join, ret_next);
	if (r)
		return error_trace(r);
	(*ret_next)->membership.first = (*ret_next)->membership.number = membership;
	(*ret_next)->memory.counted = job->memory.counted;
	job->memory.counted = false;
	return 0;
}

static void take(struct agent_job *job, struct agent_member *member, uint32_t rank,
		 uint32_t local_rank, const struct process_seen *process, const char *cannot_resume)
{
	struct agent_join join = {
		.rank = rank,
		.local_rank = local_rank,
		.process = *process,
		.cannot_resume = cannot_resume,
	};

	/* The next ledger has memory for its first results alone, whatever the one before had come to. */
	(void)member->charge_more(member, 0);
	agent_job_add(job, member, &join, job->request_timeout_ns);
}

/* All members are at one place, and nothing is under way. */
static void regroup(struct agent_job *job)
{
	uint32_t n_new = agent_elastic_n_waiting(job), size = job->n_members + n_new, rank = 0;
	struct agent_newcomer *newcomer, *following;
	struct agent_job *next;
	struct failure failure;
	int r;

	if (size < job->shape.min_ranks) {
		(void)failure_set(&failure, -EPIPE,
				  "job %s: %u ranks regroup, fewer than the %u that it needs",
				  job->owner.name, size, job->shape.min_ranks);
		agent_job_fail(job, &failure, NULL);
		return;
	}
	r = next_run(job, size, size, 0, 1, job->membership.number + 1, &next);
	if (r) {
		(void)failure_set(&failure, r, "job %s cannot regroup: %s", job->owner.name,
				  strerror(-r));
		agent_job_fail(job, &failure, NULL);
		return;
	}
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_member *member = job->members[i];

		if (!member)
			continue;
		agent_job_detach(member);
		take(next, member, rank, rank, &member->process, job->resumption.ends);
		rank++;
	}
	list_for_each_safe (newcomer, following, &job->agent->newcomers, link) {
		struct agent_member *member = newcomer->member;
		struct agent_newcomer facts = *newcomer;

		if (rank == size || !is_for(newcomer, job))
			continue;
		take_out(newcomer);
		take(next, member, rank, rank, &facts.process, member->charge(member, false));
		rank++;
	}
	log_info("job %s: regroups: %u ranks, %u of them new", job->owner.name, size, n_new);
	agent_job_over(job);
	agent_job_form_here(next);
}

/* Those that came before the job was here. */
static void refuse_unfit(struct agent_job *job)
{
	struct agent_newcomer *newcomer, *next;
	struct failure failure;

	list_for_each_safe (newcomer, next, &job->agent->newcomers, link)
		if (is_for(newcomer, job) && check_fit(newcomer, job, &failure))
			agent_newcomer_fail(newcomer, &failure);
}

/* The same where ranks are on several nodes: their home puts the next run together. */
static void regroup_far(struct agent_job *job)
{
	_cleanup_(freep) uint32_t *ranks = calloc(job->layout.n_local, sizeof(ranks[0]));
	struct failure failure;
	uint32_t n = 0;
	int r = ranks ? 0 : -ENOMEM;

	/* It is told when it is there. */
	if (!job->fleet.servers[job->fleet.home_number].attached)
		return;
	for (uint32_t i = 0; ranks && i < job->layout.n_local; i++)
		if (job->members[i])
			ranks[n++] = job->layout.rank_of_local[i];
	refuse_unfit(job);
	if (!r)
		r = job->agent->hooks->regroups(job, ranks, n, agent_elastic_n_waiting(job));
	if (!r)
		return;
	(void)failure_set(&failure, r, "job %s cannot regroup: %s", job->owner.name, strerror(-r));
	agent_job_fail(job, &failure, NULL);
}

void agent_elastic_try(struct agent_job *job)
{
	if (job->state != JOB_RUNNING || !job->membership.n_regrouping ||
	    job->membership.n_regrouping != job->n_members || job->sweep.n_without ||
	    !agent_job_lets_go(job, true))
		return;
	if (job->distributed)
		regroup_far(job);
	else
		regroup(job);
}

void agent_elastic_regroup_again(struct agent_job *job)
{
	if (job->shape.elastic)
		agent_elastic_try(job);
}

/* Members that died since they asked have left gaps: they are lost in the next run. */
static void take_members(struct agent_job *job, const struct agent_regrouped *regrouped,
			 struct agent_job *next)
{
	for (uint32_t i = 0; i < regrouped->n && i < regrouped->n_local; i++) {
		uint32_t local = job->layout.local_of_rank[regrouped->old_ranks[i]];
		struct agent_member *member = job->members[local];

		if (!member)
			continue;
		agent_job_detach(member);
		take(next, member, regrouped->ranks[i], i, &member->process, NULL);
	}
}

void agent_elastic_let_in(struct agent_job *next, const uint32_t *ranks, uint32_t i)
{
	struct agent_newcomer *newcomer, *following;

	list_for_each_safe (newcomer, following, &next->agent->newcomers, link) {
		struct agent_member *member = newcomer->member;
		struct agent_newcomer facts = *newcomer;

		/* One that can take part in no restart was not counted. */
		if (i >= next->shape.local_size || !is_for(newcomer, next) || facts.cannot_resume)
			continue;
		take_out(newcomer);
		take(next, member, ranks[i], i, &facts.process, NULL);
		i++;
	}
	next->departed.n_before = next->shape.local_size - next->n_members;
}

int agent_elastic_next(struct agent_job *job, const struct agent_regrouped *regrouped,
		       struct agent_job **ret_next)
{
	struct agent_job *next;
	int r;

	r = next_run(job, regrouped->size, regrouped->n_local, regrouped->node, regrouped->n_nodes,
		     regrouped->membership, &next);
	if (r)
		return error_trace(r);
	next->instance = regrouped->instance;
	next->membership.regrouped = true;
	take_members(job, regrouped, next);
	agent_elastic_let_in(next, regrouped->ranks, regrouped->n);
	log_info("job %s: regroups: %u ranks on %u nodes, %u here", job->owner.name,
		 regrouped->size, regrouped->n_nodes, next->n_members);
	*ret_next = next;
	return 0;
}
