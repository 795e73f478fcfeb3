/*
 * A worker: the loop of a data thread, or the home loop in its place. And the boxes in which its
 * lanes' mail to home lies, of which home runs a bounded time in each turn.
 */
#include "transport/common/worker.h"

#include "base/clock.h"
#include "base/loop/thread.h"

/* Mails are run for so long, about a round of a small job, until others that the loop serves have their turn; */
#define BOXES_TURN_NS (100 * NSEC_PER_USEC)
/* and those of one box while another has some. */
#define BOX_TURN_NS (25 * NSEC_PER_USEC)
#define BOX_UNTIMED 4 /* mails between two looks at the clock */

/* Takes all that was posted: returns the first of it, or NULL. */
static struct mail *take(_Atomic(struct mail *) *from, struct mail **ret_last)
{
	struct mail *posted = atomic_exchange(from, NULL), *first = NULL;

	*ret_last = posted;
	while (posted) {
		struct mail *next = posted->next;

		posted->next = first;
		first = posted;
		posted = next;
	}
	return first;
}

/* What was posted goes behind what is still to be run. */
static void box_take(struct box *box)
{
	struct mail *last;

	*box->last = take(&box->posted, &last);
	if (last)
		box->last = &last->next;
	if (!list_linked(&box->link))
		list_push_back(&box->boxes->busy, &box->link);
}

/* Boxes with mail become busy, in the order in which they were posted. */
static void boxes_take(struct boxes *boxes)
{
	struct mail *last, *first = take(&boxes->posted, &last);

	while (first) {
		struct mail *next = first->next;

		/* From here on the box may be posted again. */
		box_take(container_of(first, struct box, mail));
		first = next;
	}
}

/* Runs a box's mail until then, or until there is none: then the box may be gone. */
static void box_run(struct box *box, uint64_t until_ns)
{
	for (unsigned n = 1;; n++) {
		struct mail *mail = box->first;
		bool is_last = !mail->next;

		box->first = mail->next;
		if (is_last) {
			box->last = &box->first;
			list_remove(&box->link);
		}
		mail->run(mail);
		if (is_last || (n % BOX_UNTIMED == 0 && clock_now_ns() >= until_ns))
			return;
	}
}

/* Returns whether all of it was run by then. */
static bool boxes_run(struct boxes *boxes, uint64_t until_ns)
{
	uint64_t now_ns = clock_now_ns();
	struct box *box;

	while ((box = list_first(&boxes->busy, struct box, link))) {
		bool is_alone = box->link.next == &boxes->busy;

		if (now_ns >= until_ns)
			return false;
		/* Behind the others, if it has more. */
		list_remove(&box->link);
		list_push_back(&boxes->busy, &box->link);
		box_run(box, is_alone ? until_ns : MIN(until_ns, now_ns + BOX_TURN_NS));
		now_ns = clock_now_ns();
	}
	return true;
}

static void boxes_go_on(struct boxes *boxes)
{
	boxes->goes_on = !boxes_run(boxes, clock_now_ns() + BOXES_TURN_NS);
	if (boxes->goes_on)
		loop_post(boxes->loop, &boxes->more);
}

static void boxes_on_more(struct mail *mail)
{
	boxes_go_on(container_of(mail, struct boxes, more));
}

static void boxes_on_mail(struct mail *mail)
{
	struct boxes *boxes = container_of(mail, struct boxes, mail);

	boxes_take(boxes);
	if (!boxes->goes_on)
		boxes_go_on(boxes);
}

void boxes_init(struct boxes *boxes, struct loop *loop)
{
	*boxes = (struct boxes){ .loop = loop,
				 .mail.run = boxes_on_mail,
				 .more.run = boxes_on_more };
	list_init(&boxes->busy);
}

void box_init(struct box *box, struct boxes *boxes)
{
	*box = (struct box){ .boxes = boxes };
	box->last = &box->first;
	list_init(&box->link);
}

/* Returns whether it was empty. */
static bool push(_Atomic(struct mail *) *posted, struct mail *mail)
{
	struct mail *head = atomic_load_explicit(posted, memory_order_relaxed);

	do {
		mail->next = head;
	} while (!atomic_compare_exchange_weak(posted, &head, mail));
	return !head;
}

/*
 * Whoever finds the box empty puts it among those that have mail, and whoever finds none there puts them into the loop. Home
 * takes mail out of a box only after it has found the box there: who posts is done with the box by then.
 */
void box_post(struct box *box, struct mail *mail)
{
	struct boxes *boxes = box->boxes;

	if (push(&box->posted, mail) && push(&boxes->posted, &box->mail))
		loop_post(boxes->loop, &boxes->mail);
}

static bool box_is_empty(const struct box *box)
{
	return !box->first && !atomic_load_explicit(&box->posted, memory_order_relaxed);
}

void boxes_drain(struct boxes *boxes)
{
	if (boxes->goes_on)
		loop_unpost(boxes->loop, &boxes->more);
	boxes->goes_on = false;
	for (;;) {
		if (atomic_load(&boxes->posted)) {
			loop_unpost(boxes->loop, &boxes->mail);
			boxes_take(boxes);
		}
		if (list_empty(&boxes->busy))
			return;
		(void)boxes_run(boxes, CLOCK_NEVER);
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
	boxes_init(&worker->to_home, home);
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

void worker_post_home(struct worker *worker, struct box *box, struct mail *mail)
{
	bool at_once = !worker->thread && box_is_empty(box);

	if (at_once && worker->until_ns && ++worker->n_mails % BOX_UNTIMED == 0)
		at_once = clock_now_ns() < worker->until_ns;
	if (at_once)
		mail->run(mail);
	else
		box_post(box, mail);
}

bool worker_receive(struct worker *worker, const struct box *box)
{
	if (worker->thread)
		return true;
	worker->until_ns = clock_now_ns() + BOXES_TURN_NS;
	return box_is_empty(box);
}

void worker_received(struct worker *worker)
{
	worker->until_ns = 0;
}
