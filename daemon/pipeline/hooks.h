/*
 * What files of this folder call that stand above them. Rooms, from above: what trainers ask for (declare.c, submit.c, ordinal.c,
 * expire.c, sweep.c, elastic.c, forget.c, seek.c); rounds and parts (round.c, part.c, push.c, work.c, rows.c, device.c, direct.c,
 * lend.c); servers (home.c, attach.c, setup.c, add.c, move.c, keep.c, had.c, roll.c); the job (job.c, join.c, left.c, regroup.c,
 * report.c, resume.c, seats.c, untold.c); and what these share. pipeline.c makes the table, once. Control thread.
 */
#pragma once

#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct peer;
struct pipeline;
struct pipeline_job;
struct pipeline_member;
struct pipeline_newcomer;
struct pipeline_part;
struct pipeline_request;
struct pipeline_round;
struct pipeline_tensor;

/* A part whose server is lost, or back. */
struct pipeline_part_hooks {
	void (*waits)(struct pipeline_part *part);   /* a server is chosen for it */
	void (*let_go)(struct pipeline_part *part);  /* its result that was held counts no more */
	bool (*fed)(struct pipeline_part *part);     /* there is a place for its result now */
	void (*goes_on)(struct pipeline_part *part); /* its server is back */
	void (*turn)(struct pipeline_part *part);    /* it is to be sent */
};

struct pipeline_hooks {
	/* The job's life: made; opened at the cluster; another rank is there to be joined; it runs; its members know it. */
	void (*made)(struct pipeline_job *job);
	void (*opens)(struct pipeline_job *job);
	void (*joins)(struct pipeline_job *job);
	void (*runs)(struct pipeline_job *job);
	void (*begun)(struct pipeline_job *job);
	/* It fails: servers are told, but for `from`. No member belongs to it any more. Its memory goes. */
	void (*fails)(struct pipeline_job *job, const struct failure *failure,
		      const struct peer *from);
	void (*is_over)(struct pipeline_job *job);
	void (*freed)(struct pipeline_job *job);
	/* Something has happened that all its rounds have to hear of. */
	void (*news)(struct pipeline_job *job);

	/* Ranks of this node: in the job no more; lost, or leaving, of an elastic job; before it was formed; too late to regroup. */
	void (*member_gone)(struct pipeline_member *member);
	void (*rank_gone)(struct pipeline_job *job, uint32_t index, const struct failure *failure,
			  bool leaves);
	bool (*rank_gone_early)(struct pipeline_job *job, uint32_t index, uint32_t rank,
				const struct failure *failure);
	void (*rank_is_late)(struct pipeline_job *job, uint32_t index,
			     const struct failure *failure);
	/* Ranks of all nodes, as servers and nodes know them: after a restart; more are out; the job goes on without these. */
	void (*ranks_recalled)(struct pipeline_job *job);
	bool (*ranks_out)(struct pipeline_job *job, const char *why);
	void (*ranks_left_behind)(struct pipeline_job *job, const char *why);
	/* The job is asked what it is without ranks that have left. */
	void (*ranks_settle)(struct pipeline_job *job);
	/* All ranks here regroup. Returns 0 or -errno. */
	int (*regroups)(struct pipeline_job *job, const uint32_t *ranks, uint32_t n,
			uint32_t n_newcomers);
	/* A newcomer waits for a job that is not here; it waits no more; none does. */
	void (*newcomer_waits)(struct pipeline_newcomer *newcomer);
	void (*newcomer_gone)(const struct pipeline_newcomer *newcomer);
	void (*newcomers_gone)(struct pipeline *pipeline);

	/* After a restart: attaches again; what the ledger has of servers; a JOIN under way is taken back. Return 0 or -errno. */
	int (*attaches_again)(struct pipeline_job *job);
	int (*servers_recalled)(struct pipeline_job *job, struct failure *failure);
	void (*join_withdrawn)(struct pipeline_job *job);
	/* How rounds of before end. */
	bool (*rows_ended)(const struct pipeline_tensor *tensor, struct pipeline_request *request,
			   uint64_t n_rows, struct failure *failure);
	void (*rounds_known)(struct pipeline_tensor *tensor);

	/* The peer of a server, or NULL; servers are looked for once more. */
	struct peer *(*peer_of)(const struct pipeline_job *job, size_t server);
	void (*look_for_servers)(struct pipeline_job *job);
	/* How bytes go between GPUs here and servers, for operators. */
	void (*describe_gpu)(const struct pipeline_job *job, char *text, size_t size);

	/* The home's word on a tensor. */
	void (*tensor_known)(struct pipeline_tensor *tensor, const struct failure *failure,
			     uint64_t key, uint64_t start);
	struct pipeline_part_hooks part;
	/* Of rows, what was begun at a server that is lost. */
	void (*rows_begin_anew)(struct pipeline_job *job, size_t server);
	/* A round's turn has come: whether it has a part to begin, and does. */
	bool (*round_may_begin)(const struct pipeline_round *round);
	void (*round_turn)(struct pipeline_round *round);
	/* In a later turn of the loop: goes on. */
	void (*round_later)(struct pipeline_round *round);
	void (*tensor_later)(struct pipeline_tensor *tensor);
	/* Some ranks are gone: whether the round goes on. */
	bool (*round_without_them)(struct pipeline_round *round);
};
