/*
 * The parts of NCCL's ABI that bps uses, like proto/cuda_abi.h: names and numbers of nccl.h, one table of functions, and
 * a test that holds both to the real header where there is one. After <nccl.h> this header defines its tables alone.
 */
#pragma once

#include "proto/cuda_abi.h"

/* ncclGetVersion(): 2.14, the first with ncclConfig_t and ncclCommFinalize(). */
#define NCCL_MIN 21400

#define NCCL_ABI_RESULTS(X)          \
	X(ncclSuccess, 0)            \
	X(ncclUnhandledCudaError, 1) \
	X(ncclSystemError, 2)        \
	X(ncclInternalError, 3)      \
	X(ncclInvalidArgument, 4)    \
	X(ncclInvalidUsage, 5)       \
	X(ncclRemoteError, 6)        \
	X(ncclInProgress, 7)

#define NCCL_ABI_OPERATIONS(X) \
	X(ncclSum, 0)          \
	X(ncclProd, 1)         \
	X(ncclMax, 2)          \
	X(ncclMin, 3)          \
	X(ncclAvg, 4)

#define NCCL_ABI_TYPES(X) \
	X(ncclInt8, 0)    \
	X(ncclUint8, 1)   \
	X(ncclInt32, 2)   \
	X(ncclUint32, 3)  \
	X(ncclInt64, 4)   \
	X(ncclUint64, 5)  \
	X(ncclFloat16, 6) \
	X(ncclFloat32, 7) \
	X(ncclFloat64, 8) \
	X(ncclBfloat16, 9)

#define NCCL_ABI_RESIDENCES(X) \
	X(ncclScalarDevice, 0) \
	X(ncclScalarHostImmediate, 1)

#ifndef NCCL_VERSION_CODE

typedef enum { NCCL_ABI_RESULTS(CUDA_ABI_ENUMERATOR_) } ncclResult_t;
typedef enum { NCCL_ABI_OPERATIONS(CUDA_ABI_ENUMERATOR_) ncclMaxRedOp = 0x7fffffff } ncclRedOp_t;
typedef enum { NCCL_ABI_TYPES(CUDA_ABI_ENUMERATOR_) } ncclDataType_t;
typedef enum { NCCL_ABI_RESIDENCES(CUDA_ABI_ENUMERATOR_) } ncclScalarResidence_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
	char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef struct ncclComm *ncclComm_t;
/* The runtime's name for CUstream. */
typedef struct CUstream_st *cudaStream_t;

/* As of 2.14. Later ones append fields and take what is missing after size as not set. */
typedef struct {
	size_t size;
	unsigned int magic;
	unsigned int version;
	int blocking;
} ncclConfig_t;

#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_INITIALIZER                                                                \
	{                                                                                      \
		.size = sizeof(ncclConfig_t), .magic = NCCL_CONFIG_MAGIC, .version = NCCL_MIN, \
		.blocking = 1                                                                  \
	}

#endif

/* X(need, name, result, parameters) */
#define NCCL_ABI_FUNCTIONS(X)                                                                     \
	X(required, ncclGetVersion, ncclResult_t, (int *version))                                 \
	X(required, ncclGetUniqueId, ncclResult_t, (ncclUniqueId * id))                           \
	X(required, ncclCommInitRankConfig, ncclResult_t,                                         \
	  (ncclComm_t * comm, int n_ranks, ncclUniqueId id, int rank, ncclConfig_t *config))      \
	X(required, ncclCommInitAll, ncclResult_t,                                                \
	  (ncclComm_t * comms, int n, const int *devices))                                        \
	X(required, ncclCommFinalize, ncclResult_t, (ncclComm_t comm))                            \
	X(required, ncclCommDestroy, ncclResult_t, (ncclComm_t comm))                             \
	X(required, ncclCommAbort, ncclResult_t, (ncclComm_t comm))                               \
	X(required, ncclCommGetAsyncError, ncclResult_t, (ncclComm_t comm, ncclResult_t * error)) \
	X(required, ncclGetErrorString, const char *, (ncclResult_t result))                      \
	X(required, ncclGetLastError, const char *, (ncclComm_t comm))                            \
	X(required, ncclCommCount, ncclResult_t, (const ncclComm_t comm, int *n))                 \
	X(required, ncclCommUserRank, ncclResult_t, (const ncclComm_t comm, int *rank))           \
	X(required, ncclCommCuDevice, ncclResult_t, (const ncclComm_t comm, int *device))         \
	X(required, ncclRedOpCreatePreMulSum, ncclResult_t,                                       \
	  (ncclRedOp_t * op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,  \
	   ncclComm_t comm))                                                                      \
	X(required, ncclRedOpDestroy, ncclResult_t, (ncclRedOp_t op, ncclComm_t comm))            \
	X(required, ncclAllReduce, ncclResult_t,                                                  \
	  (const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op,             \
	   ncclComm_t comm, cudaStream_t stream))                                                 \
	X(required, ncclReduce, ncclResult_t,                                                     \
	  (const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, int root,   \
	   ncclComm_t comm, cudaStream_t stream))                                                 \
	X(required, ncclReduceScatter, ncclResult_t,                                              \
	  (const void *from, void *to, size_t n_to, ncclDataType_t type, ncclRedOp_t op,          \
	   ncclComm_t comm, cudaStream_t stream))                                                 \
	X(required, ncclAllGather, ncclResult_t,                                                  \
	  (const void *from, void *to, size_t n_from, ncclDataType_t type, ncclComm_t comm,       \
	   cudaStream_t stream))                                                                  \
	X(required, ncclBroadcast, ncclResult_t,                                                  \
	  (const void *from, void *to, size_t n, ncclDataType_t type, int root, ncclComm_t comm,  \
	   cudaStream_t stream))                                                                  \
	X(required, ncclGroupStart, ncclResult_t, (void))                                         \
	X(required, ncclGroupEnd, ncclResult_t, (void))

#ifndef NCCL_VERSION_CODE

#define NCCL_ABI_MEMBER_(need, name, result, parameters) result(*name) parameters;

/* NCCL, one pointer for each function. Read-only once loaded; any thread. */
struct nccl {
	NCCL_ABI_FUNCTIONS(NCCL_ABI_MEMBER_)
};

/*
 * The table of the NCCL that this process uses: libnccl.so.2, loaded at the first call. It reads NCCL_* of the
 * environment then and later, so that they must be set before. Any thread.
 *
 * Returns 0; -ENOENT where there is no NCCL; -ENOTSUP where it is too old or lacks a function. In both cases
 * *ret_reason, if not NULL, is one line that says what is missing; it lives as long as the process.
 */
int nccl_load(const struct nccl **ret_nccl, const char **ret_reason);

#endif
