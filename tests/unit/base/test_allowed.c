/*
 * Limits of memory as control groups of both versions have them, in a tree of files that the test
 * writes.
 */
#include "base/memory/allowed.h"
#include "test.h"
#include <stdio.h>
#include <sys/stat.h>

static char root[512], cgroups[600];

static void put(const char *file, const char *text)
{
	char path[1200];
	FILE *out;

	(void)snprintf(path, sizeof(path), "%s/%s", root, file);
	for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')); at++) {
		*at = '\0';
		ASSERT_TRUE(!mkdir(path, 0700) || errno == EEXIST);
		*at = '/';
	}
	out = fopen(path, "we");
	ASSERT_TRUE(out && fputs(text, out) >= 0);
	ASSERT_OK(fclose(out));
}

static uint64_t limit(const char *lines)
{
	put("self", lines);
	(void)snprintf(cgroups, sizeof(cgroups), "%s/self", root);
	return allowed_memory_of(cgroups, root);
}

TEST(memory_is_what_the_least_of_the_groups_above_may_have)
{
	uint64_t machine;

	(void)snprintf(root, sizeof(root), "%s", test_dir());
	machine = limit("");
	ASSERT_TRUE(machine > 64 << 20);
	put("a/b/memory.max", "max\n");
	ASSERT_EQ(limit("0::/a/b\n"), machine);
	put("a/b/memory.max", "50000000\n");
	ASSERT_EQ(limit("0::/a/b\n"), 50000000);
	put("a/memory.high", "40000000\n");
	ASSERT_EQ(limit("0::/a/b\n"), 40000000);
	/* Of a container that sees its own group as the root. */
	put("memory.max", "30000000\n");
	ASSERT_EQ(limit("0::/not/seen/here\n"), 30000000);
}

TEST(memory_of_the_first_version_has_a_hierarchy_of_its_own)
{
	(void)snprintf(root, sizeof(root), "%s", test_dir());
	put("memory/a/memory.limit_in_bytes", "20000000\n");
	put("cpu/a/memory.limit_in_bytes", "10000\n");
	ASSERT_EQ(limit("3:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n"), 20000000);
	ASSERT_TRUE(limit("what is this\n::\n4:memory\n") > 64 << 20);
}

TEST(this_process_has_limits)
{
	ASSERT_TRUE(allowed_memory() > 64 << 20);
	ASSERT_TRUE(allowed_mappings() >= 1000);
}
