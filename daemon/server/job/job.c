/*
 * A job at this server as an object: made, found by number, woken for its deadlines, ended, and
 * remembered with the reason. form.c and attach.c make jobs; the job's timer and whichever file
 * meets a failure end them.
 */
#include "server/job/job.h"

#include "base/clock.h"
#include "base/log.h"
#include "server/job/store.h"
#include <endian.h>
#include <stdio.h>

#define GRACE_MS 1000

/*
 * The soonest of its deadlines. While a sweep is under way those that it will have found are seen
 * to at its end.
 */
static uint64_t job_deadline(const struct job *job)
{
	uint64_t at = CLOCK_NEVER;

	if (job->state == JOB_FORMING)
		return job->forming.since_ns + job->forming.timeout_ms * NSEC_PER_MSEC;
	if (!job->sweep.going)
		at = job->sweep.again ? job->sweep.not_before_ns
				      : MAX(job->sweep.next_ns, job->sweep.not_before_ns);
	at = MIN(at, job->server->hooks->lost_deadline(job));
	at = MIN(at, job->membership.regroup_by_ns);
	return MIN(at, job->attachment.by_ns);
}

void job_wake(struct job *job)
{
	uint64_t at = job_deadline(job);
	struct failure failure = { 0 };

	if (at == CLOCK_NEVER || !job_wake_by(job, at))
		return;
	(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->owner.name);
	job_fail(job, &failure, NULL);
}

static void expire(struct job *job, uint64_t now)
{
	const struct server_hooks *hooks = job->server->hooks;

	sweep(job, SWEEP_TIME);
	if (job->state == JOB_RUNNING && job->membership.regroup_by_ns <= now)
		hooks->regroup_is_late(job);
	if (job->state == JOB_RUNNING && job->attachment.by_ns <= now)
		hooks->attach_is_late(job);
	else if (job->state == JOB_RUNNING && hooks->lost_deadline(job) <= now)
		hooks->lost_expired(job, now);
}

static void job_expired(struct loop_timer *timer)
{
	struct job *job = container_of(timer, struct job, timer);
	uint64_t now = clock_now_ns();

	if (!job_heard(job))
		return;
	if (job->state == JOB_FORMING && job_deadline(job) <= now) {
		job->server->hooks->form_is_late(job);
		return;
	}
	job_hold(job);
	if (job->state == JOB_RUNNING)
		expire(job, now);
	if (job->state != JOB_OVER)
		job_wake(job);
	job_let_go(job);
}

int job_wake_by(struct job *job, uint64_t at_ns)
{
	if (job->timer.loop && job->timer.at_ns <= at_ns)
		return 0;
	return error_trace(loop_timer_set(job->server->params.loop, &job->timer, at_ns));
}

uint64_t job_patience_ns(const struct job *job)
{
	return (job->request_timeout_ms + GRACE_MS) * NSEC_PER_MSEC;
}

/* Maps charge for their buckets, bulk for what is taken of it. */
static void job_set_account(struct job *job, struct account *account)
{
	struct map *const maps[] = { &job->names.declared, &job->names.named, &job->store.tensors,
				     &job->store.far_slots, &job->store.far_rounds };

	job->memory.account = account_ref(account);
	job->store.bulk.quota = job->ordinals.quota = job_memory(job);
	for (unsigned i = 0; i < ARRAY_SIZE(maps); i++)
		maps[i]->quota = job_memory(job);
}

/* Charges for one more job. Returns 0; or -EDQUOT with words. */
static int job_count(struct job *job, struct failure *failure)
{
	struct failure why = { 0 };

	if (account_charge(job->memory.account, ACCOUNT_SERVED_JOBS, 1, &why))
		return failure_set(failure, -EDQUOT, "job %s: %s", job->owner.name, why.text);
	job->memory.counted = true;
	return 0;
}

/* Another may have the place that this one had among max_jobs. */
static void job_give_place(struct job *job)
{
	job->server->n_jobs--;
	if (job->memory.counted)
		account_release(job->memory.account, ACCOUNT_SERVED_JOBS, 1);
	job->memory.counted = false;
}

static void spending_begun(struct spending *spending)
{
	job_hold(container_of(spending, struct job, store.spending));
}

static void spending_over(struct spending *spending)
{
	job_let_go(container_of(spending, struct job, store.spending));
}

int job_new(struct server *server, const struct job_params *params, struct job **ret_job,
	    struct failure *failure)
{
	const char *name = params->name;
	uint32_t size = params->size, n_nodes = params->n_nodes;
	_cleanup_(job_freep) struct job *job = NULL;
	int r;

	if (!params->takes_place && server->n_jobs >= server->params.max_jobs)
		return failure_set(failure, -EDQUOT,
				   "job %s: this server has %u jobs already, its max_jobs", name,
				   server->n_jobs);
	job = calloc(1, sizeof(*job));
	if (!job)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", name);
	(void)snprintf(job->owner.name, sizeof(job->owner.name), "%s", name);
	job_set_account(job, params->account);
	r = job_charge(job,
		       sizeof(*job) + size * sizeof(*job->node_of_rank) +
			       n_nodes * sizeof(*job->nodes) + arrivals_len(n_nodes),
		       failure);
	if (r)
		return r;
	job->node_of_rank = malloc(size * sizeof(*job->node_of_rank));
	job->nodes = calloc(n_nodes, sizeof(*job->nodes));
	job->memory.quota = job_quota_take(server->params.job_quota_bytes, charge_all(server));
	if (!job->node_of_rank || !job->nodes || !job->memory.quota)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", name);
	if (!params->takes_place && job_count(job, failure))
		return failure->status;
	job->membership.succeeded = params->takes_place;

	job->server = server;
	job->size = size;
	job->n_nodes = n_nodes;
	job->attachment.by_ns = CLOCK_NEVER;
	job->membership.regroup_by_ns = CLOCK_NEVER;
	job->names.next_key = 1;
	job->sweep.next_ns = CLOCK_NEVER;
	job->timer.expired = job_expired;
	for (uint32_t i = 0; i < size; i++)
		job->node_of_rank[i] = NODE_NONE;
	list_init(&job->names.declaring);
	list_init(&job->names.declarations);
	list_init(&job->names.forgetting);
	list_init(&job->names.early);
	list_init(&job->store.parts);
	list_init(&job->store.all_tensors);
	list_init(&job->store.forgotten);
	list_init(&job->store.mentioned);
	list_init(&job->store.dropping);
	list_init(&job->store.failing);
	list_init(&job->store.spare_parts);
	list_init(&job->store.spare_tensors);
	list_init(&job->store.open);
	list_init(&job->store.summing);
	list_init(&job->store.held);
	list_init(&job->store.kept);
	list_init(&job->store.spare);
	list_init(&job->store.spare_rounds);
	list_init(&job->store.accumulators);
	list_init(&job->store.late);
	for (uint32_t i = 0; i < job->n_nodes; i++)
		job_node_init(&job->nodes[i]);
	spending_init(&job->store.spending, server->params.loop);
	job->store.spending.quota = job->memory.quota;
	job->store.spending.begun = spending_begun;
	job->store.spending.over = spending_over;
	list_init(&job->membership.joiners);
	job->peers.quota = job_memory(job);
	list_push_back(&server->jobs, &job->link);
	server->n_changes++;
	server->n_jobs += !params->takes_place;
	*ret_job = TAKE_PTR(job);
	return 0;
}

static void lose_number(struct job *job)
{
	struct server *server = job->server;

	map_remove(&server->numbers, &job->entry);
	if (server->found == job)
		server->found = NULL;
}

struct job *job_free(struct job *job)
{
	if (!job)
		return NULL;
	if (job->server) {
		loop_timer_cancel(&job->timer);
		loop_abort(&job->sweep.chore);
		list_remove(&job->link);
		list_remove(&job->to_hear);
		job->server->n_changes++;
		if (job->state == JOB_RUNNING)
			lose_number(job);
		if (job->state != JOB_OVER && !job->membership.succeeded)
			job_give_place(job);
		job->server->hooks->job_freed(job);
	}
	for (uint32_t i = 0; job->nodes && i < job->n_nodes; i++) {
		(void)join_free(job->nodes[i].join);
		(void)held_free(job->nodes[i].sent.slots);
	}
	job_peers_done(job);
	ordinals_done(&job->ordinals);
	job_quota_give(job->memory.quota);
	(void)arrivals_free(job->arrivals);
	free(job->nodes);
	free(job->node_of_rank);
	free(job->placement.moves);
	block_unref(job->forming.answer);
	free(job->forming.past);
	account_release(job->memory.account, ACCOUNT_MEMORY, job->memory.charged);
	(void)account_put(job->memory.account);
	free(job);
	return NULL;
}

bool job_yield(struct job *job)
{
	struct job *other;

	list_for_each (other, &job->server->jobs, link)
		if (other->state == JOB_RUNNING && other->membership.succeeded &&
		    job_is(other, job->owner.name, job->owner.secret_digest))
			return false;
	job->membership.succeeded = true;
	job_give_place(job);
	return true;
}

void job_take_back(struct job *job)
{
	struct failure failure;

	if (job->state == JOB_OVER || !job->membership.succeeded)
		return;
	job->membership.succeeded = false;
	job->server->n_jobs++;
	/* It is here, whatever others have taken meanwhile. */
	(void)job_count(job, &failure);
}

int job_start(struct job *job, uint64_t number)
{
	int r = 0;

	if (job->n_nodes > 1)
		r = arrivals_new(job->owner.name, "node", NULL, job->n_nodes, &job->server->spread,
				 &job->arrivals);
	if (!r)
		r = map_add(&job->server->numbers, number, &job->entry);
	if (r)
		return error_trace(r);
	job->number = number;
	job->server->n_changes++;
	job->state = JOB_RUNNING;
	return 0;
}

bool job_is(const struct job *job, const char *name, const uint8_t *secret_digest)
{
	unsigned differs = 0;

	/* Takes the same time whatever differs: a guesser learns nothing from it. */
	for (size_t i = 0; i < SECRET_DIGEST_LEN; i++)
		differs |= job->owner.secret_digest[i] ^ secret_digest[i];
	return !differs && !strcmp(job->owner.name, name);
}

struct job *job_find(struct server *server, uint64_t number)
{
	struct job *found = server->found;
	struct map_entry *entry;

	/* One contribution after another is of one job. */
	if (found && found->number == number)
		return job_heard(found);
	entry = map_find(&server->numbers, number);
	if (!entry)
		return NULL;
	return job_heard(server->found = container_of(entry, struct job, entry));
}

const struct failure *job_over(const struct server *server, uint64_t number)
{
	for (unsigned i = 0; number && i < SERVER_OVER; i++) {
		if (server->over[i].number == number)
			return &server->over[i].failure;
	}
	return NULL;
}

static void owner_of(const uint8_t *secret_digest, uint64_t owner[2])
{
	memcpy(owner, secret_digest, 2 * sizeof(owner[0]));
	owner[0] = le64toh(owner[0]);
	owner[1] = le64toh(owner[1]);
}

const struct failure *job_over_heard(const struct server *server, uint64_t number,
				     const uint8_t *secret_digest)
{
	uint64_t owner[2];

	owner_of(secret_digest, owner);
	for (unsigned i = 0; number && i < SERVER_OVER; i++) {
		const struct over *heard = &server->heard[i];

		if (heard->number == number && heard->owner[0] == owner[0] &&
		    heard->owner[1] == owner[1])
			return &heard->failure;
	}
	return NULL;
}

void job_over_hear(struct server *server, const struct data_header *header,
		   const struct failure *failure)
{
	server->heard[server->next_heard++ % SERVER_OVER] = (struct over){
		.number = header->job,
		.owner = { header->key, header->round },
		.failure = *failure,
	};
}

void job_over_remember(struct server *server, uint64_t number, const struct failure *failure)
{
	if (!number || job_over(server, number))
		return;
	server->over[server->next_over] = (struct over){ .number = number, .failure = *failure };
	server->next_over = (server->next_over + 1) % SERVER_OVER;
}

void job_over_moved(struct server *server, uint64_t number)
{
	for (unsigned i = 0; i < SERVER_OVER; i++)
		if (server->over[i].number == number)
			server->over[i].moved = true;
}

bool job_over_return(struct server *server, uint64_t number)
{
	for (unsigned i = 0; number && i < SERVER_OVER; i++) {
		if (server->over[i].number != number)
			continue;
		if (!server->over[i].moved)
			return false;
		server->over[i].number = 0;
	}
	return true;
}

void job_retire(struct job *job, const struct failure *failure)
{
	if (job->state == JOB_RUNNING)
		lose_number(job);
	job->state = JOB_OVER;
	job->failure = *failure;
	list_remove(&job->to_hear);
	if (!job->membership.succeeded)
		job_give_place(job);
	loop_timer_cancel(&job->timer);
}

void job_close(struct job *job, const struct failure *failure)
{
	if (job->state == JOB_RUNNING)
		job_over_remember(job->server, job->number, failure);
	job_retire(job, failure);
}

void job_dismiss(struct job *job)
{
	for (uint32_t i = 0; i < job->n_nodes; i++) {
		struct delivery *joining = TAKE_PTR(job->nodes[i].joining);

		if (joining)
			delivery_fail(joining, job->failure.status, job->failure.text);
		rejoin_end(&job->nodes[i], job->failure.status, job->failure.text);
	}
	job->server->hooks->job_over(job);
	sweep(job, 0);
}

static void tell(struct job *job, struct peer *peer)
{
	struct data_header header = {
		.op = DATA_FAIL_JOB,
		.job = job->number,
		.status = -job->failure.status,
		.len = (uint32_t)strlen(job->failure.text),
	};

	peer_tell(peer, &header, job->failure.text);
}

void job_fail(struct job *job, const struct failure *failure, const struct peer *except)
{
	bool ran = job->state == JOB_RUNNING;

	if (job->state == JOB_OVER)
		return;
	job_close(job, failure);
	log_notice("job %s (%s) is over: %s", job->owner.name, ran ? "running" : "forming",
		   failure->text);
	for (uint32_t i = 0; ran && i < job->n_nodes; i++) {
		struct job_node *node = &job->nodes[i];

		if (node->peer && node->peer != except && !node->departed)
			tell(job, node->peer);
	}
	job_dismiss(job);
}

void job_end(struct job *job, const struct failure *failure)
{
	if (job->state == JOB_OVER)
		return;
	job_close(job, failure);
	job_dismiss(job);
}

void job_release(struct job *job)
{
	if (job->state == JOB_OVER && !job->store.n_summing)
		(void)job_free(job);
}

void job_hold(struct job *job)
{
	job->store.n_summing++;
}

void job_let_go(struct job *job)
{
	job->store.n_summing--;
	job_release(job);
}

bool job_post(struct job *job, struct task *task)
{
	const struct server_params *params = &job->server->params;

	task->flow = job->number;
	if (!task->away && task->cost <= params->inline_bytes &&
	    (task->cost <= POOL_LEAST_BYTES || !loop_is_wanted(params->loop)))
		return false;
	return !pool_post(params->pool, task);
}

/* Agents tell how much time is left, not what was asked for: 59.998 s is 60 s. */
const char *job_seconds_text(uint64_t ms, struct seconds_text *ret_text)
{
	double seconds = (double)ms / 1000;

	(void)snprintf(ret_text->text, sizeof(ret_text->text), seconds < 10 ? "%.3g" : "%.0f",
		       seconds);
	return ret_text->text;
}

const char *job_node_text(const struct job *job, uint32_t node, struct node_text *ret_text)
{
	struct ranks_text ranks;

	ranks_init(&ranks);
	for (uint32_t i = 0; i < job->size; i++) {
		if (job->node_of_rank[i] == node)
			ranks_add(&ranks, i);
	}
	(void)snprintf(ret_text->text, sizeof(ret_text->text), "%s (node %u)", ranks_end(&ranks),
		       node);
	return ret_text->text;
}
