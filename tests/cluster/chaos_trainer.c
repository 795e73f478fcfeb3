/*
 * A rank that trains by itself while daemons die around it (scripts/chaos): what it gives to a round is made of the last
 * round's result, so that a round which was lost, done twice or wrong in one bit shows in every one after it.
 *
 *	chaos_trainer SOCKET JOB RANK SIZE NODE N_NODES LOCAL_RANK LOCAL_SIZE LOG STOP WHO
 *
 * LOG gets a line "ROUND TENSOR DIGEST NANOSECONDS" for each result (CLOCK_MONOTONIC). WHO is a number that no other rank of any job
 * has: what it gives is made of it. Ends after the round in which rank 0 has seen that the file STOP exists. Exits 0; on an error
 * says it and exits 1.
 */
#include "chaos.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_MS 600000

/* In place and not, small and of several parts, floating and whole numbers. */
static const struct {
	const char *name;
	int dtype, reduction;
	size_t n;
	int flags;
} kinds[] = {
	{ "weights", BPS_FLOAT32, BPS_AVERAGE, 40000, SHARED | IN_PLACE },
	{ "bias", BPS_FLOAT32, BPS_SUM, 301, IN_PLACE },
	{ "counts", BPS_INT32, BPS_SUM, 20000, SHARED },
	{ "stop", BPS_INT32, BPS_MAX, 1, 0 },
};
#define N_KINDS (sizeof(kinds) / sizeof(*kinds))
#define STOP	(N_KINDS - 1)

static struct {
	struct bps_tensor *tensor;
	struct bps_memory *memory[2];
	struct bps_request *request;
	void *input, *output;
} tensors[N_KINDS];
static struct bps_client *client;
static unsigned long rank_number, who;

static void check(int r, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "chaos_trainer: rank %lu: %s: %s\n", rank_number, what, bps_error());
	exit(1);
}

static void *given(unsigned t, unsigned which)
{
	size_t len = kinds[t].n * bps_dtype_size(kinds[t].dtype);
	void *data = memory(client, len, kinds[t].flags, &tensors[t].memory[which]);

	check(data ? 0 : -ENOMEM, "memory");
	return data;
}

static void prepare(unsigned t)
{
	check(bps_tensor_declare(client, kinds[t].name, kinds[t].dtype, kinds[t].n,
				 &tensors[t].tensor),
	      "tensor");
	tensors[t].input = given(t, 0);
	tensors[t].output = kinds[t].flags & IN_PLACE ? tensors[t].input : given(t, 1);
}

static void submit(unsigned t)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.reduction = kinds[t].reduction,
		.input = tensors[t].input,
		.output = tensors[t].output,
		.priority = (int32_t)t,
	};

	check(bps_submit(tensors[t].tensor, &params, &tensors[t].request), "submit");
}

static void complete(unsigned t, uint32_t round, FILE *log)
{
	struct timespec now;

	check(bps_request_wait(tensors[t].request, TIMEOUT_MS), kinds[t].name);
	bps_request_free(tensors[t].request);
	clock_gettime(CLOCK_MONOTONIC, &now);
	fprintf(log, "%u %s %016llx %lld%09ld\n", round, kinds[t].name,
		(unsigned long long)digest(tensors[t].output, kinds[t].n), (long long)now.tv_sec,
		now.tv_nsec);
}

static void train(FILE *log, const char *stop)
{
	const struct timespec pause = { .tv_nsec = 10000000 }; /* the work between two rounds */

	for (uint32_t round = 0;; round++) {
		for (unsigned t = 0; t < STOP; t++)
			give(kinds[t].dtype, tensors[t].input, tensors[t].output, kinds[t].n,
			     (uint32_t)who, round, t);
		*(int32_t *)tensors[STOP].input = !rank_number && !access(stop, F_OK);
		for (unsigned t = 0; t < N_KINDS; t++)
			submit(t);
		for (unsigned t = 0; t < STOP; t++)
			complete(t, round, log);
		check(bps_request_wait(tensors[STOP].request, TIMEOUT_MS), "stop");
		bps_request_free(tensors[STOP].request);
		fflush(log);
		if (*(int32_t *)tensors[STOP].output)
			return;
		nanosleep(&pause, NULL);
	}
}

int main(int argc, char **argv)
{
	struct bps_open_params open = { .size = sizeof(open),
					.timeout_ms = TIMEOUT_MS,
					.restart_timeout_ms = TIMEOUT_MS };
	struct bps_join_params join = { .size = sizeof(join),
					.timeout_ms = TIMEOUT_MS,
					.request_timeout_ms = TIMEOUT_MS,
					.part_bytes = 65536 };
	FILE *log;

	if (argc != 12) {
		fprintf(stderr, "chaos_trainer: see its source for its arguments\n");
		return 2;
	}
	open.socket = argv[1];
	join.job = argv[2];
	join.rank = (uint32_t)(rank_number = strtoul(argv[3], NULL, 10));
	join.world_size = (uint32_t)strtoul(argv[4], NULL, 10);
	join.node = (uint32_t)strtoul(argv[5], NULL, 10);
	join.n_nodes = (uint32_t)strtoul(argv[6], NULL, 10);
	join.local_rank = (uint32_t)strtoul(argv[7], NULL, 10);
	join.local_size = (uint32_t)strtoul(argv[8], NULL, 10);
	join.min_servers = join.n_nodes > 1;
	log = fopen(argv[9], "w");
	if (!log) {
		perror(argv[9]);
		return 1;
	}
	check(bps_client_open(&open, &client), "open");
	check(bps_client_join(client, &join), "join");
	for (unsigned t = 0; t < N_KINDS; t++)
		prepare(t);
	who = strtoul(argv[11], NULL, 10);
	train(log, argv[10]);
	check(bps_client_leave(client), "leave");
	for (unsigned t = 0; t < N_KINDS; t++) {
		bps_tensor_free(tensors[t].tensor);
		for (unsigned i = 0; i < 2; i++)
			bps_memory_free(tensors[t].memory[i]);
	}
	bps_client_close(client);
	return fclose(log) ? 1 : 0;
}
