/*
 * The pace of packets. What a packet asks for may keep the control thread as long as a few rounds do (Join and Regroup make a
 * ledger and map it), and is not cut in two. A small round of another job visits the thread several times, and may find a
 * packet under way each time; so turns alone do not leave that job its share. Therefore, while other jobs have rounds, users
 * who ask for more than one part in PACE_OWN_PARTS of the thread, and than the burst that the start of a job needs, share one
 * part in PACE_PARTS of it. Their packets stay in their sockets until that part is paid for, and go on one session at a time.
 * Nothing is refused, and entries are taken as before, but for one that needs a packet which waits.
 *
 * A connection and a hang-up cost as much as a packet, and count as one. What a user who is behind has connected is a session,
 * whose Hello waits as other packets do. Whose the next connection is cannot be seen before it is accepted: so after one of a
 * user who is behind, each is accepted when a packet may go on.
 *
 * A user's part and the part that is shared are leaky buckets: a packet moves paid_ns on by what it took, times the parts.
 *
 * A pace is held by the sessions of one user, and lives as long as one of these does, and then until the user has earned the
 * whole burst again: to hang up earns nothing. Control thread only.
 */
#pragma once

#include "base/clock.h"
#include "base/list.h"
#include "base/loop/loop.h"
#include "base/map.h"

#define PACE_OWN_PARTS 20
#define PACE_PARTS     5
/* 50 ms of the thread. */
#define PACE_BURST_NS (PACE_OWN_PARTS * 50 * NSEC_PER_MSEC)
/* Entries were taken no longer ago: the job has rounds. */
#define PACE_BUSY_NS (10 * NSEC_PER_MSEC)
#define PACE_JOBS    4

/* The jobs whose entries were taken last, the latest first. */
struct pace_jobs {
	struct {
		uint64_t job, at_ns;
	} latest[PACE_JOBS];
};

/* Entries of a job were taken. */
void pace_jobs_note(struct pace_jobs *jobs, uint64_t job, uint64_t now_ns);
/* Whether jobs other than these two have rounds. Of more than PACE_JOBS, two of which are meant, others are always seen. */
bool pace_jobs_others(const struct pace_jobs *jobs, uint64_t job, uint64_t other, uint64_t now_ns);

/* All users of a control, and the sessions of these whose packets wait. */
struct paces {
	struct loop *loop;
	struct map map;	  /* by user */
	struct list left; /* paces that nobody holds, and that are not forgotten yet */
	uint64_t paid_ns;
	struct list waiting; /* sessions */
	struct loop_timer timer;
};

struct pace {
	struct map_entry entry; /* by user */
	struct paces *paces;
	unsigned refs;
	struct list left; /* in paces->left */
	uint64_t paid_ns;
};

/* expired: the timer's; calls paces_are_paid(). */
void paces_init(struct paces *paces, struct loop *loop, void (*expired)(struct loop_timer *timer));
/* Nobody holds a pace, or waits. */
void paces_done(struct paces *paces);
/* The pace of a user, until pace_put(). Returns NULL when there is no memory. */
struct pace *pace_get(struct paces *paces, uint32_t uid);
/* Takes NULL. */
struct pace *pace_put(struct pace *pace, uint64_t now_ns);
/* Packets of the user took so long while others had rounds. */
void pace_charge(struct pace *pace, uint64_t cost_ns, uint64_t now_ns);
/* Whether packets of the user are to wait. */
static inline bool pace_holds(const struct pace *pace, uint64_t now_ns)
{
	return pace->paid_ns > now_ns && pace->paces->paid_ns > now_ns;
}
/* Sees to it that the timer expires. Returns 0 or -ENOMEM. */
int paces_wait(struct paces *paces);
/* Puts a session behind those that wait. Returns 0 or -ENOMEM. */
int pace_wait(struct pace *pace, struct list *session);
/* The timer has expired. Whether all is paid for; if not, the timer is set again. */
bool paces_are_paid(struct paces *paces, uint64_t now_ns);
/* All is paid for. Takes out the session that goes on next; NULL: none waits. */
struct list *pace_next(struct paces *paces, uint64_t now_ns);
