#include "device.h"
#include "cu.h"
#include "gpu/gpu.h"
#include "transport/transport.h"
#include <sys/socket.h>
#include <sys/wait.h>

/* Of the host; nothing goes by it here. */
#define STAGING_BYTES ((uint64_t)1 << 20)

enum order { ORDER_FILL, ORDER_CHECK };

struct order_packet {
	enum order order;
	size_t offset, len;
	uint64_t seed;
};

struct hello_packet {
	char why[256]; /* "" or why it has no memory */
	CUuuid uuid;
	CUipcMemHandle handle;
};

struct device {
	size_t len;
	pid_t trainer;
	int socket;
	struct loop *loop;
	struct transport *transport;
	struct gpu *gpu;
	struct gpu_worker *worker;
	struct gpu_memory *memory;
	struct gpu_lease lease;
	struct gpu_task task;
	struct failure failure;
	bool is_opened, is_lost, is_done, is_gone;
};

/* -- The trainer's process, which alone has a driver here ---------------------------------------------------------- */

static const struct cuda *cu;

static CUresult allocate(size_t len, struct hello_packet *hello, CUdeviceptr *ret_memory)
{
	CUcontext context;
	CUresult r = cu->cuInit(0);

	if (!r)
		r = cu->cuDeviceGetUuid(&hello->uuid, 0);
	if (!r)
		r = cu->cuDevicePrimaryCtxRetain(&context, 0);
	if (!r)
		r = cu->cuCtxSetCurrent(context);
	if (!r)
		r = cu->cuMemAlloc(ret_memory, len);
	return r ?: cu->cuIpcGetMemHandle(&hello->handle, *ret_memory);
}

static void say(int socket, const void *packet, size_t len)
{
	ASSERT_EQ(send(socket, packet, len, MSG_NOSIGNAL), (ssize_t)len);
}

static void run_order(const struct order_packet *order, CUdeviceptr memory, char *host, int socket)
{
	bool good = true;

	if (order->order == ORDER_FILL) {
		pair_fill(host, order->len, order->seed);
		CU(cuMemcpyHtoDAsync(memory + order->offset, host, order->len, NULL));
		CU(cuCtxSynchronize());
	} else {
		memset(host, 0, order->len);
		CU(cuMemcpyDtoHAsync(host, memory + order->offset, order->len, NULL));
		CU(cuCtxSynchronize());
		good = pair_check(host, order->len, order->seed);
	}
	say(socket, &good, sizeof(good));
}

_Noreturn static void run_trainer(int socket, size_t len)
{
	struct hello_packet hello = { 0 };
	struct order_packet order;
	CUdeviceptr memory;
	const char *reason;
	char *host;

	if (cuda_load(&cu, &reason)) {
		(void)snprintf(hello.why, sizeof(hello.why), "%s", reason);
	} else {
		CUresult r = allocate(len, &hello, &memory);

		if (r)
			(void)snprintf(hello.why, sizeof(hello.why), "%zu bytes of a GPU: %s", len,
				       cuda_error_name(cu, r));
	}
	say(socket, &hello, sizeof(hello));
	host = hello.why[0] ? NULL : malloc(len);
	while (host && recv(socket, &order, sizeof(order), 0) == sizeof(order))
		run_order(&order, memory, host, socket);
	/* A driver keeps threads and descriptors. */
	_exit(EXIT_SUCCESS);
}

struct device *device_new(size_t len)
{
	struct device *device = calloc(1, sizeof(*device));
	int sockets[2];

	ASSERT_TRUE(device);
	device->len = len;
	ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets));
	device->trainer = fork();
	ASSERT_TRUE(device->trainer >= 0);
	if (!device->trainer) {
		(void)close(sockets[0]);
		run_trainer(sockets[1], len);
	}
	(void)close(sockets[1]);
	device->socket = sockets[0];
	return device;
}

static bool ask(struct device *device, enum order order, size_t offset, size_t len, uint64_t seed)
{
	struct order_packet packet = { .order = order, .offset = offset, .len = len, .seed = seed };
	bool good;

	say(device->socket, &packet, sizeof(packet));
	ASSERT_EQ(recv(device->socket, &good, sizeof(good), 0), (ssize_t)sizeof(good));
	return good;
}

/* -- The daemon's part ---------------------------------------------------------------------------------------------- */

static int on_staging(void *user, void *data, size_t len)
{
	const struct device *device = user;

	return transport_memory_add(device->transport, NULL, data, len);
}

static int on_exported(void *user, void *data, size_t len, int dmabuf, struct failure *failure)
{
	const struct device *device = user;

	return transport_memory_add_direct(device->transport, data, len, dmabuf, failure);
}

static void on_closing(void *user, void *data)
{
	const struct device *device = user;

	(void)transport_memory_remove(device->transport, data, NULL);
}

static const struct gpu_staging_ops staging_ops = { on_staging, on_exported, on_closing };

static void on_changed(void *user)
{
	(void)user;
}

static void on_lost(void *user, const struct failure *failure)
{
	struct device *device = user;

	device->failure = *failure;
	device->is_lost = true;
}

static void on_gone(void *user)
{
	struct device *device = user;

	device->is_gone = true;
}

static const struct gpu_worker_ops worker_ops = { on_changed, on_lost, on_gone };

static void on_opened(void *user, const struct failure *why)
{
	struct device *device = user;

	if (why)
		device->failure = *why;
	device->is_opened = true;
}

static void turn(struct device *device)
{
	ASSERT_OK(loop_turn(device->loop, -1));
	if (device->is_lost)
		test_fail(__FILE__, __LINE__, "%s", device->failure.text);
}

#define UNTIL(device, condition)      \
	do {                          \
		while (!(condition))  \
			turn(device); \
	} while (0)

static bool refuse(char *why, size_t size, const char *text)
{
	(void)snprintf(why, size, "%s", text);
	return false;
}

static bool start_worker(struct device *device, char *why, size_t size)
{
	struct gpu_params params = {
		.loop = device->loop,
		.program = getenv("BPS_DAEMON"),
		.staging_bytes = STAGING_BYTES,
		.direct_bytes = device->len,
		.staging_ops = &staging_ops,
		.user = device,
		.timeout_ms = 60000,
	};
	struct failure failure;

	ASSERT_TRUE(params.program);
	ASSERT_OK(gpu_new(&params, &device->gpu));
	if (!gpu_is_there(device->gpu))
		return refuse(why, size, gpu_describe(device->gpu));
	if (gpu_worker_start(device->gpu, "rdma-check", &worker_ops, device, &device->worker,
			     &failure))
		return refuse(why, size, failure.text);
	return true;
}

static bool import(struct device *device, const struct hello_packet *hello, char *why, size_t size)
{
	struct gpu_memory_params params = { .kind = MEMORY_CUDA_IPC, .fd = -1, .len = device->len };

	static_assert(sizeof(hello->handle) <= sizeof(params.handle), "it has room");
	memcpy(params.device, hello->uuid.bytes, sizeof(params.device));
	memcpy(params.handle, hello->handle.reserved, sizeof(hello->handle));
	ASSERT_OK(gpu_memory_new(&params, &device->memory));
	gpu_memory_open(device->memory, device->worker, on_opened, device);
	UNTIL(device, device->is_opened);
	return !device->failure.status || refuse(why, size, device->failure.text);
}

bool device_open(struct device *device, struct loop *loop, struct transport *transport, char *why,
		 size_t size)
{
	struct hello_packet hello;

	device->loop = loop;
	device->transport = transport;
	if (!start_worker(device, why, size))
		return false;
	ASSERT_EQ(recv(device->socket, &hello, sizeof(hello), 0), (ssize_t)sizeof(hello));
	if (hello.why[0])
		return refuse(why, size, hello.why);
	if (!import(device, &hello, why, size))
		return false;
	gpu_direct_open(device->worker, device->memory);
	UNTIL(device, gpu_direct_state(device->worker, device->memory) != GPU_DIRECT_OPENING);
	if (gpu_direct_state(device->worker, device->memory) != GPU_DIRECT_OPEN) {
		gpu_direct_describe(device->worker, why, size);
		return false;
	}
	ASSERT_OK(
		gpu_lease_take_direct(device->worker, device->memory, &device->lease, device->len));
	return true;
}

char *device_data(const struct device *device)
{
	return device->lease.data;
}

static void on_done(struct gpu_task *task, bool failed)
{
	struct device *device = container_of(task, struct device, task);

	ASSERT_TRUE(!failed);
	device->is_done = true;
}

static void copy(struct device *device, bool is_down)
{
	device->is_done = false;
	device->task.done = on_done;
	gpu_task_begin(device->worker, &device->task);
	if (is_down)
		gpu_task_down(device->worker, device->memory, 0, device->lease.data, device->len);
	else
		gpu_task_up(device->worker, device->memory, 0, device->lease.data, device->len);
	gpu_task_end(device->worker);
	UNTIL(device, device->is_done);
}

void device_fill(struct device *device, uint64_t seed)
{
	ASSERT_TRUE(ask(device, ORDER_FILL, 0, device->len, seed));
	copy(device, true);
}

bool device_check(struct device *device, size_t offset, size_t len, uint64_t seed)
{
	copy(device, false);
	return ask(device, ORDER_CHECK, offset, len, seed);
}

static void close_worker(struct device *device)
{
	gpu_lease_give(&device->lease);
	if (device->memory)
		gpu_memory_free(device->memory, NULL, NULL);
	gpu_worker_close(device->worker);
	UNTIL(device, device->is_gone);
}

struct device *device_free(struct device *device)
{
	if (!device)
		return NULL;
	if (device->worker)
		close_worker(device);
	gpu_free(device->gpu);
	(void)close(device->socket);
	ASSERT_EQ(waitpid(device->trainer, NULL, 0), device->trainer);
	free(device);
	return NULL;
}
