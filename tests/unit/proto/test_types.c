/* Names of types, operations and reductions, and of numbers that are none. */
#include "proto/types.h"
#include "test.h"

TEST(names_are_what_people_read)
{
	ASSERT_STR(dtype_name(DTYPE_FLOAT64), "float64");
	ASSERT_STR(dtype_name(DTYPE_FLOAT16), "float16");
	ASSERT_STR(dtype_name(DTYPE_BFLOAT16), "bfloat16");
	ASSERT_STR(dtype_name(DTYPE_UINT8), "uint8");
	ASSERT_STR(dtype_name(DTYPE_BOOL), "bool");
	ASSERT_STR(operation_name(OPERATION_PUSH_PULL), "push_pull");
	ASSERT_STR(operation_name(OPERATION_BARRIER), "barrier");
	ASSERT_STR(reduction_name(REDUCTION_SUM), "sum");
	ASSERT_STR(reduction_name(REDUCTION_MAX), "max");
}

TEST(numbers_from_outside_have_no_name_and_no_size)
{
	static const unsigned outside[] = { 0, 11, 255, 256, UINT_MAX };

	for (size_t i = 0; i < ARRAY_SIZE(outside); i++) {
		ASSERT_STR(dtype_name(outside[i]), "invalid");
		ASSERT_STR(operation_name(outside[i]), "invalid");
		ASSERT_STR(reduction_name(outside[i]), "invalid");
		ASSERT_EQ(dtype_size(outside[i]), 0);
	}
	ASSERT_STR(operation_name(OPERATION_MAX_ + 1), "invalid");
	ASSERT_STR(reduction_name(REDUCTION_MAX_ + 1), "invalid");
}

TEST(every_number_has_a_name_of_its_own)
{
	for (unsigned a = 1; a <= DTYPE_MAX_; a++) {
		ASSERT_TRUE(strcmp(dtype_name(a), "invalid"));
		ASSERT_TRUE(dtype_size(a) >= 1 && dtype_size(a) <= 8);
		for (unsigned b = 1; b < a; b++)
			ASSERT_TRUE(strcmp(dtype_name(a), dtype_name(b)));
	}
	for (unsigned a = 1; a <= OPERATION_MAX_; a++)
		for (unsigned b = 1; b < a; b++)
			ASSERT_TRUE(strcmp(operation_name(a), operation_name(b)));
	for (unsigned a = 1; a <= REDUCTION_MAX_; a++)
		for (unsigned b = 1; b < a; b++)
			ASSERT_TRUE(strcmp(reduction_name(a), reduction_name(b)));
}

TEST(a_job_is_called_by_name_or_number)
{
	ASSERT_TRUE(job_is_called("default", 0xab, "default"));
	ASSERT_TRUE(job_is_called("default", 0xab, "00000000000000ab"));
	ASSERT_TRUE(!job_is_called("default", 0xab, "ab"));
	ASSERT_TRUE(!job_is_called("default", 0, "0000000000000000"));
	ASSERT_TRUE(!job_is_called("", 0xab, "default"));
}
