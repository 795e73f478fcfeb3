/*
 * Nodes that leave in good order. Any of the functions may end the job. Control thread only.
 */
#pragma once

#include "base/error.h"
#include "proto/data.h"

struct job;

void leave(struct job *job, uint32_t node);
/* No node will ask for anything: each has left, or has no rank in the job any more. */
bool leave_is_over(const struct job *job);
/* A node says so itself; the other nodes are told if it asks for that. */
void leave_call(struct job *job, uint32_t node, const struct data_header *header);
/* Another says so, of a node of which this process may know nothing else. node: as it came from outside. */
void leave_heard(struct job *job, uint64_t node);
/* A node has attached: it may not know who has left. */
void leave_attached(const struct job *job, uint32_t node);
/* All have left: nothing is to be said. Ranks that wait to begin the next run do so. */
void leave_end(struct job *job);
/* server_stop() for a job. */
size_t leave_stop(struct job *job);
