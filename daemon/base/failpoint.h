/*
 * Places where a test ends, stops or delays the process, or makes a step fail: FAILPOINT("ledger-part-done") in the code
 * and BPS_FAILPOINTS="ledger-part-done=kill@3" in the environment. Built in by the option `failpoints` alone; without
 * it they are nothing. Any thread. See bps-testing(7), FAILPOINTS.
 */
#pragma once

#include "proto/c.h"

#ifdef BPS_FAILPOINTS
/* What the place itself has to do. */
enum failpoint { FAILPOINT_NOTHING, FAILPOINT_ERROR, FAILPOINT_CORRUPT, FAILPOINT_DROP };

/* Passes the place once more, and does what is asked for there. Returns what is left to do. */
enum failpoint failpoint_pass(const char *name);
#define FAILPOINT(name) ((void)failpoint_pass(name))
/* Whether the step is to fail; whether its bytes are to be others; whether what is said is not to be heard. */
#define FAILPOINT_FAILS(name)	 (failpoint_pass(name) == FAILPOINT_ERROR)
#define FAILPOINT_CORRUPTS(name) (failpoint_pass(name) == FAILPOINT_CORRUPT)
#define FAILPOINT_DROPS(name)	 (failpoint_pass(name) == FAILPOINT_DROP)
#else
#define FAILPOINT(name)		 ((void)0)
#define FAILPOINT_FAILS(name)	 false
#define FAILPOINT_CORRUPTS(name) false
#define FAILPOINT_DROPS(name)	 false
#endif
