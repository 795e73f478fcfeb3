/*
 * Rounds of push_pull_rows, step by step as rows.h has them: what goes to which server, what has
 * come back, what is done again after a loss. round.c and push.c call; the work of a step is
 * rows_work.c's, in the pool.
 */
#include "agent/round/rows.h"
#include "agent/schedule/scheduler.h"
#include "base/failpoint.h"
#include <inttypes.h>
#include <stdio.h>

static struct agent_job *job_of(const struct agent_rows *rows)
{
	return rows->round->job;
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

static int no_memory(const struct agent_job *job, int error, struct failure *failure)
{
	uint64_t limit = job->memory.rows.limit;

	if (error != EDQUOT || limit == UINT64_MAX)
		return agent_job_no_memory(job, error, failure);
	return failure_set(failure, -EDQUOT,
			   "rows are too many, or too many operations on rows are in flight: a "
			   "daemon may hold %" PRIu64 " bytes for a job, its job_quota: raise it",
			   limit);
}

static int charge(struct agent_rows *rows, uint64_t n, uint64_t each, struct failure *failure)
{
	uint64_t bytes;

	if (MUL_OVERFLOW(n, each, &bytes) || quota_charge(rows->quota, bytes))
		return failure_set(failure, -EDQUOT,
				   "%" PRIu64 " rows are too many: a daemon may hold %" PRIu64
				   " bytes for a job, its job_quota: raise it, or have fewer "
				   "operations in flight",
				   n, rows->quota->limit);
	rows->charged += bytes;
	return 0;
}

/* To whom rows go now. Returns 0, -EDQUOT or -ENOMEM. */
static int place(struct agent_rows *rows)
{
	const struct agent_tensor *tensor = rows->round->tensor;
	const struct agent_job *job = tensor->job;
	uint64_t group_bytes = MIN(job->part_bytes, ROWS_GROUP_BYTES), n_groups;

	rows->n_servers = job->distributed ? job->fleet.n_servers : 0;
	(void)agent_stripes_unref(rows->stripes);
	rows->stripes = agent_stripes_ref(job->placement.stripes);
	rows->epoch = job->placement.data_epoch;
	rows->servers =
		held_new(rows->quota, MAX(rows->n_servers, (size_t)1) * sizeof(rows->servers[0]));
	if (!rows->servers) {
		rows->n_servers = 0;
		return error_origin(-errno);
	}
	rows->push_step = data_rows_step(job->part_bytes, rows->row_len);
	rows->per_group = MAX(group_bytes / rows->row_len, UINT64_C(1));
	rows->first_stripe = tensor->start / job->part_bytes;
	/* Also of a table without rows somebody sees to it that all have come. */
	n_groups = MAX(rows->n_rows / rows->per_group + !!(rows->n_rows % rows->per_group),
		       UINT64_C(1));
	for (uint64_t i = 0;
	     rows->n_servers && i < MIN(n_groups, (uint64_t)job->placement.n_stripes); i++) {
		struct agent_rows_server *server =
			&rows->servers[rows->stripes[(rows->first_stripe + i) %
						     job->placement.n_stripes]];

		server->in_use = server->due = true;
		server->attempt = rows->attempt;
	}
	return 0;
}

static int rows_new(struct agent_round *round, struct failure *failure)
{
	const struct agent_tensor *tensor = round->tensor;
	struct agent_job *job = tensor->job;
	struct agent_rows *rows = held_new(&job->memory.rows, sizeof(*rows));
	uint64_t n;
	int r;

	if (!rows)
		return no_memory(job, errno, failure);
	round->rows = rows;
	rows->round = round;
	rows->quota = &job->memory.rows;
	rows->attempt = 1;
	rows->width = (uint32_t)agent_round_first(round)->width;
	rows->row_len = rows->width * dtype_size(tensor->dtype);
	rows->n_rows = tensor->elements / rows->width;
	n = agent_rows_n_given(rows);
	r = place(rows);
	if (r)
		return no_memory(job, -r, failure);
	return charge(rows, n, 2 * sizeof(struct reduce_entry) + sizeof(int64_t) + rows->row_len,
		      failure);
}

/* Of what is charged for the rows that were given, what is for pieces to a server. */
static uint64_t pieces_len(const struct agent_rows *rows, const struct agent_rows_server *server)
{
	return server->pieces ? server->n * (sizeof(int64_t) + rows->row_len) : 0;
}

/* charged: for its pieces. */
static void server_spend(struct agent_rows *rows, const struct agent_rows_server *server,
			 uint64_t charged, int64_t *left)
{
	struct spending *spending = &job_of(rows)->memory.spent_rows;
	const struct spent_list pieces = { .blocks = server->pieces, .n = server->n_pieces };
	const struct spent_list results = { server->result_blocks, server->result,
					    server->n_result_pieces };

	spend(spending, &pieces, charged, left);
	spend(spending, &results, server->charged, left);
	rows->charged -= server->charged;
}

/* As if nothing had gone there, or come from there. */
static void server_reset(struct agent_rows *rows, struct agent_rows_server *server, int64_t *left)
{
	uint64_t charged = pieces_len(rows, server);

	/* Others come in their place: they are charged for beside them, as far as there is room. */
	if (quota_charge(rows->quota, charged))
		charged = 0;
	server_spend(rows, server, charged, left);
	*server = (struct agent_rows_server){
		.in_use = server->in_use,
		.due = true,
		.attempt = rows->attempt,
	};
}

struct agent_rows *agent_rows_free(struct agent_rows *rows)
{
	int64_t left = SPENT_NOW;

	if (!rows)
		return NULL;
	list_remove(&rows->jolted);
	for (size_t i = 0; rows->servers && i < rows->n_servers; i++) {
		uint64_t charged = pieces_len(rows, &rows->servers[i]);

		rows->charged -= charged;
		server_spend(rows, &rows->servers[i], charged, &left);
	}
	rows->servers = held_free(rows->servers);
	rows->work = agent_rows_work_free(rows->work);
	(void)agent_stripes_unref(rows->stripes);
	quota_release(rows->quota, rows->charged);
	return held_free(rows);
}

static void on_spending_begun(struct spending *spending)
{
	agent_job_hold(container_of(spending, struct agent_job, memory.spent_rows));
}

static void on_spending_over(struct spending *spending)
{
	struct agent_job *job = container_of(spending, struct agent_job, memory.spent_rows);

	agent_later_begin_starved(job);
	agent_job_release(job);
}

void agent_rows_init(struct agent_job *job)
{
	struct spending *spending = &job->memory.spent_rows;

	spending_init(spending, job->agent->params.loop);
	spending->quota = &job->memory.rows;
	spending->begun = on_spending_begun;
	spending->over = on_spending_over;
}

/* -- From step to step -------------------------------------------------------------------------------------------- */

static void fail(struct agent_rows *rows, int status, const char *text)
{
	const struct agent_round *round = rows->round;
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s, round %" PRIu64 ": %s", round->tensor->name,
			  round->number, text);
	if (status == -EPROTO)
		agent_job_fail(job_of(rows), &failure, NULL);
	else
		agent_round_fail(rows->round, &failure, true);
}

static void on_done(struct task *task)
{
	struct agent_rows *rows = container_of(task, struct agent_rows, task);
	struct agent_job *job = job_of(rows);

	rows->working = false;
	if (job->resumption.suspended && job->distributed)
		return;
	if (rows->step == ROWS_MERGE)
		FAILPOINT("rows-merged");
	if (rows->status && !rows->round->failure.status)
		fail(rows, rows->status, *rows->text ? rows->text : strerror(-rows->status));
	agent_round_part_done(rows->round);
	agent_job_release(job);
}

static void begin_task(struct agent_rows *rows, void (*run)(struct task *task), uint64_t n_rows)
{
	struct agent *agent = job_of(rows)->agent;
	/* All local ranks may have room for them. */
	uint64_t n_copies =
		run == agent_rows_merge || !rows->n_servers ? job_of(rows)->layout.n_local : 1;
	uint64_t bytes = n_rows * (sizeof(int64_t) + rows->row_len) * n_copies;

	agent_job_hold(job_of(rows));
	rows->round->n_parts++;
	rows->task.run = run;
	rows->task.done = on_done;
	rows->task.priority = rows->round->turn.priority;
	rows->task.flow = job_of(rows)->number;
	rows->task.cost = MIN(bytes / ROWS_LOOK_COST + n_rows, ROWS_LOOKS) * ROWS_LOOK_COST;
	rows->working = true;
	if (bytes > agent->params.inline_bytes || rows->round->turn.stalls) {
		/* The task may have run before it returns. */
		int r = pool_post(agent->params.pool, &rows->task);

		if (!r)
			return;
		rows->status = r;
	} else {
		task_run(&rows->task);
	}
	on_done(&rows->task);
}

static void begin_parts(struct agent_rows *rows, uint64_t first_piece)
{
	rows->next_server = 0;
	rows->next_piece = first_piece;
	rows->round->turn.cut = false;
	agent_schedule_add(rows->round);
	agent_round_refill(rows->round);
}

/* -- Until all have it -------------------------------------------------------------------------------------------- */

static bool any_lost(const struct agent_rows *rows)
{
	for (size_t i = 0; i < rows->n_servers; i++)
		if (rows->servers[i].lost)
			return true;
	return false;
}

bool agent_rows_is_past(const struct agent_part *part)
{
	const struct agent_rows *rows = part->round->rows;

	return rows->has_result || part->extent.block >= rows->n_servers ||
	       rows->servers[part->extent.block].attempt != part->attempt;
}

/*
 * Whether nothing is under way that the next step has to wait for. While a server is to be given its rows anew that is not what
 * waits at others for other nodes: they may wait for us there.
 */
static bool is_idle(const struct agent_rows *rows)
{
	const struct agent_round *round = rows->round;
	const struct agent_part *part;
	unsigned n = round->n_parts - rows->agreeing;
	bool lost = any_lost(rows);

	if (!n || rows->working || (!lost && !rows->repeats))
		return !n;
	list_for_each (part, &round->parts, link) {
		const struct agent_rows_server *server;

		if (!agent_part_is_rows(part) || part->state != PART_CALL)
			continue;
		if (agent_rows_is_past(part)) {
			n--;
			continue;
		}
		server = &rows->servers[part->extent.block];
		n -= server->lost ||
		     ((rows->step == ROWS_SORT || (rows->step == ROWS_PUSH && lost)) &&
		      part->extent.part + UINT64_C(1) == server->n_pieces);
	}
	return !n;
}

/* The rows of servers that were lost once more; of all, where they belong to others now. */
static bool sort_again(struct agent_rows *rows)
{
	const struct agent_job *job = job_of(rows);
	struct agent_round *round = rows->round;
	struct failure failure, words;
	int64_t left = SPENT_NOW;
	int r;

	rows->repeats = true;
	rows->attempt++;
	if (rows->stripes != job->placement.stripes || rows->n_servers != job->fleet.n_servers) {
		for (size_t i = 0; i < rows->n_servers; i++)
			server_reset(rows, &rows->servers[i], &left);
		rows->servers = held_free(rows->servers);
		spending_make_room(&job_of(rows)->memory.spent_rows,
				   MAX(job->fleet.n_servers, (size_t)1) * sizeof(rows->servers[0]));
		r = place(rows);
		if (r) {
			(void)no_memory(job, -r, &words);
			agent_round_describe(round, &failure, r, "%s", words.text);
			agent_round_fail(round, &failure, true);
			return false;
		}
	} else {
		for (size_t i = 0; i < rows->n_servers; i++) {
			struct agent_rows_server *server = &rows->servers[i];

			/* Also what was sorted, and is not pushed yet. */
			server->due &= rows->step <= ROWS_SORT;
			if (server->lost || server->due)
				server_reset(rows, server, &left);
		}
	}
	rows->step = ROWS_SORT;
	begin_task(rows, agent_rows_sort, agent_rows_n_given(rows));
	return true;
}

/* A part without data, of which all nodes have to bring one. */
static bool begin_agreeing(struct agent_rows *rows)
{
	const struct extent extent = {
		.block = DATA_ROWS_DONE,
		.source = RANK_ALL,
		.target = RANK_ALL,
	};
	struct agent_round *round = rows->round;
	struct failure failure;
	int r;

	rows->agreeing = true;
	/* It may be over before the call returns. */
	round->n_parts++;
	r = agent_part_start(round, &extent, 0);
	round->n_parts--;
	if (!r)
		return !rows->agreed;
	rows->agreeing = false;
	agent_round_describe(round, &failure, r, "%s", strerror(-r));
	agent_round_fail(round, &failure, true);
	return false;
}

/* The result is in the outputs here. Returns false when there is nothing more to do. */
static bool agree(struct agent_rows *rows)
{
	struct agent_round *round = rows->round;
	struct agent_tensor *tensor = round->tensor;
	struct failure failure;

	if (!tensor->job->retention.keeps)
		return false;
	if (agent_resume_record_rows(round, &failure)) {
		agent_round_fail(round, &failure, true);
		return false;
	}
	rows->has_result = true;
	FAILPOINT("rows-recorded");
	for (size_t i = 0; i < rows->n_servers; i++)
		if (rows->servers[i].in_use)
			agent_acknowledged_rows(tensor, round->number, i);
	return begin_agreeing(rows);
}

void agent_rows_part_end(const struct agent_part *part)
{
	struct agent_rows *rows = part->round->rows;

	if (agent_part_is_rows(part))
		return;
	rows->agreeing = false;
	rows->agreed = part->stored;
	if (!rows->agreed)
		return;
	FAILPOINT("rows-agreed");
	/* What is done for others nobody needs any more. */
	agent_part_drop_queued(part->round);
}

void agent_rows_part_lost(struct agent_part *part)
{
	struct agent_rows *rows = part->round->rows;

	if (part->extent.block < rows->n_servers &&
	    rows->servers[part->extent.block].attempt == part->attempt)
		rows->servers[part->extent.block].lost = true;
	agent_part_end(part);
}

/* Those that wait for it are of an old cut. */
static void drop_queued(struct agent_round *round, size_t first, size_t n)
{
	struct agent_part *part, *next;

	list_for_each_safe (part, next, &round->parts, link) {
		if (!agent_part_is_rows(part) || part->server - first >= n ||
		    part->state != PART_QUEUED)
			continue;
		if (list_linked(&part->wait))
			list_remove(&part->wait);
		else
			agent_send_queue_remove(part->send_queue, part);
		agent_part_end(part);
	}
}

/* Returns whether any is in use. */
static bool lose(struct agent_rows *rows, size_t first, size_t n)
{
	bool any = false;

	for (size_t i = first; i < MIN(first + n, rows->n_servers); i++) {
		rows->servers[i].lost |= rows->servers[i].in_use;
		any |= rows->servers[i].in_use;
	}
	return any;
}

void agent_rows_lost(struct agent_job *job, size_t first, size_t n)
{
	struct list jolted = LIST_INIT(jolted);
	struct agent_round *round;
	struct agent_rows *rows;

	if (!job->retention.keeps || job->resumption.suspended)
		return;
	list_for_each (round, &job->schedule.moving, moving_link) {
		rows = round->rows;
		if (!rows || round->failure.status || rows->agreed || !lose(rows, first, n))
			continue;
		/* Out of an outer call's list, if the loss of another server has led here. */
		list_remove(&rows->jolted);
		list_push_back(&jolted, &rows->jolted);
	}
	while ((rows = list_first(&jolted, struct agent_rows, jolted))) {
		list_remove(&rows->jolted);
		round = rows->round;
		/* Not finished under our feet. */
		round->n_parts++;
		drop_queued(round, first, n);
		agent_round_part_done(round);
	}
}

uint32_t agent_rows_flags(const struct agent_rows *rows)
{
	return (rows->repeats ? DATA_ROWS_AGAIN : 0) | (rows->has_result ? DATA_ROWS_HAS : 0);
}

bool agent_rows_continue(struct agent_round *round)
{
	struct agent_rows *rows = round->rows;

	if (round->failure.status || rows->agreed)
		return false;
	if (!is_idle(rows))
		return true;
	if (rows->step == ROWS_MERGE && !rows->has_result && !agree(rows))
		return false;
	if (any_lost(rows))
		return sort_again(rows);
	switch (rows->step) {
	case ROWS_NEW:
		rows->step = ROWS_SORT;
		begin_task(rows, agent_rows_sort, agent_rows_n_given(rows));
		return true;
	case ROWS_SORT:
		if (!rows->n_servers)
			return false;
		rows->step = ROWS_PUSH;
		begin_parts(rows, 0);
		return true;
	case ROWS_PUSH:
		if (rows->has_result)
			break;
		/* Also when nobody here has room for them: servers hold the rest until it has been pulled. */
		rows->step = ROWS_PULL;
		begin_parts(rows, 1);
		return true;
	case ROWS_PULL:
		rows->step = ROWS_MERGE;
		rows->n_result = 0;
		for (size_t i = 0; i < rows->n_servers; i++)
			rows->n_result += rows->servers[i].n_result;
		begin_task(rows, agent_rows_merge, rows->n_result);
		return true;
	default:
		break;
	}
	/* Only the others are waited for. */
	rows->step = ROWS_AGREE;
	return rows->agreeing;
}

/* Pinned as if a part of it were under way. */
static void begin(struct agent_round *round)
{
	const struct agent_job *job = round->job;
	struct failure failure, words;
	int r = rows_new(round, &words);

	if (r == -EDQUOT && spending_is_under_way(&job->memory.spent_rows)) {
		round->rows = agent_rows_free(round->rows);
		agent_later_starved(round);
		return;
	}
	if (r) {
		(void)failure_set(&failure, words.status, "tensor %s, round %" PRIu64 ": %s",
				  round->tensor->name, round->number, words.text);
		agent_round_fail(round, &failure, true);
	} else if (job->retention.keeps) {
		/* By this process or the one before. */
		round->rows->repeats = job->resumption.resumed;
		if (ledger_find_rows(job->resumption.ledger, round->tensor->name, round->number,
				     &round->rows->n_result))
			(void)agree(round->rows);
	}
	agent_round_part_done(round);
}

void agent_rows_start(struct agent_round *round)
{
	agent_schedule_cut(round);
	round->n_parts++;
	/* What waits already is before it. */
	if (list_empty(&round->job->later.starved))
		begin(round);
	else
		agent_later_starved(round);
}

void agent_rows_go_on(struct agent_round *round)
{
	if (round->job->resumption.suspended)
		return;
	if (agent_round_is_failing(round))
		agent_round_part_done(round);
	else
		begin(round);
}

void agent_rows_give_up(struct agent_round *round)
{
	/* It is cut and has no parts, and so is nowhere else by this link. */
	if (round->partition.operation != OPERATION_PUSH_PULL_ROWS || round->rows ||
	    !list_linked(&round->turn.link))
		return;
	list_remove(&round->turn.link);
	round->n_parts--;
}

/* -- Parts -------------------------------------------------------------------------------------------------------- */

bool agent_rows_next(struct agent_rows *rows, struct extent *ret_extent)
{
	bool pull = rows->step == ROWS_PULL;

	for (; rows->next_server < rows->n_servers; rows->next_server++) {
		const struct agent_rows_server *server = &rows->servers[rows->next_server];
		uint64_t n_pieces = pull ? server->n_result_pieces : server->n_pieces;
		uint64_t piece;

		/* Some may have been pulled before another server was lost. */
		while (pull && rows->next_piece < n_pieces &&
		       server->result_blocks[rows->next_piece])
			rows->next_piece++;
		piece = rows->next_piece;
		if ((!pull && !server->due) || server->lost || piece >= n_pieces) {
			rows->next_piece = pull;
			continue;
		}
		*ret_extent = (struct extent){
			.block = (uint32_t)rows->next_server,
			.part = (uint32_t)piece,
			.source = RANK_ALL,
			.target = RANK_ALL,
			.len = pull ? 0 : (uint32_t)server->pieces[piece]->len,
			.total = pull ? 0 : server->pieces[piece]->len,
		};
		rows->next_piece++;
		return true;
	}
	return false;
}

void agent_rows_begin(struct agent_part *part)
{
	struct agent_rows *rows = part->round->rows;
	struct agent_rows_server *server = &rows->servers[part->extent.block];

	part->attempt = server->attempt;
	part->block = rows->step == ROWS_PULL ? NULL : TAKE_PTR(server->pieces[part->extent.part]);
}

/* The first piece of a server's result says how much it is. */
static int begin_result(struct agent_rows *rows, struct agent_rows_server *server,
			const struct data_piece *piece, struct failure *failure)
{
	const uint64_t beside = sizeof(struct block *) + sizeof(*server->result);
	uint64_t before = rows->charged, bytes;
	int r;

	/* It cannot wait for room. */
	if (!MUL_OVERFLOW(piece->list.n, sizeof(int64_t) + rows->row_len, &bytes))
		spending_make_room(&job_of(rows)->memory.spent_rows,
				   bytes + piece->n_pieces * beside);
	r = charge(rows, piece->list.n, sizeof(int64_t) + rows->row_len, failure);
	if (!r)
		r = charge(rows, piece->n_pieces, beside, failure);
	server->charged = rows->charged - before;
	if (r)
		return r;
	server->result_blocks = calloc(piece->n_pieces, sizeof(struct block *));
	server->result = calloc(piece->n_pieces, sizeof(*server->result));
	if (!server->result_blocks || !server->result)
		return failure_set(failure, -ENOMEM, "out of memory");
	server->n_result = piece->list.n;
	server->result_step = piece->list.step;
	server->n_result_pieces = piece->n_pieces;
	return 0;
}

static int take_result(struct agent_rows *rows, struct agent_rows_server *server, struct call *call,
		       struct failure *failure)
{
	const struct data_header *answer = &call->answer;
	struct data_piece piece;
	const char *why;
	int r;

	if (!call->answer_block || answer->len > call->answer_block->len ||
	    data_rows_parse(answer, call->answer_block->data, &piece, &why))
		return -EPROTO;
	if (piece.list.rows != rows->n_rows || piece.list.width != rows->width)
		return -EPROTO;
	if (!server->result) {
		r = begin_result(rows, server, &piece, failure);
		if (r)
			return r;
	}
	/* Of one length and step: then the pieces together are as many rows as somebody has room for. */
	if (piece.list.n != server->n_result || piece.list.step != server->result_step)
		return -EPROTO;
	server->result_blocks[answer->part] = block_ref(call->answer_block);
	server->result[answer->part] = (struct reduce_piece){ piece.rows, piece.values, piece.n };
	return 0;
}

int agent_rows_answered(struct agent_part *part, struct failure *failure)
{
	struct agent_rows *rows = part->round->rows;
	struct agent_rows_server *server = &rows->servers[part->extent.block];
	const struct data_header *answer = &part->call.answer;
	bool pull = rows->step == ROWS_PULL;

	if (answer->op != DATA_RESULT || answer->dtype != rows->round->tensor->dtype)
		return -EPROTO;
	if (!pull && part->extent.part + UINT64_C(1) < server->n_pieces)
		return answer->len ? -EPROTO : 0;
	if (answer->part != (pull ? part->extent.part : 0))
		return -EPROTO;
	return take_result(rows, server, &part->call, failure);
}

/* -- The end ------------------------------------------------------------------------------------------------------ */

bool agent_rows_outcome(const struct agent_tensor *tensor, struct agent_request *request,
			uint64_t n_rows, struct failure *ret_failure)
{
	uint64_t capacity = request->output_count / request->width;

	request->n_rows = n_rows;
	if (n_rows <= capacity)
		return true;
	(void)failure_set(ret_failure, -ENOSPC,
			  "tensor %s, round %" PRIu64 ": the result has %" PRIu64
			  " rows, and there is room for %" PRIu64,
			  tensor->name, request->round, n_rows, capacity);
	return false;
}

const struct failure *agent_rows_verdict(const struct agent_round *round,
					 struct agent_request *request, struct failure *ret_failure)
{
	const struct agent_rows *rows = round->rows;

	if (!rows || agent_rows_outcome(round->tensor, request, rows->n_result, ret_failure))
		return NULL;
	return ret_failure;
}
