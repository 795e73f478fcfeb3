/*
 * The mappings that wait to be unmapped, by owner, and the threads that unmap them in slices. A
 * thread starts with an owner's first mapping and ends with the last. tensor/buffer.c gives
 * trainers' memory here, base/bulk.c what was a job's or a session's.
 */
#include "base/memory/unmap.h"

#include "base/list.h"
#include "base/loop/thread.h"
#include <pthread.h>
#include <sys/mman.h>

/* Less takes some 30 us, and to wake a thread nearly as long. */
#define UNMAP_HERE (256u << 10)
/* At once: whoever maps something meanwhile waits for it. */
#define UNMAP_SLICE ((size_t)32 << 20)

struct mapping {
	struct list link; /* in unmapper->mappings until it is unmapped */
	char *data;
	size_t len;
	bool removes; /* gives the pages back before it is unmapped */
	struct unmap_charge charges[UNMAP_CHARGES];
};

/* A thread. */
struct unmapper {
	struct list link;
	const void *owner; /* NULL: nobody but we have it */
	struct list mappings;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct list unmappers = LIST_INIT(unmappers);

static void give_back(const struct mapping *mapping)
{
	if (mapping->removes)
		(void)madvise(mapping->data, mapping->len, MADV_REMOVE);
	for (size_t at = 0; at < mapping->len; at += UNMAP_SLICE)
		(void)munmap(mapping->data + at, MIN(mapping->len - at, UNMAP_SLICE));
}

void unmap_release(struct unmap_charge charges[UNMAP_CHARGES])
{
	for (unsigned i = 0; i < UNMAP_CHARGES; i++) {
		quota_release(charges[i].quota, charges[i].amount);
		charges[i].quota = NULL;
	}
}

static void *unmapper_main(void *user)
{
	struct unmapper *unmapper = user;
	struct mapping *mapping;

	(void)pthread_mutex_lock(&lock);
	while ((mapping = list_first(&unmapper->mappings, struct mapping, link))) {
		(void)pthread_mutex_unlock(&lock);
		give_back(mapping);
		(void)pthread_mutex_lock(&lock);
		list_remove(&mapping->link);
		unmap_release(mapping->charges);
		free(mapping);
	}
	list_remove(&unmapper->link);
	(void)pthread_mutex_unlock(&lock);
	free(unmapper);
	return NULL;
}

/* The lock is held. Returns NULL when there is no thread to be had. */
static struct unmapper *unmapper_of(const void *owner)
{
	struct unmapper *unmapper;

	list_for_each (unmapper, &unmappers, link)
		if (unmapper->owner == owner)
			return unmapper;
	unmapper = calloc(1, sizeof(*unmapper));
	if (!unmapper)
		return NULL;
	unmapper->owner = owner;
	list_init(&unmapper->mappings);
	if (thread_detach(unmapper_main, unmapper)) {
		free(unmapper);
		return NULL;
	}
	list_push_back(&unmappers, &unmapper->link);
	return unmapper;
}

/* What is to be unmapped only goes first. */
static bool pass_on(const void *owner, struct mapping *mapping)
{
	struct unmapper *unmapper;

	(void)pthread_mutex_lock(&lock);
	unmapper = unmapper_of(owner);
	if (unmapper && mapping->removes)
		list_push_back(&unmapper->mappings, &mapping->link);
	else if (unmapper)
		list_push_front(&unmapper->mappings, &mapping->link);
	(void)pthread_mutex_unlock(&lock);
	return unmapper;
}

void unmap_now(void *data, size_t len, struct unmap_charge charges[UNMAP_CHARGES])
{
	(void)munmap(data, len);
	unmap_release(charges);
}

static void unmap_elsewhere(const void *owner, struct mapping *what)
{
	struct mapping *mapping = malloc(sizeof(*mapping));

	if (mapping) {
		*mapping = *what;
		if (pass_on(owner, mapping))
			return;
		free(mapping);
	}
	unmap_now(what->data, what->len, what->charges);
}

void unmap(void *data, size_t len)
{
	if (len > UNMAP_HERE)
		unmap_elsewhere(NULL, &(struct mapping){ .data = data, .len = len });
	else
		(void)munmap(data, len);
}

static void unmap_charged(const void *owner, struct mapping mapping,
			  const struct unmap_charge charges[UNMAP_CHARGES])
{
	memcpy(mapping.charges, charges, sizeof(mapping.charges));
	unmap_elsewhere(owner, &mapping);
}

void unmap_shared(const void *owner, void *data, size_t len,
		  const struct unmap_charge charges[UNMAP_CHARGES])
{
	unmap_charged(owner, (struct mapping){ .data = data, .len = len }, charges);
}

void unmap_remove(const void *owner, void *data, size_t len,
		  const struct unmap_charge charges[UNMAP_CHARGES])
{
	unmap_charged(owner, (struct mapping){ .data = data, .len = len, .removes = true },
		      charges);
}

void unmap_release_all(void)
{
	struct unmapper *unmapper;
	struct mapping *mapping;

	(void)pthread_mutex_lock(&lock);
	list_for_each (unmapper, &unmappers, link)
		list_for_each (mapping, &unmapper->mappings, link)
			unmap_release(mapping->charges);
	(void)pthread_mutex_unlock(&lock);
}
