/*
 * What would make a turn of the loop too long goes on in a later one: a round or a tensor a step, of each job that has any.
 * The job is held meanwhile. round.c calls.
 */
#include "agent/round/later.h"
#include "agent/round/round.h"

/* The next for which there may be room now, or NULL. */
static struct agent_round *next_starved(const struct agent_job *job)
{
	return spending_is_under_way(&job->memory.spent_rows)
		       ? NULL
		       : list_first(&job->later.starved, struct agent_round, turn.link);
}

/* Returns whether there is more. */
static bool step(struct agent_job *job)
{
	struct agent_round *round = list_first(&job->later.rounds, struct agent_round, turn.link);
	struct agent_tensor *tensor =
		list_first(&job->later.tensors, struct agent_tensor, later_link);

	if (!round && !tensor)
		round = next_starved(job);
	if (round) {
		list_remove(&round->turn.link);
		job->agent->hooks->round_later(round);
	} else if (tensor) {
		list_remove(&tensor->later_link);
		job->agent->hooks->tensor_later(tensor);
	}
	return !list_empty(&job->later.rounds) || !list_empty(&job->later.tensors) ||
	       next_starved(job);
}

static bool on_step(struct chore *chore)
{
	struct agent_job *job = container_of(chore, struct agent_job, later.chore);

	if (step(job))
		return true;
	job->later.is_under_way = false;
	agent_job_release(job);
	return false;
}

static void begin(struct agent_job *job)
{
	if (job->later.is_under_way)
		return;
	job->later.is_under_way = true;
	agent_job_hold(job);
	loop_begin(job->agent->params.loop, &job->later.chore);
}

void agent_later_init(struct agent_job *job)
{
	list_init(&job->later.rounds);
	list_init(&job->later.tensors);
	list_init(&job->later.starved);
	job->later.chore.step = on_step;
}

void agent_later_round(struct agent_round *round)
{
	list_push_back(&round->job->later.rounds, &round->turn.link);
	begin(round->job);
}

void agent_later_tensor(struct agent_tensor *tensor)
{
	if (list_linked(&tensor->later_link))
		return;
	list_push_back(&tensor->job->later.tensors, &tensor->later_link);
	begin(tensor->job);
}

void agent_later_starved(struct agent_round *round)
{
	list_push_back(&round->job->later.starved, &round->turn.link);
}

void agent_later_begin_starved(struct agent_job *job)
{
	if (next_starved(job))
		begin(job);
}

void agent_later_finish(struct agent_job *job)
{
	if (!job->later.is_under_way)
		return;
	while (step(job))
		;
	loop_abort(&job->later.chore);
	job->later.is_under_way = false;
	agent_job_release(job);
}
