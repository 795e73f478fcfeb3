/* Members at a coordinator: their views, their jobs, and what a stranger says. */
#include "certificates.h"
#include "coordinator_world.h"

#include <stdio.h>

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
	node_renew(&b);
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
	ASSERT_CONTAINS(raw.text, "version 2 to 2 of the protocol, the member 7 to 9");
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
	cluster_close_job(a.cluster, "train", 0);
	ask(&a, &at_a, "train", 1, 20000);
	UNTIL(&w, at_a.is_done);
	ASSERT_EQ(at_a.epoch, first);
	cluster_close_job(a.cluster, "train", 0);
	cluster_close_job(b.cluster, "train", 0);
	/* Ordered after the close of this node; b's may still be under way. */
	do {
		ask(&b, &at_b, "train", 1, 20000);
		UNTIL(&w, at_b.is_done);
		cluster_close_job(b.cluster, "train", 0);
	} while (at_b.epoch == first);
	ASSERT_EQ(at_b.n_servers, 3);
	node_stop(&c);
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

GRPC_TEST(a_job_of_that_name_and_another_owner_is_another)
{
	struct world w;
	struct node a, b;
	struct asked his, mine, again;
	uint32_t first;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	ask_of(&a, &his, "train", 1, 1);
	UNTIL(&w, his.is_done);
	first = his.epoch;
	/* What he holds gives nobody else fewer servers than he has asked for. */
	node_start(&w, &b, "b", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 2 && members_of(&b) == 2);
	ask_of(&a, &mine, "train", 2, 2);
	UNTIL(&w, mine.is_done);
	ASSERT_EQ(mine.n_servers, 2);
	ASSERT_INT(mine.epoch, >, first);
	/* Nor does his end let go of mine, on a node that both are on. */
	cluster_close_job(a.cluster, "train", 1);
	node_stop(&b);
	UNTIL(&w, members_of(&a) == 1);
	ask_of(&a, &again, "train", 2, 1);
	UNTIL(&w, again.is_done);
	ASSERT_EQ(again.epoch, mine.epoch);
	do {
		ask_of(&a, &his, "train", 1, 1);
		UNTIL(&w, his.is_done);
		cluster_close_job(a.cluster, "train", 1);
	} while (his.epoch == first);
	ASSERT_EQ(his.n_servers, 1);
	ASSERT_INT(his.epoch, >, mine.epoch);
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
		cluster_close_job(a.cluster, "train", 0);
	} while (job.epoch <= first);
	node_stop(&a);
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
	node_init(&w, &a, "node-a", ROLE_AGENT | ROLE_SERVER | ROLE_COORDINATOR);
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

static int call_status(struct world *w, struct raw *raw, const char *method,
		       const struct wire_bytes *bytes)
{
	raw_send(raw, method, bytes->data, bytes->len);
	UNTIL(w, raw->is_done);
	return raw->status;
}

/* Ids are in every view. With another's nobody leaves, lives, opens or closes jobs in its place, nor registers. */
static void speak_for(struct world *w, struct raw *raw, uint64_t id, const char *name)
{
	struct wire_heartbeat heartbeat = { .id = id };
	struct wire_close close = { .job = "train", .member = id };
	struct wire_open open = { .job = "other", .member = id, .timeout_ms = 1000 };
	struct wire_register message = registration(9999, name);
	struct wire_heard heard = { .known = true };
	struct wire_bytes bytes = { 0 };
	struct failure failure;

	ASSERT_OK(wire_pack_leave(id, &bytes));
	(void)call_status(w, raw, "Leave", &bytes);
	wire_bytes_done(&bytes);
	ASSERT_OK(wire_pack_heartbeat(&heartbeat, &bytes));
	ASSERT_OK(call_status(w, raw, "Heartbeat", &bytes));
	wire_bytes_done(&bytes);
	ASSERT_OK(wire_unpack_heard(raw->reply, raw->reply_len, &failure, &heard));
	ASSERT_TRUE(!heard.known);
	ASSERT_OK(wire_pack_close(&close, &bytes));
	(void)call_status(w, raw, "CloseJob", &bytes);
	wire_bytes_done(&bytes);
	ASSERT_OK(wire_pack_open(&open, &bytes));
	ASSERT_EQ(call_status(w, raw, "OpenJob", &bytes), -ENOENT);
	wire_bytes_done(&bytes);
	message.member.id = id;
	raw_register(raw, &message);
	UNTIL(w, raw->is_done);
	ASSERT_EQ(raw->status, -EACCES);
	ASSERT_CONTAINS(raw->text, "the id is another daemon's");
}

GRPC_TEST(an_id_is_its_owners)
{
	struct world w;
	struct raw raw;
	struct node a;
	struct asked job, same;
	uint64_t id;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_AGENT | ROLE_SERVER);
	UNTIL(&w, members_of(&a) == 1);
	ask(&a, &job, "train", 1, 20000);
	UNTIL(&w, job.is_done);
	ASSERT_EQ(job.failure.status, 0);
	id = a.params.self.id;
	raw_start(&w, &raw);
	speak_for(&w, &raw, id, "a");
	speak_for(&w, &raw, id, "other");
	ASSERT_EQ(w.coordinator->n_members, 1);
	ASSERT_EQ(w.coordinator->n_jobs, 1);
	ASSERT_TRUE(list_first(&w.coordinator->members, struct member, link)->stream);
	/* One that was started anew knows nobody: the first that comes is not the owner for that. */
	coordinator_kill(&w);
	coordinator_revive(&w);
	speak_for(&w, &raw, id, "a");
	UNTIL(&w, w.coordinator->n_members == 1 && w.coordinator->n_jobs == 1);
	ask(&a, &same, "train2", 1, 20000);
	UNTIL(&w, same.is_done);
	ASSERT_EQ(same.failure.status, 0);
	raw_stop(&raw);
	node_stop(&a);
	world_stop(&w);
}

/* Whoever has a certificate is the node that it names. */
GRPC_TEST(a_name_is_in_its_certificate)
{
	struct certificates certificates;
	struct world w;
	struct node a;

	make_certificates(&certificates);
	world_start(&w);
	coordinator_kill(&w);
	w.params.tls = &(struct rpc_tls){ certificates.ca, certificates.cert, certificates.key };
	ASSERT_OK(coordinator_new(&w.params, &w.failure, &w.coordinator));
	for (unsigned is_right = 0; is_right < 2; is_right++) {
		node_init(&w, &a, is_right ? "node-a" : "node-b", ROLE_AGENT | ROLE_SERVER);
		a.params.tls_ca = certificates.ca;
		a.params.tls_cert = certificates.cert;
		a.params.tls_key = certificates.key;
		node_run(&a);
		if (is_right)
			UNTIL(&w, members_of(&a) == 1);
		else
			UNTIL(&w, a.is_failed);
		if (!is_right)
			ASSERT_CONTAINS(a.failure.text,
					"node node-b: its certificate is not for that name");
		node_stop(&a);
	}
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
