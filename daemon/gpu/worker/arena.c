/*
 * Arenas in a worker: memory of a device that RDMA devices read and write, allocated and
 * exported as a dma-buf. Set-up thread. direct.c is the daemon's side.
 */
#include "base/pages.h"
#include "gpu/worker/worker.h"

#include <stdio.h>
#include <unistd.h>

static int refuse(char *text, const struct device *device, const char *why)
{
	(void)snprintf(text, ERROR_TEXT_MAX, "device %d (%s): %s", device->number, device->name,
		       why);
	return -EOPNOTSUPP;
}

static int attribute_of(const struct device *device, CUdevice_attribute attribute)
{
	int value;

	/* One that the driver does not know is 0. */
	if (worker.cuda->cuDeviceGetAttribute(&value, attribute, device->number) != CUDA_SUCCESS)
		return 0;
	return value;
}

/* What RDMA devices write is in order for whoever reads it here, or is when it has been flushed. */
static bool is_ordered(struct device *device)
{
	int options =
		attribute_of(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);

	device->order = attribute_of(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
	return device->order >= (device->has_others ? CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
						    : CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) ||
	       ((options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) &&
		worker.cuda->cuFlushGPUDirectRDMAWrites);
}

static int failed(char *text, const struct device *device, const char *call, CUresult result)
{
	char why[160];

	(void)snprintf(why, sizeof(why), "%s: %s", call, cuda_error_name(worker.cuda, result));
	return refuse(text, device, why);
}

/* A range that is exported begins and ends at pages of the host. */
static int allocate(struct device *device, uint64_t len, char *text)
{
	uint64_t page = page_size();
	const unsigned int yes = 1;
	CUdeviceptr memory;
	CUresult r;

	r = worker.cuda->cuMemAlloc(&memory, len + page);
	if (r != CUDA_SUCCESS)
		return failed(text, device, "cuMemAlloc", r);
	/*
	 * So that no copy returns before it is done, as the driver wants it for what others read;
	 * ours wait anyway.
	 */
	(void)worker.cuda->cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
	device->arena_memory = memory;
	(void)pthread_mutex_lock(&worker.lock);
	device->arena = align_up(memory, page);
	device->arena_len = len;
	(void)pthread_mutex_unlock(&worker.lock);
	return 0;
}

static int export(struct device *device, uint64_t len, char *text, int *ret_fd)
{
	char why[200];
	CUresult result;
	int fd = -1, r;

	if (!worker.cuda->cuMemGetHandleForAddressRange ||
	    !attribute_of(device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED))
		return refuse(text, device,
			      "the driver has no dma-bufs of its memory (NVIDIA's open kernel "
			      "modules have)");
	if (!worker_reach(device, why, sizeof(why), &device->has_others))
		return refuse(text, device, why);
	if (!is_ordered(device))
		return refuse(text, device, "what others write into its memory cannot be flushed");
	r = allocate(device, len, text);
	if (r)
		return r;
	result = worker.cuda->cuMemGetHandleForAddressRange(&fd, device->arena, len,
							    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (result != CUDA_SUCCESS)
		return failed(text, device, "cuMemGetHandleForAddressRange", result);
	*ret_fd = fd;
	return 0;
}

void worker_arena_open(struct device *device, const struct gpu_command *command)
{
	struct gpu_event event = { .kind = GPU_EVENT_ARENA, .number = command->slot };
	_cleanup_(fd_closep) int fd = -1;

	if (command->slot >= ARRAY_SIZE(worker.arenas))
		worker_fatal(-EPROTO, "the daemon asks for more arenas than there are devices");
	(void)pthread_mutex_lock(&worker.lock);
	worker.arenas[command->slot] = device;
	(void)pthread_mutex_unlock(&worker.lock);
	event.status = export(device, command->len, event.text, &fd);
	worker_say_with(&event, fd);
}

void worker_arena_drop(struct device *device)
{
	CUdeviceptr memory = device->arena_memory;

	if (!memory)
		return;
	device->arena_memory = 0;
	(void)pthread_mutex_lock(&worker.lock);
	device->arena = 0;
	device->arena_len = 0;
	(void)pthread_mutex_unlock(&worker.lock);
	worker_check(worker.cuda->cuMemFree(memory), "cuMemFree", device);
}
