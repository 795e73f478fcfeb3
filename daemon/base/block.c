#include "base/block.h"

#include "base/error.h"
#include <pthread.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BLOCK_POISON 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define BLOCK_POISON 1
#endif

/* A cached block is free memory: make the sanitizer say so when somebody still uses it. */
#if defined(BLOCK_POISON)
#include <sanitizer/asan_interface.h>
#define block_poison(data, len)	  ASAN_POISON_MEMORY_REGION(data, len)
#define block_unpoison(data, len) ASAN_UNPOISON_MEMORY_REGION(data, len)
#else
#define block_poison(data, len)	  ((void)0)
#define block_unpoison(data, len) ((void)0)
#endif

#define BLOCK_MIN_SHIFT 8  /* smallest class: 256 bytes */
#define BLOCK_MAX_SHIFT 40 /* largest: 1 TiB, more than any part can be */
#define BLOCK_CLASSES	(BLOCK_MAX_SHIFT - BLOCK_MIN_SHIFT + 1)

/* The block and its data are one allocation, the data from the first cache line boundary after the block. */
#define BLOCK_HEAD_LEN ((sizeof(struct block) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE)

struct block_class {
	pthread_mutex_t lock; /* guards free */
	struct block *free;
} _cache_aligned_;

struct block_cache {
	struct block_class classes[BLOCK_CLASSES];
	size_t limit;
	_Atomic uint64_t used;	 /* sum of len of the blocks alive */
	_Atomic uint64_t cached; /* sum of the class sizes of the blocks in free lists */
};

int block_cache_new(size_t limit, struct block_cache **ret_cache)
{
	struct block_cache *cache = aligned_alloc(CACHE_LINE, sizeof(*cache));

	if (!cache)
		return error_origin(-ENOMEM);

	memset(cache, 0, sizeof(*cache));
	cache->limit = limit;
	for (size_t i = 0; i < BLOCK_CLASSES; i++)
		(void)pthread_mutex_init(&cache->classes[i].lock, NULL);
	*ret_cache = cache;
	return 0;
}

static size_t block_class_size(uint32_t class_index)
{
	return (size_t)1 << (class_index + BLOCK_MIN_SHIFT);
}

static void block_release_memory(struct block *block)
{
	block_unpoison(block->data, block_class_size(block->class_index));
	free(block);
}

struct block_cache *block_cache_free(struct block_cache *cache)
{
	if (!cache)
		return NULL;
	assert(block_cache_used(cache) == 0);

	for (size_t i = 0; i < BLOCK_CLASSES; i++) {
		struct block_class *class = &cache->classes[i];
		struct block *block;

		while ((block = class->free)) {
			class->free = block->next;
			block_release_memory(block);
		}
		(void)pthread_mutex_destroy(&class->lock);
	}
	free(cache);
	return NULL;
}

uint64_t block_cache_used(const struct block_cache *cache)
{
	return atomic_load_explicit(&cache->used, memory_order_relaxed);
}

/* The smallest class that holds len bytes; len is at most the largest class. */
static uint32_t block_class_of(size_t len)
{
	if (len <= block_class_size(0))
		return 0;
	return (uint32_t)(64 - __builtin_clzll((unsigned long long)len - 1)) - BLOCK_MIN_SHIFT;
}

static struct block *block_from_cache(struct block_cache *cache, uint32_t class_index)
{
	struct block_class *class = &cache->classes[class_index];
	struct block *block;

	(void)pthread_mutex_lock(&class->lock);
	block = class->free;
	if (block)
		class->free = block->next;
	(void)pthread_mutex_unlock(&class->lock);
	if (!block)
		return NULL;

	(void)atomic_fetch_sub_explicit(&cache->cached, block_class_size(class_index),
					memory_order_relaxed);
	block_unpoison(block->data, block_class_size(class_index));
	return block;
}

static bool block_to_cache(struct block_cache *cache, struct block *block)
{
	struct block_class *class = &cache->classes[block->class_index];
	size_t size = block_class_size(block->class_index);
	uint64_t cached;

	cached = atomic_fetch_add_explicit(&cache->cached, size, memory_order_relaxed);
	if (cached + size > cache->limit) {
		(void)atomic_fetch_sub_explicit(&cache->cached, size, memory_order_relaxed);
		return false;
	}
	block_poison(block->data, size);
	(void)pthread_mutex_lock(&class->lock);
	block->next = class->free;
	class->free = block;
	(void)pthread_mutex_unlock(&class->lock);
	return true;
}

static struct block *block_allocate(struct block_cache *cache, uint32_t class_index)
{
	struct block *block =
		aligned_alloc(CACHE_LINE, BLOCK_HEAD_LEN + block_class_size(class_index));

	if (!block)
		return NULL;
	*block = (struct block){
		.class_index = class_index,
		.data = (char *)block + BLOCK_HEAD_LEN,
		.cache = cache,
	};
	return block;
}

int block_new(struct block_cache *cache, size_t len, struct quota *quota, struct block **ret_block)
{
	struct block *block;
	uint32_t class_index;

	if (len > block_class_size(BLOCK_CLASSES - 1))
		return error_origin(-ENOMEM);
	if (quota && quota_charge(quota, len))
		return QUOTA_E_FULL;

	class_index = block_class_of(len);
	block = block_from_cache(cache, class_index);
	if (!block)
		block = block_allocate(cache, class_index);
	if (!block) {
		if (quota)
			quota_release(quota, len);
		return error_origin(-ENOMEM);
	}

	block->len = len;
	block->quota = quota;
	block->next = NULL;
	atomic_store_explicit(&block->refs, 1, memory_order_relaxed);
	(void)atomic_fetch_add_explicit(&cache->used, len, memory_order_relaxed);
	*ret_block = block;
	return 0;
}

struct block *block_ref(struct block *block)
{
	_unused_ uint32_t refs;

	refs = atomic_fetch_add_explicit(&block->refs, 1, memory_order_relaxed);
	assert(refs > 0);
	return block;
}

struct block *block_unref(struct block *block)
{
	struct block_cache *cache;
	uint32_t refs;

	if (!block)
		return NULL;
	/* What any holder did to the data comes before what the next user of the memory does. */
	refs = atomic_fetch_sub_explicit(&block->refs, 1, memory_order_acq_rel);
	assert(refs > 0);
	if (refs > 1)
		return NULL;

	cache = block->cache;
	if (block->quota)
		quota_release(block->quota, block->len);
	(void)atomic_fetch_sub_explicit(&cache->used, block->len, memory_order_relaxed);
	if (!block_to_cache(cache, block))
		block_release_memory(block);
	return NULL;
}
