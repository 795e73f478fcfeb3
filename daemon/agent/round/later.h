/*
 * What would make a turn of the loop too long, and goes on in a later one. Private to agent/.
 */
#pragma once

#include "base/loop/loop.h"

struct agent_job;
struct agent_round;
struct agent_tensor;

/* agent_later_init() before use. */
struct agent_later {
	struct chore chore;
	bool is_under_way;
	struct list rounds;  /* by turn.link: many parts of these are empty, or are scattered */
	struct list tensors; /* by later_link: many rounds of these end as soon as they begin */
	struct list starved; /* by turn.link: rounds of rows, while there is no room for them */
};

void agent_later_init(struct agent_job *job);
/* The round is pinned as if a part of it were under way: agent_round_go_on() follows. */
void agent_later_round(struct agent_round *round);
/* agent_tensor_go_on() follows. Harmless when that is so already. */
void agent_later_tensor(struct agent_tensor *tensor);
/* The same as agent_later_round(), once memory.spent_rows is over, for a round that is cut and has no parts. agent_rows_give_up() undoes it. */
void agent_later_starved(struct agent_round *round);
/* memory.spent_rows is over. */
void agent_later_begin_starved(struct agent_job *job);
/* All of it now: nobody else is served any more. */
void agent_later_finish(struct agent_job *job);
