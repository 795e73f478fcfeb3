/* Stands before loop_begin(), and keeps what is to begin until the test lets it. */
#include "chores.h"

#include "base/loop/loop.h"
#include "test.h"

static struct {
	bool holds;
	struct loop *loop;
	struct chore *held[8];
	size_t n_held;
} chores;

void __real_loop_begin(struct loop *loop, struct chore *chore);
void __wrap_loop_begin(struct loop *loop, struct chore *chore);

void __wrap_loop_begin(struct loop *loop, struct chore *chore)
{
	if (!chores.holds) {
		__real_loop_begin(loop, chore);
		return;
	}
	for (size_t i = 0; i < chores.n_held; i++)
		if (chores.held[i] == chore)
			return;
	ASSERT_TRUE(chores.n_held < ARRAY_SIZE(chores.held));
	chores.loop = loop;
	chores.held[chores.n_held++] = chore;
}

void chores_hold(void)
{
	chores.holds = true;
}

size_t chores_n_held(void)
{
	return chores.n_held;
}

void chores_go_on(void)
{
	chores.holds = false;
	for (size_t i = 0; i < chores.n_held; i++)
		__real_loop_begin(chores.loop, chores.held[i]);
	chores.n_held = 0;
}

void chores_forget(const struct chore *chore)
{
	for (size_t i = 0; i < chores.n_held; i++)
		if (chores.held[i] == chore)
			chores.held[i--] = chores.held[--chores.n_held];
}
