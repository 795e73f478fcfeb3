/*
 * Peers: names and lanes, what waits for a lane, silence, the loss of a lane or of the whole
 * peer, and notices out. Home thread. call.c has a peer's calls, dial.c makes its lanes,
 * accept.c gives it those that came.
 */
#include "transport/peer/peer.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include <inttypes.h>
#include <stdio.h>

static void peer_on_mail(struct mail *mail);
static void peer_on_timer(struct loop_timer *timer);
static bool peer_on_end(struct chore *chore);
static void lane_lost(struct lane *lane);
static void lane_closed(struct lane *lane);

static const struct lane_home home = {
	.answered = call_answered,
	.arrived = incoming_arrive,
	.lost = lane_lost,
	.closed = lane_closed,
};

/* Names and life */

/* Of small things many have one charge. */
#define HELD_BATCH (UINT64_C(64) << 10)

static int open_account(struct peer *peer)
{
	struct accounts *accounts = peer->transport->settings.accounts;
	char name[sizeof(peer->account->name)];

	if (accounts && peer->kind == PEER_CALLED) {
		(void)snprintf(name, sizeof(name), "peer at %s", peer->address);
		peer->account = account_get(accounts, NULL, name);
	} else if (accounts && peer->kind == PEER_CALLING) {
		peer->account = account_of_peers(accounts, peer->source);
	}
	quota_init(&peer->held, peer->transport->settings.quota_bytes,
		   account_quota(peer->account, ACCOUNT_MESSAGES));
	peer->held.batch = HELD_BATCH;
	peer->held.one_thread = !peer->transport->settings.has_threads;
	return accounts && peer->kind != PEER_SELF && !peer->account ? error_origin(-ENOMEM) : 0;
}

int peer_new(struct transport *transport, enum peer_kind kind, const char *address,
	     const char *source, struct peer **ret_peer)
{
	struct peer *peer = calloc(1, sizeof(*peer));

	if (!peer)
		return error_origin(-ENOMEM);
	peer->transport = transport;
	peer->home = &home;
	peer->kind = kind;
	peer->mail.run = peer_on_mail;
	peer->timer.expired = peer_on_timer;
	peer->ending.chore.step = peer_on_end;
	(void)snprintf(peer->address, sizeof(peer->address), "%s", address);
	(void)snprintf(peer->name, sizeof(peer->name), "%s", address);
	(void)snprintf(peer->source, sizeof(peer->source), "%s", source);
	list_init(&peer->link);
	list_init(&peer->lanes);
	list_init(&peer->arrived);
	list_init(&peer->moved);
	list_init(&peer->calls);
	list_init(&peer->waiting);
	list_init(&peer->ending.calls);
	list_init(&peer->notices);
	quota_init(&peer->quota, transport->settings.quota_bytes, NULL);
	peer->quota.one_thread = !transport->settings.has_threads;
	if (open_account(peer)) {
		free(peer);
		return error_origin(-ENOMEM);
	}
	*ret_peer = peer;
	return 0;
}

void peer_set_node(struct peer *peer, const char *node)
{
	(void)snprintf(peer->node, sizeof(peer->node), "%s", node);
	(void)snprintf(peer->name, sizeof(peer->name), "node %s (%s)", node, peer->address);
}

static void drop_notices(struct peer *peer)
{
	struct notice *notice;

	while ((notice = list_first(&peer->notices, struct notice, link))) {
		list_remove(&notice->link);
		notice_free(notice);
	}
}

struct peer *peer_free(struct peer *peer)
{
	if (!peer)
		return NULL;
	assert(list_empty(&peer->lanes) && list_empty(&peer->calls) && list_empty(&peer->waiting));
	assert(!peer->n_deliveries && list_empty(&peer->arrived) && list_empty(&peer->moved));
	assert(!peer->n_holds && list_empty(&peer->ending.calls) &&
	       !list_linked(&peer->ending.chore.link));

	loop_timer_cancel(&peer->timer);
	peer->transport->hooks->drop_dial(peer);
	peer->transport->hooks->rdma_free(peer);
	drop_notices(peer);
	list_remove(&peer->link);
	quota_done(&peer->held);
	(void)account_put(peer->account);
	free(peer);
	return NULL;
}

void peer_free_if_unused(struct peer *peer)
{
	if (peer->state == PEER_LOST && !peer->n_deliveries && !peer->n_holds && !peer->is_posted &&
	    list_empty(&peer->waiting) && list_empty(&peer->ending.calls) &&
	    !peer->transport->is_closed)
		peer_free(peer);
}

void peer_hold(struct peer *peer)
{
	peer->n_holds++;
}

void peer_release(struct peer *peer)
{
	assert(peer->n_holds);
	peer->n_holds--;
	peer_free_if_unused(peer);
}

const char *peer_loss(const struct peer *peer)
{
	return peer->state == PEER_LOST ? peer->failure.text : NULL;
}

uint64_t peer_id(const struct peer *peer)
{
	return peer->id;
}

void peer_call_it(struct peer *peer, const char *node)
{
	if (!*peer->node)
		(void)snprintf(peer->name, sizeof(peer->name), "node %s (%s)", node, peer->address);
}

const char *peer_name(const struct peer *peer)
{
	return peer->name;
}

void peer_offer_probe(struct peer *peer)
{
	peer->offers_probe = true;
}

bool peer_is_crowded(const struct peer *peer)
{
	return quota_used(&peer->quota) > peer->quota.limit / 4 * 3;
}

const char *peer_source(const struct peer *peer)
{
	return peer->source;
}

bool peer_is_self(const struct peer *peer)
{
	return peer->kind == PEER_SELF;
}

const char *peer_called_at(const struct peer *peer)
{
	return peer->kind == PEER_CALLED ? peer->address : NULL;
}

bool peer_has(const struct peer *peer, uint64_t feature)
{
	return peer_is_self(peer) || peer->features & feature;
}

void peer_counters(const struct peer *peer, uint64_t *ret_bytes_in, uint64_t *ret_bytes_out)
{
	const struct lane *lane;
	uint64_t in = peer->bytes_in, out = peer->bytes_out;

	list_for_each (lane, &peer->lanes, link) {
		in += atomic_load_explicit(&lane->bytes_in, memory_order_relaxed);
		out += atomic_load_explicit(&lane->bytes_out, memory_order_relaxed);
	}
	*ret_bytes_in = in;
	*ret_bytes_out = out;
}

/* Lanes */

struct lane *peer_find_lane(const struct peer *peer, unsigned index)
{
	struct lane *lane;

	list_for_each (lane, &peer->lanes, link)
		if (!lane->rdma && lane->index == index && !lane->is_closing)
			return lane;
	return NULL;
}

bool peer_has_lane(const struct peer *peer, unsigned index)
{
	return peer_find_lane(peer, index);
}

struct lane *peer_find_rail(const struct peer *peer, unsigned rail)
{
	struct lane *lane;

	list_for_each (lane, &peer->lanes, link)
		if (lane->rdma && lane->index == rail)
			return lane;
	return NULL;
}

unsigned peer_n_rails(const struct peer *peer)
{
	const struct lane *lane;
	unsigned n = 0;

	list_for_each (lane, &peer->lanes, link)
		n += lane->rdma && !lane->is_closing;
	return n;
}

/* The lane on which notices go. A peer that is up has it. */
static struct lane *first_lane(const struct peer *peer)
{
	return container_of(peer->lanes.next, struct lane, link);
}

static void send_notices(struct peer *peer, uint64_t before)
{
	struct notice *notice;

	while ((notice = list_first(&peer->notices, struct notice, link)) &&
	       notice->message.sequence < before) {
		list_remove(&notice->link);
		lane_send(first_lane(peer), &notice->message);
	}
}

/* What was asked for while there was no lane, in that order; or none for it: that waits on. */
static void send_waiting(struct peer *peer)
{
	struct list calls = LIST_INIT(calls);
	struct call *call;

	list_append(&calls, &peer->waiting);
	while ((call = list_first(&calls, struct call, link))) {
		send_notices(peer, call->message.sequence);
		list_remove(&call->link);
		call_send(call);
	}
	send_notices(peer, UINT64_MAX);
}

void peer_take_lane(struct peer *peer, struct lane *lane, unsigned index, bool is_accepted)
{
	peer->state = PEER_UP;
	lane->business_ns = clock_now_ns();
	lane->index = index;
	lane->is_accepted = is_accepted;
	lane->makes_calls = !is_accepted;
	list_push_back(&peer->lanes, &lane->link);
	lane_start(lane);
	send_waiting(peer);
}

/* Loss */

static void peer_post(struct peer *peer)
{
	if (peer->is_posted)
		return;
	peer->is_posted = true;
	mailbox_post(&peer->transport->mailbox, &peer->mail);
}

static void tell_loss(struct peer *peer)
{
	struct transport *transport = peer->transport;

	if (!transport->is_closed)
		transport->ops->peer_lost(transport->user, peer, peer->failure.text);
}

/* Calls, and what has come in, that end in a step: each call is a part that waits for its server from then on. */
#define ENDED_MAX 64

/* Returns whether there are more. */
static bool end_some(struct peer *peer)
{
	char text[ERROR_TEXT_MAX + 1];

	(void)snprintf(text, sizeof(text), "%.180s: %.250s", peer->name, peer->failure.text);
	return incoming_peer_lost(peer, ENDED_MAX) ||
	       peer_end_calls(peer, ENDED_MAX, peer->failure.status, text);
}

/* Calls that are begun inside the callbacks end in a later turn. */
static bool peer_on_end(struct chore *chore)
{
	struct peer *peer = container_of(chore, struct peer, ending.chore);
	bool more;

	peer_hold(peer);
	more = end_some(peer);
	if (!more && peer->state == PEER_LOSING) {
		peer->state = PEER_LOST;
		tell_loss(peer);
	}
	if (!more) {
		peer_take_calls(peer);
		more = !list_empty(&peer->ending.calls);
	}
	peer_release(peer);
	return more;
}

/* Some at once; the rest, which may be as many as the peer's quota lets be, in the steps of a chore. */
static void peer_end(struct peer *peer)
{
	struct transport *transport = peer->transport;
	bool more;

	do
		more = peer_on_end(&peer->ending.chore);
	while (more && transport->is_closed);
	if (more)
		loop_begin(transport->loop, &peer->ending.chore);
}

bool peer_end_now(struct transport *transport)
{
	struct peer *peer;

	list_for_each (peer, &transport->lost_peers, link) {
		if (!list_linked(&peer->ending.chore.link))
			continue;
		loop_abort(&peer->ending.chore);
		peer_end(peer);
		return true;
	}
	return false;
}

/* No lane is left, so nobody but us knows its calls. */
static void peer_finish(struct peer *peer)
{
	loop_timer_cancel(&peer->timer);
	list_remove(&peer->link);
	list_push_back(&peer->transport->lost_peers, &peer->link);
	drop_notices(peer);
	peer_take_calls(peer);
	peer_end(peer);
}

/*
 * Before a peer is up it is lost with the reason why it could not be reached; afterwards with
 * -ECONNRESET for all, since what has become of its calls nobody knows.
 */
void peer_lose(struct peer *peer, int status, const char *why)
{
	struct lane *lane;

	assert(peer->kind != PEER_SELF);
	if (peer->state >= PEER_LOSING)
		return;
	if (peer->state == PEER_UP && !peer->transport->is_closed)
		status = -ECONNRESET;
	(void)failure_set(&peer->failure, status, "%s", why);
	peer->state = PEER_LOSING;
	peer->transport->hooks->drop_dial(peer);
	peer->transport->hooks->rdma_drop(peer);
	list_for_each (lane, &peer->lanes, link)
		lane_close(lane);
	if (list_empty(&peer->lanes))
		peer_finish(peer);
}

bool peer_lane_broke(struct lane *lane, int status, const char *why)
{
	struct peer *peer = lane->peer;

	/* What the other side did wrong it would do again. */
	if (!lane->is_spare || peer->state != PEER_UP || status == -EPROTO || status == -EDQUOT ||
	    status == -ENOMEM)
		return false;
	if (lane->is_closing)
		return true;
	(void)failure_set(&lane->broke, status, "%s", why);
	log_notice("%s: connection %u: %s; its work goes another way", peer->name, lane->index,
		   why);
	metric_add(&peer->transport->lanes_broken, 1);
	lane_close(lane);
	return true;
}

static void lane_lost(struct lane *lane)
{
	if (lane->rdma && lane->transport->hooks->rdma_broke(lane, false))
		return;
	if (peer_lane_broke(lane, lane->failure.status, lane->failure.text))
		return;
	peer_lose(lane->peer, lane->failure.status, lane->failure.text);
}

/* The work of a spare lane, and the lane, are made anew. */
static void spare_closed(struct peer *peer, struct lane *lane)
{
	int r;

	incoming_lane_closed(lane);
	if (!call_reroute_all(lane)) {
		peer_lose(peer, lane->broke.status, lane->broke.text);
		return;
	}
	if (peer->kind != PEER_CALLED || peer->state != PEER_UP)
		return;
	r = peer->transport->hooks->make_spare(peer, lane->index);
	if (r)
		peer_lose(peer, r, "out of memory");
}

static void lane_closed(struct lane *lane)
{
	struct peer *peer = lane->peer;

	bool is_up = peer->state == PEER_UP, is_rail = lane->rdma && is_up;
	unsigned n_moved = 0;

	list_remove(&lane->link);
	peer->bytes_in += atomic_load_explicit(&lane->bytes_in, memory_order_relaxed);
	peer->bytes_out += atomic_load_explicit(&lane->bytes_out, memory_order_relaxed);
	if (lane->is_accepted)
		peer->transport->port.n_accepted--;
	if (is_rail) {
		incoming_lane_closed(lane);
		n_moved = call_move_all(lane);
	} else if (is_up && lane->is_spare) {
		spare_closed(peer, lane);
	}
	lane_free(lane);
	if (is_rail)
		peer->transport->hooks->rdma_gone(peer, n_moved);
	if (list_empty(&peer->lanes))
		peer_finish(peer);
}

static void peer_on_mail(struct mail *mail)
{
	struct peer *peer = container_of(mail, struct peer, mail);
	struct failure failure = peer->failure;

	peer->is_posted = false;
	if (peer->state < PEER_LOSING) {
		peer_lose(peer, failure.status, failure.text);
	} else if (peer->state == PEER_LOST && !list_linked(&peer->ending.chore.link)) {
		peer_take_calls(peer);
		peer_end(peer);
	}
}

void peer_kill(struct peer *peer, const char *why)
{
	if (peer->kind == PEER_SELF || peer->state >= PEER_LOSING || peer->is_posted)
		return;
	(void)failure_set(&peer->failure, -ECONNRESET, "%s", why);
	peer_post(peer);
}

void peer_wait_for_lane(struct peer *peer, struct call *call)
{
	call->state = CALL_WAITING;
	call->message.sequence = peer->next_sequence++;
	list_push_back(&peer->waiting, &call->link);
	if (peer->state == PEER_LOST)
		peer_post(peer);
}

/*
 * Silence. Nobody is asked for a sign of life while nothing is wanted from him: the timer runs
 * while there is business on some lane, and once more after it, so that the many short calls do not
 * each set and cancel it.
 */

/* Returns whether it was sent. */
static bool lane_ping(struct lane *lane)
{
	bool is_beat = lane->index == DATA_LANE_BEAT && !lane->rdma;
	struct data_header header = { .op = DATA_PING };
	struct notice *notice = NULL;

	if (FAILPOINT_DROPS("ping-sent"))
		return true;
	/* On its own thread, so charged to nobody: one at a time waits to be written. */
	if (is_beat && lane_queued(lane))
		return true;
	/* Out of memory, or over the quota: no ping this time. */
	if (notice_new(is_beat ? NULL : &lane->peer->held, &header, NULL, NULL, &notice))
		return false;
	lane_send(lane, &notice->message);
	return true;
}

/*
 * When to look again at this lane, or 0 when its silence has become too long. It takes questions
 * without an answer, not the clock alone: after a stop of our own (no processor, a suspended
 * machine) the answers may lie unread.
 */
static uint64_t lane_check_silence(struct lane *lane, uint64_t now_ns, uint64_t timeout_ns)
{
	uint64_t heard_ns =
		MAX(atomic_load_explicit(&lane->heard_ns, memory_order_relaxed), lane->business_ns);
	uint64_t silent_ns = now_ns > heard_ns ? now_ns - heard_ns : 0;

	if (silent_ns < timeout_ns / 3) {
		lane->n_pings = 0;
		return heard_ns + timeout_ns / 3;
	}
	if (heard_ns != lane->checked_ns)
		lane->n_pings = 0;
	lane->checked_ns = heard_ns;
	if (silent_ns >= timeout_ns && lane->n_pings >= 2)
		return 0;
	lane->n_pings += lane_ping(lane);
	return silent_ns >= timeout_ns ? now_ns + timeout_ns / 3
				       : MIN(now_ns + timeout_ns / 3, heard_ns + timeout_ns);
}

static void lose_silent(struct peer *peer)
{
	uint64_t timeout_ms = peer->transport->settings.peer_timeout_ns / NSEC_PER_MSEC;
	struct failure failure;

	(void)failure_set(&failure, -ETIMEDOUT, "no sign of life for %" PRIu64 " ms", timeout_ms);
	peer_lose(peer, failure.status, failure.text);
}

static void peer_on_timer(struct loop_timer *timer)
{
	struct peer *peer = container_of(timer, struct peer, timer);
	struct lane *lane, *beat = peer_find_lane(peer, DATA_LANE_BEAT);
	uint64_t now_ns = clock_now_ns(), next_ns = CLOCK_NEVER;
	bool has_business = false;

	if (peer->state != PEER_UP)
		return;
	list_for_each (lane, &peer->lanes, link)
		has_business |= lane->n_business && !lane->is_closing;
	list_for_each (lane, &peer->lanes, link) {
		uint64_t timeout_ns = peer->transport->settings.peer_timeout_ns, at_ns;

		if (lane->is_closing || !(lane == beat ? has_business : lane->n_business > 0))
			continue;
		/*
		 * Who is busy answers late on lanes with business, and on time on the one without.
		 */
		if (beat && lane != beat)
			timeout_ns *= BUSY_FACTOR;
		at_ns = lane_check_silence(lane, now_ns, timeout_ns);
		if (!at_ns && lane->rdma && lane->transport->hooks->rdma_broke(lane, true))
			continue;
		if (!at_ns && lane != beat && peer_lane_broke(lane, -ETIMEDOUT, "no sign of life"))
			continue;
		if (!at_ns) {
			lose_silent(peer);
			return;
		}
		next_ns = MIN(next_ns, at_ns);
	}
	if (next_ns != CLOCK_NEVER && loop_timer_set(peer->transport->loop, timer, next_ns))
		peer_lose(peer, -ENOMEM, "out of memory");
}

void lane_begin_business(struct lane *lane)
{
	struct peer *peer = lane->peer;
	struct transport *transport = peer->transport;
	struct lane *beat;

	if (lane->n_business++ > 0)
		return;
	lane->business_ns = loop_turn_ns(transport->loop);
	if (peer->timer.loop)
		return;
	beat = peer_find_lane(peer, DATA_LANE_BEAT);
	if (beat)
		beat->business_ns = lane->business_ns;
	if (loop_timer_set(transport->loop, &peer->timer,
			   lane->business_ns + transport->settings.peer_timeout_ns / 3))
		peer_kill(peer, "out of memory");
}

void lane_end_business(struct lane *lane)
{
	assert(lane->n_business > 0);
	lane->n_business--;
}

/* Notices */

int notice_new(struct quota *quota, const struct data_header *header, struct block *block,
	       const void *payload, struct notice **ret_notice)
{
	struct notice *notice = held_new(quota, sizeof(*notice) + (block ? 0 : header->len));

	if (!notice)
		return error_origin(-errno);
	*notice = (struct notice){
		.header = *header,
		.message = {
			.header = &notice->header,
			.payload = block ? block->data : notice->payload,
			.kind = MESSAGE_NOTICE,
			.urgent = true,
		},
		.block = block ? block_ref(block) : NULL,
	};
	notice->header.magic = DATA_MAGIC;
	notice->header.version = DATA_VERSION;
	notice->header.cookie = 0;
	if (payload)
		memcpy(notice->payload, payload, header->len);
	list_init(&notice->link);
	*ret_notice = notice;
	return 0;
}

static int notice_send(struct peer *peer, const struct data_header *header, struct block *block,
		       const void *payload)
{
	struct notice *notice = NULL;
	int r;

	assert(header->len <= DATA_SETUP_MAX);
	if (peer->state >= PEER_LOSING)
		return 0;
	r = notice_new(peer->kind == PEER_SELF ? NULL : &peer->held, header, block, payload,
		       &notice);
	if (r == -EDQUOT) {
		peer_kill(peer, "it does not take what it is told: over peer_quota, or the share "
				"of where it is");
		return 0;
	}
	if (r)
		return error_trace(r);
	if (peer->kind == PEER_SELF) {
		inproc_notice(peer, notice);
	} else if (peer->state == PEER_UP) {
		lane_send(first_lane(peer), &notice->message);
	} else {
		notice->message.sequence = peer->next_sequence++;
		list_push_back(&peer->notices, &notice->link);
	}
	return 0;
}

int peer_notice(struct peer *peer, const struct data_header *header, const void *payload)
{
	return notice_send(peer, header, NULL, payload);
}

int peer_notice_block(struct peer *peer, const struct data_header *header, struct block *block)
{
	return notice_send(peer, header, block, NULL);
}
