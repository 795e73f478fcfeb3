/*
 * The work of a part: one sum of what the ranks here contribute, or copies into their outputs; at once if it is little,
 * else in the pool. part.c calls it for parts that stay on this node, push.c before a part leaves and when its result is
 * there.
 */
#include "agent/round/device.h"
#include "agent/round/part.h"
#include "base/failpoint.h"
#include "reduce/reduce.h"

/* Of a job on this node alone the control thread takes its share of sums of at most so many input bytes: 0.1 ms. */
#define HOME_BYTES_MAX (2u << 20)
/* The same of what devices have brought down, which is in no cache, while they wait for its copies to go on. */
#define DEVICE_BYTES_MAX (512u << 10)
/* Summed into the scratch and copied to the outputs at a time: scratch and the inputs' lines stay in the first cache. */
#define PIECE_BYTES (16u << 10)
/* However few bytes of an input or output are touched, that takes as long as so many. */
#define TOUCH_BYTES    256u
#define COPIES_AT_ONCE 2u
static_assert(PIECE_BYTES <= LEDGER_PIECE_BYTES, "a piece fits into a journal's scratch");

static struct agent_job *job_of(const struct agent_part *part)
{
	return part->job;
}

/* -- The work ------------------------------------------------------------------------------------------------------ */

/* The sum of len bytes of the inputs. */
static void sum(struct agent_part *part, const void *const *inputs, void *const *outputs,
		size_t n_outputs, uint32_t len)
{
	struct reduce_params params = agent_round_sum(part->round);

	params.n_elements = len / part->round->partition.element_size;
	params.inputs = inputs;
	params.n_inputs = part->n_inputs;
	params.input_dtypes = part->round->widens ? part->input_dtypes : NULL;
	params.outputs = outputs;
	params.n_outputs = n_outputs;
	part->out_of_range |= reduce_run(&params) != 0;
}

/* Where, in an input of a type, the element is that begins at a byte of the tensor. */
static size_t place_in(const struct agent_part *part, unsigned dtype, size_t at)
{
	return at / part->round->partition.element_size * dtype_size(dtype);
}

/* What of the i-th input the part has from a byte of its own on. */
static const void *input_from(const struct agent_part *part, size_t i, size_t at)
{
	if (part->round->widens)
		at = place_in(part, part->input_dtypes[i], at);
	return (const char *)part->inputs[i] + at;
}

/* Whether the job is left to the next daemon process: then work stops where it is. */
static bool is_stopped(const struct agent_part *part)
{
	const struct ledger *ledger = job_of(part)->resumption.ledger;

	return ledger && ledger_stopped(ledger);
}

void agent_part_copy(struct agent_part *part, void *to, const void *from, size_t len)
{
	memcpy(to, from, len);
	part->n_copied += len;
}

/* What is staged, to all outputs; each piece goes to several at once. */
static void copy_piece(struct agent_part *part, const void *scratch)
{
	for (size_t i = 0, n; i < part->n_outputs; i += n) {
		void *to[COPIES_AT_ONCE];

		n = MIN(part->n_outputs - i, (size_t)COPIES_AT_ONCE);
		for (size_t k = 0; k < n; k++)
			to[k] = (char *)part->outputs[i + k] + part->ledger.done;
		reduce_copy(to, n, scratch, part->ledger.staged);
		part->n_copied += n * part->ledger.staged;
		FAILPOINT("part-output-copied");
	}
}

/* The sum of a part that overwrites its inputs: at any instant the ledger says how to go on. */
static void work_recorded(struct agent_part *part, unsigned thread)
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
				part->piece[i] = input_from(part, i, ledger->done);
			sum(part, part->piece, &scratch, 1, len);
			ledger_part_staged(ledger, len);
		}
		copy_piece(part, scratch);
		ledger_part_copied(ledger);
	}
	ledger_part_done(ledger);
}

/* Our contribution that is late, as the next round is to add it. */
static void copy_late(struct agent_part *part, void *to, uint32_t len)
{
	if (!part->round->widens) {
		agent_part_copy(part, to, part->late, len);
		return;
	}
	(void)reduce_run(&(struct reduce_params){
		.dtype = part->round->tensor->dtype,
		.reduction = REDUCTION_SUM,
		.n_elements = len / part->round->partition.element_size,
		.inputs = &part->late,
		.n_inputs = 1,
		.input_dtypes = &part->round->ranks[0].input_dtype,
		.outputs = &to,
		.n_outputs = 1,
	});
}

/* A result that servers have given, or that the daemon before had: kept, before an output is touched. */
static void work_kept(struct agent_part *part)
{
	struct ledger *ledger = job_of(part)->resumption.ledger;
	const struct ledger_kept *kept = ledger_result_kept(ledger, part->retained);

	if (!kept->whole && part->block && kept->what.has_data)
		agent_part_copy(part, ledger_result_data(ledger, part->retained, kept->what.len),
				part->block->data,
				agent_contributors_result_len(job_of(part), kept->what.operation,
							      kept->what.len));
	if (!kept->whole && kept->late)
		copy_late(part, ledger_result_late(ledger, part->retained), kept->what.len);
	if (!kept->whole)
		ledger_result_whole(ledger, part->retained);
	for (size_t i = 0; i < part->n_outputs; i++) {
		agent_part_copy(part, part->outputs[i], part->inputs[0], part->extent.len);
		FAILPOINT("part-scattered");
	}
}

/* Whether its round has no other part. */
static bool is_only(const struct agent_part *part)
{
	unsigned operation = part->round->partition.operation;

	return part->extent.len == part->extent.total &&
	       (operation == OPERATION_PUSH_PULL || operation == OPERATION_BROADCAST);
}

static void part_work(struct agent_part *part, unsigned thread)
{
	bool marks = part->state == PART_SCATTER && job_of(part)->retention.keeps;

	if (is_stopped(part))
		return;
	if (part->retained != LEDGER_NO_RESULT && part->state == PART_SCATTER) {
		work_kept(part);
	} else if (part->round->ledger.ledger && !job_of(part)->distributed) {
		work_recorded(part, thread);
	} else if (part->copies) {
		for (size_t i = 0; i < part->n_outputs; i++)
			agent_part_copy(part, part->outputs[i], part->inputs[0], part->extent.len);
		FAILPOINT("part-copied");
	} else {
		sum(part, part->inputs, part->outputs, part->n_outputs, part->extent.len);
		FAILPOINT("part-summed");
	}
	if (!marks)
		return;
	/* A round on devices is not recorded: it does not outlive this process. */
	if (part->round->ledger.ledger && !part->round->gate.on)
		ledger_round_mark(&part->round->ledger, part->ledger.number, is_only(part));
	part->stored = true;
	FAILPOINT("part-marked");
}

/* -- Where it is done ---------------------------------------------------------------------------------------------- */

static void on_run(struct task *task)
{
	part_work(container_of(task, struct agent_part, task), (unsigned)task->worker);
}

/* The control thread comes after those of the pool. */
static void work_here(struct agent_part *part)
{
	part_work(part, pool_n_threads(job_of(part)->agent->params.pool));
}

/*
 * Whether it is so little that it is done at once. Local parts follow each other without a turn of the loop between
 * them: for all of them together there is no more room than for one.
 */
static bool is_little(const struct agent_part *part, uint64_t bytes)
{
	const struct agent_params *params = &job_of(part)->agent->params;

	if (part->round->turn.stalls && pool_n_threads(params->pool))
		return false;
	if (part->remote)
		return bytes <= params->remote_inline_bytes &&
		       (bytes <= POOL_LEAST_BYTES || !loop_is_wanted(params->loop));
	return part->round->inlined + bytes <= params->inline_bytes;
}

void agent_part_post(struct agent_part *part, void (*done)(struct task *task))
{
	struct agent *agent = job_of(part)->agent;
	size_t n_touched = part->copies ? part->n_outputs : part->n_inputs;
	uint64_t bytes = (uint64_t)MAX(part->extent.len, TOUCH_BYTES) * n_touched;

	if (!n_touched || !part->n_outputs || !part->extent.len) {
		/* Its result is to be kept, if only for others. */
		if (part->state == PART_SCATTER && job_of(part)->retention.keeps) {
			part->n_outputs = 0;
			work_here(part);
		}
		done(&part->task);
		return;
	}
	if (is_little(part, bytes)) {
		if (!part->remote)
			part->round->inlined += bytes;
		work_here(part);
		done(&part->task);
		return;
	}
	part->task.run = on_run;
	part->task.done = done;
	part->task.priority = part->round->turn.priority;
	part->task.flow = job_of(part)->number;
	part->task.cost = bytes;
	/* No connection is kept waiting meanwhile. */
	part->task.shared = !job_of(part)->distributed &&
			    bytes <= (part->round->on_device ? DEVICE_BYTES_MAX : HOME_BYTES_MAX);
	part->task.away = part->round->turn.stalls;
	part->posted = true;
	if (pool_post(agent->params.pool, &part->task)) {
		part->posted = false;
		/* Slower, but right. */
		work_here(part);
		done(&part->task);
	}
}

/* -- What it is done with ------------------------------------------------------------------------------------------ */

const void *agent_part_input(const struct agent_part *part, uint32_t local)
{
	const struct agent_rank *rank = &part->round->ranks[local];
	uint64_t at = part->extent.input_at;

	if (part->round->on_device && part->staged[local])
		return part->staged[local];
	if (part->round->widens)
		at = place_in(part, rank->input_dtype, at);
	return (const char *)rank->input + at;
}

static void add_input(struct agent_part *part, uint32_t local)
{
	if (part->round->widens)
		part->input_dtypes[part->n_inputs] = part->round->ranks[local].input_dtype;
	part->inputs[part->n_inputs++] = agent_part_input(part, local);
}

/* Where a local rank wants this part, or NULL. */
static void *output_of(const struct agent_part *part, uint32_t local)
{
	char *output = part->round->ranks[local].output;

	/* One for all devices: they copy it. */
	if (agent_device_has_output(part, local))
		return part->result;
	return output ? output + part->extent.output_at : NULL;
}

void *agent_part_first_output(const struct agent_part *part)
{
	const struct layout *layout = &job_of(part)->layout;

	if (part->extent.target != RANK_ALL)
		return output_of(part, layout->local_of_rank[part->extent.target]);
	for (uint32_t i = 0; i < layout->n_local; i++)
		if (output_of(part, i))
			return output_of(part, i);
	return NULL;
}

static void add_output(struct agent_part *part, void *output)
{
	if (!output || (part->copies && output == part->inputs[0]))
		return;
	for (size_t i = 0; output == part->result && i < part->n_outputs; i++)
		if (part->outputs[i] == output)
			return;
	part->outputs[part->n_outputs++] = output;
}

void agent_part_set_inputs(struct agent_part *part)
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
		if (part->round->ranks[i].in && agent_device_contributes(part, i))
			add_input(part, i);
}

void agent_part_set_outputs(struct agent_part *part)
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
