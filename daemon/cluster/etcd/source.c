/*
 * etcd in the place of a coordinator: daemons that all do the same. Who is there: a key with a lease for each. The view: one
 * key, written over by the member that has been there longest (or, if that does not, by any), only if it is still what that
 * member has read; so there is one view for each number, whoever is cut off from whom. See job.c for jobs.
 * While etcd is away, everything goes on with the last view, but no new job can be opened.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/cluster_file.h"
#include "cluster/etcd/state.h"
#include "cluster/member.h"

#include <stdio.h>
#include <sys/random.h>

#define TXN_TIMEOUT_MS	3000
#define AGAIN_MS	50   /* after a transaction that came too late */
#define FAILED_MS	200  /* after one that could not be made */
#define CHANGE_DELAY_MS 50   /* changes that come together make one view */
#define DEPUTY_DELAY_MS 1000 /* how much longer those wait whose turn it is not */
#define FIRST_VIEW_MS \
	2000 /* longer than members of before need to come back to an etcd that has lost everything */
#define CONTEST_MS 2000 /* in which who lives answers */
#define TAKEN_MS   2000 /* between two attempts at a name that is taken */
#define KEY_LEN	   32

uint32_t etcd_epoch_here(const struct etcd_source *s)
{
	return s->cluster->view ? s->cluster->view->epoch : 0;
}

static double seconds_since(uint64_t ns)
{
	return (double)(clock_now_ns() - ns) / (double)NSEC_PER_SEC;
}

static uint32_t random_below(uint32_t limit)
{
	uint32_t random = 0;

	(void)!getrandom(&random, sizeof(random), GRND_NONBLOCK);
	return random % limit;
}

void etcd_state_key(const struct etcd_source *s, const char *what, const char *name,
		    char key[ETCD_KEY_MAX])
{
	(void)snprintf(key, ETCD_KEY_MAX, "%s%s%s", s->state, what, name);
}

void etcd_look_at(struct etcd_source *s, uint64_t at_ns)
{
	if (s->cluster->closed || (s->look.loop && s->look.at_ns <= at_ns))
		return;
	if (loop_timer_set(s->cluster->params.loop, &s->look, at_ns))
		log_error("etcd: out of memory, a change is not looked at");
}

void etcd_look_now(struct etcd_source *s)
{
	etcd_look_at(s, clock_now_ns());
}

/* Transactions */

static void on_step_done(struct etcd_call *call, int status, const char *text, const void *data,
			 size_t len)
{
	struct etcd_step *step = container_of(call, struct etcd_step, call);
	struct etcd_source *s = step->source;
	struct failure failure = { 0 };
	bool succeeded = false;
	int64_t revision = 0;

	if (!status) {
		status = etcd_unpack_txn(data, len, &failure, &revision, &succeeded);
		text = failure.text;
		if (status)
			etcd_distrust(s->etcd, status, text);
	}
	step->is_answered = !status;
	step->revision = succeeded && step->is_watched ? revision : 0;
	step->again_ns = 0;
	if (!succeeded)
		step->again_ns = clock_now_ns() + (status ? FAILED_MS + random_below(FAILED_MS)
							  : AGAIN_MS + random_below(AGAIN_MS)) *
							  NSEC_PER_MSEC;
	if (status)
		log_debug("etcd %s: not written: %s", etcd_address(s->etcd), text);
	if (step->done)
		step->done(step, succeeded);
	etcd_look_now(s);
}

void etcd_step_init(struct etcd_step *step, struct etcd_source *s,
		    void (*done)(struct etcd_step *step, bool succeeded))
{
	*step = (struct etcd_step){ .source = s, .done = done };
	step->call.path = "/etcdserverpb.KV/Txn";
	step->call.timeout_ms = TXN_TIMEOUT_MS;
	step->call.done = on_step_done;
}

bool etcd_step_ready(struct etcd_step *step)
{
	if (step->call.etcd || step->source->copy.revision < step->revision)
		return false;
	if (clock_now_ns() >= step->again_ns)
		return true;
	etcd_look_at(step->source, step->again_ns);
	return false;
}

void etcd_step_txn(struct etcd_step *step, const struct etcd_guard *guards, size_t n_guards,
		   const struct etcd_change *changes, size_t n_changes)
{
	struct etcd_source *s = step->source;
	struct wire_bytes bytes = { 0 };

	step->is_watched = false;
	for (size_t i = 0; i < n_changes; i++)
		if (!changes[i].remove && !strncmp(changes[i].key, s->state, strlen(s->state)))
			step->is_watched = true;
	if (etcd_pack_txn(guards, n_guards, changes, n_changes, &bytes)) {
		step->again_ns = clock_now_ns() + FAILED_MS * NSEC_PER_MSEC;
		etcd_look_at(s, step->again_ns);
		return;
	}
	etcd_call_start(s->etcd, &step->call, &bytes);
}

/* The lease */

static void beat_later(struct etcd_source *s)
{
	if (loop_timer_set(s->cluster->params.loop, &s->lease.beat,
			   clock_now_ns() + (uint64_t)s->lease.ttl_s * NSEC_PER_SEC / 3))
		log_error("etcd: out of memory, the lease is not renewed");
}

static void lease_lost(struct etcd_source *s)
{
	log_notice("etcd %s: our lease is over, taking another", etcd_address(s->etcd));
	loop_timer_cancel(&s->lease.beat);
	s->lease.id = 0;
	etcd_look_now(s);
}

static void on_kept_alive(struct etcd_call *call, int status, const char *text, const void *data,
			  size_t len)
{
	struct etcd_source *s = container_of(call, struct etcd_source, lease.keep_alive);
	struct failure failure;
	int64_t ttl_s = 0;

	if (status == -ENOENT) {
		lease_lost(s);
		return;
	}
	if (!status && !etcd_unpack_keep_alive(data, len, &failure, &ttl_s) && !ttl_s)
		lease_lost(s);
}

static void on_beat(struct loop_timer *timer)
{
	struct etcd_source *s = container_of(timer, struct etcd_source, lease.beat);
	struct wire_bytes bytes = { 0 };

	beat_later(s);
	if (s->lease.keep_alive.etcd || etcd_pack_keep_alive(s->lease.id, &bytes))
		return;
	s->lease.keep_alive.path = "/etcdserverpb.Lease/LeaseKeepAlive";
	s->lease.keep_alive.is_stream = true;
	s->lease.keep_alive.timeout_ms = (uint64_t)s->lease.ttl_s * 1000 / 3;
	s->lease.keep_alive.done = on_kept_alive;
	etcd_call_start(s->etcd, &s->lease.keep_alive, &bytes);
}

static void on_granted(struct etcd_call *call, int status, const char *text, const void *data,
		       size_t len)
{
	struct etcd_source *s = container_of(call, struct etcd_source, lease.grant);
	struct failure failure = { 0 };

	if (!status) {
		status = etcd_unpack_grant(data, len, &failure, &s->lease.id, &s->lease.ttl_s);
		text = failure.text;
	}
	if (status) {
		log_debug("etcd %s: no lease: %s", etcd_address(s->etcd), text);
		s->lease.grant_again_ns = clock_now_ns() + FAILED_MS * NSEC_PER_MSEC;
		etcd_look_at(s, s->lease.grant_again_ns);
		return;
	}
	s->lease.ttl_s = MIN(s->lease.ttl_s, (int64_t)86400);
	FAILPOINT("etcd-leased");
	beat_later(s);
	etcd_look_now(s);
}

static void lease_look(struct etcd_source *s)
{
	struct wire_bytes bytes = { 0 };

	if (s->lease.id || s->lease.grant.etcd)
		return;
	if (clock_now_ns() < s->lease.grant_again_ns) {
		etcd_look_at(s, s->lease.grant_again_ns);
		return;
	}
	if (etcd_pack_grant((int64_t)((s->cluster->params.lease_ms + 999) / 1000), &bytes))
		return;
	s->lease.grant.path = "/etcdserverpb.Lease/LeaseGrant";
	s->lease.grant.timeout_ms = TXN_TIMEOUT_MS;
	s->lease.grant.done = on_granted;
	etcd_call_start(s->etcd, &s->lease.grant, &bytes);
}

/* The key for data connections: whoever comes first makes one, or brings that of before. */
static void key_look(struct etcd_source *s)
{
	const struct cluster_params *params = &s->cluster->params;
	uint8_t fresh[KEY_LEN];
	char key[ETCD_KEY_MAX];
	struct etcd_change change = { .key = key };
	struct etcd_guard guard = { .condition = ETCD_VERSION_IS, .key = key };

	if (params->data_key_len) {
		if (!s->wanted.key_reported)
			params->data_key_known(params->user, params->data_key,
					       params->data_key_len);
		s->wanted.key_reported = true;
		return;
	}
	if (s->copy.key_mod || !etcd_step_ready(&s->wanted.key_step))
		return;
	if (getrandom(fresh, sizeof(fresh), 0) != sizeof(fresh))
		return;
	etcd_state_key(s, "key", "", key);
	change.value = s->wanted.reported_key.len ? s->wanted.reported_key
						  : (struct wire_bytes){ fresh, sizeof(fresh) };
	etcd_step_txn(&s->wanted.key_step, &guard, 1, &change, 1);
	explicit_bzero(fresh, sizeof(fresh));
}

static void key_tell(struct etcd_source *s)
{
	const struct cluster_params *params = &s->cluster->params;
	void *copy;

	if (params->data_key_len || !s->copy.key.len)
		return;
	if (s->wanted.reported_key.len == s->copy.key.len &&
	    !memcmp(s->wanted.reported_key.data, s->copy.key.data, s->copy.key.len))
		return;
	copy = malloc(s->copy.key.len);
	if (!copy)
		return;
	if (s->wanted.reported_key.len)
		log_notice("etcd: has another key for data connections now");
	wire_bytes_done(&s->wanted.reported_key);
	memcpy(copy, s->copy.key.data, s->copy.key.len);
	s->wanted.reported_key = (struct wire_bytes){ copy, s->copy.key.len };
	params->data_key_known(params->user, s->wanted.reported_key.data,
			       s->wanted.reported_key.len);
}

/* Who is there: our own key. */

static void member_write(struct etcd_source *s, int64_t instead_of)
{
	const struct view_member *self = &s->cluster->params.self;
	char key[ETCD_KEY_MAX], contest[ETCD_KEY_MAX];
	struct wire_bytes bytes = { 0 };
	struct etcd_guard guard = {
		.condition = instead_of ? ETCD_REVISION_IS : ETCD_VERSION_IS,
		.key = key,
		.value = instead_of,
	};
	struct etcd_change changes[] = { { .key = key, .lease = s->lease.id },
					 { .key = contest, .remove = true } };

	if (wire_pack_member(self, &bytes))
		return;
	etcd_state_key(s, "members/", self->name, key);
	etcd_state_key(s, "contest/", self->name, contest);
	changes[0].value = bytes;
	s->wanted.registering = true;
	etcd_step_txn(&s->wanted.member_step, &guard, 1, changes, 2);
	wire_bytes_done(&bytes);
}

static void member_ask(struct etcd_source *s, int64_t of)
{
	const struct view_member *self = &s->cluster->params.self;
	char key[ETCD_KEY_MAX];
	struct wire_bytes bytes = { 0 };
	struct etcd_change change = { .key = key, .lease = s->lease.id };

	if (wire_pack_member(self, &bytes))
		return;
	etcd_state_key(s, "contest/", self->name, key);
	change.value = bytes;
	s->wanted.asking = true;
	s->wanted.asked_mod = of;
	etcd_step_txn(&s->wanted.member_step, NULL, 0, &change, 1);
	wire_bytes_done(&bytes);
}

static void on_member_step(struct etcd_step *step, bool succeeded)
{
	struct etcd_source *s = step->source;

	if (s->wanted.asking && succeeded)
		s->wanted.asked_until_ns = clock_now_ns() + CONTEST_MS * NSEC_PER_MSEC;
	else if (s->wanted.asking)
		s->wanted.asked_mod = 0;
	if (s->wanted.answering_mod && succeeded)
		s->wanted.answered_mod = s->wanted.answering_mod;
	if (s->wanted.registering && succeeded)
		FAILPOINT("etcd-registered");
	s->wanted.asking = s->wanted.registering = false;
	s->wanted.answering_mod = 0;
}

static void taken(struct etcd_source *s, const char *what, const char *name,
		  const struct etcd_member *by)
{
	if (!s->wanted.taken_since_ns)
		log_warning("etcd: %s %s is taken by another daemon (node %s, %s) that lives: give "
			    "each node its own name and address",
			    what, name, by->name,
			    *by->info.address ? by->info.address : "no address");
	s->wanted.taken_since_ns = clock_now_ns();
	s->wanted.asked_mod = 0;
	s->wanted.member_step.again_ns = s->wanted.taken_since_ns + TAKEN_MS * NSEC_PER_MSEC;
	etcd_look_at(s, s->wanted.member_step.again_ns);
}

/* Another daemon has our name: a dead one, most often this one's forerunner, or one that lives. It is asked. */
static void member_contest(struct etcd_source *s, const struct etcd_member *holder)
{
	if (!s->wanted.asked_mod)
		member_ask(s, holder->mod_revision);
	else if (s->wanted.asked_mod != holder->mod_revision)
		taken(s, "node name", holder->name, holder);
	else if (clock_now_ns() >= s->wanted.asked_until_ns)
		member_write(s, holder->mod_revision);
	else
		etcd_look_at(s, s->wanted.asked_until_ns);
}

static const struct etcd_member *same_address(const struct etcd_source *s)
{
	const struct view_member *self = &s->cluster->params.self;
	struct etcd_member *member;

	list_for_each (member, &s->copy.members, link)
		if (member->info.roles && *self->address && strcmp(member->name, self->name) &&
		    !strcmp(member->info.address, self->address))
			return member;
	return NULL;
}

static bool is_own(const struct etcd_source *s, const struct etcd_member *member)
{
	return member && member->info.roles && member->info.id == s->cluster->params.self.id;
}

static void member_look(struct etcd_source *s)
{
	const struct view_member *self = &s->cluster->params.self;
	const struct etcd_member *member = etcd_member_find(s, self->name);
	const struct etcd_member *neighbour = same_address(s);

	if (!s->lease.id || !etcd_step_ready(&s->wanted.member_step))
		return;
	if (is_own(s, member) && member->lease == s->lease.id) {
		s->wanted.asked_mod = 0;
		s->wanted.taken_since_ns = 0;
		if (!s->copy.contest_id || s->copy.contest_id == self->id ||
		    s->copy.contest_mod == s->wanted.answered_mod)
			return;
		s->wanted.answering_mod = s->copy.contest_mod; /* by writing the same again */
		member_write(s, member->mod_revision);
	} else if (is_own(s, member)) {
		member_write(s, member->mod_revision);
	} else if (member) {
		member_contest(s, member);
	} else if (neighbour) {
		taken(s, "address", self->address, neighbour);
	} else {
		member_write(s, 0);
	}
}

/* The view */

static int members_view(struct etcd_source *s, uint32_t epoch, struct view **ret_view)
{
	_cleanup_(freep) struct view_member *infos = calloc(s->copy.n_members + 1, sizeof(*infos));
	struct etcd_member *member;
	size_t n = 0;

	if (!infos)
		return error_origin(-ENOMEM);
	list_for_each (member, &s->copy.members, link)
		if (member->info.roles && n < CLUSTER_NODES_MAX)
			infos[n++] = member->info;
	return error_trace(view_new(epoch, infos, n, ret_view));
}

/* Not what etcd has, or not what this daemon has seen: an etcd that has lost its data, or is restored from a backup. */
static bool view_differs(struct etcd_source *s)
{
	_cleanup_(view_unrefp) struct view *view = NULL;
	uint32_t here = etcd_epoch_here(s);

	if (!s->copy.view || s->copy.view->epoch < here)
		return true;
	if (s->copy.view->epoch == here && s->cluster->view &&
	    !view_same(s->copy.view, s->cluster->view))
		return true;
	if (members_view(s, 1, &view))
		return false;
	return !view_same(view, s->copy.view);
}

static bool is_oldest(const struct etcd_source *s, const struct etcd_member *self)
{
	struct etcd_member *member;

	list_for_each (member, &s->copy.members, link)
		if (member->info.roles && member->create_revision < self->create_revision)
			return false;
	return true;
}

static void view_write(struct etcd_source *s)
{
	_cleanup_(view_unrefp) struct view *view = NULL;
	uint32_t epoch =
		MAX(s->copy.view ? s->copy.view->epoch : cluster_first_epoch(), etcd_epoch_here(s));
	struct wire_bytes bytes = { 0 };
	char key[ETCD_KEY_MAX];
	struct etcd_guard guard = {
		.condition = s->copy.view_mod ? ETCD_REVISION_IS : ETCD_VERSION_IS,
		.key = key,
		.value = s->copy.view_mod,
	};
	struct etcd_change change = { .key = key };

	if (epoch >= WIRE_EPOCH_MAX || members_view(s, epoch + 1, &view) ||
	    wire_pack_view(view, &bytes)) {
		log_error("etcd: no view after %u can be made", epoch);
		return;
	}
	etcd_state_key(s, "view", "", key);
	change.value = bytes;
	etcd_step_txn(&s->wanted.view_step, &guard, 1, &change, 1);
	wire_bytes_done(&bytes);
	FAILPOINT("etcd-view-written");
}

static uint64_t view_due_ns(const struct etcd_source *s, const struct etcd_member *self)
{
	const uint64_t lease_ms = s->cluster->params.lease_ms;
	uint64_t delay_ms = CHANGE_DELAY_MS;

	if (!s->copy.view_mod)
		delay_ms = MIN(lease_ms, (uint64_t)FIRST_VIEW_MS);
	if (!is_oldest(s, self))
		delay_ms += DEPUTY_DELAY_MS + self->create_revision % 8 * 100;
	return s->wanted.differs_since_ns + delay_ms * NSEC_PER_MSEC;
}

static void view_take(struct etcd_source *s)
{
	struct failure failure = { 0 };
	bool has_us = false;

	if (!s->copy.view || s->copy.view->epoch <= etcd_epoch_here(s))
		return;
	/* One that we are not in is about to be replaced. */
	for (size_t i = 0; i < s->copy.view->n_members; i++)
		has_us |= s->copy.view->members[i].is_self;
	if (!has_us)
		return;
	if (cluster_set_view(s->cluster, s->copy.view, &failure)) {
		log_error("etcd: %s", failure.text);
		return;
	}
	etcd_claims_check(s);
}

static void view_look(struct etcd_source *s)
{
	const struct etcd_member *self = etcd_member_find(s, s->cluster->params.self.name);
	bool differed = s->wanted.differs;

	view_take(s);
	if (s->wanted.members_changed) {
		s->wanted.members_changed = false;
		s->wanted.differs = view_differs(s);
		if (s->wanted.differs && !differed)
			s->wanted.differs_since_ns = clock_now_ns();
	}
	if (!s->wanted.differs || !is_own(s, self) || !etcd_step_ready(&s->wanted.view_step))
		return;
	if (clock_now_ns() >= view_due_ns(s, self))
		view_write(s);
	else
		etcd_look_at(s, view_due_ns(s, self));
}

struct view *etcd_settled_view(const struct etcd_source *s)
{
	struct view *view = s->cluster->view;

	if (!view || !s->copy.view || s->wanted.differs || s->copy.view->epoch != view->epoch)
		return NULL;
	return view;
}

/* All of it */

static void on_look(struct loop_timer *timer)
{
	struct etcd_source *s = container_of(timer, struct etcd_source, look);

	if (!s->copy.synced)
		return;
	key_look(s);
	key_tell(s);
	if (s->cluster->closed)
		return;
	lease_look(s);
	member_look(s);
	view_look(s);
	if (s->cluster->closed)
		return;
	etcd_claims_look(s);
	etcd_jobs_look(s);
}

/* Loss and return */

static void on_lost(void *user, const char *why)
{
	struct etcd_source *s = user;

	s->gone_since_ns = clock_now_ns();
	if (s->cluster->view)
		log_warning("etcd %s: lost, going on with view %u: %s",
			    s->cluster->params.etcd_endpoints, etcd_epoch_here(s), why);
	else
		log_warning("etcd %s: not there yet, trying again: %s",
			    s->cluster->params.etcd_endpoints, why);
}

static void on_there_again(void *user)
{
	struct etcd_source *s = user;

	log_notice("etcd %s: there again after %.1f s", etcd_address(s->etcd),
		   seconds_since(s->gone_since_ns));
	s->gone_since_ns = 0;
}

static void on_watch_ended(void *user, int status, const char *why)
{
	struct etcd_source *s = user;

	log_debug("etcd %s: the watch has ended: %s", etcd_address(s->etcd), why);
	etcd_sync_start(s);
}

static void on_watched(void *user, const void *data, size_t len)
{
	etcd_sync_watched(user, data, len);
}

/* Life */

static int set_prefix(struct etcd_source *s, const char *prefix, struct failure *failure)
{
	size_t len = strlen(prefix);

	while (len && prefix[len - 1] == '/')
		len--;
	if (!len || len > 127)
		return failure_set(failure, -EINVAL,
				   "etcd_prefix \"%s\": 1 to 127 characters, not all of them '/'",
				   prefix);
	(void)snprintf(s->state, sizeof(s->state), "%.*s/state/", (int)len, prefix);
	(void)snprintf(s->state_end, sizeof(s->state_end), "%.*s/state0", (int)len, prefix);
	(void)snprintf(s->holds, sizeof(s->holds), "%.*s/holds/", (int)len, prefix);
	return 0;
}

static int etcd_start(struct cluster *cluster, struct failure *failure)
{
	const struct cluster_params *params = &cluster->params;
	const struct rpc_tls files = { params->tls_ca, params->tls_cert, params->tls_key };
	struct etcd_params etcd = {
		.loop = params->loop,
		.rpc = params->rpc,
		.endpoints = params->etcd_endpoints ? params->etcd_endpoints : "",
		.tls = params->tls_ca || params->tls_cert || params->tls_key ? &files : NULL,
		.lost = on_lost,
		.there_again = on_there_again,
		.watch_ended = on_watch_ended,
		.watched = on_watched,
	};
	struct etcd_source *s = calloc(1, sizeof(*s));
	const char *why;
	int r;

	if (!s)
		return failure_set(failure, -ENOMEM, "cluster: out of memory");
	cluster->source = s;
	s->cluster = cluster;
	s->look.expired = on_look;
	s->lease.beat.expired = on_beat;
	s->wanted.members_changed = true;
	list_init(&s->copy.members);
	list_init(&s->copy.claims);
	etcd_step_init(&s->wanted.key_step, s, NULL);
	etcd_step_init(&s->wanted.member_step, s, on_member_step);
	etcd_step_init(&s->wanted.view_step, s, NULL);
	etcd.user = s;
	if (member_check(&params->self, &why))
		return failure_set(failure, -EINVAL, "node %s: %s", params->self.name, why);
	r = set_prefix(s, params->etcd_prefix ? params->etcd_prefix : "/bps", failure);
	if (!r)
		r = etcd_new(&etcd, failure, &s->etcd);
	if (!r)
		etcd_sync_start(s);
	return r;
}

static void etcd_close(struct cluster *cluster)
{
	struct etcd_source *s = cluster->source;
	struct wire_bytes bytes = { 0 };

	if (!s || !s->etcd)
		return;
	loop_timer_cancel(&s->look);
	loop_timer_cancel(&s->lease.beat);
	etcd_sync_stop(s);
	etcd_call_cancel(&s->lease.grant);
	etcd_call_cancel(&s->lease.keep_alive);
	etcd_call_cancel(&s->wanted.key_step.call);
	etcd_call_cancel(&s->wanted.member_step.call);
	etcd_call_cancel(&s->wanted.view_step.call);
	/* All that hangs on it goes at once. */
	if (s->lease.id && !etcd_pack_revoke(s->lease.id, &bytes))
		etcd_farewell(s->etcd, "/etcdserverpb.Lease/LeaseRevoke", &bytes);
}

static void etcd_source_free(struct cluster *cluster)
{
	struct etcd_source *s = cluster->source;

	if (!s)
		return;
	etcd_jobs_free(s);
	etcd_copy_free(s);
	etcd_free(s->etcd);
	if (s->wanted.reported_key.data)
		explicit_bzero(s->wanted.reported_key.data, s->wanted.reported_key.len);
	wire_bytes_done(&s->wanted.reported_key);
	cluster->source = NULL;
	free(s);
}

static void etcd_explain(const struct cluster_job *job, struct failure *failure)
{
	const struct etcd_source *s = job->cluster->source;
	const struct etcd_claim *claim = etcd_claim_find(s, job->name, job->owner);
	const struct view_member *home =
		claim && claim->view ? view_home(claim->view, job->name) : NULL;
	const char *why;
	uint64_t failing_since_ns = etcd_failing_since_ns(s->etcd, &why);
	char servers[256];

	if (failing_since_ns) {
		(void)failure_set(failure, -ETIMEDOUT,
				  "job %s: etcd (%s) has been gone for %.1f s: %s", job->name,
				  job->cluster->params.etcd_endpoints,
				  seconds_since(failing_since_ns), why);
		return;
	}
	if (home && !claim->accepted) {
		(void)failure_set(failure, -ETIMEDOUT,
				  "job %s: server %s has not taken over view %u", job->name,
				  home->name, claim->view->epoch);
		return;
	}
	cluster_describe_servers(job->cluster->view, cluster_job_min_servers(job), servers,
				 sizeof(servers));
	(void)failure_set(failure, -ETIMEDOUT, "job %s: no view by etcd in time; %s", job->name,
			  servers);
}

const struct source_ops source_etcd = {
	.start = etcd_start,
	.close = etcd_close,
	.free = etcd_source_free,
	.want = etcd_want,
	.drop = etcd_drop,
	.explain = etcd_explain,
};
