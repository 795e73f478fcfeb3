/*
 * Contributions: each is checked against the job and its round and put into a slot, and the last
 * starts the sum. Rounds fail here when nodes differ, have left or do not come in time. server.c
 * brings contributions, job.c deadlines, leave.c nodes that have left.
 */
#include "server/round/round.h"

#include "base/clock.h"
#include "server/common/set.h"
#include "server/job/store.h"
#include "server/job/sweep.h"
#include "server/round/accumulate.h"
#include "server/round/engine.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/quorum.h"
#include "server/round/rows.h"
#include <stdio.h>

struct round_text {
	char text[160];
};

static const char *tensor_text(const struct tensor *tensor, struct round_text *ret_text)
{
	const char *name = declare_name_of(tensor->job, tensor->key);

	if (name)
		(void)snprintf(ret_text->text, sizeof(ret_text->text), "tensor %.100s", name);
	else
		(void)snprintf(ret_text->text, sizeof(ret_text->text), "tensor number %llu",
			       (unsigned long long)tensor->key);
	return ret_text->text;
}

static int check(const struct job *job, const struct delivery *delivery, struct failure *failure)
{
	const struct data_header *h = &delivery->header;
	uint32_t len;
	int r;

	r = set_check(job, h, failure);
	if (r)
		return r;
	if (!set_has(job, h, h->node))
		return failure_set(failure, -EPROTO, "job %s: node %u has no part in block %u",
				   job->owner.name, h->node, h->block);
	len = set_gives(job, h, h->node) ? h->part_len : 0;
	if (h->len != len)
		return failure_set(failure, -EPROTO,
				   "job %s: node %u brings %u bytes where %u belong",
				   job->owner.name, h->node, h->len, len);
	if (!set_reduces(h))
		return 0;
	if (!reduce_supported(h->dtype, data_reduction(h->reduction)))
		return failure_set(failure, -EINVAL, "job %s: %s of %s cannot be reduced",
				   job->owner.name, reduction_name(data_reduction(h->reduction)),
				   dtype_name(h->dtype));
	if (h->len && (uintptr_t)delivery->payload % dtype_size(h->dtype))
		return failure_set(failure, -EINVAL, "job %s: data is not aligned to its elements",
				   job->owner.name);
	return 0;
}

/* What all contributions to a round have in common. */
static bool same_round(const struct data_header *a, const struct data_header *b)
{
	return a->dtype == b->dtype && a->operation == b->operation &&
	       a->reduction == b->reduction && a->root == b->root;
}

static bool same_part(const struct data_header *a, const struct data_header *b)
{
	return a->total == b->total && a->offset == b->offset && a->part_len == b->part_len;
}

static void describe(const struct data_header *h, bool part, char *buffer, size_t len)
{
	const char *type = dtype_name(h->dtype), *operation = operation_name(h->operation);

	if (part && h->operation == OPERATION_PUSH_PULL_ROWS)
		(void)snprintf(buffer, len, "rows of %u bytes of a table of %llu", h->part_len,
			       (unsigned long long)h->total);
	else if (part)
		(void)snprintf(buffer, len, "part %u is %u bytes at %llu of %llu", h->part,
			       h->part_len, (unsigned long long)h->offset,
			       (unsigned long long)h->total);
	else if (h->operation == OPERATION_BARRIER)
		(void)snprintf(buffer, len, "%s", operation);
	else if (h->operation == OPERATION_BROADCAST)
		(void)snprintf(buffer, len, "%s of %s from rank %u", operation, type, h->root);
	else if (set_reduces(h))
		(void)snprintf(buffer, len, "%s (%s) of %s", operation,
			       reduction_name(data_reduction(h->reduction)), type);
	else
		(void)snprintf(buffer, len, "%s of %s", operation, type);
}

static void mismatch(const struct tensor *tensor, const struct data_header *a,
		     const struct data_header *b, bool part, struct failure *failure)
{
	char what_a[96], what_b[96];
	struct node_text node_a, node_b;
	struct round_text text;

	describe(a, part, what_a, sizeof(what_a));
	describe(b, part, what_b, sizeof(what_b));
	(void)failure_set(
		failure, -EINVAL, "job %s: %s, round %llu: the ranks disagree. %s: %s; %s: %s",
		tensor->job->owner.name, tensor_text(tensor, &text), (unsigned long long)a->round,
		job_node_text(tensor->job, a->node, &node_a), what_a,
		job_node_text(tensor->job, b->node, &node_b), what_b);
}

static void mismatch_round(const struct tensor *tensor, const struct data_header *a,
			   const struct data_header *b, struct failure *failure)
{
	struct round_text text;

	if (!tensor->job->membership.elastic || a->operation != b->operation ||
	    a->n_gone == b->n_gone ||
	    (a->operation != OPERATION_ALL_GATHER && a->operation != OPERATION_REDUCE_SCATTER)) {
		mismatch(tensor, a, b, false, failure);
		return;
	}
	(void)failure_set(failure, -EREMCHG,
			  "job %s: %s, round %llu: not all ranks had heard of the same losses when "
			  "they submitted the %s: submit it again",
			  tensor->job->owner.name, tensor_text(tensor, &text),
			  (unsigned long long)a->round, operation_name(a->operation));
}

/* Fails what is not complete of a round, now and later. */
static void round_fail(struct tensor *tensor, uint64_t number, const struct failure *failure)
{
	struct round *round = round_find(tensor, number);

	if (!tensor_failed(tensor, number))
		metric_count(&tensor->job->server->rounds_failed, 1);
	tensor_failed_add(tensor, number, failure);
	if (round)
		round_fail_slots(round, failure);
}

/* A round is to be looked at then, if it has not closed. */
static uint64_t first_deadline_ns(const struct job *job)
{
	uint64_t quorum_ns = job->stragglers.quorum_timeout_ms * NSEC_PER_MSEC;

	return quorum_ns ? MIN(quorum_ns, job_patience_ns(job)) : job_patience_ns(job);
}

static void late(struct job *job, struct delivery *delivery, int status, const char *text)
{
	metric_count(&job->server->late, 1);
	refuse(delivery, status, "job %s: tensor number %llu, round %llu, block %u, part %u: %s",
	       job->owner.name, (unsigned long long)delivery->header.key,
	       (unsigned long long)delivery->header.round, delivery->header.block,
	       delivery->header.part, text);
}

/*
 * Whether a contribution, or piece of a list of rows, still counts. If not, it has been answered. slot: NULL: there is none yet.
 */
static bool is_new(struct tensor *tensor, const struct part *part, const struct slot *slot,
		   struct delivery *delivery, uint32_t piece)
{
	const struct data_header *h = &delivery->header;
	struct failed_round *failed = tensor_failed(tensor, h->round);

	if (failed) {
		metric_count(&tensor->job->server->late, 1);
		delivery_fail(delivery, failed->status, failed->text);
		return false;
	}
	if (slot && !slot->rows && tensor->job->retention.resume && keep_may_repeat(slot, delivery))
		return true;
	if (slot && slot->late && !slot->acked[h->node])
		return true;
	if (part && part_is_closed(part, h->round)) {
		late(tensor->job, delivery, -ESTALE, "it is over");
		return false;
	}
	if (slot && (slot->from[h->node] || rows_has(slot, h->node, piece))) {
		late(tensor->job, delivery, -EALREADY, "this node's contribution is here already");
		return false;
	}
	return true;
}

/*
 * A contribution that contradicts an earlier one fails the round for all. Returns false then; it
 * has been answered.
 */
static bool agrees(struct tensor *tensor, const struct slot *slot, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct round *round = slot ? slot->round : round_find(tensor, h->round);
	struct failure failure;

	if (round && round->failing) {
		delivery_fail(delivery, round->failing->status, round->failing->text);
		return false;
	}
	failure.status = 0; /* without its words: this is done for every contribution */
	if (round && !same_round(h, &round->header))
		mismatch_round(tensor, h, &round->header, &failure);
	else if (slot && !same_part(h, &slot->header))
		mismatch(tensor, h, &slot->header, true, &failure);
	if (!failure.status)
		return true;
	round_fail(tensor, h->round, &failure);
	delivery_fail(delivery, failure.status, failure.text);
	return false;
}

/* Ranks of nodes that belong to the slot's set, have not come, and pass the test. */
static const char *missing_text(const struct job *job, const struct data_header *header,
				struct delivery *const *from, bool departed_only,
				struct ranks_text *ret_ranks)
{
	ranks_init(ret_ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		uint32_t node = job->node_of_rank[i];

		if (set_has(job, header, node) && !(from && from[node]) &&
		    (!departed_only || job->nodes[node].departed))
			ranks_add(ret_ranks, i);
	}
	return ranks_end(ret_ranks);
}

/* All have come, but the job is fresh here, and waits for what these nodes keep of it. */
static const char *uninformed_text(const struct job *job, struct ranks_text *ret_ranks)
{
	ranks_init(ret_ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		const struct job_node *node = &job->nodes[job->node_of_rank[i]];

		if (!node->offers.complete && !node->departed)
			ranks_add(ret_ranks, i);
	}
	return ranks_end(ret_ranks);
}

/* Fails a round that needs ranks which have left. Returns false when it does not. */
static bool fail_departed(struct tensor *tensor, const struct data_header *header,
			  struct delivery *const *from, struct failure *failure)
{
	struct job *job = tensor->job;
	struct ranks_text ranks;
	struct round_text text;
	const char *missing;

	if (!job->n_departed)
		return false;
	missing = missing_text(job, header, from, true, &ranks);
	if (!ranks.n)
		return false;
	if (job->server->hooks->without_departed(job))
		return false;
	(void)failure_set(failure, -EPIPE, "job %s: %s, round %llu: %s %s left the job",
			  job->owner.name, tensor_text(tensor, &text),
			  (unsigned long long)header->round, missing, ranks_have(&ranks));
	round_fail(tensor, header->round, failure);
	return true;
}

void round_over_quota(struct job *job, struct delivery *delivery)
{
	struct failure failure = { 0 };

	(void)job_over_quota(job, &failure);
	delivery_fail(delivery, failure.status, failure.text);
	job_fail(job, &failure, NULL);
}

/*
 * Charges the slot with the payload. Where there is none yet, *slot is NULL, and becomes a new one; its job is woken when the time is
 * up that it has. A positive or negative result leaves neither slot nor payload charged.
 */
static int slot_get(struct tensor *tensor, const struct delivery *delivery, struct slot **slot)
{
	uint64_t len = delivery_bytes(delivery);
	int r;

	if (*slot)
		return slot_charge(*slot, len);
	r = slot_new(tensor, delivery, len, slot);
	if (r)
		return r;
	r = job_wake_by(tensor->job, (*slot)->since_ns + first_deadline_ns(tensor->job));
	if (r)
		slot_free(TAKE_PTR(*slot));
	return r;
}

/*
 * A node has come to a part. Its first part of the round counts, for rounds that all nodes come to.
 */
static void measure(struct slot *slot, uint32_t node, uint64_t at_ns)
{
	struct job *job = slot->job;
	struct round *round = slot->round;
	uint64_t now_ns, before_ns = round->newest_ns;

	if (!job->arrivals || round->measured || round->arrived[node] ||
	    slot->n_expected < job->n_nodes)
		return;
	/* Threads that read side by side may hand over the earlier one last. */
	now_ns = MAX(at_ns, before_ns);
	if (!round->n_arrived)
		round->first_ns = now_ns;
	round->newest_ns = now_ns;
	round->arrived[node] = 1;
	arrivals_came(job->arrivals, node, now_ns - round->first_ns);
	if (++round->n_arrived < job->n_nodes)
		return;
	round->measured = true;
	arrivals_complete(job->arrivals, node, round->first_ns, before_ns, now_ns);
}

/* Nobody has what the rank had that is gone, or its block. */
static void fail_gone(struct tensor *tensor, const struct data_header *header)
{
	struct failure failure;
	struct round_text text;

	(void)failure_set(&failure, -EREMCHG,
			  "job %s: %s, round %llu: %s is not in the job any more: submit it again",
			  tensor->job->owner.name, tensor_text(tensor, &text),
			  (unsigned long long)header->round,
			  set_reduces(header) ? "a rank that it was submitted with"
					      : "the rank that part of it comes from");
	round_fail(tensor, header->round, &failure);
}

/*
 * Whether all nodes have the result of a push_pull_rows. Each contributed, or nobody would have it;
 * so one that has left did not do so before its own requests had ended.
 */
static bool is_done(const struct slot *slot)
{
	for (uint32_t i = 0; i < slot->job->n_nodes; i++)
		if (!slot->from[i] && !slot->job->nodes[i].departed)
			return false;
	return true;
}

void round_contribute(struct job *job, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	bool by_rows = h->operation == OPERATION_PUSH_PULL_ROWS && !data_is_done(h);
	bool complete = true;
	uint32_t number = h->part, node = h->node, waits = 0, flags = 0;
	uint64_t at_ns = delivery->at_ns;
	struct data_piece piece;
	struct failure failure;
	struct tensor *tensor;
	struct part *part;
	struct slot *slot;
	struct data_header header;
	int32_t priority;
	bool first;
	int r;

	/* It is not what the nodes have to agree on. */
	if (job->membership.elastic && h->operation == OPERATION_BARRIER) {
		waits = h->newcomers ? LEDGER_WAITING : 0;
		delivery->header.newcomers = 0;
	}
	if (by_rows && job->retention.resume) {
		flags = h->rows;
		delivery->header.rows = 0;
	}
	r = check(job, delivery, &failure);
	if (!r && by_rows)
		r = rows_parse(job, delivery, &piece, &failure);
	if (!r)
		r = tensor_get(job, &job->nodes[h->node], h->key, &tensor, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	if (job->retention.resume)
		keep_past(tensor, h->node, h->round);
	if (job->retention.resume && keep_ack(job, h->node, h->acked)) {
		refuse(delivery, -EPROTO, "job %s: node %u has results that it was not sent",
		       job->owner.name, h->node);
		return;
	}
	if (h->operation == OPERATION_ACCUMULATE) {
		accumulate_contribute(tensor, delivery);
		return;
	}
	if (flags && rows_again(tensor, delivery, &piece, number, flags))
		return;
	part = part_find(tensor, h);
	slot = part ? slot_find(part, h->round) : NULL;
	if (!is_new(tensor, part, slot, delivery, number) || !agrees(tensor, slot, delivery))
		return;
	if (slot && job->retention.resume && !by_rows && (slot->kept || slot->from[h->node])) {
		if (job->stragglers.quorum)
			measure(slot, node, at_ns);
		quorum_again(slot, delivery);
		return;
	}
	if (slot && job->stragglers.quorum && slot->late) {
		measure(slot, node, at_ns);
		quorum_late(slot, delivery);
		return;
	}
	priority = h->priority;
	r = slot_get(tensor, delivery, &slot);
	if (!r && by_rows)
		r = rows_take(slot, delivery, &piece, number, flags, &complete);
	if (r == QUOTA_E_FULL) {
		round_over_quota(job, delivery);
		return;
	}
	if (r) {
		if (r == -EPROTO)
			refuse(delivery, r, "job %s: a piece of another list than those before it",
			       job->owner.name);
		else
			delivery_fail(delivery, job_no_memory(job, r, &failure), failure.text);
		return;
	}
	if (!by_rows && slot->summing) {
		measure(slot, node, at_ns);
		quorum_late(slot, delivery);
		return;
	}
	/* From here on a piece of a list may have been answered, and be gone. */
	if (!slot->n_expected || priority > slot->sum.task.priority)
		slot->sum.task.priority = priority;
	first = !slot->n_expected;
	slot->n_expected = set_count(job, &slot->header);
	if (!by_rows)
		slot->from[h->node] = delivery;
	slot->n_here += complete;
	slot->n_gone |= waits;
	measure(slot, node, at_ns);
	header = slot->header;
	if (data_is_done(&header) && is_done(slot))
		engine_start(slot);
	else if (!data_is_done(&header) && slot->n_here < slot->n_expected && first &&
		 job->n_departed)
		(void)fail_departed(tensor, &header, slot->from, &failure);
	else if (slot->n_here == slot->n_expected && by_rows)
		rows_start(slot);
	else if (slot->n_here == slot->n_expected && !set_is_possible(job, &header))
		fail_gone(tensor, &header);
	else if ((slot->n_here == slot->n_expected && offered_is_complete(job)) ||
		 quorum_is_ready(slot))
		engine_start(slot);
}

void round_refused(struct job *job, const struct data_header *header, const struct failure *failure)
{
	struct failure ignored;
	struct tensor *tensor;

	/* Out of memory, or of tensors: then contributions to it are refused as well. */
	if (tensor_get(job, NULL, header->key, &tensor, &ignored))
		return;
	round_fail(tensor, header->round, failure);
}

/* Whether it waits for a node that has left. */
static bool needs_departed(const struct slot *slot)
{
	const struct job *job = slot->job;

	if (!job->n_departed || data_is_done(&slot->header) || rows_is_idle(slot))
		return false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (job->nodes[i].departed && !slot->from[i] && set_has(job, &slot->header, i))
			return true;
	return false;
}

static void expire(struct slot *slot, uint64_t now_ns)
{
	struct tensor *tensor = slot->round->tensor;
	struct job *job = slot->job;
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct ranks_text missing;
	struct round_text text;
	const char *ranks, *what;

	if (offered_is_combining(job)) {
		sweep_until(job, now_ns);
		return;
	}
	if (job->server->hooks->without_missing(job, slot)) {
		slot->since_ns = now_ns;
		sweep_until(job, now_ns + job_patience_ns(job));
		return;
	}
	if (rows_is_idle(slot)) {
		part_close(slot->part, slot->header.round);
		slot_free(slot);
		return;
	}
	ranks = missing_text(job, &slot->header, slot->from, false, &missing);
	/* A node contributes when all its ranks have: which of them has not, its agent knows. */
	what = missing.n > 1 ? "all contributed" : "contributed";
	if (!missing.n && !offered_is_complete(job)) {
		ranks = uninformed_text(job, &missing);
		what = "offered what they keep";
	}
	(void)failure_set(&failure, -ETIMEDOUT, "job %s: %s, round %llu: %s %s not %s within %s s",
			  job->owner.name, tensor_text(tensor, &text),
			  (unsigned long long)slot->header.round, ranks, ranks_have(&missing), what,
			  job_seconds_text(job->request_timeout_ms, &seconds));
	round_fail(tensor, slot->header.round, &failure);
}

/* It has waited for all nodes' offers alone. */
static bool is_complete(const struct slot *slot)
{
	return slot->n_expected && slot->n_here == slot->n_expected && !slot->rows &&
	       offered_is_complete(slot->job);
}

void round_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct slot *slot = container_of(link, struct slot, in_job);
	uint64_t deadline_ns = slot->since_ns + job_patience_ns(job);
	struct data_header header = slot->header;
	struct failure failure;

	if (slot->round->failing)
		return;
	if (data_is_done(&header) && is_done(slot)) {
		engine_start(slot);
		return;
	}
	if (!job->sweep.asked && needs_departed(slot)) {
		if (fail_departed(slot->round->tensor, &header, slot->from, &failure))
			return;
		/* An elastic job goes on without them. */
		job->sweep.asked = true;
	}
	if (is_complete(slot) || quorum_is_ready(slot)) {
		engine_start(slot);
		return;
	}
	if (deadline_ns <= now_ns) {
		expire(slot, now_ns);
		return;
	}
	sweep_until(job, deadline_ns);
	quorum_until(slot, now_ns);
}

void round_waiting_text(const struct slot *slot, char *buffer, size_t len)
{
	struct ranks_text missing;
	struct round_text text;

	(void)snprintf(buffer, len, "%s (%s, round %llu)",
		       missing_text(slot->job, &slot->header, slot->from, false, &missing),
		       tensor_text(slot->round->tensor, &text),
		       (unsigned long long)slot->header.round);
}
