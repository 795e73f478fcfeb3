/*
 * The inside of libbps_client. One struct bps_client is one session with the daemon; tensors, memory and requests
 * point back to it and keep it in memory (refs), also after bps_client_close().
 *
 * Threads: the library has none. client->mutex guards everything below it in the struct and is never held while
 * blocking. A thread that must wait calls client_wait() in a loop around its condition: the first to come is the
 * leader and sleeps in poll() on the socket and the trainer's eventfd, the others sleep on client->waiting.over and are
 * woken after each turn of the leader. Functions marked (locked) are called with the mutex held; those marked
 * (locked, may wait) release it meanwhile, so what was checked before must be checked again.
 *
 * A lost daemon: the session, that is the socket, the shared memory and what was sent, is gone with it; the client is
 * not. All that a daemon has to know is kept here (memory, the job, tensors, requests), so session.c can tell the next one:
 * a call that is made meanwhile is not sent but follows from what is kept, when its time comes.
 *
 * Errors: 0 or a negative errno, with error_set() called where the error is born.
 */
#pragma once

#include "call.h"
#include "client/common/error.h"
#include "follow.h"
#include "job.h"
#include "memory.h"
#include "proto/c.h"
#include "request.h"
#include "session.h"
#include "tensor.h"
#include "wait.h"
#include <pthread.h>
#include <sys/queue.h>

#define CLIENT_PROTOCOL	    1 /* versions of control.proto that this library speaks */
#define CLIENT_PROTOCOL_MIN 1
#define CLIENT_NAME_BUCKETS 512 /* of the tensors' hash table; deepest model seen: 1500 tensors */

struct cuda_flags;
struct cuda_state;

/* What bps_client_notice() tells once. */
enum notice {
	NOTICE_CUDA_HOST,
	NOTICE_CUDA_STAGED,
	NOTICE_MAX_,
};

/* What wait.c and call.c find out goes to files that stand above these two: client.c has the table. (locked) */
struct client_ops {
	/* What a poll of the leader does: to the socket, to the session when its time has come, and to requests. */
	void (*send)(struct bps_client *client);
	bool (*receive)(struct bps_client *client);
	bool (*advance)(struct bps_client *client);
	bool (*harvest)(struct bps_client *client, bool last);
	int64_t (*due_ns)(const struct bps_client *client); /* of advance() */
	void (*copy)(struct bps_client *client);	    /* staged results */
	/* client->failure is set. */
	void (*failed)(struct bps_client *client);
	/* What the daemon has said: nothing any more; and its events. */
	void (*lost)(struct bps_client *client);
	void (*job_is_over)(struct bps_client *client, uint64_t number, int status,
			    const char *text);
	void (*unused)(struct bps_client *client, const char *name, uint32_t number);
	void (*begun)(struct bps_client *client, const struct bps_begun *begun, uint64_t first);
	void (*all_follow)(struct bps_client *client, uint64_t turn, int status, const char *text);
};

struct bps_client {
	/* Fixed while it is open. */
	const struct client_ops *ops;
	_Atomic unsigned refs;
	uint32_t generation; /* of the process that opened it; see client_check() */
	LIST_ENTRY(bps_client) link;
	char *path;
	int64_t spin_ns;	    /* 0: waits sleep at once */
	int64_t restart_timeout_ms; /* how long a lost daemon is waited for; negative: not at all */
	int wakeup;		    /* wakes the leader */
	int attention; /* readable when bps_client_dispatch() is due for another reason; for ever once failed */
	int epoll; /* bps_client_fd(): attention, and of the session socket, trainer_event, timer */
	void *frame; /* FRAME_MAX bytes to receive into; under the mutex */

	pthread_mutex_t mutex;
	/* All that follows is guarded by the mutex. */
	struct client_waiting waiting;

	/* The session. Descriptors change under client_fork_lock() too. */
	struct session session;
	int socket;
	int daemon_event;  /* wakes the daemon */
	int trainer_event; /* wakes us */
	int timer;	   /* while the daemon is lost: session_advance() is due */
	void *shm;
	struct cuda_flags *flags; /* shm's, mapped by themselves */

	int failure; /* 0, or -ESHUTDOWN for ever */
	char failure_text[ERROR_TEXT_MAX + 1];
	char farewell[ERROR_TEXT_MAX + 1]; /* the last that the daemon had to say */
	bool wild;			   /* the daemon wrote nonsense into the shared memory */

	struct client_calls calls;
	struct job job;
	struct client_follow follow;
	uint32_t next_tensor;
	LIST_HEAD(, bps_tensor) tensors[CLIENT_NAME_BUCKETS];

	struct client_memory memory;
	struct cuda_state *cuda; /* NULL: no memory on a device has come so far */
	char *notices[NOTICE_MAX_];
	bool noticed[NOTICE_MAX_]; /* told */

	struct client_ring ring;
	struct client_requests requests;
};

/* 0, -EINVAL for NULL, or -EPERM in a child of the process that opened it. Before the mutex is touched. */
int client_check(const struct bps_client *client);

struct bps_client *client_ref(struct bps_client *client);
struct bps_client *client_unref(struct bps_client *client);

void client_lock(struct bps_client *client);
void client_unlock(struct bps_client *client);
static inline void client_unlockp(struct bps_client **client)
{
	if (*client)
		client_unlock(*client);
}
/* Takes the mutex until the end of the block. */
#define CLIENT_LOCKED(client)                                           \
	_cleanup_(client_unlockp) _unused_ struct bps_client *locked_ = \
		(client_lock(client), client)

/* While it is held no child is made that would keep a descriptor which the client does not know yet. Leaf lock. */
void client_fork_lock(void);
void client_fork_unlock(void);
/* Children close what clients that were added have open, and call the hook. 0 or a negative errno. */
int client_fork_guard(void (*hook)(void));
void client_fork_add(struct bps_client *client);
void client_fork_remove(struct bps_client *client);
void client_close_fds(struct bps_client *client);

/* Maps memory of the daemon, which no child has. NULL with errno. */
void *client_map(int fd, size_t len, off_t offset);

/* The client's own epoll. 0 or a negative errno with the text set. */
int client_watch(struct bps_client *client, int fd);

/* What bps_client_notice() is to tell, if it is the first of its kind. (locked) */
void client_notice(struct bps_client *client, enum notice which, const char *format, ...)
	_printf_(3, 4);

/* -- cuda.c, cuda_order.c (locked): what they are to those who know no CUDA ---------------------------------------- */

/* Maps the flags of a session, or NULL with the text set; and what becomes of them: returns NULL. */
struct cuda_flags *flags_map(int fd);
struct cuda_flags *flags_free(struct cuda_flags *flags);
/* False: its stream has not come to the submission. */
bool cuda_is_ready(const struct bps_request *request);
