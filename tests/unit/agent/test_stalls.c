#include "reduce/reduce.h"
#include "world.h"

/* Memory whose owner can keep whoever touches it waiting is not touched by the control thread, however little of it. */

static atomic_uint n_at_home;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	/* Of both ranks: a server sums what nobody else can reach. */
	if (params->n_inputs == 2 && gettid() == getpid())
		atomic_fetch_add(&n_at_home, 1);
	return __real_reduce_run(params);
}

/* Returns how often the control thread has summed. */
static unsigned sum(struct world *world, struct declared *declared, uint64_t round, bool stalls)
{
	static float in[1 << 16], out[2][1 << 16];
	struct asked asked[2];

	atomic_store(&n_at_home, 0);
	for (unsigned i = 0; i < 2; i++) {
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, in, ARRAY_SIZE(in), out[i],
				    ARRAY_SIZE(in));
		asked[i].base.stalls = stalls && i;
		asked_submit(&asked[i], &declared[i], round);
	}
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
	return atomic_load(&n_at_home);
}

static void check(const struct world_options *options)
{
	_cleanup_(world_freep) struct world *world = world_new(options);
	struct declared *declared;
	uint64_t round = 1;

	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, 1 << 16);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, declared[i].done);
	ASSERT_EQ(sum(world, declared, round++, true), 0);
	while (!sum(world, declared, round++, false))
		;
	ASSERT_EQ(sum(world, declared, round, true), 0);
}

/* Sums that are made at once. */
TEST(little_is_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 1,
				       .n_local = 2,
				       .no_servers = true,
				       .n_threads = 1,
				       .inline_bytes = UINT64_MAX });
}

/* Those that are on offer: of so many the control thread takes some. */
TEST(what_is_shared_is_left_to_others)
{
	check(&(struct world_options){
		.n_nodes = 1, .n_local = 2, .no_servers = true, .n_threads = 1 });
}

/* Of a job whose result comes from a server. */
TEST(gathering_is_left_to_others)
{
	check(&(struct world_options){ .n_nodes = 1,
				       .n_local = 2,
				       .distributed = true,
				       .n_threads = 1,
				       .inline_bytes = 8192 });
}
