/*
 * Log lines, to the journal when stderr is the journal's stream, else to stderr. Process-wide; set up once before
 * threads start. Any thread may log. A slow reader never stops the caller: lines that do not fit are dropped and
 * counted, and the next line that fits says how many. Lower case, the object first, the exact cause.
 */
#pragma once

#include "proto/c.h"

enum log_level {
	LOG_LEVEL_ERROR = 3,
	LOG_LEVEL_WARNING = 4,
	LOG_LEVEL_NOTICE = 5,
	LOG_LEVEL_INFO = 6,
	LOG_LEVEL_DEBUG = 7,
};

void log_init(int level);
void log_set_level(int level);
int log_get_level(void);
/* Parses "error" ... "debug". Returns 0 or -EINVAL. */
int log_level_parse(const char *text, int *ret_level);
void log_line(int level, const char *format, ...) _printf_(2, 3);

#define log_error(...)	 log_line(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_line(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)	 log_line(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)	 log_line(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)                                            \
	do {                                                      \
		if (unlikely(log_get_level() >= LOG_LEVEL_DEBUG)) \
			log_line(LOG_LEVEL_DEBUG, __VA_ARGS__);   \
	} while (0)
