/*
 * A door with what is behind it, on one loop, and trainers made by hand: they send packets and post entries as no library
 * would. Jobs have all their ranks here, so nothing needs a server.
 */
#pragma once

#include "base/clock.h"
#include "control/control.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"
#include "proto/shm.h"
#include "test.h"

struct accounts;

struct door {
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct agent *agent;
	struct control *control;
	struct gpu *gpu; /* the test's, which frees it after the door */
	uint64_t features;
	char path[108];
};

/* What a test may want otherwise; 0: plenty. */
struct door_options {
	unsigned max_sessions, max_sessions_per_uid, max_buffers, max_tensors;
	uint64_t session_quota_bytes, hello_timeout_ms, spin_ns;
	unsigned n_threads;
	uint64_t features;			   /* of its trainers */
	struct gpu *(*gpu_new)(struct loop *loop); /* NULL: there is none */
	struct accounts *accounts;		   /* who is charged; NULL: nobody */
};

struct door *door_new(const struct door_options *options);
struct door *door_free(struct door *door);
DEFINE_CLEANUP(struct door *, door_free)

#define DOOR_UNTIL(door, condition)                               \
	do {                                                      \
		while (!(condition))                              \
			ASSERT_OK(loop_turn((door)->loop, 1000)); \
	} while (0)

struct trainer {
	struct door *door;
	int socket, memory, doorbell, wake;
	void *shm;
	uint64_t tail, next_id, next_ticket;
	uint32_t next_slot;
};

/* Connects, and says nothing. */
void trainer_connect(struct trainer *trainer, struct door *door);
/* Connects and says Hello. */
void trainer_open(struct trainer *trainer, struct door *door);
void trainer_close(struct trainer *trainer);
/* Reads the packets that are there. Returns how many. */
unsigned trainer_read_all(const struct trainer *trainer);

/* Sends a request; its id is set here and returned. */
uint64_t trainer_send(struct trainer *trainer, Bps__Control__Request *request, const int *fds,
		      size_t n_fds);
void trainer_send_bytes(struct trainer *trainer, const void *data, size_t len, const int *fds,
			size_t n_fds);
/* Waits for the next packet; NULL when the daemon has hung up. To be released with unpack_free(). */
Bps__Control__Message *trainer_receive(struct trainer *trainer);
/* Whether a packet is there without waiting. */
bool trainer_readable(struct trainer *trainer);
/* Turns the loop until the daemon hangs up; what it says before is thrown away. */
void trainer_expect_end(struct trainer *trainer);
/* Waits for the answer to id, and returns its status; text (if not NULL, of ERROR_TEXT_MAX + 1) gets its words. */
int trainer_answer(struct trainer *trainer, uint64_t id, char *text);

/* Requests, each with its answer awaited. Return its status. */
int trainer_join(struct trainer *trainer, const char *job, uint32_t rank, uint32_t size,
		 char *text);
int trainer_share(struct trainer *trainer, uint32_t number, int fd, uint64_t len, char *text);
int trainer_unshare(struct trainer *trainer, uint32_t number);
int trainer_declare(struct trainer *trainer, uint32_t number, const char *name, unsigned dtype,
		    uint64_t elements, char *text);
int trainer_leave(struct trainer *trainer, char *text);
/* The same, not awaited: returns the id. */
uint64_t trainer_send_join(struct trainer *trainer, const char *job, uint32_t rank, uint32_t size,
			   uint64_t timeout_ms);
uint64_t trainer_send_declare(struct trainer *trainer, uint32_t number, const char *name,
			      unsigned dtype, uint64_t elements);
uint64_t trainer_send_leave(struct trainer *trainer);
uint64_t trainer_send_share(struct trainer *trainer, uint32_t number, int fd, uint64_t len);
uint64_t trainer_send_unshare(struct trainer *trainer, uint32_t number);
uint64_t trainer_send_cancel(struct trainer *trainer, uint32_t slot, uint64_t ticket);
uint64_t trainer_send_blocked(struct trainer *trainer, uint32_t slot, uint64_t ticket);

/* A sealed memfd of len bytes, mapped at *ret_data (munmap() it). */
int memory_new(size_t len, void **ret_data);

/* An entry for a push_pull sum of n float32 from offset 0 to offset 0 of buffers, as round. */
struct shm_entry trainer_entry(uint32_t tensor, uint64_t round, uint32_t input, uint32_t output,
			       uint64_t n);
/* Takes a slot, posts, rings if armed. Returns the slot. */
uint32_t trainer_post(struct trainer *trainer, const struct shm_entry *entry);
/* Posts without touching slot and ticket. */
void trainer_post_raw(struct trainer *trainer, const struct shm_entry *entry);
bool trainer_done(struct trainer *trainer, uint32_t slot);
/* Waits for a slot; its status and words. */
int trainer_wait(struct trainer *trainer, uint32_t slot, char *text);
