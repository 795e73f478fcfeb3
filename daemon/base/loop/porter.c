/*
 * The daemon's end of the porter: starts the process, sends errands over a socket pair, and matches
 * answers to them. porter_main.c is the other end. control/ and gpu/ give descriptors of trainers
 * here.
 */
#include "base/loop/porter_internal.h"

#include "base/clock.h"
#include "base/error.h"
#include "proto/frame.h"
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/*
 * When the kernel has no room for what is sent: for descriptors on their way a user has a number,
 * for instance.
 */
#define AGAIN_NS (50 * NSEC_PER_MSEC)

/* What was asked and is not over, or not even said yet. */
struct porter_note {
	struct list link;
	struct porter_errand *errand; /* or NULL */
	uint32_t op;
	int fd; /* to be handed over, owned; -1: it was, and is closed here */
	bool is_said;
	bool is_nobodys; /* there was no errand */
};

static struct {
	bool started;
	pid_t pid;
	struct loop_source socket;
	struct list notes; /* those still to be said last */
	size_t n_unsaid;
	size_t n_nobodys;	 /* of these */
	struct loop_timer later; /* until then nothing is tried */
	void (*ended)(void *user);
	void *user;
} porter = { .socket.fd = -1 };

/* -- Out --------------------------------------------------------------------------------------- */

static int pass_on(struct porter_note *note)
{
	struct porter_request request = { .id = (uintptr_t)note, .op = note->op };
	int r = frame_send(porter.socket.fd, &request, sizeof(request), &note->fd, 1);

	/* The porter keeps it until it is told to act: what is closed here is not the last. */
	if (!r)
		note->fd = fd_close(note->fd);
	return r;
}

/* Returns whether it has been said, or never will be. */
static bool say(struct porter_note *note)
{
	int r = note->fd < 0 ? 0 : pass_on(note);

	if (!r)
		r = frame_send(porter.socket.fd, PORTER_ACT, sizeof(PORTER_ACT), NULL, 0);
	/* The process is gone: ended() follows. */
	note->is_said = !r || r == FRAME_E_EOF;
	/* Without memory for the timer it is tried at once. */
	if (r < 0 && porter.socket.loop)
		(void)loop_timer_set(porter.socket.loop, &porter.later, clock_now_ns() + AGAIN_NS);
	return note->is_said;
}

static void watch_writable(void)
{
	bool now = porter.n_unsaid && !porter.later.loop;

	if (porter.socket.loop)
		(void)loop_modify(&porter.socket, EPOLLIN | (now ? EPOLLOUT : 0));
}

static void say_rest(void)
{
	struct porter_note *note;

	list_for_each (note, &porter.notes, link) {
		if (note->is_said)
			continue;
		if (!say(note))
			break;
		porter.n_unsaid--;
		porter.n_nobodys -= note->is_nobodys;
	}
	watch_writable();
}

static void on_later(struct loop_timer *timer)
{
	(void)timer;
	say_rest();
}

/* Takes over fd. */
static int ask(struct porter_errand *errand, uint32_t op, int fd)
{
	struct porter_note *note = calloc(1, sizeof(*note));

	if (!note || !porter.started) {
		/*
		 * Without the porter it cannot be closed in another way; without memory, better so
		 * than never.
		 */
		free(note);
		(void)fd_close(fd);
		return error_origin(porter.started ? -ENOMEM : -ESRCH);
	}
	*note = (struct porter_note){ .errand = errand, .op = op, .fd = fd, .is_nobodys = !errand };
	if (errand)
		errand->note = note;
	list_push_back(&porter.notes, &note->link);
	if (!porter.n_unsaid && say(note))
		return 0;
	porter.n_nobodys += note->is_nobodys;
	if (!porter.n_unsaid++)
		watch_writable();
	return 0;
}

int porter_take(struct porter_errand *errand, enum porter_want want, int socket)
{
	int fd = fcntl(socket, F_DUPFD_CLOEXEC, 0);

	if (fd < 0)
		return error_origin(-errno);
	return error_trace(ask(errand, want, fd));
}

int porter_seal(struct porter_errand *errand, int fd)
{
	return error_trace(ask(errand, PORTER_SEAL, fd));
}

void porter_close(struct porter_errand *errand, int fd)
{
	if (fd >= 0 && ask(errand, PORTER_CLOSE, fd) && errand)
		errand->over(errand);
}

size_t porter_backlog(void)
{
	return porter.n_nobodys;
}

void porter_forget(struct porter_errand *errand)
{
	if (errand->note)
		errand->note->errand = NULL;
	errand->note = NULL;
}

/* -- In ---------------------------------------------------------------------------------------- */

static void note_free(struct porter_note *note)
{
	list_remove(&note->link);
	(void)fd_close(note->fd);
	free(note);
}

static void handle(const struct porter_answer *said, int fd)
{
	struct porter_note *note = (struct porter_note *)(uintptr_t)said->id;
	struct porter_errand *errand = note->errand;

	if (errand && said->taken)
		errand->taken(errand, said->status, fd);
	else
		porter_close(NULL, fd);
	if (!said->over)
		return;
	/* It may have been forgotten meanwhile. */
	errand = note->errand;
	note_free(note);
	if (!errand)
		return;
	errand->note = NULL;
	errand->over(errand);
}

static void on_socket(struct loop_source *source, uint32_t events)
{
	struct porter_answer said;
	char packet[FRAME_MAX];
	int fds[FRAME_FDS], r;
	size_t len = 0, n_fds = 0;

	if (events & EPOLLOUT)
		say_rest();
	if (!(events & ~(uint32_t)EPOLLOUT))
		return;
	r = frame_receive(source->fd, packet, &len, fds, &n_fds);
	if (r == FRAME_E_AGAIN)
		return;
	if (r || len != sizeof(said) || n_fds > 1) {
		loop_remove(source);
		porter.ended(porter.user);
		return;
	}
	memcpy(&said, packet, sizeof(said));
	handle(&said, n_fds ? fds[0] : -1);
}

/* -- Lifetime ---------------------------------------------------------------------------------- */

int porter_start(int (*prepare)(void *user), void *user)
{
	int ends[2];
	pid_t pid;

	assert(!porter.started);

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
		return error_origin(-errno);
	pid = fork();
	if (pid < 0) {
		int r = error_origin(-errno);

		(void)fd_close(ends[0]);
		(void)fd_close(ends[1]);
		return r;
	}
	if (!pid) {
		if (prepare && prepare(user))
			_exit(1);
		porter_main(ends[1]);
	}
	(void)fd_close(ends[1]);
	/* Its own end waits for us. */
	(void)fcntl(ends[0], F_SETFL, O_NONBLOCK);
	list_init(&porter.notes);
	porter.started = true;
	porter.pid = pid;
	porter.n_unsaid = porter.n_nobodys = 0;
	porter.later = (struct loop_timer){ .expired = on_later };
	porter.socket = (struct loop_source){ .fd = ends[0], .ready = on_socket };
	return 0;
}

int porter_attach(struct loop *loop, void (*ended)(void *user), void *user)
{
	porter.ended = ended;
	porter.user = user;
	return error_trace(loop_add(loop, &porter.socket, EPOLLIN));
}

void porter_stop(void)
{
	struct porter_note *note, *next;

	if (!porter.started)
		return;
	loop_remove(&porter.socket);
	loop_timer_cancel(&porter.later);
	list_for_each_safe (note, next, &porter.notes, link) {
		if (note->errand)
			note->errand->note = NULL;
		note_free(note);
	}
	porter.socket.fd = fd_close(porter.socket.fd);
	/* It ends when it reads that; whoever it has left something to is not ours to wait for. */
	(void)waitpid(porter.pid, NULL, 0);
	porter.started = false;
}

int porter_open_frame(int frame)
{
	char nothing[FRAME_MAX];
	int fds[FRAME_FDS], r;
	size_t len = 0, n_fds = 0;

	r = frame_receive(frame, nothing, &len, fds, &n_fds);
	if (r)
		return r < 0 ? r : -EPROTO;
	return n_fds == 1 ? fds[0] : -EPROTO;
}
