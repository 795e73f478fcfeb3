/*
 * Priority classes of a job's tensors, made anew when a step begins. round.c asks for a
 * round's class, scheduler.c and send_queue.c order by classes.
 */
#include "agent/schedule/priority_class.h"
#include "agent/schedule/scheduler.h"

/*
 * Nodes that each go over to a more urgent tensor the moment it comes have sent different parts of
 * the one before, and no part has a sum before all nodes have sent it. Where gradients come faster
 * than the link takes them that goes on throughout the backward pass, and at its end most sums are
 * still to come. So what is about equally urgent is one class, and goes in the order of submission,
 * which is the same on every node. An urgent tensor waits for a CLASSES-th of a step's bytes at
 * most; a large one is a class of its own.
 */

#define CLASSES 8

static int more_urgent(const void *a, const void *b)
{
	const struct priority_class *left = *(struct priority_class *const *)a,
				    *right = *(struct priority_class *const *)b;

	return (left->priority < right->priority) - (left->priority > right->priority);
}

void priority_class_make(struct priority_class **classes, size_t n)
{
	uint64_t all = 0, here = 0;
	int32_t class = 0;

	qsort(classes, n, sizeof(*classes), more_urgent);
	for (size_t i = 0; i < n; i++)
		all += classes[i]->bytes;
	for (size_t i = 0, next; i < n; i = next) {
		uint64_t bytes = 0;

		for (next = i; next < n && classes[next]->priority == classes[i]->priority; next++)
			bytes += classes[next]->bytes;
		if (!i || here + bytes > all / CLASSES) {
			here = 0;
			class = classes[i]->priority;
		}
		here += bytes;
		for (size_t k = i; k < next; k++)
			classes[k]->priority_class = class;
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
	struct priority_class **classes =
		calloc(job->schedule.n_classed, sizeof(struct priority_class *));
	struct map_entry *entry;
	size_t n = 0;

	/* Exact priorities do as well, and slower. */
	if (!classes)
		return;
	map_for_each (entry, &job->tensors.by_name) {
		struct agent_tensor *tensor = container_of(entry, struct agent_tensor, entry);

		if (tensor->priority_class.known)
			classes[n++] = &tensor->priority_class;
	}
	priority_class_make(classes, n);
	job->schedule.urgent_priority = classes[0]->priority;
	for (job->schedule.n_urgent = 0; job->schedule.n_urgent < n; job->schedule.n_urgent++)
		if (classes[job->schedule.n_urgent]->priority != job->schedule.urgent_priority)
			break;
	free(classes);
	job->schedule.classes_stale = false;
	end_pass(job);
}

/*
 * A backward pass is over with the tensors that are needed first: nothing comes any more that could
 * overtake, and all nodes know it at the same place of their order. So what is left of each class
 * goes by priority then: the forward pass needs it like that. Of the tensors that are as urgent
 * some may have come but once, like a variable that was broadcast, or come now and then: where one
 * comes a second time before the others, those do not come. One that was not there when as many had
 * come as were to, and comes before any of them does again, is to come from then on.
 */
static void count_pass(struct agent_round *round)
{
	struct agent_job *job = round->job;
	struct priority_class *class = &round->tensor->priority_class;
	/* Where all are alike there is nothing to sort. */
	bool urgent = job->schedule.n_urgent && job->schedule.n_urgent < job->schedule.n_classed &&
		      round->turn.priority == job->schedule.urgent_priority;

	if (urgent && class->urgent_pass == job->schedule.n_passes + 1) {
		job->schedule.n_urgent = job->schedule.n_urgent_rounds;
		end_pass(job);
	}
	round->turn.pass = job->schedule.n_passes;
	if (!urgent)
		return;
	if (job->schedule.pass_is_counted && class->urgent_pass != job->schedule.n_passes) {
		class->urgent_pass = job->schedule.n_passes;
		round->turn.pass--;
		job->schedule.n_urgent++;
		return;
	}
	job->schedule.pass_is_counted = false;
	class->urgent_pass = job->schedule.n_passes + 1;
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
	job->schedule.n_classed--;
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
	struct priority_class *class = &tensor->priority_class;

	job->schedule.n_class_rounds++;
	if (!class->known || class->priority != round->turn.priority) {
		job->schedule.n_classed += !class->known;
		*class = (struct priority_class){ .priority = round->turn.priority,
						  .priority_class = round->turn.priority,
						  .bytes = bytes,
						  .known = true };
		job->schedule.classes_stale = true;
	} else if (job->schedule.classes_stale &&
		   job->schedule.n_class_rounds > job->schedule.n_classed) {
		job->schedule.n_class_rounds = 0;
		make(job);
	}
	round->turn.priority_class = class->priority_class;
	count_pass(round);
}
