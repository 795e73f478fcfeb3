/*
 * Counts the processors that this process may use: by its affinity and by the bandwidth of its
 * control groups. daemon.c makes as many threads as follow from that.
 */
#include "base/cpu.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>

#define CGROUP_ROOT "/sys/fs/cgroup"

static unsigned cpu_affinity_count(void)
{
	long n_configured = sysconf(_SC_NPROCESSORS_CONF), n_online = sysconf(_SC_NPROCESSORS_ONLN);
	size_t n_cpus = n_configured > CPU_SETSIZE ? (size_t)n_configured : CPU_SETSIZE;
	cpu_set_t *set = CPU_ALLOC(n_cpus);
	unsigned n = n_online > 0 ? (unsigned)n_online : 1;

	if (set && !sched_getaffinity(0, CPU_ALLOC_SIZE(n_cpus), set))
		n = (unsigned)CPU_COUNT_S(CPU_ALLOC_SIZE(n_cpus), set);
	CPU_FREE(set);
	return MAX(n, 1u);
}

/* Reads a small file as text. Returns false when there is none. */
static bool cpu_read(const char *path, char *text, size_t size)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return false;
	n = read(fd, text, size - 1);
	if (n < 0)
		return false;
	text[n] = '\0';
	return true;
}

unsigned cpu_parse_max(const char *text)
{
	unsigned long long quota_us, period_us, n;

	if (sscanf(text, "%llu %llu", &quota_us, &period_us) != 2 || !period_us)
		return UINT_MAX;
	n = quota_us / period_us + (quota_us % period_us != 0);
	return n < UINT_MAX ? MAX((unsigned)n, 1u) : UINT_MAX;
}

/* The tightest bandwidth of our control group and those above it. */
static unsigned cpu_cgroup_count(void)
{
	char text[4096], path[PATH_MAX], *group, *end;
	unsigned n = UINT_MAX;

	if (!cpu_read("/proc/self/cgroup", text, sizeof(text)))
		return n;
	/* The line of version 2, among those of version 1 where both are mounted. */
	group = !strncmp(text, "0::/", 4) ? text : strstr(text, "\n0::/");
	if (!group)
		return n;
	group = strchr(group, '/');
	group[strcspn(group, "\n")] = '\0';

	/*
	 * In a namespace of its own the group is the root of what is mounted, and the root then has
	 * a limit as well.
	 */
	do {
		char max[64];
		int len;

		len = snprintf(path, sizeof(path), CGROUP_ROOT "%s/cpu.max", group);
		if (len > 0 && (size_t)len < sizeof(path) && cpu_read(path, max, sizeof(max)))
			n = MIN(n, cpu_parse_max(max));
		end = strrchr(group, '/');
		if (end)
			*end = '\0';
	} while (end);
	return n;
}

unsigned cpu_count(void)
{
	return MIN(cpu_affinity_count(), cpu_cgroup_count());
}
