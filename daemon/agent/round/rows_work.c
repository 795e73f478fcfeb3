/*
 * The work of push_pull_rows, in the pool: what the local ranks gave is sorted, summed and cut into pieces for servers; what servers
 * gave is merged into the outputs. rows.c says when. The control thread changes nothing that is read here meanwhile. There may be
 * a hundred million rows: so each run of the task goes on from where the last was, and does as much as others can wait for.
 */
#include "agent/round/rows.h"
#include "base/memory/unmap.h"
#include "base/pages.h"
#include <inttypes.h>
#include <stdio.h>

/* No page is smaller. For the kernel to make one takes as long as to look at so many rows. */
#define TOUCH_LEN   4096
#define TOUCH_LOOKS 128

/* Inputs of a row that are looked at at once, at most. */
#define INPUTS_MAX ROWS_LOOKS

/* Goes through sorted entries row by row. inputs: room for two for each entry. */
struct walk {
	const struct reduce_entry *entries;
	size_t n, at;
	size_t most; /* inputs at once; SIZE_MAX: all of a row */
	int64_t row;
	const void **inputs;
	size_t n_inputs;
	bool is_first, is_last; /* these inputs, of those of the row */
};

/* Local ranks with room for the result: room for one pointer each, to numbers and to values. */
struct takers {
	int64_t **numbers;
	void **values;
	size_t n;
};

struct agent_rows_work {
	struct reduce_work steps; /* of struct agent_rows */
	/* Of a sort. */
	void *memory; /* the entries and their scratch */
	size_t memory_len, touched;
	uint32_t local; /* of the local ranks: whose rows are read */
	uint64_t row;	/* of these, the next */
	size_t n_read;
	struct reduce_sort sort;
	struct walk walk;
	uint32_t server; /* for which pieces are made */
	void *values;	 /* where the row's are to be */
	size_t n_summed; /* elements of the row, of a long one that is summed in slices; 0: none, or all */
	/* Of a merge. */
	struct reduce_list *lists;
	uint32_t list; /* that is checked */
	struct reduce_cursor *heap, cursor;
	struct reduce_merge merge;
	int64_t merged; /* the row that is copied, */
	const void *merged_values;
	size_t n_copied; /* and takers that have it */
	struct takers takers;
};

static struct agent_job *job_of(const struct agent_rows *rows)
{
	return rows->round->job;
}

static const struct agent_request *request_of(const struct agent_rows *rows, uint32_t local)
{
	return rows->round->ranks[local].request;
}

static uint64_t rows_in(const struct agent_rows *rows, uint32_t local)
{
	return request_of(rows, local) ? request_of(rows, local)->input_count / rows->width : 0;
}

static uint64_t capacity_of(const struct agent_rows *rows, uint32_t local)
{
	return request_of(rows, local) ? request_of(rows, local)->output_count / rows->width : 0;
}

static size_t server_of(const struct agent_rows *rows, int64_t row)
{
	const struct agent_job *job = job_of(rows);
	uint64_t group = (uint64_t)row / rows->per_group;

	return rows->stripes[(rows->first_stripe + group) % job->placement.n_stripes];
}

uint64_t agent_rows_n_given(const struct agent_rows *rows)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < job_of(rows)->layout.n_local; i++)
		n += rows_in(rows, i);
	return n;
}

/* -- In slices ---------------------------------------------------------------------------------------- */

struct agent_rows_work *agent_rows_work_free(struct agent_rows_work *work)
{
	if (!work)
		return NULL;
	if (work->memory_len < HUGE_PAGE)
		free(work->memory);
	else
		unmap(work->memory, work->memory_len);
	free(work->lists);
	free(work->heap);
	free(work->takers.numbers);
	free(work->takers.values);
	free(work);
	return NULL;
}

/* make: what the steps need, in zeroed work. */
static void run(struct task *task, reduce_step_fn *const *steps,
		int (*make)(struct agent_rows *rows))
{
	struct agent_rows *rows = container_of(task, struct agent_rows, task);

	if (!rows->work) {
		rows->work = calloc(1, sizeof(*rows->work));
		if (!rows->work) {
			rows->status = -ENOMEM;
			return;
		}
		rows->work->steps.step = steps;
		rows->status = make(rows);
	}
	task->again = reduce_work_run(&rows->work->steps, rows, &rows->status);
	task->cost = ROWS_LOOKS * ROWS_LOOK_COST;
	if (!task->again)
		rows->work = agent_rows_work_free(rows->work);
}

static int takers_find(const struct agent_rows *rows, struct takers *takers)
{
	uint32_t n_local = job_of(rows)->layout.n_local;

	takers->numbers = calloc(n_local, sizeof(*takers->numbers));
	takers->values = calloc(n_local, sizeof(*takers->values));
	if (!takers->numbers || !takers->values)
		return -ENOMEM;
	for (uint32_t i = 0; rows->n_result && i < n_local; i++) {
		if (capacity_of(rows, i) < rows->n_result)
			continue;
		takers->numbers[takers->n] = request_of(rows, i)->output_rows;
		takers->values[takers->n++] = request_of(rows, i)->output;
	}
	return 0;
}

/* On to the next row, whose number is this one. */
static void takers_move(struct takers *takers, int64_t row, size_t row_len)
{
	for (size_t i = 0; i < takers->n; i++) {
		*takers->numbers[i]++ = row;
		takers->values[i] = (char *)takers->values[i] + row_len;
	}
}

/* -- Sorting, ----------------------------------------------------------------------------------------- */

static int make_entries(struct agent_rows *rows)
{
	struct agent_rows_work *work = rows->work;
	size_t n = agent_rows_n_given(rows);
	size_t len = 2 * MAX(n, (size_t)1) * sizeof(struct reduce_entry);
	struct reduce_entry *entries;

	work->memory_len = len < HUGE_PAGE ? len : align_up(len, HUGE_PAGE);
	work->memory = len < HUGE_PAGE ? malloc(len) : pages_map(work->memory_len);
	if (!work->memory) {
		work->memory_len = 0;
		return -ENOMEM;
	}
	static_assert(sizeof(*entries) >= sizeof(void *), "scratch holds the inputs of a row");
	entries = work->memory;
	reduce_sort_start(&work->sort, entries, entries + n, n, rows->n_rows);
	return 0;
}

/* A sort writes all over its memory: the kernel would make all of it in one run. */
static bool touch_memory(void *owner, int64_t *looks)
{
	struct agent_rows_work *work = ((struct agent_rows *)owner)->work;

	for (; work->touched < work->memory_len; work->touched += TOUCH_LEN) {
		if (*looks <= 0)
			return false;
		((volatile char *)work->memory)[work->touched] = 0;
		reduce_looked(looks, TOUCH_LOOKS, 0);
	}
	return true;
}

/* The rows of all local ranks, in the order of ranks. A trainer may write its numbers meanwhile: each is read once. */
static bool read_entries(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	const struct layout *layout = &job_of(rows)->layout;
	struct agent_rows_work *work = rows->work;
	struct reduce_entry *entries = work->sort.entries;

	for (; work->local < layout->n_local; work->local++, work->row = 0) {
		const struct agent_request *request = request_of(rows, work->local);
		const volatile int64_t *numbers = request ? request->input_rows : NULL;
		const char *values = request ? request->input : NULL;
		uint64_t end = work->row + MIN((uint64_t)MAX(*looks, 0),
					       rows_in(rows, work->local) - work->row);

		reduce_looked(looks, end - work->row, 0);
		for (; work->row < end; work->row++) {
			int64_t row = numbers[work->row];

			entries[work->n_read++] =
				(struct reduce_entry){ row, values + work->row * rows->row_len };
			if (row >= 0 && (uint64_t)row < rows->n_rows)
				continue;
			(void)snprintf(rows->text, sizeof(rows->text),
				       "rank %u: row %" PRId64 " of a table of %" PRIu64,
				       layout->rank_of_local[work->local], row, rows->n_rows);
			rows->status = -EINVAL;
			return false;
		}
		if (work->row < rows_in(rows, work->local))
			return false;
	}
	return true;
}

static struct reduce_params sum_of(const struct agent_rows *rows)
{
	struct reduce_params sum = agent_round_sum(rows->round);

	sum.n_elements = rows->width;
	return sum;
}

/*
 * Inputs of a row that are summed at once: PART_SUM_MAX bytes, and as many as have room beside them for what they make, in the sort's
 * scratch, which has room for two pointers of each. A row that is too long for that is summed in slices of all its inputs.
 */
static size_t inputs_at_once(const struct agent_rows *rows)
{
	const struct reduce_params sum = sum_of(rows);
	size_t n = MIN(PART_SUM_MAX / rows->row_len, INPUTS_MAX) & ~(size_t)1;

	static_assert(sizeof(struct reduce_entry) == 2 * sizeof(void *), "there is room for two");
	return reduce_fold_len(&sum) <= n * sizeof(void *) ? n : SIZE_MAX;
}

static void *fold_memory(const struct walk *walk)
{
	return walk->inputs + walk->most;
}

static void walk_again(const struct agent_rows *rows)
{
	struct agent_rows_work *work = rows->work;

	work->walk = (struct walk){
		.entries = work->sort.entries,
		.n = work->sort.n,
		.most = inputs_at_once(rows),
		.inputs = (const void **)work->sort.scratch,
	};
}

static bool sort_entries(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;

	if (!reduce_sort_step(&rows->work->sort, looks))
		return false;
	walk_again(rows);
	return true;
}

/* The next inputs of a row. Returns false at the end, and when enough was looked at. */
static bool walk_next(struct walk *walk, int64_t *looks)
{
	int64_t before = walk->row;

	walk->n_inputs = 0;
	if (walk->at == walk->n || *looks <= 0)
		return false;
	walk->row = walk->entries[walk->at].row;
	walk->is_first = !walk->at || walk->row != before;
	for (; walk->at < walk->n && walk->entries[walk->at].row == walk->row &&
	       walk->n_inputs < walk->most;
	     walk->at++)
		walk->inputs[walk->n_inputs++] = walk->entries[walk->at].values;
	walk->is_last = walk->at == walk->n || walk->entries[walk->at].row != walk->row;
	reduce_looked(looks, walk->n_inputs, 0);
	return true;
}

/*
 * The values of the row, whole, to n outputs: input after input where there are many, in slices where these are long. Returns whether
 * the inputs that are here are in it.
 */
static bool sum_row(struct agent_rows *rows, void *const *outputs, size_t n, int64_t *looks)
{
	struct agent_rows_work *work = rows->work;
	const struct walk *walk = &work->walk;
	struct reduce_params sum = sum_of(rows);

	sum.inputs = walk->inputs;
	sum.n_inputs = walk->n_inputs;
	sum.outputs = outputs;
	sum.n_outputs = n;
	if (walk->is_first && walk->is_last) {
		sum.first = work->n_summed;
		sum.n_elements = reduce_slice_elements(&sum, rows->width);
		rows->status = reduce_run(&sum);
		work->n_summed = sum.first + sum.n_elements;
		if (work->n_summed == rows->width)
			work->n_summed = 0;
	} else {
		reduce_fold_add(&sum, fold_memory(walk), walk->is_first);
		if (walk->is_last)
			rows->status = reduce_fold_end(&sum, fold_memory(walk));
	}
	reduce_looked(looks, n, (walk->n_inputs + n) * sum.n_elements * dtype_size(sum.dtype));
	return !rows->status && !work->n_summed;
}

/* Each row is one of a server's, if that is to have any. */
static bool count_rows(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct walk *walk = &rows->work->walk;

	while (walk_next(walk, looks)) {
		struct agent_rows_server *server = &rows->servers[server_of(rows, walk->row)];

		server->n += server->due && walk->is_last;
	}
	if (walk->at < walk->n)
		return false;
	walk_again(rows);
	return true;
}

static bool make_pieces_of(struct agent_rows *rows, struct agent_rows_server *server,
			   int64_t *looks)
{
	struct block_cache *blocks = job_of(rows)->agent->params.blocks;
	uint64_t step = rows->push_step;
	uint64_t n_pieces = MAX(server->n / step + !!(server->n % step), UINT64_C(1));
	struct data_rows head = {
		.rows = rows->n_rows,
		.n = server->n,
		.width = rows->width,
		.step = rows->push_step,
	};

	data_rows_encode(&head);
	if (!server->pieces)
		server->pieces = calloc(n_pieces, sizeof(struct block *));
	for (; server->pieces && server->n_pieces < n_pieces; server->n_pieces++) {
		struct block **block = &server->pieces[server->n_pieces];
		uint64_t here = MIN(server->n - server->n_pieces * step, step);

		if (*looks <= 0)
			return false;
		if (block_new(blocks, data_rows_len(here, rows->row_len), NULL, block))
			break;
		memcpy((*block)->data, &head, sizeof(head));
		reduce_looked(looks, ROWS_PIECE_LOOKS, 0);
	}
	rows->status = server->n_pieces < n_pieces ? -ENOMEM : 0;
	return !rows->status;
}

static bool make_pieces(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct agent_rows_work *work = rows->work;

	for (; work->server < rows->n_servers; work->server++) {
		struct agent_rows_server *server = &rows->servers[work->server];

		if (server->due && !make_pieces_of(rows, server, looks))
			return false;
	}
	return true;
}

/* Where the next row of a server and its values go. */
static int64_t *next_place(const struct agent_rows *rows, struct agent_rows_server *server,
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
static bool cut(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct agent_rows_work *work = rows->work;
	struct walk *walk = &work->walk;

	while (work->n_summed || walk_next(walk, looks)) {
		struct agent_rows_server *server = &rows->servers[server_of(rows, walk->row)];

		if (!server->due)
			continue;
		if (!work->n_summed && walk->is_first)
			*next_place(rows, server, &work->values) = walk->row;
		if (!sum_row(rows, &work->values, 1, looks))
			return false;
	}
	return walk->at == walk->n;
}

/* All ranks are here: what they gave is the result, */
static bool count_result(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct walk *walk = &rows->work->walk;

	while (walk_next(walk, looks))
		rows->n_result += walk->is_last;
	if (walk->at < walk->n)
		return false;
	walk_again(rows);
	rows->status = takers_find(rows, &rows->work->takers);
	return !rows->status;
}

/* and goes to those that have room for it. */
static bool finish_here(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct takers *takers = &rows->work->takers;
	struct walk *walk = &rows->work->walk;

	while (takers->n && (rows->work->n_summed || walk_next(walk, looks))) {
		if (!sum_row(rows, takers->values, takers->n, looks))
			return false;
		if (walk->is_last)
			takers_move(takers, walk->row, rows->row_len);
	}
	return !takers->n || walk->at == walk->n;
}

void agent_rows_sort(struct task *task)
{
	static reduce_step_fn *const here[] = {
		touch_memory, read_entries, sort_entries, count_result, finish_here, NULL,
	};
	static reduce_step_fn *const for_servers[] = {
		touch_memory, read_entries, sort_entries, count_rows, make_pieces, cut, NULL,
	};
	struct agent_rows *rows = container_of(task, struct agent_rows, task);

	run(task, rows->n_servers ? for_servers : here, make_entries);
	if (rows->status == -ERANGE)
		(void)snprintf(rows->text, sizeof(rows->text),
			       "a row's values have a sum that is no %s, for an average of them: "
			       "give numbers of a wider type",
			       dtype_name(rows->round->tensor->dtype));
}

/* -- Merging, ----------------------------------------------------------------------------------------- */

static int make_lists(struct agent_rows *rows)
{
	struct agent_rows_work *work = rows->work;

	work->lists = calloc(rows->n_servers, sizeof(*work->lists));
	work->heap = calloc(rows->n_servers, sizeof(*work->heap));
	if (!work->lists || !work->heap)
		return -ENOMEM;
	for (size_t i = 0; i < rows->n_servers; i++)
		work->lists[i] = (struct reduce_list){ rows->servers[i].result,
						       rows->servers[i].n_result_pieces };
	return takers_find(rows, &work->takers);
}

/* A list is what its server may have: then no row is in two of them. Returns 1 at its end, 0, or -EINVAL. */
static int check_list(const struct agent_rows *rows, struct reduce_cursor *cursor, int64_t *looks)
{
	while (*looks > 0) {
		int r = reduce_list_next(cursor, rows->n_rows);

		if (r <= 0)
			return r ?: 1;
		if (server_of(rows, cursor->row) != rows->work->list)
			return -EINVAL;
		reduce_looked(looks, 1, 0);
	}
	return 0;
}

static bool check_lists(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct agent_rows_work *work = rows->work;

	for (; work->list < rows->n_servers; work->list++) {
		int r;

		if (!work->cursor.list)
			work->cursor = reduce_list_begin(&work->lists[work->list]);
		r = check_list(rows, &work->cursor, looks);
		if (r < 0) {
			(void)snprintf(rows->text, sizeof(rows->text),
				       "%.80s answered with wrong rows",
				       agent_server_name(job_of(rows), work->list));
			rows->status = -EPROTO;
		}
		if (r <= 0)
			return false;
		work->cursor.list = NULL;
	}
	reduce_merge_start(&work->merge, work->lists, rows->n_servers, rows->row_len, work->heap);
	return true;
}

static bool merge(void *owner, int64_t *looks)
{
	struct agent_rows *rows = owner;
	struct agent_rows_work *work = rows->work;
	struct takers *takers = &work->takers;

	while (*looks > 0) {
		if (!work->n_copied &&
		    !reduce_merge_next(&work->merge, &work->merged, &work->merged_values))
			return true;
		reduce_looked(looks, 1, 0);
		/* The first at once: the row is remembered by that. */
		for (; work->n_copied < takers->n && (!work->n_copied || *looks > 0);
		     work->n_copied++) {
			metric_copy(&job_of(rows)->agent->copied_rows,
				    takers->values[work->n_copied], work->merged_values,
				    rows->row_len);
			reduce_looked(looks, 1, rows->row_len);
		}
		if (work->n_copied < takers->n)
			break;
		work->n_copied = 0;
		takers_move(takers, work->merged, rows->row_len);
	}
	return false;
}

void agent_rows_merge(struct task *task)
{
	static reduce_step_fn *const steps[] = { check_lists, merge, NULL };

	run(task, steps, make_lists);
}
