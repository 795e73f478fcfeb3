/*
 * ATTACH: which peer speaks for which node of a job, and what follows when a node does not come
 * or its peer is lost. A job begins here at servers other than its home. server.c calls for each
 * ATTACH, job.c when peers of the job are lost, and when the time is up.
 */
#include "server/job/job.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/job/forget.h"
#include "server/round/accumulate.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/round.h"
#include "server/round/rows.h"

/* Elastic: nodes attach at all servers at once, but machines may be busy. */
#define ELASTIC_ATTACH_MS UINT64_C(10000)

const char *attach_differs(const struct job *job, const struct attach *attach)
{
	if (!job_is(job, attach->job, attach->secret_digest))
		return "name or owner";
	if (job->size != attach->size)
		return "size";
	if (job->n_nodes != attach->n_nodes)
		return "number of nodes";
	if (job->request_timeout_ms != attach->request_timeout_ms)
		return "request timeout";
	if (memcmp(job->node_of_rank, attach->node_of_rank,
		   job->size * sizeof(job->node_of_rank[0])))
		return "layout";
	if (!stragglers_equal(&job->stragglers, &attach->stragglers))
		return "word on stragglers";
	if (job->membership.elastic != attach->elastic)
		return "word on being elastic";
	if (job->retention.resume != attach->resume)
		return "word on restarts";
	return NULL;
}

static const char *home_differs(const struct job *job, const struct attach *attach)
{
	if (job->retention.resume && (job->home != attach->home ||
				      (job->home && job->forming.part_bytes != attach->part_bytes)))
		return "home";
	return NULL;
}

int attach_new(struct server *server, uint64_t number, const struct attach *attach,
	       bool takes_place, struct job **ret_job, struct failure *failure)
{
	_cleanup_(job_freep) struct job *job = NULL;
	int r;

	r = job_new(server,
		    &(struct job_params){ attach->job, attach->size, attach->n_nodes,
					  attach->account, takes_place },
		    &job, failure);
	if (!r)
		r = job_charge(job,
			       attach->n_moves * sizeof(job->placement.moves[0]) +
				       (attach->regroups
						? attach->joined_len + past_len(job->n_nodes)
						: 0),
			       failure);
	if (r)
		return r;
	job->request_timeout_ms = attach->request_timeout_ms;
	job->stragglers = attach->stragglers;
	job->forming.since_ns = clock_now_ns();
	/*
	 * Elsewhere than at the home every job begins so: whether it has begun before, only its
	 * nodes know.
	 */
	job->retention.resume = job->placement.fresh = attach->resume;
	job->membership.elastic = attach->elastic;
	job->attachment.lost_timeout_ms = attach->lost_timeout_ms;
	job->home = attach->home;
	job->forming.part_bytes = attach->part_bytes;
	job->forming.epoch = attach->epoch;
	job->membership.min_ranks = attach->min_ranks;
	job->membership.max_ranks = attach->max_ranks;
	job->forming.view_digest = attach->view_digest;
	memcpy(job->owner.secret_digest, attach->secret_digest, SECRET_DIGEST_LEN);
	job->owner.user = attach->user;
	memcpy(job->node_of_rank, attach->node_of_rank, job->size * sizeof(job->node_of_rank[0]));
	job->placement.own_number = attach->server;
	job->placement.added = attach->added;
	job->placement.own_added = attach->added_server;
	r = move_begin(job, attach);
	elastic_begin(job);
	job->membership.regroups = attach->regroups;
	if (!r && attach->regroups)
		r = block_new(server->params.blocks, attach->joined_len, NULL,
			      &job->forming.answer);
	if (!r && attach->regroups)
		memcpy(job->forming.answer->data, attach->joined, attach->joined_len);
	if (!r)
		r = job_start(job, number);
	/*
	 * A node that was lost before this server knew of the job is not waited for longer than one
	 * that it has seen.
	 */
	if (!r)
		r = attach_expect(job,
				  job->membership.elastic
					  ? MAX(job->attachment.lost_timeout_ms, ELASTIC_ATTACH_MS)
					  : job->request_timeout_ms);
	if (r)
		return failure_set(failure, r, "job %s: out of memory", job->owner.name);
	*ret_job = TAKE_PTR(job);
	return 0;
}

static void leave_older(struct job *job, const struct peer *peer)
{
	uint32_t node = job_node_of(job, peer);

	if (node == NODE_NONE || job->nodes[node].departed)
		return;
	leave(job, node); /* it may be over now */
}

/*
 * A node that attaches with a new number has ended its part in the older run of the job; should
 * that news have missed this server, the older run would stay here for ever. Where the ranks of an
 * elastic job have regrouped, that node has left it: others are still to hear of it.
 */
static void end_older(struct server *server, uint64_t number, const struct attach *attach,
		      const struct peer *peer)
{
	struct failure failure = { 0 };
	struct job *job, *tmp;

	/* None of what happens here ends another job than the one that is looked at. */
	list_for_each_safe (job, tmp, &server->jobs, link) {
		struct job_node *node;

		if (job->state != JOB_RUNNING || job->number == number ||
		    !job_is(job, attach->job, attach->secret_digest) ||
		    job->membership.regroups == number || !job_heard(job))
			continue;
		if (job->membership.elastic && attach->elastic) {
			leave_older(job, peer);
			continue;
		}
		if (attach->node >= job->n_nodes)
			continue;
		node = &job->nodes[attach->node];
		if (node->instance == attach->instance ||
		    (node->peer != peer && !(node->lost_ns && node->attached)))
			continue;
		(void)failure_set(&failure, -ECONNRESET, "job %s: node %u has started the job anew",
				  job->owner.name, attach->node);
		job_fail(job, &failure, peer);
		return;
	}
}

/* A run of an elastic job that not all nodes have left yet, for the next. */
static struct job *find_older(struct server *server, const struct attach *attach)
{
	struct job *job;

	list_for_each (job, &server->jobs, link)
		if (job->state == JOB_RUNNING && job->membership.elastic &&
		    !job->membership.succeeded && job_is(job, attach->job, attach->secret_digest))
			return job;
	return NULL;
}

/* The job that an attach is for, made if need be; or -errno with failure filled. */
static int attach_find(struct server *server, const struct delivery *delivery,
		       const struct attach *attach, struct job **ret_job, struct failure *failure)
{
	uint64_t number = delivery->header.job;
	/* First: it may be over by what it hears. */
	struct job *job = job_find(server, number);
	/*
	 * A node may have missed that its run is over, and to hear of the next it has to be in it.
	 */
	bool has_successor = successor_of(server, number);
	const struct failure *over = has_successor ? NULL : job_over(server, number);
	const struct failure *heard = job_over_heard(server, number, attach->secret_digest);
	const char *what;

	if (heard && !job && !has_successor) {
		*failure = *heard;
		return failure->status;
	}
	if (over && ((attach->asks_back && server->draining) || !job_over_return(server, number))) {
		*failure = *over;
		return failure->status;
	}
	if (!number || (attach->regroups && attach->joined_number != number))
		return failure_set(failure, -EPROTO, "job %s: an attach without number, or two",
				   attach->job);
	if (!job && attach->asks_back && server->draining)
		return failure_set(failure, -ESHUTDOWN, "job %s: this server drains", attach->job);
	if (!job) {
		struct job *older = attach->elastic ? find_older(server, attach) : NULL;
		bool yielded = older && job_yield(older);
		int r = attach_new(server, number, attach, false, ret_job, failure);

		if (r && yielded)
			job_take_back(older);

		/* If all servers drain, all are in again: then they stay. */
		if (!r)
			(*ret_job)->placement.came_back = over;
		return r;
	}
	what = attach_differs(job, attach);
	if (!what) {
		int r = move_attach(&job, attach, delivery->peer, failure);

		if (r)
			return r;
		what = home_differs(job, attach);
	}
	if (what)
		return failure_set(
			failure, -EINVAL,
			"job %s: node %u attaches with another %s than the nodes before it",
			job->owner.name, attach->node, what);
	*ret_job = job;
	return 0;
}

static int attach_node(struct job *job, const struct attach *attach, struct peer *peer,
		       uint32_t epoch, struct failure *failure)
{
	struct job_node *node = &job->nodes[attach->node];

	/*
	 * Who has the node's number of the run may take the place of one that was lost, or will
	 * soon be seen to be.
	 */
	bool again = job->retention.resume && node->instance && node->instance == attach->instance;
	/* Or who begins once more, as its process ended before any of its ranks could: rejoin.c. */
	bool anew =
		job->retention.resume && attach->begins && !node->spoke && (!job->home || again);
	int r;

	if ((node->peer && node->peer != peer && !again && !anew) ||
	    ((job->home || node->attached) && node->instance &&
	     node->instance != attach->instance && !anew))
		return failure_set(failure, -EACCES, "job %s: %s does not speak for node %u",
				   job->owner.name, peer_name(peer), attach->node);
	/* Where its ranks have regrouped, its next process may not know. */
	if (node->departed && (node->out || !successor_of(job->server, job->number)))
		return failure_set(failure, -ENOTCONN, "job %s: node %u has left", job->owner.name,
				   attach->node);
	r = job_peer_set(job, attach->node, peer);
	if (r)
		return job_no_memory(job, r, failure);
	job->n_departed -= node->departed;
	node->departed = false;
	/* Its agent begins anew with each attach, also where its peer was not lost. */
	keep_attached(job, attach->node);
	offered_attached(job, attach->node);
	rows_attached(job, attach->node);
	if (node->attached)
		log_notice("job %s: node %u is back, as %s", job->owner.name, attach->node,
			   peer_name(peer));
	peer_set_parts(peer, attach->sent_part_bytes, job->n_nodes);
	node->asked = node->idle = false;
	node->lost_ns = 0;
	node->instance = attach->instance;
	job->attachment.lost_timeout_ms = attach->lost_timeout_ms;
	/* Without memory it is looked at when the attach is due. */
	(void)attach_lost_wake(job);
	job->placement.data_epoch = data_moves_epoch(epoch, job->placement.moves,
						     job->placement.n_moves, &job->placement.added);
	if (!node->attached && ++job->attachment.n == job->n_nodes)
		job->attachment.by_ns = CLOCK_NEVER;
	node->attached = true;
	return 0;
}

void attach_call(struct server *server, struct delivery *delivery)
{
	_cleanup_(attach_freep) struct attach *attach = NULL;
	struct data_header answer = { .op = DATA_OK, .job = delivery->header.job };
	_cleanup_(freep) void *data = NULL;
	struct failure failure = { 0 };
	struct job *job = NULL;
	size_t len = 0;
	int r;

	r = attach_decode(delivery->payload, delivery->header.len, &attach, &failure);
	if (!r)
		r = charge_account(server, delivery->peer, attach->user, &attach->account,
				   &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	end_older(server, delivery->header.job, attach, delivery->peer);
	r = attach_find(server, delivery, attach, &job, &failure);
	if (!r)
		r = attach_node(job, attach, delivery->peer, delivery->header.epoch, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	if (job->retention.resume && attached_encode(job->placement.fresh, &data, &len)) {
		refuse(delivery, -ENOMEM, "job %s: out of memory", job->owner.name);
		return;
	}
	FAILPOINT("server-attached");
	answer.epoch = delivery->header.epoch;
	answer.node = attach->node;
	answer.len = (uint32_t)len;
	delivery_answer(delivery, &answer, NULL, data);
	leave_attached(job, attach->node);
	forget_attached(job, attach->node);
	follow_attached(job, attach->node);
	elastic_attached(job, attach->node);
	if (!list_empty(&job->membership.joiners))
		joiner_tell(job, job->nodes[attach->node].peer);
	successor_attached(job);
	elastic_without_early(job);
	if (server->draining && !job->placement.came_back && job->attachment.n == job->n_nodes)
		(void)move_drain(job);
}

int attach_check(const struct job *job, const struct peer *peer, uint32_t node,
		 struct failure *failure)
{
	if (node >= job->n_nodes)
		return failure_set(failure, -EPROTO, "job %s: there is no node %u", job->owner.name,
				   node);
	if (job->nodes[node].peer != peer)
		return failure_set(failure, -EACCES, "job %s: %s does not speak for node %u",
				   job->owner.name, peer_name(peer), node);
	if (job->nodes[node].departed)
		return failure_set(failure, -ENOTCONN, "job %s: node %u has left", job->owner.name,
				   node);
	return 0;
}

static bool any_lives(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (job->nodes[i].peer && !job->nodes[i].departed)
			return true;
	}
	return false;
}

int attach_expect(struct job *job, uint64_t timeout_ms)
{
	job->attachment.timeout_ms = timeout_ms;
	job->attachment.by_ns = clock_now_ns() + timeout_ms * NSEC_PER_MSEC;
	return error_trace(job_wake_by(job, job->attachment.by_ns));
}

/*
 * A node that was here to join, or was said to be, has not come. Where all others have left, it may
 * have been lost without this server's knowledge: nothing is to be said then.
 */
void attach_expired(struct job *job)
{
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct ranks_text missing;
	const char *ranks;

	if (!any_lives(job)) {
		leave_end(job);
		return;
	}
	if (elastic_without_absent(job))
		return;
	ranks_init(&missing);
	for (uint32_t i = 0; i < job->size; i++) {
		if (!job->nodes[job->node_of_rank[i]].attached)
			ranks_add(&missing, i);
	}
	ranks = ranks_end(&missing);
	(void)failure_set(&failure, -ETIMEDOUT, "job %s: %s %s joined but not attached within %s s",
			  job->owner.name, ranks, ranks_have(&missing),
			  job_seconds_text(job->attachment.timeout_ms, &seconds));
	job_fail(job, &failure, NULL);
}

uint64_t attach_lost_deadline(const struct job *job)
{
	uint64_t first = CLOCK_NEVER;

	for (uint32_t i = 0; job->retention.resume && i < job->n_nodes; i++)
		if (job->nodes[i].lost_ns && !job->nodes[i].departed)
			first = MIN(first, job->nodes[i].lost_ns);
	return first == CLOCK_NEVER ? first
				    : first + job->attachment.lost_timeout_ms * NSEC_PER_MSEC;
}

int attach_lost_wake(struct job *job)
{
	uint64_t at_ns = attach_lost_deadline(job);

	return at_ns == CLOCK_NEVER ? 0 : error_trace(job_wake_by(job, at_ns));
}

void attach_lost_expired(struct job *job, uint64_t now)
{
	uint64_t timeout_ns = job->attachment.lost_timeout_ms * NSEC_PER_MSEC;
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct node_text text;

	if (elastic_without_lost(job, now))
		return;
	for (uint32_t i = 0; i < job->n_nodes && !failure.status; i++) {
		const struct job_node *node = &job->nodes[i];

		if (node->lost_ns && !node->departed && node->lost_ns + timeout_ns <= now)
			(void)failure_set(
				&failure, -ECONNRESET,
				"job %s: %s: its daemon was lost, and did not come back "
				"within %s s",
				job->owner.name, job_node_text(job, i, &text),
				job_seconds_text(job->attachment.lost_timeout_ms, &seconds));
	}
	job_fail(job, &failure, NULL);
}

/* Says so once for each peer, whatever the number of its nodes. */
static void wait_for(struct job *job, uint32_t number, const char *why, uint64_t now_ns)
{
	struct job_node *node = &job->nodes[number];
	struct job_peer *lost = job_peer_find(job, node->peer);

	node->lost_ns = now_ns;
	if (lost->is_said)
		return;
	lost->is_said = true;
	log_notice("job %s: node %u%s: %s was lost: %s; waiting for it", job->owner.name, number,
		   lost->n_nodes > 1 ? " and others" : "", peer_name(node->peer), why);
}

void attach_lost(struct job *job)
{
	bool waits = job->retention.resume &&
		     (job->attachment.lost_timeout_ms || job->membership.elastic);
	uint64_t now_ns = clock_now_ns();
	struct failure failure = { 0 };
	struct node_text text;

	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];
		const char *why = node->peer ? peer_loss(node->peer) : NULL;

		if (!why)
			continue;
		if (!node->departed && waits)
			wait_for(job, i, why, now_ns);
		else if (!node->departed && !failure.status)
			(void)failure_set(&failure, -ECONNRESET, "job %s: %s: %s was lost: %s",
					  job->owner.name, job_node_text(job, i, &text),
					  peer_name(node->peer), why);
		(void)job_peer_set(job, i, NULL);
	}
	if (waits && attach_lost_wake(job))
		(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->owner.name);
	if (failure.status)
		job_fail(job, &failure, NULL);
}
