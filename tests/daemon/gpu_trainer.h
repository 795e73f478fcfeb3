/*
 * A trainer with memory on a device, written against the protocol alone: what a daemon is sent here, no library has made
 * nicer. Whatever goes wrong fails the test. One thread; several trainers may be in one process. The driver is the double
 * (tests/fakecuda).
 */
#pragma once

#include "control.pb-c.h"
#include "cu.h"
#include "proto/shm.h"

extern const struct cuda *cu;

struct trainer {
	int socket, memory, doorbell, wake;
	uint64_t features, next_id, next_ticket;
	uint32_t next_slot, next_buffer, rank, size;
	void *shm;
	int device;
	CUcontext context;
	CUuuid uuid;
	CUstream stream;
	CUdeviceptr flags;
};

/* Memory that was shared, or is about to be: on the device, or a memfd. */
struct memory {
	enum memory_kind kind;
	CUdeviceptr ptr;
	CUmemGenericAllocationHandle handle;
	char *data; /* MEMORY_MEMFD */
	uint64_t len;
	uint32_t number;
	int fd;
};

/* An operation as it is submitted; offsets in bytes. */
struct submit {
	uint32_t tensor;
	uint64_t round;
	enum operation operation;
	enum reduction reduction;
	const struct memory *input, *output;
	uint64_t input_offset, output_offset, input_count, output_count;
	uint32_t root;
	int32_t priority;
	uint64_t timeout_ms;
	bool not_ready; /* the stream does not say that the input is there: trainer_ready() does */
};

/* Connects, says Hello, and has a context and a stream on this device (of this process). */
void trainer_open(struct trainer *trainer, const char *socket, int device);
/* Hangs up. */
void trainer_close(struct trainer *trainer);

/* Sends; returns the request's number. */
uint64_t trainer_send(struct trainer *trainer, Bps__Control__Request *request, int fd);
/* The answer to it: its status, with words in *ret_text (448 bytes) unless NULL. Events before it are dropped. */
int trainer_answer(struct trainer *trainer, uint64_t id, char *ret_text);

struct trainer_job {
	const char *name;
	uint32_t rank, size, local_rank, local_size, node, n_nodes;
	bool force_distributed;
	enum gpu_reduce gpu_reduce;
	uint64_t gpu_roots;
	uint32_t part_bytes;
	uint64_t request_timeout_ms;
};
uint64_t trainer_join(struct trainer *trainer, const struct trainer_job *job);
void trainer_declare(struct trainer *trainer, uint32_t number, const char *name, enum dtype dtype,
		     uint64_t elements);
int trainer_leave(struct trainer *trainer);

void memory_new(struct trainer *trainer, struct memory *memory, enum memory_kind kind,
		uint64_t len);
void memory_free(struct memory *memory);
/* Sends Share; the answer comes as trainer_answer(). */
uint64_t trainer_share(struct trainer *trainer, struct memory *memory);
uint64_t trainer_unshare(struct trainer *trainer, const struct memory *memory);
/* memory_new() and Share, which must succeed. */
void trainer_new_memory(struct trainer *trainer, struct memory *memory, enum memory_kind kind,
			uint64_t len);
/* In the trainer's stream, without waiting for it. data must stay until it has come to it. */
void memory_write(struct trainer *trainer, const struct memory *memory, uint64_t offset,
		  const void *data, uint64_t len);
/* Waits for the stream. */
void memory_read(struct trainer *trainer, const struct memory *memory, uint64_t offset, void *data,
		 uint64_t len);

/* Returns the slot. */
uint32_t trainer_submit(struct trainer *trainer, const struct submit *submit);
/* The stream says so once it comes to this. */
void trainer_ready(struct trainer *trainer, uint32_t slot);
/* The stream waits for the result. */
void trainer_wait_stream(struct trainer *trainer, uint32_t slot);
/* Whether the slot says that its request has ended; then its status and its words, and the slot is free. */
bool trainer_ended(struct trainer *trainer, uint32_t slot);
int trainer_wait(struct trainer *trainer, uint32_t slot, char *ret_text);
