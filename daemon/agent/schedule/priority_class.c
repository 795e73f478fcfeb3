/*
 * Priority classes (levels) of a job's tensors, made anew when a step begins. round.c asks for a
 * round's class, scheduler.c and send_queue.c order by classes.
 */
#include "agent/schedule/priority_class.h"
#include "agent/schedule/scheduler.h"

/*
 * Nodes that each go over to a more urgent tensor the moment it comes have sent different parts of
 * the one before, and no part has a sum before all nodes have sent it. Where gradients come faster
 * than the link takes them that goes on throughout the backward pass, and at its end most sums are
 * still to come. So what is about equally urgent is one level, and goes in the order of submission,
 * which is the same on every node. An urgent tensor waits for a LEVELS-th of a step's bytes at
 * most; a large one is a level of its own.
 */

#define LEVELS 8

static int more_urgent(const void *a, const void *b)
{
	const struct priority_class *left = *(struct priority_class *const *)a,
				    *right = *(struct priority_class *const *)b;

	return (left->priority < right->priority) - (left->priority > right->priority);
}

void priority_class_make(struct priority_class **levels, size_t n)
{
	uint64_t all = 0, here = 0;
	int32_t level = 0;

	qsort(levels, n, sizeof(*levels), more_urgent);
	for (size_t i = 0; i < n; i++)
		all += levels[i]->bytes;
	for (size_t i = 0, next; i < n; i = next) {
		uint64_t bytes = 0;

		for (next = i; next < n && levels[next]->priority == levels[i]->priority; next++)
			bytes += levels[next]->bytes;
		if (!i || here + bytes > all / LEVELS) {
			here = 0;
			level = levels[i]->priority;
		}
		here += bytes;
		for (size_t k = i; k < next; k++)
			levels[k]->priority_class = level;
	}
}

/* -- Of a job ---------------------------------------------------------------------------------- */

static void end_pass(struct agent_job *job)
{
	job->schedule.n_urgent_rounds = 0;
	job->schedule.pass_is_counted = false;
	job->schedule.n_passes++;
	agent_schedule_sort(job);
}

static void make(struct agent_job *job)
{
	struct priority_class **levels =
		calloc(job->schedule.n_leveled, sizeof(struct priority_class *));
	struct map_entry *entry;
	size_t n = 0;

	/* Exact priorities do as well, and slower. */
	if (!levels)
		return;
	map_for_each (entry, &job->tensors.by_name) {
		struct agent_tensor *tensor = container_of(entry, struct agent_tensor, entry);

		if (tensor->priority_class.known)
			levels[n++] = &tensor->priority_class;
	}
	priority_class_make(levels, n);
	job->schedule.urgent_priority = levels[0]->priority;
	for (job->schedule.n_urgent = 0; job->schedule.n_urgent < n; job->schedule.n_urgent++)
		if (levels[job->schedule.n_urgent]->priority != job->schedule.urgent_priority)
			break;
	free(levels);
	job->schedule.classes_stale = false;
	end_pass(job);
}

/*
 * A backward pass is over with the tensors that are needed first: nothing comes any more that could
 * overtake, and all nodes know it at the same place of their order. So what is left of each level
 * goes by priority then: the forward pass needs it like that. Of the tensors that are as urgent
 * some may have come but once, like a variable that was broadcast, or come now and then: where one
 * comes a second time before the others, those do not come. One that was not there when as many had
 * come as were to, and comes before any of them does again, is to come from then on.
 */
static void count_pass(struct agent_round *round)
{
	struct agent_job *job = round->job;
	struct priority_class *level = &round->tensor->priority_class;
	/* Where all are alike there is nothing to sort. */
	bool urgent = job->schedule.n_urgent && job->schedule.n_urgent < job->schedule.n_leveled &&
		      round->turn.priority == job->schedule.urgent_priority;

	if (urgent && level->urgent_pass == job->schedule.n_passes + 1) {
		job->schedule.n_urgent = job->schedule.n_urgent_rounds;
		end_pass(job);
	}
	round->turn.pass = job->schedule.n_passes;
	if (!urgent)
		return;
	if (job->schedule.pass_is_counted && level->urgent_pass != job->schedule.n_passes) {
		level->urgent_pass = job->schedule.n_passes;
		round->turn.pass--;
		job->schedule.n_urgent++;
		return;
	}
	job->schedule.pass_is_counted = false;
	level->urgent_pass = job->schedule.n_passes + 1;
	if (++job->schedule.n_urgent_rounds < job->schedule.n_urgent)
		return;
	end_pass(job);
	job->schedule.pass_is_counted = true;
}

void agent_priority_class_gone(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	if (!tensor->priority_class.known)
		return;
	tensor->priority_class.known = false;
	job->schedule.n_leveled--;
	job->schedule.classes_stale = true;
}

/*
 * Made again when a step begins: when a tensor comes once more, and as many rounds have begun as
 * there are tensors. So it takes little of a round's time, also where priorities change all the
 * time.
 */
void agent_priority_class_set(struct agent_round *round, uint64_t bytes)
{
	struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;
	struct priority_class *level = &tensor->priority_class;

	job->schedule.n_class_rounds++;
	if (!level->known || level->priority != round->turn.priority) {
		job->schedule.n_leveled += !level->known;
		*level = (struct priority_class){ .priority = round->turn.priority,
						  .priority_class = round->turn.priority,
						  .bytes = bytes,
						  .known = true };
		job->schedule.classes_stale = true;
	} else if (job->schedule.classes_stale &&
		   job->schedule.n_class_rounds > job->schedule.n_leveled) {
		job->schedule.n_class_rounds = 0;
		make(job);
	}
	round->turn.priority_class = level->priority_class;
	count_pass(round);
}
