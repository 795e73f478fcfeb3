/*
 * What we serve. A call is made of operations that gRPC completes in its own order: the request for it, its message,
 * its end, and one send at a time. It is freed when all of them are back and its user has let go of it.
 */
#include "rpc/engine.h"

#include "base/clock.h"
#include "base/source.h"
#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <stdio.h>

#define CALLS_WAITING \
	32 /* calls that gRPC may take without asking us; each is replaced as soon as a client has it */

struct outgoing {
	struct list link;
	grpc_byte_buffer *buffer;
};

struct rpc_call {
	struct list link;      /* of server->open */
	struct list silent;    /* of server->silent */
	uint64_t since_ns;     /* in that */
	char from[SOURCE_MAX]; /* "": from anywhere */
	bool receiving;	       /* its message; else it waits until others from there have theirs */
	struct rpc_server *server;
	struct rpc_method *method;
	grpc_call *call;
	grpc_call_details details;
	grpc_metadata_array metadata;
	struct rpc_op requested, received, closed, sent;
	grpc_byte_buffer *message;
	int cancelled;
	unsigned n_ops;
	bool held; /* by the user, who has yet to answer or to be told that it is cancelled */
	bool over; /* gRPC has told its end: what is sent goes nowhere */
	bool metadata_sent; /* the first thing to be sent */
	bool sending;
	bool status_sent;
	struct list outgoing;
	unsigned n_outgoing;
	grpc_byte_buffer *out; /* being sent */
	bool ending;	       /* send the status once outgoing is empty */
	grpc_status_code code;
	grpc_slice text;
	void *user;
};

static void receive_next(struct rpc_server *server, const char *from);

static void call_heard(struct rpc_call *call)
{
	if (!list_linked(&call->silent))
		return;
	list_remove(&call->silent);
	call->server->n_silent--;
	receive_next(call->server, call->from);
}

static void call_drop_outgoing(struct rpc_call *call)
{
	struct outgoing *outgoing, *next;

	list_for_each_safe (outgoing, next, &call->outgoing, link) {
		grpc_byte_buffer_destroy(outgoing->buffer);
		free(outgoing);
	}
	list_init(&call->outgoing);
	call->n_outgoing = 0;
}

static void server_top_up(struct rpc_server *server);

static void server_settle(struct rpc_server *server)
{
	struct rpc *rpc = server->rpc;

	if (!server->down || server->n_calls)
		return;
	loop_timer_cancel(&server->silence);
	grpc_server_destroy(server->server);
	list_remove(&server->link);
	if (server->gone)
		server->gone(server->user);
	free(server);
	rpc_engine_release(rpc);
}

/* Frees the call if nothing needs it any more. */
static void call_settle(struct rpc_call *call)
{
	struct rpc_server *server = call->server;

	if (call->n_ops || call->held)
		return;
	call_drop_outgoing(call);
	call_heard(call);
	if (call->message)
		grpc_byte_buffer_destroy(call->message);
	if (list_linked(&call->link)) {
		list_remove(&call->link);
		server->n_open--;
	}
	if (call->call)
		grpc_call_unref(call->call);
	grpc_call_details_destroy(&call->details);
	grpc_metadata_array_destroy(&call->metadata);
	grpc_slice_unref(call->text);
	free(call);
	server->n_calls--;
	server_top_up(server);
	server_settle(server);
}

static void call_start(struct rpc_call *call, struct rpc_op *tag, const grpc_op *ops, size_t n_ops)
{
	_unused_ grpc_call_error e =
		grpc_call_start_batch(call->call, ops, n_ops, rpc_op_tag(tag), NULL);

	assert(e == GRPC_CALL_OK); /* anything else is a misuse of the library */
	call->n_ops++;
}

/* Sends what comes next, if nothing is on its way. */
static void call_send_next(struct rpc_call *call)
{
	struct outgoing *outgoing = list_first(&call->outgoing, struct outgoing, link);
	grpc_op ops[3] = { 0 };
	size_t n = 0;

	if (call->sending || call->status_sent || (!outgoing && !call->ending))
		return;
	if (!call->metadata_sent)
		ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
	call->metadata_sent = true;
	if (outgoing) {
		call->out = outgoing->buffer;
		list_remove(&outgoing->link);
		free(outgoing);
		call->n_outgoing--;
		ops[n].op = GRPC_OP_SEND_MESSAGE;
		ops[n++].data.send_message.send_message = call->out;
	}
	if (call->ending && list_empty(&call->outgoing)) {
		ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
		ops[n].data.send_status_from_server.status = call->code;
		ops[n++].data.send_status_from_server.status_details = &call->text;
		call->status_sent = true;
	}
	call->sending = true;
	call_start(call, &call->sent, ops, n);
}

static void on_sent(struct rpc_op *op, bool ok)
{
	struct rpc_call *call = container_of(op, struct rpc_call, sent);

	call->n_ops--;
	call->sending = false;
	if (call->out)
		grpc_byte_buffer_destroy(call->out);
	call->out = NULL;
	if (ok && !call->over)
		call_send_next(call);
	call_settle(call);
}

/* Ends the call from our side, whatever else was meant for it. */
static void call_abort(struct rpc_call *call)
{
	(void)grpc_call_cancel(call->call, NULL);
}

static void call_finish(struct rpc_call *call, grpc_status_code code, const char *text)
{
	if (!call->over) {
		call->ending = true;
		call->code = code;
		call->text = grpc_slice_from_copied_string(text);
		call_send_next(call);
	}
}

static void call_let_go(struct rpc_call *call)
{
	call->held = false;
	call_settle(call);
}

static void call_queue(struct rpc_call *call, const void *data, size_t len)
{
	struct outgoing *outgoing;

	if (call->over)
		return;
	outgoing = call->n_outgoing < RPC_QUEUE_MAX ? malloc(sizeof(*outgoing)) : NULL;
	if (!outgoing) {
		call_abort(call);
		return;
	}
	outgoing->buffer = rpc_buffer_new(data, len);
	list_push_back(&call->outgoing, &outgoing->link);
	call->n_outgoing++;
}

void rpc_call_reply(struct rpc_call *call, const void *data, size_t len)
{
	call_queue(call, data, len);
	call_finish(call, GRPC_STATUS_OK, "");
	call_let_go(call);
}

void rpc_call_send(struct rpc_call *call, const void *data, size_t len)
{
	call_queue(call, data, len);
	if (!call->over)
		call_send_next(call);
}

void rpc_call_end(struct rpc_call *call)
{
	call_finish(call, GRPC_STATUS_OK, "");
	call_let_go(call);
}

void rpc_call_fail(struct rpc_call *call, int status, const char *text)
{
	call_finish(call, rpc_code_of_errno(status), text);
	call_let_go(call);
}

void rpc_call_peer(const struct rpc_call *call, char ret_peer[RPC_PEER_MAX])
{
	char *peer = grpc_call_get_peer(call->call);

	(void)snprintf(ret_peer, RPC_PEER_MAX, "%s",
		       peer && call->server->tcp ? rpc_tcp_peer(call->server->tcp, peer)
						 : peer ?: "nowhere");
	gpr_free(peer);
}

/* Whether the client has shown a certificate that our authority has signed. */
static bool is_authenticated(const struct rpc_call *call)
{
	grpc_auth_context *context = grpc_call_auth_context(call->call);
	bool has_shown = context && grpc_auth_context_peer_is_authenticated(context);

	grpc_auth_context_release(context);
	return has_shown;
}

/* Where we have not accepted ourselves, clients are the operator's. */
static void call_source(const struct rpc_call *call, char ret_source[SOURCE_MAX])
{
	char *peer = call->server->tcp ? grpc_call_get_peer(call->call) : NULL;

	(void)snprintf(ret_source, SOURCE_MAX, "%s",
		       peer ? rpc_tcp_source(call->server->tcp, peer, is_authenticated(call)) : "");
	gpr_free(peer);
}

static bool has_property(const grpc_auth_context *context, const char *property, const char *value)
{
	grpc_auth_property_iterator at =
		grpc_auth_context_find_properties_by_name(context, property);
	const grpc_auth_property *found;

	while ((found = grpc_auth_property_iterator_next(&at)))
		if (found->value_length == strlen(value) &&
		    !memcmp(found->value, value, found->value_length))
			return true;
	return false;
}

bool rpc_call_is_named(const struct rpc_call *call, const char *name)
{
	grpc_auth_context *context = grpc_call_auth_context(call->call);
	bool is_named = is_authenticated(call) &&
			(has_property(context, GRPC_X509_CN_PROPERTY_NAME, name) ||
			 has_property(context, GRPC_X509_SAN_PROPERTY_NAME, name));

	grpc_auth_context_release(context);
	return is_named;
}

void rpc_call_set_user(struct rpc_call *call, void *user)
{
	call->user = user;
}

void *rpc_call_user(struct rpc_call *call)
{
	return call->user;
}

/* The user hears that the call is dead; without a way to hear, it goes on holding it until it answers. */
static void call_cancelled(struct rpc_call *call)
{
	if (!call->held || !call->method->cancelled)
		return;
	call->held = false;
	call->method->cancelled(call->method->user, call);
}

static void on_closed(struct rpc_op *op, bool ok)
{
	struct rpc_call *call = container_of(op, struct rpc_call, closed);

	call->n_ops--;
	call->over = true;
	call_drop_outgoing(call);
	if (call->cancelled)
		call_cancelled(call);
	call_settle(call);
}

static struct rpc_method *method_of(struct rpc_call *call)
{
	struct rpc_method *method;

	list_for_each (method, &call->server->rpc->methods, link)
		if (!grpc_slice_str_cmp(call->details.method, method->path))
			return method;
	return NULL;
}

static bool is_for_others(const struct rpc_call *call)
{
	return call->method->doors && !(call->method->doors & call->server->doors);
}

static void on_received(struct rpc_op *op, bool ok)
{
	struct rpc_call *call = container_of(op, struct rpc_call, received);
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;

	call->n_ops--;
	call_heard(call);
	call->method = method_of(call);
	if (call->over) {
		/* Its client has gone already. */
	} else if (!ok || !call->message) {
		call_finish(call, GRPC_STATUS_INVALID_ARGUMENT, "a call without a message");
	} else if (call->server->closing) {
		call_finish(call, GRPC_STATUS_UNAVAILABLE, "the daemon is stopping");
	} else if (!call->method) {
		call_finish(call, GRPC_STATUS_UNIMPLEMENTED, "no such method here");
	} else if (is_for_others(call)) {
		call_finish(call, rpc_code_of_errno(-EACCES),
			    "not for those who come this way: operators have the admin socket, and "
			    "admin_listen with mutual TLS");
	} else if (rpc_buffer_read(call->message, &data, &len)) {
		call_finish(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory");
	} else {
		grpc_byte_buffer_destroy(call->message);
		call->message = NULL;
		call->held = true;
		call->method->called(call->method->user, call, data, len);
		return; /* it may be gone */
	}
	call_settle(call);
}

/* Returns when there is none, or the oldest has time left. */
static void end_silent(struct rpc_server *server)
{
	uint64_t now_ns = clock_now_ns();
	struct rpc_call *call;

	while ((call = list_first(&server->silent, struct rpc_call, silent))) {
		uint64_t until_ns = call->since_ns + RPC_SILENT_MS * NSEC_PER_MSEC;

		if (server->n_silent <= RPC_SILENT_MAX && now_ns < until_ns) {
			/* Without memory it is looked at when the next comes. */
			(void)loop_timer_set(server->rpc->loop, &server->silence, until_ns);
			return;
		}
		call_heard(call);
		call_abort(call);
	}
	loop_timer_cancel(&server->silence);
}

static void on_silence(struct loop_timer *timer)
{
	end_silent(container_of(timer, struct rpc_server, silence));
}

/*
 * gRPC lets a client send a window of a stream before its message is asked for, and all of it from then
 * on. Calls from one address take turns, so that what is half here of their messages is bounded.
 */
static void receive_next(struct rpc_server *server, const char *from)
{
	grpc_op receive = { .op = GRPC_OP_RECV_MESSAGE };
	struct rpc_call *call, *next = NULL;
	unsigned n = 0;

	list_for_each (call, &server->silent, silent) {
		if (strcmp(call->from, from))
			continue;
		n += call->receiving;
		if (!next && !call->receiving)
			next = call;
	}
	if (!next || (*from && n >= RPC_RECEIVING_OF_ONE))
		return;
	next->receiving = true;
	receive.data.recv_message.recv_message = &next->message;
	call_start(next, &next->received, &receive, 1);
}

/* Its headers cost more than what they said: it is to go on soon, and until then is one of few. */
static void call_awaited(struct rpc_call *call)
{
	struct rpc_server *server = call->server;

	call_source(call, call->from);
	call->since_ns = clock_now_ns();
	list_push_back(&server->silent, &call->silent);
	server->n_silent++;
	receive_next(server, call->from);
	if (server->n_silent > RPC_SILENT_MAX || !server->silence.loop)
		end_silent(server);
}

static void on_requested(struct rpc_op *op, bool ok)
{
	struct rpc_call *call = container_of(op, struct rpc_call, requested);
	grpc_op close = { .op = GRPC_OP_RECV_CLOSE_ON_SERVER,
			  .data.recv_close_on_server.cancelled = &call->cancelled };

	call->n_ops--;
	call->server->n_waiting--;
	if (!ok) {
		call_settle(call);
		return;
	}
	server_top_up(call->server);
	list_push_back(&call->server->open, &call->link);
	call->server->n_open++;
	call_start(call, &call->closed, &close, 1);
	if (call->server->n_open > RPC_CALLS_MAX) {
		call_finish(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "too many calls at once");
		return;
	}
	call_awaited(call);
}

/* Lets gRPC take one more call. */
static int server_request(struct rpc_server *server)
{
	_unused_ grpc_call_error e;
	struct rpc_call *call;

	call = calloc(1, sizeof(*call));
	if (!call)
		return error_origin(-ENOMEM);
	*call = (struct rpc_call){
		.server = server,
		.requested.complete = on_requested,
		.received.complete = on_received,
		.closed.complete = on_closed,
		.sent.complete = on_sent,
		.n_ops = 1,
		.text = grpc_empty_slice(),
	};
	list_init(&call->link);
	list_init(&call->silent);
	list_init(&call->outgoing);
	grpc_call_details_init(&call->details);
	grpc_metadata_array_init(&call->metadata);
	server->n_calls++;
	server->n_waiting++;
	e = grpc_server_request_call(server->server, &call->call, &call->details, &call->metadata,
				     server->rpc->queue, server->rpc->queue,
				     rpc_op_tag(&call->requested));
	assert(e == GRPC_CALL_OK);
	return 0;
}

/* Out of memory, it is tried again when a call has ended. */
static void server_top_up(struct rpc_server *server)
{
	while (!server->closing && server->n_waiting < CALLS_WAITING)
		if (server_request(server))
			return;
}

static void on_shutdown(struct rpc_op *op, bool ok)
{
	struct rpc_server *server = container_of(op, struct rpc_server, shutdown);

	server->down = true;
	server_settle(server);
}

int rpc_server_new(struct rpc *rpc, unsigned doors, struct rpc_server **ret_server)
{
	/*
	 * Connections that serve nothing are closed, dead ones are found by pings. Clients may ping as we do
	 * ourselves. A stream's window stays as it is, however fast its client sends: it is what we hold before we ask
	 * for its message.
	 */
	grpc_arg values[] = {
		INTEGER_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
			    doors & RPC_DOOR_CLUSTER ? RPC_MESSAGE_MAX : RPC_REQUEST_MAX),
		INTEGER_ARG(GRPC_ARG_MAX_CONCURRENT_STREAMS, 128),
		INTEGER_ARG(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 60000),
		INTEGER_ARG(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10000),
		INTEGER_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, 20000),
		INTEGER_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000),
		INTEGER_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
		INTEGER_ARG(GRPC_ARG_HTTP2_BDP_PROBE, 0),
		INTEGER_ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000),
	};
	grpc_channel_args args = { ARRAY_SIZE(values), values };
	_cleanup_(freep) struct rpc_server *server = calloc(1, sizeof(*server));
	int r;

	if (!server)
		return error_origin(-ENOMEM);
	r = rpc_engine_acquire(rpc);
	if (r)
		return error_trace(r);
	server->rpc = rpc;
	server->doors = doors;
	server->shutdown.complete = on_shutdown;
	server->silence.expired = on_silence;
	list_init(&server->open);
	list_init(&server->silent);
	server->server = grpc_server_create(&args, NULL);
	grpc_server_register_completion_queue(server->server, rpc->queue, NULL);
	list_push_back(&rpc->servers, &server->link);
	*ret_server = TAKE_PTR(server);
	return 0;
}

int rpc_server_start(struct rpc_server *server)
{
	grpc_server_start(server->server);
	server_top_up(server);
	return server->n_waiting ? 0 : error_origin(-ENOMEM);
}

void rpc_server_close(struct rpc_server *server)
{
	struct rpc_call *call, *next;

	if (server->closing)
		return;
	server->closing = true;
	server->tcp = rpc_tcp_close(server->tcp);
	list_for_each_safe (call, next, &server->open, link) {
		call->over = true;
		call_drop_outgoing(call);
		call_cancelled(call);
		call->held = false;
		call_abort(call);
	}
	grpc_server_shutdown_and_notify(server->server, server->rpc->queue,
					rpc_op_tag(&server->shutdown));
	grpc_server_cancel_all_calls(server->server);
}

int rpc_address_split(const char *address, char *ret_host, size_t size, const char **ret_port)
{
	const char *colon = strrchr(address, ':');
	size_t n = colon ? (size_t)(colon - address) : 0;

	if (!colon || n >= size)
		return -EINVAL;
	if (n >= 2 && *address == '[' && colon[-1] == ']') {
		address++;
		n -= 2;
	}
	memcpy(ret_host, address, n);
	ret_host[n] = '\0';
	*ret_port = colon + 1;
	return 0;
}

int rpc_listen(struct rpc *rpc, const char *address, unsigned doors, const struct rpc_tls *tls,
	       uint16_t *ret_port, struct failure *failure)
{
	struct rpc_server *server;
	int r, started;

	assert(!rpc->closed);
	/* Its library must be up before credentials can be made. */
	r = rpc_server_new(rpc, doors, &server);
	if (r)
		return failure_set(failure, r, "%s: %s", address, strerror(-r));
	r = rpc_tcp_listen(server, address, tls, ret_port, failure);
	/* It is started whatever comes of it: so it is closed like any. */
	started = rpc_server_start(server);
	if (!r && started)
		r = failure_set(failure, started, "%s: %s", address, strerror(-started));
	if (r)
		rpc_server_close(server);
	return r;
}
