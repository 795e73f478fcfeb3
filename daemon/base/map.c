/*
 * The hash map and its hash: buckets that grow by steps, so that no call is slow, and
 * SipHash-1-3 under a seed of the process.
 */
#include "base/map.h"

#include <pthread.h>
#include <sys/random.h>

#define MAP_MIN_BUCKETS 16

static pthread_once_t map_seed_once = PTHREAD_ONCE_INIT;
static uint64_t map_seed[2]; /* set once, constant afterwards */

static void map_seed_fill(void)
{
	/*
	 * Early in boot the kernel may have no randomness to give without waiting, and a sandbox
	 * may refuse the call. The address of the stack is then the best there is: worse against a
	 * chosen collision, and no reason to die.
	 */
	if (getrandom(map_seed, sizeof(map_seed), GRND_NONBLOCK) != (ssize_t)sizeof(map_seed)) {
		map_seed[0] = (uint64_t)(uintptr_t)&map_seed;
		map_seed[1] = (uint64_t)(uintptr_t)__builtin_frame_address(0);
	}
}

static inline uint64_t rotate_left(uint64_t x, unsigned n)
{
	return (x << n) | (x >> (64 - n));
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotate_left(v[1], 13) ^ v[0];
	v[0] = rotate_left(v[0], 32);
	v[2] += v[3];
	v[3] = rotate_left(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotate_left(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotate_left(v[1], 17) ^ v[2];
	v[2] = rotate_left(v[2], 32);
}

/*
 * SipHash-1-3. Names come from outside, and fast hashes such as XXH3 have collisions that hold for
 * every seed: this one is made to have none that can be found.
 */
uint64_t map_hash(const void *data, size_t len)
{
	const unsigned char *bytes = data;
	uint64_t v[4], word, last = (uint64_t)len << 56;

	(void)pthread_once(&map_seed_once, map_seed_fill);
	v[0] = map_seed[0] ^ 0x736f6d6570736575;
	v[1] = map_seed[1] ^ 0x646f72616e646f6d;
	v[2] = map_seed[0] ^ 0x6c7967656e657261;
	v[3] = map_seed[1] ^ 0x7465646279746573;

	for (; len >= sizeof(word); bytes += sizeof(word), len -= sizeof(word)) {
		memcpy(&word, bytes, sizeof(word));
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
	}
	for (size_t i = 0; i < len; i++)
		last |= (uint64_t)bytes[i] << (8 * i);
	v[3] ^= last;
	sip_round(v);
	v[0] ^= last;
	v[2] ^= 0xff;
	for (unsigned i = 0; i < 3; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* Numbers are their own hash, so they are mixed here, keyed too. Called only once there are buckets. */
static size_t map_mix(uint64_t hash)
{
	uint64_t x = hash ^ map_seed[0];

	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93;
	x ^= x >> 32;
	x *= map_seed[1] | 1;
	x ^= x >> 32;
	return (size_t)x;
}

/* The chain of a hash. */
static struct map_entry **map_chain(const struct map *map, uint64_t hash)
{
	size_t x = map_mix(hash);

	if (unlikely(map->old)) {
		size_t at = x & (map->n_buckets / 2 - 1);

		if (at >= map->n_moved)
			return &map->old[at];
	}
	return &map->buckets[x & (map->n_buckets - 1)];
}

static void buckets_free(struct map *map, struct map_entry **buckets, size_t n)
{
	free(buckets);
	quota_release(map->quota, n * sizeof(*buckets));
}

/* Moves some chains to where they belong. */
static void map_move(struct map *map)
{
	size_t n_old = map->n_buckets / 2, end = MIN(map->n_moved + MAP_STEP, n_old);

	while (map->n_moved < end) {
		struct map_entry *entry = map->old[map->n_moved++], *next;

		for (; entry; entry = next) {
			struct map_entry **head = map_chain(map, entry->hash);

			next = entry->next;
			entry->next = *head;
			*head = entry;
		}
	}
	if (map->n_moved == n_old) {
		buckets_free(map, map->old, n_old);
		map->old = NULL;
	}
}

/*
 * At least as many entries as there were buckets come before the next time: all chains have moved
 * by then.
 */
static int map_grow(struct map *map)
{
	size_t n_buckets = map->n_buckets ? 2 * map->n_buckets : MAP_MIN_BUCKETS;
	struct map_entry **buckets;

	assert(!map->old);

	if (quota_charge(map->quota, n_buckets * sizeof(*buckets)))
		return -EDQUOT;
	buckets = calloc(n_buckets, sizeof(*buckets));
	if (!buckets) {
		quota_release(map->quota, n_buckets * sizeof(*buckets));
		return -ENOMEM;
	}
	(void)pthread_once(&map_seed_once, map_seed_fill);
	map->old = map->buckets;
	map->n_moved = 0;
	map->buckets = buckets;
	map->n_buckets = n_buckets;
	return 0;
}

int map_add(struct map *map, uint64_t hash, struct map_entry *entry)
{
	struct map_entry **head;
	int r;

	if (unlikely(map->old)) {
		map_move(map);
	} else if (map->n_entries >= map->n_buckets) {
		/*
		 * Chains that stay long for want of memory are slow, not wrong: only the first
		 * buckets are needed.
		 */
		r = map_grow(map);
		if (r && !map->n_buckets)
			return r;
	}

	head = map_chain(map, hash);
	entry->hash = hash;
	entry->next = *head;
	*head = entry;
	map->n_entries++;
	return 0;
}

void map_remove(struct map *map, struct map_entry *entry)
{
	struct map_entry **link;

	assert(map->n_entries > 0);

	link = map_chain(map, entry->hash);
	while (*link != entry) {
		assert(*link);
		link = &(*link)->next;
	}
	*link = entry->next;
	entry->next = NULL;
	map->n_entries--;
}

static struct map_entry *map_walk(struct map_entry *entry, uint64_t hash)
{
	while (entry && entry->hash != hash)
		entry = entry->next;
	return entry;
}

struct map_entry *map_find(const struct map *map, uint64_t hash)
{
	if (!map->n_entries)
		return NULL;
	return map_walk(*map_chain(map, hash), hash);
}

struct map_entry *map_find_next(const struct map_entry *entry)
{
	return map_walk(entry->next, entry->hash);
}

/* The first entry of those that have not moved, from a bucket on. They come before the rest. */
static struct map_entry *map_first_old(const struct map *map, size_t bucket)
{
	for (; map->old && bucket < map->n_buckets / 2; bucket++)
		if (map->old[bucket])
			return map->old[bucket];
	return NULL;
}

static struct map_entry *map_first_from(const struct map *map, size_t bucket)
{
	for (; bucket < map->n_buckets; bucket++)
		if (map->buckets[bucket])
			return map->buckets[bucket];
	return NULL;
}

struct map_entry *map_first(const struct map *map)
{
	if (!map->n_entries)
		return NULL;
	return map_first_old(map, map->n_moved) ?: map_first_from(map, 0);
}

struct map_entry *map_next(const struct map *map, const struct map_entry *entry)
{
	struct map_entry **chain, *next = entry->next;

	if (next)
		return next;
	chain = map_chain(map, entry->hash);
	if (map->old && chain >= map->old && chain < map->old + map->n_buckets / 2)
		return map_first_old(map, (size_t)(chain - map->old) + 1) ?: map_first_from(map, 0);
	return map_first_from(map, (size_t)(chain - map->buckets) + 1);
}

void map_done(struct map *map)
{
	if (map->old)
		buckets_free(map, map->old, map->n_buckets / 2);
	buckets_free(map, map->buckets, map->n_buckets);
	*map = (struct map){ .quota = map->quota };
}
