/*
 * Ranks that wait for one another, at the job's home, which passes on what nodes say: what a rank is blocked in, and that two wait for
 * one another, to all others; what a rank has not come to, where another is blocked, to the node of that one. Nodes compare (agent/request/deadlock.c). server.c
 * calls. Control thread only.
 */
#include "server/job/deadlock.h"
#include "base/clock.h"
#include "base/map.h"
#include "server/job/job.h"

/* Many nodes may be blocked in one operation: one telling is enough for all. */
static void tell_blocked(struct job *job, uint32_t node, const struct data_header *notice,
			 const void *payload, const char *name)
{
	struct deadlock_told *told = &job->deadlock_told;
	uint64_t hash = map_hash_string(name) + notice->tensor_round;
	uint64_t now_ns = clock_now_ns();

	if (told->at_ns && hash == told->hash && now_ns - told->at_ns < RELAY_NS)
		return;
	if (!relay_may(job, job->n_nodes, now_ns))
		return;
	*told = (struct deadlock_told){ hash, now_ns };
	relay_to_others(job, node, DATA_FEATURE_BLOCKED, notice, payload);
}

void deadlock_heard(struct job *job, uint32_t node, const struct data_header *header,
		    const void *payload)
{
	char names[2][TENSOR_NAME_MAX + 1];
	struct data_header notice = {
		.op = DATA_BLOCKED,
		.len = header->len,
		.tensor_round = header->tensor_round,
		.rank = header->rank,
		.missed_round = header->missed_round,
		.missed_by = header->missed_by,
		.status = header->status,
	};

	if (job->state != JOB_RUNNING || notice.rank >= job->size ||
	    notice.missed_by >= job->size || !data_blocked_unpack(header, payload, names))
		return;
	/* Nobody speaks for ranks of other nodes. */
	if (job->node_of_rank[notice.rank] != node)
		return;
	if (!notice.missed_round)
		tell_blocked(job, node, &notice, payload, names[0]);
	else if (notice.status && relay_may(job, job->n_nodes, clock_now_ns()))
		relay_to_others(job, node, DATA_FEATURE_BLOCKED, &notice, payload);
	else if (!notice.status && relay_may(job, 1, clock_now_ns()))
		relay_to(job, job->node_of_rank[notice.missed_by], DATA_FEATURE_BLOCKED, &notice,
			 payload);
}
