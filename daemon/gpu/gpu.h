/*
 * Memory of GPUs. No process of ours but a worker calls CUDA: `bps-daemon --gpu-worker`, one for each job that has device
 * memory, started when it is first needed and ended with the job. It owns the job's contexts, imports, streams and NCCL
 * communicators; whatever goes wrong in them ends this process and this job alone. This module owns the workers'
 * processes, the staging memory through which bytes pass between devices and the rest of the daemon, and what is under way
 * between the two. Policy is agent/'s: it says what is copied when.
 *
 *	worker	   a process; of one job
 *	session	   a trainer as its job's worker knows it: the flags of proto/shm.h
 *	memory	   an allocation that a trainer shared; imported by the worker of the job that its session is in
 *	lease	   a piece of staging memory, for a part under way
 *	arena	   staging in the memory of a device, for one worker, which RDMA devices read and write: direct.c
 *	task	   work of a worker's streams: begun, given commands, ended; done() comes when all of them are
 *
 * Control thread only. A worker's own threads are in worker.c. Nothing here waits for a worker, but for gpu_new(), once,
 * with a deadline.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"
#include "base/map.h"
#include "proto/types.h"

struct gpu;
struct gpu_worker;
struct gpu_session;

/* Who must know where staging is: another device that reads and writes it. Optional. */
struct gpu_staging_ops {
	/* Returns 0 or -ENOMEM; then no worker starts. */
	int (*opened)(void *user, void *data, size_t len);
	/*
	 * The same of an arena, len bytes of a dma-buf, whose descriptor stays the caller's. data: addresses that are reserved
	 * for it, where there is nothing. Returns 0, or -errno with the reason; then the arena is not used.
	 */
	int (*exported)(void *user, void *data, size_t len, int dmabuf, struct failure *failure);
	/* Of either. */
	void (*closing)(void *user, void *data);
};

struct gpu_params {
	struct loop *loop;
	const char *program;	/* what is run with --gpu-worker; NULL: this program */
	uint64_t staging_bytes; /* for all jobs */
	uint64_t direct_bytes;	/* of an arena; 0: there are none, */
	const char *no_direct;	/* for this reason; static */
	const struct gpu_staging_ops *staging_ops; /* or NULL */
	void *user;				   /* theirs */
	uint64_t
		timeout_ms; /* a worker that has done nothing for so long, with work to do, is killed */
};

/*
 * Looks whether workers can be started, by starting one that looks for driver and devices, for at most ten seconds where
 * there is a driver. That there is none is no error. Returns 0, -ENOMEM or another -errno.
 */
int gpu_new(const struct gpu_params *params, struct gpu **ret_gpu);
/* Whether workers can be started. */
bool gpu_is_there(const struct gpu *gpu);
/* One line for people: what there is, or why nothing is. */
const char *gpu_describe(const struct gpu *gpu);
/* Kills every worker; what is under way ends as failed, from inside. Idempotent. */
void gpu_close(struct gpu *gpu);
/* After close, when nobody holds a worker, a memory or a lease. */
struct gpu *gpu_free(struct gpu *gpu);
DEFINE_CLEANUP(struct gpu *, gpu_free)

/* -- Workers ------------------------------------------------------------------------------------------------------ */

struct gpu_worker_ops {
	/* Something that was waited for may be there: an import, a flag, a plan. From the loop. */
	void (*changed)(void *user);
	/*
	 * The process is dead or as good as that; words say why. Tasks end as failed right after. From the loop, or from
	 * gpu_close().
	 */
	void (*lost)(void *user, const struct failure *failure);
	/* After gpu_worker_close(): the process is no more, and neither is the worker. From the loop, or from gpu_close(). */
	void (*gone)(void *user);
};

/* Starts a worker's process. name: its job's, for messages. Returns 0, or -errno with words. */
int gpu_worker_start(struct gpu *gpu, const char *name, const struct gpu_worker_ops *ops,
		     void *user, struct gpu_worker **ret_worker, struct failure *failure);
/*
 * No task is begun from here on. The process ends when those under way are done, and is killed if it does not; then
 * gone() comes, not from inside. Idempotent.
 */
void gpu_worker_close(struct gpu_worker *worker);

/* -- Sessions and their flags --------------------------------------------------------------------------------------- */

/*
 * Hands a trainer's shared memory (proto/shm.h) to the worker. The descriptor stays the caller's. The session lives as
 * long as the worker, and reads the flags though the trainer be gone. Returns 0 or -errno.
 */
int gpu_session_open(struct gpu_worker *worker, int memfd, struct gpu_session **ret_session);
/* Whether the trainer's stream has reached the submission with this ticket. */
bool gpu_session_is_ready(const struct gpu_session *session, uint32_t slot, uint64_t ticket);
struct gpu_memory;
/*
 * changed() will come after it has. memory: imported, on the device whose stream waits. Where there are too few such
 * streams a timer looks. Returns 0 or -ENOMEM.
 */
int gpu_session_watch(struct gpu_session *session, const struct gpu_memory *memory, uint32_t slot,
		      uint64_t ticket);

/* -- Memory ------------------------------------------------------------------------------------------------------- */

enum gpu_memory_state { GPU_MEMORY_AWAY, GPU_MEMORY_OPENING, GPU_MEMORY_OPEN, GPU_MEMORY_FAILED };

struct gpu_memory_params {
	unsigned kind; /* MEMORY_CUDA_* */
	uint8_t device[DEVICE_UUID_LEN];
	uint8_t handle[DEVICE_HANDLE_LEN]; /* MEMORY_CUDA_IPC */
	int fd;				   /* MEMORY_CUDA_FD: stays the caller's; else -1 */
	uint64_t len;
};

/* Returns 0, -ENOMEM or -errno. */
int gpu_memory_new(const struct gpu_memory_params *params, struct gpu_memory **ret_memory);
/*
 * Asks a worker to import it. opened(), which may be NULL, follows from the loop, once, unless the memory is freed before;
 * why: NULL if all is well.
 */
void gpu_memory_open(struct gpu_memory *memory, struct gpu_worker *worker,
		     void (*opened)(void *user, const struct failure *why), void *user);
/* In this worker; OPENING as well while another one, which is to end, still has it. failure: why, when it is FAILED; may be NULL. */
enum gpu_memory_state gpu_memory_state(const struct gpu_memory *memory,
				       const struct gpu_worker *worker, struct failure *failure);
/* 16 bytes. */
const uint8_t *gpu_memory_device(const struct gpu_memory *memory);
/*
 * No task uses it any more. freed(): no worker has it imported; may come from inside, and then returns before this does.
 * May be NULL.
 */
void gpu_memory_free(struct gpu_memory *memory, void (*freed)(void *user), void *user);

/* -- Staging ------------------------------------------------------------------------------------------------------ */

enum { GPU_E_NONE, GPU_E_WAIT };

struct gpu_arena;
struct gpu_lease {
	void (*granted)(struct gpu_lease *lease); /* after GPU_E_WAIT; from the loop */
	/* gpu/'s; data may be read while it is held. */
	struct gpu *gpu;
	struct gpu_arena *arena;   /* that it is in, or NULL */
	struct gpu_worker *worker; /* while it waits */
	void *data;		   /* NULL: not held */
	uint64_t offset, len;
	bool is_long, waits;
	struct list link;
};

/*
 * Takes staging. Who holds it until another node has answered says is_long, and gets it only while half of all is free
 * for the others: then these always come to their turn, whatever order nodes work in. Returns 0; GPU_E_WAIT, and
 * granted() follows: never for is_long, where it means no; -EMSGSIZE when there is not so much in all.
 */
int gpu_lease_take(struct gpu_worker *worker, struct gpu_lease *lease, uint64_t len, bool is_long);
/* Gives it back, or stops waiting. Harmless when it is neither held nor waited for. */
void gpu_lease_give(struct gpu_lease *lease);
uint64_t gpu_staging_len(const struct gpu_worker *worker);

/* -- Arenas ------------------------------------------------------------------------------------------------------- */

enum gpu_direct_state { GPU_DIRECT_AWAY, GPU_DIRECT_OPENING, GPU_DIRECT_OPEN, GPU_DIRECT_REFUSED };

/* Whether the worker has an arena on the device of this memory, which is imported; changed() comes after OPENING. */
enum gpu_direct_state gpu_direct_state(const struct gpu_worker *worker,
				       const struct gpu_memory *memory);
/* Asks for it: AWAY. Out of memory: the worker is lost. */
void gpu_direct_open(struct gpu_worker *worker, const struct gpu_memory *memory);
/*
 * Takes staging from there: data of such a lease is a name for gpu_task_*() and transport/, and nothing for the CPU. It may be
 * held as long as it takes. Returns 0; or GPU_E_WAIT when there is none now, for which nobody waits: there is the other staging.
 */
int gpu_lease_take_direct(struct gpu_worker *worker, const struct gpu_memory *memory,
			  struct gpu_lease *lease, uint64_t len);
/* For people: which way bytes go between this worker's devices and servers, and why. */
void gpu_direct_describe(const struct gpu_worker *worker, char *text, size_t size);

/* -- Work --------------------------------------------------------------------------------------------------------- */

struct gpu_task {
	/* All is done, or (failed) the worker is dead: nothing touches any memory any more. From the loop, or gpu_close(). */
	void (*done)(struct gpu_task *task, bool failed);
	/* gpu/'s. */
	unsigned n_pending;
	bool is_mapped;
	uint64_t ticket;
	struct list link;
	struct map_entry entry;
};

/* Each device has two streams; what is in one is done in order. */
enum gpu_stream { GPU_DOWN, GPU_UP, GPU_STREAMS };

/* Begins a task. Commands until gpu_task_end() are its; none of them fails, as a worker that cannot dies. */
void gpu_task_begin(struct gpu_worker *worker, struct gpu_task *task);
/* Copies len bytes from a device to staging, or back. data: inside a lease; of an arena, also on another root of the group. */
void gpu_task_down(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		   void *data, uint64_t len);
void gpu_task_up(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		 const void *data, uint64_t len);
/* From an arena, on the device of this memory, to staging of the host. GPU_DOWN. */
void gpu_task_spill(struct gpu_worker *worker, struct gpu_memory *memory, const void *from,
		    void *data, uint64_t len);
/* After what is in the up-stream of the memory's device: tells the trainer's stream. */
void gpu_task_tell(struct gpu_worker *worker, struct gpu_memory *memory,
		   struct gpu_session *session, uint32_t slot, uint64_t ticket);
void gpu_task_end(struct gpu_worker *worker);

/* -- Groups that reduce by NCCL ------------------------------------------------------------------------------------- */

#define GPU_RANKS_MAX 64

/* Of each device that was asked about: */
struct gpu_plan {
	uint8_t group_of[GPU_RANKS_MAX]; /* numbered by their first devices */
	/*
	 * Whether it has a slice of its group's sums, which it brings to the host and back. All of a group, or some: its
	 * roots, by way of which those of the others go.
	 */
	bool is_root[GPU_RANKS_MAX];
};

/*
 * Asks how devices are to be grouped, once for each worker: n at most GPU_RANKS_MAX different devices, each given by memory
 * on it that is imported. roots: bits for those that are to be roots; 0: as mode says. changed() follows.
 */
void gpu_plan_ask(struct gpu_worker *worker, enum gpu_reduce mode, uint64_t roots,
		  struct gpu_memory *const *memories, size_t n);
/* NULL: not known yet. */
const struct gpu_plan *gpu_plan(const struct gpu_worker *worker);
/* Whether NCCL's sums are as good as ours: for sums of most types; not where a NaN has to win, or rows of bits. */
bool gpu_collective_supports(unsigned dtype, unsigned reduction);

enum gpu_collective {
	/*
	 * The output of the group's i-th root gets the i-th slice of the sum, at its place, the last one's also what does not
	 * divide. GPU_DOWN.
	 */
	GPU_REDUCE_SCATTER,
	/* From such slices of the outputs, in the outputs. GPU_UP. */
	GPU_ALL_GATHER,
	/* From inputs to outputs; average too, of floating-point numbers. GPU_UP. */
	GPU_ALL_REDUCE,
};

struct gpu_member {
	struct gpu_memory *input, *output;
	uint64_t input_offset, output_offset;
};

/*
 * Slices are of n_elements / roots elements. members: of all of a group's devices, in order. scale: of a sum of float16, a power
 * of two by which each element is divided before; 0 or 1: by nothing.
 */
void gpu_task_collective(struct gpu_worker *worker, enum gpu_collective what, unsigned group,
			 const struct gpu_member *members, size_t n, unsigned dtype,
			 unsigned reduction, uint32_t scale, uint64_t n_elements);

/* -- The worker's process ------------------------------------------------------------------------------------------ */

/* main() of `bps-daemon --gpu-worker`: serves the socket that is descriptor 3. Returns an exit status. */
int gpu_worker_main(void);
