/*
 * A double of transport/ in memory: implements what the server calls of transport.h, and gives
 * answers and notices to far.c.
 */
#include "double.h"

#include "base/clock.h"

struct peer {
	struct far *far;
	unsigned end;
	char name[16];
	bool killed, is_old, is_crowded, is_lost;
	unsigned n_holds;
	unsigned n_no_memory;
	bool is_self, keeps; /* far_lend() */
	struct block *block;
	unsigned n_filled;
	unsigned n_deliveries; /* that are not answered */
};

struct double_call {
	struct delivery delivery;
	struct asked *asked;
	uint32_t len; /* of its payload; the header may become the answer's */
	void *lent;   /* a copy of what was lent, or NULL */
};

struct carrier {
	struct peer *peers[FAR_ENDS];
};

static struct peer *peer_new(struct far *far, unsigned end)
{
	struct peer *peer = calloc(1, sizeof(*peer));

	ASSERT_TRUE(peer);
	peer->far = far;
	peer->end = end;
	(void)snprintf(peer->name, sizeof(peer->name), "end%u", end);
	return peer;
}

/* As in the transport: a peer that is lost stays for as long as somebody holds it or a delivery names it. */
static void peer_free_if_unused(struct peer *peer)
{
	if (peer->is_lost && !peer->n_holds && !peer->n_deliveries)
		free(peer);
}

static struct peer *peer_of(struct far *far, unsigned end)
{
	struct carrier *carrier = far->carrier;

	if (!carrier->peers[end])
		carrier->peers[end] = peer_new(far, end);
	return carrier->peers[end];
}

static void double_call(struct far *far, unsigned end, struct asked *asked,
			const struct data_header *header, const void *payload, bool in_block)
{
	struct double_call *call = calloc(1, sizeof(*call));
	struct block *block = NULL;

	ASSERT_TRUE(call);
	call->asked = asked;
	call->delivery.peer = peer_of(far, end);
	call->delivery.peer->n_deliveries++;
	call->delivery.header = *header;
	call->delivery.header.magic = DATA_MAGIC;
	call->delivery.header.version = DATA_VERSION;
	call->delivery.header.cookie = 1;
	call->delivery.at_ns = clock_now_ns();
	call->len = header->len;
	if (header->len && in_block) {
		ASSERT_OK(block_new(far->blocks, header->len, NULL, &block));
		memcpy(block->data, payload, header->len);
		call->delivery.payload = block->data;
	} else if (header->len) {
		asked->payload = malloc(header->len + far->misalign);
		call->delivery.payload =
			memcpy((char *)asked->payload + far->misalign, payload, header->len);
		call->lent = malloc(header->len);
		ASSERT_TRUE(call->lent);
		memcpy(call->lent, payload, header->len);
	}
	call->delivery.payload_block = block;
	if (header->op == DATA_PUSH) {
		const char *why = NULL;

		if (data_header_check(&call->delivery.header, &why))
			test_fail(__FILE__, __LINE__, "the test's own header: %s", why);
	}
	server_call_arrived(far->server, &call->delivery);
}

static void double_notice(struct far *far, unsigned end, const struct data_header *header,
			  const void *payload)
{
	/* A copy, for the sanitizer to see what is kept of it. */
	_cleanup_(freep) void *copy = malloc(MAX(header->len, 1u));

	if (header->len)
		memcpy(copy, payload, header->len);
	server_notice_arrived(far->server, peer_of(far, end), header, copy);
}

static void double_settle(struct far *far)
{
	while (pool_pending(far->pool))
		ASSERT_OK(loop_turn(far->loop, 1000));
}

static void double_free(struct far *far)
{
	struct carrier *carrier = far->carrier;

	/* The server is gone, and with it what it held. */
	for (unsigned i = 0; i < FAR_ENDS; i++) {
		ASSERT_TRUE(!carrier->peers[i] || !carrier->peers[i]->n_holds);
		free(carrier->peers[i]);
	}
	free(carrier);
}

static const struct far_ops double_ops = {
	.call = double_call,
	.notice = double_notice,
	.settle = double_settle,
	.free = double_free,
};

struct far *far_new(const struct far_options *options)
{
	struct far *far = calloc(1, sizeof(*far));

	ASSERT_TRUE(far);
	far->ops = &double_ops;
	far->carrier = calloc(1, sizeof(struct carrier));
	ASSERT_TRUE(far->carrier);
	far_init(far, options);
	far_start(far, options);
	return far;
}

bool far_ends_are_peers(void)
{
	return true;
}

void far_cut(struct far *far, unsigned end)
{
	struct carrier *carrier = far->carrier;
	struct peer *peer = TAKE_PTR(carrier->peers[end]);

	if (!peer)
		return;
	peer_hold(peer);
	peer->is_lost = true;
	server_peer_lost(far->server, peer, peer_loss(peer));
	peer_release(peer);
}

void far_lose(struct far *far, unsigned end)
{
	far_cut(far, end);
	ASSERT_OK(loop_turn(far->loop, 0));
}

void far_lend(struct far *far, unsigned end, struct block *block, bool keeps)
{
	struct peer *peer = peer_of(far, end);

	peer->is_self = true;
	peer->block = block;
	peer->keeps = keeps;
}

unsigned far_filled(struct far *far, unsigned end)
{
	return peer_of(far, end)->n_filled;
}

bool far_killed(struct far *far, unsigned end)
{
	return peer_of(far, end)->killed;
}

void far_no_memory(struct far *far, unsigned end)
{
	peer_of(far, end)->n_no_memory = 1;
}

void far_old(struct far *far, unsigned end, bool is_old)
{
	peer_of(far, end)->is_old = is_old;
}

void far_crowd(struct far *far, unsigned end, bool is_crowded)
{
	peer_of(far, end)->is_crowded = is_crowded;
}

/* What the server calls of transport.h. */

static void answered(struct delivery *delivery, int status)
{
	struct double_call *call = container_of(delivery, struct double_call, delivery);

	ASSERT_TRUE(!call->asked->done);
	call->asked->done = true;
	call->asked->status = status;
	/* What was lent nobody has written to. */
	if (call->lent)
		ASSERT_TRUE(!memcmp(call->lent, delivery->payload, call->len));
	free(call->lent);
	/* It is the trainer's again, and it writes to it. */
	if (call->asked->payload)
		memset(call->asked->payload, 0xee, call->len);
	block_unref(delivery->payload_block);
	delivery->peer->n_deliveries--;
	peer_free_if_unused(delivery->peer);
	free(call);
}

void delivery_answer(struct delivery *delivery, const struct data_header *header,
		     struct block *block, const void *payload)
{
	struct asked *asked = container_of(delivery, struct double_call, delivery)->asked;
	const void *from = block ? block->data : payload;

	asked->answer = *header;
	if (header->len) {
		ASSERT_TRUE(from && (!block || block->len == header->len));
		asked->data = malloc(header->len);
		memcpy(asked->data, from, header->len);
		delivery->peer->far->copied += block ? 0 : header->len;
	}
	answered(delivery, 0);
}

void delivery_answer_also(struct delivery *delivery, const struct data_header *header,
			  struct block *block, struct answer_check *check)
{
	(void)check;
	delivery_answer(delivery, header, block, NULL);
}

bool delivery_is_own(const struct delivery *delivery)
{
	return delivery->payload_block && !delivery->peer->is_self;
}

void delivery_fetch(const struct delivery *delivery)
{
	(void)delivery;
}

void delivery_fail(struct delivery *delivery, int status, const char *text)
{
	struct asked *asked = container_of(delivery, struct double_call, delivery)->asked;

	ASSERT_INT(status, <, 0);
	ASSERT_TRUE(text && *text && strlen(text) <= ERROR_TEXT_MAX);
	(void)snprintf(asked->text, sizeof(asked->text), "%s", text);
	answered(delivery, status);
}

struct block *delivery_in_place(struct delivery *delivery, uint32_t len)
{
	struct block *block = delivery->peer->block;

	return block && block->len == len ? block_ref(block) : NULL;
}

bool delivery_filled(struct delivery *delivery)
{
	const struct far *far = delivery->peer->far;

	for (const struct asked *asked = far->all; asked; asked = asked->next)
		ASSERT_TRUE(!asked->done || asked->answer.op != DATA_RESULT ||
			    asked->answer.round != delivery->header.round);
	delivery->peer->n_filled++;
	return delivery->peer->keeps;
}

bool peer_is_self(const struct peer *peer)
{
	return peer->is_self;
}

void peer_hold(struct peer *peer)
{
	peer->n_holds++;
}

void peer_release(struct peer *peer)
{
	ASSERT_TRUE(peer->n_holds);
	peer->n_holds--;
	peer_free_if_unused(peer);
}

const char *peer_loss(const struct peer *peer)
{
	return peer->is_lost ? "connection reset" : NULL;
}

bool peer_is_crowded(const struct peer *peer)
{
	return peer->is_crowded;
}

const char *peer_source(const struct peer *peer)
{
	return peer_name(peer);
}

bool peer_has(const struct peer *peer, uint64_t feature)
{
	return !peer->is_old;
}

bool peer_takes_direct(const struct peer *peer, uint64_t len)
{
	(void)peer;
	(void)len;
	return false;
}

static void tell_of_others(const struct peer *peer, const struct data_header *header,
			   const void *payload)
{
	struct far *far = peer->far;
	struct data_header sent = *header;
	const char *why = NULL;

	sent.magic = DATA_MAGIC;
	sent.version = DATA_VERSION;
	if (data_header_check(&sent, &why))
		test_fail(__FILE__, __LINE__, "no header that is sent: %s", why);
	if (header->op == DATA_OTHERS_FOLLOW && header->status) {
		far->told[peer->end].over = *header;
		(void)snprintf(far->told[peer->end].over_text, ERROR_TEXT_MAX + 1, "%.*s",
			       (int)header->len, (const char *)payload);
		far->told[peer->end].n_over++;
		return;
	}
	if (header->op == DATA_OTHERS_FOLLOW) {
		far->told[peer->end].counts = *header;
		far->told[peer->end].n_counts++;
		return;
	}
	far->told[peer->end].begun = *header;
	(void)snprintf(far->told[peer->end].begun_name, TENSOR_NAME_MAX + 1, "%.*s",
		       (int)header->len, (const char *)payload);
	far->told[peer->end].n_begun++;
}

int peer_notice(struct peer *peer, const struct data_header *header, const void *payload)
{
	if (peer->n_no_memory) {
		peer->n_no_memory--;
		return -ENOMEM;
	}
	if (header->op == DATA_NEWCOMERS) {
		peer->far->told[peer->end].newcomers = (uint32_t)header->round;
		return 0;
	}
	if (header->op == DATA_STOPPING) {
		peer->far->told[peer->end].stopping++;
		return 0;
	}
	if (header->op == DATA_ORDINAL || header->op == DATA_BLOCKED) {
		ASSERT_TRUE(header->node == peer->end || header->node >= FAR_ENDS);
		peer->far->told[peer->end].ordinal = *header;
		(void)snprintf(peer->far->told[peer->end].text, ERROR_TEXT_MAX + 1, "%.*s",
			       (int)header->len, (const char *)payload);
		peer->far->told[peer->end].n_ordinals++;
		return 0;
	}
	if (header->op == DATA_OTHERS_FOLLOW || header->op == DATA_OTHERS_BEGUN) {
		tell_of_others(peer, header, payload);
		return 0;
	}
	if (header->op == DATA_UNUSED) {
		ASSERT_TRUE(header->key && header->len);
		peer->far->told[peer->end].n_unused++;
		return 0;
	}
	if (header->op == DATA_LEFT) {
		ASSERT_TRUE(header->round < 32);
		peer->far->told[peer->end].left |= 1u << header->round;
		return 0;
	}
	if (header->op == DATA_MOVE) {
		ASSERT_TRUE(header->len <= sizeof(peer->far->told[0].moves));
		memcpy(peer->far->told[peer->end].moves, payload, header->len);
		peer->far->told[peer->end].n++;
		return 0;
	}
	if (header->op == DATA_RELEASE) {
		peer->far->told[peer->end].released = (uint32_t)header->round;
		peer->far->told[peer->end].epoch = header->epoch;
		peer->far->told[peer->end].n_releases++;
		return 0;
	}
	ASSERT_EQ(header->op, DATA_FAIL_JOB);
	ASSERT_INT(header->status, >, 0);
	peer->far->failed[peer->end].n++;
	peer->far->failed[peer->end].job = header->job;
	peer->far->failed[peer->end].status = -header->status;
	(void)snprintf(peer->far->failed[peer->end].text, sizeof(peer->far->failed[0].text), "%.*s",
		       (int)header->len, (const char *)payload);
	return 0;
}

int peer_notice_block(struct peer *peer, const struct data_header *header, struct block *block)
{
	return peer_notice(peer, header, block->data);
}

const char *peer_name(const struct peer *peer)
{
	return peer->name;
}

void peer_set_parts(struct peer *peer, uint32_t part_bytes, uint32_t n_nodes)
{
	(void)peer;
	(void)part_bytes;
	(void)n_nodes;
}

void peer_kill(struct peer *peer, const char *why)
{
	peer->killed = true;
}
