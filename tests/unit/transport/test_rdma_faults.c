/*
 * RDMA where something fails: each call of the libraries, each kind of work request, the wire, the machine. On the double
 * of tests/fakeverbs. What is asked of every one: calls get their answers, each once, or an error that says what to do;
 * nothing is left behind.
 */
#include "fake.h"
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport_pair.h"
#include <sys/mman.h>
#include <sys/resource.h>

#define LEN	(100 << 10)
#define ECHOES	12
#define LIMIT_S 300

static const struct pair_variant variants[] = {
	{ "rdma", false, 0, 1, true },
	{ "rdma, thread", false, 1, 1, true },
};

static struct pair_config config_of(const struct pair_variant *v, enum transport_kind kind)
{
	return (struct pair_config){ .variant = *v, .key_a = "key", .key_b = "key", .kind = kind };
}

static struct rdma_link *link_of(const struct pair_side *side)
{
	struct rdma *rdma = side->transport->rdma;
	struct rdma_link *link;

	if (!rdma)
		return NULL;
	list_for_each (link, &rdma->links, link)
		if (link->state == LINK_UP && !link->lane->is_closing)
			return link;
	return NULL;
}

static struct transport_rdma_counters counters_of(const struct pair_side *side)
{
	struct transport_rdma_counters counters;

	transport_rdma_counters(side->transport, &counters);
	return counters;
}

struct echoes {
	struct pair_call calls[ECHOES];
	char *payload, *rooms;
	unsigned n_again;
};

/* Ended without an answer by a transport that asks for it once more, as those of jobs may. */
static bool is_to_be_repeated(const struct pair_call *call)
{
	return call->n_done && call->call.status == -ENETRESET &&
	       call->call.answer.op != DATA_ERROR;
}

/* Long ones and short ones. */
static void echoes_begin(struct pair *pair, struct echoes *echoes)
{
	pair->server->on_call = pair_on_call_echo;
	echoes->n_again = 0;
	echoes->payload = malloc(LEN);
	echoes->rooms = calloc(ECHOES, LEN);
	pair_fill(echoes->payload, LEN, 9);
	for (size_t i = 0; i < ECHOES; i++) {
		pair_call_init(&echoes->calls[i], echoes->payload, i % 3 == 2 ? 100 : LEN,
			       echoes->rooms + i * LEN, LEN);
		echoes->calls[i].call.header.round = i + 1;
		echoes->calls[i].call.is_repeatable = true;
		pair_call_begin(pair, &echoes->calls[i]);
	}
}

static void repeat(struct pair *pair, struct echoes *echoes, struct pair_call *call)
{
	uint64_t round = call->call.header.round;

	pair_call_init(call, echoes->payload, round % 3 ? LEN : 100, call->call.target, LEN);
	call->call.header.round = round;
	call->call.is_repeatable = call->call.is_again = true;
	echoes->n_again++;
	pair_call_begin(pair, call);
}

static void echoes_end(struct pair *pair, struct echoes *echoes)
{
	for (size_t i = 0; i < ECHOES; i++) {
		struct pair_call *call = &echoes->calls[i];

		PAIR_UNTIL(pair, call->n_done);
		while (is_to_be_repeated(call)) {
			repeat(pair, echoes, call);
			PAIR_UNTIL(pair, call->n_done);
		}
		ASSERT_OK(call->call.status);
		ASSERT_EQ(call->n_done, 1);
		ASSERT_EQ(call->n_sent, 1);
		ASSERT_EQ(call->call.answer.round, i + 1);
		ASSERT_TRUE(pair_check(call->call.target, call->call.answer.len, 9));
	}
	/* One that had to be repeated may have been lost before it was delivered. */
	ASSERT_INT(pair->server->n_deliveries, >=, ECHOES);
	ASSERT_INT(pair->server->n_deliveries, <=, ECHOES + echoes->n_again);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	free(echoes->payload);
	free(echoes->rooms);
}

static void echo_all(struct pair *pair)
{
	struct echoes echoes;

	echoes_begin(pair, &echoes);
	echoes_end(pair, &echoes);
}

static struct pair *pair_up(const struct pair_config *config)
{
	struct pair *pair = pair_new_with(config);

	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
	return pair;
}

/* Connections that never come up, or come up late: parts go by TCP meanwhile. */
TEST_TIMEOUT(each_call_that_makes_a_connection_fails, LIMIT_S)
{
	static const char *const calls[] = {
		"rdma_create_event_channel",
		"rdma_create_id",
		"rdma_bind_addr",
		"rdma_listen",
		"rdma_resolve_addr",
		"RDMA_CM_EVENT_ADDR_RESOLVED",
		"rdma_resolve_route",
		"RDMA_CM_EVENT_ROUTE_RESOLVED",
		"rdma_init_qp_attr",
		"rdma_connect",
		"rdma_accept",
		"rdma_establish",
		"ibv_query_device",
		"ibv_query_port",
		"ibv_alloc_pd",
		"ibv_alloc_mw",
		"ibv_reg_mr",
		"ibv_create_comp_channel",
		"ibv_create_cq",
		"ibv_create_qp",
		"ibv_modify_qp",
		"ibv_post_recv",
		"ibv_req_notify_cq",
	};

	for (size_t i = 0; i < ARRAY_SIZE(calls); i++) {
		for (unsigned nth = 1; nth <= 6; nth++) {
			struct pair_config config = config_of(&variants[nth % 2], TRANSPORT_AUTO);
			unsigned before = fake_n_calls(calls[i]);
			struct pair *pair;

			fake_fail(calls[i], nth % 2 ? ENOMEM : EIO, nth, 1);
			pair = pair_new_with(&config);
			/* Until it has failed, or there is a connection without. */
			PAIR_UNTIL(pair, fake_n_calls(calls[i]) >= before + nth ||
						 link_of(&pair->a) || !pair->a.transport->rdma ||
						 !pair->b.transport->rdma);
			echo_all(pair);
			pair_free(pair);
			fake_fail(calls[i], 0, 1, 0);
			ASSERT_EQ(fake_n_objects(), 0);
		}
	}
}

/* Whether it fails before the other rail comes up, after that, or at once with the other. */
TEST_TIMEOUT(a_rail_that_fails_is_dialed_again, LIMIT_S)
{
	static const struct {
		const char *call;
		unsigned nth, n, links;
	} cases[] = {
		{ "rdma_establish", 1, 1, 1 },
		{ "rdma_establish", 2, 1, 1 },
		{ "rdma_resolve_addr", 1, 2, 0 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
		struct pair *pair;

		config.has_two_rails = true;
		fake_fail(cases[i].call, EIO, cases[i].nth, cases[i].n);
		pair = pair_new_with(&config);
		PAIR_UNTIL(pair, pair->peer->rdma && pair->peer->rdma->has_failed &&
					 !pair->peer->rdma->n_dialing);
		ASSERT_EQ(counters_of(&pair->a).links, cases[i].links);
		ASSERT_TRUE(pair->peer->rdma->timer.loop);
		PAIR_UNTIL(pair, counters_of(&pair->a).links == 2);
		echo_all(pair);
		pair_free(pair);
		fake_fail(cases[i].call, 0, 1, 0);
	}
}

/* Under way, at either end. */
TEST_TIMEOUT(each_call_that_moves_messages_fails, LIMIT_S)
{
	static const char *const calls[] = {
		"ibv_post_send",     "ibv_post_recv", "ibv_poll_cq",
		"ibv_req_notify_cq", "ibv_reg_mr",    "ibv_alloc_mw",
	};

	for (size_t i = 0; i < ARRAY_SIZE(calls); i++) {
		for (unsigned nth = 1; nth <= 16; nth++) {
			struct pair_config config = config_of(&variants[nth % 2], TRANSPORT_AUTO);
			struct pair *pair;

			config.has_two_rails = nth % 4 == 3;
			pair = pair_up(&config);
			fake_fail(calls[i], ENOMEM, nth, 1 + nth % 3);
			echo_all(pair);
			fake_fail(calls[i], 0, 1, 0);
			pair_free(pair);
			ASSERT_EQ(fake_n_objects(), 0);
		}
	}
}

/* The caller's device loses the completions of a call that was delivered and answered: the call is not delivered twice. */
TEST_TIMEOUT(completions_are_lost, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
	struct pair *pair = pair_up(&config);
	char payload[100], target[100];
	struct pair_call call;
	uint64_t works;

	pair->server->on_call = pair_on_call_echo;
	pair_fill(payload, sizeof(payload), 9);
	pair_call_init(&call, payload, sizeof(payload), target, sizeof(target));
	call.call.is_repeatable = true;
	fake_fail("ibv_poll_cq fake0", 0, 1, UINT_MAX);
	works = fake_work().works;
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, fake_work().works >= works + 2 && !link_of(&pair->b)->sends.n);
	fake_fail("ibv_poll_cq fake0", EIO, 1, UINT_MAX);
	rdma_link_break(link_of(&pair->a), "the test polls once more");
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ENETRESET);
	ASSERT_EQ(pair->server->n_deliveries, 1);
	pair_call_init(&call, payload, sizeof(payload), target, sizeof(target));
	call.call.is_repeatable = call.call.is_again = true;
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_TRUE(pair_check(target, sizeof(target), 9));
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	fake_fail("ibv_poll_cq fake0", 0, 1, 0);
	pair_free(pair);
	ASSERT_EQ(fake_n_objects(), 0);
}

static const struct {
	enum ibv_wc_status status;
	const char *words;
} endings[] = {
	{ IBV_WC_RETRY_EXC_ERR, "no answer on the wire" },
	{ IBV_WC_RNR_RETRY_EXC_ERR, "posts no receives" },
	{ IBV_WC_LOC_PROT_ERR, "status 4" },
	{ IBV_WC_MW_BIND_ERR, "status 6" },
	{ IBV_WC_REM_ACCESS_ERR, "status 10" },
	{ IBV_WC_FATAL_ERR, "status 19" },
	{ IBV_WC_GENERAL_ERR, "status 21" },
	{ IBV_WC_WR_FLUSH_ERR, "connection was closed" },
};

/* The first, the second, ... that is posted fails: its calls go another way. */
TEST_TIMEOUT(each_work_request_fails, LIMIT_S)
{
	for (size_t i = 0; i < ARRAY_SIZE(endings); i++) {
		for (unsigned nth = 1; nth <= 20; nth++) {
			struct pair_config config = config_of(&variants[nth % 2], TRANSPORT_AUTO);
			struct pair *pair;

			config.has_two_rails = nth % 4 == 3;
			pair = pair_up(&config);
			fake_fail_work(endings[i].status, nth);
			echo_all(pair);
			pair_free(pair);
			ASSERT_EQ(fake_n_objects(), 0);
		}
	}
}

/* Where nothing else will do, the error says what it was. */
TEST_TIMEOUT(why_a_connection_ended, LIMIT_S)
{
	for (size_t i = 0; i < ARRAY_SIZE(endings); i++) {
		struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
		_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
		struct pair_call call;

		pair_call_init(&call, NULL, 0, NULL, 0);
		fake_fail_work(endings[i].status, 1);
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_EQ(call.call.status, -ECONNRESET);
		ASSERT_CONTAINS(call.call.text, endings[i].words);
		ASSERT_CONTAINS(call.call.text, "fake0");
	}
}

/* The wire */

static void wire_changes(enum fake_wire wire, uint64_t peer_timeout_ms, bool is_still)
{
	for (size_t i = 0; i < ARRAY_SIZE(variants); i++) {
		struct pair_config config = config_of(&variants[i], TRANSPORT_AUTO);
		struct pair *pair;
		struct transport_rdma_counters a, b;

		config.peer_timeout_ms = peer_timeout_ms;
		pair = pair_up(&config);
		fake_wire_set(wire);
		echo_all(pair);
		a = counters_of(&pair->a);
		b = counters_of(&pair->b);
		ASSERT_INT(a.links_broken + b.links_broken, >=, 1);
		ASSERT_EQ(a.links_still + b.links_still > 0, is_still);
		fake_wire_set(FAKE_WIRE_WHOLE);
		pair_free(pair);
		ASSERT_EQ(fake_n_objects(), 0);
	}
}

TEST_TIMEOUT(a_wire_that_is_cut, LIMIT_S)
{
	wire_changes(FAKE_WIRE_CUT, 0, false);
}

/* Nobody says that nothing arrives, while the peer is alive: what was sent is not waited for as a busy peer would be. */
TEST_REGISTER(a_queue_pair_that_stands_still, LIMIT_S,
	      "signs of life: who is silent for 3 s is lost")
{
	wire_changes(FAKE_WIRE_STILL, 3000, true);
}

/* A switch with a smaller MTU than both ends. */
TEST_TIMEOUT(packets_that_do_not_pass, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
	static char payload[LEN];
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	fake_wire_set(FAKE_WIRE_NARROW);
	pair_call_init(&call, payload, LEN, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ECONNRESET);
	ASSERT_CONTAINS(call.call.text, "packets of 4096 bytes do not pass (MTU)");
}

/* Who does not answer requests is asked again later; parts go by TCP. */
TEST_REGISTER(requests_that_are_not_answered, LIMIT_S,
	      "a deadline of 500 ms that connections by TCP must meet")
{
	struct pair_config config = config_of(&variants[1], TRANSPORT_AUTO);
	_cleanup_(pair_freep) struct pair *pair = NULL;

	config.handshake_timeout_ms = 500;
	fake_wire_set(FAKE_WIRE_DEAF);
	pair = pair_new_with(&config);
	PAIR_UNTIL(pair, pair->peer->rdma && pair->peer->rdma->failure.status);
	ASSERT_CONTAINS(pair->peer->rdma->failure.text, "no answer in time");
	echo_all(pair);
	ASSERT_EQ(counters_of(&pair->a).links, 0);
	fake_wire_set(FAKE_WIRE_WHOLE);
	PAIR_UNTIL(pair, link_of(&pair->a) && link_of(&pair->b));
}

/* The machine */

static struct pair *pair_on(const struct fake_machine *machine, struct pair_config *config)
{
	fake_machine_set(machine);
	return pair_up(config);
}

static int transport_on(const struct fake_machine *machine, enum transport_kind kind,
			struct transport **ret_transport)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 1, false } };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
	struct transport_params params;
	int r;

	fake_machine_set(machine);
	pair_params(pair, &config, &pair->b, &params);
	params.rdma.kind = kind;
	r = transport_new(&params, ret_transport);
	if (!r)
		*ret_transport = transport_free(*ret_transport);
	return r;
}

TEST(a_machine_without_a_device)
{
	struct transport *transport;

	ASSERT_EQ(transport_on(&(struct fake_machine){ .has_none = true }, TRANSPORT_RDMA,
			       &transport),
		  -ENODEV);
	ASSERT_OK(transport_on(&(struct fake_machine){ .has_none = true }, TRANSPORT_AUTO,
			       &transport));
	ASSERT_EQ(
		transport_on(&(struct fake_machine){ .is_down = true }, TRANSPORT_RDMA, &transport),
		-ENONET);
	ASSERT_OK(transport_on(&(struct fake_machine){ .is_down = true }, TRANSPORT_AUTO,
			       &transport));
}

static void limit_memlock(void)
{
	struct rlimit limit;

	ASSERT_OK(getrlimit(RLIMIT_MEMLOCK, &limit));
	limit.rlim_cur = MIN(limit.rlim_max, (rlim_t)(8 << 20)); /* what the words go by */
	ASSERT_OK(setrlimit(RLIMIT_MEMLOCK, &limit));
}

/* Not even a lane's messages can be locked: by TCP, or with words that say what to raise. */
TEST_TIMEOUT(no_memory_can_be_locked, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
	struct pair *pair;
	struct pair_call call;

	limit_memlock();
	fake_machine_set(&(struct fake_machine){ .memlock = 4096 });
	pair = pair_new_with(&config);
	PAIR_UNTIL(pair, pair->peer->rdma && pair->peer->rdma->failure.status);
	echo_all(pair);
	pair_free(pair);
	config.kind = TRANSPORT_RDMA;
	pair = pair_new_with(&config);
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ECONNRESET);
	ASSERT_CONTAINS(call.call.text, "LimitMEMLOCK=infinity");
	pair_free(pair);
	ASSERT_EQ(fake_n_objects(), 0);
}

/* Lanes can be, and blocks; a job's memory cannot: it is copied. */
TEST_TIMEOUT(a_jobs_memory_cannot_be_locked, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
	static char arena[LEN];
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	for (unsigned i = 0; i < 2; i++) {
		pair_call_init(&call, arena, LEN, arena, LEN);
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		if (i)
			break;
		/* From here on: */
		fake_machine_set(&(struct fake_machine){ .memlock = 1 });
		ASSERT_OK(transport_memory_add(pair->a.transport, NULL, arena, LEN));
	}
	ASSERT_EQ(transport_memory_regions(pair->a.transport, arena), 0);
	ASSERT_EQ(counters_of(&pair->a).bytes_copied, 4 * LEN);
	(void)transport_memory_remove(pair->a.transport, arena, NULL);
}

/* Memory of another device: addresses where there is nothing, and what is behind them for who knows. */
struct device {
	int fd;
	char *data, *behind;
};

static struct device device_new(void)
{
	struct device device = { .fd = memfd_create("device", MFD_CLOEXEC) };

	ASSERT_OK(ftruncate(device.fd, ECHOES * LEN));
	device.data = mmap(NULL, ECHOES * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	device.behind = mmap(NULL, ECHOES * LEN, PROT_READ | PROT_WRITE, MAP_SHARED, device.fd, 0);
	ASSERT_TRUE(device.data != MAP_FAILED && device.behind != MAP_FAILED);
	return device;
}

static void device_free(struct device *device)
{
	ASSERT_OK(munmap(device->data, ECHOES * LEN));
	ASSERT_OK(munmap(device->behind, ECHOES * LEN));
	ASSERT_OK(close(device->fd));
}

static void begin_directly(struct pair *pair, struct pair_call *call, char *at, uint64_t round)
{
	ASSERT_TRUE(peer_takes_direct(pair->peer, LEN));
	ASSERT_TRUE(!peer_takes_direct(pair->peer, DATA_RDMA_EAGER));
	pair_call_init(call, at, LEN, at, LEN);
	call->call.header.round = round;
	call->call.is_payload_direct = call->call.is_target_direct = true;
	call->call.is_repeatable = true;
	pair_call_begin(pair, call);
}

/* Waits for its end; goes on from the host if it has to, or makes it again from there. Returns whether it had to. */
static bool end_by_host(struct pair *pair, struct pair_call *call, const char *behind, char *host)
{
	uint64_t round = call->call.header.round;

	PAIR_UNTIL(pair, call->n_done);
	if (call->call.status != -ENOLINK && !is_to_be_repeated(call))
		return false;
	memcpy(host, behind, LEN);
	if (call->call.status == -ENOLINK) {
		call->call.payload = call->call.target = host;
		call->call.is_payload_direct = call->call.is_target_direct = false;
		call->n_done = 0;
		peer_call_on(&call->call);
		PAIR_UNTIL(pair, call->n_done);
	}
	while (is_to_be_repeated(call)) {
		pair_call_init(call, host, LEN, host, LEN);
		call->call.header.round = round;
		call->call.is_repeatable = call->call.is_again = true;
		pair_call_begin(pair, call);
		PAIR_UNTIL(pair, call->n_done);
	}
	return true;
}

/* Each call from and to a piece of it. Returns how many had to be brought to the host. */
static unsigned echo_directly(struct pair *pair, const struct device *device)
{
	static char host[LEN];
	struct pair_call calls[ECHOES];
	unsigned n_spilled = 0;

	pair->server->on_call = pair_on_call_echo;
	for (size_t i = 0; i < ECHOES; i++) {
		pair_fill(device->behind + i * LEN, LEN, i);
		begin_directly(pair, &calls[i], device->data + i * LEN, i + 1);
	}
	for (size_t i = 0; i < ECHOES; i++) {
		const char *behind = device->behind + i * LEN;
		bool is_spilled = end_by_host(pair, &calls[i], behind, host);

		ASSERT_OK(calls[i].call.status);
		ASSERT_EQ(calls[i].call.answer.len, LEN);
		ASSERT_EQ(calls[i].call.answer.round, i + 1);
		ASSERT_TRUE(pair_check(is_spilled ? host : behind, LEN, i));
		n_spilled += is_spilled;
	}
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	return n_spilled;
}

/* Nobody but devices touches it; where the connection breaks, what was under way goes on from the host, by TCP. */
TEST_TIMEOUT(memory_of_another_device, LIMIT_S)
{
	struct device device = device_new();
	unsigned n_spilled = 0;

	for (unsigned nth = 0; nth <= 24; nth++) {
		struct pair_config config = config_of(&variants[nth % 2], TRANSPORT_AUTO);
		struct pair *pair;
		struct failure failure;
		unsigned n;

		config.has_two_rails = nth % 8 == 3;
		pair = pair_up(&config);
		ASSERT_OK(transport_memory_add_direct(pair->a.transport, device.data, ECHOES * LEN,
						      device.fd, &failure));
		ASSERT_INT(transport_memory_regions(pair->a.transport, device.data), >=, 1);
		if (nth)
			fake_fail_work(IBV_WC_RETRY_EXC_ERR, nth);
		n = echo_directly(pair, &device);
		if (!nth) {
			ASSERT_EQ(n, 0);
			ASSERT_EQ(counters_of(&pair->a).bytes_copied, 0);
		}
		n_spilled += n;
		(void)transport_memory_remove(pair->a.transport, device.data, NULL);
		pair_free(pair);
		ASSERT_EQ(fake_n_objects(), 0);
	}
	ASSERT_INT(n_spilled, >, 0);
	device_free(&device);
}

static void on_call_short(struct pair_side *side, struct delivery *delivery)
{
	struct data_header header = delivery->header;
	static const char bytes[100];

	(void)side;
	header.op = DATA_RESULT;
	header.len = header.part_len = sizeof(bytes);
	delivery_answer(delivery, &header, NULL, bytes);
}

/* A result that comes along with its message would have to be copied to where nothing is. */
TEST_TIMEOUT(a_result_that_is_not_written_to_another_device, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
	struct device device = device_new();
	struct failure failure;
	struct pair_call call;

	ASSERT_OK(transport_memory_add_direct(pair->a.transport, device.data, LEN, device.fd,
					      &failure));
	pair->server->on_call = on_call_short;
	begin_directly(pair, &call, device.data, 1);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ECONNRESET);
	ASSERT_CONTAINS(call.call.text, "a result that was not written to its room");
	(void)transport_memory_remove(pair->a.transport, device.data, NULL);
	device_free(&device);
}

/* In words, and with nothing left behind; what is not direct goes on. */
TEST_TIMEOUT(memory_of_another_device_that_is_refused, LIMIT_S)
{
	struct device device = device_new();

	for (unsigned i = 0; i < 2; i++) {
		struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
		struct failure failure;
		struct pair *pair;

		config.windows = i ? TRANSPORT_WINDOWS_ON : TRANSPORT_WINDOWS_AUTO;
		pair = pair_up(&config);
		fake_fail("ibv_reg_dmabuf_mr", EOPNOTSUPP, 1, 1);
		ASSERT_EQ(transport_memory_add_direct(pair->a.transport, device.data, LEN,
						      device.fd, &failure),
			  -EOPNOTSUPP);
		ASSERT_CONTAINS(failure.text, i ? "rdma_windows = on" : "cannot be registered");
		ASSERT_EQ(transport_memory_regions(pair->a.transport, device.data), 0);
		echo_all(pair);
		pair_free(pair);
		fake_fail("ibv_reg_dmabuf_mr", 0, 1, 0);
		ASSERT_EQ(fake_n_objects(), 0);
	}
	device_free(&device);
}

TEST_TIMEOUT(paging_on_demand_where_nothing_can_be_locked, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair =
		pair_on(&(struct fake_machine){ .memlock = 4096, .has_odp = true }, &config);
	static char arena[LEN];
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	ASSERT_TRUE(pair->a.transport->rdma->devices[0].has_odp);
	ASSERT_OK(transport_memory_add(pair->a.transport, NULL, arena, LEN));
	pair_call_init(&call, arena, LEN, arena, LEN);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_EQ(counters_of(&pair->a).bytes_copied, 0);
	ASSERT_EQ(transport_memory_regions(pair->a.transport, arena), 1);
	(void)transport_memory_remove(pair->a.transport, arena, NULL);
}

/* Addresses and settings */

TEST_TIMEOUT(ipv6_addresses, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair =
		pair_on(&(struct fake_machine){ .ipv6 = 3 }, &config);

	ASSERT_EQ(pair->a.transport->rdma->ports[0].address.any.sa_family, AF_INET6);
	echo_all(pair);
}

/* One end has IPv4, the other IPv6: RDMA does not join them. */
TEST_TIMEOUT(addresses_of_two_kinds, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
	_cleanup_(pair_freep) struct pair *pair = NULL;

	fake_machine_set(&(struct fake_machine){ .ipv6 = 2 });
	pair = pair_new_with(&config);
	PAIR_UNTIL(pair, pair->peer->rdma && pair->peer->rdma->failure.status);
	ASSERT_EQ(pair->peer->rdma->failure.status, -EAFNOSUPPORT);
	echo_all(pair);
}

/* Ports with different MTUs: the lesser, at both ends. */
TEST_TIMEOUT(the_lesser_mtu, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair =
		pair_on(&(struct fake_machine){ .mtus = { IBV_MTU_4096, IBV_MTU_1024 } }, &config);

	ASSERT_EQ(fake_asked().path_mtu, IBV_MTU_1024);
	ASSERT_EQ(link_of(&pair->a)->mtu, 1024);
	ASSERT_EQ(link_of(&pair->b)->mtu, 1024);
	echo_all(pair);
}

static void on_infiniband(struct transport_params *params)
{
	params->rdma.service_level = 5;
	params->rdma.gid_index = 1; /* a GID there is no address, and any will do */
}

TEST_TIMEOUT(infiniband, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = NULL;

	config.adjust = on_infiniband;
	pair = pair_on(&(struct fake_machine){ .is_infiniband = true }, &config);
	ASSERT_EQ(fake_asked().service_level, 5);
	ASSERT_TRUE(!fake_asked().is_global);
	echo_all(pair);
}

static void on_roce(struct transport_params *params)
{
	params->rdma.traffic_class = 106;
	params->rdma.gid_index = 3;
}

TEST_TIMEOUT(traffic_class_and_gid, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = NULL;

	config.adjust = on_roce;
	pair = pair_up(&config);
	ASSERT_EQ(fake_asked().traffic_class, 106);
	ASSERT_EQ(fake_asked().tos, 106);
	ASSERT_EQ(fake_asked().gid_index, 3);
	ASSERT_TRUE(fake_asked().is_global);
	ASSERT_EQ(fake_asked().retries, 7);
	echo_all(pair);
}

static void on_a_gid_that_is_none(struct transport_params *params)
{
	params->rdma.gid_index = 2;
}

TEST(a_gid_that_is_not_the_address)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_AUTO);
	_cleanup_(pair_freep) struct pair *pair = NULL;

	config.adjust = on_a_gid_that_is_none;
	pair = pair_new_with(&config);
	ASSERT_TRUE(!pair->a.transport->rdma);
	echo_all(pair);
}

/* Devices without windows of type 2B: keys of regions are told, and the log says what that means. */
TEST_TIMEOUT(devices_without_windows, LIMIT_S)
{
	struct pair_config config = config_of(&variants[1], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair =
		pair_on(&(struct fake_machine){ .has_no_windows = true }, &config);

	ASSERT_TRUE(!pair->a.transport->rdma->devices[0].has_windows);
	echo_all(pair);
}

/* Work requests that are ready together are posted together, and who is awake is not woken. */
TEST_TIMEOUT(posts_and_wake_ups_are_few, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
	struct fake_work before = fake_work(), after;

	echo_all(pair);
	after = fake_work();
	/* For each: offer, grant, write and placed, write and answer. */
	ASSERT_INT(after.works - before.works, >=, 4 * ECHOES);
	ASSERT_INT(after.posts - before.posts, <, after.works - before.works);
}

/* One after another: each message wakes its receiver, and a payload that has arrived its caller; an answer that has nobody. */
TEST_TIMEOUT(answers_that_have_arrived_wake_nobody, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);
	struct fake_work before, after;
	struct pair_call call;
	unsigned n = 50;
	char *arena =
		mmap(NULL, 2 * LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(arena != MAP_FAILED);
	pair_fill(arena, LEN, 9);
	ASSERT_OK(transport_memory_add(pair->a.transport, NULL, arena, 2 * LEN));
	pair->server->on_call = pair_on_call_echo;
	before = fake_work();
	for (unsigned i = 0; i < n; i++) {
		pair_call_init(&call, arena, LEN, arena + LEN, LEN);
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
	}
	after = fake_work();
	ASSERT_INT(after.wake_ups - before.wake_ups, <=, 5 * n + n / 2);
	(void)transport_memory_remove(pair->a.transport, arena, NULL);
	(void)munmap(arena, 2 * LEN);
}

/* Who calls is woken by what has left, but not while grants are to come; nobody is by answers, unless they are in the way. */
TEST(who_is_woken_by_what)
{
	struct lane lane = { .makes_calls = true };
	struct rdma_link *link = calloc(1, sizeof(*link));
	struct message offered = { 0 };

	ASSERT_TRUE(link);
	link->lane = &lane;
	list_init(&link->awaiting);
	list_init(&link->granted);
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_ALL);
	list_push_back(&link->awaiting, &offered.link);
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_MESSAGES);
	link->sends.n = RDMA_SENDS /
			2; /* soon no slot is free: not even for a credit, which a grant may need */
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_ALL);
	link->sends.n = 1;
	link->poll.is_late = true;
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_ALL);
	link->poll.is_late = false;
	list_remove(&offered.link);

	lane.makes_calls = false;
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_MESSAGES);
	link->grants.n = 1;
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_ALL);
	link->sends.n = 0;
	ASSERT_EQ(rdma_arming_wanted(link), RDMA_ARMED_MESSAGES);
	free(link);
}

/* But they are looked for: what an answer held is let go without a message that comes. */
TEST_TIMEOUT(answers_that_have_arrived_are_let_go, LIMIT_S)
{
	struct pair_config config = config_of(&variants[0], TRANSPORT_RDMA);
	_cleanup_(pair_freep) struct pair *pair = pair_up(&config);

	echo_all(pair);
	PAIR_UNTIL(pair, !lane_queued(link_of(&pair->b)->lane));
}
