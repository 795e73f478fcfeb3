/* A search tree of the C library. Buffers in it lie apart, so any two are before or behind each other. */
#include "control/places.h"

#include "base/error.h"
#include <assert.h>
#include <search.h>

static int compare(const void *one, const void *other)
{
	const struct buffer *a = one, *b = other;

	if (a->data + a->len <= b->data)
		return -1;
	return a->data >= b->data + b->len;
}

int places_add(struct places *places, struct buffer *buffer)
{
	struct buffer *const *place = tsearch(buffer, &places->root, compare);

	if (!place)
		return error_origin(-ENOMEM);
	assert(*place == buffer);
	buffer->is_placed = true;
	return 0;
}

void places_remove(struct places *places, struct buffer *buffer)
{
	if (buffer->is_placed)
		(void)tdelete(buffer, &places->root, compare);
	buffer->is_placed = false;
}

struct buffer *places_find(const struct places *places, const void *page)
{
	struct buffer key = { .data = (char *)page, .len = 1 };
	struct buffer *const *place = tfind(&key, &places->root, compare);

	return place ? *place : NULL;
}
