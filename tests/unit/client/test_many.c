/* Requests of which thousands are under way, and what is left of one for the next. */
#include "fake.h"

static struct bps_request *barrier(struct bps_client *client)
{
	struct bps_request *request;

	if (bps_barrier(client, 0, &request))
		test_fail(__FILE__, __LINE__, "barrier: %s", bps_error());
	return request;
}

TEST(outstanding_requests_have_a_limit)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	static struct bps_request *requests[SHM_SLOTS + 10];
	struct bps_request *refused;

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < SHM_SLOTS; i++)
		requests[i] = barrier(client);
	ASSERT_FAILS(bps_barrier(client, 0, &refused), EAGAIN, "4096 requests");
	fake_await(fake, &fake->told.n_entries, SHM_SLOTS);
	/* Complete is enough, by an error too: it need not be released. */
	for (unsigned i = 0; i < 10; i++) {
		int status = i % 2 ? -ETIME : 0;

		fake_complete(fake, 100 * i, status, NULL);
		requests[SHM_SLOTS + i] = barrier(client);
		ASSERT_FAILS(bps_barrier(client, 0, &refused), EAGAIN, "wait for one");
		ASSERT_EQ(bps_request_wait(requests[100 * i], 0), status);
	}
	/* Orphans are reaped. */
	bps_request_free(requests[1]);
	fake_complete(fake, 1, 0, NULL);
	requests[1] = barrier(client);
	fake_await(fake, &fake->told.n_entries, SHM_SLOTS + 11);
	fake_die(fake, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(requests); i++)
		bps_request_free(requests[i]);
}

/*
 * Completions that come in another order than submissions, few or many at once, also more than the daemon tells the order of:
 * all are seen, of requests that nobody waits for, too.
 */
static void complete_in_another_order(uint64_t features)
{
	static const unsigned bursts[] = { 1, 2, 13, 100, 1023, 1024, 1500, SHM_SLOTS };
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	static unsigned under_way[SHM_SLOTS]; /* as the fake has it */
	unsigned n_posted = 0, n_done = 0;
	struct bps_request *refused;

	FAKE_SET(fake, features, features);
	FAKE_SET(fake, hold, true);
	client = fake_join(fake, 0, 2);
	for (; n_posted < SHM_SLOTS; n_posted++) {
		bps_request_free(barrier(client));
		under_way[n_posted] = n_posted;
	}
	for (unsigned i = 0; i < ARRAY_SIZE(bursts); i++) {
		fake_await(fake, &fake->told.n_entries, n_posted);
		for (unsigned k = 0; k < bursts[i]; k++) {
			/* Prime to SHM_SLOTS: each once, and far from the one before. */
			unsigned at = 1531 * n_done++ % SHM_SLOTS;

			fake_complete(fake, under_way[at] % FAKE_HELD, 0, NULL);
			under_way[at] = n_posted + k;
		}
		if (i % 2)
			ASSERT_OK(bps_client_dispatch(client));
		for (unsigned k = 0; k < bursts[i]; k++)
			bps_request_free(barrier(client));
		ASSERT_FAILS(bps_barrier(client, 0, &refused), EAGAIN, "4096 requests");
		n_posted += bursts[i];
	}
}

TEST(completions_in_another_order)
{
	complete_in_another_order(CONTROL_FEATURE_RESUME | CONTROL_FEATURE_ORDER);
}

TEST(completions_of_a_daemon_that_does_not_tell_their_order)
{
	complete_in_another_order(CONTROL_FEATURE_RESUME);
}

/* What the order says may have been seen before, and the slot be another request's. */
TEST(order_of_what_was_seen)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *first, *second, *third;
	uint32_t slot;

	FAKE_SET(fake, hold, true);
	first = barrier(client);
	fake_await(fake, &fake->told.n_entries, 1);
	slot = told(fake)->entry.slot;
	second = barrier(client);
	fake_await(fake, &fake->told.n_entries, 2);
	fake_complete(fake, 0, 0, NULL);
	bps_request_free(first);
	third = barrier(client);
	fake_await(fake, &fake->told.n_entries, 3);
	ASSERT_EQ(told(fake)->entry.slot, slot);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(bps_request_poll(third), 0);
	ASSERT_EQ(bps_request_poll(second), 0);
	fake_complete(fake, 2, -EIO, "the third");
	fake_complete(fake, 1, 0, NULL);
	ASSERT_FAILS(bps_request_wait(third, BPS_FOREVER), EIO, "the third");
	ASSERT_OK(bps_request_wait(second, BPS_FOREVER));
	bps_request_free(second);
	bps_request_free(third);
}

/* Nonsense of the daemon's: no request ends by it, and none is lost. */
TEST(wild_order)
{
	static const uint64_t counts[] = { 1, 5, SHM_ORDER, UINT64_C(1) << 63, -UINT64_C(7) };
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	unsigned n = 0;

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < ARRAY_SIZE(counts); i++) {
		struct bps_request *a = barrier(client), *b = barrier(client);

		fake_await(fake, &fake->told.n_entries, n += 2);
		fake_scribble_order(fake, counts[i]);
		ASSERT_OK(bps_client_dispatch(client));
		ASSERT_EQ(bps_request_poll(a), 0);
		fake_complete(fake, n - 1, 0, NULL);
		ASSERT_OK(bps_request_wait(b, BPS_FOREVER));
		fake_complete(fake, n - 2, 0, NULL);
		ASSERT_OK(bps_request_wait(a, BPS_FOREVER));
		bps_request_free(a);
		bps_request_free(b);
	}
}

/*
 * Who only tries again asks the system now and then: what comes by the socket is heard, and not at every try, and not by who
 * gets on.
 */
TEST(what_is_heard_by_who_only_tries_again)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	static struct bps_request *requests[SHM_SLOTS];
	struct bps_request *refused;
	unsigned n_tries = 1;

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < SHM_SLOTS; i++)
		requests[i] = barrier(client);
	fake_await(fake, &fake->told.n_entries, SHM_SLOTS);
	for (unsigned i = 0; i < 40; i++)
		ASSERT_FAILS(bps_barrier(client, 0, &refused), EAGAIN, "4096 requests");
	fake_complete(fake, 0, 0, NULL);
	bps_request_free(requests[0]);
	requests[0] = barrier(client);
	ASSERT_FAILS(bps_barrier(client, 0, &refused), EAGAIN, "4096 requests");
	fake_job_failed(fake, 1, -ECONNRESET, "rank 1 died");
	while (bps_barrier(client, 0, &refused) == -EAGAIN)
		n_tries++;
	ASSERT_EQ(n_tries, 64);
	fake_die(fake, NULL);
	for (unsigned i = 0; i < SHM_SLOTS; i++)
		bps_request_free(requests[i]);
}

/* That the daemon has gone gives back all slots: it is no room for another request. */
TEST(who_only_tries_again_hears_that_the_daemon_has_gone)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	static struct bps_request *requests[SHM_SLOTS];
	struct bps_request *refused;
	int r;

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < SHM_SLOTS; i++)
		requests[i] = barrier(client);
	fake_await(fake, &fake->told.n_entries, SHM_SLOTS);
	fake_die(fake, NULL);
	while ((r = bps_barrier(client, 0, &refused)) == -EAGAIN) {
	}
	ASSERT_EQ(r, -ESHUTDOWN);
	for (unsigned i = 0; i < SHM_SLOTS; i++)
		bps_request_free(requests[i]);
}

/* A request that is given back is the next: nothing of what it was is in that. */
TEST(what_is_left_of_one_before)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_submit_params rows = {
		.size = sizeof(rows),
		.operation = BPS_PUSH_PULL_ROWS,
		.input_count = 4,
		.output_count = 8,
		.width = 4,
	};
	struct bps_outcome outcome = { .size = sizeof(outcome) };
	int64_t numbers[3] = { 0, 7, 7 };
	float staged[12] = { 0 };
	struct bps_tensor *tensor, *table;
	struct bps_request *request;
	uint64_t n;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_memory_alloc(client, 64, &memory));
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_FLOAT32, 4, &tensor));
	ASSERT_OK(bps_tensor_declare(client, "rows", BPS_FLOAT32, 8, &table));
	params.input = params.output = bps_memory_data(memory);
	rows.input = staged;
	rows.output = staged + 4;
	rows.input_rows = numbers;
	rows.output_rows = numbers + 1;

	/* Of rows, staged, cancelled, failed, and released before its end. */
	ASSERT_OK(bps_submit(table, &rows, &request));
	fake_await(fake, &fake->told.n_entries, 1);
	ASSERT_TRUE(told(fake)->entry.width && told(fake)->entry.output_rows_buffer);
	ASSERT_OK(bps_request_cancel(request));
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECANCELED, "cancelled");
	bps_request_free(request);
	ASSERT_OK(bps_submit(tensor, &params, &request));
	bps_request_free(request);
	fake_await(fake, &fake->told.n_entries, 2);
	fake_complete(fake, 1, -EIO, "an orphan's end");
	ASSERT_OK(bps_client_dispatch(client));

	ASSERT_OK(bps_submit(tensor, &params, &request));
	fake_await(fake, &fake->told.n_entries, 3);
	ASSERT_TRUE(!told(fake)->entry.width && !told(fake)->entry.input_rows_buffer);
	ASSERT_TRUE(!told(fake)->entry.output_rows_buffer && !told(fake)->entry.input_rows_offset);
	ASSERT_EQ(bps_request_poll(request), 0);
	ASSERT_STR(bps_request_error(request), "");
	ASSERT_FAILS(bps_request_rows(request, &n), EINVAL, "no push_pull_rows");
	ASSERT_OK(bps_request_cancel(request));
	fake_await(fake, &fake->told.n_cancels, 2);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECANCELED, "cancelled");
	bps_request_free(request);

	ASSERT_OK(bps_submit(tensor, &params, &request));
	fake_await(fake, &fake->told.n_entries, 4);
	fake_complete(fake, 3, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_STR(bps_request_error(request), "");
	ASSERT_OK(bps_request_contributions(request, &n));
	ASSERT_EQ(n, 0);
	ASSERT_OK(bps_request_outcome(request, &outcome));
	ASSERT_EQ(outcome.n_came, 2);
	bps_request_free(request);
	bps_tensor_free(tensor);
	bps_tensor_free(table);
}
