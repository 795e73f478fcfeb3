#include "pipeline/round.h"
#include "base/failpoint.h"
#include "pipeline/device.h"
#include "pipeline/part.h"
#include "pipeline/rows.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

/* Longer deadlines are taken as this: no sum of times overflows. */
#define TIMEOUT_MAX_MS (365ull * 24 * 3600 * 1000)

static struct pipeline_job *job_of(const struct pipeline_round *round)
{
	return round->tensor->job;
}

static uint32_t n_local(const struct pipeline_round *round)
{
	return job_of(round)->layout.n_local;
}

static bool is_complete(const struct pipeline_round *round)
{
	return round->n_came == n_local(round);
}

const struct pipeline_request *pipeline_round_first(const struct pipeline_round *round)
{
	for (uint32_t i = 0; i < n_local(round); i++)
		if (round->ranks[i].request)
			return round->ranks[i].request;
	return NULL;
}

/* Words about a round: "tensor NAME, round N: ...". */
_printf_(4, 5) static void describe(const struct pipeline_round *round, struct failure *failure,
				    int status, const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	(void)failure_set(failure, status, "tensor %s, round %" PRIu64 ": %s", round->tensor->name,
			  round->number, text);
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

static int round_new(struct pipeline_tensor *tensor, uint64_t number,
		     struct pipeline_round **ret_round)
{
	struct pipeline_job *job = tensor->job;
	struct pipeline_round *round = list_first(&job->spare_rounds, struct pipeline_round, link);
	size_t ranks = job->layout.n_local *
		       (sizeof(struct pipeline_rank) + sizeof(struct partition_rank));

	if (job->n_open_rounds >= (size_t)job->layout.n_local * ROUNDS_PER_RANK_MAX)
		return error_origin(-EDQUOT);
	if (round) {
		list_remove(&round->link);
		list_fetch_first(&job->spare_rounds, struct pipeline_round, link,
				 offsetof(struct pipeline_round, failure));
		/* All but the words of its failure. */
		memset(round, 0, offsetof(struct pipeline_round, failure));
		memset(round->ranks, 0, ranks);
		round->failure.status = 0;
		round->failure.text[0] = '\0';
	} else {
		round = calloc(1, sizeof(*round) + ranks);
		if (!round)
			return error_origin(-ENOMEM);
	}
	round->tensor = tensor;
	round->number = number;
	round->partition_ranks = (struct partition_rank *)&round->ranks[job->layout.n_local];
	round->priority = INT32_MIN;
	round->deadline_ns = CLOCK_NEVER;
	round->started_ns = clock_now_ns();
	list_init(&round->parts);
	list_init(&round->deal_link);
	list_init(&round->device_link);
	for (uint32_t i = 0; (job->n_out || job->n_gone) && i < job->layout.n_local; i++) {
		round->ranks[i].came = pipeline_elastic_is_out(job, i);
		round->n_came += round->ranks[i].came;
	}
	/* Each rank submits in order: a round that is not open yet is the newest. */
	list_push_back(&tensor->rounds, &round->link);
	list_push_back(&job->rounds, &round->job_link);
	job->n_open_rounds++;
	*ret_round = round;
	return 0;
}

struct pipeline_round *pipeline_round_free(struct pipeline_round *round)
{
	struct pipeline_part *part, *next;

	if (!round)
		return NULL;
	list_for_each_safe (part, next, &round->parts, link) {
		list_remove(&part->link);
		(void)pipeline_part_free(part);
	}
	list_remove(&round->link);
	list_remove(&round->job_link);
	(void)pipeline_rows_free(round->rows);
	free(round->counts);
	free(round);
	return NULL;
}

static void round_unlink(struct pipeline_round *round)
{
	list_remove(&round->link);
	list_remove(&round->job_link);
	pipeline_deal_remove(round);
	list_remove(&round->device_link);
	job_of(round)->n_open_rounds--;
	freep(&round->counts);
}

static void round_recycle(struct pipeline_round *round)
{
	struct pipeline_job *job = job_of(round);

	round_unlink(round);
	list_push_front(&job->spare_rounds, &round->link);
}

static struct pipeline_round *round_find(struct pipeline_tensor *tensor, uint64_t number)
{
	struct pipeline_round *round = list_last(&tensor->rounds, struct pipeline_round, link);

	/* They are in order, and most often it is the next one. */
	if (!round || round->number < number)
		return NULL;
	list_for_each (round, &tensor->rounds, link)
		if (round->number == number)
			return round;
	return NULL;
}

/* -- Ending ------------------------------------------------------------------------------------------------------- */

static void request_end(struct pipeline *pipeline, struct pipeline_request *request,
			const struct failure *failure)
{
	struct failure expired;

	metric_count(&pipeline->requests, 1);
	if (failure)
		metric_count(&pipeline->failed, 1);
	/* To a trainer ETIMEDOUT is a wait of its own that ended; a request that ran out of time says so otherwise. */
	if (failure && failure->status == -ETIMEDOUT) {
		expired = *failure;
		expired.status = -ETIME;
		failure = &expired;
	}
	request->in = NULL;
	freep(&request->expanded);
	request->done(request, failure);
}

static void end_requests(struct pipeline_round *round)
{
	const struct failure *failure = round->failure.status ? &round->failure : NULL;
	struct pipeline *pipeline = job_of(round)->pipeline;
	struct failure no_room;

	for (uint32_t i = 0; i < n_local(round); i++) {
		struct pipeline_request *request = TAKE_PTR(round->ranks[i].request);

		if (request && !failure && !round->rows)
			request->n_rows = round->n_contributions;
		if (request)
			pipeline_elastic_outcome(round, i, request);
		if (request && !failure)
			request_end(pipeline, request,
				    pipeline_rows_verdict(round, request, &no_room));
		else if (request)
			request_end(pipeline, request, failure);
		if (request)
			FAILPOINT("request-ended");
	}
}

/*
 * A round that failed before it moved is remembered until all local ranks have heard of it, and, so that other nodes
 * hear of it too, until its tensor has a key.
 */
static bool round_forget(struct pipeline_round *round)
{
	const struct pipeline_tensor *tensor = round->tensor;

	if (round->state != ROUND_FAILED || !is_complete(round))
		return false;
	if (tensor->job->distributed && !tensor->key && !tensor->failure.status)
		return false;
	round_recycle(round);
	return true;
}

static void round_finish(struct pipeline_round *round)
{
	struct pipeline_tensor *tensor = round->tensor;
	struct pipeline_job *job = tensor->job;

	round_unlink(round);
	if (!round->failure.status) {
		tensor->n_rounds++;
		job->n_rounds++;
	}
	pipeline_resume_finish(round);
	end_requests(round);
	ledger_round_end(&round->ledger);
	if (job->keep)
		pipeline_keep_settle(tensor, round->number);
	round->rows = pipeline_rows_free(round->rows);
	list_push_front(&job->spare_rounds, &round->link);
	pipeline_job_let_leave(job);
	pipeline_round_advance(tensor);
}

void pipeline_round_fail(struct pipeline_round *round, const struct failure *failure, bool tell)
{
	struct pipeline_tensor *tensor = round->tensor;
	struct pipeline_job *job = tensor->job;

	if (round->failure.status)
		return;
	/* It is done for all: what is left is to copy it here. */
	if (round->scattering && job->state == JOB_RUNNING)
		return;
	round->failure = *failure;
	if (tell && job->distributed && tensor->key)
		pipeline_setup_fail_round(job, tensor->key, round->number, round->alone, failure);
	if (round->state == ROUND_MOVING) {
		/* Not finished under our feet. */
		round->n_parts++;
		pipeline_part_drop_queued(round);
		pipeline_round_part_done(round);
		return;
	}
	round->state = ROUND_FAILED;
	if (job->ledger)
		ledger_forget(job->ledger, tensor->name, round->number, round->number);
	end_requests(round);
	(void)round_forget(round);
	pipeline_job_let_leave(job);
	pipeline_round_advance(tensor);
}

/* -- Moving ------------------------------------------------------------------------------------------------------- */

bool pipeline_round_can_begin_part(const struct pipeline_round *round)
{
	/* While it is refilled, that counts as one. */
	unsigned n_parts = round->n_parts - round->refilling - round->n_held;

	if (round->cut || round->failure.status || job_of(round)->suspended)
		return false;
	if (round->ledger.ledger && !round->gated &&
	    !ledger_round_reaches(&round->ledger, round->n_cut))
		return false;
	return n_parts < ROUND_PARTS_MAX && pipeline_deal_has_room(round);
}

void pipeline_round_refill(struct pipeline_round *round)
{
	bool distributed = job_of(round)->distributed;
	struct failure failure;
	struct extent extent;
	uint64_t number;
	int r;

	if (round->refilling)
		return;
	round->refilling = true;
	round->inlined = 0;
	round->n_parts++;
	while (pipeline_round_can_begin_part(round)) {
		if (round->rows ? !pipeline_rows_next(round->rows, &extent)
				: !partition_next(&round->partition, &extent)) {
			pipeline_deal_cut(round);
			continue;
		}
		if (!extent.len && !distributed)
			continue;
		number = round->n_cut++;
		if (round->ledger.ledger && ledger_round_has(&round->ledger, number))
			continue;
		r = pipeline_part_start(round, &extent, number);
		if (!r)
			continue;
		describe(round, &failure, r, "%s",
			 r == -EPROTO ? "its ledger is damaged" : strerror(-r));
		pipeline_round_fail(round, &failure, true);
	}
	round->refilling = false;
	pipeline_round_part_done(round);
}

void pipeline_round_part_done(struct pipeline_round *round)
{
	round->n_parts--;
	if (job_of(round)->suspended)
		return;
	if (!round->cut && !round->failure.status) {
		/* Not for each single one. */
		if (round->n_parts - round->n_held <= ROUND_PARTS_MAX / 2 &&
		    pipeline_round_can_begin_part(round))
			pipeline_round_refill(round);
	} else if (round->n_held && round->n_held == round->n_made && !round->failure.status) {
		pipeline_round_commit(round);
	} else if (!round->n_parts && !pipeline_rows_continue(round)) {
		round_finish(round);
	}
}

void pipeline_round_held(struct pipeline_round *round)
{
	round->n_held++;
	/* As if it were done: another may begin. */
	round->n_parts++;
	pipeline_round_part_done(round);
}

void pipeline_round_commit(struct pipeline_round *round)
{
	struct pipeline_part *part, *next;

	if (round->scattering || round->refilling)
		return;
	round->committed = round->scattering = true;
	round->n_held = 0;
	ledger_round_set_stage(&round->ledger, LEDGER_COMMITTED, round->n_gone);
	FAILPOINT("round-committed");
	round->n_parts++;
	list_for_each_safe (part, next, &round->parts, link)
		pipeline_part_scatter(part);
	pipeline_round_part_done(round);
}

void pipeline_round_exclude(struct pipeline_job *job, uint32_t index)
{
	struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link) {
		if (round->state != ROUND_MOVING || !round->gated || round->committed ||
		    !round->ranks[index].in)
			continue;
		round->ranks[index].in = false;
		round->n_in--;
	}
}

void pipeline_round_prolong(struct pipeline_job *job)
{
	uint64_t deadline_ns = clock_now_ns() + job->request_timeout_ns + SERVER_GRACE_NS;
	struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (round->state == ROUND_MOVING && round->deadline_ns != CLOCK_NEVER)
			round->deadline_ns = MAX(round->deadline_ns, deadline_ns);
}

/*
 * Whether it could not be done again from the start, as its results overwrite inputs: where they do at all, an output
 * begins inside the same rank's input. The sum of one rank's is the same however often it is taken.
 */
static bool overwrites_inputs(const struct pipeline_round *round)
{
	size_t size = dtype_size(round->tensor->dtype);

	if (n_local(round) == 1)
		return false;
	for (uint32_t i = 0; i < n_local(round); i++) {
		const struct pipeline_request *request = round->ranks[i].request;
		const char *input = request ? request->input : NULL;
		const char *output = request ? request->output : NULL;

		if (input && output && output >= input &&
		    output < input + request->input_count * size)
			return true;
	}
	return false;
}

static uint32_t first_rank(const struct pipeline_round *round)
{
	uint32_t i = 0;

	while (!round->ranks[i].request)
		i++;
	return job_of(round)->layout.rank_of_local[i];
}

/* Before its first part touches an output. Returns 0, or as ledger_round_begin(). */
static int round_record(struct pipeline_round *round, struct failure *failure)
{
	const struct pipeline_tensor *tensor = round->tensor;
	const struct pipeline_request *first = pipeline_round_first(round);
	struct pipeline_job *job = tensor->job;
	struct ledger_facts facts = {
		.tensor = tensor->name,
		.round = round->number,
		.elements = pipeline_check_elements(tensor, first_rank(round), first),
		.counts = first->operation == OPERATION_REDUCE_SCATTER ? first->counts : NULL,
		.dtype = tensor->dtype,
		.operation = first->operation,
		.reduction = first->reduction,
		.root = first->root,
		.n_came = job->shape.elastic && !job->distributed ? round->n_in : 0,
	};

	if (!job->ledger)
		return 0;
	ledger_begin(job->ledger);
	/* All ranks are past these. */
	ledger_forget(job->ledger, tensor->name, 0, round->number - 1);
	if (job->keep)
		pipeline_keep_settle(round->tensor, round->number - 1);
	if (first->operation == OPERATION_PUSH_PULL_ROWS || round->on_device)
		return 0;
	/* Through servers each result is asked for once. */
	if (!job->keep && !pipeline_resume_moves(tensor, round->number) &&
	    (!first->reduction || !overwrites_inputs(round)))
		return 0;
	return ledger_round_begin(job->ledger, &round->ledger, &facts, failure);
}

static void round_start(struct pipeline_round *round)
{
	struct pipeline_tensor *tensor = round->tensor;
	struct pipeline_job *job = tensor->job;
	const struct pipeline_request *first = pipeline_round_first(round);
	struct failure failure, words;

	round->n_in = 0;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		round->n_in += round->ranks[i].in = round->ranks[i].request;
	if (round_record(round, &words)) {
		describe(round, &failure, words.status, "%s", words.text);
		pipeline_round_fail(round, &failure, true);
		return;
	}
	round->state = ROUND_MOVING;
	round->gated = job->shape.elastic && job->distributed && round->ledger.ledger &&
		       first->operation == OPERATION_PUSH_PULL;
	round->committed = round->gated && round->ledger.stage != LEDGER_GATHERS;
	round->n_gone = round->ledger.n_gone;
	round->sequence = job->pipeline->n_rounds_started++;
	round->reduction = first->reduction;
	round->n_contributions = job->distributed ? job->shape.size : round->n_in;
	round->counted = false;
	round->partition = (struct partition){
		.layout = &job->layout,
		.operation = first->operation,
		.element_size = dtype_size(tensor->dtype),
		.part_bytes = job->part_bytes,
		.elements = pipeline_check_elements(tensor, first_rank(round), first),
		.counts = first->operation == OPERATION_ALL_GATHER && round->counts ? round->counts
										    : first->counts,
		.ranks = round->partition_ranks,
		.root = first->operation == OPERATION_ALL_GATHER ? round->n_gone_said : first->root,
	};
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct pipeline_rank *rank = &round->ranks[i];

		/* In an all_to_all it counts nothing. */
		round->partition_ranks[i].counts = round->counts;
		if (!rank->in)
			continue;
		rank->input = rank->request->input;
		rank->output = rank->request->output;
		rank->input_device = rank->request->input_device;
		rank->output_device = rank->request->output_device;
		round->partition_ranks[i].counts = rank->request->counts;
	}
	if (job->distributed)
		pipeline_deal_add(round);
	if (first->operation == OPERATION_PUSH_PULL_ROWS)
		pipeline_rows_start(round);
	else
		pipeline_round_refill(round);
}

/* Whether memory or streams of devices are waited for; when that fails, so has the round. */
static bool device_waits(struct pipeline_round *round)
{
	struct failure failure, words;
	int r;

	if (!round->on_device)
		return false;
	r = pipeline_device_ready(round, &words);
	if (r < 0) {
		describe(round, &failure, words.status, "%s", words.text);
		pipeline_round_fail(round, &failure, true);
	}
	return r == DEVICE_E_WAIT;
}

void pipeline_round_advance(struct pipeline_tensor *tensor)
{
	struct pipeline_round *round;

	if (tensor->advancing)
		return;
	tensor->advancing = true;
	while ((round = list_first(&tensor->rounds, struct pipeline_round, link))) {
		if (round_forget(round))
			continue;
		if (round->state != ROUND_READY || !tensor->key || device_waits(round))
			break;
		/* It may have failed on its device. */
		if (round->state == ROUND_READY)
			round_start(round);
	}
	tensor->advancing = false;
}

/* -- Submitting --------------------------------------------------------------------------------------------------- */

/* The earliest deadline of its requests. */
static void add_deadline(struct pipeline_round *round, const struct pipeline_request *request)
{
	struct pipeline_job *job = job_of(round);
	uint64_t deadline_ns = request->deadline_ns;

	/* Once all are here it is the servers that know who is missing, and say so. */
	if (job->distributed && is_complete(round) && !request->own_deadline)
		deadline_ns += SERVER_GRACE_NS;
	if (deadline_ns >= round->deadline_ns)
		return;
	round->deadline_ns = deadline_ns;
	round->timeout_ns = request->own_deadline ? request->timeout_ms * NSEC_PER_MSEC
						  : job->request_timeout_ns;
	pipeline_job_watch(job, deadline_ns);
}

static void round_ready(struct pipeline_round *round)
{
	round->state = ROUND_READY;
	round->on_device = pipeline_device_concerns(round);
	round->deadline_ns = CLOCK_NEVER;
	for (uint32_t i = 0; i < n_local(round); i++)
		if (round->ranks[i].request)
			add_deadline(round, round->ranks[i].request);
	pipeline_round_advance(round->tensor);
}

/* One of several ranks has come. */
static void measure(struct pipeline_round *round, uint32_t index, uint64_t now_ns)
{
	struct pipeline_tensor *tensor = round->tensor;
	struct arrivals *arrivals = tensor->job->arrivals;
	uint64_t before_ns = round->came_ns;

	round->came_ns = now_ns;
	if (!arrivals)
		return;
	if (!before_ns)
		round->started_ns = now_ns;
	arrivals_came(arrivals, index, now_ns - round->started_ns);
	/* A rank that has left a round out, after a restart, was never waited for. */
	if (!is_complete(round) || !before_ns)
		return;
	arrivals_complete(arrivals, index, round->started_ns, before_ns, now_ns);
	tensor->spread_ns = arrivals_average(tensor->spread_ns, now_ns - round->started_ns);
	tensor->n_last[index]++;
}

static void round_came(struct pipeline_round *round, uint32_t index,
		       struct pipeline_request *request)
{
	struct pipeline_job *job = job_of(round);
	uint64_t timeout_ns = job->request_timeout_ns, now_ns = clock_now_ns();

	request->own_deadline = request->timeout_ms;
	request->timeout_ms = MIN(request->timeout_ms, (uint64_t)TIMEOUT_MAX_MS);
	if (request->own_deadline)
		timeout_ns = request->timeout_ms * NSEC_PER_MSEC;
	request->deadline_ns = now_ns + timeout_ns;
	request->in = round;
	round->ranks[index].request = request;
	round->ranks[index].came = true;
	round->alone = request->operation == OPERATION_ACCUMULATE;
	round->n_came++;
	measure(round, index, now_ns);
	round->priority = MAX(round->priority, request->priority);
}

/* All that will come have. Returns 0, or -errno with words. */
static int check_complete(struct pipeline_round *round, struct failure *failure)
{
	int r = pipeline_elastic_check(round, failure);

	return r ? r : pipeline_check_round(round, failure);
}

/* The round, with the request in its place, is looked at as a whole. */
static void round_examine(struct pipeline_round *round, uint32_t rank,
			  const struct pipeline_request *request, const struct failure *invalid)
{
	struct failure failure, words;

	if (invalid && invalid->status == -EREMCHG) {
		describe(round, &failure, invalid->status, "%s", invalid->text);
		pipeline_round_fail(round, &failure, true);
	} else if (invalid) {
		describe(round, &failure, invalid->status, "rank %u: %s", rank, invalid->text);
		pipeline_round_fail(round, &failure, true);
	} else if (pipeline_check_request(round->tensor, rank, request, &words) ||
		   (is_complete(round) && check_complete(round, &words))) {
		describe(round, &failure, words.status, "%s", words.text);
		pipeline_round_fail(round, &failure, true);
	} else if (is_complete(round)) {
		round_ready(round);
	} else {
		add_deadline(round, request);
	}
}

/* Nothing will ever come of it: the ranks disagree about the tensor, or one of them has left. */
static const struct failure *hopeless(const struct pipeline_tensor *tensor)
{
	if (tensor->job->has_left.status)
		return &tensor->job->has_left;
	return tensor->failure.status ? &tensor->failure : NULL;
}

/* A round cannot be remembered: the others would wait for what nobody knows of. */
static void round_refused(struct pipeline_tensor *tensor, struct pipeline_request *request,
			  int status)
{
	const struct pipeline_round *first =
		list_first(&tensor->rounds, struct pipeline_round, link);
	struct pipeline_job *job = tensor->job;
	struct pipeline_ranks_text behind = { 0 };
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s: %s", tensor->name, strerror(-status));
	for (uint32_t i = 0; first && i < job->layout.n_local; i++)
		if (!first->ranks[i].came)
			pipeline_ranks_add(&behind, job->layout.rank_of_local[i]);
	if (status == -EDQUOT && behind.n)
		(void)failure_set(&failure, status,
				  "tensor %s, round %" PRIu64 ": %s did not submit it, and %zu "
				  "rounds of the job wait for some rank",
				  tensor->name, first->number, pipeline_ranks_end(&behind),
				  job->n_open_rounds);
	request_end(job->pipeline, request, &failure);
	pipeline_job_fail(job, &failure, NULL);
}

static void round_out_of_order(struct pipeline_declaration *declaration,
			       struct pipeline_request *request)
{
	struct failure failure;

	(void)failure_set(&failure, -EPROTO,
			  "rank %u submitted round %" PRIu64
			  " of tensor %s, but its next is %" PRIu64,
			  declaration->member->rank, request->round, declaration->tensor->name,
			  declaration->n_rounds + 1);
	request_end(declaration->tensor->job->pipeline, request, &failure);
	pipeline_job_fail(declaration->tensor->job, &failure, NULL);
}

/*
 * After a restart, rounds that a rank leaves out had ended for it before, and not well: so they end for the others.
 * Returns 0; -EPROTO; or what round_new() returns.
 */
static int leave_out(struct pipeline_declaration *declaration, uint64_t until)
{
	struct pipeline_tensor *tensor = declaration->tensor;
	struct pipeline_round *round;
	struct failure failure;
	int r;

	if (until <= declaration->n_rounds)
		return error_origin(-EPROTO);
	if (until - declaration->n_rounds > 1 &&
	    (!declaration->member->resumed || until - declaration->n_rounds > ROUNDS_PER_RANK_MAX))
		return error_origin(-EPROTO);
	while (declaration->n_rounds + 1 < until) {
		uint64_t number = ++declaration->n_rounds;

		if (number <= tensor->past_rounds || hopeless(tensor))
			continue;
		round = round_find(tensor, number);
		r = round ? 0 : round_new(tensor, number, &round);
		if (r)
			return error_trace(r);
		round->ranks[declaration->member->index].came = true;
		round->n_came++;
		describe(round, &failure, -ECONNRESET,
			 "it had failed on rank %u before the daemon restarted",
			 declaration->member->rank);
		if (round->state == ROUND_FAILED)
			(void)round_forget(round);
		else
			pipeline_round_fail(round, &failure, true);
	}
	tensor->reached[declaration->member->index] = ++declaration->n_rounds;
	return 0;
}

/* One that had ended before a restart, for another rank. */
static void request_settle(struct pipeline_tensor *tensor, struct pipeline_request *request)
{
	struct failure failure = { 0 };

	pipeline_resume_outcome(tensor, request, &failure);
	request_end(tensor->job->pipeline, request, failure.status ? &failure : NULL);
}

void pipeline_round_settle(struct pipeline_tensor *tensor)
{
	struct pipeline_round *round;

	/* They are in order. Who ended them does not submit them again, so none moves. */
	while ((round = list_first(&tensor->rounds, struct pipeline_round, link)) &&
	       round->number <= tensor->past_rounds) {
		for (uint32_t i = 0; i < n_local(round); i++) {
			struct pipeline_request *request = TAKE_PTR(round->ranks[i].request);

			if (request)
				request_settle(tensor, request);
		}
		round_recycle(round);
	}
	pipeline_job_let_leave(tensor->job);
}

void pipeline_fetch(const struct pipeline_declaration *declaration)
{
	struct pipeline_tensor *tensor = declaration->tensor;

	__builtin_prefetch(&declaration->n_rounds, 1);
	__builtin_prefetch(&tensor->job);
	__builtin_prefetch(&tensor->failure.status);
	__builtin_prefetch(&tensor->rounds, 1);
	__builtin_prefetch(&tensor->reached);
}

void pipeline_submit(struct pipeline_declaration *declaration, struct pipeline_request *request,
		     const struct failure *invalid)
{
	struct pipeline_tensor *tensor = declaration->tensor;
	struct pipeline_job *job = tensor->job;
	uint32_t index = declaration->member->index;
	struct pipeline_round *round;
	struct failure words;
	int r;

	r = leave_out(declaration, request->round);
	if (r == -EPROTO) {
		round_out_of_order(declaration, request);
		return;
	}
	if (r) {
		round_refused(tensor, request, r);
		return;
	}
	if (request->round <= tensor->past_rounds) {
		request_settle(tensor, request);
		pipeline_job_let_leave(job);
		return;
	}
	if (hopeless(tensor) && !pipeline_resume_moves(tensor, request->round)) {
		if (job->distributed && tensor->key)
			pipeline_setup_fail_round(job, tensor->key, request->round,
						  request->operation == OPERATION_ACCUMULATE,
						  hopeless(tensor));
		request_end(job->pipeline, request, hopeless(tensor));
		return;
	}
	round = round_find(tensor, request->round);
	r = round ? 0 : round_new(tensor, request->round, &round);
	if (r) {
		round_refused(tensor, request, r);
		return;
	}

	round_came(round, index, request);
	if (pipeline_elastic_submit(tensor, index, request, &words) && !invalid)
		invalid = &words;
	if (round->state == ROUND_FAILED) {
		end_requests(round);
		if (round_forget(round))
			pipeline_round_advance(tensor);
		return;
	}
	round_examine(round, declaration->member->rank, request, invalid);
}

/* -- Going on without a rank --------------------------------------------------------------------------------------- */

/* An open round for which this rank counts, and whose contribution can still be kept out. */
static struct pipeline_round *find_counting(const struct pipeline_job *job, uint32_t index)
{
	struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (round->state != ROUND_MOVING &&
		    (!round->ranks[index].came || round->ranks[index].request))
			return round;
	return NULL;
}

static void round_without(struct pipeline_round *round, uint32_t index, const struct failure *why)
{
	struct pipeline_request *request = TAKE_PTR(round->ranks[index].request);
	struct pipeline_tensor *tensor = round->tensor;
	struct failure failure, words;

	if (!round->ranks[index].came)
		round->n_came++;
	round->ranks[index].came = true;
	if (request) {
		pipeline_elastic_outcome(round, index, request);
		request_end(tensor->job->pipeline, request, why);
	}
	if (round->state == ROUND_FAILED) {
		if (round_forget(round))
			pipeline_round_advance(tensor);
	} else if (!is_complete(round)) {
		return;
	} else if (!pipeline_round_first(round)) {
		pipeline_round_fail(round, why, true);
	} else if (check_complete(round, &words)) {
		describe(round, &failure, words.status, "%s", words.text);
		pipeline_round_fail(round, &failure, true);
	} else {
		round_ready(round);
	}
}

void pipeline_round_without(struct pipeline_job *job, uint32_t index, const struct failure *failure)
{
	struct pipeline_round *round;

	/* From the start after each: one that ends may take others along. */
	while (job->state == JOB_RUNNING && (round = find_counting(job, index)))
		round_without(round, index, failure);
}

/* -- Giving up ---------------------------------------------------------------------------------------------------- */

void pipeline_cancel(struct pipeline_request *request)
{
	struct pipeline_round *round = request->in;
	struct failure failure;

	if (!round || round->failure.status || round->state == ROUND_MOVING ||
	    pipeline_resume_moves(round->tensor, round->number))
		return;
	for (uint32_t i = 0; i < n_local(round); i++) {
		if (round->ranks[i].request != request)
			continue;
		describe(round, &failure, -ECANCELED, "rank %u cancelled it",
			 job_of(round)->layout.rank_of_local[i]);
		pipeline_round_fail(round, &failure, true);
		return;
	}
}

/* Servers that owe answers. */
static void name_servers(const struct pipeline_round *round, char *text, size_t size)
{
	const struct pipeline_job *job = job_of(round);
	const struct pipeline_part *part;
	size_t len = 0;

	text[0] = 0;
	for (size_t i = 0; i < job->n_servers; i++) {
		bool owes = false;

		list_for_each (part, &round->parts, link)
			owes |= part->remote && part->server == i &&
				(part->state == PART_CALL || list_linked(&part->wait));
		if (owes && len < size)
			len += (size_t)snprintf(text + len, size - len, "%s%s", len ? ", " : "",
						pipeline_server_name(job, i));
	}
}

static void describe_expiry(const struct pipeline_round *round, struct failure *failure)
{
	const struct pipeline_tensor *tensor = round->tensor;
	const struct layout *layout = &tensor->job->layout;
	struct pipeline_ranks_text missing = { 0 }, undeclared = { 0 };
	char time[32], servers[256];

	(void)pipeline_time_text(time, round->timeout_ns);
	for (uint32_t i = 0; i < layout->n_local; i++) {
		if (!round->ranks[i].came)
			pipeline_ranks_add(tensor->declared[i] ? &missing : &undeclared,
					   layout->rank_of_local[i]);
	}
	if (missing.n || undeclared.n) {
		const char *who = missing.n ? pipeline_ranks_end(&missing) : "";
		const char *others = undeclared.n ? pipeline_ranks_end(&undeclared) : "";

		describe(round, failure, -ETIME, "%s%s%s%s%s within %s", who,
			 missing.n ? " did not submit it" : "",
			 missing.n && undeclared.n ? ", " : "", others,
			 undeclared.n ? " did not declare the tensor" : "", time);
		return;
	}
	if (!tensor->key) {
		describe(round, failure, -ETIME, "other nodes did not declare the tensor within %s",
			 time);
		return;
	}
	pipeline_device_waiting_for(round, servers, sizeof(servers));
	if (servers[0]) {
		describe(round, failure, -ETIME, "%s within %s", servers, time);
		return;
	}
	name_servers(round, servers, sizeof(servers));
	describe(round, failure, -ETIME, "no result within %s%s%s", time,
		 servers[0] ? " from " : "", servers);
}

/* An elastic job goes on without those who did not come. Returns whether there were any. */
static bool drop_late(const struct pipeline_round *round, const struct failure *failure)
{
	struct pipeline_job *job = job_of(round);
	bool dropped = false;

	if (!job->shape.elastic || round->state != ROUND_GATHERING)
		return false;
	/* The round may end with the first. */
	for (uint32_t i = 0, n = n_local(round); i < n && job->state == JOB_RUNNING; i++) {
		if (round->ranks[i].came || pipeline_elastic_is_out(job, i))
			continue;
		dropped = true;
		pipeline_elastic_drop_late(job, i, failure);
		break;
	}
	return dropped;
}

uint64_t pipeline_round_expire(struct pipeline_job *job, uint64_t now_ns)
{
	struct pipeline_round *round, *expired;
	struct failure failure;
	uint64_t next_ns;

	/* From the start after each: one that ends may take others along. */
	do {
		expired = NULL;
		next_ns = CLOCK_NEVER;
		list_for_each (round, &job->rounds, job_link) {
			if (round->failure.status)
				continue;
			/* Sums and copies on this node need no deadline. */
			if (round->state == ROUND_MOVING &&
			    (!job->distributed || round->scattering))
				continue;
			if (round->deadline_ns <= now_ns) {
				expired = round;
				break;
			}
			next_ns = MIN(next_ns, round->deadline_ns);
		}
		if (!expired)
			break;
		describe_expiry(expired, &failure);
		if (!drop_late(expired, &failure))
			pipeline_round_fail(expired, &failure, true);
	} while (job->state == JOB_RUNNING);
	return next_ns;
}

void pipeline_round_leave(struct pipeline_job *job, const struct failure *failure)
{
	struct pipeline_round *round, *open;

	do {
		open = NULL;
		list_for_each (round, &job->rounds, job_link) {
			/* What moves on this node alone is over in a moment, and well. */
			if (round->failure.status ||
			    (round->state == ROUND_MOVING && !job->distributed) ||
			    pipeline_resume_moves(round->tensor, round->number))
				continue;
			open = round;
			break;
		}
		if (open)
			pipeline_round_fail(open, failure, true);
	} while (open);
}

bool pipeline_round_pending(const struct pipeline_job *job, uint32_t index)
{
	const struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (round->ranks[index].request)
			return true;
	return false;
}
