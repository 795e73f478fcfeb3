/*
 * What a compiled program of JAX calls, with the real library and a real daemon, and with XLA
 * played by this file. Of the two ranks, rank 0 is the module's; rank 1 is driven by hand, so that
 * it comes before, after, or not at all.
 */
#include "bps.h"
#include "client/native/jax_ffi.h"
#include "daemon.h"
#include "test.h"
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

struct ffi_error *bps_jax_start(struct ffi_call_frame *frame);
struct ffi_error *bps_jax_done(struct ffi_call_frame *frame);
int bps_jax_attach(struct bps_client *client);
void bps_jax_detach(void);

#define N 1000

/* -- XLA ---------------------------------------------------------------------------------------------------------------- */

struct ffi_error {
	int code;
	char message[600];
};

struct ffi_future {
	bool complete;
	struct ffi_error *error;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t completed = PTHREAD_COND_INITIALIZER;

/* Set: what XLA does in the middle of a call of bps_done. */
static void (*interlude)(void);

static struct ffi_error *error_create(struct ffi_error_create *args)
{
	struct ffi_error *error = calloc(1, sizeof(*error));

	if (interlude)
		interlude();
	error->code = args->code;
	(void)snprintf(error->message, sizeof(error->message), "%s", args->message);
	return error;
}

static struct ffi_error *future_create(struct ffi_future_create *args)
{
	args->future = calloc(1, sizeof(*args->future));
	return NULL;
}

static void future_complete(struct ffi_future *future, struct ffi_error *error)
{
	(void)pthread_mutex_lock(&mutex);
	ASSERT_TRUE(!future->complete);
	future->complete = true;
	future->error = error;
	(void)pthread_cond_broadcast(&completed);
	(void)pthread_mutex_unlock(&mutex);
}

static struct ffi_error *future_set_available(struct ffi_future_set_available *args)
{
	future_complete(args->future, NULL);
	return NULL;
}

static struct ffi_error *future_set_error(struct ffi_future_set_error *args)
{
	future_complete(args->future, args->error);
	return NULL;
}

static const struct ffi_api api = {
	.struct_size = sizeof(api),
	.error_create = error_create,
	.future_create = future_create,
	.future_set_available = future_set_available,
	.future_set_error = future_set_error,
};

/* How the future ended; consumes it. The error is to be freed. */
static struct ffi_error *future_wait(struct ffi_future *future)
{
	struct ffi_error *error;

	(void)pthread_mutex_lock(&mutex);
	while (!future->complete)
		(void)pthread_cond_wait(&completed, &mutex);
	error = future->error;
	(void)pthread_mutex_unlock(&mutex);
	free(future);
	return error;
}

static void expect_error(struct ffi_error *error, int code, const char *words)
{
	ASSERT_TRUE(error);
	ASSERT_EQ(error->code, code);
	ASSERT_CONTAINS(error->message, words);
	free(error);
}

/* Rank 1 left: before the daemon had heard of the round, or after. Which it was is not the test's to say. */
static void expect_left(struct ffi_error *error)
{
	ASSERT_TRUE(error);
	expect_error(error, error->code == FFI_UNAVAILABLE ? FFI_UNAVAILABLE : FFI_CANCELLED,
		     "rank 1");
}

/* (token, values) -> (token, number): a sum of N floats under a name. */
static struct ffi_error *start(char *name, float *values, uint64_t *ret_number)
{
	int64_t plan[] = { BPS_PUSH_PULL, BPS_SUM, 0, 0, 0 }, dims[] = { N }, two[] = { 2 };
	struct ffi_buffer token = { .dtype = FFI_TOKEN };
	struct ffi_buffer input = { .dtype = FFI_F32, .data = values, .rank = 1, .dims = dims };
	struct ffi_buffer number = { .data = ret_number, .rank = 1, .dims = two };
	struct ffi_array array = { .dtype = FFI_S64, .size = ARRAY_SIZE(plan), .data = plan };
	struct ffi_span text = { name, strlen(name) }, names = { "names", 5 },
			plan_name = { "plan", 4 };
	struct ffi_call_frame frame = {
		.api = &api,
		.arguments = { .size = 2, .items = (void *[]){ &token, &input } },
		.results = { .size = 2, .items = (void *[]){ &token, &number } },
		.attributes = { .size = 2,
				.types = (int[]){ FFI_ATTR_STRING, FFI_ATTR_ARRAY },
				.names = (struct ffi_span *[]){ &names, &plan_name },
				.items = (void *[]){ &text, &array } },
	};

	return bps_jax_start(&frame);
}

/* number -> values */
static struct ffi_error *done(uint64_t number, float *values, int64_t n,
			      struct ffi_future **ret_future)
{
	struct ffi_buffer argument = { .data = &number };
	struct ffi_buffer result = { .dtype = FFI_F32, .data = values, .rank = 1, .dims = &n };
	struct ffi_call_frame frame = {
		.api = &api,
		.arguments = { .size = 1, .items = (void *[]){ &argument } },
		.results = { .size = 1, .items = (void *[]){ &result } },
	};
	struct ffi_error *error = bps_jax_done(&frame);

	*ret_future = frame.future;
	return error;
}

/* -- Two ranks ---------------------------------------------------------------------------------------------------------- */

struct pair {
	struct test_daemon daemon;
	struct bps_client *clients[2];
};

struct joining {
	const struct pair *pair;
	uint32_t rank;
	struct bps_client *client;
};

static void *join(void *arg)
{
	struct joining *joining = arg;
	struct bps_open_params open = { .size = sizeof(open),
					.socket = joining->pair->daemon.socket };
	struct bps_join_params params = {
		.size = sizeof(params),
		.job = "jax",
		.rank = joining->rank,
		.local_rank = joining->rank,
		.world_size = 2,
		.local_size = 2,
		.n_nodes = 1,
	};

	ASSERT_OK(bps_client_open(&open, &joining->client));
	ASSERT_OK(bps_client_join(joining->client, &params));
	return NULL;
}

static void pair_start(struct pair *pair)
{
	struct joining joining[2] = { { .pair = pair, .rank = 0 }, { .pair = pair, .rank = 1 } };
	pthread_t other;

	pair->daemon.name = "jax";
	test_daemon_start(&pair->daemon);
	ASSERT_OK(pthread_create(&other, NULL, join, &joining[1]));
	(void)join(&joining[0]);
	ASSERT_OK(pthread_join(other, NULL));
	pair->clients[0] = joining[0].client;
	pair->clients[1] = joining[1].client;
	ASSERT_OK(bps_jax_attach(pair->clients[0]));
}

static void pair_stop(struct pair *pair)
{
	bps_jax_detach();
	bps_client_close(pair->clients[0]);
	bps_client_close(pair->clients[1]);
	test_daemon_stop(&pair->daemon);
}

/* Rank 1's part of a sum, in place. */
static struct bps_request *submit(struct pair *pair, const char *name, float *values)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = values,
		.output = values,
	};
	struct bps_tensor *tensor;
	struct bps_request *request;

	ASSERT_OK(bps_tensor_declare(pair->clients[1], name, BPS_FLOAT32, N, &tensor));
	ASSERT_OK(bps_submit(tensor, &params, &request));
	bps_tensor_free(tensor);
	return request;
}

static void fill(float *values, float value)
{
	for (int i = 0; i < N; i++)
		values[i] = value;
}

static void expect_values(const float *values, float value)
{
	for (int i = 0; i < N; i++)
		ASSERT_TRUE(values[i] == value);
}

TEST(many_rounds_with_the_other_rank_before_or_after)
{
	static float mine[N], theirs[N], result[N];
	struct pair pair = {};

	pair_start(&pair);
	for (int round = 0; round < 60; round++) {
		struct bps_request *request = NULL;
		struct ffi_future *future;
		uint64_t number;

		fill(mine, (float)round);
		fill(theirs, 2);
		fill(result, -1);
		if (round % 2) {
			request = submit(&pair, "x", theirs);
			ASSERT_TRUE(!start((char[]){ "x" }, mine, &number));
			fill(mine, -2); /* XLA may write there now */
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
			ASSERT_TRUE(!done(number, result, N, &future));
		} else {
			ASSERT_TRUE(!start((char[]){ "x" }, mine, &number));
			fill(mine, -2);
			ASSERT_TRUE(!done(number, result, N, &future));
			ASSERT_TRUE(future); /* it does not wait */
			request = submit(&pair, "x", theirs);
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		}
		ASSERT_TRUE(!future || !future_wait(future));
		expect_values(result, (float)round + 2);
		bps_request_free(request);
	}
	pair_stop(&pair);
}

TEST(detaching_ends_what_is_under_way)
{
	static float mine[N], result[N];
	struct ffi_future *future, *none;
	struct pair pair = {};
	uint64_t waited_for, forgotten;

	expect_error(start((char[]){ "x" }, mine, &forgotten), FFI_FAILED_PRECONDITION, "init()");
	pair_start(&pair);
	ASSERT_EQ(bps_jax_attach(pair.clients[1]), -EISCONN);
	ASSERT_TRUE(!start((char[]){ "x" }, mine, &waited_for));
	ASSERT_TRUE(!start((char[]){ "y" }, mine, &forgotten));
	ASSERT_TRUE(!done(waited_for, result, N, &future));
	expect_error(done(forgotten, result, N - 1, &none), FFI_INVALID_ARGUMENT, "not as bps.jax");
	bps_jax_detach();
	expect_error(future_wait(future), FFI_CANCELLED, "shut down");
	expect_error(done(forgotten, result, N, &none), FFI_CANCELLED, "shut down");
	expect_error(start((char[]){ "x" }, mine, &forgotten), FFI_FAILED_PRECONDITION, "init()");
	pair_stop(&pair);
}

TEST(a_rank_that_leaves_is_named)
{
	static float mine[N], result[N];
	struct ffi_future *future;
	struct pair pair = {};
	uint64_t number;

	pair_start(&pair);
	ASSERT_TRUE(!start((char[]){ "x" }, mine, &number));
	ASSERT_TRUE(!done(number, result, N, &future));
	ASSERT_OK(bps_client_leave(pair.clients[1]));
	expect_left(future_wait(future));
	pair_stop(&pair);
}

static pthread_t detaching;
static atomic_bool detached;

static void *detach(void *unused)
{
	bps_jax_detach();
	atomic_store(&detached, true);
	return NULL;
}

static void detach_meanwhile(void)
{
	ASSERT_OK(pthread_create(&detaching, NULL, detach, NULL));
	/* Time to do what it must not: nothing tells that it does not. */
	(void)usleep(300000);
	ASSERT_TRUE(!atomic_load(&detached));
}

TEST(detaching_waits_for_who_is_inside)
{
	static float mine[N], result[N];
	struct ffi_future *future, *none;
	struct pair pair = {};
	uint64_t number, next;

	pair_start(&pair);
	ASSERT_TRUE(!start((char[]){ "x" }, mine, &number));
	ASSERT_TRUE(!start((char[]){ "y" }, mine, &next));
	ASSERT_TRUE(!done(next, result, N, &future));
	ASSERT_OK(bps_client_leave(pair.clients[1]));
	/* They end in order: the first is complete too. */
	expect_left(future_wait(future));
	interlude = detach_meanwhile;
	expect_left(done(number, result, N, &none));
	interlude = NULL;
	ASSERT_OK(pthread_join(detaching, NULL));
	pair_stop(&pair);
}

TEST(a_name_that_is_no_name)
{
	static float mine[N];
	struct pair pair = {};
	uint64_t number;

	pair_start(&pair);
	expect_error(start((char[]){ "bps:x" }, mine, &number), FFI_INVALID_ARGUMENT, "bps:");
	pair_stop(&pair);
}

TEST(the_version_is_told)
{
	struct ffi_metadata metadata = { .struct_size = sizeof(metadata), .traits = 7 };
	struct ffi_metadata_extension extension = { .base.type = FFI_EXTENSION_METADATA,
						    .metadata = &metadata };
	struct ffi_call_frame frame = { .extension_start = &extension.base };

	ASSERT_TRUE(!bps_jax_start(&frame));
	ASSERT_EQ(metadata.api_version.major, FFI_MAJOR);
	ASSERT_EQ(metadata.api_version.minor, FFI_MINOR);
	ASSERT_EQ(metadata.traits, 0);
	ASSERT_TRUE(!bps_jax_done(&frame));
}
