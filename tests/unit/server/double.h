/* A double of transport/: calls reach the server at once, answers are kept in memory. */
#pragma once

#include "far.h"

/* A server with a cluster of FAR_ENDS daemons around it; end 0 is where the server is. */
struct far *far_new(const struct far_options *options);
struct far *far_free(struct far *far);
DEFINE_CLEANUP(struct far *, far_free)

/* The end's daemon is gone. */
void far_lose(struct far *far, unsigned end);
/* Whether the server had it dropped. */
bool far_killed(struct far *far, unsigned end);
/* The next n notices to an end find no memory. */
void far_no_memory(struct far *far, unsigned end);
