#include "base/crc32c.h"

#include <endian.h>
#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_TARGET	    __attribute__((target("sse4.2")))
#define CRC_BYTE(crc, byte) _mm_crc32_u8((uint32_t)(crc), byte)
#define CRC_WORD(crc, word) _mm_crc32_u64(crc, word)
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define CRC_TARGET	    __attribute__((target("+crc")))
#define CRC_BYTE(crc, byte) __crc32cb((uint32_t)(crc), byte)
#define CRC_WORD(crc, word) __crc32cd((uint32_t)(crc), word)
#endif

#define POLYNOMIAL 0x82f63b78u /* reflected */

/*
 * The instruction takes three cycles and can be begun each cycle: three neighbouring stretches at once, whose checksums are
 * then put together. To put zeros behind a stretch is linear in its checksum, so a table for each byte of it does that.
 */
#define LONG  ((size_t)8192)
#define SHORT ((size_t)256)

static uint32_t bytes[8][256]; /* a byte, followed by 0 to 7 zero bytes */
static uint32_t long_zeros[4][256], short_zeros[4][256];
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_bytes(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t crc = i;

		for (unsigned bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
		bytes[0][i] = crc;
	}
	for (unsigned n = 1; n < 8; n++)
		for (unsigned i = 0; i < 256; i++)
			bytes[n][i] = bytes[n - 1][i] >> 8 ^ bytes[0][bytes[n - 1][i] & 0xff];
}

static void make_zeros(uint32_t zeros[4][256], size_t len)
{
	uint32_t of_bit[32];

	for (unsigned bit = 0; bit < 32; bit++) {
		uint32_t crc = 1u << bit;

		for (size_t i = 0; i < len; i++)
			crc = crc >> 8 ^ bytes[0][crc & 0xff];
		of_bit[bit] = crc;
	}
	for (unsigned n = 0; n < 4; n++)
		for (unsigned i = 0; i < 256; i++)
			for (unsigned bit = 0; bit < 8; bit++)
				zeros[n][i] ^= i >> bit & 1 ? of_bit[8 * n + bit] : 0;
}

static void init(void)
{
	make_bytes();
	make_zeros(long_zeros, LONG);
	make_zeros(short_zeros, SHORT);
#if defined(__x86_64__)
	has_instruction = __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
	has_instruction = getauxval(AT_HWCAP) & HWCAP_CRC32;
#endif
}

static uint64_t load(const unsigned char *data)
{
	uint64_t word;

	memcpy(&word, data, sizeof(word));
	return word;
}

static uint32_t portable(uint32_t crc, const unsigned char *data, size_t len)
{
	crc = ~crc;
	for (; len >= 8; len -= 8, data += 8) {
		uint64_t word = le64toh(load(data)) ^ crc;

		crc = 0;
		for (unsigned i = 0; i < 8; i++)
			crc ^= bytes[7 - i][word >> 8 * i & 0xff];
	}
	for (; len; len--)
		crc = crc >> 8 ^ bytes[0][(crc ^ *data++) & 0xff];
	return ~crc;
}

#ifdef CRC_TARGET

static uint32_t shift(uint32_t zeros[4][256], uint32_t crc)
{
	return zeros[0][crc & 0xff] ^ zeros[1][crc >> 8 & 0xff] ^ zeros[2][crc >> 16 & 0xff] ^
	       zeros[3][crc >> 24];
}

/* Three stretches of so many bytes each, as often as they fit. */
CRC_TARGET static uint32_t stretches(uint32_t crc, const unsigned char **data, size_t *len,
				     size_t stretch, uint32_t zeros[4][256])
{
	for (; *len >= 3 * stretch; *len -= 3 * stretch, *data += 3 * stretch) {
		uint64_t a = crc, b = 0, c = 0;

		for (size_t i = 0; i < stretch; i += 8) {
			a = CRC_WORD(a, load(*data + i));
			b = CRC_WORD(b, load(*data + stretch + i));
			c = CRC_WORD(c, load(*data + 2 * stretch + i));
		}
		crc = shift(zeros, shift(zeros, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
	}
	return crc;
}

CRC_TARGET static uint32_t by_instruction(uint32_t crc, const unsigned char *data, size_t len)
{
	crc = ~crc;
	for (; len && (uintptr_t)data % 8; len--)
		crc = CRC_BYTE(crc, *data++);
	crc = stretches(crc, &data, &len, LONG, long_zeros);
	crc = stretches(crc, &data, &len, SHORT, short_zeros);
	for (; len >= 8; len -= 8, data += 8)
		crc = (uint32_t)CRC_WORD(crc, load(data));
	for (; len; len--)
		crc = CRC_BYTE(crc, *data++);
	return ~crc;
}

#endif

uint32_t crc32c_portable(uint32_t crc, const void *data, size_t len)
{
	(void)pthread_once(&once, init);
	return portable(crc, data, len);
}

uint32_t crc32c(uint32_t crc, const void *data, size_t len)
{
	(void)pthread_once(&once, init);
#ifdef CRC_TARGET
	if (has_instruction)
		return by_instruction(crc, data, len);
#endif
	return portable(crc, data, len);
}
