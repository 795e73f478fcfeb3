/*
 * A model of a trainer with its library: client/ and control/ as the agent sees them. A trainer
 * joins, declares tensors and submits their rounds, some of a tensor at once, when it has computed
 * them. When its daemon is gone, the trainer connects to the next, resumes, declares what it had
 * declared and posts what had not ended, in the order of client/session.c. Shared memory is the
 * trainer's own and outlives daemons. Each result is compared with the sum of what all ranks give,
 * which is known beforehand.
 */
#include "sim.h"
#include <unistd.h>

#define CALL_NS	   (30 * NSEC_PER_USEC) /* until the daemon has what it is asked */
#define RETRY_NS   (20 * NSEC_PER_MSEC)
#define COMPUTE_NS (2 * NSEC_PER_MSEC)
#define LATE_NS	   (15 * NSEC_PER_MSEC) /* computed by the rank that is always late */
#define WINDOW	   3			/* rounds of a tensor that are under way */
#define KEPT	   4			/* results that are looked at again */
#define PID	   1000
#define STALENESS  2 /* in JOB_STALE */
#define NOBODY	   UINT32_MAX
#define BLOCKED_NS (3 * NSEC_PER_SEC) /* it is said again */

enum trainer_state {
	TRAINER_AWAY,	 /* from its daemon; connects */
	TRAINER_JOINING, /* or resuming */
	TRAINER_RUNNING,
	TRAINER_LEAVING,
	TRAINER_LEFT,
	TRAINER_LOST,
};

struct tensor {
	char name[16];
	bool is_variable;
	unsigned width; /* of a row; 0: no rows */
	int64_t *sums;	/* quorum: of all results; accumulated: the last result */
	uint64_t elements, submitted, ended, n_flying;
};

/* What all ranks ask for in a round. */
struct asked {
	unsigned operation, reduction, root;
	unsigned
		odd; /* the rank that asks for something else, so that the round fails; or NOBODY */
};

/* Submitted by the trainer, in whichever session. */
struct request {
	struct list link; /* trainer->flying, then ->past */
	struct tensor *tensor;
	uint64_t round;
	struct asked asked;
	int64_t *input, *output;
	int64_t *input_rows, *output_rows; /* numbers of rows */
	uint64_t n_input_rows, n_rows;	   /* n_rows: of the result */
	struct agent_outcome outcome;
	struct posted *posted; /* in this session; NULL: not yet, or it has ended */
};

struct trainer {
	unsigned index, job, rank; /* index: of all ranks of all jobs */
	struct node *node;
	enum trainer_state state;
	struct session *session;
	uint64_t number; /* the run's; 0: the rank has not joined */
	int ledger;
	uint16_t membership; /* elastic: the last that the rank was told */
	struct tensor tensors[SIM_TENSORS];
	struct list flying, past;
	unsigned n_past;
	struct request *blocked; /* the trainer does nothing before it has ended; or NULL */
	uint64_t slow_until_ns;
	struct event event;
	struct rng rng;
};

struct session {
	struct list link; /* node->sessions */
	struct agent_member member;
	struct trainer *trainer; /* NULL: the daemon is gone */
	struct loop *loop;
	struct agent *agent;
	struct agent_declaration declarations[SIM_TENSORS];
	uint64_t charged;
	bool begun, left;
};

/* A request as its session has it. */
struct posted {
	struct agent_request base;
	struct session *session;
	struct request *request;
};

struct ask {
	struct event event;
	struct input input;
	struct session *session;
	void (*run)(struct session *session, void *what);
	void *what;
};

/* -- Values ------------------------------------------------------------------------------------------------------------ */

/* The first element has a digit for each rank: a rank that is missing or counted twice is seen. */
static int64_t value(unsigned rank, unsigned tensor, uint64_t round, uint64_t i)
{
	struct rng rng = { (uint64_t)rank << 48 ^ (uint64_t)tensor << 40 ^ round << 20 ^ i };

	if (job_tells(world->schedule->kind))
		return INT64_C(1) << 8 * rank;
	if (!i && world->size <= 15)
		return INT64_C(1) << 4 * rank;
	return (int64_t)(rng_next(&rng) >> 8);
}

static bool accumulates(void)
{
	return world->schedule->kind == JOB_ACCUMULATES || world->schedule->kind == JOB_STALE;
}

static unsigned tensor_number(const struct trainer *trainer, const struct tensor *tensor)
{
	return (unsigned)(tensor - trainer->tensors);
}

/* The number of a tensor among those of all jobs. */
static unsigned tensor_id(const struct trainer *trainer, const struct tensor *tensor)
{
	return trainer->job * SIM_TENSORS + tensor_number(trainer, tensor);
}

/* Operations whose blocks are of ranks need a tensor of any number of elements. */
static struct asked asked_of(const struct tensor *tensor, unsigned number, uint64_t round)
{
	static const unsigned fixed[] = { OPERATION_PUSH_PULL, OPERATION_PUSH_PULL,
					  OPERATION_PUSH_PULL, OPERATION_BROADCAST,
					  OPERATION_BARRIER };
	static const unsigned variable[] = { OPERATION_ALL_GATHER, OPERATION_REDUCE_SCATTER,
					     OPERATION_ALL_TO_ALL };
	struct rng rng = { world->schedule->seed ^ round << 8 ^ number };
	struct asked asked = { .reduction = REDUCTION_SUM, .odd = NOBODY };

	if (accumulates())
		asked.operation = OPERATION_ACCUMULATE;
	else if (job_tells(world->schedule->kind))
		asked.operation = OPERATION_PUSH_PULL;
	else if (tensor->width)
		asked.operation =
			rng_chance(&rng, 75) ? OPERATION_PUSH_PULL_ROWS : OPERATION_PUSH_PULL;
	else if (tensor->is_variable)
		asked.operation = variable[rng_below(&rng, ARRAY_SIZE(variable))];
	else
		asked.operation = fixed[rng_below(&rng, ARRAY_SIZE(fixed))];
	/* The last round has what all gave. */
	if (job_counts(world->schedule->kind))
		asked.root = round == world->schedule->n_rounds;
	else if (world->schedule->kind != JOB_ELASTIC &&
		 (asked.operation == OPERATION_PUSH_PULL ||
		  asked.operation == OPERATION_REDUCE_SCATTER))
		asked.reduction =
			rng_chance(&rng, 70) ? REDUCTION_SUM : 1 + (unsigned)rng_below(&rng, 4);
	else if (asked.operation != OPERATION_PUSH_PULL_ROWS &&
		 world->schedule->kind != JOB_ELASTIC)
		asked.reduction = 0;
	if (asked.operation == OPERATION_BROADCAST)
		asked.root = (unsigned)rng_below(&rng, world->size);
	if (world->schedule->kind == JOB_FAILS && asked.operation == OPERATION_PUSH_PULL &&
	    rng_chance(&rng, 40))
		asked.odd = (unsigned)rng_below(&rng, world->size);
	return asked;
}

static uint64_t n_input(const struct tensor *tensor, unsigned operation)
{
	if (operation == OPERATION_BARRIER)
		return 0;
	if (operation == OPERATION_REDUCE_SCATTER || operation == OPERATION_ALL_TO_ALL)
		return tensor->elements * world->size;
	return tensor->elements;
}

static uint64_t n_output(const struct tensor *tensor, unsigned operation)
{
	if (operation == OPERATION_BARRIER)
		return 0;
	if (operation == OPERATION_ALL_GATHER || operation == OPERATION_ALL_TO_ALL)
		return tensor->elements * world->size;
	return tensor->elements;
}

/* -- Rows: each rank gives some, and some of them twice ------------------------------------------------------------------ */

static unsigned n_given(unsigned rank, unsigned tensor, uint64_t round, uint64_t row)
{
	struct rng rng = { (uint64_t)tensor << 40 ^ round << 20 ^ row };
	unsigned percent = (unsigned)rng_below(&rng, 100);

	rng.state ^= (uint64_t)rank << 56;
	return rng_chance(&rng, percent) ? 1 + rng_chance(&rng, 10) : 0;
}

static void give_rows(const struct trainer *trainer, struct request *request)
{
	const struct tensor *tensor = request->tensor;
	unsigned width = tensor->width, id = tensor_id(trainer, tensor);
	uint64_t n_rows = tensor->elements / width;

	for (uint64_t k = 0; k < n_rows; k++) {
		uint64_t row = trainer->rank % 2 ? n_rows - 1 - k : k;

		for (unsigned n = n_given(trainer->rank, id, request->round, row); n; n--) {
			uint64_t at = request->n_input_rows++;

			request->input_rows[at] = (int64_t)row;
			for (unsigned i = 0; i < width; i++)
				request->input[at * width + i] =
					value(trainer->rank, id, request->round, row * width + i);
		}
	}
}

/* Rows that any rank gave, ascending, and nothing else. */
static void check_rows(const struct trainer *trainer, const struct request *request,
		       const char *when)
{
	const struct tensor *tensor = request->tensor;
	unsigned width = tensor->width, id = tensor_id(trainer, tensor);
	uint64_t at = 0;

	for (uint64_t row = 0; row < tensor->elements / width; row++) {
		unsigned n[SIM_RANKS], sum = 0;

		for (unsigned rank = 0; rank < world->size; rank++)
			sum += n[rank] = n_given(rank, id, request->round, row);
		if (!sum)
			continue;
		if (at == request->n_rows || request->output_rows[at] != (int64_t)row)
			sim_fail("rank %u: tensor %s round %" PRIu64 ": row %" PRIu64
				 " is not in the result when it is %s",
				 trainer->rank, tensor->name, request->round, row, when);
		for (unsigned i = 0; i < width; i++) {
			uint64_t should = 0;

			for (unsigned rank = 0; rank < world->size; rank++)
				should += n[rank] * (uint64_t)value(rank, id, request->round,
								    row * width + i);
			if ((uint64_t)request->output[at * width + i] != should)
				sim_fail("rank %u: tensor %s round %" PRIu64 " row %" PRIu64
					 ": %s %016" PRIx64 ", not %016" PRIx64,
					 trainer->rank, tensor->name, request->round, row, when,
					 (uint64_t)request->output[at * width + i], should);
		}
		at++;
	}
	if (at != request->n_rows)
		sim_fail("rank %u: tensor %s round %" PRIu64 ": %" PRIu64
			 " rows in the result, not %" PRIu64,
			 trainer->rank, tensor->name, request->round, request->n_rows, at);
}

/* Element i of what all ranks give, reduced in their order. */
static int64_t reduced(unsigned reduction, unsigned tensor, uint64_t round, uint64_t i)
{
	uint64_t sum = 0;
	int64_t least = INT64_MAX, most = INT64_MIN;

	for (unsigned rank = 0; rank < world->size; rank++) {
		int64_t one = value(rank, tensor, round, i);

		sum += (uint64_t)one;
		least = MIN(least, one);
		most = MAX(most, one);
	}
	return reduction == REDUCTION_MIN	? least
	       : reduction == REDUCTION_MAX	? most
	       : reduction == REDUCTION_AVERAGE ? (int64_t)(sum / world->size)
						: (int64_t)sum;
}

static int64_t expected(const struct trainer *trainer, const struct request *request, uint64_t i)
{
	unsigned tensor = tensor_id(trainer, request->tensor);
	uint64_t n = request->tensor->elements, round = request->round;

	switch (request->asked.operation) {
	case OPERATION_BROADCAST:
		return value(request->asked.root, tensor, round, i);
	case OPERATION_ALL_GATHER:
		return value((unsigned)(i / n), tensor, round, i % n);
	case OPERATION_ALL_TO_ALL:
		return value((unsigned)(i / n), tensor, round, trainer->rank * n + i % n);
	case OPERATION_REDUCE_SCATTER:
		return reduced(request->asked.reduction, tensor, round, trainer->rank * n + i);
	default:
		return reduced(request->asked.reduction, tensor, round, i);
	}
}

/* Whether so few rounds of a rank may not be in a sum that answers this one. */
static bool is_behind(uint64_t round, unsigned n)
{
	return world->schedule->kind == JOB_STALE && n + STALENESS < round;
}

/*
 * A byte of each element counts the rounds of a rank that are in a sum. An accumulated sum has as
 * many of this rank's rounds as it has ended, and never fewer of another rank's than before. Results
 * of a quorum, added up, have each contribution once.
 */
static void count(const struct trainer *trainer, const struct request *request)
{
	struct tensor *tensor = request->tensor;
	bool grows = accumulates();
	uint64_t n_rounds = world->schedule->n_rounds;

	for (uint64_t i = 0; i < tensor->elements; i++) {
		uint64_t before = (uint64_t)tensor->sums[i];
		uint64_t now = (uint64_t)request->output[i] + (grows ? 0 : before);

		for (unsigned rank = 0; rank < world->size; rank++) {
			unsigned n = now >> 8 * rank & 0xff;

			if (is_behind(request->round, n) || n > n_rounds ||
			    n < (before >> 8 * rank & 0xff) ||
			    (request->round == n_rounds && n != n_rounds) ||
			    (grows && rank == trainer->rank && n != request->round))
				sim_fail("rank %u: tensor %s round %" PRIu64 " element %" PRIu64
					 ": %u rounds of rank %u are in it, of %" PRIu64,
					 trainer->rank, tensor->name, request->round, i, n, rank,
					 n_rounds);
		}
		tensor->sums[i] = (int64_t)now;
	}
}

/* The rank has died, or all is over. */
static bool is_lost(unsigned rank)
{
	return !world->trainers[rank] || world->trainers[rank]->state == TRAINER_LOST;
}

/*
 * The result of an elastic job has as many ranks as it says, each once, and all that live; all ranks
 * have one result.
 */
static void check_outcome(const struct trainer *trainer, const struct request *request,
			  const char *when)
{
	const struct tensor *tensor = request->tensor;
	struct outcome *outcome =
		&world->outcomes[tensor_number(trainer, tensor) * world->schedule->n_rounds +
				 request->round - 1];
	unsigned n = 0;

	if (trainer->state == TRAINER_LOST)
		return;
	if (!outcome->came || is_lost(outcome->rank))
		*outcome = (struct outcome){ .told = request->outcome, .came = request->output[0] };
	outcome->rank = trainer->rank;
	if (!outcome->told.membership)
		outcome->told = request->outcome;
	for (unsigned rank = 0; rank < world->size; rank++) {
		unsigned times = (uint64_t)outcome->came >> 8 * rank & 0xff;

		n += times;
		if (times > 1 || (!times && !is_lost(rank)))
			sim_fail("rank %u: tensor %s round %" PRIu64 ": rank %u is in it %u times",
				 trainer->rank, tensor->name, request->round, rank, times);
	}
	/* After a restart nothing is known of a round's membership. */
	if (request->outcome.membership &&
	    (n != request->outcome.n_came ||
	     request->outcome.membership != outcome->told.membership ||
	     request->outcome.size != outcome->told.size))
		sim_fail("rank %u: tensor %s round %" PRIu64 ": is of %u ranks in membership %u of "
			 "%u, told were %u, %u and %u",
			 trainer->rank, tensor->name, request->round, n, outcome->told.membership,
			 outcome->told.size, request->outcome.n_came, request->outcome.membership,
			 request->outcome.size);
	for (uint64_t i = 0; i < tensor->elements; i++)
		if (request->output[i] != outcome->came)
			sim_fail("rank %u: tensor %s round %" PRIu64 " element %" PRIu64
				 ": %s %016" PRIx64 ", and others have %016" PRIx64,
				 trainer->rank, tensor->name, request->round, i, when,
				 (uint64_t)request->output[i], (uint64_t)outcome->came);
}

static void check(const struct trainer *trainer, const struct request *request, const char *when)
{
	if (job_counts(world->schedule->kind) || request->asked.odd != NOBODY)
		return;
	if (world->schedule->kind == JOB_ELASTIC) {
		check_outcome(trainer, request, when);
		return;
	}
	if (request->asked.operation == OPERATION_PUSH_PULL_ROWS) {
		check_rows(trainer, request, when);
		return;
	}
	for (uint64_t i = 0; i < n_output(request->tensor, request->asked.operation); i++) {
		int64_t should = expected(trainer, request, i);

		if (request->output[i] != should)
			sim_fail("rank %u: tensor %s round %" PRIu64 " element %" PRIu64
				 ": %s %016" PRIx64 ", not %016" PRIx64,
				 trainer->rank, request->tensor->name, request->round, i, when,
				 (uint64_t)request->output[i], (uint64_t)should);
	}
}

static void fill(const struct trainer *trainer, struct request *request)
{
	unsigned tensor = tensor_id(trainer, request->tensor);
	uint64_t n = n_input(request->tensor, request->asked.operation);

	memset(request->output, 0xa5,
	       n_output(request->tensor, request->asked.operation) * sizeof(request->output[0]));
	if (request->input_rows) {
		give_rows(trainer, request);
		return;
	}
	for (uint64_t i = 0; i < n; i++)
		request->input[i] = value(trainer->rank, tensor, request->round, i);
}

static struct request *request_free(struct request *request)
{
	list_remove(&request->link);
	if (request->input != request->output)
		free(request->input);
	free(request->output);
	free(request->input_rows);
	free(request->output_rows);
	free(request);
	return NULL;
}

static void *memory(uint64_t len)
{
	void *data = malloc(len);

	if (!data)
		abort();
	return data;
}

/* Input and output are one where they may be. */
static struct request *request_new(struct trainer *trainer, struct tensor *tensor)
{
	struct request *request = memory(sizeof(*request));
	uint64_t in, out;

	*request = (struct request){ .tensor = tensor, .round = ++tensor->submitted };
	request->asked = asked_of(tensor, tensor_id(trainer, tensor), request->round);
	in = n_input(tensor, request->asked.operation);
	out = n_output(tensor, request->asked.operation);
	request->output = memory((out + 1) * sizeof(int64_t));
	if (request->asked.operation == OPERATION_PUSH_PULL_ROWS) {
		in *= 2;
		request->input_rows = memory(2 * tensor->elements * sizeof(int64_t));
		request->output_rows = memory(tensor->elements * sizeof(int64_t));
	}
	request->input = in == out && request->asked.operation != OPERATION_ALL_TO_ALL &&
					 world->schedule->kind != JOB_ELASTIC &&
					 rng_chance(&trainer->rng, 50)
				 ? request->output
				 : memory((in + 1) * sizeof(int64_t));
	fill(trainer, request);
	tensor->n_flying++;
	list_push_back(&trainer->flying, &request->link);
	return request;
}

/* -- What is asked of the daemon, in order ------------------------------------------------------------------------------ */

static void abandon(struct session *session, void *what)
{
	(void)what;
	agent_abandon(&session->member, "was killed");
}

static void on_asked(struct input *input)
{
	struct ask *ask = container_of(input, struct ask, input);

	if (ask->session->trainer || ask->run == abandon)
		ask->run(ask->session, ask->what);
	free(ask);
}

static void ask(struct session *session, void (*run)(struct session *, void *), void *what)
{
	struct ask *ask = calloc(1, sizeof(*ask));

	if (!ask)
		abort();
	*ask = (struct ask){ .input.take = on_asked, .session = session, .run = run, .what = what };
	list_init(&ask->input.link);
	loop_input(session->loop, &ask->input);
}

static void soon(struct trainer *trainer, uint64_t most_ns)
{
	event_set(&trainer->event, world->now_ns + 1 + rng_below(&trainer->rng, most_ns));
}

/* The trainer computes until its next operation. */
static void compute(struct trainer *trainer)
{
	soon(trainer, world->schedule->kind == JOB_LATE && !trainer->rank ? LATE_NS : COMPUTE_NS);
}

/* -- What the daemon says ------------------------------------------------------------------------------------------------ */

static struct session *session_of(struct agent_member *member)
{
	return container_of(member, struct session, member);
}

static void on_joined(struct agent_member *member, uint64_t number, uint32_t n_servers, int ledger)
{
	struct trainer *trainer = session_of(member)->trainer;

	(void)n_servers;
	if (!trainer)
		return;
	if (trainer->number && trainer->number != number)
		sim_fail("rank %u: resumed run %016" PRIx64 ", and was in %016" PRIx64,
			 trainer->rank, number, trainer->number);
	if (trainer->state != TRAINER_JOINING)
		sim_fail("rank %u: joined, which it had not asked for", trainer->rank);
	trace("rank %u: joined run %016" PRIx64, trainer->rank, number);
	world->n_joined += !trainer->number;
	trainer->number = number;
	if (ledger >= 0) {
		if (trainer->ledger >= 0)
			(void)close(trainer->ledger);
		trainer->ledger = dup(ledger);
	}
	if (trainer->ledger < 0)
		sim_fail("rank %u: joined without a ledger", trainer->rank);
	trainer->membership = MAX(trainer->membership, (uint16_t)agent_place(member).membership);
	trainer->state = TRAINER_RUNNING;
	soon(trainer, CALL_NS);
}

static void on_ended(struct agent_member *member, uint64_t number, const struct failure *failure)
{
	struct trainer *trainer = session_of(member)->trainer;

	(void)number;
	if (trainer)
		sim_fail("rank %u: its job has ended: %s", trainer->rank, failure->text);
}

static void on_departed(struct agent_member *member)
{
	struct session *session = session_of(member);

	if (session->trainer->state != TRAINER_LEAVING)
		sim_fail("rank %u: left, which it had not asked for", session->trainer->rank);
	trace("rank %u: left", session->trainer->rank);
	session->left = true;
	session->trainer->state = TRAINER_LEFT;
	world->n_done++;
}

static void on_refused(struct agent_member *member, const struct failure *failure)
{
	sim_fail("rank %u: no regrouping was asked for, and is refused: %s",
		 session_of(member)->trainer->rank, failure->text);
}

static const char *on_charge(struct agent_member *member, bool through_servers)
{
	(void)member;
	(void)through_servers;
	return NULL;
}

static int on_charge_more(struct agent_member *member, uint64_t bytes)
{
	session_of(member)->charged = bytes;
	return 0;
}

/* A round that ranks disagree on fails on all, in words that name a rank, which may have left. */
static bool may_fail(const struct request *request, const struct failure *failure)
{
	return request->asked.odd != NOBODY && strstr(failure->text, "rank") &&
	       (failure->status == -EINVAL || failure->status == -EPIPE);
}

static void check_end(const struct trainer *trainer, const struct request *request,
		      const struct failure *failure)
{
	if (failure && !may_fail(request, failure))
		sim_fail("rank %u: tensor %s round %" PRIu64 ": %d %s", trainer->rank,
			 request->tensor->name, request->round, failure->status, failure->text);
	if (!failure && request->asked.odd != NOBODY)
		sim_fail("rank %u: tensor %s round %" PRIu64
			 " is well, and rank %u asked for something else",
			 trainer->rank, request->tensor->name, request->round, request->asked.odd);
}

static void on_declared(struct agent_declaration *declaration, const struct failure *failure,
			uint64_t key, uint32_t part_bytes)
{
	(void)declaration;
	(void)key;
	(void)part_bytes;
	if (failure)
		sim_fail("a tensor is refused: %s", failure->text);
}

static void on_done(struct agent_request *base, const struct failure *failure)
{
	struct posted *posted = container_of(base, struct posted, base);
	struct request *request = posted->request;
	struct trainer *trainer = posted->session->trainer;

	request->n_rows = base->n_rows;
	request->outcome = base->outcome;
	free(posted);
	if (!trainer)
		return;
	request->posted = NULL;
	if (trainer->blocked == request)
		trainer->blocked = NULL;
	trace("rank %u: %s round %" PRIu64 " done", trainer->rank, request->tensor->name,
	      request->round);
	check_end(trainer, request, failure);
	trainer->membership = MAX(trainer->membership, (uint16_t)request->outcome.membership);
	check(trainer, request, "the result is");
	if (job_counts(world->schedule->kind))
		count(trainer, request);
	request->tensor->ended++;
	request->tensor->n_flying--;
	list_remove(&request->link);
	list_push_back(&trainer->past, &request->link);
	if (++trainer->n_past > KEPT) {
		struct request *oldest = list_first(&trainer->past, struct request, link);

		check(trainer, oldest, "after its completion there is");
		request_free(oldest);
		trainer->n_past--;
	}
	world->n_completed++;
	compute(trainer);
}

/* -- What it does ---------------------------------------------------------------------------------------------------------- */

static void join(struct session *session, void *what)
{
	const struct trainer *trainer = session->trainer;
	unsigned n_agents = world->schedule->n_agents;
	struct agent_join join = {
		.job = trainer->job ? "other" : "job",
		.rank = trainer->rank,
		.size = world->size,
		.local_rank = trainer->rank / n_agents,
		.local_size = world->schedule->n_local,
		.node = trainer->rank % n_agents,
		.n_nodes = n_agents,
		.timeout_ms = 60000,
		.request_timeout_ms = REQUEST_TIMEOUT_MS,
		.force_distributed = !world->schedule->is_local,
		.elastic = world->schedule->kind == JOB_ELASTIC,
		.min_ranks = world->schedule->kind == JOB_ELASTIC,
		.pid = PID + trainer->index,
	};
	struct failure failure = { 0 };
	int r;

	if (accumulates())
		join.stragglers = (struct stragglers){
			.async = true,
			.staleness = world->schedule->kind == JOB_STALE ? STALENESS : 0,
		};
	else if (job_counts(world->schedule->kind))
		join.stragglers = (struct stragglers){ .quorum = (world->size + 1) / 2,
						       .quorum_timeout_ms = 1,
						       .staleness = 8 };

	(void)what;
	if (trainer->number)
		r = agent_resume(session->agent, &session->member, &join, trainer->number,
				 trainer->ledger, &failure);
	else
		r = agent_join(session->agent, &session->member, &join, &failure);
	if (r)
		sim_fail("rank %u: cannot %s: %s", trainer->rank,
			 trainer->number ? "resume" : "join", failure.text);
}

static void declare(struct session *session, void *what)
{
	struct tensor *tensor = what;
	struct agent_declaration *declaration =
		&session->declarations[tensor_number(session->trainer, tensor)];
	struct agent_past past = { .rounds = tensor->submitted };
	const struct request *request;
	struct agent_facts facts = {
		.name = tensor->name,
		.dtype = DTYPE_INT64,
		.elements = tensor->is_variable ? ELEMENTS_VARIABLE : tensor->elements,
	};
	struct failure failure = { 0 };

	list_for_each (request, &session->trainer->flying, link)
		if (request->tensor == tensor)
			past.rounds = MIN(past.rounds, request->round - 1);
	declaration->declared = on_declared;
	if (agent_declare(&session->member, declaration, &facts, &past, &failure))
		sim_fail("rank %u: cannot declare %s: %s", session->trainer->rank, tensor->name,
			 failure.text);
}

static void post(struct session *session, void *what)
{
	struct request *request = what;
	struct tensor *tensor = request->tensor;
	struct posted *posted = memory(sizeof(*posted));

	*posted = (struct posted){
		.base = {
			.round = request->round,
			.operation = (uint8_t)request->asked.operation,
			.reduction = (uint8_t)request->asked.reduction,
			.membership = session->trainer->membership,
			.root = request->asked.root,
			.priority = (int32_t)tensor_number(session->trainer, tensor),
			.input = request->input,
			.output = request->output,
			.input_count = n_input(tensor, request->asked.operation),
			.output_count = n_output(tensor, request->asked.operation),
			.timeout_ms = world->schedule->kind == JOB_ORDERED ? 0 : REQUEST_TIMEOUT_MS,
			.done = on_done,
		},
		.session = session,
		.request = request,
	};
	if (request->input_rows) {
		posted->base.width = tensor->width;
		posted->base.input_count = request->n_input_rows * tensor->width;
		posted->base.input_rows = request->input_rows;
		posted->base.output_rows = request->output_rows;
	}
	/* Half of them do not say so: what they are blocked in is compared then. */
	if (world->schedule->kind == JOB_ORDERED && world->schedule->seed % 2)
		posted->base.ordinal = (request->round - 1) * world->schedule->n_tensors +
				       tensor_number(session->trainer, tensor) + 1;
	if (request->asked.odd == session->trainer->rank &&
	    (request->round % 2 || world->size == 1))
		posted->base.input_count--;
	else if (request->asked.odd == session->trainer->rank)
		posted->base.reduction = !posted->base.reduction;
	trace("rank %u: posts %s round %" PRIu64, session->trainer->rank, tensor->name,
	      request->round);
	request->posted = posted;
	agent_submit(&session->declarations[tensor_number(session->trainer, tensor)], &posted->base,
		     NULL, clock_now_ns());
}

static void block(struct session *session, void *what)
{
	struct request *request = session->trainer->blocked;

	(void)what;
	if (!request || !request->posted)
		return;
	trace("rank %u: is blocked in %s round %" PRIu64, session->trainer->rank,
	      request->tensor->name, request->round);
	agent_blocked(&request->posted->base, false);
}

static void leave(struct session *session, void *what)
{
	(void)what;
	trace("rank %u: leaves", session->trainer->rank);
	agent_leave(&session->member);
}

static void connect(struct trainer *trainer)
{
	struct node *node = trainer->node;
	struct session *session;

	if (!node->is_alive) {
		soon(trainer, RETRY_NS);
		return;
	}
	session = calloc(1, sizeof(*session));
	if (!session)
		abort();
	session->trainer = trainer;
	session->loop = node->loop;
	session->agent = node->agent;
	session->member = (struct agent_member){
		.joined = on_joined,
		.ended = on_ended,
		.departed = on_departed,
		.refused = on_refused,
		.charge = on_charge,
		.charge_more = on_charge_more,
		.shm_fd = -1,
	};
	list_push_back(&node->sessions, &session->link);
	trainer->session = session;
	trainer->state = TRAINER_JOINING;
	ask(session, join, NULL);
}

/* Tells the daemon what it has to know, in the order of client/session.c. */
static void begin(struct trainer *trainer)
{
	struct request *request;

	trainer->session->begun = true;
	for (unsigned i = 0; i < world->schedule->n_tensors; i++)
		ask(trainer->session, declare, &trainer->tensors[i]);
	list_for_each (request, &trainer->flying, link)
		ask(trainer->session, post, request);
}

/* Where all ranks submit in one order: round by round. */
static struct tensor *next_in_order(struct trainer *trainer)
{
	struct tensor *next = &trainer->tensors[0];

	for (unsigned i = 1; i < world->schedule->n_tensors; i++)
		if (trainer->tensors[i].submitted < next->submitted)
			next = &trainer->tensors[i];
	return next;
}

/* A tensor whose next round may begin, or NULL. */
static struct tensor *pick(struct trainer *trainer)
{
	struct tensor *found = NULL;
	unsigned n = 0;

	if (world->schedule->kind == JOB_ORDERED) {
		found = next_in_order(trainer);
		return found->submitted < world->schedule->n_rounds && found->n_flying < WINDOW
			       ? found
			       : NULL;
	}
	for (unsigned i = 0; i < world->schedule->n_tensors; i++) {
		struct tensor *tensor = &trainer->tensors[i];

		if (tensor->submitted < world->schedule->n_rounds && tensor->n_flying < WINDOW &&
		    !rng_below(&trainer->rng, ++n))
			found = tensor;
	}
	return found;
}

static bool has_ended(const struct trainer *trainer)
{
	for (unsigned i = 0; i < world->schedule->n_tensors; i++)
		if (trainer->tensors[i].ended < world->schedule->n_rounds)
			return false;
	return true;
}

static void run(struct trainer *trainer)
{
	struct tensor *tensor;

	if (!trainer->session->begun)
		begin(trainer);
	if (world->now_ns < trainer->slow_until_ns) {
		event_set(&trainer->event, trainer->slow_until_ns);
		return;
	}
	if (trainer->blocked) {
		ask(trainer->session, block, NULL);
		event_set(&trainer->event, world->now_ns + BLOCKED_NS);
		return;
	}
	tensor = pick(trainer);
	if (tensor) {
		struct request *request = request_new(trainer, tensor);

		ask(trainer->session, post, request);
		/* In one order nobody waits for who waits for others, whatever each is blocked in. */
		if (world->schedule->kind == JOB_ORDERED && rng_chance(&trainer->rng, 25))
			trainer->blocked = request;
		compute(trainer);
	} else if (has_ended(trainer) && world->leaving) {
		trainer->state = TRAINER_LEAVING;
		ask(trainer->session, leave, NULL);
	}
}

static void on_event(struct event *event)
{
	struct trainer *trainer = container_of(event, struct trainer, event);

	if (trainer->state == TRAINER_AWAY)
		connect(trainer);
	else if (trainer->state == TRAINER_RUNNING)
		run(trainer);
}

void trainers_lost(struct node *node)
{
	struct session *session;

	while ((session = list_first(&node->sessions, struct session, link))) {
		struct trainer *trainer = TAKE_PTR(session->trainer);

		list_remove(&session->link);
		if (session->left)
			continue;
		trainer->session = NULL;
		trainer->state = TRAINER_AWAY;
		soon(trainer, RETRY_NS);
	}
}

void trainer_slow(struct trainer *trainer, uint64_t until_ns)
{
	trainer->slow_until_ns = until_ns;
}

void trainer_leave(struct trainer *trainer)
{
	if (trainer->state == TRAINER_RUNNING)
		soon(trainer, COMPUTE_NS);
}

/* The last rank does not die. What a dead rank would have done counts as done. */
void trainer_lose(struct trainer *trainer)
{
	unsigned n_alive = 0;

	for (unsigned i = 0; i < world->n_ranks; i++)
		n_alive += world->trainers[i]->state < TRAINER_LEAVING;
	if (world->schedule->kind != JOB_ELASTIC || trainer->state >= TRAINER_LEAVING ||
	    n_alive == 1)
		return;
	trace("rank %u: dies", trainer->rank);
	for (unsigned i = 0; i < world->schedule->n_tensors; i++)
		world->n_completed +=
			(unsigned)(world->schedule->n_rounds - trainer->tensors[i].ended);
	if (trainer->session) {
		trainer->session->trainer = NULL;
		trainer->session->left = true;
		ask(trainer->session, abandon, NULL);
	}
	event_cancel(&trainer->event);
	trainer->state = TRAINER_LOST;
	world->n_done++;
}

bool trainer_is_alive(uint32_t pid)
{
	return pid >= PID && pid < PID + world->n_ranks &&
	       world->trainers[pid - PID]->state != TRAINER_LOST;
}

void trainer_describe(const struct trainer *trainer, char *text, size_t len)
{
	static const char *const states[] = { "away",	 "joining", "running",
					      "leaving", "left",    "lost" };
	const struct request *request = list_first(&trainer->flying, struct request, link);

	if (request)
		(void)snprintf(text, len, "rank %u %s, waits for %s round %" PRIu64, trainer->rank,
			       states[trainer->state], request->tensor->name, request->round);
	else
		(void)snprintf(text, len, "rank %u %s", trainer->rank, states[trainer->state]);
}

struct trainer *trainer_new(unsigned index)
{
	struct trainer *trainer = calloc(1, sizeof(*trainer));
	struct rng rng = { world->schedule->seed ^ 0x7e };

	if (!trainer)
		abort();
	trainer->index = index;
	trainer->job = index / world->size;
	trainer->rank = index % world->size;
	trainer->node = &world->nodes[trainer->rank % world->schedule->n_agents];
	trainer->ledger = -1;
	trainer->event.fire = on_event;
	trainer->rng.state = world->schedule->seed * 64 + index;
	list_init(&trainer->flying);
	list_init(&trainer->past);
	for (unsigned i = 0; i < world->schedule->n_tensors; i++) {
		struct tensor *tensor = &trainer->tensors[i];

		(void)snprintf(tensor->name, sizeof(tensor->name), "t%u", i);
		tensor->is_variable = world->schedule->kind == JOB_BLOCKS ||
				      (!job_tells(world->schedule->kind) && rng_chance(&rng, 25));
		/* Most tensors are of one part, some of more. */
		tensor->elements = 1 + rng_below(&rng, rng_chance(&rng, 60) ? 64 : 2000);
		if (world->schedule->kind == JOB_ROWS && rng_chance(&rng, 75)) {
			tensor->is_variable = false;
			tensor->width = 1 + (unsigned)rng_below(&rng, 8);
			tensor->elements += tensor->width - tensor->elements % tensor->width;
		}
		tensor->sums = calloc(tensor->elements, sizeof(tensor->sums[0]));
		if (!tensor->sums)
			abort();
	}
	soon(trainer, COMPUTE_NS);
	return trainer;
}

struct trainer *trainer_free(struct trainer *trainer)
{
	struct request *request;

	if (!trainer)
		return NULL;
	while ((request = list_first(&trainer->past, struct request, link))) {
		check(trainer, request, "when all is over there is");
		request_free(request);
	}
	while ((request = list_first(&trainer->flying, struct request, link)))
		request_free(request);
	event_cancel(&trainer->event);
	for (unsigned i = 0; i < world->schedule->n_tensors; i++)
		free(trainer->tensors[i].sums);
	if (trainer->session)
		list_remove(&trainer->session->link);
	free(trainer->session);
	if (trainer->ledger >= 0)
		(void)close(trainer->ledger);
	free(trainer);
	return NULL;
}
