/*
 * Memory between processes: the two ways that the driver has. An IPC handle names a process and one of its descriptors,
 * so it needs what the driver needs: the same user, the same PID namespace, an exporter that lives. Memory made by
 * cuMemCreate() is a descriptor itself, and lives as long as anybody holds or maps it.
 */
#include "fake.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define HANDLE_MAGIC UINT64_C(0x6675646163697063)

struct handle {
	uint64_t magic;
	uint64_t nonce;
	uint64_t pid_namespace;
	int32_t pid;
	int32_t fd;
};
static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "fits the driver's handle");

static uint64_t pid_namespace(void)
{
	struct stat status;

	return stat("/proc/self/ns/pid", &status) ? 0 : status.st_ino;
}

/* -- IPC handles ---------------------------------------------------------------------------------------------- */

/* Stricter than the driver may be: the pointer must be the base of the allocation. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *ret_handle, CUdeviceptr ptr)
{
	struct handle handle = { .magic = HANDLE_MAGIC };
	struct fake_range *range;
	CUcontext context;

	ENTER_CONTEXT(&context);
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (!range || range->kind != FAKE_DEVICE || range->start != ptr) {
		pthread_mutex_unlock(&fake.lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	handle.nonce = range->backing->shared->nonce;
	handle.fd = range->backing->fd;
	pthread_mutex_unlock(&fake.lock);
	handle.pid = getpid();
	handle.pid_namespace = pid_namespace();
	memset(ret_handle, 0, sizeof(*ret_handle));
	memcpy(ret_handle, &handle, sizeof(handle));
	return CUDA_SUCCESS;
}

static CUresult open_exported(const struct handle *handle, struct fake_backing **ret_backing)
{
	_cleanup_(fd_closep) int fd = -1, pidfd = -1;
	char path[64];

	pidfd = (int)syscall(SYS_pidfd_open, handle->pid, 0);
	if (pidfd < 0)
		return CUDA_ERROR_INVALID_HANDLE;
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return errno == EACCES ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_MAP_FAILED;
	if (fake_backing_import(fd, ret_backing))
		return CUDA_ERROR_MAP_FAILED;
	/* The descriptor's number may be another memory's by now. */
	if ((*ret_backing)->shared->nonce != handle->nonce ||
	    atomic_load(&(*ret_backing)->shared->freed)) {
		fake_backing_unref(*ret_backing);
		return CUDA_ERROR_MAP_FAILED;
	}
	(*ret_backing)->exporter_pidfd = TAKE_FD(pidfd);
	return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *ret_ptr, CUipcMemHandle opaque, unsigned int flags)
{
	struct fake_backing *backing;
	struct fake_range *range;
	struct handle handle;
	CUdeviceptr start;
	CUcontext context;
	CUresult r;

	ENTER_CONTEXT(&context);
	memcpy(&handle, &opaque, sizeof(handle));
	if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != HANDLE_MAGIC)
		return CUDA_ERROR_INVALID_VALUE;
	if (handle.pid_namespace != pid_namespace() || handle.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&fake.lock);
	range = fake_find_import(handle.nonce, context);
	if (range) {
		range->opened++;
		*ret_ptr = range->start;
		pthread_mutex_unlock(&fake.lock);
		return CUDA_SUCCESS;
	}
	r = open_exported(&handle, &backing);
	if (r) {
		pthread_mutex_unlock(&fake.lock);
		return r;
	}
	start = fake_window(backing->len);
	if (start)
		range = fake_range_add(FAKE_IMPORT, start, backing->len, backing->alias, backing,
				       context);
	if (range) {
		range->opened = 1;
		range->nonce = handle.nonce;
		*ret_ptr = start;
	} else {
		fake_backing_unref(backing);
	}
	pthread_mutex_unlock(&fake.lock);
	return range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Waits for all that the device has to do, as the driver may. */
CUresult cuIpcCloseMemHandle(CUdeviceptr ptr)
{
	struct fake_range *range;
	CUcontext context, owner = NULL;

	ENTER_CONTEXT(&context);
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && range->kind == FAKE_IMPORT && range->start == ptr)
		owner = range->context;
	pthread_mutex_unlock(&fake.lock);
	if (!owner)
		return CUDA_ERROR_INVALID_VALUE;
	(void)fake_context_drain(owner);
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && range->kind == FAKE_IMPORT && range->start == ptr && !--range->opened)
		fake_range_remove(range);
	pthread_mutex_unlock(&fake.lock);
	return CUDA_SUCCESS;
}

/* -- Addresses, and memory behind them ------------------------------------------------------------------------ */

/* Both lists: with fake.lock. */
struct reservation {
	CUdeviceptr start;
	size_t len;
	struct reservation *next;
};

/* What cuMemCreate() and an import give; the number that callers get is its address. */
struct allocation {
	struct fake_backing *backing;
	unsigned refs; /* cuMemRelease() to come */
	struct allocation *next;
};

static struct reservation *reservations;
static struct allocation *allocations;

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t len, size_t alignment, CUdeviceptr wish,
			     unsigned long long flags)
{
	struct reservation *reservation;
	CUdeviceptr start, end;
	uintptr_t aligned;

	ENTER();
	if (!len || len % FAKE_GRANULARITY || flags)
		return CUDA_ERROR_INVALID_VALUE;
	reservation = calloc(1, sizeof(*reservation));
	start = fake_window(len + FAKE_GRANULARITY);
	if (!reservation || !start) {
		free(reservation);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	aligned = align_up(start, FAKE_GRANULARITY);
	end = start + len + FAKE_GRANULARITY;
	if (aligned > start)
		(void)munmap((void *)(uintptr_t)start, aligned - start);
	if (end > aligned + len)
		(void)munmap((void *)(aligned + len), end - (aligned + len));
	reservation->start = aligned;
	reservation->len = len;
	pthread_mutex_lock(&fake.lock);
	reservation->next = reservations;
	reservations = reservation;
	pthread_mutex_unlock(&fake.lock);
	*ptr = aligned;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t len)
{
	struct reservation **link, *found = NULL;
	bool mapped = false;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	for (link = &reservations; *link; link = &(*link)->next)
		if ((*link)->start == ptr && (*link)->len == len)
			break;
	found = *link;
	for (size_t i = 0; found && i < len; i += FAKE_GRANULARITY)
		mapped = mapped || fake_find(ptr + i);
	if (found && !mapped)
		*link = found->next;
	pthread_mutex_unlock(&fake.lock);
	if (!found || mapped)
		return CUDA_ERROR_INVALID_VALUE;
	(void)munmap((void *)(uintptr_t)ptr, len);
	free(found);
	return CUDA_SUCCESS;
}

/* With fake.lock. */
static struct allocation *find_allocation(CUmemGenericAllocationHandle handle)
{
	for (struct allocation *a = allocations; a; a = a->next)
		if ((uintptr_t)a == handle)
			return a;
	return NULL;
}

/* With fake.lock. Takes the backing. */
static CUresult add_allocation(struct fake_backing *backing,
			       CUmemGenericAllocationHandle *ret_handle)
{
	struct allocation *allocation = calloc(1, sizeof(*allocation));

	if (!allocation) {
		fake_backing_unref(backing);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	allocation->backing = backing;
	allocation->refs = 1;
	allocation->next = allocations;
	allocations = allocation;
	*ret_handle = (uintptr_t)allocation;
	return CUDA_SUCCESS;
}

static bool prop_is_good(const CUmemAllocationProp *prop)
{
	return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
	       prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id >= 0 &&
	       prop->location.id < fake.n_devices;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t len,
		     const CUmemAllocationProp *prop, unsigned long long flags)
{
	struct fake_backing *backing;
	CUresult r;

	ENTER();
	if (!len || len % FAKE_GRANULARITY || flags || !prop_is_good(prop))
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (len > fake.device_len ||
	    fake_backing_new(len, fake.contexts[prop->location.id].physical,
			     prop->requestedHandleTypes, &backing))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&fake.lock);
	r = add_allocation(backing, handle);
	pthread_mutex_unlock(&fake.lock);
	return r;
}

/* What is mapped stays. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct allocation **link, *allocation;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	allocation = find_allocation(handle);
	if (allocation && !--allocation->refs) {
		for (link = &allocations; *link != allocation; link = &(*link)->next)
			;
		*link = allocation->next;
		fake_backing_unref(allocation->backing);
		free(allocation);
	}
	pthread_mutex_unlock(&fake.lock);
	return allocation ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(CUdeviceptr ptr, size_t len)
{
	for (struct reservation *r = reservations; r; r = r->next)
		if (ptr >= r->start && ptr - r->start <= r->len && len <= r->len - (ptr - r->start))
			return true;
	return false;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t len, size_t offset, CUmemGenericAllocationHandle handle,
		  unsigned long long flags)
{
	struct allocation *allocation;
	CUresult r = CUDA_SUCCESS;
	int device;

	ENTER();
	if (!len || len % FAKE_GRANULARITY || ptr % FAKE_GRANULARITY || offset || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake.lock);
	allocation = find_allocation(handle);
	if (!allocation || len > allocation->backing->len || !is_reserved(ptr, len))
		r = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; !r && i < len; i += FAKE_GRANULARITY)
		if (fake_find(ptr + i))
			r = CUDA_ERROR_ALREADY_MAPPED;
	if (!r) {
		device = fake_visible(allocation->backing->shared->physical);
		if (!fake_range_add(FAKE_MAPPED, ptr, len, allocation->backing->alias,
				    fake_backing_ref(allocation->backing),
				    &fake.contexts[device < 0 ? 0 : device])) {
			fake_backing_unref(allocation->backing);
			r = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}

/* Whole mappings only; with what still uses them in a stream it is at fault. */
CUresult cuMemUnmap(CUdeviceptr ptr, size_t len)
{
	struct fake_range *range;
	CUresult r = CUDA_SUCCESS;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	while (len && !r) {
		range = fake_find(ptr);
		if (!range || range->kind != FAKE_MAPPED || range->start != ptr ||
		    range->len > len) {
			r = CUDA_ERROR_INVALID_VALUE;
			break;
		}
		ptr += range->len;
		len -= range->len;
		fake_range_remove(range);
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t len, const CUmemAccessDesc *access, size_t n)
{
	struct fake_range *range;
	CUresult r = CUDA_SUCCESS;

	ENTER();
	if (!n || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake.lock);
	while (len && !r) {
		range = fake_find(ptr);
		if (!range || range->kind != FAKE_MAPPED || range->start != ptr ||
		    range->len > len) {
			r = CUDA_ERROR_INVALID_VALUE;
			break;
		}
		range->access = access->flags;
		ptr += range->len;
		len -= range->len;
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
				      CUmemAllocationHandleType type, unsigned long long flags)
{
	struct allocation *allocation;
	CUresult r = CUDA_SUCCESS;
	int fd = -1;

	ENTER();
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&fake.lock);
	allocation = find_allocation(handle);
	if (!allocation || !(allocation->backing->shared->handle_types & type))
		r = CUDA_ERROR_INVALID_VALUE;
	else
		fd = fcntl(allocation->backing->fd, F_DUPFD_CLOEXEC, 3);
	pthread_mutex_unlock(&fake.lock);
	if (!r && fd < 0)
		r = CUDA_ERROR_OPERATING_SYSTEM;
	if (!r)
		*(int *)shareable = fd;
	return r;
}

/*
 * For other devices. A descriptor of a memfd says nothing of a range in it, so here it is of an allocation from its start;
 * what was opened of another process cannot be exported again.
 */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr ptr, size_t len,
				       CUmemRangeHandleType type, unsigned long long flags)
{
	struct fake_range *range;
	CUcontext context;
	int fd = -1;

	ENTER_CONTEXT(&context);
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || !len || ptr % 4096 ||
	    len % 4096)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake.lock);
	range = fake_find(ptr);
	if (range && range->start == ptr && len <= range->len &&
	    (range->kind == FAKE_DEVICE || range->kind == FAKE_MAPPED)) {
		fd = fcntl(range->backing->fd, F_DUPFD_CLOEXEC, 3);
		range->exported = true;
	}
	pthread_mutex_unlock(&fake.lock);
	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*(int *)handle = fd;
	return CUDA_SUCCESS;
}

/* The descriptor stays the caller's. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
					CUmemAllocationHandleType type)
{
	struct fake_backing *backing;
	CUresult r;

	ENTER();
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (fake_backing_import((int)(intptr_t)shareable, &backing))
		return CUDA_ERROR_INVALID_VALUE;
	if (!(backing->shared->handle_types & type)) {
		fake_backing_unref(backing);
		return CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_lock(&fake.lock);
	r = add_allocation(backing, handle);
	pthread_mutex_unlock(&fake.lock);
	return r;
}

CUresult cuMemGetAllocationGranularity(size_t *len, const CUmemAllocationProp *prop,
				       CUmemAllocationGranularity_flags option)
{
	ENTER();
	if (!prop_is_good(prop))
		return CUDA_ERROR_INVALID_VALUE;
	*len = FAKE_GRANULARITY;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
						CUmemGenericAllocationHandle handle)
{
	struct allocation *allocation;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	allocation = find_allocation(handle);
	if (allocation)
		*prop = (CUmemAllocationProp){
			.type = CU_MEM_ALLOCATION_TYPE_PINNED,
			.requestedHandleTypes = (CUmemAllocationHandleType)
							allocation->backing->shared->handle_types,
			.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE,
				      .id = fake_visible(allocation->backing->shared->physical) },
		};
	pthread_mutex_unlock(&fake.lock);
	return allocation ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *ptr)
{
	struct fake_range *range;
	CUresult r = CUDA_ERROR_INVALID_VALUE;

	ENTER();
	pthread_mutex_lock(&fake.lock);
	range = fake_find((uintptr_t)ptr);
	if (range && range->kind == FAKE_MAPPED) {
		r = CUDA_ERROR_NOT_FOUND;
		for (struct allocation *a = allocations; a && r; a = a->next)
			if (a->backing == range->backing) {
				a->refs++;
				*handle = (uintptr_t)a;
				r = CUDA_SUCCESS;
			}
		/* Its last handle was released while it was mapped. */
		if (r)
			r = add_allocation(fake_backing_ref(range->backing), handle);
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}
