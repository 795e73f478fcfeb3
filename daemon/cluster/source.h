/*
 * What the files of this module share: struct cluster (cluster.c) keeps the views, the jobs and those who wait for a
 * job's view; a source says who is there and which view a job runs in. Private to the module.
 */
#pragma once

#include "base/list.h"
#include "cluster/cluster.h"
#include "rpc/rpc.h"

struct cluster;
struct cluster_job;

struct source_ops {
	/* As cluster_start(). */
	int (*start)(struct cluster *cluster, struct failure *failure);
	void (*close)(struct cluster *cluster);
	/* After close; takes what start never ran for. */
	void (*free)(struct cluster *cluster);
	/* Optional. */
	int (*reload)(struct cluster *cluster, struct failure *failure);
	/*
	 * Somebody waits for the job's view: cluster_job_opened() or cluster_job_failed(), now or later. Comes again
	 * for a job that was wanted already.
	 */
	void (*want)(struct cluster_job *job);
	/* Nobody here needs the job any more: cluster_job_free(), now or later unless it is wanted again by then. */
	void (*drop)(struct cluster_job *job);
	/* A query for the job has run out of time: why. */
	void (*explain)(const struct cluster_job *job, struct failure *failure);
};

extern const struct source_ops source_single, source_static, source_coordinator, source_etcd;

struct cluster {
	struct cluster_params params;
	const struct source_ops *ops;
	void *source; /* its own */
	struct view *view;
	struct list kept; /* views, newest first */
	uint32_t *in_use; /* epochs that others' jobs run in */
	size_t n_in_use;
	struct list jobs;
	struct list refused;	 /* queries that there was no memory for */
	struct loop_source kick; /* an eventfd: jobs are to be looked at */
	bool started, closed;
};

struct cluster_job {
	struct list link;
	struct cluster *cluster;
	char name[64];
	uint64_t owner;
	struct view *view; /* once it is known */
	struct list queries;
	bool handed_out; /* the view, to somebody who will close the job */
	bool pending;	 /* to be looked at by the loop */
	bool busy;	 /* being answered: not to be freed */
	bool dropped;	 /* the source has been told so */
	/* The coordinator source's. */
	unsigned state;
	struct rpc_request request;
	/* The etcd source's. */
	struct etcd_job *etcd;
};

/*
 * The source has a newer view. Takes a reference. Returns 0, -ENOMEM, or -ESTALE: another view has had this number, so the
 * numbers have gone backwards, and it is not to be believed.
 */
int cluster_set_view(struct cluster *cluster, struct view *view, struct failure *failure);
/*
 * Where numbers of views begin when nobody is there to say which are used up: where the clock is. One view a second, for as
 * long as they were made before, and it still counts on from there.
 */
uint32_t cluster_first_epoch(void);
/* Keeps an older view for cluster_view_of(). As above. */
int cluster_keep_view(struct cluster *cluster, struct view *view, struct failure *failure);
/* Views that others' jobs run in; epochs is taken over. */
void cluster_set_in_use(struct cluster *cluster, uint32_t *epochs, size_t n_epochs);
/* Looks at all jobs again, from the loop. */
void cluster_kick(struct cluster *cluster);
/* Takes a reference. The job may be gone when it returns. */
void cluster_job_opened(struct cluster_job *job, struct view *view);
void cluster_job_failed(struct cluster_job *job, const struct failure *failure);
void cluster_job_free(struct cluster_job *job);
/* Most that any query of the job asks for. */
uint32_t cluster_job_min_servers(const struct cluster_job *job);
/* Until the last of its queries runs out of time, in milliseconds. */
uint64_t cluster_job_remaining_ms(const struct cluster_job *job);
/* "2 servers are wanted, 1 is there: node-a" */
void cluster_describe_servers(const struct view *view, uint32_t wanted, char *text, size_t size);

/* For sources that know the whole list themselves: a job runs in the newest view that has servers enough. */
void cluster_local_want(struct cluster_job *job);
void cluster_local_drop(struct cluster_job *job);
