/*
 * Who speaks for a job's nodes, and what the job hears when one of them is lost.
 */
#include "server/job/peers.h"

#include "server/job/job.h"

/* Jobs of so many nodes together hear in one go that their peers are lost. */
#define HEAR_NODES 4096

struct job_peer *job_peer_find(const struct job *job, const struct peer *peer)
{
	struct map_entry *entry = map_find(&job->peers, (uintptr_t)peer);

	return entry ? container_of(entry, struct job_peer, entry) : NULL;
}

uint32_t job_node_of(const struct job *job, const struct peer *peer)
{
	const struct job_peer *found = job_peer_find(job, peer);

	if (!found)
		return NODE_NONE;
	if (job->nodes[found->node].peer == peer)
		return found->node;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (job->nodes[i].peer == peer)
			return i;
	}
	return NODE_NONE;
}

static int job_peer_new(struct job *job, struct peer *peer, struct job_peer **ret_added)
{
	struct job_peer *added = held_new(job_memory(job), sizeof(*added));
	int r;

	if (!added)
		return error_origin(-errno);
	r = map_add(&job->peers, (uintptr_t)peer, &added->entry);
	if (r) {
		(void)held_free(added);
		return error_trace(r);
	}
	added->peer = peer;
	peer_hold(peer);
	if (peer_loss(peer))
		job_is_to_hear(job);
	*ret_added = added;
	return 0;
}

static void job_peer_free(struct job *job, struct job_peer *gone)
{
	map_remove(&job->peers, &gone->entry);
	peer_release(gone->peer);
	(void)held_free(gone);
}

int job_peer_set(struct job *job, uint32_t node, struct peer *peer)
{
	struct peer **place = &job->nodes[node].peer;
	struct job_peer *from = *place ? job_peer_find(job, *place) : NULL,
			*to = peer ? job_peer_find(job, peer) : NULL;
	int r = peer && !to ? job_peer_new(job, peer, &to) : 0;

	if (r)
		return error_trace(r);
	*place = peer;
	if (to) {
		to->n_nodes++;
		to->node = node;
	}
	if (from && !--from->n_nodes)
		job_peer_free(job, from);
	return 0;
}

uint64_t job_peers_walk(const struct job *job)
{
	return ++job->server->n_walks;
}

bool job_peer_meet(const struct job *job, const struct peer *peer, uint64_t walk)
{
	struct job_peer *met = job_peer_find(job, peer);

	if (!met || met->walk == walk)
		return false;
	met->walk = walk;
	return true;
}

void job_peers_done(struct job *job)
{
	for (uint32_t i = 0; job->nodes && i < job->n_nodes; i++)
		(void)job_peer_set(job, i, NULL);
	map_done(&job->peers);
}

/* -- What jobs hear ---------------------------------------------------------------------------- */

struct job *job_heard(struct job *job)
{
	bool is_over;

	if (likely(!job || !list_linked(&job->to_hear)))
		return job;
	list_remove(&job->to_hear);
	job_hold(job);
	job->server->hooks->peers_lost(job);
	is_over = job->state == JOB_OVER;
	job_let_go(job);
	return is_over ? NULL : job;
}

static bool on_hear(struct chore *chore)
{
	struct server *server = container_of(chore, struct server, hear);
	struct job *job;
	size_t n = 0;

	while (n < HEAR_NODES && (job = list_first(&server->to_hear, struct job, to_hear))) {
		n += job->n_nodes;
		(void)job_heard(job);
	}
	return !list_empty(&server->to_hear);
}

void job_is_to_hear(struct job *job)
{
	struct server *server = job->server;

	if (job->state == JOB_OVER || list_linked(&job->to_hear))
		return;
	list_push_back(&server->to_hear, &job->to_hear);
	server->hear.step = on_hear;
	loop_begin(server->params.loop, &server->hear);
}
