/*
 * At the home of a job tensors get their keys: declare.c; and lose them: forget.c. Control thread only.
 */
#pragma once

#include "base/list.h"
#include "base/loop/loop.h"
#include "base/map.h"
#include "proto/types.h"

struct declaring;
struct delivery;
struct forgetting;
struct job;

struct declared {
	struct list link;	/* in names.declarations */
	struct map_entry entry; /* by name */
	struct map_entry named; /* by key, once it has one: is_named */
	bool is_named;
	char *name;
	unsigned dtype;
	uint64_t elements;
	char shape[TENSOR_SHAPE_MAX + 1]; /* empty: no node has said one */
	uint32_t rank;			  /* who said so first */
	uint64_t key, start;		  /* 0 until every node has said so */
	struct declaring *declaring;	  /* until then; or NULL */
	struct forgetting *
		forgetting; /* while some nodes have said that no rank of theirs uses it; or NULL */
};

/* At the home: tensors that nodes have declared. */
struct names {
	struct map declared, named; /* struct declared by name, those that have one by key */
	bool some_unnamed;	    /* there was no memory for some among the latter */
	struct list declaring, declarations; /* under way; all */
	size_t n_declared;
	uint64_t next_key, next_start;
	struct list forgetting;	       /* struct forgetting */
	size_t n_forgetting, n_to_ask; /* of which nodes that have attached are yet to hear: */
	struct chore asking;
	struct list
		early; /* deliveries: asked of a fresh home before all nodes have told it their tensors */
	bool is_notified;      /* all have */
	struct chore going_on; /* then: takes what has waited, */
	bool goes_on;	       /* just now */
};

void declare_call(struct job *job, struct delivery *delivery);
/* For the sweep: one that is under way, when nodes may have left and time have passed; the job is over: the same, and any. */
void declare_visit(struct job *job, struct list *link, uint64_t now_ns);
void declare_end(struct job *job, struct list *link);
void declaration_end(struct job *job, struct list *link);
/* Name of a tensor declared here, or NULL. */
const char *declare_name_of(const struct job *job, uint64_t key);

/* For forget.c. */
/* The tensor that has this key, or NULL. */
struct declared *declared_of(const struct job *job, uint64_t key);
void declared_remove(struct job *job, struct declared *declared);
/* It has a key: answers a DECLARE. */
void declare_answer(const struct declared *declared, struct delivery *delivery);
