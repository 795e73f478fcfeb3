/* Charges and releases along a chain of quotas, by atomic counters and no lock. */
#include "base/quota.h"

void quota_init(struct quota *quota, uint64_t limit, struct quota *parent)
{
	*quota = (struct quota){ .limit = limit, .parent = parent };
}

static bool quota_charge_one(struct quota *quota, uint64_t amount)
{
	uint64_t used = atomic_load_explicit(&quota->used, memory_order_relaxed), sum;

	do {
		if (ADD_OVERFLOW(used, amount, &sum) || sum > quota->limit)
			return false;
	} while (!atomic_compare_exchange_weak_explicit(
		&quota->used, &used, sum, memory_order_relaxed, memory_order_relaxed));
	return true;
}

static void quota_release_one(struct quota *quota, uint64_t amount)
{
	_unused_ uint64_t used;

	used = atomic_fetch_sub_explicit(&quota->used, amount, memory_order_relaxed);
	assert(used >= amount);
}

int quota_charge(struct quota *quota, uint64_t amount)
{
	struct quota *refused = quota, *q;

	while (refused && quota_charge_one(refused, amount))
		refused = refused->parent;
	if (!refused)
		return 0;

	for (q = quota; q != refused; q = q->parent)
		quota_release_one(q, amount);
	return QUOTA_E_FULL;
}

void quota_release(struct quota *quota, uint64_t amount)
{
	for (; quota && amount; quota = quota->parent)
		quota_release_one(quota, amount);
}

uint64_t quota_used(const struct quota *quota)
{
	return atomic_load_explicit(&quota->used, memory_order_relaxed);
}
