/*
 * Operations on CUDA memory. Only here does the library know the driver: it is loaded when the first of them comes, and no
 * context is of its making.
 *
 * There are three ways, and the library finds by itself which it is:
 *   handed over  The allocation that the memory lies in is exported once, by CUDA IPC or as a descriptor, and the daemon's
 *                worker reads and writes it where it is.
 *   staged       It cannot be exported: a piece of an arena on the same device takes its place, and the device copies.
 *   host         The daemon cannot reach the device: the usual staging area of host memory takes its place, and the call
 *                waits for the copy.
 *
 * Order. Streams of both processes meet at words of host memory, the flags (proto/shm.h). The caller's stream stores `ready`
 * when it has come to the submission, and waits for `done` when it is told to. It may be far behind the host: a slot, a
 * staged piece and an exported allocation are used again or given back only when the stream has stored `ready` and
 * has copied the result. Until then they linger.
 *
 * Who calls the driver. What goes into a stream of the caller's is put there without the client's mutex: the driver
 * blocks while a queue is full.
 */
#pragma once

#include "client.h"
#include "proto/cuda_abi.h"

#define CUDA_BUCKETS 256 /* of exports; a framework's allocator makes some hundred allocations */

/* What a pointer of the caller's is. */
struct cuda_place {
	CUcontext context; /* in which to call the driver about it */
	CUdevice device;
	CUdeviceptr base; /* of the allocation */
	size_t len;
	uint64_t
		buffer_id; /* the driver's number of the allocation: the next one at its address has another */
	enum memory_kind kind; /* how it is exported; MEMORY_MEMFD: not at all */
};

/* A device that a client has met. */
struct cuda_device {
	SLIST_ENTRY(cuda_device) link;
	CUdevice device;
	uint8_t uuid[DEVICE_UUID_LEN];
	CUcontext context; /* of the first pointer; for what is the library's own */
	CUstream stream;   /* for copies that the host waits for */
	struct staging staging;
	bool host; /* the daemon cannot reach it */
};

/* Of a bps_memory that is an allocation on a device. */
struct cuda_memory {
	LIST_ENTRY(cuda_memory) link; /* of an export that may be found: in client->cuda->exports */
	struct bps_memory *memory;
	struct cuda_device *device;
	enum memory_kind kind;
	CUipcMemHandle handle; /* MEMORY_CUDA_IPC */
	uint64_t buffer_id;
	bool listed;
	bool ours; /* an arena */
};

/* The flags of a session, mapped by themselves. */
struct cuda_flags {
	SLIST_ENTRY(cuda_flags) link; /* of those that are kept for ever */
	struct shm_flag *slots;
	CUdeviceptr address; /* for devices; 0: not registered */
};

/* What a request on CUDA memory has beside the rest. Guarded by the client's mutex. */
struct cuda_use {
	TAILQ_ENTRY(cuda_use) link; /* in client->cuda->lingering */
	struct cuda_device *device;
	CUcontext context;
	CUstream stream;
	struct cuda_flags *flags; /* NULL: the host way */
	struct shm_flag *flag;
	uint32_t ticket; /* its low half */
	bool begun;	 /* `ready` is in the stream */
	bool streamed; /* a staged result is copied in the order of a stream, not when the host sees the end */
	unsigned n_enqueuing; /* threads that are putting something into a stream */
	CUevent copied;	      /* behind that copy */
	/* Of a request that is no more. */
	struct bps_client *client;
	uint32_t slot;
	struct bps_memory *memories[2];
	struct staging_range *ranges[2];
};

/* Of a client that has met CUDA memory. */
struct cuda_state {
	SLIST_ENTRY(cuda_state) link; /* of those that are kept for ever */
	const struct cuda *api;
	SLIST_HEAD(, cuda_device) devices;
	LIST_HEAD(, cuda_memory) exports[CUDA_BUCKETS];
	TAILQ_HEAD(, cuda_use) lingering;
	unsigned n_sharing;  /* allocations that the daemon has not answered for */
	bool blocking, host; /* as the environment says */
};

/* Whether the daemon is being told of memory on a device: the next one would not be, and could not answer. (locked) */
static inline bool cuda_is_sharing(const struct bps_client *client)
{
	return client->cuda && client->cuda->n_sharing;
}

/* -- cuda.c: what memory is ------------------------------------------------------------------------------------------- */

/* Sets the text: "cuMemAlloc() on CUDA device 0: CUDA_ERROR_OUT_OF_MEMORY". Returns -EIO or what fits better. */
int cuda_error(const struct cuda *api, CUresult result, const char *call);

/* Makes client->cuda, unless it is there. 0, or -ENODEV where there is no driver. (locked) */
int cuda_open(struct bps_client *client);

/*
 * Looks a pointer up, as the driver knows it, for operations in stream. what: "input", for the words. 0 or -EINVAL with the
 * text set. Any thread, without the mutex.
 */
int cuda_inspect(const struct cuda *api, const void *data, uint64_t len, const char *what,
		 CUstream stream, struct cuda_place *ret_place);

/* The device of a place. (locked) */
int cuda_device_get(struct bps_client *client, const struct cuda_place *place,
		    struct cuda_device **ret_device);

/*
 * Memory that the daemon can reach for len bytes at data, in the use's way: exactly one of the two is set, and used or
 * taken. stage: not where it is. Turns the use to the host way if the daemon does not take it. (locked, may wait)
 */
int cuda_find(struct bps_client *client, struct cuda_use *use, const struct cuda_place *place,
	      const void *data, uint64_t len, bool stage, struct bps_memory **ret_memory,
	      struct staging_range **ret_range);

/* A device's staging arena. (locked, may wait) */
int cuda_arena_new(struct bps_client *client, struct cuda_device *device, size_t len,
		   struct bps_memory **ret_memory);
/* The device's part of memory_free(): gives it to the daemon no longer, and frees an arena when it may. (locked) */
void cuda_memory_free(struct bps_memory *memory);

/* The job is over: nothing of a device is shared any more. (locked) */
void cuda_leave(struct bps_client *client);
/* The client is closed. (locked) */
void cuda_close(struct bps_client *client);

/* -- cuda_order.c: streams ----------------------------------------------------------------------------------------------- */

/* For a new request of a plan's memory, in stream: chooses the way; rows: for PUSH_PULL_ROWS. (locked, may wait) */
int cuda_use_new(struct bps_request *request, const struct cuda_place *place, CUstream stream,
		 bool rows);
/* Once it has its slot. (locked) */
void cuda_use_slot(struct bps_request *request);
/* Puts the input where the daemon finds it, to_host or to, or nowhere, and `ready` behind it. Without the mutex. */
int cuda_begin(struct bps_request *request, const void *from, void *to, uint64_t len);

/* The request has ended, or will never be posted: streams go on, and what one may still touch lingers. (locked) */
void cuda_end(struct bps_request *request, int status);
/* The result is where it belongs, or there is none: the same for what it held. False: not yet. (locked) */
bool cuda_release_output(struct bps_request *request);
/* Brings a staged result to output and waits for it. Without the mutex. 0 or a negative errno. */
int cuda_copy(const struct bps_request *request);
/* Gives back what lingers no longer. (locked) */
void cuda_sweep(struct bps_client *client);
