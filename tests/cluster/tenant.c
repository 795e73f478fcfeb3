/*
 * A rank that always has as much under way as it can: each tensor is reduced again the moment it is done. For each line of standard
 * input it says one: the rounds and bytes done since the last line, and how long the longest of these rounds took, in
 * microseconds. It ends with its input. The first line it says by itself, when all tensors have been reduced once. Which rank of
 * which job it is the environment says.
 *
 *	tenant PRIORITY N BYTES [N BYTES]...
 */
#include "bps.h"
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_TENSORS 4096

struct shared {
	struct bps_tensor *tensor;
	struct bps_request *request;
	void *data;
	uint64_t bytes, began_ns;
};

static struct bps_client *client;
static struct shared tensors[MAX_TENSORS];
static unsigned n_tensors;
static int priority;
static uint64_t n_rounds, n_bytes, longest_ns;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void check(int r)
{
	if (r >= 0)
		return;
	fprintf(stderr, "tenant: %s\n", bps_error());
	exit(1);
}

static void declare(uint64_t bytes)
{
	struct shared *shared = &tensors[n_tensors];
	struct bps_memory *memory;
	char name[32];

	snprintf(name, sizeof(name), "t%u", n_tensors++);
	check(bps_memory_alloc(client, bytes, &memory));
	shared->data = bps_memory_data(memory);
	memset(shared->data, 0, bytes);
	shared->bytes = bytes;
	check(bps_tensor_declare(client, name, BPS_FLOAT32, bytes / 4, &shared->tensor));
}

static void submit(struct shared *shared)
{
	struct bps_submit_params params = { .size = sizeof(params),
					    .operation = BPS_PUSH_PULL,
					    .reduction = BPS_SUM,
					    .input = shared->data,
					    .output = shared->data,
					    .priority = priority };

	shared->began_ns = now_ns();
	check(bps_submit(shared->tensor, &params, &shared->request));
}

static void again(struct shared *shared)
{
	uint64_t took_ns = now_ns() - shared->began_ns;

	check(bps_request_wait(shared->request, 0));
	bps_request_free(shared->request);
	n_rounds++;
	n_bytes += shared->bytes;
	if (took_ns > longest_ns)
		longest_ns = took_ns;
	submit(shared);
}

/* Returns whether any was done. */
static int look(void)
{
	int found = 0;

	for (unsigned i = 0; i < n_tensors; i++)
		if (bps_request_poll(tensors[i].request) > 0) {
			again(&tensors[i]);
			found = 1;
		}
	return found;
}

/* Returns 0 when there is nobody any more who could ask. */
static int answer(void)
{
	char line[64];
	ssize_t n = read(0, line, sizeof(line));

	if (n < 0)
		return 1;
	if (!n)
		return 0;
	printf("%llu %llu %llu\n", (unsigned long long)n_rounds, (unsigned long long)n_bytes,
	       (unsigned long long)(longest_ns / 1000));
	fflush(stdout);
	n_rounds = n_bytes = longest_ns = 0;
	return 1;
}

int main(int argc, char **argv)
{
	struct bps_open_params open_params = { .size = sizeof(open_params) };
	struct bps_join_params join = { .size = sizeof(join) };

	if (argc < 4 || argc % 2)
		return 2;
	priority = atoi(argv[1]);
	check(bps_client_open(&open_params, &client));
	check(bps_join_params_from_environment(&join));
	check(bps_client_join(client, &join));
	for (int i = 2; i < argc; i += 2)
		for (int n = atoi(argv[i]); n > 0 && n_tensors < MAX_TENSORS; n--)
			declare(strtoull(argv[i + 1], NULL, 10));
	for (unsigned i = 0; i < n_tensors; i++)
		submit(&tensors[i]);
	for (unsigned i = 0; i < n_tensors; i++) {
		check(bps_request_wait(tensors[i].request, BPS_FOREVER));
		again(&tensors[i]);
	}
	printf("ready\n");
	fflush(stdout);
	fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
	for (;;) {
		struct pollfd fds[2] = { { .fd = 0, .events = POLLIN },
					 { .fd = bps_client_fd(client), .events = POLLIN } };
		int found = look();

		if (poll(fds, 2, found ? 0 : 100) > 0 && fds[0].revents && !answer())
			return 0;
		if (!found)
			check(bps_client_dispatch(client));
	}
}
