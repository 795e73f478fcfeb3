/*
 * What OpenJobs cost a coordinator: those that wait are looked at when something has changed, a job
 * is found among however many others there are, and a member has a share of what may wait. Work is
 * counted: openings that are compared with the view, names that are compared.
 */
#include "cluster/cluster_file.h"
#include "coordinator_world.h"

#include <stdio.h>

#define N_WAITING 32

static unsigned n_looked_at, n_compared;

size_t __real_view_n_servers(const struct view *view);
size_t __wrap_view_n_servers(const struct view *view);
size_t __wrap_view_n_servers(const struct view *view)
{
	n_looked_at++;
	return __real_view_n_servers(view);
}

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_compared++;
	return __real_strcmp(a, b);
}

/* Another call by the connection of a member. */
static void call(struct raw *raw, const struct raw *member, const char *method,
		 struct wire_bytes *bytes)
{
	*raw = (struct raw){ .rpc = member->rpc, .channel = member->channel };
	raw_send(raw, method, bytes->data, bytes->len);
	wire_bytes_done(bytes);
}

static void open_job(struct raw *raw, const struct raw *member, uint64_t id, const char *job,
		     uint32_t min_servers)
{
	struct wire_open open = { .member = id, .min_servers = min_servers, .timeout_ms = 100000 };
	struct wire_bytes bytes = { 0 };

	(void)snprintf(open.job, sizeof(open.job), "%s", job);
	ASSERT_OK(wire_pack_open(&open, &bytes));
	call(raw, member, "OpenJob", &bytes);
}

static void beat(struct world *w, struct raw *member, uint64_t id, uint32_t epoch)
{
	struct wire_heartbeat heartbeat = { .id = id, .epoch = epoch };
	struct wire_bytes bytes = { 0 };
	struct raw raw;

	ASSERT_OK(wire_pack_heartbeat(&heartbeat, &bytes));
	call(&raw, member, "Heartbeat", &bytes);
	UNTIL(w, raw.is_done);
	ASSERT_EQ(raw.status, 0);
}

static bool has_members(const struct world *w, size_t n)
{
	const struct coordinator *c = w->coordinator;
	const struct member *member;

	if (!c->view || c->change.loop || c->view->n_members != n)
		return false;
	list_for_each (member, &c->members, link)
		if (member->info.roles & ROLE_SERVER && member->acked < c->view->epoch)
			return false;
	return true;
}

static uint64_t join(struct world *w, struct raw *raw, uint64_t number, const char *name, size_t n)
{
	struct wire_register message = registration(number, name);

	raw_start(w, raw);
	raw_register(raw, &message);
	UNTIL(w, has_members(w, n));
	return message.member.id;
}

GRPC_TEST(openings_are_looked_at_when_something_has_changed)
{
	struct wire_register message = registration(5, "asks");
	struct raw member, waiting[N_WAITING];
	struct world w;
	struct node a, b;
	uint64_t id = message.member.id;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	message.member.roles = ROLE_SERVER;
	memcpy(message.member.address, "asks.example:1", 15);
	raw_start(&w, &member);
	raw_register(&member, &message);
	UNTIL(&w, w.coordinator->view && w.coordinator->view->n_members == 2);
	beat(&w, &member, id, w.coordinator->epoch);
	UNTIL(&w, has_members(&w, 2));
	for (unsigned i = 0; i < N_WAITING; i++) {
		char name[32];

		(void)snprintf(name, sizeof(name), "job%u", i);
		open_job(&waiting[i], &member, id, name, i % 2 ? 3 : 9);
	}
	UNTIL(&w, w.coordinator->n_openings == N_WAITING);
	n_looked_at = 0;
	for (unsigned i = 0; i < 10; i++)
		beat(&w, &member, id, w.coordinator->epoch);
	ASSERT_EQ(n_looked_at, 0);
	/* Nor when a server says that it has views that nobody has made. */
	for (unsigned i = 0; i < 10; i++)
		beat(&w, &member, id, w.coordinator->epoch + i);
	ASSERT_EQ(n_looked_at, 0);
	node_start(&w, &b, "b", ROLE_SERVER);
	for (unsigned i = 1; i < N_WAITING; i += 2)
		UNTIL(&w, waiting[i].is_done);
	ASSERT_EQ(w.coordinator->n_openings, N_WAITING / 2);
	ASSERT_EQ(w.coordinator->n_jobs, N_WAITING / 2);
	for (unsigned i = 0; i < N_WAITING; i += 2) {
		ASSERT_TRUE(!waiting[i].is_done);
		rpc_request_cancel(&waiting[i].request);
	}
	UNTIL(&w, !w.coordinator->n_openings);
	raw_stop(&member);
	node_stop(&b);
	node_stop(&a);
	world_stop(&w);
}

/* A coordinator with a server, and two members by hand. */
struct scene {
	struct world w;
	struct node server;
	struct raw member, other;
	uint64_t id, others_id;
};

static void scene_start(struct scene *s)
{
	world_start(&s->w);
	node_start(&s->w, &s->server, "a", ROLE_SERVER);
	s->id = join(&s->w, &s->member, 5, "asks", 2);
	s->others_id = join(&s->w, &s->other, 6, "asks-too", 3);
}

static void scene_stop(struct scene *s)
{
	raw_stop(&s->other);
	raw_stop(&s->member);
	node_stop(&s->server);
	world_stop(&s->w);
}

/* Who has wanted more servers than there are gets the job's as soon as another has opened it. */
GRPC_TEST(who_waits_is_told_when_another_opens_the_job)
{
	struct raw waiting[3], opened;
	struct scene s;

	scene_start(&s);
	open_job(&waiting[0], &s.member, s.id, "job", 9);
	open_job(&waiting[1], &s.member, s.id, "job", 8);
	open_job(&waiting[2], &s.member, s.id, "another", 8);
	UNTIL(&s.w, s.w.coordinator->n_openings == 3);
	open_job(&opened, &s.other, s.others_id, "job", 1);
	UNTIL(&s.w, opened.is_done && waiting[0].is_done && waiting[1].is_done);
	ASSERT_TRUE(!opened.status && !waiting[0].status && !waiting[1].status);
	ASSERT_TRUE(!waiting[2].is_done);
	ASSERT_EQ(s.w.coordinator->n_openings, 1);
	ASSERT_EQ(s.w.coordinator->n_jobs, 1);
	rpc_request_cancel(&waiting[2].request);
	UNTIL(&s.w, !s.w.coordinator->n_openings);
	scene_stop(&s);
}

static unsigned compared_to_open(unsigned n_jobs)
{
	struct wire_register message = registration(5, "asks");
	struct raw member, opened;
	struct world w;
	struct node a;
	unsigned n;

	world_start(&w);
	node_start(&w, &a, "a", ROLE_SERVER);
	raw_start(&w, &member);
	UNTIL(&w, has_members(&w, 1));
	message.epoch = w.coordinator->epoch;
	message.views = (struct wire_views){ &w.coordinator->view, 1 };
	message.n_jobs = n_jobs;
	message.jobs = calloc(n_jobs, sizeof(message.jobs[0]));
	ASSERT_TRUE(message.jobs);
	for (unsigned i = 0; i < n_jobs; i++) {
		(void)snprintf(message.jobs[i].name, sizeof(message.jobs[i].name), "job%u", i);
		message.jobs[i].epoch = w.coordinator->epoch;
	}
	raw_register(&member, &message);
	UNTIL(&w, w.coordinator->n_jobs == n_jobs && has_members(&w, 2));
	n_compared = 0;
	for (unsigned i = 0; i < 10; i++) {
		open_job(&opened, &member, message.member.id, "new", 1);
		UNTIL(&w, opened.is_done);
		ASSERT_EQ(opened.status, 0);
	}
	n = n_compared;
	ASSERT_EQ(w.coordinator->n_jobs, n_jobs + 1);
	/* All that a member no longer says that it has is closed. */
	free(message.jobs);
	message.n_jobs = 0;
	raw_stop(&member);
	raw_start(&w, &member);
	raw_register(&member, &message);
	UNTIL(&w, !w.coordinator->n_jobs);
	raw_stop(&member);
	node_stop(&a);
	world_stop(&w);
	return n;
}

GRPC_TEST(a_job_is_found_among_however_many)
{
	unsigned few = compared_to_open(16);

	ASSERT_INT(compared_to_open(1024), <=, few + 100);
}

#define N_LARGE 5

/* As large as there can be: four and a half of them are one message. */
static struct view *large_view(uint32_t epoch)
{
	struct view_member *members = calloc(CLUSTER_NODES_MAX, sizeof(*members));
	struct view *view = NULL;

	ASSERT_TRUE(members);
	for (unsigned i = 0; i < CLUSTER_NODES_MAX; i++) {
		members[i].id = UINT64_MAX - i;
		members[i].roles = ROLE_SERVER;
		(void)snprintf(members[i].name, sizeof(members[i].name), "n%061u", i);
		(void)snprintf(members[i].address, sizeof(members[i].address), "n%087u:1", i);
	}
	ASSERT_OK(view_new(epoch, members, CLUSTER_NODES_MAX, &view));
	free(members);
	return view;
}

static void hold_large_views(struct world *w, struct raw *raw, uint64_t number, uint32_t epoch)
{
	struct wire_register message = registration(number, number % 2 ? "odd" : "even");
	struct wire_job jobs[N_LARGE] = { 0 };
	struct view *views[N_LARGE];
	size_t n = w->coordinator->n_jobs;

	for (uint32_t i = 0; i < N_LARGE; i++) {
		views[i] = large_view(epoch + i);
		(void)snprintf(jobs[i].name, sizeof(jobs[i].name), "large%u", epoch + i);
		jobs[i].epoch = epoch + i;
	}
	message.jobs = jobs;
	message.views = (struct wire_views){ views, N_LARGE };
	message.n_jobs = N_LARGE;
	raw_start(w, raw);
	raw_register(raw, &message);
	UNTIL(w, w->coordinator->n_jobs == n + N_LARGE);
	for (uint32_t i = 0; i < N_LARGE; i++)
		(void)view_unref(views[i]);
}

/* Whoever comes hears of them all, in as many messages as that takes. */
GRPC_TEST(however_large_others_views_are_a_member_is_welcome)
{
	struct raw odd, even;
	struct world w;
	struct node a;

	world_start(&w);
	hold_large_views(&w, &odd, 5, 100);
	hold_large_views(&w, &even, 6, 200);
	node_start(&w, &a, "a", ROLE_SERVER);
	UNTIL(&w, a.is_failed || members_of(&a) == 3);
	ASSERT_TRUE(!a.is_failed && a.key_len);
	for (uint32_t i = 0; i < 2 * N_LARGE; i++) {
		const struct view *view =
			cluster_view_of(a.cluster, i % 2 ? 100 + i / 2 : 200 + i / 2);

		ASSERT_TRUE(view && view->n_members == CLUSTER_NODES_MAX);
	}
	raw_stop(&even);
	raw_stop(&odd);
	node_stop(&a);
	world_stop(&w);
}

/* A member may have as many jobs open as it leaves to others, however few jobs there are. */
GRPC_TEST(a_member_has_a_share_of_what_may_be_open)
{
	static const size_t others = (1 << 20) - 2;
	struct raw opened[3];
	struct scene s;

	scene_start(&s);
	open_job(&opened[0], &s.member, s.id, "job", 1);
	UNTIL(&s.w, opened[0].is_done);
	ASSERT_EQ(opened[0].status, 0);
	/* As if so many were others'. */
	s.w.coordinator->n_holds += others;
	open_job(&opened[1], &s.member, s.id, "more", 1);
	UNTIL(&s.w, opened[1].is_done);
	ASSERT_EQ(opened[1].status, -ENOBUFS);
	ASSERT_CONTAINS(opened[1].text, "too many jobs are open");
	open_job(&opened[2], &s.other, s.others_id, "job", 1);
	UNTIL(&s.w, opened[2].is_done);
	ASSERT_EQ(opened[2].status, 0);
	s.w.coordinator->n_holds -= others;
	scene_stop(&s);
}

/* As much as it leaves to others. */
GRPC_TEST(a_member_has_a_share_of_what_may_wait)
{
	struct raw waiting[2], refused;
	struct scene s;

	scene_start(&s);
	/* As if so many were others'. */
	s.w.coordinator->n_openings += 4094;
	open_job(&waiting[0], &s.member, s.id, "job", 9);
	UNTIL(&s.w, s.w.coordinator->n_openings == 4095);
	open_job(&refused, &s.member, s.id, "more", 9);
	UNTIL(&s.w, refused.is_done || s.w.coordinator->n_openings > 4095);
	ASSERT_TRUE(refused.is_done);
	ASSERT_EQ(refused.status, -ENOBUFS);
	ASSERT_CONTAINS(refused.text, "too many jobs wait to be opened");
	open_job(&waiting[1], &s.other, s.others_id, "job", 9);
	UNTIL(&s.w, s.w.coordinator->n_openings == 4096);
	s.w.coordinator->n_openings -= 4094;
	for (unsigned i = 0; i < 2; i++)
		rpc_request_cancel(&waiting[i].request);
	UNTIL(&s.w, !s.w.coordinator->n_openings);
	scene_stop(&s);
}
