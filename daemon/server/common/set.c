/*
 * The nodes that give to a part and those that want its result, by operation and block. round.c,
 * engine.c, keep.c and elastic.c ask.
 */
#include "server/common/set.h"

bool set_reduces(const struct data_header *header)
{
	return header->operation == OPERATION_PUSH_PULL ||
	       header->operation == OPERATION_REDUCE_SCATTER ||
	       header->operation == OPERATION_PUSH_PULL_ROWS ||
	       header->operation == OPERATION_ACCUMULATE;
}

/* A job's placement numbers its servers in 16 bits. */
static_assert(DATA_ROWS_DONE == UINT16_MAX + 1u, "no server has this number");

/* Blocks that an operation has, or may have. */
static uint64_t n_blocks(const struct job *job, const struct data_header *header)
{
	switch (header->operation) {
	case OPERATION_ALL_GATHER:
	case OPERATION_REDUCE_SCATTER:
		return job->size;
	case OPERATION_ALL_TO_ALL:
		return (uint64_t)job->size * job->size;
	case OPERATION_PUSH_PULL_ROWS:
		return DATA_ROWS_DONE + 1;
	default:
		return 1;
	}
}

static uint32_t source(const struct job *job, const struct data_header *header)
{
	switch (header->operation) {
	case OPERATION_BROADCAST:
		return job->node_of_rank[header->root];
	case OPERATION_ALL_GATHER:
		return job->node_of_rank[header->block];
	default:
		return job->node_of_rank[header->block / job->size];
	}
}

static uint32_t target(const struct job *job, const struct data_header *header)
{
	if (header->operation == OPERATION_REDUCE_SCATTER)
		return job->node_of_rank[header->block];
	return job->node_of_rank[header->block % job->size];
}

int set_check(const struct job *job, const struct data_header *header, struct failure *failure)
{
	if (header->block >= n_blocks(job, header))
		return failure_set(failure, -EINVAL, "job %s: %s has no block %u", job->owner.name,
				   operation_name(header->operation), header->block);
	if (job->membership.elastic && (header->operation == OPERATION_ALL_TO_ALL ||
					header->operation == OPERATION_PUSH_PULL_ROWS))
		return failure_set(failure, -EOPNOTSUPP, "job %s: it is elastic, and has no %s",
				   job->owner.name, operation_name(header->operation));
	if (header->operation == OPERATION_BROADCAST && header->root >= job->size)
		return failure_set(failure, -EINVAL, "job %s: broadcast from rank %u of %u",
				   job->owner.name, header->root, job->size);
	if (header->operation == OPERATION_ALL_TO_ALL && source(job, header) == target(job, header))
		return failure_set(failure, -EINVAL,
				   "job %s: block %u of all_to_all stays on node %u",
				   job->owner.name, header->block, source(job, header));
	return 0;
}

bool set_has(const struct job *job, const struct data_header *header, uint32_t node)
{
	if (job->nodes[node].out)
		return false;
	if (header->operation != OPERATION_ALL_TO_ALL)
		return true;
	return node == source(job, header) || node == target(job, header);
}

bool set_gives(const struct job *job, const struct data_header *header, uint32_t node)
{
	return set_reduces(header) || header->operation == OPERATION_BARRIER ||
	       node == source(job, header);
}

bool set_wants(const struct job *job, const struct data_header *header, uint32_t node)
{
	switch (header->operation) {
	case OPERATION_PUSH_PULL:
	case OPERATION_PUSH_PULL_ROWS:
	case OPERATION_ACCUMULATE:
		return true;
	case OPERATION_REDUCE_SCATTER:
		/* Whoever is lost, another has what those that have ended the round have got. */
		return job->membership.elastic || node == target(job, header);
	case OPERATION_ALL_TO_ALL:
		return node == target(job, header);
	case OPERATION_BROADCAST:
	case OPERATION_ALL_GATHER:
		return node != source(job, header);
	default:
		return false;
	}
}

bool set_is_possible(const struct job *job, const struct data_header *header)
{
	/* Its blocks are those of the ranks that there were. */
	if (job->membership.elastic && header->operation == OPERATION_REDUCE_SCATTER)
		return job->membership.n_gone == header->n_gone;
	return set_reduces(header) || header->operation == OPERATION_BARRIER || !header->part_len ||
	       !job->nodes[source(job, header)].out;
}

uint32_t set_count(const struct job *job, const struct data_header *header)
{
	return header->operation == OPERATION_ALL_TO_ALL ? 2 : job->n_nodes - job->membership.n_out;
}
