/* What the daemon's side of gpu/ shares among its files. */
#pragma once

#include "base/clock.h"
#include "base/list.h"
#include "base/map.h"
#include "base/metrics.h"
#include "gpu/wire.h"
#include "proto/allowance.h"
#include "proto/shm.h"

/* Waiting flags that no lane is left for are looked at so often. */
#define GPU_POLL_NS (1 * NSEC_PER_MSEC)
/*
 * Where a stream has nothing else to do, it comes to a submission 5 us after the daemon does, and a lane tells of it 20 to 50 us
 * late: for so long, and so often, a flag is looked at before it has a lane, unless that has been in vain too often.
 */
#define GPU_SOON_NS	 (20 * NSEC_PER_USEC)
#define GPU_POLL_SOON_NS (2 * NSEC_PER_USEC)
/*
 * The driver takes back a trainer's memory while it dies, and what of ours is at work on it then fails: its process is not
 * known to be dead yet. So long a failure of this kind is kept back, so that the death, if there is one, is told first.
 */
#define GPU_DEATH_NS (2 * NSEC_PER_SEC)
/* A worker that was told to end has so long. */
#define GPU_END_NS (10 * NSEC_PER_SEC)
#define GPU_PAGE   4096u

/* What of some memory is in use: one bit for each page. */
struct gpu_pages {
	uint64_t n, n_used;
	uint64_t *used;
};

struct gpu {
	struct gpu_params params;
	bool is_there, closed;
	char text[ERROR_TEXT_MAX + 1]; /* what there is */
	struct list workers, arenas;
	struct metric bytes_staged, bytes_direct;
	struct mail reap;
	bool reaping;

	int staging_fd;
	char *staging; /* NULL until the first worker */
	struct gpu_pages pages;
	uint64_t n_long;
	struct list waiting; /* workers with leases that wait, in turn */
	struct mail grant;
	bool granting;
};

/* Staging in the memory of a device. */
struct gpu_arena {
	struct list link; /* gpu->arenas */
	struct gpu *gpu;
	struct gpu_worker *worker; /* NULL: its process is no more; it goes with its last lease */
	uint32_t number;	   /* of its worker's */
	uint8_t device[DEVICE_UUID_LEN];
	enum gpu_direct_state state;
	char *data; /* reserved addresses; NULL: not open */
	struct gpu_pages pages;
	struct failure why; /* REFUSED */
};

/* DYING: it is killed, and may still be at what it has begun: a driver takes its time to let go of a process. */
enum gpu_worker_state { WORKER_RUNNING, WORKER_ENDING, WORKER_DYING, WORKER_DEAD };

struct gpu_watch {
	struct list link; /* the session's: on a lane, or none is free or it is too early for one */
	uint64_t lane_ns; /* from then on it may have a lane */
	uint64_t looked_ns; /* before that its flag is looked at for so long */
	uint32_t slot, lane;
	uint64_t ticket;
	uint8_t device[DEVICE_UUID_LEN];
};

/* The tasks of a worker. */
struct gpu_work {
	struct gpu_task *task; /* between begin and end */
	struct {
		const struct gpu_memory *memory;
		enum gpu_stream stream;
	} marks[GPU_STREAMS * GPU_DEVICES_MAX]; /* streams that the task uses */
	unsigned n_marks;
	uint64_t n_bytes;     /* that the task copies */
	struct list tasks;    /* under way */
	struct map by_ticket; /* the same */
	uint64_t n_begun;
	struct mail fail; /* ends those that wait for nothing */
	bool fail_posted;
};

/* Commands to a worker's process. */
struct gpu_out {
	struct gpu_command batch[GPU_PACKET_MAX];
	unsigned n_batch;
	struct mail flush; /* sends the batch when the loop is done with what it works on */
	bool flushing;
	struct list packets; /* that did not fit into the socket */
	size_t n_packets;
};

struct gpu_worker {
	struct gpu *gpu;
	struct list link;
	struct list wait_link; /* gpu->waiting */
	struct list leases;    /* that wait */
	char name[JOB_NAME_MAX + 1];
	struct gpu_worker_ops ops;
	void *user;
	enum gpu_worker_state state;
	bool closed; /* gpu_worker_close() was called */
	bool ended;  /* it was ENDING when it was killed */
	bool is_ready;
	struct failure why; /* DYING, DEAD */
	pid_t pid;
	struct loop_source socket;
	struct loop_source process; /* pidfd */
	struct loop_timer timer;    /* something is under way, or the process is to end */
	struct loop_timer poll;	    /* watches without a lane */
	struct allowance look;	    /* for looking at their flags before they have one */
	struct loop_timer late;	    /* its process is dead, for the reason kept_back */
	struct failure kept_back;
	struct mail soon; /* ends it for want of memory: from the loop */
	bool dies_soon;
	const char *no_memory;
	struct mail changed; /* says it from the loop */
	bool changed_posted;
	uint64_t progress_ns; /* when the last event came */
	unsigned n_setup; /* imports, their ends and plans that were asked for and not answered */

	uint32_t n_arenas;
	unsigned
		logged_ways; /* that its memory goes to servers: what the log says; 0: nothing yet */
	struct list memories; /* that it has, or is about to */
	struct gpu_memory **by_number;
	uint32_t n_numbers;
	struct gpu_session **sessions;
	uint32_t n_sessions;

	bool has_plan;
	struct gpu_plan plan;
	size_t n_planned;

	struct gpu_work work;
	struct gpu_out out;
};

struct gpu_session {
	struct gpu_worker *worker;
	uint32_t number;
	void *flags; /* SHM_FLAG_LEN bytes, mapped to be read */
	uint32_t lanes;
	struct list watched, parked;
};

struct gpu_memory {
	struct gpu_memory_params params; /* its own fd */
	struct gpu_worker *worker;
	struct list link; /* the worker's */
	uint32_t number;
	enum gpu_memory_state state;
	bool closing;
	struct failure failure;
	void (*opened)(void *user, const struct failure *why);
	void (*freed)(void *user);
	void *opened_user, *freed_user;
};

/* pages.c */
int gpu_pages_init(struct gpu_pages *pages, uint64_t n); /* returns 0 or -ENOMEM */
void gpu_pages_done(struct gpu_pages *pages);
/* Takes n pages that follow one another. Returns whether there are such. */
bool gpu_pages_take(struct gpu_pages *pages, uint64_t n, uint64_t *ret_page);
void gpu_pages_give(struct gpu_pages *pages, uint64_t page, uint64_t n);
static inline uint64_t gpu_pages_of(uint64_t len)
{
	return (len + GPU_PAGE - 1) / GPU_PAGE;
}

/* direct.c */
/* Takes the descriptor. */
void gpu_direct_event(struct gpu_worker *worker, const struct gpu_event *event, int fd);
void gpu_direct_give(struct gpu_lease *lease);
/* Whether somebody has a lease of one of the worker's arenas. */
bool gpu_direct_is_used(const struct gpu_worker *worker);
/* No process of the worker has them, or it is about to end; nobody names those that no lease is of. */
void gpu_direct_close(struct gpu_worker *worker);
/* The one that data is in, or NULL. */
const struct gpu_arena *gpu_direct_find(const struct gpu_worker *worker, const void *data);

/* staging.c */
int gpu_staging_open(struct gpu *gpu);
void gpu_staging_close(struct gpu *gpu);
/* Grants what can be granted, from inside. */
void gpu_staging_grant(struct gpu *gpu);

/* worker_process.c: the process, its socket, and what is under way. */
/* Sends a command; fd goes beside it, stays the caller's, or -1. */
void gpu_worker_send(struct gpu_worker *worker, const struct gpu_command *command, int fd);
/* Sends what was put into the batch: at once, or together with what else the loop has for the worker now. */
void gpu_worker_flush(struct gpu_worker *worker);
void gpu_worker_flush_later(struct gpu_worker *worker);
struct gpu_command *gpu_worker_add(struct gpu_worker *worker);
void gpu_worker_changed(struct gpu_worker *worker);
void gpu_worker_die(struct gpu_worker *worker, const struct failure *why);
/* From within a call of its user, who hears of it from the loop; until then nothing is sent. no_memory: for what; static. */
void gpu_worker_die_soon(struct gpu_worker *worker, const char *no_memory);

/* Something is under way, a task or n_setup: from now on it is to be heard of. */
void gpu_worker_expect(struct gpu_worker *worker);
/* n_setup is one more. */
void gpu_worker_expect_setup(struct gpu_worker *worker);
/* A task has ended: ends the process if it was to and was the last. */
void gpu_worker_idle(struct gpu_worker *worker);
/* Runs the worker's program. Returns 0 or -errno. */
int gpu_process_start(const char *program, pid_t *ret_pid, int *ret_pidfd, int *ret_socket);
/* The next event. Returns as frame_receive(). */
int gpu_event_receive(int socket, struct gpu_event *ret_event, int *ret_fd);

/* task.c, memory.c, session.c: events; and a worker that ends. */
void gpu_task_event(struct gpu_worker *worker, uint64_t ticket);
/* Ends all tasks of a dead worker. */
void gpu_task_worker_died(struct gpu_worker *worker);
void gpu_plan_event(struct gpu_worker *worker, const struct gpu_event *event);
/* The task ends with what this memory's device has in this stream. */
void gpu_task_use(struct gpu_worker *worker, const struct gpu_memory *memory,
		  enum gpu_stream stream);
void gpu_memory_event(struct gpu_worker *worker, const struct gpu_event *event);
void gpu_memory_worker_died(struct gpu_worker *worker);
/* Whether the worker has streams that wait for a trainer: the driver may make other calls wait for them. */
bool gpu_session_any_waits(const struct gpu_worker *worker);
void gpu_session_event(struct gpu_worker *worker, const struct gpu_event *event);
void gpu_session_poll(struct gpu_worker *worker);
void gpu_session_free_all(struct gpu_worker *worker);
