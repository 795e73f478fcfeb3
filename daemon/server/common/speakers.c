/* A table of the peers that a walk over a job's nodes has met: whoever tells all nodes asks it. */
#include "server/common/speakers.h"

void speakers_init(struct speakers *speakers, uint32_t n_nodes)
{
	size_t n_slots = 4;

	while (n_slots < (size_t)n_nodes * 2)
		n_slots *= 2;
	*speakers = (struct speakers){ .slots = calloc(n_slots, sizeof(speakers->slots[0])) };
	if (speakers->slots)
		speakers->n_slots = n_slots;
}

void speakers_done(struct speakers *speakers)
{
	free(speakers->slots);
}

bool speakers_meet(struct speakers *speakers, const struct peer *peer)
{
	uint64_t hash = (uint64_t)(uintptr_t)peer * UINT64_C(0x9e3779b97f4a7c15);
	size_t at = hash >> 32;

	if (!speakers->n_slots)
		return true;
	for (;; at++) {
		const struct peer **slot = &speakers->slots[at & (speakers->n_slots - 1)];

		if (*slot == peer)
			return false;
		if (*slot)
			continue;
		*slot = peer;
		return true;
	}
}
