/* What holds for any protobuf message from outside. */
#pragma once

#include "fuzz.h"
#include "proto/pack.h"

/* Bytes that unpack do so to a message that packs, and whose packed form unpacks and packs to the same bytes again. */
static inline void fuzz_unpack(const ProtobufCMessageDescriptor *descriptor, const uint8_t *data,
			       size_t size)
{
	_cleanup_(unpack_freep) ProtobufCMessage *first = NULL;
	_cleanup_(unpack_freep) ProtobufCMessage *second = NULL;
	_cleanup_(freep) void *packed = NULL;
	_cleanup_(freep) void *again = NULL;
	size_t len, again_len;
	int r;

	r = unpack(descriptor, data, size, &first);
	FUZZ_CHECK(r == 0 || r == -EPROTO || r == -ENOMEM);
	if (r)
		return;
	FUZZ_CHECK(pack(first, SIZE_MAX, &packed, &len) == 0);
	/* May be refused only by the arena: merged fields are spelt out once, so the same message has fewer bytes. */
	r = unpack(descriptor, packed, len, &second);
	FUZZ_CHECK(r == 0 || (r == -EPROTO && len < size));
	if (r)
		return;
	FUZZ_CHECK(pack(second, SIZE_MAX, &again, &again_len) == 0);
	FUZZ_CHECK(len == again_len && !memcmp(packed, again, len));
}
