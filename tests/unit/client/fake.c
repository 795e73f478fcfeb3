/*
 * The fake daemon: its thread, its answers to packets, its work on ring entries, and what a test
 * has it do wrong.
 */
#include "fake.h"

#include "control.pb-c.h"
#include "proto/frame.h"
#include "proto/pack.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static void event_write(int fd)
{
	uint64_t one = 1;

	(void)!write(fd, &one, sizeof(one));
}

void fake_lock(struct fake *fake)
{
	(void)pthread_mutex_lock(&fake->mutex);
}

void fake_unlock(struct fake *fake)
{
	(void)pthread_cond_broadcast(&fake->changed);
	(void)pthread_mutex_unlock(&fake->mutex);
	/* To look again, with what is different now. */
	if (!pthread_equal(pthread_self(), fake->thread))
		event_write(fake->stop);
}

const struct fake_told *told(struct fake *fake)
{
	static struct fake_told copy;

	fake_lock(fake);
	copy = fake->told;
	fake_unlock(fake);
	return &copy;
}

static void fake_unlockp(struct fake **fake)
{
	fake_unlock(*fake);
}
#define FAKE_LOCKED(fake) \
	_cleanup_(fake_unlockp) _unused_ struct fake *locked_ = (fake_lock(fake), (fake))

/* -- Shared memory ------------------------------------------------------------------------------------------------ */

static void wake_write(const struct fake_session *session)
{
	uint64_t one = 1;

	(void)send(session->trainer_event, &one, sizeof(one), MSG_NOSIGNAL);
}

static void session_count(struct fake_session *session, uint32_t number)
{
	struct shm_header *header = session->shm;
	uint64_t n = atomic_load_explicit(&header->completions, memory_order_relaxed);

	if (session->ordered)
		atomic_store_explicit(&header->order[n % SHM_ORDER], (uint16_t)number,
				      memory_order_relaxed);
	atomic_store_explicit(&header->completions, n + 1, memory_order_release);
	shm_fence();
	if (shm_is_awaited(header, n + 1) && shm_disarm(header) == SHM_ARMED)
		wake_write(session);
}

static void session_end(struct fake_session *session, uint32_t number, int status, const char *text)
{
	struct shm_slot *slot = &shm_slots(session->shm)[number];

	slot->status = status;
	(void)snprintf(slot->text, sizeof(slot->text), "%s", text ? text : "");
	if (!status && session->ordered) {
		slot->no_text = 0;
		slot->brief = 1;
		slot->brief_rows = slot->n_rows;
		slot->n_rows = 0; /* not said */
	}
	atomic_store_explicit(&slot->state, SHM_DONE, memory_order_release);
	session_count(session, number);
}

static char *session_data(struct fake_session *session, uint32_t number, uint64_t offset,
			  uint64_t len)
{
	if (!len)
		return NULL;
	for (unsigned i = 0; i < session->n_buffers; i++) {
		struct fake_buffer *b = &session->buffers[i];

		if (b->number == number) {
			ASSERT_TRUE(offset <= b->len && len <= b->len - offset);
			return b->data + offset;
		}
	}
	test_fail(__FILE__, __LINE__, "an entry names buffer %u, which was not shared", number);
}

static void session_run_rows(struct fake_session *session, const struct shm_entry *e)
{
	uint64_t n_in = e->input_count / e->width, room = e->output_count / e->width;
	const char *in =
		session_data(session, e->input_rows_buffer, e->input_rows_offset, n_in * 8);
	char *out = session_data(session, e->output_rows_buffer, e->output_rows_offset, room * 8);

	if (room)
		memset(out, 0x77, room * 8);
	if (MIN(n_in, room))
		memcpy(out, in, MIN(n_in, room) * 8);
	shm_slots(session->shm)[e->slot].n_rows = MIN(n_in, room);
}

static bool session_on_device(const struct fake_session *session, const struct shm_entry *e)
{
	for (unsigned i = 0; i < session->n_buffers; i++) {
		const struct fake_buffer *b = &session->buffers[i];

		if (b->kind && (b->number == e->input_buffer || b->number == e->output_buffer))
			return true;
	}
	return false;
}

/* As a worker's stream does. */
static void session_await_ready(struct fake_session *session, const struct shm_entry *e)
{
	struct shm_flag *flag = &shm_flags(session->shm)[e->slot];

	for (unsigned i = 0; !shm_flag_reached(atomic_load(&flag->ready), e->ticket); i++) {
		ASSERT_TRUE(i < 60000);
		(void)poll(NULL, 0, 1);
	}
}

/*
 * Reads and writes all that the entry says, so that a wrong offset or length is caught. With streams of this process it is
 * in step by flags that both have at addresses of their own, which the thread sanitizer takes for different ones.
 */
__attribute__((no_sanitize("thread"))) static void
session_run(struct fake *fake, struct fake_session *session, const struct shm_entry *e)
{
	size_t len = dtype_size(session->dtypes[e->tensor % FAKE_TENSORS]);
	bool rows = e->operation == OPERATION_PUSH_PULL_ROWS, has_input = e->input_buffer;
	size_t input_size = rows || !e->input_dtype ? len : dtype_size(e->input_dtype);
	uint64_t input_len = has_input ? e->input_count * input_size : 0;
	uint64_t output_len = e->output_buffer ? e->output_count * len : 0;
	char *input = session_data(session, e->input_buffer, e->input_offset, input_len);
	char *output = session_data(session, e->output_buffer, e->output_offset, output_len);

	bool on_device = session_on_device(session, e);

	if (on_device)
		session_await_ready(session, e);
	ASSERT_TRUE(len);
	ASSERT_TRUE(e->operation == OPERATION_BARRIER || has_input || !e->input_count ||
		    e->operation == OPERATION_BROADCAST);
	for (uint64_t i = output_len; i--;)
		output[i] = (char)((input_len ? input[i % input_len] : 0) + 1);
	if (rows)
		session_run_rows(session, e);
	if (on_device)
		atomic_store(&shm_flags(session->shm)[e->slot].done, (uint32_t)e->ticket);
}

static void session_copy_counts(struct fake *fake, struct fake_session *session,
				const struct shm_entry *e)
{
	uint64_t n = fake->told.join.size * (e->operation == OPERATION_ALL_TO_ALL ? 2 : 1);

	if (e->counts_buffer && n <= ARRAY_SIZE(fake->told.counts))
		memcpy(fake->told.counts,
		       session_data(session, e->counts_buffer, e->counts_offset, n * 8), n * 8);
}

static bool session_read(struct fake *fake, struct fake_session *session);

/* Whether all that the entry needs has been read. If not, it was posted behind whatever is being read now. */
static bool session_knows(const struct fake_session *session, const struct shm_entry *e)
{
	return session->dtypes[e->tensor % FAKE_TENSORS];
}

/*
 * With the socket, numbers that entries name are learnt first: what an entry needs was sent before it was posted, so the
 * socket is read after the tail. Returns false when the trainer has gone.
 */
static bool session_drain(struct fake *fake, struct fake_session *session, bool with_socket)
{
	struct shm_header *header = session->shm;
	bool here = true;
	uint64_t tail;

	do {
		tail = atomic_load_explicit(&header->tail, memory_order_acquire);
		if (with_socket)
			here = session_read(fake, session);
		/* A Leave among what was read may have drained further already. */
		for (; (int64_t)(tail - session->head) > 0; session->head++) {
			const struct shm_entry *e =
				&shm_ring(session->shm)[session->head % SHM_ENTRIES];

			ASSERT_TRUE(e->slot < SHM_SLOTS && e->tensor);
			if (!with_socket && !session_knows(session, e))
				break;
			ASSERT_EQ(shm_slots(session->shm)[e->slot].ticket, e->ticket);
			fake->told.entry = *e;
			session_copy_counts(fake, session, e);
			fake->told.n_entries++;
			if (fake->hold) {
				fake->held[(fake->told.n_entries - 1) % FAKE_HELD] = *e;
			} else {
				if (!fake->status)
					session_run(fake, session, e);
				if (fake->n_rows)
					shm_slots(session->shm)[e->slot].n_rows = fake->n_rows;
				session_end(session, e->slot, fake->status, fake->text);
			}
		}
		atomic_store_explicit(&header->daemon_armed, 1, memory_order_relaxed);
		shm_fence();
	} while (atomic_load_explicit(&header->tail, memory_order_relaxed) != tail);
	return here;
}

/* -- Control channel ---------------------------------------------------------------------------------------------- */

static void session_send(struct fake_session *session, Bps__Control__Message *message, int status,
			 const char *text, const int *fds, size_t n_fds)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;

	if (status) {
		message->has_status = true;
		message->status = status;
		message->text = (char *)text;
		message->body_case = BPS__CONTROL__MESSAGE__BODY__NOT_SET;
	}
	ASSERT_OK(pack(&message->base, FRAME_MAX, &data, &len));
	/* A trainer that declares a lot reads what it is told meanwhile. */
	while (frame_send(session->socket, data, len, fds, n_fds) == FRAME_E_AGAIN) {
		struct pollfd writable = { .fd = session->socket, .events = POLLOUT };

		ASSERT_EQ(poll(&writable, 1, 30000), 1);
	}
}

static void session_map(struct fake *fake, struct fake_session *session, int *ret_memfd,
			int *ret_wake)
{
	struct shm_header *header;
	int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING), ends[2];

	ASSERT_OK(ftruncate(fd, SHM_LEN));
	if (!fake->unsealed)
		ASSERT_OK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	header = session->shm = mmap(NULL, SHM_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_TRUE(session->shm != MAP_FAILED);
	header->magic = SHM_MAGIC;
	header->version = fake->shm_version ? fake->shm_version : SHM_VERSION;
	header->n_entries = SHM_ENTRIES;
	header->n_slots = SHM_SLOTS;
	header->len = SHM_LEN;
	atomic_store(&header->daemon_armed, 1); /* it sleeps until the first post */
	session->daemon_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ASSERT_OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends));
	session->trainer_event = ends[0];
	*ret_wake = ends[1];
	*ret_memfd = fd;
}

static void answer_hello(struct fake *fake, struct fake_session *session, uint64_t id)
{
	Bps__Control__Welcome welcome = BPS__CONTROL__WELCOME__INIT;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	_cleanup_(fd_closep) int memfd = -1, wake = -1;
	int fds[3];

	fake->told.hello_id = fake->hello_mute ? id : 0;
	if (fake->hello_mute)
		return;
	if (fake->hang_up || fake->hang_ups) {
		fake->hang_ups -= !!fake->hang_ups;
		(void)shutdown(session->socket, SHUT_RDWR);
		return;
	}
	if (fake->hello_garbage) {
		(void)send(session->socket, "\xff\xff\xff", 3, MSG_NOSIGNAL);
		return;
	}
	session_map(fake, session, &memfd, &wake);
	fds[0] = memfd;
	fds[1] = session->daemon_event;
	fds[2] = wake;
	welcome.version = fake->version ? fake->version : 1;
	welcome.daemon = fake->daemon;
	welcome.features = fake->features;
	welcome.software = (char *)"fake 1";
	welcome.node = (char *)"here";
	welcome.shm_len = SHM_LEN;
	message.id = id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_WELCOME;
	message.welcome = &welcome;
	session_send(session, &message, fake->hello_status, fake->hello_text, fds,
		     fake->hello_status ? 0 : 3);
}

static void answer_join(struct fake *fake, struct fake_session *session, uint64_t id,
			const Bps__Control__Join *join)
{
	Bps__Control__Joined joined = BPS__CONTROL__JOINED__INIT;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	(void)snprintf(fake->told.join.job, sizeof(fake->told.join.job), "%s", join->job);
	memset(fake->told.join.secret, 0, sizeof(fake->told.join.secret));
	if (join->secret.len)
		memcpy(fake->told.join.secret, join->secret.data, join->secret.len);
	fake->told.join.secret_len = join->secret.len;
	fake->told.join.rank = join->rank;
	fake->told.join.size = join->size;
	fake->told.join.local_rank = join->local_rank;
	fake->told.join.local_size = join->local_size;
	fake->told.join.node = join->node;
	fake->told.join.n_nodes = join->n_nodes;
	fake->told.join.min_servers = join->min_servers;
	fake->told.join.part_bytes = join->part_bytes;
	fake->told.join.timeout_ms = join->timeout_ms;
	fake->told.join.request_timeout_ms = join->request_timeout_ms;
	fake->told.join.force_distributed = join->force_distributed;
	fake->told.gpu_reduce = join->gpu_reduce;
	fake->told.gpu_roots = join->gpu_roots;
	fake->told.n_joins++;
	if (fake->join_mute)
		return;
	if (fake->ledger && fake->ledger_fd < 0)
		fake->ledger_fd = memfd_create("ledger", MFD_CLOEXEC);
	joined.job = fake->told.n_joins;
	message.id = id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOINED;
	message.joined = &joined;
	session->joined = !fake->join_status;
	session_send(session, &message, fake->join_status, fake->join_text, &fake->ledger_fd,
		     fake->ledger && !fake->join_status);
}

static void answer_resume(struct fake *fake, struct fake_session *session, uint64_t id,
			  const Bps__Control__Resume *resume, int fd)
{
	Bps__Control__Joined joined = BPS__CONTROL__JOINED__INIT;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	struct stat given, back;

	ASSERT_TRUE(!session->joined && fake->features & CONTROL_FEATURE_RESUME);
	ASSERT_OK(fstat(fake->ledger_fd, &given));
	ASSERT_OK(fstat(fd, &back));
	ASSERT_EQ(given.st_ino, back.st_ino);
	ASSERT_STR(resume->join->job, fake->told.join.job);
	ASSERT_EQ(resume->join->rank, fake->told.join.rank);
	ASSERT_EQ(resume->join->size, fake->told.join.size);
	ASSERT_EQ(resume->join->request_timeout_ms, fake->told.join.request_timeout_ms);
	ASSERT_EQ(resume->join->secret.len, fake->told.join.secret_len);
	if (resume->join->secret.len)
		ASSERT_MEM(resume->join->secret.data, fake->told.join.secret,
			   fake->told.join.secret_len);
	fake->told.resumed_job = resume->job;
	fake->told.n_resumes++;
	if (fake->resume_mute)
		return;
	session->joined = !fake->resume_status;
	joined.job = resume->job;
	message.id = id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOINED;
	message.joined = &joined;
	session_send(session, &message, fake->resume_status, fake->resume_text, NULL, 0);
}

static void answer_share(struct fake *fake, struct fake_session *session, uint64_t id,
			 const Bps__Control__Share *share, int fd)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	struct fake_buffer *b = &session->buffers[session->n_buffers];
	int status = fake->share_status;

	message.id = id;
	if (fake->share_quota && fake->told.shared_len + share->len > fake->share_quota)
		status = -EDQUOT;
	if (share->kind) {
		ASSERT_TRUE(session->joined && share->device.len == DEVICE_UUID_LEN);
		ASSERT_EQ(fd >= 0, share->kind == MEMORY_CUDA_FD);
		fake->told.n_devices++;
		fake->told.device_kind = share->kind;
		fake->told.handle_len = share->handle.len;
		memcpy(fake->told.device, share->device.data, DEVICE_UUID_LEN);
		status = fake->device_status;
	}
	if (!status && share->kind) {
		ASSERT_TRUE(session->n_buffers < FAKE_BUFFERS && share->buffer);
		*b = (struct fake_buffer){ .number = share->buffer,
					   .len = share->len,
					   .kind = share->kind,
					   .data = fake->device_ipc };
		if (fd >= 0)
			b->data = mmap(NULL, b->len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		ASSERT_TRUE(b->data && b->data != MAP_FAILED);
		session->n_buffers++;
	} else if (!status) {
		ASSERT_TRUE(session->n_buffers < FAKE_BUFFERS && share->buffer && fd >= 0);
		*b = (struct fake_buffer){ .number = share->buffer, .len = share->len };
		b->seals = fcntl(fd, F_GET_SEALS);
		ASSERT_TRUE(b->seals & F_SEAL_SHRINK);
		b->data = mmap(NULL, b->len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		ASSERT_TRUE(b->data != MAP_FAILED);
		session->n_buffers++;
		fake->told.shared_len += share->len;
	}
	fake->told.n_shares += !share->kind;
	if (fake->share_mute)
		return;
	session_send(session, &message, status,
		     share->kind ? "no such device here" : "the limit of a session is reached",
		     NULL, 0);
}

static void answer_unshare(struct fake *fake, struct fake_session *session, uint64_t id,
			   uint32_t number)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	message.id = id;
	for (unsigned i = 0; i < session->n_buffers; i++) {
		struct fake_buffer *b = &session->buffers[i];

		if (b->number != number)
			continue;
		fake->told.shared_len -= b->kind ? 0 : b->len;
		if (b->kind != MEMORY_CUDA_IPC)
			(void)munmap(b->data, b->len);
		*b = session->buffers[--session->n_buffers];
		fake->told.n_unshares++;
		if (fake->unshare_mute)
			return;
		session_send(session, &message, 0, NULL, NULL, 0);
		return;
	}
	test_fail(__FILE__, __LINE__, "Unshare of buffer %u, which was not shared", number);
}

static void send_declared(struct fake_session *session, uint64_t id, int status, const char *text)
{
	Bps__Control__Declared declared = BPS__CONTROL__DECLARED__INIT;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	declared.key = id;
	declared.part_bytes = 1 << 20;
	message.id = id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_DECLARED;
	message.declared = &declared;
	session_send(session, &message, status, text, NULL, 0);
}

static void answer_release(struct fake *fake, struct fake_session *session, int status)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	message.id = fake->told.release_id;
	fake->told.release_id = 0;
	if (message.id)
		session_send(session, &message, status, status ? "a rank uses it" : NULL, NULL, 0);
}

static void take_release(struct fake *fake, struct fake_session *session, uint64_t id, bool in_use)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	if (!in_use) {
		fake->told.n_releases++;
		fake->told.release_id = id;
		return;
	}
	fake->told.n_keeps++;
	answer_release(fake, session, -EBUSY);
	message.id = id;
	session_send(session, &message, 0, NULL, NULL, 0);
}

static void answer_follow(struct fake *fake, struct fake_session *session, int status,
			  const char *text)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	message.id = fake->told.follow_id;
	fake->told.follow_id = 0;
	session_send(session, &message, status, text, NULL, 0);
}

static void answer_leave(struct fake *fake, struct fake_session *session, uint64_t id,
			 const char *error)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	message.id = id;
	fake->told.n_leaves++;
	(void)snprintf(fake->told.leave_error, sizeof(fake->told.leave_error), "%s",
		       error ? error : "");
	if (fake->leave_mute)
		return;
	if (error) { /* its requests end with the session */
		session_send(session, &message, 0, NULL, NULL, 0);
		(void)shutdown(session->socket, SHUT_RDWR);
		return;
	}
	if (fake->hold)
		for (uint32_t i = 0; i < SHM_SLOTS; i++)
			if (atomic_load(&shm_slots(session->shm)[i].state) == SHM_PENDING)
				session_end(session, i, -ECANCELED, "the rank left its job");
	session_send(session, &message, 0, NULL, NULL, 0);
}

static void session_request(struct fake *fake, struct fake_session *session,
			    const Bps__Control__Request *request, const int *fds, size_t n_fds)
{
	ASSERT_TRUE(request->id);
	switch (request->body_case) {
	case BPS__CONTROL__REQUEST__BODY_HELLO:
		fake->told.hello_features = request->hello->features;
		session->ordered =
			fake->features & request->hello->features & CONTROL_FEATURE_ORDER;
		answer_hello(fake, session, request->id);
		break;
	case BPS__CONTROL__REQUEST__BODY_JOIN:
		answer_join(fake, session, request->id, request->join);
		break;
	case BPS__CONTROL__REQUEST__BODY_SHARE:
		answer_share(fake, session, request->id, request->share, n_fds ? fds[0] : -1);
		break;
	case BPS__CONTROL__REQUEST__BODY_UNSHARE:
		answer_unshare(fake, session, request->id, request->unshare->buffer);
		break;
	case BPS__CONTROL__REQUEST__BODY_RESUME:
		ASSERT_EQ(n_fds, 1);
		answer_resume(fake, session, request->id, request->resume, fds[0]);
		break;
	case BPS__CONTROL__REQUEST__BODY_DECLARE:
		ASSERT_TRUE(session->joined);
		fake->told.rounds[request->declare->tensor % 16] = request->declare->rounds;
		fake->told.failed[request->declare->tensor % 16] = request->declare->failed;
		fake->told.again[request->declare->tensor % 16] = request->declare->has_rounds;
		session->dtypes[request->declare->tensor % FAKE_TENSORS] =
			(uint8_t)request->declare->dtype;
		(void)snprintf(fake->told.name, sizeof(fake->told.name), "%s",
			       request->declare->name);
		(void)snprintf(fake->told.shape, sizeof(fake->told.shape), "%s",
			       request->declare->shape ?: "");
		fake->told.elements = request->declare->elements;
		fake->told.declare_id = request->id;
		fake->told.n_declares++;
		if (!fake->declare_mute)
			send_declared(session, request->id, fake->declare_status,
				      fake->declare_text);
		break;
	case BPS__CONTROL__REQUEST__BODY_RELEASE:
		take_release(fake, session, request->id, request->release->in_use);
		break;
	case BPS__CONTROL__REQUEST__BODY_FOLLOW:
		ASSERT_TRUE(session->joined && fake->features & CONTROL_FEATURE_FOLLOW);
		/* What was posted before counts as before: the ring first. */
		(void)session_drain(fake, session, false);
		fake->told.follows = request->follow->follows;
		fake->told.idle = request->follow->idle;
		fake->told.turn = request->follow->turn;
		fake->told.follow_id = request->id;
		fake->told.n_follows++;
		if (!fake->follow_mute)
			answer_follow(fake, session, fake->follow_status, fake->follow_text);
		break;
	case BPS__CONTROL__REQUEST__BODY_CANCEL:
		/* What was posted before counts as before: the ring first. */
		(void)session_drain(fake, session, false);
		fake->told.cancelled_slot = request->cancel->slot;
		ASSERT_EQ(shm_slots(session->shm)[request->cancel->slot].ticket,
			  request->cancel->ticket);
		fake->told.n_cancels++;
		session_end(session, request->cancel->slot, -ECANCELED, "cancelled by rank 0");
		break;
	case BPS__CONTROL__REQUEST__BODY_BLOCKED:
		ASSERT_TRUE(fake->features & CONTROL_FEATURE_BLOCKED);
		(void)session_drain(fake, session, false);
		ASSERT_EQ(shm_slots(session->shm)[request->blocked->slot].ticket,
			  request->blocked->ticket);
		fake->told.blocked_slot = request->blocked->slot;
		fake->told.blocked_over = request->blocked->over;
		fake->told.n_blocked++;
		break;
	case BPS__CONTROL__REQUEST__BODY_LEAVE:
		(void)session_drain(fake, session, false);
		answer_leave(fake, session, request->id, request->leave->error);
		break;
	default:
		test_fail(__FILE__, __LINE__, "a request of kind %d", (int)request->body_case);
	}
}

/* False when the trainer has gone. */
static bool session_read(struct fake *fake, struct fake_session *session)
{
	static char frame[FRAME_MAX];

	for (;;) {
		_cleanup_(unpack_freep) ProtobufCMessage *request = NULL;
		int fds[FRAME_FDS];
		size_t len, n_fds = 0;
		int r = frame_receive(session->socket, frame, &len, fds, &n_fds);

		if (r == FRAME_E_AGAIN)
			return true;
		if (r)
			return false;
		ASSERT_OK(unpack(&bps__control__request__descriptor, frame, len, &request));
		session_request(fake, session, (Bps__Control__Request *)request, fds, n_fds);
		while (n_fds)
			fd_close(fds[--n_fds]);
	}
}

/* -- Sessions and the thread --------------------------------------------------------------------------------------- */

static struct fake_session *session_free(struct fake_session *session)
{
	if (!session)
		return NULL;
	/* Now, though the fake's thread may still poll it: before the other end of wake-ups is gone. */
	(void)shutdown(session->socket, SHUT_RDWR);
	fd_close(session->socket);
	fd_close(session->daemon_event);
	fd_close(session->trainer_event);
	if (session->shm)
		(void)munmap(session->shm, SHM_LEN);
	for (unsigned i = 0; i < session->n_buffers; i++)
		if (session->buffers[i].kind != MEMORY_CUDA_IPC)
			(void)munmap(session->buffers[i].data, session->buffers[i].len);
	free(session);
	return NULL;
}

static void fake_accept(struct fake *fake)
{
	struct fake_session *session = calloc(1, sizeof(*session));

	ASSERT_TRUE(session);
	session->daemon_event = session->trainer_event = -1;
	session->socket = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	ASSERT_TRUE(session->socket >= 0);
	for (unsigned i = 0; i < FAKE_SESSIONS; i++) {
		if (fake->sessions[i])
			continue;
		fake->sessions[i] = session;
		fake->told.n_sessions++;
		return;
	}
	test_fail(__FILE__, __LINE__, "too many sessions");
}

static void fake_work(struct fake *fake, unsigned i, short socket_events)
{
	struct fake_session *session = fake->sessions[i];
	uint64_t value;

	if (session->shm) {
		(void)!read(session->daemon_event, &value, sizeof(value));
		if (!session_drain(fake, session, !fake->deaf))
			socket_events |= POLLHUP;
	} else if (!session_read(fake, session)) {
		socket_events |= POLLHUP;
	}
	if (socket_events & POLLHUP) {
		fake->sessions[i] = session_free(session);
		fake->told.n_gone++;
	}
}

static void *fake_thread(void *data)
{
	struct fake *fake = data;

	for (;;) {
		struct pollfd fds[2 + 2 * FAKE_SESSIONS];

		{
			FAKE_LOCKED(fake);
			fds[0] = (struct pollfd){ .fd = fake->stop, .events = POLLIN };
			fds[1] = (struct pollfd){ .fd = fake->listener, .events = POLLIN };
			for (unsigned i = 0; i < FAKE_SESSIONS; i++) {
				struct fake_session *s = fake->sessions[i];

				fds[2 + 2 * i] =
					(struct pollfd){ .fd = s ? s->socket : -1,
							 .events = fake->deaf ? 0 : POLLIN };
				fds[3 + 2 * i] = (struct pollfd){ .fd = s ? s->daemon_event : -1,
								  .events = POLLIN };
			}
		}
		(void)poll(fds, ARRAY_SIZE(fds), -1);

		FAKE_LOCKED(fake);
		if (fds[0].revents) {
			uint64_t value;

			ASSERT_EQ(read(fake->stop, &value, sizeof(value)), sizeof(value));
			if (fake->listener < 0)
				return NULL;
		}
		for (unsigned i = 0; i < FAKE_SESSIONS; i++)
			if (fake->sessions[i] && fds[2 + 2 * i].fd == fake->sessions[i]->socket)
				fake_work(fake, i, fds[2 + 2 * i].revents);
		/* Last: a new session may have the descriptor of one that has ended since the poll. */
		if (fds[1].revents & POLLIN)
			fake_accept(fake);
	}
}

static int fake_listen(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	(void)stpcpy(address.sun_path, path);
	(void)unlink(path);
	ASSERT_OK(bind(fd, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(listen(fd, 16));
	return fd;
}

struct fake *fake_new(void)
{
	struct fake *fake = calloc(1, sizeof(*fake));

	ASSERT_TRUE(fake);
	(void)snprintf(fake->path, sizeof(fake->path), "%s/bps.sock", test_dir());
	fake->listener = fake_listen(fake->path);
	fake->ledger_fd = -1;
	fake->daemon = 1;
	fake->features = CONTROL_FEATURE_RESUME | CONTROL_FEATURE_FUTEX | CONTROL_FEATURE_ORDER |
			 CONTROL_FEATURE_WIDEN | CONTROL_FEATURE_FOLLOW;
	fake->stop = eventfd(0, EFD_CLOEXEC);
	ASSERT_OK(pthread_mutex_init(&fake->mutex, NULL));
	ASSERT_OK(pthread_cond_init(&fake->changed, NULL));
	ASSERT_OK(pthread_create(&fake->thread, NULL, fake_thread, fake));
	return fake;
}

struct fake *fake_free(struct fake *fake)
{
	if (!fake)
		return NULL;
	{
		FAKE_LOCKED(fake);
		fake->listener = fd_close(fake->listener);
	}
	ASSERT_OK(pthread_join(fake->thread, NULL));
	for (unsigned i = 0; i < FAKE_SESSIONS; i++)
		session_free(fake->sessions[i]);
	fd_close(fake->stop);
	fd_close(fake->ledger_fd);
	(void)unlink(fake->path);
	free(fake);
	return NULL;
}

/* -- What tests do with it ----------------------------------------------------------------------------------------- */

void fake_await(struct fake *fake, const unsigned *count, unsigned n)
{
	FAKE_LOCKED(fake);
	while (*count < n)
		(void)pthread_cond_wait(&fake->changed, &fake->mutex);
}

static struct fake_session *fake_session(struct fake *fake)
{
	for (unsigned i = 0; i < FAKE_SESSIONS; i++)
		if (fake->sessions[i])
			return fake->sessions[i];
	test_fail(__FILE__, __LINE__, "the fake has no session");
}

uint32_t fake_awaited(struct fake *fake)
{
	struct shm_header *header;

	FAKE_LOCKED(fake);
	header = fake_session(fake)->shm;
	return atomic_load(&header->trainer_slot);
}

uint32_t fake_armed(struct fake *fake)
{
	struct shm_header *header;

	FAKE_LOCKED(fake);
	header = fake_session(fake)->shm;
	return atomic_load(&header->trainer_armed);
}

void fake_complete(struct fake *fake, unsigned n, int status, const char *text)
{
	FAKE_LOCKED(fake);
	if (!status)
		session_run(fake, fake_session(fake), &fake->held[n]);
	session_end(fake_session(fake), fake->held[n].slot, status, text);
}

void fake_scribble(struct fake *fake, uint32_t slot, uint32_t state, int status)
{
	FAKE_LOCKED(fake);
	struct fake_session *session = fake_session(fake);
	struct shm_slot *s = &shm_slots(session->shm)[slot];

	s->status = status;
	memset(s->text, 'x', sizeof(s->text)); /* without an end */
	atomic_store(&s->state, state);
	session_count(session, slot);
}

void fake_scribble_order(struct fake *fake, uint64_t n)
{
	FAKE_LOCKED(fake);
	struct shm_header *header = fake_session(fake)->shm;

	for (unsigned i = 0; i < SHM_ORDER; i++)
		atomic_store(&header->order[i], (uint16_t)(UINT16_MAX - i));
	atomic_fetch_add(&header->completions, n);
}

void fake_declared(struct fake *fake, int status, const char *text)
{
	FAKE_LOCKED(fake);
	send_declared(fake_session(fake), fake->told.declare_id, status, text);
}

void fake_welcome(struct fake *fake)
{
	FAKE_LOCKED(fake);
	fake->hello_mute = false;
	if (fake->told.hello_id)
		answer_hello(fake, fake_session(fake), fake->told.hello_id);
}

void fake_unused(struct fake *fake, uint32_t tensor, const char *name)
{
	FAKE_LOCKED(fake);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Unused unused = BPS__CONTROL__UNUSED__INIT;

	unused.tensor = tensor;
	unused.name = (char *)name;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_UNUSED;
	message.unused = &unused;
	session_send(fake_session(fake), &message, 0, NULL, NULL, 0);
}

void fake_released(struct fake *fake, int status)
{
	FAKE_LOCKED(fake);
	answer_release(fake, fake_session(fake), status);
}

void fake_followed(struct fake *fake, int status, const char *text)
{
	FAKE_LOCKED(fake);
	answer_follow(fake, fake_session(fake), status, text);
}

void fake_begun(struct fake *fake, const struct bps_begun *begun, uint64_t first)
{
	FAKE_LOCKED(fake);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Begun body = BPS__CONTROL__BEGUN__INIT;

	body.name = (char *)begun->name;
	body.dtype = (uint32_t)begun->dtype;
	body.elements = begun->elements;
	body.round = begun->round;
	body.operation = (uint32_t)begun->operation;
	body.reduction = (uint32_t)begun->reduction;
	body.first = first;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_BEGUN;
	message.begun = &body;
	session_send(fake_session(fake), &message, 0, NULL, NULL, 0);
}

void fake_all_follow(struct fake *fake, uint64_t turn, int status, const char *text)
{
	FAKE_LOCKED(fake);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__AllFollow all_follow = BPS__CONTROL__ALL_FOLLOW__INIT;

	all_follow.turn = turn;
	message.has_status = status;
	message.status = status;
	message.text = (char *)text;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_ALL_FOLLOW;
	message.all_follow = &all_follow;
	session_send(fake_session(fake), &message, 0, NULL, NULL, 0);
}

void fake_job_failed(struct fake *fake, uint64_t job, int status, const char *text)
{
	FAKE_LOCKED(fake);
	Bps__Control__JobFailed failed = BPS__CONTROL__JOB_FAILED__INIT;
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	failed.job = job;
	message.has_status = true;
	message.status = status;
	message.text = (char *)text;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_JOB_FAILED;
	message.job_failed = &failed;
	session_send(fake_session(fake), &message, 0, NULL, NULL, 0);
}

void fake_send_garbage(struct fake *fake)
{
	FAKE_LOCKED(fake);
	ASSERT_EQ(send(fake_session(fake)->socket, "\xff\xff", 2, MSG_NOSIGNAL), 2);
}

void fake_die(struct fake *fake, const char *farewell)
{
	FAKE_LOCKED(fake);
	for (unsigned i = 0; i < FAKE_SESSIONS; i++) {
		Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

		if (fake->sessions[i] && farewell)
			session_send(fake->sessions[i], &message, -EPERM, farewell, NULL, 0);
		fake->sessions[i] = session_free(fake->sessions[i]);
	}
}

void fake_restart(struct fake *fake)
{
	FAKE_LOCKED(fake);
	for (unsigned i = 0; i < FAKE_SESSIONS; i++)
		fake->sessions[i] = session_free(fake->sessions[i]);
	fake->daemon++;
	fake->told.shared_len = 0;
}

void fake_wake(struct fake *fake, unsigned n)
{
	FAKE_LOCKED(fake);
	while (n--)
		wake_write(fake_session(fake));
}

void fake_hide(struct fake *fake)
{
	ASSERT_OK(unlink(fake->path));
}

void fake_show(struct fake *fake)
{
	FAKE_LOCKED(fake);
	fd_close(fake->listener);
	fake->listener = fake_listen(fake->path);
}

void fake_complete_uncounted(struct fake *fake, unsigned n)
{
	FAKE_LOCKED(fake);
	struct fake_session *session = fake_session(fake);

	session_run(fake, session, &fake->held[n]);
	atomic_store(&shm_slots(session->shm)[fake->held[n].slot].state, SHM_DONE);
}

struct bps_client *fake_open(struct fake *fake)
{
	struct bps_open_params params = { .size = sizeof(params), .socket = fake->path };
	struct bps_client *client;

	if (bps_client_open(&params, &client))
		test_fail(__FILE__, __LINE__, "open: %s", bps_error());
	return client;
}

struct bps_client *fake_join(struct fake *fake, uint32_t rank, uint32_t size)
{
	struct bps_join_params params = { .size = sizeof(params),
					  .rank = rank,
					  .world_size = size };
	struct bps_client *client = fake_open(fake);

	if (bps_client_join(client, &params))
		test_fail(__FILE__, __LINE__, "join: %s", bps_error());
	return client;
}
