/*
 * The servers of a distributed job, and what is said to them to set it up. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "cluster/cluster.h"
#include "ledger/ledger.h"

struct peer;
struct agent_failed;
struct agent_job;
struct agent_send_queue;
struct agent_said;
struct agent_setup;
struct agent_tensor;

/* What a server that has attached may not have heard, and is told in steps: resync.c. */
struct agent_resync {
	struct chore chore;
	bool is_under_way; /* or not any more, and its last step is to come */
	bool holds_names; /* of new tensors, from a home that has yet to hear which keys there are */
	bool holds_parts;   /* for the server, until it has been told all that came before them */
	unsigned stage;	    /* what it is told of; */
	size_t next;	    /* the next of these, */
	struct list *at;    /* or of tensors.all */
	uint64_t forgotten; /* the key of which it was told last that it is forgotten; 0: none */
};

struct agent_server {
	struct view_member member;
	bool colocated;			     /* with ranks of the job */
	struct agent_send_queue *send_queue; /* NULL: there is no connection */
	bool attached;
	bool scales, forgets; /* has DATA_FEATURE_SCALES, _FORGET */

	/* Of a job that outlives its daemons' processes: keep.c. */
	struct agent_job *job;
	uint64_t attachment; /* how often it has attached, or was given up */
	bool gone;	     /* its connection was lost, and it has not attached since */
	bool stopping;	     /* its process ends when it hears that nothing is under way here */
	uint64_t
		return_ns; /* while the job goes on without it: how long until it is looked for again */
	uint64_t lost_ns;  /* since when it is lost; 0: it is not */
	unsigned n_losses; /* since losses_ns: one that is lost again and again is given up */
	uint64_t losses_ns;
	struct loop_timer timer; /* when to connect again */
	struct list parked;	 /* parts for it, while it takes none */
	struct agent_resync resync;
	uint32_t acked,
		ack_sent;    /* its results up to this number are kept here; it has been told */
	uint32_t ack_wanted; /* up to this one it is to be told at once */
	uint32_t released;   /* up to this number they are on every node */
	uint64_t ack_bytes;  /* of results that it has not been told of */
	uint64_t
		n_offered; /* since it has attached; and results that are still to be: contributors.c */
	uint32_t n_pending;
	uint64_t *here;	    /* window of numbers behind `acked`: bit set: kept here */
	uint32_t *retained; /* by number modulo the window: result + 1, or 0 */
};

/* The servers of a distributed job. */
struct agent_fleet {
	struct cluster_query query;
	bool querying, opened; /* asked for a view; was given one and owes a close */
	struct view *view;
	struct peer *home;
	size_t home_number;	  /* among the servers */
	struct agent_setup *join; /* the newest, or to regroup; earlier ones do not count */
	struct list setups;	  /* set-up calls in flight */
	struct agent_server *servers;
	size_t n_servers;
	size_t n_viewed;   /* of them, those of the view; added ones follow */
	size_t n_attached; /* of them, those that have been told all that they may not have heard, */
	size_t n_resyncing;	  /* and those that are being told */
	uint64_t n_homes;	  /* how often a home has attached */
	uint32_t *member_of_node; /* n_nodes: member of the view, from 1; 0: none */
};

static inline bool agent_server_takes_parts(const struct agent_server *server)
{
	return server->attached && !(server->resync.is_under_way && server->resync.holds_parts);
}

/* home.c: cluster query and JOIN. */
void agent_setup_open(struct agent_job *job);
/* Tells the home server which ranks are here now; nothing while the home is not known. */
void agent_setup_join(struct agent_job *job);
/* Takes back what was said to the home, as the job goes on instead. */
void agent_setup_withdraw(struct agent_job *job);
/* All ranks here regroup: tells the home, which answers when all do. Returns 0 or -errno. */
int agent_setup_regroup(struct agent_job *job, const uint32_t *ranks, uint32_t n_ranks,
			uint32_t n_newcomers);
void agent_setup_close(struct agent_job *job);

/* attach.c: ATTACH. */
/* Takes the job's facts from its ledger. Returns 0 or -errno with words. */
int agent_setup_recall(struct agent_job *job, struct failure *failure);
/* Gives the job one more server, in the next place. Returns 0 or -ENOMEM. */
int agent_setup_add_place(struct agent_job *job, const struct view_member *member);
/* A resumed job's ranks are all here: attaches at its servers. Returns 0 or -errno. */
int agent_setup_reattach(struct agent_job *job);
/* (Again) at one server. */
int agent_setup_connect(struct agent_job *job, size_t server);
/* Attaches at a server that is out, with moves in which it is in: agent_move_back() follows if it is there. */
int agent_setup_ask_back(struct agent_job *job, size_t server, struct agent_said *said);
/* The same at one that is not in the job: it is the last of said->added. agent_add_take() follows. */
int agent_setup_ask_in(struct agent_job *job, const struct view_member *member,
		       struct agent_said *said);

/* resync.c */
/*
 * A server has attached: it is told what it may not have heard, now or in later turns of the loop. Then it counts as attached, and the job
 * is formed if it is the last. fresh: it has not seen the job's beginning. The caller holds the job.
 */
void agent_resync(struct agent_server *server, bool fresh);
/* The tensor is about to go from tensors.all. */
void agent_resync_leave(const struct agent_tensor *tensor);

/* setup.c: DECLARE and notices. */
/* Who can be told something: a server that is lost cannot, one that is about to be attached again can. Or NULL. */
struct peer *agent_setup_peer(const struct agent_job *job, size_t server);
/* Says once more that a round has failed. */
void agent_setup_fail_again(struct agent_job *job, size_t server,
			    const struct agent_failed *failed);
/* What a tensor is, to a home that is fresh. */
void agent_setup_declare_known(struct agent_job *job, const struct ledger_known *known);
void agent_setup_declare(struct agent_tensor *tensor, const struct failure *conflict);
void agent_setup_free(struct agent_job *job);

/* names.c: FORGET, and what goes with it. */
/* Whether this kind of job, and all of its servers, can forget tensors. */
bool agent_names_may_forget(const struct agent_job *job);
/* All ranks here have released it: asks the home, now or when it is attached; hooks->tensor_settled() follows. */
void agent_names_forget(struct agent_tensor *tensor);
/* A rank uses it: those who have asked are to hear of it. */
void agent_names_keep(const struct agent_job *job, uint64_t key);
/* It is forgotten: tells the servers. The second: one of them. */
void agent_names_forgotten(struct agent_job *job, uint64_t key);
void agent_names_tell_forgotten(const struct agent_job *job, const struct agent_server *server,
				uint64_t key);
/* What the ledger has of a tensor that is in doubt; or NULL. */
const struct ledger_known *agent_names_in_doubt(const struct agent_tensor *tensor);
/* Whether a key that the ledger had has gone from there. */
bool agent_names_is_forgotten(const struct agent_job *job, uint64_t key);
/* A home that is fresh has been told of all tensors. */
void agent_names_notified(const struct agent_job *job);
/* To a server that has attached: one of the last that were forgotten. Returns whether there was such a one. */
bool agent_names_forgotten_again(const struct agent_server *server, size_t index);
void agent_setup_fail_job(struct agent_job *job, const struct failure *failure,
			  const struct peer *from);
/* Tells the home how many ranks here follow the others, and whether one has left; where it is lost, it is told once attached. */
void agent_setup_follow(struct agent_job *job);
void agent_setup_fail_round(struct agent_job *job, uint64_t key, uint64_t round, bool alone,
			    const struct failure *failure);
