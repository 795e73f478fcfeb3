/*
 * The connecting side of RDMA: makes a link to each port of a peer's offer that has none, finds
 * its route, and checks the answer's proof. peer.c brings offers, link.c events. Home
 * thread.
 */
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/handshake.h"

#include "base/log.h"
#include <stdio.h>

static int link_dial(struct rdma_link *link, const struct data_rdma_rail *rail)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct address source = link->port->address, target;

	rdma_address_from_bytes(rail->address, rail->port, &target);
	if (source.any.sa_family == AF_INET6)
		source.in6.sin6_port = 0;
	else
		source.in.sin_port = 0;
	if (verbs->cm_create_id(link->rdma->events, &link->id, link, RDMA_PS_TCP))
		return -errno;
	rdma_link_set_tos(link);
	if (source.any.sa_family != target.any.sa_family)
		return -EAFNOSUPPORT;
	return verbs->cm_resolve_addr(link->id, &source.any, &target.any, RDMA_RESOLVE_MS) ? -errno
											   : 0;
}

static bool has_link(struct rdma *rdma, const struct peer *peer, unsigned remote)
{
	const struct rdma_link *link;

	list_for_each (link, &rdma->links, link)
		if (link->peer == peer && link->remote == remote)
			return true;
	return false;
}

static unsigned rail_number(const struct peer *peer, unsigned i)
{
	return (peer->rdma->generation * DATA_RDMA_RAILS + i) & DATA_RAIL_MAX;
}

static bool is_of_generation(const struct peer *peer, unsigned rail)
{
	return rail / DATA_RDMA_RAILS == rail_number(peer, 0) / DATA_RDMA_RAILS;
}

/* Whether a rail, or a call that was moved, goes by a number that it would give out. */
static bool is_generation_in_use(const struct peer *peer)
{
	const struct rdma_link *link;
	const struct call *call;

	list_for_each (link, &peer->transport->rdma->links, link)
		if (link->peer == peer && is_of_generation(peer, link->rail))
			return true;
	list_for_each (call, &peer->calls, link)
		if ((call->header.flags & DATA_FLAG_MOVED) &&
		    (is_of_generation(peer, data_flags_rail(call->header.flags)) ||
		     is_of_generation(peer, data_flags_last(call->header.flags))))
			return true;
	return false;
}

/* To the number `i` of max(our ports, their rails). */
static void dial_one(struct peer *peer, const struct data_rdma_offer *offer, unsigned i)
{
	struct rdma *rdma = peer->transport->rdma;
	const struct data_rdma_rail *rail = &offer->rails[i % offer->n_rails];
	struct rdma_link *link;
	int r;

	if (has_link(rdma, peer, i))
		return;
	r = rdma_link_new(rdma, peer, NULL, &link);
	if (r) {
		(void)failure_set(&peer->rdma->failure, r, "out of memory");
		peer->rdma->has_failed = true;
		return;
	}
	peer->rdma->n_dialing++;
	link->remote = i;
	link->rail = rail_number(peer, i);
	link->port = &rdma->ports[i % rdma->n_ports];
	link->mtu = MIN(link->port->mtu, (unsigned)rail->mtu);
	if (link->port->mtu != rail->mtu)
		log_notice("%s: rdma: %s has packets of %u bytes, the other end of %u: the lesser "
			   "is used",
			   peer->name, link->port->device->name, link->port->mtu, rail->mtu);
	r = link_dial(link, rail);
	if (r)
		rdma_link_lost(link, r, strerrordesc_np(-r) ?: "cannot connect");
}

void rdma_dial(struct peer *peer, const struct data_rdma_offer *wire)
{
	struct rdma *rdma = peer->transport->rdma;
	struct rdma_peer *state = peer->rdma;
	struct data_rdma_offer offer = *wire;

	data_rdma_offer_swap(&offer);
	if (!offer.n_rails || offer.n_rails > DATA_RDMA_RAILS) {
		peer_kill(peer, "protocol error: an offer of no rails, or of too many");
		return;
	}
	loop_timer_cancel(&state->timer); /* from here on each link has its own */
	state->has_failed = false;
	state->failure = (struct failure){ 0 };
	memcpy(state->nonce, offer.nonce, sizeof(state->nonce));
	for (unsigned i = 0; i <= DATA_RAIL_MAX / DATA_RDMA_RAILS; i++) {
		state->generation++;
		if (!is_generation_in_use(peer))
			break;
	}
	state->n_dialing++; /* so that the first failure is not the end */
	for (unsigned i = 0; i < MAX(offer.n_rails, rdma->n_ports); i++)
		dial_one(peer, &offer, i);
	state->n_dialing--;
	rdma_dial_over(peer);
}

int rdma_link_connect(struct rdma_link *link, char *why, size_t size)
{
	struct rdma_conn_param param = { .retry_count = RDMA_RETRIES, .rnr_retry_count = 6 };
	int r;

	/* By whatever port the route goes. */
	link->port = rdma_port_of(link->rdma, link->id) ?: link->port;
	if (link->port->device->context != link->id->verbs)
		return failure_set(
			&link->peer->rdma->failure, -ENODEV, "%s",
			strcpy(why, "its route leaves by a device that is not ours to use"));
	link->mtu = MIN(link->mtu, link->port->mtu);
	r = rdma_link_make(link, why, size);
	if (r)
		return r;
	rdma_hello_make(link, link->peer->group);
	r = rdma_link_prove(link, &link->mine, NULL, link->mine.proof);
	param.private_data = &link->mine;
	param.private_data_len = sizeof(link->mine);
	param.qp_num = link->qp->qp_num;
	link->state = LINK_CONNECTING;
	if (!r && link->rdma->verbs->cm_connect(link->id, &param))
		r = -errno;
	if (r)
		rdma_explain(-r, "cannot connect", why, size);
	return r;
}

/* The other side accepted: is it the one whose offer that was? */
int rdma_link_establish(struct rdma_link *link, const struct rdma_conn_param *param, char *why,
			size_t size)
{
	struct data_rdma_hello wire, hello;
	unsigned char proof[DATA_PROOF_LEN];
	const char *wrong = "not the RDMA of the data protocol";
	int r;

	if (rdma_hello_take(param, &wire, &hello))
		wrong = rdma_hello_check(&hello);
	if (!wrong &&
	    (rdma_link_prove(link, &link->mine, &wire, proof) ||
	     !handshake_proofs_equal(proof, wire.proof) || hello.sender != link->peer->id))
		wrong = "it is not the daemon that made the offer, or the cluster keys differ";
	if (wrong) {
		(void)snprintf(why, size, "%s", wrong);
		return -EKEYREJECTED;
	}
	link->n_theirs = hello.receives;
	r = rdma_link_ready(link);
	if (!r && link->rdma->verbs->cm_establish(link->id))
		r = -errno;
	if (r)
		rdma_explain(-r, "cannot ready a queue pair", why, size);
	return r;
}
