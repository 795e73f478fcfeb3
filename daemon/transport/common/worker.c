/*
 * A worker: the loop of a data thread, or the home loop in its place. And the mailboxes in which its
 * lanes' mail to home lies, of which home runs a bounded time in each turn.
 */
#include "transport/common/worker.h"

#include "base/loop/thread.h"
#include <stdio.h>
#include <stdlib.h>

/* Mails are run for so long at the most, until others that the loop serves have their turn; */
#define MAILBOXES_TURN_NS (500 * NSEC_PER_USEC)
/* and those of one mailbox while another has some. */
#define MAILBOX_TURN_NS (100 * NSEC_PER_USEC)
/* What home itself receives in a turn of the loop is run at once for so long: some reads full of small messages, or of large results. */
#define RECEIVED_TURN_NS (4 * NSEC_PER_MSEC)

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
static void mailbox_take(struct mailbox *mailbox)
{
	struct mail *last;

	*mailbox->last = take(&mailbox->posted, &last);
	if (last)
		mailbox->last = &last->next;
	if (!list_linked(&mailbox->link))
		list_push_back(&mailbox->source->busy, &mailbox->link);
	if (!list_linked(&mailbox->source->turn))
		list_push_back(&mailbox->mailboxes->busy, &mailbox->source->turn);
}

/* Mailboxes with mail become busy, in the order in which they were posted. */
static void mailboxes_take(struct mailboxes *mailboxes)
{
	struct mail *last, *first = take(&mailboxes->posted, &last);

	while (first) {
		struct mail *next = first->next;

		/* From here on the mailbox may be posted again. */
		mailbox_take(container_of(first, struct mailbox, mail));
		first = next;
	}
}

/*
 * Runs a mailbox's mail until then, or until the piece is over or there is none: then the mailbox may be gone. Returns whether the piece
 * is over.
 */
static bool mailbox_run(struct mailboxes *mailboxes, struct mailbox *mailbox, uint64_t until_ns)
{
	struct sampled_clock *clock = &mailboxes->clock;
	bool is_last;

	do {
		struct mail *mail = mailbox->first;

		is_last = !mail->next;
		mailbox->first = mail->next;
		if (is_last) {
			mailbox->last = &mailbox->first;
			list_remove(&mailbox->link);
			if (list_empty(&mailbox->source->busy))
				list_remove(&mailbox->source->turn);
		}
		mail->run(mail);
		if (!sampled_clock_tick(clock))
			continue;
		if (loop_piece_is_over(mailboxes->loop, &mailboxes->piece, clock->now_ns))
			return true;
		if (clock->now_ns >= until_ns)
			break;
	} while (!is_last);
	return false;
}

/* Returns whether all of it was run in the piece, which has begun when the clock was looked at. */
static bool mailboxes_run(struct mailboxes *mailboxes)
{
	struct mail_source *source;

	while ((source = list_first(&mailboxes->busy, struct mail_source, turn))) {
		struct mailbox *mailbox = list_first(&source->busy, struct mailbox, link);
		bool is_alone = source->turn.next == &mailboxes->busy &&
				mailbox->link.next == &source->busy;

		/* Both go behind the others, if they have more. */
		list_remove(&source->turn);
		list_push_back(&mailboxes->busy, &source->turn);
		list_remove(&mailbox->link);
		list_push_back(&source->busy, &mailbox->link);
		if (mailbox_run(mailboxes, mailbox,
				is_alone ? CLOCK_NEVER : mailboxes->clock.now_ns + MAILBOX_TURN_NS))
			return list_empty(&mailboxes->busy);
	}
	return true;
}

static void mailboxes_go_on(struct mailboxes *mailboxes)
{
	sampled_clock_begin(&mailboxes->clock, clock_now_ns());
	loop_piece_begin(mailboxes->loop, &mailboxes->piece, mailboxes->clock.now_ns,
			 MAILBOXES_TURN_NS);
	mailboxes->goes_on = !mailboxes_run(mailboxes);
	if (mailboxes->goes_on)
		loop_post(mailboxes->loop, &mailboxes->more);
}

static void mailboxes_on_more(struct mail *mail)
{
	mailboxes_go_on(container_of(mail, struct mailboxes, more));
}

static void mailboxes_on_mail(struct mail *mail)
{
	struct mailboxes *mailboxes = container_of(mail, struct mailboxes, mail);

	mailboxes_take(mailboxes);
	if (!mailboxes->goes_on)
		mailboxes_go_on(mailboxes);
}

void mailboxes_init(struct mailboxes *mailboxes, struct loop *loop)
{
	*mailboxes = (struct mailboxes){ .loop = loop,
					 .mail.run = mailboxes_on_mail,
					 .more.run = mailboxes_on_more };
	list_init(&mailboxes->busy);
	list_init(&mailboxes->sources);
}

void mailbox_init(struct mailbox *mailbox, struct mailboxes *mailboxes)
{
	*mailbox = (struct mailbox){ .mailboxes = mailboxes };
	mailbox->last = &mailbox->first;
	list_init(&mailbox->link);
	list_init(&mailbox->own.turn);
	list_init(&mailbox->own.busy);
	mailbox->source = &mailbox->own;
}

static struct mail_source *source_of_name(struct mailboxes *mailboxes, const char *name)
{
	struct mail_source *source;

	list_for_each (source, &mailboxes->sources, link)
		if (!strcmp(source->name, name))
			return source;
	source = calloc(1, sizeof(*source));
	if (!source)
		return NULL;
	list_init(&source->turn);
	list_init(&source->busy);
	list_push_back(&mailboxes->sources, &source->link);
	(void)snprintf(source->name, sizeof(source->name), "%s", name);
	return source;
}

void mailbox_share(struct mailbox *mailbox, const char *name)
{
	struct mail_source *source = source_of_name(mailbox->mailboxes, name);

	if (!source)
		return;
	source->refs++;
	mailbox->source = source;
}

void mailbox_done(struct mailbox *mailbox)
{
	struct mail_source *source = TAKE_PTR(mailbox->source);

	if (!source || source == &mailbox->own || --source->refs)
		return;
	list_remove(&source->link);
	free(source);
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
 * Whoever finds the mailbox empty puts it among those that have mail, and whoever finds none there puts them into the loop. Home
 * takes mail out of a mailbox only after it has found the mailbox there: who posts is done with the mailbox by then.
 */
void mailbox_post(struct mailbox *mailbox, struct mail *mail)
{
	struct mailboxes *mailboxes = mailbox->mailboxes;

	if (push(&mailbox->posted, mail) && push(&mailboxes->posted, &mailbox->mail))
		loop_post(mailboxes->loop, &mailboxes->mail);
}

static bool mailbox_is_empty(const struct mailbox *mailbox)
{
	return !mailbox->first && !atomic_load_explicit(&mailbox->posted, memory_order_relaxed);
}

void mailboxes_drain(struct mailboxes *mailboxes)
{
	if (mailboxes->goes_on)
		loop_unpost(mailboxes->loop, &mailboxes->more);
	mailboxes->goes_on = false;
	for (;;) {
		if (atomic_load(&mailboxes->posted)) {
			loop_unpost(mailboxes->loop, &mailboxes->mail);
			mailboxes_take(mailboxes);
		}
		if (list_empty(&mailboxes->busy))
			return;
		sampled_clock_begin(&mailboxes->clock, clock_now_ns());
		loop_piece_all(&mailboxes->piece);
		(void)mailboxes_run(mailboxes);
	}
}

static void worker_on_turn_end(struct mail *mail)
{
	struct worker *worker = container_of(mail, struct worker, turn_end);

	worker->receives = worker->is_over = false;
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
	worker->clock = (struct sampled_clock){ 0 };
	worker->receives = worker->is_over = false;
	worker->piece = (struct loop_piece){ 0 };
	worker->turn_end.run = worker_on_turn_end;
	mailboxes_init(&worker->to_home, home);
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
	if (worker->receives)
		loop_unpost(worker->loop, &worker->turn_end);
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

void worker_post_home(struct worker *worker, struct mailbox *mailbox, struct mail *mail)
{
	bool at_once = !worker->thread && mailbox_is_empty(mailbox) && !worker->is_over;

	if (!at_once) {
		mailbox_post(mailbox, mail);
		return;
	}
	mail->run(mail);
	if (worker->receives && sampled_clock_tick(&worker->clock))
		worker->is_over =
			loop_piece_is_over(worker->loop, &worker->piece, worker->clock.now_ns);
}

bool worker_receive(struct worker *worker, const struct mailbox *mailbox)
{
	if (worker->thread)
		return true;
	if (!worker->receives) {
		worker->receives = true;
		sampled_clock_begin(&worker->clock, clock_now_ns());
		loop_piece_begin(worker->loop, &worker->piece, worker->clock.now_ns,
				 RECEIVED_TURN_NS);
		loop_finish(worker->loop, &worker->turn_end);
	}
	return mailbox_is_empty(mailbox);
}

void worker_copied(struct worker *worker, uint64_t took_ns)
{
	if (!worker->receives)
		return;
	loop_piece_prolong(&worker->piece, took_ns);
	worker->clock.now_ns += took_ns;
}
