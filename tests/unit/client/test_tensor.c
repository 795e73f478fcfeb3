/* Declarations, with the fake daemon: refused, many at once, more than the socket takes. */
#include "fake.h"

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
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT8, 6, &b), EINVAL,
		     "int8 of 5 elements");
	ASSERT_FAILS(bps_tensor_declare(client, "t", BPS_INT16, 5, &b), EINVAL, "now as int16");
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
