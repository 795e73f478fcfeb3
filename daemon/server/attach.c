#include "server/job.h"

#include "base/clock.h"
#include "base/log.h"
#include "server/round.h"

/* Why an attach does not fit the job that its number names; NULL when it does. */
static const char *attach_differs(const struct job *job, const struct attach *attach)
{
	if (strcmp(job->name, attach->job))
		return "name";
	if (job->size != attach->size)
		return "size";
	if (job->n_nodes != attach->n_nodes)
		return "number of nodes";
	if (job->request_timeout_ms != attach->request_timeout_ms)
		return "request timeout";
	if (memcmp(job->node_of_rank, attach->node_of_rank,
		   job->size * sizeof(job->node_of_rank[0])))
		return "layout";
	return NULL;
}

static int attach_new(struct server *server, uint64_t number, const struct attach *attach,
		      struct job **ret_job, struct failure *failure)
{
	_cleanup_(job_freep) struct job *job = NULL;
	int r;

	r = job_new(server, attach->job, attach->size, attach->n_nodes, &job, failure);
	if (r)
		return r;
	job->request_timeout_ms = attach->request_timeout_ms;
	job->since_ns = clock_now_ns();
	memcpy(job->node_of_rank, attach->node_of_rank, job->size * sizeof(job->node_of_rank[0]));
	r = job_start(job, number);
	if (!r)
		r = attach_expect(job, job->request_timeout_ms);
	if (r)
		return failure_set(failure, r, "job %s: out of memory", job->name);
	*ret_job = TAKE_PTR(job);
	return 0;
}

/*
 * A node that attaches with a new number has ended its part in the older run of the job; should that news have missed
 * this server, the older run would stay here for ever.
 */
static void end_older(struct server *server, uint64_t number, const struct attach *attach,
		      const struct peer *peer)
{
	struct failure failure = { 0 };
	struct job *job, *tmp;

	list_for_each_safe (job, tmp, &server->jobs, link) {
		struct job_node *node;

		if (job->state != JOB_RUNNING || job->number == number ||
		    strcmp(job->name, attach->job) || attach->node >= job->n_nodes)
			continue;
		node = &job->nodes[attach->node];
		if (node->peer != peer || node->instance == attach->instance)
			continue;
		(void)failure_set(&failure, -ECONNRESET, "job %s: node %u has started the job anew",
				  job->name, attach->node);
		job_fail(job, &failure, peer);
		return;
	}
}

/* The job that an attach is for, made if need be; or -errno with failure filled. */
static int attach_find(struct server *server, const struct delivery *delivery,
		       const struct attach *attach, struct job **ret_job, struct failure *failure)
{
	uint64_t number = delivery->header.job;
	const struct failure *over = job_over(server, number);
	struct job *job = job_find(server, number);
	const char *what;

	if (over) {
		*failure = *over;
		return failure->status;
	}
	if (!number)
		return failure_set(failure, -EPROTO, "job %s: an attach without number",
				   attach->job);
	if (!job)
		return attach_new(server, number, attach, ret_job, failure);
	what = attach_differs(job, attach);
	if (what)
		return failure_set(
			failure, -EINVAL,
			"job %s: node %u attaches with another %s than the nodes before it",
			job->name, attach->node, what);
	*ret_job = job;
	return 0;
}

static int attach_node(struct job *job, const struct attach *attach, struct peer *peer,
		       struct failure *failure)
{
	struct job_node *node = &job->nodes[attach->node];

	if ((node->peer && node->peer != peer) || (job->home && node->instance != attach->instance))
		return failure_set(failure, -EACCES, "job %s: %s does not speak for node %u",
				   job->name, peer_name(peer), attach->node);
	if (node->left)
		return failure_set(failure, -ENOTCONN, "job %s: node %u has left", job->name,
				   attach->node);
	node->peer = peer;
	node->instance = attach->instance;
	if (!node->attached && ++job->n_attached == job->n_nodes)
		job->attach_by_ns = CLOCK_NEVER;
	node->attached = true;
	return 0;
}

void attach_call(struct server *server, struct delivery *delivery)
{
	_cleanup_(freep) struct attach *attach = NULL;
	struct data_header answer = { .op = DATA_OK, .job = delivery->header.job };
	struct failure failure = { 0 };
	struct job *job = NULL;
	int r;

	r = attach_decode(delivery->payload, delivery->header.len, &attach, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	end_older(server, delivery->header.job, attach, delivery->peer);
	r = attach_find(server, delivery, attach, &job, &failure);
	if (!r)
		r = attach_node(job, attach, delivery->peer, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	answer.epoch = delivery->header.epoch;
	answer.node = attach->node;
	delivery_answer(delivery, &answer, NULL, NULL);
}

int attach_check(const struct job *job, const struct peer *peer, uint32_t node,
		 struct failure *failure)
{
	if (node >= job->n_nodes)
		return failure_set(failure, -EPROTO, "job %s: there is no node %u", job->name,
				   node);
	if (job->nodes[node].peer != peer)
		return failure_set(failure, -EACCES, "job %s: %s does not speak for node %u",
				   job->name, peer_name(peer), node);
	if (job->nodes[node].left)
		return failure_set(failure, -ENOTCONN, "job %s: node %u has left", job->name, node);
	return 0;
}

static bool any_lives(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (job->nodes[i].peer && !job->nodes[i].left)
			return true;
	}
	return false;
}

static void end_left(struct job *job)
{
	struct failure failure = { 0 };

	(void)failure_set(&failure, -ENOTCONN, "job %s: over: all its ranks have left", job->name);
	job_end(job, &failure);
}

int attach_expect(struct job *job, uint64_t timeout_ms)
{
	job->attach_timeout_ms = timeout_ms;
	job->attach_by_ns = clock_now_ns() + timeout_ms * NSEC_PER_MSEC;
	return error_trace(job_wake_by(job, job->attach_by_ns));
}

/*
 * A node that was here to join, or was said to be, has not come. Where all others have left, it may have been lost
 * without this server's knowledge: nothing is to be said then.
 */
void attach_expired(struct job *job)
{
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct ranks_text missing;
	const char *ranks;

	if (!any_lives(job)) {
		end_left(job);
		return;
	}
	ranks_init(&missing);
	for (uint32_t i = 0; i < job->size; i++) {
		if (!job->nodes[job->node_of_rank[i]].attached)
			ranks_add(&missing, i);
	}
	ranks = ranks_end(&missing);
	(void)failure_set(&failure, -ETIMEDOUT, "job %s: %s %s joined but not attached within %s s",
			  job->name, ranks, ranks_have(&missing),
			  job_seconds_text(job->attach_timeout_ms, &seconds));
	job_fail(job, &failure, NULL);
}

void attach_leave(struct job *job, uint32_t node)
{
	job->nodes[node].left = true;
	if (++job->n_left == job->n_nodes) {
		end_left(job);
		return;
	}
	declare_left(job);
	round_left(job, node);
}

void attach_lost(struct job *job, const struct peer *peer, const char *why)
{
	struct failure failure = { 0 };
	struct node_text text;
	uint32_t node;

	while ((node = job_node_of(job, peer)) != NODE_NONE) {
		job->nodes[node].peer = NULL;
		if (job->nodes[node].left || failure.status)
			continue;
		(void)failure_set(&failure, -ECONNRESET, "job %s: %s: %s was lost: %s", job->name,
				  job_node_text(job, node, &text), peer_name(peer), why);
	}
	if (failure.status)
		job_fail(job, &failure, peer);
}
