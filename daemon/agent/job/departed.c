/*
 * Nodes leave in good order: bps-recovery(7), NODES THAT LEAVE. Servers hear it from the node itself, and the other nodes from
 * servers: they say it to a server that may be another process since, which would wait for that node.
 */
#include <inttypes.h>

#include "agent/round/part.h"
#include "base/log.h"

/* How many servers tell the other nodes. Two, as one may be lost just then. */
#define TELLERS 2

bool agent_departed_has(const struct agent_job *job, uint32_t node)
{
	return job->departed.nodes && job->departed.nodes[node];
}

/* Of an elastic job the ledger has who is out of it, which is said in other words: elastic.c. */
static bool is_recorded(const struct agent_job *job)
{
	return job->resumption.ledger && !job->shape.elastic;
}

int agent_departed_init(struct agent_job *job)
{
	const uint32_t *node_of_rank = job->layout.node_of_rank;

	job->departed.nodes = calloc(job->shape.n_nodes, sizeof(job->departed.nodes[0]));
	if (!job->departed.nodes)
		return error_origin(-ENOMEM);
	for (uint32_t rank = 0;
	     job->resumption.resumed && is_recorded(job) && rank < job->shape.size; rank++)
		if (node_of_rank[rank] != job->shape.node &&
		    ledger_out(job->resumption.ledger, rank))
			job->departed.nodes[node_of_rank[rank]] = true;
	return 0;
}

static void tell(const struct agent_job *job, size_t server, uint32_t node)
{
	struct peer *peer = job->agent->hooks->servers.peer_of(job, server);
	struct data_header header = {
		.op = DATA_LEFT,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->placement.data_epoch,
		.departed_node = node,
	};

	if (peer && peer_notice(peer, &header, NULL))
		log_warning("job %s: no memory to tell %s that node %u has left", job->owner.name,
			    peer_name(peer), node);
}

bool agent_departed_again(const struct agent_job *job, size_t server, uint32_t node)
{
	if (!agent_departed_has(job, node))
		return false;
	tell(job, server, node);
	return true;
}

void agent_departed_heard(struct agent_job *job, uint64_t node)
{
	bool was_first;

	if (!job->retention.keeps || !job->layout.size || job->state == JOB_OVER ||
	    node >= job->shape.n_nodes || node == job->shape.node || job->departed.nodes[node])
		return;
	log_info("job %s: node %" PRIu64 " has left", job->owner.name, node);
	was_first = agent_elastic_is_first(job);
	job->departed.nodes[node] = true;
	for (uint32_t rank = 0; is_recorded(job) && rank < job->shape.size; rank++)
		if (job->layout.node_of_rank[rank] == node)
			ledger_set_out(job->resumption.ledger, rank, 1);
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (job->fleet.servers[i].attached &&
		    agent_server_may_be_fresh(&job->fleet.servers[i]))
			tell(job, i, (uint32_t)node);
	/* It is for the first node to ask servers in. */
	if (!was_first && agent_elastic_is_first(job))
		job->agent->hooks->servers.look(job);
}

void agent_departed_tell_idle(struct peer *peer, uint64_t number, uint32_t node)
{
	struct data_header header = { .op = DATA_IDLE, .job = number, .node = node };

	/* Without memory for it, the server waits in vain, and not for long. */
	(void)peer_notice(peer, &header, NULL);
}

/* No round has contributions of this node and no result. */
static bool is_idle(struct agent_job *job)
{
	if (job->state == JOB_OVER)
		return true;
	return job->state == JOB_RUNNING && !job->n_busy && agent_resume_caught_up(job);
}

void agent_departed_idle(struct agent_job *job)
{
	if (!job->sweep.tells_idle || !is_idle(job))
		return;
	job->sweep.tells_idle = false;
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		struct agent_server *server = &job->fleet.servers[i];

		if (server->stopping && server->send_queue && !server->send_queue->lost)
			agent_departed_tell_idle(server->send_queue->peer, job->number,
						 job->shape.node);
		server->stopping = false;
	}
}

void agent_departed_stopping(struct agent_job *job, const struct peer *peer)
{
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (job->fleet.servers[i].send_queue &&
		    job->fleet.servers[i].send_queue->peer == peer)
			job->fleet.servers[i].stopping = job->sweep.tells_idle = true;
	agent_departed_idle(job);
}

/* tells: the server is to tell the other nodes. */
static void say(const struct agent_job *job, struct peer *peer, bool tells)
{
	struct data_header header = {
		.op = DATA_LEAVE,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->fleet.servers ? job->placement.data_epoch : 0,
		.tells_others = tells,
	};

	if (peer_notice(peer, &header, NULL))
		log_warning("job %s: no memory to tell %s that its ranks have left",
			    job->owner.name, peer_name(peer));
}

void agent_departed_asked(const struct agent_job *job, struct peer *peer)
{
	say(job, peer, false);
}

void agent_departed_say(struct agent_job *job)
{
	uint32_t n = 0;

	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		size_t server = (job->fleet.home_number + i) % job->fleet.n_servers;
		struct peer *peer = job->agent->hooks->servers.peer_of(job, server);

		if (peer)
			say(job, peer,
			    job->retention.keeps && job->fleet.servers[server].attached &&
				    n++ < TELLERS);
	}
}
