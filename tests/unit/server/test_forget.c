/* FORGET at the home of a job, and servers that drop what all nodes have forgotten. */
#include "double.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "server/job/job.h"

#define FAR _cleanup_(far_freep) struct far *far

static struct asked *forget(struct far *far, const struct layout *layout, uint32_t node,
			    uint64_t key, uint64_t round)
{
	struct data_header h = far_push(layout, key, round, node);

	h.op = DATA_FORGET;
	h.epoch = far_epoch(layout);
	h.dtype = h.operation = h.reduction = 0;
	return far_call(far, node, &h, NULL);
}

/* number: a tensor's key, or of ACK that of a result. */
static void notice(struct far *far, const struct layout *layout, unsigned op, uint32_t node,
		   uint64_t number)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = (uint8_t)op,
		.job = layout->job,
		.epoch = far_epoch(layout),
		.node = node,
	};

	if (op == DATA_ACK)
		header.up_to = number;
	else
		header.key = number;
	if (op == DATA_HAVE) {
		header.round = DATA_ROUND_NEVER;
		header.is_all = 1;
	}
	far->ops->notice(far, node, &header, NULL);
}

/* A tensor that was agreed on before: key; it may have been forgotten since: in_doubt. */
static struct asked *declare_known(struct far *far, const struct layout *layout, uint32_t node,
				   const char *name, uint64_t key, bool in_doubt)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	struct data_header header = {
		.op = DATA_DECLARE,
		.job = layout->job,
		.node = node,
		.epoch = far_epoch(layout),
	};
	_cleanup_(freep) void *data = NULL;
	size_t len;

	m.name = (char *)name;
	m.dtype = DTYPE_FLOAT32;
	m.elements = 5;
	m.rank = node;
	m.has_key = m.has_start = true;
	m.key = key;
	m.has_in_doubt = m.in_doubt = in_doubt;
	ASSERT_OK(pack(&m.base, DATA_SETUP_MAX, &data, &len));
	header.len = (uint32_t)len;
	return far_call(far, node, &header, data);
}

static struct layout formed(struct far *far)
{
	struct layout layout = far_layout("job", 2, NULL);

	layout.resume = true;
	far_form(far, &layout);
	return layout;
}

/* This server takes the place of a home that was lost. */
static struct layout fresh(struct far *far)
{
	struct layout layout = far_layout("job", 2, NULL);

	layout.resume = true;
	layout.job = 77;
	layout.joined_part_bytes = 65536;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	return layout;
}

TEST(once_all_nodes_say_so)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);
	uint64_t key = far_tensor(far, &layout, "a", DTYPE_FLOAT32, 5, NULL), other;
	struct asked *a, *b;

	a = forget(far, &layout, 0, key, 3);
	far_expect_waiting(far, a);
	ASSERT_EQ(far->told[0].n_unused, 0);
	ASSERT_EQ(far->told[1].n_unused, 1);
	/* A node that was lost is asked again. */
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	ASSERT_EQ(far->told[1].n_unused, 2);
	b = forget(far, &layout, 1, key, 3);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	/* Whoever did not hear it asks again. */
	far_expect(far, forget(far, &layout, 0, key, 3), 0, NULL);
	other = far_tensor(far, &layout, "a", DTYPE_INT64, 7, NULL);
	ASSERT_TRUE(other > key);
	far_expect(far, declare_known(far, &layout, 0, "a", key, true), -ESTALE, "name it anew");
}

TEST(not_where_nodes_differ)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);
	uint64_t key = far_tensor(far, &layout, "a", DTYPE_FLOAT32, 5, NULL);
	struct asked *a, *b;

	a = forget(far, &layout, 0, key, 3);
	b = forget(far, &layout, 1, key, 4);
	far_expect(far, a, -EBUSY, "a rank uses");
	far_expect(far, b, -EBUSY, "a rank uses");
	a = forget(far, &layout, 0, key, 4);
	notice(far, &layout, DATA_KEEP, 1, key);
	far_expect(far, a, -EBUSY, "a rank uses");
	/* A process that finds the doubt in its ledger has use of it. */
	a = forget(far, &layout, 0, key, 4);
	far_expect(far, declare_known(far, &layout, 1, "a", key, true), 0, NULL);
	far_expect(far, a, -EBUSY, "a rank uses");
	ASSERT_EQ(far_tensor(far, &layout, "a", DTYPE_FLOAT32, 5, NULL), key);
}

TEST(not_where_a_node_has_left)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);
	uint64_t key = far_tensor(far, &layout, "a", DTYPE_FLOAT32, 5, NULL);
	struct asked *a = forget(far, &layout, 0, key, 3);

	far_expect_waiting(far, a);
	notice(far, &layout, DATA_LEAVE, 1, 0);
	far_expect(far, a, -EBUSY, "a rank uses");
	far_expect(far, forget(far, &layout, 0, key, 3), -EBUSY, "a rank uses");
}

#define MANY 2000

/* Keys 1 to MANY, which node 0 asks to forget. */
static struct layout asked_to_forget_many(struct far *far)
{
	struct layout layout = formed(far);
	char name[32];

	for (uint64_t key = 1; key <= MANY; key++) {
		(void)snprintf(name, sizeof(name), "x%u", (unsigned)key);
		ASSERT_EQ(far_tensor(far, &layout, name, DTYPE_FLOAT32, 5, NULL), key);
		(void)forget(far, &layout, 0, key, 3);
	}
	return layout;
}

/* However often a node attaches: it is asked a little at once, the rest in later turns. */
TEST(a_node_that_attaches_hears_of_many_in_pieces)
{
	FAR = far_new(&(struct far_options){ .max_tensors = MANY });
	struct layout layout = asked_to_forget_many(far);
	unsigned before = far->told[1].n_unused;

	ASSERT_EQ(before, MANY);
	for (unsigned i = 0; i < 8; i++)
		far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	ASSERT_INT(far->told[1].n_unused - before, <, MANY / 2);
	while (far->told[1].n_unused < before + MANY)
		ASSERT_OK(loop_turn(far->loop, 0));
	for (uint64_t key = 1; key <= MANY; key++)
		far_expect(far, forget(far, &layout, 1, key, 3), 0, NULL);
}

TEST(many_are_kept_in_pieces_when_a_node_leaves)
{
	FAR = far_new(&(struct far_options){ .max_tensors = MANY });
	struct layout layout = asked_to_forget_many(far);
	unsigned n = 0;

	notice(far, &layout, DATA_LEAVE, 1, 0);
	for (struct asked *asked = far->all; asked; asked = asked->next)
		n += asked->done && asked->status == -EBUSY;
	ASSERT_INT(n, <, MANY / 8);
	far_wait_all(far);
}

/* A job ends while a node is asked. */
TEST(the_end_of_a_job_ends_the_asking)
{
	FAR = far_new(&(struct far_options){ .max_tensors = MANY });
	struct layout layout = asked_to_forget_many(far);

	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "no more");
	far_wait_all(far);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
}

TEST(the_job_s_end_answers)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);
	uint64_t key = far_tensor(far, &layout, "a", DTYPE_FLOAT32, 5, NULL);
	struct asked *a = forget(far, &layout, 0, key, 3);

	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "no more");
	far_expect(far, a, -EIO, "no more");
}

TEST(a_fresh_home_waits_for_what_all_nodes_know)
{
	FAR = far_new(NULL);
	struct layout layout = fresh(far);
	struct asked *gone, *known, *doubt;

	far_expect(far, declare_known(far, &layout, 0, "known", 4, false), 0, NULL);
	gone = forget(far, &layout, 0, 5, 3);
	notice(far, &layout, DATA_NAMED, 0, 9);
	known = forget(far, &layout, 1, 4, 1);
	doubt = declare_known(far, &layout, 1, "gone", 5, true);
	far_expect_waiting(far, gone);
	far_expect_waiting(far, known);
	far_expect_waiting(far, doubt);
	notice(far, &layout, DATA_NAMED, 1, 6);
	far_expect(far, gone, 0, NULL);
	far_expect(far, doubt, -ESTALE, "name it anew");
	far_expect_waiting(far, known);
	notice(far, &layout, DATA_KEEP, 0, 4);
	far_expect(far, known, -EBUSY, NULL);
	/* No key is given twice. */
	ASSERT_EQ(far_tensor(far, &layout, "gone", DTYPE_FLOAT32, 5, NULL), 10);
}

TEST(no_more_waits_at_a_fresh_home_than_there_may_be_tensors)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 3 });
	struct layout layout = fresh(far);
	struct asked *asked[6];

	for (unsigned i = 0; i < ARRAY_SIZE(asked); i++)
		asked[i] = forget(far, &layout, 0, 5 + i, 3);
	far_expect(far, forget(far, &layout, 0, 5, 3), -EDQUOT, "more than there may be tensors");
	far_expect_waiting(far, forget(far, &layout, 1, 5, 3));
	for (uint32_t node = 0; node < 2; node++)
		notice(far, &layout, DATA_NAMED, node, 20);
	for (unsigned i = 0; i < ARRAY_SIZE(asked); i++)
		far_expect(far, asked[i], 0, NULL);
}

TEST(much_that_waits_at_a_fresh_home_goes_on_in_pieces_and_in_order)
{
	FAR = far_new(&(struct far_options){ .max_tensors = MANY + 1 });
	struct layout layout = fresh(far);
	struct asked *first = forget(far, &layout, 0, 5, 3), *last = NULL, *behind;

	for (unsigned i = 0; i < MANY; i++)
		last = forget(far, &layout, 0, 6 + i, 3);
	for (uint32_t node = 0; node < 2; node++)
		notice(far, &layout, DATA_NAMED, node, 5 + MANY);
	ASSERT_TRUE(first->done && !last->done);
	behind = forget(far, &layout, 0, 5, 3);
	ASSERT_TRUE(!behind->done);
	far_wait_all(far);
	far_expect(far, first, 0, NULL);
	far_expect(far, last, 0, NULL);
	far_expect(far, behind, 0, NULL);
}

TEST(what_waits_at_a_fresh_home_ends_with_the_job)
{
	FAR = far_new(NULL);
	struct layout layout = fresh(far);
	struct asked *gone = forget(far, &layout, 0, 5, 3);

	far_expect_waiting(far, gone);
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "no more");
	far_expect(far, gone, -EIO, "no more");
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t key,
			  uint64_t round, uint32_t node)
{
	struct data_header h = far_push(layout, key, round, node);
	float one[16];

	for (size_t i = 0; i < ARRAY_SIZE(one); i++)
		one[i] = 1;
	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = sizeof(one);
	return far_call(far, node, &h, one);
}

static void reduce(struct far *far, const struct layout *layout, uint64_t key)
{
	struct asked *a = push(far, layout, key, 1, 0), *b = push(far, layout, key, 1, 1);

	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	ASSERT_TRUE(*(float *)a->data == 2 && *(float *)b->data == 2);
}

static void forgotten(struct far *far, const struct layout *layout, uint64_t key)
{
	reduce(far, layout, key);
	notice(far, layout, DATA_ACK, 0, key);
	notice(far, layout, DATA_ACK, 1, key);
	notice(far, layout, DATA_HAVE, key % 2, key);
}

TEST(servers_drop_what_a_node_has_forgotten)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = formed(far);

	/* The other node is killed before it can say so: here by turns. */
	for (uint64_t key = 1; key < 100; key++)
		forgotten(far, &layout, key);
	/* Or it says so later, also of what nobody knows here. */
	for (uint64_t key = 1; key < 1000; key++)
		notice(far, &layout, DATA_HAVE, !(key % 2), key);
	reduce(far, &layout, 1000);
	reduce(far, &layout, 1001);
	far_expect(far, push(far, &layout, 1002, 1, 0), -EDQUOT, "max_tensors");
}

TEST(results_of_a_forgotten_tensor_are_over_at_all_nodes)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = formed(far);

	/* No node has said that it keeps them. */
	for (uint64_t key = 1; key < 100; key++) {
		reduce(far, &layout, key);
		notice(far, &layout, DATA_HAVE, 0, key);
	}
	for (unsigned i = 0; i < 2; i++)
		notice(far, &layout, DATA_ACK, i, 99);
	reduce(far, &layout, 100);
}

static void have(struct far *far, const struct layout *layout, uint32_t node, uint64_t key,
		 uint64_t round)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_HAVE,
		.job = layout->job,
		.epoch = far_epoch(layout),
		.node = node,
		.key = key,
		.round = round,
		.is_all = 1,
	};

	far->ops->notice(far, node, &header, NULL);
}

static struct asked *offer(struct far *far, const struct layout *layout, uint64_t key,
			   uint64_t round, uint32_t node)
{
	struct data_header h = far_push(layout, key, round, node);
	const float two[16] = { 2 };

	h.op = DATA_OFFER;
	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = sizeof(two);
	return far_call(far, node, &h, two);
}

/*
 * A node that is killed has said what it has, and not that these tensors are forgotten. The other has said so before that
 * came, and the node's next process knows nothing of them.
 */
TEST(what_a_killed_node_had_takes_no_name_s_place)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = fresh(far);

	for (uint64_t key = 1; key < 100; key++) {
		notice(far, &layout, DATA_HAVE, 0, key);
		have(far, &layout, 1, key, 7);
	}
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	reduce(far, &layout, 100);
	reduce(far, &layout, 101);
	far_expect(far, push(far, &layout, 102, 1, 0), -EDQUOT, "max_tensors");
	for (uint64_t key = 1; key < 100; key++)
		have(far, &layout, 1, key, 7);
	(void)push(far, &layout, 101, 2, 0);
	far_expect(far, push(far, &layout, 101, 2, 1), 0, NULL);
	ASSERT_EQ(list_first(&far->server->jobs, struct job, link)->store.tensors.n_entries, 4);
}

/* However many it was that a node had, what it said last is known. */
TEST(what_a_node_has_is_known_when_another_offers_it)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = fresh(far);

	for (uint64_t key = 1; key < 100; key++)
		have(far, &layout, 1, key, 7);
	far_expect(far, offer(far, &layout, 99, 7, 0), 0, NULL);
	far_expect(far, offer(far, &layout, 98, 6, 0), 0, NULL);
	/* Both are in use now. */
	far_expect(far, offer(far, &layout, 97, 7, 0), -EDQUOT, "max_tensors");
}

/* A notice overtakes what has a payload; and one node hears sooner than another. */
TEST(what_comes_late_of_a_forgotten_tensor_makes_it_no_more)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = fresh(far);

	for (uint64_t key = 1; key < 100; key++) {
		have(far, &layout, 0, key, 6);
		notice(far, &layout, DATA_HAVE, 1, key);
		have(far, &layout, 0, key, 7);
		far_expect(far, offer(far, &layout, key, 7, 0), 0, NULL);
		far_notice(far, 0, DATA_FAIL_ROUND, layout.job, key, 8, 0, EIO, "it failed");
		notice(far, &layout, DATA_HAVE, 0, key);
	}
	/* One that was in use is dropped, and the node that is late says nothing after that. */
	for (uint64_t key = 200; key < 210; key++) {
		struct asked *first = offer(far, &layout, key, 6, 0);

		notice(far, &layout, DATA_HAVE, 1, key);
		far_expect(far, first, 0, NULL);
		have(far, &layout, 0, key, 7);
		far_expect(far, offer(far, &layout, key, 7, 0), 0, NULL);
		far_notice(far, 0, DATA_FAIL_ROUND, layout.job, key, 8, 0, EIO, "it failed");
	}
	reduce(far, &layout, 100);
	reduce(far, &layout, 101);
}
