/* Prints where an error passes, at log level debug, and writes the text of a struct failure. */
#include "base/error.h"

#include "base/log.h"
#include "proto/text.h"
#include <stdarg.h>
#include <stdio.h>

static const char *error_describe(int r)
{
	const char *text;

	if (r >= 0)
		return "outcome that nobody handled";
	text = strerrordesc_np(-r);
	return text ? text : "unknown error";
}

_noinline_ int error_trace_at(int r, const char *file, int line, const char *function)
{
	if (likely(log_get_level() < LOG_LEVEL_DEBUG) || r == 0)
		return r;

	/* The build runs below the tree: what __FILE__ says starts with "../". */
	while (!strncmp(file, "../", 3))
		file += 3;
	log_line(LOG_LEVEL_DEBUG, "error %d (%s) in %s() at %s:%d", r, error_describe(r), function,
		 file, line);
	return r;
}

int failure_set(struct failure *failure, int status, const char *format, ...)
{
	va_list args;

	assert(status < 0);

	failure->status = status;
	va_start(args, format);
	if (vsnprintf(failure->text, sizeof(failure->text), format, args) < 0)
		failure->text[0] = '\0';
	/* A failure may hold words of others, and ends up with trainers, peers and operators. */
	text_make_plain(failure->text, strlen(failure->text));
	va_end(args);
	return status;
}
