/* What launchers leave in the environment, and what the library makes of it. */
#include "test.h"

#include <bps.h>

#define ASSERT_FAILS(x, error, words)                \
	do {                                         \
		ASSERT_EQ(x, -(error));              \
		ASSERT_CONTAINS(bps_error(), words); \
	} while (0)

/* Nothing else is in the environment then: names and values in turn. */
static void set_environment(const char *const *pairs)
{
	ASSERT_OK(clearenv());
	for (; *pairs; pairs += 2)
		ASSERT_OK(setenv(pairs[0], pairs[1], 1));
}
#define ENVIRONMENT(...) set_environment((const char *const[]){ __VA_ARGS__, NULL })

static int read_params(struct bps_join_params *params)
{
	memset(params, 0xee, sizeof(*params));
	params->size = sizeof(*params);
	return bps_join_params_from_environment(params);
}

#define ASSERT_SHAPE(rank_, world_size_, local_rank_, local_size_, node_, n_nodes_) \
	do {                                                                        \
		if (read_params(&p))                                                \
			test_fail(__FILE__, __LINE__, "%s", bps_error());           \
		ASSERT_EQ(p.rank, rank_);                                           \
		ASSERT_EQ(p.world_size, world_size_);                               \
		ASSERT_EQ(p.local_rank, local_rank_);                               \
		ASSERT_EQ(p.local_size, local_size_);                               \
		ASSERT_EQ(p.node, node_);                                           \
		ASSERT_EQ(p.n_nodes, n_nodes_);                                     \
	} while (0)

TEST(empty)
{
	struct bps_join_params p;

	ASSERT_OK(clearenv());
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
	ASSERT_EQ(p.size, sizeof(p));
	ASSERT_TRUE(!p.job && !p.secret && !p.secret_len);
	ASSERT_EQ(p.timeout_ms, 0);
	ASSERT_EQ(p.request_timeout_ms, 0);
	ASSERT_EQ(p.min_servers + p.part_bytes, 0);
	ASSERT_EQ(p.force_distributed, 0);
	/* An empty variable is one that is not set. */
	ENVIRONMENT("RANK", "", "BPS_RANK", "", "BPS_TIMEOUT", "");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
}

TEST(sizes_of_params)
{
	struct {
		struct bps_join_params params;
		uint64_t newer;
	} larger = { .params.size = sizeof(larger), .newer = 7 };
	struct bps_join_params smaller = { .size = offsetof(struct bps_join_params, timeout_ms),
					   .timeout_ms = 77 };

	ENVIRONMENT("BPS_RANK", "1", "BPS_SIZE", "2", "BPS_TIMEOUT", "5");
	ASSERT_OK(bps_join_params_from_environment(&larger.params));
	ASSERT_EQ(larger.newer, 0);
	ASSERT_EQ(larger.params.rank, 1);
	ASSERT_OK(bps_join_params_from_environment(&smaller));
	ASSERT_EQ(smaller.rank, 1);
	ASSERT_EQ(smaller.timeout_ms, 77);
	smaller.size = 0;
	ASSERT_FAILS(bps_join_params_from_environment(&smaller), EINVAL, "size");
	ASSERT_FAILS(bps_join_params_from_environment(NULL), EINVAL, "NULL");
}

TEST(bps)
{
	struct bps_join_params p;

	ENVIRONMENT("BPS_RANK", "5", "BPS_SIZE", "8", "BPS_LOCAL_RANK", "1", "BPS_LOCAL_SIZE", "2",
		    "BPS_NODE", "2", "BPS_NODES", "4", "BPS_JOB", "j", "BPS_SECRET", "s",
		    "BPS_TIMEOUT", "1500ms", "BPS_REQUEST_TIMEOUT", "10min", "BPS_MIN_SERVERS", "3",
		    "BPS_PART_BYTES", "4M", "BPS_FORCE_DISTRIBUTED", "1");
	ASSERT_SHAPE(5, 8, 1, 2, 2, 4);
	ASSERT_STR(p.job, "j");
	ASSERT_EQ(p.secret_len, 1);
	ASSERT_MEM(p.secret, "s", 1);
	ASSERT_EQ(p.timeout_ms, 1500);
	ASSERT_EQ(p.request_timeout_ms, 600000);
	ASSERT_EQ(p.min_servers, 3);
	ASSERT_EQ(p.part_bytes, 4 << 20);
	ASSERT_EQ(p.force_distributed, 1);

	ASSERT_EQ(p.quorum, 0);
	ASSERT_EQ(p.asynchronous, 0);
	ENVIRONMENT("BPS_QUORUM", "3", "BPS_QUORUM_TIMEOUT", "250ms", "BPS_ASYNC", "1",
		    "BPS_STALENESS", "4");
	ASSERT_OK(read_params(&p));
	ASSERT_EQ(p.quorum, 3);
	ASSERT_EQ(p.quorum_timeout_ms, 250);
	ASSERT_EQ(p.asynchronous, 1);
	ASSERT_EQ(p.staleness, 4);
	ENVIRONMENT("BYTEPS_ENABLE_ASYNC", "1");
	ASSERT_OK(read_params(&p));
	ASSERT_EQ(p.asynchronous, 1);
	ENVIRONMENT("BYTEPS_ENABLE_ASYNC", "1", "BPS_ASYNC", "0");
	ASSERT_OK(read_params(&p));
	ASSERT_EQ(p.asynchronous, 0);

	/* The least: all on this machine; or all machines alike. */
	ENVIRONMENT("BPS_RANK", "3", "BPS_SIZE", "4");
	ASSERT_SHAPE(3, 4, 3, 4, 0, 1);
	ENVIRONMENT("BPS_RANK", "3", "BPS_SIZE", "4", "BPS_LOCAL_SIZE", "2");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ENVIRONMENT("BPS_RANK", "3", "BPS_SIZE", "4", "BPS_NODES", "4");
	ASSERT_SHAPE(3, 4, 0, 1, 3, 4);
	ENVIRONMENT("BPS_RANK", "3", "BPS_SIZE", "4", "BPS_TIMEOUT", "7", "BPS_REQUEST_TIMEOUT",
		    "2h", "BPS_PART_BYTES", "65536");
	ASSERT_SHAPE(3, 4, 3, 4, 0, 1);
	ASSERT_EQ(p.timeout_ms, 7000);
	ASSERT_EQ(p.request_timeout_ms, 7200000);
	ASSERT_EQ(p.part_bytes, 65536);
	/* Other launchers do not count then. */
	ENVIRONMENT("BPS_RANK", "0", "BPS_SIZE", "1", "RANK", "nonsense");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
}

TEST(bps_that_does_not_fit)
{
	struct bps_join_params p;

	ENVIRONMENT("BPS_RANK", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_SIZE is not set");
	ENVIRONMENT("BPS_SIZE", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_RANK is not set");
	ENVIRONMENT("BPS_RANK", "-1", "BPS_SIZE", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_RANK is \"-1\"");
	ENVIRONMENT("BPS_RANK", "1x", "BPS_SIZE", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "not a number");
	ENVIRONMENT("BPS_RANK", "99999999999999999999999", "BPS_SIZE", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "too large");
	ENVIRONMENT("BPS_RANK", "4294967295", "BPS_SIZE", "1");
	ASSERT_FAILS(read_params(&p), EINVAL, "too large");
	ENVIRONMENT("BPS_RANK", "0", "BPS_SIZE", "3", "BPS_LOCAL_SIZE", "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "set BPS_NODES");
	ENVIRONMENT("BPS_RANK", "0", "BPS_SIZE", "3", "BPS_LOCAL_SIZE", "0");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_LOCAL_SIZE");
	ENVIRONMENT("BPS_RANK", "0", "BPS_SIZE", "3", "BPS_NODES", "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "set BPS_LOCAL_SIZE");
	ENVIRONMENT("BPS_TIMEOUT", "10parsecs");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_TIMEOUT");
	ENVIRONMENT("BPS_TIMEOUT", "s");
	ASSERT_FAILS(read_params(&p), EINVAL, "not a number");
	ENVIRONMENT("BPS_REQUEST_TIMEOUT", "99999999999999h");
	ASSERT_FAILS(read_params(&p), EINVAL, "too large");
	ENVIRONMENT("BPS_PART_BYTES", "5G");
	ASSERT_FAILS(read_params(&p), EINVAL, "BPS_PART_BYTES");
	ENVIRONMENT("BPS_PART_BYTES", "4096M");
	ASSERT_FAILS(read_params(&p), EINVAL, "too large");
}

TEST(elastic)
{
	struct bps_join_params p;

	ENVIRONMENT("BPS_RANK", "1", "BPS_SIZE", "4", "BPS_ELASTIC", "1", "BPS_MIN_RANKS", "2",
		    "BPS_MAX_RANKS", "6");
	ASSERT_SHAPE(1, 4, 1, 4, 0, 1);
	ASSERT_TRUE(p.elastic && p.min_ranks == 2 && p.max_ranks == 6 && !p.newcomer);
	/* What a launcher says of ranks is of those that were there before. */
	ENVIRONMENT("BPS_NEWCOMER", "1", "BPS_ELASTIC", "1", "BPS_JOB", "j", "BPS_TIMEOUT", "90s",
		    "RANK", "7", "BPS_SIZE", "4", "WORLD_SIZE", "4");
	ASSERT_SHAPE(0, 0, 0, 0, 0, 0);
	ASSERT_TRUE(p.elastic && p.newcomer);
	ASSERT_STR(p.job, "j");
	ASSERT_EQ(p.timeout_ms, 90000);
}

TEST(torchrun)
{
	struct bps_join_params p;

	ENVIRONMENT("RANK", "5", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "4",
		    "GROUP_RANK", "1", "GROUP_WORLD_SIZE", "2", "TORCHELASTIC_RUN_ID", "run/7");
	ASSERT_SHAPE(5, 8, 1, 4, 1, 2);
	ASSERT_STR(p.job, "run_7");
	ENVIRONMENT("RANK", "5", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "4",
		    "GROUP_RANK", "1", "TORCHELASTIC_RUN_ID", "none", "MASTER_ADDR", "fe80::1",
		    "MASTER_PORT", "29500");
	ASSERT_SHAPE(5, 8, 1, 4, 1, 2);
	ASSERT_STR(p.job, "fe80__1-29500");
	/* Machines of different sizes. */
	ENVIRONMENT("RANK", "4", "WORLD_SIZE", "5", "LOCAL_RANK", "0", "LOCAL_WORLD_SIZE", "1",
		    "GROUP_RANK", "1", "GROUP_WORLD_SIZE", "2");
	ASSERT_SHAPE(4, 5, 0, 1, 1, 2);
	ASSERT_TRUE(!p.job);
	/* Without torchrun, as env:// is set by hand. */
	ENVIRONMENT("RANK", "3", "WORLD_SIZE", "4", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ENVIRONMENT("RANK", "3", "WORLD_SIZE", "4", "BPS_LOCAL_SIZE", "2", "BPS_JOB", "mine");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ASSERT_STR(p.job, "mine");
	ENVIRONMENT("RANK", "0", "WORLD_SIZE", "1");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
	/* torchrun inside a Slurm job: the inner launcher counts. */
	ENVIRONMENT("RANK", "0", "WORLD_SIZE", "1", "SLURM_PROCID", "3");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
}

TEST(torchrun_that_does_not_fit)
{
	struct bps_join_params p;

	ENVIRONMENT("RANK", "3");
	ASSERT_FAILS(read_params(&p), EINVAL, "WORLD_SIZE is not set");
	ENVIRONMENT("RANK", "4", "WORLD_SIZE", "4", "LOCAL_RANK", "0", "LOCAL_WORLD_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "RANK is 4, but WORLD_SIZE is 4");
	ENVIRONMENT("RANK", "3", "WORLD_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "LOCAL_WORLD_SIZE does not say");
	ENVIRONMENT("RANK", "3", "WORLD_SIZE", "4", "LOCAL_RANK", "0", "LOCAL_WORLD_SIZE", "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "machine by machine");
	ENVIRONMENT("RANK", "zero", "WORLD_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "RANK is \"zero\"");
}

TEST(long_names_of_jobs)
{
	struct bps_join_params p;

	ENVIRONMENT("RANK", "0", "WORLD_SIZE", "1", "MASTER_ADDR",
		    "a-very-long-name.of-a-machine.in-a-domain.that-is-longer-still.example",
		    "MASTER_PORT", "29500");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
	ASSERT_EQ(strlen(p.job), 63);
	ASSERT_CONTAINS(p.job, ".example-29500");
}

TEST(open_mpi)
{
	struct bps_join_params p;

	ENVIRONMENT("OMPI_COMM_WORLD_RANK", "3", "OMPI_COMM_WORLD_SIZE", "4",
		    "OMPI_COMM_WORLD_LOCAL_RANK", "1", "OMPI_COMM_WORLD_LOCAL_SIZE", "2",
		    "PMIX_NAMESPACE", "prterun-host-77@1");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ASSERT_STR(p.job, "prterun-host-77_1");
	ENVIRONMENT("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4",
		    "OMPI_COMM_WORLD_LOCAL_RANK", "1", "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "machine by machine"); /* --map-by node */
	ENVIRONMENT("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "OMPI_COMM_WORLD_LOCAL_RANK is not set");
	ENVIRONMENT("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "3",
		    "OMPI_COMM_WORLD_LOCAL_RANK", "0", "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "set BPS_NODES");
}

TEST(mpich)
{
	struct bps_join_params p;

	/* mpiexec.hydra inside a Slurm job, whose step is the helper on this machine. */
	ENVIRONMENT("PMI_RANK", "3", "PMI_SIZE", "4", "MPI_LOCALRANKID", "1", "MPI_LOCALNRANKS",
		    "2", "SLURM_STEP_ID", "0", "SLURM_PROCID", "0", "SLURM_NTASKS", "2");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ASSERT_TRUE(!p.job);
	ENVIRONMENT("PMI_RANK", "2", "PMI_SIZE", "4", "MPI_LOCALRANKID", "1", "MPI_LOCALNRANKS",
		    "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "machine by machine");
	ENVIRONMENT("PMI_RANK", "2", "PMI_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "MPI_LOCALRANKID is not set, but PMI_RANK is");
	ENVIRONMENT("PMI_RANK", "4", "PMI_SIZE", "4", "MPI_LOCALRANKID", "0", "MPI_LOCALNRANKS",
		    "2");
	ASSERT_FAILS(read_params(&p), EINVAL, "PMI_RANK is 4, but PMI_SIZE is 4");
	/* srun --mpi=pmi2 says both. */
	ENVIRONMENT("PMI_RANK", "1", "PMI_SIZE", "2", "SLURM_STEP_ID", "3", "SLURM_PROCID", "1",
		    "SLURM_STEP_NUM_TASKS", "2", "SLURM_STEP_NUM_NODES", "2", "SLURM_LOCALID", "0",
		    "SLURM_NODEID", "1", "SLURM_STEP_TASKS_PER_NODE", "1(x2)");
	ASSERT_SHAPE(1, 2, 0, 1, 1, 2);
	ENVIRONMENT("MV2_COMM_WORLD_RANK", "3", "MV2_COMM_WORLD_SIZE", "4",
		    "MV2_COMM_WORLD_LOCAL_RANK", "1", "MV2_COMM_WORLD_LOCAL_SIZE", "2", "PMI_RANK",
		    "9");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
}

TEST(pmix)
{
	struct bps_join_params p;

	ENVIRONMENT("PMIX_RANK", "1", "PMIX_NAMESPACE", "prterun-host-7@1");
	ASSERT_FAILS(read_params(&p), EINVAL, "PMIX_RANK is set, but nothing says how many ranks");
	ENVIRONMENT("PMIX_RANK", "1", "BPS_SIZE", "4");
	ASSERT_SHAPE(1, 4, 1, 4, 0, 1);
	ENVIRONMENT("PMIX_RANK", "3", "BPS_SIZE", "4", "BPS_LOCAL_SIZE", "2");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ENVIRONMENT("PMIX_RANK", "4", "BPS_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "PMIX_RANK is 4, but BPS_SIZE is 4");
}

TEST(kubernetes)
{
	struct bps_join_params p;

	ENVIRONMENT("JOB_COMPLETION_INDEX", "2", "BPS_SIZE", "4", "BPS_JOB", "resnet");
	ASSERT_SHAPE(2, 4, 0, 1, 2, 4);
	ASSERT_STR(p.job, "resnet");
	ENVIRONMENT("JOB_COMPLETION_INDEX", "2");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
	ENVIRONMENT("JOB_COMPLETION_INDEX", "4", "BPS_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "JOB_COMPLETION_INDEX is 4, but BPS_SIZE is 4");
	ENVIRONMENT("JOB_COMPLETION_INDEX", "two", "BPS_SIZE", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "JOB_COMPLETION_INDEX is \"two\"");
	/* A PyTorchJob: one rank a pod, or torchrun in each. */
	ENVIRONMENT("RANK", "1", "WORLD_SIZE", "3", "MASTER_ADDR", "job-master-0", "MASTER_PORT",
		    "23456", "PET_NNODES", "3", "PET_NODE_RANK", "1");
	ASSERT_SHAPE(1, 3, 0, 1, 1, 3);
	ENVIRONMENT("RANK", "3", "WORLD_SIZE", "6", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2",
		    "GROUP_RANK", "1", "PET_NNODES", "3", "PET_NODE_RANK", "1");
	ASSERT_SHAPE(3, 6, 1, 2, 1, 3);
}

TEST(settings_alone)
{
	struct bps_join_params p;

	memset(&p, 0xee, sizeof(p));
	p.size = sizeof(p);
	ENVIRONMENT("RANK", "nonsense", "SLURM_STEP_ID", "0", "BPS_RANK", "7", "BPS_JOB", "j",
		    "BPS_SECRET", "s", "BPS_TIMEOUT", "5s", "BPS_MIN_SERVERS", "2");
	ASSERT_OK(bps_join_params_from_settings(&p));
	ASSERT_STR(p.job, "j");
	ASSERT_EQ(p.secret_len, 1);
	ASSERT_EQ(p.timeout_ms, 5000);
	ASSERT_EQ(p.min_servers, 2);
	ASSERT_EQ(p.rank + p.world_size + p.local_rank + p.local_size + p.node + p.n_nodes, 0);
	ENVIRONMENT("BPS_TIMEOUT", "soon");
	ASSERT_FAILS(bps_join_params_from_settings(&p), EINVAL, "BPS_TIMEOUT");
	ASSERT_FAILS(bps_join_params_from_settings(NULL), EINVAL, "NULL");
}

#define SLURM(rank, n, local, node, nodes)                                                     \
	"SLURM_STEP_ID", "0", "SLURM_PROCID", rank, "SLURM_NTASKS", n, "SLURM_LOCALID", local, \
		"SLURM_NODEID", node, "SLURM_NNODES", nodes

TEST(slurm)
{
	struct bps_join_params p;

	ENVIRONMENT(SLURM("5", "6", "1", "2", "3"), "SLURM_NTASKS_PER_NODE", "2", "SLURM_JOB_ID",
		    "1234");
	ASSERT_SHAPE(5, 6, 1, 2, 2, 3);
	ASSERT_STR(p.job, "slurm-1234.0");
	ENVIRONMENT(SLURM("5", "6", "1", "2", "3"), "SLURM_NTASKS_PER_NODE", "2(x3)",
		    "SLURM_JOB_ID", "1234", "SLURM_STEP_ID", "7");
	ASSERT_SHAPE(5, 6, 1, 2, 2, 3);
	ASSERT_STR(p.job, "slurm-1234.7");
	ENVIRONMENT(SLURM("6", "7", "0", "3", "4"), "SLURM_TASKS_PER_NODE", "2(x3),1");
	ASSERT_SHAPE(6, 7, 0, 1, 3, 4);
	ENVIRONMENT(SLURM("1", "7", "1", "0", "4"), "SLURM_TASKS_PER_NODE", "2(x3),1");
	ASSERT_SHAPE(1, 7, 1, 2, 0, 4);
	/* The most that a node may have is not what it has. */
	ENVIRONMENT(SLURM("6", "7", "2", "1", "2"), "SLURM_NTASKS_PER_NODE", "4",
		    "SLURM_TASKS_PER_NODE", "4,3");
	ASSERT_SHAPE(6, 7, 2, 3, 1, 2);
	/* A step that is smaller than its job. */
	ENVIRONMENT(SLURM("3", "4", "1", "1", "2"), "SLURM_STEP_TASKS_PER_NODE", "2(x2)",
		    "SLURM_TASKS_PER_NODE", "8(x2)");
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
	ENVIRONMENT(SLURM("3", "4", "1", "1", "2"));
	ASSERT_SHAPE(3, 4, 1, 2, 1, 2);
}

/* As srun and sbatch of Slurm 22.05 have set it. */
TEST(slurm_as_recorded)
{
	struct bps_join_params p;

	/* srun -N2 -n5 */
	ENVIRONMENT("SLURM_JOB_ID", "1", "SLURM_LOCALID", "0", "SLURM_NNODES", "2", "SLURM_NODEID",
		    "1", "SLURM_NODELIST", "n[1-2]", "SLURM_NTASKS", "5", "SLURM_PROCID", "4",
		    "SLURM_STEPID", "0", "SLURM_STEP_ID", "0", "SLURM_STEP_NODELIST", "n[1-2]",
		    "SLURM_STEP_NUM_NODES", "2", "SLURM_STEP_NUM_TASKS", "5",
		    "SLURM_STEP_TASKS_PER_NODE", "4,1", "SLURM_TASKS_PER_NODE", "4,1");
	ASSERT_SHAPE(4, 5, 0, 1, 1, 2);
	ASSERT_STR(p.job, "slurm-1.0");
	/* srun -N1 -n2 in a batch job of two nodes and four tasks, whose own variables have stayed. */
	ENVIRONMENT("SLURM_JOB_ID", "2", "SLURM_LOCALID", "1", "SLURM_NNODES", "2", "SLURM_NODEID",
		    "0", "SLURM_NTASKS", "4", "SLURM_PROCID", "1", "SLURM_STEP_ID", "0",
		    "SLURM_STEP_NUM_NODES", "1", "SLURM_STEP_NUM_TASKS", "2",
		    "SLURM_STEP_TASKS_PER_NODE", "2", "SLURM_TASKS_PER_NODE", "3,1");
	ASSERT_SHAPE(1, 2, 1, 2, 0, 1);
	/* The batch script itself, which no srun has started. */
	ENVIRONMENT("SLURM_JOB_ID", "2", "SLURM_LOCALID", "0", "SLURM_NNODES", "2", "SLURM_NODEID",
		    "0", "SLURM_NTASKS", "4", "SLURM_PROCID", "0", "SLURM_TASKS_PER_NODE", "3,1");
	ASSERT_SHAPE(0, 1, 0, 1, 0, 1);
}

TEST(slurm_that_does_not_fit)
{
	static const char *const layouts[] = { "x",
					       "2(x",
					       "2(x)",
					       "2(3)",
					       "2(x2),",
					       "2(x2);1",
					       ",3",
					       "4,4",
					       "3",
					       "1,1,1,1,1",
					       "99999999999999999999(x2)",
					       "2(x99999999999)",
					       "5(x0)" };
	struct bps_join_params p;

	ENVIRONMENT("SLURM_STEP_ID", "0", "SLURM_PROCID", "5", "SLURM_NTASKS", "6");
	ASSERT_FAILS(read_params(&p), EINVAL, "SLURM_LOCALID is not set");
	ENVIRONMENT(SLURM("6", "6", "1", "1", "2"), "SLURM_STEP_TASKS_PER_NODE", "4,2");
	ASSERT_FAILS(read_params(&p), EINVAL, "SLURM_PROCID is 6, but SLURM_NTASKS is 6");
	for (size_t i = 0; i < ARRAY_SIZE(layouts); i++) {
		ENVIRONMENT(SLURM("4", "5", "1", "1", "2"), "SLURM_TASKS_PER_NODE", layouts[i]);
		ASSERT_FAILS(read_params(&p), EINVAL, "SLURM_TASKS_PER_NODE does not say");
	}
	ENVIRONMENT(SLURM("4", "5", "1", "1", "2"), "SLURM_TASKS_PER_NODE", "x", "BPS_LOCAL_SIZE",
		    "2");
	ASSERT_SHAPE(4, 5, 1, 2, 1, 2);
}

TEST(byteps)
{
	struct bps_join_params p;

	ENVIRONMENT("DMLC_WORKER_ID", "2", "DMLC_NUM_WORKER", "3", "BYTEPS_LOCAL_RANK", "1",
		    "BYTEPS_LOCAL_SIZE", "4", "DMLC_NUM_SERVER", "5", "BYTEPS_FORCE_DISTRIBUTED",
		    "1", "BYTEPS_PARTITION_BYTES", "4096000", "DMLC_PS_ROOT_URI", "10.0.0.1",
		    "DMLC_PS_ROOT_PORT", "9000");
	ASSERT_SHAPE(9, 12, 1, 4, 2, 3);
	ASSERT_EQ(p.min_servers, 5);
	ASSERT_EQ(p.force_distributed, 1);
	ASSERT_EQ(p.part_bytes, 4096000);
	ASSERT_STR(p.job, "10.0.0.1-9000");
	ENVIRONMENT("DMLC_WORKER_ID", "0", "DMLC_NUM_WORKER", "2", "BYTEPS_LOCAL_RANK", "1",
		    "BYTEPS_LOCAL_SIZE", "2", "BYTEPS_GLOBAL_RANK", "3");
	ASSERT_SHAPE(3, 4, 1, 2, 0, 2);
	ENVIRONMENT("DMLC_WORKER_ID", "0", "DMLC_NUM_WORKER", "2", "BYTEPS_LOCAL_RANK", "1",
		    "BYTEPS_LOCAL_SIZE", "2", "BYTEPS_GLOBAL_RANK", "4");
	ASSERT_FAILS(read_params(&p), EINVAL, "BYTEPS_GLOBAL_RANK is 4, but DMLC_NUM_WORKER times");
	ENVIRONMENT("DMLC_WORKER_ID", "2", "DMLC_NUM_WORKER", "3", "BYTEPS_LOCAL_RANK", "1");
	ASSERT_FAILS(read_params(&p), EINVAL,
		     "BYTEPS_LOCAL_SIZE is not set, but DMLC_WORKER_ID is");
	ENVIRONMENT("DMLC_WORKER_ID", "70000", "DMLC_NUM_WORKER", "70000", "BYTEPS_LOCAL_RANK", "1",
		    "BYTEPS_LOCAL_SIZE", "70000");
	ASSERT_FAILS(read_params(&p), EINVAL, "too large");
	ENVIRONMENT("DMLC_WORKER_ID", "0", "DMLC_NUM_WORKER", "1", "BYTEPS_LOCAL_RANK", "0",
		    "BYTEPS_LOCAL_SIZE", "1", "DMLC_NUM_SERVER", "many");
	ASSERT_FAILS(read_params(&p), EINVAL, "DMLC_NUM_SERVER");
}
