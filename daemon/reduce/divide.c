/*
 * Floor of an integer over a divisor by way of a floating-point type, which vectorises where
 * integer division does not. Exact: a quotient that is not whole is at least one part in 2^31
 * (2^15) away from the next whole number, and float64 (float32) keeps 2^53 (2^24). reduce.c
 * divides sums of averages so.
 */
#include "reduce/kernel.h"

#define DIVIDE(name, type, float_t)                                                 \
	static void name(type *p, size_t n, float_t divisor)                        \
	{                                                                           \
		for (size_t i = 0; i < n; i++) {                                    \
			float_t quotient = (float_t)p[i] / divisor;                 \
			int32_t truncated = (int32_t)quotient;                      \
                                                                                    \
			p[i] = (type)(truncated - (quotient < (float_t)truncated)); \
		}                                                                   \
	}

DIVIDE(divide_i32, int32_t, double)
DIVIDE(divide_i16, int16_t, float)
DIVIDE(divide_i8, int8_t, float)
DIVIDE(divide_u8, uint8_t, float)

static void divide_i64(int64_t *p, size_t n, uint64_t divisor)
{
	int64_t d = (int64_t)divisor;

	for (size_t i = 0; i < n; i++) {
		if (divisor > INT64_MAX)
			p[i] = p[i] < 0 ? -1 : 0;
		else
			p[i] = p[i] / d - (p[i] % d < 0);
	}
}

void reduce_divide(unsigned dtype, void *data, size_t n_elements, uint64_t divisor)
{
	switch (dtype) {
	case DTYPE_INT64:
		divide_i64(data, n_elements, divisor);
		break;
	case DTYPE_INT32:
		divide_i32(data, n_elements, (double)divisor);
		break;
	case DTYPE_INT16:
		divide_i16(data, n_elements, (float)divisor);
		break;
	case DTYPE_INT8:
		divide_i8(data, n_elements, (float)divisor);
		break;
	case DTYPE_UINT8:
		divide_u8(data, n_elements, (float)divisor);
		break;
	default:
		assert(false);
	}
}
