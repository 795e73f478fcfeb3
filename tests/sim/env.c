/* What a process asks of its system: time, random numbers, other processes, a place for a log. */
#include "base/failpoint.h"
#include "base/log.h"
#include "base/process.h"
#include "coverage.h"
#include "sim.h"
#include <stdarg.h>
#include <sys/random.h>
#include <time.h>

int __wrap_clock_gettime(clockid_t clock, struct timespec *time);
ssize_t __wrap_getrandom(void *data, size_t len, unsigned flags);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time)
{
	(void)clock;
	time->tv_sec = (time_t)(world->now_ns / NSEC_PER_SEC);
	time->tv_nsec = (long)(world->now_ns % NSEC_PER_SEC);
	return 0;
}

ssize_t __wrap_getrandom(void *data, size_t len, unsigned flags)
{
	(void)flags;
	for (size_t i = 0; i < len; i++)
		((uint8_t *)data)[i] = (uint8_t)rng_next(&world->random);
	return (ssize_t)len;
}

/* -- Processes ------------------------------------------------------------------------------------------------------ */

uint64_t process_started(uint32_t pid)
{
	return pid;
}

enum process_state process_look(uint32_t pid, uint64_t started)
{
	(void)started;
	return trainer_is_alive(pid) ? PROCESS_ALIVE : PROCESS_GONE;
}

uint64_t process_namespace(void)
{
	return 1;
}

/* -- The log, which is part of the trace ------------------------------------------------------------------------------ */

static int log_level = LOG_LEVEL_DEBUG;

void log_set_level(int level)
{
	log_level = level;
}

int log_get_level(void)
{
	return sim_trace ? log_level : LOG_LEVEL_ERROR;
}

bool log_passes(struct log_place *place, int level)
{
	(void)place;
	return level <= log_get_level();
}

void log_line(int level, const char *format, ...)
{
	char line[1024];
	va_list args;

	if (!sim_trace || level > log_level)
		return;
	va_start(args, format);
	(void)vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	trace("log %d: %s", level, line);
}

static const struct node *current_node(void)
{
	for (unsigned i = 0; loop_current && i < world->n_nodes; i++)
		if (world->nodes[i].loop == loop_current)
			return &world->nodes[i];
	return NULL;
}

void trace_line(const char *format, ...)
{
	const struct node *node = current_node();
	va_list args;

	(void)printf("%12.6f %-8s ", (double)world->now_ns / 1e9, node ? node->name : "");
	va_start(args, format);
	(void)vprintf(format, args);
	va_end(args);
	(void)putchar('\n');
}

/* -- Failpoints: each is a place where a process may end ---------------------------------------------------------------- */

#ifdef BPS_FAILPOINTS
enum failpoint failpoint_pass(const char *name)
{
	struct node *node = (struct node *)current_node();

	coverage_note("failpoint", name);
	if (node && node->points_left && !--node->points_left) {
		trace("killed at failpoint %s", name);
		coverage_note("killed at", name);
		loop_die();
	}
	return FAILPOINT_NOTHING;
}
#endif
