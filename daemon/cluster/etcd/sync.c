/*
 * The copy of what etcd holds. It is read whole, at one revision, then followed by a watch from the next. Whatever ends the
 * watch (the endpoint lost, the revision compacted, etcd restored from a backup) is mended the same way: read it again.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "cluster/etcd/state.h"

#include <stdio.h>

#define SYNC_AGAIN_MS	200
#define SYNC_TIMEOUT_MS 5000

/* Each page must fit into a message: views are large, members are small. */
static const struct {
	const char *what;
	int64_t limit;
} stages[] = {
	{ "contest/", 1024 }, { "jobs/", 4 }, { "key", 1 }, { "members/", 1024 }, { "view", 1 },
};

struct etcd_member *etcd_member_find(const struct etcd_source *s, const char *name)
{
	struct etcd_member *member;

	list_for_each (member, &s->copy.members, link)
		if (!strcmp(member->name, name))
			return member;
	return NULL;
}

struct etcd_claim *etcd_claim_find(const struct etcd_source *s, const char *job, uint64_t owner)
{
	struct etcd_claim *claim;

	list_for_each (claim, &s->copy.claims, link)
		if (claim->owner == owner && !strcmp(claim->job, job))
			return claim;
	return NULL;
}

/* Parts of the copy */

static void complain(const struct etcd_source *s, const struct etcd_kv *kv, const char *why)
{
	log_warning("etcd %s: %.*s: %s: ignored", etcd_address(s->etcd),
		    (int)MIN(kv->key_len, (size_t)128), kv->key, why);
}

static void member_free(struct etcd_source *s, struct etcd_member *member)
{
	list_remove(&member->link);
	s->copy.n_members--;
	s->wanted.members_changed = true;
	free(member);
}

static void member_put(struct etcd_source *s, const char *name, const struct etcd_kv *kv)
{
	struct etcd_member *member = etcd_member_find(s, name);
	struct failure failure = { 0 };

	if (!member) {
		member = calloc(1, sizeof(*member));
		if (!member) {
			complain(s, kv, "out of memory");
			return;
		}
		(void)snprintf(member->name, sizeof(member->name), "%s", name);
		list_push_back(&s->copy.members, &member->link);
		s->copy.n_members++;
	}
	member->info = (struct view_member){ 0 };
	if (wire_unpack_member(kv->value, kv->value_len, &failure, &member->info))
		complain(s, kv, failure.text);
	if (strcmp(member->info.name, name))
		member->info.roles = 0;
	member->info.is_self = member->info.id == s->cluster->params.self.id;
	member->create_revision = kv->create_revision;
	member->mod_revision = kv->mod_revision;
	member->lease = kv->lease;
	member->seen = true;
	s->wanted.members_changed = true;
}

static void view_put(struct etcd_source *s, const struct etcd_kv *kv)
{
	struct failure failure = { 0 };

	s->copy.view = view_unref(s->copy.view);
	if (wire_unpack_view(kv->value, kv->value_len, s->cluster->params.self.id, &failure,
			     &s->copy.view))
		complain(s, kv, failure.text);
	s->copy.view_mod = kv->mod_revision;
	s->copy.view_seen = s->wanted.members_changed = true;
	FAILPOINT("etcd-view-seen");
}

static void key_put(struct etcd_source *s, const struct etcd_kv *kv)
{
	void *copy = NULL;

	wire_bytes_done(&s->copy.key);
	if (kv->value_len && kv->value_len <= WIRE_KEY_MAX)
		copy = malloc(kv->value_len);
	if (copy) {
		memcpy(copy, kv->value, kv->value_len);
		s->copy.key = (struct wire_bytes){ copy, kv->value_len };
	} else {
		complain(s, kv, "not a key for data connections");
	}
	s->copy.key_mod = kv->mod_revision;
	s->copy.key_seen = true;
}

static void contest_put(struct etcd_source *s, const struct etcd_kv *kv)
{
	struct view_member member;
	struct failure failure = { 0 };

	s->copy.contest_id = 0;
	s->copy.contest_mod = kv->mod_revision;
	s->copy.contest_seen = true;
	if (wire_unpack_member(kv->value, kv->value_len, &failure, &member))
		complain(s, kv, failure.text);
	else
		s->copy.contest_id = member.id;
}

static void claim_free(struct etcd_claim *claim)
{
	claim->source->copy.claims_changed = true;
	etcd_call_cancel(&claim->step.call);
	list_remove(&claim->link);
	view_unref(claim->view);
	free(claim);
}

static void claim_put(struct etcd_source *s, const char *job, uint64_t owner,
		      const struct etcd_kv *kv)
{
	struct etcd_claim *claim = etcd_claim_find(s, job, owner);
	struct failure failure = { 0 };

	if (!claim) {
		claim = calloc(1, sizeof(*claim));
		if (!claim) {
			complain(s, kv, "out of memory");
			return;
		}
		claim->source = s;
		claim->owner = owner;
		(void)snprintf(claim->job, sizeof(claim->job), "%s", job);
		etcd_claim_init(claim);
		list_push_back(&s->copy.claims, &claim->link);
	}
	claim->view = view_unref(claim->view);
	claim->accepted = false;
	if (wire_unpack_claim(kv->value, kv->value_len, s->cluster->params.self.id, &failure,
			      &claim->view, &claim->accepted))
		complain(s, kv, failure.text);
	claim->mod_revision = kv->mod_revision;
	claim->seen = true;
	s->copy.claims_changed = true;
	FAILPOINT("etcd-claim-seen");
}

/* Which part of the copy a key is; name: what follows its kind; owner: of a claim. */
enum part { PART_NONE, PART_KEY, PART_VIEW, PART_MEMBER, PART_CONTEST, PART_CLAIM };

static bool starts(const char *key, size_t len, const char *with)
{
	return len > strlen(with) && !memcmp(key, with, strlen(with));
}

#define OWNER_LEN 17 /* of a claim's key: a slash and 16 lower-case hexadecimal digits */

static bool read_owner(const char *text, uint64_t *ret_owner)
{
	uint64_t owner = 0;

	if (*text++ != '/')
		return false;
	for (size_t i = 0; i < OWNER_LEN - 1; i++) {
		char c = text[i];

		if ((c < '0' || c > '9') && (c < 'a' || c > 'f'))
			return false;
		owner = owner << 4 | (uint64_t)(c <= '9' ? c - '0' : c - 'a' + 10);
	}
	*ret_owner = owner;
	return true;
}

static enum part part_of(const struct etcd_source *s, const struct etcd_kv *kv, char name[64],
			 uint64_t *ret_owner)
{
	size_t skip = strlen(s->state), len = kv->key_len - MIN(skip, kv->key_len);
	const char *key = kv->key + kv->key_len - len;
	enum part part = PART_NONE;

	*name = 0;
	if (kv->key_len < skip || memcmp(kv->key, s->state, skip) || memchr(key, 0, len))
		return PART_NONE;
	if (len == 3 && !memcmp(key, "key", 3))
		return PART_KEY;
	if (len == 4 && !memcmp(key, "view", 4))
		return PART_VIEW;
	if (starts(key, len, "jobs/"))
		part = PART_CLAIM, key += 5, len -= 5;
	else if (starts(key, len, "members/"))
		part = PART_MEMBER, key += 8, len -= 8;
	else if (starts(key, len, "contest/"))
		part = PART_CONTEST, key += 8, len -= 8;
	if (part == PART_CLAIM) {
		if (len <= OWNER_LEN || !read_owner(key + len - OWNER_LEN, ret_owner))
			return PART_NONE;
		len -= OWNER_LEN;
	}
	/* A name of a job that holds a slash would be taken for another's holds. */
	if (part == PART_NONE || len >= 64 || memchr(key, '/', len))
		return PART_NONE;
	memcpy(name, key, len);
	name[len] = 0;
	return part;
}

static void copy_put(struct etcd_source *s, const struct etcd_kv *kv)
{
	uint64_t owner;
	char name[64];

	switch (part_of(s, kv, name, &owner)) {
	case PART_KEY:
		key_put(s, kv);
		break;
	case PART_VIEW:
		view_put(s, kv);
		break;
	case PART_MEMBER:
		member_put(s, name, kv);
		break;
	case PART_CONTEST:
		if (!strcmp(name, s->cluster->params.self.name))
			contest_put(s, kv);
		break;
	case PART_CLAIM:
		claim_put(s, name, owner, kv);
		break;
	case PART_NONE:
		complain(s, kv, "not a key of ours");
		break;
	}
}

static void view_gone(struct etcd_source *s)
{
	s->copy.view = view_unref(s->copy.view);
	s->copy.view_mod = 0;
	s->wanted.members_changed = true;
}

static void key_gone(struct etcd_source *s)
{
	wire_bytes_done(&s->copy.key);
	s->copy.key_mod = 0;
}

static void copy_remove(struct etcd_source *s, const struct etcd_kv *kv)
{
	struct etcd_member *member;
	struct etcd_claim *claim;
	uint64_t owner;
	char name[64];

	switch (part_of(s, kv, name, &owner)) {
	case PART_KEY:
		key_gone(s);
		break;
	case PART_VIEW:
		view_gone(s);
		break;
	case PART_MEMBER:
		member = etcd_member_find(s, name);
		if (member)
			member_free(s, member);
		break;
	case PART_CONTEST:
		if (!strcmp(name, s->cluster->params.self.name))
			s->copy.contest_id = 0;
		break;
	case PART_CLAIM:
		claim = etcd_claim_find(s, name, owner);
		if (claim)
			claim_free(claim);
		break;
	case PART_NONE:
		break;
	}
}

/* Reading it whole */

static void range_next(struct etcd_source *s, const char *from);

static void on_sync_again(struct loop_timer *timer)
{
	etcd_sync_start(container_of(timer, struct etcd_source, copy.sync_again));
}

static void sync_failed(struct etcd_source *s, int status, const char *text)
{
	struct failure failure = { 0 };

	/* Nothing that a retry could mend, said before this daemon could ever work. */
	if (!s->copy.was_synced && (status == -EINVAL || status == -EACCES || status == -ENOSYS ||
				    status == -EKEYREJECTED)) {
		(void)failure_set(&failure, status, "etcd %s: %s", etcd_address(s->etcd), text);
		s->cluster->params.failed(s->cluster->params.user, &failure);
		return;
	}
	log_debug("etcd %s: cannot be read: %s", etcd_address(s->etcd), text);
	s->copy.sync_again.expired = on_sync_again;
	if (loop_timer_set(s->cluster->params.loop, &s->copy.sync_again,
			   clock_now_ns() + SYNC_AGAIN_MS * NSEC_PER_MSEC))
		log_error("etcd: out of memory, no more attempts");
}

static void mark_unseen(struct etcd_source *s)
{
	struct etcd_member *member;
	struct etcd_claim *claim;

	list_for_each (member, &s->copy.members, link)
		member->seen = false;
	list_for_each (claim, &s->copy.claims, link)
		claim->seen = false;
	s->copy.view_seen = s->copy.key_seen = s->copy.contest_seen = false;
}

static void remove_unseen(struct etcd_source *s)
{
	struct etcd_member *member, *next_member;
	struct etcd_claim *claim, *next_claim;

	list_for_each_safe (member, next_member, &s->copy.members, link)
		if (!member->seen)
			member_free(s, member);
	list_for_each_safe (claim, next_claim, &s->copy.claims, link) {
		if (!claim->seen)
			claim_free(claim);
	}
	etcd_claims_check(s);
	if (!s->copy.view_seen)
		view_gone(s);
	if (!s->copy.key_seen)
		key_gone(s);
	if (!s->copy.contest_seen)
		s->copy.contest_id = 0;
}

static void sync_done(struct etcd_source *s)
{
	struct wire_bytes bytes = { 0 };

	remove_unseen(s);
	s->copy.revision = s->copy.range_revision;
	s->copy.synced = s->copy.was_synced = true;
	FAILPOINT("etcd-synced");
	if (etcd_pack_watch(s->state, s->state_end, s->copy.revision + 1, &bytes)) {
		s->copy.synced = false;
		sync_failed(s, -ENOMEM, "out of memory");
		return;
	}
	etcd_watch_start(s->etcd, &bytes);
	etcd_look_now(s);
}

static void on_range(struct etcd_call *call, int status, const char *text, const void *data,
		     size_t len)
{
	struct etcd_source *s = container_of(call, struct etcd_source, copy.range);
	_cleanup_(etcd_range_done) struct etcd_range range = { 0 };
	struct failure failure = { 0 };
	char next[ETCD_KEY_MAX];

	if (!status) {
		status = etcd_unpack_range(data, len, &failure, &range);
		text = failure.text;
		if (status)
			etcd_distrust(s->etcd, status, text);
	}
	if (status) {
		sync_failed(s, status, text);
		return;
	}
	if (!s->copy.range_revision)
		s->copy.range_revision = range.revision;
	for (size_t i = 0; i < range.n_kvs; i++)
		copy_put(s, &range.kvs[i]);
	if (range.more && range.n_kvs) {
		const struct etcd_kv *last = &range.kvs[range.n_kvs - 1];

		/* What follows it. Names have no byte below that. */
		(void)snprintf(next, sizeof(next), "%.*s\001",
			       (int)MIN(last->key_len, sizeof(next) - 2), last->key);
		range_next(s, next);
	} else if (++s->copy.stage < ARRAY_SIZE(stages)) {
		range_next(s, NULL);
	} else {
		sync_done(s);
	}
}

/* from: NULL for the beginning of the stage. */
static void range_next(struct etcd_source *s, const char *from)
{
	struct wire_bytes bytes = { 0 };
	char key[ETCD_KEY_MAX], end[ETCD_KEY_MAX];
	size_t len;

	etcd_state_key(s, stages[s->copy.stage].what, "", key);
	memcpy(end, key, sizeof(end));
	len = strlen(end);
	end[len - 1]++;
	if (etcd_pack_range(from ? from : key, end, stages[s->copy.stage].limit,
			    s->copy.range_revision, &bytes)) {
		sync_failed(s, -ENOMEM, "out of memory");
		return;
	}
	s->copy.range.path = "/etcdserverpb.KV/Range";
	s->copy.range.timeout_ms = SYNC_TIMEOUT_MS;
	s->copy.range.done = on_range;
	etcd_call_start(s->etcd, &s->copy.range, &bytes);
}

void etcd_sync_start(struct etcd_source *s)
{
	if (s->cluster->closed)
		return;
	etcd_sync_stop(s);
	s->copy.stage = 0;
	s->copy.range_revision = 0;
	mark_unseen(s);
	range_next(s, NULL);
}

void etcd_sync_stop(struct etcd_source *s)
{
	s->copy.synced = false;
	loop_timer_cancel(&s->copy.sync_again);
	etcd_call_cancel(&s->copy.range);
	etcd_watch_stop(s->etcd);
}

/* Following it */

void etcd_sync_watched(struct etcd_source *s, const void *data, size_t len)
{
	_cleanup_(etcd_watch_done) struct etcd_watch watch = { 0 };
	struct failure failure = { 0 };
	int r;

	if (!s->copy.synced)
		return;
	r = etcd_unpack_watch(data, len, &failure, &watch);
	if (r) {
		etcd_distrust(s->etcd, r, failure.text);
		etcd_sync_start(s);
		return;
	}
	if (watch.canceled) {
		log_debug("etcd %s: the watch is canceled, compacted up to %lld: %s",
			  etcd_address(s->etcd), (long long)watch.compact_revision, watch.reason);
		etcd_sync_stop(s);
		sync_failed(s, -ECANCELED, watch.reason);
		return;
	}
	for (size_t i = 0; i < watch.n_events; i++) {
		struct etcd_event *event = &watch.events[i];

		if (event->removed)
			copy_remove(s, &event->kv);
		else
			copy_put(s, &event->kv);
		if (!watch.fragment)
			s->copy.revision = MAX(s->copy.revision, event->kv.mod_revision);
	}
	if (watch.n_events && !watch.fragment)
		etcd_look_now(s);
}

void etcd_copy_free(struct etcd_source *s)
{
	struct etcd_member *member, *next_member;
	struct etcd_claim *claim, *next_claim;

	list_for_each_safe (member, next_member, &s->copy.members, link)
		member_free(s, member);
	list_for_each_safe (claim, next_claim, &s->copy.claims, link)
		claim_free(claim);
	view_gone(s);
	if (s->copy.key.data)
		explicit_bzero(s->copy.key.data, s->copy.key.len);
	key_gone(s);
}
