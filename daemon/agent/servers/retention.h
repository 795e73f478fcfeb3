/*
 * Results that servers may need again, and where they are kept. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "ledger/ledger.h"
#include "proto/data.h"

struct call;
struct peer;
struct agent_job;
struct agent_part;
struct agent_server;
struct agent_tensor;

/* A round that failed, which servers are told again when they have attached anew. */
struct agent_failed {
	uint64_t key, round;
	bool alone; /* struct agent_round */
	struct failure failure;
};
#define AGENT_FAILED 32

/* Results that servers may need again, of a job that outlives its daemons' processes: keep.c. */
struct agent_retention {
	bool keeps;	     /* the job is such a job */
	struct list starved; /* parts whose result waits for memory */
	bool feeding;	     /* starved parts are gone through, or not to be */
	struct chore feed;   /* goes through more of them */
	struct list in_place,
		spare_in_place; /* of which servers in this process have no use any more: in_place.c */
	struct loop_timer results_timer; /* whether memory is not needed any more: quota.c */
	uint32_t results_target;	 /* memory of so many results is to stay */
	struct agent_failed *failed;	 /* a ring of AGENT_FAILED, or NULL */
	size_t n_failed;		 /* ever */
	struct mail ack_mail;		 /* tells servers what is kept */
	bool acking;
};

/* keep.c: a job that goes through servers outlives their processes, and this one. */
/* A server of the job has its place: memory for what is kept. Returns 0 or -ENOMEM. */
int agent_keep_init(struct agent_job *job, size_t server);
void agent_keep_done(struct agent_job *job);
/* A server's peer is lost, or it does not answer as it should: parts wait, and it is connected again. */
void agent_keep_lost(struct agent_job *job, size_t server, const char *why);
/* Its words are that it stops, or knows of other servers than we: it is attached again in a moment. */
void agent_keep_again(struct agent_job *job, size_t server);
/* The same for each of the job's servers that this peer is. */
void agent_keep_peer_lost(struct agent_job *job, const struct peer *peer, const char *why);
/* A server has taken the job, perhaps again; agent_resync() follows. fresh: it has not seen the job's beginning. */
void agent_keep_attached(struct agent_server *server, bool fresh);
/* Whether a call ended because the peer was lost, or is about to go: not by an answer of the job's. */
bool agent_keep_is_loss(const struct call *call);
/* A part waits until its server is attached. */
void agent_keep_park(struct agent_part *part);
/* A result of len bytes is retained. Or need not be: LEDGER_NO_RESULT. */
void agent_keep_stored(struct agent_server *server, uint32_t number, uint32_t retained,
		       uint32_t len, bool soon);
/* A result that the server does not know to be kept here. */
void agent_keep_offer(struct agent_job *job, uint32_t retained);
/* A server says that these are on every node. */
void agent_keep_released(struct agent_server *server, uint32_t number);
/* Rounds of the tensor up to this one are over on every local rank. */
void agent_keep_settle(struct agent_tensor *tensor, uint64_t round);

/*
 * contributors.c: of a job that does not wait for all, whose contributions are in a result; what of ours is in none is kept, and so is the
 * last of sums that accumulate.
 */
/* Bytes of memory for a result in the ledger. */
uint32_t agent_quota_result_bytes(const struct agent_job *job);
/* Bytes of a part's result as it comes, is kept and offered. */
uint32_t agent_contributors_result_len(const struct agent_job *job, unsigned operation,
				       uint32_t len);
/* How many contributions are in it, if it says so, from its bytes; and whether ours is. */
bool agent_contributors_read(const struct agent_job *job, const struct ledger_what *what,
			     const void *result, uint32_t *ret_n, bool *ret_has_ours);
/* A retained result is whole, and in all outputs: others of the part, from before, are perhaps of no use any more. */
void agent_contributors_stored(struct agent_job *job, uint32_t retained);
/* A server has attached: which results it is to be offered that are not ready yet; it was offered all others; this one is offered now, or gone. */
void agent_contributors_attached(struct agent_server *server);
void agent_contributors_offered(struct agent_server *server);
void agent_contributors_resolve(struct agent_job *job, uint32_t retained);
/* A part waits for memory: when there will never be any, its round fails. */
bool agent_contributors_is_full(const struct agent_job *job);
/* Whose a retained result is now. */
struct agent_server *agent_keep_owner(const struct agent_job *job, const struct ledger_kept *kept);
/* There may be memory for the parts that wait, until one gets none. */
void agent_keep_feed(struct agent_job *job);
/* The retained result is of no use any more. */
void agent_keep_free(struct agent_job *job, uint32_t retained);

/* Parts of these n servers wait; nothing that such a server answers from now on counts. */
void agent_keep_detach(struct agent_job *job, size_t first, size_t n);
/* A round has failed: to be said again. */
void agent_keep_failed(struct agent_job *job, uint64_t key, uint64_t round, bool alone,
		       const struct failure *failure);

/* quota.c: what results take in the ledger. */
void agent_quota_init(struct agent_job *job);
void agent_quota_done(struct agent_job *job);
/* The job runs: what it has from before a restart is given back where it is not needed. */
void agent_quota_formed(struct agent_job *job);
/* A rank comes back to a job whose ledger may have more than its session is charged for: 0, or -EDQUOT with words. */
int agent_quota_join(struct agent_job *job, struct agent_member *member, struct failure *failure);
/* So many results are to have room at once, of those there may ever be: 0, or -EDQUOT. */
int agent_quota_for(struct agent_job *job, uint32_t n);
/* Makes more room when it becomes scarce: 0, or -EDQUOT. */
int agent_quota_look(struct agent_job *job);

/* in_place.c: no result in place is in use any more. */
void agent_in_place_done(struct agent_job *job);
