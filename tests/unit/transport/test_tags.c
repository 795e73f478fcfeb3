/* With a cluster key: who is in the path of a connection can break it, and change, repeat, move or leave out nothing. */
#include "transport_pair.h"

#include "base/crc32c.h"
#include "transport/internal.h"
#include "transport/tcp/handshake.h"
#include <endian.h>

#define KEY	    "cluster key"
#define PAYLOAD_LEN 40
#define HEAD_LEN    (sizeof(struct data_header) + DATA_TAG_LEN)
#define MESSAGE_LEN (HEAD_LEN + PAYLOAD_LEN + DATA_TAG_LEN)

static uint64_t n_callers;

/* A caller that speaks bytes. */
struct caller {
	int fd;
	struct seal in, out;
};

struct sealed {
	unsigned char bytes[MESSAGE_LEN];
};

static struct pair *server_new(unsigned n_threads)
{
	struct pair_config config = { .variant.n_threads = n_threads, .key_a = KEY, .key_b = KEY };

	return pair_new_serving(&config);
}

/* features: what the caller says; the connection is sealed whatever that is. */
static void caller_begin(struct pair *pair, struct caller *caller, uint64_t features)
{
	struct handshake h = { .transport = pair->b.transport, .features = DATA_FEATURE_CHECKSUM };
	unsigned char proof[DATA_PROOF_LEN];

	caller->fd = raw_connect(pair, transport_port(pair->b.transport));
	raw_hello(&h.connecting, ++n_callers, 0);
	h.connecting.features = htole64(features);
	raw_send(pair, caller->fd, &h.connecting, sizeof(h.connecting));
	ASSERT_EQ(raw_receive(pair, caller->fd, &h.accepting, sizeof(h.accepting)),
		  sizeof(h.accepting));
	ASSERT_OK(handshake_prove(KEY, strlen(KEY), "bps-client", &h.connecting, &h.accepting,
				  proof));
	raw_send(pair, caller->fd, proof, sizeof(proof));
	ASSERT_OK(handshake_seals(&h, &caller->in, &caller->out));
	ASSERT_EQ(caller->out.len, DATA_TAG_LEN);
}

static void caller_end(struct pair *pair, struct caller *caller)
{
	caller->fd = fd_close(caller->fd);
	seal_done(&caller->in);
	seal_done(&caller->out);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

static void make_push(struct caller *caller, uint32_t cookie, struct sealed *push)
{
	struct data_header header;

	raw_push_header(&header, cookie, PAYLOAD_LEN);
	data_header_encode(&header);
	memcpy(push->bytes, &header, sizeof(header));
	seal_make(&caller->out, &header, sizeof(header), push->bytes + sizeof(header));
	pair_fill(push->bytes + HEAD_LEN, PAYLOAD_LEN, 1);
	seal_make(&caller->out, push->bytes + HEAD_LEN, PAYLOAD_LEN,
		  push->bytes + HEAD_LEN + PAYLOAD_LEN);
}

/* The server takes it, and its answer is sealed, too. */
static void exchange(struct pair *pair, struct caller *caller, const struct sealed *push,
		     struct sealed *ret_answer)
{
	unsigned char tag[DATA_TAG_LEN];

	raw_send(pair, caller->fd, push, sizeof(*push));
	pair_echo(pair, pair_take(pair));
	ASSERT_EQ(raw_receive(pair, caller->fd, ret_answer, sizeof(*ret_answer)),
		  sizeof(*ret_answer));
	seal_make(&caller->in, ret_answer->bytes, sizeof(struct data_header), tag);
	ASSERT_MEM(tag, ret_answer->bytes + sizeof(struct data_header), sizeof(tag));
	seal_make(&caller->in, ret_answer->bytes + HEAD_LEN, PAYLOAD_LEN, tag);
	ASSERT_MEM(tag, ret_answer->bytes + HEAD_LEN + PAYLOAD_LEN, sizeof(tag));
	ASSERT_TRUE(pair_check(ret_answer->bytes + HEAD_LEN, PAYLOAD_LEN, 1));
}

/* What is sent is refused, and the connection ends with these words. */
static void refused(struct pair *pair, struct caller *caller, const void *data, size_t len,
		    const char *what)
{
	unsigned n = pair->b.n_deliveries;
	char why[96];

	(void)snprintf(why, sizeof(why),
		       "connection 0: a %s arrived with other bytes than were sent", what);
	raw_send(pair, caller->fd, data, len);
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_STR(pair->b.lost_why, why);
	ASSERT_EQ(pair->b.n_deliveries, n);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
}

TEST(both_directions_are_sealed)
{
	for (unsigned n_threads = 0; n_threads <= 1; n_threads++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(n_threads);
		struct sealed push, answer;
		struct caller caller;

		caller_begin(pair, &caller, DATA_FEATURE_CHECKSUM);
		for (uint32_t cookie = 1; cookie <= 3; cookie++) {
			make_push(&caller, cookie, &push);
			exchange(pair, &caller, &push, &answer);
		}
		caller_end(pair, &caller);
	}
}

TEST(every_bit_counts)
{
	for (unsigned i = 0; i < MESSAGE_LEN; i++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(i % 2);
		struct sealed push, answer;
		struct caller caller;

		caller_begin(pair, &caller, DATA_FEATURE_CHECKSUM);
		make_push(&caller, 1, &push);
		exchange(pair, &caller, &push, &answer);
		make_push(&caller, 2, &push);
		push.bytes[i] ^= (unsigned char)(1u << i % 8);
		refused(pair, &caller, &push, sizeof(push), i < HEAD_LEN ? "header" : "payload");
		ASSERT_EQ(metric_get(&pair->b.transport->checksum_errors), 1);
		caller_end(pair, &caller);
	}
}

/* Each is right where it was made for, and nowhere else. */
TEST(nothing_comes_twice_or_elsewhere)
{
	enum { REPEATED, SWAPPED, LEFT_OUT, FROM_ANOTHER, SENT_BACK, PAYLOAD_FROM_ANOTHER, N };

	for (unsigned what = 0; what < N; what++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(what % 2);
		struct sealed pushes[3], other, answer;
		struct caller caller, another;

		caller_begin(pair, &caller, DATA_FEATURE_CHECKSUM);
		/* The same key and the same numbers: another connection all the same. */
		caller_begin(pair, &another, DATA_FEATURE_CHECKSUM);
		for (uint32_t i = 0; i < 3; i++)
			make_push(&caller, i + 1, &pushes[i]);
		make_push(&another, 1, &other);
		make_push(&another, 2, &other);
		exchange(pair, &caller, &pushes[0], &answer);
		switch (what) {
		case REPEATED:
			refused(pair, &caller, &pushes[0], sizeof(pushes[0]), "header");
			break;
		case SWAPPED:
		case LEFT_OUT:
			refused(pair, &caller, &pushes[2], sizeof(pushes[2]), "header");
			break;
		case FROM_ANOTHER:
			refused(pair, &caller, &other, sizeof(other), "header");
			break;
		case SENT_BACK:
			refused(pair, &caller, &answer, sizeof(answer), "header");
			break;
		default:
			memcpy(pushes[1].bytes + HEAD_LEN, other.bytes + HEAD_LEN,
			       PAYLOAD_LEN + DATA_TAG_LEN);
			refused(pair, &caller, &pushes[1], sizeof(pushes[1]), "payload");
		}
		caller_end(pair, &caller);
		caller_end(pair, &another);
	}
}

/* Checksums, which anybody can make, do not stand for tags. */
TEST(checksums_prove_nothing)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	struct data_header header;
	struct caller caller;
	struct sealed push = { 0 };
	uint32_t check;

	caller_begin(pair, &caller, DATA_FEATURE_CHECKSUM);
	raw_push_header(&header, 1, PAYLOAD_LEN);
	data_header_encode(&header);
	check = htole32(crc32c(0, &header, sizeof(header)));
	memcpy(push.bytes, &header, sizeof(header));
	memcpy(push.bytes + sizeof(header), &check, sizeof(check));
	refused(pair, &caller, &push, sizeof(push), "header");
	caller_end(pair, &caller);
}

/* Who says that it needs none has them all the same: else whoever is between the two could say so for it. */
TEST(one_side_that_wants_them_is_enough)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	struct sealed push, answer;
	struct caller caller;

	caller_begin(pair, &caller, DATA_FEATURE_NONE);
	make_push(&caller, 1, &push);
	exchange(pair, &caller, &push, &answer);
	memset(push.bytes + sizeof(struct data_header), 0, DATA_TAG_LEN);
	refused(pair, &caller, &push, sizeof(push), "header");
	caller_end(pair, &caller);
}

/* The rest never comes: of what was begun nothing is used. */
TEST(what_is_cut_off_is_not_used)
{
	for (size_t len = 1; len < MESSAGE_LEN; len += 7) {
		_cleanup_(pair_freep) struct pair *pair = server_new(0);
		struct sealed push;
		struct caller caller;

		caller_begin(pair, &caller, DATA_FEATURE_CHECKSUM);
		make_push(&caller, 1, &push);
		raw_send(pair, caller.fd, &push, len);
		caller.fd = fd_close(caller.fd);
		PAIR_UNTIL(pair, pair->b.n_lost);
		ASSERT_STR(pair->b.lost_why, "closed the connection inside a message");
		ASSERT_EQ(pair->b.n_deliveries, 0);
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
		caller_end(pair, &caller);
	}
}
