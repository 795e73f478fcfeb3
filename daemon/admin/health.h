/* grpc.health.v1.Health, for probes. Private to the module. */
#pragma once

#include "base/list.h"
#include "rpc/rpc.h"

/* Looked at this often while somebody watches; no timer runs while nobody does. */
#define HEALTH_INTERVAL_MS 500

struct health {
	struct rpc *rpc;
	bool (*healthy)(void *user);
	void *user;
	struct rpc_method check, watch;
	struct list watchers;
	struct loop_timer timer;
};

/* Registers its methods. healthy and user outlive it, and it outlives rpc_close(). */
void health_init(struct health *health, struct rpc *rpc, bool (*healthy)(void *user), void *user);
void health_done(struct health *health);
