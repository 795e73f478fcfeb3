/*
 * What the daemon and a GPU worker say to each other, over a SOCK_SEQPACKET pair: packets of commands to the worker, one
 * event in a packet back. Both are the same program, so there is no version. Private to gpu/.
 */
#pragma once

#include "gpu/gpu.h"

#define GPU_SOCKET_FD	 3  /* the worker's end */
#define GPU_PACKET_MAX	 64 /* commands of a packet */
#define GPU_DEVICES_MAX	 GPU_RANKS_MAX
#define GPU_SESSIONS_MAX 4096
#define GPU_LANES	 8  /* of a session: streams that do nothing but wait for its flags */
#define GPU_DONE_MAX	 16 /* marks of an event */

enum gpu_op {
	/* Set-up, in this order, on a thread of its own. */
	GPU_OP_STAGING,	    /* beside it: a memfd of len bytes */
	GPU_OP_SESSION,	    /* number; beside it: its shared memory */
	GPU_OP_OPEN,	    /* memory: number, kind, len, device, handle; answered by OPENED */
	GPU_OP_PLAN_DEVICE, /* device: one of the plan that follows */
	GPU_OP_PLAN,	    /* kind: enum gpu_reduce; ticket: bits of roots; answered by PLANNED */
	GPU_OP_CLOSE,	    /* memory: number; answered by CLOSED */
	GPU_OP_ARENA,	    /* number in slot; device, len; answered by ARENA */
	GPU_OP_ARENA_DROP,  /* device: it is not used, and freed */
	/* Streams, at once. memory is the number of one that is open; it also says which device is meant. */
	GPU_OP_WATCH,  /* stream: lane; session, slot, ticket, device; answered by REACHED */
	GPU_OP_DOWN,   /* memory + offset to staging, len; kind: enum gpu_side; slot: arena */
	GPU_OP_UP,     /* staging to memory + offset, len; the same */
	GPU_OP_SPILL,  /* slot: arena of memory's device + offset to staging, len */
	GPU_OP_TELL,   /* session, slot, ticket */
	GPU_OP_MARK,   /* stream; answered by DONE when all before it in the stream is done */
	GPU_OP_MEMBER, /* memory + offset: input; session + staging: output, the same way; of the collective that follows */
	GPU_OP_COLLECTIVE, /* kind: enum gpu_collective; slot: group; len: elements; ticket: dtype | reduction << 8 | scale << 16 */
	/* Leave. */
	GPU_OP_END,
};

enum gpu_side { GPU_AT_HOST, GPU_AT_DEVICE };

struct gpu_command {
	uint32_t op;	 /* enum gpu_op */
	uint32_t stream; /* enum gpu_stream; lane */
	uint32_t memory;
	uint32_t session;
	uint32_t slot;
	uint32_t kind;
	uint64_t ticket; /* or what comes back in the event */
	uint64_t offset;
	uint64_t staging; /* offset */
	uint64_t len;
	uint8_t device[DEVICE_UUID_LEN];
	uint8_t handle[DEVICE_HANDLE_LEN];
};

enum gpu_event_kind {
	GPU_EVENT_READY,  /* first: text says what there is; status: or why nothing is */
	GPU_EVENT_OPENED, /* number: memory; status, text */
	GPU_EVENT_CLOSED, /* number: memory */
	/* text: for each device of the plan '0' + its group, then for each '1' for a root and '0', a space, words */
	GPU_EVENT_PLANNED,
	GPU_EVENT_ARENA,   /* number; beside it: a dma-buf; or status, text */
	GPU_EVENT_REACHED, /* number: session; lane */
	GPU_EVENT_DONE,	   /* number tickets in done, as in MARK */
	GPU_EVENT_FATAL, /* text: it ends; number: not 0 if a trainer's death may have brought it about */
};

struct gpu_event {
	uint32_t kind; /* enum gpu_event_kind */
	uint32_t number;
	uint64_t ticket;
	uint32_t lane;
	int32_t status;
	union {				       /* sent as long as it is */
		char text[ERROR_TEXT_MAX + 1]; /* with the NUL */
		uint64_t done[GPU_DONE_MAX];
	};
};
static_assert(GPU_DONE_MAX * sizeof(uint64_t) < ERROR_TEXT_MAX, "the end of an event is text's");
