/*
 * Limits on what others make the daemon hold: bytes, descriptors, objects. A quota may have a parent, which is charged
 * too. Any thread. Whoever makes the daemon hold something is charged first and refused over the limit.
 */
#pragma once

#include "proto/c.h"
#include <stdatomic.h>

enum { QUOTA_E_NONE, QUOTA_E_FULL };

struct quota {
	_Atomic uint64_t used;
	uint64_t limit;
	struct quota *parent; /* outlives this one */
};

void quota_init(struct quota *quota, uint64_t limit, struct quota *parent);
/* Returns 0 or QUOTA_E_FULL (then nothing is charged). */
int quota_charge(struct quota *quota, uint64_t amount);
void quota_release(struct quota *quota, uint64_t amount);
uint64_t quota_used(const struct quota *quota);
