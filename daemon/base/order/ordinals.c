/*
 * The newest operations of ranks that submit them in one order, compared by their ordinals.
 * agent/ and server/ call.
 */
#include "base/order/ordinals.h"
#include <inttypes.h>

static void forget(struct ordinal *ordinal)
{
	held_free(ordinal->copy);
	held_free(ordinal->differing);
	*ordinal = (struct ordinal){ 0 };
}

void ordinals_done(struct ordinals *ordinals)
{
	for (size_t i = 0; ordinals->kept && i < ORDINALS_KEPT; i++)
		forget(&ordinals->kept[i]);
	ordinals->kept = held_free(ordinals->kept);
}

static int begin(struct ordinals *ordinals)
{
	if (!ordinals->kept)
		ordinals->kept =
			held_new(ordinals->quota, ORDINALS_KEPT * sizeof(ordinals->kept[0]));
	return ordinals->kept ? 0 : error_origin(-errno);
}

/* The place of an ordinal, which takes it from an older one; NULL: a newer one has it. */
static struct ordinal *place_of(const struct ordinals *ordinals, uint64_t number)
{
	struct ordinal *ordinal = &ordinals->kept[number % ORDINALS_KEPT];

	if (ordinal->number < number) {
		forget(ordinal);
		ordinal->number = number;
	}
	return ordinal->number == number ? ordinal : NULL;
}

static int set_first(const struct ordinals *ordinals, struct ordinal *ordinal,
		     const struct ordinal_operation *operation, bool copies)
{
	size_t size = strlen(operation->tensor) + 1;

	if (copies) {
		ordinal->copy = held_new(ordinals->quota, size);
		if (!ordinal->copy)
			return error_origin(-errno);
		memcpy(ordinal->copy, operation->tensor, size);
	}
	ordinal->first = *operation;
	if (copies)
		ordinal->first.tensor = ordinal->copy;
	return ordinal->differing ? ORDINALS_E_KNOWN : ORDINALS_E_FIRST;
}

static int set_differing(const struct ordinals *ordinals, struct ordinal *ordinal,
			 const struct failure *how)
{
	ordinal->differing = held_new(ordinals->quota, sizeof(*how));
	if (!ordinal->differing)
		return error_origin(-errno);
	*ordinal->differing = *how;
	return ORDINALS_E_DIFFER;
}

/* Long names are cut, so that both operations are in the text. */
static int describe(const struct ordinals *ordinals, struct ordinal *ordinal,
		    const struct ordinal_operation *operation)
{
	bool is_lower = operation->rank < ordinal->first.rank;
	const struct ordinal_operation *a = is_lower ? operation : &ordinal->first;
	const struct ordinal_operation *b = is_lower ? &ordinal->first : operation;
	struct failure how;

	(void)failure_set(
		&how, -EILSEQ,
		"ranks submit in different orders: as number %" PRIu64
		" rank %u submitted %.90s, round %" PRIu64 ", and rank %u %.90s, round %" PRIu64,
		ordinal->number, a->rank, a->tensor, a->round, b->rank, b->tensor, b->round);
	return set_differing(ordinals, ordinal, &how);
}

int ordinals_compare(struct ordinals *ordinals, uint64_t number,
		     const struct ordinal_operation *operation, bool copies)
{
	const struct ordinal_operation *first;
	struct ordinal *ordinal;
	int r;

	r = begin(ordinals);
	if (r)
		return error_trace(r);
	ordinal = place_of(ordinals, number);
	if (!ordinal)
		return 0;
	first = &ordinal->first;
	if (!first->tensor)
		return set_first(ordinals, ordinal, operation, copies);
	if (ordinal->differing)
		return ORDINALS_E_KNOWN;
	if (first->round != operation->round || strcmp(first->tensor, operation->tensor))
		return describe(ordinals, ordinal, operation);
	return first->rank == operation->rank ? ORDINALS_E_AGAIN : 0;
}

int ordinals_differ(struct ordinals *ordinals, uint64_t number, const struct failure *how)
{
	struct ordinal *ordinal;
	int r;

	r = begin(ordinals);
	if (r)
		return error_trace(r);
	ordinal = place_of(ordinals, number);
	return !ordinal || ordinal->differing ? ORDINALS_E_KNOWN
					      : set_differing(ordinals, ordinal, how);
}

/* What is known of an ordinal, or NULL. */
static struct ordinal *find(const struct ordinals *ordinals, uint64_t number)
{
	struct ordinal *ordinal = ordinals->kept ? &ordinals->kept[number % ORDINALS_KEPT] : NULL;

	return ordinal && ordinal->number == number ? ordinal : NULL;
}

const struct failure *ordinals_differing(const struct ordinals *ordinals, uint64_t number)
{
	const struct ordinal *ordinal = find(ordinals, number);

	return ordinal ? ordinal->differing : NULL;
}

const struct ordinal_operation *ordinals_first(const struct ordinals *ordinals, uint64_t number)
{
	const struct ordinal *ordinal = find(ordinals, number);

	return ordinal && ordinal->first.tensor ? &ordinal->first : NULL;
}

uint64_t *ordinals_notified_ns(struct ordinals *ordinals, uint64_t number)
{
	struct ordinal *ordinal = find(ordinals, number);

	return ordinal ? &ordinal->notified_ns : NULL;
}
