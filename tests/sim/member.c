/* The source of members: a list that is the same for all, as a file would say it. */
#include "sim.h"

#define ANSWER_NS (2 * NSEC_PER_MSEC)

struct cluster {
	struct loop *loop;
	struct view *view;
};

static void on_timer(struct loop_timer *timer)
{
	struct cluster_query *query = container_of(timer, struct cluster_query, timer);
	const struct cluster *cluster = query->private;

	query->done(query, cluster->view, NULL);
}

struct cluster *member_new(struct loop *loop, const char *self)
{
	struct cluster *cluster = calloc(1, sizeof(*cluster));
	struct view_member members[SIM_NODES];

	memcpy(members, world->members, sizeof(members));
	for (unsigned i = 0; i < world->n_nodes; i++)
		members[i].is_self = !strcmp(members[i].name, self);
	if (!cluster || view_new(1, members, world->n_nodes, &cluster->view))
		abort();
	cluster->loop = loop;
	return cluster;
}

struct cluster *member_free(struct cluster *cluster)
{
	if (!cluster)
		return NULL;
	(void)view_unref(cluster->view);
	free(cluster);
	return NULL;
}

void cluster_open_job(struct cluster *cluster, struct cluster_query *query)
{
	query->private = cluster;
	query->timer = (struct loop_timer){ .expired = on_timer };
	(void)loop_timer_set(cluster->loop, &query->timer,
			     world->now_ns + rng_below(&world->net, ANSWER_NS));
}

void cluster_cancel(struct cluster *cluster, struct cluster_query *query)
{
	(void)cluster;
	loop_timer_cancel(&query->timer);
}

void cluster_close_job(struct cluster *cluster, const char *job, uint64_t owner)
{
	(void)cluster;
	(void)job;
	(void)owner;
}

struct view *cluster_view(struct cluster *cluster)
{
	return cluster->view;
}

struct view *cluster_view_of(struct cluster *cluster, uint32_t epoch)
{
	return cluster->view->epoch == epoch ? cluster->view : NULL;
}
