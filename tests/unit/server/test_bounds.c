/*
 * What a peer can have the server do with one message grows with the nodes and ranks of its job,
 * and not with their product. Work is counted: how often functions are called that look at all
 * nodes or ranks.
 */
#include "base/clock.h"
#include "base/log.h"
#include "double.h"
#include "server/job/job.h"
#include "server/job/store.h"

#define FAR  _cleanup_(far_freep) struct far *far
#define FEW  32
#define MANY (2 * FEW)

static uint64_t now_ns; /* 0: the real one */
static unsigned n_texts, n_searches, n_looks;

int __real_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
	if (!now_ns)
		return __real_clock_gettime(clock, ret);
	*ret = (struct timespec){ (time_t)(now_ns / NSEC_PER_SEC), (long)(now_ns % NSEC_PER_SEC) };
	return 0;
}

/* All ranks are looked at for those of a node. */
const char *__real_job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text);
const char *__wrap_job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text);
const char *__wrap_job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text)
{
	n_texts++;
	return __real_job_node_text(job, node, ret_text);
}

/* All nodes may be looked at for a peer. */
uint32_t __real_job_node_of(const struct job *job, const struct peer *peer);
uint32_t __wrap_job_node_of(const struct job *job, const struct peer *peer);
uint32_t __wrap_job_node_of(const struct job *job, const struct peer *peer)
{
	n_searches++;
	return __real_job_node_of(job, peer);
}

/* Each node is looked at for whether its peer is lost: by the test's clock that takes a while. */
const char *__real_peer_loss(const struct peer *peer);
const char *__wrap_peer_loss(const struct peer *peer);
const char *__wrap_peer_loss(const struct peer *peer)
{
	n_looks++;
	if (now_ns)
		now_ns += NSEC_PER_USEC;
	return __real_peer_loss(peer);
}

/* All servers before it are looked at for one. */
static unsigned n_counted, n_compared;
const struct view_member *__real_view_server(const struct view *view, size_t i);
const struct view_member *__wrap_view_server(const struct view *view, size_t i);
const struct view_member *__wrap_view_server(const struct view *view, size_t i)
{
	n_counted++;
	return __real_view_server(view, i);
}

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_compared++;
	return __real_strcmp(a, b);
}

/* Whether a node is one that wants it. */
static unsigned n_wants;
bool __real_set_wants(const struct job *job, const struct data_header *header, uint32_t node);
bool __wrap_set_wants(const struct job *job, const struct data_header *header, uint32_t node);
bool __wrap_set_wants(const struct job *job, const struct data_header *header, uint32_t node)
{
	n_wants++;
	return __real_set_wants(job, header, node);
}

/* -- Nodes of an elastic job ---------------------------------------------------------------------------------------- */

/* Its nodes have a rank each: end 1 speaks for the last, end 0 for the others. */
static struct layout attached(struct far *far, uint32_t n_nodes)
{
	struct layout layout = far_layout("job", n_nodes, NULL);

	layout.resume = layout.elastic = layout.elsewhere = true;
	layout.job = 77;
	for (uint32_t i = 0; i < n_nodes; i++)
		far_expect(far, far_attach(far, i == n_nodes - 1, &layout, i, FAR_INSTANCE + i), 0,
			   NULL);
	n_texts = n_searches = n_looks = 0;
	return layout;
}

/* An end says that the first ranks are gone. */
static void say_gone(struct far *far, const struct layout *layout, unsigned end, uint32_t node,
		     uint32_t n_gone)
{
	uint32_t moves[FAR_SERVERS + MANY] = { 0 };
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_MOVE,
		.job = layout->job,
		.node = node,
		.len = (FAR_SERVERS + layout->size) * (uint32_t)sizeof(moves[0]),
	};

	for (uint32_t i = 0; i < n_gone; i++)
		moves[FAR_SERVERS + i] = DATA_MOVES_LOST;
	far->ops->notice(far, end, &h, moves);
}

static void keeps(struct far *far, const struct layout *layout, uint32_t node)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_HAVE,
		.job = layout->job,
		.key = 1,
		.round = 1,
		.is_all = 1,
		.epoch = far_epoch(layout),
		.node = node,
	};

	far->ops->notice(far, node == layout->n_nodes - 1, &h, NULL);
}

/* A result is safe once all nodes keep it: none is looked at twice. */
TEST(nodes_that_keep_a_result_are_looked_at_once)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, FAR_RANKS);
	float data[16] = { 7 };
	struct data_header h = far_push(&layout, 1, 1, 0);
	struct asked *offered;

	h.op = DATA_OFFER;
	h.epoch = far_epoch(&layout);
	h.len = h.part_len = h.total = sizeof(data);
	offered = far_call(far, 0, &h, data);
	far_expect_waiting(far, offered);
	n_wants = 0;
	for (uint32_t i = 1; i < FAR_RANKS; i++)
		keeps(far, &layout, i);
	far_expect(far, offered, 0, NULL);
	ASSERT_INT(n_wants, <, 8 * FAR_RANKS);
}

/* Who has left is counted: with each node that leaves all nodes are looked at, and not one rank. */
TEST(a_node_leaves_without_a_look_at_ranks)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, MANY);
	struct job *job = list_first(&far->server->jobs, struct job, link);
	uint32_t *node_of_rank = job->node_of_rank;

	say_gone(far, &layout, 1, MANY - 1, MANY / 2);
	job->node_of_rank = NULL;
	for (uint32_t i = MANY / 2; i < MANY - 1; i++)
		far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, i, 0, NULL);
	job->node_of_rank = node_of_rank;
	ASSERT_EQ(far_n_jobs(far), 1);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, MANY - 1, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(a_job_is_over_when_all_ranks_are_said_to_be_gone)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, MANY);

	say_gone(far, &layout, 1, MANY - 1, MANY - 1);
	ASSERT_EQ(far_n_jobs(far), 1);
	ASSERT_EQ(far->told[0].moves[FAR_SERVERS], DATA_MOVES_LOST);
	say_gone(far, &layout, 1, MANY - 1, MANY);
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* And said to be so in one line of the log. */
TEST(nodes_that_are_lost_together_are_left_out_in_one_walk)
{
	FAR = far_new(NULL);
	struct layout layout;

	now_ns = 100 * NSEC_PER_SEC;
	layout = attached(far, MANY);
	far_lose(far, 0);
	ASSERT_EQ(far->told[1].n, 0);
	log_set_level(LOG_LEVEL_NOTICE);
	now_ns += 100 * NSEC_PER_SEC;
	while (!far->told[1].n)
		ASSERT_OK(loop_turn(far->loop, 0));
	ASSERT_INT(n_texts, <=, 1);
	for (uint32_t i = 0; i < layout.size; i++)
		ASSERT_EQ(far->told[1].moves[FAR_SERVERS + i], i < MANY - 1 ? DATA_MOVES_LOST : 0);
}

/* Who says it again and again has the others told of it once in a second. */
TEST(what_is_no_news_is_not_told_again_at_once)
{
	FAR = far_new(NULL);
	struct layout layout;

	now_ns = 100 * NSEC_PER_SEC;
	layout = attached(far, FEW);
	say_gone(far, &layout, 0, 0, 1);
	ASSERT_EQ(far->told[1].n, 1);
	for (unsigned i = 0; i < 10; i++)
		say_gone(far, &layout, 0, 0, 1);
	ASSERT_EQ(far->told[1].n, 1);
	say_gone(far, &layout, 0, 0, 2);
	ASSERT_EQ(far->told[1].n, 2);
	ASSERT_EQ(far->told[1].moves[FAR_SERVERS + 1], DATA_MOVES_LOST);
	now_ns += NSEC_PER_SEC;
	say_gone(far, &layout, 0, 0, 2);
	ASSERT_EQ(far->told[1].n, 3);
}

/* -- Peers that speak for many nodes --------------------------------------------------------------------------------- */

TEST(a_peer_of_many_nodes_is_lost_in_one_walk)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, MANY);

	far_lose(far, 0);
	ASSERT_INT(n_searches, <=, 1);
	ASSERT_INT(n_looks, <=, MANY);
	for (uint32_t i = 0; i + 1 < MANY; i++)
		far_expect(far, far_attach(far, 2, &layout, i, FAR_INSTANCE + i), 0, NULL);
}

TEST(a_peer_of_many_nodes_of_a_job_that_ends_with_it_is_lost_in_one_walk)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", MANY, NULL);

	layout.job = 77;
	for (uint32_t i = 0; i < MANY; i++)
		far_expect(far, far_attach(far, i == MANY - 1, &layout, i, FAR_INSTANCE + i), 0,
			   NULL);
	n_searches = n_looks = 0;
	far_lose(far, 0);
	ASSERT_INT(n_searches, <=, 1);
	ASSERT_INT(n_looks, <=, MANY);
	ASSERT_EQ(far->failed[1].n, 1);
	ASSERT_CONTAINS(far->failed[1].text, "rank 0 (node 0): end0 was lost");
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(a_peer_of_many_nodes_of_a_job_that_forms_is_lost_in_one_walk)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", MANY, NULL);
	struct asked *joins[MANY];

	for (uint32_t i = 1; i < MANY; i++)
		joins[i] = far_join(far, i == MANY - 1, &layout, i, NULL);
	n_searches = n_looks = 0;
	far_lose(far, 0);
	ASSERT_INT(n_searches, <=, 1);
	ASSERT_INT(n_looks, <=, MANY);
	for (uint32_t i = 1; i + 1 < MANY; i++)
		far_expect(far, joins[i], -ECANCELED, "takes no part");
	far_expect_waiting(far, joins[MANY - 1]);
	/* Their ranks may come from elsewhere. */
	for (uint32_t i = 0; i + 1 < MANY; i++)
		joins[i] = far_join(far, 2, &layout, i, NULL);
	for (uint32_t i = 0; i < MANY; i++)
		far_expect(far, joins[i], 0, NULL);
}

TEST(a_peer_that_is_lost_has_no_jobs_of_others_looked_at)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("mine", 1, NULL);

	now_ns = 0;
	(void)attached(far, MANY);
	layout.job = 78;
	far_expect(far, far_attach(far, 2, &layout, 0, FAR_INSTANCE), 0, NULL);
	n_searches = n_looks = 0;
	far_lose(far, 2);
	ASSERT_INT(n_looks, <=, 1);
	ASSERT_EQ(far_n_jobs(far), 1);
}

/* End 0 speaks for all nodes of each job but the last, end 1 for that. The clock is such that a turn has one piece of this. */
static struct layout attach_many(struct far *far, unsigned n_jobs)
{
	struct layout layout;

	now_ns = 100 * NSEC_PER_SEC;
	for (unsigned k = 0; k < n_jobs; k++) {
		char name[16];

		(void)snprintf(name, sizeof(name), "job%u", k);
		layout = far_layout(name, FAR_RANKS, NULL);
		layout.job = 100 + k;
		for (uint32_t i = 0; i < FAR_RANKS; i++)
			far_expect(
				far,
				far_attach(far, i == FAR_RANKS - 1, &layout, i, FAR_INSTANCE + i),
				0, NULL);
	}
	return layout;
}

TEST(jobs_of_many_nodes_hear_of_a_lost_peer_in_pieces)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 16 });
	struct layout layout = attach_many(far, 16);
	struct data_header push;

	far_lose(far, 0);
	ASSERT_EQ(far_n_jobs(far), 16 - 4);
	/* Some hear as soon as somebody wants something of them. */
	push = far_push(&layout, 1, 1, FAR_RANKS - 1);
	far_expect(far, far_call(far, 1, &push, NULL), -ECONNRESET, "end0 was lost");
	ASSERT_EQ(far_n_jobs(far), 16 - 5);
	layout.name = "job14";
	layout.job = 100 + 14;
	far_expect(far, far_attach(far, 2, &layout, 0, 5000), -ECONNRESET, "end0 was lost");
	ASSERT_EQ(far_n_jobs(far), 16 - 6);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
	ASSERT_EQ(far->failed[1].n, 16);
}

TEST(a_job_that_forms_hears_of_a_lost_peer_before_it_goes_on)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 16 });
	struct layout layout = far_layout("forms", 2, NULL);
	struct asked *join, *other;

	(void)attach_many(far, 8);
	join = far_join(far, 0, &layout, 0, NULL);
	far_lose(far, 0);
	ASSERT_TRUE(!join->done);
	/* It is over by what it hears, and this is another. */
	other = far_join(far, 2, &layout, 1, NULL);
	ASSERT_TRUE(join->done && !other->done);
	ASSERT_EQ(far_n_jobs(far), 8 - 4 + 1);
	far_expect(far, far_join(far, 3, &layout, 0, NULL), 0, NULL);
	far_expect(far, other, 0, NULL);
}

TEST(a_server_ends_while_jobs_are_still_to_hear_of_a_lost_peer)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 16 });

	(void)attach_many(far, 16);
	far_lose(far, 0);
	ASSERT_EQ(far_n_jobs(far), 16 - 4);
}

/* -- Many nodes at once --------------------------------------------------------------------------------------------- */

static unsigned n_answered(const struct far *far)
{
	unsigned n = 0;

	for (const struct asked *asked = far->all; asked; asked = asked->next)
		n += asked->done;
	return n;
}

static struct layout attached_alike(struct far *far, uint32_t n_nodes, bool async)
{
	struct layout layout = far_layout("job", n_nodes, NULL);

	layout.job = 77;
	layout.async = async;
	for (uint32_t i = 0; i < n_nodes; i++)
		far_expect(far, far_attach(far, 0, &layout, i, FAR_INSTANCE + i), 0, NULL);
	n_texts = 0;
	return layout;
}

/* What all are told when the last has joined is as long as there are ranks, and copied for none. */
TEST(many_nodes_that_join_are_told_by_one_message)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", FAR_RANKS, NULL);

	now_ns = 0;
	for (uint32_t i = 0; i < FAR_RANKS; i++)
		(void)far_join(far, 0, &layout, i, NULL);
	far_expect(far, far->all, 0, NULL);
	ASSERT_INT(far->all->answer.len, >, FAR_RANKS);
	ASSERT_EQ(far->copied, 0);
}

static struct view *view_of_many(uint32_t n)
{
	_cleanup_(freep) struct view_member *members = calloc(n, sizeof(*members));
	struct view *view = NULL;

	ASSERT_TRUE(members);
	for (uint32_t i = 0; i < n; i++) {
		members[i].id = i + 1;
		members[i].roles = ROLE_SERVER;
		(void)snprintf(members[i].name, sizeof(members[i].name), "m%u", i);
	}
	ASSERT_OK(view_new(FAR_EPOCH + 1, members, n, &view));
	return view;
}

/* Nodes say which view they are in, and may bring one. */
TEST(nodes_and_members_of_a_view_are_put_together_in_one_walk)
{
	const struct far_options options = { .by_link = true };
	FAR = far_new(&options);
	_cleanup_(view_unrefp) struct view *view = view_of_many(FAR_RANKS);
	struct layout layout = far_layout("job", FAR_RANKS, NULL);
	struct join_change change = { .epoch = FAR_EPOCH + 1,
				      .view_digest = view_server_digest(view) };

	now_ns = 0;
	for (uint32_t i = 0; i < FAR_RANKS; i++) {
		change.view = i ? NULL : view;
		n_counted = n_compared = 0;
		(void)far_join(far, 0, &layout, i, &change);
	}
	far_expect(far, far->all, 0, NULL);
	ASSERT_EQ(n_counted, 0);
	ASSERT_INT(n_compared, <, 64 * FAR_RANKS);
}

TEST(a_view_has_no_more_members_than_a_job_ranks)
{
	FAR = far_new(NULL);
	_cleanup_(view_unrefp) struct view *view = view_of_many(JOB_RANKS_MAX + 1);
	struct layout layout = far_layout("job", 1, NULL);
	struct join_change change = { .epoch = FAR_EPOCH + 1,
				      .view_digest = view_server_digest(view),
				      .view = view };

	far_expect(far, far_join(far, 0, &layout, 0, &change), -EPROTO, "a view that cannot be");
	ASSERT_EQ(far_n_jobs(far), 0);
}

static struct asked *push_empty(struct far *far, const struct layout *layout, uint32_t part,
				uint32_t node, unsigned operation)
{
	struct data_header h = far_push(layout, 1, 1, node);

	h.part = part;
	h.operation = (uint8_t)operation;
	/* It waits for all. */
	h.root = operation == OPERATION_ACCUMULATE;
	return far_call(far, 0, &h, NULL);
}

/* Who has not come is looked for once for many that have waited. */
TEST(many_nodes_that_have_waited_for_one_are_told_by_few_looks)
{
	FAR = far_new(NULL);
	struct layout layout;

	now_ns = 100 * NSEC_PER_SEC;
	layout = attached_alike(far, FAR_RANKS, true);
	for (uint32_t i = 1; i < FAR_RANKS; i++)
		far_expect_waiting(far, push_empty(far, &layout, 0, i, OPERATION_ACCUMULATE));
	now_ns += 100 * NSEC_PER_SEC;
	far_expect(far, far->all, -ETIMEDOUT, "rank 0 (node 0) came to round 0 only");
	far_wait_all(far);
	ASSERT_INT(n_texts, <=, FAR_RANKS / 64);
}

/* Each has contributed to all parts of a round, but for the first. */
static struct layout waiting_for_one(struct far *far, uint32_t n_parts)
{
	struct layout layout = attached_alike(far, FAR_RANKS, false);

	for (uint32_t part = 0; part < n_parts; part++)
		for (uint32_t i = 1; i < FAR_RANKS; i++)
			(void)push_empty(far, &layout, part, i, OPERATION_PUSH_PULL);
	return layout;
}

/* However few its parts are: a thousand nodes wait for each. */
static void many_nodes_are_answered_in_pieces(unsigned op, int status)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	const uint32_t n_parts = 32, n = (FAR_RANKS - 1) * n_parts;
	FAR = far_new(&options);
	struct layout layout;
	unsigned before;

	now_ns = 0;
	layout = waiting_for_one(far, n_parts);
	before = n_answered(far);
	far_notice(far, 0, op, layout.job, 1, 1, 0, EIO, op == DATA_LEAVE ? NULL : "not this");
	ASSERT_INT(n_answered(far) - before, <, n * 3 / 4);
	far_wait_all(far);
	far_expect(far, far->all, status, NULL);
	ASSERT_EQ(n_answered(far) - before, n);
}

TEST(a_round_of_many_nodes_fails_in_pieces)
{
	many_nodes_are_answered_in_pieces(DATA_FAIL_ROUND, -EIO);
}

TEST(rounds_of_many_nodes_end_in_pieces)
{
	many_nodes_are_answered_in_pieces(DATA_LEAVE, -EPIPE);
}

TEST(a_job_of_many_nodes_ends_in_pieces)
{
	many_nodes_are_answered_in_pieces(DATA_FAIL_JOB, -EIO);
}

/* -- Late contributions ---------------------------------------------------------------------------------------------- */

static struct asked *push_value(struct far *far, const struct layout *layout, uint64_t round,
				uint32_t node)
{
	static const float value = 1;
	struct data_header h = far_push(layout, 1, round, node);

	h.len = h.part_len = h.total = sizeof(value);
	return far_call(far, 0, &h, &value);
}

/* As far behind as the job allows, and in no more rounds than there may be ranks. */
TEST(a_part_has_no_more_late_contributions_than_a_job_ranks)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30,
					     .inline_bytes = 1 << 20 };
	const unsigned n_rounds = JOB_RANKS_MAX / (FAR_RANKS - 1) + 1;
	FAR = far_new(&options);
	struct layout layout = far_layout("job", FAR_RANKS, NULL);
	struct asked *waits;

	now_ns = 0;
	layout.job = 77;
	layout.quorum = 1;
	layout.staleness = 1000;
	for (uint32_t i = 0; i < FAR_RANKS; i++)
		far_expect(far, far_attach(far, 0, &layout, i, FAR_INSTANCE + i), 0, NULL);
	for (uint64_t round = 1; round <= n_rounds; round++)
		far_expect(far, push_value(far, &layout, round, 0), 0, NULL);
	waits = push_value(far, &layout, n_rounds + 1, 0);
	for (uint64_t round = 1; round <= n_rounds; round++)
		for (uint32_t i = 1; i < FAR_RANKS; i++)
			far_expect(far, push_value(far, &layout, round, i), 0, NULL);
	far_expect_waiting(far, waits);
	for (uint32_t i = 1; i < FAR_RANKS; i++)
		(void)push_value(far, &layout, n_rounds + 1, i);
	far_expect(far, waits, 0, NULL);
	ASSERT_TRUE(*(const float *)waits->data == (float)(FAR_RANKS + n_rounds * (FAR_RANKS - 1)));
	/* That has them all. */
	far_expect(far, push_value(far, &layout, n_rounds + 2, 0), 0, NULL);
}

/* -- Rows ---------------------------------------------------------------------------------------------------------- */

static struct job *only_job(const struct far *far)
{
	return list_first(&far->server->jobs, struct job, link);
}

/* Parts of a round of another operation are none of their business. */
TEST(who_has_given_up_rows_has_no_other_parts_looked_at)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_HAVE,
		.key = 1,
		.round = 1,
	};
	struct list slots;
	struct round *round;

	now_ns = 0;
	layout.resume = true;
	far_form(far, &layout);
	h.job = layout.job;
	h.epoch = far_epoch(&layout);
	for (uint32_t part = 0; part < 2; part++) {
		struct data_header push = far_push(&layout, 1, 1, 0);

		push.epoch = h.epoch;
		push.part = part;
		(void)far_call(far, 0, &push, NULL);
	}
	round = list_first(&tensor_of(only_job(far), 1)->rounds, struct round, link);
	slots = round->slots;
	round->slots = (struct list){ 0 };
	far->ops->notice(far, 0, &h, NULL);
	round->slots = slots;
	far_expect_waiting(far, far->all);
}

TEST(a_node_that_attaches_again_has_no_other_rounds_looked_at)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header push;
	struct list open;

	now_ns = 0;
	layout.resume = true;
	far_form(far, &layout);
	push = far_push(&layout, 1, 1, 0);
	push.epoch = far_epoch(&layout);
	(void)far_call(far, 0, &push, NULL);
	open = only_job(far)->store.open;
	only_job(far)->store.open = (struct list){ 0 };
	far_expect(far, far_attach(far, 2, &layout, 0, FAR_INSTANCE), 0, NULL);
	only_job(far)->store.open = open;
}
