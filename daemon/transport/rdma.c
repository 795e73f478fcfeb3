#include "transport/rdma.h"

#include "base/clock.h"
#include "base/log.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/random.h>

#define RESOLVE_MS	2000
#define BACKLOG		128
#define REDIAL_MIN_NS	(2 * NSEC_PER_SEC)
#define REDIAL_MAX_NS	(120 * NSEC_PER_SEC)
#define RETRIES		7 /* the most there is */
#define TIMEOUT_EXP_MAX 21

static void links_drop(struct peer *peer);
static void link_lost(struct rdma_link *link, int status, const char *why);

bool rdma_is_strict(const struct rdma *rdma)
{
	return rdma && rdma->params.kind == TRANSPORT_RDMA;
}

/* Ports */

static struct rdma_device *device_of(struct rdma *rdma, struct ibv_context *context)
{
	for (unsigned i = 0; i < rdma->n_devices; i++)
		if (rdma->devices[i].context == context)
			return &rdma->devices[i];
	return NULL;
}

static bool can_page_on_demand(struct ibv_context *context)
{
	const uint32_t wanted = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;
	struct verbs_context *verbs = verbs_get_ctx_op(context, query_device_ex);
	struct ibv_device_attr_ex attr = { 0 };

	return verbs && !verbs->query_device_ex(context, NULL, &attr, sizeof(attr)) &&
	       (attr.odp_caps.general_caps & IBV_ODP_SUPPORT) &&
	       (attr.odp_caps.per_transport_caps.rc_odp_caps & wanted) == wanted;
}

static int device_add(struct rdma *rdma, struct ibv_context *context,
		      struct rdma_device **ret_device)
{
	struct rdma_device *device = device_of(rdma, context);

	if (!device) {
		if (rdma->n_devices == RDMA_DEVICES)
			return error_origin(-ENOSPC);
		device = &rdma->devices[rdma->n_devices];
		*device = (struct rdma_device){
			.context = context,
			.pd = rdma->verbs->alloc_pd(context),
			.index = rdma->n_devices,
			.name = rdma->verbs->get_device_name(context->device),
			.has_odp = can_page_on_demand(context),
		};
		if (!device->pd)
			return error_origin(-errno);
		rdma->n_devices++;
	}
	*ret_device = device;
	return 0;
}

/* Whether "a b:2" names port 2 of b, or any of a. */
static bool list_names(const char *list, const char *device, unsigned port)
{
	char exact[80];
	size_t device_len = strlen(device), n;

	if (!list || !list[strspn(list, " ,")])
		return true;
	(void)snprintf(exact, sizeof(exact), "%s:%u", device, port);
	for (; *(list += strspn(list, " ,")); list += n) {
		n = strcspn(list, " ,");
		if ((n == device_len && !strncmp(list, device, n)) ||
		    (n == strlen(exact) && !strncmp(list, exact, n)))
			return true;
	}
	return false;
}

static void address_to_bytes(const struct address *address, uint8_t bytes[16])
{
	if (address->any.sa_family == AF_INET6) {
		memcpy(bytes, &address->in6.sin6_addr, 16);
		return;
	}
	memset(bytes, 0, 10);
	bytes[10] = bytes[11] = 0xff;
	memcpy(bytes + 12, &address->in.sin_addr, 4);
}

static void address_from_bytes(const uint8_t bytes[16], uint16_t port, struct address *ret_address)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	*ret_address = (struct address){ 0 };
	if (!memcmp(bytes, mapped, sizeof(mapped))) {
		ret_address->len = sizeof(ret_address->in);
		ret_address->in.sin_family = AF_INET;
		ret_address->in.sin_port = htons(port);
		memcpy(&ret_address->in.sin_addr, bytes + 12, 4);
		return;
	}
	ret_address->len = sizeof(ret_address->in6);
	ret_address->in6.sin6_family = AF_INET6;
	ret_address->in6.sin6_port = htons(port);
	memcpy(&ret_address->in6.sin6_addr, bytes, 16);
}

static uint16_t address_port(const struct sockaddr *address)
{
	return ntohs(address->sa_family == AF_INET6
			     ? ((const struct sockaddr_in6 *)address)->sin6_port
			     : ((const struct sockaddr_in *)address)->sin_port);
}

/* What others can reach: no loopback, and of IPv6 nothing that needs a scope. */
static bool address_take(const struct ifaddrs *ifa, struct address *ret_address)
{
	struct address address = { 0 };

	if (!ifa->ifa_addr || !(ifa->ifa_flags & IFF_UP) || (ifa->ifa_flags & IFF_LOOPBACK))
		return false;
	if (ifa->ifa_addr->sa_family == AF_INET)
		address.len = sizeof(address.in);
	else if (ifa->ifa_addr->sa_family == AF_INET6)
		address.len = sizeof(address.in6);
	else
		return false;
	memcpy(&address.storage, ifa->ifa_addr, address.len);
	if (address.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address.in6.sin6_addr))
		return false;
	*ret_address = address;
	return true;
}

static bool gid_fits(struct rdma *rdma, struct ibv_context *context, uint8_t port,
		     const struct address *address)
{
	union ibv_gid gid;
	uint8_t bytes[16];

	if (rdma->params.gid_index == TRANSPORT_GID_AUTO)
		return true;
	address_to_bytes(address, bytes);
	if (rdma->verbs->query_gid(context, port, (int)rdma->params.gid_index, &gid))
		return false;
	/* InfiniBand's GIDs are no addresses: any of the port will do. */
	return gid.raw[0] == 0xfe || !memcmp(gid.raw, bytes, sizeof(bytes));
}

/* One of each port: the first address of IPv4, else of IPv6. */
static bool has_port(const struct rdma *rdma, const struct rdma_device *device, uint8_t number)
{
	for (unsigned i = 0; i < rdma->n_ports; i++)
		if (rdma->ports[i].device == device && rdma->ports[i].number == number)
			return true;
	return false;
}

/* An id that is bound to a port's address. Returns 0, or -errno: no port, or not one for us. */
static int port_add(struct rdma *rdma, const struct address *address, struct rdma_cm_id *id)
{
	struct rdma_port *port = &rdma->ports[rdma->n_ports];
	struct ibv_port_attr attr = { 0 };
	struct rdma_device *device = NULL;
	uint8_t number = id->port_num;
	int r;

	if (!id->verbs || id->verbs->device->transport_type != IBV_TRANSPORT_IB)
		return -ENODEV;
	if (!list_names(rdma->params.devices, rdma->verbs->get_device_name(id->verbs->device),
			number) ||
	    !gid_fits(rdma, id->verbs, number, address) ||
	    rdma->verbs->query_port(id->verbs, number, &attr) || attr.state != IBV_PORT_ACTIVE)
		return -ENODEV;
	r = device_add(rdma, id->verbs, &device);
	if (r)
		return error_trace(r);
	if (has_port(rdma, device, number))
		return -EEXIST;
	if (rdma->verbs->cm_listen(id, BACKLOG))
		return error_origin(-errno);
	*port = (struct rdma_port){
		.device = device,
		.number = number,
		.address = *address,
		.mtu = 128u << attr.active_mtu,
		.listener = id,
	};
	rdma->n_ports++;
	return 0;
}

static int try_address(struct rdma *rdma, const struct address *address)
{
	struct address any_port = *address;
	struct rdma_cm_id *id;
	int r;

	if (address->any.sa_family == AF_INET6)
		any_port.in6.sin6_port = 0;
	else
		any_port.in.sin_port = 0;
	if (rdma->verbs->cm_create_id(rdma->events, &id, NULL, RDMA_PS_TCP))
		return error_origin(-errno);
	r = rdma->verbs->cm_bind_addr(id, &any_port.any) ? -errno : port_add(rdma, address, id);
	if (r)
		(void)rdma->verbs->cm_destroy_id(id);
	return r;
}

/* Returns 0, or what was in the way of the last that looked like a port. */
static int find_ports(struct rdma *rdma)
{
	static const sa_family_t families[] = { AF_INET, AF_INET6 };
	struct ifaddrs *all;
	struct address address;
	int r = 0, one;

	if (getifaddrs(&all))
		return error_origin(-errno);
	for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
		for (struct ifaddrs *i = all; i && rdma->n_ports < RDMA_PORTS; i = i->ifa_next) {
			if (!address_take(i, &address) || address.any.sa_family != families[f])
				continue;
			one = try_address(rdma, &address);
			if (one && one != -ENODEV && one != -EEXIST)
				r = one;
		}
	}
	freeifaddrs(all);
	return r;
}

/* Coming and going of a link */

static void link_done(struct rdma_link *link)
{
	struct rdma *rdma = link->rdma;

	loop_timer_cancel(&link->timer);
	list_remove(&link->link);
	rdma_link_unmake(link);
	if (link->id)
		(void)rdma->verbs->cm_destroy_id(link->id);
	if (link->is_accepting && link->state != LINK_UP)
		rdma->transport->n_accepted--;
	free(link);
}

struct rdma_link *rdma_link_free(struct rdma_link *link)
{
	if (link)
		link_done(link);
	return NULL;
}

static void link_on_timer(struct loop_timer *timer)
{
	link_lost(container_of(timer, struct rdma_link, timer), -ETIMEDOUT, "no answer in time");
}

static int link_new(struct rdma *rdma, struct peer *peer, struct rdma_cm_id *id,
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
			   clock_now_ns() + rdma->transport->handshake_timeout_ns);
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

static int link_prove(const struct rdma_link *link, const struct data_rdma_hello *connecting,
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

static void hello_make(struct rdma_link *link, unsigned group)
{
	link->mine = (struct data_rdma_hello){
		.magic = DATA_MAGIC,
		.version = DATA_RDMA_VERSION,
		.rail = (uint8_t)link->rail,
		.receives = RDMA_RECEIVES,
		.sender = link->rdma->transport->id,
		.group = (uint16_t)group,
		.mtu = (uint16_t)link->mtu,
	};
	data_rdma_hello_swap(&link->mine);
}

/* Returns NULL, or what is wrong. */
static const char *hello_check(const struct data_rdma_hello *hello)
{
	if (hello->magic != DATA_MAGIC || hello->version != DATA_RDMA_VERSION)
		return "not the RDMA of the data protocol, or another version of it";
	if (hello->receives < 4 || hello->receives > DATA_RDMA_RECEIVES)
		return "a number of receives that cannot be";
	return NULL;
}

/* Private data comes padded. */
static bool hello_take(const struct rdma_conn_param *param, struct data_rdma_hello *ret_wire,
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

/* How long the card waits before it sends again, so that it gives up in less than the time that makes a peer lost. */
static uint8_t timeout_exponent(const struct rdma *rdma)
{
	uint64_t each_ns = rdma->transport->peer_timeout_ns / 2 / (RETRIES + 1);
	uint8_t exponent = 8;

	while (exponent < TIMEOUT_EXP_MAX && 4096ull << (exponent + 1) <= each_ns)
		exponent++;
	return exponent;
}

/* To RTR and RTS, with what librdmacm found out and what the settings say. Returns 0 or -errno. */
static int link_ready(struct rdma_link *link)
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
	attr.retry_cnt = RETRIES;
	attr.rnr_retry = 6;
	attr.max_rd_atomic = 0;
	return verbs->modify_qp(link->qp, &attr, mask) ? -errno : 0;
}

static void set_tos(struct rdma_link *link)
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
	char address[TRANSPORT_ADDRESS_MAX];
	struct address theirs = { 0 };
	int r;

	loop_timer_cancel(&link->timer);
	if (!link->is_accepting)
		state->n_dialing--;
	link->state = LINK_UP;
	r = peer_add_rdma_lane(link->peer, link, link->rail, link->is_accepting);
	if (r) {
		if (link->is_accepting)
			link->rdma->transport->n_accepted--;
		link_done(link);
		return;
	}
	memcpy(&theirs.storage, rdma_get_peer_addr(link->id), sizeof(theirs.in6));
	address_format(&theirs, address, sizeof(address));
	log_info("%s: rdma: %s connected %s %s, packets of %u bytes", link->peer->name,
		 link->port->device->name, link->is_accepting ? "from" : "to", address, link->mtu);
	atomic_fetch_add(&link->rdma->n_links, 1);
	state->is_up = true;
	state->redial_ns = REDIAL_MIN_NS;
	if (!link->is_accepting && !state->n_dialing)
		loop_timer_cancel(&state->timer);
}

/* The accepting side */

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

static struct rdma_port *port_of(struct rdma *rdma, const struct rdma_cm_id *id)
{
	for (unsigned i = 0; i < rdma->n_ports; i++)
		if (rdma->ports[i].device->context == id->verbs &&
		    rdma->ports[i].number == id->port_num)
			return &rdma->ports[i];
	return NULL;
}

/* Returns NULL, or why it is refused. */
static const char *check_request(struct rdma_link *link, const struct data_rdma_hello *wire,
				 unsigned rail)
{
	unsigned char proof[DATA_PROOF_LEN];

	if (!link->peer->rdma || !link->peer->rdma->has_offered)
		return "nothing was offered to it";
	if (link_prove(link, wire, NULL, proof))
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

	set_tos(link);
	if (rdma_link_make(link, why, size))
		return why;
	r = link_ready(link);
	if (r) {
		rdma_explain(-r, "cannot ready a queue pair", why, size);
		return why;
	}
	hello_make(link, link->peer->group);
	if (link_prove(link, wire, &link->mine, link->mine.proof))
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
	struct rdma_port *port = port_of(rdma, id);
	struct peer *peer;
	const char *why;

	if (!port || !hello_take(param, &wire, &hello))
		return "not the RDMA of the data protocol";
	why = hello_check(&hello);
	if (why)
		return why;
	peer = find_caller(rdma, hello.sender, hello.group);
	if (!peer)
		return "a stranger: its TCP connection comes first";
	if (transport->n_accepted >= transport->max_connections)
		return "too many connections (max_connections)";
	if (link_new(rdma, peer, id, ret_link))
		return "out of memory";
	(*ret_link)->is_accepting = true;
	transport->n_accepted++;
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

static void handle_request(struct rdma *rdma, struct rdma_cm_id *id,
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
		link_done(link);
	else
		(void)rdma->verbs->cm_destroy_id(id);
}

static void send_notice(struct peer *peer, const struct data_rdma_offer *offer)
{
	struct data_header header = { .op = DATA_RDMA, .len = offer ? sizeof(*offer) : 0 };

	/* Out of memory: then there is no RDMA with this peer. */
	(void)peer_notice(peer, &header, offer);
}

static int make_offer(struct peer *peer)
{
	struct rdma *rdma = peer->transport->rdma;
	struct data_rdma_offer offer = { .n_rails = rdma->n_ports };

	if (getrandom(offer.nonce, sizeof(offer.nonce), 0) != (ssize_t)sizeof(offer.nonce))
		return error_origin(-EIO);
	memcpy(peer->rdma->nonce, offer.nonce, sizeof(offer.nonce));
	peer->rdma->has_offered = true;
	for (unsigned i = 0; i < rdma->n_ports; i++) {
		const struct rdma_port *port = &rdma->ports[i];

		address_to_bytes(&port->address, offer.rails[i].address);
		offer.rails[i].port = address_port(rdma_get_local_addr(port->listener));
		offer.rails[i].mtu = (uint16_t)port->mtu;
	}
	data_rdma_offer_swap(&offer);
	send_notice(peer, &offer);
	return 0;
}

/* The connecting side */

/* Nothing is being made any more. */
static void dial_over(struct peer *peer)
{
	struct rdma_peer *state = peer->rdma;
	struct rdma *rdma = peer->transport->rdma;
	char text[ERROR_TEXT_MAX + 1];

	if (rdma_is_strict(rdma) && !peer_n_rails(peer) && !state->is_up) {
		(void)snprintf(text, sizeof(text), "no RDMA, and transport = rdma wants it: %.300s",
			       state->failure.text);
		peer_lose(peer, state->failure.status ?: -ECONNREFUSED, text);
		return;
	}
	if (!peer_n_rails(peer) && state->failure.status)
		log_notice("%s: rdma: %s; parts go by TCP", peer->name, state->failure.text);
	if (loop_timer_set(peer->transport->loop, &state->timer, clock_now_ns() + state->redial_ns))
		return;
	state->redial_ns = MIN(2 * state->redial_ns, (uint64_t)REDIAL_MAX_NS);
}

/* A link that is being made fails. */
static void link_lost(struct rdma_link *link, int status, const char *why)
{
	struct peer *peer = link->peer;
	bool is_ours = !link->is_accepting;

	if (is_ours)
		(void)failure_set(&peer->rdma->failure, status, "%s: %s", link->port->device->name,
				  why);
	else
		transport_complain(link->rdma->transport, "%s: rdma: %s", peer->name, why);
	link_done(link);
	if (is_ours && !--peer->rdma->n_dialing)
		dial_over(peer);
}

static int link_dial(struct rdma_link *link, const struct data_rdma_rail *rail)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct address source = link->port->address, target;

	address_from_bytes(rail->address, rail->port, &target);
	if (source.any.sa_family == AF_INET6)
		source.in6.sin6_port = 0;
	else
		source.in.sin_port = 0;
	if (verbs->cm_create_id(link->rdma->events, &link->id, link, RDMA_PS_TCP))
		return -errno;
	set_tos(link);
	if (source.any.sa_family != target.any.sa_family)
		return -EAFNOSUPPORT;
	return verbs->cm_resolve_addr(link->id, &source.any, &target.any, RESOLVE_MS) ? -errno : 0;
}

static bool has_link(struct rdma *rdma, const struct peer *peer, unsigned remote)
{
	const struct rdma_link *link;

	list_for_each (link, &rdma->links, link)
		if (link->peer == peer && link->remote == remote)
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
	r = link_new(rdma, peer, NULL, &link);
	if (r) {
		(void)failure_set(&peer->rdma->failure, r, "out of memory");
		return;
	}
	peer->rdma->n_dialing++;
	link->remote = i;
	link->rail = (peer->rdma->generation * DATA_RDMA_RAILS + i) & 0xff;
	link->port = &rdma->ports[i % rdma->n_ports];
	link->mtu = MIN(link->port->mtu, (unsigned)rail->mtu);
	if (link->port->mtu != rail->mtu)
		log_notice("%s: rdma: %s has packets of %u bytes, the other end of %u: the lesser "
			   "is used",
			   peer->name, link->port->device->name, link->port->mtu, rail->mtu);
	r = link_dial(link, rail);
	if (r)
		link_lost(link, r, strerrordesc_np(-r) ?: "cannot connect");
}

static void on_offer(struct peer *peer, const struct data_rdma_offer *wire)
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
	memcpy(state->nonce, offer.nonce, sizeof(state->nonce));
	state->generation++;
	state->n_dialing++; /* so that the first failure is not the end */
	for (unsigned i = 0; i < MAX(offer.n_rails, rdma->n_ports); i++)
		dial_one(peer, &offer, i);
	if (!--state->n_dialing && !peer_n_rails(peer))
		dial_over(peer);
}

static int link_connect(struct rdma_link *link, char *why, size_t size)
{
	struct rdma_conn_param param = { .retry_count = RETRIES, .rnr_retry_count = 6 };
	int r;

	/* By whatever port the route goes. */
	link->port = port_of(link->rdma, link->id) ?: link->port;
	if (link->port->device->context != link->id->verbs)
		return failure_set(
			&link->peer->rdma->failure, -ENODEV, "%s",
			strcpy(why, "its route leaves by a device that is not ours to use"));
	link->mtu = MIN(link->mtu, link->port->mtu);
	r = rdma_link_make(link, why, size);
	if (r)
		return r;
	hello_make(link, link->peer->group);
	r = link_prove(link, &link->mine, NULL, link->mine.proof);
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
static int link_establish(struct rdma_link *link, const struct rdma_conn_param *param, char *why,
			  size_t size)
{
	struct data_rdma_hello wire, hello;
	unsigned char proof[DATA_PROOF_LEN];
	const char *wrong = "not the RDMA of the data protocol";
	int r;

	if (hello_take(param, &wire, &hello))
		wrong = hello_check(&hello);
	if (!wrong &&
	    (link_prove(link, &link->mine, &wire, proof) ||
	     !handshake_proofs_equal(proof, wire.proof) || hello.sender != link->peer->id))
		wrong = "it is not the daemon that made the offer, or the cluster keys differ";
	if (wrong) {
		(void)snprintf(why, size, "%s", wrong);
		return -EKEYREJECTED;
	}
	link->n_theirs = hello.receives;
	r = link_ready(link);
	if (!r && link->rdma->verbs->cm_establish(link->id))
		r = -errno;
	if (r)
		rdma_explain(-r, "cannot ready a queue pair", why, size);
	return r;
}

/* Events of librdmacm */

static void link_on_event(struct rdma_link *link, const struct rdma_cm_event *event)
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
		r = verbs->cm_resolve_route(link->id, RESOLVE_MS) ? -errno : 0;
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		r = link_connect(link, why, sizeof(why));
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		r = link_establish(link, &event->param.conn, why, sizeof(why));
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
		link_lost(link, r, why);
}

/* Acknowledged before it is acted upon, since destroying an id waits for that; private data is copied for it. */
static void rdma_on_ready(struct loop_source *source, uint32_t events)
{
	struct rdma *rdma = container_of(source, struct rdma, source);
	unsigned char data[UINT8_MAX];
	struct rdma_cm_event *event, copy;

	while (!rdma->verbs->cm_get_cm_event(rdma->events, &event)) {
		copy = *event;
		if (copy.event == RDMA_CM_EVENT_CONNECT_REQUEST ||
		    copy.event == RDMA_CM_EVENT_CONNECT_RESPONSE) {
			if (copy.param.conn.private_data)
				memcpy(data, copy.param.conn.private_data,
				       copy.param.conn.private_data_len);
			copy.param.conn.private_data = copy.param.conn.private_data ? data : NULL;
		}
		(void)rdma->verbs->cm_ack_cm_event(event);
		if (copy.event == RDMA_CM_EVENT_CONNECT_REQUEST)
			handle_request(rdma, copy.id, &copy.param.conn);
		else if (copy.id->context)
			link_on_event(copy.id->context, &copy);
	}
}

/* Of a peer */

static void peer_on_timer(struct loop_timer *timer)
{
	struct rdma_peer *state = container_of(timer, struct rdma_peer, timer);
	struct peer *peer = state->peer;

	if (peer->state != PEER_UP)
		return;
	if (rdma_is_strict(peer->transport->rdma) && !state->is_up) {
		(void)failure_set(&state->failure, -ETIMEDOUT, "it makes no offer");
		dial_over(peer);
		return;
	}
	send_notice(peer, NULL);
}

int rdma_begin(struct peer *peer)
{
	struct rdma_peer *state;

	if (peer->rdma)
		return 0;
	state = calloc(1, sizeof(*state));
	if (!state)
		return error_origin(-ENOMEM);
	state->peer = peer;
	state->timer.expired = peer_on_timer;
	state->redial_ns = REDIAL_MIN_NS;
	peer->rdma = state;
	if (peer->kind == PEER_CALLING)
		return error_trace(make_offer(peer));
	if (!rdma_is_strict(peer->transport->rdma))
		return 0;
	return error_trace(loop_timer_set(peer->transport->loop, &state->timer,
					  clock_now_ns() + peer->transport->handshake_timeout_ns));
}

void rdma_notice_arrived(struct peer *peer, const struct data_header *header, const void *payload)
{
	bool is_offer = header->len > 0;

	if (!peer->rdma || is_offer == (peer->kind == PEER_CALLING)) {
		peer_kill(peer, "protocol error: RDMA that was not agreed upon");
		return;
	}
	if (is_offer)
		on_offer(peer, payload);
	else
		(void)make_offer(peer);
}

bool rdma_lane_lost(struct lane *lane, bool is_silent)
{
	struct peer *peer = lane->peer;
	struct rdma *rdma = peer->transport->rdma;
	bool is_wire = is_silent || lane->rdma->is_broken;

	if (!is_wire || peer->state != PEER_UP)
		return false;
	if (lane->is_closing)
		return true;
	if (rdma_is_strict(rdma) && lane->makes_calls && peer_n_rails(peer) == 1)
		return false;
	log_notice("%s: rdma: %s; its calls go another way", peer->name,
		   is_silent ? "no sign of life" : lane->failure.text);
	atomic_fetch_add(&rdma->n_broken, 1);
	lane_close(lane);
	return true;
}

void rdma_lane_closed(struct peer *peer, unsigned n_moved)
{
	atomic_fetch_add(&peer->transport->rdma->calls_moved, n_moved);
	if (peer->kind == PEER_CALLED && peer->state == PEER_UP && !peer->rdma->timer.loop &&
	    !peer->rdma->n_dialing)
		dial_over(peer);
}

static void links_drop(struct peer *peer)
{
	struct rdma *rdma = peer->transport->rdma;
	struct rdma_link *link, *next;

	if (!rdma)
		return;
	list_for_each_safe (link, next, &rdma->links, link)
		if (link->peer == peer && link->state != LINK_UP)
			link_done(link);
}

void rdma_peer_close(struct peer *peer)
{
	if (!peer->rdma)
		return;
	loop_timer_cancel(&peer->rdma->timer);
	links_drop(peer);
	peer->rdma->n_dialing = 0;
}

struct rdma_peer *rdma_peer_free(struct rdma_peer *state)
{
	if (state)
		loop_timer_cancel(&state->timer);
	free(state);
	return NULL;
}

void rdma_describe(const struct peer *peer, char *text, size_t size)
{
	const struct lane *lane;
	size_t n = 0;

	(void)snprintf(text, size, "tcp");
	list_for_each (lane, &peer->lanes, link) {
		if (!lane->rdma || lane->is_closing)
			continue;
		n += (size_t)snprintf(text + n, size - n, "%s%s", n ? " " : "rdma ",
				      lane->rdma->port->device->name);
		if (n >= size)
			return;
	}
}

/* All of it */

static bool has_devices(void)
{
	_cleanup_(freep) struct dirent **names = NULL;
	int n = scandir("/sys/class/infiniband", &names, NULL, NULL);

	for (int i = 0; i < n; i++)
		free(names[i]);
	return n > 2;
}

/* Why there is no RDMA: for AUTO a line in the log, for RDMA the end. */
static int no_rdma(const struct transport_rdma_params *params, int status, const char *why)
{
	if (params->kind == TRANSPORT_RDMA) {
		log_error("transport = rdma: %s", why);
		return status;
	}
	if (status == -ENODEV)
		log_debug("rdma: %s", why);
	else
		log_notice("rdma: %s; parts go by TCP", why);
	return 0;
}

static int open_events(struct rdma *rdma, char *why, size_t size)
{
	int r;

	rdma->events = rdma->verbs->cm_create_event_channel();
	if (!rdma->events) {
		r = -(errno ?: EIO);
		rdma_explain(-r,
			     "cannot open /dev/infiniband/rdma_cm (is the module rdma_ucm loaded?)",
			     why, size);
		return r;
	}
	if (fcntl(rdma->events->fd, F_SETFL, O_NONBLOCK) < 0 ||
	    fcntl(rdma->events->fd, F_SETFD, FD_CLOEXEC) < 0)
		return error_origin(-errno);
	rdma->source = (struct loop_source){ .fd = rdma->events->fd, .ready = rdma_on_ready };
	r = loop_add(rdma->transport->loop, &rdma->source, EPOLLIN);
	if (r)
		(void)snprintf(why, size, "epoll: %s", strerrordesc_np(-r));
	return error_trace(r);
}

static int open_all(struct rdma *rdma, char *why, size_t size)
{
	const char *missing = "";
	int r;

	rdma->verbs = rdma_verbs(&missing);
	if (!rdma->verbs) {
		(void)snprintf(why, size, "%s", missing);
		return -ENOENT;
	}
	r = open_events(rdma, why, size);
	if (r)
		return r;
	r = find_ports(rdma);
	if (rdma->n_ports)
		return 0;
	if (r) {
		rdma_explain(-r, "no port can be used", why, size);
		return r;
	}
	(void)snprintf(why, size, "no port can be used: none is active, has an address%s%s",
		       rdma->params.devices && *rdma->params.devices
			       ? " and is one of rdma_devices: "
			       : "",
		       rdma->params.devices ?: "");
	return -ENONET;
}

int rdma_new(struct transport *transport, const struct transport_rdma_params *params,
	     struct rdma **ret_rdma)
{
	struct rdma *rdma;
	char why[400];
	int r;

	*ret_rdma = NULL;
	if (params->kind == TRANSPORT_TCP)
		return 0;
	if (!has_devices())
		return no_rdma(params, -ENODEV,
			       "this machine has no RDMA device (/sys/class/infiniband is empty)");
	rdma = calloc(1, sizeof(*rdma));
	if (!rdma)
		return error_origin(-ENOMEM);
	rdma->transport = transport;
	rdma->params = *params;
	rdma->source.fd = -1;
	list_init(&rdma->links);
	rdma_memory_init(rdma);
	r = open_all(rdma, why, sizeof(why));
	rdma->params.devices = NULL;
	if (r) {
		rdma_free(rdma);
		return no_rdma(params, r, why);
	}
	for (unsigned i = 0; i < rdma->n_ports; i++) {
		char address[TRANSPORT_ADDRESS_MAX];

		address_format(&rdma->ports[i].address, address, sizeof(address));
		log_info("rdma: %s port %u, %s, packets of %u bytes%s", rdma->ports[i].device->name,
			 rdma->ports[i].number, address, rdma->ports[i].mtu,
			 rdma->ports[i].device->has_odp ? ", paging on demand" : "");
	}
	*ret_rdma = rdma;
	return 0;
}

struct rdma *rdma_free(struct rdma *rdma)
{
	struct rdma_link *link;

	if (!rdma)
		return NULL;
	while ((link = list_first(&rdma->links, struct rdma_link, link)))
		link_done(link);
	for (unsigned i = 0; i < rdma->n_ports; i++)
		(void)rdma->verbs->cm_destroy_id(rdma->ports[i].listener);
	rdma_memory_done(rdma);
	for (unsigned i = 0; i < rdma->n_devices; i++)
		(void)rdma->verbs->dealloc_pd(rdma->devices[i].pd);
	if (rdma->events) {
		loop_remove(&rdma->source);
		rdma->verbs->cm_destroy_event_channel(rdma->events);
	}
	free(rdma);
	return NULL;
}
