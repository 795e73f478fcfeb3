/* A fault's stack on stderr, and the end of the process by the fault's own signal. */
#include "base/crash.h"
#include "test.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#if CRASH_IS_REPORTED
/* What a process says that a signal ends; its status. */
static int end_by(int number, char *text, size_t size)
{
	int fds[2], status = 0;
	size_t len = 0;
	ssize_t n;
	pid_t pid;

	ASSERT_OK(pipe2(fds, O_CLOEXEC));
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		const struct rlimit none = { 0 };

		(void)setrlimit(RLIMIT_CORE, &none);
		(void)dup2(fds[1], STDERR_FILENO);
		crash_tell();
		(void)raise(number);
		_exit(0);
	}
	(void)close(fds[1]);
	while ((n = read(fds[0], text + len, size - 1 - len)) > 0)
		len += (size_t)n;
	text[len] = '\0';
	(void)close(fds[0]);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	return status;
}
#endif

TEST(a_fault_is_told_and_ends_the_process)
{
#if CRASH_IS_REPORTED
	static const int signals[] = { SIGSEGV, SIGBUS, SIGABRT };
	char text[8192];

	for (size_t i = 0; i < ARRAY_SIZE(signals); i++) {
		int status = end_by(signals[i], text, sizeof(text));

		ASSERT_TRUE(WIFSIGNALED(status));
		ASSERT_EQ(WTERMSIG(status), signals[i]);
		ASSERT_CONTAINS(text, "crash: calls, the innermost first:\n");
		ASSERT_CONTAINS(text, "test-base-crash(");
	}
#else
	TEST_SKIP("built without failpoints, or with a sanitizer, which tells it");
#endif
}
