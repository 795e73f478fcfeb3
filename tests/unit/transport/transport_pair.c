/*
 * Two transports, or one with itself, and raw connections that a test speaks on by hand.
 * test_transport.c and unit tests of transport/ begin from here.
 */
#include "transport_pair.h"

#include "transport/peer/peer.h"
#include "transport/tcp/handshake.h"

#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>

#define PAIR_ID_A 0xaaaa0001
#define PAIR_ID_B 0xbbbb0002

static void on_call(void *user, struct delivery *delivery)
{
	struct pair_side *side = user;

	side->n_deliveries++;
	if (side->on_call)
		side->on_call(side, delivery);
	else
		list_push_back(&side->deliveries, &delivery->link);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct pair_side *side = user;
	struct pair_notice *notice = &side->notices[side->n_notices++ % ARRAY_SIZE(side->notices)];

	notice->peer = peer;
	notice->header = *header;
	memset(notice->payload, 0, sizeof(notice->payload));
	if (header->len)
		memcpy(notice->payload, payload, MIN((size_t)header->len, sizeof(notice->payload)));
}

static void on_lost(void *user, struct peer *peer, const char *why)
{
	struct pair_side *side = user;

	side->n_lost++;
	side->lost_peer = peer;
	(void)snprintf(side->lost_why, sizeof(side->lost_why), "%s", why);
}

static const struct transport_ops pair_ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_lost,
};

/* One of the two names in BPS_TEST_RDMA. */
static const char *rdma_device(bool is_first)
{
	static char names[2][64];
	const char *both = getenv("BPS_TEST_RDMA");

	if (!both || sscanf(both, "%63s %63s", names[0], names[1]) != 2)
		TEST_SKIP("needs RDMA devices, named in BPS_TEST_RDMA: scripts/vm --rdma has them");
	return names[!is_first];
}

void pair_params(struct pair *pair, const struct pair_config *config, struct pair_side *side,
		 struct transport_params *ret_params)
{
	bool is_a = side == &pair->a;
	const char *key = is_a ? config->key_a : config->key_b;

	*ret_params = (struct transport_params){
		.loop = pair->loop,
		.blocks = pair->blocks,
		.ops = &pair_ops,
		.user = side,
		.id = is_a ? PAIR_ID_A : PAIR_ID_B,
		.node = is_a ? "a" : "b",
		.listen = is_a ? NULL : "127.0.0.1:0",
		.listen_fd = -1,
		.key = key,
		.key_len = key ? strlen(key) : 0,
		.n_threads = config->variant.n_threads,
		.n_lanes = MAX(config->variant.n_lanes, 1u),
		.max_connections = config->max_connections ?: 100,
		.handshake_timeout_ms = config->handshake_timeout_ms ?: 60000,
		.peer_timeout_ms = config->peer_timeout_ms ?: 60000,
		.quota_bytes = config->quota_bytes ?: UINT64_MAX,
		.accounts = &side->accounts,
		.checksums = config->no_checksums     ? TRANSPORT_CHECKSUMS_OFF
			     : config->auto_checksums ? TRANSPORT_CHECKSUMS_AUTO
						      : TRANSPORT_CHECKSUMS_ON,
		.rdma = { .kind = TRANSPORT_TCP, .gid_index = TRANSPORT_GID_AUTO },
	};
	if (config->variant.is_rdma) {
		ret_params->rdma.windows = config->windows;
		ret_params->rdma.kind = config->kind ?: TRANSPORT_RDMA;
		ret_params->rdma.devices = rdma_device(is_a);
		if (!is_a && config->has_two_rails)
			ret_params->rdma.devices = getenv("BPS_TEST_RDMA");
	}
	if (config->adjust)
		config->adjust(ret_params);
}

static void side_init(struct pair *pair, const struct pair_config *config, struct pair_side *side)
{
	side->pair = pair;
	list_init(&side->deliveries);
	accounts_init(&side->accounts,
		      &(struct accounts_params){
			      .limits[ACCOUNT_MESSAGES] = config->memory ?: UINT64_MAX,
			      .share = 50,
		      });
}

struct pair *pair_new_alone(const struct pair_config *config)
{
	struct pair *pair = calloc(1, sizeof(*pair));
	struct transport_params params;

	ASSERT_TRUE(pair);
	side_init(pair, config, &pair->a);
	side_init(pair, config, &pair->b);
	ASSERT_OK(loop_new(&pair->loop));
	ASSERT_OK(block_cache_new(64 << 20, &pair->blocks));
	pair_params(pair, config, &pair->a, &params);
	ASSERT_OK(transport_new(&params, &pair->a.transport));
	pair->server = &pair->a;
	return pair;
}

struct pair *pair_new_serving(const struct pair_config *config)
{
	struct pair *pair = pair_new_alone(config);
	struct transport_params params;

	pair_params(pair, config, &pair->b, &params);
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	pair->server = &pair->b;
	return pair;
}

void pair_serve(struct pair *pair, const struct pair_config *config)
{
	struct transport_params params;

	pair->server = &pair->b;
	pair_params(pair, config, &pair->b, &params);
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u",
		       transport_port(pair->b.transport));
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, PAIR_ID_B, &pair->peer));
}

struct pair *pair_new_with(const struct pair_config *config)
{
	struct pair *pair = pair_new_alone(config);

	if (config->variant.is_inproc)
		pair->peer = transport_self(pair->a.transport);
	else
		pair_serve(pair, config);
	return pair;
}

struct pair *pair_new(const struct pair_variant *variant)
{
	struct pair_config config = { .variant = *variant };

	return pair_new_with(&config);
}

static void side_done(struct pair_side *side)
{
	struct delivery *delivery;

	while ((delivery = list_first(&side->deliveries, struct delivery, link))) {
		list_remove(&delivery->link);
		delivery_fail(delivery, -ESHUTDOWN, "the test is over");
	}
	if (side->transport)
		transport_close(side->transport);
}

struct pair *pair_free(struct pair *pair)
{
	if (!pair)
		return NULL;
	side_done(&pair->b);
	side_done(&pair->a);
	transport_free(pair->b.transport);
	transport_free(pair->a.transport);
	/* Asserts that nothing is charged. */
	accounts_done(&pair->b.accounts);
	accounts_done(&pair->a.accounts);
	block_cache_free(pair->blocks);
	loop_free(pair->loop);
	free(pair);
	return NULL;
}

void pair_turn(struct pair *pair)
{
	/* Not for ever: what a test waits for may also come from a socket of its own. */
	ASSERT_OK(loop_turn(pair->loop, 10));
}

static void on_sent(struct call *call)
{
	struct pair_call *pair_call = container_of(call, struct pair_call, call);

	pair_call->n_sent++;
	pair_call->was_sent_first = !pair_call->n_done;
}

static void on_done(struct call *call)
{
	struct pair_call *pair_call = container_of(call, struct pair_call, call);

	pair_call->n_done++;
	if (call->answer_block)
		pair_call->answer = block_ref(call->answer_block);
	if (pair_call->on_done)
		pair_call->on_done(pair_call);
}

void pair_call_init(struct pair_call *call, const void *payload, size_t len, void *target,
		    size_t target_len)
{
	memset(call, 0, sizeof(*call));
	raw_push_header(&call->call.header, 0, (uint32_t)len);
	call->call.payload = payload;
	call->call.target = target;
	call->call.target_len = target_len;
	call->call.sent = on_sent;
	call->call.done = on_done;
}

void pair_call_begin(struct pair *pair, struct pair_call *call)
{
	peer_call(pair->peer, &call->call);
}

struct delivery *pair_take(struct pair *pair)
{
	struct delivery *delivery;

	PAIR_UNTIL(pair, !list_empty(&pair->server->deliveries));
	delivery = list_first(&pair->server->deliveries, struct delivery, link);
	list_remove(&delivery->link);
	return delivery;
}

void pair_on_call_echo(struct pair_side *side, struct delivery *delivery)
{
	pair_echo(side->pair, delivery);
}

void pair_echo(struct pair *pair, struct delivery *delivery)
{
	struct data_header header = delivery->header;

	(void)pair;
	header.op = DATA_RESULT;
	delivery_answer(delivery, &header, delivery->payload_block, delivery->payload);
}

void pair_settle(struct pair *pair)
{
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
}

/* A pattern of 64-bit words, the last one cut. */
void pair_fill(void *data, size_t len, uint64_t seed)
{
	for (size_t i = 0; i < len; i += sizeof(uint64_t)) {
		uint64_t word = (seed + i) * 0x9e3779b97f4a7c15ull;

		memcpy((char *)data + i, &word, MIN(sizeof(word), len - i));
	}
}

bool pair_check(const void *data, size_t len, uint64_t seed)
{
	for (size_t i = 0; i < len; i += sizeof(uint64_t)) {
		uint64_t word = (seed + i) * 0x9e3779b97f4a7c15ull;

		if (memcmp((const char *)data + i, &word, MIN(sizeof(word), len - i)) != 0)
			return false;
	}
	return true;
}

/* Bytes */

static struct sockaddr_in loopback(uint16_t port)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
}

int raw_connect(struct pair *pair, uint16_t port)
{
	struct sockaddr_in address = loopback(port);
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_addr.s_addr = pair->raw_from };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ASSERT_TRUE(fd >= 0);
	ASSERT_OK(bind(fd, (struct sockaddr *)&from, sizeof(from)));
	ASSERT_OK(connect(fd, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(fcntl(fd, F_SETFL, O_NONBLOCK));
	return fd;
}

int raw_reserve(uint16_t *ret_port)
{
	struct sockaddr_in address = loopback(0);
	socklen_t len = sizeof(address);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	ASSERT_TRUE(fd >= 0);
	ASSERT_OK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)));
	ASSERT_OK(bind(fd, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(getsockname(fd, (struct sockaddr *)&address, &len));
	*ret_port = ntohs(address.sin_port);
	return fd;
}

int raw_listen(uint16_t *ret_port)
{
	int fd = raw_reserve(ret_port);

	ASSERT_OK(listen(fd, 16));
	return fd;
}

int raw_accept(struct pair *pair, int listener)
{
	int fd;

	PAIR_UNTIL(pair, (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0);
	return fd;
}

void raw_send(struct pair *pair, int fd, const void *data, size_t len)
{
	while (len > 0) {
		ssize_t n = send(fd, data, len, MSG_NOSIGNAL);

		if (n < 0 && errno == EAGAIN) {
			pair_turn(pair);
			continue;
		}
		if (n < 0) /* refused meanwhile: the test sees that by what it receives */
			return;
		data = (const char *)data + n;
		len -= (size_t)n;
	}
}

size_t raw_receive(struct pair *pair, int fd, void *data, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = recv(fd, (char *)data + done, len - done, 0);

		if (n < 0 && errno == EAGAIN) {
			pair_turn(pair);
			continue;
		}
		if (n <= 0)
			break;
		done += (size_t)n;
	}
	return done;
}

void raw_hello(struct data_hello *ret_hello, uint64_t sender, unsigned lane)
{
	*ret_hello = (struct data_hello){
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.version_min = DATA_VERSION_MIN,
		.lane = (uint16_t)lane,
		.sender = sender,
		.name = "raw",
		.nonce = { 1, 2, 3 },
	};
	data_hello_encode(ret_hello);
}

int raw_shake(struct pair *pair, uint16_t port, const char *key, uint64_t sender, unsigned lane)
{
	return raw_shake_with(pair, port, key, sender, lane, DATA_FEATURE_NONE);
}

int raw_shake_with(struct pair *pair, uint16_t port, const char *key, uint64_t sender,
		   unsigned lane, uint64_t features)
{
	int fd = raw_connect(pair, port);
	struct data_hello mine, theirs;
	unsigned char proof[DATA_PROOF_LEN];

	raw_hello(&mine, sender, lane);
	mine.features = htole64(features);
	raw_send(pair, fd, &mine, sizeof(mine));
	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	ASSERT_OK(handshake_prove(key, key ? strlen(key) : 0, "bps-server", &mine, &theirs, proof));
	ASSERT_MEM(proof, theirs.proof, sizeof(proof));
	ASSERT_OK(handshake_prove(key, key ? strlen(key) : 0, "bps-client", &mine, &theirs, proof));
	raw_send(pair, fd, proof, sizeof(proof));
	return fd;
}

void raw_shake_accepted(struct pair *pair, int fd, const char *key, uint64_t sender)
{
	raw_shake_accepted_with(pair, fd, key, sender, DATA_FEATURE_NONE);
}

void raw_shake_accepted_with(struct pair *pair, int fd, const char *key, uint64_t sender,
			     uint64_t features)
{
	struct data_hello mine, theirs;
	unsigned char proof[DATA_PROOF_LEN], expected[DATA_PROOF_LEN];
	size_t key_len = key ? strlen(key) : 0;

	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	raw_hello(&mine, sender, 0);
	mine.features = htole64(features);
	ASSERT_OK(handshake_prove(key, key_len, "bps-server", &theirs, &mine, mine.proof));
	raw_send(pair, fd, &mine, sizeof(mine));
	ASSERT_EQ(raw_receive(pair, fd, proof, sizeof(proof)), sizeof(proof));
	ASSERT_OK(handshake_prove(key, key_len, "bps-client", &theirs, &mine, expected));
	ASSERT_MEM(proof, expected, sizeof(proof));
}

void raw_push_header(struct data_header *ret_header, uint32_t cookie, uint32_t len)
{
	*ret_header = (struct data_header){
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_PUSH,
		.len = len,
		.cookie = cookie,
		.job = 7,
		.key = 1,
		.round = 1,
		.dtype = DTYPE_UINT8,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.total = len,
		.part_len = len,
	};
}
