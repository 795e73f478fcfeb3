/*
 * The loops that kernels of one instruction set are made of, from its primitives. A file that includes simd.h, and with that
 * this, has defined before, for its own registers:
 *
 *	vec, VEC_BYTES			a register seen as bytes, and its size
 *	vec_load, vec_store, vec_stream	VEC_BYTES from and to any address; to an aligned one past the caches
 *	vec_fence			orders streamed stores before later ones
 *	bf16_widen			VEC_BYTES of memory as two registers of float32, in order; so does f16_load
 *	f16_load f16_store bf16_...	VEC_BYTES of memory as two registers of float32, in an order of their own; the store
 *					rounds, makes NaNs canonical, and has `stream` as its last argument. That of float16
 *					is given n pairs, that of bfloat16 one, without NaNs that have low bits, as the sums of
 *					its type
 *	f16_add				as f32_add, of what f16_load gives and sums of that
 *	f16_through, bf16_through	float32 rounded to that type and back
 *	TYPE_add, TYPE_min, TYPE_max	(acc, x) with the meaning reduce.h gives them, for f64 f32 i64 i32 i16 i8 u8
 *					(no u8_add)
 *	f32_div, f64_div, _canonical	by a scalar; NaNs made canonical
 *	bool_truth			non-zero bytes become 1
 *
 * Everything is inlined into the loops of each kernel.
 */
#pragma once

#include "reduce/kernel.h"

#define SIMD_INLINE static inline __attribute__((__always_inline__))
#define SIMD_UNROLL _Pragma("GCC unroll 4")

/* What makes a kernel of the loops below; constant wherever it is used, so the calls are inlined. */
struct simd_lanes {
	size_t bytes;	    /* of output that a pair takes */
	size_t input_bytes; /* and of an input: as many, or half of it */
	struct simd_pair (*load)(const void *p);
	vec (*step)(vec acc, vec x);
	vec (*finish)(vec acc, const struct reduce_span *span);
	void (*store)(void *p, const struct simd_pair *pairs, size_t n, bool stream);
	unsigned dtype, reduction;
};

/* What is left at the end is less than a pair: the scalar kernel gives the same bits. */
static __attribute__((__noinline__)) void simd_tail(const struct reduce_span *whole, size_t done,
						    unsigned dtype, unsigned reduction, bool widens)
{
	struct reduce_span span = *whole;

	span.offset += done;
	span.len -= done;
	span.stream = false;
	if (widens)
		reduce_kernels_scalar.widen[dtype][reduction](&span);
	else
		reduce_kernels_scalar.run[dtype][reduction](&span);
}

/* What an input has for the output's bytes from `at` on. */
SIMD_INLINE const char *simd_input(const struct simd_lanes l, const void *input, size_t at)
{
	return (const char *)input + at / (l.bytes / l.input_bytes);
}

/*
 * Conversions fill the window in which the processor sees what comes: the lines of what is converted are asked for some lines
 * before. Asked for too far ahead they are gone again where inputs share places in the first cache.
 */
SIMD_INLINE void simd_ahead(const char *in, size_t len)
{
	SIMD_UNROLL for (size_t i = 0; i < len; i += 64) __builtin_prefetch(in + 256 + i);
}

SIMD_INLINE struct simd_pair simd_step(const struct simd_lanes l, struct simd_pair acc,
				       const void *p)
{
	struct simd_pair x = l.load(p);

	return (struct simd_pair){ l.step(acc.a, x.a), l.step(acc.b, x.b) };
}

SIMD_INLINE void simd_finish(const struct simd_lanes l, const struct reduce_span *span,
			     struct simd_pair *pairs, size_t n)
{
	SIMD_UNROLL for (size_t i = 0; i < n; i++)
	{
		pairs[i].a = l.finish(pairs[i].a, span);
		pairs[i].b = l.finish(pairs[i].b, span);
	}
}

/*
 * Two inputs, as most sums have: their lines are asked for in turns and four pairs at a time, which the memory and its
 * prefetchers answer a third faster than one input after the other.
 */
SIMD_INLINE size_t simd_two(const struct reduce_span *span, const struct simd_lanes l, bool stream)
{
	const char *first = simd_input(l, span->inputs[0], span->offset);
	const char *second = simd_input(l, span->inputs[1], span->offset);
	char *out = (char *)span->output + span->offset;
	size_t at = 0, len = span->len, b = l.bytes, in_b = l.input_bytes;

	for (; len - at >= 4 * b; at += 4 * b, first += 4 * in_b, second += 4 * in_b) {
		struct simd_pair v[4];

		if (!stream && in_b < 2 * VEC_BYTES) {
			simd_ahead(first, 4 * in_b);
			simd_ahead(second, 4 * in_b);
		}
		SIMD_UNROLL for (size_t i = 0; i < 4; i++) v[i] =
			simd_step(l, l.load(first + i * in_b), second + i * in_b);
		simd_finish(l, span, v, 4);
		l.store(out + at, v, 4, stream);
	}
	return at;
}

/*
 * Of each input so many bytes at a time: from the caches, eight inputs are added a tenth faster by 256 than by 128; from memory
 * that is no gain, and what is converted would take too many registers. Asking for lines of the inputs pays where they come
 * from memory; in the cache it takes a tenth longer.
 */
SIMD_INLINE size_t simd_many(const struct reduce_span *span, const struct simd_lanes l, bool stream)
{
	const void *const *inputs = span->inputs;
	char *out = (char *)span->output + span->offset;
	size_t at = 0, len = span->len, n = span->n_inputs, offset = span->offset;
	const size_t b = l.bytes, in_b = l.input_bytes;
	const size_t bytes = in_b == 2 * VEC_BYTES && !stream ? 256 : 128;
	const size_t n_pairs = MIN(bytes / in_b, 4u);

	for (; len - at >= n_pairs * b; at += n_pairs * b) {
		const char *in = simd_input(l, inputs[0], offset + at);
		struct simd_pair v[4];

		/* Before conversions fill the window in which the processor sees what comes. */
		if (!stream && in_b < 2 * VEC_BYTES) {
			__builtin_prefetch(out + at, 1);
			__builtin_prefetch(out + at + 64, 1);
		}
		SIMD_UNROLL for (size_t i = 0; i < n_pairs; i++) v[i] = l.load(in + i * in_b);
		for (size_t k = 1; k < n; k++) {
			in = simd_input(l, inputs[k], offset + at);
			if (stream)
				simd_ahead(in, n_pairs * in_b);
			SIMD_UNROLL for (size_t i = 0; i < n_pairs; i++) v[i] =
				simd_step(l, v[i], in + i * in_b);
		}
		simd_finish(l, span, v, n_pairs);
		l.store(out + at, v, n_pairs, stream);
	}
	return at;
}

SIMD_INLINE void simd_run(const struct reduce_span *span, const struct simd_lanes l)
{
	size_t at, b = l.bytes;

	/* Each with a constant: no loop asks. */
	if (span->n_inputs == 2 && span->stream)
		at = simd_two(span, l, true);
	else if (span->n_inputs == 2)
		at = simd_two(span, l, false);
	else if (span->stream)
		at = simd_many(span, l, true);
	else
		at = simd_many(span, l, false);
	for (; span->len - at >= b; at += b) {
		struct simd_pair v = l.load(simd_input(l, span->inputs[0], span->offset + at));

		for (size_t k = 1; k < span->n_inputs; k++)
			v = simd_step(l, v, simd_input(l, span->inputs[k], span->offset + at));
		simd_finish(l, span, &v, 1);
		l.store((char *)span->output + span->offset + at, &v, 1, false);
	}
	if (at < span->len)
		simd_tail(span, at, l.dtype, l.reduction, l.bytes != l.input_bytes);
	if (span->stream)
		vec_fence();
}

SIMD_INLINE struct simd_pair whole_load(const void *p)
{
	return (struct simd_pair){ vec_load(p), vec_load((const char *)p + VEC_BYTES) };
}

SIMD_INLINE void whole_store(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	char *at = p;

	SIMD_UNROLL for (size_t i = 0; i < n; i++, at += 2 * VEC_BYTES)
	{
		if (stream) {
			vec_stream(at, pairs[i].a);
			vec_stream(at + VEC_BYTES, pairs[i].b);
		} else {
			vec_store(at, pairs[i].a);
			vec_store(at + VEC_BYTES, pairs[i].b);
		}
	}
}

SIMD_INLINE void bf16_store_all(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	SIMD_UNROLL for (size_t i = 0; i < n; i++)
		bf16_store((char *)p + i * VEC_BYTES, pairs[i], stream);
}

SIMD_INLINE vec keep(vec acc, const struct reduce_span *span)
{
	return acc;
}

SIMD_INLINE vec truth(vec acc, const struct reduce_span *span)
{
	return bool_truth(acc);
}

SIMD_INLINE vec f64_finish(vec acc, const struct reduce_span *span)
{
	return f64_canonical(acc);
}

SIMD_INLINE vec f64_average(vec acc, const struct reduce_span *span)
{
	return f64_div(f64_canonical(acc), span->divisor_f64);
}

SIMD_INLINE vec f32_finish(vec acc, const struct reduce_span *span)
{
	return f32_canonical(acc);
}

SIMD_INLINE vec f32_average(vec acc, const struct reduce_span *span)
{
	return f32_div(f32_canonical(acc), span->divisor_f32);
}

SIMD_INLINE vec f16_average(vec acc, const struct reduce_span *span)
{
	acc = f32_canonical(acc);
	if (span->round_before_division)
		acc = f16_through(f32_div(acc, span->scale_f16));
	return f32_div(acc, span->divisor_f32);
}

SIMD_INLINE vec bf16_average(vec acc, const struct reduce_span *span)
{
	acc = f32_canonical(acc);
	if (span->round_before_division)
		acc = bf16_through(acc);
	return f32_div(acc, span->divisor_f32);
}
