/* What a session shares with its trainer for entries and completions, and the turns of sessions: ring.c. Private to control/. */
#pragma once

#include "control/session.h"

/* Makes and maps what is shared. Returns 0 and what goes to the trainer: memfd, doorbell, which stays ours, and wake-up. */
int ring_open(struct session *session, int ret_fds[3]);
void ring_close(struct session *session);
/* The trainer has mapped it, or will not: has it sealed. Until then no packet and no entry is taken. */
void ring_seal(struct session *session);
/* Takes no entry any more. */
void ring_freeze(struct session *session);
/* Before the first session. Makes the loop look at rings before it sleeps, as control->params.spin_ns says. */
void ring_watch(struct control *control);
/* Ends that. There is no session. */
void ring_unwatch(struct control *control);
/* work: SESSION_*: there may be such; the session has its turn among others. */
void ring_work(struct session *session, unsigned work);
/* What a session of this user takes turns as while its job of that name runs. */
uint64_t ring_job_flow(uint32_t uid, const char *job);
/*
 * What a user has asked for has kept the thread since began_ns. The pace pays for it if jobs have rounds that are neither the
 * user's own flow nor that job's (ring_job_flow(), or 0). Returns now.
 */
uint64_t ring_charge(struct control *control, struct pace *pace, uint64_t job, uint64_t began_ns);
/* Whether entries are there now that a request which refers to them has to come after; *ret_until: the last of these. */
bool ring_is_behind(const struct session *session, uint64_t *ret_until);
/* Goes on where an entry waited for a packet. */
void ring_resume(struct session *session);
