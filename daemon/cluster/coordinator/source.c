/*
 * A member of a coordinator's cluster. It keeps one stream to it, on which views come, and says at intervals that it
 * lives. While the coordinator is gone, everything goes on with the last view, but no new job can be opened. A path that
 * swallows what is sent says nothing: a heartbeat that is not answered soon ends the connection, and each attempt to be
 * registered again has a new one.
 *
 * A job's states: IDLE --OpenJob--> ASKED --view--> OPEN --CloseJob--> CLOSING, and from ASKED, when nobody waits any more,
 * WITHDRAWN --cancelled or not--> CLOSING. One call at a time for each job, so that a CloseJob never overtakes the OpenJob
 * after it. What the coordinator knows of our jobs is corrected with each
 * registration, so a job whose call fails for want of a coordinator is simply IDLE again.
 */
#include "cluster/source.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/coordinator/coordinator.h"
#include "cluster/wire.h"

#include <stdio.h>
#include <sys/random.h>

#define RETRY_MIN_MS 100
#define RETRY_MAX_MS 1000
/* Of one attempt. Shorter than a lease, so that a coordinator whose machine comes back is found in time by the next one. */
#define CONNECT_MS	 3000
#define REGISTER_MS	 (2 * CONNECT_MS) /* of one registration, until its first message */
#define PATIENCE_MIN_MS	 1000		  /* with one heartbeat */
#define FAREWELL_MS	 500 /* how long stopping waits for the coordinator to hear that we leave */
#define LEASE_MIN_MS	 30
#define CLOSE_TIMEOUT_MS 5000

enum { JOB_IDLE, JOB_ASKED, JOB_WITHDRAWN, JOB_OPEN, JOB_CLOSING };

struct source {
	struct cluster *cluster;
	struct coordinator *hosted; /* when this daemon is the coordinator too */
	char address[256];
	struct rpc_channel *channel;

	struct rpc_request registration;
	bool registering;   /* registration is with rpc */
	bool registered;    /* and its first message has come */
	struct failure why; /* we ended the stream ourselves */
	struct loop_timer retry;
	unsigned retry_ms;
	uint64_t gone_since_ns; /* 0: it is there */
	char gone_why[256];

	struct rpc_request heartbeat;
	bool beating; /* heartbeat is with rpc */
	struct loop_timer beat;
	uint64_t heard_ns, asked_ns;
	uint64_t answer_ms;  /* what the last heartbeat took, or was given */
	uint32_t sent_epoch; /* by the heartbeat under way */
	uint32_t lease_ms;

	struct wire_bytes key;
	struct rpc_request leave;
};

static void register_start(struct source *s);
static void job_ask(struct cluster_job *job);

static double seconds_since(uint64_t ns)
{
	return (double)(clock_now_ns() - ns) / (double)NSEC_PER_SEC;
}

static uint32_t epoch_here(const struct source *s)
{
	return s->cluster->view ? s->cluster->view->epoch : 0;
}

/* Loss and return */

static void retry_later(struct source *s)
{
	uint32_t random = 0;
	uint64_t delay_ms;

	/* Spread by half, or all members would come at once to a coordinator that has just been restarted. */
	(void)!getrandom(&random, sizeof(random), GRND_NONBLOCK);
	delay_ms = s->retry_ms / 2 + random % (s->retry_ms / 2 + 1);
	s->retry_ms = MIN(2 * s->retry_ms, (unsigned)RETRY_MAX_MS);
	if (loop_timer_set(s->cluster->params.loop, &s->retry,
			   clock_now_ns() + delay_ms * NSEC_PER_MSEC))
		log_error("coordinator %s: out of memory, no more attempts", s->address);
}

/*
 * What went by the old connection ends here: jobs that are asked for are asked for again once we are registered. Without
 * memory for another, the old one has one more chance.
 */
static void connect_anew(struct source *s)
{
	struct rpc_channel *old = s->channel;
	struct failure failure = { 0 };

	if (!rpc_channel_new_like(old, s->address, &failure, &s->channel))
		rpc_channel_free(old);
}

static void on_retry(struct loop_timer *timer)
{
	struct source *s = container_of(timer, struct source, retry);

	connect_anew(s);
	register_start(s);
}

/* Nothing that a retry could mend, said before this daemon could ever work. */
static bool is_final(const struct source *s, int status)
{
	return !s->cluster->view && (status == -EINVAL || status == -EPROTO);
}

static void coordinator_lost(struct source *s, int status, const char *text)
{
	struct failure failure = { 0 };

	s->registered = false;
	loop_timer_cancel(&s->beat);
	(void)snprintf(s->gone_why, sizeof(s->gone_why), "%s", text);
	if (is_final(s, status)) {
		(void)failure_set(&failure, status, "coordinator %s: %s", s->address, text);
		s->cluster->params.failed(s->cluster->params.user, &failure);
		return;
	}
	if (!s->gone_since_ns) {
		s->gone_since_ns = clock_now_ns();
		if (s->cluster->view)
			log_warning("coordinator %s: lost, going on with view %u: %s", s->address,
				    epoch_here(s), text);
		else
			log_warning("coordinator %s: not there yet, trying again: %s", s->address,
				    text);
	}
	retry_later(s);
}

static void on_registration_done(struct rpc_request *request, int status, const char *text,
				 const void *data, size_t len)
{
	struct source *s = container_of(request, struct source, registration);

	s->registering = false;
	if (s->cluster->closed)
		return;
	if (s->why.status)
		coordinator_lost(s, s->why.status, s->why.text);
	else
		coordinator_lost(s, status, status ? text : "it ended the registration");
	s->why = (struct failure){ 0 };
}

/* Ends the stream for a reason of ours; on_registration_done() goes on. */
static void register_anew(struct source *s, int status, const char *why)
{
	if (!s->registering || s->why.status)
		return;
	(void)failure_set(&s->why, status, "%s", why);
	rpc_request_cancel(&s->registration);
}

/* Heartbeat */

static void heartbeat_send(struct source *s);

/*
 * How long an answer may take: a quarter of a lease, so that nobody is dropped for a path that another connection does
 * not take. Longer where the last was slow already: a coordinator that has much to do must not be given more by all who
 * come anew for it.
 */
static uint64_t patience_ms(const struct source *s)
{
	uint64_t least = MAX((uint64_t)s->lease_ms / 4, (uint64_t)PATIENCE_MIN_MS);

	return MIN(MAX(4 * s->answer_ms, least), (uint64_t)s->lease_ms);
}

static void not_answered(struct source *s, uint64_t ms)
{
	char why[96];

	(void)snprintf(why, sizeof(why), "a heartbeat was not answered in %llu ms",
		       (unsigned long long)ms);
	register_anew(s, -ETIMEDOUT, why);
}

static void on_heartbeat_done(struct rpc_request *request, int status, const char *text,
			      const void *data, size_t len)
{
	struct source *s = container_of(request, struct source, heartbeat);
	struct wire_heard heard = { 0 };
	struct failure failure = { 0 };
	uint64_t now = clock_now_ns();

	s->beating = false;
	if (s->cluster->closed || !s->registered)
		return;
	s->answer_ms = (now - s->asked_ns) / NSEC_PER_MSEC;
	if (!status)
		status = wire_unpack_heard(data, len, &failure, &heard);
	if (status == -ETIMEDOUT) {
		not_answered(s, s->answer_ms);
		return;
	}
	if (status) {
		if (now - s->heard_ns > s->lease_ms * NSEC_PER_MSEC)
			register_anew(s, -ETIMEDOUT, "no answer for as long as a lease");
		return;
	}
	s->heard_ns = now;
	if (!heard.known)
		register_anew(s, -ENOENT, "it does not know this member any more");
	else if (epoch_here(s) > s->sent_epoch)
		heartbeat_send(s); /* a view has come meanwhile, and servers are waited for */
}

static void heartbeat_send(struct source *s)
{
	struct wire_heartbeat message = {
		.id = s->cluster->params.self.id,
		.epoch = epoch_here(s),
	};
	struct wire_bytes bytes = { 0 };

	if (s->beating || !s->registered || wire_pack_heartbeat(&message, &bytes))
		return;
	s->sent_epoch = message.epoch;
	s->asked_ns = clock_now_ns();
	s->beating = true;
	s->heartbeat = (struct rpc_request){
		.path = "/bps.cluster.Coordinator/Heartbeat",
		.data = bytes.data,
		.len = bytes.len,
		.deadline_ms = patience_ms(s),
		.done = on_heartbeat_done,
	};
	rpc_request_start(s->channel, &s->heartbeat);
	wire_bytes_done(&bytes);
}

static void on_beat(struct loop_timer *timer)
{
	struct source *s = container_of(timer, struct source, beat);

	if (!s->registered) {
		register_anew(s, -ETIMEDOUT, "the registration was not answered");
		return;
	}
	heartbeat_send(s);
	(void)loop_timer_set(s->cluster->params.loop, timer,
			     clock_now_ns() + s->lease_ms * NSEC_PER_MSEC / 3);
}

/* Registration */

/* A coordinator that was started anew may have made another key: everybody learns it when registering again. */
static void take_key(struct source *s, struct wire_bytes *key)
{
	struct cluster_params *params = &s->cluster->params;

	if (s->key.data && s->key.len == key->len && !memcmp(s->key.data, key->data, key->len))
		return;
	if (s->key.data)
		log_notice("coordinator %s: has another key for data connections now", s->address);
	wire_bytes_done(&s->key);
	s->key = *key;
	*key = (struct wire_bytes){ 0 };
	params->data_key_known(params->user, s->key.data, s->key.len);
}

static void welcome(struct source *s, struct wire_event *event)
{
	FAILPOINT("cluster-welcome");
	s->registered = true;
	s->retry_ms = RETRY_MIN_MS;
	s->lease_ms = MAX(event->lease_ms, (uint32_t)LEASE_MIN_MS);
	s->heard_ns = clock_now_ns();
	if (s->gone_since_ns)
		log_notice("coordinator %s: there again after %.1f s", s->address,
			   seconds_since(s->gone_since_ns));
	s->gone_since_ns = 0;
	take_key(s, &event->key);
	if (s->cluster->closed)
		return;
	on_beat(&s->beat);
	/* Those that want a view can be asked for now. */
	cluster_kick(s->cluster);
}

static int take_views(struct source *s, struct wire_event *event, struct failure *failure)
{
	struct cluster *cluster = s->cluster;
	int r = 0;

	cluster_set_in_use(cluster, TAKE_PTR(event->in_use), event->n_in_use);
	for (size_t i = 0; !r && i < event->old_views.n; i++) {
		r = cluster_keep_view(cluster, event->old_views.views[i], failure);
		if (r != -ESTALE)
			continue;
		/* No registration mends it: somebody's job runs in it. Its home and ours will disagree, and say so. */
		log_warning("coordinator %s: %s", s->address, failure->text);
		r = 0;
	}
	if (r || !event->view)
		return r;
	if (event->view->epoch <= epoch_here(s))
		return cluster_keep_view(cluster, event->view, failure);
	r = cluster_set_view(cluster, event->view, failure);
	if (!r && !cluster->closed)
		heartbeat_send(s);
	return r;
}

static void on_event(struct rpc_request *request, const void *data, size_t len)
{
	struct source *s = container_of(request, struct source, registration);
	_cleanup_(wire_event_done) struct wire_event event = { 0 };
	struct failure failure = { 0 };
	int r;

	if (s->cluster->closed || s->why.status)
		return;
	r = wire_unpack_event(data, len, s->cluster->params.self.id, &failure, &event);
	if (!r && !s->registered && (!event.version || !event.key.len))
		r = failure_set(&failure, -EPROTO, "its first message has no version or key");
	if (!r && !s->registered)
		welcome(s, &event);
	if (!r && !s->cluster->closed) {
		r = take_views(s, &event, &failure);
	}
	if (r)
		register_anew(s, r, failure.text);
}

/* The jobs we hold and the views these run in, each once. Borrowed. */
static int collect_jobs(struct source *s, struct wire_register *message)
{
	struct cluster_job *job;
	size_t n = 0, i;

	list_for_each (job, &s->cluster->jobs, link)
		n++;
	n = MIN(n, (size_t)WIRE_JOBS_MAX);
	message->jobs = calloc(n + 1, sizeof(*message->jobs));
	message->views.views = calloc(n + 1, sizeof(struct view *));
	if (!message->jobs || !message->views.views)
		return error_origin(-ENOMEM);
	list_for_each (job, &s->cluster->jobs, link) {
		struct wire_job *to = &message->jobs[message->n_jobs];

		if (job->state != JOB_OPEN || message->n_jobs == n)
			continue;
		memcpy(to->name, job->name, sizeof(to->name));
		to->owner = job->owner;
		to->epoch = job->view->epoch;
		message->n_jobs++;
		for (i = 0; i < message->views.n; i++)
			if (message->views.views[i] == job->view)
				break;
		if (i == message->views.n)
			message->views.views[message->views.n++] = job->view;
	}
	return 0;
}

static int pack_registration(struct source *s, struct wire_bytes *ret_bytes)
{
	struct wire_register message = {
		.version = WIRE_VERSION,
		.version_min = WIRE_VERSION_MIN,
		.member = s->cluster->params.self,
		.epoch = epoch_here(s),
		.n_members = s->cluster->view ? (uint32_t)s->cluster->view->n_members : 0,
		.key = s->key,
	};
	int r;

	memcpy(message.secret, s->cluster->params.secret, sizeof(message.secret));
	r = collect_jobs(s, &message);
	if (!r)
		r = wire_pack_register(&message, ret_bytes);
	free(message.jobs);
	free(message.views.views);
	return error_trace(r);
}

static void register_start(struct source *s)
{
	struct wire_bytes bytes = { 0 };
	int r;

	r = pack_registration(s, &bytes);
	if (r) {
		coordinator_lost(s, r, strerror(-r));
		return;
	}
	s->registering = true;
	s->registration = (struct rpc_request){
		.path = "/bps.cluster.Coordinator/Register",
		.data = bytes.data,
		.len = bytes.len,
		.stream = true,
		.message = on_event,
		.done = on_registration_done,
	};
	rpc_request_start(s->channel, &s->registration);
	/* Without memory for the timer, gRPC's own signs of life end it, later. */
	(void)loop_timer_set(s->cluster->params.loop, &s->beat,
			     clock_now_ns() + REGISTER_MS * NSEC_PER_MSEC);
	FAILPOINT("cluster-registering");
	wire_bytes_done(&bytes);
}

/* Jobs */

static struct source *source_of(const struct cluster_job *job)
{
	return job->cluster->source;
}

/* No coordinator to speak to: as if it had not been asked; the next registration says what we hold. */
static bool is_lost(int status)
{
	return status == -ECONNREFUSED || status == -ECANCELED || status == -ENOENT ||
	       status == -EIO || status == -ESTALE;
}

static void on_closed(struct rpc_request *request, int status, const char *text, const void *data,
		      size_t len)
{
	struct cluster_job *job = container_of(request, struct cluster_job, request);

	job->state = JOB_IDLE;
	if (job->cluster->closed)
		return;
	if (list_empty(&job->queries))
		cluster_job_free(job);
	else
		job_ask(job);
}

/* The last of the job here: whatever becomes of this, on_closed() ends or restarts it. */
static void job_close(struct cluster_job *job)
{
	struct source *s = source_of(job);
	struct wire_close message = { .member = s->cluster->params.self.id, .owner = job->owner };
	struct wire_bytes bytes = { 0 };

	job->view = view_unref(job->view);
	memcpy(message.job, job->name, sizeof(message.job));
	if (!s->registered || wire_pack_close(&message, &bytes)) {
		on_closed(&job->request, 0, "", NULL, 0);
		return;
	}
	job->state = JOB_CLOSING;
	job->request = (struct rpc_request){
		.path = "/bps.cluster.Coordinator/CloseJob",
		.data = bytes.data,
		.len = bytes.len,
		.deadline_ms = CLOSE_TIMEOUT_MS,
		.done = on_closed,
	};
	rpc_request_start(s->channel, &job->request);
	wire_bytes_done(&bytes);
}

/* The view in the reply is one that came on the stream already, most often; one copy of it is enough. */
static int opened_view(struct cluster_job *job, const void *data, size_t len,
		       struct failure *failure, struct view **ret_view)
{
	_cleanup_(view_unrefp) struct view *view = NULL;
	struct cluster *cluster = job->cluster;
	int r;

	r = wire_unpack_opened(data, len, cluster->params.self.id, failure, &view);
	if (r)
		return r;
	r = cluster_keep_view(cluster, view, failure);
	if (r)
		return r;
	*ret_view = view_ref(cluster_view_of(cluster, view->epoch));
	return 0;
}

static void on_opened(struct rpc_request *request, int status, const char *text, const void *data,
		      size_t len)
{
	struct cluster_job *job = container_of(request, struct cluster_job, request);
	_cleanup_(view_unrefp) struct view *view = NULL;
	struct failure failure = { 0 };
	bool withdrawn = job->state == JOB_WITHDRAWN;

	job->state = JOB_IDLE;
	FAILPOINT("cluster-job-answered");
	if (job->cluster->closed)
		return;
	if (status)
		(void)failure_set(&failure, status, "%s", text);
	else if (!opened_view(job, data, len, &failure, &view))
		job->state = JOB_OPEN;

	if (list_empty(&job->queries) || (withdrawn && status)) {
		/* The coordinator may hold it for us all the same. */
		job_close(job);
	} else if (job->state == JOB_OPEN) {
		cluster_job_opened(job, view);
	} else if (!is_lost(failure.status)) {
		cluster_job_failed(job, &failure);
	} else {
		/* Asked again once we are registered again; if we think we are, we are wrong. */
		register_anew(source_of(job), failure.status, failure.text);
	}
}

static void job_ask(struct cluster_job *job)
{
	struct source *s = source_of(job);
	uint64_t left_ms = cluster_job_remaining_ms(job);
	struct wire_open message = {
		.owner = job->owner,
		.min_servers = cluster_job_min_servers(job),
		.member = s->cluster->params.self.id,
		/* The coordinator knows best why it takes so long, so its answer is to come before our own timeout. */
		.timeout_ms = left_ms - MIN(left_ms / 10, (uint64_t)200),
	};
	struct wire_bytes bytes = { 0 };

	if (!s->registered)
		return;
	memcpy(message.job, job->name, sizeof(message.job));
	if (wire_pack_open(&message, &bytes))
		return; /* its timeout ends it */
	job->state = JOB_ASKED;
	job->request = (struct rpc_request){
		.path = "/bps.cluster.Coordinator/OpenJob",
		.data = bytes.data,
		.len = bytes.len,
		.deadline_ms = MAX(left_ms, (uint64_t)1),
		.done = on_opened,
	};
	rpc_request_start(s->channel, &job->request);
	wire_bytes_done(&bytes);
}

static void coordinator_want(struct cluster_job *job)
{
	if (job->state == JOB_IDLE)
		job_ask(job);
}

static void coordinator_drop(struct cluster_job *job)
{
	if (job->cluster->closed)
		return;
	if (job->state == JOB_IDLE) {
		cluster_job_free(job);
	} else if (job->state == JOB_OPEN) {
		job_close(job);
	} else if (job->state == JOB_ASKED) {
		job->state = JOB_WITHDRAWN;
		rpc_request_cancel(&job->request);
	}
}

static void coordinator_explain(const struct cluster_job *job, struct failure *failure)
{
	struct source *s = source_of(job);
	char servers[256];

	if (s && s->gone_since_ns) {
		(void)failure_set(failure, -ETIMEDOUT,
				  "job %s: the coordinator %s has been gone for %.1f s: %s",
				  job->name, s->address, seconds_since(s->gone_since_ns),
				  s->gone_why);
		return;
	}
	cluster_describe_servers(job->cluster->view, cluster_job_min_servers(job), servers,
				 sizeof(servers));
	(void)failure_set(failure, -ETIMEDOUT,
			  "job %s: no view from the coordinator %s in time; %s", job->name,
			  s ? s->address : "", servers);
}

/* Life */

/* A coordinator that was not told where others reach it asks where it listens; on all addresses, the loopback is one. */
static void own_address(struct source *s)
{
	const char *listen = s->cluster->params.coordinator_listen;
	const char *colon = strrchr(listen, ':');
	int len = colon ? (int)(colon - listen) : 0;

	if (!strncmp(listen, "0.0.0.0:", 8) || !strncmp(listen, "[::]:", 5))
		(void)snprintf(s->address, sizeof(s->address), "127.0.0.1:%u",
			       coordinator_port(s->hosted));
	else
		(void)snprintf(s->address, sizeof(s->address), "%.*s:%u", len, listen,
			       coordinator_port(s->hosted));
}

static int host(struct source *s, const struct rpc_tls *tls, struct failure *failure)
{
	const struct cluster_params *params = &s->cluster->params;
	struct coordinator_params hosted = {
		.loop = params->loop,
		.listen = params->coordinator_listen,
		.tls = tls,
		.lease_ms = params->lease_ms,
		.wait_ms = COORDINATOR_WAIT_MS,
		.data_key = params->data_key,
		.data_key_len = params->data_key_len,
	};
	int r;

	r = coordinator_new(&hosted, failure, &s->hosted);
	if (!r && !params->coordinator)
		own_address(s);
	return error_trace(r);
}

static int coordinator_start(struct cluster *cluster, struct failure *failure)
{
	const struct cluster_params *params = &cluster->params;
	const struct rpc_tls files = { params->tls_ca, params->tls_cert, params->tls_key };
	const struct rpc_tls *tls =
		params->tls_ca || params->tls_cert || params->tls_key ? &files : NULL;
	struct source *s = calloc(1, sizeof(*s));
	int r = 0;

	if (!s)
		return failure_set(failure, -ENOMEM, "cluster: out of memory");
	cluster->source = s;
	s->cluster = cluster;
	s->retry_ms = RETRY_MIN_MS;
	s->lease_ms =
		(uint32_t)MIN(MAX(params->lease_ms, (uint64_t)LEASE_MIN_MS), (uint64_t)UINT32_MAX);
	s->retry.expired = on_retry;
	s->beat.expired = on_beat;
	if (!params->coordinator && !params->coordinator_listen)
		return failure_set(
			failure, -EINVAL,
			"cluster: coordinator is not set: say its host:port, or where to "
			"listen (coordinator_listen) if this daemon is to be it");
	if (params->coordinator)
		(void)snprintf(s->address, sizeof(s->address), "%s", params->coordinator);
	if (params->coordinator_listen)
		r = host(s, tls, failure);
	if (!r)
		r = rpc_channel_new(params->rpc, s->address, CONNECT_MS, tls, failure, &s->channel);
	if (!r)
		register_start(s);
	return error_trace(r);
}

static void on_departed(struct rpc_request *request, int status, const char *text, const void *data,
			size_t len)
{
}

static void coordinator_source_close(struct cluster *cluster)
{
	struct source *s = cluster->source;
	struct wire_bytes bytes = { 0 };

	if (!s)
		return;
	loop_timer_cancel(&s->retry);
	loop_timer_cancel(&s->beat);
	/* Its own coordinator goes with it, and could not answer once the loop has stopped. */
	if (s->registered && !s->hosted && !wire_pack_leave(cluster->params.self.id, &bytes)) {
		s->leave = (struct rpc_request){
			.path = "/bps.cluster.Coordinator/Leave",
			.data = bytes.data,
			.len = bytes.len,
			.deadline_ms = FAREWELL_MS,
			.done = on_departed,
		};
		rpc_request_start(s->channel, &s->leave);
		wire_bytes_done(&bytes);
	}
	if (s->hosted)
		coordinator_close(s->hosted);
}

static void coordinator_source_free(struct cluster *cluster)
{
	struct source *s = cluster->source;

	if (!s)
		return;
	if (s->channel && s->leave.private)
		rpc_channel_drain(s->channel, FAREWELL_MS);
	rpc_channel_free(s->channel);
	coordinator_free(s->hosted);
	if (s->key.data)
		explicit_bzero(s->key.data, s->key.len);
	wire_bytes_done(&s->key);
	cluster->source = NULL;
	free(s);
}

const struct source_ops source_coordinator = {
	.start = coordinator_start,
	.close = coordinator_source_close,
	.free = coordinator_source_free,
	.want = coordinator_want,
	.drop = coordinator_drop,
	.explain = coordinator_explain,
};
