/*
 * A real daemon, and trainers that are processes of their own with the library, all on one machine.
 */
#include "bps.h"
#include "daemon.h"
#include "test.h"
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#define RANKS_MAX 8

struct ranks {
	const char *socket, *job;
	uint32_t size;
	int force_distributed;
	void (*run)(struct bps_client *client, uint32_t rank, uint32_t size);
	pid_t pids[RANKS_MAX];
};

static _Noreturn void rank_main(const struct ranks *ranks, uint32_t rank)
{
	struct bps_open_params open = { .size = sizeof(open), .socket = ranks->socket };
	struct bps_join_params join = {
		.size = sizeof(join),
		.job = ranks->job,
		.rank = rank,
		.local_rank = rank,
		.world_size = ranks->size,
		.local_size = ranks->size,
		.n_nodes = 1,
		.force_distributed = ranks->force_distributed,
	};
	struct bps_client *client;

	ASSERT_OK(bps_client_open(&open, &client));
	if (bps_client_join(client, &join))
		test_fail(__FILE__, __LINE__, "join: %s", bps_error());
	ranks->run(client, rank, ranks->size);
	bps_client_close(client);
	_exit(0);
}

static void ranks_start(struct ranks *ranks)
{
	for (uint32_t i = 0; i < ranks->size; i++) {
		ranks->pids[i] = fork();
		ASSERT_TRUE(ranks->pids[i] >= 0);
		if (!ranks->pids[i])
			rank_main(ranks, i);
	}
}

static void ranks_wait(struct ranks *ranks)
{
	for (uint32_t i = 0; i < ranks->size; i++) {
		int status;

		ASSERT_EQ(waitpid(ranks->pids[i], &status, 0), ranks->pids[i]);
		ASSERT_EQ(status, 0);
	}
}

static struct bps_request *push_pull(struct bps_tensor *tensor, const float *input, float *output,
				     int32_t priority)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = input,
		.output = output,
		.priority = priority,
	};
	struct bps_request *request;

	if (bps_submit(tensor, &params, &request))
		test_fail(__FILE__, __LINE__, "submit: %s", bps_error());
	return request;
}

static void finish(struct bps_request *request)
{
	if (bps_request_wait(request, BPS_FOREVER))
		test_fail(__FILE__, __LINE__, "request: %s", bps_request_error(request));
	bps_request_free(request);
}

static struct bps_tensor *declare(struct bps_client *client, const char *name, uint64_t elements)
{
	struct bps_tensor *tensor;

	if (bps_tensor_declare(client, name, BPS_FLOAT32, elements, &tensor))
		test_fail(__FILE__, __LINE__, "declare: %s", bps_error());
	return tensor;
}

/* -- A large tensor, in shared memory and in place ---------------------------------------------------------------------- */

static void run_large(struct bps_client *client, uint32_t rank, uint32_t size)
{
	const uint64_t n = 5000001;
	struct bps_tensor *tensor = declare(client, "large", n);
	struct bps_memory *memory;
	float *data;

	ASSERT_OK(bps_memory_alloc(client, n * sizeof(float), &memory));
	data = bps_memory_data(memory);
	for (int round = 1; round < 4; round++) {
		for (uint64_t i = 0; i < n; i++)
			data[i] = (float)((i + rank * (unsigned)round) % 1000);
		finish(push_pull(tensor, data, data, 0));
		for (uint64_t i = 0; i < n; i++) {
			float sum = 0;

			for (uint32_t r = 0; r < size; r++)
				sum += (float)((i + r * (unsigned)round) % 1000);
			ASSERT_TRUE(data[i] == sum);
		}
	}
	bps_tensor_free(tensor);
	bps_memory_free(memory);
}

/* -- Many tensors, submitted by each rank in an order of its own, several rounds ahead ----------------------------------- */

#define MANY	   150
#define MANY_ROUND 12

static uint64_t many_elements(unsigned tensor)
{
	return tensor % 7 ? tensor * 13u + 1 : tensor * 1001u + 1;
}

static float many_value(unsigned tensor, unsigned round, uint32_t rank)
{
	return (float)(tensor + 3 * round + 7 * rank);
}

static void many_round(struct bps_tensor **tensors, float **data, unsigned round, uint32_t rank,
		       uint32_t size)
{
	struct bps_request *requests[MANY];

	for (unsigned k = 0; k < MANY; k++) {
		/* 150 and each of these have no common divisor: every tensor once. */
		static const unsigned steps[] = { 1, 7, 11, 149, 13, 17, 19, 23 };
		unsigned i = k * steps[(rank + round) % ARRAY_SIZE(steps)] % MANY;
		uint64_t n = many_elements(i);

		for (uint64_t j = 0; j < n; j++)
			data[i][j] = many_value(i, round, rank);
		requests[i] = push_pull(tensors[i], data[i], data[i] + n, -(int32_t)i);
	}
	for (unsigned i = 0; i < MANY; i++) {
		uint64_t n = many_elements(i);
		float sum = 0;

		finish(requests[i]);
		for (uint32_t r = 0; r < size; r++)
			sum += many_value(i, round, r);
		ASSERT_TRUE(data[i][n] == sum && data[i][2 * n - 1] == sum);
	}
}

static void run_many(struct bps_client *client, uint32_t rank, uint32_t size)
{
	struct bps_tensor *tensors[MANY];
	float *data[MANY];
	char name[32];

	for (unsigned i = 0; i < MANY; i++) {
		(void)snprintf(name, sizeof(name), "layer%u.weight", i);
		tensors[i] = declare(client, name, many_elements(i));
		data[i] = calloc(2 * many_elements(i), sizeof(float));
		ASSERT_TRUE(data[i]);
	}
	for (unsigned round = 0; round < MANY_ROUND; round++)
		many_round(tensors, data, round, rank, size);
	for (unsigned i = 0; i < MANY; i++) {
		bps_tensor_free(tensors[i]);
		free(data[i]);
	}
}

static void check(struct test_daemon *daemon, uint32_t size, int force,
		  void (*run)(struct bps_client *, uint32_t, uint32_t))
{
	struct ranks ranks = { .socket = daemon->socket,
			       .job = "job",
			       .size = size,
			       .force_distributed = force,
			       .run = run };

	ranks_start(&ranks);
	ranks_wait(&ranks);
}

TEST(processes_sum)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a",
								   .log_level = "info" };

	test_daemon_start(&daemon);
	for (int force = 0; force < 2; force++) {
		check(&daemon, 1, force, run_large);
		check(&daemon, 3, force, run_large);
		check(&daemon, 1, force, run_many);
		check(&daemon, 4, force, run_many);
	}
}

/* -- Two jobs: what happens to one is not felt by the other --------------------------------------------------------------- */

/* Rank 0 dies after its first round; the others learn it from a request under way or from the next submit. */
static void run_until_killed(struct bps_client *client, uint32_t rank, uint32_t size)
{
	struct bps_tensor *tensor = declare(client, "t", 100000);
	_cleanup_(freep) float *data = calloc(100000, sizeof(float));
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = data,
		.output = data,
	};
	struct bps_request *request;
	int r = 0;

	(void)size;
	while (!r) {
		r = bps_submit(tensor, &params, &request);
		if (r) {
			ASSERT_CONTAINS(bps_error(), "rank 0 ");
			break;
		}
		r = bps_request_wait(request, BPS_FOREVER);
		if (r)
			ASSERT_CONTAINS(bps_request_error(request), "rank 0 ");
		else if (rank == 0)
			ASSERT_OK(kill(getpid(), SIGKILL));
		bps_request_free(request);
	}
	bps_tensor_free(tensor);
}

TEST(a_dead_trainer_harms_its_own_job_only)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a",
								   .log_level = "info" };
	struct ranks good = { .job = "good", .size = 2, .run = run_many };

	test_daemon_start(&daemon);
	good.socket = daemon.socket;
	ranks_start(&good);
	for (int i = 0; i < 5; i++) {
		struct ranks bad = { .socket = daemon.socket,
				     .job = "bad",
				     .size = 3,
				     .force_distributed = i % 2,
				     .run = run_until_killed };
		int status;

		ranks_start(&bad);
		ASSERT_EQ(waitpid(bad.pids[0], &status, 0), bad.pids[0]);
		ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		for (uint32_t rank = 1; rank < 3; rank++) {
			ASSERT_EQ(waitpid(bad.pids[rank], &status, 0), bad.pids[rank]);
			ASSERT_EQ(status, 0);
		}
	}
	ranks_wait(&good);
}

/* -- The daemon goes, and comes back -------------------------------------------------------------------------------------- */

static void expect_lost(struct bps_client *client, struct bps_tensor *tensor)
{
	struct bps_request *request;
	float data[4] = { 0 };
	struct bps_submit_params params = {
		.size = sizeof(params), .operation = BPS_PUSH_PULL, .input = data, .output = data
	};
	int r;

	/* The end may be noticed by either. */
	r = bps_submit(tensor, &params, &request);
	if (!r) {
		r = bps_request_wait(request, BPS_FOREVER);
		bps_request_free(request);
	}
	ASSERT_EQ(r, -ESHUTDOWN);
	ASSERT_EQ(bps_client_leave(client), -ESHUTDOWN);
}

TEST(a_killed_daemon_is_replaced)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a",
								   .log_level = "info" };
	struct bps_open_params open = { .size = sizeof(open),
					.timeout_ms = 20000,
					.restart_timeout_ms = -1 };
	struct bps_join_params join = { .size = sizeof(join), .world_size = 1 };

	test_daemon_start(&daemon);
	open.socket = daemon.socket;
	for (int i = 0; i < 3; i++) {
		struct bps_client *client;
		struct bps_tensor *tensor;
		float data[4] = { 1, 2, 3, 4 };

		ASSERT_OK(bps_client_open(&open, &client));
		ASSERT_OK(bps_client_join(client, &join));
		tensor = declare(client, "t", 4);
		finish(push_pull(tensor, data, data, 0));
		ASSERT_TRUE(data[3] == 4);
		if (i)
			test_daemon_stop(&daemon);
		else
			test_daemon_kill(&daemon);
		expect_lost(client, tensor);
		bps_tensor_free(tensor);
		bps_client_close(client);
		test_daemon_start(&daemon);
	}
}

#define ROUNDS 120
static int progress[2]; /* a byte by rank 0 after each round */

static void run_through_restarts(struct bps_client *client, uint32_t rank, uint32_t size)
{
	enum { N = 300001 };
	struct bps_tensor *shared = declare(client, "shared", N),
			  *staged = declare(client, "staged", N);
	static float data[N];
	struct bps_memory *memory;
	float *mapped;

	ASSERT_OK(bps_memory_alloc(client, N * sizeof(float), &memory));
	mapped = bps_memory_data(memory);
	for (int round = 1; round <= ROUNDS; round++) {
		struct bps_request *requests[2];

		for (unsigned i = 0; i < N; i++) {
			mapped[i] = (float)(i % 1000 + rank * (unsigned)round);
			data[i] = (float)(i % 977 + rank + (unsigned)round);
		}
		requests[0] = push_pull(shared, mapped, mapped, 0);
		requests[1] = push_pull(staged, data, data, 1);
		/* As one who only asks, and as one who waits. */
		while (rank == 1 && !bps_request_poll(requests[0]))
			(void)poll(NULL, 0, 1);
		finish(requests[0]);
		finish(requests[1]);
		for (unsigned i = 0; i < N; i++) {
			ASSERT_TRUE(mapped[i] == (float)(size * (i % 1000) +
							 size * (size - 1) / 2 * (unsigned)round));
			ASSERT_TRUE(data[i] == (float)(size * (i % 977) + size * (size - 1) / 2 +
						       size * (unsigned)round));
		}
		if (!rank)
			ASSERT_EQ(write(progress[1], "", 1), 1);
	}
	bps_memory_free(memory);
	bps_tensor_free(shared);
	bps_tensor_free(staged);
	ASSERT_OK(bps_client_leave(client));
}

/* Until rank 0 has ended so many rounds since the last time. */
static void await_rounds(unsigned n)
{
	char byte;

	while (n--)
		ASSERT_EQ(read(progress[0], &byte, 1), 1);
}

TEST(a_job_goes_on_with_the_next_daemon)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a",
								   .log_level = "info" };
	struct ranks ranks = { .job = "job", .size = 3, .run = run_through_restarts };

	test_daemon_start(&daemon);
	ranks.socket = daemon.socket;
	ASSERT_OK(pipe(progress));
	ranks_start(&ranks);
	for (int i = 0; i < 8; i++) {
		await_rounds(10);
		if (i % 4 == 3)
			test_daemon_stop(&daemon);
		else
			test_daemon_kill(&daemon);
		test_daemon_start(&daemon);
	}
	ranks_wait(&ranks);
	ASSERT_OK(close(progress[0]));
	ASSERT_OK(close(progress[1]));
}

/* Comings and goings: jobs of a few rounds, one after the other. */
static void run_many_jobs(struct bps_client *client, uint32_t rank, uint32_t size)
{
	ASSERT_OK(bps_client_leave(client));
	for (uint32_t i = 0; i < 150; i++) {
		struct bps_join_params join = { .size = sizeof(join),
						.rank = rank,
						.world_size = size };
		struct bps_tensor *tensor;
		float data[100];
		char name[32];

		(void)snprintf(name, sizeof(name), "job-%u", i);
		join.job = name;
		if (bps_client_join(client, &join))
			test_fail(__FILE__, __LINE__, "join of %s: %s", name, bps_error());
		tensor = declare(client, "t", 100);
		for (uint32_t round = 1; round <= 3; round++) {
			for (uint32_t n = 0; n < 100; n++)
				data[n] = (float)(n * round + rank);
			finish(push_pull(tensor, data, data, 0));
			for (uint32_t n = 0; n < 100; n++)
				ASSERT_TRUE(data[n] ==
					    (float)(size * n * round + size * (size - 1) / 2));
		}
		bps_tensor_free(tensor);
		if (bps_client_leave(client))
			test_fail(__FILE__, __LINE__, "leave of %s: %s", name, bps_error());
		if (!rank)
			ASSERT_EQ(write(progress[1], "", 1), 1);
	}
	if (!rank)
		ASSERT_OK(close(progress[1]));
}

TEST(jobs_begin_and_end_through_restarts)
{
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a",
								   .log_level = "info" };
	struct ranks ranks = { .job = "first", .size = 3, .run = run_many_jobs };
	const char *given = getenv("BPS_SEED");
	unsigned seed = given ? (unsigned)atoi(given) : 20261121;
	char byte;

	test_daemon_start(&daemon);
	ranks.socket = daemon.socket;
	ASSERT_OK(pipe(progress));
	ranks_start(&ranks);
	ASSERT_OK(close(progress[1]));
	fprintf(stderr, "BPS_SEED=%u\n", seed);
	while (read(progress[0], &byte, 1) == 1) {
		if (rand_r(&seed) % 4)
			continue;
		/* Anywhere in what a job does. */
		(void)poll(NULL, 0, rand_r(&seed) % 4);
		test_daemon_kill(&daemon);
		test_daemon_start(&daemon);
	}
	ranks_wait(&ranks);
	ASSERT_OK(close(progress[0]));
}
