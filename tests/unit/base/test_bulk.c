/* Bulk memory: zeroed, apart, in huge pages where there is much of it, poisoned beyond its end. */
#include "base/memory/bulk.h"
#include "base/memory/poison.h"
#include "base/pages.h"
#include "test.h"
#include <unistd.h>

#define LEN 904 /* no multiple of a line */

static bool is_zero(const char *data, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (data[i])
			return false;
	return true;
}

TEST(what_is_taken_is_zero_and_apart)
{
	static const size_t lens[] = { 1, 63, 64, 65, LEN, 100000, (512 << 10) - 1, 3 << 20, LEN };
	struct bulk bulk = { 0 };
	char *taken[ARRAY_SIZE(lens)];

	for (unsigned round = 0; round < 2; round++) {
		for (size_t i = 0; i < ARRAY_SIZE(lens); i++) {
			taken[i] = bulk_take(&bulk, lens[i]);
			ASSERT_TRUE(taken[i]);
			ASSERT_EQ((uintptr_t)taken[i] % CACHE_LINE, 0);
			ASSERT_TRUE(is_zero(taken[i], lens[i]));
			memset(taken[i], (int)i + 1, lens[i]);
		}
		for (size_t i = 0; i < ARRAY_SIZE(lens); i++)
			for (size_t k = 0; k < lens[i]; k++)
				ASSERT_EQ(taken[i][k], (char)(i + 1));
		bulk_done(&bulk);
		ASSERT_TRUE(!bulk.pieces && !bulk.remaining);
	}
	bulk_done(&bulk);
}

TEST(many_lie_in_huge_pages_and_few_do_not)
{
	struct bulk bulk = { 0 };
	char *data;

	if (POISON_IS_SEEN)
		TEST_SKIP("with the address sanitizer it is from malloc()");
	if (access("/sys/kernel/mm/transparent_hugepage", F_OK))
		TEST_SKIP("this kernel has no transparent huge pages");
	data = bulk_take(&bulk, LEN);
	ASSERT_TRUE(data);
	ASSERT_TRUE(!test_is_huge(data));
	for (size_t i = 0; i < HUGE_PAGE / LEN; i++)
		data = bulk_take(&bulk, LEN);
	ASSERT_TRUE(data);
	ASSERT_TRUE(test_is_huge(data));
	bulk_done(&bulk);
}

/* What is next to it is not: the sanitizer sees who goes too far, as after malloc(). */
TEST(beyond_the_end_is_poison)
{
#if POISON_IS_SEEN
	struct bulk bulk = { 0 };
	char *before = bulk_take(&bulk, LEN), *data = bulk_take(&bulk, LEN);

	ASSERT_TRUE(before && data);
	ASSERT_TRUE(!__asan_region_is_poisoned(data, LEN));
	ASSERT_TRUE(__asan_address_is_poisoned(data + LEN));
	ASSERT_TRUE(__asan_address_is_poisoned(data - 1));
	bulk_done(&bulk);
#else
	TEST_SKIP("without the address sanitizer");
#endif
}
