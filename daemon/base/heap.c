#include "base/heap.h"

#include "proto/c.h"
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Address space, not memory: so much more is asked of the kernel at a time, and can be advised before it is used. */
#define HEAP_STEP  (64 << 20)
#define HEAP_SMALL (2u << 20) /* at its beginning: an idle daemon takes less */
#define HUGE_PAGE  (2u << 20)
/* Tables with an entry for each of some ten thousand are in it, too. */
#define HEAP_LARGE (1 << 20)

static atomic_uintptr_t heap_from, heap_end;

void heap_look(void)
{
	uintptr_t from = atomic_load_explicit(&heap_from, memory_order_relaxed);
	uintptr_t end = (uintptr_t)sbrk(0);

	if (end == atomic_load_explicit(&heap_end, memory_order_relaxed))
		return;
	atomic_store_explicit(&heap_end, end, memory_order_relaxed);
	/* Where there are none, it is in small ones. */
	if (end > from)
		(void)madvise((void *)from, end - from, MADV_HUGEPAGE);
}

void heap_init(void)
{
	uintptr_t start = (uintptr_t)sbrk(0);
	void *more;

	(void)mallopt(M_TOP_PAD, HEAP_STEP);
	(void)mallopt(M_MMAP_THRESHOLD, HEAP_LARGE);
	atomic_store_explicit(&heap_from, align_up(start + HEAP_SMALL, (uintptr_t)HUGE_PAGE),
			      memory_order_relaxed);
	/* More than there can be left of it: it grows now. */
	more = malloc(HEAP_LARGE / 2);
	__asm__ volatile("" : : "r"(more) : "memory");
	free(more);
	heap_look();
}

void heap_rest(void)
{
	(void)malloc_trim(HEAP_SMALL);
}
