/*
 * The line: from a trainer's submission to its completion. Owns this node's jobs and their tensors, matches the
 * submissions of the local ranks, plans each operation as parts, and moves every part through
 *
 *	gather (sum over local ranks)  ->  push  ->  ... server ...  ->  pull  ->  scatter (copy to local ranks)
 *
 * most urgent first. A job whose ranks are all on this node needs no server: gather writes the result at once. Control
 * thread only; sums and copies run in the pool, bytes move on transport/'s data threads.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"
#include "base/loop/pool.h"
#include "base/memory/account.h"
#include "base/memory/block.h"
#include "base/order/arrivals.h"
#include "base/process.h"
#include "cluster/cluster.h"
#include "proto/shm.h"
#include "tensor/tensor.h"
#include "transport/transport.h"

struct agent;
struct agent_begun;
struct agent_declaration;

struct agent_params {
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct transport *transport;
	struct cluster *cluster;
	uint64_t id;		    /* this daemon process */
	uint32_t part_bytes;	    /* of jobs that need no server */
	uint32_t device_part_bytes; /* the most of theirs, of rounds on devices */
	uint64_t
		inline_bytes; /* parts of at most this many input bytes are summed on the control thread */
	uint64_t
		remote_inline_bytes; /* the same of parts that go through servers, while nothing waits there */
	uint64_t ahead_bytes;	  /* of a job, that wait to be sent to servers; 0: by the link */
	uint64_t job_quota_bytes; /* rows held for the push_pull_rows of one job; 0: no limit */
	unsigned max_jobs;
	unsigned max_tensors;	    /* per job */
	uint64_t resume_timeout_ms; /* for the ranks of a job to come back after a restart */
	struct gpu *gpu;	    /* for memory of devices; NULL: there is none */
	bool resume; /* jobs that go through servers outlive their daemons' processes, too */
	uint64_t lost_timeout_ms; /* then: for a daemon that was lost to come back */
	uint64_t move_timeout_ms; /* for a server, where others can go on without it */
};

int agent_new(const struct agent_params *params, struct agent **ret_agent);
/* Every job fails with -ESHUTDOWN. Idempotent. */
void agent_close(struct agent *agent);
/*
 * Leaves every job that can be resumed to the next daemon process: none of its rounds goes on, ends or fails any more, and
 * its members get no call. Parts in the pool stop at their next piece. Before close.
 */
void agent_suspend(struct agent *agent);
/* Parts of such jobs that the pool still has; the loop takes them back. */
size_t agent_n_suspended(const struct agent *agent);
/* After close; when pool and transport hold none of its tasks and calls any more, because they are idle or were freed. */
struct agent *agent_free(struct agent *agent);
DEFINE_CLEANUP(struct agent *, agent_free)

/* transport_ops, for notices that concern this node's jobs and peers that are gone. */
void agent_notice_arrived(struct agent *agent, struct peer *peer, const struct data_header *header,
			  const void *payload);
void agent_peer_lost(struct agent *agent, struct peer *peer, const char *why);
/* The cluster has another view: what a server that was lost and is not in it has summed, others take over at once. */
void agent_view_changed(struct agent *agent);

/* Lets parts move straight from and to a buffer, by hardware that has to know it. Returns 0 or -ENOMEM. */
int agent_buffer_shared(struct agent *agent, struct buffer *buffer);
/* With how many RDMA devices it is registered now. */
unsigned agent_buffer_regions(const struct agent *agent, const struct buffer *buffer);

/* -- What control/ asks for ---------------------------------------------------------------------------------------- */

/*
 * A trainer's place in a job, embedded in its session. From agent_join() on it belongs to the agent until exactly
 * one of ended(), left() or agent_abandon(); then it may join again. Callbacks may come before the call that causes
 * them returns; they must not call back into the agent for this job.
 */
struct agent_member {
	/*
	 * The job is complete. number: of this run; n_servers: that it uses, 0 if it needs none. ledger: a descriptor to be
	 * handed to the trainer, with which the job can be resumed, good until the call returns; or -1.
	 */
	void (*joined)(struct agent_member *member, uint64_t number, uint32_t n_servers,
		       int ledger);
	/*
	 * The job could not be formed (number 0), or is over. Its declarations are void. Requests have ended, or end with the
	 * same failure once nothing touches their memory.
	 */
	void (*ended)(struct agent_member *member, uint64_t number, const struct failure *failure);
	/* Answer to agent_leave(); what holds for declarations and requests in ended() holds here. */
	void (*departed)(struct agent_member *member);
	/* Answer to agent_regroup(): no, and the member goes on as before. Otherwise joined() or ended() is the answer. */
	void (*refused)(struct agent_member *member, const struct failure *failure);
	/*
	 * The member's job will be one that goes through servers, or not: takes the room for its ledger, in place of what was
	 * taken. Returns NULL, or why the trainer can take part in no restart: a constant.
	 */
	const char *(*charge)(struct agent_member *member, bool through_servers);
	/*
	 * The ledger takes so many bytes more than that: takes the room for them, in place of what was taken, or gives room back.
	 * Returns 0; or, where it is more, -EDQUOT.
	 */
	int (*charge_more)(struct agent_member *member, uint64_t bytes);
	/*
	 * No rank here has used the tensor for long, and there are many: agent_release() or agent_keep() follows, later.
	 * NULL: the trainer cannot be asked.
	 */
	void (*unused)(struct agent_declaration *declaration, const char *name);
	/*
	 * After agent_release(), exactly once unless the job ends before: the tensor is forgotten, and the declaration
	 * void; or some rank uses it.
	 */
	void (*released)(struct agent_declaration *declaration, bool forgotten);
	/* Of a member that follows: other ranks have begun a round that it has not come to. Perhaps once more, in any order. */
	void (*begun)(struct agent_member *member, const struct agent_begun *begun);
	/* Of one that is idle, too: all ranks of the job are in this turn; failure: they will not be. Perhaps once more. */
	void (*all_follow)(struct agent_member *member, uint64_t turn,
			   const struct failure *failure);
	/* Set before joining: the session's shared memory (proto/shm.h), kept by the caller while the member is in a job, or -1. */
	int shm_fd;
	struct account *account; /* likewise: who is charged for it, or NULL */
	/* The agent's. */
	struct agent_job *job;
	uint32_t rank, local_rank;
	struct process_seen process; /* when it joined */
	uint32_t index;		     /* local number in rank order, once the job runs */
	bool leaving;
	bool resumed;	    /* it had been in this run before */
	bool follows, idle; /* agent_follow() */
	uint64_t turn;	    /* likewise; 0: it has not said */
	struct list declarations;
	/* Of an elastic job. */
	bool regrouping;		 /* waits for the others */
	struct agent_newcomer *newcomer; /* waits to be let in: then it is in no job */
};

/* What all ranks of an elastic job on a node say alike, and newcomers are told. */
struct agent_terms {
	uint32_t min_servers, part_bytes, min_ranks, max_ranks;
	uint64_t request_timeout_ms, gpu_roots;
	unsigned gpu_reduce;
};

/* What a member is in its job now. */
struct agent_place {
	uint32_t membership; /* 0: the job is not elastic */
	uint32_t rank, size, local_rank, local_size, node, n_nodes;
	struct agent_terms terms;
};
struct agent_place agent_place(const struct agent_member *member);

/* Ranks that the job had in the membership with these low bits: entries of the counts that a request of then has. */
uint32_t agent_n_counts(const struct agent_member *member, uint16_t membership);

/* Of an elastic job: its members when a round ended, and who contributed. membership 0: nothing is known. */
struct agent_outcome {
	uint32_t membership, size, rank; /* rank: the submitter's */
	uint32_t n_came;		 /* ranks whose contribution is in the result */
	uint32_t n_waiting;		 /* newcomers that a regrouping would let in */
};

#define SECRET_DIGEST_LEN 32

struct agent_join {
	const char *job;
	const void *secret;
	size_t secret_len;
	uint32_t rank, size, local_rank, local_size, node, n_nodes;
	uint32_t min_servers, part_bytes;
	uint64_t timeout_ms, request_timeout_ms;
	bool force_distributed;
	unsigned gpu_reduce; /* enum gpu_reduce */
	uint64_t gpu_roots;  /* bits: local ranks */
	struct stragglers stragglers;
	const char *
		cannot_resume; /* why the trainer can take part in no restart; NULL: it can. Kept */
	bool elastic, newcomer;
	uint32_t min_ranks, max_ranks; /* of an elastic job; max 0: no bound */
	uint32_t pid;		       /* of its trainer */
	uint32_t uid;		       /* whose trainer it is */
	/* These two are made by agent_join_take(). Whose job it is: who has its secret or, without one, its user. */
	struct process_seen process;
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	struct account *account; /* who is charged for the job if it is new here, or NULL */
};

/*
 * Becomes a rank. Checks everything about the arguments, which come from outside as they are. Returns 0, and joined() or
 * ended() follows; or -errno with words, and the member stays outside: -EINVAL (impossible, or another rank of the job
 * said otherwise), -EACCES (secret), -EEXIST (rank taken), -EDQUOT, -ENOMEM, -ESHUTDOWN.
 */
int agent_join(struct agent *agent, struct agent_member *member, const struct agent_join *join,
	       struct failure *failure);
/*
 * The same for a rank that was in this run of the job before another daemon process ended. ledger: the descriptor that it
 * was given then, from outside; stays the caller's. Returns as agent_join() and ledger_open() do; joined() comes when
 * every rank that had not left is back, ended() with -ECONNRESET when one is not within resume_timeout_ms.
 */
int agent_resume(struct agent *agent, struct agent_member *member, const struct agent_join *join,
		 uint64_t number, int ledger, struct failure *failure);
/* Whether the member's job would go on with the next daemon process. */
bool agent_can_resume(const struct agent_member *member);
/* Bytes that a ledger takes when it is made, and that it may come to; 0: there is none. */
uint64_t agent_ledger_bytes(const struct agent *agent, bool through_servers, uint64_t *ret_most);
/*
 * Imports a buffer of a device into the worker of the member's job. Returns whether it will: then imported() comes, unless
 * the buffer is given up before; NULL: all is well. Else it is imported when it is used.
 */
bool agent_import(struct agent_member *member, struct buffer *buffer,
		  void (*imported)(void *buffer, const struct failure *why));
/*
 * Every member of an elastic job says so at the same place, with no operation under way: the job begins a new run with its
 * members and the newcomers that wait. joined() follows when all have, or are gone; what holds for declarations in ended()
 * holds then. Or refused(), or ended().
 */
void agent_regroup(struct agent_member *member);
/* Leaves in good order, before or after joined(): left() follows when the member's requests have ended. */
void agent_leave(struct agent_member *member);
/*
 * The trainer is gone: the job fails for everybody else ("rank 3 (pid 123) died"), or goes on without if it is elastic. No callback comes for the member after
 * it, but its requests in flight still end with done(). Harmless for a member of no job.
 */
void agent_abandon(struct agent_member *member, const char *how);

/* A member's declaration of a tensor. Void when the member is out of its job, or on its way to the next run of it: not to be used then. */
struct agent_declaration {
	/* Exactly once unless the job ends before: the key, or why the ranks do not agree. May come from agent_declare(). */
	void (*declared)(struct agent_declaration *declaration, const struct failure *failure,
			 uint64_t key, uint32_t part_bytes);
	/* The agent's. */
	struct agent_member *member;
	struct agent_tensor *tensor;
	uint64_t n_rounds;	    /* submitted through it */
	struct agent_round *newest; /* of those, which may have gone since; or NULL */
	bool answered;
	bool released; /* by agent_release() */
	bool is_new;   /* of a member that was resumed, without a past: its rounds count from 1 */
	struct list link;    /* the member's */
	struct list waiting; /* the tensor's */
};

static inline bool agent_is_void(const struct agent_declaration *declaration)
{
	return !declaration->tensor;
}

/* What a rank that was resumed had seen of a tensor's rounds. */
struct agent_past {
	uint64_t rounds; /* all up to this one had ended */
	uint64_t
		failed; /* bit n: round `rounds - n` failed; so did all that are older than its bits */
};

/* What a rank says of a tensor. */
struct agent_facts {
	const char *name;
	unsigned dtype;
	uint64_t elements; /* or ELEMENTS_VARIABLE */
	const char *shape; /* in words, as 2x3; NULL: whatever others say */
};

/*
 * past: of a member that was resumed, which declares what it had; or NULL. Returns 0 (then declared() follows), -EINVAL,
 * -EEXIST (by this member already), -EPROTO (a past without a resumed run), -EDQUOT or -ENOMEM with words.
 */
int agent_declare(struct agent_member *member, struct agent_declaration *declaration,
		  const struct agent_facts *facts, const struct agent_past *past,
		  struct failure *failure);

/*
 * Answers to unused(): the member has no use for the tensor, and does not submit any more through this declaration until
 * released(); or it has. The former returns 0, or -EBUSY: another rank has used it meanwhile, and no released() comes.
 */
int agent_release(struct agent_declaration *declaration);
void agent_keep(struct agent_declaration *declaration);

/* A round that ranks have begun, as one that follows them hears of it. */
struct agent_begun {
	const char *name; /* of the tensor; good until the call returns */
	unsigned dtype;
	uint64_t elements;
	uint64_t round;
	uint64_t first; /* rounds before this one, to which the member has not come, have failed */
	unsigned operation, reduction; /* operation 0: it has failed, and nobody knows any more */
};

/* What a member says of itself: agent_follow(). */
struct agent_follow {
	bool follows, idle;
	uint64_t turn; /* the first, 1, or the one after the last of which all_follow() has come */
};

/*
 * The member has come to the end of its own work, and takes part in what others begin; or does not any more. begun() comes for
 * each round that is open, or begins, and to which it has not come. idle: nothing of its own is under way; all_follow() comes once
 * that is so of all ranks of the job in the same turn. Returns 0;
 * -ENOTCONN; -EINVAL in a job whose ranks do not all wait for one another; -EOPNOTSUPP where a server is of an older version; -EPIPE
 * when a rank has left; with words.
 */
int agent_follow(struct agent_member *member, const struct agent_follow *how,
		 struct failure *failure);

/* One rank's submission of one round of a tensor. Belongs to the agent from agent_submit() until done(). */
struct agent_request {
	/* Set by the caller; from outside, but for the pointers, which are good for the counts or NULL. */
	uint64_t round;
	uint8_t operation, reduction;
	uint16_t
		membership; /* of an elastic job: low bits of that in which ranks are counted here; else 0 */
	union {
		uint32_t root;		/* broadcast */
		uint32_t waits_for_all; /* push_pull, accumulate: 1 */
	};
	int32_t priority;
	bool watched;	     /* false; the agent's */
	bool own_deadline;   /* the agent's, too */
	bool stalls;	     /* some buffer of the request does: tensor/tensor.h */
	uint8_t input_dtype; /* push_pull, reduce_scatter: input's, if not the tensor's; else 0 */
	const void *input;
	void *output;
	uint64_t input_count, output_count;
	const uint64_t
		*counts; /* NULL; or size entries, for all_to_all 2 * size: stays until done() */

	uint64_t timeout_ms;
	uint64_t deadline_ns; /* the agent's */
	union {
		/*
		 * push_pull_rows: elements of a row; input_count / width numbers, room for
		 * output_count / width.
		 */
		uint64_t width;
		/*
		 * Any other operation: its number among those that all ranks submit in one order,
		 * from 1; 0: none of them.
		 */
		uint64_t ordinal;
	};
	const int64_t *input_rows;
	int64_t *output_rows;
	/* The buffer that input or output is in, if it is a device's: kept until done(). */
	struct buffer *input_device, *output_device;
	const struct shm_slot *slot_memory; /* what done() writes, fetched before; or NULL */

	/* From here on it is looked at when it ends. */
	uint64_t *expanded; /* counts of a job that has lost ranks; NULL before agent_submit() */
	struct agent_round *in;
	uint64_t ticket;
	/* Exactly once; nobody touches the memory any more. failure: NULL if all is well. */
	void (*done)(struct agent_request *request, const struct failure *failure);
	uint64_t
		n_rows; /* in done(): rows of a push_pull_rows' result, also when there was no room for it (-ENOSPC); else contributions */
	uint32_t slot;	/* of a request on a device, whose flags order it */
	struct agent_outcome outcome; /* in done(), of an elastic job; zero before */

	/* The agent's. */
	uint32_t submitted_rank,
		submitted_size; /* rank and size where it was submitted: rank_map.c */
};
static_assert(!(offsetof(struct agent_request, expanded) % CACHE_LINE ||
		offsetof(struct agent_request, submitted_rank) % CACHE_LINE),
	      "what is fetched of a request begins with lines");

/*
 * Fetch what an agent_submit() of it that comes soon looks at, one after the other: each looks only at what the one before it has
 * fetched. The tensor; the round that another rank has begun; the requests of ranks that have come to it.
 */
void agent_fetch(const struct agent_declaration *declaration);
void agent_fetch_round(const struct agent_declaration *declaration);
void agent_fetch_requests(const struct agent_declaration *declaration);
/*
 * Submits. done() may come before it returns. invalid: what the door found wrong with this request already, or NULL: then
 * the round fails for all ranks with these words. A round that is not the declaration's next fails the job (-EPROTO); but
 * a member that was resumed may leave out rounds, which then had ended for it, and not well. now_ns: when it came.
 */
void agent_submit(struct agent_declaration *declaration, struct agent_request *request,
		  const struct failure *invalid, uint64_t now_ns);
/*
 * Of the rounds that a request for this one leaves out, which may be thousands, deals with a few. Returns whether that was all, so that
 * the request may be submitted; else it is to be called again, after what else there is to do.
 */
bool agent_leave_out(struct agent_declaration *declaration, uint64_t round, uint64_t now_ns);
/* Gives up a request that waits for other ranks; no effect once its data is moving. */
void agent_cancel(struct agent_request *request);
/*
 * The rank submits nothing before the request has ended, or (over) it may. Where another rank has not come to that round, and is
 * itself blocked in one to which this rank has not come, both fail with -EDEADLK. Said again while it is so. No effect for a request
 * with a timeout of its own.
 */
void agent_blocked(struct agent_request *request, bool over);

/* -- What operators ask for ----------------------------------------------------------------------------------------- */

struct agent_job_info {
	char name[64];
	uint64_t number;
	const char *state; /* "forming", "resuming", "running", "failed", "leaving" */
	uint32_t size, n_nodes, n_local;
	uint64_t rounds, bytes, in_flight;
	char waiting_for[160];
	const char *ends; /* why it ends with this daemon's process; NULL: it does not */
	char gpu[200]; /* how bytes go between GPUs here and servers, and why; "": there are none */
};
struct agent_tensor_info {
	char name[256];
	uint64_t key;
	unsigned dtype;
	uint64_t elements, rounds;
	char waiting_for[160];
	uint64_t spread_ns; /* between its first and its last rank here */
	char last[32];	    /* "rank 3, 97 %": that was last most often; "": there is but one */
};

struct agent_rank_info {
	uint32_t rank, node;
	char state[16]; /* "here", "joined" (on another node), "missing", "left" */
};

struct agent_server_info {
	char name[64], address[96];
	const char *state; /* "in", "lost" (in, and waited for), "out" */
	uint32_t share;	   /* of the job's bytes, thousandths */
	bool added;	   /* after the job began */
};

/* For admin; arrays to be freed. Return 0, -ENOENT (no such job), or -ENOMEM. */
int agent_jobs(struct agent *agent, struct agent_job_info **ret_jobs, size_t *ret_n);
/* Calls each() with all jobs that agent_jobs() tells of, in that order. */
void agent_each_job(const struct agent *agent,
		    void (*each)(void *user, const char *name, uint64_t number), void *user);
/* How often these have become others, since the start. */
uint64_t agent_n_changes(const struct agent *agent);
/* What agent_jobs() tells of the member's own, which it is in or waits for (state "waiting", and nothing else). Returns false in none. */
bool agent_member_job(const struct agent_member *member, struct agent_job_info *ret_info);
/* n_max of them at most, of *ret_total. */
int agent_tensors(struct agent *agent, const char *job, size_t n_max,
		  struct agent_tensor_info **ret_tensors, size_t *ret_n, uint64_t *ret_total);

int agent_ranks(struct agent *agent, const char *job, struct agent_rank_info **ret_ranks,
		size_t *ret_n);

/* Its servers; *ret_n is 0 where it needs none, or is not complete. As above. */
int agent_servers(struct agent *agent, const char *job, struct agent_server_info **ret_servers,
		  size_t *ret_n);

/* How the ranks here come to their rounds; *ret_n is 0 where there is but one. As above. */
int agent_arrivals(struct agent *agent, const char *job, struct arrivals_info **ret_arrivals,
		   size_t *ret_n);

/* Requests ended since the start, and those of them that failed. */
void agent_counters(const struct agent *agent, uint64_t *ret_n_requests, uint64_t *ret_n_failed);
