/*
 * A double of gpu/ for what stands on it: workers without a process, whose work is done at once and copies nothing. Memory is
 * imported, and a worker that was told to end is gone, when the test says so. Its symbols come before those of the archive.
 */
#pragma once

#include "gpu/gpu.h"

struct gpu *gpu_double_new(struct loop *loop);
/* After its loop, and all memory: frees it with the workers that are left. */
struct gpu *gpu_double_free(struct gpu *gpu);
DEFINE_CLEANUP(struct gpu *, gpu_double_free)
/* How many workers there are. */
unsigned gpu_double_workers(const struct gpu *gpu);
/* What is imported from now on stays on its way, or not. */
void gpu_double_hold_imports(struct gpu *gpu, bool hold);
/* What is on its way cannot be imported. */
void gpu_double_fail_imports(struct gpu *gpu);
/* The processes of workers that were told to end, and have nothing under way, are no more; nor is what they were importing. */
void gpu_double_end_workers(struct gpu *gpu);
