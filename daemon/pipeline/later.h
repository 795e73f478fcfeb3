/*
 * What would make a turn of the loop too long, and goes on in a later one. Private to pipeline/.
 */
#pragma once

#include "base/loop.h"

struct pipeline_job;
struct pipeline_round;
struct pipeline_tensor;

/* pipeline_later_init() before use. */
struct pipeline_later {
	struct chore chore;
	bool is_under_way;
	struct list rounds;  /* by turn.link: many parts of these are empty */
	struct list tensors; /* by later_link: many rounds of these end as soon as they begin */
};

void pipeline_later_init(struct pipeline_job *job);
/* The round is pinned as if a part of it were under way: pipeline_round_go_on() follows. */
void pipeline_later_round(struct pipeline_round *round);
/* pipeline_round_advance() follows. Harmless when that is so already. */
void pipeline_later_tensor(struct pipeline_tensor *tensor);
/* All of it now: nobody else is served any more. */
void pipeline_later_finish(struct pipeline_job *job);
