/*
 * Memory that RDMA devices read and write: regions by address, registered with a device when the
 * device first uses one. Slabs of blocks are added by the watcher of blocks; daemon.c and the
 * agent add staging, arenas and trainers' memory. Any thread.
 */
#include "transport/rdma/rdma.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdio.h>
#include <sys/resource.h>

/* With windows nobody but our own device writes to a region itself. */
static int access_of(const struct rdma_device *device)
{
	return IBV_ACCESS_LOCAL_WRITE |
	       (device->has_windows ? IBV_ACCESS_MW_BIND : IBV_ACCESS_REMOTE_WRITE);
}

void rdma_explain(int error, const char *what, char *text, size_t size)
{
	struct rlimit limit;

	if (error == ENOMEM && !getrlimit(RLIMIT_MEMLOCK, &limit) &&
	    limit.rlim_cur != RLIM_INFINITY)
		(void)snprintf(text, size,
			       "%s: %s; this process may lock %llu KiB of memory: raise that "
			       "(LimitMEMLOCK=infinity in its unit, or ulimit -l unlimited)",
			       what, strerrordesc_np(error),
			       (unsigned long long)limit.rlim_cur >> 10);
	else if (error == EACCES || error == EPERM)
		(void)snprintf(
			text, size,
			"%s: %s; this user may not open the device: see the owner and mode of "
			"/dev/infiniband (Debian: group rdma), and DeviceAllow= of its unit",
			what, strerrordesc_np(error));
	else
		(void)snprintf(text, size, "%s: %s", what,
			       strerrordesc_np(error) ?: "unknown error");
}

/* Counts what came of a registration that began then. Keeps errno. */
static struct ibv_mr *counted(struct rdma *rdma, struct ibv_mr *mr, uint64_t start_ns)
{
	struct rdma_metrics *metrics = &rdma->metrics;

	if (!mr) {
		metric_add(&metrics->refused, 1);
		return NULL;
	}
	metric_add(&metrics->regions, 1);
	metric_add(&metrics->bytes_pinned, mr->length);
	metric_add(&metrics->registrations, 1);
	metric_add(&metrics->registration_us, (clock_now_ns() - start_ns) / 1000);
	return mr;
}

struct ibv_mr *rdma_register(struct rdma *rdma, struct rdma_device *device, void *data, size_t len,
			     int access)
{
	uint64_t start_ns = clock_now_ns();
	struct ibv_mr *mr = rdma->verbs->reg_mr(device->pd, data, len, access);

	if (!mr && errno == ENOMEM && device->has_odp)
		mr = rdma->verbs->reg_mr(device->pd, data, len, access | IBV_ACCESS_ON_DEMAND);
	return counted(rdma, mr, start_ns);
}

void rdma_unregister(struct rdma *rdma, struct ibv_mr *mr)
{
	if (!mr)
		return;
	metric_sub(&rdma->metrics.regions, 1);
	metric_sub(&rdma->metrics.bytes_pinned, mr->length);
	(void)rdma->verbs->dereg_mr(mr);
}

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

/* First use. The lock is held for writing. */
static void region_register(struct rdma *rdma, struct rdma_device *device,
			    struct rdma_region *region)
{
	uint64_t start_ns = clock_now_ns();
	char text[320];
	unsigned i = device->index;

	if (region->mrs[i] || region->is_refused[i])
		return;
	region->mrs[i] =
		rdma_register(rdma, device, (void *)region->start, region->len, access_of(device));
	if (region->mrs[i]) {
		log_debug("rdma: %s: registered %zu KiB in %llu us", device->name,
			  region->len >> 10,
			  (unsigned long long)(clock_now_ns() - start_ns) / 1000);
		return;
	}
	region->is_refused[i] = true;
	if (atomic_exchange(&rdma->has_complained, true))
		return;
	rdma_explain(errno, "cannot register memory, so it is copied on its way", text,
		     sizeof(text));
	log_warning("rdma: %s: %zu KiB: %s", device->name, region->len >> 10, text);
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
	(void)pthread_rwlock_wrlock(&memory->lock);
	region = region_of(memory, data, len);
	if (region) {
		region_register(rdma, device, region);
		mr = region->mrs[device->index];
	}
	(void)pthread_rwlock_unlock(&memory->lock);
	return mr;
}

static void region_free(struct rdma *rdma, struct rdma_region *region)
{
	for (unsigned i = 0; i < RDMA_DEVICES; i++)
		rdma_unregister(rdma, region->mrs[i]);
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

int rdma_memory_add(struct rdma *rdma, const struct rdma_region *region)
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

void rdma_memory_remove(struct rdma *rdma, void *data)
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
	if (region)
		region_free(rdma, region);
}

static void slab_added(struct block_watcher *watcher, void *data, size_t len)
{
	struct rdma *rdma = container_of(watcher, struct rdma, watcher);
	struct rdma_region region = { .start = (uintptr_t)data, .len = len };

	/* Out of memory: blocks in it are then not moved by RDMA, which says so. */
	(void)rdma_memory_add(rdma, &region);
}

static void slab_removed(struct block_watcher *watcher, void *data)
{
	rdma_memory_remove(container_of(watcher, struct rdma, watcher), data);
}

void rdma_memory_init(struct rdma *rdma)
{
	(void)pthread_rwlock_init(&rdma->memory.lock, NULL);
	rdma->watcher =
		(struct block_watcher){ .slab_added = slab_added, .slab_removed = slab_removed };
	block_cache_watch(rdma->transport->blocks, &rdma->watcher);
}

void rdma_memory_done(struct rdma *rdma)
{
	struct rdma_memory *memory = &rdma->memory;

	block_cache_unwatch(rdma->transport->blocks, &rdma->watcher);
	while (memory->n)
		region_free(rdma, memory->regions[--memory->n]);
	free(memory->regions);
	(void)pthread_rwlock_destroy(&memory->lock);
}

/*
 * Memory of other devices: peers write to it with the region's key, as the kernel opens no windows
 * on such regions.
 */

static struct ibv_mr *register_direct(struct rdma *rdma, struct rdma_device *device,
				      const struct rdma_region *region, int dmabuf)
{
	uint64_t start_ns = clock_now_ns();
	struct ibv_mr *mr;

	mr = rdma->verbs->reg_dmabuf_mr(device->pd, 0, region->len, region->start, dmabuf,
					IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	return counted(rdma, mr, start_ns);
}

static int add_direct(struct rdma *rdma, struct rdma_region *region, int dmabuf,
		      struct failure *failure)
{
	char text[320];
	int r;

	for (unsigned i = 0; i < rdma->n_devices; i++) {
		region->mrs[i] = register_direct(rdma, &rdma->devices[i], region, dmabuf);
		if (region->mrs[i])
			continue;
		r = -(errno ?: EIO);
		rdma_explain(-r, "its dma-buf cannot be registered", text, sizeof(text));
		return failure_set(failure, r, "%s: %s", rdma->devices[i].name, text);
	}
	r = rdma_memory_add(rdma, region);
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
	struct rdma_region region = { .start = (uintptr_t)data, .len = len };
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

int transport_memory_add(struct transport *transport, void *data, size_t len)
{
	struct rdma_region region = { .start = (uintptr_t)data, .len = len };

	return transport->rdma ? error_trace(rdma_memory_add(transport->rdma, &region)) : 0;
}

void transport_memory_remove(struct transport *transport, void *data)
{
	if (transport->rdma)
		rdma_memory_remove(transport->rdma, data);
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
