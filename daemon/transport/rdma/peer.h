/* RDMA as the transport sees it, which needs no header of RDMA: opened, closed, and what a peer has of it. Home thread. */
#pragma once

#include "transport/peer/peer.h"

struct rdma;
struct rdma_peer;

int rdma_new(struct transport *transport, const struct transport_rdma_params *params,
	     struct rdma **ret_rdma);
/* Every lane is gone. */
struct rdma *rdma_free(struct rdma *rdma);
/* Both sides of a peer that is coming up have RDMA: the accepting one makes its offer, the other expects it. */
int rdma_begin(struct peer *peer);
/* A DATA_RDMA arrived. */
void rdma_notice_arrived(struct peer *peer, const struct data_header *header, const void *payload);
/* The wire of a lane broke, or is silent: closes it and moves its calls. Returns false when the peer cannot do without. */
bool rdma_lane_lost(struct lane *lane, bool is_silent);
/* A rail is gone, and so many calls with it: makes it anew after a while. */
void rdma_lane_closed(struct peer *peer, unsigned n_moved);
/* The peer is being lost: drops what is being made. */
struct rdma_peer *rdma_peer_free(struct rdma_peer *rdma_peer);
void rdma_peer_close(struct peer *peer);
/* "rdma mlx5_0", "rdma mlx5_0 mlx5_1", "tcp". */
void rdma_describe(const struct peer *peer, char *text, size_t size);
