/*
 * The inside of libbps_client. One struct bps_client is one session with the daemon; tensors, memory and requests
 * point back to it and keep it in memory (refs), also after bps_client_close().
 *
 * Threads: the library has none. client->mutex guards everything below it in the struct and is never held while
 * blocking. A thread that must wait calls client_turn() in a loop around its condition: the first to come is the
 * leader and sleeps in poll() on the socket and the trainer's eventfd, the others sleep on client->turn.over and are
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

#include "proto/c.h"

#include "bps.h"
#include "proto/allowance.h"
#include "proto/shm.h"
#include <pthread.h>
#include <sys/queue.h>

#define _public_ __attribute__((__visibility__("default")))

#define CLIENT_PROTOCOL	    1 /* versions of control.proto that this library speaks */
#define CLIENT_PROTOCOL_MIN 1
#define CLIENT_NAME_BUCKETS 512 /* of the tensors' hash table; deepest model seen: 1500 tensors */

/* How long the daemon may take to answer or to read what other ranks have no part in; then it is not to be trusted. */
#define CLIENT_ANSWER_NS (30 * INT64_C(1000000000))
#define CLIENT_FOREVER	 INT64_MAX /* as a deadline */
#define CLIENT_NAPS_LOOK 64	   /* naps for one look at the socket that nothing calls for */
#define CLIENT_FULL_LOOK 64 /* submissions in vain, while nothing ends, for one such look, too */
#define CLIENT_NAP_NS	 (10 * INT64_C(1000000)) /* a loss of the daemon is seen later by so much */
#define NO_SLOT		 UINT32_MAX

/* How far the session with the daemon has come, and so what may be said in it. */
enum session_state {
	SESSION_LOST,	   /* nothing: there is no daemon */
	SESSION_GREETING,  /* Hello; its answer is awaited */
	SESSION_OPEN,	   /* Share, Join, Resume; the answer to Resume is awaited */
	SESSION_DECLARING, /* Declare; those of before are on their way */
	SESSION_READY,	   /* all, and entries */
};

/* One unanswered request on the control channel; embedded in who waits for it. */
struct client_call {
	TAILQ_ENTRY(client_call) link;
	bool pending;	    /* in client->calls.list */
	uint64_t id;	    /* 0: not sent, or sent to a daemon that is gone */
	int expects;	    /* body of a good answer */
	int64_t timeout_ns; /* for the answer, since it was sent; 0: CLIENT_ANSWER_NS */
	int64_t deadline_ns;
	bool done;
	int status;
	char text[ERROR_TEXT_MAX + 1];
	/* Set before the call, or NULL; runs (locked) once when it is done, also by the loss of the daemon. */
	void (*answered)(struct bps_client *client, struct client_call *call);
	/* What the answer said, by kind of call; zero if it failed. */
	struct {
		uint32_t version;
		uint64_t features;
		uint64_t daemon;
		uint64_t resume_timeout_ms;
		uint64_t shm_len;
		uint64_t job;
		uint32_t n_servers;
		int ledger; /* -1, or owned by `answered` */
		uint32_t membership, rank, size, local_rank, local_size, node, n_nodes;
		bool has_terms; /* and what they are, for a newcomer */
		uint32_t min_servers, min_ranks, max_ranks, gpu_reduce;
		uint64_t gpu_roots;
		int64_t request_timeout_ms;
		uint64_t key;
		uint32_t part_bytes;	   /* of terms or of a tensor */
		struct bps_status *status; /* set after it is sent: to be filled in */
	} answer;
};

/* A packet that did not fit into the socket yet. */
struct client_packet {
	TAILQ_ENTRY(client_packet) link;
	void *data;
	size_t len;
	int fd; /* owned, or -1 */
};

struct cuda_device;
struct cuda_flags;
struct cuda_memory;
struct cuda_state;
struct cuda_use;

/*
 * Memory that the daemon maps too: what bps_memory_alloc() gives, each arena of the staging areas, and each allocation on
 * a device that was exported (then data is an address there).
 */
struct bps_memory {
	struct bps_client *client; /* counted, if it is the caller's */
	char *data;
	size_t len;
	bool ours;		       /* mapped by the library */
	int fd;			       /* to share it again; owned */
	LIST_ENTRY(bps_memory) mapped; /* if it is ours; guarded by client_fork_lock() */
	struct cuda_memory *cuda;      /* NULL: of the host; owned */
	/* Guarded by the client's mutex. */
	TAILQ_ENTRY(bps_memory) link; /* in client->memory.shared */
	struct client_call share;
	bool taken;	  /* some daemon had it */
	uint32_t number;  /* the daemon's name for it */
	unsigned n_users; /* requests that are under way */
	bool released;	  /* goes with its last user */
};

/* A piece of the staging area: free and in its arena's list, or owned by a request. */
struct staging_range {
	TAILQ_ENTRY(staging_range) link;
	struct staging_arena *arena;
	uint64_t offset, len; /* multiples of STAGING_ALIGN */
};

TAILQ_HEAD(staging_ranges, staging_range);

struct staging_arena {
	TAILQ_ENTRY(staging_arena) link;
	struct staging *staging; /* NULL: goes when it is empty */
	struct bps_memory *memory;
	struct staging_ranges free; /* by offset, never adjacent */
	uint64_t used;
};

/* Of host memory, or of a device's. */
struct staging {
	struct cuda_device *device; /* or NULL */
	uint64_t arena_min;
	TAILQ_HEAD(, staging_arena) arenas;
	uint64_t used, capacity;
	uint64_t peak;	    /* most in use since it was last empty */
	uint64_t last_peak; /* the same for the time before */
	bool growing;	    /* a thread waits for the daemon to map a new arena */
};

enum job_state {
	JOB_NONE,
	JOB_JOINING,
	JOB_JOINED,
	JOB_LEAVING,
	JOB_FAILED, /* over, and not yet left */
};

struct job {
	enum job_state state;
	uint32_t run; /* counts joins: a tensor of another run is void */
	uint64_t number;
	uint32_t rank, size, local_rank, local_size, node;
	int status; /* why it failed */
	char text[ERROR_TEXT_MAX + 1];
	struct client_call join; /* or Resume */
	struct client_call leave;
	const char *error; /* while the client is ended because of one: Leave says it */
	struct client_call regroup;
	uint32_t membership; /* in which rank and size are counted; 0: the job is not elastic */
	int ledger;	     /* or -1: the job ends with the daemon's process */
	bool resumed;	     /* another process than the one that it began with goes on with it */
	bool cuda; /* some memory on a device was handed over: it ends with the daemon's process */
	/* As it was joined; the pointers lead to what follows. */
	struct bps_join_params params;
	char name[JOB_NAME_MAX + 1];
	char secret[JOB_SECRET_MAX];
};

struct bps_tensor {
	/* What each operation needs is one line of the cache: there may be thousands of tensors. */
	struct bps_client *client _cache_aligned_; /* counted */
	uint64_t elements;			   /* or ELEMENTS_VARIABLE */
	uint32_t number;
	uint32_t run;
	uint8_t dtype;
	/* Guarded by the client's mutex. */
	bool refused;	 /* by the daemon: declare says why */
	unsigned refs;	 /* the caller's, each posted request's, and one while it is in the table */
	uint64_t rounds; /* submitted so far */
	uint64_t ended;	 /* the last round that has ended; ones before it may be under way */
	uint64_t failed; /* bit n: round ended - n failed */
	const void
		*after; /* the tensor that was submitted after it, to be fetched; it may be gone */

	LIST_ENTRY(bps_tensor) link;
	char *name;
	uint64_t packet;  /* number of the packet that declares it */
	uint64_t settled; /* of SESSION_DECLARING: all rounds up to it had ended */
	struct client_call declare;
};
static_assert(offsetof(struct bps_tensor, link) == CACHE_LINE, "one line of the cache");

/*
 * A request is born in bps_submit() as NEW, is the daemon's while POSTED, has ENDED once its slot says so (the slot is
 * free again then), and is COMPLETE when a staged result has been copied back. One thread copies, in COPYING.
 */
enum request_state {
	REQUEST_NEW,
	REQUEST_POSTED,
	REQUEST_ENDED,
	REQUEST_COPYING,
	REQUEST_COMPLETE,
};

struct bps_request {
	struct bps_client *client _cache_aligned_; /* by client->requests.n */
	TAILQ_ENTRY(bps_request) link;		   /* in client->requests.posted, ended or spare */
	/* Guarded by the client's mutex. */
	struct bps_tensor *tensor; /* counted; while it is posted */
	struct cuda_use *cuda; /* owned; NULL: in host memory, or nothing of the device's is left */
	uint64_t round;	       /* of its tensor */
	uint32_t run;	       /* of its tensor */
	uint32_t slot;
	int status;
	uint8_t state; /* enum request_state */
	bool orphan;   /* released by the caller: nobody copies, the library frees it at its end */
	bool cancelled;
	bool counted; /* the daemon says how many contributions are in the result */

	/* What it holds until it has ended; ranges with a staged result until it is complete. */
	struct bps_memory *input_memory, *output_memory;
	struct staging_range *input_range, *output_range; /* in place: no input_range */
	void *output; /* the caller's, when the result is staged */
	size_t output_len;
	size_t row_len;	 /* 0: another operation than PUSH_PULL_ROWS */
	uint64_t n_rows; /* or contributions */

	struct bps_outcome outcome; /* once it has ended */
	char *text;		    /* NULL where there is none */
	struct staging_range *counts_range;
	uint64_t ticket;

	struct shm_entry entry _cache_aligned_; /* but for slot and ticket */
	/* PUSH_PULL_ROWS, else NULL: the same as above for the numbers of rows. */
	struct bps_memory *input_rows_memory, *output_rows_memory;
	struct staging_range *input_rows_range, *output_rows_range;
	int64_t *output_rows;
};
static_assert(offsetof(struct bps_request, input_memory) == CACHE_LINE &&
		      offsetof(struct bps_request, outcome) == 2 * CACHE_LINE &&
		      offsetof(struct bps_request, entry) == 3 * CACHE_LINE,
	      "what most requests need is whole lines of the cache");

TAILQ_HEAD(request_list, bps_request);

struct session {
	enum session_state state;
	uint64_t daemon; /* random number of its process */
	struct client_call hello;
	/* Before SESSION_READY: by when the next daemon has to be there, and by when the state has to change. */
	int64_t give_up_ns, deadline_ns;
	int64_t retry_ns; /* SESSION_LOST: the next try to connect */
	int error;	  /* of the last try */
	uint64_t
		declared; /* SESSION_DECLARING: number of the last packet that declares what was declared before */
};

/* What bps_client_notice() tells once. */
enum notice {
	NOTICE_CUDA_HOST,
	NOTICE_CUDA_STAGED,
	NOTICE_MAX_,
};

/* Who waits for the daemon: one thread leads and hears it for all, the others wait for its turn to be over. */
struct client_turn {
	pthread_cond_t over; /* CLOCK_MONOTONIC */
	bool leading;	     /* a thread is the leader, and may sleep */
	unsigned n_naps;
	unsigned n_full; /* submissions in a row that found no slot free, while nothing ended */
	bool napped; /* the leader slept on trainer_armed in vain: the next sleep hears the socket, too */
	unsigned n_waiting;	    /* threads on `over` */
	bool fd_used;		    /* bps_client_fd() was called: keep the trainer armed */
	struct allowance allowance; /* for spinning */
};

/* What is asked of the daemon over the socket. */
struct client_calls {
	uint64_t next;
	TAILQ_HEAD(, client_call) list;
	TAILQ_HEAD(, client_packet) outbox;
	uint64_t n_packets, n_packets_sent;
	struct client_call asked; /* Status */
};

struct client_memory {
	uint32_t next;
	TAILQ_HEAD(, bps_memory) shared; /* all, the staging area's too */
	struct bps_memory **by_address;	 /* of the caller */
	size_t n, room;
	struct staging staging;
};

/* Entries and slots of the session. */
struct client_ring {
	uint64_t tail;	    /* entries ever posted; the ring's copy is never read */
	uint64_t harvested; /* slots seen done */
	uint64_t seen;	    /* completions whose order was looked at */
	bool ordered;	    /* the daemon says it, and what is done in brief */
	uint64_t next_ticket;
	uint32_t n_slots_free;
	uint32_t slots_free[SHM_SLOTS];		/* a stack */
	struct bps_request *of_slot[SHM_SLOTS]; /* under way; else NULL */
};

struct client_requests {
	struct request_list spare; /* given back, for the next: those last used first */
	unsigned n_spare;
	size_t n; /* the caller's and orphans; while there are any, one of the client's refs is theirs */
	struct bps_tensor *submitted; /* the last */
	struct request_list posted, ended;
	size_t n_posted;
};

struct bps_client {
	/* Fixed while it is open. */
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
	struct client_turn turn;

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
	uint32_t next_tensor;
	LIST_HEAD(, bps_tensor) tensors[CLIENT_NAME_BUCKETS];

	struct client_memory memory;
	struct cuda_state *cuda; /* NULL: no memory on a device has come so far */
	char *notices[NOTICE_MAX_];
	bool noticed[NOTICE_MAX_]; /* told */

	struct client_ring ring;
	struct client_requests requests;
};

/* -- error.c: any thread ----------------------------------------------------------------------------------------- */

/* Remembers why for bps_error(), and returns error. */
int error_set(int error, const char *format, ...) _printf_(2, 3);

/*
 * Copies a structure that the caller filled and that starts with its size, which may be that of an older or a newer
 * header: what he does not know is 0, what we do not know must be. Returns 0 or -EINVAL.
 */
int error_copy_params(void *to, size_t to_size, const void *from, const char *name);

/* -- environment.c ----------------------------------------------------------------------------------------------- */

/* How long to wait for a lost daemon: as given, if that is not 0, else as the environment says. Negative: not at all. */
int environment_restart_timeout(int64_t given_ms, int64_t *ret_timeout_ms);
/* How long a wait for a request looks before it sleeps. */
int environment_spin(int64_t *ret_spin_ns);
/* BPS_CUDA_BLOCKING=1: streams do not wait, the host does. BPS_CUDA=host: memory on devices is copied through the host's. */
int environment_cuda(bool *ret_blocking, bool *ret_host);

/* -- client.c ---------------------------------------------------------------------------------------------------- */

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

/* The client's own epoll. 0 or a negative errno with the text set. */
int client_watch(struct bps_client *client, int fd);

/* What bps_client_notice() is to tell, if it is the first of its kind. (locked) */
void client_notice(struct bps_client *client, enum notice which, const char *format, ...)
	_printf_(3, 4);

/* -- turn.c (locked) --------------------------------------------------------------------------------------------- */

int64_t client_now_ns(void);
int64_t client_deadline_ns(int64_t timeout_ms); /* negative: CLIENT_FOREVER */

/*
 * Whether done(request) comes true while the thread looks, at most client->spin_ns long; between looks it gives its core to
 * whoever wants it. Asks no more often than it pays. (locked, may wait)
 */
bool client_spin(struct bps_client *client, struct bps_request *request,
		 bool (*done)(struct bps_request *request), int64_t deadline_ns);
/* Sleeps until something may have changed, at most until the deadline. (locked, may wait) */
void client_turn(struct bps_client *client, int64_t deadline_ns);
/* The same for who waits for a request alone: not until any of thousands has ended, where the daemon knows the difference. */
void client_turn_for(struct bps_client *client, const struct bps_request *request,
		     int64_t deadline_ns);
/* The same for what another thread of this process does, never the daemon: until client_wake(). */
void client_follow(struct bps_client *client, int64_t deadline_ns);

/* Handles what has come, without waiting. True when something has changed that somebody may wait for. */
bool client_progress(struct bps_client *client);
/* The same for what can be seen without asking the system: requests that are complete. */
bool client_glance(struct bps_client *client);
/* What was seen otherwise: who polls bps_client_fd() is to hear of it, as nothing else tells once it has been seen. */
void client_tell(struct bps_client *client);

/* Wakes every thread that waits, the leader too: call it after a change made outside client_turn(). */
void client_wake(struct bps_client *client);

/* The daemon is lost for good or not to be trusted: the sticky state. Ends all requests and calls. */
void client_fail(struct bps_client *client, const char *format, ...) _printf_(2, 3);

/* Returns the sticky failure, with its text set, or 0. */
int client_failed(const struct bps_client *client);

/* How the daemon is to wake us; set before the last look at what it may have done. */
void client_arm(struct bps_client *client, enum shm_armed how);

/* Wakes a leader who sleeps on the word that says so. False: there is none, or the daemon has just woken him. */
bool client_rouse(struct bps_client *client);

/* -- session.c (locked) --------------------------------------------------------------------------------------------- */

/* Connects and greets. timeout_ms: while nobody listens. Blocks; nobody else has the client yet. */
int session_open(struct bps_client *client, int64_t timeout_ms);
/* The daemon's end of the socket is closed: what it had completed is harvested, then the next daemon is sought. */
void session_lost(struct bps_client *client);
/* Resume was answered; 0: as a rank of the job again. */
void session_resumed(struct bps_client *client);
/* One step towards SESSION_READY, if one is possible now. True when it was taken. */
bool session_advance(struct bps_client *client);
/* When the next step is due though nothing has come. */
int64_t session_due_ns(const struct bps_client *client);
/* Gives back what is the session's. */
void session_drop(struct bps_client *client);

/* -- call.c (locked): the only file that knows protobuf ---------------------------------------------------------- */

/*
 * Each sends one request, or queues it when the socket is full, and puts call (NULL: nobody wants the answer) among
 * those that wait for an answer. Where the session is not as far as that yet, nothing is sent: session.c does it later.
 * 0, -ENOMEM, or the sticky failure. call_join(), call_resume() and call_leave() are about client->job.
 */
int call_hello(struct bps_client *client, struct client_call *call);
int call_join(struct bps_client *client);
int call_resume(struct bps_client *client);
int call_leave(struct bps_client *client);
int call_regroup(struct bps_client *client);
int call_share(struct bps_client *client, struct bps_memory *memory);
int call_status(struct bps_client *client, struct bps_status *ret);
int call_unshare(struct bps_client *client, struct client_call *call, uint32_t number);
int call_declare(struct bps_client *client, struct client_call *call,
		 const struct bps_tensor *tensor);
int call_cancel(struct bps_client *client, const struct bps_request *request);

/*
 * Waits for the answer; without one within the call's timeout, or until limit_ns, the daemon is not to be trusted. Time
 * without a daemon does not count for the timeout. Returns its status. (locked, may wait)
 */
int call_wait(struct bps_client *client, struct client_call *call, int64_t limit_ns);

/* Waits until the packet of that number has left. 0 or the sticky failure. (locked, may wait) */
int call_flush(struct bps_client *client, uint64_t packet);

void call_forget(struct bps_client *client, struct client_call *call);
void call_finish(struct bps_client *client, struct client_call *call, int status, const char *text);
/* The daemon is gone: what was sent is unsent, what is queued is dropped. Unanswered calls stay so. */
void call_unsend_all(struct bps_client *client);

/* Sends what is queued; receives and handles what has come. True when something changed. */
void call_send_queued(struct bps_client *client);
bool call_receive(struct bps_client *client);

/* For the handshake: -EAGAIN while there is none, else the status of call; three descriptors if it is 0. */
int call_receive_welcome(struct bps_client *client, struct client_call *call, int fds[3]);

/* -- job.c (locked) ---------------------------------------------------------------------------------------------- */

/* The daemon says that a run of a job is over. */
void job_failed(struct bps_client *client, uint64_t number, int status, const char *text);
/* How a request ended is told to the caller: his rank and size are what it says. */
void job_see(struct bps_client *client, const struct bps_request *request);
/* The next daemon does not go on with it: ends its requests too. */
void job_discontinue(struct bps_client *client, int status, const char *text);
/* The daemon is gone: ends what has no use for the next one. False when the job cannot go on without this one. */
bool job_survives(struct bps_client *client);
/* A rank of a job, which the next daemon has to resume. */
bool job_is_held(const struct bps_client *client);
/* Leaves in good order; ends all requests. (locked, may wait) */
int job_leave(struct bps_client *client, int64_t deadline_ns);
/* 0 when operations may be submitted, else -ENOTCONN with the text set. */
int job_check(const struct bps_client *client);

/* -- tensor.c (locked) ------------------------------------------------------------------------------------------- */

int tensor_get(struct bps_client *client, const char *name, unsigned dtype, uint64_t elements,
	       struct bps_tensor **ret_tensor); /* (locked, may wait) */
void tensor_put(struct bps_tensor *tensor);
void tensor_drop_all(struct bps_client *client);
/* A round of it has ended. */
void tensor_ended(struct bps_tensor *tensor, uint64_t round, bool failed);
/* What Declare says of the rounds up to tensor->settled. */
uint64_t tensor_failed(const struct bps_tensor *tensor);
/* Declares all again, at another daemon. 0 or a negative errno. */
int tensor_declare_all(struct bps_client *client);
/* The same in a new run of the job: no round was ever submitted. */
int tensor_declare_anew(struct bps_client *client);
/* 0 when operations on it may be submitted, else a negative errno with the text set. */
int tensor_check(const struct bps_tensor *tensor);

/* -- memory.c (locked) ------------------------------------------------------------------------------------------- */

/* Gives it to the daemon under a new number, and waits: the daemon may refuse. (locked, may wait) */
int memory_share(struct bps_memory *memory);
/* Makes memory and gives it to the daemon. (locked, may wait) */
int memory_new(struct bps_client *client, size_t len, struct bps_memory **ret_memory);
struct bps_memory *memory_free(struct bps_memory *memory);
/* In a child of fork(), under client_fork_lock(). */
void memory_forked(void);
/* The caller's memory that holds len bytes at data, or NULL. */
struct bps_memory *memory_find(struct bps_client *client, const void *data, size_t len);
void memory_use(struct bps_memory *memory);
void memory_unuse(struct bps_memory *memory);

/* -- staging.c (locked) ------------------------------------------------------------------------------------------ */

#define STAGING_ALIGN 64

void staging_init(struct staging *staging, uint64_t arena_min, struct cuda_device *device);
int staging_alloc(struct bps_client *client, struct staging *staging, uint64_t len,
		  struct staging_range **ret_range); /* (locked, may wait) */
/* NULL is allowed; returns NULL. */
struct staging_range *staging_free(struct staging_range *range);
/* Nothing is taken from it any more. */
void staging_done(struct staging *staging);
static inline void *staging_data(const struct staging_range *range)
{
	return range->arena->memory->data + range->offset;
}

/* -- request.c (locked) ------------------------------------------------------------------------------------------ */

int request_new(struct bps_client *client, struct bps_request **ret_request);
/* For a request that is not under way: gives back what it holds. The caller has another reference to the client. */
void request_free(struct bps_request *request);
/* Those that are spare. */
void request_free_spare(struct bps_client *client);
/* Gives back the memory of one that was not posted, to look for other. */
void request_release_memory(struct bps_request *request);
/* Whether there is a slot: 0 or -EAGAIN. */
int request_find_slot(struct bps_client *client);
/* Takes one. */
int request_take_slot(struct bps_request *request);
/* Hands it to the daemon, now or when there is one; its entry is complete but for the slot and the ticket. */
void request_post(struct bps_request *request, struct bps_tensor *tensor);
/* Posts all that are under way again, at another daemon, and cancels those that were. 0 or a negative errno. */
int request_post_all(struct bps_client *client);
/*
 * Looks at the slots of all requests under way. last: the daemon is gone, and may have ended one that it did not come to
 * count. True when one has ended.
 */
bool request_harvest(struct bps_client *client, bool last);
/* Ends all that are under way: the daemon is gone, or never used again. */
void request_end_all(struct bps_client *client, int status, const char *text);
/* The same for those of a job that is over, when no daemon is there to do it. */
void request_end_strays(struct bps_client *client);
/* Copies all results that wait for it. (locked, may wait) */
void request_copy_all(struct bps_client *client);
/* Before the mutex: 0 or a negative errno. */
int request_check(const struct bps_request *request);
/* Looks at the slot, if it is under way. */
void request_see(struct bps_request *request);
/* A stream has, or has not, taken care of the result of a request that may have completed meanwhile. */
void request_settle(struct bps_request *request);

/* -- cuda.c, cuda_order.c (locked): what they are to those who know no CUDA ---------------------------------------- */

/* Maps the flags of a session, or NULL with the text set; and what becomes of them: returns NULL. */
struct cuda_flags *flags_map(int fd);
struct cuda_flags *flags_free(struct cuda_flags *flags);
/* False: its stream has not come to the submission. */
bool cuda_is_ready(const struct bps_request *request);
