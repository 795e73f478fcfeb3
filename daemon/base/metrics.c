/* The list of registered metrics, and their text as OpenMetrics has it, which admin/ serves. */
#include "base/metrics.h"

#include "base/error.h"
#include "base/map.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>

/* Registering is rare and reading may come from the thread that serves the scrape. */
static pthread_mutex_t metrics_lock = PTHREAD_MUTEX_INITIALIZER; /* guards metrics, n_metrics */
static struct list metrics = LIST_INIT(metrics);
static size_t n_metrics;

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

void metric_register(struct metric *metric)
{
	/* OpenMetrics gives a counter's sample this ending, and readers refuse it without. */
	assert(metric->is_gauge || metric->histogram ||
	       metric_family_len(metric) != strcspn(metric->name, "{"));

	(void)pthread_mutex_lock(&metrics_lock);
	list_push_back(&metrics, &metric->link);
	n_metrics++;
	(void)pthread_mutex_unlock(&metrics_lock);
}

void metric_unregister(struct metric *metric)
{
	(void)pthread_mutex_lock(&metrics_lock);
	n_metrics -= list_linked(&metric->link);
	list_remove(&metric->link);
	(void)pthread_mutex_unlock(&metrics_lock);
}

/* -- A scrape: metrics by name, and their families, each found by its hash ------------------------ */

struct sample {
	struct map_entry by_name;
	const struct metric *metric; /* the first of this name, */
	uint64_t sum;		     /* and what all of it have together */
	struct sample *next;	     /* of the family */
};

struct family {
	struct map_entry by_name;
	struct sample *first, *last;
};

/* What there is of each is in the order in which the first of it was registered. */
struct scrape {
	struct map by_name, by_family;
	struct sample *samples; /* room for one of each metric */
	struct family *families;
	size_t n_samples, n_families;
};

static void scrape_done(struct scrape *scrape)
{
	map_done(&scrape->by_name);
	map_done(&scrape->by_family);
	free(scrape->samples);
	free(scrape->families);
}

static struct sample *sample_find(const struct scrape *scrape, const char *name, uint64_t hash)
{
	struct map_entry *entry = map_find(&scrape->by_name, hash);

	for (; entry; entry = map_find_next(entry)) {
		struct sample *sample = container_of(entry, struct sample, by_name);

		if (!strcmp(sample->metric->name, name))
			return sample;
	}
	return NULL;
}

static struct family *family_find(const struct scrape *scrape, const struct metric *metric,
				  uint64_t hash)
{
	struct map_entry *entry = map_find(&scrape->by_family, hash);
	size_t len = metric_family_len(metric);

	for (; entry; entry = map_find_next(entry)) {
		struct family *family = container_of(entry, struct family, by_name);
		const struct metric *other = family->first->metric;

		if (metric_family_len(other) == len && !memcmp(other->name, metric->name, len))
			return family;
	}
	return NULL;
}

static int family_add(struct scrape *scrape, struct sample *sample)
{
	uint64_t hash = map_hash(sample->metric->name, metric_family_len(sample->metric));
	struct family *family = family_find(scrape, sample->metric, hash);

	if (family) {
		family->last = family->last->next = sample;
		return 0;
	}
	family = &scrape->families[scrape->n_families++];
	family->first = family->last = sample;
	return error_trace(map_add(&scrape->by_family, hash, &family->by_name));
}

static int scrape_add(struct scrape *scrape, const struct metric *metric)
{
	uint64_t hash = map_hash_string(metric->name);
	struct sample *sample = sample_find(scrape, metric->name, hash);
	int r;

	if (sample) {
		sample->sum += metric_get(metric);
		return 0;
	}
	sample = &scrape->samples[scrape->n_samples++];
	sample->metric = metric;
	sample->sum = metric_get(metric);
	r = map_add(&scrape->by_name, hash, &sample->by_name);
	return r ? error_trace(r) : family_add(scrape, sample);
}

/* Under the lock: the names are their owners'. */
static int scrape_all(struct scrape *scrape)
{
	struct metric *metric;
	int r = 0;

	scrape->samples = calloc(n_metrics + 1, sizeof(*scrape->samples));
	scrape->families = calloc(n_metrics + 1, sizeof(*scrape->families));
	if (!scrape->samples || !scrape->families)
		return error_origin(-ENOMEM);
	list_for_each (metric, &metrics, link) {
		r = scrape_add(scrape, metric);
		if (r)
			break;
	}
	return error_trace(r);
}

static void print_sample(FILE *file, const struct sample *sample)
{
	const struct metric *metric = sample->metric;
	uint64_t sum = sample->sum;

	if (metric->is_time)
		(void)fprintf(file, "%s %" PRIu64 ".%09" PRIu64 "\n", metric->name,
			      sum / 1000000000, sum % 1000000000);
	else if (metric->is_gauge)
		(void)fprintf(file, "%s %" PRId64 "\n", metric->name, (int64_t)sum);
	else
		(void)fprintf(file, "%s %" PRIu64 "\n", metric->name, sum);
}

/* The samples of a family stand together, below its name: the format demands it. */
static void print_family(FILE *file, const struct family *family)
{
	const struct metric *metric = family->first->metric;
	int len = (int)metric_family_len(metric);

	(void)fprintf(file, "# TYPE %.*s %s\n", len, metric->name,
		      metric->histogram	 ? "histogram"
		      : metric->is_gauge ? "gauge"
					 : "counter");
	(void)fprintf(file, "# HELP %.*s %s\n", len, metric->name, metric->help);
	for (const struct sample *sample = family->first; sample; sample = sample->next)
		print_sample(file, sample);
}

int metrics_text(char **ret_text)
{
	_cleanup_(scrape_done) struct scrape scrape = { 0 };
	_cleanup_(freep) char *text = NULL;
	size_t len = 0;
	FILE *file;
	bool failed;
	int r;

	file = open_memstream(&text, &len);
	if (!file)
		return error_origin(-ENOMEM);

	(void)pthread_mutex_lock(&metrics_lock);
	r = scrape_all(&scrape);
	for (size_t i = 0; !r && i < scrape.n_families; i++)
		print_family(file, &scrape.families[i]);
	(void)pthread_mutex_unlock(&metrics_lock);
	(void)fputs("# EOF\n", file);

	failed = ferror(file);
	if (fclose(file) != 0 || failed || !text || r)
		return error_origin(-ENOMEM);
	*ret_text = TAKE_PTR(text);
	return 0;
}
