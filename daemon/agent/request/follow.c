/*
 * Ranks that follow the others: each has come to the end of its own work, and takes part in rounds that other ranks begin. It
 * is told of each such round by the agent of its node, which hears of those of other nodes through the job's home. What such a rank
 * submits once it has heard of the round is told to nobody, as all who follow have heard of it. Turns keep apart what is said for one
 * time that all ranks follow and what is said for the next. agent_follow() is agent.h's, for control/; submit.c brings
 * rounds, sweep.c those that are open when somebody begins to follow, agent.c what the home says and that ranks have left.
 */
#include "agent/round/round.h"
#include "proto/text.h"

/* -- Rounds -------------------------------------------------------------------------------------------------------- */

static struct agent_begun describe(const struct agent_round *round)
{
	const struct agent_tensor *tensor = round->tensor;
	struct agent_begun begun = {
		.name = tensor->name,
		.dtype = tensor->dtype,
		.elements = tensor->elements,
		.round = round->number,
		.first = list_first(&tensor->rounds, struct agent_round, link)->number,
	};

	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		const struct agent_request *request = round->ranks[i].request;

		if (!request || !request->operation || request->operation > OPERATION_MAX_ ||
		    request->reduction > REDUCTION_MAX_)
			continue;
		begun.operation = request->operation;
		begun.reduction = request->reduction;
		break;
	}
	return begun;
}

static bool follows(const struct agent_job *job, uint32_t index)
{
	return job->members[index] && job->members[index]->follows;
}

/* Every node with ranks that have begun a round tells of it. After a sweep those of a tensor may come in another order. */
static bool is_news(const struct agent_job *job, struct agent_tensor *tensor,
		    const struct agent_begun *begun)
{
	if (tensor->notified.since != job->following.since) {
		tensor->notified.since = job->following.since;
		tensor->notified.rounds = UINT64_MAX;
		for (uint32_t i = 0; i < job->layout.n_local; i++)
			if (follows(job, i))
				tensor->notified.rounds =
					MIN(tensor->notified.rounds, tensor->reached[i]);
	}
	if (begun->round <= tensor->notified.rounds)
		return false;
	/* What is behind it and is not told has failed. */
	tensor->notified.rounds = MAX(tensor->notified.rounds, begun->first - 1);
	tensor->notified.rounds += begun->round == tensor->notified.rounds + 1;
	return true;
}

/* tensor: NULL: no rank here has declared it. */
static void tell_here(const struct agent_job *job, struct agent_tensor *tensor,
		      const struct agent_begun *begun)
{
	if (!job->following.n_here || (tensor && !is_news(job, tensor, begun)))
		return;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (follows(job, i) && (!tensor || tensor->reached[i] < begun->round))
			job->members[i]->begun(job->members[i], begun);
}

static void tell_home(struct agent_job *job, const struct agent_begun *begun)
{
	struct peer *home = agent_setup_peer(job, job->fleet.home_number);
	struct data_header header = {
		.op = DATA_BEGUN,
		.job = job->number,
		.node = job->shape.node,
		.tensor_round = begun->round,
		.first_round = begun->first,
		.elements = begun->elements,
		.dtype = (uint8_t)begun->dtype,
		.operation = (uint8_t)begun->operation,
		.reduction = (uint8_t)begun->reduction,
		.len = (uint32_t)strlen(begun->name),
	};

	/* A home that is lost is told nothing: the next one hears of all open rounds. */
	if (home && peer_has(home, DATA_FEATURE_FOLLOW))
		peer_tell(home, &header, begun->name);
}

static void tell(const struct agent_round *round)
{
	const struct agent_begun begun = describe(round);

	tell_here(round->job, round->tensor, &begun);
	if (round->job->following.n_elsewhere)
		tell_home(round->job, &begun);
}

void agent_follow_open(const struct agent_round *round)
{
	if (!round->turn.heard)
		tell(round);
}

/* A rank that has heard of a round of a tensor that nobody here had declared counts as one that has not: the round is told again. */
static bool has_heard(const struct agent_round *round, const struct agent_member *member)
{
	const struct agent_tensor *tensor = round->tensor;

	return member->follows && tensor->notified.since == round->job->following.since &&
	       round->number <= tensor->notified.rounds;
}

void agent_follow_came(struct agent_round *round, const struct agent_member *member, bool begins)
{
	bool heard = has_heard(round, member);
	bool is_notified = !begins && !round->turn.heard;

	if (begins)
		round->turn.heard = heard;
	if (heard || is_notified)
		return;
	round->turn.heard = false;
	tell(round);
}

static void tell_open(struct agent_job *job)
{
	if (!job->n_open_rounds)
		return;
	job->following.tells_open = true;
	agent_sweep(job);
}

void agent_follow_begun(const struct agent_job *job, const struct data_header *header,
			const void *payload)
{
	char name[TENSOR_NAME_MAX + 1];
	const struct agent_begun begun = {
		.name = name,
		.dtype = header->dtype,
		.elements = header->elements,
		.round = header->tensor_round,
		.first = header->first_round,
		.operation = header->operation,
		.reduction = header->reduction,
	};

	if (job->state != JOB_RUNNING || !text_take_name(payload, header->len, name, sizeof(name)))
		return;
	tell_here(job, agent_tensor_find(job, name), &begun);
}

/* -- Who follows --------------------------------------------------------------------------------------------------- */

/* All ranks here that follow hear that not all ranks will. */
static void tell_over(const struct agent_job *job, const struct failure *how)
{
	for (uint32_t i = 0; job->following.n_here && i < job->layout.n_local; i++)
		if (follows(job, i))
			job->members[i]->all_follow(job->members[i], job->members[i]->turn, how);
}

void agent_follow_look(struct agent_job *job)
{
	if (job->state != JOB_RUNNING || !job->departed.failure.status)
		return;
	tell_over(job, &job->departed.failure);
	if (job->following.n_elsewhere)
		agent_setup_follow(job);
}

static void look_all(struct agent_job *job)
{
	struct agent_following *following = &job->following;

	if (!job->distributed && following->n_idle == job->layout.n_local)
		following->done = MAX(following->done, following->turn);
	for (uint32_t i = 0; following->n_here && i < job->layout.n_local; i++) {
		struct agent_member *member = job->members[i];

		if (member && member->idle && member->turn <= following->done)
			member->all_follow(member, member->turn, NULL);
	}
}

void agent_follow_heard(struct agent_job *job, const struct data_header *header,
			const struct failure *how)
{
	struct agent_following *following = &job->following;
	uint32_t before = following->n_elsewhere;

	if (how) {
		if (job->state == JOB_RUNNING)
			tell_over(job, how);
		return;
	}
	/* A job that is resumed hears this before its ranks are back. */
	following->n_elsewhere = header->n_following;
	following->done = MAX(following->done, header->turn);
	if (job->state != JOB_RUNNING)
		return;
	/* Also when the number is the same: another home may have said it. */
	if (following->n_elsewhere && following->n_elsewhere >= before) {
		agent_follow_look(job);
		tell_open(job);
	}
	look_all(job);
}

static void count(struct agent_job *job)
{
	struct agent_following *following = &job->following;

	following->n_here = following->n_idle = 0;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i])
			following->turn = MAX(following->turn, job->members[i]->turn);
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		const struct agent_member *member = job->members[i];

		following->n_here += follows(job, i);
		following->n_idle += member && member->idle && member->turn == following->turn;
	}
	/* A rank goes on to a turn once the one before is done. */
	following->done = MAX(following->done, following->turn ? following->turn - 1 : 0);
}

void agent_follow_gone(struct agent_member *member)
{
	struct agent_job *job = member->job;

	if (!member->turn)
		return;
	member->follows = member->idle = false;
	member->turn = 0;
	if (job->state != JOB_RUNNING)
		return;
	count(job);
	if (job->distributed)
		agent_setup_follow(job);
}

static int check(const struct agent_member *member, struct failure *failure)
{
	struct agent_job *job = member->job;
	const struct peer *home;

	if (!job || job->state != JOB_RUNNING || member->leaving)
		return failure_set(failure, -ENOTCONN, "in no job");
	if (job->shape.elastic || stragglers_any(&job->shape.stragglers))
		return failure_set(
			failure, -EINVAL,
			"job %s: no rank follows the others where they do not all wait "
			"for one another: it is elastic, has a quorum or is asynchronous",
			job->owner.name);
	home = job->distributed ? agent_setup_peer(job, job->fleet.home_number) : NULL;
	if (home && !peer_has(home, DATA_FEATURE_FOLLOW))
		return failure_set(failure, -EOPNOTSUPP,
				   "job %s: its server %s is of a version that knows no rank that "
				   "follows the others: update it",
				   job->owner.name, peer_name(home));
	return 0;
}

int agent_follow(struct agent_member *member, const struct agent_follow *how,
		 struct failure *failure)
{
	struct agent_job *job = member->job;
	bool begins = how->follows && !member->follows;
	int r;

	r = check(member, failure);
	if (!r && how->follows && job->departed.failure.status) {
		*failure = job->departed.failure;
		r = failure->status;
	}
	if (r)
		return r;
	member->follows = how->follows;
	member->idle = how->follows && how->idle;
	member->turn = MAX(member->turn, how->turn);
	job->following.since += begins;
	count(job);
	if (job->distributed)
		agent_setup_follow(job);
	if (begins)
		tell_open(job);
	look_all(job);
	return 0;
}
