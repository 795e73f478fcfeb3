/* The text of metrics, as OpenMetrics has it. */
#include "base/metrics.h"
#include "test.h"
#include <stdio.h>
#include <strings.h>

static unsigned n_compared;

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_compared++;
	return __real_strcmp(a, b);
}

int __real_memcmp(const void *a, const void *b, size_t len);
int __wrap_memcmp(const void *a, const void *b, size_t len);
int __wrap_memcmp(const void *a, const void *b, size_t len)
{
	n_compared++;
	return __real_memcmp(a, b, len);
}

/* What clang makes of some memcmp(). */
int __real_bcmp(const void *a, const void *b, size_t len);
int __wrap_bcmp(const void *a, const void *b, size_t len);
int __wrap_bcmp(const void *a, const void *b, size_t len)
{
	n_compared++;
	return __real_bcmp(a, b, len);
}

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

/* Names that are compared for the text of n metrics, each of which there is twice. */
static unsigned compared(unsigned n)
{
	struct metric *all = calloc(n, 2 * sizeof(*all));
	char(*names)[64] = calloc(n, sizeof(*names));
	_cleanup_(freep) char *text = NULL;

	ASSERT_TRUE(all && names);
	for (unsigned i = 0; i < n; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "bps_of%u{node=\"%u\"}", i % 16, i);
		for (unsigned j = 2 * i; j < 2 * i + 2; j++) {
			all[j] = (struct metric){ .name = names[i],
						  .help = "Of one.",
						  .is_gauge = true };
			metric_register(&all[j]);
			metric_add(&all[j], i);
		}
	}
	n_compared = 0;
	ASSERT_OK(metrics_text(&text));
	ASSERT_CONTAINS(text, "\nbps_of15{node=\"31\"} 62\nbps_of15{node=\"47\"} 94\n");
	for (unsigned j = 0; j < 2 * n; j++)
		metric_unregister(&all[j]);
	free(all);
	free(names);
	return n_compared;
}

TEST(each_name_is_compared_once)
{
	ASSERT_INT(compared(64), <=, 4 * 64);
	ASSERT_INT(compared(1024), <=, 4 * 1024);
}
