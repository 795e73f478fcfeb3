/*
 * The far end: forms jobs (every node's JOIN has come and agrees), compares declarations, collects the contributions
 * to each part of each round, reduces them in node order when the round's set of nodes is complete, and answers every
 * node. Lives on the control thread; the sums run in the pool. It never trusts a message beyond what transport/ has
 * checked: who may contribute what is decided here.
 *
 * A contribution is named (job, key, round, block, part, node). A repeat of one that is held is refused with EALREADY
 * and changes nothing; one for a closed round with ESTALE; one for a job, node, type, size or operation that does not
 * fit with EPROTO, EINVAL and words. A round closes on the set of nodes that the operation and block ask for, never on
 * a count. Contributions to round r + 1 wait in their own slot while round r is open.
 */
#pragma once

#include "base/loop/loop.h"
#include "base/loop/pool.h"
#include "base/memory/account.h"
#include "base/memory/block.h"
#include "base/order/arrivals.h"
#include "transport/transport.h"

struct server;

struct server_params {
	struct loop *loop;
	struct accounts *
		accounts; /* of peers, and of users whose agent is this daemon; NULL: nobody is charged */
	struct pool *pool;
	struct block_cache *blocks;
	const struct transport *transport; /* that knows how fast the link is, or NULL */
	/* Part size of jobs that ask for none, rounded down to a power of two. 0: what the link carries in 0.6 ms. */
	uint32_t part_bytes;
	uint64_t
		inline_bytes; /* sums of at most this many input bytes run on the control thread, while nothing waits for it */
	uint64_t job_quota_bytes; /* contributions and results held for one job */
	unsigned max_jobs;
	unsigned max_tensors; /* per job */
	/*
	 * The view a job was opened in, by epoch: placement is worked out from it. Borrowed for the call. NULL: no such
	 * epoch known here.
	 */
	const struct view *(*view_of)(void *user, uint32_t epoch);
	void *user;
};

struct server_job_info {
	char name[64];
	uint64_t number;
	const char *state; /* "forming", "running", "failed" */
	uint32_t size, n_nodes;
	uint64_t rounds, bytes, in_flight;
	char waiting_for[160];
};

int server_new(const struct server_params *params, struct server **ret_server);
/* Fails every held delivery with -ESHUTDOWN; nothing new is taken. Idempotent. */
void server_close(struct server *server);
/*
 * After close, and after the pool has been freed or is idle; before transport_free(), as it answers what a freed pool
 * has dropped. Results may still be on their way then: their blocks and quotas are not the server's.
 */
struct server *server_free(struct server *server);
DEFINE_CLEANUP(struct server *, server_free)

/* transport_ops. */
void server_call_arrived(struct server *server, struct delivery *delivery);
void server_notice_arrived(struct server *server, struct peer *peer,
			   const struct data_header *header, const void *payload);
void server_peer_lost(struct server *server, struct peer *peer, const char *why);

/*
 * Jobs that can go on with other servers do so, those that come later once they are complete. Counts of those that have gone,
 * and of those that cannot.
 */
void server_drain(struct server *server, uint32_t *ret_moved, uint32_t *ret_stay);

/*
 * This process is about to end. Of jobs that some nodes have left, nobody could make again what the others have no result of yet:
 * asks these to say when nothing is under way with them. Returns how many have not; it is to be called again, now and then, and
 * goes on serving them meanwhile.
 */
size_t server_stop(struct server *server);

/* Jobs known here, for admin; array to be freed. Returns 0 or -ENOMEM. */
int server_jobs(struct server *server, struct server_job_info **ret_jobs, size_t *ret_n);
/* Calls each() with all jobs that server_jobs() tells of, in that order. */
void server_each_job(const struct server *server,
		     void (*each)(void *user, const char *name, uint64_t number), void *user);
/* How often these have become others, since the start. */
uint64_t server_n_changes(const struct server *server);
/* How the nodes of a job come to their rounds here; *ret_n is 0 where there is none, or one. As server_jobs(). */
int server_arrivals(struct server *server, const char *job, struct arrivals_info **ret_arrivals,
		    size_t *ret_n);
