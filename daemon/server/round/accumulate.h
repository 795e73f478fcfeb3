/*
 * Accumulation (bps-recovery(7), STRAGGLERS): of each part of a tensor the server keeps the sum of all that was ever
 * contributed to it. A contribution is added and answered with that sum, at once, or when the slowest node has come within the
 * job's staleness. Each node's rounds count by themselves. Control thread only; sums run in the pool, one at a time for a part,
 * and make a new block of it each time: what is on its way to nodes does not change.
 *
 * Of a job that outlives its daemons' processes each answer says whose contributions are in the sum (data_contributors), and each node
 * keeps the last that it was given: the newest of these is the sum of a server that has lost its own. What a node
 * contributes again is answered with the sum that has it.
 */
#pragma once

#include "server/job/job.h"

struct tensor;

/* A PUSH of it, that fits the job. Answered now or later; may end the job. */
void accumulate_contribute(struct tensor *tensor, struct delivery *delivery);
/* An offer of a sum, before all nodes have made theirs: the newest is the one. Returns 0, QUOTA_E_FULL, -EPROTO or -ENOMEM. */
int accumulate_offer(struct tensor *tensor, const struct delivery *delivery);
/* A node has given up its round: what has not been added yet is not added. */
void accumulate_give_up(struct job *job, uint32_t node, uint64_t key, uint64_t round,
			const struct failure *failure);
/* For the sweep: one of job->accumulators, when nodes may have left, all have made their offers, and time has passed. May end the job. */
void accumulate_visit(struct job *job, struct list *link, uint64_t now_ns);
/* The job is over: fails what waits, and frees it unless it is being summed. */
void accumulate_end(struct job *job, struct list *link);
/* The rest, when the pool is gone. */
void accumulate_free(struct job *job);
