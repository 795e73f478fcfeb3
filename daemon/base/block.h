/*
 * Blocks: counted pieces of memory that hold a part's bytes while it travels inside the daemon (gathered sums,
 * contributions, results). They come from a cache of power-of-two classes so that the steady state neither calls
 * malloc nor faults pages in; what is cached beyond a limit goes back to the system. Data is aligned to 64 bytes.
 * Any thread: the count is atomic, the cache has a lock per class that is held for a few instructions.
 */
#pragma once

#include "base/quota.h"
#include "proto/c.h"
#include <stdatomic.h>

struct block_cache;

struct block {
	_Atomic uint32_t refs;
	uint32_t class_index;
	size_t len; /* bytes in use, set by block_new() */
	void *data;
	struct block_cache *cache;
	struct quota *quota; /* charged with len until the last unref; NULL: nobody */
	struct block *next;  /* the cache's */
};

/* limit: most bytes kept cached while unused. */
int block_cache_new(size_t limit, struct block_cache **ret_cache);
/* All blocks must have been released. */
struct block_cache *block_cache_free(struct block_cache *cache);
DEFINE_CLEANUP(struct block_cache *, block_cache_free)
/* Bytes in blocks alive now. */
uint64_t block_cache_used(const struct block_cache *cache);

/*
 * A block of len bytes (0 is allowed), contents undefined, one reference. quota may be NULL; it must outlive the block.
 * Returns 0, QUOTA_E_FULL, or -ENOMEM.
 */
int block_new(struct block_cache *cache, size_t len, struct quota *quota, struct block **ret_block);
struct block *block_ref(struct block *block);
/* Returns NULL; takes NULL. */
struct block *block_unref(struct block *block);
DEFINE_CLEANUP(struct block *, block_unref)
