/* Parts towards servers, made in order: deal.c. Private to pipeline/; control thread. */
#pragma once

#include "pipeline/round.h"

/* Bytes of the job that may wait to be sent. */
uint64_t pipeline_deal_ahead(const struct pipeline_job *job);
/* A round begins to move, or has parts to be made again: round->turn.cut is false. */
void pipeline_deal_add(struct pipeline_round *round);
/* What is_before() says of some of them has changed: schedule.n_passes has grown. */
void pipeline_deal_sort(struct pipeline_job *job);
/* It ends. */
void pipeline_deal_remove(struct pipeline_round *round);
/* All its parts are made: sets round->turn.cut. */
void pipeline_deal_cut(struct pipeline_round *round);
/* A part of it waits to be sent; and does so no more. */
void pipeline_deal_queued(struct pipeline_round *round, uint64_t bytes);
void pipeline_deal_left(struct pipeline_round *round, uint64_t bytes);
/* Whether another part may be made: little enough waits to be sent of this round and of those before it. */
bool pipeline_deal_has_room(const struct pipeline_round *round);
/* Bytes have left, or are not to be sent any more: makes parts, of the most urgent round first, as far as there is room. */
void pipeline_deal(struct pipeline_job *job);
