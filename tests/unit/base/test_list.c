/* Lists: order, removal while walking, removal of what is in no list. */
#include "base/list.h"
#include "test.h"

struct item {
	int value;
	struct list link;
};

TEST(order_of_insertion)
{
	struct list head = LIST_INIT(head);
	struct item items[4] = { { 0 }, { 1 }, { 2 }, { 3 } }, *item;
	int expected = 0;

	ASSERT_TRUE(!list_first(&head, struct item, link));
	ASSERT_TRUE(!list_last(&head, struct item, link));
	list_push_back(&head, &items[1].link);
	list_push_back(&head, &items[3].link);
	list_push_front(&head, &items[0].link);
	list_insert_before(&items[3].link, &items[2].link);
	list_for_each (item, &head, link)
		ASSERT_EQ(item->value, expected++);
	ASSERT_EQ(expected, 4);
	ASSERT_EQ(list_first(&head, struct item, link)->value, 0);
	ASSERT_EQ(list_last(&head, struct item, link)->value, 3);
}

TEST(removal_while_walking)
{
	struct list head = LIST_INIT(head);
	struct item items[5] = { { 0 }, { 1 }, { 2 }, { 3 }, { 4 } }, *item, *next;
	int sum = 0;

	for (size_t i = 0; i < ARRAY_SIZE(items); i++)
		list_push_back(&head, &items[i].link);
	list_for_each_safe (item, next, &head, link)
		if (item->value % 2)
			list_remove(&item->link);
	list_for_each (item, &head, link)
		sum = 10 * sum + item->value;
	ASSERT_EQ(sum, 24); /* 0, 2, 4 */
	ASSERT_TRUE(!list_linked(&items[1].link));
	ASSERT_TRUE(list_linked(&items[2].link));
	list_for_each_safe (item, next, &head, link)
		list_remove(&item->link);
	ASSERT_TRUE(list_empty(&head));
}

TEST(removal_is_harmless_twice_and_never_linked)
{
	struct item item = { 0 };

	list_remove(&item.link);
	ASSERT_TRUE(!list_linked(&item.link));
	list_init(&item.link);
	list_remove(&item.link);
	list_remove(&item.link);
	ASSERT_TRUE(!list_linked(&item.link));
}
