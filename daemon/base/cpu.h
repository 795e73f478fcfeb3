/* How much of the machine is ours, and what it can do. Any thread. */
#pragma once

#include "proto/c.h"
#ifdef __x86_64__
#include <cpuid.h>
#endif

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

#ifdef __x86_64__
/* Whether it converts float16. Not every compiler's __builtin_cpu_supports() knows the name. */
static inline bool cpu_has_f16c(void)
{
	unsigned a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif
