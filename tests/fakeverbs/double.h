/* What the files of the double share. One lock guards all. */
#pragma once

#include "base/list.h"
#include "fake.h"
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>

#define EXPORT __attribute__((visibility("default")))
#define KEYS   65536u

extern pthread_mutex_t fake_lock;

/* The rules were broken: says so and aborts. */
_Noreturn void fake_abort(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
/* Counts a call. Whether it is to fail: errno is set then. The lock is held. */
bool fake_fails(const char *call);
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
};

extern struct list fake_qps;
/* Takes up what is posted, in a thread of its own while there is an event channel. The lock is held. */
void fake_wire_start(void);
void fake_wire_stop(void);
void fake_wire_wake(void);
/* To the error state: all that is posted is flushed. */
void fake_qp_break(struct fake_qp *qp);

/* What a key opens now, or NULL. */
struct fake_mr *fake_key_region(uint32_t key);
struct fake_mw *fake_key_window(uint32_t key);
