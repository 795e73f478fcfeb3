/*
 * What a node has, said once more: servers hold a result until all nodes have said that they have it. A node says so by numbers
 * of the connection on which results came (keep.c), with each push for all rounds before, and, where neither need come, by HAVE.
 */
#include "agent/round/part.h"

/* is_all: not just this one but all up to it, whatever operations they were. */
static void tell(const struct agent_tensor *tensor, const struct agent_server *server,
		 uint64_t round, bool is_all)
{
	const struct agent_job *job = tensor->job;
	struct data_header header = {
		.op = DATA_HAVE,
		.job = job->number,
		.key = tensor->key,
		.round = round,
		.is_all = is_all,
		.epoch = job->placement.data_epoch,
		.node = job->shape.node,
	};

	/* Without memory it holds it until the next round. */
	if (server->attached)
		(void)peer_notice(server->send_queue->peer, &header, NULL);
}

static void tell_all(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;

	for (size_t i = 0; i < job->fleet.n_servers; i++)
		tell(tensor, &job->fleet.servers[i], tensor->acknowledged, true);
}

void agent_acknowledged_rows(struct agent_tensor *tensor, uint64_t round, size_t server)
{
	tensor->rows_acknowledged = round;
	tell(tensor, &tensor->job->fleet.servers[server], round, false);
}

void agent_acknowledged_round(struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;

	/* Where ranks do not wait for each other, each result says whose contributions nodes need no more. */
	if (!job->retention.keeps || round->failure.status || round->rows ||
	    stragglers_any(&job->shape.stragglers))
		return;
	tensor->acknowledged = round->number;
	if (round->gate.uninformed)
		tell_all(tensor);
}

unsigned agent_acknowledged_again(struct agent_tensor *tensor, const struct agent_server *server)
{
	struct agent_round *round;
	unsigned n = 0;

	list_for_each (round, &tensor->rounds, link) {
		round->gate.uninformed = true;
		n++;
	}
	if (tensor->acknowledged)
		tell(tensor, server, tensor->acknowledged, true);
	if (tensor->rows_acknowledged > tensor->acknowledged)
		tell(tensor, server, tensor->rows_acknowledged, false);
	return n;
}

void agent_acknowledged_resumed(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	tensor->acknowledged = agent_resume_newest(tensor);
	if (tensor->acknowledged && !stragglers_any(&job->shape.stragglers))
		tell_all(tensor);
}
