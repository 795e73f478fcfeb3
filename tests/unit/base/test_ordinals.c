/*
 * Operations by their ordinals: what is the same, what differs and in which words, and what is
 * known no more.
 */
#include "base/order/ordinals.h"
#include "test.h"

static int compare(struct ordinals *ordinals, uint64_t number, uint32_t rank, const char *tensor,
		   uint64_t round)
{
	const struct ordinal_operation operation = { tensor, round, rank };

	return ordinals_compare(ordinals, number, &operation, false);
}

static const char *words(const struct ordinals *ordinals, uint64_t number)
{
	const struct failure *how = ordinals_differing(ordinals, number);

	if (!how)
		return "";
	ASSERT_EQ(how->status, -EILSEQ);
	return how->text;
}

TEST(the_same_is_the_same)
{
	struct ordinals ordinals = { 0 };

	ASSERT_STR(words(&ordinals, 1), "");
	ASSERT_EQ(compare(&ordinals, 1, 3, "a", 7), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 1, 2, "a", 7), 0);
	ASSERT_EQ(compare(&ordinals, 1, 3, "a", 7), ORDINALS_E_AGAIN);
	ASSERT_EQ(compare(&ordinals, 2, 2, "b", 7), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 2, 3, "b", 7), 0);
	ASSERT_STR(words(&ordinals, 1), "");
	ASSERT_STR(words(&ordinals, 3), "");
	ASSERT_STR(words(&ordinals, 0), "");
	ordinals_done(&ordinals);
}

TEST(tensors_and_rounds_differ)
{
	struct ordinals ordinals = { 0 };

	ASSERT_EQ(compare(&ordinals, 5, 3, "a", 7), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 5, 2, "b", 7), ORDINALS_E_DIFFER);
	ASSERT_STR(words(&ordinals, 5),
		   "ranks submit in different orders: as number 5 rank 2 submitted b, round 7, and "
		   "rank 3 a, round 7");
	/* It stays so, for whoever comes. */
	ASSERT_EQ(compare(&ordinals, 5, 1, "c", 1), ORDINALS_E_KNOWN);
	ASSERT_EQ(compare(&ordinals, 5, 0, "a", 7), ORDINALS_E_KNOWN);
	ASSERT_CONTAINS(words(&ordinals, 5), "rank 2 submitted b");
	ASSERT_EQ(compare(&ordinals, 6, 0, "a", 8), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 6, 1, "a", 9), ORDINALS_E_DIFFER);
	ASSERT_STR(words(&ordinals, 6),
		   "ranks submit in different orders: as number 6 rank 0 submitted a, round 8, and "
		   "rank 1 a, round 9");
	ordinals_done(&ordinals);
}

/* Ranks that differ may be on other nodes, also where nobody here has come to it. */
TEST(others_find_that_ranks_differ)
{
	struct ordinals ordinals = { 0 };
	struct failure how;

	(void)failure_set(&how, -EILSEQ, "they do");
	ASSERT_EQ(ordinals_differ(&ordinals, 5, &how), ORDINALS_E_DIFFER);
	ASSERT_EQ(ordinals_differ(&ordinals, 5, &how), ORDINALS_E_KNOWN);
	ASSERT_EQ(compare(&ordinals, 5, 2, "b", 7), ORDINALS_E_KNOWN);
	ASSERT_EQ(compare(&ordinals, 5, 3, "b", 7), ORDINALS_E_KNOWN);
	ASSERT_STR(words(&ordinals, 5), "they do");
	ordinals_done(&ordinals);
}

TEST(names_are_copied)
{
	struct ordinals ordinals = { 0 };
	char name[] = "one";
	const struct ordinal_operation operation = { name, 1, 4 };

	ASSERT_EQ(ordinals_compare(&ordinals, 9, &operation, true), ORDINALS_E_FIRST);
	memcpy(name, "two", 3);
	ASSERT_EQ(ordinals_compare(&ordinals, 9, &operation, true), ORDINALS_E_DIFFER);
	ASSERT_CONTAINS(words(&ordinals, 9), "one");
	ASSERT_CONTAINS(words(&ordinals, 9), "two");
	ordinals_done(&ordinals);
}

/* Nobody can be compared with what is no more known, and nobody is told anything wrong of it. */
TEST(the_newest_are_known)
{
	struct ordinals ordinals = { 0 };
	struct failure how;

	(void)failure_set(&how, -EILSEQ, "they do");
	ASSERT_EQ(compare(&ordinals, 1, 0, "a", 1), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 1, 1, "b", 1), ORDINALS_E_DIFFER);
	for (uint64_t i = 2; i <= ORDINALS_KEPT; i++)
		ASSERT_EQ(compare(&ordinals, i, 0, "a", i), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 1, 1, "b", 1), ORDINALS_E_KNOWN);
	ASSERT_EQ(compare(&ordinals, ORDINALS_KEPT + 1, 0, "a", 1), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, 1, 1, "b", 1), 0);
	ASSERT_EQ(ordinals_differ(&ordinals, 1, &how), ORDINALS_E_KNOWN);
	ASSERT_STR(words(&ordinals, 1), "");
	ASSERT_EQ(compare(&ordinals, ORDINALS_KEPT + 1, 1, "a", 1), 0);
	/* The last number that there is. */
	ASSERT_EQ(compare(&ordinals, UINT64_MAX, 0, "a", 1), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, UINT64_MAX, 1, "b", 1), ORDINALS_E_DIFFER);
	ASSERT_EQ(compare(&ordinals, ORDINALS_KEPT - 1, 1, "c", 1), 0);
	ordinals_done(&ordinals);
}

TEST(what_is_kept_is_charged)
{
	const struct ordinal_operation a = { "a", 1, 1 }, b = { "b", 1, 2 };
	struct ordinals ordinals = { 0 };
	struct failure how;
	struct quota quota;
	uint64_t used;

	(void)failure_set(&how, -EILSEQ, "they do");
	quota_init(&quota, 1, NULL);
	ordinals.quota = &quota;
	ASSERT_EQ(ordinals_compare(&ordinals, 1, &a, true), -EDQUOT);
	quota.limit = UINT64_MAX;
	ASSERT_EQ(ordinals_compare(&ordinals, 1, &a, true), ORDINALS_E_FIRST);
	used = quota_used(&quota);
	ASSERT_TRUE(used > ORDINALS_KEPT * sizeof(struct ordinal));
	quota.limit = used;
	ASSERT_EQ(ordinals_compare(&ordinals, 1, &b, true), -EDQUOT);
	ASSERT_EQ(ordinals_compare(&ordinals, 2, &b, true), -EDQUOT);
	ASSERT_EQ(ordinals_differ(&ordinals, 3, &how), -EDQUOT);
	/* A newer one has the room of the older. */
	ASSERT_EQ(ordinals_compare(&ordinals, 1 + ORDINALS_KEPT, &b, true), ORDINALS_E_FIRST);
	ASSERT_EQ(quota_used(&quota), used);
	ordinals_done(&ordinals);
	ASSERT_EQ(quota_used(&quota), 0);
}

/* Names as long as they may be leave room for both operations. */
TEST(long_names_are_cut)
{
	struct ordinals ordinals = { 0 };
	char a[256], b[256];

	memset(a, 'a', 255);
	memset(b, 'b', 255);
	a[255] = b[255] = '\0';
	ASSERT_EQ(compare(&ordinals, UINT64_MAX, 16383, a, UINT64_MAX), ORDINALS_E_FIRST);
	ASSERT_EQ(compare(&ordinals, UINT64_MAX, 16382, b, UINT64_MAX), ORDINALS_E_DIFFER);
	ASSERT_CONTAINS(words(&ordinals, UINT64_MAX), "rank 16382 submitted bbb");
	ASSERT_CONTAINS(words(&ordinals, UINT64_MAX), "and rank 16383 aaa");
	ASSERT_CONTAINS(words(&ordinals, UINT64_MAX), "a, round 18446744073709551615");
	/* Less than what a failure has, by what stands before it: "tensor NAME, round N: ". */
	ASSERT_TRUE(strlen(words(&ordinals, UINT64_MAX)) + 100 < sizeof(struct failure) - 4);
	ordinals_done(&ordinals);
}
