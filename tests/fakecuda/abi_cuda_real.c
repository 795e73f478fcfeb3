/* After NVIDIA's own header ours defines its tables alone, so the names in them are the real ones. */
#include <cuda.h>

#include "abi.h"
#include "proto/cuda_abi.h"

ABI_DEFINE(abi_cuda_real, ABI_CUDA_FACTS)

/* Each signature, at compile time. */
#define SAME(need, name, version, parameters)                                                 \
	static_assert(                                                                        \
		__builtin_types_compatible_p(__typeof__(name##version), CUresult parameters), \
		#name #version);
CUDA_ABI_FUNCTIONS(SAME)
