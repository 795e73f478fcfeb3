/* Quotas at their limit, with parents, and charged by several threads at once. */
#include "base/quota.h"
#include "test.h"
#include <pthread.h>

TEST(charge_up_to_the_limit)
{
	struct quota quota;

	quota_init(&quota, 100, NULL);
	ASSERT_OK(quota_charge(&quota, 60));
	ASSERT_EQ(quota_charge(&quota, 41), QUOTA_E_FULL);
	ASSERT_EQ(quota_used(&quota), 60);
	ASSERT_OK(quota_charge(&quota, 40));
	ASSERT_OK(quota_charge(&quota, 0));
	ASSERT_EQ(quota_charge(&quota, 1), QUOTA_E_FULL);
	quota_release(&quota, 100);
	ASSERT_EQ(quota_used(&quota), 0);
}

TEST(sum_does_not_wrap)
{
	struct quota quota;

	quota_init(&quota, UINT64_MAX, NULL);
	ASSERT_OK(quota_charge(&quota, UINT64_MAX - 1));
	ASSERT_EQ(quota_charge(&quota, 2), QUOTA_E_FULL);
	ASSERT_EQ(quota_charge(&quota, UINT64_MAX), QUOTA_E_FULL);
	ASSERT_TRUE(quota_used(&quota) == UINT64_MAX - 1);
}

TEST(refusal_above_charges_nobody)
{
	struct quota top, middle, bottom;

	quota_init(&top, 10, NULL);
	quota_init(&middle, 100, &top);
	quota_init(&bottom, 100, &middle);
	ASSERT_OK(quota_charge(&bottom, 7));
	ASSERT_EQ(quota_charge(&bottom, 4), QUOTA_E_FULL);
	ASSERT_EQ(quota_used(&bottom), 7);
	ASSERT_EQ(quota_used(&middle), 7);
	ASSERT_EQ(quota_used(&top), 7);
	ASSERT_OK(quota_charge(&middle, 3));
	quota_release(&bottom, 7);
	ASSERT_EQ(quota_used(&bottom), 0);
	ASSERT_EQ(quota_used(&middle), 3);
	ASSERT_EQ(quota_used(&top), 3);
}

/* Beside one that many threads may charge: nothing is counted otherwise, of itself and of its parent. */
static void compare_quotas(uint64_t limit_above)
{
	enum { LIMIT = 5000, BATCH = 256, N = 20000 };
	struct quota tops[2], quotas[2];
	uint64_t held[8] = { 0 }, n_full = 0;
	unsigned random = 1;

	for (unsigned i = 0; i < 2; i++) {
		quota_init(&tops[i], limit_above, NULL);
		quota_init(&quotas[i], LIMIT, &tops[i]);
		quotas[i].batch = BATCH;
	}
	quotas[1].one_thread = true;
	for (unsigned n = 0; n < N; n++) {
		uint64_t *had, amount;
		int r[2] = { 0, 0 };

		random = random * 1103515245 + 12345;
		had = &held[random >> 8 & 7];
		amount = *had ?: random >> 16 & 2047;
		for (unsigned i = 0; i < 2; i++) {
			if (*had)
				quota_release(&quotas[i], amount);
			else
				r[i] = quota_charge(&quotas[i], amount);
		}
		ASSERT_EQ(r[0], r[1]);
		n_full += !!r[0];
		*had = *had || r[0] ? 0 : amount;
		ASSERT_EQ(quota_used(&quotas[0]), quota_used(&quotas[1]));
		ASSERT_EQ(quota_taken(&quotas[0]), quota_taken(&quotas[1]));
		ASSERT_EQ(quota_used(&tops[0]), quota_used(&tops[1]));
	}
	ASSERT_TRUE(n_full > 100 && n_full < N / 2);
	for (unsigned k = 0; k < 8; k++)
		quota_release(&quotas[1], held[k]);
	ASSERT_EQ(quota_used(&quotas[1]), 0);
	ASSERT_EQ(quota_used(&tops[1]), 0);
}

TEST(the_quota_of_one_thread_counts_as_any)
{
	compare_quotas(4000);
	compare_quotas(6000);
}

static void *charge_and_release(void *arg)
{
	struct quota *quota = arg;

	for (unsigned i = 0; i < 20000; i++) {
		if (quota_charge(quota, 3))
			continue;
		if (quota_used(quota) > 8)
			return quota;
		quota_release(quota, 3);
	}
	return NULL;
}

TEST(threads_never_exceed_the_limit)
{
	pthread_t threads[4];
	struct quota quota;
	void *exceeded;

	quota_init(&quota, 8, NULL);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, charge_and_release, &quota));
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
		ASSERT_OK(pthread_join(threads[i], &exceeded));
		ASSERT_TRUE(!exceeded);
	}
	ASSERT_EQ(quota_used(&quota), 0);
}
