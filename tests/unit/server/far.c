/*
 * A server and ends that call it: jobs formed, tensors declared, parts pushed, answers awaited.
 * Tests of the server begin from here, over double.c or a real transport.
 */
#include "far.h"

#include "base/log.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"

static const struct view *view_of(void *user, uint32_t epoch)
{
	struct far *far = user;

	return epoch == far->view->epoch ? far->view : NULL;
}

static struct view *make_view(uint32_t mbps)
{
	struct view_member members[FAR_ENDS] = { 0 };
	struct view *view = NULL;

	for (unsigned i = 0; i < FAR_ENDS; i++) {
		members[i].roles = ROLE_AGENT | (i < 2 ? ROLE_SERVER : 0);
		members[i].is_self = !i;
		members[i].bandwidth_mbps = mbps;
		(void)snprintf(members[i].name, sizeof(members[i].name), "end%u", i);
		(void)snprintf(members[i].address, sizeof(members[i].address), "end%u:1", i);
	}
	ASSERT_OK(view_new(FAR_EPOCH, members, FAR_ENDS, &view));
	return view;
}

void far_init(struct far *far, const struct far_options *options)
{
	log_set_level(LOG_LEVEL_WARNING);
	ASSERT_OK(loop_new(&far->loop));
	ASSERT_OK(pool_new(far->loop, options ? options->n_threads : 0, &far->pool));
	ASSERT_OK(block_cache_new(1 << 20, &far->blocks));
	far->view = make_view(options ? options->mbps : 0);
	accounts_init(&far->accounts,
		      &(struct accounts_params){
			      .limits[ACCOUNT_MEMORY] =
				      options && options->memory ? options->memory : UINT64_MAX,
			      .limits[ACCOUNT_SERVED_JOBS] =
				      options && options->max_jobs ? options->max_jobs : 8,
			      .share = options && options->share ? options->share : 100,
		      });
}

void far_start(struct far *far, const struct far_options *options)
{
	const struct far_options none = { 0 };
	const struct far_options *o = options ? options : &none;
	struct server_params params = {
		.loop = far->loop,
		.accounts = &far->accounts,
		.pool = far->pool,
		.blocks = far->blocks,
		.part_bytes = o->part_bytes || o->by_link ? o->part_bytes : 65536,
		.inline_bytes = o->inline_bytes,
		.job_quota_bytes = o->quota_bytes ? o->quota_bytes : 64 << 20,
		.max_jobs = o->max_jobs ? o->max_jobs : 8,
		.max_tensors = o->max_tensors ? o->max_tensors : 16,
		.view_of = view_of,
		.user = far,
	};

	ASSERT_OK(server_new(&params, &far->server));
}

static void far_done(struct far *far)
{
	if (far->server)
		server_close(far->server);
	while (far->pool && pool_pending(far->pool))
		ASSERT_OK(loop_turn(far->loop, 100));
	for (struct asked *a = far->all; a; a = a->next)
		far_wait(far, a);
	far->server = server_free(far->server);
	far->ops->free(far);
	/* Asserts that nothing is charged. */
	accounts_done(&far->accounts);
	pool_free(far->pool);
	for (struct asked *a = far->all, *next; a; a = next) {
		next = a->next;
		free(a->payload);
		free(a->data);
		free(a);
	}
	/* Asserts that no block is left. */
	block_cache_free(far->blocks);
	view_unref(far->view);
	loop_free(far->loop);
}

struct far *far_free(struct far *far)
{
	if (far)
		far_done(far);
	free(far);
	return NULL;
}

struct asked *far_call(struct far *far, unsigned end, const struct data_header *header,
		       const void *payload)
{
	struct asked *asked = calloc(1, sizeof(*asked));

	ASSERT_TRUE(asked);
	asked->next = far->all;
	far->all = asked;
	/*
	 * Every other one comes in a block, as from a socket; the rest is lent, as by a colocated agent. Rows are sorted and
	 * summed into blocks first.
	 */
	far->ops->call(far, end, asked, header, payload,
		       header->operation == OPERATION_PUSH_PULL_ROWS ||
			       (!far->misalign && far->n_calls++ % 2));
	return asked;
}

static struct asked *call_packed(struct far *far, unsigned end, struct data_header *header,
				 const ProtobufCMessage *message)
{
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;

	ASSERT_OK(pack(message, DATA_SETUP_MAX, &data, &len));
	header->len = (uint32_t)len;
	return far_call(far, end, header, data);
}

static uint32_t ranks_of(const struct layout *layout, uint32_t node, uint32_t *ret_ranks)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < layout->size; i++) {
		if (layout->node_of_rank[i] == node)
			ret_ranks[n++] = i;
	}
	return n;
}

static Bps__Cluster__Stragglers *stragglers_of(const struct layout *layout,
					       Bps__Cluster__Stragglers *m)
{
	if (!layout->quorum && !layout->async)
		return NULL;
	bps__cluster__stragglers__init(m);
	m->has_quorum = m->has_async = true;
	m->quorum = layout->quorum;
	m->async = layout->async;
	m->has_staleness = m->staleness = layout->staleness;
	return m;
}

struct asked *far_join(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
		       const struct join_change *change)
{
	static const struct join_change none;
	const struct join_change *c = change ? change : &none;
	struct data_header header = { .op = DATA_JOIN, .epoch = FAR_EPOCH };
	Bps__Cluster__JobJoin m = BPS__CLUSTER__JOB_JOIN__INIT;
	Bps__Cluster__Stragglers stragglers;
	uint32_t ranks[FAR_RANKS], n = ranks_of(layout, node, ranks);
	uint8_t digest[32];
	struct asked *asked;
	char name[16];

	memset(digest, 's', sizeof(digest));
	if (c->secret)
		memcpy(digest, c->secret, MIN(strlen(c->secret), sizeof(digest)));
	(void)snprintf(name, sizeof(name), "end%u", end);
	m.job = (char *)layout->name;
	m.has_user = true;
	m.user = c->user ? c->user : 1000;
	m.secret_digest = (ProtobufCBinaryData){ sizeof(digest), digest };
	m.size = c->size ? c->size : layout->size;
	m.n_nodes = c->n_nodes ? c->n_nodes : layout->n_nodes;
	m.node = node;
	m.local_size = c->local_size ? c->local_size : n;
	m.ranks = c->ranks ? (uint32_t *)c->ranks : ranks;
	m.n_ranks = c->no_ranks ? 0 : c->ranks ? c->n_ranks : n;
	m.instance = c->instance ? c->instance : FAR_INSTANCE + node;
	m.epoch = c->epoch ? c->epoch : FAR_EPOCH;
	m.view_digest = c->view_digest ? c->view_digest : view_server_digest(far->view);
	m.timeout_ms = layout->timeout_ms;
	m.request_timeout_ms = layout->request_timeout_ms;
	m.has_part_bytes = true;
	m.part_bytes = c->part_bytes ? c->part_bytes : layout->part_bytes;
	m.member = 500 + end;
	m.node_name = c->node_name ? (char *)c->node_name : name;
	m.has_resume = m.resume = layout->resume;
	m.stragglers = stragglers_of(layout, &stragglers);
	m.has_elastic = m.elastic = layout->elastic;
	m.has_min_ranks = m.min_ranks = layout->elastic;
	m.has_max_ranks = m.max_ranks = layout->max_ranks;
	m.has_regroups = m.regroups = c->regroups;
	m.has_newcomers = c->has_newcomers;
	m.newcomers = c->newcomers;
	m.has_membership = m.membership = c->membership;
	if (c->regroups)
		header.epoch = far_epoch(layout);
	if (c->view) {
		m.has_view = true;
		ASSERT_OK(view_pack(c->view, 1 << 20, (void **)&m.view.data, &m.view.len));
	}
	asked = call_packed(far, end, &header, &m.base);
	free(m.view.data);
	return asked;
}

/* Returns how many there are. */
static size_t moves_of(const struct layout *layout, uint32_t *moves)
{
	memcpy(moves, layout->moves, sizeof(layout->moves));
	if (!layout->elastic)
		return FAR_SERVERS;
	memcpy(moves + FAR_SERVERS, layout->gone, layout->size * sizeof(moves[0]));
	return FAR_SERVERS + layout->size;
}

uint32_t far_epoch(const struct layout *layout)
{
	uint32_t moves[FAR_SERVERS + FAR_RANKS];
	size_t n = moves_of(layout, moves);

	return data_moves_epoch(FAR_EPOCH, moves, n, NULL);
}

struct asked *far_attach(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
			 uint64_t instance)
{
	struct data_header header = { .op = DATA_ATTACH, .job = layout->job, .epoch = FAR_EPOCH };
	Bps__Cluster__JobAttach m = BPS__CLUSTER__JOB_ATTACH__INIT;
	Bps__Cluster__JobHome home = BPS__CLUSTER__JOB_HOME__INIT;
	Bps__Cluster__Stragglers stragglers;
	uint32_t moves[FAR_SERVERS + FAR_RANKS];
	uint8_t digest[32];

	memset(digest, 's', sizeof(digest));
	m.has_secret_digest = true;
	m.secret_digest = (ProtobufCBinaryData){ sizeof(digest), digest };
	home.part_bytes = layout->joined_part_bytes;
	home.epoch = FAR_EPOCH;
	home.view_digest = view_server_digest(far->view);
	home.has_min_ranks = home.min_ranks = layout->elastic;
	home.has_max_ranks = home.max_ranks = layout->max_ranks;
	if (layout->resume) {
		m.has_resume = m.resume = true;
		m.has_lost_timeout_ms = true;
		m.lost_timeout_ms = 60000;
		m.home = layout->elsewhere ? NULL : &home;
		m.n_moves = moves_of(layout, moves);
		m.moves = moves;
		m.has_elastic = m.elastic = layout->elastic;
		m.has_asks_back = m.asks_back = layout->asks_back;
		m.has_begins = m.begins = layout->begins;
		m.has_joined = layout->joined != NULL;
		m.joined = (ProtobufCBinaryData){ layout->joined_len, (uint8_t *)layout->joined };
	}
	m.stragglers = stragglers_of(layout, &stragglers);
	m.name = (char *)layout->name;
	m.size = layout->size;
	m.n_nodes = layout->n_nodes;
	m.node = node;
	m.n_node_of_rank = layout->size;
	m.node_of_rank = (uint32_t *)layout->node_of_rank;
	m.request_timeout_ms = layout->request_timeout_ms;
	m.instance = instance;
	return call_packed(far, end, &header, &m.base);
}

static struct asked *declare(struct far *far, unsigned end, const struct layout *layout,
			     uint32_t node, const Bps__Cluster__TensorDeclare *m)
{
	struct data_header header = {
		.op = DATA_DECLARE,
		.job = layout->job,
		.node = node,
		.epoch = far_epoch(layout),
	};

	return call_packed(far, end, &header, &m->base);
}

struct asked *far_declare(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
			  const char *name, unsigned dtype, uint64_t elements, uint32_t rank)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;

	m.name = (char *)name;
	m.dtype = dtype;
	m.elements = elements;
	m.rank = rank;
	return declare(far, end, layout, node, &m);
}

struct asked *far_declare_shaped(struct far *far, unsigned end, const struct layout *layout,
				 uint32_t node, const char *name, const char *shape, uint32_t rank)
{
	Bps__Cluster__TensorDeclare m = BPS__CLUSTER__TENSOR_DECLARE__INIT;

	m.name = (char *)name;
	m.dtype = DTYPE_FLOAT32;
	m.elements = 100;
	m.rank = rank;
	m.shape = (char *)shape;
	return declare(far, end, layout, node, &m);
}

void far_notice(struct far *far, unsigned end, unsigned op, uint64_t job, uint64_t key,
		uint64_t round, uint32_t node, int status, const char *text)
{
	struct data_header header = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = (uint8_t)op,
		.job = job,
		.key = key,
		.round = round,
		.node = node,
		.status = status,
		.len = text ? (uint32_t)strlen(text) : 0,
	};

	far->ops->notice(far, end, &header, text);
}

void far_wait(struct far *far, struct asked *asked)
{
	while (!asked->done)
		ASSERT_OK(loop_turn(far->loop, 1000));
}

void far_wait_all(struct far *far)
{
	for (struct asked *asked = far->all; asked; asked = asked->next)
		far_wait(far, asked);
}

void far_expect(struct far *far, struct asked *asked, int status, const char *text)
{
	far_wait(far, asked);
	if (asked->status != status)
		test_fail(__FILE__, __LINE__, "status %d (%s), not %d: %s", asked->status,
			  strerror(-asked->status), status, asked->text);
	if (text)
		ASSERT_CONTAINS(asked->text, text);
}

void far_expect_waiting(struct far *far, struct asked *asked)
{
	far->ops->settle(far);
	if (asked->done)
		test_fail(__FILE__, __LINE__, "answered already: %d %s", asked->status,
			  asked->text);
}

struct layout far_layout(const char *name, uint32_t n_nodes, const uint32_t *per_node)
{
	struct layout layout = {
		.name = name,
		.n_nodes = n_nodes,
		.timeout_ms = 60000,
		.request_timeout_ms = 60000,
	};

	for (uint32_t node = 0; node < n_nodes; node++) {
		for (uint32_t i = 0; i < (per_node ? per_node[node] : 1); i++)
			layout.node_of_rank[layout.size++] = node;
	}
	return layout;
}

void far_take_joined(const struct asked *asked, struct layout *layout)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;

	ASSERT_EQ(asked->answer.op, DATA_OK);
	ASSERT_OK(unpack(&bps__cluster__job_joined__descriptor, asked->data, asked->answer.len,
			 (ProtobufCMessage **)&m));
	ASSERT_EQ(m->n_node_of_rank, layout->size);
	ASSERT_MEM(m->node_of_rank, layout->node_of_rank, layout->size * sizeof(uint32_t));
	ASSERT_TRUE(m->job && m->job == asked->answer.job);
	ASSERT_TRUE(!layout->job || layout->job == m->job);
	layout->job = m->job;
	layout->joined_part_bytes = m->part_bytes;
	layout->n_stripes = (uint32_t)m->n_stripes;
	layout->request_timeout_ms = m->request_timeout_ms;
	for (size_t i = 0; i < m->n_stripes; i++)
		ASSERT_INT(m->stripes[i], <, 2);
}

void far_form_from(struct far *far, uint32_t end, struct layout *layout)
{
	struct asked *joins[FAR_ENDS];
	struct join_change as = { .user = layout->user };

	ASSERT_INT(end + layout->n_nodes, <=, FAR_ENDS);
	for (uint32_t i = 0; i < layout->n_nodes; i++)
		joins[i] = far_join(far, end + i, layout, i, layout->user ? &as : NULL);
	for (uint32_t i = 0; i < layout->n_nodes; i++) {
		far_expect(far, joins[i], 0, NULL);
		far_take_joined(joins[i], layout);
	}
	for (uint32_t i = 0; i < layout->n_nodes; i++)
		far_expect(far, far_attach(far, end + i, layout, i, FAR_INSTANCE + i), 0, NULL);
}

void far_form(struct far *far, struct layout *layout)
{
	far_form_from(far, 0, layout);
}

uint64_t far_tensor(struct far *far, const struct layout *layout, const char *name, unsigned dtype,
		    uint64_t elements, uint64_t *ret_start)
{
	struct asked *asked[FAR_ENDS];
	uint64_t key = 0, start = 0;

	for (uint32_t i = 0; i < layout->n_nodes; i++)
		asked[i] = far_declare(far, i, layout, i, name, dtype, elements, i);
	for (uint32_t i = 0; i < layout->n_nodes; i++) {
		_cleanup_(unpack_freep) Bps__Cluster__TensorDeclared *m = NULL;

		far_expect(far, asked[i], 0, NULL);
		ASSERT_OK(unpack(&bps__cluster__tensor_declared__descriptor, asked[i]->data,
				 asked[i]->answer.len, (ProtobufCMessage **)&m));
		ASSERT_TRUE(m->key && (!i || (m->key == key && m->start == start)));
		key = m->key;
		start = m->start;
	}
	if (ret_start)
		*ret_start = start;
	return key;
}

struct data_header far_push(const struct layout *layout, uint64_t key, uint64_t round,
			    uint32_t node)
{
	return (struct data_header){
		.op = DATA_PUSH,
		.job = layout->job,
		.key = key,
		.round = round,
		.epoch = FAR_EPOCH,
		.node = node,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
	};
}

size_t far_n_jobs(struct far *far)
{
	_cleanup_(freep) struct server_job_info *jobs = NULL;
	size_t n = 0;

	ASSERT_OK(server_jobs(far->server, &jobs, &n));
	return n;
}
