/*
 * The receive path of a data connection, over a socket pair. The first byte chooses what the bytes are: those of a
 * stranger who connects, those of a server's handshake, a caller's messages, or a server's answers and notices to calls
 * that are out; messages with or without packs. The second one is the size of the pieces they come in.
 */
#include "base/clock.h"
#include "base/log.h"
#include "fuzz.h"
#include "transport/internal.h"
#include "transport/peer/peer.h"
#include "transport/tcp/handshake.h"

enum {
	FUZZ_STRANGER,
	FUZZ_SERVER_HELLO,
	FUZZ_CALLER,
	FUZZ_SERVER,
	FUZZ_MODES,
	FUZZ_PACKS = FUZZ_MODES, /* added to the mode */
};

#define N_CALLS	   4
#define N_HELD	   64
#define QUOTA	   (4u << 20)
#define TARGET_LEN 64

static struct loop *loop;
static struct block_cache *blocks;
static struct transport *transport;

static struct delivery *held[N_HELD];
static size_t n_held;
static unsigned n_lost, n_handshakes;

/* The first ones are kept until the peer is gone, the others answered at once, in one of three ways. */
static void answer(struct delivery *delivery)
{
	struct data_header header = delivery->header;

	header.op = header.op == DATA_PUSH ? DATA_RESULT : DATA_OK;
	if (delivery->header.cookie % 3 == 0)
		delivery_fail(delivery, -EIO, "no");
	else if (delivery->header.cookie % 3 == 1)
		delivery_answer(delivery, &header, delivery->payload_block, delivery->payload);
	else
		delivery_answer(delivery, &header, NULL, delivery->payload);
}

static void on_call(void *user, struct delivery *delivery)
{
	const char *why;

	FUZZ_CHECK(!data_header_check(&delivery->header, &why) && delivery->header.cookie);
	FUZZ_CHECK(!delivery->header.len == !delivery->payload);
	if (delivery->header.len)
		FUZZ_CHECK(delivery->payload_block->len == delivery->header.len);
	if (n_held < N_HELD)
		held[n_held++] = delivery;
	else
		answer(delivery);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	const char *why;

	FUZZ_CHECK(!data_header_check(header, &why) && !header->cookie);
	FUZZ_CHECK(header->op != DATA_PING && header->op != DATA_PONG);
	FUZZ_CHECK(!header->len == !payload);
}

static void on_lost(void *user, struct peer *peer, const char *why)
{
	FUZZ_CHECK(*why);
	n_lost++;
}

static const struct transport_ops ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_lost,
};

static void start(void)
{
	struct transport_params params = {
		.ops = &ops,
		.id = 1,
		.node = "fuzzed",
		.listen_fd = -1,
		.n_lanes = 1,
		.max_connections = 10,
		.handshake_timeout_ms = 1000000,
		.peer_timeout_ms = 1000000,
		.quota_bytes = QUOTA,
	};

	log_set_level(LOG_LEVEL_ERROR);
	FUZZ_CHECK(!loop_new(&loop));
	FUZZ_CHECK(!block_cache_new(0, &blocks));
	params.loop = loop;
	params.blocks = blocks;
	FUZZ_CHECK(!transport_new(&params, &transport));
}

struct fuzz_call {
	struct call call;
	char target[TARGET_LEN];
	unsigned n_done;
};

static void on_done(struct call *call)
{
	struct fuzz_call *fuzz_call = container_of(call, struct fuzz_call, call);

	FUZZ_CHECK(!fuzz_call->n_done++);
	FUZZ_CHECK(call->status <= 0 && !call->status == !*call->text);
	if (!call->status && call->target)
		FUZZ_CHECK(call->answer.len <= TARGET_LEN);
}

static void begin_calls(struct peer *peer, struct fuzz_call *calls)
{
	for (unsigned i = 0; i < N_CALLS; i++) {
		struct call *call = &calls[i].call;

		*call = (struct call){
			.header = { .op = DATA_PUSH,
				    .key = 1,
				    .round = 1,
				    .dtype = DTYPE_UINT8,
				    .operation = OPERATION_PUSH_PULL,
				    .reduction = REDUCTION_SUM },
			.target = i % 2 ? NULL : calls[i].target,
			.target_len = i % 2 ? 0 : TARGET_LEN,
			.done = on_done,
		};
		if (i == N_CALLS - 1)
			call->header = (struct data_header){ .op = DATA_JOIN };
		calls[i].n_done = 0;
		peer_call(peer, call);
	}
}

static void drain(int fd)
{
	char rest[4096];

	while (recv(fd, rest, sizeof(rest), MSG_DONTWAIT) > 0)
		;
}

/* Until all is sent, or refused because our side has hung up. */
static void feed(int fd, const uint8_t *data, size_t size, size_t piece)
{
	while (size > 0) {
		ssize_t n = send(fd, data, MIN(size, piece), MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0 && errno != EAGAIN)
			return;
		data += MAX(n, 0);
		size -= (size_t)MAX(n, 0);
		FUZZ_CHECK(!loop_turn(loop, 0));
		drain(fd);
	}
}

static void on_server_hello(struct handshake *handshake, int r, bool is_final, const char *why)
{
	FUZZ_CHECK(!r || *why);
	n_handshakes++;
	handshake_done(handshake);
}

static void fuzz_stranger(int *fds, const uint8_t *data, size_t size, size_t piece)
{
	FUZZ_CHECK(!accept_adopt(transport, TAKE_FD(fds[0])));
	feed(fds[1], data, size, piece);
	(void)shutdown(fds[1], SHUT_WR);
	while (!list_empty(&transport->port.handshakes)) {
		FUZZ_CHECK(!loop_turn(loop, 0));
		drain(fds[1]);
	}
}

static void fuzz_peer(int mode, int *fds, const uint8_t *data, size_t size, size_t piece)
{
	bool is_caller = mode % FUZZ_MODES == FUZZ_CALLER;
	struct handshake handshake = {
		.transport = transport,
		.is_accepting = is_caller,
		.features = mode & FUZZ_PACKS ? DATA_FEATURE_PACKS : DATA_FEATURE_NONE,
	};
	struct fuzz_call calls[N_CALLS];
	struct peer *peer;

	n_lost = 0;
	FUZZ_CHECK(!peer_new(transport, is_caller ? PEER_CALLING : PEER_CALLED, "a fuzzer", "",
			     &peer));
	list_push_back(&transport->peers, &peer->link);
	transport->port.n_accepted += is_caller;
	FUZZ_CHECK(!tcp_lane_add(peer, TAKE_FD(fds[0]), 0, &handshake));
	if (!is_caller)
		begin_calls(peer, calls);
	FUZZ_CHECK(!loop_turn(loop, 0));
	drain(fds[1]);
	feed(fds[1], data, size, piece);
	(void)shutdown(fds[1], SHUT_WR);
	while (!n_lost)
		FUZZ_CHECK(!loop_turn(loop, 0));
	for (unsigned i = 0; !is_caller && i < N_CALLS; i++)
		FUZZ_CHECK(calls[i].n_done == 1);
	while (n_held)
		answer(held[--n_held]);
	FUZZ_CHECK(n_lost == 1);
	FUZZ_CHECK(list_empty(&transport->peers) && list_empty(&transport->lost_peers));
}

static void fuzz_server_hello(int *fds, const uint8_t *data, size_t size, size_t piece)
{
	struct handshake handshake = { .transport = transport,
				       .done = on_server_hello,
				       .source.fd = -1 };

	n_handshakes = 0;
	FUZZ_CHECK(!handshake_start(&handshake, TAKE_FD(fds[0]), CLOCK_NEVER - 1));
	feed(fds[1], data, size, piece);
	(void)shutdown(fds[1], SHUT_WR);
	while (!n_handshakes)
		FUZZ_CHECK(!loop_turn(loop, 0));
	FUZZ_CHECK(n_handshakes == 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int fds[2], mode;
	size_t piece;

	if (!transport)
		start();
	if (size < 2)
		return 0;
	mode = data[0] % (2 * FUZZ_MODES);
	piece = data[1] ? data[1] : SIZE_MAX;
	data += 2;
	size -= 2;
	FUZZ_CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds));
	if (mode % FUZZ_MODES == FUZZ_STRANGER)
		fuzz_stranger(fds, data, size, piece);
	else if (mode % FUZZ_MODES == FUZZ_SERVER_HELLO)
		fuzz_server_hello(fds, data, size, piece);
	else
		fuzz_peer(mode, fds, data, size, piece);
	fd_close(fds[1]);
	FUZZ_CHECK(transport->port.n_accepted == 0 && block_cache_used(blocks) == 0);
	return 0;
}
