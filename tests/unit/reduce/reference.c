/*
 * Reductions of one element, from the definition. test_reduce.c compares the kernels with it, bit
 * by bit.
 */
#include "reference.h"
#include <math.h>

/* A binary floating-point format. */
struct format {
	int exponent_bits, fraction_bits;
};

static const struct format half = { 5, 10 }, brain = { 8, 7 }, single = { 8, 23 };

static double decode(struct format f, uint64_t bits)
{
	int bias = (1 << (f.exponent_bits - 1)) - 1;
	uint64_t fraction = bits & ((1ull << f.fraction_bits) - 1);
	int exponent = (int)(bits >> f.fraction_bits) & ((1 << f.exponent_bits) - 1);
	bool negative = bits >> (f.fraction_bits + f.exponent_bits) & 1;
	double x;

	if (exponent == (1 << f.exponent_bits) - 1)
		x = fraction ? NAN : INFINITY;
	else if (!exponent)
		x = ldexp((double)fraction, 1 - bias - f.fraction_bits);
	else
		x = ldexp((double)(fraction + (1ull << f.fraction_bits)),
			  exponent - bias - f.fraction_bits);
	return negative ? -x : x;
}

static uint64_t encode(struct format f, double x)
{
	int bias = (1 << (f.exponent_bits - 1)) - 1, exponent, least = 1 - bias;
	uint64_t sign = (uint64_t) !!signbit(x) << (f.fraction_bits + f.exponent_bits);
	uint64_t infinity = ((1ull << f.exponent_bits) - 1) << f.fraction_bits;
	double units;

	if (isnan(x))
		return infinity | 1ull << (f.fraction_bits - 1);
	if (isinf(x))
		return sign | infinity;
	if (x == 0)
		return sign;
	(void)frexp(x, &exponent);
	exponent = exponent - 1 < least ? least : exponent - 1;
	units = nearbyint(ldexp(fabs(x), f.fraction_bits - exponent));
	/* units is the fraction with its leading bit, or without where the number is denormal. */
	if (units >= ldexp(1, f.fraction_bits + 1)) {
		units /= 2;
		exponent++;
	}
	if (exponent > bias)
		return sign | infinity;
	return sign | (((uint64_t)(exponent - least) << f.fraction_bits) + (uint64_t)units);
}

/* float32 arithmetic in float64 and rounded once more is the same: 53 bits are more than 2 * 24 + 2. */
static double to_single(double x)
{
	return decode(single, encode(single, x));
}

static double add(unsigned dtype, double a, double b)
{
	return dtype == DTYPE_FLOAT64 ? a + b : to_single(a + b);
}

static double divide(unsigned dtype, double a, double divisor)
{
	return dtype == DTYPE_FLOAT64 ? a / divisor : to_single(a / to_single(divisor));
}

static double number_of(unsigned dtype, uint64_t bits)
{
	double x;

	switch (dtype) {
	case DTYPE_FLOAT64:
		memcpy(&x, &bits, sizeof(x));
		return x;
	case DTYPE_FLOAT32:
		return decode(single, bits);
	case DTYPE_FLOAT16:
		return decode(half, bits);
	default:
		return decode(brain, bits);
	}
}

static uint64_t bits_of(unsigned dtype, double x)
{
	uint64_t bits;

	switch (dtype) {
	case DTYPE_FLOAT64:
		memcpy(&bits, &x, sizeof(bits));
		return isnan(x) ? 0x7ff8000000000000ull : bits;
	case DTYPE_FLOAT32:
		return encode(single, x);
	case DTYPE_FLOAT16:
		return encode(half, x);
	default:
		return encode(brain, x);
	}
}

static uint64_t reduce_float(unsigned dtype, unsigned reduction, const uint64_t *bits, size_t n,
			     uint64_t divisor, uint32_t scale, bool round_before_division)
{
	double acc = number_of(dtype, bits[0]);

	for (size_t i = 1; i < n; i++) {
		double x = number_of(dtype, bits[i]);

		if (reduction == REDUCTION_SUM || reduction == REDUCTION_AVERAGE)
			acc = add(dtype, acc, x);
		else if (isnan(acc))
			continue;
		else if (isnan(x) || (reduction == REDUCTION_MIN ? x < acc : x > acc))
			acc = x;
	}
	if (reduction == REDUCTION_AVERAGE) {
		if (round_before_division)
			acc = number_of(dtype, bits_of(dtype, acc / scale));
		acc = divide(dtype, acc, (double)divisor / scale);
	}
	return bits_of(dtype, acc);
}

/* The integer that some low bits stand for. */
static __int128 integer_of(unsigned dtype, __int128 value)
{
	unsigned n_bits = 8 * (unsigned)dtype_size(dtype);
	__int128 modulus = (__int128)1 << n_bits;

	value = (value % modulus + modulus) % modulus;
	return dtype != DTYPE_UINT8 && value >= modulus / 2 ? value - modulus : value;
}

static uint64_t reduce_integer(unsigned dtype, unsigned reduction, const uint64_t *bits, size_t n,
			       uint64_t divisor)
{
	__int128 acc = integer_of(dtype, bits[0]), quotient;

	for (size_t i = 1; i < n; i++) {
		__int128 x = integer_of(dtype, bits[i]);

		if (reduction == REDUCTION_SUM || reduction == REDUCTION_AVERAGE)
			acc = reduction == REDUCTION_SUM ? integer_of(dtype, acc + x) : acc + x;
		else if (reduction == REDUCTION_MIN ? x < acc : x > acc)
			acc = x;
	}
	if (reduction == REDUCTION_AVERAGE) {
		quotient = acc / (__int128)divisor;
		if (quotient * (__int128)divisor > acc)
			quotient--;
		acc = quotient;
	}
	return (uint64_t)acc & (UINT64_MAX >> (64 - 8 * dtype_size(dtype)));
}

static uint64_t reduce_bool(unsigned reduction, const uint64_t *bits, size_t n)
{
	size_t n_true = 0;

	for (size_t i = 0; i < n; i++)
		n_true += bits[i] != 0;
	return reduction == REDUCTION_MIN ? n_true == n : n_true > 0;
}

uint64_t reference_reduce(unsigned dtype, unsigned reduction, const uint64_t *bits, size_t n_inputs,
			  uint64_t divisor, uint32_t scale, bool round_before_division)
{
	if (dtype == DTYPE_BOOL)
		return reduce_bool(reduction, bits, n_inputs);
	if (dtype <= DTYPE_BFLOAT16)
		return reduce_float(dtype, reduction, bits, n_inputs, divisor, scale,
				    round_before_division);
	return reduce_integer(dtype, reduction, bits, n_inputs, divisor);
}

uint64_t reference_widen(unsigned dtype, uint64_t bits)
{
	return encode(single, decode(dtype == DTYPE_FLOAT16 ? half : brain, bits));
}
