/*
 * Runs schedules of the simulated world, in processes of their own, BATCH in each; shrinks one that
 * fails and writes it to a file. See scripts/sim.
 */
#include "coverage.h"
#include "sim.h"
#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BATCH	     50 /* schedules in a process: the memory of killed daemons stays with it */
#define TIME_LIMIT_S 60 /* processor time of a schedule */

int __real_clock_gettime(clockid_t clock, struct timespec *time);
ssize_t __real_getrandom(void *data, size_t len, unsigned flags);

bool sim_trace, sim_coverage;

/* What a process that runs schedules tells the one that waits for it. */
struct told {
	uint64_t seed;
	unsigned n_done;
	uint64_t n_events;
	char why[1024];
};
static struct told *told;

void sim_fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)vsnprintf(told->why, sizeof(told->why), format, args);
	va_end(args);
	trace("FAILED: %s", told->why);
	(void)fflush(stdout);
	_exit(1);
}

static double now_s(void)
{
	struct timespec now;

	(void)__real_clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* -- Processes -------------------------------------------------------------------------------------------------------- */

/* Waits for a process that runs schedules. Returns whether all was well, or false with told->why. */
static bool wait_for(pid_t pid)
{
	int status = 0;

	(void)waitpid(pid, &status, 0);
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		return true;
	if (!*told->why && WIFSIGNALED(status))
		(void)snprintf(told->why, sizeof(told->why), "ended by signal %d (%s)",
			       WTERMSIG(status), strsignal(WTERMSIG(status)));
	else if (!*told->why)
		(void)snprintf(told->why, sizeof(told->why), "ended with status %d",
			       WEXITSTATUS(status));
	return false;
}

static void run_here(const struct schedule *schedule)
{
	const struct itimerval limit = { .it_value.tv_sec = TIME_LIMIT_S };

	told->seed = schedule->seed;
	(void)setitimer(ITIMER_PROF, &limit, NULL);
	schedule_run(schedule);
	told->n_done++;
	(void)close_range(3, ~0u, 0);
}

static bool run_one(const struct schedule *schedule)
{
	pid_t pid;

	told->why[0] = '\0';
	(void)fflush(stdout);
	pid = fork();
	if (!pid) {
		run_here(schedule);
		(void)fflush(stdout);
		_exit(0);
	}
	return wait_for(pid);
}

static bool run_batch(uint64_t first, unsigned n, const struct schedule *fixed)
{
	pid_t pid;

	told->why[0] = '\0';
	(void)fflush(stdout);
	pid = fork();
	if (!pid) {
		for (unsigned i = 0; i < n; i++) {
			struct schedule schedule;

			schedule_make(&schedule, first + i, fixed);
			run_here(&schedule);
		}
		if (sim_coverage)
			coverage_print();
		(void)fflush(stdout);
		_exit(0);
	}
	return wait_for(pid);
}

/* -- Shrinking -------------------------------------------------------------------------------------------------------- */

static unsigned n_tried;

/* Whether the candidate fails, too: then the candidate is the smallest so far. */
static bool try(struct schedule *best, const struct schedule *candidate)
{
	n_tried++;
	if (run_one(candidate))
		return false;
	*best = *candidate;
	return true;
}

static bool drop_faults(struct schedule *best, unsigned n)
{
	for (unsigned i = 0; i + n <= best->n_faults; i++) {
		struct schedule candidate = *best;

		memmove(&candidate.faults[i], &candidate.faults[i + n],
			(candidate.n_faults - i - n) * sizeof(candidate.faults[0]));
		candidate.n_faults -= n;
		if (try(best, &candidate))
			return true;
	}
	return false;
}

static bool lessen(struct schedule *best, size_t offset, unsigned least)
{
	unsigned now = *(unsigned *)((char *)best + offset);

	for (unsigned to = least; to < now; to = to + (now - to + 1) / 2) {
		struct schedule candidate = *best;

		*(unsigned *)((char *)&candidate + offset) = to;
		candidate.n_shared = MIN(candidate.n_shared, candidate.n_agents);
		for (unsigned i = 0; i < candidate.n_faults; i++)
			if (MAX(candidate.faults[i].node, candidate.faults[i].other) >=
			    candidate.n_agents + candidate.n_servers)
				return false;
		if (candidate.n_servers + candidate.n_shared && try(best, &candidate))
			return true;
	}
	return false;
}

static void shrink(struct schedule *best)
{
	bool smaller;

	do {
		smaller = false;
		for (unsigned n = MAX(best->n_faults / 2, 1u); n; n /= 2)
			while (drop_faults(best, n))
				smaller = true;
		smaller |= lessen(best, offsetof(struct schedule, n_rounds), 1);
		smaller |= lessen(best, offsetof(struct schedule, n_tensors), 1);
		smaller |= lessen(best, offsetof(struct schedule, n_local), 1);
		smaller |= lessen(best, offsetof(struct schedule, n_servers), 0);
		smaller |= lessen(best, offsetof(struct schedule, n_shared), 0);
		smaller |= lessen(best, offsetof(struct schedule, n_agents), 1);
		for (unsigned i = 0; i < best->n_faults; i++) {
			size_t at = offsetof(struct schedule, faults) + i * sizeof(struct fault);

			smaller |= lessen(best, at + offsetof(struct fault, point), 0);
			smaller |= lessen(best, at + offsetof(struct fault, after), 0);
		}
	} while (smaller && n_tried < 500);
}

static void report(struct schedule *schedule, const char *folder)
{
	char path[512], why[sizeof(told->why)];

	(void)printf("seed %" PRIu64 ": %s\n", schedule->seed, told->why);
	(void)fflush(stdout);
	shrink(schedule);
	(void)run_one(schedule);
	(void)snprintf(why, sizeof(why), "%s", told->why);
	(void)snprintf(path, sizeof(path), "%s/sim-%" PRIu64 ".txt", folder, schedule->seed);
	if (schedule_write(schedule, path, why))
		(void)printf("%s: %m\n", path);
	(void)printf("  shrunk in %u runs to %u agents, %u servers, %u of the agents servers, %u "
		     "ranks on "
		     "each, %u tensors, %u rounds, %u faults:\n  %s\n  scripts/sim --replay %s "
		     "--trace\n",
		     n_tried, schedule->n_agents, schedule->n_servers, schedule->n_shared,
		     schedule->n_local, schedule->n_tensors, schedule->n_rounds, schedule->n_faults,
		     why, path);
}

/* -- Main ------------------------------------------------------------------------------------------------------------- */

struct options {
	uint64_t seed, n_seeds;
	double seconds;
	const char *replay, *folder;
	bool no_shrink;
	struct schedule fixed;
};

static int usage(void)
{
	(void)fprintf(
		stderr,
		"usage: sim [--seed N] [--seeds N | --seconds S] [--trace] [--coverage]\n"
		"           [--agents N] [--servers N] [--local N] [--tensors N] [--rounds N] "
		"[--faults N] [--out FOLDER] [--no-shrink]\n"
		"       sim --replay FILE [--trace]\n");
	return 2;
}

/* The kind of jobs with this name or number. */
static unsigned kind_of(const char *word)
{
	char *end;
	unsigned long kind = strtoul(word, &end, 10);

	for (unsigned i = 0; i < JOB_KINDS; i++)
		if (!strcmp(job_kinds[i], word))
			return i;
	return *end || kind > JOB_KINDS ? JOB_KINDS : (unsigned)kind;
}

static bool parse(int argc, char **argv, struct options *options)
{
	static const struct option known[] = {
		{ "seed", 1, NULL, 's' },    { "seeds", 1, NULL, 'n' },
		{ "seconds", 1, NULL, 'S' }, { "replay", 1, NULL, 'r' },
		{ "trace", 0, NULL, 't' },   { "coverage", 0, NULL, 'c' },
		{ "agents", 1, NULL, 'a' },  { "servers", 1, NULL, 'v' },
		{ "local", 1, NULL, 'l' },   { "tensors", 1, NULL, 'T' },
		{ "kind", 1, NULL, 'k' },    { "rounds", 1, NULL, 'R' },
		{ "faults", 1, NULL, 'f' },  { "no-shrink", 0, NULL, 'N' },
		{ "out", 1, NULL, 'o' },     { 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
		unsigned number = optarg ? (unsigned)strtoul(optarg, NULL, 10) : 0;

		switch (c) {
		case 's':
			options->seed = strtoull(optarg, NULL, 10);
			break;
		case 'n':
			options->n_seeds = strtoull(optarg, NULL, 10);
			break;
		case 'S':
			options->seconds = strtod(optarg, NULL);
			break;
		case 'r':
			options->replay = optarg;
			break;
		case 'o':
			options->folder = optarg;
			break;
		case 'N':
			options->no_shrink = true;
			break;
		case 't':
			sim_trace = true;
			break;
		case 'c':
			sim_coverage = true;
			break;
		case 'a':
			options->fixed.n_agents = number;
			break;
		case 'v':
			options->fixed.n_servers = number;
			break;
		case 'l':
			options->fixed.n_local = number;
			break;
		case 'T':
			options->fixed.n_tensors = number;
			break;
		case 'k':
			options->fixed.kind = kind_of(optarg);
			if (options->fixed.kind == JOB_KINDS)
				return false;
			break;
		case 'R':
			options->fixed.n_rounds = number;
			break;
		case 'f':
			options->fixed.n_faults = number;
			break;
		default:
			return false;
		}
	}
	return optind == argc;
}

static int replay(const struct options *options)
{
	struct schedule schedule;
	int r = schedule_read(&schedule, options->replay);

	if (r) {
		(void)fprintf(stderr, "sim: %s: %s\n", options->replay,
			      r == -EINVAL ? "no schedule" : strerror(-r));
		return 2;
	}
	if (run_one(&schedule)) {
		(void)printf("%s: all is well\n", options->replay);
		return 0;
	}
	(void)printf("%s: %s\n", options->replay, told->why);
	return 1;
}

static int run_all(const struct options *options)
{
	double began_s = now_s();
	uint64_t n = 0;

	while (options->seconds > 0 ? now_s() - began_s < options->seconds : n < options->n_seeds) {
		unsigned batch = sim_trace || options->seconds > 0
					 ? BATCH
					 : (unsigned)MIN(options->n_seeds - n, (uint64_t)BATCH);

		if (sim_trace)
			batch = 1;
		if (!run_batch(options->seed + n, batch, &options->fixed)) {
			struct schedule schedule;

			if (sim_trace)
				return 1;
			if (options->no_shrink) {
				(void)printf("seed %" PRIu64 ", schedule %" PRIu64 ": %s\n",
					     told->seed, told->seed - options->seed + 1, told->why);
				return 1;
			}
			schedule_make(&schedule, told->seed, &options->fixed);
			report(&schedule, options->folder);
			return 1;
		}
		n += batch;
	}
	if (!sim_trace)
		(void)printf("%" PRIu64 " schedules from seed %" PRIu64
			     ", all is well, %.0f a minute\n",
			     n, options->seed, (double)n * 60 / (now_s() - began_s));
	return 0;
}

int main(int argc, char **argv)
{
	struct options options = { .n_seeds = 1, .folder = "." };
	struct rlimit files = { 65536, 65536 };

	options.fixed.n_faults = options.fixed.kind = UINT32_MAX;
	(void)__real_getrandom(&options.seed, sizeof(options.seed), 0);
	options.seed %= 1000000000000;
	if (!parse(argc, argv, &options))
		return usage();
	(void)setrlimit(RLIMIT_NOFILE, &files);
	told = mmap(NULL, sizeof(*told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (told == MAP_FAILED)
		return 2;
	return options.replay ? replay(&options) : run_all(&options);
}
