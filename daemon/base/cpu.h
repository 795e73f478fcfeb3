/* How much of the machine is ours. Any thread. */
#pragma once

#include "proto/c.h"

/*
 * Number of cores that this process may keep busy: what its affinity allows, and no more than the CPU bandwidth of its
 * control groups, rounded up. At least 1.
 */
unsigned cpu_count(void);

/*
 * The cores that a bandwidth as in cpu.max of cgroup v2 ("max 100000" or "150000 100000") amounts to, rounded up;
 * UINT_MAX when it limits nothing or is not of that form.
 */
unsigned cpu_parse_max(const char *text);
