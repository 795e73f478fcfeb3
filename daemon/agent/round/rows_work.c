/*
 * The work of push_pull_rows, in the pool: what the local ranks gave is sorted, summed and cut into pieces for servers; what servers
 * gave is merged into the outputs. rows.c says when. The control thread changes nothing that is read here meanwhile.
 */
#include "agent/round/rows.h"
#include <inttypes.h>
#include <stdio.h>

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

/* -- Sorting, ----------------------------------------------------------------------------------------- */

/* The rows of all local ranks, in the order of ranks. A trainer may write its numbers meanwhile: each is read once. */
static int read_entries(struct agent_rows *rows, struct reduce_entry *entries)
{
	const struct layout *layout = &job_of(rows)->layout;
	size_t n = 0;

	for (uint32_t i = 0; i < layout->n_local; i++) {
		const struct agent_request *request = request_of(rows, i);
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

static struct reduce_params sum_of(const struct agent_rows *rows)
{
	struct reduce_params params = agent_round_sum(rows->round);

	params.n_elements = rows->width;
	return params;
}

static int make_pieces(struct agent_rows *rows, struct agent_rows_server *server)
{
	struct block_cache *blocks = job_of(rows)->agent->params.blocks;
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
static int cut(struct agent_rows *rows, struct walk walk)
{
	struct reduce_params sum = sum_of(rows);
	struct walk count = walk;
	int r = 0;

	while (walk_next(&count)) {
		struct agent_rows_server *server = &rows->servers[server_of(rows, count.row)];

		server->n += server->due;
	}
	for (size_t i = 0; !r && i < rows->n_servers; i++)
		if (rows->servers[i].due)
			r = make_pieces(rows, &rows->servers[i]);
	if (r)
		return r;
	while (!r && walk_next(&walk)) {
		struct agent_rows_server *server = &rows->servers[server_of(rows, walk.row)];
		void *values;

		if (!server->due)
			continue;
		*next_place(rows, server, &values) = walk.row;
		sum.inputs = walk.inputs;
		sum.n_inputs = walk.n_inputs;
		sum.outputs = &values;
		sum.n_outputs = 1;
		r = reduce_run(&sum);
	}
	return r;
}

/* Local ranks with room for the result: room for one pointer each, to numbers and to values. */
struct takers {
	int64_t **numbers;
	void **values;
	size_t n;
};

static int takers_find(const struct agent_rows *rows, struct takers *takers)
{
	uint32_t n_local = job_of(rows)->layout.n_local;

	*takers = (struct takers){
		.numbers = calloc(n_local, sizeof(*takers->numbers)),
		.values = calloc(n_local, sizeof(*takers->values)),
	};
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
static int finish_here(struct agent_rows *rows, struct walk walk)
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
		r = reduce_run(&sum);
		takers_move(&takers, walk.row, rows->row_len);
	}
	takers_done(&takers);
	return r;
}

void agent_rows_sort(struct task *task)
{
	struct agent_rows *rows = container_of(task, struct agent_rows, task);
	size_t n = agent_rows_n_given(rows);
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
	if (rows->status == -ERANGE)
		(void)snprintf(rows->text, sizeof(rows->text),
			       "a row's values have a sum that is no %s, for an average of them: "
			       "give numbers of a wider type",
			       dtype_name(rows->round->tensor->dtype));
}

/* -- Merging, ----------------------------------------------------------------------------------------- */

/* A list is what its server may have: then no row is in two of them. */
static bool list_fits(const struct agent_rows *rows, size_t number, const struct reduce_list *list)
{
	if (!reduce_list_valid(list, rows->n_rows))
		return false;
	for (size_t i = 0; i < list->n_pieces; i++)
		for (size_t k = 0; k < list->pieces[i].n; k++)
			if (server_of(rows, list->pieces[i].rows[k]) != number)
				return false;
	return true;
}

static int merge(struct agent_rows *rows, struct reduce_list *lists, struct reduce_cursor *heap)
{
	struct reduce_merge merge;
	struct takers takers;
	const void *values;
	int64_t row;
	int r;

	for (size_t i = 0; i < rows->n_servers; i++) {
		const struct agent_rows_server *server = &rows->servers[i];

		lists[i] = (struct reduce_list){ server->result, server->n_result_pieces };
		if (list_fits(rows, i, &lists[i]))
			continue;
		(void)snprintf(rows->text, sizeof(rows->text), "%.80s answered with wrong rows",
			       agent_server_name(job_of(rows), i));
		return -EPROTO;
	}
	r = takers_find(rows, &takers);
	reduce_merge_start(&merge, lists, rows->n_servers, rows->row_len, heap);
	while (!r && reduce_merge_next(&merge, &row, &values)) {
		for (size_t i = 0; i < takers.n; i++)
			metric_copy(&job_of(rows)->agent->copied_rows, takers.values[i], values,
				    rows->row_len);
		takers_move(&takers, row, rows->row_len);
	}
	takers_done(&takers);
	return r;
}

void agent_rows_merge(struct task *task)
{
	struct agent_rows *rows = container_of(task, struct agent_rows, task);
	_cleanup_(freep) struct reduce_list *lists = calloc(rows->n_servers, sizeof(*lists));
	_cleanup_(freep) struct reduce_cursor *heap = calloc(rows->n_servers, sizeof(*heap));

	rows->status = lists && heap ? merge(rows, lists, heap) : -ENOMEM;
}
