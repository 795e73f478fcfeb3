/*
 * Memory of devices on the line. A round whose requests are on devices begins to move when all of their memory is
 * imported and all of their streams have reached the submission; its parts then pass through staging:
 *
 *	down (device to staging)  ->  gather ... scatter  ->  up (staging to device)
 *
 * so that the steps between know memory of the host alone. Private to agent/; control thread.
 */
#pragma once

#include "agent/round/part.h"

struct agent_device {
	struct agent_job *job;
	struct gpu_worker *worker;
	bool is_charged;	       /* for the worker, until that is closed */
	struct gpu_session **sessions; /* by local number; NULL: not handed over yet */
	struct list waiting;	       /* rounds that wait for memory, streams or the plan */
	/* Which devices reduce among themselves: asked when all ranks here have first given memory of different ones. */
	bool planned;
	uint8_t (*devices)[DEVICE_UUID_LEN]; /* by local number: what was asked about */
	unsigned n_groups;
};

enum { DEVICE_E_NONE, DEVICE_E_WAIT };

/* -- Rounds ------------------------------------------------------------------------------------------------------- */

/* Whether any request of a complete round is on a device. */
bool agent_round_concerns_device(const struct agent_round *round);
/*
 * Whether such a round may begin to move. Returns 0; DEVICE_E_WAIT, and the tensor is advanced again when something has
 * come; or -errno with words.
 */
int agent_device_ready(struct agent_round *round, struct failure *failure);
/* What the parts of such a round, of so many bytes, are to be at most. It is ready. */
uint32_t agent_device_part_bytes(const struct agent_round *round, uint64_t bytes);
/* Who is waited for, in words; "" when nobody is. */
void agent_device_waiting_for(const struct agent_round *round, char *text, size_t size);

/* -- Parts -------------------------------------------------------------------------------------------------------- */

/*
 * Gets staging for what a part has on devices here, and with inputs the inputs into it; then calls then(), at once where
 * nothing of the part is on a device. is_long: the staging is kept until another node has answered, if there is enough;
 * part->device.lease.is_long says whether. A part that cannot is finished in the place of then().
 */
void agent_device_down(struct agent_part *part, bool inputs, bool is_long,
		       void (*then)(struct agent_part *part));
/* Copies the part's result to the devices that it is for, then finishes the part. */
void agent_device_up(struct agent_part *part);
/* Gives the staging back. Harmless without. */
void agent_device_give(struct agent_part *part);
/* Its staging is more than there is: ends it. */
void agent_device_too_large(struct agent_part *part, uint64_t len);
/* Whether a local rank's input counts, or is in that of its group. */
bool agent_device_contributes(const struct agent_part *part, uint32_t local);
/* Whether a local rank has its output on a device. */
bool agent_device_has_output(const struct agent_part *part, uint32_t local);

/* -- Between a device and a server, without the host: direct.c ------------------------------------------------------ */

/* Returns 0; or DEVICE_E_WAIT until it is known whether its devices have staging that RDMA devices know. */
int agent_direct_ready(struct agent_round *round);
/* Whether part->device.direct is its staging, as all that it has here is on devices that bring it to one, and it goes by RDMA to another node. */
bool agent_direct_take(struct agent_part *part);
/* Whether it may still go so. */
bool agent_direct_goes(const struct agent_part *part);
/*
 * Brings what is in part->device.direct, which is given back, to memory of the host: to part->block, or to staging that may be held,
 * at part->result; then calls then(). A part that cannot, or whose round has failed, is finished in the place of then().
 */
void agent_direct_spill(struct agent_part *part, void (*then)(struct agent_part *part));
/* For people: the way of the job's bytes between devices and servers; "" without devices. */
void agent_direct_describe(const struct agent_job *job, char *text, size_t size);

/* -- Jobs --------------------------------------------------------------------------------------------------------- */

/* The job is over: its worker ends when nothing of it is under way. */
void agent_device_close(struct agent_job *job);
void agent_device_free(struct agent_job *job);
