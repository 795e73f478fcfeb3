/*
 * Calls to the daemon: each call_*() sends one request of control.proto over the session's
 * socket and remembers where its answer goes; call_receive() takes answers and events. What the
 * socket has no room for is queued. The library's other files call with the client's mutex held.
 */
#include "control.pb-c.h"
#include "cuda.h"
#include "proto/frame.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>

/* The last errno that Linux has room for: a status beyond is nonsense. */
#define STATUS_MIN (-4095)

static void packet_free(struct client_packet *packet)
{
	fd_close(packet->fd);
	free(packet->data);
	free(packet);
}

/* The caller's epoll has to see the socket become writable too. */
static void call_watch_writable(struct bps_client *client, bool writable)
{
	struct epoll_event event = {
		.events = EPOLLIN | (writable ? EPOLLOUT : 0),
		.data.fd = client->socket,
	};

	(void)epoll_ctl(client->epoll, EPOLL_CTL_MOD, client->socket, &event);
}

void call_unsend_all(struct bps_client *client)
{
	struct client_packet *packet;
	struct client_call *call;

	while ((packet = TAILQ_FIRST(&client->calls.outbox))) {
		TAILQ_REMOVE(&client->calls.outbox, packet, link);
		packet_free(packet);
	}
	client->calls.n_packets_sent = client->calls.n_packets;
	TAILQ_FOREACH(call, &client->calls.list, link)
	{
		call->id = 0;
		call->deadline_ns = CLIENT_FOREVER;
	}
}

static int call_queue(struct bps_client *client, void **data, size_t len, int fd)
{
	struct client_packet *packet = calloc(1, sizeof(*packet));
	if (!packet)
		return error_set(-ENOMEM, "out of memory");

	packet->fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (fd >= 0 && packet->fd < 0) {
		free(packet);
		return error_set(-errno, "no descriptor to send memory with: %m");
	}
	packet->data = TAKE_PTR(*data);
	packet->len = len;

	if (TAILQ_EMPTY(&client->calls.outbox))
		call_watch_writable(client, true);
	TAILQ_INSERT_TAIL(&client->calls.outbox, packet, link);
	/* A leader in poll() must wait for the socket to take it. */
	client_wake(client);
	return 0;
}

void call_send_queued(struct bps_client *client)
{
	struct client_packet *packet;

	while ((packet = TAILQ_FIRST(&client->calls.outbox))) {
		int r = frame_send(client->socket, packet->data, packet->len, &packet->fd,
				   packet->fd >= 0);
		if (r == FRAME_E_AGAIN)
			return;
		/*
		 * A broken socket: receiving finds out and says so, after what the daemon said
		 * last.
		 */
		TAILQ_REMOVE(&client->calls.outbox, packet, link);
		packet_free(packet);
		client->calls.n_packets_sent++;
		if (TAILQ_EMPTY(&client->calls.outbox))
			call_watch_writable(client, false);
	}
}

static int call_send_packet(struct bps_client *client, const Bps__Control__Request *request, int fd)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	r = pack(&request->base, FRAME_MAX, &data, &len);
	if (r)
		return error_set(r, "cannot pack a request to the daemon: %s", strerror(-r));

	r = FRAME_E_AGAIN;
	if (TAILQ_EMPTY(&client->calls.outbox))
		r = frame_send(client->socket, data, len, &fd, fd >= 0);
	if (r == FRAME_E_AGAIN) {
		r = call_queue(client, &data, len, fd);
		if (r)
			return r;
		client->calls.n_packets++;
	} else {
		/* As in call_send_queued(): if the socket is broken, receiving says why. */
		client->calls.n_packets++;
		client->calls.n_packets_sent++;
	}
	return 0;
}

/*
 * Sends a request, if the session is in state `from` or beyond, and expects the answer's body
 * `expects` for call. fd: beside it, or -1. A call that is unanswered already is asked again.
 */
static int call_send(struct bps_client *client, struct client_call *call,
		     Bps__Control__Request *request, int expects, int fd, enum session_state from)
{
	bool is_sent = client->session.state >= from;
	int r;

	r = client_failed(client);
	if (r)
		return r;
	request->id = ++client->calls.next;
	r = is_sent ? call_send_packet(client, request, fd) : 0;
	if (r || !call)
		return r;

	if (!call->pending)
		TAILQ_INSERT_TAIL(&client->calls.list, call, link);
	/* The leader is to hear the socket now. */
	if (client->waiting.leading)
		(void)client_wake_leader(client);
	call->pending = true;
	call->done = false;
	memset(&call->answer, 0, sizeof(call->answer));
	call->answer.ledger = -1;
	call->expects = expects;
	call->id = is_sent ? request->id : 0;
	call->deadline_ns = is_sent ? client_now_ns() : CLIENT_FOREVER;
	if (is_sent && ADD_OVERFLOW(call->deadline_ns, call->timeout_ns ?: CLIENT_ANSWER_NS,
				    &call->deadline_ns))
		call->deadline_ns = CLIENT_FOREVER;
	return 0;
}

int call_hello(struct bps_client *client, struct client_call *call)
{
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	char software[] = "libbps_client " BPS_VERSION;

	hello.version = CLIENT_PROTOCOL;
	hello.version_min = CLIENT_PROTOCOL_MIN;
	hello.features = CONTROL_FEATURE_CUDA | CONTROL_FEATURE_ELASTIC | CONTROL_FEATURE_ORDER |
			 CONTROL_FEATURE_RELEASE;
	if (client->restart_timeout_ms >= 0)
		hello.features |= CONTROL_FEATURE_RESUME;
	hello.software = software;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	return call_send(client, call, &request, BPS__CONTROL__MESSAGE__BODY_WELCOME, -1,
			 SESSION_GREETING);
}

static Bps__Control__Join call_join_body(const struct bps_join_params *params,
					 Bps__Control__Stragglers *stragglers)
{
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;

	join.job = (char *)params->job;
	join.has_secret = params->secret_len > 0;
	join.secret = (ProtobufCBinaryData){ params->secret_len, (uint8_t *)params->secret };
	join.rank = params->rank;
	join.size = params->world_size;
	join.local_rank = params->local_rank;
	join.local_size = params->local_size;
	join.node = params->node;
	join.n_nodes = params->n_nodes;
	join.has_timeout_ms = join.has_request_timeout_ms = true;
	join.timeout_ms = (uint64_t)params->timeout_ms;
	join.request_timeout_ms = (uint64_t)params->request_timeout_ms;
	join.has_force_distributed = join.has_min_servers = join.has_part_bytes = true;
	join.force_distributed = params->force_distributed != 0;
	join.min_servers = params->min_servers;
	join.part_bytes = params->part_bytes;
	join.has_gpu_reduce = params->gpu_reduce != 0;
	join.gpu_reduce = (uint32_t)params->gpu_reduce;
	join.has_gpu_roots = params->gpu_roots != 0;
	join.gpu_roots = params->gpu_roots;
	bps__control__stragglers__init(stragglers);
	stragglers->has_quorum = stragglers->has_quorum_timeout_ms = true;
	stragglers->has_async = stragglers->has_staleness = true;
	stragglers->quorum = params->quorum;
	stragglers->quorum_timeout_ms = (uint64_t)params->quorum_timeout_ms;
	stragglers->async = params->asynchronous != 0;
	stragglers->staleness = params->staleness;
	if (params->quorum || params->asynchronous)
		join.stragglers = stragglers;
	join.has_elastic = join.has_min_ranks = join.has_max_ranks = params->elastic != 0;
	join.elastic = params->elastic != 0;
	join.min_ranks = params->min_ranks;
	join.max_ranks = params->max_ranks;
	join.has_newcomer = join.newcomer = params->newcomer != 0;
	return join;
}

int call_join(struct bps_client *client)
{
	Bps__Control__Stragglers stragglers;
	Bps__Control__Join join = call_join_body(&client->job.params, &stragglers);
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	return call_send(client, &client->job.join, &request, BPS__CONTROL__MESSAGE__BODY_JOINED,
			 -1, SESSION_OPEN);
}

int call_resume(struct bps_client *client)
{
	Bps__Control__Stragglers stragglers;
	Bps__Control__Join join = call_join_body(&client->job.params, &stragglers);
	Bps__Control__Resume resume = BPS__CONTROL__RESUME__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	resume.join = &join;
	resume.job = client->job.number;
	request.body_case = BPS__CONTROL__REQUEST__BODY_RESUME;
	request.resume = &resume;
	return call_send(client, &client->job.join, &request, BPS__CONTROL__MESSAGE__BODY_JOINED,
			 client->job.ledger, SESSION_OPEN);
}

int call_leave(struct bps_client *client)
{
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	struct job *job = &client->job;

	/*
	 * After a restart it is answered when the others have caught up, who may be computing: as
	 * long as for a request.
	 */
	if (job->resumed &&
	    (MUL_OVERFLOW(job->params.request_timeout_ms, INT64_C(1000000),
			  &job->leave.timeout_ns) ||
	     ADD_OVERFLOW(job->leave.timeout_ns, CLIENT_ANSWER_NS, &job->leave.timeout_ns)))
		job->leave.timeout_ns = CLIENT_FOREVER;
	leave.error = (char *)job->error;
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	return call_send(client, &job->leave, &request, 0, -1, SESSION_READY);
}

int call_regroup(struct bps_client *client)
{
	Bps__Control__Regroup regroup = BPS__CONTROL__REGROUP__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	request.body_case = BPS__CONTROL__REQUEST__BODY_REGROUP;
	request.regroup = &regroup;
	return call_send(client, &client->job.regroup, &request, BPS__CONTROL__MESSAGE__BODY_JOINED,
			 -1, SESSION_READY);
}

int call_follow(struct bps_client *client, struct client_call *call)
{
	Bps__Control__Follow follow = BPS__CONTROL__FOLLOW__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	follow.follows = client->follow.said.on;
	/* Once all were, the turn is the next one, in which this rank is not idle yet. */
	follow.has_idle = follow.idle = client->follow.said.idle && !client->follow.said.all;
	follow.turn = client->follow.n_all + 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_FOLLOW;
	request.follow = &follow;
	return call_send(client, call, &request, 0, -1, SESSION_READY);
}

/* Asked again, ret is what it was. */
int call_status(struct bps_client *client, struct bps_status *ret)
{
	Bps__Control__Status status = BPS__CONTROL__STATUS__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	int r;

	request.body_case = BPS__CONTROL__REQUEST__BODY_STATUS;
	request.status = &status;
	r = call_send(client, &client->calls.asked, &request,
		      BPS__CONTROL__MESSAGE__BODY_STATUS_REPLY, -1, SESSION_READY);
	client->calls.asked.answer.status = ret;
	return r;
}

int call_share(struct bps_client *client, struct bps_memory *memory)
{
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	share.buffer = memory->number;
	share.len = memory->len;
	if (memory->cuda) {
		share.has_kind = share.has_device = true;
		share.kind = memory->cuda->kind;
		share.device = (ProtobufCBinaryData){ DEVICE_UUID_LEN, memory->cuda->device->uuid };
		share.has_handle = memory->cuda->kind == MEMORY_CUDA_IPC;
		share.handle = (ProtobufCBinaryData){ sizeof(memory->cuda->handle),
						      (uint8_t *)&memory->cuda->handle };
	}
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	return call_send(client, &memory->share, &request, 0, memory->fd, SESSION_OPEN);
}

int call_unshare(struct bps_client *client, struct client_call *call, uint32_t number)
{
	Bps__Control__Unshare unshare = BPS__CONTROL__UNSHARE__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	unshare.buffer = number;
	request.body_case = BPS__CONTROL__REQUEST__BODY_UNSHARE;
	request.unshare = &unshare;
	return call_send(client, call, &request, 0, -1, SESSION_OPEN);
}

int call_declare(struct bps_client *client, struct client_call *call,
		 const struct bps_tensor *tensor, uint64_t failed)
{
	Bps__Control__Declare declare = BPS__CONTROL__DECLARE__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	declare.tensor = tensor->number;
	declare.name = tensor->name;
	declare.dtype = tensor->dtype;
	declare.elements = tensor->elements;
	declare.shape = tensor->shape;
	declare.has_rounds = tensor->was_declared;
	declare.rounds = tensor->settled;
	declare.failed = failed;
	declare.has_failed = declare.failed != 0;
	request.body_case = BPS__CONTROL__REQUEST__BODY_DECLARE;
	request.declare = &declare;
	return call_send(client, call, &request, BPS__CONTROL__MESSAGE__BODY_DECLARED, -1,
			 SESSION_DECLARING);
}

int call_release(struct bps_client *client, struct client_call *call, uint32_t number, bool in_use)
{
	Bps__Control__Release release = BPS__CONTROL__RELEASE__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	release.tensor = number;
	release.has_in_use = release.in_use = in_use;
	request.body_case = BPS__CONTROL__REQUEST__BODY_RELEASE;
	request.release = &release;
	return call_send(client, call, &request, 0, -1, SESSION_READY);
}

int call_cancel(struct bps_client *client, const struct bps_request *cancelled)
{
	Bps__Control__Cancel cancel = BPS__CONTROL__CANCEL__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	cancel.slot = cancelled->slot;
	cancel.ticket = cancelled->ticket;
	request.body_case = BPS__CONTROL__REQUEST__BODY_CANCEL;
	request.cancel = &cancel;
	return call_send(client, NULL, &request, 0, -1, SESSION_READY);
}

int call_blocked(struct bps_client *client, const struct bps_request *in, bool over)
{
	Bps__Control__Blocked blocked = BPS__CONTROL__BLOCKED__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;

	blocked.slot = in->slot;
	blocked.ticket = in->ticket;
	blocked.has_over = blocked.over = over;
	request.body_case = BPS__CONTROL__REQUEST__BODY_BLOCKED;
	request.blocked = &blocked;
	return call_send(client, NULL, &request, 0, -1, SESSION_READY);
}

int call_wait(struct bps_client *client, struct client_call *call, int64_t limit_ns)
{
	while (!call->done) {
		int64_t deadline_ns = MIN(limit_ns, call->deadline_ns);

		if (client_now_ns() >= deadline_ns)
			client_fail(client, "the daemon at %s does not answer", client->path);
		else
			client_wait(client, deadline_ns);
	}
	if (call->status)
		(void)error_set(call->status, "%s", call->text);
	return call->status;
}

int call_flush(struct bps_client *client, uint64_t packet)
{
	int64_t deadline_ns = client_now_ns() + CLIENT_ANSWER_NS;

	while (client->calls.n_packets_sent < packet && !client->failure) {
		if (client_now_ns() >= deadline_ns)
			client_fail(client, "the daemon at %s does not read", client->path);
		else
			client_wait(client, deadline_ns);
	}
	return client_failed(client);
}

void call_forget(struct bps_client *client, struct client_call *call)
{
	if (!call->pending)
		return;
	TAILQ_REMOVE(&client->calls.list, call, link);
	call->pending = false;
	call->id = 0;
}

void call_finish(struct bps_client *client, struct client_call *call, int status, const char *text)
{
	call_forget(client, call);
	call->done = true;
	call->status = status;
	if (status)
		(void)snprintf(call->text, sizeof(call->text), "%s", text);
	if (call->answered)
		call->answered(client, call);
}

void call_finish_all(struct bps_client *client, int status, const char *text)
{
	while (!TAILQ_EMPTY(&client->calls.list))
		call_finish(client, TAILQ_FIRST(&client->calls.list), status, text);
}

/* A status from outside, with a text in any case. */
static int message_status(const Bps__Control__Message *message, const char **ret_text)
{
	int status = message->status;

	if (status > 0 || status < STATUS_MIN) {
		*ret_text = "the daemon's answer has a status that is none";
		return -EPROTO;
	}
	*ret_text = message->text && *message->text ? message->text : strerror(-status);
	return status;
}

static void call_take_terms(struct client_call *call, const Bps__Control__Terms *terms)
{
	call->answer.has_terms = terms && terms->request_timeout_ms <= INT64_MAX;
	if (!call->answer.has_terms)
		return;
	call->answer.request_timeout_ms = (int64_t)terms->request_timeout_ms;
	call->answer.min_servers = terms->min_servers;
	call->answer.part_bytes = terms->part_bytes;
	call->answer.gpu_reduce = terms->gpu_reduce;
	call->answer.gpu_roots = terms->gpu_roots;
	call->answer.min_ranks = terms->min_ranks;
	call->answer.max_ranks = terms->max_ranks;
}

static void call_take_status(struct bps_status *status, const Bps__Control__StatusReply *reply)
{
	*status = (struct bps_status){
		.size = sizeof(*status),
		.run = reply->job,
		.n_rounds = reply->rounds,
		.n_bytes = reply->bytes,
		.n_under_way = reply->in_flight,
		.world_size = reply->size,
		.n_nodes = reply->n_nodes,
		.n_here = reply->n_local,
	};
	(void)snprintf(status->state, sizeof(status->state), "%s", reply->state ?: "");
	(void)snprintf(status->waiting_for, sizeof(status->waiting_for), "%s",
		       reply->waiting_for ?: "");
	(void)snprintf(status->node, sizeof(status->node), "%s", reply->node);
	(void)snprintf(status->cluster, sizeof(status->cluster), "%s", reply->cluster);
}

/* fd: what came beside the message, or -1. */
static void call_answer(struct bps_client *client, struct client_call *call,
			const Bps__Control__Message *message, int *fd)
{
	const char *text;
	int status = message_status(message, &text);

	if (!status && (int)message->body_case != call->expects) {
		status = -EPROTO;
		text = "the daemon's answer is not one to what was asked";
	}
	if (!status && message->body_case == BPS__CONTROL__MESSAGE__BODY_WELCOME) {
		call->answer.version = message->welcome->version;
		call->answer.features = message->welcome->features;
		call->answer.daemon = message->welcome->daemon;
		call->answer.resume_timeout_ms = message->welcome->resume_timeout_ms;
		call->answer.shm_len = message->welcome->shm_len;
	} else if (!status && message->body_case == BPS__CONTROL__MESSAGE__BODY_JOINED) {
		call->answer.job = message->joined->job;
		call->answer.n_servers = message->joined->n_servers;
		call->answer.ledger = TAKE_FD(*fd);
		call->answer.membership = message->joined->membership;
		call->answer.rank = message->joined->rank;
		call->answer.size = message->joined->size;
		call->answer.local_rank = message->joined->local_rank;
		call->answer.local_size = message->joined->local_size;
		call->answer.node = message->joined->node;
		call->answer.n_nodes = message->joined->n_nodes;
		call_take_terms(call, message->joined->terms);
	} else if (!status && message->body_case == BPS__CONTROL__MESSAGE__BODY_DECLARED) {
		call->answer.key = message->declared->key;
		call->answer.part_bytes = message->declared->part_bytes;
	} else if (!status && message->body_case == BPS__CONTROL__MESSAGE__BODY_STATUS_REPLY) {
		call_take_status(call->answer.status, message->status_reply);
	}
	call_finish(client, call, status, text);
}

static void call_take_begun(struct bps_client *client, const Bps__Control__Begun *message)
{
	struct bps_begun begun = {
		.size = sizeof(begun),
		.dtype = (int)message->dtype,
		.elements = message->elements,
		.round = message->round,
		.operation = (int)message->operation,
		.reduction = (int)message->reduction,
	};

	if (strlen(message->name) >= sizeof(begun.name)) {
		client_fail(client, "the daemon at %s tells of a tensor with a name of %zu bytes",
			    client->path, strlen(message->name));
		return;
	}
	(void)strcpy(begun.name, message->name);
	client->ops->begun(client, &begun, message->first);
}

static void call_message(struct bps_client *client, const Bps__Control__Message *message, int *fd)
{
	struct client_call *call;
	const char *text;

	if (!message->id) {
		int status = message_status(message, &text);

		if (message->body_case == BPS__CONTROL__MESSAGE__BODY_JOB_FAILED)
			client->ops->job_is_over(client, message->job_failed->job, status, text);
		else if (message->body_case == BPS__CONTROL__MESSAGE__BODY_UNUSED)
			client->ops->unused(client, message->unused->name, message->unused->tensor);
		else if (message->body_case == BPS__CONTROL__MESSAGE__BODY_BEGUN)
			call_take_begun(client, message->begun);
		else if (message->body_case == BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW)
			client->ops->all_follow(client, message->all_follow->turn, status, text);
		else if (status)
			(void)snprintf(client->farewell, sizeof(client->farewell), ": %s", text);
		/* Other events are of a newer daemon, which knows that we may not know them. */
		return;
	}

	TAILQ_FOREACH(call, &client->calls.list, link)
	{
		if (call->id == message->id) {
			call_answer(client, call, message, fd);
			return;
		}
	}
	/* An answer that nobody waits for. */
}

/* Receives one packet. 0 and a message, FRAME_E_AGAIN, FRAME_E_EOF, or a negative errno. */
static int call_receive_one(struct bps_client *client, int fds[FRAME_FDS], size_t *ret_n_fds,
			    Bps__Control__Message **ret_message)
{
	ProtobufCMessage *message;
	size_t len;
	int r;

	r = frame_receive(client->socket, client->frame, &len, fds, ret_n_fds);
	if (r)
		return r;
	r = unpack(&bps__control__message__descriptor, client->frame, len, &message);
	if (r) {
		while (*ret_n_fds)
			fd_close(fds[--*ret_n_fds]);
		return r;
	}
	*ret_message = (Bps__Control__Message *)message;
	return 0;
}

bool call_receive(struct bps_client *client)
{
	bool changed = false, reset = false;

	while (!client->failure && client->session.state >= SESSION_OPEN) {
		_cleanup_(unpack_freep) ProtobufCMessage *base = NULL;
		Bps__Control__Message *message = NULL;
		int fds[FRAME_FDS] = { -1 };
		size_t n_fds = 0;
		int r;

		r = call_receive_one(client, fds, &n_fds, &message);
		if (r == FRAME_E_AGAIN)
			break;
		changed = true;
		if (r == FRAME_E_EOF && !reset) {
			/*
			 * A reset hides what the daemon said before: it is reported once, ahead of
			 * that.
			 */
			reset = true;
		} else if (r == FRAME_E_EOF) {
			client->ops->lost(client);
		} else if (r) {
			client_fail(client, "the daemon at %s is not to be understood: %s",
				    client->path, strerror(-r));
		} else {
			base = &message->base;
			call_message(client, message, &fds[0]);
			while (n_fds)
				fd_close(fds[--n_fds]);
		}
	}
	return changed;
}

int call_receive_welcome(struct bps_client *client, struct client_call *call, int fds[3])
{
	_cleanup_(unpack_freep) ProtobufCMessage *base = NULL;
	Bps__Control__Message *message = NULL;
	int received[FRAME_FDS];
	size_t n_fds = 0;
	int r;

	r = call_receive_one(client, received, &n_fds, &message);
	if (r == FRAME_E_AGAIN)
		return -EAGAIN;
	if (r == FRAME_E_EOF) /* see call_receive() */
		r = call_receive_one(client, received, &n_fds, &message);
	if (r == FRAME_E_EOF)
		return error_set(-ECONNRESET, "the daemon at %s hung up without a word",
				 client->path);
	if (r)
		return error_set(-EPROTO, "%s is not the socket of a bps-daemon: %s", client->path,
				 strerror(-r));

	base = &message->base;
	/* A daemon that is full says so without having read anything. */
	if (message->id == call->id || (!message->id && message->status))
		call_answer(client, call, message, &received[0]);
	if (call->done && !call->status && n_fds == 3) {
		memcpy(fds, received, 3 * sizeof(fds[0]));
		return 0;
	}

	while (n_fds)
		fd_close(received[--n_fds]);
	if (call->done && call->status)
		return error_set(call->status, "%s", call->text);
	return error_set(-EPROTO, "%s is not the socket of a bps-daemon: a wrong welcome",
			 client->path);
}
