/*
 * A job with a quorum, or an asynchronous one, that outlives its daemons' processes (bps-recovery(7), STRAGGLERS). Servers hold
 * what nobody else has: contributions that came too late for their round, and sums that accumulate. So each result says whose
 * contributions have been in it or before (data_contributors), and is retained here for longer than others: with what this node
 * contributed to it too late, until that is in another; and, of what accumulates, the last of each part. A server that is fresh
 * is offered all of it, and told when that was all.
 */
#include "agent/round/part.h"
#include "proto/data.h"

static bool has_contributors(const struct agent_job *job, unsigned operation, uint32_t len)
{
	return job->retention.keeps &&
	       data_has_contributors(&job->shape.stragglers, operation, len);
}

uint32_t agent_contributors_result_len(const struct agent_job *job, unsigned operation,
				       uint32_t len)
{
	return has_contributors(job, operation, len)
		       ? data_contributors_end(len, job->shape.n_nodes)
		       : len;
}

static bool has_round(const struct agent_job *job, const struct data_contributors *contributors,
		      uint64_t round)
{
	uint64_t newest = le64toh(contributors->round);

	return round <= newest && newest - round < 64 &&
	       le64toh(contributors->nodes[job->shape.node]) >> (newest - round) & 1;
}

bool agent_contributors_read(const struct agent_job *job, const struct ledger_what *what,
			     const void *result, uint32_t *ret_n, bool *ret_has_ours)
{
	const struct data_contributors *contributors = data_contributors_of(result, what->len);

	if (!has_contributors(job, what->operation, what->len))
		return false;
	*ret_n = (uint32_t)le64toh(contributors->n);
	*ret_has_ours = what->operation == OPERATION_ACCUMULATE ||
			has_round(job, contributors, what->round);
	return true;
}

/* -- What is kept ------------------------------------------------------------------------------------------------- */

/* What we had contributed to it is in another result, which is here. */
static void used(struct agent_job *job, struct ledger_kept *kept)
{
	uint32_t retained = ledger_result_number(job->resumption.ledger, kept);

	ledger_result_used(job->resumption.ledger, retained);
	ledger_result_unindex(job->resumption.ledger, retained);
	if (kept->released && !kept->stale && !kept->busy)
		agent_keep_free(job, retained);
}

void agent_contributors_stored(struct agent_job *job, uint32_t retained)
{
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained), *other,
			   *next;
	bool accumulates = kept->what.operation == OPERATION_ACCUMULATE;
	const struct ledger_what *what = &kept->what;
	const struct data_contributors *contributors;

	if (!has_contributors(job, what->operation, what->len))
		return;
	contributors = data_contributors_of(
		ledger_result_data(job->resumption.ledger, retained, what->len), what->len);
	for (other = ledger_result_next(job->resumption.ledger, what, NULL); other; other = next) {
		next = ledger_result_next(job->resumption.ledger, what, other);
		if (other == kept || other->busy)
			continue;
		if (accumulates && other->what.round < what->round &&
		    other->what.operation == OPERATION_ACCUMULATE)
			agent_keep_free(job, ledger_result_number(job->resumption.ledger, other));
		else if (!accumulates && other->late &&
			 has_round(job, contributors, other->what.round))
			used(job, other);
	}
	/* Without memory it is kept to the end of the job. */
	if (accumulates || kept->late)
		(void)ledger_result_index(job->resumption.ledger, retained);
	/* Then there will be no memory for parts that wait, either. */
	if (agent_contributors_is_full(job))
		agent_keep_feed(job);
}

bool agent_contributors_is_full(const struct agent_job *job)
{
	return ledger_results_full(job->resumption.ledger);
}

/* -- What a server is offered -------------------------------------------------------------------------------------- */

static void say_offered(struct agent_server *server)
{
	struct agent_job *job = server->job;
	struct data_header header = {
		.op = DATA_OFFERED,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->placement.data_epoch,
		.n_offers = server->n_offered,
		.attachment = server->attachment,
	};

	if (!server->attached || server->n_pending || job->state == JOB_OVER)
		return;
	peer_tell(server->send_queue->peer, &header, NULL);
}

void agent_contributors_attached(struct agent_server *server)
{
	struct agent_job *job = server->job;

	if (!stragglers_any(&job->shape.stragglers))
		return;
	/* Until all others are offered, too. */
	server->n_pending = 1;
	for (uint32_t i = 0; i < ledger_results_used(job->resumption.ledger); i++) {
		struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, i);

		if (!kept->taken || agent_keep_owner(job, kept) != server)
			continue;
		/* Under way to where it was before, or being made whole. */
		kept->pending = kept->offered || (kept->busy && !kept->stale);
		server->n_pending += kept->pending;
	}
}

void agent_contributors_offered(struct agent_server *server)
{
	if (!stragglers_any(&server->job->shape.stragglers))
		return;
	server->n_pending--;
	say_offered(server);
}

void agent_contributors_resolve(struct agent_job *job, uint32_t retained)
{
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained);
	struct agent_server *server;

	if (!kept->pending)
		return;
	kept->pending = false;
	server = agent_keep_owner(job, kept);
	server->n_pending--;
	say_offered(server);
}
