/*
 * What a hostile trainer writes into the memory it shares: ring entries, indexes, counts. Its packets are honest: it is
 * the only rank of a job and has shared some memory and declared three tensors. The first byte of the input is the mode:
 *
 *	0	entries as they are, then as many are posted
 *	1	the same, and the first 8 bytes after the mode are the ring's tail
 *	2	as 0, while another thread overwrites entries, indexes and counts with each other
 *
 * The daemon must end each request or the session, stay inside what was shared, and serve the next trainer.
 */
#include "base/log.h"
#include "base/loop/porter.h"
#include "control/control.h"
#include "fuzz.h"
#include "proto/control.pb-c.h"
#include "proto/frame.h"
#include "proto/pack.h"
#include "proto/shm.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#define SHARED_LEN  32768u /* shared with the daemon */
#define MEMORY_LEN  65536u /* of the memfd: what lies behind must stay untouched */
#define TURNS_MAX   100000
#define ENTRIES_MAX 64u

static struct {
	struct loop *loop;
	struct pool *pool;
	struct block_cache *blocks;
	struct agent *agent;
	struct control *control;
	struct sockaddr_un address;
	socklen_t address_len;
} door;

struct trainer {
	int socket, memory, doorbell, wake, shm_fd;
	void *shm;
	uint8_t *data;
	uint64_t id;
};

static void porter_ended(void *user)
{
	FUZZ_CHECK(false);
}

static void open_door(void)
{
	struct agent_params agent = { .part_bytes = 4096,
				      .inline_bytes = UINT64_MAX,
				      .ahead_bytes = 4096,
				      .max_jobs = 8,
				      .max_tensors = 8 };
	struct control_params control = { .node = "node",
					  .max_sessions = 8,
					  .max_sessions_per_uid = 8,
					  .max_buffers = 8,
					  .max_tensors = 8,
					  .session_quota_bytes = 1 << 20,
					  .hello_timeout_ms = 3600000 };

	log_init(LOG_LEVEL_ERROR);
	FUZZ_CHECK(!porter_start(NULL, NULL));
	FUZZ_CHECK(!loop_new(&door.loop) && !porter_attach(door.loop, porter_ended, NULL) &&
		   !pool_new(door.loop, 0, &door.pool) && !block_cache_new(0, &door.blocks));
	agent.loop = control.loop = door.loop;
	agent.pool = door.pool;
	agent.blocks = door.blocks;
	FUZZ_CHECK(!agent_new(&agent, &door.agent));

	/* A name of the kernel's choice, outside the file system. */
	control.agent = door.agent;
	control.listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	door.address.sun_family = AF_UNIX;
	door.address_len = sizeof(door.address);
	FUZZ_CHECK(!bind(control.listen_fd, (struct sockaddr *)&door.address,
			 sizeof(door.address.sun_family)) &&
		   !listen(control.listen_fd, 8) &&
		   !getsockname(control.listen_fd, (struct sockaddr *)&door.address,
				&door.address_len));
	FUZZ_CHECK(!control_new(&control, &door.control));
}

/* Sends a request and takes its answer with what comes beside it. */
static void ask(struct trainer *trainer, Bps__Control__Request *request, int fd, int *ret_fds)
{
	Bps__Control__Message *message;
	char packet[FRAME_MAX];
	int fds[FRAME_FDS], r;
	size_t len, n_fds;
	void *data;

	request->id = ++trainer->id;
	FUZZ_CHECK(!pack(&request->base, FRAME_MAX, &data, &len));
	FUZZ_CHECK(!frame_send(trainer->socket, data, len, &fd, fd >= 0));
	free(data);
	while ((r = frame_receive(trainer->socket, packet, &len, fds, &n_fds)) == FRAME_E_AGAIN)
		FUZZ_CHECK(!loop_turn(door.loop, 1000));
	FUZZ_CHECK(!r);
	FUZZ_CHECK(!unpack(&bps__control__message__descriptor, packet, len,
			   (ProtobufCMessage **)&message));
	FUZZ_CHECK(message->id == trainer->id && !message->status);
	unpack_free(&message->base);
	FUZZ_CHECK(n_fds == (ret_fds ? 3 : 0));
	if (ret_fds)
		memcpy(ret_fds, fds, 3 * sizeof(fds[0]));
}

static void say_hello(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Hello hello = BPS__CONTROL__HELLO__INIT;
	int fds[3];

	hello.version = hello.version_min = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_HELLO;
	request.hello = &hello;
	ask(trainer, &request, -1, fds);
	trainer->shm_fd = fds[0];
	trainer->doorbell = fds[1];
	trainer->wake = fds[2];
	trainer->shm = mmap(NULL, SHM_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	FUZZ_CHECK(trainer->shm != MAP_FAILED);
}

static void join(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;

	join.job = (char *)"fuzz";
	join.size = join.local_size = join.n_nodes = 1;
	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	ask(trainer, &request, -1, NULL);
}

static void share(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;

	trainer->memory = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	FUZZ_CHECK(!ftruncate(trainer->memory, MEMORY_LEN) &&
		   !fallocate(trainer->memory, 0, 0, MEMORY_LEN) &&
		   !fcntl(trainer->memory, F_ADD_SEALS, F_SEAL_SHRINK));
	trainer->data =
		mmap(NULL, MEMORY_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, trainer->memory, 0);
	FUZZ_CHECK(trainer->data != MAP_FAILED);
	share.buffer = 1;
	share.len = SHARED_LEN;
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	ask(trainer, &request, trainer->memory, NULL);
}

static void declare(struct trainer *trainer, uint32_t number, unsigned dtype, uint64_t elements)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Declare declare = BPS__CONTROL__DECLARE__INIT;
	char name[16];

	(void)snprintf(name, sizeof(name), "t%u", number);
	declare.tensor = number;
	declare.name = name;
	declare.dtype = dtype;
	declare.elements = elements;
	request.body_case = BPS__CONTROL__REQUEST__BODY_DECLARE;
	request.declare = &declare;
	ask(trainer, &request, -1, NULL);
}

static void trainer_open(struct trainer *trainer)
{
	trainer->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	FUZZ_CHECK(!connect(trainer->socket, (struct sockaddr *)&door.address, door.address_len));
	say_hello(trainer);
	join(trainer);
	share(trainer);
	declare(trainer, 1, DTYPE_FLOAT32, 100);
	declare(trainer, 2, DTYPE_INT8, ELEMENTS_VARIABLE);
	declare(trainer, 3, DTYPE_FLOAT64, ELEMENTS_VARIABLE);
}

/* In good order: of one that hangs up without a word the daemon first waits to hear whether it died. */
static void leave(struct trainer *trainer)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	size_t len;
	void *data;

	request.id = ++trainer->id;
	request.body_case = BPS__CONTROL__REQUEST__BODY_LEAVE;
	request.leave = &leave;
	FUZZ_CHECK(!pack(&request.base, FRAME_MAX, &data, &len));
	/* It may have been cut off. */
	(void)frame_send(trainer->socket, data, len, NULL, 0);
	free(data);
}

static void trainer_close(struct trainer *trainer)
{
	leave(trainer);
	(void)munmap(trainer->shm, SHM_LEN);
	(void)munmap(trainer->data, MEMORY_LEN);
	(void)fd_close(trainer->socket);
	(void)fd_close(trainer->memory);
	(void)fd_close(trainer->doorbell);
	(void)fd_close(trainer->wake);
	(void)fd_close(trainer->shm_fd);
	for (int i = 0; control_n_sessions(door.control); i++)
		FUZZ_CHECK(i < TURNS_MAX && !loop_turn(door.loop, 1000));
	FUZZ_CHECK(!control_pending(door.control));
}

/* The other thread: words of the input go where the daemon is reading. */
struct spoiler {
	struct trainer *trainer;
	const uint8_t *input;
	size_t size;
	_Atomic bool stop;
};

static void *spoil(void *user)
{
	struct spoiler *s = user;
	volatile uint64_t *ring = (volatile uint64_t *)shm_ring(s->trainer->shm);
	volatile uint64_t *data = (volatile uint64_t *)s->trainer->data;
	size_t n_words = s->size / 8;

	for (size_t i = 0; n_words && !atomic_load_explicit(&s->stop, memory_order_relaxed); i++) {
		uint64_t word;

		memcpy(&word, s->input + i % n_words * 8, sizeof(word));
		ring[i * 7 % (ENTRIES_MAX * sizeof(struct shm_entry) / 8)] = word;
		data[i * 5 % (SHARED_LEN / 8)] = word;
	}
	return NULL;
}

static bool is_closed(const struct trainer *trainer)
{
	char byte;

	return recv(trainer->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 ||
	       (errno != EAGAIN && errno != EWOULDBLOCK);
}

/* Until the daemon has taken all entries and wants to be woken, or has had enough. */
static void let_it_drain(struct trainer *trainer)
{
	struct shm_header *header = trainer->shm;
	uint64_t one = 1;

	for (int i = 0; i < TURNS_MAX; i++) {
		/* Before it waits, which is not for long, it says that it wants to be woken. */
		FUZZ_CHECK(write(trainer->doorbell, &one, sizeof(one)) == sizeof(one));
		FUZZ_CHECK(!loop_turn(door.loop, i > 4));
		if (!control_n_sessions(door.control) ||
		    (atomic_load(&header->daemon_armed) && i > 4))
			return;
	}
	abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct trainer trainer = { 0 };
	struct spoiler spoiler = { .trainer = &trainer };
	struct shm_header *header;
	size_t n_entries;
	pthread_t thread;
	uint64_t tail;
	uint8_t mode;

	if (size < 9)
		return 0;
	if (!door.loop)
		open_door();
	mode = data[0] % 3;
	data++;
	size--;
	trainer_open(&trainer);
	header = trainer.shm;
	memcpy(shm_ring(trainer.shm), data, MIN(size, ENTRIES_MAX * sizeof(struct shm_entry)));
	/* Counts are read from here. */
	memcpy(trainer.data, data, MIN(size, (size_t)SHARED_LEN));
	n_entries = MIN((size + sizeof(struct shm_entry) - 1) / sizeof(struct shm_entry),
			(size_t)ENTRIES_MAX);
	tail = n_entries;
	if (mode == 1)
		memcpy(&tail, data, sizeof(tail));
	spoiler.input = data;
	spoiler.size = size;
	if (mode == 2)
		FUZZ_CHECK(!pthread_create(&thread, NULL, spoil, &spoiler));

	atomic_store(&header->trainer_armed, data[0] & 3);
	atomic_store(&header->daemon_armed, 0);
	atomic_store(&header->tail, tail);
	let_it_drain(&trainer);

	if (mode == 2) {
		atomic_store(&spoiler.stop, true);
		FUZZ_CHECK(!pthread_join(thread, NULL));
	}
	/* One rank alone waits for nobody: what was taken is done. */
	FUZZ_CHECK(is_closed(&trainer) || !control_pending(door.control));
	for (size_t i = SHARED_LEN; i < MEMORY_LEN; i++)
		FUZZ_CHECK(!trainer.data[i]);
	trainer_close(&trainer);
	return 0;
}
