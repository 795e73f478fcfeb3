/* Calls of the driver, or its double, that must succeed: by a table that whoever includes this calls cu. */
#pragma once

#include "proto/cuda_abi.h"
#include "test.h"

#define CU(call)                                                                                 \
	do {                                                                                     \
		CUresult r_ = cu->call;                                                          \
		if (r_)                                                                          \
			test_fail(__FILE__, __LINE__, "%s: %s", #call, cuda_error_name(cu, r_)); \
	} while (0)
