/*
 * Who keeps the others waiting: of n that come to each round of a job, one after the other, how long behind the first
 * each comes, how often it is the last, and how long the others then wait for it alone. Times are the caller's, so that
 * it costs no clock. One thread.
 */
#pragma once

#include "base/metrics.h"

/*
 * One is said to be late, once in the log, when in ARRIVALS_WINDOWS windows in a row of at least ARRIVALS_WINDOW_NS it was
 * last in most rounds and kept the others waiting for a tenth of the time; and may be so again when in as many it did not.
 */
#define ARRIVALS_WINDOW_NS (10ull * 1000000000)
#define ARRIVALS_WINDOWS   3

/* With more than so many, each has no metrics of its own: what all have together is a scrape's to carry. */
#define ARRIVALS_MEASURED_MAX 256
/* Of all jobs together, for the same reason: each has a quarter of what others leave, at most. */
#define ARRIVALS_MEASURED_ALL 8192

struct arrivals;

/* How far apart the first and the last came: a histogram for metrics. */
#define ARRIVALS_BUCKETS 7
struct arrivals_spread {
	char names[ARRIVALS_BUCKETS + 2][80];
	struct metric metrics[ARRIVALS_BUCKETS + 2]; /* the buckets, count, sum */
};
/* name: the metric's, a literal. */
void arrivals_spread_init(struct arrivals_spread *spread, const char *name, const char *help);
void arrivals_spread_done(struct arrivals_spread *spread);

/*
 * What of: "rank" or "node", as the log and the metrics bps_WHAT_last_total, bps_WHAT_held_seconds_total and
 * bps_WHAT_late_seconds, with labels job and WHAT, say; with more than ARRIVALS_MEASURED_MAX, or a quarter of what others leave of
 * ARRIVALS_MEASURED_ALL, there are no such metrics. numbers: of each, n of them, copied; NULL: 0, 1, ... spread: borrowed, for all
 * its life. Returns 0 or -ENOMEM.
 */
int arrivals_new(const char *job, const char *what, const uint32_t *numbers, uint32_t n,
		 struct arrivals_spread *spread, struct arrivals **ret_arrivals);
struct arrivals *arrivals_free(struct arrivals *arrivals);
/* Bytes that it takes. */
size_t arrivals_len(uint32_t n);

/* One has come to a round, so long after the first; 0 for the first itself. */
void arrivals_came(struct arrivals *arrivals, uint32_t index, uint64_t late_ns);
/* That was the last, at now_ns; the first came at first_ns, the one before the last at before_ns. */
void arrivals_complete(struct arrivals *arrivals, uint32_t last, uint64_t first_ns,
		       uint64_t before_ns, uint64_t now_ns);

struct arrivals_info {
	uint32_t number;
	bool is_late;
	uint64_t n_rounds, n_last;
	uint64_t late_ns; /* behind the first, averaged over about the last 16 rounds */
	uint64_t
		held_ns; /* that the others have waited for it alone, at whatever tensor: not counted twice */
};
/* n entries. */
void arrivals_info(const struct arrivals *arrivals, struct arrivals_info *ret_infos);
uint32_t arrivals_n(const struct arrivals *arrivals);

/* An average that moves by a sixteenth towards each new value. */
static inline uint64_t arrivals_average(uint64_t average, uint64_t value)
{
	return average + (value >> 4) - (average >> 4);
}
