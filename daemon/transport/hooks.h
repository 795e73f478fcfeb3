/*
 * What files of the transport call that stand above them: transport.c makes the table, once. The rooms, from above:
 *
 *	rdma	RDMA: devices, links that come up, lanes over them
 *	tcp	TCP: the data port, connections that are made, their handshake, lanes over them
 *	peer	peers with their calls, deliveries and notices; and our own process as one
 *	lane	lanes, whatever they go over: messages, their order, cookies and seals; calls that come in
 *	common	workers and their mailboxes, addresses, rates, what is logged of strangers
 *
 * scripts/layers has this order, and scripts/check-cycles holds it.
 */
#pragma once

#include <stdbool.h>

struct data_header;
struct lane;
struct peer;

/* Home thread. */
struct transport_hooks {
	/* Connections by TCP: one that a peer can do without is made anew. Returns 0 or -ENOMEM. What is being made is dropped. */
	int (*make_spare)(struct peer *peer, unsigned lane);
	void (*drop_dial)(struct peer *peer);
	/* RDMA: both sides of a peer that is coming up have it. Returns 0 or -errno. */
	int (*rdma_agreed)(struct peer *peer);
	/* A DATA_RDMA arrived. */
	void (*rdma_said)(struct peer *peer, const struct data_header *header, const void *payload);
	/* A lane broke, or is silent: false, the peer cannot do without. It is closed, and so many calls are moved. */
	bool (*rdma_broke)(struct lane *lane, bool is_silent);
	void (*rdma_gone)(struct peer *peer, unsigned n_moved);
	/* The peer is being lost; it is freed. */
	void (*rdma_drop)(struct peer *peer);
	void (*rdma_free)(struct peer *peer);
};
