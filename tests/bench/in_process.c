/*
 * One node with its rank in one process: the line, the server and the transport of bps-daemon, called by the program that has
 * the gradients. No ring, no shared memory, no other process: beside it stands what the daemon in between costs.
 *
 *	in_process CLUSTER_FILE NAME ADDRESS NODE NODES
 *
 * Prints "ready" when the job stands. Then for each line "BYTES REPEATS" of stdin: push_pull of so many bytes of float32,
 * once unmeasured, then REPEATS times after a barrier; prints the nanoseconds of each.
 */
#include "agent/agent.h"
#include "base/clock.h"
#include "cluster/cluster.h"
#include "server/server.h"
#include "tensor/tensor.h"
#include <inttypes.h>
#include <stdio.h>
#include <sys/epoll.h>

#define INLINE_BYTES	    (64u << 10) /* all as in daemon.c and config.def */
#define REMOTE_INLINE_BYTES (2u << 20)
#define QUOTA		    (UINT64_C(64) << 30)
#define TIMEOUT_MS	    60000

struct node {
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct transport *transport;
	struct cluster *cluster;
	struct server *server;
	struct agent *agent;
	uint32_t number, n_nodes;
	/* The rank. */
	struct agent_member member;
	struct agent_declaration barrier, data;
	uint64_t n_barriers, n_data;
	bool is_ready; /* what it waits for has come */
	struct loop_source input;
};

static _Noreturn void die(const char *what, const char *why)
{
	(void)fprintf(stderr, "in_process: %s: %s\n", what, why);
	exit(EXIT_FAILURE);
}

static void check(int r, const char *what)
{
	if (r)
		die(what, strerror(-r));
}

/* -- The node ----------------------------------------------------------------------------------------------------- */

static void on_call(void *user, struct delivery *delivery)
{
	server_call_arrived(((struct node *)user)->server, delivery);
}

static void on_notice(void *user, struct peer *peer, const struct data_header *header,
		      const void *payload)
{
	struct node *node = user;

	server_notice_arrived(node->server, peer, header, payload);
	agent_notice_arrived(node->agent, peer, header, payload);
}

/* The others have ended. */
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

static void on_view(void *user, struct view *view)
{
	(void)user;
	(void)view;
}

static void on_failed(void *user, const struct failure *failure)
{
	(void)user;
	die("cluster", failure->text);
}

static const struct view *view_of(void *user, uint32_t epoch)
{
	return cluster_view_of(((struct node *)user)->cluster, epoch);
}

static void open_cluster(struct node *node, const char *file, const char *name, const char *address)
{
	struct failure failure = { 0 };
	struct cluster_params params = {
		.loop = node->loop,
		.source = "static",
		.file = file,
		.view_changed = on_view,
		.failed = on_failed,
		.user = node,
		.self = { .id = 100 + node->number,
			  .roles = ROLE_AGENT | ROLE_SERVER,
			  .is_self = true },
	};

	(void)snprintf(params.self.name, sizeof(params.self.name), "%s", name);
	(void)snprintf(params.self.address, sizeof(params.self.address), "%s", address);
	check(cluster_new(&params, &node->cluster), "cluster");
	if (cluster_start(node->cluster, &failure))
		die("cluster", failure.text);
}

static void open_node(struct node *node, char **argv)
{
	struct transport_params transport = {
		.ops = &transport_ops,
		.user = node,
		.id = 100 + node->number,
		.node = argv[2],
		.listen = argv[3],
		.listen_fd = -1,
		.n_lanes = 1,
		.max_connections = 64,
		.handshake_timeout_ms = TIMEOUT_MS,
		.peer_timeout_ms = TIMEOUT_MS,
		.quota_bytes = QUOTA,
		.checksums = TRANSPORT_CHECKSUMS_AUTO,
	};
	struct server_params server = {
		.inline_bytes = REMOTE_INLINE_BYTES,
		.job_quota_bytes = QUOTA,
		.max_jobs = 4,
		.max_tensors = 64,
		.view_of = view_of,
		.user = node,
	};
	struct agent_params agent = {
		.id = 100 + node->number,
		.part_bytes = 1 << 20,
		.inline_bytes = INLINE_BYTES,
		.remote_inline_bytes = REMOTE_INLINE_BYTES,
		.job_quota_bytes = QUOTA,
		.max_jobs = 4,
		.max_tensors = 64,
	};

	check(loop_new(&node->loop), "loop");
	check(pool_new(node->loop, 2, &node->pool), "pool");
	check(block_cache_new(256 << 20, &node->blocks), "blocks");
	open_cluster(node, argv[1], argv[2], argv[3]);
	transport.loop = server.loop = agent.loop = node->loop;
	transport.blocks = server.blocks = agent.blocks = node->blocks;
	check(transport_new(&transport, &node->transport), "transport");
	server.pool = agent.pool = node->pool;
	server.transport = agent.transport = node->transport;
	check(server_new(&server, &node->server), "server");
	agent.cluster = node->cluster;
	check(agent_new(&agent, &node->agent), "agent");
}

/* -- Its rank ----------------------------------------------------------------------------------------------------- */

/* The loop turns meanwhile: others may need this node's server. */
static void await(struct node *node)
{
	while (!node->is_ready)
		check(loop_turn(node->loop, -1), "loop");
	node->is_ready = false;
}

static void on_joined(struct agent_member *member, uint64_t number, uint32_t n_servers, int ledger)
{
	(void)number;
	(void)n_servers;
	(void)ledger;
	container_of(member, struct node, member)->is_ready = true;
}

static void on_ended(struct agent_member *member, uint64_t number, const struct failure *failure)
{
	(void)member;
	(void)number;
	die("job", failure->text);
}

static void on_departed(struct agent_member *member)
{
	container_of(member, struct node, member)->is_ready = true;
}

static void join(struct node *node)
{
	struct failure failure = { 0 };
	struct agent_join params = {
		.job = "in-process",
		.rank = node->number,
		.size = node->n_nodes,
		.local_size = 1,
		.node = node->number,
		.n_nodes = node->n_nodes,
		.timeout_ms = TIMEOUT_MS,
		.request_timeout_ms = TIMEOUT_MS,
		.pid = (uint32_t)getpid(),
	};

	node->member = (struct agent_member){
		.joined = on_joined,
		.ended = on_ended,
		.departed = on_departed,
		.shm_fd = -1,
	};
	if (agent_join(node->agent, &node->member, &params, &failure))
		die("join", failure.text);
	await(node);
}

static struct node *the_node; /* a declaration has no room for a user */

static void on_declared(struct agent_declaration *declaration, const struct failure *failure,
			uint64_t key, uint32_t part_bytes)
{
	(void)declaration;
	(void)key;
	(void)part_bytes;
	if (failure)
		die("declare", failure->text);
	the_node->is_ready = true;
}

static void declare(struct node *node, struct agent_declaration *declaration, const char *name,
		    uint64_t elements)
{
	struct agent_facts facts = { name, DTYPE_FLOAT32, elements, NULL };
	struct failure failure = { 0 };

	*declaration = (struct agent_declaration){ .declared = on_declared };
	if (agent_declare(&node->member, declaration, &facts, NULL, &failure))
		die("declare", failure.text);
	await(node);
}

static void on_done(struct agent_request *request, const struct failure *failure)
{
	(void)request;
	if (failure)
		die("request", failure->text);
	the_node->is_ready = true;
}

static void submit(struct node *node, struct agent_declaration *declaration,
		   struct agent_request *request)
{
	request->done = on_done;
	agent_submit(declaration, request, NULL, clock_now_ns());
	await(node);
}

static void meet(struct node *node)
{
	struct agent_request request = { .round = ++node->n_barriers,
					 .operation = OPERATION_BARRIER };

	submit(node, &node->barrier, &request);
}

static uint64_t push_pull(struct node *node, const float *input, float *output, uint64_t elements)
{
	struct agent_request request = {
		.round = ++node->n_data,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.input = input,
		.output = output,
		.input_count = elements,
		.output_count = elements,
	};
	uint64_t began_ns;

	meet(node);
	began_ns = clock_now_ns();
	submit(node, &node->data, &request);
	return clock_now_ns() - began_ns;
}

static void measure(struct node *node, uint64_t bytes, unsigned repeats)
{
	uint64_t elements = bytes / sizeof(float);
	float *input = malloc(bytes), *output = malloc(bytes);
	static unsigned n_tensors;
	char name[32];

	if (!input || !output)
		die("memory", strerror(ENOMEM));
	for (uint64_t i = 0; i < elements; i++)
		input[i] = 1;
	memset(output, 0, bytes);
	(void)snprintf(name, sizeof(name), "data%u", n_tensors++);
	declare(node, &node->data, name, elements);
	node->n_data = 0;
	(void)push_pull(node, input, output, elements);
	for (unsigned i = 0; i < repeats; i++)
		(void)printf("%" PRIu64 "%c", push_pull(node, input, output, elements),
			     i + 1 < repeats ? ' ' : '\n');
	(void)fflush(stdout);
	for (uint64_t i = 0; i < elements; i++)
		if (output[i] != (float)node->n_nodes)
			die("result", "wrong");
	meet(node);
	free(input);
	free(output);
}

static void on_input(struct loop_source *source, uint32_t events)
{
	(void)events;
	container_of(source, struct node, input)->is_ready = true;
}

int main(int argc, char **argv)
{
	static struct node node;
	unsigned long long bytes;
	unsigned repeats;
	char line[64];

	if (argc != 6) {
		(void)fprintf(stderr, "usage: in_process CLUSTER_FILE NAME ADDRESS NODE NODES\n");
		return 2;
	}
	the_node = &node;
	node.number = (uint32_t)atoi(argv[4]);
	node.n_nodes = (uint32_t)atoi(argv[5]);
	open_node(&node, argv);
	join(&node);
	declare(&node, &node.barrier, "barrier", 0);
	(void)printf("ready\n");
	(void)fflush(stdout);
	(void)setvbuf(stdin, NULL, _IONBF, 0); /* what is left in a buffer would wake nobody */
	for (;;) {
		node.input = (struct loop_source){ .fd = STDIN_FILENO, .ready = on_input };
		check(loop_add(node.loop, &node.input, EPOLLIN), "stdin");
		await(&node);
		loop_remove(&node.input);
		if (!fgets(line, sizeof(line), stdin))
			break;
		if (sscanf(line, "%llu %u", &bytes, &repeats) != 2)
			die("stdin", "not BYTES REPEATS");
		measure(&node, bytes, repeats);
	}
	/* Others may leave later: what this node owes them is given before it goes. */
	agent_leave(&node.member);
	await(&node);
	return 0;
}
