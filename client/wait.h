/* How threads wait inside the library: one leads and hears the daemon for all. (locked): client.h. */
#pragma once

#include "bps.h"
#include "proto/allowance.h"
#include "proto/shm.h"
#include <pthread.h>

#define CLIENT_FOREVER INT64_MAX /* as a deadline */
#define CLIENT_FUTEX_WAITS_POLL \
	64 /* waits on the futex for one poll of the socket that nothing calls for */
#define CLIENT_FULL_POLL 64 /* submissions in vain, while nothing ends, for one such poll, too */
#define CLIENT_FUTEX_WAIT_NS \
	(10 * INT64_C(1000000)) /* a loss of the daemon is seen later by so much */

/* Who waits for the daemon: one thread leads and hears it for all, the others wait for its turn to be over. */
struct client_waiting {
	pthread_cond_t over; /* CLOCK_MONOTONIC */
	bool leading;	     /* a thread is the leader, and may sleep */
	unsigned n_futex_waits;
	unsigned n_full; /* submissions in a row that found no slot free, while nothing ended */
	bool slept_in_vain; /* the leader slept on trainer_armed in vain: the next sleep hears the socket, too */
	unsigned n_waiting;	    /* threads on `over` */
	bool fd_used;		    /* bps_client_fd() was called: keep the trainer armed */
	struct allowance allowance; /* for spinning */
};

int64_t client_now_ns(void);
int64_t client_deadline_ns(int64_t timeout_ms); /* negative: CLIENT_FOREVER */

/*
 * Whether done(request) comes true while the thread looks, at most client->spin_ns long; between looks it gives its core to
 * whoever wants it. Asks no more often than it pays. (locked, may wait)
 */
bool client_spin(struct bps_client *client, struct bps_request *request,
		 bool (*done)(struct bps_request *request), int64_t deadline_ns);
/* Sleeps until something may have changed, at most until the deadline. (locked, may wait) */
void client_wait(struct bps_client *client, int64_t deadline_ns);
/* The same for who waits for a request alone: not until any of thousands has ended, where the daemon knows the difference. */
void client_wait_for(struct bps_client *client, const struct bps_request *request,
		     int64_t deadline_ns);
/* The same for what another thread of this process does, never the daemon: until client_wake(). */
void client_wait_for_leader(struct bps_client *client, int64_t deadline_ns);

/* Handles what has come, without waiting. True when something has changed that somebody may wait for. */
bool client_progress(struct bps_client *client);
/* The same for what can be seen without asking the system: requests that are complete. */
bool client_poll_ring(struct bps_client *client);
/* What was seen otherwise: who polls bps_client_fd() is to hear of it, as nothing else tells once it has been seen. */
void client_tell(struct bps_client *client);

/* Wakes every thread that waits, the leader too: call it after a change made outside client_wait(). */
void client_wake(struct bps_client *client);

/* The daemon is lost for good or not to be trusted: the sticky state. Ends all requests and calls. */
void client_fail(struct bps_client *client, const char *format, ...) _printf_(2, 3);

/* Returns the sticky failure, with its text set, or 0. */
int client_failed(const struct bps_client *client);

/* How the daemon is to wake us; set before the last look at what it may have done. */
void client_arm(struct bps_client *client, enum shm_armed how);

/* Wakes a leader who sleeps on the word that says so. False: there is none, or the daemon has just woken him. */
bool client_wake_leader(struct bps_client *client);
