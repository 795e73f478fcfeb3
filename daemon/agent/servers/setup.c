/*
 * What is said before data moves, and about failure: calls of the job at its servers, of which home.c has the cluster
 * query and JOIN, attach.c ATTACH and this file DECLARE; and notices. job.c and declare.c call it, keep.c and move.c when a
 * server is back, and round.c when a round has failed.
 */
#include "agent/servers/setup.h"
#include "base/log.h"
#include <endian.h>

/* -- Calls -------------------------------------------------------------------------------------------------------- */

static void setup_free(struct agent_setup *setup)
{
	quota_release(&setup->job->memory.held, setup->charged);
	free(setup->added);
	free(setup->ranks);
	free(setup->payload);
	(void)held_free(setup);
}

int agent_setup_call(struct agent_job *job, struct peer *peer, enum data_op op,
		     const ProtobufCMessage *message, void (*done)(struct call *call),
		     struct agent_setup **ret_setup)
{
	struct agent_setup *setup = held_new(&job->memory.held, sizeof(*setup));
	size_t len;
	int r;

	if (!setup)
		return error_origin(-errno);
	setup->job = job;
	r = pack(message, DATA_SETUP_MAX, &setup->payload, &len);
	if (!r && quota_charge(&job->memory.held, len))
		r = -EDQUOT;
	if (r) {
		setup_free(setup);
		return error_origin(r);
	}
	setup->charged = len;
	setup->n_moved = job->placement.n_moved;
	setup->call.header = (struct data_header){
		.op = (uint8_t)op,
		.len = (uint32_t)len,
		.job = job->number,
		.epoch = op == DATA_DECLARE || (op == DATA_JOIN && job->fleet.servers)
				 ? job->placement.data_epoch
				 : job->fleet.view->epoch,
		.node = job->shape.node,
	};
	setup->call.payload = setup->payload;
	setup->call.done = done;
	list_push_back(&job->fleet.setups, &setup->link);
	agent_job_hold(job);
	*ret_setup = setup;
	peer_call(peer, &setup->call);
	return 0;
}

void agent_setup_done(struct agent_setup *setup)
{
	struct agent_job *job = setup->job;

	list_remove(&setup->link);
	setup_free(setup);
	agent_job_release(job);
}

void agent_setup_fail(struct agent_job *job, int status, const char *text)
{
	struct failure failure;

	(void)failure_set(&failure, status, "%s", text);
	agent_job_fail(job, &failure, NULL);
}

void agent_setup_fail_errno(struct agent_job *job, int r)
{
	struct failure failure;

	if (r == -ENOMEM || r == -EDQUOT)
		(void)agent_job_no_memory(job, -r, &failure);
	else
		(void)failure_set(&failure, r, "%s", strerror(-r));
	agent_job_fail(job, &failure, NULL);
}

void agent_setup_fail_answer(struct agent_job *job, struct peer *peer, int status, const char *what)
{
	struct failure failure;

	(void)failure_set(&failure, status, "job %s: %s answered with %s", job->owner.name,
			  peer_name(peer), what);
	agent_job_fail(job, &failure, NULL);
}

int agent_setup_unpack(const struct call *call, const ProtobufCMessageDescriptor *descriptor,
		       ProtobufCMessage **ret_message)
{
	if (call->answer.op != DATA_OK || (call->answer.len && !call->answer_block) ||
	    (call->answer_block && call->answer_block->len < call->answer.len))
		return error_origin(-EPROTO);
	return error_trace(unpack(descriptor, call->answer_block ? call->answer_block->data : "",
				  call->answer.len, ret_message));
}

int agent_setup_peer_at(struct agent *agent, const struct view_member *member, bool again,
			struct peer **ret_peer)
{
	struct transport *transport = agent->params.transport;
	int r;

	if (member->is_self) {
		*ret_peer = transport_self(transport);
		return 0;
	}
	r = transport_connect(transport, member->address, again ? 0 : member->id, ret_peer);
	if (r)
		return error_trace(r);
	peer_call_it(*ret_peer, member->name);
	return 0;
}

int agent_setup_peer_of(const struct agent_job *job, const struct view_member *member, bool again,
			struct peer **ret_peer)
{
	return error_trace(agent_setup_peer_at(job->agent, member, again, ret_peer));
}

/* -- DECLARE ------------------------------------------------------------------------------------------------------ */

static void on_declared(struct call *call)
{
	struct agent_setup *setup = container_of(call, struct agent_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__TensorDeclared *m = NULL;
	struct agent_job *job = setup->job;
	struct failure failure;
	int r;

	/* It is declared again when the home is back; a home that did not know it is told no more than once. */
	if (!setup->tensor || setup->tensor->setup.serial != setup->serial ||
	    setup->n_moved != job->placement.n_moved ||
	    (job->retention.keeps && agent_keep_is_loss(call))) {
		agent_setup_done(setup);
		return;
	}
	if (job->state == JOB_RUNNING && call->status) {
		(void)failure_set(&failure, call->status, "%s", call->text);
		job->agent->hooks->tensor_known(setup->tensor, &failure, 0, 0);
	} else if (job->state == JOB_RUNNING) {
		r = agent_setup_unpack(call, &bps__cluster__tensor_declared__descriptor,
				       (ProtobufCMessage **)&m);
		if (!r && !m->key)
			r = error_origin(-EPROTO);
		if (r)
			agent_setup_fail_answer(job, job->fleet.home, r,
						"something else than a tensor's key");
		else
			job->agent->hooks->tensor_known(setup->tensor, NULL, m->key, m->start);
	}
	agent_setup_done(setup);
}

void agent_setup_declare(struct agent_tensor *tensor, const struct failure *conflict)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	const struct ledger_known *known = agent_names_in_doubt(tensor);
	struct agent_job *job = tensor->job;
	const struct agent_server *home = &job->fleet.servers[job->fleet.home_number];
	struct agent_setup *setup;
	int r;

	m.name = tensor->name;
	m.dtype = tensor->dtype;
	m.elements = tensor->elements;
	m.shape = *tensor->shape ? tensor->shape : NULL;
	m.rank = tensor->first_rank;
	m.conflict = conflict ? (char *)conflict->text : NULL;
	m.has_key = m.has_start = m.has_in_doubt = m.in_doubt = known != NULL;
	m.key = known ? known->key : 0;
	m.start = known ? known->start : 0;
	if (job->retention.keeps && !home->attached)
		return;
	/*
	 * The tensor waits for its turn in resync.c, once the home knows which keys there are: no key is given twice. A tensor on which
	 * ranks disagree has no key, and no turn.
	 */
	if (home->resync.is_under_way && home->resync.holds_names && !conflict)
		return;
	r = agent_setup_call(job, job->fleet.home, DATA_DECLARE, &m.base, on_declared, &setup);
	if (r) {
		agent_setup_fail_errno(job, r);
		return;
	}
	setup->tensor = tensor;
	setup->serial = tensor->setup.serial;
	tensor->setup.said_home = job->fleet.n_homes;
}

void agent_setup_declare_known(struct agent_job *job, const struct ledger_known *known)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	struct agent_setup *setup;
	int r;

	m.name = (char *)known->name;
	m.dtype = known->dtype;
	m.elements = known->elements;
	m.rank = job->layout.rank_of_local[0];
	m.has_key = m.has_start = true;
	m.key = known->key;
	m.start = known->start;
	r = agent_setup_call(job, job->fleet.home, DATA_DECLARE, &m.base, on_declared, &setup);
	if (r)
		agent_setup_fail_errno(job, r);
}

/* -- Notices ------------------------------------------------------------------------------------------------------ */

struct peer *agent_setup_peer(const struct agent_job *job, size_t number)
{
	const struct agent_server *server = &job->fleet.servers[number];
	struct peer *peer;

	if (server->send_queue)
		return server->send_queue->lost ? NULL : server->send_queue->peer;
	/* The job has just gone over to other servers, or ranks: nobody else tells them. */
	if (!job->retention.keeps || server->gone || !agent_placement_has(job, number) ||
	    agent_setup_peer_of(job, &job->fleet.servers[number].member, true, &peer))
		return NULL;
	return peer;
}

/* To every server that is still there; from has said so itself. */
static void notify(struct agent_job *job, struct data_header *header, const char *text,
		   const struct peer *from)
{
	header->job = job->number;
	header->node = job->shape.node;
	header->epoch = job->fleet.servers ? job->placement.data_epoch : 0;
	header->len = (uint32_t)strnlen(text, ERROR_TEXT_MAX);
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		struct peer *peer = agent_setup_peer(job, i);

		if (!peer || peer == from)
			continue;
		if (peer_notice(peer, header, text))
			log_warning("job %s: no memory to tell %s that %s", job->owner.name,
				    peer_name(peer), text);
	}
}

void agent_setup_fail_job(struct agent_job *job, const struct failure *failure,
			  const struct peer *from)
{
	struct data_header header = { .op = DATA_FAIL_JOB, .status = -failure->status };

	memcpy(&header.key, job->owner.secret_digest, sizeof(header.key));
	memcpy(&header.round, job->owner.secret_digest + sizeof(header.key), sizeof(header.round));
	header.key = le64toh(header.key);
	header.round = le64toh(header.round);
	if (job->membership.goes)
		return;
	notify(job, &header, failure->text, from);
}

void agent_setup_follow(struct agent_job *job)
{
	struct peer *home = agent_setup_peer(job, job->fleet.home_number);
	const struct failure *departed = &job->departed.failure;
	struct data_header header = {
		.op = DATA_FOLLOW,
		.job = job->number,
		.node = job->shape.node,
		.turn = job->following.turn,
		.n_following = job->following.n_here,
		.n_idle = job->following.n_idle,
		.status = -departed->status,
		.len = departed->status ? (uint32_t)strnlen(departed->text, ERROR_TEXT_MAX) : 0,
	};

	if (home && peer_has(home, DATA_FEATURE_FOLLOW))
		peer_tell(home, &header, departed->text);
}

/* A server ends what this node has contributed alone, or the round of all. */
static uint8_t operation_of_failed(bool alone)
{
	return alone ? OPERATION_ACCUMULATE : 0;
}

void agent_setup_fail_round(struct agent_job *job, uint64_t key, uint64_t round, bool alone,
			    const struct failure *failure)
{
	struct data_header header = {
		.op = DATA_FAIL_ROUND,
		.operation = operation_of_failed(alone),
		.key = key,
		.round = round,
		.status = -failure->status,
	};

	notify(job, &header, failure->text, NULL);
	if (job->retention.keeps)
		agent_keep_failed(job, key, round, alone, failure);
}

void agent_setup_fail_again(struct agent_job *job, size_t server, const struct agent_failed *failed)
{
	const struct failure *failure = &failed->failure;
	struct data_header header = {
		.op = DATA_FAIL_ROUND,
		.operation = operation_of_failed(failed->alone),
		.job = job->number,
		.key = failed->key,
		.round = failed->round,
		.epoch = job->placement.data_epoch,
		.node = job->shape.node,
		.status = -failure->status,
		.len = (uint32_t)strnlen(failure->text, ERROR_TEXT_MAX),
	};

	if (peer_notice(job->fleet.servers[server].send_queue->peer, &header, failure->text))
		log_warning("job %s: no memory to tell %s that a round has failed", job->owner.name,
			    agent_server_name(job, server));
}

/* -- The end ------------------------------------------------------------------------------------------------------ */

void agent_setup_free(struct agent_job *job)
{
	struct agent_setup *setup, *next;

	list_for_each_safe (setup, next, &job->fleet.setups, link) {
		list_remove(&setup->link);
		setup_free(setup);
	}
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		agent_send_queue_put(job->fleet.servers[i].send_queue);
	free(job->fleet.servers);
	agent_move_done(job);
	free(job->membership.joined);
	(void)view_unref(job->fleet.view);
}
