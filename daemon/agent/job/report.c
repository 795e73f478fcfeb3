/*
 * The agent in words and plain structs: what a round waits for, for errors; jobs, tensors, ranks
 * and servers, for operators. The agent's other files and daemon/report.c call.
 */
#include "agent/round/part.h"
#include "base/clock.h"
#include <inttypes.h>
#include <stdio.h>

void agent_ranks_add(struct agent_ranks_text *ranks, uint32_t rank)
{
	/* Room is kept for " and N more". */
	if (ranks->len + 32 > sizeof(ranks->text)) {
		ranks->n_more++;
		return;
	}
	if (!ranks->n++)
		ranks->len = (size_t)snprintf(ranks->text, sizeof(ranks->text), "ranks %u", rank);
	else
		ranks->len += (size_t)snprintf(ranks->text + ranks->len,
					       sizeof(ranks->text) - ranks->len, ", %u", rank);
}

const char *agent_ranks_end(struct agent_ranks_text *ranks)
{
	if (!ranks->n)
		return "no rank";
	if (ranks->n_more)
		(void)snprintf(ranks->text + ranks->len, sizeof(ranks->text) - ranks->len,
			       " and %u more", ranks->n_more);
	else if (ranks->n == 1) /* "ranks 3" -> "rank 3" */
		memmove(ranks->text + 4, ranks->text + 5, ranks->len - 4);
	return ranks->text;
}

const char *agent_server_name(const struct agent_job *job, size_t server)
{
	const struct agent_send_queue *send_queue = job->fleet.servers[server].send_queue;

	return send_queue ? peer_name(send_queue->peer) : job->fleet.servers[server].member.name;
}

const char *agent_time_text(char text[32], uint64_t ns)
{
	uint64_t ms = ns / NSEC_PER_MSEC;

	if (ms < 1000)
		(void)snprintf(text, 32, "%" PRIu64 " ms", ms);
	else if (ms < 100000 && ms % 1000)
		(void)snprintf(text, 32, "%" PRIu64 ".%" PRIu64 " s", ms / 1000, ms % 1000 / 100);
	else
		(void)snprintf(text, 32, "%" PRIu64 " s", ms / 1000);
	return text;
}

void agent_round_waiting_for(const struct agent_round *round, char *text, size_t size)
{
	const struct agent_tensor *tensor = round->tensor;
	const struct layout *layout = &tensor->job->layout;
	struct agent_ranks_text missing = { 0 };
	char time[32];

	text[0] = 0;
	if (round->state == ROUND_FAILED)
		return;
	(void)agent_time_text(time, clock_now_ns() - round->times.started_ns);
	for (uint32_t i = 0; round->state == ROUND_GATHERING && i < layout->n_local; i++)
		if (!round->ranks[i].came)
			agent_ranks_add(&missing, layout->rank_of_local[i]);
	if (missing.n)
		(void)snprintf(text, size, "%s (tensor %.60s, round %" PRIu64 ") for %s",
			       agent_ranks_end(&missing), tensor->name, round->number, time);
	else if (!tensor->key)
		(void)snprintf(text, size, "the declaration of tensor %.60s for %s", tensor->name,
			       time);
	else if (tensor->job->distributed)
		(void)snprintf(text, size, "servers (tensor %.60s, round %" PRIu64 ") for %s",
			       tensor->name, round->number, time);
}

/* Open rounds that a job's status is told by: the first of those that may be hundreds of thousands. */
#define STATUS_ROUNDS 256

static const char *state_name(const struct agent_job *job)
{
	switch (job->state) {
	case JOB_FORMING:
		return job->resumption.resumed ? "resuming" : "forming";
	case JOB_RUNNING:
		return job->departed.failure.status ? "leaving" : "running";
	default:
		return job->end.failure.status ? "failed" : "leaving";
	}
}

static void describe_forming(const struct agent_job *job, char *text, size_t size)
{
	struct agent_ranks_text missing = { 0 };

	for (uint32_t i = 0; i < job->shape.local_size; i++)
		if (!job->members[i])
			agent_ranks_add(&missing, i);
	if (missing.n)
		(void)snprintf(text, size, "local %s", agent_ranks_end(&missing));
	else
		(void)snprintf(text, size, "other nodes");
}

/* Rounds are in the order in which they began, but for those that a sweep has seen to. */
static const struct agent_round *oldest_round(const struct agent_job *job)
{
	const struct agent_round *round, *oldest = NULL;
	unsigned n = 0;

	list_for_each (round, &job->rounds, job_link) {
		if (n++ == STATUS_ROUNDS)
			break;
		if (round->state != ROUND_FAILED &&
		    (!oldest || round->times.started_ns < oldest->times.started_ns))
			oldest = round;
	}
	return oldest;
}

static void describe_job(const struct agent_job *job, struct agent_job_info *info)
{
	const struct agent_round *oldest;

	*info = (struct agent_job_info){
		.number = job->number,
		.state = state_name(job),
		.size = agent_elastic_size(job),
		.n_nodes = job->shape.n_nodes,
		.n_local = job->n_members,
		.rounds = job->n_rounds,
		.bytes = job->n_bytes,
		.in_flight = job->n_in_flight,
		.ends = agent_resume_ends(job),
	};
	(void)snprintf(info->name, sizeof(info->name), "%s", job->owner.name);
	job->agent->hooks->describe_gpu(job, info->gpu, sizeof(info->gpu));
	if (job->state == JOB_FORMING) {
		describe_forming(job, info->waiting_for, sizeof(info->waiting_for));
		return;
	}
	oldest = oldest_round(job);
	if (oldest)
		agent_round_waiting_for(oldest, info->waiting_for, sizeof(info->waiting_for));
}

bool agent_member_job(const struct agent_member *member, struct agent_job_info *ret_info)
{
	if (member->job)
		describe_job(member->job, ret_info);
	else if (member->newcomer)
		*ret_info = (struct agent_job_info){ .state = "waiting" };
	return member->job || member->newcomer;
}

int agent_jobs(struct agent *agent, struct agent_job_info **ret_jobs, size_t *ret_n)
{
	struct agent_job_info *jobs;
	struct agent_job *job;
	size_t n = 0;

	list_for_each (job, &agent->jobs, link)
		n++;
	jobs = calloc(MAX(n, (size_t)1), sizeof(*jobs));
	if (!jobs)
		return error_origin(-ENOMEM);
	n = 0;
	list_for_each (job, &agent->jobs, link)
		describe_job(job, &jobs[n++]);
	*ret_jobs = jobs;
	*ret_n = n;
	return 0;
}

void agent_each_job(const struct agent *agent,
		    void (*each)(void *user, const char *name, uint64_t number), void *user)
{
	const struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		each(user, job->owner.name, job->number);
}

uint64_t agent_n_changes(const struct agent *agent)
{
	return agent->n_changes;
}

/* The newest of what may be several users' jobs. */
static struct agent_job *job_named(struct agent *agent, const char *name)
{
	struct agent_job *job, *found = NULL;

	list_for_each (job, &agent->jobs, link)
		if (job_is_called(job->owner.name, job->number, name))
			found = job;
	return found;
}

/* Who was last most often. */
static void describe_last(const struct agent_tensor *tensor, struct agent_tensor_info *info)
{
	const struct layout *layout = &tensor->job->layout;
	uint64_t n = 0;
	uint32_t most = 0;

	for (uint32_t i = 0; i < layout->n_local; i++) {
		n += tensor->n_last[i];
		if (tensor->n_last[i] > tensor->n_last[most])
			most = i;
	}
	if (n)
		(void)snprintf(info->last, sizeof(info->last), "rank %u, %u %%",
			       layout->rank_of_local[most],
			       (unsigned)(100 * tensor->n_last[most] / n));
	info->spread_ns = tensor->spread_ns;
}

static void describe_tensor(const struct agent_tensor *tensor, struct agent_tensor_info *info)
{
	const struct agent_round *round = list_first(&tensor->rounds, struct agent_round, link);

	info->key = tensor->key;
	info->dtype = tensor->dtype;
	info->elements = tensor->elements;
	info->rounds = tensor->n_rounds;
	(void)snprintf(info->name, sizeof(info->name), "%s", tensor->name);
	describe_last(tensor, info);
	if (tensor->failure.status)
		(void)snprintf(info->waiting_for, sizeof(info->waiting_for), "nothing: %.120s",
			       tensor->failure.text);
	else if (round)
		agent_round_waiting_for(round, info->waiting_for, sizeof(info->waiting_for));
}

int agent_tensors(struct agent *agent, const char *name, size_t n_max,
		  struct agent_tensor_info **ret_tensors, size_t *ret_n, uint64_t *ret_total)
{
	struct agent_job *job = job_named(agent, name);
	struct agent_tensor_info *tensors;
	struct map_entry *entry;
	size_t n = 0, n_here;

	if (!job)
		return -ENOENT;
	n_here = (size_t)MIN(job->tensors.n, (uint64_t)n_max);
	tensors = calloc(MAX(n_here, (size_t)1), sizeof(*tensors));
	if (!tensors)
		return error_origin(-ENOMEM);
	for (entry = map_first(&job->tensors.by_name); n < n_here;
	     entry = map_next(&job->tensors.by_name, entry))
		describe_tensor(container_of(entry, struct agent_tensor, entry), &tensors[n++]);
	*ret_tensors = tensors;
	*ret_n = n;
	*ret_total = job->tensors.n;
	return 0;
}

/* Where each rank is a node of its own, those of this daemon are apart. */
static const struct agent_job *home_of(const struct agent_job *job, uint32_t rank)
{
	const struct agent_job *other;

	if (!stragglers_any(&job->shape.stragglers))
		return job;
	list_for_each (other, &job->agent->jobs, link)
		if (other->number == job->number && other->layout.size > rank &&
		    other->layout.local_of_rank[rank] != RANK_AWAY)
			return other;
	return job;
}

static const char *rank_state(const struct agent_job *job, uint32_t rank)
{
	uint32_t local = job->layout.local_of_rank[rank];

	if (local == RANK_AWAY && job != home_of(job, rank))
		return rank_state(home_of(job, rank), rank);
	if (local == RANK_AWAY)
		return "joined";
	if (job->departed.ranks && job->departed.ranks[local])
		return "left";
	if (job->membership.out[rank])
		return "gone";
	if (!job->members[local])
		return "missing";
	return job->members[local]->leaving ? "leaving" : "here";
}

/* While the job forms, only those here are known. */
static void describe_here(const struct agent_job *job, struct agent_rank_info *ranks)
{
	for (uint32_t i = 0; i < job->shape.local_size; i++) {
		struct agent_rank_info *info;

		if (!job->members[i])
			continue;
		info = &ranks[job->members[i]->rank];
		info->node = job->shape.node;
		(void)snprintf(info->state, sizeof(info->state), "here");
	}
}

int agent_ranks(struct agent *agent, const char *name, struct agent_rank_info **ret_ranks,
		size_t *ret_n)
{
	struct agent_job *job = job_named(agent, name);
	struct agent_rank_info *ranks;
	bool running;

	if (!job)
		return -ENOENT;
	ranks = calloc(job->shape.size, sizeof(*ranks));
	if (!ranks)
		return error_origin(-ENOMEM);
	running = job->state != JOB_FORMING && job->layout.size;
	for (uint32_t i = 0; i < job->shape.size; i++) {
		ranks[i].rank = i;
		ranks[i].node = running ? job->layout.node_of_rank[i] : 0;
		(void)snprintf(ranks[i].state, sizeof(ranks[i].state), "%s",
			       running ? rank_state(job, i) : "missing");
	}
	if (!running)
		describe_here(job, ranks);
	*ret_ranks = ranks;
	*ret_n = job->shape.size;
	return 0;
}

static void describe_server(const struct agent_job *job, size_t number,
			    struct agent_server_info *info)
{
	const struct agent_server *server = &job->fleet.servers[number];
	size_t n = 0;

	for (size_t i = 0; i < job->placement.n_stripes; i++)
		n += job->placement.stripes[i] == number;
	info->share = (uint32_t)(1000 * n / job->placement.n_stripes);
	info->added = number >= job->fleet.n_viewed;
	info->state = !agent_placement_has(job, number) ? "out" : server->attached ? "in" : "lost";
	(void)snprintf(info->name, sizeof(info->name), "%s", server->member.name);
	(void)snprintf(info->address, sizeof(info->address), "%s", server->member.address);
}

int agent_servers(struct agent *agent, const char *name, struct agent_server_info **ret_servers,
		  size_t *ret_n)
{
	struct agent_job *job = job_named(agent, name);
	struct agent_server_info *servers;
	size_t n = job && job->state == JOB_RUNNING ? job->fleet.n_servers : 0;

	if (!job)
		return -ENOENT;
	servers = calloc(MAX(n, (size_t)1), sizeof(*servers));
	if (!servers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++)
		describe_server(job, i, &servers[i]);
	*ret_servers = servers;
	*ret_n = n;
	return 0;
}

int agent_arrivals(struct agent *agent, const char *name, struct arrivals_info **ret_arrivals,
		   size_t *ret_n)
{
	struct agent_job *job = job_named(agent, name);
	struct arrivals_info *infos;
	size_t n;

	if (!job)
		return -ENOENT;
	n = job->arrivals ? arrivals_n(job->arrivals) : 0;
	infos = calloc(MAX(n, (size_t)1), sizeof(*infos));
	if (!infos)
		return error_origin(-ENOMEM);
	if (job->arrivals)
		arrivals_info(job->arrivals, infos);
	*ret_arrivals = infos;
	*ret_n = n;
	return 0;
}

void agent_counters(const struct agent *agent, uint64_t *ret_n_requests, uint64_t *ret_n_failed)
{
	*ret_n_requests = metric_get(&agent->requests);
	*ret_n_failed = metric_get(&agent->failed);
}
