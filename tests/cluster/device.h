/* Memory on a pretend CUDA device for a trainer of the cluster tests, of each kind that programs have. One device, one stream. */
#pragma once

#include <stddef.h>

enum device_kind {
	DEVICE_ALLOC = 1, /* cuMemAlloc(), in the middle of a larger allocation */
	DEVICE_MAPPED,	  /* cuMemCreate() */
	DEVICE_MANAGED,
	DEVICE_POOL,
	DEVICE_PIECES,	/* lies across two pieces of cuMemCreate() */
	DEVICE_PRIVATE, /* cuMemCreate() that may not be exported */
};

struct device_memory {
	enum device_kind kind; /* 0: none */
	void *data;
	unsigned long long base; /* of what was allocated, or reserved */
	size_t len;
};

/* The functions end the trainer, with words, when the driver fails. */
void device_open(int ordinal);
void *device_stream(void);
struct device_memory device_alloc(enum device_kind kind, size_t len);
void device_free(struct device_memory *memory);
/* In the order of the stream; the second waits for it. */
void device_write(void *to, const void *from, size_t len);
void device_read(void *to, const void *from, size_t len);
