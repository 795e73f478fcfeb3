/*
 * A job that goes through servers outlives their processes, and this one: bps-recovery(7), THROUGH SERVERS. A server that is
 * lost is connected and attached again. Meanwhile its parts wait; then those without a result are pushed once more, and results
 * that not all nodes may have are offered. What the ledger retains for that is forgotten when the server says so.
 */
#include "agent/round/rows.h"
#include "base/failpoint.h"
#include "base/log.h"

/* Numbers of results that may be kept, or be on their way, behind the last that is acknowledged. */
#define WINDOW LEDGER_RESULTS_MAX
/* A server hears of what is kept with the next part; without one, when it is so much. */
#define ACK_RESULTS 32u
#define ACK_BYTES   (2u << 20)
/* A server that was lost so often within lost_timeout, whatever came in between, is not worth waiting for. */
#define LOSSES_MAX 100u
/* Between two attempts to attach; the transport has its own for each. */
#define RETRY_NS (50 * NSEC_PER_MSEC)
/* Parts that have memory at last are gone on with so many at a time: each may be copied there, and counts once more for so many bytes. */
#define FEED_MAX   16
#define FEED_BYTES (256u << 10)

/* -- Servers that come and go ------------------------------------------------------------------------------------- */

static void give_up(struct agent_server *server)
{
	struct agent_job *job = server->job;
	struct failure failure;
	char time[32];

	(void)failure_set(
		&failure, -ECONNRESET,
		"job %s: server %s was lost, and did not come back within %s", job->owner.name,
		agent_server_name(job, agent_server_number(server)),
		agent_time_text(time, job->agent->params.lost_timeout_ms * NSEC_PER_MSEC));
	agent_job_fail(job, &failure, NULL);
}

static void on_retry(struct loop_timer *timer)
{
	struct agent_server *server = container_of(timer, struct agent_server, timer);
	struct agent_job *job = server->job;
	uint64_t timeout_ns = job->agent->params.lost_timeout_ms * NSEC_PER_MSEC;
	uint64_t move_ns = server->lost_ns + job->agent->params.move_timeout_ms * NSEC_PER_MSEC;
	uint64_t now_ns = clock_now_ns();

	/* Then nobody expects it back soon. */
	if (agent_move_is_dropped(job, agent_server_number(server)))
		move_ns = server->lost_ns;
	if (job->state == JOB_OVER)
		return;
	if (!agent_placement_has(job, agent_server_number(server))) {
		agent_move_look(job, agent_server_number(server));
		return;
	}
	if (server->gone && now_ns >= move_ns &&
	    agent_move_without(job, agent_server_number(server), "one was lost"))
		return;
	if (now_ns >= server->lost_ns + timeout_ns) {
		give_up(server);
		return;
	}
	if (!server->send_queue && agent_setup_connect(job, agent_server_number(server))) {
		agent_send_queue_put(TAKE_PTR(server->send_queue));
		(void)loop_timer_set(job->agent->params.loop, timer, now_ns + RETRY_NS);
		return;
	}
	/* It is under way: for so long, or until the others can go on. */
	move_ns = MAX(move_ns, now_ns + RETRY_NS);
	(void)loop_timer_set(job->agent->params.loop, timer,
			     MIN(move_ns, server->lost_ns + timeout_ns));
}

int agent_keep_init(struct agent_job *job, size_t number)
{
	struct agent_server *server = &job->fleet.servers[number];

	server->job = job;
	list_init(&server->parked);
	server->timer.expired = on_retry;
	if (!job->retention.keeps)
		return 0;
	server->here = held_new(&job->memory.held, WINDOW / 64 * sizeof(server->here[0]));
	server->retained = held_new(&job->memory.held, WINDOW * sizeof(server->retained[0]));
	return server->here && server->retained ? 0 : error_origin(-errno);
}

void agent_keep_done(struct agent_job *job)
{
	if (job->retention.acking)
		loop_unpost(job->agent->params.loop, &job->retention.ack_mail);
	loop_abort(&job->retention.feed);
	loop_timer_cancel(&job->placement.add_timer);
	for (size_t i = 0; i < job->fleet.n_servers; i++) {
		loop_timer_cancel(&job->fleet.servers[i].timer);
		loop_abort(&job->fleet.servers[i].resync.chore);
		held_free(job->fleet.servers[i].here);
		held_free(job->fleet.servers[i].retained);
	}
	held_free(job->retention.failed);
	held_free(job->tensors.forgotten);
}

bool agent_keep_is_loss(const struct call *call)
{
	if (!call->status)
		return false;
	/* A loss is the transport's word; a server that shuts down, its last one. */
	return call->answer.op != DATA_ERROR ? !peer_is_self(call->peer)
					     : call->status == -ESHUTDOWN;
}

void agent_keep_park(struct agent_part *part)
{
	struct agent_server *server;

	part->job->agent->hooks->part.waits(part);
	server = &part->job->fleet.servers[part->server];
	part->state = PART_QUEUED;
	part->again = false;
	part->send_queue = NULL;
	list_push_back(&server->parked, &part->wait);
}

/* Parts that wait in the queues towards n servers wait here from now on; those that are gathered come when they are. */
static void leave_send_queues(struct agent_job *job, size_t first, size_t n)
{
	struct agent_round *round;
	struct agent_part *part;

	for (size_t i = first; i < first + n; i++)
		while (job->fleet.servers[i].send_queue &&
		       (part = agent_send_queue_take(job->fleet.servers[i].send_queue)))
			agent_keep_park(part);
	list_for_each (round, &job->schedule.moving, moving_link)
		list_for_each (part, &round->parts, link) {
			if (!part->send_queue || part->server - first >= n)
				continue;
			agent_send_queue_sent(part->send_queue, part);
			part->send_queue = NULL;
		}
}

/* Returns whether it is too often. */
static bool count_loss(struct agent_server *server, uint64_t now_ns, const char *why)
{
	struct agent_job *job = server->job;
	uint64_t within_ns = job->agent->params.lost_timeout_ms * NSEC_PER_MSEC;
	struct failure failure;
	char time[32];

	if (!server->n_losses++ || now_ns - server->losses_ns > within_ns) {
		server->n_losses = 1;
		server->losses_ns = now_ns;
	}
	if (server->n_losses <= LOSSES_MAX)
		return false;
	if (agent_move_without(job, agent_server_number(server), "one was lost too often"))
		return true;
	(void)failure_set(&failure, -ECONNRESET,
			  "job %s: server %s was lost %u times within %s, the last time: %s",
			  job->owner.name, agent_server_name(job, agent_server_number(server)),
			  server->n_losses, agent_time_text(time, within_ns), why);
	agent_job_fail(job, &failure, NULL);
	return true;
}

/* What is held of them counts no more: another set of ranks may be what the next have. */
static void unhold(struct agent_job *job, size_t first, size_t n)
{
	struct agent_round *round;
	struct agent_part *part;

	list_for_each (round, &job->schedule.moving, moving_link) {
		if (!round->gate.on || round->gate.committed || round->failure.status)
			continue;
		list_for_each (part, &round->parts, link)
			if (part->state == PART_HELD && part->server - first < n)
				job->agent->hooks->part.let_go(part);
	}
	agent_keep_feed(job);
}

void agent_keep_detach(struct agent_job *job, size_t first, size_t n)
{
	/* All before anything begins anew: rows then go to no server that the job is still attached to as before. */
	for (size_t i = first; i < first + n; i++) {
		struct agent_server *server = &job->fleet.servers[i];

		if (server->attached && !server->resync.is_under_way)
			job->fleet.n_attached--;
		job->fleet.n_resyncing -= server->resync.is_under_way;
		server->resync.is_under_way = false;
		server->attached = false;
		server->attachment++;
		if (i == job->fleet.home_number)
			job->fleet.home = NULL;
	}
	leave_send_queues(job, first, n);
	/* What had come from the servers, or waited for them, begins anew. */
	for (size_t i = first; i < first + n; i++)
		agent_send_queue_put(TAKE_PTR(job->fleet.servers[i].send_queue));
	unhold(job, first, n);
	job->agent->hooks->rows_begin_anew(job, first, n);
}

void agent_keep_lost(struct agent_job *job, size_t number, const char *why)
{
	struct agent_server *server = &job->fleet.servers[number];
	uint64_t now_ns = clock_now_ns(), at_ns = now_ns;

	if (!agent_placement_has(job, number)) {
		agent_keep_detach(job, number, 1);
		return;
	}
	if (!server->attached)
		at_ns += RETRY_NS;
	/* Where there was no connection, there is no more to be lost than time. */
	if (server->send_queue && peer_id(server->send_queue->peer) &&
	    count_loss(server, now_ns, why))
		return;
	if (!server->lost_ns) {
		server->lost_ns = now_ns;
		log_notice("job %s: server %s was lost: %s; waiting for it", job->owner.name,
			   agent_server_name(job, number), why);
	}
	server->gone = true;
	agent_keep_detach(job, number, 1);
	FAILPOINT("server-lost");
	(void)loop_timer_set(job->agent->params.loop, &server->timer, at_ns);
}

void agent_keep_again(struct agent_job *job, size_t number)
{
	struct agent_server *server = &job->fleet.servers[number];
	uint64_t now_ns = clock_now_ns();

	if (!server->lost_ns)
		server->lost_ns = now_ns;
	agent_keep_detach(job, number, 1);
	(void)loop_timer_set(job->agent->params.loop, &server->timer, now_ns + RETRY_NS);
}

void agent_keep_peer_lost(struct agent_job *job, const struct peer *peer, const char *why)
{
	agent_job_hold(job);
	for (size_t i = 0; i < job->fleet.n_servers && job->state != JOB_OVER; i++)
		if (job->fleet.servers[i].send_queue &&
		    job->fleet.servers[i].send_queue->peer == peer)
			agent_keep_lost(job, i, why);
	agent_job_release(job);
}

void agent_view_changed(struct agent *agent)
{
	uint64_t now_ns = clock_now_ns();
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link) {
		if (!job->retention.keeps || job->state != JOB_RUNNING)
			continue;
		for (size_t i = 0; i < job->fleet.n_servers; i++)
			if (job->fleet.servers[i].gone && agent_placement_has(job, i) &&
			    agent_move_is_dropped(job, i))
				(void)loop_timer_set(agent->params.loop,
						     &job->fleet.servers[i].timer, now_ns);
		job->placement.add_ns = 0;
		agent_add_look(job);
	}
}

void agent_keep_failed(struct agent_job *job, uint64_t key, uint64_t round, bool alone,
		       const struct failure *failure)
{
	if (!job->retention.failed)
		job->retention.failed = held_new(&job->memory.held,
						 AGENT_FAILED * sizeof(job->retention.failed[0]));
	/* Without memory a server that is lost never hears of it: others wait until the deadline. */
	if (job->retention.failed)
		job->retention.failed[job->retention.n_failed++ % AGENT_FAILED] =
			(struct agent_failed){
				.key = key,
				.round = round,
				.alone = alone,
				.failure = *failure,
			};
}

struct agent_server *agent_keep_owner(const struct agent_job *job, const struct ledger_kept *kept)
{
	return &job->fleet.servers[job->placement
					   .stripes[kept->what.stripe % job->placement.n_stripes]];
}

void agent_keep_attached(struct agent_server *server, bool fresh)
{
	if (server->lost_ns)
		log_notice("job %s: server %s is back%s", server->job->owner.name,
			   agent_server_name(server->job, agent_server_number(server)),
			   fresh ? ", and fresh" : "");
	loop_timer_cancel(&server->timer);
	server->lost_ns = 0;
	server->gone = false;
	server->attachment++;
	server->acked = server->ack_sent = server->ack_wanted = server->released = 0;
	server->ack_bytes = server->n_offered = 0;
	memset(server->here, 0, WINDOW / 64 * sizeof(server->here[0]));
	memset(server->retained, 0, WINDOW * sizeof(server->retained[0]));
}

/* -- Retained results --------------------------------------------------------------------------------------------- */

static bool on_feed(struct chore *chore)
{
	struct agent_job *job = container_of(chore, struct agent_job, retention.feed);

	/* The sweep ends parts of a job that is over. */
	if (!job->resumption.suspended && job->state != JOB_OVER)
		agent_keep_feed(job);
	agent_job_release(job);
	/* Where there is more, the chore has begun anew. */
	return false;
}

static void feed_later(struct agent_job *job)
{
	if (list_linked(&job->retention.feed.link))
		return;
	job->retention.feed.step = on_feed;
	agent_job_hold(job);
	loop_begin(job->agent->params.loop, &job->retention.feed);
}

void agent_keep_feed(struct agent_job *job)
{
	struct agent_part *part;
	unsigned n = 0;

	/* A part that ends may free memory, and fail others: for that, feeding is not begun once more. */
	if (job->retention.feeding)
		return;
	job->retention.feeding = true;
	while ((part = list_first(&job->retention.starved, struct agent_part, wait))) {
		if (n >= FEED_MAX) {
			feed_later(job);
			break;
		}
		n += 1 + part->extent.len / FEED_BYTES;
		list_remove(&part->wait);
		if (job->agent->hooks->part.fed(part))
			continue;
		list_push_front(&job->retention.starved, &part->wait);
		break;
	}
	job->retention.feeding = false;
}

void agent_keep_free(struct agent_job *job, uint32_t retained)
{
	agent_contributors_resolve(job, retained);
	ledger_result_free(job->resumption.ledger, retained);
	agent_keep_feed(job);
}

/* All nodes have it. Of what the daemon before has left, the outputs here may not. */
static void result_released(struct agent_job *job, uint32_t retained)
{
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained);

	if (kept->stale || kept->busy || kept->late)
		kept->released = true;
	else
		agent_keep_free(job, retained);
}

void agent_keep_settle(struct agent_tensor *tensor, uint64_t round)
{
	struct agent_job *job = tensor->job;
	uint32_t retained;

	while ((retained = ledger_result_settle(job->resumption.ledger, tensor->key, round)) !=
	       LEDGER_NO_RESULT)
		if (ledger_result_kept(job->resumption.ledger, retained)->released &&
		    !ledger_result_kept(job->resumption.ledger, retained)->late)
			agent_keep_free(job, retained);
}

struct offer {
	struct call call;
	struct agent_job *job;
	uint32_t retained;
	bool late; /* not the result, but what comes with it */
	struct agent_server *server;
	uint64_t attachment;
};

/* It was under way to where it counts no more. */
static void offer_again(struct agent_job *job, uint32_t retained)
{
	const struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained);

	if (kept->whole && (kept->stale || !kept->busy))
		agent_keep_offer(job, retained);
	/* One that is busy is offered when it is not. */
	if (!kept->busy || kept->stale)
		agent_contributors_resolve(job, retained);
}

/* All nodes have it; but the last of what accumulates is kept until the next. */
static void offer_taken(struct agent_job *job, uint32_t retained)
{
	if (ledger_result_kept(job->resumption.ledger, retained)->what.operation !=
	    OPERATION_ACCUMULATE)
		result_released(job, retained);
}

static void on_offered(struct call *call)
{
	struct offer *offer = container_of(call, struct offer, call);
	struct agent_job *job = offer->job;
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, offer->retained);

	if (!job->resumption.suspended) {
		kept->offered--;
		if (!kept->taken && !kept->offered &&
		    !kept->in_place) /* freed meanwhile, and now for others */
			agent_keep_free(job, offer->retained);
		else if (kept->taken && !kept->offered &&
			 offer->server->attachment != offer->attachment)
			offer_again(job, offer->retained);
		else if (kept->taken && !call->status && !offer->late)
			offer_taken(job, offer->retained);
		else if (call->status && !agent_keep_is_loss(call))
			log_warning("job %s: a result that was kept is not taken: %s",
				    job->owner.name, call->text);
	}
	(void)held_free(offer);
	agent_job_release(job);
}

/* late: not the result, but what this node had contributed to it and is in none. */
static void offer(struct agent_job *job, uint32_t retained, bool late)
{
	struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained);
	const struct ledger_what *what = &kept->what;
	struct agent_server *server = agent_keep_owner(job, kept);
	uint32_t len =
		late ? what->len : agent_contributors_result_len(job, what->operation, what->len);
	struct offer *offer = held_new(&job->memory.held, sizeof(*offer));

	/* Then it is kept until the job's end, and the others wait for it until their deadline. */
	if (!offer)
		return;
	kept->offered++;
	server->n_offered++;
	offer->job = job;
	offer->retained = retained;
	offer->late = late;
	offer->server = server;
	offer->attachment = server->attachment;
	offer->call = (struct call){
		.header = {
			.op = DATA_OFFER,
			.len = what->has_data ? len : 0,
			.job = job->number,
			.key = what->key,
			.round = what->round,
			.epoch = job->placement.data_epoch,
			.node = job->shape.node,
			.block = what->block,
			.part = what->part,
			.dtype = what->dtype,
			.operation = what->operation,
			.reduction = what->reduction,
			.attachment = server->attachment,
			.offset = what->offset,
			.total = what->total,
			.part_len = what->len,
			.root = what->root,
		},
		.payload = late		    ? ledger_result_late(job->resumption.ledger, retained)
			   : what->has_data ? ledger_result_data(job->resumption.ledger, retained, what->len)
					    : NULL,
		.done = on_offered,
	};
	if (late)
		offer->call.header.is_late = true;
	else
		offer->call.header.n_gone_then = what->n_gone;
	agent_job_hold(job);
	peer_call(server->send_queue->peer, &offer->call);
}

void agent_keep_offer(struct agent_job *job, uint32_t retained)
{
	const struct ledger_kept *kept = ledger_result_kept(job->resumption.ledger, retained);

	/* One that is not attached is offered all when it is. */
	if (kept->offered || !agent_keep_owner(job, kept)->attached || job->state == JOB_OVER)
		return;
	/* Both before an answer to the first. */
	agent_job_hold(job);
	if (kept->late)
		offer(job, retained, true);
	offer(job, retained, false);
	agent_job_release(job);
}

/* -- Numbers ------------------------------------------------------------------------------------------------------ */

/* Results are mostly released one after the other: what is kept of one so many later is fetched. */
#define RELEASE_AHEAD 4

static void send_ack(struct agent_server *server)
{
	struct agent_job *job = server->job;
	struct data_header header = {
		.op = DATA_ACK,
		.job = job->number,
		.node = job->shape.node,
		.epoch = job->placement.data_epoch,
		.up_to = server->acked,
	};

	if (!server->attached || server->ack_sent == server->acked ||
	    peer_notice(server->send_queue->peer, &header, NULL))
		return;
	server->ack_sent = server->acked;
	server->ack_bytes = 0;
}

static void on_ack_mail(struct mail *mail)
{
	struct agent_job *job = container_of(mail, struct agent_job, retention.ack_mail);

	job->retention.acking = false;
	for (size_t i = 0; job->state == JOB_RUNNING && i < job->fleet.n_servers; i++)
		send_ack(&job->fleet.servers[i]);
}

/* At the end of this turn of the loop: then it is often for many. */
static void ack_soon(struct agent_job *job)
{
	if (job->retention.acking)
		return;
	job->retention.acking = true;
	job->retention.ack_mail.run = on_ack_mail;
	loop_post(job->agent->params.loop, &job->retention.ack_mail);
}

static void set_here(struct agent_server *server, uint32_t number)
{
	server->here[number % WINDOW / 64] |= UINT64_C(1) << (number % 64);
}

static bool take_here(struct agent_server *server, uint32_t number)
{
	uint64_t *word = &server->here[number % WINDOW / 64], bit = UINT64_C(1) << (number % 64);
	bool here = *word & bit;

	*word &= ~bit;
	return here;
}

void agent_keep_stored(struct agent_server *server, uint32_t number, uint32_t retained,
		       uint32_t len, bool soon)
{
	struct agent_job *job = server->job;
	struct failure failure;

	if (number - server->acked - 1 >= WINDOW || number - server->released - 1 >= WINDOW) {
		(void)failure_set(&failure, -EPROTO, "%s answered with result %u after %u",
				  agent_server_name(job, agent_server_number(server)), number,
				  server->acked);
		agent_job_fail(job, &failure, NULL);
		return;
	}
	/* What accumulates is not freed when all nodes have it. */
	if (retained != LEDGER_NO_RESULT &&
	    ledger_result_kept(job->resumption.ledger, retained)->what.operation ==
		    OPERATION_ACCUMULATE) {
		retained = LEDGER_NO_RESULT;
		len = 0;
	}
	server->retained[number % WINDOW] = retained + 1;
	server->ack_bytes += len;
	set_here(server, number);
	while (take_here(server, server->acked + 1))
		server->acked++;
	if (soon && (int32_t)(number - server->ack_wanted) > 0)
		server->ack_wanted = number;
	/* Others wait for a node to keep one that is wanted; it may itself wait for one before it. */
	if (server->acked != server->ack_sent &&
	    ((int32_t)(server->ack_wanted - server->ack_sent) > 0 ||
	     server->acked - server->ack_sent >= ACK_RESULTS || server->ack_bytes >= ACK_BYTES))
		ack_soon(job);
}

void agent_keep_released(struct agent_server *server, uint32_t number)
{
	struct agent_job *job = server->job;
	bool feeding = job->retention.feeding;

	/* One that was overtaken. */
	if ((int32_t)(number - server->released) <= 0)
		return;
	/* What no node has to keep for others (accumulate) is released before it is stored here. */
	if (number - server->released > server->acked - server->released)
		number = server->acked;
	agent_job_hold(job);
	/* Parts that wait have their memory when all is free. */
	job->retention.feeding = true;
	while (server->released != number) {
		uint32_t *place = &server->retained[++server->released % WINDOW], retained = *place;
		uint32_t later = server->retained[(server->released + RELEASE_AHEAD) % WINDOW];

		if (later)
			fetch_to_write(ledger_result_kept(job->resumption.ledger, later - 1),
				       sizeof(struct ledger_kept));
		*place = 0;
		if (retained)
			result_released(job, retained - 1);
	}
	job->retention.feeding = feeding;
	agent_keep_feed(job);
	agent_job_release(job);
}
