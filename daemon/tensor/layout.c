/*
 * Makes the layout of a job from the node of each rank. The agent does so when a job is formed,
 * attached or resumed.
 */
#include "tensor/tensor.h"

int layout_init(struct layout *layout, const uint32_t *node_of_rank, uint32_t size,
		uint32_t n_nodes, uint32_t node)
{
	struct layout made = { .size = size, .n_nodes = n_nodes, .node = node };
	_cleanup_(freep) uint32_t *n_of_node = calloc(MAX(n_nodes, 1u), sizeof(uint32_t));

	made.node_of_rank = calloc(size, sizeof(uint32_t));
	made.local_of_rank = calloc(size, sizeof(uint32_t));
	made.rank_of_local = calloc(size, sizeof(uint32_t));
	if (!made.node_of_rank || !made.local_of_rank || !made.rank_of_local || !n_of_node) {
		layout_done(&made);
		return error_origin(-ENOMEM);
	}

	for (uint32_t rank = 0; rank < size; rank++) {
		uint32_t at = node_of_rank ? node_of_rank[rank] : 0;

		if (at >= n_nodes) {
			layout_done(&made);
			return error_origin(-EPROTO);
		}
		made.node_of_rank[rank] = at;
		made.n_most = MAX(made.n_most, ++n_of_node[at]);
		made.local_of_rank[rank] = at == node ? made.n_local : RANK_AWAY;
		if (at == node)
			made.rank_of_local[made.n_local++] = rank;
	}
	if (!made.n_local) {
		layout_done(&made);
		return error_origin(-EPROTO);
	}
	*layout = made;
	return 0;
}

void layout_done(struct layout *layout)
{
	free(layout->node_of_rank);
	free(layout->local_of_rank);
	free(layout->rank_of_local);
	*layout = (struct layout){ 0 };
}
