/*
 * libbps_client: the trainer's end of bps.
 *
 * A trainer opens a client (one connection to the daemon of its machine), joins a job as one of its ranks, names
 * tensors, and submits operations on them. Operations run in the daemon while the trainer computes; each submission
 * gives a request that can be polled, waited for, or cancelled.
 *
 * Conventions
 *   Return values   0, or a negative errno. The text that explains the last failure of the calling thread is
 *                   bps_error(). Out-parameters (ret_...) are written on success only.
 *   Threads         Every function may be called from any thread unless it says otherwise. The library starts no
 *                   thread, installs no signal handler and writes nothing to stderr.
 *   Memory          Between submit and completion the memory of an operation belongs to the daemon: the caller must
 *                   not read, write or free it. After completion or failure it is the caller's again.
 *                   Memory from bps_memory_alloc() is used where it is: nothing is copied on the way in. Any other
 *                   pointer works too: its data is copied once into a staging area at submit and back when the
 *                   completion is seen by bps_request_wait(), bps_request_poll() or bps_client_dispatch().
 *   Fork            A child made by fork() must not use its parent's client: every call there returns -EPERM. It may
 *                   open its own. The parent is not disturbed.
 *   A lost daemon   is waited for: see restart_timeout_ms of bps_open_params. When it is restarted, or another version of
 *                   it takes its place, the client connects again from inside whatever call is made next, shares its
 *                   memory, resumes its job, and submits again what had not completed. Calls that block take longer,
 *                   none fails; results are the same bits; what had completed stays so. That is so for jobs that
 *                   have handed over no memory of a CUDA device; and outside a job.
 *                   A daemon that is lost to any other job, does not come back in time, or breaks the protocol is a
 *                   sticky state: every call returns -ESHUTDOWN, every request ends with it, and the descriptor of
 *                   bps_client_fd() stays valid and readable.
 *   Sizes           Structures that the caller fills start with `size`, which must be sizeof the structure; a field
 *                   that is 0 or NULL means its default.
 *
 * Values. The reduced value of an element depends on the contributions, on how ranks are grouped by node, on the
 * operation and on the type, and on nothing else: ranks of a node are reduced in rank order, then nodes in node order.
 * float16 and bfloat16 are accumulated in float32 and rounded once per hop. See libbps_client(3).
 */
#ifndef BPS_H
#define BPS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BPS_VERSION_MAJOR 0
#define BPS_VERSION_MINOR 1
#define BPS_VERSION_PATCH 0

struct bps_client;
struct bps_memory;
struct bps_tensor;
struct bps_request;

/* Element types. */
enum bps_dtype {
	BPS_FLOAT64 = 1,
	BPS_FLOAT32 = 2,
	BPS_FLOAT16 = 3,
	BPS_BFLOAT16 = 4,
	BPS_INT64 = 5,
	BPS_INT32 = 6,
	BPS_INT16 = 7,
	BPS_INT8 = 8,
	BPS_UINT8 = 9,
	BPS_BOOL = 10
};

/* Operations. size is the job's number of ranks. */
enum bps_operation {
	/* output = reduction over all ranks' inputs. */
	BPS_PUSH_PULL = 1,
	/* output = input of rank `root`. On the root output may be NULL, elsewhere input. */
	BPS_BROADCAST = 2,
	/* output = inputs of rank 0, 1, ... one after the other. counts: elements of each rank (size entries). */
	BPS_ALL_GATHER = 3,
	/* The reduction over all inputs is cut into blocks of counts[r] elements; output = block of this rank. */
	BPS_REDUCE_SCATTER = 4,
	/* input is cut into blocks for rank 0, 1, ...; output = the blocks meant for this rank, from rank 0, 1, ... */
	BPS_ALL_TO_ALL = 5,
	/* Completes when every rank has submitted it. Has no data. */
	BPS_BARRIER = 6,
	/*
	 * The tensor is a table of rows of `width` elements, of which each rank gives some: their numbers and values, in
	 * any order, repeated as it likes. output = the rows that any rank gave, ascending, each once, and the reduction
	 * of what was given for it. How many that are bps_request_rows() says.
	 */
	BPS_PUSH_PULL_ROWS = 7,
	/*
	 * Adds the input to what servers keep of the tensor from the first time on, which was 0; output = that, with what
	 * has come from other ranks until then. Waits for no rank, or for the slowest to come within the job's staleness. Of jobs
	 * with `asynchronous`; the reduction is BPS_SUM.
	 */
	BPS_ACCUMULATE = 8,
	/*
	 * Takes this rank's turn at an operation of the tensor in which it cannot take part: whatever the others submit, it fails
	 * on all ranks with -EOPNOTSUPP and words that name this one. For ranks that follow: bps_client_follow().
	 */
	BPS_REFUSE = 9
};

/*
 * Reductions of BPS_PUSH_PULL, BPS_REDUCE_SCATTER and BPS_PUSH_PULL_ROWS. Integers wrap; their average does not,
 * and is floor(sum / size); through servers it fails with -ERANGE if a node's sum is no number of their type. A NaN in a
 * result is the canonical quiet NaN. bool: sum and max are or, min is and; it has no average.
 */
enum bps_reduction { BPS_SUM = 1, BPS_AVERAGE = 2, BPS_MIN = 3, BPS_MAX = 4 };

/* Where the memory of an operation is. */
enum bps_memory_kind {
	BPS_MEMORY_HOST = 0,
	/*
	 * On a CUDA device: see the manual page bps_gpu in section 7. The operation takes its place in a stream, and what the stream
	 * does afterwards can be made to wait for it, without anybody waiting on the host.
	 */
	BPS_MEMORY_CUDA = 1
};

/* How the GPUs of a node are reduced before the network: see the manual page bps_gpu. All ranks of a job say the same. */
enum bps_gpu_reduce {
	BPS_GPU_REDUCE_AUTO = 0,   /* as the topology suggests */
	BPS_GPU_REDUCE_NCCL = 1,   /* all of the node's by NCCL */
	BPS_GPU_REDUCE_SWITCH = 2, /* those behind one PCIe switch by NCCL, then by the CPU */
	BPS_GPU_REDUCE_HOST = 3,   /* by the CPU: the same bits as for memory of the host */
	BPS_GPU_REDUCE_ROOTS =
		4 /* as AUTO, and by way of one GPU of each PCIe switch to the host */
};

/*
 * Orders in which all ranks submit operations, whatever their tensors, and whatever they submit in no order or in the
 * other one beside. The order of calls is that of one thread of the program; the order of programs is that in which
 * something runs for it, in threads of its own, what it has compiled.
 */
enum bps_order { BPS_ORDER_CALLS = 1, BPS_ORDER_PROGRAMS = 2 };

/* Elements of a tensor that differ from rank to rank or from one operation to the next. */
#define BPS_VARIABLE UINT64_MAX

/* Wait for ever. */
#define BPS_FOREVER (-1)

/* Why the last call that failed in this thread did so: never NULL; valid until this thread's next call of the library. */
const char *bps_error(void);

/* "0.1.0", of the library that is loaded. */
const char *bps_version(void);

/* Bytes of one element; 0 for an unknown type. */
size_t bps_dtype_size(int dtype);

/* -- Connection ------------------------------------------------------------------------------------------------- */

struct bps_open_params {
	size_t size;
	/* The daemon's socket. NULL: $BPS_SOCKET, else $XDG_RUNTIME_DIR/bps/bps.sock if it exists, else /run/bps/bps.sock. */
	const char *socket;
	/* How long to try while nobody listens, in ms; 0: try once. A daemon that restarts is found within it. */
	int64_t timeout_ms;
	/*
	 * How long a daemon that is lost is waited for, in ms; 0: $BPS_RESTART_TIMEOUT (in seconds, or as 500ms, 30s, 10min;
	 * 0 there: not at all), else 60 s; negative: not at all.
	 */
	int64_t restart_timeout_ms;
};

/*
 * Connects to the daemon of this machine and agrees on a version. params may be NULL. The client is to be released with
 * bps_client_close(). Fails with -ENOENT or -ECONNREFUSED (no daemon there), -EACCES (not in its group),
 * -EPROTONOSUPPORT (no common version; the text names both), -ETIMEDOUT, -ENOMEM.
 */
int bps_client_open(const struct bps_open_params *params, struct bps_client **ret_client);

/*
 * Leaves the job, disconnects and releases the client. Requests not yet complete end with -ECANCELED; their memory is the
 * caller's again on return. Objects made from the client (tensors, memory, requests) must still be released, before or
 * after. NULL is allowed. No other thread may be inside a call on this client.
 */
void bps_client_close(struct bps_client *client);
/*
 * Does what bps_client_close() does, because of an error that is about to end the process. error: that error in UTF-8, one
 * line, of which 300 bytes are told; NULL or "": an unknown one. The other ranks of the job are told "rank 1 (pid 4711) of job
 * x ended by an error: " and the line. The daemon may write to buffers of requests that are not complete for a moment after.
 */
void bps_client_abort(struct bps_client *client, const char *error);

/*
 * A descriptor for the caller's own poll(2) loop: readable when bps_client_dispatch() has something to do. It is the
 * library's and stays the same for the life of the client.
 */
int bps_client_fd(struct bps_client *client);

/* Handles what has come, without blocking: completions, answers, the loss of the daemon. 0 or a negative errno. */
int bps_client_dispatch(struct bps_client *client);

/*
 * What works, but otherwise than the caller may expect: for instance, memory of CUDA devices that is copied through the
 * host's, and why. Each is told once, one a call; NULL when there is no other. Valid until the client is closed.
 */
const char *bps_client_notice(struct bps_client *client);

/* -- Job -------------------------------------------------------------------------------------------------------- */

struct bps_join_params {
	size_t size;
	const char *job;     /* its name: 1 to 63 of A-Z a-z 0-9 . _ - ; NULL: "default" */
	const void *secret;  /* presented alike by all ranks; NULL: none */
	size_t secret_len;   /* at most 255 */
	uint32_t rank;	     /* of this trainer in the job, 0 to world_size - 1 */
	uint32_t world_size; /* ranks of the job; 0 means 1 */
	/* Where it is. local_size and n_nodes both 0: all ranks are on this machine, and local_rank 0 means rank. */
	uint32_t local_rank; /* among the job's ranks on this machine */
	uint32_t local_size; /* the job's ranks on this machine; 0: world_size / n_nodes */
	uint32_t node;	     /* number of this machine in the job, 0 to n_nodes - 1 */
	uint32_t n_nodes;    /* machines of the job; 0: world_size / local_size */
	/* Deadlines: for all ranks to come; for a request to complete, unless it says otherwise. */
	int64_t timeout_ms;	    /* 0: 60 s */
	int64_t request_timeout_ms; /* 0: 600 s */
	/* How it runs. */
	uint32_t min_servers;  /* wait for so many summation servers; 0: whatever is there */
	uint32_t part_bytes;   /* largest part sent as one message; 0: the cluster's setting */
	int force_distributed; /* not 0: go through servers though all ranks are on one machine */
	int gpu_reduce;	       /* enum bps_gpu_reduce; of operations on CUDA memory */
	/*
	 * What it does about ranks that are late; all 0: it waits. See STRAGGLERS in the manual page bps in section 7. With a
	 * quorum or asynchronous the job goes through servers, each rank by itself, and does not outlive a daemon.
	 */
	uint32_t quorum;  /* ranks that PUSH_PULL goes on with; the next one has what came late */
	int asynchronous; /* not 0: there is ACCUMULATE */
	int64_t quorum_timeout_ms; /* since the first came, before it goes on without all; 0: at once */
	uint32_t staleness;	   /* rounds the last may be behind; 0: quorum 8, ACCUMULATE any */
	/*
	 * Not 0: the job goes on without a rank that dies, leaves, or is later than its requests' deadline, as long as there
	 * are min_ranks (0: 1); see bps-recovery(7), ELASTIC JOBS. newcomer not 0: this trainer asks to be let in by the next
	 * bps_client_regroup() of such a job, which need not run yet, within timeout_ms; rank, world_size and where it is are
	 * not looked at, and max_ranks (0: no bound) is what the job's own ranks say, as are min_ranks, min_servers, part_bytes,
	 * request_timeout_ms, gpu_reduce and gpu_roots.
	 */
	int elastic;
	uint32_t min_ranks;
	uint32_t max_ranks;
	int newcomer;
	/* A bit for each local rank: whose GPUs' sums of NCCL go to the host and back by way of these; 0: as gpu_reduce says. */
	uint64_t gpu_roots;
};

/*
 * Fills params from the environment: the first of these that is set, by its rank variable, and BPS_* over all of them:
 *   bps      BPS_RANK BPS_SIZE BPS_LOCAL_RANK BPS_LOCAL_SIZE BPS_NODE BPS_NODES BPS_JOB BPS_SECRET BPS_TIMEOUT
 *            BPS_REQUEST_TIMEOUT BPS_MIN_SERVERS BPS_PART_BYTES BPS_FORCE_DISTRIBUTED BPS_GPU_REDUCE
 *            BPS_GPU_ROOTS (or BYTEPS_REDUCE_ROOTS) BPS_QUORUM BPS_QUORUM_TIMEOUT BPS_ASYNC (or BYTEPS_ENABLE_ASYNC)
 *            BPS_STALENESS BPS_ELASTIC BPS_MIN_RANKS BPS_MAX_RANKS BPS_NEWCOMER
 *   torchrun RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID MASTER_ADDR MASTER_PORT
 *   Open MPI OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK _LOCAL_SIZE; MVAPICH the same with MV2
 *   MPICH    PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS, Intel MPI too
 *   PMIx     PMIX_RANK, with BPS_SIZE
 *   Slurm    SLURM_STEP_ID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID
 *            SLURM_STEP_NUM_NODES SLURM_JOB_ID
 *   BytePS   DMLC_WORKER_ID DMLC_NUM_WORKER BYTEPS_LOCAL_RANK BYTEPS_LOCAL_SIZE DMLC_NUM_SERVER
 *            BYTEPS_FORCE_DISTRIBUTED BYTEPS_PARTITION_BYTES
 *   Kubernetes, indexed Job: JOB_COMPLETION_INDEX, with BPS_SIZE
 * None set: one rank. Timeouts are in seconds, or as 500ms, 30s, 10min, 1h; bytes may be as 512K or 4M. Strings point
 * into the environment, or, for a job's name that is made from several variables, into memory of the calling thread
 * that lasts until its next call of this function or of bps_client_join(). Fails with -EINVAL when a variable is
 * missing or is not a number, or when they leave open which ranks are on which machine; the text names the variable.
 * params->size must be set; everything else is overwritten.
 */
int bps_join_params_from_environment(struct bps_join_params *params);

/*
 * The same for a program that knows which rank it is: BPS_JOB, BPS_SECRET and the variables of the deadlines and of how
 * the job runs. rank, world_size and where it is are 0, whatever a launcher has set, and are to be filled in.
 */
int bps_join_params_from_settings(struct bps_join_params *params);

/*
 * Becomes a rank of a job; blocks until all its ranks have come. params NULL: from the environment. A client is in one
 * job at a time. Fails with -ETIMEDOUT (the text names the ranks that are missing), -EINVAL (ranks disagree about the
 * job; the text names both sides), -EEXIST (another trainer is that rank), -EISCONN (already in a job). Ranks with another
 * secret are another job of that name, for which the ranks of this one do not wait.
 */
int bps_client_join(struct bps_client *client, const struct bps_join_params *params);

/* Leaves the job in good order; as bps_client_close() does, but the connection stays. Tensors of the job are void. */
int bps_client_leave(struct bps_client *client);

/*
 * Lets newcomers into an elastic job, and gives its ranks a new layout. Every rank calls it at the same place of the
 * program, with no request under way; it blocks until all have, or are dropped because they have not within the job's
 * request timeout. Then ranks and size are new: members in the order of their ranks, behind them the newcomers, who come
 * out of bps_client_join() at this moment. Tensors stay declared on those who had declared them; their rounds begin anew.
 * Fails with -EBUSY (this rank has requests under way; nothing has changed), -EINVAL (the job is not elastic), -ENOTCONN, or
 * as the job did: -ESTALE when this rank was dropped from it, and may come
 * again as a newcomer.
 */
int bps_client_regroup(struct bps_client *client);

/*
 * What the client is in its job, also when that has failed. Outside a job: -ENOTCONN. In an elastic job rank
 * and size change when bps_request_wait() or bps_request_poll() says for the first time that a request with a later
 * membership is complete, and in bps_client_regroup(); where a rank is changes with the latter alone.
 */
int bps_client_rank(const struct bps_client *client);
int bps_client_size(const struct bps_client *client);
int bps_client_local_rank(const struct bps_client *client);
int bps_client_local_size(const struct bps_client *client);
int bps_client_node(const struct bps_client *client);

/* What bps_client_status() says. */
struct bps_status {
	size_t size;
	uint64_t run; /* number of the job's run; 0: not all ranks have come, or in no job */
	uint64_t n_rounds, n_bytes; /* completed and reduced on this machine */
	uint64_t n_under_way;	    /* parts, on this machine */
	uint32_t world_size, n_nodes;
	uint32_t n_here; /* ranks connected to this machine's daemon */
	char state
		[16]; /* "" (in no job), "waiting" (a newcomer), "forming", "running", "leaving" */
	char waiting_for[160]; /* "rank 3 (tensor x, round 17) for 2.1 s", or "" */
	char node[64];	       /* name of this machine in its cluster */
	char cluster[16]; /* where the daemon's list of daemons comes from; "single": it is alone */
};

/*
 * Asks the daemon how this client's own job is, also while another thread is in bps_client_join(); waits for a daemon that is
 * being restarted. ret->size must be set. -EBUSY while another thread asks, -EOPNOTSUPP from an older daemon.
 */
int bps_client_status(struct bps_client *client, struct bps_status *ret);

/*
 * A rank that has come to the end of its own work and follows the others (0: it does not any more): bps_client_begun() tells of the
 * operations that they begin, so that it can take part in them, with zeros for a sum, say. idle: it follows, and nothing is under
 * way of what it had submitted before: once all ranks of the job have said so, there is nothing more to come. Waits for the daemon
 * alone. A daemon that is restarted learns of it, and nothing is told twice. Fails with -EINVAL (the ranks of the job do not all
 * wait for one another: it is elastic, has a quorum or is asynchronous), -EOPNOTSUPP (a daemon of an older version), -EBUSY
 * (another thread says so), -EPIPE (a rank has left the job), -ENOTCONN. Over several nodes daemons of an older version tell
 * nothing of what their ranks begin.
 */
int bps_client_follow(struct bps_client *client, int follows, int idle);

/* An operation that other ranks have begun. */
struct bps_begun {
	size_t size;
	char name
		[256]; /* of its tensor, with which it is declared: dtype and elements as in bps_tensor_declare() */
	int dtype;
	uint64_t elements;
	uint64_t round; /* n-th of the tensor, from 1: the next that this rank submits on it */
	int operation; /* enum bps_operation; 0: it has failed, and nobody knows any more what it was: BPS_REFUSE does for it */
	int reduction; /* enum bps_reduction, or 0 */
};

/*
 * Of a rank that follows: waits for an operation that others have begun and this rank has not submitted, in the order of its tensor;
 * told once, and to be submitted before the next call. ret->size must be set. 1: ret says which; 0: all ranks follow and are idle;
 * -ETIMEDOUT; -ECANCELED (this rank does not follow); -EPIPE (a rank has left the job: never all will follow); -EOPNOTSUPP (others
 * have begun something of an element type that this library does not know); or as the job or the connection has failed. What
 * others submit by bps_barrier() is called "bps:barrier", and submitted by it here.
 */
int bps_client_begun(struct bps_client *client, int64_t timeout_ms, struct bps_begun *ret);

/* -- Memory ----------------------------------------------------------------------------------------------------- */

/*
 * Allocates len bytes (rounded up to pages, zeroed) that the daemon can reach: operations on pointers inside copy
 * nothing on the way in. To be released with bps_memory_free(). -ENOMEM; -EDQUOT when the daemon's limit for one
 * session is reached; -EMFILE: each memory keeps a descriptor, to be shared with the next daemon by.
 */
int bps_memory_alloc(struct bps_client *client, size_t len, struct bps_memory **ret_memory);

/*
 * The same for memory that the caller has made with memfd_create(2) and mapped at data: the first len bytes of fd. The
 * library adds F_SEAL_SHRINK and refuses a descriptor that cannot take it (-EPERM). The mapping stays the caller's and
 * must last until bps_memory_free(); the descriptor may be closed at once.
 */
int bps_memory_import(struct bps_client *client, int fd, void *data, size_t len,
		      struct bps_memory **ret_memory);
void *bps_memory_data(const struct bps_memory *memory);
size_t bps_memory_len(const struct bps_memory *memory);

/* Releases; NULL is allowed. Requests that use it must be complete (else it is released when they are). */
void bps_memory_free(struct bps_memory *memory);

/* -- Tensors ---------------------------------------------------------------------------------------------------- */

/*
 * Names a tensor of the job: same name, same tensor, on every rank. elements: of this rank's input, the same on all
 * ranks, or BPS_VARIABLE. Does not wait: the comparison with the other ranks goes on meanwhile, operations may be
 * submitted at once, and a rank that declared it otherwise makes them fail with -EINVAL and a text that names both.
 * Declaring a name twice with the same facts gives the same tensor again. To be released with bps_tensor_free(); the
 * name stays declared until the job is left. Where a job has nearly max_tensors of them, the daemons forget names that no
 * rank holds and none has used for long: so a program may name tensors anew in each step. Not so in a job through servers
 * that is elastic, has a quorum or is asynchronous.
 * Names that start with "bps:" are the library's own.
 * Fails with -EINVAL (bad name or type), -EEXIST (declared otherwise by this client), -ENOTCONN, -ENOMEM. That the
 * daemon has too many (-EDQUOT) is said by bps_tensor_wait() and bps_submit().
 */
int bps_tensor_declare(struct bps_client *client, const char *name, int dtype, uint64_t elements,
		       struct bps_tensor **ret_tensor);

/*
 * The same of an array of n_dims dimensions, whose elements are their product: ranks that declare it with other dimensions differ,
 * though there be as many elements. A number has no dimensions, and is an array of one. Who declares it without dimensions, by
 * bps_tensor_declare(), agrees with all. Dimensions in more than 63 characters (2x3 is three) are compared by how many they are
 * and by their product. dims: of this call. Also fails with -EINVAL where there are too many elements.
 */
int bps_tensor_declare_shaped(struct bps_client *client, const char *name, int dtype,
			      const uint64_t *dims, unsigned n_dims,
			      struct bps_tensor **ret_tensor);

/* Waits until all ranks have declared the tensor alike. -EINVAL as above; -ETIMEDOUT. */
int bps_tensor_wait(struct bps_tensor *tensor, int64_t timeout_ms);

void bps_tensor_free(struct bps_tensor *tensor);

/* -- Operations ------------------------------------------------------------------------------------------------- */

struct bps_submit_params {
	size_t size;
	int operation; /* enum bps_operation */
	int reduction; /* enum bps_reduction; 0: BPS_SUM. Of the operations that reduce */
	/*
	 * Elements of the tensor's type, naturally aligned. In place: input equal to output; or this rank's block of
	 * output (ALL_GATHER); or output this rank's block of input (REDUCE_SCATTER). Else they must not overlap.
	 */
	const void *input;
	void *output;
	uint64_t input_count;  /* 0: as declared; of a BPS_VARIABLE tensor: as counts say, else 0 */
	uint64_t output_count; /* room in elements; 0: what the operation needs */
	/*
	 * Elements of each rank's block, world_size entries, the same on all ranks; NULL: equal blocks.
	 * ALL_GATHER: what each rank gives. REDUCE_SCATTER: what each rank gets. ALL_TO_ALL: what this rank sends to each.
	 * Copied before the call returns.
	 */
	const uint64_t *counts;
	/* ALL_TO_ALL: what this rank gets from each; NULL: equal blocks of output_count, or, if 0, of input_count. */
	const uint64_t *receive_counts;
	uint32_t root; /* BROADCAST */
	/*
	 * Larger is more urgent (front layers); orders the work, never changes results. Over servers tensors of
	 * about the same priority, an eighth of the job's bytes at most, may go in the order of submission.
	 */
	int32_t priority;
	int64_t timeout_ms; /* for the request to complete; 0: the job's setting */
	/*
	 * PUSH_PULL_ROWS. input_count and output_count are elements here, too, and whole rows: what this rank gives, may be
	 * 0, and the room for the result; whoever has too little gets -ENOSPC. The tensor is declared with all elements of
	 * the table, and the same on all ranks is the width. Nothing overlaps.
	 */
	uint64_t width;		   /* elements of a row */
	const int64_t *input_rows; /* number of each row of input, 0 to rows of the table - 1 */
	int64_t *output_rows;	   /* room for the number of each row of output */
	/*
	 * Of input and output both, on one device; everything else is on the host always. With BPS_MEMORY_CUDA the operation
	 * begins when `stream`, a CUstream or cudaStream_t, has come to this submission: what it does before may write the
	 * input. NULL is the default stream of the memory's context. Until the operation has completed, or another stream
	 * has been made to wait for it (bps_request_wait_stream()), no stream may use the memory. It must not be freed before
	 * it has completed; see bps_cuda_release() for when it is.
	 */
	int memory; /* enum bps_memory_kind */
	void *stream;
	/*
	 * PUSH_PULL of a job with a quorum, ACCUMULATE: not 0: wait for all ranks; the result has all that they contributed to
	 * the tensor until now, and is the same bits on each. All ranks say the same.
	 */
	int all_ranks;
	/*
	 * Of an operation that all ranks submit in one order with others, whatever their tensors:
	 * its number among those, from 1. When two ranks' n-th ones are of different tensors, or
	 * rounds of one, they fail at once with -EILSEQ and words that name both. 0: none of them,
	 * or what `order` says. PUSH_PULL_ROWS have none, nor do operations of an elastic job.
	 */
	uint64_t ordinal;
	/*
	 * enum bps_order: the operation gets the next ordinal of this order, unless it is refused.
	 * All front ends of a process that count so have one order. 0: none. In an elastic job it
	 * has no effect.
	 */
	int order;
	/*
	 * Of PUSH_PULL and REDUCE_SCATTER of a BPS_FLOAT32 tensor on memory of the host: enum bps_dtype of this rank's input,
	 * BPS_FLOAT16 or BPS_BFLOAT16; 0: the tensor's. The result has the bits of an input that was converted before, without
	 * the memory and the pass that this takes; ranks need not agree. input and output are the same or apart. -EOPNOTSUPP
	 * from an older daemon.
	 */
	uint64_t input_dtype;
	/*
	 * Of a rank that follows the others: which operation of the tensor it is to be, as bps_client_begun() says. -EALREADY: this
	 * rank has submitted it meanwhile, by another thread. 0: the next.
	 */
	uint64_t round;
};

/*
 * Submits one operation; never waits for other ranks. All ranks of the job must submit the same operations on a tensor
 * in the same order; the order among tensors is free. Gives a request to be released with bps_request_free().
 * Fails with -EINVAL (does not fit the tensor; the text says how), -ENOTCONN, -EAGAIN (4096 requests are outstanding:
 * wait for one), -ENOMEM or -EDQUOT (no room to stage memory that is not from bps_memory_alloc()), -ESHUTDOWN; of CUDA
 * memory also with -ENODEV (no driver here, or too old a one) and -EIO (the text names the driver's call and error).
 */
int bps_submit(struct bps_tensor *tensor, const struct bps_submit_params *params,
	       struct bps_request **ret_request);

/*
 * Takes the next ordinal of an order, for an operation that is submitted later with it, maybe by another thread. 0: the
 * job is elastic. Fails with -EINVAL.
 */
int bps_client_take_ordinal(struct bps_client *client, int order, uint64_t *ret_ordinal);

/*
 * The last ordinal of an order with which a request has ended with -EILSEQ, as bps_request_wait() or bps_request_poll()
 * have said; 0: none. Ranks that differ there have come to a tensor differently often: those that all submit after it
 * are to be others, whose names may have this number.
 */
uint64_t bps_client_differed(struct bps_client *client, int order);

/* Submits a BPS_BARRIER over all ranks. Barriers of a job form one sequence. */
int bps_barrier(struct bps_client *client, int64_t timeout_ms, struct bps_request **ret_request);

/* 1: complete (bps_request_wait() will not block), 0: not yet, or a negative errno that is about the call itself. */
int bps_request_poll(struct bps_request *request);

/*
 * Waits for completion. 0: done, the output holds the result. -ETIMEDOUT with the request still
 * under way when timeout_ms passed (BPS_FOREVER waits on; the request's own deadline still ends
 * it). Otherwise how the request ended: -EREMCHG (elastic job: its members have changed, and the
 * operation depends on who is which; the text says what to do), -ESTALE (this rank was dropped from
 * an elastic job, as it was late), -ETIME (deadline; the text names who is missing), -ECANCELED,
 * -EINVAL (ranks disagree), -EILSEQ (ranks submit in different orders: `ordinal`), -ERANGE (an
 * average of integers), -ENOSPC (PUSH_PULL_ROWS: the result has more rows than there is room for
 * here), -ECONNRESET or -EPIPE (a rank or server died; the text names it), -ESHUTDOWN. May be
 * called again and by several threads.
 */
int bps_request_wait(struct bps_request *request, int64_t timeout_ms);

/*
 * Makes a stream wait for a request on CUDA memory: what it is given after this call finds the result in the output. Does
 * not wait itself; any number of streams of the output's device may be made to. stream: as in bps_submit_params. After
 * it bps_request_wait() and bps_request_poll() tell how the operation ended, and that the daemon is done with the memory;
 * the output is to be used in the order of the streams.
 *
 * A request that fails later lets its streams go on, with an output of no meaning: before a result of theirs is
 * believed, bps_request_wait() is to say 0. A thread that waits inside CUDA cannot see the daemon die: a program that does
 * so for long has another one that polls bps_client_fd() and calls bps_client_dispatch(), which lets streams go on.
 *
 * Where there is nothing for a stream to wait for it waits on the host, exactly as bps_request_wait() does: if the request
 * is on host memory, or copied through it, as every BPS_PUSH_PULL_ROWS is; if it has ended; and if $BPS_CUDA_BLOCKING is
 * 1. timeout_ms is for that. 0, or a negative errno: as bps_request_wait() says, -EINVAL (the stream is being captured
 * into a graph), -EIO (the text names the driver's call and error); after these two the request is still under way.
 */
int bps_request_wait_stream(struct bps_request *request, void *stream, int64_t timeout_ms);

/*
 * Makes the daemon let go of the allocations on CUDA devices that have bytes of data to data + len, NULL: of all; waits until
 * it has. CUDA asks for it before memory that was shared by its legacy IPC (cudaMalloc()) is freed. Without it the
 * library lets go when it next shares an allocation, and until then the device's memory is not free. What the library
 * takes later it shares anew. -EBUSY: requests on it are under way.
 */
int bps_cuda_release(struct bps_client *client, const void *data, size_t len);

/*
 * Rows of a BPS_PUSH_PULL_ROWS' result, once it is complete: output and output_rows hold so many. Also when the request
 * ended with -ENOSPC: so many would have been needed. -EINVAL for another operation, -EBUSY while it is under way,
 * otherwise how the request ended.
 */
int bps_request_rows(struct bps_request *request, uint64_t *ret_rows);

/*
 * Contributions of ranks in the result of a PUSH_PULL or ACCUMULATE that is complete. PUSH_PULL of a job with a quorum: those
 * that came in time, and those that had been late for rounds before; of a tensor in several parts, the least of any.
 * ACCUMULATE: all since the beginning. -EINVAL for another operation, -EBUSY while it is under way, otherwise how the
 * request ended.
 */
int bps_request_contributions(struct bps_request *request, uint64_t *ret_contributions);

/* Who took part in an operation, and who is in the job since. */
struct bps_outcome {
	size_t size;
	uint32_t
		membership; /* counts changes of an elastic job, from 1; 0: the job is not elastic, or nothing is known */
	uint32_t world_size; /* ranks of that membership: when the operation ended */
	uint32_t rank;	     /* this trainer's */
	uint32_t
		n_came; /* ranks whose contribution is in the result; 0: it failed, or ended before a restart */
	uint32_t
		n_waiting; /* newcomers that bps_client_regroup() would let in; over several nodes 1 for any, of barriers alone */
};

/*
 * Of a complete request, whether or not it ended well; all ranks get the same but for rank. ret->size must be set. -EBUSY
 * while it is under way.
 */
int bps_request_outcome(struct bps_request *request, struct bps_outcome *ret);

/* How a complete request ended, as words; "" if well or not complete. Valid until bps_request_free(). */
const char *bps_request_error(const struct bps_request *request);

/*
 * Gives up a request that still waits for other ranks. Does not wait; the request completes with -ECANCELED, and the
 * same operation of the other ranks fails and names this rank. Has no effect once data is moving.
 */
int bps_request_cancel(struct bps_request *request);

/*
 * blocked 1: this process begins nothing more before the request has ended, in no thread; 0: it may again. Does not wait. Where
 * another rank has not come to that operation and is itself blocked in one that this rank has not come to, neither can end: both fail
 * at once, with -EDEADLK on all ranks, and their words name the two. Else they would fail when their time is over. To be said again
 * every few seconds, as a daemon that has begun anew has not heard it. No effect for a request with a timeout_ms of its own, after
 * which the caller may go on; in elastic jobs, jobs with a quorum and asynchronous ones; and where daemons are of an older version.
 */
int bps_request_blocked(struct bps_request *request, int blocked);

/*
 * Releases; NULL is allowed. A request that is not complete goes on by itself; its memory is the daemon's until then,
 * and a staged result is not copied back.
 */
void bps_request_free(struct bps_request *request);

#ifdef __cplusplus
}
#endif

#endif
