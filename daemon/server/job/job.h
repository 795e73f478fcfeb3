/*
 * A job at this server. At its home it begins with the first JOIN (forming) and runs when every node has come; at the
 * other servers it begins with the first ATTACH and runs at once. It ends when a node dies or says so, when all nodes
 * have left, or when it asks for more than its quota; its number is then remembered for a while, so that what was under
 * way gets the reason. Control thread only.
 *
 *	charge.c   who is charged for what it is made of
 *	form.c	   JOIN: nodes come, disagree, are late; the job gets its number and placement
 *	attach.c   ATTACH; who speaks for which node
 *	leave.c	   LEAVE, and LEFT, which others say of a node
 *	declare.c  DECLARE: tensors get their keys; forget.c: and lose them
 *	round.c	   PUSH: which contributions a part's round waits for, and when it fails
 *	store.c	   what is held: tensors, parts, slots
 *	engine.c   the sum, and the answers
 *	move.c	   the job goes on with other servers
 *	elastic.c  or without some ranks
 *	regroup.c  its ranks regroup: the next run
 *	successor.c	   which not all nodes may have heard of when its home died
 *	joiner.c	   newcomers on other nodes than its own
 *	keep.c	   of a job that outlives its daemons' processes: what is held until every node has it
 *	rows.c	   the same for push_pull_rows
 *	quorum.c   rounds that go on without all
 *	accumulate.c  sums that are kept, and for which nobody waits
 *	sweep.c    what has happened to all of it
 *	offered.c	   of a fresh job of these two kinds: whether all nodes have offered what they keep
 *	ordinal.c  operations that all ranks submit in one order: whether nodes' are the same
 *	follow.c   ranks that follow the others
 *	peers.c	   who speaks for its nodes, and is lost
 */
#pragma once

#include "base/error.h"
#include "base/list.h"
#include "base/map.h"
#include "base/memory/account.h"
#include "base/memory/bulk.h"
#include "base/memory/spent.h"
#include "base/metrics.h"
#include "base/order/arrivals.h"
#include "base/quota.h"
#include "server/common/charge.h"
#include "server/common/job_quota.h"
#include "server/common/message.h"
#include "server/common/ranks.h"
#include "server/hooks.h"
#include "server/job/deadlock.h"
#include "server/job/declare.h"
#include "server/job/follow.h"
#include "server/job/ordinal.h"
#include "server/job/over.h"
#include "server/job/peers.h"
#include "server/job/relay.h"
#include "server/job/sweep.h"
#include "server/membership/attach.h"
#include "server/membership/form.h"
#include "server/membership/leave.h"
#include "server/membership/membership.h"
#include "server/membership/move.h"
#include "server/server.h"

#define NODE_NONE UINT32_MAX
struct server {
	struct server_params params;
	const struct server_hooks *hooks;
	struct list jobs;
	uint64_t n_changes; /* how often one has come, gone, or got its number */
	struct map numbers; /* running jobs */
	struct job *found;  /* of them, the last that was looked up; or NULL */
	unsigned n_jobs;    /* forming or running */
	bool closed, draining;
	struct list joins; /* that wait for those before them: form.c */
	struct chore join;
	struct list to_hear; /* jobs of which peers are lost: peers.c */
	struct chore hear;
	uint64_t n_walks; /* job_peers_walk() */
	uint64_t relieved_ns,
		looked_ns; /* when jobs last ended since their peer was crowded, when that was last looked at; 0: never */
	uint64_t
		weighed_ns; /* when all jobs were last weighed against the memory that is left; 0: never */
	struct over over[SERVER_OVER];	/* a ring */
	struct over heard[SERVER_OVER]; /* the same, of jobs that were not here */
	unsigned next_over, next_heard;
	struct metric bytes_summed, rounds, rounds_failed, late, carried, copied;
	struct arrivals_spread spread; /* of nodes */
};

enum job_state { JOB_FORMING, JOB_RUNNING, JOB_OVER };

struct slot;

/* The results that were sent to a node since it attached, by number: keep.c. */
struct sent {
	struct slot **slots; /* by number modulo capacity; NULL: all nodes have it */
	uint32_t capacity;   /* 0 or a power of two */
	uint32_t last;	     /* number of the newest */
	/* All up to this one: it has said that it keeps them; its slots know; are on every node; it knows that. */
	uint32_t said, acked, released, notified;
};

/* What a node offers a fresh server, before which no sum of a job with stragglers is made: offered.c. */
struct offers {
	uint32_t attachment; /* the node's number of the attach that they belong to */
	uint64_t n, due;     /* that have come; that it has made, once it has said so */
	bool said, complete; /* it has said how many; all are here */
};

struct job_node {
	struct peer *
		peer; /* who speaks for it: job_peer_set(); NULL: nobody yet, or lost, and heard of */
	uint64_t instance;
	bool attached, departed;
	bool out;		    /* of an elastic job: none of its ranks is in it */
	uint32_t n_alive;	    /* of an elastic job: its ranks that are not said to be gone */
	uint64_t lost_ns;	    /* when its peer was, which is waited for; 0: it was not */
	struct tensor *last_tensor; /* that it contributed to, or NULL */
	struct list rows; /* what it has brought to rounds of rows that are here: rows.h */
	struct sent sent;
	struct offers offers;
	struct join *join;	  /* while forming: what it said last, */
	struct delivery *joining; /* and where the answer goes */
	struct delivery
		*waiting; /* of a job that runs: a JOIN without all of its ranks; rejoin.c */
	uint32_t n_early; /* of job->names.early */
	bool spoke;	  /* it has declared a tensor, contributed, ... */
	bool to_ask;	  /* it has attached, and hears of what is being forgotten: forget.c */
	bool named;	  /* it has told this home, which is fresh, its tensors: forget.c */
	struct node_following following; /* at the home: what it has said of its ranks */
	bool asked,
		idle; /* it was told that this process is about to end; and has said that it may */
};

static inline void job_node_init(struct job_node *node)
{
	*node = (struct job_node){ 0 };
	list_init(&node->rows);
}

/* Whose a job is: names of different owners are apart. */
struct owner {
	char name[JOB_NAME_MAX + 1]; /* of the job */
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint32_t user;
};

/* What is held; see store.h. */
struct store {
	struct map tensors;
	struct list open;    /* slots that wait for contributions, oldest first */
	struct list summing; /* slots whose set is complete */
	struct list held;    /* slots whose result is not all pulled; see rows.h */
	struct list kept;    /* slots whose result not every node has; see keep.h */
	struct list late;    /* slots whose result waits for those that were late; see quorum.h */
	struct list accumulators;				     /* accumulate.c */
	struct list spare, spare_rounds, spare_parts, spare_tensors; /* slots and so on for reuse */
	struct map far_slots, far_rounds; /* behind STORE_NEAR others: store.c */
	struct bulk bulk; /* these, accumulators, tensors and their parts, for the job's life */
	size_t n_open, n_summing;
	struct list parts, all_tensors, forgotten; /* all there are; those go with their rounds */
	struct list
		mentioned; /* tensors that are not in use, as far as is known here, oldest first */
	size_t n_mentioned;
	/* By and by: forgotten tensors whose parts go, rounds whose slots fail. */
	struct list dropping, failing;
	struct chore drop, fail;
	struct spending spending; /* by and by, too: lists of rows that nobody needs any more */
};

/* Of a job that outlives its daemons' processes: keep.c, offered.c. */
struct retention {
	bool resume; /* the job is such a job */
	enum {
		OFFERS_AWAITED,
		OFFERS_COMBINING, /* those of all nodes that have not left are here */
		OFFERS_COMBINED,
	} offers;
	struct chore combining;	   /* puts the offers together, part by part */
	struct list *combining_at; /* of store.parts: the part that this chore comes to next */
	struct mail telling;	   /* is_telling: nodes what all of them have */
	bool is_telling;
	struct chore acking; /* slots hear of what nodes have said that they keep */
};

struct job {
	struct server *server;
	struct list link;
	struct map_entry entry; /* in server->numbers while running */
	enum job_state state;
	struct failure failure; /* once the job is over */
	struct owner owner;
	uint64_t number; /* 0 while forming */
	bool home;
	uint32_t size, n_nodes;
	uint32_t n_departed;
	uint32_t *node_of_rank; /* NODE_NONE while the rank is missing */
	struct job_node *nodes;
	struct map peers; /* who speaks for them: struct job_peer */
	struct list to_hear;
	uint64_t request_timeout_ms;
	struct loop_timer timer;      /* for the earliest of all deadlines, or earlier */
	struct stragglers stragglers; /* with any, each rank is a node */

	struct forming forming;
	struct names names;
	struct ordinals ordinals; /* what nodes have said of theirs: ordinal.c */
	struct relays relays;
	struct deadlock_told deadlock_told;
	struct job_following following; /* at the home */

	struct store store;
	struct sweep sweep;
	struct memory memory;
	struct attachment attachment;
	struct retention retention;
	struct placement placement;
	struct membership membership;

	uint64_t n_rounds, n_bytes; /* parts' rounds closed, bytes of their results */
	struct arrivals *arrivals;  /* of nodes, while the job runs; NULL: there is but one */
};

struct job_params {
	const char *name;
	uint32_t size, n_nodes;
	struct account *account; /* charged for it; or NULL */
	bool takes_place; /* of another run among max_jobs, which has given up its own: then it has none itself */
};

/* A job without nodes, in forming state. Returns 0, -EDQUOT, -ENOMEM; failure filled. */
int job_new(struct server *server, const struct job_params *params, struct job **ret_job,
	    struct failure *failure);
/* The run that follows it, here soon, takes its place among max_jobs. Returns false when another has. */
bool job_yield(struct job *job);
/* It does not follow after all. */
void job_take_back(struct job *job);
/* Only for one that never ran; the others end. */
struct job *job_free(struct job *job);
DEFINE_CLEANUP(struct job *, job_free)
/* Gives it its number: it runs. Returns 0 or -ENOMEM. */
int job_start(struct job *job, uint64_t number);
struct job *job_find(struct server *server, uint64_t number);

/*
 * Ends it: all that is held is answered with the failure, and every node but the one spoken for by except is told. The
 * job may be gone afterwards.
 */
void job_fail(struct job *job, const struct failure *failure, const struct peer *except);
/* The same, telling nobody. */
void job_end(struct job *job, const struct failure *failure);
/* The job ends: nobody finds it from here on, but the reason. job_dismiss() follows. */
void job_close(struct job *job, const struct failure *failure);
/* Its number is free again, nothing can come to it, and nobody is told: job_dismiss() follows. */
void job_retire(struct job *job, const struct failure *failure);
/* Answers all that is held with the failure. The job may be gone afterwards. */
void job_dismiss(struct job *job);
/* Frees an ended job that no sum needs any more. */
void job_release(struct job *job);
/* As if a sum were under way: the job stays, also when it ends, until it is let go. */
void job_hold(struct job *job);
void job_let_go(struct job *job);
/*
 * Gives the pool a task that has run, done, cost and away: one that may stall, or is not so little that it is done at once. Returns
 * whether it did; else the caller does it.
 */
bool job_post(struct job *job, struct task *task);

/* For held_new(), bulk_take() and maps; NULL: nobody. */
static inline struct quota *job_memory(const struct job *job)
{
	return account_quota(job->memory.account, ACCOUNT_MEMORY);
}
/* Words for these, and for other errors: those that say who has too much, where that is it. Returns r. */
int job_no_memory(const struct job *job, int r, struct failure *failure);

/* "60", "0.25": seconds of a timeout, for texts. */
struct seconds_text {
	char text[24];
};
const char *job_seconds_text(uint64_t ms, struct seconds_text *ret_text);

/* Makes its timer expire at at_ns at the latest. Returns 0 or -ENOMEM. */
int job_wake_by(struct job *job, uint64_t at_ns);
/* By the soonest of its deadlines. Without memory the job ends. */
void job_wake(struct job *job);
/*
 * How long a node may keep the others waiting: beyond the job's request timeout, since an agent that waits for a local rank gives
 * up first, and drops it or says which it was, where this server could only name all ranks of the node.
 */
uint64_t job_patience_ns(const struct job *job);

/* Whether it is the job that its owner calls by this name. */
bool job_is(const struct job *job, const char *name, const uint8_t *secret_digest);
/* "ranks 2, 3 (node 1)". */
struct node_text {
	char text[192];
};
const char *job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text);
