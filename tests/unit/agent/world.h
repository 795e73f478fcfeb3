/*
 * Some nodes in one process, on one loop: each has its own transport (loopback TCP between them), server and agent;
 * the ranks are driven through agent.h. cluster/ is a double: a fixed view with all nodes as servers.
 */
#pragma once

#include "agent/agent.h"
#include "base/clock.h"
#include "server/server.h"
#include "test.h"

#define WORLD_NODES 4
#define WORLD_RANKS 80

struct world;

struct declared {
	struct agent_declaration base;
	bool done;
	uint64_t key;
	struct failure failure;
};

/* A tensor as all ranks have declared it. */
struct tensor {
	struct tensor *next;
	struct declared declared[WORLD_RANKS];
};

struct node {
	struct world *world;
	unsigned number;
	struct block_cache *blocks;
	struct transport *transport;
	struct server *server;
	struct cluster *cluster;
	struct agent *agent;
};

struct rank {
	struct agent_member member;
	struct world *world;
	struct node *node;
	uint32_t rank;
	bool joined, ended, left, refused;
	unsigned n_joined; /* runs of an elastic job */
	int ledger;	   /* of its run, or -1 */
	uint64_t charged;  /* for results beyond the first of its ledger */
	uint64_t number;
	uint32_t n_servers;
	struct failure failure; /* how it ended */
};

struct world_options {
	unsigned n_nodes, n_local;
	bool distributed; /* although there is one node */
	bool no_servers;  /* local jobs only: no transport, no server */
	bool resume;	  /* jobs over nodes outlive their daemons' processes */
	unsigned n_threads, n_data_threads, n_lanes;
	uint32_t part_bytes;
	uint64_t target; /* bytes that ledgers may take beyond their beginning; 0: any number */
	uint64_t inline_bytes, ahead_bytes;
	unsigned max_jobs, max_tensors;
	uint64_t request_timeout_ms;
	uint32_t min_ranks, max_ranks;		   /* not 0: an elastic job */
	struct gpu *(*gpu_new)(struct loop *loop); /* of the first node; NULL: it has none */
};

struct world {
	struct world_options options;
	struct loop *loop;
	struct pool *pool;
	struct node nodes[WORLD_NODES];
	struct gpu *gpu; /* the test's, which frees it after the world */
	unsigned size;
	struct rank ranks[WORLD_RANKS];
	struct tensor *tensors;
};

struct world *world_new(const struct world_options *options);
struct world *world_free(struct world *world);
DEFINE_CLEANUP(struct world *, world_free)

/* Turns the loop until the condition holds. */
#define WORLD_UNTIL(world, condition)                              \
	do {                                                       \
		while (!(condition))                               \
			ASSERT_OK(loop_turn((world)->loop, 1000)); \
	} while (0)

/* What rank would say of itself in a job of all. */
struct agent_join world_join_of(const struct world *world, uint32_t rank);
/* What a node knows of the cluster from now on. */
void world_view(struct world *world, unsigned node, const struct view_member *members, size_t n);
/* Joins one rank; as agent_join(). */
int world_join(struct world *world, uint32_t rank, const struct agent_join *join,
	       struct failure *failure);
/* The transport of a node goes down, as if its process were killed. */
void world_kill(struct world *world, unsigned node);
/* A process of the node's agent ends, and another begins. Its ranks are in no job until they come back. */
void world_restart(struct world *world, unsigned node);
/* A rank comes back with the ledger that it had; as agent_resume(). */
int world_resume(struct world *world, uint32_t rank, const struct agent_join *join,
		 struct failure *failure);
/* All ranks are in job "job". */
void world_form(struct world *world);

/* Declares one rank's; as agent_declare(). The second: of a rank that was resumed. */
int declared_make(struct declared *declared, struct rank *rank, const char *name, unsigned dtype,
		  uint64_t elements, struct failure *failure);
int declared_again(struct declared *declared, struct rank *rank, const char *name, unsigned dtype,
		   uint64_t elements, const struct agent_past *past, struct failure *failure);
int declared_shaped(struct declared *declared, struct rank *rank, const struct agent_facts *facts,
		    struct failure *failure);
/* Declares on all ranks; by rank; the world's. Does not wait. */
struct declared *world_declare(struct world *world, const char *name, unsigned dtype,
			       uint64_t elements);

struct asked {
	struct agent_request base;
	bool done;
	unsigned turn; /* how many of this process were done before it */
	struct failure failure;
};
/* A request with the fields of the operation set; the caller may change them before asked_submit(). */
struct asked asked_of(unsigned operation, unsigned reduction, const void *input,
		      uint64_t input_count, void *output, uint64_t output_count);
void asked_submit(struct asked *asked, struct declared *declared, uint64_t round);
