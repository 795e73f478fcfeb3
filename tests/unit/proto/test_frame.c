/* Packets and their descriptors over a socket pair, and senders that break the rules. */
#include "proto/frame.h"
#include "test.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

struct pair {
	int a, b;
	char data[FRAME_MAX];
};

static struct pair *pair_new(int flags)
{
	struct pair *pair = calloc(1, sizeof(*pair));
	int fds[2];

	ASSERT_TRUE(pair);
	ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0, fds));
	pair->a = fds[0];
	pair->b = fds[1];
	return pair;
}

static struct pair *pair_free(struct pair *pair)
{
	(void)fd_close(pair->a);
	(void)fd_close(pair->b);
	free(pair);
	return NULL;
}
DEFINE_CLEANUP(struct pair *, pair_free)

/* A packet with n descriptors, sent by hand: what frame_send() refuses to do. */
static void send_raw(int socket, const void *data, size_t len, int fd, size_t n)
{
	union {
		char bytes[CMSG_SPACE(64 * sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec iov = { .iov_base = (void *)data, .iov_len = len };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (n) {
		struct cmsghdr *cmsg;

		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(n * sizeof(int));
		cmsg = CMSG_FIRSTHDR(&msg);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(n * sizeof(int));
		for (size_t i = 0; i < n; i++)
			memcpy(CMSG_DATA(cmsg) + i * sizeof(int), &fd, sizeof(int));
	}
	ASSERT_EQ(sendmsg(socket, &msg, MSG_NOSIGNAL), (ssize_t)len);
}

static size_t count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	size_t n = 0;

	ASSERT_TRUE(dir);
	while (readdir(dir))
		n++;
	(void)closedir(dir);
	return n;
}

/* What is beside a packet neither comes nor goes. */
TEST(bare_packets_only)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(SOCK_NONBLOCK);
	size_t len, n_fds, n_before = count_fds();
	int fds[FRAME_FDS];

	ASSERT_EQ(frame_receive_bare(p->b, p->data, &len), FRAME_E_AGAIN);
	ASSERT_OK(frame_send(p->a, "one", 3, NULL, 0));
	send_raw(p->a, "four", 4, p->a, 1);
	send_raw(p->a, "many", 4, p->a, 60);
	ASSERT_OK(frame_receive_bare(p->b, p->data, &len));
	ASSERT_EQ(len, 3);
	ASSERT_MEM(p->data, "one", 3);
	for (size_t i = 0; i < 2; i++) {
		ASSERT_EQ(frame_receive_bare(p->b, p->data, &len), FRAME_E_FDS);
		ASSERT_EQ(len, 4);
		ASSERT_MEM(p->data, "four", 4);
	}
	ASSERT_EQ(count_fds(), n_before);
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(n_fds, 1);
	(void)fd_close(fds[0]);
	ASSERT_EQ(frame_receive_bare(p->b, p->data, &len), FRAME_E_FDS);
	ASSERT_MEM(p->data, "many", 4);
	ASSERT_TRUE(!frame_end_bare(p->b));
	ASSERT_EQ(frame_send(p->a, "late", 4, NULL, 0), FRAME_E_EOF);
	ASSERT_EQ(count_fds(), n_before);
}

TEST(bare_ends)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(SOCK_NONBLOCK);
	_cleanup_(freep) char *big = calloc(1, FRAME_MAX + 1);
	size_t len;

	ASSERT_EQ(send(p->a, big, FRAME_MAX + 1, MSG_NOSIGNAL), FRAME_MAX + 1);
	ASSERT_EQ(frame_receive_bare(p->b, p->data, &len), -EPROTO);
	ASSERT_OK(frame_send(p->a, "one", 3, NULL, 0));
	ASSERT_TRUE(frame_end_bare(p->b));
	ASSERT_EQ(frame_receive_bare(p->b, p->data, &len), FRAME_E_EOF);
	ASSERT_EQ(frame_receive_bare(-1, p->data, &len), -EBADF);
}

TEST(packets_keep_their_bounds)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	int fds[FRAME_FDS];
	size_t len, n_fds;

	ASSERT_OK(frame_send(p->a, "one", 3, NULL, 0));
	ASSERT_OK(frame_send(p->a, "three", 5, NULL, 0));
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(len, 3);
	ASSERT_EQ(n_fds, 0);
	ASSERT_MEM(p->data, "one", 3);
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(len, 5);
	ASSERT_MEM(p->data, "three", 5);
}

TEST(the_largest_packet_passes_and_one_byte_more_does_not)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	_cleanup_(freep) char *big = calloc(1, FRAME_MAX + 1);
	int fds[FRAME_FDS];
	size_t len, n_fds;

	ASSERT_TRUE(big);
	big[FRAME_MAX - 1] = 'x';
	ASSERT_OK(frame_send(p->a, big, FRAME_MAX, NULL, 0));
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(len, FRAME_MAX);
	ASSERT_MEM(p->data, big, FRAME_MAX);

	ASSERT_EQ(frame_send(p->a, big, FRAME_MAX + 1, NULL, 0), -EMSGSIZE);
	send_raw(p->a, big, FRAME_MAX + 1, -1, 0);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), -EPROTO);
}

TEST(descriptors_arrive_as_the_same_files_close_on_exec)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	int pipes[2][2], send[FRAME_FDS], fds[FRAME_FDS];
	size_t len, n_fds;

	ASSERT_OK(pipe2(pipes[0], O_CLOEXEC));
	ASSERT_OK(pipe2(pipes[1], O_CLOEXEC));
	for (size_t i = 0; i < FRAME_FDS; i++)
		send[i] = pipes[i / 2][i % 2];
	ASSERT_OK(frame_send(p->a, "fds", 3, send, FRAME_FDS));
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(n_fds, FRAME_FDS);
	for (size_t i = 0; i < FRAME_FDS; i++) {
		struct stat sent, got;

		ASSERT_OK(fstat(send[i], &sent));
		ASSERT_OK(fstat(fds[i], &got));
		ASSERT_TRUE(sent.st_ino == got.st_ino && sent.st_dev == got.st_dev);
		ASSERT_TRUE(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
		(void)fd_close(fds[i]);
		(void)fd_close(send[i]);
	}
}

TEST(too_many_descriptors_are_refused_and_closed)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	int fds[FRAME_FDS];
	size_t len, n_fds, before = count_fds();

	ASSERT_EQ(frame_send(p->a, "x", 1, (int[5]){ 0 }, 5), -EINVAL);
	send_raw(p->a, "x", 1, p->a, FRAME_FDS + 1);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), -EPROTO);
	send_raw(p->a, "x", 1, p->a, 60);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), -EPROTO);
	ASSERT_EQ(count_fds(), before);

	/* The socket is still good for the next packet. */
	ASSERT_OK(frame_send(p->a, "y", 1, NULL, 0));
	ASSERT_OK(frame_receive(p->b, p->data, &len, fds, &n_fds));
	ASSERT_EQ(len, 1);
}

TEST(descriptors_of_a_truncated_packet_are_closed)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	_cleanup_(freep) char *big = calloc(1, FRAME_MAX + 1);
	int fds[FRAME_FDS];
	size_t len, n_fds, before = count_fds();

	ASSERT_TRUE(big);
	send_raw(p->a, big, FRAME_MAX + 1, p->a, 2);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), -EPROTO);
	ASSERT_EQ(count_fds(), before);
}

TEST(empty_packets_are_not_sent_and_end_what_is_received)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	int fds[FRAME_FDS];
	size_t len, n_fds, before = count_fds();

	ASSERT_EQ(frame_send(p->a, "", 0, NULL, 0), -EINVAL);
	send_raw(p->a, "", 0, -1, 0);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), FRAME_E_EOF);
	send_raw(p->a, "", 0, p->a, 1);
	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), -EPROTO);
	ASSERT_EQ(count_fds(), before);
}

TEST(a_socket_that_does_not_block_says_again)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(SOCK_NONBLOCK);
	int r, fds[FRAME_FDS];
	size_t len, n_fds, n_sent = 0;

	ASSERT_EQ(frame_receive(p->b, p->data, &len, fds, &n_fds), FRAME_E_AGAIN);
	while ((r = frame_send(p->a, p->data, 4096, NULL, 0)) == 0)
		n_sent++;
	ASSERT_EQ(r, FRAME_E_AGAIN);
	ASSERT_TRUE(n_sent > 0);
	while ((r = frame_receive(p->b, p->data, &len, fds, &n_fds)) == 0)
		n_sent--;
	ASSERT_EQ(r, FRAME_E_AGAIN);
	ASSERT_EQ(n_sent, 0);
}

TEST(a_closed_peer_is_the_end_both_ways_without_a_signal)
{
	_cleanup_(pair_freep) struct pair *p = pair_new(0);
	int fds[FRAME_FDS];
	size_t len, n_fds;

	ASSERT_OK(frame_send(p->b, "last", 4, NULL, 0));
	p->b = fd_close(p->b);
	ASSERT_OK(frame_receive(p->a, p->data, &len, fds, &n_fds));
	ASSERT_EQ(len, 4);
	ASSERT_EQ(frame_receive(p->a, p->data, &len, fds, &n_fds), FRAME_E_EOF);
	ASSERT_EQ(frame_send(p->a, "x", 1, NULL, 0), FRAME_E_EOF);
}

TEST(what_is_not_a_socket_is_an_error)
{
	char data[FRAME_MAX];
	int fds[FRAME_FDS];
	size_t len, n_fds;

	ASSERT_EQ(frame_send(-1, "x", 1, NULL, 0), -EBADF);
	ASSERT_EQ(frame_receive(-1, data, &len, fds, &n_fds), -EBADF);
}
