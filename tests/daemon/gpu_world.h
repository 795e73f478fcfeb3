/* Trainers of one job at a daemon, all in this process, and what tests of GPUs ask of them. */
#pragma once

#include "daemon.h"
#include "gpu_trainer.h"

#define RANKS_MAX 4

struct world {
	struct test_daemon daemon;
	struct trainer trainers[RANKS_MAX];
	uint32_t n;
};

struct options {
	const char *const *args;
	uint32_t n;
	bool force_distributed, one_device;
	enum gpu_reduce gpu_reduce;
	uint64_t gpu_roots;
	uint32_t part_bytes;
	uint64_t request_timeout_ms;
	const char *topology; /* of the double's devices; NULL: NVLink between all */
	const char *log_has, *log_lacks;
};

void world_open(struct world *world, const struct options *options);
void world_join(struct world *world, const char *name, const struct options *options);
void world_leave(struct world *world);
void world_close(struct world *world);

void world_declare(struct world *world, uint32_t number, const char *name, enum dtype dtype,
		   uint64_t elements);
void world_new_memories(struct world *world, struct memory *memories, enum memory_kind kind,
			uint64_t len);
void world_free_memories(struct world *world, struct memory *memories);

/* Values whose sums are exact, different for each rank and place. */
void world_fill(int32_t *data, uint64_t n, uint32_t rank, uint32_t seed);
int32_t world_sum_at(uint64_t i, uint32_t n_ranks, uint32_t seed);
/* One push_pull of int32 by all ranks; the result is read in stream order, before anybody has asked the slot. */
void world_push_pull(struct world *world, const struct memory *inputs, const struct memory *outputs,
		     uint32_t tensor, uint64_t round, uint64_t n);

/* A word that streams wait for until the host opens it: of the last slot, which no test uses. */
void gate_close(struct trainer *trainer);
void gate_open(struct trainer *trainer);

uint32_t submit_sum(struct trainer *trainer, const struct memory *memory, uint64_t offset,
		    uint32_t tensor, uint64_t round, uint64_t n);
void expect_refused(struct trainer *trainer, struct memory *memory, int status, const char *words);
