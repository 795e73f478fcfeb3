/*
 * Accounts of users and peers by name, and the words with which a charge is refused: what has run
 * out, which option says how much there is, what gives some back. Sessions, the agent's jobs and
 * the server's jobs are charged here.
 */
#include "base/memory/account.h"

#include "base/clock.h"
#include "base/memory/handout.h"
#include "base/memory/unmap.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Of what is left to others, so often at the most for one account. */
#define LOOK_NS (20 * NSEC_PER_MSEC)

/* What a kind is called, which option says how much there is of it, and what gives some back. */
static const struct {
	const char *what, *option, *way_out;
} kinds[ACCOUNT_KINDS] = {
	[ACCOUNT_MEMORY] = { "bytes of the daemon's memory", "memory",
			     "declare fewer tensors, have fewer sessions or jobs" },
	[ACCOUNT_MESSAGES] = { "bytes of messages on their way", "memory",
			       "have fewer on their way at once" },
	[ACCOUNT_MAPPED] = { "bytes shared with the daemon", "addresses", "share less" },
	[ACCOUNT_MAPPINGS] = { "pieces of memory shared with the daemon", "vm.max_map_count",
			       "share fewer and larger ones" },
	[ACCOUNT_DESCRIPTORS] = { "of the daemon's descriptors", "LimitNOFILE",
				  "have fewer sessions" },
	[ACCOUNT_JOBS] = { "jobs", "max_jobs", "end some" },
	[ACCOUNT_SERVED_JOBS] = { "jobs at this server", "max_jobs", "end some" },
	[ACCOUNT_GPU_WORKERS] = { "workers of GPUs", "one for each 512 MiB of memory",
				  "end some jobs" },
};

void accounts_init(struct accounts *accounts, const struct accounts_params *params)
{
	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
		quota_init(&accounts->total[kind], params->limits[kind], NULL);
	quota_init(&accounts->contributions, UINT64_MAX, &accounts->total[ACCOUNT_MEMORY]);
	accounts->share = params->share;
	list_init(&accounts->list);
}

void accounts_done(struct accounts *accounts)
{
	struct account *account;

	unmap_release_all();
	while ((account = list_first(&accounts->list, struct account, link))) {
		assert(!account->refs);
		for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
			assert(!quota_used(&account->quotas[kind]));
		list_remove(&account->link);
		free(account);
	}
	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
		assert(!quota_used(&accounts->total[kind]));
}

static bool is_spare(const struct account *account)
{
	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
		if (quota_used(&account->quotas[kind]))
			return false;
	return !account->refs;
}

/*
 * An account that nobody has becomes another's, and is never freed: the last release of a charge,
 * on whatever thread, still looks at its quota's parent after it has brought that to 0, which stays
 * the same.
 */
static struct account *account_take(struct accounts *accounts, struct account *within)
{
	struct account *account;

	list_for_each (account, &accounts->list, link)
		if (account->within == within && is_spare(account))
			return account;
	account = calloc(1, sizeof(*account));
	if (!account)
		return NULL;
	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++) {
		quota_init(&account->quotas[kind], UINT64_MAX,
			   within ? &within->quotas[kind] : &accounts->total[kind]);
		account->quotas[kind].share = accounts->share;
	}
	account->within = within;
	list_push_back(&accounts->list, &account->link);
	return account;
}

struct account *account_get(struct accounts *accounts, struct account *within, const char *name)
{
	struct account *account;

	list_for_each (account, &accounts->list, link)
		if (account->within == within && !strcmp(account->name, name))
			return account_ref(account);
	account = account_take(accounts, within);
	if (!account)
		return NULL;
	(void)snprintf(account->name, sizeof(account->name), "%s", name);
	return account_ref(account);
}

struct account *account_of_peers(struct accounts *accounts, const char *source)
{
	char name[sizeof(((struct account *)0)->name)];

	(void)snprintf(name, sizeof(name), "peers from %s", source);
	return account_get(accounts, NULL, name);
}

struct account *account_ref(struct account *account)
{
	if (account && !account->refs++)
		(void)account_ref(account->within);
	return account;
}

struct account *account_put(struct account *account)
{
	if (account && !--account->refs)
		(void)account_put(account->within);
	return NULL;
}

int account_full(const struct account *account, enum account_kind kind, struct failure *failure)
{
	const struct quota *quota = &account->quotas[kind], *total = quota;

	while (total->parent)
		total = total->parent;
	return failure_set(failure, -EDQUOT,
			   "%s has %" PRIu64 " %s, and is over its share (user_share, %u %%) with "
			   "more: %" PRIu64 " of %" PRIu64 " are in use (%s): %s, or raise either",
			   account->name, quota_used(quota), kinds[kind].what, quota->share,
			   quota_used(total), total->limit, kinds[kind].option,
			   kinds[kind].way_out);
}

int account_no_memory(const struct account *account, int error, struct failure *failure)
{
	if (error == EDQUOT && account)
		return account_full(account, ACCOUNT_MEMORY, failure);
	return failure_set(failure, -error, "%s",
			   error == ENOMEM ? "out of memory" : strerror(error));
}

/* What others have had may be gone since it was looked at. Who is always refused leaves others their looks. */
static bool has_room_again(struct account *account, enum account_kind kind)
{
	uint64_t now_ns = clock_now_ns();

	if (now_ns < account->look_ns)
		return false;
	account->look_ns = now_ns + LOOK_NS;
	return handouts_look(&account->quotas[kind]);
}

int account_charge(struct account *account, enum account_kind kind, uint64_t amount,
		   struct failure *failure)
{
	struct quota *quota = account_quota(account, kind);

	if (!quota_charge(quota, amount) ||
	    (has_room_again(account, kind) && !quota_charge(quota, amount)))
		return 0;
	return account_full(account, kind, failure);
}

void account_release(struct account *account, enum account_kind kind, uint64_t amount)
{
	quota_release(account_quota(account, kind), amount);
}
