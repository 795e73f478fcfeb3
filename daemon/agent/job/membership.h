/*
 * Who is in an elastic job, and how its next run begins. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "base/clock.h"

struct agent_job;
struct agent_round;
struct agent_tensor;

/* Ranks of an elastic job: elastic.c, regroup.c. Inside, ranks keep their numbers while the run lasts. */
struct agent_membership {
	uint32_t number, first; /* now; when the run began */
	uint32_t *
		out; /* by rank: the membership from which on the rank is not in the job; 0: the rank is in */
	uint32_t n_out, n_regrouping;
	bool goes;	    /* the run is over here, and goes on elsewhere */
	uint32_t n_joiners; /* newcomers on nodes that have no rank in the job, as the home says */
	bool regrouped;	    /* the run began when the ranks of one through servers regrouped */
	uint8_t *
		gone; /* by local number: DATA_MOVES_LOST or _LEFT; over servers the rank is not out before they know */
	size_t n_gone;		/* of these, how many are not out */
	uint64_t regroup_by_ns; /* CLOCK_NEVER: nobody has asked */
	void *joined; /* of a run that began when ranks regrouped: JobJoined, which servers are told; or NULL */
	size_t joined_len;
};

/* elastic.c: jobs that go on without a rank. */
/* The job has its members. */
void agent_elastic_formed(struct agent_job *job);
/*
 * From now on the job goes on without this local rank: rounds that move have its contribution, others do without it. Its
 * own requests end with the failure, but for those that move. Fails the job with words if it is too small, unless it leaves.
 */
void agent_elastic_drop(struct agent_job *job, uint32_t index, const struct failure *failure,
			bool leaves);
/*
 * The same for one that is gone before the home's answer has been taken to all servers, or when it had come back after a restart.
 * index is not looked at before the layout is known. Returns false when it is too early for that, or too few are left.
 */
bool agent_elastic_drop_forming(struct agent_job *job, uint32_t index, uint32_t rank,
				const struct failure *failure);
/* The same for a member that is late, which is told. */
void agent_elastic_drop_late(struct agent_job *job, uint32_t index, const struct failure *failure);
/* Takes what the ledger says of those who are out to placement.moves. */
void agent_elastic_recall(struct agent_job *job);
/* placement.moves has changed: perhaps more ranks are out. Returns false when the job is over by that. */
bool agent_elastic_moved(struct agent_job *job, const char *why);
/* The job has gone over: drops ranks here that are out. */
void agent_elastic_go_on(struct agent_job *job, const char *why);
/* Ranks here that have left are missed only now. */
void agent_elastic_settle(struct agent_job *job);

/* rank_map.c: its ranks, counted, and what that makes of requests. */
/* Whether this node is the first that is in the job. */
bool agent_elastic_is_first(const struct agent_job *job);
/* Ranks that are in the job. */
uint32_t agent_elastic_size(const struct agent_job *job);
bool agent_elastic_is_out(const struct agent_job *job, uint32_t index);
/* A request has come: ranks are counted in it as its trainer knows them. Returns 0, or -EINVAL with words. */
int agent_elastic_submit(struct agent_tensor *tensor, uint32_t index, struct agent_request *request,
			 struct failure *failure);
/* A round of fewer ranks than the run began with has all its requests: whether they fit. Returns 0 or -EREMCHG with words. */
int agent_elastic_check(struct agent_round *round, struct failure *failure);
/* Fills in request->outcome. */
void agent_elastic_outcome(const struct agent_round *round, uint32_t index,
			   struct agent_request *request);

/* discovery.c: newcomers of a node that has no rank in their job ask its home to be let in. */
struct agent_newcomer;
/* A newcomer has come, and no job here would let it in. */
void agent_discovery_begin(struct agent_newcomer *newcomer);
/* One has gone, or been let in. */
void agent_discovery_changed(const struct agent_newcomer *newcomer);
void agent_discovery_close(struct agent *agent);

/* uninformed.c: ranks that had not heard of the run that has begun when they regrouped, when the daemon's process died. */
/* A run of an elastic job of this name and secret that waits for its ranks to come back, or NULL. */
struct agent_job *agent_uninformed_find(struct agent *agent, const char *name,
					const uint8_t *secret_digest);
/* The place that such a run has for join->process, of whom nobody has heard: sets its ranks, or returns false. */
bool agent_uninformed_place(const struct agent_job *job, struct agent_join *join);
/*
 * The first rank has come back that was told of it: those that have come as of the run before, which ends, and newcomers are in it.
 * Later ones are when they come.
 */
void agent_uninformed_take(struct agent_job *job);
void agent_uninformed_let_in(struct agent_newcomer *newcomer);

/* regroup.c: newcomers, and the next run. */
struct agent_newcomer {
	struct list link;
	struct list of_job; /* among those that wait for the same job */
	struct agent *agent;
	struct agent_member *member;
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint64_t deadline_ns, timeout_ms;
	uint32_t uid;
	struct process_seen process;
	const char *cannot_resume;
};
bool agent_newcomer_is_for(const struct agent_newcomer *newcomer, const char *job,
			   const uint8_t *secret_digest);
/* Those that wait for a job, by of_job; NULL: there are none. Others' newcomers cost nothing. */
const struct list *agent_newcomers_of(const struct agent *agent, const char *job,
				      const uint8_t *secret_digest);
/* Of a job that is meant by this name and with this secret. */
uint64_t agent_newcomers_hash(const char *job, const uint8_t *secret_digest);
/* It is told, and waits no more. */
void agent_newcomer_fail(struct agent_newcomer *newcomer, const struct failure *failure);
/* Whether it is the job that somebody means by this name and with this secret. */
bool agent_job_is(const struct agent_job *job, const char *name, const uint8_t *secret_digest);
/* An elastic job of this name and secret that runs here, or NULL. */
struct agent_job *agent_elastic_find(struct agent *agent, const char *name,
				     const uint8_t *secret_digest);
/* Lets newcomers into a job that is to have them as its local ranks from i on; ranks: numbers of all local ones. */
void agent_elastic_let_in(struct agent_job *next, const uint32_t *ranks, uint32_t i);
/* Newcomers that the job would take. */
uint32_t agent_elastic_n_waiting(const struct agent_job *job);
/* Whether newcomers wait at this node, of a job over several. */
bool agent_elastic_waits(const struct agent_job *job);
/* Puts a newcomer into the row. As agent_join(). */
int agent_elastic_wait(struct agent *agent, struct agent_member *member,
		       const struct agent_join *join, struct failure *failure);
/* It gives up. */
void agent_elastic_forget(struct agent_member *member);
/* Fails those who wait; failure NULL: they are forgotten, and ask the next daemon process. */
void agent_elastic_close(struct agent *agent, const struct failure *failure);
/* The job is over, and begins no next run: who waits to be let in is told. */
void agent_elastic_end(struct agent_job *job);
/* Whether the job can regroup, which it then does. */
void agent_elastic_try(struct agent_job *job);
/* The home is there again: says once more that all ranks here regroup, if they do. */
void agent_elastic_regroup_again(struct agent_job *job);
/* Drops who has not asked to regroup in time. Returns the next deadline, or CLOCK_NEVER. */
uint64_t agent_elastic_expire(struct agent_job *job, uint64_t now_ns);
/*
 * The next run has begun: with so many ranks on so many nodes, of which this is number `node`, and has n_local, first those of the n
 * old ranks that asked for it. Moves the members over. Returns 0 with the next job, without servers, or -errno.
 */
struct agent_regrouped {
	uint32_t size, n_nodes, node, n_local, n;
	const uint32_t *old_ranks; /* n entries, ascending */
	const uint32_t *ranks; /* n_local entries, ascending: their new ones, and the newcomers' */
	uint64_t instance;
	uint32_t membership; /* with which it begins */
};
int agent_elastic_next(struct agent_job *job, const struct agent_regrouped *regrouped,
		       struct agent_job **ret_next);
