/* Circular doubly linked intrusive list. A head and an unlinked node both point at themselves. One thread at a time. */
#pragma once

#include "proto/c.h"

struct list {
	struct list *next, *prev;
};

#define LIST_INIT(name)                          \
	{                                        \
		.next = &(name), .prev = &(name) \
	}

static inline void list_init(struct list *l)
{
	l->next = l->prev = l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

/* Whether a node is on some list. */
static inline bool list_linked(const struct list *l)
{
	return l->next && l->next != l;
}

static inline void list_insert_before(struct list *where, struct list *node)
{
	node->prev = where->prev;
	node->next = where;
	where->prev->next = node;
	where->prev = node;
}

static inline void list_push_back(struct list *head, struct list *node)
{
	list_insert_before(head, node);
}

static inline void list_push_front(struct list *head, struct list *node)
{
	list_insert_before(head->next, node);
}

/* Unlinks; harmless on a node that is linked nowhere. */
static inline void list_remove(struct list *node)
{
	if (!node->next)
		return;
	node->prev->next = node->next;
	node->next->prev = node->prev;
	list_init(node);
}

/* All entries of a list go to the end of another, which it may not be. */
static inline void list_append(struct list *head, struct list *from)
{
	if (list_empty(from))
		return;
	from->next->prev = head->prev;
	head->prev->next = from->next;
	from->prev->next = head;
	head->prev = from->prev;
	list_init(from);
}

/* First or last entry, or NULL. */
#define list_first(head, type, member) \
	(list_empty(head) ? NULL : container_of((head)->next, type, member))
#define list_last(head, type, member) \
	(list_empty(head) ? NULL : container_of((head)->prev, type, member))

/* Fetches the first len bytes of the first or last entry, if there is one: it will be taken, and written, soon. */
#define list_fetch_first(head, type, member, len) \
	fetch_to_write(container_of((head)->next, type, member), len)

#define list_fetch_last(head, type, member, len) \
	fetch_to_write(container_of((head)->prev, type, member), len)

#define list_for_each(entry, head, member)                                   \
	for (entry = container_of((head)->next, __typeof__(*entry), member); \
	     &entry->member != (head);                                       \
	     entry = container_of(entry->member.next, __typeof__(*entry), member))

/* The body may remove entry (and only entry). */
#define list_for_each_safe(entry, tmp, head, member)                            \
	for (entry = container_of((head)->next, __typeof__(*entry), member),    \
	    tmp = container_of(entry->member.next, __typeof__(*entry), member); \
	     &entry->member != (head);                                          \
	     entry = tmp, tmp = container_of(tmp->member.next, __typeof__(*tmp), member))
