/*
 * What holds a call or notice that comes in, from the memory of its payload until its answer is
 * written. receive.c and rdma/receive.c make it, inproc.c of our own calls; delivery.c says what
 * becomes of it. Any thread.
 */
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include <inttypes.h>

/* As many are kept for reuse: some MiB. */
#define KEPT_MAX 8192

/* What it holds is nothing, or of one before it; or NULL. */
static struct incoming *take_kept(struct transport *transport)
{
	struct incoming *incoming = list_first(&transport->spare_incoming, struct incoming, link);

	if (incoming) {
		list_remove(&incoming->link);
		list_fetch_first(&transport->spare_incoming, struct incoming, link,
				 sizeof(*incoming));
	} else if (transport->n_incoming < KEPT_MAX) {
		incoming = bulk_take(&transport->incoming_bulk, sizeof(*incoming));
		transport->n_incoming += !!incoming;
	}
	return incoming;
}

/* All but the message, which is made when the answer is, and what the caller sets. */
static void incoming_init(struct incoming *incoming, bool is_kept)
{
	incoming->delivery.payload = NULL;
	incoming->delivery.payload_block = NULL;
	incoming->delivery.link = (struct list){ 0 };
	incoming->delivery.stalls = false;
	incoming->message.target = (struct rdma_target){ 0 };
	incoming->call = NULL;
	incoming->window = NULL;
	incoming->cookie = 0;
	incoming->is_answered = incoming->is_written = incoming->is_damaged = false;
	incoming->is_kept = is_kept;
}

/* Where one thread does all they are used again, and no memory is asked for. */
static struct incoming *incoming_take(struct transport *transport, bool is_home)
{
	struct incoming *kept = is_home ? take_kept(transport) : NULL;
	struct incoming *incoming = kept ?: calloc(1, sizeof(*incoming));

	if (incoming)
		incoming_init(incoming, kept);
	return incoming;
}

static void incoming_give(struct transport *transport, struct incoming *incoming)
{
	if (incoming->is_kept)
		list_push_front(&transport->spare_incoming, &incoming->link);
	else
		free(incoming);
}

static int charge_peer(struct peer *peer, uint64_t amount)
{
	if (quota_charge(&peer->quota, amount))
		return QUOTA_E_FULL;
	if (!quota_charge(&peer->held, amount))
		return 0;
	quota_release(&peer->quota, amount);
	return QUOTA_E_FULL;
}

static void release_peer(struct peer *peer, uint64_t charged, uint64_t held)
{
	quota_release(&peer->held, held);
	quota_release(&peer->quota, charged);
}

static uint64_t held_for(uint32_t payload_len)
{
	return sizeof(struct incoming) + (payload_len ? block_bytes(payload_len) : 0);
}

/* Of the two limits, the one that has less left. */
int incoming_over_quota(const struct peer *peer, uint32_t payload_len, struct failure *failure)
{
	uint64_t amount = held_for(payload_len);

	if (peer->account && quota_available(&peer->quota) >= amount &&
	    quota_available(&peer->held) >= amount)
		return account_full(peer->account, ACCOUNT_MESSAGES, failure);
	return failure_set(failure, -EDQUOT,
			   "it would have us hold more than %" PRIu64 " bytes for it",
			   peer->quota.limit);
}

int incoming_new(struct peer *peer, struct lane *lane, uint32_t payload_len,
		 struct incoming **ret_incoming)
{
	struct incoming *incoming;
	uint64_t charge = lane ? held_for(payload_len) : 0;

	if (charge_peer(peer, charge))
		return QUOTA_E_FULL;
	incoming = incoming_take(peer->transport, !lane || !lane->worker->thread);
	if (!incoming) {
		release_peer(peer, charge, charge);
		return error_origin(-ENOMEM);
	}
	incoming->delivery.peer = peer;
	incoming->lane = lane;
	incoming->charged = incoming->held = charge;
	incoming->message.mail.run = peer->home->arrived;
	incoming->rail = RAIL_TCP;
	list_init(&incoming->link);
	*ret_incoming = incoming;
	return 0;
}

struct incoming *incoming_free(struct incoming *incoming)
{
	if (!incoming)
		return NULL;
	block_unref(incoming->delivery.payload_block);
	release_peer(incoming->delivery.peer, incoming->charged, incoming->held);
	incoming_give(incoming->delivery.peer->transport, incoming);
	return NULL;
}

static void incoming_on_written(struct mail *mail)
{
	struct incoming *incoming = container_of(mail, struct incoming, message.mail);

	/* Not written: it waits to be asked for, or for the end of its peer. */
	if (!incoming->is_written && list_linked(&incoming->link))
		return;
	list_remove(&incoming->link);
	incoming_free(incoming);
}

void incoming_written(struct incoming *incoming, bool is_written)
{
	if (!incoming->lane->rdma) {
		incoming_free(incoming);
		return;
	}
	incoming->is_written = is_written;
	incoming->message.mail.run = incoming_on_written;
	mailbox_post(&incoming->lane->to_home, &incoming->message.mail);
}
