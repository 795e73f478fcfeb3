/* The list of nodes of a static cluster. */
#include "cluster/cluster_file.h"
#include "fuzz.h"

static void check_members(const struct view_member *members, size_t n)
{
	FUZZ_CHECK(n >= 1 && n <= CLUSTER_NODES_MAX);
	for (size_t i = 0; i < n; i++) {
		const struct view_member *m = &members[i];

		FUZZ_CHECK(*m->name && memchr(m->name, 0, sizeof(m->name)));
		FUZZ_CHECK(memchr(m->address, 0, sizeof(m->address)));
		FUZZ_CHECK(m->roles && !(m->roles & ~(uint32_t)(ROLE_AGENT | ROLE_SERVER)));
		FUZZ_CHECK(*m->address || !(m->roles & ROLE_SERVER));
		for (size_t k = 0; k < i && n < 64; k++)
			FUZZ_CHECK(strcmp(members[k].name, m->name));
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct view_member *members = NULL;
	struct failure failure = { 0 };
	size_t n = 0;
	int r;

	r = cluster_file_parse("f", (const char *)data, size, &failure, &members, &n);
	if (r) {
		FUZZ_CHECK(!members && failure.status == r && *failure.text);
		return 0;
	}
	check_members(members, n);
	free(members);
	return 0;
}
