/* Tensors, by name and by number. (locked): client.h. */
#pragma once

#include "call.h"
#include <sys/queue.h>

struct bps_tensor {
	/* What each operation needs is one line of the cache: there may be thousands of tensors. */
	struct bps_client *client _cache_aligned_; /* counted */
	uint64_t elements;			   /* or ELEMENTS_VARIABLE */
	uint32_t number;
	uint32_t run;
	uint8_t dtype;
	/* Guarded by the client's mutex. */
	bool refused;	   /* by the daemon: declare says why */
	bool was_declared; /* to this daemon, or to one before */
	unsigned refs;	 /* the caller's, each posted request's, and one while it is in the table */
	uint64_t rounds; /* submitted so far */
	uint64_t ended;	 /* the last round that has ended; ones before it may be under way */
	uint64_t failed; /* bit n: round ended - n failed */
	const void
		*after; /* the tensor that was submitted after it, to be fetched; it may be gone */

	LIST_ENTRY(bps_tensor) link;
	char *name;
	char *shape;	  /* in words, as 2x3; NULL: not said */
	uint64_t packet;  /* number of the packet that declares it */
	uint64_t settled; /* of SESSION_DECLARING: all rounds up to it had ended */
	struct client_call declare;
	struct tensor_release *release; /* asked for, and not answered; or NULL */
};
static_assert(offsetof(struct bps_tensor, link) == CACHE_LINE, "one line of the cache");

/* What a caller declares; the name is checked. */
struct tensor_facts {
	const char *name;
	unsigned dtype;
	uint64_t elements; /* or ELEMENTS_VARIABLE */
	const char *shape; /* in words, as 2x3; NULL: not said */
};

int tensor_get(struct bps_client *client, const struct tensor_facts *facts,
	       struct bps_tensor **ret_tensor); /* (locked, may wait) */
void tensor_put(struct bps_tensor *tensor);
void tensor_drop_all(struct bps_client *client);
/* The daemon asks whether it may forget the tensor. */
void tensor_unused(struct bps_client *client, const char *name, uint32_t number);
/* A round of it has ended. */
void tensor_ended(struct bps_tensor *tensor, uint64_t round, bool failed);
/* Rounds of the tensor with this name that were submitted; 0: there is none. */
uint64_t tensor_rounds(struct bps_client *client, const char *name);
/* Declares all again, at another daemon. 0 or a negative errno. */
int tensor_declare_all(struct bps_client *client);
/* The same in a new run of the job: no round was ever submitted. */
int tensor_declare_anew(struct bps_client *client);
/* 0 when operations on it may be submitted, else a negative errno with the text set. */
int tensor_check(const struct bps_tensor *tensor);
