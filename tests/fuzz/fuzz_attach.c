/* ATTACH as a server takes it, and the JobJoined that it brings of a run that began when ranks regrouped. */
#include "fuzz.h"
#include "server/common/message.h"

/* What a server relies on once an attach has passed. */
static void check_attach(const struct attach *attach)
{
	FUZZ_CHECK(*attach->job && attach->size && attach->size <= JOB_RANKS_MAX);
	FUZZ_CHECK(attach->node < attach->n_nodes && attach->n_nodes <= attach->size);
	for (uint32_t i = 0; i < attach->size; i++)
		FUZZ_CHECK(attach->node_of_rank[i] < attach->n_nodes);
	FUZZ_CHECK(attach->request_timeout_ms && attach->request_timeout_ms <= TIMEOUT_MAX_MS);
	FUZZ_CHECK(attach->lost_timeout_ms <= TIMEOUT_MAX_MS);
	FUZZ_CHECK(!attach->regroups == !attach->joined);
}

/* Who asks is one node of the run, or none. */
static void ask(const struct attach *attach, const struct past *past, const struct join *join)
{
	uint32_t node = UINT32_MAX;
	int r = past_find(past, join, &node);

	FUZZ_CHECK(r ? r == -ENOENT : node < attach->n_nodes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(attach_freep) struct attach *attach = NULL;
	_cleanup_(freep) struct past *past = NULL;
	struct failure failure = { 0 };
	int r = attach_decode(data, size, &attach, &failure);

	if (r) {
		FUZZ_CHECK(r == failure.status && r < 0 && *failure.text);
		return 0;
	}
	check_attach(attach);
	if (!attach->regroups)
		return 0;
	FUZZ_CHECK(attach->resume && attach->elastic && attach->joined_number != attach->regroups);
	if (past_decode(attach->joined, attach->joined_len, &past))
		return 0;
	for (uint32_t i = 0; i <= attach->n_nodes; i++) {
		ask(attach, past, &(struct join){ .regroups = attach->regroups, .node = i });
		ask(attach, past, &(struct join){ .member = i });
	}
	return 0;
}
