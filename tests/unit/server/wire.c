/*
 * The real transport as carrier: over TCP (WIRE_TCP 1), each end a transport of its own that connects to the server's;
 * or within the process (WIRE_TCP 0), where all ends are the server's own daemon.
 */
#include "far.h"

#include "transport/transport.h"

struct end {
	struct far *far;
	unsigned number;
	struct transport *transport; /* NULL within the process */
	struct peer *server;	     /* NULL once lost */
};

struct wire {
	struct transport *transport; /* the server's */
	struct end ends[FAR_ENDS];
};

struct wire_call {
	struct call call;
	struct asked *asked;
	void *target;
};

static void on_call(void *user, struct delivery *delivery)
{
	struct far *far = user;

	server_call_arrived(far->server, delivery);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct far *far = user;

	server_notice_arrived(far->server, peer, header, payload);
}

static void on_lost(void *user, struct peer *peer, const char *why)
{
	struct far *far = user;

	if (far->server)
		server_peer_lost(far->server, peer, why);
}

static const struct transport_ops server_ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_lost,
};

static void end_on_call(void *user, struct delivery *delivery)
{
	delivery_fail(delivery, -EOPNOTSUPP, "an agent");
}

static void end_on_notice(void *user, struct peer *peer, const struct data_header *header,
			  const void *payload)
{
	struct end *end = user;

	ASSERT_EQ(header->op, DATA_FAIL_JOB);
	end->far->failed[end->number].n++;
	end->far->failed[end->number].job = header->job;
	end->far->failed[end->number].status = -header->status;
	(void)snprintf(end->far->failed[end->number].text, sizeof(end->far->failed[0].text), "%.*s",
		       (int)header->len, (const char *)payload);
}

static void end_on_lost(void *user, struct peer *peer, const char *why)
{
	struct end *end = user;

	end->server = NULL;
}

static const struct transport_ops end_ops = {
	.call_arrived = end_on_call,
	.notice_arrived = end_on_notice,
	.peer_lost = end_on_lost,
};

static void call_done(struct call *call)
{
	struct wire_call *w = container_of(call, struct wire_call, call);
	struct asked *asked = w->asked;

	ASSERT_TRUE(!asked->done);
	asked->done = true;
	asked->status = call->status;
	asked->answer = call->answer;
	(void)snprintf(asked->text, sizeof(asked->text), "%s", call->text);
	if (!call->status && call->answer.len) {
		asked->data = malloc(call->answer.len);
		ASSERT_TRUE(asked->data);
		memcpy(asked->data, call->answer_block ? call->answer_block->data : w->target,
		       call->answer.len);
	}
	free(w->target);
	free(w);
}

static void wire_call(struct far *far, unsigned end, struct asked *asked,
		      const struct data_header *header, const void *payload, bool in_block)
{
	struct wire *wire = far->carrier;
	struct wire_call *w = calloc(1, sizeof(*w));

	ASSERT_TRUE(w && wire->ends[end].server);
	w->asked = asked;
	w->call.header = *header;
	w->call.done = call_done;
	if (header->len && in_block) {
		ASSERT_OK(block_new(far->blocks, header->len, NULL, &w->call.payload_block));
		w->call.payload = memcpy(w->call.payload_block->data, payload, header->len);
	} else if (header->len) {
		asked->payload = malloc(header->len);
		w->call.payload = memcpy(asked->payload, payload, header->len);
	}
	if (header->op == DATA_PUSH && far->n_calls % 3) {
		w->target = w->call.target = malloc(MAX(header->part_len, 1u));
		w->call.target_len = header->part_len;
	}
	peer_call(wire->ends[end].server, &w->call);
}

static void wire_notice(struct far *far, unsigned end, const struct data_header *header,
			const void *payload)
{
	struct wire *wire = far->carrier;

	ASSERT_OK(peer_notice(wire->ends[end].server, header, payload));
}

/* A call that is last in line on each end: when it is answered, all before it have been taken in. */
static void wire_settle(struct far *far)
{
	struct data_header header = { .op = DATA_JOIN, .priority = INT32_MIN };
	struct wire *wire = far->carrier;

	for (unsigned i = 0; i < FAR_ENDS; i++) {
		if (wire->ends[i].server)
			far_expect(far, far_call(far, i, &header, NULL), -EPROTO, "not a JobJoin");
	}
	while (pool_pending(far->pool))
		ASSERT_OK(loop_turn(far->loop, 1000));
}

static void wire_free(struct far *far)
{
	struct wire *wire = far->carrier;

	for (unsigned i = 0; i < FAR_ENDS; i++) {
		if (wire->ends[i].transport)
			transport_close(wire->ends[i].transport);
	}
	transport_close(wire->transport);
	for (unsigned i = 0; i < FAR_ENDS; i++)
		transport_free(wire->ends[i].transport);
	transport_free(wire->transport);
	free(wire);
}

static const struct far_ops wire_ops = {
	.call = wire_call,
	.notice = wire_notice,
	.settle = wire_settle,
	.free = wire_free,
};

static struct transport_params params_of(struct far *far, uint64_t id)
{
	return (struct transport_params){
		.loop = far->loop,
		.blocks = far->blocks,
		.id = id,
		.listen_fd = -1,
		.key = "secret of the cluster",
		.key_len = 21,
		.n_lanes = 1,
		.max_connections = 64,
		.handshake_timeout_ms = 10000,
		.peer_timeout_ms = 30000,
		.quota_bytes = 64 << 20,
	};
}

static void open_end(struct far *far, struct end *end, unsigned number)
{
	struct wire *wire = far->carrier;
	struct transport_params params = params_of(far, 500 + number);
	char name[16], address[32];

	end->far = far;
	end->number = number;
	if (!WIRE_TCP) {
		end->server = transport_self(wire->transport);
		return;
	}
	(void)snprintf(name, sizeof(name), "end%u", number);
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", transport_port(wire->transport));
	params.ops = &end_ops;
	params.user = end;
	params.node = name;
	params.n_lanes = 1 + number % 2;
	ASSERT_OK(transport_new(&params, &end->transport));
	ASSERT_OK(transport_connect(end->transport, address, 100, &end->server));
}

struct far *far_new(const struct far_options *options)
{
	struct far *far = calloc(1, sizeof(*far));
	struct wire *wire = calloc(1, sizeof(*wire));
	struct transport_params params;

	ASSERT_TRUE(far && wire);
	far->ops = &wire_ops;
	far->carrier = wire;
	far_init(far, options);
	params = params_of(far, 100);
	params.ops = &server_ops;
	params.user = far;
	params.node = "far";
	params.listen = WIRE_TCP ? "127.0.0.1:0" : NULL;
	params.n_threads = WIRE_TCP && options ? options->n_threads : 0;
	ASSERT_OK(transport_new(&params, &wire->transport));
	far_start(far, options);
	for (unsigned i = 0; i < FAR_ENDS; i++)
		open_end(far, &wire->ends[i], i);
	return far;
}

bool far_ends_are_peers(void)
{
	return WIRE_TCP;
}

void far_lose(struct far *far, unsigned end)
{
	struct wire *wire = far->carrier;

	wire->ends[end].server = NULL;
	transport_close(wire->ends[end].transport);
}
