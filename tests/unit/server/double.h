/* A double of transport/: calls reach the server at once, answers are kept in memory. */
#pragma once

#include "far.h"

/* far_lose(), of which jobs are still to hear. */
void far_cut(struct far *far, unsigned end);
/* Whether the server had the end dropped. */
bool far_killed(struct far *far, unsigned end);
/* The next notice to an end finds no memory. */
void far_no_memory(struct far *far, unsigned end);
/* The end has neither DATA_FEATURE_STOPPING nor DATA_FEATURE_ORDINALS nor DATA_FEATURE_FOLLOW. */
void far_old(struct far *far, unsigned end, bool is_old);
/* What is held for it is close to its quota, or is not any more. */
void far_crowd(struct far *far, unsigned end, bool is_crowded);
/*
 * The end is of the server's process from now on, and its calls lend this block, which stays the test's, for their results; NULL: none.
 * Whether it keeps what is there.
 */
void far_lend(struct far *far, unsigned end, struct block *block, bool keeps);
/* How often the block was said to have a result, before anybody was answered. */
unsigned far_filled(struct far *far, unsigned end);
