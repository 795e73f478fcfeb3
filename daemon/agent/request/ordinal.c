/*
 * Operations that all ranks submit in one order, as a program's that gives them no names: ranks
 * that differ would wait for one another until a deadline passes. Each is compared with what other
 * ranks have submitted under its ordinal, as far as this node knows. Of the oldest that waits the
 * job's home is told, which compares what nodes say and tells all of them. submit.c calls it;
 * agent.c brings what servers say.
 */
#include "agent/round/round.h"
#include "proto/text.h"
#include <inttypes.h>
#include <stdio.h>

/* What waits is seen after at most so long, and told when it is seen again. */
#define LOOK_NS (200 * NSEC_PER_MSEC)
/* It is told again after so many looks: a home that has begun anew has heard nothing. */
#define LOOKS_AGAIN 16
/* Open rounds that are looked at each time, the oldest. */
#define LOOK_ROUNDS 1024

void agent_ordinal_done(struct agent_job *job)
{
	loop_timer_cancel(&job->order.timer);
	ordinals_done(&job->order.ordinals);
}

/* -- Rounds that have not ended ---------------------------------------------------------------- */

/* Whether a request of an open round has this number. */
static bool waits_with(const struct agent_round *round, uint64_t number)
{
	for (uint32_t i = 0; !round->failure.status && i < agent_round_n_local(round); i++) {
		const struct agent_request *request = round->ranks[i].request;

		if (request && agent_request_ordinal(request) == number)
			return true;
	}
	return false;
}

/* The open round here of the operation that came first with this number, or NULL. */
static struct agent_round *find_first(const struct agent_job *job, uint64_t number)
{
	const struct ordinal_operation *first = ordinals_first(&job->order.ordinals, number);
	struct agent_round *round =
		first ? agent_tensor_round(job, first->tensor, first->round) : NULL;

	return round && waits_with(round, number) ? round : NULL;
}

/*
 * The number of the oldest operation that waits, or 0. Rounds are in the order in which they began.
 */
static uint64_t find_oldest(const struct agent_job *job, struct ordinal_operation *ret_operation)
{
	const struct agent_round *round;
	uint64_t oldest = 0;
	unsigned n = 0;

	list_for_each (round, &job->rounds, job_link) {
		if (n++ == LOOK_ROUNDS)
			break;
		for (uint32_t i = 0; !round->failure.status && i < job->layout.n_local; i++) {
			const struct agent_request *request = round->ranks[i].request;
			uint64_t number = request ? agent_request_ordinal(request) : 0;

			if (!number || (oldest && number >= oldest))
				continue;
			oldest = number;
			*ret_operation = (struct ordinal_operation){
				.tensor = round->tensor->name,
				.round = round->number,
				.rank = job->layout.rank_of_local[i],
			};
		}
	}
	return oldest;
}

/* -- The job's home ---------------------------------------------------------------------------- */

static void say(struct agent_job *job, struct data_header *header, const char *payload)
{
	struct peer *peer = agent_setup_peer(job, job->fleet.home_number);

	header->op = DATA_ORDINAL;
	header->job = job->number;
	header->node = job->shape.node;
	header->len = (uint32_t)strlen(payload);
	/* What does not arrive is said again while it waits. */
	if (peer && peer_has(peer, DATA_FEATURE_ORDINALS))
		(void)peer_notice(peer, header, payload);
}

static void tell_waiting(struct agent_job *job, uint64_t number,
			 const struct ordinal_operation *operation)
{
	struct data_header header = {
		.ordinal = number,
		.tensor_round = operation->round,
		.rank = operation->rank,
	};

	say(job, &header, operation->tensor);
}

static void tell_differing(struct agent_job *job, uint64_t number)
{
	const struct failure *how = ordinals_differing(&job->order.ordinals, number);
	struct data_header header = { .ordinal = number, .status = -how->status };

	if (job->distributed)
		say(job, &header, how->text);
}

static void on_timer(struct loop_timer *timer);

static void watch(struct agent_job *job)
{
	job->order.timer.expired = on_timer;
	/* Without memory for it, deadlines tell. */
	(void)loop_timer_set(job->agent->params.loop, &job->order.timer, clock_now_ns() + LOOK_NS);
}

static void on_timer(struct loop_timer *timer)
{
	struct agent_job *job = container_of(timer, struct agent_job, order.timer);
	struct ordinal_operation operation = { 0 };
	uint64_t number = job->state == JOB_RUNNING ? find_oldest(job, &operation) : 0;

	if (!number) {
		job->order.seen = 0;
		return;
	}
	if (number != job->order.seen)
		job->order.n_looks = 0;
	else if (!(job->order.n_looks++ % LOOKS_AGAIN))
		tell_waiting(job, number, &operation);
	job->order.seen = number;
	watch(job);
}

void agent_ordinal_heard(struct agent_job *job, const struct data_header *header,
			 const void *payload, const struct failure *how)
{
	char name[TENSOR_NAME_MAX + 1];
	struct ordinal_operation operation = { name, header->tensor_round, header->rank };
	struct failure failure;
	int r;

	if (job->state != JOB_RUNNING || job->shape.elastic)
		return;
	if (how) {
		(void)failure_set(&failure, -EILSEQ, "%s", how->text);
		r = ordinals_differ(&job->order.ordinals, header->ordinal, &failure);
	} else if (text_take_name(payload, header->len, name, sizeof(name))) {
		r = ordinals_compare(&job->order.ordinals, header->ordinal, &operation, true);
		if (r == ORDINALS_E_DIFFER || r == ORDINALS_E_KNOWN)
			tell_differing(job, header->ordinal);
	} else {
		return;
	}
	if (r == ORDINALS_E_DIFFER)
		agent_ordinal_fail_others(job, header->ordinal);
}

/* -- Ranks of this node ------------------------------------------------------------------------ */

bool agent_ordinal_differs(const struct agent_round *round, uint32_t rank, uint64_t number)
{
	struct agent_job *job = round->job;
	const struct ordinal_operation operation = { round->tensor->name, round->number, rank };
	int r = ordinals_compare(&job->order.ordinals, number, &operation, false);

	if (job->distributed && !job->order.timer.loop)
		watch(job);
	if (r == ORDINALS_E_DIFFER)
		tell_differing(job, number);
	return r == ORDINALS_E_DIFFER || r == ORDINALS_E_KNOWN;
}

void agent_ordinal_fail(struct agent_round *round, uint64_t number)
{
	const struct failure *how = ordinals_differing(&round->job->order.ordinals, number);
	struct failure failure;

	/* The text is to have room for both operations. */
	(void)failure_set(&failure, how->status, "tensor %.60s, round %" PRIu64 ": %s",
			  round->tensor->name, round->number, how->text);
	agent_round_fail(round, &failure, true);
}

void agent_ordinal_fail_others(struct agent_job *job, uint64_t number)
{
	struct agent_round *round = job->state == JOB_RUNNING ? find_first(job, number) : NULL;

	if (round)
		agent_ordinal_fail(round, number);
}
