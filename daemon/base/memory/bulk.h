/*
 * Memory for what an owner may have thousands of, and comes to one after the other in each step: tensors, rounds, requests. They
 * lie together, and where they are many, in huge pages: among so many small ones to find each page takes as long as to read what
 * is there. It goes with its owner, all at once; what is used no more the owner keeps for the next. One thread.
 */
#pragma once

#include "base/quota.h"
#include <stddef.h>

/* Zero: none yet. */
struct bulk {
	struct bulk_piece *pieces; /* the newest first */
	char *next;		   /* what is free of that */
	size_t remaining;
	struct quota *quota; /* charged for what is used, some pages at a time; NULL: nobody */
	uint64_t charged, used;
};

/*
 * len bytes that are zero, from the start of a line of the cache on; or NULL, with errno ENOMEM, or EDQUOT over the quota.
 */
void *bulk_take(struct bulk *bulk, size_t len);
/* All that was taken goes; none is left, and nothing charged. The quota stays who is charged. */
void bulk_done(struct bulk *bulk);
