/* What the files of the double share. One lock guards all. */
#pragma once

#include "base/list.h"
#include "fake.h"
#include "tests/fakecuda/dmabuf.h"
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>

#define EXPORT __attribute__((visibility("default")))
#define KEYS   65536u

extern pthread_mutex_t fake_lock;

/* The rules were broken: says so and aborts. */
_Noreturn void fake_abort(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
/* Counts a call. Whether it is to fail: errno is set then. The lock is held. */
bool fake_fails(const char *call);
/* As fake_hold() says. The lock is held; it is let go of meanwhile. */
void fake_wait(const char *call, uint64_t bytes);
extern struct fake_machine fake_machine;
extern enum fake_wire fake_wire;
extern struct fake_asked fake_last;
extern struct fake_work fake_worked;
extern unsigned fake_objects;

struct fake_device {
	struct ibv_device device;
	struct verbs_context verbs;
	unsigned index;
};
#define FAKE_CONTEXT(device) (&(device)->verbs.context)
struct fake_device *fake_device_of(const struct ibv_context *context);
struct fake_device *fake_device(unsigned i);
unsigned fake_n_devices(void);
void fake_address(unsigned device, struct sockaddr_storage *ret_address);
void fake_gid(unsigned device, union ibv_gid *ret_gid);
unsigned fake_mtu(unsigned device);

/* Something with keys: a region, or a window. */
struct fake_mr {
	struct ibv_mr mr;
	unsigned access, n_windows;
	bool is_pinned;
	char *alias; /* of a dma-buf, whose addresses are the caller's fancy: where it is mapped here */
	fake_mark *marks; /* of the double of the driver's memory, n_marks bytes, or NULL */
	size_t n_marks, offset;
};

struct fake_mw {
	struct ibv_mw mw;
	struct fake_mr *bound; /* or NULL */
	uint32_t key;
	uint64_t address, length;
	struct fake_qp *qp;
};

struct fake_pd {
	struct ibv_pd pd;
	unsigned n_objects;
};

struct fake_channel {
	struct ibv_comp_channel channel;
	struct fake_cq *cq; /* one at most */
	unsigned n_events;
};

struct fake_cqe {
	struct ibv_wc wc;
	struct fake_qp *qp;
	unsigned n_sends; /* entries of its send queue that are free once this is seen */
};

struct fake_cq {
	struct ibv_cq cq;
	struct fake_cqe *entries;
	unsigned first, n, n_qps, n_unacknowledged;
	bool is_armed, is_solicited_only;
};

struct fake_send {
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	unsigned char inline_data[256];
};

struct fake_qp {
	struct ibv_qp qp;
	struct list link;
	struct ibv_qp_cap cap;
	uint32_t remote;
	unsigned path_mtu;
	struct fake_send *
		sends; /* a ring; n_waiting of them have not been taken up, n_used not been seen complete */
	unsigned first_send, n_waiting, n_used, n_silent;
	struct ibv_recv_wr *receives;
	struct ibv_sge *receive_sges;
	unsigned first_receive, n_receives;
	struct fake_tie *tie; /* to the process of the other end */
	bool is_far;	      /* it has or had one */
	unsigned n_far;	      /* of those waiting: the first so many are there, not answered yet */
};

extern struct list fake_qps;
struct fake_qp *fake_qp_find(uint32_t number);
/* Takes up what is posted, in a thread of its own while there is an event channel. The lock is held. */
void fake_wire_start(void);
void fake_wire_stop(void);
void fake_wire_wake(void);
/* To the error state: all that is posted is flushed. */
void fake_qp_break(struct fake_qp *qp);

/*
 * Connections to other processes (fabric.c), each belonging to the id of a connection, and used by its queue pair. The device
 * of the other end does its half of a work request and answers with the status. The lock is held throughout.
 */
enum fake_frame_kind { FAKE_FRAME_CM, FAKE_FRAME_WORK, FAKE_FRAME_ANSWER };

struct fake_frame {
	uint32_t kind, len; /* bytes behind it: private data, or a payload */
	uint32_t status;
	uint32_t event, qp_num; /* of librdmacm */
	struct sockaddr_in6 source;
	uint32_t opcode, flags,
		key; /* of a work request; the other end's key, or one to invalidate */
	uint64_t address;
};

struct fake_tie;
struct id; /* cm.c's */
/* Listens at an address, at this port or the next that is free. NULL: this process is alone. */
struct fake_tie *fake_fabric_listen(struct id *id, const struct sockaddr *address, uint16_t *port);
/* NULL: nobody listens there. */
struct fake_tie *fake_fabric_connect(struct id *id, const struct sockaddr *address, uint16_t port);
void fake_fabric_start(void);
void fake_fabric_stop(void);
/* What has arrived; waits for something if it may. Lets go of the lock meanwhile. */
void fake_fabric_turn(bool may_wait);
void fake_tie_free(struct fake_tie *tie); /* takes NULL */
void fake_tie_set_id(struct fake_tie *tie, struct id *id);
struct id *fake_tie_id(const struct fake_tie *tie);
void fake_tie_join(struct fake_tie *tie, struct fake_qp *qp);
void fake_tie_leave(struct fake_qp *qp);
void fake_tie_send(struct fake_tie *tie, const struct fake_frame *frame, const void *data);
/* Called by it: frames, and the end. The id of a request is that which listens. */
void fake_cm_arrived(struct fake_tie *tie, const struct fake_frame *frame, const void *data);
void fake_cm_lost(const struct fake_tie *tie);
enum ibv_wc_status fake_work_arrived(struct fake_qp *to, const struct fake_frame *frame,
				     const void *data);
void fake_work_answered(struct fake_qp *qp, enum ibv_wc_status status);
void fake_work_lost(struct fake_qp *qp);

/* What a key opens now, or NULL. */
struct fake_mr *fake_key_region(uint32_t key);
struct fake_mw *fake_key_window(uint32_t key);
