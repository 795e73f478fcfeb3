/*
 * Counts what each node has offered against the number that the node has announced. keep.c,
 * quorum.c and accumulate.c make no sum before all nodes are done.
 */
#include "server/round/offered.h"

#include "server/round/accumulate.h"
#include "server/round/quorum.h"

bool offered_has_contributors(const struct job *job, const struct data_header *header)
{
	return job->retention.resume &&
	       data_has_contributors(&job->stragglers, header->operation, header->part_len);
}

uint32_t offered_result_len(const struct job *job, const struct data_header *header)
{
	return offered_has_contributors(job, header)
		       ? data_contributors_end(header->part_len, job->n_nodes)
		       : header->part_len;
}

bool offered_is_complete(const struct job *job)
{
	return !job->retention.resume || !job->placement.fresh ||
	       !stragglers_any(&job->stragglers) || job->retention.offered;
}

/* The last word: what has waited goes on. */
static void look(struct job *job)
{
	if (offered_is_complete(job))
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!job->nodes[i].offers.complete && !job->nodes[i].departed)
			return;
	job->retention.offered = true;
	job_hold(job);
	if (quorum_offered(job))
		sweep(job, SWEEP_NEWS);
	job_let_go(job);
}

/*
 * Those of a later attach come again from the start. Returns false for what belongs to an earlier
 * one.
 */
static bool is_of_now(struct offers *offers, const struct data_header *header)
{
	uint32_t attachment = header->attachment, ahead = attachment - offers->attachment;

	if (ahead > UINT32_MAX / 2)
		return false;
	if (ahead)
		*offers = (struct offers){ .attachment = attachment, .complete = offers->complete };
	return true;
}

static void count(struct job *job, struct offers *offers)
{
	offers->complete |= offers->said && offers->n >= offers->due;
	look(job);
}

void offered_offer(struct job *job, const struct data_header *header)
{
	struct offers *offers = &job->nodes[header->node].offers;

	if (!is_of_now(offers, header))
		return;
	offers->n++;
	count(job, offers);
}

void offered_said(struct job *job, uint32_t node, const struct data_header *header)
{
	struct offers *offers = &job->nodes[node].offers;

	if (!is_of_now(offers, header))
		return;
	offers->said = true;
	offers->due = header->n_offers;
	count(job, offers);
}

void offered_departed(struct job *job)
{
	look(job);
}

void offered_attached(struct job *job, uint32_t node)
{
	struct offers *offers = &job->nodes[node].offers;

	*offers = (struct offers){ .complete = offers->complete };
}
