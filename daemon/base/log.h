/*
 * Log lines, to the journal when stderr is the journal's stream, else to stderr. Process-wide; set up once before
 * threads start. Any thread may log. A slow reader never stops the caller: lines that do not fit are dropped and
 * counted, and the next line that fits says how many. The log is the machine's, and what happens to others has to stay in it
 * beside a trainer or peer that can make some place in the code log: each place has LOG_BURST lines at once and one each
 * LOG_INTERVAL_NS after them. Lines beyond that are counted, and said before the place's next line. Debug lines are all there.
 * Lower case, the object first, the exact cause.
 */
#pragma once

#include "base/clock.h"

#define LOG_BURST	200
#define LOG_INTERVAL_NS (50 * NSEC_PER_MSEC)

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

/* A place in the code that logs. Zero: no line has come yet. */
struct log_place {
	/* When its lines would all have come, at one each LOG_INTERVAL_NS. */
	_Atomic uint64_t due_ns;
	_Atomic uint64_t n_omitted;
};

/* Whether a line of this level is written now: if not, and the level is one that is logged, the line is counted. Any thread. */
bool log_passes(struct log_place *place, int level);

#define log_at(level, ...)                              \
	do {                                            \
		static struct log_place log_place;      \
		if (log_passes(&log_place, level))      \
			log_line((level), __VA_ARGS__); \
	} while (0)
#define log_error(...)	 log_at(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_at(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)	 log_at(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)	 log_at(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)                                            \
	do {                                                      \
		if (unlikely(log_get_level() >= LOG_LEVEL_DEBUG)) \
			log_line(LOG_LEVEL_DEBUG, __VA_ARGS__);   \
	} while (0)
