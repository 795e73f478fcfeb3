/* What the kernel lets this process have, as far as it says so. Any thread. */
#pragma once

#include "proto/c.h"

/*
 * Bytes of memory: what the machine has, or the least that its memory cgroup or one above it may have (v2: memory.max and
 * memory.high; v1: memory.limit_in_bytes).
 */
uint64_t allowed_memory(void);
/* The same by files that lie elsewhere: instead of /proc/self/cgroup, and below root instead of /sys/fs/cgroup. For tests. */
uint64_t allowed_memory_of(const char *cgroups, const char *root);
/* Mappings that a process may have: vm.max_map_count. */
uint64_t allowed_mappings(void);
