/*
 * The inside of the test double for libcuda.so.1: a driver whose devices are memory of the host. It is a test double and
 * measures nothing; where it cannot know what a real driver does it takes the stricter answer, and scripts/gpu-check asks
 * a real one.
 *
 *   Device memory   a memfd, mapped twice: the address that callers get is mapped without any right, so that who touches
 *                   it from the host dies as with a GPU; a hidden second mapping is what copies use.
 *   Streams         one thread each, first in first out. The legacy default stream waits for the others, and they for it.
 *   Errors          of an operation in a stream stick to the context, as the driver's do.
 *   Between         processes: IPC handles and file descriptors name the memfd.
 *
 * Locks: fake.lock guards contexts, streams' lists and the map of memory; a stream's lock its queue. fake.lock first.
 */
#pragma once

#include "dmabuf.h"
#include "proto/cuda_abi.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

/* A definition that differs from the table does not compile. */
#define FAKE_DECLARE_(need, name, version, parameters) EXPORT CUresult name##version parameters;
CUDA_ABI_FUNCTIONS(FAKE_DECLARE_)

#define FAKE_DEVICES_MAX 64
#define FAKE_GRANULARITY ((size_t)2 << 20) /* of cuMemCreate() */

struct stream;

struct CUctx_st {
	CUdevice device;    /* as this process counts */
	int physical;	    /* as the machine counts */
	unsigned refs;	    /* of cuDevicePrimaryCtxRetain(); 0: not alive */
	_Atomic int sticky; /* CUresult of what went wrong in a stream; 0: nothing */
	struct CUstream_st *streams;
	struct CUstream_st *legacy, *per_thread;
	size_t used;	/* bytes of device memory */
	uint64_t peers; /* bits of the devices whose memory it may use */
};

struct fake {
	pthread_mutex_t lock;
	bool initialised;
	pid_t pid; /* who has called cuInit(): CUDA does not survive fork() */
	int n_devices;
	struct CUctx_st contexts[FAKE_DEVICES_MAX]; /* the primary ones, by device */
	size_t device_len;
};

extern struct fake fake;

/* -- Entry of each call --------------------------------------------------------------------------------------- */

/* Traces, injects faults, and refuses where CUDA would: not initialised, after fork(), in a host function. */
CUresult fake_enter(const char *function);
/* The same, and the current context, which must be alive and free of sticky errors. */
CUresult fake_enter_context(const char *function, CUcontext *ret_context);
/* The current context, or NULL. */
CUcontext fake_current(void);

/*
 * What belongs to a thread. Not _Thread_local: the loader frees that of a library opened late in another thread, which
 * the thread sanitizer takes for a race.
 */
struct fake_thread {
	CUcontext stack[16]; /* the last is current */
	int depth;
	struct CUstream_st *running; /* the stream whose thread this is */
	bool in_host_function;
};
struct fake_thread *fake_thread(void);

#define ENTER()                                         \
	do {                                            \
		CUresult enter_ = fake_enter(__func__); \
		if (enter_)                             \
			return enter_;                  \
	} while (0)
#define ENTER_CONTEXT(ret_context)                                             \
	do {                                                                   \
		CUresult enter_ = fake_enter_context(__func__, (ret_context)); \
		if (enter_)                                                    \
			return enter_;                                         \
	} while (0)

/* fault.c: what FAKECUDA_FAIL says of the coming call of this function or stream operation. Any thread. */
EXPORT CUresult fakecuda_fault(const char *point);
/* The sticky error of a context, the first one to be told stays. */
void fake_poison(CUcontext context, CUresult error);
/* Whether such an error leaves the context unusable. */
bool fake_is_sticky(CUresult error);
EXPORT void fakecuda_trace(const char *function);
void fake_delay(void);

/* Physical numbers: "GPU 3" of the machine is the same for all processes. */
bool fake_is_unordered(void);
int fake_visible(int physical); /* as this process counts, or -1 */
void fake_uuid(int physical, CUuuid *ret_uuid);
/* "GPU-..." */
#define FAKECUDA_UUID_TEXT_LEN 48
EXPORT void fakecuda_uuid_text(int physical, char text[FAKECUDA_UUID_TEXT_LEN]);
EXPORT int fakecuda_n_physical(void);
EXPORT int fakecuda_physical(CUdevice device);
/* Bits; neither: on one machine. */
enum { FAKECUDA_LINK_NVLINK = 1, FAKECUDA_LINK_SWITCH = 2 };
EXPORT int fakecuda_link(int physical_a, int physical_b);

/* -- Memory --------------------------------------------------------------------------------------------------- */

/* Memory as such. Counted: by the map, by handles of cuMemCreate(), by operations in streams. */
struct fake_backing {
	_Atomic unsigned refs;
	int fd;
	char *alias;
	size_t len;
	fake_mark *marks;
	struct fake_shared *shared;
	int exporter_pidfd; /* of imported legacy memory; else -1 */
};

int fake_backing_new(size_t len, int physical, uint32_t handle_types, struct fake_backing **ret);
/* Of somebody's memfd, which it duplicates. -EINVAL: it is not one. */
int fake_backing_import(int fd, struct fake_backing **ret);
struct fake_backing *fake_backing_ref(struct fake_backing *backing);
void fake_backing_unref(struct fake_backing *backing);

enum fake_kind {
	FAKE_DEVICE,	 /* cuMemAlloc() */
	FAKE_POOL,	 /* cuMemAllocAsync() */
	FAKE_MANAGED,	 /* cuMemAllocManaged() */
	FAKE_IMPORT,	 /* cuIpcOpenMemHandle() */
	FAKE_MAPPED,	 /* cuMemMap() */
	FAKE_HOST,	 /* cuMemHostAlloc() */
	FAKE_REGISTERED, /* cuMemHostRegister() */
};

/* A piece of the address space. Counted: by the map and by operations in streams. */
struct fake_range {
	_Atomic unsigned refs;
	_Atomic bool dead; /* not in the map any more */
	enum fake_kind kind;
	CUdeviceptr start;
	size_t len;
	char *host; /* what copies use: the alias, or the host's memory itself */
	struct fake_backing *backing;
	CUcontext context;
	uint64_t id;		  /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
	CUmemAccess_flags access; /* FAKE_MAPPED */
	unsigned opened;	  /* FAKE_IMPORT: times */
	uint64_t nonce;		  /* FAKE_IMPORT: of the handle */
	bool exported;		  /* to devices that are none of ours */
	struct fake_range *next;
};

/* The range that a pointer lies in, or NULL. With fake.lock. */
struct fake_range *fake_find(CUdeviceptr ptr);
/* What cuIpcOpenMemHandle() has opened already. With fake.lock. */
struct fake_range *fake_find_import(uint64_t nonce, CUcontext context);
/* Reserves addresses that nobody may touch. 0: none left. */
CUdeviceptr fake_window(size_t len);
/* Into the map, with an id of its own. With fake.lock. NULL: out of memory; the backing reference is then still the
 * caller's. */
struct fake_range *fake_range_add(enum fake_kind kind, CUdeviceptr start, size_t len, char *host,
				  struct fake_backing *backing, CUcontext context);
/* Out of the map. With fake.lock. */
void fake_range_remove(struct fake_range *range);
struct fake_range *fake_range_ref(struct fake_range *range);
void fake_range_unref(struct fake_range *range);
/* Whether what is behind it still exists, its exporter included. */
bool fake_range_alive(const struct fake_range *range);
static inline bool fake_range_on_host(const struct fake_range *range)
{
	return range->kind == FAKE_HOST || range->kind == FAKE_REGISTERED;
}
/* All memory of a context. With fake.lock. */
void fake_memory_free_all(CUcontext context);

/* One contiguous piece of len bytes at ptr. */
struct fake_span {
	struct fake_range *range; /* referenced; NULL: pageable memory of the host */
	char *host;
	size_t len;
};

enum fake_side { FAKE_SIDE_ANY, FAKE_SIDE_DEVICE, FAKE_SIDE_HOST };
/* The first piece of [ptr, ptr + len). With fake.lock. */
CUresult fake_resolve(CUdeviceptr ptr, size_t len, enum fake_side side, struct fake_span *ret_span);
/*
 * Whether a copy that this context puts into a stream reads all of it in order. A device reads stale bytes, and says nothing: who
 * forgets to flush is found out here.
 */
bool fake_is_in_order(CUcontext context, const struct fake_span *span);
/* Whether all of [ptr, ptr + len) can be resolved. Without locks. */
CUresult fake_check(CUdeviceptr ptr, size_t len, enum fake_side side);

/* -- Streams -------------------------------------------------------------------------------------------------- */

/* The stream that a handle names in the current context, referenced; NULL: none. With fake.lock. */
struct CUstream_st *fake_stream_get(CUcontext current, CUstream handle);
void fake_stream_unref(struct CUstream_st *stream);
/* Waits until all that has been put into the context's streams is done. Without locks. */
CUresult fake_context_drain(CUcontext context);
/* Ends all streams of a context that is no longer used. Without locks. */
void fake_context_close(CUcontext context);

/* Frees at its turn in the stream. Takes the reference. */
CUresult fake_stream_free_range(CUcontext context, CUstream handle, struct fake_range *range);

/* -- For the other doubles ------------------------------------------------------------------------------------ */

/*
 * Runs run(arg, cancelled) at its turn in the stream, in the stream's thread; cancelled when the context has failed
 * before. It runs exactly once. Returns what CUDA would for a bad stream.
 */
EXPORT CUresult fakecuda_enqueue(CUstream stream, void (*run)(void *arg, bool cancelled),
				 void *arg);
/* The device of a stream, by the current context for the default ones; -1: no stream. */
EXPORT CUdevice fakecuda_stream_device(CUstream stream);
/* Copies from and to memory of either side, for run(). False: not (or no longer) memory; nothing is copied then. */
EXPORT bool fakecuda_load(void *to, const void *from, size_t len);
EXPORT bool fakecuda_store(void *to, const void *from, size_t len);
/* Whether all of it is memory that a device can reach. */
EXPORT bool fakecuda_reachable(const void *ptr, size_t len);
/*
 * For tests alone: where the host can read and write this device memory, up to the end of its allocation (or of its
 * piece, where several are mapped side by side), until it is freed. NULL: no such memory.
 */
EXPORT void *fakecuda_host(CUdeviceptr ptr);
/* Within run(): whether the stream's context has failed meanwhile, for what waits. */
EXPORT bool fakecuda_failed(void);
