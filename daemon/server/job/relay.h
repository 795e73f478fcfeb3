/*
 * Notices by which the job's home passes on what one node has said, and the bound to them, which is the job's. Control thread only.
 */
#pragma once

#include "proto/data.h"

struct job;

/* What is told once in so long may be told again. */
#define RELAY_NS NSEC_PER_SEC

/* Of a job: how much nodes were told. */
struct relays {
	uint64_t since_ns; /* of the RELAY_NS that are counted */
	uint32_t n;	   /* nodes that were looked at in them */
};

/*
 * Whether n nodes more may be told: as many as there can be, in RELAY_NS. What is left out is told when a node says it again, as it
 * does while somebody waits.
 */
bool relay_may(struct job *job, uint32_t n, uint64_t now_ns);
/*
 * A notice for a node that has not left, if its peer has this feature; and for all nodes but one. `job` and `node` are filled in. Nodes
 * of one peer are one to it, unless each rank is a node. What does not arrive is said again.
 */
void relay_to(const struct job *job, uint32_t node, uint64_t feature,
	      const struct data_header *notice, const void *payload);
void relay_to_others(const struct job *job, uint32_t from, uint64_t feature,
		     const struct data_header *notice, const void *payload);
