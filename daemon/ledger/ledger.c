/*
 * A job's ledger made, or taken over and checked; what it says of the job and its ranks; a
 * record for each round under way. result.c has retained results, journal.c in-place journals. Called
 * by the agent.
 */
#include "base/failpoint.h"
#include "ledger/internal.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* What is read of a ledger at once: of its length a part, as of its offsets; a power of two. */
#define WINDOW 4096

/* Its holders are charged by whom they are known to; not here. */
static struct quota unlimited = { .limit = UINT64_MAX };

/*
 * A part is left in the journal it was found in, so journals run out if many daemons in a row never get
 * to finish one.
 */
static uint32_t journals_for(unsigned n_threads)
{
	return MIN(MAX(4 * n_threads, LEDGER_JOURNALS_MIN), LEDGER_JOURNALS_MAX);
}

uint64_t ledger_bytes(unsigned n_threads)
{
	return ledger_len(journals_for(n_threads));
}

static uint32_t results_for(uint32_t result_bytes)
{
	uint64_t n = LEDGER_RESULTS_BYTES / align_up((uint64_t)result_bytes, 4096);

	return (uint32_t)MIN(MAX(n, (uint64_t)LEDGER_RESULTS_MIN), (uint64_t)LEDGER_RESULTS_MAX);
}

/* The size of parts is not known yet: room for one result at least. */
uint64_t ledger_far_bytes(unsigned n_threads, uint32_t n_tensors)
{
	return ledger_data_offset(journals_for(n_threads), n_tensors, LEDGER_RESULTS_MAX) +
	       align_up((uint64_t)LEDGER_RESULT_MAX, 4096);
}

bool ledger_is_far(const struct ledger *ledger)
{
	return ledger->n_results;
}

uint32_t ledger_part_bytes(const struct ledger *ledger)
{
	return ledger->part_bytes;
}

uint32_t ledger_result_bytes(const struct ledger *ledger)
{
	return ledger->result_bytes;
}

bool ledger_is(const struct ledger *ledger, int fd)
{
	struct stat st;

	return !fstat(fd, &st) && st.st_dev == ledger->device && st.st_ino == ledger->inode;
}

/* -- Making, taking over ----------------------------------------------------------------------- */

struct ledger *ledger_free(struct ledger *ledger)
{
	uint64_t charged;

	if (!ledger)
		return NULL;
	(void)buffer_unref(ledger->memory);
	free(ledger->old);
	free(ledger->stale);
	free(ledger->window.data);
	free(ledger->record);
	charged = ledger->charged + ledger_results_done(ledger);
	if (ledger->quota)
		handout_leave(HANDOUT_MEMORY, ledger->fd, ledger->descriptors,
			      quota_leave(ledger->quota, charged), charged);
	else
		(void)fd_close(ledger->fd);
	free(ledger);
	return NULL;
}

int ledger_charge_to(struct ledger *ledger, struct quota *quota, struct quota *descriptors)
{
	uint64_t bytes = sizeof(*ledger) + ledger_len(ledger->n_journals) +
			 ledger->n_results * (sizeof(ledger->kept[0]) + 2 * sizeof(uint32_t)) +
			 ledger->stale_results.n * sizeof(struct ledger_left) +
			 ledger->tensors.n_places * LEDGER_KNOWN_BYTES + ledger->record_len;

	if (quota_charge(descriptors, 1))
		return error_origin(-EDQUOT);
	if (quota_charge(quota, bytes)) {
		quota_release(descriptors, 1);
		return error_origin(-EDQUOT);
	}
	ledger->descriptors = descriptors;
	ledger->quota = quota;
	ledger->charged = bytes;
	return error_trace(ledger_results_charge(ledger));
}

#define LEDGER_NAME "bps-ledger"

/* Whether ledger_new() made it: a memfd has its name for good. */
static bool is_named(int fd)
{
	static const char made[] = "/memfd:" LEDGER_NAME " (deleted)";
	char path[32], name[sizeof(made)];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return readlink(path, name, sizeof(name)) == sizeof(made) - 1 &&
	       !memcmp(name, made, sizeof(made) - 1);
}

static int ledger_map(int fd, uint64_t len, unsigned n_threads, struct ledger **ret_ledger,
		      struct failure *failure)
{
	_cleanup_(ledger_freep) struct ledger *ledger =
		calloc(1, sizeof(*ledger) + n_threads * sizeof(ledger->own[0]));
	struct stat st;
	int r;

	if (!ledger)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	ledger->fd = handout_open(fd, O_PATH);
	if (ledger->fd < 0 || fstat(fd, &st))
		return failure_set(failure, -errno, "cannot look at the ledger: %s",
				   strerror(errno));
	ledger->device = st.st_dev;
	ledger->inode = st.st_ino;
	ledger->n_threads = n_threads;
	r = buffer_map(fd, len, &unlimited, &ledger->memory, failure);
	if (r)
		return r;
	*ret_ledger = TAKE_PTR(ledger);
	return 0;
}

int ledger_new(uint64_t job, uint32_t size, uint32_t part_bytes, unsigned n_threads,
	       const struct ledger_far *far, struct ledger **ret_ledger, int *ret_fd)
{
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	_cleanup_(fd_closep) int fd = memfd_create(LEDGER_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	_cleanup_(fd_closep) int read_only = -1;
	uint32_t n_journals = journals_for(n_threads),
		 n_results = far ? results_for(far->result_bytes) : 0;
	uint64_t len =
		far ? ledger_far_len(n_journals, far->n_tensors, n_results, far->result_bytes)
		    : ledger_len(n_journals);
	struct ledger_header *header;
	struct failure failure = { 0 };
	int r;

	if (FAILPOINT_FAILS("ledger-new"))
		return error_origin(-ENOMEM);
	if (far && (far->record_len > LEDGER_JOB_MAX || far->n_tensors > LEDGER_TENSORS_MAX))
		return error_origin(-EOVERFLOW);
	if (fd < 0 || fchmod(fd, S_IRUSR | S_IWUSR) || ftruncate(fd, (off_t)len) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		return error_origin(-errno);
	read_only = handout_open(fd, O_RDONLY);
	if (read_only < 0)
		return error_trace(read_only);
	r = ledger_map(fd, len, n_threads, &ledger, &failure);
	if (r)
		return error_origin(r);
	ledger->size = size;
	ledger->part_bytes = part_bytes;
	ledger->n_journals = n_journals;
	ledger->n_results = n_results;
	ledger->n_tensors = far ? far->n_tensors : 0;
	ledger->result_bytes = far ? far->result_bytes : 0;
	r = ledger_results_init(ledger);
	if (r)
		return error_trace(r);
	for (uint32_t i = 0; i < LEDGER_RECORDS; i++)
		ledger->free_records[ledger->n_free++] = LEDGER_RECORDS - 1 - i;
	for (uint32_t i = 0; i < n_threads; i++)
		ledger->own[i] = i;
	header = ledger_header(ledger);
	header->magic = LEDGER_MAGIC;
	header->version = LEDGER_VERSION;
	header->len = len;
	header->job = job;
	header->size = size;
	header->part_bytes = part_bytes;
	header->n_records = LEDGER_RECORDS;
	header->n_journals = n_journals;
	header->piece_bytes = LEDGER_PIECE_BYTES;
	header->pid_namespace = process_namespace();
	header->n_results = n_results;
	header->n_tensors = ledger->n_tensors;
	header->result_bytes = ledger->result_bytes;
	if (far) {
		header->job_len = (uint32_t)far->record_len;
		memcpy(ledger->memory->data + ledger_job_offset(n_journals), far->record,
		       far->record_len);
	}
	*ret_ledger = TAKE_PTR(ledger);
	*ret_fd = TAKE_FD(read_only);
	return 0;
}

static uint64_t len_of(const struct ledger_header *header)
{
	return header->n_results ? ledger_far_len(header->n_journals, header->n_tensors,
						  header->n_results, header->result_bytes)
				 : ledger_len(header->n_journals);
}

/* The header, as copied; the memory behind it has so many bytes. */
static int check_header(const struct ledger_header *header, uint64_t len, uint64_t job,
			uint32_t size, struct failure *failure)
{
	if (header->magic != LEDGER_MAGIC)
		return failure_set(failure, -EPROTO, "what came beside Resume is no ledger");
	if (header->version != LEDGER_VERSION || header->piece_bytes != LEDGER_PIECE_BYTES ||
	    header->n_records != LEDGER_RECORDS)
		return failure_set(failure, -ESTALE,
				   "its ledger is of version %u (%u records, pieces of %u bytes), "
				   "this daemon (" BPS_VERSION ") knows version %u (%u, %u): start "
				   "the job again",
				   header->version, header->n_records, header->piece_bytes,
				   LEDGER_VERSION, LEDGER_RECORDS, LEDGER_PIECE_BYTES);
	if (!header->n_journals || header->n_journals > LEDGER_JOURNALS_MAX ||
	    header->part_bytes < PART_BYTES_MIN || header->part_bytes > PART_BYTES_MAX ||
	    header->part_bytes % LEDGER_PART_ALIGN || header->n_results > LEDGER_RESULTS_MAX ||
	    header->n_tensors > LEDGER_TENSORS_MAX || header->result_bytes > LEDGER_RESULT_MAX ||
	    (header->n_results && header->result_bytes < header->part_bytes) ||
	    header->job_len > LEDGER_JOB_MAX || header->len != len_of(header) || header->len != len)
		return failure_set(failure, -EPROTO,
				   "the ledger is damaged: %" PRIu64
				   " bytes, %u journals, parts of "
				   "%u bytes",
				   header->len, header->n_journals, header->part_bytes);
	if (header->job != job || header->size != size)
		return failure_set(failure, -EPROTO,
				   "the ledger is of run %016" PRIx64 " with %u ranks, not of "
				   "%016" PRIx64 " with %u",
				   header->job, header->size, job, size);
	return 0;
}

static int fill(struct ledger_window *window, uint64_t at)
{
	ssize_t n;

	if (window->data && window->at == at)
		return 0;
	if (!window->data)
		window->data = malloc(WINDOW);
	if (!window->data)
		return error_origin(-ENOMEM);
	n = pread(window->fd, window->data, WINDOW, (off_t)at);
	window->at = n == WINDOW ? at : UINT64_MAX;
	return n == WINDOW ? 0 : error_origin(-EPROTO);
}

int ledger_copy(struct ledger *ledger, const void *from, void *copy, size_t len,
		struct failure *failure)
{
	uint64_t at = (uint64_t)((const char *)from - (const char *)ledger->memory->data);
	char *to = copy;
	int r;

	for (size_t n; len; at += n, to += n, len -= n) {
		n = MIN(len, (size_t)(WINDOW - at % WINDOW));
		r = fill(&ledger->window, at - at % WINDOW);
		if (r)
			return failure_set(failure, r, "%s",
					   r == -ENOMEM ? "out of memory for a ledger"
							: "the ledger cannot be read");
		memcpy(to, ledger->window.data + at % WINDOW, n);
	}
	return 0;
}

/* Copies a record that is in use, and checks it. */
static int read_record(struct ledger *ledger, uint32_t number, struct failure *failure)
{
	struct ledger_old *old = &ledger->old[ledger->n_old];
	struct ledger_record copy;
	int r;

	r = ledger_copy(ledger, ledger_record(ledger, number), &copy, sizeof(copy), failure);
	if (r)
		return r;
	*old = (struct ledger_old){
		.record = number,
		.round = copy.round,
		.elements = copy.elements,
		.digest = copy.digest,
		.low = atomic_load_explicit(&copy.low, memory_order_relaxed),
		.stage = atomic_load_explicit(&copy.stage, memory_order_relaxed),
		.dtype = copy.dtype,
		.operation = copy.operation,
		.reduction = copy.reduction,
		.root = copy.root,
		.n_came = copy.n_came,
	};
	for (size_t i = 0; i < ARRAY_SIZE(old->done); i++)
		old->done[i] = atomic_load_explicit(&copy.done[i], memory_order_relaxed);
	memcpy(old->tensor, copy.tensor, sizeof(old->tensor));
	if (atomic_load_explicit(&copy.state, memory_order_relaxed) != LEDGER_MOVING ||
	    !old->tensor[0] || !memchr(old->tensor, 0, sizeof(old->tensor)) ||
	    !dtype_size(old->dtype) || !old->operation || old->operation > OPERATION_MAX_ ||
	    (!old->reduction && !ledger->n_results) || old->reduction > REDUCTION_MAX_ ||
	    !old->round || old->low % 64 || (uint32_t)old->stage > LEDGER_SCATTERED ||
	    (old->stage >> 32 & ~(uint64_t)LEDGER_WAITING) >= ledger->size)
		return failure_set(failure, -EPROTO, "the ledger is damaged: record %u", number);
	ledger->n_old++;
	return 0;
}

static int read_records(struct ledger *ledger, struct failure *failure)
{
	size_t n_used = 0;
	uint32_t state;
	int r;

	for (uint32_t i = LEDGER_RECORDS; i--;) {
		r = ledger_copy(ledger, &ledger_record(ledger, i)->state, &state, sizeof(state),
				failure);
		if (r)
			return r;
		if (state == LEDGER_FREE)
			ledger->free_records[ledger->n_free++] = i;
		else
			n_used++;
	}
	ledger->old = calloc(MAX(n_used, (size_t)1), sizeof(ledger->old[0]));
	if (!ledger->old)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	/* Those found free stay free, whatever their memory says now. */
	for (size_t i = 0, next = 0; i < LEDGER_RECORDS; i++) {
		if (next < ledger->n_free && ledger->free_records[ledger->n_free - 1 - next] == i) {
			next++;
			continue;
		}
		r = read_record(ledger, (uint32_t)i, failure);
		if (r)
			return r;
	}
	return 0;
}

/* What it says of the job, where it goes through servers. */
static int read_job(struct ledger *ledger, const struct ledger_header *header,
		    struct failure *failure)
{
	if (!ledger->n_results)
		return 0;
	ledger->record = malloc(MAX(header->job_len, 1u));
	if (!ledger->record)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	ledger->record_len = header->job_len;
	return ledger_copy(ledger, ledger->memory->data + ledger_job_offset(ledger->n_journals),
			   ledger->record, ledger->record_len, failure);
}

int ledger_open(int fd, uint64_t job, uint32_t size, unsigned n_threads, uint32_t max_tensors,
		struct ledger **ret_ledger, struct failure *failure)
{
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	_cleanup_(fd_closep) int writable = -1;
	struct ledger_header header;
	struct stat st;
	int r;

	/* First: files of all kinds answer this at once. */
	if (fcntl(fd, F_GET_SEALS) < 0 || !is_named(fd))
		return failure_set(failure, -EPROTO, "what came beside Resume is no ledger");
	if (fstat(fd, &st))
		return failure_set(failure, -errno, "cannot look at the ledger: %s",
				   strerror(errno));
	if (st.st_uid != geteuid())
		return failure_set(failure, -EPROTO,
				   "the ledger that came beside Resume is of user %u, and this "
				   "daemon of user %u",
				   st.st_uid, geteuid());
	if ((uint64_t)st.st_size < LEDGER_RECORD_OFFSET ||
	    (uint64_t)st.st_size > ledger_far_len(LEDGER_JOURNALS_MAX, LEDGER_TENSORS_MAX,
						  LEDGER_RESULTS_MAX, LEDGER_RESULT_MAX))
		return failure_set(failure, -EPROTO, "what came beside Resume is no ledger");
	/* Nobody but this user can. */
	writable = handout_open(fd, O_RDWR);
	if (writable < 0)
		return failure_set(failure, writable, "cannot open the ledger: %s",
				   strerror(-writable));
	r = ledger_map(writable, (uint64_t)st.st_size, n_threads, &ledger, failure);
	if (r)
		return r;
	ledger->window.fd = fd;
	r = ledger_copy(ledger, ledger->memory->data, &header, sizeof(header), failure);
	if (!r)
		r = check_header(&header, (uint64_t)st.st_size, job, size, failure);
	if (r)
		return r;
	ledger->size = size;
	ledger->part_bytes = header.part_bytes;
	ledger->n_journals = header.n_journals;
	ledger->n_results = header.n_results;
	ledger->n_tensors = header.n_tensors;
	ledger->result_bytes = header.result_bytes;
	ledger->begun = atomic_load_explicit(&header.begun, memory_order_relaxed);
	for (size_t i = 0; i < ARRAY_SIZE(ledger->departed); i++)
		ledger->departed[i] =
			atomic_load_explicit(&header.departed[i], memory_order_relaxed);
	ledger->same_namespace =
		header.pid_namespace && header.pid_namespace == process_namespace();
	ledger_header(ledger)->pid_namespace = process_namespace();
	r = read_job(ledger, &header, failure);
	if (!r)
		r = read_records(ledger, failure);
	if (!r)
		r = ledger_take_journals(ledger, failure);
	if (!r)
		r = ledger_results_open(ledger, max_tensors, failure);
	if (r)
		return r;
	freep(&ledger->window.data);
	*ret_ledger = TAKE_PTR(ledger);
	return 0;
}

/* -- The job ----------------------------------------------------------------------------------- */

void ledger_begin(struct ledger *ledger)
{
	if (ledger->begun)
		return;
	ledger->begun = true;
	atomic_store_explicit(&ledger_header(ledger)->begun, 1, memory_order_release);
	ledger_fence();
}

bool ledger_has_begun(const struct ledger *ledger)
{
	return ledger->begun;
}

void ledger_leave(struct ledger *ledger, uint32_t rank)
{
	ledger->departed[rank / 64] |= ledger_bit(rank);
	atomic_store_explicit(&ledger_header(ledger)->departed[rank / 64],
			      ledger->departed[rank / 64], memory_order_release);
	ledger_fence();
}

bool ledger_has_departed(const struct ledger *ledger, uint32_t rank)
{
	return ledger->departed[rank / 64] & ledger_bit(rank);
}

void ledger_set_membership(struct ledger *ledger, uint32_t membership)
{
	ledger_header(ledger)->membership = membership;
}

uint32_t ledger_membership(const struct ledger *ledger)
{
	return *(const volatile uint32_t *)&ledger_header(ledger)->membership;
}

void ledger_set_out(struct ledger *ledger, uint32_t rank, uint32_t membership)
{
	ledger_process(ledger, rank)->out = membership;
}

uint32_t ledger_out(const struct ledger *ledger, uint32_t rank)
{
	return *(const volatile uint32_t *)&ledger_process(ledger, rank)->out;
}

void ledger_set_process(struct ledger *ledger, uint32_t rank, const struct process_seen *process)
{
	struct ledger_process *entry = ledger_process(ledger, rank);

	entry->pid = process->pid;
	entry->started = process->started;
}

enum process_state ledger_look(const struct ledger *ledger, uint32_t rank, uint32_t *ret_pid)
{
	const volatile struct ledger_process *process = ledger_process(ledger, rank);

	*ret_pid = process->pid;
	return ledger->same_namespace ? process_look(*ret_pid, process->started) : PROCESS_UNKNOWN;
}

uint32_t ledger_pid(const struct ledger *ledger, uint32_t rank)
{
	return *(const volatile uint32_t *)&ledger_process(ledger, rank)->pid;
}

bool ledger_may_be(const struct ledger *ledger, uint32_t rank, const struct process_seen *process)
{
	const volatile struct ledger_process *entry = ledger_process(ledger, rank);
	uint64_t started = entry->started;

	if (entry->pid != process->pid)
		return false;
	return !process->pid || (ledger->same_namespace && process->state == PROCESS_ALIVE &&
				 (!started || !process->started || started == process->started));
}

void ledger_stop(struct ledger *ledger)
{
	atomic_store_explicit(&ledger->stopped, true, memory_order_relaxed);
}

bool ledger_stopped(const struct ledger *ledger)
{
	return atomic_load_explicit(&ledger->stopped, memory_order_relaxed);
}

/* -- Rounds ------------------------------------------------------------------------------------ */

/* 0: none. Both are computed from the ranks' own numbers, so that nobody gains by a collision. */
static uint64_t digest_of(const uint64_t *counts, uint32_t size)
{
	uint64_t digest = 0xcbf29ce484222325;

	if (!counts)
		return 0;
	for (uint32_t i = 0; i < size; i++)
		digest = (digest ^ counts[i]) * 0x100000001b3;
	return digest ? digest : 1;
}

static struct ledger_old *find_old(const struct ledger *ledger, const char *tensor, uint64_t first,
				   uint64_t last)
{
	for (size_t i = 0; i < ledger->n_old; i++) {
		struct ledger_old *old = &ledger->old[i];

		if (old->round >= first && old->round <= last && !strcmp(old->tensor, tensor))
			return old;
	}
	return NULL;
}

static void record_free(struct ledger *ledger, uint32_t record)
{
	atomic_store_explicit(&ledger_record(ledger, record)->state, LEDGER_FREE,
			      memory_order_release);
	ledger->free_records[ledger->n_free++] = record;
}

static void old_remove(struct ledger *ledger, struct ledger_old *old)
{
	*old = ledger->old[--ledger->n_old];
}

bool ledger_remembers(const struct ledger *ledger, const char *tensor, uint64_t round)
{
	return find_old(ledger, tensor, round, round);
}

bool ledger_find_rows(const struct ledger *ledger, const char *tensor, uint64_t round,
		      uint64_t *ret_n_rows)
{
	const struct ledger_old *old = find_old(ledger, tensor, round, round);

	if (!old || old->operation != OPERATION_PUSH_PULL_ROWS)
		return false;
	*ret_n_rows = old->elements;
	return true;
}

void ledger_forget(struct ledger *ledger, const char *tensor, uint64_t first, uint64_t last)
{
	struct ledger_old *old;

	while ((old = find_old(ledger, tensor, first, last))) {
		uint32_t record = old->record;

		/* While the record is there its journals mean something. */
		old_remove(ledger, old);
		ledger_drop_journals(ledger, record);
		record_free(ledger, record);
	}
}

static bool is_same(const struct ledger_old *old, const struct ledger_facts *facts, uint64_t digest)
{
	return old->dtype == facts->dtype && old->operation == facts->operation &&
	       old->reduction == facts->reduction && old->root == facts->root &&
	       old->elements == facts->elements && old->digest == digest &&
	       old->n_came == facts->n_came;
}

static void record_write(struct ledger *ledger, uint32_t number, const struct ledger_facts *facts,
			 uint64_t digest)
{
	struct ledger_record *record = ledger_record(ledger, number);
	size_t len = strnlen(facts->tensor, TENSOR_NAME_MAX);

	record->dtype = (uint8_t)facts->dtype;
	record->operation = (uint8_t)facts->operation;
	record->reduction = (uint8_t)facts->reduction;
	record->root = facts->root;
	record->n_came = facts->n_came;
	record->round = facts->round;
	record->elements = facts->elements;
	record->digest = digest;
	atomic_store_explicit(&record->low, 0, memory_order_relaxed);
	atomic_store_explicit(&record->stage, LEDGER_GATHERS, memory_order_relaxed);
	for (size_t i = 0; i < ARRAY_SIZE(record->done); i++)
		atomic_store_explicit(&record->done[i], 0, memory_order_relaxed);
	/* What is behind its end is of no name, whoever had the record before. */
	memcpy(record->tensor, facts->tensor, len);
	record->tensor[len] = 0;
	FAILPOINT("ledger-record-half");
	atomic_store_explicit(&record->state, LEDGER_MOVING, memory_order_release);
	ledger_fence();
	FAILPOINT("ledger-record-written");
}

/* The words of a record that stand for no part yet may hold anything if someone else wrote them. */
static void clear_ahead(struct ledger_round *round)
{
	size_t behind = ledger_word(round->low + LEDGER_AHEAD);

	round->done[behind] = 0;
	atomic_store_explicit(&ledger_record(round->ledger, round->record)->done[behind], 0,
			      memory_order_release);
}

/* Full words are left behind. */
static void slide(struct ledger_round *round)
{
	struct ledger_record *record = ledger_record(round->ledger, round->record);

	while (round->done[ledger_word(round->low)] == UINT64_MAX) {
		size_t behind = ledger_word(round->low);

		round->low += 64;
		atomic_store_explicit(&record->low, round->low, memory_order_release);
		FAILPOINT("ledger-low-moved");
		round->done[behind] = 0;
		atomic_store_explicit(&record->done[behind], 0, memory_order_release);
	}
}

int ledger_round_begin(struct ledger *ledger, struct ledger_round *round,
		       const struct ledger_facts *facts, struct failure *failure)
{
	struct ledger_old *old = find_old(ledger, facts->tensor, facts->round, facts->round);
	uint64_t digest = digest_of(facts->counts, ledger->size);

	if (old && !is_same(old, facts, digest)) {
		ledger_forget(ledger, facts->tensor, facts->round, facts->round);
		return failure_set(failure, -EPROTO,
				   "the daemon was restarted in the middle of it, and the ranks "
				   "now submit something else");
	}
	*round = (struct ledger_round){ .ledger = ledger };
	if (old) {
		round->record = old->record;
		round->low = old->low;
		round->stage = (uint32_t)old->stage;
		round->n_gone = (uint32_t)(old->stage >> 32);
		memcpy(round->done, old->done, sizeof(round->done));
		old_remove(ledger, old);
		clear_ahead(round);
		slide(round);
		FAILPOINT("ledger-record-continued");
		return 0;
	}
	if (!ledger->n_free)
		return failure_set(failure, -EDQUOT, "%u rounds move already", LEDGER_RECORDS);
	round->record = ledger->free_records[--ledger->n_free];
	/* Many rounds begin one after the other: the next one's record is there when it does. */
	if (ledger->n_free)
		fetch_to_write(ledger_record(ledger, ledger->free_records[ledger->n_free - 1]),
			       offsetof(struct ledger_record, tensor) + 1);
	record_write(ledger, round->record, facts, digest);
	return 0;
}

void ledger_round_end(struct ledger_round *round)
{
	if (!round->ledger)
		return;
	FAILPOINT("ledger-round-told");
	ledger_drop_journals(round->ledger, round->record);
	record_free(round->ledger, round->record);
	round->ledger = NULL;
	FAILPOINT("ledger-record-freed");
}

bool ledger_round_reaches(const struct ledger_round *round, uint64_t part)
{
	return part < round->low || part - round->low < LEDGER_AHEAD;
}

bool ledger_round_has(const struct ledger_round *round, uint64_t part)
{
	return round->stage == LEDGER_SCATTERED || part < round->low ||
	       round->done[ledger_word(part)] & ledger_bit(part);
}

void ledger_round_set_stage(struct ledger_round *round, enum ledger_stage stage, uint32_t n_gone)
{
	round->stage = stage;
	round->n_gone = n_gone;
	atomic_store_explicit(&ledger_record(round->ledger, round->record)->stage,
			      stage | (uint64_t)n_gone << 32, memory_order_release);
	ledger_fence();
}

void ledger_round_advance(struct ledger_round *round, uint64_t part)
{
	if (part < round->low)
		return;
	round->done[ledger_word(part)] |= ledger_bit(part);
	slide(round);
}

static _Atomic uint64_t *word_of(const struct ledger_round *round, uint64_t part)
{
	return &ledger_record(round->ledger, round->record)->done[ledger_word(part)];
}

const void *ledger_round_place(const struct ledger_round *round, uint64_t part)
{
	return round->ledger ? word_of(round, part) : NULL;
}

void ledger_round_mark(const struct ledger_round *round, uint64_t part, bool only)
{
	_Atomic uint64_t *word = word_of(round, part);

	/*
	 * Nobody else writes the word: what is locked would wait for all that was stored before, in
	 * outputs and retained results.
	 */
	if (only)
		atomic_store_explicit(
			word, atomic_load_explicit(word, memory_order_relaxed) | ledger_bit(part),
			memory_order_release);
	else
		(void)atomic_fetch_or_explicit(word, ledger_bit(part), memory_order_release);
}
