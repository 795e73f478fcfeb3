/*
 * A job goes on with other servers: bps-recovery(7), CHANGE OF SERVERS. What is held here is dropped, as if this process were
 * another; nodes attach again, offer what they keep, and push what they have no result of. Words about the job as it was count
 * no more.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "server/job/job.h"

bool move_is_current(const struct job *job, const struct data_header *header)
{
	return !job->placement.n_moves || header->epoch == job->placement.data_epoch;
}

/* What nodes are told, once for all of them. NULL: there is no memory. */
static struct block *say(const struct job *job, const uint32_t *moves, size_t n,
			 const struct data_added_set *added)
{
	struct block *said = NULL;

	if (!block_new(job->server->params.blocks, data_moves_len(n, added), NULL, &said))
		data_moves_encode(said->data, moves, n, added);
	return said;
}

/*
 * The first node of each peer gets a copy, which the peer is charged for: the block that its other nodes share is there for no
 * longer. A peer has to learn of the move one way or the other: without memory by being lost.
 */
static void tell(const struct job *job, uint32_t node, struct peer *peer, struct block *said,
		 unsigned n_added, bool is_first)
{
	struct data_header header = {
		.op = DATA_MOVE,
		.job = job->number,
		.node = node,
		.part = n_added,
		.len = said ? (uint32_t)said->len : 0,
	};
	int r;

	if (!said)
		r = error_origin(-ENOMEM);
	else if (is_first)
		r = peer_notice(peer, &header, said->data);
	else
		r = peer_notice_block(peer, &header, said);
	if (r)
		peer_kill(peer, "out of memory");
}

static void tell_others(struct job *job, const struct peer *except, const uint32_t *moves, size_t n,
			const struct data_added_set *added)
{
	struct block *said = say(job, moves, n, added);
	bool each = stragglers_any(&job->stragglers);
	uint64_t walk = job_peers_walk(job);

	/* Where each rank is a node, who has said so may speak for nodes that have not. */
	if (!each)
		(void)job_peer_meet(job, except, walk);
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *node = &job->nodes[i];
		bool is_first;

		if (!node->peer || node->departed)
			continue;
		is_first = job_peer_meet(job, node->peer, walk);
		if (each || is_first)
			tell(job, i, node->peer, said, added->n, is_first);
	}
	(void)block_unref(said);
}

static void tell_one(const struct job *job, uint32_t node, struct peer *peer, const uint32_t *moves,
		     size_t n)
{
	struct block *said = say(job, moves, n, &job->placement.added);

	tell(job, node, peer, said, job->placement.added.n, true);
	(void)block_unref(said);
}

void move_tell(struct job *job, const struct peer *except, const uint32_t *moves, size_t n)
{
	tell_others(job, except, moves, n, &job->placement.added);
}

void move_tell_node(struct job *job, uint32_t node, const uint32_t *moves, size_t n)
{
	tell_one(job, node, job->nodes[node].peer, moves, n);
}

int move_begin(struct job *job, const struct attach *attach)
{
	size_t n = attach->n_moves, len = n * sizeof(job->placement.moves[0]);

	if (!n)
		return 0;
	job->placement.moves = malloc(2 * len);
	if (!job->placement.moves)
		return error_origin(-ENOMEM);
	job->placement.notified_moves = job->placement.moves + n;
	memcpy(job->placement.moves, attach->moves, len);
	memcpy(job->placement.notified_moves, attach->moves, len);
	job->placement.n_moves = n;
	elastic_count(job);
	return 0;
}

size_t move_n_servers(const struct job *job)
{
	return job->membership.elastic ? job->placement.n_moves - job->size
				       : job->placement.n_moves;
}

static uint32_t at(const struct job *job, size_t server)
{
	return job->placement.moves ? job->placement.moves[server] : 0;
}

static struct failure moved_words(const struct job *job)
{
	struct failure failure = { 0 };

	(void)failure_set(&failure, -ESHUTDOWN, "job %s: it goes on with other servers",
			  job->owner.name);
	return failure;
}

/* The nodes' places are kept: who has left, and who may speak, though none has attached. */
static int take_places(struct job *job, struct job *old)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		const struct job_node *from = &old->nodes[i];
		struct job_node *to = &job->nodes[i];
		int r = job_peer_set(job, i, from->peer);

		if (r)
			return error_trace(r);
		to->instance = from->instance;
		to->lost_ns = from->lost_ns;
		to->spoke = from->spoke;
		if (to->out || !from->departed)
			continue;
		to->departed = to->attached = true;
		job->n_departed++;
		job->attachment.n++;
	}
	job->attachment.lost_timeout_ms = old->attachment.lost_timeout_ms;
	/* Without memory it is looked at when the attach is due. */
	if (attach_lost_deadline(job) != CLOCK_NEVER)
		(void)job_wake_by(job, attach_lost_deadline(job));
	if (job->home)
		joiner_go_on(job, old);
	return 0;
}

static int begin_anew(struct job *old, const struct attach *attach, struct job **ret_job,
		      struct failure *failure)
{
	struct server *server = old->server;
	struct job *job;
	int r;

	r = attach_new(server, old->number, attach, old->membership.succeeded, &job, failure);
	if (r)
		return r;
	r = take_places(job, old);
	if (!r && !job->forming.answer && old->forming.answer)
		r = job_charge(job, old->forming.answer->len + past_len(old->n_nodes), failure);
	if (r) {
		(void)job_no_memory(job, r, failure);
		job_retire(job, failure);
		job_dismiss(job);
		return failure->status;
	}
	job->placement.came_back = old->placement.came_back;
	if (!job->forming.answer) {
		job->forming.answer = TAKE_PTR(old->forming.answer);
		job->forming.past = TAKE_PTR(old->forming.past);
	}
	*ret_job = job;
	return 0;
}

int move_attach(struct job **job, const struct attach *attach, struct peer *peer,
		struct failure *failure)
{
	struct failure words = moved_words(*job);
	struct job *old = *job;
	const struct job_node *node = &old->nodes[attach->node];
	/* Who begins once more after its process ended, as in attach.c. At the home its instance is known by then: rejoin.c. */
	bool anew = attach->begins && !node->spoke && !old->home;
	bool more = false, less = false;
	int r;

	if (!old->retention.resume)
		return 0;
	if (old->placement.moves && attach->n_moves && attach->n_moves != old->placement.n_moves)
		return failure_set(failure, -EINVAL, "job %s: %zu servers, and %zu before",
				   old->owner.name, attach->n_moves, old->placement.n_moves);
	for (size_t i = 0; i < MAX(old->placement.n_moves, attach->n_moves); i++) {
		uint32_t says = attach->n_moves ? attach->moves[i] : 0;

		more |= says > at(old, i);
		less |= says < at(old, i);
	}
	data_added_compare(&old->placement.added, &attach->added, &more, &less);
	if (less) {
		tell_one(old, attach->node, peer, old->placement.moves, old->placement.n_moves);
		*failure = words;
		return failure->status;
	}
	if (!more && (old->placement.moves || !attach->n_moves))
		return 0;
	if (!more) {
		if (move_begin(old, attach))
			return failure_set(failure, -ENOMEM, "job %s: out of memory",
					   old->owner.name);
		old->placement.own_number = attach->server;
		return 0;
	}
	if (node->instance && node->instance != attach->instance && !anew)
		return failure_set(failure, -EACCES, "job %s: %s does not speak for node %u",
				   old->owner.name, peer_name(peer), attach->node);
	/* Who has left brings nothing back, and without it sums would be less than what they were made of. */
	if (old->stragglers.async && old->n_departed) {
		(void)failure_set(failure, -ECONNRESET,
				  "job %s: its servers change, and a rank has left: what it had "
				  "contributed is nowhere but at servers",
				  old->owner.name);
		job_fail(old, failure, NULL);
		return failure->status;
	}
	tell_others(old, peer, attach->moves, attach->n_moves, &attach->added);
	job_retire(old, &words);
	r = begin_anew(old, attach, job, failure);
	FAILPOINT("server-moved");
	job_dismiss(old);
	return r;
}

static void go(struct job *job, const struct peer *from, const uint32_t *moves, size_t n,
	       const struct data_added_set *added)
{
	struct failure words = moved_words(job);
	struct server *server = job->server;
	uint64_t number = job->number;

	log_notice("job %s: it goes on without this server", job->owner.name);
	tell_others(job, from, moves, n, added);
	job_end(job, &words);
	job_over_moved(server, number);
}

/* Whether they say that the job goes on without this server, which does not know it yet. */
static bool says_go(const struct job *job, const uint32_t *moves, size_t n,
		    const struct data_added_set *added)
{
	const struct data_added *own =
		job->placement.own_added
			? &job->placement.added.servers[job->placement.own_added - 1]
			: NULL;
	uint32_t i;

	if (job->placement.moves && job->placement.n_moves != n)
		return false;
	if (!own)
		return job->placement.own_number < n && moves[job->placement.own_number] & 1 &&
		       moves[job->placement.own_number] > at(job, job->placement.own_number);
	i = data_added_find(added, own->name, own->address);
	return i < added->n && added->servers[i].moves & 1 && added->servers[i].moves > own->moves;
}

void move_notice(struct job *job, const struct peer *from, const struct data_header *header,
		 const void *payload)
{
	size_t n = data_moves_n(header);
	_cleanup_(freep) uint32_t *moves =
		job->retention.resume ? calloc(n, sizeof(moves[0])) : NULL;
	_cleanup_(freep) struct data_added_set *added = moves ? malloc(sizeof(*added)) : NULL;

	if (!added || !data_moves_decode(header, payload, moves, added))
		return;
	/* What concerns others is for the nodes, who attach again. */
	if (says_go(job, moves, n, added))
		go(job, from, moves, n, added);
	else if (job->membership.elastic && job->placement.n_moves == n)
		elastic_notice(job, from, moves);
}

bool move_drain(struct job *job)
{
	_cleanup_(freep) struct data_added_set *added = NULL;
	_cleanup_(freep) uint32_t *moves = NULL;
	size_t n_others = 0;

	if (job->state != JOB_RUNNING || !job->retention.resume || !job->placement.moves)
		return false;
	for (size_t i = 0; i < move_n_servers(job); i++)
		n_others += (job->placement.own_added || i != job->placement.own_number) &&
			    !(job->placement.moves[i] & 1);
	for (uint32_t i = 0; i < job->placement.added.n; i++)
		n_others += i + 1 != job->placement.own_added &&
			    !(job->placement.added.servers[i].moves & 1);
	moves = n_others ? calloc(job->placement.n_moves, sizeof(moves[0])) : NULL;
	added = moves ? malloc(sizeof(*added)) : NULL;
	if (!added)
		return false;
	memcpy(moves, job->placement.moves, job->placement.n_moves * sizeof(moves[0]));
	*added = job->placement.added;
	if (job->placement.own_added)
		added->servers[job->placement.own_added - 1].moves++;
	else
		moves[job->placement.own_number]++;
	go(job, NULL, moves, job->placement.n_moves, added);
	return true;
}
