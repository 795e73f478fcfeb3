/*
 * Tensors of a job without servers that no rank needs: a program that names one anew in each step
 * would come to max_tensors. Where a job is near that, tensors that no rank has used since they
 * were looked at last are asked about: the members' unused(). A tensor is forgotten once all
 * members here have released it, for all of them at once, and kept as soon as one says that it is
 * in use, or uses it. declare.c, submit.c and agent.c call, and control/.
 */
#include "agent/round/round.h"

/* Tensors that a new one has looked at: a few times more than one, as they are passed twice, and not all are released. */
#define LOOKS 16
/* Questions without an answer: members have as many packets to read. */
#define ASKED_MAX 1024

void agent_forget_init(struct agent_job *job)
{
	list_init(&job->tensors.by_age);
	list_init(&job->tensors.spare);
}

struct agent_tensor *agent_forget_take_spare(struct agent_job *job)
{
	struct agent_tensor *tensor =
		list_first(&job->tensors.spare, struct agent_tensor, age_link);

	if (tensor)
		list_remove(&tensor->age_link);
	return tensor;
}

/* From so many on: an eighth is left for those that are made before the answers have come. */
static uint64_t enough(const struct agent_job *job)
{
	unsigned max = job->agent->params.max_tensors;

	return max - max / 8;
}

/* Whether all ranks have come equally far, with nothing under way, and can be asked. */
static bool is_idle(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;
	uint64_t reached = UINT64_MAX;

	if (!tensor->key || tensor->failure.status || tensor->advancing ||
	    !list_empty(&tensor->rounds) || !list_empty(&tensor->waiting) ||
	    list_linked(&tensor->behind) || list_linked(&tensor->later_link))
		return false;
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		if (!job->members[i])
			continue;
		if (!tensor->declarations[i] || !job->members[i]->unused)
			return false;
		if (reached == UINT64_MAX)
			reached = tensor->reached[i];
		if (tensor->reached[i] != reached)
			return false;
	}
	return true;
}

/* A member whose session ends on the way is in the job no more, and then the tensor is not asked about any more. */
static void ask(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	tensor->asked = true;
	job->tensors.n_asked++;
	for (uint32_t i = 0; i < job->layout.n_local && tensor->asked; i++)
		if (tensor->declarations[i])
			job->members[i]->unused(tensor->declarations[i], tensor->name);
}

/* It has been used since, or nobody is asked before it has been looked at twice. */
static bool is_fresh(struct agent_tensor *tensor)
{
	bool fresh = !tensor->seen || tensor->seen_rounds != tensor->n_rounds;

	tensor->seen = true;
	tensor->seen_rounds = tensor->n_rounds;
	return fresh;
}

void agent_forget_some(struct agent_job *job)
{
	struct agent_tensors *tensors = &job->tensors;

	if (job->distributed || job->tensors.n < enough(job))
		return;
	agent_job_hold(job);
	for (unsigned i = 0; i < LOOKS && tensors->n_asked < ASKED_MAX; i++) {
		struct agent_tensor *tensor =
			list_first(&tensors->by_age, struct agent_tensor, age_link);

		if (!tensor || job->state != JOB_RUNNING || job->departed.n_leaving)
			break;
		list_remove(&tensor->age_link);
		list_push_back(&tensors->by_age, &tensor->age_link);
		if (!tensor->asked && !is_fresh(tensor) && is_idle(tensor))
			ask(tensor);
	}
	agent_job_release(job);
}

void agent_forget_not(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	if (!tensor->asked)
		return;
	tensor->asked = tensor->seen = false;
	tensor->n_released = 0;
	job->tensors.n_asked--;
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_declaration *declaration = tensor->declarations[i];

		if (!declaration || !declaration->released)
			continue;
		declaration->released = false;
		if (job->state == JOB_RUNNING)
			declaration->member->released(declaration, false);
	}
}

/* Members' declarations are gone before they hear of it. */
static void forget(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	map_remove(&job->tensors.by_name, &tensor->entry);
	list_remove(&tensor->age_link);
	job->tensors.n--;
	job->tensors.n_asked--;
	tensor->asked = false;
	free(TAKE_PTR(tensor->pasts));
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_declaration *declaration = tensor->declarations[i];
		struct agent_member *member;

		if (!declaration)
			continue;
		tensor->declarations[i] = NULL;
		member = TAKE_PTR(declaration->member);
		declaration->tensor = NULL;
		list_remove(&declaration->link);
		member->released(declaration, true);
	}
	list_push_front(&job->tensors.spare, &tensor->age_link);
}

int agent_release(struct agent_declaration *declaration)
{
	struct agent_tensor *tensor = declaration->tensor;
	struct agent_job *job = tensor->job;

	if (job->state != JOB_RUNNING || !tensor->asked || declaration->released)
		return error_origin(-EBUSY);
	declaration->released = true;
	if (++tensor->n_released < job->n_members)
		return 0;
	agent_job_hold(job);
	forget(tensor);
	agent_job_release(job);
	return 0;
}

void agent_keep(struct agent_declaration *declaration)
{
	struct agent_job *job = declaration->tensor->job;

	agent_job_hold(job);
	agent_forget_not(declaration->tensor);
	agent_job_release(job);
}
