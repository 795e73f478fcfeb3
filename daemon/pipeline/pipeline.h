/*
 * The line: from a trainer's submission to its completion. Owns this node's jobs and their tensors, matches the
 * submissions of the local ranks, plans each operation as parts, and moves every part through
 *
 *	gather (sum over local ranks)  ->  push  ->  ... server ...  ->  pull  ->  scatter (copy to local ranks)
 *
 * most urgent first. A job whose ranks are all on this node needs no server: gather writes the result at once. Control
 * thread only; sums and copies run in the pool, bytes move on transport/'s data threads.
 */
#pragma once

#include "base/block.h"
#include "base/error.h"
#include "base/loop.h"
#include "base/pool.h"
#include "cluster/cluster.h"
#include "tensor/tensor.h"
#include "transport/transport.h"

struct pipeline;

struct pipeline_params {
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct transport *transport;
	struct cluster *cluster;
	uint64_t id;	       /* this daemon process */
	uint32_t part_bytes;   /* of jobs that need no server */
	uint64_t inline_bytes; /* parts of at most this many input bytes are summed on the control thread */
	uint64_t ahead_bytes;  /* gathered and not yet sent, per server: what an urgent part cannot overtake */
	unsigned max_jobs;
	unsigned max_tensors;  /* per job */
};

int pipeline_new(const struct pipeline_params *params, struct pipeline **ret_pipeline);
/* Every job fails with -ESHUTDOWN. Idempotent. */
void pipeline_close(struct pipeline *pipeline);
struct pipeline *pipeline_free(struct pipeline *pipeline);
DEFINE_CLEANUP(struct pipeline *, pipeline_free)

/* transport_ops, for notices that concern this node's jobs and peers that are gone. */
void pipeline_notice_arrived(struct pipeline *pipeline, struct peer *peer, const struct data_header *header,
			     const void *payload);
void pipeline_peer_lost(struct pipeline *pipeline, struct peer *peer, const char *why);

struct pipeline_job_info {
	char name[64];
	uint64_t number;
	const char *state; /* "forming", "running", "failed", "leaving" */
	uint32_t size, n_nodes, n_local;
	uint64_t rounds, bytes, in_flight;
	char waiting_for[160];
};
struct pipeline_tensor_info {
	char name[256];
	uint64_t key;
	unsigned dtype;
	uint64_t elements, rounds;
	char waiting_for[160];
};

/* For admin; arrays to be freed. Return 0, -ENOENT (no such job), or -ENOMEM. */
int pipeline_jobs(struct pipeline *pipeline, struct pipeline_job_info **ret_jobs, size_t *ret_n);
int pipeline_tensors(struct pipeline *pipeline, const char *job, struct pipeline_tensor_info **ret_tensors,
		     size_t *ret_n);

/* Ranks of a job as this node knows them; array to be freed. Returns 0, -ENOENT or -ENOMEM. */
struct pipeline_rank_info {
	uint32_t rank, node;
	char state[16]; /* "here", "joined" (on another node), "missing", "left" */
};
int pipeline_ranks(struct pipeline *pipeline, const char *job, struct pipeline_rank_info **ret_ranks, size_t *ret_n);

/* Requests completed since the start, and how many of them failed. */
void pipeline_counters(const struct pipeline *pipeline, uint64_t *ret_requests, uint64_t *ret_failed);
