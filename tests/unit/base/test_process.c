/* Whether a process is the one it was: alive, ended, replaced, hidden from /proc. */
#include "base/process.h"
#include "test.h"
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

TEST(a_process_is_alive_until_it_ends_and_another_is_not_it)
{
	pid_t pid = fork();
	uint64_t started;
	siginfo_t info;

	ASSERT_TRUE(pid >= 0);
	if (!pid)
		for (;;)
			(void)pause();
	started = process_started((uint32_t)pid);
	ASSERT_TRUE(started);
	ASSERT_EQ(process_look((uint32_t)pid, started), PROCESS_ALIVE);
	ASSERT_EQ(process_look((uint32_t)pid, 0), PROCESS_ALIVE);
	ASSERT_EQ(process_look((uint32_t)pid, started + 1), PROCESS_GONE);
	ASSERT_OK(kill(pid, SIGKILL));
	/* Dead, though nobody has taken note of it. */
	ASSERT_OK(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT));
	ASSERT_EQ(process_look((uint32_t)pid, 0), PROCESS_GONE);
	ASSERT_EQ(process_look((uint32_t)pid, started), PROCESS_GONE);
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
	ASSERT_EQ(process_look((uint32_t)pid, started), PROCESS_GONE);
	ASSERT_EQ(process_started((uint32_t)pid), 0);
}

TEST(what_cannot_be_told_is_unknown)
{
	ASSERT_EQ(process_look(0, 1), PROCESS_UNKNOWN);
	ASSERT_EQ(process_look(UINT32_MAX, 1), PROCESS_UNKNOWN);
	ASSERT_EQ(process_started(0), 0);
	ASSERT_TRUE(process_namespace());
}

/* As under ProtectProc=invisible: a process of another user, in a /proc that hides it. */
TEST(a_process_that_proc_hides_is_seen_all_the_same)
{
	pid_t pid, looker;
	int status;

	if (geteuid() || unshare(CLONE_NEWNS) ||
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("proc", "/proc", "proc", 0, "hidepid=invisible"))
		TEST_SKIP("needs root, to mount /proc");
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid)
		for (;;)
			(void)pause();
	looker = fork();
	ASSERT_TRUE(looker >= 0);
	if (!looker) {
		if (setresgid(65534, 65534, 65534) || setgroups(0, NULL) ||
		    setresuid(65534, 65534, 65534))
			_exit(9);
		_exit(process_started((uint32_t)pid) ? 8 : process_look((uint32_t)pid, 1));
	}
	ASSERT_EQ(waitpid(looker, &status, 0), looker);
	ASSERT_TRUE(WIFEXITED(status));
	ASSERT_EQ(WEXITSTATUS(status), PROCESS_ALIVE);
	ASSERT_OK(kill(pid, SIGKILL));
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
}
