/*
 * The cache of blocks: sizes, alignment, reuse, limits, quotas, slabs and their watchers, threads.
 */
#include "base/memory/block.h"
#include "base/pages.h"
#include "test.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

TEST(sizes_and_alignment)
{
	static const size_t lens[] = { 0,    1,	   255,	  256,		 257,
				       4096, 4097, 65536, (4 << 20) + 1, 4 << 20 };
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;

	ASSERT_OK(block_cache_new(1 << 20, &cache));
	for (size_t i = 0; i < ARRAY_SIZE(lens); i++) {
		_cleanup_(block_unrefp) struct block *block = NULL;

		ASSERT_OK(block_new(cache, lens[i], NULL, &block));
		ASSERT_EQ(block->len, lens[i]);
		ASSERT_EQ((uintptr_t)block->data % CACHE_LINE, 0);
		memset(block->data, 0xff, lens[i]); /* the address sanitizer looks */
		ASSERT_EQ(block_cache_used(cache), block_bytes(lens[i]));
	}
	ASSERT_EQ(block_cache_used(cache), 0);
}

/* What is charged is what is there: few bytes more than asked for, and never fewer. */
TEST(a_block_takes_at_most_a_quarter_more_than_it_holds)
{
	size_t before = 0;

	ASSERT_EQ(block_bytes(0), 256);
	for (size_t len = 1; len <= 70000; len++) {
		size_t bytes = block_bytes(len);

		ASSERT_TRUE(bytes >= len && bytes >= before && bytes % CACHE_LINE == 0);
		ASSERT_TRUE(bytes <= MAX(len - 1 + (len - 1) / 4, (size_t)256) + 1);
		ASSERT_EQ(block_bytes(bytes), bytes);
		before = bytes;
	}
	for (size_t power = 256; power <= (size_t)1 << 40; power *= 2)
		ASSERT_EQ(block_bytes(power), power);
}

static void slab_added(struct block_watcher *watcher, void *data, size_t len)
{
	(void)watcher;
	ASSERT_TRUE(data && len);
}

static void slab_removed(struct block_watcher *watcher, void *data)
{
	(void)watcher;
	ASSERT_TRUE(data);
}

/* Those of which a device is told. */
TEST(large_blocks_of_slabs_lie_in_huge_pages)
{
	struct block_watcher watcher = { .slab_added = slab_added, .slab_removed = slab_removed };
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	_cleanup_(block_unrefp) struct block *block = NULL;

	if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK))
		TEST_SKIP("this kernel has no transparent huge pages");
	ASSERT_OK(block_cache_new(16 << 20, &cache));
	block_cache_watch(cache, &watcher);
	for (size_t i = 0; i < 3; i++) {
		ASSERT_OK(block_new(cache, 4 << 20, NULL, &block));
		/* It begins in the first page of the first of them. */
		ASSERT_TRUE((uintptr_t)block->data % (2 << 20) < 4096);
		ASSERT_TRUE(test_is_huge(block->data));
		ASSERT_TRUE(test_is_huge((char *)block->data + (4 << 20) - 4096));
		block = block_unref(block);
	}
	block_cache_unwatch(cache, &watcher);
}

/* Whether any two of more blocks than a set of the first cache has ways would share one, line for line. */
static bool share_a_set(struct block_cache *cache, size_t len)
{
	struct block *blocks[17];
	bool taken[4096 / CACHE_LINE] = { false }, share = false;

	for (size_t i = 0; i < ARRAY_SIZE(blocks); i++) {
		size_t set;

		ASSERT_OK(block_new(cache, len, NULL, &blocks[i]));
		ASSERT_EQ((uintptr_t)blocks[i]->data % CACHE_LINE, 0);
		memset(blocks[i]->data, (int)i, len); /* the address sanitizer looks */
		set = (uintptr_t)blocks[i]->data % 4096 / CACHE_LINE;
		share |= taken[set];
		taken[set] = true;
	}
	for (size_t i = 0; i < ARRAY_SIZE(blocks); i++) {
		for (size_t at = 0; at < len; at += 97)
			ASSERT_EQ(((unsigned char *)blocks[i]->data)[at], i);
		ASSERT_TRUE(!block_unref(blocks[i]));
	}
	return share;
}

TEST(blocks_of_one_sum_share_no_set_of_the_first_cache)
{
	struct block_watcher watcher = { .slab_added = slab_added, .slab_removed = slab_removed };
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;

	ASSERT_OK(block_cache_new(0, &cache));
	for (size_t len = 64 << 10; len <= 8 << 20; len *= 2)
		ASSERT_TRUE(!share_a_set(cache, len));
	block_cache_watch(cache, &watcher);
	/* Of some, many are in a slab; of others, each is in one of its own. */
	for (size_t len = 4 << 10; len <= 8 << 20; len *= 2)
		ASSERT_TRUE(!share_a_set(cache, len));
	block_cache_unwatch(cache, &watcher);
}

TEST(absurd_length_is_refused)
{
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *block = NULL;
	struct quota quota;

	quota_init(&quota, UINT64_MAX, NULL);
	ASSERT_OK(block_cache_new(0, &cache));
	ASSERT_EQ(block_new(cache, SIZE_MAX, &quota, &block), -ENOMEM);
	ASSERT_EQ(block_new(cache, ((size_t)1 << 40) + 1, &quota, &block), -ENOMEM);
	ASSERT_TRUE(!block);
	ASSERT_EQ(quota_used(&quota), 0);
}

TEST(steady_state_uses_the_same_memory)
{
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *block, *first;

	ASSERT_OK(block_cache_new(1 << 20, &cache));
	ASSERT_OK(block_new(cache, 5000, NULL, &first));
	(void)block_unref(first);
	for (unsigned i = 0; i < 10; i++) {
		ASSERT_OK(block_new(cache, 5120 - i, NULL, &block));
		ASSERT_TRUE(block == first);
		ASSERT_EQ(block->len, 5120 - i);
		(void)block_unref(block);
	}
}

TEST(cache_keeps_no_more_than_its_limit)
{
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *blocks[3], *block;

	ASSERT_OK(block_cache_new(2048, &cache));
	for (size_t i = 0; i < ARRAY_SIZE(blocks); i++)
		ASSERT_OK(block_new(cache, 1024, NULL, &blocks[i]));
	/* The third does not fit: the two before it come back, last first. */
	for (size_t i = 0; i < ARRAY_SIZE(blocks); i++)
		(void)block_unref(blocks[i]);
	ASSERT_OK(block_new(cache, 1024, NULL, &block));
	ASSERT_TRUE(block == blocks[1]);
	(void)block_unref(block);
}

struct slabs {
	struct block_watcher watcher;
	unsigned n_added, n_removed;
};

static void count_added(struct block_watcher *watcher, void *data, size_t len)
{
	ASSERT_TRUE(data && len);
	container_of(watcher, struct slabs, watcher)->n_added++;
}

static void count_removed(struct block_watcher *watcher, void *data)
{
	ASSERT_TRUE(data);
	container_of(watcher, struct slabs, watcher)->n_removed++;
}

/* Small blocks come and go without the system, though what is cached was left by larger ones. */
TEST(large_ones_in_the_cache_make_room_for_smaller_ones)
{
	struct slabs slabs = { { .slab_added = count_added, .slab_removed = count_removed } };
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *blocks[4];

	ASSERT_OK(block_cache_new(2 * (8 << 20), &cache));
	block_cache_watch(cache, &slabs.watcher);
	for (size_t i = 0; i < 2; i++)
		ASSERT_OK(block_new(cache, 8 << 20, NULL, &blocks[i]));
	for (size_t i = 0; i < 2; i++)
		(void)block_unref(blocks[i]);
	ASSERT_EQ(slabs.n_added, 2);
	ASSERT_EQ(slabs.n_removed, 0);
	for (unsigned turn = 0; turn < 10; turn++) {
		for (size_t i = 0; i < ARRAY_SIZE(blocks); i++)
			ASSERT_OK(block_new(cache, 1000, NULL, &blocks[i]));
		for (size_t i = 0; i < ARRAY_SIZE(blocks); i++)
			(void)block_unref(blocks[i]);
		ASSERT_EQ(slabs.n_added, 3);
		ASSERT_EQ(slabs.n_removed, 1);
	}
	/* Not the other way round: one large one would take the place of thousands. */
	for (size_t i = 0; i < 2; i++)
		ASSERT_OK(block_new(cache, 8 << 20, NULL, &blocks[i]));
	for (size_t i = 0; i < 2; i++)
		(void)block_unref(blocks[i]);
	ASSERT_EQ(slabs.n_added, 4);
	ASSERT_EQ(slabs.n_removed, 2);
	block_cache_unwatch(cache, &slabs.watcher);
}

static size_t resident(void)
{
	FILE *file = fopen("/proc/self/statm", "re");
	size_t all, here;

	ASSERT_TRUE(file);
	ASSERT_EQ(fscanf(file, "%zu %zu", &all, &here), 2);
	ASSERT_OK(fclose(file));
	return here * page_size();
}

static bool is_resident(const void *page)
{
	unsigned char is;

	/* It may have gone with its slab. */
	return !mincore((void *)page, page_size(), &is) && is & 1;
}

/* Whether one of the blocks, of so many bytes each, is in this page. */
static bool is_used(struct block *const *blocks, size_t n, size_t len, const char *page)
{
	for (size_t i = 0; i < n; i++)
		if (blocks[i] && (char *)blocks[i]->data < page + page_size() &&
		    (char *)blocks[i]->data + len > page)
			return true;
	return false;
}

/* Of blocks of any size: of who has given back all but a few no more is resident than the pages of these. */
TEST(blocks_that_are_used_keep_no_others_from_the_system)
{
	enum { N = 256, LONGEST = 128 << 10 };

	/* The kernel would fill up again what was a huge page, some time. */
	ASSERT_OK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0));
	for (size_t len = 256; len <= LONGEST; len = block_bytes(len + 1)) {
		struct block_cache *cache;
		struct block *blocks[N];
		char *places[N];

		ASSERT_OK(block_cache_new(0, &cache));
		for (size_t i = 0; i < N; i++) {
			ASSERT_OK(block_new(cache, len, NULL, &blocks[i]));
			places[i] = blocks[i]->data;
			memset(places[i], (int)i, len);
		}
		for (size_t i = 0; i < N; i++)
			if (i % 37)
				blocks[i] = block_unref(blocks[i]);
		for (size_t i = 0; i < N; i++) {
			char *page = places[i] - (uintptr_t)places[i] % page_size();

			for (; page < places[i] + len; page += page_size())
				ASSERT_TRUE(is_resident(page) == is_used(blocks, N, len, page));
		}
		/* Those that are used have what was written there, also when others have had their turn in the same pages. */
		for (size_t i = 0; i < N; i++) {
			if (!blocks[i])
				ASSERT_OK(block_new(cache, len, NULL, &blocks[i]));
			else
				ASSERT_TRUE(((unsigned char *)blocks[i]->data)[len - 1] ==
						    (unsigned char)i &&
					    *(unsigned char *)blocks[i]->data == (unsigned char)i);
		}
		for (size_t i = 0; i < N; i++)
			(void)block_unref(blocks[i]);
		block_cache_free(cache);
	}
	ASSERT_OK(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0));
}

/* Also where some that were made between them are still used. */
TEST_FULL_TIER(what_is_not_cached_goes_back_to_the_system,
	       "in the gate what is resident is the sanitizer's")
{
	enum { N = 256, LEN = 256 << 10 };
	struct block_cache *cache;
	struct block *blocks[N];
	size_t before;

#ifdef TEST_SANITIZED
	TEST_SKIP("what is resident is the sanitizer's");
#endif
	ASSERT_OK(block_cache_new(0, &cache));
	/* malloc() would keep it once it has given the same back. */
	ASSERT_OK(block_new(cache, LEN, NULL, &blocks[0]));
	(void)block_unref(blocks[0]);
	before = resident();
	for (size_t i = 0; i < N; i++) {
		ASSERT_OK(block_new(cache, LEN, NULL, &blocks[i]));
		memset(blocks[i]->data, 1, LEN);
	}
	ASSERT_INT(resident(), >=, before + N * LEN);
	for (size_t i = 0; i < N; i++)
		if (i % 8)
			(void)block_unref(blocks[i]);
	ASSERT_INT(resident(), <, before + N * LEN / 4);
	for (size_t i = 0; i < N; i += 8)
		(void)block_unref(blocks[i]);
	ASSERT_INT(resident(), <, before + N * LEN / 16);
	block_cache_free(cache);
}

int __real_munmap(void *data, size_t len);
int __wrap_munmap(void *data, size_t len);

/* Bytes that were unmapped, and of them those by the main thread. */
static _Atomic size_t n_unmapped, n_unmapped_here;

int __wrap_munmap(void *data, size_t len)
{
	n_unmapped_here += gettid() == getpid() ? len : 0;
	n_unmapped += len;
	return __real_munmap(data, len);
}

/* Milliseconds each, of which one turn of the control thread may give back many. */
TEST(large_ones_are_unmapped_elsewhere)
{
	enum { N = 8, LEN = 8 << 20 };
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *blocks[N];

	ASSERT_OK(block_cache_new(0, &cache));
	for (size_t i = 0; i < N; i++)
		ASSERT_OK(block_new(cache, LEN, NULL, &blocks[i]));
	n_unmapped = n_unmapped_here = 0;
	for (size_t i = 0; i < N; i++)
		(void)block_unref(blocks[i]);
	while (n_unmapped < (size_t)N * LEN)
		(void)sched_yield();
	ASSERT_INT(n_unmapped_here, <, LEN);
}

TEST(quota_is_charged_until_the_last_reference)
{
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct block *block, *refused = NULL;
	struct quota quota;

	quota_init(&quota, 1000, NULL);
	ASSERT_OK(block_cache_new(1 << 20, &cache));
	ASSERT_OK(block_new(cache, 700, &quota, &block));
	ASSERT_EQ(block_bytes(700), 768);
	ASSERT_EQ(block_new(cache, 1, &quota, &refused), QUOTA_E_FULL);
	ASSERT_TRUE(!refused);
	ASSERT_EQ(block_cache_used(cache), 768);
	ASSERT_TRUE(block_ref(block) == block);
	ASSERT_TRUE(!block_unref(block));
	ASSERT_EQ(quota_used(&quota), 768);
	(void)block_unref(block);
	ASSERT_EQ(quota_used(&quota), 0);
	ASSERT_TRUE(!block_unref(NULL));
}

struct churn {
	struct block_cache *cache;
	struct quota *quota;
	unsigned char mark;
	bool wrong;
};

static void *churn(void *arg)
{
	struct churn *c = arg;

	for (size_t i = 0; i < 3000; i++) {
		size_t len = (i * 37) % 2000;
		struct block *block;

		if (block_new(c->cache, len, c->quota, &block))
			continue;
		(void)block_ref(block);
		memset(block->data, c->mark, len);
		(void)block_unref(block);
		for (size_t k = 0; k < len; k += 97)
			c->wrong |= ((unsigned char *)block->data)[k] != c->mark;
		(void)block_unref(block);
	}
	return NULL;
}

TEST(threads_share_the_cache_but_no_block)
{
	_cleanup_(block_cache_freep) struct block_cache *cache = NULL;
	struct churn churns[4];
	pthread_t threads[4];
	struct quota quota;

	quota_init(&quota, 3000, NULL);
	ASSERT_OK(block_cache_new(4096, &cache));
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
		churns[i] = (struct churn){ cache, &quota, (unsigned char)(i + 1), false };
		ASSERT_OK(pthread_create(&threads[i], NULL, churn, &churns[i]));
	}
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
		ASSERT_OK(pthread_join(threads[i], NULL));
		ASSERT_TRUE(!churns[i].wrong);
	}
	ASSERT_EQ(block_cache_used(cache), 0);
	ASSERT_EQ(quota_used(&quota), 0);
}

static unsigned n_gone;

static void on_gone(struct block *block)
{
	n_gone++;
	memset(block->data, 0, block->len);
	memset(block, 0xee, sizeof(*block));
}

TEST(memory_of_somebody_else_goes_back_with_the_last_reference)
{
	struct block block;
	char data[100];

	block_borrow(&block, data, sizeof(data), on_gone);
	ASSERT_EQ(block.len, sizeof(data));
	ASSERT_TRUE(block.data == data);
	ASSERT_TRUE(block_ref(&block) == &block);
	ASSERT_TRUE(!block_unref(&block));
	ASSERT_EQ(n_gone, 0);
	ASSERT_TRUE(!block_unref(&block));
	ASSERT_EQ(n_gone, 1);
}
