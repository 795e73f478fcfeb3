/* Mailboxes of mail to home: bounded turns, order, and turns between them. */
#include "base/clock.h"
#include "test.h"
#include "transport/common/worker.h"

enum { N = 300 };

struct job {
	struct mail mail;
	unsigned number;
};

static unsigned n_run, n_run_before_other;

static void work(struct mail *mail)
{
	uint64_t until_ns = clock_now_ns() + 50 * NSEC_PER_USEC;

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
TEST(a_full_mailbox_gives_way)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mail mail = { .run = other };
	struct mailboxes mailboxes;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		mailbox_post(&mailbox, &jobs[i].mail);
	}
	loop_post(loop, &mail);
	while (n_run < N)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(n_run_before_other, >, 0);
	ASSERT_INT(n_run_before_other, <, N);
}

TEST(a_mailbox_is_drained_in_its_order)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mailboxes mailboxes;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		mailbox_post(&mailbox, &jobs[i].mail);
		if (i == N / 2)
			ASSERT_OK(loop_turn(loop, 0));
	}
	mailboxes_drain(&mailboxes);
	ASSERT_EQ(n_run, N);
	ASSERT_OK(loop_turn(loop, 0));
}

static void count(struct mail *mail)
{
	(void)mail;
	n_run_before_other = n_run;
}

/* What one lane has does not wait for all that another has; and each lane's is run in its order. */
TEST(mailboxes_take_turns)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mail mail = { .run = count };
	struct mailboxes mailboxes;
	struct mailbox full, other_mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&full, &mailboxes);
	mailbox_init(&other_mailbox, &mailboxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		mailbox_post(&full, &jobs[i].mail);
	}
	mailbox_post(&other_mailbox, &mail);
	while (n_run < N)
		ASSERT_OK(loop_turn(loop, 0));
	/* As many as go between two looks at the clock, and they take longer than a mailbox has. */
	ASSERT_EQ(n_run_before_other, 4);
	mailboxes_drain(&mailboxes);
}

enum { FEW = 20 };

static unsigned
	turns[2]; /* mails of two sources that were run: of many mailboxes, of one with few */

static void take_turn(struct mail *mail)
{
	struct job *job = container_of(mail, struct job, mail);

	turns[job->number]++;
	/* In a turn four mails go at most, between two looks at the clock. */
	ASSERT_TRUE(turns[1] == FEW || turns[0] <= 4 * (turns[1] + 1));
	n_run++;
	for (uint64_t until_ns = clock_now_ns() + 110 * NSEC_PER_USEC; clock_now_ns() < until_ns;)
		;
}

/* Also by many connections a source has one turn. */
TEST(sources_of_many_mailboxes_take_turns)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[2][N];
	struct mailbox many[N / 10], one;
	struct mailboxes mailboxes;

	n_run = 0;
	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	for (unsigned i = 0; i < ARRAY_SIZE(many); i++) {
		mailbox_init(&many[i], &mailboxes);
		mailbox_share(&many[i], "10.0.0.1");
	}
	mailbox_init(&one, &mailboxes);
	mailbox_share(&one, "10.0.0.2");
	for (unsigned i = 0; i < N; i++) {
		jobs[0][i] = (struct job){ .mail.run = take_turn, .number = 0 };
		mailbox_post(&many[i % ARRAY_SIZE(many)], &jobs[0][i].mail);
		jobs[1][i] = (struct job){ .mail.run = take_turn, .number = 1 };
		if (i < FEW)
			mailbox_post(&one, &jobs[1][i].mail);
	}
	while (turns[1] < FEW)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(turns[0], <, N);
	mailboxes_drain(&mailboxes);
	ASSERT_EQ(n_run, N + FEW);
	for (unsigned i = 0; i < ARRAY_SIZE(many); i++)
		mailbox_done(&many[i]);
	mailbox_done(&one);
	ASSERT_TRUE(list_empty(&mailboxes.sources));
}

static void work_long(struct mail *mail)
{
	uint64_t until_ns = clock_now_ns() + 600 * NSEC_PER_USEC;

	(void)mail;
	n_run++;
	while (clock_now_ns() < until_ns)
		;
}

/* Of mails that take long no more is run than one in a turn, once that is known of their mailbox. */
TEST(the_clock_is_looked_at_after_each_long_mail)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct mail mails[8];
	struct mailboxes mailboxes;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	for (unsigned i = 0; i < ARRAY_SIZE(mails); i++) {
		mails[i].run = work_long;
		mailbox_post(&mailbox, &mails[i]);
	}
	for (unsigned n = 4; n <= ARRAY_SIZE(mails); n++) {
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(n_run, n);
	}
	mailboxes_drain(&mailboxes);
}

/* Where home has no thread beside it, what one lane receives in one go is run at once only as far as takes a moment. */
TEST(home_receives_for_a_moment)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N], late;
	struct job from_other = { .mail.run = other };
	struct worker *worker;
	struct mailbox mailbox, empty;
	unsigned n_at_once;

	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(worker_new(loop, NULL, &worker));
	mailbox_init(&mailbox, &worker->to_home);
	mailbox_init(&empty, &worker->to_home);
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		worker_post_home(worker, &mailbox, &jobs[i].mail);
	}
	/* 4 ms, and as many as go between two looks at the clock. */
	n_at_once = n_run;
	ASSERT_INT(n_at_once, >, 0);
	ASSERT_INT(n_at_once, <=, 138);
	/* No more is read. */
	ASSERT_TRUE(!worker_receive(worker, &mailbox));
	/* The moment is that of all lanes. */
	ASSERT_TRUE(worker_receive(worker, &empty));
	worker_post_home(worker, &empty, &from_other.mail);
	ASSERT_EQ(n_run_before_other, 0);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(n_run, >, n_at_once);
	ASSERT_INT(n_run, <, N);
	/* Nothing overtakes what waits: the job's number would not fit. */
	late = (struct job){ .mail.run = work, .number = N };
	worker_post_home(worker, &mailbox, &late.mail);
	ASSERT_INT(n_run, <, N);
	while (n_run <= N)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(n_run_before_other, <, N);
	/* What a turn runs that receives nothing is run at once, however long it takes. */
	for (unsigned i = 0; i < N; i++) {
		jobs[i].number = N + 1 + i;
		worker_post_home(worker, &mailbox, &jobs[i].mail);
	}
	ASSERT_EQ(n_run, 2 * N + 1);
	/* The next turn that receives has a moment of its own; the worker may end in its midst. */
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	jobs[0].number = n_run;
	worker_post_home(worker, &mailbox, &jobs[0].mail);
	ASSERT_EQ(n_run, 2 * N + 2);
	(void)worker_free(worker);
}

/* Reads are bounded by their number. Were their time counted, a large payload would leave none to what is run. */
TEST(the_moment_is_not_for_what_is_copied)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct worker *worker;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(worker_new(loop, NULL, &worker));
	mailbox_init(&mailbox, &worker->to_home);
	worker_copied(worker, 1); /* not by a lane that receives */
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	worker_copied(worker, 1000 * NSEC_PER_SEC);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		worker_post_home(worker, &mailbox, &jobs[i].mail);
		ASSERT_EQ(n_run, i + 1);
	}
	/* The next turn has a moment of its own. */
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = N + i };
		worker_post_home(worker, &mailbox, &jobs[i].mail);
	}
	ASSERT_INT(n_run, <, 2 * N);
	while (n_run < 2 * N)
		ASSERT_OK(loop_turn(loop, 0));
	(void)worker_free(worker);
}

static struct mailbox *freed;

static void free_it(struct mail *mail)
{
	(void)mail;
	free(TAKE_PTR(freed));
}

/* As a lane does, with the last that it says. */
TEST(a_mailbox_ends_with_its_last_mail)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct mail mails[2] = { { .run = count }, { .run = free_it } };
	struct mail other_mail = { .run = count };
	struct mailboxes mailboxes;
	struct mailbox other_mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&other_mailbox, &mailboxes);
	freed = malloc(sizeof(*freed));
	ASSERT_TRUE(freed);
	mailbox_init(freed, &mailboxes);
	mailbox_post(freed, &mails[0]);
	mailbox_post(freed, &mails[1]);
	mailbox_post(&other_mailbox, &other_mail);
	while (freed)
		ASSERT_OK(loop_turn(loop, 0));
	mailboxes_drain(&mailboxes);
}

/* Who is watched always has something. */
struct watched {
	struct loop_watch watch;
	struct loop *loop;
	struct mail mail;
	bool posted;
	unsigned n_served;
};

static bool look(struct loop_watch *watch)
{
	struct watched *w = container_of(watch, struct watched, watch);

	if (!w->posted)
		loop_defer(w->loop, &w->mail);
	w->posted = true;
	return true;
}

static void serve(struct mail *mail)
{
	struct watched *w = container_of(mail, struct watched, mail);

	w->posted = false;
	w->n_served++;
}

static void watch(struct watched *w, struct loop *loop)
{
	*w = (struct watched){ .watch = { .look = look, .rest = look },
			       .loop = loop,
			       .mail.run = serve };
	loop_spin(loop, 0, &w->watch);
}

/* Once the first four are seen to be slow, who is watched waits for one and no more. */
TEST(mailboxes_give_way_to_who_is_watched)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	static struct job jobs[N];
	struct mailboxes mailboxes;
	struct mailbox mailbox;
	struct watched w;

	n_run = 0;
	ASSERT_OK(loop_new(&loop));
	watch(&w, loop);
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		mailbox_post(&mailbox, &jobs[i].mail);
	}
	for (unsigned run = 4; run <= N; run++) {
		while (n_run < run)
			ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(n_run, run);
	}
	mailboxes_drain(&mailboxes);
	loop_spin(loop, 0, NULL);
}

/* What has come by connections is run at once, until who is watched has something; the rest waits in the mailbox, and with it the connection. */
TEST(what_comes_by_connections_gives_way_to_who_is_watched)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct worker *worker;
	struct mailbox mailbox;
	struct job jobs[6];
	struct watched w;

	n_run = 0;
	ASSERT_OK(loop_new(&loop));
	watch(&w, loop);
	ASSERT_OK(worker_new(loop, NULL, &worker));
	mailbox_init(&mailbox, &worker->to_home);
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	for (unsigned i = 0; i < 6; i++) {
		jobs[i] = (struct job){ .mail.run = work, .number = i };
		worker_post_home(worker, &mailbox, &jobs[i].mail);
		ASSERT_EQ(worker_receive(worker, &mailbox), i < 4);
	}
	ASSERT_EQ(n_run, 4);
	while (n_run < 6)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_TRUE(worker_receive(worker, &mailbox));
	mailboxes_drain(&worker->to_home);
	loop_spin(loop, 0, NULL);
	(void)worker_free(worker);
}
