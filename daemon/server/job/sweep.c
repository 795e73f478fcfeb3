/*
 * Goes along the lists of a job in bounded steps and calls each object's file by server.c's table:
 * keep.c, rows.c, round.c, accumulate.c, declare.c. job.c begins a sweep for deadlines and the job's end, leave.c,
 * offered.c and quorum.c for news of nodes and results.
 */
#include "server/job/sweep.h"

#include "base/clock.h"
#include "server/job/store.h"

/* A step is so many; */
#define SWEEP_STEP 16
/* each counts once more for so many nodes of its job, all of which may be looked at for it, or answered. */
#define SWEEP_NODES 256
/* and for so many bytes that are given back. */
#define SWEEP_BYTES (UINT64_C(1) << 20)
/* Steps that are made at once. */
#define SWEEP_FIRST 4
/* Each that was looked at puts the next sweep off: about ten times as long as the look takes. */
#define SWEEP_REST_NS NSEC_PER_USEC

static unsigned weight(const struct job *job)
{
	return 1 + job->n_nodes / SWEEP_NODES;
}

/* What is given back is charged no more. */
static unsigned weight_of_freed(const struct job *job, uint64_t held_before)
{
	uint64_t held = quota_used(job->memory.quota);

	return held < held_before ? (unsigned)((held_before - held) / SWEEP_BYTES) : 0;
}

static const struct sweep_stage *stage_of(const struct job *job)
{
	return &job->server->hooks->stages[job->sweep.stage];
}

static struct list *list_here(struct job *job)
{
	return (struct list *)((char *)job + stage_of(job)->list);
}

static void begin(struct job *job)
{
	job->sweep.why = job->sweep.again;
	job->sweep.again = 0;
	job->sweep.stage = 0;
	job->sweep.at = list_here(job)->next;
	job->sweep.n = 0;
	job->sweep.asked = false;
	job->sweep.next_ns = CLOCK_NEVER;
}

/* The next that it comes to, or NULL. */
static struct list *next(struct job *job)
{
	struct sweep *s = &job->sweep;

	while (s->stage < job->server->hooks->n_stages) {
		struct list *link = s->at;

		if (link != list_here(job) && (s->ends || stage_of(job)->why & s->why)) {
			s->at = link->next;
			return link;
		}
		if (++s->stage < job->server->hooks->n_stages)
			s->at = list_here(job)->next;
	}
	return NULL;
}

/* Returns whether there is more. */
static bool step(struct job *job)
{
	uint64_t now_ns = clock_now_ns();
	struct sweep *s = &job->sweep;

	for (unsigned i = 0; i < SWEEP_STEP; i += weight(job)) {
		struct list *link;
		uint64_t held;

		if (job->state == JOB_OVER && !s->ends) {
			s->ends = true;
			begin(job);
		}
		link = next(job);
		if (!link)
			return job->state == JOB_OVER && !s->ends;
		s->n += weight(job);
		held = quota_used(job->memory.quota);
		if (s->ends)
			stage_of(job)->end(job, link);
		else
			stage_of(job)->visit(job, link, now_ns);
		i += weight_of_freed(job, held);
	}
	return true;
}

static void finish(struct job *job)
{
	struct sweep *s = &job->sweep;

	s->going = false;
	if (job->state == JOB_OVER) {
		store_end(job);
	} else {
		s->not_before_ns = s->n > (size_t)SWEEP_STEP * SWEEP_FIRST
					   ? clock_now_ns() + SWEEP_REST_NS * s->n
					   : 0;
		if (s->again)
			sweep_later(job, 0);
		else
			job_wake(job);
	}
	job_let_go(job);
}

static bool on_step(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, sweep.chore);

	if (step(job))
		return true;
	finish(job);
	return false;
}

/* Returns whether it has begun: not where it is going, or has looked at many just now. */
static bool start(struct job *job, unsigned why)
{
	struct sweep *s = &job->sweep;

	s->again |= why;
	if (s->going)
		return false;
	if (job->state != JOB_OVER && s->not_before_ns && clock_now_ns() < s->not_before_ns) {
		/* Without memory it begins with the next of the job's deadlines. */
		(void)job_wake_by(job, s->not_before_ns);
		return false;
	}
	s->going = true;
	s->chore.step = on_step;
	job_hold(job);
	begin(job);
	return true;
}

void sweep(struct job *job, unsigned why)
{
	bool more = true;

	if (!start(job, why))
		return;
	for (unsigned i = 0; i < SWEEP_FIRST && more; i += 1 + weight(job) / SWEEP_STEP)
		more = step(job);
	if (more)
		loop_begin(job->server->params.loop, &job->sweep.chore);
	else
		finish(job);
}

void sweep_later(struct job *job, unsigned why)
{
	if (start(job, why))
		loop_begin(job->server->params.loop, &job->sweep.chore);
}

void sweep_finish(struct job *job)
{
	if (!job->sweep.going)
		return;
	while (step(job))
		;
	loop_abort(&job->sweep.chore);
	finish(job);
}

void sweep_leave(struct job *job, const struct list *link)
{
	if (job->sweep.at == link)
		job->sweep.at = link->next;
}

void sweep_until(struct job *job, uint64_t at_ns)
{
	job->sweep.next_ns = MIN(job->sweep.next_ns, at_ns);
}
