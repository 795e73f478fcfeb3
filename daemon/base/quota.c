/* Charges and releases along a chain of quotas, by atomic counters and no lock. */
#include "base/quota.h"

#include <stdlib.h>

void quota_init(struct quota *quota, uint64_t limit, struct quota *parent)
{
	*quota = (struct quota){ .limit = limit, .parent = parent };
}

bool quota_claim(struct quota *quota)
{
	static _Thread_local const char here;

	if (!quota_used(quota))
		atomic_store_explicit(&quota->thread, &here, memory_order_relaxed);
	return atomic_load_explicit(&quota->thread, memory_order_relaxed) == &here;
}

static bool quota_charge_one(struct quota *quota, uint64_t amount)
{
	uint64_t used = quota_used(quota), sum;

	do {
		if (ADD_OVERFLOW(used, amount, &sum) || sum > quota->limit)
			return false;
	} while (!atomic_compare_exchange_weak(&quota->used, &used, sum));
	return true;
}

static void quota_release_one(struct quota *quota, uint64_t amount)
{
	_unused_ uint64_t used;

	used = atomic_fetch_sub(&quota->used, amount); /* before what settle() reads */
	assert(used >= amount);
}

static bool has_share(const struct quota *quota)
{
	return quota->share && quota->share < 100 && quota->parent;
}

static uint64_t share_of_available(const struct quota *quota)
{
	unsigned __int128 share = (unsigned __int128)quota_available(quota->parent) * quota->share /
				  (100 - quota->share);

	return (uint64_t)MIN(share, (unsigned __int128)UINT64_MAX);
}

uint64_t quota_available(const struct quota *quota)
{
	uint64_t used = quota_used(quota), limit = quota->limit;

	if (has_share(quota))
		limit = MIN(limit, share_of_available(quota));
	return limit > used ? limit - used : 0;
}

/* What the quota has of its parent, this amount too, against what is left there. */
static bool quota_is_fair(const struct quota *quota, uint64_t amount)
{
	uint64_t own = quota_taken(quota) + (quota->batch ? amount : 0);

	return !has_share(quota) || own <= share_of_available(quota);
}

static int parent_charge(struct quota *quota, uint64_t amount)
{
	return quota_is_fair(quota, amount) ? quota_charge(quota->parent, amount) : QUOTA_E_FULL;
}

/*
 * Of a quota with a batch: what is missing is taken of the parent, a batch or, where that is too much, no more; what is too much is
 * given back, and all where nothing is charged. Whoever changes `used` or `taken` comes here afterwards, and looks again: so in the
 * end both fit, whatever threads have done meanwhile. Returns QUOTA_E_FULL if something is missing that the parent has no room for.
 */
static int settle(struct quota *quota)
{
	uint64_t batch = quota->batch, taken, used, amount;
	int r;

	for (;;) {
		taken = atomic_load(&quota->taken);
		used = atomic_load(&quota->used);
		if (used > taken) {
			amount = align_up(used - taken, batch);
			r = parent_charge(quota, amount);
			if (r) {
				amount = used - taken;
				r = parent_charge(quota, amount);
			}
			if (!r)
				(void)atomic_fetch_add(&quota->taken, amount);
			else if (atomic_load(&quota->used) > atomic_load(&quota->taken))
				return QUOTA_E_FULL;
			continue;
		}
		if (likely(used ? taken < used + 2 * batch : !taken))
			return 0;
		amount = used ? (taken - used) / batch * batch - batch : taken;
		if (atomic_compare_exchange_strong(&quota->taken, &taken, taken - amount))
			quota_release(quota->parent, amount);
	}
}

int quota_charge_any(struct quota *quota, uint64_t amount)
{
	int r;

	if (!quota_charge_one(quota, amount))
		return QUOTA_E_FULL;
	if (!quota->parent)
		return 0;
	r = quota->batch ? settle(quota) : parent_charge(quota, amount);
	if (!r)
		return 0;
	quota_release_one(quota, amount);
	if (quota->batch)
		(void)settle(quota);
	return r;
}

void quota_release_any(struct quota *quota, uint64_t amount)
{
	struct quota *parent = quota->parent;

	quota_release_one(quota, amount);
	if (parent && quota->batch)
		(void)settle(quota);
	else
		quota_release(parent, amount);
}

struct quota *quota_leave(struct quota *quota, uint64_t amount)
{
	assert(!quota->batch);
	quota_release_one(quota, amount);
	return quota->parent;
}

void quota_done(struct quota *quota)
{
	uint64_t taken = atomic_exchange_explicit(&quota->taken, 0, memory_order_relaxed);

	assert(!quota_used(quota));
	quota_release(quota->parent, taken);
}

uint64_t quota_used(const struct quota *quota)
{
	return atomic_load_explicit(&quota->used, memory_order_relaxed);
}

uint64_t quota_taken(const struct quota *quota)
{
	return quota->batch ? atomic_load_explicit(&quota->taken, memory_order_relaxed)
			    : quota_used(quota);
}

/* -- Memory that knows who is charged for it --------------------------------------------------- */

struct held {
	struct quota *quota;
	size_t len; /* with this head */
	max_align_t data[];
};

void *held_new(struct quota *quota, size_t len)
{
	struct held *held;
	size_t whole;

	if (ADD_OVERFLOW(len, sizeof(*held), &whole)) {
		errno = ENOMEM;
		return NULL;
	}
	if (quota_charge(quota, whole)) {
		errno = EDQUOT;
		return NULL;
	}
	held = calloc(1, whole);
	if (!held) {
		quota_release(quota, whole);
		errno = ENOMEM;
		return NULL;
	}
	held->quota = quota;
	held->len = whole;
	return held->data;
}

void held_drop(void *data)
{
	struct held *held = container_of(data, struct held, data);

	quota_release(held->quota, held->len);
	free(held);
}
