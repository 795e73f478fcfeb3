/* What ledger.c and journal.c share. */
#pragma once

#include "base/latch.h"
#include "base/memory/handout.h"
#include "ledger/ledger.h"
#include "tensor/tensor.h"
#include <stdatomic.h>
#include <sys/types.h>

/* A record that the daemon before has left, copied out of the trainers' reach and checked. */
struct ledger_old {
	uint32_t record;
	char tensor[TENSOR_NAME_MAX + 1];
	uint64_t round, elements, digest, low;
	uint64_t stage;
	uint64_t done[LEDGER_WINDOW / 64];
	unsigned dtype, operation, reduction;
	uint32_t root, n_came;
};

/* The same for a journal. */
struct ledger_stale {
	uint32_t journal, record;
	uint64_t part;
	uint32_t done, staged;
};

/* Tensors that the nodes have agreed on. */
struct ledger_tensors {
	struct ledger_known **known;
	size_t n, capacity;
	struct map names, keys;
	uint32_t n_places; /* in the ledger's memory: no place from this one on was ever taken */
	struct ledger_known *spare; /* forgotten: each with the place that it had */
};

/* While a ledger is opened: what was read of its memfd last, from where. */
struct ledger_window {
	int fd;
	char *data;
	uint64_t at;
};

/* A result that was left, by what they are in order of. It may be stale no more: ledger_kept says so. */
struct ledger_left {
	uint64_t key, round;
	uint32_t block, part, result;
	uint32_t next; /* of a key's first: of that key none before this place is stale */
};

/* All that were left: stale.c. */
struct ledger_stale_results {
	struct ledger_left *left; /* in order from ledger_stale_sort() on */
	uint32_t n, n_stale;
};

/* Which memory for results nobody has, by its number: free_list.c. Any thread, with the latch. */
struct ledger_results {
	struct latch latch;
	uint32_t used;	    /* from this number on none was ever taken */
	uint32_t *free;	    /* still there; the last freed is the last */
	uint32_t *returned; /* given back */
	uint32_t n_free, n_returned;
	uint32_t n_leaving; /* just being given back */
	uint32_t n_warm;    /* of those returned, the first: still there from before */
	uint32_t n_allowed; /* that may be taken at once */
	uint32_t n_peak;    /* that were, since somebody last asked */
	uint32_t n_charged;
};

struct ledger {
	struct buffer *memory;
	int fd; /* of that, by which it is known whether ranks have it still */
	dev_t device;
	ino_t inode;
	uint32_t size, part_bytes, n_journals;
	bool begun;
	bool same_namespace; /* as the daemon before: what it said of processes is true here */
	_Atomic bool stopped;
	uint64_t departed[JOB_RANKS_MAX / 64];

	uint32_t free_records[LEDGER_RECORDS];
	size_t n_free;
	struct ledger_old *old;
	size_t n_old;

	struct ledger_stale *stale;
	size_t n_stale;

	/* Through servers: result.c. */
	uint32_t n_results, n_tensors, result_bytes;
	struct ledger_kept *kept; /* n_results entries */
	struct ledger_results results;
	struct ledger_stale_results stale_results;
	struct map parts;
	struct ledger_tensors tensors;

	struct quota *quota, *descriptors; /* or NULL: nobody is charged */
	uint64_t charged;		   /* tensors too, memory of results not */

	struct ledger_window window;
	void *record; /* of the job, as it was found; or NULL */
	size_t record_len;

	unsigned n_threads;
	uint32_t own[]; /* journal of each thread */
};

/* Of a tensor that is known: here, and in the ledger's memory. */
#define LEDGER_KNOWN_BYTES (sizeof(struct ledger_known) + sizeof(struct ledger_tensor) + 64)

static inline struct ledger_header *ledger_header(const struct ledger *ledger)
{
	return (struct ledger_header *)ledger->memory->data;
}

static inline struct ledger_process *ledger_process(const struct ledger *ledger, uint32_t rank)
{
	return (struct ledger_process *)(ledger->memory->data + LEDGER_PROCESS_OFFSET) + rank;
}

static inline struct ledger_record *ledger_record(const struct ledger *ledger, uint32_t record)
{
	return (struct ledger_record *)(ledger->memory->data + LEDGER_RECORD_OFFSET) + record;
}

static inline struct ledger_journal *ledger_journal(const struct ledger *ledger, uint32_t journal)
{
	return (struct ledger_journal *)(ledger->memory->data + ledger_journal_offset()) + journal;
}

static inline uint64_t ledger_bit(uint64_t part)
{
	return UINT64_C(1) << (part % 64);
}

static inline size_t ledger_word(uint64_t part)
{
	return part % LEDGER_WINDOW / 64;
}

/*
 * No store after it is seen without those before it, whatever kills us in between. It orders stores alone: who reads them is
 * the next process. The thread sanitizer knows no fences.
 */
static inline void ledger_fence(void)
{
#if !defined(__SANITIZE_THREAD__)
	atomic_thread_fence(memory_order_release);
#endif
}

/*
 * For ledger_open(): copies what was left, out of the trainers' reach. What is not there is zeroes, and stays away: pages that were made
 * by looking at the mapping would be charged to this daemon. Returns 0; or -EPROTO or -ENOMEM with failure filled.
 */
int ledger_copy(struct ledger *ledger, const void *from, void *copy, size_t len,
		struct failure *failure);

/* journal.c */
/* Reads the journals that were left, after the records; gives each thread one of the others. As ledger_open(). */
int ledger_take_journals(struct ledger *ledger, struct failure *failure);
/* Clears the journals that were left in a record. */
void ledger_drop_journals(struct ledger *ledger, uint32_t record);

/* Bytes from one result's memory to the next one's. */
static inline uint64_t ledger_result_stride(const struct ledger *ledger)
{
	return align_up((uint64_t)ledger->result_bytes, 4096);
}

/* free_list.c */
/* The memory is free again, and still there. */
void ledger_result_put_back(struct ledger *ledger, uint32_t result);

/* stale.c */
/* Makes room for so many results that were left. Returns 0 or -ENOMEM. */
int ledger_stale_init(struct ledger *ledger, uint32_t n_max);
/* The result was left: ledger_kept's `what` says which. */
void ledger_stale_add(struct ledger *ledger, uint32_t result);
/* After the last was added. Returns a result that is there twice, or LEDGER_NO_RESULT. */
uint32_t ledger_stale_sort(struct ledger *ledger);
/* The result is like any other from now on. Harmless on one that is. */
static inline void ledger_stale_end(struct ledger *ledger, struct ledger_kept *kept)
{
	if (!kept->stale)
		return;
	kept->stale = false;
	ledger->stale_results.n_stale--;
}

/* result.c */
/* Makes room for what is kept of results; n_results is set. Returns 0 or -ENOMEM. */
int ledger_results_init(struct ledger *ledger);
/* Reads the results and tensors that the daemon before has left. As ledger_open(). */
int ledger_results_open(struct ledger *ledger, uint32_t max_tensors, struct failure *failure);
/* Returns what the ledger is still charged with for memory of results. */
uint64_t ledger_results_done(struct ledger *ledger);
/* In a ledger taken over: free memory beyond what is allowed counts as returned, and stays warm until ledger_results_cool(). */
void ledger_results_return(struct ledger *ledger);
/* Charges ledger->quota with memory of results that is there already: 0 or -EDQUOT. */
int ledger_results_charge(struct ledger *ledger);
