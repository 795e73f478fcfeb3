/* Declarations, with the fake daemon: refused, many at once, more than the socket takes. */
#include "fake.h"
#include <sched.h>

TEST(declare)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_tensor *a, *b, *c;

	ASSERT_OK(bps_tensor_declare(client, "layer.0", BPS_FLOAT16, 77, &a));
	ASSERT_OK(bps_tensor_wait(a, BPS_FOREVER));
	ASSERT_STR(told(fake)->name, "layer.0");
	ASSERT_EQ(told(fake)->elements, 77);
	ASSERT_OK(bps_tensor_wait(a, 0));

	/* The same again, and again after it was released: its rounds go on. */
	ASSERT_OK(bps_tensor_declare(client, "layer.0", BPS_FLOAT16, 77, &b));
	ASSERT_TRUE(a == b);
	ASSERT_OK(bps_tensor_declare(client, "other", BPS_FLOAT16, BPS_VARIABLE, &c));
	ASSERT_OK(bps_tensor_wait(c, BPS_FOREVER));
	ASSERT_TRUE(told(fake)->elements == UINT64_MAX);
	bps_tensor_free(a);
	bps_tensor_free(b);
	ASSERT_OK(bps_tensor_declare(client, "layer.0", BPS_FLOAT16, 77, &b));
	ASSERT_OK(bps_tensor_wait(b, BPS_FOREVER));
	ASSERT_EQ(told(fake)->n_declares, 2);
	bps_tensor_free(b);
	bps_tensor_free(c);
}

TEST(declare_with_dimensions)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	static const struct {
		uint64_t dims[12];
		unsigned n;
		uint64_t elements;
		const char *shape;
	} cases[] = {
		{ { 2, 3 }, 2, 6, "2x3" },
		{ { 6 }, 1, 6, "6" },
		{ { 0 }, 0, 1, "1" },
		{ { 4, 0, UINT64_MAX }, 3, 0, "4x0x18446744073709551615" },
		{ { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 7 }, 12, 7, "1x1x1x1x1x1x1x1x1x1x1x7" },
		{ { UINT64_MAX, UINT64_MAX, UINT64_MAX, 0 }, 4, 0, "4 dimensions, 0" },
	};
	struct bps_tensor *a, *b;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		char name[8] = { 't', (char)('0' + i) };

		ASSERT_OK(bps_tensor_declare_shaped(client, name, BPS_INT8, cases[i].dims,
						    cases[i].n, &a));
		ASSERT_OK(bps_tensor_wait(a, BPS_FOREVER));
		ASSERT_EQ(told(fake)->elements, cases[i].elements);
		ASSERT_STR(told(fake)->shape, cases[i].shape);
		bps_tensor_free(a);
	}
	/* One that was declared without fits all, and the other way round. */
	ASSERT_OK(bps_tensor_declare(client, "t0", BPS_INT8, 6, &a));
	ASSERT_OK(bps_tensor_declare_shaped(client, "t0", BPS_INT8, cases[0].dims, 2, &b));
	ASSERT_TRUE(a == b);
	bps_tensor_free(b);
	ASSERT_FAILS(bps_tensor_declare_shaped(client, "t0", BPS_INT8, cases[1].dims, 1, &b),
		     EEXIST, "before as int8 of 2x3 elements, now as int8 of 6 elements");
	bps_tensor_free(a);
	ASSERT_OK(bps_tensor_declare(client, "flat", BPS_INT8, 6, &a));
	ASSERT_OK(bps_tensor_declare_shaped(client, "flat", BPS_INT8, cases[0].dims, 2, &b));
	ASSERT_OK(bps_tensor_wait(b, BPS_FOREVER));
	ASSERT_STR(told(fake)->shape, "");
	bps_tensor_free(a);
	bps_tensor_free(b);
	ASSERT_FAILS(bps_tensor_declare_shaped(client, "n", BPS_INT8, NULL, 1, &a), EINVAL, "NULL");
	ASSERT_FAILS(bps_tensor_declare_shaped(client, "n", BPS_INT8,
					       (uint64_t[]){ UINT32_MAX, UINT64_MAX }, 2, &a),
		     EINVAL, "2 dimensions are of more elements");
	ASSERT_FAILS(
		bps_tensor_declare_shaped(client, "n", BPS_INT8, (uint64_t[]){ UINT64_MAX }, 1, &a),
		EINVAL, "more elements");
}

/* A tensor is expected behind the one that it followed before, also when either is gone. */
TEST(tensors_that_were_submitted_and_are_gone)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	float data[3] = { 0 };

	params.input = params.output = data;
	for (unsigned run = 0; run < 3; run++) {
		struct bps_tensor *tensors[3];
		struct bps_request *request;

		for (unsigned i = 0; i < ARRAY_SIZE(tensors); i++) {
			char name[2] = { (char)('a' + i), 0 };

			ASSERT_OK(bps_tensor_declare(client, name, BPS_FLOAT32, 3, &tensors[i]));
		}
		/* The last of a run follows the first. */
		for (unsigned i = 0; i < 7; i++) {
			ASSERT_OK(bps_submit(tensors[i % 3], &params, &request));
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
			bps_request_free(request);
		}
		for (unsigned i = 0; i < ARRAY_SIZE(tensors); i++)
			bps_tensor_free(tensors[i]);
		ASSERT_OK(bps_client_leave(client));
		ASSERT_OK(bps_client_join(client, NULL));
	}
	ASSERT_EQ(told(fake)->n_declares, 9);
}

TEST(declarations_that_do_not_fit)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	char name[TENSOR_NAME_MAX + 2] = "";
	struct bps_tensor *a, *b;

	memset(name, 'n', TENSOR_NAME_MAX + 1);
	ASSERT_FAILS(bps_tensor_declare(client, name, BPS_INT8, 1, &a), EINVAL, "256 bytes");
	ASSERT_FAILS(bps_tensor_declare(client, "", BPS_INT8, 1, &a), EINVAL, "0 bytes");
	ASSERT_FAILS(bps_tensor_declare(client, NULL, BPS_INT8, 1, &a), EINVAL, "0 bytes");
	ASSERT_FAILS(bps_tensor_declare(client, "a\nb", BPS_INT8, 1, &a), EINVAL, "control");
	ASSERT_FAILS(bps_tensor_declare(client, "\xc2\x9b", BPS_INT8, 1, &a), EINVAL, "control");
	ASSERT_FAILS(bps_tensor_declare(client, "bps:barrier", BPS_INT8, 1, &a), EINVAL, "own");
	ASSERT_FAILS(bps_tensor_declare(client, "t", 0, 1, &a), EINVAL, "0 is no element type");
	ASSERT_FAILS(bps_tensor_declare(client, "t", 11, 1, &a), EINVAL, "11 is no element type");
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT64, UINT64_MAX / 4, &a), EINVAL,
		     "more than there can be");
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT8, 1, NULL), EINVAL, "NULL");
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 5, &a));
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT8, 6, &b), EEXIST,
		     "int8 of 5 elements");
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT16, 5, &b), EEXIST, "now as int16");
	name[TENSOR_NAME_MAX] = 0;
	ASSERT_OK(bps_tensor_declare(client, name, BPS_INT8, 0, &b));
	bps_tensor_free(a);
	bps_tensor_free(b);
}

TEST(ranks_that_disagree)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_request *request, *other;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_BARRIER };

	FAKE_SET(fake, declare_mute, true);
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 5, &tensor));
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ETIMEDOUT, "not declared by all ranks");
	ASSERT_FAILS(bps_tensor_wait(tensor, 20), ETIMEDOUT, "\"t\"");
	/* What is submitted meanwhile waits for the answer too. */
	ASSERT_OK(bps_submit(tensor, &params, &request));
	fake_await(fake, &fake->told.n_entries, 1);
	fake_declared(fake, -EINVAL, "rank 0 says 5 elements, rank 1 says 6");
	ASSERT_FAILS(bps_tensor_wait(tensor, BPS_FOREVER), EINVAL, "rank 1 says 6");
	ASSERT_FAILS(bps_submit(tensor, &params, &other), EINVAL, "rank 1 says 6");
	fake_complete(fake, 0, -EINVAL, "rank 0 says 5 elements, rank 1 says 6");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), EINVAL, "rank 1 says 6");
	bps_request_free(request);
}

/* The ring is looked at before the socket. */
TEST(a_request_whose_tensor_was_refused_says_why)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_BARRIER };
	struct bps_request *polled, *waited, *dropped;

	FAKE_SET(fake, declare_mute, true);
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 5, &tensor));
	ASSERT_OK(bps_submit(tensor, &params, &polled));
	ASSERT_OK(bps_submit(tensor, &params, &waited));
	ASSERT_OK(bps_submit(tensor, &params, &dropped));
	fake_await(fake, &fake->told.n_entries, 3);
	fake_declared(fake, -EDQUOT, "tensor t: 2 tensors are declared already");
	for (unsigned i = 0; i < 3; i++)
		fake_complete(fake, i, -EINVAL, "no tensor 1 was declared");

	ASSERT_EQ(bps_request_poll(polled), 1);
	ASSERT_STR(bps_request_error(polled), "tensor t: 2 tensors are declared already");
	ASSERT_FAILS(bps_request_wait(polled, 0), EDQUOT, "2 tensors are declared already");
	ASSERT_FAILS(bps_request_wait(waited, BPS_FOREVER), EDQUOT, "2 tensors are");
	bps_request_free(polled);
	bps_request_free(waited);
	bps_request_free(dropped);
}

static void *wait_for_tensor(void *tensor)
{
	return (void *)(intptr_t)bps_tensor_wait(tensor, BPS_FOREVER);
}

TEST(many_wait_for_a_tensor)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	pthread_t threads[8];
	void *result;

	FAKE_SET(fake, declare_mute, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_INT8, 5, &tensor));
	for (unsigned i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, wait_for_tensor, tensor));
	fake_await(fake, &fake->told.n_declares, 1);
	fake_declared(fake, 0, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(threads); i++) {
		ASSERT_OK(pthread_join(threads[i], &result));
		ASSERT_EQ((intptr_t)result, 0);
	}
}

static void *hear_again(void *data)
{
	struct fake *fake = data;

	/* Long after the socket is full; whenever it is, nothing may be lost. */
	fake_await(fake, &fake->told.n_joins, 1);
	FAKE_SET(fake, deaf, false);
	return NULL;
}

/* More than a socket takes: what does not fit is queued and sent in order. */
TEST(full_socket)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_tensor *tensors[2000];
	pthread_t thread;
	char name[256];

	FAKE_SET(fake, deaf, true);
	for (unsigned i = 0; i < ARRAY_SIZE(tensors); i++) {
		(void)snprintf(name, sizeof(name), "%0200u", i);
		if (i == 100)
			ASSERT_OK(pthread_create(&thread, NULL, hear_again, fake));
		ASSERT_OK(bps_tensor_declare(client, name, BPS_INT8, i, &tensors[i]));
	}
	ASSERT_OK(pthread_join(thread, NULL));
	for (unsigned i = 0; i < ARRAY_SIZE(tensors); i++) {
		ASSERT_OK(bps_tensor_wait(tensors[i], BPS_FOREVER));
		bps_tensor_free(tensors[i]);
	}
	ASSERT_EQ(told(fake)->n_declares, ARRAY_SIZE(tensors));
	ASSERT_EQ(told(fake)->elements, ARRAY_SIZE(tensors) - 1);
}

/* -- Names that are forgotten -------------------------------------------------------------------------------------- */

static struct bps_tensor *declare(struct bps_client *client, const char *name)
{
	struct bps_tensor *tensor;

	ASSERT_OK(bps_tensor_declare(client, name, BPS_FLOAT32, 3, &tensor));
	ASSERT_OK(bps_tensor_wait(tensor, BPS_FOREVER));
	return tensor;
}

/* Asks about a tensor; the client hears of it. */
static void ask(struct fake *fake, uint32_t number, const char *name, struct bps_tensor *other)
{
	unsigned n = told(fake)->n_releases + told(fake)->n_keeps;

	fake_unused(fake, number, name);
	ASSERT_OK(bps_tensor_wait(other, 0));
	while (told(fake)->n_releases + told(fake)->n_keeps == n)
		(void)sched_yield();
}

TEST(a_name_that_nobody_holds_is_released)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *held = NULL, *again = NULL;

	bps_tensor_free(declare(client, "a"));
	held = declare(client, "b");
	ask(fake, 1, "a", held);
	ASSERT_EQ(told(fake)->n_releases, 1);
	fake_released(fake, 0);
	ASSERT_OK(bps_tensor_wait(held, 0));

	/* It is another tensor now, whatever it was. */
	ASSERT_OK(bps_tensor_declare(client, "a", BPS_INT64, 9, &again));
	ASSERT_OK(bps_tensor_wait(again, BPS_FOREVER));
	ASSERT_EQ(told(fake)->n_declares, 3);
	ASSERT_EQ(told(fake)->elements, 9);

	ask(fake, 2, "b", held);
	ASSERT_EQ(told(fake)->n_keeps, 1);
	/* Nothing is said of what is not declared, or under another number. */
	fake_unused(fake, 1, "a");
	fake_unused(fake, 9, "c");
	ask(fake, 2, "b", held);
	ASSERT_EQ(told(fake)->n_releases, 1);
	ASSERT_EQ(told(fake)->n_keeps, 2);
}

TEST(a_name_is_not_released_while_a_request_is_under_way)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	_cleanup_(bps_tensor_freep) struct bps_tensor *other = declare(client, "b");
	struct bps_tensor *tensor = declare(client, "a");
	struct bps_request *request;
	float data[3] = { 0 };

	FAKE_SET(fake, hold, true);
	params.input = params.output = data;
	ASSERT_OK(bps_submit(tensor, &params, &request));
	bps_tensor_free(tensor);
	fake_await(fake, &fake->told.n_entries, 1);
	ask(fake, 2, "a", other);
	ASSERT_EQ(told(fake)->n_keeps, 1);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	ask(fake, 2, "a", other);
	ASSERT_EQ(told(fake)->n_releases, 1);
}

TEST(a_name_that_is_used_again_is_taken_back)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *held = declare(client, "b");

	/* The other ranks have not answered yet: it is what it was. */
	bps_tensor_free(declare(client, "a"));
	ask(fake, 2, "a", held);
	bps_tensor_free(declare(client, "a"));
	ASSERT_EQ(told(fake)->n_keeps, 1);
	ASSERT_EQ(told(fake)->n_declares, 2);

	/* They have all released it: it is declared again. */
	ask(fake, 2, "a", held);
	ASSERT_EQ(told(fake)->n_releases, 2);
	fake_released(fake, 0);
	bps_tensor_free(declare(client, "a"));
	ASSERT_EQ(told(fake)->n_declares, 3);

	/* Another rank uses it: so does this one again, without a word. */
	ask(fake, 3, "a", held);
	ASSERT_EQ(told(fake)->n_releases, 3);
	fake_released(fake, -EBUSY);
	ASSERT_OK(bps_tensor_wait(held, 0));
	bps_tensor_free(declare(client, "a"));
	ASSERT_EQ(told(fake)->n_declares, 3);
}

TEST(a_job_is_left_while_a_name_is_released)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	_cleanup_(bps_tensor_freep) struct bps_tensor *held = declare(client, "b");

	bps_tensor_free(declare(client, "a"));
	ask(fake, 2, "a", held);
	ASSERT_OK(bps_client_leave(client));
	fake_released(fake, 0);
	ASSERT_OK(bps_client_join(client, NULL));
	bps_tensor_free(declare(client, "a"));
	ASSERT_EQ(told(fake)->n_declares, 3);
	ASSERT_TRUE(!told(fake)->again[3]);
}
