/*
 * Makes and frees the agent, with its metrics and the table of what lower files call above them.
 * Passes notices and lost peers to the jobs that they concern, and has the transport register
 * trainers' memory. daemon.c and control/ call.
 */
#include "agent/agent.h"
#include "agent/round/device.h"
#include "agent/round/part.h"
#include "agent/round/rows.h"
#include "proto/text.h"

static void init_job(struct agent_job *job)
{
	agent_later_init(job);
	agent_rows_init(job);
	agent_forget_init(job);
}

static void member_gone(struct agent_member *member)
{
	agent_tensor_detach(member);
	agent_follow_gone(member);
}

static void news(struct agent_job *job)
{
	agent_sweep(job);
	agent_follow_look(job);
}

static void close_job(struct agent_job *job)
{
	agent_setup_close(job);
	agent_device_close(job);
}

static void free_job(struct agent_job *job)
{
	struct agent_round *round;
	struct map_entry *entry;

	list_for_each (round, &job->rounds, job_link)
		agent_round_drop(round);
	spending_done(&job->memory.spent_rows);
	for (entry = job->resumption.resumed ? map_first(&job->tensors.by_name) : NULL; entry;
	     entry = map_next(&job->tensors.by_name, entry))
		(void)held_free(container_of(entry, struct agent_tensor, entry)->pasts);
	map_done(&job->tensors.by_name);
	agent_in_place_done(job);
	agent_keep_done(job);
	agent_ordinal_done(job);
	agent_setup_free(job);
	agent_device_free(job);
}

static const struct agent_hooks hooks = {
	.made = init_job,
	.opens = agent_setup_open,
	.joins = agent_setup_join,
	.runs = agent_elastic_formed,
	.begun = agent_add_look,
	.fails = agent_setup_fail_job,
	.is_over = close_job,
	.freed = free_job,
	.news = news,
	.member_gone = member_gone,
	.member_goes = agent_tensor_detach_some,
	.rank_gone = agent_elastic_drop,
	.rank_gone_early = agent_elastic_drop_forming,
	.rank_is_late = agent_elastic_drop_late,
	.ranks_absent = agent_absent_look,
	.ranks_recalled = agent_elastic_recall,
	.ranks_out = agent_elastic_moved,
	.goes_on_without = agent_elastic_go_on,
	.ranks_settle = agent_elastic_settle,
	.regroups = agent_setup_regroup,
	.newcomer_waits = agent_discovery_begin,
	.newcomer_gone = agent_discovery_changed,
	.newcomers_gone = agent_discovery_close,
	.attaches_again = agent_setup_reattach,
	.servers_recalled = agent_setup_recall,
	.join_withdrawn = agent_setup_withdraw,
	.rows_ended = agent_rows_outcome,
	.rounds_known = agent_rounds_settle,
	.servers = { .attached = agent_resync,
		     .peer_of = agent_setup_peer,
		     .look = agent_move_look_again },
	.describe_gpu = agent_direct_describe,
	.tensor_known = agent_tensor_agreed,
	.tensor_settled = agent_forget_settled,
	.part = { .waits = agent_part_choose,
		  .let_go = agent_part_unhold,
		  .fed = agent_part_feed,
		  .goes_on = agent_part_unpark,
		  .turn = agent_part_begin },
	.rows_begin_anew = agent_rows_lost,
	.round_may_begin = agent_round_can_begin_part,
	.round_turn = agent_round_refill,
	.round_later = agent_round_go_on,
	.tensor_later = agent_tensor_go_on,
	.round_without_them = agent_round_mend,
};

static void metrics_init(struct agent *agent)
{
	agent->requests = (struct metric){
		.name = "bps_requests_total",
		.help = "Requests of trainers that have ended, well or not",
	};
	agent->failed = (struct metric){
		.name = "bps_requests_failed_total",
		.help = "Requests of trainers that have ended with an error",
	};
	agent->bytes = (struct metric){
		.name = "bps_agent_bytes_total",
		.help = "Bytes of parts completed for trainers of this node",
	};
	agent->parts = (struct metric){
		.name = "bps_agent_parts",
		.help = "Parts under way for trainers of this node",
		.is_gauge = true,
	};
	agent->parts_done = (struct metric){
		.name = "bps_agent_parts_total",
		.help = "Parts completed for trainers of this node",
	};
	agent->copied = agent->copied_rows = (struct metric)METRIC_COPIED;
	metric_register(&agent->requests);
	metric_register(&agent->failed);
	metric_register(&agent->bytes);
	metric_register(&agent->parts);
	metric_register(&agent->parts_done);
	metric_register(&agent->copied);
	metric_register(&agent->copied_rows);
	arrivals_spread_init(&agent->spread, "bps_rank_spread_seconds",
			     "Between the first and the last rank of a node to come to a round.");
}

int agent_new(const struct agent_params *params, struct agent **ret_agent)
{
	struct agent *agent = calloc(1, sizeof(*agent));

	if (!agent)
		return error_origin(-ENOMEM);
	agent->params = *params;
	agent->hooks = &hooks;
	list_init(&agent->jobs);
	list_init(&agent->newcomers);
	list_init(&agent->discoveries);
	list_init(&agent->send_queues);
	list_init(&agent->absences.waiting);
	metrics_init(agent);
	*ret_agent = agent;
	return 0;
}

static bool on_buffer_leaving(struct buffer *buffer, struct mail *left)
{
	return transport_memory_remove(buffer->leaving_user, buffer->data, left);
}

int agent_buffer_shared(struct agent *agent, struct buffer *buffer)
{
	struct transport *transport = agent->params.transport;
	int r;

	if (!transport || buffer->device)
		return 0;
	/* A session's memory is one owner's. */
	r = transport_memory_add(transport, buffer->quota, buffer->data, (size_t)buffer->len);
	if (r)
		return error_trace(r);
	buffer->leaving = on_buffer_leaving;
	buffer->leaving_user = transport;
	return 0;
}

unsigned agent_buffer_regions(const struct agent *agent, const struct buffer *buffer)
{
	struct transport *transport = agent->params.transport;

	return transport && !buffer->device ? transport_memory_regions(transport, buffer->data) : 0;
}

void agent_close(struct agent *agent)
{
	struct agent_job *job;
	struct failure failure;

	agent->closed = true;
	(void)failure_set(&failure, -ESHUTDOWN, "the daemon is stopping");
	list_for_each (job, &agent->jobs, link) {
		agent_job_fail(job, &failure, NULL);
		agent_sweep_finish(job);
		agent_later_finish(job);
	}
	agent_elastic_close(agent, &failure);
	agent_absent_close(agent);
}

struct agent *agent_free(struct agent *agent)
{
	struct agent_job *job, *next;

	if (!agent)
		return NULL;
	loop_abort(&agent->reap);
	list_for_each_safe (job, next, &agent->jobs, link)
		(void)agent_job_free(job);
	metric_unregister(&agent->requests);
	metric_unregister(&agent->failed);
	metric_unregister(&agent->bytes);
	metric_unregister(&agent->parts);
	metric_unregister(&agent->parts_done);
	metric_unregister(&agent->copied);
	metric_unregister(&agent->copied_rows);
	arrivals_spread_done(&agent->spread);
	map_done(&agent->waiting);
	map_done(&agent->discovered);
	free(agent);
	return NULL;
}

static bool uses(const struct agent_job *job, const struct peer *peer)
{
	if (job->fleet.home == peer)
		return true;
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (job->fleet.servers[i].send_queue &&
		    job->fleet.servers[i].send_queue->peer == peer)
			return true;
	return false;
}

/*
 * Whether a peer is a server of the job, in it now or not. Who connects to us tells its own name and id, so that such a peer is none,
 * whatever it says that it is: a server answers where we have called it.
 */
static bool serves(const struct agent_job *job, const struct peer *peer)
{
	const char *address = peer_called_at(peer);

	if (peer_is_self(peer) || uses(job, peer))
		return true;
	for (size_t i = 0; address && i < job->fleet.n_servers; i++)
		if (!strcmp(job->fleet.servers[i].member.address, address))
			return true;
	return false;
}

/* What a peer says may be anything: its words go to logs and trainers. */
static void read_failure(const struct data_header *header, const void *payload,
			 struct failure *ret_failure)
{
	size_t len = MIN((size_t)header->len, sizeof(ret_failure->text) - 1);

	/* Linux has no larger errno. */
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

static void released(struct agent_job *job, const struct peer *peer, uint32_t number)
{
	for (size_t i = 0; job->retention.keeps && i < job->fleet.n_servers; i++) {
		struct agent_server *server = &job->fleet.servers[i];

		if (server->attached && server->send_queue->peer == peer)
			agent_keep_released(server, number);
	}
}

void agent_notice_arrived(struct agent *agent, struct peer *peer, const struct data_header *header,
			  const void *payload)
{
	struct agent_job *job;
	struct failure failure;

	if (header->op != DATA_FAIL_JOB && header->op != DATA_RELEASE && header->op != DATA_MOVE &&
	    header->op != DATA_NEWCOMERS && header->op != DATA_LEFT &&
	    header->op != DATA_STOPPING && header->op != DATA_ORDINAL &&
	    header->op != DATA_UNUSED && header->op != DATA_OTHERS_FOLLOW &&
	    header->op != DATA_OTHERS_BEGUN && header->op != DATA_BLOCKED)
		return;
	list_for_each (job, &agent->jobs, link) {
		if (!job->distributed || job->number != header->job)
			continue;
		/* Ranks that are nodes of their own are each told. */
		if (header->op != DATA_FAIL_JOB && stragglers_any(&job->shape.stragglers) &&
		    job->shape.node != header->node)
			continue;
		if (!serves(job, peer))
			continue;
		/* The job may have no use for that server just now. */
		if (header->op == DATA_MOVE) {
			agent_move_notice(job, header, payload);
			return;
		}
		if (header->op == DATA_LEFT) {
			agent_departed_heard(job, header->departed_node);
			return;
		}
		if (header->op == DATA_ORDINAL) {
			if (header->status)
				read_failure(header, payload, &failure);
			agent_ordinal_heard(job, header, payload, header->status ? &failure : NULL);
			return;
		}
		if (header->op == DATA_BLOCKED) {
			agent_deadlock_heard(job, header, payload);
			return;
		}
		if (!uses(job, peer))
			continue;
		if (header->op == DATA_STOPPING) {
			agent_departed_stopping(job, peer);
			return;
		}
		if (header->op == DATA_RELEASE) {
			if (!job->placement.n_moved || header->epoch == job->placement.data_epoch)
				released(job, peer, (uint32_t)header->up_to);
			return;
		}
		if (header->op == DATA_UNUSED) {
			if (job->fleet.home == peer)
				agent_forget_with_others(job, header, payload);
			return;
		}
		if (header->op == DATA_OTHERS_FOLLOW || header->op == DATA_OTHERS_BEGUN) {
			if (job->fleet.home != peer)
				return;
			if (header->status)
				read_failure(header, payload, &failure);
			if (header->op == DATA_OTHERS_FOLLOW)
				agent_follow_heard(job, header, header->status ? &failure : NULL);
			else
				agent_follow_begun(job, header, payload);
			return;
		}
		if (header->op == DATA_NEWCOMERS) {
			if (job->fleet.home == peer)
				job->membership.n_joiners =
					(uint32_t)MIN(header->n_newcomers, (uint64_t)JOB_RANKS_MAX);
			return;
		}
		read_failure(header, payload, &failure);
		agent_job_fail(job, &failure, peer);
		return;
	}
	/* Of a job that is over, or goes without that server. */
	if (header->op == DATA_STOPPING)
		agent_departed_tell_idle(peer, header->job, header->node);
}

void agent_peer_lost(struct agent *agent, struct peer *peer, const char *why)
{
	struct agent_send_queue *send_queue;
	struct agent_job *job;
	struct failure failure;

	(void)failure_set(&failure, -ECONNRESET, "server %s was lost: %s", peer_name(peer), why);
	list_for_each (job, &agent->jobs, link) {
		if (job->state == JOB_OVER || !uses(job, peer))
			continue;
		if (job->retention.keeps && (job->state == JOB_RUNNING || job->resumption.resumed ||
					     job->membership.regrouped))
			agent_keep_peer_lost(job, peer, why);
		else
			agent_job_fail(job, &failure, peer);
	}
	list_for_each (send_queue, &agent->send_queues, link)
		if (send_queue->peer == peer)
			send_queue->lost = true;
}
