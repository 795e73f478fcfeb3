/*
 * Memory windows of type 2B. A region can be written to by our own device only. What a peer is
 * to write goes through a window: certain bytes, from one queue pair, until the peer's SEND WITH
 * INVALIDATE closes it. That message also says that the bytes are written. So nothing is open to
 * a peer but what the peer was asked for, and a call is not done before its window is closed.
 * Worker's thread.
 */
#include "transport/rdma/link.h"

static struct rdma_window *make(struct rdma_link *link)
{
	struct rdma_window *window;

	if (!link->windows.list)
		link->windows.list = calloc(RDMA_WINDOWS, sizeof(*link->windows.list));
	if (!link->windows.list || link->windows.n == RDMA_WINDOWS)
		return NULL;
	window = &link->windows.list[link->windows.n];
	window->mw = ibv_alloc_mw(link->port->device->pd, IBV_MW_TYPE_2);
	if (!window->mw)
		return NULL;
	link->windows.n++;
	metric_add(&link->rdma->metrics.windows, 1);
	return window;
}

bool rdma_window_has(struct rdma_link *link, unsigned limit)
{
	if (link->windows.n_open >= limit)
		return false;
	if (!link->windows.free)
		link->windows.free = make(link);
	return link->windows.free;
}

struct rdma_window *rdma_window_open(struct rdma_link *link, struct ibv_mr *mr, uint64_t address,
				     uint32_t len, struct ibv_send_wr *ret_bind)
{
	struct rdma_window *window = link->windows.free;

	link->windows.free = window->next_free;
	link->windows.n_open++;
	*ret_bind = (struct ibv_send_wr){
		.opcode = IBV_WR_BIND_MW,
		.bind_mw = {
			.mw = window->mw,
			.rkey = ibv_inc_rkey(window->mw->rkey),
			.bind_info = {
				.mr = mr,
				.addr = address,
				.length = len,
				.mw_access_flags = IBV_ACCESS_REMOTE_WRITE,
			},
		},
	};
	return window;
}

void rdma_window_bound(const struct ibv_send_wr *bind)
{
	bind->bind_mw.mw->rkey = bind->bind_mw.rkey;
}

int rdma_window_close(struct rdma_link *link, struct rdma_window *window, const struct ibv_wc *wc)
{
	if (!window)
		return 0;
	if (!(wc->wc_flags & RDMA_WC_WITH_INV) || wc->invalidated_rkey != window->mw->rkey)
		return lane_protocol_error(link->lane, "a window that was left open");
	window->next_free = link->windows.free;
	link->windows.free = window;
	link->windows.n_open--;
	return 0;
}

void rdma_windows_done(struct rdma_link *link)
{
	for (unsigned i = 0; i < link->windows.n; i++)
		(void)ibv_dealloc_mw(link->windows.list[i].mw);
	metric_sub(&link->rdma->metrics.windows, link->windows.n);
	link->windows.n = link->windows.n_open = 0;
	link->windows.free = NULL;
	free(TAKE_PTR(link->windows.list));
}
