/*
 * Cuts large pieces of memory into objects. Owners of tensors, rounds, slots and requests take
 * from here and keep their own free lists.
 */
#include "base/memory/bulk.h"

#include "base/memory/poison.h"
#include "base/memory/unmap.h"
#include "base/pages.h"
#include "proto/c.h"
#include <stdlib.h>

/*
 * In small pages, of which those cost nothing that are not touched: a job of a few hundred tensors
 * needs no huge ones.
 */
#define PIECE_FIRST ((size_t)512 << 10)
#define PIECE	    HUGE_PAGE

/* What is written beyond an end meets poison. */
#define GAP (POISON_IS_SEEN ? (size_t)CACHE_LINE : 0)

/* Charged at a time: who takes many small things does not come to the quota for each. */
#define CHARGE ((uint64_t)16 << 10)

struct bulk_piece {
	struct bulk_piece *next;
	size_t len;
} _cache_aligned_;

/* The sanitizer looks for pointers in what malloc() gives. */
static struct bulk_piece *piece_new(size_t len)
{
	struct bulk_piece *piece = POISON_IS_SEEN ? aligned_alloc(CACHE_LINE, len) : pages_map(len);

	if (!piece)
		return NULL;
	if (POISON_IS_SEEN)
		memset(piece, 0, len);
	piece->len = len;
	poison(piece + 1, len - sizeof(*piece));
	return piece;
}

/* What an owner had may be hundreds of pieces: to unmap them all keeps the control thread for milliseconds. */
static void piece_free(struct bulk_piece *piece)
{
	unpoison(piece, piece->len);
	if (POISON_IS_SEEN)
		free(piece);
	else
		unmap(piece, piece->len);
}

static int bulk_charge(struct bulk *bulk, size_t size)
{
	uint64_t more;

	if (likely(bulk->used + size <= bulk->charged))
		return 0;
	more = align_up(bulk->used + size - bulk->charged, CHARGE);
	if (quota_charge(bulk->quota, more))
		return QUOTA_E_FULL;
	bulk->charged += more;
	return 0;
}

void *bulk_take(struct bulk *bulk, size_t len)
{
	size_t size = align_up(len, (size_t)CACHE_LINE) + GAP;
	struct bulk_piece *piece;
	void *data;

	if (bulk_charge(bulk, size)) {
		errno = EDQUOT;
		return NULL;
	}
	if (bulk->remaining < size) {
		piece = piece_new(MAX(bulk->pieces ? PIECE : PIECE_FIRST,
				      align_up(sizeof(*piece) + size, (size_t)4096)));
		if (!piece) {
			errno = ENOMEM;
			return NULL;
		}
		piece->next = bulk->pieces;
		bulk->pieces = piece;
		bulk->next = (char *)(piece + 1);
		bulk->remaining = piece->len - sizeof(*piece);
	}
	data = bulk->next;
	bulk->next += size;
	bulk->remaining -= size;
	bulk->used += size;
	unpoison(data, len);
	return data;
}

void bulk_done(struct bulk *bulk)
{
	struct bulk_piece *piece;

	while ((piece = bulk->pieces)) {
		bulk->pieces = piece->next;
		piece_free(piece);
	}
	quota_release(bulk->quota, bulk->charged);
	*bulk = (struct bulk){ .quota = bulk->quota };
}
