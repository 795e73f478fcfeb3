#include "pipeline/part.h"
#include "base/failpoint.h"
#include "pipeline/device.h"
#include "pipeline/rows.h"
#include "reduce/reduce.h"
#include <inttypes.h>

/* Of a job on this node alone the control thread takes its share of sums of at most so many input bytes: 0.1 ms. */
#define HOME_BYTES_MAX (2u << 20)
/* Summed into the scratch and copied to the outputs at a time: scratch and the inputs' lines stay in the first cache. */
#define PIECE_BYTES (16u << 10)
static_assert(PIECE_BYTES <= LEDGER_PIECE_BYTES, "a piece fits into a hand's scratch");

static struct pipeline_job *job_of(const struct pipeline_part *part)
{
	return part->round->tensor->job;
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

static int part_new(struct pipeline_round *round, const struct extent *extent,
		    struct pipeline_part **ret_part)
{
	struct pipeline_job *job = round->tensor->job;
	struct pipeline_part *part = list_first(&job->spare_parts, struct pipeline_part, link);
	uint32_t n = job->layout.n_local;

	if (part) {
		list_remove(&part->link);
		list_fetch_first(&job->spare_parts, struct pipeline_part, link,
				 offsetof(struct pipeline_part, call.text));
	} else {
		part = calloc(1, sizeof(*part) + 4 * n * sizeof(part->pointers[0]));
		if (!part)
			return error_origin(-ENOMEM);
		part->inputs = (const void **)part->pointers;
		part->outputs = &part->pointers[n];
		part->piece = (const void **)&part->pointers[2 * n];
		part->staged = &part->pointers[3 * n];
	}
	part->round = round;
	part->extent = *extent;
	part->state = PART_NEW;
	part->outlet = NULL;
	part->room = NULL;
	part->remote = part->stored = part->posted = false;
	part->n_copied = 0;
	part->cell = LEDGER_NO_CELL;
	part->number = 0;
	part->unsent = 0;
	list_init(&part->wait);
	list_push_back(&round->parts, &part->link);
	round->n_parts++;
	job->n_in_flight++;
	metric_count(&job->pipeline->parts, 1);
	pipeline_job_hold(job);
	*ret_part = part;
	return 0;
}

struct pipeline_part *pipeline_part_free(struct pipeline_part *part)
{
	if (!part)
		return NULL;
	(void)block_unref(part->block);
	free(part);
	return NULL;
}

static void part_left(struct pipeline_part *part)
{
	pipeline_deal_left(part->round, part->unsent);
	part->unsent = 0;
}

static struct pipeline_server *server_of(const struct pipeline_part *part)
{
	return &job_of(part)->servers[part->server];
}

/* The result is kept: whoever is to know that, is told. */
static void tell_stored(struct pipeline_part *part)
{
	struct pipeline_server *server = server_of(part);
	struct pipeline_job *job = job_of(part);
	struct ledger_kept *kept = ledger_cell_kept(job->ledger, part->cell);
	unsigned operation = part->extent.source != RANK_ALL || part->extent.target != RANK_ALL;

	kept->busy = false;
	/* One of the daemon before was offered when we attached. */
	if (kept->stale)
		return;
	if (part->attachment == server->attachment)
		pipeline_keep_stored(server, part->number, part->cell, operation);
	else
		pipeline_keep_offer(job, part->cell);
}

/* Of a cell and a number: also of a part whose round has failed the server is to hear, or it waits for that number. */
static void let_go(struct pipeline_part *part)
{
	struct pipeline_server *server = server_of(part);
	struct ledger *ledger = job_of(part)->ledger;

	if (part->cell != LEDGER_NO_CELL && part->stored) {
		tell_stored(part);
		return;
	}
	if (part->cell != LEDGER_NO_CELL && ledger_cell_kept(ledger, part->cell)->whole)
		ledger_cell_kept(ledger, part->cell)->busy = false;
	else if (part->cell != LEDGER_NO_CELL)
		ledger_cell_free(ledger, part->cell);
	if (part->number && part->attachment == server->attachment)
		pipeline_keep_stored(server, part->number, LEDGER_NO_CELL, false);
}

static void part_finish(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	struct pipeline_job *job = job_of(part);
	bool was_unsent;

	if (round->ledger.ledger && !round->gated && !job->suspended &&
	    (part->stored || !job->distributed))
		ledger_round_advance(&round->ledger, part->ledger.number);
	if (job->keep && !job->suspended)
		let_go(part);
	if (!round->failure.status) {
		job->n_bytes += part->extent.len;
		metric_count(&job->pipeline->bytes, part->extent.len);
		metric_count(&job->pipeline->parts_done, 1);
	}
	metric_count(&job->pipeline->copied, part->n_copied);
	part->block = block_unref(part->block);
	pipeline_device_give(part);
	was_unsent = part->unsent;
	part_left(part);
	list_remove(&part->link);
	list_push_front(&job->spare_parts, &part->link);
	job->n_in_flight--;
	metric_uncount(&job->pipeline->parts, 1);
	pipeline_round_part_done(round);
	if (was_unsent)
		pipeline_deal(job);
	pipeline_job_release(job);
}

void pipeline_part_drop(struct pipeline_part *part)
{
	if (part->charged && part->outlet) {
		part_left(part);
		pipeline_outlet_sent(part->outlet, part);
		pipeline_outlet_pump(part->outlet);
	}
	part_finish(part);
}

void pipeline_part_fail(struct pipeline_part *part, int status, const char *text)
{
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s, round %" PRIu64 ": %s",
			  part->round->tensor->name, part->round->number, text);
	pipeline_round_fail(part->round, &failure, true);
	pipeline_part_drop(part);
}

/* -- Work: one sum, or copies ------------------------------------------------------------------------------------- */

/* The sum of len bytes of the inputs. */
static void sum(const struct pipeline_part *part, const void *const *inputs, void *const *outputs,
		size_t n_outputs, uint32_t len)
{
	const struct pipeline_round *round = part->round;

	reduce_run(&(struct reduce_params){
		.dtype = round->tensor->dtype,
		/* A node's share of an average is a sum; the servers divide. */
		.reduction = job_of(part)->distributed && round->reduction == REDUCTION_AVERAGE
				     ? REDUCTION_SUM
				     : round->reduction,
		.n_elements = len / round->partition.element_size,
		.inputs = inputs,
		.n_inputs = part->n_inputs,
		.outputs = outputs,
		.n_outputs = n_outputs,
		.divisor = round->n_in,
		.round_before_division = true,
	});
}

/* Whether the job is left to the next daemon process: then work stops where it is. */
static bool is_stopped(const struct pipeline_part *part)
{
	const struct ledger *ledger = job_of(part)->ledger;

	return ledger && ledger_stopped(ledger);
}

/* Counted when the part is done with, by one thread for all. */
static void copy(struct pipeline_part *part, void *to, const void *from, size_t len)
{
	memcpy(to, from, len);
	part->n_copied += len;
}

/* The sum of a part that overwrites its inputs: at any instant the ledger says how to go on. */
static void work_recorded(struct pipeline_part *part, unsigned thread)
{
	struct ledger_part *ledger = &part->ledger;
	void *scratch;
	uint32_t len;

	ledger_part_take(ledger, thread);
	scratch = ledger_part_scratch(ledger);
	while (ledger->done < part->extent.len) {
		if (is_stopped(part))
			return;
		if (!ledger->staged) {
			len = MIN(part->extent.len - ledger->done, PIECE_BYTES);
			for (size_t i = 0; i < part->n_inputs; i++)
				part->piece[i] = (const char *)part->inputs[i] + ledger->done;
			sum(part, part->piece, &scratch, 1, len);
			ledger_part_staged(ledger, len);
		}
		for (size_t i = 0; i < part->n_outputs; i++) {
			copy(part, (char *)part->outputs[i] + ledger->done, scratch,
			     ledger->staged);
			FAILPOINT("part-output-copied");
		}
		ledger_part_copied(ledger);
	}
	ledger_part_done(ledger);
}

/* A result that servers have given, or that the daemon before had: kept, before an output is touched. */
static void work_kept(struct pipeline_part *part)
{
	struct ledger *ledger = job_of(part)->ledger;
	const struct ledger_kept *kept = ledger_cell_kept(ledger, part->cell);

	if (!kept->whole && part->block && kept->what.has_data)
		copy(part, ledger_cell_data(ledger, part->cell), part->block->data, kept->what.len);
	if (!kept->whole)
		ledger_cell_whole(ledger, part->cell);
	for (size_t i = 0; i < part->n_outputs; i++) {
		copy(part, part->outputs[i], part->inputs[0], part->extent.len);
		FAILPOINT("part-scattered");
	}
}

static void part_work(struct pipeline_part *part, unsigned thread)
{
	bool marks = part->state == PART_SCATTER && job_of(part)->keep;

	if (is_stopped(part))
		return;
	if (part->cell != LEDGER_NO_CELL && part->state == PART_SCATTER) {
		work_kept(part);
	} else if (part->round->ledger.ledger && !job_of(part)->distributed) {
		work_recorded(part, thread);
	} else if (part->copies) {
		for (size_t i = 0; i < part->n_outputs; i++)
			copy(part, part->outputs[i], part->inputs[0], part->extent.len);
		FAILPOINT("part-copied");
	} else {
		sum(part, part->inputs, part->outputs, part->n_outputs, part->extent.len);
		FAILPOINT("part-summed");
	}
	if (!marks)
		return;
	/* A round on devices is not recorded: it does not outlive this process. */
	if (part->round->ledger.ledger && !part->round->gated)
		ledger_round_mark(&part->round->ledger, part->ledger.number);
	part->stored = true;
	FAILPOINT("part-marked");
}

static void on_run(struct task *task)
{
	part_work(container_of(task, struct pipeline_part, task), (unsigned)task->worker);
}

/* The control thread comes after those of the pool. */
static void work_here(struct pipeline_part *part)
{
	part_work(part, pool_n_threads(job_of(part)->pipeline->params.pool));
}

/*
 * Whether it is so little that it is done at once. Local parts follow each other without a turn of the loop between
 * them: for all of them together there is no more room than for one.
 */
static bool is_little(const struct pipeline_part *part, uint64_t bytes)
{
	const struct pipeline_params *params = &job_of(part)->pipeline->params;

	if (part->remote)
		return bytes <= params->remote_inline_bytes;
	return part->round->inlined + bytes <= params->inline_bytes;
}

/* Does the work here, or in the pool; then done() goes on. Large or small is decided by bytes touched. */
static void part_post(struct pipeline_part *part, void (*done)(struct task *task))
{
	struct pipeline *pipeline = job_of(part)->pipeline;
	size_t n_touched = part->copies ? part->n_outputs : part->n_inputs;
	uint64_t bytes = (uint64_t)part->extent.len * n_touched;

	if (!n_touched || !part->n_outputs || !part->extent.len) {
		/* Its result is to be kept, if only for others. */
		if (part->state == PART_SCATTER && job_of(part)->keep) {
			part->n_outputs = 0;
			work_here(part);
		}
		done(&part->task);
		return;
	}
	if (is_little(part, bytes)) {
		part->round->inlined += bytes;
		work_here(part);
		done(&part->task);
		return;
	}
	part->task.run = on_run;
	part->task.done = done;
	part->task.priority = part->round->priority;
	/* No connection is kept waiting meanwhile. */
	part->task.shared = !job_of(part)->distributed && bytes <= HOME_BYTES_MAX;
	part->posted = true;
	if (pool_post(pipeline->params.pool, &part->task)) {
		part->posted = false;
		/* Slower, but right. */
		work_here(part);
		done(&part->task);
	}
}

static void add_input(struct pipeline_part *part, uint32_t local)
{
	const char *input = part->round->ranks[local].input;

	part->inputs[part->n_inputs++] =
		part->staged[local] ? part->staged[local] : input + part->extent.input_at;
}

/* Where a local rank wants this part, or NULL. */
static void *output_of(const struct pipeline_part *part, uint32_t local)
{
	char *output = part->round->ranks[local].output;

	/* One for all devices: they copy it. */
	if (pipeline_device_has_output(part, local))
		return part->result;
	return output ? output + part->extent.output_at : NULL;
}

static void add_output(struct pipeline_part *part, void *output)
{
	if (!output || (part->copies && output == part->inputs[0]))
		return;
	for (size_t i = 0; output == part->result && i < part->n_outputs; i++)
		if (part->outputs[i] == output)
			return;
	part->outputs[part->n_outputs++] = output;
}

/* Inputs: the local ranks' contributions. */
static void set_inputs(struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	part->n_inputs = part->n_outputs = 0;
	part->copies = part->extent.source != RANK_ALL;
	if (!part->extent.len)
		return;
	if (part->copies) {
		if (layout->local_of_rank[part->extent.source] != RANK_AWAY)
			add_input(part, layout->local_of_rank[part->extent.source]);
		return;
	}
	for (uint32_t i = 0; i < layout->n_local; i++)
		if (part->round->ranks[i].in && pipeline_device_contributes(part, i))
			add_input(part, i);
}

/* Outputs: of the local ranks that the part is for. */
static void set_outputs(struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	part->n_outputs = 0;
	if (!part->extent.len)
		return;
	if (part->extent.target == RANK_ALL) {
		for (uint32_t i = 0; i < layout->n_local; i++)
			add_output(part, output_of(part, i));
	} else if (layout->local_of_rank[part->extent.target] != RANK_AWAY) {
		add_output(part, output_of(part, layout->local_of_rank[part->extent.target]));
	}
}

/* -- On this node alone ------------------------------------------------------------------------------------------- */

static void on_local_done(struct task *task)
{
	struct pipeline_part *part = container_of(task, struct pipeline_part, task);

	part->posted = false;
	pipeline_device_up(part);
}

static void work_local(struct pipeline_part *part)
{
	set_inputs(part);
	set_outputs(part);
	part_post(part, on_local_done);
}

static void start_local(struct pipeline_part *part)
{
	part->state = PART_SCATTER;
	pipeline_device_down(part, true, false, work_local);
}

/* -- Through a server --------------------------------------------------------------------------------------------- */

/* A part's place in the job's virtual space: the same on every node. */
static size_t stripe_of(const struct pipeline_part *part)
{
	const struct pipeline_tensor *tensor = part->round->tensor;
	const struct pipeline_job *job = tensor->job;
	uint64_t stripe = job->part_bytes, step = stripe, at;

	if (tensor->elements != ELEMENTS_VARIABLE)
		step = (part->extent.total + stripe - 1) / stripe * stripe;
	at = tensor->start + part->extent.block * step + part->extent.part * stripe;
	return at / stripe % job->n_stripes;
}

void pipeline_part_choose(struct pipeline_part *part)
{
	part->server =
		part->round->rows ? part->extent.block : job_of(part)->stripes[stripe_of(part)];
}

static bool is_from_here(const struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	return part->extent.source == RANK_ALL ||
	       layout->node_of_rank[part->extent.source] == layout->node;
}

/* Whether the answer brings data: not to the node where it comes from. */
static bool is_for_here(const struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	if (part->extent.source != RANK_ALL && is_from_here(part))
		return false;
	return part->extent.target == RANK_ALL ||
	       layout->node_of_rank[part->extent.target] == layout->node;
}

/* First local output for the answer; the others are copied from it. */
static void *first_output(const struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	if (part->extent.target != RANK_ALL)
		return output_of(part, layout->local_of_rank[part->extent.target]);
	for (uint32_t i = 0; i < layout->n_local; i++)
		if (output_of(part, i))
			return output_of(part, i);
	return NULL;
}

void pipeline_part_end(struct pipeline_part *part)
{
	part_finish(part);
}

/* Its cell is the only place where the others of the round may find it, until all are in the outputs here. */
static void scattered(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	struct pipeline_part *next;

	if (round->failure.status) {
		part_finish(part);
		return;
	}
	part->state = PART_SCATTERED;
	if (++round->n_scattered < round->n_made)
		return;
	ledger_round_set_stage(&round->ledger, LEDGER_SCATTERED, round->n_gone);
	FAILPOINT("round-scattered");
	/* It ends with the last. */
	round->n_parts++;
	list_for_each_safe (part, next, &round->parts, link)
		part_finish(part);
	pipeline_round_part_done(round);
}

static void on_scattered(struct task *task)
{
	struct pipeline_part *part = container_of(task, struct pipeline_part, task);

	part->posted = false;
	if (!part->round->gated)
		pipeline_device_up(part);
	else if (!job_of(part)->suspended)
		scattered(part);
}

static void scatter(struct pipeline_part *part)
{
	part->copies = true;
	part->n_inputs = part->n_outputs = 0;
	if (part->extent.len && is_for_here(part) && part->cell != LEDGER_NO_CELL)
		part->inputs[part->n_inputs++] = ledger_cell_data(job_of(part)->ledger, part->cell);
	else if (part->extent.len && is_for_here(part))
		part->inputs[part->n_inputs++] = part->block ? part->block->data : part->room;
	else
		set_inputs(part);
	/* A sum that is none of ours: nothing to copy from. */
	if (part->n_inputs && part->copies)
		set_outputs(part);
	part_post(part, on_scattered);
}

static void on_sent(struct call *call)
{
	struct pipeline_part *part = container_of(call, struct pipeline_part, call);

	part_left(part);
	/* Without one, its server was lost meanwhile. */
	if (part->outlet) {
		pipeline_outlet_sent(part->outlet, part);
		pipeline_outlet_pump(part->outlet);
	}
	pipeline_deal(job_of(part));
}

/* An answer must be what was asked for; anything else is a server that cannot be trusted with this job. */
static bool answer_fits(const struct pipeline_part *part)
{
	const struct data_header *answer = &part->call.answer;
	uint32_t len = is_for_here(part) ? part->extent.len : 0;

	return answer->op == DATA_RESULT && answer->len == len &&
	       (!part->call.answer_block || part->call.answer_block->len >= len);
}

static void answer_wild(struct pipeline_part *part)
{
	struct failure failure;

	(void)failure_set(&failure, -EPROTO, "%s answered with something else",
			  pipeline_server_name(job_of(part), part->server));
	pipeline_job_fail(job_of(part), &failure, NULL);
	part_finish(part);
}

static void on_rows_answer(struct pipeline_part *part)
{
	struct failure failure;
	int r = part->round->failure.status ? 0 : pipeline_rows_answered(part, &failure);

	if (r == -EPROTO)
		answer_wild(part);
	else if (r)
		pipeline_part_fail(part, r, failure.text);
	else
		part_finish(part);
}

/* Its result counts, once those of all parts do. */
static void hold(struct pipeline_part *part)
{
	struct ledger *ledger = job_of(part)->ledger;
	const struct ledger_kept *kept = ledger_cell_kept(ledger, part->cell);

	if (part->block && kept->what.has_data)
		copy(part, ledger_cell_data(ledger, part->cell), part->block->data, kept->what.len);
	part->block = block_unref(part->block);
	ledger_cell_whole(ledger, part->cell);
	part->state = PART_HELD;
	FAILPOINT("part-held");
	pipeline_round_held(part->round);
}

void pipeline_part_unhold(struct pipeline_part *part)
{
	part->round->n_held--;
	ledger_cell_free(job_of(part)->ledger, part->cell);
	part->cell = LEDGER_NO_CELL;
	part->number = 0;
	pipeline_keep_park(part);
}

void pipeline_part_scatter(struct pipeline_part *part)
{
	part->state = PART_SCATTER;
	scatter(part);
}

static void push_again(struct pipeline_part *part);

/* Who was gone when the result was made, and of a barrier whether newcomers wait. */
static uint32_t n_gone_of(const struct pipeline_part *part)
{
	const struct data_header *answer = &part->call.answer;

	if (!job_of(part)->shape.elastic)
		return 0;
	return answer->root |
	       (answer->operation == OPERATION_BARRIER && answer->total ? LEDGER_WAITING : 0);
}

/* A result has come, and there is a cell for it. */
static void keep(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	struct ledger_kept *kept = ledger_cell_kept(job_of(part)->ledger, part->cell);

	/* It waited for the cell, and its server was lost meanwhile. */
	if (round->gated && part->attachment != server_of(part)->attachment) {
		push_again(part);
		return;
	}
	if (job_of(part)->shape.elastic)
		round->n_gone = MAX(round->n_gone, n_gone_of(part));

	kept->what = (struct ledger_what){
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
		.reduction = (uint8_t)round->reduction,
		.has_data = part->extent.len && is_for_here(part),
	};
	kept->taken = kept->busy = true;
	if (round->gated) {
		hold(part);
		return;
	}
	part->state = PART_SCATTER;
	pipeline_device_down(part, !is_for_here(part), false, scatter);
}

void pipeline_part_feed(struct pipeline_part *part)
{
	struct pipeline_job *job = job_of(part);

	if (part->cell == LEDGER_NO_CELL && !part->round->failure.status)
		part->cell = ledger_cell_take(job->ledger, false);
	if (part->round->failure.status) {
		part_finish(part);
	} else if (part->cell == LEDGER_NO_CELL) {
		list_push_back(&job->starved, &part->wait);
	} else {
		keep(part);
	}
}

static void on_kept_answer(struct pipeline_part *part)
{
	struct pipeline_server *server = server_of(part);
	const struct call *call = &part->call;

	part->number = (uint32_t)call->answer.priority;
	if (!part->number ||
	    (call->answer.len && part->cell == LEDGER_NO_CELL && !call->answer_block)) {
		answer_wild(part);
		return;
	}
	part->block = call->answer_block && call->answer.len ? block_ref(call->answer_block) : NULL;
	pipeline_keep_released(server, (uint32_t)call->answer.status);
	FAILPOINT("part-answered");
	pipeline_part_feed(part);
}

/*
 * From the start: once the server, or another in its place, is there, or at once where just one of the connections to it has
 * broken. What the part has of a result is nothing yet.
 */
static void push_again(struct pipeline_part *part)
{
	struct pipeline_job *job = job_of(part);
	struct pipeline_server *server;
	size_t before = part->server;
	bool again = part->again;

	if (part->cell != LEDGER_NO_CELL) {
		ledger_cell_free(job->ledger, part->cell);
		part->cell = LEDGER_NO_CELL;
	}
	part->block = block_unref(part->block);
	pipeline_device_give(part);
	if (part->round->failure.status) {
		part_finish(part);
		return;
	}
	pipeline_keep_park(part);
	server = server_of(part);
	if (!server->attached)
		return;
	/* Where it has attached since the part was sent, that is as good as never sent. */
	if (part->server != before || part->attachment != server->attachment)
		again = false;
	else if (!again)
		return;
	list_remove(&part->wait);
	part->again = again;
	pipeline_part_unpark(part);
	pipeline_outlet_pump(server->outlet);
}

/* What a server says of a result that not all ranks need be in. */
static void count(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	uint32_t n = part->call.answer.root;

	if (!stragglers_any(&job_of(part)->shape.stragglers))
		return;
	round->n_contributions = round->counted ? MIN(round->n_contributions, n) : n;
	round->counted = true;
}

static void on_answer(struct call *call)
{
	struct pipeline_part *part = container_of(call, struct pipeline_part, call);
	bool lost = job_of(part)->keep && pipeline_keep_is_loss(call);

	part->again = lost && call->status == -ENETRESET;

	/* It belongs to the next process now. */
	if (job_of(part)->suspended)
		return;
	/* Not when it is the job that has gone elsewhere. */
	if (lost && !part->again && part->outlet && call->answer.op != DATA_ERROR)
		part->outlet->lost = true;
	if (part->charged)
		on_sent(call);
	/* Said before we attached there again: nothing of that counts. */
	lost |= job_of(part)->keep && part->attachment != server_of(part)->attachment;
	if (lost && !part->round->rows && job_of(part)->state != JOB_OVER) {
		push_again(part);
		return;
	}
	if (lost && !call->status) {
		pipeline_part_fail(part, -ECONNRESET, "its servers changed");
	} else if (call->status) {
		struct failure failure;

		/* The words are the server's, and name tensor and round; or the transport's, and name the peer. */
		(void)failure_set(&failure,
				  lost			       ? -ECONNRESET
				  : call->status == -ETIMEDOUT ? -ETIME
							       : call->status,
				  "%s", call->text);
		pipeline_round_fail(part->round, &failure, true);
		part_finish(part);
	} else if (part->round->rows) {
		on_rows_answer(part);
	} else if (!answer_fits(part)) {
		answer_wild(part);
	} else if (job_of(part)->keep) {
		on_kept_answer(part);
	} else if (part->round->failure.status) {
		part_finish(part);
	} else {
		count(part);
		part->block = call->answer_block && call->answer.len ? block_ref(call->answer_block)
								     : NULL;
		part->state = PART_SCATTER;
		/* Where the answer has no room in staging, it gets it now; so does what is copied on this node alone. */
		pipeline_device_down(part, !is_for_here(part), false, scatter);
	}
}

/* Not before the result comes: a cell that waits for one is memory that nobody uses, and cold. On the lane's thread. */
static void *find_cell(struct call *call)
{
	struct pipeline_part *part = container_of(call, struct pipeline_part, call);
	struct ledger *ledger = job_of(part)->ledger;

	part->cell = ledger_cell_take(ledger, true);
	return part->cell == LEDGER_NO_CELL ? NULL : ledger_cell_data(ledger, part->cell);
}

static void push(struct pipeline_part *part, const void *payload)
{
	const struct pipeline_round *round = part->round;
	const struct pipeline_tensor *tensor = round->tensor;
	const struct extent *extent = &part->extent;
	struct pipeline_job *job = tensor->job;
	bool room = is_for_here(part) && extent->len && !round->rows;
	struct pipeline_server *server;

	if (!part->outlet)
		pipeline_part_choose(part);
	server = server_of(part);
	if (!server->attached) {
		if (part->outlet)
			pipeline_outlet_sent(part->outlet, part);
		push_again(part);
		return;
	}
	/* It was lost, and is back, or another is in its place. */
	if (!part->outlet)
		part->outlet = server->outlet;
	part->attachment = server->attachment;
	part->room = room && !job->keep ? first_output(part) : NULL;
	if (job->keep) {
		server->ack_sent = server->acked;
		server->ack_bytes = 0;
	}
	part->state = PART_CALL;
	call_clear(&part->call);
	part->call.header = (struct data_header){
		.op = round->rows && !payload ? DATA_PULL : DATA_PUSH,
		.len = payload ? extent->len : 0,
		.job = job->number,
		.key = tensor->key,
		.round = round->number,
		.epoch = job->data_epoch,
		.node = job->shape.node,
		.block = extent->block,
		.part = extent->part,
		.dtype = (uint8_t)tensor->dtype,
		.operation = (uint8_t)round->partition.operation,
		.reduction = (uint8_t)round->reduction,
		.offset = extent->offset,
		.total = extent->total,
		.part_len = extent->len,
		.root = round->partition.operation == OPERATION_BARRIER
				? pipeline_elastic_waits(job)
				: round->partition.root,
		.priority = round->priority,
		.status = job->keep ? (int32_t)server->acked : 0,
	};
	part->call.payload = payload;
	part->call.payload_block = TAKE_PTR(part->block);
	part->call.room = part->room;
	part->call.room_len = room ? extent->len : 0;
	part->call.find_room = room && job->keep ? find_cell : NULL;
	part->call.sent = on_sent;
	part->call.is_repeatable = job->keep && !round->rows;
	part->call.is_again = part->again;
	part->call.done = on_answer;
	peer_call(part->outlet->peer, &part->call);
}

static void on_gathered(struct task *task)
{
	struct pipeline_part *part = container_of(task, struct pipeline_part, task);
	const void *payload = NULL;

	part->posted = false;
	if (job_of(part)->suspended)
		return;
	if (part->round->failure.status) {
		on_sent(&part->call);
		part_finish(part);
		return;
	}
	/* Who contributes here may be others now. */
	if (part->round->gated && part->moved != job_of(part)->n_moved) {
		push_again(part);
		return;
	}
	if (part->extent.len && is_from_here(part))
		payload = part->block ? part->block->data : part->inputs[0];
	/* Staging is not held while other nodes are waited for, unless there is plenty. */
	if (part->lease.data && !part->lease.is_long)
		pipeline_device_give(part);
	push(part, payload);
}

/* What the ranks here contribute is in memory of the host. */
static void gather(struct pipeline_part *part)
{
	struct pipeline *pipeline = job_of(part)->pipeline;

	set_inputs(part);
	/* One contribution, or a copy, leaves from where the trainer has it. */
	if (part->n_inputs == 1 && (!part->lease.data || part->lease.is_long)) {
		on_gathered(&part->task);
		return;
	}
	if (block_new(pipeline->params.blocks, part->extent.len, NULL, &part->block)) {
		pipeline_part_fail(part, -ENOMEM, "out of memory");
		return;
	}
	part->outputs[part->n_outputs++] = part->block->data;
	part_post(part, on_gathered);
}

void pipeline_part_begin(struct pipeline_part *part)
{
	part->state = PART_GATHER;
	part->moved = job_of(part)->n_moved;
	if (part->round->rows) {
		part->block = pipeline_rows_take(part->round->rows, &part->extent);
		pipeline_outlet_charge(part->outlet, part, part->extent.len);
		push(part, part->block ? part->block->data : NULL);
		return;
	}
	if (!is_from_here(part) || !part->extent.len) {
		set_inputs(part);
		on_gathered(&part->task);
		return;
	}
	pipeline_outlet_charge(part->outlet, part, part->extent.len);
	pipeline_device_down(part, true, true, gather);
}

static bool needs_server(const struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;
	const struct extent *extent = &part->extent;

	if (!job_of(part)->distributed)
		return false;
	/* What goes from one rank to one other of the same node need not leave it. */
	return extent->source == RANK_ALL || extent->target == RANK_ALL ||
	       layout->node_of_rank[extent->source] != layout->node_of_rank[extent->target];
}

/* The daemon before has left its result: whether it goes on from there. */
static bool start_stale(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	struct ledger *ledger = job_of(part)->ledger;
	uint32_t cell = round->rows ? LEDGER_NO_CELL
				    : ledger_cell_find(ledger, round->tensor->key, round->number,
						       part->extent.block, part->extent.part);
	struct ledger_kept *kept;

	if (cell == LEDGER_NO_CELL)
		return false;
	kept = ledger_cell_kept(ledger, cell);
	/* One that does not fit is the trainers' doing, and their own result's. */
	if (kept->what.len != part->extent.len ||
	    kept->what.has_data != (part->extent.len && is_for_here(part)))
		return false;
	part->cell = cell;
	kept->busy = true;
	round->n_gone = MAX(round->n_gone, kept->what.n_gone);
	if (round->gated) {
		part->state = PART_HELD;
		pipeline_round_held(round);
		return true;
	}
	part->state = PART_SCATTER;
	pipeline_device_down(part, !is_for_here(part), false, scatter);
	return true;
}

void pipeline_part_unpark(struct pipeline_part *part)
{
	part->outlet = server_of(part)->outlet;
	if (pipeline_outlet_push(part->outlet, part))
		pipeline_part_fail(part, -ENOMEM, "out of memory");
}

int pipeline_part_start(struct pipeline_round *round, const struct extent *extent, uint64_t number)
{
	struct ledger_part ledger = { 0 };
	struct pipeline_part *part = NULL;
	int r = 0;

	if (round->ledger.ledger && !round->tensor->job->distributed)
		r = ledger_part_find(&round->ledger, number, extent->len, &ledger);
	if (!r)
		r = part_new(round, extent, &part);
	if (r)
		return error_trace(r);
	part->ledger = ledger;
	part->ledger.number = number;
	round->n_made++;
	if (!needs_server(part)) {
		start_local(part);
		return 0;
	}
	part->remote = true;
	pipeline_part_choose(part);
	if (round->tensor->job->keep && start_stale(part))
		return 0;
	part->state = PART_QUEUED;
	if (!server_of(part)->attached) {
		pipeline_keep_park(part);
		return 0;
	}
	part->outlet = server_of(part)->outlet;
	/* Our own server takes nothing over a wire. */
	if ((part->round->rows || is_from_here(part)) && !peer_is_self(part->outlet->peer)) {
		part->unsent = extent->len;
		pipeline_deal_queued(part->round, part->unsent);
	}
	r = pipeline_outlet_push(part->outlet, part);
	if (r) {
		part_finish(part);
		return error_trace(r);
	}
	pipeline_outlet_pump(part->outlet);
	return 0;
}

void pipeline_part_drop_queued(struct pipeline_round *round)
{
	struct pipeline_part *part, *next;

	list_for_each_safe (part, next, &round->parts, link) {
		if (part->state == PART_HELD) {
			round->n_held--;
			ledger_cell_free(job_of(part)->ledger, part->cell);
			part->cell = LEDGER_NO_CELL;
		} else if (part->state == PART_QUEUED && list_linked(&part->wait)) {
			list_remove(&part->wait);
		} else if (part->state == PART_QUEUED) {
			pipeline_outlet_remove(part->outlet, part);
		} else if (part->state != PART_SCATTERED) {
			continue;
		}
		part_finish(part);
	}
}
