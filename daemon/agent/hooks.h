/*
 * What files of the agent call that stand above them: agent.c makes the table, once. The rooms, from above:
 *
 *	request		what trainers ask for: tensors, submissions, their order, deadlines, ranks that are lost
 *	round		rounds and their parts: sums, copies, what goes to servers and comes back, rows, devices
 *	servers		the job's servers: found, joined, attached, lost and replaced; what is kept for them
 *	job		the job and its ranks: formed, resumed, regrouped, left
 *	schedule	which part goes next, and the send queue of each server
 *	common		what all ask: is a request right, what kind is a round, is there room, is a server in
 *
 * scripts/layers has this order, and scripts/check-cycles holds it. Control thread.
 */
#pragma once

#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct peer;
struct agent;
struct agent_job;
struct agent_member;
struct agent_newcomer;
struct agent_part;
struct agent_request;
struct agent_round;
struct agent_server;
struct agent_tensor;

/* A part whose server is lost, or back. */
struct agent_part_hooks {
	void (*waits)(struct agent_part *part);	  /* a server is chosen for it */
	void (*let_go)(struct agent_part *part);  /* its result that was held counts no more */
	bool (*fed)(struct agent_part *part);	  /* there is a place for its result now */
	void (*goes_on)(struct agent_part *part); /* its server is back */
	void (*turn)(struct agent_part *part);	  /* it is to be sent */
};

/* The servers of a job. */
struct agent_server_hooks {
	/* One has attached. fresh: it has not seen the job's beginning. The job is held. */
	void (*attached)(struct agent_server *server, bool fresh);
	/* One's peer, or NULL. */
	struct peer *(*peer_of)(const struct agent_job *job, size_t server);
	/* They are looked for once more. */
	void (*look)(struct agent_job *job);
};

struct agent_hooks {
	/* The job's life: made; opened at the cluster; another rank is there to be joined; it runs; its members know it. */
	void (*made)(struct agent_job *job);
	void (*opens)(struct agent_job *job);
	void (*joins)(struct agent_job *job);
	void (*runs)(struct agent_job *job);
	void (*begun)(struct agent_job *job);
	/* It fails: servers are told, but for `from`. No member belongs to it any more. Its memory goes. */
	void (*fails)(struct agent_job *job, const struct failure *failure,
		      const struct peer *from);
	void (*is_over)(struct agent_job *job);
	void (*freed)(struct agent_job *job);
	/* Something has happened that all its rounds have to hear of. */
	void (*news)(struct agent_job *job);

	/* Ranks of this node: in the job no more; lost, or leaving, of an elastic job; before it was formed; too late to regroup. */
	void (*member_gone)(struct agent_member *member);
	/* One that is about to be: at most max of its declarations are void from now on. Returns how many. */
	uint32_t (*member_goes)(struct agent_member *member, uint32_t max);
	void (*rank_gone)(struct agent_job *job, uint32_t index, const struct failure *failure,
			  bool leaves);
	bool (*rank_gone_early)(struct agent_job *job, uint32_t index, uint32_t rank,
				const struct failure *failure);
	void (*rank_is_late)(struct agent_job *job, uint32_t index, const struct failure *failure);
	/* A job that is resumed waits for ranks to come back. */
	void (*ranks_absent)(struct agent_job *job);
	/* Ranks of all nodes, as servers and nodes know them: after a restart; more are out; the job goes on without these. */
	void (*ranks_recalled)(struct agent_job *job);
	bool (*ranks_out)(struct agent_job *job, const char *why);
	void (*goes_on_without)(struct agent_job *job, const char *why);
	/* The job is asked what it is without ranks that have left. */
	void (*ranks_settle)(struct agent_job *job);
	/* All ranks here regroup. Returns 0 or -errno. */
	int (*regroups)(struct agent_job *job, const uint32_t *ranks, uint32_t n,
			uint32_t n_newcomers);
	/* A newcomer waits for a job that is not here; it waits no more; none does. */
	void (*newcomer_waits)(struct agent_newcomer *newcomer);
	void (*newcomer_gone)(const struct agent_newcomer *newcomer);
	void (*newcomers_gone)(struct agent *agent);

	/* After a restart: attaches again; what the ledger has of servers; a JOIN under way is taken back. Return 0 or -errno. */
	int (*attaches_again)(struct agent_job *job);
	int (*servers_recalled)(struct agent_job *job, struct failure *failure);
	void (*join_withdrawn)(struct agent_job *job);
	/* How rounds of before end. */
	bool (*rows_ended)(const struct agent_tensor *tensor, struct agent_request *request,
			   uint64_t n_rows, struct failure *failure);
	void (*rounds_known)(struct agent_tensor *tensor);

	struct agent_server_hooks servers;
	/* How bytes go between GPUs here and servers, for operators. */
	void (*describe_gpu)(const struct agent_job *job, char *text, size_t size);

	/* The home's word on a tensor. */
	void (*tensor_known)(struct agent_tensor *tensor, const struct failure *failure,
			     uint64_t key, uint64_t start);
	/* The same, on one that all ranks here have released: it is forgotten, or not. */
	void (*tensor_settled)(struct agent_tensor *tensor, bool forgotten);
	struct agent_part_hooks part;
	/* Of rows, what was begun at these n servers, which are lost, or left. */
	void (*rows_begin_anew)(struct agent_job *job, size_t first, size_t n);
	/* A round's turn has come: whether it has a part to begin, and does. */
	bool (*round_may_begin)(const struct agent_round *round);
	void (*round_turn)(struct agent_round *round);
	/* In a later turn of the loop: goes on. */
	void (*round_later)(struct agent_round *round);
	void (*tensor_later)(struct agent_tensor *tensor);
	/* Some ranks are gone: whether the round goes on. */
	bool (*round_without_them)(struct agent_round *round);
};
