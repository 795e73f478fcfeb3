/*
 * Buffers by where they are mapped: whose a page is. Found in steps as many as the logarithm of their number. Control thread only.
 */
#pragma once

#include "tensor/tensor.h"

struct places {
	void *root; /* of a tree of tsearch(3) */
};

/* A buffer that is mapped; to be removed before it is unmapped. Returns 0 or -ENOMEM. */
int places_add(struct places *places, struct buffer *buffer);
/* Harmless when the buffer is not there. */
void places_remove(struct places *places, struct buffer *buffer);
/* The buffer in which a page lies, or NULL. */
struct buffer *places_find(const struct places *places, const void *page);
