/*
 * Every kernel that this processor has, or the one that BPS_TEST_KERNEL names, against reference.c;
 * then lengths, alignments and copies.
 */
#include "reduce/reduce.h"
#include "reference.h"
#include "test.h"
#include <pthread.h>

#define INPUTS_MAX  9
#define OUTPUTS_MAX 3
#define GUARD	    64 /* bytes behind an output that nobody may touch */

static const char *const kernel_names[] = { "scalar",	   "avx2",	 "avx512",
					    "avx512_bf16", "avx512_256", "neon" };

/*
 * Whether this run is to examine a set of kernels: the one that BPS_TEST_KERNEL names, which has to be here (check_kernel.sh), or
 * each that is here.
 */
static bool is_examined(const char *name)
{
	const char *only = getenv("BPS_TEST_KERNEL");

	if (only && strcmp(only, name))
		return false;
	if (!reduce_kernel_select(name))
		return true;
	ASSERT_TRUE(!only);
	return false;
}

/* Runs `body` with each set of kernels that is examined. */
#define FOR_EACH_KERNEL                                                            \
	for (size_t kernel_i = 0; kernel_i < ARRAY_SIZE(kernel_names); kernel_i++) \
		if (is_examined(kernel_names[kernel_i]))

static uint64_t random_state = 88172645463325252ull;

static uint64_t random_bits(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state * 0x2545f4914f6cdd1dull;
}

static uint64_t get(const void *array, size_t size, size_t i)
{
	uint64_t bits = 0;

	memcpy(&bits, (const char *)array + i * size, size);
	return bits;
}

static void put(void *array, size_t size, size_t i, uint64_t bits)
{
	memcpy((char *)array + i * size, &bits, size);
}

/* Numbers at which something happens: zeros, ends of denormals and of the range, infinities, NaNs of all kinds. */
static uint64_t special_bits(unsigned dtype)
{
	static const uint64_t f64[] = { 0,
					1,
					0x000fffffffffffff,
					0x0010000000000000,
					0x3ff0000000000000,
					0x3ff0000000000001,
					0x4340000000000000,
					0x7fefffffffffffff,
					0x7ff0000000000000,
					0x7ff0000000000001,
					0x7ff8000000000000,
					0x7fffffffffffffff };
	static const uint64_t f32[] = { 0,	    1,		0x007fffff, 0x00800000, 0x33000000,
					0x33800000, 0x38800000, 0x3f800000, 0x3f800001, 0x477fe000,
					0x477ff000, 0x4b800000, 0x7f7fffff, 0x7f800000, 0x7f800001,
					0x7fc00000, 0x7fffffff };
	static const uint64_t f16[] = { 0,	1,	0x03ff, 0x0400, 0x3c00, 0x3c01, 0x6800,
					0x7bff, 0x7bfe, 0x7c00, 0x7c01, 0x7e00, 0x7fff };
	static const uint64_t bf16[] = { 0,	 1,	 0x007f, 0x0080, 0x3f80, 0x3f81,
					 0x4380, 0x7f7f, 0x7f80, 0x7f81, 0x7fc0, 0x7fff };
	static const uint64_t integers[] = { 0, 1, 2, 0x7f, 0x80, 0x7fff, 0x7fffffff, INT64_MAX };
	size_t n_bits = 8 * dtype_size(dtype);
	uint64_t r = random_bits(), sign = r >> 63 << (n_bits - 1);

	r &= 0xffff;
	switch (dtype) {
	case DTYPE_FLOAT64:
		return f64[r % ARRAY_SIZE(f64)] | sign;
	case DTYPE_FLOAT32:
		return f32[r % ARRAY_SIZE(f32)] | sign;
	case DTYPE_FLOAT16:
		return f16[r % ARRAY_SIZE(f16)] | sign;
	case DTYPE_BFLOAT16:
		return bf16[r % ARRAY_SIZE(bf16)] | sign;
	default:
		r = integers[r % ARRAY_SIZE(integers)];
		return sign ? ~r : r;
	}
}

/* A third special, a third any bits at all, a third of like size, so that sums do more than keep the largest. */
static uint64_t value_bits(unsigned dtype)
{
	uint64_t r = random_bits();

	if (r % 3 == 0)
		return special_bits(dtype);
	if (r % 3 == 1)
		return random_bits();
	switch (dtype) {
	case DTYPE_FLOAT64:
		return 0x3ff0000000000000 | (random_bits() & 0x801fffffffffffff);
	case DTYPE_FLOAT32:
		return 0x3f800000 | (random_bits() & 0x81ffffff);
	case DTYPE_FLOAT16:
		return 0x3c00 | (random_bits() & 0x87ff);
	case DTYPE_BFLOAT16:
		return 0x3f80 | (random_bits() & 0x81ff);
	default:
		return random_bits() % 7 - 3;
	}
}

/* One reduction with all that can vary in it. The arrays are made for each run, so that a sanitizer knows their ends. */
struct run {
	unsigned dtype, reduction;
	size_t n_inputs, n_outputs, n_elements;
	size_t cut;	       /* elements that are summed first, by themselves */
	size_t start;	       /* elements by which the arrays are off their alignment */
	int same[OUTPUTS_MAX]; /* the input that this output is, or -1 */
	uint64_t divisor;
	uint32_t scale;
	bool round_before_division;
	bool folds;		      /* input after input */
	const uint8_t *input_dtypes;  /* NULL: dtype */
	const void *data[INPUTS_MAX]; /* what the inputs hold */
	const void *expected;
};

struct arrays {
	void *inputs[INPUTS_MAX], *outputs[OUTPUTS_MAX];
	void *allocated[INPUTS_MAX + OUTPUTS_MAX];
	size_t n_allocated;
};

static void arrays_done(struct arrays *a)
{
	for (size_t i = 0; i < a->n_allocated; i++)
		free(a->allocated[i]);
}

static size_t input_size(const struct run *run, size_t i)
{
	return dtype_size(run->input_dtypes ? run->input_dtypes[i] : run->dtype);
}

static void *arrays_add(struct arrays *a, const struct run *run, size_t size)
{
	size_t start = run->start * size, len = run->n_elements * size + GUARD;
	char *p = malloc(start + len);

	ASSERT_TRUE(p);
	a->allocated[a->n_allocated++] = p;
	memset(p, 0xa5, start + len);
	return p + start;
}

/* One input, then the others. */
static void fold(struct reduce_params *params, const struct run *run)
{
	_cleanup_(freep) void *acc = NULL;

	params->n_elements = run->n_elements;
	acc = malloc(reduce_fold_len(params) + 1);
	params->n_inputs = 1;
	reduce_fold_add(params, acc, true);
	params->inputs++;
	params->n_inputs = run->n_inputs - 1;
	reduce_fold_add(params, acc, false);
	reduce_fold_end(params, acc);
}

static void check_run(const struct run *run)
{
	_cleanup_(arrays_done) struct arrays a = { 0 };
	size_t size = dtype_size(run->dtype), len = run->n_elements * size;
	struct reduce_params params;
	char guard[GUARD];

	memset(guard, 0xa5, sizeof(guard));
	for (size_t i = 0; i < run->n_inputs; i++) {
		a.inputs[i] = arrays_add(&a, run, input_size(run, i));
		memcpy(a.inputs[i], run->data[i], run->n_elements * input_size(run, i));
	}
	for (size_t o = 0; o < run->n_outputs; o++)
		a.outputs[o] =
			run->same[o] >= 0 ? a.inputs[run->same[o]] : arrays_add(&a, run, size);

	params = (struct reduce_params){
		.dtype = run->dtype,
		.reduction = run->reduction,
		.n_elements = run->cut,
		.inputs = (const void *const *)a.inputs,
		.n_inputs = run->n_inputs,
		.input_dtypes = run->input_dtypes,
		.outputs = a.outputs,
		.n_outputs = run->n_outputs,
		.divisor = run->divisor,
		.scale = run->scale,
		.round_before_division = run->round_before_division,
	};
	if (run->folds) {
		fold(&params, run);
	} else {
		reduce_run(&params);
		params.first = run->cut;
		params.n_elements = run->n_elements - run->cut;
		reduce_run(&params);
	}

	for (size_t o = 0; o < run->n_outputs; o++) {
		ASSERT_MEM((char *)a.outputs[o] + len, guard, sizeof(guard));
		if (!memcmp(a.outputs[o], run->expected, len))
			continue;
		for (size_t i = 0; i < run->n_elements; i++)
			if (get(a.outputs[o], size, i) != get(run->expected, size, i))
				test_fail(__FILE__, __LINE__,
					  "%s %s %s of %zu inputs, element %zu of %zu, start %zu, "
					  "output %zu: "
					  "%#jx instead of %#jx",
					  reduce_kernel_name(), dtype_name(run->dtype),
					  reduction_name(run->reduction), run->n_inputs, i,
					  run->n_elements, run->start, o,
					  (uintmax_t)get(a.outputs[o], size, i),
					  (uintmax_t)get(run->expected, size, i));
	}
	/* Inputs that are no outputs are as they were. */
	for (size_t i = 0; i < run->n_inputs; i++) {
		bool written = false;

		for (size_t o = 0; o < run->n_outputs; o++)
			written |= run->same[o] == (int)i;
		if (!written)
			ASSERT_MEM(a.inputs[i], run->data[i], run->n_elements * input_size(run, i));
	}
}

/* Fills run->expected for run->data. */
static void expect(struct run *run, void *expected)
{
	size_t size = dtype_size(run->dtype);

	for (size_t i = 0; i < run->n_elements; i++) {
		uint64_t bits[INPUTS_MAX];

		for (size_t k = 0; k < run->n_inputs; k++) {
			bits[k] = get(run->data[k], input_size(run, k), i);
			if (input_size(run, k) != size)
				bits[k] = reference_widen(run->input_dtypes[k], bits[k]);
		}
		put(expected, size, i,
		    reference_reduce(run->dtype, run->reduction, bits, run->n_inputs, run->divisor,
				     run->scale ?: 1, run->round_before_division));
	}
	run->expected = expected;
}

/* Every length, alignment, aliasing and kernel for one type, reduction and number of inputs. */
static void check_shapes(struct run *run, size_t n_elements)
{
	static const size_t lengths[] = { 0,  1,  2,  3,  7,   8,   15,	 17, 31,
					  33, 63, 64, 65, 127, 129, 255, 340 };
	static const int same[][OUTPUTS_MAX] = {
		{ -1 }, { 0 }, { INPUTS_MAX }, { -1, 0 }, { 0, -1, INPUTS_MAX }
	};
	static const size_t n_outputs[] = { 1, 1, 1, 2, 3 };

	FOR_EACH_KERNEL for (size_t l = 0; l < ARRAY_SIZE(lengths);
			     l++) for (size_t s = 0; s < ARRAY_SIZE(same); s++)
	{
		run->n_elements = MIN(lengths[l], n_elements);
		run->start = (l + s) % 4;
		run->cut = run->n_elements / 3 * ((l + s) % 2);
		run->folds = (l + s) % 3 == 2 && !run->input_dtypes;
		run->n_outputs = n_outputs[s];
		for (size_t o = 0; o < OUTPUTS_MAX; o++)
			run->same[o] =
				same[s][o] == INPUTS_MAX ? (int)run->n_inputs - 1 : same[s][o];
		check_run(run);
	}
}

static void check_type(unsigned dtype)
{
	enum { N = 340 };
	_cleanup_(freep) char *data = malloc(INPUTS_MAX * N * 8);
	_cleanup_(freep) void *expected = malloc(N * 8);
	struct run run = { .dtype = dtype };
	size_t size = dtype_size(dtype);

	ASSERT_TRUE(data && expected);
	for (size_t k = 0; k < INPUTS_MAX; k++)
		run.data[k] = data + k * N * size;
	for (size_t i = 0; i < INPUTS_MAX * N; i++)
		put(data, size, i, value_bits(dtype));

	for (run.reduction = 1; run.reduction <= REDUCTION_MAX_; run.reduction++)
		for (run.n_inputs = 1; run.n_inputs <= INPUTS_MAX; run.n_inputs++)
			for (int before = 0; before < 2; before++) {
				if (!reduce_supported(dtype, run.reduction))
					continue;
				run.round_before_division = before;
				run.divisor = run.n_inputs + 5 * (run.n_inputs % 2);
				run.scale = dtype == DTYPE_FLOAT16
						    ? reduce_scale((uint32_t)run.divisor)
						    : 1;
				run.n_elements = N;
				expect(&run, expected);
				check_shapes(&run, N);
			}
}

#define TEST_TYPE(name, dtype)                       \
	TEST(name##_is_the_reference_in_every_shape) \
	{                                            \
		check_type(dtype);                   \
	}

TEST_TYPE(float64, DTYPE_FLOAT64)
TEST_TYPE(float32, DTYPE_FLOAT32)
TEST_TYPE(float16, DTYPE_FLOAT16)
TEST_TYPE(bfloat16, DTYPE_BFLOAT16)
TEST_TYPE(int64, DTYPE_INT64)
TEST_TYPE(int32, DTYPE_INT32)
TEST_TYPE(int16, DTYPE_INT16)
TEST_TYPE(int8, DTYPE_INT8)
TEST_TYPE(uint8, DTYPE_UINT8)
TEST_TYPE(bool, DTYPE_BOOL)

/* Inputs of other types than the output, which is none of them. */
static void check_widening(const uint8_t *dtypes)
{
	enum { N = 3000 };
	static const size_t lengths[] = { 0, 1, 15, 16, 17, 63, 65, 128, 340, 1024, N };
	_cleanup_(freep) char *data = malloc(INPUTS_MAX * N * 4);
	_cleanup_(freep) void *expected = malloc(N * 4);
	struct run run = { .dtype = DTYPE_FLOAT32, .input_dtypes = dtypes, .same = { -1, -1 } };

	ASSERT_TRUE(data && expected);
	for (size_t k = 0; k < INPUTS_MAX; k++) {
		run.data[k] = data + k * N * 4;
		for (size_t i = 0; i < N; i++)
			put(data + k * N * 4, dtype_size(dtypes[k]), i, value_bits(dtypes[k]));
	}
	for (run.reduction = 1; run.reduction <= REDUCTION_MAX_; run.reduction++)
		for (run.n_inputs = 1; run.n_inputs <= INPUTS_MAX; run.n_inputs++) {
			run.divisor = run.n_inputs + 5 * (run.n_inputs % 2);
			run.n_elements = N;
			expect(&run, expected);
			FOR_EACH_KERNEL for (size_t l = 0; l < ARRAY_SIZE(lengths); l++)
			{
				run.n_elements = lengths[l];
				run.start = l % 4;
				run.n_outputs = 1 + l % 2;
				check_run(&run);
			}
		}
}

TEST(inputs_of_float16_are_widened)
{
	uint8_t dtypes[INPUTS_MAX];

	memset(dtypes, DTYPE_FLOAT16, sizeof(dtypes));
	check_widening(dtypes);
}

TEST(inputs_of_bfloat16_are_widened)
{
	uint8_t dtypes[INPUTS_MAX];

	memset(dtypes, DTYPE_BFLOAT16, sizeof(dtypes));
	check_widening(dtypes);
}

TEST(inputs_of_all_types_are_widened)
{
	static const uint8_t types[] = { DTYPE_FLOAT32, DTYPE_FLOAT16, DTYPE_BFLOAT16 };
	uint8_t dtypes[INPUTS_MAX];

	for (size_t first = 0; first < ARRAY_SIZE(types); first++) {
		for (size_t i = 0; i < INPUTS_MAX; i++)
			dtypes[i] = types[(first + i * i) % ARRAY_SIZE(types)];
		check_widening(dtypes);
	}
}

/* In place of one rank, while others' are narrower: read before it is written, whichever it is. */
TEST(an_output_may_be_the_one_input_of_its_type)
{
	enum { N = 5000 };
	_cleanup_(freep) char *data = malloc(3 * N * 4);
	_cleanup_(freep) void *expected = malloc(N * 4);
	uint8_t dtypes[3];
	struct run run = {
		.dtype = DTYPE_FLOAT32,
		.reduction = REDUCTION_SUM,
		.n_inputs = 3,
		.n_outputs = 2,
		.n_elements = N,
		.input_dtypes = dtypes,
	};

	ASSERT_TRUE(data && expected);
	for (size_t wide = 0; wide < 3; wide++) {
		for (size_t k = 0; k < 3; k++) {
			dtypes[k] = k == wide ? DTYPE_FLOAT32 : DTYPE_BFLOAT16;
			run.data[k] = data + k * N * 4;
			for (size_t i = 0; i < N; i++)
				put(data + k * N * 4, dtype_size(dtypes[k]), i,
				    value_bits(dtypes[k]));
		}
		expect(&run, expected);
		for (int first = 0; first < 2; first++) {
			run.same[0] = first ? (int)wide : -1;
			run.same[1] = first ? -1 : (int)wide;
			FOR_EACH_KERNEL check_run(&run);
		}
	}
}

TEST(only_halves_are_widened)
{
	for (unsigned from = 0; from <= DTYPE_MAX_; from++)
		for (unsigned to = 0; to <= DTYPE_MAX_; to++)
			ASSERT_EQ(reduce_widens(from, to),
				  to == DTYPE_FLOAT32 &&
					  (from == DTYPE_FLOAT16 || from == DTYPE_BFLOAT16));
}

/* All 65536 numbers of a type, each with one other. */
static void check_exhaustive(unsigned dtype, unsigned reduction, uint64_t other, bool before)
{
	enum { N = 65536 };
	_cleanup_(freep) uint16_t *all = malloc(N * sizeof(*all));
	_cleanup_(freep) uint16_t *one = malloc(N * sizeof(*one));
	_cleanup_(freep) uint16_t *expected = malloc(N * sizeof(*expected));
	struct run run = {
		.dtype = dtype,
		.reduction = reduction,
		.n_inputs = 2,
		.n_outputs = 1,
		.n_elements = N,
		.same = { -1 },
		.divisor = 3,
		.scale = dtype == DTYPE_FLOAT16 ? 4 : 1,
		.round_before_division = before,
	};

	ASSERT_TRUE(all && one && expected);
	for (size_t i = 0; i < N; i++) {
		all[i] = (uint16_t)i;
		one[i] = (uint16_t)other;
	}
	run.data[0] = all;
	run.data[1] = one;
	expect(&run, expected);
	FOR_EACH_KERNEL check_run(&run);
	run.n_inputs = 1;
	expect(&run, expected);
	FOR_EACH_KERNEL check_run(&run);
}

static void check_all_numbers(unsigned dtype, const uint16_t *others, size_t n_others)
{
	for (size_t i = 0; i < n_others; i++) {
		check_exhaustive(dtype, REDUCTION_SUM, others[i], false);
		check_exhaustive(dtype, REDUCTION_AVERAGE, others[i], false);
		check_exhaustive(dtype, REDUCTION_AVERAGE, others[i], true);
		check_exhaustive(dtype, REDUCTION_MIN, others[i], false);
		check_exhaustive(dtype, REDUCTION_MAX, others[i], false);
	}
}

TEST(every_float16_with_some_others)
{
	static const uint16_t others[] = { 0x0000, 0x8000, 0x0001, 0x8401, 0x3c01,
					   0x6bff, 0x7bff, 0x7c00, 0xfd01 };

	check_all_numbers(DTYPE_FLOAT16, others, ARRAY_SIZE(others));
}

TEST(every_bfloat16_with_some_others)
{
	static const uint16_t others[] = { 0x0000, 0x8000, 0x0001, 0x8081, 0x3f81,
					   0x43ff, 0x7f7f, 0xff80, 0x7f81 };

	check_all_numbers(DTYPE_BFLOAT16, others, ARRAY_SIZE(others));
}

/*
 * Sums of two halves reach few of the float32 numbers that can be rounded. Nine reach all there are between
 * neighbours: here large, small and smaller still, so that ties and the sides of ties come up.
 */
TEST(rounding_to_half_sees_what_lies_below_the_last_bit)
{
	enum { N = 20000 };
	_cleanup_(freep) uint16_t *data = malloc(3 * N * sizeof(*data));
	_cleanup_(freep) uint16_t *expected = malloc(N * sizeof(*expected));
	struct run run = {
		.reduction = REDUCTION_SUM, .n_inputs = 3, .n_outputs = 1, .same = { -1 }
	};

	ASSERT_TRUE(data && expected);
	run.n_elements = N;
	for (size_t k = 0; k < 3; k++)
		run.data[k] = data + k * N;
	for (run.dtype = DTYPE_FLOAT16; run.dtype <= DTYPE_BFLOAT16; run.dtype++) {
		unsigned fraction = run.dtype == DTYPE_FLOAT16 ? 10 : 7;
		unsigned exponents = run.dtype == DTYPE_FLOAT16 ? 30 : 254;

		for (size_t i = 0; i < N; i++) {
			unsigned e = (unsigned)(random_bits() % (exponents - 2 * fraction - 2));
			unsigned high = e + 2 * fraction + 2;
			/* Half a unit of the first in its last place, and a little of either sign. */
			data[i] = (uint16_t)(high << fraction |
					     (random_bits() & ((1u << fraction) - 1)));
			data[N + i] = (uint16_t)((high - fraction - 1) << fraction);
			data[2 * N + i] = (uint16_t)(random_bits() % 3 ? (random_bits() & 1) << 15 |
										 e << fraction
								       : 0);
		}
		expect(&run, expected);
		FOR_EACH_KERNEL check_run(&run);
	}
}

/* On one node in two hops, on a node of several, and at the server: of numbers that are all the largest that there is. */
TEST(averages_of_float16_are_finite)
{
	enum { LARGEST = 0x7bff };
	uint16_t largest = LARGEST, output;
	const void *inputs[INPUTS_MAX];
	void *outputs[] = { &output };
	struct reduce_params params = {
		.dtype = DTYPE_FLOAT16,
		.reduction = REDUCTION_AVERAGE,
		.n_elements = 1,
		.inputs = inputs,
		.outputs = outputs,
		.n_outputs = 1,
	};

	FOR_EACH_KERNEL for (uint32_t n = 1; n <= INPUTS_MAX; n++)
	{
		for (uint32_t i = 0; i < n; i++)
			inputs[i] = &largest;
		params.n_inputs = params.divisor = n;
		params.scale = reduce_scale(n);
		params.round_before_division = true;
		reduce_run(&params);
		/* Each hop rounds. */
		ASSERT_INT(output, <=, LARGEST);
		ASSERT_INT(output, >=, LARGEST - 1);
		/* On a node of several. */
		params.divisor = reduce_scale(n);
		params.scale = 1;
		params.round_before_division = false;
		reduce_run(&params);
		ASSERT_INT(output, <=, LARGEST);
		/* At the server, of nodes with four ranks each. */
		params.divisor = 4 * n;
		params.scale = 4;
		reduce_run(&params);
		ASSERT_EQ(output, LARGEST);
	}
}

TEST(scale_is_the_least_power_of_two)
{
	ASSERT_EQ(reduce_scale(1), 1);
	ASSERT_EQ(reduce_scale(2), 2);
	ASSERT_EQ(reduce_scale(3), 4);
	ASSERT_EQ(reduce_scale(4), 4);
	ASSERT_EQ(reduce_scale(5), 8);
	ASSERT_EQ(reduce_scale(JOB_RANKS_MAX), JOB_RANKS_MAX);
	ASSERT_EQ(reduce_scale(0), 1);
}

TEST(integers_divide_downwards)
{
	static const uint64_t divisors[] = { 1,		2,	    3,		7,
					     10,	127,	    128,	255,
					     256,	INT32_MAX,  1ull << 31, 1ull << 53,
					     INT64_MAX, 1ull << 63, UINT64_MAX };
	enum { N = 65536 };
	_cleanup_(freep) char *data = malloc(N * 8);
	_cleanup_(freep) void *expected = malloc(N * 8);
	struct run run = { .reduction = REDUCTION_AVERAGE,
			   .n_inputs = 1,
			   .n_outputs = 1,
			   .n_elements = N,
			   .same = { -1 } };

	ASSERT_TRUE(data && expected);
	run.data[0] = data;
	for (run.dtype = DTYPE_INT64; run.dtype <= DTYPE_UINT8; run.dtype++) {
		size_t size = dtype_size(run.dtype);

		/* Every number of 8 and 16 bits, the ends of the wider types, and any. */
		for (size_t i = 0; i < N; i++)
			put(data, size, i,
			    size <= 2	 ? i
			    : i % 8 == 0 ? special_bits(run.dtype)
			    : i % 8 == 1 ? i / 8 - N / 16
					 : random_bits());
		for (size_t d = 0; d < ARRAY_SIZE(divisors); d++) {
			run.divisor = divisors[d];
			expect(&run, expected);
			FOR_EACH_KERNEL check_run(&run);
		}
	}
}

TEST(averages_of_integers_do_not_wrap)
{
	static const struct {
		unsigned dtype;
		int64_t least, most;
	} types[] = {
		{ DTYPE_INT64, INT64_MIN, INT64_MAX }, { DTYPE_INT32, INT32_MIN, INT32_MAX },
		{ DTYPE_INT16, INT16_MIN, INT16_MAX }, { DTYPE_INT8, INT8_MIN, INT8_MAX },
		{ DTYPE_UINT8, 0, UINT8_MAX },
	};
	enum { N = 1000 };

	FOR_EACH_KERNEL for (size_t t = 0; t < ARRAY_SIZE(types); t++)
	{
		_cleanup_(freep) char *data = malloc(N * 8), *sum = malloc(N * 8);
		size_t size = dtype_size(types[t].dtype);
		const void *inputs[INPUTS_MAX];
		void *outputs[] = { sum };
		struct reduce_params params = {
			.dtype = types[t].dtype,
			.reduction = REDUCTION_AVERAGE,
			.n_elements = N,
			.inputs = inputs,
			.n_inputs = INPUTS_MAX,
			.outputs = outputs,
			.n_outputs = 1,
			.divisor = INPUTS_MAX,
		};

		for (size_t i = 0; i < N; i++)
			put(data, size, i,
			    (uint64_t)(i % 2 ? types[t].least : types[t].most) &
				    (UINT64_MAX >> (64 - 8 * size)));
		for (size_t i = 0; i < INPUTS_MAX; i++)
			inputs[i] = data;
		ASSERT_OK(reduce_run(&params));
		ASSERT_MEM(sum, data, N * size);
		/* A sum of so many is none of the type, in one element as well as in all. */
		params.divisor = 1;
		ASSERT_EQ(reduce_run(&params), -ERANGE);
		for (size_t i = 0; i < N; i++)
			put(data, size, i, i == N - 1 ? (uint64_t)types[t].least : 0);
		ASSERT_EQ(reduce_run(&params), types[t].least ? -ERANGE : 0);
		put(data, size, N - 1, (uint64_t)types[t].most);
		ASSERT_EQ(reduce_run(&params), -ERANGE);
		params.n_inputs = 1;
		ASSERT_OK(reduce_run(&params));
		ASSERT_MEM(sum, data, N * size);
	}
}

/* Larger than a piece, and larger than what is written past the caches; the ends are not aligned. */
static void check_large(size_t len, unsigned reduction, size_t n_outputs)
{
	size_t n = len / 2 + 77;
	_cleanup_(freep) uint16_t *data = malloc((n + 4096) * sizeof(*data));
	_cleanup_(freep) uint16_t *expected = malloc(n * sizeof(*expected));
	struct run run = {
		.dtype = reduction == REDUCTION_AVERAGE ? DTYPE_INT16 : DTYPE_FLOAT16,
		.reduction = reduction,
		.n_inputs = 2,
		.n_outputs = n_outputs,
		.start = 3,
		.same = { -1, -1, -1 },
		.divisor = 2,
	};

	ASSERT_TRUE(data && expected);
	for (size_t i = 0; i < n + 4096; i++)
		data[i] = (uint16_t)random_bits();
	run.n_elements = n;
	run.data[0] = data;
	run.data[1] = data + 4096;
	expect(&run, expected);
	FOR_EACH_KERNEL check_run(&run);
	run.same[n_outputs - 1] = 1;
	FOR_EACH_KERNEL check_run(&run);
}

TEST(outputs_larger_than_a_piece)
{
	check_large(3 * REDUCE_PIECE_BYTES, REDUCTION_SUM, 1);
	check_large(3 * REDUCE_PIECE_BYTES, REDUCTION_SUM, 3);
	check_large(3 * REDUCE_PIECE_BYTES, REDUCTION_AVERAGE, 2);
}

/* Whose alignment of the output is none of the inputs'. */
TEST_TIMEOUT(widened_outputs_larger_than_the_caches, 300)
{
	static const uint8_t dtypes[] = { DTYPE_BFLOAT16, DTYPE_BFLOAT16 };
	size_t n = REDUCE_STREAM_BYTES / sizeof(float) + 77;
	_cleanup_(freep) uint16_t *data = malloc((n + 4096) * sizeof(*data));
	_cleanup_(freep) float *expected = malloc(n * sizeof(*expected));
	struct run run = {
		.dtype = DTYPE_FLOAT32,
		.reduction = REDUCTION_SUM,
		.n_inputs = 2,
		.n_outputs = 1,
		.n_elements = n,
		.start = 3,
		.same = { -1 },
		.input_dtypes = dtypes,
	};

	ASSERT_TRUE(data && expected);
	for (size_t i = 0; i < n + 4096; i++)
		data[i] = (uint16_t)random_bits();
	run.data[0] = data;
	run.data[1] = data + 4096;
	expect(&run, expected);
	FOR_EACH_KERNEL check_run(&run);
}

TEST_TIMEOUT(outputs_larger_than_the_caches, 300)
{
	check_large(17u << 20, REDUCTION_SUM, 1);
	check_large(17u << 20, REDUCTION_MAX, 3);
	check_large(17u << 20, REDUCTION_AVERAGE, 3);
}

TEST(the_same_output_twice_is_written_once_and_right)
{
	int32_t a[3] = { 1, 2, 3 }, b[3] = { 10, 20, 30 };
	const void *const inputs[] = { a, b };
	void *const outputs[] = { a, a };

	reduce_run(&(struct reduce_params){
		.dtype = DTYPE_INT32,
		.reduction = REDUCTION_SUM,
		.n_elements = 3,
		.inputs = inputs,
		.n_inputs = 2,
		.outputs = outputs,
		.n_outputs = 2,
	});
	ASSERT_MEM(a, ((int32_t[]){ 11, 22, 33 }), sizeof(a));
}

TEST(copies_are_whole_at_any_length_and_address)
{
	enum { LEN_MAX = 3000 };
	unsigned char input[LEN_MAX + 8], outputs[4][LEN_MAX + GUARD];

	for (size_t i = 0; i < sizeof(input); i++)
		input[i] = (unsigned char)random_bits();
	FOR_EACH_KERNEL
	{
		for (size_t n = 0; n <= 4; n++) {
			for (size_t len = 0; len < LEN_MAX; len += 1 + len / 4) {
				const unsigned char *from = input + len % 8;
				void *to[4];

				memset(outputs, 0xaa, sizeof(outputs));
				for (size_t o = 0; o < n; o++)
					to[o] = outputs[o] + o;
				reduce_copy(to, n, from, len);
				for (size_t o = 0; o < 4; o++) {
					size_t end = o < n ? o + len : 0;

					ASSERT_TRUE(o >= n || !memcmp(to[o], from, len));
					for (size_t i = 0; i < sizeof(outputs[o]); i++)
						ASSERT_TRUE((i >= MIN(o, end) && i < end) ||
							    outputs[o][i] == 0xaa);
				}
			}
		}
	}
}

TEST(the_order_of_inputs_is_the_order_of_sums)
{
	float big = 1e8f, less = -1e8f, one = 1.0f, left = 0, right = 0;
	const void *const forwards[] = { &big, &less, &one }, *const backwards[] = { &one, &big,
										     &less };
	void *outputs[] = { &left };
	struct reduce_params params = {
		.dtype = DTYPE_FLOAT32,
		.reduction = REDUCTION_SUM,
		.n_elements = 1,
		.inputs = forwards,
		.n_inputs = 3,
		.outputs = outputs,
		.n_outputs = 1,
	};

	FOR_EACH_KERNEL
	{
		outputs[0] = &left;
		params.inputs = forwards;
		reduce_run(&params);
		outputs[0] = &right;
		params.inputs = backwards;
		reduce_run(&params);
		ASSERT_TRUE(left == 1.0f && right == 0.0f);
	}
}

TEST(all_is_supported_but_the_average_of_bool)
{
	for (unsigned dtype = 1; dtype <= DTYPE_MAX_; dtype++)
		for (unsigned reduction = 1; reduction <= REDUCTION_MAX_; reduction++)
			ASSERT_EQ(reduce_supported(dtype, reduction),
				  dtype != DTYPE_BOOL || reduction != REDUCTION_AVERAGE);
	ASSERT_TRUE(!reduce_supported(0, REDUCTION_SUM));
	ASSERT_TRUE(!reduce_supported(DTYPE_MAX_ + 1, REDUCTION_SUM));
	ASSERT_TRUE(!reduce_supported(DTYPE_INT8, 0));
	ASSERT_TRUE(!reduce_supported(DTYPE_INT8, REDUCTION_MAX_ + 1));
}

TEST(kernels_are_chosen_by_name)
{
	ASSERT_OK(reduce_kernel_select("scalar"));
	ASSERT_STR(reduce_kernel_name(), "scalar");
	ASSERT_EQ(reduce_kernel_select("abacus"), -ENOTSUP);
	ASSERT_EQ(reduce_kernel_select(""), -ENOTSUP);
	ASSERT_STR(reduce_kernel_name(), "scalar");
}

#ifdef __x86_64__
TEST(half_registers_are_had_wherever_bfloat16_is)
{
	bool has = !reduce_kernel_select("avx512_bf16") && !reduce_kernel_select("avx2") &&
		   __builtin_cpu_supports("fma");

	ASSERT_EQ(reduce_kernel_select("avx512_256"), has ? 0 : -ENOTSUP);
}

/* Nothing has been chosen yet in this process. */
TEST(zen_4_sums_by_half_registers)
{
	__builtin_cpu_init();
	if (!__builtin_cpu_supports("avx512bf16"))
		ASSERT_TRUE(strncmp(reduce_kernel_name(), "avx512_", strlen("avx512_")));
	else
		ASSERT_STR(reduce_kernel_name(),
			   __builtin_cpu_is("amdfam19h") ? "avx512_256" : "avx512_bf16");
}
#endif

static void *sum_once(void *arg)
{
	float *cell = arg;
	const void *const inputs[] = { cell, cell };
	void *const outputs[] = { cell };

	reduce_run(&(struct reduce_params){
		.dtype = DTYPE_FLOAT32,
		.reduction = REDUCTION_SUM,
		.n_elements = 1,
		.inputs = inputs,
		.n_inputs = 2,
		.outputs = outputs,
		.n_outputs = 1,
	});
	return (void *)reduce_kernel_name();
}

/* Nothing has been chosen yet in this process: the threads' first calls choose, all at once. */
TEST(threads_choose_the_same_kernels)
{
	pthread_t threads[8];
	float cells[ARRAY_SIZE(threads)];
	void *names[ARRAY_SIZE(threads)];

	for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
		cells[i] = (float)i;
		ASSERT_OK(pthread_create(&threads[i], NULL, sum_once, &cells[i]));
	}
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_join(threads[i], &names[i]));
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
		ASSERT_STR(names[i], reduce_kernel_name());
		ASSERT_TRUE(cells[i] == 2 * (float)i);
	}
}
