/*
 * Words about ranks, servers and times, for errors and logs. Private to pipeline/.
 */
#pragma once

#include "base/error.h"

struct pipeline_job;

/* report.c: "rank 3", "ranks 1, 4 and 7 more". */
struct pipeline_ranks_text {
	char text[128];
	size_t len;
	unsigned n, n_more;
};
void pipeline_ranks_add(struct pipeline_ranks_text *ranks, uint32_t rank);
const char *pipeline_ranks_end(struct pipeline_ranks_text *ranks);
/* "node b (10.88.0.2:9690)", or, without a connection, "node b". */
const char *pipeline_server_name(const struct pipeline_job *job, size_t server);
/* "60 s", "1.5 s", "20 ms". */
const char *pipeline_time_text(char text[32], uint64_t ns);
