/*
 * Blocks: counted pieces of memory that hold a part's bytes while it travels inside the daemon (gathered sums,
 * contributions, results). They come from a cache of classes of sizes so that the steady state neither calls
 * malloc nor faults pages in. They are cut from slabs of some MiB, huge pages where the system has them; what is cached
 * beyond a limit goes back to the system. Data is aligned to 64 bytes, and to no more: large blocks begin at different
 * places of their pages. Any thread: the count is atomic, the cache has a latch.
 */
#pragma once

#include "base/list.h"
#include "base/quota.h"
#include <stdatomic.h>

struct block_cache;
struct block_slab;

struct block {
	_Atomic uint32_t refs;
	uint32_t class_index;
	size_t len; /* bytes in use, set by block_new() */
	void *data;
	struct block_cache *cache;
	struct quota *quota; /* charged with block_bytes(len) until the last unref; NULL: nobody */
	struct block *next;  /* the cache's */
	struct block_slab *slab;	   /* whose piece it is; NULL: borrowed */
	void (*gone)(struct block *block); /* of block_borrow() */
};

/* limit: most bytes kept cached while unused. */
int block_cache_new(size_t limit, struct block_cache **ret_cache);
/* All blocks must have been released. */
struct block_cache *block_cache_free(struct block_cache *cache);
DEFINE_CLEANUP(struct block_cache *, block_cache_free)
/* What a block of len bytes takes, and is charged as. */
size_t block_bytes(size_t len);
/* What the blocks that are alive now take. */
uint64_t block_cache_used(const struct block_cache *cache);

/*
 * Somebody who must know where blocks lie, as hardware that moves them: each slab is told before the first of its blocks
 * is given out, and again before it is unmapped. Embedded in its user. Callbacks come on any thread, under a lock: they
 * must not make or release blocks.
 */
struct block_watcher {
	void (*slab_added)(struct block_watcher *watcher, void *data, size_t len);
	void (*slab_removed)(struct block_watcher *watcher, void *data);
	struct list link;
};
/* Tells of the slabs that are there. */
void block_cache_watch(struct block_cache *cache, struct block_watcher *watcher);
/* Tells that they are gone. Harmless when not watching. */
void block_cache_unwatch(struct block_cache *cache, struct block_watcher *watcher);

/*
 * A block of len bytes (0 is allowed), contents undefined, one reference. quota may be NULL; it must outlive the block.
 * Returns 0, QUOTA_E_FULL, or -ENOMEM.
 */
int block_new(struct block_cache *cache, size_t len, struct quota *quota, struct block **ret_block);
/*
 * Memory of somebody else's as a block, which is embedded in what is theirs, with one reference. Both stay until gone(), on
 * whatever thread drops the last one.
 */
void block_borrow(struct block *block, void *data, size_t len, void (*gone)(struct block *block));
struct block *block_ref(struct block *block);
/* Returns NULL; takes NULL. */
struct block *block_unref(struct block *block);
DEFINE_CLEANUP(struct block *, block_unref)
