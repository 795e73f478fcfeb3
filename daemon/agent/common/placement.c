/*
 * Which servers of a job are in its placement. move.c and add.c change that. Control thread.
 */
#include "agent/job/job.h"

struct stripes {
	size_t refs;
	uint16_t servers[];
};

static struct stripes *stripes_of(uint16_t *stripes)
{
	return container_of(stripes, struct stripes, servers[0]);
}

uint16_t *agent_stripes_new(size_t n)
{
	struct stripes *stripes = calloc(1, sizeof(*stripes) + n * sizeof(stripes->servers[0]));

	if (!stripes)
		return NULL;
	stripes->refs = 1;
	return stripes->servers;
}

uint16_t *agent_stripes_ref(uint16_t *stripes)
{
	if (stripes)
		stripes_of(stripes)->refs++;
	return stripes;
}

uint16_t *agent_stripes_unref(uint16_t *stripes)
{
	if (stripes && !--stripes_of(stripes)->refs)
		free(stripes_of(stripes));
	return NULL;
}

size_t agent_server_number(const struct agent_server *server)
{
	return (size_t)(server - server->job->fleet.servers);
}

bool agent_server_is_home(const struct agent_server *server)
{
	return agent_server_number(server) == server->job->fleet.home_number;
}

bool agent_server_may_be_fresh(const struct agent_server *server)
{
	return server->job->resumption.resumed || server->attachment > 1;
}

bool agent_placement_has(const struct agent_job *job, size_t server)
{
	if (!job->placement.moves)
		return true;
	return server < job->fleet.n_viewed
		       ? !(job->placement.moves[server] & 1)
		       : !(job->placement.added.servers[server - job->fleet.n_viewed].moves & 1);
}
