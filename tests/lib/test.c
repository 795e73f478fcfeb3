#include "test.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#define TEST_TIMEOUT_S	60
#define TEST_EXIT_SKIP	77   /* meson's number too */
#define TEST_DIR_MAX	64   /* so that names of sockets below it fit */
#define TEST_MAX_FD	1024 /* highest descriptor looked for as a leak */
#define TEST_FD_GRACE_S 3    /* for other threads to close theirs */

/* Shared by the runner and the test's process: outlives a crash of it. */
struct test_shared {
	char dir[TEST_DIR_MAX]; /* "" until test_dir() */
	char reason[256];
};

enum test_result { TEST_PASSED, TEST_FAILED, TEST_SKIPPED };

static struct test *tests, **tests_end = &tests;
static struct test_shared *test_shared;

void test_register(struct test *test)
{
	*tests_end = test;
	tests_end = &test->next;
}

void test_fail(const char *file, int line, const char *format, ...)
{
	va_list args;

	while (!strncmp(file, "../", 3))
		file += 3;
	(void)fflush(stdout);
	(void)fprintf(stderr, "%s:%d: ", file, line);
	va_start(args, format);
	(void)vfprintf(stderr, format, args);
	va_end(args);
	(void)fputc('\n', stderr);
	/* Not exit(): other threads of the test still run, and what it owned is beside the point now. */
	_exit(EXIT_FAILURE);
}

void test_skip(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)vsnprintf(test_shared->reason, sizeof(test_shared->reason), format, args);
	va_end(args);
	(void)fflush(stdout);
	_exit(TEST_EXIT_SKIP);
}

unsigned test_scale_s(unsigned seconds)
{
#if defined(TEST_SANITIZED)
	return 5 * seconds;
#else
	return seconds;
#endif
}

bool test_is_huge(const void *data)
{
	FILE *file = fopen("/proc/self/smaps", "re");
	unsigned long long at = (uintptr_t)data, start, end;
	bool is_there = false, is_huge = false;
	char line[512];

	ASSERT_TRUE(file);
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%llx-%llx ", &start, &end) == 2)
			is_there = at >= start && at < end;
		else if (is_there && !strncmp(line, "VmFlags:", 8))
			is_huge = strstr(line, " hg");
	}
	(void)fclose(file);
	return is_huge;
}

static uint64_t test_now_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

const char *test_dir(void)
{
	const char *place = getenv("TMPDIR"), *name = "bps-test-XXXXXX";

	if (test_shared->dir[0])
		return test_shared->dir;

	if (!place || strlen(place) + 1 + strlen(name) >= TEST_DIR_MAX)
		place = "/tmp";
	(void)snprintf(test_shared->dir, TEST_DIR_MAX, "%s/%s", place, name);
	if (!mkdtemp(test_shared->dir)) {
		test_shared->dir[0] = '\0';
		test_fail(__FILE__, __LINE__, "mkdtemp: %s", strerror(errno));
	}
	return test_shared->dir;
}

/* In the test's process */

static void test_read_fds(bool open_fds[static TEST_MAX_FD])
{
	DIR *dir = opendir("/proc/self/fd");
	const struct dirent *entry;

	memset(open_fds, 0, TEST_MAX_FD * sizeof(*open_fds));
	if (!dir)
		test_fail(__FILE__, __LINE__, "/proc/self/fd: %s", strerror(errno));
	while ((entry = readdir(dir))) {
		char *end;
		unsigned long fd = strtoul(entry->d_name, &end, 10);

		if (end != entry->d_name && fd < TEST_MAX_FD && (int)fd != dirfd(dir))
			open_fds[fd] = true;
	}
	(void)closedir(dir);
}

/* librdmacm keeps the devices that it has opened, each with a descriptor for its events, until the process ends. */
static bool is_of_rdma(const char *target, unsigned *n_devices)
{
	if (strncmp(target, "/dev/infiniband/uverbs", 22) == 0) {
		++*n_devices;
		return true;
	}
	if (strcmp(target, "anon_inode:[infinibandevent]") != 0 || !*n_devices)
		return false;
	--*n_devices;
	return true;
}

/* Descriptors that are open now and were not before; says which if `say`. */
static unsigned test_count_leaked_fds(const bool before[static TEST_MAX_FD], bool say)
{
	bool after[TEST_MAX_FD];
	unsigned n_leaked = 0, n_devices = 0;

	test_read_fds(after);
	for (unsigned fd = 0; fd < TEST_MAX_FD; fd++) {
		char path[64], target[256] = "";

		if (before[fd] || !after[fd])
			continue;
		(void)snprintf(path, sizeof(path), "/proc/self/fd/%u", fd);
		/* Closed meanwhile, by another thread. */
		if (readlink(path, target, sizeof(target) - 1) < 0 ||
		    is_of_rdma(target, &n_devices))
			continue;
		if (say)
			(void)fprintf(stderr, "descriptor %u (%s) was left open\n", fd, target);
		n_leaked++;
	}
	return n_leaked;
}

/*
 * A leak is what stays open. For a moment another thread may have a file open: one that the C library or a sanitizer
 * reads, or a detached one that was given up (getaddrinfo() reading /etc/hosts) and has yet to find out.
 */
static void test_check_fds(const bool before[static TEST_MAX_FD])
{
	const uint64_t until_ms = test_now_ms() + 1000ull * test_scale_s(TEST_FD_GRACE_S);

	for (;;) {
		const bool is_late = test_now_ms() >= until_ms;
		const unsigned n_leaked = test_count_leaked_fds(before, is_late);

		if (!n_leaked)
			return;
		if (is_late)
			test_fail(__FILE__, __LINE__, "%u descriptors leaked", n_leaked);
		(void)poll(NULL, 0, 5);
	}
}

_Noreturn static void test_child(const struct test *test)
{
	bool fds[TEST_MAX_FD];

	/* A group of its own, so that what it starts can be found; and its end if the runner is killed. */
	(void)setpgid(0, 0);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	test_read_fds(fds);
	test->run();
	test_check_fds(fds);
	(void)fflush(stdout);
	/* Not _exit(): the leak sanitizer looks at exit. */
	exit(EXIT_SUCCESS);
}

/* In the runner */

static unsigned test_timeout_s(const struct test *test)
{
	const char *text = getenv("BPS_TEST_TIMEOUT_S");
	unsigned long seconds = TEST_TIMEOUT_S;

	if (test->timeout_s) {
		seconds = test->timeout_s;
	} else if (text) {
		seconds = strtoul(text, NULL, 10);
		seconds = seconds > 0 && seconds < 100000 ? seconds : TEST_TIMEOUT_S;
	}
	return test_scale_s((unsigned)seconds);
}

/* Waits until the test's process ends or its time is over. Returns false in the second case. */
static bool test_wait(pid_t pid, unsigned timeout_s)
{
	uint64_t until_ms = test_now_ms() + (uint64_t)timeout_s * 1000, now_ms;
	_cleanup_(fd_closep) int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	struct pollfd pollfd = { .fd = pidfd, .events = POLLIN };

	if (pidfd < 0 && errno != ENOSYS) {
		perror("pidfd_open");
		return false;
	}
	for (;;) {
		now_ms = test_now_ms();
		if (now_ms >= until_ms)
			return false;
		if (pidfd < 0) { /* valgrind does not know it yet: it is looked now and then */
			siginfo_t info = { 0 };

			if (!waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT | WNOHANG) &&
			    info.si_pid == pid)
				return true;
			(void)poll(NULL, 0, 10);
		} else if (poll(&pollfd, 1, (int)MIN(until_ms - now_ms, (uint64_t)INT_MAX)) > 0) {
			return true;
		}
	}
}

#define ENDING_MS 2000

/* Whether a process that still runs ends by itself: one that helped the test's may have been about to when that ended. */
static bool test_is_ending(pid_t pid)
{
	struct pollfd pollfd = { .fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN };
	bool ends;

	if (pollfd.fd < 0)
		return errno == ESRCH;
	ends = poll(&pollfd, 1, ENDING_MS) > 0;
	(void)close(pollfd.fd);
	return ends;
}

/*
 * Kills what is left of the test's group. Called while its first process is a zombie that still holds the number, so
 * that no stranger can have it. Returns whether another process lived.
 */
static bool test_kill_group(pid_t pid)
{
	DIR *proc = opendir("/proc");
	const struct dirent *entry;
	bool found = false;

	while (proc && (entry = readdir(proc))) {
		pid_t other = (pid_t)strtol(entry->d_name, NULL, 10);
		char path[300], line[512] = "";
		const char *state;
		FILE *file;

		if (other <= 0 || other == pid || getpgid(other) != pid)
			continue;
		(void)snprintf(path, sizeof(path), "/proc/%s/stat", entry->d_name);
		file = fopen(path, "re");
		if (!file)
			continue;
		if (fgets(line, sizeof(line), file) && (state = strrchr(line, ')')) &&
		    state[1] == ' ' && state[2] != 'Z' && state[2] != 'X' &&
		    !test_is_ending(other)) {
			(void)fprintf(stderr, "process still runs: %s", line);
			found = true;
		}
		(void)fclose(file);
	}
	if (proc)
		(void)closedir(proc);
	(void)kill(-pid, SIGKILL);
	return found;
}

static int test_remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	(void)remove(path);
	return 0;
}

static enum test_result test_judge(const siginfo_t *info, bool in_time, bool left_processes)
{
	char *reason = test_shared->reason;
	size_t size = sizeof(test_shared->reason);

	if (!in_time)
		(void)snprintf(reason, size, "time limit");
	else if (info->si_code != CLD_EXITED)
		(void)snprintf(reason, size, "signal %d (%s)", info->si_status,
			       strsignal(info->si_status));
	else if (info->si_status == TEST_EXIT_SKIP)
		return TEST_SKIPPED;
	else if (info->si_status != 0)
		(void)snprintf(reason, size, "exit status %d", info->si_status);
	else if (left_processes)
		(void)snprintf(reason, size, "left processes running");
	else
		return TEST_PASSED;
	return TEST_FAILED;
}

static enum test_result test_run(const struct test *test)
{
	bool in_time, left_processes;
	enum test_result result;
	siginfo_t info = { 0 };
	pid_t pid;

	memset(test_shared, 0, sizeof(*test_shared));
	(void)fflush(stdout);
	(void)fflush(stderr);
	pid = fork();
	if (pid < 0) {
		(void)snprintf(test_shared->reason, sizeof(test_shared->reason), "fork: %s",
			       strerror(errno));
		return TEST_FAILED;
	}
	if (pid == 0)
		test_child(test);
	(void)setpgid(pid, pid); /* whoever of the two comes first */

	in_time = test_wait(pid, test_timeout_s(test));
	if (!in_time)
		(void)kill(pid, SIGKILL);
	while (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT) < 0 && errno == EINTR)
		;
	left_processes = test_kill_group(pid);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	result = test_judge(&info, in_time, left_processes);
	if (test_shared->dir[0])
		(void)nftw(test_shared->dir, test_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
	return result;
}

static bool test_selected(const struct test *test, int n_names, char *const names[])
{
	const char *tier = getenv("BPS_TEST_TIER");

	for (int i = 0; i < n_names; i++)
		if (!strcmp(test->name, names[i]))
			return true;
	return n_names == 0 && !(test->full_tier && tier && strcmp(tier, "full"));
}

static bool test_names_exist(int n_names, char *const names[])
{
	const struct test *test;

	for (int i = 0; i < n_names; i++) {
		for (test = tests; test && strcmp(test->name, names[i]); test = test->next)
			;
		if (!test) {
			(void)fprintf(stderr, "no test has the name %s\n", names[i]);
			return false;
		}
	}
	return true;
}

static int test_run_all(int n_names, char *const names[])
{
	static const char *const words[] = { "ok", "FAIL", "skip" };
	unsigned n[3] = { 0 };

	for (const struct test *test = tests; test; test = test->next) {
		enum test_result result;

		if (!test_selected(test, n_names, names))
			continue;
		result = test_run(test);
		n[result]++;
		if (result == TEST_PASSED)
			(void)printf("%s %s\n", words[result], test->name);
		else
			(void)printf("%s %s: %s\n", words[result], test->name, test_shared->reason);
	}
	(void)printf("%u passed, %u failed, %u skipped\n", n[TEST_PASSED], n[TEST_FAILED],
		     n[TEST_SKIPPED]);
	if (n[TEST_FAILED] || (!n[TEST_PASSED] && !n[TEST_SKIPPED]))
		return EXIT_FAILURE;
	return n[TEST_PASSED] ? EXIT_SUCCESS : TEST_EXIT_SKIP;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "--list")) {
		for (const struct test *test = tests; test; test = test->next)
			if (test_selected(test, 0, NULL))
				(void)printf("%s\n", test->name);
		return EXIT_SUCCESS;
	}
	if (!test_names_exist(argc - 1, argv + 1))
		return 2;

	test_shared = mmap(NULL, sizeof(*test_shared), PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (test_shared == MAP_FAILED) {
		perror("mmap");
		return EXIT_FAILURE;
	}
	return test_run_all(argc - 1, argv + 1);
}
