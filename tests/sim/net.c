/*
 * transport/ on wires of the simulated world. A connection has some lanes: messages of one lane
 * arrive in order, those of two in any. Bytes of a call or an answer are read when they are written
 * to the wire, some time after they were posted, so that a change that comes too early is found. A
 * connection that is cut loses what would arrive after some moment, another one in each direction;
 * then each end hears of the cut. A connection to where nobody listens is tried again.
 */
#include "coverage.h"
#include "sim.h"
#include <assert.h>

#define LANES	     3 /* set-up, notices and all else that stays in order go by the first */
#define WRITE_NS     (30 * NSEC_PER_USEC)
#define WIRE_NS	     (200 * NSEC_PER_USEC)
#define CUT_NS	     (2 * NSEC_PER_MSEC)
#define DIAL_NS	     (500 * NSEC_PER_USEC)
#define BACKOFF_NS   (40 * NSEC_PER_MSEC)
#define HANDSHAKE_NS (10 * NSEC_PER_SEC)
#define SILENCE_NS   (2 * NSEC_PER_SEC)
#define SLOW_PERCENT 3 /* messages that take far longer than others */
#define SLOW_NS	     (5 * NSEC_PER_MSEC)

enum peer_kind { PEER_CALLED, PEER_CALLING, PEER_SELF };
enum peer_state { PEER_CONNECTING, PEER_UP, PEER_LOSING, PEER_LOST };
enum call_state { CALL_WAITING, CALL_QUEUED, CALL_SENT, CALL_ENDED };

struct transport {
	struct node *node;
	struct loop *loop;
	struct block_cache *blocks;
	const struct transport_ops *ops;
	void *user;
	uint64_t id;
	bool is_closed, is_dead;
	struct list peers;
	struct peer *self;
};

/* A lane that broke is as new when the connection's maker has noticed. */
struct lane_state {
	struct conn *conn;
	unsigned number, generation;
	bool is_broken;
	struct event noticed;
	struct input input;
};

struct conn {
	struct list link; /* world->conns */
	uint32_t number;
	bool is_cut;
	struct peer *ends[2];  /* the maker's, the taker's; NULL: gone */
	struct node *nodes[2]; /* their daemons */
	uint64_t written_ns[2][LANES], arrived_ns[2][LANES]; /* by who sends */
	uint64_t cut_ns[2];				     /* nothing arrives at an end later */
	struct event lost[2];				     /* an end hears of it */
	struct lane_state lanes[LANES];
};

struct peer {
	struct list link; /* transport->peers */
	struct transport *transport;
	enum peer_kind kind;
	enum peer_state state;
	struct conn *conn;
	unsigned end;
	uint64_t id, expect_id, deadline_ns;
	char address[64], name[128], node[64];
	struct list calls, waiting; /* written or to be; that wait for a connection */
	struct list notices;
	unsigned n_deliveries, n_packets, n_holds;
	uint32_t cookie;
	uint64_t next_sequence; /* of what waits for a connection */
	char why[128];
	struct event dial;
	struct input input; /* the peer is lost; or calls were made after the loss */
};

struct incoming {
	struct delivery delivery;
	struct call *call; /* made by this process, until the call is over; or NULL */
	uint32_t cookie;
	unsigned lane, generation;
};

enum packet_kind { PACKET_CALL, PACKET_ANSWER, PACKET_NOTICE };

struct packet {
	struct list link; /* notices of a peer that is not up yet */
	struct event event;
	struct input input;
	struct conn *conn;
	unsigned from, lane, generation;
	enum packet_kind kind;
	bool is_written;
	uint64_t sequence; /* while it waits for a connection */
	struct data_header header;
	struct block *block; /* an answer's, until it is written */
	void *payload;	     /* a copy, as written */
};

/* Work for a loop that is about one call. */
struct errand {
	struct input input;
	struct peer *peer;
	struct call *call;
	struct packet *notice;
};

static const char *op_name(unsigned op)
{
	static const char *const names[] = {
		[DATA_JOIN] = "JOIN",
		[DATA_ATTACH] = "ATTACH",
		[DATA_DECLARE] = "DECLARE",
		[DATA_PUSH] = "PUSH",
		[DATA_PULL] = "PULL",
		[DATA_OFFER] = "OFFER",
		[DATA_DRAIN] = "DRAIN",
		[DATA_OK] = "OK",
		[DATA_RESULT] = "RESULT",
		[DATA_ERROR] = "ERROR",
		[DATA_FAIL_ROUND] = "FAIL_ROUND",
		[DATA_FAIL_JOB] = "FAIL_JOB",
		[DATA_LEAVE] = "LEAVE",
		[DATA_ACK] = "ACK",
		[DATA_RELEASE] = "RELEASE",
		[DATA_MOVE] = "MOVE",
		[DATA_OFFERED] = "OFFERED",
		[DATA_NEWCOMERS] = "NEWCOMERS",
		[DATA_HAVE] = "HAVE",
		[DATA_LEFT] = "LEFT",
		[DATA_STOPPING] = "STOPPING",
		[DATA_IDLE] = "IDLE",
		[DATA_ORDINAL] = "ORDINAL",
		[DATA_FOLLOW] = "FOLLOW",
		[DATA_BEGUN] = "BEGUN",
		[DATA_OTHERS_FOLLOW] = "OTHERS_FOLLOW",
		[DATA_OTHERS_BEGUN] = "OTHERS_BEGUN",
	};

	return op < ARRAY_SIZE(names) && names[op] ? names[op] : "?";
}

static void peer_lose(struct peer *peer, int status, const char *why);
static void packet_send(struct packet *packet);
static void on_dial(struct event *event);
static void on_peer_input(struct input *input);

/* -- Peers ---------------------------------------------------------------------------------------------------------- */

static struct peer *peer_new(struct transport *transport, enum peer_kind kind, const char *address)
{
	struct peer *peer = calloc(1, sizeof(*peer));

	if (!peer)
		abort();
	peer->transport = transport;
	peer->kind = kind;
	peer->dial.fire = on_dial;
	peer->input.take = on_peer_input;
	(void)snprintf(peer->address, sizeof(peer->address), "%s", address);
	(void)snprintf(peer->name, sizeof(peer->name), "%s", address);
	list_init(&peer->calls);
	list_init(&peer->waiting);
	list_init(&peer->notices);
	list_init(&peer->input.link);
	list_push_back(&transport->peers, &peer->link);
	return peer;
}

static void peer_free(struct peer *peer)
{
	struct packet *packet;

	while ((packet = list_first(&peer->notices, struct packet, link))) {
		list_remove(&packet->link);
		free(packet->payload);
		free(packet);
	}
	event_cancel(&peer->dial);
	list_remove(&peer->input.link);
	list_remove(&peer->link);
	if (peer->conn)
		peer->conn->ends[peer->end] = NULL;
	free(peer);
}

static void peer_free_if_unused(struct peer *peer)
{
	if (peer->state == PEER_LOST && !peer->n_deliveries && !peer->n_holds &&
	    list_empty(&peer->waiting) && !list_linked(&peer->input.link))
		peer_free(peer);
}

void peer_hold(struct peer *peer)
{
	peer->n_holds++;
}

void peer_release(struct peer *peer)
{
	peer->n_holds--;
	peer_free_if_unused(peer);
}

const char *peer_loss(const struct peer *peer)
{
	return peer->state == PEER_LOST ? peer->why : NULL;
}

static void untell_sent(struct peer *peer, struct call *call, bool now);

static void call_over(struct call *call, int status, const char *text)
{
	struct block *answer = call->answer_block;

	list_remove(&call->link);
	if (call->peer->kind != PEER_SELF)
		untell_sent(call->peer, call, !status);
	if (status) {
		call->status = status;
		(void)snprintf(call->text, sizeof(call->text), "%s", text);
	}
	call->payload_block = block_unref(call->payload_block);
	call->state = CALL_ENDED;
	call->done(call);
	block_unref(answer);
}

static void end_calls(struct peer *peer, int status, const char *text)
{
	struct list calls = LIST_INIT(calls);
	struct call *call;

	while ((call = list_first(&peer->calls, struct call, link)) ||
	       (call = list_first(&peer->waiting, struct call, link))) {
		list_remove(&call->link);
		list_push_back(&calls, &call->link);
	}
	while ((call = list_first(&calls, struct call, link))) {
		call->answer_block = block_unref(call->answer_block);
		call_over(call, status, text);
	}
}

static void conn_cut(struct conn *conn, const char *why)
{
	if (conn->is_cut)
		return;
	conn->is_cut = true;
	trace("net: connection %u of %s to %s: cut: %s", conn->number, conn->nodes[0]->name,
	      conn->nodes[1]->name, why);
	for (unsigned i = 0; i < 2; i++) {
		conn->cut_ns[i] = world->now_ns + rng_below(&world->net, CUT_NS);
		event_set(&conn->lost[i], conn->cut_ns[i] + 1);
	}
}

/* On the loop. Calls of a peer that was not up end with the reason; what others did is unknown. */
static void peer_lose(struct peer *peer, int status, const char *why)
{
	struct transport *transport = peer->transport;
	char text[ERROR_TEXT_MAX + 1];

	if (peer->state >= PEER_LOSING)
		return;
	if (peer->state == PEER_UP)
		status = -ECONNRESET;
	peer->state = PEER_LOSING;
	event_cancel(&peer->dial);
	if (peer->conn)
		conn_cut(peer->conn, why);
	trace("net: %s is lost: %s", peer->name, why);
	(void)snprintf(text, sizeof(text), "%.120s: %s", peer->name, why);
	end_calls(peer, status, text);
	peer_hold(peer);
	peer->state = PEER_LOST;
	if (peer->why != why)
		(void)snprintf(peer->why, sizeof(peer->why), "%s", why);
	if (!transport->is_closed)
		transport->ops->peer_lost(transport->user, peer, peer->why);
	if (!list_empty(&peer->waiting) && !list_linked(&peer->input.link))
		loop_input(transport->loop, &peer->input);
	peer_release(peer);
}

static void on_peer_input(struct input *input)
{
	struct peer *peer = container_of(input, struct peer, input);

	if (peer->state != PEER_LOST) {
		peer_lose(peer, -ECONNRESET, peer->why);
		return;
	}
	end_calls(peer, -ECONNRESET, peer->name);
	peer_free_if_unused(peer);
}

static void peer_fail(struct peer *peer, const char *why)
{
	if (peer->state >= PEER_LOSING || list_linked(&peer->input.link))
		return;
	(void)snprintf(peer->why, sizeof(peer->why), "%s", why);
	loop_input(peer->transport->loop, &peer->input);
}

static void on_lost(struct event *event)
{
	for (struct list *l = world->conns.next; l != &world->conns; l = l->next) {
		struct conn *conn = container_of(l, struct conn, link);

		for (unsigned i = 0; i < 2; i++)
			if (event == &conn->lost[i] && conn->ends[i])
				peer_fail(conn->ends[i], "connection reset by peer");
	}
}

/* The first of a lane's calls that the other end may have had, or NULL. */
static struct call *call_of_lane(const struct peer *peer, unsigned lane, bool any)
{
	struct call *call;

	list_for_each (call, &peer->calls, link)
		if (call->message.sequence == lane && call->state == CALL_SENT &&
		    (any || !call->is_repeatable))
			return call;
	return NULL;
}

/* Calls that can be made again are, by their user; with any other call the peer is lost. */
static void on_lane_input(struct input *input)
{
	struct lane_state *lane = container_of(input, struct lane_state, input);
	struct peer *peer = lane->conn->ends[0];
	struct call *call;

	lane->is_broken = false;
	if (!peer || peer->state != PEER_UP)
		return;
	if (call_of_lane(peer, lane->number, false)) {
		peer_lose(peer, -ECONNRESET, "a connection broke");
		return;
	}
	/* Calls that are made again meanwhile go by another lane. */
	lane->is_broken = true;
	while ((call = call_of_lane(peer, lane->number, true))) {
		call->answer_block = block_unref(call->answer_block);
		call_over(call, -ENETRESET, "a connection broke");
	}
	lane->is_broken = false;
}

static void on_lane_broken(struct event *event)
{
	struct lane_state *lane = container_of(event, struct lane_state, noticed);
	struct peer *peer = lane->conn->ends[0];

	/* The lane may have broken twice while its maker stood still. */
	if (peer && !loop_is_dead(peer->transport->loop) && !list_linked(&lane->input.link))
		loop_input(peer->transport->loop, &lane->input);
}

/* -- Connections ------------------------------------------------------------------------------------------------------ */

static struct conn *conn_new(struct peer *maker, struct peer *taker)
{
	struct conn *conn = calloc(1, sizeof(*conn));

	if (!conn)
		abort();
	conn->number = ++world->next_conn;
	conn->ends[0] = maker;
	conn->ends[1] = taker;
	for (unsigned i = 0; i < 2; i++) {
		struct peer *peer = conn->ends[i];

		conn->nodes[i] = peer->transport->node;
		conn->lost[i].fire = on_lost;
		peer->conn = conn;
		peer->end = i;
	}
	for (unsigned i = 0; i < LANES; i++) {
		conn->lanes[i] = (struct lane_state){ .conn = conn,
						      .number = i,
						      .noticed.fire = on_lane_broken,
						      .input.take = on_lane_input };
		list_init(&conn->lanes[i].input.link);
	}
	list_push_back(&world->conns, &conn->link);
	return conn;
}

static void set_node(struct peer *peer, const struct node *node)
{
	peer->id = node->id;
	(void)snprintf(peer->node, sizeof(peer->node), "%s", node->name);
	(void)snprintf(peer->name, sizeof(peer->name), "node %s (%s)", node->name, peer->address);
}

static void call_send(struct call *call);

static void send_notices(struct peer *peer, uint64_t before)
{
	struct packet *notice;

	while ((notice = list_first(&peer->notices, struct packet, link)) &&
	       notice->sequence < before) {
		list_remove(&notice->link);
		notice->conn = peer->conn;
		notice->from = peer->end;
		packet_send(notice);
	}
}

/* What waited for the connection leaves in the order in which it was posted. */
static void peer_up(struct peer *peer)
{
	struct list calls = LIST_INIT(calls);
	struct call *call;

	peer->state = PEER_UP;
	while ((call = list_first(&peer->waiting, struct call, link))) {
		list_remove(&call->link);
		list_push_back(&calls, &call->link);
	}
	while ((call = list_first(&calls, struct call, link))) {
		send_notices(peer, call->message.sequence);
		list_remove(&call->link);
		call_send(call);
	}
	send_notices(peer, UINT64_MAX);
}

/* A daemon that is there takes the connection at once, and the maker has it in that event, too. */
static void dial(void *user)
{
	struct peer *peer = user;
	struct node *node = node_at(peer->address);
	char address[64];

	if (peer->state != PEER_CONNECTING)
		return;
	if (!node->is_alive || node->transport->is_closed ||
	    node->stopped_until_ns > world->now_ns) {
		uint64_t at_ns = world->now_ns + rng_below(&world->net, BACKOFF_NS);

		if (at_ns >= peer->deadline_ns)
			peer_lose(peer, -ECONNREFUSED, "Connection refused");
		else
			event_set(&peer->dial, at_ns);
		return;
	}
	if (peer->expect_id && node->id != peer->expect_id) {
		peer_lose(peer, -ESTALE, "another daemon answers there, restarted or moved");
		return;
	}
	(void)snprintf(address, sizeof(address), "%s:40000", peer->transport->node->name);
	{
		struct peer *taker = peer_new(node->transport, PEER_CALLING, address);
		struct conn *conn = conn_new(peer, taker);

		set_node(peer, node);
		set_node(taker, peer->transport->node);
		taker->state = PEER_UP;
		trace("net: connection %u to %s", conn->number, node->name);
		peer_up(peer);
	}
}

static void on_dial(struct event *event)
{
	struct peer *peer = container_of(event, struct peer, dial);

	if (!loop_is_dead(peer->transport->loop))
		loop_run_in(peer->transport->loop, dial, peer);
}

int transport_connect(struct transport *transport, const char *address, uint64_t expect_id,
		      struct peer **ret_peer)
{
	struct peer *peer;

	list_for_each (peer, &transport->peers, link) {
		if (peer->kind != PEER_CALLED || peer->state >= PEER_LOSING ||
		    list_linked(&peer->input.link) || strcmp(peer->address, address))
			continue;
		if (!expect_id || peer->id == expect_id || peer->expect_id == expect_id) {
			*ret_peer = peer;
			return 0;
		}
		if (!peer->id && !peer->expect_id) {
			peer->expect_id = expect_id;
			*ret_peer = peer;
			return 0;
		}
	}
	if (!node_at(address))
		sim_fail("%s connects to %s, where no daemon is", transport->node->name, address);
	peer = peer_new(transport, PEER_CALLED, address);
	peer->expect_id = expect_id;
	peer->deadline_ns = world->now_ns + HANDSHAKE_NS;
	event_set(&peer->dial, world->now_ns + 1 + rng_below(&world->net, DIAL_NS));
	*ret_peer = peer;
	return 0;
}

/* -- Packets ---------------------------------------------------------------------------------------------------------- */

static void on_packet(struct event *event);
static void on_arrived(struct input *input);

static void packet_free(struct packet *packet)
{
	block_unref(packet->block);
	free(packet->payload);
	free(packet);
}

static struct packet *packet_new(enum packet_kind kind, const struct data_header *header)
{
	struct packet *packet = calloc(1, sizeof(*packet));

	if (!packet)
		abort();
	packet->kind = kind;
	packet->header = *header;
	packet->event.fire = on_packet;
	packet->input.take = on_arrived;
	list_init(&packet->link);
	list_init(&packet->input.link);
	return packet;
}

static void *copy(const void *data, size_t len)
{
	void *to = malloc(len ? len : 1);

	if (!to)
		abort();
	return len ? memcpy(to, data, len) : to;
}

/* To the wire, behind what was posted on its lane before. */
static void packet_send(struct packet *packet)
{
	struct conn *conn = packet->conn;
	uint64_t *written_ns = &conn->written_ns[packet->from][packet->lane];

	*written_ns = MAX(*written_ns + 1, world->now_ns + 1 + rng_below(&world->net, WRITE_NS));
	event_set(&packet->event, *written_ns);
}

static struct call *find_call(const struct peer *peer, uint32_t cookie)
{
	struct call *call;

	list_for_each (call, &peer->calls, link)
		if (call->header.cookie == cookie)
			return call;
	return NULL;
}

static void call_on_sent(struct mail *mail)
{
	struct call *call = container_of(mail, struct call, sent_mail);

	call->is_written = false;
	call->sent(call);
}

/* Whether it still has to be told that its bytes are written; not after a loss. */
static void untell_sent(struct peer *peer, struct call *call, bool now)
{
	if (!call->is_written)
		return;
	call->is_written = false;
	loop_unpost(peer->transport->loop, &call->sent_mail);
	if (now)
		call->sent(call);
}

static void write_packet(struct packet *packet)
{
	struct conn *conn = packet->conn;
	struct peer *peer = conn->ends[packet->from];
	uint64_t *arrived_ns = &conn->arrived_ns[packet->from][packet->lane], wire_ns;

	if (!peer || peer->state != PEER_UP || loop_is_dead(peer->transport->loop)) {
		packet_free(packet);
		return;
	}
	if (packet->kind == PACKET_CALL) {
		struct call *call = find_call(peer, packet->header.cookie);

		if (!call) {
			packet_free(packet);
			return;
		}
		packet->payload = copy(call->payload, call->header.len);
		call->state = CALL_SENT;
		call->is_written = call->sent;
		if (call->sent)
			loop_post(peer->transport->loop, &call->sent_mail);
	} else if (packet->kind == PACKET_ANSWER && packet->block) {
		packet->payload = copy(packet->block->data, packet->header.len);
		packet->block = block_unref(packet->block);
	}
	packet->is_written = true;
	packet->generation = conn->lanes[packet->lane].generation;
	if (conn->is_cut || conn->lanes[packet->lane].is_broken) {
		packet_free(packet);
		return;
	}
	wire_ns = 1 +
		  rng_below(&world->net, rng_chance(&world->net, SLOW_PERCENT) ? SLOW_NS : WIRE_NS);
	*arrived_ns = MAX(*arrived_ns + 1, world->now_ns + wire_ns);
	event_set(&packet->event, *arrived_ns);
}

static void on_packet(struct event *event)
{
	struct packet *packet = container_of(event, struct packet, event);
	struct conn *conn = packet->conn;
	unsigned to = !packet->from;

	if (!packet->is_written) {
		write_packet(packet);
		return;
	}
	if ((conn->is_cut && world->now_ns > conn->cut_ns[to]) || !conn->ends[to] ||
	    packet->generation != conn->lanes[packet->lane].generation ||
	    loop_is_dead(conn->ends[to]->transport->loop)) {
		packet_free(packet);
		return;
	}
	conn->ends[to]->n_packets++;
	loop_input(conn->ends[to]->transport->loop, &packet->input);
}

static void take_call(struct peer *peer, struct packet *packet)
{
	struct incoming *incoming = calloc(1, sizeof(*incoming));
	const char *why = NULL;

	if (!incoming)
		abort();
	if (data_header_check(&packet->header, &why))
		sim_fail("%s sends a call that is none: %s", peer->name, why);
	incoming->cookie = packet->header.cookie;
	incoming->lane = packet->lane;
	incoming->generation = packet->generation;
	incoming->delivery.peer = peer;
	incoming->delivery.header = packet->header;
	incoming->delivery.at_ns = world->now_ns;
	if (packet->header.len) {
		if (block_new(peer->transport->blocks, packet->header.len, NULL,
			      &incoming->delivery.payload_block))
			abort();
		memcpy(incoming->delivery.payload_block->data, packet->payload, packet->header.len);
		incoming->delivery.payload = incoming->delivery.payload_block->data;
	}
	peer->n_deliveries++;
	peer->transport->ops->call_arrived(peer->transport->user, &incoming->delivery);
}

static void take_error(struct call *call, const struct packet *packet)
{
	size_t len = MIN(packet->header.len, (uint32_t)ERROR_TEXT_MAX);
	int status = packet->header.status;

	call->status = status > 0 && status < 4096 ? -status : -EREMOTEIO;
	memcpy(call->text, packet->payload, len);
	call->text[len] = '\0';
}

static void take_answer(struct peer *peer, const struct packet *packet)
{
	struct call *call = find_call(peer, packet->header.cookie);
	uint32_t len = packet->header.len;

	if (!call || call->state != CALL_SENT)
		sim_fail("%s answers what was not asked", peer->name);
	call->answer = packet->header;
	if (packet->header.op == DATA_ERROR) {
		take_error(call, packet);
	} else if (packet->header.op == DATA_RESULT && (call->target || call->find_target) &&
		   len > call->target_len) {
		sim_fail("%s answers with a result of %u bytes, more than the %zu asked for",
			 peer->name, len, call->target_len);
	} else if (len) {
		if (packet->header.op == DATA_RESULT && !call->target && call->find_target)
			call->target = call->find_target(call);
		if (packet->header.op == DATA_RESULT && call->target) {
			memcpy(call->target, packet->payload, len);
		} else {
			if (block_new(peer->transport->blocks, len, NULL, &call->answer_block))
				abort();
			memcpy(call->answer_block->data, packet->payload, len);
		}
	}
	call_over(call, 0, NULL);
}

static void on_arrived(struct input *input)
{
	struct packet *packet = container_of(input, struct packet, input);
	struct peer *peer = packet->conn->ends[!packet->from];

	if (peer)
		peer->n_packets--;
	if (peer && peer->state == PEER_UP && !peer->transport->is_closed &&
	    packet->generation == packet->conn->lanes[packet->lane].generation) {
		coverage_note("message", op_name(packet->header.op));
		trace("net: %u %s %s from %s: key %" PRIx64 " round %" PRIu64
		      " part %u node %u len %u",
		      packet->conn->number,
		      packet->kind == PACKET_CALL     ? "call"
		      : packet->kind == PACKET_ANSWER ? "answer"
						      : "notice",
		      op_name(packet->header.op), packet->conn->nodes[packet->from]->name,
		      packet->header.key, packet->header.round, packet->header.part,
		      packet->header.node, packet->header.len);
		if (packet->kind == PACKET_CALL)
			take_call(peer, packet);
		else if (packet->kind == PACKET_ANSWER)
			take_answer(peer, packet);
		else
			peer->transport->ops->notice_arrived(peer->transport->user, peer,
							     &packet->header, packet->payload);
	}
	packet_free(packet);
}

/* -- Calls ------------------------------------------------------------------------------------------------------------ */

static void call_send(struct call *call)
{
	struct peer *peer = call->peer;
	bool spreads = call->header.op == DATA_PUSH || call->header.op == DATA_PULL;
	struct packet *packet;

	call->header.cookie = ++peer->cookie;
	call->state = CALL_QUEUED;
	list_push_back(&peer->calls, &call->link);
	packet = packet_new(PACKET_CALL, &call->header);
	packet->conn = peer->conn;
	packet->from = peer->end;
	packet->lane = spreads ? (unsigned)rng_below(&world->net, LANES) : 0;
	if (peer->conn->lanes[packet->lane].is_broken)
		packet->lane = 0;
	call->message.sequence = packet->lane;
	packet_send(packet);
}

static void self_call(struct call *call);

void peer_call(struct peer *peer, struct call *call)
{
	assert(peer->kind != PEER_CALLING && call->done);
	call->header.magic = DATA_MAGIC;
	call->header.version = DATA_VERSION;
	call->header.flags = call->is_again ? DATA_FLAG_AGAIN : 0;
	call->header.moved = 0;
	call->status = 0;
	call->text[0] = '\0';
	call->answer_block = NULL;
	call->peer = peer;
	call->incoming = NULL;
	call->is_written = false;
	call->sent_mail.run = call_on_sent;
	call->message = (struct message){ .header = &call->header };
	if (peer->kind == PEER_SELF) {
		self_call(call);
	} else if (peer->state == PEER_UP) {
		call_send(call);
	} else {
		call->state = CALL_WAITING;
		call->message.sequence = peer->next_sequence++;
		list_push_back(&peer->waiting, &call->link);
		if (peer->state == PEER_LOST && !list_linked(&peer->input.link))
			loop_input(peer->transport->loop, &peer->input);
	}
}

void peer_call_on(struct call *call)
{
	(void)call;
	sim_fail("a call goes on without RDMA, which there is none of");
}

/* -- Answers ---------------------------------------------------------------------------------------------------------- */

static void self_answer(struct incoming *incoming, const struct data_header *header,
			struct block *block, const void *payload);

void delivery_answer(struct delivery *delivery, const struct data_header *header,
		     struct block *block, const void *payload)
{
	struct incoming *incoming = container_of(delivery, struct incoming, delivery);
	struct peer *peer = delivery->peer;
	struct packet *packet;

	assert(header->op == DATA_OK || header->op == DATA_RESULT || header->op == DATA_ERROR);
	assert(peer->n_deliveries > 0);
	peer->n_deliveries--;
	if (peer->kind == PEER_SELF) {
		self_answer(incoming, header, block, payload);
		return;
	}
	if (peer->state == PEER_UP &&
	    incoming->generation == peer->conn->lanes[incoming->lane].generation) {
		packet = packet_new(PACKET_ANSWER, header);
		packet->header.magic = DATA_MAGIC;
		packet->header.version = DATA_VERSION;
		packet->header.cookie = incoming->cookie;
		packet->header.flags &= DATA_FLAG_KEPT;
		packet->conn = peer->conn;
		packet->from = peer->end;
		packet->lane = incoming->lane;
		if (header->len && block)
			packet->block = block_ref(block);
		else if (header->len)
			packet->payload = copy(payload, header->len);
		packet_send(packet);
	}
	block_unref(delivery->payload_block);
	free(incoming);
	peer_free_if_unused(peer);
}

void delivery_answer_also(struct delivery *delivery, const struct data_header *header,
			  struct block *block, struct answer_check *check)
{
	(void)check;
	delivery_answer(delivery, header, block, NULL);
}

void delivery_fail(struct delivery *delivery, int status, const char *text)
{
	const struct data_header *asked = &delivery->header;
	struct data_header header = {
		.op = DATA_ERROR,
		.len = (uint32_t)strnlen(text, ERROR_TEXT_MAX),
		.job = asked->job,
		.key = asked->key,
		.round = asked->round,
		.epoch = asked->epoch,
		.node = asked->node,
		.block = asked->block,
		.part = asked->part,
		.status = -status,
	};

	trace("net: refuses %s of %s: %d %s", op_name(asked->op), delivery->peer->name, status,
	      text);
	delivery_answer(delivery, &header, NULL, text);
}

bool delivery_is_own(const struct delivery *delivery)
{
	return delivery->payload_block && delivery->peer->kind != PEER_SELF;
}

void delivery_fetch(const struct delivery *delivery)
{
	(void)delivery;
}

/* -- Notices ---------------------------------------------------------------------------------------------------------- */

static void self_notice(struct peer *peer, struct packet *packet);

static void wait_for_conn(struct peer *peer, struct packet *packet)
{
	packet->sequence = peer->next_sequence++;
	list_push_back(&peer->notices, &packet->link);
}

int peer_notice(struct peer *peer, const struct data_header *header, const void *payload)
{
	struct packet *packet;

	if (peer->state >= PEER_LOSING)
		return 0;
	packet = packet_new(PACKET_NOTICE, header);
	packet->header.magic = DATA_MAGIC;
	packet->header.version = DATA_VERSION;
	packet->header.cookie = 0;
	packet->payload = copy(payload, header->len);
	packet->conn = peer->conn;
	packet->from = peer->end;
	if (peer->kind == PEER_SELF)
		self_notice(peer, packet);
	else if (peer->state == PEER_UP)
		packet_send(packet);
	else
		wait_for_conn(peer, packet);
	return 0;
}

int peer_notice_block(struct peer *peer, const struct data_header *header, struct block *block)
{
	return peer_notice(peer, header, block->data);
}

/* -- Our own process: as transport/inproc.c ----------------------------------------------------------------------------- */

static struct errand *errand_new(struct peer *peer, void (*take)(struct input *input))
{
	struct errand *errand = calloc(1, sizeof(*errand));

	if (!errand)
		abort();
	errand->input.take = take;
	errand->peer = peer;
	list_init(&errand->input.link);
	return errand;
}

static void on_self_call(struct input *input)
{
	struct errand *errand = container_of(input, struct errand, input);
	struct call *call = errand->call;
	struct peer *peer = errand->peer;
	struct incoming *incoming = calloc(1, sizeof(*incoming));
	const char *why = NULL;

	free(errand);
	if (!incoming)
		abort();
	if (peer->transport->is_closed) {
		free(incoming);
		call_over(call, -ESHUTDOWN, "the daemon shuts down");
		return;
	}
	if (data_header_check(&call->header, &why))
		sim_fail("%s sends itself a call that is none: %s", peer->name, why);
	incoming->delivery.peer = peer;
	incoming->delivery.header = call->header;
	incoming->delivery.at_ns = world->now_ns;
	incoming->delivery.payload = call->header.len ? call->payload : NULL;
	if (call->payload_block)
		incoming->delivery.payload_block = block_ref(call->payload_block);
	incoming->call = call;
	call->incoming = incoming;
	peer->n_deliveries++;
	peer->transport->ops->call_arrived(peer->transport->user, &incoming->delivery);
}

static void self_call(struct call *call)
{
	struct errand *errand = errand_new(call->peer, on_self_call);

	call->header.cookie = 1;
	call->state = CALL_QUEUED;
	list_push_back(&call->peer->calls, &call->link);
	errand->call = call;
	loop_input(call->peer->transport->loop, &errand->input);
}

static void on_self_answer(struct input *input)
{
	struct errand *errand = container_of(input, struct errand, input);
	struct call *call = errand->call;

	free(errand);
	if (call->sent)
		call->sent(call);
	call_over(call, 0, NULL);
}

static void self_answer(struct incoming *incoming, const struct data_header *header,
			struct block *block, const void *payload)
{
	struct call *call = TAKE_PTR(incoming->call);
	struct peer *peer = incoming->delivery.peer;
	struct errand *errand;

	if (call) {
		call->incoming = NULL;
		call->answer = *header;
		call->answer.magic = DATA_MAGIC;
		call->answer.version = DATA_VERSION;
		call->answer.cookie = call->header.cookie;
		if (header->op == DATA_ERROR) {
			size_t len = MIN(header->len, (uint32_t)ERROR_TEXT_MAX);

			call->status = -header->status;
			memcpy(call->text, payload, len);
			call->text[len] = '\0';
		} else if (header->len && header->op == DATA_RESULT && call->target &&
			   header->len > call->target_len) {
			sim_fail("%s answers itself with a result that is too long", peer->name);
		} else if (header->len && block) {
			call->answer_block = block_ref(block);
		} else if (header->len && header->op == DATA_RESULT && call->target) {
			memcpy(call->target, payload, header->len);
		} else if (header->len) {
			if (block_new(peer->transport->blocks, header->len, NULL,
				      &call->answer_block))
				abort();
			memcpy(call->answer_block->data, payload, header->len);
		}
		errand = errand_new(peer, on_self_answer);
		errand->call = call;
		loop_input(peer->transport->loop, &errand->input);
	}
	block_unref(incoming->delivery.payload_block);
	free(incoming);
}

static void on_self_notice(struct input *input)
{
	struct errand *errand = container_of(input, struct errand, input);
	struct packet *packet = errand->notice;
	struct transport *transport = errand->peer->transport;

	if (!transport->is_closed)
		transport->ops->notice_arrived(transport->user, errand->peer, &packet->header,
					       packet->header.len ? packet->payload : NULL);
	packet_free(packet);
	free(errand);
}

static void self_notice(struct peer *peer, struct packet *packet)
{
	struct errand *errand = errand_new(peer, on_self_notice);

	errand->notice = packet;
	loop_input(peer->transport->loop, &errand->input);
}

struct block *delivery_in_place(struct delivery *delivery, uint32_t len)
{
	struct call *call = container_of(delivery, struct incoming, delivery)->call;

	return call && call->in_place ? call->in_place(call, len) : NULL;
}

bool delivery_filled(struct delivery *delivery)
{
	struct call *call = container_of(delivery, struct incoming, delivery)->call;

	return call && call->filled && call->filled(call);
}

/* -- A transport ------------------------------------------------------------------------------------------------------ */

int transport_new(const struct transport_params *params, struct transport **ret_transport)
{
	struct transport *transport = calloc(1, sizeof(*transport));

	if (!transport)
		abort();
	transport->loop = params->loop;
	transport->blocks = params->blocks;
	transport->ops = params->ops;
	transport->user = params->user;
	transport->node = params->user;
	transport->id = params->id;
	list_init(&transport->peers);
	transport->self = peer_new(transport, PEER_SELF, "itself");
	transport->self->state = PEER_UP;
	transport->self->id = params->id;
	*ret_transport = transport;
	return 0;
}

void transport_close(struct transport *transport)
{
	struct peer *peer, *next;

	if (transport->is_closed)
		return;
	transport->is_closed = true;
	list_for_each_safe (peer, next, &transport->peers, link)
		if (peer != transport->self)
			peer_lose(peer, -ESHUTDOWN, "the daemon shuts down");
}

struct transport *transport_free(struct transport *transport)
{
	struct peer *peer;

	if (!transport)
		return NULL;
	transport_close(transport);
	while ((peer = list_first(&transport->peers, struct peer, link)))
		peer_free(peer);
	free(transport);
	return NULL;
}

struct peer *transport_self(struct transport *transport)
{
	return transport->self;
}

void net_kill(struct transport *transport)
{
	struct peer *peer;

	transport->is_dead = true;
	list_for_each (peer, &transport->peers, link) {
		event_cancel(&peer->dial);
		if (!peer->conn)
			continue;
		conn_cut(peer->conn, "killed");
		event_cancel(&peer->conn->lost[peer->end]);
		peer->conn->ends[peer->end] = NULL;
	}
}

const char *net_left(const struct transport *transport)
{
	const struct peer *peer;

	list_for_each (peer, &transport->peers, link) {
		if (!list_empty(&peer->calls) || !list_empty(&peer->waiting))
			return "a call";
		if (peer->n_deliveries)
			return "an answer that it owes";
	}
	return NULL;
}

void net_done(void)
{
	struct conn *conn;

	while ((conn = list_first(&world->conns, struct conn, link))) {
		list_remove(&conn->link);
		free(conn);
	}
}

/* -- Faults ----------------------------------------------------------------------------------------------------------- */

static struct conn *pick_conn(unsigned from, unsigned to)
{
	struct conn *conn, *found = NULL;
	unsigned n = 0;

	list_for_each (conn, &world->conns, link)
		if (!conn->is_cut && conn->nodes[0] == &world->nodes[from] &&
		    conn->nodes[1] == &world->nodes[to] && !rng_below(&world->net, ++n))
			found = conn;
	return found;
}

bool net_cut(unsigned from, unsigned to)
{
	struct conn *conn = pick_conn(from, to);
	unsigned lane = (unsigned)rng_below(&world->net, LANES);

	if (!conn)
		return false;
	if (!lane) {
		conn_cut(conn, "a fault");
		return true;
	}
	trace("net: connection %u of %s to %s: lane %u broken", conn->number, conn->nodes[0]->name,
	      conn->nodes[1]->name, lane);
	conn->lanes[lane].generation++;
	conn->lanes[lane].is_broken = true;
	event_set(&conn->lanes[lane].noticed, world->now_ns + 1 + rng_below(&world->net, CUT_NS));
	return true;
}

/* Messages are late, as by TCP; an end that hears nothing for too long takes the other for lost. */
void net_hold(unsigned from, unsigned to, uint64_t until_ns)
{
	struct conn *conn;

	list_for_each (conn, &world->conns, link) {
		for (unsigned i = 0; i < 2; i++) {
			if (conn->is_cut || conn->nodes[i] != &world->nodes[from] ||
			    conn->nodes[!i] != &world->nodes[to])
				continue;
			for (unsigned lane = 0; lane < LANES; lane++)
				conn->arrived_ns[i][lane] =
					MAX(conn->arrived_ns[i][lane], until_ns);
			if (until_ns > world->now_ns + SILENCE_NS)
				conn_cut(conn, "silence");
		}
	}
}

/* -- What the daemon asks besides ----------------------------------------------------------------------------------------- */

uint64_t peer_id(const struct peer *peer)
{
	return peer->id;
}

const char *peer_name(const struct peer *peer)
{
	return peer->name;
}

void peer_call_it(struct peer *peer, const char *node)
{
	if (!*peer->node)
		(void)snprintf(peer->name, sizeof(peer->name), "node %s (%s)", node, peer->address);
}

bool peer_is_self(const struct peer *peer)
{
	return peer->kind == PEER_SELF;
}

bool peer_is_crowded(const struct peer *peer)
{
	(void)peer;
	return false;
}

const char *peer_source(const struct peer *peer)
{
	return peer->address;
}

const char *peer_called_at(const struct peer *peer)
{
	return peer->kind == PEER_CALLED ? peer->address : NULL;
}

bool peer_has(const struct peer *peer, uint64_t feature)
{
	(void)peer;
	(void)feature;
	return true;
}

void peer_kill(struct peer *peer, const char *why)
{
	if (peer->kind != PEER_SELF)
		peer_fail(peer, why);
}

void peer_offer_probe(struct peer *peer)
{
	(void)peer;
}

void peer_set_parts(struct peer *peer, uint32_t part_bytes, uint32_t n_nodes)
{
	(void)peer;
	(void)part_bytes;
	(void)n_nodes;
}

bool peer_takes_direct(const struct peer *peer, uint64_t len)
{
	(void)peer;
	(void)len;
	return false;
}

uint64_t transport_bytes_s(const struct transport *transport)
{
	(void)transport;
	return 0;
}

int transport_memory_add(struct transport *transport, const void *owner, void *data, size_t len)
{
	(void)transport;
	(void)owner;
	(void)data;
	(void)len;
	return 0;
}

bool transport_memory_remove(struct transport *transport, void *data, struct mail *gone)
{
	(void)transport;
	(void)data;
	(void)gone;
	return true;
}

unsigned transport_memory_regions(const struct transport *transport, const void *data)
{
	(void)transport;
	(void)data;
	return 0;
}
