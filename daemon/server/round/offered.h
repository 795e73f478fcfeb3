/*
 * A job with a quorum, or an asynchronous one, that had begun before this server knew of it (bps-recovery(7), STRAGGLERS): what
 * a sum is made of depends on what has been in others, and that only nodes know. So none is made before each node has offered
 * what it keeps, and said how much that is. The other half of this file is about how they know: data_contributors. Control thread only.
 */
#pragma once

#include "server/job/job.h"

/* Whether sums may be made. */
bool offered_is_complete(const struct job *job);
/* Whether all have offered, and sums may be made once that is put together: in a moment. */
bool offered_is_combining(const struct job *job);
/* Whether what nodes offer counts no more: all have. */
bool offered_is_over(const struct job *job);
/* An OFFER has come and been looked at; a node has said how many it has made. May end the job. */
void offered_offer(struct job *job, const struct data_header *header);
void offered_said(struct job *job, uint32_t node, const struct data_header *header);
/* Nobody waits for what this node keeps. May end the job. */
void offered_departed(struct job *job);
/* The node speaks by another connection: it begins anew. */
void offered_attached(struct job *job, uint32_t node);

/* Whether results of a part say who is in them. */
bool offered_has_contributors(const struct job *job, const struct data_header *header);
/* Bytes of such a result, or of any other. */
uint32_t offered_result_len(const struct job *job, const struct data_header *header);
