/* The sum of a complete slot, on this thread or in the pool, and the answers to its nodes. Control thread only. */
#pragma once

#include "server/store.h"

/* All have come. Answers every node, later or at once; may end the job. */
void engine_start(struct slot *slot);
