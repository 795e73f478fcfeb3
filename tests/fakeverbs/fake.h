/*
 * A double of RDMA: the part of libibverbs and librdmacm that daemon/transport/ uses, with devices that move memory of this
 * process or of several, and the machine's list of them. A program that links it finds it as libibverbs.so.1 and
 * librdmacm.so.1. It keeps to the rules that real ones have: completions come later, by a thread of its own; a message needs a
 * receive that is posted, a key its memory, its protection domain and its rights; a queue that runs over, or an object that
 * goes before those made of it, ends the program with words. Times, loss and order on a wire are not there: what it
 * proves is how our end behaves, under sanitizers and with every failure, not how a device does. That is scripts/vm --rdma.
 *
 * Tests change it by the functions here, at any time and from any thread. Programs that know nothing of it have it by
 * LD_PRELOAD; with FAKE_FABRIC, any text, the devices of all processes that have the same are joined; with FAKE_FAIL,
 * "CALL:ERRNO", a call fails whenever it is made, with FAKE_FAIL_WORK, "STATUS:NTH", that work request. FAKE_FAIL_WORK_FILE is the
 * path of a file that holds the same: it counts from when it is there, which ends with it. In old/ is one of an rdma-core before
 * version 34, which has no ibv_reg_dmabuf_mr().
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define FAKE_DEVICES 2 /* fake0 and fake1, one port each */

/* The machine. To be set before there is a transport; what is not said is 0. */
struct fake_machine {
	bool has_none;		     /* no device */
	bool has_no_windows;	     /* of type 2B */
	bool has_odp;		     /* paging on demand */
	unsigned ipv6;		     /* devices whose addresses are of IPv6, as bits */
	bool is_infiniband;	     /* ports, and their GIDs, which are no addresses */
	bool is_down;		     /* ports */
	unsigned mtus[FAKE_DEVICES]; /* enum ibv_mtu of each port; 0: 4096 bytes */
	uint64_t memlock;	     /* bytes that may be pinned; 0: all */
};
void fake_machine_set(const struct fake_machine *machine);

/*
 * A call of libibverbs or librdmacm, by its name, fails with this errno: from the nth from now on (1: the next), so many times.
 * "ibv_poll_cq fake0" is that call on one device; with errno 0 the call finds nothing, though completions be there.
 */
void fake_fail(const char *call, int error, unsigned nth, unsigned times);
/* How often it was called, whether it failed or not. */
unsigned fake_n_calls(const char *call);

/*
 * ibv_reg_mr or ibv_dereg_mr waits before it does anything, from now on, for regions of so many bytes at least; with NULL, who
 * waits goes on.
 */
void fake_hold(const char *call, uint64_t least);
/* Threads that wait there. */
unsigned fake_n_held(void);

enum fake_wire {
	FAKE_WIRE_WHOLE,
	FAKE_WIRE_CUT,	  /* nothing arrives: the retries of what is posted are exceeded at once */
	FAKE_WIRE_STILL,  /* nothing moves, and nobody says so */
	FAKE_WIRE_NARROW, /* packets of more than 1024 bytes do not pass */
	FAKE_WIRE_DEAF,	  /* data moves; requests to connect are never answered */
};
void fake_wire_set(enum fake_wire wire);
/* The nth work request from now on (1: the next) that a device takes up ends with this status (enum ibv_wc_status). */
void fake_fail_work(unsigned status, unsigned nth);

/* What queue pairs and connections were last asked for. */
struct fake_asked {
	unsigned service_level, traffic_class, gid_index, path_mtu, timeout, retries, tos;
	bool is_global;
};
struct fake_asked fake_asked(void);
/*
 * Work requests that devices have taken up, posts that they came by (a post rings the doorbell once), how often completion
 * events were asked for, and came.
 */
struct fake_work {
	uint64_t works, posts, notifies, wake_ups;
};
struct fake_work fake_work(void);
/* What is left of what was made: 0 when all is freed. */
unsigned fake_n_objects(void);
