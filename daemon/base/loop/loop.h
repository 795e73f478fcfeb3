/*
 * The event loop of a thread: descriptors (epoll), timers, mail from other threads, and nothing else. It sleeps until
 * one of them has work and makes no wake-up of its own. All calls but loop_post() and loop_stop() belong to the thread
 * that runs the loop, or to the creator before it runs. Callbacks never block, do one unit of work and return; they may
 * remove or free any source or timer, their own too. A turn runs the timers, then the descriptors that were ready at its
 * start, then a piece of the mail, also of what these have posted, of the chores, and last of what is done once for the
 * turn (loop_finish()); what is left of each goes on in the next.
 */
#pragma once

#include "base/list.h"
#include "proto/c.h"
#include <stdatomic.h>

struct loop;

int loop_new(struct loop **ret_loop);
/* No source or timer may be left, no other thread in loop_post(); mail still queued is dropped without being run. */
struct loop *loop_free(struct loop *loop);
DEFINE_CLEANUP(struct loop *, loop_free)

/* Runs until loop_stop() or a fatal error of epoll. Returns 0 or -errno. */
int loop_run(struct loop *loop);
/* One turn: waits at most timeout_ms (-1: for ever; 0: not at all), then runs what is ready. For tests. */
int loop_turn(struct loop *loop, int timeout_ms);
/*
 * Makes loop_run() return after the current callback, or at once when it comes first. What was ready stays for the next
 * run. Any thread.
 */
void loop_stop(struct loop *loop);
/* When the turn began that runs, or ran last: for what needs no better time. Loop's thread. */
uint64_t loop_turn_ns(const struct loop *loop);
/* Number of times epoll has returned from a wait, for tests of idleness. Any thread. */
uint64_t loop_wakeups(const struct loop *loop);

/* A descriptor. Embedded in its user; the descriptor stays the user's and must be removed before it is closed. */
struct loop_source {
	int fd;
	uint32_t events;
	void (*ready)(struct loop_source *source, uint32_t events); /* EPOLLIN | EPOLLOUT | ... */
	struct loop *loop;					    /* set while added */
};

/* events as in epoll_ctl(2), EPOLLET included. source->fd and ->ready must be set. Returns 0 or -errno. */
int loop_add(struct loop *loop, struct loop_source *source, uint32_t events);
int loop_modify(struct loop_source *source, uint32_t events);
/* Harmless when not added. No callback comes after it, even if the event was already fetched. */
void loop_remove(struct loop_source *source);

/* A timer, once. Embedded in its user. */
struct loop_timer {
	uint64_t at_ns; /* clock_now_ns() time */
	void (*expired)(struct loop_timer *timer);
	struct loop *loop; /* set while armed */
	size_t heap_index;
};

/* Arms or re-arms. timer->expired must be set. Returns 0 or -ENOMEM. */
int loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t at_ns);
/* Harmless when not armed. */
void loop_timer_cancel(struct loop_timer *timer);

/* What can be seen by looking at memory, by a loop that does so before it sleeps. Embedded in its user. */
struct loop_watch {
	/* Whether there is something to do; mail about that has been posted or deferred then. Many times: cheap. */
	bool (*look)(struct loop_watch *watch);
	/* The loop is about to sleep, and is to be woken from now on. Returns as look(), which it asks once more. */
	bool (*rest)(struct loop_watch *watch);
	uint64_t
		took_ns; /* what it has found has taken so long, all in all: counted by who does it */
};

/*
 * Whenever there is nothing left to do, the loop looks for spin_ns for more before it sleeps: at the watch, at its mail and
 * its descriptors; between looks it gives its processor to who has work, and if it does not have that back soon, it sleeps. A
 * loop that is idle sleeps all the same. The watch outlives the loop's runs, or is taken back by NULL.
 */
void loop_spin(struct loop *loop, uint64_t spin_ns, struct loop_watch *watch);
/*
 * Something is to come very soon: once there is nothing left to do the loop looks, as above, for so long before it sleeps.
 * Returns whether it will: not where that has been in vain too often, or costly (proto/allowance.h). Loop's thread.
 */
bool loop_linger(struct loop *loop, uint64_t now_ns, uint64_t linger_ns);
/* Whether the loop lingers, or has more to do: then it will look once more, and ask the watch to rest, before it sleeps. */
bool loop_lingers(struct loop *loop);

/* Whether there is mail that the loop has not run. Loop's thread. */
bool loop_has_mail(struct loop *loop);
/* Whether the watch has something to do, or had when it was asked some tens of microseconds ago. Loop's thread. */
bool loop_is_wanted(struct loop *loop);

/*
 * A piece of a turn, in which many short things are done one after the other, as long as there are more. It lasts most_ns while the
 * watch finds nothing; else it gives way once it has had as long as what the watch found has had since the turn before, and some
 * tens of microseconds. So who asks for little does not wait for all that others have, and who asks for much leaves each of these
 * no less than it has. One thing at least is done in each piece. Embedded in its user. Loop's thread.
 */
struct loop_piece {
	uint64_t until_ns; /* at the most */
	uint64_t least_ns; /* from then on it gives way */
};
void loop_piece_begin(struct loop *loop, struct loop_piece *piece, uint64_t now_ns,
		      uint64_t most_ns);
/* One that is over when all is done, whoever waits. */
void loop_piece_all(struct loop_piece *piece);
/* now_ns: as the clock says now. What the watch has found is done soon after the piece is over. */
bool loop_piece_is_over(struct loop *loop, const struct loop_piece *piece, uint64_t now_ns);
/* Something that does not count took so long: the piece lasts longer. */
void loop_piece_prolong(struct loop_piece *piece, uint64_t took_ns);

/*
 * Mail: a piece of work handed to the loop's thread. Embedded in its user, so posting never allocates and never fails;
 * the memory belongs to the loop until run() is called. A mail must not be posted again before it ran. Mails of one
 * posting thread run in the order posted. Any thread; lock-free; writes an eventfd only if the loop sleeps.
 */
struct mail {
	struct mail *next;
	void (*run)(struct mail *mail);
};

void loop_post(struct loop *loop, struct mail *mail);
/*
 * Mail to the loop's own thread that runs once the descriptor, the timer, or all of the mail that it works on now is done
 * with: for what is done once for many things. Does not defer itself. loop_unpost() takes it back, too. Loop's thread.
 */
void loop_defer(struct loop *loop, struct mail *mail);
/*
 * Mail to the loop's own thread that runs at the end of the turn, after all of its mail; what is posted so meanwhile, at the
 * end of the next, which does not wait. So it takes no turn of its own, as loop_post() does. Where a piece leaves mail to later
 * turns, it comes behind that. loop_unpost() takes it back, too. Loop's thread.
 */
void loop_finish(struct loop *loop, struct mail *mail);
/*
 * Mail to the loop's own thread that runs at the end of the turn, whatever mail is left: of one who has more to do, and lets all
 * else have a piece of the turn before. It may do so again. loop_unpost() takes it back, too. Loop's thread.
 */
void loop_yield(struct loop *loop, struct mail *mail);
/* Takes back mail that has not run, if there is such. Its poster must have returned from loop_post(). Loop's thread. */
void loop_unpost(struct loop *loop, struct mail *mail);

/*
 * A chore: work that may be long, as what an outsider holds may be much. It is done in steps: after the mail of each turn the
 * chores have a step each, by turns, in a piece of LOOP_CHORES_NS; the next turn, which does not wait, goes on. So
 * no turn is longer by more than that and one step, however much there is to do, and no chore waits for another's end.
 * step() does little, some tens of microseconds, and returns whether there is more; it may begin any chore, and free its own if
 * it returns false. Embedded in its user. Loop's thread.
 */
struct chore {
	struct list link; /* the loop's, between begin and end */
	bool (*step)(struct chore *chore);
};
#define LOOP_CHORES_NS 2000000ull

/* chore->step must be set, and link be zero or on no list. Harmless when it has begun. */
void loop_begin(struct loop *loop, struct chore *chore);
/* No step comes after it. Harmless when it has not begun. */
void loop_abort(struct chore *chore);
/* All steps of all chores at once, for who ends the loop. */
void loop_end_chores(struct loop *loop);
