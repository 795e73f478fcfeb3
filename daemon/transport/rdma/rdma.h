/*
 * What the files of RDMA share.
 *
 *	home	  rdma.c opens and closes all, port.c finds devices and ports, peer.c has what belongs to a peer,
 *		  link.c makes connections, the accepting side of which is accept.c, the other dial.c
 *	worker	  lane.c, send.c and receive.c move messages; queue_pair.c makes what they post to
 *	any thread  memory.c knows what is registered, which region.c and, where there is much of it, registrar.c see to
 */
#pragma once

#include "base/clock.h"
#include "base/metrics.h"
#include "transport/common/address.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/rdma/peer.h"
#include "transport/rdma/registrar.h"
#include "transport/rdma/verbs.h"
#include <pthread.h>

#define RDMA_DEVICES	   8
#define RDMA_PORTS	   DATA_RDMA_RAILS
#define RDMA_REDIAL_MIN_NS (2 * NSEC_PER_SEC)
#define RDMA_RETRIES	   7 /* of a packet; the most there is */
#define RDMA_RESOLVE_MS	   2000

struct rdma_link;

struct rdma_device {
	struct ibv_context *context; /* librdmacm's */
	struct ibv_pd *pd;
	bool has_odp;
	bool has_windows; /* of type 2B: opened to one queue pair; keys of regions do not leave then */
	unsigned index;
	const char *name;
};

struct rdma_port {
	struct rdma_device *device;
	uint8_t number;
	struct address address;
	unsigned mtu; /* bytes of payload of a packet */
	struct rdma_cm_id *listener;
};

/* One piece of memory, one region with each device that has used it. */
struct rdma_region {
	uintptr_t start;
	size_t len;
	const void *owner;
	bool is_block; /* holds blocks: there is no other way for these */
	/* Written under the memory's lock, by who registers it, which is one thread at a time. */
	struct ibv_mr *mrs[RDMA_DEVICES]; /* of another device's memory: all from the start */
	bool is_refused[RDMA_DEVICES];
	/* The registrars'. */
	struct list link;
	unsigned wanted; /* devices that it is to be registered with, as bits */
	bool is_busy;	 /* a thread works on it */
	bool is_leaving;
	struct mail *gone;
};

/*
 * No more is registered when it is first used, and unregistered when it is removed, at once: 256 pages take a fraction of a
 * millisecond. Slabs of blocks may be larger, by as much as the largest part.
 */
#define RDMA_AT_ONCE ((size_t)1 << 20)

struct rdma_memory {
	/* Guards what is below, and whom regions are registered with; for moments, as the control thread waits for it. */
	pthread_rwlock_t lock;
	struct rdma_region **regions; /* by address */
	size_t n, capacity;
	pthread_mutex_t at_once; /* held by who registers at once; taken before the other */
};

/* METRIC(member, name, help) and GAUGE. */
#define RDMA_METRICS(METRIC, GAUGE)                                                               \
	METRIC(bytes_moved, "bytes_total", "Payloads sent and received by RDMA.")                 \
	METRIC(bytes_copied, "copied_bytes_total", "Of these, bytes that a processor copied.")    \
	GAUGE(regions, "regions", "Regions of memory that are registered.")                       \
	GAUGE(bytes_pinned, "registered_bytes", "Bytes in registered regions.")                   \
	METRIC(registrations, "registrations_total", "Regions that were registered.")             \
	METRIC(registration_us, "registration_microseconds_total", "Time that registering took.") \
	METRIC(refused, "registrations_refused_total", "Regions that a device refused.")          \
	GAUGE(windows, "windows", "Memory windows that there are, open or not.")                  \
	METRIC(links, "connections_total", "Connections that were made.")                         \
	METRIC(links_broken, "connections_broken_total", "Connections that broke under a peer.")  \
	METRIC(links_still, "connections_still_total", "Of these, those that stood still.")       \
	METRIC(calls_moved, "calls_moved_total", "Calls that went another way because of that.")

#define RDMA_METRIC_(member, name, help) struct metric member;
struct rdma_metrics {
	RDMA_METRICS(RDMA_METRIC_, RDMA_METRIC_)
};
#undef RDMA_METRIC_

struct rdma_link;

/* What a link that comes up does at each step, and whom it tells. */
struct rdma_steps {
	/* The route is found: asks; and the other side has accepted. Return 0, or -errno with why. */
	int (*connect)(struct rdma_link *link, char *why, size_t size);
	int (*establish)(struct rdma_link *link, const struct rdma_conn_param *param, char *why,
			 size_t size);
	/* It becomes a lane, which owns it then. Returns 0 or -errno. */
	int (*up)(struct peer *peer, struct rdma_link *link, unsigned rail, bool is_accepted);
	/* rdma_dial_over() */
	void (*over)(struct peer *peer);
};

struct rdma {
	struct transport *transport;
	const struct rdma_steps *steps;
	const struct rdma_verbs *verbs;
	struct transport_rdma_params params;
	struct rdma_event_channel *events;
	struct loop_source source;
	struct rdma_device devices[RDMA_DEVICES];
	unsigned n_devices;
	struct rdma_port ports[RDMA_PORTS];
	unsigned n_ports;
	struct list links; /* all that have a cm id */
	struct rdma_memory memory;
	struct rdma_registrars registrars;
	struct block_watcher watcher;
	atomic_bool has_complained; /* of memory that cannot be registered */
	struct rdma_metrics metrics;
};

/* memcpy() of a payload: counted here, and with all that this process copies. */
static inline void rdma_copy(struct rdma *rdma, void *to, const void *from, size_t len)
{
	metric_copy(&rdma->transport->copied, to, from, len);
	metric_add(&rdma->metrics.bytes_copied, len);
}

/* memory.c */

/*
 * The region that holds some memory, which the caller keeps from being removed. NULL: the device does not know it, or not yet:
 * if this is its first use, it is registered, now or soon. Any thread.
 */
struct ibv_mr *rdma_memory_find(struct rdma *rdma, struct rdma_device *device, const void *data,
				size_t len);
void rdma_memory_init(struct rdma *rdma);
void rdma_memory_done(struct rdma *rdma);

/* region.c */

/* Registers, on demand where pinning is refused and the device knows how. NULL with errno; counts it. */
struct ibv_mr *rdma_register(struct rdma *rdma, struct rdma_device *device, void *data, size_t len,
			     int access);
/* The same of a dma-buf, for a region that is to be. */
struct ibv_mr *rdma_register_direct(struct rdma *rdma, struct rdma_device *device,
				    const struct rdma_region *region, int dmabuf);
void rdma_unregister(struct rdma *rdma, struct ibv_mr *mr);
/* With one device, unless it is, or was refused; says what comes of it. No lock is held but at_once. */
void rdma_region_register(struct rdma *rdma, struct rdma_device *device,
			  struct rdma_region *region);
/* With any device. */
bool rdma_region_is_registered(const struct rdma_region *region);
/* Of all devices. Nobody finds the region any more. */
void rdma_region_unregister(struct rdma *rdma, struct rdma_region *region);
/* Why registering or making something failed, with the way out. */
void rdma_explain(int error, const char *what, char *text, size_t size);

/*
 * What a peer has of RDMA beside its lanes. The accepting side keeps the nonce of its last offer; the connecting side
 * makes a link to each rail of an offer that has none, and asks for another offer after a pause when one breaks or cannot be made.
 */
struct rdma_peer {
	struct peer *peer;
	unsigned char nonce[DATA_NONCE_LEN];
	bool has_offered;
	unsigned generation; /* of rail numbers */
	unsigned n_dialing;
	bool has_failed; /* a rail, since the last offer: it is dialed again */
	uint64_t redial_ns;
	struct loop_timer
		timer; /* to ask again; while nothing has come up and RDMA is a must: the end of it */
	bool is_up;    /* has been */
	struct failure failure;
};

/* port.c */

/* Fills in ports, each with an id that listens. Returns 0, or what was in the way of the last that looked like a port. */
int rdma_find_ports(struct rdma *rdma);
bool rdma_is_soft(const struct ibv_device_attr *attr);
/* By which an id goes, or NULL. */
struct rdma_port *rdma_port_of(struct rdma *rdma, const struct rdma_cm_id *id);
uint16_t rdma_address_port(const struct sockaddr *address);
/* IPv6, or IPv4 mapped into it. */
void rdma_address_to_bytes(const struct address *address, uint8_t bytes[16]);
void rdma_address_from_bytes(const uint8_t bytes[16], uint16_t port, struct address *ret_address);

/* accept.c */
void rdma_take_request(struct rdma *rdma, struct rdma_cm_id *id,
		       const struct rdma_conn_param *param);
/* Offers our ports to a peer. Returns 0 or -EIO. */
int rdma_offer(struct peer *peer);

/* dial.c */
void rdma_dial(struct peer *peer, const struct data_rdma_offer *wire);

/* peer.c */
/* With an offer, or asking for one. */
void rdma_send_offer(struct peer *peer, const struct data_rdma_offer *offer);
/*
 * To be called when a link has come up or failed. Once none is being made, and if one has failed, another offer is asked for
 * after a pause; a peer that has to have RDMA, and never had, is lost.
 */
void rdma_dial_over(struct peer *peer);
