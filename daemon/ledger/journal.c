/*
 * In-place journals of a job on one node, one for each thread that sums: how far the
 * thread has come with a part whose outputs may be its inputs. A daemon that takes the ledger
 * over goes on from there. The agent's part.c finds a part's journal on the control thread; its
 * work.c keeps the journal on the thread that sums.
 */
#include "base/failpoint.h"
#include "ledger/internal.h"
#include <inttypes.h>
#include <stdlib.h>

#define NO_JOURNAL UINT32_MAX

static uint64_t progress_of(uint32_t done, uint32_t staged)
{
	return done | (uint64_t)staged << 32;
}

static void journal_clear(const struct ledger *ledger, uint32_t journal)
{
	atomic_store_explicit(&ledger_journal(ledger, journal)->taken, 0, memory_order_release);
}

/* -- Taking over ------------------------------------------------------------------------------- */

static int compare_record(const void *record, const void *old)
{
	uint32_t a = *(const uint32_t *)record, b = ((const struct ledger_old *)old)->record;

	return (a > b) - (a < b);
}

/* They were read in the order of their records. */
static const struct ledger_old *old_of(const struct ledger *ledger, uint32_t record)
{
	return ledger->n_old ? bsearch(&record, ledger->old, ledger->n_old, sizeof(ledger->old[0]),
				       compare_record)
			     : NULL;
}

/*
 * Copies a journal and checks it. *ret_stale is set when it means something; one that does not is
 * cleared.
 */
static int read_journal(struct ledger *ledger, uint32_t number, bool *ret_stale,
			struct failure *failure)
{
	struct ledger_journal copy;
	uint64_t progress, part;
	uint32_t taken, done, staged;
	const struct ledger_old *old;
	size_t size;
	int r;

	*ret_stale = false;
	r = ledger_copy(ledger, ledger_journal(ledger, number), &copy, sizeof(copy), failure);
	if (r)
		return r;
	taken = atomic_load_explicit(&copy.taken, memory_order_relaxed);
	progress = atomic_load_explicit(&copy.progress, memory_order_relaxed);
	part = copy.part;
	done = (uint32_t)progress;
	staged = (uint32_t)(progress >> 32);
	if (!taken)
		return 0;
	if (taken > LEDGER_RECORDS)
		return failure_set(failure, -EPROTO,
				   "the ledger is damaged: journal %u is in record %u", number,
				   taken - 1);
	old = old_of(ledger, taken - 1);
	if (!old || part < old->low ||
	    (part - old->low < LEDGER_AHEAD && old->done[ledger_word(part)] & ledger_bit(part)) ||
	    !progress) {
		journal_clear(ledger, number);
		return 0;
	}
	size = dtype_size(old->dtype);
	if (part - old->low >= LEDGER_AHEAD || done > ledger->part_bytes ||
	    staged > LEDGER_PIECE_BYTES || done % size || staged % size)
		return failure_set(
			failure, -EPROTO,
			"the ledger is damaged: journal %u is at byte %u of part %" PRIu64
			" of tensor %s, and has %u more",
			number, done, part, old->tensor, staged);
	ledger->stale[ledger->n_stale++] = (struct ledger_stale){
		.journal = number,
		.record = taken - 1,
		.part = part,
		.done = done,
		.staged = staged,
	};
	*ret_stale = true;
	return 0;
}

int ledger_take_journals(struct ledger *ledger, struct failure *failure)
{
	unsigned n_own = 0;
	bool stale;
	int r;

	ledger->stale = calloc(ledger->n_journals, sizeof(ledger->stale[0]));
	if (!ledger->stale)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	for (uint32_t i = 0; i < ledger->n_journals; i++) {
		r = read_journal(ledger, i, &stale, failure);
		if (r)
			return r;
		if (!stale && n_own < ledger->n_threads)
			ledger->own[n_own++] = i;
	}
	if (n_own < ledger->n_threads)
		return failure_set(failure, -ECONNRESET,
				   "its ledger has %u journals, %zu of them full: too few for %u "
				   "sum_threads",
				   ledger->n_journals, ledger->n_stale, ledger->n_threads);
	return 0;
}

void ledger_drop_journals(struct ledger *ledger, uint32_t record)
{
	for (size_t i = ledger->n_stale; i--;) {
		if (ledger->stale[i].record != record)
			continue;
		journal_clear(ledger, ledger->stale[i].journal);
		ledger->stale[i] = ledger->stale[--ledger->n_stale];
	}
}

/* -- Working ----------------------------------------------------------------------------------- */

int ledger_part_find(const struct ledger_round *round, uint64_t number, uint32_t len,
		     struct ledger_part *ret_part)
{
	struct ledger *ledger = round->ledger;
	struct ledger_part part = {
		.ledger = ledger,
		.record = round->record,
		.journal = NO_JOURNAL,
		.number = number,
	};

	for (size_t i = 0; i < ledger->n_stale; i++) {
		struct ledger_stale stale = ledger->stale[i];

		if (stale.record != part.record || stale.part != number)
			continue;
		/* It stays in the list: should the part not be finished, it goes with the round. */
		if (part.journal != NO_JOURNAL || stale.done > len ||
		    stale.staged > len - stale.done)
			return error_origin(-EPROTO);
		part.journal = stale.journal;
		part.done = stale.done;
		part.staged = stale.staged;
	}
	*ret_part = part;
	return 0;
}

void ledger_part_take(struct ledger_part *part, unsigned thread)
{
	struct ledger_journal *journal;

	if (part->journal != NO_JOURNAL)
		return;
	assert(thread < part->ledger->n_threads);
	part->journal = part->ledger->own[thread];
	journal = ledger_journal(part->ledger, part->journal);
	journal->part = part->number;
	atomic_store_explicit(&journal->progress, 0, memory_order_relaxed);
	atomic_store_explicit(&journal->taken, part->record + 1, memory_order_release);
	FAILPOINT("ledger-journal-taken");
}

void *ledger_part_scratch(const struct ledger_part *part)
{
	const struct ledger *ledger = part->ledger;

	return ledger->memory->data + ledger_scratch_offset(ledger->n_journals) +
	       (size_t)part->journal * LEDGER_PIECE_BYTES;
}

static void publish(const struct ledger_part *part)
{
	atomic_store_explicit(&ledger_journal(part->ledger, part->journal)->progress,
			      progress_of(part->done, part->staged), memory_order_release);
}

void ledger_part_staged(struct ledger_part *part, uint32_t len)
{
	part->staged = len;
	publish(part);
	/* No copy overtakes the word that explains it. */
	ledger_fence();
	FAILPOINT("ledger-piece-staged");
}

void ledger_part_copied(struct ledger_part *part)
{
	part->done += part->staged;
	part->staged = 0;
	publish(part);
	/* Nor does the sum of the next piece, which takes its scratch. */
	ledger_fence();
	FAILPOINT("ledger-piece-copied");
}

void ledger_part_done(struct ledger_part *part)
{
	struct ledger_record *record = ledger_record(part->ledger, part->record);

	FAILPOINT("ledger-part-copied");
	(void)atomic_fetch_or_explicit(&record->done[ledger_word(part->number)],
				       ledger_bit(part->number), memory_order_release);
	FAILPOINT("ledger-part-done");
	journal_clear(part->ledger, part->journal);
	part->journal = NO_JOURNAL;
	FAILPOINT("ledger-journal-cleared");
}
