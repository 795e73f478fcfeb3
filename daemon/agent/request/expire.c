/*
 * Rounds that are given up: cancelled by a rank, or over their deadline, with words on who or what is missing. sweep.c finds
 * those; agent_cancel() is agent.h's, for control/.
 */
#include "agent/round/device.h"
#include "agent/round/part.h"
#include "agent/round/round.h"
#include <stdio.h>

static struct agent_job *job_of(const struct agent_round *round)
{
	return round->job;
}

void agent_cancel(struct agent_request *request)
{
	struct agent_round *round = request->in;
	struct failure failure;

	if (!round || round->failure.status || round->state == ROUND_MOVING ||
	    agent_resume_moves(round->tensor, round->number))
		return;
	for (uint32_t i = 0; i < agent_round_n_local(round); i++) {
		if (round->ranks[i].request != request)
			continue;
		agent_round_describe(round, &failure, -ECANCELED, "rank %u cancelled it",
				     job_of(round)->layout.rank_of_local[i]);
		agent_round_fail(round, &failure, true);
		return;
	}
}

/* Servers that owe answers. */
static void name_servers(const struct agent_round *round, char *text, size_t size)
{
	const struct agent_job *job = job_of(round);
	const struct agent_part *part;
	size_t len = 0;

	text[0] = 0;
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		bool owes = false;

		list_for_each (part, &round->parts, link)
			owes |= part->remote && part->server == i &&
				((part->state == PART_CALL && !part->posted) ||
				 list_linked(&part->wait));
		if (owes && len < size)
			len += (size_t)snprintf(text + len, size - len, "%s%s", len ? ", " : "",
						agent_server_name(job, i));
	}
}

static void describe_expiry(const struct agent_round *round, struct failure *failure)
{
	const struct agent_tensor *tensor = round->tensor;
	const struct layout *layout = &tensor->job->layout;
	struct agent_ranks_text missing = { 0 }, undeclared = { 0 };
	char time[32], servers[256];

	(void)agent_time_text(time, round->times.timeout_ns);
	for (uint32_t i = 0; i < layout->n_local; i++) {
		if (!round->ranks[i].came)
			agent_ranks_add(tensor->declared[i] ? &missing : &undeclared,
					layout->rank_of_local[i]);
	}
	if (missing.n || undeclared.n) {
		const char *who = missing.n ? agent_ranks_end(&missing) : "";
		const char *others = undeclared.n ? agent_ranks_end(&undeclared) : "";

		agent_round_describe(round, failure, -ETIME, "%s%s%s%s%s within %s", who,
				     missing.n ? " did not submit it" : "",
				     missing.n && undeclared.n ? ", " : "", others,
				     undeclared.n ? " did not declare the tensor" : "", time);
		return;
	}
	if (!tensor->key) {
		agent_round_describe(round, failure, -ETIME,
				     "other nodes did not declare the tensor within %s", time);
		return;
	}
	agent_device_waiting_for(round, servers, sizeof(servers));
	if (servers[0]) {
		agent_round_describe(round, failure, -ETIME, "%s within %s", servers, time);
		return;
	}
	name_servers(round, servers, sizeof(servers));
	agent_round_describe(round, failure, -ETIME, "no result within %s%s%s", time,
			     servers[0] ? " from " : "", servers);
}

/* An elastic job goes on without those who did not come, one after the other. Returns whether there was one. */
static bool drop_late(const struct agent_round *round, const struct failure *failure)
{
	struct agent_job *job = job_of(round);

	if (!job->shape.elastic || round->state != ROUND_GATHERING)
		return false;
	for (uint32_t i = 0; i < agent_round_n_local(round) && job->state == JOB_RUNNING; i++) {
		if (round->ranks[i].came || agent_elastic_is_out(job, i))
			continue;
		/* Others may be late, too. The round may end with the first. */
		agent_sweep(job);
		agent_elastic_drop_late(job, i, failure);
		return true;
	}
	return false;
}

bool agent_round_expire(struct agent_round *round)
{
	struct failure failure;

	describe_expiry(round, &failure);
	if (drop_late(round, &failure))
		return true;
	agent_round_fail(round, &failure, true);
	return false;
}
