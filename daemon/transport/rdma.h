/*
 * What the files of RDMA share. rdma.c finds the ports and makes connections (home), rdma_memory.c knows what is
 * registered (any thread), rdma_lane.c moves messages (the worker's thread).
 */
#pragma once

#include "transport/internal.h"
#include "transport/rdma_verbs.h"
#include <pthread.h>

#define RDMA_DEVICES  8
#define RDMA_PORTS    DATA_RDMA_RAILS
#define RDMA_RECEIVES 128 /* posted for each lane */
#define RDMA_SENDS    128 /* messages posted at once, two work requests each at most */
/* Bytes of payload offered or under way on a lane; more urgent ones overtake the rest. Enough for 200 Gbit/s over 40 us. */
#define RDMA_AHEAD    (1u << 20)
#define RDMA_HEAD_LEN (sizeof(struct data_rdma) + sizeof(struct data_header))
#define RDMA_SLOT_LEN (RDMA_HEAD_LEN + DATA_RDMA_EAGER)

struct rdma_device {
	struct ibv_context *context; /* librdmacm's */
	struct ibv_pd *pd;
	bool has_odp;
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
	int dmabuf; /* -1: ordinary memory */
	uint64_t offset;
	struct ibv_mr *mrs[RDMA_DEVICES];
	bool is_refused[RDMA_DEVICES];
};

struct rdma_memory {
	pthread_rwlock_t
		lock; /* guards what is below; written when memory comes, goes, or is first used */
	struct rdma_region **regions; /* by address */
	size_t n, capacity;
};

struct rdma {
	struct transport *transport;
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
	struct block_watcher watcher;
	atomic_bool has_complained; /* of memory that cannot be registered */
	_Atomic uint64_t bytes_moved, bytes_copied, regions, bytes_pinned, calls_moved;
	_Atomic uint64_t n_links, n_broken;
};

/* Keys of memory in a region; registers it when this is its first use. False: it is in none. Any thread. */
bool rdma_memory_find(struct rdma *rdma, struct rdma_device *device, const void *data, size_t len,
		      uint32_t *ret_lkey, uint32_t *ret_rkey);
void rdma_memory_init(struct rdma *rdma);
void rdma_memory_done(struct rdma *rdma);
int rdma_memory_add(struct rdma *rdma, const struct rdma_region *region);
void rdma_memory_remove(struct rdma *rdma, void *data);
/* Registers, on demand where pinning is refused and the device knows how. NULL with errno; counts it. */
struct ibv_mr *rdma_register(struct rdma *rdma, struct rdma_device *device, void *data, size_t len,
			     int access);
void rdma_unregister(struct rdma *rdma, struct ibv_mr *mr);
/* Why registering or making something failed, with the way out. */
void rdma_explain(int error, const char *what, char *text, size_t size);

/*
 * What a peer has of RDMA beside its lanes. The accepting side keeps the nonce of its last offer; the connecting side
 * makes a link to each rail of an offer that has none, and asks for another offer after a pause when one breaks.
 */
struct rdma_peer {
	struct peer *peer;
	unsigned char nonce[DATA_NONCE_LEN];
	bool has_offered;
	unsigned generation; /* of rail numbers */
	unsigned n_dialing;
	uint64_t redial_ns;
	struct loop_timer
		timer; /* to ask again; while nothing has come up and RDMA is a must: the end of it */
	bool is_up;    /* has been */
	struct failure failure;
};

enum rdma_link_state {
	LINK_RESOLVING, /* connecting: address, then route */
	LINK_CONNECTING,
	LINK_ACCEPTING,
	LINK_UP, /* a lane's */
};

struct rdma_send {
	struct message *message; /* done with when the send is; NULL: nothing waits for it */
	uint16_t next_free;
};

struct rdma_link {
	struct rdma *rdma;
	struct rdma_port *port;
	struct peer *peer;
	struct list link;
	struct rdma_cm_id *id;
	enum rdma_link_state state;
	bool is_accepting;
	unsigned rail, remote; /* rail: number on the wire; remote: of the offer's rails */
	unsigned mtu;
	struct loop_timer timer;
	struct data_rdma_hello mine; /* wire order */
	struct lane *lane;
	struct mail broken; /* home tells the worker */
	bool is_broken;
	char why[128];

	/* Made by home, then the worker's. */
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *memory; /* slots of receives, then of sends */
	unsigned max_inline;
	unsigned n_theirs; /* receives that they posted at first */

	/* The worker's thread. */
	unsigned credits; /* receives of theirs that we may use up */
	unsigned owed;	  /* receives of ours posted since we last said so */
	uint64_t ahead;	  /* bytes */
	struct rdma_send sends[RDMA_SENDS];
	unsigned n_free;
	uint16_t first_free;
	struct list awaiting;	  /* messages, by message.link: offered, no grant yet */
	struct list granted;	  /* messages, by message.link: to be written to their room */
	struct data_rdma *grants; /* to be sent, host order */
	size_t n_grants, grants_capacity;
	struct mail again; /* more to poll */
	bool is_again_posted;
};

/* Queue pair and memory; receives are posted. Returns 0, or a negative errno with why. Home. */
int rdma_link_make(struct rdma_link *link, char *why, size_t size);
/* Lets go of all that rdma_link_make() made. Idempotent. */
void rdma_link_unmake(struct rdma_link *link);
/* The wire broke: the worker is told. Home; not when the lane is closing. */
void rdma_link_break(struct rdma_link *link, const char *why);
