/*
 * Jobs that outlive this daemon process. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "agent/job/absent.h"
#include "ledger/ledger.h"

struct agent_job;
struct agent_member;
struct agent_round;
struct agent_tensor;

/* A job that can be resumed, by this daemon process or the next: resume.c. */
struct agent_resumption {
	const char *
		ends; /* why the job cannot outlive this process, as far as is known; NULL: it can */
	bool resumed; /* the job continues a run that another daemon process began */
	uint64_t began_ns;
	struct agent_absence absence;
	struct list behind;	/* tensors of which some rank may be: agent_resume_caught_up() */
	bool suspended;		/* the job is left to the next daemon process as it is */
	struct ledger *ledger;	/* or NULL */
	int ledger_fd;		/* until all ranks that need it have it, or -1 */
	uint32_t *node_of_rank; /* from the ledger, when resumed */
};

/* resume.c */
/* Why the job ends with this process, or NULL. A constant. */
const char *agent_resume_ends(const struct agent_job *job);
/* A job that is being formed here gets its ledger: a new one, unless it is resumed. Returns 0 or -errno. */
int agent_resume_prepare(struct agent_job *job);
/* The same for one that goes through servers, with what the next process has to know. */
int agent_resume_prepare_far(struct agent_job *job, const void *record, size_t len);
/* Forms a job that is resumed, if all its ranks here are back. */
void agent_resume_form(struct agent_job *job);
/* A job that has begun cannot take in a rank without a past. Returns 0, or -EEXIST with words. */
int agent_resume_check_new(const struct agent_job *job, const struct agent_join *join,
			   struct failure *failure);
/* Keeps what a rank says of a tensor's past. Returns 0, -EPROTO or -ENOMEM with words. */
int agent_resume_past(struct agent_member *member, struct agent_tensor *tensor,
		      const struct agent_past *past, struct failure *failure);
/*
 * Whether every rank here has submitted again what another had seen end well. Until then nobody leaves: what only he had
 * seen, the daemon process after this one would not be told.
 */
bool agent_resume_caught_up(struct agent_job *job);
/* The newest round that some rank had seen end well, or 0. */
uint64_t agent_resume_newest(const struct agent_tensor *tensor);
/* How a round of at most tensor->past_rounds ended for this request. ret_failure: set unless it is well. */
void agent_resume_outcome(const struct agent_tensor *tensor, struct agent_request *request,
			  struct failure *ret_failure);
/* A push_pull_rows has its result in all outputs here. Returns 0, or as ledger_round_begin(). */
int agent_resume_record_rows(struct agent_round *round, struct failure *failure);
/* Its requests are about to end. */
void agent_resume_finish_rows(struct agent_round *round);
/* Whether the daemon before was moving this round, so that it can only go on. */
bool agent_resume_moves(const struct agent_tensor *tensor, uint64_t round);
