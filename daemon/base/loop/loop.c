/*
 * The event loop: sources of epoll, a heap of timers, mail of other threads, and polling before
 * sleeping. main.c makes the control thread's; thread.c starts threads that run one each.
 */
#include "base/loop/loop.h"

#include "base/clock.h"
#include "base/error.h"
#include "proto/allowance.h"
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

/* Of a piece, whoever waits: the caches are to keep for a while what is done in it. */
#define LOOP_PIECE_LEAST_NS (40 * NSEC_PER_USEC)
/*
 * Where many are watched a look takes long: what it has found holds for as long as a piece lasts at least, or four times as long as
 * the look took, and for so long at the most.
 */
#define LOOP_LOOK_REST_NS (500 * NSEC_PER_USEC)
/* Mail, and timers that are due, have so much of a turn, at the most. */
#define LOOP_MAIL_NS   (2 * NSEC_PER_MSEC)
#define LOOP_TIMERS_NS (2 * NSEC_PER_MSEC)

#define LOOP_EVENTS 64 /* fetched by one epoll_wait(); more wait for the next, nothing is lost */
/* Of looks, how many go by until descriptors are asked, too. */
#define LOOP_LOOKS 8
/* Who gives its core away and does not have it again after so long, shares it, and sleeps. */
#define LOOP_SPIN_AWAY_NS (500 * NSEC_PER_USEC)

/* Mail, first first. */
struct mails {
	struct mail *first, *last; /* NULL: there is none */
};

struct loop {
	/* Any thread. */
	_Atomic(struct mail *) inbox; /* posted, last first */
	/*
	 * Whether a poster must write the eventfd. The loop sets it, looks at the inbox once more
	 * and then waits; a poster fills the inbox and then looks here. Both in the one order of
	 * seq_cst: one of them sees the other.
	 */
	_Atomic bool sleeping;
	_Atomic bool stopping;
	_Atomic uint64_t wakeups;

	/* The loop's thread. */
	int epoll_fd _cache_aligned_;
	int event_fd;
	int timer_fd;
	/*
	 * When timer_fd wakes the loop, never later than the soonest timer when it sleeps. Earlier
	 * if that one has gone or was put off meanwhile, as deadlines of requests are: then it
	 * wakes for nothing, once, instead of being set for each.
	 */
	uint64_t alarm_ns;
	size_t n_sources;
	struct mails mail;	  /* taken out of the inbox */
	struct mail *deferred;	  /* last first */
	struct mails finishing;	  /* for the end of the turn */
	struct mails yielded;	  /* for the end of the turn, whatever mail is left */
	struct list chores;	  /* whose turn it is first first */
	struct loop_watch *watch; /* or NULL */
	uint64_t spin_ns;
	uint64_t linger_until_ns; /* 0: it does not linger */
	bool is_to_rest;	  /* the watch, before the loop sleeps */
	bool is_wanted;		  /* what the watch said the last time, and until when that holds */
	uint64_t wanted_until_ns;
	uint64_t turn_ns; /* when the turn began */
	/* The watch's, when the turn began, and when the turn before it began. */
	uint64_t took_ns, took_before_ns;
	struct allowance allowance; /* for lingering */
	unsigned n_looks;
	struct loop_timer **timers; /* binary heap, the soonest on top */
	size_t n_timers;
	size_t timers_capacity;
	int n_events;
	int next_event; /* events[next_event .. n_events) are still to be dispatched */
	struct epoll_event events[LOOP_EVENTS];
};

int loop_new(struct loop **ret_loop)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	_cleanup_(loop_freep) struct loop *loop = aligned_alloc(CACHE_LINE, sizeof(*loop));
	struct epoll_event alarm = event;

	if (!loop)
		return error_origin(-ENOMEM);
	memset(loop, 0, sizeof(*loop));
	list_init(&loop->chores);
	loop->turn_ns = clock_now_ns();
	loop->event_fd = loop->timer_fd = -1;
	loop->alarm_ns = CLOCK_NEVER;
	alarm.data.ptr = &loop->alarm_ns;

	loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (loop->epoll_fd < 0)
		return error_origin(-errno);
	loop->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (loop->event_fd < 0)
		return error_origin(-errno);
	loop->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (loop->timer_fd < 0)
		return error_origin(-errno);
	/*
	 * Edge-triggered: each write or alarm wakes once, and nobody ever needs to read the counter
	 * back to zero.
	 */
	if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->event_fd, &event) < 0 ||
	    epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->timer_fd, &alarm) < 0)
		return error_origin(-errno);

	*ret_loop = TAKE_PTR(loop);
	return 0;
}

struct loop *loop_free(struct loop *loop)
{
	if (!loop)
		return NULL;
	assert(loop->n_sources == 0);
	assert(loop->n_timers == 0);

	loop->event_fd = fd_close(loop->event_fd);
	loop->timer_fd = fd_close(loop->timer_fd);
	loop->epoll_fd = fd_close(loop->epoll_fd);
	free(loop->timers);
	free(loop);
	return NULL;
}

uint64_t loop_wakeups(const struct loop *loop)
{
	return atomic_load_explicit(&loop->wakeups, memory_order_relaxed);
}

/* Called after what the loop shall see has been stored with seq_cst. */
static void loop_wake(struct loop *loop)
{
	uint64_t one = 1;

	if (!atomic_load(&loop->sleeping) || !atomic_exchange(&loop->sleeping, false))
		return;
	/* Fails only once 2^64 - 2 wake-ups have been counted. */
	while (write(loop->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void loop_stop(struct loop *loop)
{
	atomic_store(&loop->stopping, true);
	loop_wake(loop);
}

/* Sources */

int loop_add(struct loop *loop, struct loop_source *source, uint32_t events)
{
	struct epoll_event event = { .events = events, .data.ptr = source };

	assert(!source->loop && source->ready);

	if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, source->fd, &event) < 0)
		return error_origin(-errno);
	source->events = events;
	source->loop = loop;
	loop->n_sources++;
	return 0;
}

int loop_modify(struct loop_source *source, uint32_t events)
{
	struct epoll_event event = { .events = events, .data.ptr = source };

	assert(source->loop);

	if (epoll_ctl(source->loop->epoll_fd, EPOLL_CTL_MOD, source->fd, &event) < 0)
		return error_origin(-errno);
	source->events = events;
	return 0;
}

void loop_remove(struct loop_source *source)
{
	struct loop *loop = source->loop;

	if (!loop)
		return;
	/*
	 * Always, although close() often does it too: it does not while a copy of the descriptor
	 * lives on in another process, and then epoll goes on reporting a source that is gone.
	 */
	(void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
	for (int i = loop->next_event; i < loop->n_events; i++)
		if (loop->events[i].data.ptr == source)
			loop->events[i].data.ptr = NULL;
	source->loop = NULL;
	loop->n_sources--;
}

/* Timers */

static void loop_heap_put(struct loop *loop, size_t index, struct loop_timer *timer)
{
	loop->timers[index] = timer;
	timer->heap_index = index;
}

static void loop_heap_up(struct loop *loop, struct loop_timer *timer)
{
	size_t index = timer->heap_index;

	while (index > 0) {
		size_t parent = (index - 1) / 2;

		if (loop->timers[parent]->at_ns <= timer->at_ns)
			break;
		loop_heap_put(loop, index, loop->timers[parent]);
		index = parent;
	}
	loop_heap_put(loop, index, timer);
}

static void loop_heap_down(struct loop *loop, struct loop_timer *timer)
{
	size_t index = timer->heap_index;

	for (;;) {
		size_t child = 2 * index + 1;

		if (child + 1 < loop->n_timers &&
		    loop->timers[child + 1]->at_ns < loop->timers[child]->at_ns)
			child++;
		if (child >= loop->n_timers || loop->timers[child]->at_ns >= timer->at_ns)
			break;
		loop_heap_put(loop, index, loop->timers[child]);
		index = child;
	}
	loop_heap_put(loop, index, timer);
}

static int loop_heap_reserve(struct loop *loop)
{
	size_t capacity = loop->timers_capacity ? 2 * loop->timers_capacity : 16;
	struct loop_timer **timers;

	if (loop->n_timers < loop->timers_capacity)
		return 0;
	timers = reallocarray(loop->timers, capacity, sizeof(*timers));
	if (!timers)
		return error_origin(-ENOMEM);
	loop->timers = timers;
	loop->timers_capacity = capacity;
	return 0;
}

int loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t at_ns)
{
	int r;

	assert(timer->expired);
	assert(!timer->loop || timer->loop == loop);

	if (!timer->loop) {
		r = loop_heap_reserve(loop);
		if (r)
			return error_trace(r);
		timer->loop = loop;
		timer->at_ns = at_ns;
		timer->heap_index = loop->n_timers++;
		loop_heap_up(loop, timer);
		return 0;
	}
	timer->at_ns = at_ns;
	loop_heap_up(loop, timer);
	loop_heap_down(loop, timer);
	return 0;
}

void loop_timer_cancel(struct loop_timer *timer)
{
	struct loop *loop = timer->loop;
	struct loop_timer *last;

	if (!loop)
		return;
	timer->loop = NULL;
	last = loop->timers[--loop->n_timers];
	if (last == timer)
		return;
	loop_heap_put(loop, timer->heap_index, last);
	loop_heap_up(loop, last);
	loop_heap_down(loop, last);
}

/* Mail */

void loop_post(struct loop *loop, struct mail *mail)
{
	struct mail *head = atomic_load_explicit(&loop->inbox, memory_order_relaxed);

	assert(mail->run);

	do {
		mail->next = head;
	} while (!atomic_compare_exchange_weak(&loop->inbox, &head, mail));
	loop_wake(loop);
}

static void mails_append(struct mails *mails, struct mails more)
{
	if (!more.first)
		return;
	if (mails->first)
		mails->last->next = more.first;
	else
		mails->first = more.first;
	mails->last = more.last;
}

static struct mails mails_take(struct mails *mails)
{
	struct mails taken = *mails;

	*mails = (struct mails){ 0 };
	return taken;
}

/* Appends the inbox to the mail taken before, turning it round: the first posted runs first. */
static void loop_take_mail(struct loop *loop)
{
	struct mail *posted = NULL;
	struct mails taken = { 0 };

	if (atomic_load_explicit(&loop->inbox, memory_order_relaxed))
		posted = atomic_exchange(&loop->inbox, NULL);
	taken.last = posted;
	while (posted) {
		struct mail *next = posted->next;

		posted->next = taken.first;
		taken.first = posted;
		posted = next;
	}
	mails_append(&loop->mail, taken);
}

void loop_defer(struct loop *loop, struct mail *mail)
{
	assert(mail->run);

	mail->next = loop->deferred;
	loop->deferred = mail;
}

void loop_finish(struct loop *loop, struct mail *mail)
{
	assert(mail->run);

	mail->next = NULL;
	mails_append(&loop->finishing, (struct mails){ mail, mail });
}

void loop_yield(struct loop *loop, struct mail *mail)
{
	assert(mail->run);

	mail->next = NULL;
	mails_append(&loop->yielded, (struct mails){ mail, mail });
}

static bool mails_remove(struct mails *mails, const struct mail *mail)
{
	struct mail **link = &mails->first, *before = NULL;

	for (; *link && *link != mail; link = &before->next)
		before = *link;
	if (!*link)
		return false;
	*link = mail->next;
	if (mails->last == mail)
		mails->last = before;
	return true;
}

void loop_unpost(struct loop *loop, struct mail *mail)
{
	struct mails deferred = { .first = loop->deferred };

	loop_take_mail(loop);
	if (!mails_remove(&loop->mail, mail) && !mails_remove(&loop->finishing, mail) &&
	    !mails_remove(&loop->yielded, mail))
		(void)mails_remove(&deferred, mail);
	loop->deferred = deferred.first;
}

static bool loop_stopping(struct loop *loop)
{
	return unlikely(atomic_load_explicit(&loop->stopping, memory_order_relaxed));
}

static void loop_run_deferred(struct loop *loop)
{
	struct mail *mail;

	while ((mail = loop->deferred)) {
		loop->deferred = mail->next;
		mail->run(mail);
	}
}

/* Pieces of a turn */

static bool is_wanted(struct loop *loop, uint64_t now_ns)
{
	uint64_t cost_ns;

	if (!loop->watch)
		return false;
	if (now_ns < loop->wanted_until_ns)
		return loop->is_wanted;
	loop->is_wanted = loop->watch->look(loop->watch);
	cost_ns = clock_now_ns() - now_ns;
	loop->wanted_until_ns =
		now_ns + cost_ns + MIN(MAX(LOOP_PIECE_LEAST_NS, 4 * cost_ns), LOOP_LOOK_REST_NS);
	return loop->is_wanted;
}

bool loop_has_mail(struct loop *loop)
{
	return loop->mail.first || atomic_load_explicit(&loop->inbox, memory_order_relaxed);
}

bool loop_is_wanted(struct loop *loop)
{
	return is_wanted(loop, clock_now_ns());
}

static uint64_t loop_watch_took(const struct loop *loop)
{
	return loop->watch ? loop->watch->took_ns : 0;
}

void loop_piece_begin(struct loop *loop, struct loop_piece *piece, uint64_t now_ns,
		      uint64_t most_ns)
{
	uint64_t took_ns = loop_watch_took(loop) - loop->took_before_ns;

	piece->until_ns = now_ns + most_ns;
	piece->least_ns = now_ns + MIN(MAX(took_ns, LOOP_PIECE_LEAST_NS), most_ns);
}

bool loop_piece_is_over(struct loop *loop, const struct loop_piece *piece, uint64_t now_ns)
{
	if (now_ns < piece->least_ns)
		return false;
	return now_ns >= piece->until_ns || is_wanted(loop, now_ns);
}

void loop_piece_all(struct loop_piece *piece)
{
	*piece = (struct loop_piece){ .until_ns = CLOCK_NEVER, .least_ns = CLOCK_NEVER };
}

void loop_piece_prolong(struct loop_piece *piece, uint64_t took_ns)
{
	piece->until_ns += took_ns;
	piece->least_ns += took_ns;
}

/* Runs the mail that was there at the start, in a piece of the turn; what is posted meanwhile waits for the next. */
static void loop_run_mail(struct loop *loop)
{
	const struct mail *last = loop->mail.last;
	struct loop_piece piece;
	struct mail *mail;

	if (!loop->mail.first)
		return;
	loop_piece_begin(loop, &piece, clock_now_ns(), LOOP_MAIL_NS);
	do {
		mail = loop->mail.first;
		if (!mail || loop_stopping(loop))
			break;
		loop->mail.first = mail->next;
		mail->run(mail);
	} while (mail != last && !loop_piece_is_over(loop, &piece, clock_now_ns()));
}

void loop_begin(struct loop *loop, struct chore *chore)
{
	assert(chore->step);

	if (!list_linked(&chore->link))
		list_push_back(&loop->chores, &chore->link);
}

void loop_abort(struct chore *chore)
{
	list_remove(&chore->link);
}

static void loop_run_chores(struct loop *loop)
{
	struct loop_piece piece;
	struct chore *chore;

	if (list_empty(&loop->chores))
		return;
	loop_piece_begin(loop, &piece, clock_now_ns(), LOOP_CHORES_NS);
	while ((chore = list_first(&loop->chores, struct chore, link)) && !loop_stopping(loop)) {
		list_remove(&chore->link);
		if (chore->step(chore))
			loop_begin(loop, chore);
		loop_run_deferred(loop);
		if (loop_piece_is_over(loop, &piece, clock_now_ns()))
			return;
	}
}

void loop_end_chores(struct loop *loop)
{
	struct chore *chore;

	while ((chore = list_first(&loop->chores, struct chore, link))) {
		list_remove(&chore->link);
		if (chore->step(chore))
			loop_begin(loop, chore);
	}
}

/* As mail behind all other: where a piece has left some of that, in a later turn. */
static void loop_run_finishing(struct loop *loop)
{
	bool is_behind = loop->mail.first;

	mails_append(&loop->mail, mails_take(&loop->finishing));
	if (!is_behind)
		loop_run_mail(loop);
	loop_run_deferred(loop);
}

static void loop_run_yielded(struct loop *loop)
{
	const struct mail *last = loop->yielded.last;
	struct mail *mail;

	while ((mail = loop->yielded.first) && !loop_stopping(loop)) {
		loop->yielded.first = mail->next;
		mail->run(mail);
		loop_run_deferred(loop);
		if (mail == last)
			break;
	}
}

/*
 * In a piece of the turn, and at most as many as there are at the start: one that sets itself to the past again does not
 * keep the loop.
 */
static void loop_run_timers(struct loop *loop)
{
	struct loop_piece piece;

	loop_piece_begin(loop, &piece, loop->turn_ns, LOOP_TIMERS_NS);
	for (size_t n = loop->n_timers; n > 0 && loop->n_timers > 0; n--) {
		struct loop_timer *timer = loop->timers[0];

		if (timer->at_ns > loop->turn_ns || loop_stopping(loop))
			return;
		loop_timer_cancel(timer);
		timer->expired(timer);
		loop_run_deferred(loop);
		if (loop_piece_is_over(loop, &piece, clock_now_ns()))
			return;
	}
}

/*
 * Events that loop_stop() leaves behind stay for the next turn: an edge would not be reported a
 * second time.
 */
static void loop_run_events(struct loop *loop)
{
	while (loop->next_event < loop->n_events && !loop_stopping(loop)) {
		struct epoll_event *event = &loop->events[loop->next_event++];
		struct loop_source *source = event->data.ptr;
		uint32_t events;

		if (!source) /* the eventfd, or removed */
			continue;
		if (event->data.ptr == &loop->alarm_ns) {
			loop->alarm_ns = CLOCK_NEVER;
			continue;
		}
		events = event->events & (source->events | EPOLLERR | EPOLLHUP);
		if (events)
			source->ready(source, events);
		loop_run_deferred(loop);
	}
}

/*
 * Sees to it that the loop is awake when the soonest timer is due. Returns whether it is due now.
 */
static bool loop_set_alarm(struct loop *loop)
{
	uint64_t at_ns = loop->n_timers ? loop->timers[0]->at_ns : CLOCK_NEVER;
	struct itimerspec alarm = {
		.it_value.tv_sec = (time_t)(at_ns / NSEC_PER_SEC),
		.it_value.tv_nsec = (long)(at_ns % NSEC_PER_SEC),
	};

	if (at_ns >= loop->alarm_ns)
		return false;
	if (at_ns <= clock_now_ns())
		return true;
	loop->alarm_ns = at_ns;
	(void)timerfd_settime(loop->timer_fd, TFD_TIMER_ABSTIME, &alarm, NULL);
	return false;
}

void loop_spin(struct loop *loop, uint64_t spin_ns, struct loop_watch *watch)
{
	loop->spin_ns = spin_ns;
	loop->watch = watch;
	loop->took_ns = loop->took_before_ns = loop_watch_took(loop);
	loop->wanted_until_ns = 0;
}

bool loop_linger(struct loop *loop, uint64_t now_ns, uint64_t linger_ns)
{
	if (!allowance_remains(&loop->allowance, (int64_t)now_ns))
		return false;
	loop->linger_until_ns = MAX(loop->linger_until_ns, now_ns + linger_ns);
	return true;
}

static bool loop_has_more(const struct loop *loop)
{
	return loop->mail.first || loop->deferred || loop->finishing.first || loop->yielded.first ||
	       !list_empty(&loop->chores);
}

bool loop_lingers(struct loop *loop)
{
	bool lingers = loop->linger_until_ns || loop_has_more(loop) ||
		       atomic_load_explicit(&loop->inbox, memory_order_relaxed);

	loop->is_to_rest |= lingers;
	return lingers;
}

/* Whether there is mail, a timer is due, or the watch has something. */
static bool loop_look(struct loop *loop, uint64_t now_ns)
{
	/*
	 * Also where there is mail: who does not ring a descriptor need not wait until there is
	 * none.
	 */
	bool found = loop->watch && loop->watch->look(loop->watch);

	return found || atomic_load_explicit(&loop->inbox, memory_order_relaxed) ||
	       loop_stopping(loop) || (loop->n_timers && loop->timers[0]->at_ns <= now_ns);
}

/*
 * A look since start_ns is over. away_ns: how long the processor was given away before that, the
 * last time.
 */
static void loop_settle(struct loop *loop, uint64_t start_ns, uint64_t now_ns, uint64_t away_ns,
			bool found)
{
	uint64_t until_ns = MIN(now_ns, loop->linger_until_ns);

	if (loop->linger_until_ns)
		allowance_settle(&loop->allowance, (int64_t)now_ns, found,
				 until_ns > start_ns ? (int64_t)(until_ns - start_ns) : 0,
				 (int64_t)away_ns);
}

/*
 * Whether there is something to do, of which descriptors have still to be asked; else the loop may
 * sleep.
 */
static bool loop_find(struct loop *loop)
{
	uint64_t start_ns = clock_now_ns(), now_ns = start_ns, before_ns = start_ns;
	uint64_t until_ns = MAX(start_ns + loop->spin_ns, loop->linger_until_ns);
	bool found;

	loop->n_events = loop->next_event = 0;
	while (start_ns < until_ns) {
		found = loop_look(loop, now_ns);
		/* Who does not always look may be told of what is to come by a descriptor. */
		if (!found && (++loop->n_looks % LOOP_LOOKS == 0 || !loop->spin_ns)) {
			loop->n_events =
				MAX(epoll_wait(loop->epoll_fd, loop->events, LOOP_EVENTS, 0), 0);
			found = loop->n_events;
		}
		if (found) {
			loop_settle(loop, start_ns, now_ns, now_ns - before_ns, true);
			return true;
		}
		if (now_ns >= until_ns || now_ns - before_ns >= LOOP_SPIN_AWAY_NS)
			break;
		(void)sched_yield();
		before_ns = now_ns;
		now_ns = clock_now_ns();
	}
	loop_settle(loop, start_ns, now_ns, now_ns - before_ns, false);
	if (loop->watch && loop->watch->rest(loop->watch))
		return true;
	loop->linger_until_ns = 0;
	loop->is_to_rest = false;
	return false;
}

static int loop_wait(struct loop *loop, int timeout_ms)
{
	int n;

	/*
	 * Events kept from a turn that was stopped come first; fetching more would overwrite them.
	 */
	if (loop->next_event < loop->n_events)
		return 0;
	if (loop_has_more(loop) || (!loop->spin_ns && !loop->linger_until_ns &&
				    atomic_load_explicit(&loop->inbox, memory_order_relaxed))) {
		timeout_ms = 0;
		/* As loop_look(). */
		if (loop->watch)
			(void)loop->watch->look(loop->watch);
	}
	if (timeout_ms != 0 && (loop->spin_ns || loop->linger_until_ns || loop->is_to_rest) &&
	    loop_find(loop)) {
		/* Descriptors have their turn, however much the watch has. */
		if (loop->n_events || ++loop->n_looks % LOOP_LOOKS)
			return 0;
		timeout_ms = 0;
	}
	if (timeout_ms != 0 && loop_set_alarm(loop))
		timeout_ms = 0;
	if (timeout_ms != 0) {
		atomic_store(&loop->sleeping, true);
		if (atomic_load(&loop->inbox) || atomic_load(&loop->stopping))
			timeout_ms = 0;
	}
	n = epoll_wait(loop->epoll_fd, loop->events, LOOP_EVENTS, timeout_ms);
	atomic_store(&loop->sleeping, false);
	(void)atomic_fetch_add_explicit(&loop->wakeups, 1, memory_order_relaxed);
	loop->next_event = 0;
	loop->n_events = MAX(n, 0);
	if (n < 0 && errno != EINTR)
		return error_origin(-errno);
	return 0;
}

uint64_t loop_turn_ns(const struct loop *loop)
{
	return loop->turn_ns;
}

int loop_turn(struct loop *loop, int timeout_ms)
{
	int r;

	r = loop_wait(loop, timeout_ms);
	if (r)
		return error_trace(r);
	loop->turn_ns = clock_now_ns();
	loop->took_before_ns = loop->took_ns;
	loop->took_ns = loop_watch_took(loop);
	loop_run_timers(loop);
	loop_run_events(loop);
	loop_take_mail(loop);
	loop_run_mail(loop);
	loop_run_deferred(loop);
	loop_run_chores(loop);
	loop_run_finishing(loop);
	loop_run_yielded(loop);
	return 0;
}

int loop_run(struct loop *loop)
{
	int r;

	while (!atomic_exchange(&loop->stopping, false)) {
		r = loop_turn(loop, -1);
		if (r)
			return error_trace(r);
	}
	return 0;
}
