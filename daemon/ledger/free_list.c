/*
 * Which cells are free, and how many may be taken at once: their memory is charged before it is used, and goes back to the
 * system where it has not been used for long. Of any thread but for what changes how many.
 */
#include "ledger/internal.h"
#include <stdlib.h>
#include <sys/mman.h>

/* As many go back at once: others wait for the lock while they are taken out. */
#define STEP_CELLS 256

uint32_t ledger_n_cells(const struct ledger *ledger)
{
	return ledger->n_cells;
}

uint32_t ledger_cells_first(const struct ledger *ledger)
{
	return (uint32_t)MIN(align_up((uint64_t)LEDGER_CELL_MAX, 4096) / ledger_cell_stride(ledger),
			     (uint64_t)ledger->n_cells);
}

uint64_t ledger_cells_bytes(const struct ledger *ledger, uint32_t n)
{
	uint32_t first = ledger_cells_first(ledger);

	return n > first ? (n - first) * ledger_cell_stride(ledger) : 0;
}

/* The latch is taken. */
static uint32_t n_taken(const struct ledger *ledger)
{
	return ledger->cells.used - ledger->cells.n_free - ledger->cells.n_leaving -
	       ledger->cells.n_returned;
}

static int compare_cells(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

uint32_t ledger_cells_allowed(struct ledger *ledger)
{
	uint32_t n;

	latch_take(&ledger->cells.latch);
	n = ledger->cells.n_allowed;
	latch_drop(&ledger->cells.latch);
	return n;
}

void ledger_cells_allow(struct ledger *ledger, uint32_t n)
{
	latch_take(&ledger->cells.latch);
	ledger->cells.n_allowed = MAX(ledger->cells.n_allowed, MIN(n, ledger->n_cells));
	latch_drop(&ledger->cells.latch);
}

bool ledger_cells_scarce(struct ledger *ledger)
{
	bool scarce;

	latch_take(&ledger->cells.latch);
	scarce = n_taken(ledger) >= ledger->cells.n_allowed - ledger->cells.n_allowed / 2;
	latch_drop(&ledger->cells.latch);
	return scarce;
}

uint32_t ledger_cells_peak(struct ledger *ledger)
{
	uint32_t n;

	latch_take(&ledger->cells.latch);
	n = ledger->cells.n_peak;
	ledger->cells.n_peak = n_taken(ledger);
	latch_drop(&ledger->cells.latch);
	return n;
}

/* Moves n of the cells of a list, from a place on, elsewhere. */
static void take_out(uint32_t *list, uint32_t from, uint32_t n, uint32_t *n_list,
		     uint32_t *ret_cells)
{
	memcpy(ret_cells, list + from, n * sizeof(list[0]));
	*n_list -= n;
	memmove(list + from, list + from + n, (*n_list - from) * sizeof(list[0]));
}

/* Their memory has gone back. The latch is taken. */
static void returned(struct ledger *ledger, const uint32_t *cells, uint32_t n)
{
	memcpy(ledger->cells.returned + ledger->cells.n_returned, cells, n * sizeof(cells[0]));
	ledger->cells.n_returned += n;
	ledger->cells.n_leaving = 0;
}

/*
 * Takes out at most n of those that have been free for longest, as long as more have memory than are allowed: nobody's meanwhile, and
 * sorted. Returns how many.
 */
static uint32_t take_coldest(struct ledger *ledger, uint32_t *cells, uint32_t n)
{
	uint32_t have;

	latch_take(&ledger->cells.latch);
	have = n_taken(ledger) + ledger->cells.n_free;
	n = MIN(MIN(n, ledger->cells.n_free), have - MIN(have, ledger->cells.n_allowed));
	take_out(ledger->cells.free, 0, n, &ledger->cells.n_free, cells);
	ledger->cells.n_leaving = n;
	latch_drop(&ledger->cells.latch);
	qsort(cells, n, sizeof(cells[0]), compare_cells);
	return n;
}

/* Neighbours together. What cannot be given back is used again all the same. */
static void give_back(const struct ledger *ledger, const uint32_t *cells, uint32_t n)
{
	for (uint32_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && cells[end] == cells[end - 1] + 1;)
			end++;
		(void)madvise(ledger_cell_data(ledger, cells[i], ledger->part_bytes),
			      (end - i) * ledger_cell_stride(ledger), MADV_REMOVE);
	}
}

uint32_t ledger_cells_trim(struct ledger *ledger, uint32_t n)
{
	uint32_t cells[STEP_CELLS], n_cells;

	latch_take(&ledger->cells.latch);
	ledger->cells.n_allowed = MIN(MAX(n, n_taken(ledger)), ledger->cells.n_allowed);
	n = ledger->cells.n_allowed;
	latch_drop(&ledger->cells.latch);
	while ((n_cells = take_coldest(ledger, cells, STEP_CELLS))) {
		give_back(ledger, cells, n_cells);
		latch_take(&ledger->cells.latch);
		returned(ledger, cells, n_cells);
		n_cells = MIN(n_cells, ledger->cells.n_charged);
		ledger->cells.n_charged -= n_cells;
		quota_release(ledger->quota, n_cells * ledger_cell_stride(ledger));
		latch_drop(&ledger->cells.latch);
	}
	return n;
}

void ledger_cells_return(struct ledger *ledger)
{
	uint32_t have = n_taken(ledger) + ledger->cells.n_free;
	uint32_t n = have - MIN(have, ledger->cells.n_allowed);

	take_out(ledger->cells.free, 0, n, &ledger->cells.n_free, ledger->cells.returned);
	ledger->cells.n_returned = ledger->cells.n_warm = n;
}

/* Takes out the last n of those that are warm. */
static void take_warm(struct ledger *ledger, uint32_t *cells, uint32_t n)
{
	ledger->cells.n_warm -= n;
	take_out(ledger->cells.returned, ledger->cells.n_warm, n, &ledger->cells.n_returned, cells);
	ledger->cells.n_leaving = n;
}

bool ledger_cells_cool(struct ledger *ledger, uint32_t n)
{
	uint32_t cells[STEP_CELLS];
	bool more;

	latch_take(&ledger->cells.latch);
	n = MIN(MIN(n, (uint32_t)STEP_CELLS), ledger->cells.n_warm);
	take_warm(ledger, cells, n);
	latch_drop(&ledger->cells.latch);
	qsort(cells, n, sizeof(cells[0]), compare_cells);
	give_back(ledger, cells, n);
	latch_take(&ledger->cells.latch);
	returned(ledger, cells, n);
	more = ledger->cells.n_warm;
	latch_drop(&ledger->cells.latch);
	return more;
}

int ledger_cells_charge(struct ledger *ledger)
{
	uint32_t n = MAX(ledger->cells.used - ledger->cells.n_returned, 1u);

	if (!ledger->n_cells || n <= ledger->cells.n_charged)
		return 0;
	if (quota_charge(ledger->quota, (n - ledger->cells.n_charged) * ledger_cell_stride(ledger)))
		return error_origin(-EDQUOT);
	ledger->cells.n_charged = n;
	return 0;
}

/* Whether one more may have memory, which is charged now. The latch is taken. */
static bool may_touch(struct ledger *ledger)
{
	uint32_t n = ledger->cells.used - ledger->cells.n_returned + 1;

	if (n <= ledger->cells.n_charged)
		return true;
	if (quota_charge(ledger->quota, ledger_cell_stride(ledger)))
		return false;
	ledger->cells.n_charged++;
	return true;
}

/* The one that was freed last: its memory is the warmest. The latch is taken. */
static uint32_t choose(struct ledger *ledger)
{
	uint32_t cell;

	if (ledger->cells.n_free)
		return ledger->cells.free[--ledger->cells.n_free];
	if (!may_touch(ledger))
		return LEDGER_NO_CELL;
	if (ledger->cells.n_returned) {
		cell = ledger->cells.returned[--ledger->cells.n_returned];
		ledger->cells.n_warm = MIN(ledger->cells.n_warm, ledger->cells.n_returned);
		return cell;
	}
	cell = ledger->cells.used++;
	atomic_store_explicit(&ledger_header(ledger)->cells_used, ledger->cells.used,
			      memory_order_release);
	return cell;
}

uint32_t ledger_cell_take(struct ledger *ledger, bool spare)
{
	uint32_t n_free, cell = LEDGER_NO_CELL;

	latch_take(&ledger->cells.latch);
	n_free = ledger->cells.n_allowed - MIN(n_taken(ledger), ledger->cells.n_allowed);
	if (n_free && !(spare && n_free <= ledger->cells.n_allowed / 2)) {
		cell = choose(ledger);
		ledger->cells.n_peak = MAX(ledger->cells.n_peak, n_taken(ledger));
	}
	latch_drop(&ledger->cells.latch);
	return cell;
}

void ledger_cell_put_back(struct ledger *ledger, uint32_t cell)
{
	latch_take(&ledger->cells.latch);
	ledger->cells.free[ledger->cells.n_free++] = cell;
	latch_drop(&ledger->cells.latch);
}
