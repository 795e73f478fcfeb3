/*
 * JOIN, ATTACH and DECLARE as plain structs and back: every field is checked here before server/
 * sees it. form.c, attach.c, declare.c and regroup.c call.
 */
#include "server/common/message.h"

#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "proto/text.h"
#include <stdarg.h>
#include <stdio.h>

static bool job_name_valid(const char *name)
{
	size_t len = strlen(name);

	return len && len <= JOB_NAME_MAX &&
	       strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") ==
		       len;
}

static int by_number(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static int check_shape(const char *job, uint32_t size, uint32_t n_nodes, uint32_t node,
		       struct failure *failure)
{
	if (!job_name_valid(job))
		return failure_set(failure, -EINVAL, "a job's name is 1 to %d of A-Z a-z 0-9 . _ -",
				   JOB_NAME_MAX);
	if (!size || size > JOB_RANKS_MAX)
		return failure_set(failure, -EINVAL, "job %s: size %u is not within 1 to %u", job,
				   size, JOB_RANKS_MAX);
	if (!n_nodes || n_nodes > size)
		return failure_set(failure, -EINVAL, "job %s: %u nodes for %u ranks", job, n_nodes,
				   size);
	if (node >= n_nodes)
		return failure_set(failure, -EINVAL, "job %s: node %u, but there are %u nodes", job,
				   node, n_nodes);
	return 0;
}

/* Of a job that does not wait for all ranks each rank is a node. */
static int take_stragglers(const Bps__Cluster__Stragglers *m, const char *job, uint32_t size,
			   uint32_t n_nodes, struct stragglers *ret_stragglers,
			   struct failure *failure)
{
	if (!m)
		return 0;
	*ret_stragglers = (struct stragglers){
		.quorum = m->quorum,
		.quorum_timeout_ms = MIN(m->quorum_timeout_ms, TIMEOUT_MAX_MS),
		.async = m->async,
		.staleness = m->staleness,
	};
	if (stragglers_any(ret_stragglers) && (n_nodes != size || m->quorum > size))
		return failure_set(failure, -EINVAL,
				   "job %s: a quorum of %u or async, with %u nodes of %u ranks",
				   job, m->quorum, n_nodes, size);
	return 0;
}

static int check_digest(const ProtobufCBinaryData *digest, const char *job, struct failure *failure)
{
	if (digest->len == SECRET_DIGEST_LEN)
		return 0;
	return failure_set(failure, -EINVAL, "job %s: a digest of %zu bytes", job, digest->len);
}

static int check_join(const Bps__Cluster__JobJoin *m, struct failure *failure)
{
	int r = check_shape(m->job, m->size, m->n_nodes, m->node, failure);

	if (r)
		return r;
	r = check_digest(&m->secret_digest, m->job, failure);
	if (r)
		return r;
	if (!m->local_size || m->local_size > m->size || m->n_ranks > m->local_size)
		return failure_set(failure, -EINVAL,
				   "job %s: node %u has %zu ranks, local size %u and size %u",
				   m->job, m->node, m->n_ranks, m->local_size, m->size);
	if (!m->request_timeout_ms)
		return failure_set(failure, -EINVAL, "job %s: a request timeout of 0", m->job);
	if (m->part_bytes && (m->part_bytes < PART_BYTES_MIN || m->part_bytes > PART_BYTES_MAX))
		return failure_set(failure, -EINVAL, "job %s: part size %u is not within %u to %u",
				   m->job, m->part_bytes, PART_BYTES_MIN, PART_BYTES_MAX);
	if (m->node_name && !text_is_name(m->node_name, MEMBER_NAME_MAX))
		return failure_set(failure, -EINVAL, "job %s: node %u has no valid name", m->job,
				   m->node);
	return 0;
}

static int check_ranks(const struct join *join, struct failure *failure)
{
	for (uint32_t i = 0; i < join->n_ranks; i++) {
		if (join->ranks[i] >= join->size)
			return failure_set(failure, -EINVAL, "job %s: rank %u, but size is %u",
					   join->job, join->ranks[i], join->size);
		if (i && join->ranks[i] == join->ranks[i - 1])
			return failure_set(failure, -EINVAL, "job %s: node %u has rank %u twice",
					   join->job, join->node, join->ranks[i]);
	}
	return 0;
}

struct join *join_free(struct join *join)
{
	if (!join)
		return NULL;
	(void)view_unref(join->view);
	account_release(join->account, ACCOUNT_MEMORY, join->charged);
	(void)account_put(join->account);
	free(join);
	return NULL;
}

int join_charge(struct join *join, struct account *account, struct failure *failure)
{
	uint64_t len = sizeof(*join) + join->n_ranks * sizeof(join->ranks[0]);

	join->account = account;
	if (join->view)
		len += sizeof(*join->view) + join->view->n_members * sizeof(join->view->members[0]);
	if (account_charge(account, ACCOUNT_MEMORY, len, failure))
		return failure->status;
	join->charged = len;
	return 0;
}

struct attach *attach_free(struct attach *attach)
{
	if (attach)
		(void)account_put(attach->account);
	free(attach);
	return NULL;
}

int join_decode(const void *data, size_t len, struct join **ret_join, struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoin *m = NULL;
	_cleanup_(join_freep) struct join *join = NULL;
	int r;

	r = unpack(&bps__cluster__job_join__descriptor, data, len, (ProtobufCMessage **)&m);
	if (r)
		return failure_set(failure, r, "not a JobJoin: %s", strerror(-r));
	r = check_join(m, failure);
	if (r)
		return r;
	join = calloc(1, sizeof(*join) + m->n_ranks * sizeof(join->ranks[0]));
	if (!join)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", m->job);

	(void)snprintf(join->job, sizeof(join->job), "%s", m->job);
	if (m->node_name)
		(void)snprintf(join->node_name, sizeof(join->node_name), "%s", m->node_name);
	memcpy(join->secret_digest, m->secret_digest.data, SECRET_DIGEST_LEN);
	join->user = m->user;
	join->size = m->size;
	join->n_nodes = m->n_nodes;
	join->node = m->node;
	join->local_size = m->local_size;
	join->epoch = m->epoch;
	join->part_bytes = m->part_bytes;
	join->instance = m->instance;
	join->view_digest = m->view_digest;
	join->timeout_ms = MIN(m->timeout_ms, TIMEOUT_MAX_MS);
	join->request_timeout_ms = MIN(m->request_timeout_ms, TIMEOUT_MAX_MS);
	join->member = m->member;
	join->resume = m->resume;
	join->elastic = m->elastic;
	join->min_ranks = m->min_ranks;
	join->max_ranks = MIN(m->max_ranks, JOB_RANKS_MAX);
	join->regroups = m->regroups;
	join->newcomers = MIN(m->newcomers, JOB_RANKS_MAX);
	join->membership = m->membership;
	join->joiner = m->has_newcomers && !m->regroups;
	join->n_ranks = (uint32_t)m->n_ranks;
	if (m->n_ranks)
		memcpy(join->ranks, m->ranks, m->n_ranks * sizeof(join->ranks[0]));
	qsort(join->ranks, join->n_ranks, sizeof(join->ranks[0]), by_number);
	r = check_ranks(join, failure);
	if (!r && m->has_view &&
	    (view_unpack(m->view.data, m->view.len, NULL, &join->view) ||
	     join->view->n_members > JOB_RANKS_MAX))
		r = failure_set(failure, -EPROTO, "job %s: a view that cannot be", m->job);
	if (!r)
		r = take_stragglers(m->stragglers, m->job, m->size, m->n_nodes, &join->stragglers,
				    failure);
	if (r)
		return r;
	*ret_join = TAKE_PTR(join);
	return 0;
}

static int check_home(const Bps__Cluster__JobAttach *m, struct failure *failure)
{
	const Bps__Cluster__JobHome *home = m->home;

	if (!home)
		return 0;
	if (!m->resume || home->part_bytes < PART_BYTES_MIN || home->part_bytes > PART_BYTES_MAX)
		return failure_set(failure, -EINVAL, "job %s: a home that cannot be", m->name);
	return 0;
}

static int check_moves(const Bps__Cluster__JobAttach *m, struct failure *failure)
{
	size_t n_ranks = m->elastic ? m->size : 0;

	if (!m->n_moves && !m->elastic && !m->n_added && !m->added_server)
		return 0;
	if (!m->resume || m->n_moves > DATA_MOVES_MAX || m->n_moves <= n_ranks ||
	    (m->added_server
		     ? m->added_server > m->n_added || m->added[m->added_server - 1]->moves & 1
		     : m->server >= m->n_moves - n_ranks || m->moves[m->server] & 1))
		return failure_set(failure, -EINVAL, "job %s: servers that cannot be", m->name);
	for (size_t i = 0; i < m->n_moves; i++)
		if (!data_moves_valid(m->moves[i], i >= m->n_moves - n_ranks))
			return failure_set(failure, -EINVAL, "job %s: %s that cannot be", m->name,
					   i < m->n_moves - n_ranks ? "servers" : "ranks");
	return 0;
}

/* Every rank is on a node that exists, every node has a rank. */
static int check_nodes(const Bps__Cluster__JobAttach *m, struct failure *failure)
{
	_cleanup_(freep) bool *seen = NULL;
	uint32_t n_seen = 0;

	if (m->n_node_of_rank != m->size)
		return failure_set(failure, -EINVAL, "job %s: nodes of %zu ranks, but size is %u",
				   m->name, m->n_node_of_rank, m->size);
	seen = calloc(m->n_nodes, sizeof(*seen));
	if (!seen)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", m->name);
	for (uint32_t i = 0; i < m->size; i++) {
		uint32_t node = m->node_of_rank[i];

		if (node >= m->n_nodes)
			return failure_set(failure, -EINVAL, "job %s: rank %u on node %u of %u",
					   m->name, i, node, m->n_nodes);
		n_seen += !seen[node];
		seen[node] = true;
	}
	if (n_seen != m->n_nodes)
		return failure_set(failure, -EINVAL, "job %s: a node without ranks", m->name);
	return 0;
}

static int take_added(const Bps__Cluster__JobAttach *m, struct attach *attach,
		      struct failure *failure)
{
	struct data_added_set *set = &attach->added;

	for (size_t i = 0; i < m->n_added && i < DATA_ADDED_MAX; i++) {
		const Bps__Cluster__AddedServer *from = m->added[i];
		struct data_added *to = &set->servers[set->n++];

		if (strlen(from->name) >= sizeof(to->name) ||
		    strlen(from->address) >= sizeof(to->address))
			break;
		(void)snprintf(to->name, sizeof(to->name), "%s", from->name);
		(void)snprintf(to->address, sizeof(to->address), "%s", from->address);
		to->bandwidth_mbps = from->bandwidth_mbps;
		to->moves = from->moves;
	}
	attach->added_server = m->added_server;
	if (set->n == m->n_added && data_added_set_valid(set))
		return 0;
	return failure_set(failure, -EINVAL, "job %s: %zu servers were added that cannot be",
			   m->name, m->n_added);
}

static int unpack_joined(const void *data, size_t len, Bps__Cluster__JobJoined **ret_joined)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	int r;

	r = unpack(&bps__cluster__job_joined__descriptor, data, len, (ProtobufCMessage **)&m);
	if (r)
		return error_trace(r);
	if (!m->regroups || m->n_old_nodes != m->n_joiners)
		return error_origin(-EPROTO);
	*ret_joined = TAKE_PTR(m);
	return 0;
}

/* The nodes are those of the attach; the rest is for the node that is told. */
static int check_joined(const Bps__Cluster__JobAttach *m, struct attach *attach,
			struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *joined = NULL;
	int r;

	if (!m->has_joined)
		return 0;
	r = unpack_joined(m->joined.data, m->joined.len, &joined);
	if (!r &&
	    (!m->resume || !m->elastic || joined->regroups == joined->job ||
	     joined->n_old_nodes != m->n_nodes || joined->n_node_of_rank != m->size ||
	     joined->n_stripes > PLACEMENT_STRIPES || joined->n_member_of_node > m->n_nodes ||
	     memcmp(joined->node_of_rank, m->node_of_rank, m->size * sizeof(m->node_of_rank[0]))))
		r = error_origin(-EPROTO);
	if (r)
		return failure_set(failure, r, "job %s: a run that its ranks cannot have begun",
				   m->name);
	attach->regroups = joined->regroups;
	attach->joined_number = joined->job;
	return 0;
}

struct past_node {
	uint64_t id; /* the node's number in the run before plus 1, or its daemon's id */
	bool is_joiner;
	uint32_t node;
};

struct past {
	size_t n;
	struct past_node nodes[]; /* sorted */
};

static int compare_id(const void *a, const void *b)
{
	const struct past_node *x = a, *y = b;

	if (x->is_joiner != y->is_joiner)
		return x->is_joiner - y->is_joiner;
	return (x->id > y->id) - (x->id < y->id);
}

static int compare_past(const void *a, const void *b)
{
	const struct past_node *x = a, *y = b;
	int r = compare_id(a, b);

	return r ? r : (x->node > y->node) - (x->node < y->node);
}

size_t past_len(uint32_t n_nodes)
{
	return sizeof(struct past) + n_nodes * sizeof(struct past_node);
}

int past_decode(const void *joined, size_t len, struct past **ret_past)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;
	_cleanup_(freep) struct past *past = NULL;
	int r;

	r = unpack_joined(joined, len, &m);
	if (r)
		return error_trace(r);
	past = malloc(past_len((uint32_t)m->n_old_nodes));
	if (!past)
		return error_origin(-ENOMEM);
	past->n = m->n_old_nodes;
	for (size_t i = 0; i < past->n; i++)
		past->nodes[i] = (struct past_node){
			.id = m->old_nodes[i] ?: m->joiners[i],
			.is_joiner = !m->old_nodes[i],
			.node = (uint32_t)i,
		};
	qsort(past->nodes, past->n, sizeof(past->nodes[0]), compare_past);
	*ret_past = TAKE_PTR(past);
	return 0;
}

int past_find(const struct past *past, const struct join *join, uint32_t *ret_node)
{
	struct past_node key = {
		.id = join->regroups ? (uint64_t)join->node + 1 : join->member,
		.is_joiner = !join->regroups,
	};
	const struct past_node *found =
		bsearch(&key, past->nodes, past->n, sizeof(past->nodes[0]), compare_id);

	if (!found)
		return error_origin(-ENOENT);
	/* Of several the first; there is but one, unless somebody has made that up. */
	while (found > past->nodes && !compare_id(&found[-1], &key))
		found--;
	*ret_node = found->node;
	return 0;
}

int attach_decode(const void *data, size_t len, struct attach **ret_attach, struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__JobAttach *m = NULL;
	_cleanup_(attach_freep) struct attach *attach = NULL;
	int r;

	/* Each server that was added is one. */
	if (!pack_has_at_most(data, len, DATA_ADDED_MAX + 64))
		return failure_set(failure, -EPROTO, "a JobAttach of too many fields");
	r = unpack(&bps__cluster__job_attach__descriptor, data, len, (ProtobufCMessage **)&m);
	if (r)
		return failure_set(failure, r, "not a JobAttach: %s", strerror(-r));
	r = check_shape(m->name, m->size, m->n_nodes, m->node, failure);
	if (!r && (m->home || m->has_secret_digest))
		r = check_digest(&m->secret_digest, m->name, failure);
	if (!r)
		r = check_nodes(m, failure);
	if (!r)
		r = check_home(m, failure);
	if (!r)
		r = check_moves(m, failure);
	if (r)
		return r;
	if (!m->request_timeout_ms)
		return failure_set(failure, -EINVAL, "job %s: a request timeout of 0", m->name);
	attach = calloc(1, sizeof(*attach) +
				   (m->size + m->n_moves) * sizeof(attach->node_of_rank[0]) +
				   (m->has_joined ? m->joined.len : 0));
	if (!attach)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", m->name);

	(void)snprintf(attach->job, sizeof(attach->job), "%s", m->name);
	if (m->has_secret_digest)
		memcpy(attach->secret_digest, m->secret_digest.data, SECRET_DIGEST_LEN);
	attach->user = m->user;
	attach->size = m->size;
	attach->n_nodes = m->n_nodes;
	attach->node = m->node;
	attach->instance = m->instance;
	attach->request_timeout_ms = MIN(m->request_timeout_ms, TIMEOUT_MAX_MS);
	attach->resume = m->resume;
	attach->elastic = m->elastic;
	attach->lost_timeout_ms = MIN(m->lost_timeout_ms, TIMEOUT_MAX_MS);
	if (m->home) {
		attach->home = true;
		attach->part_bytes = m->home->part_bytes;
		attach->epoch = m->home->epoch;
		attach->min_ranks = m->home->min_ranks;
		attach->max_ranks = MIN(m->home->max_ranks, JOB_RANKS_MAX);
		attach->view_digest = m->home->view_digest;
	}
	r = take_stragglers(m->stragglers, m->name, m->size, m->n_nodes, &attach->stragglers,
			    failure);
	if (!r)
		r = take_added(m, attach, failure);
	if (!r)
		r = check_joined(m, attach, failure);
	if (r)
		return r;
	memcpy(attach->node_of_rank, m->node_of_rank, m->size * sizeof(attach->node_of_rank[0]));
	attach->n_moves = m->n_moves;
	attach->server = m->server;
	attach->asks_back = m->asks_back;
	attach->begins = m->begins;
	attach->sent_part_bytes = MIN(m->part_bytes, PART_BYTES_MAX);
	attach->moves = attach->node_of_rank + m->size;
	if (m->n_moves)
		memcpy(attach->node_of_rank + m->size, m->moves,
		       m->n_moves * sizeof(attach->moves[0]));
	if (attach->regroups) {
		void *joined = attach->node_of_rank + m->size + m->n_moves;

		attach->joined_len = m->joined.len;
		attach->joined = memcpy(joined, m->joined.data, m->joined.len);
	}
	*ret_attach = TAKE_PTR(attach);
	return 0;
}

int declare_decode(const void *data, size_t len, struct declare *ret_declare,
		   struct failure *failure)
{
	_cleanup_(unpack_freep) Bps__Cluster__TensorDeclare *m = NULL;
	uint64_t bytes;
	int r;

	r = unpack(&bps__cluster__tensor_declare__descriptor, data, len, (ProtobufCMessage **)&m);
	if (r)
		return failure_set(failure, r, "not a TensorDeclare: %s", strerror(-r));
	if (!text_is_name(m->name, TENSOR_NAME_MAX))
		return failure_set(
			failure, -EINVAL,
			"a tensor's name is 1 to %d bytes of UTF-8 without control characters",
			TENSOR_NAME_MAX);
	if (!dtype_size(m->dtype))
		return failure_set(failure, -EINVAL, "tensor %s: no element type %u", m->name,
				   m->dtype);
	if (m->elements != ELEMENTS_VARIABLE &&
	    (MUL_OVERFLOW(m->elements, (uint64_t)dtype_size(m->dtype), &bytes) ||
	     bytes > INT64_MAX))
		return failure_set(failure, -EINVAL, "tensor %s: %llu elements are too many",
				   m->name, (unsigned long long)m->elements);

	*ret_declare = (struct declare){
		.dtype = m->dtype,
		.elements = m->elements,
		.rank = m->rank,
		.key = m->key,
		.start = m->start,
		.in_doubt = m->in_doubt && m->key,
	};
	(void)snprintf(ret_declare->name, sizeof(ret_declare->name), "%s", m->name);
	if (m->shape && !text_is_name(m->shape, TENSOR_SHAPE_MAX))
		return failure_set(failure, -EINVAL,
				   "tensor %s: a shape is 1 to %d bytes of printable characters",
				   m->name, TENSOR_SHAPE_MAX);
	if (m->shape)
		(void)snprintf(ret_declare->shape, sizeof(ret_declare->shape), "%s", m->shape);
	if (!m->conflict)
		return 0;
	if (!text_is_name(m->conflict, ERROR_TEXT_MAX))
		return failure_set(failure, -EINVAL, "tensor %s: a conflict without words",
				   m->name);
	(void)snprintf(ret_declare->conflict, sizeof(ret_declare->conflict), "%s", m->conflict);
	return 0;
}

int joined_encode(const struct joined *joined, void **ret_data, size_t *ret_len)
{
	Bps__Cluster__JobJoined m = BPS__CLUSTER__JOB_JOINED__INIT;
	_cleanup_(freep) uint32_t *stripes = calloc(joined->n_stripes, sizeof(*stripes));
	_cleanup_(freep) void *view = NULL;
	size_t view_len = 0;
	int r;

	if (!stripes)
		return error_origin(-ENOMEM);
	r = joined->view ? view_pack(joined->view, DATA_SETUP_MAX / 2, &view, &view_len) : 0;
	if (r)
		return error_trace(r);
	for (size_t i = 0; i < joined->n_stripes; i++)
		stripes[i] = joined->stripes[i];
	m.job = joined->job;
	m.n_node_of_rank = joined->size;
	m.node_of_rank = (uint32_t *)joined->node_of_rank;
	m.part_bytes = joined->part_bytes;
	m.n_stripes = joined->n_stripes;
	m.stripes = stripes;
	m.request_timeout_ms = joined->request_timeout_ms;
	m.n_member_of_node = joined->n_nodes;
	m.member_of_node = (uint32_t *)joined->member_of_node;
	m.has_resume = joined->resume;
	m.resume = joined->resume;
	m.has_membership = joined->membership;
	m.membership = joined->membership;
	m.has_view = m.has_min_ranks = m.has_max_ranks = joined->view != NULL;
	m.view = (ProtobufCBinaryData){ view_len, view };
	m.min_ranks = joined->min_ranks;
	m.max_ranks = joined->max_ranks;
	m.has_regroups = joined->regroups != 0;
	m.regroups = joined->regroups;
	m.n_old_nodes = m.n_joiners = joined->regroups ? joined->n_nodes : 0;
	m.old_nodes = (uint32_t *)joined->old_nodes;
	m.joiners = (uint64_t *)joined->joiners;
	return error_trace(pack(&m.base, DATA_SETUP_MAX, ret_data, ret_len));
}

int attached_encode(bool fresh, void **ret_data, size_t *ret_len)
{
	Bps__Cluster__JobAttached m = BPS__CLUSTER__JOB_ATTACHED__INIT;

	m.fresh = fresh;
	return error_trace(pack(&m.base, DATA_SETUP_MAX, ret_data, ret_len));
}

int declared_encode(uint64_t key, uint64_t start, void **ret_data, size_t *ret_len)
{
	Bps__Cluster__TensorDeclared m = BPS__CLUSTER__TENSOR_DECLARED__INIT;

	m.key = key;
	m.start = start;
	return error_trace(pack(&m.base, DATA_SETUP_MAX, ret_data, ret_len));
}

void notice_decode(const struct data_header *header, const void *payload,
		   struct failure *ret_failure)
{
	size_t len = MIN((size_t)header->len, sizeof(ret_failure->text) - 1);

	/* Linux has no larger errno; strerror() of what comes out of here must make sense. */
	ret_failure->status = header->status > 0 && header->status < 4096 ? -header->status : -EIO;
	if (!len) {
		(void)failure_set(ret_failure, ret_failure->status, "%s",
				  strerror(-ret_failure->status));
		return;
	}
	memcpy(ret_failure->text, payload, len);
	ret_failure->text[len] = 0;
	text_make_plain(ret_failure->text, len);
}

void refuse(struct delivery *delivery, int status, const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	delivery_fail(delivery, status, text);
}
