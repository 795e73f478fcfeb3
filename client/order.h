/* Orders in which all ranks submit operations. (locked): client.h. */
#pragma once

#include <bps.h>

#define ORDERS 2 /* of enum bps_order */

struct bps_request;

struct order {
	uint64_t n; /* ordinals taken of it */
	uint64_t
		differed; /* the last of them with which a request has ended with -EILSEQ; 0: none */
};

/* The next ordinal; 0 in an elastic job, or when there is no order. (locked) */
uint64_t order_take(struct bps_client *client, int order);
/* How a request ended is told to the caller. (locked) */
void order_see(struct bps_client *client, const struct bps_request *request);
