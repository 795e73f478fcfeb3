/*
 * Memory that RDMA devices read and write: regions by address, registered with a device when the
 * device first uses one. Slabs of blocks are added by the watcher of blocks; daemon.c and the
 * agent add staging, arenas and trainers' memory. Who moves a message registers what is small, and
 * slabs; what is large is for the registrars, and is copied until they are done. Any thread.
 */
#include "transport/rdma/rdma.h"

/* The first region behind an address; under the lock. */
static size_t position_of(const struct rdma_memory *memory, uintptr_t at)
{
	size_t low = 0, high = memory->n;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (memory->regions[middle]->start <= at)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static struct rdma_region *region_of(const struct rdma_memory *memory, const void *data, size_t len)
{
	uintptr_t at = (uintptr_t)data;
	size_t i = position_of(memory, at);
	struct rdma_region *region = i ? memory->regions[i - 1] : NULL;

	if (!region || at - region->start > region->len || len > region->len - (at - region->start))
		return NULL;
	return region;
}

/* Slabs have to: messages of blocks have no other way, and what is locked of one that goes makes room for the next. */
static bool is_at_once(const struct rdma_region *region)
{
	return region->is_block || region->len <= RDMA_AT_ONCE;
}

static struct ibv_mr *register_at_once(struct rdma *rdma, struct rdma_device *device,
				       struct rdma_region *region)
{
	struct ibv_mr *mr;

	(void)pthread_mutex_lock(&rdma->memory.at_once);
	rdma_region_register(rdma, device, region);
	mr = region->mrs[device->index];
	(void)pthread_mutex_unlock(&rdma->memory.at_once);
	return mr;
}

struct ibv_mr *rdma_memory_find(struct rdma *rdma, struct rdma_device *device, const void *data,
				size_t len)
{
	struct rdma_memory *memory = &rdma->memory;
	struct rdma_region *region;
	struct ibv_mr *mr = NULL;
	bool is_new;

	(void)pthread_rwlock_rdlock(&memory->lock);
	region = region_of(memory, data, len);
	if (region)
		mr = region->mrs[device->index];
	is_new = region && !mr && !region->is_refused[device->index];
	(void)pthread_rwlock_unlock(&memory->lock);
	if (!is_new)
		return mr;
	if (is_at_once(region))
		return register_at_once(rdma, device, region);
	rdma_registrar_register(rdma, device, region);
	return NULL;
}

static void region_free(struct rdma *rdma, struct rdma_region *region)
{
	rdma_region_unregister(rdma, region);
	free(region);
}

static int memory_reserve(struct rdma_memory *memory)
{
	size_t capacity = memory->capacity ? 2 * memory->capacity : 64;
	struct rdma_region **regions;

	if (memory->n < memory->capacity)
		return 0;
	regions = reallocarray(memory->regions, capacity, sizeof(*regions));
	if (!regions)
		return error_origin(-ENOMEM);
	memory->regions = regions;
	memory->capacity = capacity;
	return 0;
}

static int add(struct rdma *rdma, const struct rdma_region *region)
{
	struct rdma_memory *memory = &rdma->memory;
	struct rdma_region *copy = malloc(sizeof(*copy));
	size_t i;
	int r;

	if (!copy)
		return error_origin(-ENOMEM);
	*copy = *region;
	(void)pthread_rwlock_wrlock(&memory->lock);
	r = memory_reserve(memory);
	if (!r) {
		i = position_of(memory, copy->start);
		memmove(&memory->regions[i + 1], &memory->regions[i],
			(memory->n - i) * sizeof(*memory->regions));
		memory->regions[i] = copy;
		memory->n++;
	}
	(void)pthread_rwlock_unlock(&memory->lock);
	if (r)
		free(copy);
	return error_trace(r);
}

/* Returns whether no device knows it any more; else gone, if not NULL, runs on the home thread when that is so. */
static bool take_out(struct rdma *rdma, void *data, struct mail *gone)
{
	struct rdma_memory *memory = &rdma->memory;
	struct rdma_region *region = NULL;
	size_t i;

	(void)pthread_rwlock_wrlock(&memory->lock);
	i = position_of(memory, (uintptr_t)data);
	if (i && memory->regions[i - 1]->start == (uintptr_t)data) {
		region = memory->regions[i - 1];
		memory->n--;
		memmove(&memory->regions[i - 1], &memory->regions[i],
			(memory->n - (i - 1)) * sizeof(*memory->regions));
	}
	(void)pthread_rwlock_unlock(&memory->lock);
	if (region && !is_at_once(region))
		return rdma_registrar_unregister(rdma, region, gone);
	if (region)
		region_free(rdma, region);
	return true;
}

static void slab_added(struct block_watcher *watcher, void *data, size_t len)
{
	struct rdma *rdma = container_of(watcher, struct rdma, watcher);
	struct rdma_region region = { .start = (uintptr_t)data, .len = len, .is_block = true };

	/* Out of memory: blocks in it are then not moved by RDMA, which says so. */
	(void)add(rdma, &region);
}

static void slab_removed(struct block_watcher *watcher, void *data)
{
	(void)take_out(container_of(watcher, struct rdma, watcher), data, NULL);
}

void rdma_memory_init(struct rdma *rdma)
{
	(void)pthread_rwlock_init(&rdma->memory.lock, NULL);
	(void)pthread_mutex_init(&rdma->memory.at_once, NULL);
	rdma_registrars_init(&rdma->registrars);
	rdma->watcher =
		(struct block_watcher){ .slab_added = slab_added, .slab_removed = slab_removed };
	block_cache_watch(rdma->transport->blocks, &rdma->watcher);
}

void rdma_memory_done(struct rdma *rdma)
{
	struct rdma_memory *memory = &rdma->memory;

	block_cache_unwatch(rdma->transport->blocks, &rdma->watcher);
	rdma_registrars_done(rdma);
	while (memory->n)
		region_free(rdma, memory->regions[--memory->n]);
	free(memory->regions);
	(void)pthread_mutex_destroy(&memory->at_once);
	(void)pthread_rwlock_destroy(&memory->lock);
}

/*
 * Memory of other devices: peers write to it with the region's key, as the kernel opens no windows
 * on such regions.
 */

static int add_direct(struct rdma *rdma, struct rdma_region *region, int dmabuf,
		      struct failure *failure)
{
	char text[320];
	int r;

	for (unsigned i = 0; i < rdma->n_devices; i++) {
		region->mrs[i] = rdma_register_direct(rdma, &rdma->devices[i], region, dmabuf);
		if (region->mrs[i])
			continue;
		r = -(errno ?: EIO);
		rdma_explain(-r, "its dma-buf cannot be registered", text, sizeof(text));
		return failure_set(failure, r, "%s: %s", rdma->devices[i].name, text);
	}
	r = add(rdma, region);
	return r ? failure_set(failure, r, "out of memory") : 0;
}

/* The interface */

const char *transport_no_direct(const struct transport *transport)
{
	const struct rdma *rdma = transport->rdma;

	if (!rdma)
		return "no RDMA device is used";
	if (!rdma->verbs->reg_dmabuf_mr)
		return "the rdma-core here has no ibv_reg_dmabuf_mr, 34 has it";
	if (rdma->params.windows == TRANSPORT_WINDOWS_ON)
		return "rdma_windows = on, and a dma-buf cannot have windows";
	return NULL;
}

int transport_memory_add_direct(struct transport *transport, void *data, size_t len, int dmabuf,
				struct failure *failure)
{
	struct rdma_region region = { .start = (uintptr_t)data, .len = len, .owner = data };
	const char *why = transport_no_direct(transport);
	struct rdma *rdma = transport->rdma;
	int r;

	if (why)
		return failure_set(failure, -EOPNOTSUPP, "%s", why);
	r = add_direct(rdma, &region, dmabuf, failure);
	for (unsigned i = 0; r && i < RDMA_DEVICES; i++)
		rdma_unregister(rdma, region.mrs[i]);
	return r;
}

int transport_memory_add(struct transport *transport, const void *owner, void *data, size_t len)
{
	struct rdma_region region = { .start = (uintptr_t)data, .len = len, .owner = owner };

	return transport->rdma ? error_trace(add(transport->rdma, &region)) : 0;
}

bool transport_memory_remove(struct transport *transport, void *data, struct mail *gone)
{
	return transport->rdma ? take_out(transport->rdma, data, gone) : true;
}

unsigned transport_memory_regions(const struct transport *transport, const void *data)
{
	struct rdma *rdma = transport->rdma;
	const struct rdma_region *region;
	unsigned n = 0;

	if (!rdma)
		return 0;
	(void)pthread_rwlock_rdlock(&rdma->memory.lock);
	region = region_of(&rdma->memory, data, 0);
	for (unsigned i = 0; region && i < RDMA_DEVICES; i++)
		n += region->mrs[i] != NULL;
	(void)pthread_rwlock_unlock(&rdma->memory.lock);
	return n;
}

void transport_rdma_counters(const struct transport *transport,
			     struct transport_rdma_counters *ret_counters)
{
	const struct rdma *rdma = transport->rdma;

	*ret_counters = (struct transport_rdma_counters){ 0 };
	if (!rdma)
		return;
	ret_counters->bytes_moved = metric_get(&rdma->metrics.bytes_moved);
	ret_counters->bytes_copied = metric_get(&rdma->metrics.bytes_copied);
	ret_counters->regions = metric_get(&rdma->metrics.regions);
	ret_counters->bytes_pinned = metric_get(&rdma->metrics.bytes_pinned);
	ret_counters->links = metric_get(&rdma->metrics.links);
	ret_counters->links_broken = metric_get(&rdma->metrics.links_broken);
	ret_counters->links_still = metric_get(&rdma->metrics.links_still);
	ret_counters->calls_moved = metric_get(&rdma->metrics.calls_moved);
	ret_counters->registration_us = metric_get(&rdma->metrics.registration_us);
}
