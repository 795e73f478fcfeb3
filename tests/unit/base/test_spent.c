/* Lists of blocks that go step by step. */
#include "base/memory/spent.h"
#include "test.h"

#define CHARGED 1000000
#define LEN	256

struct owner {
	struct loop *loop;
	struct block_cache *blocks;
	struct quota quota;
	struct spending spending;
	unsigned n_begun, n_over;
};

static void on_begun(struct spending *spending)
{
	container_of(spending, struct owner, spending)->n_begun++;
}

static void on_over(struct spending *spending)
{
	container_of(spending, struct owner, spending)->n_over++;
}

static void owner_init(struct owner *owner)
{
	*owner = (struct owner){ 0 };
	ASSERT_OK(loop_new(&owner->loop));
	ASSERT_OK(block_cache_new(1 << 20, &owner->blocks));
	quota_init(&owner->quota, UINT64_MAX, NULL);
	owner->spending.quota = &owner->quota;
	owner->spending.begun = on_begun;
	owner->spending.over = on_over;
	spending_init(&owner->spending, owner->loop);
}

static void owner_done(struct owner *owner)
{
	spending_done(&owner->spending);
	ASSERT_EQ(block_cache_used(owner->blocks), 0);
	ASSERT_EQ(quota_used(&owner->quota), 0);
	owner->blocks = block_cache_free(owner->blocks);
	owner->loop = loop_free(owner->loop);
}

/* Each third block is not there. */
static void spend_some(struct owner *owner, uint64_t n, size_t len, int64_t *left)
{
	struct spent_list list = { calloc(n, sizeof(struct block *)), malloc(n), n };

	ASSERT_TRUE(list.blocks && list.beside);
	for (uint64_t i = 0; i < n; i++)
		if (i % 3)
			ASSERT_OK(block_new(owner->blocks, len, NULL, &list.blocks[i]));
	ASSERT_OK(quota_charge(&owner->quota, CHARGED));
	spend(&owner->spending, &list, CHARGED, left);
}

/* As the loop has them. Returns how many, the last of which returned that there is no more. */
static unsigned steps(struct owner *owner, uint64_t most)
{
	uint64_t before = block_cache_used(owner->blocks), charged = quota_used(&owner->quota);
	unsigned n = 1;

	loop_abort(&owner->spending.chore);
	for (; owner->spending.chore.step(&owner->spending.chore); n++) {
		ASSERT_INT(before - block_cache_used(owner->blocks), <=, most);
		ASSERT_TRUE(spending_is_under_way(&owner->spending));
		ASSERT_EQ(owner->n_over, 0);
		ASSERT_INT(quota_used(&owner->quota), >, 0);
		ASSERT_INT(quota_used(&owner->quota), <, charged);
		charged = quota_used(&owner->quota);
		before = block_cache_used(owner->blocks);
	}
	ASSERT_EQ(owner->n_over, 1);
	ASSERT_TRUE(!spending_is_under_way(&owner->spending));
	ASSERT_EQ(block_cache_used(owner->blocks), 0);
	return n;
}

TEST(few_go_at_once)
{
	struct owner owner;
	int64_t left = SPENT_STEP;

	owner_init(&owner);
	spend_some(&owner, SPENT_STEP / 2, LEN, &left);
	ASSERT_EQ(left, SPENT_STEP / 2);
	spend_some(&owner, SPENT_STEP / 2, LEN, &left);
	ASSERT_EQ(left, 0);
	spend(&owner.spending, &(struct spent_list){ .n = 5 }, 0, &left);
	ASSERT_EQ(block_cache_used(owner.blocks), 0);
	ASSERT_EQ(quota_used(&owner.quota), 0);
	ASSERT_EQ(owner.n_begun, 0);
	owner_done(&owner);
}

TEST(many_go_in_steps)
{
	struct owner owner;

	owner_init(&owner);
	spend_some(&owner, 10 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
	spend_some(&owner, 10 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
	ASSERT_EQ(owner.n_begun, 1);
	ASSERT_EQ(quota_used(&owner.quota), 2 * CHARGED);
	ASSERT_INT(block_cache_used(owner.blocks), >=, 18 * SPENT_STEP * LEN / 3 * 2 - 200);
	ASSERT_INT(steps(&owner, (uint64_t)SPENT_STEP * LEN), >=, 18);
	owner_done(&owner);
}

/* Lists that come together share what goes at once. */
TEST(many_lists_go_in_steps)
{
	struct owner owner;
	int64_t left = SPENT_STEP;

	owner_init(&owner);
	for (unsigned i = 0; i < 100; i++)
		spend_some(&owner, SPENT_STEP, LEN, &left);
	ASSERT_EQ(owner.n_begun, 1);
	ASSERT_EQ(quota_used(&owner.quota), 99 * CHARGED);
	ASSERT_INT(steps(&owner, (uint64_t)SPENT_STEP * LEN), >=, 99);
	ASSERT_EQ(quota_used(&owner.quota), 0);
	owner_done(&owner);
}

/* What is long takes longer. */
TEST(few_of_many_bytes_go_in_steps)
{
	struct owner owner;

	owner_init(&owner);
	spend_some(&owner, 240, 1 << 20, &(int64_t){ SPENT_STEP });
	ASSERT_EQ(owner.n_begun, 1);
	ASSERT_INT(block_cache_used(owner.blocks), >=, 96 << 20);
	ASSERT_INT(steps(&owner, 16 << 20), >=, 8);
	owner_done(&owner);
}

/* Where room is needed: the owner hears at the step that there is no more, and may bring others before. */
TEST(some_go_sooner)
{
	struct owner owner;
	uint64_t used;

	owner_init(&owner);
	spend_some(&owner, 8 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
	used = block_cache_used(owner.blocks);
	owner.quota.limit = CHARGED;
	for (unsigned i = 0; i < 2; i++) {
		spending_make_room(&owner.spending, CHARGED / 5);
		ASSERT_INT(used - block_cache_used(owner.blocks), >, SPENT_STEP * LEN);
		ASSERT_INT(used - block_cache_used(owner.blocks), <=, 2 * SPENT_STEP * LEN);
		ASSERT_INT(quota_used(&owner.quota), <=, CHARGED - CHARGED / 5);
	}
	/* More than there ever is. */
	spending_make_room(&owner.spending, 2 * CHARGED);
	ASSERT_EQ(quota_used(&owner.quota), 0);
	ASSERT_EQ(owner.n_over, 0);
	spend_some(&owner, 3 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
	ASSERT_EQ(owner.n_begun, 1);
	ASSERT_INT(steps(&owner, (uint64_t)SPENT_STEP * LEN), >=, 2);
	owner_done(&owner);
}

/* However long they are: each is more than a step. */
TEST(no_more_goes_sooner_than_there_is_time_for)
{
	enum { LONG = 2 * SPENT_STEP * (64 << 10), N = SPENT_HURRY };
	struct owner owner;
	uint64_t used;

	owner_init(&owner);
	spend_some(&owner, N * 3 / 2, LONG, &(int64_t){ 0 });
	used = block_cache_used(owner.blocks);
	ASSERT_EQ(used, (uint64_t)N * LONG);
	owner.quota.limit = CHARGED;
	spending_make_room(&owner.spending, CHARGED);
	ASSERT_INT(used - block_cache_used(owner.blocks), <=, (uint64_t)(N / 2 + 1) * LONG);
	ASSERT_INT(used - block_cache_used(owner.blocks), >=, (uint64_t)(N / 2 - 1) * LONG);
	owner_done(&owner);
}

TEST(a_loop_takes_the_steps_and_all_begins_anew)
{
	struct owner owner;

	owner_init(&owner);
	for (unsigned i = 1; i <= 2; i++) {
		spend_some(&owner, 3 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
		ASSERT_EQ(owner.n_begun, i);
		while (owner.n_over < i)
			ASSERT_OK(loop_turn(owner.loop, 0));
		ASSERT_EQ(quota_used(&owner.quota), 0);
	}
	owner_done(&owner);
}

struct single {
	struct spent spent;
	char beside[100];
};

/* Of what begins with one, which goes with it. */
TEST(many_that_are_linked_go_in_steps)
{
	struct list all = LIST_INIT(all);
	struct owner owner;

	owner_init(&owner);
	spend_all(&owner.spending, &all, SPENT_STEP);
	ASSERT_EQ(owner.n_begun, 0);
	for (unsigned i = 0; i < 10 * SPENT_STEP; i++) {
		struct single *single = calloc(1, sizeof(*single));
		struct block *block;

		ASSERT_TRUE(single);
		ASSERT_OK(block_new(owner.blocks, LEN, NULL, &block));
		ASSERT_OK(quota_charge(&owner.quota, 100));
		spent_init_one(&single->spent, block, 100);
		list_push_back(&all, &single->spent.link);
	}
	spend_all(&owner.spending, &all, SPENT_STEP);
	ASSERT_TRUE(list_empty(&all));
	ASSERT_EQ(owner.n_begun, 1);
	ASSERT_INT(block_cache_used(owner.blocks), <, 10 * SPENT_STEP * LEN);
	ASSERT_INT(block_cache_used(owner.blocks), >=, 9 * SPENT_STEP * LEN);
	ASSERT_EQ(quota_used(&owner.quota), block_cache_used(owner.blocks) / LEN * 100);
	ASSERT_INT(steps(&owner, (uint64_t)SPENT_STEP * LEN), >=, 9);
	owner_done(&owner);
}

/* Nobody is told, as the owner goes. */
TEST(all_goes_with_its_owner)
{
	struct owner owner;

	owner_init(&owner);
	spend_some(&owner, 10 * SPENT_STEP, LEN, &(int64_t){ SPENT_STEP });
	owner_done(&owner);
	ASSERT_EQ(owner.n_over, 0);
}
