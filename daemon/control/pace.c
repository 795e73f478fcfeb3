/*
 * What packets of users have cost, and which jobs have rounds meanwhile. ring.c asks before it takes a packet, and puts
 * sessions to wait.
 */
#include "control/pace.h"

#include "base/error.h"
#include <stdlib.h>

/* -- Jobs that have rounds ---------------------------------------------------------------------------------------- */

void pace_jobs_note(struct pace_jobs *jobs, uint64_t job, uint64_t now_ns)
{
	size_t at = 0;

	while (at < PACE_JOBS - 1 && jobs->latest[at].job != job)
		at++;
	for (; at; at--)
		jobs->latest[at] = jobs->latest[at - 1];
	jobs->latest[0].job = job;
	jobs->latest[0].at_ns = now_ns;
}

bool pace_jobs_others(const struct pace_jobs *jobs, uint64_t job, uint64_t other, uint64_t now_ns)
{
	for (size_t i = 0; i < PACE_JOBS; i++)
		if (jobs->latest[i].job != job && jobs->latest[i].job != other &&
		    jobs->latest[i].at_ns + PACE_BUSY_NS > now_ns)
			return true;
	return false;
}

/* -- Users -------------------------------------------------------------------------------------------------------- */

void paces_init(struct paces *paces, struct loop *loop, void (*expired)(struct loop_timer *timer))
{
	*paces = (struct paces){ .loop = loop, .timer.expired = expired };
	list_init(&paces->left);
	list_init(&paces->waiting);
}

static void pace_free(struct pace *pace)
{
	struct paces *paces = pace->paces;

	list_remove(&pace->left);
	map_remove(&paces->map, &pace->entry);
	free(pace);
}

/* Forgets users who have gone, and who have earned the whole burst again by then. */
static void forget(struct paces *paces, uint64_t now_ns)
{
	struct pace *pace, *next;

	list_for_each_safe (pace, next, &paces->left, left)
		if (pace->paid_ns <= now_ns - MIN(now_ns, PACE_BURST_NS))
			pace_free(pace);
}

void paces_done(struct paces *paces)
{
	forget(paces, UINT64_MAX);
	assert(!paces->map.n_entries);
	map_done(&paces->map);
	loop_timer_cancel(&paces->timer);
}

struct pace *pace_get(struct paces *paces, uint32_t uid)
{
	struct map_entry *entry = map_find(&paces->map, uid);
	struct pace *pace;

	if (entry) {
		pace = container_of(entry, struct pace, entry);
		list_remove(&pace->left);
		pace->refs++;
		return pace;
	}
	pace = calloc(1, sizeof(*pace));
	if (!pace || map_add(&paces->map, uid, &pace->entry)) {
		free(pace);
		return NULL;
	}
	pace->paces = paces;
	pace->refs = 1;
	return pace;
}

struct pace *pace_put(struct pace *pace, uint64_t now_ns)
{
	if (!pace || --pace->refs)
		return NULL;
	list_push_back(&pace->paces->left, &pace->left);
	forget(pace->paces, now_ns);
	return NULL;
}

void pace_charge(struct pace *pace, uint64_t cost_ns, uint64_t now_ns)
{
	uint64_t least_ns = now_ns - MIN(now_ns, PACE_BURST_NS);
	bool is_beyond = pace->paid_ns > now_ns;

	/* A debt is as large as a burst at most: however much a user has asked for, it is over after as long. */
	pace->paid_ns = MAX(pace->paid_ns, least_ns) + cost_ns * PACE_OWN_PARTS;
	pace->paid_ns = MIN(pace->paid_ns, now_ns + PACE_BURST_NS);
	if (is_beyond)
		pace->paces->paid_ns = MAX(pace->paces->paid_ns, now_ns - MIN(now_ns, cost_ns)) +
				       cost_ns * PACE_PARTS;
}

int paces_wait(struct paces *paces)
{
	return error_trace(
		paces->timer.loop ? 0 : loop_timer_set(paces->loop, &paces->timer, paces->paid_ns));
}

int pace_wait(struct pace *pace, struct list *session)
{
	int r = paces_wait(pace->paces);

	if (!r)
		list_push_back(&pace->paces->waiting, session);
	return error_trace(r);
}

bool paces_are_paid(struct paces *paces, uint64_t now_ns)
{
	/* Without memory all go on. */
	return paces->paid_ns <= now_ns ||
	       loop_timer_set(paces->loop, &paces->timer, paces->paid_ns);
}

struct list *pace_next(struct paces *paces, uint64_t now_ns)
{
	struct list *session = paces->waiting.next;

	if (list_empty(&paces->waiting))
		return NULL;
	list_remove(session);
	/* What this one asks for has been done, and charged, when the timer expires again. */
	if (!list_empty(&paces->waiting))
		(void)loop_timer_set(paces->loop, &paces->timer, now_ns);
	return session;
}
