/*
 * Packets of a trainer: one handler for each message of control.proto checks the message, calls the
 * agent with plain arguments and answers. Types of control.proto go no further. session.c brings
 * the packets.
 */
#include "control/request.h"
#include "base/log.h"
#include "base/memory/holes.h"
#include "control/ring.h"
#include "proto/pack.h"
#include "proto/text.h"
#include <inttypes.h>
#include <stdio.h>

#define PROTOCOL_VERSION     1
#define PROTOCOL_VERSION_MIN 1
/* What a buffer takes here, and the kernel of its mapping; and the part that page tables are of what they map. */
#define BUFFER_BYTES	 1024
#define PAGE_TABLE_SHARE 512

static uint64_t features_of(const struct session *session)
{
	return CONTROL_FEATURE_RESUME | CONTROL_FEATURE_ELASTIC | CONTROL_FEATURE_FUTEX |
	       CONTROL_FEATURE_ORDER | CONTROL_FEATURE_RELEASE | CONTROL_FEATURE_WIDEN |
	       CONTROL_FEATURE_FOLLOW | CONTROL_FEATURE_BLOCKED |
	       (session->control->params.has_cuda ? CONTROL_FEATURE_CUDA : 0);
}

/* -- Hello -------------------------------------------------------------------------------------------------------- */

static void send_welcome(const struct incoming *in, const int fds[3])
{
	const struct control_params *params = &in->session->control->params;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Welcome welcome = BPS__CONTROL__WELCOME__INIT;

	welcome.version = PROTOCOL_VERSION;
	welcome.features = features_of(in->session);
	welcome.has_resume_timeout_ms = true;
	welcome.resume_timeout_ms = params->resume_timeout_ms;
	welcome.software = (char *)"bps-daemon " BPS_VERSION;
	welcome.node = (char *)params->node;
	welcome.daemon = params->id;
	welcome.shm_len = SHM_LEN;
	message.id = in->id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_WELCOME;
	message.welcome = &welcome;
	session_send(in->session, &message, fds, 3);
}

static void handle_hello(const struct incoming *in, const Bps__Control__Hello *hello)
{
	struct session *session = in->session;
	struct failure failure;
	int fds[3], r;

	if (session->state != SESSION_GREETING) {
		session_fail(session, "said Hello twice");
		return;
	}
	if (hello->version < PROTOCOL_VERSION_MIN || hello->version_min > PROTOCOL_VERSION) {
		(void)failure_set(
			&failure, -EPROTONOSUPPORT,
			"this daemon (" BPS_VERSION
			") speaks versions %d to %d of the protocol, the library %u to %u",
			PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, hello->version_min, hello->version);
		refuse(in, &failure);
		session_close(session, "speaks another version");
		return;
	}
	session->features = hello->features & features_of(session);
	r = ring_open(session, fds);
	if (r) {
		(void)failure_set(&failure, r, "the daemon cannot open a session: %s",
				  strerror(-r));
		refuse(in, &failure);
		session_fail(session, "could not be given its memory: %s", strerror(-r));
		return;
	}
	loop_timer_cancel(&session->timer);
	session->state = SESSION_OPEN;
	send_welcome(in, fds);
	(void)fd_close(fds[0]);
	(void)fd_close(fds[2]);
	log_debug("session of pid %u (uid %u): open, %.64s", session->pid, session->uid,
		  hello->software ? hello->software : "no name");
}

/* -- Job ---------------------------------------------------------------------------------------------------------- */

/*
 * What the ledger of its job takes is charged to each rank, as memory is that it shares: the ledger lives as long
 * as any of them does. Without room for all that it may come to, a trainer cannot take part in a restart: returns why, or
 * NULL.
 */
static const char *charge_ledger(struct session *session, bool through_servers)
{
	uint64_t most,
		bytes = agent_ledger_bytes(session->control->params.agent, through_servers, &most);

	if (!(session->features & CONTROL_FEATURE_RESUME))
		return "the library of a trainer does not know of restarts";
	if (!bytes)
		return "resume is off";
	if (quota_charge(&session->memory.quota, most))
		return "a trainer's session_quota has no room for a ledger";
	quota_release(&session->memory.quota, most - bytes);
	session->job.ledger_charge = bytes;
	return NULL;
}

void session_release_ledger(struct session *session)
{
	quota_release(&session->memory.quota,
		      session->job.ledger_charge + session->job.more_charge);
	session->job.ledger_charge = session->job.more_charge = 0;
}

static const char *on_charge(struct agent_member *member, bool through_servers)
{
	struct session *session = container_of(member, struct session, job.member);

	session_release_ledger(session);
	return charge_ledger(session, through_servers);
}

static int on_charge_more(struct agent_member *member, uint64_t bytes)
{
	struct session *session = container_of(member, struct session, job.member);

	if (bytes > session->job.more_charge &&
	    quota_charge(&session->memory.quota, bytes - session->job.more_charge))
		return error_origin(-EDQUOT);
	if (bytes < session->job.more_charge)
		quota_release(&session->memory.quota, session->job.more_charge - bytes);
	session->job.more_charge = bytes;
	return 0;
}

static void on_joined(struct agent_member *member, uint64_t number, uint32_t n_servers, int ledger)
{
	struct session *session = container_of(member, struct session, job.member);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Joined joined = BPS__CONTROL__JOINED__INIT;
	Bps__Control__Terms terms = BPS__CONTROL__TERMS__INIT;
	struct agent_place place = agent_place(member);

	joined.job = number;
	joined.n_servers = n_servers;
	if (place.membership) {
		joined.has_membership = joined.has_rank = joined.has_size = true;
		joined.has_local_rank = joined.has_local_size = true;
		joined.has_node = joined.has_n_nodes = true;
		joined.membership = place.membership;
		joined.rank = session->job.rank = place.rank;
		joined.size = session->job.size = place.size;
		joined.local_rank = place.local_rank;
		joined.local_size = place.local_size;
		joined.node = place.node;
		joined.n_nodes = place.n_nodes;
		terms.request_timeout_ms = place.terms.request_timeout_ms;
		terms.min_servers = place.terms.min_servers;
		terms.part_bytes = place.terms.part_bytes;
		terms.gpu_reduce = place.terms.gpu_reduce;
		terms.gpu_roots = place.terms.gpu_roots;
		terms.min_ranks = place.terms.min_ranks;
		terms.max_ranks = place.terms.max_ranks;
		joined.terms = &terms;
	}
	message.id = session->job.join_id ? session->job.join_id : session->job.regroup_id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOINED;
	message.joined = &joined;
	/* Its tensors were of the run before. */
	if (session->job.regroup_id)
		session_drop_tensors(session, NULL);
	session->job.join_id = session->job.regroup_id = 0;
	session->job.run = number;
	if (ledger < 0 && !member->resumed)
		session_release_ledger(session);
	session_send(session, &message, &ledger, ledger >= 0);
}

static void out_of_job(struct session *session, const struct failure *why)
{
	session->job.is_in = false;
	session_release_ledger(session);
	session->job.last = *why;
	session_drop_tensors(session, why);
}

static void on_ended(struct agent_member *member, uint64_t number, const struct failure *failure)
{
	struct session *session = container_of(member, struct session, job.member);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__JobFailed failed = BPS__CONTROL__JOB_FAILED__INIT;
	uint64_t join_id = session->job.join_id, regroup_id = session->job.regroup_id;

	out_of_job(session, failure);
	session->job.join_id = session->job.regroup_id = 0;
	if (regroup_id) {
		/* Of the next run nobody knows yet. */
		number = session->job.run;
		session_answer(session, regroup_id, failure->status, failure->text);
	}
	if (join_id) {
		session_answer(session, join_id, failure->status, failure->text);
		return;
	}
	failed.job = number;
	message.has_status = true;
	message.status = failure->status;
	message.text = (char *)failure->text;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOB_FAILED;
	message.job_failed = &failed;
	session_send(session, &message, NULL, 0);
}

static void on_departed(struct agent_member *member)
{
	struct session *session = container_of(member, struct session, job.member);
	uint64_t join_id = session->job.join_id, leave_id = session->job.leave_id;
	struct failure departed;

	(void)failure_set(&departed, -ECANCELED, "rank %u left job %s", session->job.rank,
			  session->job.name);
	out_of_job(session, &departed);
	session->job.join_id = session->job.leave_id = 0;
	if (join_id)
		session_answer(session, join_id, departed.status, departed.text);
	session_answer(session, leave_id, 0, NULL);
}

static void on_refused(struct agent_member *member, const struct failure *failure)
{
	struct session *session = container_of(member, struct session, job.member);
	uint64_t id = session->job.regroup_id;

	session->job.regroup_id = 0;
	session_answer(session, id, failure->status, failure->text);
}

static void handle_regroup(const struct incoming *in)
{
	struct session *session = in->session;

	if (!session->job.is_in || session->job.join_id || session->job.regroup_id) {
		session_answer(session, in->id, -ENOTCONN,
			       session->job.regroup_id	  ? "regroups already"
			       : session->job.is_in	  ? "in no job yet"
			       : session->job.last.status ? session->job.last.text
							  : "in no job");
		return;
	}
	session->job.regroup_id = in->id;
	agent_regroup(&session->job.member);
}

/* Join, or Resume of run `resumed`, which is not 0. */
static void handle_join(const struct incoming *in, const Bps__Control__Join *m, uint64_t resumed)
{
	struct agent *agent = in->session->control->params.agent;
	struct session *session = in->session;
	struct agent_join join = {
		.job = m->job,
		.secret = m->secret.data,
		.secret_len = m->secret.len,
		.rank = m->rank,
		.size = m->size,
		.local_rank = m->local_rank,
		.local_size = m->local_size,
		.node = m->node,
		.n_nodes = m->n_nodes,
		.min_servers = m->min_servers,
		.part_bytes = m->part_bytes,
		.gpu_reduce = m->gpu_reduce,
		.gpu_roots = m->gpu_roots,
		.timeout_ms = m->timeout_ms,
		.request_timeout_ms = m->request_timeout_ms,
		.force_distributed = m->force_distributed,
		.elastic = m->elastic,
		.newcomer = m->newcomer,
		.min_ranks = m->min_ranks,
		.max_ranks = m->max_ranks,
		.pid = session->pid,
		.uid = session->uid,
		.account = session->account,
	};
	struct failure failure = { 0 };
	int r;

	if (m->stragglers)
		join.stragglers = (struct stragglers){
			.quorum = m->stragglers->quorum,
			.quorum_timeout_ms = m->stragglers->quorum_timeout_ms,
			.async = m->stragglers->async,
			.staleness = m->stragglers->staleness,
		};
	if (session->job.is_in) {
		(void)failure_set(&failure, -EISCONN, "already rank %u of job %s",
				  session->job.rank, session->job.name);
		refuse(in, &failure);
		return;
	}
	session->job.member.joined = on_joined;
	session->job.member.ended = on_ended;
	session->job.member.departed = on_departed;
	session->job.member.refused = on_refused;
	session->job.member.charge = on_charge;
	session->job.member.charge_more = on_charge_more;
	tensor_set_callbacks(session);
	follow_set_callbacks(session);
	/* By now it is -1, unless a GPU worker may need it. */
	session->job.member.shm_fd = session->ring.shm_fd;
	session->job.member.account = session->account;
	/* Before, as the answer may come from inside. */
	session->job.is_in = true;
	session->job.join_id = in->id;
	session->job.run = 0;
	session->job.rank = m->rank;
	session->job.size = m->size;
	session->job.elastic = m->elastic;
	(void)snprintf(session->job.name, sizeof(session->job.name), "%s", m->job);
	session->turn.job_flow = ring_job_flow(session->uid, m->job);
	join.cannot_resume = charge_ledger(session, m->n_nodes > 1 || m->force_distributed ||
							    stragglers_any(&join.stragglers));
	if (resumed)
		r = agent_resume(agent, &session->job.member, &join, resumed, in->fd, &failure);
	else
		r = agent_join(agent, &session->job.member, &join, &failure);
	if (r) {
		session->job.is_in = false;
		session->job.join_id = 0;
		session_release_ledger(session);
		refuse(in, &failure);
	}
}

static void handle_resume(const struct incoming *in, const Bps__Control__Resume *m)
{
	if (!(in->session->features & CONTROL_FEATURE_RESUME))
		session_answer(in->session, in->id, -EPROTO,
			       "Resume from a trainer that has not said it knows it");
	else if (in->fd < 0 || !m->job)
		session_answer(in->session, in->id, -EPROTO, "no ledger came beside Resume");
	else
		handle_join(in, m->join, m->job);
}

/* The trainer's process is about to end: its session ends as it would then, with more to say. */
static void end_by_error(const struct incoming *in, const char *error)
{
	struct session *session = in->session;
	char how[ERROR_TEXT_MAX + 1];
	int n;

	n = snprintf(how, sizeof(how), "ended by an error: %.*s", LEAVE_ERROR_MAX, error);
	text_make_plain(how, (size_t)n);
	session_answer(session, in->id, 0, NULL);
	session_close(session, how);
}

static void handle_leave(const struct incoming *in, const Bps__Control__Leave *leave)
{
	struct session *session = in->session;

	if (!session->job.is_in || session->job.leave_id) {
		session_answer(session, in->id, -ENOTCONN,
			       session->job.leave_id	  ? "on its way out of its job already"
			       : session->job.last.status ? session->job.last.text
							  : "in no job");
		return;
	}
	if (leave->error) {
		end_by_error(in, leave->error);
		return;
	}
	session->job.leave_id = in->id;
	agent_leave(&session->job.member);
}

static void handle_status(const struct incoming *in)
{
	const struct session *session = in->session;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__StatusReply reply = BPS__CONTROL__STATUS_REPLY__INIT;
	struct agent_job_info info;

	reply.node = (char *)session->control->params.node;
	reply.cluster = (char *)session->control->params.cluster;
	if (session->job.is_in && agent_member_job(&session->job.member, &info)) {
		reply.state = (char *)info.state;
		reply.has_job = session->job.run != 0;
		reply.job = session->job.run;
		reply.has_size = reply.has_n_nodes = reply.has_n_local = info.size != 0;
		reply.size = info.size;
		reply.n_nodes = info.n_nodes;
		reply.n_local = info.n_local;
		reply.has_rounds = reply.has_bytes = reply.has_in_flight = true;
		reply.rounds = info.rounds;
		reply.bytes = info.bytes;
		reply.in_flight = info.in_flight;
		reply.waiting_for = *info.waiting_for ? info.waiting_for : NULL;
	}
	message.id = in->id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_STATUS_REPLY;
	message.status_reply = &reply;
	session_send(in->session, &message, NULL, 0);
}

/* -- Memory ------------------------------------------------------------------------------------------------------- */

/* What came with a Share of a device's memory, by its kind. */
static int take_device(const struct incoming *in, const Bps__Control__Share *m,
		       struct gpu_memory_params *ret_params, struct failure *failure)
{
	struct gpu_memory_params params = { .kind = m->kind, .fd = in->fd, .len = m->len };

	if (!(in->session->features & CONTROL_FEATURE_CUDA))
		return failure_set(failure, -EOPNOTSUPP,
				   "memory of kind %u: this daemon does not offer to take it",
				   m->kind);
	if (m->kind > MEMORY_MAX_)
		return failure_set(failure, -EINVAL, "there is no memory of kind %u", m->kind);
	if (m->device.len != sizeof(params.device))
		return failure_set(failure, -EINVAL, "a device's UUID has %zu bytes, not %zu",
				   sizeof(params.device), m->device.len);
	if ((m->kind == MEMORY_CUDA_FD) != (in->fd >= 0))
		return failure_set(failure, -EINVAL, "%s descriptor came beside Share",
				   in->fd < 0 ? "no" : "a");
	if (m->kind == MEMORY_CUDA_IPC && m->handle.len != sizeof(params.handle))
		return failure_set(failure, -EINVAL, "an IPC handle has %zu bytes, not %zu",
				   sizeof(params.handle), m->handle.len);
	memcpy(params.device, m->device.data, sizeof(params.device));
	if (m->kind == MEMORY_CUDA_IPC)
		memcpy(params.handle, m->handle.data, sizeof(params.handle));
	*ret_params = params;
	return 0;
}

/* It is watched before it is touched for the first time. */
static int watch_memfd(const struct incoming *in, const struct buffer *buffer,
		       struct failure *failure)
{
	int r = buffer_check_whole(in->fd, buffer->len, failure);

	if (r)
		return r;
	r = holes_watch(buffer->data, (size_t)buffer->len);
	return r ? failure_set(failure, r, "cannot watch the memfd's pages: %s", strerror(-r)) : 0;
}

static int take_buffer(const struct incoming *in, const Bps__Control__Share *m,
		       struct buffer **ret_buffer, struct failure *failure)
{
	struct gpu_memory_params params;
	int r;

	session_take_holes(in->session->control);
	if (m->kind == MEMORY_MEMFD)
		return buffer_map(in->fd, m->len, &in->session->memory.quota, ret_buffer, failure);
	r = take_device(in, m, &params, failure);
	return r ? r : buffer_of_device(&params, ret_buffer, failure);
}

/* What the daemon holds for a buffer, but for memory that the session's quota is charged with. */
struct buffer_costs {
	uint64_t addresses, held; /* bytes */
	unsigned n_descriptors;
};

/*
 * Charges the session's user. The descriptors are released when the buffer is; the rest, as *ret_charges says, when it has been unmapped.
 * Returns 0; or -EDQUOT with words.
 */
static int charge_buffer(const struct session *session, const struct buffer_costs *costs,
			 struct unmap_charge ret_charges[UNMAP_CHARGES], struct failure *failure)
{
	struct account *account = session->account;
	const struct {
		enum account_kind kind;
		uint64_t amount;
	} all[] = {
		{ ACCOUNT_MAPPED, costs->addresses },
		{ ACCOUNT_MAPPINGS, 1 },
		{ ACCOUNT_MEMORY, costs->held },
		{ ACCOUNT_DESCRIPTORS, costs->n_descriptors },
	};

	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		int r = account_charge(account, all[i].kind, all[i].amount, failure);

		if (!r)
			continue;
		while (i--)
			account_release(account, all[i].kind, all[i].amount);
		return r;
	}
	for (size_t i = 0; i < UNMAP_CHARGES; i++)
		ret_charges[i] =
			(struct unmap_charge){ account_quota(account, all[i].kind), all[i].amount };
	return 0;
}

/* What stays of it here is charged first. */
static int take_charged(const struct incoming *in, const Bps__Control__Share *m,
			struct buffer **ret_buffer, struct failure *failure)
{
	bool is_memfd = m->kind == MEMORY_MEMFD;
	struct buffer_costs costs = {
		.addresses = is_memfd ? 0 : m->len,
		.held = BUFFER_BYTES + (is_memfd ? m->len / PAGE_TABLE_SHARE : 0),
		.n_descriptors = m->kind == MEMORY_CUDA_FD,
	};
	_cleanup_(buffer_unrefp) struct buffer *buffer = NULL;
	struct unmap_charge charges[UNMAP_CHARGES];
	int r = is_memfd ? 0 : buffer_check_device(m->len, failure);

	if (!r)
		r = charge_buffer(in->session, &costs, charges, failure);
	if (r)
		return r;
	r = take_buffer(in, m, &buffer, failure);
	if (r) {
		unmap_release(charges);
	} else {
		memcpy(buffer->charges, charges, sizeof(charges));
		r = is_memfd ? watch_memfd(in, buffer, failure) : 0;
	}
	if (r) {
		account_release(in->session->account, ACCOUNT_DESCRIPTORS, costs.n_descriptors);
		return r;
	}
	buffer->n_descriptors = costs.n_descriptors;
	*ret_buffer = TAKE_PTR(buffer);
	return 0;
}

/* A device's memory was imported by the worker of the session's job, or not. */
static void on_imported(void *user, const struct failure *why)
{
	struct buffer *buffer = user;
	struct session *session = buffer->user;
	uint64_t id = buffer->cookie;

	/* It was given up, and a request still holds it; or will be. */
	if (buffer->released || session->state == SESSION_CLOSED)
		return;
	if (why) {
		map_remove(&session->memory.buffers, &buffer->entry);
		session_drop_buffer(session, buffer, 0);
	}
	session_answer(session, id, why ? why->status : 0, why ? why->text : NULL);
}

static void handle_share(const struct incoming *in, const Bps__Control__Share *m)
{
	struct session *session = in->session;
	struct buffer *buffer = NULL;
	struct failure failure = { 0 };
	int r = 0;

	if (m->kind == MEMORY_MEMFD && in->fd < 0)
		r = failure_set(&failure, -EINVAL, "no descriptor came beside Share");
	else if (!m->buffer || map_find(&session->memory.buffers, m->buffer))
		r = failure_set(&failure, -EEXIST, "buffer %u is %s", m->buffer,
				m->buffer ? "shared already" : "no number");
	else if (session->memory.buffers.n_entries >= session->control->params.max_buffers)
		r = failure_set(&failure, -EDQUOT,
				"%u buffers are shared already: that is max_buffers",
				session->control->params.max_buffers);
	if (!r)
		r = take_charged(in, m, &buffer, &failure);
	if (!r && (agent_buffer_shared(session->control->params.agent, buffer) ||
		   (!buffer->device && places_add(&session->control->buffers, buffer)) ||
		   map_add(&session->memory.buffers, m->buffer, &buffer->entry))) {
		places_remove(&session->control->buffers, buffer);
		account_release(session->account, ACCOUNT_DESCRIPTORS, buffer->n_descriptors);
		buffer = buffer_unref(buffer);
		r = failure_set(&failure, -ENOMEM, "out of memory");
	}
	if (r) {
		refuse(in, &failure);
		return;
	}
	buffer->number = m->buffer;
	buffer->user = session;
	buffer->cookie = in->id;
	if (!buffer->device || !session->job.is_in || session->job.join_id ||
	    !agent_import(&session->job.member, buffer, on_imported))
		session_answer(session, in->id, 0, NULL);
}

static void handle_unshare(const struct incoming *in, const Bps__Control__Unshare *m)
{
	struct session *session = in->session;
	struct map_entry *entry;
	struct buffer *buffer;

	entry = map_find(&session->memory.buffers, m->buffer);
	if (!entry) {
		session_answer(session, in->id, -EINVAL, "no such buffer is shared");
		return;
	}
	map_remove(&session->memory.buffers, entry);
	buffer = container_of(entry, struct buffer, entry);
	session_drop_buffer(session, buffer, in->id);
}

/* -- Cancel and Blocked ------------------------------------------------------------------------------------------- */

/* What is under way in a slot, or NULL: it has ended. */
static struct agent_request *find_request(const struct session *session, uint32_t slot,
					  uint64_t ticket)
{
	struct session_request *request = slot < SHM_SLOTS ? session->ring.requests[slot] : NULL;

	return request && request->busy && request->base.ticket == ticket ? &request->base : NULL;
}

static void handle_cancel(const struct incoming *in, const Bps__Control__Cancel *m)
{
	struct agent_request *request = find_request(in->session, m->slot, m->ticket);

	if (request)
		agent_cancel(request);
	session_answer(in->session, in->id, 0, NULL);
}

static void handle_blocked(const struct incoming *in, const Bps__Control__Blocked *m)
{
	struct agent_request *request = find_request(in->session, m->slot, m->ticket);

	if (request)
		agent_blocked(request, m->over);
	session_answer(in->session, in->id, 0, NULL);
}

/* -- Packets ------------------------------------------------------------------------------------------------------ */

static void handle(const struct incoming *in, const Bps__Control__Request *request)
{
	switch (request->body_case) {
	case BPS__CONTROL__REQUEST__BODY_HELLO:
		handle_hello(in, request->hello);
		break;
	case BPS__CONTROL__REQUEST__BODY_JOIN:
		handle_join(in, request->join, 0);
		break;
	case BPS__CONTROL__REQUEST__BODY_RESUME:
		handle_resume(in, request->resume);
		break;
	case BPS__CONTROL__REQUEST__BODY_SHARE:
		handle_share(in, request->share);
		break;
	case BPS__CONTROL__REQUEST__BODY_UNSHARE:
		handle_unshare(in, request->unshare);
		break;
	case BPS__CONTROL__REQUEST__BODY_DECLARE:
		tensor_handle_declare(in, request->declare);
		break;
	case BPS__CONTROL__REQUEST__BODY_CANCEL:
		handle_cancel(in, request->cancel);
		break;
	case BPS__CONTROL__REQUEST__BODY_BLOCKED:
		handle_blocked(in, request->blocked);
		break;
	case BPS__CONTROL__REQUEST__BODY_LEAVE:
		handle_leave(in, request->leave);
		break;
	case BPS__CONTROL__REQUEST__BODY_REGROUP:
		handle_regroup(in);
		break;
	case BPS__CONTROL__REQUEST__BODY_RELEASE:
		tensor_handle_release(in, request->release);
		break;
	case BPS__CONTROL__REQUEST__BODY_STATUS:
		handle_status(in);
		break;
	case BPS__CONTROL__REQUEST__BODY_FOLLOW:
		follow_handle(in, request->follow);
		break;
	default:
		session_answer(in->session, in->id, -EOPNOTSUPP,
			       "this daemon (" BPS_VERSION ") does not know this request");
		break;
	}
}

/* Whether a descriptor belongs beside it, and which. */
static bool wants_descriptor(const Bps__Control__Request *request, enum porter_want *ret_want)
{
	*ret_want = PORTER_MEMFD;
	if (request->body_case == BPS__CONTROL__REQUEST__BODY_RESUME)
		return true;
	if (request->body_case != BPS__CONTROL__REQUEST__BODY_SHARE)
		return false;
	if (request->share->kind == MEMORY_CUDA_FD)
		*ret_want = PORTER_FRAME;
	return true;
}

/*
 * What was posted before a request belongs to the run that is left or regrouped, uses the buffer that is unshared, is what is
 * cancelled or waited for, or was begun before the rank followed the others.
 */
static bool comes_after_entries(const Bps__Control__Request *request)
{
	return request->body_case == BPS__CONTROL__REQUEST__BODY_REGROUP ||
	       request->body_case == BPS__CONTROL__REQUEST__BODY_LEAVE ||
	       request->body_case == BPS__CONTROL__REQUEST__BODY_UNSHARE ||
	       request->body_case == BPS__CONTROL__REQUEST__BODY_CANCEL ||
	       request->body_case == BPS__CONTROL__REQUEST__BODY_BLOCKED ||
	       request->body_case == BPS__CONTROL__REQUEST__BODY_FOLLOW;
}

static void defer(struct session *session, Bps__Control__Request *request, uint64_t until)
{
	session->deferred.request = request;
	session->deferred.until = until;
	ring_work(session, SESSION_ENTRIES);
}

void session_take_packet(struct session *session, const void *data, size_t len, bool has_fds)
{
	_cleanup_(unpack_freep) Bps__Control__Request *request = NULL;
	struct incoming in = { .session = session, .fd = -1 };
	enum porter_want want;
	uint64_t until;
	int r;

	r = unpack(&bps__control__request__descriptor, data, len, (ProtobufCMessage **)&request);
	if (r) {
		session_fail(session, "sent a packet that is no request: %s", strerror(-r));
		return;
	}
	in.id = request->id;
	if (!request->id)
		session_fail(session, "sent a request without a number");
	else if (has_fds && !wants_descriptor(request, &want))
		session_fail(session, "sent descriptors where none belong");
	else if (session->state == SESSION_GREETING &&
		 request->body_case != BPS__CONTROL__REQUEST__BODY_HELLO)
		session_fail(session, "asked for something before Hello");
	else if (has_fds)
		session_fetch(session, want, TAKE_PTR(request));
	else if (comes_after_entries(request) && ring_is_behind(session, &until))
		defer(session, TAKE_PTR(request), until);
	else
		handle(&in, request);
}

void session_take_deferred(struct session *session)
{
	_cleanup_(unpack_freep) Bps__Control__Request *request =
		TAKE_PTR(session->deferred.request);
	struct incoming in = { .session = session, .id = request->id, .fd = -1 };
	uint64_t began_ns = clock_now_ns();

	handle(&in, request);
	session_charge_pace(session, began_ns);
}

void session_take_fetched(struct session *session, Bps__Control__Request *request, int status,
			  int fd)
{
	struct incoming in = { .session = session, .id = request->id, .fd = fd };
	enum porter_want want;

	(void)wants_descriptor(request, &want);
	/* One that is frozen takes nothing any more. */
	if (session->state != SESSION_CLOSED && session->socket.loop) {
		if (!status)
			handle(&in, request);
		else if (status == -EINVAL &&
			 request->body_case == BPS__CONTROL__REQUEST__BODY_RESUME)
			session_answer(session, in.id, -EPROTO,
				       "what came beside Resume is no ledger");
		else if (status == -EINVAL)
			session_answer(session, in.id, -EINVAL, "the descriptor is not a memfd");
		else if (status == -E2BIG)
			session_fail(session, "sent several descriptors where one belongs");
		else
			session_fail(session, "sent a descriptor that cannot be fetched: %s",
				     strerror(-status));
	}
	if (want == PORTER_FRAME)
		porter_close(NULL, fd);
	else
		(void)fd_close(fd);
}
