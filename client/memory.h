/* Memory that trainer and daemon share: the caller's, and staging areas. (locked): client.h. */
#pragma once

#include "call.h"
#include <sys/queue.h>

struct cuda_device;
struct cuda_memory;

/*
 * Memory that the daemon maps too: what bps_memory_alloc() gives, each arena of the staging areas, and each allocation on
 * a device that was exported (then data is an address there).
 */
struct bps_memory {
	struct bps_client *client; /* counted, if it is the caller's */
	char *data;
	size_t len;
	bool ours;		       /* mapped by the library */
	int fd;			       /* to share it again; owned */
	LIST_ENTRY(bps_memory) mapped; /* if it is ours; guarded by client_fork_lock() */
	struct cuda_memory *cuda;      /* NULL: of the host; owned */
	/* Guarded by the client's mutex. */
	TAILQ_ENTRY(bps_memory) link; /* in client->memory.shared */
	struct client_call share;
	bool taken;	  /* some daemon had it */
	uint32_t number;  /* the daemon's name for it */
	unsigned n_users; /* requests that are under way */
	bool released;	  /* goes with its last user */
};

/* A piece of the staging area: free and in its arena's list, or owned by a request. */
struct staging_range {
	TAILQ_ENTRY(staging_range) link;
	struct staging_arena *arena;
	uint64_t offset, len; /* multiples of STAGING_ALIGN */
};

TAILQ_HEAD(staging_ranges, staging_range);

struct staging_arena {
	TAILQ_ENTRY(staging_arena) link;
	struct staging *staging; /* NULL: goes when it is empty */
	struct bps_memory *memory;
	struct staging_ranges free; /* by offset, never adjacent */
	uint64_t used;
};

/* Of host memory, or of a device's. */
struct staging {
	struct cuda_device *device; /* or NULL */
	uint64_t arena_min;
	TAILQ_HEAD(, staging_arena) arenas;
	uint64_t used, capacity;
	uint64_t peak;	    /* most in use since it was last empty */
	uint64_t last_peak; /* the same for the time before */
	bool growing;	    /* a thread waits for the daemon to map a new arena */
};

struct client_memory {
	uint32_t next;
	TAILQ_HEAD(, bps_memory) shared; /* all, the staging area's too */
	struct bps_memory **by_address;	 /* of the caller */
	size_t n, capacity;
	struct staging staging;
};

/* Gives it to the daemon under a new number, and waits: the daemon may refuse. (locked, may wait) */
int memory_share(struct bps_memory *memory);
/* Makes memory and gives it to the daemon. (locked, may wait) */
int memory_new(struct bps_client *client, size_t len, struct bps_memory **ret_memory);
struct bps_memory *memory_free(struct bps_memory *memory);
/* In a child of fork(), under client_fork_lock(). */
void memory_forked(void);
/* The caller's memory that holds len bytes at data, or NULL. */
struct bps_memory *memory_find(struct bps_client *client, const void *data, size_t len);
void memory_use(struct bps_memory *memory);
void memory_unuse(struct bps_memory *memory);

/* -- staging.c --------------------------------------------------------------------------------------------------- */

#define STAGING_ALIGN 64

void staging_init(struct staging *staging, uint64_t arena_min, struct cuda_device *device);
int staging_alloc(struct bps_client *client, struct staging *staging, uint64_t len,
		  struct staging_range **ret_range); /* (locked, may wait) */
/* NULL is allowed; returns NULL. */
struct staging_range *staging_free(struct staging_range *range);
/* Nothing is taken from it any more. */
void staging_done(struct staging *staging);
static inline void *staging_data(const struct staging_range *range)
{
	return range->arena->memory->data + range->offset;
}
