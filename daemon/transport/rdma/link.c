/*
 * An RDMA connection that comes up, on either side: its proofs and private data, the states of
 * its queue pair, and its end as a lane or a failure. Home thread.
 */
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/handshake.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdio.h>

#define TIMEOUT_EXP_MAX 21

struct rdma_link *rdma_link_free(struct rdma_link *link)
{
	struct rdma *rdma;

	if (!link)
		return NULL;
	rdma = link->rdma;
	loop_timer_cancel(&link->timer);
	list_remove(&link->link);
	rdma_link_unmake(link);
	if (link->id)
		(void)rdma->verbs->cm_destroy_id(link->id);
	if (link->is_accepting && link->state != LINK_UP) {
		rdma->transport->port.n_accepted--;
		link->peer->n_accepting--;
	}
	free(link);
	return NULL;
}

static void link_on_timer(struct loop_timer *timer)
{
	rdma_link_lost(container_of(timer, struct rdma_link, timer), -ETIMEDOUT,
		       "no answer in time");
}

int rdma_link_new(struct rdma *rdma, struct peer *peer, struct rdma_cm_id *id,
		  struct rdma_link **ret_link)
{
	struct rdma_link *link = calloc(1, sizeof(*link));
	int r;

	if (!link)
		return error_origin(-ENOMEM);
	link->rdma = rdma;
	link->peer = peer;
	link->timer.expired = link_on_timer;
	r = loop_timer_set(rdma->transport->loop, &link->timer,
			   clock_now_ns() + rdma->transport->settings.handshake_timeout_ns);
	if (r) {
		free(link);
		return error_trace(r);
	}
	link->id = id;
	if (id)
		id->context = link;
	list_push_back(&rdma->links, &link->link);
	*ret_link = link;
	return 0;
}

/* Proofs */

int rdma_link_prove(const struct rdma_link *link, const struct data_rdma_hello *connecting,
		    const struct data_rdma_hello *accepting, unsigned char *ret_proof)
{
	struct transport *transport = link->rdma->transport;
	struct data_rdma_hello last = accepting ? *accepting : *connecting;
	struct iovec data[3] = { { link->peer->rdma->nonce, DATA_NONCE_LEN } };
	size_t n = 1;

	memset(last.proof, 0, sizeof(last.proof));
	if (accepting)
		data[n++] = (struct iovec){ (void *)(uintptr_t)connecting, sizeof(*connecting) };
	data[n++] = (struct iovec){ &last, sizeof(last) };
	return error_trace(handshake_sign(transport->key, transport->key_len,
					  accepting ? "bps-rdma-server" : "bps-rdma-client", data,
					  n, ret_proof));
}

void rdma_hello_make(struct rdma_link *link, unsigned group)
{
	link->mine = (struct data_rdma_hello){
		.magic = DATA_MAGIC,
		.version = DATA_RDMA_VERSION,
		.rail = (uint8_t)link->rail,
		.receives = RDMA_RECEIVES,
		.sender = link->is_accepting ? link->rdma->transport->id : link->peer->alias,
		.group = (uint16_t)group,
		.mtu = (uint16_t)link->mtu,
	};
	data_rdma_hello_swap(&link->mine);
}

/* Returns NULL, or what is wrong. */
const char *rdma_hello_check(const struct data_rdma_hello *hello)
{
	if (hello->magic != DATA_MAGIC || hello->version != DATA_RDMA_VERSION)
		return "not the RDMA of the data protocol, or another version of it";
	if (hello->rail > DATA_RAIL_MAX)
		return "a number of a rail that cannot be";
	if (hello->receives < 4 || hello->receives > DATA_RDMA_RECEIVES)
		return "a number of receives that cannot be";
	return NULL;
}

/* Private data comes padded. */
bool rdma_hello_take(const struct rdma_conn_param *param, struct data_rdma_hello *ret_wire,
		     struct data_rdma_hello *ret_hello)
{
	if (!param->private_data || param->private_data_len < sizeof(*ret_wire))
		return false;
	memcpy(ret_wire, param->private_data, sizeof(*ret_wire));
	*ret_hello = *ret_wire;
	data_rdma_hello_swap(ret_hello);
	return true;
}

/* Queue pairs */

static enum ibv_mtu mtu_of(unsigned bytes)
{
	enum ibv_mtu mtu = IBV_MTU_256;

	while (mtu < IBV_MTU_4096 && 128u << (mtu + 1) <= bytes)
		mtu++;
	return mtu;
}

/*
 * How long the card waits before it sends again, so that it gives up in less than the time that
 * makes a peer lost.
 */
static uint8_t timeout_exponent(const struct rdma *rdma)
{
	uint64_t each_ns = rdma->transport->settings.peer_timeout_ns / 2 / (RDMA_RETRIES + 1);
	uint8_t exponent = 8;

	while (exponent < TIMEOUT_EXP_MAX && 4096ull << (exponent + 1) <= each_ns)
		exponent++;
	return exponent;
}

/* To RTR and RTS, with what librdmacm found out and what the settings say. Returns 0 or -errno. */
int rdma_link_ready(struct rdma_link *link)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	const struct transport_rdma_params *params = &link->rdma->params;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	int mask;

	if (verbs->cm_init_qp_attr(link->id, &attr, &mask))
		return -errno;
	attr.path_mtu = MIN(attr.path_mtu, mtu_of(link->mtu));
	link->mtu = 128u << attr.path_mtu;
	if (params->service_level)
		attr.ah_attr.sl = (uint8_t)params->service_level;
	if (params->traffic_class)
		attr.ah_attr.grh.traffic_class = (uint8_t)params->traffic_class;
	if (params->gid_index != TRANSPORT_GID_AUTO && attr.ah_attr.is_global)
		attr.ah_attr.grh.sgid_index = (uint8_t)params->gid_index;
	attr.max_dest_rd_atomic = 0; /* nobody reads here */
	attr.min_rnr_timer = 12;
	if (verbs->modify_qp(link->qp, &attr, mask))
		return -errno;
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS };
	if (verbs->cm_init_qp_attr(link->id, &attr, &mask))
		return -errno;
	attr.timeout = timeout_exponent(link->rdma);
	attr.retry_cnt = RDMA_RETRIES;
	attr.rnr_retry = 6;
	attr.max_rd_atomic = 0;
	return verbs->modify_qp(link->qp, &attr, mask) ? -errno : 0;
}

void rdma_link_set_tos(struct rdma_link *link)
{
	uint8_t tos = (uint8_t)link->rdma->params.traffic_class;

	if (tos)
		(void)link->rdma->verbs->cm_set_option(link->id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS,
						       &tos, sizeof(tos));
}

/* The link becomes a lane; nothing of the link is home's after it but its id. */
static void link_up(struct rdma_link *link)
{
	struct rdma_peer *state = link->peer->rdma;
	unsigned *n_under_way = link->is_accepting ? &link->peer->n_accepting : &state->n_dialing;
	enum rdma_link_state before = link->state;
	char address[TRANSPORT_ADDRESS_MAX];
	struct address theirs = { 0 };
	int r;

	loop_timer_cancel(&link->timer);
	/* Before it is up, as that may lose the peer, which drops links that are not, and counts none any more. */
	--*n_under_way;
	link->state = LINK_UP;
	r = link->rdma->steps->up(link->peer, link, link->rail, link->is_accepting);
	if (r) {
		++*n_under_way;
		link->state = before;
		rdma_link_lost(link, r, "out of memory");
		return;
	}
	memcpy(&theirs.storage, rdma_get_peer_addr(link->id), sizeof(theirs.in6));
	address_format(&theirs, address, sizeof(address));
	log_info("%s: rdma: %s connected %s %s, packets of %u bytes", link->peer->name,
		 link->port->device->name, link->is_accepting ? "from" : "to", address, link->mtu);
	metric_add(&link->rdma->metrics.links, 1);
	state->is_up = true;
	state->redial_ns = RDMA_REDIAL_MIN_NS;
	if (!link->is_accepting)
		link->rdma->steps->over(link->peer);
}

/* A link that is being made fails. */
void rdma_link_lost(struct rdma_link *link, int status, const char *why)
{
	const struct rdma *rdma = link->rdma;
	struct peer *peer = link->peer;
	bool is_ours = !link->is_accepting;

	if (is_ours) {
		peer->rdma->has_failed = true;
		(void)failure_set(&peer->rdma->failure, status, "%s: %s", link->port->device->name,
				  why);
	} else {
		transport_complain(link->rdma->transport, "%s: rdma: %s", peer->name, why);
	}
	rdma_link_free(link);
	if (!is_ours)
		return;
	peer->rdma->n_dialing--;
	rdma->steps->over(peer);
}

void rdma_links_drop(struct peer *peer)
{
	struct rdma *rdma = peer->transport->rdma;
	struct rdma_link *link, *next;

	if (!rdma)
		return;
	list_for_each_safe (link, next, &rdma->links, link)
		if (link->peer == peer && link->state != LINK_UP)
			rdma_link_free(link);
}

void rdma_link_on_event(struct rdma_link *link, const struct rdma_cm_event *event)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	const char *name = verbs->cm_event_str(event->event);
	char why[320];
	int r = 0;

	if (link->state == LINK_UP) {
		if ((event->event == RDMA_CM_EVENT_DISCONNECTED ||
		     event->event == RDMA_CM_EVENT_DEVICE_REMOVAL) &&
		    !link->lane->is_closing)
			rdma_link_break(link, event->event == RDMA_CM_EVENT_DISCONNECTED
						      ? "the connection was closed"
						      : "the device was removed");
		return;
	}
	(void)snprintf(why, sizeof(why), "%s", name);
	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		r = verbs->cm_resolve_route(link->id, RDMA_RESOLVE_MS) ? -errno : 0;
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		r = link->rdma->steps->connect(link, why, sizeof(why));
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		r = link->rdma->steps->establish(link, &event->param.conn, why, sizeof(why));
		if (!r) {
			link_up(link);
			return;
		}
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		link_up(link);
		return;
	case RDMA_CM_EVENT_REJECTED:
		(void)snprintf(why, sizeof(why), "refused: its log says why");
		r = -ECONNREFUSED;
		break;
	default:
		r = event->status < 0 ? event->status : -ECONNREFUSED;
		(void)snprintf(why, sizeof(why), "%s: %s", name, strerrordesc_np(-r) ?: "failed");
		break;
	}
	if (r)
		rdma_link_lost(link, r, why);
}

/*
 * Acknowledged before it is acted upon, since destroying an id waits for that; private data is
 * copied for it.
 */
