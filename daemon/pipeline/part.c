/*
 * A part's life: it is made for its round, set going here or towards a server, and ends, well or not. round.c starts and
 * drops parts; what happens between is in work.c (sums and copies), push.c (to a server and back) and device.c.
 */
#include "pipeline/part.h"
#include "pipeline/deal.h"
#include "pipeline/device.h"
#include "pipeline/rows.h"
#include <inttypes.h>

static struct pipeline_job *job_of(const struct pipeline_part *part)
{
	return part->job;
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

/* The next one that is made is likely this: its beginning, and its end. */
static _fetches_ void fetch_next(const struct pipeline_job *job)
{
	const struct pipeline_part *next =
		container_of(job->memory.spare_parts.next, struct pipeline_part, link);

	fetch_to_write(next, offsetof(struct pipeline_part, call.text));
	fetch_to_write(&next->late, CACHE_LINE);
}

static int part_new(struct pipeline_round *round, const struct extent *extent,
		    struct pipeline_part **ret_part)
{
	struct pipeline_job *job = round->job;
	struct pipeline_part *part =
		list_first(&job->memory.spare_parts, struct pipeline_part, link);
	uint32_t n = job->layout.n_local;

	if (part) {
		list_remove(&part->link);
		fetch_next(job);
	} else {
		part = bulk_take(&job->memory.bulk,
				 sizeof(*part) + 4 * n * sizeof(part->pointers[0]));
		if (!part)
			return error_origin(-errno);
		part->inputs = (const void **)part->pointers;
		part->outputs = &part->pointers[n];
		part->piece = (const void **)&part->pointers[2 * n];
		part->staged = &part->pointers[3 * n];
	}
	part->round = round;
	part->job = job;
	part->extent = *extent;
	part->state = PART_NEW;
	part->outlet = NULL;
	part->room = NULL;
	part->remote = part->stored = part->posted = part->again = false;
	part->out_of_range = false;
	part->n_copied = 0;
	part->cell = LEDGER_NO_CELL;
	part->is_straight = false;
	part->number = 0;
	part->unsent = 0;
	list_init(&part->wait);
	list_push_back(&round->parts, &part->link);
	round->n_parts++;
	job->n_in_flight++;
	metric_count(&job->pipeline->parts, 1);
	pipeline_job_hold(job);
	*ret_part = part;
	return 0;
}

void pipeline_part_left(struct pipeline_part *part)
{
	pipeline_deal_left(part->round, part->unsent);
	part->unsent = 0;
}

/* The result is kept, or another node does that until all say that they have it: whoever is to know that, is told. */
static void tell_stored(struct pipeline_part *part)
{
	struct pipeline_server *server = pipeline_part_server(part);
	struct pipeline_job *job = job_of(part);
	unsigned operation = part->extent.source != RANK_ALL || part->extent.target != RANK_ALL;

	if (part->cell != LEDGER_NO_CELL) {
		struct ledger_kept *kept = ledger_cell_kept(job->resumption.ledger, part->cell);

		kept->busy = false;
		pipeline_roll_stored(job, part->cell);
		/* One of the daemon before was offered when we attached. */
		if (kept->stale)
			return;
	}
	if (part->number && part->attachment == server->attachment)
		pipeline_keep_stored(server, part->number, part->cell, part->extent.len, operation);
	else if (part->cell != LEDGER_NO_CELL)
		pipeline_keep_offer(job, part->cell);
	if (part->cell != LEDGER_NO_CELL)
		pipeline_roll_resolve(job, part->cell);
}

/*
 * Whether the cell of a part whose round fails goes when all nodes have the result, as any. One that was lent does, whether we have
 * heard of the result or not: others may have been told that it is kept.
 */
static bool outlives_round(const struct pipeline_part *part, bool is_numbered)
{
	const struct ledger_kept *kept =
		ledger_cell_kept(job_of(part)->resumption.ledger, part->cell);

	return kept->whole &&
	       (is_numbered || kept->stale ||
		!(part->round->gate.on || stragglers_any(&job_of(part)->shape.stragglers)));
}

/* Of a cell and a number: also of a part whose round has failed the server is to hear, or it waits for that number. */
static void let_go(struct pipeline_part *part)
{
	struct pipeline_server *server = pipeline_part_server(part);
	struct ledger *ledger = job_of(part)->resumption.ledger;
	bool is_numbered = part->number && part->attachment == server->attachment;
	uint32_t cell = LEDGER_NO_CELL;

	if (part->stored && (part->cell != LEDGER_NO_CELL || part->is_straight)) {
		tell_stored(part);
		return;
	}
	if (part->cell != LEDGER_NO_CELL && outlives_round(part, is_numbered)) {
		struct ledger_kept *kept = ledger_cell_kept(ledger, part->cell);

		kept->busy = false;
		if (is_numbered)
			cell = part->cell;
		else if (!kept->stale)
			pipeline_keep_offer(job_of(part), part->cell);
	} else if (part->cell != LEDGER_NO_CELL) {
		pipeline_keep_free(job_of(part), part->cell);
	}
	if (is_numbered)
		pipeline_keep_stored(server, part->number, cell, 0, false);
}

void pipeline_part_end(struct pipeline_part *part)
{
	struct pipeline_round *round = part->round;
	struct pipeline_job *job = job_of(part);
	bool was_unsent;

	if (round->ledger.ledger && !round->gate.on && !job->resumption.suspended &&
	    (part->stored || !job->distributed))
		ledger_round_advance(&round->ledger, part->ledger.number);
	if (job->retention.keeps && !job->resumption.suspended)
		let_go(part);
	if (!round->failure.status) {
		job->n_bytes += part->extent.len;
		metric_count(&job->pipeline->bytes, part->extent.len);
		metric_count(&job->pipeline->parts_done, 1);
	}
	metric_count(&job->pipeline->copied, part->n_copied);
	part->block = block_unref(part->block);
	pipeline_device_give(part);
	was_unsent = part->unsent;
	pipeline_part_left(part);
	list_remove(&part->link);
	list_push_front(&job->memory.spare_parts, &part->link);
	job->n_in_flight--;
	metric_uncount(&job->pipeline->parts, 1);
	if (round->rows)
		pipeline_rows_part_end(part);
	pipeline_round_part_done(round);
	if (was_unsent)
		pipeline_deal(job);
	pipeline_job_release(job);
}

void pipeline_part_drop(struct pipeline_part *part)
{
	if (part->charged && part->outlet) {
		pipeline_part_left(part);
		pipeline_outlet_sent(part->outlet, part);
		pipeline_outlet_pump(part->outlet);
	}
	pipeline_part_end(part);
}

void pipeline_part_fail(struct pipeline_part *part, int status, const char *text)
{
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s, round %" PRIu64 ": %s",
			  part->round->tensor->name, part->round->number, text);
	pipeline_round_fail(part->round, &failure, true);
	pipeline_part_drop(part);
}

/* -- On this node alone ------------------------------------------------------------------------------------------- */

static void on_local_done(struct task *task)
{
	struct pipeline_part *part = container_of(task, struct pipeline_part, task);

	part->posted = false;
	pipeline_device_up(part);
}

static void work_local(struct pipeline_part *part)
{
	pipeline_part_set_inputs(part);
	pipeline_part_set_outputs(part);
	pipeline_part_post(part, on_local_done);
}

static void start_local(struct pipeline_part *part)
{
	part->state = PART_SCATTER;
	pipeline_device_down(part, true, false, work_local);
}

/* -- Starting ------------------------------------------------------------------------------------------------------ */

static bool needs_server(const struct pipeline_part *part)
{
	const struct layout *layout = &job_of(part)->layout;
	const struct extent *extent = &part->extent;

	if (!job_of(part)->distributed)
		return false;
	/* What goes from one rank to one other of the same node need not leave it. */
	return extent->source == RANK_ALL || extent->target == RANK_ALL ||
	       layout->node_of_rank[extent->source] != layout->node_of_rank[extent->target];
}

void pipeline_part_unpark(struct pipeline_part *part)
{
	part->outlet = pipeline_part_server(part)->outlet;
	if (pipeline_outlet_push(part->outlet, part))
		pipeline_part_fail(part, -ENOMEM, "out of memory");
}

int pipeline_part_start(struct pipeline_round *round, const struct extent *extent, uint64_t number)
{
	struct ledger_part ledger = { 0 };
	struct pipeline_part *part = NULL;
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
	pipeline_part_choose(part);
	if (round->job->retention.keeps && pipeline_part_start_stale(part))
		return 0;
	part->state = PART_QUEUED;
	if (!pipeline_part_server(part)->attached) {
		pipeline_keep_park(part);
		return 0;
	}
	part->outlet = pipeline_part_server(part)->outlet;
	/* Our own server takes nothing over a wire. */
	if ((pipeline_part_is_rows(part) || pipeline_part_is_from_here(part)) &&
	    !peer_is_self(part->outlet->peer)) {
		part->unsent = extent->len;
		pipeline_deal_queued(part->round, part->unsent);
	}
	r = pipeline_outlet_push(part->outlet, part);
	if (r) {
		pipeline_part_end(part);
		return error_trace(r);
	}
	pipeline_outlet_pump(part->outlet);
	return 0;
}

void pipeline_part_drop_queued(struct pipeline_round *round)
{
	struct pipeline_job *job = round->job;
	struct pipeline_part *part, *next;
	bool feeding = job->retention.feeding;

	/* Cells go to others when all are through: they may be for parts of this round. */
	job->retention.feeding = true;
	list_for_each_safe (part, next, &round->parts, link) {
		if (part->state == PART_HELD) {
			round->n_held--;
			ledger_cell_free(job->resumption.ledger, part->cell);
			part->cell = LEDGER_NO_CELL;
		} else if ((part->state == PART_QUEUED || part->state == PART_CALL) &&
			   list_linked(&part->wait)) { /* for its server, or for a cell */
			list_remove(&part->wait);
		} else if (part->state == PART_QUEUED) {
			pipeline_outlet_remove(part->outlet, part);
		} else if (part->state != PART_SCATTERED) {
			continue;
		}
		pipeline_part_end(part);
	}
	job->retention.feeding = feeding;
	if (job->state != JOB_OVER)
		pipeline_keep_feed(job);
}
