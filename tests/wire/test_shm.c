/*
 * The memory shared with a trainer. Trainers carry the library they were built with: another layout needs another
 * SHM_VERSION.
 */
#include "proto/shm.h"
#include "test.h"

#define ASSERT_AT(type, field, offset, size)                           \
	do {                                                           \
		ASSERT_EQ(offsetof(struct type, field), offset);       \
		ASSERT_EQ(sizeof(((struct type *)NULL)->field), size); \
	} while (0)

TEST(the_parts_of_the_memory_stay_where_they_are)
{
	ASSERT_EQ(SHM_MAGIC, 0x4d535042);
	ASSERT_EQ(SHM_VERSION, 2);
	ASSERT_EQ(SHM_ENTRIES, 4096);
	ASSERT_EQ(SHM_SLOTS, 4096);
	ASSERT_EQ(SHM_RING_OFFSET, 4096);
	ASSERT_EQ(SHM_SLOT_OFFSET, 4096 + 4096 * 128);
	ASSERT_EQ(SHM_FLAG_OFFSET, 4096 + 4096 * 128 + 4096 * 512);
	ASSERT_EQ(SHM_LEN, 4096 + 4096 * 128 + 4096 * 512 + 4096 * 16);
}

TEST(the_header_stays)
{
	ASSERT_AT(shm_header, magic, 0, 4);
	ASSERT_AT(shm_header, version, 4, 4);
	ASSERT_AT(shm_header, n_entries, 8, 4);
	ASSERT_AT(shm_header, n_slots, 12, 4);
	ASSERT_AT(shm_header, len, 16, 8);
	ASSERT_AT(shm_header, tail, 64, 8);
	ASSERT_AT(shm_header, daemon_armed, 128, 4);
	ASSERT_AT(shm_header, trainer_armed, 192, 4);
	ASSERT_AT(shm_header, trainer_slot, 196, 4);
	ASSERT_AT(shm_header, trainer_enough, 200, 4);
	ASSERT_AT(shm_header, completions, 256, 8);
	ASSERT_AT(shm_header, order, 320, 2 * 1024);
}

TEST(an_entry_stays)
{
	ASSERT_EQ(sizeof(struct shm_entry), 128);
	ASSERT_AT(shm_entry, ticket, 0, 8);
	ASSERT_AT(shm_entry, round, 8, 8);
	ASSERT_AT(shm_entry, slot, 16, 4);
	ASSERT_AT(shm_entry, tensor, 20, 4);
	ASSERT_AT(shm_entry, operation, 24, 1);
	ASSERT_AT(shm_entry, reduction, 25, 1);
	ASSERT_AT(shm_entry, membership, 26, 2);
	ASSERT_AT(shm_entry, priority, 28, 4);
	ASSERT_AT(shm_entry, root, 32, 4);
	ASSERT_AT(shm_entry, input_buffer, 36, 4);
	ASSERT_AT(shm_entry, output_buffer, 40, 4);
	ASSERT_AT(shm_entry, counts_buffer, 44, 4);
	ASSERT_AT(shm_entry, input_offset, 48, 8);
	ASSERT_AT(shm_entry, input_count, 56, 8);
	ASSERT_AT(shm_entry, output_offset, 64, 8);
	ASSERT_AT(shm_entry, output_count, 72, 8);
	ASSERT_AT(shm_entry, counts_offset, 80, 8);
	ASSERT_AT(shm_entry, timeout_ms, 88, 8);
	ASSERT_AT(shm_entry, width, 96, 8);
	ASSERT_AT(shm_entry, ordinal, 96, 8);
	ASSERT_AT(shm_entry, input_rows_offset, 104, 8);
	ASSERT_AT(shm_entry, output_rows_offset, 112, 8);
	ASSERT_AT(shm_entry, input_rows_buffer, 120, 4);
	ASSERT_AT(shm_entry, input_dtype, 120, 4);
	ASSERT_AT(shm_entry, output_rows_buffer, 124, 4);
}

TEST(a_slot_stays)
{
	ASSERT_EQ(sizeof(struct shm_slot), 512);
	ASSERT_AT(shm_slot, state, 0, 4);
	ASSERT_AT(shm_slot, status, 4, 4);
	ASSERT_AT(shm_slot, ticket, 8, 8);
	ASSERT_AT(shm_slot, text, 16, 448);
	ASSERT_AT(shm_slot, no_text, 16, 4);
	ASSERT_AT(shm_slot, brief, 20, 4);
	ASSERT_AT(shm_slot, brief_rows, 24, 8);
	ASSERT_AT(shm_slot, n_rows, 464, 8);
	ASSERT_EQ(SHM_FREE, 0);
	ASSERT_EQ(SHM_PENDING, 1);
	ASSERT_EQ(SHM_DONE, 2);
}

TEST(the_accessors_point_there)
{
	char base[1];

	ASSERT_EQ((char *)shm_ring(base) - base, 4096);
	ASSERT_EQ((char *)shm_slots(base) - base, SHM_SLOT_OFFSET);
}

TEST(a_flag_stays)
{
	ASSERT_EQ(sizeof(struct shm_flag), 16);
	ASSERT_AT(shm_flag, ready, 0, 4);
	ASSERT_AT(shm_flag, done, 4, 4);
}

TEST(a_flag_is_compared_in_a_circle)
{
	ASSERT_TRUE(shm_flag_reached(7, 7) && shm_flag_reached(8, 7) && !shm_flag_reached(6, 7));
	ASSERT_TRUE(shm_flag_reached(0, 0xffffffff) && !shm_flag_reached(0xffffffff, 0x100000000));
	ASSERT_TRUE(shm_flag_reached(3, 0x500000003));
}
