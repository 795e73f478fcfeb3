/*
 * A worker: the loop of a data thread, or the home loop in its place. And the box in which its mail
 * to home lies, of which home runs a bounded time in each turn.
 */
#include "transport/worker.h"

#include "base/clock.h"
#include "base/thread.h"

/* Mails are run for so long, about a round of a small job, until others that the loop serves have their turn. */
#define BOX_TURN_NS (100 * NSEC_PER_USEC)
#define BOX_UNTIMED 4 /* mails between two looks at the clock */

/* What was posted, in that order, behind what is still to be run. */
static void box_take(struct box *box)
{
	struct mail *posted = atomic_exchange(&box->posted, NULL), *last = posted, *first = NULL;

	while (posted) {
		struct mail *next = posted->next;

		posted->next = first;
		first = posted;
		posted = next;
	}
	*box->last = first;
	if (last)
		box->last = &last->next;
}

/* Returns whether all of it was run by then. */
static bool box_run(struct box *box, uint64_t until_ns)
{
	for (unsigned n = 1; box->first; n++) {
		struct mail *mail = box->first;

		if (n % BOX_UNTIMED == 0 && clock_now_ns() >= until_ns)
			return false;
		box->first = mail->next;
		if (!box->first)
			box->last = &box->first;
		mail->run(mail);
	}
	return true;
}

static void box_go_on(struct box *box)
{
	box->goes_on = !box_run(box, clock_now_ns() + BOX_TURN_NS);
	if (box->goes_on)
		loop_post(box->loop, &box->more);
}

static void box_on_more(struct mail *mail)
{
	box_go_on(container_of(mail, struct box, more));
}

static void box_on_mail(struct mail *mail)
{
	struct box *box = container_of(mail, struct box, mail);

	box_take(box);
	if (!box->goes_on)
		box_go_on(box);
}

void box_init(struct box *box, struct loop *loop)
{
	*box = (struct box){ .loop = loop, .mail.run = box_on_mail, .more.run = box_on_more };
	box->last = &box->first;
}

/* Whoever finds the box empty puts it into the loop; it leaves the loop before it is emptied. */
void box_post(struct box *box, struct mail *mail)
{
	struct mail *head = atomic_load_explicit(&box->posted, memory_order_relaxed);

	do {
		mail->next = head;
	} while (!atomic_compare_exchange_weak(&box->posted, &head, mail));
	if (!head)
		loop_post(box->loop, &box->mail);
}

void box_drain(struct box *box)
{
	if (box->goes_on)
		loop_unpost(box->loop, &box->more);
	box->goes_on = false;
	for (;;) {
		if (atomic_load(&box->posted)) {
			loop_unpost(box->loop, &box->mail);
			box_take(box);
		}
		if (!box->first)
			return;
		(void)box_run(box, CLOCK_NEVER);
	}
}

int worker_new(struct loop *home, const char *thread, struct worker **ret_worker)
{
	_cleanup_(freep) struct worker *worker = malloc(sizeof(*worker));
	int r;

	if (!worker)
		return error_origin(-ENOMEM);
	worker->thread = NULL;
	worker->loop = home;
	worker->rate = (struct rate){ 0 };
	worker->n_copied = 0;
	box_init(&worker->to_home, home);
	if (thread) {
		r = loop_thread_start(thread, &worker->thread);
		if (r)
			return error_trace(r);
		worker->loop = loop_thread_loop(worker->thread);
	}
	*ret_worker = TAKE_PTR(worker);
	return 0;
}

void worker_stop(struct worker *worker)
{
	worker->thread = loop_thread_stop(worker->thread);
}

struct worker *worker_free(struct worker *worker)
{
	if (!worker)
		return NULL;
	worker_stop(worker);
	free(worker);
	return NULL;
}

void worker_post(struct worker *worker, struct mail *mail)
{
	if (worker->thread)
		loop_post(worker->loop, mail);
	else
		mail->run(mail);
}

void worker_post_home(struct worker *worker, struct mail *mail)
{
	if (worker->thread)
		box_post(&worker->to_home, mail);
	else
		mail->run(mail);
}
