/*
 * Who watches: answers operators over gRPC (proto/admin.proto) and the standard health service. Knows no other module:
 * what it reports is given to it as plain structs by the callback, which daemon.c fills. Control thread only.
 */
#pragma once

#include "base/loop/loop.h"
#include "proto/c.h"
#include "rpc/rpc.h"

struct admin;

struct admin_node {
	char name[64], address[96], link[16];
	char transport[64]; /* "tcp", "rdma mlx5_0"; empty: not connected */
	uint32_t roles, bandwidth_mbps;
	uint64_t id, bytes_in, bytes_out;
};
struct admin_job {
	char name[64], state[16], role[16], waiting_for[160];
	const char *ends; /* why it ends with this daemon's process; NULL: it does not */
	char gpu[200]; /* how bytes go between GPUs here and servers, and why; "": there are none */
	uint64_t number, rounds, bytes, in_flight;
	uint32_t size, n_nodes, n_local;
};
struct admin_rank {
	uint32_t rank, node, pid;
	char state[16];
	uint64_t n_requests, n_pending, bytes_held;
	unsigned n_regions; /* of RDMA */
};
struct admin_tensor {
	char name[256], waiting_for[160];
	uint64_t key, elements, rounds;
	unsigned dtype;
	char last[32]; /* "rank 3, 97 %"; empty: not known */
	uint64_t spread_us;
};
struct admin_arrival {
	char who[32];
	uint64_t rounds, last, late_us, held_ms;
	bool is_late;
};
struct admin_server {
	char name[64], address[96], state[16];
	uint32_t share; /* thousandths */
	bool added;
};
/* Arrays are freed by admin. */
struct admin_job_parts {
	struct admin_job job;
	struct admin_rank *ranks;
	struct admin_tensor *tensors;
	struct admin_arrival *arrivals;
	struct admin_server *servers;
	size_t n_ranks, n_tensors, n_arrivals, n_servers;
	uint64_t total_tensors; /* of which the first are there */
};
struct admin_status {
	char software[64], node[64], state[16], source[16];
	char exposed[512]; /* what strangers could do; empty: nothing that we know of */
	uint64_t id, uptime_ms, bytes_held, bytes_in, bytes_out, n_requests, n_failed;
	uint32_t roles, epoch, n_sessions, n_jobs;
};

/* A question that may take a while, admin's. */
struct admin_drain {
	void (*done)(struct admin_drain *drain, int status, const char *text, uint32_t moved,
		     uint32_t stay);
};

/* Each returns 0, -ENOENT (no such job) or -ENOMEM; arrays are freed by admin. */
struct admin_ops {
	int (*status)(void *user, struct admin_status *ret_status);
	int (*nodes)(void *user, uint32_t *ret_epoch, struct admin_node **ret_nodes, size_t *ret_n);
	int (*jobs)(void *user, struct admin_job **ret_jobs, size_t *ret_n);
	/* parts: zeroed; what is there after a failure is freed, too. */
	int (*job)(void *user, const char *name, struct admin_job_parts *parts);
	bool (*healthy)(void *user);
	/*
	 * Jobs that a daemon sums for go on with other servers. node: its name; NULL or empty: this one. done() comes once, now
	 * or later, from the loop: status 0, or -errno with text.
	 */
	void (*drain)(void *user, const char *node, struct admin_drain *drain);
};

/* Registers its methods with rpc (which the caller then makes listen). ops and user outlive it. */
int admin_new(struct rpc *rpc, const struct admin_ops *ops, void *user, struct admin **ret_admin);
struct admin *admin_free(struct admin *admin);
DEFINE_CLEANUP(struct admin *, admin_free)
