/*
 * A tensor of a job, from its first local declaration to the job's end, or until it is forgotten. Private to pipeline/.
 */
#pragma once

#include "base/map.h"
#include "pipeline/level.h"
#include "pipeline/pipeline.h"

struct pipeline_job;
struct pipeline_member;

struct pipeline_tensor {
	struct map_entry entry;
	struct pipeline_job *job;
	/* What each round looks at stands together: there may be thousands of tensors, each of which has its turn once in a step. */
	unsigned dtype;
	bool advancing;
	bool asked; /* ranks have been told that it is unused */
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
	struct pipeline_declaration *
		*declarations; /* likewise, of those that are in the job; or NULL */
	struct list waiting;   /* declarations not yet answered */
	uint64_t rows_had;     /* newest push_pull_rows that no server need hold; 0: none */
	uint64_t spread_ns;    /* between its first and its last rank, averaged */
	uint64_t *n_last;      /* by local number: rounds to which this rank came last */
	/* Resumed: what each local rank had seen before, or NULL when nobody had seen any round end. */
	struct pipeline_past *pasts;
	struct list behind;	/* the job's resumption.behind */
	struct list later_link; /* the job's later.tensors */
	struct list age_link;	/* the job's tensors.by_age, or spare */
	uint64_t seen_rounds;	/* n_rounds when it was looked at last */
	bool seen;
	uint32_t n_released; /* ranks here that agree that it is unused */
	uint64_t reached
		[]; /* by local number: rounds that this rank has submitted, in the past too; then n_last, declarations, declared */
};

/* The job's; where there are many, forget.c forgets some. */
struct pipeline_tensors {
	struct map by_name;
	uint64_t n, n_keys;
	struct list by_age; /* by age_link: the first is looked at next */
	size_t n_asked;
	struct list spare; /* memory of those that were forgotten */
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
/* A member's declarations are void. */
void pipeline_tensor_detach(struct pipeline_member *member);

/* forget.c */
void pipeline_forget_init(struct pipeline_job *job);
/* The memory of one that was forgotten, as it was left; or NULL. */
struct pipeline_tensor *pipeline_forget_take_spare(struct pipeline_job *job);
/* There is one more: asks about some that are unused, if there are many. */
void pipeline_forget_some(struct pipeline_job *job);
/* It is in use: members that have released it hear that they have it still. */
void pipeline_forget_not(struct pipeline_tensor *tensor);
