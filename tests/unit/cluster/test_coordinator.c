/* A coordinator and several members, each with its own gRPC, over the loopback and on one loop. */
#include "base/clock.h"
#include "certificates.h"
#include "cluster/cluster.h"
#include "cluster/coordinator_state.h"
#include "cluster/wire.h"
#include "grpc_test.h"
#include "test.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>

#define LEASE_MS 60000 /* no test outlives it: whom it drops is dropped for another reason */

struct world {
	struct loop *loop;
	struct coordinator *coordinator;
	struct coordinator_params params;
	int reserved;
	char address[64];
	struct failure failure;
};

struct node {
	struct world *world;
	struct rpc *rpc;
	struct cluster *cluster;
	struct cluster_params params;
	char key[64];
	size_t key_len;
	unsigned n_keys, n_views;
	bool is_failed;
	struct failure failure;
};

#define UNTIL(w, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((w)->loop, 1000), >=, 0); \
	} while (0)

/* A port is reserved by a socket that does not listen: while there is no coordinator, no other program has it. */
static void reserve_address(struct world *w)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(address);

	w->reserved = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ASSERT_INT(w->reserved, >=, 0);
	ASSERT_OK(setsockopt(w->reserved, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)));
	ASSERT_OK(bind(w->reserved, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(getsockname(w->reserved, (struct sockaddr *)&address, &len));
	(void)snprintf(w->address, sizeof(w->address), "127.0.0.1:%u", ntohs(address.sin_port));
}

static void world_start_with(struct world *w, uint64_t lease_ms)
{
	*w = (struct world){ 0 };
	ASSERT_OK(loop_new(&w->loop));
	reserve_address(w);
	w->params = (struct coordinator_params){
		.loop = w->loop, .listen = w->address, .lease_ms = lease_ms, .wait_ms = 100
	};
	ASSERT_OK(coordinator_new(&w->params, &w->failure, &w->coordinator));
}

static void world_start(struct world *w)
{
	world_start_with(w, LEASE_MS);
}

static void coordinator_kill(struct world *w)
{
	w->coordinator = coordinator_free(w->coordinator);
}

static void coordinator_revive(struct world *w)
{
	w->params.wait_ms = COORDINATOR_WAIT_MS;
	ASSERT_OK(coordinator_new(&w->params, &w->failure, &w->coordinator));
}

static void world_stop(struct world *w)
{
	coordinator_free(w->coordinator);
	loop_free(w->loop);
	fd_close(w->reserved);
}

static void on_view(void *user, struct view *view)
{
	struct node *n = user;

	ASSERT_INT(n->key_len, >, 0);
	n->n_views++;
}

static void on_key(void *user, const void *key, size_t len)
{
	struct node *n = user;

	ASSERT_INT(len, <=, sizeof(n->key));
	memcpy(n->key, key, len);
	n->key_len = len;
	n->n_keys++;
}

static void on_failed(void *user, const struct failure *failure)
{
	struct node *n = user;

	n->is_failed = true;
	n->failure = *failure;
}

static uint64_t next_id = 100;

static void node_init(struct world *w, struct node *n, const char *name, uint32_t roles)
{
	*n = (struct node){ .world = w };
	ASSERT_OK(rpc_new(w->loop, &n->rpc));
	n->params = (struct cluster_params){
		.loop = w->loop,
		.rpc = n->rpc,
		.source = "coordinator",
		.coordinator = w->address,
		.self = { .id = next_id++, .roles = roles },
		.lease_ms = w->params.lease_ms,
		.view_changed = on_view,
		.data_key_known = on_key,
		.failed = on_failed,
		.user = n,
	};
	(void)snprintf(n->params.self.name, sizeof(n->params.self.name), "%s", name);
	(void)snprintf(n->params.self.address, sizeof(n->params.self.address), "%s.example:9690",
		       name);
}

static void node_run(struct node *n)
{
	ASSERT_OK(cluster_new(&n->params, &n->cluster));
	ASSERT_OK(cluster_start(n->cluster, &n->failure));
}

static void node_start(struct world *w, struct node *n, const char *name, uint32_t roles)
{
	node_init(w, n, name, roles);
	node_run(n);
}

/* The coordinator can answer the farewell only while its loop, which is ours, turns. */
static void node_stop(struct node *n)
{
	cluster_close(n->cluster);
	for (int i = 0; i < 10; i++)
		ASSERT_INT(loop_turn(n->world->loop, 10), >=, 0);
	cluster_free(n->cluster);
	rpc_free(n->rpc);
	n->cluster = NULL;
}

static uint32_t epoch_of(const struct node *n)
{
	struct view *view = cluster_view(n->cluster);

	return view ? view->epoch : 0;
}

static size_t members_of(const struct node *n)
{
	struct view *view = cluster_view(n->cluster);

	return view ? view->n_members : 0;
}

struct asked {
	struct cluster_query query;
	bool is_done;
	uint32_t epoch;
	size_t n_servers;
	struct failure failure;
};

static void on_done(struct cluster_query *query, struct view *view, const struct failure *failure)
{
	struct asked *a = container_of(query, struct asked, query);

	ASSERT_TRUE(!a->is_done);
	a->is_done = true;
	if (view) {
		a->epoch = view->epoch;
		a->n_servers = view_n_servers(view);
	} else {
		a->failure = *failure;
	}
}

static void ask(struct node *n, struct asked *a, const char *job, uint32_t min_servers,
		uint64_t timeout_ms)
{
	*a = (struct asked){
		.query = { .min_servers = min_servers, .timeout_ms = timeout_ms, .done = on_done }
	};
	(void)snprintf(a->query.job, sizeof(a->query.job), "%s", job);
	cluster_open_job(n->cluster, &a->query);
	ASSERT_TRUE(!a->is_done);
}

/* A member by hand: what a daemon would never send, or without what it always sends. */
struct raw {
	struct rpc *rpc;
	struct rpc_channel *channel;
	struct rpc_request request;
	bool is_done;
	unsigned n_messages;
	int status;
	char text[512];
	char reply[64];
	size_t reply_len;
};

static void on_raw_message(struct rpc_request *request, const void *data, size_t len)
{
	container_of(request, struct raw, request)->n_messages++;
}

static void on_raw_done(struct rpc_request *request, int status, const char *text, const void *data,
			size_t len)
{
	struct raw *raw = container_of(request, struct raw, request);

	raw->is_done = true;
	raw->status = status;
	(void)snprintf(raw->text, sizeof(raw->text), "%s", text);
	raw->reply_len = MIN(len, sizeof(raw->reply));
	if (len)
		memcpy(raw->reply, data, raw->reply_len);
}

static void raw_start(struct world *w, struct raw *raw)
{
	*raw = (struct raw){ 0 };
	ASSERT_OK(rpc_new(w->loop, &raw->rpc));
	ASSERT_OK(rpc_channel_new(raw->rpc, w->address, 0, NULL, &w->failure, &raw->channel));
}

static void raw_stop(struct raw *raw)
{
	rpc_channel_free(raw->channel);
	rpc_free(raw->rpc);
}

static void raw_send(struct raw *raw, const char *method, const void *data, size_t len)
{
	static char path[64];

	(void)snprintf(path, sizeof(path), "/bps.cluster.Coordinator/%s", method);
	raw->is_done = false;
	raw->request = (struct rpc_request){
		.path = path,
		.data = data,
		.len = len,
		.stream = !strcmp(method, "Register"),
		.message = on_raw_message,
		.done = on_raw_done,
	};
	rpc_request_start(raw->channel, &raw->request);
}

static void raw_register(struct raw *raw, struct wire_register *message)
{
	struct wire_bytes bytes = { 0 };

	ASSERT_OK(wire_pack_register(message, &bytes));
	raw_send(raw, "Register", bytes.data, bytes.len);
	wire_bytes_done(&bytes);
}

static struct wire_register registration(uint64_t id, const char *name)
{
	struct wire_register message = {
		.version = WIRE_VERSION,
		.version_min = WIRE_VERSION_MIN,
		.member = { .id = id, .roles = ROLE_AGENT },
	};

	(void)snprintf(message.member.name, sizeof(message.member.name), "%s", name);
	return message;
}

GRPC_TEST(one_view_for_all)
{
	struct world w;
	struct node n[3];
	struct view *view;

	world_start(&w);
	node_start(&w, &n[0], "c", ROLE_AGENT | ROLE_SERVER);
	node_start(&w, &n[1], "a", ROLE_SERVER);
	node_start(&w, &n[2], "b", ROLE_AGENT);
	for (size_t i = 0; i < 3; i++)
		UNTIL(&w, members_of(&n[i]) == 3);
	view = cluster_view(n[1].cluster);
	ASSERT_STR(view->members[0].name, "a");
	ASSERT_STR(view->members[2].name, "c");
	ASSERT_TRUE(view->members[0].is_self && !view->members[2].is_self);
	ASSERT_EQ(view->members[2].id, n[0].params.self.id);
	ASSERT_STR(view->members[2].address, "c.example:9690");
	ASSERT_EQ(view->members[1].roles, ROLE_AGENT);
	for (size_t i = 0; i < 3; i++) {
		ASSERT_EQ(epoch_of(&n[i]), epoch_of(&n[0]));
		ASSERT_EQ(n[i].n_keys, 1);
		ASSERT_EQ(n[i].key_len, n[0].key_len);
		ASSERT_MEM(n[i].key, n[0].key, n[0].key_len);
		ASSERT_EQ(view_server_digest(cluster_view(n[i].cluster)), view_server_digest(view));
	}
	for (size_t i = 0; i < 3; i++)
		node_stop(&n[i]);
	world_stop(&w);
}

GRPC_TEST(changes_together_make_one_view)
{
	struct world w;
	struct raw raw[20];
	struct node n;

	world_start(&w);
	node_start(&w, &n, "first", ROLE_AGENT);
	UNTIL(&w, members_of(&n) == 1);
	for (size_t i = 0; i < ARRAY_SIZE(raw); i++) {
		struct wire_register message;
		char name[16];

		(void)snprintf(name, sizeof(name), "n%zu", i);
		message = registration(1 + i, name);
		raw_start(&w, &raw[i]);
		raw_register(&raw[i], &message);
	}
	UNTIL(&w, members_of(&n) == 1 + ARRAY_SIZE(raw));
	/* Not one for each, however slow the machine. */
	ASSERT_INT(n.n_views, <, ARRAY_SIZE(raw));
	for (size_t i = 0; i < ARRAY_SIZE(raw); i++)
		raw_stop(&raw[i]);
	node_stop(&n);
	world_stop(&w);
}

GRPC_TEST(member_leaves)
{
	struct world w;
	struct node a, b;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	cluster_close(b.cluster);
	UNTIL(&w, members_of(&a) == 1);
	ASSERT_STR(cluster_view(a.cluster)->members[0].name, "a");
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(silent_member_is_dropped)
{
	struct wire_register message = registration(5, "silent");
	struct world w;
	struct raw raw;
	struct node a;

	world_start_with(&w, 600);
	node_start(&w, &a, "a", ROLE_SERVER);
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	/* A machine that stands still for that long shows the view with it and the one without it at once, or neither. */
	UNTIL(&w, members_of(&a) == 2 || raw.is_done);
	/* Its stream is there, but it says nothing. */
	UNTIL(&w, raw.is_done);
	UNTIL(&w, members_of(&a) == 1);
	ASSERT_EQ(raw.status, -ETIMEDOUT);
	ASSERT_CONTAINS(raw.text, "member silent: not heard of for 600 ms");
	raw_stop(&raw);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(stream_may_break_for_less_than_a_lease)
{
	struct wire_register message = registration(5, "flaky");
	struct world w;
	struct raw raw;
	struct node a;
	uint32_t epoch;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	UNTIL(&w, members_of(&a) == 2);
	epoch = epoch_of(&a);
	for (int i = 0; i < 3; i++) {
		rpc_request_cancel(&raw.request);
		UNTIL(&w, raw.is_done);
		raw.n_messages = 0;
		message.epoch = epoch;
		raw_register(&raw, &message);
		UNTIL(&w, raw.n_messages);
	}
	/* Only a newcomer changes the view. */
	raw_stop(&raw);
	ASSERT_EQ(epoch_of(&a), epoch);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(restarted_member_takes_its_place)
{
	struct world w;
	struct node a, b;
	uint64_t id;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	/* Killed: no farewell, its connection just ends. */
	b.params.self.id = next_id++;
	id = b.params.self.id;
	{
		struct cluster *dead = b.cluster;
		struct rpc *rpc = b.rpc;

		ASSERT_OK(rpc_new(w.loop, &b.rpc));
		b.params.rpc = b.rpc;
		node_run(&b);
		cluster_free(dead);
		rpc_free(rpc);
	}
	UNTIL(&w, members_of(&a) == 2 && cluster_view(a.cluster)->members[1].id == id);
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(names_and_addresses_are_unique)
{
	struct wire_register message = registration(5, "a");
	struct world w;
	struct raw raw;
	struct node a;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	UNTIL(&w, raw.is_done);
	ASSERT_EQ(raw.status, -EEXIST);
	ASSERT_CONTAINS(raw.text, "node name a is taken by another daemon");
	message = registration(5, "b");
	message.member.roles = ROLE_SERVER;
	memcpy(message.member.address, "a.example:9690", 15);
	raw_register(&raw, &message);
	UNTIL(&w, raw.is_done);
	ASSERT_EQ(raw.status, -EEXIST);
	ASSERT_CONTAINS(raw.text, "address a.example:9690 is taken");
	raw_stop(&raw);
	ASSERT_EQ(members_of(&a), 1);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(versions_are_compared)
{
	struct wire_register message = registration(5, "future");
	struct world w;
	struct raw raw;

	world_start(&w);
	message.version = 9;
	message.version_min = 7;
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	UNTIL(&w, raw.is_done);
	ASSERT_EQ(raw.status, -EPROTO);
	ASSERT_CONTAINS(raw.text, "version 1 to 1 of the protocol, the member 7 to 9");
	raw_stop(&raw);
	world_stop(&w);
}

GRPC_TEST(hopeless_member_fails)
{
	struct world w;
	struct node a;

	world_start(&w);
	node_init(&w, &a, "no spaces please", ROLE_AGENT);
	node_run(&a);
	UNTIL(&w, a.is_failed);
	ASSERT_EQ(a.failure.status, -EINVAL);
	ASSERT_CONTAINS(a.failure.text, w.address);
	ASSERT_CONTAINS(a.failure.text, "name is made of");
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(hostile_messages)
{
	static const char *const methods[] = { "Register", "Heartbeat", "OpenJob", "CloseJob",
					       "Leave" };
	struct wire_register message = registration(5, "mad");
	char noise[256];
	struct world w;
	struct raw raw;
	struct node a;

	world_start(&w);
	raw_start(&w, &raw);
	memset(noise, 0xff, sizeof(noise));
	for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
		raw_send(&raw, methods[i], noise, sizeof(noise));
		UNTIL(&w, raw.is_done);
		ASSERT_INT(raw.status, <, 0);
		raw_send(&raw, methods[i], "", 0);
		UNTIL(&w, raw.is_done);
		ASSERT_INT(raw.status, <, 0);
	}
	message.epoch = UINT32_MAX;
	raw_register(&raw, &message);
	UNTIL(&w, raw.is_done);
	ASSERT_EQ(raw.status, -EINVAL);
	message = registration(5, "mad");
	message.member.roles = ROLE_SERVER; /* without an address */
	raw_register(&raw, &message);
	UNTIL(&w, raw.is_done);
	ASSERT_EQ(raw.status, -EINVAL);
	/* A job of a member that is none. */
	{
		struct wire_open open = { .job = "job", .member = 99, .timeout_ms = 1000 };
		struct wire_bytes bytes = { 0 };

		ASSERT_OK(wire_pack_open(&open, &bytes));
		raw_send(&raw, "OpenJob", bytes.data, bytes.len);
		wire_bytes_done(&bytes);
		UNTIL(&w, raw.is_done);
		ASSERT_EQ(raw.status, -ENOENT);
	}
	raw_stop(&raw);
	/* Nothing of it stuck. */
	node_start(&w, &a, "a", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(job_waits_for_servers)
{
	struct world w;
	struct node a, b;
	struct asked job;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	/* Asked before there is any view. */
	ask(&a, &job, "train", 2, 50000);
	UNTIL(&w, members_of(&a) == 1);
	ASSERT_TRUE(!job.is_done);
	node_start(&w, &b, "b", ROLE_SERVER);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	ASSERT_EQ(job.n_servers, 2);
	/* Each server has the view by then. */
	ASSERT_TRUE(cluster_view_of(a.cluster, job.epoch) && cluster_view_of(b.cluster, job.epoch));
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(job_timeout_says_who_is_there)
{
	struct world w;
	struct node a;
	struct asked job;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	ask(&a, &job, "train", 3, 200);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, -ETIMEDOUT);
	ASSERT_CONTAINS(job.failure.text, "job train: ");
	ASSERT_CONTAINS(job.failure.text, "3 servers are wanted, 1 is there: a");
	/* And it can be opened afterwards. */
	ask(&a, &job, "train", 1, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(job_keeps_its_view)
{
	struct world w;
	struct node a, b, c;
	struct asked at_a, at_b;
	uint32_t first;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	ask(&a, &at_a, "train", 1, 20000);
	UNTIL(&w, at_a.is_done);
	first = at_a.epoch;
	node_start(&w, &c, "c", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 3 && members_of(&b) == 3);

	ask(&b, &at_b, "train", 3, 20000);
	UNTIL(&w, at_b.is_done);
	ASSERT_EQ(at_b.epoch, first);
	ASSERT_EQ(at_b.n_servers, 2);
	/* One node closes, the other holds on. */
	cluster_close_job(a.cluster, "train");
	ask(&a, &at_a, "train", 1, 20000);
	UNTIL(&w, at_a.is_done);
	ASSERT_EQ(at_a.epoch, first);
	cluster_close_job(a.cluster, "train");
	cluster_close_job(b.cluster, "train");
	/* Ordered after the close of this node; b's may still be under way. */
	do {
		ask(&b, &at_b, "train", 1, 20000);
		UNTIL(&w, at_b.is_done);
		cluster_close_job(b.cluster, "train");
	} while (at_b.epoch == first);
	ASSERT_EQ(at_b.n_servers, 3);
	node_stop(&c);
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(dead_holder_lets_go)
{
	struct world w;
	struct node a, b;
	struct asked at_a, at_b;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	ask(&b, &at_b, "train", 2, 20000);
	UNTIL(&w, at_b.is_done);
	node_stop(&b);
	UNTIL(&w, members_of(&a) == 1);
	ask(&a, &at_a, "train", 1, 20000);
	UNTIL(&w, at_a.is_done);
	ASSERT_INT(at_a.epoch, >, at_b.epoch);
	ASSERT_EQ(at_a.n_servers, 1);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(cancelled_query_is_closed_again)
{
	struct world w;
	struct node a, b;
	struct asked job;
	uint32_t first;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	ask(&a, &job, "train", 2, 20000);
	ASSERT_INT(loop_turn(w.loop, 0), >=, 0);
	cluster_cancel(a.cluster, &job.query);
	ASSERT_INT(loop_turn(w.loop, 0), >=, 0);
	/* What was asked for could be had now, were it not withdrawn. */
	node_start(&w, &b, "b", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2);
	first = epoch_of(&a);
	node_stop(&b);
	UNTIL(&w, members_of(&a) == 1);
	ASSERT_TRUE(!job.is_done);
	do {
		ask(&a, &job, "train", 1, 20000);
		UNTIL(&w, job.is_done);
		ASSERT_EQ(job.failure.status, 0);
		cluster_close_job(a.cluster, "train");
	} while (job.epoch <= first);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(coordinator_lost_and_back)
{
	struct world w;
	struct node a, b;
	struct asked job, other;
	uint32_t held, before;
	char key[64];

	world_start(&w);
	/* Time to come back, also on a slow machine. */
	w.params.lease_ms = 20000;
	coordinator_kill(&w);
	coordinator_revive(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	ask(&a, &job, "train", 2, 20000);
	UNTIL(&w, job.is_done);
	held = job.epoch;
	before = MAX(epoch_of(&a), epoch_of(&b));
	memcpy(key, a.key, a.key_len);

	coordinator_kill(&w);
	ask(&a, &other, "other", 1, 300);
	UNTIL(&w, other.is_done);
	ASSERT_EQ(other.failure.status, -ETIMEDOUT);
	ASSERT_CONTAINS(other.failure.text, "job other: the coordinator ");
	ASSERT_CONTAINS(other.failure.text, w.address);
	ASSERT_CONTAINS(other.failure.text, "has been gone for ");
	/* The last view stays. */
	ASSERT_EQ(members_of(&a), 2);
	ASSERT_TRUE(!a.is_failed);
	/* Asked while it is gone, answered when it is back. */
	ask(&a, &other, "other", 2, 100000);

	coordinator_revive(&w);
	UNTIL(&w, epoch_of(&a) > before && epoch_of(&b) > before);
	/* Members of before had time to come: no view without them. */
	ASSERT_EQ(members_of(&a), 2);
	ASSERT_EQ(members_of(&b), 2);
	UNTIL(&w, other.is_done);
	ASSERT_EQ(other.failure.status, 0);
	ASSERT_INT(other.epoch, >, before);
	/* The job is in its old view, also for a node that opens it only now; the key is the same. */
	ask(&b, &job, "train", 2, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.epoch, held);
	ASSERT_EQ(a.n_keys, 1);
	{
		struct node c;

		node_start(&w, &c, "c", ROLE_AGENT);
		UNTIL(&w, members_of(&c) == 3);
		ASSERT_MEM(c.key, key, a.key_len);
		ask(&c, &job, "train", 2, 20000);
		UNTIL(&w, job.is_done);
		ASSERT_EQ(job.epoch, held);
		/* It has the view, though it came later than it. */
		ASSERT_TRUE(cluster_view_of(c.cluster, held));
		node_stop(&c);
	}
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

/* The usual restart: the coordinator's own daemon is the first to register, and a newcomer. */
GRPC_TEST(coordinator_restarts_with_its_daemon)
{
	struct world w;
	struct node a, c;
	struct asked job;
	uint32_t held;

	world_start(&w);
	coordinator_kill(&w);
	node_init(&w, &c, "c", ROLE_AGENT | ROLE_SERVER);
	c.params.coordinator_listen = w.address;
	c.params.lease_ms = 20000;
	node_run(&c);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2);
	ask(&a, &job, "train", 2, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	held = job.epoch;
	node_stop(&c);

	node_init(&w, &c, "c", ROLE_AGENT | ROLE_SERVER);
	c.params.coordinator_listen = w.address;
	c.params.lease_ms = 20000;
	node_run(&c);
	/* Its own trainers ask at once; the job's view is the one that the other member tells of. */
	ask(&c, &job, "train", 1, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	ASSERT_EQ(job.epoch, held);
	UNTIL(&w, members_of(&a) == 2 && members_of(&c) == 2 && epoch_of(&a) == epoch_of(&c));
	ASSERT_INT(epoch_of(&c), >, held);
	ASSERT_EQ(a.key_len, c.key_len);
	ASSERT_MEM(a.key, c.key, a.key_len);
	node_stop(&a);
	node_stop(&c);
	world_stop(&w);
}

GRPC_TEST(epochs_go_on_from_the_largest)
{
	struct wire_register message = registration(5, "old");
	struct world w;
	struct raw raw;
	struct node a;
	uint32_t expected;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	/* One that has seen more than this coordinator has made. */
	message.epoch = epoch_of(&a) + 1000;
	expected = message.epoch + 1;
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	UNTIL(&w, members_of(&a) == 2);
	ASSERT_EQ(epoch_of(&a), expected);
	raw_stop(&raw);
	node_stop(&a);
	world_stop(&w);
}

/* Two were there before; one has come back, and a newcomer's job must not be given a view without the other. */
/* A new member comes first; one of before brings the key, and nobody is told another. */
GRPC_TEST(restarted_coordinator_makes_no_second_key)
{
	static const char key[] = "the key of before";
	struct wire_register message = registration(7, "a");
	struct world w;
	struct node n;
	struct raw raw;

	world_start(&w);
	coordinator_kill(&w);
	w.params.wait_ms = LEASE_MS;
	ASSERT_OK(coordinator_new(&w.params, &w.failure, &w.coordinator));
	node_start(&w, &n, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, w.coordinator->n_members == 1);
	ASSERT_EQ(n.n_keys, 0);
	message.epoch = 5;
	message.n_members = 2;
	message.key = (struct wire_bytes){ (uint8_t *)key, sizeof(key) };
	raw_start(&w, &raw);
	raw_register(&raw, &message);
	UNTIL(&w, n.n_keys && raw.n_messages);
	ASSERT_EQ(n.n_keys, 1);
	ASSERT_EQ(n.key_len, sizeof(key));
	ASSERT_MEM(n.key, key, sizeof(key));
	raw_stop(&raw);
	node_stop(&n);
	world_stop(&w);
}

GRPC_TEST(restarted_coordinator_waits_for_all)
{
	struct wire_register first = registration(5, "first"), second = registration(6, "second");
	struct world w;
	struct raw raw[2];
	uint64_t until_ns;

	world_start(&w);
	w.params.lease_ms = 3600000;
	coordinator_kill(&w);
	coordinator_revive(&w);
	first.epoch = second.epoch = 77;
	first.n_members = second.n_members = 2;
	raw_start(&w, &raw[0]);
	raw_start(&w, &raw[1]);
	raw_register(&raw[0], &first);
	UNTIL(&w, raw[0].n_messages == 1);
	/* Longer than a coordinator that nobody knew would wait. */
	until_ns = clock_now_ns() + 2500 * NSEC_PER_MSEC;
	while (clock_now_ns() < until_ns)
		ASSERT_INT(loop_turn(w.loop, 100), >=, 0);
	ASSERT_EQ(raw[0].n_messages, 1);
	raw_register(&raw[1], &second);
	UNTIL(&w, raw[0].n_messages == 2 && raw[1].n_messages == 2);
	raw_stop(&raw[0]);
	raw_stop(&raw[1]);
	world_stop(&w);
}

/* As by SIGSTOP: leases run out, and what members said meanwhile is still to be read. */
GRPC_TEST(stopped_coordinator_drops_nobody)
{
	struct world w;
	struct node a, b;
	uint32_t epoch;
	uint64_t until_ns;

	world_start(&w);
	w.params.lease_ms = 3000;
	coordinator_kill(&w);
	coordinator_revive(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	node_start(&w, &b, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	epoch = epoch_of(&a);
	(void)poll(NULL, 0, 3500);
	until_ns = clock_now_ns() + 4000 * NSEC_PER_MSEC;
	while (clock_now_ns() < until_ns)
		ASSERT_INT(loop_turn(w.loop, 100), >=, 0);
	ASSERT_EQ(epoch_of(&a), epoch);
	ASSERT_EQ(a.n_views, b.n_views);
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

/* A coordinator by hand. It numbers a second view as it did the first. */
struct amnesiac {
	struct world *world;
	struct rpc_method method;
	unsigned n_registrations;
	uint32_t told; /* by the newest registration */
};

static void amnesiac_tell(struct rpc_call *call, uint32_t version, uint32_t epoch, size_t n_members)
{
	struct view_member members[2] = { { .id = 1, .name = "a", .roles = ROLE_AGENT },
					  { .id = 2, .name = "b", .roles = ROLE_AGENT } };
	char key[] = "sixteen bytes key";
	struct wire_event event = { .version = version,
				    .key = { key, sizeof(key) },
				    .lease_ms = 60000 };
	struct wire_bytes bytes = { 0 };

	ASSERT_OK(view_new(epoch, members, n_members, &event.view));
	ASSERT_OK(wire_pack_event(&event, &bytes));
	rpc_call_send(call, bytes.data, bytes.len);
	wire_bytes_done(&bytes);
	view_unref(event.view);
}

static void amnesiac_called(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct amnesiac *amnesiac = user;
	struct wire_register message = { 0 };
	struct failure failure;

	ASSERT_OK(wire_unpack_register(data, len, &failure, &message));
	amnesiac->n_registrations++;
	amnesiac->told = message.epoch;
	wire_register_done(&message);
	amnesiac_tell(call, WIRE_VERSION, 7, 1);
	amnesiac_tell(call, 0, 7, 2);
}

/* With it the call is over; without, it would be ours to end. */
static void amnesiac_cancelled(void *user, struct rpc_call *call)
{
}

GRPC_TEST(epochs_that_go_backwards_are_not_believed)
{
	struct amnesiac amnesiac = { .method = { .path = "/bps.cluster.Coordinator/Register",
						 .called = amnesiac_called,
						 .cancelled = amnesiac_cancelled,
						 .user = &amnesiac } };
	struct world w;
	struct rpc *rpc;
	struct node a;
	uint16_t port;

	world_start(&w);
	coordinator_kill(&w);
	ASSERT_OK(rpc_new(w.loop, &rpc));
	rpc_add_method(rpc, &amnesiac.method);
	ASSERT_OK(rpc_listen(rpc, w.address, NULL, &port, &w.failure));
	node_start(&w, &a, "a", ROLE_AGENT);
	/* Registers anew, and says what it knows, instead of going on with what cannot be. */
	UNTIL(&w, amnesiac.n_registrations >= 2);
	ASSERT_EQ(amnesiac.told, 7);
	ASSERT_EQ(members_of(&a), 1);
	node_stop(&a);
	rpc_free(rpc);
	world_stop(&w);
}

GRPC_TEST(configured_key_is_handed_out)
{
	struct world w;
	struct node a;

	world_start(&w);
	coordinator_kill(&w);
	w.params.data_key = "a configured cluster key";
	w.params.data_key_len = 24;
	coordinator_revive(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	ASSERT_EQ(a.key_len, 24);
	ASSERT_MEM(a.key, "a configured cluster key", 24);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(member_before_its_coordinator)
{
	struct world w;
	struct node a;

	world_start(&w);
	coordinator_kill(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	/* Refused at least once. */
	for (int i = 0; i < 3; i++)
		ASSERT_INT(loop_turn(w.loop, 100), >=, 0);
	ASSERT_TRUE(!a.is_failed);
	coordinator_revive(&w);
	UNTIL(&w, members_of(&a) == 1);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(coordinator_in_a_member_with_tls)
{
	struct certificates certificates;
	struct world w;
	struct node a;
	struct asked job;

	make_certificates(&certificates);
	world_start(&w);
	coordinator_kill(&w);
	node_init(&w, &a, "a", ROLE_AGENT | ROLE_SERVER | ROLE_COORDINATOR);
	a.params.coordinator = NULL;
	a.params.coordinator_listen = "127.0.0.1:0";
	a.params.tls_ca = certificates.ca;
	a.params.tls_cert = certificates.cert;
	a.params.tls_key = certificates.key;
	node_run(&a);
	UNTIL(&w, members_of(&a) == 1);
	ask(&a, &job, "train", 1, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	node_stop(&a);

	node_init(&w, &a, "a", ROLE_AGENT);
	a.params.tls_ca = certificates.ca;
	ASSERT_OK(cluster_new(&a.params, &a.cluster));
	ASSERT_INT(cluster_start(a.cluster, &a.failure), <, 0);
	ASSERT_CONTAINS(a.failure.text, "TLS certificate: not set");
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(coordinator_finds_itself)
{
	static const char *const listen[] = { "0.0.0.0:0", "[::]:0", "127.0.0.2:0", "localhost:0" };
	struct world w;
	struct node a;

	world_start(&w);
	coordinator_kill(&w);
	for (size_t i = 0; i < ARRAY_SIZE(listen); i++) {
		node_init(&w, &a, "a", ROLE_SERVER);
		a.params.coordinator = NULL;
		a.params.coordinator_listen = listen[i];
		node_run(&a);
		UNTIL(&w, members_of(&a) == 1);
		node_stop(&a);
	}
	world_stop(&w);
}

GRPC_TEST(needs_an_address)
{
	struct world w;
	struct node a;

	world_start(&w);
	node_init(&w, &a, "a", ROLE_AGENT);
	a.params.coordinator = NULL;
	ASSERT_OK(cluster_new(&a.params, &a.cluster));
	ASSERT_EQ(cluster_start(a.cluster, &a.failure), -EINVAL);
	ASSERT_CONTAINS(a.failure.text, "coordinator is not set");
	node_stop(&a);
	world_stop(&w);
}
