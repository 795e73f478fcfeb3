/*
 * The client's job: its parameters are checked and kept for the next daemon; ranks join, regroup
 * and leave; the job ends with an error. call.c brings the daemon's word of a failed job,
 * session.c gives up a job that cannot be resumed.
 */
#include "cuda.h"
#include <stdio.h>

#define JOIN_TIMEOUT_MS	   60000
#define REQUEST_TIMEOUT_MS 600000

static bool job_name_is_legal(const char *name)
{
	size_t len = strlen(name);

	return len >= 1 && len <= JOB_NAME_MAX &&
	       strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") ==
		       len;
}

/* Fills in what follows from the rest. */
static int job_shape(struct bps_join_params *p)
{
	if (!p->world_size)
		p->world_size = 1;
	if (p->world_size > JOB_RANKS_MAX)
		return error_set(-EINVAL, "world_size is %u: at most %u", p->world_size,
				 JOB_RANKS_MAX);

	if (!p->local_size && !p->n_nodes) {
		/* All on this machine: then the local rank is the rank. */
		p->n_nodes = 1;
		p->local_size = p->world_size;
		if (!p->local_rank)
			p->local_rank = p->rank;
	} else if (!p->local_size || !p->n_nodes) {
		uint32_t given = MAX(p->local_size, p->n_nodes);

		if (p->world_size % given)
			return error_set(-EINVAL,
					 "%u ranks cannot be divided by %s %u: set both local_size "
					 "and n_nodes",
					 p->world_size, p->local_size ? "local_size" : "n_nodes",
					 given);
		*(p->local_size ? &p->n_nodes : &p->local_size) = p->world_size / given;
	}
	return 0;
}

static int job_check_params(const struct bps_join_params *p)
{
	static const char below[] = "%s is %u: it must be below %s, which is %u";

	if (!job_name_is_legal(p->job))
		return error_set(
			-EINVAL,
			"\"%.*s\" cannot be the name of a job: 1 to %u of A-Z a-z 0-9 . _ -",
			JOB_NAME_MAX, p->job, JOB_NAME_MAX);
	if (p->secret_len > JOB_SECRET_MAX || (p->secret_len && !p->secret))
		return error_set(-EINVAL, "the secret has %zu bytes%s: at most %u", p->secret_len,
				 p->secret ? "" : " and is NULL", JOB_SECRET_MAX);
	if (p->rank >= p->world_size)
		return error_set(-EINVAL, below, "rank", p->rank, "world_size", p->world_size);
	if (p->local_size > p->world_size)
		return error_set(-EINVAL, "local_size is %u: at most world_size, which is %u",
				 p->local_size, p->world_size);
	if (p->local_rank >= p->local_size)
		return error_set(-EINVAL, below, "local_rank", p->local_rank, "local_size",
				 p->local_size);
	if (p->n_nodes > p->world_size)
		return error_set(-EINVAL, "n_nodes is %u: at most world_size, which is %u",
				 p->n_nodes, p->world_size);
	if (p->node >= p->n_nodes)
		return error_set(-EINVAL, below, "node", p->node, "n_nodes", p->n_nodes);
	if (p->timeout_ms < 0 || p->request_timeout_ms < 0)
		return error_set(-EINVAL, "a negative timeout: every wait of a job has an end");
	if (p->part_bytes && (p->part_bytes < PART_BYTES_MIN || p->part_bytes > PART_BYTES_MAX))
		return error_set(-EINVAL, "part_bytes is %u: %u to %u, or 0", p->part_bytes,
				 PART_BYTES_MIN, PART_BYTES_MAX);
	if (p->gpu_reduce < 0 || p->gpu_reduce > GPU_REDUCE_MAX_)
		return error_set(-EINVAL, "gpu_reduce is %d, which is no enum bps_gpu_reduce",
				 p->gpu_reduce);
	if (p->local_size < 64 && p->gpu_roots >> p->local_size)
		return error_set(
			-EINVAL,
			"gpu_roots (BPS_GPU_ROOTS) has local rank %d, but local_size is %u",
			63 - __builtin_clzll(p->gpu_roots), p->local_size);
	if (p->quorum > p->world_size)
		return error_set(-EINVAL, "quorum is %u, but the job has %u ranks", p->quorum,
				 p->world_size);
	if (p->quorum_timeout_ms < 0 || (p->quorum_timeout_ms && !p->quorum))
		return error_set(-EINVAL, "quorum_timeout_ms is %lld%s",
				 (long long)p->quorum_timeout_ms,
				 p->quorum ? "" : ", but quorum is 0");
	if (p->staleness && !p->quorum && !p->asynchronous)
		return error_set(-EINVAL,
				 "staleness is %u, but the job has neither quorum nor async",
				 p->staleness);
	return 0;
}

static int job_check_elastic(const struct bps_join_params *p)
{
	if (p->newcomer && !p->elastic)
		return error_set(-EINVAL, "newcomer is set, but elastic is not");
	if ((p->min_ranks || p->max_ranks) && !p->elastic)
		return error_set(-EINVAL, "min_ranks or max_ranks is set, but elastic is not");
	if (p->max_ranks && p->max_ranks < p->min_ranks)
		return error_set(-EINVAL, "max_ranks is %u: at least min_ranks, which is %u",
				 p->max_ranks, p->min_ranks);
	if (p->elastic && !p->newcomer &&
	    (p->world_size < p->min_ranks || (p->max_ranks && p->world_size > p->max_ranks)))
		return error_set(-EINVAL, "world_size is %u, but the job may have %u to %u ranks",
				 p->world_size, p->min_ranks, p->max_ranks);
	return 0;
}

static int job_complete_params(const struct bps_join_params *given, struct bps_join_params *params)
{
	int r;

	if (given) {
		r = error_copy_params(params, sizeof(*params), given, "bps_join_params");
	} else {
		params->size = sizeof(*params);
		r = bps_join_params_from_environment(params);
	}
	if (r)
		return r;

	if (!params->job)
		params->job = "default";
	if (!params->timeout_ms)
		params->timeout_ms = JOIN_TIMEOUT_MS;
	if (!params->request_timeout_ms)
		params->request_timeout_ms = REQUEST_TIMEOUT_MS;
	if (params->elastic && !params->min_ranks)
		params->min_ranks = 1;
	if (params->newcomer) {
		params->rank = params->local_rank = params->node = 0;
		params->world_size = params->local_size = params->n_nodes = 1;
	}
	r = job_shape(params);
	r = r ?: job_check_params(params);
	return r ?: job_check_elastic(params);
}

static void job_close_ledger(struct job *job)
{
	client_fork_lock();
	(void)fd_close(TAKE_FD(job->ledger));
	client_fork_unlock();
}

/*
 * Others on this node had been told of the next run by the daemon that has gone: this is what
 * Regroup would have been answered.
 */
static bool job_has_regrouped(const struct job *job, const struct client_call *call)
{
	return !call->status && job->state == JOB_JOINED && job->regroup.pending &&
	       call->answer.ledger >= 0 && call->answer.job != job->number &&
	       (int32_t)(call->answer.membership - job->membership) > 0;
}

/* The answer to Resume. */
static void job_resumed(struct bps_client *client, const struct client_call *call)
{
	if (!client->failure && job_has_regrouped(&client->job, call)) {
		request_end_all(client, -ECANCELED, "the ranks have regrouped meanwhile");
		client->job.regroup.answer = call->answer;
		call_finish(client, &client->job.regroup, 0, NULL);
		client->job.resumed = true;
		session_resumed(client);
		return;
	}
	/* One that comes is of another version of the daemon, or the first once more. */
	fd_close(call->answer.ledger);
	if (client->failure)
		return;
	if (call->status)
		job_discontinue(client, call->status, call->text);
	else if (call->answer.job != client->job.number)
		job_discontinue(client, -EPROTO, "the daemon resumed another job");
	client->job.resumed = true;
	session_resumed(client);
}

/* Where an elastic job has put this trainer; Resume says it. */
static void job_place(struct job *job, const struct client_call *call)
{
	if (!call->answer.membership)
		return;
	job->membership = call->answer.membership;
	job->rank = job->params.rank = call->answer.rank;
	job->size = job->params.world_size = call->answer.size;
	job->local_rank = job->params.local_rank = call->answer.local_rank;
	job->local_size = job->params.local_size = call->answer.local_size;
	job->node = job->params.node = call->answer.node;
	job->params.n_nodes = call->answer.n_nodes;
	if (job->params.newcomer && call->answer.has_terms) {
		job->params.request_timeout_ms = call->answer.request_timeout_ms;
		job->params.min_servers = call->answer.min_servers;
		job->params.part_bytes = call->answer.part_bytes;
		job->params.gpu_reduce = (int)call->answer.gpu_reduce;
		job->params.gpu_roots = call->answer.gpu_roots;
		job->params.min_ranks = call->answer.min_ranks;
		job->params.max_ranks = call->answer.max_ranks;
	}
	job->params.newcomer = 0;
}

void job_see(struct bps_client *client, const struct bps_request *request)
{
	const struct bps_outcome *outcome = &request->outcome;
	struct job *job = &client->job;

	if (!outcome->membership || request->run != job->run ||
	    (int32_t)(outcome->membership - job->membership) <= 0)
		return;
	job->membership = outcome->membership;
	job->rank = outcome->rank;
	job->size = outcome->world_size;
}

/* Right at the answer, so that what the daemon says next about the job finds it. */
static void job_answered(struct bps_client *client, struct client_call *call)
{
	struct job *job = &client->job;

	if (job->state != JOB_JOINING) {
		job_resumed(client, call);
		return;
	}
	job->state = call->status ? JOB_NONE : JOB_JOINED;
	job->number = call->answer.job;
	job->ledger = call->answer.ledger;
	if (!call->status)
		job_place(job, call);
}

/* The answer to Regroup: tensors are of the next run, too. */
static void job_regrouped(struct bps_client *client, struct client_call *call)
{
	struct job *job = &client->job;

	if (call->status || job->state != JOB_JOINED) {
		(void)fd_close(call->answer.ledger);
		return;
	}
	job_close_ledger(job);
	job->number = call->answer.job;
	job->ledger = call->answer.ledger;
	job->resumed = false;
	job_place(job, call);
	if (tensor_declare_anew(client))
		client_fail(client, "cannot declare the job's tensors again: %s", bps_error());
}

/* Keeps what was said to join: the next daemon is told the same. */
static void job_set(struct job *job, const struct bps_join_params *params)
{
	job_close_ledger(job);
	*job = (struct job){
		.state = JOB_JOINING,
		.run = job->run + 1,
		.rank = params->rank,
		.size = params->world_size,
		.local_rank = params->local_rank,
		.local_size = params->local_size,
		.node = params->node,
		.join.answered = job_answered,
		.ledger = -1,
		.params = *params,
	};
	(void)snprintf(job->name, sizeof(job->name), "%s", params->job);
	if (params->secret_len)
		memcpy(job->secret, params->secret, params->secret_len);
	job->params.job = job->name;
	job->params.secret = job->secret;
}

_public_ int bps_client_join(struct bps_client *client, const struct bps_join_params *given)
{
	struct bps_join_params params = { 0 };
	struct job *job;
	int r;

	r = client_check(client);
	r = r ?: job_complete_params(given, &params);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	(void)client_progress(client);
	r = client_failed(client);
	if (r)
		return r;
	job = &client->job;
	if (params.elastic && !(client->session.hello.answer.features & CONTROL_FEATURE_ELASTIC))
		return error_set(-EOPNOTSUPP,
				 "the daemon at %s is of a version that knows no elastic jobs",
				 client->path);
	if (job->state != JOB_NONE && job->state != JOB_FAILED)
		return error_set(-EISCONN, "this client is in a job, or about to be");

	tensor_drop_all(client);
	follow_leave(&client->follow);
	cuda_leave(client);
	job_set(job, &params);
	/*
	 * The daemon keeps the deadline and knows who is missing; beyond it, it is the daemon that
	 * is missing.
	 */
	if (MUL_OVERFLOW(params.timeout_ms, INT64_C(1000000), &job->join.timeout_ns) ||
	    ADD_OVERFLOW(job->join.timeout_ns, CLIENT_ANSWER_NS, &job->join.timeout_ns))
		job->join.timeout_ns = CLIENT_FOREVER;
	r = call_join(client);
	if (r) {
		job->state = JOB_NONE;
		return r;
	}
	return call_wait(client, &job->join, CLIENT_FOREVER);
}

static void job_end(struct job *job, int status, const char *text)
{
	if (job->state != JOB_LEAVING)
		job->state = JOB_FAILED;
	job->status = status;
	(void)snprintf(job->text, sizeof(job->text), "%s", text);
	job_close_ledger(job);
}

void job_has_failed(struct bps_client *client, uint64_t number, int status, const char *text)
{
	struct job *job = &client->job;

	/* Of a run before this one: its end was seen already. */
	if (job->state != JOB_JOINED || job->number != number)
		return;
	job_end(job, status ?: -ECONNRESET, status ? text : "no reason given");
}

void job_discontinue(struct bps_client *client, int status, const char *text)
{
	struct job *job = &client->job;

	job_end(job, status, text);
	if (job->regroup.pending)
		call_finish(client, &job->regroup, status, text);
	/* It is left by that. */
	if (job->leave.pending)
		call_finish(client, &job->leave, 0, NULL);
	request_end_all(client, job->status, job->text);
}

bool job_is_held(const struct bps_client *client)
{
	const struct job *job = &client->job;

	return job->ledger >= 0 && !job->cuda &&
	       (job->state == JOB_JOINED || job->state == JOB_LEAVING);
}

bool job_survives(struct bps_client *client)
{
	struct job *job = &client->job;

	request_end_strays(client);
	if (job->state == JOB_LEAVING && !job->leave.pending)
		job_discontinue(client, -ECANCELED, "this rank left its job");
	else if (job->state == JOB_FAILED)
		request_end_all(client, job->status, job->text);
	else if (job->state == JOB_JOINED || job->state == JOB_LEAVING)
		return job_is_held(client);
	return true;
}

int job_check(const struct bps_client *client)
{
	switch (client->job.state) {
	case JOB_JOINED:
		return 0;
	case JOB_FAILED:
		return error_set(-ENOTCONN, "the job is over: %s", client->job.text);
	default:
		return error_set(-ENOTCONN, "this client is in no job: see bps_client_join()");
	}
}

int job_leave(struct bps_client *client, int64_t deadline_ns)
{
	struct job *job = &client->job;
	int r;

	r = client_failed(client);
	if (r)
		return r;
	if (job->state == JOB_JOINED) {
		job->state = JOB_LEAVING;
		job->leave = (struct client_call){ 0 };
		r = call_leave(client);
		if (r) {
			job->state = JOB_JOINED;
			return r;
		}
		/* An error can only mean that the job is over already. */
		(void)call_wait(client, &job->leave, deadline_ns);
	} else if (job->state != JOB_FAILED) {
		return error_set(-ENOTCONN, "this client is in no job");
	}

	/*
	 * The daemon ends them; the memory of a request that it has not ended is not the caller's.
	 */
	deadline_ns = MIN(deadline_ns, client_now_ns() + CLIENT_ANSWER_NS);
	while (client->requests.n_posted && !client->failure) {
		if (client_now_ns() >= deadline_ns)
			client_fail(client, "the daemon at %s does not end its requests",
				    client->path);
		else
			client_wait(client, deadline_ns);
	}
	tensor_drop_all(client);
	follow_leave(&client->follow);
	cuda_leave(client);
	job_close_ledger(job);
	job->state = JOB_NONE;
	return client_failed(client);
}

_public_ int bps_client_leave(struct bps_client *client)
{
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	r = job_leave(client, CLIENT_FOREVER);
	request_copy_all(client);
	return r;
}

_public_ int bps_client_regroup(struct bps_client *client)
{
	struct job *job;
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	(void)client_progress(client);
	job = &client->job;
	r = client_failed(client);
	if (!r && job->state == JOB_FAILED)
		return error_set(job->status, "the job is over: %s", job->text);
	r = r ?: job_check(client);
	if (r)
		return r;
	if (!job->params.elastic)
		return error_set(-EINVAL, "the job is not elastic");
	if (job->regroup.pending)
		return error_set(-EBUSY, "another thread regroups");
	job->regroup = (struct client_call){ .answered = job_regrouped };
	/* The daemon keeps the deadline. */
	if (MUL_OVERFLOW(job->params.request_timeout_ms, INT64_C(1000000),
			 &job->regroup.timeout_ns) ||
	    ADD_OVERFLOW(job->regroup.timeout_ns, CLIENT_ANSWER_NS, &job->regroup.timeout_ns))
		job->regroup.timeout_ns = CLIENT_FOREVER;
	r = call_regroup(client);
	return r ?: call_wait(client, &job->regroup, CLIENT_FOREVER);
}

_public_ int bps_client_status(struct bps_client *client, struct bps_status *ret)
{
	struct bps_status status;
	int r = client_check(client);
	if (r)
		return r;
	if (!ret || !ret->size)
		return error_set(-EINVAL, "no struct bps_status, or its size is not set");

	CLIENT_LOCKED(client);
	(void)client_progress(client);
	if (client->calls.asked.pending)
		return error_set(-EBUSY, "another thread asks");
	client->calls.asked = (struct client_call){ 0 };
	r = call_status(client, &status);
	if (!r)
		r = call_wait(client, &client->calls.asked, CLIENT_FOREVER);
	if (r)
		return r;
	status.size = MIN(ret->size, sizeof(status));
	memcpy(ret, &status, status.size);
	return 0;
}

static int job_number(const struct bps_client *constant, size_t offset)
{
	struct bps_client *client = (struct bps_client *)constant;
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	if (client->job.state == JOB_NONE || client->job.state == JOB_JOINING)
		return error_set(-ENOTCONN, "this client is in no job");
	return (int)*(const uint32_t *)((const char *)&client->job + offset);
}

_public_ int bps_client_rank(const struct bps_client *client)
{
	return job_number(client, offsetof(struct job, rank));
}

_public_ int bps_client_size(const struct bps_client *client)
{
	return job_number(client, offsetof(struct job, size));
}

_public_ int bps_client_local_rank(const struct bps_client *client)
{
	return job_number(client, offsetof(struct job, local_rank));
}

_public_ int bps_client_local_size(const struct bps_client *client)
{
	return job_number(client, offsetof(struct job, local_size));
}

_public_ int bps_client_node(const struct bps_client *client)
{
	return job_number(client, offsetof(struct job, node));
}
