/*
 * Where the memory of a result comes from, the sum of a slot's contributions, and what follows
 * when it is made. round.c starts the engine when all have come, quorum.c when enough have.
 */
#include "server/round/engine.h"

#include "base/failpoint.h"
#include "server/common/set.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/quorum.h"
#include "server/round/round.h"

/* The sum is there, unless the job has ended meanwhile. */
static void engine_finish(struct slot *slot)
{
	struct job *job = slot->job;

	if (job->state == JOB_OVER) {
		slot_fail(slot, job->failure.status, job->failure.text);
		job_release(job);
		return;
	}
	part_close(slot->part, slot->header.round);
	spend_all(&job->store.spending, &slot->carried, SPENT_NOW);
	slot->sum.more_inputs = held_free(slot->sum.more_inputs);
	job->n_rounds++;
	job->n_bytes += slot->header.part_len;
	metric_count(&job->server->rounds, 1);
	FAILPOINT("server-summed");
	if (slot->sum.in_place)
		slot->is_kept_here = delivery_filled(TAKE_PTR(slot->sum.in_place));
	if (job->retention.resume) {
		keep_finish(slot);
		return;
	}
	if (quorum_applies(slot)) {
		quorum_finish(slot);
		return;
	}
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (slot->from[i])
			keep_answer(slot, TAKE_PTR(slot->from[i]));
	}
	slot_free(slot);
}

/* Of what came too late there may be any number of times as much as of all nodes: it is summed in slices. */
static void engine_run(struct task *task)
{
	struct slot *slot = container_of(task, struct slot, sum.task);

	if (slot->sum.copy_from)
		metric_copy(&slot->job->server->copied, slot->sum.output, slot->sum.copy_from,
			    slot->header.part_len);
	else
		task->again = reduce_slice(&slot->sum.reduce, data_elements(&slot->header));
}

static void engine_done(struct task *task)
{
	engine_finish(container_of(task, struct slot, sum.task));
}

struct reduce_params engine_sum(struct slot *slot, uint32_t divisor)
{
	const struct data_header *h = &slot->header;

	return (struct reduce_params){
		.dtype = h->dtype,
		.reduction = data_reduction(h->reduction),
		.outputs = &slot->sum.output,
		.n_outputs = 1,
		.divisor = divisor,
		.scale = data_scale(h->reduction),
	};
}

/* All inputs, in the order of nodes; then what came too late for earlier rounds. */
static void prepare_sum(struct slot *slot)
{
	const struct data_header *h = &slot->header;
	const void **inputs = slot->sum.more_inputs ?: slot->sum.inputs;
	const struct carried *carried;
	struct job *job = slot->job;
	size_t n = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (slot->from[i]) {
			inputs[n++] = slot->from[i]->payload;
			slot->sum.task.away |= slot->from[i]->stalls;
		}
	list_for_each (carried, &slot->carried, spent.link)
		inputs[n++] = carried->payload;
	slot->sum.reduce = engine_sum(slot, job->size - job->membership.n_gone);
	slot->sum.reduce.inputs = inputs;
	slot->sum.reduce.n_inputs = n;
	metric_count(&job->server->bytes_summed, (uint64_t)h->part_len * n);
}

/* The one contribution that has data and is passed on as it is. */
static struct delivery *giver(const struct slot *slot)
{
	for (uint32_t i = 0; i < slot->job->n_nodes; i++) {
		if (slot->from[i] && slot->from[i]->header.len)
			return slot->from[i];
	}
	return NULL;
}

static bool anyone_wants(const struct slot *slot)
{
	for (uint32_t i = 0; i < slot->job->n_nodes; i++) {
		if (slot->from[i] && set_wants(slot->job, &slot->header, i))
			return true;
	}
	return false;
}

/*
 * Memory of a node of this process that keeps the result, which is then kept before anybody has it.
 * Not where it comes with more than itself, or is sent by RDMA, which knows our own blocks.
 */
static struct block *borrow(struct slot *slot)
{
	struct job *job = slot->job;
	struct delivery *in_place = NULL;

	if (!job->retention.resume || job->membership.elastic || stragglers_any(&job->stragglers))
		return NULL;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (!slot->from[i])
			continue;
		if (peer_is_self(slot->from[i]->peer))
			in_place = slot->from[i];
		else if (peer_takes_direct(slot->from[i]->peer, slot->header.part_len))
			return NULL;
	}
	slot->result = in_place ? delivery_in_place(in_place, slot->header.part_len) : NULL;
	slot->sum.in_place = slot->result ? in_place : NULL;
	return slot->result;
}

/* Is charged by itself from now on, until the last node has read it, like a result that is made. */
static void take_block(struct slot *slot, const struct delivery *from)
{
	struct block *block = from->payload_block;

	/* A whole one: our own agent may have more in it. */
	if (!block->quota && block->len == from->header.len) {
		block->quota = slot->job->memory.quota;
		slot->charged -= delivery_bytes(from);
	}
	slot->result = block_ref(block);
}

/*
 * A contribution's, which is read for the sum anyway. Not where what was contributed may be asked
 * for later, or the result is longer.
 */
static struct block *share(struct slot *slot)
{
	struct job *job = slot->job;

	for (uint32_t i = 0; i < job->n_nodes && !stragglers_any(&job->stragglers); i++) {
		if (!slot->from[i] || !delivery_is_own(slot->from[i]))
			continue;
		take_block(slot, slot->from[i]);
		return slot->result;
	}
	return NULL;
}

/*
 * Where the result comes from. Sets slot->result, and slot->sum.copy_from or the sum's parameters if it
 * has yet to be made. Returns 0, QUOTA_E_FULL, or -ENOMEM.
 */
static int prepare(struct slot *slot, bool *ret_made)
{
	struct job *job = slot->job;
	struct delivery *from = NULL;
	int r;

	*ret_made = true;
	slot->sum.task.away = false;
	if (!slot->header.part_len || !anyone_wants(slot))
		return 0;
	if (!set_reduces(&slot->header)) {
		from = giver(slot);
		if (from->payload_block && from->payload_block->data == from->payload) {
			take_block(slot, from);
			return 0;
		}
	}
	r = from || !(borrow(slot) ?: share(slot))
		    ? store_block_new(job, offered_result_len(job, &slot->header), &slot->result)
		    : 0;
	if (r)
		return r;
	*ret_made = false;
	slot->sum.output = slot->result->data;
	if (from) {
		slot->sum.copy_from = from->payload;
		slot->sum.task.away = from->stalls;
	} else {
		prepare_sum(slot);
	}
	return 0;
}

static void fail_whole(struct slot *slot, int r)
{
	struct job *job = slot->job;
	struct failure failure = { 0 };

	if (r == QUOTA_E_FULL) {
		(void)job_over_quota(job, &failure);
		job_fail(job, &failure, NULL);
		return;
	}
	(void)failure_set(&failure, r, "job %s: a result: %s", job->owner.name, strerror(-r));
	/* Those who had contributed that to earlier rounds were told that it was taken. */
	quorum_undo(slot);
	round_refused(job, &slot->header, &failure);
}

void engine_start(struct slot *slot)
{
	struct job *job = slot->job;
	bool made;
	int r;

	slot->n_gone |= job->membership.n_gone;
	r = quorum_prepare(slot);
	if (!r)
		r = prepare(slot, &made);
	if (r) {
		fail_whole(slot, r);
		return;
	}
	quorum_call_contributors(slot);
	slot_sum(slot);
	slot->sum.task.run = engine_run;
	slot->sum.task.done = engine_done;
	if (made) {
		engine_finish(slot);
		return;
	}
	slot->sum.task.cost =
		slot->sum.copy_from
			? slot->header.part_len
			: reduce_slice_bytes(&slot->sum.reduce, data_elements(&slot->header));
	if (job_post(job, &slot->sum.task))
		return;
	task_run(&slot->sum.task);
	engine_finish(slot);
}
