/* A rank that follows the others: what it has heard of rounds that they have begun. (locked): client.h. */
#pragma once

#include "call.h"
#include <sys/queue.h>

struct follow_begun;

struct client_follow {
	bool on, idle;	/* as the daemon is told, also the next one */
	uint64_t n_all; /* how often all ranks of the job have followed, and were idle */
	bool all;	/* they do now, and this rank has not said since that it follows */
	bool offered;	/* the daemon has CONTROL_FEATURE_FOLLOW */
	int status;	/* why they never will, or why the next daemon lets no rank follow; or 0 */
	char text[ERROR_TEXT_MAX + 1];
	struct client_call call;
	struct client_call again; /* said to the next daemon, which nobody waits for */
	TAILQ_HEAD(, follow_begun)
	begun; /* in the order in which they came; some may have been submitted since */
	size_t n_begun;
};

void follow_init(struct client_follow *follow);
/* Follows no more: nothing is known of the others. */
void follow_end(struct client_follow *follow);
/* The same, out of the job. What was known goes when a rank follows again, or with the client. */
static inline void follow_leave(struct client_follow *follow)
{
	follow->on = follow->idle = follow->all = false;
	follow->n_all = 0;
	follow->status = 0;
}
/* The daemon's events. */
/* first: rounds of the tensor before this one, which this rank has not submitted, have failed. */
void follow_hear_begun(struct bps_client *client, const struct bps_begun *begun, uint64_t first);
/* status: not 0: they will not. */
void follow_hear_all(struct bps_client *client, uint64_t turn, int status, const char *text);
