#include "transport/internal.h"

#include "base/thread.h"

static void box_run(struct box *box)
{
	struct mail *posted = atomic_exchange(&box->posted, NULL), *first = NULL;

	while (posted) {
		struct mail *next = posted->next;

		posted->next = first;
		first = posted;
		posted = next;
	}
	while (first) {
		struct mail *mail = first;

		first = mail->next;
		mail->run(mail);
	}
}

static void box_on_mail(struct mail *mail)
{
	box_run(container_of(mail, struct box, mail));
}

void box_init(struct box *box, struct loop *loop)
{
	*box = (struct box){ .loop = loop, .mail.run = box_on_mail };
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
	while (atomic_load(&box->posted)) {
		loop_unpost(box->loop, &box->mail);
		box_run(box);
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
