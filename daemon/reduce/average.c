/*
 * Averages of integers: summed in a wider type, a piece at a time, and divided downwards. Sums that
 * are not divided are checked by the same way. reduce.c has no other way to an average of integers.
 */
#include "reduce/kernel.h"

#define PIECE 256 /* elements: their wide sums stay in the first cache */

/* Of a narrow type no sum is larger than a divisor of 63 bits. */
#define AVERAGE(name, type, wide, least, most)                                             \
	static void name##_begin(void *acc, const void *input, size_t n)                   \
	{                                                                                  \
		wide *sum = acc;                                                           \
		const type *from = input;                                                  \
                                                                                           \
		for (size_t i = 0; i < n; i++)                                             \
			sum[i] = from[i];                                                  \
	}                                                                                  \
	static void name##_add(void *acc, const void *input, size_t n)                     \
	{                                                                                  \
		wide *sum = acc;                                                           \
		const type *from = input;                                                  \
                                                                                           \
		for (size_t i = 0; i < n; i++)                                             \
			sum[i] += from[i];                                                 \
	}                                                                                  \
	static bool name##_end(const void *acc, void *output, size_t n,                    \
			       const struct reduce_span *span, uint64_t divisor)           \
	{                                                                                  \
		const wide *sum = acc;                                                     \
		type *to = output;                                                         \
		const wide d = sizeof(wide) == 8 ? (wide)MIN(divisor, (uint64_t)INT64_MAX) \
						 : (wide)divisor;                          \
		bool fits = true;                                                          \
                                                                                           \
		(void)span;                                                                \
		for (size_t i = 0; i < n; i++) {                                           \
			wide quotient = d == 1 ? sum[i] : sum[i] / d - (sum[i] % d < 0);   \
                                                                                           \
			fits &= quotient >= (least) && quotient <= (most);                 \
			to[i] = (type)quotient;                                            \
		}                                                                          \
		return fits;                                                               \
	}                                                                                  \
	static const struct reduce_fold name = { sizeof(wide), name##_begin, name##_add,   \
						 name##_end };

AVERAGE(average_i64, int64_t, __int128, INT64_MIN, INT64_MAX)
AVERAGE(average_i32, int32_t, int64_t, INT32_MIN, INT32_MAX)
AVERAGE(average_i16, int16_t, int64_t, INT16_MIN, INT16_MAX)
AVERAGE(average_i8, int8_t, int64_t, INT8_MIN, INT8_MAX)
AVERAGE(average_u8, uint8_t, int64_t, 0, UINT8_MAX)

const struct reduce_fold *reduce_average_fold(unsigned dtype)
{
	switch (dtype) {
	case DTYPE_INT64:
		return &average_i64;
	case DTYPE_INT32:
		return &average_i32;
	case DTYPE_INT16:
		return &average_i16;
	case DTYPE_INT8:
		return &average_i8;
	case DTYPE_UINT8:
		return &average_u8;
	default:
		assert(false);
		return NULL;
	}
}

bool reduce_average(unsigned dtype, const struct reduce_span *span, uint64_t divisor)
{
	const struct reduce_fold *fold = reduce_average_fold(dtype);
	const size_t size = dtype_size(dtype);
	__int128 sum[PIECE];
	bool fits = true;

	for (size_t at = 0, len; at < span->len; at += len) {
		const size_t offset = span->offset + at;

		len = MIN(span->len - at, PIECE * size);
		fold->begin(sum, (const char *)span->inputs[0] + offset, len / size);
		for (size_t k = 1; k < span->n_inputs; k++)
			fold->add(sum, (const char *)span->inputs[k] + offset, len / size);
		fits &= fold->end(sum, (char *)span->output + offset, len / size, span, divisor);
	}
	return fits;
}
