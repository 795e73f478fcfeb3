/*
 * JOIN, at the home of a job: what the nodes say is compared, missing ranks are named, and with
 * the last node the job has its number, part size and placement. server.c brings JOINs, job.c what
 * is lost, and deadlines; regroup.c has the next run formed here.
 */
#include "server/job/job.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/source.h"
#include "cluster/cluster.h"
#include <stdio.h>
#include <sys/random.h>

/* "rank 2 (node 1)": the first rank of a join that speaks for it. */
struct speaker {
	char text[48];
};

static const char *speaker(const struct join *join, struct speaker *ret_speaker)
{
	if (join->n_ranks)
		(void)snprintf(ret_speaker->text, sizeof(ret_speaker->text), "rank %u (node %u)",
			       join->ranks[0], join->node);
	else
		(void)snprintf(ret_speaker->text, sizeof(ret_speaker->text), "node %u", join->node);
	return ret_speaker->text;
}

static struct job *form_find(struct server *server, const struct join *join)
{
	struct job *job, *next;

	list_for_each_safe (job, next, &server->jobs, link) {
		if (job->home && job->state != JOB_OVER &&
		    job_is(job, join->job, join->secret_digest) && job_heard(job))
			return job;
	}
	return NULL;
}

/*
 * Of one whose ranks have not come: the same user has a job of that name with another secret, which
 * is mistyped, most likely. Other users' jobs of that name are none of this one's business, and it
 * hears nothing of them.
 */
static const char *form_hint(const struct job *job)
{
	struct job *other;

	list_for_each (other, &job->server->jobs, link) {
		if (other != job && other->home && other->state != JOB_OVER &&
		    other->owner.user != USER_NONE && other->owner.user == job->owner.user &&
		    !strcmp(other->owner.name, job->owner.name) &&
		    !job_is(other, job->owner.name, job->owner.secret_digest))
			return "; this user has a job of that name with another secret";
	}
	return "";
}

/* Any node that has joined: all that have agree. */
static const struct join *form_reference(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (job->nodes[i].join)
			return job->nodes[i].join;
	}
	return NULL;
}

static uint32_t n_joined(const struct job *job)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		n += job->nodes[i].join != NULL;
	return n;
}

/* Forgets a node that has joined, answering its JOIN. */
static void form_drop(struct job *job, uint32_t number, int status, const char *text)
{
	struct job_node *node = &job->nodes[number];

	for (uint32_t i = 0; i < node->join->n_ranks; i++)
		job->node_of_rank[node->join->ranks[i]] = NODE_NONE;
	if (node->joining)
		delivery_fail(node->joining, status, text);
	(void)join_free(node->join);
	(void)job_peer_set(job, number, NULL);
	job_node_init(node);
}

static int differ(const struct job *job, const struct join *join, const char *what, uint64_t says,
		  uint64_t said, struct failure *failure)
{
	const struct join *other = form_reference(job);
	struct speaker a, b;

	if (says == said)
		return 0;
	return failure_set(failure, -EINVAL, "job %s: %s says %s %llu, %s says %s %llu",
			   job->owner.name, speaker(join, &a), what, (unsigned long long)says,
			   speaker(other, &b), what, (unsigned long long)said);
}

static int check_stragglers(const struct job *job, const struct join *join, struct failure *failure)
{
	const struct stragglers *a = &join->stragglers, *b = &job->stragglers;
	int r = differ(job, join, "quorum", a->quorum, b->quorum, failure);

	if (!r)
		r = differ(job, join, "quorum timeout", a->quorum_timeout_ms, b->quorum_timeout_ms,
			   failure);
	if (!r)
		r = differ(job, join, "async", a->async, b->async, failure);
	if (!r)
		r = differ(job, join, "staleness", a->staleness, b->staleness, failure);
	return r;
}

static int check_alike(const struct job *job, const struct join *join, struct failure *failure)
{
	struct speaker a, b;
	int r;

	r = check_stragglers(job, join, failure);
	if (!r)
		r = differ(job, join, "size", join->size, job->size, failure);
	if (!r)
		r = differ(job, join, "elastic", join->elastic, job->membership.elastic, failure);
	if (!r)
		r = differ(job, join, "at least ranks", join->min_ranks, job->membership.min_ranks,
			   failure);
	if (!r)
		r = differ(job, join, "at most ranks", join->max_ranks, job->membership.max_ranks,
			   failure);
	if (!r)
		r = differ(job, join, "number of nodes", join->n_nodes, job->n_nodes, failure);
	if (!r)
		r = differ(job, join, "part size", join->part_bytes, job->forming.asked_part_bytes,
			   failure);
	if (!r && join->view_digest != job->forming.view_digest)
		r = failure_set(failure, -EINVAL,
				"job %s: %s and %s have different lists of servers: their cluster "
				"files differ",
				job->owner.name, speaker(join, &a),
				speaker(form_reference(job), &b));
	if (!r)
		r = differ(job, join, "view", join->epoch, job->forming.epoch, failure);
	return r;
}

/* Both are sorted. */
static bool ranks_overlap(const struct join *a, const struct join *b)
{
	uint32_t i = 0, j = 0;

	while (i < a->n_ranks && j < b->n_ranks) {
		if (a->ranks[i] == b->ranks[j])
			return true;
		if (a->ranks[i] < b->ranks[j])
			i++;
		else
			j++;
	}
	return false;
}

static const char *join_text(const struct join *join, struct ranks_text *ret_ranks)
{
	ranks_init(ret_ranks);
	for (uint32_t i = 0; i < join->n_ranks; i++)
		ranks_add(ret_ranks, join->ranks[i]);
	return ranks_end(ret_ranks);
}

/*
 * Another daemon with the number of a node that is here: a daemon that has restarted has the same
 * ranks, a wrong number given to a second machine has others.
 */
static int check_node(const struct job *job, const struct join *join, const struct peer *peer,
		      struct failure *failure)
{
	const struct job_node *node = &job->nodes[join->node];
	struct ranks_text a, b;

	if (!node->join || node->peer == peer || ranks_overlap(node->join, join))
		return 0;
	return failure_set(failure, -EINVAL, "job %s: %s on %s and %s on %s both say node %u",
			   job->owner.name, join_text(node->join, &a), peer_name(node->peer),
			   join_text(join, &b), peer_name(peer), join->node);
}

static int check_ranks_free(const struct job *job, const struct join *join, const struct peer *peer,
			    struct failure *failure)
{
	for (uint32_t i = 0; i < join->n_ranks; i++) {
		uint32_t rank = join->ranks[i], node = job->node_of_rank[rank];

		if (node != NODE_NONE && node != join->node)
			return failure_set(failure, -EINVAL,
					   "job %s: there is a rank %u on node %u (%s) and another "
					   "on node %u (%s)",
					   job->owner.name, rank, node,
					   peer_name(job->nodes[node].peer), join->node,
					   peer_name(peer));
	}
	return 0;
}

/* With this one, all nodes may be here, and then their ranks must be all ranks. */
static int check_local_sizes(const struct job *job, const struct join *join,
			     struct failure *failure)
{
	uint64_t sum = join->local_size;
	uint32_t n = 1;

	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (i == join->node || !job->nodes[i].join)
			continue;
		sum += job->nodes[i].join->local_size;
		n++;
	}
	if (sum > job->size || (n == job->n_nodes && sum < job->size))
		return failure_set(
			failure, -EINVAL,
			"job %s: the local sizes of %u of %u nodes add up to %llu, but size is %u",
			job->owner.name, n, job->n_nodes, (unsigned long long)sum, job->size);
	return 0;
}

/*
 * The view it was opened in, as this daemon knows it, or is told by ranks that regroup; NULL and
 * failure if it does not, or not the same.
 */
static const struct view *form_view(struct server *server, const struct join *join,
				    struct failure *failure)
{
	const struct view *view = server->params.view_of(server->params.user, join->epoch);
	struct speaker a;

	if (!view && join->view && join->view->epoch == join->epoch)
		view = join->view;
	if (!view) {
		(void)failure_set(failure, -ESTALE, "job %s: its home does not know view %u",
				  join->job, join->epoch);
		return NULL;
	}
	if (view_server_digest(view) == join->view_digest)
		return view;
	(void)failure_set(failure, -EINVAL,
			  "job %s: %s has another list of servers in view %u than the job's home: "
			  "their cluster files differ",
			  join->job, speaker(join, &a), join->epoch);
	return NULL;
}

/* Powers of two alone: parts are aligned by masks. */
static uint32_t part_bytes_of(uint32_t asked)
{
	uint32_t floor = PART_BYTES_MIN;

	while (floor <= PART_BYTES_MAX / 2 && floor * 2 <= asked)
		floor *= 2;
	return floor;
}

#define PART_BYTES_UNKNOWN  (128u << 10)
#define PART_BYTES_AUTO_MIN (16u << 10)
#define PART_BYTES_AUTO_MAX (512u << 10)

/*
 * Of a job that leaves it to us: large enough that what is done for each part is little beside its
 * bytes, small enough that servers stay in step, and that what is urgent comes soon. By what has
 * been seen of the link, else by what the operator says.
 */
static uint32_t part_bytes_by_link(const struct server *server, const struct view *view)
{
	const struct transport *transport = server->params.transport;
	uint64_t bytes_s = transport ? transport_bytes_s(transport) : 0, mbps = 0;
	const struct view_member *member = NULL;
	size_t n_known = 0;

	while (!bytes_s && (member = view_next_server(view, member))) {
		mbps += member->bandwidth_mbps;
		n_known += member->bandwidth_mbps > 0;
	}
	if (n_known)
		bytes_s = mbps / n_known * 1000000 / 8;
	if (!bytes_s)
		return PART_BYTES_UNKNOWN;
	return (uint32_t)MAX(MIN(bytes_s / 1600, (uint64_t)PART_BYTES_AUTO_MAX),
			     (uint64_t)PART_BYTES_AUTO_MIN);
}

static int form_new(struct server *server, const struct join *join, struct job **ret_job,
		    struct failure *failure)
{
	_cleanup_(job_freep) struct job *job = NULL;
	int r;

	if (!form_view(server, join, failure))
		return failure->status;
	r = job_new(server,
		    &(struct job_params){ join->job, join->size, join->n_nodes, join->account },
		    &job, failure);
	if (r)
		return r;
	job->home = true;
	memcpy(job->owner.secret_digest, join->secret_digest, SECRET_DIGEST_LEN);
	job->owner.user = join->user;
	job->forming.epoch = join->epoch;
	job->forming.view_digest = join->view_digest;
	job->forming.asked_part_bytes = join->part_bytes;
	job->request_timeout_ms = join->request_timeout_ms;
	job->stragglers = join->stragglers;
	job->membership.elastic = join->elastic;
	job->membership.min_ranks = join->min_ranks;
	job->membership.max_ranks = join->max_ranks;
	job->forming.timeout_ms = join->timeout_ms;
	job->forming.since_ns = clock_now_ns();
	r = job_wake_by(job, job->forming.since_ns + job->forming.timeout_ms * NSEC_PER_MSEC);
	if (r)
		return failure_set(failure, r, "job %s: out of memory", job->owner.name);
	*ret_job = TAKE_PTR(job);
	return 0;
}

static bool form_complete(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct join *join = job->nodes[i].join;

		if (!join || join->n_ranks < join->local_size)
			return false;
	}
	return true;
}

/* A member by the number of its process. */
struct numbered {
	uint64_t id;
	uint32_t number;
};

static int by_id(const void *a, const void *b)
{
	uint64_t x = ((const struct numbered *)a)->id, y = ((const struct numbered *)b)->id;

	return (x > y) - (x < y);
}

/* For nodes that do not say their names: nodes and members may be many. Returns 0 or -ENOMEM. */
static int number_members(const struct view *view, struct numbered **ret_numbered)
{
	struct numbered *numbered = calloc(MAX(view->n_members, (size_t)1), sizeof(*numbered));

	if (!numbered)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < view->n_members; i++)
		numbered[i] = (struct numbered){ view->members[i].id, (uint32_t)i + 1 };
	qsort(numbered, view->n_members, sizeof(*numbered), by_id);
	*ret_numbered = numbered;
	return 0;
}

/* The number of a node among the view's members, from 1; 0: it is not there. */
static uint32_t number_in_view(const struct view *view, const struct numbered *numbered,
			       const struct join *join)
{
	const struct numbered key = { .id = join->member }, *found;
	const struct view_member *member;

	if (*join->node_name) {
		member = view_find(view, join->node_name);
		return member ? (uint32_t)(member - view->members) + 1 : 0;
	}
	found = join->member ? bsearch(&key, numbered, view->n_members, sizeof(*numbered), by_id)
			     : NULL;
	return found ? found->number : 0;
}

/*
 * Now that all are here: that tells how fast the link is where nothing else did, as they have
 * connected (transport_params.probes).
 */
static void form_parts(struct job *job, const struct view *view)
{
	uint32_t asked = job->forming.asked_part_bytes ? job->forming.asked_part_bytes
						       : job->server->params.part_bytes;
	uint32_t n = job->n_nodes;

	if (!asked)
		asked = part_bytes_by_link(job->server, view);
	/* A node sums what its ranks bring, and a server what the nodes do. */
	for (uint32_t i = 0; i < job->n_nodes; i++)
		n = MAX(n, job->nodes[i].join ? job->nodes[i].join->n_ranks : 0);
	job->forming.part_bytes = part_bytes_of(MIN(asked, PART_SUM_MAX / n));
}

static int form_stripes(struct job *job, uint16_t *stripes, uint32_t *member_of_node,
			struct failure *failure)
{
	_cleanup_(freep) const char **names = calloc(job->n_nodes, sizeof(*names));
	const struct view *view = form_view(job->server, form_reference(job), failure);
	_cleanup_(freep) struct numbered *numbered = NULL;
	int r;

	if (!view)
		return failure->status;
	form_parts(job, view);
	if (!names || number_members(view, &numbered))
		return failure_set(failure, -ENOMEM, "job %s: out of memory", job->owner.name);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		uint32_t number = number_in_view(view, numbered, job->nodes[i].join);

		member_of_node[i] = number;
		names[i] = number ? view->members[number - 1].name : NULL;
	}
	r = placement_stripes(view, names, job->n_nodes, stripes, PLACEMENT_STRIPES);
	if (r)
		return failure_set(failure, r, "job %s: placement: %s", job->owner.name,
				   strerror(-r));
	return 0;
}

/* Random, so that nobody who was not told can speak in its name, and no two servers' jobs meet. */
static int form_number(struct job *job)
{
	uint64_t number;

	do {
		if (getrandom(&number, sizeof(number), 0) != sizeof(number))
			return error_origin(-errno);
	} while (!number || job_find(job->server, number) || job_over(job->server, number));
	return error_trace(job_start(job, number));
}

/* All get the same memory: it is as long as there are ranks. */
static void form_answer(struct job *job, struct block *answer)
{
	struct data_header header = {
		.op = DATA_OK,
		.job = job->number,
		.epoch = job->forming.epoch,
		.len = (uint32_t)answer->len,
	};

	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];

		header.node = i;
		node->join = join_free(node->join);
		if (job->membership.regroups && FAILPOINT_DROPS("server-regroup-told"))
			continue;
		delivery_answer(TAKE_PTR(node->joining), &header, answer, NULL);
	}
	log_info("job %s: %u ranks on %u nodes, part size %u", job->owner.name, job->size,
		 job->n_nodes, job->forming.part_bytes);
}

/* Who the nodes were in the run before. */
static void form_past(const struct job *job, uint32_t *old_nodes, uint64_t *joiners)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct join *join = job->nodes[i].join;

		old_nodes[i] = join->joiner ? 0 : join->node + 1;
		joiners[i] = join->joiner ? join->member : 0;
	}
}

/* All are here: the job gets its number and runs. */
int form_finish(struct job *job, struct failure *failure)
{
	uint16_t stripes[PLACEMENT_STRIPES];
	_cleanup_(freep) uint32_t *member_of_node = calloc(job->n_nodes, sizeof(member_of_node[0]));
	_cleanup_(freep) uint32_t *old_nodes = calloc(job->n_nodes, sizeof(old_nodes[0]));
	_cleanup_(freep) uint64_t *joiners = calloc(job->n_nodes, sizeof(joiners[0]));
	struct joined joined = {
		.node_of_rank = job->node_of_rank,
		.stripes = stripes,
		.n_stripes = PLACEMENT_STRIPES,
		.member_of_node = member_of_node,
		.n_nodes = job->n_nodes,
		.regroups = job->membership.regroups,
		.old_nodes = old_nodes,
		.joiners = joiners,
	};
	_cleanup_(block_unrefp) struct block *answer = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len = 0;
	int r;

	if (!member_of_node || !old_nodes || !joiners)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", job->owner.name);
	r = form_stripes(job, stripes, member_of_node, failure);
	if (r)
		return r;
	/* Nobody waits longer than the least patient has asked for. */
	for (uint32_t i = 0; i < job->n_nodes; i++)
		job->request_timeout_ms =
			MIN(job->request_timeout_ms, job->nodes[i].join->request_timeout_ms);
	job->retention.resume = true;
	for (uint32_t i = 0; i < job->n_nodes; i++)
		job->retention.resume &= job->nodes[i].join->resume;
	joined.resume = job->retention.resume;
	/* Until one attaches, and says how long: a daemon that is lost now may join once more. */
	job->attachment.lost_timeout_ms = job->retention.resume ? job->forming.timeout_ms : 0;
	if (job->membership.elastic && !job->retention.resume)
		return failure_set(failure, -EOPNOTSUPP,
				   "job %s: an elastic job over several nodes needs daemons whose "
				   "option resume is on, and a session_quota that has room for its "
				   "ledger",
				   job->owner.name);
	r = form_number(job);
	if (!r)
		r = attach_expect(job, job->forming.timeout_ms);
	if (!r) {
		joined.job = job->number;
		joined.request_timeout_ms = job->request_timeout_ms;
		joined.size = job->size;
		joined.part_bytes = job->forming.part_bytes;
		joined.membership = job->membership.first;
		joined.min_ranks = job->membership.min_ranks;
		joined.max_ranks = job->membership.max_ranks;
		if (job->membership.regroups)
			form_past(job, old_nodes, joiners);
		if (job->membership.takes_joiners)
			joined.view = form_view(job->server, form_reference(job), failure);
		r = joined_encode(&joined, &data, &len);
	}
	if (!r)
		r = block_new(job->server->params.blocks, len, NULL, &answer);
	if (r)
		return failure_set(failure, r, "job %s: %s", job->owner.name, strerror(-r));
	r = job->retention.resume ? job_charge(job, len + past_len(job->n_nodes), failure) : 0;
	if (r)
		return r;
	memcpy(answer->data, data, len);
	form_answer(job, answer);
	job->forming.answer = job->retention.resume ? block_ref(answer) : NULL;
	return 0;
}

static int form_check(const struct job *job, const struct join *join, const struct peer *peer,
		      struct failure *failure)
{
	int r = check_alike(job, join, failure);

	if (!r)
		r = check_node(job, join, peer, failure);
	if (!r)
		r = check_ranks_free(job, join, peer, failure);
	if (!r)
		r = check_local_sizes(job, join, failure);
	return r;
}

/* Nobody is left of it. */
static void form_end_empty(struct job *job)
{
	struct failure failure = { 0 };

	if (n_joined(job))
		return;
	(void)failure_set(&failure, -ECANCELED, "job %s: all its nodes are gone", job->owner.name);
	job_end(job, &failure);
}

/*
 * A node's JOIN becomes its newest one. What does not fit the others makes the job impossible for
 * all.
 */
static void form_add(struct job *job, struct join *join, struct delivery *delivery)
{
	struct failure failure = { 0 };
	struct job_node *node;
	int r;

	r = form_check(job, join, delivery->peer, &failure);
	if (r) {
		(void)join_free(join);
		delivery_fail(delivery, r, failure.text);
		job_fail(job, &failure, NULL);
		return;
	}
	node = &job->nodes[join->node];
	if (node->join)
		form_drop(job, join->node, -EALREADY, "a newer join of the same node has come");
	r = job_peer_set(job, join->node, delivery->peer);
	if (r) {
		(void)job_no_memory(job, r, &failure);
		delivery_fail(delivery, r, failure.text);
		(void)join_free(join);
		form_end_empty(job);
		return;
	}
	node->instance = join->instance;
	node->join = join;
	node->joining = delivery;
	for (uint32_t i = 0; i < join->n_ranks; i++)
		job->node_of_rank[join->ranks[i]] = join->node;
	if (!form_complete(job))
		return;
	if (form_finish(job, &failure))
		job_fail(job, &failure, NULL);
}

/*
 * Whether a peer may begin a job that runs anew: a daemon of the job, or the next process of one, which may come before the
 * old one is seen to be lost. Who else has the key and the job's name may not, unless nobody speaks for the node.
 */
static bool may_begin_anew(const struct job *job, uint32_t node, const struct peer *peer)
{
	const char *source = peer_source(peer);
	const struct map_entry *entry;

	if (node < job->n_nodes && !job->nodes[node].peer)
		return true;
	if (job_peer_find(job, peer))
		return true;
	map_for_each (entry, &job->peers)
		if (!strcmp(peer_source(container_of(entry, struct job_peer, entry)->peer), source))
			return true;
	return false;
}

/*
 * A JOIN for a job that runs: late, or the beginning of the next run. Returns true when it was
 * answered.
 */
static bool form_anew(struct job *job, const struct join *join, struct delivery *delivery)
{
	struct failure failure = { 0 };
	struct ranks_text ranks;
	bool may_begin = may_begin_anew(job, join->node, delivery->peer);

	if (join->node < job->n_nodes && job->nodes[join->node].instance == join->instance) {
		refuse(delivery, -EALREADY, "job %s: it is complete already", job->owner.name);
		return true;
	}
	if (!join->n_ranks) {
		if (join->node < job->n_nodes && may_begin)
			rejoin_end(&job->nodes[join->node], -ECANCELED,
				   "this node takes no part any more");
		refuse(delivery, -ECANCELED, "job %s: node %u was not in it", job->owner.name,
		       join->node);
		return true;
	}
	if (!may_begin) {
		refuse(delivery, -EACCES, "job %s: it runs, and %s does not speak for node %u",
		       job->owner.name, peer_name(delivery->peer), join->node);
		return true;
	}
	if (rejoin(job, join, delivery))
		return true;
	(void)failure_set(&failure, -ECONNRESET, "job %s: node %u has started it anew with %s",
			  job->owner.name, join->node, join_text(join, &ranks));
	job_fail(job, &failure, NULL);
	return false;
}

/*
 * The same for one that is forming: an older JOIN that was overtaken, or one that takes the node's
 * own back.
 */
static bool form_older(struct job *job, const struct join *join, struct delivery *delivery)
{
	struct job_node *node;

	node = join->node < job->n_nodes ? &job->nodes[join->node] : NULL;
	if (!join->n_ranks) {
		const struct peer *peer = delivery->peer;

		refuse(delivery, -ECANCELED, "job %s: node %u takes no part", job->owner.name,
		       join->node);
		if (node && node->join && node->peer == peer)
			form_lost(job, peer);
		return true;
	}
	if (!node || !node->join || node->instance != join->instance ||
	    join->n_ranks >= node->join->n_ranks)
		return false;
	refuse(delivery, -EALREADY, "job %s: a newer join of node %u has come", job->owner.name,
	       join->node);
	return true;
}

/*
 * Whether the only node here begins again, perhaps with another idea of the job: then nothing binds
 * it.
 */
static bool form_is_fresh(const struct job *job, const struct join *join, const struct peer *peer)
{
	const struct join *only = form_reference(job);
	struct failure failure;

	return n_joined(job) == 1 && only->node == join->node && only->instance != join->instance &&
	       join->node < job->n_nodes && !check_node(job, join, peer, &failure);
}

static void take_join(struct server *server, struct delivery *delivery)
{
	_cleanup_(join_freep) struct join *join = NULL;
	struct account *account = NULL;
	struct failure failure = { 0 };
	struct job *job;
	int r;

	r = join_decode(delivery->payload, delivery->header.len, &join, &failure);
	if (!r)
		r = charge_account(server, delivery->peer, join->user, &account, &failure);
	if (!r)
		r = join_charge(join, account, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	if (join->regroups) {
		regroup_join(server, TAKE_PTR(join), delivery);
		return;
	}
	if (join->joiner) {
		joiner_join(server, TAKE_PTR(join), delivery);
		return;
	}
	job = form_find(server, join);
	if (job && job->state == JOB_RUNNING) {
		if (form_anew(job, join, delivery))
			return;
		job = NULL;
	}
	if (job && form_older(job, join, delivery))
		return;
	if (job && form_is_fresh(job, join, delivery->peer)) {
		(void)failure_set(&failure, -EALREADY, "a newer join of the same node has come");
		job_end(job, &failure);
		job = NULL;
	}
	if (!join->n_ranks) {
		refuse(delivery, -ECANCELED, "job %s: node %u takes no part", join->job,
		       join->node);
		return;
	}
	r = job ? 0 : form_new(server, join, &job, &failure);
	if (r) {
		delivery_fail(delivery, r, failure.text);
		return;
	}
	form_add(job, TAKE_PTR(join), delivery);
}

/* -- JOINs that wait for those before them ------------------------------------------------------------------------ */

/*
 * Of one place. Places take turns: however many one has, a JOIN from elsewhere waits for one of them. Those of a node stay in order, also
 * where they come from two of its processes, one after the other.
 */
struct joins {
	struct list link; /* server->joins */
	char source[SOURCE_MAX];
	struct list deliveries;
};

static struct joins *joins_of(struct server *server, const struct peer *peer)
{
	struct joins *joins;

	list_for_each (joins, &server->joins, link)
		if (!strcmp(joins->source, peer_source(peer)))
			return joins;
	joins = calloc(1, sizeof(*joins));
	if (!joins)
		return NULL;
	(void)snprintf(joins->source, sizeof(joins->source), "%s", peer_source(peer));
	list_init(&joins->deliveries);
	list_push_back(&server->joins, &joins->link);
	return joins;
}

/* The next, or NULL: none waits. */
static struct delivery *next_join(struct server *server)
{
	struct joins *joins = list_first(&server->joins, struct joins, link);
	struct delivery *delivery;

	if (!joins)
		return NULL;
	delivery = list_first(&joins->deliveries, struct delivery, link);
	list_remove(&delivery->link);
	list_remove(&joins->link);
	if (list_empty(&joins->deliveries))
		free(joins);
	else
		list_push_back(&server->joins, &joins->link);
	return delivery;
}

/* One at a time: each may be long, and end a job. */
static bool on_join(struct chore *chore)
{
	struct server *server = container_of(chore, struct server, join);
	struct delivery *delivery = next_join(server);
	const char *why = delivery ? peer_loss(delivery->peer) : NULL;

	if (why)
		delivery_fail(delivery, -ECONNRESET, why);
	else if (delivery)
		take_join(server, delivery);
	return !list_empty(&server->joins);
}

void form_join_later(struct server *server, struct delivery *delivery)
{
	struct joins *joins = joins_of(server, delivery->peer);

	if (!joins) {
		refuse(delivery, -ENOMEM, "out of memory");
		return;
	}
	list_push_back(&joins->deliveries, &delivery->link);
	server->join.step = on_join;
	loop_begin(server->params.loop, &server->join);
}

void form_join(struct server *server, struct delivery *delivery)
{
	if (list_empty(&server->joins))
		take_join(server, delivery);
	else
		form_join_later(server, delivery);
}

void form_joins_end(struct server *server, const struct failure *failure)
{
	struct delivery *delivery;

	while ((delivery = next_join(server)))
		delivery_fail(delivery, failure->status, failure->text);
	loop_abort(&server->join);
}

/* -- Time that is over ------------------------------------------------------------------------------------------------ */

void form_expired(struct job *job)
{
	struct failure failure = { 0 };
	struct seconds_text seconds;
	struct ranks_text missing;
	const char *text;

	ranks_init(&missing);
	for (uint32_t i = 0; i < job->size; i++) {
		if (job->node_of_rank[i] == NODE_NONE)
			ranks_add(&missing, i);
	}
	text = ranks_end(&missing);
	(void)failure_set(&failure, -ETIMEDOUT,
			  "job %s: %s %s not joined within %s s (%u of %u ranks are here)%s",
			  job->owner.name, text, ranks_have(&missing),
			  job_seconds_text(job->forming.timeout_ms, &seconds),
			  job->size - missing.n, job->size, form_hint(job));
	job_fail(job, &failure, NULL);
}

/* A daemon that was lost, or takes no part after all, may come back until the deadline. */
void form_lost(struct job *job, const struct peer *peer)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];

		if (node->join && (peer ? node->peer == peer : !!peer_loss(node->peer)))
			form_drop(job, i, -ECANCELED, "this node takes no part any more");
	}
	form_end_empty(job);
}
