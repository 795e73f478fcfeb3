/*
 * A lane over a reliable connection. A message leaves in a slot of registered memory: its head,
 * header and, when short, payload. A longer payload is only offered; once the other side has
 * said where it goes (with the call, for a result) it is written there from where it lies. A
 * slot is free again when its sending is completed; a message is done with when the sending that
 * carried its payload is. Completions wake the loop by a channel; while they keep coming they
 * are polled. Worker's thread.
 */
#include "transport/peer/delivery.h"
#include "transport/rdma/link.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>

#define POLL_BATCH RDMA_RECEIVE_BATCH
#define ACK_BATCH  64
#define POLL_MAX   256 /* completions before others on this loop have their turn */

/* The wire, not the peer: what it held may go another way. */
void rdma_link_fail(struct rdma_link *link, const char *format, ...)
{
	char text[256];
	va_list args;

	if (link->lane->is_failed)
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	link->is_broken = true;
	lane_fail(link->lane, -ECONNRESET, "%s", text);
}

static void on_error(struct rdma_link *link, const struct ibv_wc *wc)
{
	const char *device = link->port->device->name;

	switch (wc->status) {
	case IBV_WC_WR_FLUSH_ERR: /* something else went before, or the other side went */
		rdma_link_fail(link, "%s: the connection was closed", device);
		return;
	case IBV_WC_RETRY_EXC_ERR:
		rdma_link_fail(
			link,
			"%s: no answer on the wire: the link or the peer is down, or packets of "
			"%u bytes do not pass (MTU)",
			device, link->mtu);
		return;
	case IBV_WC_RNR_RETRY_EXC_ERR:
		rdma_link_fail(link, "%s: the peer posts no receives", device);
		return;
	default:
		rdma_link_fail(link, "%s: %s (vendor error 0x%x)", device,
			       link->rdma->verbs->wc_status_str(wc->status), wc->vendor_err);
		return;
	}
}

/* Receives whose messages have been read. */
static void post_again(struct rdma_link *link, const unsigned *slots, unsigned n)
{
	int r;

	r = rdma_post_receives(link, slots, n);
	if (r)
		rdma_link_fail(link, "posting a receive: %s", strerrordesc_np(-r));
	link->owed += n;
}

/* Returns how many there were. */
static int poll_once(struct rdma_link *link)
{
	unsigned received[POLL_BATCH], n_received = 0;
	struct ibv_wc wcs[POLL_BATCH];
	int n = ibv_poll_cq(link->cq, POLL_BATCH, wcs);

	if (n > 0)
		link->now_ns = clock_now_ns();
	for (int i = 0; i < n; i++) {
		if (wcs[i].status != IBV_WC_SUCCESS) {
			on_error(link, &wcs[i]);
		} else if (wcs[i].wr_id >> 32 == RDMA_WR_SEND) {
			rdma_on_sent(link, &wcs[i]);
		} else {
			/* Before it is read: its call says when that was. */
			lane_heard(link->lane, link->now_ns);
			rdma_on_received(link, &wcs[i]);
			received[n_received++] = (uint32_t)wcs[i].wr_id;
		}
	}
	if (n_received && !link->lane->is_failed)
		post_again(link, received, n_received);
	if (n < 0) {
		link->poll.has_lost_completions = true;
		rdma_link_fail(link, "polling completions failed");
	}
	return n;
}

void rdma_poll_again(struct rdma_link *link)
{
	if (link->poll.is_again_posted)
		return;
	link->poll.is_again_posted = true;
	loop_post(link->lane->worker->loop, &link->poll.again);
}

/* Returns false when others ought to have their turn before the rest. */
static bool poll_all(struct rdma_link *link)
{
	struct lane *lane = link->lane;
	int n, total = 0;

	lane->output.is_flushed_soon = true;
	do {
		n = poll_once(link);
		total += MAX(n, 0);
	} while (n > 0 && total < POLL_MAX && !lane->is_failed);
	lane->output.is_flushed_soon = false;
	if (!lane->is_failed)
		rdma_flush(lane);
	return n <= 0;
}

/*
 * Who calls waits for its payloads to have left, as others leave then. Who answers is not woken up
 * to see that an answer has arrived: the next message lets it see that, unless something cannot
 * leave before, or none has come for a while. Nor is who calls as long as grants are to come, which
 * are such messages.
 */
enum rdma_arming rdma_arming_wanted(const struct rdma_link *link)
{
	if (link->poll.is_late && rdma_awaits_sends(link))
		return RDMA_ARMED_ALL;
	if (!list_empty(&link->awaiting) && link->sends.n < RDMA_SENDS / 2)
		return RDMA_ARMED_MESSAGES;
	return link->lane->makes_calls || rdma_is_held_up(link) ? RDMA_ARMED_ALL
								: RDMA_ARMED_MESSAGES;
}

void rdma_watch_sends(struct rdma_link *link)
{
	if (link->poll.arming != RDMA_ARMED_MESSAGES || !rdma_awaits_sends(link)) {
		loop_timer_cancel(&link->poll.late);
		return;
	}
	if (!link->poll.late.loop && loop_timer_set(link->lane->worker->loop, &link->poll.late,
						    clock_now_ns() + RDMA_LATE_NS))
		(void)lane_out_of_memory(link->lane);
}

/*
 * Asks to be woken when there is nothing left to do, and looks once more after asking: so that what
 * comes meanwhile is seen without a system call, and nothing is missed.
 */
static void rest(struct rdma_link *link)
{
	struct lane *lane = link->lane;
	bool is_all = poll_all(link);
	enum rdma_arming wanted;

	while (is_all && !lane->is_failed &&
	       link->poll.arming < (wanted = rdma_arming_wanted(link))) {
		if (ibv_req_notify_cq(link->cq, wanted == RDMA_ARMED_MESSAGES)) {
			rdma_link_fail(link, "completion events cannot be asked for");
			return;
		}
		link->poll.arming = wanted;
		is_all = poll_all(link);
	}
	if (lane->is_failed)
		return;
	if (!is_all) {
		rdma_poll_again(link);
		return;
	}
	rdma_watch_sends(link);
	if (rdma_is_still(link)) {
		metric_add(&link->rdma->metrics.links_still, 1);
		rdma_link_fail(link,
			       "%s: it stands still: what was sent has not arrived, nor has "
			       "the device given up",
			       link->port->device->name);
	}
}

static void on_rest(struct mail *mail)
{
	struct rdma_link *link = container_of(mail, struct rdma_link, poll.rest);

	link->poll.is_resting = false;
	if (!link->lane->is_failed)
		rest(link);
}

/*
 * What the loop has to do beside is done before it asks to be woken: meanwhile more comes, most
 * likely.
 */
static void poll_some(struct rdma_link *link)
{
	if (!poll_all(link)) {
		rdma_poll_again(link);
	} else if (!link->lane->is_failed && !link->poll.is_resting) {
		link->poll.is_resting = true;
		loop_finish(link->lane->worker->loop, &link->poll.rest);
	}
}

static void on_late(struct loop_timer *timer)
{
	struct rdma_link *link = container_of(timer, struct rdma_link, poll.late);

	link->poll.is_late = true;
	rest(link);
	link->poll.is_late = false;
}

static void on_again(struct mail *mail)
{
	struct rdma_link *link = container_of(mail, struct rdma_link, poll.again);

	link->poll.is_again_posted = false;
	if (!link->lane->is_failed)
		poll_some(link);
}

static void rdma_on_ready(struct loop_source *source, uint32_t events)
{
	struct rdma_link *link = container_of(source, struct lane, source)->rdma;
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct ibv_cq *cq;
	void *context;

	if (verbs->get_cq_event(link->channel, &cq, &context))
		return;
	/* Many at once: each time takes a lock. */
	if (++link->poll.n_events == ACK_BATCH) {
		verbs->ack_cq_events(cq, ACK_BATCH);
		link->poll.n_events = 0;
	}
	link->poll.arming = RDMA_ARMED_NOT;
	poll_some(link);
}

static int rdma_start(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	int r;

	lane->source = (struct loop_source){ .fd = link->channel->fd, .ready = rdma_on_ready };
	r = loop_add(lane->worker->loop, &lane->source, EPOLLIN);
	if (r) {
		lane->source.fd = -1;
		return error_trace(r);
	}
	poll_some(link); /* what came before */
	return 0;
}

static void rdma_cut(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	loop_remove(&lane->source);
	lane->source.fd = -1;
	loop_timer_cancel(&link->poll.late);
	if (link->qp)
		(void)link->rdma->verbs->modify_qp(link->qp, &attr, IBV_QP_STATE);
}

/* What had come before the end counts, so that as little as possible is asked for again. */
static void drain(struct rdma_link *link)
{
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(link->cq, 1, &wc)) > 0) {
		if (wc.status != IBV_WC_SUCCESS)
			continue;
		if (wc.wr_id >> 32 == RDMA_WR_SEND)
			rdma_on_sent(link, &wc);
		else
			rdma_on_received(link, &wc);
	}
	link->poll.has_lost_completions |= n < 0;
}

/*
 * may_have_arrived: it was posted, and the completion that would say so is lost. Then the other side may have delivered and
 * answered the call, and forgotten it: a call that is sent as if it were new would be delivered twice.
 */
static void release_message(struct rdma_link *link, struct message *message, bool may_have_arrived)
{
	const struct call *call = container_of(message, struct call, message);

	lane_message_done(link->lane, message,
			  message->kind == MESSAGE_CALL &&
				  (may_have_arrived || call->state == CALL_ANSWERED));
}

static void release_list(struct rdma_link *link, struct list *list)
{
	struct message *message;

	while ((message = list_first(list, struct message, link))) {
		list_remove(&message->link);
		release_message(link, message, false);
	}
}

/* The queue pair goes first: from then on nobody writes into our memory. */
static void rdma_release(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	struct cookies *cookies = &lane->cookies;

	if (link->poll.is_again_posted)
		loop_unpost(lane->worker->loop, &link->poll.again);
	if (link->poll.is_resting)
		loop_unpost(lane->worker->loop, &link->poll.rest);
	drain(link);
	rdma_link_unmake(link);
	lane_receive_done(lane);
	for (; link->sends.n; link->sends.n--) {
		struct message *message = TAKE_PTR(link->sends.slots[link->sends.first].message);

		link->sends.first = (link->sends.first + 1) % RDMA_SENDS;
		if (message)
			release_message(link, message, link->poll.has_lost_completions);
	}
	release_list(link, &link->awaiting);
	release_list(link, &link->granted);
	for (uint32_t i = 0; !lane->makes_calls && i < cookies->n_slots; i++)
		cookies->slots[i].user = incoming_free(cookies->slots[i].user);
}

static void on_broken(struct mail *mail)
{
	struct rdma_link *link = container_of(mail, struct rdma_link, broken);

	if (link->lane->is_failed)
		return;
	while (poll_once(link) > 0 && !link->lane->is_failed)
		;
	rdma_link_fail(link, "%s: %s", link->port->device->name, link->why);
}

void rdma_link_break(struct rdma_link *link, const char *why)
{
	if (*link->why)
		return;
	(void)snprintf(link->why, sizeof(link->why), "%s", why);
	worker_post(link->lane->worker, &link->broken);
}

static void rdma_end(struct lane *lane)
{
	lane->rdma = rdma_link_free(lane->rdma);
}

static const struct lane_ops rdma_ops = {
	.start = rdma_start,
	.flush = rdma_flush,
	.cut = rdma_cut,
	.release = rdma_release,
	.end = rdma_end,
};

static int rdma_lane_new(struct peer *peer, struct rdma_link *link, struct lane **ret_lane)
{
	struct lane *lane;
	int r;

	r = lane_new(peer, &rdma_ops, &lane);
	if (r)
		return error_trace(r);
	lane->rdma = link;
	link->lane = lane;
	link->credits = link->n_theirs;
	list_init(&link->awaiting);
	list_init(&link->granted);
	link->poll.again.run = on_again;
	link->poll.rest.run = on_rest;
	link->poll.late.expired = on_late;
	link->broken.run = on_broken;
	*ret_lane = lane;
	return 0;
}

int rdma_lane_add(struct peer *peer, struct rdma_link *link, unsigned rail, bool is_accepted)
{
	struct lane *lane = NULL;
	int r;

	assert(peer->state == PEER_UP);
	r = rdma_lane_new(peer, link, &lane);
	if (r)
		return error_trace(r);
	peer_take_lane(peer, lane, rail, is_accepted);
	return 0;
}
