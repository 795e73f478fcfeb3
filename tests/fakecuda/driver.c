/*
 * Devices and contexts.
 *
 *   FAKECUDA_DEVICES       devices of the machine (default 4)
 *   FAKECUDA_MEM_MB        memory of each (default 16384)
 *   FAKECUDA_VERSION       what cuDriverGetVersion() answers (default 13000)
 *   FAKECUDA_TOPOLOGY      "nvlink" (default): all are connected by it; "switch:N": N devices on each PCIe switch, the
 *                          switches on different sockets; "nvlink+switch:N": both; "system": each on its own
 *   FAKECUDA_RDMA          "none": memory cannot be handed to other devices; "unordered": it can, and what they write has
 *                          to be flushed; without: it can, and is in order for the device that has it alone
 *   CUDA_VISIBLE_DEVICES   as with the real one: numbers, or UUIDs ("GPU-...")
 */
#include "fake.h"

#include <ctype.h>

struct fake fake = { .lock = PTHREAD_MUTEX_INITIALIZER };

static struct {
	pthread_once_t once;
	int n_physical;
	int visible[FAKE_DEVICES_MAX]; /* physical number by device */
	int n_visible;
	int version;
	size_t device_len;
	int per_switch; /* 0: no switches */
	bool nvlink, has_no_dmabuf, is_unordered;
} machine = { .once = PTHREAD_ONCE_INIT };

static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;

static void make_thread_key(void)
{
	if (pthread_key_create(&thread_key, free))
		abort();
}

struct fake_thread *fake_thread(void)
{
	struct fake_thread *thread;

	pthread_once(&thread_once, make_thread_key);
	thread = pthread_getspecific(thread_key);
	if (thread)
		return thread;
	thread = calloc(1, sizeof(*thread));
	if (!thread || pthread_setspecific(thread_key, thread))
		abort();
	return thread;
}

static long number_of(const char *name, long fallback)
{
	const char *text = getenv(name);

	return text && *text ? strtol(text, NULL, 10) : fallback;
}

void fake_uuid(int physical, CUuuid *ret_uuid)
{
	static const unsigned char base[16] = { 0xfa, 0xce, 0xcd, 0xda, 0, 1, 0x40, 2,
						0x80, 3,    4,	  5,	6, 7, 8,    0 };

	memcpy(ret_uuid->bytes, base, sizeof(base));
	ret_uuid->bytes[15] = (char)physical;
}

void fakecuda_uuid_text(int physical, char text[FAKECUDA_UUID_TEXT_LEN])
{
	CUuuid uuid;
	const unsigned char *b = (const unsigned char *)uuid.bytes;

	fake_uuid(physical, &uuid);
	snprintf(text, FAKECUDA_UUID_TEXT_LEN,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
		 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
		 b[14], b[15]);
}

/* Ends at the first that is none, like the real one. */
static void read_visible(const char *list)
{
	char *copy = strdup(list), *save = NULL, text[FAKECUDA_UUID_TEXT_LEN];

	if (!copy)
		abort();
	machine.n_visible = 0;
	for (char *one = strtok_r(copy, ",", &save); one; one = strtok_r(NULL, ",", &save)) {
		int found = -1;

		if (isdigit((unsigned char)*one)) {
			found = (int)strtol(one, NULL, 10);
		} else {
			for (int i = 0; i < machine.n_physical; i++) {
				fakecuda_uuid_text(i, text);
				if (!strncasecmp(one, text, strlen(one)) && strlen(one) > 4)
					found = i;
			}
		}
		if (found < 0 || found >= machine.n_physical)
			break;
		machine.visible[machine.n_visible++] = found;
	}
	free(copy);
}

static void read_machine(void)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES"),
		   *topology = getenv("FAKECUDA_TOPOLOGY"), *switches,
		   *rdma = getenv("FAKECUDA_RDMA");

	machine.n_physical = (int)number_of("FAKECUDA_DEVICES", 4);
	if (machine.n_physical < 0 || machine.n_physical > FAKE_DEVICES_MAX)
		machine.n_physical = FAKE_DEVICES_MAX;
	machine.device_len = (size_t)number_of("FAKECUDA_MEM_MB", 16384) << 20;
	machine.version = (int)number_of("FAKECUDA_VERSION", 13000);
	topology = topology ? topology : "nvlink";
	machine.nvlink = !strncmp(topology, "nvlink", 6);
	switches = topology + (machine.nvlink && topology[6] == '+' ? 7 : 0);
	if (!strncmp(switches, "switch:", 7)) {
		machine.per_switch = (int)strtol(switches + 7, NULL, 10);
	} else if (strcmp(topology, "nvlink") && strcmp(topology, "system")) {
		fprintf(stderr, "fakecuda: FAKECUDA_TOPOLOGY is none of nvlink, switch:N, "
				"nvlink+switch:N, system\n");
		abort();
	}
	machine.n_visible = machine.n_physical;
	for (int i = 0; i < machine.n_physical; i++)
		machine.visible[i] = i;
	if (visible)
		read_visible(visible);
	machine.has_no_dmabuf = rdma && !strcmp(rdma, "none");
	machine.is_unordered = rdma && !strcmp(rdma, "unordered");
}

bool fake_is_unordered(void)
{
	return machine.is_unordered;
}

int fake_visible(int physical)
{
	for (int i = 0; i < fake.n_devices; i++)
		if (fake.contexts[i].physical == physical)
			return i;
	return -1;
}

int fakecuda_n_physical(void)
{
	pthread_once(&machine.once, read_machine);
	return machine.n_physical;
}

int fakecuda_physical(CUdevice device)
{
	return device >= 0 && device < fake.n_devices ? fake.contexts[device].physical : -1;
}

int fakecuda_link(int physical_a, int physical_b)
{
	pthread_once(&machine.once, read_machine);
	return (machine.nvlink ? FAKECUDA_LINK_NVLINK : 0) |
	       (machine.per_switch &&
				physical_a / machine.per_switch == physical_b / machine.per_switch
			? FAKECUDA_LINK_SWITCH
			: 0);
}

/* -- Entry ---------------------------------------------------------------------------------------------------- */

static CUresult enter(const char *function)
{
	fakecuda_trace(function);
	if (fake_thread()->in_host_function)
		return CUDA_ERROR_NOT_PERMITTED;
	pthread_mutex_lock(&fake.lock);
	bool usable = fake.initialised && fake.pid == getpid();
	pthread_mutex_unlock(&fake.lock);
	return usable ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult fake_enter(const char *function)
{
	CUresult r = enter(function);

	return r ? r : fakecuda_fault(function);
}

CUresult fake_enter_context(const char *function, CUcontext *ret_context)
{
	CUresult r = enter(function);
	CUcontext context;
	bool alive;

	if (r)
		return r;
	context = fake_current();
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&fake.lock);
	alive = context->refs > 0;
	pthread_mutex_unlock(&fake.lock);
	if (!alive)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	r = fakecuda_fault(function);
	if (fake_is_sticky(r))
		fake_poison(context, r);
	if (!r)
		r = (CUresult)atomic_load(&context->sticky);
	*ret_context = context;
	return r;
}

CUresult cuInit(unsigned int flags)
{
	CUresult r;

	fakecuda_trace(__func__);
	r = fakecuda_fault(__func__);
	if (r)
		return r;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_once(&machine.once, read_machine);
	if (!machine.n_visible)
		return CUDA_ERROR_NO_DEVICE;
	pthread_mutex_lock(&fake.lock);
	r = CUDA_SUCCESS;
	if (fake.initialised && fake.pid != getpid()) {
		r = CUDA_ERROR_NOT_INITIALIZED;
	} else if (!fake.initialised) {
		fake.initialised = true;
		fake.pid = getpid();
		fake.n_devices = machine.n_visible;
		fake.device_len = machine.device_len;
		for (int i = 0; i < fake.n_devices; i++) {
			fake.contexts[i].device = i;
			fake.contexts[i].physical = machine.visible[i];
		}
	}
	pthread_mutex_unlock(&fake.lock);
	return r;
}

CUresult cuDriverGetVersion(int *version)
{
	pthread_once(&machine.once, read_machine);
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = machine.version;
	return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
#define NAME(name_, value_)     \
	case value_:            \
		*name = #name_; \
		return CUDA_SUCCESS;

	switch ((int)error) {
		CUDA_ABI_RESULTS(NAME)
	}
	*name = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
	return cuGetErrorName(error, text);
}

CUcontext fake_current(void)
{
	struct fake_thread *thread = fake_thread();

	return thread->depth ? thread->stack[thread->depth - 1] : NULL;
}

/* -- Devices -------------------------------------------------------------------------------------------------- */

static bool is_device(CUdevice device)
{
	return device >= 0 && device < fake.n_devices;
}

CUresult cuDeviceGetCount(int *count)
{
	ENTER();
	*count = fake.n_devices;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	ENTER();
	if (!is_device(ordinal))
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(name, (size_t)len, "test double");
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	fake_uuid(fake.contexts[device].physical, uuid);
	return CUDA_SUCCESS;
}

/* Each device a bus of its own. */
CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(id, (size_t)len, "FFFF:%02X:00.0", fake.contexts[device].physical + 1);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_INTEGRATED:
	case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
		*value = 0xffff;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		*value = fake.contexts[device].physical + 1;
		break;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
		*value = 2;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 8;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
		*value = !machine.has_no_dmabuf;
		break;
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
		*value = machine.is_unordered ? CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE
					      : CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
		break;
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
		*value = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
		*value = 1;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *len, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	*len = fake.device_len;
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
	ENTER();
	if (!is_device(device) || !is_device(peer))
		return CUDA_ERROR_INVALID_DEVICE;
	*can = device != peer &&
	       fakecuda_link(fake.contexts[device].physical, fake.contexts[peer].physical);
	return CUDA_SUCCESS;
}

/* -- Contexts ------------------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&fake.lock);
	fake.contexts[device].refs++;
	pthread_mutex_unlock(&fake.lock);
	*context = &fake.contexts[device];
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	CUcontext context;
	bool last;

	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	context = &fake.contexts[device];
	pthread_mutex_lock(&fake.lock);
	if (!context->refs) {
		pthread_mutex_unlock(&fake.lock);
		return CUDA_ERROR_INVALID_CONTEXT;
	}
	last = !--context->refs;
	pthread_mutex_unlock(&fake.lock);
	if (!last)
		return CUDA_SUCCESS;
	/* A stream that waits is waited for. */
	(void)fake_context_drain(context);
	fake_poison(context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
	fake_context_close(context);
	pthread_mutex_lock(&fake.lock);
	fake_memory_free_all(context);
	context->used = 0;
	context->peers = 0;
	atomic_store(&context->sticky, 0);
	pthread_mutex_unlock(&fake.lock);
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	ENTER();
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&fake.lock);
	*active = fake.contexts[device].refs > 0;
	pthread_mutex_unlock(&fake.lock);
	*flags = 0;
	return CUDA_SUCCESS;
}

static bool is_context(CUcontext context)
{
	return context >= fake.contexts && context < fake.contexts + fake.n_devices;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
	ENTER();
	*context = fake_current();
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	struct fake_thread *thread = fake_thread();

	ENTER();
	if (context && !is_context(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!context)
		thread->depth -= thread->depth > 0;
	else if (thread->depth)
		thread->stack[thread->depth - 1] = context;
	else
		thread->stack[thread->depth++] = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	struct fake_thread *thread = fake_thread();

	ENTER();
	if (!is_context(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (thread->depth == ARRAY_SIZE(thread->stack))
		return CUDA_ERROR_OUT_OF_MEMORY;
	thread->stack[thread->depth++] = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	struct fake_thread *thread = fake_thread();

	ENTER();
	if (!thread->depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	thread->depth--;
	if (context)
		*context = thread->stack[thread->depth];
	return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	CUcontext context;
	CUresult r = CUDA_SUCCESS;

	ENTER_CONTEXT(&context);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_context(peer) || peer == context || !peer->refs)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!fakecuda_link(context->physical, peer->physical))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	pthread_mutex_lock(&fake.lock);
	if (context->peers >> peer->device & 1)
		r = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	context->peers |= UINT64_C(1) << peer->device;
	pthread_mutex_unlock(&fake.lock);
	return r;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	*device = context->device;
	return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	return fake_context_drain(context);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CUcontext context;

	ENTER_CONTEXT(&context);
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}
