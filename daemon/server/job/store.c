/*
 * Tensors, parts, rounds and slots of a job: found or made for each contribution, moved from
 * list to list, freed. A lookup tries first what came next in the step before, and fetches
 * ahead. round.c, keep.c, quorum.c and engine.c call.
 */
#include "server/job/store.h"

/* Nodes that are answered at once where a round fails; and in a step where it does so by and by, or those of one slot. */
#define FAIL_NODES 256
#define FAIL_STEP  2048
/* Bytes that are given back at once, or in a step. */
#define FAIL_BYTES (UINT64_C(64) << 20)
/* Parts of tensors that were forgotten, in a step. */
#define DROP_STEP 16
/* Forgotten tensors that each further one looks at: more than come, so that those whose rounds end go. */
#define FORGOTTEN_LOOKS 4

static uint64_t part_hash(const struct data_header *header)
{
	return (uint64_t)header->block << 32 | header->part;
}

/* What has come is looked at when the last comes; the result, when the last has it. */
static _fetches_ void fetch_slot(const struct slot *slot)
{
	__builtin_prefetch(slot->result, 1);
	if (slot->kept || slot->n_here + 1 != slot->n_expected)
		return;
	for (uint32_t i = 0; i < slot->job->n_nodes; i++)
		if (slot->from[i])
			delivery_fetch(slot->from[i]);
}

/* What is about to be summed: where each begins, and what counts it. */
static _fetches_ void fetch_inputs(const struct slot *slot)
{
	if (slot->kept || slot->n_here + 1 != slot->n_expected)
		return;
	for (uint32_t i = 0; i < slot->job->n_nodes; i++) {
		const struct delivery *from = slot->from[i];

		if (!from)
			continue;
		__builtin_prefetch(from->payload_block, 1);
		for (size_t at = 0; at < MIN(from->header.len, 4u * CACHE_LINE); at += CACHE_LINE)
			__builtin_prefetch((const char *)from->payload + at);
	}
}

/*
 * What comes behind it, if it is as it was. Each step looks only at what was fetched with the one
 * before. Of a part there is most often the slot of this round, the last, and that of the one
 * before, which not all nodes have yet. How much is fetched does not grow with the nodes: each of
 * them contributes.
 */
static _fetches_ void fetch_behind(const struct tensor *tensor)
{
	const struct tensor *next = tensor->next;
	const size_t len = MIN(slot_len(tensor->job), sizeof(struct slot) + CACHE_LINE);
	const size_t past = MIN(tensor->job->n_nodes * sizeof(next->past[0]), (size_t)CACHE_LINE);
	const struct part *part = tensor->first_part;

	if (part && !list_empty(&part->slots))
		fetch_inputs(list_last(&part->slots, struct slot, in_part));
	if (!next)
		return;
	part = next->first_part;
	if (part && !list_empty(&part->slots)) {
		fetch_slot(list_first(&part->slots, struct slot, in_part));
		fetch_slot(list_last(&part->slots, struct slot, in_part));
	}
	next = next->next;
	if (!next)
		return;
	part = next->first_part;
	if (part && !list_empty(&part->slots)) {
		list_fetch_first(&part->slots, struct slot, in_part, len);
		list_fetch_last(&part->slots, struct slot, in_part, len);
	}
	next = next->next;
	if (!next)
		return;
	if (next->first_part)
		fetch_to_write(next->first_part, sizeof(*next->first_part));
	list_fetch_first(&next->rounds, struct round, link, sizeof(struct round));
	list_fetch_last(&next->rounds, struct round, link, sizeof(struct round));
	if (next->next)
		fetch_to_write(next->next, sizeof(*next) + past);
}

/*
 * A node's contributions come in the same order in each step, mostly: then none is searched or
 * waited for.
 */
static struct tensor *tensor_after(struct job_node *node, uint64_t key)
{
	struct tensor *tensor = node->last_tensor ? node->last_tensor->next : NULL;

	return tensor && tensor->key == key ? tensor : NULL;
}

static struct tensor *tensor_find(const struct job *job, struct job_node *node, uint64_t key)
{
	struct tensor *tensor = node ? tensor_after(node, key) : NULL;
	struct map_entry *entry = tensor ? NULL : map_find(&job->store.tensors, key);

	if (entry) {
		tensor = container_of(entry, struct tensor, entry);
		if (node && node->last_tensor)
			node->last_tensor->next = tensor;
	}
	if (!tensor || !node)
		return tensor;
	node->last_tensor = tensor;
	fetch_behind(tensor);
	return tensor;
}

/* Of the spare ones only `in_job` is looked at, and what fetch_behind() does. */
static struct tensor *tensor_take(struct job *job)
{
	struct tensor *tensor = list_first(&job->store.spare_tensors, struct tensor, in_job);
	size_t len = sizeof(*tensor) + job->n_nodes * sizeof(tensor->past[0]);

	if (!tensor)
		return bulk_take(&job->store.bulk, len);
	list_remove(&tensor->in_job);
	memset(tensor, 0, len);
	list_init(&tensor->rounds);
	return tensor;
}

/* Into no list yet. */
static int tensor_new(struct job *job, uint64_t key, struct tensor **ret_tensor)
{
	struct tensor *tensor = tensor_take(job);
	int r = tensor ? map_add(&job->store.tensors, key, &tensor->entry) : -errno;

	if (r && tensor)
		list_push_front(&job->store.spare_tensors, &tensor->in_job);
	if (r)
		return error_origin(r);
	tensor->job = job;
	tensor->parts.quota = job_memory(job);
	tensor->key = key;
	list_init(&tensor->rounds);
	list_init(&tensor->failed);
	*ret_tensor = tensor;
	return 0;
}

/* Out of its list, for another. */
static void tensor_leave(struct tensor *tensor)
{
	struct job *job = tensor->job;

	sweep_leave(job, &tensor->in_job);
	list_remove(&tensor->in_job);
	job->store.n_mentioned -= tensor->is_mentioned;
	tensor->is_mentioned = false;
}

int tensor_get(struct job *job, struct job_node *node, uint64_t key, struct tensor **ret_tensor,
	       struct failure *failure)
{
	struct tensor *tensor = tensor_find(job, node, key);
	unsigned max = job->server->params.max_tensors;
	int r = 0;

	if (tensor && !tensor->is_mentioned) {
		*ret_tensor = tensor;
		return 0;
	}
	if (tensor && tensor_is_forgotten(tensor))
		return failure_set(failure, -ESTALE, "job %s: a tensor that was forgotten",
				   job->owner.name);
	if (job->store.tensors.n_entries - job->store.n_mentioned >= max)
		return failure_set(failure, -EDQUOT,
				   "job %s: %u tensors are in use already, its max_tensors",
				   job->owner.name, max);
	if (tensor)
		tensor_leave(tensor);
	else
		r = tensor_new(job, key, &tensor);
	if (r)
		return job_no_memory(job, r, failure);
	list_push_back(&job->store.all_tensors, &tensor->in_job);
	*ret_tensor = tensor;
	return 0;
}

/* The oldest, of which there is nothing to be freed. */
static void mentioned_pop(struct job *job)
{
	struct tensor *tensor = list_first(&job->store.mentioned, struct tensor, in_job);

	map_remove(&job->store.tensors, &tensor->entry);
	tensor->key = 0;
	tensor_leave(tensor);
	list_push_front(&job->store.spare_tensors, &tensor->in_job);
}

struct tensor *tensor_mention(struct job *job, uint64_t key)
{
	struct tensor *tensor = tensor_find(job, NULL, key);

	if (tensor)
		return tensor;
	if (job->store.n_mentioned >= job->server->params.max_tensors)
		mentioned_pop(job);
	if (tensor_new(job, key, &tensor))
		return NULL;
	tensor->is_mentioned = true;
	job->store.n_mentioned++;
	list_push_back(&job->store.mentioned, &tensor->in_job);
	return tensor;
}

struct tensor *tensor_of(const struct job *job, uint64_t key)
{
	return tensor_find(job, NULL, key);
}

struct failed_round *tensor_failed(const struct tensor *tensor, uint64_t number)
{
	struct failed_round *failed;

	list_for_each (failed, &tensor->failed, link) {
		if (failed->number <= number && number <= failed->last)
			return failed;
	}
	return NULL;
}

static void failed_pop(struct tensor *tensor)
{
	struct failed_round *oldest = list_first(&tensor->failed, struct failed_round, link);

	list_remove(&oldest->link);
	tensor->n_failed--;
	(void)held_free(oldest);
}

void tensor_failed_add(struct tensor *tensor, uint64_t number, const struct failure *failure)
{
	size_t len = strlen(failure->text) + 1;
	struct failed_round *failed;

	if (tensor_failed(tensor, number))
		return;
	/* An agent may give up thousands in one go, which the other nodes come to one by one. */
	if (tensor->n_failed == TENSOR_FAILED) {
		list_for_each (failed, &tensor->failed, link)
			if (number == failed->last + 1) {
				failed->last = number;
				return;
			}
		failed_pop(tensor);
	}
	failed = held_new(job_memory(tensor->job), sizeof(*failed) + len);
	if (!failed)
		return; /* late contributions then wait for their deadline */
	failed->number = failed->last = number;
	failed->status = failure->status;
	memcpy(failed->text, failure->text, len);
	list_push_back(&tensor->failed, &failed->link);
	tensor->n_failed++;
}

/*
 * What is looked for is most often the first or the last of few. Each of a list that has not come
 * behind STORE_NEAR others is among so many for good, as others only go from before it; the rest is
 * in a map.
 */
static uint64_t far_hash(const void *of, uint64_t number)
{
	const uint64_t key[] = { (uintptr_t)of, number };

	return map_hash(key, sizeof(key));
}

static struct round *far_round(const struct tensor *tensor, uint64_t number)
{
	struct map_entry *entry =
		map_find(&tensor->job->store.far_rounds, far_hash(tensor, number));

	for (; entry; entry = map_find_next(entry)) {
		struct round *round = container_of(entry, struct round, far);

		if (round->tensor == tensor && round->header.round == number)
			return round;
	}
	return NULL;
}

struct round *round_find(const struct tensor *tensor, uint64_t number)
{
	struct round *round;
	unsigned n = 0;

	list_for_each (round, &tensor->rounds, link) {
		if (round->header.round == number)
			return round;
		if (++n == STORE_NEAR)
			return far_round(tensor, number);
	}
	return NULL;
}

struct part *part_find(const struct tensor *tensor, const struct data_header *header)
{
	uint64_t hash = part_hash(header);
	struct map_entry *entry;

	if (tensor->first_part && tensor->first_part->entry.hash == hash)
		return tensor->first_part;
	entry = map_find(&tensor->parts, hash);
	return entry ? container_of(entry, struct part, entry) : NULL;
}

bool part_is_closed(const struct part *part, uint64_t number)
{
	uint64_t behind;

	if (number >= part->newest)
		return part->newest && number == part->newest;
	behind = part->newest - 1 - number;
	return behind >= PART_WINDOW || (part->closed >> behind & 1);
}

void part_close(struct part *part, uint64_t number)
{
	uint64_t ahead;

	if (number <= part->newest) {
		if (number < part->newest && part->newest - 1 - number < PART_WINDOW)
			part->closed |= 1ull << (part->newest - 1 - number);
		return;
	}
	ahead = number - part->newest;
	part->closed = ahead < PART_WINDOW ? part->closed << ahead : 0;
	if (part->newest && ahead <= PART_WINDOW)
		part->closed |= 1ull << (ahead - 1);
	part->newest = number;
}

static struct slot *far_slot(const struct part *part, uint64_t number)
{
	const struct job *job = list_first(&part->slots, struct slot, in_part)->job;
	struct map_entry *entry = map_find(&job->store.far_slots, far_hash(part, number));

	for (; entry; entry = map_find_next(entry)) {
		struct slot *slot = container_of(entry, struct slot, far);

		if (slot->part == part && slot->header.round == number)
			return slot;
	}
	return NULL;
}

struct slot *slot_find(const struct part *part, uint64_t number)
{
	struct slot *slot;
	unsigned n = 0;

	list_for_each (slot, &part->slots, in_part) {
		if (slot->header.round == number)
			return slot;
		if (++n == STORE_NEAR)
			return far_slot(part, number);
	}
	return NULL;
}

static size_t part_len(const struct job *job)
{
	return sizeof(struct part) + (job->stragglers.quorum ? job->n_nodes * sizeof(uint32_t) : 0);
}

static struct part *part_take(struct job *job)
{
	struct part *part = list_first(&job->store.spare_parts, struct part, in_job);

	if (!part)
		return bulk_take(&job->store.bulk, part_len(job));
	list_remove(&part->in_job);
	memset(part, 0, part_len(job));
	return part;
}

int part_get(struct tensor *tensor, const struct data_header *header, struct part **ret_part)
{
	struct part *part = part_find(tensor, header);
	struct job *job = tensor->job;
	int r;

	if (part) {
		*ret_part = part;
		return 0;
	}
	if (store_charge(job, part_len(job)))
		return QUOTA_E_FULL;
	part = part_take(job);
	r = part ? map_add(&tensor->parts, part_hash(header), &part->entry) : -errno;
	if (r && part)
		list_push_front(&job->store.spare_parts, &part->in_job);
	if (r) {
		quota_release(job->memory.quota, part_len(job));
		return error_origin(r);
	}
	job->memory.charged_parts += part_len(job);
	list_init(&part->slots);
	list_init(&part->carried);
	list_push_back(&job->store.parts, &part->in_job);
	if (!tensor->first_part)
		tensor->first_part = part;
	*ret_part = part;
	return 0;
}

static struct round *round_take(struct job *job)
{
	struct round *round = list_first(&job->store.spare_rounds, struct round, link);
	size_t len = sizeof(*round) + job->n_nodes;

	if (!round)
		return bulk_take(&job->store.bulk, len);
	list_remove(&round->link);
	list_fetch_first(&job->store.spare_rounds, struct round, link, sizeof(*round));
	memset(round, 0, len);
	return round;
}

static int round_get(struct tensor *tensor, const struct data_header *header,
		     struct round **ret_round)
{
	struct round *round = round_find(tensor, header->round);
	struct job *job = tensor->job;
	int r;

	if (round) {
		*ret_round = round;
		return 0;
	}
	round = round_take(job);
	if (!round)
		return error_origin(-errno);
	round->is_far = tensor->n_rounds >= STORE_NEAR;
	r = round->is_far
		    ? map_add(&job->store.far_rounds, far_hash(tensor, header->round), &round->far)
		    : 0;
	if (r) {
		list_push_front(&job->store.spare_rounds, &round->link);
		return error_origin(r);
	}
	round->header = *header;
	round->tensor = tensor;
	list_init(&round->slots);
	list_init(&round->failing_link);
	list_push_back(&tensor->rounds, &round->link);
	tensor->n_rounds++;
	round->measured = header->round <= tensor->measured;
	tensor->measured = MAX(tensor->measured, header->round);
	*ret_round = round;
	return 0;
}

void round_put(struct round *round)
{
	struct job *job = round->tensor->job;

	if (round->pinned || round->failing || !list_empty(&round->slots))
		return;
	if (round->is_far)
		map_remove(&job->store.far_rounds, &round->far);
	round->tensor->n_rounds--;
	list_remove(&round->link);
	list_push_front(&job->store.spare_rounds, &round->link);
}

size_t slot_len(const struct job *job)
{
	/* With its places among what was sent. */
	return sizeof(struct slot) +
	       job->n_nodes * (sizeof(void *) + sizeof(struct delivery *) + sizeof(uint32_t) +
			       4 * sizeof(uint8_t) + 2 * sizeof(struct slot *));
}

/*
 * In the steady state slots come from the spare ones, of which there are as many as there were
 * slots at once.
 */
static struct slot *slot_take(struct job *job)
{
	struct slot *slot = list_first(&job->store.spare, struct slot, in_job);

	if (slot) {
		list_remove(&slot->in_job);
		list_fetch_first(&job->store.spare, struct slot, in_job, sizeof(*slot));
		memset(slot, 0, slot_len(job));
	} else {
		slot = bulk_take(&job->store.bulk, slot_len(job));
	}
	return slot;
}

int store_charge(struct job *job, uint64_t bytes)
{
	spending_make_room(&job->store.spending, bytes);
	return quota_charge(job->memory.quota, bytes);
}

int store_block_new(struct job *job, size_t len, struct block **ret_block)
{
	spending_make_room(&job->store.spending, block_bytes(len));
	return block_new(job->server->params.blocks, len, job->memory.quota, ret_block);
}

int slot_charge(struct slot *slot, uint64_t len)
{
	if (store_charge(slot->job, len))
		return QUOTA_E_FULL;
	slot->charged += len;
	return 0;
}

int slot_new(struct tensor *tensor, const struct delivery *delivery, uint64_t len,
	     struct slot **ret_slot)
{
	const struct data_header *header = &delivery->header;
	struct job *job = tensor->job;
	uint64_t charge = slot_len(job) + len;
	struct round *round = NULL;
	struct part *part = NULL;
	struct slot *slot;
	int r;

	r = part_get(tensor, header, &part);
	if (r)
		return r;
	if (store_charge(job, charge))
		return QUOTA_E_FULL;
	slot = slot_take(job);
	r = slot ? round_get(tensor, header, &round) : error_origin(-errno);
	if (!r && part->n_slots >= STORE_NEAR) {
		r = map_add(&job->store.far_slots, far_hash(part, header->round), &slot->far);
		slot->is_far = !r;
	}
	if (r) {
		quota_release(job->memory.quota, charge);
		if (slot)
			list_push_front(&job->store.spare, &slot->in_job);
		if (round)
			round_put(round);
		return r;
	}
	slot->job = job;
	slot->part = part;
	slot->round = round;
	slot->header = *header;
	slot->since_ns = delivery->at_ns;
	slot->charged = charge;
	slot->sum.inputs = (const void **)(slot->from + job->n_nodes);
	slot->number = (uint32_t *)(slot->sum.inputs + job->n_nodes);
	slot->acked = (uint8_t *)(slot->number + job->n_nodes);
	slot->came_late = slot->acked + job->n_nodes;
	slot->behind = slot->came_late + job->n_nodes;
	list_init(&slot->carried);
	list_init(&slot->again);
	list_init(&slot->offers);
	list_push_back(&part->slots, &slot->in_part);
	part->n_slots++;
	list_push_back(&round->slots, &slot->in_round);
	round->n_slots++;
	list_push_back(&job->store.open, &slot->in_job);
	job->store.n_open++;
	*ret_slot = slot;
	return 0;
}

void slot_move(struct slot *slot, struct list *to)
{
	sweep_leave(slot->job, &slot->in_job);
	list_remove(&slot->in_job);
	list_push_back(to, &slot->in_job);
}

void slot_sum(struct slot *slot)
{
	struct job *job = slot->job;

	slot_move(slot, &job->store.summing);
	job->store.n_open--;
	job->store.n_summing++;
	slot->summing = true;
}

void slot_hold(struct slot *slot)
{
	struct job *job = slot->job;

	slot_move(slot, &job->store.held);
	job->store.n_summing--;
	slot->held = true;
}

/* Which lists of calls have had one of the node: behind slot->behind. */
static uint8_t *calls_of(const struct slot *slot, uint32_t node)
{
	return slot->behind + slot->job->n_nodes + node;
}

void slot_put_call(struct slot *slot, struct list *list, struct delivery *delivery)
{
	uint8_t *calls = calls_of(slot, delivery->header.node);
	uint8_t bit = list == &slot->again ? 1 : 2;
	struct delivery *old;

	if (*calls & bit)
		list_for_each (old, list, link)
			if (old->header.node == delivery->header.node) {
				list_remove(&old->link);
				delivery_fail(old, -ENETRESET, "it has come again");
				break;
			}
	*calls |= bit;
	list_push_back(list, &delivery->link);
}

void slot_free(struct slot *slot)
{
	struct job *job = slot->job;

	slot->late = slot->kept = false;
	job->server->hooks->slot_freed(slot);
	job->server->hooks->carried_freed(job, &slot->carried);
	slot->sum.more_inputs = held_free(slot->sum.more_inputs);
	quota_release(job->memory.quota, slot->charged);
	slot->result = block_unref(slot->result);
	list_remove(&slot->in_part);
	if (slot->round->failing_at == &slot->in_round)
		slot->round->failing_at = slot->in_round.next;
	list_remove(&slot->in_round);
	slot->round->n_slots--;
	if (slot->is_far)
		map_remove(&job->store.far_slots, &slot->far);
	slot->part->n_slots--;
	round_put(slot->round);
	if (slot->summing)
		job->store.n_summing -= !slot->held;
	else
		job->store.n_open--;
	sweep_leave(job, &slot->in_job);
	list_remove(&slot->in_job);
	list_push_front(&job->store.spare, &slot->in_job);
}

void slot_fail(struct slot *slot, int status, const char *text)
{
	for (uint32_t i = 0; i < slot->job->n_nodes; i++) {
		struct delivery *from = TAKE_PTR(slot->from[i]);

		if (from)
			delivery_fail(from, status, text);
	}
	slot->job->server->hooks->slot_failed(slot, status, text);
	slot_free(slot);
}

static bool can_fail(const struct slot *slot)
{
	return !slot->summing || slot->late;
}

static void fail_now(struct round *round, const struct failure *failure)
{
	struct slot *slot, *tmp;

	round->pinned = true;
	list_for_each_safe (slot, tmp, &round->slots, in_round)
		if (can_fail(slot))
			slot_fail(slot, failure->status, failure->text);
	round->pinned = false;
	round_put(round);
}

/* Of a round of not too many slots. */
static uint64_t round_charged(const struct round *round)
{
	const struct slot *slot;
	uint64_t charged = 0;

	list_for_each (slot, &round->slots, in_round)
		charged += slot->charged;
	return charged;
}

static void failing_done(struct round *round)
{
	round->failing = held_free(round->failing);
	list_remove(&round->failing_link);
	round_put(round);
}

/* Returns whether there is more. */
static bool fail_next(struct job *job)
{
	struct round *round = list_first(&job->store.failing, struct round, failing_link);
	struct slot *slot;

	if (!round || job->state == JOB_OVER)
		return false;
	if (round->failing_at == &round->slots) {
		failing_done(round);
		return true;
	}
	slot = container_of(round->failing_at, struct slot, in_round);
	round->failing_at = slot->in_round.next;
	if (can_fail(slot))
		slot_fail(slot, round->failing->status, round->failing->text);
	return true;
}

static bool on_fail(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, store.fail);
	uint64_t held = quota_used(job->memory.quota);
	bool more = true;

	job_hold(job);
	for (uint32_t i = 0; i < FAIL_STEP && more; i += job->n_nodes + FAIL_STEP / 16) {
		more = fail_next(job);
		if (quota_used(job->memory.quota) + FAIL_BYTES <= held)
			break;
	}
	/* With the job the chore is gone. */
	more = more && job->state != JOB_OVER;
	job_let_go(job);
	return more;
}

static void fail_later(struct round *round)
{
	struct job *job = round->tensor->job;

	round->failing_at = round->slots.next;
	list_push_back(&job->store.failing, &round->failing_link);
	job->store.fail.step = on_fail;
	loop_begin(job->server->params.loop, &job->store.fail);
}

void round_fail_slots(struct round *round, const struct failure *failure)
{
	if (round->failing)
		return;
	/* Without memory for the words there is no later. */
	if (round->n_slots * round->tensor->job->n_nodes > FAIL_NODES ||
	    round_charged(round) > FAIL_BYTES)
		round->failing = held_new(job_memory(round->tensor->job), sizeof(*failure));
	if (!round->failing) {
		fail_now(round, failure);
		return;
	}
	*round->failing = *failure;
	fail_later(round);
}

void round_failing_end(struct job *job, struct list *link)
{
	(void)job;
	failing_done(container_of(link, struct round, failing_link));
}

void slot_end(struct job *job, struct list *link)
{
	slot_fail(container_of(link, struct slot, in_job), job->failure.status, job->failure.text);
}

void slot_end_answered(struct job *job, struct list *link)
{
	(void)job;
	slot_free(container_of(link, struct slot, in_job));
}

void part_end(struct job *job, struct list *link)
{
	struct part *part = container_of(link, struct part, in_job);

	job->server->hooks->carried_freed(job, &part->carried);
	freep(&part->contributors);
	list_remove(link);
}

static void part_drop(struct part *part, struct job *job)
{
	sweep_leave(job, &part->in_job);
	part_end(job, &part->in_job);
	quota_release(job->memory.quota, part_len(job));
	job->memory.charged_parts -= part_len(job);
	list_push_front(&job->store.spare_parts, &part->in_job);
}

/* Its memory stays a tensor's: nodes may still come by it on their way to the next. */
static void tensor_dropped(struct tensor *tensor)
{
	struct job *job = tensor->job;

	tensor_end(job, &tensor->in_job);
	list_push_front(&job->store.spare_tensors, &tensor->in_job);
}

/* One may have a hundred thousand parts. */
static bool on_drop(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, store.drop);

	for (unsigned i = 0; i < DROP_STEP; i++) {
		struct tensor *tensor = list_first(&job->store.dropping, struct tensor, in_job);
		struct map_entry *entry = tensor ? tensor->dropped_next : NULL;

		if (!tensor || job->state == JOB_OVER)
			return false;
		if (!entry) {
			tensor_dropped(tensor);
			continue;
		}
		tensor->dropped_next = map_next(&tensor->parts, entry);
		part_drop(container_of(entry, struct part, entry), job);
	}
	return true;
}

/* What comes late of a tensor that is forgotten makes no other: a node may have sent it before it knew. */
static void remember(struct job *job, uint64_t key)
{
	struct tensor *tensor = tensor_mention(job, key);

	for (uint32_t i = 0; tensor && i < job->n_nodes; i++)
		tensor->past[i] = DATA_ROUND_NEVER;
}

/* Nobody finds it any more. */
static void tensor_drop(struct tensor *tensor)
{
	struct job *job = tensor->job;
	uint64_t key = tensor->key;

	map_remove(&job->store.tensors, &tensor->entry);
	tensor->key = 0;
	tensor->first_part = NULL;
	tensor->dropped_next = map_first(&tensor->parts);
	tensor_leave(tensor);
	list_push_back(&job->store.dropping, &tensor->in_job);
	job->store.drop.step = on_drop;
	loop_begin(job->server->params.loop, &job->store.drop);
	remember(job, key);
}

void tensor_forget(struct tensor *tensor)
{
	struct job *job = tensor->job;

	tensor_leave(tensor);
	list_push_front(&job->store.forgotten, &tensor->in_job);
	/* One that is still being summed is dropped with a later one. */
	for (unsigned i = 0; i < FORGOTTEN_LOOKS; i++) {
		struct tensor *forgotten = list_first(&job->store.forgotten, struct tensor, in_job);

		if (!forgotten)
			break;
		if (list_empty(&forgotten->rounds)) {
			tensor_drop(forgotten);
			continue;
		}
		sweep_leave(job, &forgotten->in_job);
		list_remove(&forgotten->in_job);
		list_push_back(&job->store.forgotten, &forgotten->in_job);
	}
}

void tensor_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct tensor *tensor = container_of(link, struct tensor, in_job);

	(void)job;
	(void)now_ns;
	if (list_empty(&tensor->rounds))
		tensor_drop(tensor);
}

void tensor_end(struct job *job, struct list *link)
{
	struct tensor *tensor = container_of(link, struct tensor, in_job);

	(void)job;
	map_done(&tensor->parts);
	tensor->given_up = held_free(tensor->given_up);
	while (tensor->n_failed)
		failed_pop(tensor);
	list_remove(link);
}

void store_end(struct job *job)
{
	map_done(&job->store.tensors);
	map_done(&job->names.declared);
	map_done(&job->names.named);
	for (uint32_t i = 0; job->nodes && i < job->n_nodes; i++)
		job->nodes[i].last_tensor = NULL;
	quota_release(job->memory.quota, job->memory.charged_parts);
	job->memory.charged_parts = 0;
}

void store_free(struct job *job)
{
	struct slot *slot, *tmp;

	/* With the pool gone nobody sums these any more. */
	list_for_each_safe (slot, tmp, &job->store.summing, in_job)
		slot_fail(slot, job->failure.status, job->failure.text);
	loop_abort(&job->store.drop);
	loop_abort(&job->store.fail);
	map_done(&job->store.far_slots);
	map_done(&job->store.far_rounds);
	bulk_done(&job->store.bulk);
}
