/*
 * bps-bench op: one operation over all ranks, for a list of sizes and a number of tensors. With
 * --count, the steps are made once more and the kernel counts what they cost.
 */
#include "bench/bench.h"
#include <getopt.h>

struct op_options {
	unsigned n_ranks, operation, reduction, dtype, n_tensors;
	size_t repeats, warmup;
	uint64_t sizes[BENCH_CHOICES];
	size_t n_sizes;
	bool copied, counts;
	const char *json;
};

struct op_tensor {
	struct bps_tensor *tensor;
	struct bps_request *request;
};

/*
 * All tensors of a case, and the memory in which they lie one after the other, as a trainer's
 * gradients do.
 */
struct op_case {
	struct op_tensor *tensors;
	struct bps_memory *memory;
	char *own, *data;
	size_t len;			 /* of one tensor's part of it */
	struct bps_submit_params submit; /* of the first */
};

struct op_figures {
	uint64_t bytes;
	int64_t p50, p99, least;
	double cpu_per_gb;
	/* With --count. */
	double parts;		      /* of one operation, on each node */
	double copied;		      /* by daemons, for a byte of a rank's input */
	double of_daemon[COUNT_MAX_]; /* for a part */
	double of_rank[COUNT_MAX_];   /* for an operation */
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
		{ "count", no_argument, NULL, 'C' },
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
		case 'C':
			o->counts = true;
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
		char name[64];

		(void)snprintf(name, sizeof(name), "bench.%llu.%u", (unsigned long long)input, i);
		bench_check(bps_tensor_declare(group->client, name, (int)o->dtype, elements,
					       &t->tensor));
	}
	c->submit = (struct bps_submit_params){
		.size = sizeof(c->submit),
		.operation = (int)o->operation,
		.reduction = reduces(o) ? (int)o->reduction : 0,
		.input = c->data,
		.output = in_place(o) ? c->data : c->data + input,
	};
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
	struct bps_submit_params submit = c->submit;
	unsigned n_done = 0;

	if (o->operation == OPERATION_BARRIER) {
		group_barrier(group);
		return;
	}
	for (unsigned i = 0; i < o->n_tensors; i++) {
		struct op_tensor *t = &c->tensors[i];
		int r;

		/* As many are under way as there may be. */
		while ((r = bps_submit(t->tensor, &submit, &t->request)) == -EAGAIN && n_done < i)
			finish(&c->tensors[n_done++]);
		bench_check(r);
		submit.input = (const char *)submit.input + c->len;
		submit.output = (char *)submit.output + c->len;
	}
	while (n_done < o->n_tensors)
		finish(&c->tensors[n_done++]);
}

static void run_counted(struct group *group, const struct op_options *o, struct op_case *c,
			size_t times, struct count *const count[2], double counts[2][COUNT_MAX_])
{
	double before[2][COUNT_MAX_] = { 0 };

	for (unsigned i = 0; i < 2; i++)
		if (count[i])
			count_read(count[i], before[i]);
	for (size_t i = 0; i < times; i++)
		step(group, o, c);
	group_barrier(group);
	for (unsigned i = 0; i < 2; i++) {
		if (count[i])
			count_read(count[i], counts[i]);
		for (unsigned k = 0; k < COUNT_MAX_; k++)
			counts[i][k] -= before[i][k];
	}
}

/*
 * As often again, after the times were taken, which counting would lengthen. What counting itself
 * does is taken off.
 */
static void count_steps(struct group *group, const struct op_options *o, struct op_case *c,
			struct op_figures *f)
{
	double idle[2][COUNT_MAX_] = { 0 }, busy[2][COUNT_MAX_] = { 0 };
	double copied[2] = { 0 }, parts[2] = { 0 };
	double n = (double)o->repeats * o->n_tensors, n_nodes;
	bool first = !group->local_rank;
	struct count *count[2];

	if (first && !group->daemon)
		bench_die("--count: who the daemon is cannot be told: it has to run by itself, not "
			  "behind a socket of the service manager's");
	n_nodes = group_total(group, first);
	if (first)
		count_read_daemon(&copied[0], &parts[0]);
	count[0] = first ? count_start(group->daemon) : NULL;
	count[1] = count_start(getpid());
	group_barrier(group);
	run_counted(group, o, c, 0, count, idle);
	run_counted(group, o, c, o->repeats, count, busy);
	count_stop(count[1]);
	if (first) {
		count_stop(count[0]);
		count_read_daemon(&copied[1], &parts[1]);
	}
	parts[1] = group_total(group, parts[1] - parts[0]);
	f->parts = parts[1] / n / n_nodes;
	copied[1] = group_total(group, copied[1] - copied[0]);
	f->copied = f->bytes ? copied[1] / n / group->size / (double)f->bytes : 0;
	for (unsigned k = 0; k < COUNT_MAX_; k++) {
		f->of_daemon[k] = group_total(group, busy[0][k] - idle[0][k]) / MAX(parts[1], 1.0);
		f->of_rank[k] = group_total(group, busy[1][k] - idle[1][k]) / n / group->size;
	}
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
	if (o->counts)
		count_steps(group, o, &c, f);
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

static void print_counts(const struct op_options *o, const struct op_figures *figures)
{
	printf("\n%34s %43s %35s\n%12s %8s %12s %8s %8s %12s %12s %11s %11s %11s\n", "",
	       "of daemons, for a part", "of a rank, for an operation", "bytes", "tensors", "parts",
	       "calls", "switches", "allocations", "copied/byte", "calls", "switches",
	       "allocations");
	for (size_t i = 0; i < o->n_sizes; i++) {
		const struct op_figures *f = &figures[i];
		const double *d = f->of_daemon, *r = f->of_rank;
		struct bench_size_text size;

		printf("%12s %8u %12.1f %8.2f %8.2f %12.3f %12.3f %11.2f %11.2f %11.3f\n",
		       bench_size_text(f->bytes, &size), o->n_tensors, f->parts,
		       d[COUNT_SYSTEM_CALLS], d[COUNT_SWITCHES], d[COUNT_ALLOCATIONS], f->copied,
		       r[COUNT_SYSTEM_CALLS], r[COUNT_SWITCHES], r[COUNT_ALLOCATIONS]);
	}
}

static void write_counts(const double counts[COUNT_MAX_], const char *whose, const char *for_what,
			 FILE *json)
{
	fprintf(json,
		", \"%s_system_calls_%s\": %.3f, \"%s_switches_%s\": %.3f, "
		"\"%s_allocations_%s\": %.3f",
		whose, for_what, counts[COUNT_SYSTEM_CALLS], whose, for_what,
		counts[COUNT_SWITCHES], whose, for_what, counts[COUNT_ALLOCATIONS]);
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
			"\"goodput_gb_s\": %.6f, \"cpu_s_per_gb\": %.6f",
			i ? "," : "", (unsigned long long)f->bytes, (double)f->p50 / 1e3,
			(double)f->p99 / 1e3, (double)f->least / 1e3, gb_s(o, f), f->cpu_per_gb);
		if (o->counts) {
			fprintf(json, ", \"parts\": %.3f, \"copied_per_byte\": %.6f", f->parts,
				f->copied);
			write_counts(f->of_daemon, "daemon", "per_part", json);
			write_counts(f->of_rank, "rank", "per_operation", json);
		}
		fprintf(json, "}");
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
	if (!group.rank && o.counts)
		print_counts(&o, figures);
	if (!group.rank)
		write_json(&o, &group, figures);
	group_close(&group);
	return 0;
}
