/*
 * What processes do, counted by the kernel while they do it: perf_event_open(2) on every thread, a tracepoint for system calls
 * and uprobes on the C library's allocator. What their daemon's data path copies is the daemon's own count: its metrics.
 */
#include "bench/bench.h"
#include <dirent.h>
#include <dlfcn.h>
#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define TRACING "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id"
#define UPROBE	"/sys/bus/event_source/devices/uprobe/type"

static const char *const allocators[] = { "malloc", "calloc", "realloc", "aligned_alloc",
					  "posix_memalign" };

struct opened {
	int fd;
	enum count_of what;
};

/* Where a function lies in the file of the library that this process runs. */
struct place {
	char file[PATH_MAX];
	uint64_t inode, offset;
};

struct count {
	struct opened *opened;
	size_t n_opened, capacity;
	uint64_t tracepoint, uprobe;
	struct place places[ARRAY_SIZE(allocators)];
};

static uint64_t read_number(const char *path)
{
	unsigned long long number;
	FILE *file = fopen(path, "re");

	if (!file || fscanf(file, "%llu", &number) != 1)
		bench_die("--count: cannot read %s: %m. It takes root, and a kernel that traces",
			  path);
	(void)fclose(file);
	return number;
}

/* The mapping of a process of this inode, or, without one, that holds an address. */
static bool find_mapping(pid_t pid, uint64_t inode, uintptr_t address, struct place *ret_place,
			 uint64_t *ret_start)
{
	char path[64], line[PATH_MAX + 128];
	bool found = false;
	FILE *maps;

	(void)snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		bench_die("--count: cannot read %s: %m", path);
	while (!found && fgets(line, sizeof(line), maps)) {
		unsigned long long start, end, offset, number;
		int at = 0;

		if (sscanf(line, "%llx-%llx %*s %llx %*s %llu %n", &start, &end, &offset, &number,
			   &at) != 4 ||
		    !at)
			continue;
		found = inode ? number == inode : address >= start && address < end;
		if (!found)
			continue;
		ret_place->inode = number;
		ret_place->offset = offset;
		*ret_start = start;
		line[strcspn(line, "\n")] = '\0';
		(void)snprintf(ret_place->file, sizeof(ret_place->file), "%s", line + at);
	}
	(void)fclose(maps);
	return found;
}

static void place_of(const char *function, struct place *ret_place)
{
	uintptr_t address = (uintptr_t)dlsym(RTLD_DEFAULT, function);
	uint64_t start;

	if (!address || !find_mapping(getpid(), 0, address, ret_place, &start))
		bench_die("--count: there is no %s() to be found", function);
	ret_place->offset += address - start;
}

static void open_event(struct count *count, pid_t thread, enum count_of what,
		       struct perf_event_attr attr)
{
	int fd;

	attr.size = sizeof(attr);
	attr.disabled = 1;
	attr.inherit = 1; /* by threads that are still to come */
	attr.inherit_thread = 1;
	fd = (int)syscall(SYS_perf_event_open, &attr, thread, -1, -1, PERF_FLAG_FD_CLOEXEC);
	if (fd < 0 && errno == ESRCH)
		return; /* it has ended meanwhile */
	if (fd < 0)
		bench_die("--count: cannot count what thread %d does: %m. It takes root, or "
			  "CAP_PERFMON "
			  "and sysctl kernel.perf_event_paranoid=-1",
			  thread);
	if (count->n_opened == count->capacity) {
		count->capacity = MAX(64u, 2 * count->capacity);
		count->opened =
			reallocarray(count->opened, count->capacity, sizeof(*count->opened));
		if (!count->opened)
			bench_die("out of memory");
	}
	count->opened[count->n_opened++] = (struct opened){ fd, what };
}

/* What is the same for all threads of a process. */
static void find_events(struct count *count, pid_t pid)
{
	struct place theirs;
	uint64_t start;

	count->tracepoint = read_number(TRACING);
	count->uprobe = read_number(UPROBE);
	for (size_t i = 0; i < ARRAY_SIZE(allocators); i++) {
		struct place *place = &count->places[i];

		place_of(allocators[i], place);
		if (!find_mapping(pid, place->inode, 0, &theirs, &start))
			bench_die("--count: process %d runs with another C library than %s", pid,
				  place->file);
	}
}

static void open_thread(struct count *count, pid_t thread)
{
	open_event(count, thread, COUNT_SYSTEM_CALLS,
		   (struct perf_event_attr){ .type = PERF_TYPE_TRACEPOINT,
					     .config = count->tracepoint });
	open_event(count, thread, COUNT_SWITCHES,
		   (struct perf_event_attr){ .type = PERF_TYPE_SOFTWARE,
					     .config = PERF_COUNT_SW_CONTEXT_SWITCHES });
	for (size_t i = 0; i < ARRAY_SIZE(allocators); i++)
		open_event(count, thread, COUNT_ALLOCATIONS,
			   (struct perf_event_attr){ .type = (uint32_t)count->uprobe,
						     .config1 = (uintptr_t)count->places[i].file,
						     .config2 = count->places[i].offset });
}

static void open_process(struct count *count, pid_t pid)
{
	struct dirent *entry;
	char path[64];
	DIR *threads;

	(void)snprintf(path, sizeof(path), "/proc/%d/task", pid);
	threads = opendir(path);
	if (!threads)
		bench_die("--count: cannot read %s: %m", path);
	while ((entry = readdir(threads))) {
		pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);

		if (thread > 0)
			open_thread(count, thread);
	}
	(void)closedir(threads);
}

struct count *count_start(pid_t process)
{
	struct count *count = calloc(1, sizeof(*count));

	if (!count)
		bench_die("out of memory");
	find_events(count, process);
	open_process(count, process);
	for (size_t i = 0; i < count->n_opened; i++)
		if (ioctl(count->opened[i].fd, PERF_EVENT_IOC_ENABLE, 0))
			bench_die("--count: cannot count: %m");
	return count;
}

void count_read(const struct count *count, double counts[COUNT_MAX_])
{
	memset(counts, 0, COUNT_MAX_ * sizeof(*counts));
	for (size_t i = 0; i < count->n_opened; i++) {
		uint64_t value;

		if (read(count->opened[i].fd, &value, sizeof(value)) != sizeof(value))
			bench_die("--count: cannot read a counter: %m");
		counts[count->opened[i].what] += (double)value;
	}
}

void count_stop(struct count *count)
{
	for (size_t i = 0; i < count->n_opened; i++)
		(void)close(count->opened[i].fd);
	free(count->opened);
	free(count);
}

void count_read_daemon(double *ret_copied, double *ret_parts)
{
	FILE *metrics = popen("bpsctl metrics", "re"); /* finds the admin socket by itself */
	char line[512];
	int n = 0;

	while (metrics && fgets(line, sizeof(line), metrics)) {
		n += sscanf(line, "bps_copied_bytes_total %lf", ret_copied) == 1;
		n += sscanf(line, "bps_agent_parts_total %lf", ret_parts) == 1;
	}
	if (!metrics || pclose(metrics) || n != 2)
		bench_die("--count: \"bpsctl metrics\" does not tell what the daemon has copied: "
			  "bpsctl must be in $PATH and the admin socket open to it");
}
