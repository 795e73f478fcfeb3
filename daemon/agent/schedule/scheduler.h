/* Parts towards servers, made in order: scheduler.c. Private to agent/; control thread. */
#pragma once

#include "agent/round/round.h"

/* Bytes of the job that may wait to be sent; and whether so many may wait, and one more. */
uint64_t agent_schedule_ahead(const struct agent_job *job);
bool agent_schedule_has_room(const struct agent_job *job, uint64_t unsent);
/* A round begins to move, or has parts to be made again: round->turn.cut is false. */
void agent_schedule_add(struct agent_round *round);
/* What is_before() says of some of them has changed: schedule.n_passes has grown. */
void agent_schedule_sort(struct agent_job *job);
/* It ends, or waits for answers before parts of it may be made. */
void agent_schedule_remove(struct agent_round *round);
/* All its parts are made: sets round->turn.cut. */
void agent_schedule_cut(struct agent_round *round);
/* A part of it waits to be sent; and does so no more. */
void agent_schedule_queued(struct agent_round *round, uint64_t bytes);
void agent_schedule_sent(struct agent_round *round, uint64_t bytes);
/* Whether another part may be made: little enough waits to be sent of this round and of those before it. */
bool agent_schedule_has_window(const struct agent_round *round);
/* Bytes have left, or are not to be sent any more: makes parts, of the most urgent round first, as far as there is room. */
void agent_schedule_run(struct agent_job *job);
