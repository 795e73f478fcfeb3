/*
 * gRPC, fenced in: the only place that includes its headers, the only thread that touches its completion queue.
 * Messages are bytes here; who calls packs and unpacks them. gRPC is started at the first server or channel and shut
 * down with the last, so a daemon that nobody asks over gRPC has none of its threads.
 *
 * All functions and callbacks belong to the thread of the loop given at creation. What another thread of gRPC's finishes
 * comes to the loop through an eventfd; nothing here waits for the network, but rpc_free() and rpc_channel_drain().
 */
#pragma once

#include "base/error.h"
#include "base/list.h"
#include "base/loop/loop.h"
#include "proto/c.h"

#define RPC_MESSAGE_MAX (4u << 20)
/* Of a request, but to a door of the cluster: whoever reaches a port can have gRPC hold half of one. */
#define RPC_REQUEST_MAX (64u << 10)

struct rpc;
struct rpc_call; /* server side: one call of a remote client */

struct rpc_tls {
	const char *ca, *cert, *key; /* PEM files */
};

/* What we listen on is a door, or several in one; each method is for those who come by some of them. */
enum rpc_door {
	RPC_DOOR_PUBLIC = 1,	/* whoever reaches it */
	RPC_DOOR_OPERATORS = 2, /* the admin socket, and TCP with mutual TLS */
	RPC_DOOR_CLUSTER = 4,	/* daemons */
};

/* A method this daemon serves. path: "/bps.admin.Admin/Status". */
struct rpc_method {
	const char *path;
	unsigned doors; /* bits of enum rpc_door; others refuse it with -EACCES. 0: all serve it */
	/* Answer with rpc_call_reply() or rpc_call_fail(), now or later; a stream with rpc_call_send() first. */
	void (*called)(void *user, struct rpc_call *call, const void *data, size_t len);
	/* Optional: the client went away, or its deadline passed, before the answer. The call is dead after it. */
	void (*cancelled)(void *user, struct rpc_call *call);
	void *user;
	struct list link;
};

int rpc_new(struct loop *loop, struct rpc **ret_rpc);
/* Stops listening and ends every call we serve (cancelled() comes for those that have it, then they are dead). Our own
 * requests to others go on until their channel is freed. Idempotent; does not wait. */
void rpc_close(struct rpc *rpc);
/* After all channels have been freed; waits for gRPC's threads. Not from one of our callbacks. */
struct rpc *rpc_free(struct rpc *rpc);
DEFINE_CLEANUP(struct rpc *, rpc_free)
struct loop *rpc_loop(const struct rpc *rpc);
/* Whether gRPC's threads exist. */
bool rpc_running(const struct rpc *rpc);

/* Before the first listen. The method stays the caller's and outlives rpc. */
void rpc_add_method(struct rpc *rpc, struct rpc_method *method);
/* host:port, port 0 picks one; tls NULL: plaintext. Returns 0 and the bound port, or -errno with a failure. */
int rpc_listen(struct rpc *rpc, const char *address, unsigned doors, const struct rpc_tls *tls,
	       uint16_t *ret_port, struct failure *failure);
/* A Unix socket that we accept on ourselves, a door for operators: gRPC starts when somebody connects, and stops
 * RPC_UNIX_IDLE_MS after the last has gone. group: who may connect beside this process's user and root (mode 0660); without one
 * (NULL or ""), or one that it cannot be given to, which is logged, it is theirs alone (0600). listen_fd: already listening (socket
 * activation), or -1; taken in either case. A socket that a dead daemon left behind at path is replaced, a live one's is not
 * (-EADDRINUSE). Once for each rpc. */
#define RPC_UNIX_IDLE_MS     10000u
#define RPC_UNIX_CONNECTIONS 64u /* more are closed at once */
int rpc_listen_unix(struct rpc *rpc, const char *path, const char *group, int listen_fd,
		    struct failure *failure);
/* Another time than RPC_UNIX_IDLE_MS; before anybody has connected. */
void rpc_set_unix_idle_ms(struct rpc *rpc, unsigned idle_ms);

/*
 * Answering: reply, end and fail are the last thing done with a call, also when its client has gone meanwhile. A client
 * that reads a stream more slowly than RPC_QUEUE_MAX messages is cut off: cancelled() comes.
 */
#define RPC_QUEUE_MAX 64u
#define RPC_CALLS_MAX 4096u /* served at once for each thing listened on; more are refused */
/* Of these, without a message: beyond so many, or after so long, the oldest is cancelled. */
#define RPC_SILENT_MAX 256u
#define RPC_SILENT_MS  10000u
/* Over TCP, of clients whose certificate is not known: from one address (base/source.h) as many messages come at once; other calls
 * from there wait for them. */
#define RPC_RECEIVING_OF_ONE 4u
/* Without TLS, connections from one address and in all: more are closed at once. */
#define RPC_TCP_OF_ONE	    64u
#define RPC_TCP_CONNECTIONS 4096u
/* With TLS, until a client has made its first call: beyond so many, a new one takes the place of any of them. */
#define RPC_TLS_OF_ONE	    256u
#define RPC_TLS_CONNECTIONS 1024u
void rpc_call_reply(struct rpc_call *call, const void *data, size_t len);
void rpc_call_end(struct rpc_call *call); /* ends a stream in good order */
void rpc_call_send(struct rpc_call *call, const void *data,
		   size_t len); /* one message of a server stream; queued */
void rpc_call_fail(struct rpc_call *call, int status,
		   const char *text); /* status: negative errno */
/* Where it comes from, "ipv4:10.0.0.1:4711": the same for all calls of one connection, and for no other that is open. */
#define RPC_PEER_MAX 96
void rpc_call_peer(const struct rpc_call *call, char ret_peer[RPC_PEER_MAX]);
/* Whether its client's certificate has the name: as its common name, or among its subject alternative names. */
bool rpc_call_is_named(const struct rpc_call *call, const char *name);
void rpc_call_set_user(struct rpc_call *call, void *user);
void *rpc_call_user(struct rpc_call *call);

/* Client side. */
struct rpc_channel;
/*
 * address: host:port, or unix:/path. Connects with the first request. An attempt to connect, up to the other end's first
 * words, ends after connect_ms and its requests with -ECONNREFUSED; 0: it may take as long as they do. -errno comes with a
 * failure (unreadable PEM).
 */
int rpc_channel_new(struct rpc *rpc, const char *address, uint64_t connect_ms,
		    const struct rpc_tls *tls, struct failure *failure,
		    struct rpc_channel **ret_channel);
/*
 * Another, by the credentials of one that there is: their files are not read again, which this process may no longer be
 * allowed to.
 */
int rpc_channel_new_like(struct rpc_channel *channel, const char *address, struct failure *failure,
			 struct rpc_channel **ret_channel);
struct rpc_channel *
rpc_channel_free(struct rpc_channel *channel); /* its requests end with -ECANCELED first */
DEFINE_CLEANUP(struct rpc_channel *, rpc_channel_free)
/* Waits until all unary requests have ended, for at most timeout_ms: a farewell on the way out, after rpc_close(). */
void rpc_channel_drain(struct rpc_channel *channel, unsigned timeout_ms);

/* A request; embedded in its user; belongs to rpc from start until done(), which comes exactly once, from the loop. */
struct rpc_request {
	const char *path;
	const void *data; /* copied at start */
	size_t len;
	uint64_t deadline_ms; /* from now; 0: none (streams) */
	bool stream;	      /* server streaming: message() for each, then done() */
	bool keep_open; /* a method that streams both ways: our side is not ended after the first message */
	void (*message)(struct rpc_request *request, const void *data, size_t len);
	/*
	 * status 0 with the reply (unary), or a negative errno and text: what rpc_call_fail() was given at the other
	 * end, as far as gRPC's sixteen codes can tell; -ECONNREFUSED when it cannot be reached, -ETIMEDOUT, -ECANCELED.
	 */
	void (*done)(struct rpc_request *request, int status, const char *text, const void *data,
		     size_t len);
	/* rpc's */
	void *private;
	struct list link;
};
void rpc_request_start(struct rpc_channel *channel, struct rpc_request *request);
/* done() comes soon, with -ECANCELED unless the answer was quicker. Harmless after done(). */
void rpc_request_cancel(struct rpc_request *request);
