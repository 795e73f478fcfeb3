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
	list_init(&paces->waiting);
}

struct pace *pace_get(struct paces *paces, uint32_t uid)
{
	struct map_entry *entry = map_find(&paces->map, uid);
	struct pace *pace;

	if (entry) {
		pace = container_of(entry, struct pace, entry);
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

struct pace *pace_put(struct pace *pace)
{
	struct paces *paces;

	if (!pace || --pace->refs)
		return NULL;
	paces = pace->paces;
	map_remove(&paces->map, &pace->entry);
	free(pace);
	if (paces->map.n_entries)
		return NULL;
	map_done(&paces->map);
	loop_timer_cancel(&paces->timer);
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

int pace_wait(struct pace *pace, struct list *session)
{
	struct paces *paces = pace->paces;
	int r = paces->timer.loop ? 0 : loop_timer_set(paces->loop, &paces->timer, paces->paid_ns);

	if (!r)
		list_push_back(&paces->waiting, session);
	return error_trace(r);
}

struct list *pace_next(struct paces *paces, uint64_t now_ns)
{
	struct list *session = paces->waiting.next;

	if (list_empty(&paces->waiting))
		return NULL;
	/* What the next session asks for has been done, and paid for, when the timer expires again. Without memory all go on. */
	if (paces->paid_ns > now_ns && !loop_timer_set(paces->loop, &paces->timer, paces->paid_ns))
		return NULL;
	list_remove(session);
	if (!list_empty(&paces->waiting))
		(void)loop_timer_set(paces->loop, &paces->timer, now_ns);
	return session;
}
