/* How much of what comes by TCP is copied in this process, and that it is right in whatever pieces it comes. */
#include "transport/internal.h"
#include "transport_pair.h"

#define LEN	(32u << 10)
#define N_CALLS 50

static const struct pair_variant variants[] = { { "home", false, 0, 1 },
						{ "thread", false, 1, 1 } };

static uint64_t copied(const struct pair_side *side)
{
	return metric_get(&side->transport->copied);
}

static void call_one(struct pair *pair, size_t len, uint64_t seed)
{
	static char payload[LEN], target[LEN];
	struct pair_call call;

	pair_fill(payload, len, seed);
	pair_call_init(&call, payload, len, target, sizeof(target));
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, 0);
	ASSERT_EQ(call.call.answer.len, len);
	ASSERT_TRUE(pair_check(target, len, seed));
}

/* The first of them may be, as nobody knows that it comes; then each goes straight to where it belongs. */
TEST(parts_one_by_one_are_not_copied)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		for (unsigned no_checksums = 0; no_checksums < 2; no_checksums++) {
			struct pair_config config = { .variant = variants[v],
						      .no_checksums = no_checksums };
			_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);

			pair->server->on_call = pair_on_call_echo;
			for (unsigned i = 0; i < N_CALLS; i++)
				call_one(pair, LEN, i);
			ASSERT_INT(copied(&pair->a), <=, LEN);
			ASSERT_INT(copied(&pair->b), <=, LEN);
		}
	}
}

/* What is small comes out of the buffer: a system call more for each would cost more. */
TEST(small_ones_are_copied)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(&variants[0]);

	pair->server->on_call = pair_on_call_echo;
	call_one(pair, LEN, 1);
	for (unsigned i = 0; i < N_CALLS; i++)
		call_one(pair, 100, i);
	ASSERT_INT(copied(&pair->a), >=, (N_CALLS - 1) * 100);
	ASSERT_INT(copied(&pair->b), >=, (N_CALLS - 1) * 100);
}

/* The same bytes cut elsewhere each time: large behind large, small behind large, and back. */
TEST(large_and_small_in_pieces)
{
	static const uint32_t lens[] = { LEN, LEN, 0, 100, LEN, 16u << 10, 1, LEN - 1 };
	static const size_t pieces[] = { 7, 97, 1000, 16447, 40000 };
	static unsigned char bytes[ARRAY_SIZE(lens) * (sizeof(struct data_header) + LEN)];

	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		struct pair_config config = { .variant = variants[v] };
		_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
		int fd = raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);

		for (unsigned p = 0; p < ARRAY_SIZE(pieces); p++) {
			size_t n = 0;

			for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
				struct data_header header;

				raw_push_header(&header, i + 1, lens[i]);
				data_header_encode(&header);
				memcpy(bytes + n, &header, sizeof(header));
				pair_fill(bytes + n + sizeof(header), lens[i], i);
				n += sizeof(header) + lens[i];
			}
			for (size_t at = 0, len; at < n; at += len) {
				len = MIN(pieces[p], n - at);
				raw_send(pair, fd, bytes + at, len);
				/* Then no more than a piece is there when it is read. */
				if (!variants[v].n_threads)
					pair_turn(pair);
			}
			for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
				struct delivery *delivery = pair_take(pair);

				ASSERT_EQ(delivery->header.len, lens[i]);
				ASSERT_TRUE(pair_check(delivery->payload, lens[i], i));
				delivery_fail(delivery, -EINVAL, "as it was to be");
			}
		}
		fd_close(fd);
	}
}
