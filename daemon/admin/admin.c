/*
 * The methods of admin.proto. Each asks daemon/report.c for plain structs by struct admin_ops
 * and packs these as the answer; types of admin.proto stay in this folder. daemon.c makes the
 * one struct admin, rpc/ calls its methods.
 */
#include "admin/admin.h"
#include "admin/health.h"
#include "base/metrics.h"
#include "proto/admin.pb-c.h"
#include "proto/pack.h"
#include "proto/types.h"

enum {
	METHOD_STATUS,
	METHOD_NODES,
	METHOD_JOBS,
	METHOD_JOB,
	METHOD_METRICS,
	METHOD_DRAIN,
	N_METHODS
};

struct admin {
	const struct admin_ops *ops;
	void *user;
	struct rpc_method methods[N_METHODS];
	struct health health;
};

static void reply(struct rpc_call *call, const ProtobufCMessage *message)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	r = pack(message, RPC_MESSAGE_MAX, &data, &len);
	if (r)
		rpc_call_fail(call, r, strerror(-r));
	else
		rpc_call_reply(call, data, len);
}

/* Requests without fields are not worth unpacking: what is in them can only be unknown. */

static void on_status(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct admin *admin = user;
	Bps__Admin__StatusReply message = BPS__ADMIN__STATUS_REPLY__INIT;
	struct admin_status status = { 0 };
	int r;

	r = admin->ops->status(admin->user, &status);
	if (r) {
		rpc_call_fail(call, r, strerror(-r));
		return;
	}
	message.software = status.software;
	message.node = status.node;
	message.id = status.id;
	message.roles = status.roles;
	message.state = status.state;
	message.source = status.source;
	message.epoch = status.epoch;
	message.uptime_ms = status.uptime_ms;
	message.n_sessions = status.n_sessions;
	message.n_jobs = status.n_jobs;
	message.bytes_held = status.bytes_held;
	message.bytes_in = status.bytes_in;
	message.bytes_out = status.bytes_out;
	message.n_requests = status.n_requests;
	message.n_failed = status.n_failed;
	message.exposed = *status.exposed ? status.exposed : NULL;
	reply(call, &message.base);
}

/*
 * Room for n messages of one type and the pointers to them that protobuf-c wants. NULL: out of
 * memory.
 */
struct array {
	void *items;
	void **pointers;
};

static void array_done(struct array *array)
{
	free(array->items);
	free(array->pointers);
}

static int array_init(struct array *array, size_t n, size_t size)
{
	array->items = calloc(n + 1, size);
	array->pointers = calloc(n + 1, sizeof(void *));
	if (!array->items || !array->pointers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++)
		array->pointers[i] = (char *)array->items + i * size;
	return 0;
}

static void fill_node(Bps__Admin__Node *to, struct admin_node *from)
{
	bps__admin__node__init(to);
	to->name = from->name;
	to->roles = from->roles;
	to->address = from->address;
	to->id = from->id;
	to->link = from->link;
	to->transport = *from->transport ? from->transport : NULL;
	to->bytes_in = from->bytes_in;
	to->bytes_out = from->bytes_out;
	to->has_bandwidth_mbps = from->bandwidth_mbps > 0;
	to->bandwidth_mbps = from->bandwidth_mbps;
}

static void on_nodes(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct admin *admin = user;
	Bps__Admin__NodesReply message = BPS__ADMIN__NODES_REPLY__INIT;
	_cleanup_(freep) struct admin_node *nodes = NULL;
	_cleanup_(array_done) struct array array = { 0 };
	size_t n = 0;
	int r;

	r = admin->ops->nodes(admin->user, &message.epoch, &nodes, &n);
	if (!r)
		r = array_init(&array, n, sizeof(Bps__Admin__Node));
	if (r) {
		rpc_call_fail(call, r, strerror(-r));
		return;
	}
	for (size_t i = 0; i < n; i++)
		fill_node(array.pointers[i], &nodes[i]);
	message.n_nodes = n;
	message.nodes = (Bps__Admin__Node **)array.pointers;
	reply(call, &message.base);
}

static void fill_job(Bps__Admin__JobSummary *to, struct admin_job *from)
{
	bps__admin__job_summary__init(to);
	to->job = from->name;
	to->number = from->number;
	to->state = from->state;
	to->role = from->role;
	to->size = from->size;
	to->n_nodes = from->n_nodes;
	to->n_local = from->n_local;
	to->rounds = from->rounds;
	to->bytes = from->bytes;
	to->in_flight = from->in_flight;
	to->waiting_for = *from->waiting_for ? from->waiting_for : NULL;
	to->ends = (char *)from->ends;
	to->gpu = *from->gpu ? from->gpu : NULL;
}

static void on_jobs(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct admin *admin = user;
	Bps__Admin__JobsReply message = BPS__ADMIN__JOBS_REPLY__INIT;
	_cleanup_(freep) struct admin_job *jobs = NULL;
	_cleanup_(array_done) struct array array = { 0 };
	size_t n = 0;
	int r;

	r = admin->ops->jobs(admin->user, &jobs, &n);
	if (!r)
		r = array_init(&array, n, sizeof(Bps__Admin__JobSummary));
	if (r) {
		rpc_call_fail(call, r, strerror(-r));
		return;
	}
	for (size_t i = 0; i < n; i++)
		fill_job(array.pointers[i], &jobs[i]);
	message.n_jobs = n;
	message.jobs = (Bps__Admin__JobSummary **)array.pointers;
	reply(call, &message.base);
}

static void fill_rank(Bps__Admin__Rank *to, struct admin_rank *from)
{
	bps__admin__rank__init(to);
	to->rank = from->rank;
	to->node = from->node;
	to->state = from->state;
	if (!from->pid)
		return;
	to->has_pid = to->has_requests = to->has_pending = to->has_bytes_held = to->has_regions =
		true;
	to->pid = from->pid;
	to->requests = from->n_requests;
	to->pending = from->n_pending;
	to->bytes_held = from->bytes_held;
	to->regions = from->n_regions;
}

static void fill_tensor(Bps__Admin__TensorInfo *to, struct admin_tensor *from)
{
	bps__admin__tensor_info__init(to);
	to->name = from->name;
	to->key = from->key;
	to->dtype = (char *)dtype_name(from->dtype);
	to->elements = from->elements;
	to->rounds = from->rounds;
	to->waiting_for = *from->waiting_for ? from->waiting_for : NULL;
	to->last = *from->last ? from->last : NULL;
	to->has_spread_us = *from->last;
	to->spread_us = from->spread_us;
}

static void fill_arrival(Bps__Admin__Arrival *to, struct admin_arrival *from)
{
	bps__admin__arrival__init(to);
	to->who = from->who;
	to->rounds = from->rounds;
	to->last = from->last;
	to->late_us = from->late_us;
	to->held_ms = from->held_ms;
	to->is_late = from->is_late;
}

static void fill_server(Bps__Admin__JobServer *to, struct admin_server *from)
{
	bps__admin__job_server__init(to);
	to->name = from->name;
	to->address = from->address;
	to->state = from->state;
	to->share = from->share;
	to->has_added = to->added = from->added;
}

static void job_parts_done(struct admin_job_parts *parts)
{
	free(parts->arrivals);
	free(parts->servers);
	free(parts->ranks);
	free(parts->tensors);
}

static int reply_job(struct rpc_call *call, struct admin_job_parts *parts)
{
	_cleanup_(array_done) struct array ranks = { 0 }, tensors = { 0 }, arrivals = { 0 };
	_cleanup_(array_done) struct array servers = { 0 };
	Bps__Admin__JobReply message = BPS__ADMIN__JOB_REPLY__INIT;
	Bps__Admin__JobSummary summary;
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	r = array_init(&ranks, parts->n_ranks, sizeof(Bps__Admin__Rank));
	if (!r)
		r = array_init(&tensors, parts->n_tensors, sizeof(Bps__Admin__TensorInfo));
	if (!r)
		r = array_init(&arrivals, parts->n_arrivals, sizeof(Bps__Admin__Arrival));
	if (!r)
		r = array_init(&servers, parts->n_servers, sizeof(Bps__Admin__JobServer));
	if (r)
		return error_trace(r);
	for (size_t i = 0; i < parts->n_ranks; i++)
		fill_rank(ranks.pointers[i], &parts->ranks[i]);
	for (size_t i = 0; i < parts->n_tensors; i++)
		fill_tensor(tensors.pointers[i], &parts->tensors[i]);
	for (size_t i = 0; i < parts->n_arrivals; i++)
		fill_arrival(arrivals.pointers[i], &parts->arrivals[i]);
	for (size_t i = 0; i < parts->n_servers; i++)
		fill_server(servers.pointers[i], &parts->servers[i]);
	fill_job(&summary, &parts->job);
	message.summary = &summary;
	message.n_ranks = parts->n_ranks;
	message.ranks = (Bps__Admin__Rank **)ranks.pointers;
	message.tensors = (Bps__Admin__TensorInfo **)tensors.pointers;
	message.n_arrivals = parts->n_arrivals;
	message.arrivals = (Bps__Admin__Arrival **)arrivals.pointers;
	message.n_servers = parts->n_servers;
	message.servers = (Bps__Admin__JobServer **)servers.pointers;
	message.has_total_tensors = true;
	message.total_tensors = parts->total_tensors;
	/* Large models have more tensors than a message has room for. */
	for (message.n_tensors = parts->n_tensors;; message.n_tensors /= 2) {
		r = pack(&message.base, RPC_MESSAGE_MAX, &data, &len);
		if (r != -EMSGSIZE || !message.n_tensors)
			break;
	}
	if (!r)
		rpc_call_reply(call, data, len);
	return error_trace(r);
}

static void on_job(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct admin *admin = user;
	_cleanup_(unpack_freep) ProtobufCMessage *request = NULL;
	_cleanup_(job_parts_done) struct admin_job_parts parts = { 0 };
	const char *name;
	int r;

	r = unpack(&bps__admin__job_request__descriptor, data, len, &request);
	if (r) {
		rpc_call_fail(call, r, "not a JobRequest");
		return;
	}
	name = ((Bps__Admin__JobRequest *)request)->job;
	r = admin->ops->job(admin->user, name, &parts);
	if (!r)
		r = reply_job(call, &parts);
	if (r)
		rpc_call_fail(call, r, r == -ENOENT ? "no such job at this daemon" : strerror(-r));
}

static void on_metrics(void *user, struct rpc_call *call, const void *data, size_t len)
{
	Bps__Admin__MetricsReply message = BPS__ADMIN__METRICS_REPLY__INIT;
	_cleanup_(freep) char *text = NULL;
	int r;

	r = metrics_text(&text);
	if (r) {
		rpc_call_fail(call, r, strerror(-r));
		return;
	}
	message.text = text;
	reply(call, &message.base);
}

struct drain {
	struct admin_drain drain;
	struct rpc_call *call;
};

static void on_drained(struct admin_drain *admin_drain, int status, const char *text,
		       uint32_t moved, uint32_t stay)
{
	struct drain *drain = container_of(admin_drain, struct drain, drain);
	Bps__Admin__DrainReply message = BPS__ADMIN__DRAIN_REPLY__INIT;

	message.moved = moved;
	message.stay = stay;
	if (status)
		rpc_call_fail(drain->call, status, text);
	else
		reply(drain->call, &message.base);
	free(drain);
}

static void on_drain(void *user, struct rpc_call *call, const void *data, size_t len)
{
	_cleanup_(unpack_freep) ProtobufCMessage *request = NULL;
	struct admin *admin = user;
	struct drain *drain;
	int r;

	r = unpack(&bps__admin__drain_request__descriptor, data, len, &request);
	if (r) {
		rpc_call_fail(call, r, "not a DrainRequest");
		return;
	}
	drain = malloc(sizeof(*drain));
	if (!drain) {
		rpc_call_fail(call, -ENOMEM, strerror(ENOMEM));
		return;
	}
	*drain = (struct drain){ .drain.done = on_drained, .call = call };
	admin->ops->drain(admin->user, ((Bps__Admin__DrainRequest *)request)->node, &drain->drain);
}

int admin_new(struct rpc *rpc, const struct admin_ops *ops, void *user, struct admin **ret_admin)
{
	static const struct rpc_method methods[N_METHODS] = {
		[METHOD_STATUS] = { .path = "/bps.admin.Admin/Status",
				    .called = on_status,
				    .doors = RPC_DOOR_PUBLIC | RPC_DOOR_OPERATORS },
		[METHOD_NODES] = { .path = "/bps.admin.Admin/Nodes",
				   .called = on_nodes,
				   .doors = RPC_DOOR_OPERATORS },
		[METHOD_JOBS] = { .path = "/bps.admin.Admin/Jobs",
				  .called = on_jobs,
				  .doors = RPC_DOOR_OPERATORS },
		[METHOD_JOB] = { .path = "/bps.admin.Admin/Job",
				 .called = on_job,
				 .doors = RPC_DOOR_OPERATORS },
		[METHOD_METRICS] = { .path = "/bps.admin.Admin/Metrics",
				     .called = on_metrics,
				     .doors = RPC_DOOR_OPERATORS },
		[METHOD_DRAIN] = { .path = "/bps.admin.Admin/Drain",
				   .called = on_drain,
				   .doors = RPC_DOOR_OPERATORS },
	};
	struct admin *admin = calloc(1, sizeof(*admin));

	if (!admin)
		return error_origin(-ENOMEM);
	admin->ops = ops;
	admin->user = user;
	for (size_t i = 0; i < N_METHODS; i++) {
		admin->methods[i] = methods[i];
		admin->methods[i].user = admin;
		rpc_add_method(rpc, &admin->methods[i]);
	}
	health_init(&admin->health, rpc, ops->healthy, user);
	*ret_admin = admin;
	return 0;
}

struct admin *admin_free(struct admin *admin)
{
	if (!admin)
		return NULL;
	health_done(&admin->health);
	free(admin);
	return NULL;
}
