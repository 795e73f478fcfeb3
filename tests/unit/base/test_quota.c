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
