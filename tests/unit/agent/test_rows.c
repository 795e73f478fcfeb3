/* push_pull_rows over two nodes, and what servers hold of it. */
#include "agent/round/rows.h"
#include "agent/servers/setup.h"
#include "held.h"
#include "world.h"
#include <sched.h>

#define WIDTH 4
#define TABLE 100

/* -- Notices that are lost ---------------------------------------------------------------------------------------- */

int __real_peer_notice(struct peer *peer, const struct data_header *header, const void *payload);
int __wrap_peer_notice(struct peer *peer, const struct data_header *header, const void *payload);

static unsigned n_lost;
static bool loses;

int __wrap_peer_notice(struct peer *peer, const struct data_header *header, const void *payload)
{
	if (header->op == DATA_HAVE && loses) {
		n_lost++;
		return 0;
	}
	return __real_peer_notice(peer, header, payload);
}

/* -- What is left to the pool -------------------------------------------------------------------------------------- */

static unsigned n_posted;

/* Tasks whose runs are counted, and what they do. */
static struct counted {
	const struct task *task;
	void (*run)(struct task *task);
} counted[32];
static _Atomic size_t n_counted = ARRAY_SIZE(counted);
static _Atomic unsigned n_runs, n_over;
static bool is_overtaken; /* who posts a task, by the task */

/* The newest that it was posted for: its place may have been another's. */
static void count_run(struct task *task)
{
	n_runs++;
	for (size_t i = n_counted; i-- > 0;)
		if (counted[i].task == task) {
			counted[i].run(task);
			n_over++;
			return;
		}
}

int __real_pool_post(struct pool *pool, struct task *task);
int __wrap_pool_post(struct pool *pool, struct task *task);

int __wrap_pool_post(struct pool *pool, struct task *task)
{
	int r;

	n_posted++;
	if (n_counted < ARRAY_SIZE(counted)) {
		counted[n_counted] = (struct counted){ task, task->run };
		n_counted++;
		task->run = count_run;
	}
	r = __real_pool_post(pool, task);
	while (is_overtaken && !n_over)
		(void)sched_yield();
	return r;
}

/* Of all inputs, in one run of a task at most. */
static _Atomic uint64_t most_summed;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

static void note_sum(const struct reduce_params *params)
{
	uint64_t bytes = params->n_inputs * params->n_elements * dtype_size(params->dtype);

	most_summed = MAX(most_summed, bytes);
}

int __wrap_reduce_run(const struct reduce_params *params)
{
	note_sum(params);
	return __real_reduce_run(params);
}

void __real_reduce_fold_add(const struct reduce_params *params, void *acc, bool is_first);
void __wrap_reduce_fold_add(const struct reduce_params *params, void *acc, bool is_first);

void __wrap_reduce_fold_add(const struct reduce_params *params, void *acc, bool is_first)
{
	note_sum(params);
	__real_reduce_fold_add(params, acc, is_first);
}

/* -- Requests ----------------------------------------------------------------------------------------------------- */

/* n rows with their values, of so many each; room for as many. */
struct given {
	unsigned width;
	int64_t *numbers, *got;
	void *values, *sums;
	uint64_t n, room;
};

static struct asked rows_asked(const struct given *given, unsigned reduction)
{
	struct asked asked =
		asked_of(OPERATION_PUSH_PULL_ROWS, reduction, given->values,
			 given->n * given->width, given->sums, given->room * given->width);

	asked.base.width = given->width;
	asked.base.input_rows = given->numbers;
	asked.base.output_rows = given->got;
	return asked;
}

/* Two ranks ask, and runs of tasks are counted until both are answered. */
static void ask_both(struct world *world, struct asked *asked, struct declared *declared)
{
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, declared[i].done);
	n_counted = 0;
	n_runs = 0;
	for (unsigned i = 0; i < 2; i++)
		asked_submit(&asked[i], &declared[i], 1);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, asked[i].done);
	ASSERT_INT(n_counted, <, ARRAY_SIZE(counted));
	n_counted = ARRAY_SIZE(counted);
}

/* Each rank gives a row of its own, and one that both give. */
static void rows(struct world *world, struct declared *declared, uint64_t round)
{
	struct asked asked[WORLD_RANKS];
	int64_t numbers[WORLD_RANKS][2], got[WORLD_RANKS][TABLE];
	float values[WORLD_RANKS][2 * WIDTH], sums[WORLD_RANKS][TABLE * WIDTH];

	for (unsigned i = 0; i < world->size; i++) {
		numbers[i][0] = 3;
		numbers[i][1] = 10 + i;
		for (unsigned k = 0; k < 2 * WIDTH; k++)
			values[i][k] = (float)(i + 1);
		asked[i] = rows_asked(
			&(struct given){ WIDTH, numbers[i], got[i], values[i], sums[i], 2, TABLE },
			REDUCTION_SUM);
		asked_submit(&asked[i], &declared[i], round);
	}
	for (unsigned i = 0; i < world->size; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
		ASSERT_EQ(asked[i].base.n_rows, world->size + 1);
		ASSERT_EQ(got[i][0], 3);
		ASSERT_TRUE(sums[i][0] == (float)(world->size * (world->size + 1) / 2));
	}
}

/* At all servers. */
static size_t n_held(const struct world *world)
{
	size_t n = 0;

	for (unsigned i = 0; i < world->options.n_nodes; i++)
		n += held_at(world->nodes[i].server);
	return n;
}

/* Node's agent attaches once more at all servers, which are the same processes. */
static void attach_again(struct world *world, unsigned node)
{
	struct agent_job *job = list_first(&world->nodes[node].agent->jobs, struct agent_job, link);

	for (size_t i = 0; i < job->fleet.n_servers; i++)
		agent_keep_again(job, i);
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		WORLD_UNTIL(world, job->fleet.servers[i].attached);
}

/* Few rows for many ranks are much to copy. */
TEST(what_is_copied_for_many_ranks_is_left_to_the_pool)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 40, .no_servers = true, .inline_bytes = 4096 });
	struct declared *declared;

	world_form(world);
	declared = world_declare(world, "table", DTYPE_FLOAT32, TABLE * WIDTH);
	n_posted = 0;
	rows(world, declared, 1);
	ASSERT_EQ(n_posted, 1);
}

enum { MANY = 1 << 18, MANY_TABLE = 1 << 20 };

/* Each of two ranks gives the same: so many rows, in another order than that of rows, and each as often as makes many. */
static void many_rows(struct world *world, unsigned n_rows)
{
	_cleanup_(freep) int64_t *numbers = calloc(MANY, sizeof(*numbers));
	_cleanup_(freep) float *values = calloc(MANY, sizeof(*values));
	_cleanup_(freep) float *expected = calloc(MANY_TABLE, sizeof(*expected));
	struct declared *declared = world_declare(world, "table", DTYPE_FLOAT32, MANY_TABLE);
	int64_t *got[2] = { NULL };
	float *sums[2] = { NULL };
	struct asked asked[2];

	for (unsigned i = 0; i < MANY; i++) {
		numbers[i] = i % n_rows * 5 % MANY_TABLE;
		values[i] = (float)(i % n_rows + 1);
		expected[numbers[i]] += 2 * values[i];
	}
	for (unsigned i = 0; i < 2; i++) {
		got[i] = calloc(MANY, sizeof(*got[i]));
		sums[i] = calloc(MANY, sizeof(*sums[i]));
		asked[i] = rows_asked(
			&(struct given){ 1, numbers, got[i], values, sums[i], MANY, MANY },
			REDUCTION_SUM);
	}
	ask_both(world, asked, declared);
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_STR(asked[i].failure.text, "");
		ASSERT_EQ(asked[i].base.n_rows, n_rows);
		for (unsigned k = 0; k < n_rows; k++)
			ASSERT_TRUE((!k || got[i][k] > got[i][k - 1]) &&
				    sums[i][k] == expected[got[i][k]]);
		free(got[i]);
		free(sums[i]);
	}
}

static struct world *world_of_one_thread(unsigned n_nodes)
{
	struct world *world = world_new(&(struct world_options){ .n_nodes = n_nodes,
								 .n_local = 2 / n_nodes,
								 .no_servers = n_nodes == 1,
								 .n_threads = 1,
								 .inline_bytes = 4096 });

	world_form(world);
	return world;
}

/*
 * Of each there is memory to be made; it is read, counted and moved by two digits, counted, and summed to its output; at servers it
 * is looked at in both lists to be checked, to be counted and to be summed to the result; and then on both nodes to be checked and
 * to be copied to the output.
 */
TEST(many_rows_are_worked_in_slices)
{
	enum { SORTS = 2 * 9 * MANY, SERVERS = 3 * 2 * MANY + MANY, MERGES = 2 * 3 * MANY };

	for (unsigned n_nodes = 1; n_nodes <= 2; n_nodes++) {
		_cleanup_(world_freep) struct world *world = world_of_one_thread(n_nodes);
		size_t n_looks = SORTS + (n_nodes > 1) * (SERVERS + MERGES);

		many_rows(world, MANY);
		ASSERT_INT(n_runs, >=, n_looks / ROWS_LOOKS);
	}
}

/* Its values are summed input after input. */
TEST(a_row_that_is_given_many_times_takes_no_more_than_its_turns)
{
	enum { SORTS = 2 * 8 * MANY };
	_cleanup_(world_freep) struct world *world = world_of_one_thread(1);

	many_rows(world, 1);
	ASSERT_INT(n_runs, >=, SORTS / ROWS_LOOKS);
}

/* Rows of 32 KiB have just room beside them for what they make; others are summed in slices. */
TEST(a_long_row_that_is_given_many_times_takes_no_more_than_its_turns)
{
	for (unsigned more = 0; more < 2; more++) {
		enum { N = 6000 };
		_cleanup_(world_freep) struct world *world = world_of_one_thread(1);
		unsigned width = (32 << 10) / sizeof(float) + more;
		_cleanup_(freep) int64_t *numbers = calloc(N, sizeof(*numbers));
		_cleanup_(freep) float *values = malloc((size_t)N * width * sizeof(*values));
		_cleanup_(freep) float *sums = malloc(2 * width * sizeof(*sums));
		struct declared *declared = world_declare(world, "table", DTYPE_FLOAT32, width);
		struct asked asked[2];
		int64_t got[2];

		for (size_t k = 0; k < (size_t)N * width; k++)
			values[k] = (float)(k % width % 1000);
		for (unsigned i = 0; i < 2; i++)
			asked[i] = rows_asked(&(struct given){ width, numbers, &got[i], values,
							       sums + i * width, N, 1 },
					      REDUCTION_SUM);
		most_summed = 0;
		ask_both(world, asked, declared);
		for (unsigned k = 0; k < 2 * width; k++)
			ASSERT_TRUE(sums[k] == (float)(2 * N * (k % width % 1000)));
		ASSERT_INT(most_summed, >, PART_SUM_MAX / 2);
		ASSERT_INT(most_summed, <=, PART_SUM_MAX);
	}
}

/* The sum is none, and took as long. Each rank gives the row twice. */
TEST(a_row_that_fails_takes_no_more_than_its_turns)
{
	enum { LEN = 32 << 20, SLICE = PART_SUM_MAX };
	_cleanup_(world_freep) struct world *world = world_of_one_thread(1);
	_cleanup_(freep) int8_t *values = malloc(2 * LEN), *sums = malloc(LEN);
	struct declared *declared = world_declare(world, "table", DTYPE_INT8, LEN);
	int64_t numbers[2] = { 0 }, got[2];
	struct asked asked[2];

	memset(values, INT8_MAX, 2 * LEN);
	for (unsigned i = 0; i < 2; i++)
		asked[i] = rows_asked(&(struct given){ LEN, numbers, &got[i], values, sums, 2, 1 },
				      REDUCTION_AVERAGE);
	ask_both(world, asked, declared);
	for (unsigned i = 0; i < 2; i++)
		ASSERT_EQ(asked[i].failure.status, -ERANGE);
	ASSERT_INT(n_runs, >=, SLICE / (ROWS_LOOKS * ROWS_LOOK_COST));
}

/* Of three ranks, on one node or at a server. */
static void sum_long_row(unsigned n_nodes)
{
	enum { N = 3, LEN = 48 << 20, LONG = LEN / sizeof(float) };
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = n_nodes,
						   .n_local = N / n_nodes,
						   .no_servers = n_nodes == 1,
						   .n_threads = 1,
						   .inline_bytes = 4096 });
	float *values[N], *sums[N];
	int64_t number = 0, got[N];
	struct declared *declared;
	struct asked asked[N];

	world_form(world);
	declared = world_declare(world, "table", DTYPE_FLOAT32, LONG);
	most_summed = 0;
	n_counted = 0;
	n_runs = 0;
	for (unsigned i = 0; i < N; i++) {
		values[i] = malloc(LEN);
		sums[i] = malloc(LEN);
		for (size_t k = 0; k < LONG; k++)
			values[i][k] = (float)((i + 1) * (k % 1024));
		WORLD_UNTIL(world, declared[i].done);
		asked[i] = rows_asked(
			&(struct given){ LONG, &number, &got[i], values[i], sums[i], 1, 1 },
			REDUCTION_SUM);
		asked_submit(&asked[i], &declared[i], 1);
	}
	for (unsigned i = 0; i < N; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
		ASSERT_EQ(got[i], 0);
		for (size_t k = 0; k < LONG; k++)
			ASSERT_TRUE(sums[i][k] == (float)(6 * (k % 1024)));
		free(values[i]);
		free(sums[i]);
	}
	n_counted = ARRAY_SIZE(counted);
	ASSERT_INT(most_summed, >, PART_SUM_MAX / 4);
	ASSERT_INT(most_summed, <=, PART_SUM_MAX);
	/* What a slice takes more than a run may is made good. */
	ASSERT_INT(n_runs, >=, 2 * N * (uint64_t)LEN / (ROWS_LOOKS * ROWS_LOOK_COST));
}

TEST(a_long_row_is_summed_in_slices_here)
{
	sum_long_row(1);
}

TEST(a_long_row_is_summed_in_slices_at_servers)
{
	sum_long_row(3);
}

TEST(rows_that_are_refused_before_their_task_is_posted_fail)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 1,
						   .no_servers = true,
						   .n_threads = 1,
						   .inline_bytes = 1 });
	int64_t number = TABLE, got[TABLE];
	float value = 1, sums[TABLE];
	struct declared *declared;
	struct asked asked;

	world_form(world);
	declared = world_declare(world, "table", DTYPE_FLOAT32, TABLE);
	WORLD_UNTIL(world, declared->done);
	asked = rows_asked(&(struct given){ 1, &number, got, &value, sums, 1, TABLE },
			   REDUCTION_SUM);
	n_counted = 0;
	n_over = 0;
	is_overtaken = true;
	asked_submit(&asked, declared, 1);
	is_overtaken = false;
	WORLD_UNTIL(world, asked.done);
	n_counted = ARRAY_SIZE(counted);
	ASSERT_EQ(asked.failure.status, -EINVAL);
	ASSERT_TRUE(strstr(asked.failure.text, "row 100 of a table of 100"));
}

/* Also where none are given: it may be one of thousands. */
TEST(what_is_held_of_a_round_is_charged)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 2, .n_local = 1 });
	static float sums[2][TABLE * WIDTH];
	static int64_t got[2][TABLE];
	struct declared *declared;
	struct asked asked[2];
	struct agent_job *job;

	world_form(world);
	job = world->ranks[0].member.job;
	declared = world_declare(world, "table", DTYPE_FLOAT32, TABLE * WIDTH);
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_EQ(quota_used(&job->memory.rows), 0);
		WORLD_UNTIL(world, declared[i].done);
		asked[i] = rows_asked(
			&(struct given){ WIDTH, got[i], got[i], sums[i], sums[i], 0, TABLE },
			REDUCTION_SUM);
	}
	asked_submit(&asked[0], &declared[0], 1);
	ASSERT_INT(quota_used(&job->memory.rows), >=,
		   sizeof(struct agent_rows) +
			   job->fleet.n_servers * sizeof(struct agent_rows_server));
	asked_submit(&asked[1], &declared[1], 1);
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
	WORLD_UNTIL(world, !quota_used(&job->memory.rows));
}

/* It may be the last of the table, or the next be a long time off. */
TEST(that_a_node_has_a_result_is_said_again_when_it_attaches)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .distributed = true, .resume = true });
	struct declared *declared;

	world_form(world);
	declared = world_declare(world, "table", DTYPE_FLOAT32, TABLE * WIDTH);
	rows(world, declared, 1);
	WORLD_UNTIL(world, !n_held(world));

	loses = true;
	rows(world, declared, 2);
	ASSERT_EQ(n_lost, 2);
	ASSERT_EQ(n_held(world), 1);
	loses = false;
	attach_again(world, 0);
	ASSERT_EQ(n_held(world), 1);
	attach_again(world, 1);
	WORLD_UNTIL(world, !n_held(world));
	rows(world, declared, 3);
	WORLD_UNTIL(world, !n_held(world));
}

/* Its agent was killed before that was on its way, and the next process has no more of the round than that its ranks had seen it. */
TEST(that_a_node_has_a_result_is_said_by_its_next_process)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .distributed = true, .resume = true });
	struct agent_past past = { .rounds = 2 };
	struct failure failure = { 0 };
	struct declared *declared;
	struct agent_join join;

	world_form(world);
	join = world_join_of(world, 0);
	declared = world_declare(world, "table", DTYPE_FLOAT32, TABLE * WIDTH);
	loses = true;
	rows(world, declared, 1);
	rows(world, declared, 2);
	loses = false;
	attach_again(world, 1);
	ASSERT_EQ(n_held(world), 1);
	world_restart(world, 0);
	if (world_resume(world, 0, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	WORLD_UNTIL(world, world->ranks[0].joined || world->ranks[0].ended);
	ASSERT_STR(world->ranks[0].failure.text, "");
	ASSERT_EQ(n_held(world), 1);
	ASSERT_OK(declared_again(&declared[0], &world->ranks[0], "table", DTYPE_FLOAT32,
				 TABLE * WIDTH, &past, &failure));
	WORLD_UNTIL(world, !n_held(world));
	rows(world, declared, 3);
	WORLD_UNTIL(world, !n_held(world));
}
