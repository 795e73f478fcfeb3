/*
 * What a job's launcher says in the environment. Each launcher fills a struct environment with what it knows, BPS_*
 * goes over it, and environment_derive() works out the rest in one way for all.
 */
#include "client/bps.h"
#include "client/common/error.h"
#include "proto/types.h"
#include <stdarg.h>
#include <stdio.h>

#define UNSET		   UINT32_MAX
#define RESTART_TIMEOUT_MS 60000
#define SPIN_US		   100 /* as long as falling asleep and being woken take */
#define SPIN_US_MAX	   10000
#define TIMEOUT_MAX_MS	   (INT64_C(366) * 24 * 3600 * 1000)

struct environment {
	uint32_t rank, world_size, local_rank, local_size, node, n_nodes; /* or UNSET */
	uint32_t min_servers, part_bytes, force_distributed, gpu_reduce;
	uint64_t gpu_roots;
	uint32_t quorum, async, staleness;
	uint32_t elastic, min_ranks, max_ranks, newcomer;
	int64_t timeout_ms, request_timeout_ms, quorum_timeout_ms;
	const char *job;
	const char *rank_variable, *size_variable; /* for errors */
	const char *local_size_variable;	   /* whose absence leaves local_size open */
};

struct unit {
	const char *name; /* NULL ends a table */
	uint64_t factor;
};

static const struct unit no_units[] = { { "", 1 }, { 0 } };
static const struct unit time_units[] = { { "", 1000 },	    { "ms", 1 },      { "s", 1000 },
					  { "min", 60000 }, { "h", 3600000 }, { 0 } };
static const struct unit byte_units[] = { { "", 1 }, { "K", 1 << 10 }, { "M", 1 << 20 }, { 0 } };

/* A name made from what the launcher says. Lives as long as the thread, until it asks again. */
static _Thread_local char derived_job[JOB_NAME_MAX + 1];

static const char *environment_text(const char *name)
{
	const char *text = getenv(name);

	return text && *text ? text : NULL;
}

/* Decimal digits without sign; what is too large is UINT64_MAX. Returns what follows them. */
static const char *number_parse(const char *text, uint64_t *ret_value)
{
	uint64_t value = 0;

	for (; *text >= '0' && *text <= '9'; text++)
		if (MUL_OVERFLOW(value, UINT64_C(10), &value) ||
		    ADD_OVERFLOW(value, (uint64_t)(*text - '0'), &value))
			value = UINT64_MAX;
	*ret_value = value;
	return text;
}

/* A number and one of the units. *value stays as it is when the variable is not set. */
static int environment_scaled(const char *name, const struct unit *unit, uint64_t max,
			      uint64_t *value)
{
	const char *text = environment_text(name), *rest;
	uint64_t number;

	if (!text)
		return 0;
	rest = number_parse(text, &number);
	while (unit->name && strcmp(unit->name, rest))
		unit++;
	if (rest == text || !unit->name)
		return error_set(-EINVAL, "%s is \"%.40s\", which is not a number%s", name, text,
				 rest == text ? "" : " with a unit known here");
	if (MUL_OVERFLOW(number, unit->factor, &number) || number > max)
		return error_set(-EINVAL, "%s is %.40s, which is too large", name, text);
	*value = number;
	return 0;
}

static int environment_number(const char *name, uint32_t *value)
{
	uint64_t number = *value;
	int r = environment_scaled(name, no_units, UNSET - 1, &number);

	if (!r)
		*value = (uint32_t)number;
	return r;
}

static int environment_required(const char *name, const char *because, uint32_t *value)
{
	if (!environment_text(name))
		return error_set(-EINVAL, "%s is not set, but %s is", name, because);
	return environment_number(name, value);
}

static int environment_timeout(const char *name, int64_t *value)
{
	uint64_t number = (uint64_t)*value;
	int r = environment_scaled(name, time_units, TIMEOUT_MAX_MS, &number);

	if (!r)
		*value = (int64_t)number;
	return r;
}

int environment_restart_timeout(int64_t given_ms, int64_t *ret_timeout_ms)
{
	int64_t timeout_ms = RESTART_TIMEOUT_MS;
	int r = given_ms ? 0 : environment_timeout("BPS_RESTART_TIMEOUT", &timeout_ms);

	if (given_ms)
		*ret_timeout_ms = given_ms;
	else if (!r)
		*ret_timeout_ms = timeout_ms ?: -1;
	return r;
}

int environment_spin(int64_t *ret_spin_ns)
{
	uint64_t spin_us = SPIN_US;
	int r = environment_scaled("BPS_SPIN_US", no_units, SPIN_US_MAX, &spin_us);

	if (!r)
		*ret_spin_ns = (int64_t)spin_us * 1000;
	return r;
}

int environment_cuda(bool *ret_blocking, bool *ret_host)
{
	const char *way = environment_text("BPS_CUDA");
	uint32_t blocking = 0;
	int r = environment_number("BPS_CUDA_BLOCKING", &blocking);

	if (!r && way && strcmp(way, "auto") && strcmp(way, "host"))
		r = error_set(-EINVAL, "BPS_CUDA is \"%.40s\": auto or host", way);
	if (r)
		return r;
	*ret_blocking = blocking != 0;
	*ret_host = way && !strcmp(way, "host");
	return 0;
}

static int environment_gpu_reduce(uint32_t *value)
{
	static const char *const names[] = { "auto", "nccl", "switch", "host", "roots" };
	const char *text = environment_text("BPS_GPU_REDUCE");

	if (!text)
		return 0;
	for (uint32_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (!strcmp(text, names[i])) {
			*value = i;
			return 0;
		}
	}
	return error_set(-EINVAL, "BPS_GPU_REDUCE is \"%.40s\": auto, nccl, switch, roots or host",
			 text);
}

/* Local ranks: "2,3". */
static int environment_gpu_roots(const char *name, uint64_t *value)
{
	const char *text = environment_text(name), *at = text;
	uint64_t roots = 0;

	if (!text)
		return 0;
	for (;;) {
		unsigned long rank;
		char *end;

		if (*at < '0' || *at > '9')
			break;
		rank = strtoul(at, &end, 10);
		if (rank >= 64 || (*end && *end != ','))
			break;
		roots |= UINT64_C(1) << rank;
		if (!*end) {
			*value = roots;
			return 0;
		}
		at = end + 1;
	}
	return error_set(-EINVAL, "%s is \"%.40s\": local ranks, such as 0,4, each below 64", name,
			 text);
}

/* What differs is in front or behind, and behind more often: the end of a long name is kept. */
static _printf_(1, 2) const char *job_derive(const char *format, ...)
{
	char name[512];
	va_list args;
	size_t len;

	va_start(args, format);
	(void)vsnprintf(name, sizeof(name), format, args);
	va_end(args);

	len = strlen(name);
	(void)stpcpy(derived_job, len > JOB_NAME_MAX ? name + len - JOB_NAME_MAX : name);
	for (char *c = derived_job; *c; c++)
		if (!(*c >= '0' && *c <= '9') && !(*c >= 'A' && *c <= 'Z') &&
		    !(*c >= 'a' && *c <= 'z') && !strchr("._-", *c))
			*c = '_';
	return derived_job;
}

static const char *job_from_address(const char *address_variable, const char *port_variable)
{
	const char *address = environment_text(address_variable);
	const char *port = environment_text(port_variable);

	return address && port ? job_derive("%s-%s", address, port) : NULL;
}

/* A PyTorchJob of Kubernetes without torchrun: one rank in each pod. Its other variables are torchrun's options. */
static int environment_pytorchjob(struct environment *e)
{
	uint32_t pods = UNSET;
	int r = environment_number("PET_NNODES", &pods);

	if (r || e->local_rank != UNSET || e->local_size != UNSET || pods != e->world_size)
		return r;
	e->local_rank = 0;
	e->local_size = 1;
	e->node = e->rank;
	e->n_nodes = pods;
	return 0;
}

static int environment_torchrun(struct environment *e)
{
	const char *run = environment_text("TORCHELASTIC_RUN_ID");
	int r;

	e->rank_variable = "RANK";
	e->size_variable = "WORLD_SIZE";
	r = environment_required("RANK", "RANK", &e->rank);
	r = r ?: environment_required("WORLD_SIZE", "RANK", &e->world_size);
	r = r ?: environment_number("LOCAL_RANK", &e->local_rank);
	r = r ?: environment_number("LOCAL_WORLD_SIZE", &e->local_size);
	r = r ?: environment_number("GROUP_RANK", &e->node);
	r = r ?: environment_number("GROUP_WORLD_SIZE", &e->n_nodes);
	r = r ?: environment_pytorchjob(e);
	e->local_size_variable = "LOCAL_WORLD_SIZE";
	if (run && strcmp(run, "none"))
		e->job = job_derive("%s", run);
	else
		e->job = job_from_address("MASTER_ADDR", "MASTER_PORT");
	return r;
}

/* What all MPIs say: four numbers, and not which machine this is. */
static int environment_mpi(struct environment *e, const char *rank, const char *size,
			   const char *local_rank, const char *local_size)
{
	int r;

	e->rank_variable = rank;
	e->size_variable = size;
	e->local_size_variable = local_size;
	r = environment_required(rank, rank, &e->rank);
	r = r ?: environment_required(size, rank, &e->world_size);
	r = r ?: environment_required(local_rank, rank, &e->local_rank);
	return r ?: environment_required(local_size, rank, &e->local_size);
}

static int environment_open_mpi(struct environment *e)
{
	const char *namespace = environment_text("PMIX_NAMESPACE");

	e->job = namespace ? job_derive("%s", namespace) : NULL;
	return environment_mpi(e, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
			       "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
}

static int environment_mvapich(struct environment *e)
{
	return environment_mpi(e, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
			       "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE");
}

/* MPICH and Intel MPI. */
static int environment_hydra(struct environment *e)
{
	return environment_mpi(e, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
}

/* PMIx by itself: a program would have to ask it for the rest. */
static int environment_pmix(struct environment *e)
{
	e->rank_variable = "PMIX_RANK";
	if (!environment_text("BPS_SIZE"))
		return error_set(-EINVAL, "PMIX_RANK is set, but nothing says how many ranks there "
					  "are: set BPS_SIZE, "
					  "and BPS_LOCAL_SIZE where they are on several machines");
	return environment_required("PMIX_RANK", "PMIX_RANK", &e->rank);
}

/* "2(x3),1": tasks of each node in turn. False if it is not such a list or not of n_nodes nodes and n_tasks tasks. */
static bool slurm_layout(const char *text, const struct environment *e, uint32_t *ret_local_size)
{
	uint64_t nodes = 0, total = 0, tasks, repeat, local = 0;
	const char *rest;

	for (bool single = true;; single = false) {
		rest = number_parse(text, &tasks);
		repeat = single && !*rest ? e->n_nodes : 1; /* one number is for all nodes */
		if (rest == text || tasks > UINT32_MAX)
			return false;
		if (!strncmp(rest, "(x", 2)) {
			text = rest + 2;
			rest = number_parse(text, &repeat);
			if (rest == text || repeat > UINT32_MAX || *rest++ != ')')
				return false;
		}
		if (e->node >= nodes && e->node < nodes + repeat)
			local = tasks;
		nodes += repeat;
		if (MUL_OVERFLOW(tasks, repeat, &tasks) || ADD_OVERFLOW(total, tasks, &total))
			return false;
		if (!*rest)
			break;
		if (*rest != ',')
			return false;
		text = rest + 1;
	}
	if (nodes != e->n_nodes || total != e->world_size)
		return false;
	*ret_local_size = (uint32_t)local;
	return true;
}

/* The step's own, since a step may be smaller than its job; else the job's. */
static const char *slurm_variable(const char *of_step, const char *of_job)
{
	return environment_text(of_step) ? of_step : of_job;
}

static int environment_slurm(struct environment *e)
{
	static const char because[] = "SLURM_PROCID";
	static const char *const layouts[] = { "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE",
					       "SLURM_TASKS_PER_NODE" };
	const char *job = environment_text("SLURM_JOB_ID");
	const char *step = environment_text("SLURM_STEP_ID");
	const char *n_nodes = slurm_variable("SLURM_STEP_NUM_NODES", "SLURM_NNODES");
	bool known = false;
	int r;

	e->rank_variable = because;
	e->size_variable = slurm_variable("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
	r = environment_required(e->rank_variable, because, &e->rank);
	r = r ?: environment_required(e->size_variable, because, &e->world_size);
	r = r ?: environment_required("SLURM_LOCALID", because, &e->local_rank);
	r = r ?: environment_required("SLURM_NODEID", because, &e->node);
	r = r ?: environment_required(n_nodes, because, &e->n_nodes);
	if (r)
		return r;

	e->local_size_variable = "SLURM_STEP_TASKS_PER_NODE";
	for (size_t i = 0; i < ARRAY_SIZE(layouts) && !known; i++) {
		const char *text = environment_text(layouts[i]);

		if (!text)
			continue;
		known = slurm_layout(text, e, &e->local_size);
		e->local_size_variable = layouts[i];
	}
	if (job)
		e->job = job_derive(step ? "slurm-%s.%s" : "slurm-%s", job, step);
	return 0;
}

static int environment_byteps(struct environment *e)
{
	static const char because[] = "DMLC_WORKER_ID";
	int r;

	r = environment_required("DMLC_WORKER_ID", because, &e->node);
	r = r ?: environment_required("DMLC_NUM_WORKER", because, &e->n_nodes);
	r = r ?: environment_required("BYTEPS_LOCAL_RANK", because, &e->local_rank);
	r = r ?: environment_required("BYTEPS_LOCAL_SIZE", because, &e->local_size);
	e->rank_variable = "DMLC_WORKER_ID times BYTEPS_LOCAL_SIZE plus BYTEPS_LOCAL_RANK";
	e->size_variable = "DMLC_NUM_WORKER times BYTEPS_LOCAL_SIZE";
	r = r ?: environment_number("DMLC_NUM_SERVER", &e->min_servers);
	r = r ?: environment_number("BYTEPS_FORCE_DISTRIBUTED", &e->force_distributed);
	r = r ?: environment_number("BYTEPS_PARTITION_BYTES", &e->part_bytes);
	if (r)
		return r;
	if (MUL_OVERFLOW(e->node, e->local_size, &e->rank) ||
	    ADD_OVERFLOW(e->rank, e->local_rank, &e->rank) ||
	    MUL_OVERFLOW(e->n_nodes, e->local_size, &e->world_size))
		return error_set(-EINVAL, "DMLC_NUM_WORKER times BYTEPS_LOCAL_SIZE is too large");
	if (environment_text("BYTEPS_GLOBAL_RANK")) {
		e->rank_variable = "BYTEPS_GLOBAL_RANK";
		r = environment_number("BYTEPS_GLOBAL_RANK", &e->rank);
		if (r)
			return r;
	}
	e->job = job_from_address("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT");
	return 0;
}

/* All but who this rank is. */
static int environment_settings(struct environment *e)
{
	uint64_t part_bytes = e->part_bytes;
	const char *job = environment_text("BPS_JOB");
	int r;

	r = environment_number("BPS_MIN_SERVERS", &e->min_servers);
	r = r ?: environment_number("BPS_FORCE_DISTRIBUTED", &e->force_distributed);
	r = r ?: environment_scaled("BPS_PART_BYTES", byte_units, UINT32_MAX, &part_bytes);
	r = r ?: environment_gpu_reduce(&e->gpu_reduce);
	r = r ?: environment_gpu_roots("BYTEPS_REDUCE_ROOTS", &e->gpu_roots);
	r = r ?: environment_gpu_roots("BPS_GPU_ROOTS", &e->gpu_roots);
	r = r ?: environment_number("BPS_ELASTIC", &e->elastic);
	r = r ?: environment_number("BPS_MIN_RANKS", &e->min_ranks);
	r = r ?: environment_number("BPS_MAX_RANKS", &e->max_ranks);
	r = r ?: environment_number("BPS_NEWCOMER", &e->newcomer);
	r = r ?: environment_timeout("BPS_TIMEOUT", &e->timeout_ms);
	r = r ?: environment_timeout("BPS_REQUEST_TIMEOUT", &e->request_timeout_ms);
	r = r ?: environment_number("BPS_QUORUM", &e->quorum);
	r = r ?: environment_timeout("BPS_QUORUM_TIMEOUT", &e->quorum_timeout_ms);
	r = r ?: environment_number("BYTEPS_ENABLE_ASYNC", &e->async);
	r = r ?: environment_number("BPS_ASYNC", &e->async);
	r = r ?: environment_number("BPS_STALENESS", &e->staleness);
	e->part_bytes = (uint32_t)part_bytes;
	e->job = job ?: e->job;
	return r;
}

/* An indexed Job of Kubernetes numbers its pods and does not say how many there are. One rank in each. */
static int environment_indexed_job(struct environment *e)
{
	if (!environment_text("BPS_SIZE"))
		return 0;
	e->rank_variable = "JOB_COMPLETION_INDEX";
	e->local_rank = 0;
	e->local_size = 1;
	return environment_required("JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX", &e->rank);
}

static int environment_bps(struct environment *e)
{
	int r;

	if (environment_text("BPS_RANK"))
		e->rank_variable = "BPS_RANK";
	if (environment_text("BPS_SIZE"))
		e->size_variable = "BPS_SIZE";
	r = environment_number("BPS_RANK", &e->rank);
	r = r ?: environment_number("BPS_SIZE", &e->world_size);
	r = r ?: environment_number("BPS_LOCAL_RANK", &e->local_rank);
	r = r ?: environment_number("BPS_LOCAL_SIZE", &e->local_size);
	r = r ?: environment_number("BPS_NODE", &e->node);
	r = r ?: environment_number("BPS_NODES", &e->n_nodes);
	r = r ?: environment_settings(e);
	if (!r && e->rank == UNSET && e->world_size != UNSET)
		return error_set(-EINVAL, "BPS_RANK is not set, but BPS_SIZE is");
	if (!r && e->rank != UNSET && e->world_size == UNSET)
		return error_set(-EINVAL, "BPS_SIZE is not set, but BPS_RANK is");
	if (!r && e->rank != UNSET && e->rank >= e->world_size)
		return error_set(-EINVAL, "%s is %u, but %s is %u: ranks are numbered from 0",
				 e->rank_variable, e->rank, e->size_variable, e->world_size);
	return r;
}

static int environment_derive(struct environment *e)
{
	if (e->rank == UNSET)
		e->rank = 0;
	if (e->world_size == UNSET)
		e->world_size = 1;

	if (e->local_size == UNSET && e->n_nodes != UNSET && e->n_nodes &&
	    e->world_size % e->n_nodes == 0)
		e->local_size = e->world_size / e->n_nodes;
	/* Ranks that were set by hand, without a word of machines, are on one. */
	if (e->local_size == UNSET && e->n_nodes == UNSET &&
	    (!e->local_size_variable || e->world_size == 1))
		e->local_size = e->world_size;
	if (e->local_size == UNSET || !e->local_size)
		return error_set(-EINVAL,
				 "%s does not say how many of the %u ranks are on this machine: "
				 "set BPS_LOCAL_SIZE",
				 e->local_size_variable ?: "BPS_NODES", e->world_size);

	if (e->local_rank == UNSET)
		e->local_rank = e->rank % e->local_size;
	if (e->node == UNSET) {
		e->node = e->rank / e->local_size;
		if (e->rank % e->local_size != e->local_rank)
			return error_set(-EINVAL,
					 "rank %u has local rank %u of %u: ranks are not numbered "
					 "machine by machine, set BPS_NODE and BPS_NODES",
					 e->rank, e->local_rank, e->local_size);
	}
	if (e->n_nodes == UNSET) {
		if (e->world_size % e->local_size)
			return error_set(-EINVAL,
					 "%u ranks are not a multiple of the %u of this machine: "
					 "set BPS_NODES",
					 e->world_size, e->local_size);
		e->n_nodes = e->world_size / e->local_size;
	}
	return 0;
}

static int environment_read_settings(struct environment *e)
{
	e->rank = e->world_size = e->local_rank = e->local_size = e->node = e->n_nodes = 0;
	return environment_settings(e);
}

static int environment_read(struct environment *e)
{
	static const struct {
		const char *variable;
		int (*read)(struct environment *e);
	} launchers[] = {
		{ "RANK", environment_torchrun },
		{ "OMPI_COMM_WORLD_RANK", environment_open_mpi },
		{ "MV2_COMM_WORLD_RANK", environment_mvapich },
		/* Before Slurm, whose step is then mpiexec's own helper on each machine. */
		{ "MPI_LOCALRANKID", environment_hydra },
		{ "SLURM_STEP_ID", environment_slurm },
		{ "PMI_RANK", environment_hydra },
		{ "PMIX_RANK", environment_pmix },
		{ "DMLC_WORKER_ID", environment_byteps },
		{ "JOB_COMPLETION_INDEX", environment_indexed_job },
	};
	uint32_t newcomer = 0;
	int r;

	/* Its job will say which rank it is. */
	r = environment_number("BPS_NEWCOMER", &newcomer);
	if (r || newcomer)
		return r ?: environment_read_settings(e);
	for (size_t i = 0; i < ARRAY_SIZE(launchers) && !environment_text("BPS_RANK"); i++) {
		if (!environment_text(launchers[i].variable))
			continue;
		r = launchers[i].read(e);
		break;
	}
	r = r ?: environment_bps(e);
	return r ?: environment_derive(e);
}

static int environment_fill(struct bps_join_params *params, int (*read)(struct environment *e))
{
	struct environment e = {
		.rank = UNSET,
		.world_size = UNSET,
		.local_rank = UNSET,
		.local_size = UNSET,
		.node = UNSET,
		.n_nodes = UNSET,
	};
	struct bps_join_params known = { 0 };
	size_t size;
	int r;

	if (!params || params->size < sizeof(params->size))
		return error_set(-EINVAL, "bps_join_params is NULL or its size is not set");
	r = read(&e);
	if (r)
		return r;

	size = params->size;
	known = (struct bps_join_params){
		.size = size,
		.job = e.job,
		.secret = environment_text("BPS_SECRET"),
		.rank = e.rank,
		.world_size = e.world_size,
		.local_rank = e.local_rank,
		.local_size = e.local_size,
		.node = e.node,
		.n_nodes = e.n_nodes,
		.timeout_ms = e.timeout_ms,
		.request_timeout_ms = e.request_timeout_ms,
		.min_servers = e.min_servers,
		.part_bytes = e.part_bytes,
		.force_distributed = e.force_distributed != 0,
		.gpu_reduce = (int)e.gpu_reduce,
		.quorum = e.quorum,
		.asynchronous = e.async != 0,
		.quorum_timeout_ms = e.quorum_timeout_ms,
		.staleness = e.staleness,
		.elastic = e.elastic != 0,
		.min_ranks = e.min_ranks,
		.max_ranks = e.max_ranks,
		.newcomer = e.newcomer != 0,
		.gpu_roots = e.gpu_roots,
	};
	known.secret_len = known.secret ? strlen(known.secret) : 0;
	memset(params, 0, size);
	memcpy(params, &known, MIN(size, sizeof(known)));
	return 0;
}

_public_ int bps_join_params_from_environment(struct bps_join_params *params)
{
	return environment_fill(params, environment_read);
}

_public_ int bps_join_params_from_settings(struct bps_join_params *params)
{
	return environment_fill(params, environment_read_settings);
}
