/*
 * Which memory of results is free, and how much may be taken at once: it is charged before it is used, and goes back to the
 * system where it has not been used for long. Of any thread but for what changes how much.
 */
#include "ledger/internal.h"
#include <stdlib.h>
#include <sys/mman.h>

/* Memory of so many goes back at once: others wait for the lock while it is taken out. */
#define STEP_RESULTS 256

uint32_t ledger_n_results(const struct ledger *ledger)
{
	return ledger->n_results;
}

uint32_t ledger_results_first(const struct ledger *ledger)
{
	return (uint32_t)MIN(align_up((uint64_t)LEDGER_RESULT_MAX, 4096) /
				     ledger_result_stride(ledger),
			     (uint64_t)ledger->n_results);
}

uint64_t ledger_results_bytes(const struct ledger *ledger, uint32_t n)
{
	uint32_t first = ledger_results_first(ledger);

	return n > first ? (n - first) * ledger_result_stride(ledger) : 0;
}

/* The latch is taken. */
static uint32_t n_taken(const struct ledger *ledger)
{
	return ledger->results.used - ledger->results.n_free - ledger->results.n_leaving -
	       ledger->results.n_returned;
}

static int compare_results(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

uint32_t ledger_results_allowed(struct ledger *ledger)
{
	uint32_t n;

	latch_take(&ledger->results.latch);
	n = ledger->results.n_allowed;
	latch_drop(&ledger->results.latch);
	return n;
}

void ledger_results_allow(struct ledger *ledger, uint32_t n)
{
	latch_take(&ledger->results.latch);
	ledger->results.n_allowed = MAX(ledger->results.n_allowed, MIN(n, ledger->n_results));
	latch_drop(&ledger->results.latch);
}

bool ledger_results_scarce(struct ledger *ledger)
{
	bool scarce;

	latch_take(&ledger->results.latch);
	scarce = n_taken(ledger) >= ledger->results.n_allowed - ledger->results.n_allowed / 2;
	latch_drop(&ledger->results.latch);
	return scarce;
}

uint32_t ledger_results_peak(struct ledger *ledger)
{
	uint32_t n;

	latch_take(&ledger->results.latch);
	n = ledger->results.n_peak;
	ledger->results.n_peak = n_taken(ledger);
	latch_drop(&ledger->results.latch);
	return n;
}

/* Moves n results of a list, from a place on, elsewhere. */
static void take_out(uint32_t *list, uint32_t from, uint32_t n, uint32_t *n_list,
		     uint32_t *ret_results)
{
	memcpy(ret_results, list + from, n * sizeof(list[0]));
	*n_list -= n;
	memmove(list + from, list + from + n, (*n_list - from) * sizeof(list[0]));
}

/* The results' memory has gone back. The latch is taken. */
static void returned(struct ledger *ledger, const uint32_t *results, uint32_t n)
{
	memcpy(ledger->results.returned + ledger->results.n_returned, results,
	       n * sizeof(results[0]));
	ledger->results.n_returned += n;
	ledger->results.n_leaving = 0;
}

/*
 * Takes out at most n results whose memory has been free for longest, as long as there is memory of more than are allowed: nobody's
 * meanwhile, and sorted. Returns how many.
 */
static uint32_t take_coldest(struct ledger *ledger, uint32_t *results, uint32_t n)
{
	uint32_t have;

	latch_take(&ledger->results.latch);
	have = n_taken(ledger) + ledger->results.n_free;
	n = MIN(MIN(n, ledger->results.n_free), have - MIN(have, ledger->results.n_allowed));
	take_out(ledger->results.free, 0, n, &ledger->results.n_free, results);
	ledger->results.n_leaving = n;
	latch_drop(&ledger->results.latch);
	qsort(results, n, sizeof(results[0]), compare_results);
	return n;
}

/* Gives back neighbours together. What cannot be given back is used again all the same. */
static void give_back(const struct ledger *ledger, const uint32_t *results, uint32_t n)
{
	for (uint32_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && results[end] == results[end - 1] + 1;)
			end++;
		(void)madvise(ledger_result_data(ledger, results[i], ledger->part_bytes),
			      (end - i) * ledger_result_stride(ledger), MADV_REMOVE);
	}
}

uint32_t ledger_results_trim(struct ledger *ledger, uint32_t n)
{
	uint32_t results[STEP_RESULTS], n_out;

	latch_take(&ledger->results.latch);
	ledger->results.n_allowed = MIN(MAX(n, n_taken(ledger)), ledger->results.n_allowed);
	n = ledger->results.n_allowed;
	latch_drop(&ledger->results.latch);
	while ((n_out = take_coldest(ledger, results, STEP_RESULTS))) {
		give_back(ledger, results, n_out);
		latch_take(&ledger->results.latch);
		returned(ledger, results, n_out);
		n_out = MIN(n_out, ledger->results.n_charged);
		ledger->results.n_charged -= n_out;
		quota_release(ledger->quota, n_out * ledger_result_stride(ledger));
		latch_drop(&ledger->results.latch);
	}
	return n;
}

void ledger_results_return(struct ledger *ledger)
{
	uint32_t have = n_taken(ledger) + ledger->results.n_free;
	uint32_t n = have - MIN(have, ledger->results.n_allowed);

	take_out(ledger->results.free, 0, n, &ledger->results.n_free, ledger->results.returned);
	ledger->results.n_returned = ledger->results.n_warm = n;
}

/* Takes out the last n results whose memory is warm. */
static void take_warm(struct ledger *ledger, uint32_t *results, uint32_t n)
{
	ledger->results.n_warm -= n;
	take_out(ledger->results.returned, ledger->results.n_warm, n, &ledger->results.n_returned,
		 results);
	ledger->results.n_leaving = n;
}

bool ledger_results_cool(struct ledger *ledger, uint32_t n)
{
	uint32_t results[STEP_RESULTS];
	bool more;

	latch_take(&ledger->results.latch);
	n = MIN(MIN(n, (uint32_t)STEP_RESULTS), ledger->results.n_warm);
	take_warm(ledger, results, n);
	latch_drop(&ledger->results.latch);
	qsort(results, n, sizeof(results[0]), compare_results);
	give_back(ledger, results, n);
	latch_take(&ledger->results.latch);
	returned(ledger, results, n);
	more = ledger->results.n_warm;
	latch_drop(&ledger->results.latch);
	return more;
}

int ledger_results_charge(struct ledger *ledger)
{
	uint32_t n = MAX(ledger->results.used - ledger->results.n_returned, 1u);

	if (!ledger->n_results || n <= ledger->results.n_charged)
		return 0;
	if (quota_charge(ledger->quota,
			 (n - ledger->results.n_charged) * ledger_result_stride(ledger)))
		return error_origin(-EDQUOT);
	ledger->results.n_charged = n;
	return 0;
}

/* Whether one more result may have memory, which is charged now. The latch is taken. */
static bool may_touch(struct ledger *ledger)
{
	uint32_t n = ledger->results.used - ledger->results.n_returned + 1;

	if (n <= ledger->results.n_charged)
		return true;
	if (quota_charge(ledger->quota, ledger_result_stride(ledger)))
		return false;
	ledger->results.n_charged++;
	return true;
}

/* Chooses what was freed last: that memory is the warmest. The latch is taken. */
static uint32_t choose(struct ledger *ledger)
{
	uint32_t result;

	if (ledger->results.n_free)
		return ledger->results.free[--ledger->results.n_free];
	if (!may_touch(ledger))
		return LEDGER_NO_RESULT;
	if (ledger->results.n_returned) {
		result = ledger->results.returned[--ledger->results.n_returned];
		ledger->results.n_warm = MIN(ledger->results.n_warm, ledger->results.n_returned);
		return result;
	}
	result = ledger->results.used++;
	atomic_store_explicit(&ledger_header(ledger)->results_used, ledger->results.used,
			      memory_order_release);
	return result;
}

uint32_t ledger_result_take(struct ledger *ledger, bool spare)
{
	uint32_t n_free, result = LEDGER_NO_RESULT;

	latch_take(&ledger->results.latch);
	n_free = ledger->results.n_allowed - MIN(n_taken(ledger), ledger->results.n_allowed);
	if (n_free && !(spare && n_free <= ledger->results.n_allowed / 2)) {
		result = choose(ledger);
		ledger->results.n_peak = MAX(ledger->results.n_peak, n_taken(ledger));
	}
	latch_drop(&ledger->results.latch);
	return result;
}

void ledger_result_put_back(struct ledger *ledger, uint32_t result)
{
	latch_take(&ledger->results.latch);
	ledger->results.free[ledger->results.n_free++] = result;
	latch_drop(&ledger->results.latch);
}
