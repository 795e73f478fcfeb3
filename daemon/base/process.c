#include "base/process.h"
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>

/* State and start time are fields 3 and 22; the name before them may hold spaces and parentheses. */
static bool read_stat(uint32_t pid, char *ret_state, uint64_t *ret_started)
{
	char path[32], line[1024];
	const char *fields;
	unsigned long long started;
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%u/stat", pid);
	file = fopen(path, "re");
	if (!file)
		return false;
	fields = fgets(line, sizeof(line), file) ? strrchr(line, ')') : NULL;
	(void)fclose(file);
	if (!fields || sscanf(fields + 1,
			      " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
			      "%*s %*s %llu",
			      ret_state, &started) != 2)
		return false;
	*ret_started = started;
	return true;
}

uint64_t process_started(uint32_t pid)
{
	uint64_t started;
	char state;

	return pid && read_stat(pid, &state, &started) ? started : 0;
}

enum process_state process_look(uint32_t pid, uint64_t started)
{
	uint64_t now_started;
	char state;

	if (!pid || pid > INT_MAX || !started)
		return PROCESS_UNKNOWN;
	if (read_stat(pid, &state, &now_started))
		return now_started == started && state != 'Z' && state != 'X' ? PROCESS_ALIVE
									      : PROCESS_GONE;
	/* /proc may hide the processes of other users. */
	return kill((pid_t)pid, 0) && errno == ESRCH ? PROCESS_GONE : PROCESS_UNKNOWN;
}

uint64_t process_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) ? 0 : st.st_ino;
}
