/*
 * The lists of a round of push_pull_rows: pieces in, the merge, pieces out, and what is held in
 * between. round.c brings the pieces of contributions, server.c the calls that pull.
 */
#include "server/round/rows.h"
#include "server/round/engine.h"

#include "base/failpoint.h"
#include "server/round/round.h"

/* -- What nobody needs any more ---------------------------------------------------------------- */

/* What a node has brought, and what the job is charged with for it. The job stays until it is gone. */
static void spend_node(struct job *job, struct rows_node *from, int64_t *left)
{
	const struct spent_list list = { from->blocks, from->pieces, from->n_pieces };

	spend(&job->store.spending, &list, from->charged, left);
	from->blocks = NULL;
	from->pieces = NULL;
	from->charged = 0;
}

/* -- What comes -------------------------------------------------------------------------------- */

int rows_parse(const struct job *job, struct delivery *delivery, struct data_piece *ret_piece,
	       struct failure *failure)
{
	struct data_header *h = &delivery->header;
	const char *why = "its payload is in no block";

	if (!delivery->payload_block || data_rows_parse(h, delivery->payload, ret_piece, &why))
		return failure_set(failure, -EPROTO, "job %s: push_pull_rows of node %u: %s",
				   job->owner.name, h->node, why);
	h->part = 0;
	h->offset = 0;
	h->part_len = (uint32_t)ret_piece->row_len;
	h->total = ret_piece->list.rows * ret_piece->row_len;
	return 0;
}

bool rows_has(const struct slot *slot, uint32_t node, uint32_t part)
{
	const struct rows_node *from = slot->rows ? &slot->rows->nodes[node] : NULL;

	return from && part < from->n_pieces && from->blocks[part];
}

static int rows_new(struct slot *slot, const struct data_piece *piece, uint64_t charged)
{
	struct job *job = slot->job;
	size_t len = sizeof(*slot->rows) + job->n_nodes * sizeof(slot->rows->nodes[0]);

	if (store_charge(job, len))
		return QUOTA_E_FULL;
	slot->rows = calloc(1, len);
	if (!slot->rows) {
		quota_release(job->memory.quota, len);
		return error_origin(-ENOMEM);
	}
	slot->rows->slot = slot;
	slot->rows->charged = len;
	slot->rows->slot_len = slot->charged - charged;
	slot->rows->list = piece->list;
	slot->rows->row_len = piece->row_len;
	return 0;
}

/* Room for as many pieces as the list has. */
static int node_begin(struct slot *slot, struct rows_node *from, const struct data_piece *piece)
{
	uint64_t n_pieces = piece->n_pieces, len;

	if (MUL_OVERFLOW(n_pieces, sizeof(*from->pieces) + sizeof(*from->blocks), &len) ||
	    slot_charge(slot, len))
		return QUOTA_E_FULL;
	from->pieces = calloc(n_pieces, sizeof(*from->pieces));
	from->blocks = calloc(n_pieces, sizeof(struct block *));
	if (!from->pieces || !from->blocks) {
		free(TAKE_PTR(from->pieces));
		free(TAKE_PTR(from->blocks));
		return error_origin(-ENOMEM);
	}
	list_push_back(&slot->job->nodes[from - slot->rows->nodes].rows, &from->link);
	from->n_pieces = n_pieces;
	from->charged = len;
	from->n = piece->list.n;
	from->step = piece->list.step;
	return 0;
}

static void answer_empty(struct delivery *delivery)
{
	struct data_header header = delivery->header;

	header.op = DATA_RESULT;
	header.len = header.part_len = 0;
	header.total = 0;
	delivery_answer(delivery, &header, NULL, NULL);
}

int rows_take(struct slot *slot, struct delivery *delivery, const struct data_piece *piece,
	      uint32_t part, unsigned flags, bool *ret_complete)
{
	uint32_t node = delivery->header.node;
	struct rows_node *from;
	int r = 0;

	if (!slot->rows)
		r = rows_new(slot, piece, delivery_bytes(delivery));
	from = r ? NULL : &slot->rows->nodes[node];
	if (from && !from->n_pieces)
		r = node_begin(slot, from, piece);
	if (r)
		return r;
	if (from->n != piece->list.n || from->step != piece->list.step)
		return error_origin(-EPROTO);

	from->blocks[part] = block_ref(delivery->payload_block);
	from->pieces[part] = (struct reduce_piece){ piece->rows, piece->values, piece->n };
	from->charged += delivery_bytes(delivery);
	from->gone = flags & DATA_ROWS_HAS;
	FAILPOINT("server-rows-taken");
	if (part == from->n_pieces - 1 && !from->gone)
		from->last = delivery;
	else
		answer_empty(delivery);
	*ret_complete = ++from->n_here == from->n_pieces;
	if (*ret_complete)
		slot->from[node] = TAKE_PTR(from->last);
	return 0;
}

/* -- The merge --------------------------------------------------------------------------------- */

/* Bytes of so many rows in so many pieces. */
static uint64_t list_len(const struct rows *rows, uint64_t n_pieces, uint64_t n)
{
	return n_pieces * data_rows_len(0, rows->row_len) +
	       (data_rows_len(n, rows->row_len) - data_rows_len(0, rows->row_len));
}

static void merge_again(struct slot *slot)
{
	struct rows *rows = slot->rows;

	reduce_merge_start(&rows->merge, rows->lists, slot->job->n_nodes, rows->row_len,
			   rows->cursors);
}

/* The steps of the merge, in the pool. */

static bool check_lists(void *owner, int64_t *looks)
{
	struct slot *slot = owner;
	struct rows *rows = slot->rows;

	for (; rows->n_checked < slot->job->n_nodes; rows->n_checked++) {
		const struct rows_node *from = &rows->nodes[rows->n_checked];
		int r = 1;

		if (!rows->cursor.list) {
			rows->lists[rows->n_checked] =
				(struct reduce_list){ from->pieces, from->n_pieces };
			rows->cursor = reduce_list_begin(&rows->lists[rows->n_checked]);
		}
		for (; r > 0; reduce_looked(looks, 1, 0)) {
			if (*looks <= 0)
				return false;
			r = reduce_list_next(&rows->cursor, rows->list.rows);
		}
		if (r < 0) {
			rows->bad_node = (uint32_t)rows->n_checked;
			rows->status = r;
			return false;
		}
		rows->cursor.list = NULL;
	}
	merge_again(slot);
	return true;
}

static bool count_rows(void *owner, int64_t *looks)
{
	struct slot *slot = owner;
	struct rows *rows = slot->rows;
	int64_t row;
	size_t n;

	for (; *looks > 0; reduce_looked(looks, n, 0)) {
		n = reduce_merge_next(&rows->merge, &row, slot->sum.inputs);
		if (!n) {
			merge_again(slot);
			return true;
		}
		rows->n++;
	}
	return false;
}

/* A node may ask for longer pieces than a message takes. */
static uint32_t result_step(const struct rows *rows)
{
	return MIN(rows->list.step, data_rows_step(DATA_PAYLOAD_MAX, rows->row_len));
}

static int make_array(struct slot *slot, uint64_t n_pieces)
{
	struct rows *rows = slot->rows;
	uint64_t bytes = n_pieces * sizeof(struct block *);

	if (quota_charge(slot->job->memory.quota, bytes))
		return QUOTA_E_FULL;
	rows->charged += bytes;
	rows->results = calloc(n_pieces, sizeof(struct block *));
	return rows->results ? 0 : -ENOMEM;
}

/* Room for the result, in pieces; heads are filled. */
static bool make_results(void *owner, int64_t *looks)
{
	struct slot *slot = owner;
	struct rows *rows = slot->rows;
	struct job *job = slot->job;
	uint32_t step = result_step(rows);
	uint64_t n_pieces = MAX((rows->n + step - 1) / step, UINT64_C(1));

	if (!rows->results)
		rows->status = make_array(slot, n_pieces);
	for (; !rows->status && rows->n_results < n_pieces; rows->n_results++) {
		struct data_rows head = rows->list;
		uint64_t here = MIN(rows->n - rows->n_results * step, (uint64_t)step);

		if (*looks <= 0)
			return false;
		rows->status =
			block_new(job->server->params.blocks, data_rows_len(here, rows->row_len),
				  job->memory.quota, &rows->results[rows->n_results]);
		if (rows->status)
			break;
		head.n = rows->n;
		head.step = step;
		data_rows_encode(&head);
		memcpy(rows->results[rows->n_results]->data, &head, sizeof(head));
		reduce_looked(looks, ROWS_PIECE_LOOKS, 0);
	}
	return !rows->status;
}

/* The union of the lists, each row's values in the order of nodes. */
static bool fill_results(void *owner, int64_t *looks)
{
	struct slot *slot = owner;
	struct rows *rows = slot->rows;
	struct reduce_params *sum = &slot->sum.reduce;
	uint32_t step = result_step(rows);

	for (; rows->n_filled < rows->n; rows->n_filled++) {
		char *data = rows->results[rows->n_filled / step]->data;
		uint64_t first = rows->n_filled / step * step,
			 here = MIN(rows->n - first, (uint64_t)step);
		int64_t *numbers = (int64_t *)(data + sizeof(struct data_rows));
		bool is_whole;

		if (*looks <= 0)
			return false;
		if (!sum->first)
			sum->n_inputs = reduce_merge_next(
				&rows->merge, &numbers[rows->n_filled - first], slot->sum.inputs);
		slot->sum.output =
			(char *)(numbers + here) + (rows->n_filled - first) * rows->row_len;
		is_whole = !reduce_slice(sum, rows->list.width);
		reduce_looked(looks, sum->n_inputs + 1,
			      (sum->n_inputs + 1) * sum->n_elements * dtype_size(sum->dtype));
		if (!is_whole)
			return false;
		sum->first = 0;
	}
	return true;
}

static void rows_run(struct task *task)
{
	struct slot *slot = container_of(task, struct slot, sum.task);

	task->again = reduce_work_run(&slot->rows->work, slot, &slot->rows->status);
	task->cost = ROWS_LOOKS * ROWS_LOOK_COST;
}

/* -- What goes --------------------------------------------------------------------------------- */

static void fail_merge(struct slot *slot)
{
	struct job *job = slot->job;
	struct data_header header = slot->header;
	int status = slot->rows->status;
	struct failure failure = { 0 };
	struct node_text node;

	if (status == -EINVAL)
		(void)failure_set(&failure, -EINVAL,
				  "job %s: push_pull_rows: the rows of %s are not in order, or "
				  "not of the table",
				  job->owner.name, job_node_text(job, slot->rows->bad_node, &node));
	else
		(void)job_not_made(job, "a result", status, &failure);
	slot_fail(slot, failure.status, failure.text);
	if (status == QUOTA_E_FULL)
		job_fail(job, &failure, NULL);
	else
		round_refused(job, &header, &failure);
}

static void answer_piece(const struct slot *slot, struct delivery *delivery, uint64_t number)
{
	struct block *block = slot->rows->results[number];
	struct data_header header = delivery->header;

	header.op = DATA_RESULT;
	header.part = (uint32_t)number;
	header.offset = 0;
	header.len = header.part_len = (uint32_t)block->len;
	header.total = block->len;
	delivery_answer(delivery, &header, block, NULL);
}

/* What the nodes brought is of no use any more. */
static void release_inputs(struct slot *slot)
{
	struct rows *rows = slot->rows;
	struct job *job = slot->job;
	int64_t left = SPENT_NOW;

	free(TAKE_PTR(rows->lists));
	free(TAKE_PTR(rows->cursors));
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		slot->charged -= rows->nodes[i].charged;
		spend_node(job, &rows->nodes[i], &left);
	}
	/* For pieces that were refused. */
	quota_release(job->memory.quota, slot->charged - rows->slot_len);
	slot->charged = rows->slot_len;
}

/* Frees it when every node has all, or wants no more. */
static void release_held(struct slot *slot)
{
	const struct rows *rows = slot->rows;
	const struct job *job = slot->job;

	for (uint32_t i = 0; i < job->n_nodes; i++)
		if (!rows->nodes[i].gone && !job->nodes[i].departed &&
		    (job->retention.resume || rows->nodes[i].n_pulled < rows->n_results - 1))
			return;
	slot_free(slot);
}

/*
 * Of a job that outlives its daemons' processes: to a node that may have been answered before, and
 * has not got it.
 */
static void answer_held(struct slot *slot, struct delivery *delivery)
{
	slot->rows->nodes[delivery->header.node].gone = false;
	answer_piece(slot, delivery, 0);
}

/* Nodes for which the round is over want no more of it. */
static void note_past(struct slot *slot)
{
	const uint64_t *past = slot->round->tensor->past;

	for (uint32_t i = 0; slot->job->retention.resume && i < slot->job->n_nodes; i++)
		slot->rows->nodes[i].gone |= past[i] >= slot->header.round;
}

static void answer_all(struct slot *slot)
{
	struct rows *rows = slot->rows;
	struct delivery *again;

	note_past(slot);
	for (uint32_t i = 0; i < slot->job->n_nodes; i++)
		if (slot->from[i]) {
			answer_piece(slot, TAKE_PTR(slot->from[i]), 0);
			FAILPOINT("server-rows-answered");
		}
	while ((again = list_first(&slot->again, struct delivery, link))) {
		list_remove(&again->link);
		answer_held(slot, again);
	}
	if (rows->n_results > 1 || slot->job->retention.resume) {
		slot_hold(slot);
		release_held(slot);
	} else {
		slot_free(slot);
	}
}

static void rows_finish(struct slot *slot)
{
	struct rows *rows = slot->rows;
	struct job *job = slot->job;

	if (job->state == JOB_OVER) {
		slot_fail(slot, job->failure.status, job->failure.text);
		job_release(job);
		return;
	}
	if (rows->status) {
		fail_merge(slot);
		return;
	}
	release_inputs(slot);
	part_close(slot->part, slot->header.round);
	job->n_rounds++;
	metric_count(&job->server->rounds, 1);
	job->n_bytes += list_len(rows, rows->n_results, rows->n);
	FAILPOINT("server-rows-merged");
	answer_all(slot);
}

static void rows_done(struct task *task)
{
	rows_finish(container_of(task, struct slot, sum.task));
}

void rows_start(struct slot *slot)
{
	static reduce_step_fn *const steps[] = {
		check_lists, count_rows, make_results, fill_results, NULL,
	};
	struct rows *rows = slot->rows;
	struct job *job = slot->job;
	uint64_t bytes = 0, n_rows = 0;

	/* All have the result: another daemon's loss was behind it. */
	if (rows_is_idle(slot)) {
		part_close(slot->part, slot->header.round);
		slot_free(slot);
		return;
	}
	slot_sum(slot);
	slot->sum.task.run = rows_run;
	slot->sum.task.done = rows_done;
	rows->work.step = steps;
	slot->sum.reduce = engine_sum(slot, job->size);
	slot->sum.reduce.inputs = slot->sum.inputs;
	rows->lists = calloc(job->n_nodes, sizeof(*rows->lists));
	rows->cursors = calloc(job->n_nodes, sizeof(*rows->cursors));
	if (!rows->lists || !rows->cursors) {
		rows->status = -ENOMEM;
		fail_merge(slot);
		return;
	}
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		bytes += list_len(rows, rows->nodes[i].n_pieces, rows->nodes[i].n);
		n_rows += rows->nodes[i].n;
	}
	metric_count(&job->server->bytes_summed, bytes);
	slot->sum.task.cost = MIN(bytes / ROWS_LOOK_COST + n_rows, ROWS_LOOKS) * ROWS_LOOK_COST;
	/* The result is no longer than what it is made of; its blocks are, by a quarter at most. */
	spending_make_room(&job->store.spending, bytes + bytes / 4);
	if (job_post(job, &slot->sum.task))
		return;
	task_run(&slot->sum.task);
	rows_finish(slot);
}

/* -- What is held until it has been pulled ----------------------------------------------------- */

static struct slot *held_find(const struct job *job, const struct data_header *h)
{
	const struct data_header first = { .block = h->block };
	const struct tensor *tensor = tensor_of(job, h->key);
	const struct part *part = tensor ? part_find(tensor, &first) : NULL;
	struct slot *slot = part ? slot_find(part, h->round) : NULL;

	return slot && slot->held && slot->rows ? slot : NULL;
}

void rows_pull(struct job *job, struct delivery *delivery)
{
	const struct data_header *h = &delivery->header;
	struct slot *slot = held_find(job, h);
	struct rows_node *node = slot ? &slot->rows->nodes[h->node] : NULL;

	/* Who pulls a piece twice will miss another: pieces are counted, not remembered. */
	if (!node || node->gone ||
	    (!job->retention.resume && node->n_pulled >= slot->rows->n_results - 1)) {
		refuse(delivery, -ESTALE,
		       "job %s: tensor number %llu, round %llu, block %u: its result is not held",
		       job->owner.name, (unsigned long long)h->key, (unsigned long long)h->round,
		       h->block);
		return;
	}
	if (h->part >= slot->rows->n_results) {
		refuse(delivery, -EPROTO, "job %s: a result of %llu pieces has no piece %u",
		       job->owner.name, (unsigned long long)slot->rows->n_results, h->part);
		return;
	}
	node->n_pulled++;
	answer_piece(slot, delivery, h->part);
	FAILPOINT("server-rows-pulled");
	release_held(slot);
}

void rows_give_up(struct job *job, uint32_t node, uint64_t key, uint64_t number)
{
	const struct tensor *tensor = tensor_of(job, key);
	struct round *round = tensor ? round_find(tensor, number) : NULL;
	struct slot *slot, *next;

	/* Of other operations it may have many more parts than there are servers. */
	if (!round || round->header.operation != OPERATION_PUSH_PULL_ROWS)
		return;
	/* It goes with its last slot, and not under our feet. */
	round->pinned = true;
	list_for_each_safe (slot, next, &round->slots, in_round) {
		if (!slot->rows || !slot->summing)
			continue;
		slot->rows->nodes[node].gone = true;
		if (slot->held)
			release_held(slot);
	}
	round->pinned = false;
	round_put(round);
}

void rows_visit(struct job *job, struct list *link, uint64_t now_ns)
{
	struct slot *slot = container_of(link, struct slot, in_job);

	(void)job;
	(void)now_ns;
	note_past(slot);
	release_held(slot);
}

/* -- What comes again -------------------------------------------------------------------------- */

/* The call of a last piece, in the place of one that was lost. */
static void wait_again(struct slot *slot, struct delivery *delivery)
{
	struct rows_node *from = &slot->rows->nodes[delivery->header.node];
	struct delivery **place =
		from->n_here == from->n_pieces ? &slot->from[delivery->header.node] : &from->last;
	struct delivery *old = *place;

	*place = delivery;
	from->gone = false;
	if (old)
		delivery_fail(old, -ECONNRESET, "the node contributes again");
}

bool rows_again(struct tensor *tensor, struct delivery *delivery, const struct data_piece *piece,
		uint32_t part, unsigned flags)
{
	const struct data_header *h = &delivery->header;
	struct part *known = part_find(tensor, h);
	struct slot *slot = known ? slot_find(known, h->round) : NULL;
	bool waits = part == piece->n_pieces - 1 && !(flags & DATA_ROWS_HAS);

	/*
	 * Who has the result of a round can be told nothing about it; what others lack of it they
	 * do not get from one that has left.
	 */
	if ((flags & DATA_ROWS_HAS) &&
	    (tensor_failed(tensor, h->round) || (slot && slot->held) ||
	     (!slot && ((known && part_is_closed(known, h->round)) || tensor->job->n_departed)))) {
		if (slot)
			rows_give_up(tensor->job, h->node, h->key, h->round);
		answer_empty(delivery);
		return true;
	}
	if (!slot || !slot->rows || (!slot->summing && !rows_has(slot, h->node, part)))
		return false;
	if (!waits)
		answer_empty(delivery);
	else if (slot->held)
		answer_held(slot, delivery);
	else if (slot->summing)
		slot_put_call(slot, &slot->again, delivery);
	else
		wait_again(slot, delivery);
	return true;
}

bool rows_is_idle(const struct slot *slot)
{
	for (uint32_t i = 0; slot->rows && i < slot->job->n_nodes; i++)
		if (slot->from[i] || slot->rows->nodes[i].last)
			return false;
	return slot->rows;
}

static void forget_node(struct slot *slot, uint32_t node, int64_t *left)
{
	struct rows_node *from = &slot->rows->nodes[node];
	struct delivery *waiting =
		slot->from[node] ? TAKE_PTR(slot->from[node]) : TAKE_PTR(from->last);

	slot->n_here -= from->n_pieces && from->n_here == from->n_pieces;
	slot->charged -= from->charged;
	spend_node(slot->job, from, left);
	list_remove(&from->link);
	*from = (struct rows_node){ 0 };
	if (waiting)
		delivery_fail(waiting, -ECONNRESET, "the node has attached again");
}

void rows_attached(struct job *job, uint32_t node)
{
	struct rows_node *from, *next;
	int64_t left = SPENT_NOW;

	list_for_each_safe (from, next, &job->nodes[node].rows, link) {
		struct rows *rows = container_of(from - node, struct rows, nodes[0]);

		if (!rows->slot->summing)
			forget_node(rows->slot, node, &left);
	}
}

void rows_past(struct round *round, uint32_t node)
{
	struct slot *slot, *next;

	list_for_each_safe (slot, next, &round->slots, in_round) {
		if (!slot->rows)
			continue;
		if (slot->held) {
			slot->rows->nodes[node].gone = true;
			release_held(slot);
		} else if (!slot->summing && rows_is_idle(slot)) {
			part_close(slot->part, slot->header.round);
			slot_free(slot);
		}
	}
}

/* -- The end ----------------------------------------------------------------------------------- */

void rows_fail(struct slot *slot, int status, const char *text)
{
	for (uint32_t i = 0; slot->rows && i < slot->job->n_nodes; i++) {
		struct delivery *last = TAKE_PTR(slot->rows->nodes[i].last);

		if (last)
			delivery_fail(last, status, text);
	}
}

struct rows *rows_free(struct slot *slot)
{
	struct rows *rows = slot->rows;
	struct spent_list results;

	if (!rows)
		return NULL;
	release_inputs(slot);
	for (uint32_t i = 0; i < slot->job->n_nodes; i++)
		list_remove(&rows->nodes[i].link);
	results = (struct spent_list){ .blocks = rows->results, .n = rows->n_results };
	spend(&slot->job->store.spending, &results, rows->charged, &(int64_t){ SPENT_NOW });
	free(rows);
	return NULL;
}
