/*
 * Operations that all ranks submit in one order, as those are to which a program gives no names: ranks that do not do the same
 * would wait for one another until a deadline passes. Each is compared with what the first of the ranks here submitted as its n-th
 * one, when it comes; on tensor and round, as the names of tensors say kind, type and size. Of what waits for long other nodes
 * are told, through the job's home, and compare it with theirs.
 */
#include "pipeline/round.h"
#include "proto/text.h"
#include <inttypes.h>
#include <stdio.h>

#define TELL_NS (200 * NSEC_PER_MSEC) /* what waits at most twice as long is told */

/* What a rank has submitted with an ordinal. */
struct submitted {
	uint32_t rank;
	const char *name;
	uint64_t round;
};

static int describe(struct failure *failure, uint64_t ordinal, const struct submitted *a,
		    const struct submitted *b)
{
	if (!strcmp(a->name, b->name))
		return failure_set(failure, -EILSEQ,
				   "the ranks' operations without names differ. Number %" PRIu64
				   ": rank %u submitted %s, round %" PRIu64
				   ", rank %u round %" PRIu64,
				   ordinal, a->rank, a->name, a->round, b->rank, b->round);
	return failure_set(failure, -EILSEQ,
			   "the ranks' operations without names differ. Number %" PRIu64
			   ": rank %u submitted %s, rank %u %s",
			   ordinal, a->rank, a->name, b->rank, b->name);
}

static struct submitted submitted_of(const struct pipeline_ordered *ordered)
{
	return (struct submitted){ ordered->rank, ordered->tensor->name, ordered->round };
}

/* It waits; NULL: it has ended. */
static struct pipeline_round *open_round(const struct pipeline_ordered *ordered)
{
	struct pipeline_round *round;

	list_for_each (round, &ordered->tensor->rounds, link)
		if (round->number == ordered->round)
			return round->failure.status ? NULL : round;
	return NULL;
}

/* Also ranks that come later are to hear of it, when others have left because of it. */
static void remember(struct pipeline_job *job, uint64_t ordinal, const struct failure *why)
{
	if (ordinal < job->differing_ordinal)
		return;
	job->differing_ordinal = ordinal;
	job->differing = *why;
}

static void fail(struct pipeline_round *round, const struct failure *why)
{
	struct failure failure;

	pipeline_round_describe(round, &failure, why->status, "%s", why->text);
	pipeline_round_fail(round, &failure, true);
}

/* -- Other nodes --------------------------------------------------------------------------------------------------- */

static void tell(struct pipeline_job *job, const struct pipeline_ordered *ordered)
{
	struct peer *peer = pipeline_setup_peer(job, job->home_number);
	struct data_header header = {
		.op = DATA_ORDINAL,
		.job = job->number,
		.node = job->shape.node,
		.round = ordered->ordinal,
		.key = ordered->round,
		.root = ordered->rank,
		.len = (uint32_t)strlen(ordered->tensor->name),
	};

	/* What is not heard is said again. */
	if (peer && peer_has(peer, DATA_FEATURE_ORDINALS))
		(void)peer_notice(peer, &header, ordered->tensor->name);
}

static void watch(struct pipeline_job *job)
{
	job->ordinal_before = job->newest_ordinal;
	/* Without memory for it, deadlines tell. */
	(void)loop_timer_set(job->pipeline->params.loop, &job->ordinal_timer,
			     clock_now_ns() + TELL_NS);
}

/* The oldest that waits. */
static const struct pipeline_ordered *oldest(const struct pipeline_job *job)
{
	const struct pipeline_ordered *found = NULL;

	for (size_t i = 0; i < PIPELINE_ORDERED; i++) {
		const struct pipeline_ordered *ordered = &job->ordered[i];

		if (ordered->ordinal && (!found || ordered->ordinal < found->ordinal) &&
		    open_round(ordered))
			found = ordered;
	}
	return found;
}

static void on_timer(struct loop_timer *timer)
{
	struct pipeline_job *job = container_of(timer, struct pipeline_job, ordinal_timer);
	const struct pipeline_ordered *found = job->state == JOB_RUNNING ? oldest(job) : NULL;

	if (!found)
		return;
	if (found->ordinal <= job->ordinal_before)
		tell(job, found);
	watch(job);
}

void pipeline_ordinal_heard(struct pipeline_job *job, const struct data_header *header,
			    const char *name)
{
	const struct pipeline_ordered *ordered = &job->ordered[header->round % PIPELINE_ORDERED];
	char text[TENSOR_NAME_MAX + 1];
	struct submitted here, there = { header->root, text, header->key };
	struct pipeline_round *round;
	struct failure failure;

	if (job->state != JOB_RUNNING || ordered->ordinal != header->round ||
	    !text_is_plain(name, header->len))
		return;
	(void)snprintf(text, sizeof(text), "%.*s", (int)header->len, name);
	here = submitted_of(ordered);
	if (!strcmp(here.name, there.name) && here.round == there.round)
		return;
	round = open_round(ordered);
	if (!round)
		return;
	tell(job, ordered);
	(void)describe(&failure, header->round, here.rank < there.rank ? &here : &there,
		       here.rank < there.rank ? &there : &here);
	remember(job, header->round, &failure);
	fail(round, &failure);
}

void pipeline_ordinal_init(struct pipeline_job *job)
{
	job->ordinal_timer.expired = on_timer;
}

void pipeline_ordinal_done(struct pipeline_job *job)
{
	loop_timer_cancel(&job->ordinal_timer);
}

/* -- Ranks of this node -------------------------------------------------------------------------------------------- */

int pipeline_ordinal_check(const struct pipeline_round *round, uint32_t rank, uint64_t ordinal,
			   struct failure *failure)
{
	struct pipeline_job *job = round->job;
	struct pipeline_ordered *first = &job->ordered[ordinal % PIPELINE_ORDERED];
	const struct pipeline_ordered own = {
		.ordinal = ordinal,
		.round = round->number,
		.tensor = round->tensor,
		.rank = rank,
	};
	struct submitted here, there;
	struct pipeline_round *other;

	if (first->ordinal < ordinal) {
		*first = own;
		job->newest_ordinal = ordinal;
		if (job->distributed && !job->ordinal_timer.loop)
			watch(job);
	}
	if (first->ordinal > ordinal || (first->tensor == own.tensor && first->round == own.round))
		return 0;
	there = submitted_of(first);
	here = submitted_of(&own);
	(void)describe(failure, ordinal, &there, &here);
	remember(job, ordinal, failure);
	other = open_round(first);
	if (other)
		fail(other, failure);
	return failure->status;
}
