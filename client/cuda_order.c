/*
 * The order between streams of the caller and the daemon: flags in shared memory, and what a
 * stream does before the daemon reads an input and after it has written an output. submit.c
 * begins the use of a stream, request.c ends it. cuda.h has the rules.
 */
#include "cuda.h"
#include <stdio.h>
#include <sys/mman.h>

/* -- Flags ------------------------------------------------------------------------------------- */

struct cuda_flags *flags_map(int fd)
{
	struct cuda_flags *flags = calloc(1, sizeof(*flags));
	void *slots;

	if (!flags) {
		(void)error_set(-ENOMEM, "out of memory");
		return NULL;
	}
	slots = client_map(fd, SHM_FLAG_LEN, SHM_FLAG_OFFSET);
	if (!slots) {
		(void)error_set(-errno, "cannot map the daemon's memory: %m");
		free(flags);
		return NULL;
	}
	flags->slots = slots;
	return flags;
}

/*
 * A stream that waits may come to a flag long after everybody else is done with it, and nothing
 * tells when. Who unregisters memory may be made to wait for every stream of the context, of which
 * one may wait for a rank that was lost, and so for ever. So what was registered stays mapped until
 * the process ends, and the daemon charges the user for the session's ring as long.
 */
static SLIST_HEAD(, cuda_flags) flags_kept = SLIST_HEAD_INITIALIZER(flags_kept);

struct cuda_flags *flags_free(struct cuda_flags *flags)
{
	if (!flags)
		return NULL;
	if (flags->address) {
		client_fork_lock();
		SLIST_INSERT_HEAD(&flags_kept, flags, link);
		client_fork_unlock();
		return NULL;
	}
	(void)munmap(flags->slots, SHM_FLAG_LEN);
	free(flags);
	return NULL;
}

/* So that devices reach them, from every context. */
static int flags_register(struct bps_client *client, CUcontext context)
{
	const struct cuda *api = client->cuda->api;
	struct cuda_flags *flags = client->flags;
	CUresult result;

	if (flags->address)
		return 0;
	result = api->cuCtxPushCurrent(context);
	if (result)
		return cuda_error(api, result, "cuCtxPushCurrent()");
	result = api->cuMemHostRegister(flags->slots, SHM_FLAG_LEN,
					CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
	if (!result) {
		result = api->cuMemHostGetDevicePointer(&flags->address, flags->slots, 0);
		if (result) {
			flags->address = 0;
			(void)api->cuMemHostUnregister(flags->slots);
		}
	}
	(void)api->cuCtxPopCurrent(NULL);
	return result ? cuda_error(api, result,
				   "cuMemHostRegister() of the memory shared with bps-daemon")
		      : 0;
}

static CUdeviceptr flag_address(const struct cuda_use *use, size_t member)
{
	return use->flags->address +
	       (CUdeviceptr)((const char *)use->flag - (const char *)use->flags->slots) + member;
}

/* -- A use's beginning ------------------------------------------------------------------------- */

/* Why memory of CUDA cannot be handed over at all; NULL: it can. (locked, may wait) */
static const char *host_way(struct bps_client *client, CUcontext context)
{
	if (client->cuda->host)
		return "BPS_CUDA=host";
	if (!(client->session.hello.answer.features & CONTROL_FEATURE_CUDA))
		return "bps-daemon has no CUDA driver";
	return flags_register(client, context) ? bps_error() : NULL;
}

int cuda_use_new(struct bps_request *request, const struct cuda_place *place, CUstream stream,
		 bool rows)
{
	struct bps_client *client = request->client;
	struct cuda_use *use;
	const char *why;
	int r;

	/* There is no telling what the next daemon can do before it is there. */
	while (client->session.state != SESSION_READY && !client->failure)
		client_wait(client, CLIENT_FOREVER);
	r = client_failed(client);
	if (r)
		return r;

	use = calloc(1, sizeof(*use));
	if (!use)
		return error_set(-ENOMEM, "out of memory");
	use->client = client;
	use->context = place->context;
	use->stream = stream;
	use->slot = NO_SLOT;
	request->cuda = use;
	r = cuda_device_get(client, place, &use->device);
	if (r)
		return r;
	cuda_sweep(client);
	/* Rows are looked at by the daemon's CPU. */
	if (rows)
		return 0;
	why = host_way(client, place->context);
	if (why)
		client_notice(client, NOTICE_CUDA_HOST,
			      "memory of CUDA devices is copied through host memory: %s", why);
	else
		use->flags = client->flags;
	return 0;
}

void cuda_use_slot(struct bps_request *request)
{
	struct bps_client *client = request->client;
	struct cuda_use *use = request->cuda;

	if (!use->flags)
		return;
	/* Now the flags of the daemon's process, with which the job ends. */
	client->job.cuda = true;
	request->ticket = ++client->ring.next_ticket;
	use->ticket = (uint32_t)request->ticket;
	use->flag = &use->flags->slots[request->slot];
	/*
	 * Whatever the slot was used for last: never so far back that it looks as if it were ahead.
	 */
	atomic_store_explicit(&use->flag->ready, use->ticket - 1, memory_order_relaxed);
	atomic_store_explicit(&use->flag->done, use->ticket - 1, memory_order_relaxed);
}

/* A graph would store and wait for the same ticket each time that it is launched. */
static int check_capture(const struct cuda *api, CUstream stream)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result = api->cuStreamIsCapturing(stream, &status);

	if (result)
		return cuda_error(api, result, "cuStreamIsCapturing()");
	if (status != CU_STREAM_CAPTURE_STATUS_NONE)
		return error_set(
			-EINVAL,
			"the stream is captured into a graph, of which bps cannot be a part: "
			"submit outside of the capture");
	return 0;
}

static int begin_on_host(const struct cuda *api, const struct cuda_use *use, const void *from,
			 void *to, uint64_t len)
{
	CUresult result = CUDA_SUCCESS;

	if (len)
		result = api->cuMemcpyDtoHAsync(to, (uintptr_t)from, len, use->stream);
	if (result)
		return cuda_error(api, result, "cuMemcpyDtoHAsync()");
	/* Also without an input: what the stream still does to the output. */
	result = api->cuStreamSynchronize(use->stream);
	return result ? cuda_error(api, result, "cuStreamSynchronize()") : 0;
}

static int begin_on_device(const struct cuda *api, struct cuda_use *use, const void *from, void *to,
			   uint64_t len)
{
	CUresult result = CUDA_SUCCESS;

	if (to && len)
		result = api->cuMemcpyDtoDAsync((uintptr_t)to, (uintptr_t)from, len, use->stream);
	if (result)
		return cuda_error(api, result, "cuMemcpyDtoDAsync()");
	result = api->cuStreamWriteValue32(use->stream,
					   flag_address(use, offsetof(struct shm_flag, ready)),
					   use->ticket, CU_STREAM_WRITE_VALUE_DEFAULT);
	use->begun = !result;
	/* Whoever gets the piece next must not meet the copy. */
	if (result)
		(void)api->cuStreamSynchronize(use->stream);
	return result ? cuda_error(api, result, "cuStreamWriteValue32()") : 0;
}

int cuda_begin(struct bps_request *request, const void *from, void *to, uint64_t len)
{
	const struct cuda *api = request->client->cuda->api;
	struct cuda_use *use = request->cuda;
	CUresult result;
	int r;

	result = api->cuCtxPushCurrent(use->context);
	if (result)
		return cuda_error(api, result, "cuCtxPushCurrent()");
	r = check_capture(api, use->stream);
	if (!r && !use->flags)
		r = begin_on_host(api, use, from, to, len);
	else if (!r)
		r = begin_on_device(api, use, from, to, len);
	(void)api->cuCtxPopCurrent(NULL);
	return r;
}

/* -- Its end ----------------------------------------------------------------------------------- */

static bool use_has_begun(const struct cuda_use *use)
{
	return !use->begun ||
	       shm_flag_reached(atomic_load_explicit(&use->flag->ready, memory_order_acquire),
				use->ticket);
}

bool cuda_is_ready(const struct bps_request *request)
{
	return !request->cuda || !request->cuda->flags || use_has_begun(request->cuda);
}

static bool use_has_copied(const struct cuda_use *use)
{
	const struct cuda *api = use->client->cuda->api;
	CUresult result;

	if (!use->copied)
		return true;
	result = api->cuCtxPushCurrent(use->context);
	if (result)
		return false;
	result = api->cuEventQuery(use->copied);
	(void)api->cuCtxPopCurrent(NULL);
	return !result;
}

static void use_free(struct cuda_use *use)
{
	const struct cuda *api = use->client->cuda->api;

	if (use->copied && !api->cuCtxPushCurrent(use->context)) {
		(void)api->cuEventDestroy(use->copied);
		(void)api->cuCtxPopCurrent(NULL);
	}
	free(use);
}

static void use_linger(struct bps_request *request)
{
	struct cuda_use *use = TAKE_PTR(request->cuda);

	use->slot = request->slot;
	request->slot = NO_SLOT;
	use->memories[0] = TAKE_PTR(request->input_memory);
	use->memories[1] = TAKE_PTR(request->output_memory);
	use->ranges[0] = TAKE_PTR(request->input_range);
	use->ranges[1] = TAKE_PTR(request->output_range);
	TAILQ_INSERT_TAIL(&use->client->cuda->lingering, use, link);
}

void cuda_end(struct bps_request *request, int status)
{
	struct cuda_use *use = request->cuda;

	/* A stream that waits goes on. The daemon does so too, if it is there. */
	if (status && use->flags && use->begun)
		atomic_store_explicit(&use->flag->done, use->ticket, memory_order_release);
	if (use->flags && !use_has_begun(use))
		use_linger(request);
}

bool cuda_release_output(struct bps_request *request)
{
	struct cuda_use *use = request->cuda;

	if (use->n_enqueuing)
		return false;
	if (use_has_copied(use))
		use_free(TAKE_PTR(request->cuda));
	else
		use_linger(request);
	return true;
}

void cuda_sweep(struct bps_client *client)
{
	struct cuda_use *use, *next;

	if (!client->cuda)
		return;
	for (use = TAILQ_FIRST(&client->cuda->lingering); use; use = next) {
		next = TAILQ_NEXT(use, link);
		if (use->n_enqueuing || !use_has_begun(use) || !use_has_copied(use))
			continue;
		TAILQ_REMOVE(&client->cuda->lingering, use, link);
		if (use->slot != NO_SLOT)
			client->ring.slots_free[client->ring.n_slots_free++] = use->slot;
		for (unsigned i = 0; i < 2; i++) {
			memory_unuse(use->memories[i]);
			(void)staging_free(use->ranges[i]);
		}
		use_free(use);
	}
}

int cuda_copy(const struct bps_request *request)
{
	const struct cuda *api = request->client->cuda->api;
	const struct cuda_use *use = request->cuda;
	CUdeviceptr to = (uintptr_t)request->output;
	const void *from = staging_data(request->output_range);
	CUresult result;

	result = api->cuCtxPushCurrent(use->device->context);
	if (result)
		return cuda_error(api, result, "cuCtxPushCurrent()");
	if (use->flags)
		result = api->cuMemcpyDtoDAsync(to, (uintptr_t)from, request->output_len,
						use->device->stream);
	else
		result = api->cuMemcpyHtoDAsync(to, from, request->output_len, use->device->stream);
	result = result ?: api->cuStreamSynchronize(use->device->stream);
	(void)api->cuCtxPopCurrent(NULL);
	return result ? cuda_error(api, result, "copying the result to its CUDA device") : 0;
}

/* -- Streams that wait ------------------------------------------------------------------------- */

static bool is_special(CUstream stream)
{
	return (uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD;
}

/*
 * What a stream has to do before it may use the output. range: where the result is, if it is to be
 * copied, and NULL if it is there, or another stream copies it, which is seen by `copied`. Without
 * the mutex.
 */
static CUresult enqueue_wait(const struct cuda *api, const struct cuda_use *use, CUstream stream,
			     const struct bps_request *request, const struct staging_range *range,
			     CUevent *copied)
{
	CUevent event = NULL;
	CUresult result;

	result =
		api->cuStreamWaitValue32(stream, flag_address(use, offsetof(struct shm_flag, done)),
					 use->ticket, CU_STREAM_WAIT_VALUE_GEQ);
	if (!result && *copied)
		result = api->cuStreamWaitEvent(stream, *copied, 0);
	if (result || !range)
		return result;
	result = api->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
	if (!result)
		result = api->cuMemcpyDtoDAsync((uintptr_t)request->output,
						(uintptr_t)staging_data(range), request->output_len,
						stream);
	if (!result)
		result = api->cuEventRecord(event, stream);
	if (!result)
		*copied = event;
	else if (event)
		(void)api->cuEventDestroy(event);
	return result;
}

static int wait_in_stream(struct bps_request *request, CUstream stream)
{
	struct bps_client *client = request->client;
	const struct cuda *api = client->cuda->api;
	struct cuda_use *use = request->cuda;
	struct staging_range *range = NULL;
	CUcontext context = use->context;
	CUevent copied;
	CUresult result;
	int r;

	/* One stream copies a staged result. */
	if (request->output_range && !use->streamed) {
		range = request->output_range;
		use->streamed = true;
	}
	copied = use->copied;
	use->n_enqueuing++;
	client_unlock(client);
	/* That of the memory will do where a thread without a context is not told. */
	if (is_special(stream) || api->cuStreamGetCtx(stream, &context))
		context = use->context;
	result = api->cuCtxPushCurrent(context);
	r = result ? cuda_error(api, result, "cuCtxPushCurrent()") : check_capture(api, stream);
	if (!r) {
		result = enqueue_wait(api, use, stream, request, range, &copied);
		r = result ? cuda_error(api, result, "making a stream wait") : 0;
	}
	if (!result)
		(void)api->cuCtxPopCurrent(NULL);
	client_lock(client);
	use->n_enqueuing--;
	use->copied = copied;
	if (r && range)
		use->streamed = false;
	request_settle(request);
	client_wake(client);
	return r;
}

_public_ int bps_request_wait_stream(struct bps_request *request, void *stream, int64_t timeout_ms)
{
	struct bps_client *client;
	int r = request_check(request);
	if (r)
		return r;

	client = request->client;
	client_lock(client);
	request_see(request);
	/* Another thread's stream is about to copy what this one's has to wait for. */
	while (request->cuda && request->cuda->streamed && request->cuda->n_enqueuing)
		client_wait_for_leader(client, CLIENT_FOREVER);
	/* How many rows there are only the host learns; and what has ended needs no stream. */
	if (!request->cuda || !request->cuda->flags || client->cuda->blocking || request->row_len ||
	    request->state != REQUEST_POSTED) {
		client_unlock(client);
		return bps_request_wait(request, timeout_ms);
	}
	r = wait_in_stream(request, stream);
	client_unlock(client);
	return r;
}
