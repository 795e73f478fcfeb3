/*
 * Check and Watch of the health service. A watcher hears the state at once; a timer looks for
 * changes while there is a watcher. admin.c owns the struct health.
 */
#include "admin/health.h"
#include "base/clock.h"
#include "proto/health.pb-c.h"
#include "proto/pack.h"

#include <stdio.h>

struct watcher {
	struct list link;
	struct rpc_call *call;
	int reported; /* ServingStatus; -1: nothing yet */
};

/* The daemon as a whole, or one of its services; they live and die together. */
static bool service_known(const char *service)
{
	return !service || !*service || !strcmp(service, "bps.admin.Admin") ||
	       !strcmp(service, "grpc.health.v1.Health");
}

static int status_now(const struct health *health)
{
	return health->healthy(health->user)
		       ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
		       : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
}

static int pack_status(int status, void **ret_data, size_t *ret_len)
{
	Grpc__Health__V1__HealthCheckResponse response =
		GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

	response.has_status = true;
	response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
	return error_trace(pack(&response.base, RPC_MESSAGE_MAX, ret_data, ret_len));
}

static int read_request(struct rpc_call *call, const void *data, size_t len, bool *ret_known)
{
	ProtobufCMessage *message;
	int r;

	r = unpack(&grpc__health__v1__health_check_request__descriptor, data, len, &message);
	if (r) {
		rpc_call_fail(call, r, "not a HealthCheckRequest");
		return r;
	}
	*ret_known = service_known(((Grpc__Health__V1__HealthCheckRequest *)message)->service);
	unpack_free(message);
	return 0;
}

static void on_check(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct health *health = user;
	_cleanup_(freep) void *reply = NULL;
	size_t reply_len;
	bool known;
	int r;

	if (read_request(call, data, len, &known))
		return;
	if (!known) {
		rpc_call_fail(call, -ENOENT, "no such service here");
		return;
	}
	r = pack_status(status_now(health), &reply, &reply_len);
	if (r)
		rpc_call_fail(call, r, strerror(-r));
	else
		rpc_call_reply(call, reply, reply_len);
}

static void watcher_free(struct watcher *watcher)
{
	list_remove(&watcher->link);
	free(watcher);
}

static void watcher_tell(struct watcher *watcher, int status)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;

	if (watcher->reported == status || pack_status(status, &data, &len))
		return;
	watcher->reported = status;
	rpc_call_send(watcher->call, data, len);
}

static void on_interval(struct loop_timer *timer)
{
	struct health *health = container_of(timer, struct health, timer);
	struct watcher *watcher;
	int status = status_now(health);

	if (list_empty(&health->watchers))
		return;
	list_for_each (watcher, &health->watchers, link)
		watcher_tell(watcher, status);
	(void)loop_timer_set(rpc_loop(health->rpc), timer,
			     clock_now_ns() + HEALTH_INTERVAL_MS * NSEC_PER_MSEC);
}

static void on_watch(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct health *health = user;
	struct watcher *watcher;
	_cleanup_(freep) void *reply = NULL;
	size_t reply_len;
	bool known;

	if (read_request(call, data, len, &known))
		return;
	watcher = calloc(1, sizeof(*watcher));
	if (!watcher ||
	    (!known &&
	     pack_status(GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN,
			 &reply, &reply_len))) {
		free(watcher);
		rpc_call_fail(call, -ENOMEM, "out of memory");
		return;
	}
	watcher->call = call;
	watcher->reported = -1;
	rpc_call_set_user(call, watcher);
	if (known) {
		list_push_back(&health->watchers, &watcher->link);
		on_interval(&health->timer);
	} else {
		/*
		 * Stays open, as the service's text asks: it could become known. It never will
		 * here.
		 */
		list_init(&watcher->link);
		rpc_call_send(call, reply, reply_len);
	}
}

static void on_watch_cancelled(void *user, struct rpc_call *call)
{
	struct health *health = user;

	watcher_free(rpc_call_user(call));
	if (list_empty(&health->watchers))
		loop_timer_cancel(&health->timer);
}

void health_init(struct health *health, struct rpc *rpc, bool (*healthy)(void *user), void *user)
{
	*health = (struct health){
		.rpc = rpc,
		.healthy = healthy,
		.user = user,
		.check = { .path = "/grpc.health.v1.Health/Check",
			   .doors = RPC_DOOR_PUBLIC | RPC_DOOR_OPERATORS,
			   .called = on_check,
			   .user = health },
		.watch = { .path = "/grpc.health.v1.Health/Watch",
			   .doors = RPC_DOOR_PUBLIC | RPC_DOOR_OPERATORS,
			   .called = on_watch,
			   .cancelled = on_watch_cancelled,
			   .user = health },
		.timer.expired = on_interval,
	};
	list_init(&health->watchers);
	rpc_add_method(rpc, &health->check);
	rpc_add_method(rpc, &health->watch);
}

void health_done(struct health *health)
{
	struct watcher *watcher, *next;

	loop_timer_cancel(&health->timer);
	list_for_each_safe (watcher, next, &health->watchers, link)
		watcher_free(watcher);
}
