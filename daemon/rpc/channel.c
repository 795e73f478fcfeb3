/* What we ask of others. One batch carries the whole of a request but the messages of a stream, which come one by one. */
#include "base/clock.h"
#include "rpc/engine.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <limits.h>

/* Between two attempts of a channel: longer than users wait before they make another channel. */
#define BACKOFF_MS 1500

/* Loop's thread only. */
struct credentials {
	unsigned refs;
	grpc_channel_credentials *creds;
};

struct rpc_channel {
	struct list link; /* of rpc->channels, until freed by its user */
	struct rpc *rpc;
	grpc_channel *channel;
	struct credentials *credentials;
	uint64_t connect_ms;
	struct list exchanges;
	struct list failed; /* requests that could not be started */
	unsigned n_exchanges;
	bool freed;
};

struct exchange {
	struct list link;
	struct rpc_channel *channel;
	struct rpc_request *request; /* NULL once its user has been told the end */
	grpc_call *call;
	struct rpc_op batch, received;
	bool receiving;
	bool ended; /* batch is back */
	grpc_byte_buffer *sent, *message;
	grpc_metadata_array initial, trailing;
	grpc_status_code code;
	grpc_slice text;
};

static void credentials_unref(struct credentials *credentials)
{
	if (--credentials->refs)
		return;
	grpc_channel_credentials_release(credentials->creds);
	free(credentials);
}

static void channel_settle(struct rpc_channel *channel)
{
	struct rpc *rpc = channel->rpc;

	if (!channel->freed || channel->n_exchanges)
		return;
	credentials_unref(channel->credentials);
	free(channel);
	rpc_engine_release(rpc);
}

static void exchange_free(struct exchange *exchange)
{
	struct rpc_channel *channel = exchange->channel;

	list_remove(&exchange->link);
	grpc_call_unref(exchange->call);
	grpc_byte_buffer_destroy(exchange->sent);
	if (exchange->message)
		grpc_byte_buffer_destroy(exchange->message);
	grpc_metadata_array_destroy(&exchange->initial);
	grpc_metadata_array_destroy(&exchange->trailing);
	grpc_slice_unref(exchange->text);
	free(exchange);
	channel->n_exchanges--;
	channel_settle(channel);
}

static struct rpc_request *take_request(struct exchange *exchange)
{
	struct rpc_request *request = TAKE_PTR(exchange->request);

	if (request)
		request->private = NULL;
	return request;
}

static void tell_end(struct exchange *exchange)
{
	struct rpc_request *request = take_request(exchange);
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;
	int status = exchange->code == GRPC_STATUS_OK ? 0 : rpc_errno_of_code(exchange->code);
	_cleanup_(freep) char *text = NULL;
	int r;

	if (!request)
		return;
	if (status) {
		text = strndup((const char *)GRPC_SLICE_START_PTR(exchange->text),
			       GRPC_SLICE_LENGTH(exchange->text));
		request->done(request, status, text && *text ? text : strerror(-status), NULL, 0);
		return;
	}
	if (request->stream) {
		request->done(request, 0, "", NULL, 0);
		return;
	}
	r = exchange->message ? rpc_buffer_read(exchange->message, &data, &len) : -EPROTO;
	request->done(request, r, r ? strerror(-r) : "", data, len);
}

static void exchange_settle(struct exchange *exchange)
{
	if (!exchange->ended || exchange->receiving)
		return;
	tell_end(exchange);
	exchange_free(exchange);
}

static void on_batch(struct rpc_op *op, bool ok)
{
	struct exchange *exchange = container_of(op, struct exchange, batch);

	exchange->ended = true;
	exchange_settle(exchange);
}

static void receive_next(struct exchange *exchange)
{
	grpc_op op = { .op = GRPC_OP_RECV_MESSAGE,
		       .data.recv_message.recv_message = &exchange->message };
	_unused_ grpc_call_error e;

	exchange->receiving = true;
	e = grpc_call_start_batch(exchange->call, &op, 1, rpc_op_tag(&exchange->received), NULL);
	assert(e == GRPC_CALL_OK);
}

static void on_received(struct rpc_op *op, bool ok)
{
	struct exchange *exchange = container_of(op, struct exchange, received);
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;

	exchange->receiving = false;
	if (!ok || !exchange->message) {
		exchange_settle(exchange);
		return;
	}
	if (rpc_buffer_read(exchange->message, &data, &len))
		(void)grpc_call_cancel(exchange->call, NULL);
	grpc_byte_buffer_destroy(TAKE_PTR(exchange->message));
	/* Started before the user is told, so that the exchange outlives whatever it does then. */
	receive_next(exchange);
	if (data && exchange->request)
		exchange->request->message(exchange->request, data, len);
}

/* All of a unary request; of a stream, all but its messages. Its completion is the end of the call. */
static void exchange_start(struct exchange *exchange)
{
	grpc_op ops[6] = { 0 };
	size_t n = 0;
	_unused_ grpc_call_error e;

	ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
	ops[n].op = GRPC_OP_SEND_MESSAGE;
	ops[n++].data.send_message.send_message = exchange->sent;
	if (!exchange->request->keep_open)
		ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
	ops[n].op = GRPC_OP_RECV_INITIAL_METADATA;
	ops[n++].data.recv_initial_metadata.recv_initial_metadata = &exchange->initial;
	ops[n].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
	ops[n].data.recv_status_on_client.trailing_metadata = &exchange->trailing;
	ops[n].data.recv_status_on_client.status = &exchange->code;
	ops[n++].data.recv_status_on_client.status_details = &exchange->text;
	if (!exchange->request->stream) {
		ops[n].op = GRPC_OP_RECV_MESSAGE;
		ops[n++].data.recv_message.recv_message = &exchange->message;
	}
	e = grpc_call_start_batch(exchange->call, ops, n, rpc_op_tag(&exchange->batch), NULL);
	assert(e == GRPC_CALL_OK);
	if (exchange->request->stream)
		receive_next(exchange);
}

static gpr_timespec deadline_of(const struct rpc_request *request)
{
	if (!request->deadline_ms)
		return gpr_inf_future(GPR_CLOCK_MONOTONIC);
	return gpr_time_add(
		gpr_now(GPR_CLOCK_MONOTONIC),
		gpr_time_from_millis((int64_t)MIN(request->deadline_ms, (uint64_t)INT32_MAX),
				     GPR_TIMESPAN));
}

void rpc_request_start(struct rpc_channel *channel, struct rpc_request *request)
{
	struct exchange *exchange = calloc(1, sizeof(*exchange));
	grpc_slice path;

	request->private = NULL;
	if (!exchange) {
		/* done() must not come before we return. */
		list_push_back(&channel->failed, &request->link);
		rpc_engine_wake(channel->rpc);
		return;
	}
	*exchange = (struct exchange){
		.channel = channel,
		.request = request,
		.batch.complete = on_batch,
		.received.complete = on_received,
		.sent = rpc_buffer_new(request->data, request->len),
		.text = grpc_empty_slice(),
	};
	grpc_metadata_array_init(&exchange->initial);
	grpc_metadata_array_init(&exchange->trailing);
	path = grpc_slice_from_copied_string(request->path);
	exchange->call = grpc_channel_create_call(channel->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
						  channel->rpc->queue, path, NULL,
						  deadline_of(request), NULL);
	grpc_slice_unref(path);
	list_push_back(&channel->exchanges, &exchange->link);
	channel->n_exchanges++;
	request->private = exchange;
	exchange_start(exchange);
}

void rpc_request_cancel(struct rpc_request *request)
{
	struct exchange *exchange = request->private;

	if (exchange)
		(void)grpc_call_cancel(exchange->call, NULL);
}

static void channel_end_one(struct rpc_channel *channel)
{
	struct rpc_request *request = list_first(&channel->failed, struct rpc_request, link);

	list_remove(&request->link);
	request->done(request, -ENOMEM, strerror(ENOMEM), NULL, 0);
}

static struct rpc_channel *channel_with_failed(struct rpc *rpc)
{
	struct rpc_channel *channel;

	list_for_each (channel, &rpc->channels, link)
		if (!list_empty(&channel->failed))
			return channel;
	return NULL;
}

void rpc_channels_proceed(struct rpc *rpc)
{
	struct rpc_channel *channel;

	/* Sought anew each time: its user may free a channel when told. */
	while ((channel = channel_with_failed(rpc)))
		channel_end_one(channel);
}

static int channel_make(struct rpc *rpc, const char *address, uint64_t connect_ms,
			struct credentials *credentials, struct failure *failure,
			struct rpc_channel **ret_channel)
{
	/*
	 * A proxy from the environment is for the web, not for us. A channel that has failed to connect does not try again
	 * before its user makes another: gRPC leaks the connection of a channel that is freed between the handshakes of TCP
	 * and of HTTP/2. What gRPC calls the least backoff is in truth the longest time that an attempt to connect may take.
	 * Pings find a coordinator whose machine is gone; no look-up of service configuration in DNS.
	 */
	int attempt_ms = connect_ms ? (int)MIN(connect_ms, (uint64_t)INT_MAX) : INT_MAX;
	grpc_arg values[] = {
		INTEGER_ARG(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
		INTEGER_ARG(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
		INTEGER_ARG(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
		INTEGER_ARG(GRPC_ARG_ENABLE_RETRIES, 0),
		INTEGER_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, RPC_MESSAGE_MAX),
		INTEGER_ARG(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MS),
		INTEGER_ARG(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, attempt_ms),
		INTEGER_ARG(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MS),
		INTEGER_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, 20000),
		INTEGER_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000),
		INTEGER_ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
	};
	grpc_channel_args args = { ARRAY_SIZE(values), values };
	_cleanup_(freep) struct rpc_channel *channel = calloc(1, sizeof(*channel));
	int r;

	if (!channel)
		return failure_set(failure, -ENOMEM, "%s: out of memory", address);
	r = rpc_engine_acquire(rpc);
	if (r)
		return failure_set(failure, r, "%s: %s", address, strerror(-r));
	channel->rpc = rpc;
	channel->credentials = credentials;
	channel->connect_ms = connect_ms;
	credentials->refs++;
	/* Never NULL: an address that cannot be used gives a channel whose requests all fail and say so. */
	channel->channel = grpc_channel_create(address, credentials->creds, &args);
	list_init(&channel->exchanges);
	list_init(&channel->failed);
	list_push_back(&rpc->channels, &channel->link);
	*ret_channel = TAKE_PTR(channel);
	return 0;
}

int rpc_channel_new(struct rpc *rpc, const char *address, uint64_t connect_ms,
		    const struct rpc_tls *tls, struct failure *failure,
		    struct rpc_channel **ret_channel)
{
	struct credentials *credentials = calloc(1, sizeof(*credentials));
	int r;

	if (!credentials)
		return failure_set(failure, -ENOMEM, "%s: out of memory", address);
	/* The library must be up before credentials can be made, and while there are any. */
	r = rpc_engine_acquire(rpc);
	if (r) {
		free(credentials);
		return failure_set(failure, r, "%s: %s", address, strerror(-r));
	}
	r = rpc_credentials_of_channel(tls, failure, &credentials->creds);
	if (r) {
		free(credentials);
	} else {
		credentials->refs = 1;
		r = channel_make(rpc, address, connect_ms, credentials, failure, ret_channel);
		credentials_unref(credentials);
	}
	rpc_engine_release(rpc);
	return r;
}

int rpc_channel_new_like(struct rpc_channel *channel, const char *address, struct failure *failure,
			 struct rpc_channel **ret_channel)
{
	return channel_make(channel->rpc, address, channel->connect_ms, channel->credentials,
			    failure, ret_channel);
}

struct rpc_channel *rpc_channel_free(struct rpc_channel *channel)
{
	struct exchange *exchange;

	if (!channel)
		return NULL;
	while (!list_empty(&channel->failed))
		channel_end_one(channel);
	list_for_each (exchange, &channel->exchanges, link) {
		struct rpc_request *request = take_request(exchange);

		(void)grpc_call_cancel(exchange->call, NULL);
		if (request)
			request->done(request, -ECANCELED, "the channel was closed", NULL, 0);
	}
	list_remove(&channel->link);
	grpc_channel_destroy(channel->channel);
	channel->freed = true;
	channel_settle(channel);
	return NULL;
}

static bool unary_under_way(const struct rpc_channel *channel)
{
	struct exchange *exchange;

	list_for_each (exchange, &channel->exchanges, link)
		if (exchange->request && !exchange->request->stream)
			return true;
	return false;
}

void rpc_channel_drain(struct rpc_channel *channel, unsigned timeout_ms)
{
	uint64_t now = clock_now_ns(), end = now + timeout_ms * NSEC_PER_MSEC;

	for (; unary_under_way(channel) && now < end; now = clock_now_ns())
		rpc_engine_turn(channel->rpc, (int)((end - now) / NSEC_PER_MSEC) + 1);
}
