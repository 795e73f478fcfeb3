/* The hash map: growth by steps, equal hashes, walks, the seed of a process. */
#include "base/map.h"
#include "test.h"
#include <sys/wait.h>

struct item {
	uint64_t value;
	bool seen;
	struct map_entry entry;
};

static struct item *item_of(struct map_entry *entry)
{
	return entry ? container_of(entry, struct item, entry) : NULL;
}

TEST(empty_map_finds_nothing)
{
	struct map map = MAP_INIT;

	ASSERT_TRUE(!map_find(&map, 0));
	ASSERT_TRUE(!map_first(&map));
	map_done(&map);
}

TEST(numbers_are_found_while_growing_and_shrinking)
{
	enum { N = 5000 };
	_cleanup_(freep) struct item *items = calloc(N, sizeof(*items));
	struct map map = MAP_INIT;

	/* Multiples of a power of two: without mixing all would share a few buckets. */
	for (uint64_t i = 0; i < N; i++) {
		items[i].value = i << 32;
		ASSERT_OK(map_add(&map, items[i].value, &items[i].entry));
	}
	ASSERT_EQ(map.n_entries, N);
	for (uint64_t i = 0; i < N; i++)
		ASSERT_TRUE(item_of(map_find(&map, i << 32)) == &items[i]);
	ASSERT_TRUE(!map_find(&map, 1));

	for (uint64_t i = 0; i < N; i += 2)
		map_remove(&map, &items[i].entry);
	for (uint64_t i = 0; i < N; i++)
		ASSERT_TRUE(item_of(map_find(&map, i << 32)) == (i % 2 ? &items[i] : NULL));
	ASSERT_EQ(map.n_entries, N / 2);
	map_done(&map);
	ASSERT_EQ(map.n_entries, 0);
}

TEST(chains_stay_short)
{
	enum { N = 1 << 14 };
	_cleanup_(freep) struct map_entry *entries = calloc(N, sizeof(*entries));
	struct map map = MAP_INIT;
	size_t longest = 0;

	for (uint64_t i = 0; i < N; i++)
		ASSERT_OK(map_add(&map, i << 40, &entries[i]));
	for (size_t i = 0; i < map.n_buckets; i++) {
		size_t len = 0;

		for (struct map_entry *e = map.buckets[i]; e; e = e->next)
			len++;
		longest = MAX(longest, len);
	}
	/* One entry a bucket on average: random placement gives 7 or 8 here, 20 has a chance below 1e-14. */
	ASSERT_INT(longest, <, 20);
	map_done(&map);
}

/* No call has thousands of entries to move, and between two none is out of sight. */
TEST(it_grows_in_steps)
{
	enum { N = 3 << 12 };
	_cleanup_(freep) struct item *items = calloc(N, sizeof(*items));
	struct map map = MAP_INIT;
	unsigned n_growing = 0;

	for (uint64_t i = 0; i < N; i++) {
		size_t n = 0, moved = map.n_moved;
		bool grows = map.old;
		struct map_entry *entry;

		ASSERT_OK(map_add(&map, i << 40, &items[i].entry));
		if (!map.old)
			continue;
		ASSERT_EQ(map.n_moved, grows ? moved + MAP_STEP : 0);
		if (n_growing++ % 64)
			continue;
		for (uint64_t k = 0; k <= i; k++)
			ASSERT_TRUE(item_of(map_find(&map, k << 40)) == &items[k]);
		map_for_each (entry, &map) {
			ASSERT_TRUE(!item_of(entry)->seen);
			item_of(entry)->seen = true;
			n++;
		}
		ASSERT_EQ(n, i + 1);
		for (uint64_t k = 0; k <= i; k++)
			items[k].seen = false;
		map_remove(&map, &items[i / 2].entry);
		ASSERT_TRUE(!map_find(&map, (i / 2) << 40));
		ASSERT_OK(map_add(&map, (i / 2) << 40, &items[i / 2].entry));
	}
	ASSERT_INT(n_growing, >, N / 8);
	map_done(&map);
}

TEST(its_buckets_are_charged)
{
	struct map_entry entries[64];
	struct quota quota;
	struct map map = { .quota = &quota };

	quota_init(&quota, 600, NULL);
	for (uint64_t i = 0; i < ARRAY_SIZE(entries); i++)
		ASSERT_OK(map_add(&map, i, &entries[i]));
	/* 16 buckets, and 32 while these move; no room for 64. */
	ASSERT_EQ(quota_used(&quota), 32 * sizeof(struct map_entry *));
	for (uint64_t i = 0; i < ARRAY_SIZE(entries); i++)
		ASSERT_TRUE(map_find(&map, i) == &entries[i]);
	map_done(&map);
	ASSERT_EQ(quota_used(&quota), 0);
	quota.limit = 100;
	ASSERT_EQ(map_add(&map, 1, &entries[0]), -EDQUOT);
}

TEST(equal_hashes_live_side_by_side)
{
	struct item items[3] = { { 1 }, { 2 }, { 3 } };
	struct map map = MAP_INIT;
	struct map_entry *entry;
	uint64_t sum = 0;

	for (size_t i = 0; i < ARRAY_SIZE(items); i++)
		ASSERT_OK(map_add(&map, 7, &items[i].entry));
	for (entry = map_find(&map, 7); entry; entry = map_find_next(entry))
		sum += item_of(entry)->value;
	ASSERT_EQ(sum, 6);
	map_remove(&map, &items[1].entry);
	sum = 0;
	for (entry = map_find(&map, 7); entry; entry = map_find_next(entry))
		sum += item_of(entry)->value;
	ASSERT_EQ(sum, 4);
	map_done(&map);
}

TEST(walk_sees_each_once)
{
	struct item items[100] = { 0 };
	struct map map = MAP_INIT;
	struct map_entry *entry;
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(items); i++)
		ASSERT_OK(map_add(&map, i / 3, &items[i].entry));
	map_for_each (entry, &map) {
		ASSERT_TRUE(!item_of(entry)->seen);
		item_of(entry)->seen = true;
		n++;
	}
	ASSERT_EQ(n, ARRAY_SIZE(items));
	map_done(&map);
}

TEST(strings_hash_by_content)
{
	char a[] = "layer1.weight", b[] = "layer1.weight";

	ASSERT_TRUE(map_hash_string(a) == map_hash_string(b));
	/* All lengths around the word, each byte counts: equal by chance once in 2^64. */
	for (size_t len = 0; len < sizeof(a); len++) {
		ASSERT_TRUE(map_hash(a, len) != map_hash(a, len + 1));
		b[len] ^= 1;
		ASSERT_TRUE(map_hash(a, sizeof(a)) != map_hash(b, sizeof(b)));
		b[len] ^= 1;
	}
}

TEST(seed_differs_between_processes)
{
	uint64_t hashes[2];

	for (unsigned i = 0; i < 2; i++) {
		int fds[2];
		pid_t pid;

		ASSERT_OK(pipe(fds));
		pid = fork();
		if (pid == 0) {
			uint64_t hash = map_hash_string("name");

			_exit(write(fds[1], &hash, sizeof(hash)) != sizeof(hash));
		}
		ASSERT_EQ(read(fds[0], &hashes[i], sizeof(hashes[i])), sizeof(hashes[i]));
		ASSERT_EQ(waitpid(pid, NULL, 0), pid);
		(void)fd_close(fds[0]);
		(void)fd_close(fds[1]);
	}
	ASSERT_TRUE(hashes[0] != hashes[1]);
}
