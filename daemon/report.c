/*
 * What operators are told: each function fills admin's plain structs from the modules. Agent and
 * server know different halves of a job; here they become one line. admin/ calls by report_ops.
 */
#include "base/clock.h"
#include "base/metrics.h"
#include "internal.h"
#include "job_lines.h"
#include <inttypes.h>
#include <stdio.h>

/* Tensors of a job that are listed: each takes the control thread a microsecond or two. */
#define TENSORS_MAX 4096

/* Connected peers to which payloads go by RDMA, which the cluster's key does not protect. */
static unsigned n_by_rdma(const struct transport_peer_info *peers, size_t n_peers)
{
	unsigned n = 0;

	for (size_t i = 0; i < n_peers; i++)
		n += peers[i].is_up && !strncmp(peers[i].transport, "rdma", 4);
	return n;
}

/* Bytes over all data connections, and to how many of them go by RDMA. */
static int add_traffic(const struct daemon *daemon, struct admin_status *status,
		       unsigned *ret_by_rdma)
{
	_cleanup_(freep) struct transport_peer_info *peers = NULL;
	size_t n = 0;
	int r;

	*ret_by_rdma = 0;
	if (!daemon->transport)
		return 0;
	r = transport_peers(daemon->transport, &peers, &n);
	if (r)
		return error_trace(r);
	*ret_by_rdma = n_by_rdma(peers, n);
	for (size_t i = 0; i < n; i++) {
		status->bytes_in += peers[i].bytes_in;
		status->bytes_out += peers[i].bytes_out;
	}
	return 0;
}

static void add_exposed(struct admin_status *status, const char *format, const char *what)
{
	size_t len = strlen(status->exposed);

	if (len)
		len += (size_t)snprintf(status->exposed + len, sizeof(status->exposed) - len, "; ");
	(void)snprintf(status->exposed + len, sizeof(status->exposed) - len, format, what);
}

/* What nobody has been asked to prove. */
static void describe_exposure(const struct daemon *daemon, unsigned by_rdma,
			      struct admin_status *status)
{
	const struct config *config = daemon->config;
	char port[16] = "", nodes[32];

	if (*config->coordinator_listen && !*config->tls_ca)
		add_exposed(status,
			    "whoever reaches the coordinator at %s becomes a member and gets the "
			    "data key (no tls_ca)",
			    config->coordinator_listen);
	if (daemon->transport && transport_port(daemon->transport) && !daemon->data_key_len) {
		(void)snprintf(port, sizeof(port), "%u", transport_port(daemon->transport));
		add_exposed(status,
			    "whoever reaches data port %s can take part (no cluster_key_file)",
			    port);
	}
	if (by_rdma && daemon->data_key_len) {
		(void)snprintf(nodes, sizeof(nodes), "%u node%s", by_rdma, by_rdma > 1 ? "s" : "");
		add_exposed(status,
			    "payloads go to %s by RDMA, where who is in the path can change them "
			    "(transport = tcp authenticates all)",
			    nodes);
	}
}

struct job_count {
	struct job_lines lines;
	size_t n_max;
	int r;
};

static void count_any(void *user, const char *name, uint64_t number)
{
	struct job_count *count = user;

	(void)name;
	(void)number;
	count->n_max++;
}

static void count_agent_job(void *user, const char *name, uint64_t number)
{
	struct job_count *count = user;
	size_t line;

	if (!count->r)
		count->r = job_lines_agent(&count->lines, name, number, &line);
}

static void count_server_job(void *user, const char *name, uint64_t number)
{
	struct job_count *count = user;
	size_t line;

	if (!count->r)
		count->r = job_lines_server(&count->lines, name, number, &line);
}

/* As many as report_jobs() has lines. */
static int count_jobs(const struct daemon *daemon, uint32_t *ret_n)
{
	struct job_count count = { 0 };

	if (daemon->agent)
		agent_each_job(daemon->agent, count_any, &count);
	if (daemon->server)
		server_each_job(daemon->server, count_any, &count);
	count.r = job_lines_init(&count.lines, count.n_max);
	if (daemon->agent)
		agent_each_job(daemon->agent, count_agent_job, &count);
	if (daemon->server)
		server_each_job(daemon->server, count_server_job, &count);
	*ret_n = (uint32_t)count.lines.n;
	job_lines_done(&count.lines);
	return error_trace(count.r);
}

/* Anybody may ask, and as often as he likes: jobs are looked at when there are others than before. */
static int n_jobs(struct daemon *daemon, uint32_t *ret_n)
{
	struct jobs_counted now = {
		.agent = daemon->agent ? agent_n_changes(daemon->agent) : 0,
		.server = daemon->server ? server_n_changes(daemon->server) : 0,
		.n = daemon->jobs_counted.n,
	};
	int r = 0;

	if (now.agent != daemon->jobs_counted.agent || now.server != daemon->jobs_counted.server)
		r = count_jobs(daemon, &now.n);
	if (r)
		return error_trace(r);
	daemon->jobs_counted = now;
	*ret_n = now.n;
	return 0;
}

static int report_status(void *user, struct admin_status *ret_status)
{
	struct daemon *daemon = user;
	struct view *view = cluster_view(daemon->cluster);
	struct admin_status status = {
		.id = daemon->id,
		.roles = daemon->roles,
		.uptime_ms = (clock_now_ns() - daemon->started_ns) / NSEC_PER_MSEC,
		.epoch = view ? view->epoch : 0,
		.bytes_held = block_cache_used(daemon->blocks) +
			      quota_used(&daemon->accounts.total[ACCOUNT_MEMORY]) -
			      quota_used(&daemon->accounts.contributions), /* which are blocks */
		.n_sessions = daemon->control ? (uint32_t)control_n_sessions(daemon->control) : 0,
	};
	unsigned by_rdma;
	int r = n_jobs(daemon, &status.n_jobs);

	if (!r)
		r = add_traffic(daemon, &status, &by_rdma);
	if (r)
		return r;
	describe_exposure(daemon, by_rdma, &status);
	if (daemon->agent)
		agent_counters(daemon->agent, &status.n_requests, &status.n_failed);
	(void)snprintf(status.software, sizeof(status.software), "bps-daemon %s", BPS_VERSION);
	(void)snprintf(status.node, sizeof(status.node), "%s", daemon->node);
	(void)snprintf(status.source, sizeof(status.source), "%s", daemon->config->cluster);
	(void)snprintf(status.state, sizeof(status.state), "%s",
		       daemon->draining	   ? "draining"
		       : daemon->transport ? "ready"
					   : "starting");
	*ret_status = status;
	return 0;
}

static const char *link_of(const struct view_member *member,
			   const struct transport_peer_info *peers, size_t n_peers,
			   const struct transport_peer_info **ret_peer)
{
	*ret_peer = NULL;
	if (member->is_self)
		return "self";
	for (size_t i = 0; i < n_peers; i++) {
		if ((member->id && member->id == peers[i].id) ||
		    !strcmp(member->name, peers[i].node)) {
			*ret_peer = &peers[i];
			return peers[i].is_up ? "connected" : "connecting";
		}
	}
	return "idle";
}

static int report_nodes(void *user, uint32_t *ret_epoch, struct admin_node **ret_nodes,
			size_t *ret_n)
{
	struct daemon *daemon = user;
	struct view *view = cluster_view(daemon->cluster);
	_cleanup_(freep) struct transport_peer_info *peers = NULL;
	size_t n_peers = 0, n = view ? view->n_members : 0;
	struct admin_node *nodes;
	int r;

	if (daemon->transport) {
		r = transport_peers(daemon->transport, &peers, &n_peers);
		if (r)
			return error_trace(r);
	}
	nodes = calloc(MAX(n, 1u), sizeof(*nodes));
	if (!nodes)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		const struct view_member *member = &view->members[i];
		const struct transport_peer_info *peer;
		struct admin_node *node = &nodes[i];

		node->roles = member->roles;
		node->id = member->id;
		node->bandwidth_mbps = member->bandwidth_mbps;
		(void)snprintf(node->name, sizeof(node->name), "%s", member->name);
		(void)snprintf(node->address, sizeof(node->address), "%s", member->address);
		(void)snprintf(node->link, sizeof(node->link), "%s",
			       link_of(member, peers, n_peers, &peer));
		(void)snprintf(node->transport, sizeof(node->transport), "%s",
			       peer && peer->is_up ? peer->transport : "");
		node->bytes_in = peer ? peer->bytes_in : 0;
		node->bytes_out = peer ? peer->bytes_out : 0;
	}
	*ret_epoch = view ? view->epoch : 0;
	*ret_nodes = nodes;
	*ret_n = n;
	return 0;
}

/* The newest of what may be several users' jobs. */
static struct admin_job *job_called(struct admin_job *jobs, size_t n, const char *name)
{
	while (n--)
		if (job_is_called(jobs[n].name, jobs[n].number, name))
			return &jobs[n];
	return NULL;
}

static void add_agent_job(struct admin_job *job, const struct agent_job_info *info)
{
	(void)snprintf(job->name, sizeof(job->name), "%s", info->name);
	(void)snprintf(job->state, sizeof(job->state), "%s", info->state);
	(void)snprintf(job->role, sizeof(job->role), "agent");
	(void)snprintf(job->waiting_for, sizeof(job->waiting_for), "%s", info->waiting_for);
	job->number = info->number;
	job->size = info->size;
	job->n_nodes = info->n_nodes;
	job->n_local = info->n_local;
	job->rounds = info->rounds;
	job->bytes = info->bytes;
	job->in_flight = info->in_flight;
	job->ends = info->ends;
	(void)snprintf(job->gpu, sizeof(job->gpu), "%s", info->gpu);
}

/* Of a job whose ranks here are nodes of their own, another. */
static void add_sibling(struct admin_job *job, const struct agent_job_info *info)
{
	job->n_local += info->n_local;
	job->rounds = MAX(job->rounds, info->rounds);
	job->bytes += info->bytes;
	job->in_flight += info->in_flight;
	if (!*job->waiting_for)
		(void)snprintf(job->waiting_for, sizeof(job->waiting_for), "%s", info->waiting_for);
	job->ends = job->ends ?: info->ends;
	if (!*job->gpu)
		(void)snprintf(job->gpu, sizeof(job->gpu), "%s", info->gpu);
}

/* Adds what the server knows; an agent's line of the same job takes precedence where both know. */
static void add_server_job(struct admin_job *job, const struct server_job_info *info)
{
	bool fresh = !*job->name;

	(void)snprintf(job->role, sizeof(job->role), "%s", fresh ? "server" : "agent,server");
	if (!*job->waiting_for)
		(void)snprintf(job->waiting_for, sizeof(job->waiting_for), "%s", info->waiting_for);
	if (!fresh)
		return;
	(void)snprintf(job->name, sizeof(job->name), "%s", info->name);
	(void)snprintf(job->state, sizeof(job->state), "%s", info->state);
	job->number = info->number;
	job->size = info->size;
	job->n_nodes = info->n_nodes;
	job->rounds = info->rounds;
	job->bytes = info->bytes;
	job->in_flight = info->in_flight;
}

static int report_jobs(void *user, struct admin_job **ret_jobs, size_t *ret_n)
{
	struct daemon *daemon = user;
	_cleanup_(freep) struct agent_job_info *agent = NULL;
	_cleanup_(freep) struct server_job_info *server = NULL;
	_cleanup_(freep) struct admin_job *jobs = NULL;
	_cleanup_(job_lines_done) struct job_lines lines = { 0 };
	size_t n_agent = 0, n_server = 0, n = 0, at;
	int r;

	if (daemon->agent) {
		r = agent_jobs(daemon->agent, &agent, &n_agent);
		if (r)
			return error_trace(r);
	}
	if (daemon->server) {
		r = server_jobs(daemon->server, &server, &n_server);
		if (r)
			return error_trace(r);
	}
	jobs = calloc(n_agent + n_server + 1, sizeof(*jobs));
	r = jobs ? job_lines_init(&lines, n_agent + n_server) : error_origin(-ENOMEM);
	for (size_t i = 0; !r && i < n_agent; i++, n = lines.n) {
		r = job_lines_agent(&lines, agent[i].name, agent[i].number, &at);
		if (!r && at < n)
			add_sibling(&jobs[at], &agent[i]);
		else if (!r)
			add_agent_job(&jobs[at], &agent[i]);
	}
	for (size_t i = 0; !r && i < n_server; i++) {
		r = job_lines_server(&lines, server[i].name, server[i].number, &at);
		if (!r)
			add_server_job(&jobs[at], &server[i]);
	}
	if (r)
		return error_trace(r);
	*ret_jobs = TAKE_PTR(jobs);
	*ret_n = lines.n;
	return 0;
}

static void add_session(struct admin_rank *rank, const struct control_session_info *session)
{
	rank->pid = session->pid;
	rank->n_requests = session->n_requests;
	rank->n_pending = session->n_pending;
	rank->bytes_held = session->bytes_mapped;
	rank->n_regions = session->n_regions;
}

/* By number: rank i is the i-th. */
static int report_ranks(struct daemon *daemon, const char *name, struct admin_rank **ret_ranks,
			size_t *ret_n)
{
	_cleanup_(freep) struct agent_rank_info *known = NULL;
	_cleanup_(freep) struct control_session_info *sessions = NULL;
	size_t n = 0, n_sessions = 0;
	struct admin_rank *ranks;
	int r = 0;

	if (daemon->agent) {
		r = agent_ranks(daemon->agent, name, &known, &n);
		if (!r)
			r = control_sessions(daemon->control, &sessions, &n_sessions);
	}
	if (r && r != -ENOENT)
		return error_trace(r);
	ranks = calloc(n + 1, sizeof(*ranks));
	if (!ranks)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		ranks[i].rank = known[i].rank;
		ranks[i].node = known[i].node;
		(void)snprintf(ranks[i].state, sizeof(ranks[i].state), "%s", known[i].state);
	}
	for (size_t i = 0; i < n_sessions; i++)
		if (sessions[i].rank < n && job_is_called(sessions[i].job, sessions[i].run, name))
			add_session(&ranks[sessions[i].rank], &sessions[i]);
	*ret_ranks = ranks;
	*ret_n = n;
	return 0;
}

static int report_tensors(struct daemon *daemon, const char *name,
			  struct admin_tensor **ret_tensors, size_t *ret_n, uint64_t *ret_total)
{
	_cleanup_(freep) struct agent_tensor_info *known = NULL;
	struct admin_tensor *tensors;
	size_t n = 0;
	int r = 0;

	if (daemon->agent)
		r = agent_tensors(daemon->agent, name, TENSORS_MAX, &known, &n, ret_total);
	if (r && r != -ENOENT)
		return error_trace(r);
	tensors = calloc(n + 1, sizeof(*tensors));
	if (!tensors)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		tensors[i].key = known[i].key;
		tensors[i].dtype = known[i].dtype;
		tensors[i].elements = known[i].elements;
		tensors[i].rounds = known[i].rounds;
		(void)snprintf(tensors[i].name, sizeof(tensors[i].name), "%s", known[i].name);
		(void)snprintf(tensors[i].waiting_for, sizeof(tensors[i].waiting_for), "%s",
			       known[i].waiting_for);
		(void)snprintf(tensors[i].last, sizeof(tensors[i].last), "%s", known[i].last);
		tensors[i].spread_us = known[i].spread_ns / NSEC_PER_USEC;
	}
	*ret_tensors = tensors;
	*ret_n = n;
	return 0;
}

static void add_arrivals(struct admin_arrival **end, const char *what,
			 const struct arrivals_info *infos, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		struct admin_arrival *arrival = (*end)++;

		(void)snprintf(arrival->who, sizeof(arrival->who), "%s %u", what, infos[i].number);
		arrival->rounds = infos[i].n_rounds;
		arrival->last = infos[i].n_last;
		arrival->late_us = infos[i].late_ns / NSEC_PER_USEC;
		arrival->held_ms = infos[i].held_ns / NSEC_PER_MSEC;
		arrival->is_late = infos[i].is_late;
	}
}

/* Ranks as the agent saw them, then nodes as the server did. */
static int report_arrivals(struct daemon *daemon, const char *name,
			   struct admin_arrival **ret_arrivals, size_t *ret_n)
{
	_cleanup_(freep) struct arrivals_info *ranks = NULL, *nodes = NULL;
	struct admin_arrival *arrivals, *end;
	size_t n_ranks = 0, n_nodes = 0;
	int r = 0;

	if (daemon->agent)
		r = agent_arrivals(daemon->agent, name, &ranks, &n_ranks);
	if ((!r || r == -ENOENT) && daemon->server)
		r = server_arrivals(daemon->server, name, &nodes, &n_nodes);
	if (r && r != -ENOENT)
		return error_trace(r);
	arrivals = calloc(n_ranks + n_nodes + 1, sizeof(*arrivals));
	if (!arrivals)
		return error_origin(-ENOMEM);
	end = arrivals;
	add_arrivals(&end, "rank", ranks, n_ranks);
	add_arrivals(&end, "node", nodes, n_nodes);
	*ret_arrivals = arrivals;
	*ret_n = n_ranks + n_nodes;
	return 0;
}

static int report_servers(struct daemon *daemon, const char *name,
			  struct admin_server **ret_servers, size_t *ret_n)
{
	_cleanup_(freep) struct agent_server_info *known = NULL;
	struct admin_server *servers;
	size_t n = 0;
	int r = 0;

	if (daemon->agent)
		r = agent_servers(daemon->agent, name, &known, &n);
	if (r && r != -ENOENT)
		return error_trace(r);
	servers = calloc(n + 1, sizeof(*servers));
	if (!servers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++) {
		servers[i].share = known[i].share;
		servers[i].added = known[i].added;
		(void)snprintf(servers[i].name, sizeof(servers[i].name), "%s", known[i].name);
		(void)snprintf(servers[i].address, sizeof(servers[i].address), "%s",
			       known[i].address);
		(void)snprintf(servers[i].state, sizeof(servers[i].state), "%s", known[i].state);
	}
	*ret_servers = servers;
	*ret_n = n;
	return 0;
}

static int report_job(void *user, const char *name, struct admin_job_parts *parts)
{
	_cleanup_(freep) struct admin_job *jobs = NULL;
	struct admin_job *job;
	char number[17];
	size_t n;
	int r = report_jobs(user, &jobs, &n);

	if (r)
		return error_trace(r);
	job = job_called(jobs, n, name);
	if (!job)
		return -ENOENT;
	parts->job = *job;
	if (job->number) {
		(void)snprintf(number, sizeof(number), "%016" PRIx64, job->number);
		name = number;
	}
	r = report_ranks(user, name, &parts->ranks, &parts->n_ranks);
	if (!r)
		r = report_tensors(user, name, &parts->tensors, &parts->n_tensors,
				   &parts->total_tensors);
	if (!r)
		r = report_arrivals(user, name, &parts->arrivals, &parts->n_arrivals);
	if (!r)
		r = report_servers(user, name, &parts->servers, &parts->n_servers);
	return error_trace(r);
}

static bool report_healthy(void *user)
{
	struct daemon *daemon = user;

	return daemon->transport && !daemon->draining;
}

const struct admin_ops report_ops = {
	.status = report_status,
	.nodes = report_nodes,
	.jobs = report_jobs,
	.job = report_job,
	.healthy = report_healthy,
	.drain = drain_node,
};
