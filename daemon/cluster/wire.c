/*
 * Packs, unpacks and checks the messages of cluster.proto between coordinator and members, and
 * what members keep in etcd. coordinator*.c and source_*.c call.
 */
#include "cluster/wire.h"
#include "cluster/cluster_file.h"
#include "cluster/member.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "proto/text.h"
#include "proto/types.h"
#include "rpc/rpc.h"

#include <stdio.h>

void wire_bytes_done(struct wire_bytes *bytes)
{
	free(bytes->data);
	*bytes = (struct wire_bytes){ 0 };
}

static int pack_bytes(const ProtobufCMessage *message, struct wire_bytes *ret_bytes)
{
	return error_trace(pack(message, RPC_MESSAGE_MAX, &ret_bytes->data, &ret_bytes->len));
}

static int unpack_bytes(const ProtobufCMessageDescriptor *descriptor, const void *data, size_t len,
			struct failure *failure, void *ret_message)
{
	ProtobufCMessage *message;
	int r;

	r = unpack(descriptor, data, len, &message);
	if (r)
		return failure_set(failure, r, "not a message %s: %s", descriptor->name,
				   strerror(-r));
	*(ProtobufCMessage **)ret_message = message;
	return 0;
}

static int copy_bytes(ProtobufCBinaryData from, struct wire_bytes *ret_bytes)
{
	void *data = malloc(MAX(from.len, (size_t)1));

	if (!data)
		return error_origin(-ENOMEM);
	if (from.len)
		memcpy(data, from.data, from.len);
	*ret_bytes = (struct wire_bytes){ data, from.len };
	return 0;
}

/* Jobs are named by their users: any text that may be shown, as in the control protocol. */
static int read_job_name(const char *from, char to[64], struct failure *failure)
{
	size_t len = strlen(from);

	if (!len || len > JOB_NAME_MAX)
		return failure_set(failure, -EINVAL, "a job's name has 1 to %d bytes",
				   JOB_NAME_MAX);
	if (!text_is_plain(from, len))
		return failure_set(failure, -EINVAL,
				   "job %s: a name is UTF-8 of printable characters", from);
	memcpy(to, from, len + 1);
	return 0;
}

/* Members and views */

static void write_member(const struct view_member *from, Bps__Cluster__Member *to)
{
	bps__cluster__member__init(to);
	to->id = from->id;
	to->name = (char *)from->name;
	to->roles = from->roles;
	to->address = (char *)from->address;
	to->has_bandwidth_mbps = from->bandwidth_mbps > 0;
	to->bandwidth_mbps = from->bandwidth_mbps;
}

static int read_member(const Bps__Cluster__Member *from, struct view_member *to,
		       struct failure *failure)
{
	const char *why;

	*to = (struct view_member){
		.id = from->id,
		.roles = from->roles,
		.bandwidth_mbps = from->bandwidth_mbps,
	};
	if (strlen(from->name) >= sizeof(to->name) || strlen(from->address) >= sizeof(to->address))
		return failure_set(failure, -EINVAL, "a member's name or address is too long");
	memcpy(to->name, from->name, strlen(from->name) + 1);
	memcpy(to->address, from->address, strlen(from->address) + 1);
	if (member_check(to, &why))
		return failure_set(failure, -EINVAL, "%s", why);
	return 0;
}

/* A view and the arrays it is written from. */
struct view_message {
	Bps__Cluster__View view;
	Bps__Cluster__Member *members, **pointers;
};

static void view_message_done(struct view_message *message)
{
	free(message->members);
	free(message->pointers);
}

static int write_view(const struct view *from, struct view_message *to)
{
	bps__cluster__view__init(&to->view);
	to->members = calloc(from->n_members + 1, sizeof(*to->members));
	to->pointers = calloc(from->n_members + 1, sizeof(*to->pointers));
	if (!to->members || !to->pointers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < from->n_members; i++) {
		write_member(&from->members[i], &to->members[i]);
		to->pointers[i] = &to->members[i];
	}
	to->view.epoch = from->epoch;
	to->view.n_members = from->n_members;
	to->view.members = to->pointers;
	return 0;
}

static int read_view(const Bps__Cluster__View *from, uint64_t self_id, struct failure *failure,
		     struct view **ret_view)
{
	_cleanup_(freep) struct view_member *members = NULL;
	int r;

	if (from->epoch > WIRE_EPOCH_MAX || from->n_members > CLUSTER_NODES_MAX)
		return failure_set(failure, -EINVAL, "a view with epoch %u and %zu members",
				   from->epoch, from->n_members);
	members = calloc(from->n_members + 1, sizeof(*members));
	if (!members)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (size_t i = 0; i < from->n_members; i++) {
		r = read_member(from->members[i], &members[i], failure);
		if (r)
			return r;
		members[i].is_self = self_id && members[i].id == self_id;
	}
	r = view_new(from->epoch, members, from->n_members, ret_view);
	return r ? failure_set(failure, r, "not a view: %s", strerror(-r)) : 0;
}

void wire_views_done(struct wire_views *views)
{
	for (size_t i = 0; i < views->n; i++)
		view_unref(views->views[i]);
	free(views->views);
	*views = (struct wire_views){ 0 };
}

struct views_message {
	struct view_message *views;
	Bps__Cluster__View **pointers;
	size_t n;
};

static void views_message_done(struct views_message *message)
{
	for (size_t i = 0; i < message->n; i++)
		view_message_done(&message->views[i]);
	free(message->views);
	free(message->pointers);
}

static int write_views(const struct wire_views *from, struct views_message *to)
{
	int r;

	to->views = calloc(from->n + 1, sizeof(*to->views));
	to->pointers = calloc(from->n + 1, sizeof(*to->pointers));
	if (!to->views || !to->pointers)
		return error_origin(-ENOMEM);
	to->n = from->n;
	for (size_t i = 0; i < from->n; i++) {
		r = write_view(from->views[i], &to->views[i]);
		if (r)
			return error_trace(r);
		to->pointers[i] = &to->views[i].view;
	}
	return 0;
}

static int read_views(Bps__Cluster__View *const *from, size_t n, uint64_t self_id,
		      struct failure *failure, struct wire_views *to)
{
	int r;

	to->views = calloc(n + 1, sizeof(struct view *));
	if (!to->views)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (size_t i = 0; i < n; i++) {
		r = read_view(from[i], self_id, failure, &to->views[i]);
		if (r)
			return r;
		to->n++;
	}
	return 0;
}

/* Register */

void wire_register_done(struct wire_register *message)
{
	wire_bytes_done(&message->key);
	wire_views_done(&message->views);
	free(message->jobs);
	*message = (struct wire_register){ 0 };
}

struct jobs_message {
	Bps__Cluster__HeldJob *jobs, **pointers;
};

static void jobs_message_done(struct jobs_message *message)
{
	free(message->jobs);
	free(message->pointers);
}

static int write_jobs(const struct wire_job *from, size_t n, struct jobs_message *to)
{
	to->jobs = calloc(n + 1, sizeof(*to->jobs));
	to->pointers = calloc(n + 1, sizeof(*to->pointers));
	if (!to->jobs || !to->pointers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		bps__cluster__held_job__init(&to->jobs[i]);
		to->jobs[i].job = (char *)from[i].name;
		to->jobs[i].epoch = from[i].epoch;
		to->jobs[i].has_owner = true;
		to->jobs[i].owner = from[i].owner;
		to->pointers[i] = &to->jobs[i];
	}
	return 0;
}

int wire_pack_register(const struct wire_register *message, struct wire_bytes *ret_bytes)
{
	_cleanup_(jobs_message_done) struct jobs_message jobs = { 0 };
	_cleanup_(views_message_done) struct views_message views = { 0 };
	Bps__Cluster__RegisterRequest request = BPS__CLUSTER__REGISTER_REQUEST__INIT;
	Bps__Cluster__Member member;
	int r;

	r = write_jobs(message->jobs, message->n_jobs, &jobs);
	if (!r)
		r = write_views(&message->views, &views);
	if (r)
		return error_trace(r);
	write_member(&message->member, &member);
	request.version = message->version;
	request.version_min = message->version_min;
	request.member = &member;
	request.software = (char *)"bps-daemon " BPS_VERSION;
	request.has_epoch = message->epoch > 0;
	request.epoch = message->epoch;
	request.has_n_members = message->epoch > 0;
	request.n_members = message->n_members;
	request.has_data_key = message->key.len > 0;
	request.data_key = (ProtobufCBinaryData){ message->key.len, message->key.data };
	request.has_secret = true;
	request.secret =
		(ProtobufCBinaryData){ MEMBER_SECRET_LEN, (uint8_t *)(uintptr_t)message->secret };
	request.n_jobs = message->n_jobs;
	request.jobs = jobs.pointers;
	request.n_views = views.n;
	request.views = views.pointers;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

static int read_jobs(const Bps__Cluster__RegisterRequest *from, struct wire_register *to,
		     struct failure *failure)
{
	int r;

	to->jobs = calloc(from->n_jobs + 1, sizeof(*to->jobs));
	if (!to->jobs)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (size_t i = 0; i < from->n_jobs; i++) {
		r = read_job_name(from->jobs[i]->job, to->jobs[i].name, failure);
		if (r)
			return r;
		to->jobs[i].epoch = from->jobs[i]->epoch;
		to->jobs[i].owner = from->jobs[i]->owner;
		to->n_jobs++;
	}
	return read_views(from->views, from->n_views, 0, failure, &to->views);
}

int wire_unpack_register(const void *data, size_t len, struct failure *failure,
			 struct wire_register *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__RegisterRequest *request = NULL;
	_cleanup_(wire_register_done) struct wire_register message = { 0 };
	int r;

	/* Each job is one, and so is the view that it runs in. */
	if (!pack_has_at_most(data, len, 2 * WIRE_JOBS_MAX + 64))
		return failure_set(failure, -EINVAL, "a registration of too many jobs");
	r = unpack_bytes(&bps__cluster__register_request__descriptor, data, len, failure, &request);
	if (r)
		return r;
	message.version = request->version;
	message.version_min = request->version_min;
	message.epoch = request->epoch;
	message.n_members = MIN(request->n_members, CLUSTER_NODES_MAX);
	/* One without a secret has none that fits its id. */
	if (request->secret.len == MEMBER_SECRET_LEN)
		memcpy(message.secret, request->secret.data, MEMBER_SECRET_LEN);
	if (request->epoch > WIRE_EPOCH_MAX || request->data_key.len > WIRE_KEY_MAX ||
	    request->n_jobs > WIRE_JOBS_MAX || request->n_views > WIRE_JOBS_MAX)
		return failure_set(failure, -EINVAL, "epoch, key or jobs beyond their limits");
	r = read_member(request->member, &message.member, failure);
	if (!r)
		r = copy_bytes(request->data_key, &message.key);
	if (!r)
		r = read_jobs(request, &message, failure);
	if (r)
		return r;
	*ret_message = message;
	message = (struct wire_register){ 0 };
	return 0;
}

/* Its events */

void wire_event_done(struct wire_event *message)
{
	wire_bytes_done(&message->key);
	view_unref(message->view);
	wire_views_done(&message->old_views);
	free(message->in_use);
	*message = (struct wire_event){ 0 };
}

int wire_pack_event(const struct wire_event *message, struct wire_bytes *ret_bytes)
{
	_cleanup_(views_message_done) struct views_message old = { 0 };
	_cleanup_(view_message_done) struct view_message view = { 0 };
	Bps__Cluster__RegisterEvent event = BPS__CLUSTER__REGISTER_EVENT__INIT;
	int r;

	r = write_views(&message->old_views, &old);
	if (!r && message->view)
		r = write_view(message->view, &view);
	if (r)
		return error_trace(r);
	if (message->version) {
		event.has_version = event.has_features = true;
		event.version = message->version;
		event.has_data_key = message->key.len > 0;
		event.data_key = (ProtobufCBinaryData){ message->key.len, message->key.data };
		event.has_lease_ms = true;
		event.lease_ms = message->lease_ms;
	}
	event.view = message->view ? &view.view : NULL;
	event.n_in_use = message->n_in_use;
	event.in_use = message->in_use;
	event.n_old_views = old.n;
	event.old_views = old.pointers;
	return error_trace(pack_bytes(&event.base, ret_bytes));
}

static int read_event_views(const Bps__Cluster__RegisterEvent *from, uint64_t self_id,
			    struct failure *failure, struct wire_event *to)
{
	int r;

	r = read_views(from->old_views, from->n_old_views, self_id, failure, &to->old_views);
	if (r)
		return r;
	to->in_use = calloc(from->n_in_use + 1, sizeof(*to->in_use));
	if (!to->in_use)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (size_t i = 0; i < from->n_in_use; i++)
		to->in_use[to->n_in_use++] = from->in_use[i];
	return from->view ? read_view(from->view, self_id, failure, &to->view) : 0;
}

int wire_unpack_event(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		      struct wire_event *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__RegisterEvent *event = NULL;
	_cleanup_(wire_event_done) struct wire_event message = { 0 };
	int r;

	r = unpack_bytes(&bps__cluster__register_event__descriptor, data, len, failure, &event);
	if (r)
		return r;
	if (event->data_key.len > WIRE_KEY_MAX)
		return failure_set(failure, -EINVAL, "a key of %zu bytes", event->data_key.len);
	message.version = event->version;
	message.lease_ms = event->lease_ms;
	r = copy_bytes(event->data_key, &message.key);
	if (!r)
		r = read_event_views(event, self_id, failure, &message);
	if (r)
		return r;
	*ret_message = message;
	message = (struct wire_event){ 0 };
	return 0;
}

/* Heartbeat */

int wire_pack_heartbeat(const struct wire_heartbeat *message, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__HeartbeatRequest request = BPS__CLUSTER__HEARTBEAT_REQUEST__INIT;

	request.id = message->id;
	request.epoch = message->epoch;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int wire_unpack_heartbeat(const void *data, size_t len, struct failure *failure,
			  struct wire_heartbeat *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__HeartbeatRequest *request = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__heartbeat_request__descriptor, data, len, failure,
			 &request);
	if (!r)
		*ret_message = (struct wire_heartbeat){ request->id, request->epoch };
	return r;
}

int wire_pack_heard(const struct wire_heard *message, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__HeartbeatReply reply = BPS__CLUSTER__HEARTBEAT_REPLY__INIT;

	reply.epoch = message->epoch;
	reply.known = message->known;
	return error_trace(pack_bytes(&reply.base, ret_bytes));
}

int wire_unpack_heard(const void *data, size_t len, struct failure *failure,
		      struct wire_heard *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__HeartbeatReply *reply = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__heartbeat_reply__descriptor, data, len, failure, &reply);
	if (!r)
		*ret_message = (struct wire_heard){ reply->epoch, reply->known };
	return r;
}

/* Jobs */

int wire_pack_open(const struct wire_open *message, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__OpenJobRequest request = BPS__CLUSTER__OPEN_JOB_REQUEST__INIT;

	request.job = (char *)message->job;
	request.has_owner = true;
	request.owner = message->owner;
	request.min_servers = message->min_servers;
	request.timeout_ms = message->timeout_ms;
	request.member = message->member;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int wire_unpack_open(const void *data, size_t len, struct failure *failure,
		     struct wire_open *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__OpenJobRequest *request = NULL;
	struct wire_open message;
	int r;

	r = unpack_bytes(&bps__cluster__open_job_request__descriptor, data, len, failure, &request);
	if (r)
		return r;
	message = (struct wire_open){
		.owner = request->owner,
		.min_servers = request->min_servers,
		.timeout_ms = request->timeout_ms,
		.member = request->member,
	};
	r = read_job_name(request->job, message.job, failure);
	if (!r)
		*ret_message = message;
	return r;
}

int wire_pack_opened(const struct view *view, struct wire_bytes *ret_bytes)
{
	_cleanup_(view_message_done) struct view_message message = { 0 };
	Bps__Cluster__OpenJobReply reply = BPS__CLUSTER__OPEN_JOB_REPLY__INIT;
	int r;

	r = write_view(view, &message);
	if (r)
		return error_trace(r);
	reply.view = &message.view;
	return error_trace(pack_bytes(&reply.base, ret_bytes));
}

int wire_unpack_opened(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		       struct view **ret_view)
{
	_cleanup_(unpack_freep) Bps__Cluster__OpenJobReply *reply = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__open_job_reply__descriptor, data, len, failure, &reply);
	if (r)
		return r;
	return read_view(reply->view, self_id, failure, ret_view);
}

int wire_pack_close(const struct wire_close *message, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__CloseJobRequest request = BPS__CLUSTER__CLOSE_JOB_REQUEST__INIT;

	request.job = (char *)message->job;
	request.has_owner = true;
	request.owner = message->owner;
	request.member = message->member;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int wire_unpack_close(const void *data, size_t len, struct failure *failure,
		      struct wire_close *ret_message)
{
	_cleanup_(unpack_freep) Bps__Cluster__CloseJobRequest *request = NULL;
	struct wire_close message = { 0 };
	int r;

	r = unpack_bytes(&bps__cluster__close_job_request__descriptor, data, len, failure,
			 &request);
	if (r)
		return r;
	message.member = request->member;
	message.owner = request->owner;
	r = read_job_name(request->job, message.job, failure);
	if (!r)
		*ret_message = message;
	return r;
}

int wire_pack_leave(uint64_t id, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__LeaveRequest request = BPS__CLUSTER__LEAVE_REQUEST__INIT;

	request.id = id;
	return error_trace(pack_bytes(&request.base, ret_bytes));
}

int wire_unpack_leave(const void *data, size_t len, struct failure *failure, uint64_t *ret_id)
{
	_cleanup_(unpack_freep) Bps__Cluster__LeaveRequest *request = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__leave_request__descriptor, data, len, failure, &request);
	if (!r)
		*ret_id = request->id;
	return r;
}

/* Kept in etcd */

int wire_pack_member(const struct view_member *member, struct wire_bytes *ret_bytes)
{
	Bps__Cluster__Member message;

	write_member(member, &message);
	return error_trace(pack_bytes(&message.base, ret_bytes));
}

int wire_unpack_member(const void *data, size_t len, struct failure *failure,
		       struct view_member *ret_member)
{
	_cleanup_(unpack_freep) Bps__Cluster__Member *message = NULL;
	struct view_member member;
	int r;

	r = unpack_bytes(&bps__cluster__member__descriptor, data, len, failure, &message);
	if (!r)
		r = read_member(message, &member, failure);
	if (!r)
		*ret_member = member;
	return r;
}

int wire_pack_view(const struct view *view, struct wire_bytes *ret_bytes)
{
	_cleanup_(view_message_done) struct view_message message = { 0 };
	int r;

	r = write_view(view, &message);
	if (!r)
		r = pack_bytes(&message.view.base, ret_bytes);
	return error_trace(r);
}

int wire_unpack_view(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		     struct view **ret_view)
{
	_cleanup_(unpack_freep) Bps__Cluster__View *message = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__view__descriptor, data, len, failure, &message);
	return r ? r : read_view(message, self_id, failure, ret_view);
}

int wire_pack_claim(const struct view *view, bool accepted, struct wire_bytes *ret_bytes)
{
	_cleanup_(view_message_done) struct view_message message = { 0 };
	Bps__Cluster__JobClaim claim = BPS__CLUSTER__JOB_CLAIM__INIT;
	int r;

	r = write_view(view, &message);
	if (r)
		return error_trace(r);
	claim.view = &message.view;
	claim.accepted = accepted;
	return error_trace(pack_bytes(&claim.base, ret_bytes));
}

int wire_unpack_claim(const void *data, size_t len, uint64_t self_id, struct failure *failure,
		      struct view **ret_view, bool *ret_accepted)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobClaim *claim = NULL;
	int r;

	r = unpack_bytes(&bps__cluster__job_claim__descriptor, data, len, failure, &claim);
	if (!r)
		r = read_view(claim->view, self_id, failure, ret_view);
	if (!r)
		*ret_accepted = claim->accepted;
	return r;
}
