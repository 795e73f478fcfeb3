/*
 * What nodes say of operations that all ranks submit in one order: who hears what, and how often.
 */
#include "base/ordinals.h"
#include "double.h"

#define FAR _cleanup_(far_freep) struct far *far

/* Rank `node` of that node has submitted it. */
static void waits(struct far *far, const struct layout *layout, uint32_t node, uint64_t number,
		  const char *tensor, uint64_t round)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_ORDINAL,
		.job = layout->job,
		.key = round,
		.round = number,
		.node = node,
		.root = node,
		.len = (uint32_t)strlen(tensor),
	};

	far->ops->notice(far, node, &header, tensor);
}

static void differs(struct far *far, const struct layout *layout, uint32_t node, uint64_t number,
		    const char *text)
{
	far_notice(far, node, DATA_ORDINAL, layout->job, 0, number, node, EILSEQ, text);
}

/* What has come to all of three ends, since the last that has looked. */
static void expect_told(struct far *far, unsigned a, unsigned b, unsigned c)
{
	ASSERT_EQ(far->told[0].n_ordinals, a);
	ASSERT_EQ(far->told[1].n_ordinals, b);
	ASSERT_EQ(far->told[2].n_ordinals, c);
	for (unsigned i = 0; i < 3; i++)
		far->told[i].n_ordinals = 0;
}

static struct layout formed(struct far *far)
{
	struct layout layout = far_layout("job", 3, NULL);

	far_form(far, &layout);
	return layout;
}

TEST(what_came_first_is_told)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
	ASSERT_EQ(far->told[2].ordinal.round, 7);
	ASSERT_EQ(far->told[2].ordinal.key, 3);
	ASSERT_EQ(far->told[2].ordinal.root, 1);
	ASSERT_EQ(far->told[2].ordinal.status, 0);
	ASSERT_STR(far->told[2].text, "a");
	waits(far, &layout, 0, 7, "a", 3);
	waits(far, &layout, 2, 7, "a", 3);
	expect_told(far, 0, 0, 0);
	/* Who has not heard it hears it now. */
	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
	waits(far, &layout, 2, 8, "a", 4);
	expect_told(far, 1, 1, 0);
}

TEST(what_differs_is_told_to_all)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
	waits(far, &layout, 2, 7, "b", 1);
	expect_told(far, 1, 1, 1);
	for (unsigned i = 0; i < 3; i++) {
		ASSERT_EQ(far->told[i].ordinal.status, EILSEQ);
		ASSERT_EQ(far->told[i].ordinal.round, 7);
		ASSERT_STR(far->told[i].text,
			   "ranks submit in different orders: as number 7 rank 1 submitted a, "
			   "round 3, and rank 2 b, round 1");
	}
	/* Whoever asks is told, and nobody else. */
	waits(far, &layout, 0, 7, "a", 3);
	expect_told(far, 1, 0, 0);
	waits(far, &layout, 2, 7, "b", 1);
	expect_told(far, 0, 0, 1);
	ASSERT_EQ(far->told[2].ordinal.status, EILSEQ);
}

TEST(a_node_may_find_it)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	differs(far, &layout, 2, 7, "they do\x1b");
	expect_told(far, 1, 1, 0);
	ASSERT_STR(far->told[1].text, "they do?");
	differs(far, &layout, 1, 7, "so they do");
	expect_told(far, 0, 0, 0);
	waits(far, &layout, 0, 7, "a", 3);
	expect_told(far, 1, 0, 0);
	ASSERT_EQ(far->told[0].ordinal.status, EILSEQ);
	ASSERT_STR(far->told[0].text, "they do?");
}

TEST(old_ones_and_nodes_that_have_left_are_not_told)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	far_old(far, 2, true);
	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 0);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	far_old(far, 2, false);
	waits(far, &layout, 1, 8, "a", 4);
	expect_told(far, 0, 0, 1);
	/* And have no say. */
	waits(far, &layout, 0, 8, "b", 1);
	expect_told(far, 0, 0, 0);
	waits(far, &layout, 2, 8, "a", 4);
	expect_told(far, 0, 0, 0);
}

/*
 * Names that may not be shown are none; too old ordinals are not looked at; strangers are not
 * heard.
 */
TEST(what_means_nothing_is_not_told)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	waits(far, &layout, 1, 7, "a\x1b", 3);
	expect_told(far, 0, 0, 0);
	waits(far, &layout, 1, 10007, "a", 3);
	expect_told(far, 1, 0, 1);
	waits(far, &layout, 2, 10007 - ORDINALS_KEPT, "b", 3);
	differs(far, &layout, 2, 10007 - ORDINALS_KEPT, "they do");
	far_notice(far, 4, DATA_ORDINAL, layout.job, 0, 10007, 0, EILSEQ, "they do");
	expect_told(far, 0, 0, 0);
}
