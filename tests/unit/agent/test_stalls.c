#include "reduce/reduce.h"
#include "world.h"

/* Memory whose owner can keep whoever touches it waiting is not touched by the control thread, however little of it. */

static atomic_uint n_at_home, n_copied;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	/* Of both ranks: a server sums what nobody else can reach. */
	if (params->n_inputs == 2 && gettid() == getpid())
		atomic_fetch_add(&n_at_home, 1);
	if (params->n_inputs == 1)
		atomic_fetch_add(&n_copied, 1);
	return __real_reduce_run(params);
}

/* Returns how often the control thread has summed. */
static unsigned sum(struct world *world, struct declared *declared, uint64_t round,
		    unsigned operation, bool stalls)
{
	static float in[1 << 16], out[2][1 << 16];
	/* What comes from elsewhere, or is added by itself, is another's memory. */
	bool all = world->options.n_nodes > 1 || operation == OPERATION_ACCUMULATE;
	struct asked asked[2];

	atomic_store(&n_at_home, 0);
	for (unsigned i = 0; i < world->size; i++) {
		asked[i] = asked_of(operation, REDUCTION_SUM, in, ARRAY_SIZE(in), out[i],
				    ARRAY_SIZE(in));
		asked[i].base.stalls = stalls && (i || all);
		asked_submit(&asked[i], &declared[i], round);
	}
	for (unsigned i = 0; i < world->size; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
	return atomic_load(&n_at_home);
}

/* All ranks are in a job, and have declared a tensor. */
static struct declared *form(struct world *world, const struct stragglers *stragglers)
{
	struct declared *declared;
	struct failure failure;

	for (uint32_t rank = 0; rank < world->size; rank++) {
		struct agent_join join = world_join_of(world, rank);

		join.stragglers = *stragglers;
		ASSERT_OK(world_join(world, rank, &join, &failure));
	}
	for (uint32_t rank = 0; rank < world->size; rank++)
		WORLD_UNTIL(world, world->ranks[rank].joined);
	declared = world_declare(world, "t", DTYPE_FLOAT32, 1 << 16);
	for (unsigned i = 0; i < world->size; i++)
		WORLD_UNTIL(world, declared[i].done);
	return declared;
}

static void check(const struct world_options *options, unsigned operation)
{
	_cleanup_(world_freep) struct world *world = world_new(options);
	struct declared *declared;
	uint64_t round = 1;

	declared = form(world, &(struct stragglers){ .async = operation == OPERATION_ACCUMULATE });
	ASSERT_EQ(sum(world, declared, round++, operation, true), 0);
	while (!sum(world, declared, round++, operation, false))
		;
	ASSERT_EQ(sum(world, declared, round, operation, true), 0);
}

/* Sums that are made at once. */
TEST(little_is_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 1,
				       .n_local = 2,
				       .no_servers = true,
				       .n_threads = 1,
				       .inline_bytes = UINT64_MAX },
	      OPERATION_PUSH_PULL);
}

/* Those that are on offer: of so many the control thread takes some. */
TEST(what_is_shared_is_left_to_others)
{
	check(
		&(struct world_options){
			.n_nodes = 1, .n_local = 2, .no_servers = true, .n_threads = 1 },
		OPERATION_PUSH_PULL);
}

/* Of a job whose result comes from a server. */
TEST(gathering_is_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 1,
				       .n_local = 2,
				       .distributed = true,
				       .n_threads = 1,
				       .inline_bytes = 8192 },
	      OPERATION_PUSH_PULL);
}

/* What a node contributes lies in memory of its own trainer until the server in its process sums it. */
TEST(sums_of_a_server_are_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 2,
				       .n_local = 1,
				       .n_threads = 1,
				       .part_bytes = 8192,
				       .inline_bytes = UINT64_MAX },
	      OPERATION_PUSH_PULL);
}

TEST(what_a_server_adds_is_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 1,
				       .n_local = 1,
				       .distributed = true,
				       .n_threads = 1,
				       .part_bytes = 8192,
				       .inline_bytes = UINT64_MAX },
	      OPERATION_ACCUMULATE);
}

/* A server in this process may keep it for a later round, and would copy it then. */
TEST(what_may_come_late_is_copied_before)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .n_threads = 1, .part_bytes = 1 << 17 });
	struct declared *declared = form(world, &(struct stragglers){ .quorum = 2 });

	atomic_store(&n_copied, 0);
	(void)sum(world, declared, 1, OPERATION_PUSH_PULL, false);
	ASSERT_EQ(atomic_load(&n_copied), 0);
	/* Of each node, what its own server sums. */
	(void)sum(world, declared, 2, OPERATION_PUSH_PULL, true);
	ASSERT_EQ(atomic_load(&n_copied), 2);
}
