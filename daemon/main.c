/*
 * The program bps-daemon: arguments and options, user, signals, systemd's sockets, notifications
 * and watchdog. daemon.c has what is served; with --gpu-worker this program is a GPU worker
 * (gpu/worker.c).
 */
#include "base/clock.h"
#include "base/crash.h"
#include "base/log.h"
#include "base/loop/porter.h"
#include "config.h"
#include "daemon.h"
#include "gpu/gpu.h"
#include <fcntl.h>
#include <grp.h>
#include <malloc.h>
#include <openssl/crypto.h>
#include <pwd.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <systemd/sd-daemon.h>

#define DEFAULT_FILE  "/etc/bps/bps-daemon.conf"
#define USEC_PER_MSEC 1000ull
/* Descriptors that the daemon asks for, as many as its unit has; and those that the table has room for from the start: half a MiB. */
#define DESCRIPTORS_MAX (1 << 20)
#define DESCRIPTORS	65536
/* The heap: what is larger is mapped, and so much may stay free at its end. */
#define HEAP_CHUNK_MAX (4 << 20)
#define HEAP_SPARE_MAX (8 << 20)
#define STOP_USEC      30000000ull /* for what is left to do when requests are waited for no longer */

/* The process: arguments, signals, systemd. What it serves is daemon.c's. */
struct process {
	int argc;
	char **argv;
	struct config config;
	struct loop *loop;
	struct daemon *daemon;
	struct loop_source signals;
	struct loop_timer watchdog;
	uint64_t watchdog_ns; /* interval of keep-alives, 0: systemd wants none */
	char said[256];	      /* the state that systemd was told last */
	int status;	      /* of exit(3) */
};

static void print_usage(FILE *out)
{
	fprintf(out,
		"Usage: bps-daemon [OPTION]...\n"
		"Reduces the gradients of training jobs. Without options and file it serves this\n"
		"machine alone.\n"
		"\n"
		"  --config=FILE\n"
		"        Options as \"key = value\" lines (" DEFAULT_FILE " if it exists).\n"
		"  --set KEY=VALUE\n"
		"        One option; the same as --KEY=VALUE.\n"
		"  --print=help|sample|man\n"
		"        The table of options for people, as a file, as part of a man page.\n"
		"  --check\n"
		"        Reads the options, says what is wrong with them, and exits.\n"
		"  --version, --help\n"
		"\n"
		"Options, over those of the file; defaults in brackets:\n");
	config_print_help(out);
}

static int usage_error(const char *text)
{
	fprintf(stderr, "bps-daemon: %s\nTry \"bps-daemon --help\".\n", text);
	return 2;
}

/* "key=value" from an argument. */
static int set_pair(struct config *config, const char *pair, struct failure *failure)
{
	char key[64];
	const char *equals = strchr(pair, '=');

	if (!equals || (size_t)(equals - pair) >= sizeof(key))
		return failure_set(failure, -EINVAL, "%.60s: not KEY=VALUE", pair);
	(void)snprintf(key, sizeof(key), "%.*s", (int)(equals - pair), pair);
	return config_set(config, key, equals + 1, failure);
}

/* The value of "--name=value" or "--name value"; NULL when argv[*at] is not that option. */
static const char *option_value(int argc, char **argv, int *at, const char *name)
{
	size_t len = strlen(name);

	if (strncmp(argv[*at], name, len))
		return NULL;
	if (argv[*at][len] == '=')
		return argv[*at] + len + 1;
	if (argv[*at][len] || *at + 1 >= argc)
		return NULL;
	return argv[++*at];
}

/*
 * Command line over what the file says. Arguments that are no table option were dealt with by
 * special_argument().
 */
static int set_from_arguments(struct config *config, int argc, char **argv, struct failure *failure)
{
	for (int i = 1; i < argc; i++) {
		const char *pair;
		char joined[4352];
		int r;

		if (option_value(argc, argv, &i, "--config") || !strcmp(argv[i], "--check"))
			continue;
		pair = option_value(argc, argv, &i, "--set");
		if (!pair && !strncmp(argv[i], "--", 2)) {
			pair = argv[i] + 2;
			if (!strchr(pair, '=') && i + 1 < argc) {
				(void)snprintf(joined, sizeof(joined), "%s=%s", pair, argv[i + 1]);
				pair = joined;
				i++;
			}
		}
		if (!pair)
			return failure_set(failure, -EINVAL, "%.60s: not an option", argv[i]);
		r = set_pair(config, pair, failure);
		if (r)
			return r;
	}
	return 0;
}

/* Defaults, file, command line. */
static int read_config(struct config *config, int argc, char **argv, struct failure *failure)
{
	const char *file = NULL;
	int r = config_init(config);

	if (r)
		return failure_set(failure, r, "options: out of memory");
	for (int i = 1; i < argc; i++) {
		const char *value = option_value(argc, argv, &i, "--config");

		file = value ? value : file;
	}
	if (!file && !access(DEFAULT_FILE, F_OK))
		file = DEFAULT_FILE;
	if (file && *file)
		r = config_load(config, file, failure);
	if (!r)
		r = set_from_arguments(config, argc, argv, failure);
	if (!r)
		r = config_check(config, failure);
	if (r)
		config_done(config);
	return r;
}

/* Arguments after which there is nothing to run. Returns an exit status, or -1. */
static int special_argument(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *what = option_value(argc, argv, &i, "--print");

		if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
			print_usage(stdout);
		else if (!strcmp(argv[i], "--version"))
			puts("bps-daemon " BPS_VERSION);
		else if (what && !strcmp(what, "help"))
			config_print_help(stdout);
		else if (what && !strcmp(what, "sample"))
			config_print_sample(stdout);
		else if (what && !strcmp(what, "man"))
			config_print_man(stdout);
		else if (what)
			return usage_error("--print: not one of help, sample, man");
		else
			continue;
		return 0;
	}
	return -1;
}

/* `systemctl status` shows it; of a change it hears at the next keep-alive. */
static void tell_state(struct process *process)
{
	char text[sizeof(process->said)];

	daemon_describe(process->daemon, text, sizeof(text));
	if (!strcmp(text, process->said))
		return;
	memcpy(process->said, text, sizeof(text));
	(void)sd_notifyf(0, "STATUS=%s", text);
}

static void reload(struct process *process)
{
	struct failure failure = { 0 };
	struct config fresh;
	char restart[256];
	int level, r;

	(void)sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu", clock_now_ns() / NSEC_PER_USEC);
	r = read_config(&fresh, process->argc, process->argv, &failure);
	if (!r) {
		r = config_reload(&process->config, &fresh, restart, sizeof(restart));
		config_done(&fresh);
	}
	if (!r && !log_level_parse(process->config.log_level, &level))
		log_set_level(level);
	if (!r && *restart)
		log_warning("reload: %s changed: takes effect at the next start", restart);
	if (!r)
		r = daemon_reload(process->daemon, &failure);
	if (r)
		log_error("reload: %s: keeping what was in force",
			  *failure.text ? failure.text : strerror(-r));
	else
		log_info("reload: done");
	(void)sd_notify(0, "READY=1");
}

static void on_signal(struct loop_source *source, uint32_t events)
{
	struct process *process = container_of(source, struct process, signals);
	struct signalfd_siginfo info;

	if (read(source->fd, &info, sizeof(info)) != sizeof(info))
		return;
	if (info.ssi_signo == SIGHUP) {
		reload(process);
		return;
	}
	log_info("stop: asked by signal %u from pid %u", info.ssi_signo, info.ssi_pid);
	/*
	 * However long TimeoutStopSec= is: drain_timeout is to be had, and time to end in order
	 * after it.
	 */
	(void)sd_notifyf(0, "STOPPING=1\nEXTEND_TIMEOUT_USEC=%llu",
			 process->config.drain_timeout * USEC_PER_MSEC + STOP_USEC);
	daemon_drain(process->daemon);
	tell_state(process);
}

static int watch_signals(struct process *process)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	if (sigprocmask(SIG_BLOCK, &set, NULL))
		return error_origin(-errno);
	if (signal(SIGPIPE, SIG_IGN) == SIG_ERR)
		return error_origin(-errno);
	process->signals.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (process->signals.fd < 0)
		return error_origin(-errno);
	process->signals.ready = on_signal;
	return error_trace(loop_add(process->loop, &process->signals, EPOLLIN));
}

static void on_watchdog(struct loop_timer *timer)
{
	struct process *process = container_of(timer, struct process, watchdog);

	(void)sd_notify(0, "WATCHDOG=1");
	tell_state(process);
	(void)loop_timer_set(process->loop, timer, clock_now_ns() + process->watchdog_ns);
}

static void on_ready(void *user)
{
	struct process *process = user;
	uint64_t usec = 0;

	tell_state(process);
	log_notice("ready: %s", process->said);
	(void)sd_notify(0, "READY=1");
	if (sd_watchdog_enabled(0, &usec) > 0) {
		process->watchdog_ns = usec * NSEC_PER_USEC / 2;
		process->watchdog.expired = on_watchdog;
		on_watchdog(&process->watchdog);
	}
}

static void on_ended(void *user, const struct failure *failure)
{
	struct process *process = user;

	if (failure->status) {
		log_error("%s", failure->text);
		process->status = 1;
	}
	loop_stop(process->loop);
}

/* Sockets that systemd opened, by the names in bps-daemon.socket. */
static int take_fds(struct daemon_fds *fds)
{
	char **names = NULL;
	int n = sd_listen_fds_with_names(1, &names);

	*fds = (struct daemon_fds){ -1, -1, -1 };
	if (n < 0)
		return error_origin(n);
	for (int i = 0; i < n; i++) {
		int fd = SD_LISTEN_FDS_START + i;

		if (!strcmp(names[i], "control"))
			fds->control = fd;
		else if (!strcmp(names[i], "admin"))
			fds->admin = fd;
		else if (!strcmp(names[i], "data"))
			fds->data = fd;
		else
			log_warning("socket activation: %s: not control, admin or data: ignored",
				    names[i]);
		free(names[i]);
	}
	free(names);
	return 0;
}

/* From root to the configured user, for good. */
static int become_user(const char *name, struct failure *failure)
{
	struct passwd *user;

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return failure_set(failure, -errno, "no_new_privs: %s", strerror(errno));
	if (!*name || geteuid())
		return 0;
	user = getpwnam(name);
	if (!user)
		return failure_set(failure, -ENOENT,
				   "user = %s: no such user; make it with systemd-sysusers", name);
	if (initgroups(name, user->pw_gid) || setresgid(user->pw_gid, user->pw_gid, user->pw_gid) ||
	    setresuid(user->pw_uid, user->pw_uid, user->pw_uid))
		return failure_set(failure, -errno, "user = %s: %s", name, strerror(errno));
	return 0;
}

static int on_porter_start(void *user)
{
	const struct process *process = user;
	struct failure failure;

	return become_user(process->config.user, &failure);
}

static void on_porter_ended(void *user)
{
	struct process *process = user;

	log_error("porter: ended: without it nothing can be taken from trainers");
	process->status = 1;
	loop_stop(process->loop);
}

static int serve(struct process *process, struct failure *failure)
{
	struct daemon_params params = {
		.config = &process->config,
		.ready = on_ready,
		.ended = on_ended,
		.user = process,
	};
	int r;

	r = porter_start(on_porter_start, process);
	if (!r)
		r = loop_new(&process->loop);
	if (!r)
		r = porter_attach(process->loop, on_porter_ended, process);
	if (!r)
		r = watch_signals(process);
	if (!r)
		r = take_fds(&params.fds);
	params.loop = process->loop;
	if (!r)
		r = daemon_new(&params, &process->daemon);
	if (r)
		return failure_set(failure, r, "start: %s", strerror(-r));
	r = daemon_start(process->daemon, failure);
	if (!r)
		r = become_user(process->config.user, failure);
	if (r)
		return r;
	r = loop_run(process->loop);
	if (r)
		return failure_set(failure, r, "event loop: %s", strerror(-r));
	return 0;
}

static void process_done(struct process *process)
{
	daemon_free(process->daemon);
	porter_stop();
	loop_timer_cancel(&process->watchdog);
	loop_remove(&process->signals);
	(void)fd_close(process->signals.fd);
	loop_free(process->loop);
	config_done(&process->config);
}

/* From a shell a process may have 1024, and more if it asks. */
static void raise_descriptors(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit))
		return;
	limit.rlim_cur = MAX(limit.rlim_cur, MIN(limit.rlim_max, (rlim_t)DESCRIPTORS_MAX));
	(void)setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * Once a process has threads, a table of descriptors that grows keeps whoever opens one waiting until the kernel has heard of all
 * processors, on a busy machine for a second. So the table grows before.
 */
static void reserve_descriptors(void)
{
	struct rlimit limit;

	if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur)
		fd_close(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC,
			       (int)MIN(limit.rlim_cur, (rlim_t)DESCRIPTORS) - 1));
}

/*
 * What a tenant had is the machine's again when the tenant has gone. By default glibc moves both limits with what is freed, so
 * that a heap that once had a chunk of 32 MiB keeps 64 MiB at its end.
 */
static void give_back_heap(void)
{
	(void)mallopt(M_MMAP_THRESHOLD, HEAP_CHUNK_MAX);
	(void)mallopt(M_TRIM_THRESHOLD, HEAP_SPARE_MAX);
}

int main(int argc, char **argv)
{
	struct process process = { .argc = argc, .argv = argv, .signals.fd = -1 };
	struct failure failure = { 0 };
	int level = LOG_LEVEL_INFO, status;

	crash_tell();
	give_back_heap();
	/* Some of gRPC's threads may still call OpenSSL when the process ends. */
	(void)OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
	/* Not for people: the daemon runs itself so. */
	if (argc == 2 && !strcmp(argv[1], "--gpu-worker"))
		return gpu_worker_main();
	status = special_argument(argc, argv);
	if (status >= 0)
		return status;
	if (read_config(&process.config, argc, argv, &failure))
		return usage_error(failure.text);
	if (argc > 1 && !strcmp(argv[argc - 1], "--check")) {
		config_done(&process.config);
		return 0;
	}
	(void)log_level_parse(process.config.log_level, &level);
	log_init(level);
	raise_descriptors();
	reserve_descriptors();
	if (serve(&process, &failure)) {
		log_error("%s", failure.text);
		process.status = 1;
	}
	process_done(&process);
	return process.status;
}
