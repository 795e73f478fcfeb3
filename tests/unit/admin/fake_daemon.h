/* A daemon of which only the admin side is real: what it reports is made up here. */
#pragma once

#include "admin/admin.h"
#include "base/metrics.h"
#include "test.h"

#include <stdio.h>

struct fake_daemon {
	struct loop *loop;
	struct rpc *rpc;
	struct admin *admin;
	struct metric metric, time;
	bool sick;
	size_t n_tensors;
	char path[96], target[112];
	struct failure failure;
};

static inline int fake_status(void *user, struct admin_status *ret_status)
{
	*ret_status = (struct admin_status){
		.software = "bps-daemon 9.9",
		.node = "node-a",
		.state = "ready",
		.source = "static",
		.id = 0xfedcba9876543210,
		.uptime_ms = 3723000,
		.bytes_held = 5,
		.bytes_in = 1536,
		.bytes_out = 3ull << 40,
		.n_requests = 17,
		.n_failed = 2,
		.roles = 3,
		.epoch = 7,
		.n_sessions = 4,
		.n_jobs = 1,
	};
	return 0;
}

static inline int fake_nodes(void *user, uint32_t *ret_epoch, struct admin_node **ret_nodes,
			     size_t *ret_n)
{
	struct admin_node *nodes = calloc(2, sizeof(*nodes));

	if (!nodes)
		return -ENOMEM;
	nodes[0] = (struct admin_node){
		.name = "node-a", .address = "10.0.0.1:9690", .link = "self", .roles = 3, .id = 1
	};
	nodes[1] = (struct admin_node){ .name = "evil\033[2J\xff",
					.link = "connected",
					.roles = 1,
					.bandwidth_mbps = 25000,
					.bytes_in = 1000,
					.bytes_out = 999 };
	*ret_epoch = 7;
	*ret_nodes = nodes;
	*ret_n = 2;
	return 0;
}

static const struct admin_job fake_the_job = {
	.name = "resnet",
	.state = "running",
	.role = "agent,server",
	.waiting_for = "rank 3 (tensor layer1.weight, round 17) for 2.1 s",
	.number = 99,
	.rounds = 17,
	.bytes = 1 << 20,
	.in_flight = 2,
	.size = 4,
	.n_nodes = 2,
	.n_local = 2,
};

static inline int fake_jobs(void *user, struct admin_job **ret_jobs, size_t *ret_n)
{
	struct admin_job *jobs = malloc(sizeof(*jobs));

	if (!jobs)
		return -ENOMEM;
	*jobs = fake_the_job;
	*ret_jobs = jobs;
	*ret_n = 1;
	return 0;
}

static inline int fake_job(void *user, const char *name, struct admin_job_parts *parts)
{
	struct fake_daemon *f = user;

	if (strcmp(name, fake_the_job.name))
		return -ENOENT;
	parts->ranks = calloc(2, sizeof(*parts->ranks));
	parts->tensors = calloc(f->n_tensors + 1, sizeof(*parts->tensors));
	parts->arrivals = calloc(1, sizeof(*parts->arrivals));
	if (!parts->ranks || !parts->tensors || !parts->arrivals)
		return -ENOMEM;
	parts->ranks[0] = (struct admin_rank){ .rank = 0,
					       .pid = 1234,
					       .state = "here",
					       .n_requests = 17,
					       .n_pending = 1,
					       .n_regions = 5 };
	parts->ranks[1] = (struct admin_rank){ .rank = 3, .node = 1, .state = "missing" };
	for (size_t i = 0; i < f->n_tensors; i++) {
		parts->tensors[i] = (struct admin_tensor){ .key = i + 1,
							   .elements = 64,
							   .dtype = 2,
							   .last = "rank 3, 97 %",
							   .spread_us = 1500 };
		memset(parts->tensors[i].name, 'w', 200);
	}
	parts->arrivals[0] = (struct admin_arrival){ .who = "rank 3",
						     .rounds = 100,
						     .last = 97,
						     .late_us = 2500,
						     .held_ms = 3100,
						     .is_late = true };
	parts->job = fake_the_job;
	parts->n_ranks = 2;
	parts->n_tensors = parts->total_tensors = f->n_tensors;
	parts->n_arrivals = 1;
	return 0;
}

static inline bool fake_healthy(void *user)
{
	return !((struct fake_daemon *)user)->sick;
}

static inline void fake_drain(void *user, const char *node, struct admin_drain *drain)
{
	if (((struct fake_daemon *)user)->sick)
		drain->done(drain, -EACCES, "sick", 0, 0);
	else
		drain->done(drain, 0, NULL, 2, node ? 3 : 1);
}

static inline void fake_start(struct fake_daemon *f)
{
	static const struct admin_ops ops = { .status = fake_status,
					      .nodes = fake_nodes,
					      .jobs = fake_jobs,
					      .job = fake_job,
					      .healthy = fake_healthy,
					      .drain = fake_drain };

	*f = (struct fake_daemon){ .n_tensors = 2 };
	ASSERT_OK(loop_new(&f->loop));
	ASSERT_OK(rpc_new(f->loop, &f->rpc));
	ASSERT_OK(admin_new(f->rpc, &ops, f, &f->admin));
	(void)snprintf(f->path, sizeof(f->path), "%s/admin.sock", test_dir());
	(void)snprintf(f->target, sizeof(f->target), "unix:%s", f->path);
	ASSERT_OK(rpc_listen_unix(f->rpc, f->path, NULL, -1, &f->failure));
	f->metric = (struct metric){ .name = "bps_things_total", .help = "Things." };
	metric_register(&f->metric);
	metric_add(&f->metric, 42);
	f->time = (struct metric){ .name = "bps_spent_total", .help = "Time.", .is_time = true };
	metric_register(&f->time);
	metric_add(&f->time, 1500000000);
}

/* In the daemon's order: admin goes before the rpc that it answers on. */
static inline void fake_stop(struct fake_daemon *f)
{
	metric_unregister(&f->time);
	metric_unregister(&f->metric);
	rpc_close(f->rpc);
	admin_free(f->admin);
	rpc_free(f->rpc);
	loop_free(f->loop);
}
