/*
 * Tensors by name: declared once for all who ask, declared again to the next daemon and for the
 * next run, and the record of which recent rounds have failed. submit.c checks a tensor,
 * request.c reports how its rounds end.
 */
#include "client.h"
#include "proto/text.h"
#include <stdio.h>

#define NAME_RESERVED "bps:" /* names of tensors that the library itself declares */

static int tensor_check_name(const char *name)
{
	size_t len = name ? strlen(name) : 0;

	if (!len || len > TENSOR_NAME_MAX)
		return error_set(-EINVAL, "a tensor's name has %zu bytes: 1 to %u", len,
				 TENSOR_NAME_MAX);
	if (!text_is_plain(name, len))
		return error_set(-EINVAL,
				 "a tensor's name is UTF-8 of printable characters, without "
				 "any that control, turn or hide text");
	return 0;
}

/* FNV-1a: short names, no adversary but the trainer itself. */
static size_t tensor_bucket(const char *name)
{
	uint32_t hash = 2166136261u;

	for (; *name; name++)
		hash = (hash ^ (unsigned char)*name) * 16777619u;
	return hash % CLIENT_NAME_BUCKETS;
}

static struct bps_tensor *tensor_find(struct bps_client *client, const char *name)
{
	struct bps_tensor *tensor;

	LIST_FOREACH(tensor, &client->tensors[tensor_bucket(name)], link)
	if (!strcmp(tensor->name, name))
		return tensor;
	return NULL;
}

static struct bps_tensor *tensor_free(struct bps_tensor *tensor)
{
	if (!tensor)
		return NULL;
	call_forget(tensor->client, &tensor->declare);
	if (tensor->client->requests.submitted == tensor)
		tensor->client->requests.submitted = NULL;
	client_unref(tensor->client);
	free(tensor->name);
	free(tensor->shape);
	free(tensor);
	return NULL;
}
DEFINE_CLEANUP(struct bps_tensor *, tensor_free)

/* The caller has another reference to the client. */
void tensor_put(struct bps_tensor *tensor)
{
	if (!--tensor->refs)
		tensor_free(tensor);
}

/* -- Names that are forgotten -------------------------------------------------------------------------------------- */

struct tensor_release {
	struct client_call call;
	struct bps_tensor *tensor;
};

static void tensor_take_back(struct bps_tensor *tensor)
{
	struct tensor_release *release = TAKE_PTR(tensor->release);

	if (!release)
		return;
	call_forget(tensor->client, &release->call);
	free(release);
}

static void tensor_remove(struct bps_tensor *tensor)
{
	LIST_REMOVE(tensor, link);
	call_forget(tensor->client, &tensor->declare);
	tensor_take_back(tensor);
	tensor_put(tensor);
}

/* No rank uses it, or it stays. */
static void tensor_released(_unused_ struct bps_client *client, struct client_call *call)
{
	struct bps_tensor *tensor = container_of(call, struct tensor_release, call)->tensor;

	if (call->status)
		tensor_take_back(tensor);
	else
		tensor_remove(tensor);
}

void tensor_unused(struct bps_client *client, const char *name, uint32_t number)
{
	struct bps_tensor *tensor = tensor_find(client, name);
	struct tensor_release *release;

	if (!tensor || tensor->number != number || tensor->release)
		return;
	/* The table's reference is the only one: nobody holds it, and no request is under way. */
	release = tensor->refs == 1 ? calloc(1, sizeof(*release)) : NULL;
	if (release) {
		release->tensor = tensor;
		release->call.answered = tensor_released;
		tensor->release = release;
	}
	/* A failure is the client's, which all hear of. */
	if (call_release(client, release ? &release->call : NULL, number, !release))
		tensor_take_back(tensor);
}

/* It is being released and named again: it stays if it is not gone yet. */
static int tensor_settle_release(struct bps_client *client, struct bps_tensor *tensor)
{
	struct client_call keep = { 0 };
	int r;

	/* Through servers the last word is the home's, whose daemon may be about to restart. */
	if (MUL_OVERFLOW(client->job.params.request_timeout_ms, INT64_C(1000000),
			 &keep.timeout_ns) ||
	    ADD_OVERFLOW(keep.timeout_ns, CLIENT_ANSWER_NS, &keep.timeout_ns))
		keep.timeout_ns = CLIENT_FOREVER;
	r = call_release(client, &keep, tensor->number, true);

	tensor->refs++;
	/* The answer to the release comes first. If the daemon goes, there is none to either. */
	while (!r && tensor->release && !keep.done) {
		if (client_now_ns() >= keep.deadline_ns)
			client_fail(client, "the daemon at %s does not answer", client->path);
		else
			client_wait(client, keep.deadline_ns);
		r = client_failed(client);
	}
	call_forget(client, &keep);
	tensor_take_back(tensor);
	tensor_put(tensor);
	return r;
}

/* -- Names --------------------------------------------------------------------------------------------------------- */

static void tensor_answered(_unused_ struct bps_client *client, struct client_call *call)
{
	struct bps_tensor *tensor = container_of(call, struct bps_tensor, declare);

	tensor->refused = call->status;
	/* It was forgotten while the daemon began anew: whoever names it next makes another. */
	if (call->status == -ESTALE)
		tensor_remove(tensor);
}

/* What Declare says of the rounds up to tensor->settled. */
static uint64_t tensor_failed(const struct bps_tensor *tensor)
{
	uint64_t beyond = tensor->ended - tensor->settled;

	if (!beyond)
		return tensor->failed;
	/*
	 * What was shifted out is not known any more, and is the past of others too: it counts as
	 * failed.
	 */
	return beyond < 64 ? tensor->failed >> beyond | ~(UINT64_MAX >> beyond) : UINT64_MAX;
}

static int tensor_tell(struct bps_client *client, struct client_call *call,
		       struct bps_tensor *tensor)
{
	int r = call_declare(client, call, tensor, tensor_failed(tensor));

	tensor->packet = client->calls.n_packets;
	tensor->was_declared |= client->session.state >= SESSION_DECLARING;
	return r;
}

static int tensor_new(struct bps_client *client, const struct tensor_facts *facts,
		      struct bps_tensor **ret_tensor)
{
	_cleanup_(tensor_freep) struct bps_tensor *tensor =
		aligned_alloc(CACHE_LINE, sizeof(*tensor));
	int r;

	if (!tensor)
		return error_set(-ENOMEM, "out of memory");
	memset(tensor, 0, sizeof(*tensor));
	tensor->client = client_ref(client);
	tensor->name = strdup(facts->name);
	tensor->shape = facts->shape ? strdup(facts->shape) : NULL;
	tensor->dtype = (uint8_t)facts->dtype;
	tensor->declare.answered = tensor_answered;
	tensor->elements = facts->elements;
	tensor->run = client->job.run;
	if (!tensor->name || !tensor->shape != !facts->shape)
		return error_set(-ENOMEM, "out of memory");
	if (client->next_tensor == UINT32_MAX)
		return error_set(-EDQUOT,
				 "this client has declared too many tensors: open another");

	tensor->number = ++client->next_tensor;
	r = tensor_tell(client, &tensor->declare, tensor);
	if (r)
		return r;
	tensor->refs = 1; /* the table's */
	LIST_INSERT_HEAD(&client->tensors[tensor_bucket(facts->name)], tensor, link);
	*ret_tensor = TAKE_PTR(tensor);
	return 0;
}

/* "float32 of 6 elements", "float32 of 2x3 elements". */
static const char *facts_text(unsigned dtype, uint64_t elements, const char *shape, char *buffer,
			      size_t len)
{
	if (shape)
		(void)snprintf(buffer, len, "%s of %s elements", dtype_name(dtype), shape);
	else if (elements == ELEMENTS_VARIABLE)
		(void)snprintf(buffer, len, "%s of any number of elements", dtype_name(dtype));
	else
		(void)snprintf(buffer, len, "%s of %llu elements", dtype_name(dtype),
			       (unsigned long long)elements);
	return buffer;
}

/* Whether a tensor is what it is declared as once more. */
static int tensor_compare(const struct bps_tensor *tensor, const struct tensor_facts *facts)
{
	char before[TENSOR_SHAPE_MAX + 48], now[sizeof(before)];

	if (tensor->dtype == facts->dtype && tensor->elements == facts->elements &&
	    (!tensor->shape || !facts->shape || !strcmp(tensor->shape, facts->shape)))
		return 0;
	return error_set(
		-EEXIST, "tensor \"%s\" was declared before as %s, now as %s", facts->name,
		facts_text(tensor->dtype, tensor->elements, tensor->shape, before, sizeof(before)),
		facts_text(facts->dtype, facts->elements, facts->shape, now, sizeof(now)));
}

int tensor_get(struct bps_client *client, const struct tensor_facts *facts,
	       struct bps_tensor **ret_tensor)
{
	struct bps_tensor *tensor;
	int r = 0;

	while ((tensor = tensor_find(client, facts->name)) && tensor->release && !r)
		r = tensor_settle_release(client, tensor);
	/*
	 * A trainer may declare thousands before it waits for anything: the answers must not pile
	 * up.
	 */
	if (!tensor)
		(void)client_progress(client);
	r = r ?: client_failed(client);
	r = r ?: job_check(client);
	if (r)
		return r;

	r = tensor ? tensor_compare(tensor, facts) : tensor_new(client, facts, &tensor);
	if (r)
		return r;

	tensor->refs++;
	/* Operations on it must find it in the daemon's socket before them. */
	r = call_flush(client, tensor->packet);
	if (r) {
		tensor_put(tensor);
		return r;
	}
	*ret_tensor = tensor;
	return 0;
}

void tensor_drop_all(struct bps_client *client)
{
	struct bps_tensor *tensor;

	for (size_t i = 0; i < CLIENT_NAME_BUCKETS; i++) {
		while ((tensor = LIST_FIRST(&client->tensors[i])))
			tensor_remove(tensor);
	}
}

void tensor_ended(struct bps_tensor *tensor, uint64_t round, bool failed)
{
	if (round > tensor->ended) {
		uint64_t by = round - tensor->ended;

		tensor->failed = by < 64 ? tensor->failed << by : 0;
		tensor->ended = round;
	}
	if (failed && tensor->ended - round < 64)
		tensor->failed |= UINT64_C(1) << (tensor->ended - round);
}

uint64_t tensor_rounds(struct bps_client *client, const char *name)
{
	const struct bps_tensor *tensor = tensor_find(client, name);

	return tensor ? tensor->rounds : 0;
}

int tensor_declare_all(struct bps_client *client)
{
	const struct bps_request *request;
	struct bps_tensor *tensor;
	int r = 0;

	for (size_t i = 0; i < CLIENT_NAME_BUCKETS; i++)
		LIST_FOREACH(tensor, &client->tensors[i], link)
		{
			tensor->settled = tensor->rounds;
			tensor_take_back(tensor);
		}
	TAILQ_FOREACH(request, &client->requests.posted, link)
	request->tensor->settled = MIN(request->tensor->settled, request->entry.round - 1);

	for (size_t i = 0; i < CLIENT_NAME_BUCKETS; i++)
		LIST_FOREACH(tensor, &client->tensors[i], link)
		{
			/* One that was refused stays so, whatever is said of it now. */
			r = r
				    ?: tensor_tell(client,
						   tensor->refused ? NULL : &tensor->declare,
						   tensor);
		}
	return r;
}

int tensor_declare_anew(struct bps_client *client)
{
	struct bps_tensor *tensor;
	int r = 0;

	for (size_t i = 0; i < CLIENT_NAME_BUCKETS; i++)
		LIST_FOREACH(tensor, &client->tensors[i], link)
		{
			tensor->rounds = tensor->ended = tensor->failed = tensor->settled = 0;
			tensor->refused = tensor->was_declared = false;
			tensor_take_back(tensor);
			r = r ?: tensor_tell(client, &tensor->declare, tensor);
		}
	return r;
}

int tensor_check(const struct bps_tensor *tensor)
{
	const struct bps_client *client = tensor->client;
	int r;

	r = client_failed(client);
	r = r ?: job_check(client);
	if (r)
		return r;
	if (tensor->run != client->job.run)
		return error_set(-ENOTCONN,
				 "tensor \"%s\" is of a job that was left: declare it again",
				 tensor->name);
	if (tensor->refused)
		return error_set(tensor->declare.status, "%s", tensor->declare.text);
	return 0;
}

/* The shape is not looked at: it is from shape_facts(). */
static int tensor_declare(struct bps_client *client, const struct tensor_facts *facts,
			  struct bps_tensor **ret_tensor)
{
	const char *name = facts->name;
	uint64_t len;
	int r;

	r = client_check(client);
	r = r ?: tensor_check_name(name);
	if (r)
		return r;
	if (!ret_tensor)
		return error_set(-EINVAL, "ret_tensor is NULL");
	if (!strncmp(name, NAME_RESERVED, strlen(NAME_RESERVED)))
		return error_set(-EINVAL, "tensor \"%s\": names in %s are the library's own", name,
				 NAME_RESERVED);
	if (!dtype_size(facts->dtype))
		return error_set(-EINVAL, "tensor \"%s\": %d is no element type", name,
				 (int)facts->dtype);
	if (facts->elements != BPS_VARIABLE &&
	    (MUL_OVERFLOW(facts->elements, dtype_size(facts->dtype), &len) || len > INT64_MAX))
		return error_set(-EINVAL, "tensor \"%s\": %llu elements are more than there can be",
				 name, (unsigned long long)facts->elements);

	CLIENT_LOCKED(client);
	return tensor_get(client, facts, ret_tensor);
}

_public_ int bps_tensor_declare(struct bps_client *client, const char *name, int dtype,
				uint64_t elements, struct bps_tensor **ret_tensor)
{
	const struct tensor_facts facts = {
		.name = name,
		.dtype = (unsigned)dtype,
		.elements = elements,
	};

	return tensor_declare(client, &facts, ret_tensor);
}

/* The product of the dimensions, and what they are in words. */
static int shape_facts(const uint64_t *dims, unsigned n_dims, uint64_t *ret_elements,
		       char text[TENSOR_SHAPE_MAX + 1])
{
	bool has_none = false;
	uint64_t elements = 1;
	size_t len = 0;

	for (unsigned i = 0; i < n_dims; i++)
		has_none |= !dims[i];
	for (unsigned i = 0; i < n_dims && !has_none; i++)
		if (MUL_OVERFLOW(elements, dims[i], &elements) || elements == BPS_VARIABLE)
			return error_set(-EINVAL,
					 "%u dimensions are of more elements than there "
					 "can be",
					 n_dims);
	*ret_elements = has_none ? 0 : elements;
	for (unsigned i = 0; i < n_dims && len <= TENSOR_SHAPE_MAX; i++)
		len += (size_t)snprintf(text + len, TENSOR_SHAPE_MAX + 1 - len, "%s%llu",
					i ? "x" : "", (unsigned long long)dims[i]);
	if (!n_dims)
		(void)strcpy(text, "1");
	else if (len > TENSOR_SHAPE_MAX)
		(void)snprintf(text, TENSOR_SHAPE_MAX + 1, "%u dimensions, %llu", n_dims,
			       (unsigned long long)*ret_elements);
	return 0;
}

_public_ int bps_tensor_declare_shaped(struct bps_client *client, const char *name, int dtype,
				       const uint64_t *dims, unsigned n_dims,
				       struct bps_tensor **ret_tensor)
{
	char shape[TENSOR_SHAPE_MAX + 1];
	struct tensor_facts facts = { .name = name, .dtype = (unsigned)dtype, .shape = shape };
	int r;

	if (n_dims && !dims)
		return error_set(-EINVAL, "dims is NULL");
	r = shape_facts(dims, n_dims, &facts.elements, shape);
	return r ?: tensor_declare(client, &facts, ret_tensor);
}

_public_ int bps_tensor_wait(struct bps_tensor *tensor, int64_t timeout_ms)
{
	int64_t deadline_ns = client_deadline_ns(timeout_ms);
	struct bps_client *client;
	int r;

	if (!tensor)
		return error_set(-EINVAL, "the tensor is NULL");
	client = tensor->client;
	r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	tensor->refs++;
	(void)client_progress(client);
	while (!(r = tensor_check(tensor)) && !tensor->declare.done) {
		if (client_now_ns() >= deadline_ns) {
			r = error_set(-ETIMEDOUT, "tensor \"%s\" is not declared by all ranks yet",
				      tensor->name);
			break;
		}
		client_wait(client, deadline_ns);
	}
	tensor_put(tensor);
	return r;
}

_public_ void bps_tensor_free(struct bps_tensor *tensor)
{
	struct bps_client *client;

	if (!tensor || client_check(tensor->client))
		return;
	client = client_ref(tensor->client);
	client_lock(client);
	tensor_put(tensor);
	client_unlock(client);
	client_unref(client);
}
