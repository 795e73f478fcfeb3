/* Memory of devices through a real daemon and its worker, with the double as driver. */
#include "gpu_world.h"

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
	world_new_memories(&world, inputs, input_kind, 300007 * 4 + 64);
	world_new_memories(&world, outputs, output_kind, 300007 * 4 + 64);
	for (uint32_t i = 0; i < ARRAY_SIZE(sizes); i++) {
		(void)snprintf(name, sizeof(name), "t%u", i);
		world_declare(&world, i + 1, name, DTYPE_INT32, sizes[i]);
		world_push_pull(&world, inputs, outputs, i + 1, 1, sizes[i]);
		world_push_pull(&world, inputs, inputs, i + 1, 2, sizes[i]);
	}
	world_free_memories(&world, inputs);
	world_free_memories(&world, outputs);
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
		world_new_memories(&world, memories, MEMORY_CUDA_IPC, sizeof(got));
		world_declare(&world, 1, "t", DTYPE_FLOAT32, LEN);
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
		world_free_memories(&world, memories);
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

static void expect_sum(struct trainer *trainer, const struct memory *memory, uint64_t offset,
		       uint32_t seed, uint64_t n)
{
	int32_t *got = malloc(n * sizeof(*got));

	ASSERT_TRUE(got);
	memory_read(trainer, memory, offset, got, n * sizeof(*got));
	for (uint64_t k = 0; k < n; k++)
		if (got[k] != world_sum_at(k, trainer->size, seed))
			test_fail(__FILE__, __LINE__, "rank %u: element %" PRIu64 " is %d, not %d",
				  trainer->rank, k, got[k], world_sum_at(k, trainer->size, seed));
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
	world_new_memories(&world, memories, MEMORY_CUDA_IPC, 5000 * 4);
	world_declare(&world, 1, "t", DTYPE_INT32, 5000);
	for (uint32_t i = 0; i < 2; i++) {
		int32_t *data = new_locked(&world.trainers[i], 5000 * 4);

		world_fill(data, 5000, i, 1);
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
	world_free_memories(&world, memories);
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
	world_new_memories(&world, memories, MEMORY_CUDA_IPC, sizeof(data[0]));
	world_declare(&world, 1, "a", DTYPE_INT32, 1000);
	world_declare(&world, 2, "b", DTYPE_INT32, 1000);
	for (uint64_t round = 1; round <= 20; round++) {
		for (uint32_t i = 0; i < 2; i++) {
			for (uint32_t k = 0; k < 2; k++) {
				world_fill(data[i][k], 1000, i, k);
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
	world_free_memories(&world, memories);
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
	world_new_memories(&world, memories, MEMORY_CUDA_FD, N * LEN * 4);
	for (uint32_t k = 0; k < N; k++) {
		(void)snprintf(name, sizeof(name), "t%u", k);
		world_declare(&world, k + 1, name, DTYPE_INT32, LEN);
	}
	for (uint32_t i = 0; i < 2; i++) {
		int32_t *data = new_locked(&world.trainers[i], N * LEN * 4);

		gate_close(&world.trainers[i]);
		/* One of them the other way round. */
		for (uint32_t j = 0; j < N; j++) {
			uint32_t k = i ? N - 1 - j : j;

			world_fill(data + k * LEN, LEN, i, k);
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
	world_free_memories(&world, memories);
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
		world_fill(data[i], ALL, i, 5);
	}
	world_declare(&world, 1, "broadcast", DTYPE_INT32, LEN);
	world_declare(&world, 2, "gather", DTYPE_INT32, ELEMENTS_VARIABLE);
	world_declare(&world, 3, "scatter", DTYPE_INT32, ALL);
	world_declare(&world, 4, "exchange", DTYPE_INT32, ELEMENTS_VARIABLE);
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
							   ? world_sum_at(i * LEN + k, N, 5)
							   : data[k / LEN][i * LEN + k % LEN];

				if (got[k] != expected)
					test_fail(__FILE__, __LINE__,
						  "%s: rank %u: element %u is %d, not %d",
						  operation_name(list[op]), i, k, got[k], expected);
			}
		}
	}
	world_free_memories(&world, inputs);
	world_free_memories(&world, outputs);
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
		world_declare(&world, 1, "t", DTYPE_INT32, 100001);
		world_push_pull(&world, memories, memories, 1, 1, 100001);
		world_free_memories(&world, memories);
		world_leave(&world);
		world_close(&world);
	}
}

/* -- What is refused ---------------------------------------------------------------------------------------------- */

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
	world_declare(&world, 1, "t", DTYPE_INT32, 1000);
	world_push_pull(&world, &good, &memory, 1, 1, 1000);
	world_free_memories(&world, &good);
	world_free_memories(&world, &memory);
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
		world_join(&world, "again", &options);
		world_declare(&world, 1, "t", DTYPE_INT32, 1000);
		world_push_pull(&world, &memory, &memory, 1, 1, 1000);
		world_leave(&world);
	}
	world_free_memories(&world, &memory);
	world_close(&world);
}

TEST_FULL_TIER(a_stream_that_never_comes_to_it, "a deadline of 3 s that other ranks must meet")
{
	struct memory memories[RANKS_MAX];
	char text[ERROR_TEXT_MAX + 1];
	struct world world;
	uint32_t slots[2];

	world_open(&world, &(struct options){ .n = 2, .request_timeout_ms = 3000 });
	world_new_memories(&world, memories, MEMORY_CUDA_IPC, 4096);
	world_declare(&world, 1, "t", DTYPE_INT32, 1000);
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
	world_free_memories(&world, memories);
	world_leave(&world);
	world_close(&world);
}
