/*
 * The cache of blocks: free lists by size, slabs that are cut into blocks, and watchers that
 * hear of slabs. transport/ takes blocks for payloads and registers slabs with RDMA devices;
 * agent and server take blocks for sums and results.
 */
#include "base/memory/block.h"

#include "base/error.h"
#include "base/latch.h"
#include "base/memory/poison.h"
#include "base/memory/unmap.h"
#include "base/pages.h"
#include <pthread.h>
#include <sys/mman.h>

#define BLOCK_MIN_SHIFT 8  /* smallest class: 256 bytes */
#define BLOCK_MAX_SHIFT 40 /* largest: 1 TiB, more than any part can be */
/* From each power of two to the next in four steps: a block is at most a quarter longer than what it holds. */
#define BLOCK_STEPS   4
#define BLOCK_CLASSES (BLOCK_STEPS * (BLOCK_MAX_SHIFT - BLOCK_MIN_SHIFT) + 1)

#define SLAB_SMALL     ((size_t)1 << 20) /* for blocks up to SLAB_SMALL_MAX */
#define SLAB_LARGE     ((size_t)4 << 20) /* for larger ones, at least */
#define SLAB_SMALL_MAX ((size_t)32 << 10)

/*
 * A sum reads a block of each node and writes one. Were they at one place of their pages, as powers of two are, all lines that it is
 * at would share the few ways of one set of the first cache: so each block begins an odd number of lines further into its page than
 * the one made before it. Of smaller ones several begin in a page, and few at one place of it.
 */
#define COLOUR_SPAN	((size_t)4096)
#define COLOUR_STEP	((size_t)5 * CACHE_LINE)
#define COLOUR_SLAB_MIN ((size_t)4 << 10)

/*
 * A piece of memory that is cut into blocks of one class. What is cached within the limit is in the class's list, as
 * other blocks are; what is free beyond it is in its slab's: its pages go back to the system, and its addresses stay, until the
 * slab goes of which all is there. So whoever has a block here and there holds what these are charged with, and no more.
 */
struct block_slab {
	struct list link;	/* of all slabs; slab_lock */
	struct list class_link; /* of those with free blocks; the latch */
	struct block *free;
	size_t n_free, n;
	unsigned
		n_dropping; /* threads that give pages back: until they have, it is not in its class's list; the latch */
	char *data;
	size_t len;
	/* Blocks that begin or end in each page, and are not free; the latch. NULL where there is but one. */
	uint16_t *n_users;
	struct block blocks[];
};

struct block_class {
	struct block *free;
	struct list slabs; /* that have free blocks */
};

struct block_cache {
	struct latch
		latch; /* guards classes, what slabs say of free blocks, and the next two; taken alone */
	_Atomic uint64_t used; /* sum of the class sizes of the blocks alive; read by anybody */
	uint64_t cached;       /* the same of the blocks in free lists */
	uint32_t largest;      /* no larger class has one in its free list */
	size_t limit;
	struct block_class classes[BLOCK_CLASSES];
	pthread_mutex_t slab_lock; /* guards slabs and watchers; taken alone */
	struct list slabs, watchers;
	_Atomic size_t n_coloured; /* blocks so far; it wraps */
};

int block_cache_new(size_t limit, struct block_cache **ret_cache)
{
	struct block_cache *cache = calloc(1, sizeof(*cache));

	if (!cache)
		return error_origin(-ENOMEM);

	cache->limit = limit;
	(void)pthread_mutex_init(&cache->slab_lock, NULL);
	list_init(&cache->slabs);
	list_init(&cache->watchers);
	for (size_t i = 0; i < BLOCK_CLASSES; i++)
		list_init(&cache->classes[i].slabs);
	*ret_cache = cache;
	return 0;
}

/* The smallest class that holds len bytes; len is at most the largest class. */
static uint32_t block_class_of(size_t len)
{
	uint32_t shift;

	if (len <= (size_t)1 << BLOCK_MIN_SHIFT)
		return 0;
	shift = 63 - (uint32_t)__builtin_clzll((unsigned long long)len - 1);
	return BLOCK_STEPS * (shift - BLOCK_MIN_SHIFT) + 1 +
	       (uint32_t)((len - 1 - ((size_t)1 << shift)) / (((size_t)1 << shift) / BLOCK_STEPS));
}

static size_t block_class_size(uint32_t class_index)
{
	size_t power = (size_t)1 << (class_index / BLOCK_STEPS + BLOCK_MIN_SHIFT);

	return power + class_index % BLOCK_STEPS * (power / BLOCK_STEPS);
}

size_t block_bytes(size_t len)
{
	return block_class_size(block_class_of(len));
}

/* How far into its page the first of the next n blocks begins; each that follows, COLOUR_STEP further. */
static size_t cache_colour(struct block_cache *cache, size_t n)
{
	size_t before = atomic_fetch_add_explicit(&cache->n_coloured, n, memory_order_relaxed);

	return before * COLOUR_STEP % COLOUR_SPAN;
}

/* Slabs */

/* All of its blocks are free and in its own list. Watchers know it. */
static struct block_slab *slab_new(struct block_cache *cache, uint32_t class_index)
{
	size_t size = block_class_size(class_index);
	size_t len = MAX(size <= SLAB_SMALL_MAX ? SLAB_SMALL : SLAB_LARGE, size), n = len / size;
	struct block_slab *slab = calloc(1, sizeof(*slab) + n * sizeof(struct block));
	struct block_watcher *watcher;
	size_t first = 0, stride = size;

	if (!slab)
		return NULL;
	if (size >= COLOUR_SLAB_MIN) {
		first = cache_colour(cache, n);
		stride += COLOUR_STEP;
		len = align_up(first + n * stride, COLOUR_SPAN);
	}
	slab->data = pages_map(len);
	if (n > 1)
		slab->n_users = calloc(len / page_size() + 1, sizeof(slab->n_users[0]));
	if (!slab->data || (n > 1 && !slab->n_users)) {
		if (slab->data)
			(void)munmap(slab->data, len);
		free(slab->n_users);
		free(slab);
		return NULL;
	}
	slab->len = len;
	slab->n = slab->n_free = n;
	list_init(&slab->class_link);
	for (size_t i = n; i-- > 0;) {
		slab->blocks[i] = (struct block){
			.class_index = class_index,
			.data = slab->data + first + i * stride,
			.cache = cache,
			.next = slab->free,
			.slab = slab,
		};
		slab->free = &slab->blocks[i];
	}
	poison(slab->data, len);
	(void)pthread_mutex_lock(&cache->slab_lock);
	list_push_back(&cache->slabs, &slab->link);
	list_for_each (watcher, &cache->watchers, link)
		watcher->slab_added(watcher, slab->data, slab->len);
	(void)pthread_mutex_unlock(&cache->slab_lock);
	return slab;
}

static void slab_free(struct block_cache *cache, struct block_slab *slab)
{
	struct block_watcher *watcher;

	(void)pthread_mutex_lock(&cache->slab_lock);
	list_for_each (watcher, &cache->watchers, link)
		watcher->slab_removed(watcher, slab->data);
	list_remove(&slab->link);
	(void)pthread_mutex_unlock(&cache->slab_lock);
	unpoison(slab->data, slab->len);
	/* A turn of the control thread may give back those of all nodes of a job. */
	if (slab->len > SLAB_LARGE)
		unmap(slab->data, slab->len);
	else
		(void)munmap(slab->data, slab->len);
	free(slab->n_users);
	free(slab);
}

/* The pages of a slab, from 0, that a block lies in. Only in the first and the last other blocks may lie, too. */
struct block_pages {
	size_t first, end;
};

static struct block_pages block_pages_of(const struct block *block)
{
	size_t at = (size_t)((char *)block->data - block->slab->data);

	return (struct block_pages){
		.first = at / page_size(),
		.end = (at + block_class_size(block->class_index) - 1) / page_size() + 1,
	};
}

/* Under the latch: a block is free. Returns the pages from `first` up to `end` that no block uses any more. */
static struct block_pages slab_leave(struct block_slab *slab, const struct block *block)
{
	struct block_pages pages = block_pages_of(block), unused = pages;

	if (--slab->n_users[pages.first])
		unused.first++;
	if (pages.end - pages.first > 1 && --slab->n_users[pages.end - 1])
		unused.end--;
	return unused;
}

/* While somebody must know where blocks lie, the pages stay. */
static void slab_drop(struct block_slab *slab, struct block_cache *cache, struct block_pages pages)
{
	(void)pthread_mutex_lock(&cache->slab_lock);
	if (list_empty(&cache->watchers))
		(void)madvise(slab->data + pages.first * page_size(),
			      (pages.end - pages.first) * page_size(), MADV_DONTNEED);
	(void)pthread_mutex_unlock(&cache->slab_lock);
}

/* Under the latch. */
static struct block *slab_take(struct block_slab *slab)
{
	struct block *block = slab->free;
	struct block_pages pages = block_pages_of(block);

	if (slab->n_users)
		slab->n_users[pages.first]++;
	if (slab->n_users && pages.end - pages.first > 1)
		slab->n_users[pages.end - 1]++;
	slab->free = block->next;
	if (!--slab->n_free)
		list_remove(&slab->class_link);
	return block;
}

/* While pages of it go back to the system nobody takes a block of it. */
static void slab_give(struct block_slab *slab, struct block *block)
{
	struct block_cache *cache = block->cache;
	struct block_class *class = &cache->classes[block->class_index];
	struct block_pages unused = { 0 };
	bool is_whole;

	poison(block->data, block_class_size(block->class_index));
	latch_take(&cache->latch);
	if (slab->n_users)
		unused = slab_leave(slab, block);
	if (unused.first < unused.end) {
		slab->n_dropping++;
		list_remove(&slab->class_link);
		latch_drop(&cache->latch);
		slab_drop(slab, cache, unused);
		latch_take(&cache->latch);
		slab->n_dropping--;
	}
	block->next = slab->free;
	slab->free = block;
	slab->n_free++;
	is_whole = slab->n_free == slab->n;
	if (is_whole)
		list_remove(&slab->class_link);
	else if (!slab->n_dropping && !list_linked(&slab->class_link))
		list_push_front(&class->slabs, &slab->class_link);
	latch_drop(&cache->latch);
	if (is_whole)
		slab_free(cache, slab);
}

static struct block *block_from_slab(struct block_cache *cache, uint32_t class_index)
{
	struct block_class *class = &cache->classes[class_index];
	struct block_slab *slab = slab_new(cache, class_index);
	struct block *block;

	if (!slab)
		return NULL;
	latch_take(&cache->latch);
	if (slab->n > 1)
		list_push_back(&class->slabs, &slab->class_link);
	block = slab_take(slab);
	latch_drop(&cache->latch);
	unpoison(block->data, block_class_size(class_index));
	return block;
}

void block_cache_watch(struct block_cache *cache, struct block_watcher *watcher)
{
	struct block_slab *slab;

	(void)pthread_mutex_lock(&cache->slab_lock);
	list_for_each (slab, &cache->slabs, link)
		watcher->slab_added(watcher, slab->data, slab->len);
	list_push_back(&cache->watchers, &watcher->link);
	(void)pthread_mutex_unlock(&cache->slab_lock);
}

void block_cache_unwatch(struct block_cache *cache, struct block_watcher *watcher)
{
	struct block_slab *slab;

	if (!list_linked(&watcher->link))
		return;
	(void)pthread_mutex_lock(&cache->slab_lock);
	list_remove(&watcher->link);
	list_for_each (slab, &cache->slabs, link)
		watcher->slab_removed(watcher, slab->data);
	(void)pthread_mutex_unlock(&cache->slab_lock);
}

/* Blocks */

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
			slab_give(block->slab, block);
		}
		assert(list_empty(&class->slabs));
	}
	assert(list_empty(&cache->slabs) && list_empty(&cache->watchers));
	(void)pthread_mutex_destroy(&cache->slab_lock);
	free(cache);
	return NULL;
}

uint64_t block_cache_used(const struct block_cache *cache)
{
	return atomic_load_explicit(&cache->used, memory_order_relaxed);
}

/* Under the latch. */
static void block_count(struct block_cache *cache, uint64_t bytes)
{
	atomic_store_explicit(&cache->used, block_cache_used(cache) + bytes, memory_order_relaxed);
}

static struct block *block_from_cache(struct block_cache *cache, uint32_t class_index)
{
	struct block_class *class = &cache->classes[class_index];
	struct block *block;

	latch_take(&cache->latch);
	block = class->free;
	if (block) {
		class->free = block->next;
		/* What is kept for a round is cold when it comes back. */
		__builtin_prefetch(class->free, 1);
		cache->cached -= block_class_size(class_index);
	} else if (!list_empty(&class->slabs)) {
		block = slab_take(list_first(&class->slabs, struct block_slab, class_link));
	}
	block_count(cache, block_class_size(class_index));
	latch_drop(&cache->latch);
	if (block)
		unpoison(block->data, block_class_size(class_index));
	return block;
}

/* Under the latch. The largest that is cached of larger ones than those of a class, or NULL: it is in the cache no more. */
static struct block *cache_evict(struct block_cache *cache, uint32_t class_index)
{
	for (; cache->largest > class_index; cache->largest--) {
		struct block *block = cache->classes[cache->largest].free;

		if (!block)
			continue;
		cache->classes[cache->largest].free = block->next;
		cache->cached -= block_class_size(cache->largest);
		return block;
	}
	return NULL;
}

/*
 * Returns what goes back to the system: nothing where there is room in the cache; else a larger block, or else this one. To make
 * a slab for a small one again and again costs a hundred times what the block does, and one large one makes room for many.
 */
static struct block *block_to_cache(struct block_cache *cache, struct block *block)
{
	struct block_class *class = &cache->classes[block->class_index];
	size_t size = block_class_size(block->class_index);
	struct block *out = NULL;

	poison(block->data, size);
	latch_take(&cache->latch);
	block_count(cache, -(uint64_t)size);
	if (cache->cached + size > cache->limit)
		out = cache_evict(cache, block->class_index) ?: block;
	if (out != block) {
		cache->cached += size;
		cache->largest = MAX(cache->largest, block->class_index);
		block->next = class->free;
		class->free = block;
	}
	latch_drop(&cache->latch);
	return out;
}

int block_new(struct block_cache *cache, size_t len, struct quota *quota, struct block **ret_block)
{
	struct block *block;
	uint32_t class_index;

	if (len > block_class_size(BLOCK_CLASSES - 1))
		return error_origin(-ENOMEM);
	class_index = block_class_of(len);
	if (quota && quota_charge(quota, block_class_size(class_index)))
		return QUOTA_E_FULL;

	block = block_from_cache(cache, class_index);
	if (!block)
		block = block_from_slab(cache, class_index);
	if (!block) {
		latch_take(&cache->latch);
		block_count(cache, -(uint64_t)block_class_size(class_index));
		latch_drop(&cache->latch);
		if (quota)
			quota_release(quota, block_class_size(class_index));
		return error_origin(-ENOMEM);
	}

	block->len = len;
	block->quota = quota;
	block->next = NULL;
	atomic_store_explicit(&block->refs, 1, memory_order_relaxed);
	*ret_block = block;
	return 0;
}

void block_borrow(struct block *block, void *data, size_t len, void (*gone)(struct block *block))
{
	*block = (struct block){ .refs = 1, .len = len, .data = data, .gone = gone };
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
	uint32_t refs;

	if (!block)
		return NULL;
	/*
	 * What any holder did to the data comes before what the next user of the memory does. Whoever holds the only reference
	 * need not count it down: nobody else can take one.
	 */
	refs = atomic_load_explicit(&block->refs, memory_order_acquire);
	assert(refs > 0);
	if (refs > 1) {
		refs = atomic_fetch_sub_explicit(&block->refs, 1, memory_order_acq_rel);
		if (refs > 1)
			return NULL;
	}

	if (block->gone) {
		block->gone(block);
		return NULL;
	}
	if (block->quota)
		quota_release(block->quota, block_class_size(block->class_index));
	block = block_to_cache(block->cache, block);
	if (block)
		slab_give(block->slab, block);
	return NULL;
}
