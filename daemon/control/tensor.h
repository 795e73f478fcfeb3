/*
 * Tensors of a session, declared under its trainer's numbers: tensor.c. Private to control/; control thread.
 */
#pragma once

#include "agent/agent.h"
#include "base/list.h"
#include "base/loop/loop.h"
#include "base/map.h"
#include "base/memory/bulk.h"

struct session;

struct session_tensor {
	struct map_entry entry; /* by the trainer's number */
	struct session *session;
	uint32_t number;
	size_t element_size;
	uint64_t declare_id, release_id, keep_id; /* requests to be answered */
	struct list asked;			  /* of the session's, while there are such */
	struct agent_declaration declaration;
	struct session_tensor *next_spare;
};

struct session_tensors {
	struct map map;
	size_t n;
	struct bulk bulk;
	struct list asked;	      /* those of which requests are to be answered */
	struct session_tensor *spare; /* not declared or not any more: for the next; or NULL */
	/* Those with numbers as libraries give them, one after the other: in a step each is looked for. NULL: see map. */
	struct session_tensor **numbered;
	size_t n_numbered; /* held_new() */
	/* Those of jobs that are over, while requests about them are to be answered: struct past_tensors. */
	struct list past;
	struct chore answering;
};

void session_tensors_init(struct session *session);
/*
 * Out of the job: forgets its tensors. Requests about them that were not answered are answered, declarations unless `why` is NULL: some at
 * once, the others in steps, as the trainer reads the answers.
 */
void session_drop_tensors(struct session *session, const struct failure *why);
/* The trainer has read some packets. */
void session_tensors_go_on(struct session *session);
/* The same, and of jobs before: nobody hears answers any more. */
void session_forget_tensors(struct session *session);
