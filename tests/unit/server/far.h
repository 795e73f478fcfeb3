/*
 * A server under test, and the nodes that call it. What carries the calls is behind ops: here a double of transport/
 * that keeps everything in memory and gives the test its hand on peers; in test_wire.c the real one.
 */
#pragma once

#include "base/loop/loop.h"
#include "base/loop/pool.h"
#include "base/memory/block.h"
#include "cluster/cluster.h"
#include "proto/data.h"
#include "server/server.h"
#include "test.h"

#define FAR_ENDS     8
#define FAR_SERVERS  2
#define FAR_RANKS    1024
#define FAR_EPOCH    3
#define FAR_INSTANCE 1000 /* node i's first instance is this + i */

/* A call and, once done, its answer. */
struct asked {
	bool done;
	int status; /* 0 or a negative errno */
	struct data_header answer;
	void *data; /* header.len bytes */
	char text[ERROR_TEXT_MAX + 1];
	/* The carrier's. */
	void *payload;
	struct asked *next;
	void *private;
};

struct far;

struct far_ops {
	/* Sends a call from an end (a node's daemon); asked is the test's, payload is copied. */
	void (*call)(struct far *far, unsigned end, struct asked *asked,
		     const struct data_header *header, const void *payload, bool in_block);
	void (*notice)(struct far *far, unsigned end, const struct data_header *header,
		       const void *payload);
	/* Until all that was sent has been taken in by the server. */
	void (*settle)(struct far *far);
	void (*free)(struct far *far);
};

struct far_options {
	uint32_t part_bytes;
	uint64_t inline_bytes, quota_bytes;
	unsigned max_jobs, max_tensors, n_threads;
	uint64_t memory; /* of its accounts, all of which one may have; 0: without end */
	unsigned share;	 /* of jobs and memory that one may have, percent; 0: all */
	bool by_link;	 /* part_bytes stays 0 */
	uint32_t mbps;	 /* of every member */
};

struct far {
	const struct far_ops *ops;
	void *carrier;
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct view *view;
	struct server *server;
	struct accounts accounts;
	struct asked *all; /* freed at the end */
	unsigned n_calls;
	uint64_t copied; /* bytes of answers that were in no block; the double's */
	size_t misalign; /* payloads lie this far off, and are lent */
	/* FAIL_JOB notices that came to each end. */
	struct {
		unsigned n;
		int status;
		char text[ERROR_TEXT_MAX + 1];
		uint64_t job;
	} failed[FAR_ENDS];
	/* Other notices that came to each end: the last of them. */
	struct {
		unsigned n;
		uint32_t moves[FAR_SERVERS + FAR_RANKS];
		uint32_t newcomers;
		uint32_t left;		  /* LEFT: bit by node */
		uint32_t released, epoch; /* up to this number, said in this epoch, */
		unsigned n_releases;	  /* so often */
		unsigned stopping;	  /* how often it was asked */
		unsigned n_unused;	  /* UNUSED came so often */
		unsigned n_ordinals;	  /* ORDINAL came so often, with this and that text */
		struct data_header ordinal;
		char text[ERROR_TEXT_MAX + 1];
		unsigned n_counts; /* OTHERS_FOLLOW came so often */
		struct data_header counts;
		unsigned n_over; /* with a status so often, and this text */
		struct data_header over;
		char over_text[ERROR_TEXT_MAX + 1];
		unsigned n_begun; /* OTHERS_BEGUN came so often, with this name */
		struct data_header begun;
		char begun_name[TENSOR_NAME_MAX + 1];
	} told[FAR_ENDS];
};

/* A job's layout as the nodes tell it, and what the server made of it. */
struct layout {
	const char *name;
	uint32_t size, n_nodes;
	uint32_t node_of_rank[FAR_RANKS];
	uint64_t timeout_ms, request_timeout_ms;
	uint32_t part_bytes;
	bool resume; /* it outlives its daemons' processes; this server is its home */
	bool asks_back;
	bool async;		     /* it accumulates */
	uint32_t moves[FAR_SERVERS]; /* with which nodes attach; this server is number 0 */
	bool elastic;		     /* resume, too: */
	uint32_t gone[FAR_RANKS];    /* by rank: 0, DATA_MOVES_LOST or DATA_MOVES_LEFT */
	uint32_t max_ranks;
	bool elsewhere; /* resume, too: another server is its home */
	bool begins;	/* nodes attach for the first time */
	/* Resume, too: JobJoined of a run that began when ranks regrouped; or NULL. */
	const void *joined;
	size_t joined_len;
	uint32_t quorum; /* each rank is a node, as with async */
	uint32_t staleness;
	uint32_t user; /* 0: the one that all are of */
	/* Filled when joined. */
	uint64_t job;
	uint32_t joined_part_bytes;
	uint32_t n_stripes;
};

/* What can be changed about one node's JOIN; 0 or NULL: as the layout says. */
struct join_change {
	uint64_t instance, view_digest;
	uint32_t size, n_nodes, part_bytes, epoch, local_size;
	const uint32_t *ranks;
	size_t n_ranks;
	bool no_ranks;
	const char *secret, *node_name;
	uint32_t user; /* 0: the one that all are of */
	/* Of ranks that regroup, or newcomers of a node that is new to the job. */
	uint64_t regroups;
	bool has_newcomers;
	uint32_t newcomers, membership;
	const struct view *view;
};

/* The carrier's: a server with a cluster of FAR_ENDS daemons around it; end 0 is where the server is. */
struct far *far_new(const struct far_options *options);
/* Whether each end is a daemon of its own, not the server's. */
bool far_ends_are_peers(void);
/* The end's daemon is gone. */
void far_lose(struct far *far, unsigned end);

struct far *far_free(struct far *far);
DEFINE_CLEANUP(struct far *, far_free)

void far_init(struct far *far, const struct far_options *options);
void far_start(struct far *far,
	       const struct far_options *options); /* the server; the carrier is there */

/* Sends, and what is asked: yet unanswered or not. */
struct asked *far_call(struct far *far, unsigned end, const struct data_header *header,
		       const void *payload);
struct asked *far_join(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
		       const struct join_change *change);
struct asked *far_attach(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
			 uint64_t instance);
/* What the header of a call or notice about data says of it. */
uint32_t far_epoch(const struct layout *layout);
struct asked *far_declare(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
			  const char *name, unsigned dtype, uint64_t elements, uint32_t rank);
/* The same of 100 float32 of some shape, or NULL. */
struct asked *far_declare_shaped(struct far *far, unsigned end, const struct layout *layout,
				 uint32_t node, const char *name, const char *shape, uint32_t rank);
void far_notice(struct far *far, unsigned end, unsigned op, uint64_t job, uint64_t key,
		uint64_t round, uint32_t node, int status, const char *text);

/* Turns the loop until it is answered. */
void far_wait(struct far *far, struct asked *asked);
void far_wait_all(struct far *far);
void far_expect(struct far *far, struct asked *asked, int status, const char *text);
/* Not answered, though all that was sent has arrived. */
void far_expect_waiting(struct far *far, struct asked *asked);

/* Takes what the answer to a JOIN says into a layout. */
void far_take_joined(const struct asked *asked, struct layout *layout);
/* Joins and attaches all nodes; node i by end i. The layout: per_node[i] ranks on node i. */
struct layout far_layout(const char *name, uint32_t n_nodes, const uint32_t *per_node);
void far_form(struct far *far, struct layout *layout);
/* Its first node is this end, the others those after it. */
void far_form_from(struct far *far, uint32_t end, struct layout *layout);
/* The key and start of a tensor that all nodes declare. */
uint64_t far_tensor(struct far *far, const struct layout *layout, const char *name, unsigned dtype,
		    uint64_t elements, uint64_t *ret_start);

/* A contribution's header: one part, block 0. */
struct data_header far_push(const struct layout *layout, uint64_t key, uint64_t round,
			    uint32_t node);

/* Jobs that the server knows. */
size_t far_n_jobs(struct far *far);
