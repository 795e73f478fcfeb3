/*
 * A table of jobs, as operators are told of them: what agent and server know of a job is one line.
 * They are the same job by their number or, as long as one of the two does not know that, by their
 * name. Lives as long as the table is made. Control thread only.
 */
#pragma once

#include "base/map.h"

struct job_line {
	const char *name; /* borrowed */
	uint64_t number;  /* 0: not known yet */
	struct map_entry by_number, by_name, unnumbered;
};

/* Of each number and name the first line; and of each name the first that has no number. */
struct job_lines {
	struct map by_number, by_name, unnumbered;
	struct job_line *lines;
	size_t n;
};

/* For n_max jobs at most. Returns 0 or -ENOMEM; job_lines_done() in any case. */
int job_lines_init(struct job_lines *lines, size_t n_max);
void job_lines_done(struct job_lines *lines);
/*
 * The line of a job of the agent, or of one of the server, which come after those: a new one when
 * *ret_line is what lines->n was. Return 0 or -ENOMEM.
 */
int job_lines_agent(struct job_lines *lines, const char *name, uint64_t number, size_t *ret_line);
int job_lines_server(struct job_lines *lines, const char *name, uint64_t number, size_t *ret_line);
