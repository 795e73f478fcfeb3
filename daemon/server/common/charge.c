/*
 * Whose account a job is charged to: its user's where the node is this daemon's own, else that of
 * the place it comes from. Also words for a charge that fails.
 */
#include "server/job/job.h"

#include <stdio.h>

int charge_account(const struct server *server, const struct peer *peer, uint32_t user,
		   struct account **ret_account, struct failure *failure)
{
	struct account *account;
	char name[80];

	*ret_account = NULL;
	if (!server->params.accounts)
		return 0;
	if (!peer_is_self(peer))
		(void)snprintf(name, sizeof(name), "peers from %s", peer_source(peer));
	else if (user != USER_NONE)
		(void)snprintf(name, sizeof(name), "user %u", user); /* as sessions are charged */
	else
		(void)snprintf(name, sizeof(name), "this node");
	account = account_get(server->params.accounts, name);
	if (!account)
		return failure_set(failure, -ENOMEM, "out of memory");
	*ret_account = account;
	return 0;
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
