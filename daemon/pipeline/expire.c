/*
 * Rounds that are given up: cancelled by a rank, over their deadline, with words on who or what is missing, or left by a
 * rank that goes. job.c calls it, by its timer and when a member leaves; pipeline_cancel() is pipeline.h's, for control/.
 */
#include "pipeline/device.h"
#include "pipeline/part.h"
#include "pipeline/round.h"
#include <stdio.h>

static struct pipeline_job *job_of(const struct pipeline_round *round)
{
	return round->job;
}

void pipeline_cancel(struct pipeline_request *request)
{
	struct pipeline_round *round = request->in;
	struct failure failure;

	if (!round || round->failure.status || round->state == ROUND_MOVING ||
	    pipeline_resume_moves(round->tensor, round->number))
		return;
	for (uint32_t i = 0; i < pipeline_round_n_local(round); i++) {
		if (round->ranks[i].request != request)
			continue;
		pipeline_round_describe(round, &failure, -ECANCELED, "rank %u cancelled it",
					job_of(round)->layout.rank_of_local[i]);
		pipeline_round_fail(round, &failure, true);
		return;
	}
}

/* Servers that owe answers. */
static void name_servers(const struct pipeline_round *round, char *text, size_t size)
{
	const struct pipeline_job *job = job_of(round);
	const struct pipeline_part *part;
	size_t len = 0;

	text[0] = 0;
	for (size_t i = 0; i < job->n_servers; i++) {
		bool owes = false;

		list_for_each (part, &round->parts, link)
			owes |= part->remote && part->server == i &&
				(part->state == PART_CALL || list_linked(&part->wait));
		if (owes && len < size)
			len += (size_t)snprintf(text + len, size - len, "%s%s", len ? ", " : "",
						pipeline_server_name(job, i));
	}
}

static void describe_expiry(const struct pipeline_round *round, struct failure *failure)
{
	const struct pipeline_tensor *tensor = round->tensor;
	const struct layout *layout = &tensor->job->layout;
	struct pipeline_ranks_text missing = { 0 }, undeclared = { 0 };
	char time[32], servers[256];

	(void)pipeline_time_text(time, round->timeout_ns);
	for (uint32_t i = 0; i < layout->n_local; i++) {
		if (!round->ranks[i].came)
			pipeline_ranks_add(tensor->declared[i] ? &missing : &undeclared,
					   layout->rank_of_local[i]);
	}
	if (missing.n || undeclared.n) {
		const char *who = missing.n ? pipeline_ranks_end(&missing) : "";
		const char *others = undeclared.n ? pipeline_ranks_end(&undeclared) : "";

		pipeline_round_describe(round, failure, -ETIME, "%s%s%s%s%s within %s", who,
					missing.n ? " did not submit it" : "",
					missing.n && undeclared.n ? ", " : "", others,
					undeclared.n ? " did not declare the tensor" : "", time);
		return;
	}
	if (!tensor->key) {
		pipeline_round_describe(round, failure, -ETIME,
					"other nodes did not declare the tensor within %s", time);
		return;
	}
	pipeline_device_waiting_for(round, servers, sizeof(servers));
	if (servers[0]) {
		pipeline_round_describe(round, failure, -ETIME, "%s within %s", servers, time);
		return;
	}
	name_servers(round, servers, sizeof(servers));
	pipeline_round_describe(round, failure, -ETIME, "no result within %s%s%s", time,
				servers[0] ? " from " : "", servers);
}

/* An elastic job goes on without those who did not come. Returns whether there were any. */
static bool drop_late(const struct pipeline_round *round, const struct failure *failure)
{
	struct pipeline_job *job = job_of(round);
	bool dropped = false;

	if (!job->shape.elastic || round->state != ROUND_GATHERING)
		return false;
	/* The round may end with the first. */
	for (uint32_t i = 0, n = pipeline_round_n_local(round); i < n && job->state == JOB_RUNNING;
	     i++) {
		if (round->ranks[i].came || pipeline_elastic_is_out(job, i))
			continue;
		dropped = true;
		pipeline_elastic_drop_late(job, i, failure);
		break;
	}
	return dropped;
}

uint64_t pipeline_round_expire(struct pipeline_job *job, uint64_t now_ns)
{
	struct pipeline_round *round, *expired;
	struct failure failure;
	uint64_t next_ns;

	/* From the start after each: one that ends may take others along. */
	do {
		expired = NULL;
		next_ns = CLOCK_NEVER;
		list_for_each (round, &job->rounds, job_link) {
			if (round->failure.status)
				continue;
			/* Sums and copies on this node need no deadline. */
			if (round->state == ROUND_MOVING &&
			    (!job->distributed || round->scattering))
				continue;
			if (round->deadline_ns <= now_ns) {
				expired = round;
				break;
			}
			next_ns = MIN(next_ns, round->deadline_ns);
		}
		if (!expired)
			break;
		describe_expiry(expired, &failure);
		if (!drop_late(expired, &failure))
			pipeline_round_fail(expired, &failure, true);
	} while (job->state == JOB_RUNNING);
	return next_ns;
}

void pipeline_round_leave(struct pipeline_job *job, const struct failure *failure)
{
	struct pipeline_round *round, *open;

	do {
		open = NULL;
		list_for_each (round, &job->rounds, job_link) {
			/* What moves on this node alone is over in a moment, and well. */
			if (round->failure.status ||
			    (round->state == ROUND_MOVING && !job->distributed) ||
			    pipeline_resume_moves(round->tensor, round->number))
				continue;
			open = round;
			break;
		}
		if (open)
			pipeline_round_fail(open, failure, true);
	} while (open);
}

bool pipeline_round_pending(const struct pipeline_job *job, uint32_t index)
{
	const struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (round->ranks[index].request)
			return true;
	return false;
}
