/* Deaths and faults: of workers, trainers and the daemon, and of what they ask the driver. The double is the driver. */
#include "gpu_world.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PART (128u << 10) /* so that a sum has several parts */

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
	world_join(world, "job", options);
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
	world_new_memories(world, memories, MEMORY_CUDA_IPC, 400000);
	world_declare(world, 1, "t", DTYPE_INT32, 100000);
}

/* The next job of the same trainers, in the same memory. */
static void expect_next_job(struct world *world, struct memory *memories)
{
	world_join(world, "next", &(struct options){ 0 });
	world_declare(world, 1, "t", DTYPE_INT32, 100000);
	world_push_pull(world, memories, memories, 1, 1, 100000);
	world_free_memories(world, memories);
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
	world_push_pull(&alone, &other_memory, &other_memory, 1, 1, 100000);

	ASSERT_OK(kill(worker, SIGKILL));
	expect_failed(&world, memories, "killed by signal 9");
	world_push_pull(&alone, &other_memory, &other_memory, 1, 2, 100000);
	ASSERT_TRUE(worker_pid(&world.daemon) != worker);
	expect_next_job(&world, memories);
	world_push_pull(&alone, &other_memory, &other_memory, 1, 3, 100000);
	world_free_memories(&alone, &other_memory);
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
		world_free_memories(&world, memories);
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
		{ "cuEventQuery:1:700", "CUDA_ERROR_ILLEGAL_ADDRESS" },
		{ "cuEventQuery:2:700", "CUDA_ERROR_ILLEGAL_ADDRESS" },
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
						   .part_bytes = PART,
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
			world_free_memories(&world, memories);
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
						   .part_bytes = PART,
						   .gpu_reduce = i < 3 ? GPU_REDUCE_HOST
								       : GPU_REDUCE_AUTO },
				"BPS_FAILPOINTS", points[i]);
		new_tensor(&world, memories);
		expect_failed(&world, memories, "killed by signal 9");
		world_free_memories(&world, memories);
		world_close(&world);
	}
#else
	TEST_SKIP("built without failpoints");
#endif
}

/*
 * What needs no server and was asked for in no other size goes in eight parts, none below 512 KiB. A worker that would die at one
 * copy more lives, and one that dies at the last does not.
 */
TEST(parts_of_devices_are_few)
{
#ifdef BPS_FAILPOINTS
	static const struct {
		uint64_t n;
		unsigned n_parts;
	} cases[] = { { 100000, 1 }, { 300000, 3 }, { 3 << 20, 8 } };
	struct memory memories[RANKS_MAX];
	char point[32], text[ERROR_TEXT_MAX + 1];
	struct world world;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		for (unsigned more = 0; more < 2; more++) {
			(void)snprintf(point, sizeof(point), "gpu-down=kill@%u",
				       2 * cases[i].n_parts + more);
			world_open_with(&world,
					&(struct options){ .n = 2, .gpu_reduce = GPU_REDUCE_HOST },
					"BPS_FAILPOINTS", point);
			world_new_memories(&world, memories, MEMORY_CUDA_IPC, cases[i].n * 4);
			world_declare(&world, 1, "t", DTYPE_INT32, cases[i].n);
			if (more) {
				world_push_pull(&world, memories, memories, 1, 1, cases[i].n);
			} else {
				uint32_t slot = submit_both(&world, memories, 1, cases[i].n);

				ASSERT_TRUE(trainer_wait(&world.trainers[0], slot, text));
				ASSERT_CONTAINS(text, "killed by signal 9");
			}
			world_free_memories(&world, memories);
			world_close(&world);
		}
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
		world_declare(&world, 1, "t", DTYPE_INT32, 100000);
		world_push_pull(&world, &memory, &memory, 1, 1, 100000);
		world_free_memories(&world, &memory);
		world_leave(&world);
		world_close(&world);
	}
}

TEST_FULL_TIER(a_call_that_hangs_ends_with_its_worker,
	       "calls that never return are given up after 1 s, which others must meet")
{
	static const char *const args[] = { "--set", "gpu_timeout=1s", NULL };
	struct memory memories[RANKS_MAX];
	struct world world;

	world_open_with(&world,
			&(struct options){ .n = 2, .args = args, .gpu_reduce = GPU_REDUCE_HOST },
			"FAKECUDA_FAIL", "@copy:2:hang");
	new_tensor(&world, memories);
	expect_failed(&world, memories, "nothing came of its work");
	world_free_memories(&world, memories);
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
	world_join(&world, "job", &(struct options){ 0 });
	new_tensor(&world, memories);
	world_push_pull(&world, memories, memories, 1, 1, 100000);
	world_free_memories(&world, memories);
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
