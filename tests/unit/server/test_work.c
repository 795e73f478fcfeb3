/*
 * What a message costs does not grow with what its job holds, and what a job's end or a node's leaving costs grows with that and no
 * faster: the thread's own time for sixteen times as much is less than 64 times as long. A square would be 256; and what no longer
 * fits into the caches takes some times as long for each.
 */
#include "base/clock.h"
#include "double.h"
#include "server/job/job.h"
#include <time.h>

#define FEW    2048
#define MANY   8192
#define FEWEST (MANY / 16)
#define FAR    _cleanup_(far_freep) struct far *far

static uint64_t thread_ns(void)
{
	struct timespec t;

	ASSERT_OK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t));
	return (uint64_t)t.tv_sec * NSEC_PER_SEC + (uint64_t)t.tv_nsec;
}

/* A job, n of what it holds, and what is done to them. */
struct work {
	struct layout layout;
	void (*prepare)(struct far *far, struct layout *layout, unsigned n);
	void (*act)(struct far *far, struct layout *layout, unsigned n);
};

static uint64_t measure(const struct work *work, unsigned n)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30,
					     .max_tensors = MANY + 1,
					     .inline_bytes = 1 << 20 };
	FAR = far_new(&options);
	struct layout layout = work->layout;
	uint64_t began;

	far_form(far, &layout);
	if (work->prepare)
		work->prepare(far, &layout, n);
	began = thread_ns();
	work->act(far, &layout, n);
	return thread_ns() - began;
}

/* What else the machine does only adds to it. */
static uint64_t least(const struct work *work, unsigned n)
{
	uint64_t ns = measure(work, n);

	for (unsigned i = 1; i < 5; i++)
		ns = MIN(ns, measure(work, n));
	return ns;
}

static void is_linear(const struct work *work)
{
	uint64_t few = least(work, FEWEST), many = least(work, MANY);

	(void)printf("  %u: %llu us, %u: %llu us\n", FEWEST, (unsigned long long)few / 1000, MANY,
		     (unsigned long long)many / 1000);
	ASSERT_INT(many, <, 64 * MAX(few, 500 * NSEC_PER_USEC));
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t key,
			  uint64_t round, uint32_t node)
{
	static const float values[16];
	struct data_header h = far_push(layout, key, round, node);

	h.epoch = layout->resume ? far_epoch(layout) : FAR_EPOCH;
	h.len = h.part_len = h.total = sizeof(values);
	return far_call(far, node, &h, values);
}

static void node_leaves(struct far *far, const struct layout *layout, uint32_t node)
{
	far_notice(far, node, DATA_LEAVE, layout->job, 0, 0, node, 0, NULL);
}

/* -- One tensor -------------------------------------------------------------------------------------------------- */

static void open_rounds(struct far *far, struct layout *layout, unsigned n)
{
	for (unsigned i = 1; i <= n; i++)
		(void)push(far, layout, 1, i, 0);
}

static void come_from_behind(struct far *far, struct layout *layout, unsigned n)
{
	open_rounds(far, layout, n);
	for (unsigned i = 1; i <= n; i++)
		(void)push(far, layout, 1, i, 1);
}

TEST(many_rounds_of_a_tensor_are_found)
{
	is_linear(&(struct work){ .layout = far_layout("job", 3, NULL), .act = come_from_behind });
}

/* Of which no result is kept by all: each round that a node comes to says that those before are over for it. */
TEST(many_results_of_a_tensor_are_kept)
{
	struct work work = { .layout = far_layout("job", 2, NULL), .act = come_from_behind };

	work.layout.resume = true;
	is_linear(&work);
}

/* -- Many tensors ------------------------------------------------------------------------------------------------ */

static void declare(struct far *far, struct layout *layout, unsigned n)
{
	char name[32];

	for (unsigned i = 1; i <= n; i++) {
		(void)snprintf(name, sizeof(name), "x%u", i);
		ASSERT_EQ(far_tensor(far, layout, name, DTYPE_FLOAT32, 16, NULL), i);
		(void)push(far, layout, i, 1, 0);
	}
}

static void last_leaves(struct far *far, struct layout *layout, unsigned n)
{
	node_leaves(far, layout, layout->n_nodes - 1);
	far_wait_all(far);
	ASSERT_TRUE(far_n_jobs(far));
	(void)n;
}

/* Each round that fails is said by its tensor's name. */
TEST(a_node_leaves_many_tensors)
{
	is_linear(&(struct work){
		.layout = far_layout("job", 2, NULL), .prepare = declare, .act = last_leaves });
}

static void accumulate(struct far *far, struct layout *layout, unsigned n)
{
	static const float values[16];

	for (unsigned i = 1; i <= n; i++) {
		struct data_header h = far_push(layout, i, 1, 0);

		h.operation = OPERATION_ACCUMULATE;
		h.root = 1;
		h.len = h.part_len = h.total = sizeof(values);
		(void)far_call(far, 0, &h, values);
	}
}

static void give_up(struct far *far, struct layout *layout, unsigned n)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_FAIL_ROUND,
		.operation = OPERATION_ACCUMULATE,
		.job = layout->job,
		.round = 1,
		.status = EIO,
	};

	for (h.key = 1; h.key <= n; h.key++)
		far->ops->notice(far, 0, &h, NULL);
}

TEST(many_sums_are_given_up)
{
	struct work work = { .layout = far_layout("job", 2, NULL),
			     .prepare = accumulate,
			     .act = give_up };

	work.layout.async = true;
	is_linear(&work);
}

/* While it is being added. */
TEST(a_sum_is_given_up_in_the_words_that_say_why)
{
	FAR = far_new(&(struct far_options){ .n_threads = 1 });
	struct layout layout = far_layout("job", 2, NULL);
	const char *why = "this rank has given it up";
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_FAIL_ROUND,
		.operation = OPERATION_ACCUMULATE,
		.key = 1,
		.round = 1,
		.status = EIO,
	};
	struct asked *sum;

	layout.async = true;
	far_form(far, &layout);
	accumulate(far, &layout, 1);
	sum = far->all;
	h.job = layout.job;
	h.len = (uint32_t)strlen(why);
	far->ops->notice(far, 0, &h, why);
	far_expect(far, sum, -EIO, why);
}

/* A round of rows that has none. */
static struct asked *push_rows(struct far *far, const struct layout *layout, uint64_t key,
			       uint32_t node)
{
	struct data_header h = far_push(layout, key, 1, node);
	struct data_rows head = { .rows = 1000, .width = 2, .step = 1000 };

	data_rows_encode(&head);
	h.epoch = far_epoch(layout);
	h.operation = OPERATION_PUSH_PULL_ROWS;
	h.len = h.part_len = h.total = sizeof(head);
	return far_call(far, node, &h, &head);
}

static void merge(struct far *far, struct layout *layout, unsigned n)
{
	for (unsigned i = 1; i <= n; i++) {
		(void)push_rows(far, layout, i, 0);
		far_expect(far, push_rows(far, layout, i, 1), 0, NULL);
	}
}

static void have(struct far *far, struct layout *layout, unsigned n)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_HAVE,
		.job = layout->job,
		.round = 1,
		.epoch = far_epoch(layout),
	};

	for (h.node = 0; h.node < 2; h.node++)
		for (h.key = n; h.key; h.key--)
			far->ops->notice(far, h.node, &h, NULL);
}

TEST(many_results_are_held)
{
	struct work work = { .layout = far_layout("job", 2, NULL), .prepare = merge, .act = have };

	work.layout.resume = true;
	is_linear(&work);
}

static void forget(struct far *far, const struct layout *layout, uint32_t node, unsigned n)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_HAVE,
		.job = layout->job,
		.round = DATA_ROUND_NEVER,
		.is_all = 1,
		.epoch = far_epoch(layout),
		.node = node,
	};

	for (h.key = 1; h.key <= n; h.key++)
		far->ops->notice(far, node, &h, NULL);
}

static void begin_and_forget(struct far *far, struct layout *layout, unsigned n)
{
	for (unsigned i = 1; i <= n; i++)
		(void)push(far, layout, i, 1, 0);
	forget(far, layout, 0, n);
}

static void forget_too(struct far *far, struct layout *layout, unsigned n)
{
	forget(far, layout, 1, n);
}

TEST(many_tensors_are_forgotten_before_their_rounds_are_over)
{
	struct work work = { .layout = far_layout("job", 2, NULL),
			     .prepare = begin_and_forget,
			     .act = forget_too };

	work.layout.resume = true;
	is_linear(&work);
}

/* -- Who is not waited for ---------------------------------------------------------------------------------------- */

/* Half of them, which are first, do not wait for the node that leaves. */
static void open_for_others(struct far *far, struct layout *layout, unsigned n)
{
	for (unsigned i = 1; i <= n; i++) {
		struct data_header h = far_push(layout, 2, i, 1);

		h.operation = OPERATION_ALL_TO_ALL;
		h.reduction = 0;
		h.block = 1; /* from rank 0 to rank 1 */
		h.part_len = h.total = 64;
		(void)far_call(far, 1, &h, NULL);
	}
	open_rounds(far, layout, n);
}

static void leaves_some(struct far *far, struct layout *layout, unsigned n)
{
	struct asked *asked = far->all;

	node_leaves(far, layout, 2);
	for (unsigned i = 0; i < n; i++, asked = asked->next)
		far_expect(far, asked, -EPIPE, "rank 2 has left the job");
	for (unsigned i = 0; i < n; i++, asked = asked->next)
		far_expect_waiting(far, asked);
}

TEST(a_node_leaves_rounds_that_wait_for_it_behind_those_that_do_not)
{
	is_linear(&(struct work){ .layout = far_layout("job", 3, NULL),
				  .prepare = open_for_others,
				  .act = leaves_some });
}

/* One node is behind as far as it may: what the others have come to waits for it, and goes on as it comes. */
static void come_late(struct far *far, struct layout *layout, unsigned n)
{
	for (uint32_t node = 0; node < 3; node++)
		for (unsigned i = 1; i <= n; i++)
			(void)push(far, layout, 1, i, node);
	for (struct asked *asked = far->all; asked; asked = asked->next)
		far_expect(far, asked, 0, NULL);
}

TEST(many_rounds_wait_for_who_is_behind)
{
	struct work work = { .layout = far_layout("job", 3, NULL), .act = come_late };

	work.layout.quorum = 2;
	is_linear(&work);
}

/* -- Pieces ------------------------------------------------------------------------------------------------------- */

/* Parts of one round of a tensor. */
static void push_parts_of(struct far *far, const struct layout *layout, uint64_t key, uint32_t node,
			  unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		struct data_header h = far_push(layout, key, 1, node);

		h.epoch = layout->resume ? far_epoch(layout) : FAR_EPOCH;
		h.part = i;
		(void)far_call(far, node, &h, NULL);
	}
}

static unsigned n_answered(const struct far *far)
{
	unsigned n = 0;

	for (const struct asked *asked = far->all; asked; asked = asked->next)
		n += asked->done;
	return n;
}

/* However much there is to do: little of it now, the rest in later turns. */
static void is_done_in_pieces(unsigned op, int status)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL), other = far_layout("other", 2, NULL);
	unsigned before;

	far_form(far, &layout);
	far_form(far, &other);
	open_rounds(far, &layout, FEW);
	before = n_answered(far);
	far_notice(far, 1, op, layout.job, 0, 0, 1, EIO, op == DATA_FAIL_JOB ? "over" : NULL);
	ASSERT_INT(n_answered(far) - before, <, FEW / 8);
	(void)push(far, &other, 1, 1, 0);
	far_expect(far, push(far, &other, 1, 1, 1), 0, NULL);
	while (n_answered(far) < before + 2 + FEW)
		ASSERT_OK(loop_turn(far->loop, 0));
	far_expect(far, far->all->next->next, status, NULL);
	ASSERT_EQ(far_n_jobs(far), op == DATA_LEAVE ? 2 : 1);
}

TEST(a_node_that_leaves_many_rounds_ends_them_in_pieces)
{
	is_done_in_pieces(DATA_LEAVE, -EPIPE);
}

/* Also rounds of some parts, each of which fails as a whole. */
TEST(a_node_that_leaves_rounds_of_many_nodes_ends_them_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30, .max_tensors = FEW };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", FAR_ENDS, NULL);
	unsigned before;

	far_form(far, &layout);
	for (unsigned i = 0; i < 16; i++)
		for (uint32_t node = 1; node < FAR_ENDS; node++)
			push_parts_of(far, &layout, 1 + i, node, FEW / 16);
	before = n_answered(far);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	ASSERT_INT(n_answered(far) - before, <, FEW / 8);
	while (n_answered(far) < before + (FAR_ENDS - 1) * FEW)
		ASSERT_OK(loop_turn(far->loop, 0));
}

TEST(a_job_that_fails_ends_its_rounds_in_pieces)
{
	is_done_in_pieces(DATA_FAIL_JOB, -EIO);
}

static void push_parts(struct far *far, const struct layout *layout, uint32_t node, unsigned n)
{
	push_parts_of(far, layout, 1, node, n);
}

/* Meanwhile whoever comes to it hears how it ended. */
TEST(a_round_of_many_parts_fails_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header last;
	unsigned before;

	far_form(far, &layout);
	push_parts(far, &layout, 0, FEW);
	before = n_answered(far);
	far_notice(far, 1, DATA_FAIL_ROUND, layout.job, 1, 1, 1, EIO, "not this one");
	ASSERT_INT(n_answered(far) - before, <, FEW / 8);
	last = far_push(&layout, 1, 1, 1);
	last.part = FEW - 1;
	far_expect(far, far_call(far, 1, &last, NULL), -EIO, "not this one");
	while (n_answered(far) < before + 1 + FEW)
		ASSERT_OK(loop_turn(far->loop, 0));
	for (struct asked *asked = far->all; asked; asked = asked->next)
		ASSERT_TRUE(asked->done);
	(void)push(far, &layout, 1, 2, 0);
	far_expect(far, push(far, &layout, 1, 2, 1), 0, NULL);
}

/* Contributions of one node to a round of few parts, which are long: to give them back takes longer. */
enum { N_LONG = 40, LONG = 4 << 20 };

static void push_long(struct far *far, struct layout *layout, uint32_t n_nodes)
{
	_cleanup_(freep) float *values = calloc(1, LONG);

	far_form(far, layout);
	for (uint32_t i = 0; i < n_nodes * N_LONG; i++) {
		struct data_header h = far_push(layout, 1, 1, i % n_nodes);

		h.epoch = layout->resume ? far_epoch(layout) : FAR_EPOCH;
		h.part = i / n_nodes;
		h.len = h.part_len = h.total = LONG;
		far->n_calls |= 1; /* in a block */
		(void)far_call(far, i % n_nodes, &h, values);
	}
}

static void end_long(unsigned op)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	push_long(far, &layout, 1);
	ASSERT_INT(block_cache_used(far->blocks), >=, N_LONG * LONG);
	far_notice(far, 1, op, layout.job, 1, 1, 1, EIO, "over");
	ASSERT_INT(block_cache_used(far->blocks), >, N_LONG * LONG / 4);
	while (block_cache_used(far->blocks))
		ASSERT_OK(loop_turn(far->loop, 0));
	far_wait_all(far);
}

TEST(a_round_of_few_long_parts_fails_in_pieces)
{
	end_long(DATA_FAIL_ROUND);
}

TEST(a_job_of_few_long_parts_ends_in_pieces)
{
	end_long(DATA_FAIL_JOB);
}

TEST(a_job_ends_while_a_round_of_it_fails)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	push_parts(far, &layout, 0, FEW);
	far_notice(far, 1, DATA_FAIL_ROUND, layout.job, 1, 1, 1, EIO, "not this one");
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "over");
	far_wait_all(far);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
}

TEST(a_tensor_of_many_parts_is_dropped_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);
	const struct job *job;
	uint64_t held;

	layout.resume = true;
	far_form(far, &layout);
	job = list_first(&far->server->jobs, struct job, link);
	for (uint32_t node = 0; node < 2; node++)
		push_parts(far, &layout, node, FEW);
	far_wait_all(far);
	forget(far, &layout, 0, 1);
	held = job->memory.charged_parts;
	forget(far, &layout, 1, 1);
	ASSERT_INT(job->memory.charged_parts, >, held / 2);
	while (job->memory.charged_parts)
		ASSERT_OK(loop_turn(far->loop, 0));
	/* The tensor's number is that of another. */
	push_parts(far, &layout, 0, 1);
	push_parts(far, &layout, 1, 1);
	far_wait(far, far->all);
}

static unsigned n_kept(const struct far *far)
{
	const struct job *job = list_first(&far->server->jobs, struct job, link);
	const struct list *link;
	unsigned n = 0;

	for (link = job->store.kept.next; link != &job->store.kept; link = link->next)
		n++;
	return n;
}

/* A node says that it keeps its results up to this one. */
static void ack(struct far *far, const struct layout *layout, uint32_t node, uint32_t up_to)
{
	const struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_ACK,
		.job = layout->job,
		.epoch = far_epoch(layout),
		.node = node,
		.up_to = up_to,
	};

	far->ops->notice(far, node, &h, NULL);
}

/* To free the longest takes longer. */
TEST(few_long_results_that_are_kept_by_all_go_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	layout.resume = true;
	push_long(far, &layout, 2);
	far_wait_all(far);
	ASSERT_EQ(n_kept(far), N_LONG);
	ack(far, &layout, 0, N_LONG);
	ASSERT_EQ(n_kept(far), N_LONG);
	ack(far, &layout, 1, N_LONG);
	ASSERT_INT(n_kept(far), >, N_LONG / 4);
	while (n_kept(far))
		ASSERT_OK(loop_turn(far->loop, 0));
}

TEST(many_results_that_are_kept_by_all_go_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	layout.resume = true;
	far_form(far, &layout);
	for (uint32_t node = 0; node < 2; node++)
		push_parts(far, &layout, node, MANY);
	for (uint32_t node = 0; node < 2; node++) {
		ack(far, &layout, node, MANY);
		ASSERT_INT(n_kept(far), >, MANY / 4);
		for (unsigned i = 0; i < 1000; i++)
			ASSERT_OK(loop_turn(far->loop, 0));
	}
	ASSERT_EQ(n_kept(far), 0);
	ASSERT_EQ(far->told[0].released, MANY);
	ASSERT_EQ(far->told[1].released, MANY);
	/* What was said is known at once: no more can be kept than was sent. */
	ack(far, &layout, 0, MANY + 1);
	push_parts(far, &layout, 0, 1);
	far_expect(far, far->all, -ESTALE, NULL);
}

/* As short as pieces may be. */
#define LIST_STEP 128

static void push_list(struct far *far, const struct layout *layout, uint32_t node,
		      unsigned n_pieces)
{
	const struct data_rows head = {
		.rows = 1 << 30, .n = (uint64_t)n_pieces * LIST_STEP, .width = 2, .step = LIST_STEP
	};
	struct {
		struct data_rows head;
		int64_t rows[LIST_STEP];
		float values[LIST_STEP][2];
	} piece = { .head = head };

	data_rows_encode(&piece.head);
	for (unsigned i = 0; i < n_pieces; i++) {
		struct data_header h = far_push(layout, 1, 1, node);

		h.operation = OPERATION_PUSH_PULL_ROWS;
		h.part = i;
		h.len = h.part_len = h.total = sizeof(piece);
		for (unsigned k = 0; k < LIST_STEP; k++)
			piece.rows[k] = (int64_t)i * LIST_STEP + k;
		(void)far_call(far, node, &h, &piece);
	}
}

/* Until the blocks are gone the job is charged for them, and is there. */
static void list_goes_in_pieces(struct far *far)
{
	const struct job *job = list_first(&far->server->jobs, struct job, link);
	uint64_t used = block_cache_used(far->blocks);

	ASSERT_INT(used, >, FEW / 2 * LIST_STEP * 16);
	ASSERT_INT(quota_used(job->memory.quota), >=, used);
	while (block_cache_used(far->blocks)) {
		ASSERT_EQ(far_n_jobs(far), 1);
		ASSERT_INT(quota_used(job->memory.quota), >, 0);
		ASSERT_OK(loop_turn(far->loop, 0));
	}
}

/* A round fails of which one node has brought a list of many pieces. */
static void fail_list(struct far *far, struct layout *layout)
{
	far_form(far, layout);
	push_list(far, layout, 0, FEW);
	far_notice(far, 1, DATA_FAIL_ROUND, layout->job, 1, 1, 1, EIO, "not this one");
	far_wait_all(far);
}

TEST(a_list_of_many_pieces_fails_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	fail_list(far, &layout);
	list_goes_in_pieces(far);
	/* Its round is over, and the next begins. */
	(void)push(far, &layout, 1, 2, 0);
	far_expect(far, push(far, &layout, 1, 2, 1), 0, NULL);
}

TEST(what_was_merged_of_many_pieces_goes_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	for (uint32_t node = 0; node < 2; node++)
		push_list(far, &layout, node, FEW);
	far_wait_all(far);
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "over");
	list_goes_in_pieces(far);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
}

/* The server ends meanwhile. */
TEST(a_server_ends_while_lists_go)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	fail_list(far, &layout);
	ASSERT_INT(block_cache_used(far->blocks), >, 0);
}

static void accumulate_parts(struct far *far, const struct layout *layout, uint64_t round,
			     unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		struct data_header h = far_push(layout, 1, round, 0);

		h.operation = OPERATION_ACCUMULATE;
		h.root = 1;
		h.part = i;
		(void)far_call(far, 0, &h, NULL);
	}
}

static void give_up_round(struct far *far, const struct layout *layout, uint64_t round)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_FAIL_ROUND,
		.operation = OPERATION_ACCUMULATE,
		.job = layout->job,
		.key = 1,
		.round = round,
		.status = EIO,
	};

	far->ops->notice(far, 0, &h, NULL);
}

/* Said once or often, and of a round that is not there: the parts are looked at by and by. */
TEST(a_sum_of_many_parts_is_given_up_in_pieces)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);
	unsigned before;

	layout.async = true;
	far_form(far, &layout);
	before = n_answered(far);
	accumulate_parts(far, &layout, 2, FEW);
	give_up_round(far, &layout, 1);
	for (unsigned i = 0; i < 1000; i++)
		ASSERT_OK(loop_turn(far->loop, 0));
	ASSERT_EQ(n_answered(far), before);
	give_up_round(far, &layout, 2);
	ASSERT_EQ(n_answered(far), before);
	far_wait_all(far);
	far_expect(far, far->all, -EIO, NULL);
	/* What comes after that waits. */
	accumulate_parts(far, &layout, 3, FEW);
	for (unsigned i = 0; i < 1000; i++)
		ASSERT_OK(loop_turn(far->loop, 0));
	ASSERT_EQ(n_answered(far), before + FEW);
}

/* The server ends while a job does. */
TEST(a_server_ends_what_is_left)
{
	const struct far_options options = { .quota_bytes = UINT64_C(4) << 30 };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	open_rounds(far, &layout, FEW);
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "over");
	server_close(far->server);
	for (struct asked *asked = far->all; asked; asked = asked->next)
		ASSERT_TRUE(asked->done);
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* -- Where it is done ------------------------------------------------------------------------------ */

static bool is_waiting;

/* Somebody comes, or goes; the loop has not looked for so long that it looks again. */
static void set_waiting(bool waits)
{
	uint64_t until_ns = clock_now_ns() + NSEC_PER_MSEC;

	is_waiting = waits;
	while (clock_now_ns() < until_ns)
		;
}

static bool look(struct loop_watch *watch)
{
	(void)watch;
	return is_waiting;
}

/* Pushes len bytes from both nodes. Returns whether the sum was there at once. */
static bool sums_at_once(struct far *far, const struct layout *layout, uint64_t round, uint32_t len)
{
	static const float data[65536 / sizeof(float)];
	struct data_header h;
	struct asked *asked[2];
	char name[24];
	uint64_t key;
	bool at_once;

	(void)snprintf(name, sizeof(name), "t%llu", (unsigned long long)round);
	key = far_tensor(far, layout, name, DTYPE_FLOAT32, len / sizeof(float), NULL);
	for (uint32_t i = 0; i < 2; i++) {
		h = far_push(layout, key, 1, i);
		h.len = h.part_len = h.total = len;
		asked[i] = far_call(far, i, &h, data);
	}
	at_once = asked[0]->done && asked[1]->done;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, asked[i], 0, NULL);
	return at_once;
}

TEST(what_is_not_little_is_summed_elsewhere_while_somebody_waits)
{
	const struct far_options options = { .n_threads = 1, .inline_bytes = 1 << 20 };
	const uint32_t per_node[] = { 1, 1 };
	struct loop_watch watch = { .look = look, .rest = look };
	FAR = far_new(&options);
	struct layout layout = far_layout("job", 2, per_node);

	far_form(far, &layout);
	loop_spin(far->loop, 0, &watch);
	ASSERT_TRUE(sums_at_once(far, &layout, 1, 65536));
	set_waiting(true);
	ASSERT_TRUE(!sums_at_once(far, &layout, 2, 65536));
	ASSERT_TRUE(sums_at_once(far, &layout, 3, 4096));
	set_waiting(false);
	ASSERT_TRUE(sums_at_once(far, &layout, 4, 65536));
	loop_spin(far->loop, 0, NULL);
}
