/*
 * One rank of a benchmark: repeats a push_pull of a float32 tensor between barriers and prints how long each took.
 *
 *	rank SOCKET JOB RANK SIZE LOCAL_RANK LOCAL_SIZE NODE N_NODES BYTES REPEATS
 *
 * Prints one line of nanoseconds a repetition, after two that warm up. The tensor is library memory, reduced in place.
 */
#include "bps.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void check(int r)
{
	if (r < 0) {
		fprintf(stderr, "rank: %s\n", bps_error());
		exit(1);
	}
}

static void finish(struct bps_request *request)
{
	check(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

static long long now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

static void barrier(struct bps_client *client)
{
	struct bps_request *request;

	check(bps_barrier(client, 0, &request));
	finish(request);
}

int main(int argc, char **argv)
{
	struct bps_open_params open = { .size = sizeof(open), .timeout_ms = 10000 };
	struct bps_join_params join = { .size = sizeof(join) };
	struct bps_submit_params submit = { .size = sizeof(submit), .operation = BPS_PUSH_PULL };
	struct bps_client *client;
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_request *request;
	size_t bytes;
	int repeats;

	if (argc != 11) {
		fprintf(stderr, "rank: ten arguments\n");
		return 2;
	}
	open.socket = argv[1];
	join.job = argv[2];
	join.rank = (uint32_t)atoi(argv[3]);
	join.world_size = (uint32_t)atoi(argv[4]);
	join.local_rank = (uint32_t)atoi(argv[5]);
	join.local_size = (uint32_t)atoi(argv[6]);
	join.node = (uint32_t)atoi(argv[7]);
	join.n_nodes = (uint32_t)atoi(argv[8]);
	bytes = strtoull(argv[9], NULL, 0);
	repeats = atoi(argv[10]);

	check(bps_client_open(&open, &client));
	check(bps_client_join(client, &join));
	check(bps_memory_alloc(client, bytes, &memory));
	memset(bps_memory_data(memory), 0, bytes);
	check(bps_tensor_declare(client, "bench", BPS_FLOAT32, bytes / 4, &tensor));
	submit.input = submit.output = bps_memory_data(memory);
	for (int i = -2; i < repeats; i++) {
		long long began;

		barrier(client);
		began = now_ns();
		check(bps_submit(tensor, &submit, &request));
		finish(request);
		if (i >= 0)
			printf("%lld\n", now_ns() - began);
	}
	barrier(client);
	bps_tensor_free(tensor);
	bps_memory_free(memory);
	bps_client_close(client);
	return 0;
}
