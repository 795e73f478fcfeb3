/* Streams, events, and what is done in streams: copies, waits, values, calls. */
#include "fake.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <wchar.h>

enum op_kind {
	OP_COPY,
	OP_SET,
	OP_WAIT_STREAM,
	OP_RECORD,
	OP_HOST,
	OP_CALL,
	OP_WAIT,
	OP_WRITE,
	OP_FREE
};

struct op {
	enum op_kind kind;
	uint64_t seq;
	struct op *next;
	struct fake_span to, from; /* COPY, SET: to; WAIT, WRITE: to */
	uint32_t value;
	unsigned int flags;
	size_t width;		    /* SET: 1 or 4 */
	struct CUstream_st *stream; /* WAIT_STREAM: until its stream_seq is done */
	uint64_t stream_seq;
	struct CUevent_st *event; /* RECORD */
	uint64_t generation;
	CUhostFn host; /* HOST */
	void (*run)(void *arg, bool cancelled);
	void *arg;
	struct fake_range *range; /* FREE */
};

struct CUstream_st {
	_Atomic unsigned refs; /* the list, the thread, events, waiting operations */
	CUcontext context;
	bool blocking; /* waits for the legacy stream, and it for this */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct op *first, **last;
	uint64_t enqueued, completed;
	bool started, closing;
	struct CUstream_st *next;
};

struct CUevent_st {
	_Atomic unsigned refs; /* its user, operations */
	CUcontext context;
	unsigned int flags;
	pthread_mutex_t lock;
	struct CUstream_st *stream; /* where it was recorded last; NULL: never */
	uint64_t seq, generation;
	uint64_t time_ns;
};

/* -- Lifetime ------------------------------------------------------------------------------------------------- */

static struct CUstream_st *stream_new(CUcontext context, bool blocking)
{
	struct CUstream_st *stream = calloc(1, sizeof(*stream));
	pthread_condattr_t attributes;

	if (!stream)
		return NULL;
	atomic_init(&stream->refs, 1);
	stream->context = context;
	stream->blocking = blocking;
	stream->last = &stream->first;
	pthread_mutex_init(&stream->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&stream->changed, &attributes);
	pthread_condattr_destroy(&attributes);
	stream->next = context->streams;
	context->streams = stream;
	return stream;
}

static struct CUstream_st *stream_ref(struct CUstream_st *stream)
{
	atomic_fetch_add(&stream->refs, 1);
	return stream;
}

void fake_stream_unref(struct CUstream_st *stream)
{
	if (!stream || atomic_fetch_sub(&stream->refs, 1) != 1)
		return;
	pthread_cond_destroy(&stream->changed);
	pthread_mutex_destroy(&stream->lock);
	free(stream);
}

static void event_unref(struct CUevent_st *event)
{
	if (atomic_fetch_sub(&event->refs, 1) != 1)
		return;
	fake_stream_unref(event->stream);
	pthread_mutex_destroy(&event->lock);
	free(event);
}

static bool is_default(CUstream handle)
{
	return !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}

struct CUstream_st *fake_stream_get(CUcontext current, CUstream handle)
{
	struct CUstream_st **slot;

	if (is_default(handle)) {
		slot = handle == CU_STREAM_PER_THREAD ? &current->per_thread : &current->legacy;
		if (!*slot)
			*slot = stream_new(current, handle == CU_STREAM_PER_THREAD);
		return *slot ? stream_ref(*slot) : NULL;
	}
	for (int i = 0; i < fake.n_devices; i++)
		for (struct CUstream_st *s = fake.contexts[i].streams; s; s = s->next)
			if (s == handle)
				return stream_ref(s);
	return NULL;
}

/* -- Running -------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* With the stream's lock; for as long as 10 ms, since a failed context must be seen. */
static void wait_changed(struct CUstream_st *stream)
{
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += 10000000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	(void)pthread_cond_timedwait(&stream->changed, &stream->lock, &until);
}

static void run_wait_stream(struct CUstream_st *stream, const struct op *op)
{
	pthread_mutex_lock(&op->stream->lock);
	while (op->stream->completed < op->stream_seq && !atomic_load(&stream->context->sticky))
		wait_changed(op->stream);
	pthread_mutex_unlock(&op->stream->lock);
}

static bool value_has_come(uint32_t value, uint32_t wanted, unsigned int flags)
{
	switch (flags & 3) {
	case CU_STREAM_WAIT_VALUE_GEQ:
		return (int32_t)(value - wanted) >= 0;
	case CU_STREAM_WAIT_VALUE_EQ:
		return value == wanted;
	case CU_STREAM_WAIT_VALUE_AND:
		return value & wanted;
	default:
		return ~(value | wanted);
	}
}

/* Other writers than run_write() do not wake us, so sleep for a short time only. */
static void run_wait(struct CUstream_st *stream, const struct op *op)
{
	const uint32_t *address = (const uint32_t *)op->to.host;
	struct timespec pause_time = { .tv_nsec = 1000000 };
	uint32_t value;

	while (!atomic_load(&stream->context->sticky)) {
		if (!fake_range_alive(op->to.range)) {
			fake_poison(stream->context, CUDA_ERROR_ILLEGAL_ADDRESS);
			return;
		}
		value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
		if (value_has_come(value, op->value, op->flags))
			return;
		(void)syscall(SYS_futex, address, FUTEX_WAIT, value, &pause_time, NULL, 0);
	}
}

static void run_write(const struct op *op)
{
	uint32_t *address = (uint32_t *)op->to.host;

	__atomic_store_n(address, op->value, __ATOMIC_RELEASE);
	(void)syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void run_set(const struct op *op)
{
	static_assert(sizeof(wchar_t) == sizeof(op->value), "wmemset() sets words of 32 bits");

	if (op->width == 1)
		memset(op->to.host, (int)op->value, op->to.len);
	else
		wmemset((wchar_t *)op->to.host, (wchar_t)op->value, op->to.len / sizeof(op->value));
}

static void run_record(const struct op *op)
{
	pthread_mutex_lock(&op->event->lock);
	if (op->event->generation == op->generation)
		op->event->time_ns = now_ns();
	pthread_mutex_unlock(&op->event->lock);
}

static bool span_alive(const struct fake_span *span)
{
	return !span->range || fake_range_alive(span->range);
}

static void run(struct CUstream_st *stream, const struct op *op)
{
	static const char *const points[] = {
		[OP_COPY] = "@copy",	 [OP_SET] = "@set",	[OP_WAIT_STREAM] = "@order",
		[OP_RECORD] = "@record", [OP_HOST] = "@host",	[OP_CALL] = "@call",
		[OP_WAIT] = "@wait",	 [OP_WRITE] = "@write", [OP_FREE] = "@free",
	};
	CUresult fault = CUDA_SUCCESS;
	bool failed = atomic_load(&stream->context->sticky) != 0;

	if (!failed) {
		fault = fakecuda_fault(points[op->kind]);
		if (fault)
			fake_poison(stream->context, fault);
		failed = fault != CUDA_SUCCESS;
	}
	if (!failed && (!span_alive(&op->to) || !span_alive(&op->from))) {
		fake_poison(stream->context, CUDA_ERROR_ILLEGAL_ADDRESS);
		failed = true;
	}
	if (op->kind == OP_CALL)
		op->run(op->arg, failed);
	if (failed)
		return;
	fake_delay();
	switch (op->kind) {
	case OP_COPY:
		memmove(op->to.host, op->from.host, op->to.len);
		break;
	case OP_SET:
		run_set(op);
		break;
	case OP_WAIT_STREAM:
		run_wait_stream(stream, op);
		break;
	case OP_RECORD:
		run_record(op);
		break;
	case OP_HOST:
		fake_thread()->in_host_function = true;
		op->host(op->arg);
		fake_thread()->in_host_function = false;
		break;
	case OP_WAIT:
		run_wait(stream, op);
		break;
	case OP_WRITE:
		run_write(op);
		break;
	case OP_CALL:
	case OP_FREE:
		break;
	}
}

static void op_free(struct op *op)
{
	if (op->to.range)
		fake_range_unref(op->to.range);
	if (op->from.range)
		fake_range_unref(op->from.range);
	if (op->stream)
		fake_stream_unref(op->stream);
	if (op->event)
		event_unref(op->event);
	if (op->range) {
		pthread_mutex_lock(&fake.lock);
		if (!atomic_load(&op->range->dead))
			fake_range_remove(op->range);
		pthread_mutex_unlock(&fake.lock);
		fake_range_unref(op->range);
	}
	free(op);
}

static void *stream_thread(void *arg)
{
	struct CUstream_st *stream = arg;
	struct op *op;
	uint64_t seq;

	fake_thread()->running = stream;
	pthread_mutex_lock(&stream->lock);
	for (;;) {
		while (!stream->first && !stream->closing)
			pthread_cond_wait(&stream->changed, &stream->lock);
		op = stream->first;
		if (!op)
			break;
		stream->first = op->next;
		if (!stream->first)
			stream->last = &stream->first;
		pthread_mutex_unlock(&stream->lock);
		run(stream, op);
		seq = op->seq;
		op_free(op);
		pthread_mutex_lock(&stream->lock);
		stream->completed = seq;
		pthread_cond_broadcast(&stream->changed);
	}
	pthread_mutex_unlock(&stream->lock);
	fake_stream_unref(stream);
	return NULL;
}

/* With the stream's lock. Its thread starts with its first operation. */
static bool stream_start(struct CUstream_st *stream)
{
	pthread_attr_t attributes;
	sigset_t all, old;
	pthread_t thread;
	int r;

	if (stream->started)
		return true;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&thread, &attributes, stream_thread, stream_ref(stream));
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attributes);
	if (r) {
		fake_stream_unref(stream);
		return false;
	}
	stream->started = true;
	return true;
}

/* -- Putting in ----------------------------------------------------------------------------------------------- */

/* Takes the operation. Locks of one stream at a time. */
static uint64_t append(struct CUstream_st *stream, struct op *op)
{
	uint64_t seq;

	pthread_mutex_lock(&stream->lock);
	if (!stream_start(stream)) {
		fprintf(stderr, "fakecuda: no thread for a stream\n");
		abort();
	}
	seq = op->seq = ++stream->enqueued;
	*stream->last = op;
	stream->last = &op->next;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	return seq;
}

static struct op *op_new(enum op_kind kind)
{
	struct op *op = calloc(1, sizeof(*op));

	if (!op)
		abort();
	op->kind = kind;
	return op;
}

static void append_wait(struct CUstream_st *stream, struct CUstream_st *other)
{
	struct op *op;
	uint64_t seq;
	bool idle;

	pthread_mutex_lock(&other->lock);
	seq = other->enqueued;
	idle = other->completed == seq;
	pthread_mutex_unlock(&other->lock);
	if (idle)
		return;
	op = op_new(OP_WAIT_STREAM);
	op->stream = stream_ref(other);
	op->stream_seq = seq;
	(void)append(stream, op);
}

/*
 * With fake.lock, so that all streams see one order. The legacy default stream begins when all that came before in
 * blocking streams is done, and what comes into those later begins when it is done.
 */
static uint64_t enqueue(struct CUstream_st *stream, struct op *op)
{
	CUcontext context = stream->context;

	if (stream == context->legacy) {
		for (struct CUstream_st *s = context->streams; s; s = s->next)
			if (s != stream && s->blocking)
				append_wait(stream, s);
	} else if (stream->blocking && context->legacy) {
		append_wait(stream, context->legacy);
	}
	return append(stream, op);
}

static CUresult wait_for(struct CUstream_st *stream, uint64_t seq)
{
	pthread_mutex_lock(&stream->lock);
	while (stream->completed < seq)
		pthread_cond_wait(&stream->changed, &stream->lock);
	pthread_mutex_unlock(&stream->lock);
	return (CUresult)atomic_load(&stream->context->sticky);
}

/* Puts one operation in; takes it, also on failure. If wait, returns when it is done. */
static CUresult put(CUcontext current, CUstream handle, struct op *op, bool wait)
{
	CUresult r = CUDA_SUCCESS;
	struct CUstream_st *stream;
	uint64_t seq = 0;

	pthread_mutex_lock(&fake.lock);
	stream = fake_stream_get(current, handle);
	if (stream)
		seq = enqueue(stream, op);
	pthread_mutex_unlock(&fake.lock);
	if (!stream) {
		op_free(op);
		return CUDA_ERROR_INVALID_HANDLE;
	}
	if (wait)
		r = wait_for(stream, seq);
	fake_stream_unref(stream);
	return r;
}

CUresult fake_context_drain(CUcontext context)
{
	struct CUstream_st *stream = NULL;
	uint64_t seq = 0;

	/* The list may change while we wait, so start again until nothing is to be waited for. */
	for (;;) {
		pthread_mutex_lock(&fake.lock);
		for (stream = context->streams; stream; stream = stream->next) {
			pthread_mutex_lock(&stream->lock);
			seq = stream->enqueued;
			bool idle = stream->completed == seq;
			pthread_mutex_unlock(&stream->lock);
			if (!idle) {
				(void)stream_ref(stream);
				break;
			}
		}
		pthread_mutex_unlock(&fake.lock);
		if (!stream)
			return (CUresult)atomic_load(&context->sticky);
		(void)wait_for(stream, seq);
		fake_stream_unref(stream);
	}
}

static void stream_close(struct CUstream_st *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->closing = true;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	fake_stream_unref(stream);
}

void fake_context_close(CUcontext context)
{
	struct CUstream_st *stream;

	(void)fake_context_drain(context);
	for (;;) {
		pthread_mutex_lock(&fake.lock);
		stream = context->streams;
		if (stream)
			context->streams = stream->next;
		context->legacy = context->per_thread = NULL;
		pthread_mutex_unlock(&fake.lock);
		if (!stream)
			return;
		stream_close(stream);
	}
}

/* -- Streams -------------------------------------------------------------------------------------------------- */

CUresult cuStreamCreateWithPriority(CUstream *ret_stream, unsigned int flags, int priority)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake.lock);
	*ret_stream = stream_new(context, !(flags & CU_STREAM_NON_BLOCKING));
	pthread_mutex_unlock(&fake.lock);
	return *ret_stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamCreate(CUstream *ret_stream, unsigned int flags)
{
	return cuStreamCreateWithPriority(ret_stream, flags, 0);
}

/* Returns at once; what is in the stream is still done. */
CUresult cuStreamDestroy_v2(CUstream handle)
{
	struct CUstream_st **link = NULL;
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (is_default(handle))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&fake.lock);
	for (int i = 0; i < fake.n_devices; i++)
		for (link = &fake.contexts[i].streams; *link; link = &(*link)->next)
			if (*link == handle)
				goto found;
	pthread_mutex_unlock(&fake.lock);
	return CUDA_ERROR_INVALID_HANDLE;
found:
	*link = handle->next;
	pthread_mutex_unlock(&fake.lock);
	stream_close(handle);
	return CUDA_SUCCESS;
}

/* A reference to the stream and the number of its last operation. */
static CUresult stream_tail(CUcontext context, CUstream handle, struct CUstream_st **ret_stream,
			    uint64_t *ret_seq)
{
	pthread_mutex_lock(&fake.lock);
	*ret_stream = fake_stream_get(context, handle);
	pthread_mutex_unlock(&fake.lock);
	if (!*ret_stream)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&(*ret_stream)->lock);
	*ret_seq = (*ret_stream)->enqueued;
	pthread_mutex_unlock(&(*ret_stream)->lock);
	return CUDA_SUCCESS;
}

static CUresult query(struct CUstream_st *stream, uint64_t seq)
{
	bool done;

	pthread_mutex_lock(&stream->lock);
	done = stream->completed >= seq;
	pthread_mutex_unlock(&stream->lock);
	if (atomic_load(&stream->context->sticky))
		return (CUresult)atomic_load(&stream->context->sticky);
	return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamQuery(CUstream handle)
{
	struct CUstream_st *stream;
	CUcontext context;
	uint64_t seq;
	CUresult r;

	ENTER_CONTEXT(&context);
	r = stream_tail(context, handle, &stream, &seq);
	if (r)
		return r;
	r = query(stream, seq);
	fake_stream_unref(stream);
	return r;
}

CUresult cuStreamSynchronize(CUstream handle)
{
	struct CUstream_st *stream;
	CUcontext context;
	uint64_t seq;
	CUresult r;

	ENTER_CONTEXT(&context);
	r = stream_tail(context, handle, &stream, &seq);
	if (r)
		return r;
	r = wait_for(stream, seq);
	fake_stream_unref(stream);
	return r;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *ret_context)
{
	struct CUstream_st *stream;
	CUcontext context;
	uint64_t seq;
	CUresult r;

	ENTER_CONTEXT(&context);
	r = stream_tail(context, handle, &stream, &seq);
	if (r)
		return r;
	*ret_context = stream->context;
	fake_stream_unref(stream);
	return CUDA_SUCCESS;
}

/* Graphs are not played. */
CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	*status = CU_STREAM_CAPTURE_STATUS_NONE;
	return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
	CUcontext context;
	struct op *op;

	ENTER_CONTEXT(&context);
	if (!function)
		return CUDA_ERROR_INVALID_VALUE;
	op = op_new(OP_HOST);
	op->host = function;
	op->arg = data;
	return put(context, handle, op, false);
}

CUresult fakecuda_enqueue(CUstream handle, void (*run_call)(void *arg, bool cancelled), void *arg)
{
	CUcontext context;
	struct op *op;

	ENTER_CONTEXT(&context);
	op = op_new(OP_CALL);
	op->run = run_call;
	op->arg = arg;
	return put(context, handle, op, false);
}

CUdevice fakecuda_stream_device(CUstream handle)
{
	CUcontext context = fake_current();
	struct CUstream_st *stream = NULL;
	CUdevice device = -1;

	pthread_mutex_lock(&fake.lock);
	if (context || !is_default(handle))
		stream = fake_stream_get(context, handle);
	pthread_mutex_unlock(&fake.lock);
	if (stream)
		device = stream->context->device;
	fake_stream_unref(stream);
	return device;
}

bool fakecuda_failed(void)
{
	return atomic_load(&fake_thread()->running->context->sticky) != 0;
}

CUresult fake_stream_free_range(CUcontext context, CUstream handle, struct fake_range *range)
{
	struct op *op = op_new(OP_FREE);

	op->range = range;
	return put(context, handle, op, false);
}

/* -- Values --------------------------------------------------------------------------------------------------- */

static CUresult put_value(enum op_kind kind, CUstream handle, CUdeviceptr address, uint32_t value,
			  unsigned int flags, CUcontext context)
{
	struct op *op;
	CUresult r;

	if (address % sizeof(value))
		return CUDA_ERROR_INVALID_VALUE;
	op = op_new(kind);
	op->value = value;
	op->flags = flags;
	pthread_mutex_lock(&fake.lock);
	r = fake_resolve(address, sizeof(value), FAKE_SIDE_DEVICE, &op->to);
	pthread_mutex_unlock(&fake.lock);
	if (r) {
		op_free(op);
		return r;
	}
	return put(context, handle, op, false);
}

CUresult cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address, uint32_t value,
				unsigned int flags)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (flags & ~3u) /* FLUSH is not of these devices */
		return CUDA_ERROR_NOT_SUPPORTED;
	return put_value(OP_WAIT, handle, address, value, flags, context);
}

CUresult cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address, uint32_t value,
				 unsigned int flags)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (flags & ~1u)
		return CUDA_ERROR_INVALID_VALUE;
	return put_value(OP_WRITE, handle, address, value, flags, context);
}

/* -- Copies --------------------------------------------------------------------------------------------------- */

/* Pageable memory of the host makes the call wait, as the driver does who copies it by way of its own buffer. */
static CUresult put_copy(CUcontext context, CUstream handle, CUdeviceptr to, enum fake_side to_side,
			 CUdeviceptr from, enum fake_side from_side, size_t len)
{
	bool wait = false;
	struct op *op;
	size_t part;
	CUresult r;

	r = fake_check(to, len, to_side);
	if (!r)
		r = fake_check(from, len, from_side);
	if (r)
		return r;
	for (; len; len -= part, to += part, from += part) {
		op = op_new(OP_COPY);
		pthread_mutex_lock(&fake.lock);
		r = fake_resolve(to, len, to_side, &op->to);
		if (!r)
			r = fake_resolve(from, len, from_side, &op->from);
		if (!r && !fake_is_in_order(context, &op->from))
			r = CUDA_ERROR_INVALID_VALUE;
		pthread_mutex_unlock(&fake.lock);
		if (r) {
			op_free(op);
			return r;
		}
		part = MIN(op->to.len, op->from.len);
		op->to.len = op->from.len = part;
		wait = wait || !op->to.range || !op->from.range;
		r = put(context, handle, op, wait && part == len);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return put_copy(context, handle, to, FAKE_SIDE_ANY, from, FAKE_SIDE_ANY, len);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t len, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return put_copy(context, handle, to, FAKE_SIDE_DEVICE, (uintptr_t)from, FAKE_SIDE_HOST,
			len);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t len, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return put_copy(context, handle, (uintptr_t)to, FAKE_SIDE_HOST, from, FAKE_SIDE_DEVICE,
			len);
}

/*
 * A driver copies what a device cannot reach by way of the host, and says nothing: who forgets to ask for access is found
 * out here.
 */
static bool is_in_reach(CUcontext context, CUdeviceptr ptr)
{
	const struct fake_range *range;
	bool is = true;

	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && range->kind == FAKE_DEVICE && range->context != context)
		is = context->peers >> range->context->device & 1;
	pthread_mutex_unlock(&fake.lock);
	return is;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (!is_in_reach(context, to) || !is_in_reach(context, from))
		return CUDA_ERROR_INVALID_VALUE;
	return put_copy(context, handle, to, FAKE_SIDE_DEVICE, from, FAKE_SIDE_DEVICE, len);
}

static CUresult put_set(CUcontext context, CUstream handle, CUdeviceptr to, uint32_t value,
			size_t width, size_t len)
{
	struct op *op;
	size_t part;
	CUresult r;

	if (to % width)
		return CUDA_ERROR_INVALID_VALUE;
	r = fake_check(to, len, FAKE_SIDE_DEVICE);
	if (r)
		return r;
	for (; len; len -= part, to += part) {
		op = op_new(OP_SET);
		op->value = value;
		op->width = width;
		pthread_mutex_lock(&fake.lock);
		r = fake_resolve(to, len, FAKE_SIDE_DEVICE, &op->to);
		pthread_mutex_unlock(&fake.lock);
		if (r) {
			op_free(op);
			return r;
		}
		part = op->to.len;
		r = put(context, handle, op, false);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t len, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return put_set(context, handle, to, value, 1, len);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream handle)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return put_set(context, handle, to, value, 4, n * 4);
}

/* -- Events --------------------------------------------------------------------------------------------------- */

CUresult cuEventCreate(CUevent *ret_event, unsigned int flags)
{
	struct CUevent_st *event;
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (flags & ~3u)
		return CUDA_ERROR_INVALID_VALUE;
	event = calloc(1, sizeof(*event));
	if (!event)
		return CUDA_ERROR_OUT_OF_MEMORY;
	atomic_init(&event->refs, 1);
	event->context = context;
	event->flags = flags;
	pthread_mutex_init(&event->lock, NULL);
	*ret_event = event;
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (!event)
		return CUDA_ERROR_INVALID_HANDLE;
	event_unref(event);
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle)
{
	struct CUstream_st *stream, *old = NULL;
	CUcontext context;
	struct op *op;

	ENTER_CONTEXT(&context);
	if (!event)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&fake.lock);
	stream = fake_stream_get(context, handle);
	if (!stream || stream->context != event->context) {
		pthread_mutex_unlock(&fake.lock);
		fake_stream_unref(stream);
		return CUDA_ERROR_INVALID_HANDLE;
	}
	op = op_new(OP_RECORD);
	op->event = event;
	atomic_fetch_add(&event->refs, 1);
	/* The event's lock is held until it knows where it was recorded, so that the operation does not run before. */
	pthread_mutex_lock(&event->lock);
	op->generation = ++event->generation;
	old = event->stream;
	event->stream = stream;
	event->seq = enqueue(stream, op);
	pthread_mutex_unlock(&event->lock);
	pthread_mutex_unlock(&fake.lock);
	fake_stream_unref(old);
	return CUDA_SUCCESS;
}

/* Where it was recorded last, referenced; NULL: never. */
static struct CUstream_st *event_stream(CUevent event, uint64_t *ret_seq)
{
	struct CUstream_st *stream;

	pthread_mutex_lock(&event->lock);
	stream = event->stream ? stream_ref(event->stream) : NULL;
	*ret_seq = event->seq;
	pthread_mutex_unlock(&event->lock);
	return stream;
}

/* For the record that was made last at the time of this call; if there was none, for nothing. */
CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
	CUcontext context;
	struct op *op;

	ENTER_CONTEXT(&context);
	if (!event)
		return CUDA_ERROR_INVALID_HANDLE;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	op = op_new(OP_WAIT_STREAM);
	op->stream = event_stream(event, &op->stream_seq);
	if (!op->stream) {
		op_free(op);
		return CUDA_SUCCESS;
	}
	return put(context, handle, op, false);
}

CUresult cuEventQuery(CUevent event)
{
	struct CUstream_st *stream;
	CUcontext context;
	uint64_t seq;
	CUresult r;

	ENTER_CONTEXT(&context);
	if (!event)
		return CUDA_ERROR_INVALID_HANDLE;
	stream = event_stream(event, &seq);
	if (!stream)
		return CUDA_SUCCESS;
	r = query(stream, seq);
	fake_stream_unref(stream);
	return r;
}

CUresult cuEventSynchronize(CUevent event)
{
	struct CUstream_st *stream;
	CUcontext context;
	uint64_t seq;
	CUresult r;

	ENTER_CONTEXT(&context);
	if (!event)
		return CUDA_ERROR_INVALID_HANDLE;
	stream = event_stream(event, &seq);
	if (!stream)
		return CUDA_SUCCESS;
	r = wait_for(stream, seq);
	fake_stream_unref(stream);
	return r;
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
	uint64_t a, b;
	CUresult r;

	r = cuEventQuery(from);
	if (!r)
		r = cuEventQuery(to);
	if (r)
		return r;
	if ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&from->lock);
	a = from->time_ns;
	pthread_mutex_unlock(&from->lock);
	pthread_mutex_lock(&to->lock);
	b = to->time_ns;
	pthread_mutex_unlock(&to->lock);
	if (!a || !b)
		return CUDA_ERROR_INVALID_HANDLE;
	*ms = (float)((double)(int64_t)(b - a) / 1e6);
	return CUDA_SUCCESS;
}
