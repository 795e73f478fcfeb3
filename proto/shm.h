/*
 * Memory shared by a trainer and its daemon: one memfd per session, made and sealed by the daemon, handed over in the
 * answer to Hello. It holds the submission ring (trainer writes, daemon reads) and the completion slots (daemon
 * writes, trainer reads). Both sides treat it as hostile: read an index once, check it, use the copy.
 *
 *	0			struct shm_header
 *	SHM_RING_OFFSET		struct shm_entry[SHM_ENTRIES]
 *	SHM_SLOT_OFFSET		struct shm_slot[SHM_SLOTS]
 *	SHM_FLAG_OFFSET		struct shm_flag[SHM_SLOTS]		whole pages
 *
 * Posting: the trainer picks a free slot, sets slot.state to SHM_PENDING and slot.ticket to a new number, writes
 * ring[tail % SHM_ENTRIES], stores tail + 1 with release, then full fence, and if it can change daemon_armed from 1 to
 * 0 wakes the daemon. Consuming: the daemon drains, stores daemon_armed 1, full fence, looks again. daemon_armed is 1
 * when the trainer first sees it. Before the daemon acts on Cancel, Leave or Unshare it drains the ring, before it acts
 * on an entry with a number that it does not know it reads the control channel: each side's own order is kept.
 *
 * Completing: the daemon writes status and text, then stores state = SHM_DONE with release, adds 1 to completions
 * (release), full fence, and if it can change trainer_armed from what it is to SHM_AWAKE wakes the trainer in the way that
 * it said. Waiting: the trainer stores trainer_armed, full fence, looks at its slot again, then sleeps until it is woken or
 * its socket has news. A slot belongs to the daemon from the post until SHM_DONE, to the trainer at all other times.
 *
 * Device memory: an entry whose input or output is in a buffer that was shared from a device is ordered by its slot's
 * flags as well, which GPUs on both sides write and wait for (cuStreamWriteValue32, cuStreamWaitValue32) by the low 32
 * bits of the ticket, compared cyclically: reached means (int32_t)(flag - ticket) >= 0. Before the post the trainer sets
 * both flags to ticket - 1 and enqueues in its stream the write of `ready`. Nothing reads the input or writes the output
 * before ready has reached the ticket; done reaches it when the output is there, or when the request has failed, and then
 * after the slot says so. A slot whose ready has not reached its ticket is not posted again: the stream's write is still
 * to come. Of a trainer that lives, only its own stream writes `ready`.
 *
 * Waking is writing 8 bytes to the other side's wake-up descriptor, which it reads 8 bytes at a time: the daemon's is an eventfd, the
 * trainer's a socket. The trainer is the first to write what the daemon reads or writes of a slot or an entry: what has
 * never been written would be the daemon's page, and ends the session. A trainer whose daemon
 * has CONTROL_FEATURE_FUTEX may sleep on trainer_armed itself instead (FUTEX_WAIT, shared, while it is SHM_ARMED_FUTEX): that
 * wakes sooner, and needs one system call where the descriptor needs two. Its socket does not wake it then, so such
 * a sleep is short: a daemon that dies wakes nobody.
 */
#pragma once

#include "proto/types.h"
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHM_MAGIC   0x4d535042u /* "BPSM" */
#define SHM_VERSION 2
#define SHM_ENTRIES 4096u /* power of two; at least SHM_SLOTS, so that the ring is never full */
#define SHM_SLOTS   4096u /* requests not yet released; deepest model seen: 1500 tensors */
#define SHM_ORDER   1024u /* power of two; completions that are known by their order */

/* Of a trainer, how it is to be woken; the daemon wakes for no other value. */
enum shm_armed {
	SHM_AWAKE = 0,
	SHM_ARMED = 1,	     /* by its wake-up descriptor */
	SHM_ARMED_FUTEX = 2, /* by FUTEX_WAKE of this word */
};

enum shm_state {
	SHM_FREE = 0,
	SHM_PENDING = 1,
	SHM_DONE = 2,
};

struct shm_header {
	/* Fixed by the daemon before the trainer sees it. */
	uint32_t magic;
	uint32_t version;
	uint32_t n_entries;
	uint32_t n_slots;
	uint64_t len;

	/* Trainer: entries ever posted. */
	_Atomic uint64_t tail _cache_aligned_;
	/* 1: the daemon sleeps and wants its wake-up descriptor written. */
	_Atomic uint32_t daemon_armed _cache_aligned_;
	/* enum shm_armed */
	_Atomic uint32_t trainer_armed _cache_aligned_;
	/*
	 * Trainer, before it arms: what it is woken for. The slot, counted from 1, and completions (their low bits) that are
	 * enough without it; 0: any. Some daemons wake for any always.
	 */
	_Atomic uint32_t trainer_slot;
	_Atomic uint32_t trainer_enough;
	/* Daemon: slots ever completed. */
	_Atomic uint64_t completions _cache_aligned_;
	/*
	 * Daemon: which slot was the n-th, from 0, at n % SHM_ORDER; written before n + 1 are counted. A hint: the slot may be the
	 * trainer's again. Who then finds SHM_ORDER or more counted since the first that he read has to look at all slots.
	 */
	_Atomic uint16_t order[SHM_ORDER] _cache_aligned_;
};

/* One submission. Offsets and lengths in bytes, counts in elements. */
struct shm_entry {
	uint64_t ticket; /* of the slot, echoed nowhere else: lets the daemon see a reused slot */
	uint64_t round;	 /* n-th submission of this tensor by this session, from 1 */
	uint32_t slot;
	uint32_t tensor;     /* the session's own number, from Declare */
	uint8_t operation;   /* enum operation */
	uint8_t reduction;   /* enum reduction, or 0 */
	uint16_t membership; /* elastic job: low bits of that in which ranks are counted; else 0 */
	int32_t priority;
	union {
		uint32_t root;		/* broadcast: source rank; else, but for those below, 0 */
		uint32_t waits_for_all; /* push_pull, accumulate: 1 */
	};
	uint32_t input_buffer; /* the session's own number, from Share */
	uint32_t output_buffer;
	uint32_t counts_buffer; /* 0: equal counts */
	uint64_t input_offset;
	uint64_t input_count; /* elements of input */
	uint64_t output_offset;
	uint64_t output_count; /* room for results, elements */
	/*
	 * uint64_t[size]: all_gather and reduce_scatter; uint64_t[2 * size]: all_to_all, what this rank sends to each
	 * rank, then what it receives from each
	 */
	uint64_t counts_offset;
	uint64_t timeout_ms; /* since the daemon saw it; 0: the job's setting */
	union {
		/*
		 * push_pull_rows: elements of a row; numbers are int64_t[input_count / width], and
		 * there is room for int64_t[output_count / width].
		 */
		uint64_t width;
		/*
		 * Any other operation: its number among those that all ranks submit in one order,
		 * from 1; 0: none of them.
		 */
		uint64_t ordinal;
	};
	uint64_t input_rows_offset;
	uint64_t output_rows_offset;
	union {
		uint32_t input_rows_buffer;
		/*
		 * push_pull, reduce_scatter, to a daemon that has CONTROL_FEATURE_WIDEN: enum dtype of
		 * the input, where it is narrower than the tensor's; any other operation and type: 0.
		 */
		uint32_t input_dtype;
	};
	uint32_t output_rows_buffer;
};
static_assert(sizeof(struct shm_entry) == 128, "shm_entry is shared-memory format");

struct shm_slot {
	_Atomic uint32_t state; /* enum shm_state */
	int32_t status;		/* 0 or a negative errno, valid in SHM_DONE */
	uint64_t ticket;
	union {
		/* Why, when status is not 0; the reader terminates it itself. */
		char text[ERROR_TEXT_MAX + 1];
		/* When it is 0, and both have CONTROL_FEATURE_ORDER: all that there is to say, in the line of the cache that is read anyway. */
		struct {
			uint32_t no_text;
			uint32_t
				brief; /* 1: what follows is said, what is behind the text is not */
			uint64_t brief_rows; /* n_rows */
		};
	};
	uint64_t
		n_rows; /* push_pull_rows: of the result, also when there was no room for it; else contributions in it */
	/* Of an elastic job: its members when the round ended, and who contributed to it. */
	uint32_t membership; /* number of the membership; 0: nothing is said */
	uint32_t size;	     /* ranks that it has */
	uint32_t rank;	     /* of the trainer in it */
	uint32_t n_came;     /* ranks whose contribution is in the result */
	uint32_t n_waiting;  /* newcomers that Regroup would let in */
	char pad[512 - 44 - ERROR_TEXT_MAX - 1];
};
static_assert(sizeof(struct shm_slot) == 512, "shm_slot is shared-memory format");

/* Of requests on device memory: see above. */
struct shm_flag {
	_Atomic uint32_t ready; /* trainer: the input may be read, the output written */
	_Atomic uint32_t done;	/* daemon: the output is there, or will never be */
	uint32_t pad[2];
};
static_assert(sizeof(struct shm_flag) == 16, "shm_flag is shared-memory format");

#define SHM_RING_OFFSET 4096u
#define SHM_SLOT_OFFSET (SHM_RING_OFFSET + SHM_ENTRIES * (uint32_t)sizeof(struct shm_entry))
#define SHM_FLAG_OFFSET (SHM_SLOT_OFFSET + SHM_SLOTS * (uint32_t)sizeof(struct shm_slot))
#define SHM_FLAG_LEN	(SHM_SLOTS * (uint32_t)sizeof(struct shm_flag))
#define SHM_LEN		(SHM_FLAG_OFFSET + SHM_FLAG_LEN)
static_assert(sizeof(struct shm_header) <= SHM_RING_OFFSET, "header fits before the ring");
static_assert(SHM_FLAG_OFFSET % 4096 == 0 && SHM_FLAG_LEN % 4096 == 0, "flags are whole pages");

/*
 * The full fence of both protocols above: between a store that the other side looks for before it sleeps, and the look
 * at whether it sleeps; and between the store that says "I sleep", and the last look. The thread sanitizer knows no
 * fences, but does know a read-modify-write, which is one on the machines it runs on.
 */
static inline void shm_fence(void)
{
#if defined(__SANITIZE_THREAD__)
	static _Atomic int nothing;

	(void)atomic_fetch_add(&nothing, 0);
#else
	atomic_thread_fence(memory_order_seq_cst);
#endif
}

/*
 * Takes an armed trainer's word, for the one who wakes it: what it was, or SHM_AWAKE if there is nobody to be woken or
 * another was faster. One who sleeps on the word is woken by this, any other is still to be.
 */
static inline uint32_t shm_disarm(struct shm_header *header)
{
	uint32_t armed = atomic_load_explicit(&header->trainer_armed, memory_order_relaxed);

	if ((armed != SHM_ARMED && armed != SHM_ARMED_FUTEX) ||
	    !atomic_compare_exchange_strong(&header->trainer_armed, &armed, SHM_AWAKE))
		return SHM_AWAKE;
	if (armed == SHM_ARMED_FUTEX)
		(void)syscall(SYS_futex, &header->trainer_armed, FUTEX_WAKE, 1, NULL, NULL, 0);
	return armed;
}

static inline struct shm_entry *shm_ring(void *base)
{
	return (struct shm_entry *)((char *)base + SHM_RING_OFFSET);
}

static inline struct shm_slot *shm_slots(void *base)
{
	return (struct shm_slot *)((char *)base + SHM_SLOT_OFFSET);
}

static inline struct shm_flag *shm_flags(void *base)
{
	return (struct shm_flag *)((char *)base + SHM_FLAG_OFFSET);
}

/* Whether an armed trainer is to be woken, when so many slots have been completed in all. */
static inline bool shm_is_awaited(void *base, uint64_t completions)
{
	struct shm_header *header = (struct shm_header *)base;
	uint32_t slot;

	/* What it waits for is read after that it does. */
	if (atomic_load_explicit(&header->trainer_armed, memory_order_acquire) == SHM_AWAKE)
		return false;
	slot = atomic_load_explicit(&header->trainer_slot, memory_order_relaxed);
	if (!slot || slot > SHM_SLOTS)
		return true;
	return (int32_t)((uint32_t)completions - atomic_load_explicit(&header->trainer_enough,
								      memory_order_relaxed)) >= 0 ||
	       atomic_load_explicit(&shm_slots(base)[slot - 1].state, memory_order_relaxed) !=
		       SHM_PENDING;
}

/* Whether a flag has reached a ticket. */
static inline bool shm_flag_reached(uint32_t flag, uint64_t ticket)
{
	return (int32_t)(flag - (uint32_t)ticket) >= 0;
}
