/*
 * Counts what each node has offered against the number that the node has announced. keep.c,
 * quorum.c and accumulate.c make no sum before all nodes are done.
 */
#include "server/round/offered.h"

#include "server/round/accumulate.h"
#include "server/round/quorum.h"

/* Parts that are looked at in one go, and what is carried of them. */
#define OFFERED_STEP 512

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
	       !stragglers_any(&job->stragglers) || job->retention.offers == OFFERS_COMBINED;
}

bool offered_is_combining(const struct job *job)
{
	return !offered_is_complete(job) && job->retention.offers == OFFERS_COMBINING;
}

bool offered_is_over(const struct job *job)
{
	return offered_is_complete(job) || offered_is_combining(job);
}

/* A job may have a hundred thousand parts. Returns whether there are more. */
static bool step(struct job *job)
{
	struct list **at = &job->retention.combining_at;

	for (uint64_t n = 0; *at != &job->store.parts; n++) {
		struct part *part = container_of(*at, struct part, in_job);

		if (n >= OFFERED_STEP)
			return true;
		*at = part->in_job.next;
		n += part->n_carried;
		if (!quorum_offered(job, part))
			return false;
	}
	job->retention.offers = OFFERS_COMBINED;
	sweep(job, SWEEP_NEWS);
	return false;
}

static bool on_step(struct chore *chore)
{
	struct job *job = container_of(chore, struct job, retention.combining);
	bool more;

	if (job->state != JOB_RUNNING)
		return false;
	job_hold(job);
	more = step(job);
	job_let_go(job);
	return more;
}

/* The last word: what has waited goes on. */
static void look(struct job *job)
{
	if (offered_is_over(job))
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!job->nodes[i].offers.complete && !job->nodes[i].departed)
			return;
	job->retention.offers = OFFERS_COMBINING;
	job->retention.combining_at = job->store.parts.next;
	job->retention.combining.step = on_step;
	if (on_step(&job->retention.combining))
		loop_begin(job->server->params.loop, &job->retention.combining);
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
