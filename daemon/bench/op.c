#include "bench/bench.h"
#include <getopt.h>

struct op_options {
	unsigned n_ranks, operation, reduction, dtype, n_tensors;
	size_t repeats, warmup;
	uint64_t sizes[BENCH_CHOICES];
	size_t n_sizes;
	bool copied;
	const char *json;
};

struct op_tensor {
	struct bps_tensor *tensor;
	struct bps_submit_params submit;
	struct bps_request *request;
};

/* All tensors of a case, and the memory in which they lie one after the other, as a trainer's gradients do. */
struct op_case {
	struct op_tensor *tensors;
	struct bps_memory *memory;
	char *own, *data;
	size_t len; /* of one tensor's part of it */
};

struct op_figures {
	uint64_t bytes;
	int64_t p50, p99, least;
	double cpu_per_gb;
};

static unsigned by_name(const char *option, const char *text, const char *(*name)(unsigned),
			unsigned last)
{
	for (unsigned i = 1; i <= last; i++)
		if (!strcmp(name(i), text))
			return i;
	bench_usage("%s: there is no \"%s\"", option, text);
}

static void parse(struct op_options *o, int argc, char **argv)
{
	static const struct option longs[] = {
		{ "ranks", required_argument, NULL, 'n' },
		{ "operation", required_argument, NULL, 'o' },
		{ "reduction", required_argument, NULL, 'r' },
		{ "dtype", required_argument, NULL, 'd' },
		{ "sizes", required_argument, NULL, 's' },
		{ "tensors", required_argument, NULL, 't' },
		{ "repeats", required_argument, NULL, 'R' },
		{ "warmup", required_argument, NULL, 'w' },
		{ "copied", no_argument, NULL, 'c' },
		{ "json", required_argument, NULL, 'j' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	*o = (struct op_options){
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.dtype = DTYPE_FLOAT32,
		.n_tensors = 1,
		.repeats = 20,
		.warmup = 3,
	};
	o->n_sizes = bench_sizes("--sizes", "1K:64M:4", o->sizes);
	while ((option = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		switch (option) {
		case 'n':
			o->n_ranks = (unsigned)bench_size("--ranks", optarg);
			break;
		case 'o':
			o->operation =
				by_name("--operation", optarg, operation_name, OPERATION_MAX_);
			break;
		case 'r':
			o->reduction =
				by_name("--reduction", optarg, reduction_name, REDUCTION_MAX_);
			break;
		case 'd':
			o->dtype = by_name("--dtype", optarg, dtype_name, DTYPE_MAX_);
			break;
		case 's':
			o->n_sizes = bench_sizes("--sizes", optarg, o->sizes);
			break;
		case 't':
			o->n_tensors = (unsigned)bench_size("--tensors", optarg);
			break;
		case 'R':
			o->repeats = bench_size("--repeats", optarg);
			break;
		case 'w':
			o->warmup = (size_t)bench_real("--warmup", optarg);
			break;
		case 'c':
			o->copied = true;
			break;
		case 'j':
			o->json = optarg;
			break;
		default:
			bench_usage("op: wrong usage");
		}
	}
	if (optind != argc)
		bench_usage("op: \"%s\" is too much", argv[optind]);
	if (o->operation == OPERATION_BARRIER)
		o->n_sizes = 1, o->sizes[0] = 1;
}

static bool in_place(const struct op_options *o)
{
	return o->operation == OPERATION_PUSH_PULL || o->operation == OPERATION_BROADCAST;
}

static bool reduces(const struct op_options *o)
{
	return o->operation == OPERATION_PUSH_PULL || o->operation == OPERATION_REDUCE_SCATTER;
}

/* Memory for inputs and outputs, zeroed: a number in every type. */
static void take_memory(struct group *group, const struct op_options *o, struct op_case *c)
{
	size_t len = c->len * o->n_tensors;

	if (o->copied) {
		c->own = c->data = malloc(len);
		if (!c->own)
			bench_die("out of memory");
	} else {
		bench_check(bps_memory_alloc(group->client, len, &c->memory));
		c->data = bps_memory_data(c->memory);
	}
	memset(c->data, 0, len);
}

static void prepare(struct group *group, const struct op_options *o, uint64_t elements,
		    struct op_case *c)
{
	size_t element = dtype_size(o->dtype);
	uint64_t input = elements * element, output = input;

	if (o->operation == OPERATION_ALL_GATHER)
		output *= group->size;
	else if (o->operation == OPERATION_REDUCE_SCATTER)
		output /= group->size;
	c->len = align_up(in_place(o) ? input : input + output, 64ull);
	take_memory(group, o, c);
	for (unsigned i = 0; i < o->n_tensors; i++) {
		struct op_tensor *t = &c->tensors[i];
		char name[64], *data = c->data + i * c->len;

		(void)snprintf(name, sizeof(name), "bench.%llu.%u", (unsigned long long)input, i);
		bench_check(bps_tensor_declare(group->client, name, (int)o->dtype, elements,
					       &t->tensor));
		t->submit = (struct bps_submit_params){
			.size = sizeof(t->submit),
			.operation = (int)o->operation,
			.reduction = reduces(o) ? (int)o->reduction : 0,
			.input = data,
			.output = in_place(o) ? data : data + input,
		};
	}
}

static void release(const struct op_options *o, struct op_case *c)
{
	for (unsigned i = 0; i < o->n_tensors; i++)
		bps_tensor_free(c->tensors[i].tensor);
	bps_memory_free(c->memory);
	free(c->own);
}

static void finish(struct op_tensor *t)
{
	bench_check(bps_request_wait(t->request, BPS_FOREVER));
	bps_request_free(t->request);
}

static void step(struct group *group, const struct op_options *o, struct op_case *c)
{
	unsigned n_done = 0;

	if (o->operation == OPERATION_BARRIER) {
		group_barrier(group);
		return;
	}
	for (unsigned i = 0; i < o->n_tensors; i++) {
		struct op_tensor *t = &c->tensors[i];
		int r;

		/* As many are under way as there may be. */
		while ((r = bps_submit(t->tensor, &t->submit, &t->request)) == -EAGAIN &&
		       n_done < i)
			finish(&c->tensors[n_done++]);
		bench_check(r);
	}
	while (n_done < o->n_tensors)
		finish(&c->tensors[n_done++]);
}

static void measure(struct group *group, const struct op_options *o, uint64_t bytes,
		    struct op_figures *f)
{
	struct op_case c = { .tensors = calloc(o->n_tensors, sizeof(*c.tensors)) };
	int64_t *times = calloc(o->repeats, sizeof(*times));
	uint64_t elements = bytes / dtype_size(o->dtype) / group->size * group->size;
	bool moves = o->operation != OPERATION_BARRIER;
	double cpu, moved;

	if (!c.tensors || !times)
		bench_die("out of memory");
	elements = MAX(elements, (uint64_t)group->size);
	if (moves)
		prepare(group, o, elements, &c);
	for (size_t i = 0; i < o->warmup; i++)
		step(group, o, &c);
	cpu = group_cpu(group);
	for (size_t i = 0; i < o->repeats; i++) {
		uint64_t began;

		group_barrier(group);
		began = clock_now_ns();
		step(group, o, &c);
		times[i] = (int64_t)(clock_now_ns() - began);
	}
	cpu = group_total(group, group_cpu(group) - cpu);
	group_largest(group, times, o->repeats);
	f->bytes = moves ? elements * dtype_size(o->dtype) : 0;
	f->p50 = bench_quantile(times, o->repeats, 0.5);
	f->p99 = bench_quantile(times, o->repeats, 0.99);
	f->least = bench_quantile(times, o->repeats, 0);
	moved = (double)f->bytes * o->n_tensors * (double)o->repeats * group->size;
	f->cpu_per_gb = moved > 0 ? cpu / (moved / 1e9) : 0;
	if (moves)
		release(o, &c);
	free(c.tensors);
	free(times);
}

static double gb_s(const struct op_options *o, const struct op_figures *f)
{
	return (double)f->bytes * o->n_tensors / (double)f->p50;
}

static void print_row(const struct op_options *o, const struct op_figures *f)
{
	struct bench_size_text size;

	printf("%12s %8u %12.1f %12.1f %12.1f %10.3f %12.3f\n", bench_size_text(f->bytes, &size),
	       o->n_tensors, (double)f->p50 / 1e3, (double)f->p99 / 1e3, (double)f->least / 1e3,
	       gb_s(o, f), f->cpu_per_gb);
}

static void write_json(const struct op_options *o, const struct group *group,
		       const struct op_figures *figures)
{
	FILE *json = bench_json_open(o->json);

	if (!json)
		return;
	fprintf(json,
		"{\"benchmark\": \"op\", \"operation\": \"%s\", \"dtype\": \"%s\", \"ranks\": %u, "
		"\"tensors\": %u, \"repeats\": %zu, \"copied\": %s, \"rows\": [",
		operation_name(o->operation), dtype_name(o->dtype), group->size, o->n_tensors,
		o->repeats, o->copied ? "true" : "false");
	for (size_t i = 0; i < o->n_sizes; i++) {
		const struct op_figures *f = &figures[i];

		fprintf(json,
			"%s\n  {\"bytes\": %llu, \"p50_us\": %.3f, \"p99_us\": %.3f, \"min_us\": "
			"%.3f, "
			"\"goodput_gb_s\": %.6f, \"cpu_s_per_gb\": %.6f}",
			i ? "," : "", (unsigned long long)f->bytes, (double)f->p50 / 1e3,
			(double)f->p99 / 1e3, (double)f->least / 1e3, gb_s(o, f), f->cpu_per_gb);
	}
	fprintf(json, "\n]}\n");
	bench_json_close(json);
}

int bench_op(int argc, char **argv)
{
	struct op_figures figures[BENCH_CHOICES] = { 0 };
	struct op_options o;
	struct group group;

	parse(&o, argc, argv);
	group_start(o.n_ranks);
	group_open(&group);
	if (!group.rank) {
		printf("%s of %s, %u ranks, %zu times; slowest rank. CPU: ranks%s; per byte of a "
		       "rank's "
		       "input\n",
		       operation_name(o.operation), dtype_name(o.dtype), group.size, o.repeats,
		       group.daemon ? " and the daemons beside them" : " alone");
		printf("%12s %8s %12s %12s %12s %10s %12s\n", "bytes", "tensors", "p50 us",
		       "p99 us", "min us", "GB/s", "CPU s/GB");
	}
	for (size_t i = 0; i < o.n_sizes; i++) {
		measure(&group, &o, o.sizes[i], &figures[i]);
		if (!group.rank)
			print_row(&o, &figures[i]);
		(void)fflush(stdout);
	}
	if (!group.rank)
		write_json(&o, &group, figures);
	group_close(&group);
	return 0;
}
