/* The sum of a complete slot, on this thread or in the pool, and the answers to its nodes. Control thread only. */
#pragma once

#include "server/job/store.h"

/* All have come. Answers every node, later or at once; may end the job. */
void engine_start(struct slot *slot);
/* What is done with the contributions to a slot, but for inputs. divisor: ranks of which an average is. */
struct reduce_params engine_sum(struct slot *slot, uint32_t divisor);
