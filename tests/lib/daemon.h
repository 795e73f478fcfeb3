/*
 * A real bps-daemon for a test: the program that BPS_DAEMON names (meson sets it), with sockets, configuration and log
 * in a directory of its own below test_dir(). start() returns once the daemon has said READY=1 to its NOTIFY_SOCKET.
 * Whatever goes wrong fails the test and shows the daemon's log. A daemon may be started again after stop() or kill(),
 * at the same place: that is a restart. Daemons of one test have different names.
 *
 *	_cleanup_(test_daemon_donep) struct test_daemon daemon = { .name = "a" };
 *
 *	test_daemon_start(&daemon);
 *	... bps_open(daemon.socket) ...
 *	test_daemon_stop(&daemon);
 */
#pragma once

#include "proto/c.h"
#include <sys/types.h>

struct test_daemon {
	/* Set before start(); all but the name may be left out. */
	const char *name; /* of its directory */
	const char *const *
		args; /* further arguments, NULL at the end: (const char *[]){ "--set", "x=y", NULL } */
	const char *config;    /* content of its configuration file */
	const char *log_level; /* NULL: "debug" */
	const char *const *
		wrapper; /* what the command line starts with, NULL at the end; must exec its arguments */
	bool has_netns;
	int netns_fd; /* the network namespace to start it in, if has_netns; stays the caller's */

	/* Set by start(). */
	pid_t pid; /* 0: does not run */
	int pidfd;
	int notify_fd;
	char dir[64];
	char socket[80];       /* --socket: trainers */
	char admin_socket[80]; /* --admin-socket: bpsctl */
	char config_path[80];
	char log_path[80]; /* its stderr; appended to by each start */
};

void test_daemon_start(struct test_daemon *daemon);
/*
 * The same without the wait: for one that is expected to refuse, or that waits for others. test_daemon_ready() waits
 * for what it has announced; test_daemon_exited() for its end, and returns its exit status or minus the signal.
 */
void test_daemon_launch(struct test_daemon *daemon);
void test_daemon_ready(struct test_daemon *daemon);
int test_daemon_exited(struct test_daemon *daemon);

/* SIGTERM; fails unless it exits with 0 within the limit. */
void test_daemon_stop(struct test_daemon *daemon);
/* SIGKILL, and waits for its end. */
void test_daemon_kill(struct test_daemon *daemon);
/* Whether it still runs. */
bool test_daemon_alive(const struct test_daemon *daemon);
/* All that it has logged so far, in newly allocated memory. */
char *test_daemon_log(const struct test_daemon *daemon);
/* stop(), if it runs, for _cleanup_. */
void test_daemon_donep(struct test_daemon *daemon);
