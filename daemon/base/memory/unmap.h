/*
 * Gives back mappings elsewhere than in the control thread: what nobody else has any more, the kernel frees as it is
 * unmapped, which takes about a second for 8 GiB. Threads do it that are there while there is something to do: one for our
 * own memory, and one for each owner of memory that others have, too. These can hold the locks of a memfd for as long as
 * they like, and so keep waiting whoever gives back memory of it. Any thread.
 */
#pragma once

#include "base/quota.h"

/* What somebody is charged for a mapping until it is unmapped. */
struct unmap_charge {
	struct quota *quota; /* outlives that, or unmap_release_all(); NULL: nobody */
	uint64_t amount;
};
enum { UNMAP_CHARGES = 3 };
/* Releases the charges. A second call does nothing. */
void unmap_release(struct unmap_charge charges[UNMAP_CHARGES]);

/* Nobody uses it any more, and nobody else has it. It is unmapped at once if it is small, and soon if not. */
void unmap(void *data, size_t len);
/* Nobody here uses it any more. It is unmapped soon, and the charges are released then. The owner is told apart from others, and is not NULL. */
void unmap_shared(const void *owner, void *data, size_t len,
		  const struct unmap_charge charges[UNMAP_CHARGES]);
/*
 * The same, of pages that nobody is to have any more: they are given back first (MADV_REMOVE). Where no thread is to be had,
 * they stay until the memory's last owner has gone.
 */
void unmap_remove(const void *owner, void *data, size_t len,
		  const struct unmap_charge charges[UNMAP_CHARGES]);
/* At once, in one go: for addresses at which there is nothing, however many. */
void unmap_now(void *data, size_t len, struct unmap_charge charges[UNMAP_CHARGES]);
/* The quotas go: what is still to be unmapped is charged to nobody. Whoever is kept waiting, is not waited for. */
void unmap_release_all(void);
