/* Ranks as text. */
#include "server/common/ranks.h"
#include "test.h"

static struct ranks_text of(const uint32_t *list, size_t n)
{
	struct ranks_text ranks;

	ranks_init(&ranks);
	for (size_t i = 0; i < n; i++)
		ranks_add(&ranks, list[i]);
	return ranks;
}

#define ASSERT_RANKS(text, ...)                                          \
	do {                                                             \
		const uint32_t list_[] = { __VA_ARGS__ };                \
		struct ranks_text ranks_ = of(list_, ARRAY_SIZE(list_)); \
		ASSERT_STR(ranks_end(&ranks_), text);                    \
	} while (0)

TEST(runs_are_compact)
{
	ASSERT_RANKS("rank 0", 0);
	ASSERT_RANKS("rank 16383", 16383);
	ASSERT_RANKS("ranks 2, 3", 2, 3);
	ASSERT_RANKS("ranks 4-7, 12", 4, 5, 6, 7, 12);
	ASSERT_RANKS("ranks 0, 2, 4", 0, 2, 4);
	ASSERT_RANKS("ranks 0-2, 4, 5, 9-11", 0, 1, 2, 4, 5, 9, 10, 11);
}

TEST(no_rank_at_all)
{
	struct ranks_text ranks = of(NULL, 0);

	ASSERT_STR(ranks_end(&ranks), "no rank");
}

TEST(verbs)
{
	struct ranks_text one = of((const uint32_t[]){ 3 }, 1);
	struct ranks_text two = of((const uint32_t[]){ 3, 9 }, 2);

	ASSERT_STR(ranks_have(&one), "has");
	ASSERT_STR(ranks_have(&two), "have");
}

TEST(long_lists_are_cut)
{
	struct ranks_text ranks;
	const char *text;

	ranks_init(&ranks);
	for (uint32_t i = 0; i < 5000; i++)
		ranks_add(&ranks, 2 * i);
	text = ranks_end(&ranks);
	ASSERT_TRUE(strlen(text) < sizeof(ranks.text));
	ASSERT_TRUE(!strncmp(text, "ranks 0, 2, 4, ", 15));
	ASSERT_STR(text + strlen(text) - 5, ", ...");
}
