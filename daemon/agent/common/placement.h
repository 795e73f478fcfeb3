/*
 * Which servers a job goes on with, and which of them has which part. Private to agent/.
 */
#pragma once

#include "agent/agent.h"
#include "proto/data.h"

struct agent_job;
struct agent_server;

/*
 * The server of each stripe: a row with references, as threads of the pool may still read one that counts no more. What these
 * return and take is its first entry. Control thread.
 */
uint16_t *agent_stripes_new(size_t n); /* all 0; NULL: without memory */
/* Both take NULL; the second returns it. */
uint16_t *agent_stripes_ref(uint16_t *stripes);
uint16_t *agent_stripes_unref(uint16_t *stripes);
DEFINE_CLEANUP(uint16_t *, agent_stripes_unref)

/* Which servers the job goes on with, and who has which part: move.c, add.c. */
struct agent_placement {
	uint32_t *
		moves; /* how often each has gone and come; elastic: then, by rank, who is out; NULL unless results are kept */
	struct data_added_set added; /* servers behind the view's */
	struct loop_timer add_timer; /* when more are looked for: add.c */
	uint64_t add_ns;	     /* for how long that was waited, the last time */
	size_t add_from; /* member of the newest view with which that begins: others were asked */
	uint32_t *moved_before; /* the run before: `moves` when its ranks regrouped; or NULL */
	uint32_t data_epoch;	/* of what is said about data */
	uint64_t n_moved;	/* how often this node has gone over */
	uint16_t *stripes;	/* agent_stripes_new() */
	size_t n_stripes;
};

/* move.c: a job goes on with other servers. */
int agent_move_init(struct agent_job *job);
void agent_move_done(struct agent_job *job);
bool agent_placement_has(const struct agent_job *job, size_t server);
/* Which of its job's it is; and whether that is the home. */
size_t agent_server_number(const struct agent_server *server);
bool agent_server_is_home(const struct agent_server *server);
/* Whether the server's process may be another than that which the job began with. */
bool agent_server_may_be_fresh(const struct agent_server *server);
/* Whether the cluster has no such member any more: its lease is over, or it has left. */
bool agent_move_is_dropped(const struct agent_job *job, size_t server);
/* Entries of `moves`: the view's servers, and ranks. */
size_t agent_move_n(const struct agent_job *job);
/* Tells all servers, as this node attaches nowhere any more. */
void agent_move_tell_all(struct agent_job *job);
size_t agent_move_n_in(const struct agent_job *job);
/* A server's number, the same on all nodes that know the same. */
uint32_t agent_move_number(const struct agent_job *job, size_t server);
/* What is said of its servers: who is in, and who was added. */
struct agent_said {
	struct data_added_set added;
	uint32_t moves[]; /* agent_move_n() entries */
};
/* What the job knows, to be freed; or NULL. */
struct agent_said *agent_move_said(const struct agent_job *job);
/* How often this server has gone and come, by what is said. */
uint32_t *agent_move_count(const struct agent_job *job, struct agent_said *said, size_t server);
/* The job's home among the servers that are in by it. Returns 0 or -ENOMEM. */
int agent_move_home(const struct agent_job *job, const struct agent_said *said, size_t *ret_server);
/* What somebody knows of it; n: entries, from outside. */
void agent_move_unite(struct agent_job *job, const uint32_t *moves, size_t n, const char *why);
/* The same, of all. */
void agent_move_take(struct agent_job *job, const struct agent_said *said, const char *why);
void agent_move_notice(struct agent_job *job, const struct data_header *header,
		       const void *payload);
/* Leaves a server out. Returns false, and nothing happens, when no other is attached. */
bool agent_move_without(struct agent_job *job, size_t server, const char *why);
/* It is looked for in a moment. Returns 0 or -errno. */
int agent_move_look_soon(struct agent_job *job, size_t server);
/* The same for all that are out, or not in the job yet: this node is the first now. */
void agent_move_look_again(struct agent_job *job);
/* A server that is out may be back: asks it. */
void agent_move_look(struct agent_job *job, size_t server);
/* It is. */
void agent_move_back(struct agent_job *job, size_t server);

/* add.c: servers that have come to the cluster since the job began. */
/* Places for servers of `added` that the job has none for. Returns 0 or -ENOMEM. */
int agent_add_places(struct agent_job *job);
/* Asks those of the cluster that are not in the job, and asks again those that do not take part yet. */
void agent_add_look(struct agent_job *job);
/* The same in a moment. */
void agent_add_look_soon(struct agent_job *job);
/* One takes part. */
void agent_add_take(struct agent_job *job, const struct data_added *added);
/* Whether a daemon of the cluster is this server of the job. */
bool agent_add_is(const struct agent_server *server, const struct view_member *member);
