/*
 * A daemon that ends under its trainers, and another that comes. What the next is told, in which order, is also checked
 * by the fake: memory before Resume, nothing of the job before its answer, no entry before its tensor and its memory.
 */
#include "fake.h"

#include "client.h"
#include <poll.h>
#include <sys/wait.h>
#include <time.h>

/* A rank of a job that outlives its daemon. */
static struct bps_client *join_resumable(struct fake *fake)
{
	FAKE_SET(fake, ledger, true);
	return fake_join(fake, 0, 2);
}

static struct bps_client *open_with(struct fake *fake, int64_t restart_timeout_ms)
{
	struct bps_open_params params = {
		.size = sizeof(params),
		.socket = fake->path,
		.restart_timeout_ms = restart_timeout_ms,
	};
	struct bps_client *client;

	ASSERT_OK(bps_client_open(&params, &client));
	return client;
}

static struct bps_client *join_with(struct fake *fake, int64_t restart_timeout_ms)
{
	struct bps_client *client = open_with(fake, restart_timeout_ms);

	FAKE_SET(fake, ledger, true);
	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 2 }));
	return client;
}

static struct bps_tensor *declare(struct bps_client *client, const char *name, uint64_t elements)
{
	struct bps_tensor *tensor;

	ASSERT_OK(bps_tensor_declare(client, name, BPS_UINT8, elements, &tensor));
	return tensor;
}

static struct bps_request *submit(struct bps_tensor *tensor, void *data)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = data,
		.output = data,
	};
	struct bps_request *request;

	ASSERT_OK(bps_submit(tensor, &params, &request));
	return request;
}

static void wait_and_free(struct bps_request *request)
{
	if (bps_request_wait(request, BPS_FOREVER))
		test_fail(__FILE__, __LINE__, "wait: %s", bps_error());
	bps_request_free(request);
}

/* It is the client that has to come back, and it does so from inside its calls. */
static void await_entries(struct fake *fake, struct bps_request *under_way, unsigned n)
{
	while (told(fake)->n_entries < n)
		ASSERT_EQ(bps_request_wait(under_way, 10), -ETIMEDOUT);
}

TEST(without_a_job)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL, *other = NULL;

	ASSERT_OK(bps_memory_alloc(client, 100, &memory));
	memset(bps_memory_data(memory), 7, 100);
	ASSERT_EQ(told(fake)->hello_features,
		  CONTROL_FEATURE_RESUME | CONTROL_FEATURE_CUDA | CONTROL_FEATURE_ELASTIC |
			  CONTROL_FEATURE_ORDER | CONTROL_FEATURE_RELEASE);
	fake_restart(fake);
	ASSERT_OK(bps_memory_alloc(client, 100, &other));
	ASSERT_EQ(told(fake)->n_sessions, 2);
	ASSERT_EQ(told(fake)->n_shares, 3);
	ASSERT_EQ(told(fake)->n_resumes, 0);
	ASSERT_EQ(*(char *)bps_memory_data(memory), 7);
	fake_restart(fake);
	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 1 }));
	ASSERT_EQ(told(fake)->n_sessions, 3);
	ASSERT_EQ(told(fake)->n_shares, 5);
}

TEST(job_goes_on)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	_cleanup_(bps_tensor_freep) struct bps_tensor *a = declare(client, "a", 10);
	_cleanup_(bps_tensor_freep) struct bps_tensor *b = declare(client, "b", 10);
	struct bps_request *requests[4];
	char *data, staged[10] = "123456789";

	ASSERT_OK(bps_memory_alloc(client, 100, &memory));
	data = bps_memory_data(memory);
	memset(data, 'a', 100);
	FAKE_SET(fake, hold, true);
	requests[0] = submit(a, data);
	requests[1] = submit(a, data + 10);
	requests[2] = submit(b, data + 20);
	requests[3] = submit(a, staged);
	fake_await(fake, &fake->told.n_entries, 4);
	fake_complete(fake, 0, 0, NULL);
	wait_and_free(requests[0]);

	fake_restart(fake);
	await_entries(fake, requests[1], 7);
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_EQ(told(fake)->resumed_job, 1);
	ASSERT_EQ(told(fake)->rounds[1], 1);
	ASSERT_EQ(told(fake)->failed[1], 0);
	ASSERT_EQ(told(fake)->rounds[2], 0);
	/* In the order of before, by the rounds of before, for the same memory. */
	ASSERT_EQ(fake->held[4].round, 2);
	ASSERT_EQ(fake->held[4].tensor, 1);
	ASSERT_EQ(fake->held[4].input_offset, 10);
	ASSERT_EQ(fake->held[5].round, 1);
	ASSERT_EQ(fake->held[5].tensor, 2);
	ASSERT_EQ(fake->held[6].round, 3);
	for (unsigned i = 4; i < 7; i++)
		fake_complete(fake, i, 0, NULL);
	for (unsigned i = 1; i < 4; i++)
		wait_and_free(requests[i]);
	ASSERT_MEM(data,
		   "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
		   "aaaa",
		   34);
	ASSERT_MEM(staged, "23456789:\1", 10);

	/* And on: a new round, of the next number. */
	FAKE_SET(fake, hold, false);
	wait_and_free(submit(a, data));
	ASSERT_EQ(told(fake)->entry.round, 4);
}

TEST(what_was_done_stays_done)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 4);
	struct bps_request *requests[3];
	char data[3][4] = { "abc", "abc", "abc" };

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < 3; i++)
		requests[i] = submit(tensor, data[i]);
	fake_await(fake, &fake->told.n_entries, 3);
	/* One that it told nobody of, and one that it did not even count. */
	fake_complete(fake, 0, 0, NULL);
	fake_complete_uncounted(fake, 1);
	fake_hide(fake);
	fake_restart(fake);
	wait_and_free(requests[0]);
	wait_and_free(requests[1]);
	ASSERT_MEM(data[1], "bcd\1", 4);
	FAKE_SET(fake, hold, false);
	fake_show(fake);
	wait_and_free(requests[2]);
	ASSERT_EQ(told(fake)->rounds[1], 2);
	ASSERT_EQ(told(fake)->n_entries, 4);
}

TEST(failed_rounds_are_named)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 1);
	struct bps_request *requests[70];
	char data[70] = { 0 };

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < 70; i++)
		requests[i] = submit(tensor, data + i);
	fake_await(fake, &fake->told.n_entries, 70);
	/* Rounds 2 to 4 and 67 fail, 69 is cancelled out of turn, 68 and 70 stay under way. */
	for (unsigned i = 0; i < 67; i++)
		fake_complete(fake, i, (i >= 1 && i <= 3) || i == 66 ? -ETIME : 0, "late");
	for (unsigned i = 0; i < 67; i++)
		ASSERT_EQ(bps_request_wait(requests[i], BPS_FOREVER),
			  (i >= 1 && i <= 3) || i == 66 ? -ETIME : 0);
	ASSERT_OK(bps_request_cancel(requests[68]));
	ASSERT_EQ(bps_request_wait(requests[68], BPS_FOREVER), -ECANCELED);

	FAKE_SET(fake, hold, false);
	fake_restart(fake);
	ASSERT_OK(bps_request_wait(requests[67], BPS_FOREVER));
	ASSERT_OK(bps_request_wait(requests[69], BPS_FOREVER));
	ASSERT_EQ(told(fake)->n_entries, 72);
	ASSERT_EQ(told(fake)->entry.round, 70);
	ASSERT_EQ(told(fake)->rounds[1], 67);
	/* 67; 5 and 4 are too old to be known beside 69, and count as failed. */
	ASSERT_EQ(told(fake)->failed[1], 1 | UINT64_C(3) << 62);

	/* The gap is behind: all rounds have ended. */
	fake_restart(fake);
	wait_and_free(submit(tensor, data));
	ASSERT_EQ(told(fake)->rounds[1], 70);
	ASSERT_EQ(told(fake)->failed[1], 1 << 1 | 1 << 3);
	for (unsigned i = 0; i < 70; i++)
		bps_request_free(requests[i]);
}

TEST(meanwhile)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 4);
	_cleanup_(bps_tensor_freep) struct bps_tensor *other = NULL;
	struct bps_request *requests[3], *freed;
	char data[3][4] = { "abc", "abc", "abc" };

	ASSERT_OK(bps_memory_alloc(client, 1, &memory));
	/* The staging area exists already: nothing more has to be asked for. */
	wait_and_free(submit(tensor, data[0]));
	memcpy(data[0], "abc", 4);
	fake_hide(fake);
	fake_restart(fake);
	for (unsigned i = 0; i < 3; i++)
		requests[i] = submit(tensor, data[i]);
	other = declare(client, "other", 4);
	freed = submit(other, data[0]);
	bps_request_free(freed);
	ASSERT_OK(bps_request_cancel(requests[1]));
	ASSERT_EQ(bps_request_poll(requests[0]), 0);
	ASSERT_EQ(bps_request_wait(requests[0], 30), -ETIMEDOUT);
	ASSERT_EQ(bps_tensor_wait(other, 30), -ETIMEDOUT);
	ASSERT_EQ(bps_client_rank(client), 0);
	ASSERT_OK(bps_client_dispatch(client));
	/* Is not shared again. */
	bps_memory_free(TAKE_PTR(memory));

	FAKE_SET(fake, hold, true);
	fake_show(fake);
	ASSERT_EQ(bps_request_wait(requests[1], BPS_FOREVER), -ECANCELED);
	ASSERT_EQ(told(fake)->n_entries, 5);
	ASSERT_EQ(told(fake)->n_cancels, 1);
	for (unsigned i = 1; i < 5; i++)
		if (i != 2)
			fake_complete(fake, i, 0, NULL);
	ASSERT_OK(bps_request_wait(requests[0], BPS_FOREVER));
	ASSERT_OK(bps_request_wait(requests[2], BPS_FOREVER));
	ASSERT_OK(bps_tensor_wait(other, BPS_FOREVER));
	ASSERT_EQ(told(fake)->n_shares, 3);
	ASSERT_EQ(told(fake)->n_unshares, 0);
	for (unsigned i = 0; i < 3; i++)
		bps_request_free(requests[i]);
}

TEST(by_descriptor)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 4);
	struct pollfd readable = { .fd = bps_client_fd(client), .events = POLLIN };
	struct bps_request *request;
	unsigned n_dispatches = 0;
	char data[4] = "abc";

	FAKE_SET(fake, hold, true);
	request = submit(tensor, data);
	fake_await(fake, &fake->told.n_entries, 1);
	FAKE_SET(fake, hold, false);
	fake_hide(fake);
	fake_restart(fake);
	for (unsigned i = 0; i < 40; i++) {
		ASSERT_EQ(poll(&readable, 1, 10000), 1);
		ASSERT_OK(bps_client_dispatch(client));
		ASSERT_EQ(bps_client_fd(client), readable.fd);
	}
	fake_show(fake);
	while (!bps_request_poll(request)) {
		ASSERT_EQ(poll(&readable, 1, 10000), 1);
		ASSERT_OK(bps_client_dispatch(client));
		n_dispatches++;
	}
	ASSERT_TRUE(n_dispatches < 100);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(poll(&readable, 1, 0), 0);
	wait_and_free(request);
}

TEST(nothing_spins)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct pollfd readable = { .fd = bps_client_fd(client), .events = POLLIN };
	unsigned n = 0;
	struct timespec before, now;

	fake_hide(fake);
	fake_restart(fake);
	(void)clock_gettime(CLOCK_MONOTONIC, &before);
	do {
		if (poll(&readable, 1, 10) == 1)
			n++;
		ASSERT_OK(bps_client_dispatch(client));
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - before.tv_sec) * 1000 + (now.tv_nsec - before.tv_nsec) / 1000000 <
		 400);
	/* One in 20 ms, and those at the loss. */
	ASSERT_TRUE(n >= 1 && n <= 24);
	fake_show(fake);
}

TEST(does_not_come_back)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_with(fake, 200);
	int fd = bps_client_fd(client);
	struct pollfd readable = { .fd = fd, .events = POLLIN };
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_hide(fake);
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN,
		     "has gone, and did not come back within 200 ms");
	bps_request_free(request);
	ASSERT_FAILS(bps_barrier(client, 0, &request), ESHUTDOWN, "did not come back");
	ASSERT_EQ(bps_client_fd(client), fd);
	ASSERT_EQ(poll(&readable, 1, 0), 1);
	ASSERT_FAILS(bps_client_dispatch(client), ESHUTDOWN, "did not come back");
	ASSERT_EQ(bps_client_rank(client), 0);
	fake_show(fake);
}

TEST(comes_and_does_not_speak)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_with(fake, 200);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	FAKE_SET(fake, hello_mute, true);
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN,
		     "did not come back within 200 ms");
	bps_request_free(request);
}

TEST_FULL_TIER(comes_and_goes, "a deadline of 1 s, within which it must have tried some times")
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_with(fake, 1000);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	FAKE_SET(fake, hang_up, true);
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN,
		     "did not come back within 1 s");
	ASSERT_TRUE(told(fake)->n_sessions > 2 && told(fake)->n_sessions < 60);
	bps_request_free(request);
}

TEST(comes_and_goes_before_it_resumes)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_with(fake, 1000);
	struct bps_request *request;
	unsigned n = 0;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	FAKE_SET(fake, resume_mute, true);
	do {
		fake_restart(fake);
		ASSERT_INT(++n, <, 60);
	} while (bps_request_wait(request, 100) == -ETIMEDOUT);
	ASSERT_CONTAINS(bps_error(), "did not come back within 1 s");
	bps_request_free(request);
}

TEST(timeout_from_the_environment)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_open_params params = { .size = sizeof(params), .socket = fake->path };
	struct bps_client *client;
	struct bps_request *request;

	ASSERT_OK(setenv("BPS_RESTART_TIMEOUT", "soon", 1));
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "BPS_RESTART_TIMEOUT is \"soon\"");
	ASSERT_OK(setenv("BPS_RESTART_TIMEOUT", "150ms", 1));
	client = join_with(fake, 0);
	fake_hide(fake);
	fake_restart(fake);
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN, "within 150 ms");
	bps_request_free(request);
	bps_client_close(client);
	fake_show(fake);

	ASSERT_OK(setenv("BPS_RESTART_TIMEOUT", "0", 1));
	client = join_with(fake, 0);
	ASSERT_EQ(told(fake)->hello_features, CONTROL_FEATURE_CUDA | CONTROL_FEATURE_ELASTIC |
						      CONTROL_FEATURE_ORDER |
						      CONTROL_FEATURE_RELEASE);
	fake_restart(fake);
	ASSERT_FAILS(bps_client_leave(client), ESHUTDOWN, "has gone");
	bps_client_close(client);

	/* What the caller says counts. */
	client = join_with(fake, 30000);
	ASSERT_EQ(told(fake)->hello_features,
		  CONTROL_FEATURE_RESUME | CONTROL_FEATURE_CUDA | CONTROL_FEATURE_ELASTIC |
			  CONTROL_FEATURE_ORDER | CONTROL_FEATURE_RELEASE);
	fake_restart(fake);
	ASSERT_OK(bps_client_leave(client));
	bps_client_close(client);
}

TEST(job_that_cannot_be_resumed)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN, "has gone");
	bps_request_free(request);
	ASSERT_EQ(told(fake)->n_sessions, 1);
}

TEST(session_that_was_ended)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_die(fake, "your packets are broken");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN,
		     "has ended the session: your packets are broken");
	bps_request_free(request);
}

TEST(next_daemon_of_another_version)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = join_resumable(fake);

	FAKE_SET(fake, hello_status, -EPROTONOSUPPORT);
	FAKE_SET(fake, hello_text, "the daemon speaks 7 to 9, the library 1");
	fake_restart(fake);
	ASSERT_FAILS(bps_client_leave(client), ESHUTDOWN,
		     "the daemon speaks 7 to 9, the library 1");
	bps_client_close(client);

	FAKE_SET(fake, hello_status, 0);
	client = join_resumable(fake);
	FAKE_SET(fake, shm_version, 9);
	fake_restart(fake);
	ASSERT_FAILS(bps_client_leave(client), ESHUTDOWN, "of version 9");
	bps_client_close(client);
}

TEST(next_daemon_that_is_full_at_first)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;

	FAKE_SET(fake, hello_status, -EDQUOT);
	FAKE_SET(fake, hello_text, "too many sessions");
	fake_restart(fake);
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_EQ(bps_request_wait(request, 100), -ETIMEDOUT);
	FAKE_SET(fake, hello_status, 0);
	wait_and_free(request);
}

TEST(next_daemon_that_cannot_resume)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	FAKE_SET(fake, features, 0);
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECONNRESET,
		     "cannot go on with the job");
	bps_request_free(request);
	ASSERT_FAILS(bps_barrier(client, 0, &request), ENOTCONN, "the job is over");
	ASSERT_EQ(told(fake)->n_resumes, 0);
	/* The client is as good as new. */
	ASSERT_OK(bps_client_leave(client));
	FAKE_SET(fake, hold, false);
	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 1 }));
	ASSERT_OK(bps_barrier(client, 0, &request));
	wait_and_free(request);
}

/* It would read twice as much, and take it for numbers of the tensor's type. */
TEST(next_daemon_that_does_not_widen)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	uint16_t input[4] = { 0 };
	float output[4];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = input,
		.output = output,
		.input_dtype = BPS_BFLOAT16,
	};
	struct bps_request *request, *other;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_FLOAT32, 4, &tensor));
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_submit(tensor, &params, &request));
	fake_await(fake, &fake->told.n_entries, 1);
	/* The next one has it as it was. */
	fake_restart(fake);
	await_entries(fake, request, 2);
	ASSERT_EQ(told(fake)->entry.input_dtype, DTYPE_BFLOAT16);
	FAKE_SET(fake, features, CONTROL_FEATURE_RESUME);
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECONNRESET,
		     "takes no input of another type than its tensor's");
	bps_request_free(request);
	ASSERT_EQ(told(fake)->n_entries, 2);
	ASSERT_FAILS(bps_submit(tensor, &params, &other), ENOTCONN, "the job is over");
}

TEST(refused_resume)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 4);
	struct bps_request *request;
	char data[4] = "abc";

	FAKE_SET(fake, hold, true);
	request = submit(tensor, data);
	FAKE_SET(fake, resume_status, -ECONNRESET);
	FAKE_SET(fake, resume_text, "rank 1 did not come back within 30 s");
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECONNRESET,
		     "rank 1 did not come back");
	ASSERT_MEM(data, "abc", 4);
	bps_request_free(request);
	ASSERT_FAILS(bps_barrier(client, 0, &request), ENOTCONN, "rank 1 did not come back");
	ASSERT_FAILS(bps_tensor_wait(tensor, 0), ENOTCONN, "rank 1 did not come back");
	ASSERT_OK(bps_client_leave(client));
	ASSERT_EQ(told(fake)->n_leaves, 0);
}

static void *restart_after_join(void *data)
{
	struct fake *fake = data;

	fake_await(fake, &fake->told.n_joins, 1);
	FAKE_SET(fake, join_mute, false);
	fake_restart(fake);
	return NULL;
}

TEST(during_join)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	struct bps_join_params params = { .size = sizeof(params),
					  .job = "again",
					  .secret = "s",
					  .secret_len = 1,
					  .world_size = 2 };
	pthread_t thread;

	FAKE_SET(fake, join_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, restart_after_join, fake));
	ASSERT_OK(bps_client_join(client, &params));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_joins, 2);
	ASSERT_STR(told(fake)->join.job, "again");
	ASSERT_STR(told(fake)->join.secret, "s");
}

TEST(join_and_memory_meanwhile)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;

	FAKE_SET(fake, ledger, true);
	fake_restart(fake);
	ASSERT_OK(bps_client_dispatch(client));
	fake_restart(fake);
	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 1 }));
	fake_restart(fake);
	ASSERT_OK(bps_memory_alloc(client, 1, &memory));
	fake_await(fake, &fake->told.n_resumes, 1);
}

static void *restart_after_leave(void *data)
{
	struct fake *fake = data;

	fake_await(fake, &fake->told.n_leaves, 1);
	FAKE_SET(fake, leave_mute, false);
	fake_restart(fake);
	return NULL;
}

TEST(during_leave)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;
	pthread_t thread;

	FAKE_SET(fake, hold, true);
	FAKE_SET(fake, leave_mute, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_OK(pthread_create(&thread, NULL, restart_after_leave, fake));
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_leaves, 2);
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_EQ(bps_request_wait(request, 0), -ECANCELED);
	bps_request_free(request);
}

struct patience {
	struct fake *fake;
	struct bps_client *client;
	int64_t s; /* how long Leave is waited for after a restart */
};

static void *look_at_leave(void *data)
{
	struct patience *patience = data;
	struct fake *fake = patience->fake;
	struct timespec now;

	fake_await(fake, &fake->told.n_leaves, 1);
	fake_restart(fake);
	fake_await(fake, &fake->told.n_leaves, 2);
	(void)pthread_mutex_lock(&patience->client->mutex);
	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	patience->s = patience->client->job.leave.deadline_ns / 1000000000 - now.tv_sec;
	(void)pthread_mutex_unlock(&patience->client->mutex);
	FAKE_SET(fake, leave_mute, false);
	fake_restart(fake);
	return NULL;
}

/* The daemon answers when the other ranks have caught up. They may be computing. */
TEST(leave_waits_for_others_as_a_request_does)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct patience patience = { .fake = fake, .client = client };
	pthread_t thread;

	FAKE_SET(fake, leave_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, look_at_leave, &patience));
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_leaves, 3);
	/* The default of a request is 600 s. */
	ASSERT_INT(patience.s, >, 500);
}

TEST(during_leave_without_resume)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;
	pthread_t thread;

	FAKE_SET(fake, hold, true);
	FAKE_SET(fake, leave_mute, true);
	FAKE_SET(fake, resume_status, -ESTALE);
	FAKE_SET(fake, resume_text, "a ledger of version 2, this daemon knows 1");
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_OK(pthread_create(&thread, NULL, restart_after_leave, fake));
	ASSERT_OK(bps_client_leave(client));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_leaves, 1);
	ASSERT_FAILS(bps_request_wait(request, 0), ESTALE, "of version 2");
	bps_request_free(request);
	ASSERT_FAILS(bps_client_leave(client), ENOTCONN, "no job");
}

TEST(close_meanwhile)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client = join_resumable(fake);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_restart(fake);
	/* There is one to leave to. */
	bps_client_close(client);
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_EQ(told(fake)->n_leaves, 1);
	ASSERT_EQ(bps_request_wait(request, 0), -ECANCELED);
	bps_request_free(request);

	client = join_with(fake, 200);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_hide(fake);
	fake_restart(fake);
	/* There is none, and none comes. */
	bps_client_close(client);
	ASSERT_EQ(bps_request_wait(request, 0), -ESHUTDOWN);
	ASSERT_CONTAINS(bps_request_error(request), "did not come back");
	bps_request_free(request);
	fake_show(fake);
}

static void *restart_after_share(void *data)
{
	struct fake *fake = data;

	fake_await(fake, &fake->told.n_shares, 1);
	FAKE_SET(fake, share_mute, false);
	fake_restart(fake);
	return NULL;
}

TEST(during_share)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	pthread_t thread;

	FAKE_SET(fake, share_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, restart_after_share, fake));
	ASSERT_OK(bps_memory_alloc(client, 1, &memory));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_shares, 2);
}

TEST(next_daemon_that_refuses_memory)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;

	ASSERT_OK(bps_memory_alloc(client, 1, &memory));
	FAKE_SET(fake, share_quota, 1);
	fake_restart(fake);
	ASSERT_FAILS(bps_client_leave(client), ESHUTDOWN, "the limit of a session is reached");
}

TEST(during_declare)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *refused = NULL, *tensor = NULL;
	struct bps_request *request;
	char data[4] = "abc";

	FAKE_SET(fake, declare_status, -EINVAL);
	FAKE_SET(fake, declare_text, "rank 1 says float32");
	refused = declare(client, "refused", 4);
	ASSERT_FAILS(bps_tensor_wait(refused, BPS_FOREVER), EINVAL, "rank 1 says float32");
	FAKE_SET(fake, declare_status, 0);
	FAKE_SET(fake, declare_mute, true);
	tensor = declare(client, "t", 4);
	ASSERT_EQ(bps_tensor_wait(tensor, 10), -ETIMEDOUT);
	FAKE_SET(fake, declare_mute, false);
	fake_restart(fake);
	ASSERT_OK(bps_tensor_wait(tensor, BPS_FOREVER));
	fake_await(fake, &fake->told.n_declares, 4);
	wait_and_free(submit(tensor, data));
	ASSERT_FAILS(bps_tensor_wait(refused, 0), EINVAL, "rank 1 says float32");

	/* One that the next daemon refuses is lost by that alone. */
	FAKE_SET(fake, declare_status, -EDQUOT);
	FAKE_SET(fake, declare_text, "2 tensors are declared already");
	fake_restart(fake);
	while (!bps_tensor_wait(tensor, BPS_FOREVER))
		ASSERT_OK(bps_client_dispatch(client));
	ASSERT_FAILS(bps_tensor_wait(tensor, BPS_FOREVER), EDQUOT,
		     "2 tensors are declared already");
	ASSERT_EQ(bps_submit(tensor,
			     &(struct bps_submit_params){ .size = sizeof(struct bps_submit_params),
							  .operation = BPS_BARRIER },
			     &request),
		  -EDQUOT);
}

TEST(lost_again_on_the_way_back)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = declare(client, "t", 4);
	struct bps_request *request;
	char data[4] = "abc";

	FAKE_SET(fake, hold, true);
	request = submit(tensor, data);
	fake_await(fake, &fake->told.n_entries, 1);
	/* Before Resume is answered; before Hello is; right after all was posted. */
	FAKE_SET(fake, resume_mute, true);
	fake_restart(fake);
	ASSERT_EQ(bps_request_wait(request, 100), -ETIMEDOUT);
	FAKE_SET(fake, resume_mute, false);
	FAKE_SET(fake, hello_mute, true);
	fake_restart(fake);
	ASSERT_EQ(bps_request_wait(request, 100), -ETIMEDOUT);
	FAKE_SET(fake, hello_mute, false);
	fake_restart(fake);
	await_entries(fake, request, 2);
	FAKE_SET(fake, hold, false);
	fake_restart(fake);
	wait_and_free(request);
	ASSERT_MEM(data, "bcd\1", 4);
	ASSERT_EQ(told(fake)->entry.round, 1);
}

TEST(failed_job_stays_failed)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request, *other, *stray;
	struct bps_join_params params = { .size = sizeof(params), .world_size = 2 };

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	fake_job_failed(fake, 1, -EPIPE, "rank 1 died");
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), EPIPE, "rank 1 died");
	bps_request_free(request);
	ASSERT_FAILS(bps_barrier(client, 0, &other), ENOTCONN, "rank 1 died");
	ASSERT_EQ(told(fake)->n_resumes, 0);

	/* What is left of a job that failed is not taken into the next. */
	ASSERT_OK(bps_client_join(client, &params));
	ASSERT_OK(bps_barrier(client, 0, &stray));
	fake_job_failed(fake, told(fake)->n_joins, -EPIPE, "rank 1 died");
	while (!bps_barrier(client, 0, &other)) {
		bps_request_free(other);
		ASSERT_OK(bps_client_dispatch(client));
	}
	ASSERT_OK(bps_client_join(client, &params));
	fake_restart(fake);
	ASSERT_FAILS(bps_request_wait(stray, BPS_FOREVER), ECONNRESET, "its job was over");
	bps_request_free(stray);
	FAKE_SET(fake, hold, false);
	ASSERT_OK(bps_barrier(client, 0, &request));
	wait_and_free(request);
}

TEST(many_tensors)
{
	enum { N = 2000 };
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	static struct bps_tensor *tensors[N];
	static struct bps_request *requests[N];
	static char data[N];
	char name[32];

	for (unsigned i = 0; i < N; i++) {
		(void)snprintf(name, sizeof(name), "layer.%u.weight", i);
		tensors[i] = declare(client, name, 1);
	}
	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < N; i++)
		requests[i] = submit(tensors[i], data + i);
	fake_await(fake, &fake->told.n_entries, N);
	FAKE_SET(fake, hold, false);
	fake_restart(fake);
	for (unsigned i = 0; i < N; i++)
		wait_and_free(requests[i]);
	for (unsigned i = 0; i < N; i++) {
		ASSERT_EQ(data[i], 1);
		bps_tensor_free(tensors[i]);
	}
	ASSERT_EQ(told(fake)->n_entries, 2 * N);
}

struct worker {
	struct bps_client *client;
	unsigned number;
	pthread_t thread;
};

static void *work(void *data)
{
	struct worker *worker = data;
	struct bps_tensor *tensor;
	char name[16], value[64] = { 0 };

	(void)snprintf(name, sizeof(name), "t%u", worker->number);
	tensor = declare(worker->client, name, sizeof(value));
	for (unsigned i = 1; i <= 300; i++) {
		struct bps_request *request = submit(tensor, value);

		/* In all ways to wait. */
		while (i % 3 == worker->number % 3 && !bps_request_poll(request))
			(void)poll(NULL, 0, 1);
		wait_and_free(request);
		ASSERT_EQ((unsigned char)value[0], i % 256);
		ASSERT_EQ((unsigned char)value[63], i % 256);
	}
	bps_tensor_free(tensor);
	return NULL;
}

TEST(threads)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct worker workers[4];
	struct bps_request *request;
	unsigned n_restarts = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(workers); i++) {
		workers[i] = (struct worker){ .client = client, .number = i };
		ASSERT_OK(pthread_create(&workers[i].thread, NULL, work, &workers[i]));
	}
	/* Entries that come after a restart come from a client that is back. */
	for (unsigned n = 20; n <= 1100; n = told(fake)->n_entries + 60) {
		fake_await(fake, &fake->told.n_entries, n);
		fake_restart(fake);
		n_restarts++;
	}
	for (unsigned i = 0; i < ARRAY_SIZE(workers); i++)
		ASSERT_OK(pthread_join(workers[i].thread, NULL));
	/* The last may have come when all was done. */
	ASSERT_OK(bps_barrier(client, 0, &request));
	wait_and_free(request);
	ASSERT_EQ(told(fake)->n_resumes, n_restarts);
}

TEST(child_meanwhile)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_request *request;
	pid_t pid;
	int status;

	fake_hide(fake);
	fake_restart(fake);
	ASSERT_OK(bps_barrier(client, 0, &request));
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		ASSERT_FAILS(bps_request_wait(request, 0), EPERM, "fork");
		ASSERT_FAILS(bps_client_dispatch(client), EPERM, "fork");
		bps_request_free(request);
		bps_client_close(client);
		_exit(7);
	}
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
	fake_show(fake);
	wait_and_free(request);
}

TEST(a_name_that_is_released_comes_back_with_its_rounds)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	_cleanup_(bps_tensor_freep) struct bps_tensor *held = declare(client, "b", 10);
	struct bps_tensor *tensor = declare(client, "a", 10);
	char data[10] = "123456789";

	wait_and_free(submit(tensor, data));
	bps_tensor_free(tensor);
	fake_unused(fake, 2, "a");
	ASSERT_OK(bps_tensor_wait(held, 0));
	fake_await(fake, &fake->told.n_releases, 1);
	fake_restart(fake);
	/* The next daemon has not asked. */
	tensor = declare(client, "a", 10);
	wait_and_free(submit(tensor, data));
	ASSERT_EQ(told(fake)->n_declares, 4);
	ASSERT_EQ(told(fake)->rounds[2], 1);
	ASSERT_TRUE(told(fake)->again[2]);
	ASSERT_TRUE(told(fake)->again[1] && !told(fake)->rounds[1]);
	ASSERT_EQ(told(fake)->entry.round, 2);
	bps_tensor_free(tensor);
	tensor = declare(client, "c", 10);
	ASSERT_OK(bps_tensor_wait(tensor, BPS_FOREVER));
	bps_tensor_free(tensor);
	ASSERT_TRUE(!told(fake)->again[3]);
}
