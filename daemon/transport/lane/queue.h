/*
 * The queue of messages of a lane: jobs take turns by bytes; of a job the most urgent first, equal ones in order of their
 * sequence. The thread of its lane.
 */
#pragma once

#include "base/order/fair.h"
#include "transport/transport.h"

/* NULL when empty. */
struct message *queue_first(const struct fair *queue);
/* Returns 0 or -ENOMEM. */
int queue_push(struct fair *queue, struct message *message);
/* Those that were taken last, the last first, and nothing was pushed since. */
void queue_return(struct fair *queue, struct message *message);
/* NULL when empty. */
struct message *queue_pop(struct fair *queue);
/* The next of the job of what was taken last, or NULL; and takes that, to leave together. */
struct message *queue_next(const struct fair *queue);
struct message *queue_pop_next(struct fair *queue);
