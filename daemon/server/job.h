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
 *	declare.c  DECLARE: tensors get their keys
 *	round.c	   PUSH: which contributions a part's round waits for, and when it fails
 *	store.c	   what is held: tensors, parts, slots
 *	engine.c   the sum, and the answers
 *	move.c	   the job goes on with other servers
 *	elastic.c  or without some ranks
 *	regroup.c  its ranks regroup: the next run
 *	heir.c	   which not all nodes may have heard of when its home died
 *	guest.c	   newcomers on other nodes than its own
 *	keep.c	   of a job that outlives its daemons' processes: what is held until every node has it
 *	rows.c	   the same for push_pull_rows
 *	quorum.c   rounds that go on without all
 *	accumulate.c  sums that are kept, and for which nobody waits
 *	sweep.c    what has happened to all of it
 *	told.c	   of a fresh job of these two kinds: whether all nodes have offered what they keep
 *	ordinal.c  operations that all ranks submit in one order: whether nodes' are the same
 */
#pragma once

#include "base/account.h"
#include "base/arrivals.h"
#include "base/bulk.h"
#include "base/error.h"
#include "base/list.h"
#include "base/map.h"
#include "base/metrics.h"
#include "base/ordinals.h"
#include "base/quota.h"
#include "server/message.h"
#include "server/ranks.h"
#include "server/server.h"
#include "server/sweep.h"

#define NODE_NONE UINT32_MAX
/* Jobs that are over and whose reason is still known. */
#define SERVER_OVER 64

struct over {
	uint64_t number; /* 0: unused */
	uint64_t owner
		[2]; /* who says so knows of the job's secret digest; of those that were not here */
	bool moved;  /* goes on with other servers, and may come back */
	struct failure failure;
};

struct server {
	struct server_params params;
	struct list jobs;
	struct map numbers; /* running jobs */
	struct job *found;  /* of them, the last that was looked up; or NULL */
	unsigned n_jobs;    /* forming or running */
	bool closed, draining;
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
	uint32_t acked, released,
		told; /* all up to this one: are kept there; are on every node; it knows that */
};

/* What a node offers a fresh server, before which no sum of a job with stragglers is made: told.c. */
struct offers {
	uint32_t attachment; /* the node's number of the attach that they belong to */
	uint64_t n, due;     /* that have come; that it has made, once it has said so */
	bool said, told;     /* it has said how many; all are here */
};

struct job_node {
	struct peer *peer; /* who speaks for it; NULL: nobody yet, or lost after it left */
	uint64_t instance;
	bool attached, left;
	bool out;		    /* of an elastic job: none of its ranks is in it */
	uint64_t lost_ns;	    /* when its peer was, which is waited for; 0: it was not */
	struct tensor *last_tensor; /* that it contributed to, or NULL */
	struct sent sent;
	struct offers offers;
	struct join *join;	  /* while forming: what it said last, */
	struct delivery *joining; /* and where the answer goes */
	struct delivery
		*waiting; /* of a job that runs: a JOIN without all of its ranks; rejoin.c */
	bool spoke;	  /* it has declared a tensor, contributed, ... */
	bool asked,
		idle; /* it was told that this process is about to end; and has said that it may */
};

/* A node that has no rank in the job, and newcomers who wait for the next run. */
struct guest {
	struct list link; /* job->guests, in the order in which they came */
	struct peer *peer;
	struct join *join;
	struct delivery *joining;
};

struct job {
	struct server *server;
	struct list link;
	struct map_entry entry; /* in server->numbers while running */
	enum job_state state;
	struct failure failure; /* once it is over */
	char name[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN]; /* whose it is */
	uint32_t user;
	uint64_t number; /* 0 while forming */
	bool home;
	uint32_t size, n_nodes;
	uint32_t n_left;
	uint32_t *node_of_rank; /* NODE_NONE while the rank is missing */
	struct job_node *nodes;
	uint64_t request_timeout_ms;
	struct loop_timer timer; /* for the earliest of all deadlines, or earlier */

	/* At the home. */
	uint32_t epoch, part_bytes;
	uint64_t view_digest;
	uint64_t join_timeout_ms, since_ns; /* of the first JOIN */
	uint32_t asked_part_bytes;
	struct map declared,
		named; /* struct declared by name, those that have one by key: declare.c */
	struct list declaring, declarations; /* under way; all */
	size_t n_declared;
	uint64_t next_key, next_start;
	struct ordinals ordinals; /* what nodes have said of theirs */

	/* What is held; see store.h. */
	struct map tensors;
	struct list open;		  /* slots that wait for contributions, oldest first */
	struct list summing;		  /* slots whose set is complete */
	struct list held;		  /* slots whose result is not all pulled; see rows.h */
	struct list spare, spare_rounds;  /* slots and rounds for reuse */
	struct map far_slots, far_rounds; /* behind STORE_NEAR others: store.c */
	struct bulk bulk; /* these, and tensors and their parts, for the job's life */
	size_t n_open, n_summing;
	struct list parts, all_tensors; /* all that there are */
	struct sweep sweep;
	struct quota *quota; /* contributions and results */
	uint64_t charged_parts;
	struct account *
		account; /* what it is made of besides: whose peer's JOIN or ATTACH came first; NULL: nobody's */
	uint64_t charged; /* to it, but for what is charged where it is */
	uint32_t n_attached;
	uint64_t attach_timeout_ms;
	struct stragglers stragglers; /* with any, each rank is a node */
	bool told;		  /* the offers of all nodes that have not left are here: told.c */
	struct list accumulators; /* accumulate.c */
	struct list late; /* slots whose result waits for those that were late; see quorum.h */
	bool resume;	  /* outlives its daemons' processes */
	bool fresh; /* it had begun before this process did, or goes on with other servers: move.c */
	uint32_t *moves; /* how often each server has gone and come; NULL: never */
	bool came_back;	 /* it had gone on without this server */
	/* Elastic: `moves` with ranks that are said to be gone, which no attach has said yet. */
	uint32_t *told_moves;
	size_t n_moves;
	/* Elastic: elastic.c. Behind the servers, `moves` says who is gone. */
	bool elastic;
	uint32_t min_ranks, max_ranks;
	uint32_t membership; /* at the home, of a run that began when ranks regrouped: its first */
	struct list guests;  /* at the home: struct guest */
	bool takes_guests;   /* it began with some */
	bool succeeded;	     /* the next run has its place among the server's jobs */
	uint32_t n_gone, n_out; /* ranks, and nodes without ranks, that are */
	uint64_t
		regroup_by_ns; /* when all must have said that they regroup; CLOCK_NEVER: none has */
	uint32_t own_number;   /* of this server among them */
	/* Servers that are not in its view; one-based, which of them this is; 0: none. */
	struct data_added_set added;
	uint32_t own_added;
	void *joined; /* at the home of a job with `resume`, and of one that regrouped: the answer to its JOINs, or NULL */
	size_t joined_len;
	uint64_t regroups;   /* number of the run before, whose ranks regrouped; 0: none */
	uint32_t data_epoch; /* data_moves_epoch() */
	uint64_t lost_timeout_ms;
	struct mail telling; /* is_telling: nodes what all of them have; keep.c */
	bool is_telling;
	struct list kept;      /* slots whose result not every node has; see keep.h */
	uint64_t attach_by_ns; /* when every node must have attached; CLOCK_NEVER: they have */

	uint64_t n_rounds, n_bytes; /* parts' rounds closed, bytes of their results */
	struct arrivals *arrivals;  /* of nodes, while it runs; NULL: there is but one */
};

struct job_params {
	const char *name;
	uint32_t size, n_nodes;
	struct account *account; /* charged for it; or NULL */
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
 * charge.c: the account of a peer: of where it is, whatever it calls itself; of our own process, the user's whose trainers it
 * speaks for. Held until account_put(). Returns 0, with NULL where nobody is charged; or -ENOMEM with failure filled.
 */
int charge_account(const struct server *server, const struct peer *peer, uint32_t user,
		   struct account **ret_account, struct failure *failure);
/* Until the job is freed. Returns 0, or -EDQUOT with failure filled. */
int job_charge(struct job *job, uint64_t amount, struct failure *failure);
/* For held_new(), bulk_take() and maps; NULL: nobody. */
static inline struct quota *job_memory(const struct job *job)
{
	return account_quota(job->account, ACCOUNT_MEMORY);
}
/* Words for these, and for other errors: those that say who has too much, where that is it. Returns r. */
int job_no_memory(const struct job *job, int r, struct failure *failure);

/* Why a job that is not here any more is over, or NULL. */
const struct failure *job_over(const struct server *server, uint64_t number);
/* The same of one that was not here, if who said so is of the job of this owner. */
const struct failure *job_over_heard(const struct server *server, uint64_t number,
				     const uint8_t *secret_digest);
/* A DATA_FAIL_JOB of such a one. */
void job_over_hear(struct server *server, const struct data_header *header,
		   const struct failure *failure);
void job_over_remember(struct server *server, uint64_t number, const struct failure *failure);
/* It has only gone to other servers, and may come back. */
void job_over_moved(struct server *server, uint64_t number);
/* Forgets that; false when it is over for good. */
bool job_over_return(struct server *server, uint64_t number);

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
/* The node that peer speaks for, or NODE_NONE. */
uint32_t job_node_of(const struct job *job, const struct peer *peer);
/* "ranks 2, 3 (node 1)". */
struct node_text {
	char text[192];
};
const char *job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text);

/* Calls and what else happens, each in its file. Any of them may end the job. */
void form_join(struct server *server, struct delivery *delivery);
void form_expired(struct job *job);
/* All nodes are here, and their joins kept: gives the job its number and placement, and answers. Returns 0 or -errno with words. */
int form_finish(struct job *job, struct failure *failure);
void regroup_expired(struct job *job);
/* regroup.c: a JOIN of a node whose ranks regroup; takes the join. May end the job. */
void regroup_join(struct server *server, struct join *join, struct delivery *delivery);
void form_lost(struct job *job, const struct peer *peer);
/* heir.c */
/* The run that has followed that of this number, or NULL. */
struct job *heir_of(struct server *server, uint64_t number);
/* A JOIN of a node that is to be in this run, as far as it knows: tells it. */
void heir_tell(struct job *heir, const struct join *join, struct delivery *delivery);
/* Whether a JOIN is of a node whose newcomers have been let into this run, without having heard of it: it is told. */
bool heir_tell_guest(struct job *heir, const struct join *join, struct delivery *delivery);
/* A node has attached: those of the run before that wait here are told. */
void heir_attached(struct job *heir);
/* guest.c */
/* A JOIN of a node whose newcomers are to be in the next run of a job; takes the join. */
void guest_join(struct server *server, struct join *join, struct delivery *delivery);
void guest_free(struct guest *guest);
/* Tells a node of the job how many newcomers wait at guests. */
void guest_tell(const struct job *job, struct peer *peer);
void guest_lost(struct job *job, const struct peer *peer);
/* They wait for the job in its place. */
void guest_go_on(struct job *job, struct job *old);
/* The job is over. */
void guest_end(struct job *job);
void attach_call(struct server *server, struct delivery *delivery);
/* Returns 0, or -EPROTO, -EACCES, -ENOTCONN with failure filled, unless peer may speak for the node. */
int attach_check(const struct job *job, const struct peer *peer, uint32_t node,
		 struct failure *failure);
int attach_new(struct server *server, uint64_t number, const struct attach *attach,
	       struct job **ret_job, struct failure *failure);
/* Why an attach does not fit the job that its number names, apart from its home; NULL when it does. */
const char *attach_differs(const struct job *job, const struct attach *attach);
/*
 * An attach that knows of other servers than the job here: the job is made anew, and *ret_job set. Returns 0; or -ESHUTDOWN and
 * other -errno with failure filled, when it is the attach that is behind, or does not fit.
 */
int move_attach(struct job **job, const struct attach *attach, struct peer *peer,
		struct failure *failure);
/* Whether what the header says belongs to the job as it is now. */
bool move_is_current(const struct job *job, const struct data_header *header);
/* A MOVE of a node. May end the job here. */
void move_notice(struct job *job, const struct peer *from, const struct data_header *header,
		 const void *payload);
/* Takes what an attach says of servers and ranks. Returns 0 or -ENOMEM. */
int move_begin(struct job *job, const struct attach *attach);
/* Tells one node, which has attached, of what this server knows, or is to be known. */
void move_tell_node(struct job *job, uint32_t node, const uint32_t *moves, size_t n);
/* Tells all nodes that are here but one of what this server knows, or is to be known. */
void move_tell(struct job *job, const struct peer *except, const uint32_t *moves, size_t n);
/* Of its `moves`, how many are about servers. */
size_t move_n_servers(const struct job *job);
/* Asks all nodes to go on without this server. Returns whether there is another. */
bool move_drain(struct job *job);
/* elastic.c */
/* Takes from job->moves who is gone: nodes without ranks are as if they had left. */
void elastic_begin(struct job *job);
/*
 * Asks the other nodes of an elastic job to go on without nodes that are lost, or have left. Returns false when the job is not
 * elastic, or no node would be left.
 */
bool elastic_without_lost(struct job *job, uint64_t now);
bool elastic_without_absent(struct job *job);
bool elastic_without_left(struct job *job);
bool elastic_without_late(struct job *job);
/* A node has left before it had attached: no round is to wait for it. */
void elastic_without_early(struct job *job);
/* The same with nodes that have not contributed in time. */
bool elastic_without_missing(struct job *job, const struct slot *slot);
/* What a node knows of ranks that are gone: others hear of it. May end the job. */
void elastic_notice(struct job *job, const struct peer *from, const uint32_t *moves);
/* A node that has attached hears what was said while it was away. */
void elastic_attached(struct job *job, uint32_t node);
/* Whether all ranks of a node are said to be gone. */
bool elastic_is_gone(const struct job *job, uint32_t node);
/* rejoin.c: a JOIN for a job that runs. Returns whether it is taken. */
bool rejoin(struct job *job, const struct join *join, struct delivery *delivery);
/* What waits of this node is answered. */
void rejoin_end(struct job_node *node, int status, const char *text);
/* leave.c. Any of them may end the job. */
void leave(struct job *job, uint32_t node);
/* No node will ask for anything: each has left, or has no rank in the job any more. */
bool leave_is_over(const struct job *job);
/* A node says so itself; the other nodes are told if it asks for that. */
void leave_call(struct job *job, uint32_t node, const struct data_header *header);
/* Another says so, of a node of which this process may know nothing else. node: as it came from outside. */
void leave_heard(struct job *job, uint64_t node);
/* A node has attached: it may not know who has left. */
void leave_attached(const struct job *job, uint32_t node);
/* All have left: nothing is to be said. */
void leave_end(struct job *job);
/* server_stop() for a job. */
size_t leave_stop(struct job *job);
void attach_lost(struct job *job, const struct peer *peer, const char *why);
void attach_expired(struct job *job);
/* When the first node that was lost is waited for no longer; CLOCK_NEVER: none was. */
uint64_t attach_lost_deadline(const struct job *job);
void attach_lost_expired(struct job *job, uint64_t now);
/* Has the timer expire then. Returns 0 or -ENOMEM. */
int attach_lost_wake(struct job *job);
/* Nodes that have joined, or will, have to attach within this time. Returns 0 or -ENOMEM. */
int attach_expect(struct job *job, uint64_t timeout_ms);
void declare_call(struct job *job, struct delivery *delivery);
/* For the sweep: one that is under way, when nodes may have left and time have passed; the job is over: the same, and any. */
void declare_visit(struct job *job, struct list *link, uint64_t now_ns);
void declare_end(struct job *job, struct list *link);
void declaration_end(struct job *job, struct list *link);
/* ordinal.c: what a node says of an operation that all ranks submit in one order. */
void ordinal_heard(struct job *job, uint32_t node, const struct data_header *header,
		   const void *payload);
/* Name of a tensor declared here, or NULL. */
const char *declare_name_of(const struct job *job, uint64_t key);

/*
 * Quotas outlive their jobs: a result may still be on its way to a node, held by transport/, when the job and even the
 * server are gone. So they are never freed but used again by a later job, once nothing is charged any more. Any thread.
 */
struct quota *job_quota_take(uint64_t limit);
void job_quota_give(struct quota *quota);
