/* What daemon.c shares with report.c: the modules of one daemon. Control thread only. */
#pragma once

#include "admin/admin.h"
#include "agent/agent.h"
#include "base/loop/pool.h"
#include "base/memory/account.h"
#include "base/memory/block.h"
#include "cluster/cluster.h"
#include "control/control.h"
#include "daemon.h"
#include "rpc/rpc.h"
#include "server/server.h"
#include "transport/transport.h"

/* How many jobs there were after so many changes of the agent's and of the server's: report.c. */
struct jobs_counted {
	uint64_t agent, server;
	uint32_t n;
};

struct daemon {
	struct daemon_params params;
	struct config *config;
	struct loop *loop;
	uint64_t id;			   /* of this process, a digest of: */
	uint8_t secret[MEMBER_SECRET_LEN]; /* random */
	char node[64];
	unsigned roles;
	uint64_t started_ns;

	struct accounts accounts; /* what is held for whom: outlives what follows */

	/* In the order in which they are made. */
	struct block_cache *blocks;
	struct pool *pool;
	struct rpc *rpc;
	struct admin *admin;
	struct cluster *cluster;
	struct transport *transport;
	struct server *server; /* NULL without the server role */
	struct gpu *gpu;
	struct agent *agent;
	struct control *control; /* NULL without the agent role */

	void *data_key; /* from cluster_key_file or the coordinator */
	size_t data_key_len;
	bool draining, ended;
	struct loop_timer drain_timer;
	uint64_t drain_until_ns;
	size_t n_busy; /* draining: nodes that server_stop() waits for */
	struct jobs_counted jobs_counted;
};

/* drain.c: of admin_ops. */
void drain_node(void *user, const char *node, struct admin_drain *drain);
/* report.c: what operators are told. */
extern const struct admin_ops report_ops;
