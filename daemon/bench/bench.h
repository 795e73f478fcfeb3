/*
 * bps-bench: what perftest and nccl-tests are to their users. One command a file; each measures what a trainer waits for,
 * prints a table and, with --json FILE, one JSON object. Nothing here asserts a time.
 *
 *	op	 one operation over all ranks, for a list of sizes	op.c
 *	ring	 the hop to the daemon and back, beside a bare wake-up	ring.c
 *	sum	 the kernels of the sum, beside memcpy			sum.c
 *	replay	 the tensors of a real model in the order of its layers, with timed waits in place of the GPU	replay.c
 *
 * Times over several ranks are those of the slowest: ranks tell each other theirs through bps itself, after measuring.
 */
#pragma once

#include "base/clock.h"
#include "proto/types.h"
#include <bps.h> /* as any trainer does */
#include <stdio.h>

#define BENCH_CHOICES 32 /* values that an option may list */

/* -- bench.c: options, figures, files ----------------------------------------------------------------------------- */

/* Prints why and ends with status 1; a failure of the library says bps_error(). */
_Noreturn void bench_die(const char *format, ...) _printf_(1, 2);
void bench_check(int r);
/* As above with status 2, for what was asked wrongly. */
_Noreturn void bench_usage(const char *format, ...) _printf_(1, 2);

/* "64K", "1M", "3": at least 1. Wrong ones end the program. */
uint64_t bench_size(const char *option, const char *text);
double bench_real(const char *option, const char *text);
/* "64K,1M" or "4K:64M:4" (from, to, factor). Returns how many. */
size_t bench_sizes(const char *option, const char *text, uint64_t sizes[BENCH_CHOICES]);
/* "1 KiB", "64 MiB", "1000 B". */
struct bench_size_text {
	char text[24];
};
const char *bench_size_text(uint64_t bytes, struct bench_size_text *ret_text);

/* Sorts, and gives the value below which a share of them lies; n > 0. */
int64_t bench_quantile(int64_t *values, size_t n, double share);

/* Opens FILE, "-" for standard output; NULL for NULL. Ends the program when it cannot. */
FILE *bench_json_open(const char *path);
void bench_json_close(FILE *json);

/* -- group.c: the ranks ------------------------------------------------------------------------------------------- */

/* This rank's place among those that measure together. */
struct group {
	struct bps_client *client;
	uint32_t rank, size, local_rank;
	pid_t daemon; /* the daemon beside it, 0 where it cannot be told */
};

/*
 * With n_ranks: forks so many ranks on this machine; the parent waits for them, and ends with the first bad status. Without:
 * this process is one, as its environment says (bpslaunch, torchrun, mpirun, srun). Returns in ranks only.
 */
void group_start(unsigned n_ranks);
void group_open(struct group *group);
void group_close(struct group *group);
void group_barrier(struct group *group);
/* Every value becomes the largest, or the sum, of all ranks' values. */
void group_largest(struct group *group, int64_t *values, size_t n);
double group_total(struct group *group, double value);
/* CPU seconds that this rank has used, and on local rank 0 its daemon too. */
double group_cpu(const struct group *group);
/* Submits and waits to the end. */
void group_run(struct bps_tensor *tensor, const struct bps_submit_params *params);

/* -- count.c: what processes do, counted by the kernel ---------------------------------------------------------------- */

enum count_of { COUNT_SYSTEM_CALLS, COUNT_SWITCHES, COUNT_ALLOCATIONS, COUNT_MAX_ };

/* On all threads of a process, those to come too. Takes root; ends the program, with the reason, where it cannot. */
struct count *count_start(pid_t process);
/* Since the start. Reading is counted as well, where it is this process. */
void count_read(const struct count *count, double counts[COUNT_MAX_]);
void count_stop(struct count *count);
/* What the daemon here has copied and completed since it started: its metrics, by bpsctl. */
void count_read_daemon(double *ret_copied, double *ret_parts);

/* -- limit.c: what the memory gives ------------------------------------------------------------------------------------ */

#define LIMIT_WAYS   10
#define CONVERT_WAYS 2

/*
 * Reads n_inputs and writes one output of len bytes, a multiple of 512, in one of LIMIT_WAYS ways; false where this
 * machine has it not.
 */
bool limit_run(unsigned way, void *out, void *const *inputs, size_t n_inputs, size_t len);
/*
 * Converts and adds what a sum of n_inputs of len bytes, a multiple of 512, has to, and neither reads nor writes them; false where
 * the type needs none, or this machine has not that way of CONVERT_WAYS.
 */
bool limit_convert(unsigned way, unsigned dtype, size_t n_inputs, size_t len);

/* -- model.c: what models are made of ----------------------------------------------------------------------------- */

struct model_tensor {
	uint64_t elements;
	double work; /* share of its layer in the forward pass, in floating-point operations */
};

struct model {
	const char *name;
	double forward_ms, backward_ms, update_ms; /* of one step */
	const char *where;			   /* those times were measured */
	struct model_tensor *tensors; /* in the order of the forward pass; to be freed */
	size_t n_tensors;
};

/* Fills one in by its name; false for a name that is none. model_names: for help. */
bool model_make(const char *name, struct model *ret_model);
extern const char model_names[];

/* -- Commands: arguments as main() gets them, their own name first. Return the exit status. ------------------------- */

int bench_op(int argc, char **argv);
int bench_ring(int argc, char **argv);
int bench_sum(int argc, char **argv);
int bench_replay(int argc, char **argv);
