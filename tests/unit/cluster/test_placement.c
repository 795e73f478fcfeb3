/*
 * Placement against the shares of OSDI'20 and, on unequal links, against small changes of the
 * shares, none of which may be better.
 */
#include "cluster/cluster.h"
#include "test.h"

#define MEMBERS 24

/*
 * A cluster "n0" ... of agents that are servers too, and "s0" ... of spare servers; bandwidths in mbps, 0: unknown.
 * Members with a bandwidth of UINT32_MAX are agents without a server.
 */
struct world {
	struct view *view;
	const char *agents[MEMBERS];
	char names[MEMBERS][8];
	size_t n_agents, n_servers;
	uint16_t stripes[PLACEMENT_STRIPES];
	double share[MEMBERS]; /* by server number */
};

static void world_free(struct world *w)
{
	view_unref(w->view);
}

static void world_make(struct world *w, const uint32_t *agents, size_t n_agents,
		       const uint32_t *spares, size_t n_spares)
{
	struct view_member members[MEMBERS] = { 0 };

	*w = (struct world){ .n_agents = n_agents };
	for (size_t i = 0; i < n_agents + n_spares; i++) {
		bool spare = i >= n_agents;
		uint32_t mbps = spare ? spares[i - n_agents] : agents[i];

		members[i].roles = spare ? ROLE_SERVER : ROLE_AGENT | ROLE_SERVER;
		if (mbps == UINT32_MAX)
			members[i].roles = ROLE_AGENT;
		members[i].bandwidth_mbps = mbps == UINT32_MAX ? 0 : mbps;
		(void)snprintf(members[i].name, sizeof(members[i].name), "%c%02zu",
			       spare ? 's' : 'n', spare ? i - n_agents : i);
		if (spare)
			continue;
		(void)snprintf(w->names[i], sizeof(w->names[i]), "%.7s", members[i].name);
		w->agents[i] = w->names[i];
	}
	ASSERT_OK(view_new(1, members, n_agents + n_spares, &w->view));
	w->n_servers = view_n_servers(w->view);
	ASSERT_OK(placement_stripes(w->view, w->agents, n_agents, w->stripes, PLACEMENT_STRIPES));
	for (size_t i = 0; i < PLACEMENT_STRIPES; i++) {
		ASSERT_INT(w->stripes[i], <, w->n_servers);
		w->share[w->stripes[i]] += 1.0 / PLACEMENT_STRIPES;
	}
}

static double off(double a, double b)
{
	return a > b ? a - b : b - a;
}

/* The busiest link's time, in units of (all bytes of one node) / (1 mbps), for given shares. */
static double time_of(const struct world *w, const double *share)
{
	double worst = 0;

	for (size_t i = 0, s = 0; i < w->view->n_members; i++) {
		const struct view_member *m = &w->view->members[i];
		bool agent = m->roles & ROLE_AGENT, server = m->roles & ROLE_SERVER;
		double own = server ? share[s++] : 0, n = (double)w->n_agents, load;

		load = agent ? 1 + (n - 2) * own : n * own;
		worst = MAX(worst, load / (m->bandwidth_mbps ? m->bandwidth_mbps : 1));
	}
	return worst;
}

/* OSDI'20 section 4.1: with n agents and k spares, D = n^2 + kn - 2k, spare 2(n-1)/D, colocated (n-k)/D. */
TEST(equal_links_get_the_shares_of_the_paper)
{
	uint32_t unknown[MEMBERS] = { 0 };

	for (size_t n = 2; n <= 12; n++) {
		for (size_t k = 0; k <= n; k++) {
			_cleanup_(world_free) struct world w;
			double d = (double)(n * n + k * n) - 2 * (double)k;

			world_make(&w, unknown, n, unknown, k);
			for (size_t i = 0; i < n; i++)
				ASSERT_TRUE(off(w.share[i], (double)(n - k) / d) < 0.003);
			for (size_t i = n; i < n + k; i++)
				ASSERT_TRUE(off(w.share[i], 2 * (double)(n - 1) / d) < 0.003);
		}
	}
}

TEST(more_spares_than_agents_do_it_all)
{
	uint32_t unknown[MEMBERS] = { 0 };
	_cleanup_(world_free) struct world w;

	world_make(&w, unknown, 3, unknown, 7);
	for (size_t i = 0; i < 3; i++)
		ASSERT_TRUE(w.share[i] < 0.001);
	for (size_t i = 3; i < 10; i++)
		ASSERT_TRUE(off(w.share[i], 1.0 / 7) < 0.003);
}

/* No move of a small share from one server to another makes the busiest link less busy. */
TEST(unequal_links_are_at_an_optimum)
{
	const uint32_t agents[] = { 10000, 10000, 25000, 40000, 10000 };
	const uint32_t spares[] = { 100000, 10000, 1000 };
	_cleanup_(world_free) struct world w;
	double best;

	world_make(&w, agents, 5, spares, 3);
	best = time_of(&w, w.share);
	for (size_t from = 0; from < w.n_servers; from++) {
		for (size_t to = 0; to < w.n_servers; to++) {
			double share[MEMBERS], step = 0.02;

			if (from == to || w.share[from] < step)
				continue;
			memcpy(share, w.share, sizeof(share));
			share[from] -= step;
			share[to] += step;
			ASSERT_TRUE(time_of(&w, share) >= best * 0.999);
		}
	}
	/* Far better than dealing out evenly. */
	for (size_t i = 0; i < w.n_servers; i++)
		w.share[i] = 1.0 / (double)w.n_servers;
	ASSERT_TRUE(best * 2 < time_of(&w, w.share));
}

TEST(unknown_links_count_as_the_mean)
{
	const uint32_t agents[] = { 0, 20000, 10000, 30000 };
	_cleanup_(world_free) struct world w;

	world_make(&w, agents, 4, NULL, 0);
	ASSERT_TRUE(off(w.share[0], w.share[1]) < 0.002);
	ASSERT_TRUE(w.share[3] > w.share[1] && w.share[1] > w.share[2]);
}

TEST(one_node_keeps_its_data)
{
	uint32_t unknown[MEMBERS] = { 0 }, none = UINT32_MAX;
	_cleanup_(world_free) struct world own, away;

	world_make(&own, unknown, 1, unknown, 3);
	ASSERT_TRUE(own.share[0] > 0.999);
	/* Without a server of its own, the others share. */
	world_make(&away, &none, 1, unknown, 4);
	for (size_t i = 0; i < 4; i++)
		ASSERT_TRUE(off(away.share[i], 0.25) < 0.002);
}

TEST(agents_without_servers_only_send)
{
	const uint32_t agents[] = { UINT32_MAX, UINT32_MAX, UINT32_MAX };
	const uint32_t spares[] = { 10000, 30000 };
	_cleanup_(world_free) struct world w;

	world_make(&w, agents, 3, spares, 2);
	ASSERT_EQ(w.n_servers, 2);
	ASSERT_TRUE(off(w.share[0], 0.25) < 0.002);
	ASSERT_TRUE(off(w.share[1], 0.75) < 0.002);
}

/* A node that is not in the view (NULL) still counts as one that pushes. */
TEST(strangers_count_as_agents)
{
	uint32_t unknown[MEMBERS] = { 0 };
	_cleanup_(world_free) struct world w;
	uint16_t stripes[PLACEMENT_STRIPES];

	world_make(&w, unknown, 4, NULL, 0);
	w.agents[3] = NULL;
	ASSERT_OK(placement_stripes(w.view, w.agents, 4, stripes, PLACEMENT_STRIPES));
	memset(w.share, 0, sizeof(w.share));
	for (size_t i = 0; i < PLACEMENT_STRIPES; i++)
		w.share[stripes[i]] += 1.0 / PLACEMENT_STRIPES;
	/* n = 4, k = 1: D = 18, the spare one 6/18, the others 3/18; three of them, so scaled by 18/15. */
	ASSERT_TRUE(w.share[3] > w.share[0] * 1.3);
}

/* Any run of stripes, not only all of them: a tensor may be a few parts long. */
TEST(runs_are_shared_out_evenly)
{
	const uint32_t agents[] = { 10000, 10000, 25000, 40000 };
	const uint32_t spares[] = { 50000, 10000 };
	_cleanup_(world_free) struct world w;

	world_make(&w, agents, 4, spares, 2);
	for (size_t start = 0; start < PLACEMENT_STRIPES; start += 13) {
		double count[MEMBERS] = { 0 };

		for (size_t len = 1; len <= 100; len++) {
			count[w.stripes[(start + len - 1) % PLACEMENT_STRIPES]]++;
			for (size_t i = 0; i < w.n_servers; i++)
				ASSERT_TRUE(off(count[i], w.share[i] * (double)len) < 3);
		}
	}
}

TEST(the_order_of_agents_does_not_matter)
{
	const uint32_t agents[] = { 10000, 20000, 30000 };
	_cleanup_(world_free) struct world w;
	const char *turned[] = { "n02", "n00", "n01" };
	uint16_t stripes[PLACEMENT_STRIPES];

	world_make(&w, agents, 3, agents, 3);
	ASSERT_OK(placement_stripes(w.view, turned, 3, stripes, PLACEMENT_STRIPES));
	ASSERT_MEM(stripes, w.stripes, sizeof(stripes));
}

TEST(without_servers_there_is_no_placement)
{
	struct view_member a = { .name = "a", .roles = ROLE_AGENT };
	_cleanup_(view_unrefp) struct view *view = NULL;
	const char *agents[] = { "a" };
	uint16_t stripes[4];

	ASSERT_OK(view_new(1, &a, 1, &view));
	ASSERT_EQ(placement_stripes(view, agents, 1, stripes, 4), -ENOENT);
}

/* The same by facts alone, whoever they are. */
TEST(servers_that_are_no_view_are_dealt_the_same)
{
	static const struct placement_server servers[] = {
		{ .colocated = true }, { .colocated = true }, { .colocated = true }, { 0 }, { 0 },
	};
	uint16_t stripes[PLACEMENT_STRIPES];
	size_t n[5] = { 0 };

	ASSERT_OK(placement_assign(servers, 5, 3, stripes, PLACEMENT_STRIPES));
	for (size_t i = 0; i < PLACEMENT_STRIPES; i++)
		n[stripes[i]]++;
	/* D = 9 + 6 - 4 = 11: spares 4/11, colocated 1/11. */
	for (size_t i = 0; i < 5; i++)
		ASSERT_INT(labs((long)n[i] - (i < 3 ? 1 : 4) * PLACEMENT_STRIPES / 11), <=, 1);
	ASSERT_EQ(placement_assign(servers, 0, 3, stripes, PLACEMENT_STRIPES), -ENOENT);
}
