/*
 * Operations that all ranks of a job submit in one order. Private to agent/.
 */
#pragma once

#include "base/loop/loop.h"
#include "base/order/ordinals.h"
#include "proto/data.h"

struct agent_job;
struct agent_round;

/* Operations that all ranks submit in one order: ordinal.c. */
struct agent_order {
	struct ordinals ordinals;
	struct loop_timer timer; /* over servers, while one waits */
	uint64_t seen;		 /* the oldest that waited at the last look; 0: none did */
	unsigned n_looks;	 /* that have seen it since the first */
};

/* ordinal.c: operations that all ranks submit in one order. */
void agent_ordinal_done(struct agent_job *job);
/* A server says that an operation waits at another node, or (how) that ranks differ. */
void agent_ordinal_heard(struct agent_job *job, const struct data_header *header,
			 const void *payload, const struct failure *how);
/*
 * A rank has come to a round with an operation that has this number among those in one
 * order. Returns whether ranks differ in it; then the two below are to follow, in this order.
 */
bool agent_ordinal_differs(const struct agent_round *round, uint32_t rank, uint64_t number);
/* Fails its round, if that is open. */
void agent_ordinal_fail(struct agent_round *round, uint64_t number);
/* Fails what other ranks here have submitted with this number. */
void agent_ordinal_fail_others(struct agent_job *job, uint64_t number);
