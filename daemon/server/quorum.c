#include "server/quorum.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "server/engine.h"
#include "server/keep.h"
#include "server/round.h"

static uint64_t wait_ns(const struct job *job)
{
	return job->stragglers.quorum_timeout_ms * NSEC_PER_MSEC;
}

bool quorum_applies(const struct slot *slot)
{
	const struct data_header *h = &slot->header;
	uint32_t quorum = slot->job->stragglers.quorum;

	/* A minimum that comes late would stand for a round that is over. */
	return quorum && quorum < slot->job->n_nodes && h->operation == OPERATION_PUSH_PULL &&
	       (h->reduction == REDUCTION_SUM || h->reduction == REDUCTION_AVERAGE) && !h->root;
}

/* Whether a node would fall behind further than it may, if this round went on without it. */
static bool is_behind(const struct slot *slot, uint32_t node)
{
	uint32_t max = slot->job->stragglers.staleness ?: QUORUM_BEHIND, n = 0;
	const struct slot *other;

	list_for_each (other, &slot->part->slots, in_part)
		n += other->late && !other->acked[node];
	return n >= max;
}

bool quorum_is_ready(const struct slot *slot)
{
	const struct job *job = slot->job;

	if (!quorum_applies(slot) || slot->summing || slot->n_here < job->stragglers.quorum ||
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

/* -- Results ------------------------------------------------------------------------------------------------------ */

static void carry_failed(struct job *job, struct delivery *delivery, int r)
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
		carry_failed(slot->job, delivery, r);
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

/* As if a sum were under way: the job stays. */
static void hold(struct job *job)
{
	job->n_summing++;
}

static void release(struct job *job)
{
	job->n_summing--;
	job_release(job);
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
	hold(job);
	(void)answer(slot, delivery, true);
	/* A round that waited for somebody who was too far behind. */
	start_ready(job, part);
	release(job);
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
	hold(job);
	start_ready(job, NULL);
	over = job->state == JOB_OVER;
	release(job);
	return !over;
}
