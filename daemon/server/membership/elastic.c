/*
 * An elastic job goes on without ranks: bps-recovery(7), ELASTIC JOBS. Who is gone stands in placement.moves behind the servers, so
 * all that is said about data counts for one set of ranks only. Who learns of more says so to the others; they attach again,
 * and the job begins anew here without those who are gone, as when its servers change.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/common/set.h"
#include "server/job/store.h"

/* Who is gone is not told again for this long. */
#define TELL_NS NSEC_PER_SEC

static bool is_gone(const struct job *job, uint32_t rank)
{
	return job->placement.moves[move_n_servers(job) + rank] & 1;
}

void elastic_count(struct job *job)
{
	const uint32_t *notified = job->placement.notified_moves + move_n_servers(job);

	for (uint32_t i = 0; job->membership.elastic && i < job->size; i++)
		job->nodes[job->node_of_rank[i]].n_alive += !(notified[i] & 1);
}

/* Of ranks that are said to be gone the first word counts. Returns whether that is news. */
static bool say_gone(struct job *job, uint32_t *notified, uint32_t rank, uint32_t how)
{
	if (notified[rank] & 1)
		return false;
	notified[rank] = how;
	job->nodes[job->node_of_rank[rank]].n_alive -= how & 1;
	return how & 1;
}

/*
 * Says to all but one who is gone. Who was here when it was news has heard it, and who was not is
 * told when it attaches: elastic_attached().
 */
static void tell(struct job *job, const struct peer *except, bool is_news)
{
	uint64_t now_ns = clock_now_ns();

	if (!is_news && job->placement.notified_ns && now_ns - job->placement.notified_ns < TELL_NS)
		return;
	job->placement.notified_ns = now_ns;
	move_tell(job, except, job->placement.notified_moves, job->placement.n_moves);
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

		node->departed = node->attached = node->out;
		job->membership.n_out += node->out;
	}
	job->n_departed = job->attachment.n = job->membership.n_out;
}

/*
 * Marks the ranks of nodes that are lost (true in `lost`). Returns how many of them nodes have in
 * the job, and whether any has been marked.
 */
static uint32_t mark(struct job *job, const bool *lost, uint32_t how, bool *ret_is_news)
{
	uint32_t *notified = job->placement.notified_moves + move_n_servers(job);
	const uint32_t *moves = job->placement.moves + move_n_servers(job);
	struct ranks_text ranks;
	bool is_news = false;
	const char *text;

	ranks_init(&ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		if (!lost[job->node_of_rank[i]] || moves[i] & 1)
			continue;
		is_news |= say_gone(job, notified, i, how);
		ranks_add(&ranks, i);
	}
	*ret_is_news = is_news;
	if (!is_news)
		return ranks.n;
	text = ranks_end(&ranks);
	log_notice("job %s: goes on without %s, which %s", job->owner.name, text,
		   how == DATA_MOVES_LEFT ? "left"
		   : ranks.n == 1	  ? "was lost"
					  : "were lost");
	return ranks.n;
}

/* Nodes that are out after that, or are gone already. */
static uint32_t n_others(const struct job *job, const bool *lost)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		n += !lost[i] && !job->nodes[i].departed && job->nodes[i].peer &&
		     !elastic_is_gone(job, i);
	return n;
}

/* How nodes are gone: lost (true in `lost`). Says so to the others. */
static bool go_without(struct job *job, const bool *lost, uint32_t how)
{
	bool is_news;

	if (!n_others(job, lost) || !mark(job, lost, how, &is_news))
		return false;
	FAILPOINT("server-ranks-gone");
	tell(job, NULL, is_news);
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

		lost[i] = node->lost_ns && !node->departed && node->lost_ns + timeout_ns <= now;
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
		late[i] = !job->nodes[i].departed && !job->nodes[i].joining;
	return go_without(job, late, DATA_MOVES_LOST);
}

bool elastic_without_departed(struct job *job)
{
	_cleanup_(freep) bool *departed = calloc(job->n_nodes, sizeof(*departed));

	if (!job->membership.elastic || !job->placement.moves || !departed)
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		departed[i] = job->nodes[i].departed;
	return go_without(job, departed, DATA_MOVES_LEFT);
}

void elastic_without_early(struct job *job)
{
	_cleanup_(freep) bool *lost = NULL;

	if (!job->membership.elastic || !job->placement.moves ||
	    job->attachment.by_ns == CLOCK_NEVER)
		return;
	lost = calloc(job->n_nodes, sizeof(*lost));
	for (uint32_t i = 0; lost && i < job->n_nodes; i++)
		lost[i] = job->nodes[i].departed && !job->nodes[i].attached;
	/* Without memory the others wait until it should have attached. */
	if (lost)
		(void)go_without(job, lost, DATA_MOVES_LOST);
}

bool elastic_is_gone(const struct job *job, uint32_t node)
{
	return job->membership.elastic && job->placement.moves && !job->nodes[node].n_alive;
}

static bool knows_more(const struct job *job)
{
	size_t n_servers = move_n_servers(job);

	return job->membership.elastic && job->placement.moves &&
	       memcmp(job->placement.notified_moves + n_servers, job->placement.moves + n_servers,
		      job->size * sizeof(job->placement.moves[0]));
}

void elastic_attached(struct job *job, uint32_t node)
{
	if (knows_more(job))
		move_tell_node(job, node, job->placement.notified_moves, job->placement.n_moves);
}

void elastic_notice(struct job *job, const struct peer *from, const uint32_t *moves)
{
	size_t n_servers = move_n_servers(job);
	const uint32_t *known = job->placement.moves + n_servers, *said = moves + n_servers;
	uint32_t *notified = job->placement.notified_moves + n_servers;
	bool more = false, is_news = false;
	struct failure failure;

	for (uint32_t i = 0; i < job->size; i++) {
		more |= said[i] & 1 && !(known[i] & 1);
		is_news |= say_gone(job, notified, i, said[i]);
	}
	if (!leave_is_over(job)) {
		if (more)
			tell(job, from, is_news);
		return;
	}
	(void)failure_set(&failure, -ENOTCONN, "job %s: over: none of its ranks is left",
			  job->owner.name);
	job_end(job, &failure);
}
