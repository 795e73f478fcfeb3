/*
 * Which of its servers a job goes on with: bps-recovery(7), CHANGE OF SERVERS. A server that was lost for good, or drains, is
 * left out; one that is back is taken in again. Each node knows how often each server has gone and come, and unites that with
 * what others say: whoever knows as much has the same placement and home, so nothing has to be decided, and no boundary agreed
 * on. Then all is as if every server's process were another: nodes attach, offer the results that not all nodes may have, and
 * push what they have no result of. Results are functions of the contributions alone; so it does not matter where, or how
 * often, a sum is made.
 */
#include "agent/round/part.h"
#include "base/failpoint.h"
#include "base/log.h"

#define RETURN_NS \
	NSEC_PER_SEC /* when it is looked first whether a server is back; then later and later */
#define RETURN_MAX_NS (60 * NSEC_PER_SEC)

bool agent_move_is_dropped(const struct agent_job *job, size_t server)
{
	const struct view *view = cluster_view(job->agent->params.cluster);

	if (!view)
		return false;
	for (size_t i = 0; i < view->n_members; i++)
		if (agent_add_is(&job->fleet.servers[server], &view->members[i]))
			return false;
	return true;
}

size_t agent_move_n(const struct agent_job *job)
{
	return job->fleet.n_viewed + (job->shape.elastic ? job->shape.size : 0);
}

size_t agent_move_n_in(const struct agent_job *job)
{
	size_t n = 0;

	for (size_t i = 0; i < job->fleet.n_servers; i++)
		n += agent_placement_has(job, i);
	return n;
}

/* -- Placement ---------------------------------------------------------------------------------------------------- */

/* Each node counts the servers that were added in an order of its own; this one is the same on all. */
static int compare(const struct agent_server *a, const struct agent_server *b)
{
	int r = strcmp(a->member.name, b->member.name);

	return r ? r : strcmp(a->member.address, b->member.address);
}

static int by_server(const void *a, const void *b)
{
	return compare(*(const struct agent_server *const *)a,
		       *(const struct agent_server *const *)b);
}

uint32_t agent_move_number(const struct agent_job *job, size_t server)
{
	size_t number = MIN(server, job->fleet.n_viewed);

	for (size_t i = job->fleet.n_viewed;
	     server >= job->fleet.n_viewed && i < job->fleet.n_servers; i++)
		number += compare(&job->fleet.servers[i], &job->fleet.servers[server]) < 0;
	return (uint32_t)number;
}

/* Deals stripes to the servers that are in. Returns 0 or -errno. */
static int assign_to(const struct agent_job *job, uint16_t *stripes)
{
	size_t n = job->fleet.n_servers, n_in = 0;
	_cleanup_(freep) struct agent_server **in = calloc(n, sizeof(in[0]));
	_cleanup_(freep) struct placement_server *servers = calloc(n, sizeof(servers[0]));
	int r;

	if (!in || !servers)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < n; i++)
		if (agent_placement_has(job, i))
			in[n_in++] = &job->fleet.servers[i];
	qsort(in, n_in, sizeof(in[0]), by_server);
	for (size_t i = 0; i < n_in; i++)
		servers[i] = (struct placement_server){
			.bandwidth_mbps = in[i]->member.bandwidth_mbps,
			.colocated = in[i]->colocated,
		};
	r = placement_assign(servers, n_in, job->shape.n_nodes, stripes, job->placement.n_stripes);
	for (size_t s = 0; !r && s < job->placement.n_stripes; s++)
		stripes[s] = (uint16_t)(in[stripes[s]] - job->fleet.servers);
	return error_trace(r);
}

/* Deals all stripes anew: what is said about data before does not count any more, and nothing is where it was. */
static int assign(struct agent_job *job)
{
	_cleanup_(agent_stripes_unrefp) uint16_t *stripes =
		agent_stripes_new(job->placement.n_stripes);
	int r;

	if (!stripes)
		return error_origin(-ENOMEM);
	r = assign_to(job, stripes);
	if (r)
		return error_trace(r);
	(void)agent_stripes_unref(job->placement.stripes);
	job->placement.stripes = TAKE_PTR(stripes);
	return 0;
}

struct agent_said *agent_move_said(const struct agent_job *job)
{
	size_t n = agent_move_n(job);
	struct agent_said *said = malloc(sizeof(*said) + n * sizeof(said->moves[0]));

	if (!said)
		return NULL;
	said->added = job->placement.added;
	memcpy(said->moves, job->placement.moves, n * sizeof(said->moves[0]));
	return said;
}

uint32_t *agent_move_count(const struct agent_job *job, struct agent_said *said, size_t server)
{
	return server < job->fleet.n_viewed
		       ? &said->moves[server]
		       : &said->added.servers[server - job->fleet.n_viewed].moves;
}

/* Whether a goes better with the job than b, which may be NULL. */
static bool goes_better(const struct agent_job *job, const struct data_added *a,
			const struct data_added *b)
{
	uint64_t score = view_home_score(job->owner.name, a->name);
	uint64_t other = b ? view_home_score(job->owner.name, b->name) : 0;

	return !b || score > other || (score == other && strcmp(a->address, b->address) < 0);
}

/* One that was added does not know the job's view: only where no other is left. */
int agent_move_home(const struct agent_job *job, const struct agent_said *said, size_t *ret_server)
{
	_cleanup_(freep) bool *in = calloc(job->fleet.n_viewed, sizeof(*in));
	const struct data_added *best = NULL;
	const struct view_member *home, *member = NULL;

	if (!in)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < job->fleet.n_viewed; i++)
		in[i] = !(said->moves[i] & 1);
	home = view_home_among(job->fleet.view, job->owner.name, in);
	for (size_t i = 0; home && (member = view_next_server(job->fleet.view, member)); i++)
		if (member == home)
			*ret_server = i;
	for (uint32_t i = 0; !home && i < said->added.n; i++) {
		const struct data_added *server = &said->added.servers[i];

		if ((server->moves & 1) || !goes_better(job, server, best))
			continue;
		best = server;
		*ret_server = job->fleet.n_viewed + i;
	}
	return 0;
}

/* The servers have changed: whose are which stripes, and which is the home. */
static int place(struct agent_job *job)
{
	_cleanup_(freep) struct agent_said *said = agent_move_said(job);
	int r = said ? assign(job) : error_origin(-ENOMEM);

	if (!r)
		r = agent_move_home(job, said, &job->fleet.home_number);
	return error_trace(r);
}

int agent_move_look_soon(struct agent_job *job, size_t server)
{
	return error_trace(loop_timer_set(job->agent->params.loop,
					  &job->fleet.servers[server].timer,
					  clock_now_ns() + RETURN_NS));
}

void agent_move_look_again(struct agent_job *job)
{
	/* Without memory they are looked for when the job goes over next. */
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (!agent_placement_has(job, i))
			(void)agent_move_look_soon(job, i);
	agent_add_look_soon(job);
}

int agent_move_init(struct agent_job *job)
{
	bool moved = false;
	int r = 0;

	job->placement.data_epoch = job->fleet.view->epoch;
	if (!job->retention.keeps)
		return 0;
	job->placement.moves = calloc(agent_move_n(job), sizeof(job->placement.moves[0]));
	if (!job->placement.moves)
		return error_origin(-ENOMEM);
	job->agent->hooks->ranks_recalled(job);
	for (size_t i = 0; job->placement.moved_before && i < job->fleet.n_viewed; i++) {
		job->placement.moves[i] = job->placement.moved_before[i];
		moved |= job->placement.moves[i] > 0;
	}
	if (job->resumption.resumed)
		r = ledger_added_read(job->resumption.ledger, &job->placement.added);
	if (!r)
		r = agent_add_places(job);
	if (!r && (moved || job->placement.added.n))
		r = place(job);
	job->placement.data_epoch = data_moves_epoch(job->fleet.view->epoch, job->placement.moves,
						     agent_move_n(job), &job->placement.added);
	return error_trace(r);
}

void agent_move_done(struct agent_job *job)
{
	(void)agent_stripes_unref(job->placement.stripes);
	free(job->placement.moves);
	free(job->placement.moved_before);
	free(job->fleet.member_of_node);
}

/* -- Going over --------------------------------------------------------------------------------------------------- */

static void tell(struct agent_job *job, struct peer *peer)
{
	size_t n = agent_move_n(job);
	struct data_header header = {
		.op = DATA_MOVE,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->placement.data_epoch,
		.part = job->placement.added.n,
		.len = (uint32_t)data_moves_len(n, &job->placement.added),
	};
	_cleanup_(freep) void *payload = malloc(header.len);

	if (!payload)
		return;
	data_moves_encode(payload, job->placement.moves, n, &job->placement.added);
	/* Without memory it hears of it from another node, or when this one attaches there again. */
	if (!FAILPOINT_DROPS("move-sent"))
		(void)peer_notice(peer, &header, payload);
}

void agent_move_tell_all(struct agent_job *job)
{
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		struct peer *peer = agent_setup_peer(job, i);

		if (peer)
			tell(job, peer);
	}
}

/* Parts that wait for a server wait for that which is theirs now. */
static void sort_parked(struct agent_job *job)
{
	struct agent_part *part;
	struct list all;

	list_init(&all);
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		list_append(&all, &job->fleet.servers[i].parked);
	while ((part = list_first(&all, struct agent_part, wait))) {
		list_remove(&part->wait);
		agent_keep_park(part);
	}
}

static void go_over(struct agent_job *job, const char *why)
{
	uint64_t now_ns = clock_now_ns();
	struct failure failure;

	job->placement.data_epoch = data_moves_epoch(job->fleet.view->epoch, job->placement.moves,
						     agent_move_n(job), &job->placement.added);
	job->placement.n_moved++;
	if (agent_add_places(job) || place(job)) {
		(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->owner.name);
		agent_job_fail(job, &failure, NULL);
		return;
	}
	log_notice("job %s: goes on with %zu of %zu servers: %s", job->owner.name,
		   agent_move_n_in(job), job->fleet.n_servers, why);
	agent_job_hold(job);
	if (!job->agent->hooks->ranks_out(job, why)) {
		agent_job_release(job);
		return;
	}
	job->fleet.home = NULL;
	job->membership.n_joiners = 0;
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		struct agent_server *server = &job->fleet.servers[i];

		if (!agent_placement_has(job, i) && server->send_queue && !server->send_queue->lost)
			tell(job, server->send_queue->peer);
	}
	agent_keep_detach(job, 0, job->fleet.n_servers);
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		struct agent_server *server = &job->fleet.servers[i];
		bool is_in = agent_placement_has(job, i);

		server->lost_ns = is_in ? (server->lost_ns ? server->lost_ns : now_ns) : 0;
		server->gone &= is_in;
		server->return_ns = 0;
		(void)loop_timer_set(job->agent->params.loop, &server->timer,
				     is_in ? now_ns : now_ns + RETURN_NS);
	}
	sort_parked(job);
	job->agent->hooks->goes_on_without(job, why);
	agent_add_look_soon(job);
	FAILPOINT("job-moved");
	agent_job_release(job);
}

static void unite(struct agent_job *job, const uint32_t *moves, size_t n,
		  const struct data_added_set *added, const char *why)
{
	if (job->state == JOB_OVER || job->resumption.suspended || !job->placement.moves ||
	    n != agent_move_n(job))
		return;
	if (data_moves_unite(job->placement.moves, moves, n, job->fleet.n_viewed,
			     &job->placement.added, added))
		go_over(job, why);
}

void agent_move_unite(struct agent_job *job, const uint32_t *moves, size_t n, const char *why)
{
	unite(job, moves, n, NULL, why);
}

void agent_move_take(struct agent_job *job, const struct agent_said *said, const char *why)
{
	unite(job, said->moves, agent_move_n(job), &said->added, why);
}

void agent_move_notice(struct agent_job *job, const struct data_header *header, const void *payload)
{
	size_t n = data_moves_n(header);
	_cleanup_(freep) struct agent_said *said =
		malloc(sizeof(*said) + n * sizeof(said->moves[0]));

	if (said && data_moves_decode(header, payload, said->moves, &said->added))
		unite(job, said->moves, n, &said->added, "so says a server");
}

bool agent_move_without(struct agent_job *job, size_t number, const char *why)
{
	_cleanup_(freep) struct agent_said *said = NULL;
	bool other = false;

	/* Who reaches none of the others is itself cut off. */
	for (size_t i = 0; job->placement.moves && i < job->fleet.n_servers; i++)
		other |= i != number && job->fleet.servers[i].attached;
	said = other ? agent_move_said(job) : NULL;
	if (!said)
		return false;
	++*agent_move_count(job, said, number);
	agent_move_take(job, said, why);
	return true;
}

/* -- Coming back -------------------------------------------------------------------------------------------------- */

void agent_move_look(struct agent_job *job, size_t number)
{
	struct agent_server *server = &job->fleet.servers[number];
	_cleanup_(freep) struct agent_said *said = NULL;

	/* One node is enough. */
	if (!agent_elastic_is_first(job))
		return;
	server->return_ns =
		MIN(MAX(2 * server->return_ns, (uint64_t)RETURN_NS), (uint64_t)RETURN_MAX_NS);
	(void)loop_timer_set(job->agent->params.loop, &server->timer,
			     clock_now_ns() + server->return_ns);
	said = job->state == JOB_RUNNING ? agent_move_said(job) : NULL;
	if (!said)
		return;
	++*agent_move_count(job, said, number);
	(void)agent_setup_ask_back(job, number, said);
}

void agent_move_back(struct agent_job *job, size_t number)
{
	_cleanup_(freep) struct agent_said *said = NULL;

	if (agent_placement_has(job, number))
		return;
	said = agent_move_said(job);
	if (!said)
		return;
	++*agent_move_count(job, said, number);
	agent_move_take(job, said, "one is back");
}
