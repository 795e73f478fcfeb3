/* Whether a process is still the one that it was: its number and when it was started, in this PID namespace. Any thread. */
#pragma once

#include "proto/c.h"

enum process_state { PROCESS_UNKNOWN, PROCESS_ALIVE, PROCESS_GONE };

/* Clock ticks from boot to its start; 0 when that cannot be told. */
uint64_t process_started(uint32_t pid);
/*
 * started: what process_started() said once. Where /proc hides the process, or did then, whoever has its number now is
 * taken for it.
 */
enum process_state process_look(uint32_t pid, uint64_t started);
/* Number of this PID namespace; 0 when it cannot be told. Numbers of processes mean nothing in another. */
uint64_t process_namespace(void);

/* A process that is looked at once, to be compared with many, or to be remembered. */
struct process_seen {
	uint32_t pid;
	uint64_t started;
	enum process_state state;
};

static inline struct process_seen process_see(uint32_t pid)
{
	return (struct process_seen){ pid, process_started(pid), process_look(pid, 0) };
}
