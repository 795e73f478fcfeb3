/*
 * RDMA as a whole: opened if the libraries, a device and a port are there, else said to be
 * missing; closed with the transport. Events of connections come in here and go to accept.c
 * and link.c. Home thread.
 */
#include "transport/rdma/rdma.h"
#include "transport/rdma/link.h"

#include "base/log.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>

static const struct rdma_steps steps = {
	.connect = rdma_link_connect,
	.establish = rdma_link_establish,
	.up = rdma_lane_add,
	.over = rdma_dial_over,
};

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

/*
 * Acknowledged before it is acted upon, since destroying an id waits for that; private data is
 * copied for it.
 */
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
			rdma_take_request(rdma, copy.id, &copy.param.conn);
		else if (copy.id->context)
			rdma_link_on_event(copy.id->context, &copy);
	}
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
	r = rdma_find_ports(rdma);
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

static void register_metrics(struct rdma_metrics *metrics)
{
#define METRIC_(member, name_, help_, is_gauge_)                      \
	metrics->member = (struct metric){ .name = "bps_rdma_" name_, \
					   .help = help_,             \
					   .is_gauge = is_gauge_ };   \
	metric_register(&metrics->member);
#define COUNTER_(member, name, help) METRIC_(member, name, help, false)
#define GAUGE_(member, name, help)   METRIC_(member, name, help, true)
	RDMA_METRICS(COUNTER_, GAUGE_)
#undef METRIC_
#undef COUNTER_
#undef GAUGE_
}

static void unregister_metrics(struct rdma_metrics *metrics)
{
#define METRIC_(member, name, help) metric_unregister(&metrics->member);
	RDMA_METRICS(METRIC_, METRIC_)
#undef METRIC_
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
	rdma->steps = &steps;
	transport->settings.is_rdma_strict = params->kind == TRANSPORT_RDMA;
	rdma->params = *params;
	rdma->source.fd = -1;
	list_init(&rdma->links);
	register_metrics(&rdma->metrics);
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
		rdma_link_free(link);
	for (unsigned i = 0; i < rdma->n_ports; i++)
		(void)rdma->verbs->cm_destroy_id(rdma->ports[i].listener);
	rdma_memory_done(rdma);
	for (unsigned i = 0; i < rdma->n_devices; i++)
		(void)rdma->verbs->dealloc_pd(rdma->devices[i].pd);
	if (rdma->events) {
		loop_remove(&rdma->source);
		rdma->verbs->cm_destroy_event_channel(rdma->events);
	}
	unregister_metrics(&rdma->metrics);
	free(rdma);
	return NULL;
}
