/* A file that is the same on every node. Read at the start and on cluster_reload(). */
#include "cluster/cluster_file.h"
#include "cluster/source.h"

#include <stdio.h>
#include <xxhash.h>

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct view_member *)a)->name, ((const struct view_member *)b)->name);
}

/*
 * Counting reloads would let two nodes with one file disagree about the number of their view, so the number is made of
 * the list itself. It is never compared with another but for equality.
 */
static uint32_t epoch_of(const struct view_member *members, size_t n_members)
{
	uint32_t epoch = 0;

	for (size_t i = 0; i < n_members; i++) {
		const struct view_member *m = &members[i];
		char line[sizeof(m->name) + sizeof(m->address) + 32];
		int len = snprintf(line, sizeof(line), "%s %s %u %u\n", m->name, m->address,
				   m->roles, m->bandwidth_mbps);

		epoch = XXH32(line, (size_t)len, epoch);
	}
	return epoch ? epoch : 1;
}

static int no_self(struct cluster *cluster, const struct view_member *members, size_t n_members,
		   struct failure *failure)
{
	char names[160] = "";
	size_t at = 0;

	for (size_t i = 0; i < n_members && at < sizeof(names); i++) {
		int n = snprintf(names + at, sizeof(names) - at, "%s%s", i ? ", " : "",
				 members[i].name);

		at += n > 0 ? (size_t)n : 0;
	}
	return failure_set(
		failure, -ENOENT,
		"%s: no [node %s], which is this node: add it, or set the option node to "
		"one of %s%s",
		cluster->params.file, cluster->params.self.name, names,
		at >= sizeof(names) ? "..." : "");
}

static int find_self(struct cluster *cluster, struct view_member *members, size_t n_members,
		     struct failure *failure)
{
	const struct view_member *self = &cluster->params.self;

	for (size_t i = 0; i < n_members; i++) {
		if (strcmp(members[i].name, self->name))
			continue;
		if (members[i].roles & ~self->roles)
			return failure_set(failure, -EINVAL,
					   "%s: node %s is %s there, and this daemon's option "
					   "roles says it is "
					   "not: make them agree",
					   cluster->params.file, self->name,
					   members[i].roles & ~self->roles & ROLE_SERVER
						   ? "a server"
						   : "an agent");
		members[i].is_self = true;
		return 0;
	}
	return no_self(cluster, members, n_members, failure);
}

static int load(struct cluster *cluster, struct failure *failure)
{
	_cleanup_(freep) struct view_member *members = NULL;
	_cleanup_(view_unrefp) struct view *view = NULL;
	size_t n_members;
	uint32_t epoch;
	int r;

	r = cluster_file_read(cluster->params.file, failure, &members, &n_members);
	if (r)
		return error_trace(r);
	r = find_self(cluster, members, n_members, failure);
	if (r)
		return error_trace(r);
	qsort(members, n_members, sizeof(*members), by_name);
	epoch = epoch_of(members, n_members);
	if (cluster->view && cluster->view->epoch == epoch)
		return 0;
	view = cluster_view_of(cluster, epoch);
	if (view)
		view_ref(view);
	r = view ? 0 : view_new(epoch, members, n_members, &view);
	if (r)
		return failure_set(failure, r, "%s: %s", cluster->params.file, strerror(-r));
	return cluster_set_view(cluster, view, failure);
}

static void static_close(struct cluster *cluster)
{
}

static void static_explain(const struct cluster_job *job, struct failure *failure)
{
	char servers[256];

	cluster_describe_servers(job->cluster->view, cluster_job_min_servers(job), servers,
				 sizeof(servers));
	(void)failure_set(failure, -ETIMEDOUT, "job %s: %s in %s", job->name, servers,
			  job->cluster->params.file);
}

const struct source_ops source_static = {
	.start = load,
	.close = static_close,
	.free = static_close,
	.reload = load,
	.want = cluster_local_want,
	.drop = cluster_local_drop,
	.explain = static_explain,
};
