/*
 * Looks into a server for test programs of the agent, which cannot include both modules' headers.
 */
#include "held.h"

#include "server/job/job.h"

size_t held_at(const struct server *server)
{
	const struct job *job = list_first(&server->jobs, struct job, link);
	const struct list *link;
	size_t n = 0;

	for (link = job->store.held.next; link != &job->store.held; link = link->next)
		n++;
	return n;
}

size_t held_tensors_at(const struct server *server)
{
	const struct job *job = list_first(&server->jobs, struct job, link);

	return job->store.tensors.n_entries - job->store.n_mentioned;
}
