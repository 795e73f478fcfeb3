/*
 * The numbers by which a lane knows its unanswered calls: a table of slots with a free list.
 * send.c adds a call, receive.c finds and removes it; rdma/receive.c does so with calls whose
 * payload is to come. Worker's thread.
 */
#include "transport/lane/cookies.h"
#include "base/error.h"

/*
 * A cookie is the slot's index and, above it, a generation that is never 0: so no cookie is 0, and
 * one that was used up is not taken for its successor in the slot until 255 calls later.
 */
#define COOKIE_INDEX_BITS     24
#define COOKIE_INDEX_MASK     ((1u << COOKIE_INDEX_BITS) - 1)
#define COOKIE_GENERATION_MAX 255

static int cookies_grow(struct cookies *cookies)
{
	uint32_t n = cookies->n_slots ? 2 * cookies->n_slots : 16;
	struct cookie_slot *slots;

	if (n > COOKIE_INDEX_MASK + 1)
		return error_origin(-ENOBUFS);
	slots = reallocarray(cookies->slots, n, sizeof(*slots));
	if (!slots)
		return error_origin(-ENOMEM);
	for (uint32_t i = cookies->n_slots; i < n; i++)
		slots[i] = (struct cookie_slot){ .next_free = i + 1 < n ? i + 2 : 0 };
	cookies->free = cookies->n_slots + 1;
	cookies->slots = slots;
	cookies->n_slots = n;
	return 0;
}

int cookies_add(struct cookies *cookies, void *user, uint32_t *ret_cookie)
{
	struct cookie_slot *slot;
	int r;

	if (!cookies->free) {
		r = cookies_grow(cookies);
		if (r)
			return error_trace(r);
	}
	slot = &cookies->slots[cookies->free - 1];
	slot->generation = slot->generation % COOKIE_GENERATION_MAX + 1;
	*ret_cookie = slot->generation << COOKIE_INDEX_BITS | (cookies->free - 1);
	slot->user = user;
	cookies->free = slot->next_free;
	if (cookies->free)
		__builtin_prefetch(&cookies->slots[cookies->free - 1], 1);
	return 0;
}

void *cookies_find(const struct cookies *cookies, uint32_t cookie)
{
	uint32_t index = cookie & COOKIE_INDEX_MASK;

	if (index >= cookies->n_slots ||
	    cookies->slots[index].generation != cookie >> COOKIE_INDEX_BITS)
		return NULL;
	return cookies->slots[index].user;
}

void cookies_fetch(const struct cookies *cookies, uint32_t cookie)
{
	uint32_t index = cookie & COOKIE_INDEX_MASK;

	if (index < cookies->n_slots)
		__builtin_prefetch(&cookies->slots[index], 1);
}

void cookies_remove(struct cookies *cookies, uint32_t cookie)
{
	uint32_t index = cookie & COOKIE_INDEX_MASK;

	assert(cookies_find(cookies, cookie));
	cookies->slots[index].user = NULL;
	cookies->slots[index].next_free = cookies->free;
	cookies->free = index + 1;
}

void cookies_done(struct cookies *cookies)
{
	free(cookies->slots);
	*cookies = (struct cookies){ 0 };
}
