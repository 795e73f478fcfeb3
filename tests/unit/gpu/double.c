/*
 * Workers, memory, leases and tasks as the agent and control/ see them. The control thread's tests of memory on devices link it.
 */
#include "double.h"
#include "test.h"

struct gpu {
	struct loop *loop;
	struct list workers;
	bool holds_imports;
	struct mail mail; /* tasks are done, and waited for is nothing */
	bool posted;
};

struct gpu_worker {
	struct list link;
	struct gpu *gpu;
	struct gpu_worker_ops ops;
	void *user;
	bool closed, changed;
	struct gpu_task *task;
	struct list tasks, memories, sessions;
};

struct gpu_session {
	struct list link;
};

struct gpu_memory {
	struct list link;
	struct gpu_worker *worker;
	enum gpu_memory_state state;
	void (*opened)(void *user, const struct failure *why);
	void *user;
	uint8_t device[DEVICE_UUID_LEN];
};

/* -- What a test says ---------------------------------------------------------------------------------------------- */

struct gpu *gpu_double_new(struct loop *loop)
{
	struct gpu *gpu = calloc(1, sizeof(*gpu));

	ASSERT_TRUE(gpu);
	gpu->loop = loop;
	list_init(&gpu->workers);
	return gpu;
}

static void worker_free(struct gpu_worker *worker)
{
	struct gpu_memory *memory;
	struct gpu_session *session;

	while ((memory = list_first(&worker->memories, struct gpu_memory, link))) {
		list_remove(&memory->link);
		memory->worker = NULL;
		memory->state = GPU_MEMORY_AWAY;
	}
	while ((session = list_first(&worker->sessions, struct gpu_session, link))) {
		list_remove(&session->link);
		free(session);
	}
	list_remove(&worker->link);
	free(worker);
}

struct gpu *gpu_double_free(struct gpu *gpu)
{
	if (!gpu)
		return NULL;
	while (!list_empty(&gpu->workers))
		worker_free(list_first(&gpu->workers, struct gpu_worker, link));
	free(gpu);
	return NULL;
}

unsigned gpu_double_workers(const struct gpu *gpu)
{
	const struct gpu_worker *worker;
	unsigned n = 0;

	list_for_each (worker, &gpu->workers, link)
		n++;
	return n;
}

void gpu_double_hold_imports(struct gpu *gpu, bool hold)
{
	gpu->holds_imports = hold;
}

static struct gpu_memory *find_opening(const struct gpu *gpu)
{
	struct gpu_worker *worker;
	struct gpu_memory *memory;

	list_for_each (worker, &gpu->workers, link)
		list_for_each (memory, &worker->memories, link)
			if (memory->state == GPU_MEMORY_OPENING)
				return memory;
	return NULL;
}

static void post(struct gpu *gpu);

/* The memory may be gone after that. */
static void fail(struct gpu_memory *memory)
{
	void (*opened)(void *user, const struct failure *why) = TAKE_PTR(memory->opened);
	struct failure why;

	(void)failure_set(&why, -EIO, "it cannot be imported");
	if (opened)
		opened(memory->user, &why);
}

void gpu_double_fail_imports(struct gpu *gpu)
{
	struct gpu_memory *memory;

	while ((memory = find_opening(gpu))) {
		memory->state = GPU_MEMORY_FAILED;
		memory->worker->changed = true;
		fail(memory);
	}
	post(gpu);
}

static void leave_memories(struct gpu_worker *worker)
{
	struct gpu_memory *memory;

	while ((memory = list_first(&worker->memories, struct gpu_memory, link))) {
		list_remove(&memory->link);
		memory->worker = NULL;
		memory->state = GPU_MEMORY_AWAY;
		fail(memory);
	}
}

void gpu_double_end_workers(struct gpu *gpu)
{
	struct gpu_worker *worker, *next;

	list_for_each_safe (worker, next, &gpu->workers, link) {
		void (*gone)(void *user) = worker->ops.gone;
		void *user = worker->user;

		if (!worker->closed || !list_empty(&worker->tasks))
			continue;
		leave_memories(worker);
		worker_free(worker);
		gone(user);
	}
}

/* -- Workers ------------------------------------------------------------------------------------------------------- */

static void on_mail(struct mail *mail)
{
	struct gpu *gpu = container_of(mail, struct gpu, mail);
	struct gpu_worker *worker, *next;
	struct gpu_task *task;

	gpu->posted = false;
	list_for_each_safe (worker, next, &gpu->workers, link) {
		while ((task = list_first(&worker->tasks, struct gpu_task, link))) {
			list_remove(&task->link);
			task->done(task, false);
		}
		if (worker->changed && !worker->closed) {
			worker->changed = false;
			worker->ops.changed(worker->user);
		}
	}
}

static void post(struct gpu *gpu)
{
	if (gpu->posted)
		return;
	gpu->posted = true;
	gpu->mail.run = on_mail;
	loop_post(gpu->loop, &gpu->mail);
}

int gpu_worker_start(struct gpu *gpu, const char *name, const struct gpu_worker_ops *ops,
		     void *user, struct gpu_worker **ret_worker, struct failure *failure)
{
	struct gpu_worker *worker = calloc(1, sizeof(*worker));

	(void)name;
	(void)failure;
	ASSERT_TRUE(worker);
	worker->gpu = gpu;
	worker->ops = *ops;
	worker->user = user;
	list_init(&worker->tasks);
	list_init(&worker->memories);
	list_init(&worker->sessions);
	list_push_back(&gpu->workers, &worker->link);
	*ret_worker = worker;
	return 0;
}

void gpu_worker_close(struct gpu_worker *worker)
{
	worker->closed = true;
}

int gpu_session_open(struct gpu_worker *worker, int memfd, struct gpu_session **ret_session)
{
	(void)memfd;
	*ret_session = calloc(1, sizeof(**ret_session));
	ASSERT_TRUE(*ret_session);
	list_push_back(&worker->sessions, &(*ret_session)->link);
	return 0;
}

bool gpu_session_is_ready(const struct gpu_session *session, uint32_t slot, uint64_t ticket)
{
	(void)session;
	(void)slot;
	(void)ticket;
	return true;
}

int gpu_session_watch(struct gpu_session *session, const struct gpu_memory *memory, uint32_t slot,
		      uint64_t ticket)
{
	(void)session;
	(void)memory;
	(void)slot;
	(void)ticket;
	return 0;
}

/* -- Memory -------------------------------------------------------------------------------------------------------- */

int gpu_memory_new(const struct gpu_memory_params *params, struct gpu_memory **ret_memory)
{
	struct gpu_memory *memory = calloc(1, sizeof(*memory));

	ASSERT_TRUE(memory);
	memcpy(memory->device, params->device, sizeof(memory->device));
	*ret_memory = memory;
	return 0;
}

void gpu_memory_open(struct gpu_memory *memory, struct gpu_worker *worker,
		     void (*opened)(void *user, const struct failure *why), void *user)
{
	memory->opened = opened;
	memory->user = user;
	memory->worker = worker;
	memory->state = GPU_MEMORY_OPENING;
	list_push_back(&worker->memories, &memory->link);
	if (worker->gpu->holds_imports)
		return;
	memory->state = GPU_MEMORY_OPEN;
	memory->opened = NULL;
	worker->changed = true;
	post(worker->gpu);
}

enum gpu_memory_state gpu_memory_state(const struct gpu_memory *memory,
				       const struct gpu_worker *worker, struct failure *failure)
{
	(void)worker;
	if (memory->state == GPU_MEMORY_FAILED && failure)
		(void)failure_set(failure, -EIO, "it cannot be imported");
	return memory->state;
}

const uint8_t *gpu_memory_device(const struct gpu_memory *memory)
{
	return memory->device;
}

void gpu_memory_free(struct gpu_memory *memory, void (*freed)(void *user), void *user)
{
	if (memory->worker)
		list_remove(&memory->link);
	free(memory);
	if (freed)
		freed(user);
}

/* -- Staging ------------------------------------------------------------------------------------------------------- */

int gpu_lease_take(struct gpu_worker *worker, struct gpu_lease *lease, uint64_t len, bool is_long)
{
	if (is_long)
		return GPU_E_WAIT;
	ASSERT_TRUE(!worker->closed);
	lease->data = calloc(1, len);
	ASSERT_TRUE(lease->data);
	return 0;
}

void gpu_lease_give(struct gpu_lease *lease)
{
	free(TAKE_PTR(lease->data));
}

uint64_t gpu_staging_len(const struct gpu_worker *worker)
{
	(void)worker;
	return UINT64_C(1) << 30;
}

enum gpu_direct_state gpu_direct_state(const struct gpu_worker *worker,
				       const struct gpu_memory *memory)
{
	(void)worker;
	(void)memory;
	return GPU_DIRECT_REFUSED;
}

void gpu_direct_open(struct gpu_worker *worker, const struct gpu_memory *memory)
{
	(void)worker;
	(void)memory;
}

int gpu_lease_take_direct(struct gpu_worker *worker, const struct gpu_memory *memory,
			  struct gpu_lease *lease, uint64_t len)
{
	(void)worker;
	(void)memory;
	(void)lease;
	(void)len;
	return GPU_E_WAIT;
}

void gpu_direct_describe(const struct gpu_worker *worker, char *text, size_t size)
{
	(void)worker;
	(void)size;
	*text = '\0';
}

/* -- Work ---------------------------------------------------------------------------------------------------------- */

void gpu_task_begin(struct gpu_worker *worker, struct gpu_task *task)
{
	ASSERT_TRUE(!worker->closed && !worker->task);
	worker->task = task;
}

void gpu_task_down(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		   void *data, uint64_t len)
{
	(void)offset;
	(void)data;
	(void)len;
	ASSERT_TRUE(memory->worker == worker);
}

void gpu_task_up(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		 const void *data, uint64_t len)
{
	(void)offset;
	(void)data;
	(void)len;
	ASSERT_TRUE(memory->worker == worker);
}

void gpu_task_spill(struct gpu_worker *worker, struct gpu_memory *memory, const void *from,
		    void *data, uint64_t len)
{
	(void)from;
	(void)data;
	(void)len;
	ASSERT_TRUE(memory->worker == worker);
}

void gpu_task_tell(struct gpu_worker *worker, struct gpu_memory *memory,
		   struct gpu_session *session, uint32_t slot, uint64_t ticket)
{
	(void)session;
	(void)slot;
	(void)ticket;
	ASSERT_TRUE(memory->worker == worker);
}

void gpu_task_end(struct gpu_worker *worker)
{
	struct gpu_task *task = TAKE_PTR(worker->task);

	list_push_back(&worker->tasks, &task->link);
	post(worker->gpu);
}

/* -- Groups -------------------------------------------------------------------------------------------------------- */

void gpu_plan_ask(struct gpu_worker *worker, enum gpu_reduce mode, uint64_t roots,
		  struct gpu_memory *const *memories, size_t n)
{
	(void)worker;
	(void)mode;
	(void)roots;
	(void)memories;
	(void)n;
}

const struct gpu_plan *gpu_plan(const struct gpu_worker *worker)
{
	(void)worker;
	return NULL;
}

bool gpu_collective_supports(unsigned dtype, unsigned reduction)
{
	(void)dtype;
	(void)reduction;
	return false;
}

void gpu_task_collective(struct gpu_worker *worker, enum gpu_collective what, unsigned group,
			 const struct gpu_member *members, size_t n, unsigned dtype,
			 unsigned reduction, uint32_t scale, uint64_t n_elements)
{
	(void)worker;
	(void)what;
	(void)group;
	(void)members;
	(void)n;
	(void)dtype;
	(void)reduction;
	(void)scale;
	(void)n_elements;
}
