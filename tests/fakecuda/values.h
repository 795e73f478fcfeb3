/* What NCCL does with values: of host memory, n of a type. Half types are rounded after each operation, to nearest, ties to even. */
#pragma once

#include "daemon/gpu/nccl_abi.h"
#include <stddef.h>

/* Bytes of one; 0: there is no such type. */
size_t values_size(ncclDataType_t type);
void values_combine(void *to, const void *from, size_t n, ncclDataType_t type, ncclRedOp_t op);
/* Of floating-point types alone. */
void values_multiply(void *to, size_t n, ncclDataType_t type, double by);
/* A number of a floating-point type; 0: there is no such type. */
double values_get(const void *from, ncclDataType_t type);
void values_divide(void *to, size_t n, ncclDataType_t type, int by);
