/*
 * Whose account a job is charged to: its user's, where the node is not this daemon's own within
 * that of the place it comes from. Also words for a charge that fails.
 */
#include "server/job/job.h"

#include <inttypes.h>
#include <stdio.h>

/* Of the peer, the users whose agent it is have a share each: who they are is the peer's word. */
static struct account *of_peer(struct accounts *accounts, const struct peer *peer, uint32_t user)
{
	struct account *whole, *account;
	char name[128];

	whole = account_of_peers(accounts, peer_source(peer));
	if (!whole || user == USER_NONE)
		return whole;
	(void)snprintf(name, sizeof(name), "user %u of peers from %s", user, peer_source(peer));
	account = account_get(accounts, whole, name);
	(void)account_put(whole);
	return account;
}

static struct account *of_this_node(struct accounts *accounts, uint32_t user)
{
	char name[128];

	if (user == USER_NONE)
		return account_get(accounts, NULL, "this node");
	(void)snprintf(name, sizeof(name), "user %u", user); /* as sessions are charged */
	return account_get(accounts, NULL, name);
}

int charge_account(const struct server *server, const struct peer *peer, uint32_t user,
		   struct account **ret_account, struct failure *failure)
{
	struct accounts *accounts = server->params.accounts;

	*ret_account = NULL;
	if (!accounts)
		return 0;
	*ret_account =
		peer_is_self(peer) ? of_this_node(accounts, user) : of_peer(accounts, peer, user);
	return *ret_account ? 0 : failure_set(failure, -ENOMEM, "out of memory");
}

struct quota *charge_all(const struct server *server)
{
	return server->params.accounts ? &server->params.accounts->contributions : NULL;
}

/* Of the two limits, the one that has less left. */
int job_over_quota(const struct job *job, struct failure *failure)
{
	const struct quota *own = job->memory.quota;
	const struct quota *memory = own->parent ? own->parent->parent : NULL;

	if (memory && quota_available(memory) < quota_available(own))
		return failure_set(failure, -EDQUOT,
				   "job %s: this server may hold %" PRIu64
				   " bytes for all (memory), "
				   "and has no room for more of this job: raise memory, or have "
				   "fewer operations in flight",
				   job->owner.name, memory->limit);
	return failure_set(
		failure, -EDQUOT,
		"job %s: a server may hold %" PRIu64 " bytes for it, its job_quota, and "
		"that is not enough: raise job_quota, or have fewer operations in flight",
		job->owner.name, own->limit);
}

int job_not_made(const struct job *job, const char *what, int r, struct failure *failure)
{
	if (r == QUOTA_E_FULL)
		return job_over_quota(job, failure);
	return failure_set(failure, r, "job %s: %s: %s", job->owner.name, what, strerror(-r));
}

int job_charge(struct job *job, uint64_t amount, struct failure *failure)
{
	struct failure why = { 0 };

	if (account_charge(job->memory.account, ACCOUNT_MEMORY, amount, &why))
		return failure_set(failure, -EDQUOT, "job %s: %s", job->owner.name, why.text);
	job->memory.charged += amount;
	return 0;
}

int job_no_memory(const struct job *job, int r, struct failure *failure)
{
	struct failure why = { 0 };

	(void)account_no_memory(job->memory.account, -r, &why);
	return failure_set(failure, r, "job %s: %s", job->owner.name, why.text);
}
