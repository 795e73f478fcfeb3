/* The etcd source against an etcd by hand, which answers what a real one does seldom or never. */
#include "base/clock.h"
#include "cluster/cluster.h"
#include "cluster/etcd/wire.h"
#include "grpc_test.h"
#include "proto/etcd.pb-c.h"
#include "proto/pack.h"
#include "rpc/rpc.h"
#include "test.h"

#include <stdio.h>

enum { RANGE, TXN, GRANT, KEEP_ALIVE, WATCH, N_METHODS };
static const char *const paths[N_METHODS] = { "/etcdserverpb.KV/Range", "/etcdserverpb.KV/Txn",
					      "/etcdserverpb.Lease/LeaseGrant",
					      "/etcdserverpb.Lease/LeaseKeepAlive",
					      "/etcdserverpb.Watch/Watch" };

struct fake {
	struct rpc *rpc;
	struct rpc_method methods[N_METHODS];
	struct fake_method {
		struct fake *fake;
		unsigned n_called, n_over;
	} calls[N_METHODS];
	char address[64];
	/* Oddities, each for as many calls as it says. */
	unsigned n_garbage, n_silent, n_no_revision, n_lease_over, n_lease_unknown, n_compacted;
	bool txn_succeeds;
};

struct world {
	struct loop *loop;
	struct rpc *rpc;
	struct cluster *cluster;
	struct cluster_params params;
	struct failure failure, failed;
	unsigned n_keys;
};

#define UNTIL(w, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((w)->loop, 1000), >=, 0); \
	} while (0)

static bool take(unsigned *n)
{
	if (!*n)
		return false;
	(*n)--;
	return true;
}

static void answer(struct rpc_call *call, const ProtobufCMessage *message, bool stream, bool end)
{
	void *data;
	size_t len;

	ASSERT_OK(pack(message, RPC_MESSAGE_MAX, &data, &len));
	if (stream)
		rpc_call_send(call, data, len);
	else
		rpc_call_reply(call, data, len);
	free(data);
	if (stream && end)
		rpc_call_end(call);
}

static void answer_lease(struct fake *fake, struct rpc_call *call, unsigned method)
{
	Bps__Etcd__LeaseGrantResponse grant = BPS__ETCD__LEASE_GRANT_RESPONSE__INIT;
	Bps__Etcd__LeaseKeepAliveResponse alive = BPS__ETCD__LEASE_KEEP_ALIVE_RESPONSE__INIT;

	if (method == GRANT) {
		grant.has_id = grant.has_ttl = true;
		grant.id = 77;
		grant.ttl = 1;
		answer(call, &grant.base, false, true);
	} else if (take(&fake->n_lease_unknown)) {
		rpc_call_fail(call, -ENOENT, "etcdserver: requested lease not found");
	} else {
		alive.has_ttl = true;
		alive.ttl = take(&fake->n_lease_over) ? 0 : 1;
		answer(call, &alive.base, true, true);
	}
}

static void answer_watch(struct fake *fake, struct rpc_call *call)
{
	Bps__Etcd__WatchResponse response = BPS__ETCD__WATCH_RESPONSE__INIT;

	if (take(&fake->n_compacted)) {
		response.has_canceled = response.has_compact_revision = true;
		response.canceled = true;
		response.compact_revision = 9;
		response.cancel_reason = (char *)"compacted";
		answer(call, &response.base, true, true);
		return;
	}
	response.has_created = response.created = true;
	answer(call, &response.base, true, false);
}

static void on_called(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct fake_method *entry = user;
	struct fake *fake = entry->fake;
	unsigned method = (unsigned)(entry - fake->calls);
	Bps__Etcd__ResponseHeader header = BPS__ETCD__RESPONSE_HEADER__INIT;
	Bps__Etcd__RangeResponse range = BPS__ETCD__RANGE_RESPONSE__INIT;
	Bps__Etcd__TxnResponse txn = BPS__ETCD__TXN_RESPONSE__INIT;

	entry->n_called++;
	if (method == GRANT || method == KEEP_ALIVE) {
		answer_lease(fake, call, method);
		return;
	}
	if (method == WATCH) {
		answer_watch(fake, call);
		return;
	}
	if (take(&fake->n_silent))
		return;
	if (take(&fake->n_garbage)) {
		rpc_call_reply(call, "\xff\xff\xff garbage", 11);
		return;
	}
	header.has_revision = !take(&fake->n_no_revision);
	header.revision = 5;
	range.header = txn.header = &header;
	txn.has_succeeded = true;
	txn.succeeded = fake->txn_succeeds;
	answer(call, method == RANGE ? &range.base : &txn.base, false, true);
}

static void on_call_over(void *user, struct rpc_call *call)
{
	((struct fake_method *)user)->n_over++;
}

static void fake_start(struct world *w, struct fake *fake)
{
	uint16_t port;

	ASSERT_OK(rpc_new(w->loop, &fake->rpc));
	for (unsigned i = 0; i < N_METHODS; i++) {
		fake->calls[i].fake = fake;
		fake->methods[i] = (struct rpc_method){ .path = paths[i],
							.called = on_called,
							.cancelled = on_call_over,
							.user = &fake->calls[i] };
		rpc_add_method(fake->rpc, &fake->methods[i]);
	}
	ASSERT_OK(
		rpc_listen(fake->rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS, NULL, &port, &w->failure));
	(void)snprintf(fake->address, sizeof(fake->address), "127.0.0.1:%u", port);
}

static void on_view(void *user, struct view *view)
{
}

static void on_key(void *user, const void *key, size_t len)
{
	((struct world *)user)->n_keys++;
}

static void on_failed(void *user, const struct failure *failure)
{
	((struct world *)user)->failed = *failure;
}

static void world_start(struct world *w, const char *endpoints)
{
	ASSERT_OK(rpc_new(w->loop, &w->rpc));
	w->params = (struct cluster_params){
		.loop = w->loop,
		.rpc = w->rpc,
		.source = "etcd",
		.etcd_endpoints = endpoints,
		.etcd_prefix = "/test",
		.self = { .id = 7, .name = "a", .address = "a.example:9690", .roles = ROLE_SERVER },
		.lease_ms = 1000,
		.view_changed = on_view,
		.data_key_known = on_key,
		.failed = on_failed,
		.user = w,
	};
	ASSERT_OK(cluster_new(&w->params, &w->cluster));
}

static void world_stop(struct world *w, struct fake *fake)
{
	cluster_free(w->cluster);
	rpc_free(w->rpc);
	if (fake)
		rpc_free(fake->rpc);
	loop_free(w->loop);
}

/* A source with one endpoint, that of a fake which has been given its oddities. */
static void start(struct world *w, struct fake *fake)
{
	*w = (struct world){ 0 };
	ASSERT_OK(loop_new(&w->loop));
	fake_start(w, fake);
	world_start(w, fake->address);
	ASSERT_OK(cluster_start(w->cluster, &w->failure));
}

GRPC_TEST(garbage_is_asked_for_again)
{
	struct fake fake = { .n_garbage = 3 };
	struct world w;

	start(&w, &fake);
	UNTIL(&w, fake.calls[GRANT].n_called);
	ASSERT_EQ(fake.n_garbage, 0);
	ASSERT_EQ(w.failed.status, 0);
	world_stop(&w, &fake);
}

GRPC_TEST(keys_without_a_revision_are_not_believed)
{
	struct fake fake = { .n_no_revision = 1 };
	struct world w;

	start(&w, &fake);
	/* The stages of one copy, and the first of the one before. */
	UNTIL(&w, fake.calls[WATCH].n_called);
	ASSERT_INT(fake.calls[RANGE].n_called, >=, 6);
	world_stop(&w, &fake);
}

GRPC_TEST(compacted_watch_reads_anew)
{
	struct fake fake = { .n_compacted = 2 };
	struct world w;

	start(&w, &fake);
	UNTIL(&w, fake.calls[WATCH].n_called == 3);
	ASSERT_INT(fake.calls[RANGE].n_called, >=, 15);
	world_stop(&w, &fake);
}

GRPC_TEST(lost_lease_is_replaced)
{
	struct fake fake = { .n_lease_over = 1, .n_lease_unknown = 1 };
	struct world w;

	start(&w, &fake);
	UNTIL(&w, fake.calls[GRANT].n_called >= 3);
	ASSERT_EQ(fake.n_lease_over + fake.n_lease_unknown, 0);
	world_stop(&w, &fake);
}

/* What comes too late is decided anew, but not in a circle. */
GRPC_TEST(transactions_that_fail_are_paced)
{
	struct fake fake = { 0 };
	struct world w;
	uint64_t begin_ns;

	start(&w, &fake);
	UNTIL(&w, fake.calls[TXN].n_called);
	begin_ns = clock_now_ns();
	while (clock_now_ns() - begin_ns < 1000 * NSEC_PER_MSEC)
		ASSERT_INT(loop_turn(w.loop, 100), >=, 0);
	/* The key and the member: each no more often than every 50 ms. */
	ASSERT_INT(fake.calls[TXN].n_called, <=,
		   2 * ((clock_now_ns() - begin_ns) / (50 * NSEC_PER_MSEC) + 2));
	world_stop(&w, &fake);
}

GRPC_TEST(silent_endpoint_is_left)
{
	struct fake silent = { .n_silent = 1000000 }, good = { 0 };
	char endpoints[160];
	struct world w = { 0 };

	ASSERT_OK(loop_new(&w.loop));
	fake_start(&w, &silent);
	fake_start(&w, &good);
	(void)snprintf(endpoints, sizeof(endpoints), "127.0.0.1:1, %s,%s", silent.address,
		       good.address);
	world_start(&w, endpoints);
	ASSERT_OK(cluster_start(w.cluster, &w.failure));
	UNTIL(&w, good.calls[GRANT].n_called);
	ASSERT_EQ(silent.calls[GRANT].n_called, 0);
	cluster_free(w.cluster);
	rpc_free(w.rpc);
	rpc_free(silent.rpc);
	rpc_free(good.rpc);
	loop_free(w.loop);
}

/* Something else listens there. */
GRPC_TEST(what_is_no_etcd_is_final)
{
	struct world w = { 0 };
	struct rpc *rpc;
	char address[64];
	uint16_t port;

	ASSERT_OK(loop_new(&w.loop));
	ASSERT_OK(rpc_new(w.loop, &rpc));
	ASSERT_OK(rpc_listen(rpc, "127.0.0.1:0", RPC_DOOR_OPERATORS, NULL, &port, &w.failure));
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", port);
	world_start(&w, address);
	ASSERT_OK(cluster_start(w.cluster, &w.failure));
	UNTIL(&w, w.failed.status);
	ASSERT_EQ(w.failed.status, -ENOSYS);
	ASSERT_CONTAINS(w.failed.text, address);
	cluster_free(w.cluster);
	rpc_free(w.rpc);
	rpc_free(rpc);
	loop_free(w.loop);
}

GRPC_TEST(bad_options_are_named)
{
	static const struct {
		const char *endpoints, *prefix, *name, *says;
	} bad[] = {
		{ "", "/bps", "a", "etcd_endpoints is not set" },
		{ "nowhere", "/bps", "a", "\"nowhere\": an address is host:port" },
		{ "a:1,b:2,c:x", "/bps", "a", "\"c:x\"" },
		{ "a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1,a:1", "/bps",
		  "a", "more than 16" },
		{ "a:1", "//", "a", "etcd_prefix \"//\"" },
		{ "a:1", "/bps", "no spaces", "name is made of" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct world w = { 0 };

		ASSERT_OK(loop_new(&w.loop));
		world_start(&w, bad[i].endpoints);
		cluster_free(w.cluster);
		w.params.etcd_prefix = bad[i].prefix;
		(void)snprintf(w.params.self.name, sizeof(w.params.self.name), "%s", bad[i].name);
		ASSERT_OK(cluster_new(&w.params, &w.cluster));
		ASSERT_EQ(cluster_start(w.cluster, &w.failure), -EINVAL);
		ASSERT_CONTAINS(w.failure.text, bad[i].says);
		world_stop(&w, NULL);
	}
}
