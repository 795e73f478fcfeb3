/* Names of element types, operations and reductions, for messages. */
#include "proto/types.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *name_of(const char *const *names, size_t n_names, unsigned number)
{
	return number < n_names && names[number] ? names[number] : "invalid";
}

const char *dtype_name(unsigned dtype)
{
	static const char *const names[] = {
		[DTYPE_FLOAT64] = "float64", [DTYPE_FLOAT32] = "float32",
		[DTYPE_FLOAT16] = "float16", [DTYPE_BFLOAT16] = "bfloat16",
		[DTYPE_INT64] = "int64",     [DTYPE_INT32] = "int32",
		[DTYPE_INT16] = "int16",     [DTYPE_INT8] = "int8",
		[DTYPE_UINT8] = "uint8",     [DTYPE_BOOL] = "bool",
	};
	static_assert(ARRAY_SIZE(names) == DTYPE_MAX_ + 1, "every dtype has a name");

	return name_of(names, ARRAY_SIZE(names), dtype);
}

const char *operation_name(unsigned operation)
{
	static const char *const names[] = {
		[OPERATION_PUSH_PULL] = "push_pull",
		[OPERATION_BROADCAST] = "broadcast",
		[OPERATION_ALL_GATHER] = "all_gather",
		[OPERATION_REDUCE_SCATTER] = "reduce_scatter",
		[OPERATION_ALL_TO_ALL] = "all_to_all",
		[OPERATION_BARRIER] = "barrier",
		[OPERATION_PUSH_PULL_ROWS] = "push_pull_rows",
		[OPERATION_ACCUMULATE] = "accumulate",
	};
	static_assert(ARRAY_SIZE(names) == OPERATION_MAX_ + 1, "every operation has a name");

	return name_of(names, ARRAY_SIZE(names), operation);
}

const char *reduction_name(unsigned reduction)
{
	static const char *const names[] = {
		[REDUCTION_SUM] = "sum",
		[REDUCTION_AVERAGE] = "average",
		[REDUCTION_MIN] = "min",
		[REDUCTION_MAX] = "max",
	};
	static_assert(ARRAY_SIZE(names) == REDUCTION_MAX_ + 1, "every reduction has a name");

	return name_of(names, ARRAY_SIZE(names), reduction);
}

bool job_is_called(const char *name, uint64_t number, const char *asked)
{
	char digits[17];

	(void)snprintf(digits, sizeof(digits), "%016" PRIx64, number);
	return !strcmp(name, asked) || (number && !strcmp(digits, asked));
}
