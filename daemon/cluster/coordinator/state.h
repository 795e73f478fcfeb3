/* What the files of the coordinator share. Private to them. */
#pragma once

#include "base/list.h"
#include "base/map.h"
#include "cluster/coordinator/coordinator.h"
#include "cluster/wire.h"

struct member {
	struct list link;
	struct coordinator *coordinator;
	struct view_member info;
	struct rpc_call *stream; /* of its Register; NULL while broken */
	bool greeted;		 /* on that stream: not before there is a key */
	char from[RPC_PEER_MAX]; /* the connection of that stream */
	struct loop_timer lease;
	bool last_call;	      /* its lease is over: it is dropped unless it is heard of now */
	uint32_t acked;	      /* newest view it has said to have */
	struct list holds;    /* the jobs that it has open: struct hold */
	struct list openings; /* its OpenJobs that wait */
	size_t n_holds, n_openings;
};

enum { METHOD_REGISTER, METHOD_HEARTBEAT, METHOD_OPEN, METHOD_CLOSE, METHOD_LEAVE, N_METHODS };

struct coordinator {
	struct loop *loop;
	struct rpc *rpc;
	struct rpc_method methods[N_METHODS];
	uint16_t port;
	bool has_tls; /* members show certificates */
	uint64_t lease_ms;
	uint64_t complained_ns; /* of somebody who is not who he says; 0: never */
	uint8_t key[WIRE_KEY_MAX];
	size_t key_len;
	struct loop_timer key_wait; /* armed: members of before our start may yet tell their key */
	uint32_t epoch;		    /* largest ever heard of or made */
	struct view *view;	    /* NULL before the first */
	struct list members, jobs, openings;
	struct map jobs_by_name, openings_by_name; /* and owner */
	size_t n_members, n_jobs, n_holds, n_openings;
	struct loop_timer change;  /* armed: the members differ from the view */
	uint64_t recover_until_ns; /* no view before that */
	uint32_t
		recover_epoch; /* newest view that members of before our start tell of; 0: none has come */
	size_t recover_n; /* how many were in it */
	bool closed;
};

/* coordinator.c */
struct member *coordinator_member_find(struct coordinator *c, uint64_t id);
/* The member that a call is of: it came by the connection of the member's Register. NULL: whoever it is, not that one. */
struct member *coordinator_member_calling(struct coordinator *c, const struct rpc_call *call,
					  uint64_t id);
/* Answers with the bytes, which are freed, or with an error. */
void coordinator_reply_bytes(struct rpc_call *call, int r, struct wire_bytes *bytes);

/* job.c */
/* Makes the jobs that a member holds those that it says, no more and no less. */
void coordinator_jobs_take(struct coordinator *c, const struct wire_register *message,
			   struct member *member);
/* The member is gone: it holds nothing, and its calls to open jobs end. */
void coordinator_jobs_forget_member(struct coordinator *c, const struct member *member,
				    const char *why);
/*
 * Something has changed that a waiting OpenJob may have waited for: the view, or which servers have
 * it. Whoever waits for a job that another member opens is answered with that one.
 */
void coordinator_openings_try(struct coordinator *c);
void coordinator_jobs_init(struct coordinator *c);
void coordinator_jobs_done(struct coordinator *c);
void coordinator_openings_close(struct coordinator *c);
void coordinator_job_open_called(void *user, struct rpc_call *call, const void *data, size_t len);
void coordinator_job_open_cancelled(void *user, struct rpc_call *call);
void coordinator_job_close_called(void *user, struct rpc_call *call, const void *data, size_t len);

/* Views that jobs run in, each once; borrowed from the jobs. */
struct coordinator_used {
	uint32_t *epochs;
	struct view **views;
	size_t n;
};
void coordinator_used_done(struct coordinator_used *used);
int coordinator_used_collect(const struct coordinator *c, struct coordinator_used *used);
