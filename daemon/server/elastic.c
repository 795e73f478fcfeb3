/*
 * An elastic job goes on without ranks: bps-recovery(7), ELASTIC JOBS. Who is gone stands in placement.moves behind the servers, so
 * all that is said about data counts for one set of ranks only. Who learns of more says so to the others; they attach again,
 * and the job begins anew here without those who are gone, as when its servers change.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/set.h"
#include "server/store.h"

static bool is_gone(const struct job *job, uint32_t rank)
{
	return job->placement.moves[move_n_servers(job) + rank] & 1;
}

void elastic_begin(struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++)
		job->nodes[i].out = job->membership.elastic && job->placement.moves;
	for (uint32_t i = 0; job->membership.elastic && job->placement.moves && i < job->size;
	     i++) {
		job->membership.n_gone += is_gone(job, i);
		job->nodes[job->node_of_rank[i]].out &= is_gone(job, i);
	}
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];

		node->left = node->attached = node->out;
		job->membership.n_out += node->out;
	}
	job->n_left = job->attachment.n = job->membership.n_out;
}

/* Marks the ranks of a node. Returns whether that is news. */
static bool mark(struct job *job, uint32_t node, uint32_t how)
{
	bool any = false;

	for (uint32_t i = 0; i < job->size; i++) {
		if (job->node_of_rank[i] != node || is_gone(job, i))
			continue;
		if (!(job->placement.told_moves[move_n_servers(job) + i] & 1))
			job->placement.told_moves[move_n_servers(job) + i] = how;
		any = true;
	}
	return any;
}

/* Nodes that are out after that, or are gone already. */
static uint32_t n_others(const struct job *job, const bool *lost)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		n += !lost[i] && !job->nodes[i].left && job->nodes[i].peer &&
		     !elastic_is_gone(job, i);
	return n;
}

/* How nodes are gone: lost (true in `lost`). Says so to the others. */
static bool go_without(struct job *job, const bool *lost, uint32_t how)
{
	bool any = false;

	if (!n_others(job, lost))
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct node_text text;

		if (!lost[i] || !mark(job, i, how))
			continue;
		any = true;
		log_notice("job %s: goes on without %s, which %s", job->owner.name,
			   job_node_text(job, i, &text),
			   how == DATA_MOVES_LEFT ? "left" : "was lost");
	}
	if (!any)
		return false;
	FAILPOINT("server-ranks-gone");
	move_tell(job, NULL, job->placement.told_moves, job->placement.n_moves);
	return true;
}

bool elastic_without_lost(struct job *job, uint64_t now)
{
	_cleanup_(freep) bool *lost = calloc(job->n_nodes, sizeof(*lost));
	uint64_t timeout_ns = job->attachment.lost_timeout_ms * NSEC_PER_MSEC;

	if (!job->membership.elastic || !job->placement.moves || !lost)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];

		lost[i] = node->lost_ns && !node->left && node->lost_ns + timeout_ns <= now;
	}
	if (!go_without(job, lost, DATA_MOVES_LOST))
		return false;
	/* Should nobody have heard of it, they are told again, in a second at the least. */
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (lost[i])
			job->nodes[i].lost_ns =
				now + (timeout_ns < NSEC_PER_SEC ? NSEC_PER_SEC - timeout_ns : 0);
	return !attach_lost_wake(job);
}

bool elastic_without_absent(struct job *job)
{
	_cleanup_(freep) bool *lost = calloc(job->n_nodes, sizeof(*lost));

	if (!job->membership.elastic || !job->placement.moves || !lost)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		lost[i] = !job->nodes[i].attached;
	return go_without(job, lost, DATA_MOVES_LOST) &&
	       !attach_expect(job, job->attachment.timeout_ms);
}

bool elastic_without_missing(struct job *job, const struct slot *slot)
{
	_cleanup_(freep) bool *missing = calloc(job->n_nodes, sizeof(*missing));

	if (!job->membership.elastic || !job->placement.moves || !missing)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		missing[i] = set_has(job, &slot->header, i) && !slot->from[i];
	return go_without(job, missing, DATA_MOVES_LOST);
}

bool elastic_without_late(struct job *job)
{
	_cleanup_(freep) bool *late = calloc(job->n_nodes, sizeof(*late));

	if (!job->placement.moves || !late)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		late[i] = !job->nodes[i].left && !job->nodes[i].joining;
	return go_without(job, late, DATA_MOVES_LOST);
}

bool elastic_without_left(struct job *job)
{
	_cleanup_(freep) bool *left = calloc(job->n_nodes, sizeof(*left));

	if (!job->membership.elastic || !job->placement.moves || !left)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		left[i] = job->nodes[i].left;
	return go_without(job, left, DATA_MOVES_LEFT);
}

void elastic_without_early(struct job *job)
{
	_cleanup_(freep) bool *lost = NULL;

	if (!job->membership.elastic || !job->placement.moves ||
	    job->attachment.by_ns == CLOCK_NEVER)
		return;
	lost = calloc(job->n_nodes, sizeof(*lost));
	for (uint32_t i = 0; lost && i < job->n_nodes; i++)
		lost[i] = job->nodes[i].left && !job->nodes[i].attached;
	/* Without memory the others wait until it should have attached. */
	if (lost)
		(void)go_without(job, lost, DATA_MOVES_LOST);
}

bool elastic_is_gone(const struct job *job, uint32_t node)
{
	if (!job->membership.elastic || !job->placement.moves)
		return false;
	for (uint32_t i = 0; i < job->size; i++)
		if (job->node_of_rank[i] == node &&
		    !(job->placement.told_moves[move_n_servers(job) + i] & 1))
			return false;
	return true;
}

static bool knows_more(const struct job *job)
{
	size_t n_servers = move_n_servers(job);

	return job->membership.elastic && job->placement.moves &&
	       memcmp(job->placement.told_moves + n_servers, job->placement.moves + n_servers,
		      job->size * sizeof(job->placement.moves[0]));
}

void elastic_attached(struct job *job, uint32_t node)
{
	if (knows_more(job))
		move_tell_node(job, node, job->placement.told_moves, job->placement.n_moves);
}

void elastic_notice(struct job *job, const struct peer *from, const uint32_t *moves)
{
	bool more = false;
	struct failure failure;

	for (uint32_t i = 0; i < job->size; i++) {
		size_t at = move_n_servers(job) + i;

		more |= moves[at] & 1 && !is_gone(job, i);
		if (!(job->placement.told_moves[at] & 1))
			job->placement.told_moves[at] = moves[at];
	}
	if (!leave_is_over(job)) {
		if (more)
			move_tell(job, from, job->placement.told_moves, job->placement.n_moves);
		return;
	}
	(void)failure_set(&failure, -ENOTCONN, "job %s: over: none of its ranks is left",
			  job->owner.name);
	job_end(job, &failure);
}
