/*
 * Nodes that attach, and who speaks for which. Any of the functions may end the job. Control
 * thread only.
 */
#pragma once

#include "base/error.h"

struct attach;
struct delivery;
struct job;
struct peer;
struct server;

/* Nodes that have attached, or have to: attach.c. */
struct attachment {
	uint32_t n;
	uint64_t timeout_ms;
	uint64_t by_ns; /* when every node must have attached; CLOCK_NEVER: they have */
	uint64_t lost_timeout_ms;
};

void attach_call(struct server *server, struct delivery *delivery);
/* Returns 0, or -EPROTO, -EACCES, -ENOTCONN with failure filled, unless peer may speak for the node. */
int attach_check(const struct job *job, const struct peer *peer, uint32_t node,
		 struct failure *failure);
/* takes_place: as job_params'. */
int attach_new(struct server *server, uint64_t number, const struct attach *attach,
	       bool takes_place, struct job **ret_job, struct failure *failure);
/* Why an attach does not fit the job that its number names, apart from its home; NULL when it does. */
const char *attach_differs(const struct job *job, const struct attach *attach);
/* Peers that speak for nodes of the job are lost. */
void attach_lost(struct job *job);
void attach_expired(struct job *job);
/* When the first node that was lost is waited for no longer; CLOCK_NEVER: none was. */
uint64_t attach_lost_deadline(const struct job *job);
void attach_lost_expired(struct job *job, uint64_t now);
/* Has the timer expire then. Returns 0 or -ENOMEM. */
int attach_lost_wake(struct job *job);
/* Nodes that have joined, or will, have to attach within this time. Returns 0 or -ENOMEM. */
int attach_expect(struct job *job, uint64_t timeout_ms);
