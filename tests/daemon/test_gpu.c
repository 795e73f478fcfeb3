/* Memory of devices through a real daemon and its worker, with the double as driver. */
#include "daemon.h"
#include "gpu_trainer.h"
#include <fcntl.h>
#include <signal.h>
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
	uint32_t part_bytes;
	uint64_t request_timeout_ms;
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
	test_daemon_start(&world->daemon);
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
