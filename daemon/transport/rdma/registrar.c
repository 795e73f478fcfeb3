/*
 * Who registers large regions with devices, and unregisters them: threads, as each of these calls
 * may take seconds. Each owner of memory has one of its own, which is there while there is
 * something to do. So what one owner has registered keeps nobody else waiting, neither the control
 * thread, nor those that move messages, nor another owner; and there are no more threads than
 * owners. memory.c asks.
 */
#include "transport/rdma/registrar.h"

#include "base/loop/thread.h"
#include "transport/rdma/rdma.h"

struct rdma_registrar {
	struct list link; /* in registrars->list */
	struct rdma *rdma;
	const void *owner;
	struct list regions; /* that wait */
};

/* No device knows the region any more: home hears of it. The lock is held. */
static void tell(struct rdma_registrars *registrars, struct loop *home, struct rdma_region *region)
{
	list_push_back(&registrars->gone, &region->link);
	if (!registrars->is_telling)
		loop_post(home, &registrars->tell);
	registrars->is_telling = true;
}

/* Home thread. */
static void on_tell(struct mail *mail)
{
	struct rdma_registrars *registrars = container_of(mail, struct rdma_registrars, tell);
	struct rdma_region *region;

	(void)pthread_mutex_lock(&registrars->lock);
	registrars->is_telling = false;
	while ((region = list_first(&registrars->gone, struct rdma_region, link))) {
		list_remove(&region->link);
		(void)pthread_mutex_unlock(&registrars->lock);
		region->gone->run(region->gone);
		free(region);
		(void)pthread_mutex_lock(&registrars->lock);
	}
	(void)pthread_mutex_unlock(&registrars->lock);
}

/* The lock is held, but while it works. The region may be asked for once more meanwhile, or leave. */
static void register_next(struct rdma_registrars *registrars, struct rdma *rdma,
			  struct rdma_region *region)
{
	unsigned wanted = registrars->is_closing ? 0 : region->wanted;

	region->wanted = 0;
	region->is_busy = true;
	(void)pthread_mutex_unlock(&registrars->lock);
	for (unsigned i = 0; i < rdma->n_devices; i++)
		if (wanted & (1u << i))
			rdma_region_register(rdma, &rdma->devices[i], region);
	(void)pthread_mutex_lock(&registrars->lock);
	region->is_busy = false;
}

/* The same. */
static void unregister_next(struct rdma_registrars *registrars, struct rdma *rdma,
			    struct rdma_region *region)
{
	(void)pthread_mutex_unlock(&registrars->lock);
	rdma_region_unregister(rdma, region);
	atomic_fetch_sub(&registrars->n_leaving, 1);
	(void)pthread_mutex_lock(&registrars->lock);
	if (region->gone)
		tell(registrars, rdma->transport->loop, region);
	else
		free(region);
}

static void *registrar_main(void *user)
{
	struct rdma_registrar *registrar = user;
	struct rdma *rdma = registrar->rdma;
	struct rdma_registrars *registrars = &rdma->registrars;
	struct rdma_region *region;

	(void)pthread_mutex_lock(&registrars->lock);
	while ((region = list_first(&registrar->regions, struct rdma_region, link))) {
		list_remove(&region->link);
		if (region->is_leaving)
			unregister_next(registrars, rdma, region);
		else
			register_next(registrars, rdma, region);
	}
	list_remove(&registrar->link);
	(void)pthread_cond_signal(&registrars->ended);
	(void)pthread_mutex_unlock(&registrars->lock);
	free(registrar);
	return NULL;
}

static struct rdma_registrar *registrar_of(struct rdma *rdma, const void *owner)
{
	struct rdma_registrar *registrar;

	list_for_each (registrar, &rdma->registrars.list, link)
		if (registrar->owner == owner)
			return registrar;
	registrar = calloc(1, sizeof(*registrar));
	if (!registrar)
		return NULL;
	*registrar = (struct rdma_registrar){ .rdma = rdma, .owner = owner };
	list_init(&registrar->regions);
	if (thread_detach(registrar_main, registrar)) {
		free(registrar);
		return NULL;
	}
	list_push_back(&rdma->registrars.list, &registrar->link);
	return registrar;
}

/* The lock is held. Returns false where there is no thread to be had: then none is busy with the region. */
static bool enqueue(struct rdma *rdma, struct rdma_region *region)
{
	struct rdma_registrar *registrar;

	if (list_linked(&region->link))
		return true;
	registrar = registrar_of(rdma, region->owner);
	if (registrar)
		list_push_back(&registrar->regions, &region->link);
	return registrar;
}

void rdma_registrar_register(struct rdma *rdma, const struct rdma_device *device,
			     struct rdma_region *region)
{
	struct rdma_registrars *registrars = &rdma->registrars;

	(void)pthread_mutex_lock(&registrars->lock);
	region->wanted |= 1u << device->index;
	/* Without a thread: the next message that finds it unregistered asks again. */
	(void)enqueue(rdma, region);
	(void)pthread_mutex_unlock(&registrars->lock);
}

bool rdma_registrar_unregister(struct rdma *rdma, struct rdma_region *region, struct mail *gone)
{
	struct rdma_registrars *registrars = &rdma->registrars;
	bool is_queued;

	(void)pthread_mutex_lock(&registrars->lock);
	region->is_leaving = true;
	region->gone = gone;
	is_queued = (region->is_busy || rdma_region_is_registered(region)) && enqueue(rdma, region);
	if (is_queued)
		atomic_fetch_add(&registrars->n_leaving, 1);
	else
		list_remove(&region->link);
	(void)pthread_mutex_unlock(&registrars->lock);
	if (is_queued)
		return false;
	/* There is nothing to be done, or nobody to do it. */
	rdma_region_unregister(rdma, region);
	free(region);
	return true;
}

bool rdma_registrars_any_leaving(const struct rdma *rdma)
{
	return atomic_load(&rdma->registrars.n_leaving);
}

void rdma_registrars_init(struct rdma_registrars *registrars)
{
	(void)pthread_mutex_init(&registrars->lock, NULL);
	(void)pthread_cond_init(&registrars->ended, NULL);
	list_init(&registrars->list);
	list_init(&registrars->gone);
	registrars->tell.run = on_tell;
}

void rdma_registrars_done(struct rdma *rdma)
{
	struct rdma_registrars *registrars = &rdma->registrars;

	(void)pthread_mutex_lock(&registrars->lock);
	registrars->is_closing = true;
	while (!list_empty(&registrars->list))
		(void)pthread_cond_wait(&registrars->ended, &registrars->lock);
	(void)pthread_mutex_unlock(&registrars->lock);
	loop_unpost(rdma->transport->loop, &registrars->tell);
	on_tell(&registrars->tell);
	(void)pthread_cond_destroy(&registrars->ended);
	(void)pthread_mutex_destroy(&registrars->lock);
}
