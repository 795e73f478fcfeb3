/*
 * A GPU worker as the daemon sees it: its process started and killed, commands out, events in, and
 * the deadlines of what was asked. Events go to memory.c, task.c, session.c, group.c and direct.c.
 * The agent's device.c has one worker for each job.
 */
#include "base/clock.h"
#include "base/log.h"
#include "base/loop/porter.h"
#include "gpu/internal.h"
#include "proto/frame.h"
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

/* Of commands; with more the worker is not alive. */
#define OUTBOX_MAX 65536

struct packet {
	struct list link;
	int fd; /* goes beside it, or -1 */
	size_t len;
	char data[];
};

/* -- Starting a process ------------------------------------------------------------------------ */

static int prepare(posix_spawn_file_actions_t *actions, posix_spawnattr_t *attributes, int socket)
{
	sigset_t none, all;
	int r;

	/* Our signals are blocked, and SIGPIPE is ignored: the worker begins as a program does. */
	(void)sigemptyset(&none);
	(void)sigfillset(&all);
	r = posix_spawn_file_actions_adddup2(actions, socket, GPU_SOCKET_FD);
	if (!r)
		r = posix_spawnattr_setsigmask(attributes, &none);
	if (!r)
		r = posix_spawnattr_setsigdefault(attributes, &all);
	if (!r)
		r = posix_spawnattr_setflags(attributes,
					     POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	return -r;
}

/* Runs the worker's program with a socket as its descriptor 3. */
static int spawn(const char *program, int socket, pid_t *ret_pid)
{
	static char name[] = "bps-daemon", option[] = "--gpu-worker";
	char *arguments[] = { name, option, NULL };
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	int r;

	if (posix_spawn_file_actions_init(&actions))
		return error_origin(-ENOMEM);
	if (posix_spawnattr_init(&attributes)) {
		(void)posix_spawn_file_actions_destroy(&actions);
		return error_origin(-ENOMEM);
	}
	r = prepare(&actions, &attributes, socket);
	if (!r)
		r = -posix_spawn(ret_pid, program ? program : "/proc/self/exe", &actions,
				 &attributes, arguments, environ);
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)posix_spawnattr_destroy(&attributes);
	return error_trace(r);
}

int gpu_process_start(const char *program, pid_t *ret_pid, int *ret_pidfd, int *ret_socket)
{
	_cleanup_(fd_closep) int far = -1, near = -1;
	int fds[2], pidfd, r;
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds))
		return error_origin(-errno);
	near = fds[0];
	/* Not 3 itself: what is duplicated to itself stays close-on-exec. */
	far = fcntl(fds[1], F_DUPFD_CLOEXEC, GPU_SOCKET_FD + 1);
	(void)fd_close(fds[1]);
	if (far < 0)
		return error_origin(-errno);
	r = spawn(program, far, &pid);
	if (r)
		return error_trace(r);
	/* A child that nobody has waited for keeps its number. */
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0) {
		r = error_origin(-errno);
		(void)kill(pid, SIGKILL);
		(void)waitpid(pid, NULL, 0);
		return r;
	}
	(void)fcntl(near, F_SETFL, O_NONBLOCK);
	*ret_pid = pid;
	*ret_pidfd = pidfd;
	*ret_socket = TAKE_FD(near);
	return 0;
}

/* -- Out --------------------------------------------------------------------------------------- */

static void packet_free(struct gpu_worker *worker, struct packet *packet)
{
	list_remove(&packet->link);
	worker->out.n_packets--;
	/* It may be a frame. */
	porter_close(NULL, packet->fd);
	free(packet);
}

static void die(struct gpu_worker *worker, int status, const char *text)
{
	struct failure why;

	(void)failure_set(&why, status, "%s", text);
	gpu_worker_die(worker, &why);
}

static void queue(struct gpu_worker *worker, const void *data, size_t len, int fd)
{
	struct packet *packet = malloc(sizeof(*packet) + len);
	int kept = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);

	if (!packet || (fd >= 0 && kept < 0) || worker->out.n_packets >= OUTBOX_MAX) {
		(void)fd_close(kept);
		free(packet);
		gpu_worker_die_soon(worker, "no memory or no descriptor for its commands");
		return;
	}
	packet->fd = kept;
	packet->len = len;
	memcpy(packet->data, data, len);
	list_push_back(&worker->out.packets, &packet->link);
	if (!worker->out.n_packets++)
		(void)loop_modify(&worker->socket, EPOLLIN | EPOLLOUT);
}

static void send_packet(struct gpu_worker *worker, const void *data, size_t len, int fd)
{
	int r;

	if (worker->state != WORKER_RUNNING || worker->late.loop || worker->dies_soon)
		return;
	r = worker->out.n_packets ? FRAME_E_AGAIN
				  : frame_send(worker->socket.fd, data, len, &fd, fd >= 0);
	if (r == FRAME_E_AGAIN)
		queue(worker, data, len, fd);
	/* Its end is seen by its process. */
}

static void send_queued(struct gpu_worker *worker)
{
	struct packet *packet;

	while ((packet = list_first(&worker->out.packets, struct packet, link))) {
		if (frame_send(worker->socket.fd, packet->data, packet->len, &packet->fd,
			       packet->fd >= 0) == FRAME_E_AGAIN)
			return;
		packet_free(worker, packet);
	}
	(void)loop_modify(&worker->socket, EPOLLIN);
}

void gpu_worker_flush(struct gpu_worker *worker)
{
	unsigned n = worker->out.n_batch;

	worker->out.n_batch = 0;
	if (n)
		send_packet(worker, worker->out.batch, n * sizeof(worker->out.batch[0]), -1);
}

static void on_flush(struct mail *mail)
{
	struct gpu_worker *worker = container_of(mail, struct gpu_worker, out.flush);

	worker->out.flushing = false;
	gpu_worker_flush(worker);
}

void gpu_worker_flush_later(struct gpu_worker *worker)
{
	if (worker->out.flushing)
		return;
	worker->out.flushing = true;
	worker->out.flush.run = on_flush;
	loop_defer(worker->gpu->params.loop, &worker->out.flush);
}

struct gpu_command *gpu_worker_add(struct gpu_worker *worker)
{
	if (worker->out.n_batch == GPU_PACKET_MAX)
		gpu_worker_flush(worker);
	worker->out.batch[worker->out.n_batch] = (struct gpu_command){ 0 };
	return &worker->out.batch[worker->out.n_batch++];
}

void gpu_worker_send(struct gpu_worker *worker, const struct gpu_command *command, int fd)
{
	gpu_worker_flush(worker);
	send_packet(worker, command, sizeof(*command), fd);
}

/* -- In ---------------------------------------------------------------------------------------- */

static void on_changed(struct mail *mail)
{
	struct gpu_worker *worker = container_of(mail, struct gpu_worker, changed);

	worker->changed_posted = false;
	if (worker->state < WORKER_DYING && !worker->closed)
		worker->ops.changed(worker->user);
}

void gpu_worker_changed(struct gpu_worker *worker)
{
	if (worker->changed_posted)
		return;
	worker->changed_posted = true;
	worker->changed.run = on_changed;
	loop_post(worker->gpu->params.loop, &worker->changed);
}

/*
 * It has ended, as it may have to when a trainer dies: until it is late nothing is begun or ended.
 */
static void die_later(struct gpu_worker *worker, int status, const char *text)
{
	if (worker->closed || loop_timer_set(worker->gpu->params.loop, &worker->late,
					     clock_now_ns() + GPU_DEATH_NS)) {
		die(worker, status, text);
		return;
	}
	(void)failure_set(&worker->kept_back, status, "%s", text);
	loop_remove(&worker->socket);
	loop_remove(&worker->process);
	loop_timer_cancel(&worker->timer);
}

static void on_late(struct loop_timer *timer)
{
	struct gpu_worker *worker = container_of(timer, struct gpu_worker, late);

	gpu_worker_die(worker, &worker->kept_back);
}

static void handle(struct gpu_worker *worker, const struct gpu_event *event, int fd)
{
	worker->progress_ns = clock_now_ns();
	if (event->kind == GPU_EVENT_ARENA) {
		worker->n_setup -= worker->n_setup > 0;
		gpu_direct_event(worker, event, fd);
		return;
	}
	(void)fd_close(fd);
	switch (event->kind) {
	case GPU_EVENT_READY:
		worker->is_ready = !event->status;
		if (event->status)
			die(worker, event->status, event->text);
		break;
	case GPU_EVENT_OPENED:
	case GPU_EVENT_CLOSED:
		worker->n_setup -= worker->n_setup > 0;
		gpu_memory_event(worker, event);
		break;
	case GPU_EVENT_PLANNED:
		worker->n_setup -= worker->n_setup > 0;
		gpu_plan_event(worker, event);
		break;
	case GPU_EVENT_REACHED:
		gpu_session_event(worker, event);
		break;
	case GPU_EVENT_DONE:
		for (uint32_t i = 0; i < MIN(event->number, (uint32_t)GPU_DONE_MAX); i++)
			gpu_task_event(worker, event->done[i]);
		break;
	case GPU_EVENT_FATAL:
		if (event->number)
			die_later(worker, event->status, event->text);
		else
			die(worker, event->status, event->text);
		break;
	default:
		die(worker, -EPROTO, "it says what it cannot");
	}
}

int gpu_event_receive(int socket, struct gpu_event *ret_event, int *ret_fd)
{
	_cleanup_(fd_closep) int fd = -1;
	int fds[FRAME_FDS], r;
	size_t len = 0, n_fds = 0;
	char packet[FRAME_MAX];

	r = frame_receive(socket, packet, &len, fds, &n_fds);
	for (size_t i = 1; !r && i < n_fds; i++)
		(void)fd_close(fds[i]);
	if (!r && n_fds)
		fd = fds[0];
	if (r)
		return r;
	if (len < offsetof(struct gpu_event, text) || len > sizeof(*ret_event))
		return error_origin(-EPROTO);
	*ret_event = (struct gpu_event){ 0 };
	memcpy(ret_event, packet, len);
	ret_event->text[sizeof(ret_event->text) - 1] = 0;
	*ret_fd = TAKE_FD(fd);
	return 0;
}

static void on_socket(struct loop_source *source, uint32_t events)
{
	struct gpu_worker *worker = container_of(source, struct gpu_worker, socket);
	struct gpu_event event;
	int fd, r;

	if (events & EPOLLOUT)
		send_queued(worker);
	/* Events of one turn; then others have theirs. */
	for (size_t i = 0; i < 64 && worker->state < WORKER_DYING && !worker->late.loop; i++) {
		r = gpu_event_receive(worker->socket.fd, &event, &fd);
		if (r == FRAME_E_AGAIN)
			return;
		if (r == FRAME_E_EOF) {
			/* Its process ends: that is where the end is seen. */
			loop_remove(&worker->socket);
			return;
		}
		if (r) {
			die(worker, r, "it says what cannot be read");
			return;
		}
		handle(worker, &event, fd);
	}
}

/* -- The end ----------------------------------------------------------------------------------- */

static void kill_process(const struct gpu_worker *worker)
{
	(void)syscall(SYS_pidfd_send_signal, worker->process.fd, SIGKILL, NULL, 0);
}

static bool process_is_gone(const struct gpu_worker *worker)
{
	siginfo_t info = { 0 };

	return !waitid((idtype_t)P_PIDFD, (id_t)worker->process.fd, &info,
		       WEXITED | WNOHANG | WNOWAIT) &&
	       info.si_pid;
}

/* Of a process that is gone, or was killed: then it waits for its end. */
static void reap(struct gpu_worker *worker)
{
	siginfo_t info = { 0 };

	if (worker->process.fd < 0)
		return;
	while (waitid((idtype_t)P_PIDFD, (id_t)worker->process.fd, &info, WEXITED) &&
	       errno == EINTR)
		;
	loop_remove(&worker->process);
	worker->process.fd = fd_close(worker->process.fd);
}

static struct gpu_worker *worker_free(struct gpu_worker *worker)
{
	struct packet *packet;

	if (worker->process.fd >= 0)
		kill_process(worker);
	reap(worker);
	loop_remove(&worker->socket);
	(void)fd_close(worker->socket.fd);
	loop_timer_cancel(&worker->timer);
	loop_timer_cancel(&worker->poll);
	loop_timer_cancel(&worker->late);
	if (worker->changed_posted)
		loop_unpost(worker->gpu->params.loop, &worker->changed);
	if (worker->out.flushing)
		loop_unpost(worker->gpu->params.loop, &worker->out.flush);
	while ((packet = list_first(&worker->out.packets, struct packet, link)))
		packet_free(worker, packet);
	gpu_session_free_all(worker);
	list_remove(&worker->link);
	list_remove(&worker->wait_link);
	if (worker->work.fail_posted)
		loop_unpost(worker->gpu->params.loop, &worker->work.fail);
	if (worker->dies_soon)
		loop_unpost(worker->gpu->params.loop, &worker->soon);
	map_done(&worker->work.by_ticket);
	free(worker->by_number);
	free(worker);
	return NULL;
}

static void free_dead(struct gpu *gpu)
{
	struct gpu_worker *worker, *next;

	list_for_each_safe (worker, next, &gpu->workers, link) {
		void (*gone)(void *user) = worker->ops.gone;
		void *user = worker->user;

		if (worker->state != WORKER_DEAD || !worker->closed ||
		    !list_empty(&worker->work.tasks) || !list_empty(&worker->leases))
			continue;
		(void)worker_free(worker);
		gone(user);
	}
}

static void on_reap(struct mail *mail)
{
	struct gpu *gpu = container_of(mail, struct gpu, reap);

	gpu->reaping = false;
	free_dead(gpu);
}

static void free_later(struct gpu *gpu)
{
	if (gpu->reaping)
		return;
	gpu->reaping = true;
	gpu->reap.run = on_reap;
	loop_post(gpu->params.loop, &gpu->reap);
}

/* Nothing of its process touches memory any more. */
static void bury(struct gpu_worker *worker)
{
	reap(worker);
	worker->state = WORKER_DEAD;
	if (!worker->ended && !worker->closed)
		worker->ops.lost(worker->user, &worker->why);
	gpu_task_worker_died(worker);
	gpu_memory_worker_died(worker);
	gpu_direct_close(worker);
	free_later(worker->gpu);
}

void gpu_worker_die(struct gpu_worker *worker, const struct failure *why)
{
	if (worker->state >= WORKER_DYING)
		return;
	worker->ended = worker->state == WORKER_ENDING;
	worker->state = WORKER_DYING;
	worker->out.n_batch = 0;
	(void)failure_set(&worker->why, why->status, "the GPU worker of job %s (pid %d): %s",
			  worker->name, (int)worker->pid, why->text);
	kill_process(worker);
	loop_remove(&worker->socket);
	loop_timer_cancel(&worker->timer);
	loop_timer_cancel(&worker->poll);
	loop_timer_cancel(&worker->late);
	/* Its end is seen by on_process(), where that can be watched. */
	if (process_is_gone(worker) ||
	    (!worker->process.loop &&
	     loop_add(worker->gpu->params.loop, &worker->process, EPOLLIN)))
		bury(worker);
}

static void on_soon(struct mail *mail)
{
	struct gpu_worker *worker = container_of(mail, struct gpu_worker, soon);

	worker->dies_soon = false;
	die(worker, -ENOMEM, worker->no_memory);
}

void gpu_worker_die_soon(struct gpu_worker *worker, const char *no_memory)
{
	if (worker->dies_soon || worker->state >= WORKER_DYING)
		return;
	worker->dies_soon = true;
	worker->no_memory = no_memory;
	worker->soon.run = on_soon;
	loop_post(worker->gpu->params.loop, &worker->soon);
}

static const char *describe_end(const siginfo_t *info, char text[64])
{
	if (info->si_code == CLD_EXITED)
		(void)snprintf(text, 64, "it exited with status %d", info->si_status);
	else
		(void)snprintf(text, 64, "it was killed by signal %d (%s)", info->si_status,
			       strsignal(info->si_status));
	return text;
}

static void on_process(struct loop_source *source, uint32_t events)
{
	struct gpu_worker *worker = container_of(source, struct gpu_worker, process);
	siginfo_t info = { 0 };
	char text[64];

	(void)events;
	if (worker->state == WORKER_DYING) {
		bury(worker);
		return;
	}
	/* What it said last comes first. */
	on_socket(&worker->socket, EPOLLIN);
	if (worker->state >= WORKER_DYING || worker->late.loop)
		return;
	(void)waitid((idtype_t)P_PIDFD, (id_t)source->fd, &info, WEXITED | WNOHANG | WNOWAIT);
	/*
	 * A driver or NCCL may abort a process whose devices fail; SIGKILL is somebody's who meant
	 * it.
	 */
	if (info.si_code != CLD_EXITED && info.si_status != SIGKILL)
		die_later(worker, -EIO, describe_end(&info, text));
	else
		die(worker, -EIO, describe_end(&info, text));
}

/* -- Deadlines --------------------------------------------------------------------------------- */

static uint64_t deadline_of(const struct gpu_worker *worker)
{
	uint64_t limit_ns = worker->gpu->params.timeout_ms * NSEC_PER_MSEC;

	return worker->progress_ns +
	       (worker->closed ? MIN(limit_ns, (uint64_t)GPU_END_NS) : limit_ns);
}

void gpu_worker_expect(struct gpu_worker *worker)
{
	if (worker->timer.loop || worker->late.loop || worker->state >= WORKER_DYING)
		return;
	worker->progress_ns = clock_now_ns();
	(void)loop_timer_set(worker->gpu->params.loop, &worker->timer, deadline_of(worker));
}

void gpu_worker_expect_setup(struct gpu_worker *worker)
{
	/* Until now nothing was to come of it. */
	if (list_empty(&worker->work.tasks) && !worker->n_setup)
		worker->progress_ns = clock_now_ns();
	worker->n_setup++;
	gpu_worker_expect(worker);
}

static void on_timer(struct loop_timer *timer)
{
	struct gpu_worker *worker = container_of(timer, struct gpu_worker, timer);
	char text[96];

	if (worker->state == WORKER_RUNNING && list_empty(&worker->work.tasks)) {
		if (!worker->n_setup && !worker->closed)
			return;
		/*
		 * The driver makes some calls wait for all streams, and some of these for a
		 * trainer.
		 */
		if (gpu_session_any_waits(worker))
			worker->progress_ns = clock_now_ns();
	}
	if (clock_now_ns() < deadline_of(worker)) {
		(void)loop_timer_set(worker->gpu->params.loop, timer, deadline_of(worker));
		return;
	}
	(void)snprintf(text, sizeof(text), "nothing came of its work for %" PRIu64 " ms: killed",
		       (uint64_t)((deadline_of(worker) - worker->progress_ns) / NSEC_PER_MSEC));
	die(worker, -ETIMEDOUT, text);
}

static void on_poll(struct loop_timer *timer)
{
	gpu_session_poll(container_of(timer, struct gpu_worker, poll));
}

/* -- Life -------------------------------------------------------------------------------------- */

int gpu_worker_start(struct gpu *gpu, const char *name, const struct gpu_worker_ops *ops,
		     void *user, struct gpu_worker **ret_worker, struct failure *failure)
{
	struct gpu_command command = { .op = GPU_OP_STAGING, .len = gpu->pages.n * GPU_PAGE };
	struct gpu_worker *worker;
	int r;

	if (!gpu->is_there || gpu->closed)
		return failure_set(failure, -EOPNOTSUPP, "no GPU worker can be started: %s",
				   gpu->closed ? "the daemon is stopping" : gpu->text);
	r = gpu_staging_open(gpu);
	if (r)
		return failure_set(failure, r, "gpu_staging: %s", strerror(-r));
	worker = calloc(1, sizeof(*worker));
	if (!worker)
		return failure_set(failure, -ENOMEM, "out of memory");
	worker->gpu = gpu;
	worker->ops = *ops;
	worker->user = user;
	(void)snprintf(worker->name, sizeof(worker->name), "%s", name);
	list_init(&worker->wait_link);
	list_init(&worker->leases);
	list_init(&worker->memories);
	list_init(&worker->work.tasks);
	list_init(&worker->out.packets);
	worker->socket.ready = on_socket;
	worker->process.ready = on_process;
	worker->timer.expired = on_timer;
	worker->poll.expired = on_poll;
	worker->late.expired = on_late;
	worker->socket.fd = worker->process.fd = -1;
	list_push_back(&gpu->workers, &worker->link);
	r = gpu_process_start(gpu->params.program, &worker->pid, &worker->process.fd,
			      &worker->socket.fd);
	if (!r)
		r = loop_add(gpu->params.loop, &worker->socket, EPOLLIN);
	if (!r)
		r = loop_add(gpu->params.loop, &worker->process, EPOLLIN);
	if (r) {
		(void)worker_free(worker);
		return failure_set(failure, r, "a GPU worker cannot be started: %s", strerror(-r));
	}
	log_info("job %s: GPU worker: pid %d", name, (int)worker->pid);
	gpu_worker_send(worker, &command, gpu->staging_fd);
	*ret_worker = worker;
	return 0;
}

/* Nothing of it is under way: it can go. */
void gpu_worker_idle(struct gpu_worker *worker)
{
	struct gpu_command command = { .op = GPU_OP_END };

	if (!worker->closed || !list_empty(&worker->work.tasks))
		return;
	if (worker->state == WORKER_DEAD) {
		free_later(worker->gpu);
		return;
	}
	if (worker->state != WORKER_RUNNING)
		return;
	/* A server may not have answered yet. */
	if (gpu_direct_is_used(worker)) {
		gpu_worker_expect(worker);
		return;
	}
	gpu_direct_close(worker);
	gpu_worker_send(worker, &command, -1);
	worker->state = WORKER_ENDING;
	loop_timer_cancel(&worker->timer);
	gpu_worker_expect(worker);
}

void gpu_worker_close(struct gpu_worker *worker)
{
	if (worker->closed)
		return;
	worker->closed = true;
	/* What is under way has less time now, or none: the job knows why it ends. */
	worker->progress_ns = clock_now_ns();
	if (worker->late.loop)
		(void)loop_timer_set(worker->gpu->params.loop, &worker->late, worker->progress_ns);
	else if (worker->timer.loop)
		(void)loop_timer_set(worker->gpu->params.loop, &worker->timer, deadline_of(worker));
	gpu_worker_idle(worker);
}

void gpu_close(struct gpu *gpu)
{
	struct gpu_worker *worker;
	struct failure why;

	gpu->closed = true;
	(void)failure_set(&why, -ESHUTDOWN, "the daemon is stopping");
	list_for_each (worker, &gpu->workers, link) {
		gpu_worker_die(worker, &why);
		if (worker->state == WORKER_DYING)
			bury(worker);
	}
	gpu_staging_grant(gpu);
	free_dead(gpu);
}
