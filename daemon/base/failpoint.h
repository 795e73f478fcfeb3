/*
 * Places where a test ends, stops or delays the process, or makes a step fail: FAILPOINT("ledger-part-done") in the code
 * and BPS_FAILPOINTS="ledger-part-done=kill@3" in the environment. Built in by the option `failpoints` alone; without
 * it they are nothing. Any thread. See bps(7), FAILPOINTS.
 */
#pragma once

#include "proto/c.h"

#ifdef BPS_FAILPOINTS
/* Passes the place once more, and does what is asked for there. Returns whether the step is to fail. */
bool failpoint_pass(const char *name);
#define FAILPOINT(name)	      ((void)failpoint_pass(name))
#define FAILPOINT_FAILS(name) failpoint_pass(name)
#else
#define FAILPOINT(name)	      ((void)0)
#define FAILPOINT_FAILS(name) false
#endif
