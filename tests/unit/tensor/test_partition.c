/*
 * The parts of every operation cover every byte of every block once, on every node alike; and the
 * layout of ranks.
 */
#include "tensor/tensor.h"
#include "test.h"

/* What the parts of an operation cover: every byte of every block exactly once, on every node alike. */

#define PART 64u

static struct layout layout_of(const uint32_t *nodes, uint32_t size, uint32_t n_nodes,
			       uint32_t node)
{
	struct layout layout;

	ASSERT_OK(layout_init(&layout, nodes, size, n_nodes, node));
	return layout;
}

TEST(one_block_is_cut_into_parts)
{
	struct layout layout = layout_of(NULL, 3, 1, 0);
	struct partition partition = {
		.layout = &layout,
		.operation = OPERATION_PUSH_PULL,
		.element_size = 4,
		.part_bytes = PART,
		.elements = 37,
	};
	struct extent extent;
	uint32_t n = 0;

	while (partition_next(&partition, &extent)) {
		ASSERT_EQ(extent.block, 0);
		ASSERT_EQ(extent.part, n);
		ASSERT_EQ(extent.offset, n * PART);
		ASSERT_EQ(extent.total, 148);
		ASSERT_EQ(extent.len, n < 2 ? PART : 20);
		ASSERT_TRUE(extent.source == RANK_ALL && extent.target == RANK_ALL);
		ASSERT_TRUE(extent.input_at == extent.offset && extent.output_at == extent.offset);
		n++;
	}
	ASSERT_EQ(n, 3);
	ASSERT_TRUE(!partition_next(&partition, &extent));
	layout_done(&layout);
}

TEST(nothing_is_one_part)
{
	struct layout layout = layout_of(NULL, 2, 1, 0);
	unsigned operations[] = { OPERATION_PUSH_PULL, OPERATION_BROADCAST, OPERATION_BARRIER };

	for (size_t i = 0; i < ARRAY_SIZE(operations); i++) {
		struct partition partition = {
			.layout = &layout,
			.operation = operations[i],
			.element_size = 4,
			.part_bytes = PART,
			/* A barrier has no data, whatever its tensor has. */
			.elements = operations[i] == OPERATION_BARRIER ? 100 : 0,
			.root = 1,
		};
		struct extent extent;

		ASSERT_TRUE(partition_next(&partition, &extent));
		ASSERT_EQ(extent.len, 0);
		ASSERT_EQ(extent.total, 0);
		ASSERT_EQ(extent.source, operations[i] == OPERATION_BROADCAST ? 1 : RANK_ALL);
		ASSERT_TRUE(!partition_next(&partition, &extent));
	}
	layout_done(&layout);
}

TEST(gather_and_scatter_follow_the_counts)
{
	static const uint64_t counts[] = { 10, 0, 40 };
	struct layout layout = layout_of(NULL, 3, 1, 0);

	for (int scatter = 0; scatter < 2; scatter++) {
		struct partition partition = {
			.layout = &layout,
			.operation = scatter ? OPERATION_REDUCE_SCATTER : OPERATION_ALL_GATHER,
			.element_size = 2,
			.part_bytes = PART,
			.counts = counts,
		};
		uint64_t at = 0, block_at[] = { 0, 20, 20 };
		struct extent extent;
		unsigned n_parts[3] = { 0 };

		while (partition_next(&partition, &extent)) {
			ASSERT_EQ(scatter ? extent.target : extent.source, extent.block);
			ASSERT_EQ(scatter ? extent.source : extent.target, RANK_ALL);
			ASSERT_EQ(scatter ? extent.input_at : extent.output_at, at);
			ASSERT_EQ(scatter ? extent.output_at : extent.input_at, extent.offset);
			ASSERT_EQ(at - extent.offset, block_at[extent.block]);
			ASSERT_EQ(extent.total, counts[extent.block] * 2);
			at += extent.len;
			n_parts[extent.block]++;
		}
		ASSERT_EQ(at, 100);
		/* An empty block is a part, so that other nodes can wait for it. */
		ASSERT_TRUE(n_parts[0] == 1 && n_parts[1] == 1 && n_parts[2] == 2);
	}
	layout_done(&layout);
}

/* Every pair appears on both its nodes, with the places where each has it. */
TEST(exchange_is_seen_alike_from_both_ends)
{
	enum { SIZE = 5, NODES = 3 };
	static const uint32_t nodes[SIZE] = { 0, 1, 0, 2, 1 };
	uint64_t counts[SIZE][2 * SIZE];
	unsigned n_seen[SIZE][SIZE] = { 0 };

	for (uint32_t from = 0; from < SIZE; from++)
		for (uint32_t to = 0; to < SIZE; to++)
			counts[from][to] = counts[to][SIZE + from] = (from * 7 + to * 3) % 11 * 5;

	for (uint32_t node = 0; node < NODES; node++) {
		struct layout layout = layout_of(nodes, SIZE, NODES, node);
		struct partition_rank ranks[SIZE] = { 0 };
		struct partition partition = {
			.layout = &layout,
			.operation = OPERATION_ALL_TO_ALL,
			.element_size = 4,
			.part_bytes = PART,
			.ranks = ranks,
		};
		struct extent extent;
		uint32_t before = 0;

		for (uint32_t i = 0; i < layout.n_local; i++)
			ranks[i].counts = counts[layout.rank_of_local[i]];
		while (partition_next(&partition, &extent)) {
			uint32_t from = extent.source, to = extent.target;
			uint64_t sent = 0, received = 0;

			ASSERT_TRUE(nodes[from] == node || nodes[to] == node);
			ASSERT_EQ(extent.block, from * SIZE + to);
			ASSERT_TRUE(extent.block >= before);
			before = extent.block;
			ASSERT_EQ(extent.total, counts[from][to] * 4);
			for (uint32_t i = 0; i < to; i++)
				sent += counts[from][i] * 4;
			for (uint32_t i = 0; i < from; i++)
				received += counts[to][SIZE + i] * 4;
			if (nodes[from] == node)
				ASSERT_EQ(extent.input_at, sent + extent.offset);
			if (nodes[to] == node)
				ASSERT_EQ(extent.output_at, received + extent.offset);
			if (!extent.part)
				n_seen[from][to]++;
		}
		layout_done(&layout);
	}
	for (uint32_t from = 0; from < SIZE; from++)
		for (uint32_t to = 0; to < SIZE; to++)
			ASSERT_EQ(n_seen[from][to], nodes[from] == nodes[to] ? 1 : 2);
}

TEST(layout_numbers_local_ranks_in_rank_order)
{
	static const uint32_t nodes[] = { 1, 0, 1, 2, 0 };
	struct layout layout = layout_of(nodes, 5, 3, 1);

	ASSERT_EQ(layout.n_local, 2);
	ASSERT_EQ(layout.rank_of_local[0], 0);
	ASSERT_EQ(layout.rank_of_local[1], 2);
	ASSERT_EQ(layout.local_of_rank[2], 1);
	ASSERT_EQ(layout.local_of_rank[1], RANK_AWAY);
	layout_done(&layout);
	/* From outside. */
	ASSERT_EQ(layout_init(&layout, nodes, 5, 2, 0), -EPROTO);
	ASSERT_EQ(layout_init(&layout, nodes, 5, 4, 3), -EPROTO);
	layout_done(&layout);
}
