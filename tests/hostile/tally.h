/*
 * What a rank of tests/hostile/rank.c tells the runner, and what that tells the rank: a file both map. The runner (tally.py)
 * writes `phase`, `paused` and `stop`, the rank all else. A round counts in the phase in which it began.
 */
#pragma once

#include <assert.h>
#include <stdatomic.h>
#include <stdint.h>

#define TALLY_PHASES 4096u

enum tally_state {
	TALLY_STARTING = 0,
	TALLY_WORKING = 1,
	TALLY_LEFT = 2,
	TALLY_FAILED = 3, /* why: text */
};

struct tally_phase {
	uint64_t rounds;
	uint64_t longest_ns;
};

struct tally {
	_Atomic uint32_t phase;
	_Atomic uint32_t paused;
	_Atomic uint32_t stop;
	_Atomic uint32_t state; /* enum tally_state */
	_Atomic uint32_t seen;	/* phase of the round under way */
	uint32_t pad;
	_Atomic uint64_t rounds;
	char text[480];
	struct tally_phase phases[TALLY_PHASES];
};
static_assert(sizeof(struct tally) == 512 + 16 * TALLY_PHASES, "tally.py reads it");
