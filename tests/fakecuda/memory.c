/* Memory of devices and of the host, and the map of it. */
#include "fake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#define PAGE FAKE_PAGE

static struct fake_range *map; /* with fake.lock */
static uint64_t last_id;

/* -- Memory as such ------------------------------------------------------------------------------------------- */

static size_t file_len(size_t len)
{
	return align_up(len, PAGE) + fake_marks_len(len) + PAGE;
}

static int backing_map(struct fake_backing *backing)
{
	size_t len = file_len(backing->len);
	char *p;

	p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, backing->fd, 0);
	if (p == MAP_FAILED)
		return -errno;
	backing->alias = p;
	backing->marks = (fake_mark *)(p + align_up(backing->len, PAGE));
	backing->shared = (struct fake_shared *)(p + len - PAGE);
	return 0;
}

int fake_backing_new(size_t len, int physical, uint32_t handle_types, struct fake_backing **ret)
{
	struct fake_backing *backing = calloc(1, sizeof(*backing));
	char name[64];
	int r;

	if (!backing)
		return -ENOMEM;
	atomic_init(&backing->refs, 1);
	backing->len = len;
	backing->exporter_pidfd = -1;
	snprintf(name, sizeof(name), "fakecuda-gpu%d-%zu", physical, len);
	backing->fd = memfd_create(name, MFD_CLOEXEC);
	if (backing->fd < 0 || ftruncate(backing->fd, (off_t)file_len(len))) {
		r = -errno;
		(void)fd_close(backing->fd);
		free(backing);
		return r;
	}
	r = backing_map(backing);
	if (r) {
		(void)fd_close(backing->fd);
		free(backing);
		return r;
	}
	backing->shared->len = len;
	backing->shared->physical = physical;
	backing->shared->handle_types = handle_types;
	if (getrandom(&backing->shared->nonce, sizeof(backing->shared->nonce), 0) < 0)
		abort();
	backing->shared->magic = FAKE_SHARED_MAGIC;
	*ret = backing;
	return 0;
}

int fake_backing_import(int fd, struct fake_backing **ret)
{
	struct fake_backing *backing;
	struct fake_shared shared;

	if (fake_shared_read(fd, &shared))
		return -EINVAL;
	backing = calloc(1, sizeof(*backing));
	if (!backing)
		return -ENOMEM;
	atomic_init(&backing->refs, 1);
	backing->len = shared.len;
	backing->exporter_pidfd = -1;
	backing->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (backing->fd < 0 || backing_map(backing)) {
		(void)fd_close(backing->fd);
		free(backing);
		return -ENOMEM;
	}
	*ret = backing;
	return 0;
}

struct fake_backing *fake_backing_ref(struct fake_backing *backing)
{
	atomic_fetch_add(&backing->refs, 1);
	return backing;
}

void fake_backing_unref(struct fake_backing *backing)
{
	if (!backing || atomic_fetch_sub(&backing->refs, 1) != 1)
		return;
	(void)munmap(backing->alias, file_len(backing->len));
	(void)fd_close(backing->fd);
	(void)fd_close(backing->exporter_pidfd);
	free(backing);
}

/* -- The map -------------------------------------------------------------------------------------------------- */

CUdeviceptr fake_window(size_t len)
{
	void *p = mmap(NULL, align_up(len, PAGE), PROT_NONE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? 0 : (CUdeviceptr)(uintptr_t)p;
}

struct fake_range *fake_range_add(enum fake_kind kind, CUdeviceptr start, size_t len, char *host,
				  struct fake_backing *backing, CUcontext context)
{
	struct fake_range *range = calloc(1, sizeof(*range));

	if (!range)
		return NULL;
	atomic_init(&range->refs, 1);
	range->kind = kind;
	range->start = start;
	range->len = len;
	range->host = host;
	range->backing = backing;
	range->context = context;
	range->id = ++last_id;
	range->next = map;
	map = range;
	if (kind == FAKE_DEVICE || kind == FAKE_POOL || kind == FAKE_MANAGED)
		context->used += len;
	return range;
}

struct fake_range *fake_range_ref(struct fake_range *range)
{
	atomic_fetch_add(&range->refs, 1);
	return range;
}

/* What is mapped at its address: a window of its own, or part of what others have mapped. */
static bool has_window(const struct fake_range *range)
{
	return range->kind != FAKE_MAPPED && range->kind != FAKE_HOST;
}

void fake_range_remove(struct fake_range *range)
{
	struct fake_range **link = &map;
	size_t offset = range->start % PAGE;

	while (*link != range)
		link = &(*link)->next;
	*link = range->next;
	atomic_store(&range->dead, true);
	if (range->kind == FAKE_DEVICE || range->kind == FAKE_POOL || range->kind == FAKE_MANAGED)
		range->context->used -= range->len;
	if (range->kind == FAKE_DEVICE)
		atomic_store(&range->backing->shared->freed, 1);
	if (has_window(range))
		(void)munmap((void *)(uintptr_t)(range->start - offset),
			     align_up(range->len + offset, PAGE));
	fake_range_unref(range);
}

void fake_range_unref(struct fake_range *range)
{
	if (atomic_fetch_sub(&range->refs, 1) != 1)
		return;
	if (range->kind == FAKE_HOST)
		(void)munmap(range->host, align_up(range->len, PAGE));
	fake_backing_unref(range->backing);
	free(range);
}

bool fake_range_alive(const struct fake_range *range)
{
	struct pollfd exporter;

	if (atomic_load(&range->dead))
		return false;
	if (range->kind != FAKE_IMPORT)
		return true;
	/* The driver frees what a process has allocated when it ends; who has it imported faults. */
	if (atomic_load(&range->backing->shared->freed))
		return false;
	exporter = (struct pollfd){ .fd = range->backing->exporter_pidfd, .events = POLLIN };
	return poll(&exporter, 1, 0) == 0;
}

bool fake_is_in_order(CUcontext context, const struct fake_span *span)
{
	const struct fake_range *range = span->range;
	bool is_own = range && range->context == context;
	uint8_t mask = is_own ? FAKE_NOT_FOR_OWNER : FAKE_NOT_FOR_OTHERS;
	size_t at;

	if (!range || !range->exported || (is_own && !fake_is_unordered()))
		return true;
	at = (size_t)(span->host - range->backing->alias);
	for (size_t i = at / PAGE; i <= (at + span->len - 1) / PAGE; i++)
		if (atomic_load(&range->backing->marks[i]) & mask)
			return false;
	return true;
}

static void flush_range(const struct fake_range *range, uint8_t mask)
{
	for (size_t i = 0; i < align_up(range->backing->len, PAGE) / PAGE; i++)
		atomic_fetch_and(&range->backing->marks[i], (uint8_t)~mask);
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
				    CUflushGPUDirectRDMAWritesScope scope)
{
	uint8_t mask = FAKE_NOT_FOR_OWNER;
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (target != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX ||
	    (scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER &&
	     scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES))
		return CUDA_ERROR_INVALID_VALUE;
	if (scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES)
		mask |= FAKE_NOT_FOR_OTHERS;
	pthread_mutex_lock(&fake.lock);
	for (const struct fake_range *range = map; range; range = range->next)
		if (range->exported && range->context == context)
			flush_range(range, mask);
	pthread_mutex_unlock(&fake.lock);
	return CUDA_SUCCESS;
}

/* Host memory is known by both its addresses. */
struct fake_range *fake_find(CUdeviceptr ptr)
{
	for (struct fake_range *r = map; r; r = r->next)
		if ((ptr >= r->start && ptr - r->start < r->len) ||
		    (fake_range_on_host(r) && ptr >= (uintptr_t)r->host &&
		     ptr - (uintptr_t)r->host < r->len))
			return r;
	return NULL;
}

struct fake_range *fake_find_import(uint64_t nonce, CUcontext context)
{
	for (struct fake_range *r = map; r; r = r->next)
		if (r->kind == FAKE_IMPORT && r->nonce == nonce && r->context == context)
			return r;
	return NULL;
}

static size_t offset_in(const struct fake_range *range, CUdeviceptr ptr)
{
	if (ptr >= range->start && ptr - range->start < range->len)
		return (size_t)(ptr - range->start);
	return (size_t)(ptr - (uintptr_t)range->host);
}

void fake_memory_free_all(CUcontext context)
{
	struct fake_range *range = map, *next;

	for (; range; range = next) {
		next = range->next;
		if (range->context == context)
			fake_range_remove(range);
	}
}

CUresult fake_resolve(CUdeviceptr ptr, size_t len, enum fake_side side, struct fake_span *ret_span)
{
	struct fake_range *range = fake_find(ptr);
	size_t offset;

	if (!range) {
		if (side == FAKE_SIDE_DEVICE || !ptr)
			return CUDA_ERROR_INVALID_VALUE;
		*ret_span = (struct fake_span){ .host = (char *)(uintptr_t)ptr, .len = len };
		return CUDA_SUCCESS;
	}
	offset = offset_in(range, ptr);
	/* A device uses host memory by the device's address of it. */
	if (side == FAKE_SIDE_DEVICE && !(ptr >= range->start && ptr - range->start < range->len))
		return CUDA_ERROR_INVALID_VALUE;
	if (side == FAKE_SIDE_HOST && !fake_range_on_host(range) && range->kind != FAKE_MANAGED)
		return CUDA_ERROR_INVALID_VALUE;
	if (range->kind == FAKE_MAPPED && range->access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
		return CUDA_ERROR_INVALID_VALUE;
	/* A range of addresses may be mapped piece by piece, any other memory ends where it was allocated. */
	if (len > range->len - offset && range->kind != FAKE_MAPPED)
		return CUDA_ERROR_INVALID_VALUE;
	*ret_span = (struct fake_span){
		.range = fake_range_ref(range),
		.host = range->host + offset,
		.len = MIN(len, range->len - offset),
	};
	return CUDA_SUCCESS;
}

CUresult fake_check(CUdeviceptr ptr, size_t len, enum fake_side side)
{
	CUresult r = CUDA_SUCCESS;
	struct fake_span span;

	pthread_mutex_lock(&fake.lock);
	for (; len && !r; len -= span.len, ptr += span.len) {
		r = fake_resolve(ptr, len, side, &span);
		if (r)
			break;
		if (span.range)
			fake_range_unref(span.range);
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}

/* -- For the other doubles ------------------------------------------------------------------------------------ */

static bool copy_pieces(CUdeviceptr ptr, char *buffer, size_t len, bool store)
{
	struct fake_span span;
	CUresult r;

	for (; len; len -= span.len, ptr += span.len, buffer += span.len) {
		pthread_mutex_lock(&fake.lock);
		r = fake_resolve(ptr, len, FAKE_SIDE_DEVICE, &span);
		pthread_mutex_unlock(&fake.lock);
		if (r)
			return false;
		if (!fake_range_alive(span.range)) {
			fake_range_unref(span.range);
			return false;
		}
		if (!buffer)
			; /* only asked */
		else if (store)
			memcpy(span.host, buffer, span.len);
		else
			memcpy(buffer, span.host, span.len);
		fake_range_unref(span.range);
	}
	return true;
}

bool fakecuda_load(void *to, const void *from, size_t len)
{
	return copy_pieces((uintptr_t)from, to, len, false);
}

bool fakecuda_store(void *to, const void *from, size_t len)
{
	return copy_pieces((uintptr_t)to, (char *)from, len, true);
}

bool fakecuda_reachable(const void *ptr, size_t len)
{
	return fake_check((uintptr_t)ptr, len, FAKE_SIDE_DEVICE) == CUDA_SUCCESS;
}

void *fakecuda_host(CUdeviceptr ptr)
{
	struct fake_range *range;
	void *host;

	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	host = range ? range->host + offset_in(range, ptr) : NULL;
	pthread_mutex_unlock(&fake.lock);
	return host;
}

/* -- Device memory -------------------------------------------------------------------------------------------- */

static CUresult allocate(CUcontext context, enum fake_kind kind, size_t len, CUdeviceptr *ret_ptr)
{
	struct fake_backing *backing;
	struct fake_range *range = NULL;
	CUdeviceptr start;

	if (!len)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake.lock);
	if (context->used + len > fake.device_len ||
	    fake_backing_new(len, context->physical, 0, &backing)) {
		pthread_mutex_unlock(&fake.lock);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	start = fake_window(len);
	/* Both sides use managed memory by the same address. */
	if (start && kind == FAKE_MANAGED &&
	    mmap((void *)(uintptr_t)start, align_up(len, PAGE), PROT_READ | PROT_WRITE,
		 MAP_SHARED | MAP_FIXED, backing->fd, 0) == MAP_FAILED)
		abort();
	if (start)
		range = fake_range_add(kind, start, len, backing->alias, backing, context);
	pthread_mutex_unlock(&fake.lock);
	if (!range) {
		fake_backing_unref(backing);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*ret_ptr = start;
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t len)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return allocate(context, FAKE_DEVICE, len, ptr);
}

CUresult cuMemAllocManaged(CUdeviceptr *ptr, size_t len, unsigned int flags)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return allocate(context, FAKE_MANAGED, len, ptr);
}

CUresult cuMemAllocAsync(CUdeviceptr *ptr, size_t len, CUstream stream)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return allocate(context, FAKE_POOL, len, ptr);
}

/* The range that starts at ptr and is of one of these kinds, not taken out. */
static struct fake_range *take(CUdeviceptr ptr, enum fake_kind a, enum fake_kind b,
			       enum fake_kind c)
{
	struct fake_range *range;

	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && ((range->start != ptr && (uintptr_t)range->host != ptr) ||
		      (range->kind != a && range->kind != b && range->kind != c)))
		range = NULL;
	if (range)
		fake_range_ref(range);
	pthread_mutex_unlock(&fake.lock);
	return range;
}

/* Drops what take() gave, and the range itself. */
static CUresult drop(struct fake_range *range)
{
	bool gone;

	pthread_mutex_lock(&fake.lock);
	gone = atomic_load(&range->dead);
	if (!gone)
		fake_range_remove(range);
	pthread_mutex_unlock(&fake.lock);
	fake_range_unref(range);
	return gone ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Waits for all that the device has to do, as the driver does. */
CUresult cuMemFree_v2(CUdeviceptr ptr)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (!ptr)
		return CUDA_SUCCESS;
	range = take(ptr, FAKE_DEVICE, FAKE_MANAGED, FAKE_POOL);
	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	(void)fake_context_drain(range->context);
	return drop(range);
}

CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream stream)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	range = take(ptr, FAKE_POOL, FAKE_DEVICE, FAKE_POOL);
	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	return fake_stream_free_range(context, stream, range);
}

CUresult cuMemGetInfo_v2(size_t *free_len, size_t *total_len)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	pthread_mutex_lock(&fake.lock);
	*total_len = fake.device_len;
	*free_len = fake.device_len - context->used;
	pthread_mutex_unlock(&fake.lock);
	return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *len, CUdeviceptr ptr)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && base)
		*base = range->start;
	if (range && len)
		*len = range->len;
	pthread_mutex_unlock(&fake.lock);
	return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* -- Host memory ---------------------------------------------------------------------------------------------- */

CUresult cuMemHostAlloc(void **ptr, size_t len, unsigned int flags)
{
	struct fake_range *range;
	CUcontext context;
	void *p;

	ENTER_CONTEXT(&context);
	if (!len)
		return CUDA_ERROR_INVALID_VALUE;
	p = mmap(NULL, align_up(len, PAGE), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		 0);
	if (p == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&fake.lock);
	range = fake_range_add(FAKE_HOST, (uintptr_t)p, len, p, NULL, context);
	pthread_mutex_unlock(&fake.lock);
	if (!range) {
		(void)munmap(p, align_up(len, PAGE));
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*ptr = p;
	return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *ptr)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	range = take((uintptr_t)ptr, FAKE_HOST, FAKE_HOST, FAKE_HOST);
	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	(void)fake_context_drain(range->context);
	return drop(range);
}

/*
 * The device's address of registered memory is another than the host's here, as it is on machines without
 * CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: who forgets to ask for it is found out.
 */
CUresult cuMemHostRegister_v2(void *ptr, size_t len, unsigned int flags)
{
	uintptr_t start = (uintptr_t)ptr, page = start & ~(PAGE - 1);
	struct fake_range *range = NULL;
	CUdeviceptr window;
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (!ptr || !len)
		return CUDA_ERROR_INVALID_VALUE;
	if (msync((void *)page, align_up(start + len, PAGE) - page, MS_ASYNC))
		return CUDA_ERROR_INVALID_VALUE;
	window = fake_window(align_up(start + len, PAGE) - page);
	if (!window)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&fake.lock);
	for (struct fake_range *r = map; r; r = r->next)
		if (fake_range_on_host(r) && start < (uintptr_t)r->host + r->len &&
		    (uintptr_t)r->host < start + len) {
			pthread_mutex_unlock(&fake.lock);
			(void)munmap((void *)(uintptr_t)window, align_up(start + len, PAGE) - page);
			return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
		}
	range = fake_range_add(FAKE_REGISTERED, window + (start - page), len, ptr, NULL, context);
	pthread_mutex_unlock(&fake.lock);
	return range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostUnregister(void *ptr)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	range = take((uintptr_t)ptr, FAKE_REGISTERED, FAKE_REGISTERED, FAKE_REGISTERED);
	if (!range)
		return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	(void)fake_context_drain(range->context);
	return drop(range);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *ptr, unsigned int flags)
{
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	pthread_mutex_lock(&fake.lock);
	range = fake_find((uintptr_t)ptr);
	if (range && fake_range_on_host(range))
		*device = range->start + offset_in(range, (uintptr_t)ptr);
	else
		range = NULL;
	pthread_mutex_unlock(&fake.lock);
	return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* -- Attributes ----------------------------------------------------------------------------------------------- */

static int ordinal_of(const struct fake_range *range)
{
	int physical = range->backing ? range->backing->shared->physical : range->context->physical;
	int visible = fake_visible(physical);

	return visible >= 0 ? visible : range->context->device;
}

static CUresult attribute_of(const struct fake_range *range, CUdeviceptr ptr,
			     CUpointer_attribute attribute, void *value)
{
	bool host = fake_range_on_host(range);
	size_t offset = offset_in(range, ptr);

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)value = range->kind == FAKE_MAPPED || range->kind == FAKE_POOL
					      ? NULL
					      : range->context;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)value = range->start + offset;
		break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!host && range->kind != FAKE_MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)value = host ? range->host + offset : (void *)(uintptr_t)ptr;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		*(unsigned int *)value = attribute == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
						 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
						 : 0;
		break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)value = range->id;
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned int *)value = range->kind == FAKE_MANAGED;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)value = ordinal_of(range);
		break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(unsigned int *)value = range->kind == FAKE_DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)value = range->start;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)value = range->len;
		break;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(unsigned int *)value = 1;
		break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)value =
			range->kind == FAKE_MAPPED ? range->backing->shared->handle_types : 0;
		break;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		/* A pool is only ever looked at for being one. */
		*(void **)value = range->kind == FAKE_POOL ? (void *)range->context : NULL;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct fake_range *range;
	CUresult r;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	r = range ? attribute_of(range, ptr, attribute, value) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&fake.lock);
	return r;
}

static size_t attribute_len(CUpointer_attribute attribute)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_MAPPED:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		return 4;
	default:
		return 8;
	}
}

/* Unlike the single one, no error for memory that is not CUDA's: then all are zero, and the device is -2. */
CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attributes, void **values,
				CUdeviceptr ptr)
{
	struct fake_range *range;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	for (unsigned int i = 0; i < n; i++)
		if (!range || attribute_of(range, ptr, attributes[i], values[i])) {
			memset(values[i], 0, attribute_len(attributes[i]));
			if (!range && attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
				*(int *)values[i] = -2;
		}
	pthread_mutex_unlock(&fake.lock);
	return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct fake_range *range;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	pthread_mutex_unlock(&fake.lock);
	/* Copies never return before they are done in a way that this would change. */
	return range && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS
								      : CUDA_ERROR_INVALID_VALUE;
}
