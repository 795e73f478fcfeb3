/* Whether a process is the one it was: alive, ended, replaced, hidden from /proc. */
#include "base/process.h"
#include "test.h"
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/wait.h>

/* The file that was opened last. */
static char opened[64];

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen64(const char *path, const char *mode);

FILE *__wrap_fopen(const char *path, const char *mode)
{
	(void)snprintf(opened, sizeof(opened), "%s", path);
	return __real_fopen(path, mode);
}

FILE *__wrap_fopen64(const char *path, const char *mode)
{
	return __wrap_fopen(path, mode);
}

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

#define THREADS 50

static pthread_barrier_t all_there, all_end;

static void *wait_for_end(void *data)
{
	(void)pthread_barrier_wait(&all_there);
	(void)pthread_barrier_wait(&all_end);
	return data;
}

/* Field 22. */
static unsigned long long started_of(const char *path)
{
	unsigned long long started = 0;
	char line[1024], *field;
	FILE *file = fopen(path, "re");

	ASSERT_TRUE(file && fgets(line, sizeof(line), file));
	(void)fclose(file);
	field = strrchr(line, ')');
	for (int i = 2; field && i < 22; i++)
		field = strchr(field + 1, ' ');
	ASSERT_TRUE(field && sscanf(field, "%llu", &started) == 1);
	return started;
}

/* The kernel goes over all threads for the file of a process, but not for that of its first thread. */
TEST(threads_of_a_process_are_not_looked_at)
{
	pthread_t threads[THREADS];
	uint64_t started;
	char path[64];

	ASSERT_EQ(pthread_barrier_init(&all_there, NULL, THREADS + 1), 0);
	ASSERT_EQ(pthread_barrier_init(&all_end, NULL, THREADS + 1), 0);
	for (unsigned i = 0; i < THREADS; i++)
		ASSERT_EQ(pthread_create(&threads[i], NULL, wait_for_end, NULL), 0);
	(void)pthread_barrier_wait(&all_there);
	started = process_started((uint32_t)getpid());
	(void)snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", getpid(), getpid());
	ASSERT_STR(opened, path);
	(void)snprintf(path, sizeof(path), "/proc/%d/stat", getpid());
	ASSERT_EQ(started, started_of(path));
	(void)pthread_barrier_wait(&all_end);
	for (unsigned i = 0; i < THREADS; i++)
		ASSERT_EQ(pthread_join(threads[i], NULL), 0);
}

static void *exec_sleep(void *data)
{
	(void)execl("/bin/sleep", "sleep", "1000", NULL);
	_exit(1);
	return data;
}

/* The thread that calls execve(2) becomes the first one, and is as old as that was. */
TEST(a_process_whose_other_thread_executes_a_program_stays_the_same)
{
	uint64_t started;
	pthread_t thread;
	char byte = 0;
	int go[2], executed[2];
	pid_t pid;

	ASSERT_OK(pipe(go));
	ASSERT_OK(pipe2(executed, O_CLOEXEC));
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		if (read(go[0], &byte, 1) == 1 && !pthread_create(&thread, NULL, exec_sleep, NULL))
			for (;;)
				(void)pause();
		_exit(1);
	}
	ASSERT_OK(close(executed[1]));
	started = process_started((uint32_t)pid);
	ASSERT_TRUE(started);
	/* So that the thread is younger, in clock ticks. */
	(void)usleep(50000);
	ASSERT_EQ(write(go[1], &byte, 1), 1);
	ASSERT_EQ(read(executed[0], &byte, 1), 0);
	ASSERT_EQ(process_look((uint32_t)pid, started), PROCESS_ALIVE);
	ASSERT_OK(kill(pid, SIGKILL));
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
	ASSERT_OK(close(executed[0]));
	ASSERT_OK(close(go[0]));
	ASSERT_OK(close(go[1]));
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
