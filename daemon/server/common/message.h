/*
 * Set-up messages as plain arguments: the only place of server/ where generated names appear. What a decoder yields has
 * been checked in itself (limits, characters, numbers within each other); whether it fits the job is for the caller.
 * Control thread.
 */
#pragma once

#include "base/error.h"
#include "base/memory/account.h"
#include "cluster/cluster.h"
#include "proto/types.h"
#include "transport/transport.h"

#define SECRET_DIGEST_LEN 32
#define USER_NONE	  UINT32_MAX /* it was not said whose trainers they are */
#define MEMBER_NAME_MAX	  63
/* Longer deadlines are taken as this: no sum of times overflows. */
#define TIMEOUT_MAX_MS (365ull * 24 * 3600 * 1000)

struct join {
	char job[JOB_NAME_MAX + 1];
	char node_name[MEMBER_NAME_MAX + 1]; /* "" when not said */
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint32_t user;
	uint32_t size, n_nodes, node, local_size, epoch, part_bytes;
	uint64_t instance, view_digest, timeout_ms, request_timeout_ms, member;
	bool resume, elastic;
	uint32_t min_ranks, max_ranks;
	uint64_t regroups;
	uint32_t newcomers, membership;
	bool joiner;	   /* a node without ranks in the job, which has newcomers */
	struct view *view; /* that the run that regroups is in, or NULL: not said */
	struct stragglers stragglers;
	struct account *account; /* whose it is: join_charge(); or NULL */
	uint64_t charged;
	uint32_t n_ranks;
	uint32_t ranks[]; /* distinct, below size, in increasing order */
};

struct attach {
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint32_t user, size, n_nodes, node;
	uint64_t instance, request_timeout_ms;
	bool resume, elastic;
	struct stragglers stragglers;
	uint64_t lost_timeout_ms;
	/* At the home of a job with resume. */
	bool home;
	uint32_t part_bytes, epoch, min_ranks, max_ranks;
	uint64_t view_digest;
	/* Which servers the job goes on with: data_moves_unite(); n_moves 0: all. This one is number `server`. If elastic, the last `size` are of ranks. */
	const uint32_t *moves;
	size_t n_moves;
	uint32_t server;
	struct data_added_set
		added; /* servers beyond them; added_server: this one's number there, from 1; or 0 */
	uint32_t added_server;
	bool asks_back, begins;
	/* Of a run that began when ranks regrouped: the run before, and JobJoined, which is of run `joined_number`. Else 0, NULL. */
	uint64_t regroups, joined_number;
	const void *joined;
	size_t joined_len;
	uint32_t sent_part_bytes; /* of what comes and goes, said everywhere; or 0 */
	struct account *account;  /* who is charged for a job that it makes; or NULL */
	uint32_t node_of_rank[];  /* size entries; every node has a rank */
};

struct declare {
	char name[TENSOR_NAME_MAX + 1];
	unsigned dtype;
	uint64_t elements;
	uint32_t rank;
	uint64_t key, start;		   /* key 0: not agreed on before */
	bool in_doubt;			   /* the node asks whether it is forgotten */
	char shape[TENSOR_SHAPE_MAX + 1];  /* empty: no rank of the node has said one */
	char conflict[ERROR_TEXT_MAX + 1]; /* how ranks of the node disagree; empty: they do not */
};

struct joined {
	uint64_t job, request_timeout_ms;
	const uint32_t *node_of_rank;
	uint32_t size, part_bytes;
	const uint16_t *stripes;
	size_t n_stripes;
	const uint32_t *
		member_of_node; /* n_nodes entries: its number among the view's members, from 1; 0: none of them */
	uint32_t n_nodes;
	bool resume;
	uint32_t membership; /* of a run that began when ranks regrouped; else 0 */
	/* For nodes that were not in the run before; or NULL. */
	const struct view *view;
	uint32_t min_ranks, max_ranks;
	/* The run before, and of each node its number there, from 1; 0: none, but the id of its daemon. regroups 0: nothing of it. */
	uint64_t regroups;
	const uint32_t *old_nodes;
	const uint64_t *joiners;
};

struct join *join_free(struct join *join);
DEFINE_CLEANUP(struct join *, join_free)
/* To an account, which becomes the join's, until that is freed. Returns 0, or -EDQUOT with failure filled. */
int join_charge(struct join *join, struct account *account, struct failure *failure);
struct attach *attach_free(struct attach *attach);
DEFINE_CLEANUP(struct attach *, attach_free)

/* Each returns 0 (and something to be freed; a join by join_free(), an attach by attach_free()), or -errno with failure filled for the sender. */
int join_decode(const void *data, size_t len, struct join **ret_join, struct failure *failure);
int attach_decode(const void *data, size_t len, struct attach **ret_attach,
		  struct failure *failure);
int declare_decode(const void *data, size_t len, struct declare *ret_declare,
		   struct failure *failure);

/* Who the nodes of a run were in the run before it: taken out of its JobJoined once, for many who ask. */
struct past;
/* Of a run of n_nodes: what past_decode() allocates. */
size_t past_len(uint32_t n_nodes);
/* *ret_past is to be freed. Returns 0, -EPROTO or -ENOMEM. */
int past_decode(const void *joined, size_t len, struct past **ret_past);
/*
 * Which node of the run it is that sends this join: by its number in the run before or, where it had no rank there, by its daemon.
 * Returns 0, or -ENOENT: none of them.
 */
int past_find(const struct past *past, const struct join *join, uint32_t *ret_node);

/* Answers; newly allocated. Return 0 or -ENOMEM. */
int joined_encode(const struct joined *joined, void **ret_data, size_t *ret_len);
int attached_encode(bool fresh, void **ret_data, size_t *ret_len);
int declared_encode(uint64_t key, uint64_t start, void **ret_data, size_t *ret_len);

/* Status and text of a notice from outside; what is not printable becomes '?'. */
void notice_decode(const struct data_header *header, const void *payload,
		   struct failure *ret_failure);

/* Refuses a call with words. */
_cold_ void refuse(struct delivery *delivery, int status, const char *format, ...) _printf_(3, 4);
