/*
 * Newcomers of an elastic job on nodes that have no rank in it: bps-recovery(7), ELASTIC JOBS. Such a node, a joiner, tells the
 * job's home how many wait there. The home tells the job's nodes, which tell their ranks with the next barrier, and takes
 * joiners in when the ranks regroup: regroup.c. Control thread only.
 */
#include "base/log.h"
#include "server/job/job.h"

static struct joiner *find(const struct job *job, const struct peer *peer)
{
	struct joiner *joiner;

	list_for_each (joiner, &job->membership.joiners, link)
		if (joiner->peer == peer)
			return joiner;
	return NULL;
}

void joiner_free(struct joiner *joiner)
{
	list_remove(&joiner->link);
	peer_release(joiner->peer);
	(void)join_free(joiner->join);
	(void)held_free(joiner);
}

static void forget(struct joiner *joiner, int status, const char *text)
{
	delivery_fail(joiner->joining, status, text);
	joiner_free(joiner);
}

static uint32_t count(const struct job *job)
{
	const struct joiner *joiner;
	uint64_t n = 0;

	list_for_each (joiner, &job->membership.joiners, link)
		n += joiner->join->newcomers;
	return (uint32_t)MIN(n, (uint64_t)JOB_RANKS_MAX);
}

static void tell(const struct job *job, struct peer *peer, uint32_t n)
{
	struct data_header header = {
		.op = DATA_NEWCOMERS,
		.job = job->number,
		.epoch = job->placement.data_epoch,
		.n_newcomers = n,
	};

	/* Without memory a node hears of it with the next that comes or goes. */
	(void)peer_notice(peer, &header, NULL);
}

void joiner_tell(const struct job *job, struct peer *peer)
{
	tell(job, peer, count(job));
}

static void tell_all(const struct job *job)
{
	uint32_t n = count(job);

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (job->nodes[i].peer && !job->nodes[i].departed)
			tell(job, job->nodes[i].peer, n);
}

static struct job *find_job(struct server *server, const struct join *join)
{
	struct job *job, *next;

	list_for_each_safe (job, next, &server->jobs, link)
		if (job->state == JOB_RUNNING && job->home && job->membership.elastic &&
		    job->retention.resume && job_is(job, join->job, join->secret_digest) &&
		    !successor_of(server, job->number) && job_heard(job))
			return job;
	return NULL;
}

/* A daemon whose ranks are in the job lets its newcomers in itself. */
static bool is_member(const struct job *job, const struct peer *peer)
{
	uint32_t node = job_node_of(job, peer);

	return node != NODE_NONE && !job->nodes[node].out && !job->nodes[node].departed;
}

static int joiner_new(struct job *job, struct peer *peer, struct joiner **ret_joiner)
{
	struct joiner *joiner = held_new(job_memory(job), sizeof(*joiner));

	if (!joiner)
		return error_origin(-errno);
	joiner->peer = peer;
	peer_hold(peer);
	list_push_back(&job->membership.joiners, &joiner->link);
	*ret_joiner = joiner;
	return 0;
}

void joiner_join(struct server *server, struct join *given, struct delivery *delivery)
{
	_cleanup_(join_freep) struct join *join = given;
	struct job *job = find_job(server, join);
	struct joiner *joiner = job ? find(job, delivery->peer) : NULL;

	if (!job || !join->resume || is_member(job, delivery->peer)) {
		refuse(delivery, -ENOENT,
		       "job %s: this server is home to no elastic job of that name and secret that "
		       "this node is not in",
		       join->job);
		return;
	}
	if (successor_tell_joiner(job, join, delivery)) {
		if (joiner)
			forget(joiner, -EALREADY, "a newer join of the same node has come");
		return;
	}
	log_info("job %s: %u newcomers wait on node %s", job->owner.name, join->newcomers,
		 join->node_name);
	if (!join->newcomers) {
		refuse(delivery, -ENOENT, "job %s: its newcomers wait no more", job->owner.name);
		if (joiner)
			forget(joiner, -EALREADY, "a newer join of the same node has come");
	} else if (joiner || !joiner_new(job, delivery->peer, &joiner)) {
		/* One that was here keeps its place. */
		if (joiner->joining)
			delivery_fail(joiner->joining, -EALREADY,
				      "a newer join of the same node has come");
		(void)join_free(joiner->join);
		joiner->join = TAKE_PTR(join);
		joiner->joining = delivery;
	} else {
		refuse(delivery, -ENOMEM, "job %s: out of memory", job->owner.name);
	}
	tell_all(job);
}

bool joiner_is(const struct job *job, const struct peer *peer)
{
	return find(job, peer);
}

void joiner_lost(struct job *job)
{
	struct joiner *joiner, *next;
	bool any = false;

	list_for_each_safe (joiner, next, &job->membership.joiners, link) {
		if (!peer_loss(joiner->peer))
			continue;
		forget(joiner, -ECANCELED, "this node is gone");
		any = true;
	}
	if (any)
		tell_all(job);
}

void joiner_go_on(struct job *job, struct job *old)
{
	struct joiner *joiner;

	while ((joiner = list_first(&old->membership.joiners, struct joiner, link))) {
		list_remove(&joiner->link);
		list_push_back(&job->membership.joiners, &joiner->link);
	}
}

void joiner_end(struct job *job)
{
	bool elsewhere = job->failure.status == -ESHUTDOWN || job->server->closed;
	struct joiner *joiner, *next;
	struct failure over;

	(void)failure_set(&over, elsewhere ? -ESHUTDOWN : -ECANCELED,
			  "job %s has ended, and had not let this newcomer in", job->owner.name);
	list_for_each_safe (joiner, next, &job->membership.joiners, link)
		forget(joiner, over.status, over.text);
}
