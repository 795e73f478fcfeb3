/*
 * A part's way to its server and back: gathered, pushed, answered, retained where the job outlives its daemons, and
 * scattered into the outputs. part.c chooses the server, send_queue.c begins the part at its turn, keep.c feeds it memory and
 * holds it no more when its server was lost, and round.c scatters what was held.
 */
#include "agent/round/device.h"
#include "agent/round/part.h"
#include "agent/round/rows.h"
#include "agent/schedule/scheduler.h"
#include "base/failpoint.h"
#include <inttypes.h>

static struct agent_job *job_of(const struct agent_part *part)
{
	return part->job;
}

/* A part's place in the job's virtual space: the same on every node. */
static size_t stripe_of(const struct agent_part *part)
{
	const struct agent_tensor *tensor = part->round->tensor;
	const struct agent_job *job = tensor->job;
	uint64_t stripe = job->part_bytes, step = stripe, at;

	if (tensor->elements != ELEMENTS_VARIABLE)
		step = (part->extent.total + stripe - 1) / stripe * stripe;
	at = tensor->start + part->extent.block * step + part->extent.part * stripe;
	return at / stripe % job->placement.n_stripes;
}

void agent_part_choose(struct agent_part *part)
{
	part->server = agent_part_is_rows(part) ? part->extent.block
						: job_of(part)->placement.stripes[stripe_of(part)];
}

bool agent_part_is_from_here(const struct agent_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	return part->extent.source == RANK_ALL ||
	       layout->node_of_rank[part->extent.source] == layout->node;
}

/* Whether the answer brings data: not to the node where it comes from. */
static bool is_for_here(const struct agent_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	if (part->extent.source != RANK_ALL && agent_part_is_from_here(part))
		return false;
	/* All nodes of an elastic job have what is reduced: any may be the last that does. */
	return part->extent.target == RANK_ALL || job_of(part)->shape.elastic ||
	       layout->node_of_rank[part->extent.target] == layout->node;
}

/* Bytes of the answer: with its data comes who is in it, where not all need be. */
static uint32_t answer_len(const struct agent_part *part)
{
	return is_for_here(part) ? agent_contributors_result_len(job_of(part),
								 part->round->partition.operation,
								 part->extent.len)
				 : 0;
}

/* -- Into the outputs ---------------------------------------------------------------------------------------------- */

/* The others of the round may find the result only where it is retained, until all are in the outputs here. */
static void scattered(struct agent_part *part)
{
	struct agent_round *round = part->round;

	if (round->failure.status) {
		agent_part_end(part);
		return;
	}
	part->state = PART_SCATTERED;
	if (++round->n_scattered < round->n_made)
		return;
	ledger_round_set_stage(&round->ledger, LEDGER_SCATTERED, round->n_gone);
	FAILPOINT("round-scattered");
	agent_round_scatter(round);
}

static void on_scattered(struct task *task)
{
	struct agent_part *part = container_of(task, struct agent_part, task);

	part->posted = false;
	if (!part->round->gate.on)
		agent_device_up(part);
	else if (!job_of(part)->resumption.suspended)
		scattered(part);
}

static void scatter(struct agent_part *part)
{
	part->copies = true;
	part->n_inputs = part->n_outputs = 0;
	if (part->retained != LEDGER_NO_RESULT &&
	    ledger_result_kept(job_of(part)->resumption.ledger, part->retained)->late)
		part->late = agent_part_input(part, 0);
	if (part->extent.len && is_for_here(part) && part->retained != LEDGER_NO_RESULT)
		part->inputs[part->n_inputs++] = ledger_result_data(
			job_of(part)->resumption.ledger, part->retained, part->extent.len);
	else if (part->extent.len && is_for_here(part))
		part->inputs[part->n_inputs++] = part->block ? part->block->data : part->target;
	else
		agent_part_set_inputs(part);
	/* A sum that is none of ours: nothing to copy from. */
	if (part->n_inputs && part->copies)
		agent_part_set_outputs(part);
	agent_part_post(part, on_scattered);
}

static void push_again(struct agent_part *part);

/* Its result counts, once those of all parts do. */
static void held(struct agent_part *part)
{
	part->block = block_unref(part->block);
	ledger_result_whole(job_of(part)->resumption.ledger, part->retained);
	part->state = PART_HELD;
	FAILPOINT("part-held");
	agent_round_held(part->round);
}

static void on_retained(struct task *task)
{
	struct agent_part *part = container_of(task, struct agent_part, task);

	part->posted = part->copies = false;
	part->n_inputs = part->n_outputs = 0;
	if (job_of(part)->resumption.suspended)
		return;
	if (part->round->failure.status)
		agent_part_end(part);
	else if (part->attachment != agent_part_server(part)->attachment)
		push_again(part); /* its server was lost meanwhile: the result counts no more */
	else
		held(part);
}

static void hold(struct agent_part *part)
{
	struct ledger *ledger = job_of(part)->resumption.ledger;
	const struct ledger_kept *kept = ledger_result_kept(ledger, part->retained);

	if (!part->block || !kept->what.has_data) {
		held(part);
		return;
	}
	part->copies = true;
	part->n_inputs = part->n_outputs = 1;
	part->inputs[0] = part->block->data;
	part->outputs[0] = ledger_result_data(ledger, part->retained, kept->what.len);
	agent_part_post(part, on_retained);
}

void agent_part_unhold(struct agent_part *part)
{
	part->round->n_held--;
	ledger_result_free(job_of(part)->resumption.ledger, part->retained);
	part->retained = LEDGER_NO_RESULT;
	part->number = 0;
	agent_keep_park(part);
}

void agent_part_scatter(struct agent_part *part)
{
	part->state = PART_SCATTER;
	scatter(part);
}

/* What a result that not all ranks need be in says of that. Returns false when our contribution is in none yet. */
static bool count(struct agent_part *part, uint32_t n, const struct ledger_what *what,
		  const void *result)
{
	struct agent_round *round = part->round;
	bool has_ours = true;

	if (!stragglers_any(&job_of(part)->shape.stragglers))
		return true;
	if (what)
		(void)agent_contributors_read(job_of(part), what, result, &n, &has_ours);
	round->n_contributions = round->counted ? MIN(round->n_contributions, n) : n;
	round->counted = true;
	return has_ours;
}

bool agent_part_start_stale(struct agent_part *part)
{
	struct agent_round *round = part->round;
	struct ledger *ledger = job_of(part)->resumption.ledger;
	uint32_t retained = agent_part_is_rows(part)
				    ? LEDGER_NO_RESULT
				    : ledger_result_find(ledger, round->tensor->key, round->number,
							 part->extent.block, part->extent.part);
	struct ledger_kept *kept;

	if (retained == LEDGER_NO_RESULT)
		return false;
	kept = ledger_result_kept(ledger, retained);
	/* One that does not fit is the trainers' doing, and their own result's. */
	if (kept->what.len != part->extent.len || kept->what.has_data != !!answer_len(part))
		return false;
	part->retained = retained;
	kept->busy = true;
	(void)count(part, job_of(part)->shape.size, &kept->what,
		    ledger_result_data(ledger, retained, kept->what.len));
	round->n_gone = MAX(round->n_gone, kept->what.n_gone);
	if (round->gate.on) {
		part->state = PART_HELD;
		agent_round_held(round);
		return true;
	}
	part->state = PART_SCATTER;
	agent_device_down(part, !is_for_here(part), false, scatter);
	return true;
}

/* -- The answer ---------------------------------------------------------------------------------------------------- */

static void on_sent(struct call *call)
{
	struct agent_part *part = container_of(call, struct agent_part, call);

	agent_part_sent(part);
	/* Its result comes to memory of the ledger. */
	if (agent_part_is_direct(part) && job_of(part)->retention.keeps)
		agent_device_give(part);
	/* Without one, its server was lost meanwhile. */
	if (part->send_queue) {
		agent_send_queue_sent(part->send_queue, part);
		agent_send_queue_pump(part->send_queue);
	}
	agent_schedule_run(job_of(part));
}

/* An answer must be what was asked for; anything else is a server that cannot be trusted with this job. */
static bool answer_fits(const struct agent_part *part)
{
	const struct data_header *answer = &part->call.answer;
	uint32_t len = answer_len(part);

	return answer->op == DATA_RESULT && answer->len == len &&
	       (!job_of(part)->shape.elastic || answer->n_gone <= job_of(part)->membership.n_out) &&
	       (!part->call.answer_block || part->call.answer_block->len >= len);
}

static void answer_wild(struct agent_part *part)
{
	struct failure failure;

	(void)failure_set(&failure, -EPROTO, "%s answered with something else",
			  agent_server_name(job_of(part), part->server));
	agent_job_fail(job_of(part), &failure, NULL);
	agent_part_end(part);
}

static void on_rows_answer(struct agent_part *part)
{
	struct failure failure;
	int r = part->round->failure.status ? 0 : agent_rows_answered(part, &failure);

	if (r == -EPROTO)
		answer_wild(part);
	else if (r)
		agent_part_fail(part, r, failure.text);
	else
		agent_part_end(part);
}

/* Who was gone when the result was made, and of a barrier whether newcomers wait. */
static uint32_t n_gone_of(const struct agent_part *part)
{
	const struct data_header *answer = &part->call.answer;

	if (!job_of(part)->shape.elastic)
		return 0;
	return answer->n_gone |
	       (answer->operation == OPERATION_BARRIER && answer->newcomers_wait ? LEDGER_WAITING
										 : 0);
}

void agent_part_name_retained(struct agent_part *part)
{
	const struct agent_round *round = part->round;
	struct ledger *ledger = job_of(part)->resumption.ledger;

	ledger_result_kept(ledger, part->retained)->what = (struct ledger_what){
		.key = round->tensor->key,
		.round = round->number,
		.offset = part->extent.offset,
		.total = part->extent.total,
		.block = part->extent.block,
		.part = part->extent.part,
		.len = part->extent.len,
		.root = round->partition.root,
		.n_gone = n_gone_of(part),
		.stripe = (uint16_t)stripe_of(part),
		.dtype = (uint8_t)round->tensor->dtype,
		.operation = (uint8_t)round->partition.operation,
		.reduction = agent_round_reduction(round),
		.has_data = answer_len(part),
	};
}

/* A result has come, and there is memory for it. */
static void keep(struct agent_part *part)
{
	struct agent_round *round = part->round;
	struct ledger_kept *kept =
		ledger_result_kept(job_of(part)->resumption.ledger, part->retained);

	if (job_of(part)->shape.elastic)
		round->n_gone = MAX(round->n_gone, n_gone_of(part));

	agent_part_name_retained(part);
	kept->taken = kept->busy = true;
	kept->late = !count(part, part->call.answer.n_contributions, &kept->what,
			    part->block ? part->block->data
					: ledger_result_data(job_of(part)->resumption.ledger,
							     part->retained, kept->what.len));
	if (round->gate.on) {
		hold(part);
		return;
	}
	part->state = PART_SCATTER;
	agent_device_down(part, !is_for_here(part) || kept->late, false, scatter);
}

bool agent_part_feed(struct agent_part *part)
{
	struct agent_job *job = job_of(part);
	int r = 0;

	/* The part waited for memory, and its server was lost meanwhile: it needs none. */
	if (!part->round->failure.status &&
	    (part->round->gate.on || stragglers_any(&job->shape.stragglers)) &&
	    part->attachment != agent_part_server(part)->attachment) {
		agent_part_sate(part);
		push_again(part);
		return true;
	}
	if (part->retained == LEDGER_NO_RESULT && !part->round->failure.status) {
		r = agent_quota_look(job);
		part->retained = ledger_result_take(job->resumption.ledger, false);
	}
	if (part->round->failure.status) {
		agent_part_end(part);
	} else if (part->retained == LEDGER_NO_RESULT && r) {
		agent_part_fail(part, r,
				"a trainer's session_quota has no room for its result in the "
				"ledger of the job: make it larger, or turn resume off");
	} else if (part->retained == LEDGER_NO_RESULT && agent_contributors_is_full(job)) {
		agent_part_fail(part, -ENOSPC,
				"what accumulates has more parts than the ledger of its job has "
				"room for: use larger parts, or turn resume off");
	} else if (part->retained == LEDGER_NO_RESULT) {
		return false;
	} else {
		agent_part_sate(part);
		keep(part);
	}
	return true;
}

static void starve(struct agent_part *part)
{
	struct agent_job *job = job_of(part);
	struct failure failure;

	if (quota_charge(&job->memory.held, agent_part_starved_len(part))) {
		(void)agent_job_no_memory(job, EDQUOT, &failure);
		agent_part_fail(part, failure.status, failure.text);
		return;
	}
	part->state = PART_STARVED;
	list_push_back(&job->retention.starved, &part->wait);
}

/* Servers release results in the order of their numbers: what came before has its memory before. */
static bool is_behind_others(const struct agent_part *part)
{
	return part->retained == LEDGER_NO_RESULT && !part->round->failure.status &&
	       !list_empty(&job_of(part)->retention.starved);
}

static void on_kept_answer(struct agent_part *part)
{
	struct agent_server *server = agent_part_server(part);
	const struct call *call = &part->call;
	struct agent_job *job = job_of(part);

	part->number = call->answer.number;
	if (!part->number || (call->answer.len && part->retained == LEDGER_NO_RESULT &&
			      !part->is_straight && !call->answer_block)) {
		answer_wild(part);
		return;
	}
	/* What came as a block and is retained is there: in_place.c. */
	part->block = call->answer_block && call->answer.len && part->retained == LEDGER_NO_RESULT
			      ? block_ref(call->answer_block)
			      : NULL;
	agent_keep_released(server, call->answer.released);
	FAILPOINT("part-answered");
	if (part->is_straight && part->round->failure.status)
		agent_part_end(part);
	else if (part->is_straight)
		agent_part_scatter(part);
	else if (is_behind_others(part) || !agent_part_feed(part))
		starve(part);
	/* There may be memory for those before it. */
	if (!list_empty(&job->retention.starved))
		agent_keep_feed(job);
}

/* Goes on with the result that is retained. */
static void go_on(struct agent_part *part)
{
	part->number = 0;
	part->state = PART_SCATTER;
	agent_device_down(part, !is_for_here(part), false, scatter);
}

/*
 * From the start: once the server, or another in its place, is there, or at once where just one of the connections to it has
 * broken. What the part has of a result is nothing yet.
 */
static void push_again(struct agent_part *part)
{
	struct agent_job *job = job_of(part);
	struct agent_server *server;
	size_t before = part->server;
	uint32_t retained = part->retained;
	bool again = part->again;

	/* It is kept, and others may have it already: what they go on with is this, whoever their server is. */
	if (retained != LEDGER_NO_RESULT &&
	    ledger_result_kept(job->resumption.ledger, retained)->whole) {
		if (part->round->failure.status)
			agent_part_end(part);
		else
			go_on(part);
		return;
	}
	part->retained = LEDGER_NO_RESULT;
	if (retained != LEDGER_NO_RESULT)
		agent_keep_free(job, retained);
	part->block = block_unref(part->block);
	agent_device_give(part);
	if (part->round->failure.status) {
		agent_part_end(part);
		return;
	}
	agent_keep_park(part);
	server = agent_part_server(part);
	if (!agent_server_takes_parts(server))
		return;
	/* Where it has attached since the part was sent, that is as good as never sent. */
	if (part->server != before || part->attachment != server->attachment)
		again = false;
	else if (!again)
		return;
	list_remove(&part->wait);
	part->again = again;
	agent_part_unpark(part);
	agent_send_queue_pump(server->send_queue);
}

/* The call can go on by TCP: what it names is in memory of the host now. */
static void call_on(struct agent_part *part)
{
	struct call *call = &part->call;
	bool was_direct = call->is_target_direct;

	if (job_of(part)->resumption.suspended)
		return;
	/* Its server was lost meanwhile. */
	if (!part->send_queue || part->send_queue->lost ||
	    part->attachment != agent_part_server(part)->attachment) {
		if (job_of(part)->retention.keeps)
			push_again(part);
		else
			agent_part_fail(part, -ECONNRESET, "its server was lost");
		return;
	}
	if (was_direct)
		call->target = part->target = agent_part_first_output(part);
	call->payload = !call->header.len ? NULL : part->block ? part->block->data : part->result;
	call->payload_block = TAKE_PTR(part->block);
	call->is_payload_direct = call->is_target_direct = false;
	peer_call_on(call);
}

static void on_answer(struct call *call)
{
	struct agent_part *part = container_of(call, struct agent_part, call);
	bool lost = job_of(part)->retention.keeps && agent_keep_is_loss(call);

	part->again = lost && call->status == -ENETRESET;

	/* It belongs to the next process now. */
	if (job_of(part)->resumption.suspended)
		return;
	if (agent_part_is_direct(part) && call->status == -ENOLINK &&
	    call->answer.op != DATA_ERROR) {
		agent_direct_spill(part, call_on);
		return;
	}
	if (agent_part_is_direct(part) && job_of(part)->retention.keeps)
		agent_device_give(part);
	/* Not when it is the job that has gone elsewhere. */
	if (lost && !part->again && part->send_queue && call->answer.op != DATA_ERROR)
		part->send_queue->lost = true;
	if (part->charged)
		on_sent(call);
	/* Said before we attached there again: nothing of that counts. */
	lost |= job_of(part)->retention.keeps &&
		part->attachment != agent_part_server(part)->attachment;
	if (agent_part_is_rows(part) && !lost && agent_rows_is_past(part)) {
		agent_part_end(part);
		return;
	}
	if (lost && job_of(part)->state != JOB_OVER) {
		if (agent_part_is_rows(part))
			agent_rows_part_lost(part);
		else
			push_again(part);
		return;
	}
	if (lost) {
		struct failure failure;

		/* The job is over here. Others have heard of the loss; where they go on without this node, their round is well. */
		(void)failure_set(&failure, -ECONNRESET, "%s",
				  call->status ? call->text : "its servers changed");
		agent_round_fail(part->round, &failure, false);
		agent_part_end(part);
	} else if (call->status) {
		struct failure failure;

		/* The words are the server's, and name tensor and round; or the transport's, and name the peer. */
		if (call->status == -EBADMSG)
			agent_round_describe(part->round, &failure, -EBADMSG,
					     "%s: its memory was changed meanwhile, or the wire "
					     "changes what goes over it",
					     call->text);
		else
			(void)failure_set(&failure,
					  call->status == -ETIMEDOUT ? -ETIME : call->status, "%s",
					  call->text);
		agent_round_fail(part->round, &failure, true);
		agent_part_end(part);
	} else if (agent_part_is_rows(part)) {
		on_rows_answer(part);
	} else if (!answer_fits(part)) {
		answer_wild(part);
	} else if (job_of(part)->retention.keeps) {
		on_kept_answer(part);
	} else if (part->round->failure.status) {
		agent_part_end(part);
	} else {
		(void)count(part, call->answer.n_contributions, NULL, NULL);
		part->block = call->answer_block && call->answer.len ? block_ref(call->answer_block)
								     : NULL;
		part->state = PART_SCATTER;
		/* Where the answer has no room in staging, it gets it now; so does what is copied on this node alone. */
		agent_device_down(part, !is_for_here(part), false, scatter);
	}
}

/* -- The push ------------------------------------------------------------------------------------------------------ */

static void push(struct agent_part *part, const void *payload);

static void push_spilled(struct agent_part *part)
{
	if (job_of(part)->resumption.suspended)
		return;
	push(part, part->block ? part->block->data : part->result);
}

/*
 * Whether the result may come to where this node wants it, though that be over what it contributes: who keeps it gives it to us again,
 * and to no sum is anything contributed any more.
 */
static bool goes_straight(const struct agent_part *part)
{
	const struct data_header *answer = &part->call.answer;

	return answer->flags & DATA_FLAG_KEPT && answer->len == part->extent.len &&
	       part->round->ledger.ledger && !part->round->gate.on;
}

/* Not before the result comes: memory that waits for it is used by nobody, and cold. On the lane's thread. */
static void *find_target(struct call *call)
{
	struct agent_part *part = container_of(call, struct agent_part, call);
	struct ledger *ledger = job_of(part)->resumption.ledger;

	if (goes_straight(part)) {
		part->is_straight = true;
		FAILPOINT("part-straight");
		return part->target = agent_part_first_output(part);
	}
	part->retained = ledger_result_take(ledger, true);
	if (part->retained == LEDGER_NO_RESULT)
		return NULL;
	fetch_to_write(ledger_result_kept(ledger, part->retained), sizeof(struct ledger_kept));
	return ledger_result_data(ledger, part->retained, part->extent.len);
}

/* What on_sent() and on_answer() look at, in memory that others will have driven out of the cache by then. */
static void fetch_then(struct agent_part *part)
{
	const struct agent_round *round = part->round;
	const struct agent_request *request = round->ranks[0].request;
	const struct shm_slot *slot = round->slot_memory;
	const void **soon = part->call.soon;

	soon[0] = &round->turn.link;
	soon[1] = &round->n_parts;
	soon[2] = &round->parts;
	soon[3] = &round->n_made;
	soon[4] = &round->partition;
	soon[5] = &round->failure.status;
	soon[6] = round->ranks;
	soon[7] = &round->tensor->n_rounds;
	soon[8] = ledger_round_place(&round->ledger, part->ledger.number);
	soon[9] = &part->job;
	soon[10] = &part->extent;
	soon[11] = &part->server;
	soon[12] = &part->ledger;
	soon[13] = &part->late;
	soon[14] = &round->tensor->key;
	if (!request || !slot)
		return;
	soon[15] = &request->expanded;
	soon[16] = &request->submitted_rank; /* what it is embedded in goes on there */
	soon[17] = &slot->state;
	soon[18] = &slot->n_rows;
}

/* What servers are to know of the operation beside its data. */
static void say_how(struct data_header *header, const struct agent_part *part)
{
	if (agent_part_is_rows(part))
		header->rows = agent_rows_flags(part->round->rows);
	else if (header->operation == OPERATION_BARRIER)
		header->newcomers = agent_elastic_waits(job_of(part));
	else
		/* One of the others of the union, as the operation is. */
		header->root = part->round->partition.root;
}

static void push(struct agent_part *part, const void *payload)
{
	const struct agent_round *round = part->round;
	const struct agent_tensor *tensor = round->tensor;
	const struct extent *extent = &part->extent;
	struct agent_job *job = tensor->job;
	bool by_rows = agent_part_is_rows(part), has_result = answer_len(part) && !by_rows;
	struct agent_server *server;

	if (!part->send_queue)
		agent_part_choose(part);
	server = agent_part_server(part);
	if (!agent_server_takes_parts(server)) {
		if (part->send_queue)
			agent_send_queue_sent(part->send_queue, part);
		if (by_rows)
			agent_rows_part_lost(part);
		else
			push_again(part);
		return;
	}
	/* It was lost, and is back, or another is in its place. */
	if (!part->send_queue)
		part->send_queue = server->send_queue;
	if (agent_part_is_direct(part) && !agent_direct_goes(part)) {
		agent_direct_spill(part, push_spilled);
		return;
	}
	part->attachment = server->attachment;
	part->is_straight = false;
	part->target = has_result && !job->retention.keeps ? agent_part_first_output(part) : NULL;
	/* Which results are kept here: servers do not read that in a pull of rows. */
	if (job->retention.keeps && (!by_rows || payload)) {
		server->ack_sent = server->acked;
		server->ack_bytes = 0;
	}
	part->state = PART_CALL;
	call_clear(&part->call);
	part->call.header = (struct data_header){
		.op = by_rows && !payload ? DATA_PULL : DATA_PUSH,
		.len = payload ? extent->len : 0,
		.job = job->number,
		.key = tensor->key,
		.round = round->number,
		.epoch = by_rows ? round->rows->epoch : job->placement.data_epoch,
		.node = job->shape.node,
		.block = by_rows ? agent_move_number(job, extent->block) : extent->block,
		.part = extent->part,
		.dtype = (uint8_t)tensor->dtype,
		.operation = (uint8_t)round->partition.operation,
		.reduction = agent_round_reduction(round),
		.offset = extent->offset,
		.total = extent->total,
		.part_len = extent->len,
		.priority = round->turn.priority,
		.acked = job->retention.keeps ? server->acked : 0,
	};
	say_how(&part->call.header, part);
	part->call.payload = payload;
	part->call.payload_stalls = !part->block && round->turn.stalls;
	part->call.payload_block = TAKE_PTR(part->block);
	part->call.target = part->target;
	part->call.target_len = has_result ? answer_len(part) : 0;
	part->call.find_target = has_result && job->retention.keeps ? find_target : NULL;
	if (has_result && job->retention.keeps) {
		part->call.in_place = agent_in_place;
		part->call.filled = agent_in_place_filled;
	}
	part->call.sent = on_sent;
	part->call.is_repeatable = job->retention.keeps && !by_rows;
	/* Dense parts come from trainers' memory, and go there: rows lie in blocks. */
	part->call.ends_alone = !job->retention.keeps && !by_rows;
	part->call.is_again = part->again;
	part->call.is_payload_direct = agent_part_is_direct(part);
	part->call.is_target_direct = part->call.is_payload_direct && part->target;
	part->call.done = on_answer;
	fetch_then(part);
	peer_call(part->send_queue->peer, &part->call);
}

/* Servers would have another number. */
static void fail_range(const struct agent_part *part)
{
	const struct agent_tensor *tensor = part->round->tensor;
	struct failure failure;

	agent_round_describe(part->round, &failure, -ERANGE,
			     "the ranks of node %u have a sum that is no %s, for an average of "
			     "them: give numbers of a wider type",
			     job_of(part)->shape.node, dtype_name(tensor->dtype));
	agent_round_fail(part->round, &failure, true);
}

static void on_gathered(struct task *task)
{
	struct agent_part *part = container_of(task, struct agent_part, task);
	const void *payload = NULL;

	part->posted = false;
	if (job_of(part)->resumption.suspended)
		return;
	if (part->out_of_range)
		fail_range(part);
	if (part->round->failure.status) {
		on_sent(&part->call);
		agent_part_end(part);
		return;
	}
	/* Who contributes here may be others now. */
	if (part->round->gate.on && part->moved != job_of(part)->placement.n_moved) {
		push_again(part);
		return;
	}
	if (part->extent.len && agent_part_is_from_here(part))
		payload = part->block ? part->block->data : part->inputs[0];
	/* Staging is not held while other nodes are waited for, unless there is plenty. */
	if (agent_part_is_staged(part) && !part->device.lease.is_long)
		agent_device_give(part);
	push(part, payload);
}

/* Whether a server in this process may keep the contribution for a later round: it would copy what stalls on this thread. */
static bool may_be_kept(const struct agent_part *part)
{
	const struct agent_round *round = part->round;

	return round->turn.stalls && round->job->shape.stragglers.quorum &&
	       round->partition.operation == OPERATION_PUSH_PULL &&
	       (!part->send_queue || peer_is_self(part->send_queue->peer));
}

/* Whether one contribution, or a copy, leaves from where the trainer has it. */
static bool leaves_as_it_lies(const struct agent_part *part)
{
	const struct agent_round *round = part->round;

	return part->n_inputs == 1 && agent_round_takes_one(round) && !round->widens &&
	       (!agent_part_is_staged(part) || part->device.lease.is_long) && !may_be_kept(part);
}

/* What the ranks here contribute is in memory of the host. */
static void gather(struct agent_part *part)
{
	struct agent *agent = job_of(part)->agent;

	agent_part_set_inputs(part);
	if (leaves_as_it_lies(part)) {
		on_gathered(&part->task);
		return;
	}
	if (block_new(agent->params.blocks, part->extent.len, NULL, &part->block)) {
		agent_part_fail(part, -ENOMEM, "out of memory");
		return;
	}
	part->outputs[part->n_outputs++] = part->block->data;
	agent_part_post(part, on_gathered);
}

void agent_part_begin(struct agent_part *part)
{
	struct agent_round *round = part->round;

	part->state = PART_GATHER;
	part->attachment = 0; /* not sent yet: its memory was another's */
	part->moved = job_of(part)->placement.n_moved;
	if (agent_part_is_rows(part)) {
		/* A server that was lost meanwhile may have waited for no more than that its rows go out. */
		round->n_parts++;
		agent_rows_begin(part);
		agent_send_queue_charge(part->send_queue, part, part->extent.len);
		push(part, part->block ? part->block->data : NULL);
		agent_round_part_done(round);
		return;
	}
	if (!agent_part_is_from_here(part) || !part->extent.len) {
		agent_part_set_inputs(part);
		on_gathered(&part->task);
		return;
	}
	agent_send_queue_charge(part->send_queue, part, part->extent.len);
	agent_device_down(part, true, true, gather);
}
