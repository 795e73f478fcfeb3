/*
 * What the files of this module share: gRPC's library started and stopped by use, its one thread, and the way its
 * completions take to the loop. Private to the module.
 *
 *	STOPPED --rpc_engine_start()--> STARTING --thread is up--> RUNNING --last user gone--> STOPPING --thread ended--> STOPPED
 *
 * The thread initialises the library (milliseconds, so not on the loop), then does nothing but wait on the completion
 * queue and pass what it finds on; everything else is called on the loop's thread. A user is a grpc_server or a
 * grpc_channel: while there is one, the queue lives, and a user goes only after all operations of its calls are back.
 */
#pragma once

#include "rpc/rpc.h"
#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

/*
 * One operation of gRPC's: rpc_op_tag() is what it is given and gives back. Must stay until complete() was called, on the
 * loop's thread.
 */
struct rpc_op {
	void (*complete)(struct rpc_op *op, bool ok);
	/* Written by gRPC's thread, between the tag's return and complete(). */
	struct rpc_op *next;
	bool ok;
	_Atomic bool handed_over;
};

/*
 * Hands an operation to gRPC's thread. Whatever the library does to pass a tag from one thread to another, what we wrote
 * before is seen by who has loaded handed_over.
 */
static inline void *rpc_op_tag(struct rpc_op *op)
{
	atomic_store_explicit(&op->handed_over, true, memory_order_release);
	return op;
}

enum engine_state { ENGINE_STOPPED, ENGINE_STARTING, ENGINE_RUNNING, ENGINE_STOPPING };

struct rpc_unix;

struct rpc {
	struct loop *loop;
	struct loop_source source; /* the eventfd */
	enum engine_state state;
	unsigned n_users;
	bool closed;
	unsigned unix_idle_ms;
	struct list methods;
	struct list servers;
	struct list channels;
	struct rpc_unix *unix_socket;
	pthread_t thread;
	grpc_completion_queue *queue; /* valid in RUNNING */

	/* Between gRPC's thread and the loop's. */
	pthread_mutex_t lock; /* guards what follows */
	pthread_cond_t changed;
	bool up, ended;
	grpc_completion_queue *made; /* by the thread, valid once up */
	struct rpc_op *done, **done_tail;
};

/* Begins to start the library, if it is stopped. Returns 0 or -errno. */
int rpc_engine_start(struct rpc *rpc);
/* Counts a user, waiting for the library to be up (milliseconds, at start-up only). Returns 0 or -errno. */
int rpc_engine_acquire(struct rpc *rpc);
/* The user is gone, and none of its operations is out. */
void rpc_engine_release(struct rpc *rpc);
/* Makes the loop come by, also when no operation is out. */
void rpc_engine_wake(struct rpc *rpc);
/* Waits for completions, at most timeout_ms (-1: for ever), and deals with them. */
void rpc_engine_turn(struct rpc *rpc, int timeout_ms);

/* serve.c: a thing we listen on. */
struct rpc_server {
	struct list link;
	struct rpc *rpc;
	unsigned doors;
	grpc_server *server;
	bool closing;	    /* shut down has begun */
	bool down;	    /* and ended */
	unsigned n_calls;   /* that exist, those waiting for a client included */
	unsigned n_waiting; /* of these, for a client */
	unsigned n_open;    /* of these, that a client made */
	struct list open;
	struct list silent; /* of these, those whose message has not come: the oldest first */
	unsigned n_silent;
	struct loop_timer silence; /* while there are some */
	struct rpc_tcp *tcp;	   /* NULL: the Unix socket */
	struct rpc_op shutdown;
	void (*gone)(void *user); /* optional: last thing, when it has been freed */
	void *user;
};

/* Makes a server and counts it as a user; the library must be running. Then ports are added; then it is started. */
int rpc_server_new(struct rpc *rpc, unsigned doors, struct rpc_server **ret_server);
int rpc_server_start(struct rpc_server *server);
/* Ends all its calls; it frees itself when they are back. Idempotent. */
void rpc_server_close(struct rpc_server *server);

/* serve.c: "host:port" or "[host]:port" to the two; the host may be empty. Returns 0 or -EINVAL. */
int rpc_address_split(const char *address, char *ret_host, size_t size, const char **ret_port);

/*
 * tcp.c: connections over TCP, accepted by ourselves: gRPC takes as many as come. The server is made and not started yet. Port 0
 * picks one; tls NULL: plaintext. Returns 0, or -errno with failure filled.
 */
int rpc_tcp_listen(struct rpc_server *server, const char *address, const struct rpc_tls *tls,
		   uint16_t *ret_port, struct failure *failure);
/* peer: what gRPC calls it. What gRPC would call it if it had accepted the connection. */
const char *rpc_tcp_peer(const struct rpc_tcp *tcp, const char *peer);
/*
 * Where it comes from, as base/source.h says; "" when its connection is gone, or known. is_known: it is from now on, and is not
 * counted among those of its address.
 */
const char *rpc_tcp_source(const struct rpc_tcp *tcp, const char *peer, bool is_known);
/* Returns NULL; takes NULL. */
struct rpc_tcp *rpc_tcp_close(struct rpc_tcp *tcp);

/* unix.c: the socket we accept on ourselves. */
/* Goes on with what had to wait for the library or a server. */
void rpc_unix_proceed(struct rpc *rpc);
void rpc_unix_close(struct rpc *rpc);

/* channel.c */
/* Ends the requests that could not even be started. */
void rpc_channels_proceed(struct rpc *rpc);

#define INTEGER_ARG(name, number)                                                               \
	{                                                                                       \
		.type = GRPC_ARG_INTEGER, .key = (char *)(name), .value.integer = (int)(number) \
	}

/* convert.c: bytes, codes and credentials. */
grpc_byte_buffer *rpc_buffer_new(const void *data, size_t len);
/* Copies the bytes out, never longer than RPC_MESSAGE_MAX. Returns 0, -EMSGSIZE or -ENOMEM; *ret_data is free()d. */
int rpc_buffer_read(grpc_byte_buffer *buffer, void **ret_data, size_t *ret_len);
grpc_status_code rpc_code_of_errno(int status);
int rpc_errno_of_code(grpc_status_code code);
/* -errno comes with a failure. A client has to show a certificate of the authority's. */
int rpc_credentials_of_server(const struct rpc_tls *tls, struct failure *failure,
			      grpc_server_credentials **ret_creds);
/* NULL tls: insecure. */
int rpc_credentials_of_channel(const struct rpc_tls *tls, struct failure *failure,
			       grpc_channel_credentials **ret_creds);
/* What must be said to the library before it is started: its log goes to ours, names are looked up by the system. */
void rpc_library_prepare(void);
