/*
 * The accepting side of RDMA: offers our ports to a peer over TCP, and accepts a connection
 * whose hello proves that it answers an offer. Home thread.
 */
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/handshake.h"

#include <stdio.h>
#include <sys/random.h>

static struct peer *find_caller(struct rdma *rdma, uint64_t id, unsigned group)
{
	struct peer *peer;

	list_for_each (peer, &rdma->transport->peers, link)
		if (peer->kind == PEER_CALLING && peer->state == PEER_UP && peer->id == id &&
		    peer->group == group)
			return peer;
	return NULL;
}

static bool is_rail_free(struct rdma *rdma, const struct peer *peer, unsigned rail)
{
	const struct rdma_link *link;

	list_for_each (link, &rdma->links, link)
		if (link->peer == peer && link->rail == rail)
			return false;
	return true;
}

/* Returns NULL, or why it is refused. */
static const char *check_request(struct rdma_link *link, const struct data_rdma_hello *wire,
				 unsigned rail)
{
	unsigned char proof[DATA_PROOF_LEN];

	if (!link->peer->rdma || !link->peer->rdma->has_offered)
		return "nothing was offered to it";
	if (rdma_link_prove(link, wire, NULL, proof))
		return "out of memory";
	if (!handshake_proofs_equal(proof, wire->proof))
		return "the cluster keys differ, or the offer was an old one";
	if (!is_rail_free(link->rdma, link->peer, rail))
		return "that rail is there already";
	return NULL;
}

/* Returns NULL, or why not. */
static const char *accept_link(struct rdma_link *link, const struct data_rdma_hello *wire,
			       char *why, size_t size)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct rdma_conn_param param = { .rnr_retry_count = 6 };
	int r;

	rdma_link_set_tos(link);
	if (rdma_link_make(link, why, size))
		return why;
	r = rdma_link_ready(link);
	if (r) {
		rdma_explain(-r, "cannot ready a queue pair", why, size);
		return why;
	}
	rdma_hello_make(link, link->peer->group);
	if (rdma_link_prove(link, wire, &link->mine, link->mine.proof))
		return "out of memory";
	param.private_data = &link->mine;
	param.private_data_len = sizeof(link->mine);
	param.qp_num = link->qp->qp_num;
	if (verbs->cm_accept(link->id, &param)) {
		rdma_explain(errno, "cannot accept a connection", why, size);
		return why;
	}
	link->state = LINK_ACCEPTING;
	return NULL;
}

/* Returns NULL, or why it is refused. The id is the link's once there is one. */
static const char *on_request(struct rdma *rdma, struct rdma_cm_id *id,
			      const struct rdma_conn_param *param, struct rdma_link **ret_link,
			      char *text, size_t size)
{
	struct transport *transport = rdma->transport;
	struct data_rdma_hello wire, hello;
	struct rdma_port *port = rdma_port_of(rdma, id);
	struct peer *peer;
	const char *why;

	if (!port || !rdma_hello_take(param, &wire, &hello))
		return "not the RDMA of the data protocol";
	why = rdma_hello_check(&hello);
	if (why)
		return why;
	peer = find_caller(rdma, hello.sender, hello.group);
	if (!peer)
		return "a stranger: its TCP connection comes first";
	if (transport->port.n_accepted >= transport->settings.max_connections)
		return "too many connections (max_connections)";
	if (accept_has_its_share(transport, peer_source(peer), text, size))
		return text;
	if (rdma_link_new(rdma, peer, id, ret_link))
		return "out of memory";
	(*ret_link)->is_accepting = true;
	transport->port.n_accepted++;
	peer->n_accepting++;
	(*ret_link)->port = port;
	(*ret_link)->rail = UINT_MAX; /* not yet */
	(*ret_link)->n_theirs = hello.receives;
	(*ret_link)->mtu = MIN(port->mtu, (unsigned)hello.mtu);
	why = check_request(*ret_link, &wire, hello.rail);
	if (why)
		return why;
	(*ret_link)->rail = hello.rail;
	return accept_link(*ret_link, &wire, text, size);
}

void rdma_take_request(struct rdma *rdma, struct rdma_cm_id *id,
		       const struct rdma_conn_param *param)
{
	struct rdma_link *link = NULL;
	char text[320], address[TRANSPORT_ADDRESS_MAX];
	struct address theirs = { 0 };
	const char *why = on_request(rdma, id, param, &link, text, sizeof(text));

	if (!why)
		return;
	memcpy(&theirs.storage, rdma_get_peer_addr(id), sizeof(theirs.in6));
	address_format(&theirs, address, sizeof(address));
	transport_complain(rdma->transport, "rdma: connection from %s refused: %s", address, why);
	(void)rdma->verbs->cm_reject(id, NULL, 0);
	if (link)
		rdma_link_free(link);
	else
		(void)rdma->verbs->cm_destroy_id(id);
}

int rdma_offer(struct peer *peer)
{
	struct rdma *rdma = peer->transport->rdma;
	struct data_rdma_offer offer = { .n_rails = rdma->n_ports };

	if (getrandom(offer.nonce, sizeof(offer.nonce), 0) != (ssize_t)sizeof(offer.nonce))
		return error_origin(-EIO);
	memcpy(peer->rdma->nonce, offer.nonce, sizeof(offer.nonce));
	peer->rdma->has_offered = true;
	for (unsigned i = 0; i < rdma->n_ports; i++) {
		const struct rdma_port *port = &rdma->ports[i];

		rdma_address_to_bytes(&port->address, offer.rails[i].address);
		offer.rails[i].port = rdma_address_port(rdma_get_local_addr(port->listener));
		offer.rails[i].mtu = (uint16_t)port->mtu;
	}
	data_rdma_offer_swap(&offer);
	rdma_send_offer(peer, &offer);
	return 0;
}
