/*
 * What the commands of bps-bench share: errors, options in sizes and numbers, quantiles, the
 * JSON file.
 */
#include "bench/bench.h"
#include <stdarg.h>

static void complain(const char *format, va_list args)
{
	fputs("bps-bench: ", stderr);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
}

void bench_die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	complain(format, args);
	va_end(args);
	exit(1);
}

void bench_usage(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	complain(format, args);
	va_end(args);
	fputs("Try \"bps-bench --help\".\n", stderr);
	exit(2);
}

void bench_check(int r)
{
	if (r < 0)
		bench_die("%s", bps_error());
}

static uint64_t size_prefix(const char *option, const char *text, const char **ret_end)
{
	char *end;
	unsigned long long value;
	unsigned shift = 0;

	errno = 0;
	value = strtoull(text, &end, 10);
	if (end == text || *text == '-' || errno || !value)
		bench_usage("%s: \"%s\" is not a size: a number above 0, with K, M or G", option,
			    text);
	if (*end == 'K' || *end == 'M' || *end == 'G')
		shift = *end == 'K' ? 10 : *end == 'M' ? 20 : 30, end++;
	if (value > UINT64_MAX >> shift)
		bench_usage("%s: \"%s\" is too large", option, text);
	*ret_end = end;
	return (uint64_t)value << shift;
}

uint64_t bench_size(const char *option, const char *text)
{
	const char *end;
	uint64_t value = size_prefix(option, text, &end);

	if (*end)
		bench_usage("%s: \"%s\" is not a size: a number above 0, with K, M or G", option,
			    text);
	return value;
}

double bench_real(const char *option, const char *text)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || *end || !(value >= 0) || value > 1e9)
		bench_usage("%s: \"%s\" is not a number from 0 on", option, text);
	return value;
}

size_t bench_sizes(const char *option, const char *text, uint64_t sizes[BENCH_CHOICES])
{
	const char *end;
	size_t n = 0;

	sizes[n++] = size_prefix(option, text, &end);
	if (*end == ':') {
		uint64_t last = size_prefix(option, end + 1, &end), factor = 2;

		if (*end == ':')
			factor = size_prefix(option, end + 1, &end);
		if (*end || factor < 2)
			bench_usage("%s: \"%s\" is not FROM:TO:FACTOR", option, text);
		for (; sizes[n - 1] <= last / factor; n++) {
			if (n == BENCH_CHOICES)
				bench_usage("%s: more than %d sizes", option, BENCH_CHOICES);
			sizes[n] = sizes[n - 1] * factor;
		}
		return n;
	}
	for (; *end == ','; n++) {
		if (n == BENCH_CHOICES)
			bench_usage("%s: more than %d sizes", option, BENCH_CHOICES);
		sizes[n] = size_prefix(option, end + 1, &end);
	}
	if (*end)
		bench_usage("%s: \"%s\" is not a list of sizes", option, text);
	return n;
}

const char *bench_size_text(uint64_t bytes, struct bench_size_text *ret_text)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB" };
	size_t unit = 0;

	while (unit + 1 < ARRAY_SIZE(units) && bytes >= 1024 && bytes % 1024 == 0) {
		bytes /= 1024;
		unit++;
	}
	(void)snprintf(ret_text->text, sizeof(ret_text->text), "%llu %s", (unsigned long long)bytes,
		       units[unit]);
	return ret_text->text;
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

int64_t bench_quantile(int64_t *values, size_t n, double share)
{
	size_t at = (size_t)((double)n * share);

	qsort(values, n, sizeof(*values), compare);
	return values[MIN(at, n - 1)];
}

FILE *bench_json_open(const char *path)
{
	FILE *file;

	if (!path)
		return NULL;
	file = strcmp(path, "-") ? fopen(path, "we") : stdout;
	if (!file)
		bench_die("cannot write %s: %m", path);
	return file;
}

void bench_json_close(FILE *json)
{
	if (json && (fflush(json) || ferror(json) || (json != stdout && fclose(json))))
		bench_die("cannot write the JSON file: %m");
}
