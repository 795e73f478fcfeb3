/*
 * The ledger of a job (proto/ledger.h), kept by this daemon process for the next, or taken over from the one before.
 * Control thread only, but for the calls about a part that is being worked on, which belong to the thread that works.
 */
#pragma once

#include "base/error.h"
#include "base/map.h"
#include "base/process.h"
#include "base/quota.h"
#include "proto/ledger.h"

struct ledger;
struct ledger_old;

/* Of a job that goes through servers: what the next daemon process must know of it, and how many tensors it may have. */
struct ledger_far {
	const void *record;
	size_t record_len; /* at most LEDGER_JOB_MAX */
	uint32_t n_tensors;
	uint32_t result_bytes; /* at most LEDGER_RESULT_MAX */
};

/*
 * Makes the ledger of a new run of a job. n_threads: that sum at the same time, numbered from 0. far: NULL when all its
 * ranks are on this node. *ret_fd is the caller's, who hands it to the ranks; by it the ledger can
 * be read, and only this user can open it otherwise. Returns 0, -ENOMEM, -EMFILE and other -errno of memfd_create(2) and mmap(2).
 */
int ledger_new(uint64_t job, uint32_t size, uint32_t part_bytes, unsigned n_threads,
	       const struct ledger_far *far, struct ledger **ret_ledger, int *ret_fd);
/*
 * Takes over what fd, from outside, is said to be: the ledger of this run of a job of so many ranks, made by a daemon of this
 * user. The descriptor stays the caller's. Each tensor takes time and memory: a ledger of more than max_tensors is refused.
 * Returns 0; -ESTALE (of another version), -EPROTO (no ledger, another user's, of another job, or damaged), -ECONNRESET (too few journals are left for these
 * threads), -ENOMEM, each with words.
 */
int ledger_open(int fd, uint64_t job, uint32_t size, unsigned n_threads, uint32_t max_tensors,
		struct ledger **ret_ledger, struct failure *failure);
/* Returns NULL; takes NULL. What was written stays for whoever holds the descriptor. */
struct ledger *ledger_free(struct ledger *ledger);
DEFINE_CLEANUP(struct ledger *, ledger_free)

/*
 * From here on quota, which outlives the ledger, is charged with what the ledger takes: memory for a result when it is first
 * touched; without room no more can be taken. Its parent goes on being charged after that, as descriptors is for one, until nobody
 * else has the ledger: handout.h. Returns 0 or -EDQUOT.
 */
int ledger_charge_to(struct ledger *ledger, struct quota *quota, struct quota *descriptors);
/* Bytes that its memory may come to, for so many threads: what its holder is charged. */
uint64_t ledger_bytes(unsigned n_threads);
/* The same for a job that goes through servers, with memory for its first results: ledger_results_bytes(). */
uint64_t ledger_far_bytes(unsigned n_threads, uint32_t n_tensors);
uint32_t ledger_part_bytes(const struct ledger *ledger);
/* Bytes of memory for a result, of a job that goes through servers. */
uint32_t ledger_result_bytes(const struct ledger *ledger);
/* Whether a descriptor is of the same memory. */
bool ledger_is(const struct ledger *ledger, int fd);

/* Bytes and length of the record that was given to ledger_new(); from outside, where the ledger is. Copied: free it. */
int ledger_read_record(const struct ledger *ledger, void **ret_record, size_t *ret_len);

/* A round is about to complete: from now on every rank has a past. */
void ledger_begin(struct ledger *ledger);
bool ledger_has_begun(const struct ledger *ledger);
/* This rank leaves, or has left, in good order. */
void ledger_leave(struct ledger *ledger, uint32_t rank);
bool ledger_has_departed(const struct ledger *ledger, uint32_t rank);

/* Of an elastic job: its membership when the run began, and that from which on a rank is not in it; 0: it is. */
void ledger_set_membership(struct ledger *ledger, uint32_t membership);
uint32_t ledger_membership(const struct ledger *ledger);
void ledger_set_out(struct ledger *ledger, uint32_t rank, uint32_t membership);
uint32_t ledger_out(const struct ledger *ledger, uint32_t rank);

/* Keeps who a rank is; says whether a rank that was so kept can still come back: PROCESS_UNKNOWN if that cannot be told. */
void ledger_set_process(struct ledger *ledger, uint32_t rank, const struct process_seen *process);
enum process_state ledger_look(const struct ledger *ledger, uint32_t rank, uint32_t *ret_pid);
/* The number of the process that a rank is. */
uint32_t ledger_pid(const struct ledger *ledger, uint32_t rank);
/* Whether it was this process. One of which nothing can be seen, as of another container, is as good as any other such. */
bool ledger_may_be(const struct ledger *ledger, uint32_t rank, const struct process_seen *process);

/* This process is about to end: parts under way stop at their next piece. Any thread may ask. */
void ledger_stop(struct ledger *ledger);
bool ledger_stopped(const struct ledger *ledger);

/* -- Rounds --------------------------------------------------------------------------------------------------------- */

/* What a round is: the same before and after. */
struct ledger_facts {
	const char *tensor;
	uint64_t round, elements;
	const uint64_t *counts; /* size entries, or NULL */
	unsigned dtype, operation, reduction;
	uint32_t root, n_came;
};

/* A round that moves, embedded in it. Zero: not recorded. */
struct ledger_round {
	struct ledger *ledger;
	uint32_t record;
	uint64_t low; /* our own copy: all parts below are done */
	enum ledger_stage stage;
	uint32_t n_gone; /* since it is committed: ledger_what's, of its parts the most */
	uint64_t done[LEDGER_WINDOW / 64];
};

/*
 * Records that a round begins, or continues the record that the daemon before has left of it. Returns 0; -EPROTO with
 * words when it is no longer the same round; -EDQUOT when no record is free.
 */
int ledger_round_begin(struct ledger *ledger, struct ledger_round *round,
		       const struct ledger_facts *facts, struct failure *failure);
/* Every local rank has been told how it ended. Harmless on one that is not recorded. */
void ledger_round_end(struct ledger_round *round);
/* Whether this part may begin yet; when not, parts below it are under way. */
bool ledger_round_reaches(const struct ledger_round *round, uint64_t part);
/* Whether this part, which the record reaches, is done. */
bool ledger_round_has(const struct ledger_round *round, uint64_t part);
/* A part was worked on to its end. */
void ledger_round_advance(struct ledger_round *round, uint64_t part);

/* Whether the daemon before has begun this round, and it has not been begun again. */
bool ledger_remembers(const struct ledger *ledger, const char *tensor, uint64_t round);
/* What the daemon before has recorded of a push_pull_rows that is done: its `elements`, which are the rows of the result. */
bool ledger_find_rows(const struct ledger *ledger, const char *tensor, uint64_t round,
		      uint64_t *ret_n_rows);
/* Rounds first to last of a tensor have ended otherwise, if the daemon before had begun them. */
void ledger_forget(struct ledger *ledger, const char *tensor, uint64_t first, uint64_t last);

/* All results of the round are retained, and stay so; or, where they were, all are in all outputs. */
void ledger_round_set_stage(struct ledger_round *round, enum ledger_stage stage, uint32_t n_gone);

/* -- Parts ---------------------------------------------------------------------------------------------------------- */

/* A part in a journal. Pieces of it are summed into the scratch, then copied to the outputs. */
struct ledger_part {
	struct ledger *ledger;
	uint32_t record;
	uint32_t journal; /* UINT32_MAX: not taken yet */
	uint64_t number;
	uint32_t done, staged; /* bytes: in all outputs; after them, in the scratch */
};

/*
 * Control thread, before the part is given to a thread. Finds the journal in which it was left, if there is one. Returns 0,
 * or -EPROTO when that does not fit a part of len bytes.
 */
int ledger_part_find(const struct ledger_round *round, uint64_t number, uint32_t len,
		     struct ledger_part *ret_part);
/* Working thread: takes its own journal unless there is one. */
void ledger_part_take(struct ledger_part *part, unsigned thread);
/* LEDGER_PIECE_BYTES, aligned to a page. */
void *ledger_part_scratch(const struct ledger_part *part);
/* A piece of len bytes is in the scratch; it has been copied to every output. */
void ledger_part_staged(struct ledger_part *part, uint32_t len);
void ledger_part_copied(struct ledger_part *part);
/* All of it is in the outputs. */
void ledger_part_done(struct ledger_part *part);

/* -- Through servers ------------------------------------------------------------------------------------------------ */

/* Whether the ledger is of a job that goes through servers. The rest is for such only. */
bool ledger_is_far(const struct ledger *ledger);

/* A tensor that the nodes have agreed on. */
struct ledger_known {
	struct map_entry entry, by_key;
	char name[TENSOR_NAME_MAX + 1];
	unsigned dtype;
	uint64_t elements, key, start;
	bool in_doubt; /* whether it is forgotten the home knows */
	/* The ledger's. */
	uint32_t place;
	size_t index;
	struct ledger_known *next_spare;
};

/* Keeps it, without a doubt. Returns 0, -EDQUOT (more at once than were announced) or -ENOMEM. */
int ledger_tensor_add(struct ledger *ledger, const char *name, unsigned dtype, uint64_t elements,
		      uint64_t key, uint64_t start);
/* The tensor of this name, or NULL; all of them, from 0 on, then NULL. Good until it is removed. */
const struct ledger_known *ledger_tensor_find(const struct ledger *ledger, const char *name);
const struct ledger_known *ledger_tensor_at(const struct ledger *ledger, size_t index);
bool ledger_tensor_has(const struct ledger *ledger, uint64_t key);
/* Whether there was room for all that were to be kept. */
bool ledger_knows_all(const struct ledger *ledger);
/* The tensor of this name, if there is one, is in doubt, or not any more; is forgotten. */
void ledger_tensor_doubt(struct ledger *ledger, const char *name, bool in_doubt);
void ledger_tensor_remove(struct ledger *ledger, const char *name);
/* No key was larger; 0: there was none. */
uint64_t ledger_last_key(const struct ledger *ledger);

/* Keeps a server that the job was given, after those before it, of which there are fewer than DATA_ADDED_MAX. */
void ledger_added_keep(struct ledger *ledger, const struct data_added *added);
/* All that were kept, none of them with moves. Returns 0, or -EPROTO when they are damaged. */
int ledger_added_read(const struct ledger *ledger, struct data_added_set *ret_added);

/*
 * Marks a part done: its result is in all outputs. Any thread; ledger_round_advance() follows on the control thread. only: the
 * round has no other part.
 */
void ledger_round_mark(const struct ledger_round *round, uint64_t part, bool only);

/* The memory that this writes; NULL: the round is not recorded. */
const void *ledger_round_place(const struct ledger_round *round, uint64_t part);

/* What a retained result is. */
struct ledger_what {
	uint64_t key, round, offset, total;
	uint32_t block, part, len, root, n_gone;
	uint16_t stripe; /* its place in the job's placement */
	uint8_t dtype, operation, reduction;
	bool has_data;
};

/* A retained result, or memory for one, as this process knows it. Control thread. */
struct ledger_kept {
	struct ledger_what what;
	bool taken, whole;
	bool late; /* with what this node had contributed: before it is whole, or as it was found; ledger_result_used() ends it */
	bool stale; /* of the daemon before; its outputs may not have it yet */
	/* The user's; false when it is taken. */
	bool busy, released, pending;
	unsigned offered; /* offers under way */
	bool in_place;	  /* a server sums into it, or sends it to others */
	/* Among those of its part: ledger_result_index(). */
	struct map_entry by_part;
	bool indexed;
};

#define LEDGER_NO_RESULT UINT32_MAX

/* Results that there is memory for. */
uint32_t ledger_n_results(const struct ledger *ledger);
/*
 * Results that may have memory at once: at first those that ledger_far_bytes() has room for; in a ledger taken over those that
 * are retained, where they are more. Control thread.
 */
uint32_t ledger_results_allowed(struct ledger *ledger);
/* Allows more: n, at most ledger_n_results(). */
void ledger_results_allow(struct ledger *ledger, uint32_t n);
/* Allows fewer: n, or those that are taken; memory of others goes back to the system. Returns how many may have it now. */
uint32_t ledger_results_trim(struct ledger *ledger, uint32_t n);
/*
 * In a ledger taken over, memory beyond what is allowed may be there from before, and nobody is charged for it: it goes back to the
 * system, of at most n results at once. Returns whether there is more. Control thread.
 */
bool ledger_results_cool(struct ledger *ledger, uint32_t n);
/* Whether half of the memory that may be taken is taken. */
bool ledger_results_scarce(struct ledger *ledger);
/* The most results that had memory at once since this was last asked. */
uint32_t ledger_results_peak(struct ledger *ledger);
/* Results that ledger_far_bytes() has room for, and bytes that n take beyond those. */
uint32_t ledger_results_first(const struct ledger *ledger);
uint64_t ledger_results_bytes(const struct ledger *ledger, uint32_t n);
/*
 * Takes memory for a result of at most part_bytes. Returns the result's number, or LEDGER_NO_RESULT. spare: only while more than half
 * of what may be taken is free. Any thread; its ledger_result_kept() is all zero.
 */
uint32_t ledger_result_take(struct ledger *ledger, bool spare);
/* Where the result of a part of len bytes, what.len, is: the same place whoever asks. */
void *ledger_result_data(const struct ledger *ledger, uint32_t result, uint32_t len);
/* Where the result's `late` contribution is, of at most part_bytes. */
void *ledger_result_late(const struct ledger *ledger, uint32_t result);
/* The `late` contribution is in a result now. */
void ledger_result_used(struct ledger *ledger, uint32_t result);
/*
 * Finds results by their part, of whatever round; those that the daemon before has left with `late`, or of an accumulate, are among them.
 * index: returns 0 or -ENOMEM. next: the one after `kept` (NULL: the first) of the part that `what` names, or NULL.
 */
int ledger_result_index(struct ledger *ledger, uint32_t result);
void ledger_result_unindex(struct ledger *ledger, uint32_t result);
struct ledger_kept *ledger_result_next(const struct ledger *ledger, const struct ledger_what *what,
				       struct ledger_kept *kept);
uint32_t ledger_result_number(const struct ledger *ledger, const struct ledger_kept *kept);
/* Whether such results have all memory that may be taken: none will be free again by itself. */
bool ledger_results_full(struct ledger *ledger);
struct ledger_kept *ledger_result_kept(const struct ledger *ledger, uint32_t result);
/* Memory from this number on was never taken. */
uint32_t ledger_results_used(struct ledger *ledger);
/* The result is there, with all that kept->what says. Any thread, of a result that it works on. */
void ledger_result_whole(struct ledger *ledger, uint32_t result);
/*
 * Forgets the result. While it is offered or used in place its memory is still in use, and whoever uses it still has its number: then
 * the memory is nobody else's before it has been freed once more, with neither.
 */
void ledger_result_free(struct ledger *ledger, uint32_t result);
/* Forgets results of reductions that the daemon before had not all of: of an elastic job, they count no more. */
void ledger_results_drop(struct ledger *ledger);
/*
 * Rounds of this tensor up to this one are over here: results that the daemon before has left of them are like any other
 * from now on. Returns the next of them, or LEDGER_NO_RESULT.
 */
uint32_t ledger_result_settle(struct ledger *ledger, uint64_t key, uint64_t round);
/* The result that the daemon before has left, or LEDGER_NO_RESULT. */
uint32_t ledger_result_find(const struct ledger *ledger, uint64_t key, uint64_t round,
			    uint32_t block, uint32_t part);
