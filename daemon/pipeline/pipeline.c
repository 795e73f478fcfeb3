/*
 * Makes and frees the agent, with its metrics, and the table of what lower files call above them;
 * passes notices and lost peers to the jobs that
 * they concern, and has the transport register trainers' memory. daemon.c and control/ call.
 */
#include "pipeline/pipeline.h"
#include "pipeline/device.h"
#include "pipeline/part.h"
#include "pipeline/rows.h"
#include "proto/text.h"

static void init_job(struct pipeline_job *job)
{
	pipeline_later_init(job);
	pipeline_forget_init(job);
}

static void close_job(struct pipeline_job *job)
{
	pipeline_setup_close(job);
	pipeline_device_close(job);
}

static void free_job(struct pipeline_job *job)
{
	struct pipeline_round *round;
	struct map_entry *entry;

	list_for_each (round, &job->rounds, job_link)
		pipeline_round_drop(round);
	for (entry = job->resumption.resumed ? map_first(&job->tensors.by_name) : NULL; entry;
	     entry = map_next(&job->tensors.by_name, entry))
		free(container_of(entry, struct pipeline_tensor, entry)->pasts);
	map_done(&job->tensors.by_name);
	pipeline_lend_done(job);
	pipeline_keep_done(job);
	pipeline_ordinal_done(job);
	pipeline_setup_free(job);
	pipeline_device_free(job);
}

static const struct pipeline_hooks hooks = {
	.made = init_job,
	.opens = pipeline_setup_open,
	.joins = pipeline_setup_join,
	.runs = pipeline_elastic_formed,
	.begun = pipeline_add_look,
	.fails = pipeline_setup_fail_job,
	.is_over = close_job,
	.freed = free_job,
	.news = pipeline_sweep,
	.member_gone = pipeline_tensor_detach,
	.rank_gone = pipeline_elastic_drop,
	.rank_gone_early = pipeline_elastic_drop_forming,
	.rank_is_late = pipeline_elastic_drop_late,
	.ranks_recalled = pipeline_elastic_recall,
	.ranks_out = pipeline_elastic_moved,
	.ranks_left_behind = pipeline_elastic_go_on,
	.ranks_settle = pipeline_elastic_settle,
	.regroups = pipeline_setup_regroup,
	.newcomer_waits = pipeline_seek,
	.newcomer_gone = pipeline_seek_changed,
	.newcomers_gone = pipeline_seek_close,
	.attaches_again = pipeline_setup_reattach,
	.servers_recalled = pipeline_setup_recall,
	.join_withdrawn = pipeline_setup_withdraw,
	.rows_ended = pipeline_rows_outcome,
	.rounds_known = pipeline_round_settle,
	.peer_of = pipeline_setup_peer,
	.look_for_servers = pipeline_move_look_again,
	.describe_gpu = pipeline_direct_describe,
	.tensor_known = pipeline_tensor_agreed,
	.part = { .waits = pipeline_part_choose,
		  .let_go = pipeline_part_unhold,
		  .fed = pipeline_part_feed,
		  .goes_on = pipeline_part_unpark,
		  .turn = pipeline_part_begin },
	.rows_begin_anew = pipeline_rows_lost,
	.round_may_begin = pipeline_round_can_begin_part,
	.round_turn = pipeline_round_refill,
	.round_later = pipeline_round_go_on,
	.tensor_later = pipeline_round_advance,
	.round_without_them = pipeline_round_mend,
};

static void metrics_init(struct pipeline *pipeline)
{
	pipeline->requests = (struct metric){
		.name = "bps_requests_total",
		.help = "Requests of trainers that have ended, well or not",
	};
	pipeline->failed = (struct metric){
		.name = "bps_requests_failed_total",
		.help = "Requests of trainers that have ended with an error",
	};
	pipeline->bytes = (struct metric){
		.name = "bps_agent_bytes_total",
		.help = "Bytes of parts completed for trainers of this node",
	};
	pipeline->parts = (struct metric){
		.name = "bps_agent_parts",
		.help = "Parts under way for trainers of this node",
		.is_gauge = true,
	};
	pipeline->parts_done = (struct metric){
		.name = "bps_agent_parts_total",
		.help = "Parts completed for trainers of this node",
	};
	pipeline->copied = pipeline->copied_rows = (struct metric)METRIC_COPIED;
	metric_register(&pipeline->requests);
	metric_register(&pipeline->failed);
	metric_register(&pipeline->bytes);
	metric_register(&pipeline->parts);
	metric_register(&pipeline->parts_done);
	metric_register(&pipeline->copied);
	metric_register(&pipeline->copied_rows);
	arrivals_spread_init(&pipeline->spread, "bps_rank_spread_seconds",
			     "Between the first and the last rank of a node to come to a round.");
}

int pipeline_new(const struct pipeline_params *params, struct pipeline **ret_pipeline)
{
	struct pipeline *pipeline = calloc(1, sizeof(*pipeline));

	if (!pipeline)
		return error_origin(-ENOMEM);
	pipeline->params = *params;
	pipeline->hooks = &hooks;
	list_init(&pipeline->jobs);
	list_init(&pipeline->newcomers);
	list_init(&pipeline->seeks);
	list_init(&pipeline->outlets);
	metrics_init(pipeline);
	*ret_pipeline = pipeline;
	return 0;
}

static void on_buffer_leaving(struct buffer *buffer)
{
	transport_memory_remove(buffer->leaving_user, buffer->data);
}

int pipeline_buffer_shared(struct pipeline *pipeline, struct buffer *buffer)
{
	struct transport *transport = pipeline->params.transport;
	int r;

	if (!transport || buffer->device)
		return 0;
	r = transport_memory_add(transport, buffer->data, (size_t)buffer->len);
	if (r)
		return error_trace(r);
	buffer->leaving = on_buffer_leaving;
	buffer->leaving_user = transport;
	return 0;
}

unsigned pipeline_buffer_regions(const struct pipeline *pipeline, const struct buffer *buffer)
{
	struct transport *transport = pipeline->params.transport;

	return transport && !buffer->device ? transport_memory_regions(transport, buffer->data) : 0;
}

void pipeline_close(struct pipeline *pipeline)
{
	struct pipeline_job *job;
	struct failure failure;

	pipeline->closed = true;
	(void)failure_set(&failure, -ESHUTDOWN, "the daemon is stopping");
	list_for_each (job, &pipeline->jobs, link) {
		pipeline_job_fail(job, &failure, NULL);
		pipeline_sweep_finish(job);
		pipeline_later_finish(job);
	}
	pipeline_elastic_close(pipeline, &failure);
}

struct pipeline *pipeline_free(struct pipeline *pipeline)
{
	struct pipeline_job *job, *next;

	if (!pipeline)
		return NULL;
	if (pipeline->reaping)
		loop_unpost(pipeline->params.loop, &pipeline->reap);
	list_for_each_safe (job, next, &pipeline->jobs, link)
		(void)pipeline_job_free(job);
	metric_unregister(&pipeline->requests);
	metric_unregister(&pipeline->failed);
	metric_unregister(&pipeline->bytes);
	metric_unregister(&pipeline->parts);
	metric_unregister(&pipeline->parts_done);
	metric_unregister(&pipeline->copied);
	metric_unregister(&pipeline->copied_rows);
	arrivals_spread_done(&pipeline->spread);
	map_done(&pipeline->waiting);
	free(pipeline);
	return NULL;
}

static bool uses(const struct pipeline_job *job, const struct peer *peer)
{
	if (job->fleet.home == peer)
		return true;
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		if (job->fleet.servers[i].outlet && job->fleet.servers[i].outlet->peer == peer)
			return true;
	return false;
}

/*
 * Whether a peer is a server of the job, in it now or not. Who connects to us tells its own name and id, so that such a peer is none,
 * whatever it says that it is: a server answers where we have called it.
 */
static bool serves(const struct pipeline_job *job, const struct peer *peer)
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

static void released(struct pipeline_job *job, const struct peer *peer, uint32_t number)
{
	for (size_t i = 0; job->retention.keeps && i < job->fleet.n_servers; i++) {
		struct pipeline_server *server = &job->fleet.servers[i];

		if (server->attached && server->outlet->peer == peer)
			pipeline_keep_released(server, number);
	}
}

void pipeline_notice_arrived(struct pipeline *pipeline, struct peer *peer,
			     const struct data_header *header, const void *payload)
{
	struct pipeline_job *job;
	struct failure failure;

	if (header->op != DATA_FAIL_JOB && header->op != DATA_RELEASE && header->op != DATA_MOVE &&
	    header->op != DATA_NEWCOMERS && header->op != DATA_LEFT &&
	    header->op != DATA_STOPPING && header->op != DATA_ORDINAL)
		return;
	list_for_each (job, &pipeline->jobs, link) {
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
			pipeline_move_notice(job, header, payload);
			return;
		}
		if (header->op == DATA_LEFT) {
			pipeline_left_heard(job, header->left_node);
			return;
		}
		if (header->op == DATA_ORDINAL) {
			if (header->status)
				read_failure(header, payload, &failure);
			pipeline_ordinal_heard(job, header, payload,
					       header->status ? &failure : NULL);
			return;
		}
		if (!uses(job, peer))
			continue;
		if (header->op == DATA_STOPPING) {
			pipeline_left_stopping(job, peer);
			return;
		}
		if (header->op == DATA_RELEASE) {
			if (!job->placement.n_moved || header->epoch == job->placement.data_epoch)
				released(job, peer, (uint32_t)header->up_to);
			return;
		}
		if (header->op == DATA_NEWCOMERS) {
			if (job->fleet.home == peer)
				job->membership.n_guests =
					(uint32_t)MIN(header->n_newcomers, (uint64_t)JOB_RANKS_MAX);
			return;
		}
		read_failure(header, payload, &failure);
		pipeline_job_fail(job, &failure, peer);
		return;
	}
	/* Of a job that is over, or goes without that server. */
	if (header->op == DATA_STOPPING)
		pipeline_left_tell_idle(peer, header->job, header->node);
}

void pipeline_peer_lost(struct pipeline *pipeline, struct peer *peer, const char *why)
{
	struct pipeline_outlet *outlet;
	struct pipeline_job *job;
	struct failure failure;

	(void)failure_set(&failure, -ECONNRESET, "server %s was lost: %s", peer_name(peer), why);
	list_for_each (job, &pipeline->jobs, link) {
		if (job->state == JOB_OVER || !uses(job, peer))
			continue;
		if (job->retention.keeps && (job->state == JOB_RUNNING || job->resumption.resumed ||
					     job->membership.regrouped))
			pipeline_keep_peer_lost(job, peer, why);
		else
			pipeline_job_fail(job, &failure, peer);
	}
	list_for_each (outlet, &pipeline->outlets, link)
		if (outlet->peer == peer)
			outlet->lost = true;
}
