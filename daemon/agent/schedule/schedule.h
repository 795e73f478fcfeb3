/*
 * In which order what moves through servers goes. Private to agent/.
 */
#pragma once

#include "base/list.h"

struct agent_round;

/* In which order what moves through servers goes: scheduler.c, priority_class.c. */
struct agent_schedule {
	struct list moving;    /* rounds: no more than one rank may have open; */
	struct list scheduled; /* of them, those whose parts may be made, or with bytes unsent */
	struct agent_round *uncut;	/* the first with parts to be made, or NULL */
	uint64_t unsent, unsent_before; /* bytes: of all rounds; of those before it */
	bool scheduling;
	uint64_t n_classed,
		n_class_rounds; /* tensors, and rounds since classes were made: priority_class.c */
	bool classes_stale;
	int32_t urgent_priority; /* the largest */
	uint64_t n_urgent,
		n_urgent_rounds; /* tensors that have it and come, 0: not known; that came in this pass */
	uint32_t n_passes;	 /* that are over */
	bool pass_is_counted; /* the last one was, as all of n_urgent had come, and none has come since */
};
