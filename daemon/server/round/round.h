/* Rounds: what may be contributed to them, when they are complete, when they fail. Control thread only. */
#pragma once

#include "server/job/job.h"

struct slot;
struct tensor;

/* A PUSH of a node that attach_check() has passed. Answered now or later; may end the job. */
void round_contribute(struct job *job, struct delivery *delivery);
/* The job holds more than it may: it ends, and so does the call. */
void round_over_quota(struct job *job, struct delivery *delivery);
/* FAIL_ROUND: as far as the round is not complete here, it fails for all. */
void round_refused(struct job *job, const struct data_header *header,
		   const struct failure *failure);
/* For the sweep: a slot in store.open, when nodes may have left, others have come, and time has passed. May end the job. */
void round_visit(struct job *job, struct list *link, uint64_t now_ns);

/* "ranks 2, 3 (tensor layer1.weight, round 17)": whom the slot waits for. */
void round_waiting_text(const struct slot *slot, char *buffer, size_t len);
