/*
 * Which pages of a piece of memory are in use, one bit for each: staging.c and direct.c take
 * runs of free pages here. The search begins where the last run was found.
 */
#include "gpu/internal.h"

int gpu_pages_init(struct gpu_pages *pages, uint64_t n)
{
	*pages = (struct gpu_pages){ .n = n };
	pages->used = calloc((n + 63) / 64, sizeof(pages->used[0]));
	return pages->used ? 0 : error_origin(-ENOMEM);
}

void gpu_pages_done(struct gpu_pages *pages)
{
	free(pages->used);
	pages->used = NULL;
}

static bool is_used(const struct gpu_pages *pages, uint64_t page)
{
	return pages->used[page / 64] >> page % 64 & 1;
}

static void set_used(struct gpu_pages *pages, uint64_t page, uint64_t n, bool used)
{
	for (; n--; page++) {
		if (used)
			pages->used[page / 64] |= UINT64_C(1) << page % 64;
		else
			pages->used[page / 64] &= ~(UINT64_C(1) << page % 64);
	}
}

/* Finds n free pages that begin in [from, to). Returns whether there are such. */
static bool find_between(const struct gpu_pages *pages, uint64_t from, uint64_t to, uint64_t n,
			 uint64_t *ret_page)
{
	uint64_t run = 0;

	for (uint64_t page = from; page < pages->n && page < to + n - 1; page++) {
		if (!run && !(page % 64) && pages->used[page / 64] == UINT64_MAX) {
			page += 63;
			continue;
		}
		run = is_used(pages, page) ? 0 : run + 1;
		if (run == n) {
			*ret_page = page + 1 - n;
			return true;
		}
	}
	return false;
}

bool gpu_pages_take(struct gpu_pages *pages, uint64_t n, uint64_t *ret_page)
{
	uint64_t page;

	if (n > pages->n - pages->n_used)
		return false;
	if (!find_between(pages, pages->next, pages->n, n, &page) &&
	    !find_between(pages, 0, pages->next, n, &page))
		return false;
	set_used(pages, page, n, true);
	pages->n_used += n;
	pages->next = page + n < pages->n ? page + n : 0;
	*ret_page = page;
	return true;
}

void gpu_pages_give(struct gpu_pages *pages, uint64_t page, uint64_t n)
{
	set_used(pages, page, n, false);
	pages->n_used -= n;
}
