/* Requests on the control channel, and what waits for their answers. (locked): client.h. call.c is the only file that knows protobuf. */
#pragma once

#include "bps.h"
#include "proto/c.h"
#include "proto/types.h"
#include <sys/queue.h>

/* How long the daemon may take to answer or to read what other ranks have no part in; then it is not to be trusted. */
#define CLIENT_ANSWER_NS (30 * INT64_C(1000000000))

struct bps_memory;

/* One unanswered request on the control channel; embedded in who waits for it. */
struct client_call {
	TAILQ_ENTRY(client_call) link;
	bool pending;	    /* in client->calls.list */
	uint64_t id;	    /* 0: not sent, or sent to a daemon that is gone */
	int expects;	    /* body of a good answer */
	int64_t timeout_ns; /* for the answer, since it was sent; 0: CLIENT_ANSWER_NS */
	int64_t deadline_ns;
	bool done;
	int status;
	char text[ERROR_TEXT_MAX + 1];
	/* Set before the call, or NULL; runs (locked) once when it is done, also by the loss of the daemon. */
	void (*answered)(struct bps_client *client, struct client_call *call);
	/* What the answer said, by kind of call; zero if it failed. */
	struct {
		uint32_t version;
		uint64_t features;
		uint64_t daemon;
		uint64_t resume_timeout_ms;
		uint64_t shm_len;
		uint64_t job;
		uint32_t n_servers;
		int ledger; /* -1, or owned by `answered` */
		uint32_t membership, rank, size, local_rank, local_size, node, n_nodes;
		bool has_terms; /* and what they are, for a newcomer */
		uint32_t min_servers, min_ranks, max_ranks, gpu_reduce;
		uint64_t gpu_roots;
		int64_t request_timeout_ms;
		uint64_t key;
		uint32_t part_bytes;	   /* of terms or of a tensor */
		struct bps_status *status; /* set after it is sent: to be filled in */
	} answer;
};

/* A packet that did not fit into the socket yet. */
struct client_packet {
	TAILQ_ENTRY(client_packet) link;
	void *data;
	size_t len;
	int fd; /* owned, or -1 */
};

/* What is asked of the daemon over the socket. */
struct client_calls {
	uint64_t next;
	TAILQ_HEAD(, client_call) list;
	TAILQ_HEAD(, client_packet) outbox;
	uint64_t n_packets, n_packets_sent;
	struct client_call asked; /* Status */
};

/*
 * Each sends one request, or queues it when the socket is full, and puts call (NULL: nobody wants the answer) among
 * those that wait for an answer. Where the session is not as far as that yet, nothing is sent: session.c does it later.
 * 0, -ENOMEM, or the sticky failure. call_join(), call_resume() and call_leave() are about client->job, call_follow() about client->follow.
 */
int call_hello(struct bps_client *client, struct client_call *call);
int call_join(struct bps_client *client);
int call_resume(struct bps_client *client);
int call_leave(struct bps_client *client);
int call_regroup(struct bps_client *client);
int call_follow(struct bps_client *client, struct client_call *call);
int call_share(struct bps_client *client, struct bps_memory *memory);
int call_status(struct bps_client *client, struct bps_status *ret);
int call_unshare(struct bps_client *client, struct client_call *call, uint32_t number);
/* failed: of the rounds up to tensor->settled, as Declare says it. */
int call_declare(struct bps_client *client, struct client_call *call,
		 const struct bps_tensor *tensor, uint64_t failed);
int call_release(struct bps_client *client, struct client_call *call, uint32_t number, bool in_use);
int call_cancel(struct bps_client *client, const struct bps_request *request);
int call_blocked(struct bps_client *client, const struct bps_request *request, bool over);

/*
 * Waits for the answer; without one within the call's timeout, or until limit_ns, the daemon is not to be trusted. Time
 * without a daemon does not count for the timeout. Returns its status. (locked, may wait)
 */
int call_wait(struct bps_client *client, struct client_call *call, int64_t limit_ns);

/* Waits until the packet of that number has left. 0 or the sticky failure. (locked, may wait) */
int call_flush(struct bps_client *client, uint64_t packet);

void call_forget(struct bps_client *client, struct client_call *call);
void call_finish(struct bps_client *client, struct client_call *call, int status, const char *text);
void call_finish_all(struct bps_client *client, int status, const char *text);
/* The daemon is gone: what was sent is unsent, what is queued is dropped. Unanswered calls stay so. */
void call_unsend_all(struct bps_client *client);

/* Sends what is queued; receives and handles what has come. True when something changed. */
void call_send_queued(struct bps_client *client);
bool call_receive(struct bps_client *client);

/* For the handshake: -EAGAIN while there is none, else the status of call; three descriptors if it is 0. */
int call_receive_welcome(struct bps_client *client, struct client_call *call, int fds[3]);
