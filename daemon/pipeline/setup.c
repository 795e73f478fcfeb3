#include "base/log.h"
#include "pipeline/part.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include <stdio.h>
#include <sys/random.h>

/*
 * What is said before data moves, and about failure: the cluster query, the calls JOIN, ATTACH and DECLARE, and notices.
 * The only place of pipeline/ where generated names appear.
 */

struct pipeline_setup {
	struct list link; /* the job's */
	struct call call;
	struct pipeline_job *job;
	struct pipeline_tensor *tensor; /* DECLARE; NULL: what a fresh home has to know */
	size_t server;			/* ATTACH */
	uint64_t n_moved;		/* job's, when it was sent: else it counts no more */
	bool asks_back;			/* ATTACH: of a server that is out */
	/* JOIN, to regroup. */
	uint64_t instance;
	uint32_t *ranks; /* n_ranks entries */
	uint32_t n_ranks;
	void *payload;
};

/* -- Calls -------------------------------------------------------------------------------------------------------- */

static int setup_call(struct pipeline_job *job, struct peer *peer, enum data_op op,
		      const ProtobufCMessage *message, void (*done)(struct call *call),
		      struct pipeline_setup **ret_setup)
{
	_cleanup_(freep) struct pipeline_setup *setup = calloc(1, sizeof(*setup));
	size_t len;
	int r;

	if (!setup)
		return error_origin(-ENOMEM);
	r = pack(message, DATA_SETUP_MAX, &setup->payload, &len);
	if (r)
		return error_trace(r);
	setup->job = job;
	setup->n_moved = job->n_moved;
	setup->call.header = (struct data_header){
		.op = (uint8_t)op,
		.len = (uint32_t)len,
		.job = job->number,
		.epoch = op == DATA_DECLARE || (op == DATA_JOIN && job->servers) ? job->data_epoch
										 : job->view->epoch,
		.node = job->shape.node,
	};
	setup->call.payload = setup->payload;
	setup->call.done = done;
	list_push_back(&job->setups, &setup->link);
	pipeline_job_hold(job);
	*ret_setup = setup;
	peer_call(peer, &TAKE_PTR(setup)->call);
	return 0;
}

static void setup_done(struct pipeline_setup *setup)
{
	struct pipeline_job *job = setup->job;

	list_remove(&setup->link);
	free(setup->ranks);
	free(setup->payload);
	free(setup);
	pipeline_job_release(job);
}

static void fail(struct pipeline_job *job, int status, const char *text)
{
	struct failure failure;

	(void)failure_set(&failure, status, "%s", text);
	pipeline_job_fail(job, &failure, NULL);
}

/* What a server answered that is not what was asked for. */
static void fail_answer(struct pipeline_job *job, struct peer *peer, int status, const char *what)
{
	struct failure failure;

	(void)failure_set(&failure, status, "job %s: %s answered with %s", job->name,
			  peer_name(peer), what);
	pipeline_job_fail(job, &failure, NULL);
}

static int unpack_answer(const struct call *call, const ProtobufCMessageDescriptor *descriptor,
			 ProtobufCMessage **ret_message)
{
	if (call->answer.op != DATA_OK || (call->answer.len && !call->answer_block) ||
	    (call->answer_block && call->answer_block->len < call->answer.len))
		return error_origin(-EPROTO);
	return error_trace(unpack(descriptor, call->answer_block ? call->answer_block->data : "",
				  call->answer.len, ret_message));
}

/* -- View and JOIN ------------------------------------------------------------------------------------------------ */

/* again: perhaps another process than that which the view names. */
static int peer_of(const struct pipeline_job *job, const struct view_member *member, bool again,
		   struct peer **ret_peer)
{
	struct transport *transport = job->pipeline->params.transport;
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

static void on_view(struct cluster_query *query, struct view *view, const struct failure *failure)
{
	struct pipeline_job *job = container_of(query, struct pipeline_job, query);
	const struct view_member *home;
	int r;

	job->querying = false;
	if (!view) {
		pipeline_job_fail(job, failure, NULL);
		return;
	}
	job->opened = true;
	job->view = view_ref(view);
	home = view_home(view, job->name);
	if (!home) {
		fail(job, -ENOENT, "no daemon of the cluster is a server");
		return;
	}
	r = peer_of(job, home, false, &job->home);
	if (r) {
		struct failure why;

		(void)failure_set(&why, r, "job %s: cannot reach its home server %s (%s): %s",
				  job->name, home->name, home->address, strerror(-r));
		job->home = NULL;
		pipeline_job_fail(job, &why, NULL);
		return;
	}
	pipeline_setup_join(job);
}

void pipeline_setup_open(struct pipeline_job *job)
{
	uint64_t now_ns = clock_now_ns();

	if (!job->pipeline->params.cluster) {
		fail(job, -EOPNOTSUPP, "this daemon is in no cluster");
		return;
	}
	job->query = (struct cluster_query){
		.min_servers = job->shape.min_servers,
		.timeout_ms = (job->formed_by_ns - MIN(job->formed_by_ns, now_ns)) / NSEC_PER_MSEC,
		.done = on_view,
	};
	(void)snprintf(job->query.job, sizeof(job->query.job), "%s", job->name);
	job->querying = true;
	cluster_open_job(job->pipeline->params.cluster, &job->query);
}

static const char *own_name(const struct view *view)
{
	for (size_t i = 0; i < view->n_members; i++)
		if (view->members[i].is_self)
			return view->members[i].name;
	return NULL;
}

static void on_joined(struct call *call);

/* NULL: it waits for all. */
static Bps__Cluster__Stragglers *stragglers_of(const struct pipeline_job *job,
					       Bps__Cluster__Stragglers *m)
{
	const struct stragglers *s = &job->shape.stragglers;

	bps__cluster__stragglers__init(m);
	m->has_quorum = m->has_quorum_timeout_ms = m->has_async = m->has_staleness = true;
	m->quorum = s->quorum;
	m->quorum_timeout_ms = s->quorum_timeout_ms;
	m->async = s->async;
	m->staleness = s->staleness;
	return stragglers_any(s) ? m : NULL;
}

static void set_join(struct pipeline_job *job, Bps__Cluster__JobJoin *join)
{
	Bps__Cluster__JobJoin m = BPS__CLUSTER__JOB_JOIN__INIT;
	uint64_t now_ns = clock_now_ns();

	m.job = job->name;
	m.secret_digest = (ProtobufCBinaryData){ SECRET_DIGEST_LEN, job->secret_digest };
	m.size = job->shape.size;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	m.local_size = job->shape.local_size;
	m.instance = job->instance;
	m.epoch = job->view->epoch;
	m.view_digest = view_server_digest(job->view);
	m.timeout_ms = MAX((job->formed_by_ns - MIN(job->formed_by_ns, now_ns)) / NSEC_PER_MSEC,
			   (uint64_t)1);
	m.request_timeout_ms = job->shape.request_timeout_ms;
	m.has_part_bytes = job->shape.part_bytes != 0;
	m.part_bytes = job->shape.part_bytes;
	m.member = job->pipeline->params.id;
	m.node_name = (char *)own_name(job->view);
	m.has_resume = true;
	m.resume = !job->ends;
	m.has_elastic = m.has_min_ranks = m.has_max_ranks = job->shape.elastic;
	m.elastic = job->shape.elastic;
	m.min_ranks = job->shape.min_ranks;
	m.max_ranks = job->shape.max_ranks;
	*join = m;
}

/* JOIN with these ranks; with none of them, the node takes its own back. */
static int send_join(struct pipeline_job *job, uint32_t *ranks, size_t n_ranks)
{
	Bps__Cluster__Stragglers stragglers;
	Bps__Cluster__JobJoin m;

	set_join(job, &m);
	m.n_ranks = n_ranks;
	m.ranks = ranks;
	m.stragglers = stragglers_of(job, &stragglers);
	return error_trace(setup_call(job, job->home, DATA_JOIN, &m.base, on_joined, &job->join));
}

void pipeline_setup_join(struct pipeline_job *job)
{
	_cleanup_(freep) uint32_t *ranks = NULL;
	size_t n_ranks = 0;
	int r = -ENOMEM;

	/* Once it has answered, the job is complete. */
	if (!job->home || job->layout.size)
		return;
	ranks = calloc(job->shape.local_size, sizeof(ranks[0]));
	for (uint32_t i = 0; ranks && i < job->shape.local_size; i++)
		if (job->members[i])
			ranks[n_ranks++] = job->members[i]->rank;
	if (ranks)
		r = send_join(job, ranks, n_ranks);
	if (r)
		fail(job, r, strerror(-r));
}

/* The home server must not wait for ranks that have given up. Without memory it waits until its deadline. */
static void withdraw(struct pipeline_job *job)
{
	if (job->join && job->home && !job->servers)
		(void)send_join(job, NULL, 0);
	job->join = NULL;
}

void pipeline_setup_withdraw(struct pipeline_job *job)
{
	struct cluster *cluster = job->pipeline->params.cluster;

	withdraw(job);
	if (job->querying)
		cluster_cancel(cluster, &job->query);
	job->querying = false;
	job->home = NULL;
	job->view = view_unref(job->view);
}

/* -- JobJoined and ATTACH ----------------------------------------------------------------------------------------- */

static void attached(struct pipeline_setup *setup)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobAttached *m = NULL;
	struct pipeline_server *server = &setup->job->servers[setup->server];
	struct pipeline_job *job = setup->job;

	if (job->keep && unpack_answer(&setup->call, &bps__cluster__job_attached__descriptor,
				       (ProtobufCMessage **)&m)) {
		fail_answer(job, server->outlet->peer, -EPROTO, "something else than JobAttached");
		return;
	}
	server->attached = true;
	job->n_attached++;
	if (job->keep)
		pipeline_keep_attached(job, setup->server, m->fresh);
	if (job->state == JOB_FORMING && job->n_attached == pipeline_move_n_in(job))
		pipeline_job_formed(job);
}

static void on_attached(struct call *call)
{
	struct pipeline_setup *setup = container_of(call, struct pipeline_setup, call);
	struct pipeline_job *job = setup->job;

	if (setup->asks_back) {
		if (job->state == JOB_RUNNING && !call->status)
			pipeline_move_back(job, setup->server);
	} else if (setup->n_moved != job->n_moved) {
		/* Said before the job went over to other servers: it has attached again since. */
	} else if (job->state != JOB_OVER && job->keep &&
		   (job->resumed || job->state == JOB_RUNNING || call->answer.op == DATA_ERROR) &&
		   pipeline_keep_is_loss(call)) {
		/* peer_lost() follows, but where the server only shuts down, or knows of other servers. */
		if (call->answer.op == DATA_ERROR)
			pipeline_keep_again(job, setup->server);
	} else if (job->state != JOB_OVER && call->status) {
		fail(job, call->status, call->text);
	} else if (job->state != JOB_OVER) {
		attached(setup);
	}
	setup_done(setup);
}

/* moves: which servers it is to go on with; others than the job's: one that was out is asked back. */
static int attach_at(struct pipeline_job *job, size_t server, struct peer *peer, uint32_t *moves,
		     struct pipeline_setup **ret_setup)
{
	Bps__Cluster__JobAttach m = BPS__CLUSTER__JOB_ATTACH__INIT;
	Bps__Cluster__JobHome home = BPS__CLUSTER__JOB_HOME__INIT;
	Bps__Cluster__Stragglers stragglers;
	size_t at_home = 0;
	int r;

	/* One that is asked back may be the home again. */
	r = moves ? pipeline_move_home(job, moves, &at_home) : 0;
	if (r)
		return error_trace(r);
	m.name = job->name;
	m.size = job->shape.size;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	m.n_node_of_rank = job->layout.size;
	m.node_of_rank = job->layout.node_of_rank;
	m.request_timeout_ms = job->request_timeout_ns / NSEC_PER_MSEC;
	m.instance = job->instance;
	m.stragglers = stragglers_of(job, &stragglers);
	if (job->keep) {
		m.has_resume = m.resume = true;
		m.has_lost_timeout_ms = true;
		m.lost_timeout_ms = job->pipeline->params.lost_timeout_ms;
		home.secret_digest = (ProtobufCBinaryData){ SECRET_DIGEST_LEN, job->secret_digest };
		home.part_bytes = job->part_bytes;
		home.epoch = job->view->epoch;
		home.has_min_ranks = home.has_max_ranks = job->shape.elastic;
		home.min_ranks = job->shape.min_ranks;
		home.max_ranks = job->shape.max_ranks;
		home.view_digest = view_server_digest(job->view);
		m.home = server == at_home ? &home : NULL;
		m.n_moves = pipeline_move_n(job);
		m.moves = moves;
		m.has_server = true;
		m.has_elastic = m.elastic = job->shape.elastic;
		m.server = (uint32_t)server;
		m.has_asks_back = m.asks_back = moves != job->moves;
	}
	r = setup_call(job, peer, DATA_ATTACH, &m.base, on_attached, ret_setup);
	if (!r)
		(*ret_setup)->server = server;
	return error_trace(r);
}

static int attach(struct pipeline_job *job, size_t server)
{
	struct pipeline_setup *setup;

	return error_trace(
		attach_at(job, server, job->servers[server].outlet->peer, job->moves, &setup));
}

int pipeline_setup_ask_back(struct pipeline_job *job, size_t server, const uint32_t *moves)
{
	struct pipeline_setup *setup;
	struct peer *peer;
	int r;

	r = peer_of(job, view_server(job->view, server), true, &peer);
	if (!r)
		r = attach_at(job, server, peer, (uint32_t *)moves, &setup);
	if (r)
		return error_trace(r);
	setup->asks_back = true;
	return 0;
}

static int connect_server(struct pipeline_job *job, size_t server)
{
	bool again = job->resumed || job->servers[server].lost_ns;
	struct peer *peer;
	int r;

	r = peer_of(job, view_server(job->view, server), again, &peer);
	if (!r)
		r = pipeline_outlet_get(job->pipeline, peer, &job->servers[server].outlet);
	if (!r && job->keep && server == job->home_number)
		job->home = peer;
	return error_trace(r);
}

static int find_servers(struct pipeline_job *job)
{
	size_t n = view_n_servers(job->view);
	const struct view_member *home = view_home(job->view, job->name);
	int r;

	if (!home)
		return error_origin(-EPROTO);
	job->servers = calloc(n, sizeof(job->servers[0]));
	if (!job->servers)
		return error_origin(-ENOMEM);
	job->n_servers = n;
	for (size_t i = 0; i < n; i++)
		if (view_server(job->view, i) == home)
			job->home_number = i;
	r = pipeline_move_init(job);
	if (!r)
		r = pipeline_keep_init(job);
	for (size_t i = 0; !r && i < n; i++)
		r = pipeline_move_is_in(job, i) ? connect_server(job, i)
						: pipeline_move_look_soon(job, i);
	return error_trace(r);
}

int pipeline_setup_connect(struct pipeline_job *job, size_t server)
{
	int r;

	r = connect_server(job, server);
	if (!r)
		r = attach(job, server);
	return error_trace(r);
}

/* Takes over what the home server has put together, which it may have done wrong. */
static int take_joined(struct pipeline_job *job, const Bps__Cluster__JobJoined *m)
{
	size_t n_servers = view_n_servers(job->view);
	int r;

	if (!m->job || m->n_node_of_rank != job->shape.size || !m->n_stripes ||
	    m->part_bytes < PART_BYTES_MIN || m->part_bytes > PART_BYTES_MAX ||
	    !m->request_timeout_ms)
		return error_origin(-EPROTO);
	for (size_t i = 0; i < m->n_stripes; i++)
		if (m->stripes[i] >= n_servers)
			return error_origin(-EPROTO);
	job->stripes = calloc(m->n_stripes, sizeof(job->stripes[0]));
	if (!job->stripes)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < m->n_stripes; i++)
		job->stripes[i] = (uint16_t)m->stripes[i];
	job->n_stripes = m->n_stripes;
	job->number = m->job;
	job->part_bytes = m->part_bytes - m->part_bytes % PART_ALIGN;
	/* As sent, and so limited: the product does not overflow. */
	job->request_timeout_ns =
		MIN(m->request_timeout_ms, job->shape.request_timeout_ms) * NSEC_PER_MSEC;
	r = layout_init(&job->layout, m->node_of_rank, job->shape.size, job->shape.n_nodes,
			job->shape.node);
	return error_trace(r);
}

/* What the next process has to know goes to the ledger. */
static int keep_record(struct pipeline_job *job, const Bps__Cluster__JobJoined *joined)
{
	Bps__Cluster__JobRecord m = BPS__CLUSTER__JOB_RECORD__INIT;
	Bps__Cluster__View view = BPS__CLUSTER__VIEW__INIT;
	size_t n = job->view->n_members;
	_cleanup_(freep) Bps__Cluster__Member *members = calloc(n, sizeof(*members));
	_cleanup_(freep) Bps__Cluster__Member **pointers = calloc(n, sizeof(*pointers));
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	if (!members || !pointers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		struct view_member *member = &job->view->members[i];

		bps__cluster__member__init(&members[i]);
		members[i].id = member->id;
		members[i].name = member->name;
		members[i].roles = member->roles;
		members[i].address = member->address;
		members[i].has_bandwidth_mbps = true;
		members[i].bandwidth_mbps = member->bandwidth_mbps;
		pointers[i] = &members[i];
	}
	view.epoch = job->view->epoch;
	view.n_members = n;
	view.members = pointers;
	m.joined = (Bps__Cluster__JobJoined *)joined;
	m.view = &view;
	m.instance = job->instance;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	r = pack(&m.base, LEDGER_JOB_MAX, &data, &len);
	if (!r)
		r = pipeline_resume_prepare_far(job, data, len);
	if (r)
		return error_trace(r);
	job->keep = true;
	return 0;
}

static int use_joined(struct pipeline_job *job, const Bps__Cluster__JobJoined *m)
{
	int r;

	r = take_joined(job, m);
	if (!r)
		r = pipeline_job_order_members(job);
	if (!r && !m->resume && !job->ends)
		job->ends = "another node can take part in no restart";
	if (!r && !job->ends)
		r = keep_record(job, m);
	if (!r)
		r = find_servers(job);
	for (size_t i = 0; !r && i < job->n_servers; i++)
		if (pipeline_move_is_in(job, i))
			r = attach(job, i);
	return error_trace(r);
}

/* -- The job as the next process finds it ------------------------------------------------------------------------- */

static int recall_view(struct pipeline_job *job, const Bps__Cluster__View *m)
{
	_cleanup_(freep) struct view_member *members = NULL;
	const struct view *now = cluster_view(job->pipeline->params.cluster);
	const char *own = now ? own_name(now) : NULL;

	members = calloc(MAX(m->n_members, (size_t)1), sizeof(*members));
	if (!members)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < m->n_members; i++) {
		const Bps__Cluster__Member *from = m->members[i];
		struct view_member *to = &members[i];

		if (strlen(from->name) >= sizeof(to->name) ||
		    strlen(from->address) >= sizeof(to->address))
			return error_origin(-EPROTO);
		to->id = from->id;
		to->roles = from->roles;
		to->bandwidth_mbps = from->bandwidth_mbps;
		(void)snprintf(to->name, sizeof(to->name), "%s", from->name);
		(void)snprintf(to->address, sizeof(to->address), "%s", from->address);
		to->is_self = own && !strcmp(own, from->name);
	}
	return error_trace(view_new(m->epoch, members, m->n_members, &job->view));
}

static int take_record(struct pipeline_job *job, const Bps__Cluster__JobRecord *m)
{
	int r;

	if (m->n_nodes != job->shape.n_nodes || m->node != job->shape.node ||
	    m->joined->job != job->number || !m->instance)
		return error_origin(-EPROTO);
	r = recall_view(job, m->view);
	if (!r)
		r = take_joined(job, m->joined);
	if (r)
		return error_trace(r);
	/* It is put together once all ranks are back. */
	job->node_of_rank = TAKE_PTR(job->layout.node_of_rank);
	layout_done(&job->layout);
	job->layout = (struct layout){ 0 };
	job->instance = m->instance;
	job->keep = true;
	return 0;
}

int pipeline_setup_recall(struct pipeline_job *job, struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobRecord *m = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	if (!job->pipeline->params.cluster || !job->pipeline->params.resume)
		return failure_set(failure, -ECONNRESET,
				   "job %s: cannot go on after the daemon's restart: this daemon "
				   "is in no cluster, or its option resume is off",
				   job->name);
	r = ledger_read_record(job->ledger, &data, &len);
	if (!r)
		r = unpack(&bps__cluster__job_record__descriptor, data, len,
			   (ProtobufCMessage **)&m);
	if (!r)
		r = take_record(job, m);
	if (r)
		return failure_set(failure, r == -ENOMEM ? r : -EPROTO,
				   "the ledger is damaged: the record of job %s", job->name);
	return 0;
}

int pipeline_setup_reattach(struct pipeline_job *job)
{
	int r;

	r = find_servers(job);
	for (size_t i = 0; !r && i < job->n_servers; i++)
		r = attach(job, i);
	return error_trace(r);
}

/* The home server has put a run together that this node has given up meanwhile. The other nodes must not wait for it. */
static void disown(struct pipeline_job *job, uint64_t number)
{
	static const char text[] = "a rank was gone before the job had begun";
	struct data_header header = {
		.op = DATA_FAIL_JOB,
		.status = EPIPE,
		.job = number,
		.node = job->shape.node,
		.epoch = job->view->epoch,
		.len = sizeof(text) - 1,
	};

	(void)peer_notice(job->home, &header, text);
}

static void on_joined(struct call *call)
{
	struct pipeline_setup *setup = container_of(call, struct pipeline_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	struct pipeline_job *job = setup->job;
	bool counts = job->state == JOB_FORMING && setup == job->join;
	int r = call->status;

	if (counts)
		job->join = NULL;
	if (!r)
		r = unpack_answer(call, &bps__cluster__job_joined__descriptor,
				  (ProtobufCMessage **)&m);
	/* Only the newest counts: those before it are answered with EALREADY, or too late. */
	if (!counts) {
		if (!r)
			disown(job, m->job);
	} else if (call->status) {
		fail(job, call->status, call->text);
	} else {
		if (!r)
			r = use_joined(job, m);
		if (r)
			fail_answer(job, job->home, r,
				    r == -EPROTO ? "a job that this node cannot be part of"
						 : strerror(-r));
	}
	setup_done(setup);
}

/* -- Regrouping --------------------------------------------------------------------------------------------------- */

/* The next run of the job, and the ranks that it has here. */
static int go_on(struct pipeline_job *job, const struct pipeline_setup *setup,
		 const Bps__Cluster__JobJoined *m)
{
	_cleanup_(freep) uint32_t *ranks = calloc(m->n_node_of_rank + 1, sizeof(ranks[0]));
	struct pipeline_regrouped regrouped = {
		.size = (uint32_t)m->n_node_of_rank,
		.node = setup->call.answer.node,
		.n = setup->n_ranks,
		.old_ranks = setup->ranks,
		.ranks = ranks,
		.instance = setup->instance,
	};
	struct pipeline_job *next;
	struct failure failure;
	int r;

	if (!ranks)
		return error_origin(-ENOMEM);
	for (uint32_t i = 0; i < m->n_node_of_rank; i++) {
		regrouped.n_nodes = MAX(regrouped.n_nodes, m->node_of_rank[i] + 1);
		if (m->node_of_rank[i] == regrouped.node)
			ranks[regrouped.n_local++] = i;
	}
	if (!m->n_node_of_rank || m->n_node_of_rank > JOB_RANKS_MAX ||
	    regrouped.n_nodes > m->n_node_of_rank || regrouped.n_local < setup->n_ranks)
		return error_origin(-EPROTO);
	r = pipeline_elastic_next(job, &regrouped, &next);
	if (r)
		return error_trace(r);
	next->view = view_ref(job->view);
	next->opened = job->opened;
	job->opened = false;
	pipeline_setup_leave(job);
	next->moved_before = TAKE_PTR(job->moves);
	pipeline_job_over(job);
	r = use_joined(next, m);
	if (!r)
		return 0;
	(void)failure_set(&failure, r, "job %s cannot regroup: %s", next->name, strerror(-r));
	pipeline_job_fail(next, &failure, NULL);
	return 0;
}

static void on_regrouped(struct call *call)
{
	struct pipeline_setup *setup = container_of(call, struct pipeline_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	struct pipeline_job *job = setup->job;
	bool counts = job->state == JOB_RUNNING && setup == job->join;
	int r = call->status;

	if (setup == job->join)
		job->join = NULL;
	if (!r)
		r = unpack_answer(call, &bps__cluster__job_joined__descriptor,
				  (ProtobufCMessage **)&m);
	/* The home, or another in its place, is asked again when it is attached. */
	if (call->status && (!counts || pipeline_keep_is_loss(call) || call->status == -EALREADY)) {
		setup_done(setup);
		return;
	}
	if (!counts) {
		if (!r && job->home)
			disown(job, m->job);
	} else if (call->status) {
		fail(job, call->status, call->text);
	} else {
		if (!r)
			r = go_on(job, setup, m);
		if (r)
			fail(job, r, strerror(-r));
	}
	setup_done(setup);
}

int pipeline_setup_regroup(struct pipeline_job *job, const uint32_t *ranks, uint32_t n_ranks,
			   uint32_t n_newcomers, bool resumable)
{
	struct pipeline_setup *setup;
	Bps__Cluster__JobJoin m;
	uint64_t instance;
	int r;

	if (getrandom(&instance, sizeof(instance), 0) != sizeof(instance))
		return error_origin(-errno);
	set_join(job, &m);
	m.ranks = (uint32_t *)ranks;
	m.n_ranks = n_ranks;
	m.instance = instance;
	m.timeout_ms = job->request_timeout_ns / NSEC_PER_MSEC;
	m.has_regroups = m.has_newcomers = true;
	m.regroups = job->number;
	m.newcomers = n_newcomers;
	m.resume &= resumable;
	r = setup_call(job, job->servers[job->home_number].outlet->peer, DATA_JOIN, &m.base,
		       on_regrouped, &setup);
	if (r)
		return error_trace(r);
	job->join = setup;
	setup->instance = instance;
	setup->ranks = calloc(MAX(n_ranks, 1u), sizeof(ranks[0]));
	if (!setup->ranks) {
		job->join = NULL;
		return error_origin(-ENOMEM);
	}
	memcpy(setup->ranks, ranks, n_ranks * sizeof(ranks[0]));
	setup->n_ranks = n_ranks;
	return 0;
}

/* -- DECLARE ------------------------------------------------------------------------------------------------------ */

static void on_declared(struct call *call)
{
	struct pipeline_setup *setup = container_of(call, struct pipeline_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__TensorDeclared *m = NULL;
	struct pipeline_job *job = setup->job;
	struct failure failure;
	int r;

	/* It is declared again when the home is back; a home that did not know it is told no more than once. */
	if (!setup->tensor || setup->n_moved != job->n_moved ||
	    (job->keep && pipeline_keep_is_loss(call))) {
		setup_done(setup);
		return;
	}
	if (job->state == JOB_RUNNING && call->status) {
		(void)failure_set(&failure, call->status, "%s", call->text);
		pipeline_tensor_agreed(setup->tensor, &failure, 0, 0);
	} else if (job->state == JOB_RUNNING) {
		r = unpack_answer(call, &bps__cluster__tensor_declared__descriptor,
				  (ProtobufCMessage **)&m);
		if (!r && !m->key)
			r = error_origin(-EPROTO);
		if (r)
			fail_answer(job, job->home, r, "something else than a tensor's key");
		else
			pipeline_tensor_agreed(setup->tensor, NULL, m->key, m->start);
	}
	setup_done(setup);
}

void pipeline_setup_declare(struct pipeline_tensor *tensor, const struct failure *conflict)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	struct pipeline_job *job = tensor->job;
	struct pipeline_setup *setup;
	int r;

	m.name = tensor->name;
	m.dtype = tensor->dtype;
	m.elements = tensor->elements;
	m.rank = tensor->first_rank;
	m.conflict = conflict ? (char *)conflict->text : NULL;
	if (job->keep && !job->servers[job->home_number].attached)
		return;
	r = setup_call(job, job->home, DATA_DECLARE, &m.base, on_declared, &setup);
	if (r)
		fail(job, r, strerror(-r));
	else
		setup->tensor = tensor;
}

void pipeline_setup_declare_known(struct pipeline_job *job, const struct ledger_known *known)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;
	struct pipeline_setup *setup;
	int r;

	m.name = (char *)known->name;
	m.dtype = known->dtype;
	m.elements = known->elements;
	m.rank = job->layout.rank_of_local[0];
	m.has_key = m.has_start = true;
	m.key = known->key;
	m.start = known->start;
	r = setup_call(job, job->home, DATA_DECLARE, &m.base, on_declared, &setup);
	if (r)
		fail(job, r, strerror(-r));
}

/* -- Notices ------------------------------------------------------------------------------------------------------ */

struct peer *pipeline_setup_peer(const struct pipeline_job *job, size_t number)
{
	const struct pipeline_server *server = &job->servers[number];
	struct peer *peer;

	if (server->outlet)
		return server->outlet->lost ? NULL : server->outlet->peer;
	/* The job has just gone over to other servers, or ranks: nobody else tells them. */
	if (!job->keep || server->gone || !pipeline_move_is_in(job, number) ||
	    peer_of(job, view_server(job->view, number), true, &peer))
		return NULL;
	return peer;
}

/* To every server that is still there; from has said so itself. */
static void notify(struct pipeline_job *job, struct data_header *header, const char *text,
		   const struct peer *from)
{
	header->job = job->number;
	header->node = job->shape.node;
	header->epoch = job->servers ? job->data_epoch : 0;
	header->len = text ? (uint32_t)strnlen(text, ERROR_TEXT_MAX) : 0;
	for (size_t i = 0; i < job->n_servers; i++) {
		struct peer *peer = pipeline_setup_peer(job, i);

		if (!peer || peer == from)
			continue;
		if (peer_notice(peer, header, text))
			log_warning("job %s: no memory to tell %s that %s", job->name,
				    peer_name(peer), text ? text : "its ranks have left");
	}
}

void pipeline_setup_fail_job(struct pipeline_job *job, const struct failure *failure,
			     const struct peer *from)
{
	struct data_header header = { .op = DATA_FAIL_JOB, .status = -failure->status };

	if (job->goes)
		return;
	notify(job, &header, failure->text, from);
}

void pipeline_setup_fail_round(struct pipeline_job *job, uint64_t key, uint64_t round, bool alone,
			       const struct failure *failure)
{
	struct data_header header = {
		.op = DATA_FAIL_ROUND,
		.operation = alone ? OPERATION_ACCUMULATE : 0,
		.key = key,
		.round = round,
		.status = -failure->status,
	};

	notify(job, &header, failure->text, NULL);
	if (job->keep)
		pipeline_keep_failed(job, key, round, failure);
}

void pipeline_setup_fail_again(struct pipeline_job *job, size_t server,
			       const struct pipeline_failed *failed)
{
	const struct failure *failure = &failed->failure;
	struct data_header header = {
		.op = DATA_FAIL_ROUND,
		.job = job->number,
		.key = failed->key,
		.round = failed->round,
		.epoch = job->data_epoch,
		.node = job->shape.node,
		.status = -failure->status,
		.len = (uint32_t)strnlen(failure->text, ERROR_TEXT_MAX),
	};

	if (peer_notice(job->servers[server].outlet->peer, &header, failure->text))
		log_warning("job %s: no memory to tell %s that a round has failed", job->name,
			    pipeline_server_name(job, server));
}

void pipeline_setup_leave(struct pipeline_job *job)
{
	struct data_header header = { .op = DATA_LEAVE };

	notify(job, &header, NULL, NULL);
}

/* -- The end ------------------------------------------------------------------------------------------------------ */

static bool name_in_use(const struct pipeline_job *job)
{
	struct pipeline_job *other;

	list_for_each (other, &job->pipeline->jobs, link)
		if (other != job && other->state != JOB_OVER && !strcmp(other->name, job->name))
			return true;
	return false;
}

void pipeline_setup_close(struct pipeline_job *job)
{
	struct cluster *cluster = job->pipeline->params.cluster;

	withdraw(job);
	if (job->querying)
		cluster_cancel(cluster, &job->query);
	job->querying = false;
	if (job->opened && !name_in_use(job))
		cluster_close_job(cluster, job->name);
	job->opened = false;
}

void pipeline_setup_free(struct pipeline_job *job)
{
	struct pipeline_setup *setup, *next;

	list_for_each_safe (setup, next, &job->setups, link) {
		list_remove(&setup->link);
		free(setup->ranks);
		free(setup->payload);
		free(setup);
	}
	for (size_t i = 0; i < job->n_servers; i++)
		pipeline_outlet_put(job->servers[i].outlet);
	free(job->servers);
	pipeline_move_done(job);
	(void)view_unref(job->view);
}
