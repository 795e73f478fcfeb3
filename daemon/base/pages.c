/*
 * The page size, and anonymous memory that is aligned for huge pages where it is large. block.c
 * and bulk.c map their memory here.
 */
#include "base/pages.h"

#include "proto/c.h"
#include <sys/mman.h>
#include <unistd.h>

size_t page_size(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

void *pages_map(size_t len)
{
	size_t slack = len >= HUGE_PAGE ? HUGE_PAGE : 0, before;
	char *data;

	data = mmap(NULL, len + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (data == MAP_FAILED)
		return NULL;
	if (!slack)
		return data;
	before = (size_t)(align_up((uintptr_t)data, HUGE_PAGE) - (uintptr_t)data);
	if (before)
		(void)munmap(data, before);
	if (slack - before)
		(void)munmap(data + before + len, slack - before);
	(void)madvise(data + before, len, MADV_HUGEPAGE);
	return data + before;
}
