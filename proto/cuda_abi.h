/*
 * The parts of the CUDA driver's ABI that bps uses, so that it builds on machines without CUDA and runs on machines
 * without a GPU: types and constants with the driver's own names and numbers, and one table of functions, filled by
 * cuda_load() from libcuda.so.1. The driver keeps its ABI: a function whose signature changes gets a new symbol (_v2).
 *
 * Where CUDA's headers are found, a test holds each type, constant and signature here to them (tests/fakecuda). Only
 * that test includes both: after <cuda.h>, this header defines its tables alone.
 */
#pragma once

#include "proto/c.h"
#include <stdint.h>

/* cuDriverGetVersion(): CUDA 11.7, the first with stream memory operations that need no module parameter. */
#define CUDA_DRIVER_MIN 11070

/* X(name, value): what calls return. */
#define CUDA_ABI_RESULTS(X)                               \
	X(CUDA_SUCCESS, 0)                                \
	X(CUDA_ERROR_INVALID_VALUE, 1)                    \
	X(CUDA_ERROR_OUT_OF_MEMORY, 2)                    \
	X(CUDA_ERROR_NOT_INITIALIZED, 3)                  \
	X(CUDA_ERROR_DEINITIALIZED, 4)                    \
	X(CUDA_ERROR_STUB_LIBRARY, 34)                    \
	X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46)              \
	X(CUDA_ERROR_NO_DEVICE, 100)                      \
	X(CUDA_ERROR_INVALID_DEVICE, 101)                 \
	X(CUDA_ERROR_INVALID_CONTEXT, 201)                \
	X(CUDA_ERROR_MAP_FAILED, 205)                     \
	X(CUDA_ERROR_ALREADY_MAPPED, 208)                 \
	X(CUDA_ERROR_NOT_MAPPED, 211)                     \
	X(CUDA_ERROR_ECC_UNCORRECTABLE, 214)              \
	X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217)        \
	X(CUDA_ERROR_OPERATING_SYSTEM, 304)               \
	X(CUDA_ERROR_INVALID_HANDLE, 400)                 \
	X(CUDA_ERROR_ILLEGAL_STATE, 401)                  \
	X(CUDA_ERROR_NOT_FOUND, 500)                      \
	X(CUDA_ERROR_NOT_READY, 600)                      \
	X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                \
	X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)                 \
	X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)    \
	X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)           \
	X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
	X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)     \
	X(CUDA_ERROR_LAUNCH_FAILED, 719)                  \
	X(CUDA_ERROR_NOT_PERMITTED, 800)                  \
	X(CUDA_ERROR_NOT_SUPPORTED, 801)                  \
	X(CUDA_ERROR_SYSTEM_NOT_READY, 802)               \
	X(CUDA_ERROR_MPS_CONNECTION_FAILED, 805)          \
	X(CUDA_ERROR_MPS_CLIENT_TERMINATED, 810)          \
	X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)     \
	X(CUDA_ERROR_UNKNOWN, 999)

#define CUDA_ABI_DEVICE_ATTRIBUTES(X)                                           \
	X(CU_DEVICE_ATTRIBUTE_INTEGRATED, 18)                                   \
	X(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 20)                                 \
	X(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33)                                   \
	X(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 34)                                \
	X(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40)                           \
	X(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41)                           \
	X(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 50)                                \
	X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                     \
	X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                     \
	X(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91)      \
	X(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)         \
	X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103) \
	X(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 115)                      \
	X(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, 117)        \
	X(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, 118)             \
	X(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 124)

#define CUDA_ABI_POINTER_ATTRIBUTES(X)                         \
	X(CU_POINTER_ATTRIBUTE_CONTEXT, 1)                     \
	X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                 \
	X(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)              \
	X(CU_POINTER_ATTRIBUTE_HOST_POINTER, 4)                \
	X(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 6)                 \
	X(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)                   \
	X(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                  \
	X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)              \
	X(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10) \
	X(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)           \
	X(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)                 \
	X(CU_POINTER_ATTRIBUTE_MAPPED, 13)                     \
	X(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 14)       \
	X(CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, 16)               \
	X(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 17)

#define CUDA_ABI_MEMORY_TYPES(X)   \
	X(CU_MEMORYTYPE_HOST, 1)   \
	X(CU_MEMORYTYPE_DEVICE, 2) \
	X(CU_MEMORYTYPE_ARRAY, 3)  \
	X(CU_MEMORYTYPE_UNIFIED, 4)

#define CUDA_ABI_HANDLE_TYPES(X)                       \
	X(CU_MEM_HANDLE_TYPE_NONE, 0)                  \
	X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1) \
	X(CU_MEM_HANDLE_TYPE_FABRIC, 8)                \
	X(CU_MEM_HANDLE_TYPE_MAX, 0x7fffffff)

#define CUDA_ABI_ALLOCATION_TYPES(X)         \
	X(CU_MEM_ALLOCATION_TYPE_INVALID, 0) \
	X(CU_MEM_ALLOCATION_TYPE_PINNED, 1)  \
	X(CU_MEM_ALLOCATION_TYPE_MAX, 0x7fffffff)

#define CUDA_ABI_LOCATION_TYPES(X)         \
	X(CU_MEM_LOCATION_TYPE_INVALID, 0) \
	X(CU_MEM_LOCATION_TYPE_DEVICE, 1)  \
	X(CU_MEM_LOCATION_TYPE_MAX, 0x7fffffff)

#define CUDA_ABI_ACCESS_FLAGS(X)                 \
	X(CU_MEM_ACCESS_FLAGS_PROT_NONE, 0)      \
	X(CU_MEM_ACCESS_FLAGS_PROT_READ, 1)      \
	X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3) \
	X(CU_MEM_ACCESS_FLAGS_PROT_MAX, 0x7fffffff)

#define CUDA_ABI_GRANULARITIES(X)              \
	X(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0) \
	X(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1)

#define CUDA_ABI_RANGE_HANDLE_TYPES(X)            \
	X(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 1) \
	X(CU_MEM_RANGE_HANDLE_TYPE_MAX, 0x7fffffff)

#define CUDA_ABI_FLUSH_OPTIONS(X)                         \
	X(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, 1) \
	X(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_MEMOPS, 2)

/* How far what another device has written is in order for whom, without a flush. */
#define CUDA_ABI_WRITES_ORDERINGS(X)                     \
	X(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE, 0)    \
	X(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, 100) \
	X(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES, 200)

#define CUDA_ABI_FLUSH_TARGETS(X) X(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, 0)

#define CUDA_ABI_FLUSH_SCOPES(X)                         \
	X(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, 100) \
	X(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES, 200)

#define CUDA_ABI_CAPTURE_STATES(X)            \
	X(CU_STREAM_CAPTURE_STATUS_NONE, 0)   \
	X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1) \
	X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)

/* Flags that calls take as unsigned int. */
#define CUDA_ABI_FLAGS(X)                                                             \
	X(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                                      \
	X(CU_MEM_ATTACH_GLOBAL, 1)                                                    \
	X(CU_STREAM_DEFAULT, 0)                                                       \
	X(CU_STREAM_NON_BLOCKING, 1)                                                  \
	X(CU_EVENT_DEFAULT, 0)                                                        \
	X(CU_EVENT_BLOCKING_SYNC, 1)                                                  \
	X(CU_EVENT_DISABLE_TIMING, 2)                                                 \
	X(CU_STREAM_WAIT_VALUE_GEQ, 0) /* (int32_t)(*address - value) >= 0: cyclic */ \
	X(CU_STREAM_WAIT_VALUE_EQ, 1)                                                 \
	X(CU_STREAM_WAIT_VALUE_AND, 2)                                                \
	X(CU_STREAM_WAIT_VALUE_NOR, 3)                                                \
	X(CU_STREAM_WRITE_VALUE_DEFAULT,                                              \
	  0) /* what the stream wrote before is visible before the value */           \
	X(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER, 1)

/* The same, which the driver's header has as macros. */
#define CUDA_ABI_MACROS(X)                 \
	X(CU_IPC_HANDLE_SIZE, 64)          \
	X(CU_MEMHOSTALLOC_PORTABLE, 1)     \
	X(CU_MEMHOSTALLOC_DEVICEMAP, 2)    \
	X(CU_MEMHOSTREGISTER_PORTABLE, 1)  \
	X(CU_MEMHOSTREGISTER_DEVICEMAP, 2) \
	X(CU_MEMHOSTREGISTER_READ_ONLY, 8)

#ifndef CUDA_VERSION

#define CUDA_ABI_ENUMERATOR_(name, value) name = (value),

typedef enum { CUDA_ABI_RESULTS(CUDA_ABI_ENUMERATOR_) } CUresult;
typedef enum { CUDA_ABI_DEVICE_ATTRIBUTES(CUDA_ABI_ENUMERATOR_) } CUdevice_attribute;
typedef enum { CUDA_ABI_POINTER_ATTRIBUTES(CUDA_ABI_ENUMERATOR_) } CUpointer_attribute;
typedef enum { CUDA_ABI_MEMORY_TYPES(CUDA_ABI_ENUMERATOR_) } CUmemorytype;
typedef enum { CUDA_ABI_HANDLE_TYPES(CUDA_ABI_ENUMERATOR_) } CUmemAllocationHandleType;
typedef enum { CUDA_ABI_ALLOCATION_TYPES(CUDA_ABI_ENUMERATOR_) } CUmemAllocationType;
typedef enum { CUDA_ABI_LOCATION_TYPES(CUDA_ABI_ENUMERATOR_) } CUmemLocationType;
typedef enum { CUDA_ABI_ACCESS_FLAGS(CUDA_ABI_ENUMERATOR_) } CUmemAccess_flags;
typedef enum { CUDA_ABI_GRANULARITIES(CUDA_ABI_ENUMERATOR_) } CUmemAllocationGranularity_flags;
typedef enum { CUDA_ABI_RANGE_HANDLE_TYPES(CUDA_ABI_ENUMERATOR_) } CUmemRangeHandleType;
typedef enum { CUDA_ABI_FLUSH_OPTIONS(CUDA_ABI_ENUMERATOR_) } CUflushGPUDirectRDMAWritesOptions;
typedef enum { CUDA_ABI_WRITES_ORDERINGS(CUDA_ABI_ENUMERATOR_) } CUGPUDirectRDMAWritesOrdering;
typedef enum { CUDA_ABI_FLUSH_TARGETS(CUDA_ABI_ENUMERATOR_) } CUflushGPUDirectRDMAWritesTarget;
typedef enum { CUDA_ABI_FLUSH_SCOPES(CUDA_ABI_ENUMERATOR_) } CUflushGPUDirectRDMAWritesScope;
typedef enum { CUDA_ABI_CAPTURE_STATES(CUDA_ABI_ENUMERATOR_) } CUstreamCaptureStatus;
enum { CUDA_ABI_FLAGS(CUDA_ABI_ENUMERATOR_) };
enum { CUDA_ABI_MACROS(CUDA_ABI_ENUMERATOR_) };

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef void (*CUhostFn)(void *data);

/* Streams that every context has. NULL, the default one, is CU_STREAM_LEGACY. */
#define CU_STREAM_LEGACY     ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef struct {
	char bytes[16];
} CUuuid;

typedef struct {
	char reserved[CU_IPC_HANDLE_SIZE];
} CUipcMemHandle;

typedef struct {
	CUmemLocationType type;
	int id; /* a device */
} CUmemLocation;

typedef struct {
	CUmemAllocationType type;
	CUmemAllocationHandleType requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct {
	CUmemLocation location;
	CUmemAccess_flags flags;
} CUmemAccessDesc;

#endif

/*
 * X(need, name, version, parameters): functions, by the name that the driver's header has for them and the suffix that
 * makes it the symbol's. Without a required one there is no GPU path; the caller of an optional one looks at it first.
 */
#define CUDA_ABI_FUNCTIONS(X)                                                                     \
	X(required, cuInit, , (unsigned int flags))                                               \
	X(required, cuDriverGetVersion, , (int *version))                                         \
	X(required, cuGetErrorName, , (CUresult error, const char **name))                        \
	X(required, cuGetErrorString, , (CUresult error, const char **text))                      \
	X(required, cuDeviceGetCount, , (int *count))                                             \
	X(required, cuDeviceGet, , (CUdevice * device, int ordinal))                              \
	X(required, cuDeviceGetName, , (char *name, int len, CUdevice device))                    \
	X(required, cuDeviceGetUuid, _v2, (CUuuid * uuid, CUdevice device))                       \
	X(required, cuDeviceGetPCIBusId, , (char *id, int len, CUdevice device))                  \
	X(required, cuDeviceGetAttribute, , (int *value, CUdevice_attribute, CUdevice device))    \
	X(required, cuDeviceTotalMem, _v2, (size_t * len, CUdevice device))                       \
	X(required, cuDeviceCanAccessPeer, , (int *can, CUdevice device, CUdevice peer))          \
	X(required, cuDevicePrimaryCtxRetain, , (CUcontext * context, CUdevice device))           \
	X(required, cuDevicePrimaryCtxRelease, _v2, (CUdevice device))                            \
	X(required, cuDevicePrimaryCtxGetState, ,                                                 \
	  (CUdevice device, unsigned int *flags, int *active))                                    \
	X(required, cuCtxGetCurrent, , (CUcontext * context))                                     \
	X(required, cuCtxSetCurrent, , (CUcontext context))                                       \
	X(required, cuCtxPushCurrent, _v2, (CUcontext context))                                   \
	X(required, cuCtxPopCurrent, _v2, (CUcontext * context))                                  \
	X(required, cuCtxGetDevice, , (CUdevice * device))                                        \
	X(required, cuCtxEnablePeerAccess, , (CUcontext peer, unsigned int flags))                \
	X(required, cuCtxSynchronize, , (void))                                                   \
	X(required, cuCtxGetStreamPriorityRange, , (int *least, int *greatest))                   \
	X(required, cuMemGetInfo, _v2, (size_t * free_len, size_t * total_len))                   \
	X(required, cuMemAlloc, _v2, (CUdeviceptr * ptr, size_t len))                             \
	X(required, cuMemFree, _v2, (CUdeviceptr ptr))                                            \
	X(required, cuMemGetAddressRange, _v2,                                                    \
	  (CUdeviceptr * base, size_t * len, CUdeviceptr ptr))                                    \
	X(required, cuPointerGetAttribute, , (void *value, CUpointer_attribute, CUdeviceptr ptr)) \
	X(required, cuPointerGetAttributes, ,                                                     \
	  (unsigned int n, CUpointer_attribute *attributes, void **values, CUdeviceptr ptr))      \
	X(required, cuPointerSetAttribute, ,                                                      \
	  (const void *value, CUpointer_attribute, CUdeviceptr ptr))                              \
	X(required, cuMemHostAlloc, , (void **ptr, size_t len, unsigned int flags))               \
	X(required, cuMemFreeHost, , (void *ptr))                                                 \
	X(required, cuMemHostRegister, _v2, (void *ptr, size_t len, unsigned int flags))          \
	X(required, cuMemHostUnregister, , (void *ptr))                                           \
	X(required, cuMemHostGetDevicePointer, _v2,                                               \
	  (CUdeviceptr * device, void *ptr, unsigned int flags))                                  \
	X(required, cuMemcpyAsync, , (CUdeviceptr to, CUdeviceptr from, size_t len, CUstream))    \
	X(required, cuMemcpyHtoDAsync, _v2,                                                       \
	  (CUdeviceptr to, const void *from, size_t len, CUstream))                               \
	X(required, cuMemcpyDtoHAsync, _v2, (void *to, CUdeviceptr from, size_t len, CUstream))   \
	X(required, cuMemcpyDtoDAsync, _v2,                                                       \
	  (CUdeviceptr to, CUdeviceptr from, size_t len, CUstream))                               \
	X(required, cuMemsetD8Async, ,                                                            \
	  (CUdeviceptr to, unsigned char value, size_t len, CUstream))                            \
	X(required, cuMemsetD32Async, , (CUdeviceptr to, unsigned int value, size_t n, CUstream)) \
	X(required, cuStreamCreate, , (CUstream * stream, unsigned int flags))                    \
	X(required, cuStreamCreateWithPriority, ,                                                 \
	  (CUstream * stream, unsigned int flags, int priority))                                  \
	X(required, cuStreamDestroy, _v2, (CUstream))                                             \
	X(required, cuStreamQuery, , (CUstream))                                                  \
	X(required, cuStreamSynchronize, , (CUstream))                                            \
	X(required, cuStreamWaitEvent, , (CUstream, CUevent, unsigned int flags))                 \
	X(required, cuStreamGetCtx, , (CUstream, CUcontext * context))                            \
	X(required, cuStreamIsCapturing, , (CUstream, CUstreamCaptureStatus * status))            \
	X(required, cuStreamWaitValue32, _v2,                                                     \
	  (CUstream, CUdeviceptr address, uint32_t value, unsigned int flags))                    \
	X(required, cuStreamWriteValue32, _v2,                                                    \
	  (CUstream, CUdeviceptr address, uint32_t value, unsigned int flags))                    \
	X(required, cuLaunchHostFunc, , (CUstream, CUhostFn, void *data))                         \
	X(required, cuEventCreate, , (CUevent * event, unsigned int flags))                       \
	X(required, cuEventDestroy, _v2, (CUevent))                                               \
	X(required, cuEventRecord, , (CUevent, CUstream))                                         \
	X(required, cuEventQuery, , (CUevent))                                                    \
	X(required, cuEventSynchronize, , (CUevent))                                              \
	X(required, cuEventElapsedTime, , (float *ms, CUevent from, CUevent to))                  \
	X(required, cuIpcGetMemHandle, , (CUipcMemHandle * handle, CUdeviceptr ptr))              \
	X(required, cuIpcOpenMemHandle, _v2,                                                      \
	  (CUdeviceptr * ptr, CUipcMemHandle handle, unsigned int flags))                         \
	X(required, cuIpcCloseMemHandle, , (CUdeviceptr ptr))                                     \
	X(required, cuMemAddressReserve, ,                                                        \
	  (CUdeviceptr * ptr, size_t len, size_t alignment, CUdeviceptr wish,                     \
	   unsigned long long flags))                                                             \
	X(required, cuMemAddressFree, , (CUdeviceptr ptr, size_t len))                            \
	X(required, cuMemCreate, ,                                                                \
	  (CUmemGenericAllocationHandle * handle, size_t len, const CUmemAllocationProp *prop,    \
	   unsigned long long flags))                                                             \
	X(required, cuMemRelease, , (CUmemGenericAllocationHandle handle))                        \
	X(required, cuMemMap, ,                                                                   \
	  (CUdeviceptr ptr, size_t len, size_t offset, CUmemGenericAllocationHandle handle,       \
	   unsigned long long flags))                                                             \
	X(required, cuMemUnmap, , (CUdeviceptr ptr, size_t len))                                  \
	X(required, cuMemSetAccess, ,                                                             \
	  (CUdeviceptr ptr, size_t len, const CUmemAccessDesc *access, size_t n))                 \
	X(required, cuMemExportToShareableHandle, ,                                               \
	  (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,  \
	   unsigned long long flags))                                                             \
	X(required, cuMemImportFromShareableHandle, ,                                             \
	  (CUmemGenericAllocationHandle * handle, void *shareable,                                \
	   CUmemAllocationHandleType type))                                                       \
	X(required, cuMemGetAllocationGranularity, ,                                              \
	  (size_t * len, const CUmemAllocationProp *prop,                                         \
	   CUmemAllocationGranularity_flags option))                                              \
	X(required, cuMemGetAllocationPropertiesFromHandle, ,                                     \
	  (CUmemAllocationProp * prop, CUmemGenericAllocationHandle handle))                      \
	X(required, cuMemRetainAllocationHandle, ,                                                \
	  (CUmemGenericAllocationHandle * handle, void *ptr))                                     \
	X(optional, cuMemAllocManaged, , (CUdeviceptr * ptr, size_t len, unsigned int flags))     \
	X(optional, cuMemAllocAsync, , (CUdeviceptr * ptr, size_t len, CUstream))                 \
	X(optional, cuMemFreeAsync, , (CUdeviceptr ptr, CUstream))                                \
	X(optional, cuMemGetHandleForAddressRange, ,                                              \
	  (void *handle, CUdeviceptr ptr, size_t len, CUmemRangeHandleType type,                  \
	   unsigned long long flags))                                                             \
	X(optional, cuFlushGPUDirectRDMAWrites, ,                                                 \
	  (CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope))

#ifndef CUDA_VERSION

#define CUDA_ABI_MEMBER_(need, name, version, parameters) CUresult(*name) parameters;

/* The driver, one pointer for each function. Read-only once loaded; any thread. */
struct cuda {
	CUDA_ABI_FUNCTIONS(CUDA_ABI_MEMBER_)
};

/*
 * The table of the driver that this process uses. The first call loads libcuda.so.1, looks every function up and checks
 * the driver's version; it does not call cuInit(), so it makes no context and may precede a fork(). The library stays
 * loaded. Any thread.
 *
 * Returns 0; -ENOENT where there is no driver; -ENOTSUP where it is too old or lacks a function. In both cases
 * *ret_reason, if not NULL, is one line that says what is missing and what to do; it lives as long as the process.
 */
int cuda_load(const struct cuda **ret_cuda, const char **ret_reason);

/* "CUDA_ERROR_OUT_OF_MEMORY", or "CUDA error" for what even the driver does not know. Never NULL; static. */
const char *cuda_error_name(const struct cuda *cuda, CUresult result);

#endif
