/*
 * Rounds of a job with a quorum: when a slot may close without all nodes, what happens to what
 * comes too late, and contributor sets. round.c, engine.c and keep.c come here where a job has a
 * quorum.
 */
#include "server/round/quorum.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "server/round/engine.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/round.h"

/* Rounds that one node may be behind in a job that outlives its daemons: a set of contributors has 64. */
#define BEHIND_MAX 60u
/*
 * Contributions of a part that have come too late for their rounds, or may. With as many its rounds wait for all: each that comes
 * has its place found among them.
 */
#define LATE_MAX JOB_RANKS_MAX
/* Slots of a part that are looked at at once, when one of them may go on; more are the sweep's. */
#define READY_MAX 64

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
	       reduction != REDUCTION_MIN && reduction != REDUCTION_MAX && !h->waits_for_all;
}

/* Whether a node would fall behind further than it may, if this round went on without it. */
static bool is_behind(const struct slot *slot, uint32_t node)
{
	uint32_t max = slot->job->stragglers.staleness ?: QUORUM_BEHIND;

	if (slot->job->retention.resume)
		max = MIN(max, BEHIND_MAX);
	return slot->part->behind[node] >= max;
}

static bool is_full(const struct part *part)
{
	return part->n_behind + part->n_carried >= LATE_MAX;
}

void quorum_count_behind(struct slot *slot, uint32_t node)
{
	bool behind = !slot->acked[node] && (slot->late || (slot->kept && !slot->number[node]));

	if (behind != slot->behind[node]) {
		slot->part->behind[node] += behind ? 1 : UINT32_MAX;
		slot->part->n_behind += behind ? 1 : UINT64_MAX;
	}
	slot->behind[node] = behind;
}

bool quorum_is_ready(const struct slot *slot)
{
	const struct job *job = slot->job;

	if (!quorum_applies(slot) || slot->summing || slot->round->failing ||
	    !offered_is_complete(job) || slot->n_here < job->stragglers.quorum ||
	    is_full(slot->part) || (wait_ns(job) && clock_now_ns() < slot->since_ns + wait_ns(job)))
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!slot->from[i] && is_behind(slot, i))
			return false;
	return true;
}

/* -- What is carried --------------------------------------------------------------------------- */

static void carried_free(struct job *job, struct carried *carried)
{
	list_remove(&carried->spent.link);
	quota_release(job->memory.quota, carried->spent.charged);
	(void)block_unref(carried->spent.one);
	free(carried);
}

void quorum_drop(struct job *job, struct list *list)
{
	spend_all(&job->store.spending, list, 0);
}

static const struct data_header *header_at(const struct list *link)
{
	return &container_of(link, struct carried, spent.link)->header;
}

static bool comes_before(const struct data_header *a, const struct data_header *b)
{
	return a->round < b->round || (a->round == b->round && a->node < b->node);
}

/*
 * By round, then by node: what it becomes part of does not depend on who of them came first. Mostly
 * they come in that order.
 */
static void carried_add(struct part *part, struct carried *carried)
{
	struct list *list = &part->carried, *after = list->prev;

	while (after != list && comes_before(&carried->header, header_at(after)))
		after = after->prev;
	list_insert_before(after->next, &carried->spent.link);
	part->n_carried++;
}

/*
 * Keeps the contribution of a delivery that is about to be answered. What was given in place is the
 * trainer's, and copied.
 */
static int carry(struct part *part, struct job *job, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct carried *carried;
	uint64_t len;
	int r = 0;

	if (!h->len)
		return 0;
	len = sizeof(*carried) + delivery_bytes(delivery);
	if (store_charge(job, len))
		return QUOTA_E_FULL;
	carried = calloc(1, sizeof(*carried));
	if (!carried) {
		quota_release(job->memory.quota, len);
		return error_origin(-ENOMEM);
	}
	carried->header = *h;
	spent_init_one(&carried->spent, NULL, len);
	if (delivery->payload_block) {
		carried->spent.one = block_ref(delivery->payload_block);
		carried->payload = delivery->payload;
	} else {
		r = store_block_new(job, h->len, &carried->spent.one);
	}
	if (r) {
		carried_free(job, carried);
		return r;
	}
	if (!delivery->payload_block) {
		carried->payload = carried->spent.one->data;
		metric_copy(&job->server->copied, carried->spent.one->data, delivery->payload,
			    h->len);
	}
	carried_add(part, carried);
	metric_count(&job->server->carried, 1);
	return 0;
}

/* -- Who is in what ---------------------------------------------------------------------------- */

static int contributors_get(struct part *part, struct job *job)
{
	uint64_t len = job->n_nodes * sizeof(part->contributors[0]);

	if (part->contributors)
		return 0;
	if (store_charge(job, len))
		return QUOTA_E_FULL;
	part->contributors = calloc(job->n_nodes, sizeof(part->contributors[0]));
	if (!part->contributors) {
		quota_release(job->memory.quota, len);
		return error_origin(-ENOMEM);
	}
	job->memory.charged_parts += len;
	return 0;
}

static bool contributors_reaches(const struct part *part, uint64_t round)
{
	return round <= part->contributors_round && part->contributors_round - round < 64;
}

static bool contributors_has(const struct part *part, uint32_t node, uint64_t round)
{
	return part->contributors && contributors_reaches(part, round) &&
	       part->contributors[node] >> (part->contributors_round - round) & 1;
}

static void contributors_add(struct part *part, uint32_t node, uint64_t round)
{
	if (contributors_reaches(part, round))
		part->contributors[node] |= UINT64_C(1) << (part->contributors_round - round);
}

static void contributors_advance(struct part *part, uint32_t n_nodes, uint64_t round)
{
	uint64_t by = round - part->contributors_round;

	if (round <= part->contributors_round)
		return;
	for (uint32_t i = 0; i < n_nodes; i++)
		part->contributors[i] = by < 64 ? part->contributors[i] << by : 0;
	part->contributors_round = round;
}

void quorum_call_contributors(struct slot *slot)
{
	struct job *job = slot->job;
	struct part *part = slot->part;
	const struct carried *carried;
	struct data_contributors *contributors;

	if (!slot->result || !offered_has_contributors(job, &slot->header))
		return;
	contributors_advance(part, job->n_nodes, slot->header.round);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (slot->from[i])
			contributors_add(part, i, slot->header.round);
	list_for_each (carried, &slot->carried, spent.link)
		contributors_add(part, carried->header.node, carried->header.round);
	contributors = data_contributors_of(slot->result->data, slot->header.part_len);
	contributors->n = slot->n_here + slot->n_carried;
	contributors->round = part->contributors_round;
	memcpy(contributors->nodes, part->contributors,
	       job->n_nodes * sizeof(contributors->nodes[0]));
	data_contributors_swap(contributors, job->n_nodes);
}

static bool is_carried(const struct part *part, const struct data_header *h)
{
	const struct list *at = part->carried.prev;

	while (at != &part->carried && comes_before(h, header_at(at)))
		at = at->prev;
	return at != &part->carried && !comes_before(header_at(at), h);
}

int quorum_catch(struct slot *slot, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;

	if (contributors_has(slot->part, h->node, h->round) || is_carried(slot->part, h))
		return 0;
	return carry(slot->part, slot->job, delivery);
}

int quorum_offer(struct tensor *tensor, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct job *job = tensor->job;
	const struct data_contributors *contributors;
	struct part *part;
	int r;

	r = part_get(tensor, h, &part);
	if (!r)
		r = contributors_get(part, job);
	if (r)
		return r;
	contributors = data_contributors_of(delivery->payload, h->part_len);
	if (le64toh(contributors->round) <= part->contributors_round)
		return 0;
	part->contributors_round = le64toh(contributors->round);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		part->contributors[i] = le64toh(contributors->nodes[i]);
	return 0;
}

int quorum_offer_late(struct tensor *tensor, const struct delivery *delivery)
{
	struct part *part;
	int r;

	r = part_get(tensor, &delivery->header, &part);
	if (!r)
		r = contributors_get(part, tensor->job);
	/* No more than there can be of jobs whose rounds are closed here. */
	if (!r && part->n_carried >= LATE_MAX + tensor->job->n_nodes)
		r = QUOTA_E_FULL;
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
	struct part *part = slot->part;
	struct carried *carried, *tmp;
	bool was_full = is_full(part);

	if (!reduces_same(slot))
		return 0;
	if (offered_has_contributors(slot->job, &slot->header)) {
		int r = contributors_get(slot->part, slot->job);

		if (r)
			return r;
	}
	list_for_each_safe (carried, tmp, &slot->part->carried, spent.link) {
		if (!fits(carried, &slot->header))
			continue;
		list_remove(&carried->spent.link);
		list_push_back(&slot->carried, &carried->spent.link);
		slot->n_carried++;
		part->n_carried--;
	}
	/* Others of its rounds may go on. */
	if (was_full && !is_full(part))
		sweep_later(slot->job, SWEEP_TIME);
	if (!slot->n_carried)
		return 0;
	slot->sum.more_inputs =
		held_new(job_memory(slot->job),
			 (slot->job->n_nodes + slot->n_carried) * sizeof(slot->sum.more_inputs[0]));
	return slot->sum.more_inputs ? 0 : error_origin(-errno);
}

void quorum_undo(struct slot *slot)
{
	struct part *part = slot->part;
	struct carried *carried, *tmp;
	struct list *after = part->carried.next;

	list_for_each_safe (carried, tmp, &slot->carried, spent.link) {
		while (after != &part->carried && comes_before(header_at(after), &carried->header))
			after = after->next;
		list_remove(&carried->spent.link);
		list_insert_before(after, &carried->spent.link);
	}
	part->n_carried += slot->n_carried;
	slot->n_carried = 0;
}

/* -- Results ----------------------------------------------------------------------------------- */

void quorum_failed(struct job *job, struct delivery *delivery, int r)
{
	struct failure failure;

	if (r == QUOTA_E_FULL) {
		round_over_quota(job, delivery);
		return;
	}
	(void)failure_set(&failure, r, "job %s: a contribution that came late: %s", job->owner.name,
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
	quorum_count(slot, node);
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

	slot_move(slot, &job->store.late);
	job->store.n_summing--;
	slot->held = slot->late = true;
	quorum_count_all(slot);
	/* The contributions go; the result is charged by itself. */
	quota_release(job->memory.quota, slot->charged - own);
	slot->charged = own;
}

void quorum_finish(struct slot *slot)
{
	uint32_t n_nodes = slot->job->n_nodes;

	slot_wait(slot);
	FAILPOINT("server-quorum-closed");
	for (uint32_t i = 0; i < n_nodes; i++)
		if (slot->from[i] && !answer(slot, TAKE_PTR(slot->from[i]), slot->came_late[i]))
			return;
}

/*
 * The first slot of a part that may go on. *ret_more: there are others that have not been looked
 * at.
 */
static struct slot *first_ready(const struct part *part, bool *ret_more)
{
	struct slot *slot;
	unsigned n = 0;

	list_for_each (slot, &part->slots, in_part) {
		if (quorum_is_ready(slot))
			return slot;
		if (++n < READY_MAX)
			continue;
		*ret_more = true;
		return NULL;
	}
	return NULL;
}

/* Starts what may go on of a part; the caller holds the job, which may end on the way. */
static void start_ready(struct job *job, const struct part *part)
{
	struct slot *slot;
	bool more = false;

	while (job->state == JOB_RUNNING && (slot = first_ready(part, &more)))
		engine_start(slot);
	if (job->state == JOB_RUNNING && more)
		sweep(job, SWEEP_TIME);
}

/*
 * What comes while the sum is made is carried when that is done, of as many nodes as there are: what a trainer lends is copied now,
 * into memory that is charged as what comes over a wire. Returns 0, QUOTA_E_FULL or -ENOMEM.
 */
static int take_lent(struct slot *slot, struct delivery *delivery)
{
	uint32_t len = delivery->header.len;
	struct job *job = slot->job;
	int r;

	if (delivery->payload_block || !len)
		return 0;
	r = slot_charge(slot, block_bytes(len));
	if (!r)
		r = block_new(job->server->params.blocks, len, NULL, &delivery->payload_block);
	if (r)
		return r;
	metric_copy(&job->server->copied, delivery->payload_block->data, delivery->payload, len);
	delivery->payload = delivery->payload_block->data;
	return 0;
}

void quorum_late(struct slot *slot, struct delivery *delivery)
{
	uint32_t node = delivery->header.node;
	struct job *job = slot->job;
	struct part *part = slot->part;
	int r;

	if (!slot->late) {
		r = take_lent(slot, delivery);
		if (r) {
			quorum_failed(job, delivery, r);
			return;
		}
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

/* -- All nodes have offered what they keep ----------------------------------------------------- */

static void fail_unknown(struct job *job, const struct carried *carried)
{
	const char *name = declare_name_of(job, carried->header.key);
	struct failure failure;

	(void)failure_set(&failure, -ECONNRESET,
			  "job %s: tensor %.100s: a server was lost, and a contribution that had "
			  "come too late was not used for so long that nobody knows whether it is "
			  "in a result: use one kind of reduction for one tensor",
			  job->owner.name, name ? name : "of another home");
	job_fail(job, &failure, NULL);
}

/* Of what a node had contributed too late, what another has seen in a result since is dropped. */
bool quorum_offered(struct job *job, struct part *part)
{
	const struct carried *unknown = NULL;
	struct list known = LIST_INIT(known);
	struct carried *carried, *tmp;

	list_for_each_safe (carried, tmp, &part->carried, spent.link) {
		const struct data_header *h = &carried->header;

		if (contributors_has(part, h->node, h->round)) {
			list_remove(&carried->spent.link);
			list_push_back(&known, &carried->spent.link);
			part->n_carried--;
		} else if (h->round <= part->contributors_round &&
			   !contributors_reaches(part, h->round)) {
			unknown = carried;
		}
	}
	quorum_drop(job, &known);
	if (unknown)
		fail_unknown(job, unknown);
	return !unknown;
}

/* -- Time -------------------------------------------------------------------------------------- */

/* One that is older waits for contributions. */
void quorum_until(const struct slot *slot, uint64_t now_ns)
{
	struct job *job = slot->job;

	if (quorum_applies(slot) && slot->since_ns + wait_ns(job) > now_ns)
		sweep_until(job, slot->since_ns + wait_ns(job));
}
