/*
 * Newcomers of a node that has no rank in their job: bps-recovery(7), ELASTIC JOBS. Nobody here knows where the job's home is,
 * or whether it runs at all: every server is told how many wait, again and again, until one that is its home keeps the call.
 * That one answers when the ranks regroup; then the job's next run is here, too, with these newcomers. Control thread only.
 */
#include "agent/servers/setup.h"
#include "base/log.h"
#include <stdio.h>
#include <sys/random.h>

/* Between two rounds of asking, longer and longer. */
#define AGAIN_NS     (100 * NSEC_PER_MSEC)
#define AGAIN_MAX_NS (3 * NSEC_PER_SEC)
/* A node without ranks does not shorten the request timeout of those that have some. */
#define NO_TIMEOUT_MS (365ull * 24 * 3600 * 1000)

struct discovery {
	struct list link;	/* agent->discoveries */
	struct map_entry entry; /* agent->discovered */
	struct agent *agent;
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint32_t uid;
	struct list calls;
	struct loop_timer timer;
	uint64_t again_ns;
};

struct discovery_call {
	struct list link;	     /* discovery->calls */
	struct discovery *discovery; /* NULL: its answer counts no more */
	struct call call;
	uint64_t instance;
	uint32_t n; /* newcomers, as was said */
	void *payload;
};

static bool is_for(const struct discovery *discovery, const struct agent_newcomer *newcomer)
{
	return !newcomer->cannot_resume &&
	       agent_newcomer_is_for(newcomer, discovery->job, discovery->secret_digest);
}

static void fail_all(const struct discovery *discovery, const struct failure *failure)
{
	struct agent_newcomer *newcomer, *next;

	list_for_each_safe (newcomer, next, &discovery->agent->newcomers, link)
		if (is_for(discovery, newcomer))
			agent_newcomer_fail(newcomer, failure);
}

static const struct list *newcomers_of(const struct discovery *discovery)
{
	return agent_newcomers_of(discovery->agent, discovery->job, discovery->secret_digest);
}

static uint32_t count(const struct discovery *discovery)
{
	const struct list *newcomers = newcomers_of(discovery);
	const struct agent_newcomer *newcomer;
	uint32_t n = 0;

	if (!newcomers)
		return 0;
	list_for_each (newcomer, newcomers, of_job)
		n += !newcomer->cannot_resume;
	return MIN(n, JOB_RANKS_MAX);
}

/* -- The next run is here ------------------------------------------------------------------------------------------ */

/* Nobody waits here any more, or the run cannot be: the others go on without this node. */
static void disown(struct peer *peer, const struct data_header *answer, uint64_t number)
{
	struct data_header header = { .op = DATA_LEAVE, .job = number, .node = answer->node };

	(void)peer_notice(peer, &header, NULL);
}

static int check(const Bps__Cluster__JobJoined *m, uint32_t node, uint32_t n)
{
	uint32_t n_local = 0;

	if (!m->n_node_of_rank || m->n_node_of_rank > JOB_RANKS_MAX || !m->has_view ||
	    !m->membership || !m->min_ranks || !m->request_timeout_ms ||
	    m->request_timeout_ms > NO_TIMEOUT_MS)
		return error_origin(-EPROTO);
	for (size_t i = 0; i < m->n_node_of_rank; i++)
		n_local += m->node_of_rank[i] == node;
	return n_local && n_local <= n ? 0 : error_origin(-EPROTO);
}

/* Of the newcomer that has waited longest. */
static struct account *account_of(const struct discovery *discovery)
{
	const struct list *newcomers = newcomers_of(discovery);

	return newcomers ? list_first(newcomers, struct agent_newcomer, of_job)->member->account
			 : NULL;
}

/* The job as this node is in it, with its newcomers. */
static int make(const struct discovery *discovery, const struct discovery_call *call,
		const Bps__Cluster__JobJoined *m, struct agent_job **ret_job,
		struct failure *failure)
{
	const struct view *view = cluster_view(discovery->agent->params.cluster);
	_cleanup_(freep) uint32_t *ranks = calloc(m->n_node_of_rank, sizeof(ranks[0]));
	struct agent_join join = {
		.job = discovery->job,
		.size = (uint32_t)m->n_node_of_rank,
		.node = call->call.answer.node,
		.force_distributed = true,
		.request_timeout_ms = m->request_timeout_ms,
		.elastic = true,
		.min_ranks = m->min_ranks,
		.max_ranks = m->max_ranks,
		.uid = discovery->uid,
		.account = account_of(discovery),
	};
	struct agent_job *job;
	int r;

	if (!ranks)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (uint32_t i = 0; i < join.size; i++) {
		join.n_nodes = MAX(join.n_nodes, m->node_of_rank[i] + 1);
		if (m->node_of_rank[i] == join.node)
			ranks[join.local_size++] = i;
	}
	if (join.n_nodes > join.size)
		return failure_set(failure, -EPROTO, "a job of more nodes than ranks");
	memcpy(join.secret_digest, discovery->secret_digest, SECRET_DIGEST_LEN);
	r = agent_job_new(discovery->agent, &join, &job, failure);
	if (r)
		return r;
	job->membership.first = job->membership.number = m->membership;
	job->instance = call->instance;
	job->membership.regrouped = true;
	r = view_unpack(m->view.data, m->view.len, view ? agent_setup_own_name(view) : NULL,
			&job->fleet.view);
	if (r) {
		(void)agent_job_free(job);
		return failure_set(failure, r, "its view: %s", strerror(-r));
	}
	agent_elastic_let_in(job, ranks, 0);
	*ret_job = job;
	return 0;
}

static void begin(const struct discovery *discovery, const struct discovery_call *call,
		  const Bps__Cluster__JobJoined *m)
{
	const struct data_header *answer = &call->call.answer;
	struct agent_job *job = NULL;
	struct failure failure, words;
	int r;

	r = check(m, answer->node, call->n);
	if (r)
		(void)failure_set(&words, r, "%s answered with something else than a job",
				  peer_name(call->call.peer));
	else
		r = make(discovery, call, m, &job, &words);
	if (r) {
		(void)failure_set(&failure, r, "job %s lets newcomers in, and they cannot come: %s",
				  discovery->job, words.text);
		log_warning("%s", failure.text);
		disown(call->call.peer, answer, m->job);
		fail_all(discovery, &failure);
		return;
	}
	if (!job->n_members) {
		disown(call->call.peer, answer, m->job);
		agent_job_over(job);
		return;
	}
	log_info("job %s: %u of its %u ranks are let in here", job->owner.name, job->n_members,
		 job->shape.size);
	r = agent_setup_use_joined(job, m);
	if (!r)
		return;
	disown(call->call.peer, answer, m->job);
	job->membership.goes = true;
	(void)failure_set(&failure, r, "job %s cannot let newcomers in: %s", job->owner.name,
			  strerror(-r));
	agent_job_fail(job, &failure, NULL);
}

/* -- Asking -------------------------------------------------------------------------------------------------------- */

static void end(struct discovery *discovery);

static void on_asked(struct call *done)
{
	struct discovery_call *call = container_of(done, struct discovery_call, call);
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	struct discovery *discovery = call->discovery;
	struct failure over;
	int r = done->status;

	list_remove(&call->link);
	if (!r)
		r = agent_setup_unpack(done, &bps__cluster__job_joined__descriptor,
				       (ProtobufCMessage **)&m);
	if (!discovery && !r) {
		disown(done->peer, &done->answer, m->job);
	} else if (discovery && !r) {
		begin(discovery, call, m);
		end(discovery);
	} else if (discovery && done->status == -ECANCELED && done->answer.op == DATA_ERROR) {
		/* As for newcomers on its own nodes. */
		(void)failure_set(&over, -ECANCELED, "%s", done->text);
		fail_all(discovery, &over);
	}
	free(call->payload);
	free(call);
}

static void let_go(struct discovery_call *call)
{
	list_remove(&call->link);
	call->discovery = NULL;
}

static int ask(struct discovery *discovery, struct peer *peer, const struct view *view, uint32_t n)
{
	struct discovery_call *call = calloc(1, sizeof(*call));
	Bps__Cluster__JobJoin m = BPS__CLUSTER__JOB_JOIN__INIT;
	size_t len;
	int r = -ENOMEM;

	if (!call)
		return error_origin(r);
	if (getrandom(&call->instance, sizeof(call->instance), 0) != sizeof(call->instance)) {
		free(call);
		return error_origin(-EIO);
	}
	m.job = discovery->job;
	m.secret_digest = (ProtobufCBinaryData){ SECRET_DIGEST_LEN, discovery->secret_digest };
	m.has_user = true;
	m.user = discovery->uid;
	m.size = m.n_nodes = m.local_size = 1;
	m.instance = call->instance;
	m.epoch = view->epoch;
	m.view_digest = view_server_digest(view);
	m.timeout_ms = m.request_timeout_ms = NO_TIMEOUT_MS;
	m.member = discovery->agent->params.id;
	m.node_name = (char *)agent_setup_own_name(view);
	m.has_resume = m.resume = true;
	m.has_elastic = m.elastic = true;
	m.has_newcomers = true;
	m.newcomers = n;
	r = pack(&m.base, DATA_SETUP_MAX, &call->payload, &len);
	if (r) {
		free(call);
		return error_trace(r);
	}
	call->n = n;
	call->call.header = (struct data_header){
		.op = DATA_JOIN,
		.len = (uint32_t)len,
		.epoch = view->epoch,
	};
	call->call.payload = call->payload;
	call->call.done = on_asked;
	if (n)
		call->discovery = discovery;
	list_init(&call->link);
	if (n)
		list_push_back(&discovery->calls, &call->link);
	peer_call(peer, &call->call);
	return 0;
}

static struct discovery_call *find_call(const struct discovery *discovery, const struct peer *peer)
{
	struct discovery_call *call;

	list_for_each (call, &discovery->calls, link)
		if (call->call.peer == peer)
			return call;
	return NULL;
}

/* Those that have kept a call are told that nobody waits any more. */
static void end(struct discovery *discovery)
{
	struct view *view = cluster_view(discovery->agent->params.cluster);
	struct discovery_call *call, *next;

	list_remove(&discovery->link);
	map_remove(&discovery->agent->discovered, &discovery->entry);
	loop_timer_cancel(&discovery->timer);
	list_for_each_safe (call, next, &discovery->calls, link) {
		let_go(call);
		if (view)
			(void)ask(discovery, call->call.peer, view, 0);
	}
	free(discovery);
}

static void look(struct discovery *discovery)
{
	struct agent *agent = discovery->agent;
	struct view *view = cluster_view(agent->params.cluster);
	const struct view_member *server = NULL;
	uint32_t n = count(discovery);
	int r = 0;

	if (!n || agent_elastic_find(agent, discovery->job, discovery->secret_digest)) {
		end(discovery);
		return;
	}
	while (view && (server = view_next_server(view, server))) {
		struct discovery_call *call;
		struct peer *peer;

		if (agent_setup_peer_at(agent, server, true, &peer))
			continue;
		call = find_call(discovery, peer);
		if (call && call->n == n)
			continue;
		if (call)
			let_go(call);
		r = ask(discovery, peer, view, n);
		if (r)
			log_warning("job %s: cannot ask %s to let newcomers in: %s", discovery->job,
				    peer_name(peer), strerror(-r));
	}
	discovery->again_ns = MIN(2 * discovery->again_ns, (uint64_t)AGAIN_MAX_NS);
	(void)loop_timer_set(agent->params.loop, &discovery->timer,
			     clock_now_ns() + discovery->again_ns);
}

static void on_timer(struct loop_timer *timer)
{
	look(container_of(timer, struct discovery, timer));
}

static struct discovery *find(const struct agent_newcomer *newcomer)
{
	struct map_entry *entry =
		map_find(&newcomer->agent->discovered,
			 agent_newcomers_hash(newcomer->job, newcomer->secret_digest));

	for (; entry; entry = map_find_next(entry)) {
		struct discovery *discovery = container_of(entry, struct discovery, entry);

		if (agent_newcomer_is_for(newcomer, discovery->job, discovery->secret_digest))
			return discovery;
	}
	return NULL;
}

void agent_discovery_changed(const struct agent_newcomer *newcomer)
{
	struct discovery *discovery = find(newcomer);

	if (discovery)
		(void)loop_timer_set(newcomer->agent->params.loop, &discovery->timer,
				     clock_now_ns());
}

void agent_discovery_begin(struct agent_newcomer *newcomer)
{
	struct agent *agent = newcomer->agent;
	struct discovery *discovery = find(newcomer);

	/* Jobs go through servers only where daemons can be in them again after a restart: elastic ones. */
	if (!agent->params.cluster || !agent->params.transport || !agent->params.resume)
		return;
	newcomer->cannot_resume = newcomer->member->charge(newcomer->member, true);
	if (newcomer->cannot_resume) {
		log_notice("job %s: pid %u waits for a job on this node alone: %s", newcomer->job,
			   newcomer->process.pid, newcomer->cannot_resume);
		return;
	}
	if (!discovery) {
		discovery = calloc(1, sizeof(*discovery));
		/* Without memory it waits for a job of this node alone. */
		if (!discovery ||
		    map_add(&agent->discovered,
			    agent_newcomers_hash(newcomer->job, newcomer->secret_digest),
			    &discovery->entry)) {
			free(discovery);
			return;
		}
		discovery->agent = agent;
		(void)snprintf(discovery->job, sizeof(discovery->job), "%s", newcomer->job);
		memcpy(discovery->secret_digest, newcomer->secret_digest, SECRET_DIGEST_LEN);
		discovery->uid = newcomer->uid;
		list_init(&discovery->calls);
		discovery->timer.expired = on_timer;
		list_push_back(&agent->discoveries, &discovery->link);
	}
	discovery->again_ns = AGAIN_NS;
	agent_discovery_changed(newcomer);
}

void agent_discovery_close(struct agent *agent)
{
	struct discovery *discovery;

	/* Servers see that this daemon goes. */
	while ((discovery = list_first(&agent->discoveries, struct discovery, link))) {
		while (!list_empty(&discovery->calls))
			let_go(list_first(&discovery->calls, struct discovery_call, link));
		end(discovery);
	}
}
