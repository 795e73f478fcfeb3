/* Coordinators that are lost, come back, or stand still, and what their members make of it. */
#include "base/clock.h"
#include "coordinator_world.h"

#include <poll.h>

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
	ASSERT_OK(rpc_listen(rpc, w.address, RPC_DOOR_OPERATORS, NULL, &port, &w.failure));
	node_start(&w, &a, "a", ROLE_AGENT);
	/* Registers anew, and says what it knows, instead of going on with what cannot be. */
	UNTIL(&w, amnesiac.n_registrations >= 2);
	ASSERT_EQ(amnesiac.told, 7);
	ASSERT_EQ(members_of(&a), 1);
	node_stop(&a);
	rpc_free(rpc);
	world_stop(&w);
}
