/*
 * Packets over a socket pair or the control socket, with descriptors beside them. Called by the
 * client library and the daemon's sessions for requests and answers, and by the daemon for its
 * GPU workers.
 */
#include "proto/frame.h"
#include <sys/socket.h>

/*
 * One descriptor more than allowed fits, so that an excess is seen as such and not only as
 * truncation.
 */
#define FRAME_FDS_SPACE (FRAME_FDS + 1)

union frame_control {
	char bytes[CMSG_SPACE(FRAME_FDS_SPACE * sizeof(int))];
	struct cmsghdr align;
};

int frame_send(int socket, const void *data, size_t len, const int *fds, size_t n_fds)
{
	union frame_control control = { 0 };
	struct iovec iov = { .iov_base = (void *)data, .iov_len = len };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	/* The receiver could not tell an empty packet from the end. */
	if (!len || n_fds > FRAME_FDS)
		return -EINVAL;
	if (len > FRAME_MAX)
		return -EMSGSIZE;
	if (n_fds) {
		struct cmsghdr *cmsg;

		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		cmsg = CMSG_FIRSTHDR(&msg);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(cmsg), fds, n_fds * sizeof(int));
	}

	for (;;) {
		if (sendmsg(socket, &msg, MSG_NOSIGNAL) >= 0)
			return 0; /* packets are sent whole or not at all */
		if (errno == EINTR)
			continue;
		if (errno == EAGAIN || errno == EWOULDBLOCK)
			return FRAME_E_AGAIN;
		if (errno == EPIPE || errno == ECONNRESET)
			return FRAME_E_EOF;
		return -errno;
	}
}

/*
 * Takes all descriptors out of a received message, so that none can leak whatever the sender did.
 */
static size_t collect_fds(struct msghdr *msg, int fds[FRAME_FDS_SPACE])
{
	size_t n_fds = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			if (n_fds < FRAME_FDS_SPACE)
				fds[n_fds++] = fd;
			else
				(void)fd_close(fd);
		}
	}
	return n_fds;
}

/* One packet. Returns 0, FRAME_E_AGAIN, FRAME_E_EOF for a connection that was reset, or -errno. */
static int receive(int socket, struct msghdr *msg, int flags, size_t *ret_len)
{
	size_t capacity = msg->msg_controllen;
	ssize_t len;

	do {
		msg->msg_controllen = capacity;
		msg->msg_flags = 0;
		len = recvmsg(socket, msg, flags);
	} while (len < 0 && errno == EINTR);
	if (len < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return FRAME_E_AGAIN;
	if (len < 0)
		return errno == ECONNRESET ? FRAME_E_EOF : -errno;
	*ret_len = (size_t)len;
	return 0;
}

int frame_receive(int socket, void *data, size_t *ret_len, int fds[FRAME_FDS], size_t *ret_n_fds)
{
	union frame_control control;
	struct iovec iov = { .iov_base = data, .iov_len = FRAME_MAX };
	struct msghdr msg = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	int got[FRAME_FDS_SPACE], r;
	size_t n_got, len = 0;

	r = receive(socket, &msg, MSG_CMSG_CLOEXEC, &len);
	if (r)
		return r;

	n_got = collect_fds(&msg, got);
	if (len == 0 || n_got > FRAME_FDS || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
		for (size_t i = 0; i < n_got; i++)
			(void)fd_close(got[i]);
		return len == 0 && !n_got ? FRAME_E_EOF : -EPROTO;
	}

	memcpy(fds, got, n_got * sizeof(int));
	*ret_len = len;
	*ret_n_fds = n_got;
	return 0;
}

int frame_receive_bare(int socket, void *data, size_t *ret_len)
{
	struct iovec iov = { .iov_base = data, .iov_len = FRAME_MAX };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	int r;

	r = receive(socket, &msg, MSG_PEEK | MSG_DONTWAIT, ret_len);
	if (r)
		return r;
	/* There is no room for any: the kernel says so, and keeps what the packet itself has. */
	if (msg.msg_flags & MSG_CTRUNC)
		return FRAME_E_FDS;
	if (!*ret_len)
		return FRAME_E_EOF;
	if (msg.msg_flags & MSG_TRUNC)
		return -EPROTO;
	(void)recv(socket, NULL, 0, MSG_DONTWAIT | MSG_TRUNC);
	return 0;
}

bool frame_is_there(int socket)
{
	struct msghdr msg = { 0 };

	return recvmsg(socket, &msg, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

bool frame_end_bare(int socket)
{
	struct msghdr msg = { 0 };

	/* From now on, nothing comes in any more: what is there is no more than a socket holds. */
	(void)shutdown(socket, SHUT_RDWR);
	for (;;) {
		ssize_t len = recvmsg(socket, &msg, MSG_PEEK | MSG_DONTWAIT | MSG_TRUNC);

		if (len < 0 && (errno == EINTR || errno == ECONNRESET))
			continue;
		if (len >= 0 && msg.msg_flags & MSG_CTRUNC)
			return false;
		if (len <= 0)
			return true;
		(void)recv(socket, NULL, 0, MSG_DONTWAIT | MSG_TRUNC);
	}
}
