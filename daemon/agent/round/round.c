/*
 * A round once it is there: it moves when it is its turn, makes its parts, and ends, well or not. submit.c makes rounds
 * and brings them their requests; expire.c fails those whose time is over; part.c says when a part is done.
 */
#include "agent/round/round.h"
#include "agent/round/device.h"
#include "agent/round/part.h"
#include "agent/round/rows.h"
#include "agent/schedule/scheduler.h"
#include "base/failpoint.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

/* Parts of a round that a turn of the loop makes and that are over at once, as empty ones, and rounds of a tensor that a turn begins. */
#define OVER_MAX    4096
#define ADVANCE_MAX 16
#define SCATTER_MAX 64

static struct agent_job *job_of(const struct agent_round *round)
{
	return round->job;
}

void agent_round_describe(const struct agent_round *round, struct failure *failure, int status,
			  const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	(void)failure_set(failure, status, "tensor %s, round %" PRIu64 ": %s", round->tensor->name,
			  round->number, text);
}

/* -- Ending ------------------------------------------------------------------------------------------------------- */

void agent_round_drop(struct agent_round *round)
{
	struct agent_part *part;

	list_for_each (part, &round->parts, link) {
		agent_part_sate(part);
		part->block = block_unref(part->block);
	}
	round->rows = agent_rows_free(round->rows);
	round->counts = held_free(round->counts);
}

static bool is_busy(const struct agent_round *round)
{
	return round->state == ROUND_READY || round->state == ROUND_MOVING;
}

static void round_unlink(struct agent_round *round)
{
	job_of(round)->n_busy -= is_busy(round);
	list_remove(&round->link);
	list_remove(&round->job_link);
	list_remove(&round->moving_link);
	agent_schedule_remove(round);
	/* No other round waits for a device: the link is on a line of the cache that is else not needed here. */
	if (round->on_device)
		list_remove(&round->device_link);
	job_of(round)->n_open_rounds--;
	round->counts = held_free(round->counts);
}

void agent_round_recycle(struct agent_round *round)
{
	struct agent_job *job = job_of(round);

	if (round == round->tensor->untold)
		agent_round_told(round);
	round_unlink(round);
	list_push_front(&job->memory.spare_rounds, &round->link);
}

struct agent_request *agent_round_take(struct agent_round *round, uint32_t index)
{
	struct agent_request *request = TAKE_PTR(round->ranks[index].request);
	struct agent_job *job = job_of(round);

	if (request && !--job->n_pending[index])
		job->departed.due = true;
	if (job->deadlock.n_blocked && job->deadlock.ranks[index].request == request)
		agent_deadlock_over(&job->deadlock, index);
	return request;
}

void agent_request_end(struct agent *agent, struct agent_request *request,
		       const struct failure *failure)
{
	struct failure expired;

	metric_count(&agent->requests, 1);
	if (failure)
		metric_count(&agent->failed, 1);
	/* To a trainer ETIMEDOUT is a wait of its own that ended; a request that ran out of time says so otherwise. */
	if (failure && failure->status == -ETIMEDOUT) {
		expired = *failure;
		expired.status = -ETIME;
		failure = &expired;
	}
	request->in = NULL;
	request->expanded = held_free(request->expanded);
	request->done(request, failure);
}

void agent_round_end_requests(struct agent_round *round)
{
	const struct failure *failure = round->failure.status ? &round->failure : NULL;
	struct agent *agent = job_of(round)->agent;
	struct failure too_small;

	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		struct agent_request *request = agent_round_take(round, i);

		if (request && !failure && !round->rows)
			request->n_rows = round->n_contributions;
		if (request)
			agent_elastic_outcome(round, i, request);
		if (request && !failure)
			agent_request_end(agent, request,
					  agent_rows_verdict(round, request, &too_small));
		else if (request)
			agent_request_end(agent, request, failure);
		if (request)
			FAILPOINT("request-ended");
	}
}

bool agent_round_forget(struct agent_round *round)
{
	const struct agent_tensor *tensor = round->tensor;

	if (round->state != ROUND_FAILED || !agent_round_is_complete(round))
		return false;
	if (tensor->job->distributed && !tensor->key && !tensor->failure.status)
		return false;
	if (agent_round_is_untold(round))
		return false;
	agent_round_recycle(round);
	return true;
}

static void round_finish(struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;

	/* The sweep has not come to it yet. */
	if (job->end.failure.status && !round->failure.status)
		round->failure = job->end.failure;
	round_unlink(round);
	if (!round->failure.status) {
		tensor->n_rounds++;
		job->n_rounds++;
	}
	if (round->rows)
		agent_resume_finish_rows(round);
	agent_acknowledged_round(round);
	agent_round_end_requests(round);
	ledger_round_end(round->rows ? &round->rows->ledger : &round->ledger);
	if (job->retention.keeps)
		agent_keep_settle(tensor, round->number);
	round->rows = agent_rows_free(round->rows);
	list_push_front(&job->memory.spare_rounds, &round->link);
	agent_job_let_leave(job);
	agent_round_advance(tensor);
}

void agent_round_fail(struct agent_round *round, const struct failure *failure, bool tell)
{
	struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;

	if (round->failure.status)
		return;
	/* It is done for all: what is left is to copy it here, or what was begun for others. */
	if ((round->gate.scattering || (round->rows && round->rows->agreed)) &&
	    job->state == JOB_RUNNING)
		return;
	round->failure = *failure;
	if (tell && job->distributed && tensor->key && !agent_round_is_untold(round))
		agent_setup_fail_round(job, tensor->key, round->number, round->alone, failure);
	if (round->state == ROUND_MOVING) {
		/* Not finished under our feet. */
		round->n_parts++;
		agent_rows_give_up(round);
		agent_part_drop_queued(round);
		agent_round_part_done(round);
		return;
	}
	job->n_busy -= is_busy(round);
	round->state = ROUND_FAILED;
	if (job->resumption.ledger)
		ledger_forget(job->resumption.ledger, tensor->name, round->number, round->number);
	agent_round_end_requests(round);
	(void)agent_round_forget(round);
	agent_job_let_leave(job);
	agent_round_advance(tensor);
}

bool agent_round_is_failing(struct agent_round *round)
{
	const struct failure *end = &job_of(round)->end.failure;

	if (end->status)
		agent_round_fail(round, end, false);
	return round->failure.status;
}

/* -- Moving ------------------------------------------------------------------------------------------------------- */

bool agent_round_can_begin_part(const struct agent_round *round)
{
	if (round->turn.cut || round->failure.status || job_of(round)->resumption.suspended)
		return false;
	if (round->ledger.ledger && !round->gate.on &&
	    !ledger_round_reaches(&round->ledger, round->n_cut))
		return false;
	return !agent_round_is_full(round) && agent_schedule_has_window(round);
}

/* A part of a local round took no time: of many the rest are made in a later turn. Returns whether that is so. */
static bool is_enough(struct agent_round *round, unsigned *n_over)
{
	if (job_of(round)->distributed || ++*n_over < OVER_MAX)
		return false;
	agent_later_round(round);
	return true;
}

void agent_round_refill(struct agent_round *round)
{
	bool distributed = job_of(round)->distributed;
	unsigned n_over = 0, n_parts;
	struct failure failure;
	struct extent extent;
	uint64_t number;
	int r;

	if (round->turn.goes_on)
		return;
	round->turn.goes_on = true;
	round->inlined = 0;
	round->n_parts++;
	while (agent_round_can_begin_part(round)) {
		if (round->rows ? !agent_rows_next(round->rows, &extent)
				: !partition_next(&round->partition, &extent)) {
			agent_schedule_cut(round);
			continue;
		}
		n_parts = round->n_parts;
		r = 0;
		if (extent.len || distributed) {
			number = round->n_cut++;
			if (round->ledger.ledger && ledger_round_has(&round->ledger, number))
				round->gate.uninformed = true;
			else
				r = agent_part_start(round, &extent, number);
		}
		if (r) {
			agent_round_describe(round, &failure, r, "%s",
					     r == -EPROTO ? "its ledger is damaged" : strerror(-r));
			agent_round_fail(round, &failure, true);
		} else if (round->n_parts == n_parts && is_enough(round, &n_over)) {
			return;
		}
	}
	round->turn.goes_on = false;
	agent_round_part_done(round);
}

/*
 * Of a gated round that is committed: each part's result goes into the outputs and, once those of all are there, each part ends.
 * Some in a turn of the loop.
 */
static void scatter_some(struct agent_round *round)
{
	struct agent_part *part;
	unsigned n = 0;

	while ((part = list_first(&round->parts, struct agent_part, link)) &&
	       (part->state == PART_HELD ||
		(part->state == PART_SCATTERED && round->n_scattered == round->n_made))) {
		if (n++ == SCATTER_MAX) {
			agent_later_round(round);
			return;
		}
		if (part->state == PART_SCATTERED) {
			agent_part_end(part);
			continue;
		}
		list_remove(&part->link);
		list_push_back(&round->parts, &part->link);
		round->n_held--;
		agent_part_scatter(part);
	}
	round->turn.goes_on = false;
	agent_round_part_done(round);
}

void agent_round_scatter(struct agent_round *round)
{
	if (round->turn.goes_on)
		return;
	round->turn.goes_on = true;
	round->n_parts++;
	scatter_some(round);
}

void agent_round_go_on(struct agent_round *round)
{
	if (round->partition.operation == OPERATION_PUSH_PULL_ROWS) {
		agent_rows_go_on(round);
		return;
	}
	if (round->gate.scattering) {
		/* The next process does it. */
		if (!job_of(round)->resumption.suspended)
			scatter_some(round);
		return;
	}
	round->turn.goes_on = false;
	round->n_parts--;
	agent_round_refill(round);
}

void agent_round_part_done(struct agent_round *round)
{
	round->n_parts--;
	if (job_of(round)->resumption.suspended)
		return;
	if (!round->turn.cut && !round->failure.status) {
		if (job_of(round)->distributed && !agent_round_is_full(round))
			agent_schedule_add(round);
		/* Not for each single one. */
		if (round->n_parts - round->n_held <= ROUND_PARTS_MAX / 2 &&
		    agent_round_can_begin_part(round))
			agent_round_refill(round);
	} else if (round->n_held && round->n_held == round->n_made && !round->failure.status) {
		agent_round_commit(round);
	} else if (round->rows ? !agent_rows_continue(round) && !round->n_parts : !round->n_parts) {
		round_finish(round);
	}
}

void agent_round_held(struct agent_round *round)
{
	round->n_held++;
	/* As if it were done: another may begin. */
	round->n_parts++;
	agent_round_part_done(round);
}

void agent_round_commit(struct agent_round *round)
{
	if (round->gate.scattering || round->turn.goes_on)
		return;
	round->gate.committed = round->gate.scattering = true;
	ledger_round_set_stage(&round->ledger, LEDGER_COMMITTED, round->n_gone);
	FAILPOINT("round-committed");
	agent_round_scatter(round);
}

void agent_round_exclude(struct agent_job *job, uint32_t index)
{
	struct agent_round *round;

	list_for_each (round, &job->schedule.moving, moving_link) {
		if (!round->gate.on || round->gate.committed || !round->ranks[index].in)
			continue;
		round->ranks[index].in = false;
		round->n_in--;
	}
}

void agent_round_prolong(struct agent_job *job)
{
	uint64_t deadline_ns = clock_now_ns() + job->request_timeout_ns + SERVER_GRACE_NS;
	struct agent_round *round;

	list_for_each (round, &job->schedule.moving, moving_link)
		if (round->times.deadline_ns != CLOCK_NEVER)
			round->times.deadline_ns = MAX(round->times.deadline_ns, deadline_ns);
}

/*
 * Whether it could not be done again from the start, as its results overwrite inputs: where they do at all, an output
 * begins inside the same rank's input. The sum of one rank's is the same however often it is taken.
 */
static bool overwrites_inputs(const struct agent_round *round)
{
	if (agent_round_n_local(round) == 1)
		return false;
	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		const struct agent_request *request = round->ranks[i].request;
		const char *input = request ? request->input : NULL;
		const char *output = request ? request->output : NULL;

		if (input && output && output >= input &&
		    output < input + agent_check_input_len(round->tensor, request))
			return true;
	}
	return false;
}

static uint32_t first_rank(const struct agent_round *round)
{
	uint32_t i = 0;

	while (!round->ranks[i].request)
		i++;
	return job_of(round)->layout.rank_of_local[i];
}

/* Before its first part touches an output. Returns 0, or as ledger_round_begin(). */
static int round_record(struct agent_round *round, struct failure *failure)
{
	const struct agent_tensor *tensor = round->tensor;
	const struct agent_request *first = agent_round_first(round);
	struct agent_job *job = tensor->job;
	struct ledger_facts facts = {
		.tensor = tensor->name,
		.round = round->number,
		.elements = agent_check_elements(tensor, first_rank(round), first),
		.counts = first->operation == OPERATION_REDUCE_SCATTER ? first->counts : NULL,
		.dtype = tensor->dtype,
		.operation = first->operation,
		.reduction = first->reduction,
		.root = first->root,
		.n_came = job->shape.elastic && !job->distributed ? round->n_in : 0,
	};

	if (!job->resumption.ledger)
		return 0;
	ledger_begin(job->resumption.ledger);
	/* All ranks are past these. */
	ledger_forget(job->resumption.ledger, tensor->name, 0, round->number - 1);
	if (job->retention.keeps)
		agent_keep_settle(round->tensor, round->number - 1);
	if (first->operation == OPERATION_PUSH_PULL_ROWS || round->on_device)
		return 0;
	/* Through servers each result is asked for once. */
	if (!job->retention.keeps && !agent_resume_moves(tensor, round->number) &&
	    (!first->reduction || !overwrites_inputs(round)))
		return 0;
	return ledger_round_begin(job->resumption.ledger, &round->ledger, &facts, failure);
}

uint32_t agent_round_scale(const struct agent_round *round)
{
	const struct agent_job *job = job_of(round);
	uint32_t scale = reduce_scale(job->layout.n_most);

	if (scale == 1 || agent_round_first(round)->reduction != REDUCTION_AVERAGE ||
	    round->tensor->dtype != DTYPE_FLOAT16 || !job->distributed)
		return 0;
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (!job->fleet.servers[i].scales)
			return 0;
	return scale;
}

/* Of an elastic job over nodes: whether it is done as a whole, which takes memory for all its results. */
static bool is_gated(const struct agent_round *round)
{
	const struct agent_job *job = job_of(round);
	unsigned operation = agent_round_first(round)->operation;

	return job->shape.elastic && job->distributed && job->resumption.ledger &&
	       !round->on_device &&
	       (operation == OPERATION_PUSH_PULL || operation == OPERATION_REDUCE_SCATTER);
}

/* Whose blocks are whose, the ranks in the job say when it is submitted: servers compare how many were gone. */
static uint32_t root_of(const struct agent_round *round)
{
	const struct agent_request *first = agent_round_first(round);

	return first->operation == OPERATION_ALL_GATHER ||
			       first->operation == OPERATION_REDUCE_SCATTER
		       ? round->n_gone_said
		       : first->root;
}

static int check_quota(const struct agent_round *round, struct failure *failure)
{
	struct agent_job *job = job_of(round);
	const struct agent_request *first = agent_round_first(round);
	bool by_blocks = first->operation == OPERATION_REDUCE_SCATTER;
	uint64_t elements = by_blocks
				    ? first->input_count
				    : agent_check_elements(round->tensor, first_rank(round), first);
	uint64_t bytes = elements * dtype_size(round->tensor->dtype);
	/* Each block has an end of its own, and be it empty. */
	uint64_t n = bytes / job->part_bytes +
		     (by_blocks ? job->shape.size : !!(bytes % job->part_bytes));
	uint32_t n_results = ledger_n_results(job->resumption.ledger);

	if (n <= n_results && agent_quota_for(job, (uint32_t)n))
		return failure_set(
			failure, -EDQUOT,
			"it has %" PRIu64 " parts of %u bytes, which an elastic job over "
			"several nodes holds at once, and a trainer's session_quota has no "
			"room for them",
			n, job->part_bytes);
	if (n <= n_results)
		return 0;
	return failure_set(failure, -EMSGSIZE,
			   "it has %" PRIu64 " parts of %u bytes, and of one %s an elastic "
			   "job over several nodes holds at most %u: give the job a larger "
			   "part_size, or cut the tensor",
			   n, job->part_bytes, operation_name(first->operation), n_results);
}

static void round_start(struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;
	struct partition_rank *ranks = (struct partition_rank *)&round->ranks[job->layout.n_local];
	const struct agent_request *first = agent_round_first(round);
	struct failure failure, words;

	round->n_in = 0;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		round->n_in += round->ranks[i].in = round->ranks[i].request;
	if ((is_gated(round) && check_quota(round, &words)) || round_record(round, &words)) {
		agent_round_describe(round, &failure, words.status, "%s", words.text);
		agent_round_fail(round, &failure, true);
		return;
	}
	round->state = ROUND_MOVING;
	list_push_back(&job->schedule.moving, &round->moving_link);
	round->gate.on = is_gated(round);
	round->gate.committed = round->gate.on && round->ledger.stage != LEDGER_GATHERS;
	round->n_gone = round->ledger.n_gone;
	round->turn.sequence = job->agent->n_rounds_started++;
	round->reduction = (uint8_t)first->reduction;
	round->scale = (uint16_t)agent_round_scale(round);
	round->n_contributions = job->distributed ? job->shape.size : round->n_in;
	round->counted = round->gate.uninformed = round->widens = false;
	round->partition = (struct partition){
		.layout = &job->layout,
		.operation = first->operation,
		.element_size = dtype_size(tensor->dtype),
		.part_bytes = job->part_bytes,
		.elements = agent_check_elements(tensor, first_rank(round), first),
		.counts = first->operation == OPERATION_ALL_GATHER && round->counts ? round->counts
										    : first->counts,
		.ranks = ranks,
		.root = root_of(round),
	};
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct agent_rank *rank = &round->ranks[i];

		/* In an all_to_all it counts nothing. */
		ranks[i].counts = round->counts;
		if (!rank->in)
			continue;
		rank->input = rank->request->input;
		rank->input_dtype = (uint8_t)agent_check_input_dtype(tensor, rank->request);
		round->widens |= rank->input_dtype != tensor->dtype;
		rank->output = rank->request->output;
		rank->input_device = rank->request->input_device;
		rank->output_device = rank->request->output_device;
		ranks[i].counts = rank->request->counts;
	}
	if (round->on_device)
		round->partition.part_bytes = agent_device_part_bytes(
			round, round->partition.elements * round->partition.element_size);
	if (job->distributed) {
		agent_priority_class_set(round,
					 round->partition.elements * round->partition.element_size);
		agent_schedule_add(round);
	}
	if (first->operation == OPERATION_PUSH_PULL_ROWS)
		agent_rows_start(round);
	else
		agent_round_refill(round);
}

/* Whether memory or streams of devices are waited for; when that fails, so has the round. */
static bool device_waits(struct agent_round *round)
{
	struct failure failure, words;
	int r;

	if (!round->on_device)
		return false;
	r = agent_device_ready(round, &words);
	if (r < 0) {
		agent_round_describe(round, &failure, words.status, "%s", words.text);
		agent_round_fail(round, &failure, true);
	}
	return r == DEVICE_E_WAIT;
}

/* Ranks are gone, and the sweep has not come to it. */
static bool is_ended_without(struct agent_round *round)
{
	const struct agent_job *job = round->job;

	return job->sweep.n_without && !job->agent->hooks->round_without_them(round);
}

void agent_round_advance(struct agent_tensor *tensor)
{
	struct agent_round *round;
	unsigned n = 0;

	/* In a job that is left to the next process no round begins, or ends. Nor does one before servers have heard of failed ones. */
	if (tensor->advancing || tensor->telling || tensor->job->resumption.suspended)
		return;
	tensor->advancing = true;
	while ((round = list_first(&tensor->rounds, struct agent_round, link))) {
		if (n++ == ADVANCE_MAX) {
			agent_later_tensor(tensor);
			break;
		}
		if (is_ended_without(round) || agent_round_forget(round))
			continue;
		if (round->state != ROUND_READY || !tensor->key ||
		    tensor->job->end.failure.status || device_waits(round))
			break;
		/* It may have failed on its device. */
		if (round->state == ROUND_READY)
			round_start(round);
	}
	tensor->advancing = false;
}
