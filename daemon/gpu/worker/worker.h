/*
 * The worker's process. Its threads:
 *
 *	main	reads commands and puts them into streams; makes no call that waits for a device
 *	set-up	what may wait: contexts, imports and their end, registration of host memory
 *	look	once there are communicators, and while something is under way: whether one has failed
 *	waiters	one for each stream that copies: says when what was marked in it is done
 *
 * Events go to the daemon from each of them. Whatever cannot be done is told in words, after which the daemon ends the
 * process; only an import may fail. When the daemon is gone, it lets go of the trainers' streams and ends. Private to the worker*.c.
 */
#pragma once

#include "gpu/wire.h"
#include "proto/allowance.h"
#include "proto/cuda_abi.h"
#include "proto/shm.h"
#include <pthread.h>

/* Says when what was recorded is done: one thread for one stream. */
struct waiter {
	pthread_t thread;
	pthread_mutex_t lock; /* of all below */
	pthread_cond_t more;
	_Atomic(struct mark *)
		first; /* recorded, in order; the waiter looks at it without the lock */
	struct mark *last;
	struct mark *spare;
	struct device *device;
	CUstream stream;
};

struct device {
	CUdevice number;
	CUuuid uuid;
	char name[64];
	CUcontext context;	  /* NULL: not opened */
	bool is_used;		  /* an import has succeeded: it stays open */
	unsigned n_failed;	  /* imports before one has succeeded */
	CUdeviceptr arena_memory; /* as allocated, with a page more; 0: none */
	CUdeviceptr arena;	  /* the daemon's arena here: worker.lock */
	uint64_t arena_len;
	int order;	 /* for whom what RDMA devices write there is in order, without a flush */
	bool has_others; /* other devices read there, too */
	struct waiter waiters[GPU_STREAMS];
};

struct memory {
	struct device *device; /* NULL: not open */
	CUdeviceptr base;
	uint64_t len;
	unsigned kind;
};

struct lane {
	CUstream stream; /* NULL: not used yet */
	struct device *device;
	uint32_t session, number;
};

struct session {
	void *shm;
	CUdeviceptr flags; /* of shm_flags(shm), as devices see it; 0: not registered */
	struct lane lanes[GPU_LANES];
};

struct worker {
	const struct cuda *cuda;
	struct device devices[GPU_DEVICES_MAX];
	int n_devices;

	pthread_mutex_t lock;			/* of what set-up writes and main reads: */
	struct memory *memories;		/* by number */
	struct device *arenas[GPU_DEVICES_MAX]; /* by their numbers: whose they are */
	size_t n_memories;
	struct session *sessions[GPU_SESSIONS_MAX];
	uint32_t n_sessions;
	char *staging;
	uint64_t staging_len;

	/* Marks under way in all streams. */
	pthread_mutex_t marks_lock;
	pthread_cond_t marks_more;
	unsigned n_marks;

	/* Set-up's, and its mail. */
	bool registered; /* staging */
	pthread_t setup;
	pthread_mutex_t mail_lock;
	pthread_cond_t mail_more;
	struct job *first, *last;
};

extern struct worker worker;

/* worker.c */
/* Tells the daemon. */
void worker_say(const struct gpu_event *event);
/* That n marks were reached, at most GPU_DONE_MAX. */
void worker_say_done(const uint64_t *tickets, uint32_t n);
/* Beside it a descriptor, which stays the caller's. */
void worker_say_with(const struct gpu_event *event, int fd);
/* Says why, and ends the process. */
_Noreturn void worker_fatal(int status, const char *format, ...) _printf_(2, 3);
/* The same of what a trainer's death may have brought about: the daemon waits for news of one before it believes it. */
_Noreturn void worker_fatal_if_alive(int status, const char *format, ...) _printf_(2, 3);
/* A call that must not fail. */
void worker_check(CUresult result, const char *call, const struct device *device);
/* Makes a device's context this thread's; NULL: it is not known which one is. */
void worker_enter(const struct device *device);

/*
 * Waits for what is to come very soon without sleeping, which takes as long as a copy; not where that has been in vain too
 * often. The allowance is the thread's.
 */
void worker_look(struct allowance *allowance, bool (*is_there)(void *context), void *context);

/* The device with this UUID, or NULL. */
struct device *worker_device(const uint8_t uuid[DEVICE_UUID_LEN]);

/* setup.c */
void worker_setup_start(void);
/* Hands over a command and what came beside it, or -1. */
void worker_setup_post(const struct gpu_command *command, int fd);

/* arena.c: on the set-up thread. The device is open. */
void worker_arena_open(struct device *device, const struct gpu_command *command);
void worker_arena_drop(struct device *device);

/* group.c: the first three on the set-up thread, the others on main. */
void worker_plan_device(const struct gpu_command *command);
void worker_plan(const struct gpu_command *command);
/*
 * Lets the other roots of its group use memory that this device's context has. Returns false, with words, when one cannot;
 * *ret_any: whether there are others.
 */
bool worker_reach(const struct device *device, char *text, size_t size, bool *ret_any);
void worker_member(const struct memory *input, const struct memory *output,
		   const struct gpu_command *command);
void worker_collective(const struct gpu_command *command);

/* stream.c */
void worker_streams_open(struct device *device);
/* Commands of streams. */
void worker_stream_run(const struct gpu_command *command);
