/*
 * Protobuf through an arena: a message from outside is unpacked into a few chunks of bounded
 * size and freed whole. Every module that speaks protobuf calls here.
 */
#include "proto/pack.h"

#define ARENA_ALIGN 16

struct chunk {
	struct chunk *next;
	uint64_t pad; /* keeps what follows aligned */
};
static_assert(sizeof(struct chunk) % ARENA_ALIGN == 0, "chunks start aligned");

/*
 * Lies at the start of its first chunk, right before the message itself: that is what protobuf-c
 * allocates first, and it lets unpack_free() find the arena with nothing but the message. Nothing
 * is freed before the whole is; what protobuf-c allocates for itself while it parses counts towards
 * the limit too.
 */
struct arena {
	struct chunk *chunks; /* all but the first */
	char *at;
	size_t remaining; /* bytes at `at` */
	size_t limit;	  /* bytes that may still be taken */
	size_t grow;	  /* bytes of the next chunk */
	bool out_of_memory;
} __attribute__((__aligned__(ARENA_ALIGN)));

static void *arena_alloc(void *data, size_t size)
{
	struct arena *arena = data;
	char *p;

	if (size > arena->limit)
		return NULL;
	size = align_up(size, ARENA_ALIGN);
	if (size > arena->remaining) {
		size_t chunk_len = MAX(size, arena->grow);
		struct chunk *chunk = malloc(sizeof(*chunk) + chunk_len);

		if (!chunk) {
			arena->out_of_memory = true;
			return NULL;
		}
		chunk->next = arena->chunks;
		arena->chunks = chunk;
		arena->at = (char *)(chunk + 1);
		arena->remaining = chunk_len;
		arena->grow *= 2;
	}

	p = arena->at;
	arena->at += size;
	arena->remaining -= size;
	arena->limit -= MIN(size, arena->limit);
	return p;
}

static void arena_release(void *data, void *p)
{
	(void)data;
	(void)p;
}

static struct arena *arena_free(struct arena *arena)
{
	struct chunk *next;

	if (!arena)
		return NULL;
	for (struct chunk *chunk = arena->chunks; chunk; chunk = next) {
		next = chunk->next;
		free(chunk);
	}
	free(arena);
	return NULL;
}
DEFINE_CLEANUP(struct arena *, arena_free)

static int arena_new(size_t first, size_t limit, struct arena **ret_arena)
{
	struct arena *arena;

	first = align_up(first, ARENA_ALIGN);
	arena = malloc(sizeof(*arena) + first);
	if (!arena)
		return -ENOMEM;
	*arena = (struct arena){
		.at = (char *)(arena + 1),
		.remaining = first,
		.limit = limit,
		.grow = first,
	};
	*ret_arena = arena;
	return 0;
}

static bool take_varint(const uint8_t **at, const uint8_t *end, uint64_t *ret)
{
	*ret = 0;
	for (unsigned shift = 0; *at < end && shift < 64; shift += 7) {
		uint8_t byte = *(*at)++;

		*ret |= (uint64_t)(byte & 0x7f) << shift;
		if (!(byte & 0x80))
			return true;
	}
	return false;
}

/* Goes behind a field. Returns false when there is none. */
static bool take_field(const uint8_t **at, const uint8_t *end)
{
	uint64_t tag, len;

	if (!take_varint(at, end, &tag))
		return false;
	switch (tag & 7) {
	case PROTOBUF_C_WIRE_TYPE_VARINT:
		return take_varint(at, end, &len);
	case PROTOBUF_C_WIRE_TYPE_64BIT:
		len = 8;
		break;
	case PROTOBUF_C_WIRE_TYPE_32BIT:
		len = 4;
		break;
	case PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED:
		if (!take_varint(at, end, &len))
			return false;
		break;
	default:
		return false;
	}
	if (len > (uint64_t)(end - *at))
		return false;
	*at += len;
	return true;
}

bool pack_has_at_most(const void *data, size_t len, size_t max)
{
	const uint8_t *at = data, *end = len ? at + len : at;
	size_t n = 0;

	while (n <= max && at < end && take_field(&at, end))
		n++;
	return n <= max;
}

/* Takes a field's tag alone. Returns the field, or NULL, and how it is written. */
static const ProtobufCFieldDescriptor *take_tag(const ProtobufCMessageDescriptor *descriptor,
						const uint8_t **at, const uint8_t *end,
						unsigned *ret_wire)
{
	uint64_t tag;

	*ret_wire = UINT_MAX;
	if (!take_varint(at, end, &tag) || tag >> 3 > UINT_MAX)
		return NULL;
	*ret_wire = tag & 7;
	return protobuf_c_message_descriptor_get_field(descriptor, (unsigned)(tag >> 3));
}

/*
 * Whether fields come as often as they may, inside of fields too: what we write has no more, and others would have us take
 * one apart for each two bytes. Bytes that are no message pass: they are refused where they are unpacked.
 */
static bool is_lean(const ProtobufCMessageDescriptor *descriptor, const uint8_t *at,
		    const uint8_t *end)
{
	uint64_t seen = 0, max_unknown = PACK_UNKNOWN_MAX + (uint64_t)(end - at) / 16,
		 n_unknown = 0;
	unsigned wire;

	assert(descriptor->n_fields <= 64);
	while (at < end) {
		const uint8_t *value = at;
		const ProtobufCFieldDescriptor *field = take_tag(descriptor, &value, end, &wire);
		uint64_t bit, len;

		if (!take_field(&at, end))
			return true;
		if (!field) {
			if (++n_unknown > max_unknown)
				return false;
			continue;
		}
		bit = UINT64_C(1) << (field - descriptor->fields);
		/* Numbers of a repeated field come in one piece. */
		if (seen & bit && (field->label != PROTOBUF_C_LABEL_REPEATED ||
				   field->flags & PROTOBUF_C_FIELD_FLAG_PACKED))
			return false;
		seen |= bit;
		if (field->type == PROTOBUF_C_TYPE_MESSAGE &&
		    wire == PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED && take_varint(&value, at, &len) &&
		    !is_lean(field->descriptor, value, at))
			return false;
	}
	return true;
}

int unpack(const ProtobufCMessageDescriptor *descriptor, const void *data, size_t len,
	   ProtobufCMessage **ret_message)
{
	_cleanup_(arena_freep) struct arena *arena = NULL;
	ProtobufCAllocator allocator = { .alloc = arena_alloc, .free = arena_release };
	ProtobufCMessage *message;
	size_t limit;
	int r;

	if (MUL_OVERFLOW(len, (size_t)PACK_ARENA_FACTOR, &limit) ||
	    ADD_OVERFLOW(limit, (size_t)PACK_ARENA_FLOOR, &limit))
		return -EPROTO;
	if (len && !is_lean(descriptor, data, (const uint8_t *)data + len))
		return -EPROTO;
	/* Most messages then need this one malloc; those with many small fields a few more. */
	r = arena_new(descriptor->sizeof_message + 2 * len + 256, limit, &arena);
	if (r)
		return r;

	allocator.allocator_data = arena;
	message = protobuf_c_message_unpack(descriptor, &allocator, len, data);
	if (!message)
		return arena->out_of_memory ? -ENOMEM : -EPROTO;

	assert((void *)message == (void *)(arena + 1));
	(void)TAKE_PTR(arena);
	*ret_message = message;
	return 0;
}

ProtobufCMessage *unpack_free(ProtobufCMessage *message)
{
	if (message)
		(void)arena_free((struct arena *)message - 1);
	return NULL;
}

int pack(const ProtobufCMessage *message, size_t max, void **ret_data, size_t *ret_len)
{
	size_t len = protobuf_c_message_get_packed_size(message);
	void *data;

	if (len > max)
		return -EMSGSIZE;
	data = malloc(MAX(len, (size_t)1));
	if (!data)
		return -ENOMEM;
	*ret_len = protobuf_c_message_pack(message, data);
	*ret_data = data;
	return 0;
}
