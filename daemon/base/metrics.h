/*
 * Counters and gauges that modules register and admin/ reads. Registration happens before threads start or on the
 * control thread; adding is one relaxed atomic on the caller's own counter and may happen on any thread, metric_count() and
 * metric_uncount() on one thread alone. Metrics that share a name are added up in the text, so each owner has its own.
 */
#pragma once

#include "base/list.h"
#include "proto/c.h"
#include <stdatomic.h>

struct metric {
	const char *name; /* "bps_bytes_sent_total"; a counter must end so; may end in {labels} */
	const char *help;
	bool is_gauge;
	bool is_time; /* the value is in ns, and told in seconds */
	const char *
		histogram; /* this is a sample of the histogram of that name: _bucket{le=...}, _count or _sum */
	_Atomic uint64_t value;
	struct list link;
};

#define METRIC_COPIED                                                             \
	{                                                                         \
		.name = "bps_copied_bytes_total",                                 \
		.help = "Bytes of payloads that a CPU has copied in this process" \
	}

void metric_register(struct metric *metric);
void metric_unregister(struct metric *metric);

static inline void metric_add(struct metric *metric, uint64_t amount)
{
	atomic_fetch_add_explicit(&metric->value, amount, memory_order_relaxed);
}

static inline void metric_sub(struct metric *metric, uint64_t amount)
{
	atomic_fetch_sub_explicit(&metric->value, amount, memory_order_relaxed);
}

/* memcpy(), and how much: of payloads. Each owner's is called METRIC_COPIED. */
static inline void metric_copy(struct metric *metric, void *to, const void *from, size_t len)
{
	memcpy(to, from, len);
	metric_add(metric, len);
}

/* The same for a metric that one thread alone changes: these wait for no store before them. */
static inline void metric_count(struct metric *metric, uint64_t amount)
{
	uint64_t value = atomic_load_explicit(&metric->value, memory_order_relaxed);

	atomic_store_explicit(&metric->value, value + amount, memory_order_relaxed);
}

static inline void metric_uncount(struct metric *metric, uint64_t amount)
{
	metric_count(metric, -amount);
}

static inline uint64_t metric_get(const struct metric *metric)
{
	return atomic_load_explicit(&metric->value, memory_order_relaxed);
}

/* All registered metrics as OpenMetrics text, in newly allocated memory (free() it). Returns 0 or -ENOMEM. */
int metrics_text(char **ret_text);
