/*
 * A node's daemon ended after the job was put together, and before any of its ranks could do anything in it: none has brought the
 * job's ledger back, all come by JOIN again. The others run already, and would be wronged by a new job; the node gets what it
 * was told the first time, and attaches with its new number. Control thread only.
 */
#include "server/job/job.h"

void rejoin_end(struct job_node *node, int status, const char *text)
{
	struct delivery *waiting = TAKE_PTR(node->waiting);

	if (waiting)
		delivery_fail(waiting, status, text);
}

/* The ranks that the node has in the job; the join's ascend. */
static bool same_ranks(const struct job *job, const struct join *join)
{
	uint32_t n = 0;

	for (uint32_t rank = 0; rank < job->size; rank++) {
		if (job->node_of_rank[rank] != join->node)
			continue;
		if (n == join->n_ranks || join->ranks[n++] != rank)
			return false;
	}
	return n == join->n_ranks;
}

static bool can_begin(const struct job *job, const struct join *join)
{
	const struct job_node *node = &job->nodes[join->node];

	return job->forming.answer && !node->spoke && !node->departed && !node->out &&
	       join->size == job->size && join->n_nodes == job->n_nodes && same_ranks(job, join);
}

bool rejoin(struct job *job, const struct join *join, struct delivery *delivery)
{
	struct job_node *node = join->node < job->n_nodes ? &job->nodes[join->node] : NULL;
	struct data_header header = {
		.op = DATA_OK,
		.job = job->number,
		.node = join->node,
		.epoch = job->forming.epoch,
	};

	if (!job->retention.resume || !node)
		return false;
	rejoin_end(node, -EALREADY, "a newer join of the same node has come");
	/* Others may be on their way, or come back with the ledger: then this one is taken back. */
	if (join->n_ranks < join->local_size) {
		node->waiting = delivery;
		return true;
	}
	if (!can_begin(job, join))
		return false;
	node->instance = join->instance;
	header.len = (uint32_t)job->forming.answer->len;
	delivery_answer(delivery, &header, job->forming.answer, NULL);
	return true;
}
