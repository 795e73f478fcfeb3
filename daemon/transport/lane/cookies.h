/*
 * Cookies: the calls that wait for an answer on a lane; on an RDMA lane that takes calls, those that arrive. The thread of
 * their lane.
 */
#pragma once

#include "proto/c.h"

struct cookie_slot {
	void *user;	     /* NULL: free */
	uint32_t next_free;  /* index + 1 */
	uint32_t generation; /* of the cookie given out last; 1 to 255 */
};

struct cookies {
	struct cookie_slot *slots;
	uint32_t n_slots;
	uint32_t free; /* index + 1 of the first free slot, or 0 */
};

/* Returns 0, -ENOMEM, or -ENOBUFS when 2^24 calls are out. */
int cookies_add(struct cookies *cookies, void *user, uint32_t *ret_cookie);
/* What was added under a cookie from outside, or NULL. */
void *cookies_find(const struct cookies *cookies, uint32_t cookie);
/* Fetches what cookies_find() will look at. */
void cookies_fetch(const struct cookies *cookies, uint32_t cookie);
void cookies_remove(struct cookies *cookies, uint32_t cookie);
void cookies_done(struct cookies *cookies);
