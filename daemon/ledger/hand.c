/*
 * In-place journals (hands) of a job on one node, one for each thread that sums: how far the
 * thread has come with a part whose outputs may be its inputs. A daemon that takes the ledger
 * over goes on from there. The agent's part.c finds a part's journal on the control thread; its
 * work.c keeps the journal on the thread that sums.
 */
#include "base/failpoint.h"
#include "ledger/internal.h"
#include <inttypes.h>

#define NO_HAND UINT32_MAX

static uint64_t progress_of(uint32_t done, uint32_t staged)
{
	return done | (uint64_t)staged << 32;
}

static void hand_clear(const struct ledger *ledger, uint32_t hand)
{
	atomic_store_explicit(&ledger_hand(ledger, hand)->taken, 0, memory_order_release);
}

/* -- Taking over ------------------------------------------------------------------------------- */

static const struct ledger_old *old_of(const struct ledger *ledger, uint32_t record)
{
	for (size_t i = 0; i < ledger->n_old; i++)
		if (ledger->old[i].record == record)
			return &ledger->old[i];
	return NULL;
}

/*
 * Copies a hand and checks it. *ret_stale is set when it means something; one that does not is
 * cleared.
 */
static int read_hand(struct ledger *ledger, uint32_t number, bool *ret_stale,
		     struct failure *failure)
{
	struct ledger_hand *hand = ledger_hand(ledger, number);
	uint32_t taken = atomic_load_explicit(&hand->taken, memory_order_acquire);
	uint64_t progress = atomic_load_explicit(&hand->progress, memory_order_acquire);
	uint64_t part = *(volatile uint64_t *)&hand->part;
	uint32_t done = (uint32_t)progress, staged = (uint32_t)(progress >> 32);
	const struct ledger_old *old;
	size_t size;

	*ret_stale = false;
	if (!taken)
		return 0;
	if (taken > LEDGER_RECORDS)
		return failure_set(failure, -EPROTO,
				   "the ledger is damaged: hand %u is in record %u", number,
				   taken - 1);
	old = old_of(ledger, taken - 1);
	if (!old || part < old->low ||
	    (part - old->low < LEDGER_AHEAD && old->done[ledger_word(part)] & ledger_bit(part)) ||
	    !progress) {
		hand_clear(ledger, number);
		return 0;
	}
	size = dtype_size(old->dtype);
	if (part - old->low >= LEDGER_AHEAD || done > ledger->part_bytes ||
	    staged > LEDGER_PIECE_BYTES || done % size || staged % size)
		return failure_set(failure, -EPROTO,
				   "the ledger is damaged: hand %u is at byte %u of part %" PRIu64
				   " of tensor %s, and has %u more",
				   number, done, part, old->tensor, staged);
	ledger->stale[ledger->n_stale++] = (struct ledger_stale){
		.hand = number,
		.record = taken - 1,
		.part = part,
		.done = done,
		.staged = staged,
	};
	*ret_stale = true;
	return 0;
}

int ledger_take_hands(struct ledger *ledger, struct failure *failure)
{
	unsigned n_own = 0;
	bool stale;
	int r;

	ledger->stale = calloc(ledger->n_hands, sizeof(ledger->stale[0]));
	if (!ledger->stale)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	for (uint32_t i = 0; i < ledger->n_hands; i++) {
		r = read_hand(ledger, i, &stale, failure);
		if (r)
			return r;
		if (!stale && n_own < ledger->n_threads)
			ledger->own[n_own++] = i;
	}
	if (n_own < ledger->n_threads)
		return failure_set(failure, -ECONNRESET,
				   "its ledger has %u hands, %zu of them full: too few for %u "
				   "sum_threads",
				   ledger->n_hands, ledger->n_stale, ledger->n_threads);
	return 0;
}

void ledger_drop_hands(struct ledger *ledger, uint32_t record)
{
	for (size_t i = ledger->n_stale; i--;) {
		if (ledger->stale[i].record != record)
			continue;
		hand_clear(ledger, ledger->stale[i].hand);
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
		.hand = NO_HAND,
		.number = number,
	};

	for (size_t i = 0; i < ledger->n_stale; i++) {
		struct ledger_stale stale = ledger->stale[i];

		if (stale.record != part.record || stale.part != number)
			continue;
		/* It stays in the list: should the part not be finished, it goes with the round. */
		if (part.hand != NO_HAND || stale.done > len || stale.staged > len - stale.done)
			return error_origin(-EPROTO);
		part.hand = stale.hand;
		part.done = stale.done;
		part.staged = stale.staged;
	}
	*ret_part = part;
	return 0;
}

void ledger_part_take(struct ledger_part *part, unsigned thread)
{
	struct ledger_hand *hand;

	if (part->hand != NO_HAND)
		return;
	assert(thread < part->ledger->n_threads);
	part->hand = part->ledger->own[thread];
	hand = ledger_hand(part->ledger, part->hand);
	hand->part = part->number;
	atomic_store_explicit(&hand->progress, 0, memory_order_relaxed);
	atomic_store_explicit(&hand->taken, part->record + 1, memory_order_release);
	FAILPOINT("ledger-hand-taken");
}

void *ledger_part_scratch(const struct ledger_part *part)
{
	const struct ledger *ledger = part->ledger;

	return ledger->memory->data + ledger_scratch_offset(ledger->n_hands) +
	       (size_t)part->hand * LEDGER_PIECE_BYTES;
}

static void publish(const struct ledger_part *part)
{
	atomic_store_explicit(&ledger_hand(part->ledger, part->hand)->progress,
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
	hand_clear(part->ledger, part->hand);
	part->hand = NO_HAND;
	FAILPOINT("ledger-hand-cleared");
}
