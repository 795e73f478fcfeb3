/*
 * CRC-32C, by what this processor has and by tables, against published values and a computation bit
 * by bit.
 */
#include "base/crc32c.h"
#include "test.h"

/* As it is defined: bit by bit. */
static uint32_t reference(uint32_t crc, const unsigned char *data, size_t len)
{
	crc = ~crc;
	for (size_t i = 0; i < len; i++) {
		crc ^= data[i];
		for (unsigned bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
	}
	return ~crc;
}

static void fill(unsigned char *data, size_t len)
{
	uint32_t state = 12345;

	for (size_t i = 0; i < len; i++) {
		state = state * 1664525u + 1013904223u;
		data[i] = (unsigned char)(state >> 24);
	}
}

/* RFC 3720, B.4. */
TEST(published_values)
{
	unsigned char data[32] = { 0 };

	ASSERT_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
	ASSERT_EQ(crc32c(0, data, 0), 0);
	ASSERT_EQ(crc32c(0, data, sizeof(data)), 0x8a9136aau);
	memset(data, 0xff, sizeof(data));
	ASSERT_EQ(crc32c(0, data, sizeof(data)), 0x62a8ab43u);
	for (unsigned i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)i;
	ASSERT_EQ(crc32c(0, data, sizeof(data)), 0x46dd794eu);
	ASSERT_EQ(crc32c_portable(0, data, sizeof(data)), 0x46dd794eu);
}

/* Any two pieces, also empty ones. */
TEST(pieces_are_joined)
{
	static unsigned char data[2 * CRC32C_JOIN_MAX];

	fill(data, sizeof(data));
	for (size_t len = 0; len <= CRC32C_JOIN_MAX; len += len < 70 ? 1 : 61) {
		for (size_t first = 0; first <= CRC32C_JOIN_MAX; first += 1 + first * 3) {
			uint32_t a = crc32c(0, data, first), b = crc32c(0, data + first, len);
			uint32_t want = crc32c(0, data, first + len);

			ASSERT_EQ(crc32c_join(a, b, len), want);
			ASSERT_EQ(crc32c_join_portable(a, b, len), want);
		}
	}
	ASSERT_EQ(crc32c_join(crc32c(0, data, 5), crc32c(0, data + 5, CRC32C_JOIN_MAX),
			      CRC32C_JOIN_MAX),
		  crc32c(0, data, 5 + CRC32C_JOIN_MAX));
}

/* Around the stretches that are taken at once, at every alignment. */
TEST(any_length_and_alignment)
{
	static const size_t near[] = { 0,	8,    64,	   184,	 256,	       768,
				       1024,	1528, 3 * 256 * 4, 8192, 3 * 4096 - 8, 3 * 8192,
				       6 * 8192 };
	static unsigned char data[7 * 8192];

	fill(data, sizeof(data));
	for (size_t i = 0; i < ARRAY_SIZE(near); i++) {
		for (size_t more = 0; more < 18; more++) {
			size_t at = more % 9, len = near[i] + more;
			uint32_t want = reference(7, data + at, len);

			ASSERT_EQ(crc32c(7, data + at, len), want);
			ASSERT_EQ(crc32c_portable(7, data + at, len), want);
		}
	}
}

TEST(in_pieces)
{
	static unsigned char data[100000];
	uint32_t want, crc = 0;
	size_t done = 0;

	fill(data, sizeof(data));
	want = reference(0, data, sizeof(data));
	for (size_t n = 1; done < sizeof(data); n = n * 3 + 1) {
		n = MIN(n, sizeof(data) - done);
		crc = crc32c(crc, data + done, n);
		done += n;
	}
	ASSERT_EQ(crc, want);
}
