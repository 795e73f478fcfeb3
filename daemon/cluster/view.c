/*
 * Views: immutable, counted lists of members. What must be the same on every node that has the same list (digest, home
 * of a job) is worked out from names and addresses alone, by a hash with no seed of the process.
 */
#include "base/error.h"
#include "cluster/cluster.h"
#include "proto/text.h"
#include <stdio.h>

/* FNV-1a, finished by the mixer of SplitMix64. Names in a view come from the operator, not from an adversary. */
#define HASH_START 0xcbf29ce484222325ull
#define HASH_PRIME 0x100000001b3ull

static uint64_t hash_add(uint64_t hash, const void *data, size_t len)
{
	const uint8_t *bytes = data;

	for (size_t i = 0; i < len; i++)
		hash = (hash ^ bytes[i]) * HASH_PRIME;
	return hash;
}

/* With its NUL, so that "ab", "c" and "a", "bc" differ. */
static uint64_t hash_add_string(uint64_t hash, const char *text)
{
	return hash_add(hash, text, strlen(text) + 1);
}

static uint64_t hash_finish(uint64_t hash)
{
	hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
	hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
	return hash ^ (hash >> 31);
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct view_member *)a)->name, ((const struct view_member *)b)->name);
}

static bool member_valid(const struct view_member *member)
{
	return *member->name && memchr(member->name, 0, sizeof(member->name)) &&
	       memchr(member->address, 0, sizeof(member->address)) &&
	       text_is_plain(member->name, strlen(member->name)) &&
	       text_is_plain(member->address, strlen(member->address));
}

int view_new(uint32_t epoch, const struct view_member *members, size_t n_members,
	     struct view **ret_view)
{
	_cleanup_(freep) struct view *view = NULL;
	size_t len;

	if (!epoch || MUL_OVERFLOW(n_members, sizeof(*members), &len) ||
	    ADD_OVERFLOW(len, sizeof(*view), &len))
		return error_origin(-EINVAL);
	view = calloc(1, len);
	if (!view)
		return error_origin(-ENOMEM);

	atomic_store_explicit(&view->refs, 1, memory_order_relaxed);
	view->epoch = epoch;
	view->n_members = n_members;
	for (size_t i = 0; i < n_members; i++) {
		if (!member_valid(&members[i]))
			return error_origin(-EINVAL);
		view->members[i] = members[i];
	}
	qsort(view->members, n_members, sizeof(*members), by_name);
	for (size_t i = 1; i < n_members; i++) {
		if (!strcmp(view->members[i - 1].name, view->members[i].name))
			return error_origin(-EEXIST);
	}
	*ret_view = TAKE_PTR(view);
	return 0;
}

bool view_member_same(const struct view_member *a, const struct view_member *b)
{
	return a->id == b->id && !strcmp(a->name, b->name) && !strcmp(a->address, b->address) &&
	       a->roles == b->roles && a->bandwidth_mbps == b->bandwidth_mbps;
}

struct view *view_ref(struct view *view)
{
	_unused_ uint32_t refs = atomic_fetch_add_explicit(&view->refs, 1, memory_order_relaxed);

	assert(refs > 0);
	return view;
}

struct view *view_unref(struct view *view)
{
	if (view && atomic_fetch_sub_explicit(&view->refs, 1, memory_order_acq_rel) == 1)
		free(view);
	return NULL;
}

bool view_same(const struct view *a, const struct view *b)
{
	if (a->n_members != b->n_members)
		return false;
	for (size_t i = 0; i < a->n_members; i++)
		if (!view_member_same(&a->members[i], &b->members[i]))
			return false;
	return true;
}

uint64_t view_server_digest(const struct view *view)
{
	uint64_t hash = HASH_START;

	for (size_t i = 0; i < view->n_members; i++) {
		if (!(view->members[i].roles & ROLE_SERVER))
			continue;
		hash = hash_add_string(hash, view->members[i].name);
		hash = hash_add_string(hash, view->members[i].address);
	}
	return hash_finish(hash);
}

const struct view_member *view_find(const struct view *view, const char *name)
{
	struct view_member member;

	(void)snprintf(member.name, sizeof(member.name), "%s", name);
	return bsearch(&member, view->members, view->n_members, sizeof(member), by_name);
}

const struct view_member *view_next_server(const struct view *view, const struct view_member *after)
{
	for (size_t m = after ? (size_t)(after - view->members) + 1 : 0; m < view->n_members; m++)
		if (view->members[m].roles & ROLE_SERVER)
			return &view->members[m];
	return NULL;
}

const struct view_member *view_server(const struct view *view, size_t i)
{
	const struct view_member *member = view_next_server(view, NULL);

	while (member && i--)
		member = view_next_server(view, member);
	return member;
}

size_t view_n_servers(const struct view *view)
{
	size_t n = 0;

	for (size_t i = 0; i < view->n_members; i++)
		n += !!(view->members[i].roles & ROLE_SERVER);
	return n;
}

uint64_t view_home_score(const char *job, const char *server)
{
	return hash_finish(hash_add_string(hash_add_string(HASH_START, job), server));
}

/*
 * The server whose name goes best with the job's (rendezvous hashing): when a server comes or goes, only the jobs whose
 * home it is or was move.
 */
const struct view_member *view_home_among(const struct view *view, const char *job, const bool *in)
{
	const struct view_member *home = NULL;
	uint64_t best = 0;
	size_t server = 0;

	for (size_t i = 0; i < view->n_members; i++) {
		const struct view_member *member = &view->members[i];
		uint64_t score;

		if (!(member->roles & ROLE_SERVER) || (in && !in[server++]))
			continue;
		score = view_home_score(job, member->name);
		if (!home || score > best) {
			home = member;
			best = score;
		}
	}
	return home;
}

const struct view_member *view_home(const struct view *view, const char *job)
{
	return view_home_among(view, job, NULL);
}
