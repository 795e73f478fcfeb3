/*
 * Operations that all ranks of a job submit in one order, whatever their tensors: each rank numbers
 * its own from 1, which is the operation's ordinal. Here are the newest ordinals that somebody has
 * heard of: of each the operation that came first, and how another rank's differs from that. The
 * agent has one for each job, and so has the job's home. Owner's thread.
 */
#pragma once

#include "base/error.h"
#include "base/quota.h"

/*
 * Ordinals that are known at once; of older ones nothing is said any more. A rank has at most half
 * as many requests, and libbps_client gives the ordinals to two orders by turns (client/order.c), so
 * a rank is not further ahead of one that it waits for.
 */
#define ORDINALS_KEPT 8192

struct ordinal_operation {
	const char *tensor; /* its name */
	uint64_t round;	    /* of that tensor */
	uint32_t rank;	    /* that has submitted it */
};

struct ordinal {
	uint64_t number;		/* 0: none */
	struct ordinal_operation first; /* tensor NULL: not known */
	char *copy;			/* of its name, charged; NULL: the name is the caller's */
	struct failure *differing; /* how ranks differ; NULL: they do not, as far as is known */
	uint64_t notified_ns;	   /* ordinals_notified_ns() */
};

/* Zero before use, but for its quota. */
struct ordinals {
	struct quota *quota;  /* charged for what is kept; NULL: nobody is */
	struct ordinal *kept; /* ORDINALS_KEPT, by number modulo that; NULL: nothing is known yet */
};

void ordinals_done(struct ordinals *ordinals);

enum {
	ORDINALS_E_FIRST = 1, /* no rank's operation was known: now this one is */
	ORDINALS_E_AGAIN,     /* it is the first one, of the same rank */
	ORDINALS_E_DIFFER,    /* ranks differ, which is known from now on: ordinals_differing() */
	ORDINALS_E_KNOWN,     /* ranks differ, which was known */
};

/*
 * An operation with this ordinal. copies: its name is copied, else it has to stay. Returns 0
 * (another rank's is the same, or the ordinal is too old to be compared), -ENOMEM, -EDQUOT, or one
 * of these.
 */
int ordinals_compare(struct ordinals *ordinals, uint64_t number,
		     const struct ordinal_operation *operation, bool copies);
/*
 * Somebody else has found that ranks differ. Returns ORDINALS_E_DIFFER, ORDINALS_E_KNOWN (or too
 * old), -ENOMEM or -EDQUOT.
 */
int ordinals_differ(struct ordinals *ordinals, uint64_t number, const struct failure *how);
/* How ranks differ, with status -EILSEQ and words that name both operations; or NULL. */
const struct failure *ordinals_differing(const struct ordinals *ordinals, uint64_t number);
/* When others were told of the first operation, which the owner keeps; 0: never. NULL: the ordinal is not known. */
uint64_t *ordinals_notified_ns(struct ordinals *ordinals, uint64_t number);
/* The operation that came first with this ordinal, or NULL. */
const struct ordinal_operation *ordinals_first(const struct ordinals *ordinals, uint64_t number);
