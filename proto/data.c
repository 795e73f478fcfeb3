/*
 * Byte order and checks of everything in data.h, the merging of what nodes know of lost and
 * added servers, and small messages packed as one. transport/ decodes and checks what comes in,
 * agent and server compare and merge. Pure functions; any thread.
 */
#include "proto/data.h"
#include "proto/text.h"
#include <endian.h>

#define SWAP16(field) ((field) = __builtin_bswap16(field))
#define SWAP32(field) ((field) = __builtin_bswap32(field))
#define SWAP64(field) ((field) = __builtin_bswap64(field))

/* The same both ways. */
static void header_swap(struct data_header *header)
{
	SWAP32(header->magic);
	SWAP16(header->flags);
	SWAP32(header->len);
	SWAP32(header->cookie);
	SWAP64(header->job);
	SWAP64(header->key);
	SWAP64(header->round);
	SWAP32(header->epoch);
	SWAP32(header->node);
	SWAP32(header->block);
	SWAP32(header->part);
	header->status = (int32_t)__builtin_bswap32((uint32_t)header->status);
	SWAP64(header->offset);
	SWAP64(header->total);
	SWAP32(header->part_len);
	SWAP32(header->root);
	header->priority = (int32_t)__builtin_bswap32((uint32_t)header->priority);
	SWAP32(header->moved);
}

static void hello_swap(struct data_hello *hello)
{
	SWAP32(hello->magic);
	SWAP16(hello->lane);
	SWAP64(hello->features);
	SWAP64(hello->sender);
}

void data_header_encode(struct data_header *header)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		header_swap(header);
}

void data_header_decode(struct data_header *header)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		header_swap(header);
}

void data_hello_encode(struct data_hello *hello)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		hello_swap(hello);
}

void data_hello_decode(struct data_hello *hello)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		hello_swap(hello);
}

#define PACKED_FLAGS (DATA_FLAG_AGAIN | DATA_FLAG_KEPT)

bool data_may_pack(const struct data_header *h)
{
	return (h->op == DATA_PUSH || h->op == DATA_RESULT) && h->len <= DATA_PACKED_MAX &&
	       !(h->flags & ~PACKED_FLAGS) && !h->block && !h->part && !h->offset &&
	       h->total == h->part_len;
}

bool data_packs_with(const struct data_header *a, const struct data_header *b)
{
	return data_may_pack(b) && a->op == b->op && a->job == b->job && a->epoch == b->epoch &&
	       a->node == b->node;
}

void data_pack_header(const struct data_header *first, uint32_t n, uint32_t len,
		      struct data_header *ret_header)
{
	*ret_header = (struct data_header){
		.magic = first->magic,
		.version = first->version,
		.op = DATA_PACK,
		.len = n * (uint32_t)sizeof(struct data_packed) + len,
		.job = first->job,
		.epoch = first->epoch,
		.node = first->node,
		.block = first->op,
		.part = n,
	};
}

void data_pack(const struct data_header *h, struct data_packed *ret_packed)
{
	*ret_packed = (struct data_packed){
		.cookie = htole32(h->cookie),
		.len = htole16((uint16_t)h->len),
		.flags = htole16(h->flags),
		.key = htole64(h->key),
		.round = htole64(h->round),
		.part_len = htole32(h->part_len),
		.root = htole32(h->root),
		.status = (int32_t)htole32((uint32_t)h->status),
		.priority = (int32_t)htole32((uint32_t)h->priority),
		.dtype = h->dtype,
		.operation = h->operation,
		.reduction = h->reduction,
	};
}

/* Field by field, each straight to its place: a copy of what was just stored in pieces would wait for it. */
void data_unpack(const struct data_header *restrict pack, const struct data_packed *restrict packed,
		 struct data_header *restrict ret_header)
{
	ret_header->magic = pack->magic;
	ret_header->version = pack->version;
	ret_header->op = (uint8_t)pack->block;
	ret_header->flags = le16toh(packed->flags);
	ret_header->len = le16toh(packed->len);
	ret_header->cookie = le32toh(packed->cookie);
	ret_header->job = pack->job;
	ret_header->key = le64toh(packed->key);
	ret_header->round = le64toh(packed->round);
	ret_header->epoch = pack->epoch;
	ret_header->node = pack->node;
	ret_header->block = ret_header->part = 0;
	ret_header->dtype = packed->dtype;
	ret_header->operation = packed->operation;
	ret_header->reduction = packed->reduction;
	ret_header->pad = 0;
	ret_header->status = (int32_t)le32toh((uint32_t)packed->status);
	ret_header->offset = 0;
	ret_header->total = ret_header->part_len = le32toh(packed->part_len);
	ret_header->root = le32toh(packed->root);
	ret_header->priority = (int32_t)le32toh((uint32_t)packed->priority);
	ret_header->moved = 0;
}

bool data_packed_fit(const struct data_header *pack, const struct data_packed *packed)
{
	static const uint8_t zeros[sizeof(packed->pad)];
	uint32_t left = pack->len - pack->part * (uint32_t)sizeof(*packed);

	for (uint32_t i = 0; i < pack->part; i++) {
		uint16_t len = le16toh(packed[i].len);

		if (len > DATA_PACKED_MAX || len > left ||
		    memcmp(packed[i].pad, zeros, sizeof(zeros)) ||
		    (le16toh(packed[i].flags) & ~PACKED_FLAGS))
			return false;
		left -= len;
	}
	return !left;
}

void data_rdma_swap(struct data_rdma *head)
{
	if (BYTE_ORDER != BIG_ENDIAN)
		return;
	SWAP16(head->credits);
	SWAP32(head->cookie);
	SWAP64(head->address);
	SWAP32(head->key);
	SWAP32(head->len);
	SWAP32(head->place);
}

void data_rdma_offer_swap(struct data_rdma_offer *offer)
{
	if (BYTE_ORDER != BIG_ENDIAN)
		return;
	SWAP32(offer->n_rails);
	for (size_t i = 0; i < ARRAY_SIZE(offer->rails); i++) {
		SWAP16(offer->rails[i].port);
		SWAP16(offer->rails[i].mtu);
	}
}

void data_rdma_hello_swap(struct data_rdma_hello *hello)
{
	if (BYTE_ORDER != BIG_ENDIAN)
		return;
	SWAP32(hello->magic);
	SWAP16(hello->receives);
	SWAP64(hello->sender);
	SWAP16(hello->group);
	SWAP16(hello->mtu);
}

uint32_t data_added_find(const struct data_added_set *set, const char *name, const char *address)
{
	for (uint32_t i = 0; i < set->n; i++)
		if (!strcmp(set->servers[i].name, name) &&
		    !strcmp(set->servers[i].address, address))
			return i;
	return set->n;
}

/* A text that may be shown, and fills its place up with NUL. */
static bool text_valid(const char *text, size_t size)
{
	size_t len = strnlen(text, size);

	if (!len || len == size || !text_is_plain(text, len))
		return false;
	for (size_t i = len; i < size; i++)
		if (text[i])
			return false;
	return true;
}

bool data_added_valid(const struct data_added *added)
{
	return text_valid(added->name, sizeof(added->name)) &&
	       text_valid(added->address, sizeof(added->address)) &&
	       added->moves <= DATA_MOVES_OFTEN;
}

bool data_added_set_valid(const struct data_added_set *set)
{
	if (set->n > DATA_ADDED_MAX)
		return false;
	for (uint32_t i = 0; i < set->n; i++)
		if (!data_added_valid(&set->servers[i]) ||
		    data_added_find(set, set->servers[i].name, set->servers[i].address) != i)
			return false;
	return true;
}

/* Whether a knows of something that b does not. */
static bool knows_more(const struct data_added_set *a, const struct data_added_set *b)
{
	for (uint32_t i = 0; i < a->n; i++) {
		const struct data_added *server = &a->servers[i];
		uint32_t at = data_added_find(b, server->name, server->address);

		if (at == b->n || server->moves > b->servers[at].moves)
			return true;
	}
	return false;
}

void data_added_compare(const struct data_added_set *a, const struct data_added_set *b, bool *more,
			bool *less)
{
	*more |= knows_more(b, a);
	*less |= knows_more(a, b);
}

/* FNV-1a, with the NUL. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
	do
		hash = (hash ^ (uint8_t)*text) * 0x100000001b3;
	while (*text++);
	return hash;
}

uint32_t data_moves_epoch(uint32_t epoch, const uint32_t *moves, size_t n,
			  const struct data_added_set *added)
{
	uint64_t digest = 0;

	for (size_t i = 0; i < n; i++)
		digest += moves[i] * ((2 * (uint64_t)i + 1) * 0x9e3779b97f4a7c15 | 1);
	/* Each counts them in an order of its own. */
	for (size_t i = 0; added && i < added->n; i++) {
		const struct data_added *server = &added->servers[i];
		uint64_t hash =
			hash_text(hash_text(0xcbf29ce484222325, server->name), server->address);

		digest += (server->moves + UINT64_C(1)) * (hash | 1);
	}
	return epoch ^ (uint32_t)(digest >> 32) ^ (uint32_t)digest;
}

bool data_moves_valid(uint32_t moves, bool of_rank)
{
	return of_rank ? !moves || moves == DATA_MOVES_LOST || moves == DATA_MOVES_LEFT
		       : moves <= DATA_MOVES_OFTEN;
}

static bool added_unite(struct data_added_set *added, const struct data_added_set *from)
{
	bool more = false;

	for (uint32_t i = 0; i < from->n; i++) {
		const struct data_added *server = &from->servers[i];
		uint32_t at = data_added_find(added, server->name, server->address);

		if (at == DATA_ADDED_MAX || server->moves > DATA_MOVES_OFTEN ||
		    (at < added->n && added->servers[at].moves >= server->moves))
			continue;
		if (at == added->n)
			added->servers[added->n++] = *server;
		added->servers[at].moves = server->moves;
		more = true;
	}
	return more;
}

bool data_moves_unite(uint32_t *moves, const uint32_t *from, size_t n, size_t n_servers,
		      struct data_added_set *added, const struct data_added_set *from_added)
{
	bool more = false, any = false;

	for (size_t i = 0; i < n; i++) {
		if (from[i] > moves[i] && data_moves_valid(from[i], i >= n_servers)) {
			moves[i] = from[i];
			more = true;
		}
		any |= i < n_servers && !(moves[i] & 1);
	}
	if (from_added)
		more |= added_unite(added, from_added);
	for (uint32_t i = 0; added && i < added->n; i++)
		any |= !(added->servers[i].moves & 1);
	/* Two sides of a network that was cut may each have gone on without the other's. */
	for (size_t i = 0; i < n_servers && !any; i++)
		moves[i]++;
	for (uint32_t i = 0; added && i < added->n && !any; i++)
		added->servers[i].moves++;
	return more || (n_servers && !any);
}

static void added_swap(struct data_added *added, size_t n)
{
	for (size_t i = 0; i < n && BYTE_ORDER == BIG_ENDIAN; i++) {
		SWAP32(added[i].bandwidth_mbps);
		SWAP32(added[i].moves);
	}
}

void data_moves_encode(void *payload, const uint32_t *moves, size_t n,
		       const struct data_added_set *added)
{
	uint32_t *numbers = payload;
	struct data_added *servers = (struct data_added *)(numbers + n);

	memcpy(numbers, moves, n * sizeof(numbers[0]));
	data_moves_swap(numbers, n);
	memcpy(servers, added->servers, added->n * sizeof(servers[0]));
	added_swap(servers, added->n);
}

bool data_moves_decode(const struct data_header *header, const void *payload, uint32_t *moves,
		       struct data_added_set *added)
{
	size_t n = data_moves_n(header);

	memcpy(moves, payload, n * sizeof(moves[0]));
	data_moves_swap(moves, n);
	*added = (struct data_added_set){ .n = header->part };
	memcpy(added->servers, (const uint32_t *)payload + n, added->n * sizeof(added->servers[0]));
	added_swap(added->servers, added->n);
	return data_added_set_valid(added);
}

void data_moves_swap(uint32_t *moves, size_t n)
{
	for (size_t i = 0; i < n && BYTE_ORDER == BIG_ENDIAN; i++)
		SWAP32(moves[i]);
}

void data_contributors_swap(struct data_contributors *contributors, uint32_t n_nodes)
{
	if (BYTE_ORDER != BIG_ENDIAN)
		return;
	SWAP64(contributors->n);
	SWAP64(contributors->round);
	for (uint32_t i = 0; i < n_nodes; i++)
		SWAP64(contributors->nodes[i]);
}

uint32_t data_blocked_pack(const char *tensor, const char *missed, char *ret_payload)
{
	size_t len = strlen(tensor);

	memcpy(ret_payload, tensor, len);
	if (!missed)
		return (uint32_t)len;
	ret_payload[len++] = 0;
	memcpy(ret_payload + len, missed, strlen(missed));
	return (uint32_t)(len + strlen(missed));
}

bool data_blocked_unpack(const struct data_header *header, const char *payload,
			 char ret_names[2][TENSOR_NAME_MAX + 1])
{
	const char *end = header->missed_round ? memchr(payload, 0, header->len) : NULL;
	size_t len = end ? (size_t)(end - payload) : header->len;

	ret_names[1][0] = 0;
	if (!text_take_name(payload, len, ret_names[0], TENSOR_NAME_MAX + 1))
		return false;
	return !header->missed_round || (end && text_take_name(end + 1, header->len - len - 1,
							       ret_names[1], TENSOR_NAME_MAX + 1));
}

bool data_has_contributors(const struct stragglers *stragglers, unsigned operation,
			   uint32_t part_len)
{
	if (operation == OPERATION_ACCUMULATE)
		return stragglers->async;
	return stragglers->quorum && operation == OPERATION_PUSH_PULL && part_len;
}

/* A result with data_contributors; whether it is one, who knows the job looks. */
static bool may_have_contributors(const struct data_header *h)
{
	return (h->op == DATA_RESULT || h->op == DATA_OFFER) &&
	       (h->operation == OPERATION_PUSH_PULL || h->operation == OPERATION_ACCUMULATE) &&
	       h->len >= data_contributors_end(h->part_len, 1) &&
	       h->len <= data_contributors_at(h->part_len) + DATA_CONTRIBUTORS_MAX;
}

static bool operation_reduces(unsigned operation)
{
	return operation == OPERATION_PUSH_PULL || operation == OPERATION_REDUCE_SCATTER ||
	       operation == OPERATION_PUSH_PULL_ROWS || operation == OPERATION_ACCUMULATE;
}

/*
 * What a contribution must say beyond what a result must: a server plans by it, an agent knows it
 * already.
 */
static const char *check_push(const struct data_header *h)
{
	size_t size = dtype_size(h->dtype);

	if (!h->key || !h->round)
		return "a contribution without key or round";
	if (!h->operation)
		return "no such operation";
	if (operation_reduces(h->operation) != (h->reduction != 0))
		return "the reduction does not fit the operation";
	if (h->reduction == REDUCTION_AVERAGE && h->dtype == DTYPE_BOOL)
		return "bool has no average";
	if (data_scale(h->reduction) > 1 &&
	    (data_reduction(h->reduction) != REDUCTION_AVERAGE || h->dtype != DTYPE_FLOAT16 ||
	     data_scale(h->reduction) > JOB_RANKS_MAX))
		return "a scale of something else than an average of float16";
	if (h->operation == OPERATION_ACCUMULATE && h->reduction != REDUCTION_SUM)
		return "an accumulation that is no sum";
	if (h->operation == OPERATION_BARRIER)
		return h->total ? "a barrier with data" : NULL;
	if (!size)
		return "no such element type";
	if (h->part_len % size || h->offset % size || h->total % size)
		return "a part that is not whole elements";
	return NULL;
}

/* PUSH, PULL, OFFER and RESULT. */
static const char *check_part(const struct data_header *h)
{
	if (h->dtype > DTYPE_MAX_)
		return "no such element type";
	if (h->operation > OPERATION_MAX_)
		return "no such operation";
	if (data_reduction(h->reduction) > REDUCTION_MAX_)
		return "no such reduction";
	if (h->part_len > PART_BYTES_MAX)
		return "the part is too long";
	if (h->offset > h->total || h->part_len > h->total - h->offset)
		return "the part does not lie within its block";
	if (h->len && h->len != h->part_len && !may_have_contributors(h))
		return "the payload is not the part";
	if (h->op == DATA_PULL && (h->len || h->operation != OPERATION_PUSH_PULL_ROWS))
		return "a pull of what is no result by rows";
	if (h->op == DATA_OFFER && h->operation == OPERATION_PUSH_PULL_ROWS &&
	    h->block != DATA_ROWS_DONE)
		return "an offer of a result by rows";
	if (data_is_done(h) && (h->len || h->total))
		return "rows where none belong";
	return h->op == DATA_RESULT ? NULL : check_push(h);
}

/* ERROR, FAIL_ROUND and FAIL_JOB; ORDINAL with a status. */
static const char *check_failure(const struct data_header *h)
{
	if (h->status <= 0)
		return "a failure without status";
	if (h->len > ERROR_TEXT_MAX)
		return "the text is too long";
	if (h->op == DATA_FAIL_ROUND && (!h->key || !h->round))
		return "a failed round without key or round";
	return NULL;
}

static const char *check_ordinal(const struct data_header *h)
{
	if (!h->ordinal)
		return "an operation without ordinal";
	if (h->status)
		return check_failure(h);
	if (!h->tensor_round || !h->len || h->len > TENSOR_NAME_MAX)
		return "an operation without round or tensor";
	return NULL;
}

static const char *check_follow(const struct data_header *h)
{
	if (h->n_idle > h->n_following || h->turn == UINT64_MAX)
		return "no number of ranks that follow, or of their turn";
	return h->status || h->len ? check_failure(h) : NULL;
}

static const char *check_begun(const struct data_header *h)
{
	if (!h->first_round || h->tensor_round < h->first_round || !h->len ||
	    h->len > TENSOR_NAME_MAX)
		return "an operation without round or tensor";
	if (!dtype_size(h->dtype) || h->operation > OPERATION_MAX_ || h->reduction > REDUCTION_MAX_)
		return "no such element type, operation or reduction";
	return NULL;
}

static const char *check_blocked(const struct data_header *h)
{
	if (!h->tensor_round || !h->len ||
	    h->len > (h->missed_round ? DATA_BLOCKED_MAX : TENSOR_NAME_MAX))
		return "an operation without round or tensor";
	if (h->status && (h->status != EDEADLK || !h->missed_round))
		return "no ranks that wait for one another";
	return NULL;
}

static const char *check_moves(const struct data_header *h)
{
	size_t added = h->part * sizeof(struct data_added);

	if (h->part > DATA_ADDED_MAX || h->len <= added || h->len % sizeof(uint32_t) ||
	    h->len - added > DATA_MOVES_MAX * sizeof(uint32_t))
		return "no list of servers";
	return NULL;
}

/* What it holds is looked at when it is here. */
static const char *check_pack(const struct data_header *h)
{
	if (h->block != DATA_PUSH && h->block != DATA_RESULT)
		return "a pack of what is not packed";
	if (h->part < 2 || h->part > DATA_PACK_MAX)
		return "a pack of too few messages, or too many";
	if (h->len < h->part * sizeof(struct data_packed) ||
	    h->len > h->part * sizeof(struct data_packed) + DATA_PACKED_LEN)
		return "a pack of another length than its messages have";
	return NULL;
}

static const char *check_body(const struct data_header *h)
{
	switch (h->op) {
	case DATA_JOIN:
	case DATA_ATTACH:
	case DATA_DECLARE:
	case DATA_OK:
		return h->len > DATA_SETUP_MAX ? "the set-up message is too long" : NULL;
	case DATA_PUSH:
	case DATA_PULL:
	case DATA_OFFER:
	case DATA_RESULT:
		return check_part(h);
	case DATA_ERROR:
	case DATA_FAIL_ROUND:
	case DATA_FAIL_JOB:
		return check_failure(h);
	case DATA_DRAIN:
	case DATA_LEAVE:
	case DATA_LEFT:
	case DATA_PING:
	case DATA_PONG:
	case DATA_ACK:
	case DATA_RELEASE:
	case DATA_OFFERED:
	case DATA_NEWCOMERS:
	case DATA_STOPPING:
	case DATA_IDLE:
	case DATA_NAMED:
		return h->len ? "a payload where none belongs" : NULL;
	case DATA_HAVE:
		return h->len || !h->key || !h->round ? "no result by rows that a node may have"
						      : NULL;
	case DATA_FORGET:
	case DATA_KEEP:
		return h->len || !h->key ? "no tensor that may be forgotten" : NULL;
	case DATA_UNUSED:
		return !h->key || !h->len || h->len > TENSOR_NAME_MAX ? "no tensor's name" : NULL;
	case DATA_ORDINAL:
		return check_ordinal(h);
	case DATA_FOLLOW:
		return check_follow(h);
	case DATA_OTHERS_FOLLOW:
		return h->status || h->len ? check_failure(h) : NULL;
	case DATA_BEGUN:
	case DATA_OTHERS_BEGUN:
		return check_begun(h);
	case DATA_BLOCKED:
		return check_blocked(h);
	case DATA_MOVE:
		return check_moves(h);
	case DATA_PACK:
		return check_pack(h);
	case DATA_RDMA:
		return h->len && h->len != sizeof(struct data_rdma_offer)
			       ? "an offer of another length"
			       : NULL;
	default:
		return "no such message";
	}
}

static bool flags_valid(const struct data_header *h)
{
	unsigned again = h->op == DATA_PUSH ? DATA_FLAG_AGAIN : 0;
	unsigned flags = h->flags & (DATA_FLAG_MOVED | DATA_FLAG_ARRIVED);

	if (!(h->flags & ~again) || (h->op == DATA_RESULT && h->flags == DATA_FLAG_KEPT))
		return !h->moved;
	if ((h->op != DATA_PUSH && h->op != DATA_PULL) ||
	    (h->flags & (DATA_FLAG_KEPT | (DATA_FLAG_AGAIN & ~again))))
		return false;
	return flags == DATA_FLAG_MOVED ||
	       (flags == (DATA_FLAG_MOVED | DATA_FLAG_ARRIVED) && !h->len);
}

static const char *check_header(const struct data_header *h)
{
	if (h->magic != DATA_MAGIC)
		return "not a data header";
	if (h->version < DATA_VERSION_MIN || h->version > DATA_VERSION)
		return "a version that is not spoken here";
	if (h->pad || !flags_valid(h))
		return "a flag of a later version";
	if (h->node >= JOB_RANKS_MAX ||
	    (h->root >= JOB_RANKS_MAX &&
	     (h->op != DATA_RESULT || h->operation != OPERATION_ACCUMULATE)))
		return "a node or rank over the limit";
	if (!h->cookie != (h->op >= DATA_FAIL_ROUND))
		return "a call without a cookie, or a notice with one";
	return check_body(h);
}

int data_header_check(const struct data_header *header, const char **ret_why)
{
	const char *why = check_header(header);

	if (!why)
		return 0;
	*ret_why = why;
	return -EPROTO;
}

uint32_t data_rows_step(uint32_t part_bytes, size_t row_len)
{
	size_t each = sizeof(int64_t) + row_len;

	return (uint32_t)MAX((part_bytes - sizeof(struct data_rows)) / each, (size_t)1);
}

static void rows_swap(struct data_rows *rows)
{
	SWAP64(rows->rows);
	SWAP64(rows->n);
	SWAP32(rows->width);
	SWAP32(rows->step);
}

void data_rows_encode(struct data_rows *rows)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		rows_swap(rows);
}

void data_rows_decode(struct data_rows *rows)
{
	if (BYTE_ORDER == BIG_ENDIAN)
		rows_swap(rows);
}

static const char *parse_piece(const struct data_header *h, const void *payload,
			       struct data_piece *piece)
{
	const struct data_rows *list = &piece->list;
	uint64_t before, each, table;

	if (h->len < sizeof(*list))
		return "a piece of rows without its head";
	memcpy(&piece->list, payload, sizeof(*list));
	data_rows_decode(&piece->list);
	piece->row_len = list->width * dtype_size(h->dtype);
	each = sizeof(int64_t) + piece->row_len;
	if (!piece->row_len || piece->row_len > DATA_ROW_MAX)
		return "a row of no elements, or of too many";
	if (list->rows > INT64_MAX || MUL_OVERFLOW(list->rows, (uint64_t)piece->row_len, &table))
		return "a table of more rows than there can be";
	if (list->pad)
		return "a flag of a later version";
	if (list->n > list->rows)
		return "a list of more rows than the table has";
	if (!list->step || list->step * each < DATA_STEP_MIN)
		return "a list in pieces that are too small";
	piece->n_pieces = MAX(list->n / list->step + !!(list->n % list->step), UINT64_C(1));
	if (h->part >= piece->n_pieces)
		return "a piece behind the end of its list";
	before = (uint64_t)h->part * list->step;
	piece->n = (size_t)MIN(list->n - before, (uint64_t)list->step);
	if ((h->len - sizeof(*list)) / each != piece->n || (h->len - sizeof(*list)) % each)
		return "a piece of another length than its list says";
	piece->rows = (const int64_t *)((const char *)payload + sizeof(*list));
	piece->values = piece->rows + piece->n;
	return NULL;
}

int data_rows_parse(const struct data_header *header, const void *payload,
		    struct data_piece *ret_piece, const char **ret_why)
{
	const char *why = parse_piece(header, payload, ret_piece);

	if (!why)
		return 0;
	*ret_why = why;
	return -EPROTO;
}

/* Names go into messages and logs as they are. */
static bool name_valid(const char *name, size_t size)
{
	size_t len = strnlen(name, size);

	if (!len || len == size)
		return false;
	for (size_t i = 0; i < len; i++)
		if (name[i] <= ' ' || name[i] > '~')
			return false;
	return true;
}

static const char *check_hello(const struct data_hello *hello)
{
	if (hello->magic != DATA_MAGIC)
		return "not a bps data connection";
	if (hello->version_min > hello->version)
		return "its versions are in disorder";
	if (hello->version < DATA_VERSION_MIN || hello->version_min > DATA_VERSION)
		return "no common version";
	if (!name_valid(hello->name, sizeof(hello->name)))
		return "its name is empty, unterminated or unprintable";
	return NULL;
}

int data_hello_check(struct data_hello *hello, const char **ret_why)
{
	const char *why = check_hello(hello);

	if (!why)
		return 0;
	*ret_why = why;
	return -EPROTO;
}
