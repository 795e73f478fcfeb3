/*
 * Errors inside the daemon. 0 is done; negative is -errno, something is broken, pass it up unchanged; positive is an
 * outcome that the called function's header lists, which the caller handles and never passes on.
 *
 * error_origin() marks where an error is born, error_trace() where it passes, error_fold() where a positive outcome
 * cannot be handled and becomes -ENOTRECOVERABLE. With tracing on (log level debug) each prints file, line and
 * function; success costs nothing.
 */
#pragma once

#include "proto/c.h"

_cold_ int error_trace_at(int r, const char *file, int line, const char *function);

#define error_origin(r) error_trace_at((r), __FILE__, __LINE__, __func__)
#define error_trace(r)                                                                           \
	({                                                                                       \
		int error_r_ = (r);                                                              \
		unlikely(error_r_) ? error_trace_at(error_r_, __FILE__, __LINE__, __func__) : 0; \
	})
#define error_fold(r)                                                                            \
	({                                                                                       \
		int error_f_ = (r);                                                              \
		unlikely(error_f_ > 0) ? error_origin(-ENOTRECOVERABLE) : error_trace(error_f_); \
	})

/* An error with words for whoever caused it: status is a negative errno, or 0 while text is empty. */
struct failure {
	int status;
	char text[448];
};

/* Fills a failure (negative errno and format). Returns status, so that it can be returned at once. */
_cold_ int failure_set(struct failure *failure, int status, const char *format, ...) _printf_(3, 4);
