/*
 * Operations that all ranks of a job submit in one order. Private to pipeline/.
 */
#pragma once

#include "base/loop.h"
#include "base/ordinals.h"
#include "proto/data.h"

struct pipeline_job;
struct pipeline_round;

/* Operations that all ranks submit in one order: ordinal.c. */
struct pipeline_order {
	struct ordinals ordinals;
	struct loop_timer timer; /* over servers, while one waits */
	uint64_t seen;		 /* the oldest that waited at the last look; 0: none did */
	unsigned n_looks;	 /* that have seen it since the first */
};

/* ordinal.c: operations that all ranks submit in one order. */
void pipeline_ordinal_done(struct pipeline_job *job);
/* A server says that an operation waits at another node, or (how) that ranks differ. */
void pipeline_ordinal_heard(struct pipeline_job *job, const struct data_header *header,
			    const void *payload, const struct failure *how);
/*
 * A rank has come to a round with an operation that has this number among those in one
 * order. Returns whether ranks differ in it; then the two below are to follow, in this order.
 */
bool pipeline_ordinal_differs(const struct pipeline_round *round, uint32_t rank, uint64_t number);
/* Fails its round, if that is open. */
void pipeline_ordinal_fail(struct pipeline_round *round, uint64_t number);
/* Fails what other ranks here have submitted with this number. */
void pipeline_ordinal_fail_others(struct pipeline_job *job, uint64_t number);
