/*
 * Ranks that are not back after a restart of the daemon: which, and whether their processes still live. A job that is resumed asks
 * by its timer. To look at a process takes some ten microseconds, and whoever brings a ledger says how many ranks there are and
 * which processes they have: jobs are looked at in turns, some ranks at a time, for a tenth of the control thread's time at most.
 */
#include "agent/job/absent.h"

#include "agent/job/job.h"
#include "base/log.h"

/* Ranks of a turn, and how long nobody looks after it: so many times as long as the turn took. */
#define STEP 64
#define REST 10

static bool is_waiting(const struct agent_job *job)
{
	return job->state == JOB_FORMING && job->resumption.resumed && !job->layout.size;
}

/* Ranks from first on that are back, as bits. */
static uint64_t find_here(const struct agent_job *job, uint32_t first)
{
	uint64_t here = 0;

	for (uint32_t i = 0; i < job->shape.local_size; i++)
		if (job->members[i] && job->members[i]->rank - first < STEP)
			here |= UINT64_C(1) << (job->members[i]->rank - first);
	return here;
}

static void look_at(struct agent_job *job, uint32_t rank)
{
	struct agent_absence *absence = &job->resumption.absence;
	enum process_state state;
	uint32_t pid;

	if (ledger_has_departed(job->resumption.ledger, rank) ||
	    (job->resumption.node_of_rank && job->resumption.node_of_rank[rank] != job->shape.node))
		return;
	agent_ranks_add(&absence->all, rank);
	state = ledger_look(job->resumption.ledger, rank, &pid);
	if (state == PROCESS_UNKNOWN)
		agent_ranks_add(&absence->unknown, rank);
	if (state != PROCESS_GONE || absence->gone != RANK_AWAY)
		return;
	absence->gone = rank;
	absence->gone_pid = pid;
}

/* Returns whether it was the last step. */
static bool step(struct agent_job *job)
{
	struct agent_absence *absence = &job->resumption.absence;
	uint32_t first = absence->next, end = MIN(first + STEP, job->shape.size);
	uint64_t here = find_here(job, first);

	for (; absence->next < end; absence->next++)
		if (!(here >> (absence->next - first) & 1))
			look_at(job, absence->next);
	return end == job->shape.size;
}

static void judge(struct agent_job *job)
{
	uint64_t timeout_ns = job->agent->params.resume_timeout_ms * NSEC_PER_MSEC;
	struct agent_absence *absence = &job->resumption.absence;
	struct agent_ranks_text *late = &absence->unknown;
	uint64_t now_ns = clock_now_ns();
	struct failure failure;
	char time[32];

	/* A trainer that computes comes back with its next call: it has as long as for a request. */
	if (!late->n) {
		late = &absence->all;
		timeout_ns = MAX(timeout_ns, job->request_timeout_ns);
	}
	if (absence->gone != RANK_AWAY && job->shape.elastic &&
	    job->shape.size - job->departed.n_before > job->shape.min_ranks) {
		log_notice("job %s: rank %u (pid %u) died while the daemon was away",
			   job->owner.name, absence->gone, absence->gone_pid);
		ledger_leave(job->resumption.ledger, absence->gone);
		job->departed.n_before++;
		(void)loop_timer_set(job->agent->params.loop, &job->sweep.timer, now_ns);
		agent_resume_form(job);
		return;
	}
	if (absence->gone != RANK_AWAY) {
		(void)failure_set(
			&failure, -EPIPE,
			"job %s cannot go on after the daemon's restart: rank %u (pid %u) "
			"died meanwhile",
			job->owner.name, absence->gone, absence->gone_pid);
	} else if (now_ns >= job->resumption.began_ns + timeout_ns) {
		(void)failure_set(
			&failure, -ECONNRESET,
			"job %s cannot go on after the daemon's restart: %s did not come back "
			"within %s",
			job->owner.name, agent_ranks_end(late), agent_time_text(time, timeout_ns));
	} else {
		(void)loop_timer_set(
			job->agent->params.loop, &job->sweep.timer,
			MIN(now_ns + AGENT_ABSENT_NS, job->resumption.began_ns + timeout_ns));
		return;
	}
	agent_job_fail(job, &failure, NULL);
}

static void on_timer(struct loop_timer *timer)
{
	struct agent_absences *absences = container_of(timer, struct agent_absences, timer);
	struct agent_absence *absence = list_first(&absences->waiting, struct agent_absence, link);
	struct agent_job *job = container_of(absence, struct agent_job, resumption.absence);
	struct agent *agent = job->agent;
	uint64_t began_ns = clock_now_ns();

	list_remove(&absence->link);
	if (is_waiting(job) && !step(job)) {
		list_push_back(&absences->waiting, &absence->link);
	} else {
		if (is_waiting(job))
			judge(job);
		agent_job_release(job);
	}
	absences->not_before_ns = clock_now_ns() + REST * (clock_now_ns() - began_ns);
	if (!list_empty(&absences->waiting))
		(void)loop_timer_set(agent->params.loop, timer, absences->not_before_ns);
}

void agent_absent_look(struct agent_job *job)
{
	struct agent_absence *absence = &job->resumption.absence;
	struct agent_absences *absences = &job->agent->absences;

	/* Its servers are waited for: keep.c. */
	if (job->layout.size) {
		(void)loop_timer_set(job->agent->params.loop, &job->sweep.timer,
				     clock_now_ns() + AGENT_ABSENT_NS);
		return;
	}
	if (list_linked(&absence->link))
		return;
	agent_absence_begin(absence);
	agent_job_hold(job);
	list_push_back(&absences->waiting, &absence->link);
	absences->timer.expired = on_timer;
	if (!absences->timer.loop)
		(void)loop_timer_set(job->agent->params.loop, &absences->timer,
				     absences->not_before_ns);
}

void agent_absent_close(struct agent *agent)
{
	struct agent_absence *absence, *next;

	loop_timer_cancel(&agent->absences.timer);
	list_for_each_safe (absence, next, &agent->absences.waiting, link) {
		list_remove(&absence->link);
		agent_job_release(container_of(absence, struct agent_job, resumption.absence));
	}
}
