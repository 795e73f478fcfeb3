/* Deliveries: calls and notices that have come in, until they are answered or done with; and those of this process itself. */
#pragma once

#include "transport/transport.h"

struct call;
struct lane;
struct peer;
struct rdma_window;

/* Thousands wait for an answer at once: what is done with when the answer is made gives its place to that. */
struct incoming {
	/* Once answered its header and block are the answer's. */
	struct delivery delivery;
	struct message
		message; /* the answer. Before, its mail goes home, and its target and priority are as asked for */
	struct lane *lane;	/* NULL: from ourselves */
	struct call *call;	/* in-process: who waits; NULL once it was ended without us */
	uint64_t charged, held; /* to its peer's quota; of that as held, by nobody else's account */
	/* Of calls that came over an RDMA lane, or a spare one; home but for target and window. */
	struct rdma_window *window; /* the worker's: through which the payload comes */
	struct list
		link; /* of the peer's arrived ones until its answer is written; or moved ones */
	/* Of the lane that it first came by, which may be gone; RAIL_TCP of those over TCP. */
	unsigned rail;
	uint32_t cookie; /* that it had there */
	uint32_t check;	 /* of the answer's payload, if message.is_checked */
	bool is_answered, is_written;
	bool is_damaged; /* its payload is not what was sent: it is to come again */
	bool is_kept;	 /* spare when it is free; others are memory of their own */
};

#define RAIL_TCP UINT_MAX

/* With room for a header, which the caller writes. Charges the peer. Returns 0, QUOTA_E_FULL, or -ENOMEM. */
int incoming_new(struct peer *peer, struct lane *lane, uint32_t payload_len,
		 struct incoming **ret_incoming);
struct incoming *incoming_free(struct incoming *incoming);
/* The words for a QUOTA_E_FULL. */
int incoming_over_quota(const struct peer *peer, uint32_t payload_len, struct failure *failure);
/* Complete: hands it to the receiver. Home thread. */
void incoming_arrive(struct mail *mail);
/* The lane lets its answer go: written, or never to be on this lane. The lane's thread. */
void incoming_written(struct incoming *incoming, bool is_written);
/* An RDMA lane of the peer has closed: its calls wait to be asked for on another lane. */
void incoming_lane_closed(struct lane *lane);
/* The peer is lost: nobody will ask for so many of them. Returns whether more are left. */
bool incoming_peer_lost(struct peer *peer, unsigned max);

/* A notice on its way out. */
struct notice {
	struct message message;
	struct data_header header;
	struct peer *peer; /* in-process: ourselves */
	struct list link;
	struct block *block; /* has the payload; or NULL: */
	unsigned char payload[];
};

/*
 * References the block, or copies the payload unless NULL: header->len bytes. Charged to the quota unless NULL. To be freed by
 * notice_free(). Returns 0, -ENOMEM, or -EDQUOT: over the quota.
 */
int notice_new(struct quota *quota, const struct data_header *header, struct block *block,
	       const void *payload, struct notice **ret_notice);
static inline void notice_free(struct notice *notice)
{
	(void)block_unref(notice->block);
	(void)held_free(notice);
}

/* In one process (inproc.c) */
void inproc_call(struct call *call);
void inproc_answer(struct incoming *incoming, const struct data_header *header, struct block *block,
		   const void *payload);
void inproc_notice(struct peer *peer, struct notice *notice);
