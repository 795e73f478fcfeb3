/* Pieces of a turn of the event loop give way to who is watched. By a clock of its own, which stands still but for work. */
#include "base/clock.h"
#include "base/loop/loop.h"
#include "test.h"
#include <time.h>

#define WORK_NS (50 * NSEC_PER_USEC)
#define MOST_NS (2 * NSEC_PER_MSEC) /* of mail, and of chores */

static uint64_t now_ns = NSEC_PER_SEC;

int __wrap_clock_gettime(clockid_t clock, struct timespec *time);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time)
{
	(void)clock;
	*time = (struct timespec){ .tv_sec = (time_t)(now_ns / NSEC_PER_SEC),
				   .tv_nsec = (long)(now_ns % NSEC_PER_SEC) };
	return 0;
}

/* Who is watched: always has something, or what is put there. */
struct watched {
	struct loop_watch watch;
	struct loop *loop;
	struct mail mail;
	bool always, has, rest_has, posted;
	uint64_t each_ns; /* what it has takes so long */
	unsigned n_served, n_rests;
};

static bool watched_look(struct loop_watch *watch)
{
	struct watched *w = container_of(watch, struct watched, watch);

	if (!w->always && !w->has)
		return w->posted;
	w->has = false;
	if (!w->posted)
		loop_defer(w->loop, &w->mail);
	w->posted = true;
	return true;
}

static bool watched_rest(struct loop_watch *watch)
{
	struct watched *w = container_of(watch, struct watched, watch);

	w->n_rests++;
	w->has |= w->rest_has;
	w->rest_has = false;
	return watched_look(watch);
}

static void serve(struct mail *mail)
{
	struct watched *w = container_of(mail, struct watched, mail);

	w->posted = false;
	w->n_served++;
	now_ns += w->each_ns;
	w->watch.took_ns += w->each_ns;
}

static struct loop *watched_loop(struct watched *w)
{
	ASSERT_OK(loop_new(&w->loop));
	w->watch = (struct loop_watch){ .look = watched_look, .rest = watched_rest };
	w->mail.run = serve;
	loop_spin(w->loop, 0, &w->watch);
	return w->loop;
}

struct letter {
	struct mail mail;
	struct watched *watched;
	unsigned *n_run, number;
	uint64_t takes_ns;
	void (*then)(struct letter *letter);
};

static void work(struct mail *mail)
{
	struct letter *letter = container_of(mail, struct letter, mail);

	ASSERT_EQ(*letter->n_run, letter->number);
	++*letter->n_run;
	now_ns += letter->takes_ns;
	if (letter->then)
		letter->then(letter);
}

static void letters_new(struct letter *letters, unsigned n, struct watched *watched,
			unsigned *n_run)
{
	for (unsigned i = 0; i < n; i++)
		letters[i] = (struct letter){ .mail.run = work,
					      .watched = watched,
					      .n_run = n_run,
					      .number = i,
					      .takes_ns = WORK_NS };
}

TEST(mail_gives_way_to_who_is_watched_after_each)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[10];
	unsigned n_run = 0;

	letters_new(letters, 10, &w, &n_run);
	for (unsigned i = 0; i < 10; i++)
		loop_post(loop, &letters[i].mail);
	for (unsigned i = 1; i <= 10; i++) {
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(n_run, i);
		ASSERT_INT(w.n_served, >=, i);
	}
}

TEST(light_mail_goes_together)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[10];
	unsigned n_run = 0;

	letters_new(letters, 10, &w, &n_run);
	for (unsigned i = 0; i < 10; i++) {
		letters[i].takes_ns = WORK_NS / 10;
		loop_post(loop, &letters[i].mail);
	}
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_INT(n_run, >, 2);
	ASSERT_INT(n_run, <, 10);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_run, 10);
}

TEST(mail_does_not_give_way_where_nothing_waits)
{
	struct watched w = { 0 };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	static struct letter letters[200];
	unsigned n_run = 0;

	letters_new(letters, 200, &w, &n_run);
	for (unsigned i = 0; i < 200; i++)
		loop_post(loop, &letters[i].mail);
	ASSERT_OK(loop_turn(loop, 0));
	/* Until descriptors are to be looked at. */
	ASSERT_EQ(n_run, (MOST_NS + WORK_NS - 1) / WORK_NS);
	while (n_run < 200)
		ASSERT_OK(loop_turn(loop, 0));
}

TEST(mail_has_as_long_as_who_is_watched_had)
{
	struct watched w = { .always = true, .each_ns = 10 * WORK_NS };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	static struct letter letters[200];
	uint64_t began_ns = now_ns;
	unsigned n_run = 0;

	letters_new(letters, 200, &w, &n_run);
	for (unsigned i = 0; i < 200; i++)
		loop_post(loop, &letters[i].mail);
	while (n_run < 200)
		ASSERT_OK(loop_turn(loop, 0));
	/* Of two turns at the most, and not less than of one. */
	ASSERT_INT(now_ns - began_ns, >=, 200 * WORK_NS * 3 / 2);
	ASSERT_INT(now_ns - began_ns, <=, 200 * WORK_NS * 5 / 2);
	/* What it had long ago does not count. */
	began_ns = now_ns;
	ASSERT_OK(loop_turn(loop, 0));
	w.each_ns = 0;
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_OK(loop_turn(loop, 0));
	n_run = 0;
	for (unsigned i = 0; i < 2; i++)
		loop_post(loop, &letters[i].mail);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_run, 1);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_run, 2);
}

struct alarm {
	struct loop_timer timer;
	unsigned *n_run;
};

static void alarm_work(struct loop_timer *timer)
{
	++*container_of(timer, struct alarm, timer)->n_run;
	now_ns += WORK_NS;
}

static void alarms_set(struct alarm *alarms, unsigned n, struct loop *loop, unsigned *n_run)
{
	for (unsigned i = 0; i < n; i++) {
		alarms[i] = (struct alarm){ .timer.expired = alarm_work, .n_run = n_run };
		ASSERT_OK(loop_timer_set(loop, &alarms[i].timer, now_ns));
	}
}

TEST(timers_that_are_due_together_have_a_piece_of_each_turn)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	static struct alarm alarms[200];
	unsigned n_run = 0;

	alarms_set(alarms, 10, loop, &n_run);
	for (unsigned i = 1; i <= 10; i++) {
		ASSERT_OK(loop_turn(loop, -1));
		ASSERT_EQ(n_run, i);
	}
	/* Where nothing waits, until descriptors are to be looked at. */
	w.always = w.posted = false;
	ASSERT_OK(loop_turn(loop, 0));
	n_run = 0;
	alarms_set(alarms, 200, loop, &n_run);
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(n_run, (MOST_NS + WORK_NS - 1) / WORK_NS);
	while (n_run < 200)
		ASSERT_OK(loop_turn(loop, -1));
}

static void post_finish(struct letter *letter)
{
	loop_finish(letter->watched->loop, &letter[1].mail);
	loop_finish(letter->watched->loop, &letter[2].mail);
	loop_finish(letter->watched->loop, &letter[3].mail);
}

TEST(what_a_turn_ends_with_gives_way_too)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[4];
	unsigned n_run = 0;

	letters_new(letters, 4, &w, &n_run);
	letters[0].then = post_finish;
	loop_post(loop, &letters[0].mail);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_run, 2);
	/* Also from there it is taken back. */
	loop_unpost(loop, &letters[2].mail);
	letters[3].number = 2;
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(n_run, 3);
}

static void finish_third(struct letter *letter)
{
	loop_finish(letter->watched->loop, &letter[2].mail);
}

TEST(what_a_turn_ends_with_comes_behind_the_mail_that_is_left)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[3];
	unsigned n_run = 0;

	letters_new(letters, 3, &w, &n_run);
	letters[0].then = finish_third;
	loop_post(loop, &letters[0].mail);
	loop_post(loop, &letters[1].mail);
	for (unsigned i = 1; i <= 3; i++) {
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(n_run, i);
	}
}

static unsigned n_yields;

static void yield_once_more(struct mail *mail)
{
	struct watched *w = container_of(mail, struct watched, mail);

	if (++n_yields < 3)
		loop_yield(w->loop, mail);
}

TEST(who_yields_goes_on_at_the_end_of_each_turn_whatever_mail_is_left)
{
	struct watched w = { .always = true }, yields;
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[5];
	unsigned n_run = 0;

	yields = (struct watched){ .loop = loop, .mail.run = yield_once_more };
	letters_new(letters, 5, &w, &n_run);
	for (unsigned i = 0; i < 5; i++)
		loop_post(loop, &letters[i].mail);
	loop_yield(loop, &yields.mail);
	for (unsigned i = 1; i <= 3; i++) {
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(n_run, i);
		ASSERT_EQ(n_yields, i);
	}
	loop_yield(loop, &yields.mail);
	loop_unpost(loop, &yields.mail);
	while (n_run < 5)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(n_yields, 3);
}

struct slow_chore {
	struct chore chore;
	unsigned n_left;
};

static bool step(struct chore *chore)
{
	now_ns += WORK_NS;
	return --container_of(chore, struct slow_chore, chore)->n_left;
}

TEST(chores_give_way_after_each_step)
{
	struct watched w = { .always = true };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct slow_chore chore = { .chore.step = step, .n_left = 10 };

	loop_begin(loop, &chore.chore);
	for (unsigned left = 10; left-- > 0;) {
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_EQ(chore.n_left, left);
	}
}

static void ask_whether_it_lingers(struct letter *letter)
{
	ASSERT_TRUE(loop_lingers(letter->watched->loop));
}

/* So who is watched need not ring a descriptor while the loop is busy. */
TEST(a_loop_that_has_more_to_do_lets_who_is_watched_rest_before_it_sleeps)
{
	struct watched w = { 0 };
	_cleanup_(loop_freep) struct loop *loop = watched_loop(&w);
	struct letter letters[2];
	unsigned n_run = 0;

	ASSERT_TRUE(!loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_rests, 0);
	letters_new(letters, 2, &w, &n_run);
	letters[0].then = ask_whether_it_lingers;
	loop_post(loop, &letters[0].mail);
	loop_post(loop, &letters[1].mail);
	ASSERT_TRUE(loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_run, 2);
	ASSERT_EQ(w.n_rests, 0);
	w.rest_has = true;
	ASSERT_OK(loop_turn(loop, 1000));
	ASSERT_EQ(w.n_rests, 1);
	ASSERT_EQ(w.n_served, 1);
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_rests, 2);
	ASSERT_TRUE(!loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_rests, 2);
}
