/* This daemon alone: one view, with every role, and no address to be reached at. */
#include "cluster/source.h"

static int single_start(struct cluster *cluster, struct failure *failure)
{
	struct view_member self = cluster->params.self;
	struct view *view;
	int r;

	self.roles = ROLE_AGENT | ROLE_SERVER | ROLE_COORDINATOR;
	self.address[0] = 0;
	r = view_new(1, &self, 1, &view);
	if (r)
		return failure_set(failure, r, "cluster: %s", strerror(-r));
	r = cluster_set_view(cluster, view, failure);
	view_unref(view);
	return r;
}

static void single_close(struct cluster *cluster)
{
}

/* Waiting would not bring another server. */
static void single_want(struct cluster_job *job)
{
	struct failure failure = { 0 };
	uint32_t wanted = cluster_job_min_servers(job);

	if (wanted <= 1) {
		cluster_local_want(job);
		return;
	}
	(void)failure_set(&failure, -ENOENT,
			  "job %s: %u servers are wanted, and this daemon is alone: set cluster to "
			  "static or coordinator in its configuration",
			  job->name, wanted);
	cluster_job_failed(job, &failure);
}

static void single_explain(const struct cluster_job *job, struct failure *failure)
{
	(void)failure_set(failure, -ETIMEDOUT, "job %s: timeout before it was opened", job->name);
}

const struct source_ops source_single = {
	.start = single_start,
	.close = single_close,
	.free = single_close,
	.want = single_want,
	.drop = cluster_local_drop,
	.explain = single_explain,
};
