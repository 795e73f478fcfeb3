/*
 * Results that the daemon before has left: each is found by its part, settled when its round is over
 * here, or dropped where its round is done anew. They are in order from when the ledger is opened,
 * and keep their places when they are stale no more. Called by the agent.
 */
#include "ledger/internal.h"
#include <stdlib.h>

static int compare(const void *a, const void *b)
{
	const struct ledger_left *x = a, *y = b;

	if (x->key != y->key)
		return x->key < y->key ? -1 : 1;
	if (x->round != y->round)
		return x->round < y->round ? -1 : 1;
	if (x->block != y->block)
		return x->block < y->block ? -1 : 1;
	return (x->part > y->part) - (x->part < y->part);
}

int ledger_stale_init(struct ledger *ledger, uint32_t n_max)
{
	ledger->stale_results.left = malloc(MAX(n_max, 1u) * sizeof(struct ledger_left));
	return ledger->stale_results.left ? 0 : error_origin(-ENOMEM);
}

void ledger_stale_add(struct ledger *ledger, uint32_t result)
{
	struct ledger_kept *kept = ledger_result_kept(ledger, result);
	struct ledger_stale_results *stale = &ledger->stale_results;

	stale->left[stale->n++] = (struct ledger_left){
		.key = kept->what.key,
		.round = kept->what.round,
		.block = kept->what.block,
		.part = kept->what.part,
		.result = result,
	};
	stale->n_stale++;
	kept->stale = true;
}

uint32_t ledger_stale_sort(struct ledger *ledger)
{
	struct ledger_left *left = ledger->stale_results.left;
	uint32_t n = ledger->stale_results.n;

	qsort(left, n, sizeof(left[0]), compare);
	for (uint32_t i = 0; i < n; i++) {
		left[i].next = i;
		if (i && !compare(&left[i - 1], &left[i]))
			return left[i].result;
	}
	return LEDGER_NO_RESULT;
}

/* The place of the first that is not before this one. */
static uint32_t place_of(const struct ledger *ledger, const struct ledger_left *what)
{
	uint32_t first = 0, end = ledger->stale_results.n;

	while (first < end) {
		uint32_t middle = first + (end - first) / 2;

		if (compare(&ledger->stale_results.left[middle], what) < 0)
			first = middle + 1;
		else
			end = middle;
	}
	return first;
}

uint32_t ledger_result_find(const struct ledger *ledger, uint64_t key, uint64_t round,
			    uint32_t block, uint32_t part)
{
	const struct ledger_stale_results *stale = &ledger->stale_results;
	const struct ledger_left what = {
		.key = key, .round = round, .block = block, .part = part
	};
	uint32_t place;

	if (!stale->n_stale)
		return LEDGER_NO_RESULT;
	place = place_of(ledger, &what);
	if (place == stale->n || compare(&stale->left[place], &what) ||
	    !ledger_result_kept(ledger, stale->left[place].result)->stale)
		return LEDGER_NO_RESULT;
	return stale->left[place].result;
}

uint32_t ledger_result_settle(struct ledger *ledger, uint64_t key, uint64_t round)
{
	const struct ledger_stale_results *stale = &ledger->stale_results;
	struct ledger_left *first;
	uint32_t place;

	if (!stale->n_stale)
		return LEDGER_NO_RESULT;
	place = place_of(ledger, &(struct ledger_left){ .key = key });
	first = &stale->left[place];
	if (place == stale->n || first->key != key)
		return LEDGER_NO_RESULT;
	for (place = first->next;
	     place < stale->n && stale->left[place].key == key && stale->left[place].round <= round;
	     place++) {
		struct ledger_kept *kept = ledger_result_kept(ledger, stale->left[place].result);

		first->next = place + 1;
		if (kept->stale) {
			ledger_stale_end(ledger, kept);
			return stale->left[place].result;
		}
	}
	return LEDGER_NO_RESULT;
}

static bool is_same_round(const struct ledger_left *a, const struct ledger_left *b)
{
	return a->key == b->key && a->round == b->round;
}

/* Marks the first result of a round, if there is one. */
static void mark(const struct ledger *ledger, const struct ledger_old *old, uint64_t *marks)
{
	const struct ledger_known *known = ledger_tensor_find(ledger, old->tensor);
	struct ledger_left what = { .round = old->round };
	uint32_t place;

	if (!known)
		return;
	what.key = known->key;
	place = place_of(ledger, &what);
	if (place < ledger->stale_results.n &&
	    is_same_round(&ledger->stale_results.left[place], &what))
		marks[place / 64] |= ledger_bit(place);
}

void ledger_results_drop(struct ledger *ledger)
{
	const struct ledger_left *left = ledger->stale_results.left;
	uint64_t marks[LEDGER_RESULTS_MAX / 64] = { 0 };
	bool drops = false;

	/* Without a record, the round is over here. */
	for (size_t i = 0; i < ledger->n_old; i++)
		if ((uint32_t)ledger->old[i].stage == LEDGER_GATHERS)
			mark(ledger, &ledger->old[i], marks);
	for (uint32_t i = 0; i < ledger->stale_results.n; i++) {
		const struct ledger_kept *kept = ledger_result_kept(ledger, left[i].result);

		if (!i || !is_same_round(&left[i - 1], &left[i]))
			drops = marks[i / 64] & ledger_bit(i);
		if (drops && kept->stale && kept->what.reduction)
			ledger_result_free(ledger, left[i].result);
	}
}
