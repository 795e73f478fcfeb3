/*
 * The coordinator's members and views: registration, leases, the key of data connections, and a
 * new view for each change. source.c makes the coordinator in the daemon that is
 * one; job.c fixes the views of jobs.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/cluster_file.h"
#include "cluster/coordinator/state.h"
#include "cluster/source.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/random.h>

#define CHANGE_DELAY_MS 50 /* changes that come together make one view */
#define KEY_LEN		32
#define COMPLAIN_NS	NSEC_PER_SEC
/* Views in one message; beside what a member of a view has, its fields in that message. */
#define HELLO_VIEWS_BYTES   (RPC_MESSAGE_MAX / 2)
#define MEMBER_FIELDS_BYTES 32
/* Fewer than a stream may have queued. */
#define HELLO_MESSAGES 48
#define LAST_CALL_MS   1000 /* longer than it takes to read what waits in the sockets */

void coordinator_reply_bytes(struct rpc_call *call, int r, struct wire_bytes *bytes)
{
	if (r)
		rpc_call_fail(call, r, strerror(-r));
	else
		rpc_call_reply(call, bytes->data, bytes->len);
	wire_bytes_done(bytes);
}

/* Views */

static bool in_view(const struct view *view, const struct view_member *info)
{
	for (size_t i = 0; view && i < view->n_members; i++)
		if (view_member_same(&view->members[i], info))
			return true;
	return false;
}

static void view_tell(struct coordinator *c)
{
	struct wire_bytes bytes = { 0 };
	struct coordinator_used used = { 0 };
	struct member *member;
	int r;

	r = coordinator_used_collect(c, &used);
	if (!r) {
		struct wire_event event = { .view = c->view,
					    .in_use = used.epochs,
					    .n_in_use = used.n };

		r = wire_pack_event(&event, &bytes);
	}
	if (r)
		log_error("coordinator: view %u cannot be told: %s", c->view->epoch, strerror(-r));
	list_for_each (member, &c->members, link)
		if (!r && member->stream && member->greeted)
			rpc_call_send(member->stream, bytes.data, bytes.len);
	wire_bytes_done(&bytes);
	coordinator_used_done(&used);
}

static void on_change(struct loop_timer *timer)
{
	struct coordinator *c = container_of(timer, struct coordinator, change);
	_cleanup_(freep) struct view_member *infos = NULL;
	struct view *view = NULL;
	struct member *member;
	size_t n = 0;
	int r = -ENOMEM;

	infos = calloc(c->n_members + 1, sizeof(*infos));
	list_for_each (member, &c->members, link)
		if (infos)
			infos[n++] = member->info;
	if (infos)
		r = view_new(c->epoch + 1, infos, n, &view);
	if (r) {
		log_error("coordinator: no view of %zu members: %s", c->n_members, strerror(-r));
		(void)loop_timer_set(c->loop, &c->change, clock_now_ns() + NSEC_PER_SEC);
		return;
	}
	c->epoch = view->epoch;
	view_unref(c->view);
	c->view = view;
	FAILPOINT("coordinator-view-made");
	view_tell(c);
	FAILPOINT("coordinator-view-told");
	coordinator_openings_try(c);
}

/* The members differ from the view: makes a new one soon. */
static void changed(struct coordinator *c)
{
	uint64_t at = clock_now_ns() + CHANGE_DELAY_MS * NSEC_PER_MSEC;

	if (!c->view)
		at = MAX(at, c->recover_until_ns);
	/* One that is armed already stays, or views would never come while members keep coming. */
	if (c->change.loop &&
	    (c->view || (c->change.at_ns >= c->recover_until_ns && c->change.at_ns <= at)))
		return;
	if (loop_timer_set(c->loop, &c->change, at))
		on_change(&c->change);
}

/* Members */

struct member *coordinator_member_find(struct coordinator *c, uint64_t id)
{
	struct member *member;

	list_for_each (member, &c->members, link)
		if (member->info.id == id)
			return member;
	return NULL;
}

/* At most so often as all that strangers can fill a log with. */
static _printf_(2, 3) void complain(struct coordinator *c, const char *format, ...)
{
	uint64_t now_ns = clock_now_ns();
	char text[512];
	va_list args;

	if (c->complained_ns && now_ns - c->complained_ns < COMPLAIN_NS)
		return;
	c->complained_ns = now_ns;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	log_warning("coordinator: %s", text);
}

struct member *coordinator_member_calling(struct coordinator *c, const struct rpc_call *call,
					  uint64_t id)
{
	struct member *member = coordinator_member_find(c, id);
	char from[RPC_PEER_MAX];

	if (!member || !member->stream)
		return NULL;
	rpc_call_peer(call, from);
	if (!strcmp(from, member->from))
		return member;
	complain(c, "%s speaks for member %s, which is connected from %s: refused", from,
		 member->info.name, member->from);
	return NULL;
}

static void member_remove(struct member *member, int status, const char *why)
{
	struct coordinator *c = member->coordinator;
	struct rpc_call *stream = TAKE_PTR(member->stream);

	if (stream && status)
		rpc_call_fail(stream, status, why);
	else if (stream)
		rpc_call_end(stream);
	loop_timer_cancel(&member->lease);
	coordinator_jobs_forget_member(c, member, why);
	list_remove(&member->link);
	c->n_members--;
	free(member);
	if (!c->closed)
		changed(c);
}

/*
 * Not all silence is the member's: this process may have been stopped, with what the member said
 * waiting in its sockets. So the loop goes round for a while first. Where it was late itself, the
 * member has a whole lease once more, since what it said may have been lost with a call that took
 * too long.
 */
static bool last_call(struct member *member)
{
	struct coordinator *c = member->coordinator;
	uint64_t now = clock_now_ns();
	uint64_t pause_ns = MIN(c->lease_ms / 3, (uint64_t)LAST_CALL_MS) * NSEC_PER_MSEC;
	bool was_late = now - member->lease.at_ns > pause_ns / 2;

	if (member->last_call && !was_late)
		return false;
	member->last_call = true;
	return !loop_timer_set(c->loop, &member->lease,
			       now + (was_late ? c->lease_ms * NSEC_PER_MSEC : pause_ns));
}

static void on_lease_over(struct loop_timer *timer)
{
	struct member *member = container_of(timer, struct member, lease);
	char text[160];

	if (last_call(member))
		return;
	(void)snprintf(text, sizeof(text), "member %s: not heard of for %llu ms, dropped",
		       member->info.name, (unsigned long long)member->coordinator->lease_ms);
	log_notice("coordinator: %s", text);
	member_remove(member, -ETIMEDOUT, text);
}

/* Arming an armed timer takes no memory, so only the first time can fail. */
static int member_heard(struct member *member)
{
	struct coordinator *c = member->coordinator;

	member->last_call = false;
	return error_trace(loop_timer_set(c->loop, &member->lease,
					  clock_now_ns() + c->lease_ms * NSEC_PER_MSEC));
}

/* A daemon may take the place of one that is not connected any more, never of a living one. */
static int make_place(struct coordinator *c, const struct view_member *info,
		      struct failure *failure)
{
	struct member *member, *next;

	list_for_each_safe (member, next, &c->members, link) {
		bool same_name = !strcmp(member->info.name, info->name);
		bool same_address = *info->address && !strcmp(member->info.address, info->address);

		if (member->info.id == info->id || (!same_name && !same_address))
			continue;
		if (member->stream)
			return failure_set(
				failure, -EEXIST,
				"%s %s is taken by another daemon (node %s, %s) that is connected: "
				"give each node its own name and address",
				same_name ? "node name" : "address",
				same_name ? info->name : info->address, member->info.name,
				*member->info.address ? member->info.address : "no address");
		log_notice("coordinator: member %s: replaced by a new daemon", member->info.name);
		member_remove(member, 0, "");
	}
	if (c->n_members >= CLUSTER_NODES_MAX && !coordinator_member_find(c, info->id))
		return failure_set(failure, -ENOBUFS, "%u members already", CLUSTER_NODES_MAX);
	return 0;
}

static int member_take(struct coordinator *c, const struct wire_register *message,
		       struct failure *failure, struct member **ret_member)
{
	struct member *member;
	int r;

	r = make_place(c, &message->member, failure);
	if (r)
		return r;
	member = coordinator_member_find(c, message->member.id);
	if (!member) {
		member = calloc(1, sizeof(*member));
		if (!member)
			return failure_set(failure, -ENOMEM, "out of memory");
		member->coordinator = c;
		member->lease.expired = on_lease_over;
		list_init(&member->holds);
		list_init(&member->openings);
		list_push_back(&c->members, &member->link);
		c->n_members++;
	} else if (member->stream) {
		rpc_call_fail(TAKE_PTR(member->stream), -ECANCELED, "registered anew");
	}
	member->info = message->member;
	member->acked = message->epoch;
	if (member_heard(member)) {
		member_remove(member, 0, "");
		return failure_set(failure, -ENOMEM, "out of memory");
	}
	*ret_member = member;
	return 0;
}

/* Of the views, the first so many fit into one message, or one does. */
static size_t views_that_fit(struct view *const *views, size_t n)
{
	size_t bytes = 0, i;

	for (i = 0; i < n; i++) {
		for (size_t k = 0; k < views[i]->n_members; k++)
			bytes += strlen(views[i]->members[k].name) +
				 strlen(views[i]->members[k].address) + MEMBER_FIELDS_BYTES;
		if (i && bytes > HELLO_VIEWS_BYTES)
			break;
	}
	return i;
}

static int send_event(const struct member *member, const struct wire_event *event)
{
	struct wire_bytes bytes = { 0 };
	int r;

	r = wire_pack_event(event, &bytes);
	if (!r)
		rpc_call_send(member->stream, bytes.data, bytes.len);
	wire_bytes_done(&bytes);
	return error_trace(r);
}

/* The old views come in as many messages as they need: a member may have told of many, and of large ones. */
static int hello_send(struct coordinator *c, struct member *member)
{
	_cleanup_(coordinator_used_done) struct coordinator_used used = { 0 };
	struct wire_event event = {
		.version = WIRE_VERSION,
		.key = { c->key, c->key_len },
		.lease_ms = (uint32_t)MIN(c->lease_ms, (uint64_t)UINT32_MAX),
	};
	size_t at = 0, n = 0;
	int r;

	r = coordinator_used_collect(c, &used);
	if (r)
		return error_trace(r);
	do {
		event.in_use = used.epochs;
		event.n_in_use = used.n;
		event.old_views.views = used.views + at;
		event.old_views.n = views_that_fit(used.views + at, used.n - at);
		at += event.old_views.n;
		if (++n == HELLO_MESSAGES && at < used.n) {
			log_warning("coordinator: member %s is told of %zu of %zu views that jobs "
				    "run in: those of others are too large",
				    member->info.name, at, used.n);
			at = used.n;
		}
		/* Not a view that it is not in: that one is about to be replaced. */
		if (at == used.n && in_view(c->view, &member->info))
			event.view = c->view;
		r = send_event(member, &event);
		event = (struct wire_event){ 0 };
	} while (!r && at < used.n);
	member->greeted = !r;
	return error_trace(r);
}

static void greet(struct coordinator *c, struct member *member)
{
	int r = c->key_len && member->stream && !member->greeted ? hello_send(c, member) : 0;

	if (r)
		rpc_call_fail(TAKE_PTR(member->stream), r, strerror(-r));
}

static void greet_all(struct coordinator *c)
{
	struct member *member;

	list_for_each (member, &c->members, link)
		greet(c, member);
}

/*
 * Members of before our start have the key that others prove too, and new ones have none. So that
 * nobody is told a second key while others still prove the first, those without one hear nothing
 * until one with one has come, or nobody is waited for any more: as long as for the first view.
 */
static void key_learn(struct coordinator *c, const struct wire_bytes *theirs)
{
	if (c->key_len || !theirs->len)
		return;
	memcpy(c->key, theirs->data, theirs->len);
	c->key_len = theirs->len;
	loop_timer_cancel(&c->key_wait);
}

static void on_key_wait_over(struct loop_timer *timer)
{
	struct coordinator *c = container_of(timer, struct coordinator, key_wait);

	if (getrandom(c->key, KEY_LEN, 0) == KEY_LEN) {
		c->key_len = KEY_LEN;
		greet_all(c);
		return;
	}
	log_error("coordinator: no random numbers for a key");
	(void)loop_timer_set(c->loop, timer, clock_now_ns() + NSEC_PER_SEC);
}

/*
 * No view is made for a while after the start: a restarted coordinator knows nothing, and must not
 * fix the view of a job that members are about to tell it of. Once the first of them has come, it
 * is known how many there were: then the view is made as soon as that many are here, and at last
 * when those that are not would have lost their lease.
 */
static void recover(struct coordinator *c, uint64_t wait_ms)
{
	c->recover_until_ns = clock_now_ns() + wait_ms * NSEC_PER_MSEC;
}

static void learn_epochs(struct coordinator *c, const struct wire_register *message)
{
	c->epoch = MAX(c->epoch, message->epoch);
	for (size_t i = 0; i < message->views.n; i++)
		c->epoch = MAX(c->epoch, message->views.views[i]->epoch);
	if (c->view)
		return;
	/*
	 * A member that has seen a view before we have made any: we were restarted, and the others
	 * come too.
	 */
	if (message->epoch && !c->recover_epoch) {
		recover(c, c->lease_ms);
		log_notice("coordinator: members of view %u come back", message->epoch);
	}
	if (message->epoch > c->recover_epoch) {
		c->recover_epoch = message->epoch;
		c->recover_n = message->n_members;
	}
	if (c->recover_epoch && c->n_members >= c->recover_n)
		recover(c, 0);
}

/*
 * An id is a digest of its owner's secret, a name is in its owner's certificate, where there are
 * any.
 */
static int check_identity(struct coordinator *c, const struct rpc_call *call,
			  const struct wire_register *message, struct failure *failure)
{
	char from[RPC_PEER_MAX];
	int r = 0;

	if (member_id(message->secret) != message->member.id)
		r = failure_set(failure, -EACCES, "node %s: the id is another daemon's",
				message->member.name);
	else if (c->has_tls && !rpc_call_is_named(call, message->member.name))
		r = failure_set(
			failure, -EINVAL,
			"node %s: its certificate is not for that name: give each node one that "
			"has its name (node) as common name or subject alternative name",
			message->member.name);
	if (!r)
		return 0;
	rpc_call_peer(call, from);
	complain(c, "%s refused: %s", from, failure->text);
	return r;
}

static int register_member(struct coordinator *c, const struct rpc_call *call,
			   const struct wire_register *message, struct failure *failure,
			   struct member **ret_member)
{
	int r;

	if (message->version_min > WIRE_VERSION || message->version < WIRE_VERSION_MIN)
		return failure_set(failure, -EPROTO,
				   "the coordinator speaks version %u to %u of the protocol, the "
				   "member %u to %u: upgrade the older",
				   WIRE_VERSION_MIN, WIRE_VERSION, message->version_min,
				   message->version);
	r = check_identity(c, call, message, failure);
	return r ? r : member_take(c, message, failure, ret_member);
}

static void on_register(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	_cleanup_(wire_register_done) struct wire_register message = { 0 };
	struct failure failure = { 0 };
	struct member *member = NULL;
	char from[RPC_PEER_MAX];
	int r;

	r = wire_unpack_register(data, len, &failure, &message);
	if (!r)
		r = register_member(c, call, &message, &failure, &member);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	rpc_call_peer(call, from);
	memcpy(member->from, from, sizeof(member->from));
	log_notice("coordinator: member %s (%s) registered from %s", member->info.name,
		   *member->info.address ? member->info.address : "no address", member->from);
	FAILPOINT("coordinator-registered");
	learn_epochs(c, &message);
	coordinator_jobs_take(c, &message, member);
	member->stream = call;
	member->greeted = false;
	rpc_call_set_user(call, member);
	key_learn(c, &message.key);
	greet_all(c);
	if (!in_view(c->view, &member->info) || c->epoch > c->view->epoch)
		changed(c);
	coordinator_openings_try(c);
}

/* Its lease runs on; it may come back in that time. */
static void on_stream_cancelled(void *user, struct rpc_call *call)
{
	struct coordinator *c = user;
	struct member *member;

	list_for_each (member, &c->members, link)
		if (member->stream == call)
			member->stream = NULL;
}

static void on_heartbeat(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	struct wire_heartbeat message;
	struct wire_heard heard = { .epoch = c->epoch };
	struct wire_bytes bytes = { 0 };
	struct failure failure = { 0 };
	struct member *member;
	bool is_news = false; /* a server has the newest view */
	int r;

	r = wire_unpack_heartbeat(data, len, &failure, &message);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	/*
	 * One whose stream broke without its noticing gets no views: it is to come anew, and so is
	 * not known.
	 */
	member = coordinator_member_calling(c, call, message.id);
	if (member) {
		(void)member_heard(member);
		is_news = c->view && member->info.roles & ROLE_SERVER &&
			  member->acked < c->view->epoch && message.epoch >= c->view->epoch;
		member->acked = MAX(member->acked, message.epoch);
		heard.known = true;
	}
	r = wire_pack_heard(&heard, &bytes);
	coordinator_reply_bytes(call, r, &bytes);
	if (is_news)
		coordinator_openings_try(c);
}

static void on_leave(void *user, struct rpc_call *call, const void *data, size_t len)
{
	struct coordinator *c = user;
	struct failure failure = { 0 };
	struct member *member;
	uint64_t id;
	int r;

	r = wire_unpack_leave(data, len, &failure, &id);
	if (r) {
		rpc_call_fail(call, r, failure.text);
		return;
	}
	member = coordinator_member_calling(c, call, id);
	if (member) {
		log_notice("coordinator: member %s left", member->info.name);
		member_remove(member, 0, "the member has left");
	}
	rpc_call_reply(call, "", 0);
}

/* Life */

static void add_methods(struct coordinator *c)
{
	static const struct rpc_method methods[N_METHODS] = {
		[METHOD_REGISTER] = { .path = "/bps.cluster.Coordinator/Register",
				      .called = on_register,
				      .cancelled = on_stream_cancelled },
		[METHOD_HEARTBEAT] = { .path = "/bps.cluster.Coordinator/Heartbeat",
				       .called = on_heartbeat },
		[METHOD_OPEN] = { .path = "/bps.cluster.Coordinator/OpenJob",
				  .called = coordinator_job_open_called,
				  .cancelled = coordinator_job_open_cancelled },
		[METHOD_CLOSE] = { .path = "/bps.cluster.Coordinator/CloseJob",
				   .called = coordinator_job_close_called },
		[METHOD_LEAVE] = { .path = "/bps.cluster.Coordinator/Leave", .called = on_leave },
	};

	for (size_t i = 0; i < N_METHODS; i++) {
		c->methods[i] = methods[i];
		c->methods[i].user = c;
		c->methods[i].doors = RPC_DOOR_CLUSTER;
		rpc_add_method(c->rpc, &c->methods[i]);
	}
}

int coordinator_new(const struct coordinator_params *params, struct failure *failure,
		    struct coordinator **ret_coordinator)
{
	_cleanup_(coordinator_freep) struct coordinator *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return failure_set(failure, -ENOMEM, "coordinator: out of memory");
	c->loop = params->loop;
	c->lease_ms = params->lease_ms;
	c->change.expired = on_change;
	c->key_wait.expired = on_key_wait_over;
	list_init(&c->members);
	coordinator_jobs_init(c);
	if (params->data_key_len > sizeof(c->key))
		return failure_set(failure, -EINVAL, "coordinator: the key has more than %zu bytes",
				   sizeof(c->key));
	if (params->data_key_len)
		memcpy(c->key, params->data_key, params->data_key_len);
	c->key_len = params->data_key_len;
	r = rpc_new(params->loop, &c->rpc);
	if (r)
		return failure_set(failure, r, "coordinator: %s", strerror(-r));
	add_methods(c);
	c->has_tls = params->tls;
	r = rpc_listen(c->rpc, params->listen, RPC_DOOR_CLUSTER, params->tls, &c->port, failure);
	if (r)
		return error_trace(r);
	if (!params->tls)
		log_warning("coordinator %s: no TLS (tls_ca), so whoever reaches it becomes a "
			    "member and gets the data key",
			    params->listen);
	recover(c, MIN(c->lease_ms, params->wait_ms));
	if (!c->key_len)
		r = loop_timer_set(c->loop, &c->key_wait, c->recover_until_ns);
	if (r)
		return failure_set(failure, r, "coordinator: %s", strerror(-r));
	c->epoch = cluster_first_epoch();
	*ret_coordinator = TAKE_PTR(c);
	return 0;
}

void coordinator_close(struct coordinator *c)
{
	struct member *member, *next;

	if (c->closed)
		return;
	c->closed = true;
	loop_timer_cancel(&c->change);
	loop_timer_cancel(&c->key_wait);
	coordinator_openings_close(c);
	list_for_each_safe (member, next, &c->members, link)
		member_remove(member, -ESHUTDOWN, "the coordinator is stopping");
	rpc_close(c->rpc);
}

struct coordinator *coordinator_free(struct coordinator *c)
{
	if (!c)
		return NULL;
	if (c->rpc)
		coordinator_close(c);
	rpc_free(c->rpc);
	coordinator_jobs_done(c);
	view_unref(c->view);
	explicit_bzero(c->key, sizeof(c->key));
	free(c);
	return NULL;
}

uint16_t coordinator_port(const struct coordinator *c)
{
	return c->port;
}
