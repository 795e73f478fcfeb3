/*
 * A tensor of a job, from its first local declaration to the job's end. Private to pipeline/.
 */
#pragma once

#include "base/map.h"
#include "pipeline/level.h"
#include "pipeline/pipeline.h"

struct pipeline_job;
struct pipeline_member;

/* A tensor of a job, from its first local declaration to the job's end. */
struct pipeline_tensor {
	struct map_entry entry;
	struct pipeline_job *job;
	/* What each round looks at stands together: there may be thousands of tensors, each of which has its turn once in a step. */
	unsigned dtype;
	bool advancing;
	uint64_t elements;
	uint64_t key, start;  /* key 0: not agreed yet */
	struct list rounds;   /* open, by number */
	uint64_t n_rounds;    /* completed */
	uint64_t past_rounds; /* resumed: the newest of pasts */
	struct level level;
	uint64_t had; /* no server need hold a round up to this, of whatever operation; 0: none */
	struct failure failure; /* status not 0: ranks disagree, for good */
	uint32_t first_rank;	/* who declared it first */
	char name[TENSOR_NAME_MAX + 1];
	uint32_t n_declared; /* local ranks that have */
	uint8_t *declared;   /* by local number */
	struct list waiting; /* declarations not yet answered */
	uint64_t rows_had;   /* newest push_pull_rows that no server need hold; 0: none */
	uint64_t spread_ns;  /* between its first and its last rank, averaged */
	uint64_t *n_last;    /* by local number: rounds to which this rank came last */
	/* Resumed: what each local rank had seen before, or NULL when nobody had seen any round end. */
	struct pipeline_past *pasts;
	struct list behind;	/* the job's resumption.behind */
	struct list later_link; /* the job's later.tensors */
	uint64_t reached
		[]; /* by local number: rounds that this rank has submitted, in the past too; then n_last, declared */
};

static_assert(offsetof(struct pipeline_tensor, failure.text) <= 2 * CACHE_LINE &&
		      !(offsetof(struct pipeline_tensor, name) % CACHE_LINE),
	      "what each round looks at of a tensor is two lines, and its name");

/* declare.c */
/* The tensor that a rank here has declared under this name, or NULL. */
struct pipeline_tensor *pipeline_tensor_find(const struct pipeline_job *job, const char *name);
/* The ranks of all nodes agree, or not (failure). */
void pipeline_tensor_agreed(struct pipeline_tensor *tensor, const struct failure *failure,
			    uint64_t key, uint64_t start);
/* This local rank will declare nothing more. */
void pipeline_tensor_without(struct pipeline_job *job, uint32_t index);
/* Forgets a member's declarations. */
void pipeline_tensor_forget(struct pipeline_member *member);
