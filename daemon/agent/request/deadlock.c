/*
 * Ranks that wait for one another: one is blocked in a round, its process does nothing else before that has ended, and
 * another has not come to it, being blocked in a round to which the first has not come. Neither round can end, now or
 * later, so both fail at once.
 *
 * What ranks of one node are blocked in is compared here. Through servers each node tells the job's home of it, and the
 * home all others. A node whose blocked rank has not come to that round answers so, naming what its own is blocked in.
 * The first node then knows both, and tells all nodes, which fail both rounds.
 *
 * Two rounds that ranks submit in one order are left to ordinal.c, after which ranks know where that order goes on.
 * agent_blocked() is agent.h's, for control/; agent.c brings what the home says.
 */
#include "agent/request/deadlock.h"
#include "agent/round/round.h"
#include "proto/text.h"
#include <inttypes.h>
#include <stdio.h>

/* A rank that waits is told of after longer: nobody has more told by saying it more often. */
#define TELL_NS (100 * NSEC_PER_MSEC)

/* A rank that is blocked, and in what. */
struct blocked {
	const char *tensor; /* its name */
	uint64_t round;
	uint32_t rank;
};

/* Whether a round ends only once all ranks have come to it. */
static bool waits_for_all(const struct agent_job *job)
{
	return job->state == JOB_RUNNING && !job->resumption.suspended && !job->shape.elastic &&
	       !stragglers_any(&job->shape.stragglers);
}

/* Whether all ranks submit it in one order with others: ordinal.c tells those that differ in it, and what is to be done next. */
static bool is_in_order(const struct agent_job *job, uint32_t index)
{
	return agent_request_ordinal(job->deadlock.ranks[index].request);
}

/* The round that a local rank is blocked in, or NULL. */
static struct agent_round *round_of(const struct agent_job *job, uint32_t index)
{
	const struct agent_request *request = job->deadlock.ranks[index].request;

	/* One that fails is about to end. */
	return request && !request->in->failure.status ? request->in : NULL;
}

static struct blocked describe(const struct agent_round *round, uint32_t index)
{
	return (struct blocked){ round->tensor->name, round->number,
				 round->job->layout.rank_of_local[index] };
}

static bool is_same(const struct blocked *a, const struct blocked *b)
{
	return a->round == b->round && !strcmp(a->tensor, b->tensor);
}

static bool has_come(const struct agent_job *job, uint32_t index, const struct blocked *blocked)
{
	const struct agent_tensor *tensor = agent_tensor_find(job, blocked->tensor);

	return tensor && tensor->reached[index] >= blocked->round;
}

/* -- Two ranks that wait for one another --------------------------------------------------------------------------- */

/* Whether a round is one of those. */
static bool recall(const struct agent_job *job, const struct blocked *blocked,
		   struct blocked ret_pair[2])
{
	const struct agent_deadlock *deadlock = &job->deadlock;

	for (uint64_t i = 0; i < MIN(deadlock->n_known, (uint64_t)AGENT_DEADLOCKS_KNOWN); i++) {
		const struct agent_deadlock_known *known = &deadlock->known[i];

		for (unsigned j = 0; j < 2; j++)
			ret_pair[j] = (struct blocked){ known->tensors[j], known->rounds[j],
							known->ranks[j] };
		if (is_same(blocked, &ret_pair[0]) || is_same(blocked, &ret_pair[1]))
			return true;
	}
	return false;
}

static void remember(struct agent_job *job, const struct blocked pair[2])
{
	struct agent_deadlock *deadlock = &job->deadlock;
	struct agent_deadlock_known *known;
	struct blocked old[2];

	if (!deadlock->known)
		deadlock->known = bulk_take(&job->memory.bulk,
					    AGENT_DEADLOCKS_KNOWN * sizeof(deadlock->known[0]));
	if (!deadlock->known || (recall(job, &pair[0], old) && recall(job, &pair[1], old)))
		return;
	known = &deadlock->known[deadlock->n_known++ % AGENT_DEADLOCKS_KNOWN];
	for (unsigned i = 0; i < 2; i++) {
		(void)snprintf(known->tensors[i], sizeof(known->tensors[i]), "%s", pair[i].tensor);
		known->rounds[i] = pair[i].round;
		known->ranks[i] = pair[i].rank;
	}
}

/* Long names are cut, so that all is in the text. */
static void fail(struct agent_job *job, const struct blocked *blocked, const struct blocked *other)
{
	struct agent_round *round = agent_tensor_round(job, blocked->tensor, blocked->round);
	struct failure failure;

	if (!round)
		return;
	agent_round_describe(round, &failure, -EDEADLK,
			     "rank %u waits for rank %u, and rank %u waits for rank %u in tensor "
			     "%.90s, round %" PRIu64,
			     blocked->rank, other->rank, other->rank, blocked->rank, other->tensor,
			     other->round);
	agent_round_fail(round, &failure, true);
}

/* With the first round the job may end, and with it the second. */
static void fail_both(struct agent_job *job, const struct blocked pair[2])
{
	agent_job_hold(job);
	fail(job, &pair[0], &pair[1]);
	if (job->state == JOB_RUNNING)
		fail(job, &pair[1], &pair[0]);
	agent_job_release(job);
}

/* missed: what the rank has not come to, where another is blocked, or NULL. found: nor has that other rank come. */
static void say(struct agent_job *job, const struct blocked *blocked, const struct blocked *missed,
		bool found)
{
	char names[DATA_BLOCKED_MAX];
	struct data_header header = {
		.op = DATA_BLOCKED,
		.job = job->number,
		.node = job->shape.node,
		.tensor_round = blocked->round,
		.rank = blocked->rank,
		.missed_round = missed ? missed->round : 0,
		.missed_by = missed ? missed->rank : 0,
		.status = found ? EDEADLK : 0,
	};
	struct peer *peer = agent_setup_peer(job, job->fleet.home_number);

	header.len = data_blocked_pack(blocked->tensor, missed ? missed->tensor : NULL, names);
	/* What does not arrive is said again while the rank is blocked. */
	if (peer && peer_has(peer, DATA_FEATURE_BLOCKED))
		(void)peer_notice(peer, &header, names);
}

/* They are known to wait for one another from now on, to all nodes. */
static void settle(struct agent_job *job, const struct blocked pair[2])
{
	if (job->distributed) {
		remember(job, pair);
		say(job, &pair[0], &pair[1], true);
	}
	fail_both(job, pair);
}

/* -- Ranks of this node -------------------------------------------------------------------------------------------- */

/* A rank here that keeps this one waiting, and that waits for it; or its own index. */
static uint32_t find_other(const struct agent_job *job, uint32_t index)
{
	const struct agent_round *round = round_of(job, index);

	for (uint32_t i = 0; i < job->layout.n_local && !agent_round_is_settled(round); i++) {
		const struct agent_round *other = round_of(job, i);

		if (!other || other == round || agent_round_is_settled(other) ||
		    (is_in_order(job, index) && is_in_order(job, i)))
			continue;
		if (!round->ranks[i].came && !other->ranks[index].came)
			return i;
	}
	return index;
}

/* -- Ranks of other nodes ------------------------------------------------------------------------------------------ */

/* The first tells for all ranks here that are blocked in this round. */
static void tell_home(struct agent_job *job, uint32_t index)
{
	struct agent_blocked *rank = &job->deadlock.ranks[index];
	const struct agent_round *round = round_of(job, index);
	struct blocked blocked = describe(round, index);
	uint64_t now_ns = clock_now_ns();

	for (uint32_t i = 0; i < index; i++)
		if (round_of(job, i) == round)
			return;
	if (rank->told_ns && now_ns - rank->told_ns < TELL_NS)
		return;
	rank->told_ns = now_ns;
	say(job, &blocked, NULL, false);
}

static bool is_here(const struct agent_job *job, uint32_t rank)
{
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->layout.rank_of_local[i] == rank)
			return true;
	return false;
}

/* A rank here that has not come to this, and is blocked: in a round that is given, or in any (NULL). Returns whether there is one. */
static bool find_blocked(const struct agent_job *job, const struct blocked *missed,
			 const struct blocked *in, struct blocked *ret_own)
{
	for (uint32_t i = 0; job->deadlock.n_blocked && i < job->layout.n_local; i++) {
		const struct agent_round *round = round_of(job, i);

		if (!round || has_come(job, i, missed))
			continue;
		*ret_own = describe(round, i);
		if (!in || is_same(ret_own, in))
			return true;
	}
	return false;
}

/* A rank of another node is blocked: one here that keeps it waiting, and is blocked, answers. */
static void answer(struct agent_job *job, const struct blocked *blocked)
{
	struct blocked own, pair[2];

	/* What all nodes were told has not come to that one: who has found it says it again. */
	if (recall(job, blocked, pair)) {
		if (is_here(job, pair[0].rank))
			say(job, &pair[0], &pair[1], true);
	} else if (find_blocked(job, blocked, NULL, &own)) {
		say(job, &own, blocked, false);
	}
}

/* A rank of another node is blocked, and has not come to what ranks here may be blocked in: the one that was told of speaks for all. */
static void compare(struct agent_job *job, const struct blocked *blocked,
		    const struct blocked *missed)
{
	struct blocked own;

	if (find_blocked(job, blocked, missed, &own))
		settle(job, (struct blocked[]){ own, *blocked });
}

void agent_deadlock_heard(struct agent_job *job, const struct data_header *header,
			  const void *payload)
{
	char names[2][TENSOR_NAME_MAX + 1];
	struct blocked blocked = { names[0], header->tensor_round, header->rank };
	struct blocked missed = { names[1], header->missed_round, header->missed_by };

	if (!waits_for_all(job) || !data_blocked_unpack(header, payload, names))
		return;
	if (header->status) {
		remember(job, (struct blocked[]){ blocked, missed });
		fail_both(job, (struct blocked[]){ blocked, missed });
	} else if (missed.round) {
		compare(job, &blocked, &missed);
	} else {
		answer(job, &blocked);
	}
}

/* -- What a rank says ---------------------------------------------------------------------------------------------- */

static int begin(struct agent_job *job)
{
	struct agent_deadlock *deadlock = &job->deadlock;

	if (!deadlock->ranks)
		deadlock->ranks = bulk_take(&job->memory.bulk,
					    job->layout.n_local * sizeof(deadlock->ranks[0]));
	return deadlock->ranks ? 0 : error_origin(-errno);
}

static uint32_t index_of(const struct agent_round *round, const struct agent_request *request)
{
	uint32_t i = 0;

	while (i < agent_round_n_local(round) && round->ranks[i].request != request)
		i++;
	return i;
}

void agent_blocked(struct agent_request *request, bool over)
{
	struct agent_round *round = request->in;
	struct agent_job *job = round ? round->job : NULL;
	struct blocked own, pair[2];
	uint32_t index, other;

	/* Who gives an operation a time of its own may go on after it. Without memory for it, deadlines tell. */
	if (!round || round->failure.status || request->own_deadline || !waits_for_all(job) ||
	    begin(job))
		return;
	index = index_of(round, request);
	if (index == agent_round_n_local(round))
		return;
	if (!over || job->deadlock.ranks[index].request == request)
		agent_deadlock_over(&job->deadlock, index);
	if (over)
		return;
	job->deadlock.ranks[index].request = request;
	job->deadlock.n_blocked++;
	own = describe(round, index);
	other = find_other(job, index);
	if (recall(job, &own, pair))
		fail_both(job, pair);
	else if (other != index)
		settle(job, (struct blocked[]){ own, describe(round_of(job, other), other) });
	else if (job->distributed && !is_in_order(job, index))
		tell_home(job, index);
}
