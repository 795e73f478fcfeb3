/*
 * Which servers a job goes on with, and which of them has which part. Private to pipeline/.
 */
#pragma once

#include "pipeline/pipeline.h"
#include "proto/data.h"

struct pipeline_job;
struct pipeline_server;

/* Stripes that were dealt. */
struct pipeline_stripes {
	struct list link;
	uint16_t *stripes;
};

/* Which servers the job goes on with, and who has which part: move.c, add.c. */
struct pipeline_placement {
	uint32_t *
		moves; /* how often each has gone and come; elastic: then, by rank, who is out; NULL unless results are kept */
	struct data_added_set added; /* servers behind the view's */
	struct loop_timer add_timer; /* when more are looked for: add.c */
	uint64_t add_ns;	     /* for how long that was waited, the last time */
	size_t add_from; /* member of the newest view with which that begins: others were asked */
	uint32_t *moved_before;	 /* the run before: `moves` when its ranks regrouped; or NULL */
	uint32_t data_epoch;	 /* of what is said about data */
	uint64_t n_moved;	 /* how often this node has gone over */
	uint16_t *first_stripes; /* as the home has dealt them */
	struct list later;	 /* those after them */
	uint16_t *stripes;
	size_t n_stripes;
};

/* move.c: a job goes on with other servers. */
int pipeline_move_init(struct pipeline_job *job);
void pipeline_move_done(struct pipeline_job *job);
bool pipeline_move_is_in(const struct pipeline_job *job, size_t server);
/* Whether the cluster has no such member any more: its lease is over, or it has left. */
bool pipeline_move_is_dropped(const struct pipeline_job *job, size_t server);
/* Entries of `moves`: the view's servers, and ranks. */
size_t pipeline_move_n(const struct pipeline_job *job);
/* Tells all servers, as this node attaches nowhere any more. */
void pipeline_move_tell_all(struct pipeline_job *job);
size_t pipeline_move_n_in(const struct pipeline_job *job);
/* A server's number, the same on all nodes that know the same. */
uint32_t pipeline_move_number(const struct pipeline_job *job, size_t server);
/* What is said of its servers: who is in, and who was added. */
struct pipeline_said {
	struct data_added_set added;
	uint32_t moves[]; /* pipeline_move_n() entries */
};
/* What the job knows, to be freed; or NULL. */
struct pipeline_said *pipeline_move_said(const struct pipeline_job *job);
/* How often this server has gone and come, by what is said. */
uint32_t *pipeline_move_count(const struct pipeline_job *job, struct pipeline_said *said,
			      size_t server);
/* The job's home among the servers that are in by it. Returns 0 or -ENOMEM. */
int pipeline_move_home(const struct pipeline_job *job, const struct pipeline_said *said,
		       size_t *ret_server);
/* What somebody knows of it; n: entries, from outside. */
void pipeline_move_unite(struct pipeline_job *job, const uint32_t *moves, size_t n,
			 const char *why);
/* The same, of all. */
void pipeline_move_take(struct pipeline_job *job, const struct pipeline_said *said,
			const char *why);
void pipeline_move_notice(struct pipeline_job *job, const struct data_header *header,
			  const void *payload);
/* Leaves a server out. Returns false, and nothing happens, when no other is attached. */
bool pipeline_move_without(struct pipeline_job *job, size_t server, const char *why);
/* It is looked for in a moment. Returns 0 or -errno. */
int pipeline_move_look_soon(struct pipeline_job *job, size_t server);
/* The same for all that are out, or not in the job yet: this node is the first now. */
void pipeline_move_look_again(struct pipeline_job *job);
/* A server that is out may be back: asks it. */
void pipeline_move_look(struct pipeline_job *job, size_t server);
/* It is. */
void pipeline_move_back(struct pipeline_job *job, size_t server);

/* add.c: servers that have come to the cluster since the job began. */
/* Places for servers of `added` that the job has none for. Returns 0 or -ENOMEM. */
int pipeline_add_places(struct pipeline_job *job);
/* Asks those of the cluster that are not in the job, and asks again those that do not take part yet. */
void pipeline_add_look(struct pipeline_job *job);
/* The same in a moment. */
void pipeline_add_look_soon(struct pipeline_job *job);
/* One takes part. */
void pipeline_add_take(struct pipeline_job *job, const struct data_added *added);
/* Whether a daemon of the cluster is this server of the job. */
bool pipeline_add_is(const struct pipeline_server *server, const struct view_member *member);
