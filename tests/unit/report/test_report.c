/*
 * What operators are told of jobs, over doubles of agent and server: which jobs are one line, and
 * what a question costs. Work is counted: jobs that are looked at, names that are compared.
 */
#include "internal.h"
#include "test.h"
#include <stdio.h>

#define JOBS_MAX 4096

struct double_job {
	char name[64];
	uint64_t number;
};

static struct {
	struct double_job jobs[JOBS_MAX];
	size_t n;
	uint64_t n_changes;
} of_agent, server;
static unsigned n_tables, n_looked_at, n_compared;

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_compared++;
	return __real_strcmp(a, b);
}

/* -- Doubles of the modules ------------------------------------------------------------------------ */

int agent_jobs(struct agent *agent, struct agent_job_info **ret_jobs, size_t *ret_n)
{
	struct agent_job_info *infos = calloc(of_agent.n + 1, sizeof(*infos));

	(void)agent;
	ASSERT_TRUE(infos);
	n_tables++;
	for (size_t i = 0; i < of_agent.n; i++) {
		infos[i].number = of_agent.jobs[i].number;
		infos[i].state = "running";
		infos[i].n_local = 1;
		memcpy(infos[i].name, of_agent.jobs[i].name, sizeof(infos[i].name));
	}
	*ret_jobs = infos;
	*ret_n = of_agent.n;
	return 0;
}

int server_jobs(struct server *unused, struct server_job_info **ret_jobs, size_t *ret_n)
{
	struct server_job_info *infos = calloc(server.n + 1, sizeof(*infos));

	(void)unused;
	ASSERT_TRUE(infos);
	n_tables++;
	for (size_t i = 0; i < server.n; i++) {
		infos[i].number = server.jobs[i].number;
		infos[i].state = "running";
		memcpy(infos[i].name, server.jobs[i].name, sizeof(infos[i].name));
	}
	*ret_jobs = infos;
	*ret_n = server.n;
	return 0;
}

void agent_each_job(const struct agent *agent,
		    void (*each)(void *user, const char *name, uint64_t number), void *user)
{
	(void)agent;
	for (size_t i = 0; i < of_agent.n; i++, n_looked_at++)
		each(user, of_agent.jobs[i].name, of_agent.jobs[i].number);
}

void server_each_job(const struct server *unused,
		     void (*each)(void *user, const char *name, uint64_t number), void *user)
{
	(void)unused;
	for (size_t i = 0; i < server.n; i++, n_looked_at++)
		each(user, server.jobs[i].name, server.jobs[i].number);
}

uint64_t agent_n_changes(const struct agent *agent)
{
	(void)agent;
	return of_agent.n_changes;
}

uint64_t server_n_changes(const struct server *unused)
{
	(void)unused;
	return server.n_changes;
}

void agent_counters(const struct agent *agent, uint64_t *ret_n_requests, uint64_t *ret_n_failed)
{
	(void)agent;
	*ret_n_requests = *ret_n_failed = 0;
}

/* Of a daemon without a cluster. */
struct view *cluster_view(struct cluster *cluster)
{
	(void)cluster;
	return NULL;
}

/* Of one job, whose ranks are all here: the last number, in each session that there is. */
#define RANKS 1000

int agent_ranks(struct agent *agent, const char *job, struct agent_rank_info **ret_ranks,
		size_t *ret_n)
{
	struct agent_rank_info *ranks = calloc(RANKS, sizeof(*ranks));

	(void)agent;
	(void)job;
	ASSERT_TRUE(ranks);
	for (uint32_t i = 0; i < RANKS; i++)
		ranks[i] = (struct agent_rank_info){ .rank = i, .state = "here" };
	*ret_ranks = ranks;
	*ret_n = RANKS;
	return 0;
}

int control_sessions(struct control *control, struct control_session_info **ret_sessions,
		     size_t *ret_n)
{
	struct control_session_info *sessions = calloc(RANKS + 2, sizeof(*sessions));

	(void)control;
	ASSERT_TRUE(sessions);
	for (uint32_t i = 0; i < RANKS; i++)
		sessions[i] = (struct control_session_info){
			.pid = 1000 + i, .rank = RANKS - 1 - i, .job = "job", .run = 7
		};
	/* Of another job; and one that says that it is a rank which the job does not have. */
	sessions[RANKS] = (struct control_session_info){ .pid = 1, .job = "other", .run = 8 };
	sessions[RANKS + 1] =
		(struct control_session_info){ .pid = 2, .rank = RANKS, .job = "job", .run = 7 };
	*ret_sessions = sessions;
	*ret_n = RANKS + 2;
	return 0;
}

/* It has a model of many tensors. */
int agent_tensors(struct agent *agent, const char *job, size_t n_max,
		  struct agent_tensor_info **ret_tensors, size_t *ret_n, uint64_t *ret_total)
{
	(void)agent;
	(void)job;
	*ret_total = 1000000;
	*ret_n = (size_t)MIN(*ret_total, (uint64_t)n_max);
	*ret_tensors = calloc(*ret_n, sizeof(**ret_tensors));
	ASSERT_TRUE(*ret_tensors);
	return 0;
}

/* What there is nothing of. */
#define NONE(name, module, type)                                                           \
	int name(struct module *unused, const char *job, struct type **ret, size_t *ret_n) \
	{                                                                                  \
		(void)unused;                                                              \
		(void)job;                                                                 \
		(void)ret;                                                                 \
		*ret_n = 0;                                                                \
		return -ENOENT;                                                            \
	}
NONE(agent_servers, agent, agent_server_info)
NONE(agent_arrivals, agent, arrivals_info)
NONE(server_arrivals, server, arrivals_info)

/* What nobody asks for here. */
#define NEVER(returns, name, ...)                                  \
	returns name(__VA_ARGS__)                                  \
	{                                                          \
		test_fail(__FILE__, __LINE__, "not to be called"); \
		return 0;                                          \
	}
NEVER(size_t, control_n_sessions, const struct control *c)
NEVER(int, transport_peers, const struct transport *t, struct transport_peer_info **p, size_t *n)
NEVER(uint16_t, transport_port, const struct transport *t)

void drain_node(void *user, const char *node, struct admin_drain *drain)
{
	(void)user;
	(void)node;
	(void)drain;
}

/* -- The daemon ------------------------------------------------------------------------------------ */

static char none[] = "";
static struct config config = { .coordinator_listen = none, .tls_ca = none, .cluster = none };
static struct daemon the_daemon = { .config = &config };

static void start(void)
{
	static char modules[2];

	the_daemon.agent = (struct agent *)&modules[0];
	the_daemon.server = (struct server *)&modules[1];
	ASSERT_OK(block_cache_new(1 << 20, &the_daemon.blocks));
}

static void end(void)
{
	block_cache_free(the_daemon.blocks);
}

#define ADD(module, job_name, job_number)                                                       \
	do {                                                                                    \
		struct double_job *job_ = &module.jobs[module.n++];                             \
                                                                                                \
		module.n_changes++;                                                             \
		job_->number = (job_number);                                                    \
		(void)snprintf(job_->name, sizeof(job_->name), "%s", (const char *)(job_name)); \
	} while (0)

static uint32_t n_in_status(void)
{
	struct admin_status status;

	ASSERT_OK(report_ops.status(&the_daemon, &status));
	return status.n_jobs;
}

static size_t n_in_table(struct admin_job **ret_jobs)
{
	size_t n;

	ASSERT_OK(report_ops.jobs(&the_daemon, ret_jobs, &n));
	return n;
}

TEST(what_agent_and_server_know_of_a_job_is_one_line)
{
	_cleanup_(freep) struct admin_job *jobs = NULL;

	start();
	ADD(of_agent, "a", 11);
	ADD(of_agent, "b", 12);
	ADD(of_agent, "a", 11); /* of another rank that is a node of its own */
	ADD(of_agent, "c", 0);
	ADD(of_agent, "d", 14);
	ADD(of_agent, "d", 0);
	ADD(server, "b", 12);
	ADD(server, "b", 22); /* another owner's */
	ADD(server, "c", 23); /* whose number the agent does not know yet */
	ADD(server, "a", 0);  /* forms, and the agent knows the number already */
	ADD(server, "e", 0);
	ADD(server, "d", 24);
	ASSERT_EQ(n_in_table(&jobs), 7);
	ASSERT_EQ(n_in_status(), 7);
	ASSERT_STR(jobs[0].name, "a");
	ASSERT_EQ(jobs[0].n_local, 2);
	ASSERT_STR(jobs[0].role, "agent,server");
	ASSERT_STR(jobs[1].role, "agent,server");
	ASSERT_STR(jobs[2].name, "c");
	ASSERT_STR(jobs[2].role, "agent,server");
	ASSERT_EQ(jobs[3].number, 14);
	ASSERT_STR(jobs[3].role, "agent");
	ASSERT_STR(jobs[4].name, "d");
	ASSERT_STR(jobs[4].role, "agent,server");
	ASSERT_EQ(jobs[5].number, 22);
	ASSERT_STR(jobs[5].role, "server");
	ASSERT_STR(jobs[6].name, "e");
	end();
}

static void fill(unsigned n)
{
	char name[64];

	for (unsigned i = 0; i < n; i++) {
		(void)snprintf(name, sizeof(name), "job%u", i);
		ADD(of_agent, name, i + 1);
		ADD(server, name, i % 2 ? i + 1 : 0);
	}
}

static unsigned compared(unsigned n)
{
	_cleanup_(freep) struct admin_job *jobs = NULL;

	of_agent.n = server.n = 0;
	fill(n);
	n_compared = 0;
	ASSERT_EQ(n_in_table(&jobs), n);
	return n_compared;
}

TEST(the_name_of_each_job_is_compared_once)
{
	start();
	ASSERT_INT(compared(64), <=, 2 * 64);
	ASSERT_INT(compared(JOBS_MAX), <=, 2 * JOBS_MAX);
	end();
}

/* Strangers may ask for it where admin_listen has no TLS. */
TEST(status_looks_at_jobs_when_they_have_become_others)
{
	start();
	ASSERT_EQ(n_in_status(), 0);
	fill(100);
	ASSERT_EQ(n_in_status(), 100);
	ASSERT_EQ(n_tables, 0);
	n_looked_at = 0;
	for (unsigned i = 0; i < 10; i++)
		ASSERT_EQ(n_in_status(), 100);
	ASSERT_EQ(n_looked_at, 0);
	ADD(server, "other", 0);
	ASSERT_EQ(n_in_status(), 101);
	of_agent.n = 0;
	of_agent.n_changes++;
	server.n = 0;
	ASSERT_EQ(n_in_status(), 0);
	end();
}

/* Sessions are those of all users: each is looked at once. */
TEST(what_one_job_is_asked_for_does_not_grow_with_what_others_have)
{
	struct admin_job_parts parts = { 0 };

	start();
	ADD(of_agent, "job", 7);
	n_compared = 0;
	/* Its servers come last: there are none. */
	ASSERT_EQ(report_ops.job(&the_daemon, "job", &parts), 0);
	ASSERT_INT(n_compared, <=, 4 * RANKS);
	ASSERT_EQ(parts.n_ranks, RANKS);
	for (uint32_t i = 0; i < RANKS; i++)
		ASSERT_EQ(parts.ranks[i].pid, 1000 + RANKS - 1 - i);
	ASSERT_INT(parts.n_tensors, <=, 10000);
	ASSERT_EQ(parts.total_tensors, 1000000);
	freep(&parts.ranks);
	freep(&parts.tensors);
	freep(&parts.arrivals);
	freep(&parts.servers);
	end();
}
