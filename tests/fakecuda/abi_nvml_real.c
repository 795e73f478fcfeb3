/* After NVIDIA's own header ours defines its tables alone, so the names in them are the real ones. */
#include <nvml.h>

#include "abi.h"
#include "daemon/gpu/nvml_abi.h"

ABI_DEFINE(abi_nvml_real, ABI_NVML_FACTS)

#define SAME(need, name, version, result, parameters)                                             \
	static_assert(__builtin_types_compatible_p(__typeof__(name##version), result parameters), \
		      #name #version);
NVML_ABI_FUNCTIONS(SAME)
