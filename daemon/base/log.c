/*
 * Formats log lines and writes them to stderr or the journal without waiting for their reader;
 * bounds what one place in the code may log.
 */
#include "base/log.h"
#include "proto/text.h"

#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>

/* A pipe takes a line of up to PIPE_BUF (4096) bytes whole or not at all; what is longer is cut. */
#define LOG_LINE_LEN 2048

enum log_target {
	LOG_TARGET_OTHER,  /* terminal, pipe, anything else with poll() */
	LOG_TARGET_FILE,   /* never blocks for longer than the disk */
	LOG_TARGET_SOCKET, /* the journal's stream is one */
};

static _Atomic int log_level = LOG_LEVEL_INFO;
static _Atomic uint64_t log_dropped;
static enum log_target log_target; /* set by log_init(), constant afterwards */
static bool log_to_journal;	   /* likewise */
/*
 * Makes poll() and the write() after it one step, where the kernel has no write that never waits.
 */
static pthread_mutex_t log_write_lock = PTHREAD_MUTEX_INITIALIZER;

static const struct {
	int level;
	const char *name;
} log_levels[] = {
	{ LOG_LEVEL_ERROR, "error" },	{ LOG_LEVEL_WARNING, "warning" },
	{ LOG_LEVEL_NOTICE, "notice" }, { LOG_LEVEL_INFO, "info" },
	{ LOG_LEVEL_DEBUG, "debug" },
};

static const char *log_level_name(int level)
{
	for (size_t i = 0; i < ARRAY_SIZE(log_levels); i++)
		if (log_levels[i].level == level)
			return log_levels[i].name;
	return "log";
}

int log_level_parse(const char *text, int *ret_level)
{
	for (size_t i = 0; i < ARRAY_SIZE(log_levels); i++) {
		if (!strcmp(log_levels[i].name, text)) {
			*ret_level = log_levels[i].level;
			return 0;
		}
	}
	return -EINVAL;
}

/*
 * systemd names the device and inode of the stream it gave us; a stderr redirected since is
 * another.
 */
static bool log_stream_is_journal(const struct stat *st)
{
	const char *stream = getenv("JOURNAL_STREAM");
	unsigned long long device, inode;
	char end;

	if (!stream || sscanf(stream, "%llu:%llu%c", &device, &inode, &end) != 2)
		return false;
	return st->st_dev == device && st->st_ino == inode;
}

void log_init(int level)
{
	struct stat st;

	log_set_level(level);
	log_target = LOG_TARGET_OTHER;
	log_to_journal = false;
	if (fstat(STDERR_FILENO, &st) < 0)
		return;
	if (S_ISREG(st.st_mode))
		log_target = LOG_TARGET_FILE;
	else if (S_ISSOCK(st.st_mode))
		log_target = LOG_TARGET_SOCKET;
	log_to_journal = log_stream_is_journal(&st);
}

void log_set_level(int level)
{
	atomic_store_explicit(&log_level, level, memory_order_relaxed);
}

int log_get_level(void)
{
	return atomic_load_explicit(&log_level, memory_order_relaxed);
}

/*
 * A pipe without a reader reports POLLERR and would raise SIGPIPE: such a line is dropped as well.
 * A terminal is left with a small gap: it may have room for less than the line and then holds us
 * until it has drained.
 */
static bool log_write_polled(const char *line, size_t len)
{
	struct pollfd pollfd = { .fd = STDERR_FILENO, .events = POLLOUT };
	struct iovec iovec = { .iov_base = (char *)line, .iov_len = len };
	ssize_t n = -1;

	(void)pthread_mutex_lock(&log_write_lock);
	if (poll(&pollfd, 1, 0) == 1 && pollfd.revents == POLLOUT) {
		n = pwritev2(STDERR_FILENO, &iovec, 1, -1, RWF_NOWAIT);
		if (n < 0 && errno != EAGAIN)
			n = write(STDERR_FILENO, line, len);
	}
	(void)pthread_mutex_unlock(&log_write_lock);
	return n == (ssize_t)len;
}

static bool log_write(const char *line, size_t len)
{
	ssize_t n;

	switch (log_target) {
	case LOG_TARGET_SOCKET:
		n = send(STDERR_FILENO, line, len, MSG_DONTWAIT | MSG_NOSIGNAL);
		return n == (ssize_t)len;
	case LOG_TARGET_FILE:
		n = write(STDERR_FILENO, line, len);
		return n == (ssize_t)len;
	case LOG_TARGET_OTHER:
		break;
	}
	return log_write_polled(line, len);
}

static size_t log_format_head(char *line, size_t size, int level)
{
	struct timespec now;
	struct tm tm;
	size_t len;

	if (log_to_journal)
		return (size_t)snprintf(line, size, "<%d>", level);

	(void)clock_gettime(CLOCK_REALTIME, &now);
	if (!localtime_r(&now.tv_sec, &tm))
		return (size_t)snprintf(line, size, "%s: ", log_level_name(level));
	len = strftime(line, size, "%F %T", &tm);
	return len + (size_t)snprintf(line + len, size - len, ".%03ld %s: ", now.tv_nsec / 1000000,
				      log_level_name(level));
}

static bool log_emit(int level, const char *format, va_list args)
{
	char line[LOG_LINE_LEN];
	size_t head = log_format_head(line, sizeof(line), level), len;
	int n;

	n = vsnprintf(line + head, sizeof(line) - head, format, args);
	if (n < 0)
		return false;
	len = MIN(head + (size_t)n, sizeof(line) - 1);

	/* Texts come from peers and trainers too: none of them may forge a line or drive a terminal. */
	text_make_plain(line + head, len - head);
	line[len++] = '\n';
	return log_write(line, len);
}

_printf_(2, 3) static bool log_emit_format(int level, const char *format, ...)
{
	va_list args;
	bool written;

	va_start(args, format);
	written = log_emit(level, format, args);
	va_end(args);
	return written;
}

void log_line(int level, const char *format, ...)
{
	int saved = errno;
	uint64_t dropped;
	va_list args;
	bool written;

	if (level > log_get_level())
		return;

	dropped = atomic_exchange_explicit(&log_dropped, 0, memory_order_relaxed);
	written = !dropped || log_emit_format(LOG_LEVEL_WARNING,
					      "log: dropped %llu lines that stderr did not take",
					      (unsigned long long)dropped);
	if (written) {
		dropped = 0;
		va_start(args, format);
		written = log_emit(level, format, args);
		va_end(args);
	}
	if (!written)
		(void)atomic_fetch_add_explicit(&log_dropped, dropped + 1, memory_order_relaxed);
	errno = saved;
}

/* The generic cell rate algorithm (ITU-T I.371), with the time of a line's turn as its state. */
static bool log_place_takes(struct log_place *place, uint64_t now_ns)
{
	uint64_t due_ns = atomic_load_explicit(&place->due_ns, memory_order_relaxed), next_ns;

	do {
		next_ns = MAX(due_ns, now_ns) + LOG_INTERVAL_NS;
		if (next_ns > now_ns + LOG_BURST * LOG_INTERVAL_NS)
			return false;
	} while (!atomic_compare_exchange_weak_explicit(
		&place->due_ns, &due_ns, next_ns, memory_order_relaxed, memory_order_relaxed));
	return true;
}

bool log_passes(struct log_place *place, int level)
{
	uint64_t n_omitted;

	if (level > log_get_level())
		return false;
	if (!log_place_takes(place, clock_now_ns())) {
		(void)atomic_fetch_add_explicit(&place->n_omitted, 1, memory_order_relaxed);
		return false;
	}
	n_omitted = atomic_exchange_explicit(&place->n_omitted, 0, memory_order_relaxed);
	if (n_omitted)
		log_line(level, "log: left out %llu lines like the next",
			 (unsigned long long)n_omitted);
	return true;
}
