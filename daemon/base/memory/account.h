/*
 * Accounts: all that an agent holds for a user ("user 1000"), to whom what its trainers and jobs take is charged. Of each
 * kind of thing there is so much in all, and a share of it for each user, so that none takes all (quota.h). Peers have such
 * accounts, too, and within one each user of theirs has a share of what the peer may have. The accounts outlive whatever is
 * charged to them. Control thread only; their quotas are for any thread.
 */
#pragma once

#include "base/error.h"
#include "base/list.h"
#include "base/quota.h"

enum account_kind {
	ACCOUNT_MEMORY,	     /* bytes of the daemon's own */
	ACCOUNT_MESSAGES,    /* bytes of that which are on their way between daemons */
	ACCOUNT_MAPPED,	     /* bytes of addresses at which memory of trainers is */
	ACCOUNT_MAPPINGS,    /* pieces of that */
	ACCOUNT_DESCRIPTORS, /* of files */
	ACCOUNT_JOBS,	     /* whose ranks are on this node */
	ACCOUNT_SERVED_JOBS, /* that this node sums for */
	ACCOUNT_GPU_WORKERS, /* processes, each of a job with memory of a device */
	ACCOUNT_KINDS
};

struct account {
	struct list link;
	struct account *within; /* held while this one is; NULL: of all */
	char name[128];
	unsigned refs;
	uint64_t look_ns; /* when what was left to others may be looked at for it */
	struct quota quotas[ACCOUNT_KINDS];
};

struct accounts {
	struct quota total[ACCOUNT_KINDS];
	struct quota
		contributions; /* of that memory, what jobs have a server hold of rounds: no user has a share */
	unsigned share; /* percent */
	struct list list;
};

struct accounts_params {
	uint64_t limits[ACCOUNT_KINDS];
	unsigned share;
};

void accounts_init(struct accounts *accounts, const struct accounts_params *params);
/* Nothing is charged any more, but for what waits to be unmapped. */
void accounts_done(struct accounts *accounts);

/* The account of this name, within another or of all (NULL), held until account_put(); NULL: there is no memory. */
struct account *account_get(struct accounts *accounts, struct account *within, const char *name);
struct account *account_ref(struct account *account);
/* The account of all peers that connect from a place (base/source.h). */
struct account *account_of_peers(struct accounts *accounts, const char *source);
/* What is charged stays so until it is released. Returns NULL; takes NULL. */
struct account *account_put(struct account *account);
/* NULL for NULL: nobody is charged. */
static inline struct quota *account_quota(struct account *account, enum account_kind kind)
{
	return account ? &account->quotas[kind] : NULL;
}
/* Returns 0; or -EDQUOT with words that say how to have more. */
int account_charge(struct account *account, enum account_kind kind, uint64_t amount,
		   struct failure *failure);
void account_release(struct account *account, enum account_kind kind, uint64_t amount);
/* Words for held_new() and bulk_take(), which left error in errno: ENOMEM, or EDQUOT. Returns -error. */
int account_no_memory(const struct account *account, int error, struct failure *failure);
/* The words alone, of a quota that was full. Returns -EDQUOT. */
int account_full(const struct account *account, enum account_kind kind, struct failure *failure);
