/*
 * Where calls, notices and lost peers come in: each is taken to the job it is for, if its sender
 * may speak for the node. Also draining, and what operators are told of jobs. daemon.c makes the
 * server and calls from the transport's callbacks.
 */
#include "server/server.h"

#include "base/clock.h"
#include "base/log.h"
#include "server/job/forget.h"
#include "server/job/job.h"
#include "server/job/relief.h"
#include "server/job/store.h"
#include "server/round/accumulate.h"
#include "server/round/keep.h"
#include "server/round/offered.h"
#include "server/round/quorum.h"
#include "server/round/round.h"
#include "server/round/rows.h"
#include <stdio.h>

static void free_job(struct job *job)
{
	keep_end(job);
	forget_done(job);
	follow_free(job);
	accumulate_free(job);
	store_free(job);
	spending_done(&job->store.spending);
	while (!list_empty(&job->membership.joiners))
		joiner_free(list_first(&job->membership.joiners, struct joiner, link));
}

static void fail_slot(struct slot *slot, int status, const char *text)
{
	rows_fail(slot, status, text);
	keep_fail(slot, status, text);
}

static void free_slot(struct slot *slot)
{
	quorum_count_all(slot);
	keep_forget(slot);
	slot->rows = rows_free(slot);
}

/* In the order in which they are gone along. */
static const struct sweep_stage stages[] = {
	{ offsetof(struct job, store.kept), SWEEP_NEWS, keep_visit, slot_end },
	/* Whom it concerns has been answered. */
	{ offsetof(struct job, store.held), SWEEP_NEWS, rows_visit, slot_end_answered },
	{ offsetof(struct job, store.open), SWEEP_NEWS | SWEEP_TIME, round_visit, slot_end },
	{ offsetof(struct job, store.late), 0, NULL, slot_end_answered },
	{ offsetof(struct job, store.failing), 0, NULL, round_failing_end },
	{ offsetof(struct job, store.accumulators), SWEEP_NEWS | SWEEP_TIME, accumulate_visit,
	  accumulate_end },
	{ offsetof(struct job, names.declaring), SWEEP_NEWS | SWEEP_TIME, declare_visit,
	  declare_end },
	{ offsetof(struct job, names.forgetting), SWEEP_NEWS, forget_visit, forget_end },
	{ offsetof(struct job, names.early), 0, NULL, forget_end_early },
	{ offsetof(struct job, names.declarations), 0, NULL, declaration_end },
	{ offsetof(struct job, store.parts), 0, NULL, part_end },
	{ offsetof(struct job, store.all_tensors), 0, NULL, tensor_end },
	{ offsetof(struct job, store.mentioned), 0, NULL, tensor_end },
	{ offsetof(struct job, store.forgotten), SWEEP_NEWS, tensor_visit, tensor_end },
	{ offsetof(struct job, store.dropping), 0, NULL, tensor_end },
};

static void peers_lost(struct job *job)
{
	if (job->state == JOB_FORMING) {
		form_lost(job, NULL);
	} else {
		joiner_lost(job);
		attach_lost(job);
	}
}

static const struct server_hooks hooks = {
	.lost_deadline = attach_lost_deadline,
	.lost_expired = attach_lost_expired,
	.form_is_late = form_expired,
	.attach_is_late = attach_expired,
	.regroup_is_late = regroup_expired,
	.peers_lost = peers_lost,
	.job_over = joiner_end,
	.job_freed = free_job,
	.without_departed = elastic_without_departed,
	.without_missing = elastic_without_missing,
	.slot_failed = fail_slot,
	.slot_freed = free_slot,
	.carried_freed = quorum_drop,
	.stages = stages,
	.n_stages = ARRAY_SIZE(stages),
};

static void metric_start(struct metric *metric, const char *name, const char *help)
{
	metric->name = name;
	metric->help = help;
	metric_register(metric);
}

int server_new(const struct server_params *params, struct server **ret_server)
{
	struct server *server = calloc(1, sizeof(*server));

	if (!server)
		return error_origin(-ENOMEM);
	server->params = *params;
	server->hooks = &hooks;
	list_init(&server->jobs);
	list_init(&server->joins);
	list_init(&server->to_hear);
	metric_start(&server->bytes_summed, "bps_server_bytes_summed_total",
		     "Bytes of contributions that were summed here.");
	metric_start(&server->rounds, "bps_server_part_rounds_total",
		     "Rounds of parts completed here.");
	metric_start(&server->rounds_failed, "bps_server_rounds_failed_total",
		     "Rounds of tensors that failed here.");
	metric_start(&server->late, "bps_server_contributions_late_total",
		     "Contributions that came twice, or to a round that was over.");
	metric_start(&server->carried, "bps_server_contributions_carried_total",
		     "Contributions that came too late for their round and are in the next.");
	server->copied = (struct metric)METRIC_COPIED;
	metric_register(&server->copied);
	arrivals_spread_init(&server->spread, "bps_node_spread_seconds",
			     "Between the first and the last node to come to a round here.");
	*ret_server = server;
	return 0;
}

void server_close(struct server *server)
{
	struct failure failure = { 0 };
	struct job *job, *tmp;

	server->closed = true;
	(void)failure_set(&failure, -ESHUTDOWN, "the server is shutting down");
	form_joins_end(server, &failure);
	list_for_each_safe (job, tmp, &server->jobs, link) {
		job_hold(job);
		job_end(job, &failure);
		sweep_finish(job);
		job_let_go(job);
	}
}

struct server *server_free(struct server *server)
{
	struct job *job, *tmp;

	if (!server)
		return NULL;
	server_close(server);
	list_for_each_safe (job, tmp, &server->jobs, link)
		(void)job_free(job);
	loop_abort(&server->hear);
	map_done(&server->numbers);
	metric_unregister(&server->bytes_summed);
	metric_unregister(&server->rounds);
	metric_unregister(&server->rounds_failed);
	metric_unregister(&server->late);
	metric_unregister(&server->carried);
	metric_unregister(&server->copied);
	arrivals_spread_done(&server->spread);
	free(server);
	return NULL;
}

/*
 * The running job that a call names, if its sender may speak for the node that the header names.
 * Else it is refused.
 */
static struct job *job_of_call(struct server *server, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct job *job = job_find(server, h->job);
	const struct failure *over = job ? NULL : job_over(server, h->job);
	struct failure failure;

	if (job && !move_is_current(job, h))
		refuse(delivery, -ESHUTDOWN, "job %s: it goes on with other servers",
		       job->owner.name);
	else if (job && attach_check(job, delivery->peer, h->node, &failure))
		delivery_fail(delivery, failure.status, failure.text);
	else if (job) {
		job->nodes[h->node].spoke = true;
		return job;
	} else if (over)
		delivery_fail(delivery, over->status, over->text);
	else
		delivery_fail(delivery, -EPROTO, "this server has no such job");
	return NULL;
}

static void pushed(struct job *job, struct delivery *delivery)
{
	if (job->nodes[delivery->header.node].attached)
		round_contribute(job, delivery);
	else
		refuse(delivery, -EPROTO, "job %s: node %u has not attached", job->owner.name,
		       delivery->header.node);
}

/* Another daemon was asked for it, by somebody who may. */
static void drain_call(struct server *server, struct delivery *delivery)
{
	struct data_header answer = { .op = DATA_OK };

	log_notice("%s asks for this server to be drained", peer_name(delivery->peer));
	server_drain(server, &answer.block, &answer.part);
	delivery_answer(delivery, &answer, NULL, NULL);
}

void server_call_arrived(struct server *server, struct delivery *delivery)
{
	struct job *job;

	if (server->closed) {
		delivery_fail(delivery, -ESHUTDOWN, "the server is shutting down");
		return;
	}
	switch (delivery->header.op) {
	case DATA_JOIN:
		form_join(server, delivery);
		return;
	case DATA_ATTACH:
		attach_call(server, delivery);
		return;
	case DATA_DECLARE:
		job = job_of_call(server, delivery);
		if (job)
			declare_call(job, delivery);
		return;
	case DATA_FORGET:
		job = job_of_call(server, delivery);
		if (job)
			forget_call(job, delivery);
		return;
	case DATA_PUSH:
		relief_for(server, delivery->peer);
		job = job_of_call(server, delivery);
		if (job)
			pushed(job, delivery);
		return;
	case DATA_OFFER:
		relief_for(server, delivery->peer);
		job = job_of_call(server, delivery);
		if (job)
			keep_offer(job, delivery);
		return;
	case DATA_PULL:
		job = job_of_call(server, delivery);
		if (job)
			rows_pull(job, delivery);
		return;
	case DATA_DRAIN:
		drain_call(server, delivery);
		return;
	default:
		delivery_fail(delivery, -EPROTO, "not a call that a server answers");
		return;
	}
}

/* Several nodes may be of one peer: ranks that are nodes of their own. */
static uint32_t node_of_notice(const struct job *job, const struct peer *peer,
			       const struct data_header *header)
{
	if (header->node < job->n_nodes && job->nodes[header->node].peer == peer)
		return header->node;
	return job_node_of(job, peer);
}

void server_notice_arrived(struct server *server, struct peer *peer,
			   const struct data_header *header, const void *payload)
{
	struct job *job = job_find(server, header->job);
	struct failure failure = { 0 };
	uint32_t node;

	if (server->closed)
		return;
	if (header->op == DATA_FAIL_JOB || header->op == DATA_FAIL_ROUND ||
	    (header->op == DATA_FOLLOW && header->status))
		notice_decode(header, payload, &failure);
	if (!job) {
		/* It may have overtaken the attach, which then must not begin the job again. */
		if (header->op == DATA_FAIL_JOB)
			job_over_hear(server, header, &failure);
		return;
	}
	/*
	 * Whoever is not a node of the job has no say; other servers of it say the same things to
	 * this daemon's agent.
	 */
	node = node_of_notice(job, peer, header);
	if (node == NODE_NONE || job->nodes[node].departed)
		return;
	if (header->op == DATA_FAIL_JOB)
		job_fail(job, &failure, peer);
	else if (header->op == DATA_FAIL_ROUND && header->operation == OPERATION_ACCUMULATE) {
		accumulate_give_up(job, node, header->key, header->round, &failure);
	} else if (header->op == DATA_FAIL_ROUND) {
		rows_give_up(job, node, header->key, header->round);
		round_refused(job, header, &failure);
	} else if (header->op == DATA_MOVE) {
		move_notice(job, peer, header, payload);
	} else if (header->op == DATA_ACK && move_is_current(job, header)) {
		(void)keep_ack(job, node, (uint32_t)header->up_to);
	} else if (header->op == DATA_OFFERED && move_is_current(job, header)) {
		offered_said(job, node, header);
	} else if (header->op == DATA_HAVE && move_is_current(job, header)) {
		rows_give_up(job, node, header->key, header->round);
		keep_acknowledged(job, node, header);
	} else if (header->op == DATA_IDLE) {
		job->nodes[node].idle = job->nodes[node].asked;
	} else if (header->op == DATA_LEAVE) {
		leave_call(job, node, header);
	} else if (header->op == DATA_LEFT) {
		leave_heard(job, header->departed_node);
	} else if (header->op == DATA_KEEP && move_is_current(job, header)) {
		forget_not(job, header->key);
	} else if (header->op == DATA_NAMED && move_is_current(job, header)) {
		forget_named(job, node, header->key);
	} else if (header->op == DATA_ORDINAL) {
		ordinal_heard(job, node, header, payload);
	} else if (header->op == DATA_BLOCKED) {
		deadlock_heard(job, node, header, payload);
	} else if (header->op == DATA_FOLLOW) {
		follow_heard(job, node, header, header->status ? &failure : NULL);
	} else if (header->op == DATA_BEGUN) {
		follow_begun(job, node, header, payload);
	}
}

void server_peer_lost(struct server *server, struct peer *peer, const char *why)
{
	struct job *job;

	(void)why; /* peer_loss() */
	list_for_each (job, &server->jobs, link)
		if (job_peer_find(job, peer) || joiner_is(job, peer))
			job_is_to_hear(job);
}

void server_drain(struct server *server, uint32_t *ret_moved, uint32_t *ret_stay)
{
	struct job *job, *tmp;
	uint32_t moved = 0, stay = 0;

	server->draining = true;
	list_for_each_safe (job, tmp, &server->jobs, link) {
		if (job->state != JOB_RUNNING || job->attachment.n < job->n_nodes)
			continue;
		if (move_drain(job))
			moved++;
		else
			stay++;
	}
	*ret_moved = moved;
	*ret_stay = stay;
}

size_t server_stop(struct server *server)
{
	struct job *job;
	size_t n = 0;

	list_for_each (job, &server->jobs, link)
		if (job->state == JOB_RUNNING)
			n += leave_stop(job);
	return n;
}

static const char *joining_text(const struct job *job, struct ranks_text *ret_missing)
{
	ranks_init(ret_missing);
	for (uint32_t i = 0; i < job->size; i++) {
		if (job->node_of_rank[i] == NODE_NONE)
			ranks_add(ret_missing, i);
	}
	return ranks_end(ret_missing);
}

static void waiting_text(const struct job *job, char *buffer, size_t len)
{
	const struct slot *oldest = list_first(&job->store.open, struct slot, in_job);
	uint64_t since_ns = job->forming.since_ns;
	struct ranks_text missing;
	char what[128];

	if (job->state == JOB_FORMING) {
		(void)snprintf(what, sizeof(what), "%.100s to join", joining_text(job, &missing));
	} else if (job->state == JOB_RUNNING && oldest) {
		round_waiting_text(oldest, what, sizeof(what));
		since_ns = oldest->since_ns;
	} else {
		return;
	}
	(void)snprintf(buffer, len, "%s for %.1f s", what,
		       (double)(clock_now_ns() - since_ns) / NSEC_PER_SEC);
}

static void job_info(const struct job *job, struct server_job_info *info)
{
	static const char *const states[] = {
		[JOB_FORMING] = "forming",
		[JOB_RUNNING] = "running",
		[JOB_OVER] = "failed",
	};

	*info = (struct server_job_info){
		.number = job->number,
		.state = states[job->state],
		.size = job->size,
		.n_nodes = job->n_nodes,
		.rounds = job->n_rounds,
		.bytes = job->n_bytes,
		.in_flight =
			job->store.n_open + job->store.n_summing - job->store.spending.has_begun,
	};
	(void)snprintf(info->name, sizeof(info->name), "%s", job->owner.name);
	waiting_text(job, info->waiting_for, sizeof(info->waiting_for));
}

int server_jobs(struct server *server, struct server_job_info **ret_jobs, size_t *ret_n)
{
	struct server_job_info *infos;
	struct job *job;
	size_t n = 0;

	list_for_each (job, &server->jobs, link)
		n++;
	infos = calloc(MAX(n, (size_t)1), sizeof(*infos));
	if (!infos)
		return error_origin(-ENOMEM);
	n = 0;
	list_for_each (job, &server->jobs, link)
		job_info(job, &infos[n++]);
	*ret_jobs = infos;
	*ret_n = n;
	return 0;
}

void server_each_job(const struct server *server,
		     void (*each)(void *user, const char *name, uint64_t number), void *user)
{
	const struct job *job;

	list_for_each (job, &server->jobs, link)
		each(user, job->owner.name, job->number);
}

uint64_t server_n_changes(const struct server *server)
{
	return server->n_changes;
}

int server_arrivals(struct server *server, const char *name, struct arrivals_info **ret_arrivals,
		    size_t *ret_n)
{
	struct arrivals_info *infos;
	struct job *job, *found = NULL;
	size_t n;

	list_for_each (job, &server->jobs, link)
		if (job->arrivals && job_is_called(job->owner.name, job->number, name))
			found = job;
	n = found ? found->n_nodes : 0;
	infos = calloc(MAX(n, (size_t)1), sizeof(*infos));
	if (!infos)
		return error_origin(-ENOMEM);
	if (found)
		arrivals_info(found->arrivals, infos);
	*ret_arrivals = infos;
	*ret_n = n;
	return 0;
}
