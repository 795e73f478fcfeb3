/* Connections: librdmacm. An id is bound to a device by its address; what happens to it is told by events of its channel. */
#include "double.h"

#include <netinet/in.h>
#include <sys/eventfd.h>

#define PRIVATE_LEN 56 /* of a request; it comes padded */

struct channel {
	struct rdma_event_channel channel;
	struct list events; /* not fetched yet */
	unsigned n_ids;
};

enum state { IDLE, LISTENING, RESOLVED, ROUTED, CONNECTING, REQUESTED, ACCEPTED, UP, OVER };

struct id {
	struct rdma_cm_id id;
	struct list link;
	struct id *other;     /* in this process */
	struct fake_tie *tie; /* or in another; of one that listens: by which others come */
	enum state state;
	uint32_t other_qp_num;
	unsigned n_unacknowledged;
	uint8_t tos;
};

struct event {
	struct rdma_cm_event event;
	struct list link;
	unsigned char data[UINT8_MAX];
};

static struct list ids = LIST_INIT(ids);
static unsigned n_channels;
static uint16_t last_port = 20000;

static struct id *id_of(struct rdma_cm_id *id)
{
	return container_of(id, struct id, id);
}

static struct channel *channel_of(struct id *id)
{
	return container_of(id->id.channel, struct channel, channel);
}

static void tell(struct id *id, enum rdma_cm_event_type type, int status,
		 const struct rdma_conn_param *param)
{
	struct channel *channel = channel_of(id);
	struct event *event = calloc(1, sizeof(*event));
	const uint64_t one = 1;

	event->event = (struct rdma_cm_event){ .id = &id->id, .event = type, .status = status };
	if (param) {
		event->event.param.conn = *param;
		memcpy(event->data, param->private_data, param->private_data_len);
		event->event.param.conn.private_data = event->data;
		event->event.param.conn.private_data_len =
			MAX(param->private_data_len, (uint8_t)PRIVATE_LEN);
	}
	list_push_back(&channel->events, &event->link);
	if (write(channel->channel.fd, &one, sizeof(one)) != sizeof(one))
		fake_abort("an event is lost");
}

EXPORT struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct channel *channel = NULL;
	int fd;

	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("rdma_create_event_channel")) {
		fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
		if (fd >= 0) {
			channel = calloc(1, sizeof(*channel));
			channel->channel.fd = fd;
			list_init(&channel->events);
			fake_objects++;
			if (!n_channels++)
				fake_wire_start();
		}
	}
	pthread_mutex_unlock(&fake_lock);
	return channel ? &channel->channel : NULL;
}

EXPORT void rdma_destroy_event_channel(struct rdma_event_channel *cm)
{
	struct channel *channel = container_of(cm, struct channel, channel);

	pthread_mutex_lock(&fake_lock);
	if (channel->n_ids)
		fake_abort("rdma_destroy_event_channel: %u ids use it", channel->n_ids);
	fake_objects--;
	if (!--n_channels)
		fake_wire_stop();
	pthread_mutex_unlock(&fake_lock);
	(void)close(channel->channel.fd);
	free(channel);
}

static struct id *id_new(struct rdma_event_channel *channel, void *context)
{
	struct id *id = calloc(1, sizeof(*id));

	id->id.channel = channel;
	id->id.context = context;
	channel_of(id)->n_ids++;
	list_push_back(&ids, &id->link);
	fake_objects++;
	return id;
}

EXPORT int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **ret_id,
			  void *context, enum rdma_port_space space)
{
	bool fails;

	pthread_mutex_lock(&fake_lock);
	fails = fake_fails("rdma_create_id");
	if (!fails) {
		*ret_id = &id_new(channel, context)->id;
		(*ret_id)->ps = space;
	}
	pthread_mutex_unlock(&fake_lock);
	return fails ? -1 : 0;
}

/* What the other end does comes to an id: its state is that of the connection, and its channel is told. */
static void learn(struct id *id, enum rdma_cm_event_type type, int status,
		  const struct rdma_conn_param *param)
{
	switch (type) {
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		id->other_qp_num = param->qp_num;
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		id->state = UP;
		break;
	case RDMA_CM_EVENT_REJECTED:
		id->state = OVER;
		break;
	default:
		break;
	}
	tell(id, type, status, param);
}

/* Tells the other end, wherever that is. */
static void inform(struct id *id, enum rdma_cm_event_type type, int status,
		   const struct rdma_conn_param *param)
{
	struct fake_frame frame = {
		.kind = FAKE_FRAME_CM,
		.event = type,
		.status = (uint32_t)status,
		.qp_num = param ? param->qp_num : 0,
		.len = param ? param->private_data_len : 0,
	};

	if (id->other) {
		learn(id->other, type, status, param);
	} else if (id->tie) {
		memcpy(&frame.source, &id->id.route.addr.src_storage, sizeof(frame.source));
		fake_tie_send(id->tie, &frame, param ? param->private_data : NULL);
	}
}

/* The other end has gone without a word. */
static void lose(struct id *id)
{
	if (id->state == UP || id->state == ACCEPTED)
		tell(id, RDMA_CM_EVENT_DISCONNECTED, 0, NULL);
	else if (id->state == CONNECTING)
		tell(id, RDMA_CM_EVENT_REJECTED, 28, NULL);
	id->state = OVER;
	id->other = NULL;
	id->tie = NULL;
}

static void id_free(struct id *id)
{
	struct channel *channel = channel_of(id);
	struct event *event, *next;

	list_for_each_safe (event, next, &channel->events, link) {
		uint64_t one;

		if (event->event.id != &id->id)
			continue;
		list_remove(&event->link);
		free(event);
		if (read(channel->channel.fd, &one, sizeof(one)) != sizeof(one))
			fake_abort("an event is not there");
	}
	if (id->other)
		lose(id->other);
	fake_tie_free(id->tie);
	channel->n_ids--;
	list_remove(&id->link);
	fake_objects--;
	free(id);
}

/* A real one waits until all events are acknowledged. */
EXPORT int rdma_destroy_id(struct rdma_cm_id *cm)
{
	struct id *id = id_of(cm);
	struct event *event;

	pthread_mutex_lock(&fake_lock);
	if (id->n_unacknowledged)
		fake_abort("rdma_destroy_id would wait for ever: %u events are not acknowledged",
			   id->n_unacknowledged);
	/* Requests that came to it, and nobody has seen. */
	for (bool is_over = id->state != LISTENING; !is_over;) {
		is_over = true;
		list_for_each (event, &channel_of(id)->events, link) {
			if (event->event.listen_id != cm)
				continue;
			id_free(id_of(event->event.id));
			is_over = false;
			break;
		}
	}
	id_free(id);
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

static int result(const char *call)
{
	bool fails;

	pthread_mutex_lock(&fake_lock);
	fails = fake_fails(call);
	pthread_mutex_unlock(&fake_lock);
	return fails ? -1 : 0;
}

EXPORT int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t len)
{
	if (result("rdma_set_option"))
		return -1;
	if (level != RDMA_OPTION_ID || name != RDMA_OPTION_ID_TOS || len != 1)
		fake_abort("rdma_set_option: the double does not have option %d", name);
	pthread_mutex_lock(&fake_lock);
	id_of(id)->tos = fake_last.tos = *(uint8_t *)value;
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

static uint16_t *port_of(struct sockaddr *address)
{
	return address->sa_family == AF_INET6 ? &((struct sockaddr_in6 *)address)->sin6_port
					      : &((struct sockaddr_in *)address)->sin_port;
}

static socklen_t len_of(const struct sockaddr *address)
{
	return address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
					      : sizeof(struct sockaddr_in);
}

/* The device whose address that is, or NULL. */
static struct fake_device *find_device(const struct sockaddr *address)
{
	struct sockaddr_storage with_port = { 0 }, own;

	memcpy(&with_port, address, len_of(address));
	*port_of((struct sockaddr *)&with_port) = 0;
	for (unsigned i = 0; i < fake_n_devices(); i++) {
		fake_address(i, &own);
		if (!memcmp(&own, &with_port, sizeof(own)))
			return fake_device(i);
	}
	return NULL;
}

/* The lock is held. Returns 0 or -1 with errno. */
static int bind_id(struct id *id, struct sockaddr *address)
{
	struct fake_device *device = find_device(address);

	if (!device) {
		errno = ENODEV;
		return -1;
	}
	memcpy(&id->id.route.addr.src_storage, address, len_of(address));
	if (!*port_of(&id->id.route.addr.src_addr))
		*port_of(&id->id.route.addr.src_addr) = htons(last_port++);
	id->id.verbs = FAKE_CONTEXT(device);
	id->id.port_num = 1;
	return 0;
}

/* For other processes too, which the port must not be of then. */
static void listen_far(struct id *id)
{
	struct sockaddr *address = &id->id.route.addr.src_addr;
	uint16_t port = ntohs(*port_of(address));

	id->tie = fake_fabric_listen(id, address, &port);
	*port_of(address) = htons(port);
}

EXPORT int rdma_bind_addr(struct rdma_cm_id *cm, struct sockaddr *address)
{
	int r;

	pthread_mutex_lock(&fake_lock);
	r = fake_fails("rdma_bind_addr") ? -1 : bind_id(id_of(cm), address);
	if (!r)
		listen_far(id_of(cm));
	pthread_mutex_unlock(&fake_lock);
	return r;
}

EXPORT int rdma_listen(struct rdma_cm_id *cm, int backlog)
{
	if (result("rdma_listen"))
		return -1;
	(void)backlog;
	pthread_mutex_lock(&fake_lock);
	id_of(cm)->state = LISTENING;
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int rdma_resolve_addr(struct rdma_cm_id *cm, struct sockaddr *source,
			     struct sockaddr *target, int timeout_ms)
{
	struct id *id = id_of(cm);
	int r = -1;

	(void)timeout_ms;
	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("rdma_resolve_addr") && !(r = bind_id(id, source))) {
		bool is_known = find_device(target);

		memcpy(&id->id.route.addr.dst_storage, target, len_of(target));
		id->state = RESOLVED;
		is_known = is_known && !fake_fails("RDMA_CM_EVENT_ADDR_RESOLVED");
		tell(id, is_known ? RDMA_CM_EVENT_ADDR_RESOLVED : RDMA_CM_EVENT_ADDR_ERROR,
		     is_known ? 0 : -ENETUNREACH, NULL);
	}
	pthread_mutex_unlock(&fake_lock);
	return r;
}

EXPORT int rdma_resolve_route(struct rdma_cm_id *cm, int timeout_ms)
{
	struct id *id = id_of(cm);
	bool is_lost;

	(void)timeout_ms;
	if (result("rdma_resolve_route"))
		return -1;
	pthread_mutex_lock(&fake_lock);
	if (id->state != RESOLVED)
		fake_abort("rdma_resolve_route: no address is resolved");
	is_lost = fake_fails("RDMA_CM_EVENT_ROUTE_RESOLVED");
	id->state = ROUTED;
	tell(id, is_lost ? RDMA_CM_EVENT_ROUTE_ERROR : RDMA_CM_EVENT_ROUTE_RESOLVED,
	     is_lost ? -ETIMEDOUT : 0, NULL);
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

/* What a real one finds out of routes and of the other side. */
EXPORT int rdma_init_qp_attr(struct rdma_cm_id *cm, struct ibv_qp_attr *attr, int *ret_mask)
{
	struct id *id = id_of(cm);
	struct fake_device *device = fake_device_of(cm->verbs), *other;

	if (result("rdma_init_qp_attr"))
		return -1;
	pthread_mutex_lock(&fake_lock);
	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		attr->port_num = 1;
		*ret_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
		break;
	case IBV_QPS_RTR:
		other = find_device(&cm->route.addr.dst_addr);
		attr->dest_qp_num = id->other_qp_num;
		attr->path_mtu = fake_mtu(device->index);
		if (other)
			attr->path_mtu = MIN((unsigned)attr->path_mtu, fake_mtu(other->index));
		attr->ah_attr = (struct ibv_ah_attr){ .port_num = 1, .dlid = 1 };
		attr->ah_attr.is_global = !fake_machine.is_infiniband;
		attr->ah_attr.grh.sgid_index = 3;
		attr->ah_attr.grh.traffic_class = id->tos;
		*ret_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		break;
	default:
		*ret_mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
		break;
	}
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

static struct id *find_listener(struct sockaddr *address)
{
	struct id *id;

	list_for_each (id, &ids, link)
		if (id->state == LISTENING &&
		    !memcmp(&id->id.route.addr.src_storage, address, len_of(address)))
			return id;
	return NULL;
}

/* A request has come to who listens: an id of its own. */
static struct id *request_new(struct id *listener, const struct sockaddr *source,
			      const struct rdma_conn_param *param)
{
	struct id *id = id_new(listener->id.channel, NULL);

	id->state = REQUESTED;
	id->id.verbs = listener->id.verbs;
	id->id.port_num = 1;
	id->id.route.addr.src_storage = listener->id.route.addr.src_storage;
	memcpy(&id->id.route.addr.dst_storage, source, len_of(source));
	id->other_qp_num = param->qp_num;
	tell(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, param);
	container_of(channel_of(id)->events.prev, struct event, link)->event.listen_id =
		&listener->id;
	return id;
}

/* To whoever listens there, in this process or another. Returns false when nobody does. */
static bool request(struct id *id, const struct rdma_conn_param *param)
{
	struct sockaddr *target = &id->id.route.addr.dst_addr;
	struct id *listener = find_listener(target);

	if (listener) {
		id->other = request_new(listener, &id->id.route.addr.src_addr, param);
		id->other->other = id;
		return true;
	}
	id->tie = fake_fabric_connect(id, target, ntohs(*port_of(target)));
	if (!id->tie)
		return false;
	fake_tie_join(id->tie, fake_qp_find(param->qp_num));
	inform(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, param);
	return true;
}

EXPORT int rdma_connect(struct rdma_cm_id *cm, struct rdma_conn_param *param)
{
	struct id *id = id_of(cm);

	if (result("rdma_connect"))
		return -1;
	if (param->private_data_len > PRIVATE_LEN) {
		errno = EINVAL;
		return -1;
	}
	pthread_mutex_lock(&fake_lock);
	if (id->state != ROUTED)
		fake_abort("rdma_connect: no route is resolved");
	id->state = CONNECTING;
	if (fake_wire == FAKE_WIRE_DEAF) {
	} else if (fake_wire == FAKE_WIRE_CUT) {
		tell(id, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, NULL);
	} else if (!request(id, param)) {
		tell(id, RDMA_CM_EVENT_REJECTED, 8, NULL);
	}
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

/* From another process: of a connection that is new, or of an id's. */
void fake_cm_arrived(struct fake_tie *tie, const struct fake_frame *frame, const void *data)
{
	struct rdma_conn_param param = {
		.private_data = data,
		.private_data_len = (uint8_t)frame->len,
		.qp_num = frame->qp_num,
	};
	struct id *id = fake_tie_id(tie);

	if (frame->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		id = request_new(id, (const struct sockaddr *)&frame->source, &param);
		id->tie = tie;
		fake_tie_set_id(tie, id);
		return;
	}
	learn(id, frame->event, (int)frame->status, frame->len ? &param : NULL);
}

void fake_cm_lost(const struct fake_tie *tie)
{
	struct id *id = fake_tie_id(tie);

	if (id->tie == tie) /* else it listens, and the request has not come */
		lose(id);
}

EXPORT int rdma_accept(struct rdma_cm_id *cm, struct rdma_conn_param *param)
{
	struct id *id = id_of(cm);

	if (result("rdma_accept"))
		return -1;
	pthread_mutex_lock(&fake_lock);
	id->state = ACCEPTED;
	if (id->tie)
		fake_tie_join(id->tie, fake_qp_find(param->qp_num));
	inform(id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, param);
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int rdma_establish(struct rdma_cm_id *cm)
{
	struct id *id = id_of(cm);

	if (result("rdma_establish"))
		return -1;
	pthread_mutex_lock(&fake_lock);
	id->state = UP;
	inform(id, RDMA_CM_EVENT_ESTABLISHED, 0, NULL);
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int rdma_reject(struct rdma_cm_id *cm, const void *data, uint8_t len)
{
	struct id *id = id_of(cm);

	(void)data;
	(void)len;
	pthread_mutex_lock(&fake_lock);
	inform(id, RDMA_CM_EVENT_REJECTED, 28, NULL);
	if (id->other)
		id->other->other = NULL;
	id->other = NULL;
	fake_tie_free(TAKE_PTR(id->tie));
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int rdma_disconnect(struct rdma_cm_id *cm)
{
	struct id *id = id_of(cm);

	pthread_mutex_lock(&fake_lock);
	if (id->state == UP)
		inform(id, RDMA_CM_EVENT_DISCONNECTED, 0, NULL);
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int rdma_get_cm_event(struct rdma_event_channel *cm, struct rdma_cm_event **ret_event)
{
	struct channel *channel = container_of(cm, struct channel, channel);
	struct event *event;
	uint64_t one;
	int r = -1;

	pthread_mutex_lock(&fake_lock);
	if (read(cm->fd, &one, sizeof(one)) == sizeof(one)) {
		event = list_first(&channel->events, struct event, link);
		list_remove(&event->link);
		id_of(event->event.id)->n_unacknowledged++;
		*ret_event = &event->event;
		r = 0;
	}
	pthread_mutex_unlock(&fake_lock);
	return r;
}

EXPORT int rdma_ack_cm_event(struct rdma_cm_event *cm)
{
	struct event *event = container_of(cm, struct event, event);

	pthread_mutex_lock(&fake_lock);
	id_of(cm->id)->n_unacknowledged--;
	pthread_mutex_unlock(&fake_lock);
	free(event);
	return 0;
}

EXPORT const char *rdma_event_str(enum rdma_cm_event_type type)
{
	static const char *const names[] = {
		[RDMA_CM_EVENT_ADDR_RESOLVED] = "address resolved",
		[RDMA_CM_EVENT_ADDR_ERROR] = "no way to the address",
		[RDMA_CM_EVENT_ROUTE_RESOLVED] = "route resolved",
		[RDMA_CM_EVENT_ROUTE_ERROR] = "no route",
		[RDMA_CM_EVENT_CONNECT_REQUEST] = "request",
		[RDMA_CM_EVENT_CONNECT_RESPONSE] = "response",
		[RDMA_CM_EVENT_UNREACHABLE] = "unreachable",
		[RDMA_CM_EVENT_REJECTED] = "rejected",
		[RDMA_CM_EVENT_ESTABLISHED] = "established",
		[RDMA_CM_EVENT_DISCONNECTED] = "disconnected",
	};

	return type < ARRAY_SIZE(names) && names[type] ? names[type] : "event";
}
