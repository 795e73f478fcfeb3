/*
 * DECLARE, at the home of a job: what the nodes say of a tensor is compared, and with the last
 * node's word the tensor has its key and its place. server.c brings declarations, job.c
 * deadlines, leave.c nodes that have left.
 */
#include "server/job/forget.h"

#include "base/clock.h"
#include <stdio.h>

/*
 * Tensors start on these boundaries of the job's virtual space: aligned, yet small ones still share
 * a stripe.
 */
#define START_ALIGN 64

struct said {
	bool said;
	struct delivery *waiting;
};

/* What a declaration needs until every node has made it. */
struct declaring {
	struct list link; /* in job->declaring, oldest first */
	struct declared *declared;
	uint64_t since_ns;
	uint32_t n_said;
	struct failure failure; /* it failed; kept until every node knows */
	struct said nodes[];
};

static struct declared *declared_free(struct declared *declared)
{
	if (!declared)
		return NULL;
	(void)held_free(declared->declaring);
	(void)held_free(declared->name);
	(void)held_free(declared);
	return NULL;
}
DEFINE_CLEANUP(struct declared *, declared_free)

static struct declared *declared_find(const struct job *job, const char *name)
{
	struct map_entry *entry = map_find(&job->names.declared, map_hash_string(name));

	for (; entry; entry = map_find_next(entry)) {
		struct declared *declared = container_of(entry, struct declared, entry);

		if (!strcmp(declared->name, name))
			return declared;
	}
	return NULL;
}

/* It is not under way any more. */
static void declaring_remove(struct job *job, struct declaring *declaring)
{
	sweep_leave(job, &declaring->link);
	list_remove(&declaring->link);
}

void declared_remove(struct job *job, struct declared *declared)
{
	map_remove(&job->names.declared, &declared->entry);
	if (declared->is_named)
		map_remove(&job->names.named, &declared->named);
	if (declared->declaring)
		declaring_remove(job, declared->declaring);
	sweep_leave(job, &declared->link);
	list_remove(&declared->link);
	job->names.n_declared--;
	(void)declared_free(declared);
}

static uint64_t timeout_ns(const struct job *job)
{
	return job->membership.elastic ? job_patience_ns(job)
				       : job->request_timeout_ms * NSEC_PER_MSEC;
}

static int declared_new(struct job *job, const struct declare *declare,
			struct declared **ret_declared)
{
	struct quota *quota = job_memory(job);
	_cleanup_(declared_freep) struct declared *declared = held_new(quota, sizeof(*declared));
	size_t len = strlen(declare->name) + 1;
	struct declaring *declaring;
	uint64_t now = clock_now_ns();
	int r;

	if (declared)
		declared->name = held_new(quota, len);
	if (!declared || !declared->name)
		return error_origin(-errno);
	declaring =
		held_new(quota, sizeof(*declaring) + job->n_nodes * sizeof(declaring->nodes[0]));
	if (!declaring)
		return error_origin(-errno);
	declared->declaring = declaring;
	memcpy(declared->name, declare->name, len);

	declared->dtype = declare->dtype;
	declared->elements = declare->elements;
	declared->rank = declare->rank;
	declaring->declared = declared;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		declaring->nodes[i].said = job->nodes[i].out;
	declaring->n_said = job->membership.n_out;
	declaring->since_ns = now;
	r = job_wake_by(job, now + timeout_ns(job));
	if (!r)
		r = map_add(&job->names.declared, map_hash_string(declared->name),
			    &declared->entry);
	if (r)
		return error_trace(r);
	list_push_back(&job->names.declaring, &declaring->link);
	list_push_back(&job->names.declarations, &declared->link);
	job->names.n_declared++;
	*ret_declared = TAKE_PTR(declared);
	return 0;
}

static const char *elements_text(uint64_t elements, const char *shape, char *buffer, size_t len)
{
	if (*shape)
		return shape;
	if (elements == ELEMENTS_VARIABLE)
		(void)snprintf(buffer, len, "variable");
	else
		(void)snprintf(buffer, len, "%llu", (unsigned long long)elements);
	return buffer;
}

static bool is_alike(const struct declared *declared, const struct declare *declare)
{
	return declared->dtype == declare->dtype && declared->elements == declare->elements &&
	       (!*declared->shape || !*declare->shape || !strcmp(declared->shape, declare->shape));
}

static int compare(const struct job *job, const struct declared *declared,
		   const struct declare *declare, struct failure *failure)
{
	char a[24], b[24];

	if (*declare->conflict)
		return failure_set(failure, -EINVAL, "job %s: %s", job->owner.name,
				   declare->conflict);
	if (is_alike(declared, declare))
		return 0;
	return failure_set(failure, -EINVAL,
			   "job %s: tensor %s: rank %u declares %s elements of %s, rank %u "
			   "declares %s of %s",
			   job->owner.name, declare->name, declare->rank,
			   elements_text(declare->elements, declare->shape, a, sizeof(a)),
			   dtype_name(declare->dtype), declared->rank,
			   elements_text(declared->elements, declared->shape, b, sizeof(b)),
			   dtype_name(declared->dtype));
}

static void answer_waiting(struct job *job, struct declaring *declaring,
			   const struct failure *failure)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *waiting = TAKE_PTR(declaring->nodes[i].waiting);

		if (waiting)
			delivery_fail(waiting, failure->status, failure->text);
	}
}

/*
 * The failure stays for those who come later; once every node knows it, the tensor may be declared
 * again.
 */
static void declare_fail(struct job *job, struct declared *declared, const struct failure *failure)
{
	struct declaring *declaring = declared->declaring;

	declaring->failure = *failure;
	declaring_remove(job, declaring);
	answer_waiting(job, declaring, failure);
	if (declaring->n_said == job->n_nodes)
		declared_remove(job, declared);
}

/* Without memory for it, it is looked for among all. */
static void name_key(struct job *job, struct declared *declared)
{
	declared->is_named = !map_add(&job->names.named, declared->key, &declared->named);
	job->names.some_unnamed |= !declared->is_named;
}

void declare_answer(const struct declared *declared, struct delivery *delivery)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = delivery->header.job,
		.epoch = delivery->header.epoch,
		.node = delivery->header.node,
		.key = declared->key,
	};
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;
	int r;

	r = declared_encode(declared->key, declared->start, &data, &len);
	if (r) {
		refuse(delivery, r, "tensor %s: %s", declared->name, strerror(-r));
		return;
	}
	header.len = (uint32_t)len;
	delivery_answer(delivery, &header, NULL, data);
}

/* A tensor whose size is not known is counted as one stripe. */
static uint64_t bytes_of(const struct job *job, const struct declared *declared)
{
	if (declared->elements == ELEMENTS_VARIABLE)
		return job->forming.part_bytes;
	return align_up(declared->elements * dtype_size(declared->dtype), START_ALIGN);
}

static void declare_complete(struct job *job, struct declared *declared)
{
	struct declaring *declaring = TAKE_PTR(declared->declaring);

	declaring_remove(job, declaring);
	declared->key = job->names.next_key++;
	declared->start = job->names.next_start;
	name_key(job, declared);
	/* Wraps round after 2^64 bytes: positions only choose servers. */
	job->names.next_start += bytes_of(job, declared);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (declaring->nodes[i].waiting)
			declare_answer(declared, declaring->nodes[i].waiting);
	(void)held_free(declaring);
}

/* It was agreed on before this process began. */
static void declare_again(struct job *job, struct declared *declared, const struct declare *declare)
{
	struct declaring *declaring = TAKE_PTR(declared->declaring);

	declaring_remove(job, declaring);
	declared->key = declare->key;
	declared->start = declare->start;
	name_key(job, declared);
	job->names.next_key = MAX(job->names.next_key, declare->key + 1);
	job->names.next_start =
		MAX(job->names.next_start, declare->start + bytes_of(job, declared));
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *waiting = TAKE_PTR(declaring->nodes[i].waiting);

		if (waiting)
			declare_answer(declared, waiting);
	}
	(void)held_free(declaring);
}

/* Whether ranks that this tensor still needs have left the job; then failure says so. */
static bool lacks_departed(const struct job *job, const struct declared *declared,
			   struct failure *failure)
{
	struct ranks_text ranks;
	const char *text;

	ranks_init(&ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		uint32_t node = job->node_of_rank[i];

		if (job->nodes[node].departed && !declared->declaring->nodes[node].said)
			ranks_add(&ranks, i);
	}
	if (!ranks.n)
		return false;
	text = ranks_end(&ranks);
	(void)failure_set(failure, -EPIPE, "job %s: tensor %s: %s %s left the job", job->owner.name,
			  declared->name, text, ranks_have(&ranks));
	return true;
}

/* What the first node says of a shape is the tensor's. */
static void take_shape(struct declared *declared, const struct declare *declare)
{
	if (*declared->shape || !*declare->shape)
		return;
	(void)snprintf(declared->shape, sizeof(declared->shape), "%s", declare->shape);
	declared->rank = declare->rank;
}

/* A node's word on a tensor that not all have spoken about. */
static void declare_add(struct job *job, struct declared *declared, const struct declare *declare,
			struct delivery *delivery)
{
	struct declaring *declaring = declared->declaring;
	struct said *said = &declaring->nodes[delivery->header.node];
	struct failure failure = declaring->failure;

	/* It may have been said by a daemon that was lost. */
	if (said->waiting && said->waiting->peer != delivery->peer)
		delivery_fail(TAKE_PTR(said->waiting), -ECONNRESET, "the node has attached again");
	if (said->waiting) {
		refuse(delivery, -EALREADY, "job %s: tensor %s: this node has declared it already",
		       job->owner.name, declared->name);
		return;
	}
	declaring->n_said += !said->said;
	said->said = true;
	said->waiting = delivery;
	if (!failure.status)
		(void)compare(job, declared, declare, &failure);
	if (!failure.status)
		take_shape(declared, declare);
	if (!failure.status && lacks_departed(job, declared, &failure) &&
	    job->server->hooks->without_departed(job))
		failure.status = 0;
	if (failure.status)
		declare_fail(job, declared, &failure);
	else if (declaring->n_said == job->n_nodes)
		declare_complete(job, declared);
}

static int declare_check_count(const struct job *job, struct failure *failure)
{
	if (job->names.n_declared < job->server->params.max_tensors)
		return 0;
	return failure_set(failure, -EDQUOT, "job %s: it has %zu tensors already, its max_tensors",
			   job->owner.name, job->names.n_declared);
}

void declare_call(struct job *job, struct delivery *delivery)
{
	struct failure failure = { 0 };
	struct declared *declared;
	struct declare declare;
	int r;

	if (!job->home) {
		refuse(delivery, -EPROTO, "job %s: this is not its home", job->owner.name);
		return;
	}
	r = declare_decode(delivery->payload, delivery->header.len, &declare, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	if (declare.in_doubt) {
		forget_ask(job, &declare, delivery);
		return;
	}
	declared = declared_find(job, declare.name);
	if (!declared) {
		r = declare_check_count(job, &failure);
		if (!r) {
			r = declared_new(job, &declare, &declared);
			if (r)
				(void)job_no_memory(job, r, &failure);
		}
		if (r) {
			delivery_fail(delivery, r, failure.text);
			return;
		}
	}
	if (declared->declaring && declare.key && job->placement.fresh &&
	    !declared->declaring->failure.status && !compare(job, declared, &declare, &failure))
		declare_again(job, declared, &declare);
	if (declared->declaring)
		declare_add(job, declared, &declare, delivery);
	else if (compare(job, declared, &declare, &failure))
		delivery_fail(delivery, failure.status, failure.text);
	else
		declare_answer(declared, delivery);
}

static void expire(struct job *job, const struct declaring *declaring)
{
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct ranks_text missing;
	const char *text;

	ranks_init(&missing);
	for (uint32_t i = 0; i < job->size; i++) {
		if (!declaring->nodes[job->node_of_rank[i]].said)
			ranks_add(&missing, i);
	}
	text = ranks_end(&missing);
	(void)failure_set(&failure, -ETIMEDOUT,
			  "job %s: tensor %s: %s %s not declared it within %s s", job->owner.name,
			  declaring->declared->name, text, ranks_have(&missing),
			  job_seconds_text(job->request_timeout_ms, &seconds));
	declare_fail(job, declaring->declared, &failure);
}

void declare_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct declaring *declaring = container_of(link, struct declaring, link);
	uint64_t deadline_ns = declaring->since_ns + timeout_ns(job);
	struct failure failure;

	if (job->n_departed && !job->sweep.asked &&
	    lacks_departed(job, declaring->declared, &failure)) {
		job->sweep.asked = job->server->hooks->without_departed(job);
		if (!job->sweep.asked) {
			declare_fail(job, declaring->declared, &failure);
			return;
		}
	}
	if (deadline_ns <= now_ns)
		expire(job, declaring);
	else
		sweep_until(job, deadline_ns);
}

void declare_end(struct job *job, struct list *link)
{
	answer_waiting(job, container_of(link, struct declaring, link), &job->failure);
	list_remove(link);
}

void declaration_end(struct job *job, struct list *link)
{
	struct declared *declared = container_of(link, struct declared, link);

	/* It has failed, and not all nodes know. */
	if (declared->declaring)
		answer_waiting(job, declared->declaring, &job->failure);
	map_remove(&job->names.declared, &declared->entry);
	if (declared->is_named)
		map_remove(&job->names.named, &declared->named);
	list_remove(link);
	(void)declared_free(declared);
}

struct declared *declared_of(const struct job *job, uint64_t key)
{
	struct map_entry *entry = map_find(&job->names.named, key);
	struct declared *declared;

	if (entry)
		return container_of(entry, struct declared, named);
	if (!job->names.some_unnamed)
		return NULL;
	list_for_each (declared, &job->names.declarations, link)
		if (declared->key == key)
			return declared;
	return NULL;
}

const char *declare_name_of(const struct job *job, uint64_t key)
{
	const struct declared *declared = declared_of(job, key);

	return declared ? declared->name : NULL;
}
