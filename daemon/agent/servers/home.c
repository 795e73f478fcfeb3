/*
 * A job and its home server: asks the cluster which that is, JOINs with the ranks that are here, takes that back, and joins
 * again when they regroup. attach.c takes the home's answer. Called by job.c as ranks come and go, by resume.c and
 * regroup.c.
 */
#include "agent/servers/setup.h"
#include <endian.h>
#include <stdio.h>
#include <sys/random.h>

/* -- View and JOIN ------------------------------------------------------------------------------------------------ */

static void on_view(struct cluster_query *query, struct view *view, const struct failure *failure)
{
	struct agent_job *job = container_of(query, struct agent_job, fleet.query);
	const struct view_member *home;
	int r;

	job->fleet.querying = false;
	if (!view) {
		agent_job_fail(job, failure, NULL);
		return;
	}
	job->fleet.opened = true;
	job->fleet.view = view_ref(view);
	home = view_home(view, job->owner.name);
	if (!home) {
		agent_setup_fail(job, -ENOENT, "no daemon of the cluster is a server");
		return;
	}
	r = agent_setup_peer_of(job, home, false, &job->fleet.home);
	if (r) {
		struct failure why;

		(void)failure_set(&why, r, "job %s: cannot reach its home server %s (%s): %s",
				  job->owner.name, home->name, home->address, strerror(-r));
		job->fleet.home = NULL;
		agent_job_fail(job, &why, NULL);
		return;
	}
	/* It decides how large parts are, by its link. */
	peer_offer_probe(job->fleet.home);
	agent_setup_join(job);
}

static uint64_t owner_of(const struct agent_job *job)
{
	uint64_t owner;

	memcpy(&owner, job->owner.secret_digest, sizeof(owner));
	return le64toh(owner);
}

void agent_setup_open(struct agent_job *job)
{
	uint64_t now_ns = clock_now_ns();

	if (!job->agent->params.cluster) {
		agent_setup_fail(job, -EOPNOTSUPP, "this daemon is in no cluster");
		return;
	}
	job->fleet.query = (struct cluster_query){
		.owner = owner_of(job),
		.min_servers = job->shape.min_servers,
		.timeout_ms = (job->formed_by_ns - MIN(job->formed_by_ns, now_ns)) / NSEC_PER_MSEC,
		.done = on_view,
	};
	(void)snprintf(job->fleet.query.job, sizeof(job->fleet.query.job), "%s", job->owner.name);
	job->fleet.querying = true;
	cluster_open_job(job->agent->params.cluster, &job->fleet.query);
}

const char *agent_setup_own_name(const struct view *view)
{
	for (size_t i = 0; i < view->n_members; i++)
		if (view->members[i].is_self)
			return view->members[i].name;
	return NULL;
}

static void on_joined(struct call *call);

Bps__Cluster__Stragglers *agent_setup_stragglers(const struct agent_job *job,
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

static void set_join(struct agent_job *job, Bps__Cluster__JobJoin *join)
{
	Bps__Cluster__JobJoin m = BPS__CLUSTER__JOB_JOIN__INIT;
	uint64_t now_ns = clock_now_ns();

	m.job = job->owner.name;
	m.secret_digest = (ProtobufCBinaryData){ SECRET_DIGEST_LEN, job->owner.secret_digest };
	m.has_user = true;
	m.user = job->owner.uid;
	m.size = job->shape.size;
	m.n_nodes = job->shape.n_nodes;
	m.node = job->shape.node;
	m.local_size = job->shape.local_size;
	m.instance = job->instance;
	m.epoch = job->fleet.view->epoch;
	m.view_digest = view_server_digest(job->fleet.view);
	m.timeout_ms = MAX((job->formed_by_ns - MIN(job->formed_by_ns, now_ns)) / NSEC_PER_MSEC,
			   (uint64_t)1);
	m.request_timeout_ms = job->shape.request_timeout_ms;
	m.has_part_bytes = job->shape.part_bytes != 0;
	m.part_bytes = job->shape.part_bytes;
	m.member = job->agent->params.id;
	m.node_name = (char *)agent_setup_own_name(job->fleet.view);
	m.has_resume = true;
	m.resume = !job->resumption.ends;
	m.has_elastic = m.has_min_ranks = m.has_max_ranks = job->shape.elastic;
	m.elastic = job->shape.elastic;
	m.min_ranks = job->shape.min_ranks;
	m.max_ranks = job->shape.max_ranks;
	*join = m;
}

/* JOIN with these ranks; with none of them, the node takes its own back. */
static int send_join(struct agent_job *job, uint32_t *ranks, size_t n_ranks)
{
	Bps__Cluster__Stragglers stragglers;
	Bps__Cluster__JobJoin m;

	set_join(job, &m);
	m.n_ranks = n_ranks;
	m.ranks = ranks;
	m.stragglers = agent_setup_stragglers(job, &stragglers);
	return error_trace(agent_setup_call(job, job->fleet.home, DATA_JOIN, &m.base, on_joined,
					    &job->fleet.join));
}

void agent_setup_join(struct agent_job *job)
{
	_cleanup_(freep) uint32_t *ranks = NULL;
	size_t n_ranks = 0;
	int r = -ENOMEM;

	/* Once it has answered, the job is complete. */
	if (!job->fleet.home || job->layout.size)
		return;
	ranks = calloc(job->shape.local_size, sizeof(ranks[0]));
	for (uint32_t i = 0; ranks && i < job->shape.local_size; i++)
		if (job->members[i])
			ranks[n_ranks++] = job->members[i]->rank;
	if (ranks)
		r = send_join(job, ranks, n_ranks);
	if (r)
		agent_setup_fail_errno(job, r);
}

/* The home server must not wait for ranks that have given up. Without memory it waits until its deadline. */
static void withdraw(struct agent_job *job)
{
	if (job->fleet.join && job->fleet.home && !job->fleet.servers)
		(void)send_join(job, NULL, 0);
	job->fleet.join = NULL;
}

void agent_setup_withdraw(struct agent_job *job)
{
	struct cluster *cluster = job->agent->params.cluster;

	withdraw(job);
	if (job->fleet.querying)
		cluster_cancel(cluster, &job->fleet.query);
	job->fleet.querying = false;
	job->fleet.home = NULL;
	job->fleet.view = view_unref(job->fleet.view);
}

static bool name_in_use(const struct agent_job *job)
{
	struct agent_job *other;

	list_for_each (other, &job->agent->jobs, link)
		if (other != job && other->state != JOB_OVER &&
		    agent_job_is(other, job->owner.name, job->owner.secret_digest))
			return true;
	return false;
}

void agent_setup_close(struct agent_job *job)
{
	struct cluster *cluster = job->agent->params.cluster;

	withdraw(job);
	if (job->fleet.querying)
		cluster_cancel(cluster, &job->fleet.query);
	job->fleet.querying = false;
	if (job->fleet.opened && !name_in_use(job))
		cluster_close_job(cluster, job->owner.name, owner_of(job));
	job->fleet.opened = false;
}

/* -- JobJoined ----------------------------------------------------------------------------------------------------- */

/*
 * The home server has put a run together that this node has given up meanwhile. The other nodes must not wait for it; where
 * ranks have regrouped they go on.
 */
static void disown(struct agent_job *job, const struct call *call, uint64_t number)
{
	static const char text[] = "a rank was gone before the job had begun";
	struct data_header header = {
		.op = DATA_FAIL_JOB,
		.status = EPIPE,
		.job = number,
		.node = call->answer.node,
		.epoch = job->fleet.view->epoch,
		.len = sizeof(text) - 1,
	};
	struct data_header left = {
		.op = DATA_LEAVE,
		.job = number,
		.node = call->answer.node,
		.epoch = job->fleet.view->epoch,
	};

	if (job->shape.elastic && job->number)
		(void)peer_notice(call->peer, &left, NULL);
	else
		(void)peer_notice(call->peer, &header, text);
}

static void fail_over_quota(struct agent_job *job)
{
	struct failure failure;

	(void)agent_job_no_memory(job, EDQUOT, &failure);
	agent_job_fail(job, &failure, NULL);
}

static void on_joined(struct call *call)
{
	struct agent_setup *setup = container_of(call, struct agent_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	struct agent_job *job = setup->job;
	bool counts = job->state == JOB_FORMING && setup == job->fleet.join;
	int r = call->status;

	if (counts)
		job->fleet.join = NULL;
	if (!r)
		r = agent_setup_unpack(call, &bps__cluster__job_joined__descriptor,
				       (ProtobufCMessage **)&m);
	/* Only the newest counts: those before it are answered with EALREADY, or too late. */
	if (!counts) {
		if (!r)
			disown(job, call, m->job);
	} else if (call->status) {
		agent_setup_fail(job, call->status, call->text);
	} else {
		if (!r)
			r = agent_setup_use_joined(job, m);
		if (r == -EDQUOT)
			fail_over_quota(job);
		else if (r)
			agent_setup_fail_answer(job, job->fleet.home, r,
						r == -EPROTO
							? "a job that this node cannot be part of"
							: strerror(-r));
	}
	agent_setup_done(setup);
}

/* -- Regrouping --------------------------------------------------------------------------------------------------- */

/* The next run of the job, and the ranks that it has here. */
static int go_on(struct agent_job *job, const struct agent_setup *setup,
		 const Bps__Cluster__JobJoined *m)
{
	_cleanup_(freep) uint32_t *ranks = calloc(m->n_node_of_rank + 1, sizeof(ranks[0]));
	struct agent_regrouped regrouped = {
		.size = (uint32_t)m->n_node_of_rank,
		.node = setup->call.answer.node,
		.n = setup->n_ranks,
		.old_ranks = setup->ranks,
		.ranks = ranks,
		.instance = setup->instance,
		.membership = m->membership,
	};
	struct agent_job *next;
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
	    regrouped.n_nodes > m->n_node_of_rank || regrouped.n_local < setup->n_ranks ||
	    m->membership <= job->membership.number)
		return error_origin(-EPROTO);
	r = agent_elastic_next(job, &regrouped, &next);
	if (r)
		return error_trace(r);
	next->fleet.view = view_ref(job->fleet.view);
	next->fleet.opened = job->fleet.opened;
	job->fleet.opened = false;
	next->placement.added = job->placement.added;
	next->placement.moved_before =
		calloc(job->fleet.n_viewed, sizeof(next->placement.moved_before[0]));
	if (next->placement.moved_before)
		memcpy(next->placement.moved_before, job->placement.moves,
		       job->fleet.n_viewed * sizeof(next->placement.moved_before[0]));
	r = next->placement.moved_before ? agent_setup_use_joined(next, m) : error_origin(-ENOMEM);
	/* Servers know of the next run before they hear that this node has left. */
	agent_departed_say(job);
	agent_job_over(job);
	if (!r)
		return 0;
	disown(job, &setup->call, m->job);
	next->membership.goes = true;
	(void)failure_set(&failure, r, "job %s cannot regroup: %s", next->owner.name, strerror(-r));
	agent_job_fail(next, &failure, NULL);
	return 0;
}

static void on_regrouped(struct call *call)
{
	struct agent_setup *setup = container_of(call, struct agent_setup, call);
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	struct agent_job *job = setup->job;
	bool counts = job->state == JOB_RUNNING && setup == job->fleet.join;
	int r = call->status;

	if (setup == job->fleet.join)
		job->fleet.join = NULL;
	if (!r)
		r = agent_setup_unpack(call, &bps__cluster__job_joined__descriptor,
				       (ProtobufCMessage **)&m);
	/* The home, or another in its place, is asked again when it is attached; one that has been asked again says the same. */
	if ((call->status && (!counts || agent_keep_is_loss(call) || call->status == -EALREADY)) ||
	    (job->state == JOB_RUNNING && job->fleet.join)) {
		agent_setup_done(setup);
		return;
	}
	if (!counts) {
		if (!r)
			disown(job, call, m->job);
	} else if (call->status) {
		/* Those that go on without this node hear nothing of its end. */
		job->membership.goes = call->status == -ESTALE;
		agent_setup_fail(job, call->status, call->text);
	} else {
		if (!r)
			r = go_on(job, setup, m);
		if (r)
			agent_setup_fail_errno(job, r);
	}
	agent_setup_done(setup);
}

int agent_setup_regroup(struct agent_job *job, const uint32_t *ranks, uint32_t n_ranks,
			uint32_t n_newcomers)
{
	struct agent_setup *setup;
	_cleanup_(freep) void *view = NULL;
	Bps__Cluster__JobJoin m;
	uint64_t instance;
	size_t view_len;
	int r;

	if (getrandom(&instance, sizeof(instance), 0) != sizeof(instance))
		return error_origin(-errno);
	r = view_pack(job->fleet.view, DATA_SETUP_MAX / 2, &view, &view_len);
	if (r)
		return error_trace(r);
	set_join(job, &m);
	m.ranks = (uint32_t *)ranks;
	m.n_ranks = n_ranks;
	m.instance = instance;
	m.timeout_ms = job->request_timeout_ns / NSEC_PER_MSEC;
	m.has_regroups = m.has_newcomers = true;
	m.regroups = job->number;
	m.newcomers = n_newcomers;
	m.has_membership = m.has_view = true;
	m.membership = job->membership.number;
	m.view = (ProtobufCBinaryData){ view_len, view };
	r = agent_setup_call(job, job->fleet.servers[job->fleet.home_number].send_queue->peer,
			     DATA_JOIN, &m.base, on_regrouped, &setup);
	if (r)
		return error_trace(r);
	job->fleet.join = setup;
	setup->instance = instance;
	setup->ranks = calloc(MAX(n_ranks, 1u), sizeof(ranks[0]));
	if (!setup->ranks) {
		job->fleet.join = NULL;
		return error_origin(-ENOMEM);
	}
	memcpy(setup->ranks, ranks, n_ranks * sizeof(ranks[0]));
	setup->n_ranks = n_ranks;
	return 0;
}
