/*
 * Tensors of a job: made by the first rank that declares one, agreed on here and then with the
 * other nodes, and failed where ranks differ. agent_declare() is agent.h's, for control/;
 * setup.c brings the home's answer.
 */
#include "agent/round/round.h"
#include "agent/round/rows.h"
#include "base/log.h"
#include "proto/text.h"
#include <inttypes.h>
#include <stdio.h>

/* What ranks have declared, or might have, and is looked at in a step. */
#define WITHOUT_STEP 64
/* Rounds that are looked at in a step to tell servers which have failed, and notices of that. */
#define TELL_STEP 32

static int tensor_new(struct agent_job *job, const char *name, struct agent_tensor **ret_tensor)
{
	uint32_t n = job->layout.n_local;
	struct agent_tensor *tensor = agent_forget_take_spare(job);
	size_t len = sizeof(*tensor) +
		     n * (sizeof(tensor->reached[0]) + sizeof(tensor->n_last[0]) +
			  sizeof(tensor->declarations[0]) + sizeof(tensor->declared[0]));
	int r;

	if (tensor)
		memset(tensor, 0, len);
	else
		tensor = bulk_take(&job->memory.bulk, len);
	if (!tensor)
		return error_origin(-errno);
	tensor->job = job;
	(void)snprintf(tensor->name, sizeof(tensor->name), "%s", name);
	list_init(&tensor->waiting);
	list_init(&tensor->rounds);
	list_init(&tensor->later_link);
	list_init(&tensor->age_link);
	r = map_add(&job->tensors.by_name, map_hash_string(name), &tensor->entry);
	if (r) {
		list_push_front(&job->tensors.spare, &tensor->age_link);
		return error_trace(r);
	}
	job->tensors.n++;
	tensor->setup.serial = ++job->tensors.n_made;
	list_push_back(&job->tensors.all, &tensor->all_link);
	list_push_back(&job->tensors.by_age, &tensor->age_link);
	tensor->n_last = &tensor->reached[n];
	tensor->declarations = (struct agent_declaration **)&tensor->n_last[n];
	tensor->declared = (uint8_t *)&tensor->declarations[n];
	for (uint32_t i = 0; i < n; i++) {
		tensor->declared[i] = agent_elastic_is_out(job, i);
		tensor->n_declared += tensor->declared[i];
	}
	*ret_tensor = tensor;
	return 0;
}

struct agent_tensor *agent_tensor_find(const struct agent_job *job, const char *name)
{
	struct map_entry *entry = map_find(&job->tensors.by_name, map_hash_string(name));

	for (; entry; entry = map_find_next(entry)) {
		struct agent_tensor *tensor = container_of(entry, struct agent_tensor, entry);

		if (!strcmp(tensor->name, name))
			return tensor;
	}
	return NULL;
}

struct agent_round *agent_tensor_round(const struct agent_job *job, const char *name,
				       uint64_t number)
{
	const struct agent_tensor *tensor = agent_tensor_find(job, name);
	struct agent_round *round;

	if (!tensor)
		return NULL;
	list_for_each (round, &tensor->rounds, link)
		if (round->number == number)
			return round;
	return NULL;
}

#define DESCRIPTION_LEN (TENSOR_SHAPE_MAX + 32)

/* "float32[1000]", "float32[10x100]", "float32[variable]". */
static void describe(char text[DESCRIPTION_LEN], unsigned dtype, uint64_t elements,
		     const char *shape)
{
	if (shape && *shape)
		(void)snprintf(text, DESCRIPTION_LEN, "%s[%s]", dtype_name(dtype), shape);
	else if (elements == ELEMENTS_VARIABLE)
		(void)snprintf(text, DESCRIPTION_LEN, "%s[variable]", dtype_name(dtype));
	else
		(void)snprintf(text, DESCRIPTION_LEN, "%s[%" PRIu64 "]", dtype_name(dtype),
			       elements);
}

static void answer(struct agent_tensor *tensor, struct agent_declaration *declaration)
{
	const struct failure *failure = tensor->failure.status ? &tensor->failure : NULL;

	list_remove(&declaration->waiting);
	declaration->answered = true;
	declaration->declared(declaration, failure, tensor->key, tensor->job->part_bytes);
}

/*
 * Servers hear now of rounds that had failed before the tensor had a key: in order, and of thousands in steps. Until they have heard of
 * all no round of it moves, and one that fails has its turn behind those before it. Of a job that has failed they know.
 */
static void tell_failed(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	if (job->end.failure.status) {
		tensor->telling = false;
		tensor->untold = NULL;
	}
	for (size_t n = 0; n < TELL_STEP && tensor->telling; n++) {
		struct agent_round *round = tensor->untold;

		if (round->failure.status) {
			agent_setup_fail_round(job, tensor->key, round->number, round->alone,
					       &round->failure);
			n += job->fleet.n_servers;
		}
		agent_round_told(round);
	}
	if (tensor->telling)
		agent_later_tensor(tensor);
}

void agent_tensor_go_on(struct agent_tensor *tensor)
{
	tell_failed(tensor);
	agent_round_advance(tensor);
}

/* Other nodes call it by this number. */
static void take_key(struct agent_tensor *tensor, uint64_t key, uint64_t start)
{
	struct agent_job *job = tensor->job;

	tensor->key = key;
	tensor->start = start;
	if (!job->distributed)
		return;
	if (job->retention.keeps && ledger_tensor_add(job->resumption.ledger, tensor->name,
						      tensor->dtype, tensor->elements, key, start))
		log_warning("job %s: tensor %s: no memory to keep its number: the job will not "
			    "outlive this process",
			    job->owner.name, tensor->name);
	if (job->retention.keeps && job->resumption.resumed)
		agent_acknowledged_resumed(tensor);
	tensor->untold = list_first(&tensor->rounds, struct agent_round, link);
	tensor->telling = tensor->untold;
	tell_failed(tensor);
}

void agent_tensor_agreed(struct agent_tensor *tensor, const struct failure *failure, uint64_t key,
			 uint64_t start)
{
	struct agent_declaration *declaration;

	if (tensor->job->state != JOB_RUNNING || tensor->key)
		return;
	if (failure && failure->status == -ESTALE && agent_forget_refused(tensor, failure))
		return;
	if (!failure) {
		take_key(tensor, key, start);
	} else if (!tensor->failure.status) {
		tensor->failure = *failure;
		if (!list_empty(&tensor->rounds))
			agent_sweep(tensor->job);
	}
	while ((declaration = list_first(&tensor->waiting, struct agent_declaration, waiting)))
		answer(tensor, declaration);
	agent_round_advance(tensor);
}

uint32_t agent_tensor_detach_some(struct agent_member *member, uint32_t max)
{
	struct agent_declaration *declaration;
	uint32_t n;

	for (n = 0; n < max; n++) {
		struct agent_tensor *tensor;

		declaration = list_first(&member->declarations, struct agent_declaration, link);
		if (!declaration)
			break;
		tensor = TAKE_PTR(declaration->tensor);

		list_remove(&declaration->link);
		list_remove(&declaration->waiting);
		declaration->member = NULL;
		tensor->declarations[member->index] = NULL;
		agent_forget_not(tensor);
	}
	return n;
}

void agent_tensor_detach(struct agent_member *member)
{
	(void)agent_tensor_detach_some(member, UINT32_MAX);
}

static int check(const struct agent_facts *facts, struct failure *failure)
{
	const char *name = facts->name;
	size_t len = strlen(name);
	uint64_t bytes;

	if (!len || len > TENSOR_NAME_MAX)
		return failure_set(failure, -EINVAL, "the name of a tensor is 1 to %d bytes",
				   TENSOR_NAME_MAX);
	if (!text_is_plain(name, len))
		return failure_set(failure, -EINVAL,
				   "tensor %s: a name is UTF-8 of printable characters, without "
				   "any that control, turn or hide text",
				   name);
	if (!dtype_size(facts->dtype))
		return failure_set(failure, -EINVAL, "tensor %s: no element type %u", name,
				   facts->dtype);
	if (facts->elements != ELEMENTS_VARIABLE &&
	    (MUL_OVERFLOW(facts->elements, (uint64_t)dtype_size(facts->dtype), &bytes) ||
	     bytes > INT64_MAX))
		return failure_set(failure, -EINVAL, "tensor %s: %" PRIu64 " elements are too many",
				   name, facts->elements);
	if (facts->shape && !text_is_name(facts->shape, TENSOR_SHAPE_MAX))
		return failure_set(failure, -EINVAL,
				   "tensor %s: a shape is 1 to %d bytes of printable characters",
				   name, TENSOR_SHAPE_MAX);
	return 0;
}

/* Two ranks of this node disagree. The home server tells the other nodes. */
static void conflict(struct agent_tensor *tensor, uint32_t rank, const struct agent_facts *facts)
{
	char first[DESCRIPTION_LEN], second[DESCRIPTION_LEN];
	struct failure failure;

	describe(first, tensor->dtype, tensor->elements, tensor->shape);
	describe(second, facts->dtype, facts->elements, facts->shape);
	(void)failure_set(&failure, -EINVAL, "tensor %s: rank %u declared %s, rank %u %s",
			  tensor->name, tensor->first_rank, first, rank, second);
	if (tensor->job->distributed)
		agent_setup_declare(tensor, &failure);
	agent_tensor_agreed(tensor, &failure, 0, 0);
}

/* All ranks here have declared it alike: what do the other nodes say, or said before a restart? */
static void agree(struct agent_tensor *tensor)
{
	const struct ledger_known *known =
		tensor->job->retention.keeps
			? ledger_tensor_find(tensor->job->resumption.ledger, tensor->name)
			: NULL;

	if (known && !known->in_doubt && known->dtype == tensor->dtype &&
	    known->elements == tensor->elements)
		agent_tensor_agreed(tensor, NULL, known->key, known->start);
	else
		agent_setup_declare(tensor, NULL);
}

/*
 * Whether all ranks here have declared it. Keys are numbers in the order in which that was so,
 * where no server gives them.
 */
static void look_complete(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	if (tensor->n_declared < job->layout.n_local)
		return;
	if (job->distributed)
		agree(tensor);
	else
		agent_tensor_agreed(tensor, NULL, ++job->tensors.n_keys, 0);
}

/* What the first rank says of a shape is the tensor's. Returns whether the others say nothing else. */
static bool take_shape(struct agent_tensor *tensor, uint32_t rank, const char *shape)
{
	if (!shape)
		return true;
	if (*tensor->shape)
		return !strcmp(tensor->shape, shape);
	(void)snprintf(tensor->shape, sizeof(tensor->shape), "%s", shape);
	tensor->first_rank = rank;
	return true;
}

static int find_or_make(struct agent_member *member, const struct agent_facts *facts,
			struct agent_tensor **ret_tensor, bool *ret_made, struct failure *failure)
{
	struct agent_job *job = member->job;
	const char *name = facts->name;
	struct agent_tensor *tensor = agent_tensor_find(job, name);
	int r;

	if (tensor && tensor->declared[member->index])
		return failure_set(failure, -EEXIST, "tensor %s: rank %u has declared it already",
				   name, member->rank);
	*ret_made = !tensor;
	if (!tensor) {
		if (job->tensors.n >= job->agent->params.max_tensors)
			return failure_set(failure, -EDQUOT,
					   "tensor %s: job %s has %u tensors already, as many as "
					   "max_tensors allows: give a step the names of the step "
					   "before, or none",
					   name, job->owner.name, job->agent->params.max_tensors);
		r = tensor_new(job, name, &tensor);
		if (r)
			return agent_job_no_memory(job, -r, failure);
		tensor->dtype = facts->dtype;
		tensor->elements = facts->elements;
		tensor->first_rank = member->rank;
	}
	*ret_tensor = tensor;
	return 0;
}

int agent_declare(struct agent_member *member, struct agent_declaration *declaration,
		  const struct agent_facts *facts, const struct agent_past *past,
		  struct failure *failure)
{
	struct agent_job *job = member->job;
	const char *name = facts->name;
	struct agent_tensor *tensor = NULL;
	bool made = false;
	int r;

	if (!job || job->state != JOB_RUNNING || member->leaving)
		return failure_set(failure, -ENOTCONN, "tensor %s: in no job", name);
	r = check(facts, failure);
	if (!r)
		r = agent_forget_check(member, name, past, failure);
	if (!r)
		r = find_or_make(member, facts, &tensor, &made, failure);
	if (!r)
		r = agent_resume_past(member, tensor, past, failure);
	if (r)
		return r;

	tensor->declared[member->index] = true;
	tensor->n_declared++;
	tensor->declarations[member->index] = declaration;
	declaration->member = member;
	declaration->tensor = tensor;
	declaration->n_rounds = past ? past->rounds : 0;
	declaration->newest = NULL;
	declaration->answered = declaration->released = false;
	declaration->is_new = member->resumed && !past;
	list_push_back(&member->declarations, &declaration->link);
	list_push_back(&tensor->waiting, &declaration->waiting);
	if (tensor->failure.status)
		answer(tensor, declaration);
	else if (tensor->dtype != facts->dtype || tensor->elements != facts->elements ||
		 !take_shape(tensor, member->rank, facts->shape))
		conflict(tensor, member->rank, facts);
	else
		look_complete(tensor);
	if (made)
		agent_forget_some(job);
	return 0;
}

/* Ranks that are in the job no more will not declare it. */
static void declare_without(struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		if (tensor->declared[i] || !agent_elastic_is_out(job, i))
			continue;
		tensor->declared[i] = true;
		n++;
	}
	tensor->n_declared += n;
	if (n && !tensor->failure.status)
		look_complete(tensor);
}

/* Tensors are put behind the end of the job's list: the first is the next. */
static bool step_without(struct agent_job *job)
{
	agent_job_hold(job);
	for (uint64_t n = 0; n < WITHOUT_STEP && job->tensors.n_without; n += job->layout.n_local) {
		struct agent_tensor *tensor =
			list_first(&job->tensors.by_age, struct agent_tensor, age_link);

		if (!tensor || job->state != JOB_RUNNING) {
			job->tensors.n_without = 0;
			break;
		}
		job->tensors.n_without--;
		list_remove(&tensor->age_link);
		list_push_back(&job->tensors.by_age, &tensor->age_link);
		declare_without(tensor);
	}
	agent_job_release(job);
	return job->tensors.n_without;
}

static bool on_without(struct chore *chore)
{
	return step_without(container_of(chore, struct agent_job, tensors.without));
}

void agent_tensor_without(struct agent_job *job)
{
	job->tensors.n_without = job->tensors.n;
	job->tensors.without.step = on_without;
	if (step_without(job))
		loop_begin(job->agent->params.loop, &job->tensors.without);
}
