/*
 * Whether to look for what is expected soon, or to sleep until it comes. A look that finds it saves a wake-up; one in vain
 * wastes its time; and who gives his processor away between two looks, and has it back late, would have been woken sooner.
 * All this is time, and so is what may be wasted of it: a share of all that goes by, and some at once, so that a job's first
 * rounds are not those that tell. So looking costs no more than this share, whoever else needs the processors. Embedded in
 * its user, zeroed.
 */
#pragma once

#include "proto/c.h"

#define ALLOWANCE_SHARE	     256		    /* of what goes by, one part in so many */
#define ALLOWANCE_AT_ONCE_NS (4 * INT64_C(1000000)) /* a few turns of others on a processor */
#define ALLOWANCE_WAKE_UP_NS (20 * INT64_C(1000))   /* of a thread on another core */
#define ALLOWANCE_AWAY_NS    (100 * INT64_C(1000)) /* who is longer without his processor shares it */

struct allowance {
	int64_t debt_ns; /* wasted and not made good, at_ns */
	int64_t at_ns;
};

static inline int64_t allowance_debt_ns(const struct allowance *a, int64_t now_ns)
{
	return MAX(a->debt_ns - (now_ns - a->at_ns) / ALLOWANCE_SHARE, INT64_C(0));
}

/* Whether one may look. */
static inline bool allowance_remains(const struct allowance *a, int64_t now_ns)
{
	return allowance_debt_ns(a, now_ns) <= ALLOWANCE_AT_ONCE_NS;
}

/*
 * A look of looked_ns has ended, and found what it was for, or something else to do, or nothing. away_ns: how long it took to
 * have the processor back the last time before it did; 0: nothing had to be waited for.
 */
static inline void allowance_settle(struct allowance *a, int64_t now_ns, bool found,
				    int64_t looked_ns, int64_t away_ns)
{
	int64_t debt_ns = allowance_debt_ns(a, now_ns);

	if (!found)
		debt_ns += looked_ns;
	else if (away_ns >= ALLOWANCE_AWAY_NS)
		debt_ns += away_ns;
	else if (away_ns)
		debt_ns = MAX(debt_ns - ALLOWANCE_WAKE_UP_NS, INT64_C(0));
	/* Whatever has been, a second later one may look again. */
	a->debt_ns = MIN(debt_ns, 2 * ALLOWANCE_AT_ONCE_NS);
	a->at_ns = now_ns;
}
