/* Objects of libibverbs: what they are made of, and that they go in order. */
#include "double.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

struct list fake_qps = LIST_INIT(fake_qps);
static struct key {
	void *object;
	bool is_window;
} keys[KEYS];
static uint64_t pinned;
static uint32_t last_qp = 100;

/* Keys: an index in the upper 24 bits, a window's own number in the others. */
static uint32_t key_new(void *object, bool is_window)
{
	static uint32_t next;

	for (unsigned i = 0; i < KEYS; i++) {
		next = next % (KEYS - 1) + 1;
		if (!keys[next].object) {
			keys[next] = (struct key){ object, is_window };
			return next << 8;
		}
	}
	fake_abort("out of keys");
}

static void key_free(uint32_t key)
{
	keys[key >> 8].object = NULL;
}

struct fake_mr *fake_key_region(uint32_t key)
{
	const struct key *at = key >> 8 < KEYS ? &keys[key >> 8] : NULL;
	struct fake_mr *mr = at && !at->is_window ? at->object : NULL;

	return mr && mr->mr.rkey == key ? mr : NULL;
}

struct fake_mw *fake_key_window(uint32_t key)
{
	const struct key *at = key >> 8 < KEYS ? &keys[key >> 8] : NULL;
	struct fake_mw *mw = at && at->is_window ? at->object : NULL;

	return mw && mw->key == key && mw->bound ? mw : NULL;
}

/* Devices */

struct fake_device *fake_device_of(const struct ibv_context *context)
{
	return container_of(container_of(context, struct verbs_context, context),
			    struct fake_device, verbs);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

static int odp_query(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
		     struct ibv_device_attr_ex *attr, size_t size)
{
	const uint32_t rc = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;

	(void)context;
	(void)input;
	memset(attr, 0, size);
	pthread_mutex_lock(&fake_lock);
	if (fake_machine.has_odp) {
		attr->odp_caps.general_caps = IBV_ODP_SUPPORT;
		attr->odp_caps.per_transport_caps.rc_odp_caps = rc;
	}
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	bool fails;

	(void)context;
	memset(attr, 0, sizeof(*attr));
	pthread_mutex_lock(&fake_lock);
	fails = fake_fails("ibv_query_device");
	attr->vendor_id = 0xfa4e;
	attr->device_cap_flags = fake_machine.has_no_windows ? 0 : IBV_DEVICE_MEM_WINDOW_TYPE_2B;
	pthread_mutex_unlock(&fake_lock);
	return fails ? errno : 0;
}

#undef ibv_query_port
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port,
			  struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)(void *)compat;
	bool fails;

	pthread_mutex_lock(&fake_lock);
	fails = port != 1 || fake_fails("ibv_query_port");
	attr->state = fake_machine.is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
	attr->active_mtu = fake_mtu(fake_device_of(context)->index);
	attr->max_mtu = IBV_MTU_4096;
	pthread_mutex_unlock(&fake_lock);
	return fails ? EINVAL : 0;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	bool fails;

	pthread_mutex_lock(&fake_lock);
	fails = port != 1 || index < 0 || index > 3 || fake_fails("ibv_query_gid");
	memset(gid, 0, sizeof(*gid));
	if (index == 3 || fake_machine.is_infiniband) /* as RoCE v2 of IPv4 often has it */
		fake_gid(fake_device_of(context)->index, gid);
	pthread_mutex_unlock(&fake_lock);
	return fails ? -1 : 0;
}

/* Protection domains, regions, windows */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct fake_pd *pd = NULL;

	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("ibv_alloc_pd")) {
		pd = calloc(1, sizeof(*pd));
		pd->pd.context = context;
		fake_objects++;
	}
	pthread_mutex_unlock(&fake_lock);
	return pd ? &pd->pd : NULL;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct fake_pd *pd = container_of(ibv, struct fake_pd, pd);

	pthread_mutex_lock(&fake_lock);
	if (pd->n_objects)
		fake_abort("ibv_dealloc_pd: %u things are still in it", pd->n_objects);
	fake_objects--;
	pthread_mutex_unlock(&fake_lock);
	free(pd);
	return 0;
}

static void pd_count(struct ibv_pd *ibv, int n)
{
	container_of(ibv, struct fake_pd, pd)->n_objects += (unsigned)n;
	fake_objects += (unsigned)n;
}

#undef ibv_reg_mr
EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *data, size_t len, int access)
{
	struct fake_mr *mr = NULL;
	bool is_pinned = !(access & IBV_ACCESS_ON_DEMAND);

	pthread_mutex_lock(&fake_lock);
	fake_wait("ibv_reg_mr", len);
	if (fake_fails("ibv_reg_mr")) {
	} else if (!is_pinned && !fake_machine.has_odp) {
		errno = EOPNOTSUPP;
	} else if (is_pinned && fake_machine.memlock && pinned + len > fake_machine.memlock) {
		errno = ENOMEM;
	} else {
		mr = calloc(1, sizeof(*mr));
		mr->mr = (struct ibv_mr){ pd->context, pd, data, len, 0, 0, 0 };
		mr->mr.lkey = mr->mr.rkey = key_new(mr, false);
		mr->access = (unsigned)access;
		mr->is_pinned = is_pinned;
		pinned += is_pinned ? len : 0;
		pd_count(pd, 1);
	}
	pthread_mutex_unlock(&fake_lock);
	return mr ? &mr->mr : NULL;
}

#ifndef FAKE_OLD
/* A dma-buf is whatever can be mapped. The kernel takes no other rights, of which a window's is none. */
EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len,
					uint64_t iova, int fd, int access)
{
	const int allowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
			    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
			    IBV_ACCESS_RELAXED_ORDERING;
	struct fake_mr *mr = NULL;
	void *alias;

	pthread_mutex_lock(&fake_lock);
	if (fake_fails("ibv_reg_dmabuf_mr")) {
	} else if ((access & ~allowed) || !len || offset % 4096 != iova % 4096) {
		errno = EINVAL;
	} else {
		alias = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
		if (alias != MAP_FAILED) {
			mr = calloc(1, sizeof(*mr));
			mr->mr = (struct ibv_mr){ pd->context, pd, (void *)(uintptr_t)iova, len, 0,
						  0,	       0 };
			mr->mr.lkey = mr->mr.rkey = key_new(mr, false);
			mr->access = (unsigned)access;
			mr->alias = alias;
			mr->marks = fake_marks_map(fd, &mr->n_marks);
			mr->offset = offset;
			pd_count(pd, 1);
		}
	}
	pthread_mutex_unlock(&fake_lock);
	return mr ? &mr->mr : NULL;
}

#endif

EXPORT int ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct fake_mr *mr = container_of(ibv, struct fake_mr, mr);

	pthread_mutex_lock(&fake_lock);
	fake_wait("ibv_dereg_mr", ibv->length);
	if (mr->n_windows)
		fake_abort("ibv_dereg_mr: %u windows are open on it", mr->n_windows);
	key_free(mr->mr.rkey);
	pinned -= mr->is_pinned ? mr->mr.length : 0;
	if (mr->alias)
		(void)munmap(mr->alias, mr->mr.length);
	if (mr->marks)
		(void)munmap(mr->marks, mr->n_marks);
	pd_count(mr->mr.pd, -1);
	pthread_mutex_unlock(&fake_lock);
	free(mr);
	return 0;
}

static struct ibv_mw *fake_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct fake_mw *mw = NULL;

	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("ibv_alloc_mw")) {
		mw = calloc(1, sizeof(*mw));
		mw->mw = (struct ibv_mw){ .context = pd->context, .pd = pd, .type = type };
		mw->mw.rkey = mw->key = key_new(mw, true);
		pd_count(pd, 1);
	}
	pthread_mutex_unlock(&fake_lock);
	return mw ? &mw->mw : NULL;
}

static int fake_dealloc_mw(struct ibv_mw *ibv)
{
	struct fake_mw *mw = container_of(ibv, struct fake_mw, mw);

	pthread_mutex_lock(&fake_lock);
	if (mw->bound)
		mw->bound->n_windows--;
	key_free(mw->key);
	pd_count(mw->mw.pd, -1);
	pthread_mutex_unlock(&fake_lock);
	free(mw);
	return 0;
}

/* Completions */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct fake_channel *channel = NULL;
	int fd;

	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("ibv_create_comp_channel")) {
		fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
		if (fd >= 0) {
			channel = calloc(1, sizeof(*channel));
			channel->channel.context = context;
			channel->channel.fd = fd;
			fake_objects++;
		}
	}
	pthread_mutex_unlock(&fake_lock);
	return channel ? &channel->channel : NULL;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
	struct fake_channel *channel = container_of(ibv, struct fake_channel, channel);

	pthread_mutex_lock(&fake_lock);
	if (channel->cq)
		fake_abort("ibv_destroy_comp_channel: a completion queue uses it");
	fake_objects--;
	pthread_mutex_unlock(&fake_lock);
	(void)close(channel->channel.fd);
	free(channel);
	return 0;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int n, void *user,
				    struct ibv_comp_channel *channel, int vector)
{
	struct fake_cq *cq = NULL;

	(void)vector;
	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("ibv_create_cq")) {
		cq = calloc(1, sizeof(*cq));
		cq->entries = calloc((size_t)n, sizeof(*cq->entries));
		cq->cq.context = context;
		cq->cq.channel = channel;
		cq->cq.cq_context = user;
		cq->cq.cqe = n;
		container_of(channel, struct fake_channel, channel)->cq = cq;
		fake_objects++;
	}
	pthread_mutex_unlock(&fake_lock);
	return cq ? &cq->cq : NULL;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct fake_cq *cq = container_of(ibv, struct fake_cq, cq);

	pthread_mutex_lock(&fake_lock);
	if (cq->n_qps)
		fake_abort("ibv_destroy_cq: a queue pair uses it");
	if (cq->n_unacknowledged)
		fake_abort("ibv_destroy_cq would wait for ever: %u events are not acknowledged",
			   cq->n_unacknowledged);
	container_of(ibv->channel, struct fake_channel, channel)->cq = NULL;
	fake_objects--;
	pthread_mutex_unlock(&fake_lock);
	free(cq->entries);
	free(cq);
	return 0;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **ret_cq, void **ret_user)
{
	struct fake_channel *channel = container_of(ibv, struct fake_channel, channel);
	uint64_t one;

	if (read(ibv->fd, &one, sizeof(one)) < 0)
		return -1;
	pthread_mutex_lock(&fake_lock);
	*ret_cq = &channel->cq->cq;
	*ret_user = channel->cq->cq.cq_context;
	channel->cq->n_unacknowledged++;
	pthread_mutex_unlock(&fake_lock);
	return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *ibv, unsigned n)
{
	pthread_mutex_lock(&fake_lock);
	container_of(ibv, struct fake_cq, cq)->n_unacknowledged -= n;
	pthread_mutex_unlock(&fake_lock);
}

static int fake_poll_cq(struct ibv_cq *ibv, int n_max, struct ibv_wc *wcs)
{
	static const char *const polls[FAKE_DEVICES] = { "ibv_poll_cq fake0", "ibv_poll_cq fake1" };
	struct fake_cq *cq = container_of(ibv, struct fake_cq, cq);
	int n = 0;

	pthread_mutex_lock(&fake_lock);
	if (fake_fails("ibv_poll_cq") || fake_fails(polls[fake_device_of(ibv->context)->index])) {
		n = errno ? -1 : 0;
	} else {
		for (; n < n_max && cq->n; n++) {
			struct fake_cqe *entry = &cq->entries[cq->first];

			wcs[n] = entry->wc;
			entry->qp->n_used -= entry->n_sends;
			cq->first = (cq->first + 1) % (unsigned)cq->cq.cqe;
			cq->n--;
		}
	}
	pthread_mutex_unlock(&fake_lock);
	return n;
}

static int fake_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct fake_cq *cq = container_of(ibv, struct fake_cq, cq);
	bool fails;

	pthread_mutex_lock(&fake_lock);
	fails = fake_fails("ibv_req_notify_cq");
	fake_worked.notifies++;
	if (!fails) {
		cq->is_armed = true;
		cq->is_solicited_only = solicited_only;
	}
	pthread_mutex_unlock(&fake_lock);
	return fails ? errno : 0;
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	static char text[32];

	(void)snprintf(text, sizeof(text), "status %d", status);
	return text;
}

/* Queue pairs */

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct fake_qp *qp = NULL;
	struct fake_cq *cq = container_of(attr->send_cq, struct fake_cq, cq);

	pthread_mutex_lock(&fake_lock);
	if (!fake_fails("ibv_create_qp")) {
		if (attr->qp_type != IBV_QPT_RC || attr->recv_cq != attr->send_cq ||
		    attr->cap.max_send_sge != 1 || attr->cap.max_recv_sge != 1)
			fake_abort("ibv_create_qp: the double does not have such a queue pair");
		qp = calloc(1, sizeof(*qp));
		attr->cap.max_inline_data = sizeof(qp->sends->inline_data);
		qp->cap = attr->cap;
		qp->sends = calloc(qp->cap.max_send_wr, sizeof(*qp->sends));
		qp->receives = calloc(qp->cap.max_recv_wr, sizeof(*qp->receives));
		qp->receive_sges = calloc(qp->cap.max_recv_wr, sizeof(*qp->receive_sges));
		qp->qp = (struct ibv_qp){
			.context = pd->context,
			.pd = pd,
			.send_cq = attr->send_cq,
			.recv_cq = attr->recv_cq,
			.qp_num = last_qp++,
			.qp_type = attr->qp_type,
		};
		cq->n_qps++;
		list_push_back(&fake_qps, &qp->link);
		pd_count(pd, 1);
	}
	pthread_mutex_unlock(&fake_lock);
	return qp ? &qp->qp : NULL;
}

/* What it has completed goes with it. */
static void cq_forget(struct fake_cq *cq, const struct fake_qp *qp)
{
	unsigned n = cq->n, to = cq->first;

	for (unsigned i = 0; i < n; i++) {
		struct fake_cqe *entry = &cq->entries[(cq->first + i) % (unsigned)cq->cq.cqe];

		if (entry->qp == qp) {
			cq->n--;
			continue;
		}
		cq->entries[to] = *entry;
		to = (to + 1) % (unsigned)cq->cq.cqe;
	}
}

EXPORT int ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct fake_qp *qp = container_of(ibv, struct fake_qp, qp);
	struct fake_cq *cq = container_of(ibv->send_cq, struct fake_cq, cq);

	pthread_mutex_lock(&fake_lock);
	fake_tie_leave(qp);
	list_remove(&qp->link);
	cq_forget(cq, qp);
	cq->n_qps--;
	for (unsigned i = 1; i < KEYS; i++) { /* windows that were opened to it are closed */
		struct fake_mw *mw = keys[i].is_window ? keys[i].object : NULL;

		if (mw && mw->qp == qp) {
			mw->bound->n_windows--;
			mw->bound = NULL;
			mw->qp = NULL;
		}
	}
	pd_count(qp->qp.pd, -1);
	pthread_mutex_unlock(&fake_lock);
	free(qp->sends);
	free(qp->receives);
	free(qp->receive_sges);
	free(qp);
	return 0;
}

EXPORT int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	static const int needed[] = {
		[IBV_QPS_INIT] = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
		[IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
		[IBV_QPS_RTS] = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
	};
	struct fake_qp *qp = container_of(ibv, struct fake_qp, qp);
	enum ibv_qp_state to = attr->qp_state;
	int error = 0;

	pthread_mutex_lock(&fake_lock);
	if (to == IBV_QPS_ERR)
		fake_qp_break(qp);
	else if (fake_fails("ibv_modify_qp"))
		error = errno;
	else if (to < IBV_QPS_INIT || to > IBV_QPS_RTS || qp->qp.state != to - 1 ||
		 (mask & needed[to]) != needed[to])
		error = EINVAL;
	if (!error && to == IBV_QPS_RTR) {
		qp->remote = attr->dest_qp_num;
		qp->path_mtu = attr->path_mtu;
		fake_last.path_mtu = attr->path_mtu;
		fake_last.service_level = attr->ah_attr.sl;
		fake_last.is_global = attr->ah_attr.is_global;
		fake_last.traffic_class = attr->ah_attr.grh.traffic_class;
		fake_last.gid_index = attr->ah_attr.grh.sgid_index;
	} else if (!error && to == IBV_QPS_RTS) {
		fake_last.timeout = attr->timeout;
		fake_last.retries = attr->retry_cnt;
	}
	if (!error && to != IBV_QPS_ERR)
		qp->qp.state = to;
	pthread_mutex_unlock(&fake_lock);
	errno = error ?: errno;
	return error;
}

static int post_one(struct fake_qp *qp, const struct ibv_send_wr *wr)
{
	struct fake_send *send;

	if (qp->qp.state != IBV_QPS_RTS && qp->qp.state != IBV_QPS_ERR)
		return EINVAL;
	if (qp->n_used == qp->cap.max_send_wr)
		return ENOMEM;
	/* Providers know the window by the key that it has in front of this. */
	if (wr->opcode == IBV_WR_BIND_MW &&
	    wr->bind_mw.mw->rkey != container_of(wr->bind_mw.mw, struct fake_mw, mw)->key)
		return EINVAL;
	if (wr->num_sge > 1)
		fake_abort("ibv_post_send: %d pieces of memory, the queue pair has one",
			   wr->num_sge);
	send = &qp->sends[(qp->first_send + qp->n_waiting) % qp->cap.max_send_wr];
	send->wr = *wr;
	if (wr->num_sge)
		send->sge = wr->sg_list[0];
	if (wr->send_flags & IBV_SEND_INLINE) {
		if (send->sge.length > sizeof(send->inline_data))
			fake_abort("ibv_post_send: %u bytes do not go inline", send->sge.length);
		memcpy(send->inline_data, (const void *)(uintptr_t)send->sge.addr,
		       send->sge.length);
	}
	qp->n_waiting++;
	qp->n_used++;
	fake_worked.works++;
	return 0;
}

static int fake_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct fake_qp *qp = container_of(ibv, struct fake_qp, qp);
	int r = 0;

	pthread_mutex_lock(&fake_lock);
	if (fake_fails("ibv_post_send"))
		r = errno;
	fake_worked.posts++;
	for (; !r && wr; wr = wr->next)
		r = post_one(qp, wr);
	*bad = wr;
	fake_wire_wake();
	pthread_mutex_unlock(&fake_lock);
	return r;
}

static int fake_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct fake_qp *qp = container_of(ibv, struct fake_qp, qp);
	int r = 0;

	pthread_mutex_lock(&fake_lock);
	if (fake_fails("ibv_post_recv"))
		r = errno;
	for (; !r && wr; wr = wr->next) {
		unsigned i = (qp->first_receive + qp->n_receives) % qp->cap.max_recv_wr;

		if (qp->n_receives == qp->cap.max_recv_wr) {
			r = ENOMEM;
			break;
		}
		qp->receives[i] = *wr;
		qp->receive_sges[i] = wr->sg_list[0];
		qp->n_receives++;
	}
	*bad = wr;
	fake_wire_wake();
	pthread_mutex_unlock(&fake_lock);
	return r;
}

struct fake_device *fake_device(unsigned i)
{
	static struct fake_device devices[FAKE_DEVICES];
	struct fake_device *device = &devices[i];
	struct ibv_context *context = FAKE_CONTEXT(device);

	if (context->device)
		return device;
	device->index = i;
	device->device.transport_type = IBV_TRANSPORT_IB;
	(void)snprintf(device->device.name, sizeof(device->device.name), "fake%u", i);
	device->verbs.sz = sizeof(device->verbs);
	device->verbs.query_device_ex = odp_query;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->ops.alloc_mw = fake_alloc_mw;
	context->ops.dealloc_mw = fake_dealloc_mw;
	context->ops.poll_cq = fake_poll_cq;
	context->ops.req_notify_cq = fake_req_notify_cq;
	context->ops.post_send = fake_post_send;
	context->ops.post_recv = fake_post_recv;
	context->device = &device->device;
	return device;
}
