/*
 * What the line works on, as passive data: the layout of a job (which rank is where), the memory that trainers share
 * (buffers), and the partition of an operation into parts. No policy and no state beyond the structs themselves.
 * Control thread only; extents and mapped memory may be read by any thread while their owner keeps them.
 */
#pragma once

#include "base/error.h"
#include "base/list.h"
#include "base/loop/loop.h"
#include "base/map.h"
#include "base/memory/unmap.h"
#include "base/quota.h"
#include "gpu/gpu.h"
#include "proto/types.h"

/* -- Layout ------------------------------------------------------------------------------------------------------- */

#define RANK_ALL  UINT32_MAX /* as source: a reduction over all ranks; as target: every rank */
#define RANK_AWAY UINT32_MAX /* as local index: on another node */

/* Ranks of a job grouped by node, seen from one node. Local ranks are numbered in rank order: that is the order of sums. */
struct layout {
	uint32_t size, n_nodes, node, n_local;
	uint32_t n_most;	 /* ranks of the node that has the most */
	uint32_t *node_of_rank;	 /* size entries */
	uint32_t *local_of_rank; /* size entries: local number, or RANK_AWAY */
	uint32_t *rank_of_local; /* n_local entries */
};

/*
 * Copies node_of_rank (size entries from outside, or NULL: all on node 0). Returns 0; -EPROTO when an entry is not below
 * n_nodes or no rank is on node; -ENOMEM.
 */
int layout_init(struct layout *layout, const uint32_t *node_of_rank, uint32_t size,
		uint32_t n_nodes, uint32_t node);
/* Harmless on zeroed memory. */
void layout_done(struct layout *layout);

/* -- Buffers ------------------------------------------------------------------------------------------------------ */

/*
 * Memory of a trainer. Lives until it is neither shared nor used by a request. Memory of the host is mapped here. That of
 * a device has addresses here at which nothing is: they tell places in it apart, and whoever touches them is found out.
 */
struct buffer {
	struct map_entry entry; /* the owner's, by number */
	uint32_t number;
	unsigned refs; /* control thread only */
	char *data;
	uint64_t len;
	struct quota
		*quota; /* charged with len, and its parent until it is unmapped; NULL: nobody */
	/* Of the owner's choice, but for the first where there is a quota: released when it has been unmapped. */
	struct unmap_charge charges[UNMAP_CHARGES];
	struct gpu_memory *device; /* NULL: memory of the host */
	bool is_bare;		   /* at its addresses is nothing */
	/*
	 * Whoever touches it may be kept waiting for long. While pages of a memfd are given back, as many as there are at once, who
	 * touches one of them waits until all have gone. False: the memfd has few pages, and can get no more.
	 */
	bool stalls;
	/*
	 * Optional: called before host memory is unmapped: hardware that knows it must forget it. Returns whether it has; if not,
	 * `left` is to run on the control thread once it has, and the buffer stays as it is until then.
	 */
	bool (*leaving)(struct buffer *buffer, struct mail *left);
	void *leaving_user;
	struct mail left;
	/* Optional: called when nobody can touch it any more, and no worker has it imported, right before it is freed. */
	void (*released)(struct buffer *buffer);
	void *user;		/* free for the owner's use */
	uint64_t cookie;	/* the same */
	unsigned n_descriptors; /* the same */
	bool is_placed;		/* the same */

	/* buffer_bury()'s own. */
	bool buried;
	int burial_fd; /* what is mapped in its place; only while buried_to < len */
	uint64_t buried_to;
	struct chore burial;
};

/*
 * Maps len bytes of a memfd from outside; one reference. The descriptor stays the caller's. Refused with -EINVAL (not a
 * memfd, or shorter than len), -EPERM (not sealed against shrinking, so that an access could fault; or not writable),
 * -EDQUOT, -ENOMEM, each with words.
 *
 * Huge pages are refused too: a hole punched into them gives the reserved page away, and touching it again may fault.
 */
int buffer_map(int fd, uint64_t len, struct quota *quota, struct buffer **ret_buffer,
	       struct failure *failure);
/*
 * A trainer's memory has to be there when it is shared: pages that nobody has written yet would be the daemon's when it touches
 * them. How many are there is asked, not which: holes elsewhere are seen when they are met. Returns 0; or -EINVAL with words.
 */
int buffer_check_whole(int fd, uint64_t len, struct failure *failure);
/*
 * Its trainer has given back pages of it: they are not touched any more. What is under way reads and writes a little memory
 * of ours in their place, over and over. That memory takes the place of the buffer's piece by piece, as a chore of the loop; pages
 * that are made until then are for buffer_give_back(). Sets buffer->buried. Harmless when buffer->buried is set.
 */
void buffer_bury(struct buffer *buffer, struct loop *loop);
/* A page of a buffer that is buried was made meanwhile: its trainer's memfd is soon without it again. */
void buffer_give_back(const struct buffer *buffer, void *data);
/* Whether a device may have so much memory: 0, or -EINVAL with words. */
int buffer_check_device(uint64_t len, struct failure *failure);
/*
 * The same as buffer_map() for memory of a device, which a GPU worker imports when it is used; its length has been checked. Nobody is
 * charged. Refused with -ENOMEM or -errno (the descriptor cannot be kept), with words.
 */
int buffer_of_device(const struct gpu_memory_params *params, struct buffer **ret_buffer,
		     struct failure *failure);
struct buffer *buffer_ref(struct buffer *buffer);
/* Returns NULL; takes NULL. */
struct buffer *buffer_unref(struct buffer *buffer);
DEFINE_CLEANUP(struct buffer *, buffer_unref)

/*
 * Finds count elements of element_size bytes at offset. Returns 0; -EINVAL when they are not all inside, or not
 * naturally aligned.
 */
int buffer_range(const struct buffer *buffer, uint64_t offset, uint64_t count, size_t element_size,
		 void **ret_data);

/* -- Partition ---------------------------------------------------------------------------------------------------- */

/* A part: what travels as one message, or is summed as one task. Offsets and lengths in bytes. */
struct extent {
	uint32_t block;	 /* as in data_header */
	uint32_t part;	 /* number inside the block */
	uint32_t source; /* rank whose input it is, or RANK_ALL */
	uint32_t target; /* rank whose output it goes to, or RANK_ALL */
	uint32_t len;
	uint64_t offset;    /* in the block */
	uint64_t total;	    /* of the block */
	uint64_t input_at;  /* in the input(s) */
	uint64_t output_at; /* in the output(s) */
};

/* What one local rank of an all_to_all sends and receives. */
struct partition_rank {
	const uint64_t *
		counts; /* elements: what it sends to each rank, then what it receives from each; NULL: equal */
	uint64_t received; /* bytes of the blocks seen so far; partition_next()'s own */
};

/*
 * An operation and how far it has been cut. Every block yields its parts in order, an empty block one part of length 0.
 * Blocks come in the order of their numbers, and of all_to_all only those whose source or target is on this node: so all
 * nodes that take part in two parts meet them in the same order.
 */
struct partition {
	/* Set by the user, checked before. */
	const struct layout *layout;
	unsigned operation;
	size_t element_size;
	uint32_t part_bytes; /* a multiple of every element's size */
	uint64_t
		elements; /* push_pull, broadcast: in all; else: of each block where counts is NULL */
	const uint64_t *counts;	      /* all_gather, reduce_scatter: size entries, or NULL */
	struct partition_rank *ranks; /* all_to_all: n_local entries */
	uint32_t root;		      /* broadcast */
	/* partition_next()'s own; zero at the start. */
	uint32_t source, target; /* of the next block */
	uint64_t input_at, output_at;
	bool in_block;
	struct extent next;
};

/* The next part. Returns false at the end. */
bool partition_next(struct partition *partition, struct extent *ret_extent);
