/*
 * Who is in an elastic job, and how its next run begins. Private to pipeline/.
 */
#pragma once

#include "base/clock.h"
#include "pipeline/pipeline.h"

struct pipeline_job;
struct pipeline_round;
struct pipeline_tensor;

/* Ranks of an elastic job: elastic.c, regroup.c. Inside, ranks keep their numbers while the run lasts. */
struct pipeline_membership {
	uint32_t number, first; /* now; when the run began */
	uint32_t *
		out; /* by rank: the membership from which on the rank is not in the job; 0: the rank is in */
	uint32_t n_out, n_regrouping;
	bool goes;	   /* the run is over here, and goes on elsewhere */
	uint32_t n_guests; /* newcomers on nodes that have no rank in the job, as the home says */
	bool regrouped;	   /* the run began when the ranks of one through servers regrouped */
	uint8_t *
		gone; /* by local number: dead, or left; over servers the rank is not out before they know */
	size_t n_gone;		/* of these, how many are not out */
	uint64_t regroup_by_ns; /* CLOCK_NEVER: nobody has asked */
	void *joined; /* of a run that began when ranks regrouped: JobJoined, which servers are told; or NULL */
	size_t joined_len;
};

/* elastic.c: jobs that go on without a rank. */
/* The job has its members. */
void pipeline_elastic_formed(struct pipeline_job *job);
/*
 * From now on the job goes on without this local rank: rounds that move have its contribution, others do without it. Its
 * own requests end with the failure, but for those that move. Fails the job with words if it is too small, unless it leaves.
 */
void pipeline_elastic_drop(struct pipeline_job *job, uint32_t index, const struct failure *failure,
			   bool leaves);
/*
 * The same for one that is gone before the home's answer has been taken to all servers, or when it had come back after a restart.
 * index is not looked at before the layout is known. Returns false when it is too early for that, or too few are left.
 */
bool pipeline_elastic_drop_forming(struct pipeline_job *job, uint32_t index, uint32_t rank,
				   const struct failure *failure);
/* The same for a member that is late, which is told. */
void pipeline_elastic_drop_late(struct pipeline_job *job, uint32_t index,
				const struct failure *failure);
/* Takes what the ledger says of those who are out to placement.moves. */
void pipeline_elastic_recall(struct pipeline_job *job);
/* placement.moves has changed: perhaps more ranks are out. Returns false when the job is over by that. */
bool pipeline_elastic_moved(struct pipeline_job *job, const char *why);
/* The job has gone over: drops ranks here that are out. */
void pipeline_elastic_go_on(struct pipeline_job *job, const char *why);
/* Ranks here that have left are missed only now. */
void pipeline_elastic_settle(struct pipeline_job *job);

/* seats.c: its ranks, counted, and what that makes of requests. */
/* Whether this node is the first that is in the job. */
bool pipeline_elastic_is_first(const struct pipeline_job *job);
/* Ranks that are in the job. */
uint32_t pipeline_elastic_size(const struct pipeline_job *job);
bool pipeline_elastic_is_out(const struct pipeline_job *job, uint32_t index);
/* A request has come: ranks are counted in it as its trainer knows them. Returns 0, or -EINVAL with words. */
int pipeline_elastic_submit(struct pipeline_tensor *tensor, uint32_t index,
			    struct pipeline_request *request, struct failure *failure);
/* A round of fewer ranks than the run began with has all its requests: whether they fit. Returns 0 or -EREMCHG with words. */
int pipeline_elastic_check(struct pipeline_round *round, struct failure *failure);
/* Fills in request->outcome. */
void pipeline_elastic_outcome(const struct pipeline_round *round, uint32_t index,
			      struct pipeline_request *request);

/* seek.c: newcomers of a node that has no rank in their job ask its home to be let in. */
struct pipeline_newcomer;
/* A newcomer has come, and no job here would let it in. */
void pipeline_seek(struct pipeline_newcomer *newcomer);
/* One has gone, or been let in. */
void pipeline_seek_changed(const struct pipeline_newcomer *newcomer);
void pipeline_seek_close(struct pipeline *pipeline);

/* untold.c: ranks that had not heard of the run that has begun when they regrouped, when the daemon's process died. */
/* A run of an elastic job of this name and secret that waits for its ranks to come back, or NULL. */
struct pipeline_job *pipeline_untold_find(struct pipeline *pipeline, const char *name,
					  const uint8_t *secret_digest);
/* The place that such a run has for the process join->pid, of whom nobody has heard: sets its ranks, or returns false. */
bool pipeline_untold_place(const struct pipeline_job *job, struct pipeline_join *join);
/* A rank has come back that was told of it: those that have come as of the run before, which ends, and newcomers are in it. */
void pipeline_untold_take(struct pipeline_job *job);
/* The same when a newcomer has come. */
void pipeline_untold_let_in(struct pipeline *pipeline, const char *name,
			    const uint8_t *secret_digest);

/* regroup.c: newcomers, and the next run. */
struct pipeline_newcomer {
	struct list link;
	struct pipeline *pipeline;
	struct pipeline_member *member;
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint64_t deadline_ns, timeout_ms;
	uint32_t pid, uid;
	const char *cannot_resume;
};
bool pipeline_newcomer_is_for(const struct pipeline_newcomer *newcomer, const char *job,
			      const uint8_t *secret_digest);
/* It is told, and waits no more. */
void pipeline_newcomer_fail(struct pipeline_newcomer *newcomer, const struct failure *failure);
/* Whether it is the job that somebody means by this name and with this secret. */
bool pipeline_job_is(const struct pipeline_job *job, const char *name,
		     const uint8_t *secret_digest);
/* An elastic job of this name and secret that runs here, or NULL. */
struct pipeline_job *pipeline_elastic_find(struct pipeline *pipeline, const char *name,
					   const uint8_t *secret_digest);
/* Lets newcomers into a job that is to have them as its local ranks from i on; ranks: numbers of all local ones. */
void pipeline_elastic_let_in(struct pipeline_job *next, const uint32_t *ranks, uint32_t i);
/* Newcomers that the job would take. */
uint32_t pipeline_elastic_n_waiting(const struct pipeline_job *job);
/* Whether newcomers wait at this node, of a job over several. */
bool pipeline_elastic_waits(const struct pipeline_job *job);
/* Puts a newcomer into the row. As pipeline_join(). */
int pipeline_elastic_wait(struct pipeline *pipeline, struct pipeline_member *member,
			  const struct pipeline_join *join, struct failure *failure);
/* It gives up. */
void pipeline_elastic_forget(struct pipeline_member *member);
/* Fails those who wait; failure NULL: they are forgotten, and ask the next daemon process. */
void pipeline_elastic_close(struct pipeline *pipeline, const struct failure *failure);
/* The job is over, and begins no next run: who waits to be let in is told. */
void pipeline_elastic_end(struct pipeline_job *job);
/* Whether the job can regroup, which it then does. */
void pipeline_elastic_try(struct pipeline_job *job);
/* The home is there again: says once more that all ranks here regroup, if they do. */
void pipeline_elastic_regroup_again(struct pipeline_job *job);
/* Drops who has not asked to regroup in time. Returns the next deadline, or CLOCK_NEVER. */
uint64_t pipeline_elastic_expire(struct pipeline_job *job, uint64_t now_ns);
/*
 * The next run has begun: with so many ranks on so many nodes, of which this is number `node`, and has n_local, first those of the n
 * old ranks that asked for it. Moves the members over. Returns 0 with the next job, without servers, or -errno.
 */
struct pipeline_regrouped {
	uint32_t size, n_nodes, node, n_local, n;
	const uint32_t *old_ranks; /* n entries, ascending */
	const uint32_t *ranks; /* n_local entries, ascending: their new ones, and the newcomers' */
	uint64_t instance;
	uint32_t membership; /* with which it begins */
};
int pipeline_elastic_next(struct pipeline_job *job, const struct pipeline_regrouped *regrouped,
			  struct pipeline_job **ret_next);
