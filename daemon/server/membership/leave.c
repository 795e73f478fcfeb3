/*
 * A node leaves in good order: nobody waits for it any more. A process of this server that begins after that hears of it from
 * the other nodes, which were told by servers: bps-recovery(7), NODES THAT LEAVE. Control thread only.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/job/forget.h"
#include "server/round/accumulate.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/round.h"
#include "server/round/rows.h"

/* Ranks that begin the next run, and came while others of their node were still in this one, wait in it: rejoin.c. */
static void begin_next(struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *waiting = TAKE_PTR(job->nodes[i].waiting);

		if (waiting)
			form_join_later(job->server, waiting);
	}
}

void leave_end(struct job *job)
{
	struct failure failure = { 0 };

	if (job->state == JOB_OVER)
		return;
	(void)failure_set(&failure, -ENOTCONN, "job %s: over: all its ranks have left",
			  job->owner.name);
	job_close(job, &failure);
	begin_next(job);
	job_dismiss(job);
}

bool leave_is_over(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!job->nodes[i].departed && !elastic_is_gone(job, i))
			return false;
	return true;
}

void leave(struct job *job, uint32_t node)
{
	job->nodes[node].departed = true;
	job->n_departed++;
	if (leave_is_over(job)) {
		leave_end(job);
		return;
	}
	elastic_without_early(job);
	job_hold(job);
	sweep(job, SWEEP_NEWS);
	if (job->state == JOB_RUNNING)
		offered_departed(job);
	if (job->state == JOB_RUNNING)
		forget_departed(job);
	if (job->state == JOB_RUNNING)
		follow_departed(job);
	job_let_go(job);
}

static void tell(const struct job *job, uint32_t to, uint32_t node)
{
	struct data_header header = {
		.op = DATA_LEFT,
		.job = job->number,
		.node = to,
		.departed_node = node,
	};

	peer_tell(job->nodes[to].peer, &header, NULL);
}

/* Each that is here, also those of one peer: ranks that are nodes of their own. */
static void tell_others(const struct job *job, uint32_t node)
{
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (i != node && job->nodes[i].peer && !job->nodes[i].departed)
			tell(job, i, node);
}

void leave_attached(const struct job *job, uint32_t node)
{
	for (uint32_t i = 0; job->retention.resume && job->n_departed && i < job->n_nodes; i++)
		if (job->nodes[i].departed && !job->nodes[i].out)
			tell(job, node, i);
}

void leave_call(struct job *job, uint32_t node, const struct data_header *header)
{
	if (job->retention.resume && header->tells_others)
		tell_others(job, node);
	FAILPOINT("server-node-left");
	leave(job, node);
}

/* One of this process ends with it, and one that cannot be asked is not waited for. */
static bool can_be_asked(const struct job_node *node)
{
	return !node->departed && node->peer && !peer_is_self(node->peer) &&
	       peer_has(node->peer, DATA_FEATURE_STOPPING);
}

static bool ask(const struct job *job, uint32_t node)
{
	struct data_header header = {
		.op = DATA_STOPPING,
		.job = job->number,
		.node = node,
	};

	return !peer_notice(job->nodes[node].peer, &header, NULL);
}

size_t leave_stop(struct job *job)
{
	size_t n_busy = 0, n_asked = 0;

	for (uint32_t i = 0; job->n_departed > job->membership.n_out && i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];

		if (!can_be_asked(node))
			continue;
		if (!node->asked) {
			node->asked = ask(job, i);
			n_asked += node->asked;
		}
		n_busy += !node->idle;
	}
	if (n_asked)
		log_notice(
			"job %s: ranks have left: other nodes have their last results first: %zu",
			job->owner.name, n_asked);
	return n_busy;
}

/* Without what it had contributed sums would be less than what they were made of. */
static void fail_async(struct job *job)
{
	struct failure failure = { 0 };

	(void)failure_set(&failure, -ECONNRESET,
			  "job %s: a server was lost, and a rank has left: what it had contributed "
			  "was nowhere but at servers",
			  job->owner.name);
	job_fail(job, &failure, NULL);
}

void leave_heard(struct job *job, uint64_t node)
{
	if (!job->retention.resume || node >= job->n_nodes || job->nodes[node].departed)
		return;
	if (!job->nodes[node].attached) {
		if (job->stragglers.async) {
			fail_async(job);
			return;
		}
		job->nodes[node].attached = true;
		if (++job->attachment.n == job->n_nodes)
			job->attachment.by_ns = CLOCK_NEVER;
	}
	leave(job, (uint32_t)node);
}
