/*
 * What the memory of this machine gives for so many reads and one write, with next to nothing computed: the bytes of all
 * inputs are or'ed. Loops as plain as STREAM's, in the ways that are fastest on some machine or other. Past the caches is
 * written only what the sum writes so: its next reader would not find it there.
 *
 * And what the processor gives for sums of types that it cannot add: nothing but the conversions and additions of each element, from
 * two lines of the first cache and to nowhere.
 */
#include "base/cpu.h"
#include "bench/bench.h"
#include "reduce/reduce.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 8")

/* len is a multiple of 8 registers, and of what is read of each of many. One function for each way and set of registers. */
#define LIMIT_LOOPS(name, attribute, vec, bytes, load, or, store)                                  \
	attribute static void name##_two(char *out, void *const *inputs, size_t n, size_t len)     \
	{                                                                                          \
		const char *a = inputs[0], *b = inputs[1];                                         \
                                                                                                   \
		for (size_t at = 0; at < len; at += 8 * (bytes)) {                                 \
			vec v[8];                                                                  \
                                                                                                   \
			UNROLL for (size_t i = 0; i < 8; i++) v[i] =                               \
				or (load(a + at + i * (bytes)), load(b + at + i * (bytes)));       \
			UNROLL for (size_t i = 0; i < 8; i++) store(out + at + i * (bytes), v[i]); \
		}                                                                                  \
	}                                                                                          \
	LIMIT_MANY(name##_many, 128, attribute, vec, bytes, load, or, store)                       \
	LIMIT_MANY(name##_more, 256, attribute, vec, bytes, load, or, store)

#define LIMIT_MANY(name, step, attribute, vec, bytes, load, or, store)                      \
	attribute static void name(char *out, void *const *inputs, size_t n, size_t len)    \
	{                                                                                   \
		for (size_t at = 0; at < len; at += (step)) {                               \
			vec v[(step) / (bytes)];                                            \
                                                                                            \
			UNROLL for (size_t i = 0; i < (step) / (bytes); i++) v[i] =         \
				load((const char *)inputs[0] + at + i * (bytes));           \
			for (size_t k = 1; k < n; k++) {                                    \
				const char *in = (const char *)inputs[k] + at;              \
                                                                                            \
				UNROLL for (size_t i = 0; i < (step) / (bytes); i++) v[i] = \
					or (v[i], load(in + i * (bytes)));                  \
			}                                                                   \
			UNROLL for (size_t i = 0; i < (step) / (bytes); i++)                \
				store(out + at + i * (bytes), v[i]);                        \
		}                                                                           \
	}

#ifdef __x86_64__
#define AVX512 __attribute__((target("avx512f")))
#define AVX2   __attribute__((target("avx2")))

#define LOAD_512(p)	_mm512_loadu_si512(p)
#define OR_512(a, b)	_mm512_or_si512(a, b)
#define LOAD_256(p)	_mm256_loadu_si256((const __m256i *)(const void *)(p))
#define OR_256(a, b)	_mm256_or_si256(a, b)
#define STORE_256(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define PAST_256(p, v)	_mm256_stream_si256((__m256i *)(void *)(p), v)
#define PAST_512(p, v)	_mm512_stream_si512((void *)(p), v)

LIMIT_LOOPS(wide, AVX512, __m512i, 64, LOAD_512, OR_512, _mm512_storeu_si512)
LIMIT_LOOPS(wide_past, AVX512, __m512i, 64, LOAD_512, OR_512, PAST_512)
LIMIT_LOOPS(half, AVX2, __m256i, 32, LOAD_256, OR_256, STORE_256)
LIMIT_LOOPS(half_past, AVX2, __m256i, 32, LOAD_256, OR_256, PAST_256)
#endif

typedef uint64_t plain_vec __attribute__((vector_size(16), aligned(1), may_alias));
#define PLAIN_LOAD(p)	  (*(const plain_vec *)(p))
#define PLAIN_OR(a, b)	  ((a) | (b))
#define PLAIN_STORE(p, v) (*(plain_vec *)(p) = (v))

LIMIT_LOOPS(plain, , plain_vec, 16, PLAIN_LOAD, PLAIN_OR, PLAIN_STORE)

static const struct limit_way {
	bool past;
	enum { ANY, NEEDS_AVX2, NEEDS_AVX512 } needs;
	void (*two)(char *out, void *const *inputs, size_t n, size_t len); /* or NULL */
	void (*many)(char *out, void *const *inputs, size_t n, size_t len);
} ways[] = {
#ifdef __x86_64__
	{ false, NEEDS_AVX512, wide_two, wide_many },
	{ false, NEEDS_AVX512, NULL, wide_more },
	{ true, NEEDS_AVX512, wide_past_two, wide_past_many },
	{ true, NEEDS_AVX512, NULL, wide_past_more },
	{ false, NEEDS_AVX2, half_two, half_many },
	{ false, NEEDS_AVX2, NULL, half_more },
	{ true, NEEDS_AVX2, half_past_two, half_past_many },
	{ true, NEEDS_AVX2, NULL, half_past_more },
#endif
	{ false, ANY, plain_two, plain_many },
	{ false, ANY, NULL, plain_more },
};
static_assert(ARRAY_SIZE(ways) <= LIMIT_WAYS, "all ways are tried");

static bool has(unsigned needs)
{
#ifdef __x86_64__
	return needs == ANY || (needs == NEEDS_AVX2 && __builtin_cpu_supports("avx2")) ||
	       (needs == NEEDS_AVX512 && __builtin_cpu_supports("avx512f"));
#else
	return needs == ANY;
#endif
}

bool limit_run(unsigned way, void *out, void *const *inputs, size_t n_inputs, size_t len)
{
	void (*run)(char *out, void *const *inputs, size_t n, size_t len);

	if (way >= ARRAY_SIZE(ways) || !has(ways[way].needs) ||
	    (ways[way].past && len < REDUCE_STREAM_BYTES))
		return false;
	run = n_inputs == 2 ? ways[way].two : ways[way].many;
	if (!run)
		return false;
	run(out, inputs, n_inputs, len);
	return true;
}

#ifdef __x86_64__

#define CONVERT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,fma,f16c")))
#define CONVERT_AVX2   __attribute__((target("avx2,f16c")))

/* Two registers of float32, of one piece of memory. */
struct pair_512 {
	__m512 a, b;
};
struct pair_256 {
	__m256 a, b;
};

CONVERT_AVX512 static inline struct pair_512 f16_of_512(const char *p)
{
	return (struct pair_512){
		_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)),
		_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p + 32))),
	};
}

CONVERT_AVX512 static inline void f16_to_512(struct pair_512 v)
{
	__m256i low = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
	__m256i high = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);

	__asm__ volatile("" : : "v"(low), "v"(high));
}

CONVERT_AVX512 static inline struct pair_512 bf16_of_512(const char *p)
{
	__m512i v = _mm512_loadu_si512(p);

	return (struct pair_512){
		_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
		_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000))),
	};
}

CONVERT_AVX512 static inline void bf16_to_512(struct pair_512 v)
{
	__m512bh both = _mm512_cvtne2ps_pbh(v.b, v.a);

	__asm__ volatile("" : : "v"(both));
}

CONVERT_AVX2 static inline __attribute__((__always_inline__)) struct pair_256
f16_of_256(const char *p)
{
	return (struct pair_256){
		_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
		_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 16))),
	};
}

CONVERT_AVX2 static inline __attribute__((__always_inline__)) void f16_to_256(struct pair_256 v)
{
	__m128i low = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
	__m128i high = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);

	__asm__ volatile("" : : "x"(low), "x"(high));
}

#define ADD_512(a, b) _mm512_fmadd_ps(b, _mm512_set1_ps(1), a)
#define ADD_VL(a, b)  _mm256_fmadd_ps(b, _mm256_set1_ps(1), a)
#define ADD_256(a, b) _mm256_add_ps(a, b)

/* The compiler must not see that a line stays as it is. Some pieces at once, so that no addition waits for another, as the registers hold. */
#define CONVERT_LOOP(name, attribute, pair, bytes, pieces, of, add, to)                          \
	attribute static void name(size_t n, size_t len)                                         \
	{                                                                                        \
		static const char lines[128] __attribute__((__aligned__(64)));                   \
                                                                                                 \
		for (size_t at = 0; at < len; at += (pieces) * (bytes)) {                        \
			const char *p = lines;                                                   \
			struct pair v[pieces];                                                   \
                                                                                                 \
			__asm__ volatile("" : "+r"(p));                                          \
			UNROLL for (size_t i = 0; i < (pieces); i++) v[i] = of(p + i * (bytes)); \
			for (size_t k = 1; k < n; k++) {                                         \
				__asm__ volatile("" : "+r"(p));                                  \
				UNROLL for (size_t i = 0; i < (pieces); i++)                     \
				{                                                                \
					struct pair x = of(p + i * (bytes));                     \
                                                                                                 \
					v[i].a = add(v[i].a, x.a);                               \
					v[i].b = add(v[i].b, x.b);                               \
				}                                                                \
			}                                                                        \
			UNROLL for (size_t i = 0; i < (pieces); i++) to(v[i]);                   \
		}                                                                                \
	}

CONVERT_LOOP(f16_512, CONVERT_AVX512, pair_512, 64, 2, f16_of_512, ADD_512, f16_to_512)
CONVERT_LOOP(bf16_512, CONVERT_AVX512, pair_512, 64, 2, bf16_of_512, ADD_512, bf16_to_512)
CONVERT_LOOP(f16_vl, CONVERT_AVX512, pair_256, 32, 4, f16_of_256, ADD_VL, f16_to_256)
CONVERT_LOOP(f16_256, CONVERT_AVX2, pair_256, 32, 2, f16_of_256, ADD_256, f16_to_256)

/* Where registers of 512 bits are done as halves, those of 256 may be the faster way. */
bool limit_convert(unsigned way, unsigned dtype, size_t n_inputs, size_t len)
{
	bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");

	if (dtype == DTYPE_FLOAT16 && wide)
		(way ? f16_vl : f16_512)(n_inputs, len);
	else if (way)
		return false;
	else if (dtype == DTYPE_FLOAT16 && has(NEEDS_AVX2) && cpu_has_f16c())
		f16_256(n_inputs, len);
	else if (dtype == DTYPE_BFLOAT16 && wide)
		bf16_512(n_inputs, len);
	else
		return false;
	return true;
}

#else

bool limit_convert(unsigned way, unsigned dtype, size_t n_inputs, size_t len)
{
	return false;
}

#endif
