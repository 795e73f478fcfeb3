/* Elastic jobs at their home: what nodes say of who is gone, and ranks that regroup. */
#include "base/clock.h"
#include "far.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "server/common/message.h"

#define LEN    64u /* of the part that all rounds here have */
#define FLOATS (LEN / sizeof(float))

static unsigned n_decoded;

int __real_past_decode(const void *joined, size_t len, struct past **ret_past);
int __wrap_past_decode(const void *joined, size_t len, struct past **ret_past);
int __wrap_past_decode(const void *joined, size_t len, struct past **ret_past)
{
	n_decoded++;
	return __real_past_decode(joined, len, ret_past);
}

static struct layout elastic_layout(uint32_t n_nodes)
{
	struct layout layout = far_layout("elastic", n_nodes, NULL);

	layout.resume = layout.elastic = true;
	return layout;
}

static struct data_header part(const struct layout *layout, uint64_t key, uint64_t round,
			       uint32_t node)
{
	struct data_header h = far_push(layout, key, round, node);

	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = LEN;
	return h;
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t key,
			  uint64_t round, uint32_t node)
{
	struct data_header h = part(layout, key, round, node);
	float data[FLOATS] = { 1 };

	return far_call(far, node, &h, data);
}

static struct asked *offer(struct far *far, const struct layout *layout, uint64_t key,
			   uint32_t node, int32_t n_gone)
{
	struct data_header h = part(layout, key, 1, node);
	float data[FLOATS] = { 5 };

	h.op = DATA_OFFER;
	h.n_gone_then = n_gone;
	return far_call(far, node, &h, data);
}

/* All ranks of these nodes regroup, as they are in the layout. */
static struct asked *regroup(struct far *far, const struct layout *layout, uint32_t node,
			     uint32_t membership, const struct join_change *change)
{
	struct join_change c = change ? *change : (struct join_change){ 0 };

	c.regroups = layout->job;
	c.has_newcomers = true;
	c.membership = membership;
	c.instance = c.instance ? c.instance : 7000 + node;
	return far_join(far, node, layout, node, &c);
}

static uint32_t membership_of(const struct asked *asked)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;

	ASSERT_OK(unpack(&bps__cluster__job_joined__descriptor, asked->data, asked->answer.len,
			 (ProtobufCMessage **)&m));
	return m->membership;
}

/* Its nodes attach as the next run. */
static void attach_next(struct far *far, const struct asked *const *joins, struct layout *layout)
{
	layout->job = 0;
	memset(layout->gone, 0, sizeof(layout->gone));
	for (uint32_t i = 0; i < layout->n_nodes; i++)
		far_take_joined(joins[i], layout);
	for (uint32_t i = 0; i < layout->n_nodes; i++)
		far_expect(far, far_attach(far, i, layout, i, 7000 + i), 0, NULL);
}

TEST(a_result_without_more_ranks_than_are_gone_is_none)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(3), kept = far_layout("kept", 2, NULL);
	struct asked *a, *b;
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	layout.gone[2] = DATA_MOVES_LOST;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	far_expect(far, offer(far, &layout, key, 0, 2), -EPROTO, "made without 2 ranks, and 1");
	far_expect(far, offer(far, &layout, key, 0, -1), -EPROTO, "and 1 are gone");
	/* What was made with less is that. */
	a = offer(far, &layout, key, 0, 1);
	b = push(far, &layout, key, 1, 1);
	far_expect(far, b, 0, NULL);
	ASSERT_EQ(b->answer.n_gone, 1);
	far_expect_waiting(far, a);

	kept.resume = true;
	far_form(far, &kept);
	key = far_tensor(far, &kept, "t", DTYPE_FLOAT32, FLOATS, NULL);
	far_expect(far, offer(far, &kept, key, 0, 1), -EPROTO, "made without");
}

TEST(who_is_gone_is_one_of_two_words)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);

	far_form(far, &layout);
	layout.gone[1] = 2;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -EINVAL,
		   "ranks that cannot be");
	layout.gone[1] = UINT32_MAX;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -EINVAL,
		   "ranks that cannot be");
	layout.gone[1] = 0;
	layout.moves[1] = DATA_MOVES_OFTEN + 1;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -EINVAL,
		   "servers that cannot be");
	layout.moves[1] = 0;
	layout.gone[1] = DATA_MOVES_LEFT;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
}

/* The next run takes the place of the one before it, at the home and elsewhere; once. */
TEST(ranks_regroup_where_there_is_no_room_for_another_job)
{
	struct far_options options = { .max_jobs = 1 };
	_cleanup_(far_freep) struct far *far = far_new(&options);
	struct layout layout = elastic_layout(2), later;
	struct asked *joins[2];

	far_form(far, &layout);
	for (uint32_t i = 0; i < 2; i++)
		joins[i] = regroup(far, &layout, i, 1, NULL);
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, joins[i], 0, NULL);
	attach_next(far, (const struct asked *const *)joins, &layout);
	ASSERT_EQ(far_n_jobs(far), 1);

	/* Another server hears of it from the first node that attaches; the other is still in the run before. */
	later = layout;
	later.job++;
	far_expect(far, far_attach(far, 0, &later, 0, 8000), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 2);
	later.job++;
	far_expect(far, far_attach(far, 0, &later, 0, 8100), -EDQUOT, "max_jobs");
	later.job--;
	far_expect(far, far_attach(far, 1, &later, 1, 8001), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	layout = far_layout("another", 1, NULL);
	far_expect(far, far_join(far, 3, &layout, 0, NULL), -EDQUOT, "max_jobs");
}

/* The one before goes on with other servers meanwhile: it still has no place of its own. */
TEST(servers_change_where_there_is_room_for_the_next_run_alone)
{
	struct far_options options = { .max_jobs = 1 };
	_cleanup_(far_freep) struct far *far = far_new(&options);
	struct layout layout = elastic_layout(2), later, another = far_layout("another", 1, NULL);

	far_form(far, &layout);
	later = layout;
	later.job++;
	far_expect(far, far_attach(far, 0, &later, 0, 8000), 0, NULL);
	layout.moves[1] = 1;
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 2);
	far_expect(far, far_join(far, 3, &another, 0, NULL), -EDQUOT, "max_jobs");
	far_expect(far, far_attach(far, 1, &later, 1, 8001), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_expect(far, far_join(far, 3, &another, 0, NULL), -EDQUOT, "max_jobs");
	for (uint32_t i = 0; i < 2; i++)
		far_notice(far, i, DATA_LEAVE, later.job, 0, 0, i, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
	far_expect(far, far_join(far, 3, &another, 0, NULL), 0, NULL);
}

/* How long, the nodes say only when they attach. */
TEST(a_node_that_is_lost_as_the_next_run_begins_is_waited_for)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);
	struct asked *joins[2];

	far_form(far, &layout);
	for (uint32_t i = 0; i < 2; i++)
		joins[i] = regroup(far, &layout, i, 1, NULL);
	layout.job = 0;
	for (uint32_t i = 0; i < 2; i++)
		far_take_joined(joins[i], &layout);
	far_lose(far, 1);
	for (unsigned i = 0; i < 3; i++)
		ASSERT_OK(loop_turn(far->loop, 10));
	ASSERT_EQ(far->failed[0].n, 0);
	ASSERT_EQ(far->told[0].n, 0);
	far_expect(far, far_attach(far, 2, &layout, 1, 7001), 0, NULL);
	far_expect(far, far_attach(far, 0, &layout, 0, 7000), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(all_nodes_are_told_one_membership)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);
	struct asked *a, *b;

	far_form(far, &layout);
	a = regroup(far, &layout, 0, 4, NULL);
	b = regroup(far, &layout, 1, 6, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	ASSERT_EQ(membership_of(a), 7);
	ASSERT_EQ(membership_of(b), 7);
}

/* The home's process is another, and nobody has told it of a view that has passed long since. */
TEST(a_home_that_does_not_know_the_view_is_told)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);
	struct join_change change = { 0 };
	struct asked *a, *b;
	uint32_t known;

	far_form(far, &layout);
	known = far->view->epoch;
	far->view->epoch = known + 5;
	a = regroup(far, &layout, 0, 1, NULL);
	b = regroup(far, &layout, 1, 1, NULL);
	far_expect(far, a, -ESTALE, "does not know view");
	far_expect(far, b, -ESTALE, "does not know view");

	far->view->epoch = known;
	layout.job = 0;
	far_form(far, &layout);
	ASSERT_OK(view_new(known, far->view->members, far->view->n_members,
			   (struct view **)&change.view));
	far->view->epoch = known + 5;
	a = regroup(far, &layout, 0, 1, &change);
	b = regroup(far, &layout, 1, 1, &change);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	(void)view_unref((struct view *)change.view);
	far->view->epoch = known;
	/* One that is not the job's is refused. */
	layout.job = 0;
	far_take_joined(a, &layout);
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, 7000 + i), 0, NULL);
	change = (struct join_change){ .epoch = known + 1 };
	far_expect(far, regroup(far, &layout, 0, 2, &change), -EINVAL, "another view");
}

/* A node whose last rank died before it heard of the next run leaves that; the others go on. */
TEST(who_gives_the_next_run_up_ends_it_for_nobody_else)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(3);
	struct asked *joins[3], *a, *b;
	uint64_t key;

	far_form(far, &layout);
	for (uint32_t i = 0; i < 3; i++)
		joins[i] = regroup(far, &layout, i, 1, NULL);
	layout.job = 0;
	for (uint32_t i = 0; i < 3; i++)
		far_take_joined(joins[i], &layout);
	far_expect(far, far_attach(far, 0, &layout, 0, 7000), 0, NULL);
	far_notice(far, 2, DATA_LEAVE, layout.job, 0, 0, 2, 0, NULL);
	far_expect(far, far_attach(far, 1, &layout, 1, 7001), 0, NULL);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(far->failed[i].n, 0);
		ASSERT_TRUE(far->told[i].n);
		ASSERT_EQ(far->told[i].moves[FAR_SERVERS + 1], 0);
		ASSERT_EQ(far->told[i].moves[FAR_SERVERS + 2], DATA_MOVES_LOST);
	}
	layout.gone[2] = DATA_MOVES_LOST;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, 7000 + i), 0, NULL);
	a = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, FLOATS, 0);
	b = far_declare(far, 1, &layout, 1, "t", DTYPE_FLOAT32, FLOATS, 1);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	key = 1;
	a = push(far, &layout, key, 1, 0);
	b = push(far, &layout, key, 1, 1);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	ASSERT_EQ(b->answer.n_gone, 1);
}

/* The nodes of a layout regroup, and joiners were taken in: joins[] are answered. */
static void expect_next(struct far *far, struct layout *layout, uint32_t size,
			const uint32_t *node_of_rank)
{
	struct asked *joins[FAR_ENDS];
	uint32_t members = layout->n_nodes;

	for (uint32_t i = 0; i < members; i++)
		joins[i] = regroup(far, layout, i, 1, NULL);
	layout->job = 0;
	layout->size = size;
	memcpy(layout->node_of_rank, node_of_rank, size * sizeof(node_of_rank[0]));
	for (uint32_t i = 0; i < members; i++) {
		far_expect(far, joins[i], 0, NULL);
		ASSERT_EQ(joins[i]->answer.node, i);
		far_take_joined(joins[i], layout);
	}
}

/* Newcomers at a daemon, end, whose node has no rank in the job. */
static struct asked *come(struct far *far, unsigned end, const struct layout *layout, uint32_t n,
			  const char *secret)
{
	struct join_change c = { .size = 1, .n_nodes = 1, .local_size = 1, .no_ranks = true };

	c.instance = 9000 + end;
	c.has_newcomers = true;
	c.newcomers = n;
	c.secret = secret;
	return far_join(far, end, layout, 0, &c);
}

TEST(newcomers_of_other_nodes_are_in_the_next_run)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2), all;
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	_cleanup_(view_unrefp) struct view *view = NULL;
	struct asked *a, *b, *c, *late;

	layout.max_ranks = 6;
	far_expect(far, come(far, 4, &layout, 1, NULL), -ENOENT, "home to no elastic job");
	far_form(far, &layout);
	far_expect(far, come(far, 4, &layout, 1, "wrong"), -ENOENT, "home to no elastic job");
	far_expect(far, come(far, 1, &layout, 1, NULL), -ENOENT, "this node is not in");
	a = come(far, 4, &layout, 1, NULL);
	b = come(far, 5, &layout, 2, NULL);
	c = come(far, 6, &layout, 7, NULL);
	late = come(far, 7, &layout, 1, NULL);
	ASSERT_EQ(far->told[0].newcomers, 11);
	ASSERT_EQ(far->told[1].newcomers, 11);
	/* One more has come there, one has changed its mind, and one is gone. */
	far_expect_waiting(far, a);
	far_expect_waiting(far, late);
	far_expect(far, come(far, 5, &layout, 0, NULL), -ENOENT, "wait no more");
	far_expect(far, b, -EALREADY, NULL);
	b = come(far, 4, &layout, 3, NULL);
	far_expect(far, a, -EALREADY, "newer join");

	ASSERT_EQ(far->told[0].newcomers, 11);

	all = layout;
	all.n_nodes = 2;
	expect_next(far, &all, 6, (const uint32_t[]){ 0, 1, 2, 2, 2, 3 });
	far_expect(far, b, 0, NULL);
	ASSERT_EQ(b->answer.node, 2);
	far_expect(far, c, 0, NULL);
	ASSERT_EQ(c->answer.node, 3);
	far_expect_waiting(far, late);
	ASSERT_OK(unpack(&bps__cluster__job_joined__descriptor, c->data, c->answer.len,
			 (ProtobufCMessage **)&m));
	ASSERT_EQ(m->max_ranks, 6);
	ASSERT_EQ(m->membership, 2);
	ASSERT_OK(view_unpack(m->view.data, m->view.len, "end6", &view));
	ASSERT_TRUE(view_same(view, far->view));

	/* The others attach; a joiner that is lost, or a job that ends, is answered. */
	all.n_nodes = 4;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &all, i, 7000 + i), 0, NULL);
	far_expect(far, far_attach(far, 4, &all, 2, 9004), 0, NULL);
	far_expect(far, far_attach(far, 6, &all, 3, 9006), 0, NULL);
	far_expect_waiting(far, late);
	ASSERT_EQ(far->told[6].newcomers, 1);
	far_notice(far, 0, DATA_FAIL_JOB, all.job, 0, 0, 0, EPIPE, "it fails");
	far_expect(far, late, -ECANCELED, "has ended");
}

/* -- JobJoined beside ATTACH ---------------------------------------------------------------------------------------- */

#define OLD_RUN	 77u
#define NEXT_RUN 88u

/* Node 0 of a run of two nodes brings it to a server that is not its home. */
static struct asked *bring(struct far *far, struct layout *layout, const void *joined, size_t len)
{
	layout->elsewhere = true;
	layout->job = NEXT_RUN;
	layout->joined = joined;
	layout->joined_len = len;
	return far_attach(far, 0, layout, 0, 7000);
}

static struct asked *bring_message(struct far *far, struct layout *layout,
				   const Bps__Cluster__JobJoined *m)
{
	_cleanup_(freep) void *data = NULL;
	struct asked *asked;
	size_t len;

	ASSERT_OK(pack(&m->base, 1 << 20, &data, &len));
	asked = bring(far, layout, data, len);
	far_wait(far, asked);
	return asked;
}

/* As a home would say it. */
static Bps__Cluster__JobJoined next_run(void)
{
	static uint32_t nodes[] = { 0, 1 }, stripes[] = { 0, 1 }, old_nodes[] = { 1, 2 };
	static uint64_t joiners[] = { 0, 0 };
	Bps__Cluster__JobJoined m = BPS__CLUSTER__JOB_JOINED__INIT;

	m.job = NEXT_RUN;
	m.n_node_of_rank = m.n_stripes = m.n_old_nodes = m.n_joiners = 2;
	m.node_of_rank = nodes;
	m.part_bytes = 65536;
	m.stripes = stripes;
	m.request_timeout_ms = 60000;
	m.has_membership = m.has_regroups = true;
	m.membership = 2;
	m.regroups = OLD_RUN;
	m.old_nodes = old_nodes;
	m.joiners = joiners;
	return m;
}

/* Node 1, which had not heard. */
static struct asked *ask(struct far *far, const struct layout *layout, const char *name)
{
	struct layout old = *layout;

	old.name = name;
	old.job = OLD_RUN;
	return regroup(far, &old, 1, 1, NULL);
}

TEST(a_next_run_that_cannot_be_is_refused)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2), kept;
	uint32_t others[] = { 1, 0 };
	Bps__Cluster__JobJoined m;
	static uint32_t stripes[PLACEMENT_STRIPES + 1];
	static const char text[] = "a run that its ranks cannot have begun";

	far_expect(far, bring(far, &layout, "", 0), -EPROTO, text);
	far_expect(far, bring(far, &layout, "\xff\xff\xff", 3), -EPROTO, text);
	m = next_run();
	m.has_regroups = false;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.regroups = NEXT_RUN;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.n_joiners = 1;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.n_joiners = m.n_old_nodes = 1;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.n_node_of_rank = 1;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.node_of_rank = others;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.stripes = stripes;
	m.n_stripes = ARRAY_SIZE(stripes);
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.member_of_node = stripes;
	m.n_member_of_node = 3;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, text);
	m = next_run();
	m.job = NEXT_RUN + 1;
	far_expect(far, bring_message(far, &layout, &m), -EPROTO, "without number, or two");
	kept = layout;
	kept.elastic = false;
	m = next_run();
	far_expect(far, bring_message(far, &kept, &m), -EPROTO, text);
	ASSERT_EQ(far_n_jobs(far), 0);
	/* And one that can is none of these. */
	m = next_run();
	far_expect(far, bring_message(far, &layout, &m), 0, NULL);
	far_expect(far, ask(far, &layout, "other"), -EPROTO, "is of job elastic");
	far_expect(far, ask(far, &layout, "elastic"), 0, NULL);
}

/* Whoever asks, and however often. */
TEST(a_next_run_is_taken_apart_once)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);
	Bps__Cluster__JobJoined m = next_run();

	far_expect(far, bring_message(far, &layout, &m), 0, NULL);
	n_decoded = 0;
	for (unsigned i = 0; i < 5; i++)
		far_expect(far, ask(far, &layout, "elastic"), 0, NULL);
	ASSERT_EQ(n_decoded, 1);
}

/* Whatever is said of the nodes of before: who is none of them is told so. */
TEST(a_next_run_of_nodes_that_there_are_not)
{
	uint32_t given[][2] = { { 1, 1 }, { 1, UINT32_MAX }, { 1, 0 }, { 0, 0 }, { 1, 3 } };

	for (size_t i = 0; i < ARRAY_SIZE(given); i++) {
		_cleanup_(far_freep) struct far *far = far_new(NULL);
		struct layout layout = elastic_layout(2);
		Bps__Cluster__JobJoined m = next_run();

		m.old_nodes = given[i];
		far_expect(far, bring_message(far, &layout, &m), 0, NULL);
		far_expect(far, ask(far, &layout, "elastic"), -ESTALE,
			   "without those of this node");
	}
}

/* What waits for another job, whose number it says, goes on waiting. */
TEST(a_next_run_of_another_job)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2), other = elastic_layout(2);
	Bps__Cluster__JobJoined m = next_run();
	struct asked *joiner, *waits;

	other.name = "other";
	far_form(far, &other);
	joiner = come(far, 4, &other, 1, NULL);
	waits = regroup(far, &other, 1, 1, NULL);
	m.regroups = other.job;
	far_expect(far, bring_message(far, &layout, &m), 0, NULL);
	far_expect_waiting(far, joiner);
	far_expect_waiting(far, waits);
}

/* Each byte of one is another, and each beginning of it is all there is: it is refused, or taken as it is. */
TEST(a_next_run_of_any_bytes)
{
	_cleanup_(freep) uint8_t *data = NULL;
	Bps__Cluster__JobJoined m = next_run();
	unsigned n_taken = 0, n_refused = 0;
	size_t len;

	ASSERT_OK(pack(&m.base, 1 << 20, (void **)&data, &len));
	for (size_t i = 0; i < 2 * len; i++) {
		_cleanup_(far_freep) struct far *far = far_new(NULL);
		struct layout layout = elastic_layout(2);
		uint8_t was = data[i % len];
		struct asked *asked;

		data[i % len] ^= i < len ? 1u << i % 8 : 0;
		asked = bring(far, &layout, data, i < len ? len : i - len);
		data[i % len] = was;
		far_wait(far, asked);
		ASSERT_TRUE(asked->status == -EPROTO || (!asked->status && i < len));
		n_taken += !asked->status;
		n_refused += asked->status != 0;
		asked = ask(far, &layout, "elastic");
		far_wait(far, asked);
		ASSERT_TRUE(!asked->status || asked->status == -ESTALE ||
			    asked->status == -ESHUTDOWN);
	}
	ASSERT_TRUE(n_taken && n_refused > len);
}

/* Its node drops it when the deadline has come: only later is it nobody's. */
TEST(a_declaration_outlasts_the_dropping_of_who_is_late)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = elastic_layout(2);
	uint64_t began;

	layout.request_timeout_ms = 60;
	far_form(far, &layout);
	began = clock_now_ns();
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 1, 0), -ETIMEDOUT,
		   "rank 1 has not declared it within 0.06 s");
	ASSERT_TRUE(clock_now_ns() - began >= 60 * NSEC_PER_MSEC + NSEC_PER_SEC);
}
