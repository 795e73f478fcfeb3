/*
 * A job at this server as an object: made, found by number, woken for its deadlines, ended, and
 * remembered with the reason. form.c and attach.c make jobs; the job's timer and whichever file
 * meets a failure end them.
 */
#include "server/job.h"

#include "base/clock.h"
#include "base/log.h"
#include "server/accumulate.h"
#include "server/keep.h"
#include "server/quorum.h"
#include "server/round.h"
#include "server/store.h"
#include <stdio.h>

#define GRACE_MS 1000

/* All its deadlines are here; each handler deals with its own that have passed. */
static uint64_t job_deadline(const struct job *job)
{
	uint64_t at;

	if (job->state == JOB_FORMING)
		return job->since_ns + job->join_timeout_ms * NSEC_PER_MSEC;
	at = MIN(declare_deadline(job), round_deadline(job));
	at = MIN(at, attach_lost_deadline(job));
	at = MIN(at, accumulate_deadline(job));
	at = MIN(at, quorum_deadline(job));
	at = MIN(at, job->regroup_by_ns);
	return MIN(at, job->attach_by_ns);
}

static void job_expired(struct loop_timer *timer)
{
	struct job *job = container_of(timer, struct job, timer);
	struct failure failure = { 0 };
	uint64_t now = clock_now_ns(), at;

	if (job->state == JOB_FORMING && job_deadline(job) <= now) {
		form_expired(job);
		return;
	}
	if (job->state == JOB_RUNNING) {
		declare_expired(job, now);
		round_expired(job, now);
		accumulate_expired(job, now);
		if (!quorum_expired(job))
			return;
		if (job->regroup_by_ns <= now)
			regroup_expired(job);
		if (job->attach_by_ns <= now) {
			attach_expired(job);
			return;
		}
		if (attach_lost_deadline(job) <= now) {
			attach_lost_expired(job, now);
			return;
		}
	}
	at = job_deadline(job);
	if (at == CLOCK_NEVER || !job_wake_by(job, at))
		return;
	(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->name);
	job_fail(job, &failure, NULL);
}

int job_wake_by(struct job *job, uint64_t at_ns)
{
	if (job->timer.loop && job->timer.at_ns <= at_ns)
		return 0;
	return error_trace(loop_timer_set(job->server->params.loop, &job->timer, at_ns));
}

uint64_t job_patience_ns(const struct job *job)
{
	return (job->request_timeout_ms + GRACE_MS) * NSEC_PER_MSEC;
}

int job_new(struct server *server, const char *name, uint32_t size, uint32_t n_nodes,
	    struct job **ret_job, struct failure *failure)
{
	_cleanup_(job_freep) struct job *job = NULL;

	if (server->n_jobs >= server->params.max_jobs)
		return failure_set(failure, -EDQUOT,
				   "job %s: this server has %u jobs already, its max_jobs", name,
				   server->n_jobs);
	job = calloc(1, sizeof(*job));
	if (job) {
		job->node_of_rank = malloc(size * sizeof(*job->node_of_rank));
		job->nodes = calloc(n_nodes, sizeof(*job->nodes));
		job->quota = job_quota_take(server->params.job_quota_bytes);
	}
	if (!job || !job->node_of_rank || !job->nodes || !job->quota)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", name);

	job->server = server;
	job->size = size;
	job->n_nodes = n_nodes;
	job->attach_by_ns = CLOCK_NEVER;
	job->regroup_by_ns = CLOCK_NEVER;
	job->next_key = 1;
	job->timer.expired = job_expired;
	for (uint32_t i = 0; i < size; i++)
		job->node_of_rank[i] = NODE_NONE;
	(void)snprintf(job->name, sizeof(job->name), "%s", name);
	list_init(&job->declaring);
	list_init(&job->open);
	list_init(&job->summing);
	list_init(&job->held);
	list_init(&job->kept);
	list_init(&job->spare);
	list_init(&job->spare_rounds);
	list_init(&job->accumulators);
	list_init(&job->late);
	list_init(&job->guests);
	list_push_back(&server->jobs, &job->link);
	server->n_jobs++;
	*ret_job = TAKE_PTR(job);
	return 0;
}

static void lose_number(struct job *job)
{
	struct server *server = job->server;

	map_remove(&server->numbers, &job->entry);
	if (server->found == job)
		server->found = NULL;
}

struct job *job_free(struct job *job)
{
	if (!job)
		return NULL;
	if (job->server) {
		loop_timer_cancel(&job->timer);
		keep_end(job);
		list_remove(&job->link);
		if (job->state == JOB_RUNNING)
			lose_number(job);
		if (job->state != JOB_OVER && !job->succeeded)
			job->server->n_jobs--;
		store_free(job);
	}
	while (job->server && !list_empty(&job->guests))
		guest_free(list_first(&job->guests, struct guest, link));
	for (uint32_t i = 0; job->nodes && i < job->n_nodes; i++) {
		(void)join_free(job->nodes[i].join);
		free(job->nodes[i].sent.slots);
	}
	job_quota_give(job->quota);
	(void)arrivals_free(job->arrivals);
	free(job->nodes);
	free(job->node_of_rank);
	free(job->moves);
	free(job->joined);
	free(job);
	return NULL;
}

bool job_yield(struct job *job)
{
	struct job *other;

	list_for_each (other, &job->server->jobs, link)
		if (other->state == JOB_RUNNING && other->succeeded &&
		    !strcmp(other->name, job->name))
			return false;
	job->succeeded = true;
	job->server->n_jobs--;
	return true;
}

void job_take_back(struct job *job)
{
	if (job->state == JOB_OVER || !job->succeeded)
		return;
	job->succeeded = false;
	job->server->n_jobs++;
}

int job_start(struct job *job, uint64_t number)
{
	int r = 0;

	if (job->n_nodes > 1)
		r = arrivals_new(job->name, "node", NULL, job->n_nodes, &job->server->spread,
				 &job->arrivals);
	if (!r)
		r = map_add(&job->server->numbers, number, &job->entry);
	if (r)
		return error_trace(r);
	job->number = number;
	job->state = JOB_RUNNING;
	return 0;
}

struct job *job_find(struct server *server, uint64_t number)
{
	struct job *found = server->found;
	struct map_entry *entry;

	/* One contribution after another is of one job. */
	if (found && found->number == number)
		return found;
	entry = map_find(&server->numbers, number);
	if (!entry)
		return NULL;
	return server->found = container_of(entry, struct job, entry);
}

const struct failure *job_over(const struct server *server, uint64_t number)
{
	for (unsigned i = 0; number && i < SERVER_OVER; i++) {
		if (server->over[i].number == number)
			return &server->over[i].failure;
	}
	return NULL;
}

void job_over_remember(struct server *server, uint64_t number, const struct failure *failure)
{
	if (!number || job_over(server, number))
		return;
	server->over[server->next_over] = (struct over){ .number = number, .failure = *failure };
	server->next_over = (server->next_over + 1) % SERVER_OVER;
}

void job_over_moved(struct server *server, uint64_t number)
{
	for (unsigned i = 0; i < SERVER_OVER; i++)
		if (server->over[i].number == number)
			server->over[i].moved = true;
}

bool job_over_return(struct server *server, uint64_t number)
{
	for (unsigned i = 0; number && i < SERVER_OVER; i++) {
		if (server->over[i].number != number)
			continue;
		if (!server->over[i].moved)
			return false;
		server->over[i].number = 0;
	}
	return true;
}

void job_retire(struct job *job, const struct failure *failure)
{
	struct server *server = job->server;

	if (job->state == JOB_RUNNING)
		lose_number(job);
	job->state = JOB_OVER;
	job->failure = *failure;
	if (!job->succeeded)
		server->n_jobs--;
	loop_timer_cancel(&job->timer);
}

/* From here on nobody finds it, but the reason. */
static void job_close(struct job *job, const struct failure *failure)
{
	if (job->state == JOB_RUNNING)
		job_over_remember(job->server, job->number, failure);
	job_retire(job, failure);
}

void job_dismiss(struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *joining = TAKE_PTR(job->nodes[i].joining);

		if (joining)
			delivery_fail(joining, job->failure.status, job->failure.text);
		rejoin_end(&job->nodes[i], job->failure.status, job->failure.text);
	}
	guest_end(job);
	declare_end(job);
	store_end(job);
	job_release(job);
}

static void tell(struct job *job, struct peer *peer)
{
	struct data_header header = {
		.op = DATA_FAIL_JOB,
		.job = job->number,
		.status = -job->failure.status,
		.len = (uint32_t)strlen(job->failure.text),
	};

	/* It has to learn of it one way or the other. */
	if (peer_notice(peer, &header, job->failure.text))
		peer_kill(peer, "out of memory");
}

void job_fail(struct job *job, const struct failure *failure, const struct peer *except)
{
	bool ran = job->state == JOB_RUNNING;

	if (job->state == JOB_OVER)
		return;
	job_close(job, failure);
	log_notice("job %s (%s) is over: %s", job->name, ran ? "running" : "forming",
		   failure->text);
	for (uint32_t i = 0; ran && i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];

		if (node->peer && node->peer != except && !node->left)
			tell(job, node->peer);
	}
	job_dismiss(job);
}

void job_end(struct job *job, const struct failure *failure)
{
	if (job->state == JOB_OVER)
		return;
	job_close(job, failure);
	job_dismiss(job);
}

void job_release(struct job *job)
{
	if (job->state == JOB_OVER && !job->n_summing)
		(void)job_free(job);
}

void job_hold(struct job *job)
{
	job->n_summing++;
}

void job_let_go(struct job *job)
{
	job->n_summing--;
	job_release(job);
}

/* Agents tell how much time is left, not what was asked for: 59.998 s is 60 s. */
const char *job_seconds_text(uint64_t ms, struct seconds_text *ret_text)
{
	double seconds = (double)ms / 1000;

	(void)snprintf(ret_text->text, sizeof(ret_text->text), seconds < 10 ? "%.3g" : "%.0f",
		       seconds);
	return ret_text->text;
}

uint32_t job_node_of(const struct job *job, const struct peer *peer)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		if (job->nodes[i].peer == peer)
			return i;
	}
	return NODE_NONE;
}

const char *job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text)
{
	struct ranks_text ranks;

	ranks_init(&ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		if (job->node_of_rank[i] == node)
			ranks_add(&ranks, i);
	}
	(void)snprintf(ret_text->text, sizeof(ret_text->text), "%s (node %u)", ranks_end(&ranks),
		       node);
	return ret_text->text;
}
