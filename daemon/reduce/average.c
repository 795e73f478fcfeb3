/*
 * Averages of integers: summed in a wider type, a piece at a time, and divided downwards. Sums that
 * are not divided are checked by the same way. reduce.c has no other way to an average of integers.
 */
#include "reduce/kernel.h"

#define PIECE 256 /* elements: their wide sums stay in the first cache */

#define AVERAGE(name, type, wide, least, most)                                                     \
	static bool name(const struct reduce_span *span, uint64_t divisor)                         \
	{                                                                                          \
		const size_t n = span->len / sizeof(type);                                         \
		type *output = (type *)((char *)span->output + span->offset);                      \
		/* Of a narrow type no sum is larger. */                                           \
		const wide d = sizeof(wide) == 8 ? (wide)MIN(divisor, (uint64_t)INT64_MAX)         \
						 : (wide)divisor;                                  \
		bool fits = true;                                                                  \
		wide sum[PIECE];                                                                   \
                                                                                                   \
		for (size_t at = 0; at < n; at += PIECE) {                                         \
			const size_t m = MIN(n - at, (size_t)PIECE);                               \
                                                                                                   \
			for (size_t k = 0; k < span->n_inputs; k++) {                              \
				const type *input = (const type *)((const char *)span->inputs[k] + \
								   span->offset) +                 \
						    at;                                            \
                                                                                                   \
				for (size_t i = 0; i < m; i++)                                     \
					sum[i] = (k ? sum[i] : 0) + input[i];                      \
			}                                                                          \
			for (size_t i = 0; i < m; i++) {                                           \
				wide quotient = d == 1 ? sum[i] : sum[i] / d - (sum[i] % d < 0);   \
                                                                                                   \
				fits &= quotient >= (least) && quotient <= (most);                 \
				output[at + i] = (type)quotient;                                   \
			}                                                                          \
		}                                                                                  \
		return fits;                                                                       \
	}

AVERAGE(average_i64, int64_t, __int128, INT64_MIN, INT64_MAX)
AVERAGE(average_i32, int32_t, int64_t, INT32_MIN, INT32_MAX)
AVERAGE(average_i16, int16_t, int64_t, INT16_MIN, INT16_MAX)
AVERAGE(average_i8, int8_t, int64_t, INT8_MIN, INT8_MAX)
AVERAGE(average_u8, uint8_t, int64_t, 0, UINT8_MAX)

bool reduce_average(unsigned dtype, const struct reduce_span *span, uint64_t divisor)
{
	switch (dtype) {
	case DTYPE_INT64:
		return average_i64(span, divisor);
	case DTYPE_INT32:
		return average_i32(span, divisor);
	case DTYPE_INT16:
		return average_i16(span, divisor);
	case DTYPE_INT8:
		return average_i8(span, divisor);
	case DTYPE_UINT8:
		return average_u8(span, divisor);
	default:
		assert(false);
		return false;
	}
}
