/* The event loop: sources, timers, mail, chores, and what a callback may remove or free. */
#include "base/clock.h"
#include "base/loop/loop.h"
#include "test.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

/* An eventfd that is always ready, and what happened to it. */
struct event {
	struct loop_source source;
	unsigned n_calls;
	uint32_t last_events;
	struct event *other;
};

static void event_open(struct event *event, void (*ready)(struct loop_source *, uint32_t))
{
	*event = (struct event){ .source.fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK),
				 .source.ready = ready };
	ASSERT_INT(event->source.fd, >=, 0);
}

static void event_close(struct event *event)
{
	loop_remove(&event->source);
	event->source.fd = fd_close(event->source.fd);
}

static void event_count(struct loop_source *source, uint32_t events)
{
	struct event *event = container_of(source, struct event, source);

	event->n_calls++;
	event->last_events = events;
}

TEST(descriptor_is_reported_until_removed)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event event;

	ASSERT_OK(loop_new(&loop));
	event_open(&event, event_count);
	ASSERT_OK(loop_add(loop, &event.source, EPOLLIN));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(event.n_calls, 2);
	ASSERT_EQ(event.last_events, EPOLLIN);
	ASSERT_OK(loop_modify(&event.source, 0));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(event.n_calls, 2);
	ASSERT_OK(loop_modify(&event.source, EPOLLIN | EPOLLOUT));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(event.last_events, EPOLLIN | EPOLLOUT);
	loop_remove(&event.source);
	loop_remove(&event.source);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(event.n_calls, 3);
	event_close(&event);
}

TEST(edge_is_reported_once)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event event;

	ASSERT_OK(loop_new(&loop));
	event_open(&event, event_count);
	ASSERT_OK(loop_add(loop, &event.source, EPOLLIN | EPOLLET));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(event.n_calls, 1);
	ASSERT_OK(eventfd_write(event.source.fd, 1));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(event.n_calls, 2);
	event_close(&event);
}

TEST(refused_descriptor_is_not_added)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct loop_source source = { .fd = -1, .ready = event_count };

	ASSERT_OK(loop_new(&loop));
	ASSERT_EQ(loop_add(loop, &source, EPOLLIN), -EBADF);
	ASSERT_TRUE(!source.loop);
	source.fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC); /* a regular file has no poll */
	ASSERT_EQ(loop_add(loop, &source, EPOLLIN), -EPERM);
	(void)fd_close(source.fd);
}

static void event_remove_other(struct loop_source *source, uint32_t events)
{
	event_count(source, events);
	loop_remove(&container_of(source, struct event, source)->other->source);
}

TEST(removed_source_is_not_called_though_fetched)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event a, b;

	ASSERT_OK(loop_new(&loop));
	event_open(&a, event_remove_other);
	event_open(&b, event_remove_other);
	a.other = &b;
	b.other = &a;
	ASSERT_OK(loop_add(loop, &a.source, EPOLLIN));
	ASSERT_OK(loop_add(loop, &b.source, EPOLLIN));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(a.n_calls + b.n_calls, 1);
	event_close(&a);
	event_close(&b);
}

/* The other's event is fetched; then it is another descriptor at the same address, one without events. */
static void event_replace_other(struct loop_source *source, uint32_t events)
{
	struct event *other = container_of(source, struct event, source)->other;
	struct loop *loop = source->loop;

	event_count(source, events);
	if (!other)
		return;
	event_close(other);
	event_open(other, event_count);
	(void)eventfd_read(other->source.fd, &(eventfd_t){ 0 });
	ASSERT_OK(loop_add(loop, &other->source, EPOLLIN));
}

TEST(new_source_at_an_old_address_gets_no_stale_event)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event a, b;

	ASSERT_OK(loop_new(&loop));
	event_open(&a, event_replace_other);
	event_open(&b, event_replace_other);
	a.other = &b;
	b.other = NULL;
	ASSERT_OK(loop_add(loop, &a.source, EPOLLIN));
	ASSERT_OK(loop_add(loop, &b.source, EPOLLIN));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(a.n_calls, 1);
	ASSERT_EQ(b.n_calls, 0);
	event_close(&a);
	event_close(&b);
}

static void event_silence_other(struct loop_source *source, uint32_t events)
{
	struct event *event = container_of(source, struct event, source);

	event_count(source, events);
	if (event->other->source.loop)
		ASSERT_OK(loop_modify(&event->other->source, 0));
}

TEST(modified_source_gets_no_event_it_no_longer_wants)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event a, b;

	ASSERT_OK(loop_new(&loop));
	event_open(&a, event_silence_other);
	event_open(&b, event_silence_other);
	a.other = &b;
	b.other = &a;
	ASSERT_OK(loop_add(loop, &a.source, EPOLLIN));
	ASSERT_OK(loop_add(loop, &b.source, EPOLLIN));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(a.n_calls + b.n_calls, 1);
	event_close(&a);
	event_close(&b);
}

static unsigned n_freed;

static void event_free_self(struct loop_source *source, uint32_t events)
{
	struct event *event = container_of(source, struct event, source);

	(void)events;
	event_close(event);
	free(event);
	n_freed++;
}

TEST(source_frees_itself)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;

	ASSERT_OK(loop_new(&loop));
	/* More than one epoll_wait() fetches. */
	for (unsigned i = 0; i < 200; i++) {
		struct event *event = malloc(sizeof(*event));

		ASSERT_TRUE(event);
		event_open(event, event_free_self);
		ASSERT_OK(loop_add(loop, &event->source, EPOLLIN));
	}
	while (n_freed < 200)
		ASSERT_OK(loop_turn(loop, 0));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(n_freed, 200);
}

/* Timers */

struct alarm {
	struct loop_timer timer;
	unsigned n_calls;
	uint64_t called_ns;
	struct alarm *victim;
};

static uint64_t last_at_ns;
static bool out_of_order;

static void alarm_count(struct loop_timer *timer)
{
	struct alarm *alarm = container_of(timer, struct alarm, timer);

	alarm->n_calls++;
	alarm->called_ns = clock_now_ns();
	out_of_order |= timer->at_ns < last_at_ns;
	last_at_ns = timer->at_ns;
}

TEST(timer_comes_once_and_not_early)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm alarm = { .timer.expired = alarm_count };
	uint64_t at_ns = clock_now_ns() + 3 * NSEC_PER_MSEC + 700 * NSEC_PER_USEC;

	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(loop_timer_set(loop, &alarm.timer, at_ns));
	while (!alarm.n_calls)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_TRUE(alarm.called_ns >= at_ns);
	ASSERT_TRUE(!alarm.timer.loop);
	/* It slept: once for the timer, and not in a circle of rounded-down waits before it. */
	ASSERT_INT(loop_wakeups(loop), <=, 2);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(alarm.n_calls, 1);
}

/* What wakes the loop is set once it sleeps, and not put off with the timers: it has to come neither too late nor for nobody. */
TEST(timer_comes_after_others_that_the_loop_has_slept_for)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm gone = { .timer.expired = alarm_count };
	struct alarm soon = { .timer.expired = alarm_count };
	struct alarm far = { .timer.expired = alarm_count };
	unsigned n_gone;
	uint64_t at_ns;

	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(loop_timer_set(loop, &far.timer, clock_now_ns() + 3600 * NSEC_PER_SEC));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_OK(loop_timer_set(loop, &gone.timer, clock_now_ns() + 20 * NSEC_PER_MSEC));
	ASSERT_OK(loop_turn(loop, 1));
	loop_timer_cancel(&gone.timer);
	n_gone = gone.n_calls; /* on a slow machine it came before */
	for (unsigned i = 1; i <= 2; i++) {
		at_ns = clock_now_ns() + 40 * NSEC_PER_MSEC;
		ASSERT_OK(loop_timer_set(loop, &soon.timer, at_ns));
		while (soon.n_calls < i)
			ASSERT_OK(loop_turn(loop, -1));
		ASSERT_TRUE(clock_now_ns() >= at_ns);
	}
	/* Three sleeps that ended by themselves, or by the alarm of the one that was cancelled. */
	ASSERT_TRUE(loop_wakeups(loop) <= 5);
	ASSERT_EQ(gone.n_calls, n_gone);
	ASSERT_EQ(far.n_calls, 0);
	loop_timer_cancel(&far.timer);
}

static unsigned n_left(const struct alarm *alarms, const bool *armed, unsigned n)
{
	unsigned left = 0;

	for (unsigned k = 0; k < n; k++)
		left += armed[k] && !alarms[k].n_calls;
	return left;
}

TEST(timers_come_in_order_after_any_changes)
{
	enum { N = 300 };
	_cleanup_(freep) struct alarm *alarms = calloc(N, sizeof(*alarms));
	_cleanup_(loop_freep) struct loop *loop = NULL;
	uint64_t past_ns = clock_now_ns() - 10000;
	bool armed[N] = { false };
	unsigned seed = 1;

	ASSERT_OK(loop_new(&loop));
	for (unsigned i = 0; i < 20 * N; i++) {
		unsigned k = (unsigned)rand_r(&seed) % N;

		alarms[k].timer.expired = alarm_count;
		armed[k] = rand_r(&seed) % 3 != 0;
		if (armed[k])
			ASSERT_OK(loop_timer_set(loop, &alarms[k].timer,
						 past_ns - (unsigned)rand_r(&seed) % 1000));
		else
			loop_timer_cancel(&alarms[k].timer);
	}
	/* A turn of a slow machine leaves some to the next. */
	do
		ASSERT_OK(loop_turn(loop, 0));
	while (n_left(alarms, armed, N));
	ASSERT_TRUE(!out_of_order);
	for (unsigned k = 0; k < N; k++)
		ASSERT_EQ(alarms[k].n_calls, armed[k]);
}

static void alarm_cancel_victim(struct loop_timer *timer)
{
	alarm_count(timer);
	loop_timer_cancel(&container_of(timer, struct alarm, timer)->victim->timer);
}

TEST(timer_cancels_another_that_is_due)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm a = { .timer.expired = alarm_cancel_victim };
	struct alarm b = { .timer.expired = alarm_cancel_victim, .victim = &a };

	a.victim = &b;
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(loop_timer_set(loop, &a.timer, 1));
	ASSERT_OK(loop_timer_set(loop, &b.timer, 1));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(a.n_calls + b.n_calls, 1);
	loop_timer_cancel(&a.timer);
	loop_timer_cancel(&b.timer);
}

static void alarm_again(struct loop_timer *timer)
{
	alarm_count(timer);
	ASSERT_OK(loop_timer_set(container_of(timer, struct alarm, timer)->victim->timer.loop,
				 timer, 0));
}

TEST(timer_set_to_the_past_for_ever_starves_nobody)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm never = { .timer.expired = alarm_count };
	struct alarm again = { .timer.expired = alarm_again, .victim = &never };
	struct event event;

	ASSERT_OK(loop_new(&loop));
	event_open(&event, event_count);
	ASSERT_OK(loop_add(loop, &event.source, EPOLLIN));
	ASSERT_OK(loop_timer_set(loop, &never.timer, CLOCK_NEVER));
	ASSERT_OK(loop_timer_set(loop, &again.timer, 0));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_INT(again.n_calls, >=, 2);
	ASSERT_EQ(event.n_calls, 2);
	ASSERT_EQ(never.n_calls, 0);
	loop_timer_cancel(&again.timer);
	loop_timer_cancel(&never.timer);
	event_close(&event);
}

/* Mail */

struct letter {
	struct mail mail;
	struct loop *loop;
	unsigned sender, number;
	unsigned n_runs;
	struct letter *victim;
};

static void letter_count(struct mail *mail)
{
	container_of(mail, struct letter, mail)->n_runs++;
}

static unsigned next_number[4], n_letters;

static void letter_check_order(struct mail *mail)
{
	struct letter *letter = container_of(mail, struct letter, mail);

	if (letter->number == next_number[letter->sender])
		next_number[letter->sender]++;
	n_letters++;
}

enum { LETTERS = 5000 };

static void *letters_post(void *arg)
{
	struct letter *letters = arg;

	for (unsigned i = 0; i < LETTERS; i++)
		loop_post(letters[i].loop, &letters[i].mail);
	return NULL;
}

TEST(mail_of_each_thread_runs_in_its_order)
{
	_cleanup_(freep) struct letter *letters = calloc(4 * LETTERS, sizeof(*letters));
	_cleanup_(loop_freep) struct loop *loop = NULL;
	pthread_t threads[4];

	ASSERT_OK(loop_new(&loop));
	for (unsigned i = 0; i < 4 * LETTERS; i++)
		letters[i] = (struct letter){ .mail.run = letter_check_order,
					      .loop = loop,
					      .sender = i / LETTERS,
					      .number = i % LETTERS };
	for (unsigned i = 0; i < 4; i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, letters_post, letters + i * LETTERS));
	while (n_letters < 4 * LETTERS)
		ASSERT_OK(loop_turn(loop, -1));
	for (unsigned i = 0; i < 4; i++) {
		ASSERT_OK(pthread_join(threads[i], NULL));
		ASSERT_EQ(next_number[i], LETTERS);
	}
}

static void letter_repost(struct mail *mail)
{
	letter_count(mail);
	loop_post(container_of(mail, struct letter, mail)->loop, mail);
}

TEST(mail_posting_itself_starves_nobody)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct letter letter = { .mail.run = letter_repost };
	struct event event;

	ASSERT_OK(loop_new(&loop));
	event_open(&event, event_count);
	ASSERT_OK(loop_add(loop, &event.source, EPOLLIN));
	letter.loop = loop;
	loop_post(loop, &letter.mail);
	for (unsigned i = 0; i < 5; i++)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(letter.n_runs, 5);
	ASSERT_EQ(event.n_calls, 5);
	event_close(&event);
}

static void letter_unpost_victim(struct mail *mail)
{
	struct letter *letter = container_of(mail, struct letter, mail);

	letter_count(mail);
	loop_unpost(letter->loop, &letter->victim->mail);
}

TEST(mail_taken_back_does_not_run)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct letter letters[4];

	ASSERT_OK(loop_new(&loop));
	for (unsigned i = 0; i < 4; i++)
		letters[i] = (struct letter){ .mail.run = letter_count, .loop = loop };
	/* Not posted; from the inbox; by another that runs right before it; the last of the turn. */
	loop_unpost(loop, &letters[0].mail);
	loop_post(loop, &letters[0].mail);
	loop_post(loop, &letters[1].mail);
	loop_post(loop, &letters[2].mail);
	loop_post(loop, &letters[3].mail);
	loop_unpost(loop, &letters[1].mail);
	letters[2].mail.run = letter_unpost_victim;
	letters[2].victim = &letters[3];
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(letters[0].n_runs, 1);
	ASSERT_EQ(letters[1].n_runs, 0);
	ASSERT_EQ(letters[2].n_runs, 1);
	ASSERT_EQ(letters[3].n_runs, 0);
}

struct deferrer {
	struct event event;
	struct letter soon;
	unsigned n_before; /* how often the other had run when this one's mail came */
	struct deferrer *other;
};

static void soon_count(struct mail *mail)
{
	struct deferrer *d = container_of(mail, struct deferrer, soon.mail);

	letter_count(mail);
	d->n_before = d->other->event.n_calls;
}

static void event_defer(struct loop_source *source, uint32_t events)
{
	struct deferrer *d = container_of(source, struct deferrer, event.source);

	event_count(source, events);
	loop_defer(source->loop, &d->soon.mail);
}

static void letter_defer(struct mail *mail)
{
	struct letter *letter = container_of(mail, struct letter, mail);

	letter_count(mail);
	ASSERT_EQ(letter->victim->n_runs, 0);
	loop_defer(letter->loop, &letter->victim->mail);
}

TEST(deferred_mail_runs_behind_what_deferred_it)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct deferrer a = { .soon.mail.run = soon_count }, b = { .soon.mail.run = soon_count };
	struct letter last = { .mail.run = letter_count }, taken = { .mail.run = letter_count };
	struct letter first = { .mail.run = letter_defer, .victim = &last };
	struct letter second = { .mail.run = letter_unpost_victim, .victim = &taken };

	ASSERT_OK(loop_new(&loop));
	a.other = &b;
	b.other = &a;
	event_open(&a.event, event_defer);
	event_open(&b.event, event_defer);
	ASSERT_OK(loop_add(loop, &a.event.source, EPOLLIN | EPOLLET));
	ASSERT_OK(loop_add(loop, &b.event.source, EPOLLIN | EPOLLET));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(a.soon.n_runs, 1);
	ASSERT_EQ(b.soon.n_runs, 1);
	ASSERT_EQ(a.n_before + b.n_before, 1);

	first.loop = second.loop = loop;
	loop_post(loop, &first.mail);
	loop_post(loop, &second.mail);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(last.n_runs, 1);

	/* Outside a turn: it does not sleep over it; and what is taken back does not run. */
	last.n_runs = 0;
	loop_defer(loop, &last.mail);
	loop_defer(loop, &taken.mail);
	loop_unpost(loop, &taken.mail);
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(last.n_runs, 1);
	ASSERT_EQ(taken.n_runs, 0);
	event_close(&a.event);
	event_close(&b.event);
}

static void letter_finish(struct mail *mail)
{
	struct letter *letter = container_of(mail, struct letter, mail);

	letter_count(mail);
	loop_finish(letter->loop, &letter->victim->mail);
}

/* With the turn that it was posted in: no other turn, and no epoll, for it. */
TEST(finishing_mail_runs_at_the_end_of_its_turn)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct letter last = { .mail.run = letter_count }, taken = { .mail.run = letter_count };
	struct letter second = { .mail.run = letter_unpost_victim, .victim = &taken };
	struct letter first = { .mail.run = letter_finish, .victim = &last };
	struct letter again = { .mail.run = letter_finish, .victim = &last };
	uint64_t wakeups;

	ASSERT_OK(loop_new(&loop));
	first.loop = second.loop = again.loop = loop;
	wakeups = loop_wakeups(loop);
	loop_post(loop, &first.mail);
	loop_post(loop, &second.mail);
	loop_finish(loop, &taken.mail);
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(last.n_runs, 1);
	ASSERT_EQ(second.n_runs, 1);
	ASSERT_EQ(taken.n_runs, 0);
	ASSERT_EQ(loop_wakeups(loop), wakeups + 1);

	/* What finishing mail posts so comes with the next turn, which does not wait for anything else. */
	loop_finish(loop, &again.mail);
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(again.n_runs, 1);
	ASSERT_EQ(last.n_runs, 1);
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(last.n_runs, 2);
}

TEST(mail_left_at_the_end_is_dropped)
{
	struct letter letter = { .mail.run = letter_count };
	struct loop *loop;

	ASSERT_OK(loop_new(&loop));
	loop_post(loop, &letter.mail);
	ASSERT_TRUE(!loop_free(loop));
	ASSERT_EQ(letter.n_runs, 0);
	ASSERT_TRUE(!loop_free(NULL));
}

/* Sleep and stop */

TEST(idle_loop_sleeps)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm far = { .timer.expired = alarm_count };
	uint64_t start_ns;

	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(loop_timer_set(loop, &far.timer, clock_now_ns() + 3600 * NSEC_PER_SEC));
	start_ns = clock_now_ns();
	ASSERT_OK(loop_turn(loop, 30));
	ASSERT_TRUE(clock_now_ns() - start_ns >= 30 * NSEC_PER_MSEC);
	ASSERT_EQ(loop_wakeups(loop), 1);
	loop_timer_cancel(&far.timer);
}

TEST(mail_to_a_loop_that_is_awake_causes_no_wakeup)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct letter letter = { .mail.run = letter_count };

	ASSERT_OK(loop_new(&loop));
	for (unsigned i = 0; i < 3; i++) {
		loop_post(loop, &letter.mail);
		ASSERT_OK(loop_turn(loop, -1));
	}
	ASSERT_EQ(letter.n_runs, 3);
	ASSERT_EQ(loop_wakeups(loop), 3);
	/* No event of those posts is left behind. */
	ASSERT_OK(loop_turn(loop, 10));
	ASSERT_EQ(loop_wakeups(loop), 4);
}

/* A ball between two sleeping loops: one lost wake-up and the game stands still. */
struct game {
	struct letter ball;
	struct loop *loops[2];
	unsigned n_departed;
	uint64_t linger_ns; /* or 0 */
};

static void game_hit(struct mail *mail)
{
	struct game *game = container_of(mail, struct game, ball.mail);

	if (game->linger_ns)
		(void)loop_linger(game->loops[game->n_departed % 2], clock_now_ns(),
				  game->linger_ns);
	if (game->n_departed == 0) {
		loop_stop(game->loops[0]);
		loop_stop(game->loops[1]);
		return;
	}
	game->n_departed--;
	loop_post(game->loops[game->n_departed % 2], mail);
}

static void *game_play(void *arg)
{
	return loop_run(arg) ? arg : NULL;
}

static bool find_nothing(struct loop_watch *watch)
{
	(void)watch;
	return false;
}

static void play(uint64_t spin_ns, uint64_t linger_ns)
{
	struct game game = { .ball.mail.run = game_hit,
			     .n_departed = 20000,
			     .linger_ns = linger_ns };
	struct loop_watch watch = { .look = find_nothing, .rest = find_nothing };
	pthread_t threads[2];
	void *failed;

	for (unsigned i = 0; i < 2; i++) {
		ASSERT_OK(loop_new(&game.loops[i]));
		loop_spin(game.loops[i], spin_ns, &watch);
	}
	for (unsigned i = 0; i < 2; i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, game_play, game.loops[i]));
	loop_post(game.loops[0], &game.ball.mail);
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_OK(pthread_join(threads[i], &failed));
		ASSERT_TRUE(!failed);
	}
	for (unsigned i = 0; i < 2; i++)
		(void)loop_free(game.loops[i]);
}

TEST(no_wakeup_is_lost)
{
	play(0, 0);
}

TEST(no_wakeup_is_lost_by_loops_that_spin)
{
	/* As long as a hit takes: some come while it looks, some as it goes to sleep, some after. */
	play(5 * NSEC_PER_USEC, 0);
}

TEST(no_wakeup_is_lost_by_loops_that_linger)
{
	play(0, 5 * NSEC_PER_USEC);
}

struct watcher {
	struct loop_watch watch;
	struct loop *loop;
	struct letter letter;
	unsigned n_looks, n_rests;
	unsigned found_at; /* the look that has something; 0: none */
	bool rest_finds;   /* once */
	bool always;
};

static bool watcher_look(struct loop_watch *watch)
{
	struct watcher *w = container_of(watch, struct watcher, watch);

	if (++w->n_looks != w->found_at && !w->always)
		return false;
	loop_defer(w->loop, &w->letter.mail);
	return true;
}

static bool watcher_rest(struct loop_watch *watch)
{
	struct watcher *w = container_of(watch, struct watcher, watch);

	w->n_rests++;
	if (!w->rest_finds)
		return false;
	w->rest_finds = false;
	loop_defer(w->loop, &w->letter.mail);
	return true;
}

TEST(watch_is_asked_before_a_sleep)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct alarm alarm = { .timer.expired = alarm_count };
	struct watcher w = {
		.watch = { .look = watcher_look, .rest = watcher_rest },
		.letter.mail.run = letter_count,
		.found_at = 3,
	};

	ASSERT_OK(loop_new(&loop));
	w.loop = loop;
	loop_spin(loop, 3600 * NSEC_PER_SEC, &w.watch);
	while (!w.letter.n_runs) /* who shares his core gives up sooner, and rests */
		ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_looks, 3);
	/* What comes between the last look and the sleep. */
	loop_spin(loop, 1, &w.watch);
	w.rest_finds = true;
	w.n_rests = 0;
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(w.letter.n_runs, 2);
	ASSERT_EQ(w.n_rests, 1);
	/* A sleep ends as ever, and the timer is not put off. */
	ASSERT_OK(loop_timer_set(loop, &alarm.timer, clock_now_ns() + 5 * NSEC_PER_MSEC));
	while (!alarm.n_calls)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(w.letter.n_runs, 2);
	loop_spin(loop, 3600 * NSEC_PER_SEC, &w.watch);
	ASSERT_OK(loop_timer_set(loop, &alarm.timer, clock_now_ns() + 5 * NSEC_PER_MSEC));
	while (alarm.n_calls < 2)
		ASSERT_OK(loop_turn(loop, -1));
	/* Not asked. */
	loop_spin(loop, 0, &w.watch);
	w.n_looks = 0;
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_looks, 0);
}

TEST(loop_lingers_until_it_sleeps)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct watcher w = {
		.watch = { .look = watcher_look, .rest = watcher_rest },
		.letter.mail.run = letter_count,
		.found_at = 1,
	};

	ASSERT_OK(loop_new(&loop));
	w.loop = loop;
	loop_spin(loop, 0, &w.watch);
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_TRUE(!loop_lingers(loop));
	ASSERT_EQ(w.n_looks, 0);
	ASSERT_EQ(w.n_rests, 0);
	/* What is there is found at the first look, and the rest is still to come. */
	ASSERT_TRUE(loop_linger(loop, clock_now_ns(), 3600 * NSEC_PER_SEC));
	ASSERT_TRUE(loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(w.n_looks, 1);
	ASSERT_EQ(w.letter.n_runs, 1);
	ASSERT_EQ(w.n_rests, 0);
	ASSERT_TRUE(loop_lingers(loop));
	(void)loop_free(loop);

	/* What comes between the last look and the sleep; then it sleeps, once. */
	ASSERT_OK(loop_new(&loop));
	w.loop = loop;
	w.rest_finds = true;
	loop_spin(loop, 0, &w.watch);
	ASSERT_TRUE(loop_linger(loop, clock_now_ns(), 0));
	ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(w.letter.n_runs, 2);
	ASSERT_EQ(w.n_rests, 1);
	ASSERT_TRUE(loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_rests, 2);
	ASSERT_TRUE(!loop_lingers(loop));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_EQ(w.n_rests, 2);
	/* Without a watch, too. */
	loop_spin(loop, 0, NULL);
	ASSERT_TRUE(loop_linger(loop, clock_now_ns(), 0));
	ASSERT_OK(loop_turn(loop, 1));
	ASSERT_TRUE(!loop_lingers(loop));
}

TEST(watch_that_always_has_something_starves_no_descriptor)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct event event;
	struct watcher w = {
		.watch = { .look = watcher_look, .rest = watcher_rest },
		.letter.mail.run = letter_count,
		.always = true,
	};

	ASSERT_OK(loop_new(&loop));
	w.loop = loop;
	loop_spin(loop, NSEC_PER_SEC, &w.watch);
	event_open(&event, event_count);
	ASSERT_OK(loop_add(loop, &event.source, EPOLLIN));
	for (unsigned i = 0; i < 100 && !event.n_calls; i++)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_INT(event.n_calls, >=, 1);
	event_close(&event);
}

TEST(stop_before_run)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;

	ASSERT_OK(loop_new(&loop));
	loop_stop(loop);
	ASSERT_OK(loop_run(loop));
}

static void letter_stop(struct mail *mail)
{
	letter_count(mail);
	loop_stop(container_of(mail, struct letter, mail)->loop);
}

static void event_stop(struct loop_source *source, uint32_t events)
{
	event_count(source, events);
	loop_stop(source->loop);
}

TEST(stop_keeps_what_was_ready)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct letter letters[3];
	struct event events[3];

	ASSERT_OK(loop_new(&loop));
	for (unsigned i = 0; i < 3; i++) {
		letters[i] = (struct letter){ .mail.run = letter_stop, .loop = loop };
		loop_post(loop, &letters[i].mail);
		event_open(&events[i], event_stop);
		ASSERT_OK(loop_add(loop, &events[i].source, EPOLLIN | EPOLLET));
	}
	/* An edge that was fetched and then thrown away would never come back, and run() would not return. */
	for (unsigned run = 0; run < 3; run++) {
		ASSERT_OK(loop_run(loop));
		ASSERT_EQ(events[0].n_calls + events[1].n_calls + events[2].n_calls, run + 1);
		ASSERT_EQ(letters[0].n_runs, 0);
	}
	for (unsigned run = 0; run < 3; run++) {
		ASSERT_OK(loop_run(loop));
		for (unsigned i = 0; i < 3; i++)
			ASSERT_EQ(letters[i].n_runs, i <= run);
	}
	for (unsigned i = 0; i < 3; i++)
		event_close(&events[i]);
}

/* Each step of which takes a while. */
struct chores {
	struct chore chore;
	unsigned n_departed, n_steps;
	const struct chores *other;
	unsigned most_ahead;
};

static bool chores_step(struct chore *chore)
{
	struct chores *chores = container_of(chore, struct chores, chore);
	uint64_t until_ns = clock_now_ns() + 100 * NSEC_PER_USEC;

	while (clock_now_ns() < until_ns)
		;
	chores->n_steps++;
	if (chores->other && chores->n_steps > chores->other->n_steps)
		chores->most_ahead =
			MAX(chores->most_ahead, chores->n_steps - chores->other->n_steps);
	return --chores->n_departed;
}

TEST(chores_are_done_by_turns_and_a_turn_does_but_some)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct chores one = { .chore.step = chores_step, .n_departed = 200 };
	struct chores two = { .chore.step = chores_step, .n_departed = 200, .other = &one };
	unsigned n_turns = 0;

	ASSERT_OK(loop_new(&loop));
	loop_begin(loop, &one.chore);
	loop_begin(loop, &one.chore);
	loop_begin(loop, &two.chore);
	while (one.n_departed || two.n_departed) {
		unsigned n = one.n_steps + two.n_steps;

		/* Does not wait, though there is nothing else. */
		ASSERT_OK(loop_turn(loop, -1));
		n_turns++;
		ASSERT_INT(one.n_steps + two.n_steps, >, n);
		ASSERT_INT(one.n_steps + two.n_steps - n, <=, 21);
	}
	ASSERT_INT(n_turns, >=, 400 / 21);
	ASSERT_INT(two.most_ahead, <=, 1);
	ASSERT_EQ(one.n_steps, 200);
	ASSERT_EQ(two.n_steps, 200);
}

TEST(a_chore_that_is_aborted_has_no_step)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct chores one = { .chore.step = chores_step, .n_departed = 2 };

	ASSERT_OK(loop_new(&loop));
	loop_abort(&one.chore);
	loop_begin(loop, &one.chore);
	loop_abort(&one.chore);
	ASSERT_OK(loop_turn(loop, 0));
	ASSERT_EQ(one.n_steps, 0);
}
