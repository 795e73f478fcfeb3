/* Names without end in a job through servers: what no rank uses is forgotten at all nodes, once all ranks say so. */
#include "agent/round/round.h"
#include "world.h"
#include <stdio.h>

#define MAX_TENSORS 64
#define RANKS	    3

/* What the ranks have been asked, and told. */
static struct {
	struct agent_declaration *unused[RANKS][1024];
	unsigned n_unused[RANKS], n_kept[RANKS], n_forgotten[RANKS];
} heard;

static uint32_t keeper; /* a rank that says of what it is asked that it uses it; RANKS: none */
static bool silent;	/* ranks say nothing */

static void on_unused(struct agent_declaration *declaration, const char *name)
{
	uint32_t rank = declaration->member->rank;

	ASSERT_TRUE(*name && heard.n_unused[rank] < ARRAY_SIZE(heard.unused[rank]));
	heard.unused[rank][heard.n_unused[rank]++] = declaration;
}

static uint32_t rank_of(const struct agent_declaration *declaration)
{
	const struct declared *declared = container_of(declaration, struct declared, base);

	for (uint32_t i = 0; i < RANKS; i++)
		for (unsigned k = 0; k < ARRAY_SIZE(heard.unused[i]); k++)
			if (heard.unused[i][k] == &declared->base)
				return i;
	return 0;
}

static void on_released(struct agent_declaration *declaration, bool forgotten)
{
	uint32_t rank = rank_of(declaration);

	ASSERT_EQ(agent_is_void(declaration), forgotten);
	if (forgotten)
		heard.n_forgotten[rank]++;
	else
		heard.n_kept[rank]++;
}

/* Rank 0 on node 0, and so on. */
static struct world *begin(bool resume)
{
	struct world *world = world_new(&(struct world_options){
		.n_nodes = RANKS, .n_local = 1, .max_tensors = MAX_TENSORS, .resume = resume });

	memset(&heard, 0, sizeof(heard));
	keeper = RANKS;
	silent = false;
	world_form(world);
	for (unsigned i = 0; i < RANKS; i++) {
		world->ranks[i].member.unused = on_unused;
		world->ranks[i].member.released = on_released;
	}
	return world;
}

static const struct agent_job *job_of(const struct world *world, unsigned node)
{
	return list_first(&world->nodes[node].agent->jobs, struct agent_job, link);
}

static void answer_all(void)
{
	for (unsigned i = 0; i < RANKS && !silent; i++) {
		for (unsigned k = 0; k < heard.n_unused[i]; k++) {
			if (agent_is_void(heard.unused[i][k]))
				continue;
			if (i == keeper)
				agent_keep(heard.unused[i][k]);
			else
				(void)agent_release(heard.unused[i][k]);
		}
		heard.n_unused[i] = 0;
	}
}

/* All ranks use it, and answer meanwhile what they are asked. */
static void use(struct world *world, struct declared *declared, uint64_t round)
{
	struct asked asked[RANKS];
	float data[RANKS], sum = 0;

	for (unsigned i = 0; i < RANKS; i++) {
		WORLD_UNTIL(world, declared[i].done);
		ASSERT_STR(declared[i].failure.text, "");
		data[i] = (float)(round + i);
		sum += data[i];
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1, &data[i], 1);
		asked_submit(&asked[i], &declared[i], round);
	}
	answer_all();
	for (unsigned i = 0; i < RANKS; i++)
		WORLD_UNTIL(world, asked[i].done);
	for (unsigned i = 0; i < RANKS; i++) {
		ASSERT_STR(asked[i].failure.text, "");
		ASSERT_TRUE(data[i] == sum);
	}
}

static struct declared *name_one(struct world *world, unsigned number)
{
	char name[32];

	(void)snprintf(name, sizeof(name), "loss.%u", number);
	return world_declare(world, name, DTYPE_FLOAT32, 1);
}

static void names(bool resume)
{
	_cleanup_(world_freep) struct world *world = begin(resume);
	struct declared *always = world_declare(world, "always", DTYPE_FLOAT32, 1);
	uint64_t held[RANKS];

	/* Servers have room for no more, either. */
	for (unsigned i = 0; i < 10 * MAX_TENSORS; i++) {
		use(world, name_one(world, i), 1);
		use(world, always, i + 1);
		for (unsigned node = 0; node < RANKS && i == 5 * MAX_TENSORS; node++)
			held[node] = job_of(world, node)->memory.bulk.used;
	}
	for (unsigned node = 0; node < RANKS; node++) {
		ASSERT_EQ(job_of(world, node)->memory.bulk.used, held[node]);
		ASSERT_TRUE(job_of(world, node)->schedule.n_classed <= MAX_TENSORS);
		ASSERT_TRUE(job_of(world, node)->tensors.n <= MAX_TENSORS);
		ASSERT_TRUE(heard.n_forgotten[node] > 8 * MAX_TENSORS);
		/* The first is as if it had never been. */
		ASSERT_TRUE(!agent_tensor_find(job_of(world, node), "loss.0"));
		if (resume)
			ASSERT_TRUE(!ledger_tensor_find(job_of(world, node)->resumption.ledger,
							"loss.0"));
	}
	(void)world_declare(world, "loss.0", DTYPE_INT64, 7);
}

TEST(names_have_no_end)
{
	names(false);
}

TEST(names_have_no_end_where_the_job_outlives_daemons)
{
	names(true);
}

TEST(what_one_rank_keeps_is_kept_at_all_nodes)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared[MAX_TENSORS];

	keeper = 1;
	for (unsigned i = 0; i < MAX_TENSORS; i++) {
		declared[i] = name_one(world, i);
		use(world, declared[i], 1);
	}
	for (unsigned i = 0; i < MAX_TENSORS; i++)
		use(world, declared[i], 2);
	for (unsigned i = 0; i < RANKS; i++)
		ASSERT_EQ(heard.n_forgotten[i], 0);
	WORLD_UNTIL(world, heard.n_kept[0] && heard.n_kept[2]);
	ASSERT_EQ(heard.n_kept[1], 0);
}

TEST(a_rank_that_has_released_it_asks_for_an_answer_and_gets_one)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct agent_declaration *released;
	unsigned i = 0;

	silent = true;
	while (!heard.n_unused[0]) {
		struct declared *declared = name_one(world, i++);

		use(world, declared, 1);
	}
	released = heard.unused[0][0];
	ASSERT_OK(agent_release(released));
	ASSERT_EQ(agent_release(released), -EBUSY);
	/* The others have not said a word. */
	agent_keep(released);
	WORLD_UNTIL(world, heard.n_kept[0]);
	ASSERT_TRUE(!agent_is_void(released));
}
