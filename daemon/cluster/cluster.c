/*
 * What all sources of members share: the views that are kept, jobs and the queries that wait for
 * a job's view, and the choice of a source. daemon.c and the agent call from above, source_*.c
 * from below.
 */
#include "base/clock.h"
#include "cluster/source.h"
#include "cluster/wire.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>

#define VIEWS_KEPT \
	16 /* that no job is known to run in: a server may be asked for a view that just passed */

#define EPOCH_START 1767225600 /* 2026-01-01 in Unix time */

struct kept {
	struct list link;
	struct view *view;
};

/* Views */

static struct view *view_kept(const struct cluster *cluster, uint32_t epoch)
{
	struct kept *kept;

	list_for_each (kept, &cluster->kept, link)
		if (kept->view->epoch == epoch)
			return kept->view;
	return NULL;
}

static bool view_needed(const struct cluster *cluster, const struct view *view)
{
	struct cluster_job *job;

	list_for_each (job, &cluster->jobs, link)
		if (job->view == view)
			return true;
	for (size_t i = 0; i < cluster->n_in_use; i++)
		if (cluster->in_use[i] == view->epoch)
			return true;
	return view == cluster->view;
}

static void kept_free(struct kept *kept)
{
	list_remove(&kept->link);
	view_unref(kept->view);
	free(kept);
}

static void views_trim(struct cluster *cluster)
{
	struct kept *kept, *next;
	unsigned n = 0;

	list_for_each_safe (kept, next, &cluster->kept, link)
		if (!view_needed(cluster, kept->view) && ++n > VIEWS_KEPT)
			kept_free(kept);
}

int cluster_keep_view(struct cluster *cluster, struct view *view, struct failure *failure)
{
	const struct view *known = view_kept(cluster, view->epoch);
	struct kept *kept;

	if (known && !view_same(known, view))
		return failure_set(failure, -ESTALE,
				   "view %u has %zu members there, and had %zu others before: "
				   "numbers of views have gone backwards",
				   view->epoch, view->n_members, known->n_members);
	if (known)
		return 0;
	kept = malloc(sizeof(*kept));
	if (!kept)
		return failure_set(failure, -ENOMEM, "view %u: out of memory", view->epoch);
	kept->view = view_ref(view);
	list_push_front(&cluster->kept, &kept->link);
	views_trim(cluster);
	return 0;
}

int cluster_set_view(struct cluster *cluster, struct view *view, struct failure *failure)
{
	int r;

	r = cluster_keep_view(cluster, view, failure);
	if (r)
		return r;
	view_unref(cluster->view);
	cluster->view = view_ref(view);
	views_trim(cluster);
	cluster->params.view_changed(cluster->params.user, view);
	cluster_kick(cluster);
	return 0;
}

uint32_t cluster_first_epoch(void)
{
	time_t now = time(NULL);

	return now > EPOCH_START
		       ? (uint32_t)MIN((uint64_t)(now - EPOCH_START), (uint64_t)WIRE_EPOCH_MAX / 2)
		       : 0;
}

void cluster_set_in_use(struct cluster *cluster, uint32_t *epochs, size_t n_epochs)
{
	free(cluster->in_use);
	cluster->in_use = epochs;
	cluster->n_in_use = n_epochs;
	views_trim(cluster);
}

struct view *cluster_view(struct cluster *cluster)
{
	return cluster->view;
}

struct view *cluster_view_of(struct cluster *cluster, uint32_t epoch)
{
	return view_kept(cluster, epoch);
}

/* Jobs */

static struct cluster_job *job_find(struct cluster *cluster, const char *name, uint64_t owner)
{
	struct cluster_job *job;

	list_for_each (job, &cluster->jobs, link)
		if (job->owner == owner && !strcmp(job->name, name))
			return job;
	return NULL;
}

static int job_new(struct cluster *cluster, const char *name, uint64_t owner,
		   struct cluster_job **ret_job)
{
	struct cluster_job *job = calloc(1, sizeof(*job));

	if (!job)
		return error_origin(-ENOMEM);
	job->cluster = cluster;
	(void)snprintf(job->name, sizeof(job->name), "%s", name);
	job->owner = owner;
	list_init(&job->queries);
	list_push_back(&cluster->jobs, &job->link);
	*ret_job = job;
	return 0;
}

void cluster_job_free(struct cluster_job *job)
{
	struct cluster *cluster = job->cluster;

	assert(list_empty(&job->queries) && !job->busy);
	list_remove(&job->link);
	view_unref(job->view);
	free(job);
	views_trim(cluster);
}

static void job_settle(struct cluster_job *job)
{
	if (!list_empty(&job->queries) || job->handed_out || job->busy || job->dropped)
		return;
	job->dropped = true;
	job->cluster->ops->drop(job);
}

uint32_t cluster_job_min_servers(const struct cluster_job *job)
{
	struct cluster_query *query;
	uint32_t most = 0;

	list_for_each (query, &job->queries, link)
		most = MAX(most, query->min_servers);
	return most;
}

uint64_t cluster_job_remaining_ms(const struct cluster_job *job)
{
	struct cluster_query *query;
	uint64_t now = clock_now_ns(), last = now;

	list_for_each (query, &job->queries, link)
		last = MAX(last, query->timer.at_ns);
	return (last - now) / NSEC_PER_MSEC;
}

/* Unlinked first: its user may do anything when told, free it too. */
static void query_tell(struct cluster_query *query, struct view *view,
		       const struct failure *failure)
{
	list_remove(&query->link);
	loop_timer_cancel(&query->timer);
	query->private = NULL;
	query->done(query, view, failure);
}

static void job_tell(struct cluster_job *job, const struct failure *failure)
{
	job->busy = true;
	while (!list_empty(&job->queries) && (failure || job->view)) {
		if (!failure)
			job->handed_out = true;
		query_tell(list_first(&job->queries, struct cluster_query, link),
			   failure ? NULL : job->view, failure);
	}
	job->busy = false;
	job_settle(job);
}

void cluster_job_opened(struct cluster_job *job, struct view *view)
{
	view_unref(job->view);
	job->view = view_ref(view);
	job_tell(job, NULL);
}

void cluster_job_failed(struct cluster_job *job, const struct failure *failure)
{
	job_tell(job, failure);
}

static void job_look(struct cluster_job *job)
{
	job->pending = false;
	if (list_empty(&job->queries))
		return;
	job->dropped = false;
	if (job->view)
		job_tell(job, NULL);
	else
		job->cluster->ops->want(job);
}

static struct cluster_job *job_pending(struct cluster *cluster)
{
	struct cluster_job *job;

	list_for_each (job, &cluster->jobs, link)
		if (job->pending)
			return job;
	return NULL;
}

static void on_kick(struct loop_source *source, uint32_t events)
{
	struct cluster *cluster = container_of(source, struct cluster, kick);
	struct cluster_job *job;
	uint64_t count;

	(void)!read(source->fd, &count, sizeof(count));
	while (!list_empty(&cluster->refused)) {
		struct failure failure = { 0 };

		(void)failure_set(&failure, -ENOMEM, "out of memory");
		query_tell(list_first(&cluster->refused, struct cluster_query, link), NULL,
			   &failure);
	}
	/* Sought anew each time: whoever is told may open and close jobs. */
	while (!cluster->closed && (job = job_pending(cluster)))
		job_look(job);
}

static void kick(struct cluster *cluster)
{
	uint64_t one = 1;

	(void)!write(cluster->kick.fd, &one, sizeof(one));
}

void cluster_kick(struct cluster *cluster)
{
	struct cluster_job *job;

	list_for_each (job, &cluster->jobs, link)
		job->pending = true;
	kick(cluster);
}

static void on_query_expired(struct loop_timer *timer)
{
	struct cluster_query *query = container_of(timer, struct cluster_query, timer);
	struct cluster_job *job = query->private;
	struct failure failure = { 0 };

	job->cluster->ops->explain(job, &failure);
	job->busy = true;
	query_tell(query, NULL, &failure);
	job->busy = false;
	job_settle(job);
}

void cluster_open_job(struct cluster *cluster, struct cluster_query *query)
{
	struct cluster_job *job = job_find(cluster, query->job, query->owner);
	uint64_t timeout_ms = MIN(query->timeout_ms, (uint64_t)INT32_MAX);
	int r = 0;

	list_init(&query->link);
	query->private = NULL;
	query->timer = (struct loop_timer){ .expired = on_query_expired };
	if (!job)
		r = job_new(cluster, query->job, query->owner, &job);
	if (!r)
		r = loop_timer_set(cluster->params.loop, &query->timer,
				   clock_now_ns() + timeout_ms * NSEC_PER_MSEC);
	if (r) {
		/* Not even a timer could be had; done() must not come before we return. */
		list_push_back(&cluster->refused, &query->link);
		kick(cluster);
		if (job)
			job_settle(job);
		return;
	}
	query->private = job;
	list_push_back(&job->queries, &query->link);
	job->pending = true;
	kick(cluster);
}

void cluster_cancel(struct cluster *cluster, struct cluster_query *query)
{
	struct cluster_job *job = query->private;

	list_remove(&query->link);
	if (!job)
		return;
	loop_timer_cancel(&query->timer);
	query->private = NULL;
	job_settle(job);
}

void cluster_close_job(struct cluster *cluster, const char *name, uint64_t owner)
{
	struct cluster_job *job = job_find(cluster, name, owner);

	if (!job || !job->handed_out)
		return;
	job->handed_out = false;
	job_settle(job);
}

/* Sources that know the list themselves */

void cluster_describe_servers(const struct view *view, uint32_t wanted, char *text, size_t size)
{
	size_t n = view ? view_n_servers(view) : 0;
	int at;

	at = snprintf(text, size, "%u server%s wanted, %zu %s there", wanted,
		      wanted == 1 ? " is" : "s are", n, n == 1 ? "is" : "are");
	for (size_t i = 0; i < n && at > 0 && (size_t)at < size; i++)
		at += snprintf(text + at, size - (size_t)at, "%s%s", i ? ", " : ": ",
			       view_server(view, i)->name);
}

void cluster_local_want(struct cluster_job *job)
{
	struct view *view = job->cluster->view;

	if (view && view_n_servers(view) >= cluster_job_min_servers(job))
		cluster_job_opened(job, view);
}

void cluster_local_drop(struct cluster_job *job)
{
	cluster_job_free(job);
}

/* Life */

int cluster_new(const struct cluster_params *params, struct cluster **ret_cluster)
{
	static const struct {
		const char *name;
		const struct source_ops *ops;
	} sources[] = {
		{ "single", &source_single },
		{ "static", &source_static },
		{ "coordinator", &source_coordinator },
		{ "etcd", &source_etcd },
	};
	_cleanup_(freep) struct cluster *cluster = calloc(1, sizeof(*cluster));
	int r;

	if (!cluster)
		return error_origin(-ENOMEM);
	cluster->params = *params;
	cluster->params.self.is_self = true;
	for (size_t i = 0; i < ARRAY_SIZE(sources); i++)
		if (!strcmp(params->source, sources[i].name))
			cluster->ops = sources[i].ops;
	if (!cluster->ops)
		return error_origin(-EINVAL);
	list_init(&cluster->kept);
	list_init(&cluster->jobs);
	list_init(&cluster->refused);
	cluster->kick.ready = on_kick;
	cluster->kick.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (cluster->kick.fd < 0)
		return error_origin(-errno);
	r = loop_add(params->loop, &cluster->kick, EPOLLIN);
	if (r) {
		fd_close(cluster->kick.fd);
		return error_trace(r);
	}
	*ret_cluster = TAKE_PTR(cluster);
	return 0;
}

int cluster_start(struct cluster *cluster, struct failure *failure)
{
	assert(!cluster->started);
	cluster->started = true;
	return error_trace(cluster->ops->start(cluster, failure));
}

void cluster_close(struct cluster *cluster)
{
	if (cluster->closed)
		return;
	cluster->closed = true;
	if (cluster->started)
		cluster->ops->close(cluster);
}

struct cluster *cluster_free(struct cluster *cluster)
{
	struct cluster_job *job, *next_job;
	struct kept *kept, *next;

	if (!cluster)
		return NULL;
	cluster_close(cluster);
	if (cluster->started)
		cluster->ops->free(cluster);
	list_for_each_safe (job, next_job, &cluster->jobs, link) {
		/* Nobody is told any more. */
		while (!list_empty(&job->queries)) {
			struct cluster_query *query =
				list_first(&job->queries, struct cluster_query, link);

			list_remove(&query->link);
			loop_timer_cancel(&query->timer);
			query->private = NULL;
		}
		view_unref(job->view);
		list_remove(&job->link);
		free(job);
	}
	list_for_each_safe (kept, next, &cluster->kept, link)
		kept_free(kept);
	view_unref(cluster->view);
	free(cluster->in_use);
	loop_remove(&cluster->kick);
	fd_close(cluster->kick.fd);
	free(cluster);
	return NULL;
}

int cluster_reload(struct cluster *cluster, struct failure *failure)
{
	if (cluster->closed || !cluster->started || !cluster->ops->reload)
		return 0;
	return error_trace(cluster->ops->reload(cluster, failure));
}
