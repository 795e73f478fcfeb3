/* Memory of devices through a real daemon and its worker, with the double as driver. */
#include "daemon.h"
#include "gpu_trainer.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define RANKS_MAX 4

struct world {
	struct test_daemon daemon;
	struct trainer trainers[RANKS_MAX];
	uint32_t n;
};

struct options {
	const char *const *args;
	uint32_t n;
	bool force_distributed, one_device;
	enum gpu_reduce gpu_reduce;
	uint64_t gpu_roots;
	uint32_t part_bytes;
	uint64_t request_timeout_ms;
	const char *topology; /* of the double's devices; NULL: NVLink between all */
	const char *log_has, *log_lacks;
};

static void join_all(struct world *world, const char *name, const struct options *options)
{
	uint64_t ids[RANKS_MAX];

	for (uint32_t i = 0; i < world->n; i++)
		ids[i] = trainer_join(&world->trainers[i],
				      &(struct trainer_job){
					      .name = name,
					      .rank = i,
					      .size = world->n,
					      .local_rank = i,
					      .local_size = world->n,
					      .n_nodes = 1,
					      .force_distributed = options->force_distributed,
					      .gpu_reduce = options->gpu_reduce,
					      .gpu_roots = options->gpu_roots,
					      .part_bytes = options->part_bytes,
					      .request_timeout_ms = options->request_timeout_ms,
				      });
	for (uint32_t i = 0; i < world->n; i++)
		ASSERT_OK(trainer_answer(&world->trainers[i], ids[i], NULL));
}

static void world_open(struct world *world, const struct options *options)
{
	*world =
		(struct world){ .daemon = { .name = "a", .args = options->args }, .n = options->n };
	/* Its worker inherits it, we do not. */
	if (options->topology)
		ASSERT_OK(setenv("FAKECUDA_TOPOLOGY", options->topology, 1));
	if (options->log_has || options->log_lacks)
		ASSERT_OK(setenv("FAKECUDA_TRACE", "1", 1));
	test_daemon_start(&world->daemon);
	ASSERT_OK(unsetenv("FAKECUDA_TOPOLOGY"));
	ASSERT_OK(unsetenv("FAKECUDA_TRACE"));
	for (uint32_t i = 0; i < world->n; i++) {
		trainer_open(&world->trainers[i], world->daemon.socket,
			     options->one_device ? 0 : (int)i);
		ASSERT_TRUE(world->trainers[i].features & CONTROL_FEATURE_CUDA);
	}
	join_all(world, "job", options);
}

static void world_leave(struct world *world)
{
	uint64_t ids[RANKS_MAX];
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	for (uint32_t i = 0; i < world->n; i++) {
		Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

		request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
		request.leave = &leave;
		ids[i] = trainer_send(&world->trainers[i], &request, -1);
	}
	for (uint32_t i = 0; i < world->n; i++)
		ASSERT_OK(trainer_answer(&world->trainers[i], ids[i], NULL));
}

static void world_close(struct world *world)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_close(&world->trainers[i]);
	test_daemon_stop(&world->daemon);
}

static void declare_all(struct world *world, uint32_t number, const char *name, enum dtype dtype,
			uint64_t elements)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_declare(&world->trainers[i], number, name, dtype, elements);
}

/* Values whose sums are exact, different for each rank and place. */
static void fill(int32_t *data, uint64_t n, uint32_t rank, uint32_t seed)
{
	for (uint64_t i = 0; i < n; i++)
		data[i] = (int32_t)((i * 2654435761u + seed * 40503u + rank * 69069u) % 100003) -
			  50000;
}

static int32_t sum_at(uint64_t i, uint32_t n_ranks, uint32_t seed)
{
	int32_t sum = 0;

	for (uint32_t rank = 0; rank < n_ranks; rank++)
		sum += (int32_t)((i * 2654435761u + seed * 40503u + rank * 69069u) % 100003) -
		       50000;
	return sum;
}

/* One push_pull of int32 by all ranks; the result is read in stream order, before anybody has asked the slot. */
static void push_pull(struct world *world, const struct memory *inputs,
		      const struct memory *outputs, uint32_t tensor, uint64_t round, uint64_t n)
{
	int32_t *data[RANKS_MAX], *got = malloc(n * sizeof(*got));
	uint32_t slots[RANKS_MAX], seed = tensor * 31 + (uint32_t)round;

	for (uint32_t i = 0; i < world->n; i++) {
		data[i] = malloc(n * sizeof(*got));
		ASSERT_TRUE(data[i] && got);
		fill(data[i], n, i, seed);
		memory_write(&world->trainers[i], &inputs[i], 0, data[i], n * sizeof(*got));
		slots[i] = trainer_submit(&world->trainers[i],
					  &(struct submit){
						  .tensor = tensor,
						  .round = round,
						  .operation = OPERATION_PUSH_PULL,
						  .reduction = REDUCTION_SUM,
						  .input = &inputs[i],
						  .output = &outputs[i],
						  .input_count = n,
						  .output_count = n,
					  });
	}
	for (uint32_t i = 0; i < world->n; i++) {
		if (outputs[i].kind == MEMORY_MEMFD)
			ASSERT_OK(trainer_wait(&world->trainers[i], slots[i], NULL));
		else
			trainer_wait_stream(&world->trainers[i], slots[i]);
		memory_read(&world->trainers[i], &outputs[i], 0, got, n * sizeof(*got));
		for (uint64_t k = 0; k < n; k++)
			if (got[k] != sum_at(k, world->n, seed))
				test_fail(__FILE__, __LINE__,
					  "rank %u: element %" PRIu64 " of %" PRIu64
					  " is %d, not %d",
					  i, k, n, got[k], sum_at(k, world->n, seed));
		if (outputs[i].kind != MEMORY_MEMFD)
			ASSERT_OK(trainer_wait(&world->trainers[i], slots[i], NULL));
	}
	for (uint32_t i = 0; i < world->n; i++)
		free(data[i]);
	free(got);
}

static void new_memories(struct world *world, struct memory *memories, enum memory_kind kind,
			 uint64_t len)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_new_memory(&world->trainers[i], &memories[i], kind, len);
}

static void free_memories(struct world *world, struct memory *memories)
{
	for (uint32_t i = 0; i < world->n; i++) {
		ASSERT_OK(trainer_answer(&world->trainers[i],
					 trainer_unshare(&world->trainers[i], &memories[i]), NULL));
		memory_free(&memories[i]);
	}
}

/* What the driver was asked for, by its trace. */
static void expect_log(const struct world *world, const struct options *options)
{
	_cleanup_(freep) char *log = test_daemon_log(&world->daemon);

	if (options->log_has)
		ASSERT_CONTAINS(log, options->log_has);
	if (options->log_lacks && strstr(log, options->log_lacks))
		test_fail(__FILE__, __LINE__, "the driver was asked for %s", options->log_lacks);
}

static void sums(const struct options *options, enum memory_kind input_kind,
		 enum memory_kind output_kind)
{
	static const uint64_t sizes[] = { 1, 3, 1024, 32768, 32769, 300007 };
	struct memory inputs[RANKS_MAX], outputs[RANKS_MAX];
	struct world world;
	char name[16];

	world_open(&world, options);
	new_memories(&world, inputs, input_kind, 300007 * 4 + 64);
	new_memories(&world, outputs, output_kind, 300007 * 4 + 64);
	for (uint32_t i = 0; i < ARRAY_SIZE(sizes); i++) {
		(void)snprintf(name, sizeof(name), "t%u", i);
		declare_all(&world, i + 1, name, DTYPE_INT32, sizes[i]);
		push_pull(&world, inputs, outputs, i + 1, 1, sizes[i]);
		push_pull(&world, inputs, inputs, i + 1, 2, sizes[i]);
	}
	free_memories(&world, inputs);
	free_memories(&world, outputs);
	world_leave(&world);
	expect_log(&world, options);
	world_close(&world);
}

TEST(one_rank_gets_its_own_values)
{
	sums(&(struct options){ .n = 1 }, MEMORY_CUDA_IPC, MEMORY_CUDA_IPC);
}

TEST(ranks_on_four_devices)
{
	sums(&(struct options){ .n = 4, .gpu_reduce = GPU_REDUCE_HOST }, MEMORY_CUDA_IPC,
	     MEMORY_CUDA_FD);
}

TEST(ranks_on_one_device)
{
	sums(&(struct options){ .n = 3, .one_device = true }, MEMORY_CUDA_FD, MEMORY_CUDA_IPC);
}

TEST(the_plan_for_the_host_uses_no_nccl)
{
	sums(&(struct options){ .n = 4, .gpu_reduce = GPU_REDUCE_HOST, .log_lacks = "ncclComm" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_IPC);
}

TEST(nvlink_reduces_on_the_devices_alone)
{
	sums(&(struct options){ .n = 4, .log_has = "ncclAllReduce", .log_lacks = "cuMemcpy" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
	sums(&(struct options){ .n = 3,
				.gpu_reduce = GPU_REDUCE_NCCL,
				.topology = "system",
				.log_has = "ncclAllReduce" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

TEST(devices_behind_switches_are_groups)
{
	sums(&(struct options){ .n = 4, .topology = "switch:2", .log_has = "ncclReduceScatter" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
	sums(&(struct options){ .n = 3,
				.topology = "switch:2",
				.log_has = "ncclAllGather",
				.gpu_reduce = GPU_REDUCE_SWITCH },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

TEST(devices_that_have_nothing_in_common_are_reduced_by_the_host)
{
	sums(&(struct options){ .n = 4, .topology = "system", .log_lacks = "ncclCommInit" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

TEST(groups_through_a_server)
{
	static const char *const args[] = { "--set", "gpu_staging=1M", NULL };

	sums(&(struct options){ .n = 4, .force_distributed = true, .log_has = "ncclReduceScatter" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
	sums(&(struct options){ .n = 4,
				.force_distributed = true,
				.topology = "switch:2",
				.args = args,
				.log_has = "ncclBroadcast" },
	     MEMORY_CUDA_FD, MEMORY_CUDA_IPC);
}

/* Sums go to the host and back by way of some devices alone: those asked for, or one of each switch. */
TEST(roots_of_a_group)
{
	static const char *const args[] = { "--set", "gpu_staging=1M", NULL };

	sums(&(struct options){ .n = 4,
				.force_distributed = true,
				.gpu_roots = 0x6,
				.args = args,
				.log_has = "in groups 0000, with roots 0110",
				.log_lacks = "ncclReduceScatter" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
	sums(&(struct options){ .n = 4,
				.force_distributed = true,
				.topology = "nvlink+switch:2",
				.gpu_reduce = GPU_REDUCE_ROOTS,
				.log_has = "in groups 0000, with roots 1010",
				.log_lacks = "ncclAllGather" },
	     MEMORY_CUDA_FD, MEMORY_CUDA_IPC);
	/* Each switch a group: one has a root, the other not. */
	sums(&(struct options){ .n = 4,
				.topology = "switch:2",
				.gpu_roots = 0x1,
				.log_has = "in groups 0011, with roots 1011" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

TEST(roots_where_nothing_leaves_the_devices)
{
	sums(&(struct options){ .n = 3,
				.gpu_reduce = GPU_REDUCE_ROOTS,
				.topology = "nvlink+switch:2",
				.log_has = "ncclAllReduce",
				.log_lacks = "cuMemcpy" },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

/* Averages of float32, whose sums are exact: as on the host, but for the division. */
TEST(averages)
{
	enum { N = 4, LEN = 70001 };
	static float data[N][LEN], got[LEN];
	struct memory memories[RANKS_MAX];
	uint32_t slots[N];

	for (int way = 0; way < 4; way++) {
		struct world world;

		world_open(&world, &(struct options){
					   .n = N,
					   .force_distributed = way & 1,
					   .topology = way & 2 ? "switch:2" : NULL,
				   });
		new_memories(&world, memories, MEMORY_CUDA_IPC, sizeof(got));
		declare_all(&world, 1, "t", DTYPE_FLOAT32, LEN);
		for (uint32_t i = 0; i < N; i++) {
			for (uint32_t k = 0; k < LEN; k++)
				data[i][k] = (float)((k * 7 + i * 13) % 1024);
			memory_write(&world.trainers[i], &memories[i], 0, data[i], sizeof(got));
			slots[i] = trainer_submit(&world.trainers[i],
						  &(struct submit){
							  .tensor = 1,
							  .round = 1,
							  .operation = OPERATION_PUSH_PULL,
							  .reduction = REDUCTION_AVERAGE,
							  .input = &memories[i],
							  .output = &memories[i],
							  .input_count = LEN,
							  .output_count = LEN,
						  });
		}
		for (uint32_t i = 0; i < N; i++) {
			ASSERT_OK(trainer_wait(&world.trainers[i], slots[i], NULL));
			memory_read(&world.trainers[i], &memories[i], 0, got, sizeof(got));
			for (uint32_t k = 0; k < LEN; k++) {
				float sum = data[0][k] + data[1][k] + data[2][k] + data[3][k];

				/* A fourth of it is exact as well. */
				if (got[k] != sum / N)
					test_fail(__FILE__, __LINE__, "rank %u: element %u is %g",
						  i, k, (double)got[k]);
			}
		}
		free_memories(&world, memories);
		world_leave(&world);
		world_close(&world);
	}
}

TEST(through_a_server)
{
	sums(&(struct options){ .n = 1, .force_distributed = true }, MEMORY_CUDA_IPC,
	     MEMORY_CUDA_IPC);
	sums(&(struct options){ .n = 3, .force_distributed = true, .gpu_reduce = GPU_REDUCE_HOST },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_FD);
}

TEST(little_staging_is_enough)
{
	static const char *const args[] = { "--set", "gpu_staging=1M", NULL };

	sums(&(struct options){ .n = 4, .args = args, .gpu_reduce = GPU_REDUCE_HOST },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_IPC);
	sums(&(struct options){ .n = 4,
				.args = args,
				.force_distributed = true,
				.gpu_reduce = GPU_REDUCE_HOST },
	     MEMORY_CUDA_IPC, MEMORY_CUDA_IPC);
}

/* -- Order -------------------------------------------------------------------------------------------------------- */

/* A word that streams wait for until the host opens it: of the last slot, which no test here uses. */
#define GATE (SHM_SLOTS - 1)

static void gate_close(struct trainer *trainer)
{
	atomic_store(&shm_flags(trainer->shm)[GATE].ready, 0);
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamWaitValue32(trainer->stream, trainer->flags + GATE * sizeof(struct shm_flag), 1,
			       CU_STREAM_WAIT_VALUE_GEQ));
}

static void gate_open(struct trainer *trainer)
{
	atomic_store(&shm_flags(trainer->shm)[GATE].ready, 1);
}

static uint32_t submit_sum(struct trainer *trainer, const struct memory *memory, uint64_t offset,
			   uint32_t tensor, uint64_t round, uint64_t n)
{
	return trainer_submit(trainer, &(struct submit){
					       .tensor = tensor,
					       .round = round,
					       .operation = OPERATION_PUSH_PULL,
					       .reduction = REDUCTION_SUM,
					       .input = memory,
					       .output = memory,
					       .input_offset = offset,
					       .output_offset = offset,
					       .input_count = n,
					       .output_count = n,
				       });
}

static void expect_sum(struct trainer *trainer, const struct memory *memory, uint64_t offset,
		       uint32_t seed, uint64_t n)
{
	int32_t *got = malloc(n * sizeof(*got));

	ASSERT_TRUE(got);
	memory_read(trainer, memory, offset, got, n * sizeof(*got));
	for (uint64_t k = 0; k < n; k++)
		if (got[k] != sum_at(k, trainer->size, seed))
			test_fail(__FILE__, __LINE__, "rank %u: element %" PRIu64 " is %d, not %d",
				  trainer->rank, k, got[k], sum_at(k, trainer->size, seed));
	free(got);
}

/* Locked memory: a copy from any other would wait for the stream. */
static void *new_locked(struct trainer *trainer, uint64_t len)
{
	void *data;

	CU(cuCtxSetCurrent(trainer->context));
	CU(cuMemHostAlloc(&data, len, CU_MEMHOSTALLOC_PORTABLE));
	return data;
}

TEST(a_submission_waits_for_its_stream)
{
	struct memory memories[RANKS_MAX];
	struct world world;
	uint32_t slots[2];

	world_open(&world, &(struct options){ .n = 2 });
	new_memories(&world, memories, MEMORY_CUDA_IPC, 5000 * 4);
	declare_all(&world, 1, "t", DTYPE_INT32, 5000);
	for (uint32_t i = 0; i < 2; i++) {
		int32_t *data = new_locked(&world.trainers[i], 5000 * 4);

		fill(data, 5000, i, 1);
		gate_close(&world.trainers[i]);
		memory_write(&world.trainers[i], &memories[i], 0, data, 5000 * 4);
		slots[i] = submit_sum(&world.trainers[i], &memories[i], 0, 1, 1, 5000);
		trainer_wait_stream(&world.trainers[i], slots[i]);
	}
	gate_open(&world.trainers[1]);
	/* One rank's stream is not there yet. */
	for (uint32_t i = 0; i < 2; i++)
		ASSERT_TRUE(!trainer_ended(&world.trainers[i], slots[i]));
	gate_open(&world.trainers[0]);
	for (uint32_t i = 0; i < 2; i++) {
		expect_sum(&world.trainers[i], &memories[i], 0, 1, 5000);
		ASSERT_OK(trainer_wait(&world.trainers[i], slots[i], NULL));
	}
	free_memories(&world, memories);
	world_leave(&world);
	world_close(&world);
}

TEST(ranks_may_submit_in_different_orders)
{
	static int32_t data[2][2][1000];
	struct memory memories[RANKS_MAX];
	struct world world;
	uint32_t slots[2][2];

	world_open(&world, &(struct options){ .n = 2 });
	new_memories(&world, memories, MEMORY_CUDA_IPC, sizeof(data[0]));
	declare_all(&world, 1, "a", DTYPE_INT32, 1000);
	declare_all(&world, 2, "b", DTYPE_INT32, 1000);
	for (uint64_t round = 1; round <= 20; round++) {
		for (uint32_t i = 0; i < 2; i++) {
			for (uint32_t k = 0; k < 2; k++) {
				fill(data[i][k], 1000, i, k);
				memory_write(&world.trainers[i], &memories[i], k * 4000, data[i][k],
					     4000);
			}
		}
		/* Rank 0's stream comes to b only after it has the result of a; rank 1 gives b first. */
		slots[0][0] = submit_sum(&world.trainers[0], &memories[0], 0, 1, round, 1000);
		trainer_wait_stream(&world.trainers[0], slots[0][0]);
		slots[0][1] = submit_sum(&world.trainers[0], &memories[0], 4000, 2, round, 1000);
		slots[1][1] = submit_sum(&world.trainers[1], &memories[1], 4000, 2, round, 1000);
		slots[1][0] = submit_sum(&world.trainers[1], &memories[1], 0, 1, round, 1000);
		for (uint32_t i = 0; i < 2; i++) {
			for (uint32_t k = 0; k < 2; k++) {
				ASSERT_OK(trainer_wait(&world.trainers[i], slots[i][k], NULL));
				expect_sum(&world.trainers[i], &memories[i], k * 4000, k, 1000);
			}
		}
	}
	free_memories(&world, memories);
	world_leave(&world);
	world_close(&world);
}

TEST(many_submissions_wait_for_their_streams)
{
	enum { N = 100, LEN = 400 };
	static uint32_t slots[2][N];
	struct memory memories[RANKS_MAX];
	struct world world;
	char name[16];

	world_open(&world, &(struct options){ .n = 2 });
	new_memories(&world, memories, MEMORY_CUDA_FD, N * LEN * 4);
	for (uint32_t k = 0; k < N; k++) {
		(void)snprintf(name, sizeof(name), "t%u", k);
		declare_all(&world, k + 1, name, DTYPE_INT32, LEN);
	}
	for (uint32_t i = 0; i < 2; i++) {
		int32_t *data = new_locked(&world.trainers[i], N * LEN * 4);

		gate_close(&world.trainers[i]);
		/* One of them the other way round. */
		for (uint32_t j = 0; j < N; j++) {
			uint32_t k = i ? N - 1 - j : j;

			fill(data + k * LEN, LEN, i, k);
			memory_write(&world.trainers[i], &memories[i], k * LEN * 4, data + k * LEN,
				     LEN * 4);
			slots[i][k] = submit_sum(&world.trainers[i], &memories[i], k * LEN * 4,
						 k + 1, 1, LEN);
		}
	}
	for (uint32_t i = 0; i < 2; i++)
		gate_open(&world.trainers[i]);
	for (uint32_t i = 0; i < 2; i++)
		for (uint32_t k = 0; k < N; k++)
			ASSERT_OK(trainer_wait(&world.trainers[i], slots[i][k], NULL));
	for (uint32_t i = 0; i < 2; i++)
		for (uint32_t k = 0; k < N; k++)
			expect_sum(&world.trainers[i], &memories[i], k * LEN * 4, k, LEN);
	free_memories(&world, memories);
	world_leave(&world);
	world_close(&world);
}

/* -- Operations --------------------------------------------------------------------------------------------------- */

/* Each operation on 3 ranks of int32; kinds[i]: of rank i's memory. */
static void operations(const struct options *options, const enum memory_kind kinds[3])
{
	enum { N = 3, LEN = 40001, ALL = N * LEN };
	static int32_t data[N][ALL], got[ALL];
	static const enum operation list[] = { OPERATION_BROADCAST, OPERATION_ALL_GATHER,
					       OPERATION_REDUCE_SCATTER, OPERATION_ALL_TO_ALL };
	struct memory inputs[RANKS_MAX], outputs[RANKS_MAX];
	uint32_t slots[N];
	struct world world;

	world_open(&world, options);
	for (uint32_t i = 0; i < N; i++) {
		trainer_new_memory(&world.trainers[i], &inputs[i], kinds[i], sizeof(data[0]));
		trainer_new_memory(&world.trainers[i], &outputs[i], kinds[i], sizeof(data[0]));
		fill(data[i], ALL, i, 5);
	}
	declare_all(&world, 1, "broadcast", DTYPE_INT32, LEN);
	declare_all(&world, 2, "gather", DTYPE_INT32, ELEMENTS_VARIABLE);
	declare_all(&world, 3, "scatter", DTYPE_INT32, ALL);
	declare_all(&world, 4, "exchange", DTYPE_INT32, ELEMENTS_VARIABLE);
	for (uint32_t op = 0; op < ARRAY_SIZE(list); op++) {
		bool whole_in =
			list[op] == OPERATION_REDUCE_SCATTER || list[op] == OPERATION_ALL_TO_ALL;
		bool whole_out =
			list[op] == OPERATION_ALL_GATHER || list[op] == OPERATION_ALL_TO_ALL;

		for (uint32_t i = 0; i < N; i++) {
			bool has_input = list[op] != OPERATION_BROADCAST || i == 1;

			memory_write(&world.trainers[i], &inputs[i], 0, data[i], sizeof(data[i]));
			slots[i] = trainer_submit(
				&world.trainers[i],
				&(struct submit){
					.tensor = op + 1,
					.round = 1,
					.operation = list[op],
					.reduction = list[op] == OPERATION_REDUCE_SCATTER
							     ? REDUCTION_SUM
							     : 0,
					.root = list[op] == OPERATION_BROADCAST,
					.input = has_input ? &inputs[i] : NULL,
					.output = &outputs[i],
					.input_count = !has_input ? 0
						       : whole_in ? ALL
								  : LEN,
					.output_count = whole_out ? ALL : LEN,
				});
		}
		for (uint32_t i = 0; i < N; i++) {
			char text[ERROR_TEXT_MAX + 1];

			if (trainer_wait(&world.trainers[i], slots[i], text))
				test_fail(__FILE__, __LINE__, "%s: rank %u: %s",
					  operation_name(list[op]), i, text);
			memory_read(&world.trainers[i], &outputs[i], 0, got, sizeof(got));
			for (uint32_t k = 0; k < (whole_out ? ALL : LEN); k++) {
				int32_t expected = list[op] == OPERATION_BROADCAST ? data[1][k]
						   : list[op] == OPERATION_ALL_GATHER
							   ? data[k / LEN][k % LEN]
						   : list[op] == OPERATION_REDUCE_SCATTER
							   ? sum_at(i * LEN + k, N, 5)
							   : data[k / LEN][i * LEN + k % LEN];

				if (got[k] != expected)
					test_fail(__FILE__, __LINE__,
						  "%s: rank %u: element %u is %d, not %d",
						  operation_name(list[op]), i, k, got[k], expected);
			}
		}
	}
	free_memories(&world, inputs);
	free_memories(&world, outputs);
	world_leave(&world);
	world_close(&world);
}

TEST(other_operations)
{
	static const enum memory_kind device[] = { MEMORY_CUDA_IPC, MEMORY_CUDA_FD,
						   MEMORY_CUDA_IPC };
	static const enum memory_kind mixed[] = { MEMORY_MEMFD, MEMORY_CUDA_FD, MEMORY_CUDA_IPC };
	static const char *const args[] = { "--set", "gpu_staging=1M", NULL };

	operations(&(struct options){ .n = 3 }, device);
	operations(&(struct options){ .n = 3, .force_distributed = true }, device);
	operations(&(struct options){ .n = 3, .force_distributed = true, .args = args }, device);
	operations(&(struct options){ .n = 3 }, mixed);
	operations(&(struct options){ .n = 3, .force_distributed = true, .args = args }, mixed);
}

TEST(ranks_of_the_host_among_them)
{
	struct memory memories[RANKS_MAX];
	struct world world;

	for (int distributed = 0; distributed < 2; distributed++) {
		world_open(&world, &(struct options){ .n = 3, .force_distributed = distributed });
		trainer_new_memory(&world.trainers[0], &memories[0], MEMORY_MEMFD, 1 << 20);
		trainer_new_memory(&world.trainers[1], &memories[1], MEMORY_CUDA_FD, 1 << 20);
		trainer_new_memory(&world.trainers[2], &memories[2], MEMORY_CUDA_IPC, 1 << 20);
		declare_all(&world, 1, "t", DTYPE_INT32, 100001);
		push_pull(&world, memories, memories, 1, 1, 100001);
		free_memories(&world, memories);
		world_leave(&world);
		world_close(&world);
	}
}

/* -- What is refused ---------------------------------------------------------------------------------------------- */

static void expect_refused(struct trainer *trainer, struct memory *memory, int status,
			   const char *words)
{
	char text[ERROR_TEXT_MAX + 1];

	ASSERT_EQ(trainer_answer(trainer, trainer_share(trainer, memory), text), status);
	ASSERT_CONTAINS(text, words);
}

TEST(what_cannot_be_imported_is_refused_with_words)
{
	struct memory memory, good;
	struct trainer *trainer;
	struct world world;
	CUuuid uuid;

	world_open(&world, &(struct options){ .n = 1 });
	trainer = &world.trainers[0];
	memory_new(trainer, &memory, MEMORY_CUDA_IPC, 1 << 20);
	uuid = trainer->uuid;
	memset(trainer->uuid.bytes, 0x5a, sizeof(uuid.bytes));
	expect_refused(trainer, &memory, -ENODEV, "no device with this UUID");
	trainer->uuid = uuid;
	memory.len <<= 10;
	expect_refused(trainer, &memory, -EINVAL, "less than the");
	memory.len = UINT64_C(1) << 60;
	expect_refused(trainer, &memory, -EINVAL, "cannot be shared");
	memory.len = 1 << 20;
	/* Nothing of it is left: the number is free, and the job goes on. */
	ASSERT_OK(trainer_answer(trainer, trainer_share(trainer, &memory), NULL));
	expect_refused(trainer, &memory, -EEXIST, "shared already");
	trainer_new_memory(trainer, &good, MEMORY_CUDA_FD, 1 << 20);
	declare_all(&world, 1, "t", DTYPE_INT32, 1000);
	push_pull(&world, &good, &memory, 1, 1, 1000);
	free_memories(&world, &good);
	free_memories(&world, &memory);
	world_leave(&world);
	world_close(&world);
}

TEST(memory_shared_before_the_job_is_imported_when_it_is_used)
{
	struct options options = { .n = 1 };
	struct memory memory;
	struct trainer *trainer;
	struct world world;

	world_open(&world, &options);
	world_leave(&world);
	trainer = &world.trainers[0];
	trainer_new_memory(trainer, &memory, MEMORY_CUDA_IPC, 1 << 20);
	for (int run = 0; run < 3; run++) {
		join_all(&world, "again", &options);
		declare_all(&world, 1, "t", DTYPE_INT32, 1000);
		push_pull(&world, &memory, &memory, 1, 1, 1000);
		world_leave(&world);
	}
	free_memories(&world, &memory);
	world_close(&world);
}

TEST(a_stream_that_never_comes_to_it)
{
	struct memory memories[RANKS_MAX];
	char text[ERROR_TEXT_MAX + 1];
	struct world world;
	uint32_t slots[2];

	world_open(&world, &(struct options){ .n = 2, .request_timeout_ms = 3000 });
	new_memories(&world, memories, MEMORY_CUDA_IPC, 4096);
	declare_all(&world, 1, "t", DTYPE_INT32, 1000);
	gate_close(&world.trainers[1]);
	for (uint32_t i = 0; i < 2; i++)
		slots[i] = submit_sum(&world.trainers[i], &memories[i], 0, 1, 1, 1000);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(trainer_wait(&world.trainers[i], slots[i], text), -ETIME);
		ASSERT_CONTAINS(text, "the stream of rank 1 did not come to it");
		/* The other's is let go. */
		trainer_wait_stream(&world.trainers[i], slots[i]);
	}
	gate_open(&world.trainers[1]);
	for (uint32_t i = 0; i < 2; i++)
		CU(cuStreamSynchronize(world.trainers[i].stream));
	free_memories(&world, memories);
	world_leave(&world);
	world_close(&world);
}

/* -- Deaths and faults -------------------------------------------------------------------------------------------- */

/* Starts a daemon whose environment has one variable more. */
static void world_open_with(struct world *world, const struct options *options, const char *name,
			    const char *value)
{
	ASSERT_OK(setenv(name, value, 1));
	*world =
		(struct world){ .daemon = { .name = "a", .args = options->args }, .n = options->n };
	test_daemon_start(&world->daemon);
	ASSERT_OK(unsetenv(name));
	for (uint32_t i = 0; i < world->n; i++)
		trainer_open(&world->trainers[i], world->daemon.socket, (int)i);
	join_all(world, "job", options);
}

/* The newest worker that the daemon has started. */
static pid_t worker_pid(const struct test_daemon *daemon)
{
	static const char words[] = "GPU worker: pid ";
	_cleanup_(freep) char *log = test_daemon_log(daemon);
	const char *last = NULL, *at = log;

	while ((at = strstr(at, words)))
		last = at += sizeof(words) - 1;
	ASSERT_TRUE(last);
	return atoi(last);
}

static uint32_t submit_both(struct world *world, struct memory *memories, uint64_t round,
			    uint64_t n)
{
	uint32_t slot = 0;

	for (uint32_t i = 0; i < world->n; i++)
		slot = submit_sum(&world->trainers[i], &memories[i], 0, 1, round, n);
	return slot;
}

/* All ranks' requests end with an error that has these words, and their streams are let go. */
static void expect_failed(struct world *world, struct memory *memories, const char *words)
{
	uint32_t slots[RANKS_MAX];
	char text[ERROR_TEXT_MAX + 1];

	for (uint32_t i = 0; i < world->n; i++) {
		slots[i] = submit_sum(&world->trainers[i], &memories[i], 0, 1, 1, 100000);
		trainer_wait_stream(&world->trainers[i], slots[i]);
	}
	for (uint32_t i = 0; i < world->n; i++) {
		if (!trainer_wait(&world->trainers[i], slots[i], text))
			test_fail(__FILE__, __LINE__, "rank %u: no error: %s", i, words);
		ASSERT_CONTAINS(text, words);
		CU(cuStreamSynchronize(world->trainers[i].stream));
	}
}

static void new_tensor(struct world *world, struct memory *memories)
{
	new_memories(world, memories, MEMORY_CUDA_IPC, 400000);
	declare_all(world, 1, "t", DTYPE_INT32, 100000);
}

/* The next job of the same trainers, in the same memory. */
static void expect_next_job(struct world *world, struct memory *memories)
{
	join_all(world, "next", &(struct options){ 0 });
	declare_all(world, 1, "t", DTYPE_INT32, 100000);
	push_pull(world, memories, memories, 1, 1, 100000);
	free_memories(world, memories);
	world_leave(world);
}

TEST(a_worker_that_is_killed_ends_its_job_alone)
{
	struct memory memories[RANKS_MAX], other_memory;
	struct trainer_job other_job = {
		.name = "other", .size = 1, .local_size = 1, .n_nodes = 1
	};
	struct trainer other;
	struct world world, alone;
	pid_t worker;

	world_open(&world, &(struct options){ .n = 2 });
	new_tensor(&world, memories);
	worker = worker_pid(&world.daemon);
	/* Another job, which has a worker of its own. */
	trainer_open(&other, world.daemon.socket, 2);
	ASSERT_OK(trainer_answer(&other, trainer_join(&other, &other_job), NULL));
	trainer_new_memory(&other, &other_memory, MEMORY_CUDA_FD, 400000);
	trainer_declare(&other, 1, "t", DTYPE_INT32, 100000);
	alone = (struct world){ .trainers = { other }, .n = 1 };
	push_pull(&alone, &other_memory, &other_memory, 1, 1, 100000);

	ASSERT_OK(kill(worker, SIGKILL));
	expect_failed(&world, memories, "killed by signal 9");
	push_pull(&alone, &other_memory, &other_memory, 1, 2, 100000);
	ASSERT_TRUE(worker_pid(&world.daemon) != worker);
	expect_next_job(&world, memories);
	push_pull(&alone, &other_memory, &other_memory, 1, 3, 100000);
	free_memories(&alone, &other_memory);
	trainer_close(&alone.trainers[0]);
	world_close(&world);
}

/* Of calls that are made when a stream is not there yet, or when NCCL is stuck: their names are in the job's error. */
TEST_TIMEOUT(calls_that_fail_while_something_is_waited_for, 240)
{
	static const struct {
		const char *fault, *words;
		bool gated;
	} cases[] = {
		{ "cuStreamCreateWithPriority:5:2", "cuStreamCreate", true },
		{ "cuStreamWaitValue32:1:1", "cuStreamWaitValue32", true },
		{ "cuStreamWaitValue32:2:1", "cuStreamWaitValue32", true },
		{ "cuLaunchHostFunc:1:1", "cuLaunchHostFunc", true },
		{ "@nccl:1:6", "nccl", false },
	};
	struct memory memories[RANKS_MAX];
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slots[RANKS_MAX];
	struct world world;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		world_open_with(&world, &(struct options){ .n = 2 }, "FAKECUDA_FAIL",
				cases[i].fault);
		new_tensor(&world, memories);
		for (uint32_t k = 0; k < 2; k++) {
			if (cases[i].gated)
				gate_close(&world.trainers[k]);
			slots[k] = submit_sum(&world.trainers[k], &memories[k], 0, 1, 1, 100000);
			trainer_wait_stream(&world.trainers[k], slots[k]);
		}
		for (uint32_t k = 0; k < 2; k++) {
			if (!trainer_wait(&world.trainers[k], slots[k], text))
				test_fail(__FILE__, __LINE__, "%s: no error", cases[i].fault);
			ASSERT_CONTAINS(text, cases[i].words);
			if (cases[i].gated)
				gate_open(&world.trainers[k]);
			CU(cuStreamSynchronize(world.trainers[k].stream));
		}
		free_memories(&world, memories);
		world_close(&world);
	}
}

/* Calls of the worker that may fail in the middle of a job, which are to be named in its error. */
TEST_TIMEOUT(calls_that_fail, 240)
{
	static const struct {
		const char *fault, *words;
	} cases[] = {
		{ "cuDevicePrimaryCtxRetain:1:2", "cuDevicePrimaryCtxRetain" },
		{ "cuCtxSetCurrent:1:201", "cuCtxSetCurrent" },
		{ "cuStreamCreateWithPriority:2:2", "cuStreamCreateWithPriority" },
		{ "cuMemHostRegister:1:2", "cuMemHostRegister" },
		{ "cuMemHostRegister:2:2", "cuMemHostRegister" },
		{ "cuMemHostGetDevicePointer:1:1", "cuMemHostGetDevicePointer" },
		{ "cuMemcpyDtoHAsync:1:719", "cuMemcpyDtoHAsync" },
		{ "cuMemcpyHtoDAsync:2:1", "cuMemcpyHtoDAsync" },
		{ "cuEventCreate:1:2", "cuEventCreate" },
		{ "cuEventRecord:3:400", "cuEventRecord" },
		{ "cuEventSynchronize:2:700", "CUDA_ERROR_ILLEGAL_ADDRESS" },
		{ "cuStreamWriteValue32:1:1", "cuStreamWriteValue32" },
		{ "@copy:3:700", "CUDA_ERROR_ILLEGAL_ADDRESS" },
		{ "@write:1:719", "CUDA_ERROR_LAUNCH_FAILED" },
		{ "@copy:2:kill", "killed by signal 9" },
		{ "ncclCommInitAll:1:2", "ncclCommInitAll" },
		{ "ncclGroupStart:2:3", "ncclGroupStart" },
		{ "ncclAllReduce:1:3", "ncclAllReduce" },
		{ "ncclGroupEnd:1:1", "ncclGroupEnd" },
	};
	struct memory memories[RANKS_MAX];
	struct world world;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		bool at_share = i < 6;
		char text[ERROR_TEXT_MAX + 1];

		world_open_with(&world,
				&(struct options){ .n = 2,
						   .gpu_reduce = strncmp(cases[i].fault, "nccl", 4)
									 ? GPU_REDUCE_HOST
									 : GPU_REDUCE_AUTO },
				"FAKECUDA_FAIL", cases[i].fault);
		if (at_share) {
			for (uint32_t k = 0; k < 2; k++)
				memory_new(&world.trainers[k], &memories[k], MEMORY_CUDA_IPC, 4096);
			if (!trainer_answer(&world.trainers[0],
					    trainer_share(&world.trainers[0], &memories[0]), text))
				test_fail(__FILE__, __LINE__, "%s: no error", cases[i].fault);
			ASSERT_CONTAINS(text, cases[i].words);
			for (uint32_t k = 0; k < 2; k++)
				memory_free(&memories[k]);
		} else {
			new_tensor(&world, memories);
			expect_failed(&world, memories, cases[i].words);
			free_memories(&world, memories);
		}
		world_close(&world);
	}
}

/* At named points: before each kind of work is put into a stream. */
TEST(a_worker_that_dies_at_a_named_point)
{
#ifdef BPS_FAILPOINTS
	static const char *const points[] = { "gpu-down=kill@3", "gpu-up=kill@3", "gpu-tell=kill",
					      "gpu-collective=kill@2" };
	struct memory memories[RANKS_MAX];
	struct world world;

	for (size_t i = 0; i < ARRAY_SIZE(points); i++) {
		world_open_with(&world,
				&(struct options){ .n = 2,
						   .gpu_reduce = i < 3 ? GPU_REDUCE_HOST
								       : GPU_REDUCE_AUTO },
				"BPS_FAILPOINTS", points[i]);
		new_tensor(&world, memories);
		expect_failed(&world, memories, "killed by signal 9");
		free_memories(&world, memories);
		world_close(&world);
	}
#else
	TEST_SKIP("built without failpoints");
#endif
}

TEST(an_import_that_fails_leaves_the_job_alone)
{
	static const struct {
		enum memory_kind kind;
		const char *fault, *words;
	} cases[] = {
		{ MEMORY_CUDA_IPC, "cuIpcOpenMemHandle:1:205", "cuIpcOpenMemHandle" },
		{ MEMORY_CUDA_FD, "cuMemImportFromShareableHandle:1:1", "VMM" },
		{ MEMORY_CUDA_FD, "cuMemAddressReserve:1:2", "CUDA_ERROR_OUT_OF_MEMORY" },
		{ MEMORY_CUDA_FD, "cuMemMap:1:1", "CUDA_ERROR_INVALID_VALUE" },
		{ MEMORY_CUDA_FD, "cuMemSetAccess:1:1", "CUDA_ERROR_INVALID_VALUE" },
	};
	struct memory memory;
	struct world world;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		world_open_with(&world, &(struct options){ .n = 1 }, "FAKECUDA_FAIL",
				cases[i].fault);
		memory_new(&world.trainers[0], &memory, cases[i].kind, 400000);
		expect_refused(&world.trainers[0], &memory, -EINVAL, cases[i].words);
		/* The second time nothing is in the way. */
		ASSERT_OK(trainer_answer(&world.trainers[0],
					 trainer_share(&world.trainers[0], &memory), NULL));
		declare_all(&world, 1, "t", DTYPE_INT32, 100000);
		push_pull(&world, &memory, &memory, 1, 1, 100000);
		free_memories(&world, &memory);
		world_leave(&world);
		world_close(&world);
	}
}

TEST(a_call_that_hangs_ends_with_its_worker)
{
	static const char *const args[] = { "--set", "gpu_timeout=1s", NULL };
	struct memory memories[RANKS_MAX];
	struct world world;

	world_open_with(&world,
			&(struct options){ .n = 2, .args = args, .gpu_reduce = GPU_REDUCE_HOST },
			"FAKECUDA_FAIL", "@copy:2:hang");
	new_tensor(&world, memories);
	expect_failed(&world, memories, "nothing came of its work");
	free_memories(&world, memories);
	world_close(&world);
}

/* A trainer in a process of its own, rank 1 of 2, which is killed. */
static pid_t start_victim(const char *socket, const char *how)
{
	pid_t pid = fork();

	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		struct trainer trainer;
		struct trainer_job job = { .name = "job",
					   .rank = 1,
					   .size = 2,
					   .local_rank = 1,
					   .local_size = 2,
					   .n_nodes = 1 };
		struct memory memory;

		trainer_open(&trainer, socket, 1);
		ASSERT_OK(trainer_answer(&trainer, trainer_join(&trainer, &job), NULL));
		trainer_new_memory(&trainer, &memory, MEMORY_CUDA_IPC, 400000);
		trainer_declare(&trainer, 1, "t", DTYPE_INT32, 100000);
		if (!strcmp(how, "before its stream"))
			gate_close(&trainer);
		if (strcmp(how, "before it submits")) {
			(void)submit_sum(&trainer, &memory, 0, 1, 1, 100000);
			if (!strcmp(how, "in the middle"))
				trainer_wait(&trainer,
					     submit_sum(&trainer, &memory, 0, 1, 2, 100000), NULL);
		}
		for (;;)
			(void)pause();
	}
	return pid;
}

/* Another job of two others. */
static void expect_new_trainers(const struct test_daemon *daemon)
{
	struct memory memories[RANKS_MAX];
	struct world world = { .n = 2 };

	for (uint32_t i = 0; i < 2; i++)
		trainer_open(&world.trainers[i], daemon->socket, (int)i);
	join_all(&world, "job", &(struct options){ 0 });
	new_tensor(&world, memories);
	push_pull(&world, memories, memories, 1, 1, 100000);
	free_memories(&world, memories);
	world_leave(&world);
	for (uint32_t i = 0; i < 2; i++)
		trainer_close(&world.trainers[i]);
}

/* The process is made before this one calls CUDA. */
static void kill_trainer(const char *how)
{
	struct trainer_job job = { .name = "job", .size = 2, .local_size = 2, .n_nodes = 1 };
	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a" };
	bool slow = !strcmp(how, "in the middle");
	char text[ERROR_TEXT_MAX + 1];
	struct trainer trainer;
	struct memory memory;
	uint32_t slot;
	pid_t victim;

	/* Copies that take their time. */
	ASSERT_OK(setenv("FAKECUDA_DELAY_US", slow ? "20000" : "0", 1));
	test_daemon_start(&daemon);
	ASSERT_OK(unsetenv("FAKECUDA_DELAY_US"));
	victim = start_victim(daemon.socket, how);
	trainer_open(&trainer, daemon.socket, 0);
	ASSERT_OK(trainer_answer(&trainer, trainer_join(&trainer, &job), NULL));
	trainer_new_memory(&trainer, &memory, MEMORY_CUDA_IPC, 400000);
	trainer_declare(&trainer, 1, "t", DTYPE_INT32, 100000);
	slot = submit_sum(&trainer, &memory, 0, 1, 1, 100000);
	if (slow) {
		/* The first round is over, the second moves. */
		ASSERT_OK(trainer_wait(&trainer, slot, NULL));
		slot = submit_sum(&trainer, &memory, 0, 1, 2, 100000);
	}
	trainer_wait_stream(&trainer, slot);
	ASSERT_OK(kill(victim, SIGKILL));
	ASSERT_EQ(waitpid(victim, NULL, 0), victim);
	/* What moved may also have ended well before. */
	if (trainer_wait(&trainer, slot, text) || !slow)
		ASSERT_CONTAINS(text, "rank 1 (pid ");
	CU(cuStreamSynchronize(trainer.stream));
	ASSERT_OK(trainer_answer(&trainer, trainer_unshare(&trainer, &memory), NULL));
	memory_free(&memory);
	trainer_close(&trainer);
	expect_new_trainers(&daemon);
}

TEST(a_trainer_that_is_killed_before_it_submits)
{
	kill_trainer("before it submits");
}

TEST(a_trainer_that_is_killed_before_its_stream_is_there)
{
	kill_trainer("before its stream");
}

TEST(a_trainer_that_is_killed_in_the_middle)
{
	kill_trainer("in the middle");
}

TEST(a_daemon_that_is_killed_lets_streams_go)
{
	struct memory memories[RANKS_MAX];
	struct world world;
	uint32_t slot;
	int pidfd;

	world_open(&world, &(struct options){ .n = 2 });
	new_tensor(&world, memories);
	(void)submit_both(&world, memories, 1, 100000);
	gate_close(&world.trainers[1]);
	for (uint32_t i = 0; i < 2; i++) {
		slot = submit_sum(&world.trainers[i], &memories[i], 0, 1, 2, 100000);
		trainer_wait_stream(&world.trainers[i], slot);
	}
	test_daemon_kill(&world.daemon);
	gate_open(&world.trainers[1]);
	for (uint32_t i = 0; i < 2; i++)
		CU(cuStreamSynchronize(world.trainers[i].stream));
	/* The worker has gone too. */
	pidfd = (int)syscall(434 /* pidfd_open */, worker_pid(&world.daemon), 0);
	if (pidfd >= 0) {
		struct pollfd pollfd = { .fd = pidfd, .events = POLLIN };

		ASSERT_EQ(poll(&pollfd, 1, (int)test_scale_s(60) * 1000), 1);
		(void)close(pidfd);
	}
	for (uint32_t i = 0; i < 2; i++) {
		memory_free(&memories[i]);
		trainer_close(&world.trainers[i]);
	}
}

TEST(without_a_driver_the_daemon_says_so_once)
{
	struct options options = { .n = 0 };
	_cleanup_(freep) char *log = NULL;
	struct world world;

	world_open_with(&world, &options, "LD_LIBRARY_PATH", "");
	log = test_daemon_log(&world.daemon);
	ASSERT_CONTAINS(log, "GPUs: not used");
	world_close(&world);
}
