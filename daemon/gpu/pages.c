/*
 * Which pages of a piece of memory are in use, one bit for each: staging.c and direct.c take
 * runs of free pages here. The first that is long enough: what was given back a moment ago is
 * still mapped and in caches, which is most of what a small part costs.
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

bool gpu_pages_take(struct gpu_pages *pages, uint64_t n, uint64_t *ret_page)
{
	uint64_t run = 0;

	if (n > pages->n - pages->n_used)
		return false;
	for (uint64_t page = 0; page < pages->n; page++) {
		if (!run && !(page % 64) && pages->used[page / 64] == UINT64_MAX) {
			page += 63;
			continue;
		}
		run = is_used(pages, page) ? 0 : run + 1;
		if (run < n)
			continue;
		*ret_page = page + 1 - n;
		set_used(pages, *ret_page, n, true);
		pages->n_used += n;
		return true;
	}
	return false;
}

void gpu_pages_give(struct gpu_pages *pages, uint64_t page, uint64_t n)
{
	set_used(pages, page, n, false);
	pages->n_used -= n;
}
