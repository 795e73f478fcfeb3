/*
 * Packets that a hostile trainer sends: any bytes, with any number of descriptors. The first byte says how many, the
 * rest is the packet. Whatever comes, the receiver ends with as many descriptors as it was told.
 */
#include "fuzz.h"
#include "proto/frame.h"
#include <fcntl.h>
#include <sys/socket.h>

#define FDS_MAX 12

static void send_packet(int socket, const void *data, size_t len, size_t n_fds)
{
	union {
		char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec iov = { .iov_base = (void *)data, .iov_len = len };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (n_fds) {
		struct cmsghdr *cmsg;

		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		cmsg = CMSG_FIRSTHDR(&msg);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		for (size_t i = 0; i < n_fds; i++)
			memcpy(CMSG_DATA(cmsg) + i * sizeof(int), &socket, sizeof(int));
	}
	FUZZ_CHECK(sendmsg(socket, &msg, MSG_NOSIGNAL) == (ssize_t)len);
}

/* Descriptors are given out from the lowest: if none leaked, the next is the one it was before. */
static int next_fd(int socket)
{
	int fd = fcntl(socket, F_DUPFD_CLOEXEC, 3);

	FUZZ_CHECK(fd >= 0);
	return fd_close(fd), fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static char received[FRAME_MAX];
	int r, before, sockets[2], fds[FRAME_FDS];
	size_t len, n_fds, n_sent;

	if (!size)
		return 0;
	n_sent = data[0] % (FDS_MAX + 1);
	FUZZ_CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets));
	before = next_fd(sockets[0]);
	send_packet(sockets[0], data + 1, size - 1, n_sent);
	r = frame_receive(sockets[1], received, &len, fds, &n_fds);
	if (!r) {
		FUZZ_CHECK(len == size - 1 && n_fds == n_sent && !memcmp(received, data + 1, len));
		for (size_t i = 0; i < n_fds; i++)
			(void)fd_close(fds[i]);
	} else {
		FUZZ_CHECK(r == -EPROTO || (r == FRAME_E_EOF && size == 1));
		FUZZ_CHECK(n_sent > FRAME_FDS || size == 1 || size - 1 > FRAME_MAX);
	}
	FUZZ_CHECK(next_fd(sockets[0]) == before);
	(void)fd_close(sockets[0]);
	(void)fd_close(sockets[1]);
	return 0;
}
