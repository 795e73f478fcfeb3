/*
 * The simulated world: a cluster of daemons and their trainers in one thread, in virtual time, all
 * of it made from one seed. The code of agents, servers, ledgers, placement and tensors is the
 * daemon's own; what that code stands on is replaced when the program is linked: the clock, random
 * numbers and the log (env.c), base/loop (loop.c), base/pool (pool.c), transport/ (net.c) and the
 * source of members (member.c). See bps-testing(7), THE SIMULATED WORLD.
 *
 * Whatever happens is an event at a time; between two events nothing happens. Events of one time
 * come in an order that the seed decides.
 */
#pragma once

#include "agent/agent.h"
#include "base/clock.h"
#include "base/loop/loop.h"
#include "base/loop/pool.h"
#include "base/memory/block.h"
#include "cluster/cluster.h"
#include "server/server.h"
#include "transport/transport.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdio.h>

#define SIM_NODES   64
#define SIM_RANKS   64
#define SIM_TENSORS 8
#define SIM_FAULTS  256

/* -- Random numbers: one stream for each purpose ------------------------------------------------------------------- */

struct rng {
	uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng)
{
	uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

/* From 0 to n - 1. */
static inline uint64_t rng_below(struct rng *rng, uint64_t n)
{
	return n ? rng_next(rng) % n : 0;
}

static inline bool rng_chance(struct rng *rng, unsigned percent)
{
	return rng_below(rng, 100) < percent;
}

/* -- Schedules ------------------------------------------------------------------------------------------------------ */

enum fault_kind {
	FAULT_KILL, /* a daemon's process ends, at once or at a failpoint; another is started later */
	FAULT_CUT,   /* a connection or a lane of it breaks, with what is under way */
	FAULT_HOLD,  /* nothing arrives from one node at another for a while */
	FAULT_STOP,  /* a daemon's process stands still for a while */
	FAULT_SLOW,  /* a rank computes for long */
	FAULT_LOSE,  /* a rank of an elastic job dies */
	FAULT_DRAIN, /* a server is drained */
	FAULT_KINDS,
};

struct fault {
	enum fault_kind kind;
	unsigned after;	   /* completions of all ranks together */
	uint64_t delay_ns; /* from then */
	unsigned node, other;
	uint64_t lasts_ns;
	unsigned point; /* KILL: the n-th failpoint that the node comes to; 0: at once */
};

/* What the ranks of a job do. */
enum job_kind {
	JOB_WAITS,	 /* all operations of tensors, in any order */
	JOB_ACCUMULATES, /* no rank waits */
	JOB_QUORUM,	 /* half of the ranks are enough */
	JOB_STALE,	 /* as JOB_ACCUMULATES, but none is far ahead */
	JOB_ROWS,	 /* push_pull_rows beside push_pull */
	JOB_BLOCKS,	 /* operations whose blocks are of ranks, alone */
	JOB_LEAVES,	 /* each rank leaves when it has ended its rounds */
	JOB_FAILS,	 /* ranks disagree on some rounds, which fail on all of them */
	JOB_PAIR,	 /* two jobs on the same daemons */
	JOB_LATE,	 /* as JOB_QUORUM, and one rank is always late */
	JOB_ELASTIC,	 /* goes on without ranks that die */
	JOB_ORDERED, /* all ranks submit in one order, and say so; when asked for, not by seed */
	JOB_KINDS,
};
extern const char *const job_kinds[JOB_KINDS];
/* Whether each rank's contributions are counted, as a result need not have all. */
static inline bool job_counts(unsigned kind)
{
	return kind == JOB_ACCUMULATES || kind == JOB_QUORUM || kind == JOB_LATE ||
	       kind == JOB_STALE;
}

/* Whether a result tells by a byte for each rank whose contributions are in it. */
static inline bool job_tells(unsigned kind)
{
	return job_counts(kind) || kind == JOB_ELASTIC;
}

/* Made from a seed; or read from a file, shrunk. */
struct schedule {
	uint64_t seed;
	unsigned n_agents, n_servers; /* a server is a daemon of its own, or an agent's */
	unsigned n_shared;	      /* agents that are servers, too */
	unsigned n_local;	      /* ranks on each agent */
	unsigned n_tensors, n_rounds, n_faults;
	unsigned move_ms;  /* after which a server that is gone is left out */
	unsigned is_local; /* one agent and no server: 1 */
	unsigned kind;	   /* enum job_kind */
	struct fault faults[SIM_FAULTS];
};

void schedule_make(struct schedule *schedule, uint64_t seed, const struct schedule *fixed);
int schedule_write(const struct schedule *schedule, const char *path, const char *why);
int schedule_read(struct schedule *schedule, const char *path);
/* Runs a schedule; sim_fail() if anything is wrong. */
void schedule_run(const struct schedule *schedule);

/* -- Events --------------------------------------------------------------------------------------------------------- */

struct event {
	uint64_t at_ns, order;
	size_t index; /* in the heap, from 1; 0: not set */
	void (*fire)(struct event *event);
};

void event_set(struct event *event, uint64_t at_ns);
void event_cancel(struct event *event);
/* Lets the soonest event happen. Returns false when there is none. */
bool event_next(void);

/* -- The world ------------------------------------------------------------------------------------------------------ */

/*
 * Work that comes to a loop from outside, as by a descriptor that is ready. Taken back by its user
 * alone: list_remove().
 */
struct input {
	struct list link;
	void (*take)(struct input *input);
};

void loop_input(struct loop *loop, struct input *input);
/* The process of a loop stands still until then. */
void loop_stall(struct loop *loop, uint64_t until_ns);
/* The process of a loop is gone: nothing of it runs any more. */
void loop_kill(struct loop *loop);
bool loop_is_dead(const struct loop *loop);
/* The loop whose process runs now; NULL: none does. */
extern struct loop *loop_current;
/* Runs work of a process, which may be killed in the midst of it. */
void loop_run_in(struct loop *loop, void (*work)(void *), void *user);
/* Ends the work that runs, with its process. */
_Noreturn void loop_die(void);

/* Longer than nodes that are lost one after the other are waited for. */
#define REQUEST_TIMEOUT_MS 300000

struct node {
	unsigned number;
	char name[16], address[32];
	bool is_agent, is_server, is_alive, is_drained;
	uint64_t id; /* the process's */
	unsigned n_processes;
	unsigned points_left; /* until a failpoint kills the process; 0: none does */
	uint64_t stopped_until_ns;
	struct event event; /* the next process starts */
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct transport *transport;
	struct cluster *cluster;
	struct server *server;
	struct agent *agent;
	struct list sessions; /* of trainers */
};

/* What ranks that live were told of a round; a rank that died may have been told something else. */
struct outcome {
	struct agent_outcome told; /* to `rank`, the last */
	unsigned rank;
	int64_t came; /* a byte for each rank */
};

struct world {
	const struct schedule *schedule;
	uint64_t now_ns;
	uint64_t n_events;
	struct rng order, net, work, random;
	struct event **events;
	size_t n_events_set, events_capacity, n_events_max;
	unsigned n_nodes, n_ranks, size; /* size: of one job; n_ranks: of all */
	struct node nodes[SIM_NODES];
	struct view_member members[SIM_NODES];
	struct trainer *trainers[SIM_RANKS];
	struct outcome *outcomes;		/* elastic: for each round of each tensor */
	unsigned n_joined, n_completed, n_done, /* n_joined: ranks that once have */
		n_faults_left;			/* n_faults_left: of those that have yet to begin */
	uint64_t quiet_ns;			/* when the last fault was over */
	struct event calm;			/* then ranks may leave */
	struct event faults[SIM_FAULTS];
	bool leaving;
	struct list conns;
	uint32_t next_conn;
};

extern struct world *world;
extern bool sim_trace;
extern bool sim_coverage;
#define trace(...)                               \
	do {                                     \
		if (unlikely(sim_trace))         \
			trace_line(__VA_ARGS__); \
	} while (0)
void trace_line(const char *format, ...) _printf_(1, 2);
/* The schedule has found an error. */
_Noreturn void sim_fail(const char *format, ...) _printf_(1, 2);
extern void (*sim_failed)(const char *text);

/* -- Daemons: node.c ------------------------------------------------------------------------------------------------ */

void node_start(struct node *node);
void node_kill(struct node *node);
/* Ends a daemon in good order: everything that it held has been given back. */
void node_stop(struct node *node);
struct node *node_at(const char *address);

bool net_cut(unsigned from, unsigned to);
void net_hold(unsigned from, unsigned to, uint64_t until_ns);
void net_kill(struct transport *transport);
/* What is still under way, in words; NULL: no answer is owed and no call waits. */
const char *net_left(const struct transport *transport);
void net_done(void);
struct cluster *member_new(struct loop *loop, const char *self);
struct cluster *member_free(struct cluster *cluster);

/* -- Trainers: trainer.c -------------------------------------------------------------------------------------------- */

struct trainer *trainer_new(unsigned rank);
struct trainer *trainer_free(struct trainer *trainer);
/* The daemon that trainers are connected to is gone. */
void trainers_lost(struct node *node);
void trainer_slow(struct trainer *trainer, uint64_t until_ns);
void trainer_leave(struct trainer *trainer);
/* The rank dies. */
void trainer_lose(struct trainer *trainer);
/* What the rank does, in words, for a reader who wants to know why nothing gets on. */
void trainer_describe(const struct trainer *trainer, char *text, size_t len);
bool trainer_is_alive(uint32_t pid);
