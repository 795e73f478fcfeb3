/*
 * A trainer by hand: packets, ring entries and flags as the protocol has them, and calls of the
 * driver. gpu_world.c has several of them in one job.
 */
#include "gpu_trainer.h"
#include "proto/frame.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

const struct cuda *cu;

/* -- Packets ------------------------------------------------------------------------------------------------------ */

static Bps__Control__Message *receive(struct trainer *trainer, int fds[FRAME_FDS], size_t *ret_n)
{
	struct pollfd pollfd = { .fd = trainer->socket, .events = POLLIN };
	Bps__Control__Message *message;
	char packet[FRAME_MAX];
	size_t len = 0;

	if (poll(&pollfd, 1, (int)test_scale_s(60) * 1000) != 1)
		test_fail(__FILE__, __LINE__, "rank %u: the daemon says nothing", trainer->rank);
	ASSERT_OK(frame_receive(trainer->socket, packet, &len, fds, ret_n));
	ASSERT_OK(unpack(&bps__control__message__descriptor, packet, len,
			 (ProtobufCMessage **)&message));
	return message;
}

uint64_t trainer_send(struct trainer *trainer, Bps__Control__Request *request, int fd)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;

	request->id = trainer->next_id++;
	ASSERT_OK(pack(&request->base, FRAME_MAX, &data, &len));
	ASSERT_OK(frame_send(trainer->socket, data, len, &fd, fd >= 0));
	return request->id;
}

int trainer_answer(struct trainer *trainer, uint64_t id, char *ret_text)
{
	int status, fds[FRAME_FDS];
	size_t n_fds;

	for (;;) {
		_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;

		message = receive(trainer, fds, &n_fds);
		for (size_t i = 0; i < n_fds; i++)
			(void)close(fds[i]);
		if (message->id != id)
			continue;
		status = message->status;
		if (ret_text)
			(void)snprintf(ret_text, ERROR_TEXT_MAX + 1, "%s",
				       message->text ? message->text : "");
		return status;
	}
}

static void hello(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;
	int fds[FRAME_FDS];
	size_t n_fds;

	hello.version = hello.version_min = 1;
	hello.features = CONTROL_FEATURE_CUDA;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	(void)trainer_send(trainer, &request, -1);
	message = receive(trainer, fds, &n_fds);
	ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_WELCOME);
	ASSERT_EQ(n_fds, 3);
	ASSERT_EQ(message->welcome->shm_len, SHM_LEN);
	trainer->features = message->welcome->features;
	trainer->memory = fds[0];
	trainer->doorbell = fds[1];
	trainer->wake = fds[2];
}

/* -- Life --------------------------------------------------------------------------------------------------------- */

static void open_device(struct trainer *trainer, int device)
{
	const char *reason;
	CUdevice number;

	if (!cu && cuda_load(&cu, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
	CU(cuInit(0));
	CU(cuDeviceGet(&number, device));
	CU(cuDeviceGetUuid(&trainer->uuid, number));
	CU(cuDevicePrimaryCtxRetain(&trainer->context, number));
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamCreate(&trainer->stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemHostRegister(shm_flags(trainer->shm), SHM_FLAG_LEN, CU_MEMHOSTREGISTER_DEVICEMAP));
	CU(cuMemHostGetDevicePointer(&trainer->flags, shm_flags(trainer->shm), 0));
	trainer->device = number;
}

void trainer_open(struct trainer *trainer, const char *socket_path, int device)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	*trainer = (struct trainer){ .next_id = 1, .next_ticket = 1, .next_buffer = 1 };
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket_path);
	trainer->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	ASSERT_TRUE(trainer->socket >= 0);
	ASSERT_OK(connect(trainer->socket, (struct sockaddr *)&address, sizeof(address)));
	hello(trainer);
	trainer->shm = mmap(NULL, SHM_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, trainer->memory, 0);
	ASSERT_TRUE(trainer->shm != MAP_FAILED);
	open_device(trainer, device);
}

void trainer_close(struct trainer *trainer)
{
	(void)close(trainer->socket);
	(void)close(trainer->memory);
	(void)close(trainer->doorbell);
	(void)close(trainer->wake);
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamDestroy(trainer->stream));
	CU(cuMemHostUnregister(shm_flags(trainer->shm)));
	(void)munmap(trainer->shm, SHM_LEN);
}

uint64_t trainer_join(struct trainer *trainer, const struct trainer_job *job)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;

	join.job = (char *)job->name;
	join.rank = job->rank;
	join.size = job->size;
	join.local_rank = job->local_rank;
	join.local_size = job->local_size;
	join.node = job->node;
	join.n_nodes = job->n_nodes;
	join.has_force_distributed = join.has_gpu_reduce = join.has_part_bytes = true;
	join.force_distributed = job->force_distributed;
	join.gpu_reduce = job->gpu_reduce;
	join.has_gpu_roots = true;
	join.gpu_roots = job->gpu_roots;
	join.part_bytes = job->part_bytes;
	join.has_request_timeout_ms = job->request_timeout_ms;
	join.request_timeout_ms = job->request_timeout_ms;
	trainer->rank = job->rank;
	trainer->size = job->size;
	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	return trainer_send(trainer, &request, -1);
}

void trainer_declare(struct trainer *trainer, uint32_t number, const char *name, enum dtype dtype,
		     uint64_t elements)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Declare declare = BPS__CONTROL__DECLARE__INIT;

	declare.tensor = number;
	declare.name = (char *)name;
	declare.dtype = dtype;
	declare.elements = elements;
	request.body_case = BPS__CONTROL__REQUEST__BODY_DECLARE;
	request.declare = &declare;
	(void)trainer_send(trainer, &request, -1);
}

int trainer_leave(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	return trainer_answer(trainer, trainer_send(trainer, &request, -1), NULL);
}

/* -- Memory ------------------------------------------------------------------------------------------------------- */

static void new_vmm(struct trainer *trainer, struct memory *memory)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = trainer->device },
	};
	CUmemAccessDesc access = { .location = prop.location,
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	size_t grain;

	CU(cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	memory->len = align_up(memory->len, grain);
	CU(cuMemCreate(&memory->handle, memory->len, &prop, 0));
	CU(cuMemAddressReserve(&memory->ptr, memory->len, 0, 0, 0));
	CU(cuMemMap(memory->ptr, memory->len, 0, memory->handle, 0));
	CU(cuMemSetAccess(memory->ptr, memory->len, &access, 1));
	CU(cuMemExportToShareableHandle(&memory->fd, memory->handle,
					CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

void memory_new(struct trainer *trainer, struct memory *memory, enum memory_kind kind, uint64_t len)
{
	*memory = (struct memory){ .kind = kind, .len = len, .fd = -1 };
	memory->number = trainer->next_buffer++;
	CU(cuCtxSetCurrent(trainer->context));
	if (kind == MEMORY_CUDA_FD) {
		new_vmm(trainer, memory);
	} else if (kind == MEMORY_CUDA_IPC) {
		CU(cuMemAlloc(&memory->ptr, len));
	} else {
		memory->fd = memfd_create("trainer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		ASSERT_TRUE(memory->fd >= 0);
		ASSERT_OK(posix_fallocate(memory->fd, 0, (off_t)len));
		ASSERT_OK(fcntl(memory->fd, F_ADD_SEALS, F_SEAL_SHRINK));
		memory->data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
		ASSERT_TRUE(memory->data != MAP_FAILED);
	}
}

void memory_free(struct memory *memory)
{
	if (memory->kind == MEMORY_CUDA_FD) {
		CU(cuMemUnmap(memory->ptr, memory->len));
		CU(cuMemAddressFree(memory->ptr, memory->len));
		CU(cuMemRelease(memory->handle));
	} else if (memory->kind == MEMORY_CUDA_IPC) {
		CU(cuMemFree(memory->ptr));
	} else {
		(void)munmap(memory->data, memory->len);
	}
	(void)fd_close(memory->fd);
}

uint64_t trainer_share(struct trainer *trainer, struct memory *memory)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;
	CUipcMemHandle handle;

	share.buffer = memory->number;
	share.len = memory->len;
	if (memory->kind != MEMORY_MEMFD) {
		share.has_kind = share.has_device = true;
		share.kind = memory->kind;
		share.device = (ProtobufCBinaryData){ sizeof(trainer->uuid),
						      (uint8_t *)trainer->uuid.bytes };
	}
	if (memory->kind == MEMORY_CUDA_IPC) {
		CU(cuCtxSetCurrent(trainer->context));
		CU(cuIpcGetMemHandle(&handle, memory->ptr));
		share.has_handle = true;
		share.handle = (ProtobufCBinaryData){ sizeof(handle), (uint8_t *)handle.reserved };
	}
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	return trainer_send(trainer, &request, memory->fd);
}

uint64_t trainer_unshare(struct trainer *trainer, const struct memory *memory)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Unshare unshare = BPS__CONTROL__UNSHARE__INIT;

	unshare.buffer = memory->number;
	request.body_case = BPS__CONTROL__REQUEST__BODY_UNSHARE;
	request.unshare = &unshare;
	return trainer_send(trainer, &request, -1);
}

void trainer_new_memory(struct trainer *trainer, struct memory *memory, enum memory_kind kind,
			uint64_t len)
{
	char text[ERROR_TEXT_MAX + 1];

	memory_new(trainer, memory, kind, len);
	if (trainer_answer(trainer, trainer_share(trainer, memory), text))
		test_fail(__FILE__, __LINE__, "rank %u: Share: %s", trainer->rank, text);
}

void memory_write(struct trainer *trainer, const struct memory *memory, uint64_t offset,
		  const void *data, uint64_t len)
{
	if (memory->kind == MEMORY_MEMFD) {
		memcpy(memory->data + offset, data, len);
		return;
	}
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuMemcpyHtoDAsync(memory->ptr + offset, data, len, trainer->stream));
}

void memory_read(struct trainer *trainer, const struct memory *memory, uint64_t offset, void *data,
		 uint64_t len)
{
	if (memory->kind == MEMORY_MEMFD) {
		memcpy(data, memory->data + offset, len);
		return;
	}
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuMemcpyDtoHAsync(data, memory->ptr + offset, len, trainer->stream));
	CU(cuStreamSynchronize(trainer->stream));
}

/* -- Submissions -------------------------------------------------------------------------------------------------- */

static bool on_device(const struct submit *submit)
{
	const struct memory *memory = submit->input ? submit->input : submit->output;

	return memory && memory->kind != MEMORY_MEMFD;
}

void trainer_ready(struct trainer *trainer, uint32_t slot)
{
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamWriteValue32(trainer->stream, trainer->flags + slot * sizeof(struct shm_flag),
				(uint32_t)shm_slots(trainer->shm)[slot].ticket,
				CU_STREAM_WRITE_VALUE_DEFAULT));
}

void trainer_wait_stream(struct trainer *trainer, uint32_t slot)
{
	CU(cuCtxSetCurrent(trainer->context));
	CU(cuStreamWaitValue32(
		trainer->stream,
		trainer->flags + slot * sizeof(struct shm_flag) + offsetof(struct shm_flag, done),
		(uint32_t)shm_slots(trainer->shm)[slot].ticket, CU_STREAM_WAIT_VALUE_GEQ));
}

static uint32_t free_slot(struct trainer *trainer)
{
	for (uint32_t i = 0; i < SHM_SLOTS; i++) {
		uint32_t slot = (trainer->next_slot + i) % SHM_SLOTS;
		struct shm_slot *at = &shm_slots(trainer->shm)[slot];

		if (atomic_load(&at->state) != SHM_FREE)
			continue;
		trainer->next_slot = slot + 1;
		return slot;
	}
	test_fail(__FILE__, __LINE__, "no slot is free");
}

uint32_t trainer_submit(struct trainer *trainer, const struct submit *submit)
{
	struct shm_header *header = trainer->shm;
	uint32_t slot = free_slot(trainer), armed = 1;
	struct shm_slot *at = &shm_slots(trainer->shm)[slot];
	struct shm_flag *flag = &shm_flags(trainer->shm)[slot];
	uint64_t tail = atomic_load(&header->tail), one = 1;
	struct shm_entry *entry = &shm_ring(trainer->shm)[tail % SHM_ENTRIES];

	at->ticket = trainer->next_ticket++;
	atomic_store(&flag->ready, (uint32_t)at->ticket - 1);
	atomic_store(&flag->done, (uint32_t)at->ticket - 1);
	atomic_store(&at->state, SHM_PENDING);
	*entry = (struct shm_entry){
		.ticket = at->ticket,
		.round = submit->round,
		.slot = slot,
		.tensor = submit->tensor,
		.operation = submit->operation,
		.reduction = submit->reduction,
		.priority = submit->priority,
		.root = submit->root,
		.input_buffer = submit->input ? submit->input->number : 0,
		.output_buffer = submit->output ? submit->output->number : 0,
		.input_offset = submit->input_offset,
		.output_offset = submit->output_offset,
		.input_count = submit->input_count,
		.output_count = submit->output_count,
		.timeout_ms = submit->timeout_ms,
	};
	if (on_device(submit) && !submit->not_ready)
		trainer_ready(trainer, slot);
	atomic_store_explicit(&header->tail, tail + 1, memory_order_release);
	shm_fence();
	if (atomic_compare_exchange_strong(&header->daemon_armed, &armed, 0))
		ASSERT_EQ(write(trainer->doorbell, &one, sizeof(one)), sizeof(one));
	return slot;
}

bool trainer_ended(struct trainer *trainer, uint32_t slot)
{
	return atomic_load(&shm_slots(trainer->shm)[slot].state) == SHM_DONE;
}

int trainer_wait(struct trainer *trainer, uint32_t slot, char *ret_text)
{
	struct shm_slot *at = &shm_slots(trainer->shm)[slot];
	struct timespec pause = { .tv_nsec = 500000 }, now, start;
	int status;

	(void)clock_gettime(CLOCK_MONOTONIC, &start);
	while (!trainer_ended(trainer, slot)) {
		(void)nanosleep(&pause, NULL);
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
		if (now.tv_sec - start.tv_sec > (time_t)test_scale_s(60))
			test_fail(__FILE__, __LINE__, "rank %u: slot %u does not end",
				  trainer->rank, slot);
	}
	status = at->status;
	if (ret_text)
		(void)snprintf(ret_text, ERROR_TEXT_MAX + 1, "%s", at->text);
	atomic_store(&at->state, SHM_FREE);
	return status;
}
