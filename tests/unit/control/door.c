/*
 * A door and trainers by hand: packets sent and received, memory shared, entries posted.
 * test_session.c, test_ring.c and others begin from here.
 */
#include "door.h"
#include "base/loop/porter.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

static void porter_ended(void *user)
{
	test_fail(__FILE__, __LINE__, "the porter has ended");
}

struct door *door_new(const struct door_options *given)
{
	struct door_options options = given ? *given : (struct door_options){ 0 };
	struct door *door = calloc(1, sizeof(*door));
	struct agent_params agent;
	struct control_params control;

	ASSERT_TRUE(door);
	(void)snprintf(door->path, sizeof(door->path), "%s/bps.sock", test_dir());
	ASSERT_OK(porter_start(NULL, NULL));
	ASSERT_OK(loop_new(&door->loop));
	ASSERT_OK(porter_attach(door->loop, porter_ended, NULL));
	ASSERT_OK(pool_new(door->loop, options.n_threads, &door->pool));
	ASSERT_OK(block_cache_new(0, &door->blocks));
	door->gpu = options.gpu_new ? options.gpu_new(door->loop) : NULL;
	agent = (struct agent_params){
		.loop = door->loop,
		.gpu = door->gpu,
		.pool = door->pool,
		.blocks = door->blocks,
		.part_bytes = 1 << 20,
		.inline_bytes = 64 << 10,
		.ahead_bytes = 1 << 20,
		.max_jobs = 8,
		.max_tensors = MAX(64u, options.max_tensors),
	};
	ASSERT_OK(agent_new(&agent, &door->agent));
	control = (struct control_params){
		.loop = door->loop,
		.agent = door->agent,
		.socket_path = door->path,
		.listen_fd = -1,
		.accounts = options.accounts,
		.node = "node0",
		.id = 77,
		.has_cuda = door->gpu,
		.spin_ns = options.spin_ns,
		.max_sessions = options.max_sessions ? options.max_sessions : 64,
		.max_sessions_per_uid =
			options.max_sessions_per_uid ? options.max_sessions_per_uid : 64,
		.max_buffers = options.max_buffers ? options.max_buffers : 64,
		.max_tensors = options.max_tensors ? options.max_tensors : 64,
		.session_quota_bytes =
			options.session_quota_bytes ? options.session_quota_bytes : 1ull << 30,
		.hello_timeout_ms =
			options.hello_timeout_ms ? options.hello_timeout_ms : 3600 * 1000,
	};
	ASSERT_OK(control_new(&control, &door->control));
	door->features = options.features;
	return door;
}

struct door *door_free(struct door *door)
{
	if (!door)
		return NULL;
	control_close(door->control);
	agent_close(door->agent);
	pool_free(door->pool);
	control_free(door->control);
	agent_free(door->agent);
	ASSERT_EQ(block_cache_used(door->blocks), 0);
	block_cache_free(door->blocks);
	porter_stop();
	loop_free(door->loop);
	free(door);
	return NULL;
}

/* -- Packets ------------------------------------------------------------------------------------------------------ */

void trainer_connect(struct trainer *trainer, struct door *door)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	*trainer = (struct trainer){ .door = door,
				     .memory = -1,
				     .doorbell = -1,
				     .wake = -1,
				     .next_id = 1,
				     .next_ticket = 1 };
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", door->path);
	trainer->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	ASSERT_TRUE(trainer->socket >= 0);
	ASSERT_OK(connect(trainer->socket, (struct sockaddr *)&address, sizeof(address)));
}

void trainer_send_bytes(struct trainer *trainer, const void *data, size_t len, const int *fds,
			size_t n_fds)
{
	int r;

	while ((r = frame_send(trainer->socket, data, len, fds, n_fds)) == FRAME_E_AGAIN)
		ASSERT_OK(loop_turn(trainer->door->loop, 0));
	ASSERT_OK(r);
}

uint64_t trainer_send(struct trainer *trainer, Bps__Control__Request *request, const int *fds,
		      size_t n_fds)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;

	request->id = trainer->next_id++;
	ASSERT_OK(pack(&request->base, FRAME_MAX, &data, &len));
	trainer_send_bytes(trainer, data, len, fds, n_fds);
	return request->id;
}

bool trainer_readable(struct trainer *trainer)
{
	struct pollfd pollfd = { .fd = trainer->socket, .events = POLLIN };

	return poll(&pollfd, 1, 0) == 1;
}

static Bps__Control__Message *receive(struct trainer *trainer, int fds[FRAME_FDS], size_t *ret_n)
{
	Bps__Control__Message *message;
	char packet[FRAME_MAX];
	size_t len;
	int r;

	DOOR_UNTIL(trainer->door, trainer_readable(trainer));
	r = frame_receive(trainer->socket, packet, &len, fds, ret_n);
	/* A reset comes before what was said last. */
	if (r == FRAME_E_EOF)
		r = frame_receive(trainer->socket, packet, &len, fds, ret_n);
	if (r == FRAME_E_EOF)
		return NULL;
	ASSERT_OK(r);
	ASSERT_OK(unpack(&bps__control__message__descriptor, packet, len,
			 (ProtobufCMessage **)&message));
	ASSERT_TRUE(!message->status == !message->text);
	return message;
}

Bps__Control__Message *trainer_receive(struct trainer *trainer)
{
	Bps__Control__Message *message;
	int fds[FRAME_FDS];
	size_t n_fds = 0;

	message = receive(trainer, fds, &n_fds);
	ASSERT_EQ(n_fds, 0);
	return message;
}

void trainer_expect_end(struct trainer *trainer)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;

	while ((message = trainer_receive(trainer)))
		message = (Bps__Control__Message *)unpack_free(&message->base);
}

int trainer_answer(struct trainer *trainer, uint64_t id, char *text)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = trainer_receive(trainer);

	if (!message)
		test_fail(__FILE__, __LINE__, "the daemon has hung up");
	if (message->id != id)
		test_fail(__FILE__, __LINE__, "answer to %" PRIu64 ", not %" PRIu64 ": %s",
			  message->id, id, message->text ? message->text : "");
	if (text)
		(void)snprintf(text, ERROR_TEXT_MAX + 1, "%s", message->text ? message->text : "");
	return message->status;
}

void trainer_open(struct trainer *trainer, struct door *door)
{
	_cleanup_(unpack_freep) Bps__Control__Message *message = NULL;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;
	int fds[FRAME_FDS];
	size_t n_fds = 0;

	trainer_connect(trainer, door);
	hello.version = hello.version_min = 1;
	hello.features = door->features;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	(void)trainer_send(trainer, &request, NULL, 0);
	message = receive(trainer, fds, &n_fds);
	ASSERT_TRUE(message);
	ASSERT_EQ(message->status, 0);
	ASSERT_EQ(message->body_case, BPS__CONTROL__MESSAGE__BODY_WELCOME);
	ASSERT_EQ(message->welcome->version, 1);
	ASSERT_STR(message->welcome->node, "node0");
	ASSERT_EQ(message->welcome->daemon, 77);
	ASSERT_EQ(message->welcome->shm_len, SHM_LEN);
	ASSERT_EQ(n_fds, 3);
	trainer->memory = fds[0];
	trainer->doorbell = fds[1];
	trainer->wake = fds[2];
	trainer->shm = mmap(NULL, SHM_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, trainer->memory, 0);
	ASSERT_TRUE(trainer->shm != MAP_FAILED);
}

unsigned trainer_read_all(const struct trainer *trainer)
{
	char packet[4096];
	unsigned n = 0;

	while (recv(trainer->socket, packet, sizeof(packet), MSG_DONTWAIT) > 0)
		n++;
	return n;
}

void trainer_close(struct trainer *trainer)
{
	if (trainer->shm)
		(void)munmap(trainer->shm, SHM_LEN);
	trainer->shm = NULL;
	trainer->socket = fd_close(trainer->socket);
	trainer->memory = fd_close(trainer->memory);
	trainer->doorbell = fd_close(trainer->doorbell);
	trainer->wake = fd_close(trainer->wake);
}

/* -- Requests ----------------------------------------------------------------------------------------------------- */

uint64_t trainer_send_join(struct trainer *trainer, const char *job, uint32_t rank, uint32_t size,
			   uint64_t timeout_ms)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;

	join.job = (char *)job;
	join.rank = join.local_rank = rank;
	join.size = join.local_size = size;
	join.n_nodes = 1;
	join.has_timeout_ms = true;
	join.timeout_ms = timeout_ms;
	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	return trainer_send(trainer, &request, NULL, 0);
}

int trainer_join(struct trainer *trainer, const char *job, uint32_t rank, uint32_t size, char *text)
{
	return trainer_answer(trainer, trainer_send_join(trainer, job, rank, size, 60000), text);
}

uint64_t trainer_send_share(struct trainer *trainer, uint32_t number, int fd, uint64_t len)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;

	share.buffer = number;
	share.len = len;
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	return trainer_send(trainer, &request, &fd, fd >= 0);
}

int trainer_share(struct trainer *trainer, uint32_t number, int fd, uint64_t len, char *text)
{
	return trainer_answer(trainer, trainer_send_share(trainer, number, fd, len), text);
}

uint64_t trainer_send_unshare(struct trainer *trainer, uint32_t number)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Unshare unshare = BPS__CONTROL__UNSHARE__INIT;

	unshare.buffer = number;
	request.body_case = BPS__CONTROL__REQUEST__BODY_UNSHARE;
	request.unshare = &unshare;
	return trainer_send(trainer, &request, NULL, 0);
}

int trainer_unshare(struct trainer *trainer, uint32_t number)
{
	return trainer_answer(trainer, trainer_send_unshare(trainer, number), NULL);
}

uint64_t trainer_send_declare(struct trainer *trainer, uint32_t number, const char *name,
			      unsigned dtype, uint64_t elements)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Declare declare = BPS__CONTROL__DECLARE__INIT;

	declare.tensor = number;
	declare.name = (char *)name;
	declare.dtype = dtype;
	declare.elements = elements;
	request.body_case = BPS__CONTROL__REQUEST__BODY_DECLARE;
	request.declare = &declare;
	return trainer_send(trainer, &request, NULL, 0);
}

int trainer_declare(struct trainer *trainer, uint32_t number, const char *name, unsigned dtype,
		    uint64_t elements, char *text)
{
	return trainer_answer(trainer, trainer_send_declare(trainer, number, name, dtype, elements),
			      text);
}

uint64_t trainer_send_leave(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;

	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	return trainer_send(trainer, &request, NULL, 0);
}

int trainer_leave(struct trainer *trainer, char *text)
{
	return trainer_answer(trainer, trainer_send_leave(trainer), text);
}

uint64_t trainer_send_cancel(struct trainer *trainer, uint32_t slot, uint64_t ticket)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Cancel cancel = BPS__CONTROL__CANCEL__INIT;

	cancel.slot = slot;
	cancel.ticket = ticket;
	request.body_case = BPS__CONTROL__REQUEST__BODY_CANCEL;
	request.cancel = &cancel;
	return trainer_send(trainer, &request, NULL, 0);
}

uint64_t trainer_send_blocked(struct trainer *trainer, uint32_t slot, uint64_t ticket)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Blocked blocked = BPS__CONTROL__BLOCKED__INIT;

	blocked.slot = slot;
	blocked.ticket = ticket;
	request.body_case = BPS__CONTROL__REQUEST__BODY_BLOCKED;
	request.blocked = &blocked;
	return trainer_send(trainer, &request, NULL, 0);
}

/* -- Memory and ring ---------------------------------------------------------------------------------------------- */

int memory_new(size_t len, void **ret_data)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	ASSERT_TRUE(fd >= 0);
	ASSERT_OK(ftruncate(fd, (off_t)len));
	ASSERT_OK(len ? fallocate(fd, 0, 0, (off_t)len) : 0);
	ASSERT_OK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
	if (ret_data) {
		*ret_data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		ASSERT_TRUE(*ret_data != MAP_FAILED);
	}
	return fd;
}

struct shm_entry trainer_entry(uint32_t tensor, uint64_t round, uint32_t input, uint32_t output,
			       uint64_t n)
{
	return (struct shm_entry){
		.round = round,
		.tensor = tensor,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.input_buffer = input,
		.output_buffer = output,
		.input_count = n,
		.output_count = n,
	};
}

void trainer_post_raw(struct trainer *trainer, const struct shm_entry *entry)
{
	struct shm_header *header = trainer->shm;
	uint32_t armed = 1;
	uint64_t one = 1;

	shm_ring(trainer->shm)[trainer->tail++ % SHM_ENTRIES] = *entry;
	atomic_store_explicit(&header->tail, trainer->tail, memory_order_release);
	shm_fence();
	if (atomic_compare_exchange_strong(&header->daemon_armed, &armed, 0))
		ASSERT_EQ(write(trainer->doorbell, &one, sizeof(one)), sizeof(one));
}

uint32_t trainer_post(struct trainer *trainer, const struct shm_entry *given)
{
	struct shm_entry entry = *given;
	struct shm_slot *slot;

	entry.slot = trainer->next_slot++ % SHM_SLOTS;
	entry.ticket = trainer->next_ticket++;
	slot = &shm_slots(trainer->shm)[entry.slot];
	slot->ticket = entry.ticket;
	atomic_store(&slot->state, SHM_PENDING);
	trainer_post_raw(trainer, &entry);
	return entry.slot;
}

bool trainer_done(struct trainer *trainer, uint32_t slot)
{
	return atomic_load(&shm_slots(trainer->shm)[slot].state) == SHM_DONE;
}

int trainer_wait(struct trainer *trainer, uint32_t slot, char *text)
{
	const struct shm_slot *done = &shm_slots(trainer->shm)[slot];

	DOOR_UNTIL(trainer->door, trainer_done(trainer, slot));
	if (text)
		(void)snprintf(text, ERROR_TEXT_MAX + 1, "%s", done->text);
	ASSERT_TRUE(!done->status == !*done->text);
	return done->status;
}
