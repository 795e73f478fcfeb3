/*
 * Lists of blocks that nobody needs any more. One may have millions of blocks, or gigabytes: of these little goes at once,
 * and the rest by and by, in steps of a chore. What is charged for a list is released as its blocks go. Loop's thread.
 */
#pragma once

#include "base/loop/loop.h"
#include "base/memory/block.h"

/* Blocks that go in a step, of 64 KiB at most: a larger one counts as so many of these as it holds. */
#define SPENT_STEP 256
/* That go at once. */
#define SPENT_NOW 64
/* Where there is no room for what comes in their place, so many steps are made at once, or as many as that has bytes. */
#define SPENT_HURRY 16

struct spent_list {
	struct block **blocks; /* NULL: none; each may be NULL */
	void *beside;	       /* goes with them, and is of the heap as they are; or NULL */
	uint64_t n;
};

/* A list that goes, and what is charged for it. It is freed then, and with it the struct that it is the first member of, if any. */
struct spent {
	struct list link;
	struct spent_list list;
	uint64_t charged;
	struct block *one; /* of a list of one block: list.blocks points here */
};

static inline void spent_init_one(struct spent *spent, struct block *block, uint64_t charged)
{
	list_init(&spent->link);
	spent->list = (struct spent_list){ .blocks = &spent->one, .n = 1 };
	spent->one = block;
	spent->charged = charged;
}

/* Lists of one owner. Embedded in it. */
struct spending {
	struct list lists;
	struct chore chore;
	struct loop *loop;
	bool has_begun;	     /* begun() was called, and over() was not yet */
	struct quota *quota; /* is charged for the lists */
	/* The first list comes that does not go at once; all have gone: then it may be freed. The owner stays in between. */
	void (*begun)(struct spending *spending);
	void (*over)(struct spending *spending);
};

/* quota, begun and over are set. */
void spending_init(struct spending *spending, struct loop *loop);
/* All that is left, at once. Nobody is told: the owner goes. */
void spending_done(struct spending *spending);
/*
 * Takes a list, and what is charged for it. Of lists that come together so many blocks go at once as *left says, which is
 * SPENT_NOW before the first of them.
 */
void spend(struct spending *spending, const struct spent_list *list, uint64_t charged,
	   int64_t *left);
/* Takes all struct spent of a list, each of the heap. So many blocks go at once as `left` says. */
void spend_all(struct spending *spending, struct list *spents, int64_t left);
/* Makes steps now until so much may be charged, or enough were made. */
void spending_make_room(struct spending *spending, uint64_t bytes);
/* Whether some list has not gone yet. */
static inline bool spending_is_under_way(const struct spending *spending)
{
	return !list_empty(&spending->lists);
}
