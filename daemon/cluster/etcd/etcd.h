/*
 * A client of etcd: several endpoints, one in use. A call that an endpoint does not answer within a second, or answers with
 * a trouble of its own, goes to the next, and so on until its time is over; whatever is sent may therefore arrive twice, and
 * what writes must be guarded. Knows nothing of what is written. Loop's thread only; callbacks come from the loop.
 */
#pragma once

#include "base/list.h"
#include "cluster/etcd/wire.h"
#include "rpc/rpc.h"

#define ETCD_ENDPOINTS_MAX 16u
#define ETCD_ATTEMPT_MS	   1000u
#define ETCD_ELECTION_MS \
	4000u /* without an answer before anybody is told: an election takes one or two seconds */

struct etcd;

struct etcd_params {
	struct loop *loop;
	struct rpc *rpc;
	const char *endpoints;	   /* host:port, with commas between */
	const struct rpc_tls *tls; /* read by etcd_new() alone */
	/* No endpoint has answered for longer than etcd takes to elect a leader: once, until there_again(). */
	void (*lost)(void *user, const char *why);
	void (*there_again)(void *user);
	/* The watch has ended: canceled, its endpoint lost, or given up. */
	void (*watch_ended)(void *user, int status, const char *why);
	void (*watched)(void *user, const void *data, size_t len);
	void *user;
};

/* Connects with the first call. Returns 0, or -errno with a failure. */
int etcd_new(const struct etcd_params *params, struct failure *failure, struct etcd **ret_etcd);
/* No callback comes from here on. Waits for a farewell, half a second at most. */
struct etcd *etcd_free(struct etcd *etcd);
/* The endpoint in use. */
const char *etcd_address(const struct etcd *etcd);
/* Since when no endpoint has answered, and why; 0 while one does. */
uint64_t etcd_failing_since_ns(const struct etcd *etcd, const char **ret_why);

/* A call. Embedded in its user; may be freed once etcd_call_cancel() has returned or done() has been called. */
struct etcd_call {
	const char *path;
	bool is_stream;	     /* of which one message is wanted */
	uint64_t timeout_ms; /* over all attempts */
	/* Once. status 0 and the answer, or a negative errno with text. */
	void (*done)(struct etcd_call *call, int status, const char *text, const void *data,
		     size_t len);
	/* etcd's */
	struct etcd *etcd; /* while it is under way */
	struct wire_bytes bytes;
	struct list link;
	struct etcd_attempt *attempt;
	uint64_t until_ns;
	int status;
	char why[200];
};

/* bytes are taken over. */
void etcd_call_start(struct etcd *etcd, struct etcd_call *call, struct wire_bytes *bytes);
void etcd_call_cancel(struct etcd_call *call);

/* One watch at a time. bytes are taken over. */
void etcd_watch_start(struct etcd *etcd, struct wire_bytes *bytes);
/* Without watch_ended(). */
void etcd_watch_stop(struct etcd *etcd);
/* The endpoint answers, but not as it should: tries another. */
void etcd_distrust(struct etcd *etcd, int status, const char *why);
/* A last call, whose answer nobody waits for but etcd_free(). */
void etcd_farewell(struct etcd *etcd, const char *path, struct wire_bytes *bytes);
