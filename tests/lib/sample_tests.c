/* Tests that end in every way a test can end; test_runner.c runs this program and looks at what the runner makes of it. */
#include "test.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>

TEST(passes)
{
	ASSERT_TRUE(access(test_dir(), W_OK) == 0);
}

TEST(fails)
{
	ASSERT_EQ(1 + 1, 3);
}

TEST(skips)
{
	TEST_SKIP("no %s here", "moon");
}

TEST(crashes)
{
	(void)signal(SIGABRT, SIG_DFL);
	(void)raise(SIGABRT);
}

TEST(exits)
{
	exit(3);
}

TEST(leaks_a_descriptor)
{
	ASSERT_INT(open("/dev/null", O_RDONLY), >=, 0);
}

static void *close_late(void *arg)
{
	(void)poll(NULL, 0, 100);
	(void)close(*(int *)arg);
	return NULL;
}

TEST(closes_a_descriptor_late)
{
	static int fd;
	pthread_t thread;

	fd = open("/dev/null", O_RDONLY);
	ASSERT_INT(fd, >=, 0);
	ASSERT_OK(pthread_create(&thread, NULL, close_late, &fd));
	(void)pthread_detach(thread);
}

TEST_TIMEOUT(never_ends, 1)
{
	(void)printf("dir %s\n", test_dir());
	(void)fflush(stdout);
	for (;;)
		(void)pause();
}

TEST(leaves_a_process)
{
	pid_t pid = fork();

	ASSERT_INT(pid, >=, 0);
	while (pid == 0)
		(void)pause();
	(void)printf("left %d\n", (int)pid);
}

TEST(leaves_files)
{
	char path[128];

	(void)printf("dir %s\n", test_dir());
	for (unsigned i = 0; i < 3; i++) {
		(void)snprintf(path, sizeof(path), "%s/%u", test_dir(), i);
		ASSERT_OK(fd_close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) + 1);
	}
}

TEST_FULL_TIER(is_timed, "a sample of those")
{
	ASSERT_TRUE(true);
}
