/* Monotonic time in nanoseconds. Any thread. */
#pragma once

#include "proto/c.h"
#include <time.h>

#define NSEC_PER_SEC  1000000000ull
#define NSEC_PER_MSEC 1000000ull
#define NSEC_PER_USEC 1000ull
#define CLOCK_NEVER   UINT64_MAX

static inline uint64_t clock_now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

/*
 * A clock for many small items in a row. A look at the clock costs a part of what a small item costs, so several share one; each has its
 * own while the last ones were slow. Zeroed memory is one that was never looked at. One thread at a time.
 */
struct sampled_clock {
	uint64_t now_ns; /* when it was looked at, or sampled_clock_begin() */
	unsigned n;	 /* items since it was looked at */
	bool is_slow;	 /* so were the items before: the next look comes after one */
};

#define SAMPLED_CLOCK_ITEMS   4
#define SAMPLED_CLOCK_SLOW_NS (10 * NSEC_PER_USEC) /* for each */

/* An item is about to begin, at this time; since the last something else was done. */
static inline void sampled_clock_begin(struct sampled_clock *clock, uint64_t now_ns)
{
	clock->now_ns = now_ns;
}

/* Returns what it says now. */
static inline uint64_t sampled_clock_look(struct sampled_clock *clock)
{
	uint64_t now_ns = clock_now_ns();

	if (clock->n)
		clock->is_slow = now_ns - clock->now_ns > clock->n * SAMPLED_CLOCK_SLOW_NS;
	clock->n = 0;
	return clock->now_ns = now_ns;
}

/* One more item is done. Returns whether the clock was looked at. */
static inline bool sampled_clock_tick(struct sampled_clock *clock)
{
	if (++clock->n < SAMPLED_CLOCK_ITEMS && !clock->is_slow)
		return false;
	(void)sampled_clock_look(clock);
	return true;
}
