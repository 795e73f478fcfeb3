/*
 * gRPC, fenced in: the only place that includes its headers, the only thread that touches its completion queue.
 * Messages are bytes here; who calls packs and unpacks them. gRPC is started at the first server or channel and shut
 * down with the last, so a daemon that nobody asks over gRPC has none of its threads.
 *
 * All functions and callbacks belong to the thread of the loop given at creation.
 */
#pragma once

#include "base/error.h"
#include "base/loop.h"
#include "proto/c.h"

#define RPC_MESSAGE_MAX (4u << 20)

struct rpc;
struct rpc_call; /* server side: one call of a remote client */

struct rpc_tls {
	const char *ca, *cert, *key; /* PEM files */
};

/* A method this daemon serves. path: "/bps.admin.Admin/Status". */
struct rpc_method {
	const char *path;
	/* Answer with rpc_call_reply() or rpc_call_fail(), now or later; a stream with rpc_call_send() first. */
	void (*called)(void *user, struct rpc_call *call, const void *data, size_t len);
	/* Optional: the client went away, or its deadline passed, before the answer. The call is dead after it. */
	void (*cancelled)(void *user, struct rpc_call *call);
	void *user;
	struct list link;
};

int rpc_new(struct loop *loop, struct rpc **ret_rpc);
void rpc_close(struct rpc *rpc);
struct rpc *rpc_free(struct rpc *rpc); /* waits for gRPC's threads */
DEFINE_CLEANUP(struct rpc *, rpc_free)

/* Before the first listen. The method stays the caller's and outlives rpc. */
void rpc_add_method(struct rpc *rpc, struct rpc_method *method);
/* host:port; tls NULL: plaintext. Returns 0 and the bound port, or -errno with a failure. */
int rpc_listen(struct rpc *rpc, const char *address, const struct rpc_tls *tls, uint16_t *ret_port,
	       struct failure *failure);
/* A Unix socket that we accept on ourselves (mode 0660): gRPC starts when somebody connects, and stops 10 s after the
 * last has gone. listen_fd: already listening (socket activation), or -1. */
int rpc_listen_unix(struct rpc *rpc, const char *path, int listen_fd, struct failure *failure);

void rpc_call_reply(struct rpc_call *call, const void *data, size_t len);
void rpc_call_send(struct rpc_call *call, const void *data, size_t len); /* one message of a server stream; queued */
void rpc_call_fail(struct rpc_call *call, int status, const char *text); /* status: negative errno */
void rpc_call_set_user(struct rpc_call *call, void *user);
void *rpc_call_user(struct rpc_call *call);

/* Client side. */
struct rpc_channel;
int rpc_channel_new(struct rpc *rpc, const char *address, const struct rpc_tls *tls, struct rpc_channel **ret_channel);
struct rpc_channel *rpc_channel_free(struct rpc_channel *channel); /* its requests end with -ECANCELED first */

/* A request; embedded in its user; belongs to rpc from start until done(), which comes exactly once, from the loop. */
struct rpc_request {
	const char *path;
	const void *data; /* copied at start */
	size_t len;
	uint64_t deadline_ms; /* from now; 0: none (streams) */
	bool stream;	      /* server streaming: message() for each, then done() */
	void (*message)(struct rpc_request *request, const void *data, size_t len);
	/* status 0 with the reply (unary), or a negative errno and text. */
	void (*done)(struct rpc_request *request, int status, const char *text, const void *data, size_t len);
	void *private;
};
void rpc_request_start(struct rpc_channel *channel, struct rpc_request *request);
void rpc_request_cancel(struct rpc_request *request);
