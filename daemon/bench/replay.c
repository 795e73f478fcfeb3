/*
 * bps-bench replay: training steps of a real model with its tensors in the order of the layers.
 * In place of the GPU the rank sleeps. model.c has the models, group.c the ranks.
 */
#include "bench/bench.h"
#include <getopt.h>
#include <sys/prctl.h>

/*
 * A step: forward through the layers, each as soon as its own tensor of the last step is there;
 * backward through them in reverse, each giving its gradient away when it is ready; then the
 * update. In place of the GPU the rank sleeps, until moments that follow from the beginning of the
 * pass, so that no time is lost or won by waking up late.
 */

struct replay_options {
	unsigned n_ranks;
	size_t repeats, warmup;
	struct model model;
	bool has_model, fifo, barrier, describe;
	double scale;
	uint64_t shrink;
	const char *json;
};

struct replay {
	const struct replay_options *options;
	struct group group;
	size_t n;
	struct bps_memory *memory;
	struct bps_tensor **tensors;
	struct bps_submit_params *submits;
	struct bps_request **requests; /* NULL: its result is there */
	double *share;		       /* of the work of all tensors up to and with this one */
	uint64_t bytes;
};

static void parse(struct replay_options *o, int argc, char **argv)
{
	static const struct option longs[] = {
		{ "ranks", required_argument, NULL, 'n' },
		{ "repeats", required_argument, NULL, 'R' },
		{ "warmup", required_argument, NULL, 'w' },
		{ "model", required_argument, NULL, 'm' },
		{ "scale", required_argument, NULL, 's' },
		{ "shrink", required_argument, NULL, 'S' },
		{ "forward-ms", required_argument, NULL, 'F' },
		{ "backward-ms", required_argument, NULL, 'B' },
		{ "update-ms", required_argument, NULL, 'U' },
		{ "fifo", no_argument, NULL, 'f' },
		{ "barrier", no_argument, NULL, 'b' },
		{ "describe", no_argument, NULL, 'd' },
		{ "json", required_argument, NULL, 'j' },
		{ NULL, 0, NULL, 0 },
	};
	double forward = -1, backward = -1, update = -1;
	int option;

	*o = (struct replay_options){ .repeats = 10, .warmup = 2, .scale = 1, .shrink = 1 };
	while ((option = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		switch (option) {
		case 'n':
			o->n_ranks = (unsigned)bench_size("--ranks", optarg);
			break;
		case 'R':
			o->repeats = bench_size("--repeats", optarg);
			break;
		case 'w':
			o->warmup = (size_t)bench_real("--warmup", optarg);
			break;
		case 'm':
			free(o->model.tensors);
			o->has_model = model_make(optarg, &o->model);
			if (!o->has_model)
				bench_usage("--model: there is no \"%s\": %s", optarg, model_names);
			break;
		case 's':
			o->scale = bench_real("--scale", optarg);
			break;
		case 'S':
			o->shrink = bench_size("--shrink", optarg);
			break;
		case 'F':
			forward = bench_real("--forward-ms", optarg);
			break;
		case 'B':
			backward = bench_real("--backward-ms", optarg);
			break;
		case 'U':
			update = bench_real("--update-ms", optarg);
			break;
		case 'f':
			o->fifo = true;
			break;
		case 'b':
			o->barrier = true;
			break;
		case 'd':
			o->describe = true;
			break;
		case 'j':
			o->json = optarg;
			break;
		default:
			bench_usage("replay: wrong usage");
		}
	}
	if (optind != argc)
		bench_usage("replay: \"%s\" is too much", argv[optind]);
	if (!o->has_model)
		bench_usage("replay: name a --model: %s", model_names);
	o->model.forward_ms = (forward < 0 ? o->model.forward_ms : forward) * o->scale;
	o->model.backward_ms = (backward < 0 ? o->model.backward_ms : backward) * o->scale;
	o->model.update_ms = (update < 0 ? o->model.update_ms : update) * o->scale;
}

static void *array(size_t n, size_t size)
{
	void *p = calloc(n, size);

	if (!p)
		bench_die("out of memory");
	return p;
}

static void replay_open(struct replay *r)
{
	const struct replay_options *o = r->options;
	const struct model *model = &o->model;
	double all = 0, sum = 0;
	uint64_t at = 0;
	char *data;

	r->n = model->n_tensors;
	r->tensors = array(r->n, sizeof(struct bps_tensor *));
	r->submits = array(r->n, sizeof(*r->submits));
	r->requests = array(r->n, sizeof(struct bps_request *));
	r->share = array(r->n, sizeof(*r->share));
	for (size_t i = 0; i < r->n; i++) {
		r->bytes += align_up(MAX(model->tensors[i].elements / o->shrink, 1ull) * 4, 64ull);
		all += model->tensors[i].work;
	}
	bench_check(bps_memory_alloc(r->group.client, r->bytes, &r->memory));
	data = bps_memory_data(r->memory);
	memset(data, 0, r->bytes);
	for (size_t i = 0; i < r->n; i++) {
		uint64_t elements = MAX(model->tensors[i].elements / o->shrink, 1ull);
		char name[64];

		(void)snprintf(name, sizeof(name), "replay.%zu", i);
		bench_check(bps_tensor_declare(r->group.client, name, BPS_FLOAT32, elements,
					       &r->tensors[i]));
		r->submits[i] = (struct bps_submit_params){
			.size = sizeof(r->submits[i]),
			.operation = BPS_PUSH_PULL,
			.reduction = BPS_AVERAGE,
			.input = data + at,
			.output = data + at,
			.priority = o->fifo ? 0 : (int32_t)(r->n - i),
		};
		at += align_up(elements * 4, 64ull);
		sum += model->tensors[i].work;
		r->share[i] = sum / all;
	}
}

static void replay_close(struct replay *r)
{
	for (size_t i = 0; i < r->n; i++)
		bps_tensor_free(r->tensors[i]);
	bps_memory_free(r->memory);
	free(r->tensors);
	free(r->submits);
	free(r->requests);
	free(r->share);
}

static void sleep_until(uint64_t at_ns)
{
	struct timespec at = { (time_t)(at_ns / NSEC_PER_SEC), (long)(at_ns % NSEC_PER_SEC) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
		;
}

static void need(struct replay *r, size_t i)
{
	if (!r->requests[i])
		return;
	bench_check(bps_request_wait(r->requests[i], BPS_FOREVER));
	bps_request_free(TAKE_PTR(r->requests[i]));
}

static void need_all(struct replay *r)
{
	for (size_t i = 0; i < r->n; i++)
		need(r, i);
}

static uint64_t ns(double ms)
{
	return (uint64_t)(ms * (double)NSEC_PER_MSEC);
}

static bool is_there(struct replay *r, size_t i)
{
	int done = r->requests[i] ? bps_request_poll(r->requests[i]) : 1;

	bench_check(done);
	return done;
}

/*
 * A layer's work begins when the one before it is done and its own parameters are there. The clock
 * is that of the GPU: it stands still only where a result is late.
 */
static void forward(struct replay *r)
{
	const struct model *model = &r->options->model;
	uint64_t clock = clock_now_ns();
	double before = 0;

	for (size_t i = 0; i < r->n; i++) {
		double share = r->share[i] - before;

		before = r->share[i];
		if (!is_there(r, i)) {
			sleep_until(clock);
			if (!is_there(r, i)) {
				need(r, i);
				clock = MAX(clock, clock_now_ns());
			}
		}
		need(r, i);
		clock += ns(model->forward_ms * share);
	}
	sleep_until(clock);
}

static void backward(struct replay *r)
{
	const struct model *model = &r->options->model;
	uint64_t began = clock_now_ns();

	for (size_t i = r->n; i--;) {
		double left = i ? r->share[i - 1] : 0;

		sleep_until(began + ns(model->backward_ms * (1 - left)));
		bench_check(bps_submit(r->tensors[i], &r->submits[i], &r->requests[i]));
	}
}

/* From the beginning of one backward pass to the next: so each holds one exchange whole. */
static void step(struct replay *r)
{
	backward(r);
	if (r->options->barrier)
		need_all(r);
	sleep_until(clock_now_ns() + ns(r->options->model.update_ms));
	forward(r);
}

static void print(const struct replay *r, int64_t *times)
{
	const struct replay_options *o = r->options;
	double compute = o->model.forward_ms + o->model.backward_ms + o->model.update_ms;
	double p50 = (double)bench_quantile(times, o->repeats, 0.5) / 1e6;
	double p99 = (double)bench_quantile(times, o->repeats, 0.99) / 1e6;
	FILE *json = bench_json_open(o->json);

	printf("%s (%s), times x %g, tensors / %llu: %zu tensors, %.1f MB, %u ranks%s%s\n",
	       o->model.name, o->model.where, o->scale, (unsigned long long)o->shrink, r->n,
	       (double)r->bytes / 1e6, r->group.size, o->fifo ? ", no priorities" : "",
	       o->barrier ? ", barrier before the forward pass" : "");
	printf("%-40s %12.2f ms\n", "computing alone", compute);
	printf("%-40s %12.2f ms (p99 %.2f)\n", "a step", p50, p99);
	printf("%-40s %12.1f %%\n", "scaling efficiency", 100 * compute / p50);
	if (!json)
		return;
	fprintf(json,
		"{\"benchmark\": \"replay\", \"model\": \"%s\", \"ranks\": %u, \"bytes\": %llu, "
		"\"fifo\": %s, \"barrier\": %s, \"compute_ms\": %.4f, \"step_p50_ms\": %.4f, "
		"\"step_p99_ms\": %.4f}\n",
		o->model.name, r->group.size, (unsigned long long)r->bytes,
		o->fifo ? "true" : "false", o->barrier ? "true" : "false", compute, p50, p99);
	bench_json_close(json);
}

/*
 * What would be replayed, for a program that does the same by other means: times, and each tensor
 * in forward order.
 */
static void describe(const struct replay_options *o)
{
	const struct model *model = &o->model;
	double all = 0;

	for (size_t i = 0; i < model->n_tensors; i++)
		all += model->tensors[i].work;
	printf("{\"model\": \"%s\", \"forward_ms\": %.6f, \"backward_ms\": %.6f, \"update_ms\": "
	       "%.6f, \"tensors\": [",
	       model->name, model->forward_ms, model->backward_ms, model->update_ms);
	for (size_t i = 0; i < model->n_tensors; i++)
		printf("%s\n  {\"elements\": %llu, \"work\": %.9f}", i ? "," : "",
		       (unsigned long long)MAX(model->tensors[i].elements / o->shrink, 1ull),
		       model->tensors[i].work / all);
	printf("\n]}\n");
}

int bench_replay(int argc, char **argv)
{
	struct replay_options o;
	struct replay r = { .options = &o };
	int64_t *times;

	parse(&o, argc, argv);
	if (o.describe) {
		describe(&o);
		free(o.model.tensors);
		return 0;
	}
	group_start(o.n_ranks);
	/* Moments are meant: by default the kernel lets a sleeper have 50 us more. */
	(void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	group_open(&r.group);
	replay_open(&r);
	times = array(o.repeats, sizeof(*times));
	for (size_t i = 0; i < o.warmup; i++)
		step(&r);
	group_barrier(&r.group);
	for (size_t i = 0; i < o.repeats; i++) {
		uint64_t began = clock_now_ns();

		step(&r);
		times[i] = (int64_t)(clock_now_ns() - began);
	}
	need_all(&r);
	group_largest(&r.group, times, o.repeats);
	if (!r.group.rank)
		print(&r, times);
	free(times);
	replay_close(&r);
	group_close(&r.group);
	free(o.model.tensors);
	return 0;
}
