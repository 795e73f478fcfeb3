/* The porter's own process: one thread, that never waits but for the daemon's next request. See base/porter.h. */
#include "base/loop/porter_internal.h"
#include "proto/frame.h"
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RIGHTS_MAX 253 /* descriptors of a packet: SCM_MAX_FD of the kernel */
#define RETRY_MS   100

/* What is being closed, or sealed. */
struct closing {
	uint64_t id;
	pid_t pid; /* of who does it; 0: still here */
	bool seals;
};

static struct closing *closings;
static size_t n_closings, capacity;
static char packet[FRAME_MAX];

static void answer(const struct porter_answer *said, int fd)
{
	/* Waits for the daemon, which always reads. */
	if (frame_send(PORTER_FD, said, sizeof(*said), &fd, fd >= 0))
		_exit(1);
}

/* -- Closing ------------------------------------------------------------------------------------------------------ */

/*
 * Leaves all descriptors to a child: it shares the table, then this process gets a new one without them, and nothing is
 * closed on the way. Then the child is killed, and the kernel closes what was in its table.
 */
static void leave_to_child(void)
{
	pid_t pid = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, NULL, NULL, NULL, NULL);

	if (pid < 0)
		return; /* later */
	if (!pid)
		for (;;)
			(void)pause();
	if (syscall(SYS_close_range, PORTER_FIRST_FD, ~0u, CLOSE_RANGE_UNSHARE))
		_exit(1);
	(void)kill(pid, SIGKILL);
	for (size_t i = 0; i < n_closings; i++)
		if (!closings[i].pid)
			closings[i].pid = pid;
}

static void note(const struct closing *closing)
{
	if (n_closings == capacity) {
		size_t more = capacity ? 2 * capacity : 64;
		struct closing *grown = reallocarray(closings, more, sizeof(*grown));

		if (!grown)
			_exit(1);
		closings = grown;
		capacity = more;
	}
	closings[n_closings++] = *closing;
}

static void leave(uint64_t id)
{
	note(&(struct closing){ .id = id });
	leave_to_child();
}

static bool any_waits(void)
{
	for (size_t i = 0; i < n_closings; i++)
		if (!closings[i].pid)
			return true;
	return false;
}

static void reap(void)
{
	pid_t pid;
	int status;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		for (size_t i = n_closings; i--;) {
			struct porter_answer over = { .id = closings[i].id, .over = true };

			if (closings[i].pid != pid)
				continue;
			over.taken = closings[i].seals;
			if (over.taken)
				over.status = WIFEXITED(status) ? -WEXITSTATUS(status) : -EIO;
			closings[i] = closings[--n_closings];
			answer(&over, -1);
		}
	}
}

/* -- Taking ------------------------------------------------------------------------------------------------------- */

/* All that is beside the first packet, none of it dropped by the kernel while we wait. Returns how many, or -errno. */
static int receive_rights(int socket, int fds[RIGHTS_MAX])
{
	union {
		char bytes[CMSG_SPACE(RIGHTS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = { .iov_base = packet, .iov_len = sizeof(packet) };
	struct msghdr msg = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	int n = 0;

	if (recvmsg(socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0)
		return -errno;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds, CMSG_DATA(c), (size_t)n * sizeof(int));
	}
	return n;
}

/* The one question that files of all kinds answer at once. */
static bool has_seals(int fd)
{
	return fcntl(fd, F_GET_SEALS) >= 0;
}

static int wrap(int fd, int *ret_frame)
{
	int ends[2], r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends))
		return -errno;
	r = frame_send(ends[0], "", 1, &fd, 1);
	(void)close(ends[0]);
	*ret_frame = ends[1];
	return r ? -EIO : 0;
}

static void take(const struct porter_request *request, int socket)
{
	struct porter_answer said = { .id = request->id, .taken = true };
	int fds[RIGHTS_MAX], n = receive_rights(socket, fds), fd = -1;

	if (n == 1 && request->op == PORTER_MEMFD && has_seals(fds[0])) {
		said.over = true;
		answer(&said, fds[0]);
		(void)close(fds[0]);
		(void)close(socket);
		return;
	}
	if (n == 1 && request->op == PORTER_FRAME)
		said.status = wrap(fds[0], &fd);
	else
		said.status = n < 0 ? n : n > 1 ? -E2BIG : -EINVAL;
	answer(&said, said.status ? -1 : fd);
	leave(request->id);
}

/* -- Sealing ------------------------------------------------------------------------------------------------------ */

/* Returns an errno. */
static int seal(int fd)
{
	if (!fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL))
		return 0;
	if (errno != EINVAL || fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL))
		return errno;
	return EINVAL;
}

/* What others do with the memory at the time holds a lock that this takes, for as long as they like. */
static void seal_in_child(uint64_t id, int fd)
{
	struct porter_answer said = { .id = id, .taken = true, .over = true, .status = -EAGAIN };
	pid_t pid = -1;

	/* What is still here to be closed would be that child's, too, and might be closed by it; and no child can be had. */
	if (!any_waits())
		pid = fork();
	if (!pid) {
		/* Who waits keeps nothing of ours open. */
		(void)syscall(SYS_close_range, PORTER_FD, PORTER_FIRST_FD - 1, 0);
		_exit(seal(fd));
	}
	(void)close(fd);
	if (pid < 0)
		answer(&said, -1);
	else
		note(&(struct closing){ .id = id, .pid = pid, .seals = true });
}

/* -- The process -------------------------------------------------------------------------------------------------- */

static void serve_one(void)
{
	struct porter_request request;
	int fds[FRAME_FDS], fd;
	size_t len = 0, n_fds = 0;

	/* The end of the daemon is ours, and so is what we cannot read. */
	if (frame_receive(PORTER_FD, packet, &len, fds, &n_fds) || len != sizeof(request) ||
	    n_fds != 1)
		_exit(0);
	memcpy(&request, packet, sizeof(request));
	fd = fds[0];
	if (frame_receive(PORTER_FD, packet, &len, fds, &n_fds) || len != sizeof(PORTER_ACT))
		_exit(0);
	if (request.op == PORTER_CLOSE)
		leave(request.id);
	else if (request.op == PORTER_SEAL)
		seal_in_child(request.id, fd);
	else
		take(&request, fd);
}

static void on_child(int number)
{
}

/* Who stops the daemon's service stops us too, and we are needed until the daemon has ended. */
static void set_signals(sigset_t *ret_waiting)
{
	struct sigaction action = { .sa_handler = on_child };
	sigset_t all;

	(void)sigaction(SIGCHLD, &action, NULL);
	(void)sigfillset(&all);
	(void)sigprocmask(SIG_SETMASK, &all, NULL);
	*ret_waiting = all;
	(void)sigdelset(ret_waiting, SIGCHLD);
}

void porter_main(int socket)
{
	struct pollfd requests = { .fd = PORTER_FD, .events = POLLIN };
	struct rlimit files;
	sigset_t waiting;

	if (socket != PORTER_FD && dup2(socket, PORTER_FD) < 0)
		_exit(1);
	(void)fcntl(PORTER_FD, F_SETFD, FD_CLOEXEC);
	(void)syscall(SYS_close_range, PORTER_FD + 1, ~0u, 0);
	for (int fd = PORTER_FD; fd < PORTER_FIRST_FD - 1;) {
		fd = fcntl(PORTER_FD, F_DUPFD_CLOEXEC, 0);
		if (fd < 0)
			_exit(1);
	}
	(void)prctl(PR_SET_NAME, "bps-porter");
	if (!getrlimit(RLIMIT_NOFILE, &files)) {
		files.rlim_cur = files.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &files);
	}
	set_signals(&waiting);
	for (;;) {
		struct timespec retry = { .tv_nsec = RETRY_MS * 1000000L };
		bool waits = any_waits();

		if (ppoll(&requests, 1, waits ? &retry : NULL, &waiting) > 0)
			serve_one();
		else if (waits)
			leave_to_child();
		reap();
	}
}
