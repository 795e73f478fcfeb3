/*
 * Who is charged for what a job is made of. Control thread only.
 */
#pragma once

#include "base/error.h"
#include "base/memory/account.h"
#include "base/quota.h"

struct job;
struct peer;
struct server;

/* What the job holds. */
struct memory {
	struct quota *quota; /* contributions and results */
	uint64_t charged_parts;
	struct account *
		account; /* what the job is made of besides: whose peer's JOIN or ATTACH came first; NULL: nobody's */
	uint64_t charged; /* to the account, but for what is charged where it is */
	bool counted;	  /* at the account, among its jobs here */
};

/*
 * The account of a peer: of where it is, whatever it calls itself; of our own process, the user's whose trainers it
 * speaks for. Held until account_put(). Returns 0, with NULL where nobody is charged; or -ENOMEM with failure filled.
 */
int charge_account(const struct server *server, const struct peer *peer, uint32_t user,
		   struct account **ret_account, struct failure *failure);
/* Of all jobs here: contributions and results; NULL: nobody is charged. */
struct quota *charge_all(const struct server *server);
/* The words for a charge of job->memory.quota that was refused. Returns -EDQUOT. */
int job_over_quota(const struct job *job, struct failure *failure);
/* The same for a sum or a result (what) that could not be made: r is QUOTA_E_FULL or -errno. Returns -EDQUOT or r. */
int job_not_made(const struct job *job, const char *what, int r, struct failure *failure);
/* Until the job is freed. Returns 0, or -EDQUOT with failure filled. */
int job_charge(struct job *job, uint64_t amount, struct failure *failure);
