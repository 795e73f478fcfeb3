/* A daemon of the world: put together as by daemon.c, started, killed, started again, stopped. */
#include "sim.h"

#define PART_BYTES     4096u
#define RESTART_MS_MAX 400
#define TIMEOUT_MS     30000 /* resume_timeout, and lost_timeout */

static void on_call(void *user, struct delivery *delivery)
{
	struct node *node = user;

	if (node->server)
		server_call_arrived(node->server, delivery);
	else
		delivery_fail(delivery, -EOPNOTSUPP, "this daemon does not have the server role");
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct node *node = user;

	if (node->server)
		server_notice_arrived(node->server, peer, header, payload);
	if (node->agent)
		agent_notice_arrived(node->agent, peer, header, payload);
}

static void on_peer_lost(void *user, struct peer *peer, const char *why)
{
	struct node *node = user;

	if (node->agent)
		agent_peer_lost(node->agent, peer, why);
	if (node->server)
		server_peer_lost(node->server, peer, why);
}

static const struct transport_ops transport_ops = {
	.call_arrived = on_call,
	.notice_arrived = on_notice,
	.peer_lost = on_peer_lost,
};

static const struct view *view_of(void *user, uint32_t epoch)
{
	struct node *node = user;

	return cluster_view_of(node->cluster, epoch);
}

static void must(int r, const char *what)
{
	if (r)
		sim_fail("%s: %s", what, strerror(-r));
}

static void open_server(struct node *node, uint64_t inline_bytes)
{
	struct server_params params = {
		.loop = node->loop,
		.pool = node->pool,
		.blocks = node->blocks,
		.part_bytes = PART_BYTES,
		.inline_bytes = inline_bytes,
		.job_quota_bytes = UINT64_C(1) << 30,
		.max_jobs = 16,
		.max_tensors = 64,
		.view_of = view_of,
		.user = node,
	};

	must(server_new(&params, &node->server), "server_new");
}

static void open_agent(struct node *node, uint64_t inline_bytes)
{
	struct agent_params params = {
		.loop = node->loop,
		.pool = node->pool,
		.blocks = node->blocks,
		.transport = node->transport,
		.cluster = node->cluster,
		.id = node->id,
		.part_bytes = PART_BYTES,
		.inline_bytes = inline_bytes,
		.remote_inline_bytes = inline_bytes,
		.ahead_bytes = 4 * PART_BYTES,
		.job_quota_bytes = UINT64_C(1) << 30,
		.max_jobs = 16,
		.max_tensors = 64,
		.resume_timeout_ms = TIMEOUT_MS,
		.resume = true,
		.lost_timeout_ms = TIMEOUT_MS,
		.move_timeout_ms = world->schedule->move_ms,
	};

	must(agent_new(&params, &node->agent), "agent_new");
}

static void open_parts(void *user)
{
	struct node *node = user;
	struct rng rng = { world->schedule->seed ^ node->number ^
			   (uint64_t)node->n_processes << 32 };
	uint64_t inline_bytes = rng_chance(&rng, 50) ? 0 : PART_BYTES * rng_below(&rng, 8);
	struct transport_params transport = {
		.loop = node->loop,
		.blocks = node->blocks,
		.ops = &transport_ops,
		.user = node,
		.id = node->id,
		.node = node->name,
	};

	must(pool_new(node->loop, (unsigned)rng_below(&rng, 3), &node->pool), "pool_new");
	must(transport_new(&transport, &node->transport), "transport_new");
	node->cluster = member_new(node->loop, node->name);
	if (node->is_server)
		open_server(node, inline_bytes);
	if (node->is_agent)
		open_agent(node, inline_bytes);
}

static void on_restart(struct event *event)
{
	node_start(container_of(event, struct node, event));
}

void node_start(struct node *node)
{
	node->event.fire = on_restart;
	node->id = rng_next(&world->random) | 1;
	node->n_processes++;
	node->points_left = 0;
	list_init(&node->sessions);
	must(loop_new(&node->loop), "loop_new");
	must(block_cache_new(1 << 20, &node->blocks), "block_cache_new");
	node->server = NULL;
	node->agent = NULL;
	loop_run_in(node->loop, open_parts, node);
	node->is_alive = true;
	trace("%s: process %u starts, id %016" PRIx64, node->name, node->n_processes, node->id);
}

/* Memory of the daemon is not freed, as a killed process frees nothing. */
void node_kill(struct node *node)
{
	trace("%s: killed", node->name);
	node->is_alive = false;
	loop_kill(node->loop);
	net_kill(node->transport);
	trainers_lost(node);
	node->loop = NULL;
	event_set(&node->event,
		  world->now_ns + 1 + rng_below(&world->work, RESTART_MS_MAX * NSEC_PER_MSEC));
	world->quiet_ns = MAX(world->quiet_ns, node->event.at_ns);
}

struct node *node_at(const char *address)
{
	for (unsigned i = 0; i < world->n_nodes; i++)
		if (!strcmp(world->nodes[i].address, address))
			return &world->nodes[i];
	return NULL;
}

static void check_empty(const struct node *node)
{
	struct agent_job_info *jobs = NULL;
	struct server_job_info *sums = NULL;
	const char *left = net_left(node->transport);
	size_t n = 0;

	if (left)
		sim_fail("%s: all ranks have left, and %s is left", node->name, left);
	if (pool_pending(node->pool))
		sim_fail("%s: all ranks have left, and %zu tasks are left", node->name,
			 pool_pending(node->pool));
	if (node->agent) {
		must(agent_jobs(node->agent, &jobs, &n), "agent_jobs");
		if (n)
			sim_fail("%s: all ranks have left, and its agent has job %s, %s",
				 node->name, jobs[0].name, jobs[0].state);
		free(jobs);
	}
	if (node->server) {
		must(server_jobs(node->server, &sums, &n), "server_jobs");
		if (n)
			sim_fail("%s: all ranks have left, and its server has job %s, %s, waiting "
				 "for %s",
				 node->name, sums[0].name, sums[0].state, sums[0].waiting_for);
		free(sums);
	}
	if (block_cache_used(node->blocks))
		sim_fail("%s: all ranks have left, and %" PRIu64 " bytes of blocks are held",
			 node->name, block_cache_used(node->blocks));
}

static void stop(void *user)
{
	struct node *node = user;

	check_empty(node);
	if (node->agent) {
		agent_suspend(node->agent);
		agent_close(node->agent);
	}
	if (node->server)
		server_close(node->server);
	transport_close(node->transport);
	node->pool = pool_free(node->pool);
	node->agent = agent_free(node->agent);
	node->server = server_free(node->server);
	node->transport = transport_free(node->transport);
	node->cluster = member_free(node->cluster);
	node->blocks = block_cache_free(node->blocks);
}

void node_stop(struct node *node)
{
	event_cancel(&node->event);
	if (!node->is_alive)
		return;
	loop_run_in(node->loop, stop, node);
	node->is_alive = false;
	node->loop = loop_free(node->loop);
}
