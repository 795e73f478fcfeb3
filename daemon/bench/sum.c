/*
 * The sum, for each type and each set of kernels this machine has, beside what the memory gives for as many reads and a
 * write, and beside memcpy, in the same run.
 *
 *	bps-bench sum [--json FILE] [--rounds N] [--inputs N]... [--bytes N]... [--dtype NAME]... [--all-reductions] [--alike]
 *
 * A number is memory traffic in GB/s, inputs read and output written, so that memcpy's (read and written) is the same
 * measure. In every round each kernel of a case runs once, the limit and memcpy among them; the medians over all rounds are
 * printed. The limit of a round is the fastest of its ways.
 *
 * All of them get the same memory: blocks, as a server's contributions and results lie in. With --alike, pages, as a node's ranks
 * have: a line of each input and of the output meet in one set of the first cache.
 *
 * What is converted to be added has another bound, the conversions themselves (convert). The bound is the lesser of the two.
 */
#include "base/memory/block.h"
#include "bench/bench.h"
#include "reduce/reduce.h"
#include <getopt.h>

#define INPUTS_MAX  64
#define CHOICES_MAX 16
#define ROUNDS_MAX  1000
#define PAGE	    4096
#define RUN_NS	    (2 * NSEC_PER_MSEC) /* a measurement repeats its work for at least so long */

static const char *const kernel_names[] = { "scalar",	   "avx2",	 "avx512",
					    "avx512_bf16", "avx512_256", "neon" };
#define MEMCPY	ARRAY_SIZE(kernel_names)
#define LIMIT	(MEMCPY + 1)
#define CONVERT (LIMIT + LIMIT_WAYS)
#define COLUMNS (CONVERT + CONVERT_WAYS)
#define TARGET	0.95 /* of the limit */

struct options {
	const char *json;
	size_t rounds;
	size_t n_inputs[CHOICES_MAX], n_n_inputs;
	size_t bytes[CHOICES_MAX], n_bytes;
	bool dtypes[DTYPE_MAX_ + 1];
	unsigned last_reduction;
	bool alike;
};

struct bench_case {
	unsigned dtype, reduction;
	size_t n_inputs, bytes;
	double samples[COLUMNS][ROUNDS_MAX]; /* GB/s */
	double median[COLUMNS]; /* LIMIT: of the fastest way of each round; none beyond */
	double convert;		/* median of the fastest of its ways; 0: none */
	double of_limit;	/* the kernels that this machine chooses; median over the rounds */
	double of_bound;	/* the same, of the lesser of limit and convert */
};

struct buffers {
	struct block_cache *cache;
	struct block *blocks[INPUTS_MAX + 1]; /* that of the output last */
	void *inputs[INPUTS_MAX];
	void *output;
};

static bool column_exists(size_t column)
{
	return column >= MEMCPY || !reduce_kernel_select(kernel_names[column]);
}

/* Whether there is such a column. */
static bool run_once(const struct bench_case *c, const struct buffers *b, size_t column)
{
	if (column >= CONVERT)
		return limit_convert((unsigned)(column - CONVERT), c->dtype, c->n_inputs,
				     align_up(c->bytes, (size_t)512));
	if (column >= LIMIT)
		return limit_run((unsigned)(column - LIMIT), b->output, b->inputs, c->n_inputs,
				 align_up(c->bytes, (size_t)512));
	if (column == MEMCPY) {
		memcpy(b->output, b->inputs[0], c->bytes);
		/* Nobody reads the copy; the compiler must not know. */
		__asm__ volatile("" : : "r"(b->output) : "memory");
		return true;
	}
	reduce_run(&(struct reduce_params){
		.dtype = c->dtype,
		.reduction = c->reduction,
		.n_elements = c->bytes / dtype_size(c->dtype),
		.inputs = (const void *const *)b->inputs,
		.n_inputs = c->n_inputs,
		.outputs = &b->output,
		.n_outputs = 1,
		.divisor = c->n_inputs,
	});
	return true;
}

static double measure(const struct bench_case *c, const struct buffers *b, size_t column)
{
	size_t traffic = c->bytes * (column == MEMCPY ? 2 : c->n_inputs + 1), n = 0;
	uint64_t start, now;

	/* Caches and page tables as they are in a steady state. */
	if (!run_once(c, b, column))
		return 0;
	start = clock_now_ns();
	do {
		(void)run_once(c, b, column);
		n++;
		now = clock_now_ns();
	} while (now - start < RUN_NS);
	return (double)(traffic * n) / (double)(now - start);
}

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void buffers_done(struct buffers *b)
{
	for (size_t i = 0; i < ARRAY_SIZE(b->blocks); i++)
		(void)block_unref(b->blocks[i]);
	(void)block_cache_free(b->cache);
}

/* Room for a page more: from its first whole one on, it is as memory that was taken by the page. */
static int buffer_new(struct buffers *b, size_t i, size_t bytes, bool alike, void **ret_data)
{
	size_t len = align_up(bytes, (size_t)PAGE);

	if (block_new(b->cache, alike ? len + PAGE : len, NULL, &b->blocks[i]))
		return -ENOMEM;
	*ret_data = b->blocks[i]->data;
	if (alike)
		*ret_data = (void *)align_up((uintptr_t)*ret_data, (uintptr_t)PAGE);
	return 0;
}

/* Positive numbers of moderate size in every type. */
static int buffers_init(struct buffers *b, size_t n_inputs, size_t bytes, bool alike)
{
	uint32_t x = 2463534242u;

	if (block_cache_new(0, &b->cache))
		return -ENOMEM;
	for (size_t i = 0; i < n_inputs; i++) {
		uint8_t *p;

		if (buffer_new(b, i, bytes, alike, &b->inputs[i]))
			return -ENOMEM;
		p = b->inputs[i];
		for (size_t at = 0; at < bytes; at++) {
			x ^= x << 13;
			x ^= x >> 17;
			x ^= x << 5;
			p[at] = (uint8_t)(0x30 | (x & 0x0f));
		}
	}
	if (buffer_new(b, n_inputs, bytes, alike, &b->output))
		return -ENOMEM;
	memset(b->output, 0, bytes);
	return 0;
}

static double median(const double *samples, size_t n)
{
	double sorted[ROUNDS_MAX];

	memcpy(sorted, samples, n * sizeof(*samples));
	qsort(sorted, n, sizeof(*sorted), compare_doubles);
	return sorted[n / 2];
}

/* Of so many ways from this column on, the one that is the fastest: the best of all samples of all of them would be chance's. */
static size_t fastest(const struct bench_case *c, size_t first, size_t n_ways, size_t rounds)
{
	size_t best = first;

	for (size_t column = first + 1; column < first + n_ways; column++)
		if (median(c->samples[column], rounds) > median(c->samples[best], rounds))
			best = column;
	return best;
}

static void take_medians(struct bench_case *c, size_t rounds, size_t chosen)
{
	const double *limits = c->samples[fastest(c, LIMIT, LIMIT_WAYS, rounds)];
	const double *converts = c->samples[fastest(c, CONVERT, CONVERT_WAYS, rounds)];
	double shares[ROUNDS_MAX], of_bound[ROUNDS_MAX];

	for (size_t round = 0; round < rounds; round++) {
		double reached = c->samples[chosen][round], convert = converts[round];

		shares[round] = reached / limits[round];
		of_bound[round] = reached / (convert ? MIN(convert, limits[round]) : limits[round]);
	}
	c->of_limit = median(shares, rounds);
	c->of_bound = median(of_bound, rounds);
	c->convert = median(converts, rounds);
	for (size_t column = 0; column < LIMIT; column++)
		c->median[column] = median(c->samples[column], rounds);
	c->median[LIMIT] = median(limits, rounds);
}

static size_t chosen_column(void)
{
	for (size_t column = 0; column < MEMCPY; column++)
		if (!strcmp(kernel_names[column], reduce_kernel_name()))
			return column;
	bench_die("sum: kernels \"%s\" are none of ours", reduce_kernel_name());
}

/* How many cases there are of the first one's size. */
static size_t same_bytes(const struct bench_case *cases, size_t n_cases)
{
	size_t n = 1;

	while (n < n_cases && cases[n].bytes == cases[0].bytes)
		n++;
	return n;
}

/* Cases of one size, in new memory: which pages it gets moves the numbers by some per cent. */
static int measure_all(struct bench_case *cases, size_t n_cases, size_t round, bool alike)
{
	_cleanup_(buffers_done) struct buffers b = { 0 };
	size_t most_inputs = 0;

	for (size_t i = 0; i < n_cases; i++)
		most_inputs = MAX(most_inputs, cases[i].n_inputs);
	if (buffers_init(&b, most_inputs, cases[0].bytes, alike))
		return -ENOMEM;
	for (size_t i = 0; i < n_cases; i++)
		for (size_t column = 0; column < COLUMNS; column++)
			if (column_exists(column))
				cases[i].samples[column][round] = measure(&cases[i], &b, column);
	return 0;
}

static int bench_run(const struct options *options, struct bench_case *cases, size_t n_cases)
{
	size_t chosen = chosen_column();
	int r;

	for (size_t round = 0; round < options->rounds; round++)
		for (size_t i = 0, n; i < n_cases; i += n) {
			n = same_bytes(&cases[i], n_cases - i);
			r = measure_all(&cases[i], n, round, options->alike);
			if (r)
				return r;
		}
	for (size_t i = 0; i < n_cases; i++)
		take_medians(&cases[i], options->rounds, chosen);
	return 0;
}

static void print_table(const struct bench_case *cases, size_t n_cases)
{
	const struct bench_case *least = &cases[0];
	size_t n_reached = 0;

	printf("%-9s %-8s %6s %10s %8s %8s %8s", "dtype", "", "inputs", "bytes", "memcpy", "limit",
	       "convert");
	for (size_t column = 0; column < MEMCPY; column++)
		if (column_exists(column))
			printf(" %11s", kernel_names[column]);
	printf(" of limit of bound   GB/s of memory traffic, medians\n");
	for (size_t i = 0; i < n_cases; i++) {
		const struct bench_case *c = &cases[i];

		printf("%-9s %-8s %6zu %10zu %8.2f %8.2f", dtype_name(c->dtype),
		       reduction_name(c->reduction), c->n_inputs, c->bytes, c->median[MEMCPY],
		       c->median[LIMIT]);
		if (c->convert)
			printf(" %8.2f", c->convert);
		else
			printf(" %8s", "-");
		for (size_t column = 0; column < MEMCPY; column++)
			if (column_exists(column))
				printf(" %11.2f", c->median[column]);
		printf(" %6.0f %% %6.0f %%\n", 100 * c->of_limit, 100 * c->of_bound);
		n_reached += c->of_limit >= TARGET;
		if (c->of_limit < least->of_limit)
			least = c;
	}
	printf("target >= %.0f %% of the limit: %zu of %zu reach it; the least is %.0f %%, %s, %zu "
	       "inputs, %zu bytes\n",
	       100 * TARGET, n_reached, n_cases, 100 * least->of_limit, dtype_name(least->dtype),
	       least->n_inputs, least->bytes);
}

static int write_json(const struct options *options, const struct bench_case *cases, size_t n_cases)
{
	const char *separator = "";
	FILE *file = fopen(options->json, "we");

	if (!file)
		return -errno;
	fprintf(file,
		"{\"unit\": \"GB/s of memory traffic\", \"rounds\": %zu, \"memory\": \"%s\", "
		"\"results\": [",
		options->rounds, options->alike ? "pages" : "blocks");
	for (size_t i = 0; i < n_cases; i++)
		for (size_t column = 0; column < MEMCPY; column++) {
			const struct bench_case *c = &cases[i];

			if (!column_exists(column))
				continue;
			fprintf(file,
				"%s\n  {\"dtype\": \"%s\", \"reduction\": \"%s\", \"kernel\": "
				"\"%s\", \"n_inputs\": %zu, "
				"\"bytes\": %zu, \"gb_s\": %.3f, \"memcpy_gb_s\": %.3f, "
				"\"limit_gb_s\": %.3f, \"convert_gb_s\": %.3f, "
				"\"of_limit\": %.4f, \"of_bound\": %.4f}",
				separator, dtype_name(c->dtype), reduction_name(c->reduction),
				kernel_names[column], c->n_inputs, c->bytes, c->median[column],
				c->median[MEMCPY], c->median[LIMIT], c->convert, c->of_limit,
				c->of_bound);
			separator = ",";
		}
	fprintf(file, "\n]}\n");
	return fclose(file) ? -errno : 0;
}

static unsigned dtype_by_name(const char *name)
{
	for (unsigned dtype = 1; dtype <= DTYPE_MAX_; dtype++)
		if (!strcmp(dtype_name(dtype), name))
			return dtype;
	return 0;
}

/* Returns 0 for anything but a number from 1 to max. */
static size_t parse_number(const char *text, size_t max)
{
	char *end;
	unsigned long long value = strtoull(text, &end, 10);

	return *end || end == text || value > max ? 0 : (size_t)value;
}

static bool add_choice(size_t *choices, size_t *n_choices, size_t value)
{
	if (!value || *n_choices == CHOICES_MAX)
		return false;
	choices[(*n_choices)++] = value;
	return true;
}

static bool parse_option(struct options *options, int option)
{
	unsigned dtype;

	switch (option) {
	case 'j':
		options->json = optarg;
		return true;
	case 'r':
		options->rounds = parse_number(optarg, ROUNDS_MAX);
		return options->rounds;
	case 'i':
		return add_choice(options->n_inputs, &options->n_n_inputs,
				  parse_number(optarg, INPUTS_MAX));
	case 'b':
		return add_choice(options->bytes, &options->n_bytes,
				  parse_number(optarg, 1u << 30) & ~7ull);
	case 'd':
		dtype = dtype_by_name(optarg);
		options->dtypes[0] = false;
		options->dtypes[dtype] = true;
		return dtype;
	case 'a':
		options->last_reduction = REDUCTION_MAX_;
		return true;
	case 'p':
		options->alike = true;
		return true;
	default:
		return false;
	}
}

static bool parse_options(struct options *options, int argc, char **argv)
{
	static const struct option long_options[] = {
		{ "json", required_argument, NULL, 'j' },
		{ "rounds", required_argument, NULL, 'r' },
		{ "inputs", required_argument, NULL, 'i' },
		{ "bytes", required_argument, NULL, 'b' },
		{ "dtype", required_argument, NULL, 'd' },
		{ "all-reductions", no_argument, NULL, 'a' },
		{ "alike", no_argument, NULL, 'p' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	/* [0]: all of them. */
	*options = (struct options){ .rounds = 7,
				     .dtypes = { true },
				     .last_reduction = REDUCTION_SUM };
	while ((option = getopt_long(argc, argv, "", long_options, NULL)) >= 0)
		if (!parse_option(options, option))
			return false;
	if (!options->n_n_inputs) {
		(void)add_choice(options->n_inputs, &options->n_n_inputs, 2);
		(void)add_choice(options->n_inputs, &options->n_n_inputs, 8);
	}
	if (!options->n_bytes) {
		(void)add_choice(options->bytes, &options->n_bytes, 64u << 10);
		(void)add_choice(options->bytes, &options->n_bytes, 1u << 20);
		(void)add_choice(options->bytes, &options->n_bytes, 32u << 20);
	}
	return optind == argc;
}

/* Fills cases, or only counts them where that is NULL. */
static size_t list_cases(const struct options *options, struct bench_case *cases)
{
	size_t n = 0;

	for (size_t b = 0; b < options->n_bytes; b++)
		for (size_t i = 0; i < options->n_n_inputs; i++)
			for (unsigned dtype = 1; dtype <= DTYPE_MAX_; dtype++)
				for (unsigned r = 1; r <= options->last_reduction; r++) {
					if (!options->dtypes[0] && !options->dtypes[dtype])
						continue;
					if (!reduce_supported(dtype, r))
						continue;
					if (cases) {
						cases[n].dtype = dtype;
						cases[n].reduction = r;
						cases[n].n_inputs = options->n_inputs[i];
						cases[n].bytes = options->bytes[b];
					}
					n++;
				}
	return n;
}

int bench_sum(int argc, char **argv)
{
	_cleanup_(freep) struct bench_case *cases = NULL;
	struct options options;
	size_t n_cases;
	int r;

	if (!parse_options(&options, argc, argv))
		bench_usage("sum: wrong usage");
	printf("kernels chosen on this machine: %s; inputs and outputs are %s\n",
	       reduce_kernel_name(), options.alike ? "pages, all alike" : "blocks of the daemon");
	n_cases = list_cases(&options, NULL);
	cases = calloc(n_cases, sizeof(*cases));
	if (!cases)
		return 1;
	(void)list_cases(&options, cases);
	r = bench_run(&options, cases, n_cases);
	if (!r) {
		print_table(cases, n_cases);
		if (options.json)
			r = write_json(&options, cases, n_cases);
	}
	if (r)
		bench_die("sum: %s", strerror(-r));
	return 0;
}
