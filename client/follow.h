/* A rank that follows the others: what it has heard of rounds that they have begun. (locked): client.h. */
#pragma once

#include "call.h"
#include <sys/queue.h>

struct follow_begun;

/* What bps_client_follow() says; of one that is refused it stays as it was. */
struct follow_said {
	bool on, idle; /* as the daemon is told, also the next one */
	bool all; /* all ranks of the job do and are, and this rank has not said since that it follows */
	int status; /* why they never will, or why the next daemon lets no rank follow; or 0 */
};

struct client_follow {
	struct follow_said said;
	char text[ERROR_TEXT_MAX + 1]; /* of said.status */
	uint64_t n_all; /* how often all ranks of the job have followed, and were idle */
	bool offered;	/* the daemon has CONTROL_FEATURE_FOLLOW */
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
	follow->said = (struct follow_said){ 0 };
	follow->n_all = 0;
}
/* The daemon's events. */
/* first: rounds of the tensor before this one, which this rank has not submitted, have failed. */
void follow_hear_begun(struct bps_client *client, const struct bps_begun *begun, uint64_t first);
/* status: not 0: they will not. */
void follow_hear_all(struct bps_client *client, uint64_t turn, int status, const char *text);
