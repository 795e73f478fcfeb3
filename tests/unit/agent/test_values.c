/*
 * The values of every operation, on every layout, against a reference that shares no code with the
 * daemon: bit by bit where something is reduced, byte by byte where something is moved.
 */
#include "../server/expected.h"
#include "world.h"
#include <math.h>
#include <stdio.h>

static uint64_t random_state = 88172645463325252ull;

static uint64_t random_next(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	return random_state ^= random_state << 17;
}

/* Any bits are a value of any type; every NaN, infinity and denormal may come up. */
static void fill(void *data, size_t len)
{
	uint8_t *bytes = data;

	for (size_t i = 0; i < len; i++)
		bytes[i] = (uint8_t)(random_next() >> 32);
}

/* One operation of all ranks. Inputs and outputs are apart, in blocks of their own so that a sanitizer sees overruns. */
struct run {
	struct world *world;
	unsigned dtype, operation, reduction;
	size_t element_size;
	uint32_t root;
	void *inputs[WORLD_RANKS], *outputs[WORLD_RANKS];
	/* Of a rank whose input is narrower: that; then `inputs` holds what it is as the tensor's type. */
	uint8_t input_dtypes[WORLD_RANKS];
	void *narrow[WORLD_RANKS];
	uint64_t input_counts[WORLD_RANKS], output_counts[WORLD_RANKS];
	uint64_t counts[WORLD_RANKS][2 * WORLD_RANKS];
	bool has_counts;
};

static void run_free(struct run *run)
{
	for (uint32_t i = 0; i < run->world->size; i++) {
		free(run->inputs[i]);
		free(run->outputs[i]);
		free(run->narrow[i]);
	}
}

/* Of integers, what a node of eight ranks can average: its sum is a number of the type. */
static void make_fitting(const struct run *run, void *data, uint64_t n)
{
	uint8_t *bytes = data;
	size_t size = run->element_size;

	if (run->reduction != REDUCTION_AVERAGE || run->dtype <= DTYPE_BFLOAT16)
		return;
	for (uint64_t i = 0; i < n; i++) {
		uint8_t *top = &bytes[i * size + size - 1];

		*top = run->dtype == DTYPE_UINT8 ? *top >> 3 : (uint8_t)((int8_t)*top >> 3);
	}
}

static float widened(unsigned dtype, uint16_t bits)
{
	int exponent = bits >> 10 & 31, fraction = bits & 1023;
	uint32_t wide = (uint32_t)bits << 16;
	float x;

	memcpy(&x, &wide, sizeof(x));
	if (dtype == DTYPE_BFLOAT16)
		return x;
	x = exponent == 31 ? (fraction ? NAN : INFINITY)
	    : exponent	   ? ldexpf((float)(fraction + 1024), exponent - 25)
			   : ldexpf((float)fraction, -24);
	return bits >> 15 ? -x : x;
}

static void make_narrow(struct run *run, uint32_t rank)
{
	uint64_t n = run->input_counts[rank];
	uint16_t *narrow = run->narrow[rank] = malloc(n * sizeof(*narrow) + 1);
	float *wide = run->inputs[rank];

	ASSERT_TRUE(narrow);
	fill(narrow, n * sizeof(*narrow));
	for (uint64_t i = 0; i < n; i++)
		wide[i] = widened(run->input_dtypes[rank], narrow[i]);
}

static void run_alloc(struct run *run)
{
	run->element_size = dtype_size(run->dtype);
	for (uint32_t i = 0; i < run->world->size; i++) {
		size_t in = run->input_counts[i] * run->element_size;
		size_t out = run->output_counts[i] * run->element_size;

		run->inputs[i] = malloc(in + 1);
		run->outputs[i] = malloc(out + 1);
		ASSERT_TRUE(run->inputs[i] && run->outputs[i]);
		fill(run->inputs[i], in);
		make_fitting(run, run->inputs[i], run->input_counts[i]);
		memset(run->outputs[i], 0xa5, out + 1);
		if (run->input_dtypes[i])
			make_narrow(run, i);
	}
}

static void run_submit(struct run *run, struct declared *declared, uint64_t round)
{
	struct asked asked[WORLD_RANKS];
	uint32_t size = run->world->size;

	for (uint32_t i = 0; i < size; i++) {
		asked[i] =
			asked_of(run->operation, run->reduction, run->narrow[i] ?: run->inputs[i],
				 run->input_counts[i], run->outputs[i], run->output_counts[i]);
		asked[i].base.input_dtype = run->input_dtypes[i];
		asked[i].base.root = run->root;
		asked[i].base.counts = run->has_counts ? run->counts[i] : NULL;
	}
	for (uint32_t i = 0; i < size; i++)
		asked_submit(&asked[(i + round) % size], &declared[(i + round) % size], round);
	for (uint32_t i = 0; i < size; i++) {
		WORLD_UNTIL(run->world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

/* What a rank's output holds; the byte after it must be untouched. */
static void expect_output(const struct run *run, uint32_t rank, const void *expected, size_t len)
{
	const uint8_t *output = run->outputs[rank];

	ASSERT_MEM(output, expected, len);
	ASSERT_EQ(output[run->output_counts[rank] * run->element_size], 0xa5);
}

/* The reduction over all ranks: each node in rank order, then the nodes in node order. */
static void *reduced(const struct run *run, uint64_t n)
{
	const struct world *world = run->world;
	unsigned n_nodes = world->options.n_nodes;
	bool average = run->reduction == REDUCTION_AVERAGE;
	uint32_t scale =
		average && run->dtype == DTYPE_FLOAT16 ? expected_scale(world->options.n_local) : 1;
	void *partials[WORLD_NODES] = { 0 }, *result = malloc(n * run->element_size + 1);
	const void *inputs[WORLD_RANKS];

	for (unsigned node = 0; node < n_nodes; node++) {
		partials[node] = malloc(n * run->element_size + 1);
		ASSERT_TRUE(result && partials[node]);
		for (uint32_t i = 0; i < world->options.n_local; i++)
			inputs[i] = run->inputs[i * n_nodes + node];
		/* Dividing by the scale is an average of so many. */
		expected_reduce(run->dtype, average && scale == 1 ? REDUCTION_SUM : run->reduction,
				scale, 1, inputs, world->options.n_local, n, partials[node]);
	}
	expected_reduce(run->dtype, run->reduction, world->size, scale,
			(const void *const *)partials, n_nodes, n, result);
	for (unsigned node = 0; node < n_nodes; node++)
		free(partials[node]);
	return result;
}

static bool is_allowed(unsigned dtype, unsigned reduction)
{
	return dtype != DTYPE_BOOL || reduction != REDUCTION_AVERAGE;
}

/* What ranks give of a tensor of float32: each NARROW[rank % 3]. Type 0 is its own. */
static const uint8_t alike[3], halves[] = { DTYPE_BFLOAT16, DTYPE_BFLOAT16, DTYPE_BFLOAT16 },
			       mixed[] = { DTYPE_FLOAT16, 0, DTYPE_BFLOAT16 };

static void set_narrow(struct run *run, const uint8_t *narrow)
{
	for (uint32_t i = 0; i < run->world->size; i++)
		run->input_dtypes[i] = narrow[i % 3];
}

static void check_push_pull_of(struct world *world, unsigned dtype, uint64_t n,
			       const uint8_t *narrow)
{
	struct declared *declared;
	uint64_t round = 0;
	char name[64];

	(void)snprintf(name, sizeof(name), "push_pull %s %" PRIu64 " %u", dtype_name(dtype), n,
		       narrow[0]);
	declared = world_declare(world, name, dtype, n);
	for (unsigned reduction = 1; reduction <= REDUCTION_MAX_; reduction++) {
		struct run run = {
			.world = world,
			.dtype = dtype,
			.operation = OPERATION_PUSH_PULL,
			.reduction = reduction,
		};
		void *expected;

		if (!is_allowed(dtype, reduction))
			continue;
		set_narrow(&run, narrow);
		for (uint32_t i = 0; i < world->size; i++)
			run.input_counts[i] = run.output_counts[i] = n;
		run_alloc(&run);
		expected = reduced(&run, n);
		run_submit(&run, declared, ++round);
		for (uint32_t i = 0; i < world->size; i++)
			expect_output(&run, i, expected, n * run.element_size);
		free(expected);
		run_free(&run);
	}
}

static void check_push_pull(struct world *world, unsigned dtype, uint64_t n)
{
	check_push_pull_of(world, dtype, n, alike);
}

static void check_reduce_scatter_of(struct world *world, unsigned dtype, bool has_counts,
				    const uint8_t *narrow)
{
	struct declared *declared;
	struct run run = {
		.world = world,
		.dtype = dtype,
		.operation = OPERATION_REDUCE_SCATTER,
		.reduction = REDUCTION_SUM,
		.has_counts = has_counts,
	};
	uint64_t total = 0, at = 0;
	char name[64], *expected;

	for (uint32_t i = 0; i < world->size; i++) {
		run.output_counts[i] = has_counts ? random_next() % 3000 * (i % 3) : 1700;
		total += run.output_counts[i];
	}
	for (uint32_t i = 0; i < world->size; i++) {
		run.input_counts[i] = total;
		memcpy(run.counts[i], run.output_counts, sizeof(run.output_counts));
	}
	set_narrow(&run, narrow);
	(void)snprintf(name, sizeof(name), "reduce_scatter %s %d %u", dtype_name(dtype), has_counts,
		       narrow[0]);
	declared = world_declare(world, name, dtype, total);
	run_alloc(&run);
	expected = reduced(&run, total);
	run_submit(&run, declared, 1);
	for (uint32_t i = 0; i < world->size; i++) {
		expect_output(&run, i, expected + at, run.output_counts[i] * run.element_size);
		at += run.output_counts[i] * run.element_size;
	}
	free(expected);
	run_free(&run);
}

static void check_reduce_scatter(struct world *world, unsigned dtype, bool has_counts)
{
	check_reduce_scatter_of(world, dtype, has_counts, alike);
}

static void check_broadcast(struct world *world, uint32_t root, uint64_t n)
{
	struct declared *declared;
	struct run run = {
		.world = world,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_BROADCAST,
		.root = root,
	};
	char name[64];

	(void)snprintf(name, sizeof(name), "broadcast %u %" PRIu64, root, n);
	declared = world_declare(world, name, run.dtype, n);
	for (uint32_t i = 0; i < world->size; i++)
		run.input_counts[i] = run.output_counts[i] = n;
	run_alloc(&run);
	run_submit(&run, declared, 1);
	for (uint32_t i = 0; i < world->size; i++)
		expect_output(&run, i, run.inputs[root], n * run.element_size);
	run_free(&run);
}

static void check_all_gather(struct world *world, bool has_counts)
{
	struct declared *declared;
	struct run run = {
		.world = world,
		.dtype = DTYPE_INT16,
		.operation = OPERATION_ALL_GATHER,
		.has_counts = has_counts,
	};
	uint64_t total = 0;
	char *expected, *at;

	for (uint32_t i = 0; i < world->size; i++) {
		run.input_counts[i] = has_counts ? random_next() % 5000 * (i % 3) : 2500;
		total += run.input_counts[i];
	}
	for (uint32_t i = 0; i < world->size; i++) {
		run.output_counts[i] = total;
		memcpy(run.counts[i], run.input_counts, sizeof(run.input_counts));
	}
	declared = world_declare(world, has_counts ? "all_gather counts" : "all_gather", run.dtype,
				 has_counts ? ELEMENTS_VARIABLE : 2500);
	run_alloc(&run);
	expected = at = malloc(total * 2 + 1);
	for (uint32_t i = 0; i < world->size; i++) {
		memcpy(at, run.inputs[i], run.input_counts[i] * 2);
		at += run.input_counts[i] * 2;
	}
	run_submit(&run, declared, 1);
	for (uint32_t i = 0; i < world->size; i++)
		expect_output(&run, i, expected, total * 2);
	free(expected);
	run_free(&run);
}

static void set_exchange(struct run *run)
{
	uint32_t size = run->world->size;

	for (uint32_t from = 0; from < size; from++) {
		for (uint32_t to = 0; to < size; to++) {
			uint64_t n =
				run->has_counts ? random_next() % 2500 * ((from + to) % 3) : 600;

			run->counts[from][to] = n;
			run->counts[to][size + from] = n;
			run->input_counts[from] += n;
			run->output_counts[to] += n;
		}
	}
}

static void check_all_to_all(struct world *world, bool has_counts)
{
	struct declared *declared;
	struct run run = {
		.world = world,
		.dtype = DTYPE_FLOAT64,
		.operation = OPERATION_ALL_TO_ALL,
		.has_counts = has_counts,
	};
	uint32_t size = world->size;

	set_exchange(&run);
	declared = world_declare(world, has_counts ? "all_to_all counts" : "all_to_all", run.dtype,
				 has_counts ? ELEMENTS_VARIABLE : 600ull * size);
	run_alloc(&run);
	run_submit(&run, declared, 1);
	for (uint32_t to = 0; to < size; to++) {
		const char *output = run.outputs[to];

		for (uint32_t from = 0; from < size; from++) {
			const char *input = run.inputs[from];
			size_t len = run.counts[from][to] * 8;

			for (uint32_t before = 0; before < to; before++)
				input += run.counts[from][before] * 8;
			ASSERT_MEM(output, input, len);
			output += len;
		}
		ASSERT_EQ((uint8_t)*output, 0xa5);
	}
	run_free(&run);
}

/* Nobody is through before everybody is there. */
static void check_barrier(struct world *world)
{
	struct declared *declared;
	struct asked asked[WORLD_RANKS];

	declared = world_declare(world, "barrier", DTYPE_UINT8, 0);
	for (uint32_t i = 0; i < world->size; i++) {
		for (uint32_t j = 0; j < i; j++)
			ASSERT_TRUE(!asked[j].done);
		asked[i] = asked_of(OPERATION_BARRIER, 0, NULL, 0, NULL, 0);
		asked_submit(&asked[i], &declared[i], 1);
		ASSERT_OK(loop_turn(world->loop, 0));
	}
	for (uint32_t i = 0; i < world->size; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

static void check_all(const struct world_options *options)
{
	_cleanup_(world_freep) struct world *world = world_new(options);

	world_form(world);
	for (unsigned dtype = 1; dtype <= DTYPE_MAX_; dtype++) {
		check_push_pull(world, dtype, 1);
		check_push_pull(world, dtype, 5003);
		check_reduce_scatter(world, dtype, true);
		check_reduce_scatter(world, dtype, false);
	}
	check_push_pull_of(world, DTYPE_FLOAT32, 1, halves);
	check_push_pull_of(world, DTYPE_FLOAT32, 70001, halves);
	check_push_pull_of(world, DTYPE_FLOAT32, 70001, mixed);
	check_reduce_scatter_of(world, DTYPE_FLOAT32, true, halves);
	check_reduce_scatter_of(world, DTYPE_FLOAT32, false, mixed);
	check_push_pull(world, DTYPE_FLOAT32, 0);
	check_push_pull(world, DTYPE_FLOAT16, 600000);
	for (uint32_t root = 0; root < world->size; root++) {
		check_broadcast(world, root, 4000);
		check_broadcast(world, root, 0);
	}
	check_all_gather(world, true);
	check_all_gather(world, false);
	check_all_to_all(world, true);
	check_all_to_all(world, false);
	check_barrier(world);
	for (uint32_t i = 0; i < world->size; i++)
		ASSERT_TRUE(!world->ranks[i].ended);
}

TEST(one_rank)
{
	check_all(&(struct world_options){ .n_nodes = 1, .n_local = 1, .no_servers = true });
}

TEST(three_ranks_inline)
{
	check_all(&(struct world_options){
		.n_nodes = 1, .n_local = 3, .no_servers = true, .inline_bytes = UINT64_MAX });
}

TEST(three_ranks_in_the_pool)
{
	check_all(&(struct world_options){
		.n_nodes = 1, .n_local = 3, .no_servers = true, .n_threads = 2 });
}

TEST(large_parts)
{
	check_all(&(struct world_options){ .n_nodes = 1,
					   .n_local = 2,
					   .no_servers = true,
					   .n_threads = 1,
					   .part_bytes = 1 << 20,
					   .inline_bytes = 8192 });
}

TEST(through_own_server)
{
	check_all(&(struct world_options){ .n_nodes = 1, .n_local = 2, .distributed = true });
}

TEST(two_nodes_of_one)
{
	check_all(&(struct world_options){ .n_nodes = 2, .n_local = 1 });
}

TEST(two_nodes_of_two_in_threads)
{
	check_all(&(struct world_options){ .n_nodes = 2,
					   .n_local = 2,
					   .n_threads = 2,
					   .n_data_threads = 1,
					   .inline_bytes = 8192 });
}

TEST(three_nodes_of_two)
{
	check_all(
		&(struct world_options){ .n_nodes = 3, .n_local = 2, .inline_bytes = UINT64_MAX });
}

TEST(large_parts_of_three_nodes)
{
	check_all(&(struct world_options){ .n_nodes = 3,
					   .n_local = 1,
					   .n_data_threads = 2,
					   .n_lanes = 3,
					   .part_bytes = 1 << 20,
					   .ahead_bytes = 1 << 20 });
}

/* Results are held until all parts are there; contributions may be gathered again until then. */
TEST(an_elastic_job_widens)
{
	const struct world_options options = {
		.n_nodes = 2, .n_local = 2, .n_threads = 1, .resume = true, .min_ranks = 1
	};
	_cleanup_(world_freep) struct world *world = world_new(&options);

	world_form(world);
	check_push_pull_of(world, DTYPE_FLOAT32, 70001, mixed);
	check_push_pull_of(world, DTYPE_FLOAT32, 5003, halves);
	check_reduce_scatter_of(world, DTYPE_FLOAT32, false, mixed);
}
