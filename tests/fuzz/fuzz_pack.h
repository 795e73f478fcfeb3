/* What holds for any protobuf message from outside. */
#pragma once

#include "fuzz.h"
#include "proto/pack.h"

/* Whether a message, or one inside it, has fields that its descriptor does not know. */
static inline bool fuzz_has_unknown(const ProtobufCMessage *message)
{
	const ProtobufCMessageDescriptor *descriptor = message->descriptor;

	if (message->n_unknown_fields)
		return true;
	for (unsigned i = 0; i < descriptor->n_fields; i++) {
		const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
		const char *at = (const char *)message + field->offset;
		const char *n = (const char *)message + field->quantifier_offset;

		if (field->type != PROTOBUF_C_TYPE_MESSAGE)
			continue;
		if (field->label == PROTOBUF_C_LABEL_REPEATED) {
			for (size_t k = 0; k < *(const size_t *)n; k++)
				if (fuzz_has_unknown((*(ProtobufCMessage * *const *)at)[k]))
					return true;
		} else if ((!(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
			    *(const uint32_t *)n == field->id) &&
			   *(ProtobufCMessage *const *)at &&
			   fuzz_has_unknown(*(ProtobufCMessage *const *)at)) {
			return true;
		}
	}
	return false;
}

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
	/*
	 * Unknown fields are never packed again by us, and protobuf-c does not give them back as they came: it takes a
	 * field with the number 0, in two bytes, and writes it in one, which it then refuses.
	 */
	if (fuzz_has_unknown(first))
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
