/* A double of transport/: calls reach the server at once, answers are kept in memory. */
#pragma once

#include "far.h"

/* Whether the server had the end dropped. */
bool far_killed(struct far *far, unsigned end);
/* The next notice to an end finds no memory. */
void far_no_memory(struct far *far, unsigned end);
