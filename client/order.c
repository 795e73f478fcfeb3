/*
 * Orders in which all ranks of a job submit operations, whatever their tensors. Each order has numbers of its own, and
 * each of these stands for one ordinal of the job, so daemons know of no orders. submit.c takes an ordinal when nothing
 * can fail any more, so none is missing; request.c says how requests ended.
 */
#include "client.h"

/* The n-th of an order. Newest ordinals of both orders have places of their own among those that daemons know. */
static uint64_t order_ordinal(int order, uint64_t n)
{
	return (n - 1) * ORDERS + (uint64_t)order;
}

static struct order *order_of(struct bps_client *client, uint64_t ordinal)
{
	return &client->job.orders[(ordinal - 1) % ORDERS];
}

uint64_t order_take(struct bps_client *client, int order)
{
	if (!order || client->job.params.elastic)
		return 0;
	return order_ordinal(order, ++client->job.orders[order - 1].n);
}

void order_see(struct bps_client *client, const struct bps_request *request)
{
	uint64_t ordinal = request->entry.ordinal;
	struct order *order;

	/* In entries of rows the field is another. */
	if (likely(request->status != -EILSEQ) || request->row_len || !ordinal ||
	    request->run != client->job.run)
		return;
	order = order_of(client, ordinal);
	order->differed = MAX(order->differed, ordinal);
}

static int order_check(const struct bps_client *client, int order)
{
	int r = client_check(client);

	if (!r && (order < 1 || order > ORDERS))
		r = error_set(-EINVAL, "%d is no order", order);
	return r;
}

_public_ int bps_client_take_ordinal(struct bps_client *client, int order, uint64_t *ret_ordinal)
{
	int r = order_check(client, order);

	if (!r && !ret_ordinal)
		r = error_set(-EINVAL, "ret_ordinal is NULL");
	if (r)
		return r;
	CLIENT_LOCKED(client);
	*ret_ordinal = order_take(client, order);
	return 0;
}

_public_ uint64_t bps_client_differed(struct bps_client *client, int order)
{
	if (order_check(client, order))
		return 0;
	CLIENT_LOCKED(client);
	return client->job.orders[order - 1].differed;
}
