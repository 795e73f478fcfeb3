/*
 * Rounds that go on without all (bps-recovery(7), STRAGGLERS): sums and averages of push_pull, in jobs with a quorum. A round
 * closes with what has come, when that is enough and it has waited for long enough; but not when somebody would fall behind
 * further than the job allows. Its result is kept until every node has come for it. What comes too late is carried: it is among
 * the contributions of the part's next round that is not closed yet.
 *
 * Of a job that outlives its daemons' processes such a result is kept like any other (keep.h), and says whose contributions are
 * in it or were in one before (data_contributors). A server that has lost all that takes the newest that nodes offer for what has
 * been, and carries what they offer of their own and is not in it. Control thread only.
 */
#pragma once

#include "server/job/store.h"

/* A contribution that came too late for its own round. */
struct carried {
	struct spent
		spent; /* its block and charge, and its link in part->carried or slot->carried, by round and node */
	struct data_header header;
	const void *payload; /* in the block */
};
static_assert(!offsetof(struct carried, spent),
	      "struct spent is freed as the struct that begins with it");

/* Whether a node has acknowledged, or was sent, a slot that others have left behind has changed, in a job with a quorum. */
void quorum_count_behind(struct slot *slot, uint32_t node);
static inline void quorum_count(struct slot *slot, uint32_t node)
{
	if (slot->job->stragglers.quorum)
		quorum_count_behind(slot, node);
}
/* The same of all nodes: the slot is left behind now, or goes. */
static inline void quorum_count_all(struct slot *slot)
{
	for (uint32_t i = 0; slot->job->stragglers.quorum && i < slot->job->n_nodes; i++)
		quorum_count_behind(slot, i);
}
/* Whether the slot's round may go on without all. */
bool quorum_applies(const struct slot *slot);
/* The same, and it does now. */
bool quorum_is_ready(const struct slot *slot);
/* The slot is about to be summed: takes what is carried, and has room for its inputs. Returns 0, QUOTA_E_FULL or -ENOMEM. */
int quorum_prepare(struct slot *slot);
/* It is not summed after all: what it has taken is carried on. */
void quorum_undo(struct slot *slot);
/* All of its inputs are known: its result says whose they are. */
void quorum_call_contributors(struct slot *slot);
/* The result is there: answers who came. The slot may be gone afterwards. */
void quorum_finish(struct slot *slot);
/* A contribution, not there before, to a slot that is being summed or has its result. May end the job. */
void quorum_late(struct slot *slot, struct delivery *delivery);
/*
 * The same of a job that outlives its daemons' processes, to a slot that is kept: what the contribution is in is found out, and if
 * it is in nothing it is carried. Returns 0 or -errno; then quorum_failed() answers it.
 */
int quorum_catch(struct slot *slot, const struct delivery *delivery);
/* What could not be carried. Ends the job. */
void quorum_failed(struct job *job, struct delivery *delivery, int r);
/* A node has come, or come again, to a slot which others have left behind: who waited for it goes on. May end the job. */
void quorum_again(struct slot *slot, struct delivery *delivery);
/* An offer, before all nodes have made theirs: a result, or a contribution that is in none that the node has seen. */
int quorum_offer(struct tensor *tensor, const struct delivery *delivery);
int quorum_offer_late(struct tensor *tensor, const struct delivery *delivery);
/* All nodes have: what they say of the part is put together. Returns false when that has ended the job. */
bool quorum_offered(struct job *job, struct part *part);
/* The sweep is to come back when the slot is old enough. */
void quorum_until(const struct slot *slot, uint64_t now_ns);
/* Nobody needs a list of what is carried any more. It goes by and by. */
void quorum_drop(struct job *job, struct list *carried);
