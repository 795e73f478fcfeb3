/*
 * Devices, and those of their ports that can be used: active ones with an IP address, which
 * librdmacm goes by. rdma.c looks for them at the start. Home thread.
 */
#include "transport/rdma/rdma.h"

#include "base/log.h"
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>

#define BACKLOG 128

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

/* The devices of Linux's rdma_rxe. */
bool rdma_is_soft(const struct ibv_device_attr *attr)
{
	return attr->vendor_id == 0xffffff;
}

/*
 * What a peer may write to is opened by windows of type 2B. Without them keys of whole regions are
 * told. Each end closes the other's by SEND WITH INVALIDATE, which all that have an RC queue pair
 * can do. Those of soft-RoCE do not look at the bounds of a window (Linux 6.1), and now and then a
 * queue pair stands still that uses them.
 */
static bool can_open_windows(const struct rdma *rdma, struct ibv_pd *pd,
			     const struct ibv_device_attr *attr)
{
	struct ibv_mw *mw;

	if (rdma->params.windows == TRANSPORT_WINDOWS_OFF ||
	    !(attr->device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) ||
	    (rdma->params.windows == TRANSPORT_WINDOWS_AUTO && rdma_is_soft(attr)))
		return false;
	mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (mw)
		(void)ibv_dealloc_mw(mw);
	return mw;
}

static int device_add(struct rdma *rdma, struct ibv_context *context,
		      struct rdma_device **ret_device)
{
	struct rdma_device *device = device_of(rdma, context);
	struct ibv_device_attr attr;

	*ret_device = device;
	if (device)
		return 0;
	if (rdma->n_devices == RDMA_DEVICES)
		return error_origin(-ENOSPC);
	if (rdma->verbs->query_device(context, &attr))
		return error_origin(-(errno ?: EIO));
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
	device->has_windows = can_open_windows(rdma, device->pd, &attr);
	if (!device->has_windows)
		log_notice("rdma: %s: no memory windows are used: whoever knows the cluster key "
			   "and is "
			   "connected "
			   "can write to all memory that is registered with it",
			   device->name);
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

void rdma_address_to_bytes(const struct address *address, uint8_t bytes[16])
{
	if (address->any.sa_family == AF_INET6) {
		memcpy(bytes, &address->in6.sin6_addr, 16);
		return;
	}
	memset(bytes, 0, 10);
	bytes[10] = bytes[11] = 0xff;
	memcpy(bytes + 12, &address->in.sin_addr, 4);
}

void rdma_address_from_bytes(const uint8_t bytes[16], uint16_t port, struct address *ret_address)
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

uint16_t rdma_address_port(const struct sockaddr *address)
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
	rdma_address_to_bytes(address, bytes);
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
int rdma_find_ports(struct rdma *rdma)
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

struct rdma_port *rdma_port_of(struct rdma *rdma, const struct rdma_cm_id *id)
{
	for (unsigned i = 0; i < rdma->n_ports; i++)
		if (rdma->ports[i].device->context == id->verbs &&
		    rdma->ports[i].number == id->port_num)
			return &rdma->ports[i];
	return NULL;
}
