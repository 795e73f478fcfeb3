/*
 * The data threads of a transport: which of them a new connection is on. Home thread.
 */
#include "transport/internal.h"

#include <stdio.h>

int transport_start_workers(struct transport *transport, unsigned n_threads)
{
	unsigned n = MAX(n_threads, 1u);
	char name[16];
	int r;

	transport->workers = calloc(n, sizeof(struct worker *));
	if (!transport->workers)
		return error_origin(-ENOMEM);
	for (; transport->n_workers < n; transport->n_workers++) {
		(void)snprintf(name, sizeof(name), "data-%u", transport->n_workers);
		r = worker_new(transport->loop, n_threads ? name : NULL,
			       &transport->workers[transport->n_workers]);
		if (r)
			return error_trace(r);
		transport->workers[transport->n_workers]->rate.sum = &transport->bytes_s;
		transport->workers[transport->n_workers]->rate.probed = &transport->probed_bytes_s;
	}
	return 0;
}

struct worker *transport_pick_worker(struct transport *transport)
{
	return transport->workers[transport->next_worker++ % transport->n_workers];
}

int transport_beat_worker(struct transport *transport, struct worker **ret_worker)
{
	int r;

	if (!transport->beat) {
		r = worker_new(transport->loop, "beat", &transport->beat);
		if (r)
			return error_trace(r);
	}
	*ret_worker = transport->beat;
	return 0;
}
