/*
 * A coordinator and members that tests start, kill and revive, and members made by hand. Tests of
 * the coordinator and its members begin from here.
 */
#include "coordinator_world.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>

/* A port is reserved by a socket that does not listen: while there is no coordinator, no other program has it. */
static void reserve_address(struct world *w)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(address);

	w->reserved = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ASSERT_INT(w->reserved, >=, 0);
	ASSERT_OK(setsockopt(w->reserved, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)));
	ASSERT_OK(bind(w->reserved, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(getsockname(w->reserved, (struct sockaddr *)&address, &len));
	(void)snprintf(w->address, sizeof(w->address), "127.0.0.1:%u", ntohs(address.sin_port));
}

void world_start_with(struct world *w, uint64_t lease_ms)
{
	*w = (struct world){ 0 };
	ASSERT_OK(loop_new(&w->loop));
	reserve_address(w);
	w->params = (struct coordinator_params){
		.loop = w->loop, .listen = w->address, .lease_ms = lease_ms, .wait_ms = 100
	};
	ASSERT_OK(coordinator_new(&w->params, &w->failure, &w->coordinator));
}

void world_start(struct world *w)
{
	world_start_with(w, LEASE_MS);
}

void coordinator_kill(struct world *w)
{
	w->coordinator = coordinator_free(w->coordinator);
}

void coordinator_revive(struct world *w)
{
	w->params.wait_ms = COORDINATOR_WAIT_MS;
	ASSERT_OK(coordinator_new(&w->params, &w->failure, &w->coordinator));
}

void world_stop(struct world *w)
{
	coordinator_free(w->coordinator);
	loop_free(w->loop);
	fd_close(w->reserved);
}

static void on_view(void *user, struct view *view)
{
	struct node *n = user;

	ASSERT_INT(n->key_len, >, 0);
	n->n_views++;
}

static void on_key(void *user, const void *key, size_t len)
{
	struct node *n = user;

	ASSERT_INT(len, <=, sizeof(n->key));
	memcpy(n->key, key, len);
	n->key_len = len;
	n->n_keys++;
}

static void on_failed(void *user, const struct failure *failure)
{
	struct node *n = user;

	n->is_failed = true;
	n->failure = *failure;
}

uint64_t next_id = 100;

static void identify(uint64_t number, uint8_t *ret_secret, uint64_t *ret_id)
{
	memset(ret_secret, 0, MEMBER_SECRET_LEN);
	memcpy(ret_secret, &number, sizeof(number));
	*ret_id = member_id(ret_secret);
}

void node_renew(struct node *n)
{
	identify(next_id++, n->params.secret, &n->params.self.id);
}

void node_init(struct world *w, struct node *n, const char *name, uint32_t roles)
{
	*n = (struct node){ .world = w };
	ASSERT_OK(rpc_new(w->loop, &n->rpc));
	n->params = (struct cluster_params){
		.loop = w->loop,
		.rpc = n->rpc,
		.source = "coordinator",
		.coordinator = w->address,
		.self = { .roles = roles },
		.lease_ms = w->params.lease_ms,
		.view_changed = on_view,
		.data_key_known = on_key,
		.failed = on_failed,
		.user = n,
	};
	node_renew(n);
	(void)snprintf(n->params.self.name, sizeof(n->params.self.name), "%s", name);
	(void)snprintf(n->params.self.address, sizeof(n->params.self.address), "%s.example:9690",
		       name);
}

void node_run(struct node *n)
{
	ASSERT_OK(cluster_new(&n->params, &n->cluster));
	ASSERT_OK(cluster_start(n->cluster, &n->failure));
}

void node_start(struct world *w, struct node *n, const char *name, uint32_t roles)
{
	node_init(w, n, name, roles);
	node_run(n);
}

void node_stop(struct node *n)
{
	cluster_close(n->cluster);
	for (int i = 0; i < 10; i++)
		ASSERT_INT(loop_turn(n->world->loop, 10), >=, 0);
	cluster_free(n->cluster);
	rpc_free(n->rpc);
	n->cluster = NULL;
}

uint32_t epoch_of(const struct node *n)
{
	struct view *view = cluster_view(n->cluster);

	return view ? view->epoch : 0;
}

size_t members_of(const struct node *n)
{
	struct view *view = cluster_view(n->cluster);

	return view ? view->n_members : 0;
}

static void on_done(struct cluster_query *query, struct view *view, const struct failure *failure)
{
	struct asked *a = container_of(query, struct asked, query);

	ASSERT_TRUE(!a->is_done);
	a->is_done = true;
	if (view) {
		a->epoch = view->epoch;
		a->n_servers = view_n_servers(view);
	} else {
		a->failure = *failure;
	}
}

static void ask_for(struct node *n, struct asked *a, const char *job, uint64_t owner,
		    uint32_t min_servers, uint64_t timeout_ms)
{
	*a = (struct asked){ .query = { .owner = owner,
					.min_servers = min_servers,
					.timeout_ms = timeout_ms,
					.done = on_done } };
	(void)snprintf(a->query.job, sizeof(a->query.job), "%s", job);
	cluster_open_job(n->cluster, &a->query);
	ASSERT_TRUE(!a->is_done);
}

void ask(struct node *n, struct asked *a, const char *job, uint32_t min_servers,
	 uint64_t timeout_ms)
{
	ask_for(n, a, job, 0, min_servers, timeout_ms);
}

void ask_of(struct node *n, struct asked *a, const char *job, uint64_t owner, uint32_t min_servers)
{
	ask_for(n, a, job, owner, min_servers, 20000);
}

static void on_raw_message(struct rpc_request *request, const void *data, size_t len)
{
	container_of(request, struct raw, request)->n_messages++;
}

static void on_raw_done(struct rpc_request *request, int status, const char *text, const void *data,
			size_t len)
{
	struct raw *raw = container_of(request, struct raw, request);

	raw->is_done = true;
	raw->status = status;
	(void)snprintf(raw->text, sizeof(raw->text), "%s", text);
	raw->reply_len = MIN(len, sizeof(raw->reply));
	if (len)
		memcpy(raw->reply, data, raw->reply_len);
}

void raw_start(struct world *w, struct raw *raw)
{
	*raw = (struct raw){ 0 };
	ASSERT_OK(rpc_new(w->loop, &raw->rpc));
	ASSERT_OK(rpc_channel_new(raw->rpc, w->address, 0, NULL, &w->failure, &raw->channel));
}

void raw_stop(struct raw *raw)
{
	rpc_channel_free(raw->channel);
	rpc_free(raw->rpc);
}

void raw_send(struct raw *raw, const char *method, const void *data, size_t len)
{
	static char path[64];

	(void)snprintf(path, sizeof(path), "/bps.cluster.Coordinator/%s", method);
	raw->is_done = false;
	raw->request = (struct rpc_request){
		.path = path,
		.data = data,
		.len = len,
		.stream = !strcmp(method, "Register"),
		.message = on_raw_message,
		.done = on_raw_done,
	};
	rpc_request_start(raw->channel, &raw->request);
}

void raw_register(struct raw *raw, struct wire_register *message)
{
	struct wire_bytes bytes = { 0 };

	ASSERT_OK(wire_pack_register(message, &bytes));
	raw_send(raw, "Register", bytes.data, bytes.len);
	wire_bytes_done(&bytes);
}

struct wire_register registration(uint64_t number, const char *name)
{
	struct wire_register message = {
		.version = WIRE_VERSION,
		.version_min = WIRE_VERSION_MIN,
		.member = { .roles = ROLE_AGENT },
	};

	identify(number, message.secret, &message.member.id);
	(void)snprintf(message.member.name, sizeof(message.member.name), "%s", name);
	return message;
}
