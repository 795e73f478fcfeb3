/*
 * Jobs of this node and their tensors. Private to agent/.
 *
 *	FORMING		local ranks come; a job over several nodes also asks which view it runs in, JOINs at the home
 *			server and ATTACHes at every server
 *	RUNNING		all ranks of the job are there
 *	OVER		failed or left: no member belongs to it any more; it is freed when nothing of it is in flight
 *
 * What happens to a job as a whole is said at once, in the job, and taken to its rounds by a sweep: sweep.c. It may have
 * hundreds of thousands of them, and other jobs have their turns meanwhile.
 */
#pragma once

#include "agent/agent.h"
#include "agent/common/placement.h"
#include "agent/hooks.h"
#include "agent/job/departed.h"
#include "agent/job/membership.h"
#include "agent/job/report.h"
#include "agent/job/resume.h"
#include "agent/request/deadlock.h"
#include "agent/request/follow.h"
#include "agent/request/ordinal.h"
#include "agent/request/sweep.h"
#include "agent/request/tensor.h"
#include "agent/round/later.h"
#include "agent/schedule/schedule.h"
#include "agent/servers/fleet.h"
#include "agent/servers/retention.h"
#include "base/clock.h"
#include "base/loop/loop.h"
#include "base/map.h"
#include "base/memory/bulk.h"
#include "base/memory/spent.h"
#include "base/metrics.h"
#include "base/order/arrivals.h"

/* Parts begin aligned for vector units, and hold whole elements of every type. */
#define PART_ALIGN 64u

/* The home server's own answers come at the deadline or a moment after; only then does an agent give up by itself. */
#define SERVER_GRACE_NS (3 * NSEC_PER_SEC)

enum agent_job_state { JOB_FORMING, JOB_RUNNING, JOB_OVER };

struct agent {
	struct agent_params params;
	const struct agent_hooks *hooks;
	struct list jobs;	 /* not yet freed, in the order in which they began */
	uint64_t n_changes;	 /* how often one has come, gone, or got its number */
	struct list send_queues; /* queues towards servers: send_queue.c */
	struct chore reap;	 /* frees jobs that are over, when nobody up the stack uses them */
	struct list newcomers;	 /* wait for an elastic job to let them in: regroup.c */
	struct map waiting;	 /* these, by the job that they wait for: regroup.c */
	struct list discoveries; /* jobs on other nodes that they are for: discovery.c; */
	struct map discovered;	 /* and by job */
	struct loop_timer newcomers_timer;
	struct agent_absences absences;
	bool closed;
	uint64_t n_rounds_started; /* orders rounds of equal priority */
	struct metric requests, failed, bytes, parts, parts_done;
	struct metric copied, copied_rows; /* of parts; in the pool, by rows */
	struct arrivals_spread spread;	   /* of ranks of one node */
};

/* What all ranks of a job must say alike. */
struct agent_shape {
	uint32_t size, local_size, node, n_nodes, min_servers, part_bytes;
	uint64_t request_timeout_ms;
	bool force_distributed;
	unsigned gpu_reduce;
	uint64_t gpu_roots;
	struct stragglers stragglers;
	bool elastic;
	uint32_t min_ranks, max_ranks;
};

/* Whose the job is: names of different owners are apart. */
struct agent_owner {
	char name[JOB_NAME_MAX + 1];		  /* of the job */
	uint8_t secret_digest[SECRET_DIGEST_LEN]; /* struct agent_join */
	uint32_t uid;				  /* who began the job here */
};

/* Why the job is over, once OVER. */
struct agent_end {
	struct failure failure; /* status 0: left in good order */
	uint64_t number;      /* what members are told of: the run's, or 0 where it had not begun */
	uint32_t n_dismissed; /* of the job's places, those that have been looked at since */
};

/* What the job holds. */
struct agent_memory {
	struct account *
		account; /* of the user whose rank came first, or NULL; charged with what is held */
	struct quota held;   /* of the account */
	uint64_t held_ranks; /* of that: what grows with ranks, and stays as long as the job */
	bool counted;	     /* as one of the account's jobs */
	struct bulk bulk;    /* rounds, parts and tensors, for the job's life */
	struct quota rows;   /* what push_pull_rows hold */
	struct list spare_rounds, spare_parts;
	struct spending spent_rows; /* of rows, what nobody needs any more */
};

struct agent_job {
	struct agent *agent;
	struct list link;
	struct agent_owner owner;
	struct agent_shape shape;
	enum agent_job_state state;
	bool distributed; /* goes through servers */
	struct agent_end end;

	uint64_t number;   /* of this run */
	uint64_t instance; /* random: of this node's run */
	uint32_t part_bytes;
	uint64_t request_timeout_ns;
	uint64_t formed_by_ns;	     /* FORMING: deadline */
	uint64_t forming_timeout_ns; /* that deadline as it was given, for words */

	struct agent_member **
		members; /* local_size entries; FORMING: by local rank, then by layout's local number */
	uint32_t n_members;	   /* elastic: those that are in the run */
	struct layout layout;	   /* once RUNNING, or joined at the home server */
	struct arrivals *arrivals; /* of the local ranks, by local number; NULL: there is but one */
	struct agent_membership membership;
	struct agent_departures departed;
	struct agent_resumption resumption;
	struct agent_retention retention;
	struct agent_placement placement;
	struct agent_fleet fleet;
	struct agent_device *device; /* once memory of a device was used, or NULL */

	struct agent_tensors tensors;
	struct list rounds; /* open, in no order */
	size_t n_open_rounds;
	size_t n_busy;	     /* of them, those that are READY or MOVING */
	uint32_t *n_pending; /* by local number: open requests */
	struct agent_sweep sweep;
	struct agent_later later;
	struct agent_schedule schedule;
	struct agent_order order;
	struct agent_deadlock deadlock;
	struct agent_following following;

	struct agent_memory memory;
	unsigned holds; /* calls and parts in flight, and 1 until OVER; at 0 it is reaped */
	uint64_t n_rounds, n_bytes, n_in_flight; /* for operators */
};

/* job.c */
void agent_job_hold(struct agent_job *job);
void agent_job_release(struct agent_job *job);
/* Words for what held_new() and bulk_take() of the job have left in errno. Returns -error. */
int agent_job_no_memory(const struct agent_job *job, int error, struct failure *failure);
/* Ends a job for all its members. Tells the servers, but for `from`, which is who told us (or is lost), or NULL. */
void agent_job_fail(struct agent_job *job, const struct failure *failure, const struct peer *from);
/* The home server has put the job together, and every server knows it (or none is needed). */
void agent_job_formed(struct agent_job *job);
/* All ranks here have left: says so, once a server is there to hear it, and the job is over here. */
void agent_job_end_departed(struct agent_job *job);
/* Members that leave do so once their requests have ended. */
void agent_job_let_leave(struct agent_job *job);
/*
 * What members have declared that are about to leave, or all of which regroup, is void: little of it now. Returns false where there is
 * more, which goes in later turns; then agent_job_let_leave() and agent_elastic_try() are called again.
 */
bool agent_job_lets_go(struct agent_job *job, bool regroups);
/* Members that are leaving, and whose requests have ended, have left: no turn is to come. */
void agent_job_leave_now(struct agent_job *job);
/* Arms the timer for a deadline, unless it is armed for an earlier one. */
void agent_job_watch(struct agent_job *job, uint64_t deadline_ns);
struct agent_job *agent_job_free(struct agent_job *job);
/* A job without members, FORMING. Returns 0 or -errno. */
int agent_job_make(struct agent *agent, const struct agent_join *join, struct agent_job **ret_job);
/* The same within what this daemon may have. Returns 0 or -errno with words. */
int agent_job_new(struct agent *agent, const struct agent_join *join, struct agent_job **ret_job,
		  struct failure *failure);
/* Of a job that has failed: a member is told, and in it no more. Returns false when there is none. For the sweep. */
bool agent_job_dismiss(struct agent_job *job);
/* It is over, and nobody is told: whoever calls has seen to that. */
void agent_job_over(struct agent_job *job);
/* The member is in no job any more. */
void agent_job_detach(struct agent_member *member);
/*
 * The job that its owner calls by this name now, or NULL: names of different owners are apart. One that a rank has left does
 * not come back, but its name does. Of a job whose ranks are nodes of their own, that of the join's rank.
 */
struct agent_job *agent_job_find(struct agent *agent, const struct agent_join *join);
/* Takes a member in, for whom the job is to be formed within timeout_ns. */
void agent_job_add(struct agent_job *job, struct agent_member *member,
		   const struct agent_join *join, uint64_t timeout_ns);
/* Forms a job that is all on this node, if all its ranks are there. */
void agent_job_form_here(struct agent_job *job);
/* What a rank says, with defaults in their place, checked against the rules. As agent_join(). */
int agent_join_take(const struct agent *agent, const struct agent_join *given,
		    struct agent_join *ret_join, struct failure *failure);
/* Makes room for members by local number. Returns 0, -EPROTO (layout and members disagree) or -ENOMEM. */
int agent_job_order_members(struct agent_job *job);

/* join.c: what a rank says when it joins, against the rules and against the others. */
int agent_join_check(const struct agent_join *join, struct failure *failure);
int agent_join_compare(const struct agent_job *job, const struct agent_join *join,
		       struct failure *failure);
/* Fills in join->secret_digest. Returns 0 or -ENOMEM. */
int agent_join_digest(struct agent_join *join);
