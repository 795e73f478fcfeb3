/*
 * The daemon: owns every module and wires them to one another; the only file that does. Modules are made from the far
 * end of the line to the door and closed from the door to the far end: the door opens last and closes first.
 *
 * Control thread only. Lifetime: new, start (may finish later, from the loop, when a coordinator has to be reached
 * first), drain or close, free.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"
#include "config.h"

struct daemon;

/* Descriptors that systemd has opened for us, or -1. They become the daemon's. */
struct daemon_fds {
	int control, admin, data;
};

struct daemon_params {
	struct loop *loop;
	struct config *config; /* outlives the daemon */
	struct daemon_fds fds;
	/* Trainers can connect. Comes once, from inside daemon_start() or later from the loop. */
	void (*ready)(void *user);
	/* The daemon is over: drained (status 0), or with an error that nothing inside can deal with. */
	void (*ended)(void *user, const struct failure *failure);
	void *user;
};

int daemon_new(const struct daemon_params *params, struct daemon **ret_daemon);
/* Opens the line. Returns 0, or -errno with a failure that names what could not be had. */
int daemon_start(struct daemon *daemon, struct failure *failure);
/* Takes no new trainers, lets requests under way finish within drain_timeout, then ended(). Again: ends at once. */
void daemon_drain(struct daemon *daemon);
/* Reads again what can be: LIVE options were already taken over by the caller; the static file is read here. */
int daemon_reload(struct daemon *daemon, struct failure *failure);
struct daemon *daemon_free(struct daemon *daemon);
DEFINE_CLEANUP(struct daemon *, daemon_free)

/* One line about the daemon's state for systemd and the log. */
void daemon_describe(const struct daemon *daemon, char *buffer, size_t len);
