/*
 * The coordinator: the daemon that the others register with. It numbers the views, hands out the key of the data
 * connections and fixes the view of each job. It keeps nothing on disk: after a restart the members tell it what it
 * needs to go on (epochs, key, jobs), and none of their jobs notices. Loop's thread only.
 */
#pragma once

#include "cluster/cluster.h"
#include "rpc/rpc.h"

struct coordinator;

/* For `wait_ms`: longer than a member waits between two attempts to come back. */
#define COORDINATOR_WAIT_MS 2000

struct coordinator_params {
	struct loop *loop;
	const char *listen;	   /* host:port; port 0 picks one */
	const struct rpc_tls *tls; /* NULL: plaintext */
	uint64_t lease_ms;
	uint64_t
		wait_ms; /* for members of before our start, until the first view; at most a lease */
	const void *data_key; /* NULL: one is made, or taken over from the members */
	size_t data_key_len;
};

/* Listens. Returns 0, or -errno with a failure. */
int coordinator_new(const struct coordinator_params *params, struct failure *failure,
		    struct coordinator **ret_coordinator);
/* Ends all streams and calls; idempotent, does not wait. */
void coordinator_close(struct coordinator *coordinator);
struct coordinator *coordinator_free(struct coordinator *coordinator);
DEFINE_CLEANUP(struct coordinator *, coordinator_free)
uint16_t coordinator_port(const struct coordinator *coordinator);
