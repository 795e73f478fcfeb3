/*
 * What nodes say of their ranks that follow the others, and of rounds that they have begun: who hears what, and how often.
 */
#include "base/map.h"
#include "double.h"
#include "proto/types.h"

#define FAR  _cleanup_(far_freep) struct far *far
#define MANY 64
/* What is before it has failed. */
#define FIRST 3ull

/* Ranks of a node that the end speaks for: how many follow, in which turn, and how many are idle in it. */
struct says {
	uint32_t node, n;
	uint64_t turn;
	uint32_t n_idle;
};

static void end_follows(struct far *far, const struct layout *layout, unsigned end,
			const struct says *says)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_FOLLOW,
		.job = layout->job,
		.node = says->node,
		.turn = says->turn,
		.n_following = says->n,
		.n_idle = says->n_idle,
	};

	far->ops->notice(far, end, &header, NULL);
}

/* In the turn. */
static void follows_in(struct far *far, const struct layout *layout, const struct says *says)
{
	end_follows(far, layout, says->node, says);
}

/* In the first. */
static void follows(struct far *far, const struct layout *layout, uint32_t node, uint32_t n,
		    uint32_t n_idle)
{
	follows_in(far, layout, &(struct says){ node, n, 1, n_idle });
}

static void end_begins(struct far *far, const struct layout *layout, unsigned end, uint32_t node,
		       const char *tensor, uint64_t round)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_BEGUN,
		.job = layout->job,
		.node = node,
		.tensor_round = round,
		.first_round = MIN(round, FIRST),
		.elements = 1000,
		.dtype = DTYPE_FLOAT16,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_AVERAGE,
		.len = (uint32_t)strlen(tensor),
	};

	far->ops->notice(far, end, &header, tensor);
}

static void begins(struct far *far, const struct layout *layout, uint32_t node, const char *tensor,
		   uint64_t round)
{
	end_begins(far, layout, node, node, tensor, round);
}

/* What comes to an end is for a node for which it speaks. */
static void expect_own(unsigned end, const struct data_header *header)
{
	ASSERT_TRUE(header->node == end || header->node >= FAR_ENDS);
}

/* What has come to all of three ends, since the last that has looked: their number, and the last of them. */
#define EXPECT_TOLD(far, n, header, a, b, c)                           \
	do {                                                           \
		const unsigned expected[] = { a, b, c };               \
                                                                       \
		for (unsigned i = 0; i < ARRAY_SIZE(expected); i++) {  \
			ASSERT_EQ((far)->told[i].n, expected[i]);      \
			if ((far)->told[i].n)                          \
				expect_own(i, &(far)->told[i].header); \
			(far)->told[i].n = 0;                          \
		}                                                      \
	} while (0)

static void expect_counts(struct far *far, unsigned a, unsigned b, unsigned c)
{
	EXPECT_TOLD(far, n_counts, counts, a, b, c);
}

static void expect_begun(struct far *far, unsigned a, unsigned b, unsigned c)
{
	EXPECT_TOLD(far, n_begun, begun, a, b, c);
}

/* That never all will follow. */
static void expect_over(struct far *far, unsigned a, unsigned b, unsigned c)
{
	EXPECT_TOLD(far, n_over, over, a, b, c);
}

/* That nobody follows yet need not be told, but may be. */
static void forget_counts(struct far *far)
{
	for (unsigned i = 0; i < FAR_ENDS; i++)
		far->told[i].n_counts = 0;
}

static void expect_nothing(struct far *far)
{
	expect_counts(far, 0, 0, 0);
	expect_begun(far, 0, 0, 0);
	expect_over(far, 0, 0, 0);
}

/* What the end has heard last of the others, as node of that number; and the last turn in which all were idle. */
static void expect_done(const struct far *far, unsigned end, uint32_t n, uint64_t done)
{
	ASSERT_EQ(far->told[end].counts.node, end);
	ASSERT_EQ(far->told[end].counts.n_following, n);
	ASSERT_EQ(far->told[end].counts.turn, done);
}

static void expect_others(const struct far *far, unsigned end, uint32_t n)
{
	expect_done(far, end, n, 0);
}

/* Three nodes of 2, 4 and 3 ranks. */
static struct layout formed(struct far *far, bool resume)
{
	struct layout layout = far_layout("job", 3, (const uint32_t[]){ 2, 4, 3 });

	layout.resume = resume;
	far_form(far, &layout);
	forget_counts(far);
	return layout;
}

TEST(how_many_follow_is_told_to_all_others_when_it_changes)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 1, 0, 0);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 1, 2, 1);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 0, 2);
	expect_others(far, 2, 2);
	ASSERT_EQ(far->told[0].counts.job, layout.job);
	ASSERT_EQ(far->told[0].counts.n_idle, 0);
	/* How many of them are idle is nobody's business, unless all are. */
	follows(far, &layout, 1, 2, 1);
	follows(far, &layout, 1, 2, 2);
	follows(far, &layout, 1, 2, 0);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 1, 3, 2);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 2, 3);
	follows(far, &layout, 1, 0, 0);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 0, 0);
	expect_others(far, 2, 0);
	expect_begun(far, 0, 0, 0);
}

TEST(each_hears_the_sum_of_the_others)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 0, 1, 0);
	follows(far, &layout, 1, 4, 2);
	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 2, 2, 2);
	expect_others(far, 0, 7);
	expect_others(far, 1, 4);
	expect_others(far, 2, 5);
	follows(far, &layout, 1, 0, 0);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 0, 3);
	expect_others(far, 1, 4);
	expect_others(far, 2, 1);
}

/* One number may stand for more ranks than there are, but not for so many that sums run over. */
TEST(no_more_ranks_follow_than_the_job_has)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 1, UINT32_MAX, 0);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 0, layout.size);
	follows(far, &layout, 1, layout.size + 1, 0);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 2, UINT32_MAX, 1);
	expect_others(far, 0, 2 * layout.size);
	follows(far, &layout, 1, 0, 0);
	follows(far, &layout, 2, 0, 0);
	expect_others(far, 0, 0);
	expect_others(far, 1, 0);
	expect_others(far, 2, 0);
}

/* -- Turns --------------------------------------------------------------------------------------------------------- */

/* All ranks of the job are idle in the turn but one of the last node. */
static void all_but_one(struct far *far, const struct layout *layout, uint64_t turn)
{
	follows_in(far, layout, &(struct says){ 0, 2, turn, 2 });
	follows_in(far, layout, &(struct says){ 1, 4, turn, 4 });
	follows_in(far, layout, &(struct says){ 2, 3, turn, 2 });
}

TEST(all_hear_of_the_turn_once_all_ranks_are_idle_in_it)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	all_but_one(far, &layout, 1);
	expect_counts(far, 2, 2, 2);
	expect_others(far, 0, 7);
	/* Who completes it hears so, too. */
	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 1, 1, 1);
	expect_done(far, 0, 7, 1);
	expect_done(far, 1, 5, 1);
	expect_done(far, 2, 6, 1);
	/* It stays so, whatever they do next. */
	follows(far, &layout, 2, 3, 2);
	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 2, 0, 0);
	expect_counts(far, 1, 1, 0);
	expect_done(far, 0, 4, 1);
	expect_done(far, 1, 2, 1);
}

TEST(who_is_idle_no_more_does_not_count)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	all_but_one(far, &layout, 1);
	follows(far, &layout, 1, 4, 3);
	forget_counts(far);
	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 1, 4, 4);
	expect_counts(far, 1, 1, 1);
	expect_done(far, 2, 6, 1);
}

/* They may not have heard that all were in the last. */
TEST(who_was_idle_in_one_turn_is_not_in_the_next)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	for (uint64_t turn = 1; turn < 4; turn++) {
		all_but_one(far, &layout, turn);
		follows_in(far, &layout, &(struct says){ 2, 3, turn, 3 });
		expect_done(far, 0, 7, turn);
		forget_counts(far);
		/* As many, of which some are of before. */
		follows_in(far, &layout, &(struct says){ 2, 3, turn + 1, 3 });
		follows_in(far, &layout, &(struct says){ 1, 4, turn + 1, 4 });
		expect_counts(far, 0, 0, 0);
		follows_in(far, &layout, &(struct says){ 0, 2, turn, 2 });
		expect_counts(far, 0, 0, 0);
		follows_in(far, &layout, &(struct says){ 0, 2, turn + 1, 1 });
		expect_counts(far, 0, 0, 0);
	}
}

/* This home has not seen them: it comes after another. */
TEST(who_is_in_a_turn_has_seen_the_end_of_the_one_before)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	/* Also one that has gone on, and does not follow. */
	follows_in(far, &layout, &(struct says){ 1, 0, 6, 0 });
	expect_counts(far, 1, 1, 1);
	expect_done(far, 0, 0, 5);
	expect_done(far, 1, 0, 5);
	/* What is said of earlier ones is old. */
	all_but_one(far, &layout, 5);
	follows_in(far, &layout, &(struct says){ 2, 3, 5, 3 });
	expect_counts(far, 2, 2, 2);
	expect_done(far, 0, 7, 5);
	follows_in(far, &layout, &(struct says){ 1, 4, 3, 4 });
	expect_counts(far, 0, 0, 0);

	all_but_one(far, &layout, 6);
	expect_counts(far, 0, 0, 0);
	follows_in(far, &layout, &(struct says){ 2, 3, 6, 3 });
	expect_counts(far, 1, 1, 1);
	expect_done(far, 2, 6, 6);
}

/* Each has said so before anybody has said that the one before was done. */
TEST(ranks_that_are_idle_in_a_turn_that_becomes_the_next_count)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows_in(far, &layout, &(struct says){ 0, 2, 7, 2 });
	follows_in(far, &layout, &(struct says){ 1, 4, 7, 4 });
	expect_done(far, 2, 6, 6);
	follows_in(far, &layout, &(struct says){ 2, 3, 6, 3 });
	expect_done(far, 1, 5, 6);
	follows_in(far, &layout, &(struct says){ 2, 3, 7, 3 });
	expect_done(far, 1, 5, 7);
}

TEST(a_node_that_attaches_again_is_idle_no_more)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	all_but_one(far, &layout, 1);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	forget_counts(far);
	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 0, 0, 0);
	follows(far, &layout, 1, 4, 4);
	expect_counts(far, 1, 1, 1);
	expect_done(far, 0, 7, 1);
	/* Once something was done it hears of that, also when nobody follows. */
	for (uint32_t i = 0; i < 3; i++)
		follows(far, &layout, i, 0, 0);
	forget_counts(far);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_counts(far, 0, 1, 0);
	expect_done(far, 1, 0, 1);
}

/* -- What they begin ----------------------------------------------------------------------------------------------- */

TEST(what_a_node_begins_is_told_to_nodes_with_ranks_that_follow)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);
	const struct data_header *begun = &far->told[2].begun;

	follows(far, &layout, 2, 1, 0);
	expect_counts(far, 1, 1, 0);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 1);
	ASSERT_EQ(begun->job, layout.job);
	ASSERT_EQ(begun->node, 2);
	ASSERT_EQ(begun->tensor_round, 7);
	ASSERT_EQ(begun->first_round, FIRST);
	ASSERT_EQ(begun->elements, 1000);
	ASSERT_EQ(begun->dtype, DTYPE_FLOAT16);
	ASSERT_EQ(begun->operation, OPERATION_PUSH_PULL);
	ASSERT_EQ(begun->reduction, REDUCTION_AVERAGE);
	ASSERT_STR(far->told[2].begun_name, "layer.0");
	/* Whoever says it does not hear it, though ranks there follow. */
	follows(far, &layout, 0, 2, 2);
	expect_counts(far, 0, 1, 1);
	begins(far, &layout, 0, "b", 1);
	expect_begun(far, 0, 0, 1);
	begins(far, &layout, 2, "b", 2);
	expect_begun(far, 1, 0, 0);
	begins(far, &layout, 1, "c", 9);
	expect_begun(far, 1, 0, 1);
	ASSERT_EQ(far->told[0].begun.node, 0);
	ASSERT_STR(far->told[0].begun_name, "c");
	/* Nor do those of a node that does not follow any more. */
	follows(far, &layout, 2, 0, 0);
	expect_counts(far, 1, 1, 0);
	begins(far, &layout, 1, "c", 10);
	expect_begun(far, 1, 0, 0);
	expect_counts(far, 0, 0, 0);
}

/* Another tensor, whose rounds have not the place of the first's in the table of those that were told: that depends on the process. */
static void name_apart(char other[16])
{
	uint64_t place;
	unsigned i = 0;

	do {
		(void)snprintf(other, 16, "layer.%u", ++i);
		place = (map_hash_string("layer.0") ^ map_hash_string(other)) % 1024;
	} while (place == 0 || place == (7 ^ 8));
}

TEST(a_round_that_several_nodes_have_begun_is_told_once)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);
	char other[16];

	name_apart(other);

	follows(far, &layout, 2, 1, 0);
	for (unsigned again = 0; again < 3; again++) {
		begins(far, &layout, 0, "layer.0", 7);
		begins(far, &layout, 1, "layer.0", 7);
	}
	expect_begun(far, 0, 0, 1);
	/* Another round, another tensor. */
	begins(far, &layout, 1, "layer.0", 8);
	begins(far, &layout, 1, other, 7);
	expect_begun(far, 0, 0, 2);
	begins(far, &layout, 0, other, 7);
	begins(far, &layout, 0, "layer.0", 8);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 0);
}

TEST(who_comes_to_follow_hears_what_was_told_before)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 2, 1, 0);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 1);
	/* One more rank of the same node; but not one that is idle, or fewer. */
	follows(far, &layout, 2, 2, 0);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 1);
	follows(far, &layout, 2, 2, 2);
	follows(far, &layout, 2, 1, 1);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 0);
	follows(far, &layout, 1, 1, 0);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 1, 1);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 0, 0);
	/* The next process of a node, too. */
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	follows(far, &layout, 1, 1, 0);
	begins(far, &layout, 0, "layer.0", 7);
	expect_begun(far, 0, 1, 1);
}

/* More than are kept in mind, of which none is forgotten where it is the last. */
TEST(none_of_many_rounds_is_missed)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 2, 1, 0);
	for (uint64_t round = FIRST; round < 5000; round++) {
		begins(far, &layout, 0, "layer.0", round);
		begins(far, &layout, 1, "layer.0", round);
		expect_begun(far, 0, 0, 1);
		ASSERT_EQ(far->told[2].begun.tensor_round, round);
	}
	/* Better twice than never. */
	begins(far, &layout, 1, "layer.0", FIRST);
	expect_begun(far, 0, 0, 1);
}

/* It has heard otherwise from the home before this one. */
TEST(who_tells_in_vain_hears_that_nobody_follows)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	begins(far, &layout, 1, "a", 1);
	begins(far, &layout, 1, "a", 1);
	expect_counts(far, 0, 2, 0);
	expect_others(far, 1, 0);
	/* Its own ranks are not the others. */
	follows(far, &layout, 1, 3, 1);
	expect_counts(far, 1, 0, 1);
	begins(far, &layout, 1, "a", 2);
	expect_counts(far, 0, 1, 0);
	expect_others(far, 1, 0);
	expect_begun(far, 0, 0, 0);
}

TEST(a_node_that_attaches_again_says_anew_who_follows)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 1, 4, 2);
	follows(far, &layout, 2, 1, 1);
	expect_counts(far, 2, 1, 1);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_counts(far, 1, 1, 1);
	expect_others(far, 0, 1);
	expect_others(far, 1, 1);
	expect_others(far, 2, 0);
	begins(far, &layout, 0, "a", 1);
	expect_begun(far, 0, 0, 1);
	/* It has none by now, and the others have heard so. */
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_counts(far, 0, 1, 0);
	follows(far, &layout, 1, 2, 0);
	expect_counts(far, 1, 0, 1);
	expect_others(far, 0, 3);
	expect_others(far, 2, 2);
}

TEST(who_attaches_hears_of_the_others_where_another_home_may_have_told_it)
{
	for (unsigned resume = 0; resume < 2; resume++) {
		FAR = far_new(NULL);
		struct layout layout = far_layout("job", 3, (const uint32_t[]){ 2, 4, 3 });

		layout.resume = resume;
		far_form(far, &layout);
		forget_counts(far);
		far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
		expect_counts(far, 0, resume, 0);
		ASSERT_EQ(far->told[1].counts.n_following, 0);
	}
}

TEST(the_next_process_of_a_node_says_anew_who_follows)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, true);

	follows(far, &layout, 1, 4, 2);
	follows(far, &layout, 2, 1, 1);
	expect_counts(far, 2, 1, 1);
	far_lose(far, 1);
	expect_nothing(far);
	/* Who is not there is not told. */
	follows(far, &layout, 2, 2, 1);
	begins(far, &layout, 0, "a", 1);
	expect_counts(far, 1, 0, 0);
	expect_begun(far, 0, 0, 1);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_counts(far, 1, 1, 1);
	expect_others(far, 0, 2);
	expect_others(far, 1, 2);
	expect_others(far, 2, 0);
}

/* It has not heard that they do not any more, and would take the last that it has heard for true. */
TEST(who_was_away_hears_that_the_others_follow_no_more)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, true);

	follows(far, &layout, 2, 3, 3);
	expect_counts(far, 1, 1, 0);
	expect_others(far, 1, 3);
	far_lose(far, 1);
	follows(far, &layout, 2, 0, 0);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	ASSERT_EQ(far->told[1].n_counts, 1);
	expect_others(far, 1, 0);
}

TEST(old_ones_and_nodes_that_have_left_are_not_told)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	far_old(far, 2, true);
	follows(far, &layout, 1, 2, 1);
	expect_counts(far, 1, 0, 0);
	/* Nor in vain, nor when they attach, nor what others begin, whatever they say of their ranks. */
	follows(far, &layout, 2, 1, 0);
	begins(far, &layout, 0, "a", 1);
	expect_counts(far, 1, 1, 0);
	expect_begun(far, 0, 1, 0);
	follows(far, &layout, 1, 0, 0);
	begins(far, &layout, 2, "a", 1);
	far_expect(far, far_attach(far, 2, &layout, 2, FAR_INSTANCE + 2), 0, NULL);
	ASSERT_EQ(far->told[2].n_counts, 0);
	ASSERT_EQ(far->told[2].n_begun, 0);
	far_old(far, 2, false);
	forget_counts(far);
	expect_begun(far, 0, 0, 0);
	follows(far, &layout, 0, 1, 1);
	expect_counts(far, 0, 1, 1);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	expect_nothing(far);
	follows(far, &layout, 1, 2, 1);
	expect_counts(far, 0, 0, 1);
	expect_over(far, 0, 1, 0);
	begins(far, &layout, 2, "a", 2);
	expect_begun(far, 0, 1, 0);
	/* And have no say. */
	follows(far, &layout, 0, 2, 2);
	begins(far, &layout, 0, "b", 1);
	expect_nothing(far);
}

TEST(who_follows_hears_that_a_node_has_left)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);
	const struct data_header *over = &far->told[2].over;

	follows(far, &layout, 2, 1, 0);
	forget_counts(far);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	expect_over(far, 0, 0, 1);
	ASSERT_EQ(over->job, layout.job);
	ASSERT_EQ(over->node, 2);
	ASSERT_EQ(over->status, EPIPE);
	ASSERT_STR(far->told[2].over_text, "job job: ranks 0, 1 have left the job");
	/* Later as often as it says so, and who says so; but not who does not follow. */
	follows(far, &layout, 2, 1, 1);
	expect_over(far, 0, 0, 1);
	follows(far, &layout, 2, 0, 0);
	follows_in(far, &layout, &(struct says){ 1, 0, 1, 0 });
	expect_over(far, 0, 0, 0);
	follows(far, &layout, 1, 2, 0);
	expect_over(far, 0, 1, 0);
	ASSERT_EQ(far->told[1].over.node, 1);
	ASSERT_STR(far->told[1].over_text, "job job: ranks 0, 1 have left the job");
	/* The first is what is said, also when another leaves. */
	far_notice(far, 2, DATA_LEAVE, layout.job, 2, 0, 0, 0, NULL);
	expect_over(far, 0, 0, 0);
	follows(far, &layout, 1, 1, 0);
	expect_over(far, 0, 1, 0);
	ASSERT_STR(far->told[1].over_text, "job job: ranks 0, 1 have left the job");
}

TEST(who_follows_hears_that_a_rank_has_left_whose_node_stays)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	follows(far, &layout, 2, 1, 0);
	far_notice(far, 0, DATA_FOLLOW, layout.job, 0, 0, 0, EPIPE, "rank 1 has left job job");
	expect_over(far, 0, 0, 1);
	ASSERT_EQ(far->told[2].over.status, EPIPE);
	ASSERT_STR(far->told[2].over_text, "rank 1 has left job job");
	follows(far, &layout, 1, 1, 0);
	expect_over(far, 0, 1, 0);
	ASSERT_STR(far->told[1].over_text, "rank 1 has left job job");
}

static void forget(struct far *far, const struct layout *layout, uint32_t node, uint64_t key)
{
	struct data_header h = far_push(layout, key, 7, node);

	h.op = DATA_FORGET;
	h.epoch = far_epoch(layout);
	h.dtype = h.operation = h.reduction = 0;
	(void)far_call(far, node, &h, NULL);
}

TEST(rounds_of_a_name_that_was_forgotten_are_told_anew)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, true);
	uint64_t key = far_tensor(far, &layout, "layer.0", DTYPE_FLOAT32, 5, NULL);

	follows(far, &layout, 2, 1, 0);
	begins(far, &layout, 0, "layer.0", 1);
	begins(far, &layout, 1, "layer.0", 1);
	expect_begun(far, 0, 0, 1);
	for (uint32_t node = 0; node < 3; node++)
		forget(far, &layout, node, key);
	begins(far, &layout, 0, "layer.0", 1);
	begins(far, &layout, 1, "layer.0", 1);
	expect_begun(far, 0, 0, 1);
}

TEST(nobody_who_does_not_follow_hears_that_a_node_has_left)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	expect_over(far, 0, 0, 0);
	follows(far, &layout, 1, 1, 0);
	expect_over(far, 0, 1, 0);
	far_old(far, 1, true);
	follows(far, &layout, 1, 1, 0);
	far_notice(far, 2, DATA_LEAVE, layout.job, 2, 0, 0, 0, NULL);
	expect_over(far, 0, 0, 0);
}

/* Names that may not be shown are none; strangers are not heard. */
TEST(what_means_nothing_is_not_told)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	begins(far, &layout, 1, "a\x1b", 1);
	follows(far, &layout, 4, 1, 1);
	expect_nothing(far);
	follows(far, &layout, 2, 1, 0);
	expect_counts(far, 1, 1, 0);
	begins(far, &layout, 1, "a\x1b", 1);
	begins(far, &layout, 1, "\xff", 1);
	begins(far, &layout, 4, "a", 1);
	expect_nothing(far);
	ASSERT_EQ(far->told[4].n_counts, 0);
}

TEST(who_finds_no_memory_to_be_told_is_dropped)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far, false);

	far_no_memory(far, 2);
	follows(far, &layout, 1, 1, 0);
	expect_counts(far, 1, 0, 0);
	ASSERT_TRUE(far_killed(far, 2) && !far_killed(far, 0));
	far_no_memory(far, 1);
	begins(far, &layout, 0, "a", 1);
	expect_begun(far, 0, 0, 0);
	ASSERT_TRUE(far_killed(far, 1) && !far_killed(far, 0));
}

/* The first nodes have ends of their own, and end 0 speaks for all others, too. */
static struct layout attached(struct far *far, bool home)
{
	struct layout layout = far_layout("job", MANY, NULL);

	layout.resume = true;
	layout.elsewhere = !home;
	layout.job = 77;
	layout.joined_part_bytes = 65536;
	for (uint32_t i = 0; i < MANY; i++)
		far_expect(far, far_attach(far, i < FAR_ENDS ? i : 0, &layout, i, FAR_INSTANCE + i),
			   0, NULL);
	if (home)
		forget_counts(far);
	return layout;
}

TEST(a_peer_of_many_nodes_is_told_once)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, true);

	follows(far, &layout, 1, 1, 0);
	expect_counts(far, 1, 0, 1);
	/* Nor is who says it told for its other nodes. */
	end_follows(far, &layout, 0, &(struct says){ MANY - 1, 1, 1, 1 });
	expect_counts(far, 0, 1, 1);
	expect_others(far, 1, 1);
	expect_others(far, 2, 2);
	for (uint32_t i = FAR_ENDS; i < MANY - 1; i++)
		end_follows(far, &layout, 0, &(struct says){ i, 1, 1, 1 });
	expect_counts(far, 0, MANY - 1 - FAR_ENDS, MANY - 1 - FAR_ENDS);
	expect_others(far, 1, MANY - FAR_ENDS);

	begins(far, &layout, 2, "a", 1);
	expect_begun(far, 1, 1, 0);
	ASSERT_EQ(far->told[0].begun.node, FAR_ENDS);
	end_begins(far, &layout, 0, MANY - 1, "b", 1);
	expect_begun(far, 0, 1, 0);
	begins(far, &layout, 0, "c", 1);
	expect_begun(far, 0, 1, 0);
	expect_counts(far, 0, 0, 0);
}

TEST(a_server_that_is_not_the_home_tells_nobody)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, false);

	follows(far, &layout, 1, 1, 0);
	follows(far, &layout, 2, 1, 1);
	begins(far, &layout, 0, "a", 1);
	begins(far, &layout, 1, "a", 1);
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	expect_nothing(far);
}
