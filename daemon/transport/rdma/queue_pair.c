/*
 * What a link has of the device: its queue pair, completions, and the memory of its messages.
 * Made on the home thread for accept.c and dial.c; then the worker's.
 */
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"

#include <fcntl.h>
#include <sys/mman.h>

static size_t memory_len(void)
{
	return (size_t)(RDMA_RECEIVES + RDMA_SENDS) * RDMA_SLOT_LEN;
}

unsigned char *rdma_receive_slot(const struct rdma_link *link, unsigned i)
{
	return link->memory + (size_t)i * RDMA_SLOT_LEN;
}

unsigned char *rdma_send_slot(const struct rdma_link *link, unsigned i)
{
	return link->memory + (size_t)(RDMA_RECEIVES + i) * RDMA_SLOT_LEN;
}

int rdma_post_receives(struct rdma_link *link, const unsigned *slots, unsigned n)
{
	struct ibv_recv_wr wrs[RDMA_RECEIVE_BATCH], *bad;
	struct ibv_sge sges[RDMA_RECEIVE_BATCH];

	assert(n && n <= RDMA_RECEIVE_BATCH);

	for (unsigned i = 0; i < n; i++) {
		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)rdma_receive_slot(link, slots[i]),
			.length = RDMA_SLOT_LEN,
			.lkey = link->mr->lkey,
		};
		wrs[i] = (struct ibv_recv_wr){
			.wr_id = rdma_wr_id(RDMA_WR_RECEIVE, slots[i]),
			.next = i + 1 < n ? &wrs[i + 1] : NULL,
			.sg_list = &sges[i],
			.num_sge = 1,
		};
	}
	return -ibv_post_recv(link->qp, wrs, &bad);
}

static int make_queue_pair(struct rdma_link *link)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = link->cq,
		.recv_cq = link->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {
			.max_send_wr = 2 * RDMA_SENDS,
			.max_recv_wr = RDMA_RECEIVES,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_inline_data = 256,
		},
	};

	link->qp = link->rdma->verbs->create_qp(link->port->device->pd, &attr);
	if (!link->qp) {
		attr.cap.max_inline_data = 0;
		link->qp = link->rdma->verbs->create_qp(link->port->device->pd, &attr);
	}
	if (!link->qp)
		return -errno;
	link->max_inline = attr.cap.max_inline_data;
	return 0;
}

static int init_queue_pair(struct rdma_link *link)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	unsigned slots[RDMA_RECEIVE_BATCH], n;
	int mask, r = 0;

	if (link->rdma->verbs->cm_init_qp_attr(link->id, &attr, &mask))
		return -errno;
	attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	if (link->rdma->verbs->modify_qp(link->qp, &attr, mask | IBV_QP_ACCESS_FLAGS))
		return -errno;
	for (unsigned i = 0; i < RDMA_RECEIVES && !r; i += n) {
		for (n = 0; n < RDMA_RECEIVE_BATCH && i + n < RDMA_RECEIVES; n++)
			slots[n] = i + n;
		r = rdma_post_receives(link, slots, n);
	}
	return r;
}

static int failed_to(const char *what, char *why, size_t size)
{
	int error = errno ?: EIO;

	rdma_explain(error, what, why, size);
	return -error;
}

int rdma_link_make(struct rdma_link *link, char *why, size_t size)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct rdma_device *device = link->port->device;
	int r;

	link->memory = mmap(NULL, memory_len(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);
	if (link->memory == MAP_FAILED) {
		link->memory = NULL;
		return failed_to("no memory for the messages of a lane", why, size);
	}
	link->mr = rdma_register(link->rdma, device, link->memory, memory_len(),
				 IBV_ACCESS_LOCAL_WRITE);
	if (!link->mr)
		return failed_to("cannot register the memory of a lane", why, size);
	link->channel = verbs->create_comp_channel(device->context);
	if (!link->channel)
		return failed_to("cannot make a completion channel", why, size);
	if (fcntl(link->channel->fd, F_SETFL, O_NONBLOCK) < 0)
		return failed_to("completion channel", why, size);
	link->cq = verbs->create_cq(device->context, RDMA_RECEIVES + 2 * RDMA_SENDS, NULL,
				    link->channel, 0);
	if (!link->cq)
		return failed_to("cannot make a completion queue", why, size);
	r = make_queue_pair(link);
	if (!r)
		r = init_queue_pair(link);
	if (r) {
		errno = -r;
		return failed_to("cannot make a queue pair", why, size);
	}
	return 0;
}

void rdma_link_unmake(struct rdma_link *link)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;

	rdma_windows_done(link);
	if (link->qp)
		(void)verbs->destroy_qp(TAKE_PTR(link->qp));
	if (link->poll.n_events) /* else its end would wait for that */
		verbs->ack_cq_events(link->cq, link->poll.n_events);
	link->poll.n_events = 0;
	if (link->cq)
		(void)verbs->destroy_cq(TAKE_PTR(link->cq));
	if (link->channel)
		(void)verbs->destroy_comp_channel(TAKE_PTR(link->channel));
	rdma_unregister(link->rdma, TAKE_PTR(link->mr));
	if (link->memory)
		(void)munmap(TAKE_PTR(link->memory), memory_len());
	free(TAKE_PTR(link->grants.list));
}
