/*
 * Jobs that are over, of which nodes may still ask why. Control thread only.
 */
#pragma once

#include "base/error.h"
#include "proto/data.h"

struct server;

/* Jobs that are over and whose reason is still known. */
#define SERVER_OVER 64

struct over {
	uint64_t number; /* 0: unused */
	uint64_t owner
		[2]; /* who says so knows of the job's secret digest; of those that were not here */
	bool moved;  /* goes on with other servers, and may come back */
	struct failure failure;
};

/* Why a job that is not here any more is over, or NULL. */
const struct failure *job_over(const struct server *server, uint64_t number);
/* The same of one that was not here, if who said so is of the job of this owner. */
const struct failure *job_over_heard(const struct server *server, uint64_t number,
				     const uint8_t *secret_digest);
/* A DATA_FAIL_JOB of such a one. */
void job_over_hear(struct server *server, const struct data_header *header,
		   const struct failure *failure);
void job_over_remember(struct server *server, uint64_t number, const struct failure *failure);
/* It has only gone to other servers, and may come back. */
void job_over_moved(struct server *server, uint64_t number);
/* Forgets that; false when it is over for good. */
bool job_over_return(struct server *server, uint64_t number);
