/*
 * Elements of NCCL's types on the host: added, compared and divided with the rounding of a GPU.
 * nccl.c computes with them.
 */
#include "values.h"

#include <stdint.h>
#include <string.h>

size_t values_size(ncclDataType_t type)
{
	static const size_t sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };

	return (size_t)type < ARRAY_SIZE(sizes) ? sizes[type] : 0;
}

static float bits_float(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static uint32_t float_bits(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

static float from_bfloat16(uint16_t half)
{
	return bits_float((uint32_t)half << 16);
}

/* To nearest, ties to even. */
static uint16_t to_bfloat16(float value)
{
	uint32_t bits = float_bits(value);

	if (value != value)
		return 0x7fff;
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_float16(uint16_t half)
{
	uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31,
		 mantissa = half & 0x3ff;

	if (exponent == 31)
		return bits_float(sign | 0x7f800000 | mantissa << 13);
	if (exponent)
		return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
	/* mantissa * 2^-24, exactly */
	return bits_float(sign | float_bits((float)mantissa * 0x1p-24f));
}

static uint16_t to_float16(float value)
{
	uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;

	if (rest > 0x7f800000)
		return 0x7fff;
	if (rest >= 0x477ff000) /* 65520 and above round to infinity */
		return (uint16_t)(sign | 0x7c00);
	if (rest <
	    0x38800000) /* below 2^-14: adding 0.5 leaves multiples of 2^-24 in the mantissa, rounded to even */
		return (uint16_t)(sign | (float_bits(bits_float(rest) + 0.5f) - 0x3f000000));
	rest += 0xfff + (rest >> 13 & 1);
	return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

static float combine_float(float a, float b, ncclRedOp_t op)
{
	switch ((int)op) {
	case ncclProd:
		return a * b;
	case ncclMax:
		return a != a || a > b ? a : b;
	case ncclMin:
		return a != a || a < b ? a : b;
	default:
		return a + b;
	}
}

static double combine_double(double a, double b, ncclRedOp_t op)
{
	switch ((int)op) {
	case ncclProd:
		return a * b;
	case ncclMax:
		return a != a || a > b ? a : b;
	case ncclMin:
		return a != a || a < b ? a : b;
	default:
		return a + b;
	}
}

#define EACH(c_type, load, store, combine)                                   \
	for (size_t i = 0; i < n; i++) {                                     \
		c_type *t = (c_type *)to + i, f = ((const c_type *)from)[i]; \
		*t = store(combine(load(*t), load(f), op));                  \
	}                                                                    \
	break
/* Wraps around, signed or not. */
#define EACH_INTEGER(c_type, wide)                                           \
	for (size_t i = 0; i < n; i++) {                                     \
		c_type *t = (c_type *)to + i, f = ((const c_type *)from)[i]; \
		*t = op == ncclProd  ? (c_type)((wide)*t * (wide)f)          \
		     : op == ncclMax ? (*t > f ? *t : f)                     \
		     : op == ncclMin ? (*t < f ? *t : f)                     \
				     : (c_type)((wide)*t + (wide)f);         \
	}                                                                    \
	break
#define SAME(x) (x)

void values_combine(void *to, const void *from, size_t n, ncclDataType_t type, ncclRedOp_t op)
{
	switch (type) {
	case ncclInt8:
		EACH_INTEGER(int8_t, uint32_t);
	case ncclUint8:
		EACH_INTEGER(uint8_t, uint32_t);
	case ncclInt32:
		EACH_INTEGER(int32_t, uint32_t);
	case ncclUint32:
		EACH_INTEGER(uint32_t, uint32_t);
	case ncclInt64:
		EACH_INTEGER(int64_t, uint64_t);
	case ncclUint64:
		EACH_INTEGER(uint64_t, uint64_t);
	case ncclFloat16:
		EACH(uint16_t, from_float16, to_float16, combine_float);
	case ncclBfloat16:
		EACH(uint16_t, from_bfloat16, to_bfloat16, combine_float);
	case ncclFloat32:
		EACH(float, SAME, SAME, combine_float);
	case ncclFloat64:
		EACH(double, SAME, SAME, combine_double);
	}
}

void values_multiply(void *to, size_t n, ncclDataType_t type, double by)
{
	for (size_t i = 0; i < n; i++) {
		switch (type) {
		case ncclFloat16:
			((uint16_t *)to)[i] =
				to_float16(from_float16(((uint16_t *)to)[i]) * (float)by);
			break;
		case ncclBfloat16:
			((uint16_t *)to)[i] =
				to_bfloat16(from_bfloat16(((uint16_t *)to)[i]) * (float)by);
			break;
		case ncclFloat32:
			((float *)to)[i] *= (float)by;
			break;
		default:
			((double *)to)[i] *= by;
		}
	}
}

double values_get(const void *from, ncclDataType_t type)
{
	switch ((int)type) {
	case ncclFloat16:
		return (double)from_float16(*(const uint16_t *)from);
	case ncclBfloat16:
		return (double)from_bfloat16(*(const uint16_t *)from);
	case ncclFloat32:
		return (double)*(const float *)from;
	case ncclFloat64:
		return *(const double *)from;
	default:
		return 0;
	}
}

#define DIVIDE(c_type, load, store, by)                                    \
	for (size_t i = 0; i < n; i++)                                     \
		((c_type *)to)[i] = store(load(((c_type *)to)[i]) / (by)); \
	break

void values_divide(void *to, size_t n, ncclDataType_t type, int by)
{
	switch (type) {
	case ncclInt8:
		DIVIDE(int8_t, SAME, (int8_t), by);
	case ncclUint8:
		DIVIDE(uint8_t, SAME, (uint8_t), by);
	case ncclInt32:
		DIVIDE(int32_t, SAME, (int32_t), by);
	case ncclUint32:
		DIVIDE(uint32_t, SAME, (uint32_t), (uint32_t)by);
	case ncclInt64:
		DIVIDE(int64_t, SAME, (int64_t), by);
	case ncclUint64:
		DIVIDE(uint64_t, SAME, (uint64_t), (uint64_t)by);
	case ncclFloat16:
		DIVIDE(uint16_t, from_float16, to_float16, (float)by);
	case ncclBfloat16:
		DIVIDE(uint16_t, from_bfloat16, to_bfloat16, (float)by);
	case ncclFloat32:
		DIVIDE(float, SAME, SAME, (float)by);
	case ncclFloat64:
		DIVIDE(double, SAME, SAME, (double)by);
	}
}
