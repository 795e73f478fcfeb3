/* After NVIDIA's own headers ours define their tables alone, so the names in them are the real ones. */
#include <cuda.h>
#include <nccl.h>

#include "abi.h"
#include "daemon/gpu/nccl_abi.h"

ABI_DEFINE(abi_nccl_real, ABI_NCCL_FACTS)
ABI_DEFINE_NCCL_MAGIC(abi_nccl_magic_real)

#define SAME(need, name, result, parameters) \
	static_assert(__builtin_types_compatible_p(__typeof__(name), result parameters), #name);
NCCL_ABI_FUNCTIONS(SAME)
