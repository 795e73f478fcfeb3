/* Over every carrier: whatever the order of arrival, the bits are those of the sum in the order of nodes. */
#include "expected.h"
#include "far.h"

#define FAR _cleanup_(far_freep) struct far *far

#define ROUNDS 3
#define PARTS  4

static uint64_t state;

static uint64_t random_bits(void)
{
	uint64_t z = state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static uint32_t random_below(uint32_t n)
{
	return (uint32_t)(random_bits() % n);
}

/* One contribution of the plan below. */
struct contribution {
	uint32_t node, part;
	uint64_t round;
	uint8_t *data;
	struct asked *asked;
};

struct plan {
	struct layout layout;
	unsigned operation, dtype, reduction;
	uint64_t key, total;
	uint32_t part_bytes;
	struct contribution list[FAR_ENDS * ROUNDS * PARTS];
	size_t n;
};

static uint32_t part_len(const struct plan *plan, uint32_t part)
{
	uint64_t offset = (uint64_t)part * plan->part_bytes;

	return (uint32_t)MIN((uint64_t)plan->part_bytes, plan->total - offset);
}

/* Numbers of middling size, with a few infinities, NaNs, zeroes and tiny ones: any bits at all would mostly cancel. */
static void fill(unsigned dtype, uint8_t *data, uint32_t len)
{
	size_t size = dtype_size(dtype);

	for (uint32_t i = 0; i < len / size; i++) {
		uint64_t bits = random_bits();
		double value = (double)(int64_t)bits / (double)(1ull << 58);
		float single = (float)value;
		uint32_t word;

		if (random_below(16) && dtype == DTYPE_FLOAT64) {
			memcpy(&bits, &value, 8);
		} else if (random_below(16) && dtype == DTYPE_FLOAT32) {
			memcpy(&bits, &single, 4);
		} else if (random_below(16) && dtype == DTYPE_BFLOAT16) {
			memcpy(&word, &single, 4);
			bits = word >> 16;
		} else if (dtype == DTYPE_BOOL) {
			bits &= 3;
		}
		memcpy(data + i * size, &bits, size);
	}
}

static void plan_make(struct far *far, struct plan *plan, uint32_t n_nodes, uint64_t total)
{
	uint32_t per_node[FAR_ENDS];

	for (uint32_t i = 0; i < n_nodes; i++)
		per_node[i] = 1 + random_below(3);
	plan->layout = far_layout("job", n_nodes, per_node);
	far_form(far, &plan->layout);
	plan->key = far_tensor(far, &plan->layout, "t", plan->dtype, total, NULL);
	plan->total = total;
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		for (uint32_t part = 0; part * plan->part_bytes < total; part++) {
			for (uint32_t node = 0; node < n_nodes; node++) {
				struct contribution *c = &plan->list[plan->n++];

				*c = (struct contribution){ node, part, round, NULL, NULL };
				c->data = malloc(part_len(plan, part));
				ASSERT_TRUE(c->data);
				fill(plan->dtype, c->data, part_len(plan, part));
			}
		}
	}
}

static void plan_done(struct plan *plan)
{
	for (size_t i = 0; i < plan->n; i++)
		free(plan->list[i].data);
}

static void plan_push(struct far *far, struct plan *plan)
{
	size_t order[ARRAY_SIZE(plan->list)];

	for (size_t i = 0; i < plan->n; i++) {
		size_t j = random_below((uint32_t)i + 1);

		order[i] = order[j];
		order[j] = i;
	}
	for (size_t i = 0; i < plan->n; i++) {
		struct contribution *c = &plan->list[order[i]];
		struct data_header h = far_push(&plan->layout, plan->key, c->round, c->node);

		h.operation = (uint8_t)plan->operation;
		h.dtype = (uint8_t)plan->dtype;
		h.reduction = (uint8_t)plan->reduction;
		h.part = c->part;
		h.offset = (uint64_t)c->part * plan->part_bytes;
		h.total = plan->total;
		h.len = h.part_len = part_len(plan, c->part);
		h.priority = (int32_t)random_below(5) - 2;
		c->asked = far_call(far, c->node, &h, c->data);
		if (!random_below(4))
			ASSERT_OK(loop_turn(far->loop, 0));
	}
}

static void plan_check(struct far *far, struct plan *plan, uint32_t n_nodes)
{
	_cleanup_(freep) uint8_t *expected = malloc(plan->part_bytes);

	for (size_t first = 0; first < plan->n; first += n_nodes) {
		struct contribution *c = &plan->list[first];
		uint32_t len = part_len(plan, c->part);
		const void *inputs[FAR_ENDS];

		for (uint32_t i = 0; i < n_nodes; i++)
			inputs[i] = c[i].data;
		expected_reduce(plan->dtype, data_reduction((uint8_t)plan->reduction),
				plan->layout.size, data_scale((uint8_t)plan->reduction), inputs,
				n_nodes, len / dtype_size(plan->dtype), expected);
		for (uint32_t i = 0; i < n_nodes; i++) {
			bool gets = plan->operation == OPERATION_PUSH_PULL ||
				    plan->layout.node_of_rank[0] == i;

			far_expect(far, c[i].asked, 0, NULL);
			ASSERT_EQ(c[i].asked->answer.len, gets ? len : 0);
			if (gets)
				ASSERT_MEM(c[i].asked->data, expected, len);
		}
	}
}

static void run(const struct far_options *options, unsigned operation, unsigned dtype,
		unsigned reduction, uint32_t n_nodes)
{
	FAR = far_new(options);
	_cleanup_(plan_done) struct plan plan = {
		.operation = operation,
		.dtype = dtype,
		.reduction = reduction,
		.part_bytes = 4096,
	};
	uint64_t elements = 1 + random_below(PARTS * 4096 / 8 - 1);

	plan_make(far, &plan, n_nodes, elements * dtype_size(dtype));
	plan_push(far, &plan);
	plan_check(far, &plan, n_nodes);
}

static void run_types(const struct far_options *options, uint32_t n_nodes)
{
	for (unsigned dtype = 1; dtype <= DTYPE_MAX_; dtype++) {
		for (unsigned reduction = 1; reduction <= REDUCTION_MAX_; reduction++) {
			if (dtype == DTYPE_BOOL && reduction > REDUCTION_SUM)
				continue;
			state = dtype * 100 + reduction * 10 + n_nodes;
			run(options, OPERATION_PUSH_PULL, dtype, reduction, n_nodes);
		}
	}
}

/* What nodes have divided by a power of two. */
TEST(scaled_averages_of_float16)
{
	for (uint32_t n = 1; n <= FAR_ENDS; n++) {
		for (uint32_t scale = 1; scale <= JOB_RANKS_MAX; scale *= 4) {
			unsigned reduction = data_reduction_scaled(REDUCTION_AVERAGE, scale);

			state = n;
			run(NULL, OPERATION_PUSH_PULL, DTYPE_FLOAT16, reduction, n);
			run(NULL, OPERATION_REDUCE_SCATTER, DTYPE_FLOAT16, reduction, n);
		}
	}
}

TEST(all_types_of_three_nodes)
{
	run_types(&(struct far_options){ .n_threads = 2 }, 3);
}

TEST(all_types_on_the_control_thread)
{
	run_types(&(struct far_options){ .inline_bytes = UINT64_MAX }, 2);
}

TEST(every_number_of_nodes)
{
	for (uint32_t n = 1; n <= FAR_ENDS; n++) {
		for (uint64_t seed = 1; seed <= 4; seed++) {
			struct far_options options = { .n_threads = (unsigned)seed % 3 };

			state = n * 1000 + seed;
			run(&options, OPERATION_PUSH_PULL, DTYPE_FLOAT32, REDUCTION_SUM, n);
			run(&options, OPERATION_PUSH_PULL, DTYPE_BFLOAT16, REDUCTION_AVERAGE, n);
			run(&options, OPERATION_REDUCE_SCATTER, DTYPE_FLOAT16, REDUCTION_SUM, n);
		}
	}
}

/* One node's data goes to all others unchanged, whatever its bits mean. */
TEST(broadcast_moves_bits)
{
	FAR = far_new(NULL);
	const uint32_t per_node[] = { 1, 2, 1, 1 };
	struct layout layout = far_layout("job", 4, per_node);
	uint8_t data[4096];

	far_form(far, &layout);
	for (uint32_t root = 0; root < layout.size; root++) {
		uint32_t source = layout.node_of_rank[root];
		struct asked *asked[4];

		state = root;
		fill(DTYPE_INT8, data, sizeof(data));
		for (uint32_t i = 0; i < 4; i++) {
			uint32_t node = (i + root) % 4;
			struct data_header h = far_push(&layout, 1, root + 1, node);

			h.operation = OPERATION_BROADCAST;
			h.reduction = 0;
			h.root = root;
			h.total = h.part_len = sizeof(data);
			h.len = node == source ? sizeof(data) : 0;
			asked[node] = far_call(far, node, &h, data);
		}
		for (uint32_t node = 0; node < 4; node++) {
			far_expect(far, asked[node], 0, NULL);
			ASSERT_EQ(asked[node]->answer.len, node == source ? 0 : sizeof(data));
			if (node != source)
				ASSERT_MEM(asked[node]->data, data, sizeof(data));
		}
	}
}

TEST(mismatch_reaches_every_node)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct asked *asked[3];

	far_form(far, &layout);
	for (uint32_t i = 0; i < 3; i++) {
		struct data_header h = far_push(&layout, 1, 1, i);

		h.len = h.part_len = h.total = 8;
		if (i == 2)
			h.reduction = REDUCTION_MIN;
		asked[i] = far_call(far, i, &h, "12345678");
	}
	for (uint32_t i = 0; i < 3; i++) {
		far_expect(far, asked[i], -EINVAL, "rank 2 (node 2): push_pull (min) of float32");
		ASSERT_CONTAINS(asked[i]->text, ": push_pull (sum) of float32");
	}
}

/* The end of the job comes to who waits for an answer, and to who does not. */
TEST(failure_reaches_every_node)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct data_header h;
	struct asked *waiting;

	if (!far_ends_are_peers())
		TEST_SKIP("all nodes are one daemon");
	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.len = h.part_len = h.total = 8;
	waiting = far_call(far, 0, &h, "12345678");
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, ECONNRESET, "rank 1 (pid 9) died");
	far_expect(far, waiting, -ECONNRESET, "rank 1 (pid 9) died");
	while (!far->failed[2].n)
		ASSERT_OK(loop_turn(far->loop, 1000));
	ASSERT_STR(far->failed[2].text, "rank 1 (pid 9) died");
	ASSERT_EQ(far->failed[2].status, -ECONNRESET);
	ASSERT_TRUE(far->failed[2].job == layout.job);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(lost_daemon_reaches_every_node)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct data_header h;
	struct asked *waiting;

	if (!far_ends_are_peers())
		TEST_SKIP("all nodes are one daemon");
	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.len = h.part_len = h.total = 8;
	waiting = far_call(far, 0, &h, "12345678");
	far_expect_waiting(far, waiting);
	far_lose(far, 2);
	far_expect(far, waiting, -ECONNRESET, "rank 2 (node 2): ");
	while (!far->failed[1].n)
		ASSERT_OK(loop_turn(far->loop, 1000));
	ASSERT_CONTAINS(far->failed[1].text, "rank 2 (node 2): ");
	ASSERT_EQ(far_n_jobs(far), 0);
}
