/*
 * Calls and the watch of etcd over one gRPC channel. When an endpoint fails, its calls wait and
 * go to the next. source.c, sync.c and job.c are the callers.
 */
#include "cluster/etcd/etcd.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/member.h"

#include <stdio.h>
#include <sys/random.h>

#define BACKOFF_MIN_MS 50
#define BACKOFF_MAX_MS 1000
#define FAREWELL_MS    500

/* What rpc has of a call: it outlives the call, when that is cancelled. */
struct etcd_attempt {
	struct rpc_request request;
	struct list link;
	struct etcd *etcd;
	struct etcd_call *call;	  /* NULL: nobody waits */
	bool is_watch;		  /* then for the watch, while it is etcd->watch */
	struct wire_bytes answer; /* first message of a stream */
	bool answered;
};

struct etcd {
	struct etcd_params params;
	char endpoints[ETCD_ENDPOINTS_MAX][96];
	size_t n_endpoints, at;
	struct rpc_channel *channel;
	struct list attempts; /* with rpc */
	struct list waiting;  /* calls to be tried again */
	struct etcd_attempt *watch;
	struct loop_timer retry;
	unsigned n_failed; /* endpoints in a row */
	uint64_t failing_since_ns;
	char why[256];
	unsigned backoff_ms;
	bool changing; /* calls of the endpoint that is left come back */
	bool lost, closed, said_farewell;
	struct rpc_request farewell;
};

static uint32_t random_below(uint32_t limit)
{
	uint32_t random = 0;

	(void)!getrandom(&random, sizeof(random), GRND_NONBLOCK);
	return random % MAX(limit, 1u);
}

const char *etcd_address(const struct etcd *etcd)
{
	return etcd->endpoints[etcd->at];
}

uint64_t etcd_failing_since_ns(const struct etcd *etcd, const char **ret_why)
{
	*ret_why = etcd->why;
	return etcd->failing_since_ns;
}

/* Another endpoint, or this one later, may do better. */
static bool is_trouble(int status)
{
	return status == -ECONNREFUSED || status == -ETIMEDOUT || status == -ECANCELED ||
	       status == -EIO || status == -ENOBUFS || status == -EAGAIN || status == -EPROTO;
}

static void attempt_free(struct etcd_attempt *attempt)
{
	list_remove(&attempt->link);
	if (attempt->etcd->watch == attempt)
		attempt->etcd->watch = NULL;
	wire_bytes_done(&attempt->answer);
	free(attempt);
}

/* The endpoint has failed us; on_retry() goes to the next. */
static void trouble(struct etcd *etcd, const char *why)
{
	uint64_t delay_ms;

	if (etcd->retry.loop || etcd->changing || etcd->closed)
		return;
	etcd->n_failed++;
	log_debug("etcd %s: %s", etcd_address(etcd), why);
	(void)snprintf(etcd->why, sizeof(etcd->why), "%s", why);
	if (!etcd->failing_since_ns)
		etcd->failing_since_ns = clock_now_ns();
	if (etcd->n_failed >= etcd->n_endpoints && !etcd->lost &&
	    clock_now_ns() - etcd->failing_since_ns >= ETCD_ELECTION_MS * NSEC_PER_MSEC) {
		etcd->lost = true;
		etcd->params.lost(etcd->params.user, why);
	}
	/* The others are tried at once; round by round, with more patience. */
	delay_ms = etcd->n_failed < etcd->n_endpoints
			   ? 1
			   : etcd->backoff_ms / 2 + random_below(etcd->backoff_ms / 2 + 1);
	if (etcd->n_failed % etcd->n_endpoints == 0)
		etcd->backoff_ms = MIN(2 * etcd->backoff_ms, (unsigned)BACKOFF_MAX_MS);
	if (loop_timer_set(etcd->params.loop, &etcd->retry,
			   clock_now_ns() + delay_ms * NSEC_PER_MSEC))
		log_error("etcd: out of memory, no more attempts");
}

static void fine(struct etcd *etcd)
{
	etcd->n_failed = 0;
	etcd->failing_since_ns = 0;
	etcd->backoff_ms = BACKOFF_MIN_MS;
	if (!etcd->lost)
		return;
	etcd->lost = false;
	etcd->params.there_again(etcd->params.user);
}

/* Calls */

static void call_end(struct etcd_call *call, int status, const char *text, const void *data,
		     size_t len)
{
	list_remove(&call->link);
	call->etcd = NULL;
	wire_bytes_done(&call->bytes);
	call->done(call, status, text, data, len);
}

static void on_message(struct rpc_request *request, const void *data, size_t len)
{
	struct etcd_attempt *attempt = container_of(request, struct etcd_attempt, request);
	void *copy;

	if (attempt->is_watch) {
		if (attempt->etcd->watch == attempt) {
			fine(attempt->etcd);
			attempt->etcd->params.watched(attempt->etcd->params.user, data, len);
		}
		return;
	}
	if (attempt->answered)
		return;
	copy = malloc(MAX(len, (size_t)1));
	if (!copy)
		return; /* as if it had not come: its deadline ends it */
	memcpy(copy, data, len);
	attempt->answer = (struct wire_bytes){ copy, len };
	attempt->answered = true;
}

static void on_done(struct rpc_request *request, int status, const char *text, const void *data,
		    size_t len)
{
	struct etcd_attempt *attempt = container_of(request, struct etcd_attempt, request);
	_cleanup_(wire_bytes_done) struct wire_bytes answer = attempt->answer;
	struct etcd_call *call = attempt->call;
	struct etcd *etcd = attempt->etcd;
	bool answered = attempt->answered;

	attempt->answer = (struct wire_bytes){ 0 };
	attempt_free(attempt);
	if (!call)
		return;
	call->attempt = NULL;
	if (call->is_stream) {
		data = answer.data;
		len = answer.len;
		if (!answered && !status)
			status = -EPROTO, text = "it ended the stream without an answer";
		else if (answered)
			status = 0;
	}
	if (!is_trouble(status)) {
		fine(etcd);
		call_end(call, status, text, data, len);
		return;
	}
	call->status = status;
	(void)snprintf(call->why, sizeof(call->why), "%s: %s", etcd_address(etcd), text);
	list_push_back(&etcd->waiting, &call->link);
	trouble(etcd, text);
}

static struct etcd_attempt *attempt_new(struct etcd *etcd)
{
	struct etcd_attempt *attempt = calloc(1, sizeof(*attempt));

	if (!attempt)
		return NULL;
	attempt->etcd = etcd;
	list_push_back(&etcd->attempts, &attempt->link);
	return attempt;
}

/* Without a channel or memory, the call waits for the next endpoint. */
static void call_try(struct etcd *etcd, struct etcd_call *call)
{
	uint64_t now = clock_now_ns();
	uint64_t left_ms = call->until_ns > now ? (call->until_ns - now) / NSEC_PER_MSEC : 0;

	call->attempt = etcd->channel && !etcd->retry.loop ? attempt_new(etcd) : NULL;
	if (!call->attempt) {
		list_push_back(&etcd->waiting, &call->link);
		if (!etcd->retry.loop)
			trouble(etcd, "out of memory");
		return;
	}
	call->attempt->call = call;
	call->attempt->request = (struct rpc_request){
		.path = call->path,
		.data = call->bytes.data,
		.len = call->bytes.len,
		.deadline_ms = MAX(MIN(left_ms, (uint64_t)ETCD_ATTEMPT_MS), (uint64_t)1),
		.stream = call->is_stream,
		.message = on_message,
		.done = on_done,
	};
	rpc_request_start(etcd->channel, &call->attempt->request);
	FAILPOINT("etcd-called");
}

void etcd_call_start(struct etcd *etcd, struct etcd_call *call, struct wire_bytes *bytes)
{
	assert(!call->etcd);
	call->etcd = etcd;
	call->bytes = *bytes;
	*bytes = (struct wire_bytes){ 0 };
	call->until_ns = clock_now_ns() + call->timeout_ms * NSEC_PER_MSEC;
	call->status = 0;
	list_init(&call->link);
	call_try(etcd, call);
}

void etcd_call_cancel(struct etcd_call *call)
{
	if (!call->etcd)
		return;
	if (call->attempt) {
		call->attempt->call = NULL;
		rpc_request_cancel(&call->attempt->request);
		call->attempt = NULL;
	}
	list_remove(&call->link);
	call->etcd = NULL;
	wire_bytes_done(&call->bytes);
}

/* Watch */

static void on_watch_done(struct rpc_request *request, int status, const char *text,
			  const void *data, size_t len)
{
	struct etcd_attempt *attempt = container_of(request, struct etcd_attempt, request);
	struct etcd *etcd = attempt->etcd;
	bool wanted = etcd->watch == attempt;

	attempt_free(attempt);
	if (!wanted || etcd->closed)
		return;
	if (is_trouble(status) || !status)
		trouble(etcd, status ? text : "it ended the watch");
	etcd->params.watch_ended(etcd->params.user, status, text);
}

void etcd_watch_start(struct etcd *etcd, struct wire_bytes *bytes)
{
	struct etcd_attempt *attempt;

	etcd_watch_stop(etcd);
	attempt = etcd->channel && !etcd->retry.loop ? attempt_new(etcd) : NULL;
	if (attempt) {
		attempt->is_watch = true;
		/* etcd takes the end of our side for the end of the watch, in some versions. */
		attempt->request = (struct rpc_request){
			.path = "/etcdserverpb.Watch/Watch",
			.data = bytes->data,
			.len = bytes->len,
			.stream = true,
			.keep_open = true,
			.message = on_message,
			.done = on_watch_done,
		};
		etcd->watch = attempt;
		rpc_request_start(etcd->channel, &attempt->request);
	}
	wire_bytes_done(bytes);
	if (!attempt)
		etcd->params.watch_ended(etcd->params.user, -EAGAIN,
					 "the endpoint is being changed");
}

void etcd_watch_stop(struct etcd *etcd)
{
	struct etcd_attempt *attempt = TAKE_PTR(etcd->watch);

	if (attempt)
		rpc_request_cancel(&attempt->request);
}

/* Endpoints */

static void calls_time_out(struct etcd *etcd)
{
	struct list over = LIST_INIT(over);
	struct etcd_call *call, *next;
	uint64_t now = clock_now_ns();

	list_for_each_safe (call, next, &etcd->waiting, link) {
		if (call->until_ns > now)
			continue;
		list_remove(&call->link);
		list_push_back(&over, &call->link);
	}
	while (!list_empty(&over)) {
		char why[sizeof(call->why)];

		call = list_first(&over, struct etcd_call, link);
		memcpy(why, call->why, sizeof(why));
		call_end(call, call->status ? call->status : -ETIMEDOUT, why, NULL, 0);
	}
}

static void calls_try_again(struct etcd *etcd)
{
	struct list again = LIST_INIT(again);
	struct etcd_call *call, *next;
	uint64_t now = clock_now_ns();

	list_for_each_safe (call, next, &etcd->waiting, link) {
		if (call->until_ns <= now)
			continue;
		list_remove(&call->link);
		list_push_back(&again, &call->link);
	}
	while (!list_empty(&again)) {
		call = list_first(&again, struct etcd_call, link);
		list_remove(&call->link);
		call_try(etcd, call);
	}
}

static void on_retry(struct loop_timer *timer)
{
	struct etcd *etcd = container_of(timer, struct etcd, retry);
	struct rpc_channel *old = TAKE_PTR(etcd->channel), *fresh = NULL;
	struct etcd_attempt *watch = TAKE_PTR(etcd->watch);
	struct failure failure = { 0 };

	/* What is still under way there comes back as cancelled, and waits with the rest. */
	etcd->at = (etcd->at + 1) % etcd->n_endpoints;
	if (rpc_channel_new_like(old, etcd_address(etcd), &failure, &fresh)) {
		etcd->channel = old;
		etcd->watch = watch;
		trouble(etcd, failure.text);
		return;
	}
	etcd->changing = true;
	rpc_channel_free(old);
	etcd->changing = false;
	etcd->channel = fresh;
	calls_try_again(etcd);
	calls_time_out(etcd);
	if (watch)
		etcd->params.watch_ended(etcd->params.user, -ECONNRESET,
					 "its endpoint was changed");
}

void etcd_distrust(struct etcd *etcd, int status, const char *why)
{
	trouble(etcd, why);
}

/* Life */

static int parse_endpoints(struct etcd *etcd, const char *text, struct failure *failure)
{
	const char *why = "";

	for (const char *word = text; *word;) {
		size_t len = strcspn(word, ", ");
		char *to = etcd->endpoints[etcd->n_endpoints];

		if (etcd->n_endpoints == ETCD_ENDPOINTS_MAX)
			return failure_set(failure, -EINVAL, "etcd_endpoints: more than %u",
					   ETCD_ENDPOINTS_MAX);
		(void)snprintf(to, sizeof(etcd->endpoints[0]), "%.*s", (int)MIN(len, (size_t)99),
			       word);
		if (len >= sizeof(etcd->endpoints[0]) || member_address_check(to, &why))
			return failure_set(failure, -EINVAL, "etcd_endpoints: \"%.*s\": %s",
					   (int)MIN(len, (size_t)99), word,
					   *why ? why : "an address has at most 95 characters");
		etcd->n_endpoints++;
		word += len;
		word += strspn(word, ", ");
	}
	if (!etcd->n_endpoints)
		return failure_set(failure, -EINVAL,
				   "etcd_endpoints is not set: say where etcd is, as in "
				   "etcd_endpoints = 10.0.0.1:2379,10.0.0.2:2379");
	/* Not all daemons begin at the same. */
	etcd->at = random_below((uint32_t)etcd->n_endpoints);
	return 0;
}

int etcd_new(const struct etcd_params *params, struct failure *failure, struct etcd **ret_etcd)
{
	_cleanup_(freep) struct etcd *etcd = calloc(1, sizeof(*etcd));
	int r;

	if (!etcd)
		return failure_set(failure, -ENOMEM, "etcd: out of memory");
	etcd->params = *params;
	etcd->retry.expired = on_retry;
	etcd->backoff_ms = BACKOFF_MIN_MS;
	list_init(&etcd->attempts);
	list_init(&etcd->waiting);
	r = parse_endpoints(etcd, params->endpoints, failure);
	if (!r)
		r = rpc_channel_new(params->rpc, etcd_address(etcd), ETCD_ATTEMPT_MS, params->tls,
				    failure, &etcd->channel);
	if (r)
		return r;
	*ret_etcd = TAKE_PTR(etcd);
	return 0;
}

static void on_farewell(struct rpc_request *request, int status, const char *text, const void *data,
			size_t len)
{
}

void etcd_farewell(struct etcd *etcd, const char *path, struct wire_bytes *bytes)
{
	if (etcd->channel && !etcd->lost) {
		etcd->farewell = (struct rpc_request){
			.path = path,
			.data = bytes->data,
			.len = bytes->len,
			.deadline_ms = FAREWELL_MS,
			.done = on_farewell,
		};
		rpc_request_start(etcd->channel, &etcd->farewell);
		etcd->said_farewell = true;
	}
	wire_bytes_done(bytes);
}

/* All calls have been cancelled by their users. */
struct etcd *etcd_free(struct etcd *etcd)
{
	if (!etcd)
		return NULL;
	etcd->closed = true;
	loop_timer_cancel(&etcd->retry);
	etcd_watch_stop(etcd);
	if (etcd->channel && etcd->said_farewell)
		rpc_channel_drain(etcd->channel, FAREWELL_MS);
	rpc_channel_free(etcd->channel);
	assert(list_empty(&etcd->attempts) && list_empty(&etcd->waiting));
	free(etcd);
	return NULL;
}
