/*
 * Starts, stops and kills a bps-daemon for a test, waits until the daemon says that it is ready,
 * and shows its log where the test fails.
 */
#include "daemon.h"

#include "test.h"
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#define TEST_DAEMON_START_S 20
#define TEST_DAEMON_STOP_S  20
#define TEST_DAEMON_ARGS    64

char *test_daemon_log(const struct test_daemon *daemon)
{
	size_t len = 0, capacity = 4096;
	_cleanup_(fd_closep) int fd = open(daemon->log_path, O_RDONLY | O_CLOEXEC);
	char *text = malloc(capacity);

	while (fd >= 0 && text) {
		ssize_t n = read(fd, text + len, capacity - len - 1);

		if (n <= 0)
			break;
		len += (size_t)n;
		if (capacity - len == 1)
			text = realloc(text, capacity *= 2);
	}
	if (!text)
		test_fail(__FILE__, __LINE__, "out of memory");
	text[len] = '\0';
	return text;
}

/* Fails the test, with the daemon's own words before it. */
_Noreturn static void test_daemon_fail(const struct test_daemon *daemon, const char *what)
{
	_cleanup_(freep) char *log = test_daemon_log(daemon);

	(void)fprintf(stderr, "-- log of bps-daemon %s\n%s-- end of log\n", daemon->name, log);
	test_fail(__FILE__, __LINE__, "bps-daemon %s: %s", daemon->name, what);
}

_printf_(3, 4) static void test_path(char *path, size_t size, const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(path, size, format, args);
	va_end(args);
	if (n < 0 || (size_t)n >= size)
		test_fail(__FILE__, __LINE__, "path too long: %s", path);
}

static void test_daemon_set_paths(struct test_daemon *daemon)
{
	test_path(daemon->dir, sizeof(daemon->dir), "%s/%s", test_dir(), daemon->name);
	test_path(daemon->socket, sizeof(daemon->socket), "%s/socket", daemon->dir);
	test_path(daemon->admin_socket, sizeof(daemon->admin_socket), "%s/admin", daemon->dir);
	test_path(daemon->config_path, sizeof(daemon->config_path), "%s/config", daemon->dir);
	test_path(daemon->log_path, sizeof(daemon->log_path), "%s/log", daemon->dir);
}

static void test_daemon_write_config(const struct test_daemon *daemon)
{
	const char *config = daemon->config ? daemon->config : "";
	FILE *file = fopen(daemon->config_path, "we");

	if (!file || fputs(config, file) < 0 || fclose(file) != 0)
		test_daemon_fail(daemon, "cannot write its configuration");
}

/* A fresh socket each start: what an earlier process said must not count for this one. */
static int test_daemon_notify_socket(const struct test_daemon *daemon,
				     struct sockaddr_un *ret_address)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	_cleanup_(fd_closep) int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	test_path(address.sun_path, sizeof(address.sun_path), "%s/notify", daemon->dir);
	(void)unlink(address.sun_path);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		test_fail(__FILE__, __LINE__, "notify socket: %s", strerror(errno));
	*ret_address = address;
	return TAKE_FD(fd);
}

static void test_args_append(const char *argv[static TEST_DAEMON_ARGS], size_t *n,
			     const char *const *args)
{
	for (; args && *args; args++) {
		if (*n + 1 >= TEST_DAEMON_ARGS)
			test_fail(__FILE__, __LINE__, "too many arguments for bps-daemon");
		argv[(*n)++] = *args;
	}
}

_Noreturn static void test_daemon_exec(const struct test_daemon *daemon, const char *notify,
				       const char *const argv[])
{
	int log_fd = open(daemon->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	sigset_t none;

	/* It shall see what a service manager gives: default signals, no standard input, a log for the rest. */
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (log_fd < 0 || dup2(log_fd, STDERR_FILENO) < 0 || dup2(log_fd, STDOUT_FILENO) < 0)
		_exit(126);
	(void)setenv("NOTIFY_SOCKET", notify, 1);
	(void)unsetenv("JOURNAL_STREAM");
	(void)unsetenv("LISTEN_FDS");
	if (daemon->has_netns && setns(daemon->netns_fd, CLONE_NEWNET) < 0) {
		perror("setns");
		_exit(126);
	}
	(void)execvp(argv[0], (char *const *)argv);
	perror(argv[0]);
	_exit(127);
}

void test_daemon_launch(struct test_daemon *daemon)
{
	const char *program = getenv("BPS_DAEMON"), *argv[TEST_DAEMON_ARGS] = { NULL };
	struct sockaddr_un address;
	size_t n = 0;

	if (!program)
		test_fail(__FILE__, __LINE__, "BPS_DAEMON does not name the daemon's program");
	if (daemon->pid)
		test_daemon_fail(daemon, "runs already");

	test_daemon_set_paths(daemon);
	if (mkdir(daemon->dir, 0700) < 0 && errno != EEXIST)
		test_fail(__FILE__, __LINE__, "%s: %s", daemon->dir, strerror(errno));
	test_daemon_write_config(daemon);

	test_args_append(argv, &n, daemon->wrapper);
	test_args_append(argv, &n,
			 (const char *[]){ program, "--socket", daemon->socket, "--admin-socket",
					   daemon->admin_socket, "--config", daemon->config_path,
					   "--log-level",
					   daemon->log_level ? daemon->log_level : "debug", NULL });
	test_args_append(argv, &n, daemon->args);

	daemon->notify_fd = test_daemon_notify_socket(daemon, &address);
	daemon->pid = fork();
	if (daemon->pid < 0)
		test_fail(__FILE__, __LINE__, "fork: %s", strerror(errno));
	if (daemon->pid == 0)
		test_daemon_exec(daemon, address.sun_path, argv);
	daemon->pidfd = (int)syscall(SYS_pidfd_open, daemon->pid, 0);
	if (daemon->pidfd < 0)
		test_fail(__FILE__, __LINE__, "pidfd_open: %s", strerror(errno));
}

static uint64_t test_daemon_now_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* Waits for the process's end or, if asked, a datagram. Returns what came, false when the time is over. */
static bool test_daemon_wait(const struct test_daemon *daemon, uint64_t until_ms,
			     bool *ret_notified)
{
	struct pollfd fds[] = {
		{ .fd = daemon->pidfd, .events = POLLIN },
		{ .fd = ret_notified ? daemon->notify_fd : -1, .events = POLLIN },
	};

	for (;;) {
		uint64_t now_ms = test_daemon_now_ms();

		if (now_ms >= until_ms)
			return false;
		if (poll(fds, ARRAY_SIZE(fds), (int)(until_ms - now_ms)) <= 0)
			continue;
		if (ret_notified)
			*ret_notified = fds[1].revents != 0;
		return true;
	}
}

void test_daemon_ready(struct test_daemon *daemon)
{
	uint64_t until_ms = test_daemon_now_ms() + test_scale_s(TEST_DAEMON_START_S) * 1000ull;
	char text[1024];
	bool notified;

	for (;;) {
		const char *ready = text;
		ssize_t n;

		if (!test_daemon_wait(daemon, until_ms, &notified))
			test_daemon_fail(daemon, "not ready within the limit");
		if (!notified)
			test_daemon_fail(daemon, "ended before it was ready");
		n = recv(daemon->notify_fd, text, sizeof(text) - 1, MSG_DONTWAIT);
		if (n < 0)
			continue;
		text[n] = '\0';
		while ((ready = strstr(ready, "READY=1"))) {
			if ((ready == text || ready[-1] == '\n') && strchr("\n", ready[7]))
				return;
			ready++;
		}
	}
}

void test_daemon_start(struct test_daemon *daemon)
{
	test_daemon_launch(daemon);
	test_daemon_ready(daemon);
}

int test_daemon_exited(struct test_daemon *daemon)
{
	uint64_t until_ms = test_daemon_now_ms() + test_scale_s(TEST_DAEMON_STOP_S) * 1000ull;
	siginfo_t info = { 0 };

	if (!daemon->pid)
		test_daemon_fail(daemon, "does not run");
	if (!test_daemon_wait(daemon, until_ms, NULL))
		test_daemon_fail(daemon, "still runs when the limit is over");
	while (waitid(P_PID, (id_t)daemon->pid, &info, WEXITED) < 0)
		if (errno != EINTR)
			test_fail(__FILE__, __LINE__, "waitid: %s", strerror(errno));

	daemon->pidfd = fd_close(daemon->pidfd);
	daemon->notify_fd = fd_close(daemon->notify_fd);
	daemon->pid = 0;
	return info.si_code == CLD_EXITED ? info.si_status : -info.si_status;
}

void test_daemon_stop(struct test_daemon *daemon)
{
	int status;

	if (!daemon->pid)
		test_daemon_fail(daemon, "does not run");
	(void)kill(daemon->pid, SIGTERM);
	status = test_daemon_exited(daemon);
	if (status) {
		char what[64];

		(void)snprintf(what, sizeof(what), "ended with %s %d after SIGTERM",
			       status < 0 ? "signal" : "status", abs(status));
		test_daemon_fail(daemon, what);
	}
}

void test_daemon_kill(struct test_daemon *daemon)
{
	if (!daemon->pid)
		test_daemon_fail(daemon, "does not run");
	(void)kill(daemon->pid, SIGKILL);
	(void)test_daemon_exited(daemon);
}

bool test_daemon_alive(const struct test_daemon *daemon)
{
	struct pollfd pollfd = { .fd = daemon->pidfd, .events = POLLIN };

	return daemon->pid && poll(&pollfd, 1, 0) == 0;
}

void test_daemon_donep(struct test_daemon *daemon)
{
	if (daemon->pid)
		test_daemon_stop(daemon);
}
