/* Bytes that change on their way: whoever gets them must see it, and say so; nobody may take them for what was sent. */
#include "transport_pair.h"

#include "base/crc32c.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include <endian.h>

#define PAYLOAD_LEN 40

struct checked {
	unsigned char bytes[sizeof(struct data_header) + PAYLOAD_LEN + 2 * DATA_CHECK_LEN];
};

static void put_check(unsigned char *at, const void *data, size_t len)
{
	uint32_t check = htole32(crc32c(0, data, len));

	memcpy(at, &check, sizeof(check));
}

static void make_push(struct checked *push, uint32_t cookie)
{
	unsigned char *payload = push->bytes + sizeof(struct data_header) + DATA_CHECK_LEN;
	struct data_header header;

	raw_push_header(&header, cookie, PAYLOAD_LEN);
	data_header_encode(&header);
	memcpy(push->bytes, &header, sizeof(header));
	put_check(push->bytes + sizeof(header), &header, sizeof(header));
	pair_fill(payload, PAYLOAD_LEN, 1);
	put_check(payload + PAYLOAD_LEN, payload, PAYLOAD_LEN);
}

static struct pair *server_new(unsigned n_threads)
{
	struct pair_config config = { .variant.n_threads = n_threads };

	return pair_new_serving(&config);
}

static int call_server(struct pair *pair)
{
	return raw_shake_with(pair, transport_port(pair->b.transport), NULL, 5, 0,
			      DATA_FEATURE_CHECKSUM);
}

/* An answer carries its own. */
TEST(answers_are_checked_too)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	unsigned char check[DATA_CHECK_LEN], *payload;
	struct checked push, answer;
	int fd = call_server(pair);

	make_push(&push, 1);
	raw_send(pair, fd, &push, sizeof(push));
	pair_echo(pair, pair_take(pair));
	ASSERT_EQ(raw_receive(pair, fd, &answer, sizeof(answer)), sizeof(answer));
	payload = answer.bytes + sizeof(struct data_header) + DATA_CHECK_LEN;
	put_check(check, answer.bytes, sizeof(struct data_header));
	ASSERT_MEM(check, payload - DATA_CHECK_LEN, DATA_CHECK_LEN);
	put_check(check, payload, PAYLOAD_LEN);
	ASSERT_MEM(check, payload + PAYLOAD_LEN, DATA_CHECK_LEN);
	ASSERT_TRUE(pair_check(payload, PAYLOAD_LEN, 1));
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* What was found out for the first is what all others carry. */
TEST(calls_with_one_answer_share_its_checksum)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	struct data_header header = { .op = DATA_RESULT, .len = PAYLOAD_LEN };
	unsigned char expected[DATA_CHECK_LEN], *payload;
	struct answer_check check = { 0 };
	struct checked push, answer;
	struct block *block;
	int fd = call_server(pair);

	ASSERT_OK(block_new(pair->blocks, PAYLOAD_LEN, NULL, &block));
	pair_fill(block->data, PAYLOAD_LEN, 9);
	put_check(expected, block->data, PAYLOAD_LEN);
	payload = answer.bytes + sizeof(header) + DATA_CHECK_LEN;
	for (uint32_t i = 1; i <= 3; i++) {
		make_push(&push, i);
		raw_send(pair, fd, &push, sizeof(push));
		/* One that is wrong is sent as it is: nobody makes it anew. */
		check.value ^= i == 3;
		delivery_answer_also(pair_take(pair), &header, block, &check);
		ASSERT_TRUE(check.is_known);
		ASSERT_EQ(raw_receive(pair, fd, &answer, sizeof(answer)), sizeof(answer));
		ASSERT_TRUE(pair_check(payload, PAYLOAD_LEN, 9));
		ASSERT_EQ(!memcmp(payload + PAYLOAD_LEN, expected, sizeof(expected)), i < 3);
	}
	block_unref(block);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* A message, and the same with each of its bytes changed: the first arrives, of the second nothing. */
TEST(every_byte_of_a_message_counts)
{
	struct pair *pairs[2] = { server_new(0), server_new(1) };

	for (unsigned i = 0; i < sizeof(struct checked); i++) {
		struct pair *pair = pairs[i % 2];
		bool in_header = i < sizeof(struct data_header) + DATA_CHECK_LEN;
		struct checked pushes[2];
		int fd = call_server(pair);

		make_push(&pushes[0], 1);
		make_push(&pushes[1], 2);
		pushes[1].bytes[i] ^= (unsigned char)(1u << i % 8);
		raw_send(pair, fd, pushes, sizeof(pushes));
		PAIR_UNTIL(pair, pair->b.n_lost == i / 2 + 1);
		ASSERT_STR(
			pair->b.lost_why,
			in_header ? "connection 0: a header arrived with other bytes than were sent"
				  : "connection 0: a payload arrived with other bytes than were "
				    "sent");
		ASSERT_EQ(pair->b.n_deliveries, i / 2 + 1);
		pair_echo(pair, pair_take(pair));
		fd_close(fd);
	}
	for (unsigned v = 0; v < 2; v++) {
		ASSERT_EQ(metric_get(&pairs[v]->b.transport->checksum_errors),
			  sizeof(struct checked) / 2);
		ASSERT_EQ(block_cache_used(pairs[v]->blocks), 0);
		pair_free(pairs[v]);
	}
}

/* A byte at a time: no piece of a message depends on how it was cut. */
TEST(in_single_bytes)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	struct checked push;
	int fd = call_server(pair);

	for (uint32_t cookie = 1; cookie <= 3; cookie++) {
		struct delivery *delivery;

		make_push(&push, cookie);
		for (size_t i = 0; i < sizeof(push); i++) {
			raw_send(pair, fd, push.bytes + i, 1);
			ASSERT_OK(loop_turn(pair->loop, 0));
		}
		delivery = pair_take(pair);
		ASSERT_TRUE(pair_check(delivery->payload, PAYLOAD_LEN, 1));
		pair_echo(pair, delivery);
	}
	ASSERT_EQ(pair->b.n_lost, 0);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* -- A wire that changes bytes ------------------------------------------------------------------------------------ */

struct direction {
	int from, to;
	size_t passed, wrong_at; /* a byte that is changed on its way */
	unsigned char bytes[64 << 10];
	size_t len, done;
};

static void direction_turn(struct direction *way)
{
	ssize_t n;

	if (way->from < 0)
		return;
	if (way->done == way->len) {
		n = recv(way->from, way->bytes, sizeof(way->bytes), MSG_DONTWAIT);
		if (n == 0 || (n < 0 && errno != EAGAIN)) {
			(void)shutdown(way->to, SHUT_WR);
			way->from = -1;
			return;
		}
		way->len = (size_t)MAX(n, 0);
		way->done = 0;
		if (way->wrong_at >= way->passed && way->wrong_at - way->passed < way->len)
			way->bytes[way->wrong_at - way->passed] ^= 4;
		way->passed += way->len;
	}
	n = send(way->to, way->bytes + way->done, way->len - way->done,
		 MSG_DONTWAIT | MSG_NOSIGNAL);
	if (n > 0)
		way->done += (size_t)n;
}

#define N_CALLS	 12
#define CALL_LEN 100000

/* What becomes of a call whose payload is. */
enum damaged { DAMAGED_COSTS_PEER, DAMAGED_AGAIN, DAMAGED_ENDS };

/*
 * Calls go through the relay, which changes one byte behind the handshake. Returns how many ended well with other bytes than
 * were sent; the others end well, or with the peer, or are made again where they can be.
 */
static unsigned calls_over_wrong_wire(bool checksums, enum damaged damaged, bool towards_server,
				      size_t wrong_at, uint64_t *ret_errors, unsigned *ret_lost)
{
	struct pair_config config = { .no_checksums = !checksums };
	_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
	static char payloads[N_CALLS][CALL_LEN], rooms[N_CALLS][CALL_LEN];
	struct pair_call calls[N_CALLS];
	struct direction *ways = calloc(2, sizeof(*ways));
	unsigned n_wrong = 0, n_ended = 0, n_done;
	uint16_t port;
	int listener = raw_listen(&port), caller, server;

	ASSERT_TRUE(ways);
	pair->server->on_call = pair_on_call_echo;
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &pair->peer));
	for (unsigned i = 0; i < N_CALLS; i++) {
		pair_fill(payloads[i], CALL_LEN, i);
		pair_call_init(&calls[i], payloads[i], CALL_LEN, rooms[i], CALL_LEN);
		calls[i].call.is_repeatable = damaged == DAMAGED_AGAIN;
		calls[i].call.ends_alone = damaged == DAMAGED_ENDS;
		pair_call_begin(pair, &calls[i]);
	}
	caller = raw_accept(pair, listener);
	server = raw_connect(pair, transport_port(pair->b.transport));
	for (unsigned i = 0; i < 2; i++)
		ways[i] = (struct direction){ .from = i ? server : caller,
					      .to = i ? caller : server,
					      .wrong_at = (i == 0) == towards_server ? wrong_at
										     : SIZE_MAX };
	do {
		n_done = 0;
		direction_turn(&ways[0]);
		direction_turn(&ways[1]);
		ASSERT_OK(loop_turn(pair->loop, 0));
		for (unsigned i = 0; i < N_CALLS; i++) {
			if (calls[i].n_done && calls[i].call.status == -ENETRESET) {
				ASSERT_EQ(damaged, DAMAGED_AGAIN);
				calls[i].n_done = 0;
				calls[i].call.is_again = true;
				pair_call_begin(pair, &calls[i]);
			}
			n_done += calls[i].n_done;
		}
	} while (n_done < N_CALLS);
	for (unsigned i = 0; i < N_CALLS; i++) {
		ASSERT_EQ(calls[i].n_done, 1);
		if (calls[i].call.status)
			ASSERT_EQ(calls[i].call.status,
				  damaged == DAMAGED_ENDS ? -EBADMSG : -ECONNRESET);
		n_ended += calls[i].call.status == -EBADMSG;
		if (calls[i].call.status)
			continue;
		n_wrong += !pair_check(rooms[i], CALL_LEN, i);
	}
	ASSERT_EQ(n_ended, damaged == DAMAGED_ENDS);
	*ret_errors = metric_get(&pair->a.transport->checksum_errors) +
		      metric_get(&pair->b.transport->checksum_errors);
	*ret_lost = pair->a.n_lost + pair->b.n_lost;
	fd_close(listener);
	fd_close(caller);
	fd_close(server);
	free(ways);
	return n_wrong;
}

TEST(what_a_wire_changes_is_seen)
{
	size_t handshake = sizeof(struct data_hello) + DATA_PROOF_LEN;
	uint64_t errors;
	unsigned n_lost;

	for (unsigned i = 0; i < 24; i++) {
		size_t at = handshake + (size_t)i * (size_t)i * 1901;

		ASSERT_EQ(calls_over_wrong_wire(true, DAMAGED_COSTS_PEER, i % 2, at, &errors,
						&n_lost),
			  0);
		ASSERT_INT(n_lost, >, 0);
		ASSERT_INT(errors, >, 0);
	}
	/* Without them nobody sees it: this test does. */
	ASSERT_EQ(calls_over_wrong_wire(false, DAMAGED_COSTS_PEER, true,
					handshake + 5 * CALL_LEN / 2, &errors, &n_lost),
		  1);
	ASSERT_EQ(errors, 0);
}

/* A call that can be made again is, and one whose memory may be changing ends, alone: its payload was damaged, or its answer's. */
TEST(what_was_damaged_comes_again_or_ends_alone)
{
	size_t handshake = sizeof(struct data_hello) + DATA_PROOF_LEN;
	uint64_t errors;
	unsigned n_lost;

	for (unsigned i = 0; i < 20; i++) {
		enum damaged damaged = i < 10 ? DAMAGED_AGAIN : DAMAGED_ENDS;
		/* Payloads alone: in the middle of the i-th message. */
		size_t at =
			handshake + (2 * (i % 10) + 1) * (size_t)CALL_LEN / 2 + 104 * (i % 10 + 1);

		ASSERT_EQ(calls_over_wrong_wire(true, damaged, i % 2, at, &errors, &n_lost), 0);
		ASSERT_EQ(errors, 1);
		ASSERT_EQ(n_lost, 0);
	}
}

/* Who has none is talked to without; who is asked over the loopback has none, unless it always has. */
TEST(both_ends_must_have_them)
{
	static const struct pair_config configs[][2] = {
		{ { .no_checksums = false }, { .no_checksums = true } },
		{ { .no_checksums = true }, { .no_checksums = false } },
		{ { .auto_checksums = true }, { .auto_checksums = true } },
		{ { .auto_checksums = true }, { .auto_checksums = false } },
		{ { .auto_checksums = false }, { .auto_checksums = true } },
		{ { .auto_checksums = false }, { .auto_checksums = false } },
	};

	for (size_t i = 0; i < sizeof(configs) / sizeof(configs[0]); i++) {
		struct pair_config config = configs[i][0], other = configs[i][1];
		_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
		char payload[1000], target[1000];
		struct pair_call call;

		pair_serve(pair, &other);
		pair->server->on_call = pair_on_call_echo;
		pair_fill(payload, sizeof(payload), 3);
		pair_call_init(&call, payload, sizeof(payload), target, sizeof(target));
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		ASSERT_TRUE(pair_check(target, sizeof(target), 3));
		ASSERT_EQ(list_first(&pair->peer->lanes, struct lane, link)->in.len > 0,
			  i == sizeof(configs) / sizeof(configs[0]) - 1);
	}
}
