/*
 * Memory of devices, in a job that is over: what was under way when it ended has nothing more to do with the job's worker, whose
 * process ends meanwhile. Chores are held back here, so that rounds have yet to hear of the end.
 */
#include "../base/chores.h"
#include "../gpu/double.h"
#include "reduce/reduce.h"
#include "world.h"
#include <semaphore.h>

#define PART 4096
/* More parts than a round has at once. */
#define N (300 * PART / sizeof(float))

/* Sums of the pool wait until they may go on. */
static atomic_bool pool_waits;
static atomic_uint n_summing;
static sem_t may_sum;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	if (gettid() != getpid() && atomic_load(&pool_waits)) {
		atomic_fetch_add(&n_summing, 1);
		while (sem_wait(&may_sum))
			;
	}
	return __real_reduce_run(params);
}

static void pool_stops(void)
{
	ASSERT_OK(sem_init(&may_sum, 0, 0));
	atomic_store(&n_summing, 0);
	atomic_store(&pool_waits, true);
}

static void pool_goes_on(void)
{
	atomic_store(&pool_waits, false);
	ASSERT_OK(sem_post(&may_sum));
}

static struct buffer *buffer_new(void)
{
	const struct gpu_memory_params params = { .len = N * sizeof(float), .fd = -1 };
	struct buffer *buffer = NULL;
	struct failure failure;

	ASSERT_OK(buffer_of_device(&params, &buffer, &failure));
	return buffer;
}

/* Ranks, each with memory on the device and such of the host, and one thread that sums. */
struct scene {
	struct world *world;
	struct gpu *gpu;
	struct declared *tensor;
	struct buffer *device[2];
	float *host[2];
	struct asked asked[2];
};

static struct scene *scene_new(uint32_t n, uint32_t min_ranks)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct failure failure = { 0 };

	ASSERT_TRUE(scene);
	scene->world = world_new(&(struct world_options){ .n_nodes = 1,
							  .n_local = n,
							  .no_servers = true,
							  .n_threads = 1,
							  .min_ranks = min_ranks,
							  .gpu_new = gpu_double_new });
	scene->gpu = scene->world->gpu;
	for (uint32_t i = 0; i < n; i++) {
		struct agent_join join = world_join_of(scene->world, i);

		join.part_bytes = PART;
		ASSERT_OK(world_join(scene->world, i, &join, &failure));
		scene->device[i] = buffer_new();
		scene->host[i] = calloc(N, sizeof(float));
		ASSERT_TRUE(scene->host[i]);
	}
	for (uint32_t i = 0; i < n; i++)
		WORLD_UNTIL(scene->world, scene->world->ranks[i].joined);
	scene->tensor = world_declare(scene->world, "t", DTYPE_FLOAT32, N);
	return scene;
}

static struct scene *scene_free(struct scene *scene)
{
	if (!scene)
		return NULL;
	(void)world_free(scene->world);
	for (uint32_t i = 0; i < 2; i++) {
		(void)buffer_unref(scene->device[i]);
		free(scene->host[i]);
	}
	(void)gpu_double_free(scene->gpu);
	free(scene);
	return NULL;
}
DEFINE_CLEANUP(struct scene *, scene_free)

/* All ranks submit what they have on the device, to where it is or to the host. The first part is being summed. */
static void begin(struct scene *scene, bool to_host)
{
	pool_stops();
	for (uint32_t i = 0; i < scene->world->size; i++) {
		struct agent_request *request = &scene->asked[i].base;
		char *data = scene->device[i]->data;

		scene->asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, N,
					   to_host ? (char *)scene->host[i] : data, N);
		request->input_device = scene->device[i];
		request->output_device = to_host ? NULL : scene->device[i];
		request->stalls = true;
		asked_submit(&scene->asked[i], &scene->tensor[i], 1);
	}
	while (!atomic_load(&n_summing))
		ASSERT_OK(loop_turn(scene->world->loop, 1));
}

/* The worker's process ends before the sum; chores go on only then. All requests have failed. */
static void end(struct scene *scene)
{
	ASSERT_OK(loop_turn(scene->world->loop, 0));
	gpu_double_end_workers(scene->gpu);
	ASSERT_EQ(gpu_double_workers(scene->gpu), 0);
	pool_goes_on();
	while (pool_pending(scene->world->pool))
		ASSERT_OK(loop_turn(scene->world->loop, 1000));
	chores_go_on();
	for (uint32_t i = 0; i < scene->world->size; i++) {
		WORLD_UNTIL(scene->world, scene->asked[i].done);
		ASSERT_EQ(scene->asked[i].failure.status, -EPIPE);
	}
}

static void end_by_a_death(bool to_host)
{
	_cleanup_(scene_freep) struct scene *scene = scene_new(2, 0);

	begin(scene, to_host);
	chores_hold();
	agent_abandon(&scene->world->ranks[1].member, "died");
	end(scene);
	WORLD_UNTIL(scene->world, scene->world->ranks[0].ended);
}

TEST(no_result_goes_to_a_worker_that_has_ended)
{
	end_by_a_death(false);
}

TEST(no_part_begins_at_a_worker_that_has_ended)
{
	end_by_a_death(true);
}

/* Of an elastic job, whose last rank it is. */
TEST(a_rank_that_leaves_dies_before_its_request_has_ended)
{
	_cleanup_(scene_freep) struct scene *scene = scene_new(1, 1);

	begin(scene, false);
	chores_hold();
	agent_leave(&scene->world->ranks[0].member);
	agent_abandon(&scene->world->ranks[0].member, "died");
	end(scene);
}

/* Of an elastic job: the round waits for memory of the rank that leaves, and goes on by the processor, without the rank. */
TEST(a_round_waits_for_no_device_of_a_rank_that_has_left)
{
	_cleanup_(scene_freep) struct scene *scene = scene_new(2, 1);
	struct asked *asked = scene->asked;
	char *data = scene->device[1]->data;

	asked[0] =
		asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->host[0], N, scene->host[0], N);
	asked[1] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, N, data, N);
	asked[1].base.input_device = asked[1].base.output_device = scene->device[1];
	gpu_double_hold_imports(scene->gpu, true);
	for (uint32_t i = 0; i < 2; i++)
		asked_submit(&asked[i], &scene->tensor[i], 1);
	ASSERT_TRUE(!asked[0].done && !asked[1].done);
	agent_leave(&scene->world->ranks[1].member);
	for (uint64_t round = 1; round <= 3; round++) {
		if (round > 1)
			asked_submit(&asked[0], &scene->tensor[0], round);
		/* Now the memory is there, or will never be: who waits for it looks again. */
		if (round == 2)
			gpu_double_fail_imports(scene->gpu);
		WORLD_UNTIL(scene->world, asked[0].done);
		ASSERT_EQ(asked[0].failure.status, 0);
		asked[0].done = false;
	}
}
