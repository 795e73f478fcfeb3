/*
 * Retained results of a job that outlives its daemons' processes: numbered for each node,
 * acknowledged, released, offered after a loss. engine.c comes here with a result, round.c with
 * contributions that come again, server.c with offers and acknowledgements.
 */
#include "server/round/keep.h"

#include "base/failpoint.h"
#include "server/common/set.h"
#include "server/job/forget.h"
#include "server/round/accumulate.h"
#include "server/round/offered.h"
#include "server/round/quorum.h"
#include "server/round/round.h"
#include "server/round/rows.h"

/*
 * Results that a node keeps although every node has them, before it is told so in a message of its
 * own.
 */
#define TELL_AFTER 16

/* Slots that hear in one go that a node keeps their results, */
#define ACK_STEP 4096
/* each counted once more for so many nodes, and bytes: it may end with that, all nodes' numbers for it, and its result. */
#define ACK_NODES 64
#define ACK_BYTES (16u << 10)
/* The same of what is lent. */
#define LENT_BYTES 1024u

/* -- Numbers ----------------------------------------------------------------------------------- */

static struct slot **sent_place(const struct sent *sent, uint32_t number)
{
	return &sent->slots[number & (sent->capacity - 1)];
}

static void sent_advance(struct sent *sent)
{
	while (sent->released != sent->last && !*sent_place(sent, sent->released + 1))
		sent->released++;
}

static int sent_grow(struct job *job, struct sent *sent)
{
	struct sent grown = *sent;

	grown.capacity = sent->capacity ? 2 * sent->capacity : 64;
	grown.slots = held_new(job_memory(job), grown.capacity * sizeof(struct slot *));
	if (!grown.slots)
		return error_origin(-errno);
	for (uint32_t n = sent->released; n != sent->last; n++)
		*sent_place(&grown, n + 1) = *sent_place(sent, n + 1);
	(void)held_free(sent->slots);
	*sent = grown;
	return 0;
}

/* The number under which a node is sent the slot's result. */
static int sent_add(struct job *job, struct sent *sent, struct slot *slot, uint32_t *ret_number)
{
	int r;

	if (sent->capacity)
		sent_advance(sent);
	if (sent->last - sent->released == sent->capacity) {
		r = sent_grow(job, sent);
		if (r)
			return error_trace(r);
	}
	*sent_place(sent, ++sent->last) = slot;
	*ret_number = sent->last;
	return 0;
}

static uint32_t all_have(struct sent *sent)
{
	if (sent->capacity)
		sent_advance(sent);
	return sent->notified = sent->released;
}

/* Tells who would otherwise hear of it too late. */
static void on_tell(struct mail *mail)
{
	struct job *job = container_of(mail, struct job, retention.telling);

	job->retention.is_telling = false;
	if (job->state != JOB_RUNNING)
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];
		struct data_header header = {
			.op = DATA_RELEASE,
			.job = job->number,
			.node = i,
			.epoch = job->placement.data_epoch,
		};

		if (!node->peer || !node->sent.capacity)
			continue;
		sent_advance(&node->sent);
		if (node->sent.released - node->sent.notified < TELL_AFTER)
			continue;
		header.up_to = node->sent.released;
		/* Without memory it hears of it with the next result. */
		if (FAILPOINT_DROPS("release-sent") || !peer_notice(node->peer, &header, NULL))
			node->sent.notified = node->sent.released;
	}
}

/*
 * At the end of this turn of the loop: then it is often for many, and those that are answered
 * meanwhile know it already.
 */
static void tell(struct job *job)
{
	if (job->retention.is_telling)
		return;
	job->retention.is_telling = true;
	job->retention.telling.run = on_tell;
	loop_finish(job->server->params.loop, &job->retention.telling);
}

void keep_end(struct job *job)
{
	loop_abort(&job->retention.acking);
	loop_abort(&job->retention.combining);
	if (job->retention.is_telling)
		loop_unpost(job->server->params.loop, &job->retention.telling);
	job->retention.is_telling = false;
}

int keep_number(struct job *job, struct slot *slot, uint32_t *number, struct data_header *header)
{
	struct sent *sent = &job->nodes[header->node].sent;

	if (!*number && sent_add(job, sent, slot, number))
		return error_origin(-ENOMEM);
	header->number = *number;
	header->released = all_have(sent);
	return 0;
}

/* -- What is kept ------------------------------------------------------------------------------ */

void keep_answer(struct slot *slot, struct delivery *delivery)
{
	struct job *job = slot->job;
	uint32_t number = delivery->header.node;
	const struct job_node *node = &job->nodes[number];
	struct data_header *header = &delivery->header; /* becomes the answer's where it is */
	bool wants = slot->result && set_wants(job, &slot->header, number);

	header->op = DATA_RESULT;
	header->flags = slot->is_kept_here ? DATA_FLAG_KEPT : 0;
	header->len = wants ? offered_result_len(job, &slot->header) : 0;
	header->status = header->priority = 0;
	if (stragglers_any(&job->stragglers) && slot->header.operation == OPERATION_PUSH_PULL)
		header->n_contributions = slot->n_here + slot->n_carried;
	/* One that was offered. */
	if (header->len && offered_has_contributors(job, &slot->header))
		header->n_contributions = (uint32_t)MIN(
			le64toh(data_contributors_of(slot->result->data, slot->header.part_len)->n),
			(uint64_t)JOB_RANKS_MAX - 1);
	if (job->membership.elastic)
		header->n_gone = slot->n_gone & ~LEDGER_WAITING;
	if (slot->n_gone & LEDGER_WAITING)
		header->newcomers_wait = 1;
	/* What goes to a node that was lost meanwhile goes nowhere. */
	if (job->retention.resume && delivery->peer == node->peer) {
		/*
		 * An answer that was lost with its connection comes again under its number, or
		 * those behind it would wait for it.
		 */
		if (keep_number(job, slot, &slot->number[number], header)) {
			refuse(delivery, -ENOMEM, "job %s: out of memory", job->owner.name);
			return;
		}
		quorum_count(slot, number);
	}
	FAILPOINT("server-result-answered");
	/* What a node of this process keeps is in memory that its trainers can write to. */
	delivery_answer_also(delivery, header, wants ? slot->result : NULL,
			     slot->is_kept_here ? NULL : &slot->check);
}

static void answer_safe(struct slot *slot)
{
	slot->safe.is = true;
	for (uint32_t i = 0; i < slot->job->n_nodes; i++)
		if (slot->from[i])
			keep_answer(slot, TAKE_PTR(slot->from[i]));
}

static void answer_offers(struct slot *slot)
{
	struct delivery *offer;

	while ((offer = list_first(&slot->offers, struct delivery, link))) {
		struct data_header header = { .op = DATA_OK, .job = slot->job->number };

		list_remove(&offer->link);
		header.node = offer->header.node;
		delivery_answer(offer, &header, NULL, NULL);
	}
}

/*
 * Whether those that keep it are enough: in an elastic job any of them may be lost for good. A node that keeps it goes on doing
 * so, and one that is out does not come back: none is looked at twice.
 */
static bool is_safe(struct slot *slot)
{
	const struct job *job = slot->job;

	for (; job->membership.elastic && slot->safe.n < job->n_nodes; slot->safe.n++)
		if (set_has(job, &slot->header, slot->safe.n) &&
		    set_wants(job, &slot->header, slot->safe.n) && !slot->acked[slot->safe.n])
			return false;
	return true;
}

/* A node keeps it. May free the slot: then returns true. */
static bool slot_ack(struct slot *slot, uint32_t node)
{
	if (!slot->acked[node]) {
		slot->acked[node] = true;
		slot->n_acked++;
		quorum_count(slot, node);
	}
	if (!slot->safe.is && set_wants(slot->job, &slot->header, node) && is_safe(slot))
		answer_safe(slot);
	if (slot->n_acked < slot->n_expected)
		return false;
	FAILPOINT("server-result-released");
	answer_offers(slot);
	keep_fail(slot, -EALREADY, "all nodes have the result");
	slot_free(slot);
	return true;
}

/* From the pool, or offered: it is in no list of what is worked on any more. */
static void slot_keep(struct slot *slot)
{
	struct job *job = slot->job;
	uint64_t own = slot_len(job);

	slot_move(slot, &job->store.kept);
	job->store.n_summing--;
	slot->held = slot->kept = true;
	quorum_count_all(slot);
	/* The contributions go; the result is charged by itself. */
	quota_release(job->memory.quota, slot->charged - own);
	slot->charged = own;
}

/*
 * A node has come to a slot that is kept. Where not all need to, what it brings may be in no result
 * yet, which is found out once all nodes have offered theirs. Returns false when that has ended the
 * job.
 */
static bool answer_kept(struct slot *slot, struct delivery *delivery)
{
	struct job *job = slot->job;
	bool calls = offered_has_contributors(job, &slot->header);
	int r;

	if (calls && !offered_is_complete(job)) {
		slot_put_call(slot, &slot->again, delivery);
		return true;
	}
	r = calls ? quorum_catch(slot, delivery) : 0;
	if (r) {
		quorum_failed(job, delivery, r);
		return false;
	}
	keep_answer(slot, delivery);
	return true;
}

/*
 * What has come again, once all nodes' offers are there; of many, the rest by a sweep. Returns false when that has ended the
 * job.
 */
static bool go_on(struct slot *slot)
{
	struct job *job = slot->job;
	struct delivery *delivery;

	for (uint64_t n = 0; offered_is_complete(job); n += 1 + job->n_nodes / ACK_NODES) {
		delivery = list_first(&slot->again, struct delivery, link);
		if (!delivery)
			break;
		if (n >= ACK_STEP) {
			sweep_later(job, SWEEP_NEWS);
			break;
		}
		list_remove(&delivery->link);
		/* It may have come too late, and is copied then. */
		if (!delivery->payload_block)
			n += delivery->header.len / LENT_BYTES;
		keep_again(slot, delivery);
		if (job->state != JOB_RUNNING)
			return false;
	}
	return true;
}

/* Answers who has come. Returns false when that has ended the job. */
static bool answer_all(struct slot *slot)
{
	struct job *job = slot->job;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (slot->from[i] && (slot->safe.is || set_wants(job, &slot->header, i)) &&
		    !answer_kept(slot, TAKE_PTR(slot->from[i])))
			return false;
	if (offered_has_contributors(job, &slot->header) && !offered_is_complete(job))
		return true;
	return go_on(slot);
}

void keep_finish(struct slot *slot)
{
	struct job *job = slot->job;
	struct tensor *tensor = slot->round->tensor;
	bool goes_on;

	slot_keep(slot);
	slot->safe.is |= !slot->result;
	if (quorum_applies(slot))
		FAILPOINT("server-quorum-closed");
	job_hold(job);
	goes_on = answer_all(slot);
	job_let_go(job);
	if (!goes_on)
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if ((tensor->past[i] >= slot->header.round || slot->acked[i] ||
		     job->nodes[i].departed) &&
		    set_has(job, &slot->header, i) && slot_ack(slot, i))
			break;
	tell(job);
}

/*
 * In the place of one that came before the node was lost, or its connection broke. Where several
 * broke, the one that is here may be the later: then its node, which waits for it, makes it once
 * more.
 */
static void replace(struct slot *slot, struct delivery *delivery)
{
	uint32_t node = delivery->header.node;
	struct delivery *old = slot->from[node];

	slot->from[node] = delivery;
	if (old)
		delivery_fail(old, -ENETRESET, "it has come again");
}

bool keep_may_repeat(const struct slot *slot, const struct delivery *delivery)
{
	uint32_t node = delivery->header.node;
	const struct delivery *from = slot->from[node];

	if (!slot->kept && !from)
		return false;
	if (delivery->header.flags & DATA_FLAG_AGAIN)
		return true;
	return from ? from->peer != delivery->peer : !slot->number[node];
}

void keep_again(struct slot *slot, struct delivery *delivery)
{
	struct job *job = slot->job;
	uint32_t node = delivery->header.node;
	uint64_t len = delivery_bytes(delivery), old;
	struct failure failure;

	if (slot->kept && (slot->safe.is || set_wants(job, &slot->header, node))) {
		(void)answer_kept(slot, delivery);
	} else if (slot->kept) {
		replace(slot, delivery);
	} else if (slot->summing) {
		slot_put_call(slot, &slot->again, delivery);
	} else {
		old = delivery_bytes(slot->from[node]);
		if (len > old && store_charge(job, len - old)) {
			delivery_fail(delivery, job_over_quota(job, &failure), failure.text);
			return;
		}
		if (len < old)
			quota_release(job->memory.quota, old - len);
		slot->charged += len - old;
		replace(slot, delivery);
	}
}

void keep_forget(struct slot *slot)
{
	struct job *job = slot->job;

	for (uint32_t i = 0; job->retention.resume && i < job->n_nodes; i++)
		if (slot->number[i])
			*sent_place(&job->nodes[i].sent, slot->number[i]) = NULL;
}

void keep_fail(struct slot *slot, int status, const char *text)
{
	struct delivery *delivery;

	while ((delivery = list_first(&slot->again, struct delivery, link)) ||
	       (delivery = list_first(&slot->offers, struct delivery, link))) {
		list_remove(&delivery->link);
		delivery_fail(delivery, status, text);
	}
}

/* -- What nodes say ---------------------------------------------------------------------------- */

/*
 * Nodes acknowledge many at once: slots that will be looked at are fetched, and before their turn
 * what they lead to.
 */
static _fetches_ void fetch_sent(const struct sent *sent, uint32_t number)
{
	const struct slot *slot;

	if (sent->last - number < 6)
		return;
	slot = *sent_place(sent, number + 3);
	if (slot)
		__builtin_prefetch(slot->result, 1);
	slot = *sent_place(sent, number + 6);
	if (slot)
		fetch_to_write(&slot->kept,
			       sizeof(*slot) - offsetof(struct slot, kept) + CACHE_LINE);
}

/* Returns what it counts as beside the slot itself. */
static unsigned ack_one(struct slot *slot, uint32_t node)
{
	uint32_t len = slot->header.part_len;

	return slot_ack(slot, node) ? len / ACK_BYTES : 0;
}

/* Returns whether there are more. */
static bool ack_some(struct job *job, uint32_t number)
{
	struct sent *sent = &job->nodes[number].sent;
	unsigned i = 0;

	for (; sent->acked != sent->said && i < ACK_STEP; i += 1 + job->n_nodes / ACK_NODES) {
		uint32_t next = ++sent->acked;

		fetch_sent(sent, next);
		/* Those up to `released` have lost their place. */
		if (next - sent->released - 1 < sent->last - sent->released) {
			struct slot *slot = *sent_place(sent, next);

			if (slot)
				i += ack_one(slot, number);
		}
	}
	tell(job);
	return sent->acked != sent->said;
}

static bool on_ack(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, retention.acking);
	bool more = false;

	for (uint32_t i = 0; job->state == JOB_RUNNING && i < job->n_nodes && !more; i++)
		if (job->nodes[i].sent.acked != job->nodes[i].sent.said) {
			(void)ack_some(job, i);
			more = true;
		}
	return more;
}

int keep_ack(struct job *job, uint32_t number, uint32_t acked)
{
	struct sent *sent = &job->nodes[number].sent;
	uint32_t n = acked - sent->said;

	if (!n || n > UINT32_MAX / 2) /* overtaken by a newer one */
		return 0;
	if (n > sent->last - sent->said)
		return error_origin(-EPROTO);
	sent->said = acked;
	if (!ack_some(job, number))
		return 0;
	job->retention.acking.step = on_ack;
	loop_begin(job->server->params.loop, &job->retention.acking);
	return 0;
}

/* For the nodes from `first` up to `end`. A slot may end with that, and all nodes' numbers for it. */
static void round_past(struct round *round, uint32_t first, uint32_t end)
{
	struct slot *slot, *tmp;
	size_t weight = end - first + round->tensor->job->n_nodes / ACK_NODES;

	if (round->n_slots * weight > STORE_MANY) {
		sweep_later(round->tensor->job, SWEEP_NEWS);
		return;
	}
	/* Goes with its last slot, not under our feet. */
	round->pinned = true;
	for (uint32_t node = first; node < end; node++) {
		list_for_each_safe (slot, tmp, &round->slots, in_round)
			if (slot->kept && set_has(slot->job, &slot->header, node))
				(void)slot_ack(slot, node);
		rows_past(round, node);
	}
	round->pinned = false;
	round_put(round);
}

/*
 * Where there are many, those that it had passed before have been seen to: then, by a sweep, or
 * when their results were made.
 */
void keep_past(struct tensor *tensor, uint32_t node, uint64_t number)
{
	uint64_t before = tensor->past[node];
	struct round *round, *next;

	if (before >= number - 1)
		return;
	tensor->past[node] = number - 1;
	if (tensor->n_rounds <= STORE_NEAR) {
		list_for_each_safe (round, next, &tensor->rounds, link)
			if (round->header.round < number)
				round_past(round, node, node + 1);
	} else if (number - 1 - before <= STORE_NEAR) {
		while (++before < number)
			if ((round = round_find(tensor, before)))
				round_past(round, node, node + 1);
	} else {
		sweep_later(tensor->job, SWEEP_NEWS);
	}
	tell(tensor->job);
}

/* A node has forgotten the tensor. It has the home's word that no node uses it: its rounds are over at all of them. */
static void keep_forgotten(struct job *job, uint64_t key)
{
	struct tensor *tensor = forget_is_possible(job) ? tensor_mention(job, key) : NULL;
	struct round *round, *next;

	/* Of several nodes that say so the first is enough: another may have been lost before it could. */
	if (!tensor || tensor_is_forgotten(tensor))
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		tensor->past[i] = DATA_ROUND_NEVER;
	/* Nothing of it is here, and what comes late makes no other. */
	if (tensor->is_mentioned)
		return;
	if (tensor->n_rounds > STORE_NEAR)
		sweep_later(job, SWEEP_NEWS);
	else
		list_for_each_safe (round, next, &tensor->rounds, link)
			round_past(round, 0, job->n_nodes);
	tell(job);
	tensor_forget(tensor);
}

void keep_acknowledged(struct job *job, uint32_t node, const struct data_header *header)
{
	struct tensor *tensor;

	/*
	 * Without memory it is known with the next round. It may come before what was offered,
	 * which then is for the others.
	 */
	if (header->is_all && header->round == DATA_ROUND_NEVER)
		keep_forgotten(job, header->key);
	else if (header->is_all && job->retention.resume &&
		 (tensor = tensor_mention(job, header->key)))
		keep_past(tensor, node, header->round + 1);
}

void keep_attached(struct job *job, uint32_t number)
{
	struct sent *sent = &job->nodes[number].sent;

	for (uint32_t n = sent->released; n != sent->last; n++) {
		struct slot *slot = *sent_place(sent, n + 1);

		if (!slot)
			continue;
		slot->number[number] = 0;
		quorum_count(slot, number);
	}
	(void)held_free(sent->slots);
	*sent = (struct sent){ 0 };
}

void keep_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct slot *slot = container_of(link, struct slot, in_job);
	const uint64_t *past = slot->round->tensor->past;

	(void)now_ns;
	if (!go_on(slot))
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (slot->acked[i] || !(job->nodes[i].departed || past[i] >= slot->header.round) ||
		    !set_has(job, &slot->header, i))
			continue;
		tell(job);
		if (slot_ack(slot, i))
			return;
	}
}

/* -- What nodes bring -------------------------------------------------------------------------- */

static void accept(struct delivery *delivery)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = delivery->header.job,
		.node = delivery->header.node,
	};

	delivery_answer(delivery, &header, NULL, NULL);
}

/* What was offered becomes the slot's result. */
static int take_result(struct slot *slot, const struct delivery *delivery)
{
	struct job *job = slot->job;
	int r;

	if (!delivery->header.len)
		return 0;
	r = store_block_new(job, delivery->header.len, &slot->result);
	if (!r)
		metric_copy(&job->server->copied, slot->result->data, delivery->payload,
			    delivery->header.len);
	return r;
}

/* Whether it is not the result, but what a node had given to a round that went without it. */
static bool is_late(const struct job *job, const struct data_header *header)
{
	return header->is_late && header->operation == OPERATION_PUSH_PULL &&
	       stragglers_any(&job->stragglers);
}

static int check_offer(const struct job *job, const struct data_header *h, struct failure *failure)
{
	int r;

	if (!job->retention.resume ||
	    (h->operation == OPERATION_PUSH_PULL_ROWS && !data_is_done(h)))
		return failure_set(failure, -EPROTO, "job %s: it takes no offers", job->owner.name);
	r = set_check(job, h, failure);
	if (r)
		return r;
	if (h->len && h->len != (is_late(job, h) ? h->part_len : offered_result_len(job, h)))
		return failure_set(failure, -EPROTO, "job %s: node %u offers %u bytes for %u",
				   job->owner.name, h->node, h->len, h->part_len);
	if (offered_has_contributors(job, h) && !h->len)
		return failure_set(failure, -EPROTO, "job %s: node %u does not say who is in it",
				   job->owner.name, h->node);
	if (!set_has(job, h, h->node) || (h->len && !set_wants(job, h, h->node)))
		return failure_set(failure, -EPROTO, "job %s: node %u has no result of block %u",
				   job->owner.name, h->node, h->block);
	/* Whoever has attached knows no more of losses than we. */
	if (job->membership.elastic ? (h->n_gone_then & ~LEDGER_WAITING) > job->membership.n_gone
				    : h->is_late && !offered_has_contributors(job, h))
		return failure_set(
			failure, -EPROTO,
			"job %s: node %u has a result that was made without %u ranks, and "
			"%u are gone",
			job->owner.name, h->node, h->n_gone_then & ~LEDGER_WAITING,
			job->membership.n_gone);
	return 0;
}

static bool same(const struct data_header *a, const struct data_header *b)
{
	return a->dtype == b->dtype && a->operation == b->operation &&
	       a->reduction == b->reduction && a->root == b->root && a->total == b->total &&
	       a->offset == b->offset && a->part_len == b->part_len;
}

/*
 * Whether there is something to be had from it; if not, all nodes have it, or will never want it.
 */
static bool is_news(const struct tensor *tensor, const struct data_header *h)
{
	struct part *part = part_find(tensor, h);
	struct slot *slot = part ? slot_find(part, h->round) : NULL;

	if (tensor_failed(tensor, h->round))
		return false;
	if (slot)
		return true;
	if (!tensor->job->placement.fresh || (part && part_is_closed(part, h->round)))
		return false;
	return h->len || !h->part_len;
}

/* The result has memory of its own: what was offered goes, of each node. */
static void put_offer(struct slot *slot, struct delivery *delivery)
{
	if (delivery->payload_block)
		delivery->payload = NULL;
	delivery->payload_block = block_unref(delivery->payload_block);
	slot_put_call(slot, &slot->offers, delivery);
}

static void offer_refused(struct job *job, struct delivery *delivery, int r)
{
	struct failure failure;

	delivery_fail(delivery, job_not_made(job, "a result", r, &failure), failure.text);
}

/* Nobody has contributed yet, or not all: those who have it will not. */
static int offer_new(struct tensor *tensor, struct delivery *delivery, struct slot **slot)
{
	int r = 0;

	if (!*slot)
		r = slot_new(tensor, delivery, 0, slot);
	if (!r)
		r = take_result(*slot, delivery);
	if (r && *slot && !(*slot)->n_expected)
		slot_free(*slot);
	if (r)
		return r;
	(*slot)->n_expected = set_count(tensor->job, &(*slot)->header);
	slot_sum(*slot);
	part_close((*slot)->part, (*slot)->header.round);
	return 0;
}

/*
 * What it says beyond itself, of a job that does not wait for all. Returns false when that is all
 * that it is for.
 */
static bool take_contributors(struct tensor *tensor, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct job *job = tensor->job;
	bool late = is_late(job, h);
	int r = 0;

	if (!offered_has_contributors(job, h))
		return true;
	if (offered_is_over(job))
		r = 0;
	else if (h->operation == OPERATION_ACCUMULATE)
		r = accumulate_offer(tensor, delivery);
	else if (late)
		r = quorum_offer_late(tensor, delivery);
	else
		r = quorum_offer(tensor, delivery);
	if (r) {
		offer_refused(job, delivery, r);
		return false;
	}
	if (!late && h->operation != OPERATION_ACCUMULATE)
		return true;
	accept(delivery);
	return false;
}

static void offer(struct job *job, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct failure failure = { 0 };
	struct tensor *tensor;
	struct slot *slot;
	struct part *part;
	uint32_t node = h->node;
	int r;

	r = check_offer(job, h, &failure);
	if (!r)
		r = tensor_get(job, NULL, h->key, &tensor, &failure);
	/* All nodes have all of it. */
	if (r == -ESTALE) {
		accept(delivery);
		return;
	}
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	if (!take_contributors(tensor, delivery))
		return;
	if (!is_news(tensor, h)) {
		accept(delivery);
		return;
	}
	part = part_find(tensor, h);
	slot = part ? slot_find(part, h->round) : NULL;
	if (slot && !same(h, &slot->header)) {
		refuse(delivery, -EINVAL, "job %s: a result that is of another round",
		       job->owner.name);
		return;
	}
	if (slot && slot->summing) {
		put_offer(slot, delivery);
		if (!slot->kept && !slot->acked[node]) {
			slot->acked[node] = true;
			slot->n_acked++;
		}
		if (slot->kept && slot_ack(slot, node))
			tell(job);
		return;
	}
	/* Who has no data knows only that it is done: wait for one who has. */
	if (slot && h->part_len && !h->len) {
		accept(delivery);
		return;
	}
	r = offer_new(tensor, delivery, &slot);
	if (r) {
		offer_refused(job, delivery, r);
		return;
	}
	slot->acked[node] = true;
	slot->n_acked++;
	slot->safe.is = is_safe(slot);
	slot->n_gone = h->n_gone_then;
	put_offer(slot, delivery);
	keep_finish(slot);
}

void keep_offer(struct job *job, struct delivery *delivery)
{
	struct data_header header = delivery->header;

	job_hold(job);
	offer(job, delivery);
	if (job->state == JOB_RUNNING)
		offered_offer(job, &header);
	job_let_go(job);
}
