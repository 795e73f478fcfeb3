/*
 * Which servers of a job are in its placement. move.c and add.c change that. Control thread.
 */
#include "agent/job/job.h"

bool agent_placement_has(const struct agent_job *job, size_t server)
{
	if (!job->placement.moves)
		return true;
	return server < job->fleet.n_viewed
		       ? !(job->placement.moves[server] & 1)
		       : !(job->placement.added.servers[server - job->fleet.n_viewed].moves & 1);
}
