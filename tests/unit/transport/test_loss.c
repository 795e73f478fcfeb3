/* What ends with a peer that is lost: in steps, however much it is, and before anybody hears of the loss. */
#include "../base/chores.h"
#include "transport_pair.h"

enum { N = 1000, STEP_MAX = 64 };

static struct pair_call calls[N], later;
static struct pair *pair;
static unsigned n_done;
static bool is_closing;

/* Unless nobody hears of the loss. */
static void on_later_done(struct pair_call *call)
{
	(void)call;
	ASSERT_EQ(n_done, N);
	ASSERT_EQ(pair->a.n_lost, !is_closing);
}

/* In the order in which they were made. The first begins another one. */
static void on_done(struct pair_call *call)
{
	ASSERT_TRUE(call == &calls[n_done]);
	ASSERT_EQ(call->call.status, -ECONNRESET);
	ASSERT_EQ(pair->a.n_lost, 0);
	if (n_done++)
		return;
	pair_call_init(&later, NULL, 0, NULL, 0);
	later.on_done = on_later_done;
	pair_call_begin(pair, &later);
}

/* Calls that the server has and does not answer. */
static void lose_with_calls(void)
{
	pair = pair_new(&(struct pair_variant){ .n_lanes = 1 });
	n_done = 0;
	for (unsigned i = 0; i < N; i++) {
		pair_call_init(&calls[i], NULL, 0, NULL, 0);
		calls[i].on_done = on_done;
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, pair->b.n_deliveries == N);
	peer_hold(pair->peer);
	chores_hold();
	peer_kill(pair->peer, "for a test");
	PAIR_UNTIL(pair, chores_n_held());
	ASSERT_INT(n_done, >, 0);
	ASSERT_INT(n_done, <=, STEP_MAX);
	ASSERT_EQ(pair->a.n_lost, 0);
	ASSERT_TRUE(!peer_loss(pair->peer));
}

TEST(many_calls_end_in_steps_before_the_loss_is_told)
{
	lose_with_calls();
	chores_go_on();
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_EQ(n_done, N);
	ASSERT_CONTAINS(peer_loss(pair->peer), "for a test");
	PAIR_UNTIL(pair, later.n_done);
	ASSERT_EQ(later.call.status, -ECONNRESET);
	ASSERT_EQ(pair->a.n_lost, 1);
	peer_release(pair->peer);
	pair = pair_free(pair);
}

TEST(who_closes_meanwhile_ends_the_rest_at_once)
{
	lose_with_calls();
	chores_go_on();
	is_closing = true;
	transport_close(pair->a.transport);
	ASSERT_EQ(n_done, N);
	ASSERT_EQ(later.n_done, 1);
	ASSERT_EQ(pair->a.n_lost, 0);
	peer_release(pair->peer);
	pair = pair_free(pair);
}
