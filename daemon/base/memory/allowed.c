/*
 * Reads what memory and how many mappings the kernel allows this process, from /proc and the files
 * of its control groups. daemon.c asks at the start, for the limits of accounts.
 */
#include "base/memory/allowed.h"
#include "base/pages.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#define MAPPINGS_DEFAULT 65530

/* The number in a file; UINT64_MAX where there is none, as in one that says "max". */
static uint64_t read_number(const char *path)
{
	uint64_t number = UINT64_MAX;
	FILE *file = fopen(path, "re");

	if (!file)
		return UINT64_MAX;
	if (fscanf(file, "%" SCNu64, &number) != 1)
		number = UINT64_MAX;
	(void)fclose(file);
	return number;
}

/*
 * Of one file in a group and in all above it. In a container the groups above may not be seen, and
 * this one be the root.
 */
static uint64_t least_above(const char *mount, const char *group, const char *file)
{
	uint64_t least = UINT64_MAX;
	char at[1024], path[1200];

	(void)snprintf(at, sizeof(at), "%s", group);
	for (;;) {
		char *end = strrchr(at, '/');

		(void)snprintf(path, sizeof(path), "%s%s/%s", mount, at, file);
		least = MIN(least, read_number(path));
		if (!end)
			return least;
		*end = '\0';
	}
}

/*
 * A line of /proc/self/cgroup is NUMBER:CONTROLLERS:GROUP; of v2 there is one, without controllers.
 */
static uint64_t limit_of_line(char *line, const char *root)
{
	char *controllers = strchr(line, ':'), *group, mount[512];

	group = controllers ? strchr(controllers + 1, ':') : NULL;
	if (!group)
		return UINT64_MAX;
	*controllers++ = *group++ = '\0';
	group[strcspn(group, "\n")] = '\0';
	(void)snprintf(mount, sizeof(mount), "%s/memory", root);
	if (!*controllers)
		return MIN(least_above(root, group, "memory.max"),
			   least_above(root, group, "memory.high"));
	if (strstr(controllers, "memory"))
		return least_above(mount, group, "memory.limit_in_bytes");
	return UINT64_MAX;
}

uint64_t allowed_memory_of(const char *cgroups, const char *root)
{
	uint64_t least = (uint64_t)sysconf(_SC_PHYS_PAGES) * page_size();
	FILE *file = fopen(cgroups, "re");
	char line[1024];

	while (file && fgets(line, sizeof(line), file))
		least = MIN(least, limit_of_line(line, root));
	if (file)
		(void)fclose(file);
	return least;
}

uint64_t allowed_memory(void)
{
	return allowed_memory_of("/proc/self/cgroup", "/sys/fs/cgroup");
}

uint64_t allowed_mappings(void)
{
	uint64_t n = read_number("/proc/sys/vm/max_map_count");

	return n == UINT64_MAX ? MAPPINGS_DEFAULT : n;
}
