/*
 * A part's life: it is made for its round, set going here or towards a server, and ends, well or not. round.c starts and
 * drops parts; what happens between is in work.c (sums and copies), push.c (to a server and back) and device.c.
 */
#include "agent/round/part.h"
#include "agent/round/device.h"
#include "agent/round/rows.h"
#include "agent/schedule/scheduler.h"
#include <inttypes.h>

static struct agent_job *job_of(const struct agent_part *part)
{
	return part->job;
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

/* The next one that is made is likely this: its beginning, and its end. */
static _fetches_ void fetch_next(const struct agent_job *job)
{
	const struct agent_part *next =
		container_of(job->memory.spare_parts.next, struct agent_part, link);

	fetch_to_write(next, offsetof(struct agent_part, call.text));
	fetch_to_write(&next->late, CACHE_LINE);
}

static int part_new(struct agent_round *round, const struct extent *extent,
		    struct agent_part **ret_part)
{
	struct agent_job *job = round->job;
	struct agent_part *part = list_first(&job->memory.spare_parts, struct agent_part, link);
	uint32_t n = job->layout.n_local;

	if (part) {
		list_remove(&part->link);
		fetch_next(job);
	} else {
		part = bulk_take(&job->memory.bulk,
				 sizeof(*part) + 4 * n * sizeof(part->pointers[0]) + n);
		if (!part)
			return error_origin(-errno);
		part->inputs = (const void **)part->pointers;
		part->outputs = &part->pointers[n];
		part->piece = (const void **)&part->pointers[2 * n];
		part->staged = &part->pointers[3 * n];
		part->input_dtypes = (uint8_t *)&part->pointers[4 * n];
	}
	part->round = round;
	part->job = job;
	part->extent = *extent;
	part->state = PART_NEW;
	part->send_queue = NULL;
	part->target = NULL;
	part->remote = part->stored = part->posted = part->again = false;
	part->out_of_range = false;
	part->n_copied = 0;
	part->retained = LEDGER_NO_RESULT;
	part->is_straight = false;
	part->number = 0;
	part->unsent = 0;
	list_init(&part->wait);
	list_push_back(&round->parts, &part->link);
	round->n_parts++;
	job->n_in_flight++;
	metric_count(&job->agent->parts, 1);
	agent_job_hold(job);
	*ret_part = part;
	return 0;
}

void agent_part_sent(struct agent_part *part)
{
	agent_schedule_sent(part->round, part->unsent);
	part->unsent = 0;
}

/* The result is kept, or another node does that until all say that they have it: whoever is to know that, is told. */
static void tell_stored(struct agent_part *part)
{
	struct agent_server *server = agent_part_server(part);
	struct agent_job *job = job_of(part);
	unsigned operation = part->extent.source != RANK_ALL || part->extent.target != RANK_ALL;

	if (part->retained != LEDGER_NO_RESULT) {
		struct ledger_kept *kept =
			ledger_result_kept(job->resumption.ledger, part->retained);

		kept->busy = false;
		agent_contributors_stored(job, part->retained);
		/* One of the daemon before was offered when we attached. */
		if (kept->stale)
			return;
	}
	if (part->number && part->attachment == server->attachment)
		agent_keep_stored(server, part->number, part->retained, part->extent.len,
				  operation);
	else if (part->retained != LEDGER_NO_RESULT)
		agent_keep_offer(job, part->retained);
	if (part->retained != LEDGER_NO_RESULT)
		agent_contributors_resolve(job, part->retained);
}

/*
 * Whether the retained result of a part whose round fails goes when all nodes have it, as any. One that a server made in place does,
 * whether this agent has heard of it or not: others may have been told that it is kept.
 */
static bool outlives_round(const struct agent_part *part, bool is_numbered)
{
	const struct ledger_kept *kept =
		ledger_result_kept(job_of(part)->resumption.ledger, part->retained);

	return kept->whole &&
	       (is_numbered || kept->stale ||
		!(part->round->gate.on || stragglers_any(&job_of(part)->shape.stragglers)));
}

/* Lets go of result and number. Also where the round has failed the server is to hear of the number, or it waits for that. */
static void let_go(struct agent_part *part)
{
	struct agent_server *server = agent_part_server(part);
	struct ledger *ledger = job_of(part)->resumption.ledger;
	bool is_numbered = part->number && part->attachment == server->attachment;
	uint32_t retained = LEDGER_NO_RESULT;

	if (part->stored && (part->retained != LEDGER_NO_RESULT || part->is_straight)) {
		tell_stored(part);
		return;
	}
	if (part->retained != LEDGER_NO_RESULT && outlives_round(part, is_numbered)) {
		struct ledger_kept *kept = ledger_result_kept(ledger, part->retained);

		kept->busy = false;
		if (is_numbered)
			retained = part->retained;
		else if (!kept->stale)
			agent_keep_offer(job_of(part), part->retained);
	} else if (part->retained != LEDGER_NO_RESULT) {
		agent_keep_free(job_of(part), part->retained);
	}
	if (is_numbered)
		agent_keep_stored(server, part->number, retained, 0, false);
}

void agent_part_end(struct agent_part *part)
{
	struct agent_round *round = part->round;
	struct agent_job *job = job_of(part);
	bool was_unsent;

	if (round->ledger.ledger && !round->gate.on && !job->resumption.suspended &&
	    (part->stored || !job->distributed))
		ledger_round_advance(&round->ledger, part->ledger.number);
	if (job->retention.keeps && !job->resumption.suspended)
		let_go(part);
	if (!round->failure.status) {
		job->n_bytes += part->extent.len;
		metric_count(&job->agent->bytes, part->extent.len);
		metric_count(&job->agent->parts_done, 1);
	}
	metric_count(&job->agent->copied, part->n_copied);
	agent_part_sate(part);
	part->block = block_unref(part->block);
	agent_device_give(part);
	was_unsent = part->unsent;
	agent_part_sent(part);
	list_remove(&part->link);
	list_push_front(&job->memory.spare_parts, &part->link);
	job->n_in_flight--;
	metric_uncount(&job->agent->parts, 1);
	if (round->rows)
		agent_rows_part_end(part);
	agent_round_part_done(round);
	if (was_unsent)
		agent_schedule_run(job);
	agent_job_release(job);
}

void agent_part_drop(struct agent_part *part)
{
	if (part->charged && part->send_queue) {
		agent_part_sent(part);
		agent_send_queue_sent(part->send_queue, part);
		agent_send_queue_pump(part->send_queue);
	}
	agent_part_end(part);
}

void agent_part_fail(struct agent_part *part, int status, const char *text)
{
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s, round %" PRIu64 ": %s",
			  part->round->tensor->name, part->round->number, text);
	agent_round_fail(part->round, &failure, true);
	agent_part_drop(part);
}

/* -- On this node alone ------------------------------------------------------------------------------------------- */

static void on_local_done(struct task *task)
{
	struct agent_part *part = container_of(task, struct agent_part, task);

	part->posted = false;
	agent_device_up(part);
}

static void work_local(struct agent_part *part)
{
	agent_part_set_inputs(part);
	agent_part_set_outputs(part);
	agent_part_post(part, on_local_done);
}

static void start_local(struct agent_part *part)
{
	part->state = PART_SCATTER;
	agent_device_down(part, true, false, work_local);
}

/* -- Starting ------------------------------------------------------------------------------------------------------ */

static bool needs_server(const struct agent_part *part)
{
	const struct layout *layout = &job_of(part)->layout;
	const struct extent *extent = &part->extent;

	if (!job_of(part)->distributed)
		return false;
	/* What goes from one rank to one other of the same node need not leave it. */
	return extent->source == RANK_ALL || extent->target == RANK_ALL ||
	       layout->node_of_rank[extent->source] != layout->node_of_rank[extent->target];
}

void agent_part_unpark(struct agent_part *part)
{
	part->send_queue = agent_part_server(part)->send_queue;
	if (!agent_send_queue_push(part->send_queue, part))
		return;
	/* It waits nowhere: what fails its round does not end it, too. */
	part->state = PART_NEW;
	agent_part_fail(part, -ENOMEM, "out of memory");
}

int agent_part_start(struct agent_round *round, const struct extent *extent, uint64_t number)
{
	struct ledger_part ledger = { 0 };
	struct agent_part *part = NULL;
	int r = 0;

	if (round->ledger.ledger && !round->job->distributed)
		r = ledger_part_find(&round->ledger, number, extent->len, &ledger);
	if (!r)
		r = part_new(round, extent, &part);
	if (r)
		return error_trace(r);
	part->ledger = ledger;
	part->ledger.number = number;
	round->n_made++;
	if (!needs_server(part)) {
		start_local(part);
		return 0;
	}
	part->remote = true;
	agent_part_choose(part);
	if (round->job->retention.keeps && agent_part_start_stale(part))
		return 0;
	part->state = PART_QUEUED;
	if (!agent_server_takes_parts(agent_part_server(part))) {
		agent_keep_park(part);
		return 0;
	}
	part->send_queue = agent_part_server(part)->send_queue;
	/* Our own server takes nothing over a wire. */
	if ((agent_part_is_rows(part) || agent_part_is_from_here(part)) &&
	    !peer_is_self(part->send_queue->peer)) {
		part->unsent = extent->len;
		agent_schedule_queued(part->round, part->unsent);
	}
	r = agent_send_queue_push(part->send_queue, part);
	if (r) {
		agent_part_end(part);
		return error_trace(r);
	}
	agent_send_queue_pump(part->send_queue);
	return 0;
}

void agent_part_drop_queued(struct agent_round *round)
{
	struct agent_job *job = round->job;
	struct agent_part *part, *next;
	bool feeding = job->retention.feeding;

	/* Memory goes to others when all parts are through: those that wait for it may be of this round. */
	job->retention.feeding = true;
	list_for_each_safe (part, next, &round->parts, link) {
		if (part->state == PART_HELD) {
			round->n_held--;
			ledger_result_free(job->resumption.ledger, part->retained);
			part->retained = LEDGER_NO_RESULT;
		} else if ((part->state == PART_QUEUED || part->state == PART_STARVED) &&
			   list_linked(&part->wait)) { /* for its server, or for memory */
			list_remove(&part->wait);
		} else if (part->state == PART_QUEUED) {
			agent_send_queue_remove(part->send_queue, part);
		} else if (part->state != PART_SCATTERED) {
			continue;
		}
		agent_part_end(part);
	}
	job->retention.feeding = feeding;
	if (job->state != JOB_OVER)
		agent_keep_feed(job);
}
