/*
 * Lists of blocks go step by step. agent/round/rows.c and server/round/rows.c bring those of
 * push_pull_rows.
 */
#include "base/memory/spent.h"

/* To give back more of a block takes longer than to give back a small one. */
#define UNIT ((size_t)64 << 10)

/* Returns whether all blocks are gone; takes what went from *left. */
static bool blocks_free(struct spent_list *list, int64_t *left)
{
	while (list->n && *left > 0) {
		struct block *block = list->blocks[--list->n];

		*left -= block ? (int64_t)MAX((block->len + UNIT - 1) / UNIT, (size_t)1) : 1;
		(void)block_unref(block);
	}
	return !list->n;
}

static void list_free(struct spent_list *list)
{
	free(list->blocks);
	free(list->beside);
}

static void spent_free(struct spent *spent)
{
	list_remove(&spent->link);
	if (spent->list.blocks != &spent->one)
		list_free(&spent->list);
	free(spent);
}

/* What is left of the list has its share of what is charged. */
static void release(struct spending *spending, struct spent *spent, uint64_t n_before)
{
	uint64_t rest = n_before ? spent->charged / n_before * spent->list.n : 0;

	quota_release(spending->quota, spent->charged - rest);
	spent->charged = rest;
}

/* Returns what is left of that, or less than nothing: blocks go whole. */
static int64_t go_on(struct spending *spending, int64_t left)
{
	struct spent *spent;

	while (left > 0 && (spent = list_first(&spending->lists, struct spent, link))) {
		uint64_t n_before = spent->list.n;
		bool is_gone = blocks_free(&spent->list, &left);

		release(spending, spent, n_before);
		if (!is_gone)
			break;
		spent_free(spent);
		left--;
	}
	return left;
}

static void begin(struct spending *spending)
{
	if (spending->has_begun || !spending_is_under_way(spending))
		return;
	spending->has_begun = true;
	spending->begun(spending);
	loop_begin(spending->loop, &spending->chore);
}

static bool on_step(struct chore *chore)
{
	struct spending *spending = container_of(chore, struct spending, chore);

	(void)go_on(spending, SPENT_STEP);
	if (spending_is_under_way(spending))
		return true;
	spending->has_begun = false;
	spending->over(spending);
	return false;
}

static bool has_room(const struct quota *quota, uint64_t bytes)
{
	for (; quota; quota = quota->parent)
		if (quota_available(quota) < bytes)
			return false;
	return true;
}

void spending_make_room(struct spending *spending, uint64_t bytes)
{
	int64_t left = (int64_t)MAX(bytes / UNIT, (uint64_t)SPENT_HURRY * SPENT_STEP);

	while (left > 0 && spending_is_under_way(spending) && !has_room(spending->quota, bytes))
		left -= SPENT_STEP - go_on(spending, SPENT_STEP);
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
	(void)go_on(spending, INT64_MAX);
}

void spend(struct spending *spending, const struct spent_list *list, uint64_t charged,
	   int64_t *left)
{
	struct spent_list rest = *list;
	struct spent *spent;

	if (!rest.blocks)
		rest.n = 0;
	if (blocks_free(&rest, left)) {
		list_free(&rest);
		quota_release(spending->quota, charged);
		return;
	}
	spent = malloc(sizeof(*spent));
	if (!spent) {
		(void)blocks_free(&rest, &(int64_t){ INT64_MAX });
		list_free(&rest);
		quota_release(spending->quota, charged);
		return;
	}
	*spent = (struct spent){ .list = rest, .charged = charged };
	list_push_back(&spending->lists, &spent->link);
	begin(spending);
}

void spend_all(struct spending *spending, struct list *spents, int64_t left)
{
	if (list_empty(spents))
		return;
	list_append(&spending->lists, spents);
	(void)go_on(spending, left);
	begin(spending);
}
