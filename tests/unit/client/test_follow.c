/* A rank that follows the others, with the fake daemon: what it says, what it is given, in which order, and when that ends. */
#include "fake.h"

#include "client.h"
#include <poll.h>
#include <stddef.h>

#define N_ELEMENTS 4

static struct bps_begun begun_of(const char *name, uint64_t round)
{
	struct bps_begun begun = {
		.size = sizeof(begun),
		.dtype = BPS_UINT8,
		.elements = N_ELEMENTS,
		.round = round,
		.operation = BPS_PUSH_PULL,
		.reduction = BPS_SUM,
	};

	(void)snprintf(begun.name, sizeof(begun.name), "%s", name);
	return begun;
}

/* Others have begun it, and rounds before the first have failed. */
static void begin_from(struct fake *fake, const char *name, uint64_t first, uint64_t round)
{
	struct bps_begun begun = begun_of(name, round);

	fake_begun(fake, &begun, first);
}

static void begin(struct fake *fake, const char *name, uint64_t round)
{
	begin_from(fake, name, 1, round);
}

/* All follow and are idle in the turn. */
static void end_turn(struct fake *fake, uint64_t turn)
{
	fake_all_follow(fake, turn, 0, NULL);
}

static void expect_told(struct fake *fake, bool idle, uint64_t turn)
{
	ASSERT_TRUE(told(fake)->follows);
	ASSERT_EQ(told(fake)->idle, idle);
	ASSERT_EQ(told(fake)->turn, turn);
}

/* What of it has come by now is given. */
static int try_begun(struct bps_client *client)
{
	struct bps_begun begun = { .size = sizeof(begun) };

	return bps_client_begun(client, 0, &begun);
}

static void expect_begun(struct bps_client *client, const char *name, uint64_t round)
{
	struct bps_begun begun = { .size = sizeof(begun) }, expected = begun_of(name, round);

	ASSERT_EQ(bps_client_begun(client, 0, &begun), 1);
	ASSERT_STR(begun.name, name);
	ASSERT_EQ(begun.round, round);
	ASSERT_MEM(&begun, &expected, sizeof(begun));
}

/* It has failed, and the caller is to catch up with it. */
static void expect_failed(struct bps_client *client, const char *name, uint64_t round)
{
	struct bps_begun begun = { .size = sizeof(begun) }, expected = begun_of(name, round);

	expected.operation = expected.reduction = 0;
	ASSERT_EQ(bps_client_begun(client, 0, &begun), 1);
	ASSERT_MEM(&begun, &expected, sizeof(begun));
}

static void expect_none(struct bps_client *client)
{
	ASSERT_FAILS(try_begun(client), ETIMEDOUT, "begun nothing");
}

/* This rank submits the tensor's next round. */
static void take_part(struct bps_client *client, const char *name)
{
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	uint8_t data[N_ELEMENTS] = { 0 };
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = data,
		.output = data,
	};

	ASSERT_OK(bps_tensor_declare(client, name, BPS_UINT8, N_ELEMENTS, &tensor));
	ASSERT_OK(bps_submit(tensor, &params, &request));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
}

/* A rank of a job that outlives its daemon. */
static struct bps_client *join_resumable(struct fake *fake)
{
	FAKE_SET(fake, ledger, true);
	return fake_join(fake, 0, 2);
}

/* It is the client that has to come back, and it does so from inside its calls. */
static void await_follows(struct fake *fake, struct bps_client *client, unsigned n)
{
	struct bps_begun begun = { .size = sizeof(begun) };

	while (told(fake)->n_follows < n)
		ASSERT_EQ(bps_client_begun(client, 10, &begun), -ETIMEDOUT);
}

/* -- Whether it follows --------------------------------------------------------------------------------------------- */

TEST(who_is_in_no_job_follows_nobody)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_open(fake);

	ASSERT_FAILS(bps_client_follow(NULL, 1, 0), EINVAL, "NULL");
	ASSERT_FAILS(bps_client_follow(client, 1, 0), ENOTCONN, "no job");
	ASSERT_FAILS(try_begun(client), ENOTCONN, "no job");
	ASSERT_EQ(told(fake)->n_follows, 0);
}

TEST(who_does_not_follow_is_given_nothing)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	begin(fake, "t", 1);
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	/* Nor afterwards what it was told before. */
	expect_none(client);
	begin(fake, "t", 1);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_OK(bps_client_follow(client, 0, 0));
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_none(client);
}

TEST(the_daemon_is_told_whether_it_follows_and_is_idle)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_told(fake, false, 1);
	ASSERT_OK(bps_client_follow(client, 5, 7));
	expect_told(fake, true, 1);
	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_told(fake, false, 1);
	/* Who does not follow is not idle. */
	ASSERT_OK(bps_client_follow(client, 0, 1));
	ASSERT_TRUE(!told(fake)->follows && !told(fake)->idle);
	ASSERT_EQ(told(fake)->n_follows, 4);
}

TEST(what_the_daemon_refuses_stays_as_it_was)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	FAKE_SET(fake, follow_status, -EINVAL);
	FAKE_SET(fake, follow_text, "job train: it is elastic");
	ASSERT_FAILS(bps_client_follow(client, 1, 1), EINVAL, "job train: it is elastic");
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");

	FAKE_SET(fake, follow_status, 0);
	ASSERT_OK(bps_client_follow(client, 1, 0));
	FAKE_SET(fake, follow_status, -ENOTCONN);
	FAKE_SET(fake, follow_text, "in no job");
	/* Not idle: that all are is not for it. */
	ASSERT_FAILS(bps_client_follow(client, 1, 1), ENOTCONN, "in no job");
	end_turn(fake, 1);
	expect_none(client);
	begin(fake, "t", 1);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_FAILS(bps_client_follow(client, 0, 0), ENOTCONN, "in no job");
	expect_begun(client, "t", 1);
}

TEST(a_daemon_of_an_older_version_is_not_asked)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;

	FAKE_SET(fake, features, fake->features & ~CONTROL_FEATURE_FOLLOW);
	client = fake_join(fake, 0, 2);
	ASSERT_FAILS(bps_client_follow(client, 1, 0), EOPNOTSUPP, "update it");
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_EQ(told(fake)->n_follows, 0);
}

static void *follow_idle(void *client)
{
	return (void *)(intptr_t)bps_client_follow(client, 1, 1);
}

TEST(one_thread_says_so_at_a_time)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	pthread_t thread;
	void *result;

	FAKE_SET(fake, follow_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, follow_idle, client));
	fake_await(fake, &fake->told.n_follows, 1);
	ASSERT_FAILS(bps_client_follow(client, 0, 0), EBUSY, "another thread");
	ASSERT_EQ(told(fake)->n_follows, 1);
	fake_followed(fake, 0, NULL);
	ASSERT_OK(pthread_join(thread, &result));
	ASSERT_EQ((intptr_t)result, 0);
	/* It is as the first has said. */
	end_turn(fake, 1);
	ASSERT_EQ(try_begun(client), 0);
}

/* -- What it is given ----------------------------------------------------------------------------------------------- */

TEST(what_others_begin_is_given_once)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_begun begun = { .size = sizeof(begun) }, sent = begun_of("layer.0", 1);

	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_none(client);
	sent.dtype = BPS_FLOAT16;
	sent.elements = BPS_VARIABLE;
	sent.operation = BPS_ALL_GATHER;
	sent.reduction = 0;
	fake_begun(fake, &sent, 1);
	ASSERT_EQ(bps_client_begun(client, BPS_FOREVER, &begun), 1);
	ASSERT_MEM(&begun, &sent, sizeof(begun));
	expect_none(client);
	ASSERT_FAILS(bps_client_begun(client, 20, &begun), ETIMEDOUT, "begun nothing");

	/* A round that failed before the daemon was there to see it, of a name as long as there is. */
	memset(sent.name, 'n', TENSOR_NAME_MAX);
	sent.operation = 0;
	fake_begun(fake, &sent, 1);
	ASSERT_EQ(bps_client_begun(client, BPS_FOREVER, &begun), 1);
	ASSERT_MEM(&begun, &sent, sizeof(begun));
	expect_none(client);
}

TEST(rounds_of_a_tensor_are_given_in_order)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	ASSERT_OK(bps_client_follow(client, 1, 0));
	begin(fake, "t", 3);
	expect_none(client);
	begin(fake, "t", 1);
	begin(fake, "u", 1);
	begin(fake, "t", 2);
	begin(fake, "t", 1);
	begin(fake, "t", 3);
	begin(fake, "t", 0);
	expect_begun(client, "t", 1);
	take_part(client, "t");
	/* Of several tensors, what came first. */
	expect_begun(client, "u", 1);
	take_part(client, "u");
	for (uint64_t round = 2; round <= 3; round++) {
		expect_begun(client, "t", round);
		take_part(client, "t");
	}
	expect_none(client);
	begin(fake, "u", 1);
	begin(fake, "u", 2);
	expect_begun(client, "u", 2);
	expect_none(client);
}

TEST(what_it_has_submitted_already_is_not_given)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	take_part(client, "t");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	begin(fake, "t", 1);
	expect_none(client);
	begin(fake, "t", 2);
	begin(fake, "t", 3);
	/* Nor what it submits by itself, after it has heard. */
	ASSERT_OK(bps_client_dispatch(client));
	take_part(client, "t");
	expect_begun(client, "t", 3);
	expect_none(client);
}

/* The others would wait for it, each until its deadline. */
TEST(who_cannot_submit_what_others_begin_hears_so)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_begun sent = begun_of("t", 1);

	ASSERT_OK(bps_client_follow(client, 1, 0));
	begin(fake, "u", 1);
	expect_begun(client, "u", 1);
	sent.dtype = 200;
	fake_begun(fake, &sent, 1);
	begin(fake, "u", 2);
	ASSERT_FAILS(try_begun(client), EOPNOTSUPP,
		     "tensor t, whose element type 200 libbps_client");
	ASSERT_FAILS(try_begun(client), EOPNOTSUPP, "does not know: update it");
	/* The rank follows no more, and the job is as it was. */
	ASSERT_OK(bps_client_follow(client, 0, 0));
	take_part(client, "u");
}

TEST(rounds_that_have_failed_before_are_given_one_by_one)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	take_part(client, "t");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	/* The fifth, of which the fourth is open. */
	begin_from(fake, "t", 4, 5);
	for (uint64_t round = 2; round < 4; round++) {
		expect_failed(client, "t", round);
		take_part(client, "t");
	}
	expect_none(client);
	begin_from(fake, "t", 4, 4);
	for (uint64_t round = 4; round <= 5; round++) {
		expect_begun(client, "t", round);
		take_part(client, "t");
	}
	expect_none(client);
	/* It has submitted them itself. */
	begin_from(fake, "t", 6, 6);
	begin_from(fake, "t", 5, 6);
	expect_begun(client, "t", 6);
	take_part(client, "t");
	expect_none(client);
	/* The first of a tensor. */
	begin_from(fake, "u", 2, 2);
	expect_failed(client, "u", 1);
	take_part(client, "u");
	expect_begun(client, "u", 2);
	take_part(client, "u");
	expect_none(client);
}

TEST(none_comes_once_all_follow_and_are_idle)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	/* Who does not follow, or is not idle, is not meant. */
	end_turn(fake, 1);
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	end_turn(fake, 1);
	expect_none(client);
	ASSERT_OK(bps_client_follow(client, 1, 1));
	expect_none(client);
	/* What has begun comes before. */
	begin(fake, "t", 1);
	end_turn(fake, 1);
	expect_begun(client, "t", 1);
	take_part(client, "t");
	ASSERT_EQ(try_begun(client), 0);
	ASSERT_EQ(try_begun(client), 0);
	/* The next time it begins anew. */
	ASSERT_OK(bps_client_follow(client, 0, 0));
	ASSERT_TRUE(!told(fake)->follows && !told(fake)->idle);
	ASSERT_EQ(told(fake)->turn, 2);
	ASSERT_OK(bps_client_follow(client, 1, 1));
	expect_told(fake, true, 2);
	expect_none(client);
}

TEST(each_turn_is_said_and_heard_once)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	for (uint64_t turn = 1; turn < 4; turn++) {
		ASSERT_OK(bps_client_follow(client, 1, 1));
		expect_told(fake, true, turn);
		/* The last may be said again, and no daemon tells of one to come. */
		end_turn(fake, turn - 1);
		end_turn(fake, turn + 1);
		expect_none(client);
		end_turn(fake, turn);
		end_turn(fake, turn);
		ASSERT_EQ(try_begun(client), 0);
		/* In the next one it is not idle until it has followed anew. */
		ASSERT_OK(bps_client_follow(client, 1, 1));
		expect_told(fake, false, turn + 1);
		ASSERT_EQ(try_begun(client), 0);
		ASSERT_OK(bps_client_follow(client, turn & 1, 0));
		ASSERT_EQ(told(fake)->turn, turn + 1);
	}
}

TEST(who_is_idle_no_more_follows_on_after_all_were)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	end_turn(fake, 1);
	ASSERT_EQ(try_begun(client), 0);
	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_told(fake, false, 2);
	expect_none(client);
	begin(fake, "t", 1);
	expect_begun(client, "t", 1);
	ASSERT_OK(bps_client_follow(client, 1, 1));
	expect_told(fake, true, 2);
	expect_none(client);
	end_turn(fake, 2);
	ASSERT_EQ(try_begun(client), 0);
}

TEST(who_follows_hears_that_never_all_will)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	/* Who does not is not meant. */
	fake_all_follow(fake, 1, -EPIPE, "job train: rank 1 has left the job");
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 0));
	expect_none(client);
	/* Nor is another turn than that in which it is. */
	fake_all_follow(fake, 2, -EPIPE, "job train: rank 1 has left the job");
	expect_none(client);
	begin(fake, "t", 1);
	fake_all_follow(fake, 1, -EPIPE, "job train: rank 1 has left the job");
	ASSERT_FAILS(try_begun(client), EPIPE, "job train: rank 1 has left the job");
	ASSERT_FAILS(try_begun(client), EPIPE, "job train: rank 1 has left the job");
	/* It ends what it follows; the job is as it was. */
	ASSERT_OK(bps_client_follow(client, 0, 0));
	ASSERT_EQ(told(fake)->turn, 1);
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	take_part(client, "t");
}

TEST(what_the_caller_has_no_room_for_is_left_out)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_begun expected = begun_of("t", 1);
	struct {
		struct bps_begun begun;
		char beyond[16];
	} room;
	size_t len = offsetof(struct bps_begun, elements);

	ASSERT_OK(bps_client_follow(client, 1, 0));
	begin(fake, "t", 1);
	room.begun.size = 0;
	ASSERT_FAILS(bps_client_begun(client, 0, &room.begun), EINVAL, "size is not set");
	ASSERT_FAILS(bps_client_begun(client, 0, NULL), EINVAL, "no struct bps_begun");
	/* A caller's of before, which ends behind the type. */
	memset(&room, 0x5a, sizeof(room));
	room.begun.size = expected.size = len;
	ASSERT_EQ(bps_client_begun(client, 0, &room.begun), 1);
	ASSERT_MEM(&room.begun, &expected, len);
	for (size_t i = len; i < sizeof(room); i++)
		ASSERT_EQ(((char *)&room)[i], 0x5a);
	/* One of a later version. */
	begin(fake, "t", 1);
	room.begun.size = sizeof(room);
	expected.size = sizeof(expected);
	ASSERT_EQ(bps_client_begun(client, 0, &room.begun), 1);
	ASSERT_MEM(&room.begun, &expected, sizeof(expected));
	for (size_t i = 0; i < sizeof(room.beyond); i++)
		ASSERT_EQ(room.beyond[i], 0x5a);
}

TEST(a_round_that_is_named_is_submitted_if_it_is_the_next)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	uint8_t data[N_ELEMENTS] = { 0 };
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.input = data,
		.output = data,
	};
	struct bps_request *request;

	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, N_ELEMENTS, &tensor));
	take_part(client, "t");
	for (params.round = 1; params.round < 4; params.round += 2)
		ASSERT_FAILS(bps_submit(tensor, &params, &request), EALREADY,
			     "of tensor \"t\": the next is 2");
	ASSERT_EQ(told(fake)->n_entries, 1);
	for (params.round = 2; params.round < 4; params.round++) {
		ASSERT_OK(bps_submit(tensor, &params, &request));
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		bps_request_free(request);
		ASSERT_EQ(told(fake)->entry.round, params.round);
	}
	/* A caller of before names none. */
	params.round = 1;
	params.size = offsetof(struct bps_submit_params, round);
	ASSERT_OK(bps_submit(tensor, &params, &request));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	ASSERT_EQ(told(fake)->entry.round, 4);
}

TEST(a_turn_that_is_refused_takes_no_memory)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_REFUSE };
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_FLOAT32, 1000, &tensor));
	ASSERT_OK(bps_client_follow(client, 1, 0));
	ASSERT_OK(bps_submit(tensor, &params, &request));
	fake_await(fake, &fake->told.n_entries, 1);
	ASSERT_EQ(told(fake)->entry.operation, 9);
	ASSERT_EQ(told(fake)->entry.round, 1);
	ASSERT_EQ(told(fake)->entry.reduction, 0);
	ASSERT_EQ(told(fake)->entry.input_buffer, 0);
	ASSERT_EQ(told(fake)->entry.output_buffer, 0);
	ASSERT_EQ(told(fake)->entry.counts_buffer, 0);
	ASSERT_EQ(told(fake)->entry.input_count, 0);
	ASSERT_EQ(told(fake)->entry.output_count, 0);
	ASSERT_EQ(told(fake)->n_shares, 0);
	fake_complete(fake, 0, -EOPNOTSUPP, "rank 0 has joined");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), EOPNOTSUPP, "rank 0 has joined");
	bps_request_free(request);

	/* It is the tensor's round as any other. */
	begin(fake, "t", 1);
	expect_none(client);
	params.reduction = BPS_SUM;
	ASSERT_FAILS(bps_submit(tensor, &params, &request), EINVAL, "it reduces nothing");
	params.reduction = 0;
	params.counts = (const uint64_t[]){ 1, 1 };
	ASSERT_FAILS(bps_submit(tensor, &params, &request), EINVAL, "it has no counts");
	params.counts = NULL;
	params.operation = BPS_REFUSE + 1;
	ASSERT_FAILS(bps_submit(tensor, &params, &request), EINVAL, "10 is no operation");
	ASSERT_EQ(told(fake)->n_entries, 1);
}

/* -- Threads -------------------------------------------------------------------------------------------------------- */

struct waiter {
	struct bps_client *client;
	struct bps_begun begun;
	int result;
	char text[256];
	pthread_t thread;
};

static void *wait_for_begun(void *data)
{
	struct waiter *waiter = data;

	waiter->begun.size = sizeof(waiter->begun);
	waiter->result = bps_client_begun(waiter->client, BPS_FOREVER, &waiter->begun);
	(void)snprintf(waiter->text, sizeof(waiter->text), "%s", bps_error());
	return NULL;
}

/* Until it sleeps. */
static void waiter_start(struct waiter *waiter, struct fake *fake, struct bps_client *client)
{
	waiter->client = client;
	ASSERT_OK(pthread_create(&waiter->thread, NULL, wait_for_begun, waiter));
	for (unsigned i = 0; fake_armed(fake) != SHM_ARMED; i++) {
		ASSERT_TRUE(i < 60000);
		(void)poll(NULL, 0, 1);
	}
}

static void waiter_expect(struct waiter *waiter, int result, const char *words)
{
	ASSERT_OK(pthread_join(waiter->thread, NULL));
	ASSERT_EQ(waiter->result, result);
	if (result < 0)
		ASSERT_CONTAINS(waiter->text, words);
}

TEST(who_waits_is_woken_by_what_others_begin)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;
	struct waiter waiter;

	/* Something of its own may be under way. */
	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_barrier(client, 0, &request));
	ASSERT_OK(bps_client_follow(client, 1, 1));
	waiter_start(&waiter, fake, client);
	begin(fake, "t", 1);
	waiter_expect(&waiter, 1, NULL);
	ASSERT_STR(waiter.begun.name, "t");
	waiter_start(&waiter, fake, client);
	end_turn(fake, 1);
	waiter_expect(&waiter, 0, NULL);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

TEST(who_waits_hears_that_another_thread_follows_no_more)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct waiter waiter;

	ASSERT_OK(bps_client_follow(client, 1, 0));
	waiter_start(&waiter, fake, client);
	/* Idle it waits on. */
	ASSERT_OK(bps_client_follow(client, 1, 1));
	ASSERT_OK(bps_client_follow(client, 0, 0));
	waiter_expect(&waiter, -ECANCELED, "does not follow");
}

TEST(who_waits_hears_that_the_job_is_over)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct waiter waiter;

	ASSERT_OK(bps_client_follow(client, 1, 0));
	waiter_start(&waiter, fake, client);
	fake_job_failed(fake, 1, -ECONNRESET, "rank 1 died");
	waiter_expect(&waiter, -ENOTCONN, "rank 1 died");
	ASSERT_FAILS(bps_client_follow(client, 1, 0), ENOTCONN, "rank 1 died");
}

TEST(who_waits_hears_that_never_all_will_follow)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct waiter waiter;

	ASSERT_OK(bps_client_follow(client, 1, 0));
	waiter_start(&waiter, fake, client);
	fake_all_follow(fake, 1, -EPIPE, "job train: rank 1 has left the job");
	waiter_expect(&waiter, -EPIPE, "rank 1 has left the job");
}

TEST(who_waits_hears_that_the_daemon_is_gone)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct waiter waiter;

	ASSERT_OK(bps_client_follow(client, 1, 0));
	waiter_start(&waiter, fake, client);
	fake_die(fake, NULL);
	waiter_expect(&waiter, -ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_client_follow(client, 1, 0), ESHUTDOWN, "has gone");
}

/* -- Its end -------------------------------------------------------------------------------------------------------- */

TEST(who_leaves_the_job_follows_no_more)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	begin(fake, "t", 1);
	end_turn(fake, 1);
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_OK(bps_client_leave(client));
	ASSERT_FAILS(try_begun(client), ENOTCONN, "no job");
	ASSERT_FAILS(bps_client_follow(client, 1, 0), ENOTCONN, "no job");

	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 2 }));
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 1));
	/* Of another job, which has turns of its own. */
	expect_told(fake, true, 1);
	expect_none(client);
	ASSERT_EQ(told(fake)->n_follows, 2);
}

TEST(who_joins_after_a_job_that_failed_does_not_follow)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	begin(fake, "t", 1);
	end_turn(fake, 1);
	fake_job_failed(fake, 1, -ECONNRESET, "rank 1 died");
	ASSERT_FAILS(try_begun(client), ENOTCONN, "rank 1 died");
	ASSERT_OK(bps_client_join(client,
				  &(struct bps_join_params){ .size = sizeof(struct bps_join_params),
							     .world_size = 2 }));
	ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
	ASSERT_OK(bps_client_follow(client, 1, 1));
	expect_told(fake, true, 1);
	expect_none(client);
}

/* -- Another daemon ------------------------------------------------------------------------------------------------- */

static void go_on_with(bool idle)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);

	ASSERT_OK(bps_client_follow(client, 1, idle));
	begin(fake, "t", 2);
	begin(fake, "t", 1);
	ASSERT_OK(bps_client_dispatch(client));
	fake_restart(fake);
	expect_begun(client, "t", 1);
	take_part(client, "t");
	expect_begun(client, "t", 2);
	take_part(client, "t");
	await_follows(fake, client, 2);
	ASSERT_EQ(told(fake)->n_resumes, 1);
	expect_told(fake, idle, 1);

	/* It says what is open, and may say all of it again. */
	begin(fake, "t", 1);
	begin(fake, "t", 2);
	begin(fake, "t", 3);
	expect_begun(client, "t", 3);
	expect_none(client);
	end_turn(fake, 1);
	ASSERT_EQ(try_begun(client), idle ? 0 : -ETIMEDOUT);
	ASSERT_EQ(told(fake)->n_follows, 2);
}

TEST(the_next_daemon_is_told_and_what_the_last_one_said_is_given)
{
	go_on_with(false);
	go_on_with(true);
}

TEST(the_next_daemon_is_told_nothing_by_who_follows_no_more)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	ASSERT_OK(bps_client_follow(client, 0, 0));
	fake_restart(fake);
	take_part(client, "t");
	take_part(client, "t");
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_EQ(told(fake)->n_follows, 2);
}

/* Else a home that is new, too, would not know in which turn the others are. */
static void tell_turn(bool follows, bool idle)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	end_turn(fake, 1);
	ASSERT_EQ(try_begun(client), 0);
	if (!follows || !idle)
		ASSERT_OK(bps_client_follow(client, follows, 0));
	FAKE_SET(fake, told.turn, 0);
	fake_restart(fake);
	/* The second is declared after that. */
	take_part(client, "t");
	take_part(client, "u");
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_EQ(told(fake)->turn, 2);
	ASSERT_EQ(told(fake)->follows, follows);
	ASSERT_TRUE(!told(fake)->idle);
	if (follows && idle)
		ASSERT_EQ(try_begun(client), 0);
	else if (follows)
		expect_none(client);
	else
		ASSERT_FAILS(try_begun(client), ECANCELED, "does not follow");
}

TEST(the_next_daemon_is_told_the_turn_after_all_were_idle)
{
	tell_turn(false, false);
	tell_turn(true, false);
	tell_turn(true, true);
}

static void *restart_after_follow(void *data)
{
	struct fake *fake = data;

	fake_await(fake, &fake->told.n_follows, 1);
	FAKE_SET(fake, follow_mute, false);
	fake_restart(fake);
	return NULL;
}

TEST(the_next_daemon_answers_what_the_last_one_did_not)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	pthread_t thread;

	FAKE_SET(fake, follow_mute, true);
	ASSERT_OK(pthread_create(&thread, NULL, restart_after_follow, fake));
	ASSERT_OK(bps_client_follow(client, 1, 1));
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(told(fake)->n_follows, 2);
	ASSERT_TRUE(told(fake)->follows && told(fake)->idle);
	begin(fake, "t", 1);
	expect_begun(client, "t", 1);
}

struct meeting {
	struct fake *fake;
	struct bps_client *client;
	pthread_t thread;
};

/* Somebody waits for the daemon. */
static void await_leader(struct bps_client *client)
{
	for (bool leading = false; !leading;) {
		(void)poll(NULL, 0, 1);
		(void)pthread_mutex_lock(&client->mutex);
		leading = client->waiting.leading;
		(void)pthread_mutex_unlock(&client->mutex);
	}
}

static void *welcome_who_waits(void *data)
{
	struct meeting *meeting = data;

	await_leader(meeting->client);
	fake_welcome(meeting->fake);
	return NULL;
}

/* What the next one knows is not known before it has welcomed this client: until then nobody is told that it is too old. */
TEST(who_follows_while_the_next_daemon_is_greeted_waits_for_its_answer)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct meeting meeting = { .fake = fake, .client = client };

	FAKE_SET(fake, hello_mute, true);
	fake_restart(fake);
	while (client->session.state != SESSION_GREETING)
		ASSERT_OK(bps_client_dispatch(client));
	ASSERT_OK(pthread_create(&meeting.thread, NULL, welcome_who_waits, &meeting));
	ASSERT_OK(bps_client_follow(client, 1, 0));
	ASSERT_OK(pthread_join(meeting.thread, NULL));
	ASSERT_EQ(told(fake)->n_follows, 1);
}

static void *answer_who_waits(void *data)
{
	struct meeting *meeting = data;

	await_leader(meeting->client);
	FAKE_SET(meeting->fake, follow_mute, false);
	fake_followed(meeting->fake, 0, NULL);
	return NULL;
}

/* That the next daemon is told of it, and has not answered yet, is no other thread. */
TEST(who_is_idle_as_the_next_daemon_is_told_that_it_follows_says_so)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct meeting meeting = { .fake = fake, .client = client };

	ASSERT_OK(bps_client_follow(client, 1, 0));
	FAKE_SET(fake, follow_mute, true);
	fake_restart(fake);
	await_follows(fake, client, 2);
	ASSERT_OK(pthread_create(&meeting.thread, NULL, answer_who_waits, &meeting));
	ASSERT_OK(bps_client_follow(client, 1, 1));
	ASSERT_OK(pthread_join(meeting.thread, NULL));
	ASSERT_TRUE(told(fake)->follows && told(fake)->idle);
}

/* Else it would wait for ever. */
TEST(who_follows_hears_that_the_next_daemon_refuses_it)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_begun begun = { .size = sizeof(begun) };
	bool is_answered;
	int r;

	ASSERT_OK(bps_client_follow(client, 1, 1));
	FAKE_SET(fake, follow_status, -EOPNOTSUPP);
	FAKE_SET(fake, follow_text, "its server is of a version that knows no rank that follows");
	fake_restart(fake);
	do {
		is_answered = told(fake)->n_follows == 2;
		r = bps_client_begun(client, 10, &begun);
	} while (r == -ETIMEDOUT && !is_answered);
	ASSERT_FAILS(r, EOPNOTSUPP, "knows no rank that follows");
}

TEST(who_follows_hears_that_the_next_daemon_is_of_an_older_version)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);
	struct bps_begun begun = { .size = sizeof(begun) };

	ASSERT_OK(bps_client_follow(client, 1, 1));
	FAKE_SET(fake, features, fake->features & ~CONTROL_FEATURE_FOLLOW);
	fake_restart(fake);
	/* It is sent nothing of it; the fake sees to that. */
	ASSERT_FAILS(bps_client_begun(client, BPS_FOREVER, &begun), ENOTCONN,
		     "knows no rank that follows the others");
	ASSERT_EQ(told(fake)->n_resumes, 0);
}

TEST(who_followed_before_goes_on_with_a_daemon_of_an_older_version)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = join_resumable(fake);

	ASSERT_OK(bps_client_follow(client, 1, 1));
	end_turn(fake, 1);
	ASSERT_EQ(try_begun(client), 0);
	ASSERT_OK(bps_client_follow(client, 0, 0));
	FAKE_SET(fake, features, fake->features & ~CONTROL_FEATURE_FOLLOW);
	fake_restart(fake);
	take_part(client, "t");
	take_part(client, "t");
	ASSERT_EQ(told(fake)->n_resumes, 1);
	ASSERT_FAILS(bps_client_follow(client, 1, 0), EOPNOTSUPP, "update it");
}
