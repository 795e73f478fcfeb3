/*
 * Which parts are made next. Parts come into being in the order in which they should leave, of
 * all rounds of the job, until agent_schedule_ahead() bytes are unsent. So a fast server
 * cannot be served much beyond a slow one: at each moment each has been sent the share of the
 * bytes that placement has given it, and all links are busy to the end. The bound is on what is
 * unsent, never on what is unanswered: two nodes may submit their tensors in different orders.
 *
 * schedule.scheduled has the rounds with parts to be made or bytes unsent, the most urgent first; but
 * not those that have as many parts as they may and wait for answers alone. The first of them with parts to be made, and how much of those before it is unsent, are known at
 * each moment: thousands of small rounds may wait, and they are not to be gone through for each
 * part that leaves.
 */
#include "agent/schedule/scheduler.h"

#define AHEAD_UNKNOWN (512u << 10)
#define AHEAD_MAX     (8u << 20)
#define AHEAD_PARTS   4

/*
 * What the link carries in 2.5 ms: enough for pauses of this process, beside what the kernel has.
 * Servers stay in step within as much, and what is urgent waits no longer.
 */
uint64_t agent_schedule_ahead(const struct agent_job *job)
{
	const struct agent_params *params = &job->agent->params;
	uint64_t bytes_s;

	if (params->ahead_bytes)
		return params->ahead_bytes;
	bytes_s = transport_bytes_s(params->transport);
	return MAX(bytes_s ? MIN(bytes_s / 400, (uint64_t)AHEAD_MAX) : AHEAD_UNKNOWN,
		   (uint64_t)AHEAD_PARTS * job->part_bytes);
}

bool agent_schedule_has_room(const struct agent_job *job, uint64_t unsent)
{
	/* The least that agent_schedule_ahead() returns: what the link carries does not matter. */
	if (!job->agent->params.ahead_bytes && unsent < (uint64_t)AHEAD_PARTS * job->part_bytes)
		return true;
	return unsent < agent_schedule_ahead(job);
}

/*
 * Within a priority class, rounds of one pass that is over go by priority, and others in the order
 * of submission: priority_class.c.
 */
static bool is_before(const struct agent_round *a, const struct agent_round *b)
{
	if (a->turn.priority_class != b->turn.priority_class)
		return a->turn.priority_class > b->turn.priority_class;
	if (a->turn.pass == b->turn.pass && a->turn.pass < a->job->schedule.n_passes &&
	    a->turn.priority != b->turn.priority)
		return a->turn.priority > b->turn.priority;
	return a->turn.sequence < b->turn.sequence;
}

static bool is_scheduled(const struct agent_job *job, const struct list *link)
{
	return link != &job->schedule.scheduled;
}

static struct agent_round *round_of(const struct list *link)
{
	return container_of(link, struct agent_round, turn.link);
}

/*
 * Rounds behind this place have their turn soon. Fetches what the memory of the first of them leads
 * to, and the memory of the second.
 */
static _fetches_ void fetch_behind(const struct agent_job *job, const struct list *link)
{
	const struct agent_round *next;

	link = link->next;
	if (!is_scheduled(job, link))
		return;
	next = round_of(link);
	__builtin_prefetch(&next->tensor->key);
	__builtin_prefetch(next->ranks[0].input);
	if (!is_scheduled(job, link->next))
		return;
	next = round_of(link->next);
	fetch_to_write(next, offsetof(struct agent_round, failure) + 1);
	fetch_to_write(next->ranks, sizeof(next->ranks[0]));
}

/*
 * Finds the first round from this place on that has parts to be made. Unsent bytes of rounds that
 * it passes come to count in unsent_before.
 */
static void find_uncut(struct agent_job *job, const struct list *link)
{
	for (; is_scheduled(job, link); link = link->next) {
		job->schedule.uncut = round_of(link);
		if (!job->schedule.uncut->turn.cut) {
			fetch_behind(job, link);
			return;
		}
		job->schedule.unsent_before += job->schedule.uncut->turn.unsent;
	}
	job->schedule.uncut = NULL;
}

/* Whether the round's unsent bytes count in unsent_before. */
static bool is_past(const struct agent_job *job, const struct agent_round *round)
{
	return !job->schedule.uncut || is_before(round, job->schedule.uncut);
}

/* Most often a new round is the most urgent of all, or the newest of its class. */
static void insert(struct agent_job *job, struct agent_round *round)
{
	struct agent_round *other =
		list_last(&job->schedule.scheduled, struct agent_round, turn.link);

	if (!other || is_before(other, round)) {
		list_push_back(&job->schedule.scheduled, &round->turn.link);
		return;
	}
	list_for_each (other, &job->schedule.scheduled, turn.link) {
		if (is_before(round, other)) {
			list_insert_before(&other->turn.link, &round->turn.link);
			return;
		}
	}
}

void agent_schedule_add(struct agent_round *round)
{
	struct agent_job *job = round->job;
	const struct list *last =
		job->schedule.uncut ? &job->schedule.uncut->turn.link : &job->schedule.scheduled;

	if (list_linked(&round->turn.link))
		return;
	insert(job, round);
	if (!is_past(job, round))
		return;
	if (round->turn.cut) {
		job->schedule.unsent_before += round->turn.unsent;
		return;
	}
	for (const struct list *link = round->turn.link.next; link != last; link = link->next)
		job->schedule.unsent_before -= round_of(link)->turn.unsent;
	job->schedule.uncut = round;
}

/* -- Sorting: by merging, of lists that end with NULL and have no way back --------------------- */

#define RUNS_LOG2 32

static bool link_is_before(const struct list *a, const struct list *b)
{
	return is_before(round_of(a), round_of(b));
}

/*
 * Takes what is in order, or in the opposite one, from the start of a list: so most rounds are
 * submitted.
 */
static struct list *take_run(struct list **rest)
{
	struct list *first = *rest, *last = first, *next;

	while ((next = last->next) && link_is_before(last, next))
		last = next;
	while (last == *rest && (next = last->next) && link_is_before(next, first)) {
		last->next = next->next;
		next->next = first;
		first = next;
	}
	*rest = last->next;
	last->next = NULL;
	return first;
}

static struct list *merge(struct list *a, struct list *b)
{
	struct list *first, **end = &first;

	while (a && b) {
		struct list **from = link_is_before(b, a) ? &b : &a;

		*end = *from;
		end = &(*from)->next;
		*from = *end;
	}
	*end = a ? a : b;
	return first;
}

/* A merge sort: there may be thousands of rounds, and other jobs wait. */
void agent_schedule_sort(struct agent_job *job)
{
	struct list *runs[RUNS_LOG2] = { NULL }; /* of each 2^i, or NULL */
	struct list *link, *sorted = NULL, *rest = job->schedule.scheduled.next;

	if (list_empty(&job->schedule.scheduled))
		return;
	job->schedule.scheduled.prev->next = NULL;
	while (rest) {
		unsigned i;

		link = take_run(&rest);
		for (i = 0; runs[i]; i++)
			link = merge(TAKE_PTR(runs[i]), link);
		runs[i] = link;
	}
	for (unsigned i = 0; i < RUNS_LOG2; i++)
		sorted = merge(runs[i], sorted);
	list_init(&job->schedule.scheduled);
	while ((link = sorted)) {
		sorted = link->next;
		list_push_back(&job->schedule.scheduled, link);
	}
	job->schedule.unsent_before = 0;
	find_uncut(job, job->schedule.scheduled.next);
}

void agent_schedule_remove(struct agent_round *round)
{
	struct agent_job *job = round->job;

	if (!list_linked(&round->turn.link))
		return;
	if (round == job->schedule.uncut)
		find_uncut(job, round->turn.link.next);
	else if (is_past(job, round))
		job->schedule.unsent_before -= round->turn.unsent;
	list_remove(&round->turn.link);
}

void agent_schedule_cut(struct agent_round *round)
{
	struct agent_job *job = round->job;

	round->turn.cut = true;
	if (round == job->schedule.uncut)
		find_uncut(job, &round->turn.link);
	if (!round->turn.unsent)
		agent_schedule_remove(round);
}

void agent_schedule_queued(struct agent_round *round, uint64_t bytes)
{
	struct agent_job *job = round->job;

	agent_schedule_add(round);
	round->turn.unsent += bytes;
	job->schedule.unsent += bytes;
	if (is_past(job, round))
		job->schedule.unsent_before += bytes;
}

void agent_schedule_sent(struct agent_round *round, uint64_t bytes)
{
	struct agent_job *job = round->job;

	if (!bytes)
		return;
	if (is_past(job, round))
		job->schedule.unsent_before -= bytes;
	round->turn.unsent -= bytes;
	job->schedule.unsent -= bytes;
	if (round->turn.cut && !round->turn.unsent)
		agent_schedule_remove(round);
}

bool agent_schedule_has_window(const struct agent_round *round)
{
	const struct agent_job *job = round->job;
	const struct list *link = &round->turn.link;
	uint64_t unsent = job->schedule.unsent_before;

	if (!job->distributed || agent_schedule_has_room(job, job->schedule.unsent))
		return true;
	/* All that is unsent is before it, or its own. */
	if (!list_linked(link) || !is_scheduled(job, link->next))
		return false;
	for (link = &job->schedule.uncut->turn.link;
	     link != &round->turn.link && agent_schedule_has_room(job, unsent); link = link->next)
		unsent += round_of(link)->turn.unsent;
	return agent_schedule_has_room(job, unsent + round->turn.unsent);
}

static struct agent_round *next_round(struct agent_job *job)
{
	const struct list *link =
		job->schedule.uncut ? &job->schedule.uncut->turn.link : &job->schedule.scheduled;
	uint64_t unsent = job->schedule.unsent_before;

	while (is_scheduled(job, link) && agent_schedule_has_room(job, unsent)) {
		struct agent_round *round = round_of(link);

		link = link->next;
		if (!round->turn.goes_on && job->agent->hooks->round_may_begin(round))
			return round;
		unsent += round->turn.unsent;
		/* Until an answer has come, nobody is to go past it for each part of others. */
		if (!round->turn.goes_on && !round->turn.unsent && agent_round_is_full(round))
			agent_schedule_remove(round);
	}
	return NULL;
}

void agent_schedule_run(struct agent_job *job)
{
	struct agent_round *round;

	if (job->schedule.scheduling)
		return;
	job->schedule.scheduling = true;
	/* From the start after each: it may end, and others with it. */
	while ((round = next_round(job)))
		job->agent->hooks->round_turn(round);
	job->schedule.scheduling = false;
}
