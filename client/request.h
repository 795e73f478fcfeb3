/* Requests from bps_submit() until they are freed, and the ring and slots that they go by. (locked): client.h. */
#pragma once

#include "bps.h"
#include "proto/shm.h"
#include <sys/queue.h>

struct bps_tensor;
struct cuda_use;

#define NO_SLOT UINT32_MAX

/*
 * A request is born in bps_submit() as NEW, is the daemon's while POSTED, has ENDED once its slot says so (the slot is
 * free again then), and is COMPLETE when a staged result has been copied back. One thread copies, in COPYING.
 */
enum request_state {
	REQUEST_NEW,
	REQUEST_POSTED,
	REQUEST_ENDED,
	REQUEST_COPYING,
	REQUEST_COMPLETE,
};

struct bps_request {
	struct bps_client *client _cache_aligned_; /* by client->requests.n */
	TAILQ_ENTRY(bps_request) link;		   /* in client->requests.posted, ended or spare */
	/* Guarded by the client's mutex. */
	/* counted; while it is posted, or has failed with the declaration unanswered */
	struct bps_tensor *tensor;
	struct cuda_use *cuda; /* owned; NULL: in host memory, or nothing of the device's is left */
	uint64_t round;	       /* of its tensor */
	uint32_t run;	       /* of its tensor */
	uint32_t slot;
	int status;
	uint8_t state; /* enum request_state */
	bool orphan;   /* released by the caller: nobody copies, the library frees it at its end */
	bool cancelled;
	bool counted; /* the daemon says how many contributions are in the result */

	/* What it holds until it has ended; ranges with a staged result until it is complete. */
	struct bps_memory *input_memory, *output_memory;
	struct staging_range *input_range, *output_range; /* in place: no input_range */
	void *output; /* the caller's, when the result is staged */
	size_t output_len;
	size_t row_len;	 /* 0: another operation than PUSH_PULL_ROWS */
	uint64_t n_rows; /* or contributions */

	struct bps_outcome outcome; /* once it has ended */
	char *text;		    /* NULL where there is none */
	struct staging_range *counts_range;
	uint64_t ticket;

	struct shm_entry entry _cache_aligned_; /* but for slot and ticket */
	/* PUSH_PULL_ROWS, else NULL: the same as above for the numbers of rows. */
	struct bps_memory *input_rows_memory, *output_rows_memory;
	struct staging_range *input_rows_range, *output_rows_range;
	int64_t *output_rows;
};
static_assert(offsetof(struct bps_request, input_memory) == CACHE_LINE &&
		      offsetof(struct bps_request, outcome) == 2 * CACHE_LINE &&
		      offsetof(struct bps_request, entry) == 3 * CACHE_LINE,
	      "what most requests need is whole lines of the cache");

TAILQ_HEAD(request_list, bps_request);

/* Entries and slots of the session. */
struct client_ring {
	uint64_t tail;	    /* entries ever posted; the ring's copy is never read */
	uint64_t harvested; /* slots seen done */
	uint64_t seen;	    /* completions whose order was looked at */
	bool ordered;	    /* the daemon says it, and what is done in brief */
	bool widens;	    /* the daemon has CONTROL_FEATURE_WIDEN */
	uint64_t next_ticket;
	uint32_t n_slots_free;
	uint32_t slots_free[SHM_SLOTS];		/* a stack */
	struct bps_request *of_slot[SHM_SLOTS]; /* under way; else NULL */
};

struct client_requests {
	struct request_list spare; /* given back, for the next: those last used first */
	unsigned n_spare;
	size_t n; /* the caller's and orphans; while there are any, one of the client's refs is theirs */
	struct bps_tensor *submitted; /* the last */
	struct request_list posted, ended;
	size_t n_posted;
};

int request_new(struct bps_client *client, struct bps_request **ret_request);
/* For a request that is not under way: gives back what it holds. The caller has another reference to the client. */
void request_free(struct bps_request *request);
/* Those that are spare. */
void request_free_spare(struct bps_client *client);
/* Gives back the memory of one that was not posted, to look for other. */
void request_release_memory(struct bps_request *request);
/* Whether there is a slot: 0 or -EAGAIN. */
int request_find_slot(struct bps_client *client);
/* Takes one. */
int request_take_slot(struct bps_request *request);
/* Hands it to the daemon, now or when there is one; its entry is complete but for the slot and the ticket. */
void request_post(struct bps_request *request, struct bps_tensor *tensor);
/* Whether one that is under way needs a daemon with CONTROL_FEATURE_WIDEN. */
bool request_any_widens(const struct bps_client *client);
/* Posts all that are under way again, at another daemon, and cancels those that were. 0 or a negative errno. */
int request_post_all(struct bps_client *client);
/*
 * Looks at the slots of all requests under way. last: the daemon is gone, and may have ended one that it did not come to
 * count. True when one has ended.
 */
bool request_harvest(struct bps_client *client, bool last);
/* Ends all that are under way: the daemon is gone, or never used again. */
void request_end_all(struct bps_client *client, int status, const char *text);
/* The same for those of a job that is over, when no daemon is there to do it. */
void request_end_strays(struct bps_client *client);
/* Copies all results that wait for it. (locked, may wait) */
void request_copy_all(struct bps_client *client);
/* Before the mutex: 0 or a negative errno. */
int request_check(const struct bps_request *request);
/* Looks at the slot, if it is under way. */
void request_see(struct bps_request *request);
/* A stream has, or has not, taken care of the result of a request that may have completed meanwhile. */
void request_settle(struct bps_request *request);
