/*
 * A lock that is held for a few instructions, by threads of which there are few: to let it go is a store. A mutex is let go by an
 * instruction that waits for all stores before it, and these go to memory that is often not in the cache. Zero: nobody has it.
 */
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

struct latch {
	atomic_bool taken;
};

static inline void latch_take(struct latch *latch)
{
	/* Whoever has it may wait for our processor. */
	while (atomic_exchange_explicit(&latch->taken, true, memory_order_acquire))
		(void)sched_yield();
}

static inline void latch_drop(struct latch *latch)
{
	atomic_store_explicit(&latch->taken, false, memory_order_release);
}
