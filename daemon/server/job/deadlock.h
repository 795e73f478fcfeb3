/*
 * Ranks that wait for one another, at the job's home. Control thread only.
 */
#pragma once

#include "proto/data.h"

struct job;

/* What all nodes were told last: deadlock.c. */
struct deadlock_told {
	uint64_t hash; /* of the operation that a rank is blocked in */
	uint64_t at_ns;
};

/* What a node says that a rank of it is blocked in. */
void deadlock_heard(struct job *job, uint32_t node, const struct data_header *header,
		    const void *payload);
