/*
 * A tensor of a job, from its first local declaration to the job's end, or until it is forgotten. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "agent/schedule/priority_class.h"
#include "base/loop/loop.h"
#include "base/map.h"

struct agent_job;
struct agent_member;

/* A tensor's set-up at a home: setup.c. */
struct agent_tensor_setup {
	uint64_t serial;    /* no other tensor has had it; 0: the tensor is gone */
	uint64_t said_home; /* fleet.n_homes when a home was last asked about the tensor */
};

struct agent_tensor {
	struct map_entry entry;
	struct agent_job *job;
	/* What each round looks at stands together: there may be thousands of tensors, each of which has its turn once in a step. */
	unsigned dtype;
	bool advancing;
	bool asked;   /* ranks have been told that it is unused */
	bool telling; /* servers hear of rounds that had failed before it had a key */
	uint64_t elements;
	uint64_t key, start;  /* key 0: not agreed yet */
	struct list rounds;   /* open, by number */
	uint64_t n_rounds;    /* completed */
	uint64_t past_rounds; /* resumed: the newest of pasts */
	struct priority_class priority_class;
	uint64_t
		acknowledged; /* no server need hold a round up to this, of whatever operation; 0: none */
	struct failure failure; /* status not 0: ranks disagree, for good */
	uint32_t first_rank;	/* one that has declared it so, for messages */
	char name[TENSOR_NAME_MAX + 1];
	char shape[TENSOR_SHAPE_MAX + 1]; /* empty: no rank has said one */
	uint32_t n_declared;		  /* local ranks that have */
	uint8_t *declared;		  /* by local number */
	struct agent_declaration *
		*declarations;	    /* likewise, of those that are in the job; or NULL */
	struct list waiting;	    /* declarations not yet answered */
	uint64_t rows_acknowledged; /* newest push_pull_rows that no server need hold; 0: none */
	uint64_t spread_ns;	    /* between its first and its last rank, averaged */
	uint64_t *n_last;	    /* by local number: rounds to which this rank came last */
	/* Resumed: what each local rank had seen before, or NULL when nobody had seen any round end. */
	struct agent_past *pasts;
	struct list behind;	/* the job's resumption.behind */
	struct list later_link; /* the job's later.tensors */
	struct list age_link;	/* the job's tensors.by_age, or spare */
	struct list all_link;	/* the job's tensors.all */
	struct agent_tensor_setup setup;
	uint64_t seen_rounds; /* n_rounds when it was looked at last */
	bool seen;
	bool awaited;	     /* asked: another node has been asked, too, and waits for our word */
	bool forgetting;     /* asked: all ranks here have released it; the home decides */
	bool needed;	     /* forgetting: a rank has use of it again */
	uint32_t n_released; /* ranks here that agree that it is unused */
	struct agent_round *untold; /* telling: the first of which they may not have heard */
	/* Rounds up to this one were told to ranks here that follow the others, since somebody last began to: following.since. */
	struct {
		uint64_t rounds, since;
	} notified;
	uint64_t reached
		[]; /* by local number: rounds that this rank has submitted, in the past too; then n_last, declarations, declared */
};

/* The job's; where there are many, forget.c forgets some. */
struct agent_tensors {
	struct map by_name;
	uint64_t n, n_keys, n_made;
	struct list all;    /* the newest last */
	struct list by_age; /* by age_link: the first is looked at next */
	size_t n_asked;
	uint64_t n_without; /* are yet to hear that ranks are out of the job: */
	struct chore without;
	struct list spare;    /* memory of those that were forgotten */
	uint64_t *forgotten;  /* through servers: the last keys, a ring of names.c; or NULL */
	uint64_t n_forgotten; /* ever */
};

static_assert(offsetof(struct agent_tensor, failure.text) <= 2 * CACHE_LINE &&
		      !(offsetof(struct agent_tensor, name) % CACHE_LINE),
	      "what each round looks at of a tensor is two lines, and its name");

/* declare.c */
/* The tensor that a rank here has declared under this name, or NULL. */
struct agent_tensor *agent_tensor_find(const struct agent_job *job, const char *name);
/* The open round of the tensor of this name, or NULL. */
struct agent_round *agent_tensor_round(const struct agent_job *job, const char *name,
				       uint64_t number);
/* The ranks of all nodes agree, or not (failure). */
void agent_tensor_agreed(struct agent_tensor *tensor, const struct failure *failure, uint64_t key,
			 uint64_t start);
/* For later.c: tells servers of more rounds that had failed; behind them it starts what can start. */
void agent_tensor_go_on(struct agent_tensor *tensor);
/* A local rank is out of the job: it will declare nothing more. Most tensors hear of it in later turns of the loop. */
void agent_tensor_without(struct agent_job *job);
/* At most max of a member's declarations are void. Returns how many. */
uint32_t agent_tensor_detach_some(struct agent_member *member, uint32_t max);
/* A member's declarations are void. */
void agent_tensor_detach(struct agent_member *member);

/* forget.c */
void agent_forget_init(struct agent_job *job);
/* The memory of one that was forgotten, as it was left; or NULL. */
struct agent_tensor *agent_forget_take_spare(struct agent_job *job);
/* There is one more: asks about some that are unused, if there are many. */
void agent_forget_some(struct agent_job *job);
/* It is in use: members that have released it hear that they have it still, or what the home says. */
void agent_forget_not(struct agent_tensor *tensor);
/* The home's word on one that all members here have released. */
void agent_forget_settled(struct agent_tensor *tensor, bool forgotten);
/* DATA_UNUSED: a node has released a tensor: asks our members, if they can be asked. */
void agent_forget_with_others(struct agent_job *job, const struct data_header *header,
			      const void *name);
/*
 * The home refuses one that was in doubt, and whose ranks have declared it again: it was forgotten. Returns whether it is gone, with its
 * declarations answered.
 */
bool agent_forget_refused(struct agent_tensor *tensor, const struct failure *failure);
/* Whether a member that was resumed has had rounds of a tensor that is known no more: 0, or -ESTALE with words. */
int agent_forget_check(const struct agent_member *member, const char *name,
		       const struct agent_past *past, struct failure *failure);
