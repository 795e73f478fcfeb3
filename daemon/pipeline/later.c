/*
 * What would make a turn of the loop too long goes on in a later one: a round or a tensor a step, of each job that has any.
 * The job is held meanwhile. round.c calls.
 */
#include "pipeline/later.h"
#include "pipeline/round.h"

/* Returns whether there is more. */
static bool step(struct pipeline_job *job)
{
	struct pipeline_round *round =
		list_first(&job->later.rounds, struct pipeline_round, turn.link);
	struct pipeline_tensor *tensor =
		list_first(&job->later.tensors, struct pipeline_tensor, later_link);

	if (round) {
		list_remove(&round->turn.link);
		job->pipeline->hooks->round_later(round);
	} else if (tensor) {
		list_remove(&tensor->later_link);
		job->pipeline->hooks->tensor_later(tensor);
	}
	return !list_empty(&job->later.rounds) || !list_empty(&job->later.tensors);
}

static bool on_step(struct chore *chore)
{
	struct pipeline_job *job = container_of(chore, struct pipeline_job, later.chore);

	if (step(job))
		return true;
	job->later.is_under_way = false;
	pipeline_job_release(job);
	return false;
}

static void begin(struct pipeline_job *job)
{
	if (job->later.is_under_way)
		return;
	job->later.is_under_way = true;
	pipeline_job_hold(job);
	loop_begin(job->pipeline->params.loop, &job->later.chore);
}

void pipeline_later_init(struct pipeline_job *job)
{
	list_init(&job->later.rounds);
	list_init(&job->later.tensors);
	job->later.chore.step = on_step;
}

void pipeline_later_round(struct pipeline_round *round)
{
	list_push_back(&round->job->later.rounds, &round->turn.link);
	begin(round->job);
}

void pipeline_later_tensor(struct pipeline_tensor *tensor)
{
	if (list_linked(&tensor->later_link))
		return;
	list_push_back(&tensor->job->later.tensors, &tensor->later_link);
	begin(tensor->job);
}

void pipeline_later_finish(struct pipeline_job *job)
{
	if (!job->later.is_under_way)
		return;
	while (step(job))
		;
	loop_abort(&job->later.chore);
	job->later.is_under_way = false;
	pipeline_job_release(job);
}
