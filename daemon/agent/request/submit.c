/*
 * Local ranks submit rounds: the first makes one, each brings its request, and with the last, or without those that will
 * not come, it is looked at as a whole and is ready. agent_submit() is agent.h's, for control/; resume.c settles
 * what had ended before a restart, elastic.c goes on without a rank.
 */
#include "agent/round/device.h"
#include "agent/round/round.h"
#include <inttypes.h>

/* Requests of a round that are fetched ahead. */
#define FETCHED_REQUESTS 4u
/* Longer deadlines are taken as this: no sum of times overflows. */
#define TIMEOUT_MAX_MS (365ull * 24 * 3600 * 1000)
/* Ranks whose spread is at most this are waited for awake, so much longer than it: a few wake-ups of a thread. */
#define EXPECT_MAX_NS  (50 * NSEC_PER_USEC)
#define EXPECT_MORE_NS (20 * NSEC_PER_USEC)

/* Rounds that a request leaves out are ended so many at a time. */
#define LEAVE_OUT_STEP 16
/* Where more are open, the sweep comes to those that had ended before a restart. */
#define SETTLE_NOW 64

static struct agent_job *job_of(const struct agent_round *round)
{
	return round->job;
}

/* The next one that is made is likely this. */
static _fetches_ void fetch_next(const struct agent_job *job, size_t ranks)
{
	const struct agent_round *next =
		container_of(job->memory.spare_rounds.next, struct agent_round, link);

	fetch_to_write(next, offsetof(struct agent_round, failure.text) + 1);
	fetch_to_write(next->ranks, ranks);
}

static int round_new(struct agent_tensor *tensor, uint64_t number, uint64_t now_ns,
		     struct agent_round **ret_round)
{
	struct agent_job *job = tensor->job;
	struct agent_round *round = list_first(&job->memory.spare_rounds, struct agent_round, link);
	size_t ranks =
		job->layout.n_local * (sizeof(struct agent_rank) + sizeof(struct partition_rank));

	if (job->n_open_rounds >= (size_t)job->layout.n_local * ROUNDS_PER_RANK_MAX)
		return error_origin(-EDQUOT);
	if (round) {
		list_remove(&round->link);
		fetch_next(job, ranks);
		/* All but the words of its failure. */
		memset(round, 0, offsetof(struct agent_round, failure));
		memset(round->ranks, 0, ranks);
		round->failure.status = 0;
		round->failure.text[0] = '\0';
	} else {
		round = bulk_take(&job->memory.bulk, sizeof(*round) + ranks);
		if (!round)
			return error_origin(errno == EDQUOT ? -ENOBUFS : -errno);
	}
	round->tensor = tensor;
	round->job = job;
	round->number = number;
	round->turn.priority = INT32_MIN;
	round->times.deadline_ns = CLOCK_NEVER;
	round->times.started_ns = now_ns;
	list_init(&round->parts);
	for (uint32_t i = 0;
	     (job->membership.n_out || job->membership.n_gone) && i < job->layout.n_local; i++) {
		round->ranks[i].came = agent_elastic_is_out(job, i);
		round->n_came += round->ranks[i].came;
	}
	/* Each rank submits in order: a round that is not open yet is the newest. */
	list_push_back(&tensor->rounds, &round->link);
	list_push_back(&job->rounds, &round->job_link);
	job->n_open_rounds++;
	*ret_round = round;
	return 0;
}

/* The next round of a rank is behind that which it came to last; if that has gone, few that it came to are left. */
static struct agent_round *round_find(const struct agent_declaration *declaration, uint64_t number)
{
	struct agent_tensor *tensor = declaration->tensor;
	struct agent_round *round = list_last(&tensor->rounds, struct agent_round, link);
	struct agent_round *newest = declaration->newest;

	/* They are in order, and most often it is the next one. */
	if (!round || round->number < number)
		return NULL;
	if (round->number == number)
		return round;
	/* The memory of one that has gone is another round's of the job, or spare. */
	round = newest && newest->tensor == tensor && newest->number < number &&
				list_linked(&newest->job_link)
			? newest
			: list_first(&tensor->rounds, struct agent_round, link);
	while (round->number < number)
		round = container_of(round->link.next, struct agent_round, link);
	return round->number == number ? round : NULL;
}

/* -- Submitting --------------------------------------------------------------------------------------------------- */

/* The earliest deadline of its requests. */
static void add_deadline(struct agent_round *round, const struct agent_request *request)
{
	struct agent_job *job = job_of(round);
	uint64_t deadline_ns = request->deadline_ns;

	/* Once all are here it is the servers that know who is missing, and say so. */
	if (job->distributed && agent_round_is_complete(round) && !request->own_deadline)
		deadline_ns += SERVER_GRACE_NS;
	if (deadline_ns >= round->times.deadline_ns)
		return;
	round->times.deadline_ns = deadline_ns;
	round->times.timeout_ns = request->own_deadline ? request->timeout_ms * NSEC_PER_MSEC
							: job->request_timeout_ns;
	agent_job_watch(job, deadline_ns);
}

static void round_ready(struct agent_round *round)
{
	job_of(round)->n_busy += round->state != ROUND_READY;
	round->state = ROUND_READY;
	/* The rank may have left whose memory on a device the round waited for. */
	if (round->on_device)
		list_remove(&round->device_link);
	round->on_device = agent_round_concerns_device(round);
	round->turn.stalls = false;
	round->times.deadline_ns = CLOCK_NEVER;
	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		const struct agent_request *request = round->ranks[i].request;

		if (!request)
			continue;
		round->turn.stalls |= request->stalls;
		add_deadline(round, request);
	}
	agent_round_advance(round->tensor);
}

/* Where the others have been coming soon after, a sleep would not be worth its wake-up. */
static void expect_others(const struct agent_round *round, uint64_t now_ns)
{
	uint64_t spread_ns = round->tensor->spread_ns;

	if (!agent_round_is_complete(round) && spread_ns <= EXPECT_MAX_NS)
		(void)loop_linger(job_of(round)->agent->params.loop, now_ns,
				  spread_ns + EXPECT_MORE_NS);
}

/* One of several ranks has come. */
static void measure(struct agent_round *round, uint32_t index, uint64_t now_ns)
{
	struct agent_tensor *tensor = round->tensor;
	struct arrivals *arrivals = tensor->job->arrivals;
	uint64_t before_ns = round->times.came_ns;

	round->times.came_ns = now_ns;
	if (!arrivals)
		return;
	if (!before_ns)
		round->times.started_ns = now_ns;
	expect_others(round, now_ns);
	arrivals_came(arrivals, index, now_ns - round->times.started_ns);
	/* A rank that has left a round out, after a restart, was never waited for. */
	if (!agent_round_is_complete(round) || !before_ns)
		return;
	arrivals_complete(arrivals, index, round->times.started_ns, before_ns, now_ns);
	tensor->spread_ns = arrivals_average(tensor->spread_ns, now_ns - round->times.started_ns);
	tensor->n_last[index]++;
}

static void round_came(struct agent_round *round, uint32_t index, uint64_t now_ns,
		       struct agent_request *request)
{
	struct agent_job *job = job_of(round);
	uint64_t timeout_ns = job->request_timeout_ns;

	request->own_deadline = request->timeout_ms;
	request->timeout_ms = MIN(request->timeout_ms, (uint64_t)TIMEOUT_MAX_MS);
	if (request->own_deadline)
		timeout_ns = request->timeout_ms * NSEC_PER_MSEC;
	request->deadline_ns = now_ns + timeout_ns;
	request->in = round;
	round->ranks[index].request = request;
	job->n_pending[index]++;
	round->ranks[index].came = true;
	round->slot_memory = request->slot_memory;
	round->alone = request->operation == OPERATION_ACCUMULATE;
	round->n_came++;
	measure(round, index, now_ns);
	round->turn.priority = MAX(round->turn.priority, request->priority);
}

/* All that will come have. Returns 0, or -errno with words. */
static int check_complete(struct agent_round *round, struct failure *failure)
{
	int r = agent_elastic_check(round, failure);

	return r ? r : agent_check_round(round, failure);
}

/* The round, with the request in its place, is looked at as a whole. */
static void round_examine(struct agent_round *round, uint32_t index,
			  const struct agent_request *request, const struct failure *invalid)
{
	uint32_t rank = round->job->layout.rank_of_local[index];
	struct failure failure, words;

	if (invalid && invalid->status == -EREMCHG) {
		agent_round_describe(round, &failure, invalid->status, "%s", invalid->text);
		agent_round_fail(round, &failure, true);
	} else if (invalid) {
		agent_round_describe(round, &failure, invalid->status, "rank %u: %s", rank,
				     invalid->text);
		agent_round_fail(round, &failure, true);
	} else if (agent_check_request(round->tensor, rank, request, &words) ||
		   (request->operation == OPERATION_ALL_TO_ALL &&
		    agent_check_pairs(round, index, &words)) ||
		   (agent_round_is_complete(round) && check_complete(round, &words))) {
		agent_round_describe(round, &failure, words.status, "%s", words.text);
		agent_round_fail(round, &failure, true);
	} else if (agent_round_is_complete(round)) {
		round_ready(round);
	} else {
		add_deadline(round, request);
	}
}

/*
 * Nothing will ever come of it: the ranks disagree about the tensor, or one of them has left,
 * perhaps as ranks differ in the operation with this ordinal.
 */
static const struct failure *hopeless(const struct agent_tensor *tensor, uint64_t ordinal)
{
	struct agent_job *job = tensor->job;

	if (job->departed.failure.status)
		return ordinals_differing(&job->order.ordinals, ordinal) ?: &job->departed.failure;
	return tensor->failure.status ? &tensor->failure : NULL;
}

/* A round cannot be remembered: the others would wait for what nobody knows of. status -ENOBUFS: its user may have no more memory. */
static void round_refused(struct agent_tensor *tensor, struct agent_request *request, int status)
{
	const struct agent_round *first = list_first(&tensor->rounds, struct agent_round, link);
	struct agent_job *job = tensor->job;
	struct agent_ranks_text behind = { 0 };
	struct failure failure;

	if (status == -ENOBUFS)
		(void)agent_job_no_memory(job, EDQUOT, &failure);
	else
		(void)failure_set(&failure, status, "tensor %s: %s", tensor->name,
				  strerror(-status));
	for (uint32_t i = 0; first && i < job->layout.n_local; i++)
		if (!first->ranks[i].came)
			agent_ranks_add(&behind, job->layout.rank_of_local[i]);
	if (status == -EDQUOT && behind.n)
		(void)failure_set(&failure, status,
				  "tensor %s, round %" PRIu64 ": %s did not submit it, and %zu "
				  "rounds of the job wait for some rank",
				  tensor->name, first->number, agent_ranks_end(&behind),
				  job->n_open_rounds);
	agent_request_end(job->agent, request, &failure);
	agent_job_fail(job, &failure, NULL);
}

static void round_out_of_order(struct agent_declaration *declaration, struct agent_request *request)
{
	struct failure failure;

	(void)failure_set(&failure, -EPROTO,
			  "rank %u submitted round %" PRIu64
			  " of tensor %s, but its next is %" PRIu64,
			  declaration->member->rank, request->round, declaration->tensor->name,
			  declaration->n_rounds + 1);
	agent_request_end(declaration->tensor->job->agent, request, &failure);
	agent_job_fail(declaration->tensor->job, &failure, NULL);
}

static bool may_be_next(const struct agent_declaration *declaration, uint64_t round)
{
	uint64_t n = round - declaration->n_rounds;

	return n == 1 || (declaration->member->resumed && n && n <= ROUNDS_PER_RANK_MAX);
}

/*
 * After a restart, rounds that a rank leaves out had ended for it before, and not well: so they end for the others.
 * Returns 0, or what round_new() returns.
 */
static int leave_out(struct agent_declaration *declaration, uint64_t until, uint64_t now_ns)
{
	struct agent_tensor *tensor = declaration->tensor;
	struct agent_round *round;
	struct failure failure;
	int r;

	for (; declaration->n_rounds + 1 < until; declaration->n_rounds++) {
		uint64_t number = declaration->n_rounds + 1;

		if (number <= tensor->past_rounds || hopeless(tensor, 0))
			continue;
		round = round_find(declaration, number);
		r = round ? 0 : round_new(tensor, number, now_ns, &round);
		if (r)
			return error_trace(r);
		declaration->newest = round;
		round->ranks[declaration->member->index].came = true;
		round->n_came++;
		agent_round_describe(round, &failure, -ECONNRESET,
				     "it had failed on rank %u before the daemon restarted",
				     declaration->member->rank);
		if (round->state == ROUND_FAILED)
			(void)agent_round_forget(round);
		else
			agent_round_fail(round, &failure, true);
	}
	return 0;
}

bool agent_leave_out(struct agent_declaration *declaration, uint64_t round, uint64_t now_ns)
{
	struct agent_tensor *tensor = declaration->tensor;
	uint64_t before = declaration->n_rounds, until = before + LEAVE_OUT_STEP + 1;

	/* What is wrong, agent_submit() finds, too. */
	if (!may_be_next(declaration, round) || round <= until || tensor->job->end.failure.status)
		return true;
	agent_forget_not(tensor);
	if (tensor->forgetting)
		return true;
	(void)leave_out(declaration, until, now_ns);
	return declaration->n_rounds == before;
}

/*
 * One that had ended before a restart, for another rank. Where the rank has not declared what it had, but has named the
 * tensor anew, the two do not count the same rounds.
 */
static void request_settle(struct agent_tensor *tensor, uint32_t index,
			   struct agent_request *request)
{
	const struct agent_declaration *declaration = tensor->declarations[index];
	struct failure failure = { 0 };

	if (declaration && declaration->is_new)
		(void)failure_set(&failure, -ECONNRESET,
				  "tensor %s: rank %u names it anew, and another has used it "
				  "before the daemon restarted",
				  tensor->name, declaration->member->rank);
	else
		agent_resume_outcome(tensor, request, &failure);
	agent_request_end(tensor->job->agent, request, failure.status ? &failure : NULL);
}

/* Who ended it does not submit it again, so it does not move. */
static void settle(struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;

	assert(round->state != ROUND_MOVING);
	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		struct agent_request *request = agent_round_take(round, i);

		if (request)
			request_settle(tensor, i, request);
	}
	agent_round_recycle(round);
}

bool agent_round_settle(struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;

	if (!agent_round_is_settled(round))
		return false;
	settle(round);
	agent_job_let_leave(tensor->job);
	/* What came behind it has waited. */
	agent_round_advance(tensor);
	return true;
}

void agent_rounds_settle(struct agent_tensor *tensor)
{
	struct agent_round *round;

	/* They are in order. */
	while ((round = list_first(&tensor->rounds, struct agent_round, link)) &&
	       agent_round_is_settled(round)) {
		if (tensor->job->n_open_rounds > SETTLE_NOW) {
			agent_sweep(tensor->job);
			return;
		}
		settle(round);
	}
	agent_job_let_leave(tensor->job);
}

void agent_fetch(const struct agent_declaration *declaration)
{
	struct agent_tensor *tensor = declaration->tensor;

	__builtin_prefetch(&declaration->n_rounds, 1);
	fetch_to_write(&tensor->job, offsetof(struct agent_tensor, failure.text) -
					     offsetof(struct agent_tensor, job));
	__builtin_prefetch(tensor->name);
	__builtin_prefetch(&tensor->reached[declaration->member->index], 1);
}

void agent_fetch_round(const struct agent_declaration *declaration)
{
	const struct agent_tensor *tensor = declaration->tensor;
	const struct agent_round *round = list_last(&tensor->rounds, struct agent_round, link);

	if (!round)
		return;
	fetch_to_write(round, offsetof(struct agent_round, failure) + 1);
	fetch_to_write(round->ranks, 2 * CACHE_LINE);
}

void agent_fetch_requests(const struct agent_declaration *declaration)
{
	const struct agent_tensor *tensor = declaration->tensor;
	const struct agent_round *round = list_last(&tensor->rounds, struct agent_round, link);

	for (uint32_t i = 0; round && i < MIN(agent_round_n_local(round), FETCHED_REQUESTS); i++)
		if (round->ranks[i].request)
			fetch_to_write(round->ranks[i].request, sizeof(struct agent_request));
}

/* Returns whether the request has ended: all ranks here have released the tensor, and the home may have forgotten it. */
static bool use_of_asked(const struct agent_declaration *declaration, struct agent_request *request)
{
	struct agent_tensor *tensor = declaration->tensor;
	struct failure failure;

	agent_forget_not(tensor);
	if (!tensor->forgetting)
		return false;
	(void)failure_set(&failure, -EPROTO, "tensor %s: rank %u has released it", tensor->name,
			  declaration->member->rank);
	agent_request_end(tensor->job->agent, request, &failure);
	return true;
}

void agent_submit(struct agent_declaration *declaration, struct agent_request *request,
		  const struct failure *invalid, uint64_t now_ns)
{
	struct agent_tensor *tensor = declaration->tensor;
	struct agent_job *job = tensor->job;
	uint64_t ordinal = agent_request_ordinal(request);
	uint32_t index = declaration->member->index;
	uint32_t rank = declaration->member->rank;
	const struct failure *in_vain;
	struct agent_round *round;
	struct failure words;
	bool differs, begins;
	int r;

	if (unlikely(tensor->asked) && use_of_asked(declaration, request))
		return;
	/* The rank has not been told yet. */
	if (job->end.failure.status) {
		agent_request_end(job->agent, request, &job->end.failure);
		return;
	}
	if (!may_be_next(declaration, request->round)) {
		round_out_of_order(declaration, request);
		return;
	}
	r = request->round > declaration->n_rounds + 1
		    ? leave_out(declaration, request->round, now_ns)
		    : 0;
	if (r) {
		round_refused(tensor, request, r);
		return;
	}
	tensor->reached[index] = ++declaration->n_rounds;
	if (request->round <= tensor->past_rounds) {
		request_settle(tensor, index, request);
		agent_job_let_leave(job);
		return;
	}
	in_vain = hopeless(tensor, ordinal);
	if (in_vain && !agent_resume_moves(tensor, request->round)) {
		if (job->distributed && tensor->key)
			agent_setup_fail_round(job, tensor->key, request->round,
					       request->operation == OPERATION_ACCUMULATE, in_vain);
		agent_request_end(job->agent, request, in_vain);
		return;
	}
	round = round_find(declaration, request->round);
	begins = !round;
	r = begins ? round_new(tensor, request->round, now_ns, &round) : 0;
	if (r) {
		round_refused(tensor, request, r);
		return;
	}

	declaration->newest = round;
	/* It stays, as this rank has not come to it. */
	if (unlikely(job->sweep.n_without))
		(void)agent_round_mend(round);
	round_came(round, index, now_ns, request);
	if (unlikely(agent_follow_any(&job->following)))
		agent_follow_came(round, declaration->member, begins);
	if (agent_elastic_submit(tensor, index, request, &words) && !invalid)
		invalid = &words;
	differs = ordinal && agent_ordinal_differs(round, rank, ordinal);
	if (round->state == ROUND_FAILED) {
		agent_round_end_requests(round);
		if (agent_round_forget(round))
			agent_round_advance(tensor);
	} else if (differs && !invalid) {
		agent_ordinal_fail(round, ordinal);
	} else {
		round_examine(round, index, request, invalid);
	}
	if (differs)
		agent_ordinal_fail_others(job, ordinal);
}

/* -- Going on without a rank --------------------------------------------------------------------------------------- */

/* Rounds of a job from which a rank is taken at once; where there are more, the sweep comes to them. */
#define WITHOUT_NOW 64

/* Whether this rank counts for the round, and its contribution can still be kept out. */
static bool counts(const struct agent_round *round, uint32_t index)
{
	return round->state != ROUND_MOVING && !agent_round_is_settled(round) &&
	       (!round->ranks[index].came || round->ranks[index].request);
}

static struct agent_round *find_counting(const struct agent_job *job, uint32_t index)
{
	struct agent_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (counts(round, index))
			return round;
	return NULL;
}

static void round_without(struct agent_round *round, uint32_t index, const struct failure *why)
{
	struct agent_request *request = agent_round_take(round, index);
	struct agent_tensor *tensor = round->tensor;
	struct failure failure, words;

	if (!round->ranks[index].came)
		round->n_came++;
	round->ranks[index].came = true;
	if (request) {
		agent_elastic_outcome(round, index, request);
		agent_request_end(tensor->job->agent, request, why);
	}
	if (round->state == ROUND_FAILED) {
		if (agent_round_forget(round))
			agent_round_advance(tensor);
	} else if (!agent_round_is_complete(round)) {
		return;
	} else if (!agent_round_first(round)) {
		agent_round_fail(round, why, true);
	} else if (check_complete(round, &words)) {
		agent_round_describe(round, &failure, words.status, "%s", words.text);
		agent_round_fail(round, &failure, true);
	} else {
		round_ready(round);
	}
}

bool agent_round_mend(struct agent_round *round)
{
	struct agent_job *job = job_of(round);

	for (uint32_t i = 0; job->sweep.n_without && i < job->layout.n_local; i++) {
		if (!job->sweep.without[i] || !counts(round, i))
			continue;
		round_without(round, i, job->sweep.without[i]);
		if (!list_linked(&round->job_link))
			return false;
	}
	return true;
}

/* Returns false without memory for the words. */
static bool leave_to_sweep(struct agent_job *job, uint32_t index, const struct failure *failure)
{
	struct failure *why;

	job->sweep.without = job->sweep.without ?: calloc(job->layout.n_local, sizeof(why));
	if (!job->sweep.without)
		return false;
	if (!job->sweep.without[index]) {
		why = malloc(sizeof(*why));
		if (!why)
			return false;
		*why = *failure;
		job->sweep.without[index] = why;
		job->sweep.n_without++;
	}
	agent_sweep(job);
	return true;
}

void agent_round_without(struct agent_job *job, uint32_t index, const struct failure *failure)
{
	struct agent_round *round;

	if (job->n_open_rounds > WITHOUT_NOW && leave_to_sweep(job, index, failure))
		return;
	/* From the start after each: one that ends may take others along. */
	while (job->state == JOB_RUNNING && (round = find_counting(job, index)))
		round_without(round, index, failure);
}

void agent_round_mended(struct agent_job *job)
{
	if (!job->sweep.n_without)
		return;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		freep(&job->sweep.without[i]);
	job->sweep.n_without = 0;
	if (job->resumption.suspended)
		return;
	agent_job_let_leave(job);
	agent_job_end_departed(job);
	agent_elastic_try(job);
}
