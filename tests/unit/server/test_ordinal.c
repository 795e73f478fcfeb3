/*
 * What nodes say of operations that all ranks submit in one order, and of what their ranks are blocked in: who hears what, and how
 * often.
 */
#include "base/clock.h"
#include "base/order/ordinals.h"
#include "double.h"
#include "proto/types.h"

#define FAR  _cleanup_(far_freep) struct far *far
#define MANY 64

static uint64_t now_ns; /* 0: the real one */

int __real_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
	if (!now_ns)
		return __real_clock_gettime(clock, ret);
	*ret = (struct timespec){ (time_t)(now_ns / NSEC_PER_SEC), (long)(now_ns % NSEC_PER_SEC) };
	return 0;
}

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
		.rank = node,
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

	now_ns = 100 * NSEC_PER_SEC;
	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
	ASSERT_EQ(far->told[2].ordinal.round, 7);
	ASSERT_EQ(far->told[2].ordinal.key, 3);
	ASSERT_EQ(far->told[2].ordinal.rank, 1);
	ASSERT_EQ(far->told[2].ordinal.status, 0);
	ASSERT_STR(far->told[2].text, "a");
	waits(far, &layout, 0, 7, "a", 3);
	waits(far, &layout, 2, 7, "a", 3);
	expect_told(far, 0, 0, 0);
	waits(far, &layout, 2, 8, "a", 4);
	expect_told(far, 1, 1, 0);
	/* Who has not heard it hears it when it is said again, but not at once. */
	waits(far, &layout, 1, 7, "a", 3);
	now_ns += NSEC_PER_SEC - 1;
	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 0, 0, 0);
	now_ns++;
	waits(far, &layout, 1, 7, "a", 3);
	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
}

/* The first nodes have ends of their own, and end 0 speaks for all others, too. */
static struct layout attached(struct far *far, uint32_t quorum)
{
	struct layout layout = far_layout("job", MANY, NULL);

	layout.quorum = quorum;
	layout.job = 77;
	for (uint32_t i = 0; i < MANY; i++)
		far_expect(far, far_attach(far, i < FAR_ENDS ? i : 0, &layout, i, FAR_INSTANCE + i),
			   0, NULL);
	return layout;
}

TEST(a_peer_of_many_nodes_is_told_once)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, 0);

	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1, 0, 1);
	/* Nor is who says it told for its other nodes, but of what differs as whoever asks. */
	waits(far, &layout, 0, 8, "a", 4);
	expect_told(far, 0, 1, 1);
	waits(far, &layout, 1, 8, "b", 4);
	expect_told(far, 1, 1, 1);
}

/* Each belongs to ranks of its own. */
TEST(where_each_rank_is_a_node_each_is_told)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, MANY - 1);

	waits(far, &layout, 1, 7, "a", 3);
	expect_told(far, 1 + MANY - FAR_ENDS, 0, 1);
}

/* What one node says is told to all: so much of it that the largest job has one operation told in a second. */
TEST(no_more_is_told_in_a_second_than_there_can_be_nodes)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, 0);
	unsigned most = JOB_RANKS_MAX / MANY;

	now_ns = 100 * NSEC_PER_SEC;
	for (unsigned i = 1; i <= 4 * most; i++)
		waits(far, &layout, 1, i, "a", i);
	expect_told(far, most, 0, most);
	for (unsigned i = 1; i <= most; i++)
		differs(far, &layout, 2, i, "they do");
	expect_told(far, 0, 0, 0);
	/* What was left out is told when it is said again. */
	now_ns += NSEC_PER_SEC;
	waits(far, &layout, 1, 4 * most, "a", 4 * most);
	expect_told(far, 1, 0, 1);
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

/* -- What ranks are blocked in -------------------------------------------------------------------------------------- */

/* Rank `rank` of a node is blocked in a round of a tensor; missed: and `by` in that round of another, or NULL; status: both for ever. */
static void blocked_as(struct far *far, const struct layout *layout, uint32_t node, uint32_t rank,
		       const char *tensor, const char *missed, uint32_t by, int status)
{
	char names[DATA_BLOCKED_MAX];
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_BLOCKED,
		.job = layout->job,
		.tensor_round = 3,
		.missed_round = missed ? 5 : 0,
		.missed_by = by,
		.node = node,
		.rank = rank,
		.status = status,
	};

	header.len = data_blocked_pack(tensor, missed, names);
	far->ops->notice(far, node, &header, names);
}

static void blocked(struct far *far, const struct layout *layout, uint32_t node, uint32_t rank,
		    const char *tensor, const char *missed, uint32_t by)
{
	blocked_as(far, layout, node, rank, tensor, missed, by, 0);
}

TEST(what_a_rank_is_blocked_in_is_told_to_all)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	now_ns = 100 * NSEC_PER_SEC;
	blocked(far, &layout, 1, 1, "a", NULL, 0);
	expect_told(far, 1, 0, 1);
	ASSERT_EQ(far->told[2].ordinal.op, DATA_BLOCKED);
	ASSERT_EQ(far->told[2].ordinal.tensor_round, 3);
	ASSERT_EQ(far->told[2].ordinal.missed_round, 0);
	ASSERT_EQ(far->told[2].ordinal.rank, 1);
	ASSERT_STR(far->told[2].text, "a");
	/* What all wait in is told once in a second; and something else at once. */
	blocked(far, &layout, 2, 2, "a", NULL, 0);
	expect_told(far, 0, 0, 0);
	blocked(far, &layout, 2, 2, "b", NULL, 0);
	expect_told(far, 1, 1, 0);
	now_ns += NSEC_PER_SEC;
	blocked(far, &layout, 2, 2, "b", NULL, 0);
	expect_told(far, 1, 1, 0);
	/* To those that know what it is. */
	now_ns += NSEC_PER_SEC;
	far_old(far, 0, true);
	blocked(far, &layout, 2, 2, "b", NULL, 0);
	expect_told(far, 0, 1, 0);
}

TEST(what_a_rank_has_not_come_to_is_told_to_whom_it_keeps_waiting)
{
	FAR = far_new(NULL);
	struct layout layout = formed(far);

	blocked(far, &layout, 1, 1, "a", "b", 2);
	expect_told(far, 0, 0, 1);
	ASSERT_EQ(far->told[2].ordinal.missed_round, 5);
	ASSERT_EQ(far->told[2].ordinal.missed_by, 2);
	ASSERT_EQ(far->told[2].ordinal.rank, 1);
	ASSERT_EQ(far->told[2].ordinal.len, 3);
	/* That neither comes to what the other is blocked in is for all. */
	blocked_as(far, &layout, 1, 1, "a", "b", 2, EDEADLK);
	expect_told(far, 1, 0, 1);
	ASSERT_EQ(far->told[0].ordinal.status, EDEADLK);
	ASSERT_EQ(far->told[0].ordinal.missed_by, 2);
	/* A node speaks for its ranks alone, of ranks and names that there are. */
	blocked(far, &layout, 1, 0, "a", "b", 2);
	blocked(far, &layout, 1, 0, "a", NULL, 0);
	blocked(far, &layout, 1, 3, "a", "b", 2);
	blocked(far, &layout, 1, 1, "a", "b", 3);
	blocked(far, &layout, 1, 1, "a\x1b", "b", 2);
	blocked(far, &layout, 1, 1, "a", "b\x1b", 2);
	expect_told(far, 0, 0, 0);
}

TEST(what_ranks_are_blocked_in_is_bounded_too)
{
	FAR = far_new(NULL);
	struct layout layout = attached(far, 0);
	unsigned most = JOB_RANKS_MAX / MANY;

	now_ns = 100 * NSEC_PER_SEC;
	for (unsigned i = 0; i < 2 * most; i++)
		blocked(far, &layout, 1, 1, i % 2 ? "a" : "b", NULL, 0);
	expect_told(far, most, 0, most);
	blocked(far, &layout, 1, 1, "a", "b", 2);
	expect_told(far, 0, 0, 0);
	now_ns += NSEC_PER_SEC;
	for (unsigned i = 0; i < 2 * JOB_RANKS_MAX; i++)
		blocked(far, &layout, 1, 1, "a", "b", 2);
	expect_told(far, 0, 0, JOB_RANKS_MAX);
	blocked_as(far, &layout, 1, 1, "a", "b", 2, EDEADLK);
	expect_told(far, 0, 0, 0);
	now_ns += NSEC_PER_SEC;
	for (unsigned i = 0; i < 2 * most; i++)
		blocked_as(far, &layout, 1, 1, "a", "b", 2, EDEADLK);
	expect_told(far, most, 0, most);
}
