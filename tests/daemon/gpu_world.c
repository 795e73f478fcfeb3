/*
 * A daemon and the trainers of one job: declared, filled, submitted and compared. test_gpu.c and
 * test_gpu_faults.c begin from here.
 */
#include "gpu_world.h"

#define GATE (SHM_SLOTS - 1)

void world_join(struct world *world, const char *name, const struct options *options)
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

void world_open(struct world *world, const struct options *options)
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
	world_join(world, "job", options);
}

void world_leave(struct world *world)
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

void world_close(struct world *world)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_close(&world->trainers[i]);
	test_daemon_stop(&world->daemon);
}

void world_declare(struct world *world, uint32_t number, const char *name, enum dtype dtype,
		   uint64_t elements)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_declare(&world->trainers[i], number, name, dtype, elements);
}

void world_fill(int32_t *data, uint64_t n, uint32_t rank, uint32_t seed)
{
	for (uint64_t i = 0; i < n; i++)
		data[i] = (int32_t)((i * 2654435761u + seed * 40503u + rank * 69069u) % 100003) -
			  50000;
}

int32_t world_sum_at(uint64_t i, uint32_t n_ranks, uint32_t seed)
{
	int32_t sum = 0;

	for (uint32_t rank = 0; rank < n_ranks; rank++)
		sum += (int32_t)((i * 2654435761u + seed * 40503u + rank * 69069u) % 100003) -
		       50000;
	return sum;
}

void world_push_pull(struct world *world, const struct memory *inputs, const struct memory *outputs,
		     uint32_t tensor, uint64_t round, uint64_t n)
{
	int32_t *data[RANKS_MAX], *got = malloc(n * sizeof(*got));
	uint32_t slots[RANKS_MAX], seed = tensor * 31 + (uint32_t)round;

	for (uint32_t i = 0; i < world->n; i++) {
		data[i] = malloc(n * sizeof(*got));
		ASSERT_TRUE(data[i] && got);
		world_fill(data[i], n, i, seed);
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
			if (got[k] != world_sum_at(k, world->n, seed))
				test_fail(__FILE__, __LINE__,
					  "rank %u: element %" PRIu64 " of %" PRIu64
					  " is %d, not %d",
					  i, k, n, got[k], world_sum_at(k, world->n, seed));
		if (outputs[i].kind != MEMORY_MEMFD)
			ASSERT_OK(trainer_wait(&world->trainers[i], slots[i], NULL));
	}
	for (uint32_t i = 0; i < world->n; i++)
		free(data[i]);
	free(got);
}

void world_new_memories(struct world *world, struct memory *memories, enum memory_kind kind,
			uint64_t len)
{
	for (uint32_t i = 0; i < world->n; i++)
		trainer_new_memory(&world->trainers[i], &memories[i], kind, len);
}

void world_free_memories(struct world *world, struct memory *memories)
{
	for (uint32_t i = 0; i < world->n; i++) {
		ASSERT_OK(trainer_answer(&world->trainers[i],
					 trainer_unshare(&world->trainers[i], &memories[i]), NULL));
		memory_free(&memories[i]);
	}
}

void gate_close(struct trainer *trainer)
{
	atomic_store(&shm_flags(trainer->shm)[GATE].ready, 0);
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamWaitValue32(trainer->stream, trainer->flags + GATE * sizeof(struct shm_flag), 1,
			       CU_STREAM_WAIT_VALUE_GEQ));
}

void gate_open(struct trainer *trainer)
{
	atomic_store(&shm_flags(trainer->shm)[GATE].ready, 1);
}

uint32_t submit_sum(struct trainer *trainer, const struct memory *memory, uint64_t offset,
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

void expect_refused(struct trainer *trainer, struct memory *memory, int status, const char *words)
{
	char text[ERROR_TEXT_MAX + 1];

	ASSERT_EQ(trainer_answer(trainer, trainer_share(trainer, memory), text), status);
	ASSERT_CONTAINS(text, words);
}
