/* Ranks that follow the others: what each hears of rounds that begin, and when all follow and are idle. */
#include "proto/types.h"
#include "world.h"
#include <stdio.h>

#define RANKS 4
#define MANY  32

/* What the ranks have been told. */
static struct {
	struct agent_begun begun[MANY];
	char names[MANY][32];
	unsigned n_begun, n_all, n_over; /* so often each came; */
	uint64_t turn;			 /* the last all_follow() for this turn, */
	struct failure failure;		 /* or with this */
} heard[RANKS];

static void on_begun(struct agent_member *member, const struct agent_begun *begun)
{
	unsigned n = heard[member->rank].n_begun++;

	ASSERT_TRUE(n < MANY && member->follows);
	heard[member->rank].begun[n] = *begun;
	(void)snprintf(heard[member->rank].names[n], sizeof(heard[0].names[0]), "%s", begun->name);
}

static void on_all_follow(struct agent_member *member, uint64_t turn, const struct failure *failure)
{
	ASSERT_TRUE(member->follows && turn == member->turn);
	heard[member->rank].turn = turn;
	if (failure) {
		heard[member->rank].failure = *failure;
		heard[member->rank].n_over++;
	} else {
		ASSERT_TRUE(member->idle);
		heard[member->rank].n_all++;
	}
}

static struct world *formed(const struct world_options *options)
{
	struct world *world = world_new(options);

	memset(heard, 0, sizeof(heard));
	world_form(world);
	for (unsigned i = 0; i < world->size; i++) {
		world->ranks[i].member.begun = on_begun;
		world->ranks[i].member.all_follow = on_all_follow;
	}
	return world;
}

static struct world *three(void)
{
	return formed(&(struct world_options){ .n_nodes = 1, .n_local = 3, .no_servers = true });
}

/* Ranks 0 and 2, and 1 and 3, are on a node. */
static struct world *two_nodes(void)
{
	return formed(&(struct world_options){ .n_nodes = 2, .n_local = 2 });
}

static int try_follow(struct world *world, uint32_t rank, const struct agent_follow *how,
		      struct failure *failure)
{
	return agent_follow(&world->ranks[rank].member, how, failure);
}

static void follow(struct world *world, uint32_t rank, bool idle, uint64_t turn)
{
	struct failure failure = { 0 };

	if (try_follow(world, rank, &(struct agent_follow){ true, idle, turn }, &failure))
		test_fail(__FILE__, __LINE__, "rank %u: %s", rank, failure.text);
}

static void follow_no_more(struct world *world, uint32_t rank, uint64_t turn)
{
	struct failure failure = { 0 };

	ASSERT_OK(try_follow(world, rank, &(struct agent_follow){ .turn = turn }, &failure));
}

/* One round, as each rank asks for it. */
struct turn {
	struct asked asked[RANKS];
	float data[RANKS];
};

static void begin(struct turn *turn, struct declared *tensor, uint32_t rank, uint64_t round)
{
	float *data = &turn->data[rank];

	*data = 1;
	turn->asked[rank] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, 1, data, 1);
	asked_submit(&turn->asked[rank], &tensor[rank], round);
}

/* The ranks from this one come to it, too, and it ends well. */
static void end(struct world *world, struct turn *turn, struct declared *tensor, uint32_t from,
		uint64_t round)
{
	for (uint32_t i = from; i < world->size; i++)
		begin(turn, tensor, i, round);
	for (uint32_t i = 0; i < world->size; i++) {
		WORLD_UNTIL(world, turn->asked[i].done);
		ASSERT_OK(turn->asked[i].failure.status);
		ASSERT_TRUE(turn->data[i] == (float)world->size);
	}
}

static void give_up(struct world *world, struct turn *turn, uint32_t rank)
{
	agent_cancel(&turn->asked[rank].base);
	WORLD_UNTIL(world, turn->asked[rank].done);
	ASSERT_EQ(turn->asked[rank].failure.status, -ECANCELED);
}

static void expect_n(const struct world *world, unsigned a, unsigned b, unsigned c)
{
	ASSERT_TRUE(world->size >= 3);
	ASSERT_EQ(heard[0].n_begun, a);
	ASSERT_EQ(heard[1].n_begun, b);
	ASSERT_EQ(heard[2].n_begun, c);
}

static void expect_last(uint32_t rank, const char *name, uint64_t first, uint64_t round)
{
	unsigned n = heard[rank].n_begun - 1;
	const struct agent_begun *begun = &heard[rank].begun[n];

	ASSERT_STR(heard[rank].names[n], name);
	ASSERT_EQ(begun->first, first);
	ASSERT_EQ(begun->round, round);
	ASSERT_EQ(begun->dtype, DTYPE_FLOAT32);
	ASSERT_EQ(begun->elements, 1);
}

/* -- What they hear ------------------------------------------------------------------------------------------------ */

TEST(who_follows_hears_once_of_each_round_that_begins)
{
	_cleanup_(world_freep) struct world *world = three();
	struct declared *tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct turn turn;

	begin(&turn, tensor, 0, 1);
	end(world, &turn, tensor, 1, 1);
	follow(world, 2, false, 1);
	expect_n(world, 0, 0, 0);
	for (uint64_t round = 2; round < 5; round++) {
		begin(&turn, tensor, 0, round);
		expect_n(world, 0, 0, (unsigned)round - 1);
		expect_last(2, "grad", round, round);
		ASSERT_EQ(heard[2].begun[round - 2].operation, OPERATION_PUSH_PULL);
		ASSERT_EQ(heard[2].begun[round - 2].reduction, REDUCTION_SUM);
		end(world, &turn, tensor, 1, round);
		expect_n(world, 0, 0, (unsigned)round - 1);
	}
	follow_no_more(world, 2, 1);
	begin(&turn, tensor, 0, 5);
	end(world, &turn, tensor, 1, 5);
	expect_n(world, 0, 0, 3);
}

TEST(who_begins_to_follow_hears_of_what_is_open)
{
	_cleanup_(world_freep) struct world *world = three();
	struct declared *grad = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct declared *loss = world_declare(world, "loss", DTYPE_FLOAT32, 1);
	struct turn one, two, other;

	begin(&one, grad, 0, 1);
	begin(&two, grad, 0, 2);
	begin(&other, loss, 0, 1);
	/* But not of one that it has come to. */
	begin(&one, grad, 2, 1);
	follow(world, 2, false, 1);
	WORLD_UNTIL(world, heard[2].n_begun == 2);
	expect_last(2, "loss", 1, 1);
	ASSERT_STR(heard[2].names[0], "grad");
	ASSERT_EQ(heard[2].begun[0].round, 2);
	/* Whoever comes later, too; and nobody twice. */
	follow(world, 1, false, 1);
	WORLD_UNTIL(world, heard[1].n_begun == 3);
	begin(&one, grad, 1, 1);
	end(world, &two, grad, 1, 2);
	end(world, &other, loss, 1, 1);
	WORLD_UNTIL(world, one.asked[0].done);
	ASSERT_EQ(heard[1].n_begun, 3);
}

TEST(what_a_rank_that_follows_begins_is_told_to_the_others_that_follow)
{
	_cleanup_(world_freep) struct world *world = three();
	struct declared *tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct turn turn;

	follow(world, 1, false, 1);
	follow(world, 2, false, 1);
	for (unsigned round = 1; round < 4; round++) {
		begin(&turn, tensor, 2, round);
		expect_n(world, 0, round, 0);
		expect_last(1, "grad", round, round);
		begin(&turn, tensor, 0, round);
		begin(&turn, tensor, 1, round);
		for (uint32_t i = 0; i < 3; i++)
			WORLD_UNTIL(world, turn.asked[i].done);
		expect_n(world, 0, round, 0);
	}
}

/* Nobody who follows has to submit it: it is to be caught up with. */
TEST(a_round_that_failed_is_told_as_one_that_nobody_knows)
{
	_cleanup_(world_freep) struct world *world = three();
	struct declared *tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct turn turn;

	begin(&turn, tensor, 0, 1);
	give_up(world, &turn, 0);
	follow(world, 2, false, 1);
	WORLD_UNTIL(world, heard[2].n_begun == 1);
	expect_last(2, "grad", 1, 1);
	ASSERT_EQ(heard[2].begun[0].operation, 0);
	ASSERT_EQ(heard[2].begun[0].reduction, 0);
	begin(&turn, tensor, 0, 2);
	expect_n(world, 0, 0, 2);
	expect_last(2, "grad", 1, 2);
	ASSERT_EQ(heard[2].begun[1].operation, OPERATION_PUSH_PULL);
}

/* -- Other nodes --------------------------------------------------------------------------------------------------- */

TEST(ranks_of_all_nodes_that_follow_hear_once_of_a_round)
{
	_cleanup_(world_freep) struct world *world = two_nodes();
	struct declared *tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct turn turn;

	for (uint32_t i = 0; i < 4; i++)
		WORLD_UNTIL(world, tensor[i].done);
	for (uint32_t i = 1; i < 4; i++)
		follow(world, i, false, 1);
	/* The home tells them of each other. */
	begin(&turn, tensor, 0, 1);
	WORLD_UNTIL(world, heard[1].n_begun && heard[2].n_begun && heard[3].n_begun);
	expect_last(3, "grad", 1, 1);
	/* What a rank has heard of is not told by it, also where it is the first of its node. */
	end(world, &turn, tensor, 1, 1);
	begin(&turn, tensor, 0, 2);
	WORLD_UNTIL(world, heard[1].n_begun == 2 && heard[3].n_begun == 2);
	end(world, &turn, tensor, 1, 2);
	expect_n(world, 0, 2, 2);
	ASSERT_EQ(heard[3].n_begun, 2);
	/* But what it begins by itself. */
	begin(&turn, tensor, 1, 3);
	WORLD_UNTIL(world, heard[2].n_begun == 3 && heard[3].n_begun == 3);
	expect_n(world, 0, 2, 3);
	begin(&turn, tensor, 0, 3);
	end(world, &turn, tensor, 2, 3);
	expect_n(world, 0, 2, 3);
}

TEST(rounds_that_are_gone_on_another_node_have_failed)
{
	_cleanup_(world_freep) struct world *world = two_nodes();
	struct declared *tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	struct turn turn;

	for (uint32_t i = 0; i < 4; i++)
		WORLD_UNTIL(world, tensor[i].done);
	/* All ranks of the node have seen them fail. */
	for (uint64_t round = 1; round < 3; round++) {
		begin(&turn, tensor, 1, round);
		give_up(world, &turn, 1);
		begin(&turn, tensor, 3, round);
		WORLD_UNTIL(world, turn.asked[3].done);
	}
	begin(&turn, tensor, 1, 3);
	follow(world, 0, false, 1);
	WORLD_UNTIL(world, heard[0].n_begun && heard[0].begun[heard[0].n_begun - 1].round == 3);
	expect_last(0, "grad", 3, 3);
	expect_n(world, 1, 0, 0);
}

TEST(ranks_of_all_nodes_hear_that_all_are_idle_in_their_turn)
{
	_cleanup_(world_freep) struct world *world = two_nodes();

	for (uint64_t turn = 1; turn < 4; turn++) {
		for (uint32_t i = 0; i < 4; i++)
			follow(world, i, true, turn);
		for (uint32_t i = 0; i < 4; i++) {
			WORLD_UNTIL(world, heard[i].turn == turn);
			ASSERT_EQ(heard[i].n_over, 0);
		}
	}
}

TEST(who_follows_hears_that_a_rank_of_another_node_has_left)
{
	_cleanup_(world_freep) struct world *world = two_nodes();
	struct failure failure = { 0 };

	follow(world, 0, true, 1);
	for (uint32_t i = 1; i < 4; i += 2)
		agent_leave(&world->ranks[i].member);
	WORLD_UNTIL(world, heard[0].n_over);
	ASSERT_EQ(heard[0].failure.status, -EPIPE);
	ASSERT_CONTAINS(heard[0].failure.text, "left");
	ASSERT_EQ(heard[0].n_all, 0);
	/* And so does who comes later. */
	if (!try_follow(world, 2, &(struct agent_follow){ true, true, 1 }, &failure))
		WORLD_UNTIL(world, heard[2].n_over);
	else
		ASSERT_EQ(failure.status, -EPIPE);
}

/* -- All of them --------------------------------------------------------------------------------------------------- */

static void expect_all(const struct world *world, unsigned n, uint64_t turn)
{
	for (uint32_t i = 0; i < world->size; i++) {
		ASSERT_EQ(heard[i].n_all, n);
		ASSERT_EQ(heard[i].turn, turn);
		ASSERT_EQ(heard[i].n_over, 0);
		heard[i].n_all = 0;
	}
}

TEST(all_hear_of_it_once_all_are_idle_in_one_turn)
{
	_cleanup_(world_freep) struct world *world = three();

	follow(world, 0, true, 1);
	follow(world, 1, false, 1);
	follow(world, 2, true, 1);
	expect_all(world, 0, 0);
	follow(world, 1, true, 1);
	expect_all(world, 1, 1);
	/* In the next they were not. */
	follow(world, 2, true, 2);
	follow(world, 1, true, 2);
	for (uint32_t i = 0; i < 3; i++) {
		ASSERT_EQ(heard[i].turn, 1);
		heard[i].n_all = 0;
	}
	/* Again, as this rank has perhaps not heard it. */
	follow(world, 0, true, 1);
	ASSERT_EQ(heard[0].n_all, 1);
	ASSERT_EQ(heard[1].n_all + heard[2].n_all, 0);
	heard[0].n_all = 0;
	follow(world, 0, true, 2);
	expect_all(world, 1, 2);
}

TEST(who_is_idle_no_more_does_not_count)
{
	_cleanup_(world_freep) struct world *world = three();

	follow(world, 0, true, 1);
	follow(world, 1, true, 1);
	follow(world, 0, false, 1);
	follow(world, 2, true, 1);
	expect_all(world, 0, 0);
	follow_no_more(world, 1, 1);
	follow(world, 0, true, 1);
	expect_all(world, 0, 0);
	follow(world, 1, true, 1);
	expect_all(world, 1, 1);
}

/* They are of a daemon before this one. */
TEST(who_is_in_a_turn_has_seen_the_end_of_the_one_before)
{
	_cleanup_(world_freep) struct world *world = three();

	follow(world, 0, true, 4);
	ASSERT_EQ(heard[0].n_all, 0);
	follow(world, 1, true, 5);
	ASSERT_EQ(heard[0].n_all, 1);
	ASSERT_EQ(heard[0].turn, 4);
	follow(world, 2, true, 4);
	ASSERT_EQ(heard[2].turn, 4);
	ASSERT_EQ(heard[1].n_all, 0);
}

/* -- Who does not -------------------------------------------------------------------------------------------------- */

TEST(who_follows_hears_that_a_rank_has_left)
{
	_cleanup_(world_freep) struct world *world = three();
	struct failure failure = { 0 };

	follow(world, 0, true, 1);
	follow(world, 1, false, 1);
	agent_leave(&world->ranks[2].member);
	WORLD_UNTIL(world, world->ranks[2].left && heard[0].n_over && heard[1].n_over);
	for (uint32_t i = 0; i < 2; i++) {
		ASSERT_EQ(heard[i].failure.status, -EPIPE);
		ASSERT_CONTAINS(heard[i].failure.text, "rank 2 has left");
		ASSERT_EQ(heard[i].n_all, 0);
		ASSERT_EQ(heard[i].turn, 1);
	}
	ASSERT_EQ(heard[2].n_over, 0);
	ASSERT_EQ(try_follow(world, 0, &(struct agent_follow){ true, true, 1 }, &failure), -EPIPE);
	ASSERT_CONTAINS(failure.text, "rank 2 has left");
	/* That it does not is no matter. */
	follow_no_more(world, 0, 1);
	ASSERT_EQ(try_follow(world, 2, &(struct agent_follow){ true, true, 1 }, &failure),
		  -ENOTCONN);
}

TEST(nobody_follows_where_ranks_do_not_wait_for_one_another)
{
	_cleanup_(world_freep) struct world *world = formed(&(struct world_options){
		.n_nodes = 1, .n_local = 3, .no_servers = true, .min_ranks = 2, .max_ranks = 3 });
	struct failure failure = { 0 };

	ASSERT_EQ(try_follow(world, 0, &(struct agent_follow){ true, false, 1 }, &failure),
		  -EINVAL);
	ASSERT_CONTAINS(failure.text, "it is elastic");
	ASSERT_TRUE(!world->ranks[0].member.follows && !world->ranks[0].member.turn);
}
