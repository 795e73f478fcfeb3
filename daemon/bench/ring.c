#include "bench/bench.h"
#include <getopt.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define POSTS 256u /* at a time: the daemon is then busy with those before */

struct ring_options {
	unsigned n_ranks;
	size_t repeats, warmup;
	useconds_t pause_us;
	const char *json;
};

struct ring_row {
	const char *name, *text;
	int64_t p50, p99;
};

static void parse(struct ring_options *o, int argc, char **argv)
{
	static const struct option longs[] = {
		{ "ranks", required_argument, NULL, 'n' },
		{ "repeats", required_argument, NULL, 'R' },
		{ "warmup", required_argument, NULL, 'w' },
		{ "pause-us", required_argument, NULL, 'p' },
		{ "json", required_argument, NULL, 'j' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	*o = (struct ring_options){ .repeats = 1000, .warmup = 50, .pause_us = 1000 };
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
		case 'p':
			o->pause_us = (useconds_t)bench_real("--pause-us", optarg);
			break;
		case 'j':
			o->json = optarg;
			break;
		default:
			bench_usage("ring: wrong usage");
		}
	}
	if (optind != argc)
		bench_usage("ring: \"%s\" is too much", argv[optind]);
}

/* The other side of a bare wake-up: answers each 8 bytes with 8 bytes. */
static void echo(int from, int to)
{
	uint64_t value;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (read(from, &value, sizeof(value)) == sizeof(value) &&
	       write(to, &value, sizeof(value)) == sizeof(value))
		;
	_exit(0);
}

struct bare {
	int there, back;
	pid_t pid;
};

static void bare_open(struct bare *bare)
{
	bare->there = eventfd(0, EFD_CLOEXEC);
	bare->back = eventfd(0, EFD_CLOEXEC);
	bare->pid = bare->there < 0 || bare->back < 0 ? -1 : fork();
	if (bare->pid < 0)
		bench_die("cannot measure a bare wake-up: %m");
	if (!bare->pid)
		echo(bare->there, bare->back);
}

static void bare_close(struct bare *bare)
{
	(void)kill(bare->pid, SIGKILL);
	(void)waitpid(bare->pid, NULL, 0);
	(void)fd_close(bare->there);
	(void)fd_close(bare->back);
}

static void bare_hop(struct bare *bare)
{
	uint64_t value = 1;

	if (write(bare->there, &value, sizeof(value)) != sizeof(value) ||
	    read(bare->back, &value, sizeof(value)) != sizeof(value))
		bench_die("the other side of a bare wake-up has gone");
}

/* With a rank alone in its job the daemon has nothing to do but to answer: this is the hop itself. */
struct hop {
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_submit_params submit;
};

static void hop_open(struct group *group, struct hop *hop)
{
	bench_check(bps_memory_alloc(group->client, 4, &hop->memory));
	bench_check(bps_tensor_declare(group->client, "bench.hop", BPS_FLOAT32, 1, &hop->tensor));
	hop->submit = (struct bps_submit_params){
		.size = sizeof(hop->submit),
		.operation = BPS_PUSH_PULL,
		.input = bps_memory_data(hop->memory),
		.output = bps_memory_data(hop->memory),
	};
}

static void hop_close(struct hop *hop)
{
	bps_tensor_free(hop->tensor);
	bps_memory_free(hop->memory);
}

/* In turns: a hop and a bare wake-up see the same machine. */
static void measure_hops(const struct ring_options *o, struct hop *hop, struct bare *bare,
			 bool asleep, int64_t *hops, int64_t *bares)
{
	for (size_t i = 0; i < o->warmup + o->repeats; i++) {
		uint64_t began, between, ended;

		if (asleep)
			(void)usleep(o->pause_us);
		began = clock_now_ns();
		group_run(hop->tensor, &hop->submit);
		between = clock_now_ns();
		if (i >= o->warmup)
			hops[i - o->warmup] = (int64_t)(between - began);
		if (asleep)
			(void)usleep(o->pause_us);
		began = clock_now_ns();
		bare_hop(bare);
		ended = clock_now_ns();
		if (i >= o->warmup)
			bares[i - o->warmup] = (int64_t)(ended - began);
	}
}

/* What bps_submit() itself takes while the daemon works through the requests before. */
static void measure_posts(const struct ring_options *o, struct hop *hop, int64_t *posts)
{
	struct bps_request *requests[POSTS];

	for (size_t done = 0; done < o->repeats;) {
		size_t n = MIN((size_t)POSTS, o->repeats - done);

		for (size_t i = 0; i < n; i++) {
			uint64_t began = clock_now_ns();

			bench_check(bps_submit(hop->tensor, &hop->submit, &requests[i]));
			posts[done + i] = (int64_t)(clock_now_ns() - began);
		}
		for (size_t i = 0; i < n; i++) {
			bench_check(bps_request_wait(requests[i], BPS_FOREVER));
			bps_request_free(requests[i]);
		}
		done += n;
	}
}

static void print(const struct ring_options *o, const struct group *group,
		  const struct ring_row *rows, size_t n)
{
	FILE *json = bench_json_open(o->json);

	printf("%u rank(s), %zu times; slowest rank\n%-58s %10s %10s\n", group->size, o->repeats,
	       "", "p50 us", "p99 us");
	for (size_t i = 0; i < n; i++)
		printf("%-58s %10.2f %10.2f\n", rows[i].text, (double)rows[i].p50 / 1e3,
		       (double)rows[i].p99 / 1e3);
	printf("%-58s %10.2f\n", "hop, both asleep / bare wake-up there and back",
	       (double)rows[1].p50 / (double)rows[2].p50);
	if (!json)
		return;
	fprintf(json, "{\"benchmark\": \"ring\", \"ranks\": %u, \"repeats\": %zu", group->size,
		o->repeats);
	for (size_t i = 0; i < n; i++)
		fprintf(json, ",\n \"%s\": {\"p50_us\": %.3f, \"p99_us\": %.3f}", rows[i].name,
			(double)rows[i].p50 / 1e3, (double)rows[i].p99 / 1e3);
	fprintf(json, "}\n");
	bench_json_close(json);
}

int bench_ring(int argc, char **argv)
{
	struct ring_row rows[] = {
		{ "post", "bps_submit() beside a busy daemon", 0, 0 },
		{ "hop_asleep", "submit, daemon, completion; both asleep before", 0, 0 },
		{ "bare_asleep", "eventfd to another process and back; both asleep before", 0, 0 },
		{ "hop_at_once", "submit, daemon, completion; one after the other", 0, 0 },
		{ "bare_at_once", "eventfd to another process and back; one after the other", 0,
		  0 },
	};
	int64_t *times[ARRAY_SIZE(rows)];
	struct ring_options o;
	struct group group;
	struct bare bare;
	struct hop hop;

	parse(&o, argc, argv);
	group_start(o.n_ranks ?: (getenv("BPS_RANK") ? 0 : 1));
	bare_open(&bare);
	group_open(&group);
	hop_open(&group, &hop);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		times[i] = calloc(o.repeats, sizeof(*times[i]));
		if (!times[i])
			bench_die("out of memory");
	}
	measure_hops(&o, &hop, &bare, true, times[1], times[2]);
	measure_hops(&o, &hop, &bare, false, times[3], times[4]);
	measure_posts(&o, &hop, times[0]);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		group_largest(&group, times[i], o.repeats);
		rows[i].p50 = bench_quantile(times[i], o.repeats, 0.5);
		rows[i].p99 = bench_quantile(times[i], o.repeats, 0.99);
		free(times[i]);
	}
	if (!group.rank)
		print(&o, &group, rows, ARRAY_SIZE(rows));
	hop_close(&hop);
	bare_close(&bare);
	group_close(&group);
	return 0;
}
