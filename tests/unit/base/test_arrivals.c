/*
 * Arrivals at rounds, with times that the test makes up: who was last, by how much, and who is
 * late.
 */
#include "base/order/arrivals.h"
#include "test.h"

#define MS 1000000ull
#define S  (1000 * MS)

static struct arrivals_spread spread;

static struct arrivals *three(void)
{
	static const uint32_t numbers[] = { 4, 5, 9 };
	struct arrivals *arrivals;

	arrivals_spread_init(&spread, "bps_test_spread_seconds", "Test.");
	ASSERT_OK(arrivals_new("j", "rank", numbers, 3, &spread, &arrivals));
	return arrivals;
}

static void end(struct arrivals *arrivals)
{
	(void)arrivals_free(arrivals);
	arrivals_spread_done(&spread);
}

/* A round that begins at `at`: the second comes 1 ms later, the third after late_ns. */
static void come(struct arrivals *arrivals, uint64_t at, const uint32_t order[3], uint64_t late_ns)
{
	arrivals_came(arrivals, order[0], 0);
	arrivals_came(arrivals, order[1], MS);
	arrivals_came(arrivals, order[2], late_ns);
	arrivals_complete(arrivals, order[2], at, at + MS, at + late_ns);
}

TEST(last_and_by_how_much)
{
	static const uint32_t last_is_9[] = { 1, 0, 2 }, last_is_4[] = { 1, 2, 0 };
	struct arrivals *arrivals = three();
	struct arrivals_info infos[3];
	_cleanup_(freep) char *text = NULL;

	for (uint64_t i = 1; i <= 100; i++)
		come(arrivals, i * S, last_is_9, 101 * MS);
	come(arrivals, 101 * S, last_is_4, 3 * MS);
	ASSERT_EQ(arrivals_n(arrivals), 3);
	arrivals_info(arrivals, infos);
	ASSERT_EQ(infos[0].number, 4);
	ASSERT_EQ(infos[2].number, 9);
	ASSERT_EQ(infos[2].n_rounds, 101);
	ASSERT_EQ(infos[0].n_last, 1);
	ASSERT_EQ(infos[1].n_last, 0);
	ASSERT_EQ(infos[2].n_last, 100);
	/* Behind the one before it. */
	ASSERT_EQ(infos[2].held_ns, 100 * 100 * MS);
	ASSERT_EQ(infos[0].held_ns, 2 * MS);
	/* Behind the first, moved towards 1 ms by the last round. */
	ASSERT_TRUE(infos[2].late_ns > 90 * MS && infos[2].late_ns < 101 * MS);
	ASSERT_EQ(infos[1].late_ns, 0);

	ASSERT_OK(metrics_text(&text));
	ASSERT_TRUE(strstr(text, "# TYPE bps_test_spread_seconds histogram\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_bucket{le=\"0.001\"} 0\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_bucket{le=\"0.01\"} 1\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_bucket{le=\"1.0\"} 101\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_bucket{le=\"+Inf\"} 101\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_count 101\n"));
	ASSERT_TRUE(strstr(text, "bps_test_spread_seconds_sum 10.103000000\n"));
	ASSERT_TRUE(strstr(text, "bps_rank_last_total{job=\"j\",rank=\"9\"} 100\n"));
	ASSERT_TRUE(
		strstr(text, "bps_rank_held_seconds_total{job=\"j\",rank=\"4\"} 0.002000000\n"));
	end(arrivals);
}

TEST(a_moment_counts_once)
{
	struct arrivals *arrivals = three();
	struct arrivals_info infos[3];

	/* Ten tensors wait for it at the same time, from 1 s to 2 s and a little more. */
	for (uint64_t i = 0; i < 10; i++)
		arrivals_complete(arrivals, 2, S, S, 2 * S + i);
	arrivals_info(arrivals, infos);
	ASSERT_EQ(infos[2].n_last, 10);
	ASSERT_EQ(infos[2].held_ns, S + 9);
	end(arrivals);
}

static bool is_late(const struct arrivals *arrivals, uint32_t index)
{
	struct arrivals_info infos[3];

	arrivals_info(arrivals, infos);
	return infos[index].is_late;
}

TEST(late_is_who_keeps_being)
{
	static const uint32_t last_is_9[] = { 1, 0, 2 }, last_is_5[] = { 2, 0, 1 };
	struct arrivals *arrivals = three();
	uint64_t at = S, began = S;

	/* Three windows, and not before. */
	for (; !is_late(arrivals, 2) && at < 100 * S; at += S)
		come(arrivals, at, last_is_9, 301 * MS);
	ASSERT_TRUE(is_late(arrivals, 2));
	ASSERT_TRUE(at - began >= ARRIVALS_WINDOWS * ARRIVALS_WINDOW_NS);
	ASSERT_TRUE(at - began <= (ARRIVALS_WINDOWS + 1) * ARRIVALS_WINDOW_NS);
	ASSERT_TRUE(!is_late(arrivals, 0) && !is_late(arrivals, 1));

	/* One good window does not clear its name. */
	for (began = at; at < began + ARRIVALS_WINDOW_NS + 2 * S; at += S)
		come(arrivals, at, last_is_5, 2 * MS);
	ASSERT_TRUE(is_late(arrivals, 2));
	for (; at < began + (ARRIVALS_WINDOWS + 1) * ARRIVALS_WINDOW_NS; at += S)
		come(arrivals, at, last_is_5, 2 * MS);
	ASSERT_TRUE(!is_late(arrivals, 2));
	/* Last in every round, but by nothing that matters. */
	ASSERT_TRUE(!is_late(arrivals, 1));
	end(arrivals);
}

static bool are_measured(uint32_t n)
{
	_cleanup_(freep) char *text = NULL;
	struct arrivals *arrivals;

	arrivals_spread_init(&spread, "bps_test_spread_seconds", "Test.");
	ASSERT_OK(arrivals_new("j", "node", NULL, n, &spread, &arrivals));
	arrivals_complete(arrivals, 1, S, S, 2 * S);
	ASSERT_OK(metrics_text(&text));
	ASSERT_CONTAINS(text, "bps_test_spread_seconds_count 1\n");
	end(arrivals);
	return strstr(text, "bps_node_last_total{job=\"j\",node=\"1\"} 1\n");
}

/* What is known of each is asked for: arrivals_info(). */
TEST(of_too_many_there_are_no_metrics)
{
	ASSERT_TRUE(are_measured(ARRIVALS_MEASURED_MAX));
	ASSERT_TRUE(!are_measured(ARRIVALS_MEASURED_MAX + 1));
}

/* Whoever has many jobs leaves some for those of others. */
TEST(of_too_many_jobs_there_are_no_metrics)
{
	struct arrivals *arrivals[ARRIVALS_MEASURED_ALL / ARRIVALS_MEASURED_MAX];

	arrivals_spread_init(&spread, "bps_test_spread_seconds", "Test.");
	for (unsigned i = 0; i < ARRAY_SIZE(arrivals); i++)
		ASSERT_OK(arrivals_new("many", "node", NULL, ARRIVALS_MEASURED_MAX, &spread,
				       &arrivals[i]));
	arrivals_spread_done(&spread);
	ASSERT_TRUE(!are_measured(ARRIVALS_MEASURED_MAX));
	ASSERT_TRUE(are_measured(ARRIVALS_MEASURED_MAX / 2));
	for (unsigned i = 0; i < ARRAY_SIZE(arrivals); i++)
		(void)arrivals_free(arrivals[i]);
	ASSERT_TRUE(are_measured(ARRIVALS_MEASURED_MAX));
}
