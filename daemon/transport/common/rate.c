/*
 * How fast this node's link is: the most that has come in by TCP over a while in which something
 * came all the time. Less than was known counts a little, so that a link which has become slower
 * is known for that after seconds of work. What a probe has said, before there was such a while,
 * fades in the same way. receive.c counts on each worker's thread; any thread asks.
 */
#include "transport/common/worker.h"
#include "transport/internal.h"

#include "base/clock.h"

#define GAP_NS (8 * NSEC_PER_MSEC) /* that long without a byte is no work */
#define SAMPLE_NS \
	(64 * NSEC_PER_MSEC) /* long enough that what had piled up unread does not count for much */
#define FORGET 256	     /* samples */

void rate_count(struct rate *rate, uint64_t bytes, uint64_t now_ns)
{
	uint64_t known = atomic_load_explicit(&rate->bytes_s, memory_order_relaxed), bytes_s,
		 took_ns;

	/* now_ns is when this lane brought something last, which may be before another lane did. */
	if (!bytes)
		return;
	/* How long these were on their way is not known. */
	if (now_ns - rate->last_ns > GAP_NS) {
		rate->since_ns = now_ns;
		rate->bytes = bytes = 0;
	}
	rate->last_ns = now_ns;
	rate->bytes += bytes;
	took_ns = now_ns - rate->since_ns;
	if (took_ns < SAMPLE_NS)
		return;
	bytes_s = (uint64_t)((double)rate->bytes * (double)NSEC_PER_SEC / (double)took_ns);
	if (bytes_s < known)
		bytes_s = known - (known - bytes_s) / FORGET;
	atomic_store_explicit(&rate->bytes_s, bytes_s, memory_order_relaxed);
	if (rate->sum)
		atomic_fetch_add_explicit(rate->sum, bytes_s - known, memory_order_relaxed);
	if (rate->probed) {
		known = atomic_load_explicit(rate->probed, memory_order_relaxed);
		atomic_store_explicit(rate->probed, known - known / FORGET, memory_order_relaxed);
	}
	rate->since_ns = now_ns;
	rate->bytes = 0;
}

uint64_t transport_bytes_s(const struct transport *transport)
{
	uint64_t bytes_s = atomic_load_explicit(&transport->bytes_s, memory_order_relaxed);

	return MAX(bytes_s, atomic_load_explicit(&transport->probed_bytes_s, memory_order_relaxed));
}
