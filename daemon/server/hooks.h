/*
 * What files of the server call that stand above them: server.c makes the table, once. The rooms, from above:
 *
 *	membership	nodes of a job: joined, attached, lost, left, regrouped; servers that take over
 *	round		contributions and results: sums, rows, late ones, running sums, what is kept and offered
 *	job		the job: who speaks for its nodes, its tensors, its store of parts and slots, its deadlines
 *	common		what all use: messages, texts, sets, what is charged
 *
 * scripts/layers has this order, and scripts/check-cycles holds it. Control thread.
 */
#pragma once

#include "base/error.h"
#include "base/list.h"

struct job;
struct slot;

/* One of the lists of a job, in the order in which a sweep goes along them. */
struct sweep_stage {
	size_t list;  /* where it is in struct job */
	unsigned why; /* what concerns those that are in it */
	void (*visit)(struct job *job, struct list *link, uint64_t now_ns);
	/* The job is over: it goes from the list. */
	void (*end)(struct job *job, struct list *link);
};

struct server_hooks {
	/* When a lost node of a job is given up; and what follows where that, forming, attaching or regrouping takes too long. */
	uint64_t (*lost_deadline)(const struct job *job);
	void (*lost_expired)(struct job *job, uint64_t now_ns);
	void (*form_is_late)(struct job *job);
	void (*attach_is_late)(struct job *job);
	void (*regroup_is_late)(struct job *job);
	/* Peers of the job are lost. May end it. */
	void (*peers_lost)(struct job *job);
	/* The job is over: joiners are told. Then: its memory goes. */
	void (*job_over)(struct job *job);
	void (*job_freed)(struct job *job);
	/* Whether an elastic job goes on without nodes that left, or those that a slot waits for. */
	bool (*without_departed)(struct job *job);
	bool (*without_missing)(struct job *job, const struct slot *slot);
	/* A slot fails: who else waits for it is told. Then, or otherwise: it goes. */
	void (*slot_failed)(struct slot *slot, int status, const char *text);
	void (*slot_freed)(struct slot *slot);
	/* Contributions that came too late go. */
	void (*carried_freed)(struct job *job, struct list *carried);
	const struct sweep_stage *stages;
	size_t n_stages;
};
