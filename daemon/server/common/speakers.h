/*
 * Peers of a job's nodes, each met once in a walk over the nodes: one peer may speak for many.
 * Lives as long as the walk. Control thread only.
 */
#pragma once

#include "proto/c.h"

struct peer;

struct speakers {
	const struct peer **slots;
	size_t n_slots; /* 0 or a power of two, twice as many as there may be peers */
};

/* Without memory each peer is met as often as it speaks for a node. */
void speakers_init(struct speakers *speakers, uint32_t n_nodes);
void speakers_done(struct speakers *speakers);
/* Whether the peer, one of n_nodes at most, is met for the first time. */
bool speakers_meet(struct speakers *speakers, const struct peer *peer);
