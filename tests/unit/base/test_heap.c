#include "base/heap.h"
#include "test.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define HUGE_PAGE (2u << 20)
#define OBJECT	  4096

/* Whether the page at data is of memory that is to be in huge pages. */
static bool is_advised(const void *data)
{
	FILE *maps = fopen("/proc/self/smaps", "re");
	uintptr_t at = (uintptr_t)data;
	unsigned long from, to;
	bool is_here = false, is = false;
	char line[512];

	ASSERT_TRUE(maps);
	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
			is_here = at >= from && at < to;
		else if (is_here && !strncmp(line, "VmFlags:", 8))
			is = strstr(line, " hg");
	}
	(void)fclose(maps);
	return is;
}

static void need_huge_pages(void)
{
	if (access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK))
		TEST_SKIP("this kernel has no huge pages");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	TEST_SKIP("a sanitizer's malloc() is another");
#endif
}

static void *last; /* of all; each leads to the one before */

/* Fills the heap by so many bytes. Returns the last of them. */
static void *fill(size_t len)
{

	for (size_t i = 0; i < len / OBJECT; i++) {
		void **object = malloc(OBJECT - sizeof(void *));

		ASSERT_TRUE(object);
		*object = last;
		last = object;
	}
	return last;
}

TEST(what_thousands_need_is_in_huge_pages_and_what_a_few_need_is_not)
{
	need_huge_pages();
	heap_init();
	ASSERT_TRUE(!is_advised(fill(OBJECT)));
	ASSERT_TRUE(is_advised(fill(4 * HUGE_PAGE)));
}

TEST(what_it_has_grown_by_is_too)
{
	uintptr_t end;

	need_huge_pages();
	heap_init();
	end = (uintptr_t)sbrk(0);
	while ((uintptr_t)sbrk(0) == end)
		(void)fill(OBJECT);
	ASSERT_TRUE(!is_advised(fill(HUGE_PAGE)));
	heap_look();
	ASSERT_TRUE(is_advised(fill(HUGE_PAGE)));
}

/* Nearly: the kernel adds up what its processors have counted now and then. */
static size_t resident(void)
{
	FILE *file = fopen("/proc/self/statm", "re");
	unsigned long size, pages;

	ASSERT_TRUE(file);
	ASSERT_EQ(fscanf(file, "%lu %lu", &size, &pages), 2);
	(void)fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

TEST(memory_of_what_is_gone_is_given_back)
{
	size_t before;

	need_huge_pages();
	heap_init();
	before = resident();
	(void)fill(16 * HUGE_PAGE);
	ASSERT_INT(resident(), >=, before + 12 * HUGE_PAGE);
	while (last) {
		void *object = last;

		last = *(void **)object;
		free(object);
	}
	heap_rest();
	ASSERT_INT(resident(), <, before + 4 * HUGE_PAGE);
}
