/* A coordinator and several members, each with its own gRPC, over the loopback and on one loop. What fails, fails the test. */
#pragma once

#include "cluster/cluster.h"
#include "cluster/coordinator/state.h"
#include "cluster/wire.h"
#include "grpc_test.h"
#include "test.h"

#define LEASE_MS 60000 /* no test outlives it: whom it drops is dropped for another reason */

struct world {
	struct loop *loop;
	struct coordinator *coordinator;
	struct coordinator_params params;
	int reserved;
	char address[64];
	struct failure failure;
};

struct node {
	struct world *world;
	struct rpc *rpc;
	struct cluster *cluster;
	struct cluster_params params;
	char key[64];
	size_t key_len;
	unsigned n_keys, n_views;
	bool is_failed;
	struct failure failure;
};

#define UNTIL(w, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((w)->loop, 1000), >=, 0); \
	} while (0)

void world_start(struct world *w);
void world_start_with(struct world *w, uint64_t lease_ms);
void world_stop(struct world *w);
void coordinator_kill(struct world *w);
void coordinator_revive(struct world *w);

extern uint64_t next_id; /* of the next member: its secret */
/* Another process of the same node. */
void node_renew(struct node *n);
void node_init(struct world *w, struct node *n, const char *name, uint32_t roles);
void node_run(struct node *n);
void node_start(struct world *w, struct node *n, const char *name, uint32_t roles);
/* The coordinator can answer the farewell only while its loop, which is the world's, turns. */
void node_stop(struct node *n);
uint32_t epoch_of(const struct node *n);
size_t members_of(const struct node *n);

struct asked {
	struct cluster_query query;
	bool is_done;
	uint32_t epoch;
	size_t n_servers;
	struct failure failure;
};

void ask(struct node *n, struct asked *a, const char *job, uint32_t min_servers,
	 uint64_t timeout_ms);
void ask_of(struct node *n, struct asked *a, const char *job, uint64_t owner, uint32_t min_servers);

/* A member by hand: what a daemon would never send, or without what it always sends. */
struct raw {
	struct rpc *rpc;
	struct rpc_channel *channel;
	struct rpc_request request;
	bool is_done;
	unsigned n_messages;
	int status;
	char text[512];
	char reply[64];
	size_t reply_len;
};

void raw_start(struct world *w, struct raw *raw);
void raw_stop(struct raw *raw);
void raw_send(struct raw *raw, const char *method, const void *data, size_t len);
void raw_register(struct raw *raw, struct wire_register *message);
/* number: whose, as of next_id. */
struct wire_register registration(uint64_t number, const char *name);
