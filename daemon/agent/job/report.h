/*
 * Words about ranks, servers and times, for errors and logs. Private to agent/.
 */
#pragma once

#include "base/error.h"

struct agent_job;

/* report.c: "rank 3", "ranks 1, 4 and 7 more". */
struct agent_ranks_text {
	char text[128];
	size_t len;
	unsigned n, n_more;
};
void agent_ranks_add(struct agent_ranks_text *ranks, uint32_t rank);
const char *agent_ranks_end(struct agent_ranks_text *ranks);
/* "node b (10.88.0.2:9690)", or, without a connection, "node b". */
const char *agent_server_name(const struct agent_job *job, size_t server);
/* "60 s", "1.5 s", "20 ms". */
const char *agent_time_text(char text[32], uint64_t ns);
