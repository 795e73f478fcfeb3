/* A server is lost while this node still sums: what is summed then goes nowhere, and the round ends. */
#include "../base/chores.h"
#include "reduce/reduce.h"
#include "world.h"
#include <sched.h>

#define N (1 << 16) /* several parts */

/* Whether the thread that sums is held at its first sum; how many sums the thread came to. */
static atomic_bool is_held;
static atomic_uint n_begun;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	if (gettid() != getpid()) {
		atomic_fetch_add(&n_begun, 1);
		while (atomic_load(&is_held))
			(void)sched_yield();
	}
	return __real_reduce_run(params);
}

static bool has_peers(const struct world *world)
{
	_cleanup_(freep) struct transport_peer_info *peers = NULL;
	size_t n;

	ASSERT_OK(transport_peers(world->nodes[0].transport, &peers, &n));
	return n > 0;
}

TEST(what_is_summed_after_the_loss_of_its_server)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 2, .n_threads = 1, .part_bytes = 8192 });
	static float in[N], out[2][N];
	struct asked asked[2];
	struct declared *declared;

	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, N);
	for (unsigned i = 0; i < 4; i++)
		WORLD_UNTIL(world, declared[i].done);

	atomic_store(&is_held, true);
	chores_hold();
	for (unsigned i = 0; i < 2; i++) {
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, in, N, out[i], N);
		asked[i].base.stalls = true; /* the control thread sums none of it */
		asked_submit(&asked[i], &declared[2 * i], 1); /* of node 0 */
	}
	while (!atomic_load(&n_begun))
		ASSERT_OK(loop_turn(world->loop, 0));
	world_kill(world, 1);
	WORLD_UNTIL(world, !has_peers(world));
	/* The job is over, and the sweep has come to nothing of it; the server here has not heard of the loss. */
	ASSERT_EQ(chores_n_held(), 2);
	atomic_store(&is_held, false);
	while (pool_pending(world->pool))
		ASSERT_OK(loop_turn(world->loop, 0));
	chores_go_on();
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i].done && world->ranks[2 * i].ended);
		ASSERT_EQ(asked[i].failure.status, -ECONNRESET);
		ASSERT_TRUE(strstr(world->ranks[2 * i].failure.text, "node1"));
	}
}
