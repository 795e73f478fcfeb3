/* The job that the client is in. (locked): client.h. */
#pragma once

#include "call.h"
#include "order.h"

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
	struct order orders[ORDERS];
	/* As it was joined; the pointers lead to what follows. */
	struct bps_join_params params;
	char name[JOB_NAME_MAX + 1];
	char secret[JOB_SECRET_MAX];
};

/* The daemon says that a run of a job is over. */
void job_has_failed(struct bps_client *client, uint64_t number, int status, const char *text);
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
