/*
 * A daemon for tests of the client library: one thread of the test's process that speaks control.proto and proto/shm.h
 * and does what the test tells it to. Its reduction is not one: each byte of an output is a byte of the input plus 1. Of
 * push_pull_rows the result has the rows of the input, as many as there is room for, or n_rows if that is set. Device
 * memory is the double's, of this process; what a descriptor names is mapped, what a handle names the test says.
 * Fields marked (test) are set with FAKE_SET() before what they are about happens, those marked (fake) read by told().
 */
#pragma once

#include "test.h"

#include "proto/shm.h"
#include <bps.h>
#include <pthread.h>

#define FAKE_SESSIONS 8
#define FAKE_BUFFERS  64
#define FAKE_TENSORS  8192
#define FAKE_HELD     8192

struct fake_buffer {
	uint32_t number;
	char *data;
	uint64_t len;
	int seals;
	uint32_t kind; /* of a device: its alias for the host */
};

struct fake_session {
	int socket, daemon_event, trainer_event;
	void *shm;
	uint64_t head;
	struct fake_buffer buffers[FAKE_BUFFERS];
	unsigned n_buffers;
	uint8_t dtypes[FAKE_TENSORS]; /* by number */
	bool joined, ordered;
};

/* What it was told. */
struct fake_told {
	unsigned n_sessions, n_gone, n_joins, n_leaves, n_shares, n_unshares, n_declares, n_cancels,
		n_entries, n_blocked;
	char leave_error[64]; /* of the last Leave; "": in good order */
	uint64_t shared_len;
	struct {
		char job[64], secret[256];
		size_t secret_len;
		uint32_t rank, size, local_rank, local_size, node, n_nodes, min_servers, part_bytes;
		uint64_t timeout_ms, request_timeout_ms;
		bool force_distributed;
	} join;
	char name[256], shape[64]; /* of the last Declare */
	uint64_t elements, declare_id;
	uint32_t cancelled_slot;
	uint32_t blocked_slot; /* of the last Blocked */
	bool blocked_over;
	unsigned n_resumes;
	uint64_t resumed_job, hello_features;
	uint64_t hello_id;		 /* of the last Hello that has no answer; or 0 */
	uint64_t rounds[16], failed[16]; /* of the last Declare, by the tensor's number */
	bool again[16];			 /* likewise: it says how many rounds there were */
	unsigned n_releases, n_keeps;	 /* Release of what is not in use, or is */
	uint64_t release_id;		 /* of the last that has no answer; or 0 */
	unsigned n_follows;		 /* Follow came so often, */
	bool follows, idle;		 /* the last with these */
	uint64_t turn;			 /* and this, */
	uint64_t follow_id;		 /* and, if it has no answer, this */
	struct shm_entry entry;		 /* the last */
	uint64_t counts[64];		 /* of the last entry that had some */
	unsigned n_devices;		 /* Shares of device memory */
	uint32_t device_kind, gpu_reduce;
	uint64_t gpu_roots;
	uint8_t device[DEVICE_UUID_LEN];
	size_t handle_len;
};

struct fake {
	char path[96];
	int listener, stop;
	pthread_t thread;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	struct fake_session *sessions[FAKE_SESSIONS];

	/* (test) What the daemon says. 0 or NULL: what a good one would. */
	uint32_t version;
	uint64_t daemon, features;
	int hello_status, join_status, declare_status, share_status, resume_status, follow_status;
	const char *hello_text, *join_text, *declare_text, *resume_text, *follow_text;
	uint64_t share_quota; /* refuses memory beyond so many bytes */
	int device_status;    /* that Share of device memory is answered with */
	void *device_ipc;     /* what the next CUDA IPC handle stands for */
	bool unshare_mute;    /* says nothing */
	bool join_mute, resume_mute, leave_mute, share_mute, hello_mute; /* says nothing */
	bool ledger;							 /* jobs can be resumed */
	bool hello_garbage; /* answers in no protocol at all */
	bool hang_up;	    /* closes instead of Welcome */
	unsigned hang_ups;  /* so often */
	bool declare_mute;  /* keeps the answers for fake_declared() */
	bool follow_mute;   /* and those for fake_followed() */
	bool unsealed;	    /* shares memory that could shrink under the trainer */
	uint32_t shm_version;
	bool deaf;  /* does not read the socket */
	bool hold;  /* does not complete requests by itself */
	int status; /* that requests end with */
	uint64_t n_rows;
	const char *text;

	/* (fake) Guarded by the mutex. */
	struct fake_told told;
	struct shm_entry held[FAKE_HELD]; /* with `hold`, in the order they came */
	int ledger_fd;
};

struct fake *fake_new(void);
struct fake *fake_free(struct fake *fake);
DEFINE_CLEANUP(struct fake *, fake_free)

/* Waits until *count (a field above) is at least n. */
void fake_await(struct fake *fake, const unsigned *count, unsigned n);
void fake_lock(struct fake *fake);
void fake_unlock(struct fake *fake);
#define FAKE_SET(fake, field, value)     \
	do {                             \
		fake_lock(fake);         \
		(fake)->field = (value); \
		fake_unlock(fake);       \
	} while (0)

/* A copy of what it was told so far, valid until the next. Of the test's main thread. */
const struct fake_told *told(struct fake *fake);
/* How its trainer is to be woken now: enum shm_armed. */
uint32_t fake_armed(struct fake *fake);
/* For which slot, from 1; 0: for any. */
uint32_t fake_awaited(struct fake *fake);
/* Runs the n-th held entry (from 0) and ends it; status 0 runs it. */
void fake_complete(struct fake *fake, unsigned n, int status, const char *text);
/* Ends a slot as only a broken daemon would: state is stored and counted as it is. */
void fake_scribble(struct fake *fake, uint32_t slot, uint32_t state, int status);
/* Says an order of completions that cannot be, and counts n more. */
void fake_scribble_order(struct fake *fake, uint64_t n);
void fake_declared(struct fake *fake, int status, const char *text);
/* Answers the Hello that it said nothing to, and those that come. */
void fake_welcome(struct fake *fake);
/* Asks whether a tensor is used; and answers the Release. */
void fake_unused(struct fake *fake, uint32_t tensor, const char *name);
void fake_released(struct fake *fake, int status);
/* Answers the last Follow; says what other ranks have begun; and that all follow and are idle in the turn, or will not. */
void fake_followed(struct fake *fake, int status, const char *text);
void fake_begun(struct fake *fake, const struct bps_begun *begun, uint64_t first);
void fake_all_follow(struct fake *fake, uint64_t turn, int status, const char *text);
void fake_job_failed(struct fake *fake, uint64_t job, int status, const char *text);
/* So many wake-ups, which lie there until they are read. */
void fake_wake(struct fake *fake, unsigned n);
/* A packet of no protocol. */
void fake_send_garbage(struct fake *fake);
/* Dies: every connection is closed. farewell: said before, or NULL. */
void fake_die(struct fake *fake, const char *farewell);

/* Dies, and is another from now on. */
void fake_restart(struct fake *fake);
/* Nobody finds it; until fake_show(). */
void fake_hide(struct fake *fake);
void fake_show(struct fake *fake);
/* Ends the n-th held entry well, but dies before it counts it. */
void fake_complete_uncounted(struct fake *fake, unsigned n);

/* A client of the fake, joined as rank of size, all on one machine. */
struct bps_client *fake_open(struct fake *fake);
struct bps_client *fake_join(struct fake *fake, uint32_t rank, uint32_t size);
static inline void bps_client_closep(struct bps_client **client)
{
	bps_client_close(*client);
}
static inline void bps_memory_freep(struct bps_memory **memory)
{
	bps_memory_free(*memory);
}
static inline void bps_tensor_freep(struct bps_tensor **tensor)
{
	bps_tensor_free(*tensor);
}
static inline void bps_request_freep(struct bps_request **request)
{
	bps_request_free(*request);
}

/* r is -error and the text has words. */
#define ASSERT_FAILS(x, error, words)                \
	do {                                         \
		ASSERT_EQ(x, -(error));              \
		ASSERT_CONTAINS(bps_error(), words); \
	} while (0)
