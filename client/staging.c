/*
 * A staging area: arenas that the daemon maps, for operations on memory that it cannot reach. An arena is a list of
 * free ranges; a range that is taken belongs to its request. The area grows by doubling. That of the host, when it is large, is
 * trimmed each time it is empty to what the last two busy times needed; those of devices stay as long as the job.
 */
#include "cuda.h"

#define STAGING_KEEP 4 /* an arena this many times larger than what was needed goes */
#define STAGING_STAYS \
	(UINT64_C(64) \
	 << 20) /* an area up to this is never trimmed: making it again would cost more */

void staging_init(struct staging *staging, uint64_t arena_min, struct cuda_device *device)
{
	*staging = (struct staging){ .device = device, .arena_min = arena_min };
	TAILQ_INIT(&staging->arenas);
}

static struct staging_range *arena_take(struct staging_arena *arena, uint64_t len)
{
	struct staging_range *free_range, *range;

	TAILQ_FOREACH(free_range, &arena->free, link)
	{
		if (free_range->len < len)
			continue;
		if (free_range->len == len) {
			TAILQ_REMOVE(&arena->free, free_range, link);
			return free_range;
		}
		range = malloc(sizeof(*range));
		if (!range)
			return NULL;
		*range = (struct staging_range){
			.arena = arena,
			.offset = free_range->offset,
			.len = len,
		};
		free_range->offset += len;
		free_range->len -= len;
		return range;
	}
	return NULL;
}

static struct staging_range *staging_take(struct staging *staging, uint64_t len)
{
	struct staging_arena *arena;

	TAILQ_FOREACH(arena, &staging->arenas, link)
	{
		struct staging_range *range = arena_take(arena, len);

		if (!range)
			continue;
		arena->used += len;
		staging->used += len;
		staging->peak = MAX(staging->peak, staging->used);
		return range;
	}
	return NULL;
}

static void arena_free(struct staging_arena *arena)
{
	struct staging_range *range;

	while ((range = TAILQ_FIRST(&arena->free))) {
		TAILQ_REMOVE(&arena->free, range, link);
		free(range);
	}
	if (arena->staging) {
		TAILQ_REMOVE(&arena->staging->arenas, arena, link);
		arena->staging->capacity -= arena->memory->len;
	}
	memory_free(arena->memory);
	free(arena);
}

/* (locked, may wait) */
static int arena_new(struct bps_client *client, struct staging *staging, uint64_t len)
{
	struct staging_arena *arena = calloc(1, sizeof(*arena));
	struct staging_range *range = calloc(1, sizeof(*range));
	struct bps_memory *memory;
	int r = -ENOMEM;

	if (!arena || !range)
		(void)error_set(r, "out of memory");
	else if (staging->device)
		r = cuda_arena_new(client, staging->device, len, &memory);
	else
		r = memory_new(client, len, &memory);
	if (r) {
		free(range);
		free(arena);
		return r;
	}

	*range = (struct staging_range){ .arena = arena, .len = memory->len };
	arena->staging = staging;
	arena->memory = memory;
	TAILQ_INIT(&arena->free);
	TAILQ_INSERT_HEAD(&arena->free, range, link);
	/* The largest first: the others then stay empty, and go. */
	TAILQ_INSERT_HEAD(&staging->arenas, arena, link);
	staging->capacity += memory->len;
	return 0;
}

/* One thread grows it for all. (locked, may wait) */
static int staging_grow(struct bps_client *client, struct staging *staging, uint64_t len)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t exact = align_up(len, page);
	uint64_t wanted = MAX(MAX(staging->capacity, staging->arena_min), exact);
	int r;

	if (staging->growing) {
		client_wait(client, CLIENT_FOREVER);
		return client_failed(client);
	}

	staging->growing = true;
	r = arena_new(client, staging, wanted);
	/* The daemon's limit for one session, or the device's memory: what is needed now may still fit. */
	if (r && !client->failure && exact < wanted)
		r = arena_new(client, staging, exact);
	staging->growing = false;
	client_wake(client);
	return r;
}

int staging_alloc(struct bps_client *client, struct staging *staging, uint64_t len,
		  struct staging_range **ret_range)
{
	struct staging_range *range;
	int r;

	if (len > (uint64_t)INT64_MAX / 2)
		return error_set(-ENOMEM, "%llu bytes are more than there can be",
				 (unsigned long long)len);
	len = align_up(MAX(len, UINT64_C(1)), STAGING_ALIGN);
	while (!(range = staging_take(staging, len))) {
		r = staging_grow(client, staging, len);
		if (r)
			return r;
	}
	*ret_range = range;
	return 0;
}

static void staging_trim(struct staging *staging)
{
	uint64_t needed = MAX(staging->peak, staging->last_peak);
	struct staging_arena *arena, *next;

	staging->last_peak = staging->peak;
	staging->peak = 0;
	arena = TAILQ_FIRST(&staging->arenas);
	if (!arena || staging->capacity <= STAGING_STAYS)
		return;
	/* What one arena would have held needs no second. */
	if (arena->memory->len >= needed) {
		while ((next = TAILQ_NEXT(arena, link)))
			arena_free(next);
	}
	if (staging->capacity > STAGING_STAYS && arena->memory->len / STAGING_KEEP > needed)
		arena_free(arena);
}

struct staging_range *staging_free(struct staging_range *range)
{
	struct staging_range *before = NULL, *after, *joined;
	struct staging_arena *arena;
	struct staging *staging;

	if (!range)
		return NULL;
	arena = range->arena;
	staging = arena->staging;
	arena->used -= range->len;
	if (staging)
		staging->used -= range->len;

	TAILQ_FOREACH(after, &arena->free, link)
	{
		if (after->offset > range->offset)
			break;
		before = after;
	}
	joined = range;
	if (before && before->offset + before->len == range->offset) {
		before->len += range->len;
		free(range);
		joined = before;
	} else if (before) {
		TAILQ_INSERT_AFTER(&arena->free, before, range, link);
	} else {
		TAILQ_INSERT_HEAD(&arena->free, range, link);
	}
	if (after && joined->offset + joined->len == after->offset) {
		joined->len += after->len;
		TAILQ_REMOVE(&arena->free, after, link);
		free(after);
	}
	if (!staging && !arena->used)
		arena_free(arena);
	else if (staging && !staging->used && !staging->device)
		staging_trim(staging);
	return NULL;
}

void staging_done(struct staging *staging)
{
	struct staging_arena *arena, *next;

	for (arena = TAILQ_FIRST(&staging->arenas); arena; arena = next) {
		next = TAILQ_NEXT(arena, link);
		if (!arena->used) {
			arena_free(arena);
			continue;
		}
		/* A stream is to read or write it still. */
		TAILQ_REMOVE(&staging->arenas, arena, link);
		arena->staging = NULL;
	}
	staging->capacity = staging->used = staging->peak = staging->last_peak = 0;
}
