/* Reductions of arrays by plain arithmetic, for tests of the server and of the agent. */
#include "expected.h"

#include <math.h>

static double half_value(uint16_t bits)
{
	int exponent = bits >> 10 & 31;
	double fraction = bits & 1023, value;

	if (exponent == 31)
		value = fraction > 0 ? NAN : INFINITY;
	else if (exponent)
		value = ldexp(1 + fraction / 1024, exponent - 15);
	else
		value = ldexp(fraction, -24);
	return bits >> 15 ? -value : value;
}

/* Rounds to the grid of the number's own exponent, ties to even. */
static uint16_t half_bits(float value)
{
	uint16_t sign = signbit(value) ? 0x8000 : 0;
	double v = fabs((double)value), step;
	int exponent;

	if (isnan(value))
		return 0x7e00;
	if (v >= 65520)
		return sign | 0x7c00;
	exponent = v > 0 ? ilogb(v) : -14;
	exponent = exponent < -14 ? -14 : exponent;
	step = ldexp(1, exponent - 10);
	v = nearbyint(v / step) * step;
	if (v >= ldexp(1, exponent + 1))
		exponent++;
	if (v < ldexp(1, -14))
		return sign | (uint16_t)ldexp(v, 24);
	return sign | (uint16_t)((exponent + 15) << 10) |
	       (uint16_t)(ldexp(v, 10 - exponent) - 1024);
}

static float bfloat_value(uint16_t bits)
{
	uint32_t word = (uint32_t)bits << 16;
	float value;

	memcpy(&value, &word, sizeof(value));
	return value;
}

static uint16_t bfloat_bits(float value)
{
	uint32_t word;

	if (isnan(value))
		return 0x7fc0;
	memcpy(&word, &value, sizeof(word));
	return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static float load_float(unsigned dtype, const void *input, size_t i)
{
	if (dtype == DTYPE_FLOAT32)
		return ((const float *)input)[i];
	if (dtype == DTYPE_FLOAT16)
		return (float)half_value(((const uint16_t *)input)[i]);
	return bfloat_value(((const uint16_t *)input)[i]);
}

static void store_float(unsigned dtype, void *output, size_t i, float value)
{
	uint32_t canonical = 0x7fc00000;

	if (dtype == DTYPE_FLOAT16)
		((uint16_t *)output)[i] = half_bits(value);
	else if (dtype == DTYPE_BFLOAT16)
		((uint16_t *)output)[i] = bfloat_bits(value);
	else if (isnan(value))
		memcpy((float *)output + i, &canonical, 4);
	else
		((float *)output)[i] = value;
}

static void reduce_floats(unsigned dtype, unsigned reduction, uint32_t size, uint32_t scale,
			  const void *const *inputs, size_t n_inputs, size_t n, void *output)
{
	for (size_t i = 0; i < n; i++) {
		volatile float value = load_float(dtype, inputs[0], i);

		for (size_t k = 1; k < n_inputs; k++) {
			float next = load_float(dtype, inputs[k], i);

			if (reduction == REDUCTION_SUM || reduction == REDUCTION_AVERAGE)
				value = value + next;
			else if (isnan(next) || (reduction == REDUCTION_MIN && next < value) ||
				 (reduction == REDUCTION_MAX && next > value))
				value = isnan(value) ? value : next;
		}
		if (reduction == REDUCTION_AVERAGE)
			value = value * (float)scale / (float)size;
		store_float(dtype, output, i, value);
	}
}

static void reduce_doubles(unsigned reduction, uint32_t size, const double *const *inputs,
			   size_t n_inputs, size_t n, double *output)
{
	uint64_t canonical = 0x7ff8000000000000;

	for (size_t i = 0; i < n; i++) {
		double value = inputs[0][i];

		for (size_t k = 1; k < n_inputs; k++) {
			double next = inputs[k][i];

			if (reduction == REDUCTION_SUM || reduction == REDUCTION_AVERAGE)
				value += next;
			else if (isnan(next) || (reduction == REDUCTION_MIN && next < value) ||
				 (reduction == REDUCTION_MAX && next > value))
				value = isnan(value) ? value : next;
		}
		if (reduction == REDUCTION_AVERAGE)
			value /= size;
		if (isnan(value))
			memcpy(&output[i], &canonical, 8);
		else
			output[i] = value;
	}
}

static int64_t load_integer(unsigned dtype, const void *input, size_t i)
{
	switch (dtype) {
	case DTYPE_INT64:
		return ((const int64_t *)input)[i];
	case DTYPE_INT32:
		return ((const int32_t *)input)[i];
	case DTYPE_INT16:
		return ((const int16_t *)input)[i];
	case DTYPE_INT8:
		return ((const int8_t *)input)[i];
	case DTYPE_BOOL:
		return ((const uint8_t *)input)[i] != 0;
	default:
		return ((const uint8_t *)input)[i];
	}
}

/* Wraps to the type. */
static void store_integer(unsigned dtype, void *output, size_t i, int64_t value)
{
	switch (dtype) {
	case DTYPE_INT64:
		((int64_t *)output)[i] = value;
		break;
	case DTYPE_INT32:
		((int32_t *)output)[i] = (int32_t)value;
		break;
	case DTYPE_INT16:
		((int16_t *)output)[i] = (int16_t)value;
		break;
	case DTYPE_INT8:
		((int8_t *)output)[i] = (int8_t)value;
		break;
	case DTYPE_BOOL:
		((uint8_t *)output)[i] = value != 0;
		break;
	default:
		((uint8_t *)output)[i] = (uint8_t)value;
		break;
	}
}

static void reduce_integers(unsigned dtype, unsigned reduction, uint32_t size,
			    const void *const *inputs, size_t n_inputs, size_t n, void *output)
{
	for (size_t i = 0; i < n; i++) {
		__int128 value = load_integer(dtype, inputs[0], i);

		for (size_t k = 1; k < n_inputs; k++) {
			int64_t next = load_integer(dtype, inputs[k], i);

			if (reduction == REDUCTION_MIN)
				value = MIN(value, next);
			else if (reduction == REDUCTION_MAX)
				value = MAX(value, next);
			else
				value += next;
		}
		if (reduction == REDUCTION_AVERAGE)
			value = value / size - (value % size < 0);
		store_integer(dtype, output, i, (int64_t)value);
	}
}

uint32_t expected_scale(uint32_t n_local)
{
	uint32_t scale = 1;

	while (scale < n_local)
		scale *= 2;
	return scale;
}

void expected_reduce(unsigned dtype, unsigned reduction, uint32_t size, uint32_t scale,
		     const void *const *inputs, size_t n_inputs, size_t n, void *output)
{
	if (dtype == DTYPE_FLOAT64)
		reduce_doubles(reduction, size, (const double *const *)inputs, n_inputs, n, output);
	else if (dtype <= DTYPE_BFLOAT16)
		reduce_floats(dtype, reduction, size, scale, inputs, n_inputs, n, output);
	else
		reduce_integers(dtype, reduction, size, inputs, n_inputs, n, output);
}
