/*
 * Protobuf in and out, with limits. Unpacked messages live in one arena and are freed whole; the only
 * protobuf_c_message_unpack of the project. No message of ours is recursive (protobuf-c has no depth limit).
 * Any thread.
 */
#pragma once

#include "proto/c.h"
#include <protobuf-c/protobuf-c.h>

/* Arena limit as a multiple of the packed size, plus a floor: an honest message never needs more. */
#define PACK_ARENA_FACTOR 64
#define PACK_ARENA_FLOOR  4096
/* Fields of a message that a later version may have, and this one does not know; besides one for each 16 bytes. */
#define PACK_UNKNOWN_MAX 64

/*
 * Unpacks len bytes. Returns 0 and a message to be released with unpack_free(); -EPROTO when the bytes are not such a
 * message, a required field is missing, one that comes once comes again, too many are not known, or it would need more memory
 * than its size justifies; -ENOMEM.
 */
int unpack(const ProtobufCMessageDescriptor *descriptor, const void *data, size_t len,
	   ProtobufCMessage **ret_message);
ProtobufCMessage *unpack_free(ProtobufCMessage *message);
/*
 * Whether a message has at most max fields, those inside of its fields not counted: for what is refused with more, before each
 * is unpacked. Bytes that are no message have as many as came before the first that is wrong.
 */
bool pack_has_at_most(const void *data, size_t len, size_t max);

/* For _cleanup_ on a pointer to any unpacked message, of its own type or of ProtobufCMessage. */
static inline void unpack_freep(void *pp)
{
	int saved = errno;

	*(ProtobufCMessage **)pp = unpack_free(*(ProtobufCMessage **)pp);
	errno = saved;
}

/* Packs into newly allocated memory (free() it). Returns 0, -EMSGSIZE over max bytes, or -ENOMEM. */
int pack(const ProtobufCMessage *message, size_t max, void **ret_data, size_t *ret_len);
