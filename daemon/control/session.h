/*
 * Sessions. Private to control/.
 *
 *	GREETING	connected, nothing said yet
 *	OPEN		Hello was answered: requests are taken, the ring is drained
 *	CLOSED		descriptors are closed and the job has been told; waits until its buffers are given up and not in use any more
 */
#pragma once

#include "base/clock.h"
#include "base/list.h"
#include "base/loop/porter.h"
#include "base/map.h"
#include "base/memory/bulk.h"
#include "base/memory/handout.h"
#include "base/order/fair.h"
#include "base/quota.h"
#include "control/control.h"
#include "control/pace.h"
#include "control/places.h"
#include "control/tensor.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"
#include "proto/shm.h"
#include <sys/socket.h>

/* Packets that a trainer may leave unread: more than it can have unanswered requests for at once in good faith. */
#define OUTBOX_MAX 8192
/* What a session takes before it asks for anything: its shared memory, places for requests, and what its socket and its wake-up may hold. */
#define SESSION_BYTES \
	(SHM_LEN + SHM_SLOTS * sizeof(void *) + SESSION_PACKET_BYTES + SESSION_WAKE_BYTES)
#define SESSION_PACKET_BYTES (UINT64_C(256) << 10)
#define SESSION_WAKE_BYTES   (UINT64_C(8) << 10)
#define SESSION_DESCRIPTORS  6

struct control {
	struct control_params params;
	struct loop_source listener;
	struct loop_timer retry; /* accepting failed: not before then */
	bool listener_is_paced;	 /* nothing is accepted until paces have been paid */
	int spare_fd;		 /* given up to refuse a connection when descriptors have run out */
	bool bound;		 /* the socket's path is ours */
	struct list sessions;
	size_t n_sessions;
	struct places buffers; /* of trainers, mapped; closed sessions' too */
	bool watches_holes;
	struct loop_source holes; /* pages of these that are not there any more */
	struct list over;	  /* closed sessions that nothing uses any more: over_link */
	struct chore reap;	  /* frees these, when nobody up the stack uses them */
	struct fair rings;  /* sessions with packets or entries to be taken, by job; cost: time */
	size_t n_rung_deep; /* of them, those for whose entries nothing gives way */
	uint64_t n_rung, n_drains;
	struct sampled_clock clock; /* of entries */
	struct paces paces;
	struct pace_jobs pace_jobs;
	struct mail drain; /* takes some of them */
	bool drain_posted;
	struct loop_watch watch;
	struct list deep; /* sessions with many requests open, of which the next drain takes more */
	struct list awake; /* sessions whose rings the loop looks at by itself, before it sleeps */
	char packet[FRAME_MAX];
};

enum session_state { SESSION_GREETING, SESSION_OPEN, SESSION_CLOSED };

/* A request of the trainer, kept with its slot for the next one. */
struct session_request {
	struct agent_request base;
	struct session *session;
	bool busy;
	uint32_t n_counts;					  /* allocated */
	uint64_t *counts;					  /* held_new() */
	struct buffer *input, *output, *input_rows, *output_rows; /* held, or NULL */
};
static_assert(sizeof(struct session_request) <= 4 * CACHE_LINE,
	      "of thousands of requests each is a few lines of the cache");

/* What the control thread has to take of a session. */
enum { SESSION_PACKETS = 1 << 0, SESSION_ENTRIES = 1 << 1, SESSION_END = 1 << 2 };

/*
 * Whether the ring's memory is to be touched. SHOWN: the trainer has it, and may have yet to map it; it can also give pages of
 * it back, and whoever touches one meanwhile waits until it has. So first the memory is sealed against that, once the trainer
 * has said or rung something: it has mapped it by then, and nobody maps it to write any more.
 */
enum ring_state { RING_SHOWN, RING_SEALING, RING_SEALED };

/* Packets that did not fit into the socket. */
struct session_outbox {
	struct list packets;
	size_t n;
	char why[128];	  /* something cannot be sent, and nothing is any more; "": all can */
	struct mail fail; /* then: ends the session, under nobody's feet */
};

/*
 * What descriptor came beside a packet is found out by the porter; until that is over, no other packet is read. So is
 * the socket closed if there are any in it, and the ring sealed. A session counts until all that came from it is closed.
 */
struct session_porter {
	struct porter_errand take, end, seal;
	Bps__Control__Request *taken; /* the packet */
};

/* What is shared with the trainer for entries and completions, and how far both have come. */
struct session_ring {
	struct buffer *memory;
	void *shm;   /* there */
	int shm_fd;  /* what shm is of, until it is sealed, or for workers; else -1 */
	int kept_fd; /* of shm, by which it is known whether the trainer has it still */
	enum ring_state state;
	bool rung;		    /* before it was sealed */
	int wake_fd;		    /* write end towards the trainer */
	uint64_t head, n_completed; /* entries consumed, slots */
	struct mail wake;	    /* the trainer hears of what was completed */
	struct loop_timer wake_again;
	bool wake_posted, draining;
	bool stalled;	     /* an entry waits for what comes behind it */
	bool held;	     /* or for a packet that waits for the pace of its user */
	bool yields;	     /* the turn is over */
	struct list unarmed; /* in control->awake or ->deep: the trainer need not ring */
	struct session_request **requests; /* SHM_SLOTS entries, made as used, in bulk */
	struct bulk bulk;
};

/* When the control thread takes what there is of the session. */
struct session_turn {
	unsigned work;		 /* SESSION_*: what there may be to be taken */
	bool rung, rung_deep;	 /* in control->rings; and counted in n_rung_deep */
	uint64_t drain, n_taken; /* the last that took entries of it, and how many */
	uint64_t flow, job_flow; /* as of this job, or user; and ring_job_flow() */
	struct pace *pace;	 /* of its user */
	struct list paced;	 /* in control->paces.waiting: packets wait */
	uint64_t until_ns;	 /* when its turn is over */
};

/*
 * A request that refers to what was posted before: it is taken once the entries up to this number are. Until then no
 * packet behind it is read, unless an entry needs one, which has then been posted later than the request.
 */
struct session_deferred {
	Bps__Control__Request *request;
	uint64_t until;
};

/* What the trainer shares. */
struct session_memory {
	struct map buffers; /* struct buffer by number */
	struct chore drop;  /* of a closed session: gives up its buffers, this one next */
	struct map_entry *next_to_drop;
	bool has_holes;	    /* its trainer has given back pages that it shares */
	size_t n_releasing; /* given up, and still in use */
	struct quota quota; /* bytes mapped, and what its job's ledger takes */
};

/* The job that the session is in, or was in last. */
struct session_job {
	struct agent_member member;
	char name[JOB_NAME_MAX + 1];
	uint32_t rank, size;
	bool elastic;
	uint64_t run; /* its number */
	bool is_in;
	uint64_t n_runs;			/* jobs that it has been in and is out of */
	uint64_t join_id, leave_id, regroup_id; /* requests to be answered, or 0 */
	struct failure last;			/* how the last one ended; never well */
	uint64_t ledger_charge, more_charge;
};

struct session {
	struct control *control;
	struct list link, over_link;
	enum session_state state;
	uint32_t pid, uid;
	struct account *account; /* of its user; or NULL */
	uint64_t n_bytes,
		n_descriptors; /* that the account is charged with: SESSION_BYTES, SESSION_DESCRIPTORS, or what is not left to others */
	struct quota held;     /* memory of ours that it makes us hold, beside these */
	uint64_t features;     /* CONTROL_FEATURE_*, of both sides */
	struct loop_source socket;
	struct loop_source process; /* pidfd, or -1 */
	struct loop_source doorbell;
	struct loop_timer timer; /* for Hello; and once the trainer has hung up, for its end */
	struct session_outbox outbox;
	struct session_porter porter;
	struct session_ring ring;
	struct session_turn turn;
	struct session_deferred deferred;
	struct session_memory memory;
	struct session_tensors tensors;
	struct session_job job;
	uint64_t n_pending, n_requests;
	const char *how; /* it ends: SESSION_END */
};

/* session.c */
/* Takes over socket and pidfd. Returns 0; or -errno with words, and both closed: the trainer was told. */
int session_new(struct control *control, int socket, const struct ucred *trainer, int pidfd,
		struct failure *failure);
/* Ends a session. how: what other ranks are told, after "rank 3 (pid 123) of job x". Idempotent. */
void session_close(struct session *session, const char *how);
/* The same, for SESSION_END. */
void session_end(struct session *session);
/* Takes nothing more from the trainer and says nothing more to it, but stays connected. */
void session_freeze(struct session *session);
/* The trainer broke the rules: as above, with a line in the log. */
void session_fail(struct session *session, const char *format, ...) _printf_(2, 3);
/* The same in a later turn: whoever calls may be in the middle of something of the session's, or of the agent's. */
void session_fail_later(struct session *session, const char *format, ...) _printf_(2, 3);
/* Something of it that is over here, and that the trainer may have still: goes on being charged until it has not. Takes over fd. */
void session_leave(struct session *session, enum handout_kind kind, int fd, uint64_t bytes);
void session_send(struct session *session, const Bps__Control__Message *message, const int *fds,
		  size_t n_fds);
/* An answer without a body: 0, or -errno and why. */
void session_answer(struct session *session, uint64_t id, int status, const char *text);
/* The pace of the session's user pays for what the session has made of the thread's time since began_ns. */
void session_charge_pace(struct session *session, uint64_t began_ns);
/* The session is closed, and something of it is over: perhaps it was the last. */
void session_reap_if_over(struct session *session);
/* Reads packets again, or none: what the session waits for has changed. */
void session_watch_socket(struct session *session);
/* Takes the next packet, if there is one and none is being looked at. Returns whether there was. */
bool session_receive_one(struct session *session);
/* What is beside the first packet is fetched, and the packet taken then. */
void session_fetch(struct session *session, enum porter_want want, Bps__Control__Request *request);
/* A buffer is given up; nothing of the session's is called after it has been freed. */
void session_drop_buffer(struct session *session, struct buffer *buffer, uint64_t unshare_id);
/* Pages of buffers were touched that their trainers have given back: these are cut off. */
void session_on_holes(struct loop_source *source, uint32_t events);
/* All that there are, for who maps memory: what was there before is another's. */
void session_take_holes(struct control *control);
/* One request in flight less. */
void session_request_ended(struct session *session);
struct session *session_free(struct session *session);

/* request.c: packets. has_fds: there are descriptors beside it, which are still in the socket. */
void session_take_packet(struct session *session, const void *data, size_t len, bool has_fds);
/* Takes the request that was deferred. */
void session_take_deferred(struct session *session);
/* A packet whose descriptor was fetched, or why not. Takes over the descriptor. */
void session_take_fetched(struct session *session, Bps__Control__Request *request, int status,
			  int fd);
/* Out of the job: its ledger is not charged any more. */
void session_release_ledger(struct session *session);
