/*
 * bps-bench ring: a request's way to the daemon and back, beside a bare wake-up of another
 * process, and the time that a post takes. Both ways are measured in turns, so that they see one
 * state of the machine.
 */
#include "bench/bench.h"
#include <getopt.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define POSTS 256u /* at a time: the daemon is then busy with those before */

/*
 * Cache lines of code, the kernel's apart, that a hop runs through on each side, and the pages they
 * lie in, by single steps through a release for x86-64. After a pause none may be in a cache, and
 * what comes next is known only when a line is there.
 */
enum { DAEMON_LINES = 334, DAEMON_PAGES = 45, RANK_LINES = 216, RANK_PAGES = 32 };
#define PAGE 4096u
#define LINE 64u

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

/*
 * So many lines, spread over so many pages, each of which leads to the next and the last to the
 * first.
 */
static void **chain_new(size_t lines, size_t pages)
{
	size_t in_page = (lines + pages - 1) / pages;
	char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);
	void **first = NULL, **last = NULL;

	if (memory == MAP_FAILED)
		bench_die("out of memory");
	for (size_t i = 0; i < lines; i++) {
		size_t page = i / in_page, line = (i % in_page * 7 + page * 13) % (PAGE / LINE);
		void **next = (void **)(void *)(memory + page * PAGE + line * LINE);

		first = first ?: next;
		if (last)
			*last = next;
		last = next;
	}
	*last = first;
	return first;
}

static void *volatile walked;

static void chain_walk(void **chain, size_t lines)
{
	while (lines--)
		chain = *chain;
	walked = (void *)chain;
}

/* The other side of a bare wake-up: answers each 8 bytes with 8 bytes. */
static void echo(int from, int to, bool walks)
{
	void **chain = walks ? chain_new(DAEMON_LINES, DAEMON_PAGES) : NULL;
	uint64_t value;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (read(from, &value, sizeof(value)) == sizeof(value)) {
		if (walks)
			chain_walk(chain, DAEMON_LINES);
		if (write(to, &value, sizeof(value)) != sizeof(value))
			break;
	}
	_exit(0);
}

struct bare {
	int there, back;
	pid_t pid;
	void **chain; /* NULL: nobody walks along one */
};

static void bare_open(struct bare *bare, bool walks)
{
	bare->there = eventfd(0, EFD_CLOEXEC);
	bare->back = eventfd(0, EFD_CLOEXEC);
	bare->pid = bare->there < 0 || bare->back < 0 ? -1 : fork();
	if (bare->pid < 0)
		bench_die("cannot measure a bare wake-up: %m");
	if (!bare->pid)
		echo(bare->there, bare->back, walks);
	bare->chain = walks ? chain_new(RANK_LINES, RANK_PAGES) : NULL;
}

static void bare_close(struct bare *bare)
{
	(void)kill(bare->pid, SIGKILL);
	(void)waitpid(bare->pid, NULL, 0);
	(void)fd_close(bare->there);
	(void)fd_close(bare->back);
	if (bare->chain)
		(void)munmap((void *)bare->chain, RANK_PAGES * PAGE);
}

static void bare_hop(struct bare *bare)
{
	uint64_t value = 1;

	if (bare->chain)
		chain_walk(bare->chain, RANK_LINES);
	if (write(bare->there, &value, sizeof(value)) != sizeof(value) ||
	    read(bare->back, &value, sizeof(value)) != sizeof(value))
		bench_die("the other side of a bare wake-up has gone");
}

/*
 * With a rank alone in its job the daemon has nothing to do but to answer: this is the hop itself.
 */
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

/*
 * In turns, so that all see the same machine: a hop, a bare wake-up, and one on whose way lines are
 * walked along.
 */
static void measure_hops(const struct ring_options *o, struct hop *hop, struct bare bares[2],
			 bool asleep, int64_t *times[3])
{
	for (size_t i = 0; i < o->warmup + o->repeats; i++) {
		for (unsigned k = 0; k < 3; k++) {
			uint64_t began;

			if (asleep)
				(void)usleep(o->pause_us);
			began = clock_now_ns();
			if (k)
				bare_hop(&bares[k - 1]);
			else
				group_run(hop->tensor, &hop->submit);
			if (i >= o->warmup)
				times[k][i - o->warmup] = (int64_t)(clock_now_ns() - began);
		}
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
		{ "lines_asleep", "the same, through as many lines as a hop has of code", 0, 0 },
		{ "hop_at_once", "submit, daemon, completion; one after the other", 0, 0 },
		{ "bare_at_once", "eventfd to another process and back; one after the other", 0,
		  0 },
		{ "lines_at_once", "the same, through as many lines as a hop has of code", 0, 0 },
	};
	int64_t *times[ARRAY_SIZE(rows)];
	struct ring_options o;
	struct group group;
	struct bare bares[2];
	struct hop hop;

	parse(&o, argc, argv);
	group_start(o.n_ranks ?: (getenv("BPS_RANK") ? 0 : 1));
	bare_open(&bares[0], false);
	bare_open(&bares[1], true);
	group_open(&group);
	hop_open(&group, &hop);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		times[i] = calloc(o.repeats, sizeof(*times[i]));
		if (!times[i])
			bench_die("out of memory");
	}
	measure_hops(&o, &hop, bares, true, &times[1]);
	measure_hops(&o, &hop, bares, false, &times[4]);
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
	bare_close(&bares[0]);
	bare_close(&bares[1]);
	group_close(&group);
	return 0;
}
