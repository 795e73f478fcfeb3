/* A rank of a job on the daemon that $BPS_SOCKET names, on a device. */
#pragma once

#include "check.h"

#include <bps.h>

struct rank {
	struct bps_client *client;
	CUstream stream;
	int device;
};

/* Ranks are spread over the devices in turn. job: its name, of this rule alone. */
void rank_open(struct rank *rank, const char *job, uint32_t number, uint32_t n_ranks,
	       int gpu_reduce);
void rank_close(struct rank *rank);
/* A call of the library's without which the rule has nothing to see. */
#define BPS(call) check_bps(#call, call)
void check_bps(const char *call, int result);

extern const struct rule trainer_times[]; /* ends with an empty name */
