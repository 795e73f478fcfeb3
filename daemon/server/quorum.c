/*
 * Rounds of a job with a quorum: when a slot may close without all nodes, what happens to what
 * comes too late, and contributor sets. round.c, engine.c and keep.c come here where a job has a
 * quorum.
 */
#include "server/quorum.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "server/engine.h"
#include "server/keep.h"
#include "server/round.h"
#include "server/told.h"

/* Rounds that one node may be behind in a job that outlives its daemons: a roll has 64. */
#define BEHIND_MAX 60u

static uint64_t wait_ns(const struct job *job)
{
	return job->stragglers.quorum_timeout_ms * NSEC_PER_MSEC;
}

bool quorum_applies(const struct slot *slot)
{
	const struct data_header *h = &slot->header;
	uint32_t quorum = slot->job->stragglers.quorum;
	unsigned reduction = data_reduction(h->reduction);

	/* A minimum that comes late would stand for a round that is over. */
	return quorum && quorum < slot->job->n_nodes && h->operation == OPERATION_PUSH_PULL &&
	       reduction != REDUCTION_MIN && reduction != REDUCTION_MAX && !h->root;
}

/* Whether a node would fall behind further than it may, if this round went on without it. */
static bool is_behind(const struct slot *slot, uint32_t node)
{
	uint32_t max = slot->job->stragglers.staleness ?: QUORUM_BEHIND, n = 0;
	const struct slot *other;

	if (slot->job->resume)
		max = MIN(max, BEHIND_MAX);
	list_for_each (other, &slot->part->slots, in_part)
		n += (other->late && !other->acked[node]) ||
		     (other->kept && !other->acked[node] && !other->number[node]);
	return n >= max;
}

bool quorum_is_ready(const struct slot *slot)
{
	const struct job *job = slot->job;

	if (!quorum_applies(slot) || slot->summing || !told_is_complete(job) ||
	    slot->n_here < job->stragglers.quorum ||
	    (wait_ns(job) && clock_now_ns() < slot->since_ns + wait_ns(job)))
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!slot->from[i] && is_behind(slot, i))
			return false;
	return true;
}

/* -- What is carried ---------------------------------------------------------------------------------------------- */

static void carried_free(struct job *job, struct carried *carried)
{
	list_remove(&carried->link);
	quota_release(job->quota, carried->charged);
	(void)block_unref(carried->block);
	free(carried);
}

void quorum_drop(struct job *job, struct list *list)
{
	struct carried *carried, *tmp;

	list_for_each_safe (carried, tmp, list, link)
		carried_free(job, carried);
}

/* By round, then by node: what it becomes part of does not depend on who of them came first. */
static void carried_add(struct list *list, struct carried *carried)
{
	struct carried *other;

	list_for_each (other, list, link) {
		if (other->header.round > carried->header.round ||
		    (other->header.round == carried->header.round &&
		     other->header.node > carried->header.node)) {
			list_push_back(&other->link, &carried->link);
			return;
		}
	}
	list_push_back(list, &carried->link);
}

/* Keeps the contribution of a delivery that is about to be answered. What was lent is the trainer's, and copied. */
static int carry(struct part *part, struct job *job, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct carried *carried;
	uint64_t len;
	int r = 0;

	if (!h->len)
		return 0;
	len = sizeof(*carried) + (delivery->payload_block ? h->len : 0);
	if (quota_charge(job->quota, len))
		return QUOTA_E_FULL;
	carried = calloc(1, sizeof(*carried));
	if (!carried) {
		quota_release(job->quota, len);
		return error_origin(-ENOMEM);
	}
	carried->header = *h;
	carried->charged = len;
	if (delivery->payload_block) {
		carried->block = block_ref(delivery->payload_block);
		carried->payload = delivery->payload;
	} else {
		r = block_new(job->server->params.blocks, h->len, job->quota, &carried->block);
	}
	list_init(&carried->link);
	if (r) {
		carried_free(job, carried);
		return r;
	}
	if (!delivery->payload_block) {
		metric_copy(&job->server->copied, carried->block->data, delivery->payload, h->len);
		carried->payload = carried->block->data;
	}
	carried_add(&part->carried, carried);
	metric_count(&job->server->carried, 1);
	return 0;
}

/* -- Who is in what ------------------------------------------------------------------------------------------------ */

static int roll_get(struct part *part, struct job *job)
{
	uint64_t len = job->n_nodes * sizeof(part->roll[0]);

	if (part->roll)
		return 0;
	if (quota_charge(job->quota, len))
		return QUOTA_E_FULL;
	part->roll = calloc(job->n_nodes, sizeof(part->roll[0]));
	if (!part->roll) {
		quota_release(job->quota, len);
		return error_origin(-ENOMEM);
	}
	job->charged_parts += len;
	return 0;
}

static bool roll_reaches(const struct part *part, uint64_t round)
{
	return round <= part->roll_round && part->roll_round - round < 64;
}

static bool roll_has(const struct part *part, uint32_t node, uint64_t round)
{
	return part->roll && roll_reaches(part, round) &&
	       part->roll[node] >> (part->roll_round - round) & 1;
}

static void roll_add(struct part *part, uint32_t node, uint64_t round)
{
	if (roll_reaches(part, round))
		part->roll[node] |= UINT64_C(1) << (part->roll_round - round);
}

static void roll_advance(struct part *part, uint32_t n_nodes, uint64_t round)
{
	uint64_t by = round - part->roll_round;

	if (round <= part->roll_round)
		return;
	for (uint32_t i = 0; i < n_nodes; i++)
		part->roll[i] = by < 64 ? part->roll[i] << by : 0;
	part->roll_round = round;
}

void quorum_call_roll(struct slot *slot)
{
	struct job *job = slot->job;
	struct part *part = slot->part;
	const struct carried *carried;
	struct data_roll *roll;

	if (!slot->result || !told_has_roll(job, &slot->header))
		return;
	roll_advance(part, job->n_nodes, slot->header.round);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (slot->from[i])
			roll_add(part, i, slot->header.round);
	list_for_each (carried, &slot->carried, link)
		roll_add(part, carried->header.node, carried->header.round);
	roll = data_roll_of(slot->result->data, slot->header.part_len);
	roll->n = slot->n_here + slot->n_carried;
	roll->round = part->roll_round;
	memcpy(roll->nodes, part->roll, job->n_nodes * sizeof(roll->nodes[0]));
	data_roll_swap(roll, job->n_nodes);
}

static bool is_carried(const struct part *part, const struct data_header *h)
{
	const struct carried *carried;

	list_for_each (carried, &part->carried, link)
		if (carried->header.node == h->node && carried->header.round == h->round)
			return true;
	return false;
}

int quorum_catch(struct slot *slot, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;

	if (roll_has(slot->part, h->node, h->round) || is_carried(slot->part, h))
		return 0;
	return carry(slot->part, slot->job, delivery);
}

int quorum_offer(struct tensor *tensor, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct job *job = tensor->job;
	const struct data_roll *roll;
	struct part *part;
	int r;

	r = part_get(tensor, h, &part);
	if (!r)
		r = roll_get(part, job);
	if (r)
		return r;
	roll = data_roll_of(delivery->payload, h->part_len);
	if (le64toh(roll->round) <= part->roll_round)
		return 0;
	part->roll_round = le64toh(roll->round);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		part->roll[i] = le64toh(roll->nodes[i]);
	return 0;
}

int quorum_offer_late(struct tensor *tensor, const struct delivery *delivery)
{
	struct part *part;
	int r;

	r = part_get(tensor, &delivery->header, &part);
	if (!r)
		r = roll_get(part, tensor->job);
	if (!r && !is_carried(part, &delivery->header))
		r = carry(part, tensor->job, delivery);
	return r;
}

static bool fits(const struct carried *carried, const struct data_header *h)
{
	const struct data_header *c = &carried->header;

	return c->total == h->total && c->offset == h->offset && c->part_len == h->part_len &&
	       c->reduction == h->reduction && c->dtype == h->dtype;
}

static bool reduces_same(const struct slot *slot)
{
	return slot->job->stragglers.quorum && slot->header.operation == OPERATION_PUSH_PULL;
}

int quorum_prepare(struct slot *slot)
{
	struct carried *carried, *tmp;

	if (!reduces_same(slot))
		return 0;
	if (told_has_roll(slot->job, &slot->header)) {
		int r = roll_get(slot->part, slot->job);

		if (r)
			return r;
	}
	list_for_each_safe (carried, tmp, &slot->part->carried, link) {
		if (!fits(carried, &slot->header))
			continue;
		list_remove(&carried->link);
		list_push_back(&slot->carried, &carried->link);
		slot->n_carried++;
	}
	if (!slot->n_carried)
		return 0;
	slot->more_inputs = calloc(slot->job->n_nodes + slot->n_carried, sizeof(void *));
	return slot->more_inputs ? 0 : error_origin(-ENOMEM);
}

void quorum_undo(struct slot *slot)
{
	struct carried *carried, *tmp;

	list_for_each_safe (carried, tmp, &slot->carried, link) {
		list_remove(&carried->link);
		carried_add(&slot->part->carried, carried);
	}
	slot->n_carried = 0;
}

/* -- Results ------------------------------------------------------------------------------------------------------ */

void quorum_failed(struct job *job, struct delivery *delivery, int r)
{
	struct failure failure;

	if (r == QUOTA_E_FULL) {
		round_over_quota(job, delivery);
		return;
	}
	(void)failure_set(&failure, r, "job %s: a contribution that came late: %s", job->name,
			  strerror(-r));
	delivery_fail(delivery, r, failure.text);
	job_fail(job, &failure, NULL);
}

/* Returns false when the job is over, or its last node has come: the slot is gone then. */
static bool answer(struct slot *slot, struct delivery *delivery, bool late)
{
	uint32_t node = delivery->header.node;
	int r = late ? carry(slot->part, slot->job, delivery) : 0;

	if (r) {
		quorum_failed(slot->job, delivery, r);
		return false;
	}
	keep_answer(slot, delivery);
	slot->acked[node] = true;
	if (++slot->n_acked < slot->n_expected)
		return true;
	slot_free(slot);
	return false;
}

/* From the pool: it waits for those who have not come. */
static void slot_wait(struct slot *slot)
{
	struct job *job = slot->job;
	uint64_t own = slot_len(job);

	list_remove(&slot->in_job);
	list_push_back(&job->late, &slot->in_job);
	job->n_summing--;
	slot->held = slot->late = true;
	/* The contributions go; the result is charged by itself. */
	quota_release(job->quota, slot->charged - own);
	slot->charged = own;
}

void quorum_finish(struct slot *slot)
{
	uint32_t n_nodes = slot->job->n_nodes;

	quorum_drop(slot->job, &slot->carried);
	slot_wait(slot);
	FAILPOINT("server-quorum-closed");
	for (uint32_t i = 0; i < n_nodes; i++)
		if (slot->from[i] && !answer(slot, TAKE_PTR(slot->from[i]), slot->came_late[i]))
			return;
}

/* The first slot of a list of those that may go on. */
static struct slot *first_ready(const struct job *job, const struct part *part)
{
	struct slot *slot;

	if (part) {
		list_for_each (slot, &part->slots, in_part)
			if (quorum_is_ready(slot))
				return slot;
	} else {
		list_for_each (slot, &job->open, in_job)
			if (quorum_is_ready(slot))
				return slot;
	}
	return NULL;
}

/* Starts what may go on, of one part or of all; the caller holds the job, which may end on the way. */
static void start_ready(struct job *job, const struct part *part)
{
	struct slot *slot;

	while (job->state == JOB_RUNNING && (slot = first_ready(job, part)))
		engine_start(slot);
}

void quorum_late(struct slot *slot, struct delivery *delivery)
{
	uint32_t node = delivery->header.node;
	struct job *job = slot->job;
	struct part *part = slot->part;

	if (!slot->late) {
		slot->from[node] = delivery;
		slot->came_late[node] = true;
		return;
	}
	job_hold(job);
	(void)answer(slot, delivery, true);
	/* A round that waited for somebody who was too far behind. */
	start_ready(job, part);
	job_let_go(job);
}

void quorum_again(struct slot *slot, struct delivery *delivery)
{
	struct job *job = slot->job;
	const struct part *part = slot->part;

	job_hold(job);
	keep_again(slot, delivery);
	if (job->stragglers.quorum)
		start_ready(job, part);
	job_let_go(job);
}

/* -- All nodes have offered what they keep -------------------------------------------------------------------------- */

/* Of what a node had contributed too late, what another has seen in a result since. Returns false when that cannot be told. */
static bool drop_known(struct job *job, struct part *part)
{
	struct carried *carried, *tmp;

	list_for_each_safe (carried, tmp, &part->carried, link) {
		const struct data_header *h = &carried->header;

		if (roll_has(part, h->node, h->round))
			carried_free(job, carried);
		else if (h->round <= part->roll_round && !roll_reaches(part, h->round))
			return false;
	}
	return true;
}

static void fail_unknown(struct job *job, const struct tensor *tensor)
{
	const char *name = declare_name_of(job, tensor->key);
	struct failure failure;

	(void)failure_set(&failure, -ECONNRESET,
			  "job %s: tensor %.100s: a server was lost, and a contribution that had "
			  "come too late was not used for so long that nobody knows whether it is "
			  "in a result: use one kind of reduction for one tensor",
			  job->name, name ? name : "of another home");
	job_fail(job, &failure, NULL);
}

/* The first slot with a delivery that has waited for all offers. */
static struct slot *first_again(const struct job *job)
{
	struct slot *slot;

	list_for_each (slot, &job->kept, in_job)
		if (!list_empty(&slot->again))
			return slot;
	return NULL;
}

static struct slot *first_complete(const struct job *job)
{
	struct slot *slot;

	list_for_each (slot, &job->open, in_job)
		if (slot->n_expected && slot->n_here == slot->n_expected && !slot->rows)
			return slot;
	return NULL;
}

void quorum_told(struct job *job)
{
	struct map_entry *tensor_entry, *part_entry;
	struct delivery *delivery;
	struct slot *slot;

	map_for_each (tensor_entry, &job->tensors) {
		struct tensor *tensor = container_of(tensor_entry, struct tensor, entry);

		map_for_each (part_entry, &tensor->parts) {
			if (drop_known(job, container_of(part_entry, struct part, entry)))
				continue;
			fail_unknown(job, tensor);
			return;
		}
	}
	while (job->state == JOB_RUNNING && (slot = first_again(job))) {
		delivery = list_first(&slot->again, struct delivery, link);
		list_remove(&delivery->link);
		keep_again(slot, delivery);
	}
	while (job->state == JOB_RUNNING && (slot = first_complete(job)))
		engine_start(slot);
	if (job->stragglers.quorum)
		start_ready(job, NULL);
}

/* -- Time --------------------------------------------------------------------------------------------------------- */

uint64_t quorum_deadline(const struct job *job)
{
	uint64_t now_ns;
	struct slot *slot;

	if (!job->stragglers.quorum || !wait_ns(job))
		return CLOCK_NEVER;
	now_ns = clock_now_ns();
	/* The oldest first. One that is older waits for contributions. */
	list_for_each (slot, &job->open, in_job)
		if (quorum_applies(slot) && slot->since_ns + wait_ns(job) > now_ns)
			return slot->since_ns + wait_ns(job);
	return CLOCK_NEVER;
}

bool quorum_expired(struct job *job)
{
	bool over;

	if (!job->stragglers.quorum)
		return true;
	job_hold(job);
	start_ready(job, NULL);
	over = job->state == JOB_OVER;
	job_let_go(job);
	return !over;
}
