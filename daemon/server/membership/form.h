/*
 * At the home of a job nodes come, disagree, are late; the job gets its number and placement. Any
 * of the functions may end the job. Control thread only.
 */
#pragma once

#include "base/error.h"

struct delivery;
struct job;
struct peer;
struct server;

/* At the home: what nodes have said in their JOINs, and the answer. */
struct forming {
	uint32_t epoch, part_bytes;
	uint64_t view_digest;
	uint64_t timeout_ms, since_ns; /* of the first JOIN */
	uint32_t asked_part_bytes;
	void *answer; /* of a job that outlives its daemons' processes, and of one that regrouped; or NULL */
	size_t answer_len;
};

void form_join(struct server *server, struct delivery *delivery);
void form_expired(struct job *job);
/* All nodes are here, and their joins kept: gives the job its number and placement, and answers. Returns 0 or -errno with words. */
int form_finish(struct job *job, struct failure *failure);
void form_lost(struct job *job, const struct peer *peer);
