/*
 * Asynchronous sums, part by part: contributions are added one sum at a time and answered with
 * that sum. round.c brings contributions, keep.c what nodes offer, job.c deadlines and the job's
 * end.
 */
#include "server/round/accumulate.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "server/job/store.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/round.h"
#include <stdio.h>

/* Nodes that are told in one go that their time is over. */
#define EXPIRE_MAX 256

/*
 * A node at a part. It has one contribution under way at most: its rounds of a tensor go one after
 * the other.
 */
struct accumulator_node {
	uint64_t round;		   /* the newest that is in the sum */
	struct delivery *delivery; /* under way, or NULL */
	bool summing, added;	   /* it is being added; it was */
	struct delivery *again;	   /* the same, come again while it is being added */
	uint64_t since_ns;	   /* when it came */
	uint64_t charged;
	struct failure *gone; /* while it is being added: it was given up */
};

/* What nodes have given up of a tensor of many parts, to which the sweep takes it. */
struct given_up {
	struct failure failure; /* the last one's words */
	uint64_t rounds[];	/* by node: all up to this one */
};

struct accumulator {
	struct list link; /* job->accumulators */
	struct job *job;
	struct tensor *tensor;	   /* NULL once the job is over */
	struct data_header header; /* the first contribution's: which part it is */
	struct block *sum;	   /* NULL: nothing came yet */
	uint32_t n_contributions;  /* that are in it */
	bool busy;		   /* the next sum is being made: */
	struct block *next;
	void *output;
	struct task task;
	struct reduce_params reduce;
	const void **inputs; /* the sum, and one of each node */
	struct accumulator_node nodes[];
};

static uint64_t timeout_ns(const struct job *job)
{
	return job->request_timeout_ms * NSEC_PER_MSEC;
}

static size_t accumulator_len(const struct job *job)
{
	return sizeof(struct accumulator) + job->n_nodes * sizeof(struct accumulator_node) +
	       (job->n_nodes + 1) * sizeof(void *);
}

/* The job is over. Its memory goes with the job. */
static void accumulator_end(struct accumulator *a)
{
	quota_release(a->job->memory.quota, accumulator_len(a->job));
	sweep_leave(a->job, &a->link);
	list_remove(&a->link);
	a->sum = block_unref(a->sum);
	a->next = block_unref(a->next);
}

static int accumulator_get(struct tensor *tensor, const struct data_header *header,
			   struct accumulator **ret_accumulator)
{
	struct job *job = tensor->job;
	struct accumulator *a;
	struct part *part;
	int r;

	r = part_get(tensor, header, &part);
	if (r)
		return r;
	if (!part->accumulator) {
		if (store_charge(job, accumulator_len(job)))
			return QUOTA_E_FULL;
		a = bulk_take(&job->store.bulk, accumulator_len(job));
		if (!a) {
			r = -errno;
			quota_release(job->memory.quota, accumulator_len(job));
			return error_origin(r);
		}
		a->job = job;
		a->tensor = tensor;
		a->header = *header;
		a->inputs = (const void **)&a->nodes[job->n_nodes];
		list_push_back(&job->store.accumulators, &a->link);
		part->accumulator = a;
	}
	*ret_accumulator = part->accumulator;
	return 0;
}

/* Takes a node's contribution out, to be answered. */
static struct delivery *take(struct accumulator *a, uint32_t node)
{
	struct accumulator_node *n = &a->nodes[node];

	quota_release(a->job->memory.quota, n->charged);
	n->charged = 0;
	n->added = n->summing = false;
	n->gone = held_free(n->gone);
	return TAKE_PTR(n->delivery);
}

static void fail(struct accumulator *a, uint32_t node, int status, const char *text)
{
	struct delivery *again = TAKE_PTR(a->nodes[node].again);

	if (again)
		delivery_fail(again, status, text);
	delivery_fail(take(a, node), status, text);
}

/* The round of the slowest node, of those that have not left; *ret_node: which. */
static uint64_t slowest(const struct accumulator *a, uint32_t *ret_node)
{
	uint64_t round = UINT64_MAX;

	*ret_node = NODE_NONE;
	for (uint32_t i = 0; i < a->job->n_nodes; i++) {
		if (a->job->nodes[i].departed || a->nodes[i].round >= round)
			continue;
		round = a->nodes[i].round;
		*ret_node = i;
	}
	return round;
}

/* The round that all must have come to before this node is answered. */
static uint64_t needed(const struct accumulator *a, uint32_t node)
{
	const struct data_header *h = &a->nodes[node].delivery->header;
	uint32_t staleness = a->job->stragglers.staleness;

	if (h->waits_for_all)
		return h->round;
	return staleness && h->round > staleness ? h->round - staleness : 0;
}

/* Nobody but its node is to keep it. Returns false, or has refused the delivery. */
static bool number(struct accumulator *a, struct delivery *delivery, struct data_header *header)
{
	struct job *job = a->job;
	uint32_t sent = 0;

	/* What goes to a node that was lost meanwhile goes nowhere. */
	if (!job->retention.resume || delivery->peer != job->nodes[header->node].peer ||
	    !keep_number(job, NULL, &sent, header))
		return false;
	refuse(delivery, -ENOMEM, "job %s: out of memory", job->owner.name);
	return true;
}

static void answer(struct accumulator *a)
{
	uint32_t slow;
	uint64_t all = slowest(a, &slow);

	for (uint32_t i = 0; i < a->job->n_nodes; i++) {
		struct data_header header;
		struct delivery *delivery;

		if (!a->nodes[i].added || needed(a, i) > all)
			continue;
		delivery = take(a, i);
		header = delivery->header;
		header.op = DATA_RESULT;
		header.flags = 0;
		header.len = offered_result_len(a->job, &a->header);
		header.status = header.priority = 0;
		header.n_contributions = a->n_contributions;
		if (number(a, delivery, &header))
			continue;
		delivery_answer(delivery, &header, header.len ? a->sum : NULL, NULL);
	}
}

static void add(struct accumulator *a);

/* The sum says who is in it. */
static void call_contributors(struct accumulator *a)
{
	struct job *job = a->job;
	struct data_contributors *contributors;

	if (!offered_has_contributors(job, &a->header))
		return;
	contributors = data_contributors_of(a->sum->data, a->header.part_len);
	contributors->n = a->n_contributions;
	contributors->round = 0;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		contributors->nodes[i] = a->nodes[i].round;
	data_contributors_swap(contributors, job->n_nodes);
}

/* In the place of one that came before the node, or a connection of it, was lost. */
static void replace(struct accumulator *a, uint32_t node, struct delivery *delivery)
{
	struct delivery *old = a->nodes[node].delivery;

	a->nodes[node].delivery = delivery;
	delivery_fail(old, -ENETRESET, "it has come again");
}

/* The sum is there, unless the job has ended meanwhile. */
static void added(struct accumulator *a)
{
	struct job *job = a->job;

	a->busy = false;
	if (job->state == JOB_OVER) {
		for (uint32_t i = 0; i < job->n_nodes; i++)
			if (a->nodes[i].delivery)
				fail(a, i, job->failure.status, job->failure.text);
		accumulator_end(a);
		job_release(job);
		return;
	}
	(void)block_unref(a->sum);
	a->sum = TAKE_PTR(a->next);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct accumulator_node *node = &a->nodes[i];

		if (!node->summing)
			continue;
		node->summing = false;
		node->added = true;
		node->round = node->delivery->header.round;
		a->n_contributions++;
		if (node->gone) {
			struct failure gone = *node->gone; /* which goes with what it is about */

			fail(a, i, gone.status, gone.text);
		} else if (node->again) {
			replace(a, i, TAKE_PTR(node->again));
		}
	}
	call_contributors(a);
	job->n_rounds++;
	job->n_bytes += a->header.part_len;
	metric_count(&job->server->rounds, 1);
	FAILPOINT("server-accumulated");
	answer(a);
	add(a);
}

static void on_run(struct task *task)
{
	struct accumulator *a = container_of(task, struct accumulator, task);

	task->again = reduce_slice(&a->reduce, data_elements(&a->header));
}

static void on_done(struct task *task)
{
	struct accumulator *a = container_of(task, struct accumulator, task);

	a->job->store.n_summing--;
	added(a);
}

static int prepare(struct accumulator *a, size_t *ret_n)
{
	struct job *job = a->job;
	size_t n = 0, n_new = 0;
	int r;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		n_new += a->nodes[i].delivery && !a->nodes[i].added;
	*ret_n = n_new;
	if (!n_new || !offered_result_len(job, &a->header))
		goto mark;
	r = store_block_new(job, offered_result_len(job, &a->header), &a->next);
	if (r)
		return r;
	if (!a->header.part_len)
		goto mark;
	if (a->sum)
		a->inputs[n++] = a->sum->data;
	a->task.away = false;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (a->nodes[i].delivery && !a->nodes[i].added) {
			a->inputs[n++] = a->nodes[i].delivery->payload;
			a->task.away |= a->nodes[i].delivery->stalls;
		}
	a->output = a->next->data;
	a->reduce = (struct reduce_params){
		.dtype = a->header.dtype,
		.reduction = REDUCTION_SUM,
		.inputs = a->inputs,
		.n_inputs = n,
		.outputs = &a->output,
		.n_outputs = 1,
	};
	metric_count(&job->server->bytes_summed, (uint64_t)a->header.part_len * n_new);
mark:
	for (uint32_t i = 0; i < job->n_nodes; i++)
		a->nodes[i].summing = a->nodes[i].delivery && !a->nodes[i].added;
	return 0;
}

/* What has come may be in a sum that was offered since. */
static void note_known(struct accumulator *a)
{
	for (uint32_t i = 0; i < a->job->n_nodes; i++) {
		struct accumulator_node *node = &a->nodes[i];

		if (node->delivery && node->delivery->header.round <= node->round)
			node->added = true;
	}
}

/* Adds what has come. */
static void add(struct accumulator *a)
{
	struct job *job = a->job;
	size_t n;
	int r;

	if (a->busy || !offered_is_complete(job))
		return;
	note_known(a);
	r = prepare(a, &n);
	if (r) {
		struct failure failure;

		(void)job_not_made(job, "a sum", r, &failure);
		job_fail(job, &failure, NULL);
		return;
	}
	if (!n)
		return;
	a->busy = true;
	a->task.run = on_run;
	a->task.done = on_done;
	if (!a->header.part_len) {
		added(a);
		return;
	}
	a->task.cost = reduce_slice_bytes(&a->reduce, data_elements(&a->header));
	job->store.n_summing++;
	if (job_post(job, &a->task))
		return;
	job->store.n_summing--;
	task_run(&a->task);
	added(a);
}

/*
 * Of a node that was lost, or a connection of it: it may be in the sum, or have come, and the
 * answer be lost.
 */
static bool may_repeat(const struct accumulator *a, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	const struct accumulator_node *node = &a->nodes[h->node];

	if (!a->job->retention.resume || h->dtype != a->header.dtype ||
	    h->part_len != a->header.part_len)
		return false;
	if (!node->delivery)
		return h->round == node->round;
	return node->delivery->header.round == h->round &&
	       (h->flags & DATA_FLAG_AGAIN || node->delivery->peer != delivery->peer);
}

static void repeat(struct accumulator *a, struct delivery *delivery)
{
	uint32_t i = delivery->header.node;
	struct accumulator_node *node = &a->nodes[i];
	struct delivery *again = TAKE_PTR(node->again);

	if (again)
		delivery_fail(again, -ENETRESET, "it has come again");
	if (!node->delivery) {
		node->delivery = delivery;
		node->added = true;
		node->since_ns = clock_now_ns();
	} else if (node->summing) {
		node->again = delivery;
		return;
	} else {
		replace(a, i, delivery);
	}
	if (offered_is_complete(a->job) && node->added)
		answer(a);
}

static bool fits(const struct accumulator *a, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	const struct accumulator_node *node = &a->nodes[h->node];
	bool again = node->delivery || h->round <= node->round;

	if (!again && h->dtype == a->header.dtype && h->part_len == a->header.part_len &&
	    h->offset == a->header.offset && h->total == a->header.total)
		return true;
	if (again)
		metric_count(&a->job->server->late, 1);
	refuse(delivery, again ? -EALREADY : -EINVAL,
	       "job %s: tensor number %llu, round %llu, part %u of node %u: %s", a->job->owner.name,
	       (unsigned long long)h->key, (unsigned long long)h->round, h->part, h->node,
	       again ? "this contribution was here already"
		     : "what is accumulated has another type or size");
	return false;
}

void accumulate_contribute(struct tensor *tensor, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	uint64_t len = delivery_bytes(delivery);
	struct job *job = tensor->job;
	struct accumulator *a = NULL;
	uint64_t now_ns;
	int r;

	if (!job->stragglers.async) {
		refuse(delivery, -EINVAL, "job %s: accumulate in a job without async",
		       job->owner.name);
		return;
	}
	now_ns = clock_now_ns();
	r = accumulator_get(tensor, h, &a);
	if (!r)
		r = job_wake_by(job, now_ns + timeout_ns(job));
	if (!r && may_repeat(a, delivery)) {
		repeat(a, delivery);
		return;
	}
	if (!r)
		r = store_charge(job, len);
	if (r == QUOTA_E_FULL) {
		round_over_quota(job, delivery);
		return;
	}
	if (r) {
		refuse(delivery, r, "job %s: %s", job->owner.name, strerror(-r));
		return;
	}
	if (!fits(a, delivery)) {
		quota_release(job->memory.quota, len);
		return;
	}
	a->nodes[h->node].delivery = delivery;
	a->nodes[h->node].charged = len;
	a->nodes[h->node].since_ns = now_ns;
	add(a);
}

/* -- What nodes bring -------------------------------------------------------------------------- */

/* Whether the offered sum has what ours has, and more: they follow one another. */
static bool is_newer(const struct accumulator *a, const struct data_contributors *contributors)
{
	bool more = !a->sum;

	for (uint32_t i = 0; i < a->job->n_nodes; i++)
		more |= le64toh(contributors->nodes[i]) > a->nodes[i].round;
	return more;
}

int accumulate_offer(struct tensor *tensor, const struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	const struct data_contributors *contributors =
		data_contributors_of(delivery->payload, h->part_len);
	struct job *job = tensor->job;
	struct accumulator *a = NULL;
	struct block *sum;
	int r;

	r = accumulator_get(tensor, h, &a);
	if (r)
		return r;
	if (h->part_len != a->header.part_len || h->dtype != a->header.dtype)
		return error_origin(-EPROTO);
	if (!is_newer(a, contributors))
		return 0;
	r = store_block_new(job, h->len, &sum);
	if (r)
		return r;
	metric_copy(&job->server->copied, sum->data, delivery->payload, h->len);
	(void)block_unref(a->sum);
	a->sum = sum;
	a->n_contributions = (uint32_t)le64toh(contributors->n);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		a->nodes[i].round = le64toh(contributors->nodes[i]);
	return 0;
}

static void go_on(struct accumulator *a)
{
	note_known(a);
	answer(a);
	add(a);
}

/* Without memory for the words it waits for its deadline. */
static void give_up(struct accumulator *a, uint32_t node, const struct failure *failure)
{
	struct accumulator_node *n = &a->nodes[node];

	if (!n->summing) {
		fail(a, node, failure->status, failure->text);
		return;
	}
	n->gone = n->gone ?: held_new(job_memory(a->job), sizeof(*n->gone));
	if (n->gone)
		*n->gone = *failure;
}

/* Without memory each part waits for its deadline. */
static void give_up_later(struct tensor *tensor, uint32_t node, uint64_t round,
			  const struct failure *failure)
{
	struct job *job = tensor->job;
	struct given_up *given_up = tensor->given_up =
		tensor->given_up
			?: held_new(job_memory(job),
				    sizeof(*given_up) + job->n_nodes * sizeof(given_up->rounds[0]));

	if (!given_up || round <= given_up->rounds[node])
		return;
	given_up->failure = *failure;
	given_up->rounds[node] = round;
	sweep_later(job, SWEEP_NEWS);
}

static void give_up_all(struct accumulator *a, const struct given_up *given_up)
{
	for (uint32_t i = 0; i < a->job->n_nodes; i++) {
		const struct delivery *delivery = a->nodes[i].delivery;

		if (delivery && delivery->header.round <= given_up->rounds[i])
			give_up(a, i, &given_up->failure);
	}
}

void accumulate_give_up(struct job *job, uint32_t node, uint64_t key, uint64_t round,
			const struct failure *failure)
{
	struct tensor *tensor = tensor_of(job, key);
	struct map_entry *entry;

	if (!tensor)
		return;
	if (tensor->parts.n_entries > STORE_MANY) {
		give_up_later(tensor, node, round, failure);
		return;
	}
	map_for_each (entry, &tensor->parts) {
		struct accumulator *a = container_of(entry, struct part, entry)->accumulator;
		const struct delivery *delivery = a ? a->nodes[node].delivery : NULL;

		if (delivery && delivery->header.round == round)
			give_up(a, node, failure);
	}
}

/* Whom those that have waited for too long waited for: looked for once for all of them. */
struct awaited {
	bool is_known;
	uint64_t round;
	struct node_text text;
};

static const struct awaited *find_awaited(const struct accumulator *a, struct awaited *awaited)
{
	uint32_t slow;

	if (awaited->is_known)
		return awaited;
	awaited->round = slowest(a, &slow);
	(void)job_node_text(a->job, slow, &awaited->text);
	awaited->is_known = true;
	return awaited;
}

static void expire(struct accumulator *a, uint32_t node, const struct awaited *awaited)
{
	const struct data_header *h = &a->nodes[node].delivery->header;
	const char *name = declare_name_of(a->job, h->key);
	struct seconds_text seconds;
	struct failure failure;

	(void)failure_set(
		&failure, -ETIMEDOUT,
		"job %s: tensor %.100s, round %llu: %s came to round %llu only, and not to "
		"round %llu within %s s",
		a->job->owner.name, name ? name : "of another home", (unsigned long long)h->round,
		awaited->text.text, (unsigned long long)awaited->round,
		(unsigned long long)needed(a, node),
		job_seconds_text(a->job->request_timeout_ms, &seconds));
	fail(a, node, failure.status, failure.text);
}

/* Answers whom it can; fails those who have waited for too long, of many the rest with the next sweep. */
void accumulate_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct accumulator *a = container_of(link, struct accumulator, link);
	struct awaited awaited = { 0 };
	unsigned n = 0;

	if (a->tensor->given_up)
		give_up_all(a, a->tensor->given_up);
	if (offered_is_complete(job))
		go_on(a);
	if (job->state != JOB_RUNNING)
		return;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		uint64_t deadline_ns = a->nodes[i].since_ns + timeout_ns(job);

		if (!a->nodes[i].added)
			continue;
		if (deadline_ns <= now_ns && n++ < EXPIRE_MAX)
			expire(a, i, find_awaited(a, &awaited));
		else
			sweep_until(job, deadline_ns);
	}
}

void accumulate_end(struct job *job, struct list *link)
{
	struct accumulator *a = container_of(link, struct accumulator, link);

	a->tensor = NULL;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (a->nodes[i].delivery && !a->nodes[i].summing)
			fail(a, i, job->failure.status, job->failure.text);
	if (!a->busy)
		accumulator_end(a);
}

void accumulate_free(struct job *job)
{
	struct accumulator *a, *tmp;

	list_for_each_safe (a, tmp, &job->store.accumulators, link) {
		for (uint32_t i = 0; i < job->n_nodes; i++)
			if (a->nodes[i].delivery)
				fail(a, i, job->failure.status, job->failure.text);
		accumulator_end(a);
	}
}
