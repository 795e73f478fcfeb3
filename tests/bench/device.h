/*
 * Memory of a GPU that RDMA devices read and write, made as the daemon makes it: by daemon/gpu/, whose worker is the program
 * that BPS_DAEMON names, and transport_memory_add_direct(). For bench_rdma.c; needs a trainer, which is a process of its own.
 */
#pragma once

#include "transport_pair.h"

struct device;

/* Starts the trainer. Before there are threads. */
struct device *device_new(size_t len);
/*
 * Opens len bytes that this transport's devices know. Returns false, with the reason, where there are none. Nothing is at
 * device_data(): addresses for the transport.
 */
bool device_open(struct device *device, struct loop *loop, struct transport *transport, char *why,
		 size_t size);
char *device_data(const struct device *device);
/* Fills it all by the trainer's memory, the way of a gradient. */
void device_fill(struct device *device, uint64_t seed);
/* Whether len bytes from an offset on are the same as when the first len were filled. */
bool device_check(struct device *device, size_t offset, size_t len, uint64_t seed);
/* While the transport is there. */
struct device *device_free(struct device *device);
DEFINE_CLEANUP(struct device *, device_free)
