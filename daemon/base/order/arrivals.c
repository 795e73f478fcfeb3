/*
 * Times at which members of a job come to its rounds, and the judgement, window by window, which
 * of them are late. The agent has such a record of its ranks, the server one of a job's nodes;
 * both show up in metrics and bpsctl.
 */
#include "base/order/arrivals.h"

#include "base/error.h"
#include "base/log.h"
#include <stdio.h>

#define NSEC_PER_SEC 1000000000ull

struct arrival {
	uint32_t number;
	bool is_late;
	unsigned streak; /* windows in a row in which that was otherwise */
	uint64_t held_until_ns;
	uint64_t window_last, window_held_ns;
	char names[3][160];
	struct metric last, held, late;
};

struct arrivals {
	char job[64], what[16];
	struct arrivals_spread *spread;
	uint64_t n_rounds;
	uint64_t window_ns, window_rounds; /* when it began, or 0 */
	uint32_t n, n_measured;		   /* all, or none, have metrics */
	struct arrival all[];
};

static _Atomic uint32_t n_measured_all; /* of this process */

static const struct {
	uint64_t ns;
	const char *seconds;
} bounds[ARRIVALS_BUCKETS] = {
	{ 100 * 1000ull, "0.0001" },	 { 1000 * 1000ull, "0.001" },
	{ 10 * 1000 * 1000ull, "0.01" }, { 100 * 1000 * 1000ull, "0.1" },
	{ NSEC_PER_SEC, "1.0" },	 { 10 * NSEC_PER_SEC, "10.0" },
	{ UINT64_MAX, "+Inf" },
};

void arrivals_spread_init(struct arrivals_spread *spread, const char *name, const char *help)
{
	char(*names)[80] = spread->names;

	for (unsigned i = 0; i < ARRIVALS_BUCKETS; i++)
		(void)snprintf(names[i], sizeof(names[i]), "%s_bucket{le=\"%s\"}", name,
			       bounds[i].seconds);
	(void)snprintf(names[ARRIVALS_BUCKETS], sizeof(names[0]), "%s_count", name);
	(void)snprintf(names[ARRIVALS_BUCKETS + 1], sizeof(names[0]), "%s_sum", name);
	for (unsigned i = 0; i < ARRIVALS_BUCKETS + 2; i++) {
		spread->metrics[i] = (struct metric){
			.name = names[i],
			.help = help,
			.histogram = name,
			.is_time = i == ARRIVALS_BUCKETS + 1,
		};
		metric_register(&spread->metrics[i]);
	}
}

void arrivals_spread_done(struct arrivals_spread *spread)
{
	for (unsigned i = 0; i < ARRIVALS_BUCKETS + 2; i++)
		metric_unregister(&spread->metrics[i]);
}

static void spread_add(struct arrivals_spread *spread, uint64_t ns)
{
	for (unsigned i = 0; i < ARRIVALS_BUCKETS; i++)
		if (ns <= bounds[i].ns)
			metric_count(&spread->metrics[i], 1);
	metric_count(&spread->metrics[ARRIVALS_BUCKETS], 1);
	metric_count(&spread->metrics[ARRIVALS_BUCKETS + 1], ns);
}

static void measure(struct arrivals *arrivals, struct arrival *one)
{
	static const struct {
		const char *name, *help;
	} about[] = {
		{ "last_total", "Rounds of tensors to which this one of the job came last." },
		{ "held_seconds_total",
		  "Time that the others of the job waited for this one alone." },
		{ "late_seconds",
		  "How long behind the first it comes to a round, on average of late." },
	};
	struct metric *metrics[] = { &one->last, &one->held, &one->late };

	for (size_t i = 0; i < ARRAY_SIZE(about); i++) {
		(void)snprintf(one->names[i], sizeof(one->names[i]),
			       "bps_%s_%s{job=\"%s\",%s=\"%u\"}", arrivals->what, about[i].name,
			       arrivals->job, arrivals->what, one->number);
		*metrics[i] = (struct metric){
			.name = one->names[i],
			.help = about[i].help,
			.is_gauge = metrics[i] == &one->late,
			.is_time = metrics[i] != &one->last,
		};
		metric_register(metrics[i]);
	}
}

size_t arrivals_len(uint32_t n)
{
	return sizeof(struct arrivals) + n * sizeof(struct arrival);
}

int arrivals_new(const char *job, const char *what, const uint32_t *numbers, uint32_t n,
		 struct arrivals_spread *spread, struct arrivals **ret_arrivals)
{
	struct arrivals *arrivals = calloc(1, arrivals_len(n));
	uint32_t used = n_measured_all;

	if (!arrivals)
		return error_origin(-ENOMEM);
	(void)snprintf(arrivals->job, sizeof(arrivals->job), "%s", job);
	(void)snprintf(arrivals->what, sizeof(arrivals->what), "%s", what);
	arrivals->spread = spread;
	arrivals->n = n;
	if (n <= ARRIVALS_MEASURED_MAX && used + 4 * n <= ARRIVALS_MEASURED_ALL)
		arrivals->n_measured = n;
	n_measured_all += arrivals->n_measured;
	for (uint32_t i = 0; i < n; i++) {
		arrivals->all[i].number = numbers ? numbers[i] : i;
		if (arrivals->n_measured)
			measure(arrivals, &arrivals->all[i]);
	}
	*ret_arrivals = arrivals;
	return 0;
}

struct arrivals *arrivals_free(struct arrivals *arrivals)
{
	if (!arrivals)
		return NULL;
	for (uint32_t i = 0; i < arrivals->n; i++) {
		metric_unregister(&arrivals->all[i].last);
		metric_unregister(&arrivals->all[i].held);
		metric_unregister(&arrivals->all[i].late);
	}
	n_measured_all -= arrivals->n_measured;
	free(arrivals);
	return NULL;
}

void arrivals_came(struct arrivals *arrivals, uint32_t index, uint64_t late_ns)
{
	struct metric *late = &arrivals->all[index].late;

	/* This thread alone writes it. */
	atomic_store_explicit(&late->value, arrivals_average(metric_get(late), late_ns),
			      memory_order_relaxed);
}

static double seconds(uint64_t ns)
{
	return (double)ns / NSEC_PER_SEC;
}

static void judge(struct arrivals *arrivals, struct arrival *one, uint64_t len_ns)
{
	bool is_late = one->window_last > arrivals->window_rounds / 2 &&
		       one->window_held_ns >= len_ns / 10;

	one->streak = is_late == one->is_late ? 0 : one->streak + 1;
	if (one->streak < ARRIVALS_WINDOWS)
		return;
	one->streak = 0;
	one->is_late = is_late;
	if (is_late)
		log_notice(
			"job %s: %s %u is late: of the last %.0f s the others waited %.1f s for it "
			"alone, and it was last in %.0f %% of the rounds",
			arrivals->job, arrivals->what, one->number, seconds(len_ns),
			seconds(one->window_held_ns),
			100.0 * (double)one->window_last / (double)arrivals->window_rounds);
	else
		log_notice("job %s: %s %u is late no more", arrivals->job, arrivals->what,
			   one->number);
}

/* The window is over: what was measured in it is judged. */
static void window_end(struct arrivals *arrivals, uint64_t now_ns)
{
	uint64_t len_ns = now_ns - arrivals->window_ns;

	for (uint32_t i = 0; i < arrivals->n; i++) {
		struct arrival *one = &arrivals->all[i];

		judge(arrivals, one, len_ns);
		one->window_last = one->window_held_ns = 0;
	}
	arrivals->window_ns = now_ns;
	arrivals->window_rounds = 0;
}

void arrivals_complete(struct arrivals *arrivals, uint32_t last, uint64_t first_ns,
		       uint64_t before_ns, uint64_t now_ns)
{
	struct arrival *one = &arrivals->all[last];
	/* Tensors are waited for side by side: of times that overlap each moment counts once. */
	uint64_t from_ns = MAX(before_ns, one->held_until_ns);
	uint64_t held_ns = now_ns > from_ns ? now_ns - from_ns : 0;

	spread_add(arrivals->spread, now_ns - first_ns);
	arrivals->n_rounds++;
	arrivals->window_rounds++;
	one->held_until_ns = now_ns;
	one->window_last++;
	one->window_held_ns += held_ns;
	metric_count(&one->last, 1);
	metric_count(&one->held, held_ns);
	if (!arrivals->window_ns)
		arrivals->window_ns = now_ns;
	else if (now_ns - arrivals->window_ns >= ARRIVALS_WINDOW_NS)
		window_end(arrivals, now_ns);
}

void arrivals_info(const struct arrivals *arrivals, struct arrivals_info *ret_infos)
{
	for (uint32_t i = 0; i < arrivals->n; i++) {
		const struct arrival *one = &arrivals->all[i];

		ret_infos[i] = (struct arrivals_info){
			.number = one->number,
			.is_late = one->is_late,
			.n_rounds = arrivals->n_rounds,
			.n_last = metric_get(&one->last),
			.late_ns = metric_get(&one->late),
			.held_ns = metric_get(&one->held),
		};
	}
}

uint32_t arrivals_n(const struct arrivals *arrivals)
{
	return arrivals->n;
}
