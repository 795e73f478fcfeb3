#include "base/map.h"

#include <pthread.h>
#include <sys/random.h>

#define MAP_MIN_BUCKETS 16

static pthread_once_t map_seed_once = PTHREAD_ONCE_INIT;
static uint64_t map_seed[2]; /* set once, constant afterwards */

static void map_seed_fill(void)
{
	/*
	 * Early in boot the kernel may have no randomness to give without waiting, and a sandbox may refuse the call.
	 * The address of the stack is then the best there is: worse against a chosen collision, and no reason to die.
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
 * SipHash-1-3. Names come from outside, and fast hashes such as XXH3 have collisions that hold for every seed: this one
 * is made to have none that can be found.
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
static size_t map_bucket(const struct map *map, uint64_t hash)
{
	uint64_t x = hash ^ map_seed[0];

	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93;
	x ^= x >> 32;
	x *= map_seed[1] | 1;
	x ^= x >> 32;
	return (size_t)x & (map->n_buckets - 1);
}

static int map_grow(struct map *map)
{
	struct map old = *map;
	size_t n_buckets = old.n_buckets ? 2 * old.n_buckets : MAP_MIN_BUCKETS;
	struct map_entry **buckets = calloc(n_buckets, sizeof(*buckets));

	if (!buckets)
		return -ENOMEM;

	(void)pthread_once(&map_seed_once, map_seed_fill);
	map->buckets = buckets;
	map->n_buckets = n_buckets;
	for (size_t i = 0; i < old.n_buckets; i++) {
		struct map_entry *entry = old.buckets[i], *next;

		for (; entry; entry = next) {
			struct map_entry **head = &buckets[map_bucket(map, entry->hash)];

			next = entry->next;
			entry->next = *head;
			*head = entry;
		}
	}
	free(old.buckets);
	return 0;
}

int map_add(struct map *map, uint64_t hash, struct map_entry *entry)
{
	struct map_entry **head;

	/* Chains that stay long for want of memory are slow, not wrong: only the first buckets are needed. */
	if (map->n_entries >= map->n_buckets && map_grow(map) < 0 && !map->n_buckets)
		return -ENOMEM;

	head = &map->buckets[map_bucket(map, hash)];
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

	link = &map->buckets[map_bucket(map, entry->hash)];
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
	return map_walk(map->buckets[map_bucket(map, hash)], hash);
}

struct map_entry *map_find_next(const struct map_entry *entry)
{
	return map_walk(entry->next, entry->hash);
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
	return map->n_entries ? map_first_from(map, 0) : NULL;
}

struct map_entry *map_next(const struct map *map, const struct map_entry *entry)
{
	if (entry->next)
		return entry->next;
	return map_first_from(map, map_bucket(map, entry->hash) + 1);
}

void map_done(struct map *map)
{
	free(map->buckets);
	*map = (struct map)MAP_INIT;
}
