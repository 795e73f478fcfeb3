/*
 * Writes ranks as text, neighbours as a range, cut short where there are too many. Errors that
 * name missing or differing ranks have their words from here.
 */
#include "server/common/ranks.h"

#include <stdio.h>

#define RUN_MAX	 32 /* bytes of ", 4294967294, 4294967295" and its NUL */
#define TAIL_MAX 8  /* ", ..." */

void ranks_init(struct ranks_text *ranks)
{
	*ranks = (struct ranks_text){ .text = "ranks ", .len = 6 };
}

static void write_run(struct ranks_text *ranks)
{
	const char *comma = ranks->len > 6 ? ", " : "";
	char *at = ranks->text + ranks->len;
	size_t left = sizeof(ranks->text) - ranks->len;
	int n;

	if (left < RUN_MAX + TAIL_MAX) {
		ranks->cut = true;
		return;
	}
	if (ranks->first == ranks->last)
		n = snprintf(at, left, "%s%u", comma, ranks->first);
	else if (ranks->first + 1 == ranks->last)
		n = snprintf(at, left, "%s%u, %u", comma, ranks->first, ranks->last);
	else
		n = snprintf(at, left, "%s%u-%u", comma, ranks->first, ranks->last);
	ranks->len += (size_t)n;
}

void ranks_add(struct ranks_text *ranks, uint32_t rank)
{
	if (ranks->n && ranks->last + 1 == rank) {
		ranks->last = rank;
	} else {
		if (ranks->n)
			write_run(ranks);
		ranks->first = ranks->last = rank;
	}
	ranks->n++;
}

const char *ranks_end(struct ranks_text *ranks)
{
	if (!ranks->n)
		return "no rank";
	write_run(ranks);
	if (ranks->cut)
		(void)snprintf(ranks->text + ranks->len, TAIL_MAX, ", ...");
	if (ranks->n > 1)
		return ranks->text;
	memcpy(ranks->text + 1, "rank ", 5);
	return ranks->text + 1;
}

const char *ranks_have(const struct ranks_text *ranks)
{
	return ranks->n == 1 ? "has" : "have";
}
