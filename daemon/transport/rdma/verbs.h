/*
 * libibverbs and librdmacm, opened when RDMA is wanted: nothing is linked, and a machine without them has none. What
 * verbs.h defines inline (posting, polling, arming) goes through the device's own table and is called as it is.
 */
#pragma once

#include "proto/c.h"
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* VERB(name, type, arguments) of libibverbs, CM of librdmacm. */
#define RDMA_SYMBOLS(VERB, CM)                                                                  \
	VERB(get_device_name, const char *, (struct ibv_device *))                              \
	VERB(query_device, int, (struct ibv_context *, struct ibv_device_attr *))               \
	VERB(query_port, int, (struct ibv_context *, uint8_t, struct ibv_port_attr *))          \
	VERB(query_gid, int, (struct ibv_context *, uint8_t, int, union ibv_gid *))             \
	VERB(alloc_pd, struct ibv_pd *, (struct ibv_context *))                                 \
	VERB(dealloc_pd, int, (struct ibv_pd *))                                                \
	VERB(reg_mr, struct ibv_mr *, (struct ibv_pd *, void *, size_t, int))                   \
	VERB(dereg_mr, int, (struct ibv_mr *))                                                  \
	VERB(create_comp_channel, struct ibv_comp_channel *, (struct ibv_context *))            \
	VERB(destroy_comp_channel, int, (struct ibv_comp_channel *))                            \
	VERB(create_cq, struct ibv_cq *,                                                        \
	     (struct ibv_context *, int, void *, struct ibv_comp_channel *, int))               \
	VERB(destroy_cq, int, (struct ibv_cq *))                                                \
	VERB(get_cq_event, int, (struct ibv_comp_channel *, struct ibv_cq **, void **))         \
	VERB(ack_cq_events, void, (struct ibv_cq *, unsigned))                                  \
	VERB(create_qp, struct ibv_qp *, (struct ibv_pd *, struct ibv_qp_init_attr *))          \
	VERB(modify_qp, int, (struct ibv_qp *, struct ibv_qp_attr *, int))                      \
	VERB(destroy_qp, int, (struct ibv_qp *))                                                \
	VERB(wc_status_str, const char *, (enum ibv_wc_status))                                 \
	CM(create_event_channel, struct rdma_event_channel *, (void))                           \
	CM(destroy_event_channel, void, (struct rdma_event_channel *))                          \
	CM(create_id, int,                                                                      \
	   (struct rdma_event_channel *, struct rdma_cm_id **, void *, enum rdma_port_space))   \
	CM(destroy_id, int, (struct rdma_cm_id *))                                              \
	CM(set_option, int, (struct rdma_cm_id *, int, int, void *, size_t))                    \
	CM(bind_addr, int, (struct rdma_cm_id *, struct sockaddr *))                            \
	CM(listen, int, (struct rdma_cm_id *, int))                                             \
	CM(resolve_addr, int, (struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int)) \
	CM(resolve_route, int, (struct rdma_cm_id *, int))                                      \
	CM(init_qp_attr, int, (struct rdma_cm_id *, struct ibv_qp_attr *, int *))               \
	CM(connect, int, (struct rdma_cm_id *, struct rdma_conn_param *))                       \
	CM(establish, int, (struct rdma_cm_id *))                                               \
	CM(accept, int, (struct rdma_cm_id *, struct rdma_conn_param *))                        \
	CM(reject, int, (struct rdma_cm_id *, const void *, uint8_t))                           \
	CM(disconnect, int, (struct rdma_cm_id *))                                              \
	CM(get_cm_event, int, (struct rdma_event_channel *, struct rdma_cm_event **))           \
	CM(ack_cm_event, int, (struct rdma_cm_event *))                                         \
	CM(event_str, const char *, (enum rdma_cm_event_type))

#define RDMA_VERB_(name, type, args) type(*name) args;
#define RDMA_CM_(name, type, args)   type(*cm_##name) args;
struct rdma_verbs {
	RDMA_SYMBOLS(RDMA_VERB_, RDMA_CM_)
	/* NULL before rdma-core 34. */
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
};
#undef RDMA_VERB_
#undef RDMA_CM_

/*
 * Opens the libraries once for the process; they are never closed, as their providers do not like it. Returns NULL with
 * *ret_why what is missing, in static memory. Control thread.
 */
const struct rdma_verbs *rdma_verbs(const char **ret_why);
