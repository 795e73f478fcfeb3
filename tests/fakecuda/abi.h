/*
 * What proto/cuda_abi.h, daemon/gpu/nccl_abi.h and daemon/gpu/nvml_abi.h say, as a list of numbers that does not name
 * where it comes from: compiled once after our headers and once after the real ones, which cannot be included together.
 */
#pragma once

#include "proto/c.h"

struct abi_fact {
	const char *what;
	long long value;
};

struct abi_facts {
	const struct abi_fact *list;
	size_t n;
};

#define ABI_CONSTANT(name, number) { #name, (long long)name },
#define ABI_SIZE(type)                           \
	{ "sizeof " #type, sizeof(type) },       \
	{                                        \
		"alignof " #type, _Alignof(type) \
	}
#define ABI_INTEGER(type)                              \
	ABI_SIZE(type),                                \
	{                                              \
#type " is signed", (type)-1 < (type)1 \
	}
#define ABI_FIELD(type, field)                                            \
	{ "offset of " #type "." #field, offsetof(type, field) },         \
	{                                                                 \
		"sizeof " #type "." #field, sizeof(((type *)NULL)->field) \
	}

#define ABI_CUDA_FACTS                                                                            \
	CUDA_ABI_RESULTS(ABI_CONSTANT)                                                            \
	CUDA_ABI_DEVICE_ATTRIBUTES(ABI_CONSTANT)                                                  \
	CUDA_ABI_POINTER_ATTRIBUTES(ABI_CONSTANT)                                                 \
	CUDA_ABI_MEMORY_TYPES(ABI_CONSTANT)                                                       \
	CUDA_ABI_HANDLE_TYPES(ABI_CONSTANT)                                                       \
	CUDA_ABI_ALLOCATION_TYPES(ABI_CONSTANT)                                                   \
	CUDA_ABI_LOCATION_TYPES(ABI_CONSTANT)                                                     \
	CUDA_ABI_ACCESS_FLAGS(ABI_CONSTANT)                                                       \
	CUDA_ABI_GRANULARITIES(ABI_CONSTANT)                                                      \
	CUDA_ABI_CAPTURE_STATES(ABI_CONSTANT)                                                     \
	CUDA_ABI_RANGE_HANDLE_TYPES(ABI_CONSTANT)                                                 \
	CUDA_ABI_FLUSH_OPTIONS(ABI_CONSTANT)                                                      \
	CUDA_ABI_WRITES_ORDERINGS(ABI_CONSTANT)                                                   \
	CUDA_ABI_FLUSH_TARGETS(ABI_CONSTANT)                                                      \
	CUDA_ABI_FLUSH_SCOPES(ABI_CONSTANT)                                                       \
	CUDA_ABI_FLAGS(ABI_CONSTANT)                                                              \
	CUDA_ABI_MACROS(ABI_CONSTANT)                                                             \
	ABI_INTEGER(CUresult), ABI_INTEGER(CUdevice_attribute), ABI_INTEGER(CUpointer_attribute), \
		ABI_INTEGER(CUmemorytype), ABI_INTEGER(CUmemAllocationHandleType),                \
		ABI_INTEGER(CUmemAllocationType), ABI_INTEGER(CUmemLocationType),                 \
		ABI_INTEGER(CUmemAccess_flags), ABI_INTEGER(CUmemAllocationGranularity_flags),    \
		ABI_INTEGER(CUstreamCaptureStatus), ABI_INTEGER(CUdevice),                        \
		ABI_INTEGER(CUmemRangeHandleType), ABI_INTEGER(CUflushGPUDirectRDMAWritesTarget), \
		ABI_INTEGER(CUflushGPUDirectRDMAWritesScope), ABI_INTEGER(CUdeviceptr),           \
		ABI_INTEGER(CUmemGenericAllocationHandle), ABI_SIZE(CUcontext),                   \
		ABI_SIZE(CUstream), ABI_SIZE(CUevent), ABI_SIZE(CUhostFn), ABI_SIZE(CUuuid),      \
		ABI_FIELD(CUuuid, bytes), ABI_SIZE(CUipcMemHandle), ABI_SIZE(CUmemLocation),      \
		ABI_FIELD(CUmemLocation, type), ABI_FIELD(CUmemLocation, id),                     \
		ABI_SIZE(CUmemAllocationProp), ABI_FIELD(CUmemAllocationProp, type),              \
		ABI_FIELD(CUmemAllocationProp, requestedHandleTypes),                             \
		ABI_FIELD(CUmemAllocationProp, location),                                         \
		ABI_FIELD(CUmemAllocationProp, allocFlags),                                       \
		ABI_FIELD(CUmemAllocationProp, allocFlags.usage), ABI_SIZE(CUmemAccessDesc),      \
		ABI_FIELD(CUmemAccessDesc, location), ABI_FIELD(CUmemAccessDesc, flags),          \
		{ "CU_STREAM_LEGACY", (intptr_t)CU_STREAM_LEGACY },                               \
		{ "CU_STREAM_PER_THREAD", (intptr_t)CU_STREAM_PER_THREAD },

/* Of ncclConfig_t the part that ours has; a newer one is longer. */
#define ABI_NCCL_FACTS                                                                            \
	NCCL_ABI_RESULTS(ABI_CONSTANT)                                                            \
	NCCL_ABI_OPERATIONS(ABI_CONSTANT)                                                         \
	NCCL_ABI_TYPES(ABI_CONSTANT)                                                              \
	NCCL_ABI_RESIDENCES(ABI_CONSTANT)                                                         \
	ABI_INTEGER(ncclResult_t), ABI_INTEGER(ncclRedOp_t), ABI_INTEGER(ncclDataType_t),         \
		ABI_INTEGER(ncclScalarResidence_t), ABI_SIZE(ncclUniqueId), ABI_SIZE(ncclComm_t), \
		ABI_FIELD(ncclConfig_t, size), ABI_FIELD(ncclConfig_t, magic),                    \
		ABI_FIELD(ncclConfig_t, version), ABI_FIELD(ncclConfig_t, blocking),

/* Its magic number, which only an initialiser holds. */
#define ABI_DEFINE_NCCL_MAGIC(name)                                         \
	unsigned int name(void)                                             \
	{                                                                   \
		static const ncclConfig_t config = NCCL_CONFIG_INITIALIZER; \
                                                                            \
		return config.magic;                                        \
	}

#define ABI_NVML_FACTS                                                               \
	NVML_ABI_RESULTS(ABI_CONSTANT)                                               \
	NVML_ABI_TOPOLOGY(ABI_CONSTANT)                                              \
	NVML_ABI_P2P_CAPS(ABI_CONSTANT)                                              \
	NVML_ABI_P2P_STATUS(ABI_CONSTANT)                                            \
	NVML_ABI_COMPUTE_MODES(ABI_CONSTANT)                                         \
	ABI_INTEGER(nvmlReturn_t), ABI_INTEGER(nvmlGpuTopologyLevel_t),              \
		ABI_INTEGER(nvmlGpuP2PCapsIndex_t), ABI_INTEGER(nvmlGpuP2PStatus_t), \
		ABI_INTEGER(nvmlComputeMode_t), ABI_SIZE(nvmlDevice_t),

#define ABI_DEFINE(name, facts)                                 \
	static const struct abi_fact name##_list[] = { facts }; \
	const struct abi_facts name = { name##_list, ARRAY_SIZE(name##_list) };

/* By our headers; by the real ones, of which each file exists only where the header does. */
extern const struct abi_facts abi_cuda_ours, abi_nccl_ours, abi_nvml_ours;
extern const struct abi_facts abi_cuda_real, abi_nccl_real, abi_nvml_real;
unsigned int abi_nccl_magic_ours(void);
unsigned int abi_nccl_magic_real(void);
