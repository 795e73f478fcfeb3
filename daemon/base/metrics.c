/* The list of registered metrics, and their text as OpenMetrics has it, which admin/ serves. */
#include "base/metrics.h"

#include "base/error.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>

/* Registering is rare and reading may come from the thread that serves the scrape. */
static pthread_mutex_t metrics_lock = PTHREAD_MUTEX_INITIALIZER; /* guards metrics */
static struct list metrics = LIST_INIT(metrics);

/*
 * The family is what comes before the labels, for a counter without the "_total" that its samples
 * end in.
 */
static size_t metric_family_len(const struct metric *metric)
{
	static const char suffix[] = "_total";
	size_t len = strcspn(metric->name, "{"), suffix_len = sizeof(suffix) - 1;

	if (metric->histogram)
		return strlen(metric->histogram);
	if (!metric->is_gauge && len > suffix_len &&
	    !memcmp(metric->name + len - suffix_len, suffix, suffix_len))
		len -= suffix_len;
	return len;
}

static bool metric_same_family(const struct metric *a, const struct metric *b)
{
	size_t len = metric_family_len(a);

	return len == metric_family_len(b) && !memcmp(a->name, b->name, len);
}

void metric_register(struct metric *metric)
{
	/* OpenMetrics gives a counter's sample this ending, and readers refuse it without. */
	assert(metric->is_gauge || metric->histogram ||
	       metric_family_len(metric) != strcspn(metric->name, "{"));

	(void)pthread_mutex_lock(&metrics_lock);
	list_push_back(&metrics, &metric->link);
	(void)pthread_mutex_unlock(&metrics_lock);
}

void metric_unregister(struct metric *metric)
{
	(void)pthread_mutex_lock(&metrics_lock);
	list_remove(&metric->link);
	(void)pthread_mutex_unlock(&metrics_lock);
}

/* The first entry registered that equal() says is like this one; this one itself at the latest. */
static struct metric *metric_first_like(struct metric *metric,
					bool (*equal)(const struct metric *, const struct metric *))
{
	struct metric *other;

	list_for_each (other, &metrics, link)
		if (other == metric || equal(other, metric))
			return other;
	return metric;
}

static bool metric_same_name(const struct metric *a, const struct metric *b)
{
	return !strcmp(a->name, b->name);
}

static void metric_print_sample(FILE *file, struct metric *metric)
{
	struct metric *other;
	uint64_t sum = 0;

	if (metric_first_like(metric, metric_same_name) != metric)
		return;
	list_for_each (other, &metrics, link)
		if (metric_same_name(metric, other))
			sum += metric_get(other);
	if (metric->is_time)
		(void)fprintf(file, "%s %" PRIu64 ".%09" PRIu64 "\n", metric->name,
			      sum / 1000000000, sum % 1000000000);
	else if (metric->is_gauge)
		(void)fprintf(file, "%s %" PRId64 "\n", metric->name, (int64_t)sum);
	else
		(void)fprintf(file, "%s %" PRIu64 "\n", metric->name, sum);
}

/* The samples of a family stand together, below its name: the format demands it. */
static void metric_print_family(FILE *file, struct metric *metric)
{
	int len = (int)metric_family_len(metric);
	struct metric *other;

	(void)fprintf(file, "# TYPE %.*s %s\n", len, metric->name,
		      metric->histogram	 ? "histogram"
		      : metric->is_gauge ? "gauge"
					 : "counter");
	(void)fprintf(file, "# HELP %.*s %s\n", len, metric->name, metric->help);
	list_for_each (other, &metrics, link)
		if (metric_same_family(metric, other))
			metric_print_sample(file, other);
}

int metrics_text(char **ret_text)
{
	_cleanup_(freep) char *text = NULL;
	struct metric *metric;
	size_t len = 0;
	FILE *file;
	bool failed;

	file = open_memstream(&text, &len);
	if (!file)
		return error_origin(-ENOMEM);

	(void)pthread_mutex_lock(&metrics_lock);
	list_for_each (metric, &metrics, link)
		if (metric_first_like(metric, metric_same_family) == metric)
			metric_print_family(file, metric);
	(void)pthread_mutex_unlock(&metrics_lock);
	(void)fputs("# EOF\n", file);

	failed = ferror(file);
	if (fclose(file) != 0 || failed || !text)
		return error_origin(-ENOMEM);
	*ret_text = TAKE_PTR(text);
	return 0;
}
