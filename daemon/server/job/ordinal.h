/*
 * Operations that all ranks of a job submit in one order, at its home. Control thread only.
 */
#pragma once

#include "base/order/ordinals.h"
#include "proto/data.h"

struct job;

/* What a node says of an operation that all ranks submit in one order. */
void ordinal_heard(struct job *job, uint32_t node, const struct data_header *header,
		   const void *payload);
