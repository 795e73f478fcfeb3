/*
 * Threads that register large regions and unregister them: one for each owner of memory, while it has something to be
 * done. What an owner asks for is done in its order; those of several owners at the same time.
 */
#pragma once

#include "base/loop/loop.h"
#include <pthread.h>

struct rdma;
struct rdma_device;
struct rdma_region;

struct rdma_registrars {
	pthread_mutex_t lock; /* guards what follows, and what regions have for it; taken alone */
	pthread_cond_t ended; /* one of the list */
	struct list list;
	struct list gone; /* regions that no device knows any more, of which home is to tell */
	struct mail tell;
	bool is_telling; /* it has been posted, and has not run yet */
	bool is_closing;
	_Atomic size_t n_leaving; /* regions that are to be unregistered; any thread */
};

/* Whether some memory will soon be locked no more. Any thread. */
bool rdma_registrars_any_leaving(const struct rdma *rdma);
void rdma_registrars_init(struct rdma_registrars *registrars);
/* What has not begun is not registered any more; what is to be unregistered is, and is told. Waits for it. Home thread. */
void rdma_registrars_done(struct rdma *rdma);
/* Soon; until then, and if it is refused, no device knows it. Whoever asks keeps the region from going. Any thread. */
void rdma_registrar_register(struct rdma *rdma, const struct rdma_device *device,
			     struct rdma_region *region);
/*
 * Nobody finds the region any more: it is unregistered, and freed. Returns true if that has been; else it will be soon, and gone,
 * if not NULL, runs on the home thread then. Any thread.
 */
bool rdma_registrar_unregister(struct rdma *rdma, struct rdma_region *region, struct mail *gone);
