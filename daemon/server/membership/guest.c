/*
 * Newcomers of an elastic job on nodes that have no rank in it: bps-recovery(7), ELASTIC JOBS. Such a node, a guest, tells the
 * job's home how many wait there. The home tells the job's nodes, which tell their ranks with the next barrier, and takes
 * guests in when the ranks regroup: regroup.c. Control thread only.
 */
#include "base/log.h"
#include "server/job/job.h"

static struct guest *find(const struct job *job, const struct peer *peer)
{
	struct guest *guest;

	list_for_each (guest, &job->membership.guests, link)
		if (guest->peer == peer)
			return guest;
	return NULL;
}

void guest_free(struct guest *guest)
{
	list_remove(&guest->link);
	(void)join_free(guest->join);
	(void)held_free(guest);
}

static void forget(struct guest *guest, int status, const char *text)
{
	delivery_fail(guest->joining, status, text);
	guest_free(guest);
}

static uint32_t count(const struct job *job)
{
	const struct guest *guest;
	uint64_t n = 0;

	list_for_each (guest, &job->membership.guests, link)
		n += guest->join->newcomers;
	return (uint32_t)MIN(n, (uint64_t)JOB_RANKS_MAX);
}

void guest_tell(const struct job *job, struct peer *peer)
{
	struct data_header header = {
		.op = DATA_NEWCOMERS,
		.job = job->number,
		.epoch = job->placement.data_epoch,
		.n_newcomers = count(job),
	};

	/* Without memory a node hears of it with the next that comes or goes. */
	(void)peer_notice(peer, &header, NULL);
}

static void tell_all(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (job->nodes[i].peer && !job->nodes[i].left)
			guest_tell(job, job->nodes[i].peer);
}

static struct job *find_job(struct server *server, const struct join *join)
{
	struct job *job;

	list_for_each (job, &server->jobs, link)
		if (job->state == JOB_RUNNING && job->home && job->membership.elastic &&
		    job->retention.resume && job_is(job, join->job, join->secret_digest) &&
		    !heir_of(server, job->number))
			return job;
	return NULL;
}

/* A daemon whose ranks are in the job lets its newcomers in itself. */
static bool is_member(const struct job *job, const struct peer *peer)
{
	uint32_t node = job_node_of(job, peer);

	return node != NODE_NONE && !job->nodes[node].out && !job->nodes[node].left;
}

static int guest_new(struct job *job, struct peer *peer, struct guest **ret_guest)
{
	struct guest *guest = held_new(job_memory(job), sizeof(*guest));

	if (!guest)
		return error_origin(-errno);
	guest->peer = peer;
	list_push_back(&job->membership.guests, &guest->link);
	*ret_guest = guest;
	return 0;
}

void guest_join(struct server *server, struct join *given, struct delivery *delivery)
{
	_cleanup_(join_freep) struct join *join = given;
	struct job *job = find_job(server, join);
	struct guest *guest = job ? find(job, delivery->peer) : NULL;

	if (!job || !join->resume || is_member(job, delivery->peer)) {
		refuse(delivery, -ENOENT,
		       "job %s: this server is home to no elastic job of that name and secret that "
		       "this node is not in",
		       join->job);
		return;
	}
	if (heir_tell_guest(job, join, delivery)) {
		if (guest)
			forget(guest, -EALREADY, "a newer join of the same node has come");
		return;
	}
	log_info("job %s: %u newcomers wait on node %s", job->owner.name, join->newcomers,
		 join->node_name);
	if (!join->newcomers) {
		refuse(delivery, -ENOENT, "job %s: its newcomers wait no more", job->owner.name);
		if (guest)
			forget(guest, -EALREADY, "a newer join of the same node has come");
	} else if (guest || !guest_new(job, delivery->peer, &guest)) {
		/* One that was here keeps its place. */
		if (guest->joining)
			delivery_fail(guest->joining, -EALREADY,
				      "a newer join of the same node has come");
		(void)join_free(guest->join);
		guest->join = TAKE_PTR(join);
		guest->joining = delivery;
	} else {
		refuse(delivery, -ENOMEM, "job %s: out of memory", job->owner.name);
	}
	tell_all(job);
}

void guest_lost(struct job *job, const struct peer *peer)
{
	struct guest *guest = find(job, peer);

	if (!guest)
		return;
	forget(guest, -ECANCELED, "this node is gone");
	tell_all(job);
}

void guest_go_on(struct job *job, struct job *old)
{
	struct guest *guest;

	while ((guest = list_first(&old->membership.guests, struct guest, link))) {
		list_remove(&guest->link);
		list_push_back(&job->membership.guests, &guest->link);
	}
}

void guest_end(struct job *job)
{
	bool elsewhere = job->failure.status == -ESHUTDOWN || job->server->closed;
	struct guest *guest, *next;
	struct failure over;

	(void)failure_set(&over, elsewhere ? -ESHUTDOWN : -ECANCELED,
			  "job %s has ended, and had not let this newcomer in", job->owner.name);
	list_for_each_safe (guest, next, &job->membership.guests, link)
		forget(guest, over.status, over.text);
}
