/*
 * Element types, operations and reductions. The numbers are wire format, shared-memory format and public API at once:
 * client/bps.h repeats them under BPS_* names, and client/client.c asserts that both agree. Never renumber.
 */
#pragma once

#include "proto/c.h"

enum dtype {
	DTYPE_FLOAT64 = 1,
	DTYPE_FLOAT32 = 2,
	DTYPE_FLOAT16 = 3,
	DTYPE_BFLOAT16 = 4,
	DTYPE_INT64 = 5,
	DTYPE_INT32 = 6,
	DTYPE_INT16 = 7,
	DTYPE_INT8 = 8,
	DTYPE_UINT8 = 9,
	DTYPE_BOOL = 10,
	DTYPE_MAX_ = 10,
};

enum operation {
	OPERATION_PUSH_PULL = 1,
	OPERATION_BROADCAST = 2,
	OPERATION_ALL_GATHER = 3,
	OPERATION_REDUCE_SCATTER = 4,
	OPERATION_ALL_TO_ALL = 5,
	OPERATION_BARRIER = 6,
	OPERATION_PUSH_PULL_ROWS = 7,
	OPERATION_ACCUMULATE = 8,
	OPERATION_MAX_ = 8,
	/* In entries alone, and not among the others: agent/common/check.c knows it. */
	OPERATION_REFUSE = 9,
};

enum reduction {
	REDUCTION_SUM = 1,
	REDUCTION_AVERAGE = 2,
	REDUCTION_MIN = 3,
	REDUCTION_MAX = 4,
	REDUCTION_MAX_ = 4,
};

/* Elements of a tensor whose count differs from rank to rank or from round to round (all_gather, all_to_all). */
#define ELEMENTS_VARIABLE UINT64_MAX

/* Limits that both sides of every boundary know. */
#define JOB_NAME_MAX	 63	/* bytes of a job's id, without the NUL */
#define JOB_SECRET_MAX	 255	/* bytes */
#define JOB_RANKS_MAX	 16384u /* of a job; all_to_all's blocks, ranks squared, fit 32 bits */
#define TENSOR_NAME_MAX	 255	/* bytes, without the NUL */
#define TENSOR_SHAPE_MAX 63	/* likewise, of what a shape is in words */
#define ERROR_TEXT_MAX	 447	/* bytes of an error's text, without the NUL */
#define LEAVE_ERROR_MAX	 300	/* of these, bytes of Leave.error that the other ranks are told */
#define PART_BYTES_MIN	 4096u	/* smallest part size that may be configured */
#define PART_BYTES_MAX	 (64u << 20) /* largest; also the largest payload of a data message */
/* Of a part, most bytes of all ranks of a node, or of all nodes, together: what one sum reads, which others wait for. */
#define PART_SUM_MAX (128u << 20)

/* Features of control.proto, in Hello and Welcome. */
#define CONTROL_FEATURE_RESUME \
	UINT64_C(1) /* Resume: a job goes on when the daemon's process is another */

#define CONTROL_FEATURE_CUDA \
	UINT64_C(2) /* Share of device memory: the daemon has a driver, and can import it */

#define CONTROL_FEATURE_ELASTIC \
	UINT64_C(4) /* elastic jobs: Join's fields, Regroup, what shm_slot says of who came */

#define CONTROL_FEATURE_FUTEX UINT64_C(8) /* SHM_ARMED_FUTEX of proto/shm.h; the daemon's to say */

/* shm_header's order, the daemon's to say; what shm_slot says in brief, where both do. */
#define CONTROL_FEATURE_ORDER UINT64_C(16)

#define CONTROL_FEATURE_RELEASE \
	UINT64_C(32) /* tensors that no rank uses may be forgotten: Unused, Release */

#define CONTROL_FEATURE_WIDEN UINT64_C(64) /* shm_entry's input_dtype; the daemon's to say */

#define CONTROL_FEATURE_FOLLOW UINT64_C(128) /* Follow, OPERATION_REFUSE; the daemon's to say */

#define CONTROL_FEATURE_BLOCKED UINT64_C(256) /* Blocked; the daemon's to say */

/* Memory that Share hands over. */
enum memory_kind {
	MEMORY_MEMFD = 0,
	MEMORY_CUDA_IPC = 1, /* of cuMemAlloc(), by its legacy IPC handle */
	MEMORY_CUDA_FD = 2,  /* of cuMemCreate(), by a POSIX descriptor */
	MEMORY_MAX_ = 2,
};
#define DEVICE_UUID_LEN	  16u
#define DEVICE_HANDLE_LEN 64u /* bytes of a legacy IPC handle */

/* How the GPUs of a node reduce: Join. */
enum gpu_reduce {
	GPU_REDUCE_AUTO = 0,   /* as the topology suggests */
	GPU_REDUCE_NCCL = 1,   /* all GPUs of the node by NCCL */
	GPU_REDUCE_SWITCH = 2, /* by NCCL behind each PCIe switch, by the CPU between them */
	GPU_REDUCE_HOST = 3,   /* by the CPU: the same bits as for memory of the host */
	GPU_REDUCE_ROOTS = 4,  /* as AUTO, and by way of one GPU of each PCIe switch to the host */
	GPU_REDUCE_MAX_ = 4,
};

/* What a job does about ranks that are late: bps-recovery(7), STRAGGLERS. All zero: it waits for them. */
struct stragglers {
	uint32_t quorum; /* PUSH_PULL goes on with so many; 0: waits for all */
	uint32_t staleness;
	uint64_t quorum_timeout_ms; /* and so long after the first */
	bool async;		    /* there is ACCUMULATE */
};

/* With quorum, rounds that the last rank may be behind, unless staleness says otherwise: their results are held for it. */
#define QUORUM_BEHIND 8u

static inline bool stragglers_equal(const struct stragglers *a, const struct stragglers *b)
{
	return a->quorum == b->quorum && a->staleness == b->staleness &&
	       a->quorum_timeout_ms == b->quorum_timeout_ms && a->async == b->async;
}

/* Then each rank is a node of its own. */
static inline bool stragglers_any(const struct stragglers *s)
{
	return s->quorum || s->async;
}

/* Bytes of one element, or 0 when dtype is none of ours (a number from outside). */
static inline size_t dtype_size(unsigned dtype)
{
	static const uint8_t sizes[DTYPE_MAX_ + 1] = { 0, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1 };

	return dtype <= DTYPE_MAX_ ? sizes[dtype] : 0;
}

/* Names for people: "float32", "push_pull", "average"; "invalid" for anything else. */
const char *dtype_name(unsigned dtype);
const char *operation_name(unsigned operation);
const char *reduction_name(unsigned reduction);

/* Whether an operator means this job: by its name, which several users may use, or by its run's number, 16 digits. */
bool job_is_called(const char *name, uint64_t number, const char *asked);
