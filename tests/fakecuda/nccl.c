/*
 * The test double for libnccl.so.2. Ranks are threads or processes of one machine; they meet in a memfd that the unique id
 * names. A collective runs at its turn in the stream, chunk by chunk, and sums in the order of ranks, rounding after each
 * addition as a GPU does for half types: the same bits each time, which is more than the real one promises.
 *
 * Like the real one a collective that cannot go on - a peer has died or aborted, another collective was called there - sets
 * the communicator's asynchronous error and then stays in its stream until ncclCommAbort() or the end of the context.
 * Unlike it, it finds out always, also which call does not fit which.
 *
 *   FAKECUDA_FAIL   takes this library's functions too, and "@nccl": a collective whose turn has come
 */
#include "fake.h"
#include "values.h"

#include "daemon/gpu/nccl_abi.h"
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#define NCCL_DECLARE_(need, name, result, parameters) EXPORT result name parameters;
NCCL_ABI_FUNCTIONS(NCCL_DECLARE_)

#define RANKS_MAX   64
#define CHUNK	    ((size_t)64 << 10)
#define MAGIC	    UINT64_C(0x66616b656e63636c) /* "fakenccl" */
#define FACTORS_MAX 16
#define JOIN_S	    120 /* until all ranks must have come */

enum kind { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };
static const char *const kind_names[] = { "",		"all-reduce", "reduce", "reduce-scatter",
					  "all-gather", "broadcast" };

/* What ranks compare. */
struct shape {
	uint32_t kind, type, op, root;
	uint64_t n, sequence;
};

enum { ABSENT, JOINED, LEFT, FAILED };

struct member {
	_Atomic uint32_t state;
	int32_t pid;
	int32_t physical;
	_Atomic uint32_t phase; /* barriers it has come to */
	struct shape shape;
};

/* The memfd; after it a chunk for each rank. */
struct clique {
	uint64_t magic, nonce;
	_Atomic uint32_t n_ranks; /* 0: nobody has come */
	_Atomic uint32_t changed; /* a futex: counts what others wait for */
	struct member members[RANKS_MAX];
};

#define CLIQUE_LEN align_up(sizeof(struct clique), 4096)
#define MEET_LEN   (CLIQUE_LEN + RANKS_MAX * CHUNK)

struct id {
	uint64_t magic, nonce;
	int32_t pid, fd;
};
static_assert(sizeof(struct id) <= sizeof(ncclUniqueId), "fits NCCL's");

struct ncclComm {
	_Atomic unsigned refs; /* its user, collectives in streams */
	struct clique *clique;
	int rank, n_ranks;
	CUdevice device;
	CUcontext context;
	int pidfds[RANKS_MAX];
	uint64_t sequence; /* of calls; one thread at a time, like NCCL */
	uint32_t phase;	   /* of the stream's thread */
	_Atomic int error; /* asynchronous */
	_Atomic bool aborted;
	struct {
		ncclDataType_t type;
		double by;	/* 0: free */
	} factors[FACTORS_MAX]; /* of ncclRedOpCreatePreMulSum(): operation ncclAvg + 1 + i */
	pthread_mutex_t lock;
	pthread_cond_t idle;
	unsigned in_flight;
};

struct call {
	struct ncclComm *comm;
	enum kind kind;
	const char *from;
	char *to;
	ncclDataType_t type;
	ncclRedOp_t op;
	double factor; /* not 0: of each element, before the sum */
	uint64_t n;
	int root;
	CUstream stream;
	struct shape shape;
};

struct pending_init {
	struct ncclComm **ret_comm;
	struct ncclComm *comm;
};

/* What belongs to a thread; see struct fake_thread for why it is no _Thread_local. */
struct thread {
	char last_error[256];
	struct {
		int depth;
		struct call *calls[256];
		size_t n_calls;
		struct pending_init inits[RANKS_MAX];
		size_t n_inits;
		ncclResult_t error;
	} group;
	/*
	 * Who was called for last outside of a group. One thread that calls for several ranks of a clique does so within
	 * one: without it NCCL may wait in the first call for what the second would do.
	 */
	struct {
		uint64_t nonce;
		int rank;
	} alone;
};

static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;

static void make_thread_key(void)
{
	if (pthread_key_create(&thread_key, free))
		abort();
}

static struct thread *own_thread(void)
{
	struct thread *thread;

	pthread_once(&thread_once, make_thread_key);
	thread = pthread_getspecific(thread_key);
	if (thread)
		return thread;
	thread = calloc(1, sizeof(*thread));
	if (!thread || pthread_setspecific(thread_key, thread))
		abort();
	return thread;
}

_printf_(2, 3) static ncclResult_t fail(ncclResult_t result, const char *format, ...)
{
	struct thread *thread = own_thread();
	va_list args;

	va_start(args, format);
	vsnprintf(thread->last_error, sizeof(thread->last_error), format, args);
	va_end(args);
	fprintf(stderr, "fakenccl %d: %s\n", (int)getpid(), thread->last_error);
	return result;
}

static ncclResult_t enter(const char *function)
{
	fakecuda_trace(function);
	return (ncclResult_t)fakecuda_fault(function);
}

#define ENTER_NCCL()                                   \
	do {                                           \
		ncclResult_t enter_ = enter(__func__); \
		if (enter_)                            \
			return enter_;                 \
	} while (0)

/* -- Meeting -------------------------------------------------------------------------------------------------- */

/* Ids given out here whose meeting place must be kept open until all have come. */
static struct {
	pthread_mutex_t lock;
	struct id ids[RANKS_MAX];
	size_t n;
} given = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void forget_id(uint64_t nonce)
{
	pthread_mutex_lock(&given.lock);
	for (size_t i = 0; i < given.n; i++)
		if (given.ids[i].nonce == nonce) {
			(void)close(given.ids[i].fd);
			given.ids[i] = given.ids[--given.n];
			break;
		}
	pthread_mutex_unlock(&given.lock);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *ret_id)
{
	struct id id = { .magic = MAGIC, .pid = getpid() };
	struct clique *clique;

	ENTER_NCCL();
	if (getrandom(&id.nonce, sizeof(id.nonce), 0) < 0)
		abort();
	id.fd = memfd_create("fakenccl", MFD_CLOEXEC);
	if (id.fd < 0 || ftruncate(id.fd, (off_t)MEET_LEN))
		return fail(ncclSystemError, "no memory to meet in: %s", strerror(errno));
	clique = mmap(NULL, CLIQUE_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, id.fd, 0);
	if (clique == MAP_FAILED)
		abort();
	clique->nonce = id.nonce;
	clique->magic = MAGIC;
	(void)munmap(clique, CLIQUE_LEN);
	pthread_mutex_lock(&given.lock);
	if (given.n < ARRAY_SIZE(given.ids))
		given.ids[given.n++] = id;
	pthread_mutex_unlock(&given.lock);
	memset(ret_id, 0, sizeof(*ret_id));
	memcpy(ret_id, &id, sizeof(id));
	return ncclSuccess;
}

static struct clique *open_clique(const struct id *id)
{
	_cleanup_(fd_closep) int fd = -1;
	struct clique *clique;
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", id->pid, id->fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	clique = mmap(NULL, MEET_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (clique == MAP_FAILED)
		return NULL;
	if (clique->magic != MAGIC || clique->nonce != id->nonce) {
		(void)munmap(clique, MEET_LEN);
		return NULL;
	}
	return clique;
}

static void tell_all(struct clique *clique)
{
	atomic_fetch_add(&clique->changed, 1);
	(void)syscall(SYS_futex, &clique->changed, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Not for long: deaths and failed contexts do not wake. */
static void wait_for_change(struct clique *clique, uint32_t seen)
{
	struct timespec time = { .tv_nsec = 2000000 };

	(void)syscall(SYS_futex, &clique->changed, FUTEX_WAIT, seen, &time, NULL, 0);
}

static bool is_dead(struct ncclComm *comm, int rank)
{
	struct member *member = &comm->clique->members[rank];
	struct pollfd pollfd = { .events = POLLIN };

	if (member->pid == getpid())
		return false;
	if (comm->pidfds[rank] < 0)
		comm->pidfds[rank] = (int)syscall(SYS_pidfd_open, member->pid, 0);
	if (comm->pidfds[rank] < 0)
		return true;
	pollfd.fd = comm->pidfds[rank];
	return poll(&pollfd, 1, 0) != 0;
}

static void comm_unref(struct ncclComm *comm)
{
	if (atomic_fetch_sub(&comm->refs, 1) != 1)
		return;
	for (int i = 0; i < comm->n_ranks; i++)
		(void)fd_close(comm->pidfds[i]);
	if (comm->clique)
		(void)munmap(comm->clique, MEET_LEN);
	pthread_cond_destroy(&comm->idle);
	pthread_mutex_destroy(&comm->lock);
	free(comm);
}

static void comm_leave(struct ncclComm *comm, uint32_t state)
{
	atomic_store(&comm->clique->members[comm->rank].state, state);
	tell_all(comm->clique);
}

/* The first half: this rank is there. The current context's device is the rank's. */
static ncclResult_t join(struct ncclComm **ret_comm, int n_ranks, const ncclUniqueId *unique,
			 int rank)
{
	struct ncclComm *comm;
	struct member *member;
	uint32_t none = 0, absent = ABSENT;
	CUdevice device;
	struct id id;

	memcpy(&id, unique, sizeof(id));
	if (id.magic != MAGIC || n_ranks < 1 || n_ranks > RANKS_MAX || rank < 0 || rank >= n_ranks)
		return fail(ncclInvalidArgument, "rank %d of %d, or an id that is none", rank,
			    n_ranks);
	if (cuCtxGetDevice(&device))
		return fail(ncclUnhandledCudaError, "no current context that works");
	comm = calloc(1, sizeof(*comm));
	if (!comm)
		return ncclSystemError;
	atomic_init(&comm->refs, 1);
	comm->rank = rank;
	comm->n_ranks = n_ranks;
	comm->device = device;
	memset(comm->pidfds, -1, sizeof(comm->pidfds));
	pthread_mutex_init(&comm->lock, NULL);
	pthread_cond_init(&comm->idle, NULL);
	comm->clique = open_clique(&id);
	if (!comm->clique) {
		comm_unref(comm);
		return fail(ncclSystemError, "the process that made the id is gone");
	}
	(void)atomic_compare_exchange_strong(&comm->clique->n_ranks, &none, (uint32_t)n_ranks);
	member = &comm->clique->members[rank];
	if (atomic_load(&comm->clique->n_ranks) != (uint32_t)n_ranks ||
	    atomic_load(&member->state) != ABSENT) {
		comm_unref(comm);
		return fail(ncclInvalidUsage,
			    "rank %d of %d is there already, or others count otherwise", rank,
			    n_ranks);
	}
	member->pid = getpid();
	member->physical = fakecuda_physical(device);
	if (!atomic_compare_exchange_strong(&member->state, &absent, JOINED)) {
		comm_unref(comm);
		return fail(ncclInvalidUsage, "rank %d is there twice", rank);
	}
	tell_all(comm->clique);
	/* The runtime, which the real one uses, retains the device's primary context. */
	if (cuDevicePrimaryCtxRetain(&comm->context, device)) {
		comm_leave(comm, FAILED);
		comm_unref(comm);
		return fail(ncclUnhandledCudaError, "no context on device %d", device);
	}
	*ret_comm = comm;
	return ncclSuccess;
}

/* The second half: all the others are. */
static ncclResult_t meet(struct ncclComm *comm)
{
	struct clique *clique = comm->clique;
	struct timespec now, began;
	uint32_t seen, state;

	/* Its call has failed for another rank: who is not there will not come, and why has been told. */
	if (atomic_load(&clique->members[comm->rank].state) == FAILED)
		return ncclRemoteError;
	clock_gettime(CLOCK_MONOTONIC, &began);
	for (int i = 0; i < comm->n_ranks; i++)
		for (;;) {
			seen = atomic_load(&clique->changed);
			if (atomic_load(&clique->members[i].state) != ABSENT)
				break;
			clock_gettime(CLOCK_MONOTONIC, &now);
			if (now.tv_sec - began.tv_sec > JOIN_S)
				return fail(ncclSystemError, "rank %d does not come", i);
			wait_for_change(clique, seen);
		}
	/* First, so that all say the same, whoever has left for it already. */
	for (int i = 0; i < comm->n_ranks; i++)
		for (int j = 0; j < i; j++)
			if (clique->members[i].physical == clique->members[j].physical)
				return fail(ncclInvalidUsage,
					    "Duplicate GPU detected : rank %d and rank %d both on "
					    "CUDA device %d",
					    j, i, clique->members[i].physical);
	for (int i = 0; i < comm->n_ranks; i++) {
		state = atomic_load(&clique->members[i].state);
		if (state == FAILED || (state == JOINED && is_dead(comm, i)))
			return fail(ncclRemoteError, "rank %d has gone before all were there", i);
	}
	return ncclSuccess;
}

/* -- Groups --------------------------------------------------------------------------------------------------- */

static ncclResult_t finish_inits(void)
{
	struct thread *thread = own_thread();
	ncclResult_t result = ncclSuccess, r;

	for (size_t i = 0; i < thread->group.n_inits; i++) {
		struct pending_init *init = &thread->group.inits[i];

		r = meet(init->comm);
		forget_id(init->comm->clique->nonce);
		if (r) {
			/* The others are told by their own look at it. */
			CUdevice device = init->comm->device;

			comm_leave(init->comm, FAILED);
			comm_unref(init->comm);
			(void)cuDevicePrimaryCtxRelease_v2(device);
			result = result ? result : r;
		} else {
			*init->ret_comm = init->comm;
		}
	}
	thread->group.n_inits = 0;
	return result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret_comm, int n_ranks, ncclUniqueId id, int rank,
				    ncclConfig_t *config)
{
	struct thread *thread = own_thread();
	struct ncclComm *comm;
	ncclResult_t r;

	ENTER_NCCL();
	if (config && (config->magic != NCCL_CONFIG_MAGIC || config->size < sizeof(*config)))
		return fail(ncclInvalidArgument, "the configuration was not initialised");
	if (config && !config->blocking)
		return fail(ncclInvalidArgument, "communicators that do not block are not played");
	r = join(&comm, n_ranks, &id, rank);
	if (r) {
		if (thread->group.depth)
			thread->group.error = r;
		return r;
	}
	*ret_comm = NULL;
	thread->group.inits[thread->group.n_inits++] = (struct pending_init){ ret_comm, comm };
	return thread->group.depth ? ncclSuccess : finish_inits();
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int n, const int *devices)
{
	struct thread *thread = own_thread();
	CUcontext before = NULL, context;
	ncclResult_t r = ncclSuccess, finished;
	ncclUniqueId id;
	CUdevice device;

	ENTER_NCCL();
	if (n < 1 || n > RANKS_MAX)
		return fail(ncclInvalidArgument, "%d devices", n);
	if (cuCtxGetCurrent(&before))
		return fail(ncclUnhandledCudaError, "the driver is not initialised");
	r = ncclGetUniqueId(&id);
	for (int i = 0; i < n && !r; i++) {
		device = devices ? devices[i] : i;
		comms[i] = NULL;
		if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context))
			r = fail(ncclInvalidArgument, "no device %d", device);
		/* All that is in its streams is waited for, though it be what waits for a trainer. */
		if (!r)
			(void)cuCtxSynchronize();
		if (!r)
			r = join(&thread->group.inits[thread->group.n_inits].comm, n, &id, i);
		if (!r)
			thread->group.inits[thread->group.n_inits++].ret_comm = &comms[i];
		if (context)
			(void)cuDevicePrimaryCtxRelease_v2(device);
	}
	if (cuCtxSetCurrent(before) && !r)
		r = fail(ncclUnhandledCudaError, "cuCtxSetCurrent to the context before");
	if (r)
		for (size_t i = 0; i < thread->group.n_inits; i++)
			comm_leave(thread->group.inits[i].comm, FAILED);
	finished = finish_inits();
	return r ? r : finished;
}

/* -- Collectives ---------------------------------------------------------------------------------------------- */

static void *staging(struct ncclComm *comm, int rank)
{
	return (char *)comm->clique + CLIQUE_LEN + (size_t)rank * CHUNK;
}

_printf_(3, 4) static bool set_error(struct ncclComm *comm, ncclResult_t error, const char *format,
				     ...)
{
	int none = 0;
	char text[192];
	va_list args;

	if (!atomic_compare_exchange_strong(&comm->error, &none, (int)error))
		return false;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	fprintf(stderr, "fakenccl %d: rank %d: %s\n", (int)getpid(), comm->rank, text);
	comm_leave(comm, FAILED);
	return false;
}

/* All ranks have come here. False: they never will. */
static bool barrier(struct ncclComm *comm)
{
	struct clique *clique = comm->clique;
	uint32_t phase = ++comm->phase, seen;

	atomic_store(&clique->members[comm->rank].phase, phase);
	tell_all(clique);
	for (int i = 0; i < comm->n_ranks; i++)
		for (;;) {
			seen = atomic_load(&clique->changed);
			if ((int32_t)(atomic_load(&clique->members[i].phase) - phase) >= 0)
				break;
			if (atomic_load(&comm->aborted))
				return set_error(comm, ncclInternalError, "aborted");
			if (fakecuda_failed())
				return set_error(comm, ncclUnhandledCudaError,
						 "the context has failed");
			if (atomic_load(&clique->members[i].state) != JOINED || is_dead(comm, i))
				return set_error(comm, ncclRemoteError, "rank %d is gone", i);
			wait_for_change(clique, seen);
		}
	return true;
}

static bool compare(struct ncclComm *comm, const struct shape *own)
{
	for (int i = 0; i < comm->n_ranks; i++) {
		const struct shape *other = &comm->clique->members[i].shape;

		if (memcmp(own, other, sizeof(*own)))
			return set_error(comm, ncclInvalidUsage,
					 "call %llu is %s of %llu, type %u, op %u, root %u; on "
					 "rank %d it is "
					 "%s of %llu, type %u, op %u, root %u",
					 (unsigned long long)own->sequence, kind_names[own->kind],
					 (unsigned long long)own->n, own->type, own->op, own->root,
					 i, kind_names[other->kind % 6],
					 (unsigned long long)other->n, other->type, other->op,
					 other->root);
	}
	return true;
}

static bool load(struct ncclComm *comm, const char *from, size_t len)
{
	if (fakecuda_load(staging(comm, comm->rank), from, len))
		return true;
	return set_error(comm, ncclUnhandledCudaError, "input that is no memory of a device");
}

static bool store(struct ncclComm *comm, char *to, const void *from, size_t len)
{
	if (fakecuda_store(to, from, len))
		return true;
	return set_error(comm, ncclUnhandledCudaError, "output that is no memory of a device");
}

/* In the order of ranks. */
static bool store_sum(const struct call *call, char *to, size_t n)
{
	char sum[CHUNK] __attribute__((aligned(16)));
	char next[CHUNK] __attribute__((aligned(16)));
	struct ncclComm *comm = call->comm;
	size_t size = values_size(call->type);

	for (int i = 0; i < comm->n_ranks; i++) {
		memcpy(i ? next : sum, staging(comm, i), n * size);
		if (call->factor != 0)
			values_multiply(i ? next : sum, n, call->type, call->factor);
		if (i)
			values_combine(sum, next, n, call->type, call->op);
	}
	if (call->op == ncclAvg && call->factor == 0)
		values_divide(sum, n, call->type, comm->n_ranks);
	return store(comm, to, sum, n * size);
}

/* n elements at from of every rank become what the kind makes of them. */
static bool chunk(const struct call *call, const char *from, uint64_t offset, size_t n, int target)
{
	struct ncclComm *comm = call->comm;
	size_t size = values_size(call->type);
	bool good = true;

	if (call->kind != BROADCAST || comm->rank == call->root)
		good = load(comm, from + offset * size, n * size);
	if (!good || !barrier(comm))
		return false;
	switch (call->kind) {
	case ALL_REDUCE:
		good = store_sum(call, call->to + offset * size, n);
		break;
	case REDUCE:
	case REDUCE_SCATTER:
		if (comm->rank == target)
			good = store_sum(call, call->to + offset * size, n);
		break;
	case ALL_GATHER:
		for (int i = 0; i < comm->n_ranks && good; i++)
			good = store(comm, call->to + ((uint64_t)i * call->n + offset) * size,
				     staging(comm, i), n * size);
		break;
	case BROADCAST:
		good = store(comm, call->to + offset * size, staging(comm, call->root), n * size);
		break;
	}
	return good && barrier(comm);
}

static bool collective(const struct call *call)
{
	struct ncclComm *comm = call->comm;
	int n_targets = call->kind == REDUCE_SCATTER ? comm->n_ranks : 1;
	size_t size = values_size(call->type), n;

	comm->clique->members[comm->rank].shape = call->shape;
	if (!barrier(comm) || !compare(comm, &call->shape))
		return false;
	if (!barrier(comm))
		return false;
	for (int t = 0; t < n_targets; t++)
		for (uint64_t offset = 0; offset < call->n; offset += n) {
			n = MIN(call->n - offset, (uint64_t)(CHUNK / size));
			if (!chunk(call, call->from + (uint64_t)t * call->n * size, offset, n,
				   call->kind == REDUCE ? call->root : t))
				return false;
		}
	return true;
}

/* What a kernel does that waits for a peer: it spins until it is told to stop. */
static void stay_until_abort(struct ncclComm *comm)
{
	uint32_t seen;

	for (;;) {
		seen = atomic_load(&comm->clique->changed);
		if (atomic_load(&comm->aborted) || fakecuda_failed())
			return;
		wait_for_change(comm->clique, seen);
	}
}

static void run(void *arg, bool cancelled)
{
	struct call *call = arg;
	struct ncclComm *comm = call->comm;
	ncclResult_t fault;

	if (cancelled)
		(void)set_error(comm, ncclUnhandledCudaError, "the context has failed");
	else if ((fault = (ncclResult_t)fakecuda_fault("@nccl")))
		(void)set_error(comm, fault, "a fault that was asked for");
	if (atomic_load(&comm->error) || !collective(call))
		stay_until_abort(comm);
	pthread_mutex_lock(&comm->lock);
	if (!--comm->in_flight)
		pthread_cond_broadcast(&comm->idle);
	pthread_mutex_unlock(&comm->lock);
	comm_unref(comm);
	free(call);
}

/* -- Calls ---------------------------------------------------------------------------------------------------- */

/* Takes the call. */
static ncclResult_t enqueue(struct call *call)
{
	struct ncclComm *comm = call->comm;
	CUcontext before;
	CUresult r;

	call->shape.sequence = ++comm->sequence;
	atomic_fetch_add(&comm->refs, 1);
	pthread_mutex_lock(&comm->lock);
	comm->in_flight++;
	pthread_mutex_unlock(&comm->lock);
	(void)cuCtxGetCurrent(&before);
	r = cuCtxSetCurrent(comm->context);
	if (!r && fakecuda_stream_device(call->stream) != comm->device)
		r = CUDA_ERROR_INVALID_HANDLE;
	if (!r)
		r = fakecuda_enqueue(call->stream, run, call);
	if (!r)
		return cuCtxSetCurrent(before) ? fail(ncclUnhandledCudaError,
						      "cuCtxSetCurrent to the context before")
					       : ncclSuccess;
	(void)cuCtxSetCurrent(before);
	pthread_mutex_lock(&comm->lock);
	comm->in_flight--;
	pthread_mutex_unlock(&comm->lock);
	comm_unref(comm);
	free(call);
	return fail(ncclUnhandledCudaError, "a stream that does not work: CUDA error %d", (int)r);
}

static uint64_t elements_in(const struct call *call)
{
	return call->kind == REDUCE_SCATTER ? call->n * (uint64_t)call->comm->n_ranks : call->n;
}

static uint64_t elements_out(const struct call *call)
{
	return call->kind == ALL_GATHER ? call->n * (uint64_t)call->comm->n_ranks : call->n;
}

static ncclResult_t check(const struct call *call)
{
	size_t size = values_size(call->type);
	const struct ncclComm *comm = call->comm;
	bool is_root = comm->rank == call->root;

	if (!size || (unsigned int)call->op > ncclAvg || call->root < 0 ||
	    call->root >= comm->n_ranks)
		return fail(ncclInvalidArgument, "%s: type %d, op %d, root %d",
			    kind_names[call->kind], (int)call->type, (int)call->op, call->root);
	if (call->kind != BROADCAST || is_root)
		if (!fakecuda_reachable(call->from, elements_in(call) * size))
			return fail(ncclInvalidArgument, "%s: input is not the memory of a device",
				    kind_names[call->kind]);
	if (call->kind != REDUCE || is_root)
		if (!fakecuda_reachable(call->to, elements_out(call) * size))
			return fail(ncclInvalidArgument, "%s: output is not the memory of a device",
				    kind_names[call->kind]);
	return ncclSuccess;
}

/* Operations of the communicator's own; and averages of floating-point numbers, which NCCL makes as one of them. */
static ncclResult_t look_up(struct call *call)
{
	unsigned int i = (unsigned int)call->op - (ncclAvg + 1);

	if (call->op == ncclAvg && call->type >= ncclFloat16) {
		call->factor = 1.0 / call->comm->n_ranks;
	} else if ((unsigned int)call->op > ncclAvg) {
		if (i >= FACTORS_MAX || call->comm->factors[i].by == 0 ||
		    call->comm->factors[i].type != call->type)
			return fail(ncclInvalidArgument, "%s: type %d, op %d",
				    kind_names[call->kind], (int)call->type, (int)call->op);
		call->factor = call->comm->factors[i].by;
		call->op = ncclSum;
	}
	return ncclSuccess;
}

static ncclResult_t submit(struct call given_call)
{
	struct thread *thread = own_thread();
	struct ncclComm *comm = given_call.comm;
	struct call *call;
	ncclResult_t r;

	if (!comm)
		return fail(ncclInvalidArgument, "no communicator");
	r = look_up(&given_call);
	if (!r)
		r = check(&given_call);
	if (!r && atomic_load(&comm->error))
		r = fail(ncclInvalidUsage, "the communicator has failed before");
	if (!r && !thread->group.depth && thread->alone.nonce == comm->clique->nonce &&
	    thread->alone.rank != comm->rank)
		r = fail(ncclInvalidUsage, "one thread calls for ranks %d and %d without a group",
			 thread->alone.rank, comm->rank);
	if (r) {
		thread->group.error = thread->group.depth ? r : thread->group.error;
		return r;
	}
	call = malloc(sizeof(*call));
	if (!call)
		return ncclSystemError;
	*call = given_call;
	call->shape = (struct shape){ .kind = call->kind,
				      .type = call->type,
				      .op = call->op,
				      .root = (uint32_t)call->root,
				      .n = call->n };
	if (!thread->group.depth) {
		thread->alone.nonce = comm->clique->nonce;
		thread->alone.rank = comm->rank;
		return enqueue(call);
	}
	if (thread->group.n_calls == ARRAY_SIZE(thread->group.calls)) {
		free(call);
		return fail(ncclInvalidUsage, "more than %zu calls in a group",
			    ARRAY_SIZE(thread->group.calls));
	}
	thread->group.calls[thread->group.n_calls++] = call;
	return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
				      ncclScalarResidence_t residence, ncclComm_t comm)
{
	double by;
	int i = 0;

	ENTER_NCCL();
	by = values_get(scalar, type);
	while (i < FACTORS_MAX && comm->factors[i].by != 0)
		i++;
	if (residence != ncclScalarHostImmediate || by == 0 || i == FACTORS_MAX)
		return fail(ncclInvalidArgument, "an operation of type %d, factor %g, residence %d",
			    (int)type, by, (int)residence);
	comm->factors[i].type = type;
	comm->factors[i].by = by;
	*op = (ncclRedOp_t)(ncclAvg + 1 + i);
	return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
	unsigned int i = (unsigned int)op - (ncclAvg + 1);

	ENTER_NCCL();
	if (i >= FACTORS_MAX || comm->factors[i].by == 0)
		return fail(ncclInvalidArgument, "op %d is not the communicator's own", (int)op);
	comm->factors[i].by = 0;
	return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t type,
			   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	ENTER_NCCL();
	return submit(
		(struct call){ comm, ALL_REDUCE, from, to, type, op, 0, n, 0, stream, { 0 } });
}

ncclResult_t ncclReduce(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op,
			int root, ncclComm_t comm, cudaStream_t stream)
{
	ENTER_NCCL();
	return submit((struct call){ comm, REDUCE, from, to, type, op, 0, n, root, stream, { 0 } });
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n_to, ncclDataType_t type,
			       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	ENTER_NCCL();
	return submit((struct call){
		comm, REDUCE_SCATTER, from, to, type, op, 0, n_to, 0, stream, { 0 } });
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t n_from, ncclDataType_t type,
			   ncclComm_t comm, cudaStream_t stream)
{
	ENTER_NCCL();
	return submit((struct call){
		comm, ALL_GATHER, from, to, type, ncclSum, 0, n_from, 0, stream, { 0 } });
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t type, int root,
			   ncclComm_t comm, cudaStream_t stream)
{
	ENTER_NCCL();
	return submit((struct call){
		comm, BROADCAST, from, to, type, ncclSum, 0, n, root, stream, { 0 } });
}

ncclResult_t ncclGroupStart(void)
{
	struct thread *thread = own_thread();

	ENTER_NCCL();
	thread->group.depth++;
	return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
	struct thread *thread = own_thread();
	ncclResult_t result, r;

	ENTER_NCCL();
	if (!thread->group.depth)
		return fail(ncclInvalidUsage, "the end of no group");
	if (--thread->group.depth)
		return ncclSuccess;
	result = thread->group.error;
	thread->group.error = ncclSuccess;
	/* After an error nothing of the group is done. */
	for (size_t i = 0; result && i < thread->group.n_inits; i++)
		comm_leave(thread->group.inits[i].comm, FAILED);
	r = finish_inits();
	result = result ? result : r;
	for (size_t i = 0; i < thread->group.n_calls; i++) {
		if (result) {
			free(thread->group.calls[i]);
			continue;
		}
		result = enqueue(thread->group.calls[i]);
	}
	thread->group.n_calls = 0;
	return result;
}

/* -- Communicators -------------------------------------------------------------------------------------------- */

static void wait_idle(struct ncclComm *comm)
{
	pthread_mutex_lock(&comm->lock);
	while (comm->in_flight)
		pthread_cond_wait(&comm->idle, &comm->lock);
	pthread_mutex_unlock(&comm->lock);
}

/* Waits for what is in streams. */
ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
	ENTER_NCCL();
	wait_idle(comm);
	return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
	CUdevice device;

	ENTER_NCCL();
	if (!comm)
		return ncclSuccess;
	wait_idle(comm);
	comm_leave(comm, LEFT);
	device = comm->device;
	comm_unref(comm);
	(void)cuDevicePrimaryCtxRelease_v2(device);
	return ncclSuccess;
}

/* What is in streams ends without a result, each at its turn. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
	CUdevice device;

	ENTER_NCCL();
	if (!comm)
		return ncclSuccess;
	atomic_store(&comm->aborted, true);
	comm_leave(comm, FAILED);
	device = comm->device;
	comm_unref(comm);
	(void)cuDevicePrimaryCtxRelease_v2(device);
	return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
	ENTER_NCCL();
	*error = (ncclResult_t)atomic_load(&comm->error);
	return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *n)
{
	ENTER_NCCL();
	*n = comm->n_ranks;
	return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
	ENTER_NCCL();
	*rank = comm->rank;
	return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
	ENTER_NCCL();
	*device = comm->device;
	return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
	const char *text = getenv("FAKENCCL_VERSION");

	*version = text ? (int)strtol(text, NULL, 10) : 22809;
	return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
#define TEXT(name, value) \
	case value:       \
		return #name;

	switch ((int)result) {
		NCCL_ABI_RESULTS(TEXT)
	}
	return "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
	return own_thread()->last_error;
}
