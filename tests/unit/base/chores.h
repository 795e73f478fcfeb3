/*
 * Chores that are held back, so that a test comes between what they are for and their first step. For programs that are linked
 * with --wrap=loop_begin; on the loop's thread.
 */
#pragma once

#include <stddef.h>

struct chore;

/* Holds those that begin from now on. */
void chores_hold(void);
/* How many are held. */
size_t chores_n_held(void);
/* Lets those that are held begin, and all others. */
void chores_go_on(void);
/* One of those that are held is aborted, as who has it goes. */
void chores_forget(const struct chore *chore);
