/*
 * Which jobs end before memory runs out: the running jobs are grouped by user, and within that by
 * account, and of the group that holds the most the largest jobs fail. server.c calls with each
 * contribution.
 */
#include "server/job/relief.h"

#include "base/clock.h"
#include "server/job/job.h"
#include <stdio.h>
#include <stdlib.h>

/* What jobs that end hold goes in later turns: for so long no others of a crowded peer end. */
#define RELIEF_NS NSEC_PER_SEC
/* Jobs are not weighed with each contribution. */
#define WEIGH_NS NSEC_PER_MSEC
/* Jobs that end in one turn, and how long until others, or another peer's, do. */
#define RELIEF_JOBS 8
#define LOOK_NS	    (20 * NSEC_PER_MSEC)

struct holder {
	struct job *job;
	uint64_t owner; /* the job's user; a number of its own where an older agent does not say */
	uint64_t held;	/* bytes */
};

struct holders {
	struct holder *first;
	size_t n;
	uint64_t held; /* bytes */
};

typedef int compare_fn(const void *one, const void *other);

static int by_owner(const void *one, const void *other)
{
	const struct holder *a = one, *b = other;

	return (a->owner > b->owner) - (a->owner < b->owner);
}

static int by_account(const void *one, const void *other)
{
	const struct holder *a = one, *b = other;
	uintptr_t x = (uintptr_t)a->job->memory.account, y = (uintptr_t)b->job->memory.account;

	return (x > y) - (x < y);
}

static int largest_first(const void *one, const void *other)
{
	const struct holder *a = one, *b = other;

	return (a->held < b->held) - (a->held > b->held);
}

/* Of the groups whose holders are equal, the one that holds the most. */
static struct holders largest_group(struct holders all, compare_fn *compare)
{
	struct holders largest = { 0 }, group;

	qsort(all.first, all.n, sizeof(*all.first), compare);
	for (size_t i = 0; i < all.n; i += group.n) {
		group = (struct holders){ .first = &all.first[i] };
		while (i + group.n < all.n && !compare(group.first, &group.first[group.n]))
			group.held += group.first[group.n++].held;
		if (!i || group.held > largest.held)
			largest = group;
	}
	return largest;
}

/* Running jobs that the peer contributes to, or all (NULL). first is freed by the caller; NULL: there is no memory. */
static struct holders holders_of(struct server *server, const struct peer *peer)
{
	struct holders all = { 0 };
	struct job *job;
	size_t n = 0;

	list_for_each (job, &server->jobs, link)
		n++;
	all.first = calloc(n + 1, sizeof(*all.first));
	if (!all.first)
		return all;
	list_for_each (job, &server->jobs, link) {
		struct holder *holder = &all.first[all.n];

		if (job->state != JOB_RUNNING || (peer && job_node_of(job, peer) == NODE_NONE))
			continue;
		*holder = (struct holder){
			.job = job,
			.owner = job->owner.user == USER_NONE ? ((uint64_t)USER_NONE + 1) + all.n
							      : job->owner.user,
			.held = quota_used(job->memory.quota),
		};
		all.held += quota_taken(job->memory.quota);
		all.n++;
	}
	return all;
}

/*
 * Whose a job is, is the word of the peer that it comes from; the account says where that is: of a user's jobs, those of the account
 * that holds the most. Returns whether as much has ended as is to.
 */
static bool end_largest(struct holders all, const char *of, const char *option)
{
	struct holders group = largest_group(largest_group(all, by_owner), by_account);
	const struct holder *holder = group.first;
	struct failure failure;
	uint64_t ended = 0;
	unsigned n = 0;

	qsort(group.first, group.n, sizeof(*group.first), largest_first);
	for (; n < RELIEF_JOBS && ended < (group.held + 1) / 2; holder++, n++) {
		(void)failure_set(&failure, -EDQUOT,
				  "job %s: of what %s this server hold (%s) its user has most: "
				  "rounds wait for ranks that are behind",
				  holder->job->owner.name, of, option);
		ended += holder->held;
		job_fail(holder->job, &failure, NULL);
	}
	return n && ended >= (group.held + 1) / 2;
}

static void relieve_peer(struct server *server, const struct peer *peer)
{
	uint64_t now_ns = clock_now_ns();
	char of[ERROR_TEXT_MAX + 1];
	struct holders all;

	if ((server->relieved_ns && now_ns - server->relieved_ns < RELIEF_NS) ||
	    (server->looked_ns && now_ns - server->looked_ns < LOOK_NS))
		return;
	server->looked_ns = now_ns;
	all = holders_of(server, peer);
	(void)snprintf(of, sizeof(of), "%.200s has", peer_name(peer));
	if (all.n && end_largest(all, of, "peer_quota"))
		server->relieved_ns = now_ns;
	free(all.first);
}

/* Three quarters of what jobs may have. */
static bool is_crowded(uint64_t held, uint64_t available)
{
	return held / 3 > available;
}

static void relieve_all(struct server *server, uint64_t held, uint64_t available)
{
	uint64_t now_ns = clock_now_ns();
	struct holders all;

	if (server->weighed_ns && now_ns - server->weighed_ns < WEIGH_NS)
		return;
	server->weighed_ns = now_ns;
	all = holders_of(server, NULL);
	/* Also what is on its way of jobs that are gone, for which no other ends. */
	if (all.n && is_crowded(all.held, available + held - MIN(held, all.held)))
		(void)end_largest(all, "jobs have", "memory");
	free(all.first);
}

void relief_for(struct server *server, const struct peer *peer)
{
	const struct quota *contributions = charge_all(server);
	uint64_t held, available;

	if (peer_is_crowded(peer))
		relieve_peer(server, peer);
	if (!contributions)
		return;
	held = quota_used(contributions);
	available = quota_available(contributions->parent);
	if (unlikely(is_crowded(held, available)))
		relieve_all(server, held, available);
}
