/* Views: order, comparison, digest, the homes of jobs. */
#include "cluster/cluster.h"
#include "test.h"

static struct view_member member(const char *name, const char *address, uint32_t roles)
{
	struct view_member m = { .roles = roles };

	(void)snprintf(m.name, sizeof(m.name), "%s", name);
	(void)snprintf(m.address, sizeof(m.address), "%s", address);
	return m;
}

static struct view *view_of(uint32_t epoch, const struct view_member *members, size_t n)
{
	struct view *view = NULL;

	ASSERT_OK(view_new(epoch, members, n, &view));
	return view;
}

TEST(members_are_sorted_by_name)
{
	struct view_member members[] = {
		member("c", "c:1", ROLE_SERVER),
		member("a", "a:1", ROLE_AGENT),
		member("b", "b:1", ROLE_AGENT | ROLE_SERVER),
	};
	_cleanup_(view_unrefp) struct view *view = view_of(7, members, 3);

	ASSERT_EQ(view->epoch, 7);
	ASSERT_EQ(view->n_members, 3);
	ASSERT_STR(view->members[0].name, "a");
	ASSERT_STR(view->members[2].name, "c");
	ASSERT_EQ(view_n_servers(view), 2);
	ASSERT_STR(view_server(view, 0)->name, "b");
	ASSERT_STR(view_server(view, 1)->name, "c");
	ASSERT_TRUE(!view_server(view, 2));
}

TEST(names_are_unique_and_there)
{
	struct view_member twice[] = { member("a", "x:1", ROLE_SERVER),
				       member("a", "y:1", ROLE_SERVER) };
	struct view_member nameless = member("", "x:1", ROLE_SERVER);
	struct view_member endless = member("a", "x:1", ROLE_SERVER);
	struct view *view = NULL;

	memset(endless.address, 'x', sizeof(endless.address));
	ASSERT_EQ(view_new(1, twice, 2, &view), -EEXIST);
	ASSERT_EQ(view_new(1, &nameless, 1, &view), -EINVAL);
	ASSERT_EQ(view_new(1, &endless, 1, &view), -EINVAL);
	ASSERT_EQ(view_new(0, twice, 1, &view), -EINVAL);
	ASSERT_EQ(view_new(1, twice, SIZE_MAX / 4, &view), -EINVAL);
	ASSERT_TRUE(!view);
}

TEST(views_differ_in_anything_of_a_member)
{
	struct view_member same = member("a", "x:1", ROLE_SERVER), others[] = {
		same, same, same, same, same,
	};

	(void)snprintf(others[0].name, sizeof(others[0].name), "b");
	(void)snprintf(others[1].address, sizeof(others[1].address), "x:2");
	others[2].roles = ROLE_AGENT;
	others[3].bandwidth_mbps = 100;
	others[4].id = 1;
	_cleanup_(view_unrefp) struct view *view = view_of(1, &same, 1);
	_cleanup_(view_unrefp) struct view *again = view_of(2, &same, 1);
	_cleanup_(view_unrefp) struct view *empty = view_of(1, NULL, 0);

	ASSERT_TRUE(view_same(view, again));
	ASSERT_TRUE(!view_same(view, empty));
	for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
		_cleanup_(view_unrefp) struct view *other = view_of(1, &others[i], 1);

		ASSERT_TRUE(!view_same(view, other));
	}
}

TEST(references_are_counted)
{
	struct view_member a = member("a", "a:1", ROLE_SERVER);
	struct view *view = view_of(1, &a, 1), *other = view_ref(view);

	ASSERT_TRUE(!view_unref(view));
	ASSERT_STR(other->members[0].name, "a");
	ASSERT_TRUE(!view_unref(other));
	ASSERT_TRUE(!view_unref(NULL));
}

TEST(digest_is_of_the_servers_alone)
{
	struct view_member members[] = {
		member("a", "a:1", ROLE_AGENT | ROLE_SERVER),
		member("b", "b:1", ROLE_SERVER),
		member("c", "c:1", ROLE_AGENT),
	};
	struct view_member swapped[] = { members[2], members[1], members[0] };
	_cleanup_(view_unrefp) struct view *view = view_of(1, members, 3);
	_cleanup_(view_unrefp) struct view *same = view_of(9, swapped, 3);
	uint64_t digest = view_server_digest(view);

	ASSERT_TRUE(digest == view_server_digest(same));
	swapped[0].address[0] = 'x'; /* the agent moves */
	swapped[2].id = 77;
	swapped[2].bandwidth_mbps = 5;
	view_unref(TAKE_PTR(same));
	same = view_of(9, swapped, 3);
	ASSERT_TRUE(digest == view_server_digest(same));
	/* A server moves, goes, or takes a letter from its address into its name. */
	swapped[1].address[2] = '2';
	view_unref(TAKE_PTR(same));
	same = view_of(9, swapped, 3);
	ASSERT_TRUE(digest != view_server_digest(same));
	swapped[1] = member("bb", ":1", ROLE_SERVER);
	view_unref(TAKE_PTR(same));
	same = view_of(9, swapped, 3);
	ASSERT_TRUE(digest != view_server_digest(same));
	swapped[1].roles = ROLE_AGENT;
	view_unref(TAKE_PTR(same));
	same = view_of(9, swapped, 3);
	ASSERT_TRUE(digest != view_server_digest(same));
}

/* Every process must get this number for this list: nodes compare them. */
TEST(digest_has_no_seed)
{
	struct view_member a = member("a", "a:1", ROLE_SERVER);
	_cleanup_(view_unrefp) struct view *view = view_of(1, &a, 1);

	ASSERT_TRUE(view_server_digest(view) == 0xeb2659673a6ebd75ull);
}

TEST(homes_are_servers_and_spread)
{
	struct view_member members[] = {
		member("a", "a:1", ROLE_SERVER), member("b", "b:1", ROLE_SERVER),
		member("c", "c:1", ROLE_AGENT),	 member("d", "d:1", ROLE_SERVER),
		member("e", "e:1", ROLE_SERVER),
	};
	_cleanup_(view_unrefp) struct view *view = view_of(1, members, 5);
	_cleanup_(view_unrefp) struct view *fewer = view_of(2, members, 4);
	unsigned counts[256] = { 0 }, n_moved = 0;

	for (unsigned i = 0; i < 4000; i++) {
		const struct view_member *home;
		char job[32];

		(void)snprintf(job, sizeof(job), "job-%u", i);
		home = view_home(view, job);
		ASSERT_TRUE(home && (home->roles & ROLE_SERVER));
		counts[(uint8_t)home->name[0]]++;
		n_moved += strcmp(home->name, view_home(fewer, job)->name) != 0;
	}
	for (const char *c = "abde"; *c; c++)
		ASSERT_INT(counts[(uint8_t)*c], >, 800);
	/* Only what was at home on the one that has gone moves. */
	ASSERT_EQ(n_moved, counts['e']);
}

TEST(without_servers_there_is_no_home)
{
	struct view_member a = member("a", "", ROLE_AGENT);
	_cleanup_(view_unrefp) struct view *view = view_of(1, &a, 1);

	ASSERT_EQ(view_n_servers(view), 0);
	ASSERT_TRUE(!view_home(view, "job"));
}
