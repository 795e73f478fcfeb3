/* What a round of push_pull_rows has held, when nobody needs it any more: it goes in steps, as there may be much of it. */
#include "../base/chores.h"
#include "agent/round/rows.h"
#include "world.h"

#define WIDTH 4
#define ROW   (sizeof(int64_t) + WIDTH * sizeof(float))
/* Some hundreds of pieces of the shortest parts there are: half of them goes to and comes from each of two servers. */
#define TABLE 200000

/* Of each node: its own rows are those of its number modulo two. */
struct many {
	int64_t numbers[2][TABLE / 2], got[2][TABLE];
	float values[2][TABLE / 2 * WIDTH], sums[2][TABLE * WIDTH];
	struct asked asked[2];
};

static struct many many;

static struct world *two_nodes(bool resume)
{
	return world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .distributed = resume, .resume = resume });
}

/* A node's part in a round in which each gives so many rows. */
static void submit_one(struct declared *declared, unsigned i, uint64_t round, uint64_t n)
{
	struct asked *asked = &many.asked[i];

	for (uint64_t k = 0; k < n; k++) {
		many.numbers[i][k] = (int64_t)(2 * k + i);
		for (unsigned m = 0; m < WIDTH; m++)
			many.values[i][k * WIDTH + m] = (float)(2 * k + i + m);
	}
	*asked = asked_of(OPERATION_PUSH_PULL_ROWS, REDUCTION_SUM, many.values[i], n * WIDTH,
			  many.sums[i], TABLE * WIDTH);
	asked->base.width = WIDTH;
	asked->base.input_rows = many.numbers[i];
	asked->base.output_rows = many.got[i];
	asked_submit(asked, &declared[i], round);
}

static void submit(struct declared *declared, uint64_t round, uint64_t n)
{
	for (unsigned i = 0; i < 2; i++)
		submit_one(declared, i, round, n);
}

static void expect_all(struct world *world, uint64_t n)
{
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, many.asked[i].done);
		ASSERT_STR(many.asked[i].failure.text, "");
		ASSERT_EQ(many.asked[i].base.n_rows, 2 * n);
		for (uint64_t k = 0; k < 2 * n; k++) {
			ASSERT_EQ(many.got[i][k], k);
			ASSERT_TRUE(many.sums[i][k * WIDTH + 1] == (float)(k + 1));
		}
	}
}

static struct agent_job *job_at(const struct world *world, unsigned node)
{
	return list_first(&world->nodes[node].agent->jobs, struct agent_job, link);
}

static bool is_spending(const struct agent_job *job)
{
	return spending_is_under_way(&job->memory.spent_rows);
}

static struct declared *declare(struct world *world, const char *name)
{
	struct declared *declared = world_declare(world, name, DTYPE_FLOAT32, TABLE * WIDTH);

	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, declared[i].done);
	return declared;
}

/* After it what has come of a round is still there, and no step has been taken. */
static struct declared *do_round(struct world *world)
{
	struct declared *declared;

	world_form(world);
	declared = declare(world, "table");
	chores_hold();
	submit(declared, 1, TABLE / 2);
	expect_all(world, TABLE / 2);
	for (unsigned i = 0; i < 2; i++)
		ASSERT_TRUE(is_spending(job_at(world, i)));
	return declared;
}

TEST(a_result_of_many_pieces_goes_in_steps)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct declared *declared = do_round(world);
	struct agent_job *job = job_at(world, 0);
	struct chore *chore = &job->memory.spent_rows.chore;
	unsigned holds = job->holds;
	uint64_t used;

	ASSERT_INT(quota_used(&job->memory.rows), >=, TABLE * ROW);
	for (unsigned i = 0; i < 3; i++)
		ASSERT_TRUE(chore->step(chore));
	/* One of two lists at least. */
	used = quota_used(&job->memory.rows);
	ASSERT_INT(used, >=, TABLE / 4 * ROW);
	chores_go_on();
	WORLD_UNTIL(world, !is_spending(job));
	ASSERT_EQ(quota_used(&job->memory.rows), 0);
	ASSERT_EQ(job->holds, holds - 1);
	submit(declared, 2, 10);
	expect_all(world, 10);
}

/* All of it is charged for, until it is gone, and the job is there. */
TEST(a_job_ends_while_a_result_goes)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct failure failure;

	(void)do_round(world);
	(void)failure_set(&failure, -EIO, "over");
	agent_job_fail(job_at(world, 0), &failure, NULL);
	for (unsigned i = 0; i < 3; i++)
		ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_TRUE(is_spending(job_at(world, 0)));
	chores_go_on();
	WORLD_UNTIL(world, list_empty(&world->nodes[0].agent->jobs));
	WORLD_UNTIL(world, list_empty(&world->nodes[1].agent->jobs));
}

/* world_free() looks at the blocks. */
TEST(an_agent_ends_while_a_result_goes)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);

	(void)do_round(world);
}

TEST(a_job_is_left_to_the_next_process_while_a_result_goes)
{
	_cleanup_(world_freep) struct world *world = two_nodes(true);
	struct agent_past past = { .rounds = 1 };
	struct declared *declared = do_round(world);
	struct agent_join join = world_join_of(world, 0);
	struct failure failure = { 0 };

	chores_forget(&job_at(world, 0)->memory.spent_rows.chore);
	world_restart(world, 0);
	chores_go_on();
	if (world_resume(world, 0, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	WORLD_UNTIL(world, world->ranks[0].joined || world->ranks[0].ended);
	ASSERT_STR(world->ranks[0].failure.text, "");
	ASSERT_OK(declared_again(&declared[0], &world->ranks[0], "table", DTYPE_FLOAT32,
				 TABLE * WIDTH, &past, &failure));
	submit(declared, 2, 10);
	expect_all(world, 10);
}

/* What was cut and has not been pushed is cut anew. */
TEST(pieces_for_servers_that_are_lost_go_in_steps)
{
	_cleanup_(world_freep) struct world *world = two_nodes(true);
	const struct agent_round *round;
	struct declared *declared;
	struct agent_job *job;

	world_form(world);
	declared = declare(world, "table");
	job = job_at(world, 0);
	submit_one(declared, 0, 1, TABLE / 2);
	ASSERT_TRUE(!is_spending(job));
	chores_hold();
	for (size_t i = 0; i < job->fleet.n_servers; i++)
		job->agent->hooks->rows_begin_anew(job, i, 1);
	round = list_first(&job->schedule.moving, struct agent_round, moving_link);
	WORLD_UNTIL(world, round->rows->attempt > 1);
	ASSERT_TRUE(is_spending(job));
	ASSERT_INT(quota_used(&job->memory.rows), >, TABLE / 2 * (2 * 16 + ROW) + TABLE / 8 * ROW);
	submit_one(declared, 1, 1, TABLE / 2);
	chores_go_on();
	expect_all(world, TABLE / 2);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, !quota_used(&job_at(world, i)->memory.rows));
}

/* A round that would have room once that is gone, and now has none. */
static void starve(struct world *world, struct declared *declared)
{
	for (unsigned i = 0; i < 2; i++) {
		struct quota *quota = &job_at(world, i)->memory.rows;

		quota->limit = quota_used(quota) + 1000;
	}
	submit(declared, 2, TABLE / 8);
	for (unsigned i = 0; i < 20; i++)
		ASSERT_OK(loop_turn(world->loop, 0));
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_TRUE(!list_empty(&job_at(world, i)->later.starved));
		ASSERT_TRUE(!many.asked[i].done);
	}
}

TEST(a_round_waits_for_the_room_of_the_one_before)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct declared *declared = do_round(world);

	starve(world, declared);
	chores_go_on();
	expect_all(world, TABLE / 8);
	/* And where there is none at all it fails. */
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, !is_spending(job_at(world, i)));
		job_at(world, i)->memory.rows.limit = 1000;
	}
	submit(declared, 3, TABLE / 8);
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, many.asked[i].done);
		ASSERT_EQ(many.asked[i].failure.status, -EDQUOT);
	}
}

/* Of a round that has begun. */
TEST(a_result_has_the_room_of_the_one_before)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct declared *declared = do_round(world);

	submit(declared, 2, TABLE / 8);
	for (unsigned i = 0; i < 2; i++) {
		struct quota *quota = &job_at(world, i)->memory.rows;

		ASSERT_TRUE(is_spending(job_at(world, i)));
		quota->limit = quota_used(quota);
	}
	expect_all(world, TABLE / 8);
	chores_go_on();
}

/* Though there is room for it. */
TEST(a_round_does_not_go_past_one_that_waits_for_room)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct declared *declared = do_round(world), *other = declare(world, "other");
	static struct asked small[2];
	static int64_t got[2][2];
	static float sums[2][2 * WIDTH];

	starve(world, declared);
	for (unsigned i = 0; i < 2; i++) {
		small[i] = asked_of(OPERATION_PUSH_PULL_ROWS, REDUCTION_SUM, many.values[i], WIDTH,
				    sums[i], 2 * WIDTH);
		small[i].base.width = WIDTH;
		small[i].base.input_rows = many.numbers[i];
		small[i].base.output_rows = got[i];
		asked_submit(&small[i], &other[i], 1);
		ASSERT_TRUE(job_at(world, i)->later.starved.next !=
			    job_at(world, i)->later.starved.prev);
	}
	chores_go_on();
	expect_all(world, TABLE / 8);
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, small[i].done);
		ASSERT_STR(small[i].failure.text, "");
		ASSERT_TRUE(got[i][1] == 1 && sums[i][WIDTH + 1] == 2);
	}
}

TEST(a_round_that_waits_for_room_ends_with_its_job)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);
	struct failure failure;

	starve(world, do_round(world));
	(void)failure_set(&failure, -EIO, "over");
	agent_job_fail(job_at(world, 0), &failure, NULL);
	chores_go_on();
	WORLD_UNTIL(world, many.asked[0].done && many.asked[1].done);
	ASSERT_EQ(many.asked[0].failure.status, -EIO);
}

TEST(a_round_that_waits_for_room_ends_with_its_agent)
{
	_cleanup_(world_freep) struct world *world = two_nodes(false);

	starve(world, do_round(world));
	agent_close(world->nodes[0].agent);
	ASSERT_TRUE(many.asked[0].done);
	ASSERT_EQ(many.asked[0].failure.status, -ESHUTDOWN);
}
