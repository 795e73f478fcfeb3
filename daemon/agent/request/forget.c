/*
 * Tensors that no rank needs: a program that names one anew in each step would come to
 * max_tensors. Where a job is near that, tensors that no rank has used since they were looked at
 * last are asked about: the members' unused(). A tensor is forgotten once all members here have
 * released it, for all of them at once, and kept as soon as one says that it is in use, or uses
 * it. In a job through servers the home has the last word: server/job/forget.c. declare.c,
 * submit.c and agent.c call, control/, and servers/names.c with what the home says.
 */
#include "agent/round/round.h"
#include "base/failpoint.h"

/* Tensors that a new one has looked at: a few times more than one, as they are passed twice, and not all are released. */
#define LOOKS 16
/* And at most, where there is little room left. */
#define LOOKS_MAX 4096
/* Questions without an answer: members have as many packets to read. */
#define ASKED_MAX 1024
/* Of all members together: where their tensors stay after all, all are told so at once. */
#define ASKED_ALL_MAX UINT64_C(8192)
/* Members that are asked in one go, but of a few tensors at least: not all that are asked about are released. */
#define ASK_STEP    256u
#define ASK_TENSORS 4u

void agent_forget_init(struct agent_job *job)
{
	list_init(&job->tensors.all);
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

/* So many that all are passed twice before there is no room: a daemon that began anew has looked at none. */
static uint64_t looks_for_one(const struct agent_job *job)
{
	uint64_t n = job->tensors.n, room = job->agent->params.max_tensors - n;

	return MIN(MIN(MAX(2 * n / (room + 1), (uint64_t)LOOKS), n), (uint64_t)LOOKS_MAX);
}

/* Whether all ranks have come equally far, with nothing under way, and can be asked. */
static bool is_idle(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;
	uint64_t reached = UINT64_MAX;

	if (!tensor->key || tensor->failure.status || tensor->advancing ||
	    !list_empty(&tensor->rounds) || !list_empty(&tensor->waiting) ||
	    list_linked(&tensor->later_link))
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
	/* After a restart, ranks catch up with each other. */
	if (list_linked(&tensor->behind) && reached < agent_resume_newest(tensor))
		return false;
	/* One that was never used looks to the next process as if the nodes had not agreed on it. */
	return reached || !job->retention.keeps;
}

static bool may_forget(const struct agent_job *job)
{
	return job->state == JOB_RUNNING && !job->resumption.suspended &&
	       !job->departed.n_leaving && job->tensors.n_asked < ASKED_MAX &&
	       job->tensors.n_asked * job->layout.n_local < ASKED_ALL_MAX &&
	       (!job->distributed || agent_names_may_forget(job));
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
	uint64_t looks, n_asked = 0, most = MAX(ASK_STEP, ASK_TENSORS * job->layout.n_local);

	if (job->tensors.n < enough(job) || job->tensors.n_without)
		return;
	looks = looks_for_one(job);
	agent_job_hold(job);
	for (uint64_t i = 0; i < looks && n_asked < most && may_forget(job); i++) {
		struct agent_tensor *tensor =
			list_first(&tensors->by_age, struct agent_tensor, age_link);

		if (!tensor)
			break;
		list_remove(&tensor->age_link);
		list_push_back(&tensors->by_age, &tensor->age_link);
		if (tensor->asked || is_fresh(tensor) || !is_idle(tensor))
			continue;
		ask(tensor);
		n_asked += job->layout.n_local;
	}
	agent_job_release(job);
}

void agent_forget_not(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	if (!tensor->asked)
		return;
	if (tensor->forgetting || tensor->awaited)
		agent_names_keep(job, tensor->key);
	tensor->needed = tensor->forgetting;
	if (tensor->forgetting)
		return;
	tensor->asked = tensor->seen = tensor->awaited = false;
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

/* The declaration that a member here has of it, which is void from now on; or NULL. */
static struct agent_declaration *take_declaration(struct agent_tensor *tensor, uint32_t index,
						  struct agent_member **ret_member)
{
	struct agent_declaration *declaration = TAKE_PTR(tensor->declarations[index]);

	if (!declaration)
		return NULL;
	*ret_member = TAKE_PTR(declaration->member);
	declaration->tensor = NULL;
	list_remove(&declaration->link);
	return declaration;
}

static void remove_tensor(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	map_remove(&job->tensors.by_name, &tensor->entry);
	/* What the home says of it is of no interest. */
	tensor->setup.serial = 0;
	agent_resync_leave(tensor);
	list_remove(&tensor->all_link);
	list_remove(&tensor->age_link);
	list_remove(&tensor->behind);
	agent_priority_class_gone(tensor);
	agent_deadlock_forget(&job->deadlock, tensor->name);
	job->tensors.n--;
	job->tensors.n_asked -= tensor->asked;
	tensor->asked = tensor->forgetting = false;
	(void)held_free(TAKE_PTR(tensor->pasts));
}

/* Members' declarations are gone before they hear of it. */
static void forget(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;
	struct agent_declaration *declaration;
	struct agent_member *member;

	remove_tensor(tensor);
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		declaration = take_declaration(tensor, i, &member);
		if (declaration)
			member->released(declaration, true);
	}
	list_push_front(&job->tensors.spare, &tensor->age_link);
}

/* -- Through servers --------------------------------------------------------------------------- */

/* All members here have released it. */
static void ask_home(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	tensor->forgetting = true;
	if (job->retention.keeps)
		ledger_tensor_doubt(job->resumption.ledger, tensor->name, true);
	FAILPOINT("tensor-in-doubt");
	agent_names_forget(tensor);
}

/* The next process knows no more of it, before servers and members hear that it is gone. */
static void forget_key(struct agent_job *job, const char *name, uint64_t key)
{
	if (job->retention.keeps)
		ledger_tensor_remove(job->resumption.ledger, name);
	FAILPOINT("tensor-forgotten");
	agent_names_forgotten(job, key);
}

void agent_forget_settled(struct agent_tensor *tensor, bool forgotten)
{
	struct agent_job *job = tensor->job;

	FAILPOINT("tensor-settled");
	agent_job_hold(job);
	if (forgotten) {
		forget_key(job, tensor->name, tensor->key);
		forget(tensor);
	} else {
		if (job->retention.keeps)
			ledger_tensor_doubt(job->resumption.ledger, tensor->name, false);
		tensor->forgetting = tensor->needed = tensor->awaited = false;
		agent_forget_not(tensor);
	}
	agent_job_release(job);
}

void agent_forget_with_others(struct agent_job *job, const struct data_header *header,
			      const void *data)
{
	char name[TENSOR_NAME_MAX + 1] = "";
	struct agent_tensor *tensor;

	memcpy(name, data, header->len);
	tensor = job->state == JOB_RUNNING ? agent_tensor_find(job, name) : NULL;
	if (tensor && tensor->key == header->key && tensor->asked) {
		tensor->awaited = true;
		return;
	}
	if (!tensor || tensor->key != header->key || !may_forget(job) || !is_idle(tensor)) {
		agent_names_keep(job, header->key);
		return;
	}
	agent_job_hold(job);
	tensor->awaited = true;
	ask(tensor);
	agent_job_release(job);
}

bool agent_forget_refused(struct agent_tensor *tensor, const struct failure *failure)
{
	struct agent_job *job = tensor->job;
	const struct ledger_known *known = agent_names_in_doubt(tensor);
	struct agent_declaration *declaration;
	struct agent_member *member;

	if (!known)
		return false;
	forget_key(job, tensor->name, known->key);
	/* Ranks that have use of it already hear that they have not. */
	if (!list_empty(&tensor->rounds) || list_linked(&tensor->later_link))
		return false;
	agent_job_hold(job);
	remove_tensor(tensor);
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		declaration = take_declaration(tensor, i, &member);
		if (!declaration)
			continue;
		list_remove(&declaration->waiting);
		declaration->declared(declaration, failure, 0, 0);
	}
	list_push_front(&job->tensors.spare, &tensor->age_link);
	agent_job_release(job);
	return true;
}

/* Whether some round had ended well, of the newest: then the nodes had agreed on the tensor. */
static bool has_succeeded(const struct agent_past *past)
{
	uint64_t rounds = past->rounds < 64 ? (UINT64_C(1) << past->rounds) - 1 : UINT64_MAX;

	return ~past->failed & rounds;
}

int agent_forget_check(const struct agent_member *member, const char *name,
		       const struct agent_past *past, struct failure *failure)
{
	const struct agent_job *job = member->job;

	if (!member->resumed || !past || !job->retention.keeps || !has_succeeded(past) ||
	    ledger_tensor_find(job->resumption.ledger, name) ||
	    !ledger_knows_all(job->resumption.ledger))
		return 0;
	return failure_set(failure, -ESTALE,
			   "tensor %s was forgotten while the daemon began anew: name it anew",
			   name);
}

/* -- What members say -------------------------------------------------------------------------- */

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
	if (job->distributed)
		ask_home(tensor);
	else
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
