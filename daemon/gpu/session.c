/*
 * Whether a trainer's stream has come to a submission is seen by a flag in its shared memory.
 * Streams that do nothing else wait for flags, a few (lanes) for each session: in a stream that
 * copies, what waits for one rank would stop what another waits for, and ranks may submit in
 * different orders. A timer looks at the flags beyond these streams, so that nothing depends on
 * which submissions the streams happen to wait for.
 */
#include "gpu/internal.h"
#include <sys/mman.h>

int gpu_session_open(struct gpu_worker *worker, int memfd, struct gpu_session **ret_session)
{
	struct gpu_command command = { .op = GPU_OP_SESSION, .session = worker->n_sessions };
	struct gpu_session *session, **grown;
	void *flags;

	if (worker->n_sessions == GPU_SESSIONS_MAX)
		return error_origin(-EDQUOT);
	grown = reallocarray(worker->sessions, worker->n_sessions + 1, sizeof(grown[0]));
	if (!grown)
		return error_origin(-ENOMEM);
	worker->sessions = grown;
	session = calloc(1, sizeof(*session));
	if (!session)
		return error_origin(-ENOMEM);
	flags = mmap(NULL, SHM_FLAG_LEN, PROT_READ, MAP_SHARED, memfd, SHM_FLAG_OFFSET);
	if (flags == MAP_FAILED) {
		free(session);
		return error_origin(-errno);
	}
	session->worker = worker;
	session->number = worker->n_sessions;
	session->flags = flags;
	list_init(&session->watched);
	list_init(&session->parked);
	grown[worker->n_sessions++] = session;
	gpu_worker_send(worker, &command, memfd);
	*ret_session = session;
	return 0;
}

bool gpu_session_is_ready(const struct gpu_session *session, uint32_t slot, uint64_t ticket)
{
	const struct shm_flag *flag = (const struct shm_flag *)session->flags + slot;

	return shm_flag_reached(atomic_load_explicit(&flag->ready, memory_order_acquire), ticket);
}

/* Puts what is parked, and has been looked for long enough, on lanes that are free. */
static void use_lanes(struct gpu_session *session, uint64_t now_ns)
{
	struct gpu_watch *watch;

	while (session->lanes != (1u << GPU_LANES) - 1 &&
	       (watch = list_first(&session->parked, struct gpu_watch, link)) &&
	       watch->lane_ns <= now_ns) {
		struct gpu_command command = {
			.op = GPU_OP_WATCH,
			.session = session->number,
			.slot = watch->slot,
			.ticket = watch->ticket,
		};

		memcpy(command.device, watch->device, sizeof(command.device));
		if (watch->looked_ns)
			allowance_settle(&session->worker->look, (int64_t)now_ns, false,
					 (int64_t)watch->looked_ns, 0);
		list_remove(&watch->link);
		watch->lane = (uint32_t)__builtin_ctz(~session->lanes);
		session->lanes |= 1u << watch->lane;
		list_push_back(&session->watched, &watch->link);
		command.stream = watch->lane;
		gpu_worker_send(session->worker, &command, -1);
	}
}

static void poll_at(struct gpu_worker *worker, uint64_t at_ns)
{
	struct loop_timer *timer = &worker->poll;

	if (worker->state == WORKER_RUNNING && (!timer->loop || timer->at_ns > at_ns))
		(void)loop_timer_set(worker->gpu->params.loop, timer, at_ns);
}

/* When what is left parked is looked at again: soon, while the first of it may get a lane. */
static void poll_later(struct gpu_session *session, uint64_t now_ns)
{
	struct gpu_watch *watch = list_first(&session->parked, struct gpu_watch, link);

	if (watch)
		poll_at(session->worker,
			now_ns + (watch->lane_ns > now_ns ? GPU_POLL_SOON_NS : GPU_POLL_NS));
}

int gpu_session_watch(struct gpu_session *session, const struct gpu_memory *memory, uint32_t slot,
		      uint64_t ticket)
{
	struct gpu_watch *watch = calloc(1, sizeof(*watch));
	uint64_t now_ns = clock_now_ns();

	if (!watch)
		return error_origin(-ENOMEM);
	watch->slot = slot;
	watch->ticket = ticket;
	if (allowance_remains(&session->worker->look, (int64_t)now_ns) &&
	    loop_linger(session->worker->gpu->params.loop, now_ns, GPU_SOON_NS))
		watch->looked_ns = GPU_SOON_NS;
	watch->lane_ns = now_ns + watch->looked_ns;
	memcpy(watch->device, memory->params.device, sizeof(watch->device));
	list_push_back(&session->parked, &watch->link);
	use_lanes(session, now_ns);
	poll_later(session, now_ns);
	return 0;
}

/* Lets go of what is parked and was reached. Returns whether there was any. */
static bool look(struct gpu_session *session)
{
	struct gpu_watch *watch, *next;
	bool reached = false;

	list_for_each_safe (watch, next, &session->parked, link) {
		if (!gpu_session_is_ready(session, watch->slot, watch->ticket))
			continue;
		list_remove(&watch->link);
		free(watch);
		reached = true;
	}
	return reached;
}

void gpu_session_poll(struct gpu_worker *worker)
{
	uint64_t now_ns = clock_now_ns();
	bool reached = false;

	for (uint32_t i = 0; i < worker->n_sessions; i++) {
		reached |= look(worker->sessions[i]);
		use_lanes(worker->sessions[i], now_ns);
		poll_later(worker->sessions[i], now_ns);
	}
	if (reached)
		gpu_worker_changed(worker);
}

bool gpu_session_any_waits(const struct gpu_worker *worker)
{
	for (uint32_t i = 0; i < worker->n_sessions; i++)
		if (worker->sessions[i]->lanes)
			return true;
	return false;
}

void gpu_session_event(struct gpu_worker *worker, const struct gpu_event *event)
{
	struct gpu_session *session;
	struct gpu_watch *watch, *next;

	if (event->number >= worker->n_sessions)
		return;
	session = worker->sessions[event->number];
	list_for_each_safe (watch, next, &session->watched, link) {
		if (watch->lane != event->lane)
			continue;
		list_remove(&watch->link);
		free(watch);
		session->lanes &= ~(1u << event->lane);
	}
	/* What is reached by now needs no lane. */
	(void)look(session);
	use_lanes(session, clock_now_ns());
	gpu_worker_changed(worker);
}

static void free_watches(struct list *watches)
{
	struct gpu_watch *watch, *next;

	list_for_each_safe (watch, next, watches, link) {
		list_remove(&watch->link);
		free(watch);
	}
}

void gpu_session_free_all(struct gpu_worker *worker)
{
	for (uint32_t i = 0; i < worker->n_sessions; i++) {
		struct gpu_session *session = worker->sessions[i];

		free_watches(&session->watched);
		free_watches(&session->parked);
		(void)munmap(session->flags, SHM_FLAG_LEN);
		free(session);
	}
	free(worker->sessions);
	worker->sessions = NULL;
	worker->n_sessions = 0;
}
