/*
 * Who is there. A view is an immutable, counted list of members with an epoch; a source makes views: "single" (this
 * daemon alone), "static" (a file that is the same on every node), "coordinator" (a daemon that the others register
 * with, over gRPC), "etcd" (a store that needs no coordinator). daemon.c hands views on; nobody calls up from here.
 *
 * Control thread only, but for view_ref/view_unref, which any thread may call.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"
#include "proto/c.h"
#include <stdatomic.h>

enum role {
	ROLE_AGENT = 1,
	ROLE_SERVER = 2,
	ROLE_COORDINATOR = 4,
};

struct view_member {
	uint64_t
		id; /* process; 0 when the source does not know it (static: learnt at the handshake) */
	char name[64];	  /* unique in the view; members are sorted by it */
	char address[96]; /* host:port of the data port; empty for a member that has none */
	uint32_t roles;
	uint32_t bandwidth_mbps; /* 0: unknown */
	bool is_self;
};

/*
 * A daemon's process is known by an id, which is in every view, and which is a digest of a secret that only the process has: who
 * shows the secret is the one that the id belongs to, also to a coordinator that has just been started.
 */
#define MEMBER_SECRET_LEN 32
/* Odd; 0 without memory. Any thread. */
uint64_t member_id(const uint8_t secret[MEMBER_SECRET_LEN]);

struct view {
	_Atomic uint32_t refs;
	uint32_t
		epoch; /* from 1; static: a digest of the list, so that nodes with the same file agree */
	size_t n_members;
	struct view_member members[];
};

int view_new(uint32_t epoch, const struct view_member *members, size_t n_members,
	     struct view **ret_view);
struct view *view_ref(struct view *view);
struct view *view_unref(struct view *view);
DEFINE_CLEANUP(struct view *, view_unref)
/* Whether all but is_self is alike. */
bool view_member_same(const struct view_member *a, const struct view_member *b);
/* Whether they have the same members, alike but for is_self; epochs are not compared. */
bool view_same(const struct view *a, const struct view *b);
/* As bytes, at most max of them: free() them. Returns 0, -ENOMEM or -EMSGSIZE. */
int view_pack(const struct view *view, size_t max, void **ret_data, size_t *ret_len);
/* From outside. own: the name that this daemon has in it, or NULL. Returns 0, -EPROTO or -ENOMEM. */
int view_unpack(const void *data, size_t len, const char *own, struct view **ret_view);
/* Digest over epoch-independent facts of the servers (names, addresses): equal on nodes that have the same list. */
uint64_t view_server_digest(const struct view *view);
/* The member of that name, or NULL. */
const struct view_member *view_find(const struct view *view, const char *name);
/* The members that have the server role, in view order: the one after another, or the first for NULL; NULL past the end. */
const struct view_member *view_next_server(const struct view *view,
					   const struct view_member *after);
/* The i-th of them, for which those before it are looked at; NULL past the end. */
const struct view_member *view_server(const struct view *view, size_t i);
size_t view_n_servers(const struct view *view);
/* The server that is home to a job: the same on every node that has the same view. NULL without servers. */
const struct view_member *view_home(const struct view *view, const char *job);
/* The same among those servers that are in: in[i] for view_server(i). */
const struct view_member *view_home_among(const struct view *view, const char *job, const bool *in);
/* How well a server's name goes with the job's: the home is the one with the highest. */
uint64_t view_home_score(const char *job, const char *server);

/*
 * Placement (pure). How much of a job's bytes each server should sum, from OSDI'20 section 4.1 generalised to unequal
 * links: agents are the names of the job's nodes, in any order, NULL for one that is not in the view. Fills
 * stripes[n_stripes] with server numbers (view_server()) so that any run of stripes is shared out as evenly as the
 * weights allow. Deterministic. Returns 0, -ENOENT without servers, or -ENOMEM.
 */
#define PLACEMENT_STRIPES 1024
int placement_stripes(const struct view *view, const char *const *agents, size_t n_agents,
		      uint16_t *stripes, size_t n_stripes);

/* The same for servers that are no view: stripes[] has their numbers here. */
struct placement_server {
	uint32_t bandwidth_mbps; /* 0: unknown */
	bool colocated;		 /* on a machine that pushes */
};
int placement_assign(const struct placement_server *servers, size_t n, size_t n_agents,
		     uint16_t *stripes, size_t n_stripes);

struct cluster;
struct rpc;

/* Pointers in here stay the caller's and outlive the cluster. */
struct cluster_params {
	struct loop *loop;
	struct rpc *
		rpc; /* of the daemon; the coordinator source makes its requests with it. What a coordinator serves
			  * has an rpc of its own, so that members cannot ask for what operators may, nor the reverse */
	const char *source;		/* "single", "static", "coordinator", "etcd" */
	const char *file;		/* static: path */
	const char *coordinator;	/* coordinator: its host:port */
	const char *coordinator_listen; /* when this daemon is it: where to listen, else NULL */
	const char *etcd_endpoints;	/* etcd: host:port, with commas between */
	const char *etcd_prefix;	/* etcd: of all keys, without a slash at its end */
	const char *tls_ca, *tls_cert, *tls_key; /* mutual TLS for gRPC; all or none */
	struct view_member self;		 /* id, name, address, roles, bandwidth */
	uint8_t secret[MEMBER_SECRET_LEN];	 /* coordinator: self.id is its digest */
	uint64_t lease_ms;
	const void *
		data_key; /* the configured cluster key, if any; a coordinator hands it out, or makes one */
	size_t data_key_len;
	/*
	 * A new view; also the first one. The callee takes its own reference.
	 */
	void (*view_changed)(void *user, struct view *view);
	/*
	 * The key for data connections is known (coordinator source: before the first view), or has changed, because the
	 * coordinator was started anew.
	 */
	void (*data_key_known)(void *user, const void *key, size_t len);
	/* Nothing more can come from this source: the daemon should log it and exit with this. */
	void (*failed)(void *user, const struct failure *failure);
	void *user;
};

int cluster_new(const struct cluster_params *params, struct cluster **ret_cluster);
/*
 * Announces this daemon and gets the first view: view_changed() comes from the loop (single, static: before return).
 * Returns 0, or -errno with a failure (a bad file: with its line; a port that cannot be bound).
 */
int cluster_start(struct cluster *cluster, struct failure *failure);
/* Leaves in good order; idempotent; does not wait. */
void cluster_close(struct cluster *cluster);
struct cluster *cluster_free(struct cluster *cluster);
DEFINE_CLEANUP(struct cluster *, cluster_free)
/* Re-reads what can be re-read (static file). Returns 0, or -errno with the old view kept. */
int cluster_reload(struct cluster *cluster, struct failure *failure);

/*
 * Asks in which view a job runs. done() comes from the loop, exactly once, with a view (borrowed: ref it) or a
 * failure; -ETIMEDOUT names how many servers were wanted and are there.
 */
struct cluster_query {
	char job[64];
	uint64_t owner; /* whose: jobs of one name and different owners are different jobs */
	uint32_t min_servers;
	uint64_t timeout_ms;
	void (*done)(struct cluster_query *query, struct view *view, const struct failure *failure);
	/* cluster's */
	struct list link;
	struct loop_timer timer;
	struct mail mail;
	void *private;
};
void cluster_open_job(struct cluster *cluster, struct cluster_query *query);
/* done() will not come (harmless when it has). */
void cluster_cancel(struct cluster *cluster, struct cluster_query *query);
/* No rank of this daemon is in the job any more. */
void cluster_close_job(struct cluster *cluster, const char *job, uint64_t owner);

/* The current view (borrowed), or NULL before the first; any view still in use, by epoch. */
struct view *cluster_view(struct cluster *cluster);
struct view *cluster_view_of(struct cluster *cluster, uint32_t epoch);
