/*
 * The door: trainers connect here. Owns the listening socket, every session (one trainer's connection: its packets,
 * its ring, its buffers, its quota) and the rules of who may do what. A request is read, checked, and handed to
 * agent/; what comes back is written into the session's completion slot. Control thread only.
 *
 * What trainers hand over may keep whoever touches it: which calls are made on it stands in bps-daemon(8), WHAT OTHERS HAND
 * OVER; base/porter.h has the rest.
 */
#pragma once

#include "agent/agent.h"
#include "base/error.h"
#include "base/loop/loop.h"
#include "base/memory/account.h"

struct control;

struct control_params {
	struct loop *loop;
	struct accounts *accounts; /* of users; NULL: nobody is charged */
	struct agent *agent;	   /* NULL: no agent; whoever connects is told so */
	const char *socket_path;   /* bound here with mode 0660; NULL when listen_fd is given */
	int listen_fd;		   /* from socket activation, or -1 */
	const char *group;	   /* group of the socket, or NULL */
	const char *node;	   /* this node's name, for Welcome */
	const char *cluster;	   /* where its list of daemons comes from, for StatusReply */
	uint64_t id;		   /* this daemon process */
	unsigned max_sessions;	   /* in all */
	unsigned max_sessions_per_uid;
	unsigned max_buffers;	      /* mapped memfds per session */
	unsigned max_tensors;	      /* per session */
	uint64_t session_quota_bytes; /* memory mapped from one session */
	uint64_t hello_timeout_ms;    /* a connection that has not said Hello by then is closed */
	uint64_t resume_timeout_ms;   /* the agent's, for Welcome */
	bool has_cuda;		      /* memory of devices can be imported */
	uint64_t spin_ns; /* how long the loop looks for entries before it sleeps; 0: not at all */
};

struct control_session_info {
	uint32_t pid, uid;
	uint32_t rank;
	char job[64]; /* empty: none joined */
	uint64_t run; /* its number; 0: it is not complete */
	uint64_t n_requests, n_pending, bytes_mapped;
	unsigned n_regions; /* of its memory, with RDMA devices */
};

int control_new(const struct control_params *params, struct control **ret_control);
/* Stops accepting; sessions stay. For draining. */
void control_stop_accepting(struct control *control);
/* Takes nothing more from any trainer, and says nothing more to any; all descriptors stay open. Before close. */
void control_freeze(struct control *control);
/* Closes every session. Idempotent. */
void control_close(struct control *control);
struct control *control_free(struct control *control);
DEFINE_CLEANUP(struct control *, control_free)

/* Requests not yet completed, over all sessions whose jobs end with this process: 0 means drained. */
size_t control_pending(const struct control *control);
size_t control_n_sessions(const struct control *control);
/* For admin; array to be freed. Returns 0 or -ENOMEM. */
int control_sessions(struct control *control, struct control_session_info **ret_sessions,
		     size_t *ret_n);
