/*
 * Resynchronisation: what a server that has attached, perhaps again, or as another process, may not have heard. It may be much: a job
 * has a hundred thousand tensors, as many kept results, and as many parts that wait for the server. So the server is told in steps, in later
 * turns of the loop; the first is taken at once, and is the only one for most jobs. attach.c begins it.
 *
 * Parts for the server wait until it has been told of all that came before them. What happens to a tensor or a result meanwhile the
 * server hears at once, and perhaps once more when its turn comes. A server that is lost meanwhile begins anew with its next attach.
 */
#include "agent/servers/setup.h"
#include "base/failpoint.h"
#include "base/log.h"

/* A step costs so much: */
#define STEP 256
/* what is looked at in vain 1, what is said so much. */
#define SAID 8u

/* -- Stages: each is called until it returns 0, and says one thing at a time. Returns what that has cost. -------------------------- */

static unsigned say_failed(struct agent_server *server)
{
	struct agent_job *job = server->job;
	size_t n = MIN(job->retention.n_failed, (size_t)AGENT_FAILED);
	const struct agent_failed *failed;

	/* In one step: others would overwrite them. */
	static_assert(AGENT_FAILED * SAID <= STEP, "all that have failed are said at once");
	if (!agent_server_may_be_fresh(server) || server->resync.next >= n)
		return 0;
	failed = &job->retention.failed[(job->retention.n_failed - n + server->resync.next++) %
					AGENT_FAILED];
	if (failed->key)
		agent_setup_fail_again(job, agent_server_number(server), failed);
	return SAID;
}

static unsigned say_departed(struct agent_server *server)
{
	struct agent_job *job = server->job;

	if (!agent_server_may_be_fresh(server) || server->resync.next >= job->shape.n_nodes)
		return 0;
	return agent_departed_again(job, agent_server_number(server),
				    (uint32_t)server->resync.next++)
		       ? SAID
		       : 1;
}

/*
 * What the ledger has, to a home that has not seen the job's beginning. Meanwhile none of it goes: a home forgets no tensor before it has
 * heard of those of all nodes.
 */
static unsigned say_known(struct agent_server *server)
{
	struct agent_job *job = server->job;
	const struct ledger_known *known;

	if (!server->resync.holds_names)
		return 0;
	known = ledger_tensor_at(job->resumption.ledger, server->resync.next++);
	if (!known) {
		server->resync.holds_names = false;
		if (server->forgets)
			agent_names_notified(job);
		return 0;
	}
	if (known->in_doubt)
		return 1;
	agent_setup_declare_known(job, known);
	return SAID;
}

static unsigned say_forgotten(struct agent_server *server)
{
	return agent_names_forgotten_again(server, server->resync.next++) ? SAID : 0;
}

/* All the nodes may not have agreed on the tensor, or that it is forgotten: an answer of the home's has not come. */
static void say_to_home(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;

	/* A tensor that was new meanwhile has been said. */
	if (tensor->setup.said_home == job->fleet.n_homes)
		return;
	if (tensor->n_declared == job->layout.n_local && !tensor->key && !tensor->failure.status)
		agent_setup_declare(tensor, NULL);
	if (!tensor->forgetting)
		return;
	agent_names_forget(tensor);
	if (tensor->needed)
		agent_names_keep(job, tensor->key);
}

static unsigned say_tensor(struct agent_server *server)
{
	struct agent_job *job = server->job;
	struct agent_tensor *tensor;
	unsigned n_open;

	if (!server->resync.next++)
		server->resync.at = job->tensors.all.next;
	if (server->resync.at == &job->tensors.all)
		return 0;
	tensor = container_of(server->resync.at, struct agent_tensor, all_link);
	server->resync.at = server->resync.at->next;
	n_open = agent_acknowledged_again(tensor, server);
	if (agent_server_is_home(server))
		say_to_home(tensor);
	return SAID + n_open;
}

static unsigned say_regrouping(struct agent_server *server)
{
	if (!server->resync.next++ && agent_server_is_home(server))
		agent_elastic_regroup_again(server->job);
	return 0;
}

/*
 * Of a tensor that is forgotten all nodes have all. The server may have the result from the process before, and wait for
 * their word on it.
 */
static void bring(struct agent_server *server, uint32_t retained)
{
	struct agent_job *job = server->job;
	uint64_t key = ledger_result_kept(job->resumption.ledger, retained)->what.key;

	if (!agent_names_is_forgotten(job, key)) {
		agent_keep_offer(job, retained);
		return;
	}
	if (server->resync.forgotten != key)
		agent_names_tell_forgotten(job, server, key);
	server->resync.forgotten = key;
	agent_keep_free(job, retained);
}

static unsigned say_kept(struct agent_server *server)
{
	struct agent_job *job = server->job;
	size_t retained = server->resync.next++;
	const struct ledger_kept *kept;

	if (retained >= ledger_results_used(job->resumption.ledger)) {
		agent_contributors_offered(server);
		return 0;
	}
	kept = ledger_result_kept(job->resumption.ledger, (uint32_t)retained);
	/* One that is busy is a worker's to make whole; it is offered when that is done. */
	if (!kept->taken || (kept->busy && !kept->stale) || !kept->whole ||
	    agent_keep_owner(job, kept) != server)
		return 1;
	bring(server, (uint32_t)retained);
	return SAID;
}

/* Parts that have waited go on in the order in which they came. A part that comes meanwhile need not wait. */
static unsigned unpark(struct agent_server *server)
{
	struct agent_part *part = list_first(&server->parked, struct agent_part, wait);

	if (!server->resync.next++)
		FAILPOINT("server-attached-again");
	server->resync.holds_parts = false;
	if (!part)
		return 0;
	list_remove(&part->wait);
	server->job->agent->hooks->part.goes_on(part);
	return SAID;
}

static unsigned (*const stages[])(struct agent_server *server) = {
	say_failed, say_departed,   say_known, say_forgotten,
	say_tensor, say_regrouping, say_kept,  unpark,
};
#define N_STAGES (sizeof(stages) / sizeof(stages[0]))

/* -- Steps -------------------------------------------------------------------------------------------------------- */

static bool goes_on(const struct agent_server *server)
{
	const struct agent_job *job = server->job;

	return server->resync.is_under_way && job->state != JOB_OVER && !job->resumption.suspended;
}

static void finish(struct agent_server *server)
{
	struct agent_job *job = server->job;

	server->resync.is_under_way = false;
	job->fleet.n_resyncing--;
	job->fleet.n_attached++;
	if (agent_server_is_home(server) && job->following.turn)
		agent_setup_follow(job);
	if (job->departed.unsaid)
		agent_job_end_departed(job);
	if (job->state == JOB_FORMING && job->fleet.n_attached == agent_move_n_in(job))
		agent_job_formed(job);
}

/* Returns whether there is more. */
static bool step(struct agent_server *server)
{
	struct agent_resync *resync = &server->resync;
	unsigned cost, n = 0;

	while (n < STEP && goes_on(server) && resync->stage < N_STAGES) {
		cost = stages[resync->stage](server);
		n += MAX(cost, 1u);
		if (cost)
			continue;
		resync->stage++;
		resync->next = 0;
	}
	if (goes_on(server) && !resync->holds_parts)
		agent_send_queue_pump(server->send_queue);
	if (!goes_on(server))
		return false;
	if (resync->stage < N_STAGES)
		return true;
	finish(server);
	return false;
}

static bool on_step(struct chore *chore)
{
	struct agent_server *server = container_of(chore, struct agent_server, resync.chore);
	struct agent_job *job = server->job;

	if (step(server))
		return true;
	/* The server was lost meanwhile: another can tell that its ranks have left. */
	if (job->departed.unsaid && !job->resumption.suspended)
		agent_job_end_departed(job);
	agent_job_release(job);
	return false;
}

void agent_resync(struct agent_server *server, bool fresh)
{
	struct agent_job *job = server->job;
	struct agent_resync *resync = &server->resync;

	resync->is_under_way = resync->holds_parts = true;
	resync->holds_names = fresh && agent_server_is_home(server);
	resync->stage = 0;
	resync->next = 0;
	resync->forgotten = 0;
	job->fleet.n_resyncing++;
	job->fleet.n_homes += agent_server_is_home(server);
	if (!job->retention.keeps)
		resync->stage = N_STAGES;
	else
		agent_contributors_attached(server);
	/* Of the attach before one step may be left, which goes on with this one. */
	agent_job_hold(job);
	if (list_linked(&resync->chore.link) || !step(server)) {
		agent_job_release(job);
		return;
	}
	resync->chore.step = on_step;
	loop_begin(job->agent->params.loop, &resync->chore);
}

void agent_resync_leave(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;

	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (job->fleet.servers[i].resync.at == &tensor->all_link)
			job->fleet.servers[i].resync.at = tensor->all_link.next;
}
