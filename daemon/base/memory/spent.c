/*
 * Lists of blocks go step by step. agent/round/rows.c and server/round/rows.c bring those of
 * push_pull_rows.
 */
#include "base/memory/spent.h"

/* To give back more of a block takes longer than to give back a small one. */
#define UNIT ((size_t)64 << 10)

struct spent {
	struct list link; /* in spending->lists */
	struct spent_list list;
	uint64_t charged;
};

/* Returns whether all of it is gone; takes what went from *left. */
static bool list_free(struct spent_list *list, uint64_t *left)
{
	while (list->n && *left) {
		struct block *block = list->blocks[--list->n];
		uint64_t n = block ? MAX((block->len + UNIT - 1) / UNIT, (size_t)1) : 1;

		*left -= MIN(*left, n);
		(void)block_unref(block);
	}
	if (list->n)
		return false;
	free(list->blocks);
	free(list->beside);
	return true;
}

/* What is left of the list has its share of what is charged. */
static void release(struct spending *spending, struct spent *spent, uint64_t n_before)
{
	uint64_t rest = n_before ? spent->charged / n_before * spent->list.n : 0;

	quota_release(spending->quota, spent->charged - rest);
	spent->charged = rest;
}

static void go_on(struct spending *spending, uint64_t left)
{
	struct spent *spent;

	while (left && (spent = list_first(&spending->lists, struct spent, link))) {
		uint64_t n_before = spent->list.n;
		bool is_gone = list_free(&spent->list, &left);

		release(spending, spent, n_before);
		if (!is_gone)
			return;
		list_remove(&spent->link);
		free(spent);
		left -= left > 0;
	}
}

static bool on_step(struct chore *chore)
{
	struct spending *spending = container_of(chore, struct spending, chore);

	go_on(spending, SPENT_STEP);
	if (spending_is_under_way(spending))
		return true;
	spending->has_begun = false;
	spending->over(spending);
	return false;
}

static bool has_room(struct quota *quota, uint64_t bytes)
{
	if (quota_charge(quota, bytes))
		return false;
	quota_release(quota, bytes);
	return true;
}

void spending_make_room(struct spending *spending, uint64_t bytes)
{
	for (unsigned i = 0; i < SPENT_HURRY && spending_is_under_way(spending) &&
			     !has_room(spending->quota, bytes);
	     i++)
		go_on(spending, SPENT_STEP);
}

void spending_init(struct spending *spending, struct loop *loop)
{
	list_init(&spending->lists);
	spending->loop = loop;
	spending->chore.step = on_step;
}

void spending_done(struct spending *spending)
{
	loop_abort(&spending->chore);
	go_on(spending, UINT64_MAX);
}

void spend(struct spending *spending, const struct spent_list *list, uint64_t charged,
	   uint64_t *left)
{
	struct spent_list rest = *list;
	struct spent *spent;

	if (!rest.blocks)
		rest.n = 0;
	if (list_free(&rest, left)) {
		quota_release(spending->quota, charged);
		return;
	}
	spent = malloc(sizeof(*spent));
	if (!spent) {
		(void)list_free(&rest, &(uint64_t){ UINT64_MAX });
		quota_release(spending->quota, charged);
		return;
	}
	*spent = (struct spent){ .list = rest, .charged = charged };
	list_push_back(&spending->lists, &spent->link);
	if (spending->has_begun)
		return;
	spending->has_begun = true;
	spending->begun(spending);
	loop_begin(spending->loop, &spending->chore);
}
