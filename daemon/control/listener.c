/*
 * The socket that trainers connect to: opened or taken from systemd, connections accepted, counted
 * and refused. Also makes and ends struct control, for daemon.c, and tells of sessions, for
 * report.c.
 */
#include "control/listener.h"

#include "base/log.h"
#include "base/memory/holes.h"
#include "control/ring.h"
#include "control/session.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define BACKLOG		128
#define ACCEPT_RETRY_NS (100 * NSEC_PER_MSEC)
/*
 * No connection is accepted while so many descriptors wait to be closed that came with refused connections: these are charged to nobody.
 */
#define PORTER_BACKLOG	 64
#define BACKLOG_RETRY_NS NSEC_PER_MSEC

/* -- Who connects ------------------------------------------------------------------------------------------------- */

/*
 * A descriptor of the trainer's process, so that its death is seen even if a child that it forked keeps the socket open.
 * Returns -1 where there is none to be had, -ESRCH when it is dead already.
 */
static int process_of(int socket, pid_t pid)
{
	socklen_t len = sizeof(int);
	int fd;

	if (!getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &len))
		return fd;
	/* In another PID namespace, it has no number here. */
	if (pid <= 0)
		return -1;
	fd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (fd < 0 && errno == ESRCH)
		return -ESRCH;
	return fd < 0 ? -1 : fd;
}

void control_end_socket(int socket, struct porter_errand *errand)
{
	if (socket >= 0 && frame_end_bare(socket))
		(void)fd_close(socket);
	else
		porter_close(errand, socket);
}

void control_refuse(int socket, int status, const char *text)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	message.has_status = true;
	message.status = status;
	message.text = (char *)text;
	/* Nobody may listen any more. */
	if (!pack(&message.base, FRAME_MAX, &data, &len))
		(void)frame_send(socket, data, len, NULL, 0);
}

/* Why a user with so many sessions may not have one more, or NULL. */
static const char *refusal_of(const struct control *control, unsigned n_sessions, int *ret_status)
{
	*ret_status = -EOPNOTSUPP;
	if (!control->params.agent)
		return "this daemon only sums for others: trainers need one with the role agent";
	*ret_status = -EMFILE;
	if (control->n_sessions >= control->params.max_sessions)
		return "this daemon has as many sessions as max_sessions allows";
	*ret_status = -EDQUOT;
	if (n_sessions >= control->params.max_sessions_per_uid)
		return "this user has as many sessions as max_sessions_per_user allows";
	return NULL;
}

/* Takes over the socket. pace: of the peer's user, held here and by each of its sessions. */
static void admit(struct control *control, int socket, const struct ucred *peer,
		  const struct pace *pace)
{
	const char *refusal;
	struct failure failure;
	int pidfd, status, r;

	refusal = refusal_of(control, pace->refs - 1, &status);
	if (refusal) {
		control_refuse(socket, status, refusal);
		control_end_socket(socket, NULL);
		return;
	}
	pidfd = process_of(socket, peer->pid);
	if (pidfd == -ESRCH) {
		control_end_socket(socket, NULL);
		return;
	}
	r = session_new(control, socket, peer, pidfd, &failure);
	if (r)
		log_warning("session of pid %d (uid %u): refused: %s", (int)peer->pid, peer->uid,
			    failure.text);
}

/* -- Accepting ---------------------------------------------------------------------------------------------------- */

static void resume_accepting(struct control *control)
{
	if (control->listener.fd >= 0 && !control->listener.loop)
		(void)loop_add(control->params.loop, &control->listener, EPOLLIN);
}

static void on_retry(struct loop_timer *timer)
{
	struct control *control = container_of(timer, struct control, retry);

	if (control->spare_fd < 0)
		control->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	resume_accepting(control);
}

/* The socket stays readable: without a pause the loop would spin. */
static void pause_accepting(struct control *control, uint64_t for_ns)
{
	loop_remove(&control->listener);
	if (loop_timer_set(control->params.loop, &control->retry, clock_now_ns() + for_ns))
		resume_accepting(control);
}

/* Until users who are behind have paid for what they had last. */
static void accept_at_pace(struct control *control)
{
	loop_remove(&control->listener);
	control->listener_is_paced = true;
	if (paces_wait(&control->paces))
		control_take_turn_of_listener(control);
}

void control_take_turn_of_listener(struct control *control)
{
	if (control->listener_is_paced)
		resume_accepting(control);
	control->listener_is_paced = false;
}

/* Descriptors have run out: one is kept to tell whoever connects. */
static void refuse_one(struct control *control)
{
	int socket;

	control->spare_fd = fd_close(control->spare_fd);
	socket = accept4(control->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (socket >= 0) {
		control_refuse(socket, -EMFILE, "this daemon has no descriptors left");
		control_end_socket(socket, NULL);
		log_warning("socket %s: a trainer was refused: no descriptors left",
			    control->params.socket_path ? control->params.socket_path : "");
	}
	control->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (socket < 0 || control->spare_fd < 0)
		pause_accepting(control, ACCEPT_RETRY_NS);
}

/* Takes over the socket. A user who is behind is not followed by another connection until the part of such users is paid for. */
static void admit_at_pace(struct control *control, int socket, uint64_t began_ns)
{
	struct ucred peer = { 0 };
	socklen_t len = sizeof(peer);
	struct pace *pace = NULL;
	uint64_t now_ns;

	if (!getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &len))
		pace = pace_get(&control->paces, peer.uid);
	if (!pace) {
		control_end_socket(socket, NULL);
		return;
	}
	admit(control, socket, &peer, pace);
	now_ns = ring_charge(control, pace, 0, began_ns);
	if (pace_holds(pace, now_ns))
		accept_at_pace(control);
	(void)pace_put(pace, now_ns);
}

/* One connection a turn: who does nothing but connect takes turns with all else that the loop has. */
static void on_connection(struct loop_source *source, uint32_t events)
{
	struct control *control = container_of(source, struct control, listener);
	uint64_t began_ns = clock_now_ns();
	int socket;

	(void)events;
	if (porter_backlog() >= PORTER_BACKLOG) {
		pause_accepting(control, BACKLOG_RETRY_NS);
		return;
	}
	socket = accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (socket >= 0)
		admit_at_pace(control, socket, began_ns);
	else if (errno == EMFILE || errno == ENFILE)
		refuse_one(control);
	else if (errno == ENOMEM || errno == ENOBUFS)
		pause_accepting(control, ACCEPT_RETRY_NS);
}

/* -- The socket --------------------------------------------------------------------------------------------------- */

/* A socket file that nobody listens on is left over from a daemon that was killed. */
static int remove_stale(const struct sockaddr_un *address)
{
	_cleanup_(fd_closep) int fd =
		socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct stat st;

	if (fd < 0)
		return error_origin(-errno);
	if (lstat(address->sun_path, &st))
		return errno == ENOENT ? 0 : error_origin(-errno);
	if (!S_ISSOCK(st.st_mode))
		return error_origin(-EEXIST);
	if (!connect(fd, (const struct sockaddr *)address, sizeof(*address)) || errno == EAGAIN)
		return error_origin(-EADDRINUSE);
	if (errno != ECONNREFUSED)
		return error_origin(-errno);
	if (unlink(address->sun_path) && errno != ENOENT)
		return error_origin(-errno);
	return 0;
}

static int give_to_group(const char *path, const char *group)
{
	const struct group *found;

	if (!group)
		return 0;
	errno = 0;
	found = getgrnam(group);
	if (!found)
		return error_origin(errno ? -errno : -ENOENT);
	if (chown(path, (uid_t)-1, found->gr_gid))
		return error_origin(-errno);
	return 0;
}

static int bind_path(struct control *control, const char *path, const char *group)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	_cleanup_(fd_closep) int fd = -1;
	mode_t mask;
	int r;

	if (strlen(path) >= sizeof(address.sun_path))
		return error_origin(-ENAMETOOLONG);
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	r = remove_stale(&address);
	if (r)
		return error_trace(r);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return error_origin(-errno);
	/* Nobody gets in between bind and the right mode. */
	mask = umask(0777);
	r = bind(fd, (const struct sockaddr *)&address, sizeof(address)) ? -errno : 0;
	(void)umask(mask);
	if (r)
		return error_origin(r);
	control->bound = true;
	r = give_to_group(path, group);
	if (r)
		return error_trace(r);
	if (chmod(path, 0660) || listen(fd, BACKLOG))
		return error_origin(-errno);
	control->listener.fd = TAKE_FD(fd);
	return 0;
}

static int adopt(struct control *control, int fd)
{
	int flags;

	control->listener.fd = fd;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC))
		return error_origin(-errno);
	return 0;
}

/* -- Lifetime ----------------------------------------------------------------------------------------------------- */

static void watch_holes(struct control *control)
{
	int r = holes_open(&control->holes.fd);

	control->watches_holes = !r;
	control->holes.ready = session_on_holes;
	if (!r)
		r = loop_add(control->params.loop, &control->holes, EPOLLIN);
	if (r)
		log_notice("memory of trainers: pages that one gives back after it has shared them "
			   "are "
			   "not seen, and may be charged to this daemon: userfaultfd: %s",
			   strerror(-r));
}

int control_new(const struct control_params *params, struct control **ret_control)
{
	_cleanup_(control_freep) struct control *control = calloc(1, sizeof(*control));
	int r;

	if (!control)
		return error_origin(-ENOMEM);
	control->params = *params;
	control->listener.fd = -1;
	control->listener.ready = on_connection;
	control->retry.expired = on_retry;
	list_init(&control->sessions);
	list_init(&control->over);
	ring_watch(control);
	watch_holes(control);
	control->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (params->listen_fd >= 0)
		r = adopt(control, params->listen_fd);
	else
		r = bind_path(control, params->socket_path, params->group);
	if (!r && control->spare_fd < 0)
		r = error_origin(-errno);
	if (!r)
		r = loop_add(params->loop, &control->listener, EPOLLIN);
	if (r)
		return error_trace(r);
	*ret_control = TAKE_PTR(control);
	return 0;
}

/* Who waits to be accepted may have sent something: with the listener, the kernel would close that, too. */
static void end_waiting(const struct control *control)
{
	int socket;

	(void)shutdown(control->listener.fd, SHUT_RDWR);
	while ((socket = accept4(control->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >=
	       0)
		control_end_socket(socket, NULL);
}

void control_stop_accepting(struct control *control)
{
	loop_timer_cancel(&control->retry);
	control->listener_is_paced = false;
	loop_remove(&control->listener);
	/* One that was handed over is open elsewhere. */
	if (control->bound && control->listener.fd >= 0)
		end_waiting(control);
	control->listener.fd = fd_close(control->listener.fd);
	if (control->bound)
		(void)unlink(control->params.socket_path);
	control->bound = false;
}

void control_freeze(struct control *control)
{
	struct session *session;

	control_stop_accepting(control);
	list_for_each (session, &control->sessions, link)
		session_freeze(session);
}

void control_close(struct control *control)
{
	struct session *session;

	control_stop_accepting(control);
	list_for_each (session, &control->sessions, link)
		session_close(session, "was cut off: the daemon is stopping");
}

struct control *control_free(struct control *control)
{
	struct session *session, *next;

	if (!control)
		return NULL;
	control_close(control);
	list_for_each_safe (session, next, &control->sessions, link)
		(void)session_free(session);
	loop_abort(&control->reap);
	ring_unwatch(control);
	loop_remove(&control->holes);
	if (control->watches_holes)
		holes_close();
	(void)fd_close(control->spare_fd);
	free(control);
	return NULL;
}

/* -- What others ask ---------------------------------------------------------------------------------------------- */

size_t control_pending(const struct control *control)
{
	const struct session *session;
	size_t n = 0;

	list_for_each (session, &control->sessions, link)
		if (!agent_can_resume(&session->job.member))
			n += session->n_pending;
	return n;
}

size_t control_n_sessions(const struct control *control)
{
	return control->n_sessions;
}

static unsigned regions_of(const struct session *session)
{
	const struct map_entry *entry;
	unsigned n = 0;

	map_for_each (entry, &session->memory.buffers)
		n += agent_buffer_regions(session->control->params.agent,
					  container_of(entry, struct buffer, entry));
	return n;
}

int control_sessions(struct control *control, struct control_session_info **ret_sessions,
		     size_t *ret_n)
{
	struct control_session_info *infos = calloc(control->n_sessions + 1, sizeof(*infos));
	const struct session *session;
	size_t n = 0;

	if (!infos)
		return error_origin(-ENOMEM);
	list_for_each (session, &control->sessions, link) {
		struct control_session_info *info = &infos[n++];

		info->pid = session->pid;
		info->uid = session->uid;
		info->rank = session->job.rank;
		if (session->job.is_in)
			(void)snprintf(info->job, sizeof(info->job), "%s", session->job.name);
		info->run = session->job.run;
		info->n_requests = session->n_requests;
		info->n_pending = session->n_pending;
		info->bytes_mapped = quota_used(&session->memory.quota);
		info->n_regions = regions_of(session);
	}
	*ret_sessions = infos;
	*ret_n = n;
	return 0;
}
