/*
 * The porter with sockets and files that cannot be closed soon: what comes to the daemon, what is
 * closed elsewhere.
 */
#include "base/clock.h"
#include "base/loop/porter.h"
#include "proto/frame.h"
#include "test.h"
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

struct world {
	struct loop *loop;
	bool ended;
};

struct seen {
	struct porter_errand errand;
	unsigned n_taken, n_over;
	int status, fd;
};

static void on_ended(void *user)
{
	((struct world *)user)->ended = true;
}

static void on_taken(struct porter_errand *errand, int status, int fd)
{
	struct seen *seen = container_of(errand, struct seen, errand);

	ASSERT_EQ(seen->n_over, 0);
	seen->n_taken++;
	seen->status = status;
	seen->fd = fd;
}

static void on_over(struct porter_errand *errand)
{
	container_of(errand, struct seen, errand)->n_over++;
}

#define SEEN ((struct seen){ .errand = { .taken = on_taken, .over = on_over }, .fd = -1 })

static unsigned n_refused; /* of sendmsg(), that are still to be */

ssize_t __real_sendmsg(int fd, const struct msghdr *msg, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags);

ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags)
{
	if (!n_refused)
		return __real_sendmsg(fd, msg, flags);
	n_refused--;
	errno = ETOOMANYREFS;
	return -1;
}

static void open_world(struct world *world)
{
	*world = (struct world){ 0 };
	ASSERT_OK(porter_start(NULL, NULL));
	ASSERT_OK(loop_new(&world->loop));
	ASSERT_OK(porter_attach(world->loop, on_ended, world));
}

static void close_world(struct world *world)
{
	ASSERT_TRUE(!world->ended);
	porter_stop();
	world->loop = loop_free(world->loop);
}

static void run_until(struct world *world, const unsigned *count, unsigned n)
{
	while (*count < n)
		ASSERT_OK(loop_turn(world->loop, -1));
}

/* A socket in which descriptors lie. */
static int socket_with(const int *fds, size_t n_fds)
{
	int ends[2];

	ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends));
	ASSERT_OK(frame_send(ends[0], "x", 1, fds, n_fds));
	ASSERT_OK(frame_send(ends[0], "y", 1, NULL, 0));
	(void)fd_close(ends[0]);
	return ends[1];
}

/* The far end of a pipe sees when nobody has the near one any more. */
static bool hung_up(int fd)
{
	struct pollfd pollfd = { .fd = fd };

	return poll(&pollfd, 1, 0) == 1 && pollfd.revents & POLLHUP;
}

static bool same_file(int a, int b)
{
	struct stat one, other;

	ASSERT_OK(fstat(a, &one));
	ASSERT_OK(fstat(b, &other));
	return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

TEST(memory_comes_and_the_rest_stays)
{
	int memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct seen seen = SEEN;
	struct world world;
	char packet[FRAME_MAX];
	size_t len;
	int socket;

	open_world(&world);
	socket = socket_with(&memory, 1);
	ASSERT_EQ(frame_receive_bare(socket, packet, &len), FRAME_E_FDS);
	ASSERT_OK(porter_take(&seen.errand, PORTER_MEMFD, socket));
	run_until(&world, &seen.n_over, 1);
	ASSERT_EQ(seen.n_taken, 1);
	ASSERT_EQ(seen.status, 0);
	ASSERT_TRUE(same_file(seen.fd, memory));
	ASSERT_OK(frame_receive_bare(socket, packet, &len));
	ASSERT_EQ(packet[0], 'y');
	(void)fd_close(seen.fd);
	(void)fd_close(socket);
	(void)fd_close(memory);
	close_world(&world);
}

TEST(memory_of_ours_is_sealed_once)
{
	int memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct world world;

	open_world(&world);
	for (unsigned i = 0; i < 2; i++) {
		struct seen seen = SEEN;

		ASSERT_OK(porter_seal(&seen.errand, fcntl(memory, F_DUPFD_CLOEXEC, 0)));
		run_until(&world, &seen.n_over, 1);
		ASSERT_EQ(seen.n_taken, 1);
		ASSERT_EQ(seen.fd, -1);
		ASSERT_EQ(seen.status, i ? -EPERM : 0);
		ASSERT_EQ(fcntl(memory, F_GET_SEALS), F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
	}
	(void)fd_close(memory);
	close_world(&world);
}

/* A page whose first reader waits until held_go_on(). */
struct held {
	void *page;
	int memory, userfault;
	pthread_t writer;
};

static void *write_it(void *user)
{
	const struct held *held = user;

	ASSERT_EQ(write(held->memory, held->page, 4096), 4096);
	return NULL;
}

/* Writes to the memory, with its lock, and does not come to an end. Returns false where that cannot be had. */
static bool held_begin(struct held *held, int memory)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct pollfd asked;

	held->memory = memory;
	held->userfault = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (held->userfault < 0)
		return false;
	held->page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(held->page != MAP_FAILED);
	range.range = (struct uffdio_range){ (uintptr_t)held->page, 4096 };
	ASSERT_OK(ioctl(held->userfault, UFFDIO_API, &api));
	ASSERT_OK(ioctl(held->userfault, UFFDIO_REGISTER, &range));
	ASSERT_OK(pthread_create(&held->writer, NULL, write_it, held));
	asked = (struct pollfd){ .fd = held->userfault, .events = POLLIN };
	ASSERT_EQ(poll(&asked, 1, -1), 1);
	return true;
}

static void held_go_on(struct held *held)
{
	struct uffdio_zeropage zero = { .range = { (uintptr_t)held->page, 4096 } };

	ASSERT_OK(ioctl(held->userfault, UFFDIO_ZEROPAGE, &zero));
	ASSERT_OK(pthread_join(held->writer, NULL));
	(void)fd_close(held->userfault);
	(void)munmap(held->page, 4096);
}

TEST(memory_that_cannot_be_sealed_yet_keeps_nobody)
{
	int memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING), socket;
	struct seen seal = SEEN, take = SEEN;
	struct world world;
	struct held held;

	open_world(&world);
	if (!held_begin(&held, memory))
		TEST_SKIP("userfaultfd cannot be had");
	ASSERT_OK(porter_seal(&seal.errand, fcntl(memory, F_DUPFD_CLOEXEC, 0)));
	socket = socket_with(&memory, 1);
	ASSERT_OK(porter_take(&take.errand, PORTER_MEMFD, socket));
	run_until(&world, &take.n_over, 1);
	ASSERT_EQ(take.status, 0);
	ASSERT_EQ(seal.n_taken, 0);
	held_go_on(&held);
	run_until(&world, &seal.n_over, 1);
	ASSERT_EQ(seal.status, 0);
	(void)fd_close(take.fd);
	(void)fd_close(socket);
	(void)fd_close(memory);
	close_world(&world);
}

TEST(what_is_no_memory_is_closed_elsewhere)
{
	struct world world;
	int ends[2], socket;

	open_world(&world);
	for (size_t n = 1; n <= FRAME_FDS; n++) {
		struct seen seen = SEEN;

		ASSERT_OK(pipe2(ends, O_CLOEXEC));
		socket = socket_with((int[FRAME_FDS]){ ends[1], ends[1], ends[1], ends[1] }, n);
		(void)fd_close(ends[1]);
		ASSERT_OK(porter_take(&seen.errand, PORTER_MEMFD, socket));
		run_until(&world, &seen.n_over, 1);
		ASSERT_EQ(seen.n_taken, 1);
		ASSERT_EQ(seen.status, n > 1 ? -E2BIG : -EINVAL);
		ASSERT_EQ(seen.fd, -1);
		ASSERT_TRUE(hung_up(ends[0]));
		(void)fd_close(ends[0]);
		(void)fd_close(socket);
	}
	close_world(&world);
}

/* A TCP socket whose close() waits for a minute: of what it has to send its peer takes nothing. */
static int lingering_socket(int *ret_peer)
{
	const struct linger linger = { .l_onoff = 1, .l_linger = 60 };
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	static const char data[1 << 16];

	ASSERT_OK(bind(listener, (struct sockaddr *)&address, len));
	ASSERT_OK(listen(listener, 1));
	ASSERT_OK(getsockname(listener, (struct sockaddr *)&address, &len));
	ASSERT_OK(connect(fd, (struct sockaddr *)&address, len));
	*ret_peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ASSERT_INT(*ret_peer, >=, 0);
	while (send(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
	ASSERT_OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
	(void)fd_close(listener);
	return fd;
}

/* The porter runs whenever it can, and this process when it waits: between any two calls the porter may have done all it was told. */
TEST(who_asks_never_closes_last)
{
	struct sched_param param = { 0 };
	struct seen seen[2];
	struct world world;
	int sockets[2], peers[2];
	uint64_t began_ns;
	cpu_set_t one;

	for (unsigned i = 0; i < 2; i++) {
		int fd = lingering_socket(&peers[i]);

		sockets[i] = socket_with(&fd, 1);
		/* Not the last: it lies in the socket. */
		(void)fd_close(fd);
		seen[i] = SEEN;
	}
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	ASSERT_OK(sched_setaffinity(0, sizeof(one), &one));
	open_world(&world);
	ASSERT_OK(sched_setscheduler(0, SCHED_IDLE, &param));
	began_ns = clock_now_ns();
	for (unsigned i = 0; i < 2; i++) {
		porter_close(&seen[i].errand, sockets[i]);
		run_until(&world, &seen[i].n_over, 1);
		(void)fd_close(peers[i]);
	}
	ASSERT_INT(clock_now_ns() - began_ns, <, 30 * NSEC_PER_SEC);
	close_world(&world);
}

TEST(parcels_hold_anything)
{
	struct seen taken = SEEN, closed = SEEN;
	int ends[2], socket, fd;
	struct world world;

	open_world(&world);
	ASSERT_OK(pipe2(ends, O_CLOEXEC));
	socket = socket_with(&ends[1], 1);
	ASSERT_OK(porter_take(&taken.errand, PORTER_FRAME, socket));
	run_until(&world, &taken.n_over, 1);
	ASSERT_EQ(taken.status, 0);
	fd = porter_open_frame(taken.fd);
	ASSERT_TRUE(same_file(fd, ends[1]));
	(void)fd_close(fd);
	(void)fd_close(taken.fd);
	(void)fd_close(socket);

	/* One that nobody opens. */
	taken = SEEN;
	socket = socket_with(&ends[1], 1);
	(void)fd_close(ends[1]);
	ASSERT_OK(porter_take(&taken.errand, PORTER_FRAME, socket));
	run_until(&world, &taken.n_over, 1);
	ASSERT_TRUE(!hung_up(ends[0]));
	porter_close(&closed.errand, taken.fd);
	run_until(&world, &closed.n_over, 1);
	ASSERT_TRUE(hung_up(ends[0]));
	(void)fd_close(ends[0]);
	(void)fd_close(socket);
	close_world(&world);
}

/* A user has but so many descriptors on their way: who asked hears of it later. */
TEST(what_cannot_be_sent_is_sent_later)
{
	struct seen seen[3] = { SEEN, SEEN, SEEN };
	struct world world;

	open_world(&world);
	n_refused = 3;
	for (size_t i = 0; i < ARRAY_SIZE(seen); i++)
		porter_close(&seen[i].errand, memfd_create("closed", MFD_CLOEXEC));
	ASSERT_EQ(n_refused, 2);
	/* What somebody asks for is charged to somebody. */
	ASSERT_EQ(porter_backlog(), 0);
	for (size_t i = 0; i < 5; i++)
		porter_close(NULL, memfd_create("closed", MFD_CLOEXEC));
	ASSERT_EQ(porter_backlog(), 5);
	while (!seen[0].n_over || !seen[1].n_over || !seen[2].n_over)
		ASSERT_INT(loop_turn(world.loop, 1000), >=, 0);
	ASSERT_EQ(n_refused, 0);
	while (porter_backlog())
		ASSERT_INT(loop_turn(world.loop, 1000), >=, 0);
	close_world(&world);
}

/* More than fit into the porter's socket. */
TEST(many_are_closed_and_some_forgotten)
{
	enum { N = 700 };
	static struct seen seen[N];
	struct world world;
	unsigned n_over = 0;
	int ends[2];

	open_world(&world);
	ASSERT_OK(pipe2(ends, O_CLOEXEC));
	for (unsigned i = 0; i < N; i++) {
		int socket = socket_with(&ends[1], 1);

		seen[i] = SEEN;
		porter_close(&seen[i].errand, socket);
		if (i % 7 == 0)
			porter_forget(&seen[i].errand);
	}
	(void)fd_close(ends[1]);
	while (!hung_up(ends[0]))
		ASSERT_OK(loop_turn(world.loop, 10));
	run_until(&world, &seen[N - 1].n_over, (N - 1) % 7 != 0);
	for (unsigned i = 0; i < N; i++)
		n_over += seen[i].n_over;
	while (n_over < N - (N + 6) / 7) {
		ASSERT_OK(loop_turn(world.loop, -1));
		n_over = 0;
		for (unsigned i = 0; i < N; i++)
			n_over += seen[i].n_over;
	}
	for (unsigned i = 0; i < N; i++)
		ASSERT_EQ(seen[i].n_over, i % 7 != 0);
	(void)fd_close(ends[0]);
	close_world(&world);
}
