/*
 * What setup.c, home.c, attach.c and discovery.c share: calls of a job at its servers before data moves. Private to them; they are the
 * only place of agent/ where generated names appear.
 */
#pragma once

#include "agent/round/part.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"

struct agent_setup {
	struct list link; /* the job's */
	struct call call;
	struct agent_job *job;
	struct agent_tensor *tensor; /* DECLARE; NULL: what a fresh home has to know */
	uint64_t serial;	     /* the tensor's: with another it is gone */
	size_t server;		     /* ATTACH */
	uint64_t n_moved;	     /* job's, when it was sent: else it counts no more */
	bool asks_back;		     /* ATTACH: of a server that is out */
	struct data_added *added;    /* of one that is not in the job; or NULL */
	/* JOIN, to regroup. */
	uint64_t instance;
	uint32_t *ranks; /* n_ranks entries */
	uint32_t n_ranks;
	void *payload;
	size_t charged; /* for it */
};

/* setup.c */
/*
 * Calls a peer with a message, which is packed at once; done() ends with agent_setup_done(). Returns 0 with the call
 * under way, or -errno.
 */
int agent_setup_call(struct agent_job *job, struct peer *peer, enum data_op op,
		     const ProtobufCMessage *message, void (*done)(struct call *call),
		     struct agent_setup **ret_setup);
void agent_setup_done(struct agent_setup *setup);
/* Fails the job. */
void agent_setup_fail(struct agent_job *job, int status, const char *text);
/* The same, by a negative errno; without memory the words say whose is used up. */
void agent_setup_fail_errno(struct agent_job *job, int r);
/* The same: what a server answered that is not what was asked for. */
void agent_setup_fail_answer(struct agent_job *job, struct peer *peer, int status,
			     const char *what);
/* The message of a call that ended well. Returns 0, -EPROTO or -ENOMEM. */
int agent_setup_unpack(const struct call *call, const ProtobufCMessageDescriptor *descriptor,
		       ProtobufCMessage **ret_message);
/* again: perhaps another process than that which the view names. */
int agent_setup_peer_of(const struct agent_job *job, const struct view_member *member, bool again,
			struct peer **ret_peer);

/* The same for a daemon without a job there yet. */
int agent_setup_peer_at(struct agent *agent, const struct view_member *member, bool again,
			struct peer **ret_peer);

/* home.c */
/* The name of this daemon in the view, or NULL. */
const char *agent_setup_own_name(const struct view *view);
/* NULL: it waits for all. */
Bps__Cluster__Stragglers *agent_setup_stragglers(const struct agent_job *job,
						 Bps__Cluster__Stragglers *m);

/* attach.c */
/* The home server has put the job together: takes that over, and attaches at its servers. Returns 0 or -errno. */
int agent_setup_use_joined(struct agent_job *job, const Bps__Cluster__JobJoined *m);
