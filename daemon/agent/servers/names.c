/*
 * What a node and its job's home say to each other of tensors that may be forgotten, and servers hear of those that were:
 * server/job/forget.c has the protocol. request/forget.c decides and calls, keep.c when a server is back.
 */
#include "agent/round/part.h"
#include "agent/servers/setup.h"
#include "base/failpoint.h"

/* Keys that were forgotten last are said once more to a server that has attached anew. */
#define FORGOTTEN 1024

struct forget {
	struct call call;
	struct agent_job *job;
	struct agent_tensor *tensor;
	uint64_t key;
	uint64_t n_moved; /* job's, when it was sent: else it counts no more */
};

/* An answer that is lost, or counts no more, is asked for again when the home is attached; EALREADY: it was. */
static bool counts(const struct forget *forget)
{
	const struct agent_job *job = forget->job;
	const struct agent_tensor *tensor = forget->tensor;

	return job->state == JOB_RUNNING && !job->resumption.suspended &&
	       forget->n_moved == job->placement.n_moved && tensor->forgetting &&
	       tensor->key == forget->key && forget->call.status != -EALREADY &&
	       !(job->retention.keeps && agent_keep_is_loss(&forget->call));
}

static void on_answered(struct call *call)
{
	struct forget *forget = container_of(call, struct forget, call);
	struct agent_job *job = forget->job;

	if (!counts(forget)) {
		/* Nothing is to be done. */
	} else if (!call->status || call->status == -EBUSY) {
		job->agent->hooks->tensor_settled(forget->tensor, !call->status);
	} else {
		struct failure failure;

		(void)failure_set(&failure, call->status, "%s", call->text);
		agent_job_fail(job, &failure, NULL);
	}
	(void)held_free(forget);
	agent_job_release(job);
}

/* NULL: it is asked when it has attached. */
static struct peer *home_of(const struct agent_job *job)
{
	const struct agent_server *home = &job->fleet.servers[job->fleet.home_number];

	return home->attached ? home->send_queue->peer : NULL;
}

static void notice(const struct agent_job *job, unsigned op, uint64_t key)
{
	struct peer *home = home_of(job);
	struct data_header header = {
		.op = (uint8_t)op,
		.job = job->number,
		.key = key,
		.epoch = job->placement.data_epoch,
		.node = job->shape.node,
	};

	if (home)
		peer_tell(home, &header, NULL);
}

void agent_names_keep(const struct agent_job *job, uint64_t key)
{
	notice(job, DATA_KEEP, key);
}

void agent_names_notified(const struct agent_job *job)
{
	notice(job, DATA_NAMED, ledger_last_key(job->resumption.ledger));
}

void agent_names_forget(struct agent_tensor *tensor)
{
	struct agent_job *job = tensor->job;
	struct peer *home = home_of(job);
	struct forget *forget = home ? held_new(&job->memory.held, sizeof(*forget)) : NULL;

	if (home && !forget)
		agent_setup_fail_errno(job, -errno);
	if (!forget)
		return;
	*forget = (struct forget){
		.call = {
			.header = {
				.op = DATA_FORGET,
				.job = job->number,
				.key = tensor->key,
				.round = tensor->reached[0],
				.epoch = job->placement.data_epoch,
				.node = job->shape.node,
			},
			.done = on_answered,
		},
		.job = job,
		.tensor = tensor,
		.key = tensor->key,
		.n_moved = job->placement.n_moved,
	};
	tensor->setup.said_home = job->fleet.n_homes;
	agent_job_hold(job);
	peer_call(home, &forget->call);
}

/* -- Servers ------------------------------------------------------------------------------------------------------ */

void agent_names_tell_forgotten(const struct agent_job *job, const struct agent_server *server,
				uint64_t key)
{
	struct data_header header = {
		.op = DATA_HAVE,
		.job = job->number,
		.key = key,
		.round = DATA_ROUND_NEVER,
		.is_all = 1,
		.epoch = job->placement.data_epoch,
		.node = job->shape.node,
	};

	/* Without memory the server has it until the job's end. */
	if (server->attached)
		(void)peer_notice(server->send_queue->peer, &header, NULL);
}

void agent_names_forgotten(struct agent_job *job, uint64_t key)
{
	struct agent_tensors *tensors = &job->tensors;

	for (size_t i = 0; i < job->fleet.n_servers; i++)
		agent_names_tell_forgotten(job, &job->fleet.servers[i], key);
	/* A server that is lost is not told of its failed rounds any more. */
	for (size_t i = 0; job->retention.failed && i < AGENT_FAILED; i++)
		if (job->retention.failed[i].key == key)
			job->retention.failed[i].key = 0;
	if (!tensors->forgotten)
		tensors->forgotten =
			held_new(&job->memory.held, FORGOTTEN * sizeof(tensors->forgotten[0]));
	if (tensors->forgotten)
		tensors->forgotten[tensors->n_forgotten++ % FORGOTTEN] = key;
}

bool agent_names_may_forget(const struct agent_job *job)
{
	if (job->shape.elastic || stragglers_any(&job->shape.stragglers) ||
	    (job->retention.keeps && !ledger_knows_all(job->resumption.ledger)))
		return false;
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (agent_placement_has(job, i) && !job->fleet.servers[i].forgets)
			return false;
	return true;
}

bool agent_names_forgotten_again(const struct agent_server *server, size_t index)
{
	const struct agent_tensors *tensors = &server->job->tensors;

	if (!tensors->forgotten || index >= MIN(tensors->n_forgotten, (uint64_t)FORGOTTEN))
		return false;
	agent_names_tell_forgotten(server->job, server, tensors->forgotten[index]);
	return true;
}

const struct ledger_known *agent_names_in_doubt(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;
	const struct ledger_known *known =
		job->retention.keeps ? ledger_tensor_find(job->resumption.ledger, tensor->name)
				     : NULL;

	return known && known->in_doubt ? known : NULL;
}

bool agent_names_is_forgotten(const struct agent_job *job, uint64_t key)
{
	const struct ledger *ledger = job->resumption.ledger;

	return ledger_knows_all(ledger) && !ledger_tensor_has(ledger, key);
}
