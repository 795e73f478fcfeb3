/* What a job that goes through servers keeps beside its records: the results that not all nodes have, and its tensors. */
#include "base/failpoint.h"
#include "ledger/internal.h"
#include <inttypes.h>

static struct ledger_result *result_of(const struct ledger *ledger, uint32_t result)
{
	return (struct ledger_result *)(ledger->memory->data +
					ledger_result_offset(ledger->n_journals,
							     ledger->n_tensors)) +
	       result;
}

static struct ledger_tensor *tensor_of(const struct ledger *ledger, uint32_t tensor)
{
	return (struct ledger_tensor *)(ledger->memory->data +
					ledger_tensor_offset(ledger->n_journals)) +
	       tensor;
}

int ledger_read_record(const struct ledger *ledger, void **ret_record, size_t *ret_len)
{
	void *record = malloc(MAX(ledger->record_len, (size_t)1));

	if (!record)
		return error_origin(-ENOMEM);
	if (ledger->record_len)
		memcpy(record, ledger->record, ledger->record_len);
	*ret_record = record;
	*ret_len = ledger->record_len;
	return 0;
}

/* -- Servers that were added -------------------------------------------------------------------------------------- */

static struct data_added *added_of(const struct ledger *ledger)
{
	return (struct data_added *)(ledger->memory->data +
				     ledger_added_offset(ledger->n_journals));
}

void ledger_added_keep(struct ledger *ledger, const struct data_added *added)
{
	struct ledger_header *header = ledger_header(ledger);
	uint32_t n = atomic_load_explicit(&header->n_added, memory_order_relaxed);

	if (n >= DATA_ADDED_MAX)
		return;
	added_of(ledger)[n] = *added;
	atomic_store_explicit(&header->n_added, n + 1, memory_order_release);
}

int ledger_added_read(const struct ledger *ledger, struct data_added_set *ret_added)
{
	*ret_added = (struct data_added_set){
		.n = atomic_load_explicit(&ledger_header(ledger)->n_added, memory_order_acquire),
	};
	if (ret_added->n > DATA_ADDED_MAX)
		return error_origin(-EPROTO);
	memcpy(ret_added->servers, added_of(ledger), ret_added->n * sizeof(ret_added->servers[0]));
	__asm__ volatile("" ::: "memory");
	for (uint32_t i = 0; i < ret_added->n; i++)
		ret_added->servers[i].moves = 0;
	return data_added_set_valid(ret_added) ? 0 : error_origin(-EPROTO);
}

/* -- Tensors ------------------------------------------------------------------------------------------------------ */

static uint64_t key_hash(uint64_t key)
{
	return map_hash(&key, sizeof(key));
}

static int known_reserve(struct ledger *ledger)
{
	size_t capacity = MAX(2 * ledger->tensors.capacity, (size_t)64);
	struct ledger_known **grown;

	if (ledger->tensors.n < ledger->tensors.capacity)
		return 0;
	grown = reallocarray(ledger->tensors.known, capacity, sizeof(*grown));
	if (!grown)
		return error_origin(-ENOMEM);
	ledger->tensors.known = grown;
	ledger->tensors.capacity = capacity;
	return 0;
}

static int known_add(struct ledger *ledger, struct ledger_known *known)
{
	int r = known_reserve(ledger);

	if (!r)
		r = map_add(&ledger->tensors.names, map_hash_string(known->name), &known->entry);
	if (r)
		return error_origin(-ENOMEM);
	if (map_add(&ledger->tensors.keys, key_hash(known->key), &known->by_key)) {
		map_remove(&ledger->tensors.names, &known->entry);
		return error_origin(-ENOMEM);
	}
	known->index = ledger->tensors.n;
	ledger->tensors.known[ledger->tensors.n++] = known;
	return 0;
}

static void known_spare(struct ledger *ledger, struct ledger_known *known)
{
	known->next_spare = ledger->tensors.spare;
	ledger->tensors.spare = known;
}

static void known_remove(struct ledger *ledger, struct ledger_known *known)
{
	struct ledger_known *last = ledger->tensors.known[--ledger->tensors.n];

	map_remove(&ledger->tensors.names, &known->entry);
	map_remove(&ledger->tensors.keys, &known->by_key);
	last->index = known->index;
	ledger->tensors.known[last->index] = last;
	known_spare(ledger, known);
}

/* One with a place of its own, which nobody has. */
static int known_take(struct ledger *ledger, struct ledger_known **ret_known)
{
	struct ledger_known *known = ledger->tensors.spare;

	if (known) {
		ledger->tensors.spare = known->next_spare;
		*known = (struct ledger_known){ .place = known->place };
		*ret_known = known;
		return 0;
	}
	if (ledger->tensors.n_places == ledger->n_tensors)
		return error_origin(-EDQUOT);
	if (quota_charge(ledger->quota, LEDGER_KNOWN_BYTES))
		return error_origin(-EDQUOT);
	known = calloc(1, sizeof(*known));
	if (!known) {
		quota_release(ledger->quota, LEDGER_KNOWN_BYTES);
		return error_origin(-ENOMEM);
	}
	ledger->charged += LEDGER_KNOWN_BYTES;
	known->place = ledger->tensors.n_places++;
	*ret_known = known;
	return 0;
}

static struct ledger_known *known_find(const struct ledger *ledger, const char *name)
{
	struct map_entry *entry = map_find(&ledger->tensors.names, map_hash_string(name));

	for (; entry; entry = map_find_next(entry)) {
		struct ledger_known *known = container_of(entry, struct ledger_known, entry);

		if (!strcmp(known->name, name))
			return known;
	}
	return NULL;
}

const struct ledger_known *ledger_tensor_find(const struct ledger *ledger, const char *name)
{
	return known_find(ledger, name);
}

const struct ledger_known *ledger_tensor_at(const struct ledger *ledger, size_t index)
{
	return index < ledger->tensors.n ? ledger->tensors.known[index] : NULL;
}

static const struct ledger_known *known_of_key(const struct ledger *ledger, uint64_t key)
{
	struct map_entry *entry = map_find(&ledger->tensors.keys, key_hash(key));

	for (; entry; entry = map_find_next(entry)) {
		const struct ledger_known *known = container_of(entry, struct ledger_known, by_key);

		if (known->key == key)
			return known;
	}
	return NULL;
}

bool ledger_tensor_has(const struct ledger *ledger, uint64_t key)
{
	return known_of_key(ledger, key);
}

static void set_state(const struct ledger *ledger, const struct ledger_known *known,
		      enum ledger_state state)
{
	atomic_store_explicit(&tensor_of(ledger, known->place)->state, state, memory_order_release);
	ledger_fence();
}

static void set_last_key(struct ledger *ledger, uint64_t key)
{
	if (key > ledger_last_key(ledger))
		atomic_store_explicit(&ledger_header(ledger)->last_key, key, memory_order_release);
}

static int tensor_add(struct ledger *ledger, const struct ledger_known *what)
{
	struct ledger_known *known = NULL;
	struct ledger_tensor *tensor;
	int r;

	r = known_take(ledger, &known);
	if (r)
		return error_trace(r);
	memcpy(known->name, what->name, sizeof(known->name));
	known->dtype = what->dtype;
	known->elements = what->elements;
	known->key = what->key;
	known->start = what->start;
	r = known_add(ledger, known);
	if (r) {
		known_spare(ledger, known);
		return error_trace(r);
	}
	tensor = tensor_of(ledger, known->place);
	tensor->dtype = known->dtype;
	tensor->elements = known->elements;
	tensor->key = known->key;
	tensor->start = known->start;
	memcpy(tensor->name, known->name, sizeof(tensor->name));
	set_state(ledger, known, LEDGER_WHOLE);
	atomic_store_explicit(&ledger_header(ledger)->tensors_used, ledger->tensors.n_places,
			      memory_order_release);
	ledger_fence();
	FAILPOINT("ledger-tensor-kept");
	return 0;
}

int ledger_tensor_add(struct ledger *ledger, const char *name, unsigned dtype, uint64_t elements,
		      uint64_t key, uint64_t start)
{
	struct ledger_known what = {
		.dtype = dtype, .elements = elements, .key = key, .start = start
	};
	int r;

	if (ledger_tensor_find(ledger, name)) {
		ledger_tensor_doubt(ledger, name, false);
		return 0;
	}
	memcpy(what.name, name, strnlen(name, TENSOR_NAME_MAX));
	set_last_key(ledger, key);
	r = tensor_add(ledger, &what);
	if (r)
		atomic_store_explicit(&ledger_header(ledger)->tensors_missing, 1,
				      memory_order_release);
	return r;
}

bool ledger_knows_all(const struct ledger *ledger)
{
	return !atomic_load_explicit(&ledger_header(ledger)->tensors_missing, memory_order_relaxed);
}

void ledger_tensor_doubt(struct ledger *ledger, const char *name, bool in_doubt)
{
	struct ledger_known *known = known_find(ledger, name);

	if (!known || known->in_doubt == in_doubt)
		return;
	known->in_doubt = in_doubt;
	set_state(ledger, known, in_doubt ? LEDGER_IN_DOUBT : LEDGER_WHOLE);
}

void ledger_tensor_remove(struct ledger *ledger, const char *name)
{
	struct ledger_known *known = known_find(ledger, name);

	if (!known)
		return;
	set_state(ledger, known, LEDGER_EMPTY);
	known_remove(ledger, known);
}

uint64_t ledger_last_key(const struct ledger *ledger)
{
	return atomic_load_explicit(&ledger_header(ledger)->last_key, memory_order_relaxed);
}

static bool tensor_valid(const struct ledger_tensor *tensor)
{
	return tensor->name[0] && memchr(tensor->name, 0, sizeof(tensor->name)) &&
	       dtype_size(tensor->dtype) && tensor->key;
}

static int read_tensor(struct ledger *ledger, uint32_t place, struct failure *failure)
{
	struct ledger_known *known;
	struct ledger_tensor copy;
	uint32_t state;
	int r;

	r = ledger_copy(ledger, tensor_of(ledger, place), &copy, sizeof(copy), failure);
	if (r)
		return r;
	state = atomic_load_explicit(&copy.state, memory_order_relaxed);
	known = calloc(1, sizeof(*known));
	if (!known)
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	known->place = place;
	if (state == LEDGER_EMPTY) {
		known_spare(ledger, known);
		return 0;
	}
	if (state > LEDGER_IN_DOUBT || !tensor_valid(&copy) ||
	    ledger_tensor_find(ledger, copy.name)) {
		free(known);
		return failure_set(failure, -EPROTO, "the ledger is damaged: tensor %u", place);
	}
	memcpy(known->name, copy.name, sizeof(known->name));
	known->dtype = copy.dtype;
	known->elements = copy.elements;
	known->key = copy.key;
	known->start = copy.start;
	known->in_doubt = state == LEDGER_IN_DOUBT;
	set_last_key(ledger, copy.key);
	if (!known_add(ledger, known))
		return 0;
	free(known);
	return failure_set(failure, -ENOMEM, "out of memory for a ledger");
}

static int read_tensors(struct ledger *ledger, uint32_t max, struct failure *failure)
{
	uint32_t n =
		atomic_load_explicit(&ledger_header(ledger)->tensors_used, memory_order_acquire);
	int r = 0;

	if (n > ledger->n_tensors)
		return failure_set(failure, -EPROTO, "the ledger is damaged: %u tensors", n);
	if (n > max)
		return failure_set(
			failure, -EPROTO,
			"the ledger has room for %u tensors in use, and max_tensors is %u", n, max);
	ledger->tensors.n_places = n;
	for (uint32_t i = 0; i < n && !r; i++)
		r = read_tensor(ledger, i, failure);
	return r;
}

/* -- Retained results --------------------------------------------------------------------------------------------- */

int ledger_results_init(struct ledger *ledger)
{
	if (!ledger->n_results)
		return 0;
	ledger->kept = calloc(ledger->n_results, sizeof(ledger->kept[0]));
	ledger->results.free = malloc(ledger->n_results * sizeof(ledger->results.free[0]));
	ledger->results.returned = malloc(ledger->n_results * sizeof(ledger->results.returned[0]));
	if (!ledger->kept || !ledger->results.free || !ledger->results.returned)
		return error_origin(-ENOMEM);
	ledger->results.n_allowed = ledger_results_first(ledger);
	return 0;
}

uint64_t ledger_results_done(struct ledger *ledger)
{
	uint64_t charged = ledger->results.n_charged
				   ? ledger->results.n_charged * ledger_result_stride(ledger)
				   : 0;

	free(ledger->kept);
	free(ledger->results.free);
	free(ledger->results.returned);
	free(ledger->stale_results.left);
	map_done(&ledger->parts);
	map_done(&ledger->tensors.names);
	map_done(&ledger->tensors.keys);
	while (ledger->tensors.n)
		known_spare(ledger, ledger->tensors.known[--ledger->tensors.n]);
	free(ledger->tensors.known);
	for (struct ledger_known *known; (known = ledger->tensors.spare);) {
		ledger->tensors.spare = known->next_spare;
		free(known);
	}
	return charged;
}

static char *whole_of(const struct ledger *ledger, uint32_t result)
{
	return (char *)ledger->memory->data +
	       ledger_data_offset(ledger->n_journals, ledger->n_tensors, ledger->n_results) +
	       result * ledger_result_stride(ledger);
}

void *ledger_result_data(const struct ledger *ledger, uint32_t result, uint32_t len)
{
	if (!ledger_is_small(len, ledger->part_bytes, ledger->result_bytes))
		return whole_of(ledger, result);
	return (char *)ledger->memory->data +
	       ledger_small_offset(ledger->n_journals, ledger->n_tensors, ledger->n_results) +
	       (uint64_t)result * LEDGER_SMALL_BYTES;
}

void *ledger_result_late(const struct ledger *ledger, uint32_t result)
{
	return whole_of(ledger, result) + ledger->result_bytes - ledger->part_bytes;
}

void ledger_result_used(struct ledger *ledger, uint32_t result)
{
	atomic_store_explicit(&result_of(ledger, result)->late, 0, memory_order_release);
	ledger->kept[result].late = false;
}

/* -- By part ------------------------------------------------------------------------------------------------------ */

static uint64_t part_hash(const struct ledger_what *what)
{
	const uint64_t words[2] = { what->key, (uint64_t)what->block << 32 | what->part };

	return map_hash(words, sizeof(words));
}

int ledger_result_index(struct ledger *ledger, uint32_t result)
{
	struct ledger_kept *kept = &ledger->kept[result];

	if (kept->indexed)
		return 0;
	if (map_add(&ledger->parts, part_hash(&kept->what), &kept->by_part))
		return error_origin(-ENOMEM);
	kept->indexed = true;
	return 0;
}

void ledger_result_unindex(struct ledger *ledger, uint32_t result)
{
	struct ledger_kept *kept = &ledger->kept[result];

	if (kept->indexed)
		map_remove(&ledger->parts, &kept->by_part);
	kept->indexed = false;
}

struct ledger_kept *ledger_result_next(const struct ledger *ledger, const struct ledger_what *what,
				       struct ledger_kept *kept)
{
	struct map_entry *entry =
		kept ? map_find_next(&kept->by_part) : map_find(&ledger->parts, part_hash(what));

	for (; entry; entry = map_find_next(entry)) {
		struct ledger_kept *found = container_of(entry, struct ledger_kept, by_part);

		if (found->what.key == what->key && found->what.block == what->block &&
		    found->what.part == what->part)
			return found;
	}
	return NULL;
}

uint32_t ledger_result_number(const struct ledger *ledger, const struct ledger_kept *kept)
{
	return (uint32_t)(kept - ledger->kept);
}

bool ledger_results_full(struct ledger *ledger)
{
	return ledger->parts.n_entries >= ledger_results_allowed(ledger);
}

struct ledger_kept *ledger_result_kept(const struct ledger *ledger, uint32_t result)
{
	return &ledger->kept[result];
}

uint32_t ledger_results_used(struct ledger *ledger)
{
	uint32_t n;

	latch_take(&ledger->results.latch);
	n = ledger->results.used;
	latch_drop(&ledger->results.latch);
	return n;
}

void ledger_result_whole(struct ledger *ledger, uint32_t number)
{
	struct ledger_result *result = result_of(ledger, number);
	const struct ledger_what *what = &ledger->kept[number].what;

	result->stripe = what->stripe;
	result->has_data = what->has_data;
	atomic_store_explicit(&result->late, ledger->kept[number].late, memory_order_relaxed);
	result->key = what->key;
	result->round = what->round;
	result->block = what->block;
	result->part = what->part;
	result->len = what->len;
	result->root = what->root;
	result->n_gone = what->n_gone;
	result->offset = what->offset;
	result->total = what->total;
	result->dtype = what->dtype;
	result->operation = what->operation;
	result->reduction = what->reduction;
	FAILPOINT("ledger-cell-half");
	atomic_store_explicit(&result->state, LEDGER_WHOLE, memory_order_release);
	/* No output is touched before it. */
	ledger_fence();
	ledger->kept[number].whole = true;
	FAILPOINT("ledger-cell-whole");
}

void ledger_result_free(struct ledger *ledger, uint32_t number)
{
	struct ledger_kept *kept = &ledger->kept[number];

	ledger_stale_end(ledger, kept);
	ledger_result_unindex(ledger, number);
	if (kept->whole) {
		atomic_store_explicit(&result_of(ledger, number)->state, LEDGER_EMPTY,
				      memory_order_release);
		/* Before its memory is another result's. */
		ledger_fence();
		FAILPOINT("ledger-cell-freed");
	}
	kept->what = (struct ledger_what){ 0 };
	kept->taken = kept->whole = kept->late = false;
	kept->busy = kept->released = kept->pending = false;
	if (!kept->offered && !kept->in_place)
		ledger_result_put_back(ledger, number);
}

static bool result_valid(const struct ledger *ledger, const struct ledger_result *result)
{
	return result->key && result->round && result->len <= ledger->part_bytes &&
	       result->offset <= result->total && result->len <= result->total - result->offset &&
	       result->dtype <= DTYPE_MAX_ && result->operation &&
	       result->operation <= OPERATION_MAX_ &&
	       data_reduction(result->reduction) <= REDUCTION_MAX_ &&
	       result->root < JOB_RANKS_MAX && (result->n_gone & ~LEDGER_WAITING) < ledger->size &&
	       result->has_data <= 1 &&
	       atomic_load_explicit(&result->late, memory_order_relaxed) <= 1;
}

static int read_result(struct ledger *ledger, uint32_t number, struct failure *failure)
{
	struct ledger_kept *kept = &ledger->kept[number];
	struct ledger_result copy;
	int r;

	r = ledger_copy(ledger, result_of(ledger, number), &copy, sizeof(copy), failure);
	if (r)
		return r;
	if (atomic_load_explicit(&copy.state, memory_order_relaxed) == LEDGER_EMPTY) {
		ledger->results.free[ledger->results.n_free++] = number;
		return 0;
	}
	if (!result_valid(ledger, &copy))
		return failure_set(failure, -EPROTO, "the ledger is damaged: result %u", number);
	kept->what = (struct ledger_what){
		.key = copy.key,
		.round = copy.round,
		.offset = copy.offset,
		.total = copy.total,
		.block = copy.block,
		.part = copy.part,
		.len = copy.len,
		.root = copy.root,
		.n_gone = copy.n_gone,
		.stripe = copy.stripe,
		.dtype = copy.dtype,
		.operation = copy.operation,
		.reduction = copy.reduction,
		.has_data = copy.has_data,
	};
	kept->taken = kept->whole = true;
	ledger_stale_add(ledger, number);
	kept->late = atomic_load_explicit(&copy.late, memory_order_relaxed);
	if ((kept->late || kept->what.operation == OPERATION_ACCUMULATE) &&
	    ledger_result_index(ledger, number))
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	return 0;
}

int ledger_results_open(struct ledger *ledger, uint32_t max_tensors, struct failure *failure)
{
	uint32_t n, twice;
	int r;

	if (!ledger->n_results)
		return 0;
	if (ledger_results_init(ledger))
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	n = atomic_load_explicit(&ledger_header(ledger)->results_used, memory_order_acquire);
	if (n > ledger->n_results)
		return failure_set(failure, -EPROTO, "the ledger is damaged: %u of %u results", n,
				   ledger->n_results);
	ledger->results.used = n;
	if (ledger_stale_init(ledger, n))
		return failure_set(failure, -ENOMEM, "out of memory for a ledger");
	for (uint32_t i = n; i--;) {
		r = read_result(ledger, i, failure);
		if (r)
			return r;
	}
	twice = ledger_stale_sort(ledger);
	if (twice != LEDGER_NO_RESULT)
		return failure_set(failure, -EPROTO, "the ledger is damaged: result %u", twice);
	/* Ranks are charged for results that are retained. Other memory may be there from before. */
	ledger->results.n_peak = n - ledger->results.n_free;
	ledger->results.n_allowed = MAX(ledger->results.n_allowed, ledger->results.n_peak);
	ledger_results_return(ledger);
	return read_tensors(ledger, max_tensors, failure);
}
