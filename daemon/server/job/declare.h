/*
 * At the home of a job tensors get their keys. Control thread only.
 */
#pragma once

#include "base/list.h"
#include "base/map.h"

struct delivery;
struct job;

/* At the home: tensors that nodes have declared: declare.c. */
struct names {
	struct map declared, named; /* struct declared by name, those that have one by key */
	struct list declaring, declarations; /* under way; all */
	size_t n_declared;
	uint64_t next_key, next_start;
};

void declare_call(struct job *job, struct delivery *delivery);
/* For the sweep: one that is under way, when nodes may have left and time have passed; the job is over: the same, and any. */
void declare_visit(struct job *job, struct list *link, uint64_t now_ns);
void declare_end(struct job *job, struct list *link);
void declaration_end(struct job *job, struct list *link);
/* Name of a tensor declared here, or NULL. */
const char *declare_name_of(const struct job *job, uint64_t key);
