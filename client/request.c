/*
 * A request from its slot in the ring to its end: posted, seen as complete in shared memory, its
 * result copied to the caller, freed or kept for the next. submit.c makes requests, wait.c
 * harvests completions, session.c posts again what a lost daemon had not answered.
 */
#include "cuda.h"

#define EAGAIN_TEXT "4096 requests are outstanding: wait for one"
static_assert(SHM_SLOTS == 4096, "EAGAIN_TEXT says how many");

#define SPARE_MAX \
	(2 *      \
	 SHM_SLOTS) /* who waits for the oldest has as many that are complete as are under way */
/* So many requests ahead of the one that is looked at. */
#define FETCH_SLOT    INT64_C(12)
#define FETCH_REQUEST INT64_C(8)
#define FETCH_TENSOR  INT64_C(4)

/* One that is spare holds nothing, and what only PUSH_PULL_ROWS has is NULL. */
static struct bps_request *request_take_spare(struct bps_client *client)
{
	struct bps_request *request = TAILQ_FIRST(&client->requests.spare);

	if (!request)
		return NULL;
	TAILQ_REMOVE(&client->requests.spare, request, link);
	client->requests.n_spare--;
	fetch_to_write(TAILQ_FIRST(&client->requests.spare),
		       offsetof(struct bps_request, input_rows_memory));
	return request;
}

int request_new(struct bps_client *client, struct bps_request **ret_request)
{
	struct bps_request *request = request_take_spare(client);

	if (!request) {
		request = aligned_alloc(CACHE_LINE, sizeof(*request));
		if (!request)
			return error_set(-ENOMEM, "out of memory");
		memset(request, 0, sizeof(*request));
	}
	if (!client->requests.n++)
		(void)client_ref(client);
	/* By hand: a whole structure of which most stays as it is would be cleared before. */
	request->client = client;
	request->state = REQUEST_NEW;
	request->orphan = request->cancelled = request->counted = false;
	request->tensor = NULL;
	request->cuda = NULL;
	request->slot = NO_SLOT;
	request->status = 0;
	request->input_memory = request->output_memory = NULL;
	request->input_range = request->output_range = request->counts_range = NULL;
	request->row_len = request->n_rows = 0;
	request->outcome = (struct bps_outcome){ 0 };
	request->text = NULL;
	*ret_request = request;
	return 0;
}

void request_free_spare(struct bps_client *client)
{
	struct bps_request *request;

	while ((request = TAILQ_FIRST(&client->requests.spare))) {
		TAILQ_REMOVE(&client->requests.spare, request, link);
		free(request);
	}
	client->requests.n_spare = 0;
}

void request_release_memory(struct bps_request *request)
{
	memory_unuse(TAKE_PTR(request->input_memory));
	memory_unuse(TAKE_PTR(request->output_memory));
	request->input_range = staging_free(request->input_range);
	request->output_range = staging_free(request->output_range);
}

/* What the daemon has no more use for once the request has ended. */
static void request_release_inputs(struct bps_request *request)
{
	memory_unuse(TAKE_PTR(request->input_memory));
	memory_unuse(TAKE_PTR(request->output_memory));
	request->input_range = staging_free(request->input_range);
	request->counts_range = staging_free(request->counts_range);
	if (!request->row_len)
		return;
	memory_unuse(TAKE_PTR(request->input_rows_memory));
	memory_unuse(TAKE_PTR(request->output_rows_memory));
	request->input_rows_range = staging_free(request->input_rows_range);
}

static void request_release_outputs(struct bps_request *request)
{
	if (request->cuda && !cuda_release_output(request))
		return; /* request_settle() comes */
	request->output_range = staging_free(request->output_range);
	if (request->row_len)
		request->output_rows_range = staging_free(request->output_rows_range);
}

/*
 * True when it was the client's last: then the reference that requests have is the caller's to give
 * back.
 */
static bool request_put(struct bps_request *request)
{
	struct bps_client *client = request->client;

	if (request->tensor)
		tensor_put(request->tensor);
	if (request->cuda)
		cuda_end(request, 0);
	/* One that is complete holds no more than what a stream is still to copy. */
	if (request->state != REQUEST_COMPLETE || request->cuda) {
		if (request->slot != NO_SLOT)
			client->ring.slots_free[client->ring.n_slots_free++] = request->slot;
		request_release_inputs(request);
		request_release_outputs(request);
	}
	if (request->status)
		free(request->text);
	if (client->requests.n_spare < SPARE_MAX && !client->failure) {
		client->requests.n_spare++;
		TAILQ_INSERT_HEAD(&client->requests.spare, request, link);
	} else {
		free(request);
	}
	return !--client->requests.n;
}

void request_free(struct bps_request *request)
{
	struct bps_client *client = request->client;

	if (request_put(request))
		client_unref(client);
}

int request_find_slot(struct bps_client *client)
{
	if (likely(client->ring.n_slots_free))
		return 0;
	(void)client_poll_ring(client);
	/*
	 * Most who find none wait for one, and hear all that there is to hear there; who only tries
	 * again does so now and then.
	 */
	if (!client->ring.n_slots_free && !(++client->waiting.n_full % CLIENT_FULL_POLL))
		(void)client_progress(client);
	if (!client->ring.n_slots_free)
		cuda_sweep(client);
	if (!client->ring.n_slots_free)
		return error_set(-EAGAIN, EAGAIN_TEXT);
	return 0;
}

int request_take_slot(struct bps_request *request)
{
	struct bps_client *client = request->client;
	int r = request_find_slot(client);

	if (!r)
		request->slot = client->ring.slots_free[--client->ring.n_slots_free];
	return r;
}

/* Puts its entry into the ring. The daemon is not woken yet. */
static void request_write(struct bps_request *request)
{
	struct bps_client *client = request->client;
	struct shm_header *header = client->shm;
	struct shm_slot *slot = &shm_slots(client->shm)[request->slot];
	struct shm_entry *entry = &shm_ring(client->shm)[client->ring.tail % SHM_ENTRIES];

	/* That of memory on a device is known to a stream already. */
	if (!request->cuda || !request->cuda->flags)
		request->ticket = ++client->ring.next_ticket;
	slot->ticket = request->ticket;
	atomic_store_explicit(&slot->state, SHM_PENDING, memory_order_relaxed);
	*entry = request->entry;
	entry->slot = request->slot;
	entry->ticket = request->ticket;
	atomic_store_explicit(&header->tail, ++client->ring.tail, memory_order_release);
}

static void request_wake_daemon(const struct bps_client *client)
{
	struct shm_header *header = client->shm;
	uint32_t armed = 1;
	uint64_t one = 1;

	/* Against the daemon's fence between arming itself and its last look at tail. */
	shm_fence();
	if (atomic_load_explicit(&header->daemon_armed, memory_order_relaxed) == 1 &&
	    atomic_compare_exchange_strong(&header->daemon_armed, &armed, 0))
		(void)!write(client->daemon_event, &one, sizeof(one));
}

/*
 * Where the next is written, and the tensor that came behind this one the last time, as it will
 * again.
 */
static _fetches_ void request_fetch_next(struct bps_client *client, struct bps_tensor *tensor)
{
	struct bps_tensor *before = client->requests.submitted;

	if (before && before->after != tensor)
		before->after = tensor;
	client->requests.submitted = tensor;
	if (tensor->after)
		fetch_to_write(tensor->after, CACHE_LINE);
	fetch_to_write(&shm_ring(client->shm)[client->ring.tail % SHM_ENTRIES],
		       sizeof(struct shm_entry));
	if (client->ring.n_slots_free)
		fetch_to_write(
			&shm_slots(client->shm)[client->ring
							.slots_free[client->ring.n_slots_free - 1]],
			CACHE_LINE);
}

void request_post(struct bps_request *request, struct bps_tensor *tensor)
{
	struct bps_client *client = request->client;

	request->tensor = tensor;
	request->round = request->entry.round;
	request->run = tensor->run;
	tensor->refs++;
	request->state = REQUEST_POSTED;
	/* With none under way, what is counted was seen. */
	if (!client->requests.n_posted)
		client->ring.seen = client->ring.harvested;
	TAILQ_INSERT_TAIL(&client->requests.posted, request, link);
	client->requests.n_posted++;
	client->ring.of_slot[request->slot] = request;
	/* Else session.c posts it, when there is a daemon that knows the tensor. */
	if (client->session.state == SESSION_READY) {
		request_write(request);
		request_fetch_next(client, tensor);
		request_wake_daemon(client);
	}
}

bool request_any_widens(const struct bps_client *client)
{
	const struct bps_request *request;

	TAILQ_FOREACH(request, &client->requests.posted, link)
	if (request->entry.operation != OPERATION_PUSH_PULL_ROWS && request->entry.input_dtype)
		return true;
	return false;
}

int request_post_all(struct bps_client *client)
{
	struct bps_request *request;
	int r = 0;

	if (!client->requests.n_posted)
		return 0;
	TAILQ_FOREACH(request, &client->requests.posted, link)
	request_write(request);
	request_wake_daemon(client);
	TAILQ_FOREACH(request, &client->requests.posted, link)
	if (request->cancelled)
		r = r ?: call_cancel(client, request);
	return r;
}

/* Whether a staged result is still to be brought to where the caller wants it. */
static bool request_has_result(const struct bps_request *request)
{
	if (request->status)
		return false;
	return (request->row_len && request->output_rows_range) ||
	       (request->output_range && !(request->cuda && request->cuda->streamed));
}

/* Takes a request that is under way out of the daemon's hands. Frees an orphan. */
static void request_end(struct bps_request *request, int status, const char *text)
{
	struct bps_client *client = request->client;

	TAILQ_REMOVE(&client->requests.posted, request, link);
	client->requests.n_posted--;
	client->ring.of_slot[request->slot] = NULL;
	if (request->cuda)
		cuda_end(request, status);
	if (request->slot != NO_SLOT)
		client->ring.slots_free[client->ring.n_slots_free++] = request->slot;
	request->slot = NO_SLOT;
	request->status = status;
	if (status)
		request->text = strdup(text);
	tensor_ended(request->tensor, request->round, status);
	/* The answer to the declaration may still have to be read: request_seen(). */
	if (!status || request->tensor->declare.done)
		tensor_put(TAKE_PTR(request->tensor));
	request_release_inputs(request);

	if (request->orphan) {
		request_free(request);
	} else if (request_has_result(request)) {
		request->state = REQUEST_ENDED;
		TAILQ_INSERT_TAIL(&client->requests.ended, request, link);
	} else {
		request->state = REQUEST_COMPLETE;
		request_release_outputs(request);
	}
}

void request_settle(struct bps_request *request)
{
	if (request->state != REQUEST_COMPLETE || !request->cuda)
		return;
	if (request_has_result(request)) {
		request->state = REQUEST_ENDED;
		TAILQ_INSERT_TAIL(&request->client->requests.ended, request, link);
	} else {
		request_release_outputs(request);
	}
}

/* What the daemon says in a slot of an elastic job; nothing, if that cannot be. */
static struct bps_outcome slot_outcome(const struct shm_slot *slot)
{
	struct bps_outcome outcome = {
		.size = sizeof(outcome),
		.membership = *(const volatile uint32_t *)&slot->membership,
		.world_size = *(const volatile uint32_t *)&slot->size,
		.rank = *(const volatile uint32_t *)&slot->rank,
		.n_came = *(const volatile uint32_t *)&slot->n_came,
		.n_waiting = *(const volatile uint32_t *)&slot->n_waiting,
	};

	if (outcome.world_size > JOB_RANKS_MAX || outcome.rank >= outcome.world_size)
		return (struct bps_outcome){ .size = sizeof(outcome) };
	return outcome;
}

/* A wait that timed out says -ETIMEDOUT: how a request ended must not be taken for it. */
static int request_status(int status)
{
	return status == -ETIMEDOUT ? -ETIME : status;
}

/* Looks at the slot of one request under way. True when it has ended; it may be gone then. */
static bool request_poll(struct bps_request *request)
{
	struct bps_client *client = request->client;
	const struct shm_slot *slot;
	char text[ERROR_TEXT_MAX + 1];
	uint32_t state;
	bool brief;
	int status;

	if (client->session.state != SESSION_READY)
		return false;
	slot = &shm_slots(client->shm)[request->slot];
	state = atomic_load_explicit(&slot->state, memory_order_acquire);
	if (state == SHM_PENDING)
		return false;
	if (state != SHM_DONE) {
		/* The next to look at the whole ends the session: see client_poll_once(). */
		client->wild = true;
		return false;
	}

	/* The daemon may scribble still: what was read once counts. */
	status = *(const volatile int32_t *)&slot->status;
	text[0] = 0;
	if (status > 0 || status < -4095) {
		status = -EPROTO;
		(void)stpcpy(text, "the daemon ended the request with a status that is none");
	} else if (status) {
		memcpy(text, slot->text, sizeof(text));
		text[ERROR_TEXT_MAX] = 0;
		if (!*text)
			(void)stpncpy(text, strerror(-status), ERROR_TEXT_MAX);
	}
	status = request_status(status);

	if (!status && !cuda_is_ready(request)) {
		status = -EPROTO;
		(void)stpcpy(text, "the daemon ended the request before its stream had come to it");
	}
	brief = client->ring.ordered && !status && *(const volatile uint32_t *)&slot->brief;
	if (request->counted || request->row_len)
		request->n_rows =
			*(const volatile uint64_t *)(brief ? &slot->brief_rows : &slot->n_rows);
	if (request->row_len) {
		if (!status && request->n_rows > request->output_len / request->row_len) {
			status = -EPROTO;
			(void)stpcpy(text, "the daemon gave more rows than there was room for");
		} else if (!status) {
			request->output_len = request->n_rows * request->row_len;
		}
	}

	request->outcome = (struct bps_outcome){ .size = sizeof(request->outcome) };
	if (!client->job.membership) {
		request->outcome.world_size = client->job.size;
		request->outcome.rank = client->job.rank;
		request->outcome.n_came = status ? 0 : client->job.size;
	} else if (!brief) {
		request->outcome = slot_outcome(slot);
	}
	client->ring.harvested++;
	client->waiting.n_full = 0;
	request_end(request, status, text);
	return true;
}

/* Those that are under way, until so many are done as there may be. */
static bool harvest_all(struct bps_client *client, uint64_t completions, bool last)
{
	struct bps_request *request, *next;
	bool ended = false;

	for (request = TAILQ_FIRST(&client->requests.posted);
	     request && (last || (int64_t)(completions - client->ring.harvested) > 0);
	     request = next) {
		next = TAILQ_NEXT(request, link);
		ended |= request_poll(request);
	}
	return ended;
}

/* Whose slot was the n-th to be done; NULL if it was seen already, or is none. */
static inline struct bps_request *request_of(const struct bps_client *client, uint64_t n)
{
	struct shm_header *header = client->shm;
	uint16_t slot = atomic_load_explicit(&header->order[n % SHM_ORDER], memory_order_acquire);

	return slot < SHM_SLOTS ? client->ring.of_slot[slot] : NULL;
}

/*
 * What it takes to look at the requests to come and to end them, the nearer the more: each has what
 * the one before it led to.
 */
static _fetches_ void harvest_fetch(const struct bps_client *client, int64_t n_ahead, uint64_t n)
{
	const struct shm_header *header = client->shm;
	const struct bps_request *request;
	uint16_t slot;

	if (n_ahead > FETCH_SLOT) {
		slot = header->order[(n + FETCH_SLOT) % SHM_ORDER];
		__builtin_prefetch(&shm_slots(client->shm)[slot % SHM_SLOTS]);
		__builtin_prefetch(&client->ring.of_slot[slot % SHM_SLOTS]);
	}
	if (n_ahead > FETCH_REQUEST && (request = request_of(client, n + FETCH_REQUEST)))
		fetch_to_write(request, 3 * CACHE_LINE);
	if (n_ahead > FETCH_TENSOR && (request = request_of(client, n + FETCH_TENSOR)))
		fetch_to_write(request->tensor, CACHE_LINE);
}

static bool harvest_in_order(struct bps_client *client, uint64_t completions)
{
	struct shm_header *header = client->shm;
	uint64_t first = client->ring.seen;
	int64_t n = (int64_t)(completions - first);
	bool ended = false;

	if (n <= 0)
		return false;
	for (int64_t i = -MIN(n, FETCH_SLOT); n < SHM_ORDER && i < n; i++) {
		struct bps_request *request =
			i < 0 ? NULL : request_of(client, first + (uint64_t)i);

		harvest_fetch(client, n - i, first + (uint64_t)i);
		ended |= request && request_poll(request);
	}
	client->ring.seen = completions;
	/* The daemon was faster: some were written over, or what they were is unknown. */
	completions = atomic_load_explicit(&header->completions, memory_order_acquire);
	if (completions - first >= SHM_ORDER)
		ended |= harvest_all(client, completions, true);
	return ended;
}

bool request_harvest(struct bps_client *client, bool last)
{
	struct shm_header *header = client->shm;
	uint64_t completions;

	if (!client->requests.n_posted || client->session.state != SESSION_READY)
		return false;

	/*
	 * A hint where to stop. Slots are done before they are counted, so there may be one more
	 * than it says.
	 */
	completions = atomic_load_explicit(&header->completions, memory_order_acquire);
	if (client->ring.ordered && !last)
		return harvest_in_order(client, completions);
	return harvest_all(client, completions, last);
}

void request_end_all(struct bps_client *client, int status, const char *text)
{
	struct bps_request *request;

	while ((request = TAILQ_FIRST(&client->requests.posted)))
		request_end(request, status, text);
}

void request_end_strays(struct bps_client *client)
{
	struct bps_request *request, *next;

	for (request = TAILQ_FIRST(&client->requests.posted); request; request = next) {
		next = TAILQ_NEXT(request, link);
		if (request->tensor->run != client->job.run)
			request_end(request, -ECONNRESET, "its job was over");
	}
}

/* Brings a staged result to where the caller wants it, without the mutex. (locked, may wait) */
static void request_copy(struct bps_request *request)
{
	struct bps_client *client = request->client;
	int r = 0;

	TAILQ_REMOVE(&client->requests.ended, request, link);
	request->state = REQUEST_COPYING;
	client_unlock(client);
	if (request->output_range && request->cuda)
		r = cuda_copy(request);
	else if (request->output_range)
		memcpy(request->output, staging_data(request->output_range), request->output_len);
	if (request->output_rows_range)
		memcpy(request->output_rows, staging_data(request->output_rows_range),
		       request->n_rows * sizeof(int64_t));
	client_lock(client);
	if (r) {
		request->status = r;
		request->text = strdup(bps_error());
	}
	request->state = REQUEST_COMPLETE;
	request_release_outputs(request);
	client_wake(client);
}

void request_copy_all(struct bps_client *client)
{
	struct bps_request *request;

	while ((request = TAILQ_FIRST(&client->requests.ended)))
		request_copy(request);
}

/*
 * Brings it as far as it gets without waiting for the daemon. True when it is complete. (locked,
 * may wait)
 */
static bool request_advance(struct bps_request *request)
{
	struct bps_client *client = request->client;

	/*
	 * Where one has ended so have others, which are waited for next: all at once, what they
	 * take can be fetched.
	 */
	if (request->state == REQUEST_POSTED && request_poll(request) &&
	    request_harvest(client, false))
		client_tell(client);
	if (request->state == REQUEST_ENDED)
		request_copy(request);
	return request->state == REQUEST_COMPLETE;
}

/* Stays as it is once the request is complete. */
static const char *request_text(const struct bps_request *request)
{
	if (!request->status)
		return "";
	return request->text ?: strerror(-request->status);
}

int request_check(const struct bps_request *request)
{
	if (!request)
		return error_set(-EINVAL, "the request is NULL");
	return client_check(request->client);
}

void request_see(struct bps_request *request)
{
	if (request->state == REQUEST_POSTED)
		(void)request_poll(request);
}

/*
 * The request is complete, and the caller is about to be told. A request whose tensor was refused
 * fails for want of that tensor: the reason is in the answer to the declaration, which the daemon
 * sent before, through the socket.
 */
static void request_seen(struct bps_request *request)
{
	struct bps_client *client = request->client;
	struct bps_tensor *tensor = TAKE_PTR(request->tensor);

	job_see(client, request);
	order_see(client, request);
	if (!tensor)
		return;
	(void)client_progress(client);
	if (tensor->refused && request->run == client->job.run) {
		request->status = request_status(tensor->declare.status);
		free(request->text);
		request->text = strdup(tensor->declare.text);
	}
	tensor_put(tensor);
}

_public_ int bps_request_poll(struct bps_request *request)
{
	int r = request_check(request);
	if (r)
		return r;

	CLIENT_LOCKED(request->client);
	if (!request_advance(request))
		(void)client_poll_ring(request->client);
	/* Also the loss of the daemon is to be seen by one who does nothing but poll. */
	if (!request_advance(request))
		(void)client_progress(request->client);
	if (!request_advance(request))
		return 0;
	request_seen(request);
	return 1;
}

_public_ int bps_request_wait(struct bps_request *request, int64_t timeout_ms)
{
	int64_t deadline_ns = client_deadline_ns(timeout_ms);
	struct bps_client *client;
	int r = request_check(request);
	if (r)
		return r;

	client = request->client;
	CLIENT_LOCKED(client);
	if (!request_advance(request))
		(void)client_spin(client, request, request_advance, deadline_ns);
	while (!request_advance(request)) {
		if (request->state == REQUEST_COPYING) {
			client_wait_for_leader(client, CLIENT_FOREVER);
		} else if (client_now_ns() < deadline_ns) {
			client_wait_for(client, request, deadline_ns);
		} else {
			(void)client_progress(client);
			if (!request_advance(request) && request->state != REQUEST_COPYING)
				return error_set(-ETIMEDOUT, "the request is still under way");
		}
	}
	request_seen(request);
	if (request->status)
		return error_set(request->status, "%s", request_text(request));
	return 0;
}

_public_ int bps_request_outcome(struct bps_request *request, struct bps_outcome *ret)
{
	size_t size;
	int r = request_check(request);
	if (r)
		return r;
	if (!ret || ret->size < sizeof(ret->size))
		return error_set(-EINVAL, "bps_outcome is NULL or its size is not set");

	CLIENT_LOCKED(request->client);
	if (!request_advance(request))
		return error_set(-EBUSY, "the request is still under way");
	size = ret->size;
	memset(ret, 0, size);
	memcpy(ret, &request->outcome, MIN(size, sizeof(request->outcome)));
	ret->size = size;
	return 0;
}

_public_ int bps_request_rows(struct bps_request *request, uint64_t *ret_rows)
{
	int r = request_check(request);
	if (r)
		return r;
	if (!ret_rows || !request->row_len)
		return error_set(-EINVAL, !ret_rows ? "ret_rows is NULL"
						    : "the request is no push_pull_rows");

	CLIENT_LOCKED(request->client);
	if (!request_advance(request))
		return error_set(-EBUSY, "the request is still under way");
	if (request->status && request->status != -ENOSPC)
		return error_set(request->status, "%s", request_text(request));
	*ret_rows = request->n_rows;
	return 0;
}

_public_ int bps_request_contributions(struct bps_request *request, uint64_t *ret_contributions)
{
	int r = request_check(request);
	if (r)
		return r;
	if (!ret_contributions || !request->counted)
		return error_set(-EINVAL, !ret_contributions
						  ? "ret_contributions is NULL"
						  : "the request is no push_pull or accumulate");

	CLIENT_LOCKED(request->client);
	if (!request_advance(request))
		return error_set(-EBUSY, "the request is still under way");
	if (request->status)
		return error_set(request->status, "%s", request_text(request));
	*ret_contributions = request->n_rows;
	return 0;
}

_public_ const char *bps_request_error(const struct bps_request *request)
{
	if (request_check(request))
		return "";

	CLIENT_LOCKED(request->client);
	return request_text(request);
}

_public_ int bps_request_cancel(struct bps_request *request)
{
	int r = request_check(request);
	if (r)
		return r;

	CLIENT_LOCKED(request->client);
	if (request_advance(request) || request->state != REQUEST_POSTED || request->cancelled)
		return 0;
	r = call_cancel(request->client, request);
	request->cancelled = !r;
	return r;
}

_public_ int bps_request_blocked(struct bps_request *request, int blocked)
{
	int r = request_check(request);
	if (r)
		return r;

	CLIENT_LOCKED(request->client);
	if (request_advance(request) || request->state != REQUEST_POSTED ||
	    !(request->client->session.hello.answer.features & CONTROL_FEATURE_BLOCKED))
		return 0;
	return call_blocked(request->client, request, !blocked);
}

_public_ void bps_request_free(struct bps_request *request)
{
	struct bps_client *client;
	bool last = false;

	if (!request || client_check(request->client))
		return;

	client = request->client;
	client_lock(client);
	/* The copy goes to memory that is the caller's again when this returns. */
	while (request->state == REQUEST_COPYING)
		client_wait_for_leader(client, CLIENT_FOREVER);
	if (request->state == REQUEST_POSTED && !request_poll(request)) {
		request->orphan = true;
	} else {
		if (request->state == REQUEST_ENDED)
			TAILQ_REMOVE(&client->requests.ended, request, link);
		last = request_put(request);
	}
	client_unlock(client);
	if (last)
		client_unref(client);
}
