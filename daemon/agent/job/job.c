/*
 * A job on this node from its first rank to its end: it is formed, fails, expires or is left,
 * and is freed when nothing of it is in flight. agent_join(), agent_leave() and
 * agent_abandon() are agent.h's, for control/. home.c, attach.c and setup.c talk to
 * servers about the job.
 */
#include "agent/job/job.h"
#include "base/failpoint.h"
#include "base/log.h"
#include <inttypes.h>
#include <stdio.h>
#include <sys/random.h>

/* The timer of a job is always armed, so that arming it anew cannot fail; this is "never". */
#define TIMER_IDLE_NS	   (365ull * 24 * 3600 * NSEC_PER_SEC)
#define TIMEOUT_MAX_MS	   (365ull * 24 * 3600 * 1000)
#define REQUEST_TIMEOUT_MS 600000
/* What a job has of each rank and its node, wherever it is: places in its layout, out, moves; and of those that are here. */
#define RANK_BYTES	 32
#define LOCAL_RANK_BYTES 256
/* Of what its push_pull_rows hold, charged to its user at a time. */
#define ROWS_BATCH (UINT64_C(1) << 20)

/* -- Lifetime ----------------------------------------------------------------------------------------------------- */

/* The job counts no more among those of its user. */
static void give_place(struct agent_job *job)
{
	if (job->memory.counted)
		account_release(job->memory.account, ACCOUNT_JOBS, 1);
	job->memory.counted = false;
}

/* One job in a step: it may have had much. */
static bool on_reap(struct chore *chore)
{
	struct agent *agent = container_of(chore, struct agent, reap);
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		if (!job->holds) {
			(void)agent_job_free(job);
			return true;
		}
	return false;
}

void agent_job_hold(struct agent_job *job)
{
	job->holds++;
}

void agent_job_release(struct agent_job *job)
{
	struct agent *agent = job->agent;

	if (--job->holds)
		return;
	/* Another may have its place before its memory is gone. */
	give_place(job);
	agent->reap.step = on_reap;
	loop_begin(agent->params.loop, &agent->reap);
}

struct agent_job *agent_job_free(struct agent_job *job)
{
	if (!job)
		return NULL;
	list_remove(&job->link);
	job->agent->n_changes++;
	loop_timer_cancel(&job->sweep.timer);
	loop_abort(&job->sweep.chore);
	loop_abort(&job->departed.letting_go);
	loop_abort(&job->later.chore);
	loop_abort(&job->tensors.without);
	job->agent->hooks->freed(job);
	agent_quota_done(job);
	layout_done(&job->layout);
	(void)fd_close(job->resumption.ledger_fd);
	(void)ledger_free(job->resumption.ledger);
	free(job->members);
	free(job->n_pending);
	free(job->departed.ranks);
	free(job->membership.out);
	free(job->membership.gone);
	free(job->sweep.without);
	free(job->resumption.node_of_rank);
	free(job->departed.nodes);
	(void)arrivals_free(job->arrivals);
	bulk_done(&job->memory.bulk);
	quota_release(&job->memory.held, job->memory.held_ranks);
	quota_done(&job->memory.rows);
	quota_done(&job->memory.held);
	give_place(job);
	(void)account_put(job->memory.account);
	free(job);
	return NULL;
}
DEFINE_CLEANUP(struct agent_job *, agent_job_free)

static void on_timer(struct loop_timer *timer);

static int new_instance(struct agent_job *job)
{
	if (getrandom(&job->instance, sizeof(job->instance), 0) != sizeof(job->instance))
		return error_origin(-errno);
	return 0;
}

/* The job itself, and what it has of each rank and node. */
static uint64_t ranks_bytes(const struct agent_join *join)
{
	return sizeof(struct agent_job) + (uint64_t)join->size * RANK_BYTES +
	       (uint64_t)join->local_size * LOCAL_RANK_BYTES;
}

int agent_job_no_memory(const struct agent_job *job, int error, struct failure *failure)
{
	return account_no_memory(job->memory.account, error, failure);
}

int agent_job_make(struct agent *agent, const struct agent_join *join, struct agent_job **ret_job)
{
	_cleanup_(agent_job_freep) struct agent_job *job = calloc(1, sizeof(*job));
	int r;

	if (!job)
		return error_origin(-ENOMEM);
	job->agent = agent;
	job->holds = 1;
	job->memory.account = account_ref(join->account);
	quota_init(&job->memory.held, UINT64_MAX,
		   account_quota(job->memory.account, ACCOUNT_MEMORY));
	job->memory.bulk.quota = job->order.ordinals.quota = job->tensors.by_name.quota =
		&job->memory.held;
	quota_init(&job->memory.rows, agent->params.job_quota_bytes ?: UINT64_MAX,
		   &job->memory.held);
	job->memory.rows.batch = ROWS_BATCH;
	job->resumption.ledger_fd = -1;
	list_init(&job->link);
	list_init(&job->rounds);
	list_init(&job->resumption.behind);
	list_init(&job->schedule.moving);
	list_init(&job->schedule.scheduled);
	list_init(&job->memory.spare_rounds);
	list_init(&job->memory.spare_parts);
	list_init(&job->fleet.setups);
	list_init(&job->retention.starved);
	list_init(&job->retention.in_place);
	list_init(&job->retention.spare_in_place);
	job->agent->hooks->made(job);
	agent_quota_init(job);
	(void)snprintf(job->owner.name, sizeof(job->owner.name), "%s", join->job);
	job->shape = (struct agent_shape){
		.size = join->size,
		.local_size = join->local_size,
		.node = join->node,
		.n_nodes = join->n_nodes,
		.min_servers = join->min_servers,
		.part_bytes = join->part_bytes,
		.request_timeout_ms = join->request_timeout_ms,
		.force_distributed = join->force_distributed,
		.gpu_reduce = join->gpu_reduce,
		.gpu_roots = join->gpu_roots,
		.stragglers = join->stragglers,
		.elastic = join->elastic,
		.min_ranks = join->min_ranks,
		.max_ranks = join->max_ranks,
	};
	memcpy(job->owner.secret_digest, join->secret_digest, sizeof(job->owner.secret_digest));
	job->owner.uid = join->uid;
	job->distributed = join->n_nodes > 1 || join->force_distributed;
	if (job->distributed && !agent->params.resume)
		job->resumption.ends = "resume is off";
	job->request_timeout_ns = join->request_timeout_ms * NSEC_PER_MSEC;
	job->formed_by_ns = CLOCK_NEVER;
	job->membership.regroup_by_ns = CLOCK_NEVER;
	job->membership.first = job->membership.number = join->elastic;
	if (quota_charge(&job->memory.held, ranks_bytes(join)))
		return error_origin(-EDQUOT);
	job->memory.held_ranks = ranks_bytes(join);
	job->members = calloc(join->local_size, sizeof(job->members[0]));
	job->n_pending = calloc(join->local_size, sizeof(job->n_pending[0]));
	job->departed.ranks = calloc(join->local_size, sizeof(job->departed.ranks[0]));
	job->membership.out = calloc(join->size, sizeof(job->membership.out[0]));
	job->membership.gone = calloc(join->local_size, sizeof(job->membership.gone[0]));
	if (!job->members || !job->n_pending || !job->departed.ranks || !job->membership.out ||
	    !job->membership.gone)
		return error_origin(-ENOMEM);
	r = new_instance(job);
	if (r)
		return error_trace(r);
	job->sweep.timer.expired = on_timer;
	r = loop_timer_set(agent->params.loop, &job->sweep.timer, clock_now_ns() + TIMER_IDLE_NS);
	if (r)
		return error_trace(r);
	list_push_back(&agent->jobs, &job->link);
	agent->n_changes++;
	*ret_job = TAKE_PTR(job);
	return 0;
}

/* -- Ending ------------------------------------------------------------------------------------------------------- */

void agent_job_detach(struct agent_member *member)
{
	struct agent_job *job = member->job;
	uint32_t at = member->local_rank;

	job->agent->hooks->member_gone(member);
	if (job->members[at] != member)
		at = member->index;
	assert(job->members[at] == member);
	if (job->members[at] == member)
		job->members[at] = NULL;
	job->n_members--;
	if (member->leaving)
		job->departed.n_leaving--;
	if (member->regrouping)
		job->membership.n_regrouping--;
	member->regrouping = false;
	member->job = NULL;
}

void agent_job_over(struct agent_job *job)
{
	job->state = JOB_OVER;
	loop_timer_cancel(&job->sweep.timer);
	loop_abort(&job->departed.letting_go);
	job->agent->hooks->is_over(job);
	agent_job_release(job);
}

/* Rounds under way end by themselves, the sooner as the servers know. */
static void fail(struct agent_job *job, const struct failure *failure, const struct peer *from)
{
	uint64_t number = job->state == JOB_RUNNING ? job->number : 0;

	job->end.failure = *failure;
	if (number)
		log_warning("job %s: failed: %s", job->owner.name, failure->text);
	else
		log_notice("job %s: not formed: %s", job->owner.name, failure->text);
	job->agent->hooks->fails(job, failure, from);
	job->end.number = number;
	agent_job_hold(job);
	agent_job_over(job);
	agent_elastic_end(job);
	job->agent->hooks->news(job);
	agent_job_release(job);
}

bool agent_job_dismiss(struct agent_job *job)
{
	struct agent_member *member = NULL;
	bool leaving;

	while (!member && job->end.n_dismissed < job->shape.local_size)
		member = job->members[job->end.n_dismissed++];
	if (!member)
		return false;
	leaving = member->leaving;
	agent_job_detach(member);
	if (leaving)
		member->departed(member);
	else
		member->ended(member, job->end.number, &job->end.failure);
	return true;
}

/* Its other ranks on this node, where each is a node of its own: servers do not tell this daemon what it told them. */
static bool is_same_run(const struct agent_job *job, const struct agent_job *other)
{
	return stragglers_any(&job->shape.stragglers) && job->number &&
	       job->number == other->number;
}

void agent_job_fail(struct agent_job *job, const struct failure *failure, const struct peer *from)
{
	struct agent_job *other;

	if (job->state == JOB_OVER)
		return;
	agent_job_hold(job);
	fail(job, failure, from);
	list_for_each (other, &job->agent->jobs, link)
		if (other->state != JOB_OVER && is_same_run(job, other))
			fail(other, &job->end.failure, from);
	agent_job_release(job);
}

/* -- Forming ------------------------------------------------------------------------------------------------------ */

int agent_job_order_members(struct agent_job *job)
{
	const struct layout *layout = &job->layout;
	_cleanup_(freep) struct agent_member **ordered = NULL;

	if (layout->n_local != job->shape.local_size ||
	    job->n_members + job->departed.n_before != layout->n_local)
		return error_origin(-EPROTO);
	ordered = calloc(layout->n_local, sizeof(ordered[0]));
	if (!ordered)
		return error_origin(-ENOMEM);
	for (uint32_t i = 0; i < layout->n_local; i++) {
		uint32_t index;

		if (!job->members[i])
			continue;
		index = layout->local_of_rank[job->members[i]->rank];
		if (index == RANK_AWAY || ordered[index])
			return error_origin(-EPROTO);
		ordered[index] = job->members[i];
	}
	if (layout->n_local > 1 && !job->arrivals &&
	    arrivals_new(job->owner.name, "rank", layout->rank_of_local, layout->n_local,
			 &job->agent->spread, &job->arrivals))
		return error_origin(-ENOMEM);
	for (uint32_t i = 0; i < layout->n_local; i++)
		if (ordered[i])
			ordered[i]->index = i;
	free(job->members);
	job->members = TAKE_PTR(ordered);
	return 0;
}

void agent_job_formed(struct agent_job *job)
{
	job->state = JOB_RUNNING;
	job->agent->hooks->runs(job);
	agent_quota_formed(job);
	(void)loop_timer_set(job->agent->params.loop, &job->sweep.timer,
			     clock_now_ns() + TIMER_IDLE_NS);
	log_info("job %s: run %016" PRIx64 "%s: %u ranks on %u nodes, %u here, %zu servers",
		 job->owner.name, job->number, job->resumption.resumed ? ", resumed" : "",
		 job->shape.size, job->shape.n_nodes, job->n_members, job->fleet.n_servers);
	if (agent_resume_ends(job))
		log_notice("job %s: it ends with this daemon's process: %s", job->owner.name,
			   agent_resume_ends(job));
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_member *member = job->members[i];

		if (member)
			member->joined(member, job->number, (uint32_t)job->fleet.n_servers,
				       member->resumed ? -1 : job->resumption.ledger_fd);
		FAILPOINT("job-joined");
	}
	job->resumption.ledger_fd = fd_close(job->resumption.ledger_fd);
	job->agent->hooks->begun(job);
}

void agent_job_form_here(struct agent_job *job)
{
	struct failure failure;
	int r;

	if (job->n_members + job->departed.n_before < job->shape.local_size)
		return;
	r = layout_init(&job->layout, NULL, job->shape.size, 1, 0);
	if (!r)
		r = agent_job_order_members(job);
	if (!r && !job->resumption.resumed &&
	    getrandom(&job->number, sizeof(job->number), 0) != sizeof(job->number))
		r = error_origin(-errno);
	if (!r) {
		job->number |= 1; /* 0 is none */
		job->agent->n_changes++;
		job->part_bytes = job->shape.part_bytes ? job->shape.part_bytes
							: job->agent->params.part_bytes;
		job->part_bytes = MAX(MIN(job->part_bytes, PART_SUM_MAX / job->layout.n_local),
				      PART_BYTES_MIN);
		job->part_bytes -= job->part_bytes % PART_ALIGN;
		r = agent_resume_prepare(job);
	}
	if (r) {
		(void)failure_set(&failure, r, "job %s: cannot be formed: %s", job->owner.name,
				  strerror(-r));
		agent_job_fail(job, &failure, NULL);
		return;
	}
	agent_job_formed(job);
}

static bool is_sibling(const struct agent_job *job, const struct agent_join *join)
{
	return stragglers_any(&job->shape.stragglers) && stragglers_any(&join->stragglers) &&
	       job->shape.node != join->node;
}

static bool has_name(const struct agent_job *job, const struct agent_join *join)
{
	return job->state != JOB_OVER && !job->departed.failure.status &&
	       !strcmp(job->owner.name, join->job) && !is_sibling(job, join);
}

struct agent_job *agent_job_find(struct agent *agent, const struct agent_join *join)
{
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		if (has_name(job, join) && agent_job_is(job, join->job, join->secret_digest))
			return job;
	return NULL;
}

/*
 * Of one whom nobody has joined: the same user has a job of that name with another secret, which has been mistyped, most likely.
 * Nobody else's name is told by saying so.
 */
static const char *hint(const struct agent_job *job)
{
	struct agent_job *other;

	list_for_each (other, &job->agent->jobs, link)
		if (other != job && other->state != JOB_OVER &&
		    other->owner.uid == job->owner.uid &&
		    !strcmp(other->owner.name, job->owner.name) &&
		    !agent_job_is(other, job->owner.name, job->owner.secret_digest))
			return "; this user has a job of that name here with another secret";
	return "";
}

/* Those that are over and wait to be freed are none. */
static size_t count_jobs(struct agent *agent)
{
	struct agent_job *job;
	size_t n = 0;

	list_for_each (job, &agent->jobs, link)
		n += job->holds > 0;
	return n;
}

int agent_job_new(struct agent *agent, const struct agent_join *join, struct agent_job **ret_job,
		  struct failure *failure)
{
	int r;

	if (count_jobs(agent) >= agent->params.max_jobs)
		return failure_set(failure, -EDQUOT, "this daemon has %u jobs already",
				   agent->params.max_jobs);
	r = account_charge(join->account, ACCOUNT_JOBS, 1, failure);
	if (r)
		return r;
	r = agent_job_make(agent, join, ret_job);
	if (r) {
		account_release(join->account, ACCOUNT_JOBS, 1);
		return account_no_memory(join->account, -r, failure);
	}
	(*ret_job)->memory.counted = true;
	return 0;
}

/* The job that the rank belongs to, found and compared, or made. */
static int job_for(struct agent *agent, const struct agent_join *join, struct agent_job **ret_job,
		   struct failure *failure)
{
	struct agent_job *job = agent_job_find(agent, join);
	int r;

	if (job) {
		r = agent_join_compare(job, join, failure);
		if (!r)
			r = agent_resume_check_new(job, join, failure);
		if (r)
			return r;
		if (job->n_members == job->shape.local_size || job->layout.size)
			return failure_set(failure, -EEXIST,
					   "job %s: all its ranks on this node are there already",
					   join->job);
		*ret_job = job;
		return 0;
	}
	return agent_job_new(agent, join, ret_job, failure);
}

void agent_job_add(struct agent_job *job, struct agent_member *member,
		   const struct agent_join *join, uint64_t timeout_ns)
{
	uint64_t deadline_ns = clock_now_ns() + timeout_ns;

	member->job = job;
	member->rank = join->rank;
	member->local_rank = join->local_rank;
	member->process = join->process;
	member->index = 0;
	member->leaving = false;
	member->resumed = false;
	member->regrouping = false;
	member->newcomer = NULL;
	list_init(&member->declarations);
	job->members[join->local_rank] = member;
	job->n_members++;
	agent_absence_begin(&job->resumption.absence);
	job->resumption.ends = job->resumption.ends ?: join->cannot_resume;
	if (deadline_ns < job->formed_by_ns) {
		job->formed_by_ns = deadline_ns;
		job->forming_timeout_ns = timeout_ns;
		agent_job_watch(job, deadline_ns);
	}
}

int agent_join_take(const struct agent *agent, const struct agent_join *given,
		    struct agent_join *ret_join, struct failure *failure)
{
	int r;

	*ret_join = *given;
	if (agent->closed)
		return failure_set(failure, -ESHUTDOWN, "the daemon is about to stop");
	if (!ret_join->request_timeout_ms)
		ret_join->request_timeout_ms = REQUEST_TIMEOUT_MS;
	ret_join->request_timeout_ms = MIN(ret_join->request_timeout_ms, (uint64_t)TIMEOUT_MAX_MS);
	ret_join->timeout_ms = MIN(ret_join->timeout_ms, (uint64_t)TIMEOUT_MAX_MS);
	r = agent_join_check(ret_join, failure);
	if (!r && agent_join_digest(ret_join))
		r = failure_set(failure, -ENOMEM, "job %s: out of memory", ret_join->job);
	if (r)
		return r;
	/* Once for each rank, as it joins: what goes over all ranks of a job looks at no process. */
	ret_join->process = process_see(ret_join->pid);
	if (!stragglers_any(&ret_join->stragglers))
		return 0;
	/* No rank waits for another: each is a node of its own, also where several share a daemon. */
	ret_join->node = ret_join->rank;
	ret_join->n_nodes = ret_join->size;
	ret_join->local_rank = 0;
	ret_join->local_size = 1;
	ret_join->force_distributed = true;
	return 0;
}

int agent_join(struct agent *agent, struct agent_member *member, const struct agent_join *given,
	       struct failure *failure)
{
	struct agent_job *job = NULL;
	struct agent_join join;
	int r;

	r = agent_join_take(agent, given, &join, failure);
	if (!r && join.newcomer)
		return agent_elastic_wait(agent, member, &join, failure);
	if (!r)
		r = job_for(agent, &join, &job, failure);
	if (r)
		return r;

	agent_job_add(job, member, &join, join.timeout_ms * NSEC_PER_MSEC);
	if (job->resumption.resumed)
		agent_resume_form(job);
	else if (job->distributed && !job->fleet.querying && !job->fleet.view)
		job->agent->hooks->opens(job);
	else if (job->distributed)
		job->agent->hooks->joins(job);
	else
		agent_job_form_here(job);
	return 0;
}

/* -- Deadlines ---------------------------------------------------------------------------------------------------- */

void agent_job_watch(struct agent_job *job, uint64_t deadline_ns)
{
	deadline_ns = MAX(deadline_ns, job->sweep.not_before_ns);
	if (job->state == JOB_OVER || deadline_ns >= job->sweep.timer.at_ns)
		return;
	(void)loop_timer_set(job->agent->params.loop, &job->sweep.timer, deadline_ns);
}

/*
 * The rank of this node's local rank 0, if nothing contradicts that ranks are numbered node by node, as launchers do
 * unless told otherwise. Where one node has all ranks it is 0 however they are numbered.
 */
static bool first_rank(const struct agent_job *job, uint32_t *ret_first)
{
	uint64_t first = (uint64_t)job->shape.node * job->shape.local_size;

	*ret_first = 0;
	if (job->shape.n_nodes == 1)
		return true;
	if ((uint64_t)job->shape.n_nodes * job->shape.local_size != job->shape.size)
		return false;
	for (uint32_t i = 0; i < job->shape.local_size; i++) {
		const struct agent_member *member = job->members[i];

		if (member && member->rank != first + member->local_rank)
			return false;
	}
	*ret_first = (uint32_t)first;
	return true;
}

/* Who is missing here, by rank where that can be known, else by local rank. */
static const char *name_missing(const struct agent_job *job, struct agent_ranks_text *missing,
				bool by_rank, uint32_t first)
{
	_cleanup_(freep) bool *here = calloc(job->shape.local_size, sizeof(*here));

	if (!here)
		return "ranks";
	for (uint32_t i = 0; i < job->shape.local_size; i++) {
		const struct agent_member *member = job->members[i];

		if (member)
			here[by_rank ? member->rank - first : member->local_rank] = true;
	}
	for (uint32_t i = 0; i < job->shape.local_size; i++)
		if (!here[i])
			agent_ranks_add(missing, first + i);
	return agent_ranks_end(missing);
}

static void forming_expired(struct agent_job *job, uint64_t now_ns)
{
	uint32_t n_missing = job->shape.local_size - job->n_members;
	struct agent_ranks_text missing = { 0 };
	struct failure failure;
	uint32_t first;
	char time[32];

	(void)agent_time_text(time, job->forming_timeout_ns);
	/*
	 * The home server knows best whom all wait for. It would miss our ranks too, were they taken back a moment before
	 * its own deadline.
	 */
	if (now_ns < job->formed_by_ns + SERVER_GRACE_NS && (job->fleet.join || !n_missing)) {
		(void)loop_timer_set(job->agent->params.loop, &job->sweep.timer,
				     job->formed_by_ns + SERVER_GRACE_NS);
		return;
	}
	if (n_missing) {
		bool by_rank = first_rank(job, &first);
		const char *names = name_missing(job, &missing, by_rank, first);

		(void)failure_set(&failure, -ETIMEDOUT, "job %s: %s%s did not join within %s%s",
				  job->owner.name, by_rank ? "" : "local ", names, time, hint(job));
	} else {
		(void)failure_set(&failure, -ETIMEDOUT,
				  "job %s: all its ranks on this node are there, but %s within %s",
				  job->owner.name,
				  !job->fleet.view   ? "no servers were found"
				  : job->layout.size ? "a server did not answer"
						     : "its home server did not answer",
				  time);
	}
	agent_job_fail(job, &failure, NULL);
}

static void on_timer(struct loop_timer *timer)
{
	struct agent_job *job = container_of(timer, struct agent_job, sweep.timer);
	uint64_t now_ns = clock_now_ns();

	if (job->state == JOB_FORMING) {
		if (job->resumption.resumed)
			job->agent->hooks->ranks_absent(job);
		else
			forming_expired(job, now_ns);
		return;
	}
	(void)loop_timer_set(job->agent->params.loop, timer, now_ns + TIMER_IDLE_NS);
	agent_job_hold(job);
	job->agent->hooks->news(job);
	agent_job_watch(job, agent_elastic_expire(job, now_ns));
	agent_job_release(job);
}

/* -- Leaving ------------------------------------------------------------------------------------------------------ */

/* A rank is gone before the job was complete. */
static void forming_without(struct agent_job *job, uint32_t index, uint32_t rank, uint32_t pid,
			    const char *how)
{
	struct failure failure;

	(void)failure_set(&failure, -EPIPE, "rank %u (pid %u) %s", rank, pid, how);
	if (job->agent->hooks->rank_gone_early(job, index, rank, &failure))
		return;
	if (!job->n_members) {
		agent_job_over(job);
	} else if (job->layout.size || job->resumption.resumed) {
		agent_job_fail(job, &failure, NULL);
	} else if (job->distributed) {
		/* With fewer ranks and the old number it would look like an older JOIN that was overtaken. */
		(void)new_instance(job);
		job->agent->hooks->joins(job);
	}
}

/* No rank is here any more, and others go on without this node. What is under way is of one that died as it left. */
static void end_without_ranks(struct agent_job *job)
{
	struct failure failure;

	agent_departed_say(job);
	if (!job->n_busy) {
		agent_job_over(job);
		return;
	}
	(void)failure_set(&failure, -EPIPE, "the last rank here of job %s died as it left",
			  job->owner.name);
	job->membership.goes = true;
	agent_job_fail(job, &failure, NULL);
}

void agent_job_end_departed(struct agent_job *job)
{
	if (job->n_members || job->state != JOB_RUNNING || job->sweep.n_without)
		return;
	/* The others would wait for this node, had nobody heard that it has left. */
	if (job->retention.keeps &&
	    (job->fleet.n_resyncing || (!job->fleet.n_attached && !job->shape.elastic))) {
		if (!job->departed.unsaid)
			log_notice("job %s: left by all its ranks here; waiting for a server to "
				   "tell it",
				   job->owner.name);
		job->departed.unsaid = true;
		return;
	}
	log_info("job %s: run %016" PRIx64 ": left by all its ranks here", job->owner.name,
		 job->number);
	end_without_ranks(job);
	agent_elastic_end(job);
}

/* Of all members together, tens of thousands each, in one turn. */
#define LET_GO_STEP 256

static bool on_let_go(struct chore *chore)
{
	struct agent_job *job = container_of(chore, struct agent_job, departed.letting_go);
	bool more;

	agent_job_hold(job);
	job->departed.lets_go = false;
	agent_job_let_leave(job);
	agent_elastic_try(job);
	more = job->departed.lets_go && job->state != JOB_OVER;
	agent_job_release(job);
	return more;
}

bool agent_job_lets_go(struct agent_job *job, bool regroups)
{
	uint32_t left = LET_GO_STEP;

	for (uint32_t i = 0; i < job->layout.n_local && left; i++) {
		struct agent_member *member = job->members[i];

		if (member && (regroups || (member->leaving && !job->n_pending[i])))
			left -= job->agent->hooks->member_goes(member, left);
	}
	if (left)
		return true;
	job->departed.lets_go = true;
	job->departed.letting_go.step = on_let_go;
	loop_begin(job->agent->params.loop, &job->departed.letting_go);
	return false;
}

void agent_job_let_leave(struct agent_job *job)
{
	agent_departed_idle(job);
	if (job->state != JOB_RUNNING || !job->departed.n_leaving || !job->departed.due ||
	    !agent_resume_caught_up(job) || !agent_job_lets_go(job, false))
		return;
	job->departed.due = false;
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_member *member = job->members[i];

		if (!member || !member->leaving || job->n_pending[i])
			continue;
		job->departed.ranks[i] = true;
		if (job->resumption.ledger)
			ledger_leave(job->resumption.ledger, member->rank);
		FAILPOINT("job-left");
		agent_job_detach(member);
		member->departed(member);
	}
	agent_job_end_departed(job);
	agent_elastic_try(job);
}

void agent_job_leave_now(struct agent_job *job)
{
	loop_abort(&job->departed.letting_go);
	while (job->departed.lets_go && job->state != JOB_OVER) {
		job->departed.lets_go = false;
		agent_job_let_leave(job);
	}
}

void agent_leave(struct agent_member *member)
{
	struct agent_job *job = member->job;
	uint32_t rank = member->rank, pid = member->process.pid;
	struct failure failure;

	if (member->newcomer) {
		agent_elastic_forget(member);
		member->departed(member);
		return;
	}
	if (job->state == JOB_FORMING) {
		agent_job_detach(member);
		forming_without(job, member->index, rank, pid, "left");
		member->departed(member);
		return;
	}
	if (member->leaving)
		return;
	member->leaving = true;
	job->departed.n_leaving++;
	job->departed.due = true;
	if (job->shape.elastic) {
		agent_job_hold(job);
		(void)failure_set(&failure, -ECANCELED, "this rank left job %s", job->owner.name);
		job->agent->hooks->rank_gone(job, member->index, &failure, true);
		agent_job_let_leave(job);
		agent_elastic_try(job);
		agent_job_release(job);
		return;
	}
	if (!job->departed.failure.status)
		(void)failure_set(&job->departed.failure, -EPIPE, "rank %u has left job %s", rank,
				  job->owner.name);
	agent_job_hold(job);
	if (!job->sweep.leaves.status) {
		(void)failure_set(&job->sweep.leaves, -ECANCELED, "rank %u left job %s", rank,
				  job->owner.name);
		job->agent->hooks->news(job);
	}
	agent_job_let_leave(job);
	agent_job_release(job);
}

void agent_abandon(struct agent_member *member, const char *how)
{
	struct agent_job *job = member->job;
	uint32_t index = member->index;
	bool was_leaving = member->leaving;
	struct failure failure;

	if (member->newcomer)
		agent_elastic_forget(member);
	if (!job)
		return;
	agent_job_detach(member);
	if (job->resumption.suspended)
		return;
	if (job->state == JOB_FORMING) {
		forming_without(job, index, member->rank, member->process.pid, how);
		return;
	}
	(void)failure_set(&failure, -EPIPE, "rank %u (pid %u) of job %s %s", member->rank,
			  member->process.pid, job->owner.name, how);
	if (!job->shape.elastic) {
		agent_job_fail(job, &failure, NULL);
		return;
	}
	agent_job_hold(job);
	job->agent->hooks->rank_gone(job, index, &failure, was_leaving);
	if (!job->n_members && job->state == JOB_RUNNING && !job->sweep.n_without)
		end_without_ranks(job);
	agent_elastic_try(job);
	agent_job_release(job);
}
