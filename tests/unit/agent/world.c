/*
 * Nodes of one process with real transports, servers and agents, and a double of cluster/. The
 * tests of the agent start nodes, kill and restart them, form jobs and submit here.
 */
#include "world.h"
#include <stdio.h>

/* -- The double of cluster/ --------------------------------------------------------------------------------------- */

struct cluster {
	struct view *view;
	struct loop *loop;
	struct cluster_query *query;
	struct mail mail;
	unsigned n_closed;
};

static void on_answer(struct mail *mail)
{
	struct cluster *cluster = container_of(mail, struct cluster, mail);
	struct cluster_query *query = TAKE_PTR(cluster->query);
	struct failure failure;

	if (!query)
		return;
	if (view_n_servers(cluster->view) >= query->min_servers) {
		query->done(query, cluster->view, NULL);
		return;
	}
	(void)failure_set(&failure, -ETIMEDOUT, "%u servers wanted, %zu there", query->min_servers,
			  view_n_servers(cluster->view));
	query->done(query, NULL, &failure);
}

void cluster_open_job(struct cluster *cluster, struct cluster_query *query)
{
	ASSERT_TRUE(!cluster->query);
	cluster->query = query;
	cluster->mail.run = on_answer;
	loop_post(cluster->loop, &cluster->mail);
}

void cluster_cancel(struct cluster *cluster, struct cluster_query *query)
{
	if (cluster->query == query) {
		loop_unpost(cluster->loop, &cluster->mail);
		cluster->query = NULL;
	}
}

void cluster_close_job(struct cluster *cluster, const char *job, uint64_t owner)
{
	(void)job;
	(void)owner;
	cluster->n_closed++;
}

struct view *cluster_view(struct cluster *cluster)
{
	return cluster->view;
}

/* -- Nodes -------------------------------------------------------------------------------------------------------- */

static void on_call(void *user, struct delivery *delivery)
{
	struct node *node = user;

	server_call_arrived(node->server, delivery);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct node *node = user;

	server_notice_arrived(node->server, peer, header, payload);
	agent_notice_arrived(node->agent, peer, header, payload);
}

static void on_peer_lost(void *user, struct peer *peer, const char *why)
{
	struct node *node = user;

	agent_peer_lost(node->agent, peer, why);
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

	return node->cluster->view->epoch == epoch ? node->cluster->view : NULL;
}

static void node_open_far(struct node *node)
{
	const struct world_options *options = &node->world->options;
	struct world *world = node->world;
	char name[16];
	struct transport_params transport = {
		.loop = world->loop,
		.blocks = node->blocks,
		.ops = &transport_ops,
		.user = node,
		.id = 100 + node->number,
		.node = name,
		.listen = "127.0.0.1:0",
		.listen_fd = -1,
		.n_threads = options->n_data_threads,
		.n_lanes = options->n_lanes ? options->n_lanes : 1,
		.max_connections = 64,
		.handshake_timeout_ms = 10000,
		.peer_timeout_ms = 20000,
		.quota_bytes = 1ull << 30,
	};
	struct server_params server = {
		.loop = world->loop,
		.pool = world->pool,
		.blocks = node->blocks,
		.part_bytes = options->part_bytes,
		.inline_bytes = options->inline_bytes,
		.job_quota_bytes = 1ull << 30,
		.max_jobs = 16,
		.max_tensors = options->max_tensors,
		.view_of = view_of,
		.user = node,
	};

	(void)snprintf(name, sizeof(name), "node%u", node->number);
	ASSERT_OK(transport_new(&transport, &node->transport));
	ASSERT_OK(server_new(&server, &node->server));
	node->cluster = calloc(1, sizeof(*node->cluster));
	ASSERT_TRUE(node->cluster);
	node->cluster->loop = world->loop;
}

static void node_open_agent(struct node *node)
{
	const struct world_options *options = &node->world->options;
	struct agent_params agent = {
		.loop = node->world->loop,
		.pool = node->world->pool,
		.blocks = node->blocks,
		.transport = node->transport,
		.cluster = node->cluster,
		.id = 100 + node->number,
		.part_bytes = options->part_bytes,
		.inline_bytes = options->inline_bytes,
		.remote_inline_bytes = options->inline_bytes,
		.ahead_bytes = options->ahead_bytes,
		.max_jobs = options->max_jobs,
		.max_tensors = options->max_tensors,
		.gpu = node->number ? NULL : node->world->gpu,
		.resume = options->resume,
		.lost_timeout_ms = 60000,
		.move_timeout_ms = 60000,
	};

	ASSERT_OK(agent_new(&agent, &node->agent));
}

/* The same list for all, but for who is "self". */
static void make_view(struct world *world, struct node *self)
{
	struct view_member members[WORLD_NODES] = { 0 };

	for (unsigned i = 0; i < world->options.n_nodes; i++) {
		struct view_member *member = &members[i];

		member->id = 100 + i;
		member->roles = ROLE_AGENT | ROLE_SERVER;
		member->is_self = &world->nodes[i] == self;
		(void)snprintf(member->name, sizeof(member->name), "node%u", i);
		(void)snprintf(member->address, sizeof(member->address), "127.0.0.1:%u",
			       transport_port(world->nodes[i].transport));
	}
	ASSERT_OK(view_new(1, members, world->options.n_nodes, &self->cluster->view));
}

void world_view(struct world *world, unsigned node, const struct view_member *members, size_t n)
{
	struct cluster *cluster = world->nodes[node].cluster;
	uint32_t epoch = cluster->view->epoch + 1;

	(void)view_unref(cluster->view);
	ASSERT_OK(view_new(epoch, members, n, &cluster->view));
}

struct world *world_new(const struct world_options *options)
{
	struct world *world = calloc(1, sizeof(*world));

	ASSERT_TRUE(world && options->n_nodes <= WORLD_NODES);
	world->options = *options;
	world->size = options->n_nodes * options->n_local;
	ASSERT_TRUE(world->size <= WORLD_RANKS);
	for (unsigned i = 0; i < WORLD_RANKS; i++)
		world->ranks[i].ledger = -1;
	if (!world->options.target)
		world->options.target = UINT64_MAX;
	if (!world->options.part_bytes)
		world->options.part_bytes = 4096;
	if (!world->options.ahead_bytes)
		world->options.ahead_bytes = 16384;
	if (!world->options.max_jobs)
		world->options.max_jobs = 8;
	if (!world->options.max_tensors)
		world->options.max_tensors = 100;
	if (!world->options.request_timeout_ms)
		world->options.request_timeout_ms = 60000;
	ASSERT_OK(loop_new(&world->loop));
	ASSERT_OK(pool_new(world->loop, options->n_threads, &world->pool));
	world->gpu = options->gpu_new ? options->gpu_new(world->loop) : NULL;
	for (unsigned i = 0; i < options->n_nodes; i++) {
		world->nodes[i].world = world;
		world->nodes[i].number = i;
		ASSERT_OK(block_cache_new(1 << 20, &world->nodes[i].blocks));
		if (!options->no_servers)
			node_open_far(&world->nodes[i]);
		node_open_agent(&world->nodes[i]);
	}
	for (unsigned i = 0; i < options->n_nodes && !options->no_servers; i++)
		make_view(world, &world->nodes[i]);
	return world;
}

void world_kill(struct world *world, unsigned node)
{
	server_close(world->nodes[node].server);
	transport_close(world->nodes[node].transport);
}

void world_restart(struct world *world, unsigned number)
{
	struct node *node = &world->nodes[number];

	agent_suspend(node->agent);
	WORLD_UNTIL(world, !agent_n_suspended(node->agent));
	agent_close(node->agent);
	node->agent = agent_free(node->agent);
	node_open_agent(node);
}

/* In the order of daemon.c. */
struct world *world_free(struct world *world)
{
	if (!world)
		return NULL;
	for (unsigned i = 0; i < world->options.n_nodes; i++) {
		struct node *node = &world->nodes[i];

		agent_close(node->agent);
		if (node->server)
			server_close(node->server);
		if (node->transport)
			transport_close(node->transport);
	}
	pool_free(world->pool);
	for (unsigned i = 0; i < world->options.n_nodes; i++) {
		struct node *node = &world->nodes[i];

		agent_free(node->agent);
		server_free(node->server);
		transport_free(node->transport);
		if (node->cluster)
			(void)view_unref(node->cluster->view);
		free(node->cluster);
		ASSERT_EQ(block_cache_used(node->blocks), 0);
		block_cache_free(node->blocks);
	}
	loop_free(world->loop);
	for (unsigned i = 0; i < WORLD_RANKS; i++)
		(void)fd_close(world->ranks[i].ledger);
	while (world->tensors) {
		struct tensor *tensor = world->tensors;

		world->tensors = tensor->next;
		free(tensor);
	}
	free(world);
	return NULL;
}

/* -- Ranks -------------------------------------------------------------------------------------------------------- */

static void on_joined(struct agent_member *member, uint64_t number, uint32_t n_servers, int ledger)
{
	struct rank *rank = container_of(member, struct rank, member);

	ASSERT_TRUE((!rank->joined || rank->world->options.min_ranks) && number);
	rank->joined = true;
	rank->n_joined++;
	rank->number = number;
	if (ledger >= 0) {
		(void)fd_close(rank->ledger);
		rank->ledger = dup(ledger);
		ASSERT_TRUE(rank->ledger >= 0);
	}
	rank->n_servers = n_servers;
}

static void on_ended(struct agent_member *member, uint64_t number, const struct failure *failure)
{
	struct rank *rank = container_of(member, struct rank, member);

	ASSERT_TRUE(!rank->ended && failure->status < 0 && *failure->text);
	ASSERT_TRUE(rank->joined ? number == rank->number : number == 0);
	rank->ended = true;
	rank->failure = *failure;
}

static void on_departed(struct agent_member *member)
{
	struct rank *rank = container_of(member, struct rank, member);

	ASSERT_TRUE(!rank->left);
	rank->left = true;
}

static void on_refused(struct agent_member *member, const struct failure *failure)
{
	struct rank *rank = container_of(member, struct rank, member);

	rank->refused = true;
	rank->failure = *failure;
}

static const char *on_charge(struct agent_member *member, bool through_servers)
{
	(void)member;
	(void)through_servers;
	return NULL;
}

static int on_charge_more(struct agent_member *member, uint64_t bytes)
{
	struct rank *rank = container_of(member, struct rank, member);

	if (bytes > rank->charged && bytes > rank->world->options.target)
		return -EDQUOT;
	rank->charged = bytes;
	return 0;
}

struct agent_join world_join_of(const struct world *world, uint32_t rank)
{
	unsigned n_local = world->options.n_local;

	/* Ranks alternate between nodes, so that rank order is not node order. */
	return (struct agent_join){
		.job = "job",
		.rank = rank,
		.size = world->size,
		.local_rank = rank / world->options.n_nodes,
		.local_size = n_local,
		.node = rank % world->options.n_nodes,
		.n_nodes = world->options.n_nodes,
		.timeout_ms = 60000,
		.request_timeout_ms = world->options.request_timeout_ms,
		.force_distributed = world->options.distributed,
		.elastic = world->options.min_ranks,
		.min_ranks = world->options.min_ranks,
		.max_ranks = world->options.max_ranks,
		.pid = 1000 + rank,
	};
}

static struct rank *rank_new(struct world *world, uint32_t number, int ledger)
{
	struct rank *rank = &world->ranks[number];

	*rank = (struct rank){
		.member = { .joined = on_joined,
			    .ended = on_ended,
			    .departed = on_departed,
			    .refused = on_refused,
			    .charge = on_charge,
			    .charge_more = on_charge_more },
		.world = world,
		.node = &world->nodes[number % world->options.n_nodes],
		.rank = number,
		.ledger = ledger,
	};
	return rank;
}

int world_join(struct world *world, uint32_t number, const struct agent_join *join,
	       struct failure *failure)
{
	struct rank *rank;

	(void)fd_close(world->ranks[number].ledger);
	rank = rank_new(world, number, -1);
	return agent_join(rank->node->agent, &rank->member, join, failure);
}

int world_resume(struct world *world, uint32_t number, const struct agent_join *join,
		 struct failure *failure)
{
	uint64_t run = world->ranks[number].number;
	struct rank *rank = rank_new(world, number, world->ranks[number].ledger);

	return agent_resume(rank->node->agent, &rank->member, join, run, rank->ledger, failure);
}

void world_form(struct world *world)
{
	/* From the last: the order of coming must not matter. */
	for (uint32_t i = world->size; i-- > 0;) {
		struct agent_join join = world_join_of(world, i);
		struct failure failure = { 0 };

		if (world_join(world, i, &join, &failure))
			test_fail(__FILE__, __LINE__, "rank %u: %s", i, failure.text);
	}
	for (uint32_t i = 0; i < world->size; i++) {
		WORLD_UNTIL(world, world->ranks[i].joined || world->ranks[i].ended);
		if (world->ranks[i].ended)
			test_fail(__FILE__, __LINE__, "rank %u: %s", i,
				  world->ranks[i].failure.text);
	}
}

/* -- Tensors and requests ----------------------------------------------------------------------------------------- */

static void on_declared(struct agent_declaration *declaration, const struct failure *failure,
			uint64_t key, uint32_t part_bytes)
{
	struct declared *declared = container_of(declaration, struct declared, base);

	ASSERT_TRUE(!declared->done && part_bytes);
	ASSERT_TRUE(failure ? failure->status < 0 : key != 0);
	declared->done = true;
	declared->key = key;
	if (failure)
		declared->failure = *failure;
}

static int declared_of(struct declared *declared, struct rank *rank,
		       const struct agent_facts *facts, const struct agent_past *past,
		       struct failure *failure)
{
	*declared = (struct declared){ .base.declared = on_declared };
	return agent_declare(&rank->member, &declared->base, facts, past, failure);
}

int declared_again(struct declared *declared, struct rank *rank, const char *name, unsigned dtype,
		   uint64_t elements, const struct agent_past *past, struct failure *failure)
{
	struct agent_facts facts = { name, dtype, elements, NULL };

	return declared_of(declared, rank, &facts, past, failure);
}

int declared_shaped(struct declared *declared, struct rank *rank, const struct agent_facts *facts,
		    struct failure *failure)
{
	return declared_of(declared, rank, facts, NULL, failure);
}

int declared_make(struct declared *declared, struct rank *rank, const char *name, unsigned dtype,
		  uint64_t elements, struct failure *failure)
{
	return declared_again(declared, rank, name, dtype, elements, NULL, failure);
}

struct declared *world_declare(struct world *world, const char *name, unsigned dtype,
			       uint64_t elements)
{
	struct tensor *tensor = calloc(1, sizeof(*tensor));

	ASSERT_TRUE(tensor);
	tensor->next = world->tensors;
	world->tensors = tensor;
	for (uint32_t i = 0; i < world->size; i++) {
		struct failure failure = { 0 };

		if (declared_make(&tensor->declared[i], &world->ranks[i], name, dtype, elements,
				  &failure))
			test_fail(__FILE__, __LINE__, "rank %u: %s", i, failure.text);
	}
	return tensor->declared;
}

static void on_done(struct agent_request *request, const struct failure *failure)
{
	static unsigned n_done;
	struct asked *asked = container_of(request, struct asked, base);

	ASSERT_TRUE(!asked->done);
	asked->done = true;
	asked->turn = n_done++;
	if (failure) {
		ASSERT_TRUE(failure->status < 0 && *failure->text);
		asked->failure = *failure;
	}
}

struct asked asked_of(unsigned operation, unsigned reduction, const void *input,
		      uint64_t input_count, void *output, uint64_t output_count)
{
	return (struct asked){
		.base = {
			.operation = operation,
			.reduction = reduction,
			.input = input,
			.output = output,
			.input_count = input_count,
			.output_count = output_count,
			.done = on_done,
		},
	};
}

void asked_submit(struct asked *asked, struct declared *declared, uint64_t round)
{
	asked->base.round = round;
	agent_submit(&declared->base, &asked->base, NULL, clock_now_ns());
}
