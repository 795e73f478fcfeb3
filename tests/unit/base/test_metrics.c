/* The text of metrics, as OpenMetrics has it. */
#include "base/metrics.h"
#include "test.h"

TEST(text_of_nothing)
{
	_cleanup_(freep) char *text = NULL;

	ASSERT_OK(metrics_text(&text));
	ASSERT_STR(text, "# EOF\n");
}

TEST(counters_gauges_and_labels)
{
	struct metric sent = { .name = "bps_sent_total", .help = "Bytes sent." };
	struct metric jobs = { .name = "bps_jobs", .help = "Jobs.", .is_gauge = true };
	struct metric lane0 = { .name = "bps_lane_total{lane=\"0\"}", .help = "Per lane." };
	struct metric lane1 = { .name = "bps_lane_total{lane=\"1\"}", .help = "Per lane." };
	_cleanup_(freep) char *text = NULL;

	metric_register(&lane0);
	metric_register(&sent);
	metric_register(&jobs);
	metric_register(&lane1);
	metric_add(&sent, 5);
	metric_add(&sent, 7);
	metric_add(&jobs, 2);
	metric_sub(&jobs, 3);
	metric_add(&lane1, 1);
	ASSERT_EQ(metric_get(&sent), 12);

	ASSERT_OK(metrics_text(&text));
	ASSERT_STR(text, "# TYPE bps_lane counter\n"
			 "# HELP bps_lane Per lane.\n"
			 "bps_lane_total{lane=\"0\"} 0\n"
			 "bps_lane_total{lane=\"1\"} 1\n"
			 "# TYPE bps_sent counter\n"
			 "# HELP bps_sent Bytes sent.\n"
			 "bps_sent_total 12\n"
			 "# TYPE bps_jobs gauge\n"
			 "# HELP bps_jobs Jobs.\n"
			 "bps_jobs -1\n"
			 "# EOF\n");
}

TEST(one_name_is_added_up)
{
	struct metric a = { .name = "bps_parts_total", .help = "Parts." };
	struct metric b = { .name = "bps_parts_total", .help = "Parts." };
	_cleanup_(freep) char *both = NULL, *one = NULL;

	metric_register(&a);
	metric_register(&b);
	metric_add(&a, 10);
	metric_add(&b, 1);
	ASSERT_OK(metrics_text(&both));
	ASSERT_STR(both, "# TYPE bps_parts counter\n# HELP bps_parts Parts.\nbps_parts_total 11\n"
			 "# EOF\n");
	metric_unregister(&a);
	metric_unregister(&a);
	ASSERT_OK(metrics_text(&one));
	ASSERT_CONTAINS(one, "bps_parts_total 1\n");
}
