/*
 * Which of its servers a job goes on with: bps(7), RESTART. A server that was lost for good, or drains, is left out; one that is
 * back is taken in again. Each node knows how often each server has gone and come, and unites that with what others say: whoever
 * knows as much has the same placement and home, so nothing has to be decided, and no boundary agreed on. Then all is as if every
 * server's process were another: nodes attach, offer the results that not all nodes may have, and push what they have no
 * result of. Results are functions of the contributions alone; so it does not matter where, or how often, a sum is made.
 */
#include "base/failpoint.h"
#include "base/log.h"
#include "pipeline/part.h"

#define RETURN_NS \
	NSEC_PER_SEC /* when it is looked first whether a server is back; then later and later */
#define RETURN_MAX_NS (60 * NSEC_PER_SEC)

bool pipeline_move_is_in(const struct pipeline_job *job, size_t server)
{
	return !job->moves || !(job->moves[server] & 1);
}

bool pipeline_move_is_dropped(const struct pipeline_job *job, size_t server)
{
	const struct view *view = cluster_view(job->pipeline->params.cluster);
	const char *name = view_server(job->view, server)->name;

	if (!view)
		return false;
	for (size_t i = 0; i < view->n_members; i++)
		if (!strcmp(view->members[i].name, name))
			return false;
	return true;
}

size_t pipeline_move_n(const struct pipeline_job *job)
{
	return job->n_servers + (job->shape.elastic ? job->shape.size : 0);
}

size_t pipeline_move_n_in(const struct pipeline_job *job)
{
	size_t n = 0;

	for (size_t i = 0; i < job->n_servers; i++)
		n += pipeline_move_is_in(job, i);
	return n;
}

/* -- Placement ---------------------------------------------------------------------------------------------------- */

struct heir {
	int64_t weight, credit;
};

/* By the shares that the home has given them; where they have none, alike. Returns their sum. */
static int64_t weigh(const struct pipeline_job *job, struct heir *heirs)
{
	int64_t sum = 0;

	for (size_t i = 0; i < job->n_stripes; i++)
		heirs[job->first_stripes[i]].weight++;
	for (size_t i = 0; i < job->n_servers; i++) {
		if (!pipeline_move_is_in(job, i))
			heirs[i].weight = 0;
		sum += heirs[i].weight;
	}
	for (size_t i = 0; !sum && i < job->n_servers; i++)
		heirs[i].weight = pipeline_move_is_in(job, i);
	return sum ? sum : (int64_t)pipeline_move_n_in(job);
}

/* The stripes of those that are out, dealt to the others: by smooth weighted round robin, the same on every node. */
static int deal(struct pipeline_job *job)
{
	_cleanup_(freep) struct heir *heirs = calloc(job->n_servers, sizeof(*heirs));
	uint16_t *stripes = calloc(job->n_stripes, sizeof(stripes[0]));
	struct pipeline_stripes *kept = malloc(sizeof(*kept));
	int64_t sum;

	if (!heirs || !stripes || !kept) {
		free(stripes);
		free(kept);
		return error_origin(-ENOMEM);
	}
	sum = weigh(job, heirs);
	for (size_t s = 0; s < job->n_stripes; s++) {
		size_t richest = job->n_servers;

		stripes[s] = job->first_stripes[s];
		if (pipeline_move_is_in(job, stripes[s]))
			continue;
		for (size_t i = 0; i < job->n_servers; i++) {
			heirs[i].credit += heirs[i].weight;
			if (heirs[i].weight &&
			    (richest == job->n_servers || heirs[i].credit > heirs[richest].credit))
				richest = i;
		}
		heirs[richest].credit -= sum;
		stripes[s] = (uint16_t)richest;
	}
	/* A thread of the pool may be reading the others: push_pull_rows. */
	kept->stripes = stripes;
	list_push_back(&job->placements, &kept->link);
	job->stripes = stripes;
	return 0;
}

int pipeline_move_home(const struct pipeline_job *job, const uint32_t *moves, size_t *ret_server)
{
	_cleanup_(freep) bool *in = calloc(job->n_servers, sizeof(*in));
	const struct view_member *home;

	if (!in)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < job->n_servers; i++)
		in[i] = !(moves[i] & 1);
	home = view_home_among(job->view, job->name, in);
	for (size_t i = 0; i < job->n_servers; i++)
		if (view_server(job->view, i) == home)
			*ret_server = i;
	return 0;
}

int pipeline_move_look_soon(struct pipeline_job *job, size_t server)
{
	return error_trace(loop_timer_set(job->pipeline->params.loop, &job->servers[server].timer,
					  clock_now_ns() + RETURN_NS));
}

int pipeline_move_init(struct pipeline_job *job)
{
	size_t n_out = 0;

	job->data_epoch = job->view->epoch;
	if (!job->keep)
		return 0;
	job->moves = calloc(pipeline_move_n(job), sizeof(job->moves[0]));
	job->first_stripes = job->stripes;
	if (!job->moves)
		return error_origin(-ENOMEM);
	pipeline_elastic_recall(job);
	for (size_t i = 0; job->moved_before && i < job->n_servers; i++) {
		job->moves[i] = job->moved_before[i];
		n_out += job->moves[i] & 1;
	}
	if (n_out && (deal(job) || pipeline_move_home(job, job->moves, &job->home_number)))
		return error_origin(-ENOMEM);
	job->data_epoch = data_moves_epoch(job->view->epoch, job->moves, pipeline_move_n(job));
	return 0;
}

void pipeline_move_done(struct pipeline_job *job)
{
	struct pipeline_stripes *kept, *next;

	list_for_each_safe (kept, next, &job->placements, link) {
		list_remove(&kept->link);
		free(kept->stripes);
		free(kept);
	}
	free(job->first_stripes ? job->first_stripes : job->stripes);
	free(job->moves);
	free(job->moved_before);
}

/* -- Going over --------------------------------------------------------------------------------------------------- */

static void tell(struct pipeline_job *job, struct peer *peer)
{
	size_t n = pipeline_move_n(job);
	_cleanup_(freep) uint32_t *copy = calloc(n, sizeof(copy[0]));
	struct data_header header = {
		.op = DATA_MOVE,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->data_epoch,
		.len = (uint32_t)(n * sizeof(copy[0])),
	};

	if (!copy)
		return;
	memcpy(copy, job->moves, n * sizeof(copy[0]));
	data_moves_swap(copy, n);
	/* Without memory it hears of it from another node, or when this one attaches there again. */
	if (!FAILPOINT_DROPS("move-sent"))
		(void)peer_notice(peer, &header, copy);
}

void pipeline_move_tell_all(struct pipeline_job *job)
{
	for (size_t i = 0; i < job->n_servers; i++) {
		struct peer *peer = pipeline_setup_peer(job, i);

		if (peer)
			tell(job, peer);
	}
}

/* A server has what it has of a push_pull_rows from all nodes or from none: it cannot be had again. */
static void fail_rows(struct pipeline_job *job)
{
	struct pipeline_round *round, *open;
	struct failure failure;

	do {
		open = NULL;
		list_for_each (round, &job->rounds, job_link) {
			if (!round->rows || round->state != ROUND_MOVING || round->failure.status)
				continue;
			open = round;
			break;
		}
		if (!open)
			break;
		(void)failure_set(
			&failure, -ECONNRESET,
			"tensor %s, round %llu: its servers changed while it was under way",
			open->tensor->name, (unsigned long long)open->number);
		pipeline_round_fail(open, &failure, true);
	} while (open);
}

/* Parts that wait for a server wait for that which is theirs now. */
static void sort_parked(struct pipeline_job *job)
{
	struct pipeline_part *part;
	struct list all;

	list_init(&all);
	for (size_t i = 0; i < job->n_servers; i++) {
		while ((part = list_first(&job->servers[i].parked, struct pipeline_part, wait))) {
			list_remove(&part->wait);
			list_push_back(&all, &part->wait);
		}
	}
	while ((part = list_first(&all, struct pipeline_part, wait))) {
		list_remove(&part->wait);
		pipeline_keep_park(part);
	}
}

static void go_over(struct pipeline_job *job, const char *why)
{
	uint64_t now_ns = clock_now_ns();
	struct failure failure;

	job->data_epoch = data_moves_epoch(job->view->epoch, job->moves, pipeline_move_n(job));
	job->n_moved++;
	if (deal(job) || pipeline_move_home(job, job->moves, &job->home_number)) {
		(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->name);
		pipeline_job_fail(job, &failure, NULL);
		return;
	}
	log_notice("job %s: goes on with %zu of %zu servers: %s", job->name,
		   pipeline_move_n_in(job), job->n_servers, why);
	pipeline_job_hold(job);
	if (!pipeline_elastic_moved(job, why)) {
		pipeline_job_release(job);
		return;
	}
	job->home = NULL;
	for (size_t i = 0; i < job->n_servers; i++) {
		struct pipeline_server *server = &job->servers[i];
		bool is_in = pipeline_move_is_in(job, i);

		if (!is_in && server->outlet && !server->outlet->lost)
			tell(job, server->outlet->peer);
		pipeline_keep_detach(job, i);
		server->lost_ns = is_in ? (server->lost_ns ? server->lost_ns : now_ns) : 0;
		server->gone &= is_in;
		server->return_ns = 0;
		(void)loop_timer_set(job->pipeline->params.loop, &server->timer,
				     is_in ? now_ns : now_ns + RETURN_NS);
	}
	sort_parked(job);
	fail_rows(job);
	pipeline_elastic_go_on(job, why);
	FAILPOINT("job-moved");
	pipeline_job_release(job);
}

void pipeline_move_unite(struct pipeline_job *job, const uint32_t *moves, size_t n, const char *why)
{
	if (job->state == JOB_OVER || job->suspended || !job->moves || n != pipeline_move_n(job))
		return;
	if (data_moves_unite(job->moves, moves, n, job->n_servers))
		go_over(job, why);
}

void pipeline_move_notice(struct pipeline_job *job, const struct data_header *header,
			  const void *payload)
{
	size_t n = header->len / sizeof(uint32_t);
	_cleanup_(freep) uint32_t *moves = calloc(MAX(n, (size_t)1), sizeof(moves[0]));

	if (!moves)
		return;
	memcpy(moves, payload, n * sizeof(moves[0]));
	data_moves_swap(moves, n);
	pipeline_move_unite(job, moves, n, "so says a server");
}

bool pipeline_move_without(struct pipeline_job *job, size_t number, const char *why)
{
	_cleanup_(freep) uint32_t *moves = NULL;
	bool other = false;

	/* Who reaches none of the others is itself cut off. */
	for (size_t i = 0; job->moves && i < job->n_servers; i++)
		other |= i != number && job->servers[i].attached;
	moves = other ? calloc(pipeline_move_n(job), sizeof(moves[0])) : NULL;
	if (!moves)
		return false;
	moves[number] = job->moves[number] + 1;
	pipeline_move_unite(job, moves, pipeline_move_n(job), why);
	return true;
}

/* -- Coming back -------------------------------------------------------------------------------------------------- */

void pipeline_move_look(struct pipeline_job *job, size_t number)
{
	struct pipeline_server *server = &job->servers[number];
	_cleanup_(freep) uint32_t *moves = NULL;

	/* One node is enough. */
	if (!pipeline_elastic_is_first(job))
		return;
	server->return_ns =
		MIN(MAX(2 * server->return_ns, (uint64_t)RETURN_NS), (uint64_t)RETURN_MAX_NS);
	(void)loop_timer_set(job->pipeline->params.loop, &server->timer,
			     clock_now_ns() + server->return_ns);
	moves = job->state == JOB_RUNNING ? calloc(pipeline_move_n(job), sizeof(moves[0])) : NULL;
	if (!moves)
		return;
	memcpy(moves, job->moves, pipeline_move_n(job) * sizeof(moves[0]));
	moves[number]++;
	(void)pipeline_setup_ask_back(job, number, moves);
}

void pipeline_move_back(struct pipeline_job *job, size_t number)
{
	_cleanup_(freep) uint32_t *moves = NULL;

	if (pipeline_move_is_in(job, number))
		return;
	moves = calloc(pipeline_move_n(job), sizeof(moves[0]));
	if (!moves)
		return;
	moves[number] = job->moves[number] + 1;
	pipeline_move_unite(job, moves, pipeline_move_n(job), "one is back");
}
