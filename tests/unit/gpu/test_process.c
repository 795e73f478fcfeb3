/* The daemon's side of a worker, with a program in its place that does what no worker does. */
#include "gpu/internal.h"
#include "test.h"
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

static struct {
	struct failure lost;
	bool is_gone;
	unsigned n_done, n_failed, n_granted;
} seen;

static void on_changed(void *user)
{
	(void)user;
}

static void on_lost(void *user, const struct failure *failure)
{
	(void)user;
	seen.lost = *failure;
}

static void on_gone(void *user)
{
	(void)user;
	seen.is_gone = true;
}

static const struct gpu_worker_ops ops = { on_changed, on_lost, on_gone };

static void on_done(struct gpu_task *task, bool failed)
{
	(void)task;
	seen.n_done++;
	seen.n_failed += failed;
}

static void on_granted(struct gpu_lease *lease)
{
	(void)lease;
	seen.n_granted++;
}

static bool no_memory;

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__real_reallocarray(void *old, size_t n, size_t size);
void *__wrap_reallocarray(void *old, size_t n, size_t size);

void *__wrap_calloc(size_t n, size_t size)
{
	return no_memory ? NULL : __real_calloc(n, size);
}

void *__wrap_reallocarray(void *old, size_t n, size_t size)
{
	return no_memory ? NULL : __real_reallocarray(old, n, size);
}

/* A process that was killed is still there: whoever asks is told so, and nobody is to wait. */
static bool stays;

int __real_waitid(idtype_t type, id_t id, siginfo_t *info, int options);
int __wrap_waitid(idtype_t type, id_t id, siginfo_t *info, int options);

int __wrap_waitid(idtype_t type, id_t id, siginfo_t *info, int options)
{
	if (!stays)
		return __real_waitid(type, id, info, options);
	ASSERT_TRUE(options & WNOHANG);
	*info = (siginfo_t){ 0 };
	return 0;
}

struct world {
	struct loop *loop;
	struct gpu *gpu;
	struct gpu_worker *worker;
};

static int on_opened(void *user, void *data, size_t len)
{
	(void)user, (void)data, (void)len;
	return 0;
}

static int on_exported(void *user, void *data, size_t len, int dmabuf, struct failure *failure)
{
	(void)user, (void)data, (void)len, (void)dmabuf, (void)failure;
	return 0;
}

static void on_closing(void *user, void *data)
{
	(void)user, (void)data;
}

static const struct gpu_staging_ops staging_ops = { on_opened, on_exported, on_closing };

/* The double is there, so that a worker is looked for. */
static struct world world_open(const char *mode, const char *program)
{
	struct gpu_params params = {
		.program = program ?: getenv("FAKE_WORKER_PROGRAM"),
		.staging_bytes = 64 << 10,
		.direct_bytes = 64 << 10,
		.staging_ops = &staging_ops,
		.timeout_ms = 60000,
	};
	struct world world = { 0 };

	memset(&seen, 0, sizeof(seen));
	ASSERT_OK(setenv("FAKE_WORKER", mode, 1));
	ASSERT_OK(loop_new(&world.loop));
	params.loop = world.loop;
	ASSERT_OK(gpu_new(&params, &world.gpu));
	return world;
}

static void start(struct world *world, const char *mode)
{
	struct failure failure;

	ASSERT_OK(setenv("FAKE_WORKER", mode, 1));
	if (gpu_worker_start(world->gpu, "j", &ops, NULL, &world->worker, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
}

#define TURN_UNTIL(world, condition)                             \
	do {                                                     \
		while (!(condition))                             \
			ASSERT_OK(loop_turn((world)->loop, -1)); \
	} while (0)

static void world_close(struct world *world)
{
	if (world->worker) {
		gpu_worker_close(world->worker);
		TURN_UNTIL(world, seen.is_gone);
	}
	world->gpu = gpu_free(world->gpu);
	world->loop = loop_free(world->loop);
}

TEST(a_program_that_is_no_worker)
{
	static const struct {
		const char *mode, *program, *words;
	} cases[] = {
		{ "other", NULL, "the worker that looked for them: Protocol error" },
		{ "short", "/bin/true", "the worker that looked for them: Broken pipe" },
		{ "gone", NULL, "the worker that looked for them: Broken pipe" },
		{ "done", "/dev/null/worker", "a worker cannot be started: Not a directory" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct world world = world_open(cases[i].mode, cases[i].program);
		struct gpu_worker *worker;
		struct failure failure;

		ASSERT_TRUE(!gpu_is_there(world.gpu));
		ASSERT_STR(gpu_describe(world.gpu), cases[i].words);
		ASSERT_EQ(gpu_worker_start(world.gpu, "j", &ops, NULL, &worker, &failure),
			  -EOPNOTSUPP);
		ASSERT_CONTAINS(failure.text, cases[i].words);
		world_close(&world);
	}
}

TEST(what_a_worker_cannot_say)
{
	static const struct {
		const char *mode, *words;
		int status;
	} cases[] = {
		{ "unknown", "it says what it cannot", -EPROTO },
		{ "short", "it says what cannot be read", -EPROTO },
		/* Two seconds later. */
		{ "abort", "killed by signal 6", -EIO },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct world world = world_open("done", NULL);

		ASSERT_TRUE(gpu_is_there(world.gpu));
		start(&world, cases[i].mode);
		TURN_UNTIL(&world, seen.lost.status);
		ASSERT_EQ(seen.lost.status, cases[i].status);
		ASSERT_CONTAINS(seen.lost.text, cases[i].words);
		ASSERT_CONTAINS(seen.lost.text, "the GPU worker of job j (pid ");
		world_close(&world);
	}
}

static struct gpu_memory *memory_new(void)
{
	struct gpu_memory_params params = { .kind = MEMORY_CUDA_IPC, .fd = -1, .len = 1 << 20 };
	struct gpu_memory *memory;

	ASSERT_OK(gpu_memory_new(&params, &memory));
	return memory;
}

static void on_freed(void *user)
{
	*(bool *)user = true;
}

/* More than a socket takes, while it does not read; then all of it is done, in order. */
TEST(a_worker_that_does_not_read)
{
	enum { N = 5000 };
	static struct gpu_task tasks[N], last = { .done = on_done };
	struct world world = world_open("done", NULL);
	struct gpu_memory *memory = memory_new();
	siginfo_t info = { 0 };
	bool freed = false;
	size_t n_outbox;

	start(&world, "done");
	ASSERT_OK(waitid(P_PID, (id_t)world.worker->pid, &info, WSTOPPED | WNOWAIT));
	gpu_memory_open(memory, world.worker, NULL, NULL);
	for (size_t i = 0; i < N; i++) {
		tasks[i].done = on_done;
		gpu_task_begin(world.worker, &tasks[i]);
		gpu_task_down(world.worker, memory, 0, world.gpu->staging, 4096);
		gpu_task_end(world.worker);
	}
	ASSERT_TRUE(world.worker->out.n_packets > 0);
	(void)kill(world.worker->pid, SIGCONT);
	/* There is room for the last, but others were first. */
	ASSERT_EQ(poll(&(struct pollfd){ .fd = world.worker->socket.fd, .events = POLLOUT }, 1, -1),
		  1);
	n_outbox = world.worker->out.n_packets;
	gpu_task_begin(world.worker, &last);
	gpu_task_down(world.worker, memory, 0, world.gpu->staging, 4096);
	gpu_task_end(world.worker);
	gpu_worker_flush(world.worker);
	ASSERT_INT(world.worker->out.n_packets, >, n_outbox);
	TURN_UNTIL(&world, seen.n_done == N + 1);
	ASSERT_EQ(seen.n_failed, 0);
	ASSERT_EQ(world.worker->out.n_packets, 0);
	gpu_memory_free(memory, on_freed, &freed);
	gpu_worker_close(world.worker);
	world_close(&world);
	ASSERT_TRUE(freed);
}

/* A driver takes its time to let go of a process: until then it may still write to memory. */
TEST(nobody_waits_for_a_worker_that_was_killed)
{
	struct failure why = { .status = -EIO, .text = "a device failed" };
	struct world world = world_open("done", NULL);
	struct gpu_memory *memory = memory_new();
	struct gpu_task task = { .done = on_done };
	bool freed = false;

	start(&world, "ready");
	gpu_memory_open(memory, world.worker, NULL, NULL);
	gpu_task_begin(world.worker, &task);
	gpu_task_down(world.worker, memory, 0, world.gpu->staging, 4096);
	gpu_task_end(world.worker);
	stays = true;
	gpu_worker_die(world.worker, &why);
	ASSERT_EQ(world.worker->state, WORKER_DYING);
	gpu_memory_free(memory, on_freed, &freed);
	ASSERT_TRUE(!freed && !seen.n_done && !seen.lost.status);
	stays = false;
	TURN_UNTIL(&world, seen.n_done);
	ASSERT_EQ(world.worker->state, WORKER_DEAD);
	ASSERT_EQ(seen.n_failed, 1);
	ASSERT_CONTAINS(seen.lost.text, "a device failed");
	TURN_UNTIL(&world, freed);
	world_close(&world);
}

/* And one that never will: what is under way has failed, and what was not sent is dropped. */
TEST(a_worker_that_is_killed_before_it_reads)
{
	enum { N = 5000 };
	static struct gpu_task tasks[N];
	struct world world = world_open("done", NULL);
	struct gpu_memory *memory = memory_new();
	siginfo_t info = { 0 };

	start(&world, "done");
	ASSERT_OK(waitid(P_PID, (id_t)world.worker->pid, &info, WSTOPPED | WNOWAIT));
	gpu_memory_open(memory, world.worker, NULL, NULL);
	for (size_t i = 0; i < N; i++) {
		tasks[i].done = on_done;
		gpu_task_begin(world.worker, &tasks[i]);
		gpu_task_down(world.worker, memory, 0, world.gpu->staging, 4096);
		gpu_task_end(world.worker);
	}
	(void)kill(world.worker->pid, SIGKILL);
	TURN_UNTIL(&world, seen.n_done == N);
	ASSERT_EQ(seen.n_failed, N);
	ASSERT_CONTAINS(seen.lost.text, "killed by signal 9");
	gpu_memory_free(memory, NULL, NULL);
	world_close(&world);
}

TEST(a_task_without_work_ends_from_the_loop)
{
	struct world world = world_open("done", NULL);
	struct gpu_task task = { .done = on_done };

	start(&world, "ready");
	gpu_task_begin(world.worker, &task);
	gpu_task_end(world.worker);
	ASSERT_EQ(seen.n_done, 0);
	TURN_UNTIL(&world, seen.n_done);
	ASSERT_EQ(seen.n_failed, 0);
	world_close(&world);
}

TEST(who_waits_for_staging_may_stop_waiting)
{
	struct world world = world_open("done", NULL);
	struct gpu_lease all = { .granted = on_granted }, second = all, third = all;

	start(&world, "ready");
	ASSERT_EQ(gpu_lease_take(world.worker, &all, (64 << 10) + 1, false), -EMSGSIZE);
	ASSERT_OK(gpu_lease_take(world.worker, &all, 60 << 10, false));
	ASSERT_EQ(gpu_lease_take(world.worker, &second, 8192, false), GPU_E_WAIT);
	/* There is room for it, but others were first. */
	ASSERT_EQ(gpu_lease_take(world.worker, &third, 4096, false), GPU_E_WAIT);
	gpu_lease_give(&second);
	ASSERT_EQ(seen.n_granted, 0);
	gpu_lease_give(&all);
	TURN_UNTIL(&world, seen.n_granted);
	ASSERT_EQ(seen.n_granted, 1);
	ASSERT_TRUE(third.data && !second.data);
	gpu_lease_give(&third);
	gpu_lease_give(&third);
	world_close(&world);
}

/* It is let go of when the last that waited has stopped. */
TEST(a_worker_dies_while_staging_is_waited_for)
{
	for (int is_granted = 0; is_granted < 2; is_granted++) {
		struct world world = world_open("done", NULL);
		struct gpu_lease all = { .granted = on_granted }, second = all;

		start(&world, "ready");
		ASSERT_OK(gpu_lease_take(world.worker, &all, 64 << 10, false));
		ASSERT_EQ(gpu_lease_take(world.worker, &second, 4096, false), GPU_E_WAIT);
		(void)kill(world.worker->pid, SIGKILL);
		TURN_UNTIL(&world, seen.lost.status);
		gpu_worker_close(world.worker);
		/* Behind what was to be done by now. */
		while (world.gpu->reaping)
			ASSERT_OK(loop_turn(world.loop, -1));
		ASSERT_TRUE(!seen.is_gone);
		if (is_granted) {
			gpu_lease_give(&all);
			TURN_UNTIL(&world, seen.n_granted);
		}
		gpu_lease_give(&second);
		TURN_UNTIL(&world, seen.is_gone);
		gpu_lease_give(&all);
		world.worker = NULL;
		world_close(&world);
	}
}

/* Nothing has been copied then, whatever its mark would say. */
TEST(what_spills_has_failed_when_its_worker_is_dead)
{
	struct world world = world_open("done", NULL);
	struct gpu_memory *memory = memory_new();
	struct gpu_lease direct = { 0 }, staging = { .granted = on_granted };
	struct gpu_task task = { .done = on_done };

	start(&world, "ready");
	gpu_direct_open(world.worker, memory);
	TURN_UNTIL(&world, gpu_direct_state(world.worker, memory) != GPU_DIRECT_OPENING);
	ASSERT_EQ(gpu_direct_state(world.worker, memory), GPU_DIRECT_OPEN);
	ASSERT_OK(gpu_lease_take_direct(world.worker, memory, &direct, 4096));
	ASSERT_OK(gpu_lease_take(world.worker, &staging, 4096, false));
	(void)kill(world.worker->pid, SIGKILL);
	TURN_UNTIL(&world, seen.lost.status);
	gpu_task_begin(world.worker, &task);
	gpu_task_spill(world.worker, memory, direct.data, staging.data, 4096);
	gpu_task_end(world.worker);
	TURN_UNTIL(&world, seen.n_done);
	ASSERT_EQ(seen.n_failed, 1);
	gpu_lease_give(&direct);
	gpu_lease_give(&staging);
	gpu_memory_free(memory, NULL, NULL);
	world_close(&world);
}

enum { OUTBOX_MAX = 65536 };

static void fill_outbox(struct gpu_worker *worker)
{
	struct gpu_command command = { .op = GPU_OP_MARK };
	siginfo_t info = { 0 };

	ASSERT_OK(waitid(P_PID, (id_t)worker->pid, &info, WSTOPPED | WNOWAIT));
	while (worker->out.n_packets < OUTBOX_MAX)
		gpu_worker_send(worker, &command, -1);
}

/* When there is no more room for what it is told, the answer to its refusal is its end. */
TEST(a_worker_that_refuses_and_does_not_read)
{
	struct world world = world_open("done", NULL);
	struct gpu_memory *memory = memory_new();

	start(&world, "refuse");
	gpu_direct_open(world.worker, memory);
	fill_outbox(world.worker);
	ASSERT_EQ(seen.lost.status, 0);
	TURN_UNTIL(&world, seen.lost.status);
	ASSERT_CONTAINS(seen.lost.text, "no memory or no descriptor for its commands");
	gpu_memory_free(memory, NULL, NULL);
	world_close(&world);
}

/* Who calls goes on with what it has: it hears from the loop that there is no worker any more. */
TEST(a_worker_without_memory_is_lost_from_the_loop)
{
	static const struct {
		bool is_full;
		const char *words;
	} cases[] = {
		{ true, "no memory or no descriptor for its commands" },
		{ false, "no memory for what is under way" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct world world = world_open("done", NULL);
		struct gpu_memory *memory = memory_new(), *other = memory_new();
		struct gpu_task tasks[2] = { { .done = on_done }, { .done = on_done } };

		start(&world, "done");
		gpu_memory_open(memory, world.worker, NULL, NULL);
		if (cases[i].is_full)
			fill_outbox(world.worker);
		no_memory = !cases[i].is_full;
		for (int k = 0; k < 2; k++)
			gpu_direct_open(world.worker, memory);
		gpu_memory_open(other, world.worker, NULL, NULL);
		for (size_t k = 0; k < ARRAY_SIZE(tasks); k++) {
			gpu_task_begin(world.worker, &tasks[k]);
			gpu_task_down(world.worker, memory, 0, world.gpu->staging, 4096);
			gpu_task_end(world.worker);
		}
		no_memory = false;
		ASSERT_EQ(seen.lost.status, 0);
		ASSERT_EQ(seen.n_done, 0);
		TURN_UNTIL(&world, seen.n_done == ARRAY_SIZE(tasks));
		ASSERT_EQ(seen.n_failed, ARRAY_SIZE(tasks));
		ASSERT_EQ(seen.lost.status, -ENOMEM);
		ASSERT_CONTAINS(seen.lost.text, cases[i].words);
		gpu_memory_free(memory, NULL, NULL);
		gpu_memory_free(other, NULL, NULL);
		world_close(&world);
	}
}
