/*
 * The list of mappings that wait to be unmapped, and the thread that unmaps them in slices. The
 * thread starts with the first mapping and ends with the last. tensor/buffer.c gives trainers'
 * memory here, base/bulk.c what was a job's or a session's.
 */
#include "base/memory/unmap.h"

#include "base/loop/thread.h"
#include <pthread.h>
#include <sys/mman.h>

/* Less takes some 30 us, and to wake a thread nearly as long. */
#define UNMAP_HERE (256u << 10)
/* At once: whoever maps something meanwhile waits for it. */
#define UNMAP_SLICE ((size_t)32 << 20)

struct mapping {
	struct mapping *next;
	char *data;
	size_t len;
	bool removes; /* gives the pages back before it is unmapped */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct mapping *waiting;
static bool running; /* the thread */

static struct mapping *take(void)
{
	struct mapping *mapping;

	(void)pthread_mutex_lock(&lock);
	mapping = waiting;
	waiting = mapping ? mapping->next : NULL;
	running = mapping;
	(void)pthread_mutex_unlock(&lock);
	return mapping;
}

static void *unmap_all(void *unused)
{
	struct mapping *mapping;

	(void)unused;
	while ((mapping = take())) {
		if (mapping->removes)
			(void)madvise(mapping->data, mapping->len, MADV_REMOVE);
		for (size_t at = 0; at < mapping->len; at += UNMAP_SLICE)
			(void)munmap(mapping->data + at, MIN(mapping->len - at, UNMAP_SLICE));
		free(mapping);
	}
	return NULL;
}

/* Returns false when there is no thread to be had. */
static bool pass_on(struct mapping *mapping)
{
	bool taken;

	(void)pthread_mutex_lock(&lock);
	taken = running = running || !thread_detach(unmap_all, NULL);
	if (taken) {
		mapping->next = waiting;
		waiting = mapping;
	}
	(void)pthread_mutex_unlock(&lock);
	return taken;
}

static void unmap_elsewhere(void *data, size_t len, bool removes)
{
	struct mapping *mapping = malloc(sizeof(*mapping));

	if (mapping) {
		*mapping = (struct mapping){ .data = data, .len = len, .removes = removes };
		if (pass_on(mapping))
			return;
		free(mapping);
	}
	(void)munmap(data, len);
}

void unmap(void *data, size_t len)
{
	if (len > UNMAP_HERE)
		unmap_elsewhere(data, len, false);
	else
		(void)munmap(data, len);
}

void unmap_remove(void *data, size_t len)
{
	unmap_elsewhere(data, len, true);
}
