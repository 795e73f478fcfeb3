/*
 * Gives back mappings elsewhere than in the control thread: what nobody else has any more, the kernel frees as it is
 * unmapped, which takes about a second for 8 GiB. A thread does it that is there while there is
 * something to do. Any thread.
 */
#pragma once

#include "proto/c.h"

/* Nobody uses it any more. It is unmapped at once if it is small, and soon if not. */
void unmap(void *data, size_t len);
/*
 * The same, of pages that nobody is to have any more: they are given back first (MADV_REMOVE), which waits for others who give
 * back some of the same memory. Where no thread is to be had, they stay until the memory's last owner has gone.
 */
void unmap_remove(void *data, size_t len);
