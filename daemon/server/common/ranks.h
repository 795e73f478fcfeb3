/* Ranks for people: "rank 3", "ranks 4-7, 12". Pure; any thread. */
#pragma once

#include "proto/c.h"

struct ranks_text {
	char text[160];
	size_t len; /* of what is written so far, less the run that is still growing */
	uint32_t n;
	uint32_t first, last; /* the run */
	bool cut;
};

/* Starts empty; ranks come in increasing order. */
void ranks_init(struct ranks_text *ranks);
void ranks_add(struct ranks_text *ranks, uint32_t rank);
/* Ends the list and yields it; "no rank" when it is empty. Nothing may be added after it. */
const char *ranks_end(struct ranks_text *ranks);
/* The verb: "has" or "have". */
const char *ranks_have(const struct ranks_text *ranks);
