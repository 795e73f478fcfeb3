/* Boxes of mail to home: bounded turns, order, and turns between them. */
#include "base/clock.h"
#include "test.h"
#include "transport/common/worker.h"

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
	struct boxes boxes;
	struct box box;

	ASSERT_OK(loop_new(&loop));
	boxes_init(&boxes, loop);
	box_init(&box, &boxes);
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
	struct boxes boxes;
	struct box box;

	ASSERT_OK(loop_new(&loop));
	boxes_init(&boxes, loop);
	box_init(&box, &boxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		box_post(&box, &jobs[i].mail);
		if (i == N / 2)
			ASSERT_OK(loop_turn(loop, 0));
	}
	boxes_drain(&boxes);
	ASSERT_EQ(n_run, N);
	ASSERT_OK(loop_turn(loop, 0));
}

static void count(struct mail *mail)
{
	(void)mail;
	n_run_before_other = n_run;
}

/* What one lane has does not wait for all that another has; and each lane's is run in its order. */
TEST(boxes_take_turns)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mail mail = { .run = count };
	struct boxes boxes;
	struct box full, other_box;

	ASSERT_OK(loop_new(&loop));
	boxes_init(&boxes, loop);
	box_init(&full, &boxes);
	box_init(&other_box, &boxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		box_post(&full, &jobs[i].mail);
	}
	box_post(&other_box, &mail);
	while (n_run < N)
		ASSERT_OK(loop_turn(loop, 0));
	/* As many as go between two looks at the clock, and they take longer than a box has. */
	ASSERT_EQ(n_run_before_other, 4);
	boxes_drain(&boxes);
}

static struct box *freed;

static void free_it(struct mail *mail)
{
	(void)mail;
	free(TAKE_PTR(freed));
}

/* As a lane does, with the last that it says. */
TEST(a_box_ends_with_its_last_mail)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct mail mails[2] = { { .run = count }, { .run = free_it } };
	struct mail other_mail = { .run = count };
	struct boxes boxes;
	struct box other_box;

	ASSERT_OK(loop_new(&loop));
	boxes_init(&boxes, loop);
	box_init(&other_box, &boxes);
	freed = malloc(sizeof(*freed));
	ASSERT_TRUE(freed);
	box_init(freed, &boxes);
	box_post(freed, &mails[0]);
	box_post(freed, &mails[1]);
	box_post(&other_box, &other_mail);
	while (freed)
		ASSERT_OK(loop_turn(loop, 0));
	boxes_drain(&boxes);
}
