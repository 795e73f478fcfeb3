/*
 * The home forgets tensors that no rank uses: forget.c. Control thread only.
 */
#pragma once

#include "server/job/job.h"

/* Whether tensors of such a job are ever forgotten. */
bool forget_is_possible(const struct job *job);
/* FORGET, of a node of the job. */
void forget_call(struct job *job, struct delivery *delivery);
/* DECLARE of a tensor that is in doubt: the key, or -ESTALE. */
void forget_ask(struct job *job, const struct declare *declare, struct delivery *delivery);
/* KEEP; NAMED. */
void forget_not(struct job *job, uint64_t key);
void forget_named(struct job *job, uint32_t node, uint64_t last_key);
/* A node has attached, perhaps again; has left. */
void forget_attached(struct job *job, uint32_t node);
void forget_departed(struct job *job);
/* Nobody asks any more. */
void forget_done(struct job *job);
/* For the sweep: a node may have left; the job is over. */
void forget_visit(struct job *job, struct list *link, uint64_t now_ns);
void forget_end(struct job *job, struct list *link);
void forget_end_early(struct job *job, struct list *link);
