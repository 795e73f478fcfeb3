/*
 * Limits on what others make the daemon hold: bytes, descriptors, objects. A quota may have a parent, which is charged
 * too. Any thread, but for one_thread. Whoever makes the daemon hold something is charged first and refused over the limit.
 */
#pragma once

#include "proto/c.h"
#include <stdatomic.h>

enum { QUOTA_E_NONE, QUOTA_E_FULL };

struct quota {
	_Atomic uint64_t used;
	uint64_t limit;
	struct quota *parent; /* outlives this one */
	/*
	 * Percent, 0: no matter. Of what nobody has of the parent, this quota's own use may be at most share / (100 - share)
	 * times as much: with 50, as much as is left. So however many take all they can, something is left for one more. Of a
	 * parent that has a share itself, what is left is what it may still take.
	 */
	unsigned share;
	/*
	 * All that is charged, is charged and released on one thread, or on another once all is released. Then that takes no
	 * instruction that keeps other threads away. Any thread may look.
	 */
	bool one_thread;
	/*
	 * Taken from the parent at a time, a power of two, where there is so much: who charges often does not meet others
	 * there. While nothing is charged, nothing is taken. 0: as it is charged.
	 */
	uint64_t batch;
	_Atomic uint64_t taken; /* with a batch: of the parent */
	_Atomic(const void *)
		thread; /* of one_thread: while something is charged. For assertions */
};

void quota_init(struct quota *quota, uint64_t limit, struct quota *parent);
/* Gives back what is left of batches. Nothing is charged any more; or it goes on from nothing. */
void quota_done(struct quota *quota);
uint64_t quota_used(const struct quota *quota);
/* What the quota has of its parent: with a batch mostly more than is used. */
uint64_t quota_taken(const struct quota *quota);
/* What may still be charged, as far as its own limit and its share say. */
uint64_t quota_available(const struct quota *quota);
/* What quota_charge() and quota_release() do where it is not the quota of one thread, or where its parent matters. */
int quota_charge_any(struct quota *quota, uint64_t amount);
void quota_release_any(struct quota *quota, uint64_t amount);
/*
 * Releases what the quota itself has, while its parent, which is returned, stays charged with it: for what outlives the quota. Without
 * a batch. NULL: there is no parent.
 */
struct quota *quota_leave(struct quota *quota, uint64_t amount);
/* Only asserted: the quota becomes this thread's while nothing is charged. Returns whether it is this thread's. */
bool quota_claim(struct quota *quota);

/*
 * Of the quota of one thread: whether its parent need not be asked when so much is used. With a batch, what is taken of the parent is then
 * enough and not too much.
 */
static inline bool quota_is_settled(const struct quota *quota, uint64_t used)
{
	uint64_t taken = atomic_load_explicit(&quota->taken, memory_order_relaxed);

	return !quota->parent || (quota->batch && used && taken - used < 2 * quota->batch);
}

/* Returns 0 or QUOTA_E_FULL (then nothing is charged). NULL: nobody is charged. */
static inline int quota_charge(struct quota *quota, uint64_t amount)
{
	uint64_t used;

	if (!quota || !amount)
		return 0;
	if (quota->one_thread) {
		assert(quota_claim(quota));
		used = atomic_load_explicit(&quota->used, memory_order_relaxed);
		assert(used <= quota->limit);
		if (amount <= quota->limit - used && quota_is_settled(quota, used + amount)) {
			atomic_store_explicit(&quota->used, used + amount, memory_order_relaxed);
			return 0;
		}
	}
	return quota_charge_any(quota, amount);
}

static inline void quota_release(struct quota *quota, uint64_t amount)
{
	uint64_t used;

	if (!quota || !amount)
		return;
	if (quota->one_thread) {
		assert(quota_claim(quota));
		used = atomic_load_explicit(&quota->used, memory_order_relaxed);
		assert(used >= amount);
		if (quota_is_settled(quota, used - amount)) {
			atomic_store_explicit(&quota->used, used - amount, memory_order_relaxed);
			return;
		}
	}
	quota_release_any(quota, amount);
}

/* Zeroed memory that is charged until held_free(). Returns NULL with errno EDQUOT or ENOMEM. */
void *held_new(struct quota *quota, size_t len);
void held_drop(void *data);
/* Returns NULL; takes NULL. */
static inline void *held_free(void *data)
{
	if (data)
		held_drop(data);
	return NULL;
}
