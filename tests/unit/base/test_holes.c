/* Holes are made and told; what is there and cannot be had is told, too, and broken memory is no hole. */
#include "base/memory/holes.h"
#include "base/pages.h"
#include "test.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* Pages are there for who makes them, though not for who touches them: as those that could not be read from swap. */
static atomic_bool is_lost;

int __real_ioctl(int fd, unsigned long what, ...);
int __wrap_ioctl(int fd, unsigned long what, ...);
int __wrap_ioctl(int fd, unsigned long what, ...)
{
	va_list args;
	void *data;

	va_start(args, what);
	data = va_arg(args, void *);
	va_end(args);
	if (what != UFFDIO_ZEROPAGE || !is_lost)
		return __real_ioctl(fd, what, data);
	errno = EEXIST;
	return -1;
}

/* A page that nobody has made, and the descriptor that says what was met. */
static char *open_world(int *ret_fd)
{
	int fd = memfd_create("theirs", MFD_CLOEXEC);
	size_t len = page_size();
	void *data;

	if (holes_open(ret_fd))
		TEST_SKIP("userfaultfd cannot be had");
	ASSERT_OK(ftruncate(fd, (off_t)len));
	data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_TRUE(data != MAP_FAILED);
	ASSERT_OK(holes_watch(data, len));
	(void)fd_close(fd);
	return data;
}

static void *touch(void *data)
{
	return (void *)(uintptr_t) * (volatile char *)data;
}

static void *await_hole(int fd)
{
	struct pollfd news = { .fd = fd, .events = POLLIN };
	void *page = NULL;

	while (!holes_take(&page, 1))
		ASSERT_EQ(poll(&news, 1, -1), 1);
	return page;
}

TEST(a_hole_is_made_and_told)
{
	int fd;
	char *data = open_world(&fd);

	ASSERT_TRUE(!touch(data));
	ASSERT_TRUE(await_hole(fd) == data);
	ASSERT_TRUE(!touch(data));
	ASSERT_EQ(holes_made(), 1);
	holes_close();
}

/* Who touches it goes on when the taker has put other memory there. */
TEST(a_page_that_is_lost_is_told)
{
	int fd;
	char *data = open_world(&fd);
	pthread_t thread;

	is_lost = true;
	ASSERT_OK(pthread_create(&thread, NULL, touch, data));
	ASSERT_TRUE(await_hole(fd) == data);
	ASSERT_TRUE(mmap(data, page_size(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
			 0) == data);
	ASSERT_OK(pthread_join(thread, NULL));
	holes_close();
}

/* Whether a process that does it ends by that. */
static bool is_the_end(void (*act)(char *data))
{
	int status, fd;
	pid_t pid = fork();

	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		act(open_world(&fd));
		_exit(0);
	}
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	return !WIFEXITED(status) || WEXITSTATUS(status);
}

static void touch_lost(char *data)
{
	is_lost = true;
	(void)touch(data);
}

static void be_told(char *data, int code)
{
	siginfo_t info = { .si_signo = SIGBUS, .si_code = code };

	info.si_addr = data;
	(void)syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), SIGBUS, &info);
}

static void touch_broken(char *data)
{
	be_told(data, BUS_MCEERR_AR);
}

static void have_broken(char *data)
{
	be_told(data, BUS_MCEERR_AO);
}

static void have_hole(char *data)
{
	be_told(data, BUS_ADRERR);
}

TEST(what_is_no_hole_ends_the_process)
{
	int fd;

	(void)open_world(&fd);
	holes_close();
	ASSERT_TRUE(!is_the_end(have_hole));
	/* There is nobody who would put other memory there. */
	ASSERT_TRUE(is_the_end(touch_lost));
	ASSERT_TRUE(is_the_end(touch_broken));
	ASSERT_TRUE(is_the_end(have_broken));
}
