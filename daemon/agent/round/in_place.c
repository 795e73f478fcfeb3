/*
 * Results in place: a server in this process makes the result of a part where the agent retains it.
 * So the result is not copied there, and is kept before any node is answered: bps-recovery(7),
 * THROUGH SERVERS. A result that is freed meanwhile is not used again before the server has
 * released its block.
 */
#include "agent/round/part.h"
#include "base/memory/block.h"

struct in_place_result {
	struct block block;
	struct mail mail;
	struct list link; /* the job's in_place or spare_in_place */
	struct agent_job *job;
	uint32_t retained;
};

static void on_back(struct mail *mail)
{
	struct in_place_result *result = container_of(mail, struct in_place_result, mail);
	struct agent_job *job = result->job;
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, result->retained);

	list_remove(&result->link);
	list_push_front(&job->retention.spare_in_place, &result->link);
	kept->in_place = false;
	if (!job->resumption.suspended && !kept->taken && !kept->offered)
		agent_keep_free(job, result->retained);
	agent_job_release(job);
}

/* On whatever thread has sent the last of it. */
static void on_gone(struct block *block)
{
	struct in_place_result *result = container_of(block, struct in_place_result, block);

	loop_post(result->job->agent->params.loop, &result->mail);
}

static struct in_place_result *in_place_new(struct agent_job *job)
{
	struct in_place_result *result =
		list_first(&job->retention.spare_in_place, struct in_place_result, link);

	if (result) {
		list_remove(&result->link);
		return result;
	}
	result = calloc(1, sizeof(*result));
	if (!result)
		return NULL;
	result->job = job;
	result->mail.run = on_back;
	return result;
}

static void result_free(struct in_place_result *result)
{
	list_remove(&result->link);
	free(result);
}

void agent_in_place_done(struct agent_job *job)
{
	struct in_place_result *result, *next;

	/* Only where the daemon ends: each holds the job. */
	list_for_each_safe (result, next, &job->retention.in_place, link) {
		loop_unpost(job->agent->params.loop, &result->mail);
		result_free(result);
	}
	list_for_each_safe (result, next, &job->retention.spare_in_place, link)
		result_free(result);
}

/* Whether the server's answer is the part's result: nothing has failed, or begun anew, since the part left. */
static bool counts(const struct agent_part *part)
{
	return !part->job->resumption.suspended && part->job->state == JOB_RUNNING &&
	       !part->round->failure.status &&
	       part->attachment == agent_part_server(part)->attachment;
}

struct block *agent_in_place(struct call *call, uint32_t len)
{
	struct agent_part *part = container_of(call, struct agent_part, call);
	struct agent_job *job = part->job;
	struct ledger_kept *kept;
	struct in_place_result *result;
	uint32_t retained;

	/* Little is copied faster than made in place. */
	if (len <= LEDGER_SMALL_BYTES || len != part->extent.len || len > call->target_len ||
	    part->retained != LEDGER_NO_RESULT || part->round->gate.on || !counts(part))
		return NULL;
	retained = ledger_result_take(job->resumption.ledger, true);
	if (retained == LEDGER_NO_RESULT)
		return NULL;
	result = in_place_new(job);
	if (!result) {
		ledger_result_free(job->resumption.ledger, retained);
		return NULL;
	}
	list_push_back(&job->retention.in_place, &result->link);
	agent_job_hold(job);
	result->retained = part->retained = retained;
	agent_part_name_retained(part);
	kept = ledger_result_kept(job->resumption.ledger, retained);
	kept->taken = kept->busy = kept->in_place = true;
	block_borrow(&result->block, ledger_result_data(job->resumption.ledger, retained, len), len,
		     on_gone);
	return &result->block;
}

bool agent_in_place_filled(struct call *call)
{
	struct agent_part *part = container_of(call, struct agent_part, call);

	if (!counts(part) || part->retained == LEDGER_NO_RESULT)
		return false;
	ledger_result_whole(part->job->resumption.ledger, part->retained);
	return true;
}
