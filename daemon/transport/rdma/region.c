/*
 * A piece of memory and a device: registering it pins all of its pages, and unregistering lets them
 * go, either of which takes seconds where there are tens of GiB. So no lock is held meanwhile.
 * registrar.c does both for regions that are large, memory.c for others and for slabs. Any thread.
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

struct ibv_mr *rdma_register_direct(struct rdma *rdma, struct rdma_device *device,
				    const struct rdma_region *region, int dmabuf)
{
	uint64_t start_ns = clock_now_ns();
	struct ibv_mr *mr;

	mr = rdma->verbs->reg_dmabuf_mr(device->pd, 0, region->len, region->start, dmabuf,
					IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	return counted(rdma, mr, start_ns);
}

/* Unless there is or may soon be more memory that can be locked. leaving: some was, before it was refused. */
static bool is_final(const struct rdma *rdma, int error, bool leaving)
{
	return error != ENOMEM || !(leaving || rdma_registrars_any_leaving(rdma));
}

static void explain_refusal(struct rdma *rdma, const struct rdma_device *device,
			    const struct rdma_region *region, int error)
{
	char text[320];

	if (atomic_exchange(&rdma->has_complained, true))
		return;
	rdma_explain(error, "cannot register memory, so it is copied on its way", text,
		     sizeof(text));
	log_warning("rdma: %s: %zu KiB: %s", device->name, region->len >> 10, text);
}

void rdma_region_register(struct rdma *rdma, struct rdma_device *device, struct rdma_region *region)
{
	uint64_t start_ns = clock_now_ns();
	unsigned i = device->index;
	bool leaving = rdma_registrars_any_leaving(rdma);
	struct ibv_mr *mr;
	int error;

	if (region->mrs[i] || region->is_refused[i])
		return;
	mr = rdma_register(rdma, device, (void *)region->start, region->len, access_of(device));
	error = errno;
	(void)pthread_rwlock_wrlock(&rdma->memory.lock);
	region->mrs[i] = mr;
	region->is_refused[i] = !mr && is_final(rdma, error, leaving);
	(void)pthread_rwlock_unlock(&rdma->memory.lock);
	if (region->is_refused[i])
		explain_refusal(rdma, device, region, error);
	else if (mr)
		log_debug("rdma: %s: registered %zu KiB in %llu us", device->name,
			  region->len >> 10,
			  (unsigned long long)(clock_now_ns() - start_ns) / 1000);
}

bool rdma_region_is_registered(const struct rdma_region *region)
{
	for (unsigned i = 0; i < RDMA_DEVICES; i++)
		if (region->mrs[i])
			return true;
	return false;
}

void rdma_region_unregister(struct rdma *rdma, struct rdma_region *region)
{
	for (unsigned i = 0; i < RDMA_DEVICES; i++)
		rdma_unregister(rdma, TAKE_PTR(region->mrs[i]));
}
