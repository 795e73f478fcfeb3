/* Small messages under one header: which leave so, and that each is what it would be alone, whatever comes. */
#include "transport_pair.h"

#include "base/crc32c.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include <endian.h>

#define SERVER_ID 77
#define LEN	  1000
#define N_CALLS	  100
#define FEATURES  (DATA_FEATURE_PACKS | DATA_FEATURE_CHECKSUM | DATA_FEATURE_RAILS)

/* What a socket that speaks bytes sends, or has received last. */
struct wire_pack {
	struct data_header header; /* host order */
	struct data_packed packed[DATA_PACK_MAX];
	unsigned char payloads[DATA_PACKED_LEN];
};

struct bytes {
	unsigned char data[sizeof(struct wire_pack) + 3 * DATA_CHECK_LEN];
	size_t len;
};

static void add(struct bytes *bytes, const void *data, size_t len)
{
	memcpy(bytes->data + bytes->len, data, len);
	bytes->len += len;
}

static void add_check(struct bytes *bytes, bool checks, const void *data, size_t len)
{
	uint32_t check = htole32(crc32c(0, data, len));

	if (checks)
		add(bytes, &check, sizeof(check));
}

/* n messages with LEN bytes each, those of seed i; cookies from `cookie` on. */
static void make(struct wire_pack *pack, unsigned op, uint32_t cookie, uint32_t n)
{
	struct data_header header;

	for (uint32_t i = 0; i < n; i++) {
		unsigned char *payload = pack->payloads + i * LEN;

		raw_push_header(&header, cookie + i, LEN);
		header.op = (uint8_t)op;
		pair_fill(payload, LEN, cookie + i);
		data_pack(&header, &pack->packed[i]);
	}
	data_pack_header(&header, n, n * LEN, &pack->header);
}

/* As its header says that long it is, whatever its messages say. */
static void write_pack(const struct wire_pack *pack, bool checks, struct bytes *bytes)
{
	struct data_header header = pack->header;
	size_t n = MIN(header.part, DATA_PACK_MAX), head = n * sizeof(pack->packed[0]);
	size_t len = MIN(header.len - MIN((size_t)header.len, head), sizeof(pack->payloads));

	bytes->len = 0;
	data_header_encode(&header);
	add(bytes, &header, sizeof(header));
	add_check(bytes, checks, &header, sizeof(header));
	add(bytes, pack->packed, head);
	add_check(bytes, checks, pack->packed, head);
	add(bytes, pack->payloads, len);
	add_check(bytes, checks && len, pack->payloads, len);
}

static void send_pack(struct pair *pair, int fd, const struct wire_pack *pack, bool checks)
{
	struct bytes bytes;

	write_pack(pack, checks, &bytes);
	raw_send(pair, fd, bytes.data, bytes.len);
}

static void receive(struct pair *pair, int fd, void *data, size_t len)
{
	ASSERT_EQ(raw_receive(pair, fd, data, len), len);
}

static void receive_checked(struct pair *pair, int fd, bool checks, void *data, size_t len)
{
	uint32_t check;

	receive(pair, fd, data, len);
	if (!checks || !len)
		return;
	receive(pair, fd, &check, sizeof(check));
	ASSERT_EQ(le32toh(check), crc32c(0, data, len));
}

/* The next message, alone or with others: header.op says. Returns how many it holds. */
static uint32_t receive_message(struct pair *pair, int fd, bool checks, struct wire_pack *pack)
{
	size_t head;

	receive_checked(pair, fd, checks, &pack->header, sizeof(pack->header));
	data_header_decode(&pack->header);
	if (pack->header.op != DATA_PACK) {
		receive_checked(pair, fd, checks, pack->payloads, pack->header.len);
		return 1;
	}
	ASSERT_INT(pack->header.part, >=, 2);
	ASSERT_INT(pack->header.part, <=, DATA_PACK_MAX);
	head = pack->header.part * sizeof(pack->packed[0]);
	receive_checked(pair, fd, checks, pack->packed, head);
	ASSERT_TRUE(data_packed_fit(&pack->header, pack->packed));
	receive_checked(pair, fd, checks, pack->payloads, pack->header.len - head);
	return pack->header.part;
}

static void config_with(struct pair_config *ret_config, unsigned n_threads, bool checks)
{
	*ret_config =
		(struct pair_config){ .variant.n_threads = n_threads, .no_checksums = !checks };
}

/* A server (pair->b) whose caller is a socket. */
static struct pair *server_new(unsigned n_threads, bool checks, uint64_t features, int *ret_fd)
{
	struct pair_config config;
	struct pair *pair;

	config_with(&config, n_threads, checks);
	pair = pair_new_serving(&config);
	*ret_fd = raw_shake_with(pair, transport_port(pair->b.transport), NULL, 5, 0, features);
	return pair;
}

/* A caller (pair->a) of a server that is a socket. */
static struct pair *caller_new(unsigned n_threads, bool checks, uint64_t features, int *ret_fd)
{
	_cleanup_(fd_closep) int listener = -1;
	struct pair_config config;
	struct pair *pair;
	uint16_t port;

	config_with(&config, n_threads, checks);
	config.variant.n_lanes = 1;
	pair = pair_new_alone(&config);
	listener = raw_listen(&port);
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, SERVER_ID, &pair->peer));
	*ret_fd = raw_accept(pair, listener);
	raw_shake_accepted_with(pair, *ret_fd, NULL, SERVER_ID,
				features & ~(uint64_t)DATA_FEATURE_RAILS);
	PAIR_UNTIL(pair, !list_empty(&pair->peer->lanes));
	return pair;
}

/* Calls with their payloads and rooms. */
struct calls {
	struct pair_call call[N_CALLS];
	unsigned char payload[N_CALLS][DATA_PACKED_MAX], target[N_CALLS][DATA_PACKED_MAX];
};

static struct calls *calls_new(uint32_t len)
{
	struct calls *calls = calloc(1, sizeof(*calls));

	ASSERT_TRUE(calls);
	for (unsigned i = 0; i < N_CALLS; i++) {
		pair_fill(calls->payload[i], len, i);
		pair_call_init(&calls->call[i], calls->payload[i], len, calls->target[i], len);
		calls->call[i].call.header.key = i + 1;
	}
	return calls;
}

static void begin_all(struct pair *pair, struct calls *calls)
{
	for (unsigned i = 0; i < N_CALLS; i++)
		pair_call_begin(pair, &calls->call[i]);
}

static void expect_all(struct pair *pair, struct calls *calls, uint32_t len)
{
	for (unsigned i = 0; i < N_CALLS; i++) {
		PAIR_UNTIL(pair, calls->call[i].n_done);
		ASSERT_EQ(calls->call[i].n_done, 1);
		ASSERT_EQ(calls->call[i].n_sent, 1);
		ASSERT_OK(calls->call[i].call.status);
		ASSERT_TRUE(pair_check(calls->target[i], len, i));
	}
}

/* What has come is answered as it came: together, or alone. */
static void answer(struct pair *pair, int fd, bool checks, struct wire_pack *pack)
{
	struct bytes bytes = { 0 };
	struct data_header header;

	if (pack->header.op == DATA_PACK) {
		ASSERT_EQ(pack->header.block, DATA_PUSH);
		pack->header.block = DATA_RESULT;
		send_pack(pair, fd, pack, checks);
		return;
	}
	header = pack->header;
	header.op = DATA_RESULT;
	data_header_encode(&header);
	add(&bytes, &header, sizeof(header));
	add_check(&bytes, checks, &header, sizeof(header));
	add(&bytes, pack->payloads, pack->header.len);
	if (pack->header.len)
		add_check(&bytes, checks, pack->payloads, pack->header.len);
	raw_send(pair, fd, bytes.data, bytes.len);
}

static void end(struct pair *pair, int fd, const unsigned *n_lost)
{
	ASSERT_EQ(*n_lost, 0);
	fd_close(fd);
	PAIR_UNTIL(pair, *n_lost);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
}

#define FOR_EACH_VARIANT(n_threads, checks)                       \
	for (unsigned n_threads = 0; n_threads <= 1; n_threads++) \
		for (unsigned checks = 0; checks <= 1; checks++)

TEST(small_calls_leave_together)
{
	FOR_EACH_VARIANT(n_threads, checks)
	{
		int fd;
		_cleanup_(pair_freep) struct pair *pair =
			caller_new(n_threads, checks, FEATURES, &fd);
		_cleanup_(freep) struct calls *calls = calls_new(LEN);
		_cleanup_(freep) struct wire_pack *pack = malloc(sizeof(*pack));
		unsigned n_messages = 0, n = 0;

		begin_all(pair, calls);
		for (; n < N_CALLS; n_messages++) {
			n += receive_message(pair, fd, checks, pack);
			answer(pair, fd, checks, pack);
		}
		ASSERT_EQ(n, N_CALLS);
		/* A data thread may have sent the first of them before the others were posted. */
		if (!n_threads)
			ASSERT_EQ(n_messages, 4);
		expect_all(pair, calls, LEN);
		end(pair, fd, &pair->a.n_lost);
	}
}

/* As one of several that have the same answer. */
static void echo_checked(struct pair *pair, struct delivery *delivery)
{
	struct data_header header = delivery->header;
	struct answer_check check = { 0 };

	(void)pair;
	header.op = DATA_RESULT;
	delivery_answer_also(delivery, &header, delivery->payload_block, &check);
}

TEST(small_answers_leave_together)
{
	FOR_EACH_VARIANT(n_threads, checks)
	{
		int fd;
		_cleanup_(pair_freep) struct pair *pair =
			server_new(n_threads, checks, FEATURES, &fd);
		_cleanup_(freep) struct wire_pack *pack = malloc(sizeof(*pack));
		struct delivery *deliveries[64];
		unsigned n_messages = 0;
		bool seen[64] = { false };

		for (unsigned i = 0; i < 2; i++) {
			make(pack, DATA_PUSH, 1 + 32 * i, 32);
			send_pack(pair, fd, pack, checks);
		}
		for (unsigned i = 0; i < 64; i++) {
			deliveries[i] = pair_take(pair);
			ASSERT_EQ(deliveries[i]->header.cookie, i + 1);
			ASSERT_TRUE(pair_check(deliveries[i]->payload, LEN, i + 1));
		}
		/* In any order: none waits for another. Of every second the checksum is known. */
		for (unsigned i = 64; i-- > 0;)
			(i % 2 ? echo_checked : pair_echo)(pair, deliveries[i]);
		for (unsigned n = 0; n < 64; n_messages++) {
			uint32_t came = receive_message(pair, fd, checks, pack);

			for (uint32_t i = 0; i < came; i++) {
				uint32_t cookie = pack->header.op == DATA_PACK
							  ? le32toh(pack->packed[i].cookie)
							  : pack->header.cookie;

				ASSERT_TRUE(cookie && cookie <= 64 && !seen[cookie - 1]);
				seen[cookie - 1] = true;
				ASSERT_TRUE(pair_check(pack->payloads + i * LEN, LEN, cookie));
			}
			n += came;
		}
		if (!n_threads)
			ASSERT_EQ(n_messages, 2);
		end(pair, fd, &pair->b.n_lost);
	}
}

/* No piece of one depends on how it was cut. */
TEST(in_single_bytes)
{
	for (unsigned checks = 0; checks <= 1; checks++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = server_new(0, checks, FEATURES, &fd);
		_cleanup_(freep) struct wire_pack *pack = malloc(sizeof(*pack));
		struct bytes bytes;

		for (uint32_t cookie = 1; cookie <= 4; cookie += 2) {
			make(pack, DATA_PUSH, cookie, 2);
			/* One without data is there as soon as those before it are. */
			pack->packed[1].len = 0;
			pack->header.len -= LEN;
			write_pack(pack, checks, &bytes);
			for (size_t i = 0; i < bytes.len; i++) {
				raw_send(pair, fd, bytes.data + i, 1);
				ASSERT_OK(loop_turn(pair->loop, 0));
			}
			for (unsigned i = 0; i < 2; i++) {
				struct delivery *delivery = pair_take(pair);

				ASSERT_EQ(delivery->header.cookie, cookie + i);
				ASSERT_EQ(delivery->header.len, i ? 0 : LEN);
				ASSERT_TRUE(pair_check(delivery->payload, i ? 0 : LEN, cookie));
				pair_echo(pair, delivery);
			}
			(void)receive_message(pair, fd, checks, pack);
			if (pack->header.op != DATA_PACK)
				(void)receive_message(pair, fd, checks, pack);
		}
		end(pair, fd, &pair->b.n_lost);
	}
}

/* What is larger, or not all of its block, goes alone, and none overtakes another for that; what is of another job, in its turn. */
TEST(the_order_stays)
{
	static const struct {
		uint32_t n;
		uint64_t first; /* key */
	} expected[] = { { 2, 1 }, { 1, 7 }, { 1, 3 }, { 2, 4 }, { 1, 6 }, { 25, 8 }, { 32, 33 } };
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, true, FEATURES, &fd);
	_cleanup_(freep) struct calls *calls = calls_new(LEN);
	_cleanup_(freep) struct wire_pack *pack = malloc(sizeof(*pack));
	unsigned n = 0;

	calls->call[2].call.header.total = 2 * LEN;
	calls->call[5].call.header.part = 1;
	calls->call[6].call.header.job++;
	begin_all(pair, calls);
	for (unsigned i = 0; n < N_CALLS; i++) {
		n += receive_message(pair, fd, true, pack);
		if (i < ARRAY_SIZE(expected)) {
			bool is_pack = pack->header.op == DATA_PACK;

			ASSERT_EQ(is_pack ? pack->header.part : 1, expected[i].n);
			ASSERT_EQ(is_pack ? le64toh(pack->packed[0].key) : pack->header.key,
				  expected[i].first);
		}
		answer(pair, fd, true, pack);
	}
	expect_all(pair, calls, LEN);
	end(pair, fd, &pair->a.n_lost);
}

TEST(who_does_not_know_them_gets_none)
{
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, true, DATA_FEATURE_CHECKSUM, &fd);
	_cleanup_(freep) struct calls *calls = calls_new(LEN);
	_cleanup_(freep) struct wire_pack *pack = malloc(sizeof(*pack));

	begin_all(pair, calls);
	for (unsigned i = 0; i < N_CALLS; i++) {
		(void)receive_message(pair, fd, true, pack);
		ASSERT_EQ(pack->header.op, DATA_PUSH);
		answer(pair, fd, true, pack);
	}
	expect_all(pair, calls, LEN);
	end(pair, fd, &pair->a.n_lost);
}

/* -- What must not come ------------------------------------------------------------------------------------------- */

static void no_feature(struct wire_pack *pack)
{
	(void)pack;
}

static void of_one(struct wire_pack *pack)
{
	pack->header.part = 1;
}

static void of_none(struct wire_pack *pack)
{
	pack->header.part = 0;
}

static void of_too_many(struct wire_pack *pack)
{
	pack->header.part = DATA_PACK_MAX + 1;
}

static void of_setup(struct wire_pack *pack)
{
	pack->header.block = DATA_JOIN;
}

static void of_packs(struct wire_pack *pack)
{
	pack->header.block = DATA_PACK;
}

static void shorter_than_its_messages(struct wire_pack *pack)
{
	pack->header.len = 3 * sizeof(struct data_packed) - 1;
}

static void too_long(struct wire_pack *pack)
{
	pack->header.len = 3 * sizeof(struct data_packed) + DATA_PACKED_LEN + 1;
}

static void one_byte_more(struct wire_pack *pack)
{
	pack->header.len++;
}

static void a_message_too_long(struct wire_pack *pack)
{
	pack->packed[1].len = htole16(DATA_PACKED_MAX + 1);
	pack->header.len += DATA_PACKED_MAX + 1 - LEN;
}

static void lengths_that_overflow(struct wire_pack *pack)
{
	pack->packed[0].len = htole16(UINT16_MAX);
	pack->packed[1].len = htole16(LEN + 1);
}

static void a_flag(struct wire_pack *pack)
{
	pack->packed[1].flags = htole16(DATA_FLAG_MOVED);
}

static void no_cookie(struct wire_pack *pack)
{
	pack->packed[1].cookie = 0;
}

static void no_key(struct wire_pack *pack)
{
	pack->packed[1].key = 0;
}

static void no_type(struct wire_pack *pack)
{
	pack->packed[1].dtype = 200;
}

static void a_payload_that_is_no_part(struct wire_pack *pack)
{
	pack->packed[1].part_len = htole32(4 * LEN);
}

static void answers(struct wire_pack *pack)
{
	pack->header.block = DATA_RESULT;
}

static const struct {
	const char *why;
	void (*spoil)(struct wire_pack *pack);
} wrongs[] = {
	{ "a pack where none belongs", no_feature },
	{ "too few messages, or too many", of_one },
	{ "too few messages, or too many", of_none },
	{ "too few messages, or too many", of_too_many },
	{ "what is not packed", of_setup },
	{ "what is not packed", of_packs },
	{ "another length", shorter_than_its_messages },
	{ "another length", too_long },
	{ "other messages than its header says", one_byte_more },
	{ "other messages than its header says", a_message_too_long },
	{ "other messages than its header says", lengths_that_overflow },
	{ "other messages than its header says", a_flag },
	{ "without a cookie", no_cookie },
	{ "without key or round", no_key },
	{ "no such element type", no_type },
	{ "the payload is not the part", a_payload_that_is_no_part },
	{ "an answer to no call of ours", answers },
};

TEST(wrong_packs_are_refused)
{
	_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));

	FOR_EACH_VARIANT(n_threads, checks)
	{
		for (unsigned i = 0; i < ARRAY_SIZE(wrongs); i++) {
			uint64_t without = wrongs[i].spoil == no_feature ? DATA_FEATURE_PACKS : 0;
			int fd;
			_cleanup_(pair_freep) struct pair *pair =
				server_new(n_threads, checks, FEATURES & ~without, &fd);

			make(pack, DATA_PUSH, 1, 3);
			wrongs[i].spoil(pack);
			send_pack(pair, fd, pack, checks);
			PAIR_UNTIL(pair, pair->b.n_lost);
			ASSERT_CONTAINS(pair->b.lost_why, wrongs[i].why);
			/* Nothing arrives of a pack that is not right as a whole. */
			ASSERT_EQ(pair->b.n_deliveries, 0);
			fd_close(fd);
			ASSERT_EQ(block_cache_used(pair->blocks), 0);
		}
	}
}

/* A call has one answer in a pack, or none of the pack is taken; nor is a call taken from a server. */
TEST(wrong_answers_are_refused)
{
	FOR_EACH_VARIANT(n_threads, wrong)
	{
		uint32_t cookie;
		int fd;
		_cleanup_(pair_freep) struct pair *pair =
			caller_new(n_threads, true, FEATURES, &fd);
		_cleanup_(freep) struct calls *calls = calls_new(LEN);
		_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));

		for (unsigned i = 0; i < 2; i++)
			pair_call_begin(pair, &calls->call[i]);
		for (unsigned n = 0; n < 2;)
			n += receive_message(pair, fd, true, pack);
		cookie = pack->header.op == DATA_PACK ? le32toh(pack->packed[0].cookie)
						      : pack->header.cookie;
		make(pack, wrong ? DATA_PUSH : DATA_RESULT, cookie, 2);
		pack->packed[1].cookie = pack->packed[0].cookie;
		send_pack(pair, fd, pack, true);
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_CONTAINS(pair->a.lost_why, wrong ? "a call from the side that answers"
							: "an answer to no call of ours");
		for (unsigned i = 0; i < 2; i++)
			ASSERT_EQ(calls->call[i].n_done, 1);
		for (unsigned i = 0; i < 2; i++)
			ASSERT_TRUE(calls->call[i].call.status);
		fd_close(fd);
	}
}

/* -- Bytes that change on their way ------------------------------------------------------------------------------- */

/* Of payloads all come again, since one seal stands for all; without what stands in front nothing is known. */
TEST(bytes_that_change_are_seen)
{
	_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));
	size_t head =
		sizeof(struct data_header) + 2 * DATA_CHECK_LEN + 3 * sizeof(struct data_packed);
	struct bytes bytes;

	make(pack, DATA_PUSH, 1, 3);
	write_pack(pack, true, &bytes);
	for (size_t at = 0; at < bytes.len; at += at < head ? 5 : 97) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair =
			server_new((unsigned)at % 2, true, FEATURES, &fd);
		unsigned n_damaged = 0;

		bytes.data[at] ^= (unsigned char)(1u << at % 8);
		raw_send(pair, fd, bytes.data, bytes.len);
		bytes.data[at] ^= (unsigned char)(1u << at % 8);
		if (at < head) {
			PAIR_UNTIL(pair, pair->b.n_lost);
			ASSERT_STR(
				pair->b.lost_why,
				"connection 0: a header arrived with other bytes than were sent");
			ASSERT_EQ(pair->b.n_deliveries, 0);
			fd_close(fd);
			continue;
		}
		while (n_damaged < 3) {
			static struct wire_pack answered;

			ASSERT_EQ(receive_message(pair, fd, true, &answered), 1);
			ASSERT_EQ(answered.header.op, DATA_ERROR);
			ASSERT_EQ(answered.header.status, EBADMSG);
			ASSERT_EQ(answered.header.cookie, ++n_damaged);
		}
		ASSERT_EQ(pair->b.n_deliveries, 0);
		end(pair, fd, &pair->b.n_lost);
	}
}

TEST(what_has_no_payload_is_not_damaged)
{
	_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));
	struct delivery *delivery;
	struct bytes bytes;
	int fd;
	_cleanup_(pair_freep) struct pair *pair = server_new(0, true, FEATURES, &fd);

	make(pack, DATA_PUSH, 1, 2);
	pack->packed[1].len = 0;
	pack->header.len -= LEN;
	write_pack(pack, true, &bytes);
	bytes.data[bytes.len - DATA_CHECK_LEN - 1] ^= 1;
	raw_send(pair, fd, bytes.data, bytes.len);
	ASSERT_EQ(receive_message(pair, fd, true, pack), 1);
	ASSERT_EQ(pack->header.op, DATA_ERROR);
	ASSERT_EQ(pack->header.status, EBADMSG);
	ASSERT_EQ(pack->header.cookie, 1);
	delivery = pair_take(pair);
	ASSERT_EQ(delivery->header.cookie, 2);
	ASSERT_EQ(delivery->header.len, 0);
	pair_echo(pair, delivery);
	ASSERT_EQ(receive_message(pair, fd, true, pack), 1);
	ASSERT_EQ(pack->header.op, DATA_RESULT);
	end(pair, fd, &pair->b.n_lost);
}

/* Answers that are damaged, or of which half is here, are no answers. */
TEST(answers_that_are_not_whole_answer_nothing)
{
	enum { N = 3 };
	_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));
	struct bytes bytes;

	for (unsigned targets = 0; targets <= 1; targets++)
		for (unsigned missing = 0; missing < N * LEN; missing += LEN / 2) {
			int fd;
			_cleanup_(pair_freep) struct pair *pair =
				caller_new(0, true, FEATURES, &fd);
			_cleanup_(freep) struct calls *calls = calls_new(LEN);

			for (unsigned i = 0; i < N; i++) {
				if (!targets)
					calls->call[i].call.target = NULL;
				pair_call_begin(pair, &calls->call[i]);
			}
			ASSERT_EQ(receive_message(pair, fd, true, pack), N);
			pack->header.block = DATA_RESULT;
			write_pack(pack, true, &bytes);
			bytes.data[bytes.len - DATA_CHECK_LEN - 1] ^= 1;
			raw_send(pair, fd, bytes.data, bytes.len - missing);
			if (missing)
				fd_close(fd);
			PAIR_UNTIL(pair, pair->a.n_lost);
			ASSERT_CONTAINS(pair->a.lost_why,
					missing ? "closed the connection inside a message"
						: "a payload arrived with other bytes");
			for (unsigned i = 0; i < N; i++) {
				ASSERT_EQ(calls->call[i].n_done, 1);
				ASSERT_TRUE(calls->call[i].call.status);
			}
			if (!missing)
				fd_close(fd);
			ASSERT_EQ(block_cache_used(pair->blocks), 0);
		}
}

/* A connection that ends inside a pack gives back what has come of it. */
TEST(half_a_pack_is_let_go_of)
{
	_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));
	struct bytes bytes;

	make(pack, DATA_PUSH, 1, 3);
	write_pack(pack, true, &bytes);
	for (size_t len = bytes.len - 3 * LEN; len < bytes.len; len += LEN / 2) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = server_new(0, true, FEATURES, &fd);

		raw_send(pair, fd, bytes.data, len);
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost);
		ASSERT_EQ(pair->b.n_deliveries, 0);
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
	}
}

/* -- Less room than it takes -------------------------------------------------------------------------------------- */

static struct lane *lane_of(const struct pair *pair)
{
	return list_first(&pair->peer->lanes, struct lane, link);
}

/* The caller's socket takes a part of what leaves, until more is read. */
static struct pair *narrow_new(int *ret_fd, struct calls *calls)
{
	struct pair *pair = caller_new(0, true, FEATURES, ret_fd);
	int least = 1;

	ASSERT_OK(
		setsockopt(lane_of(pair)->source.fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)));
	begin_all(pair, calls);
	while (lane_of(pair)->begun.frame.n < 2)
		ASSERT_OK(loop_turn(pair->loop, 0));
	return pair;
}

/* It goes on with what it had begun with. */
TEST(one_that_was_begun_goes_on)
{
	static const uint32_t lens[] = { 1500, DATA_PACKED_MAX };

	for (unsigned l = 0; l < ARRAY_SIZE(lens); l++) {
		uint32_t len = lens[l], n = 0;
		_cleanup_(freep) struct calls *calls = calls_new(len);
		_cleanup_(freep) struct wire_pack *pack = calloc(1, sizeof(*pack));
		_cleanup_(pair_freep) struct pair *pair = NULL;
		int fd;

		pair = narrow_new(&fd, calls);
		while (n < N_CALLS) {
			n += receive_message(pair, fd, true, pack);
			answer(pair, fd, true, pack);
		}
		expect_all(pair, calls, len);
		end(pair, fd, &pair->a.n_lost);
	}
}

TEST(one_that_was_begun_is_lost_with_its_peer)
{
	_cleanup_(freep) struct calls *calls = calls_new(DATA_PACKED_MAX);
	_cleanup_(pair_freep) struct pair *pair = NULL;
	int fd;

	pair = narrow_new(&fd, calls);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
	for (unsigned i = 0; i < N_CALLS; i++) {
		ASSERT_EQ(calls->call[i].n_done, 1);
		ASSERT_EQ(calls->call[i].call.status, -ECONNRESET);
	}
}
