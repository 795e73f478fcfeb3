/* Schedules: made from a seed, written and read, and run, with what must hold when all have left. */
#include "coverage.h"
#include "sim.h"
#include <unistd.h>

/* All ranks are done so long after the last fault is over. */
#define LOST_NS (120 * NSEC_PER_SEC)
/* Whatever waits for ranks that have left has given up by then. */
#define SETTLE_NS ((REQUEST_TIMEOUT_MS + 10000) * NSEC_PER_MSEC)
/*
 * A job that does not wait for all ranks ends with any change of its servers once a rank has left:
 * bps-recovery(7), STRAGGLERS. So ranks leave when such changes are over.
 */
#define CALM_NS	   (90 * NSEC_PER_SEC)
#define EVENTS_MAX 20000000

struct world *world;

static const char *const kinds[] = {
	[FAULT_KILL] = "kill",	 [FAULT_CUT] = "cut",	[FAULT_HOLD] = "hold",
	[FAULT_STOP] = "stop",	 [FAULT_SLOW] = "slow", [FAULT_LOSE] = "lose",
	[FAULT_DRAIN] = "drain",
};

const char *const job_kinds[JOB_KINDS] = {
	[JOB_WAITS] = "waits",	   [JOB_ACCUMULATES] = "accumulates",
	[JOB_QUORUM] = "quorum",   [JOB_STALE] = "stale",
	[JOB_ROWS] = "rows",	   [JOB_BLOCKS] = "blocks",
	[JOB_LEAVES] = "leaves",   [JOB_FAILS] = "fails",
	[JOB_PAIR] = "pair",	   [JOB_LATE] = "late",
	[JOB_ELASTIC] = "elastic", [JOB_ORDERED] = "ordered",
};

/* -- Seeds and files -------------------------------------------------------------------------------------------------- */

static unsigned n_daemons(const struct schedule *schedule)
{
	return schedule->n_agents + schedule->n_servers;
}

static void make_fault(struct schedule *schedule, struct rng *rng, struct fault *fault)
{
	unsigned all =
		schedule->n_agents * schedule->n_local * schedule->n_tensors * schedule->n_rounds;

	all *= 1 + (schedule->kind == JOB_PAIR);
	*fault = (struct fault){
		.kind = rng_chance(rng, 5) ? FAULT_DRAIN
					   : (enum fault_kind)rng_below(rng, FAULT_LOSE),
		.after = (unsigned)rng_below(rng, all * 9 / 10),
		.delay_ns = rng_below(rng, 2 * NSEC_PER_MSEC),
		.node = (unsigned)rng_below(rng, n_daemons(schedule)),
		.other = (unsigned)rng_below(rng, n_daemons(schedule)),
		.lasts_ns = 1 + rng_below(rng, rng_chance(rng, 80) ? 20 * NSEC_PER_MSEC
								   : 4 * NSEC_PER_SEC),
	};
	/*
	 * What a node that has left did not bring to all is lost with a server: bps-recovery(7), NODES THAT LEAVE. So is
	 * which rounds had failed.
	 */
	if ((schedule->kind == JOB_LEAVES || schedule->kind == JOB_FAILS) &&
	    (fault->kind == FAULT_KILL || fault->kind == FAULT_DRAIN))
		fault->kind = FAULT_CUT;
	if (schedule->kind == JOB_ELASTIC && rng_chance(rng, 25))
		fault->kind = FAULT_LOSE;
	if (rng_chance(rng, 70))
		fault->point = 1 + (unsigned)rng_below(rng, 60);
}

/* fixed: numbers that all schedules have, 0 (faults, kind: UINT32_MAX) where seeds decide. */
void schedule_make(struct schedule *schedule, uint64_t seed, const struct schedule *fixed)
{
	struct rng rng = { seed };

	*schedule = (struct schedule){ .seed = seed };
	schedule->n_agents = fixed->n_agents ?: 1 + (unsigned)rng_below(&rng, 4);
	schedule->n_servers = fixed->n_servers ?: (unsigned)rng_below(&rng, 3);
	schedule->n_shared = (unsigned)rng_below(&rng, schedule->n_agents + 1);
	if (!schedule->n_servers && !schedule->n_shared)
		schedule->n_shared = 1;
	schedule->n_local = fixed->n_local ?: 1 + (unsigned)rng_below(&rng, 2);
	schedule->n_tensors = fixed->n_tensors ?: 1 + (unsigned)rng_below(&rng, 3);
	schedule->n_rounds = fixed->n_rounds ?: 1 + (unsigned)rng_below(&rng, 20);
	schedule->n_faults =
		fixed->n_faults != UINT32_MAX ? fixed->n_faults : (unsigned)rng_below(&rng, 11);
	schedule->move_ms = rng_chance(&rng, 50) ? 60000 : 50 + (unsigned)rng_below(&rng, 500);
	if (schedule->n_agents == 1 && !fixed->n_agents && rng_chance(&rng, 50)) {
		schedule->is_local = 1;
		schedule->n_servers = schedule->n_shared = 0;
		schedule->n_local += (unsigned)rng_below(&rng, 3);
	}
	schedule->kind = rng_chance(&rng, 30) ? JOB_WAITS : (unsigned)rng_below(&rng, JOB_ORDERED);
	if (fixed->kind != UINT32_MAX)
		schedule->kind = fixed->kind;
	if (schedule->kind == JOB_LEAVES || schedule->kind == JOB_FAILS)
		schedule->move_ms = 60000;
	/* Values have a byte for each rank. */
	if (job_tells(schedule->kind)) {
		schedule->is_local = 0;
		schedule->n_local =
			schedule->n_agents * schedule->n_local > 7 ? 1 : schedule->n_local;
		schedule->n_shared =
			schedule->n_servers + schedule->n_shared ? schedule->n_shared : 1;
	}
	for (unsigned i = 0; i < schedule->n_faults; i++)
		make_fault(schedule, &rng, &schedule->faults[i]);
}

int schedule_write(const struct schedule *schedule, const char *path, const char *why)
{
	FILE *file = fopen(path, "w");

	if (!file)
		return -errno;
	(void)fprintf(file, "# %s\n# kind %u: %s\n", why, schedule->kind,
		      job_kinds[schedule->kind]);
	(void)fprintf(file, "seed %" PRIu64 "\nagents %u\nservers %u\nshared %u\nlocal %u\n",
		      schedule->seed, schedule->n_agents, schedule->n_servers, schedule->n_shared,
		      schedule->n_local);
	(void)fprintf(file, "tensors %u\nrounds %u\nmove_ms %u\nis_local %u\nkind %u\n",
		      schedule->n_tensors, schedule->n_rounds, schedule->move_ms,
		      schedule->is_local, schedule->kind);
	for (unsigned i = 0; i < schedule->n_faults; i++) {
		const struct fault *fault = &schedule->faults[i];

		(void)fprintf(file,
			      "fault %s after %u delay %" PRIu64 " node %u other %u lasts %" PRIu64
			      " point %u\n",
			      kinds[fault->kind], fault->after, fault->delay_ns, fault->node,
			      fault->other, fault->lasts_ns, fault->point);
	}
	return fclose(file) ? -errno : 0;
}

static bool read_fault(struct schedule *schedule, const char *line)
{
	struct fault *fault = &schedule->faults[schedule->n_faults];
	char kind[16];

	if (schedule->n_faults == SIM_FAULTS ||
	    sscanf(line,
		   "fault %15s after %u delay %" SCNu64 " node %u other %u lasts %" SCNu64
		   " point %u",
		   kind, &fault->after, &fault->delay_ns, &fault->node, &fault->other,
		   &fault->lasts_ns, &fault->point) != 7)
		return false;
	for (unsigned i = 0; i < FAULT_KINDS; i++)
		if (!strcmp(kinds[i], kind)) {
			fault->kind = (enum fault_kind)i;
			schedule->n_faults++;
			return fault->node < n_daemons(schedule) &&
			       fault->other < n_daemons(schedule);
		}
	return false;
}

int schedule_read(struct schedule *schedule, const char *path)
{
	FILE *file = fopen(path, "r");
	char line[256];
	bool good = true;

	if (!file)
		return -errno;
	*schedule = (struct schedule){ 0 };
	while (good && fgets(line, sizeof(line), file)) {
		if (*line == '#' || *line == '\n')
			continue;
		good = read_fault(schedule, line) ||
		       sscanf(line, "seed %" SCNu64, &schedule->seed) == 1 ||
		       sscanf(line, "agents %u", &schedule->n_agents) == 1 ||
		       sscanf(line, "servers %u", &schedule->n_servers) == 1 ||
		       sscanf(line, "shared %u", &schedule->n_shared) == 1 ||
		       sscanf(line, "local %u", &schedule->n_local) == 1 ||
		       sscanf(line, "tensors %u", &schedule->n_tensors) == 1 ||
		       sscanf(line, "rounds %u", &schedule->n_rounds) == 1 ||
		       sscanf(line, "move_ms %u", &schedule->move_ms) == 1 ||
		       sscanf(line, "is_local %u", &schedule->is_local) == 1 ||
		       sscanf(line, "kind %u", &schedule->kind) == 1;
	}
	(void)fclose(file);
	return good && schedule->n_agents && schedule->n_local &&
			       schedule->n_tensors <= SIM_TENSORS && schedule->kind < JOB_KINDS &&
			       schedule->n_agents * schedule->n_local *
					       (1 + (schedule->kind == JOB_PAIR)) <=
				       SIM_RANKS &&
			       n_daemons(schedule) <= SIM_NODES
		       ? 0
		       : -EINVAL;
}

/* -- Faults ----------------------------------------------------------------------------------------------------------- */

static void drain(void *user)
{
	struct node *node = user;
	uint32_t moved, stay;

	server_drain(node->server, &moved, &stay);
	trace("drained: %u jobs move, %u stay", moved, stay);
}

static void begin_fault(struct event *event)
{
	unsigned i = (unsigned)(event - world->faults);
	const struct fault *fault = &world->schedule->faults[i];
	struct node *node = &world->nodes[fault->node];
	uint64_t until_ns = world->now_ns + fault->lasts_ns;

	world->n_faults_left--;
	world->quiet_ns = MAX(world->quiet_ns, world->now_ns);
	trace("fault %u: %s %s %s", i + 1, kinds[fault->kind], node->name,
	      world->nodes[fault->other].name);
	coverage_note("fault", kinds[fault->kind]);
	switch (fault->kind) {
	case FAULT_KILL:
		if (node->is_alive && !fault->point)
			node_kill(node);
		else if (node->is_alive)
			node->points_left = fault->point;
		break;
	case FAULT_CUT:
		(void)net_cut(fault->node, fault->other);
		break;
	case FAULT_HOLD:
		net_hold(fault->node, fault->other, until_ns);
		world->quiet_ns = MAX(world->quiet_ns, until_ns);
		break;
	case FAULT_STOP:
		if (node->is_alive) {
			node->stopped_until_ns = until_ns;
			loop_stall(node->loop, until_ns);
		}
		world->quiet_ns = MAX(world->quiet_ns, until_ns);
		break;
	case FAULT_SLOW:
		trainer_slow(world->trainers[fault->node % world->n_ranks], until_ns);
		world->quiet_ns = MAX(world->quiet_ns, until_ns);
		break;
	case FAULT_LOSE:
		trainer_lose(world->trainers[fault->node % world->n_ranks]);
		break;
	case FAULT_DRAIN:
		if (node->is_alive && node->server)
			loop_run_in(node->loop, drain, node);
		break;
	default:
		break;
	}
}

/* Requests of all ranks together. */
static unsigned n_to_do(void)
{
	return world->n_ranks * world->schedule->n_tensors * world->schedule->n_rounds;
}

/* Sets the faults whose time has come, by what has been done. */
static void arm_faults(unsigned *n_armed)
{
	for (unsigned i = 0; i < world->schedule->n_faults; i++) {
		const struct fault *fault = &world->schedule->faults[i];

		/* A fault before all ranks have joined may end the job. */
		unsigned after = MAX(MIN(fault->after, n_to_do() * 9 / 10), 1u);

		if (world->faults[i].fire || world->n_joined < world->n_ranks ||
		    world->n_completed < after)
			continue;
		world->faults[i].fire = begin_fault;
		event_set(&world->faults[i], world->now_ns + fault->delay_ns);
		++*n_armed;
	}
}

/* -- The run ---------------------------------------------------------------------------------------------------------- */

static void make_node(unsigned i)
{
	const struct schedule *schedule = world->schedule;
	struct node *node = &world->nodes[i];
	struct view_member *member = &world->members[i];

	node->number = i;
	node->is_agent = i < schedule->n_agents;
	node->is_server = !node->is_agent || i < schedule->n_shared;
	(void)snprintf(node->name, sizeof(node->name), "%s%02u",
		       !node->is_agent	 ? "server"
		       : node->is_server ? "both"
					 : "agent",
		       i % SIM_NODES);
	(void)snprintf(node->address, sizeof(node->address), "10.0.0.%u:9690", i + 1);
	member->roles = (node->is_agent ? ROLE_AGENT : 0) | (node->is_server ? ROLE_SERVER : 0);
	memcpy(member->name, node->name, sizeof(node->name));
	memcpy(member->address, node->address, sizeof(node->address));
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct view_member *)a)->name, ((const struct view_member *)b)->name);
}

static void on_calm(struct event *event)
{
	(void)event;
}

static void world_open(const struct schedule *schedule)
{
	world = calloc(1, sizeof(*world));
	if (!world)
		abort();
	world->schedule = schedule;
	world->now_ns = 1000 * NSEC_PER_SEC;
	world->order.state = schedule->seed ^ 1;
	world->net.state = schedule->seed ^ 2;
	world->work.state = schedule->seed ^ 3;
	world->random.state = schedule->seed ^ 4;
	world->n_nodes = n_daemons(schedule);
	world->size = schedule->n_agents * schedule->n_local;
	world->n_ranks = world->size * (1 + (schedule->kind == JOB_PAIR));
	world->n_faults_left = schedule->n_faults;
	list_init(&world->conns);
	world->outcomes =
		calloc((size_t)SIM_TENSORS * schedule->n_rounds, sizeof(world->outcomes[0]));
	if (!world->outcomes)
		abort();
	for (unsigned i = 0; i < world->n_nodes; i++)
		make_node(i);
	qsort(world->members, world->n_nodes, sizeof(world->members[0]), by_name);
	for (unsigned i = 0; i < world->n_nodes; i++)
		node_start(&world->nodes[i]);
	for (unsigned i = 0; i < world->n_ranks; i++)
		world->trainers[i] = trainer_new(i);
	world->quiet_ns = world->now_ns;
	world->calm.fire = on_calm;
}

static void world_close(void)
{
	for (unsigned i = 0; i < world->n_ranks; i++)
		world->trainers[i] = trainer_free(world->trainers[i]);
	for (unsigned i = 0; i < world->n_nodes; i++)
		node_stop(&world->nodes[i]);
	net_done();
	free(world->outcomes);
	free(world->events);
	free(world);
	world = NULL;
}

static _Noreturn void fail_late(const char *what)
{
	char all[1024] = "", one[128];

	for (unsigned i = 0; i < world->n_ranks; i++) {
		trainer_describe(world->trainers[i], one, sizeof(one));
		if (strlen(all) + strlen(one) + 3 < sizeof(all)) {
			strcat(all, i ? "; " : "");
			strcat(all, one);
		}
	}
	sim_fail("%s: %s", what, all);
}

/*
 * What others lack when a node leaves is lost with a server: bps-recovery(7), NODES THAT LEAVE. So where there are
 * faults no rank leaves before all have all; else each leaves when its rounds are done.
 */
static bool may_leave(void)
{
	uint64_t calm_ns = job_counts(world->schedule->kind) ? CALM_NS : 0;

	if (world->schedule->kind == JOB_LEAVES)
		return true;
	if (world->n_faults_left || (world->schedule->n_faults && world->n_completed < n_to_do()))
		return false;
	if (world->schedule->n_faults && world->now_ns < world->quiet_ns + calm_ns) {
		if (!world->calm.index)
			event_set(&world->calm, world->quiet_ns + calm_ns);
		return false;
	}
	for (unsigned i = 0; i < world->n_nodes; i++)
		if (!world->nodes[i].is_alive)
			return false;
	for (unsigned i = 0; i < world->n_nodes; i++)
		world->nodes[i].points_left = 0;
	return true;
}

void schedule_run(const struct schedule *schedule)
{
	unsigned n_armed = 0, seen = UINT32_MAX, now;

	world_open(schedule);
	coverage_note("job", schedule->is_local ? "of one node" : job_kinds[schedule->kind]);
	while (world->n_done < world->n_ranks) {
		now = world->n_completed + world->n_joined;
		if (now != seen) {
			seen = now;
			world->quiet_ns = MAX(world->quiet_ns, world->now_ns);
			arm_faults(&n_armed);
		}
		if (!world->leaving && may_leave()) {
			world->leaving = true;
			world->quiet_ns = world->now_ns;
			for (unsigned i = 0; i < world->n_ranks; i++)
				trainer_leave(world->trainers[i]);
		}
		if (!event_next())
			fail_late("nothing happens any more");
		if (world->now_ns > world->quiet_ns + LOST_NS)
			fail_late("nothing gets on");
		if (world->n_events > EVENTS_MAX)
			fail_late("too much happens");
	}
	/* Work that is under way when all have left comes to its end. */
	for (uint64_t until_ns = world->now_ns + SETTLE_NS;
	     world->n_events_set && world->events[1]->at_ns < until_ns;)
		(void)event_next();
	trace("over: %" PRIu64 " events", world->n_events);
	world_close();
}
