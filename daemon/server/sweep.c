/*
 * Goes along the lists of a job in bounded steps and calls each object's file: keep.c, rows.c,
 * round.c, accumulate.c, declare.c. job.c begins a sweep for deadlines and the job's end, leave.c,
 * told.c and quorum.c for news of nodes and results.
 */
#include "server/sweep.h"

#include "base/clock.h"
#include "server/accumulate.h"
#include "server/keep.h"
#include "server/round.h"
#include "server/rows.h"
#include "server/store.h"

/* A step is so many. */
#define SWEEP_STEP 16
/* Steps that are made at once. */
#define SWEEP_FIRST 4
/* Each that was looked at puts the next sweep off: about ten times as long as the look takes. */
#define SWEEP_REST_NS NSEC_PER_USEC

/* One of the lists of a job, in the order in which they are gone along. */
struct stage {
	size_t list;  /* where it is in struct job */
	unsigned why; /* what concerns those that are in it */
	void (*visit)(struct job *job, struct list *link, uint64_t now_ns);
	void (*end)(struct job *job,
		    struct list *link); /* the job is over: it goes from the list */
};

static void end_slot(struct job *job, struct list *link)
{
	slot_fail(container_of(link, struct slot, in_job), job->failure.status, job->failure.text);
}

/* Whom it concerns has been answered. */
static void end_answered(struct job *job, struct list *link)
{
	(void)job;
	slot_free(container_of(link, struct slot, in_job));
}

static const struct stage stages[] = {
	{ offsetof(struct job, store.kept), SWEEP_NEWS, keep_visit, end_slot },
	{ offsetof(struct job, store.held), SWEEP_NEWS, rows_visit, end_answered },
	{ offsetof(struct job, store.open), SWEEP_NEWS | SWEEP_TIME, round_visit, end_slot },
	{ offsetof(struct job, store.late), 0, NULL, end_answered },
	{ offsetof(struct job, store.accumulators), SWEEP_NEWS | SWEEP_TIME, accumulate_visit,
	  accumulate_end },
	{ offsetof(struct job, names.declaring), SWEEP_NEWS | SWEEP_TIME, declare_visit,
	  declare_end },
	{ offsetof(struct job, names.declarations), 0, NULL, declaration_end },
	{ offsetof(struct job, store.parts), 0, NULL, part_end },
	{ offsetof(struct job, store.all_tensors), 0, NULL, tensor_end },
};

static struct list *list_of(struct job *job, const struct stage *stage)
{
	return (struct list *)((char *)job + stage->list);
}

static void begin(struct job *job)
{
	job->sweep.why = job->sweep.again;
	job->sweep.again = 0;
	job->sweep.stage = 0;
	job->sweep.at = list_of(job, stages)->next;
	job->sweep.n = 0;
	job->sweep.asked = false;
	job->sweep.next_ns = CLOCK_NEVER;
}

/* The next that it comes to, or NULL. */
static struct list *next(struct job *job)
{
	struct sweep *s = &job->sweep;

	while (s->stage < ARRAY_SIZE(stages)) {
		const struct stage *stage = &stages[s->stage];
		struct list *link = s->at;

		if (link != list_of(job, stage) && (s->ends || stage->why & s->why)) {
			s->at = link->next;
			return link;
		}
		if (++s->stage < ARRAY_SIZE(stages))
			s->at = list_of(job, &stages[s->stage])->next;
	}
	return NULL;
}

/* Returns whether there is more. */
static bool step(struct job *job)
{
	uint64_t now_ns = clock_now_ns();
	struct sweep *s = &job->sweep;

	for (unsigned i = 0; i < SWEEP_STEP; i++) {
		struct list *link;

		if (job->state == JOB_OVER && !s->ends) {
			s->ends = true;
			begin(job);
		}
		link = next(job);
		if (!link)
			return job->state == JOB_OVER && !s->ends;
		s->n++;
		if (s->ends)
			stages[s->stage].end(job, link);
		else
			stages[s->stage].visit(job, link, now_ns);
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
	for (unsigned i = 0; i < SWEEP_FIRST && more; i++)
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
