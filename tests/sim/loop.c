/*
 * base/loop in virtual time, and the heap of events that moves the time. A loop has one event, its
 * next turn: when a timer is due, or a little after there is something to do, and not before the
 * turn before has taken its time. What comes meanwhile is done in one turn, as by a real loop.
 */
#include "sim.h"
#include <assert.h>

#define TURN_NS	 (20 * NSEC_PER_USEC) /* most that a turn takes */
#define START_NS (5 * NSEC_PER_USEC)  /* most that it takes to wake a loop */

/* -- Events --------------------------------------------------------------------------------------------------------- */

static bool is_before(const struct event *a, const struct event *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void heap_put(size_t index, struct event *event)
{
	world->events[index] = event;
	event->index = index;
}

static void heap_up(struct event *event)
{
	size_t index = event->index;

	for (; index > 1 && is_before(event, world->events[index / 2]); index /= 2)
		heap_put(index, world->events[index / 2]);
	heap_put(index, event);
}

static void heap_down(struct event *event)
{
	size_t index = event->index, child;

	while ((child = 2 * index) <= world->n_events_set) {
		if (child < world->n_events_set &&
		    is_before(world->events[child + 1], world->events[child]))
			child++;
		if (!is_before(world->events[child], event))
			break;
		heap_put(index, world->events[child]);
		index = child;
	}
	heap_put(index, event);
}

void event_set(struct event *event, uint64_t at_ns)
{
	event_cancel(event);
	event->at_ns = at_ns < world->now_ns ? world->now_ns : at_ns;
	event->order = rng_next(&world->order);
	if (world->n_events_set + 2 > world->events_capacity) {
		world->events_capacity = 2 * world->events_capacity + 64;
		world->events = reallocarray(world->events, world->events_capacity,
					     sizeof(world->events[0]));
		if (!world->events)
			abort();
	}
	event->index = ++world->n_events_set;
	heap_up(event);
}

void event_cancel(struct event *event)
{
	struct event *last;

	if (!event->index)
		return;
	last = world->events[world->n_events_set--];
	if (last != event) {
		heap_put(event->index, last);
		heap_up(last);
		heap_down(last);
	}
	event->index = 0;
}

bool event_next(void)
{
	struct event *event;

	if (!world->n_events_set)
		return false;
	event = world->events[1];
	event_cancel(event);
	world->now_ns = event->at_ns;
	world->n_events++;
	event->fire(event);
	return true;
}

/* -- Loops ---------------------------------------------------------------------------------------------------------- */

struct loop {
	struct event turn;
	uint64_t soon_ns; /* there is something to do; 0: nothing but timers */
	uint64_t busy_ns; /* no turn begins before */
	bool is_dead, is_turning;
	struct loop_timer **timers;
	size_t n_timers, timers_capacity;
	struct list inputs;
	struct mail *mail, *deferred, *finishing;
	struct list chores;
};

struct loop *loop_current;
static sigjmp_buf death;

static void loop_plan(struct loop *loop);
static void loop_on_turn(struct event *event);

int loop_new(struct loop **ret_loop)
{
	struct loop *loop = calloc(1, sizeof(*loop));

	if (!loop)
		return -ENOMEM;
	loop->turn.fire = loop_on_turn;
	list_init(&loop->inputs);
	list_init(&loop->chores);
	*ret_loop = loop;
	return 0;
}

struct loop *loop_free(struct loop *loop)
{
	if (!loop)
		return NULL;
	event_cancel(&loop->turn);
	if (loop->n_timers)
		sim_fail("a process that ended has %zu timers left", loop->n_timers);
	free(loop->timers);
	free(loop);
	return NULL;
}

void loop_kill(struct loop *loop)
{
	loop->is_dead = true;
	event_cancel(&loop->turn);
}

bool loop_is_dead(const struct loop *loop)
{
	return loop->is_dead;
}

void loop_run_in(struct loop *loop, void (*work)(void *), void *user)
{
	struct loop *outer = loop_current;

	assert(!outer);
	loop_current = loop;
	if (!sigsetjmp(death, 0)) {
		work(user);
	} else {
		for (unsigned i = 0; i < world->n_nodes; i++)
			if (world->nodes[i].loop == loop)
				node_kill(&world->nodes[i]);
	}
	loop_current = outer;
}

void loop_die(void)
{
	siglongjmp(death, 1);
}

/* Sets the event of the next turn. */
static void loop_plan(struct loop *loop)
{
	uint64_t at_ns = loop->soon_ns ? loop->soon_ns : CLOCK_NEVER;

	if (loop->is_dead || loop->is_turning)
		return;
	for (size_t i = 0; i < loop->n_timers; i++)
		at_ns = MIN(at_ns, loop->timers[i]->at_ns);
	if (at_ns == CLOCK_NEVER) {
		event_cancel(&loop->turn);
		return;
	}
	at_ns = MAX(MAX(at_ns, loop->busy_ns), world->now_ns);
	if (!loop->turn.index || loop->turn.at_ns != at_ns)
		event_set(&loop->turn, at_ns);
}

static void loop_wake(struct loop *loop)
{
	if (loop->soon_ns || loop->is_dead)
		return;
	loop->soon_ns = world->now_ns + 1 + rng_below(&world->order, START_NS);
	loop_plan(loop);
}

void loop_stall(struct loop *loop, uint64_t until_ns)
{
	loop->busy_ns = MAX(loop->busy_ns, until_ns);
	loop_plan(loop);
}

void loop_input(struct loop *loop, struct input *input)
{
	if (loop->is_dead)
		return;
	assert(!list_linked(&input->link));
	list_push_back(&loop->inputs, &input->link);
	loop_wake(loop);
}

/* -- Timers --------------------------------------------------------------------------------------------------------- */

int loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t at_ns)
{
	assert(timer->expired && (!timer->loop || timer->loop == loop));
	timer->at_ns = at_ns;
	if (!timer->loop) {
		if (loop->n_timers == loop->timers_capacity) {
			loop->timers_capacity = 2 * loop->timers_capacity + 16;
			loop->timers = reallocarray(loop->timers, loop->timers_capacity,
						    sizeof(loop->timers[0]));
			if (!loop->timers)
				abort();
		}
		timer->loop = loop;
		timer->heap_index = loop->n_timers;
		loop->timers[loop->n_timers++] = timer;
	}
	loop_plan(loop);
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
	loop->timers[timer->heap_index] = last;
	last->heap_index = timer->heap_index;
	loop_plan(loop);
}

/* -- Mail ----------------------------------------------------------------------------------------------------------- */

static void append(struct mail **list, struct mail *mail)
{
	while (*list)
		list = &(*list)->next;
	mail->next = NULL;
	*list = mail;
}

static bool take_out(struct mail **list, const struct mail *mail)
{
	while (*list && *list != mail)
		list = &(*list)->next;
	if (!*list)
		return false;
	*list = mail->next;
	return true;
}

void loop_post(struct loop *loop, struct mail *mail)
{
	append(&loop->mail, mail);
	loop_wake(loop);
}

void loop_defer(struct loop *loop, struct mail *mail)
{
	mail->next = loop->deferred;
	loop->deferred = mail;
	loop_wake(loop);
}

void loop_finish(struct loop *loop, struct mail *mail)
{
	append(&loop->finishing, mail);
	loop_wake(loop);
}

void loop_unpost(struct loop *loop, struct mail *mail)
{
	if (!take_out(&loop->mail, mail) && !take_out(&loop->deferred, mail))
		(void)take_out(&loop->finishing, mail);
}

void loop_begin(struct loop *loop, struct chore *chore)
{
	if (!list_linked(&chore->link))
		list_push_back(&loop->chores, &chore->link);
	loop_wake(loop);
}

void loop_abort(struct chore *chore)
{
	list_remove(&chore->link);
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

/* Now and then somebody waits for the thread, so that sums are made elsewhere. */
bool loop_is_wanted(struct loop *loop)
{
	(void)loop;
	return rng_chance(&world->work, 30);
}

uint64_t loop_turn_ns(const struct loop *loop)
{
	(void)loop;
	return world->now_ns;
}

/* -- A turn: as in base/loop.c ------------------------------------------------------------------------------------------ */

static void run_deferred(struct loop *loop)
{
	struct mail *mail;

	while ((mail = loop->deferred)) {
		loop->deferred = mail->next;
		mail->run(mail);
	}
}

static struct loop_timer *soonest(const struct loop *loop)
{
	struct loop_timer *best = NULL;

	for (size_t i = 0; i < loop->n_timers; i++)
		if (!best || loop->timers[i]->at_ns < best->at_ns)
			best = loop->timers[i];
	return best;
}

static void run_timers(struct loop *loop)
{
	for (size_t n = loop->n_timers; n > 0; n--) {
		struct loop_timer *timer = soonest(loop);

		if (!timer || timer->at_ns > world->now_ns)
			return;
		loop_timer_cancel(timer);
		timer->expired(timer);
		run_deferred(loop);
	}
}

static void run_inputs(struct loop *loop)
{
	struct list inputs = LIST_INIT(inputs);
	struct input *input;

	while ((input = list_first(&loop->inputs, struct input, link))) {
		list_remove(&input->link);
		list_push_back(&inputs, &input->link);
	}
	while ((input = list_first(&inputs, struct input, link))) {
		list_remove(&input->link);
		input->take(input);
		run_deferred(loop);
	}
}

/* A piece of the mail: the rest is left to the next turn. */
static void run_mail(struct loop *loop)
{
	struct mail *last = loop->mail, *mail;

	if (!last)
		return;
	while (last->next)
		last = last->next;
	do {
		mail = loop->mail;
		if (!mail)
			break;
		loop->mail = mail->next;
		mail->run(mail);
	} while (mail != last && !loop_is_wanted(loop));
}

static void run_chores(struct loop *loop)
{
	for (unsigned n = 0; n < 4; n++) {
		struct chore *chore = list_first(&loop->chores, struct chore, link);

		if (!chore)
			return;
		list_remove(&chore->link);
		if (chore->step(chore))
			loop_begin(loop, chore);
		run_deferred(loop);
	}
}

static void run_finishing(struct loop *loop)
{
	struct mail *finishing = TAKE_PTR(loop->finishing), **end = &loop->mail;
	bool is_behind = loop->mail;

	if (!finishing)
		return;
	while (*end)
		end = &(*end)->next;
	*end = finishing;
	if (!is_behind)
		run_mail(loop);
	run_deferred(loop);
}

static void turn(void *user)
{
	struct loop *loop = user;

	run_timers(loop);
	run_inputs(loop);
	run_mail(loop);
	run_deferred(loop);
	run_chores(loop);
	run_finishing(loop);
}

static void loop_on_turn(struct event *event)
{
	struct loop *loop = container_of(event, struct loop, turn);

	loop->soon_ns = 0;
	loop->is_turning = true;
	loop_run_in(loop, turn, loop);
	loop->is_turning = false;
	if (loop->is_dead)
		return;
	loop->busy_ns = world->now_ns + 1 + rng_below(&world->order, TURN_NS);
	if (loop->mail || loop->deferred || loop->finishing || !list_empty(&loop->chores) ||
	    !list_empty(&loop->inputs))
		loop->soon_ns = loop->busy_ns;
	else
		loop->soon_ns = 0;
	loop_plan(loop);
}

/* -- What a loop in virtual time has no use for ---------------------------------------------------------------------------- */

int loop_turn(struct loop *loop, int timeout_ms)
{
	(void)loop;
	(void)timeout_ms;
	return -EOPNOTSUPP;
}

int loop_run(struct loop *loop)
{
	return loop_turn(loop, -1);
}

int loop_add(struct loop *loop, struct loop_source *source, uint32_t events)
{
	(void)loop;
	(void)source;
	(void)events;
	return -EOPNOTSUPP;
}

int loop_modify(struct loop_source *source, uint32_t events)
{
	(void)source;
	(void)events;
	return -EOPNOTSUPP;
}

void loop_remove(struct loop_source *source)
{
	assert(!source->loop);
}

void loop_stop(struct loop *loop)
{
	(void)loop;
}

/* A loop of the world never waits for a processor, and sleeps at once. */
bool loop_linger(struct loop *loop, uint64_t now_ns, uint64_t linger_ns)
{
	(void)loop;
	(void)now_ns;
	(void)linger_ns;
	return false;
}
