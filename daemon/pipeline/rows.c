#include "pipeline/rows.h"
#include "base/failpoint.h"
#include <inttypes.h>
#include <stdio.h>

static struct pipeline_job *job_of(const struct pipeline_rows *rows)
{
	return rows->round->tensor->job;
}

static const struct pipeline_request *request_of(const struct pipeline_rows *rows, uint32_t local)
{
	return rows->round->ranks[local].request;
}

static uint64_t rows_in(const struct pipeline_rows *rows, uint32_t local)
{
	return request_of(rows, local) ? request_of(rows, local)->input_count / rows->width : 0;
}

static uint64_t room_of(const struct pipeline_rows *rows, uint32_t local)
{
	return request_of(rows, local) ? request_of(rows, local)->output_count / rows->width : 0;
}

static size_t server_of(const struct pipeline_rows *rows, int64_t row)
{
	const struct pipeline_job *job = job_of(rows);
	uint64_t group = (uint64_t)row / rows->per_group;

	return rows->stripes[(rows->first_stripe + group) % job->n_stripes];
}

/* -- Making and unmaking ------------------------------------------------------------------------------------------ */

static int charge(struct pipeline_rows *rows, uint64_t n, uint64_t each, struct failure *failure)
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

/* To whom rows go now. Returns 0 or -ENOMEM. */
static int place(struct pipeline_rows *rows)
{
	const struct pipeline_tensor *tensor = rows->round->tensor;
	const struct pipeline_job *job = tensor->job;
	uint64_t group_bytes = MIN(job->part_bytes, ROWS_GROUP_BYTES), n_groups;

	rows->n_servers = job->distributed ? job->n_servers : 0;
	rows->stripes = job->stripes;
	rows->servers = calloc(MAX(rows->n_servers, (size_t)1), sizeof(rows->servers[0]));
	if (!rows->servers)
		return error_origin(-ENOMEM);
	rows->push_step = data_rows_step(job->part_bytes, rows->row_len);
	rows->per_group = MAX(group_bytes / rows->row_len, UINT64_C(1));
	rows->first_stripe = tensor->start / job->part_bytes;
	/* Also of a table without rows somebody sees to it that all have come. */
	n_groups = MAX(rows->n_rows / rows->per_group + !!(rows->n_rows % rows->per_group),
		       UINT64_C(1));
	for (uint64_t i = 0; rows->n_servers && i < MIN(n_groups, (uint64_t)job->n_stripes); i++) {
		struct pipeline_rows_server *server =
			&rows->servers[rows->stripes[(rows->first_stripe + i) % job->n_stripes]];

		server->in_use = server->due = true;
		server->attempt = rows->attempt;
	}
	return 0;
}

static int rows_new(struct pipeline_round *round, struct failure *failure)
{
	const struct pipeline_tensor *tensor = round->tensor;
	struct pipeline_job *job = tensor->job;
	struct pipeline_rows *rows = calloc(1, sizeof(*rows));
	uint64_t n = 0;

	if (!rows)
		return failure_set(failure, -ENOMEM, "out of memory");
	round->rows = rows;
	rows->round = round;
	rows->quota = &job->rows_quota;
	rows->width = (uint32_t)pipeline_round_first(round)->width;
	rows->row_len = rows->width * dtype_size(tensor->dtype);
	rows->n_rows = tensor->elements / rows->width;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		n += rows_in(rows, i);
	if (place(rows))
		return failure_set(failure, -ENOMEM, "out of memory");
	return charge(rows, n, 2 * sizeof(struct reduce_entry) + sizeof(int64_t) + rows->row_len,
		      failure);
}

static void free_blocks(struct block **blocks, uint64_t n)
{
	for (uint64_t i = 0; blocks && i < n; i++)
		(void)block_unref(blocks[i]);
	free(blocks);
}

/* As if nothing had gone there, or come from there. */
static void server_reset(struct pipeline_rows *rows, struct pipeline_rows_server *server)
{
	free_blocks(server->pieces, server->n_pieces);
	free_blocks(server->result_blocks, server->n_result_pieces);
	free(server->result);
	quota_release(rows->quota, server->charged);
	rows->charged -= server->charged;
	*server = (struct pipeline_rows_server){
		.in_use = server->in_use,
		.due = true,
		.attempt = rows->attempt,
	};
}

static void servers_free(struct pipeline_rows *rows)
{
	for (size_t i = 0; rows->servers && i < rows->n_servers; i++)
		server_reset(rows, &rows->servers[i]);
	free(TAKE_PTR(rows->servers));
}

struct pipeline_rows *pipeline_rows_free(struct pipeline_rows *rows)
{
	if (!rows)
		return NULL;
	servers_free(rows);
	quota_release(rows->quota, rows->charged);
	free(rows);
	return NULL;
}

/* -- Sorting, in the pool ----------------------------------------------------------------------------------------- */

/* The rows of all local ranks, in the order of ranks. A trainer may write its numbers meanwhile: each is read once. */
static int read_entries(struct pipeline_rows *rows, struct reduce_entry *entries)
{
	const struct layout *layout = &job_of(rows)->layout;
	size_t n = 0;

	for (uint32_t i = 0; i < layout->n_local; i++) {
		const struct pipeline_request *request = request_of(rows, i);
		const volatile int64_t *numbers = request ? request->input_rows : NULL;
		const char *values = request ? request->input : NULL;
		uint64_t n_in = rows_in(rows, i);

		for (uint64_t k = 0; k < n_in; k++, n++) {
			entries[n] =
				(struct reduce_entry){ numbers[k], values + k * rows->row_len };
			if (entries[n].row >= 0 && (uint64_t)entries[n].row < rows->n_rows)
				continue;
			(void)snprintf(rows->text, sizeof(rows->text),
				       "rank %u: row %" PRId64 " of a table of %" PRIu64,
				       layout->rank_of_local[i], entries[n].row, rows->n_rows);
			return -EINVAL;
		}
	}
	return 0;
}

/* Goes through sorted entries row by row. inputs: room for all. */
struct walk {
	const struct reduce_entry *entries;
	size_t n, at;
	int64_t row;
	const void **inputs;
	size_t n_inputs;
};

static bool walk_next(struct walk *walk)
{
	walk->n_inputs = 0;
	if (walk->at == walk->n)
		return false;
	walk->row = walk->entries[walk->at].row;
	for (; walk->at < walk->n && walk->entries[walk->at].row == walk->row; walk->at++)
		walk->inputs[walk->n_inputs++] = walk->entries[walk->at].values;
	return true;
}

static struct reduce_params sum_of(const struct pipeline_rows *rows)
{
	bool here = !rows->n_servers;
	unsigned reduction = rows->round->reduction;

	return (struct reduce_params){
		.dtype = rows->round->tensor->dtype,
		/* A node's share of an average is a sum; the servers divide. */
		.reduction = !here && reduction == REDUCTION_AVERAGE ? REDUCTION_SUM : reduction,
		.n_elements = rows->width,
		.divisor = rows->round->n_in,
		.round_before_division = true,
	};
}

static int make_pieces(struct pipeline_rows *rows, struct pipeline_rows_server *server)
{
	struct block_cache *blocks = job_of(rows)->pipeline->params.blocks;
	uint64_t step = rows->push_step, left = server->n;
	uint64_t n_pieces = MAX(left / step + !!(left % step), UINT64_C(1));
	struct data_rows head = {
		.rows = rows->n_rows,
		.n = server->n,
		.width = rows->width,
		.step = rows->push_step,
	};

	data_rows_encode(&head);
	server->pieces = calloc(n_pieces, sizeof(struct block *));
	if (!server->pieces)
		return -ENOMEM;
	for (; server->n_pieces < n_pieces; server->n_pieces++) {
		struct block **block = &server->pieces[server->n_pieces];
		uint64_t here = MIN(left, step);

		if (block_new(blocks, data_rows_len(here, rows->row_len), NULL, block))
			return -ENOMEM;
		memcpy((*block)->data, &head, sizeof(head));
		left -= here;
	}
	return 0;
}

/* Where the next row of a server and its values go. */
static int64_t *next_place(const struct pipeline_rows *rows, struct pipeline_rows_server *server,
			   void **ret_values)
{
	uint64_t step = rows->push_step, piece = server->n_filled / step;
	uint64_t at = server->n_filled % step, here = MIN(server->n - piece * step, step);
	int64_t *numbers =
		(int64_t *)((char *)server->pieces[piece]->data + sizeof(struct data_rows));

	server->n_filled++;
	*ret_values = (char *)(numbers + here) + at * rows->row_len;
	return &numbers[at];
}

/* Each row to its server. */
static int cut(struct pipeline_rows *rows, struct walk walk)
{
	struct reduce_params sum = sum_of(rows);
	struct walk count = walk;
	int r = 0;

	while (walk_next(&count)) {
		struct pipeline_rows_server *server = &rows->servers[server_of(rows, count.row)];

		server->n += server->due;
	}
	for (size_t i = 0; !r && i < rows->n_servers; i++)
		if (rows->servers[i].due)
			r = make_pieces(rows, &rows->servers[i]);
	if (r)
		return r;
	while (walk_next(&walk)) {
		struct pipeline_rows_server *server = &rows->servers[server_of(rows, walk.row)];
		void *values;

		if (!server->due)
			continue;
		*next_place(rows, server, &values) = walk.row;
		sum.inputs = walk.inputs;
		sum.n_inputs = walk.n_inputs;
		sum.outputs = &values;
		sum.n_outputs = 1;
		reduce_run(&sum);
	}
	return 0;
}

/* Local ranks with room for the result: room for one pointer each, to numbers and to values. */
struct takers {
	int64_t **numbers;
	void **values;
	size_t n;
};

static int takers_find(const struct pipeline_rows *rows, struct takers *takers)
{
	uint32_t n_local = job_of(rows)->layout.n_local;

	*takers = (struct takers){
		.numbers = calloc(n_local, sizeof(*takers->numbers)),
		.values = calloc(n_local, sizeof(*takers->values)),
	};
	if (!takers->numbers || !takers->values)
		return -ENOMEM;
	for (uint32_t i = 0; rows->n_result && i < n_local; i++) {
		if (room_of(rows, i) < rows->n_result)
			continue;
		takers->numbers[takers->n] = request_of(rows, i)->output_rows;
		takers->values[takers->n++] = request_of(rows, i)->output;
	}
	return 0;
}

static void takers_done(struct takers *takers)
{
	free(takers->numbers);
	free(takers->values);
}

/* On to the next row, whose number is this one. */
static void takers_move(struct takers *takers, int64_t row, size_t row_len)
{
	for (size_t i = 0; i < takers->n; i++) {
		*takers->numbers[i]++ = row;
		takers->values[i] = (char *)takers->values[i] + row_len;
	}
}

/* All ranks are here: what they gave is the result. */
static int finish_here(struct pipeline_rows *rows, struct walk walk)
{
	struct reduce_params sum = sum_of(rows);
	struct walk count = walk;
	struct takers takers;
	int r;

	while (walk_next(&count))
		rows->n_result++;
	r = takers_find(rows, &takers);
	while (!r && takers.n && walk_next(&walk)) {
		sum.inputs = walk.inputs;
		sum.n_inputs = walk.n_inputs;
		sum.outputs = takers.values;
		sum.n_outputs = takers.n;
		reduce_run(&sum);
		takers_move(&takers, walk.row, rows->row_len);
	}
	takers_done(&takers);
	return r;
}

static uint64_t entries_of(const struct pipeline_rows *rows)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < job_of(rows)->layout.n_local; i++)
		n += rows_in(rows, i);
	return n;
}

static void run_sort(struct task *task)
{
	struct pipeline_rows *rows = container_of(task, struct pipeline_rows, task);
	size_t n = entries_of(rows);
	_cleanup_(freep) struct reduce_entry *entries = calloc(MAX(n, (size_t)1), sizeof(*entries));
	_cleanup_(freep) struct reduce_entry *scratch = calloc(MAX(n, (size_t)1), sizeof(*scratch));
	struct walk walk = { .entries = entries, .n = n };

	static_assert(sizeof(*scratch) >= sizeof(void *), "scratch holds the inputs of a row");
	rows->status = entries && scratch ? read_entries(rows, entries) : -ENOMEM;
	if (rows->status)
		return;
	reduce_sort_rows(entries, scratch, n, rows->n_rows);
	walk.inputs = (const void **)scratch;
	rows->status = rows->n_servers ? cut(rows, walk) : finish_here(rows, walk);
}

/* -- Merging, in the pool ----------------------------------------------------------------------------------------- */

/* A list is what its server may have: then no row is in two of them. */
static bool list_fits(const struct pipeline_rows *rows, size_t number,
		      const struct reduce_list *list)
{
	if (!reduce_list_valid(list, rows->n_rows))
		return false;
	for (size_t i = 0; i < list->n_pieces; i++)
		for (size_t k = 0; k < list->pieces[i].n; k++)
			if (server_of(rows, list->pieces[i].rows[k]) != number)
				return false;
	return true;
}

static int merge(struct pipeline_rows *rows, struct reduce_list *lists, struct reduce_cursor *heap)
{
	struct reduce_merge merge;
	struct takers takers;
	const void *values;
	int64_t row;
	int r;

	for (size_t i = 0; i < rows->n_servers; i++) {
		const struct pipeline_rows_server *server = &rows->servers[i];

		lists[i] = (struct reduce_list){ server->result, server->n_result_pieces };
		if (list_fits(rows, i, &lists[i]))
			continue;
		(void)snprintf(rows->text, sizeof(rows->text), "%.80s answered with wrong rows",
			       pipeline_server_name(job_of(rows), i));
		return -EPROTO;
	}
	r = takers_find(rows, &takers);
	reduce_merge_start(&merge, lists, rows->n_servers, rows->row_len, heap);
	while (!r && reduce_merge_next(&merge, &row, &values)) {
		for (size_t i = 0; i < takers.n; i++)
			metric_copy(&job_of(rows)->pipeline->copied_rows, takers.values[i], values,
				    rows->row_len);
		takers_move(&takers, row, rows->row_len);
	}
	takers_done(&takers);
	return r;
}

static void run_merge(struct task *task)
{
	struct pipeline_rows *rows = container_of(task, struct pipeline_rows, task);
	_cleanup_(freep) struct reduce_list *lists = calloc(rows->n_servers, sizeof(*lists));
	_cleanup_(freep) struct reduce_cursor *heap = calloc(rows->n_servers, sizeof(*heap));

	rows->status = lists && heap ? merge(rows, lists, heap) : -ENOMEM;
}

/* -- From step to step -------------------------------------------------------------------------------------------- */

static void fail(struct pipeline_rows *rows, int status, const char *text)
{
	const struct pipeline_round *round = rows->round;
	struct failure failure;

	(void)failure_set(&failure, status, "tensor %s, round %" PRIu64 ": %s", round->tensor->name,
			  round->number, text);
	if (status == -EPROTO)
		pipeline_job_fail(job_of(rows), &failure, NULL);
	else
		pipeline_round_fail(rows->round, &failure, true);
}

static void on_done(struct task *task)
{
	struct pipeline_rows *rows = container_of(task, struct pipeline_rows, task);
	struct pipeline_job *job = job_of(rows);

	rows->working = false;
	if (job->suspended && job->distributed)
		return;
	if (rows->step == ROWS_MERGE)
		FAILPOINT("rows-merged");
	if (rows->status && !rows->round->failure.status)
		fail(rows, rows->status, *rows->text ? rows->text : strerror(-rows->status));
	pipeline_round_part_done(rows->round);
	pipeline_job_release(job);
}

static void begin_task(struct pipeline_rows *rows, void (*run)(struct task *task), uint64_t n_rows)
{
	struct pipeline *pipeline = job_of(rows)->pipeline;
	uint64_t bytes = n_rows * (sizeof(int64_t) + rows->row_len);

	pipeline_job_hold(job_of(rows));
	rows->round->n_parts++;
	rows->task.run = run;
	rows->task.done = on_done;
	rows->task.priority = rows->round->priority;
	rows->working = true;
	if (bytes > pipeline->params.inline_bytes && !pool_post(pipeline->params.pool, &rows->task))
		return;
	run(&rows->task);
	on_done(&rows->task);
}

static void begin_parts(struct pipeline_rows *rows, uint64_t first_piece)
{
	rows->next_server = 0;
	rows->next_piece = first_piece;
	rows->round->cut = false;
	pipeline_deal_add(rows->round);
	pipeline_round_refill(rows->round);
}

/* -- Until all have it -------------------------------------------------------------------------------------------- */

static bool any_lost(const struct pipeline_rows *rows)
{
	for (size_t i = 0; i < rows->n_servers; i++)
		if (rows->servers[i].lost)
			return true;
	return false;
}

bool pipeline_rows_is_past(const struct pipeline_part *part)
{
	const struct pipeline_rows *rows = part->round->rows;

	return rows->has_result || part->extent.block >= rows->n_servers ||
	       rows->servers[part->extent.block].attempt != part->attempt;
}

/*
 * Whether nothing is under way that the next step has to wait for. While a server is to be given its rows anew that is not what
 * waits at others for other nodes: they may wait for us there.
 */
static bool is_idle(const struct pipeline_rows *rows)
{
	const struct pipeline_round *round = rows->round;
	const struct pipeline_part *part;
	unsigned n = round->n_parts - rows->agreeing;
	bool lost = any_lost(rows);

	if (!n || rows->working || (!lost && !rows->repeats))
		return !n;
	list_for_each (part, &round->parts, link) {
		const struct pipeline_rows_server *server;

		if (!pipeline_part_is_rows(part) || part->state != PART_CALL)
			continue;
		if (pipeline_rows_is_past(part)) {
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
static bool sort_again(struct pipeline_rows *rows)
{
	const struct pipeline_job *job = job_of(rows);
	struct pipeline_round *round = rows->round;
	struct failure failure;

	rows->repeats = true;
	rows->attempt++;
	if (rows->stripes != job->stripes || rows->n_servers != job->n_servers) {
		servers_free(rows);
		if (place(rows)) {
			rows->n_servers = 0;
			pipeline_round_describe(round, &failure, -ENOMEM, "out of memory");
			pipeline_round_fail(round, &failure, true);
			return false;
		}
	} else {
		for (size_t i = 0; i < rows->n_servers; i++) {
			struct pipeline_rows_server *server = &rows->servers[i];

			/* Also what was sorted, and is not pushed yet. */
			server->due &= rows->step <= ROWS_SORT;
			if (server->lost || server->due)
				server_reset(rows, server);
		}
	}
	rows->step = ROWS_SORT;
	begin_task(rows, run_sort, entries_of(rows));
	return true;
}

/* A part without data, of which all nodes have to bring one. */
static bool begin_agreeing(struct pipeline_rows *rows)
{
	const struct extent extent = {
		.block = DATA_ROWS_DONE,
		.source = RANK_ALL,
		.target = RANK_ALL,
	};
	struct pipeline_round *round = rows->round;
	struct failure failure;
	int r;

	rows->agreeing = true;
	/* It may be over before the call returns. */
	round->n_parts++;
	r = pipeline_part_start(round, &extent, 0);
	round->n_parts--;
	if (!r)
		return !rows->agreed;
	rows->agreeing = false;
	pipeline_round_describe(round, &failure, r, "%s", strerror(-r));
	pipeline_round_fail(round, &failure, true);
	return false;
}

/* Servers need not hold it for this node, which can do without this process. */
static void tell_servers(const struct pipeline_rows *rows)
{
	const struct pipeline_tensor *tensor = rows->round->tensor;
	struct pipeline_job *job = tensor->job;
	struct data_header header = {
		.op = DATA_HAVE,
		.job = job->number,
		.key = tensor->key,
		.round = rows->round->number,
		.epoch = job->data_epoch,
		.node = job->shape.node,
	};

	/* Without memory they hold it until the next round. */
	for (size_t i = 0; i < rows->n_servers; i++)
		if (rows->servers[i].in_use && job->servers[i].attached)
			(void)peer_notice(job->servers[i].outlet->peer, &header, NULL);
}

/* The result is in the outputs here. Returns false when there is nothing more to do. */
static bool agree(struct pipeline_rows *rows)
{
	struct pipeline_round *round = rows->round;
	struct failure failure;

	if (!job_of(rows)->keep)
		return false;
	if (pipeline_resume_record_rows(round, &failure)) {
		pipeline_round_fail(round, &failure, true);
		return false;
	}
	rows->has_result = true;
	FAILPOINT("rows-recorded");
	tell_servers(rows);
	return begin_agreeing(rows);
}

void pipeline_rows_part_end(const struct pipeline_part *part)
{
	struct pipeline_rows *rows = part->round->rows;

	if (pipeline_part_is_rows(part))
		return;
	rows->agreeing = false;
	rows->agreed = part->stored;
	if (!rows->agreed)
		return;
	FAILPOINT("rows-agreed");
	/* What is done for others nobody needs any more. */
	pipeline_part_drop_queued(part->round);
}

void pipeline_rows_part_lost(struct pipeline_part *part)
{
	struct pipeline_rows *rows = part->round->rows;

	if (part->extent.block < rows->n_servers &&
	    rows->servers[part->extent.block].attempt == part->attempt)
		rows->servers[part->extent.block].lost = true;
	pipeline_part_end(part);
}

/* Those that wait for it are of an old cut. */
static void drop_queued(struct pipeline_round *round, size_t server)
{
	struct pipeline_part *part, *next;

	list_for_each_safe (part, next, &round->parts, link) {
		if (!pipeline_part_is_rows(part) || part->server != server ||
		    part->state != PART_QUEUED)
			continue;
		if (list_linked(&part->wait))
			list_remove(&part->wait);
		else
			pipeline_outlet_remove(part->outlet, part);
		pipeline_part_end(part);
	}
}

static struct pipeline_round *next_jolted(const struct pipeline_job *job)
{
	struct pipeline_round *round;

	list_for_each (round, &job->rounds, job_link)
		if (round->rows && round->rows->jolted)
			return round;
	return NULL;
}

void pipeline_rows_lost(struct pipeline_job *job, size_t server)
{
	struct pipeline_round *round;

	if (!job->keep || job->suspended)
		return;
	list_for_each (round, &job->rounds, job_link) {
		struct pipeline_rows *rows = round->rows;

		if (!rows || round->state != ROUND_MOVING || round->failure.status ||
		    rows->agreed || server >= rows->n_servers || !rows->servers[server].in_use)
			continue;
		rows->servers[server].lost = rows->jolted = true;
	}
	while ((round = next_jolted(job))) {
		round->rows->jolted = false;
		/* Not finished under our feet. */
		round->n_parts++;
		drop_queued(round, server);
		pipeline_round_part_done(round);
	}
}

uint32_t pipeline_rows_flags(const struct pipeline_rows *rows)
{
	return (rows->repeats ? DATA_ROWS_AGAIN : 0) | (rows->has_result ? DATA_ROWS_HAS : 0);
}

bool pipeline_rows_continue(struct pipeline_round *round)
{
	struct pipeline_rows *rows = round->rows;

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
		begin_task(rows, run_sort, entries_of(rows));
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
		begin_task(rows, run_merge, rows->n_result);
		return true;
	default:
		break;
	}
	/* Only the others are waited for. */
	rows->step = ROWS_AGREE;
	return rows->agreeing;
}

void pipeline_rows_start(struct pipeline_round *round)
{
	const struct pipeline_job *job = round->tensor->job;
	struct failure failure, words;

	pipeline_deal_cut(round);
	round->n_parts++;
	if (rows_new(round, &words)) {
		(void)failure_set(&failure, words.status, "tensor %s, round %" PRIu64 ": %s",
				  round->tensor->name, round->number, words.text);
		pipeline_round_fail(round, &failure, true);
	} else if (job->keep) {
		/* By this process or the one before. */
		round->rows->repeats = job->resumed;
		if (ledger_find_rows(job->ledger, round->tensor->name, round->number,
				     &round->rows->n_result))
			(void)agree(round->rows);
	}
	pipeline_round_part_done(round);
}

/* -- Parts -------------------------------------------------------------------------------------------------------- */

bool pipeline_rows_next(struct pipeline_rows *rows, struct extent *ret_extent)
{
	bool pull = rows->step == ROWS_PULL;

	for (; rows->next_server < rows->n_servers; rows->next_server++) {
		const struct pipeline_rows_server *server = &rows->servers[rows->next_server];
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

void pipeline_rows_begin(struct pipeline_part *part)
{
	struct pipeline_rows *rows = part->round->rows;
	struct pipeline_rows_server *server = &rows->servers[part->extent.block];

	part->attempt = server->attempt;
	part->block = rows->step == ROWS_PULL ? NULL : TAKE_PTR(server->pieces[part->extent.part]);
}

/* The first piece of a server's result says how much it is. */
static int begin_result(struct pipeline_rows *rows, struct pipeline_rows_server *server,
			const struct data_piece *piece, struct failure *failure)
{
	uint64_t before = rows->charged;
	int r;

	r = charge(rows, piece->list.n, sizeof(int64_t) + rows->row_len, failure);
	if (!r)
		r = charge(rows, piece->n_pieces, sizeof(struct block *) + sizeof(*server->result),
			   failure);
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

static int take_result(struct pipeline_rows *rows, struct pipeline_rows_server *server,
		       struct call *call, struct failure *failure)
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

int pipeline_rows_answered(struct pipeline_part *part, struct failure *failure)
{
	struct pipeline_rows *rows = part->round->rows;
	struct pipeline_rows_server *server = &rows->servers[part->extent.block];
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

bool pipeline_rows_outcome(const struct pipeline_tensor *tensor, struct pipeline_request *request,
			   uint64_t n_rows, struct failure *ret_failure)
{
	uint64_t room = request->output_count / request->width;

	request->n_rows = n_rows;
	if (n_rows <= room)
		return true;
	(void)failure_set(ret_failure, -ENOSPC,
			  "tensor %s, round %" PRIu64 ": the result has %" PRIu64
			  " rows, and there is room for %" PRIu64,
			  tensor->name, request->round, n_rows, room);
	return false;
}

const struct failure *pipeline_rows_verdict(const struct pipeline_round *round,
					    struct pipeline_request *request,
					    struct failure *ret_failure)
{
	const struct pipeline_rows *rows = round->rows;

	if (!rows || pipeline_rows_outcome(round->tensor, request, rows->n_result, ret_failure))
		return NULL;
	return ret_failure;
}
