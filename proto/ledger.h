/*
 * The ledger of a job: how far its sums have come, so that the next daemon process can go on with them when this one is
 * killed, restarted or upgraded. Needed because an in-place reduction overwrites its own inputs: begun and not finished,
 * it can neither be left nor be done again from the start. See bps-recovery(7), RESTART.
 *
 * One memfd per job that can be resumed, made by the daemon, sealed (SHRINK | GROW | SEAL), sparse. Its descriptor goes
 * to every rank beside Joined and comes back beside Resume; trainers keep it and never map it. They can read it: to write it,
 * or to punch holes into it, which would keep a thread of the daemon that writes there, one has to be the daemon's user. One
 * daemon process at a time writes it, and only the next one reads it, which treats it as hostile all the same: a trainer may
 * be of that user. A daemon trusts its own copy of everything but the scratch bytes, which are data as good as the inputs.
 *
 *	0				struct ledger_header
 *	LEDGER_PROCESS_OFFSET		struct ledger_process[JOB_RANKS_MAX]	by rank
 *	LEDGER_RECORD_OFFSET		struct ledger_record[n_records]
 *	ledger_journal_offset()		struct ledger_journal[n_journals]
 *	ledger_scratch_offset()		uint8_t[n_journals][piece_bytes]
 * and for a job that goes through servers (n_results is not 0)
 *	ledger_job_offset()		uint8_t[LEDGER_JOB_MAX]: its JobRecord (cluster.proto), header.job_len bytes
 *	ledger_added_offset()		struct data_added[DATA_ADDED_MAX]: servers that it was given since
 *	ledger_tensor_offset()		struct ledger_tensor[n_tensors]
 *	ledger_result_offset()		struct ledger_result[n_results]
 *	ledger_small_offset()		uint8_t[n_results][LEDGER_SMALL_BYTES]: results of small parts, see ledger_is_small()
 *	ledger_data_offset()		uint8_t[n_results][result_bytes rounded up to pages]: of others
 *
 * What is written is read after the death of a process, never of a machine: atomic stores with release order are enough.
 * At any instant, whatever was stored last:
 *
 *	record	state is stored last when it is written, and first when it is freed. It is written before the first part of
 *		its round touches an output, and freed after every local rank's slot says SHM_DONE.
 *	part	is done when its number is below `low` or its bit is set. Parts are numbered from 0 in the order in which
 *		the operation is cut. Bit n % LEDGER_WINDOW stands for part n, of low <= n < low + LEDGER_AHEAD alone; no
 *		later part begins. `low` moves by whole words, and a word is cleared after `low` has left it behind: it is
 *		then further ahead than LEDGER_AHEAD.
 *	journal	is a thread's place in a part: `taken` is stored last and cleared first; it is cleared after the part's bit
 *		was set. Of the part, `done` bytes are in all outputs; `staged` bytes after them are in the scratch, and
 *		perhaps in some outputs: these are copied (again), everything after them is summed from the inputs.
 *
 * A part goes on in the journal it was found in. A journal whose part is done, or whose record is free, means nothing.
 *
 * A job that goes through servers has no use for journals: a part's result is retained before any output is touched, here or in the
 * ledger of another node, which offers it to any server (DATA_FLAG_KEPT).
 *
 *	result	state is stored last, when the data are there. Then they are copied to the outputs, and the part's bit is set
 *		in the record. A result without that bit is copied (again), a part without a result is pushed (again): its
 *		inputs are untouched, or count no more. The result is freed when every node of the job has it.
 *	tensor	state is stored last when it is written, and first when it is freed. It is written before any message names its key. While
 *		it is LEDGER_IN_DOUBT all ranks here have released it, and the home has been asked whether it is forgotten; it is
 *		freed before a rank hears that it is. `last_key` is no less than any key that was ever written.
 *	added	counts once n_added says so. It stays as it is.
 */
#pragma once

#include "proto/data.h"
#include <stdatomic.h>

#define LEDGER_MAGIC   0x4c535042u /* "BPSL" */
#define LEDGER_VERSION 8

#define LEDGER_RECORDS \
	4096u /* rounds that move at once: each holds a slot of every rank, and there are as many slots */
#define LEDGER_JOURNALS_MIN 64u
#define LEDGER_JOURNALS_MAX 8192u
#define LEDGER_PIECE_BYTES  32768u
#define LEDGER_PART_ALIGN   64u /* of part_bytes: parts and pieces are whole elements of every type */
#define LEDGER_WINDOW	    512u		  /* bits of a record; a multiple of 64 */
#define LEDGER_AHEAD	    (LEDGER_WINDOW - 64u) /* parts from `low` on that may have begun */

struct ledger_header {
	uint32_t magic;
	uint32_t version;
	uint64_t len;  /* of the memfd */
	uint64_t job;  /* number of the run */
	uint32_t size; /* ranks */
	uint32_t part_bytes;
	uint32_t n_records;
	uint32_t n_journals;
	uint32_t piece_bytes;
	/* 1 before the first round of the job completes: from then on no rank can begin anew. */
	_Atomic uint32_t begun;
	uint64_t pid_namespace; /* that the processes' numbers are of, by its inode; 0: not known */
	/* Bit r: rank r has left in good order. */
	_Atomic uint64_t departed[JOB_RANKS_MAX / 64];
	/* 0 where all ranks are on this node. */
	uint32_t n_results;
	uint32_t n_tensors;
	uint32_t job_len;
	_Atomic uint32_t results_used; /* memory from this number on was never taken */
	_Atomic uint32_t tensors_used; /* the same */
	uint32_t membership;	       /* of an elastic job, when this run began */
	_Atomic uint32_t n_added;
	uint32_t
		result_bytes; /* part_bytes; or, where not all need be in a result, more: ledger_result */
	_Atomic uint64_t last_key;	  /* the largest of any tensor, forgotten ones too */
	_Atomic uint32_t tensors_missing; /* 1: there was no memory for some */
	uint32_t pad;
};
static_assert(sizeof(struct ledger_header) == 104 + JOB_RANKS_MAX / 8, "ledger_header is a format");

/* The process of a rank: whether it can still come back. */
struct ledger_process {
	uint64_t started; /* clock ticks from boot; 0: not known */
	uint32_t pid;
	uint32_t
		out; /* elastic job: the membership from which on the rank is not in it; 0: it is */
};
static_assert(sizeof(struct ledger_process) == 16, "ledger_process is a format");

enum ledger_record_state { LEDGER_FREE = 0, LEDGER_MOVING = 1 };

/*
 * Of a reduction of an elastic job that goes through servers: nothing of its results is in an output before all are
 * retained; they stay so until all are in the outputs. Such a record marks no parts.
 */
enum ledger_stage { LEDGER_GATHERS = 0, LEDGER_COMMITTED = 1, LEDGER_SCATTERED = 2 };

struct ledger_record {
	_Atomic uint32_t state; /* enum ledger_record_state */
	uint8_t dtype, operation, reduction, pad;
	uint32_t root;
	uint32_t n_came; /* contributions */
	uint64_t round;
	uint64_t elements; /* of the operation, or of each block where they are equal */
	uint64_t digest;   /* of the counts; 0: equal blocks */
	_Atomic uint64_t low;
	_Atomic uint64_t stage; /* enum ledger_stage | ranks that had gone << 32 */
	_Atomic uint64_t done[LEDGER_WINDOW / 64];
	char tensor[TENSOR_NAME_MAX + 1];
} _cache_aligned_;
static_assert(sizeof(struct ledger_record) == 384, "ledger_record is a format");

struct ledger_journal {
	_Atomic uint32_t taken; /* number of the record, and 1; 0: none */
	uint32_t pad;
	uint64_t part;
	_Atomic uint64_t progress; /* bytes: done | staged << 32; one store moves both */
	uint64_t pad2[5];
} _cache_aligned_;
static_assert(sizeof(struct ledger_journal) == CACHE_LINE, "ledger_journal is a format");

/* Beside a number of ranks that have gone: newcomers wait. Of barriers. */
#define LEDGER_WAITING (1u << 16)

enum ledger_state { LEDGER_EMPTY = 0, LEDGER_WHOLE = 1, LEDGER_IN_DOUBT = 2 /* of tensors */ };

/* A tensor that the nodes of the job have agreed on. */
struct ledger_tensor {
	_Atomic uint32_t state; /* enum ledger_state */
	uint32_t dtype;
	uint64_t elements, key, start;
	char name[TENSOR_NAME_MAX + 1];
} _cache_aligned_;
static_assert(sizeof(struct ledger_tensor) == 320, "ledger_tensor is a format");

/*
 * The retained result of a part's round, with the fields of its DATA_PUSH (data.h). Where results have contributors,
 * data_contributors stand behind it; and in the last part_bytes of its memory, while `late` is 1, what this node had contributed
 * to the round and is in no result that is here.
 */
struct ledger_result {
	_Atomic uint32_t state; /* enum ledger_state */
	uint16_t stripe;	/* its place in the job's placement */
	uint8_t has_data;	/* 0: none of it was for this node */
	_Atomic uint8_t late;
	uint64_t key, round;
	uint32_t block, part, len, root;
	uint64_t offset, total;
	uint8_t dtype, operation, reduction, pad2;
	uint32_t n_gone; /* elastic job: ranks that had gone when the result was made */
} _cache_aligned_;
static_assert(sizeof(struct ledger_result) == CACHE_LINE, "ledger_result is a format");

#define LEDGER_SMALL_BYTES   1024u
#define LEDGER_RESULTS_MIN   64u
#define LEDGER_RESULTS_MAX   65536u
#define LEDGER_RESULTS_BYTES (UINT64_C(8) << 30) /* of all results' data, sparse */
#define LEDGER_TENSORS_MAX   16000000u
#define LEDGER_JOB_MAX	     (4u << 20)
#define LEDGER_ADDED_BYTES   (16u << 10)
static_assert(DATA_ADDED_MAX * sizeof(struct data_added) <= LEDGER_ADDED_BYTES, "all fit");
#define LEDGER_RESULT_MAX (2 * PART_BYTES_MAX + (1u << 20)) /* result_bytes */

#define LEDGER_PROCESS_OFFSET 4096u
#define LEDGER_RECORD_OFFSET \
	(LEDGER_PROCESS_OFFSET + JOB_RANKS_MAX * (uint32_t)sizeof(struct ledger_process))
static_assert(sizeof(struct ledger_header) <= LEDGER_PROCESS_OFFSET,
	      "the header fits before the rest");
static_assert(sizeof(struct ledger_record) * LEDGER_RECORDS % 4096 == 0,
	      "journals begin on a page");

static inline uint64_t ledger_journal_offset(void)
{
	return LEDGER_RECORD_OFFSET + (uint64_t)LEDGER_RECORDS * sizeof(struct ledger_record);
}

/* n_journals: at most LEDGER_JOURNALS_MAX, so that nothing overflows. */
static inline uint64_t ledger_scratch_offset(uint32_t n_journals)
{
	return align_up(ledger_journal_offset() +
				(uint64_t)n_journals * sizeof(struct ledger_journal),
			4096);
}

static inline uint64_t ledger_len(uint32_t n_journals)
{
	return ledger_scratch_offset(n_journals) + (uint64_t)n_journals * LEDGER_PIECE_BYTES;
}

static inline uint64_t ledger_job_offset(uint32_t n_journals)
{
	return align_up(ledger_len(n_journals), 4096);
}

static inline uint64_t ledger_added_offset(uint32_t n_journals)
{
	return ledger_job_offset(n_journals) + LEDGER_JOB_MAX;
}

static inline uint64_t ledger_tensor_offset(uint32_t n_journals)
{
	return ledger_added_offset(n_journals) + LEDGER_ADDED_BYTES;
}

static inline uint64_t ledger_result_offset(uint32_t n_journals, uint32_t n_tensors)
{
	return align_up(ledger_tensor_offset(n_journals) +
				(uint64_t)n_tensors * sizeof(struct ledger_tensor),
			4096);
}

static inline uint64_t ledger_small_offset(uint32_t n_journals, uint32_t n_tensors,
					   uint32_t n_results)
{
	return align_up(ledger_result_offset(n_journals, n_tensors) +
				(uint64_t)n_results * sizeof(struct ledger_result),
			4096);
}

static inline uint64_t ledger_data_offset(uint32_t n_journals, uint32_t n_tensors,
					  uint32_t n_results)
{
	return align_up(ledger_small_offset(n_journals, n_tensors, n_results) +
				(uint64_t)n_results * LEDGER_SMALL_BYTES,
			4096);
}

/*
 * Whether the result of a part of len bytes lies among the small ones. They lie side by side: each with memory for a large one,
 * thousands of them would share a few sets of the processor's caches, and need a page each.
 */
static inline bool ledger_is_small(uint32_t len, uint32_t part_bytes, uint32_t result_bytes)
{
	return len <= LEDGER_SMALL_BYTES && result_bytes == part_bytes;
}

/* Of a job that goes through servers. Nothing overflows within the limits above. */
static inline uint64_t ledger_far_len(uint32_t n_journals, uint32_t n_tensors, uint32_t n_results,
				      uint32_t result_bytes)
{
	return ledger_data_offset(n_journals, n_tensors, n_results) +
	       n_results * align_up((uint64_t)result_bytes, 4096);
}
