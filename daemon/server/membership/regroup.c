/*
 * The ranks of an elastic job regroup: bps-recovery(7), ELASTIC JOBS. Each node says which of its ranks do, and how many
 * newcomers wait behind them. When all have, the job's home begins the next run, with its ranks numbered anew: members in their
 * old order, then the newcomers, node by node, those of other nodes (joiner.c) last. Control thread only.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/job/job.h"

static bool takes_part(const struct job_node *node)
{
	return !node->out && !node->departed;
}

/* One whose connection was lost since it asked asks again when it is back. */
static bool all_here(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (takes_part(&job->nodes[i]) &&
		    (!job->nodes[i].joining || job->nodes[i].joining->peer != job->nodes[i].peer))
			return false;
	return true;
}

static int by_number(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static bool regroups(const struct join *join, uint32_t rank)
{
	return bsearch(&rank, join->ranks, join->n_ranks, sizeof(rank), by_number);
}

/* Newcomers of a node that are let in, while there is room. */
static uint32_t let_in(const struct join *join, uint32_t *vacant)
{
	uint32_t n = MIN(join->newcomers, *vacant);

	*vacant -= n;
	return n;
}

/* How many ranks the next run has, and on how many nodes; *ret_room: how many newcomers it may take, most. */
static uint32_t count(const struct job *job, uint32_t *ret_nodes, uint32_t *ret_vacant)
{
	uint32_t max = job->membership.max_ranks ? job->membership.max_ranks : JOB_RANKS_MAX,
		 size = 0, vacant;
	const struct joiner *joiner;

	*ret_nodes = 0;
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (!takes_part(&job->nodes[i]))
			continue;
		size += job->nodes[i].join->n_ranks;
		++*ret_nodes;
	}
	*ret_vacant = vacant = max - MIN(max, size);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (takes_part(&job->nodes[i]))
			size += let_in(job->nodes[i].join, &vacant);
	list_for_each (joiner, &job->membership.joiners, link) {
		if (!vacant)
			break;
		size += let_in(joiner->join, &vacant);
		++*ret_nodes;
	}
	return size;
}

/* Which node each rank of the next run is on, by the nodes' new numbers: joiners come last. */
static void place(const struct job *old, const uint32_t *number, uint32_t next, uint32_t vacant,
		  struct job *job)
{
	const struct joiner *joiner;
	uint32_t rank = 0;

	for (uint32_t i = 0; i < old->size; i++) {
		uint32_t node = old->node_of_rank[i];

		if (takes_part(&old->nodes[node]) && regroups(old->nodes[node].join, i))
			job->node_of_rank[rank++] = number[node];
	}
	for (uint32_t i = 0; i < old->n_nodes; i++)
		for (uint32_t n = takes_part(&old->nodes[i]) ? let_in(old->nodes[i].join, &vacant)
							     : 0;
		     n; n--)
			job->node_of_rank[rank++] = number[i];
	list_for_each (joiner, &old->membership.joiners, link) {
		for (uint32_t n = let_in(joiner->join, &vacant); n; n--)
			job->node_of_rank[rank++] = next;
		next++;
	}
}

/* Guests for whom there is a number are nodes like others; the rest go on waiting. */
static void take_joiners(struct job *old, uint32_t next, struct job *job)
{
	for (; next < job->n_nodes; next++) {
		struct joiner *joiner = list_first(&old->membership.joiners, struct joiner, link);

		job->nodes[next].instance = joiner->join->instance;
		job->nodes[next].join = TAKE_PTR(joiner->join);
		job->nodes[next].joining = TAKE_PTR(joiner->joining);
		joiner_free(joiner);
		job->membership.takes_joiners = true;
	}
	joiner_go_on(job, old);
}

/* All nodes know of the same losses, and so of the same membership; what one is behind, if so, it catches up with here. */
static uint32_t last_membership(const struct job *job)
{
	uint32_t last = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (takes_part(&job->nodes[i]))
			last = MAX(last, job->nodes[i].join->membership);
	return last;
}

/* Who speaks for the nodes of the next run, and what number each node of this one has there; *ret_n: how many these are. */
static int take_peers(const struct job *old, struct job *job, uint32_t *number, uint32_t *ret_n)
{
	const struct joiner *joiner;
	uint32_t next = 0;
	int r = 0;

	for (uint32_t i = 0; !r && i < old->n_nodes; i++) {
		const struct job_node *node = &old->nodes[i];

		if (!takes_part(node))
			continue;
		number[i] = next;
		job->nodes[next].instance = node->join->instance;
		r = job_peer_set(job, next++, node->peer);
	}
	*ret_n = next;
	list_for_each (joiner, &old->membership.joiners, link) {
		if (r || next == job->n_nodes)
			break;
		r = job_peer_set(job, next++, joiner->peer);
	}
	return r;
}

/* The next run; the nodes' joins become its. */
static int next_run(struct job *old, struct job **ret_job, struct failure *failure)
{
	_cleanup_(freep) uint32_t *number = calloc(old->n_nodes, sizeof(number[0]));
	_cleanup_(job_freep) struct job *job = NULL;
	uint32_t n_nodes, vacant, size = count(old, &n_nodes, &vacant), next;
	bool yielded;
	int r;

	if (!number)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", old->owner.name);
	if (size < old->membership.min_ranks)
		return failure_set(failure, -EPIPE,
				   "job %s: %u ranks regroup, fewer than the %u that it needs",
				   old->owner.name, size, old->membership.min_ranks);
	yielded = job_yield(old);
	r = job_new(old->server,
		    &(struct job_params){ old->owner.name, size, n_nodes, old->memory.account },
		    &job, failure);
	if (r) {
		if (yielded)
			job_take_back(old);
		return r;
	}
	job->home = true;
	memcpy(job->owner.secret_digest, old->owner.secret_digest, SECRET_DIGEST_LEN);
	job->owner.user = old->owner.user;
	job->forming.epoch = old->forming.epoch;
	job->forming.view_digest = old->forming.view_digest;
	job->forming.part_bytes = job->forming.asked_part_bytes = old->forming.part_bytes;
	job->request_timeout_ms = old->request_timeout_ms;
	job->forming.timeout_ms = MAX(old->attachment.lost_timeout_ms, UINT64_C(10000));
	job->membership.elastic = true;
	job->membership.min_ranks = old->membership.min_ranks;
	job->membership.max_ranks = old->membership.max_ranks;
	job->membership.regroups = old->number;
	job->membership.first = last_membership(old) + 1;
	r = take_peers(old, job, number, &next);
	if (r) {
		if (yielded)
			job_take_back(old);
		return job_no_memory(old, r, failure);
	}
	place(old, number, next, vacant, job);
	for (uint32_t i = 0; i < old->n_nodes; i++) {
		struct job_node *node = &old->nodes[i];

		if (!takes_part(node))
			continue;
		job->nodes[number[i]].join = TAKE_PTR(node->join);
		job->nodes[number[i]].joining = TAKE_PTR(node->joining);
	}
	take_joiners(old, next, job);
	*ret_job = TAKE_PTR(job);
	return 0;
}

static void regroup(struct job *old)
{
	struct failure failure = { 0 };
	struct job *job = NULL;
	int r;

	r = next_run(old, &job, &failure);
	if (r) {
		job_fail(old, &failure, NULL);
		return;
	}
	log_info("job %s: regroups: %u ranks on %u nodes", job->owner.name, job->size,
		 job->n_nodes);
	FAILPOINT("server-regroups");
	/* Where its ranks hear nothing of it: they have asked for that. */
	(void)failure_set(&failure, -ECANCELED, "job %s: its ranks have regrouped",
			  old->owner.name);
	job_end(old, &failure);
	if (form_finish(job, &failure))
		job_fail(job, &failure, NULL);
}

void regroup_join(struct server *server, struct join *given, struct delivery *delivery)
{
	_cleanup_(join_freep) struct join *join = given;
	struct job *job = job_find(server, join->regroups),
		   *successor = successor_of(server, join->regroups);
	const struct failure *over = job_over(server, join->regroups);
	struct failure failure = { 0 };
	struct job_node *node;

	if (successor) {
		successor_tell(successor, join, delivery);
		return;
	}
	if (!job) {
		delivery_fail(delivery, over ? over->status : -ESHUTDOWN,
			      over ? over->text : "this server has no such job");
		return;
	}
	if (!job->home || !job->membership.elastic || !move_is_current(job, &delivery->header)) {
		refuse(delivery, -ESHUTDOWN, "job %s: this is not its home, or knows other ranks",
		       job->owner.name);
		return;
	}
	if (attach_check(job, delivery->peer, join->node, &failure)) {
		delivery_fail(delivery, failure.status, failure.text);
		return;
	}
	if (join->epoch != job->forming.epoch || join->view_digest != job->forming.view_digest) {
		refuse(delivery, -EINVAL, "job %s: node %u regroups in another view",
		       job->owner.name, join->node);
		return;
	}
	for (uint32_t i = 0; i < join->n_ranks; i++) {
		uint32_t rank = join->ranks[i];

		if (rank < job->size && job->node_of_rank[rank] == join->node)
			continue;
		refuse(delivery, -EPROTO, "job %s: rank %u is none of node %u", job->owner.name,
		       rank, join->node);
		return;
	}
	node = &job->nodes[join->node];
	if (node->joining)
		delivery_fail(node->joining, -EALREADY, "a newer join of the same node has come");
	(void)join_free(node->join);
	node->join = TAKE_PTR(join);
	node->joining = delivery;
	if (all_here(job)) {
		regroup(job);
		return;
	}
	if (job->membership.regroup_by_ns != CLOCK_NEVER)
		return;
	job->membership.regroup_by_ns = clock_now_ns() + job_patience_ns(job);
	/* Without memory it is looked at with the next of its deadlines. */
	(void)job_wake_by(job, job->membership.regroup_by_ns);
}

/* Those who have not come are missed as in any round. */
void regroup_expired(struct job *job)
{
	job->membership.regroup_by_ns = CLOCK_NEVER;
	(void)elastic_without_late(job);
}
