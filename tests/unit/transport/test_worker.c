#include "base/clock.h"
#include "test.h"
#include "transport/worker.h"

enum { N = 100 };

struct job {
	struct mail mail;
	unsigned number;
};

static unsigned n_run, n_run_before_other;

static void work(struct mail *mail)
{
	uint64_t until_ns = clock_now_ns() + 20 * NSEC_PER_USEC;

	ASSERT_EQ(container_of(mail, struct job, mail)->number, n_run);
	n_run++;
	while (clock_now_ns() < until_ns)
		;
}

static void other(struct mail *mail)
{
	(void)mail;
	n_run_before_other = n_run;
}

/* Whoever the loop serves besides has its turn before all of it is done, and the rest follows in its order. */
TEST(a_full_box_gives_way)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mail mail = { .run = other };
	struct box box;

	ASSERT_OK(loop_new(&loop));
	box_init(&box, loop);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		box_post(&box, &jobs[i].mail);
	}
	loop_post(loop, &mail);
	while (n_run < N)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(n_run_before_other, >, 0);
	ASSERT_INT(n_run_before_other, <, N);
}

TEST(a_box_is_drained_in_its_order)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct box box;

	ASSERT_OK(loop_new(&loop));
	box_init(&box, loop);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		box_post(&box, &jobs[i].mail);
		if (i == N / 2)
			ASSERT_OK(loop_turn(loop, 0));
	}
	box_drain(&box);
	ASSERT_EQ(n_run, N);
	ASSERT_OK(loop_turn(loop, 0));
}
