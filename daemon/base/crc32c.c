/*
 * CRC-32C in three ways: by carry-less multiplication of wide vectors, by the processor's CRC
 * instruction, by tables. The first call finds out what this processor has. transport/ and
 * daemon/ledger/ call.
 */
#include "base/crc32c.h"

#include <assert.h>
#include <endian.h>
#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
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

static uint32_t bytes[8][256]; /* a byte, followed by 0 to 7 zero bytes */
static _unused_ bool has_instruction, has_wide, has_product; /* as the processor has them */
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

#if defined(__x86_64__)

/*
 * Four vectors of 64 bytes go over the data. What a vector holds counts for what comes `distance`
 * bits later when it is multiplied by x^distance modulo the polynomial; of each 128 bits, the first
 * 64 by 64 powers more. A product of two reflected numbers is one power short, and a remainder of
 * 32 bits stands in the upper half of 64.
 */
#define WIDE ((size_t)256)

static uint64_t folds[3]
		     [8]; /* to the next four vectors; to the next one; of its lanes to its last */

static uint64_t power(unsigned n)
{
	uint32_t crc = 1u << 31; /* x^0 */

	while (n--)
		crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
	return (uint64_t)crc << 32;
}

static void make_fold(uint64_t *pair, unsigned distance)
{
	pair[0] = power(distance + 63);
	pair[1] = power(distance - 1);
}

static void make_folds(void)
{
	for (unsigned lane = 0; lane < 4; lane++) {
		make_fold(&folds[0][2 * lane], 4 * 512);
		make_fold(&folds[1][2 * lane], 512);
		if (lane < 3)
			make_fold(&folds[2][2 * lane], 128 * (3 - lane));
	}
}

#define WIDE_TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

WIDE_TARGET static __m512i fold(__m512i value, __m512i by, __m512i next)
{
	return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00),
					 _mm512_clmulepi64_epi128(value, by, 0x11), next, 0x96);
}

/*
 * At least WIDE bytes, of which it takes as many as are whole. crc is the register, not its
 * complement.
 */
WIDE_TARGET static uint32_t wide(uint32_t crc, const unsigned char **data, size_t *len)
{
	__m512i by = _mm512_loadu_si512(folds[0]), next = _mm512_loadu_si512(folds[1]), sum[4];
	__m128i last;

	for (unsigned i = 0; i < 4; i++)
		sum[i] = _mm512_loadu_si512(*data + 64 * i);
	sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
	for (*data += WIDE, *len -= WIDE; *len >= WIDE; *data += WIDE, *len -= WIDE)
		for (unsigned i = 0; i < 4; i++)
			sum[i] = fold(sum[i], by, _mm512_loadu_si512(*data + 64 * i));
	for (unsigned i = 0; i < 3; i++)
		sum[i + 1] = fold(sum[i], next, sum[i + 1]);
	/* Of the last lane there is nothing to fold: its factors are 0. */
	sum[0] = fold(sum[3], _mm512_loadu_si512(folds[2]), _mm512_setzero_si512());
	last = _mm_xor_si128(_mm_xor_si128(_mm512_extracti32x4_epi32(sum[0], 0),
					   _mm512_extracti32x4_epi32(sum[0], 1)),
			     _mm_xor_si128(_mm512_extracti32x4_epi32(sum[0], 2),
					   _mm512_extracti32x4_epi32(sum[3], 3)));
	return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(last)),
				       (uint64_t)_mm_extract_epi64(last, 1));
}

#endif

/*
 * By n: x to the power of 8 n - 32. A checksum multiplied by that, and then put through the 32 powers
 * that a checksum adds, has n zero bytes behind it.
 */
static uint32_t behind[CRC32C_JOIN_MAX + 1];

static void make_behind(void)
{
	uint32_t crc = 1u << 31; /* x^0 */

	for (unsigned i = 0; i < 32; i++)
		crc = crc >> 31 ? (crc ^ POLYNOMIAL) << 1 | 1 : crc << 1;
	for (size_t n = 0; n <= CRC32C_JOIN_MAX; n++) {
		behind[n] = crc;
		crc = crc >> 8 ^ bytes[0][crc & 0xff];
	}
}

#if defined(__x86_64__)

/* A product of two reflected numbers is one power short. */
__attribute__((target("pclmul,sse4.2"))) static uint32_t multiply(uint32_t crc, uint32_t by)
{
	__m128i product =
		_mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc), _mm_cvtsi32_si128((int)by), 0x00);

	return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product) << 1);
}

#endif

static void init(void)
{
	make_bytes();
	make_behind();
#if defined(__x86_64__)
	has_instruction = __builtin_cpu_supports("sse4.2");
	has_product = has_instruction && __builtin_cpu_supports("pclmul");
	has_wide = has_instruction && __builtin_cpu_supports("avx512f") &&
		   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
	if (has_wide)
		make_folds();
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

static uint32_t of_word(uint64_t word)
{
	uint32_t crc = 0;

	for (unsigned i = 0; i < 8; i++)
		crc ^= bytes[7 - i][word >> 8 * i & 0xff];
	return crc;
}

static uint32_t portable(uint32_t crc, const unsigned char *data, size_t len)
{
	crc = ~crc;
	for (; len >= 8; len -= 8, data += 8)
		crc = of_word(le64toh(load(data)) ^ crc);
	for (; len; len--)
		crc = crc >> 8 ^ bytes[0][(crc ^ *data++) & 0xff];
	return ~crc;
}

/* What a checksum counts for once there are len more bytes behind it. */
static uint32_t shift_portable(uint32_t crc, size_t len)
{
	uint64_t product = 0;

	assert(len <= CRC32C_JOIN_MAX);
	for (unsigned bit = 0; bit < 32; bit++)
		product ^= behind[len] >> bit & 1 ? (uint64_t)crc << bit : 0;
	return of_word(product << 1);
}

static uint32_t shift(uint32_t crc, size_t len)
{
	assert(len <= CRC32C_JOIN_MAX);
#if defined(__x86_64__)
	if (has_product)
		return multiply(crc, behind[len]);
#endif
	return shift_portable(crc, len);
}

#ifdef CRC_TARGET

/*
 * The instruction takes three cycles and can be begun each cycle: three neighbouring stretches at once, whose checksums are
 * then put together, as often as that is faster.
 */
CRC_TARGET static uint32_t stretches(uint32_t crc, const unsigned char **data, size_t *len)
{
	size_t least = has_product ? 64 : 256;

	while (*len >= 3 * least) {
		size_t stretch = MIN(*len / 3, (size_t)CRC32C_JOIN_MAX) / 8 * 8;
		uint64_t a = crc, b = 0, c = 0;

		for (size_t i = 0; i < stretch; i += 8) {
			a = CRC_WORD(a, load(*data + i));
			b = CRC_WORD(b, load(*data + stretch + i));
			c = CRC_WORD(c, load(*data + 2 * stretch + i));
		}
		crc = shift(shift((uint32_t)a, stretch) ^ (uint32_t)b, stretch) ^ (uint32_t)c;
		*data += 3 * stretch;
		*len -= 3 * stretch;
	}
	return crc;
}

CRC_TARGET static uint32_t by_instruction(uint32_t crc, const unsigned char *data, size_t len)
{
	crc = ~crc;
#if defined(__x86_64__)
	if (has_wide && len >= WIDE)
		crc = wide(crc, &data, &len);
#endif
	for (; len && (uintptr_t)data % 8; len--)
		crc = CRC_BYTE(crc, *data++);
	crc = stretches(crc, &data, &len);
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

uint32_t crc32c_join_portable(uint32_t first, uint32_t second, size_t len)
{
	(void)pthread_once(&once, init);
	return shift_portable(first, len) ^ second;
}

uint32_t crc32c_join(uint32_t first, uint32_t second, size_t len)
{
	(void)pthread_once(&once, init);
	return shift(first, len) ^ second;
}
