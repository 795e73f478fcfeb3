/* Other processes: each connection to one is a stream of frames, by a socket whose name FAKE_FABRIC and an address make. */
#include "double.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

#define BACKLOG	  128
#define READ_LEN  (256u << 10)
#define FDS	  1024
#define LAST_PORT 60000

struct buffer {
	unsigned char *data;
	size_t n, capacity;
};

struct fake_tie {
	struct list link;
	int fd;
	unsigned slot; /* of what is polled; 0: it is not */
	struct id *id; /* a tie's, or who listens */
	bool is_listener;
	struct fake_qp *qp;
	struct buffer in, out;
};

static struct list ties = LIST_INIT(ties);
static int wake_fds[2] = { -1, -1 }; /* a pipe, by which strace -y tells it from what our end has */
static bool is_asleep;

static unsigned char *buffer_room(struct buffer *buffer, size_t n)
{
	if (buffer->capacity - buffer->n < n) {
		buffer->capacity = 2 * buffer->capacity + n;
		buffer->data = realloc(buffer->data, buffer->capacity);
		if (!buffer->data)
			fake_abort("out of memory");
	}
	return buffer->data + buffer->n;
}

static void buffer_drop(struct buffer *buffer, size_t n)
{
	buffer->n -= n;
	memmove(buffer->data, buffer->data + n, buffer->n);
}

/* Returns its length, or 0: this process is alone. */
static socklen_t name_socket(const struct sockaddr *address, uint16_t port,
			     struct sockaddr_un *ret_name)
{
	const char *fabric = getenv("FAKE_FABRIC");
	const uint8_t *last =
		address->sa_family == AF_INET6
			? &((const struct sockaddr_in6 *)address)->sin6_addr.s6_addr[15]
			: (const uint8_t *)&((const struct sockaddr_in *)address)->sin_addr + 3;
	int n;

	if (!fabric)
		return 0;
	*ret_name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	/* After a zero: a name that is not a file's, and goes with the process. */
	n = snprintf(ret_name->sun_path + 1, sizeof(ret_name->sun_path) - 1, "%s/%u:%u", fabric,
		     *last, port);
	if (n >= (int)sizeof(ret_name->sun_path) - 1)
		fake_abort("FAKE_FABRIC is too long");
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static struct fake_tie *tie_new(int fd, struct id *id)
{
	struct fake_tie *tie = calloc(1, sizeof(*tie));

	tie->fd = fd;
	tie->id = id;
	list_push_back(&ties, &tie->link);
	fake_wire_wake();
	return tie;
}

void fake_tie_free(struct fake_tie *tie)
{
	struct fake_tie *other, *next;

	if (!tie)
		return;
	/* Those whose request has not come yet. */
	list_for_each_safe (other, next, &ties, link)
		if (tie->is_listener && other != tie && other->id == tie->id)
			fake_tie_free(other);
	if (tie->qp) {
		tie->qp->tie = NULL;
		fake_work_lost(tie->qp);
	}
	list_remove(&tie->link);
	(void)shutdown(tie->fd, SHUT_RDWR); /* poll() holds it until it returns */
	(void)close(tie->fd);
	fake_wire_wake();
	free(tie->in.data);
	free(tie->out.data);
	free(tie);
}

static int socket_new(void)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		fake_abort("socket: %s", strerror(errno));
	return fd;
}

struct fake_tie *fake_fabric_listen(struct id *id, const struct sockaddr *address, uint16_t *port)
{
	struct sockaddr_un name;
	struct fake_tie *tie;
	socklen_t len;
	int fd;

	if (!name_socket(address, *port, &name))
		return NULL;
	fd = socket_new();
	for (; *port < LAST_PORT; ++*port) {
		len = name_socket(address, *port, &name);
		if (!bind(fd, (struct sockaddr *)&name, len))
			break;
		if (errno != EADDRINUSE)
			fake_abort("bind: %s", strerror(errno));
	}
	if (listen(fd, BACKLOG))
		fake_abort("listen: %s", strerror(errno));
	tie = tie_new(fd, id);
	tie->is_listener = true;
	return tie;
}

struct fake_tie *fake_fabric_connect(struct id *id, const struct sockaddr *address, uint16_t port)
{
	struct sockaddr_un name;
	socklen_t len = name_socket(address, port, &name);
	int fd;

	if (!len)
		return NULL;
	fd = socket_new();
	if (!connect(fd, (struct sockaddr *)&name, len))
		return tie_new(fd, id);
	(void)close(fd);
	return NULL;
}

void fake_tie_set_id(struct fake_tie *tie, struct id *id)
{
	tie->id = id;
}

struct id *fake_tie_id(const struct fake_tie *tie)
{
	return tie->id;
}

void fake_tie_join(struct fake_tie *tie, struct fake_qp *qp)
{
	tie->qp = qp;
	qp->tie = tie;
	qp->is_far = true;
}

void fake_tie_leave(struct fake_qp *qp)
{
	if (qp->tie)
		qp->tie->qp = NULL;
	qp->tie = NULL;
}

/* What cannot go now goes when the socket takes more; that it is broken its reading tells. */
static void tie_flush(struct fake_tie *tie)
{
	ssize_t n = send(tie->fd, tie->out.data, tie->out.n, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (n > 0)
		buffer_drop(&tie->out, (size_t)n);
	if (tie->out.n)
		fake_wire_wake();
}

void fake_tie_send(struct fake_tie *tie, const struct fake_frame *frame, const void *data)
{
	unsigned char *at = buffer_room(&tie->out, sizeof(*frame) + frame->len);

	memcpy(at, frame, sizeof(*frame));
	if (frame->len)
		memcpy(at + sizeof(*frame), data, frame->len);
	tie->out.n += sizeof(*frame) + frame->len;
	tie_flush(tie);
}

static void arrived(struct fake_tie *tie, const struct fake_frame *frame, const void *data)
{
	struct fake_frame answer = { .kind = FAKE_FRAME_ANSWER };

	switch (frame->kind) {
	case FAKE_FRAME_CM:
		fake_cm_arrived(tie, frame, data);
		return;
	case FAKE_FRAME_WORK:
		answer.status = fake_work_arrived(tie->qp, frame, data);
		fake_tie_send(tie, &answer, NULL);
		return;
	default:
		if (tie->qp)
			fake_work_answered(tie->qp, frame->status);
		return;
	}
}

static void tie_accept(struct fake_tie *listener)
{
	int fd;

	while ((fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
		(void)tie_new(fd, listener->id); /* until the request has come */
}

/* Returns false at its end. */
static bool tie_read(struct fake_tie *tie)
{
	ssize_t n = recv(tie->fd, buffer_room(&tie->in, READ_LEN), READ_LEN, MSG_DONTWAIT);
	struct fake_frame frame;
	size_t at = 0;

	if (n < 0 && errno == EAGAIN)
		return true;
	if (n <= 0)
		return false;
	tie->in.n += (size_t)n;
	for (; tie->in.n - at >= sizeof(frame); at += sizeof(frame) + frame.len) {
		memcpy(&frame, tie->in.data + at, sizeof(frame));
		if (tie->in.n - at - sizeof(frame) < frame.len)
			break;
		arrived(tie, &frame, tie->in.data + at + sizeof(frame));
	}
	buffer_drop(&tie->in, at);
	return true;
}

static void tie_turn(struct fake_tie *tie, short events)
{
	if (tie->is_listener) {
		tie_accept(tie);
		return;
	}
	if (events & POLLOUT)
		tie_flush(tie);
	if (!(events & (POLLIN | POLLHUP | POLLERR)) || tie_read(tie))
		return;
	fake_cm_lost(tie);
	fake_tie_free(tie);
}

void fake_wire_wake(void)
{
	const uint64_t one = 1;

	if (!is_asleep)
		return;
	is_asleep = false;
	if (write(wake_fds[1], &one, sizeof(one)) != sizeof(one))
		fake_abort("a wake-up is lost");
}

void fake_fabric_turn(bool may_wait)
{
	struct pollfd fds[FDS];
	struct fake_tie *tie, *next;
	unsigned n = 1;
	uint64_t count;

	fds[0] = (struct pollfd){ wake_fds[0], POLLIN, 0 };
	list_for_each (tie, &ties, link) {
		if (n == FDS)
			fake_abort("more than %u connections", FDS - 1);
		fds[n] = (struct pollfd){ tie->fd, POLLIN, 0 };
		fds[n].events |= tie->out.n ? POLLOUT : 0;
		tie->slot = n++;
	}
	is_asleep = may_wait;
	/* Others have their turn. */
	pthread_mutex_unlock(&fake_lock);
	(void)poll(fds, n, may_wait ? -1 : 0);
	if (!may_wait)
		(void)sched_yield();
	pthread_mutex_lock(&fake_lock);
	is_asleep = false;
	if (fds[0].revents && read(wake_fds[0], &count, sizeof(count)) < 0)
		fake_abort("a wake-up is not there");
	/* Those that were polled and are still there; none of them frees another. */
	list_for_each_safe (tie, next, &ties, link)
		if (tie->slot && fds[tie->slot].revents)
			tie_turn(tie, fds[tie->slot].revents);
}

void fake_fabric_start(void)
{
	if (pipe2(wake_fds, O_CLOEXEC))
		fake_abort("pipe: %s", strerror(errno));
}

void fake_fabric_stop(void)
{
	for (unsigned i = 0; i < 2; i++) {
		(void)close(wake_fds[i]);
		wake_fds[i] = -1;
	}
}
