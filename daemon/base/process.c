/*
 * Identifies a process by its number and start time, from /proc and pidfds. ledger/ finds out
 * with it which ranks of a job are still the processes that they were.
 */
#include "base/process.h"
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * The start time is field 22; the name, field 2, may hold spaces and parentheses. It is that of the
 * first thread, whose own file costs the same however many threads there are: for the file of the
 * process the kernel adds up what all of them have used.
 */
static bool read_stat(uint32_t pid, uint64_t *ret_started)
{
	char path[48], line[1024];
	const char *fields;
	unsigned long long started;
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%u/task/%u/stat", pid, pid);
	file = fopen(path, "re");
	if (!file)
		return false;
	fields = fgets(line, sizeof(line), file) ? strrchr(line, ')') : NULL;
	(void)fclose(file);
	if (!fields ||
	    sscanf(fields + 1,
		   " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
		   "%*s %*s %llu",
		   &started) != 1)
		return false;
	*ret_started = started;
	return true;
}

uint64_t process_started(uint32_t pid)
{
	uint64_t started;

	return pid && read_stat(pid, &started) ? started : 0;
}

/*
 * A descriptor tells of the end of any process, a zombie's too, even where /proc hides those of
 * other users.
 */
static enum process_state look_at_number(pid_t pid)
{
	struct pollfd ended = { .fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN };
	int n;

	if (ended.fd < 0)
		return errno == ESRCH ? PROCESS_GONE : PROCESS_UNKNOWN;
	n = poll(&ended, 1, 0);
	(void)close(ended.fd);
	return n > 0 ? PROCESS_GONE : PROCESS_ALIVE;
}

enum process_state process_look(uint32_t pid, uint64_t started)
{
	enum process_state state;
	uint64_t now_started;

	if (!pid || pid > INT_MAX)
		return PROCESS_UNKNOWN;
	state = look_at_number((pid_t)pid);
	if (state != PROCESS_ALIVE || !started)
		return state;
	now_started = process_started(pid);
	return now_started && now_started != started ? PROCESS_GONE : PROCESS_ALIVE;
}

uint64_t process_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) ? 0 : st.st_ino;
}
