/*
 * The ring of a session, in memory that the trainer can write at any time. Entries are copied
 * out, checked and submitted to the agent; completed requests are written to their slots and the
 * trainer is woken.
 */
#include "control/ring.h"

#include "base/log.h"
#include "base/memory/handout.h"
#include "base/memory/holes.h"
#include "base/pages.h"
#include "control/listener.h"
#include "control/session.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* Ring entries taken of one session; then that of another job has its turn. */
#define RING_BATCH 16
/* A session with so many open requests is deep: a drain takes half as many entries of it at most. */
#define RING_DEPTH 256
/* So long in all, until others that the loop serves have theirs. */
#define RING_TURN_NS (250 * NSEC_PER_USEC)
/* To the kernel: what is watched, and what is not. */
#define RING_MAPPINGS 2
/* Packets taken of one session; then another has its turn. */
#define PACKET_BATCH 16
/* Until what the kernel had no memory for is tried again. */
#define WAKE_AGAIN_NS NSEC_PER_MSEC

static struct shm_header *header_of(const struct session *session)
{
	return session->ring.shm;
}

/* -- Completion --------------------------------------------------------------------------------------------------- */

/* EAGAIN: it is full of wake-ups. One for which there is no memory is sent later: nothing else makes it good. */
static void send_wake(struct session *session)
{
	uint64_t one = 1;

	if (send(session->ring.wake_fd, &one, sizeof(one), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0 ||
	    (errno != ENOBUFS && errno != ENOMEM))
		return;
	if (loop_timer_set(session->control->params.loop, &session->ring.wake_again,
			   clock_now_ns() + WAKE_AGAIN_NS))
		session_fail_later(session, "no memory to wake it");
}

static void on_wake_again(struct loop_timer *timer)
{
	send_wake(container_of(timer, struct session, ring.wake_again));
}

static void wake_trainer(struct session *session)
{
	/* Against the trainer's fence between arming and looking at its slot. */
	shm_fence();
	if (!shm_is_awaited(session->ring.shm, session->ring.n_completed))
		return;
	if (shm_disarm(header_of(session)) == SHM_ARMED)
		send_wake(session);
}

static void on_wake(struct mail *mail)
{
	struct session *session = container_of(mail, struct session, ring.wake);

	session->ring.wake_posted = false;
	wake_trainer(session);
}

/* Once for all that completes in one go: it would be woken by the first, and sleep again before the next. */
static void wake_soon(struct session *session)
{
	if (session->ring.wake_posted)
		return;
	session->ring.wake_posted = true;
	loop_defer(session->control->params.loop, &session->ring.wake);
}

static void complete(struct session *session, uint32_t slot_number, uint64_t ticket,
		     uint64_t n_rows, const struct agent_outcome *outcome,
		     const struct failure *failure)
{
	struct shm_header *header = header_of(session);
	struct shm_slot *slot = &shm_slots(session->ring.shm)[slot_number];
	bool brief = !failure && !outcome->membership && session->features & CONTROL_FEATURE_ORDER;

	slot->status = failure ? failure->status : 0;
	if (failure) {
		(void)snprintf(slot->text, sizeof(slot->text), "%s", failure->text);
		/* To find out what is wrong may have taken long. */
		if (session->ring.draining)
			session->ring.yields |= clock_now_ns() >= session->turn.until_ns;
	} else {
		slot->no_text = 0;
		slot->brief = brief;
		slot->brief_rows = n_rows;
	}
	/* Another line of the cache, of each of thousands. */
	if (!brief) {
		slot->n_rows = n_rows;
		slot->membership = outcome->membership;
		slot->size = outcome->size;
		slot->rank = outcome->rank;
		slot->n_came = outcome->n_came;
		slot->n_waiting = outcome->n_waiting;
	}
	atomic_store_explicit(&slot->state, SHM_DONE, memory_order_release);
	/* Lets the trainer's stream go on, whether or not one of ours has told it; of no use for memory of the host. */
	if (session->features & CONTROL_FEATURE_CUDA)
		atomic_store_explicit(&shm_flags(session->ring.shm)[slot_number].done,
				      (uint32_t)ticket, memory_order_release);
	/* Not before the count that it comes after: by that one who reads it knows what it has been written over. */
	atomic_store_explicit(&header->order[session->ring.n_completed % SHM_ORDER],
			      (uint16_t)slot_number, memory_order_release);
	/* Our own count: what the trainer makes of its copy is its affair. */
	atomic_store_explicit(&header->completions, ++session->ring.n_completed,
			      memory_order_release);
	wake_soon(session);
}

static void release(struct session_request *request)
{
	request->busy = false;
	request->input = buffer_unref(request->input);
	request->output = buffer_unref(request->output);
	request->input_rows = buffer_unref(request->input_rows);
	request->output_rows = buffer_unref(request->output_rows);
}

/* Whatever else the loop has gives way to the session's turn from now on. */
static void ring_want(struct session *session)
{
	session->control->n_rung_deep -= session->turn.rung_deep;
	session->turn.rung_deep = false;
}

/* Of what a deep session had begun. */
static bool is_half_done(const struct session *session)
{
	return session->n_pending < RING_DEPTH / 2;
}

static void on_done(struct agent_request *base, const struct failure *failure)
{
	struct session_request *request = container_of(base, struct session_request, base);
	struct session *session = request->session;

	release(request);
	if (session->state == SESSION_OPEN)
		complete(session, base->slot, base->ticket, base->n_rows, &base->outcome, failure);
	session_request_ended(session);
	if (session->turn.rung_deep && is_half_done(session))
		ring_want(session);
}

/* -- One entry ---------------------------------------------------------------------------------------------------- */

static struct session_tensor *find_tensor(const struct session *session, uint32_t number)
{
	struct map_entry *entry;

	if (number < session->tensors.n_numbered && session->tensors.numbered[number])
		return session->tensors.numbered[number];
	entry = map_find(&session->tensors.map, number);
	return entry ? container_of(entry, struct session_tensor, entry) : NULL;
}

static struct buffer *find_buffer(const struct session *session, uint32_t number)
{
	struct map_entry *entry = map_find(&session->memory.buffers, number);

	return entry ? container_of(entry, struct buffer, entry) : NULL;
}

/* Whether its packets wait for the pace of its user. */
static bool is_held(struct session *session, uint64_t now_ns)
{
	if (list_linked(&session->turn.paced))
		return true;
	if (!pace_holds(session->turn.pace, now_ns) ||
	    pace_wait(session->turn.pace, &session->turn.paced))
		return false;
	session_watch_socket(session);
	return true;
}

/* The entry that was taken last waits, and comes once more. */
static bool is_put_off(const struct session *session)
{
	return session->ring.stalled || session->ring.held || session->ring.yields;
}

/*
 * The packet that explains a number was sent before the entry that uses it, but the socket may be read later than the
 * ring. Packets are taken one by one: those after it may be about this very entry. They keep to the turn and to the pace of the
 * user as others do.
 */
static bool await_packet(struct session *session)
{
	uint64_t now_ns = clock_now_ns();

	session->ring.yields = now_ns >= session->turn.until_ns;
	session->ring.held = !session->ring.yields && is_held(session, now_ns);
	if (is_put_off(session))
		return false;
	if (session->deferred.request)
		session_take_deferred(session);
	if (session_receive_one(session))
		return true;
	session->ring.stalled = session->porter.taken;
	return false;
}

static struct session_tensor *await_tensor(struct session *session, uint32_t number)
{
	struct session_tensor *tensor = find_tensor(session, number);

	while (!tensor && await_packet(session))
		tensor = find_tensor(session, number);
	return session->state == SESSION_OPEN ? tensor : NULL;
}

static struct buffer *await_buffer(struct session *session, uint32_t number)
{
	struct buffer *buffer = find_buffer(session, number);

	while (!buffer && await_packet(session))
		buffer = find_buffer(session, number);
	return session->state == SESSION_OPEN ? buffer : NULL;
}

/* Memory that an entry names. Number 0 is no memory: then *ret_data stays NULL. */
static int take_memory(struct session_request *request, const char *what, uint32_t number,
		       uint64_t offset, uint64_t count, size_t element_size,
		       struct buffer **ret_buffer, void **ret_data, struct failure *failure)
{
	struct buffer *buffer;
	int r;

	*ret_data = NULL;
	if (!number)
		return 0;
	buffer = await_buffer(request->session, number);
	if (!buffer)
		return failure_set(failure, -EINVAL, "the %s is in buffer %u, which is not shared",
				   what, number);
	r = buffer_range(buffer, offset, count, element_size, ret_data);
	if (r)
		return failure_set(failure, r,
				   "the %s, %" PRIu64 " elements of %zu bytes at offset %" PRIu64
				   ", is not inside its buffer of %" PRIu64
				   " bytes, or not aligned",
				   what, count, element_size, offset, buffer->len);
	if (buffer->device && !ret_buffer)
		return failure_set(failure, -EINVAL, "the %s are in buffer %u, on a device", what,
				   number);
	request->base.stalls |= buffer->stalls;
	if (ret_buffer)
		*ret_buffer = buffer_ref(buffer);
	return 0;
}

/* Copies the counts: the trainer may change its own at any time. */
static int take_counts(struct session *session, struct session_request *request,
		       const struct shm_entry *entry, struct failure *failure)
{
	size_t n = session->job.elastic ? agent_n_counts(&session->job.member, entry->membership)
					: session->job.size;
	void *data;
	int r;

	request->base.counts = NULL;
	switch (entry->operation) {
	case OPERATION_ALL_TO_ALL:
		n *= 2;
		break;
	case OPERATION_ALL_GATHER:
	case OPERATION_REDUCE_SCATTER:
		break;
	default:
		return 0;
	}
	r = take_memory(request, "counts", entry->counts_buffer, entry->counts_offset, n,
			sizeof(uint64_t), NULL, &data, failure);
	if (r || !data)
		return r;
	if (request->n_counts < n) {
		uint64_t *counts = held_new(&session->held, n * sizeof(*counts));

		if (!counts)
			return account_no_memory(session->account, errno, failure);
		held_free(request->counts);
		request->counts = counts;
		request->n_counts = (uint32_t)n;
	}
	memcpy(request->counts, data, n * sizeof(uint64_t));
	/* The copy is what is checked and used: the compiler must not go back to the original. */
	__asm__ volatile("" ::: "memory");
	request->base.counts = request->counts;
	return 0;
}

/* The numbers of rows; what they are is looked at when they are copied. */
static int take_rows(struct session_request *request, const struct shm_entry *entry,
		     struct failure *failure)
{
	void *input, *output;
	int r;

	if (entry->operation != OPERATION_PUSH_PULL_ROWS || !entry->width)
		return 0;
	r = take_memory(request, "input_rows", entry->input_rows_buffer, entry->input_rows_offset,
			entry->input_count / entry->width, sizeof(int64_t), &request->input_rows,
			&input, failure);
	if (!r)
		r = take_memory(request, "output_rows", entry->output_rows_buffer,
				entry->output_rows_offset, entry->output_count / entry->width,
				sizeof(int64_t), &request->output_rows, &output, failure);
	if (r)
		return r;
	request->base.width = entry->width;
	request->base.input_rows = input;
	request->base.output_rows = output;
	return 0;
}

/* Rows are sorted and summed by the CPU, and one request is on one device. */
static int check_devices(const struct session_request *request, unsigned operation,
			 struct failure *failure)
{
	const struct buffer *input = request->input, *output = request->output;
	bool in = input && input->device, out = output && output->device;

	if (!in && !out && !(request->input_rows && request->input_rows->device) &&
	    !(request->output_rows && request->output_rows->device))
		return 0;
	if (operation == OPERATION_PUSH_PULL_ROWS)
		return failure_set(failure, -EOPNOTSUPP, "push_pull_rows needs memory of the host");
	if (input && output &&
	    (in != out || memcmp(gpu_memory_device(input->device),
				 gpu_memory_device(output->device), DEVICE_UUID_LEN)))
		return failure_set(failure, -EINVAL,
				   "input and output have to be both on one device or both on the "
				   "host");
	return 0;
}

static int take_entry(struct session *session, struct session_request *request,
		      const struct shm_entry *entry, size_t element_size, struct failure *failure)
{
	size_t input_size = dtype_size(request->base.input_dtype) ?: element_size;
	void *input, *output;
	int r;

	if (entry->membership && !session->job.elastic)
		return failure_set(failure, -EINVAL, "flags %#x of a later version",
				   entry->membership);
	r = take_memory(request, "input", entry->input_buffer, entry->input_offset,
			entry->input_count, input_size, &request->input, &input, failure);
	if (!r)
		r = take_memory(request, "output", entry->output_buffer, entry->output_offset,
				entry->output_count, element_size, &request->output, &output,
				failure);
	if (!r)
		r = take_counts(session, request, entry, failure);
	if (!r)
		r = take_rows(request, entry, failure);
	if (!r)
		r = check_devices(request, entry->operation, failure);
	if (r)
		return r;
	if (request->input && request->input->device)
		request->base.input_device = request->input;
	if (request->output && request->output->device)
		request->base.output_device = request->output;
	request->base.input = input;
	request->base.output = output;
	return 0;
}

/*
 * A page of the ring that the trainer has not written would be made by who reads it, and stay the daemon's: then the session ends.
 */
static bool slot_is_hole(struct session *session, uint32_t slot)
{
	uint32_t before = holes_made();

	(void)atomic_load_explicit(&shm_slots(session->ring.shm)[slot].state, memory_order_relaxed);
	if (holes_made() != before)
		session_take_holes(session->control);
	/* By session_fail_later(). */
	session->ring.yields |= *session->outbox.why != 0;
	return session->ring.yields;
}

/* Returns NULL when the session had to be failed, or the entry is to come once more. */
static struct session_request *request_for(struct session *session, const struct shm_entry *entry)
{
	struct session_request *request;

	if (entry->slot >= SHM_SLOTS) {
		session_fail(session, "posted slot %u of %u", entry->slot, SHM_SLOTS);
		return NULL;
	}
	request = session->ring.requests[entry->slot];
	if (!request) {
		if (slot_is_hole(session, entry->slot))
			return NULL;
		request = bulk_take(&session->ring.bulk, sizeof(*request));
		if (!request) {
			session_fail(session, "no memory for its requests");
			return NULL;
		}
		request->session = session;
		request->base.done = on_done;
		session->ring.requests[entry->slot] = request;
	}
	if (request->busy) {
		session_fail(session, "posted slot %u twice", entry->slot);
		return NULL;
	}
	return request;
}

static void submit(struct session *session, const struct shm_entry *entry, uint64_t now_ns)
{
	struct session_request *request = request_for(session, entry);
	const struct agent_outcome nothing = { 0 };
	struct session_tensor *tensor;
	struct failure failure;
	uint64_t run;
	int r;

	if (!request) {
		session->ring.head -= is_put_off(session);
		return;
	}
	tensor = await_tensor(session, entry->tensor);
	if (session->state != SESSION_OPEN)
		return;
	if (is_put_off(session)) {
		session->ring.head--;
		return;
	}
	if (!tensor || agent_is_void(&tensor->declaration)) {
		if (tensor)
			(void)failure_set(&failure, -ENOTCONN,
					  session->job.leave_id
						  ? "tensor %u: this rank is leaving the job"
						  : "tensor %u was declared before the ranks "
						    "regroup: declare it again when they have",
					  entry->tensor);
		else if (!session->job.is_in && session->job.last.status)
			failure = session->job.last;
		else
			(void)failure_set(&failure, session->job.is_in ? -EINVAL : -ENOTCONN,
					  session->job.is_in ? "no tensor %u was declared"
							     : "tensor %u: in no job",
					  entry->tensor);
		complete(session, entry->slot, entry->ticket, 0, &nothing, &failure);
		return;
	}

	if (unlikely(entry->round > tensor->declaration.n_rounds + 1) &&
	    !agent_leave_out(&tensor->declaration, entry->round, now_ns)) {
		session->ring.yields = true;
		session->ring.head--;
		return;
	}

	run = session->job.n_runs;
	request->base.slot = entry->slot;
	request->base.ticket = entry->ticket;
	request->base.slot_memory = &shm_slots(session->ring.shm)[entry->slot];
	request->base.input_device = NULL;
	request->base.output_device = NULL;
	request->base.watched = false;
	request->base.stalls = false;
	request->base.round = entry->round;
	request->base.operation = entry->operation;
	request->base.reduction = entry->reduction;
	request->base.priority = entry->priority;
	request->base.root = entry->root;
	request->base.input = NULL;
	request->base.output = NULL;
	request->base.input_count = entry->input_count;
	request->base.output_count = entry->output_count;
	request->base.counts = NULL;
	/*
	 * Of rows the width follows. Ranks of an elastic job that are lost are in no order with the
	 * others.
	 */
	request->base.ordinal = entry->operation == OPERATION_PUSH_PULL_ROWS || session->job.elastic
					? 0
					: entry->ordinal;
	request->base.input_rows = NULL;
	request->base.output_rows = NULL;
	/* One that is too large for a type is none. */
	request->base.input_dtype = entry->operation == OPERATION_PUSH_PULL_ROWS
					    ? 0
					    : (uint8_t)MIN(entry->input_dtype, (uint32_t)UINT8_MAX);
	request->base.n_rows = 0;
	request->base.membership = entry->membership;
	request->base.outcome = nothing;
	request->base.timeout_ms = entry->timeout_ms;
	r = take_entry(session, request, entry, tensor->element_size, &failure);
	/* Packets were read on the way: the session may be over, or in another job, where the tensor is another. */
	if (session->state != SESSION_OPEN || session->job.n_runs != run) {
		release(request);
		if (session->state == SESSION_OPEN)
			complete(session, entry->slot, entry->ticket, 0, &nothing,
				 &session->job.last);
		return;
	}
	/* Or the tensor was released, by the same trainer that uses it. */
	if (tensor->number != entry->tensor || agent_is_void(&tensor->declaration)) {
		release(request);
		(void)failure_set(&failure, -EINVAL, "tensor %u was released", entry->tensor);
		complete(session, entry->slot, entry->ticket, 0, &nothing, &failure);
		return;
	}
	if (is_put_off(session)) {
		release(request);
		session->ring.head--;
		return;
	}
	request->busy = true;
	session->n_pending++;
	session->n_requests++;
	agent_submit(&tensor->declaration, &request->base, r ? &failure : NULL, now_ns);
}

/* -- Draining ----------------------------------------------------------------------------------------------------- */

/* Of the tensor that a later entry names; or NULL. */
static const struct agent_declaration *declaration_ahead(const struct session *session,
							 uint64_t ahead)
{
	const struct shm_entry *entry =
		&shm_ring(session->ring.shm)[(session->ring.head + ahead) % SHM_ENTRIES];
	const struct session_tensor *tensor =
		find_tensor(session, *(const volatile uint32_t *)&entry->tensor);

	return tensor && !agent_is_void(&tensor->declaration) ? &tensor->declaration : NULL;
}

/*
 * What entries to come name is far apart in memory, and is fetched while those before them are worked on: at each step
 * what the step before has made known. What they say is not to be trusted, and only looked up.
 */
static void fetch_ahead(const struct session *session, uint64_t tail)
{
	const struct shm_entry *ring = shm_ring(session->ring.shm);
	const struct agent_declaration *declaration;
	uint64_t n = tail - session->ring.head;

	if (n > 20) {
		const struct shm_entry *entry = &ring[(session->ring.head + 20) % SHM_ENTRIES];

		for (size_t at = 0; at < sizeof(*entry); at += CACHE_LINE)
			__builtin_prefetch((const char *)entry + at);
	}
	if (n > 12) {
		const struct shm_entry *entry = &ring[(session->ring.head + 12) % SHM_ENTRIES];
		uint32_t tensor = *(const volatile uint32_t *)&entry->tensor;
		uint32_t slot = *(const volatile uint32_t *)&entry->slot;

		if (tensor < session->tensors.n_numbered)
			__builtin_prefetch(&session->tensors.numbered[tensor]);
		if (slot < SHM_SLOTS)
			__builtin_prefetch(&session->ring.requests[slot]);
	}
	if (n > 8) {
		const struct shm_entry *entry = &ring[(session->ring.head + 8) % SHM_ENTRIES];
		uint32_t tensor = *(const volatile uint32_t *)&entry->tensor;
		uint32_t slot = *(const volatile uint32_t *)&entry->slot;

		if (tensor < session->tensors.n_numbered)
			fetch_to_write(session->tensors.numbered[tensor],
				       sizeof(struct session_tensor));
		if (slot < SHM_SLOTS) {
			fetch_to_write(session->ring.requests[slot],
				       sizeof(struct session_request));
			fetch_to_write(&shm_slots(session->ring.shm)[slot], CACHE_LINE);
		}
	}
	if (n > 4 && (declaration = declaration_ahead(session, 4)))
		agent_fetch(declaration);
	if (n > 2 && (declaration = declaration_ahead(session, 2)))
		agent_fetch_round(declaration);
	if (n > 1 && (declaration = declaration_ahead(session, 1)))
		agent_fetch_requests(declaration);
}

/* Copies the next entry out of the trainer's reach. Returns false when there is none or the session had to be failed. */
static bool next_entry(struct session *session, struct shm_entry *ret_entry)
{
	struct shm_header *header = header_of(session);
	uint64_t tail = atomic_load_explicit(&header->tail, memory_order_acquire);

	if (tail - session->ring.head > SHM_ENTRIES) {
		session_fail(session, "its ring says that %" PRIu64 " of %u entries are posted",
			     tail - session->ring.head, SHM_ENTRIES);
		return false;
	}
	if (tail == session->ring.head)
		return false;
	fetch_ahead(session, tail);
	memcpy(ret_entry, &shm_ring(session->ring.shm)[session->ring.head % SHM_ENTRIES],
	       sizeof(*ret_entry));
	/* The copy is what is checked and used: the compiler must not go back to the original. */
	__asm__ volatile("" ::: "memory");
	session->ring.head++;
	return true;
}

/* Takes at most n entries, and the request that waits for these. Returns how many: fewer, if there are no more. */
static size_t drain(struct session *session, size_t n)
{
	struct sampled_clock *clock = &session->control->clock;
	struct shm_entry entry;
	size_t i;

	session->ring.draining = true;
	session->ring.yields = session->ring.held = false;
	for (i = 0; i < n && !is_put_off(session); i++) {
		if (session->deferred.request && session->state == SESSION_OPEN &&
		    session->ring.head >= session->deferred.until) {
			session_take_deferred(session);
			sampled_clock_begin(clock, clock_now_ns());
		}
		if (session->state != SESSION_OPEN || !next_entry(session, &entry))
			break;
		/* Those before it have taken long. */
		if (i && clock->now_ns >= session->turn.until_ns) {
			session->ring.yields = true;
			session->ring.head--;
			break;
		}
		submit(session, &entry, clock->now_ns);
		if (is_put_off(session))
			break;
		(void)sampled_clock_tick(clock);
	}
	session->ring.draining = false;
	return i;
}

/* Tells the trainer to ring, then looks once more: what came in between rang nobody. Returns whether there is more. */
static bool arm(struct session *session)
{
	struct shm_header *header = header_of(session);

	atomic_store_explicit(&header->daemon_armed, 1, memory_order_relaxed);
	shm_fence();
	if (atomic_load_explicit(&header->tail, memory_order_acquire) == session->ring.head)
		return false;
	atomic_store_explicit(&header->daemon_armed, 0, memory_order_relaxed);
	return true;
}

/*
 * Jobs take turns, by the time that their packets and entries take here, with sums that are made at once: neither many ranks
 * nor many tensors nor many requests give a job more of the thread than another that has work for it. Sessions that are in
 * no job that runs are one with others of their user. A job that regroups stays the flow that it was.
 */
#define FLOW_OF_USER (UINT64_C(1) << 63)

static uint64_t user_flow(uint32_t uid)
{
	return FLOW_OF_USER | uid;
}

static uint64_t flow_of(const struct session *session)
{
	return session->job.is_in && session->job.run ? session->turn.job_flow
						      : user_flow(session->uid);
}

uint64_t ring_job_flow(uint32_t uid, const char *job)
{
	uint64_t of[2] = { uid, map_hash_string(job) };

	return map_hash(of, sizeof(of)) & ~FLOW_OF_USER;
}

void ring_work(struct session *session, unsigned work)
{
	struct control *control = session->control;
	struct order_item item = { .item = session };

	session->turn.work |= work;
	if (work & ~(unsigned)SESSION_ENTRIES)
		ring_want(session);
	/* A stalled one has its turn after ring_resume(). */
	if (session->turn.rung || (session->ring.stalled && !(work & SESSION_END)))
		return;
	item.sequence = control->n_rung++;
	session->turn.flow = flow_of(session);
	if (fair_push(&control->rings, session->turn.flow, &item)) {
		session_fail_later(session, "no memory for its turn");
		return;
	}
	session->turn.rung = true;
	if (control->drain_posted)
		return;
	control->drain_posted = true;
	loop_defer(control->params.loop, &control->drain);
}

uint64_t ring_charge(struct control *control, struct pace *pace, uint64_t job, uint64_t began_ns)
{
	uint64_t user = user_flow((uint32_t)pace->entry.hash), now_ns = clock_now_ns();

	if (pace_jobs_others(&control->pace_jobs, job, user, now_ns))
		pace_charge(pace, now_ns - began_ns, now_ns);
	return now_ns;
}

static void on_pace(struct loop_timer *timer)
{
	struct paces *paces = container_of(timer, struct paces, timer);
	uint64_t now_ns = clock_now_ns();
	struct session *session;
	struct list *next;

	if (!paces_are_paid(paces, now_ns))
		return;
	control_take_turn_of_listener(container_of(paces, struct control, paces));
	next = pace_next(paces, now_ns);
	if (!next)
		return;
	session = container_of(next, struct session, turn.paced);
	session_watch_socket(session);
	ring_work(session, SESSION_PACKETS | (session->ring.held ? SESSION_ENTRIES : 0u));
}

/* What is left is heard of again: the socket is watched as long as there is something, or the session is held. */
static void take_packets(struct session *session, uint64_t now_ns, uint64_t until_ns)
{
	session->turn.work &= ~(unsigned)SESSION_PACKETS;
	for (size_t i = 0; i < PACKET_BATCH && now_ns < until_ns; i++) {
		if (is_held(session, now_ns) || !session_receive_one(session))
			return;
		now_ns = clock_now_ns();
	}
}

static bool has_entries(const struct session *session)
{
	const struct shm_header *header = session->ring.shm;

	return atomic_load_explicit(&header->tail, memory_order_acquire) != session->ring.head;
}

/* What a deep session has begun goes before what is new: thousands of rounds that are all half done do not fit into the caches. */
static bool is_deep(const struct session *session)
{
	return session->n_pending >= RING_DEPTH;
}

/* A deep session goes on in its turn: nothing else gives way to its entries while half of what it has begun is open. */
static void ring_deep(struct session *session)
{
	bool was_rung = session->turn.rung;

	ring_work(session, SESSION_ENTRIES);
	if (was_rung)
		return;
	session->turn.rung_deep = session->turn.rung && session->turn.work == SESSION_ENTRIES &&
				  !is_half_done(session);
	session->control->n_rung_deep += session->turn.rung_deep;
}

/* The drain has taken as many entries of the session as it takes. */
static bool is_sated(const struct session *session)
{
	return is_deep(session) && session->turn.n_taken >= RING_DEPTH / 2;
}

/* Sessions that do not ring get their turn if they have entries, deep ones once they have done half. Returns whether any has. */
static bool look(struct control *control)
{
	struct session *session, *next;
	bool found = false;

	list_for_each_safe (session, next, &control->deep, ring.unarmed) {
		if (!is_half_done(session))
			continue;
		list_remove(&session->ring.unarmed);
		ring_work(session, SESSION_ENTRIES);
		found = true;
	}
	list_for_each_safe (session, next, &control->awake, ring.unarmed) {
		if (session->turn.rung || !has_entries(session))
			continue;
		ring_work(session, SESSION_ENTRIES);
		found = true;
	}
	return found;
}

/*
 * What the ring has is looked at in advance: so it goes on as long as no other session has
 * anything. Ranks of a job take turns, too: a round whose ranks come one soon after the other is
 * still in the cache for the last. Returns when it was over.
 */
static uint64_t take_entries(struct session *session, uint64_t now_ns)
{
	struct control *control = session->control;
	uint64_t flow = session->turn.flow, head = session->ring.head;
	bool more;
	size_t n;

	sampled_clock_begin(&control->clock, now_ns);
	session->turn.work &= ~(unsigned)SESSION_ENTRIES;
	list_remove(&session->ring.unarmed);
	if (session->turn.drain != control->n_drains)
		session->turn.n_taken = 0;
	session->turn.drain = control->n_drains;
	do {
		n = drain(session, RING_BATCH);
		session->turn.n_taken += n;
		now_ns = sampled_clock_look(&control->clock);
	} while (n == RING_BATCH && now_ns < session->turn.until_ns && !control->rings.n &&
		 !is_sated(session) && !look(control));
	if (session->ring.head != head)
		pace_jobs_note(&control->pace_jobs, flow, now_ns);
	if (session->ring.stalled || session->ring.held || session->state != SESSION_OPEN)
		return now_ns;
	more = n == RING_BATCH || session->ring.yields;
	if (is_sated(session)) {
		list_push_back(&control->deep, &session->ring.unarmed);
	} else if (more && is_deep(session)) {
		ring_deep(session);
	} else if (more) {
		ring_work(session, SESSION_ENTRIES);
	} else if (control->params.spin_ns || loop_lingers(control->params.loop)) {
		list_push_back(&control->awake, &session->ring.unarmed);
	} else if (arm(session)) {
		ring_work(session, SESSION_ENTRIES);
	}
	return now_ns;
}

/* Packets first: they say what entries mean. */
static uint64_t take_turn(struct session *session, uint64_t now_ns, uint64_t until_ns)
{
	session->turn.until_ns = until_ns;
	if (session->turn.work & SESSION_END) {
		session_end(session);
		return clock_now_ns();
	}
	if (session->turn.work & SESSION_PACKETS) {
		take_packets(session, now_ns, until_ns);
		now_ns = clock_now_ns();
	}
	return session->turn.work & SESSION_ENTRIES ? take_entries(session, now_ns) : now_ns;
}

/* Sessions of which the last drain has taken as much as it takes. */
static void ring_sated(struct control *control)
{
	struct session *session;

	while ((session = list_first(&control->deep, struct session, ring.unarmed))) {
		list_remove(&session->ring.unarmed);
		ring_deep(session);
	}
}

static void on_drain(struct mail *mail)
{
	struct control *control = container_of(mail, struct control, drain);
	uint64_t now_ns = clock_now_ns(), from_ns = now_ns, until_ns = now_ns + RING_TURN_NS;

	control->n_drains++;
	ring_sated(control);
	while (control->rings.n && now_ns < until_ns) {
		struct session *session = fair_pop(&control->rings);
		uint64_t flow = session->turn.flow, began_ns = now_ns;

		ring_want(session);
		session->turn.rung = false;
		now_ns = take_turn(session, now_ns, until_ns);
		fair_charge(&control->rings, flow, now_ns - began_ns);
	}
	control->watch.took_ns += now_ns - from_ns;
	/* All else that the loop has now has a piece of the turn before. */
	control->drain_posted = control->rings.n || !list_empty(&control->deep);
	if (control->drain_posted)
		loop_yield(control->params.loop, &control->drain);
	else
		fair_rest(&control->rings);
}

static bool on_look(struct loop_watch *watch)
{
	struct control *control = container_of(watch, struct control, watch);

	return look(control) || control->rings.n > control->n_rung_deep;
}

static bool on_rest(struct loop_watch *watch)
{
	struct control *control = container_of(watch, struct control, watch);
	struct session *session, *next;

	list_for_each_safe (session, next, &control->awake, ring.unarmed)
		if (!arm(session))
			list_remove(&session->ring.unarmed);
	return on_look(watch);
}

void ring_watch(struct control *control)
{
	list_init(&control->awake);
	list_init(&control->deep);
	paces_init(&control->paces, control->params.loop, on_pace);
	control->drain.run = on_drain;
	control->watch = (struct loop_watch){ .look = on_look, .rest = on_rest };
	loop_spin(control->params.loop, control->params.spin_ns, &control->watch);
}

static void on_doorbell(struct loop_source *source, uint32_t events)
{
	struct session *session = container_of(source, struct session, doorbell);

	(void)events;
	if (unlikely(session->ring.state != RING_SEALED)) {
		session->ring.rung = true;
		ring_seal(session);
		return;
	}
	/* Else its ring is looked at, or has its next turn, without that. */
	if (!list_linked(&session->ring.unarmed))
		ring_work(session, SESSION_ENTRIES);
}

bool ring_is_behind(const struct session *session, uint64_t *ret_until)
{
	if (session->state != SESSION_OPEN || session->ring.draining)
		return false;
	*ret_until = atomic_load_explicit(&header_of(session)->tail, memory_order_acquire);
	return *ret_until != session->ring.head;
}

void ring_resume(struct session *session)
{
	if (!session->ring.stalled)
		return;
	session->ring.stalled = false;
	ring_work(session, SESSION_ENTRIES);
}

/* -- Opening ------------------------------------------------------------------------------------------------------ */

static int map_memory(struct session *session, int fd)
{
	struct quota *mappings = account_quota(session->account, ACCOUNT_MAPPINGS);
	struct buffer *memory;
	struct failure failure;
	int r;

	if (quota_charge(mappings, RING_MAPPINGS))
		return error_origin(-EDQUOT);
	/* What came of others that were mapped there is not its own. */
	session_take_holes(session->control);
	r = buffer_map(fd, SHM_LEN, NULL, &memory, &failure);
	if (r) {
		quota_release(mappings, RING_MAPPINGS);
		return error_trace(r);
	}
	memory->charges[1] = (struct unmap_charge){ mappings, RING_MAPPINGS };
	memory->user = session;
	session->ring.memory = memory;
	session->ring.shm = memory->data;
	return places_add(&session->control->buffers, memory) ? error_origin(-ENOMEM) : 0;
}

/*
 * A worker of GPUs maps it to write when a request of the job's first needs one, which a seal against that would not let it do: of
 * a trainer that may come to it, pages can be given back.
 */
static int make_memory(struct session *session, int *ret_fd, int *ret_trainer)
{
	_cleanup_(fd_closep) int fd = memfd_create("bps-session", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	_cleanup_(fd_closep) int trainer = -1;
	bool is_sealed = session->features & CONTROL_FEATURE_CUDA;
	struct shm_header *header;
	int r;

	/* Who keeps it by O_PATH alone, which is not seen, cannot open it again. */
	if (fd < 0 || fchmod(fd, S_IRUSR | S_IWUSR) || ftruncate(fd, SHM_LEN) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | (is_sealed ? F_SEAL_SEAL : 0)))
		return error_origin(-errno);
	trainer = handout_open(fd, O_RDWR);
	if (trainer < 0)
		return error_trace(trainer);
	session->ring.kept_fd = handout_open(fd, O_PATH);
	if (session->ring.kept_fd < 0)
		return error_trace(session->ring.kept_fd);
	/* By that one, so that it is still kept while it is mapped here. */
	r = map_memory(session, trainer);
	if (r)
		return error_trace(r);
	header = header_of(session);
	header->magic = SHM_MAGIC;
	header->version = SHM_VERSION;
	header->n_entries = SHM_ENTRIES;
	header->n_slots = SHM_SLOTS;
	header->len = SHM_LEN;
	atomic_store(&header->daemon_armed, 1);
	r = holes_watch(header, SHM_FLAG_OFFSET / page_size() * page_size());
	if (r)
		return error_trace(r);
	session->ring.state = is_sealed ? RING_SEALED : RING_SHOWN;
	*ret_fd = TAKE_FD(fd);
	*ret_trainer = TAKE_FD(trainer);
	return 0;
}

/*
 * The trainer's wake-up is a socket, which it reads like an eventfd, 8 bytes a wake-up. A real eventfd would share its O_NONBLOCK with the
 * trainer, who could clear it and fill the counter, and the daemon would sleep in write(). Of a pipe the trainer could
 * move pages elsewhere, which are ours. Nothing comes in by it: descriptors would have to be closed.
 */
static int make_wake(struct session *session, int *ret_trainer)
{
	int ends[2], least = 0;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends))
		return error_origin(-errno);
	session->ring.wake_fd = ends[0];
	*ret_trainer = ends[1];
	if (shutdown(ends[0], SHUT_RD) ||
	    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)))
		return error_origin(-errno);
	return 0;
}

int ring_open(struct session *session, int ret_fds[3])
{
	_cleanup_(fd_closep) int shm = -1, wake = -1;
	int r;

	session->ring.requests = calloc(SHM_SLOTS, sizeof(session->ring.requests[0]));
	if (!session->ring.requests)
		return error_origin(-ENOMEM);
	r = make_memory(session, &session->ring.shm_fd, &shm);
	if (!r)
		r = make_wake(session, &wake);
	if (r)
		return error_trace(r);
	session->doorbell.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (session->doorbell.fd < 0)
		return error_origin(-errno);
	session->doorbell.ready = on_doorbell;
	session->ring.wake.run = on_wake;
	session->ring.wake_again.expired = on_wake_again;
	/* Never read: each write makes an edge, and the count need not mean anything. */
	r = loop_add(session->control->params.loop, &session->doorbell, EPOLLIN | EPOLLET);
	if (r)
		return error_trace(r);
	ret_fds[0] = TAKE_FD(shm);
	ret_fds[1] = session->doorbell.fd;
	ret_fds[2] = TAKE_FD(wake);
	return 0;
}

static void on_sealed(struct porter_errand *errand, int status, int fd)
{
	struct session *session = container_of(errand, struct session, porter.seal);
	static bool said;

	(void)fd;
	if (session->state == SESSION_CLOSED)
		return;
	if (status && status != -EINVAL) {
		session_fail(session, "its ring cannot be sealed: %s", strerror(-status));
		return;
	}
	if (status && !said)
		log_warning(
			"rings of trainers cannot be sealed against holes: this kernel knows no "
			"F_SEAL_FUTURE_WRITE, and a trainer can keep all others waiting");
	said |= status != 0;
	session->ring.state = RING_SEALED;
	/* One that is frozen takes nothing any more. */
	if (!session->socket.loop)
		return;
	session_watch_socket(session);
	ring_work(session, SESSION_PACKETS | (session->ring.rung ? SESSION_ENTRIES : 0u));
}

static void on_seal_over(struct porter_errand *errand)
{
	session_reap_if_over(container_of(errand, struct session, porter.seal));
}

void ring_seal(struct session *session)
{
	int r;

	if (session->ring.state != RING_SHOWN)
		return;
	session->ring.state = RING_SEALING;
	session->porter.seal.taken = on_sealed;
	session->porter.seal.over = on_seal_over;
	r = porter_seal(&session->porter.seal, TAKE_FD(session->ring.shm_fd));
	if (r)
		session_fail(session, "its ring cannot be sealed: %s", strerror(-r));
	else
		session_watch_socket(session);
}

void ring_freeze(struct session *session)
{
	loop_remove(&session->doorbell);
	list_remove(&session->ring.unarmed);
	list_remove(&session->turn.paced);
	if (session->turn.rung)
		(void)fair_remove(&session->control->rings, session->turn.flow, session);
	ring_want(session);
	session->turn.rung = false;
	if (session->ring.wake_posted) {
		loop_unpost(session->control->params.loop, &session->ring.wake);
		on_wake(&session->ring.wake);
	}
	loop_timer_cancel(&session->ring.wake_again);
}

void ring_unwatch(struct control *control)
{
	if (control->drain_posted)
		loop_unpost(control->params.loop, &control->drain);
	fair_done(&control->rings);
	paces_done(&control->paces);
	loop_spin(control->params.loop, 0, NULL);
}

void ring_close(struct session *session)
{
	ring_freeze(session);
	session->doorbell.fd = fd_close(session->doorbell.fd);
	session_leave(session, HANDOUT_SOCKET, session->ring.wake_fd, SESSION_WAKE_BYTES);
	session->ring.wake_fd = -1;
	session->ring.shm_fd = fd_close(session->ring.shm_fd);
	if (session->ring.memory)
		places_remove(&session->control->buffers, session->ring.memory);
	session->ring.memory = buffer_unref(session->ring.memory);
	session->ring.shm = NULL;
	session_leave(session, HANDOUT_MEMORY, session->ring.kept_fd, SHM_LEN);
	session->ring.kept_fd = -1;
}
