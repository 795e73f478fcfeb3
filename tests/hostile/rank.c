/*
 * A rank that does what any trainer may: rounds of push_pull, one after the other, each compared with what it has to be and
 * timed. The runner of tests/hostile starts the ranks of honest jobs, and of jobs that are greedy and no worse, and reads
 * their tallies (tally.h). Single-threaded. Ends when told to; exits 0, or 1 with why in the tally.
 *
 *	rank SOCKET TALLY BYTES PAUSE_US KEY=VALUE...	keys: job secret rank size node nodes local_rank local_size elastic quorum
 *							distributed; PAUSE_US: between two rounds
 *	rank - TALLY BYTES PAUSE_US			no daemon: two processes hand BYTES to and fro. The yardstick: how long the
 *							machine itself keeps somebody waiting who needs two others' turns
 */
#include "bps.h"
#include "tally.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_MS 600000

static struct tally *tally;
static struct bps_client *client;
static struct bps_tensor *tensor;
static float *input, *output;
static size_t n_elements;
static uint32_t rank, size, quorum;

static _Noreturn void fail(const char *what, const char *why)
{
	snprintf(tally->text, sizeof(tally->text), "%s: %s", what, why);
	atomic_store(&tally->state, TALLY_FAILED);
	exit(1);
}

static void check(int r, const char *what)
{
	if (r < 0)
		fail(what, bps_error());
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static const char *value_of(char **words, const char *key)
{
	size_t len = strlen(key);

	for (; *words; words++) {
		if (!strncmp(*words, key, len) && (*words)[len] == '=')
			return *words + len + 1;
	}
	return NULL;
}

static uint32_t number_of(char **words, const char *key, uint32_t fallback)
{
	const char *value = value_of(words, key);

	return value ? (uint32_t)strtoul(value, NULL, 0) : fallback;
}

static void join(const char *socket, char **words)
{
	struct bps_open_params open = { .size = sizeof(open),
					.socket = socket,
					.timeout_ms = TIMEOUT_MS,
					.restart_timeout_ms = TIMEOUT_MS };
	const char *secret = value_of(words, "secret");
	struct bps_join_params params = {
		.size = sizeof(params),
		.job = value_of(words, "job"),
		.secret = secret,
		.secret_len = secret ? strlen(secret) : 0,
		.rank = rank = number_of(words, "rank", 0),
		.world_size = size = number_of(words, "size", 1),
		.node = number_of(words, "node", 0),
		.n_nodes = number_of(words, "nodes", 1),
		.local_rank = number_of(words, "local_rank", 0),
		.local_size = number_of(words, "local_size", 1),
		.elastic = (int)number_of(words, "elastic", 0),
		.quorum = quorum = number_of(words, "quorum", 0),
		.quorum_timeout_ms = number_of(words, "quorum", 0) ? 5 : 0,
		.force_distributed = (int)number_of(words, "distributed", 0),
		.timeout_ms = TIMEOUT_MS,
		.request_timeout_ms = TIMEOUT_MS,
	};

	check(bps_client_open(&open, &client), "open");
	check(bps_client_join(client, &params), "join");
	check(bps_tensor_declare(client, "x", BPS_FLOAT32, n_elements, &tensor), "tensor");
}

/* Small whole numbers: their sum is exact. Who may be late gives ones: results are then how many contributions they have. */
static float given(uint32_t by, uint64_t round, size_t i)
{
	return quorum ? 1 : (float)((round * 31 + by * 7 + i) & 4095);
}

static bool right(uint64_t round)
{
	for (size_t i = 0; i < n_elements; i++) {
		float want = 0;

		for (uint32_t k = 0; k < size; k++)
			want += given(k, round, i);
		if (quorum ? output[i] < 1 || output[i] != output[0] : output[i] != want)
			return false;
	}
	return true;
}

/* Returns how long it took, from the submission to the result. */
static uint64_t reduce(uint64_t round)
{
	struct bps_submit_params params = {
		.size = sizeof(params), .operation = BPS_PUSH_PULL, .input = input, .output = output
	};
	struct bps_request *request;
	uint64_t began;

	for (size_t i = 0; i < n_elements; i++) {
		input[i] = given(rank, round, i);
		output[i] = -1;
	}
	began = now_ns();
	check(bps_submit(tensor, &params, &request), "submit");
	check(bps_request_wait(request, TIMEOUT_MS), "round");
	began = now_ns() - began;
	bps_request_free(request);
	if (!right(round))
		fail("round", "wrong bits");
	return began;
}

static int pipes[2];

/* The yardstick's: there and back. */
static uint64_t echo(uint64_t round)
{
	uint64_t began = now_ns();

	(void)round;
	if (write(pipes[0], input, n_elements * sizeof(*input)) < 0 ||
	    read(pipes[0], output, n_elements * sizeof(*output)) <= 0)
		fail("echo", strerror(errno));
	return now_ns() - began;
}

static void answer_echoes(void)
{
	ssize_t len;

	close(pipes[0]);
	while ((len = read(pipes[1], output, n_elements * sizeof(*output))) > 0) {
		if (write(pipes[1], output, (size_t)len) < 0)
			break;
	}
	_exit(0);
}

static void work(uint64_t (*one)(uint64_t round), uint32_t pause_us)
{
	const struct timespec pause = { .tv_nsec = pause_us * 1000L },
			      paused = { .tv_nsec = 20000000 };

	atomic_store(&tally->state, TALLY_WORKING);
	for (uint64_t round = 1; !atomic_load(&tally->stop); round++) {
		uint32_t phase = atomic_load(&tally->phase) % TALLY_PHASES;
		struct tally_phase *of = &tally->phases[phase];
		uint64_t took;

		atomic_store(&tally->seen, phase);
		took = one(round);
		of->rounds++;
		if (took > of->longest_ns)
			of->longest_ns = took;
		atomic_store(&tally->rounds, round);
		if (pause_us)
			nanosleep(&pause, NULL);
		while (atomic_load(&tally->paused) && !atomic_load(&tally->stop))
			nanosleep(&paused, NULL);
	}
}

int main(int argc, char **argv)
{
	int fd;

	if (argc < 5) {
		fprintf(stderr, "rank: see its source for its arguments\n");
		return 2;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	fd = open(argv[2], O_RDWR | O_CLOEXEC);
	tally = fd < 0 ? MAP_FAILED
		       : mmap(NULL, sizeof(*tally), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	n_elements = strtoul(argv[3], NULL, 10) / sizeof(float);
	input = calloc(n_elements, sizeof(float));
	output = calloc(n_elements, sizeof(float));
	if (tally == MAP_FAILED || !input || !output) {
		perror(argv[2]);
		return 2;
	}
	if (strcmp(argv[1], "-")) {
		join(argv[1], argv + 5);
		work(reduce, (uint32_t)strtoul(argv[4], NULL, 10));
		/* The others of the job may be a round ahead: who ends now ends it for them, and they are told to, too. */
	} else {
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pipes))
			fail("socketpair", strerror(errno));
		if (!fork())
			answer_echoes();
		close(pipes[1]);
		work(echo, (uint32_t)strtoul(argv[4], NULL, 10));
	}
	atomic_store(&tally->state, TALLY_LEFT);
	return 0;
}
