/*
 * Notices from the job's home to its nodes, of what one of them has said. ordinal.c and deadlock.c call.
 */
#include "server/job/relay.h"
#include "base/clock.h"
#include "server/job/job.h"

bool relay_may(struct job *job, uint32_t n, uint64_t now_ns)
{
	struct relays *relays = &job->relays;

	if (now_ns - relays->since_ns >= RELAY_NS)
		*relays = (struct relays){ .since_ns = now_ns };
	if (relays->n && relays->n + n > JOB_RANKS_MAX)
		return false;
	relays->n += n;
	return true;
}

void relay_to(const struct job *job, uint32_t node, uint64_t feature,
	      const struct data_header *notice, const void *payload)
{
	const struct job_node *to = &job->nodes[node];
	struct data_header header = *notice;

	header.job = job->number;
	header.node = node;
	/* Without memory: what waits is said again. */
	if (to->peer && !to->departed && peer_has(to->peer, feature))
		(void)peer_notice(to->peer, &header, payload);
}

void relay_to_others(const struct job *job, uint32_t from, uint64_t feature,
		     const struct data_header *notice, const void *payload)
{
	bool each = stragglers_any(&job->stragglers);
	uint64_t walk = job_peers_walk(job);

	(void)job_peer_meet(job, job->nodes[from].peer, walk);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];

		if (i != from && node->peer && !node->departed &&
		    (each || job_peer_meet(job, node->peer, walk)))
			relay_to(job, i, feature, notice, payload);
	}
}
