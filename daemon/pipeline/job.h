/*
 * Jobs of this node and their tensors. Private to pipeline/.
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

#include "base/arrivals.h"
#include "base/bulk.h"
#include "base/clock.h"
#include "base/loop.h"
#include "base/map.h"
#include "base/metrics.h"
#include "base/ordinals.h"
#include "ledger/ledger.h"
#include "pipeline/level.h"
#include "pipeline/pipeline.h"
#include "proto/data.h"

/* Parts begin aligned for vector units, and hold whole elements of every type. */
#define PART_ALIGN 64u

/* The home server's own answers come at the deadline or a moment after; only then does an agent give up by itself. */
#define SERVER_GRACE_NS (3 * NSEC_PER_SEC)

enum pipeline_job_state { JOB_FORMING, JOB_RUNNING, JOB_OVER };

struct pipeline {
	struct pipeline_params params;
	struct list jobs;      /* not yet freed, in the order in which they began */
	struct list outlets;   /* queues towards servers: outlet.c */
	struct mail reap;      /* frees jobs that are over, when nobody up the stack uses them */
	struct list newcomers; /* wait for an elastic job to let them in: regroup.c */
	struct list seeks;     /* jobs on other nodes that they are for: seek.c */
	struct loop_timer newcomers_timer;
	bool reaping, closed;
	uint64_t n_rounds_started; /* orders rounds of equal priority */
	struct metric requests, failed, bytes, parts, parts_done;
	struct metric copied, copied_rows; /* of parts; in the pool, by rows */
	struct arrivals_spread spread;	   /* of ranks of one node */
};

/* What all ranks of a job must say alike. */
struct pipeline_shape {
	uint32_t size, local_size, node, n_nodes, min_servers, part_bytes;
	uint64_t request_timeout_ms;
	bool force_distributed;
	unsigned gpu_reduce;
	uint64_t gpu_roots;
	struct stragglers stragglers;
	bool elastic;
	uint32_t min_ranks, max_ranks;
};

/* Stripes that were dealt. */
struct pipeline_stripes {
	struct list link;
	uint16_t *stripes;
};

/* A round that failed, which servers are told again when they have attached anew. */
struct pipeline_failed {
	uint64_t key, round;
	bool alone; /* struct pipeline_round */
	struct failure failure;
};
#define PIPELINE_FAILED 32

struct pipeline_server {
	struct view_member member;
	bool colocated;			/* with ranks of the job */
	struct pipeline_outlet *outlet; /* NULL: there is no connection */
	bool attached;
	bool scales; /* has DATA_FEATURE_SCALES */

	/* Of a job that outlives its daemons' processes: keep.c. */
	struct pipeline_job *job;
	uint64_t attachment; /* how often it has attached, or was given up */
	bool gone;	     /* its connection was lost, and it has not attached since */
	bool stopping;	     /* its process ends when it hears that nothing is under way here */
	uint64_t
		return_ns; /* while the job goes on without it: how long until it is looked for again */
	uint64_t lost_ns;  /* since when it is lost; 0: it is not */
	unsigned n_losses; /* since losses_ns: one that is lost again and again is given up */
	uint64_t losses_ns;
	struct loop_timer timer; /* when to connect again */
	struct list parked;	 /* parts for it, while it is not attached */
	uint32_t acked,
		ack_sent;    /* its results up to this number are kept here; it has been told */
	uint32_t ack_wanted; /* up to this one it is to be told at once */
	uint32_t released;   /* up to this number they are on every node */
	uint64_t ack_bytes;  /* of results that it has not been told of */
	uint64_t n_offered;  /* since it has attached; and cells that are still to be: roll.c */
	uint32_t n_pending;
	uint64_t *here;	 /* window of numbers behind `acked`: bit set: kept here */
	uint32_t *cells; /* by number modulo the window: cell + 1, or 0 */
};

struct pipeline_job {
	struct pipeline *pipeline;
	struct list link;
	char name[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN]; /* whose it is: struct pipeline_join */
	uint32_t uid;				  /* who began it here */
	struct account *
		account; /* of the user whose rank came first, or NULL; charged with what is held, */
	struct quota held;   /* which is this */
	uint64_t held_ranks; /* of that: what grows with ranks */
	bool counted;	     /* as one of its jobs */
	struct pipeline_shape shape;
	enum pipeline_job_state state;
	bool distributed;    /* goes through servers */
	struct failure over; /* why, once OVER; status 0: left in good order */
	uint64_t
		over_number; /* what members are told of: its number, or 0 where it had not begun */
	uint32_t n_dismissed; /* of its places, those that have been looked at since */
	struct failure
		has_left; /* status not 0: a rank has left, nothing can be submitted any more */

	struct pipeline_member **
		members; /* local_size entries; FORMING: by local rank, then by layout's local number */
	uint32_t n_members;
	uint32_t n_leaving;
	uint8_t *left; /* by local number: this rank has left */
	bool unsaid;   /* all have, and no server was there to be told */
	/* Elastic: elastic.c. Inside, ranks keep their numbers while the run lasts; members count those that are in it. */
	uint32_t membership, first_membership; /* now; when the run began */
	uint32_t *out; /* by rank: the membership from which on it is not in the job; 0: it is */
	uint32_t n_out, n_regrouping;
	bool goes;	   /* is over here, and goes on elsewhere */
	uint32_t n_guests; /* newcomers on nodes that have no rank in it, as its home says */
	bool regrouped;	   /* began when the ranks of a run through servers regrouped */
	uint8_t *
		gone; /* by local number: dead, or left; over servers it is not out before they know */
	size_t n_gone;		/* of these, how many are not out */
	uint64_t regroup_by_ns; /* CLOCK_NEVER: nobody has asked */
	struct layout layout;	/* once RUNNING, or joined at the home server */

	uint64_t number;   /* of this run */
	uint64_t instance; /* random: of this node's run */
	uint32_t part_bytes;
	uint64_t request_timeout_ns;
	uint64_t formed_by_ns;	     /* FORMING: deadline */
	uint64_t forming_timeout_ns; /* that deadline as it was given, for words */

	/* A job that can be resumed, by this daemon process or the next: resume.c. */
	const char *ends; /* why it cannot outlive this process, as far as is known; NULL: it can */
	bool resumed;	  /* continues a run that another daemon process began */
	uint64_t resume_began_ns;
	struct list behind;    /* tensors of which some rank may be: pipeline_resume_caught_up() */
	bool suspended;	       /* is left to the next daemon process as it is */
	struct ledger *ledger; /* or NULL */
	int ledger_fd;	       /* until all ranks that need it have it, or -1 */
	uint32_t n_left;       /* ranks that had left before it was resumed */

	struct pipeline_device *device; /* once memory of a device was used, or NULL */
	/* The same for one that goes through servers: keep.c. */
	bool keep;			/* outlives its daemons' processes */
	uint32_t *node_of_rank;		/* from the ledger, when resumed */
	size_t home_number;		/* of its home among its servers */
	struct list starved;		/* parts whose result waits for a cell */
	bool feeding;			/* starved parts are gone through, or not to be */
	struct list lent, spare_lent;	/* cells, to servers in this process: lend.c */
	struct loop_timer room_timer;	/* whether cells are not needed any more: room.c */
	uint32_t room_target;		/* so many cells are to stay */
	struct pipeline_failed *failed; /* a ring of PIPELINE_FAILED, or NULL */
	size_t n_failed;		/* ever */
	/* Which servers it goes on with: move.c. */
	uint32_t *
		moves; /* how often each has gone and come; elastic: then, by rank, who is out; NULL unless keep */
	struct data_added_set added; /* servers behind the view's */
	struct loop_timer add_timer; /* when it is looked for more: add.c */
	uint64_t add_ns;	     /* for how long it was waited, the last time */
	size_t add_from; /* member of the newest view with which it begins: others were asked */
	uint32_t *moved_before;	 /* the run before: `moves` when its ranks regrouped; or NULL */
	uint32_t data_epoch;	 /* of what is said about data */
	uint64_t n_moved;	 /* how often this node has gone over */
	uint16_t *first_stripes; /* as the home has dealt them */
	struct list placements;	 /* those after them */
	struct mail ack_mail;	 /* tells servers what is kept */
	bool acking;

	struct map tensors; /* by name */
	uint64_t n_tensors, n_keys;
	struct list rounds; /* open, in no order */
	size_t n_open_rounds;
	size_t n_busy;	     /* of them, those that are READY or MOVING */
	uint32_t *n_pending; /* by local number: open requests */
	bool leave_due;	     /* members that leave are looked at: one may have none */
	/* sweep.c */
	struct chore sweep;
	bool sweeping;
	size_t n_to_sweep;	/* rounds that it has yet to come to */
	size_t n_vain;		/* at which it has looked */
	uint64_t next_ns;	/* the soonest deadline that it has seen */
	uint64_t not_before_ns; /* it does not begin for a deadline */
	struct failure leaves;	/* status not 0: the first that left, and what rounds fail with */
	struct failure **
		without; /* by local number, or NULL: why the sweep takes the rank out of rounds; */
	uint32_t n_without; /* there are so many */
	bool tells_idle;    /* servers that stop, when nothing is under way */
	/* Rounds that move through servers: deal.c. */
	struct list dealt;
	struct pipeline_round *uncut;	/* the first with parts to be made, or NULL */
	uint64_t unsent, unsent_before; /* bytes: of all rounds; of those before it */
	bool dealing;
	uint64_t n_leveled,
		n_level_rounds; /* tensors, and rounds since levels were made: level.c */
	bool levels_stale;
	int32_t urgent_priority; /* the largest */
	uint64_t n_urgent,
		n_urgent_rounds; /* tensors that have it and come, 0: not known; that came in this pass */
	uint32_t n_passes;	 /* that are over */
	bool pass_is_counted; /* the last one was, as all of n_urgent had come, and none has come since */
	struct list spare_rounds, spare_parts;
	struct bulk bulk;	 /* rounds, parts and tensors, for the job's life */
	struct quota rows_quota; /* what its push_pull_rows hold */
	struct loop_timer timer;
	unsigned holds; /* calls and parts in flight, and 1 until OVER; at 0 it is reaped */

	/* Distributed. */
	struct cluster_query query;
	bool querying, opened; /* asked for a view; was given one and owes a close */
	struct view *view;
	struct peer *home;
	struct pipeline_setup *join; /* the newest, or to regroup; earlier ones do not count */
	struct list setups;	     /* set-up calls in flight */
	struct pipeline_server *servers;
	size_t n_servers, n_attached;
	size_t n_viewed;	  /* of them, those of the view; added ones follow */
	uint32_t *member_of_node; /* n_nodes: member of the view, from 1; 0: none */
	bool *left_nodes;	  /* n_nodes: others that have left in good order: left.c */
	uint16_t *stripes;
	size_t n_stripes;
	void *joined; /* of a run that began when ranks regrouped: JobJoined, which servers are told; or NULL */
	size_t joined_len;

	/* Operations that all ranks submit in one order: ordinal.c. */
	struct ordinals ordinals;
	struct loop_timer ordinal_timer; /* over servers, while one waits */
	uint64_t ordinal_seen;		 /* the oldest that waited at the last look; 0: none did */
	unsigned ordinal_looks;		 /* that have seen it since the first */

	uint64_t n_rounds, n_bytes, n_in_flight; /* for operators */
	struct arrivals *arrivals; /* of the local ranks, by local number; NULL: there is but one */
};

/* A tensor of a job, from its first local declaration to the job's end. */
struct pipeline_tensor {
	struct map_entry entry;
	struct pipeline_job *job;
	/* What each round looks at stands together: there may be thousands of tensors, each of which has its turn once in a step. */
	unsigned dtype;
	bool advancing;
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
	struct list waiting; /* declarations not yet answered */
	uint64_t rows_had;   /* newest push_pull_rows that no server need hold; 0: none */
	uint64_t spread_ns;  /* between its first and its last rank, averaged */
	uint64_t *n_last;    /* by local number: rounds to which this rank came last */
	/* Resumed: what each local rank had seen before, or NULL when nobody had seen any round end. */
	struct pipeline_past *pasts;
	struct list behind; /* job->behind */
	uint64_t reached
		[]; /* by local number: rounds that this rank has submitted, in the past too; then n_last, declared */
};
static_assert(offsetof(struct pipeline_tensor, failure.text) <= 2 * CACHE_LINE &&
		      !(offsetof(struct pipeline_tensor, name) % CACHE_LINE),
	      "what each round looks at of a tensor is two lines, and its name");

/* job.c */
void pipeline_job_hold(struct pipeline_job *job);
void pipeline_job_release(struct pipeline_job *job);
/* Words for what held_new() and bulk_take() of the job have left in errno. Returns -error. */
int pipeline_job_no_memory(const struct pipeline_job *job, int error, struct failure *failure);
/* Ends a job for all its members. Tells the servers, but for `from`, which is who told us (or is lost), or NULL. */
void pipeline_job_fail(struct pipeline_job *job, const struct failure *failure,
		       const struct peer *from);
/* The home server has put the job together, and every server knows it (or none is needed). */
void pipeline_job_formed(struct pipeline_job *job);
/* All ranks here have left: says so, once a server is there to hear it, and the job is over here. */
void pipeline_job_end_left(struct pipeline_job *job);
/* Members that leave do so once their requests have ended. */
void pipeline_job_let_leave(struct pipeline_job *job);
/* sweep.c */
/*
 * Something has happened to the job that rounds end by: it is over, a rank has left it, a tensor of it has failed, time has
 * passed. Each open round is brought in line with that, once from now on, in steps in later turns of the loop; the job is
 * held meanwhile. Members of a job that has failed are told first, one in a step. A round that the sweep has not come to goes on as before: between what has happened and that nothing new
 * is submitted to a job that is over or left, and a round of a job that is over does not end well.
 */
void pipeline_sweep(struct pipeline_job *job);
/* All of it now: nobody else is served any more. */
void pipeline_sweep_finish(struct pipeline_job *job);

/* Arms the timer for a deadline, unless it is armed for an earlier one. */
void pipeline_job_watch(struct pipeline_job *job, uint64_t deadline_ns);
struct pipeline_job *pipeline_job_free(struct pipeline_job *job);
/* A job without members, FORMING. Returns 0 or -errno. */
int pipeline_job_make(struct pipeline *pipeline, const struct pipeline_join *join,
		      struct pipeline_job **ret_job);
/* The same within what this daemon may have. Returns 0 or -errno with words. */
int pipeline_job_new(struct pipeline *pipeline, const struct pipeline_join *join,
		     struct pipeline_job **ret_job, struct failure *failure);
/* Of a job that has failed: a member is told, and in it no more. Returns false when there is none. For the sweep. */
bool pipeline_job_dismiss(struct pipeline_job *job);
/* It is over, and nobody is told: whoever calls has seen to that. */
void pipeline_job_over(struct pipeline_job *job);
/* The member is in no job any more. */
void pipeline_job_detach(struct pipeline_member *member);
/*
 * The job that its owner calls by this name now, or NULL: names of different owners are apart. One that a rank has left does
 * not come back, but its name does. Of a job whose ranks are nodes of their own, that of the join's rank.
 */
struct pipeline_job *pipeline_job_find(struct pipeline *pipeline, const struct pipeline_join *join);
/* Takes a member in, for whom the job is to be formed within timeout_ns. */
void pipeline_job_add(struct pipeline_job *job, struct pipeline_member *member,
		      const struct pipeline_join *join, uint64_t timeout_ns);
/* Forms a job that is all on this node, if all its ranks are there. */
void pipeline_job_form_here(struct pipeline_job *job);
/* What a rank says, with defaults in their place, checked against the rules. As pipeline_join(). */
int pipeline_join_take(const struct pipeline *pipeline, const struct pipeline_join *given,
		       struct pipeline_join *ret_join, struct failure *failure);
/* Makes room for members by local number. Returns 0, -EPROTO (layout and members disagree) or -ENOMEM. */
int pipeline_job_order_members(struct pipeline_job *job);

/* join.c: what a rank says when it joins, against the rules and against the others. */
int pipeline_join_check(const struct pipeline_join *join, struct failure *failure);
int pipeline_join_compare(const struct pipeline_job *job, const struct pipeline_join *join,
			  struct failure *failure);
/* Fills in join->secret_digest. Returns 0 or -ENOMEM. */
int pipeline_join_digest(struct pipeline_join *join);

/* ordinal.c: operations that all ranks submit in one order. */
void pipeline_ordinal_done(struct pipeline_job *job);
/* A server says that an operation waits at another node, or (how) that ranks differ. */
void pipeline_ordinal_heard(struct pipeline_job *job, const struct data_header *header,
			    const void *payload, const struct failure *how);

/* room.c: what results take in the ledger. */
void pipeline_room_init(struct pipeline_job *job);
void pipeline_room_done(struct pipeline_job *job);
/* The job runs: what it has from before a restart is given back where it is not needed. */
void pipeline_room_formed(struct pipeline_job *job);
/* A rank comes back to a job whose ledger may have more than its session is charged for: 0, or -EDQUOT with words. */
int pipeline_room_join(struct pipeline_job *job, struct pipeline_member *member,
		       struct failure *failure);
/* So many results are to have room at once, of those there may ever be: 0, or -EDQUOT. */
int pipeline_room_for(struct pipeline_job *job, uint32_t n);
/* Makes more room when it becomes scarce: 0, or -EDQUOT. */
int pipeline_room_look(struct pipeline_job *job);

/* lend.c: nothing that was lent is in use any more. */
void pipeline_lend_done(struct pipeline_job *job);

/* keep.c: a job that goes through servers outlives their processes, and this one. */
struct pipeline_part;
/* A server of the job has its place: memory for what is kept. Returns 0 or -ENOMEM. */
int pipeline_keep_init(struct pipeline_job *job, size_t server);
void pipeline_keep_done(struct pipeline_job *job);
/* A server's peer is lost, or it does not answer as it should: parts wait, and it is connected again. */
void pipeline_keep_lost(struct pipeline_job *job, size_t server, const char *why);
/* Its words are that it stops, or knows of other servers than we: it is attached again in a moment. */
void pipeline_keep_again(struct pipeline_job *job, size_t server);
/* The same for each of the job's servers that this peer is. */
void pipeline_keep_peer_lost(struct pipeline_job *job, const struct peer *peer, const char *why);
/* A server has taken the job, perhaps again. fresh: it has not seen the job's beginning. */
void pipeline_keep_attached(struct pipeline_job *job, size_t server, bool fresh);
/* Whether a call ended because the peer was lost, or is about to go: not by an answer of the job's. */
bool pipeline_keep_is_loss(const struct call *call);
/* A part waits until its server is attached. */
void pipeline_keep_park(struct pipeline_part *part);
/* A result of len bytes is kept in this cell. Or need not be: LEDGER_NO_CELL. */
void pipeline_keep_stored(struct pipeline_server *server, uint32_t number, uint32_t cell,
			  uint32_t len, bool soon);
/* A result that the server does not know to be kept here. */
void pipeline_keep_offer(struct pipeline_job *job, uint32_t cell);
/* A server says that these are on every node. */
void pipeline_keep_released(struct pipeline_server *server, uint32_t number);
/* Rounds of the tensor up to this one are over on every local rank. */
void pipeline_keep_settle(struct pipeline_tensor *tensor, uint64_t round);

/*
 * roll.c: of a job that does not wait for all, whose contributions are in a result; what of ours is in none is kept, and so is the
 * last of sums that accumulate.
 */
/* Bytes of a cell of the ledger. */
uint32_t pipeline_roll_cell_bytes(const struct pipeline_job *job);
/* Bytes of a part's result as it comes, is kept and offered. */
uint32_t pipeline_roll_result_len(const struct pipeline_job *job, unsigned operation, uint32_t len);
/* How many contributions are in it, if it says so, from its bytes; and whether ours is. */
bool pipeline_roll_read(const struct pipeline_job *job, const struct ledger_what *what,
			const void *result, uint32_t *ret_n, bool *ret_has_ours);
/* A cell is whole, and in all outputs: others of the part, from before, are perhaps of no use any more. */
void pipeline_roll_stored(struct pipeline_job *job, uint32_t cell);
/* A server has attached: what it is to be offered of cells that are not ready yet; and this one is offered now, or gone. */
void pipeline_roll_attached(struct pipeline_job *job, size_t server);
void pipeline_roll_resolve(struct pipeline_job *job, uint32_t cell);
/* A part waits for a cell: when there will never be one, its round fails. */
bool pipeline_roll_is_full(const struct pipeline_job *job);
/* Whose a cell's result is now. */
struct pipeline_server *pipeline_keep_owner(const struct pipeline_job *job,
					    const struct ledger_kept *kept);
/* There may be cells for those that wait, until one gets none. */
void pipeline_keep_feed(struct pipeline_job *job);
/* The cell is of no use any more. */
void pipeline_keep_free(struct pipeline_job *job, uint32_t cell);

/* Its parts wait; nothing that it answers from now on counts. */
void pipeline_keep_detach(struct pipeline_job *job, size_t server);
void pipeline_keep_detach_all(struct pipeline_job *job);
/* A round has failed: to be said again. */
void pipeline_keep_failed(struct pipeline_job *job, uint64_t key, uint64_t round, bool alone,
			  const struct failure *failure);

/* move.c: a job goes on with other servers. */
int pipeline_move_init(struct pipeline_job *job);
void pipeline_move_done(struct pipeline_job *job);
bool pipeline_move_is_in(const struct pipeline_job *job, size_t server);
/* Whether the cluster has no such member any more: its lease is over, or it has left. */
bool pipeline_move_is_dropped(const struct pipeline_job *job, size_t server);
/* Entries of job->moves: the view's servers, and ranks. */
size_t pipeline_move_n(const struct pipeline_job *job);
/* Tells all servers, as this node attaches nowhere any more. */
void pipeline_move_tell_all(struct pipeline_job *job);
size_t pipeline_move_n_in(const struct pipeline_job *job);
/* A server's number, the same on all nodes that know the same. */
uint32_t pipeline_move_number(const struct pipeline_job *job, size_t server);
/* What is said of its servers: who is in, and who was added. */
struct pipeline_said {
	struct data_added_set added;
	uint32_t moves[]; /* pipeline_move_n() entries */
};
/* What the job knows, to be freed; or NULL. */
struct pipeline_said *pipeline_move_said(const struct pipeline_job *job);
/* How often this server has gone and come, by what is said. */
uint32_t *pipeline_move_count(const struct pipeline_job *job, struct pipeline_said *said,
			      size_t server);
/* The job's home among the servers that are in by it. Returns 0 or -ENOMEM. */
int pipeline_move_home(const struct pipeline_job *job, const struct pipeline_said *said,
		       size_t *ret_server);
/* What somebody knows of it; n: entries, from outside. */
void pipeline_move_unite(struct pipeline_job *job, const uint32_t *moves, size_t n,
			 const char *why);
/* The same, of all. */
void pipeline_move_take(struct pipeline_job *job, const struct pipeline_said *said,
			const char *why);
void pipeline_move_notice(struct pipeline_job *job, const struct data_header *header,
			  const void *payload);
/* Leaves a server out. Returns false, and nothing happens, when no other is attached. */
bool pipeline_move_without(struct pipeline_job *job, size_t server, const char *why);
/* It is looked for in a moment. Returns 0 or -errno. */
int pipeline_move_look_soon(struct pipeline_job *job, size_t server);
/* The same for all that are out, or not in the job yet: this node is the first now. */
void pipeline_move_look_again(struct pipeline_job *job);
/* A server that is out may be back: asks it. */
void pipeline_move_look(struct pipeline_job *job, size_t server);
/* It is. */
void pipeline_move_back(struct pipeline_job *job, size_t server);

/* add.c: servers that have come to the cluster since the job began. */
/* Places for those that job->added has more than job->servers. Returns 0 or -ENOMEM. */
int pipeline_add_places(struct pipeline_job *job);
/* Asks those of the cluster that are not in the job, and asks again those that do not take part yet. */
void pipeline_add_look(struct pipeline_job *job);
/* The same in a moment. */
void pipeline_add_look_soon(struct pipeline_job *job);
/* One takes part. */
void pipeline_add_take(struct pipeline_job *job, const struct data_added *added);
/* Whether a daemon of the cluster is this server of the job. */
bool pipeline_add_is(const struct pipeline_server *server, const struct view_member *member);

/* setup.c: DECLARE and notices. */
/* Who can be told something: a server that is lost cannot, one that is about to be attached again can. Or NULL. */
struct peer *pipeline_setup_peer(const struct pipeline_job *job, size_t server);
/* Says once more that a round has failed. */
void pipeline_setup_fail_again(struct pipeline_job *job, size_t server,
			       const struct pipeline_failed *failed);
/* What a tensor is, to a home that is fresh. */
void pipeline_setup_declare_known(struct pipeline_job *job, const struct ledger_known *known);
void pipeline_setup_declare(struct pipeline_tensor *tensor, const struct failure *conflict);
void pipeline_setup_free(struct pipeline_job *job);
void pipeline_setup_fail_job(struct pipeline_job *job, const struct failure *failure,
			     const struct peer *from);
void pipeline_setup_fail_round(struct pipeline_job *job, uint64_t key, uint64_t round, bool alone,
			       const struct failure *failure);

/* left.c: nodes that leave in good order. */
/* Once the layout is known, and before the job attaches. Returns 0 or -ENOMEM. */
int pipeline_left_init(struct pipeline_job *job);
bool pipeline_left_has(const struct pipeline_job *job, uint32_t node);
/* A server says so; node: as it came from outside. */
void pipeline_left_heard(struct pipeline_job *job, uint64_t node);
/* A server has attached: tells it who has left, where it may not know. */
void pipeline_left_attached(struct pipeline_job *job, size_t server);
/* A server of a job that nodes have left asks to be told when nothing of the job is under way here. */
void pipeline_left_stopping(struct pipeline_job *job, const struct peer *peer);
/* A round has ended, or failed: tells those that asked, if it was the last. */
void pipeline_left_idle(struct pipeline_job *job);
void pipeline_left_tell_idle(struct peer *peer, uint64_t number, uint32_t node);
/* This node leaves: to every server that is still there. */
void pipeline_left_say(struct pipeline_job *job);
/* A server that was asked in answers when the job is over here: nobody else would tell it. */
void pipeline_left_asked(const struct pipeline_job *job, struct peer *peer);

/* home.c: cluster query and JOIN. */
void pipeline_setup_open(struct pipeline_job *job);
/* Tells the home server which ranks are here now; nothing while the home is not known. */
void pipeline_setup_join(struct pipeline_job *job);
/* Takes back what was said to the home, as the job goes on instead. */
void pipeline_setup_withdraw(struct pipeline_job *job);
/* All ranks here regroup: tells the home, which answers when all do. Returns 0 or -errno. */
int pipeline_setup_regroup(struct pipeline_job *job, const uint32_t *ranks, uint32_t n_ranks,
			   uint32_t n_newcomers);
void pipeline_setup_close(struct pipeline_job *job);

/* attach.c: ATTACH. */
/* Takes the job's facts from its ledger. Returns 0 or -errno with words. */
int pipeline_setup_recall(struct pipeline_job *job, struct failure *failure);
/* Gives the job one more server, in the next place. Returns 0 or -ENOMEM. */
int pipeline_setup_add_place(struct pipeline_job *job, const struct view_member *member);
/* A resumed job's ranks are all here: attaches at its servers. Returns 0 or -errno. */
int pipeline_setup_reattach(struct pipeline_job *job);
/* (Again) at one server. */
int pipeline_setup_connect(struct pipeline_job *job, size_t server);
/* Attaches at a server that is out, with moves in which it is in: pipeline_move_back() follows if it is there. */
int pipeline_setup_ask_back(struct pipeline_job *job, size_t server, struct pipeline_said *said);
/* The same at one that is not in the job: it is the last of said->added. pipeline_add_take() follows. */
int pipeline_setup_ask_in(struct pipeline_job *job, const struct view_member *member,
			  struct pipeline_said *said);

/* declare.c */
/* The tensor that a rank here has declared under this name, or NULL. */
struct pipeline_tensor *pipeline_tensor_find(const struct pipeline_job *job, const char *name);
/* The ranks of all nodes agree, or not (failure). */
void pipeline_tensor_agreed(struct pipeline_tensor *tensor, const struct failure *failure,
			    uint64_t key, uint64_t start);
/* This local rank will declare nothing more. */
void pipeline_tensor_without(struct pipeline_job *job, uint32_t index);
/* Forgets a member's declarations. */
void pipeline_tensor_forget(struct pipeline_member *member);

/* resume.c */
/* Why the job ends with this process, or NULL. A constant. */
const char *pipeline_resume_ends(const struct pipeline_job *job);
/* A job that is being formed here gets its ledger: a new one, unless it is resumed. Returns 0 or -errno. */
int pipeline_resume_prepare(struct pipeline_job *job);
/* The same for one that goes through servers, with what the next process has to know. */
int pipeline_resume_prepare_far(struct pipeline_job *job, const void *record, size_t len);
/* Forms a job that is resumed, if all its ranks here are back. */
void pipeline_resume_form(struct pipeline_job *job);
/* The timer of a job that waits for ranks to come back. */
void pipeline_resume_expire(struct pipeline_job *job, uint64_t now_ns);
/* A job that has begun cannot take in a rank without a past. Returns 0, or -EEXIST with words. */
int pipeline_resume_check_new(const struct pipeline_job *job, const struct pipeline_join *join,
			      struct failure *failure);
/* Keeps what a rank says of a tensor's past. Returns 0, -EPROTO or -ENOMEM with words. */
int pipeline_resume_past(struct pipeline_member *member, struct pipeline_tensor *tensor,
			 const struct pipeline_past *past, struct failure *failure);
/*
 * Whether every rank here has submitted again what another had seen end well. Until then nobody leaves: what only he had
 * seen, the daemon process after this one would not be told.
 */
bool pipeline_resume_caught_up(struct pipeline_job *job);
/* The newest round that some rank had seen end well, or 0. */
uint64_t pipeline_resume_newest(const struct pipeline_tensor *tensor);
/* How a round of at most tensor->past_rounds ended for this request. ret_failure: set unless it is well. */
void pipeline_resume_outcome(const struct pipeline_tensor *tensor, struct pipeline_request *request,
			     struct failure *ret_failure);
/* A push_pull_rows has its result in all outputs here. Returns 0, or as ledger_round_begin(). */
int pipeline_resume_record_rows(struct pipeline_round *round, struct failure *failure);
/* Its requests are about to end. */
void pipeline_resume_finish_rows(struct pipeline_round *round);
/* Whether the daemon before was moving this round, so that it can only go on. */
bool pipeline_resume_moves(const struct pipeline_tensor *tensor, uint64_t round);

/* elastic.c: jobs that go on without a rank. */
struct pipeline_round;
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
/* Takes what the ledger says of those who are out to job->moves. */
void pipeline_elastic_recall(struct pipeline_job *job);
/* job->moves has changed: perhaps more ranks are out. Returns false when the job is over by that. */
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

/* report.c: "rank 3", "ranks 1, 4 and 7 more". */
struct pipeline_ranks_text {
	char text[128];
	size_t len;
	unsigned n, n_more;
};
void pipeline_ranks_add(struct pipeline_ranks_text *ranks, uint32_t rank);
const char *pipeline_ranks_end(struct pipeline_ranks_text *ranks);
/* "node b (10.88.0.2:9690)", or, without a connection, "node b". */
const char *pipeline_server_name(const struct pipeline_job *job, size_t server);
/* "60 s", "1.5 s", "20 ms". */
const char *pipeline_time_text(char text[32], uint64_t ns);
