/*
 * What RDMA adds to the contract: lanes that break and come back, calls that are taken up over TCP, memory that is used
 * where it lies, peers that break the rules. On the devices of BPS_TEST_RDMA; the first tests need none.
 */
#include "transport/peer/delivery.h"
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport_pair.h"
#include <sys/mman.h>

#define LIMIT_S 300
#define LEN	(100 << 10)

static const struct pair_variant variants[] = {
	{ "rdma", false, 0, 1, true },
	{ "rdma, thread", false, 1, 1, true },
};

#define TEST_BOTH(name)                                 \
	static void name(const struct pair_variant *v); \
	TEST_TIMEOUT(name##_home, LIMIT_S)              \
	{                                               \
		name(&variants[0]);                     \
	}                                               \
	TEST_TIMEOUT(name##_thread, LIMIT_S)            \
	{                                               \
		name(&variants[1]);                     \
	}                                               \
	static void name(const struct pair_variant *v)

/* Any machine */

static int transport_with(enum transport_kind kind, const char *devices, struct pair *pair,
			  struct transport **ret)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 1, false } };
	struct transport_params params;

	pair_params(pair, &config, &pair->b, &params);
	params.rdma.kind = kind;
	params.rdma.devices = devices;
	return transport_new(&params, ret);
}

TEST(a_device_that_is_not_there)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 1, false } };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
	_cleanup_(transport_freep) struct transport *transport = NULL;
	char memory[64];

	ASSERT_TRUE(transport_with(TRANSPORT_RDMA, "nonesuch", pair, &transport) < 0);
	ASSERT_OK(transport_with(TRANSPORT_AUTO, "nonesuch", pair, &transport));
	/* Harmless. */
	ASSERT_OK(transport_memory_add(transport, NULL, memory, sizeof(memory)));
	(void)transport_memory_remove(transport, memory, NULL);
}

/* With devices */

static struct pair *pair_of(const struct pair_variant *v, enum transport_kind kind)
{
	struct pair_config config = { .variant = *v, .key_a = "key", .key_b = "key", .kind = kind };

	return pair_new_with(&config);
}

static struct transport_rdma_counters counters_of(const struct pair_side *side)
{
	struct transport_rdma_counters counters;

	transport_rdma_counters(side->transport, &counters);
	return counters;
}

static struct rdma_link *link_of(const struct pair_side *side)
{
	struct rdma *rdma = side->transport->rdma;
	struct rdma_link *link;

	list_for_each (link, &rdma->links, link)
		if (link->state == LINK_UP && !link->lane->is_closing)
			return link;
	return NULL;
}

/* As a cable that is pulled would, only sooner. */
static void break_link(const struct pair_side *side)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct rdma_link *link = link_of(side);

	ASSERT_TRUE(link);
	ASSERT_OK(link->rdma->verbs->modify_qp(link->qp, &attr, IBV_QP_STATE));
}

static const char *described(struct pair *pair)
{
	static char text[64];
	struct transport_peer_info *infos;
	size_t n;

	ASSERT_OK(transport_peers(pair->a.transport, &infos, &n));
	ASSERT_EQ(n, 1);
	(void)snprintf(text, sizeof(text), "%s", infos[0].transport);
	free(infos);
	return text;
}

struct echoes {
	struct pair_call calls[24];
	char *payload, *rooms;
	size_t n;
};

static void echoes_begin(struct pair *pair, struct echoes *echoes, size_t n)
{
	echoes->n = n;
	echoes->payload = malloc(LEN);
	echoes->rooms = calloc(n, LEN);
	pair_fill(echoes->payload, LEN, 9);
	for (size_t i = 0; i < n; i++) {
		size_t len = i % 3 == 2 ? 100 : LEN;

		pair_call_init(&echoes->calls[i], echoes->payload, len, echoes->rooms + i * LEN,
			       LEN);
		echoes->calls[i].call.header.round = i + 1;
		pair_call_begin(pair, &echoes->calls[i]);
	}
}

static void echoes_end(struct pair *pair, struct echoes *echoes)
{
	for (size_t i = 0; i < echoes->n; i++) {
		struct pair_call *call = &echoes->calls[i];

		PAIR_UNTIL(pair, call->n_done);
		ASSERT_OK(call->call.status);
		ASSERT_EQ(call->n_done, 1);
		ASSERT_EQ(call->n_sent, 1);
		ASSERT_EQ(call->call.answer.round, i + 1);
		ASSERT_TRUE(pair_check(call->call.target, call->call.answer.len, 9));
	}
	free(echoes->payload);
	free(echoes->rooms);
}

/* Parts go by TCP until the lane is there, then by it. */
TEST_BOTH(both_ends_have_it)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_AUTO);
	struct echoes echoes;

	pair->server->on_call = pair_on_call_echo;
	echoes_begin(pair, &echoes, 1);
	echoes_end(pair, &echoes);
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	ASSERT_CONTAINS(described(pair), "rdma ");
	echoes_begin(pair, &echoes, 3);
	echoes_end(pair, &echoes);
	ASSERT_INT(counters_of(&pair->a).bytes_moved, >=, 2 * (2 * LEN + 100));
	ASSERT_EQ(counters_of(&pair->a).links, 1);
}

/* Of registered memory no byte is copied by a processor; each piece of memory is one region. */
static void use_memory_where_it_lies(const struct pair_variant *v, bool has_windows)
{
	struct pair_config config = { .variant = *v,
				      .key_a = "key",
				      .key_b = "key",
				      .windows = has_windows ? TRANSPORT_WINDOWS_ON
							     : TRANSPORT_WINDOWS_OFF };
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
	struct transport_rdma_counters before, after;
	struct pair_call call;
	struct block *block;
	char *arena;

	ASSERT_EQ(pair->a.transport->rdma->devices[0].has_windows, has_windows);
	arena = mmap(NULL, 4 * LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(arena != MAP_FAILED);
	ASSERT_OK(transport_memory_add(pair->a.transport, NULL, arena, 4 * LEN));
	pair->server->on_call = pair_on_call_echo;
	pair_fill(arena, LEN, 3);
	for (unsigned i = 0; i < 3; i++) {
		before = counters_of(&pair->a);
		pair_call_init(&call, arena, LEN, arena + 2 * LEN, LEN);
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_STR(call.call.text, "");
		ASSERT_OK(call.call.status);
		ASSERT_TRUE(pair_check(arena + 2 * LEN, LEN, 3));
	}
	after = counters_of(&pair->a);
	ASSERT_EQ(after.bytes_copied, 0);
	ASSERT_EQ(after.regions, before.regions); /* the lane's and the arena's */
	ASSERT_EQ(after.regions, 2);
	ASSERT_EQ(counters_of(&pair->b).bytes_copied, 0);
	ASSERT_EQ(counters_of(&pair->b).regions, 2); /* the lane's and the slab's */

	/* The same from a block. */
	ASSERT_OK(block_new(pair->blocks, LEN, NULL, &block));
	pair_fill(block->data, LEN, 4);
	pair_call_init(&call, block->data, LEN, arena, LEN);
	call.call.payload_block = block;
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_TRUE(pair_check(arena, LEN, 4));
	ASSERT_EQ(counters_of(&pair->a).bytes_copied, 0);

	/* And without telling: by way of a copy. */
	(void)transport_memory_remove(pair->a.transport, arena, NULL);
	pair_call_init(&call, arena, LEN, arena + 2 * LEN, LEN);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_TRUE(pair_check(arena + 2 * LEN, LEN, 4));
	ASSERT_EQ(counters_of(&pair->a).bytes_copied, 2 * LEN);
	(void)munmap(arena, 4 * LEN);
}

TEST_BOTH(memory_is_used_where_it_lies)
{
	use_memory_where_it_lies(v, false);
}

TEST_BOTH(memory_is_used_where_it_lies_through_windows)
{
	use_memory_where_it_lies(v, true);
}

/* 5 GiB of addresses over little memory: what lies beyond 4 GiB is reached. */
TEST_BOTH(a_region_of_more_than_4_gib)
{
	const size_t piece = 64 << 20, len = 80 * piece, from = len - piece, to = from + 2 * LEN;
	_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_RDMA);
	int fd = memfd_create("arena", MFD_CLOEXEC);
	struct pair_call call;
	uint64_t copied = 0;
	char *arena;

	ASSERT_TRUE(fd >= 0);
	ASSERT_OK(ftruncate(fd, (off_t)piece));
	arena = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	ASSERT_TRUE(arena != MAP_FAILED);
	for (size_t at = 0; at < len; at += piece)
		ASSERT_TRUE(mmap(arena + at, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
				 fd, 0) == arena + at);
	ASSERT_OK(transport_memory_add(pair->a.transport, NULL, arena, len));
	pair->server->on_call = pair_on_call_echo;
	pair_fill(arena + from, LEN, 3);
	/* It is registered while the first is copied. */
	for (unsigned i = 0; i < 2; i++) {
		pair_call_init(&call, arena + from, LEN, arena + to, LEN);
		copied = counters_of(&pair->a).bytes_copied;
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		ASSERT_TRUE(pair_check(arena + to, LEN, 3));
		PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, arena));
	}
	ASSERT_EQ(counters_of(&pair->a).bytes_copied, copied);
	ASSERT_INT(counters_of(&pair->a).bytes_pinned, >, len);
	(void)transport_memory_remove(pair->a.transport, arena, NULL);
	(void)munmap(arena, len);
	close(fd);
}

/* Calls that the server holds, unanswered, when the lane breaks: it gets none twice, and each answer arrives. */
TEST_BOTH(calls_outlive_their_lane)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_AUTO);
	struct echoes echoes;

	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	echoes_begin(pair, &echoes, 9);
	PAIR_UNTIL(pair, pair->server->n_deliveries == 9);
	break_link(&pair->a);
	PAIR_UNTIL(pair,
		   counters_of(&pair->a).links_broken && !link_of(&pair->a) && !link_of(&pair->b));
	for (unsigned i = 0; i < 4; i++)
		pair_echo(pair, pair_take(pair));
	while (pair->server->n_deliveries > 9)
		ASSERT_TRUE(!"delivered twice");
	for (unsigned i = 4; i < 9; i++)
		pair_echo(pair, pair_take(pair));
	echoes_end(pair, &echoes);
	ASSERT_EQ(pair->server->n_deliveries, 9);
	ASSERT_INT(counters_of(&pair->a).calls_moved, ==, 9);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

static unsigned n_links(const struct pair_side *side)
{
	struct rdma_link *link;
	unsigned n = 0;

	list_for_each (link, &side->transport->rdma->links, link)
		n += link->state == LINK_UP && !link->lane->is_closing;
	return n;
}

static unsigned n_accepting(const struct pair_side *side)
{
	const struct peer *peer;
	unsigned n = 0;

	list_for_each (peer, &side->transport->peers, link)
		n += peer->n_accepting;
	return n;
}

static struct pair *pair_of_two_rails(const struct pair_variant *v, enum transport_kind kind,
				      enum transport_windows windows)
{
	struct pair_config config = { .variant = *v,
				      .key_a = "key",
				      .key_b = "key",
				      .kind = kind,
				      .has_two_rails = true,
				      .windows = windows };
	struct pair *pair = pair_new_with(&config);

	PAIR_UNTIL(pair, n_links(&pair->a) == 2 && n_links(&pair->b) == 2);
	return pair;
}

/* Of two rails one breaks: all goes on by the other. Then that one breaks too. */
static void lose_rails(const struct pair_variant *v, bool is_server)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_of_two_rails(v, TRANSPORT_AUTO, TRANSPORT_WINDOWS_AUTO);
	const struct pair_side *side = is_server ? &pair->b : &pair->a;
	struct echoes echoes;

	echoes_begin(pair, &echoes, 12);
	PAIR_UNTIL(pair, pair->server->n_deliveries == 12);
	break_link(side);
	PAIR_UNTIL(pair, counters_of(&pair->a).calls_moved);
	for (size_t i = 0; i < 12; i++)
		ASSERT_TRUE(echoes.calls[i].call.message.lane->rdma);
	for (unsigned i = 0; i < 4; i++)
		pair_echo(pair, pair_take(pair));
	break_link(side);
	PAIR_UNTIL(pair, counters_of(&pair->a).links_broken == 2);
	for (unsigned i = 4; i < 12; i++)
		pair_echo(pair, pair_take(pair));
	echoes_end(pair, &echoes);
	ASSERT_EQ(pair->server->n_deliveries, 12);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

TEST_BOTH(another_rail_comes_first)
{
	lose_rails(v, false);
	lose_rails(v, true);
}

/* With no TCP allowed a rail less is no loss of the peer. */
/*
 * Calls that come by TCP, as two rails have failed them, before the server knows of either: it closes both, one after the
 * other, and then looks for what they had brought.
 */
TEST_TIMEOUT(calls_that_two_rails_have_failed, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_of_two_rails(&variants[0], TRANSPORT_AUTO, TRANSPORT_WINDOWS_AUTO);
	struct pair_call calls[3];
	const struct list *links = &pair->a.transport->rdma->links;
	unsigned rail = list_first(links, struct rdma_link, link)->rail;
	unsigned last = list_last(links, struct rdma_link, link)->rail;
	unsigned flags =
		DATA_FLAG_MOVED | rail << DATA_FLAG_RAIL_SHIFT | last << DATA_FLAG_LAST_SHIFT;

	ASSERT_INT(rail, !=, last);
	pair->server->on_call = pair_on_call_echo;
	for (uint32_t i = 0; i < 3; i++) {
		pair_call_init(&calls[i], NULL, 0, NULL, 0);
		calls[i].call.header.op = DATA_DECLARE; /* which goes by TCP */
		pair_call_begin(pair, &calls[i]);
		/* Before it is written, which the loop does. */
		calls[i].call.header.op = DATA_PUSH;
		calls[i].call.header.flags = (uint16_t)flags;
		calls[i].call.header.moved = 1000 + i;
	}
	for (uint32_t i = 0; i < 3; i++) {
		PAIR_UNTIL(pair, calls[i].n_done);
		ASSERT_OK(calls[i].call.status);
	}
	ASSERT_EQ(pair->server->n_deliveries, 3);
	PAIR_UNTIL(pair, counters_of(&pair->a).links_broken == 2);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

TEST_BOTH(a_must_with_two_rails)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_of_two_rails(v, TRANSPORT_RDMA, TRANSPORT_WINDOWS_AUTO);
	struct echoes echoes;

	echoes_begin(pair, &echoes, 12);
	PAIR_UNTIL(pair, pair->server->n_deliveries == 12);
	break_link(&pair->a);
	PAIR_UNTIL(pair, counters_of(&pair->a).calls_moved);
	for (unsigned i = 0; i < 12; i++)
		pair_echo(pair, pair_take(pair));
	echoes_end(pair, &echoes);
	ASSERT_EQ(pair->server->n_deliveries, 12);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

/* Wherever in the middle of messages they break. */
TEST_BOTH(rails_break_among_calls)
{
	for (unsigned turns = 0; turns < 12; turns++) {
		_cleanup_(pair_freep) struct pair *pair =
			pair_of_two_rails(v, TRANSPORT_AUTO, TRANSPORT_WINDOWS_AUTO);
		struct echoes echoes;

		pair->server->on_call = pair_on_call_echo;
		echoes_begin(pair, &echoes, 24);
		for (unsigned i = 0; i < turns; i++)
			pair_turn(pair);
		break_link(turns % 2 ? &pair->b : &pair->a);
		for (unsigned i = 0; i < turns; i++)
			pair_turn(pair);
		if (link_of(turns % 3 ? &pair->b : &pair->a))
			break_link(turns % 3 ? &pair->b : &pair->a);
		echoes_end(pair, &echoes);
		ASSERT_EQ(pair->server->n_deliveries, 24);
		ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	}
}

/* Wherever in the middle of messages it breaks, at either end. */
static void break_among_calls(const struct pair_variant *v, bool is_server)
{
	for (unsigned turns = 0; turns < 12; turns++) {
		_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_AUTO);
		struct echoes echoes;

		pair->server->on_call = pair_on_call_echo;
		PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
		echoes_begin(pair, &echoes, 24);
		for (unsigned i = 0; i < turns; i++)
			pair_turn(pair);
		break_link(is_server ? &pair->b : &pair->a);
		echoes_end(pair, &echoes);
		ASSERT_EQ(pair->server->n_deliveries, 24);
		ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	}
}

TEST_BOTH(the_callers_end_breaks_among_calls)
{
	break_among_calls(v, false);
}

TEST_BOTH(the_servers_end_breaks_among_calls)
{
	break_among_calls(v, true);
}

TEST_BOTH(a_lane_comes_back)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_AUTO);
	struct echoes echoes;

	pair->server->on_call = pair_on_call_echo;
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	break_link(&pair->b);
	PAIR_UNTIL(pair, !link_of(&pair->a) && !link_of(&pair->b));
	ASSERT_STR(described(pair), "tcp");
	echoes_begin(pair, &echoes, 3);
	echoes_end(pair, &echoes);
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	echoes_begin(pair, &echoes, 3);
	echoes_end(pair, &echoes);
	ASSERT_EQ(counters_of(&pair->a).links, 2);
}

/* Where TCP will not do, a peer without RDMA is none. */
TEST_BOTH(rdma_is_a_must)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(v, TRANSPORT_RDMA);
	struct pair_call call;

	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, pair->server->n_deliveries);
	break_link(&pair->a);
	PAIR_UNTIL(pair, pair->a.n_lost && pair->b.n_lost);
	ASSERT_EQ(call.n_done, 1);
	ASSERT_EQ(call.call.status, -ECONNRESET);
	ASSERT_CONTAINS(call.call.text, "node b (127.0.0.1:");
}

TEST_TIMEOUT(rdma_is_a_must_and_not_there, LIMIT_S)
{
	struct pair_config config = { .variant = variants[0] };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
	struct transport_params params;
	struct pair_call call;

	pair_params(pair, &config, &pair->b, &params);
	params.rdma.kind = TRANSPORT_TCP;
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u",
		       transport_port(pair->b.transport));
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &pair->peer));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done && pair->a.n_lost);
	ASSERT_EQ(call.call.status, -EPROTONOSUPPORT);
	ASSERT_CONTAINS(call.call.text, "has no RDMA");
}

/* Bytes of ours in the place of a message's: what a peer that breaks the rules could send. */
struct wild {
	struct data_rdma head;
	struct data_header header;
	char payload[DATA_RDMA_EAGER];
};

static void wild_send(struct rdma_link *link, const struct wild *wild, size_t len)
{
	unsigned char *slot =
		link->memory + (size_t)(RDMA_RECEIVES + RDMA_SENDS - 1) * RDMA_SLOT_LEN;
	struct ibv_sge sge = { .addr = (uintptr_t)slot,
			       .length = (uint32_t)len,
			       .lkey = link->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)1 << 32 | (RDMA_SENDS - 1),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SOLICITED,
	};
	struct ibv_send_wr *bad;

	memcpy(slot, wild, len);
	ASSERT_OK(ibv_post_send(link->qp, &wr, &bad));
}

static void wild_init(struct wild *wild, uint32_t len)
{
	*wild = (struct wild){ .head = { .kind = RDMA_MESSAGE } };
	raw_push_header(&wild->header, 0x01000007, len);
}

/* What ends the connection, and with it the peer. */
static void wild_case(const struct wild *wild, size_t len, const char *why)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(&variants[0], TRANSPORT_AUTO);

	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	wild_send(link_of(&pair->a), wild, len);
	PAIR_UNTIL(pair, pair->b.n_lost && pair->a.n_lost);
	ASSERT_CONTAINS(pair->b.lost_why, "protocol error");
	ASSERT_CONTAINS(pair->b.lost_why, why);
	ASSERT_EQ(pair->b.n_deliveries, 0);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
}

TEST_TIMEOUT(messages_that_break_the_rules, LIMIT_S)
{
	struct wild wild;
	const size_t whole = sizeof(wild.head) + sizeof(wild.header);

	wild_init(&wild, 0);
	wild_case(&wild, 5, "without a head");
	wild_case(&wild, sizeof(wild.head) + 5, "without a header");
	wild_case(&wild, whole + 1, "another length than it says");
	wild.head.credits = 60000;
	wild_case(&wild, whole, "more credits");
	wild_init(&wild, 100);
	wild_case(&wild, whole + 99, "another length than it says");
	wild_init(&wild, LEN);
	wild_case(&wild, whole + 1, "another length than it says");
	wild_init(&wild, 0);
	wild.header.magic++;
	wild_case(&wild, whole, "not a data header");
	wild_init(&wild, 0);
	wild.header.flags = DATA_FLAG_MOVED | DATA_RDMA_RAILS
						      << DATA_FLAG_RAIL_SHIFT; /* this one */
	wild_case(&wild, whole, "moved to or from where it cannot be");
	wild_init(&wild, 0);
	wild.header.op = DATA_RESULT;
	wild_case(&wild, whole, "an answer to no call");
	wild_init(&wild, 0);
	wild.head.kind = RDMA_GRANT;
	wild_case(&wild, sizeof(wild.head), "not offered");
	wild_case(&wild, whole, "something behind it");
	wild_init(&wild, LEN);
	wild.head.flags = DATA_RDMA_WRITTEN;
	wild_case(&wild, whole, "written nowhere");
	wild_init(&wild, 0);
	wild.head.kind = RDMA_PLACED;
	wild_case(&wild, sizeof(wild.head), "not announced");
	wild.head.kind = 77;
	wild_case(&wild, sizeof(wild.head), "no such kind");
	wild.head.kind = 0;
	wild_case(&wild, sizeof(wild.head), "no such kind");
}

/* An immediate, which nobody sends. */
TEST_TIMEOUT(a_payload_out_of_nowhere, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(&variants[0], TRANSPORT_AUTO);
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
				  .imm_data = 0x01020304,
				  .send_flags = IBV_SEND_SOLICITED },
			   *bad;

	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	ASSERT_OK(ibv_post_send(link_of(&pair->a)->qp, &wr, &bad));
	PAIR_UNTIL(pair, pair->b.n_lost && pair->a.n_lost);
	ASSERT_CONTAINS(pair->b.lost_why, "an immediate");
}

/* Where a key does not open the memory the card itself refuses, and only the lane is lost. */
TEST_TIMEOUT(memory_that_was_not_granted, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(&variants[0], TRANSPORT_AUTO);
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct rdma_link *link;
	struct ibv_sge sge;
	struct echoes echoes;

	pair->server->on_call = pair_on_call_echo;
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	link = link_of(&pair->a);
	sge = (struct ibv_sge){ (uintptr_t)link->memory, 64, link->mr->lkey };
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.wr.rdma.remote_addr = (uintptr_t)link_of(&pair->b)->memory;
	wr.wr.rdma.rkey = link_of(&pair->b)->mr->rkey;
	ASSERT_OK(ibv_post_send(link->qp, &wr, &bad));
	PAIR_UNTIL(pair, counters_of(&pair->a).links_broken);
	echoes_begin(pair, &echoes, 3);
	echoes_end(pair, &echoes);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

/* What b may write to of a: exactly what a call of a's named, by the connection that it came by, until it is answered. */

#define WINDOW_LEN (64 << 10)

struct window {
	struct pair *pair;
	char *arena; /* the room in the middle of it */
	struct pair_call call;
	struct delivery *delivery;
	struct rdma_target target;
	struct rdma_link *link, *other; /* b's: that of the call, and not */
};

static void window_begin(struct window *window)
{
	struct pair *pair = window->pair =
		pair_of_two_rails(&variants[0], TRANSPORT_AUTO, TRANSPORT_WINDOWS_ON);
	struct incoming *incoming;
	struct rdma_link *link;

	window->arena = mmap(NULL, 3 * WINDOW_LEN, PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(window->arena != MAP_FAILED);
	ASSERT_OK(transport_memory_add(pair->a.transport, NULL, window->arena, 3 * WINDOW_LEN));
	pair_call_init(&window->call, NULL, 0, window->arena + WINDOW_LEN, WINDOW_LEN);
	pair_call_begin(pair, &window->call);
	PAIR_UNTIL(pair, pair->server->n_deliveries);
	window->delivery = pair_take(pair);
	incoming = container_of(window->delivery, struct incoming, delivery);
	window->target = incoming->message.target;
	window->link = incoming->lane->rdma;
	list_for_each (link, &pair->b.transport->rdma->links, link)
		if (link->state == LINK_UP && link != window->link)
			window->other = link;
	ASSERT_TRUE(window->other && window->target.is_window);
	ASSERT_EQ(window->target.len, WINDOW_LEN);
	ASSERT_EQ(window->target.address, (uintptr_t)window->arena + WINDOW_LEN);
}

static void window_write(const struct rdma_link *link, uint64_t address, uint32_t key)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1 }, *bad;
	struct ibv_sge sge = { (uintptr_t)link->memory, 64, link->mr->lkey };

	memset(link->memory, 'x', 64); /* a receive's, if that should come in between */
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = address;
	wr.wr.rdma.rkey = key;
	ASSERT_OK(ibv_post_send(link->qp, &wr, &bad));
}

/* It breaks the connection, writes nothing, and does no harm to the call. */
static void window_refuses(struct window *window, const struct rdma_link *link, uint64_t address,
			   uint32_t key)
{
	struct pair *pair = window->pair;

	window_write(link, address, key);
	PAIR_UNTIL(pair, counters_of(&pair->b).links_broken);
	for (size_t i = 0; i < 3 * WINDOW_LEN; i++)
		ASSERT_EQ(window->arena[i], 0);
	if (!window->call.n_done) {
		pair_echo(pair, window->delivery);
		PAIR_UNTIL(pair, window->call.n_done);
	}
	ASSERT_OK(window->call.call.status);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	(void)transport_memory_remove(pair->a.transport, window->arena, NULL);
	(void)munmap(window->arena, 3 * WINDOW_LEN);
	pair_free(pair);
}

/* Looked at while a device may be writing there, on purpose. */
__attribute__((no_sanitize("thread"))) static bool has_come_and_goes(volatile char *at)
{
	if (at[63] != 'x')
		return false;
	for (unsigned i = 0; i < 64; i++)
		at[i] = 0;
	return true;
}

TEST_TIMEOUT(a_window_is_open_to_who_was_asked, LIMIT_S)
{
	struct window window;
	struct pair *pair;

	window_begin(&window);
	pair = window.pair;
	window_write(window.link, window.target.address, window.target.key);
	PAIR_UNTIL(pair, has_come_and_goes(window.arena + WINDOW_LEN));
	window_refuses(&window, window.other, window.target.address, window.target.key);
}

TEST_TIMEOUT(a_window_is_no_wider_than_asked_for, LIMIT_S)
{
	struct ibv_device_attr attr;
	struct window window;

	window_begin(&window);
	ASSERT_OK(window.pair->a.transport->rdma->verbs->query_device(
		link_of(&window.pair->a)->port->device->context, &attr));
	if (rdma_is_soft(&attr)) {
		pair_echo(window.pair, window.delivery);
		PAIR_UNTIL(window.pair, window.call.n_done);
		pair_free(window.pair);
		TEST_SKIP("soft-RoCE does not look at the bounds of a window");
	}
	window_refuses(&window, window.link, window.target.address - WINDOW_LEN, window.target.key);
}

TEST_TIMEOUT(a_window_is_closed_by_the_answer, LIMIT_S)
{
	struct window window;

	window_begin(&window);
	pair_echo(window.pair, window.delivery);
	PAIR_UNTIL(window.pair, window.call.n_done);
	window_refuses(&window, window.link, window.target.address, window.target.key);
}

TEST_TIMEOUT(a_region_is_open_to_nobody, LIMIT_S)
{
	struct window window;
	struct rdma *rdma;
	struct ibv_mr *mr;

	window_begin(&window);
	rdma = window.pair->a.transport->rdma;
	mr = rdma_memory_find(rdma, link_of(&window.pair->a)->port->device, window.arena,
			      WINDOW_LEN);
	ASSERT_TRUE(mr);
	window_refuses(&window, window.link, (uintptr_t)window.arena, mr->rkey);
}

/* Who answers and leaves it open has broken the rules. */
TEST_TIMEOUT(a_window_that_is_left_open, LIMIT_S)
{
	struct data_header answer = { .op = DATA_RESULT };
	struct window window;
	struct pair *pair;

	window_begin(&window);
	pair = window.pair;
	container_of(window.delivery, struct incoming, delivery)->message.target.is_window = false;
	delivery_answer(window.delivery, &answer, NULL, NULL);
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_CONTAINS(pair->a.lost_why, "a window that was left open");
	ASSERT_TRUE(window.call.call.status);
	(void)munmap(window.arena, 3 * WINDOW_LEN);
	pair_free(pair);
}

/* Also where another rail has long been dialed in vain, or is being dialed. */
TEST_TIMEOUT(a_rail_that_breaks_is_dialed_soon, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_of_two_rails(&variants[0], TRANSPORT_AUTO, TRANSPORT_WINDOWS_AUTO);
	uint64_t late_ns = clock_now_ns() + 10 * LIMIT_S * NSEC_PER_SEC;
	struct rdma_peer *state = pair->peer->rdma;

	ASSERT_OK(loop_timer_set(pair->loop, &state->timer, late_ns));
	state->redial_ns = 120 * NSEC_PER_SEC;
	break_link(&pair->a);
	PAIR_UNTIL(pair, state->has_failed);
	ASSERT_TRUE(state->timer.loop && state->timer.at_ns < late_ns);
	PAIR_UNTIL(pair, n_links(&pair->a) == 2 && n_links(&pair->b) == 2);
	ASSERT_TRUE(!state->timer.loop && !state->has_failed);
	state->n_dialing++;
	break_link(&pair->a);
	PAIR_UNTIL(pair, state->has_failed);
	ASSERT_TRUE(!state->timer.loop);
	state->n_dialing--;
	rdma_dial_over(pair->peer);
	PAIR_UNTIL(pair, n_links(&pair->a) == 2 && n_links(&pair->b) == 2);
	ASSERT_EQ(pair->b.transport->port.n_accepted, 4);
	ASSERT_EQ(n_accepting(&pair->b), 0);
}

static int up_without_memory(struct peer *peer, struct rdma_link *link, unsigned rail,
			     bool is_accepted)
{
	return -ENOMEM;
}

TEST_TIMEOUT(a_rail_for_which_there_was_no_memory_is_dialed_again, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(&variants[0], TRANSPORT_AUTO);
	struct rdma *rdma = pair->a.transport->rdma;
	const struct rdma_steps *real = rdma->steps;
	struct rdma_steps steps = *real;

	steps.up = up_without_memory;
	rdma->steps = &steps;
	PAIR_UNTIL(pair, pair->peer->rdma && pair->peer->rdma->failure.status);
	ASSERT_EQ(pair->peer->rdma->failure.status, -ENOMEM);
	ASSERT_EQ(pair->peer->rdma->n_dialing, 0);
	ASSERT_TRUE(pair->peer->rdma->timer.loop);
	rdma->steps = real;
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
}

/* Of an address that has as much as it may, one of two rails comes back, and the other once there is room. */
TEST_TIMEOUT(an_address_has_its_share_of_connections, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_of_two_rails(&variants[0], TRANSPORT_AUTO, TRANSPORT_WINDOWS_AUTO);
	struct transport *transport = pair->b.transport;

	PAIR_UNTIL(pair, transport->port.n_accepted == 4);
	transport->settings.max_connections = 4;
	for (unsigned i = 1; i <= 2; i++) {
		break_link(&pair->a);
		PAIR_UNTIL(pair,
			   counters_of(&pair->a).links_broken == i && n_links(&pair->b) == 2 - i);
	}
	PAIR_UNTIL(pair, n_links(&pair->b) == 2 ||
				 (n_links(&pair->b) == 1 && pair->peer->rdma->failure.status));
	ASSERT_EQ(transport->port.n_accepted, 3);
	transport->settings.max_connections = 100;
	PAIR_UNTIL(pair, n_links(&pair->a) == 2 && n_links(&pair->b) == 2);
}

/* Shook hands by TCP with one key; by the time that a lane is made anew one side has another. */
TEST_TIMEOUT(the_key_is_proved_once_more, LIMIT_S)
{
	_cleanup_(pair_freep) struct pair *pair = pair_of(&variants[0], TRANSPORT_AUTO);
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b) &&
				 peer_find_lane(pair->peer, DATA_LANE_BEAT));
	ASSERT_OK(transport_set_key(pair->a.transport, "another", 7));
	break_link(&pair->a);
	PAIR_UNTIL(pair, !link_of(&pair->a) && !link_of(&pair->b));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	/* Refused, and asked for again after a while, when the keys are the same. */
	PAIR_UNTIL(pair, pair->peer->rdma->failure.status);
	ASSERT_CONTAINS(pair->peer->rdma->failure.text, "refused");
	ASSERT_TRUE(!link_of(&pair->a) && !link_of(&pair->b));
	ASSERT_EQ(n_accepting(&pair->b), 0);
	ASSERT_OK(transport_set_key(pair->a.transport, "key", 3));
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
}
