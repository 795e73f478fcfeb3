/*
 * The parts of NVML's ABI that bps uses, like proto/cuda_abi.h: how GPUs are connected. After <nvml.h> this header
 * defines its tables alone.
 */
#pragma once

#include "proto/c.h"

#define NVML_ABI_RESULTS(X)                \
	X(NVML_SUCCESS, 0)                 \
	X(NVML_ERROR_UNINITIALIZED, 1)     \
	X(NVML_ERROR_INVALID_ARGUMENT, 2)  \
	X(NVML_ERROR_NOT_SUPPORTED, 3)     \
	X(NVML_ERROR_NO_PERMISSION, 4)     \
	X(NVML_ERROR_NOT_FOUND, 6)         \
	X(NVML_ERROR_INSUFFICIENT_SIZE, 7) \
	X(NVML_ERROR_DRIVER_NOT_LOADED, 9) \
	X(NVML_ERROR_UNKNOWN, 999)

/* What the way between two GPUs has in common. */
#define NVML_ABI_TOPOLOGY(X)                                                      \
	X(NVML_TOPOLOGY_INTERNAL, 0)                                              \
	X(NVML_TOPOLOGY_SINGLE, 10)   /* one PCIe switch */                       \
	X(NVML_TOPOLOGY_MULTIPLE, 20) /* several PCIe switches, no host bridge */ \
	X(NVML_TOPOLOGY_HOSTBRIDGE, 30)                                           \
	X(NVML_TOPOLOGY_NODE, 40)                                                 \
	X(NVML_TOPOLOGY_SYSTEM, 50)

#define NVML_ABI_P2P_CAPS(X)            \
	X(NVML_P2P_CAPS_INDEX_READ, 0)  \
	X(NVML_P2P_CAPS_INDEX_WRITE, 1) \
	X(NVML_P2P_CAPS_INDEX_NVLINK, 2)

#define NVML_ABI_P2P_STATUS(X)              \
	X(NVML_P2P_STATUS_OK, 0)            \
	X(NVML_P2P_STATUS_NOT_SUPPORTED, 5) \
	X(NVML_P2P_STATUS_UNKNOWN, 6)

#define NVML_ABI_COMPUTE_MODES(X)         \
	X(NVML_COMPUTEMODE_DEFAULT, 0)    \
	X(NVML_COMPUTEMODE_PROHIBITED, 2) \
	X(NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, 3)

#ifndef NVML_API_VERSION

#define NVML_ABI_ENUMERATOR_(name, value) name = (value),

typedef enum { NVML_ABI_RESULTS(NVML_ABI_ENUMERATOR_) } nvmlReturn_t;
typedef enum { NVML_ABI_TOPOLOGY(NVML_ABI_ENUMERATOR_) } nvmlGpuTopologyLevel_t;
typedef enum { NVML_ABI_P2P_CAPS(NVML_ABI_ENUMERATOR_) } nvmlGpuP2PCapsIndex_t;
typedef enum { NVML_ABI_P2P_STATUS(NVML_ABI_ENUMERATOR_) } nvmlGpuP2PStatus_t;
typedef enum { NVML_ABI_COMPUTE_MODES(NVML_ABI_ENUMERATOR_) } nvmlComputeMode_t;

typedef struct nvmlDevice_st *nvmlDevice_t;

#endif

/* X(need, name, version, result, parameters) */
#define NVML_ABI_FUNCTIONS(X)                                                                      \
	X(required, nvmlInit, _v2, nvmlReturn_t, (void))                                           \
	X(required, nvmlShutdown, , nvmlReturn_t, (void))                                          \
	X(required, nvmlErrorString, , const char *, (nvmlReturn_t result))                        \
	X(required, nvmlSystemGetDriverVersion, , nvmlReturn_t, (char *version, unsigned int len)) \
	/* "GPU-8a4cc9a1-..." */                                                                   \
	X(required, nvmlDeviceGetHandleByUUID, , nvmlReturn_t,                                     \
	  (const char *uuid, nvmlDevice_t *device))                                                \
	X(required, nvmlDeviceGetComputeMode, , nvmlReturn_t,                                      \
	  (nvmlDevice_t device, nvmlComputeMode_t * mode))                                         \
	X(required, nvmlDeviceGetTopologyCommonAncestor, , nvmlReturn_t,                           \
	  (nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t * level))                        \
	X(required, nvmlDeviceGetP2PStatus, , nvmlReturn_t,                                        \
	  (nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t what,                             \
	   nvmlGpuP2PStatus_t * status))

#ifndef NVML_API_VERSION

#define NVML_ABI_MEMBER_(need, name, version, result, parameters) result(*name) parameters;

/* NVML, one pointer for each function. Read-only once loaded; any thread. */
struct nvml {
	NVML_ABI_FUNCTIONS(NVML_ABI_MEMBER_)
};

/*
 * The table of the NVML that this process uses: libnvidia-ml.so.1, loaded and initialised at the first call. Any
 * thread.
 *
 * Returns 0; -ENOENT where there is no NVML; -ENOTSUP where it lacks a function or does not start. In both cases
 * *ret_reason, if not NULL, is one line that says what is missing; it lives as long as the process.
 */
int nvml_load(const struct nvml **ret_nvml, const char **ret_reason);

#endif
