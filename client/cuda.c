/*
 * Where CUDA memory lies, and how the daemon reaches it: exports of whole allocations, arenas
 * that stand in for what cannot be exported, and the end of both. submit.c asks for each
 * operation, staging.c has its arenas on devices from here. Streams are in cuda_order.c.
 */
#include "cuda.h"
#include <poll.h>
#include <stdio.h>

#define ARENA_MIN     (UINT64_C(16) << 20) /* of a device's memory, all of which is taken at once */
#define ARENA_ALIGN   (UINT64_C(2) << 20) /* a multiple of any driver's granularity so far; checked */
#define LINGER_NS     (1 * INT64_C(1000000000))		/* at the end */
#define SPECIAL_AFTER ((uintptr_t)CU_STREAM_PER_THREAD) /* beyond are streams that somebody made */

int cuda_error(const struct cuda *api, CUresult result, const char *call)
{
	int error = result == CUDA_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO;

	return error_set(error, "%s: %s", call, cuda_error_name(api, result));
}

int cuda_open(struct bps_client *client)
{
	struct cuda_state *state;
	const struct cuda *api;
	const char *reason;
	int r;

	if (client->cuda)
		return 0;
	if (cuda_load(&api, &reason))
		return error_set(-ENODEV, "BPS_MEMORY_CUDA: %s", reason);
	state = calloc(1, sizeof(*state));
	if (!state)
		return error_set(-ENOMEM, "out of memory");
	state->api = api;
	TAILQ_INIT(&state->lingering);
	r = environment_cuda(&state->blocking, &state->host);
	if (r) {
		free(state);
		return r;
	}
	client->cuda = state;
	return 0;
}

/* -- Pointers ---------------------------------------------------------------------------------- */

static CUdevice device_of_current(const struct cuda *api)
{
	CUdevice device;

	return api->cuCtxGetDevice(&device) ? -1 : device;
}

/* A context that exists: the primary one, which frameworks use. It is not kept: its owner does. */
static CUcontext context_primary(const struct cuda *api, CUdevice device)
{
	CUcontext context;
	unsigned flags;
	int active = 0;

	if (api->cuDevicePrimaryCtxGetState(device, &flags, &active) || !active ||
	    api->cuDevicePrimaryCtxRetain(&context, device))
		return NULL;
	(void)api->cuDevicePrimaryCtxRelease(device);
	return context;
}

/*
 * Of the stream, if it is one that somebody made. The default streams are those of the memory's
 * context; memory that was mapped (cuMemMap) has none.
 */
static CUcontext place_context(const struct cuda *api, CUstream stream, CUcontext context,
			       CUdevice device)
{
	CUcontext of_stream;

	/* Which a thread without a context may not be told. */
	if ((uintptr_t)stream > SPECIAL_AFTER && !api->cuStreamGetCtx(stream, &of_stream))
		return of_stream;
	if (context)
		return context;
	if (!api->cuCtxGetCurrent(&context) && context && device_of_current(api) == device)
		return context;
	return context_primary(api, device);
}

/* How it may be exported, if at all. */
static enum memory_kind place_kind(const struct cuda *api, CUdeviceptr ptr, bool managed)
{
	/*
	 * Some booleans of the driver's are of one byte, some of four: whatever it is, here is
	 * room, and the rest stays 0.
	 */
	uint64_t types = 0, capable = 0;

	if (managed)
		return MEMORY_MEMFD;
	if (!api->cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, ptr) &&
	    types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return MEMORY_CUDA_FD;
	if (!api->cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
					ptr) &&
	    capable)
		return MEMORY_CUDA_IPC;
	return MEMORY_MEMFD;
}

static bool place_range(const struct cuda *api, struct cuda_place *place, CUdeviceptr ptr)
{
	CUresult result;

	if (api->cuCtxPushCurrent(place->context))
		return false;
	result = api->cuMemGetAddressRange(&place->base, &place->len, ptr);
	(void)api->cuCtxPopCurrent(NULL);
	return !result;
}

int cuda_inspect(const struct cuda *api, const void *data, uint64_t len, const char *what,
		 CUstream stream, struct cuda_place *ret_place)
{
	CUdeviceptr ptr = (uintptr_t)data;
	struct cuda_place place = { 0 };
	CUcontext context = NULL;
	uint64_t type = 0, managed = 0;
	int ordinal = -1;
	CUpointer_attribute attributes[] = {
		CU_POINTER_ATTRIBUTE_MEMORY_TYPE,    CU_POINTER_ATTRIBUTE_IS_MANAGED,
		CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT,
		CU_POINTER_ATTRIBUTE_BUFFER_ID,
	};
	void *values[] = { &type, &managed, &ordinal, &context, &place.buffer_id };
	CUresult result;

	result = api->cuInit(0);
	if (result)
		return cuda_error(api, result, "cuInit()");
	/* What it does not know it leaves 0: of a pointer that is not CUDA's, all. */
	result = api->cuPointerGetAttributes(ARRAY_SIZE(attributes), attributes, values, ptr);
	if (result)
		return cuda_error(api, result, "cuPointerGetAttributes()");
	if (type != CU_MEMORYTYPE_DEVICE && !managed)
		return error_set(-EINVAL, "%s is not on a CUDA device: memory is BPS_MEMORY_HOST",
				 what);
	if (api->cuDeviceGet(&place.device, ordinal))
		return error_set(-EINVAL, "%s is on CUDA device %d, which is none", what, ordinal);
	place.context = place_context(api, stream, context, place.device);
	if (!place.context)
		return error_set(-EINVAL,
				 "no CUDA context for %s: make one of device %d current, or give a "
				 "stream",
				 what, ordinal);

	place.kind = place_kind(api, ptr, managed);
	/*
	 * An allocation may have several pieces, which lie side by side; of these there are no
	 * whole exports.
	 */
	if (place.kind != MEMORY_MEMFD &&
	    (!place_range(api, &place, ptr) || len > place.len - (ptr - place.base)))
		place.kind = MEMORY_MEMFD;
	/* Without its number it cannot be told from the next at its address. */
	if (!place.buffer_id)
		place.kind = MEMORY_MEMFD;
	*ret_place = place;
	return 0;
}

/* -- Devices ----------------------------------------------------------------------------------- */

static int device_init(const struct cuda *api, struct cuda_device *device)
{
	CUuuid uuid;
	CUresult result;

	result = api->cuDeviceGetUuid(&uuid, device->device);
	if (result)
		return cuda_error(api, result, "cuDeviceGetUuid()");
	memcpy(device->uuid, uuid.bytes, sizeof(device->uuid));
	result = api->cuCtxPushCurrent(device->context);
	if (result)
		return cuda_error(api, result, "cuCtxPushCurrent()");
	/* Not behind what the caller's default stream waits for. */
	result = api->cuStreamCreate(&device->stream, CU_STREAM_NON_BLOCKING);
	(void)api->cuCtxPopCurrent(NULL);
	return result ? cuda_error(api, result, "cuStreamCreate()") : 0;
}

int cuda_device_get(struct bps_client *client, const struct cuda_place *place,
		    struct cuda_device **ret_device)
{
	struct cuda_state *state = client->cuda;
	struct cuda_device *device;
	int r;

	SLIST_FOREACH(device, &state->devices, link)
	{
		if (device->device == place->device) {
			*ret_device = device;
			return 0;
		}
	}
	device = calloc(1, sizeof(*device));
	if (!device)
		return error_set(-ENOMEM, "out of memory");
	device->device = place->device;
	device->context = place->context;
	staging_init(&device->staging, ARENA_MIN, device);
	r = device_init(state->api, device);
	if (r) {
		free(device);
		return r;
	}
	SLIST_INSERT_HEAD(&state->devices, device, link);
	*ret_device = device;
	return 0;
}

/* -- Exports ----------------------------------------------------------------------------------- */

static unsigned export_bucket(CUdeviceptr base)
{
	/* Allocations start at multiples of 2 MiB, or of 512 bytes inside these. */
	return (unsigned)((base >> 21) ^ (base >> 9)) % CUDA_BUCKETS;
}

static struct cuda_memory *export_at(struct bps_client *client, CUdeviceptr base)
{
	struct cuda_memory *cuda;

	LIST_FOREACH(cuda, &client->cuda->exports[export_bucket(base)], link)
	{
		if ((uintptr_t)cuda->memory->data == base)
			return cuda;
	}
	return NULL;
}

/* Nobody finds it any more. It goes with its last user. */
static void export_drop(struct cuda_memory *cuda)
{
	struct bps_memory *memory = cuda->memory;

	if (cuda->listed)
		LIST_REMOVE(cuda, link);
	cuda->listed = false;
	memory->released = true;
	memory->n_users++;
	memory_unuse(memory);
}

/* Exports of what was freed meanwhile: the daemon's import keeps the device's memory. */
static void export_drop_stale(struct bps_client *client)
{
	const struct cuda *api = client->cuda->api;

	for (unsigned i = 0; i < CUDA_BUCKETS; i++) {
		struct cuda_memory *cuda, *next;

		for (cuda = LIST_FIRST(&client->cuda->exports[i]); cuda; cuda = next) {
			uint64_t buffer_id = 0;

			next = LIST_NEXT(cuda, link);
			if (api->cuPointerGetAttribute(&buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
						       (uintptr_t)cuda->memory->data) ||
			    buffer_id != cuda->buffer_id)
				export_drop(cuda);
		}
	}
}

static struct bps_memory *memory_of_device(struct bps_client *client, struct cuda_device *device,
					   CUdeviceptr base, size_t len, enum memory_kind kind)
{
	struct bps_memory *memory = calloc(1, sizeof(*memory));
	struct cuda_memory *cuda = calloc(1, sizeof(*cuda));

	if (!memory || !cuda) {
		free(memory);
		free(cuda);
		return NULL;
	}
	*cuda = (struct cuda_memory){ .memory = memory, .device = device, .kind = kind };
	*memory = (struct bps_memory){
		.client = client,
		.data = (char *)(uintptr_t)base,
		.len = len,
		.fd = -1,
		.cuda = cuda,
	};
	return memory;
}

static void memory_of_device_free(struct bps_memory *memory)
{
	fd_close(memory->fd);
	free(memory->cuda);
	free(memory);
}

/* What goes with Share. In the memory's context. */
static CUresult export_handle(const struct cuda *api, struct bps_memory *memory)
{
	CUmemGenericAllocationHandle allocation;
	CUresult result;

	if (memory->cuda->kind == MEMORY_CUDA_IPC)
		return api->cuIpcGetMemHandle(&memory->cuda->handle, (uintptr_t)memory->data);
	result = api->cuMemRetainAllocationHandle(&allocation, memory->data);
	if (result)
		return result;
	result = api->cuMemExportToShareableHandle(&memory->fd, allocation,
						   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	(void)api->cuMemRelease(allocation);
	if (result)
		memory->fd = -1;
	return result;
}

/*
 * Shares what has its handle. The descriptor is for this once: the job ends with the daemon's
 * process. (locked, may wait)
 */
static int device_memory_share(struct bps_memory *memory)
{
	struct cuda_state *state = memory->client->cuda;
	int r;

	state->n_sharing++;
	r = memory_share(memory);
	state->n_sharing--;
	memory->fd = fd_close(memory->fd);
	return r;
}

/*
 * The export of a place, used once more. 0 and memory, or 0 and NULL: it cannot be, and the text
 * says why. (locked, may wait)
 */
static int export_get(struct bps_client *client, struct cuda_device *device,
		      const struct cuda_place *place, struct bps_memory **ret_memory)
{
	const struct cuda *api = client->cuda->api;
	struct bps_memory *memory;
	struct cuda_memory *cuda;
	CUresult result;
	int r;

	while ((cuda = export_at(client, place->base))) {
		if (cuda->buffer_id != place->buffer_id) {
			export_drop(cuda);
		} else if (cuda->memory->share.pending) {
			/* Another thread shares it. */
			client_wait(client, CLIENT_FOREVER);
			r = client_failed(client);
			if (r)
				return r;
		} else {
			memory_use(cuda->memory);
			*ret_memory = cuda->memory;
			return 0;
		}
	}
	export_drop_stale(client);

	memory = memory_of_device(client, device, place->base, place->len, place->kind);
	if (!memory)
		return error_set(-ENOMEM, "out of memory");
	cuda = memory->cuda;
	cuda->buffer_id = place->buffer_id;
	result = api->cuCtxPushCurrent(place->context);
	if (!result) {
		result = export_handle(api, memory);
		(void)api->cuCtxPopCurrent(NULL);
	}
	if (result) {
		(void)cuda_error(api, result, "CUDA does not export it");
		memory_of_device_free(memory);
		return 0;
	}
	LIST_INSERT_HEAD(&client->cuda->exports[export_bucket(place->base)], cuda, link);
	cuda->listed = true;
	memory_use(memory); /* while it is shared, others may drop it */
	r = device_memory_share(memory);
	if (r) {
		if (cuda->listed)
			LIST_REMOVE(cuda, link);
		memory_of_device_free(memory);
		return client->failure ? r : 0;
	}
	*ret_memory = memory;
	return 0;
}

/* -- Arenas ------------------------------------------------------------------------------------ */

/* By cuMemCreate(): may be exported as a descriptor, and be freed though the daemon has it. */
static CUresult arena_map(const struct cuda *api, CUdevice device, size_t len,
			  CUdeviceptr *ret_base, int *ret_fd)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, device },
	};
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle allocation;
	CUdeviceptr base = 0;
	bool mapped = false;
	size_t granularity;
	int fd = -1;
	CUresult result;

	result = api->cuMemGetAllocationGranularity(&granularity, &prop,
						    CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	if (!result && (!granularity || len % granularity))
		result = CUDA_ERROR_NOT_SUPPORTED;
	if (!result)
		result = api->cuMemCreate(&allocation, len, &prop, 0);
	if (result)
		return result;

	result = api->cuMemExportToShareableHandle(&fd, allocation,
						   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (!result)
		result = api->cuMemAddressReserve(&base, len, 0, 0, 0);
	if (!result)
		result = api->cuMemMap(base, len, 0, allocation, 0), mapped = !result;
	if (!result)
		result = api->cuMemSetAccess(base, len, &access, 1);
	/* From now on the mapping holds it. */
	(void)api->cuMemRelease(allocation);
	if (!result) {
		*ret_base = base;
		*ret_fd = fd;
		return CUDA_SUCCESS;
	}
	if (mapped)
		(void)api->cuMemUnmap(base, len);
	if (base)
		(void)api->cuMemAddressFree(base, len);
	fd_close(fd);
	return result;
}

static void arena_unmap(const struct cuda *api, const struct bps_memory *memory)
{
	CUdeviceptr base = (uintptr_t)memory->data;

	/* Fails when the program is at its end, and the driver with it. */
	if (api->cuCtxPushCurrent(memory->cuda->device->context))
		return;
	if (memory->cuda->kind == MEMORY_CUDA_FD) {
		(void)api->cuMemUnmap(base, memory->len);
		(void)api->cuMemAddressFree(base, memory->len);
	} else {
		(void)api->cuMemFree(base);
	}
	(void)api->cuCtxPopCurrent(NULL);
}

static int arena_allocate(const struct cuda *api, const struct cuda_device *device, size_t len,
			  CUdeviceptr *ret_base, int *ret_fd, CUipcMemHandle *handle)
{
	CUresult result;

	result = api->cuCtxPushCurrent(device->context);
	if (result)
		return cuda_error(api, result, "cuCtxPushCurrent()");
	*ret_fd = -1;
	result = arena_map(api, device->device, len, ret_base, ret_fd);
	if (result) {
		result = api->cuMemAlloc(ret_base, len);
		if (!result) {
			result = api->cuIpcGetMemHandle(handle, *ret_base);
			if (result)
				(void)api->cuMemFree(*ret_base);
		}
	}
	(void)api->cuCtxPopCurrent(NULL);
	return result ? cuda_error(api, result, "memory of a CUDA device to stage in") : 0;
}

int cuda_arena_new(struct bps_client *client, struct cuda_device *device, size_t len,
		   struct bps_memory **ret_memory)
{
	const struct cuda *api = client->cuda->api;
	CUipcMemHandle handle = { 0 };
	struct bps_memory *memory;
	CUdeviceptr base;
	int fd, r;

	len = align_up(len, ARENA_ALIGN);
	/*
	 * cuMemAlloc() may wait for the device, and that for what another thread of the caller's is
	 * about to submit.
	 */
	client_unlock(client);
	r = arena_allocate(api, device, len, &base, &fd, &handle);
	client_lock(client);
	if (r)
		return r;
	memory = memory_of_device(client, device, base, len,
				  fd >= 0 ? MEMORY_CUDA_FD : MEMORY_CUDA_IPC);
	if (!memory) {
		fd_close(fd);
		return error_set(-ENOMEM, "out of memory"); /* and the device's is lost */
	}
	memory->fd = fd;
	memory->cuda->handle = handle;
	memory->cuda->ours = true;
	r = device_memory_share(memory);
	if (r) {
		arena_unmap(api, memory);
		memory_of_device_free(memory);
		return r;
	}
	*ret_memory = memory;
	return 0;
}

/* The daemon has closed it. */
static void arena_unshared(struct bps_client *client, struct client_call *call)
{
	struct bps_memory *memory = container_of(call, struct bps_memory, share);

	arena_unmap(client->cuda->api, memory);
	memory_of_device_free(memory);
}

void cuda_memory_free(struct bps_memory *memory)
{
	struct bps_client *client = memory->client;
	struct cuda_memory *cuda = memory->cuda;
	bool registered = memory->number && !client->failure;

	if (registered && cuda->ours && cuda->kind == MEMORY_CUDA_IPC) {
		memory->share = (struct client_call){ .answered = arena_unshared };
		if (!call_unshare(client, &memory->share, memory->number))
			return;
		registered = false;
	}
	if (registered)
		(void)call_unshare(client, NULL, memory->number);
	if (cuda->ours)
		arena_unmap(client->cuda->api, memory);
	memory_of_device_free(memory);
}

/* -- Finding ----------------------------------------------------------------------------------- */

/* Positive: the host way is left. (locked, may wait) */
static int find_on_device(struct bps_client *client, struct cuda_use *use,
			  const struct cuda_place *place, uint64_t len, bool stage,
			  struct bps_memory **memory, struct staging_range **range)
{
	char why[ERROR_TEXT_MAX + 1] =
		"it is managed, of a pool (cudaMallocAsync), or of several pieces";
	int r;

	if (use->device->host)
		return 1;
	if (!stage && place->kind != MEMORY_MEMFD) {
		r = export_get(client, use->device, place, memory);
		if (r || *memory)
			return r;
		(void)snprintf(why, sizeof(why), "%s", bps_error());
	}
	r = staging_alloc(client, &use->device->staging, len, range);
	if (!r && !stage)
		client_notice(
			client, NOTICE_CUDA_STAGED,
			"some memory of CUDA device %d is copied there before bps-daemon gets it: "
			"%s",
			use->device->device, why);
	if (!r || client->failure || r == -ENOMEM)
		return r;
	use->device->host = true;
	client_notice(client, NOTICE_CUDA_HOST,
		      "memory of CUDA device %d is copied through host memory: %s",
		      use->device->device, bps_error());
	return 1;
}

int cuda_find(struct bps_client *client, struct cuda_use *use, const struct cuda_place *place,
	      const void *data, uint64_t len, bool stage, struct bps_memory **ret_memory,
	      struct staging_range **ret_range)
{
	int r = 1;

	if (use->flags)
		r = find_on_device(client, use, place, len, stage, ret_memory, ret_range);
	if (r <= 0)
		return r;
	use->flags = NULL;
	return staging_alloc(client, &client->memory.staging, len, ret_range);
}

/* -- The end ----------------------------------------------------------------------------------- */

void cuda_leave(struct bps_client *client)
{
	struct cuda_state *state = client->cuda;
	struct cuda_device *device;

	if (!state)
		return;
	cuda_sweep(client);
	for (unsigned i = 0; i < CUDA_BUCKETS; i++) {
		while (!LIST_EMPTY(&state->exports[i]))
			export_drop(LIST_FIRST(&state->exports[i]));
	}
	SLIST_FOREACH(device, &state->devices, link)
	{
		staging_done(&device->staging);
		device->host = false;
	}
}

/* Of clients that were closed while streams were to come to something of theirs. */
static SLIST_HEAD(, cuda_state) states_kept = SLIST_HEAD_INITIALIZER(states_kept);

/*
 * True when nothing lingers. All requests have ended, so streams go on, unless the caller's own
 * hold them up.
 */
static bool linger(struct bps_client *client)
{
	int64_t deadline_ns = client_now_ns() + LINGER_NS;

	cuda_sweep(client);
	while (!TAILQ_EMPTY(&client->cuda->lingering) && client_now_ns() < deadline_ns) {
		(void)poll(NULL, 0, 1);
		cuda_sweep(client);
	}
	return TAILQ_EMPTY(&client->cuda->lingering);
}

void cuda_close(struct bps_client *client)
{
	struct cuda_state *state = client->cuda;
	struct cuda_device *device;

	if (!state)
		return;
	if (!linger(client)) {
		/* Streams are to find it. */
		client_fork_lock();
		SLIST_INSERT_HEAD(&states_kept, state, link);
		client_fork_unlock();
		return;
	}
	cuda_leave(client);
	while ((device = SLIST_FIRST(&state->devices))) {
		SLIST_REMOVE_HEAD(&state->devices, link);
		if (!state->api->cuCtxPushCurrent(device->context)) {
			(void)state->api->cuStreamDestroy(device->stream);
			(void)state->api->cuCtxPopCurrent(NULL);
		}
		free(device);
	}
	client->cuda = NULL;
	free(state);
}

/* Whether data to data + len has a byte of it. */
static bool export_overlaps(const struct cuda_memory *cuda, const void *data, size_t len)
{
	uintptr_t base = (uintptr_t)cuda->memory->data, start = (uintptr_t)data;

	return !data || (start < base + cuda->memory->len && base < start + MAX(len, (size_t)1));
}

static struct cuda_memory *export_overlapping(struct bps_client *client, const void *data,
					      size_t len)
{
	struct cuda_memory *cuda;

	for (unsigned i = 0; i < CUDA_BUCKETS; i++) {
		LIST_FOREACH(cuda, &client->cuda->exports[i], link)
		{
			if (export_overlaps(cuda, data, len))
				return cuda;
		}
	}
	return NULL;
}

/* Ends one export and waits until the daemon has closed it. (locked, may wait) */
static int export_close(struct bps_client *client, struct cuda_memory *cuda)
{
	struct bps_memory *memory = cuda->memory;
	int r;

	if (memory->n_users || memory->share.pending)
		return error_set(-EBUSY, "requests are under way on memory that is to be released");
	LIST_REMOVE(cuda, link);
	cuda->listed = false;
	TAILQ_REMOVE(&client->memory.shared, memory, link);
	memory->share = (struct client_call){ 0 };
	r = call_unshare(client, &memory->share, memory->number);
	r = r ?: call_wait(client, &memory->share, CLIENT_FOREVER);
	call_forget(client, &memory->share);
	memory_of_device_free(memory);
	return r;
}

_public_ int bps_cuda_release(struct bps_client *client, const void *data, size_t len)
{
	struct cuda_memory *cuda;
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	if (!client->cuda)
		return 0;
	(void)client_progress(client);
	cuda_sweep(client);
	while (!r && (cuda = export_overlapping(client, data, len)))
		r = export_close(client, cuda);
	return r;
}
