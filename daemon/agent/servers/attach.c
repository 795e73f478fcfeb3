/*
 * What the home server has put together: taken over, written to the ledger for the next process, or read from there by it;
 * then the job is attached at each of its servers. Called by home.c with the home's answer, by resume.c, keep.c and move.c.
 */
#include "agent/servers/setup.h"
#include "base/failpoint.h"

/* -- JobJoined and ATTACH ----------------------------------------------------------------------------------------- */

static void attached(struct agent_setup *setup)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobAttached *m = NULL;
	struct agent_server *server = &setup->job->fleet.servers[setup->server];
	struct agent_job *job = setup->job;

	if (job->retention.keeps &&
	    agent_setup_unpack(&setup->call, &bps__cluster__job_attached__descriptor,
			       (ProtobufCMessage **)&m)) {
		agent_setup_fail_answer(job, server->send_queue->peer, -EPROTO,
					"something else than JobAttached");
		return;
	}
	server->attached = true;
	server->scales = peer_has(server->send_queue->peer, DATA_FEATURE_SCALES);
	server->forgets = peer_has(server->send_queue->peer, DATA_FEATURE_FORGET);
	peer_set_parts(server->send_queue->peer, job->part_bytes, job->shape.n_nodes);
	if (job->retention.keeps)
		agent_keep_attached(server, m->fresh);
	job->agent->hooks->servers.attached(server, m && m->fresh);
}

static void on_attached(struct call *call)
{
	struct agent_setup *setup = container_of(call, struct agent_setup, call);
	struct agent_job *job = setup->job;

	if (setup->asks_back) {
		if (job->state == JOB_OVER && !call->status)
			agent_departed_asked(job, call->peer);
		else if (job->state == JOB_RUNNING && !call->status && setup->added)
			agent_add_take(job, setup->added);
		else if (job->state == JOB_RUNNING && !call->status)
			agent_move_back(job, setup->server);
	} else if (setup->n_moved != job->placement.n_moved) {
		/* Said before the job went over to other servers: it has attached again since. */
	} else if (job->state != JOB_OVER && job->retention.keeps &&
		   (job->resumption.resumed || job->membership.regrouped ||
		    job->state == JOB_RUNNING || call->answer.op == DATA_ERROR) &&
		   agent_keep_is_loss(call)) {
		/* peer_lost() follows, but where the server only shuts down, or knows of other servers. */
		if (call->answer.op == DATA_ERROR)
			agent_keep_again(job, setup->server);
	} else if (job->state != JOB_OVER && call->status) {
		agent_setup_fail(job, call->status, call->text);
	} else if (job->state != JOB_OVER) {
		attached(setup);
	}
	agent_setup_done(setup);
}

/* Where, and with which servers it is to go on. asks_back: with others than the job's: one that was out is asked in. */
struct place {
	size_t server;
	struct peer *peer;
	struct agent_said *said;
	bool asks_back;
};

/* Of a job that outlives its daemons' processes. Returns what is to be freed, or NULL without memory. */
static void *set_kept(const struct agent_job *job, const struct place *place,
		      Bps__Cluster__JobHome *home, Bps__Cluster__JobAttach *m)
{
	const struct data_added_set *added = &place->said->added;
	Bps__Cluster__AddedServer *servers, **pointers;

	pointers = calloc(DATA_ADDED_MAX, sizeof(*pointers) + sizeof(*servers));
	if (!pointers)
		return NULL;
	servers = (Bps__Cluster__AddedServer *)(pointers + DATA_ADDED_MAX);
	for (uint32_t i = 0; i < added->n; i++) {
		bps__cluster__added_server__init(&servers[i]);
		servers[i].name = (char *)added->servers[i].name;
		servers[i].address = (char *)added->servers[i].address;
		servers[i].moves = added->servers[i].moves;
		servers[i].has_bandwidth_mbps = true;
		servers[i].bandwidth_mbps = added->servers[i].bandwidth_mbps;
		pointers[i] = &servers[i];
	}
	m->n_added = added->n;
	m->added = pointers;
	m->has_resume = m->resume = true;
	m->has_lost_timeout_ms = true;
	m->lost_timeout_ms = job->agent->params.lost_timeout_ms;
	home->part_bytes = job->part_bytes;
	home->epoch = job->fleet.view->epoch;
	home->has_min_ranks = home->has_max_ranks = job->shape.elastic;
	home->min_ranks = job->shape.min_ranks;
	home->max_ranks = job->shape.max_ranks;
	home->view_digest = view_server_digest(job->fleet.view);
	m->has_joined = job->membership.joined != NULL;
	m->joined = (ProtobufCBinaryData){ job->membership.joined_len, job->membership.joined };
	m->n_moves = agent_move_n(job);
	m->moves = place->said->moves;
	m->has_elastic = m->elastic = job->shape.elastic;
	m->has_asks_back = m->asks_back = place->asks_back;
	m->has_begins = m->begins = job->state == JOB_FORMING && !job->resumption.resumed;
	if (place->server < job->fleet.n_viewed) {
		m->has_server = true;
		m->server = (uint32_t)place->server;
	} else {
		m->has_added_server = true;
		m->added_server = (uint32_t)(place->server - job->fleet.n_viewed) + 1;
	}
	return pointers;
}

static int attach_at(struct agent_job *job, const struct place *place,
		     struct agent_setup **ret_setup)
{
	Bps__Cluster__JobAttach m = BPS__CLUSTER__JOB_ATTACH__INIT;
	Bps__Cluster__JobHome home = BPS__CLUSTER__JOB_HOME__INIT;
	_cleanup_(freep) void *kept = NULL;
	Bps__Cluster__Stragglers stragglers;
	size_t at_home = 0;
	int r;

	/* One that is asked back may be the home again. */
	r = place->said ? agent_move_home(job, place->said, &at_home) : 0;
	if (r)
		return error_trace(r);
	m.name = job->owner.name;
	m.has_secret_digest = true;
	m.secret_digest =
		(ProtobufCBinaryData){ SECRET_DIGEST_LEN, (uint8_t *)job->owner.secret_digest };
	m.has_user = true;
	m.user = job->owner.uid;
	m.size = job->shape.size;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	m.n_node_of_rank = job->layout.size;
	m.node_of_rank = job->layout.node_of_rank;
	m.request_timeout_ms = job->request_timeout_ns / NSEC_PER_MSEC;
	m.instance = job->instance;
	m.has_part_bytes = true;
	m.part_bytes = job->part_bytes;
	m.stragglers = agent_setup_stragglers(job, &stragglers);
	if (place->said) {
		kept = set_kept(job, place, &home, &m);
		if (!kept)
			return error_origin(-ENOMEM);
		m.home = place->server == at_home ? &home : NULL;
	}
	r = agent_setup_call(job, place->peer, DATA_ATTACH, &m.base, on_attached, ret_setup);
	if (!r)
		(*ret_setup)->server = place->server;
	return error_trace(r);
}

static int attach(struct agent_job *job, size_t server)
{
	_cleanup_(freep) struct agent_said *said =
		job->retention.keeps ? agent_move_said(job) : NULL;
	struct place place = {
		.server = server,
		.peer = job->fleet.servers[server].send_queue->peer,
		.said = said,
	};
	struct agent_setup *setup;

	if (job->retention.keeps && !said)
		return error_origin(-ENOMEM);
	/* Who follows elsewhere the home says once we are attached. */
	if (server == job->fleet.home_number)
		job->following.n_elsewhere = 0;
	return error_trace(attach_at(job, &place, &setup));
}

/* added: NULL: it is one of the job's. */
static int ask(struct agent_job *job, size_t server, const struct view_member *member,
	       struct agent_said *said, const struct data_added *added)
{
	_cleanup_(freep) struct data_added *kept = added ? malloc(sizeof(*kept)) : NULL;
	struct place place = { .server = server, .said = said, .asks_back = true };
	struct agent_setup *setup;
	int r;

	if (added && !kept)
		return error_origin(-ENOMEM);
	if (added)
		*kept = *added;
	r = agent_setup_peer_of(job, member, true, &place.peer);
	if (!r)
		r = attach_at(job, &place, &setup);
	if (r)
		return error_trace(r);
	setup->asks_back = true;
	setup->added = TAKE_PTR(kept);
	return 0;
}

int agent_setup_ask_back(struct agent_job *job, size_t server, struct agent_said *said)
{
	return error_trace(ask(job, server, &job->fleet.servers[server].member, said, NULL));
}

int agent_setup_ask_in(struct agent_job *job, const struct view_member *member,
		       struct agent_said *said)
{
	uint32_t last = said->added.n - 1;

	return error_trace(
		ask(job, job->fleet.n_viewed + last, member, said, &said->added.servers[last]));
}

static int connect_server(struct agent_job *job, size_t server)
{
	/* What the view says of processes is of when the job began. */
	bool again = job->resumption.resumed || job->membership.regrouped ||
		     job->fleet.servers[server].lost_ns;
	struct peer *peer;
	int r;

	r = agent_setup_peer_of(job, &job->fleet.servers[server].member, again, &peer);
	if (!r)
		r = agent_send_queue_new(job->agent, peer, &job->fleet.servers[server].send_queue);
	if (!r && job->retention.keeps && server == job->fleet.home_number)
		job->fleet.home = peer;
	return error_trace(r);
}

static bool is_of_job(const struct agent_job *job, const struct view_member *member)
{
	for (uint32_t i = 0; i < job->shape.n_nodes; i++)
		if (job->fleet.member_of_node[i] &&
		    !strcmp(job->fleet.view->members[job->fleet.member_of_node[i] - 1].name,
			    member->name))
			return true;
	return false;
}

static int add_place(struct agent_job *job, const struct view_member *member, bool colocated)
{
	struct agent_server *server = &job->fleet.servers[job->fleet.n_servers++];

	server->member = *member;
	server->colocated = colocated;
	return error_trace(agent_keep_init(job, job->fleet.n_servers - 1));
}

int agent_setup_add_place(struct agent_job *job, const struct view_member *member)
{
	return error_trace(add_place(job, member, is_of_job(job, member)));
}

/* By member of the job's view: whether it is a node of the job. */
static bool *members_of_job(const struct agent_job *job)
{
	bool *of_job = calloc(MAX(job->fleet.view->n_members, (size_t)1), sizeof(of_job[0]));

	for (uint32_t i = 0; of_job && i < job->shape.n_nodes; i++)
		if (job->fleet.member_of_node[i])
			of_job[job->fleet.member_of_node[i] - 1] = true;
	return of_job;
}

static int find_servers(struct agent_job *job)
{
	size_t n = view_n_servers(job->fleet.view);
	const struct view_member *home = view_home(job->fleet.view, job->owner.name);
	_cleanup_(freep) bool *of_job = members_of_job(job);
	const struct view_member *member = NULL;
	int r = of_job ? 0 : -ENOMEM;

	if (!home)
		return error_origin(-EPROTO);
	/* They are never moved: what is under way points to them. */
	job->fleet.servers = calloc(n + (job->retention.keeps ? DATA_ADDED_MAX : 0),
				    sizeof(job->fleet.servers[0]));
	if (!job->fleet.servers)
		return error_origin(-ENOMEM);
	job->fleet.n_viewed = n;
	while (!r && (member = view_next_server(job->fleet.view, member))) {
		if (member == home)
			job->fleet.home_number = job->fleet.n_servers;
		r = add_place(job, member, of_job[member - job->fleet.view->members]);
	}
	if (!r)
		r = agent_move_init(job);
	for (size_t i = 0; !r && i < job->fleet.n_servers; i++)
		r = agent_placement_has(job, i) ? connect_server(job, i)
						: agent_move_look_soon(job, i);
	return error_trace(r);
}

int agent_setup_connect(struct agent_job *job, size_t server)
{
	int r;

	r = connect_server(job, server);
	if (!r)
		r = attach(job, server);
	return error_trace(r);
}

/* What servers are told of a run that began when ranks regrouped. */
static int keep_joined(struct agent_job *job, const Bps__Cluster__JobJoined *m)
{
	int r = pack(&m->base, DATA_SETUP_MAX, &job->membership.joined,
		     &job->membership.joined_len);

	if (!r && quota_charge(&job->memory.held, job->membership.joined_len))
		r = error_origin(-EDQUOT);
	else if (!r)
		job->memory.held_ranks += job->membership.joined_len;
	return error_trace(r);
}

/* Takes over what the home server has put together, which it may have done wrong. */
static int take_joined(struct agent_job *job, const Bps__Cluster__JobJoined *m)
{
	size_t n_servers = view_n_servers(job->fleet.view);
	int r;

	if (!m->job || m->n_node_of_rank != job->shape.size || !m->n_stripes ||
	    m->n_stripes > PLACEMENT_STRIPES || m->part_bytes < PART_BYTES_MIN ||
	    m->part_bytes > PART_BYTES_MAX || !m->request_timeout_ms)
		return error_origin(-EPROTO);
	for (size_t i = 0; i < m->n_stripes; i++)
		if (m->stripes[i] >= n_servers)
			return error_origin(-EPROTO);
	if (m->n_member_of_node > job->shape.n_nodes)
		return error_origin(-EPROTO);
	for (size_t i = 0; i < m->n_member_of_node; i++)
		if (m->member_of_node[i] > job->fleet.view->n_members)
			return error_origin(-EPROTO);
	job->placement.stripes = agent_stripes_new(m->n_stripes);
	if (!job->placement.stripes)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < m->n_stripes; i++)
		job->placement.stripes[i] = (uint16_t)m->stripes[i];
	job->placement.n_stripes = m->n_stripes;
	job->fleet.member_of_node =
		calloc(job->shape.n_nodes, sizeof(job->fleet.member_of_node[0]));
	if (!job->fleet.member_of_node)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < m->n_member_of_node; i++)
		job->fleet.member_of_node[i] = m->member_of_node[i];
	job->number = m->job;
	job->agent->n_changes++;
	job->part_bytes = m->part_bytes - m->part_bytes % PART_ALIGN;
	/* As sent, and so limited: the product does not overflow. */
	job->request_timeout_ns =
		MIN(m->request_timeout_ms, job->shape.request_timeout_ms) * NSEC_PER_MSEC;
	r = layout_init(&job->layout, m->node_of_rank, job->shape.size, job->shape.n_nodes,
			job->shape.node);
	if (!r)
		r = agent_departed_init(job);
	if (!r && m->regroups)
		r = keep_joined(job, m);
	return error_trace(r);
}

/* What the next process has to know goes to the ledger. */
static int keep_record(struct agent_job *job, const Bps__Cluster__JobJoined *joined)
{
	Bps__Cluster__JobRecord m = BPS__CLUSTER__JOB_RECORD__INIT;
	_cleanup_(freep) void *view = NULL, *data = NULL;
	size_t view_len, len;
	int r;

	r = view_pack(job->fleet.view, LEDGER_JOB_MAX, &view, &view_len);
	if (r)
		return error_trace(r);
	m.joined = (Bps__Cluster__JobJoined *)joined;
	m.view = (ProtobufCBinaryData){ view_len, view };
	m.instance = job->instance;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	r = pack(&m.base, LEDGER_JOB_MAX, &data, &len);
	if (!r)
		r = agent_resume_prepare_far(job, data, len);
	if (r)
		return error_trace(r);
	job->retention.keeps = true;
	return 0;
}

int agent_setup_use_joined(struct agent_job *job, const Bps__Cluster__JobJoined *m)
{
	int r;

	r = take_joined(job, m);
	if (!r)
		r = agent_job_order_members(job);
	if (!r && !m->resume && !job->resumption.ends)
		job->resumption.ends = "another node can take part in no restart";
	if (!r && !job->resumption.ends)
		r = keep_record(job, m);
	if (!r)
		r = find_servers(job);
	FAILPOINT("job-attaching");
	for (size_t i = 0; !r && i < job->fleet.n_servers; i++)
		if (agent_placement_has(job, i))
			r = attach(job, i);
	return error_trace(r);
}

/* -- The job as the next process finds it ------------------------------------------------------------------------- */

static int recall_view(struct agent_job *job, const ProtobufCBinaryData *m)
{
	const struct view *now = cluster_view(job->agent->params.cluster);
	const char *own = now ? agent_setup_own_name(now) : NULL;

	return error_trace(view_unpack(m->data, m->len, own, &job->fleet.view));
}

static int take_record(struct agent_job *job, const Bps__Cluster__JobRecord *m)
{
	int r;

	if (m->n_nodes != job->shape.n_nodes || m->node != job->shape.node ||
	    m->joined->job != job->number || !m->instance)
		return error_origin(-EPROTO);
	r = recall_view(job, &m->view);
	if (!r)
		r = take_joined(job, m->joined);
	/* What the record says is not what the memory was made for. */
	if (!r && (job->part_bytes != ledger_part_bytes(job->resumption.ledger) ||
		   ledger_result_bytes(job->resumption.ledger) != agent_quota_result_bytes(job)))
		r = error_origin(-EPROTO);
	if (r)
		return error_trace(r);
	/* It is put together once all ranks are back. */
	job->resumption.node_of_rank = TAKE_PTR(job->layout.node_of_rank);
	layout_done(&job->layout);
	job->layout = (struct layout){ 0 };
	job->instance = m->instance;
	job->retention.keeps = true;
	return 0;
}

int agent_setup_recall(struct agent_job *job, struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobRecord *m = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	if (!job->agent->params.cluster || !job->agent->params.resume)
		return failure_set(failure, -ECONNRESET,
				   "job %s: cannot go on after the daemon's restart: this daemon "
				   "is in no cluster, or its option resume is off",
				   job->owner.name);
	r = ledger_read_record(job->resumption.ledger, &data, &len);
	if (!r)
		r = unpack(&bps__cluster__job_record__descriptor, data, len,
			   (ProtobufCMessage **)&m);
	if (!r)
		r = take_record(job, m);
	if (r == -EDQUOT)
		return agent_job_no_memory(job, EDQUOT, failure);
	if (r)
		return failure_set(failure, r == -ENOMEM ? r : -EPROTO,
				   "the ledger is damaged: the record of job %s", job->owner.name);
	return 0;
}

int agent_setup_reattach(struct agent_job *job)
{
	int r;

	r = find_servers(job);
	for (size_t i = 0; !r && i < job->fleet.n_servers; i++)
		r = attach(job, i);
	return error_trace(r);
}
