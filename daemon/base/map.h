/*
 * Intrusive hash map: entries with a 64-bit hash, chained, growing by doubling. Keys that are numbers are their own
 * hash (mixed inside); keys that are strings use map_hash() and are told apart by the caller, who walks the entries of
 * one hash. Seeded per process, so that names from outside cannot be chosen to collide. To grow costs no call more than
 * MAP_STEP chains: the old buckets are emptied as entries are added, and until then both are looked at. One thread at a
 * time.
 */
#pragma once

#include "base/quota.h"
#include "proto/c.h"

#define MAP_STEP 4

struct map_entry {
	struct map_entry *next;
	uint64_t hash;
};

struct map {
	struct map_entry **buckets;
	size_t n_buckets; /* 0 or a power of two */
	/* While the map grows: half as many, of which those before n_moved are empty. Else NULL. */
	struct map_entry **old;
	size_t n_moved;
	size_t n_entries;
	struct quota *quota; /* charged for the buckets; NULL: nobody */
};

#define MAP_INIT  \
	{         \
		0 \
	}

uint64_t map_hash(const void *data, size_t len);
static inline uint64_t map_hash_string(const char *s)
{
	return map_hash(s, strlen(s));
}

/* Adds an entry under a hash; equal hashes are allowed. Returns 0, -ENOMEM or -EDQUOT (then nothing changed). */
int map_add(struct map *map, uint64_t hash, struct map_entry *entry);
/* Removes an entry that is in the map. */
void map_remove(struct map *map, struct map_entry *entry);
/* First entry with this hash, or NULL; then the next with the same hash. */
struct map_entry *map_find(const struct map *map, uint64_t hash);
struct map_entry *map_find_next(const struct map_entry *entry);
/* Any entry, then the next in no order; NULL at the end. In between nothing is added, and what map_next() has returned stays. */
struct map_entry *map_first(const struct map *map);
struct map_entry *map_next(const struct map *map, const struct map_entry *entry);
/* Releases the buckets; the entries are the caller's and must have been dealt with. The quota stays who is charged. */
void map_done(struct map *map);

#define map_for_each(entry, map) for (entry = map_first(map); entry; entry = map_next(map, entry))
