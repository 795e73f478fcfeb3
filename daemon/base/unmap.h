/*
 * Gives back mappings of memory that others share, elsewhere than in the control thread: what nobody else has any more, the
 * kernel frees as it is unmapped, which takes about a second for 8 GiB. A thread does it that is there while there is
 * something to do. Any thread.
 */
#pragma once

#include "proto/c.h"

/* Unmaps what nobody uses any more: at once if that is small, soon if not. */
void unmap(void *data, size_t len);
