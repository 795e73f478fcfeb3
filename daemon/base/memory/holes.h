/*
 * Holes: pages that are not there, in memory that others share with this process and can give back at any time. To touch one
 * would make it, and charge it to our memory cgroup: a trainer that shares 3 GiB and punches them out would have a daemon
 * that is limited to 1 GiB killed. So a hole is met like any fault: by a signal, in which the page is made, noted, and whoever
 * touches more is kept waiting until the owner has seen to whose memory that is. Kernel accesses fail with EFAULT. Broken memory is
 * no hole: it ends the process.
 *
 * By userfaultfd(2), which a sandbox may forbid: then nothing is seen. One for a process. Any thread, unless it says otherwise.
 */
#pragma once

#include "proto/c.h"
#include <sys/uio.h>

/*
 * Begins. *ret_fd stays ours: it is readable when there is something for holes_take(), by the thread that calls this, which
 * alone is never kept waiting. Returns 0; or -errno, -EBUSY when it has begun already.
 */
int holes_open(int *ret_fd);
/* Nothing that was watched is mapped any more. Harmless when not open. */
void holes_close(void);
/* Whole pages, until they are unmapped. Returns 0, also when not open; or -errno. */
int holes_watch(void *data, size_t len);
/* Up to max pages that were made since the last time; returns how many; if it is max, there may be more. The thread of holes_open(). */
size_t holes_take(void **pages, size_t max);
/* Pages that were ever made, modulo 2^32: who asks before and after an access knows whether one was. Any thread. */
uint32_t holes_made(void);
/* A kernel access to these failed with EFAULT: touches them. Returns false when not open: it was no hole. */
bool holes_fill(const struct iovec *iov, size_t n);
