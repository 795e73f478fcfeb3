/*
 * What both doubles know of a device's memory: the memfd that stands for it. After its bytes come marks, one for each page, and
 * in the last page what it is. The double of RDMA devices marks what these have written to it; as long as that has not been
 * flushed, the double of the driver copies nothing from there for whom it is not in order.
 */
#pragma once

#include "proto/c.h"
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FAKE_PAGE	  ((size_t)4096)
#define FAKE_SHARED_MAGIC UINT64_C(0x66616b6563756461) /* "fakecuda" */

/* Seen by all that map it. */
struct fake_shared {
	uint64_t magic;
	uint64_t nonce;
	uint64_t len;
	int32_t physical;
	uint32_t handle_types; /* that it may be exported as; 0: cuMemAlloc() */
	_Atomic uint32_t freed;
};

/* Of a page: it was written, and is not in order for the device itself, or for others. */
enum { FAKE_NOT_FOR_OWNER = 1, FAKE_NOT_FOR_OTHERS = 2 };
typedef _Atomic uint8_t fake_mark;

static inline size_t fake_marks_len(uint64_t len)
{
	return align_up(align_up(len, FAKE_PAGE) / FAKE_PAGE, FAKE_PAGE);
}

/* Returns 0, or -EINVAL: it is something else. */
static inline int fake_shared_read(int fd, struct fake_shared *ret_shared)
{
	struct stat status;

	if (fstat(fd, &status) || status.st_size < (off_t)(2 * FAKE_PAGE) ||
	    status.st_size % (off_t)FAKE_PAGE ||
	    pread(fd, ret_shared, sizeof(*ret_shared), status.st_size - (off_t)FAKE_PAGE) !=
		    (ssize_t)sizeof(*ret_shared) ||
	    ret_shared->magic != FAKE_SHARED_MAGIC ||
	    align_up(ret_shared->len, FAKE_PAGE) + fake_marks_len(ret_shared->len) + FAKE_PAGE !=
		    (uint64_t)status.st_size)
		return -EINVAL;
	return 0;
}

/* For who writes to it as RDMA devices do. NULL: it is something else. munmap() ends it. */
static inline fake_mark *fake_marks_map(int fd, size_t *ret_len)
{
	struct fake_shared shared;
	void *marks;

	if (fake_shared_read(fd, &shared))
		return NULL;
	*ret_len = fake_marks_len(shared.len);
	marks = mmap(NULL, *ret_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		     (off_t)align_up(shared.len, FAKE_PAGE));
	return marks == MAP_FAILED ? NULL : marks;
}

/* After it was. */
static inline void fake_marks_set(fake_mark *marks, uint64_t offset, uint64_t len)
{
	for (uint64_t i = offset / FAKE_PAGE; i <= (offset + len - 1) / FAKE_PAGE; i++)
		atomic_store(&marks[i], FAKE_NOT_FOR_OWNER | FAKE_NOT_FOR_OTHERS);
}
