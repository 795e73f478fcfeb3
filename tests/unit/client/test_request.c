/*
 * Requests from post to end, with the fake daemon: waiting in every way, many threads, a daemon
 * that writes nonsense or dies.
 */
#include "fake.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

static struct bps_request *barrier(struct bps_client *client)
{
	struct bps_request *request;

	if (bps_barrier(client, 0, &request))
		test_fail(__FILE__, __LINE__, "barrier: %s", bps_error());
	return request;
}

TEST(poll_and_wait)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	request = barrier(client);
	ASSERT_EQ(bps_request_poll(request), 0);
	ASSERT_STR(bps_request_error(request), "");
	ASSERT_FAILS(bps_request_wait(request, 0), ETIMEDOUT, "under way");
	ASSERT_FAILS(bps_request_wait(request, 20), ETIMEDOUT, "under way");
	fake_await(fake, &fake->told.n_entries, 1);
	ASSERT_STR(told(fake)->name, "bps:barrier");
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_OK(bps_request_wait(request, 0));
	ASSERT_EQ(bps_request_poll(request), 1);
	ASSERT_STR(bps_request_error(request), "");
	bps_request_free(request);
}

TEST(statuses)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	static const struct {
		int status, expected;
		const char *text, *words;
	} cases[] = {
		{ -ETIME, -ETIME, "rank 1 has not come", "rank 1" },
		/* Not to be taken for a wait that timed out. */
		{ -ETIMEDOUT, -ETIME, "rank 1 has not come", "rank 1" },
		{ -ECONNRESET, -ECONNRESET, "", "reset" },
		{ 5, -EPROTO, "?", "none" },
		{ -5000, -EPROTO, "?", "none" },
		{ INT32_MIN, -EPROTO, "?", "none" },
	};

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		struct bps_request *request = barrier(client);

		fake_await(fake, &fake->told.n_entries, i + 1);
		fake_complete(fake, i, cases[i].status, cases[i].text);
		ASSERT_EQ(bps_request_wait(request, BPS_FOREVER), cases[i].expected);
		ASSERT_CONTAINS(bps_error(), cases[i].words);
		ASSERT_CONTAINS(bps_request_error(request), cases[i].words);
		bps_request_free(request);
	}
}

TEST(cancel)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	request = barrier(client);
	ASSERT_OK(bps_request_cancel(request));
	ASSERT_OK(bps_request_cancel(request)); /* asked once */
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECANCELED, "cancelled by rank 0");
	ASSERT_OK(bps_request_cancel(request));
	ASSERT_EQ(told(fake)->n_cancels, 1);
	ASSERT_EQ(told(fake)->cancelled_slot, told(fake)->entry.slot);
	bps_request_free(request);
}

TEST(blocked)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	struct bps_request *request;

	FAKE_SET(fake, features, fake->features | CONTROL_FEATURE_BLOCKED);
	client = fake_join(fake, 0, 2);
	FAKE_SET(fake, hold, true);
	request = barrier(client);
	ASSERT_OK(bps_request_blocked(request, 1));
	fake_await(fake, &fake->told.n_blocked, 1);
	ASSERT_EQ(told(fake)->blocked_slot, told(fake)->entry.slot);
	ASSERT_TRUE(!told(fake)->blocked_over);
	ASSERT_OK(bps_request_blocked(request, 0));
	fake_await(fake, &fake->told.n_blocked, 2);
	ASSERT_TRUE(told(fake)->blocked_over);
	fake_complete(fake, 0, -EDEADLK, "rank 1 waits for it");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), EDEADLK, "rank 1 waits for it");
	/* What has ended blocks nobody. */
	ASSERT_OK(bps_request_blocked(request, 1));
	ASSERT_EQ(told(fake)->n_blocked, 2);
	bps_request_free(request);
}

TEST(daemons_that_do_not_ask_what_blocks)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	request = barrier(client);
	ASSERT_OK(bps_request_blocked(request, 1));
	ASSERT_OK(bps_request_cancel(request));
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECANCELED, "cancelled by rank 0");
	ASSERT_EQ(told(fake)->n_blocked, 0);
	bps_request_free(request);
}

TEST(daemon_that_dies_during_a_wait)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *done, *lost, *polled;

	FAKE_SET(fake, hold, true);
	done = barrier(client);
	lost = barrier(client);
	polled = barrier(client);
	fake_await(fake, &fake->told.n_entries, 3);
	fake_complete(fake, 0, 0, NULL);
	fake_die(fake, NULL);
	while (!bps_request_poll(polled)) {
	}
	ASSERT_FAILS(bps_request_wait(polled, 0), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_request_wait(lost, BPS_FOREVER), ESHUTDOWN, "has gone");
	/* What it had completed before is complete. */
	ASSERT_OK(bps_request_wait(done, BPS_FOREVER));
	bps_request_free(done);
	bps_request_free(lost);
	bps_request_free(polled);
}

TEST(wild_slots)
{
	static const uint32_t states[] = { SHM_FREE, 3, UINT32_MAX };

	for (unsigned i = 0; i < ARRAY_SIZE(states); i++) {
		_cleanup_(fake_freep) struct fake *fake = fake_new();
		_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
		struct bps_request *a, *b;

		FAKE_SET(fake, hold, true);
		a = barrier(client);
		b = barrier(client);
		fake_await(fake, &fake->told.n_entries, 2);
		fake_scribble(fake, told(fake)->entry.slot, states[i], 0);
		ASSERT_FAILS(bps_request_wait(a, BPS_FOREVER), ESHUTDOWN, "nonsense");
		ASSERT_FAILS(bps_request_wait(b, BPS_FOREVER), ESHUTDOWN, "nonsense");
		bps_request_free(a);
		bps_request_free(b);
	}
}

TEST(text_without_an_end)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	request = barrier(client);
	fake_await(fake, &fake->told.n_entries, 1);
	fake_scribble(fake, told(fake)->entry.slot, SHM_DONE, -EIO);
	ASSERT_EQ(bps_request_wait(request, BPS_FOREVER), -EIO);
	ASSERT_EQ(strlen(bps_request_error(request)), ERROR_TEXT_MAX);
	ASSERT_EQ(strlen(bps_error()), ERROR_TEXT_MAX);
	bps_request_free(request);
}

/* Slots that nobody asked for and counts that cannot be: the daemon's nonsense, to nobody's harm. */
TEST(wild_completions)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);

	for (unsigned i = 0; i < 100; i++) {
		struct bps_request *request = barrier(client);

		fake_scribble(fake, (told(fake)->entry.slot + 1 + i) % SHM_SLOTS, SHM_DONE, -EIO);
		ASSERT_OK(bps_client_dispatch(client));
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		bps_request_free(request);
	}
}

TEST(ring_wraps)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);

	for (unsigned i = 0; i < 3 * SHM_ENTRIES + 5; i++) {
		struct bps_request *request = barrier(client);

		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		bps_request_free(request);
	}
	ASSERT_EQ(told(fake)->entry.round, 3 * SHM_ENTRIES + 5);
}

struct waiter {
	struct bps_client *client;
	struct fake *fake;
	unsigned n;
	int result;
};

static void *submit_and_wait(void *data)
{
	struct waiter *w = data;
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_tensor *tensor;
	struct bps_request *request;
	uint8_t value[64];
	char name[16];

	(void)snprintf(name, sizeof(name), "t%u", w->n);
	ASSERT_OK(bps_tensor_declare(w->client, name, BPS_UINT8, sizeof(value), &tensor));
	params.input = params.output = value;
	for (unsigned i = 0; i < 500; i++) {
		memset(value, (int)(i + w->n), sizeof(value));
		ASSERT_OK(bps_submit(tensor, &params, &request));
		if (i % 3 == 0)
			while (!bps_request_poll(request)) {
			}
		ASSERT_OK(bps_request_wait(request, i % 3 == 1 ? 100000 : BPS_FOREVER));
		ASSERT_EQ(value[63], (uint8_t)(i + w->n + 1));
		bps_request_free(request);
	}
	bps_tensor_free(tensor);
	return NULL;
}

TEST(many_threads)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct waiter waiters[8];
	pthread_t threads[8];

	for (unsigned i = 0; i < 8; i++) {
		waiters[i] = (struct waiter){ .client = client, .fake = fake, .n = i };
		ASSERT_OK(pthread_create(&threads[i], NULL, submit_and_wait, &waiters[i]));
	}
	/* And one with a loop of its own, which must not take away what the others wait for. */
	for (unsigned i = 0; i < 200; i++)
		ASSERT_OK(bps_client_dispatch(client));
	for (unsigned i = 0; i < 8; i++)
		ASSERT_OK(pthread_join(threads[i], NULL));
	ASSERT_EQ(told(fake)->n_entries, 8 * 500);
}

static void *wait_only(void *data)
{
	struct waiter *w = data;

	w->result = bps_request_wait((struct bps_request *)w->client, BPS_FOREVER);
	return NULL;
}

/* 16 threads wait; their requests end in an order that is not theirs, the last by the daemon's death. */
TEST(many_wait_at_once)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *requests[16];
	struct waiter waiters[16];
	pthread_t threads[16];

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < 16; i++)
		requests[i] = barrier(client);
	fake_await(fake, &fake->told.n_entries, 16);
	for (unsigned i = 0; i < 16; i++) {
		waiters[i].client = (struct bps_client *)requests[i];
		ASSERT_OK(pthread_create(&threads[i], NULL, wait_only, &waiters[i]));
	}
	for (unsigned i = 0; i < 15; i++) {
		unsigned next = i * 7 % 15;

		fake_complete(fake, next, i % 2 ? -EIO : 0, "odd");
		ASSERT_OK(pthread_join(threads[next], NULL));
		ASSERT_EQ(waiters[next].result, i % 2 ? -EIO : 0);
	}
	fake_die(fake, NULL);
	ASSERT_OK(pthread_join(threads[15], NULL));
	ASSERT_EQ(waiters[15].result, -ESHUTDOWN);
	for (unsigned i = 0; i < 16; i++)
		bps_request_free(requests[i]);
}

/* Ends each request a little later than the one before, from at once to long after a wait has gone to sleep. */
static void *complete_later(void *arg)
{
	struct fake *fake = arg;

	for (unsigned i = 0; i < 400; i++) {
		struct timespec pause = { .tv_nsec = (long)(i % 100) * 2000 };

		fake_await(fake, &fake->told.n_entries, i + 1);
		(void)nanosleep(&pause, NULL);
		fake_complete(fake, i, 0, NULL);
	}
	return NULL;
}

static void meet_at_every_stage(void)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	pthread_t thread;

	FAKE_SET(fake, hold, true);
	ASSERT_OK(pthread_create(&thread, NULL, complete_later, fake));
	for (unsigned i = 0; i < 400; i++) {
		struct bps_request *request = barrier(client);

		ASSERT_OK(bps_request_wait(request, 60000));
		bps_request_free(request);
	}
	ASSERT_OK(pthread_join(thread, NULL));
}

TEST(completions_meet_a_wait_at_every_stage)
{
	meet_at_every_stage();
}

TEST(completions_meet_a_wait_that_does_not_spin)
{
	ASSERT_OK(setenv("BPS_SPIN_US", "0", 1));
	meet_at_every_stage();
}

static bool is_readable(int fd, int timeout_ms)
{
	struct pollfd pollfd = { .fd = fd, .events = POLLIN };

	return poll(&pollfd, 1, timeout_ms) == 1;
}

static void await_armed(struct fake *fake, uint32_t how)
{
	for (unsigned i = 0; fake_armed(fake) != how; i++) {
		ASSERT_TRUE(i < 60000);
		(void)poll(NULL, 0, 1);
	}
}

/* Whether one who waits for the n-th request is seen asleep on the word, before it goes on to its descriptors. */
static bool nap_is_seen(struct fake *fake, struct bps_client *client, unsigned n, bool look)
{
	struct bps_request *request = barrier(client);
	struct waiter waiter = { .client = (struct bps_client *)request };
	pthread_t thread;
	bool seen = false;

	ASSERT_OK(pthread_create(&thread, NULL, wait_only, &waiter));
	for (uint32_t armed = SHM_AWAKE; !seen && armed != SHM_ARMED;) {
		armed = fake_armed(fake);
		if (armed == SHM_ARMED_FUTEX && look)
			ASSERT_EQ(bps_request_poll(request), 0);
		seen = armed == SHM_ARMED_FUTEX && fake_armed(fake) == SHM_ARMED_FUTEX;
		(void)sched_yield();
	}
	/* In the end it hears its socket, too. */
	await_armed(fake, SHM_ARMED);
	fake_await(fake, &fake->told.n_entries, n + 1);
	fake_complete(fake, n, 0, NULL);
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(waiter.result, 0);
	bps_request_free(request);
	return seen;
}

static void *wait_for_one(void *data)
{
	ASSERT_OK(bps_request_wait(data, BPS_FOREVER));
	return NULL;
}

/* Who waits for one of many sleeps for it, and not for any; another who waits meanwhile is woken for his, too. */
TEST(waits_sleep_for_one_of_many)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	static struct bps_request *requests[1000];
	pthread_t first, second;
	unsigned n = 1;
	uint32_t slot;

	FAKE_SET(fake, hold, true);
	requests[0] = barrier(client);
	fake_await(fake, &fake->told.n_entries, 1);
	slot = told(fake)->entry.slot;
	for (unsigned i = 1; i < ARRAY_SIZE(requests); i++)
		requests[i] = barrier(client);
	fake_await(fake, &fake->told.n_entries, ARRAY_SIZE(requests));
	ASSERT_OK(pthread_create(&first, NULL, wait_for_one, requests[0]));
	/* After 10 ms in vain it sleeps on descriptors, for any: until one comes. */
	while (fake_awaited(fake) != slot + 1) {
		if (fake_armed(fake) == SHM_ARMED) {
			ASSERT_TRUE(n < 500);
			fake_complete(fake, n++, 0, NULL);
		}
		(void)sched_yield();
	}
	ASSERT_OK(pthread_create(&second, NULL, wait_for_one, requests[900]));
	fake_complete(fake, 800, 0, NULL);
	fake_complete(fake, 900, 0, NULL);
	ASSERT_OK(pthread_join(second, NULL));
	ASSERT_EQ(bps_request_poll(requests[0]), 0);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(pthread_join(first, NULL));
	ASSERT_EQ(bps_request_poll(requests[800]), 1);
	ASSERT_EQ(bps_request_poll(requests[700]), 0);
	for (unsigned i = 0; i < ARRAY_SIZE(requests); i++)
		bps_request_free(requests[i]);
}

TEST(waits_sleep_on_the_word_and_then_on_descriptors)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	unsigned n = 0;

	FAKE_SET(fake, hold, true);
	while (!nap_is_seen(fake, client, n++, false))
		ASSERT_TRUE(n < FAKE_HELD);
	/* One who only looks leaves it to the leader how he is woken. */
	while (!nap_is_seen(fake, client, n++, true))
		ASSERT_TRUE(n < FAKE_HELD);
}

static void on_signal(int number)
{
	(void)number;
}

/* Each signal ends a sleep early: it must not sleep on the word for ever, and never hear that the daemon is gone. */
static bool nap_is_interrupted(struct fake *fake, struct bps_client *client, unsigned n)
{
	struct bps_request *request = barrier(client);
	struct waiter waiter = { .client = (struct bps_client *)request };
	uint32_t armed = SHM_AWAKE;
	pthread_t thread;

	ASSERT_OK(pthread_create(&thread, NULL, wait_only, &waiter));
	while (armed == SHM_AWAKE) {
		armed = fake_armed(fake);
		(void)sched_yield();
	}
	for (unsigned i = 0; fake_armed(fake) != SHM_ARMED; i++) {
		ASSERT_TRUE(i < 5000);
		ASSERT_OK(pthread_kill(thread, SIGUSR1));
		(void)poll(NULL, 0, 1);
	}
	fake_await(fake, &fake->told.n_entries, n + 1);
	fake_complete(fake, n, 0, NULL);
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(waiter.result, 0);
	bps_request_free(request);
	return armed == SHM_ARMED_FUTEX;
}

TEST(who_is_always_interrupted_sleeps_on_descriptors_too)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct sigaction action = { .sa_handler = on_signal };
	unsigned n = 0;

	ASSERT_OK(sigaction(SIGUSR1, &action, NULL));
	FAKE_SET(fake, hold, true);
	while (!nap_is_interrupted(fake, client, n++))
		ASSERT_TRUE(n < FAKE_HELD);
}

TEST(waits_sleep_on_descriptors_if_the_daemon_knows_nothing_else)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;

	FAKE_SET(fake, features, CONTROL_FEATURE_RESUME);
	FAKE_SET(fake, hold, true);
	client = fake_join(fake, 0, 2);
	for (unsigned n = 0; n < 10; n++)
		ASSERT_TRUE(!nap_is_seen(fake, client, n, false));
}

/* Who asks for the descriptor of a client that another thread waits for, is told of what completes. */
TEST(fd_is_asked_for_while_another_sleeps_on_the_word)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct waiter waiter;
	struct bps_request *request;
	pthread_t thread;
	int fd;

	FAKE_SET(fake, hold, true);
	request = barrier(client);
	waiter.client = (struct bps_client *)request;
	ASSERT_OK(pthread_create(&thread, NULL, wait_only, &waiter));
	while (fake_armed(fake) == SHM_AWAKE)
		(void)sched_yield();
	fd = bps_client_fd(client);
	ASSERT_TRUE(fd >= 0);
	await_armed(fake, SHM_ARMED);
	ASSERT_OK(bps_client_dispatch(client));
	fake_await(fake, &fake->told.n_entries, 1);
	fake_complete(fake, 0, 0, NULL);
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(waiter.result, 0);
	ASSERT_TRUE(is_readable(fd, 60000));
	/* Who saw it complete need not have looked for more: that is for whom the descriptor tells. */
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(fake_armed(fake), SHM_ARMED);
	bps_request_free(request);
}

static _Atomic unsigned n_yields;
/* Ends what is in this slot meanwhile. Any thread of a test may look. */
static struct fake *_Atomic giver;
static uint32_t given_slot;

/* The library's, too. */
__attribute__((__visibility__("default"))) int sched_yield(void)
{
	struct fake *fake = atomic_exchange(&giver, NULL);

	n_yields++;
	if (!fake)
		return (int)syscall(SYS_sched_yield);
	fake_scribble(fake, given_slot, SHM_DONE, 0);
	return 0;
}

static int64_t now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* How often one who waits in vain looks. */
static unsigned looks_in_vain(struct bps_request *request)
{
	n_yields = 0;
	ASSERT_FAILS(bps_request_wait(request, 1), ETIMEDOUT, "under way");
	return n_yields;
}

TEST_FULL_TIER(waits_in_vain_spin_for_a_share_of_the_time,
	       "who loses the processor while he looks, looks no more")
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client;
	struct bps_request *request;

	FAKE_SET(fake, hold, true);
	client = fake_join(fake, 0, 2);
	request = barrier(client);
	/* One tenth of a millisecond each: a job's first waits may all be in vain. */
	for (unsigned i = 0; i < 20; i++)
		ASSERT_TRUE(looks_in_vain(request) > 0);
	fake_complete(fake, 0, 0, NULL);
	bps_request_free(request);
	bps_client_close(client);
}

TEST(who_has_spun_in_vain_for_long_sleeps)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_client *client;
	struct bps_request *request;
	unsigned n = 0;
	int64_t before_ns;

	ASSERT_OK(setenv("BPS_SPIN_US", "10000", 1));
	FAKE_SET(fake, hold, true);
	client = fake_join(fake, 0, 2);
	request = barrier(client);
	/* In a row, and before some of it was made good by time. */
	do {
		before_ns = now_ns();
		for (unsigned i = 0; i < 6; i++)
			(void)looks_in_vain(request);
		for (n = 0; n < 8 && !looks_in_vain(request); n++)
			;
	} while (n < 8 && now_ns() - before_ns > 100 * INT64_C(1000000));
	ASSERT_EQ(n, 8);
	fake_complete(fake, 0, 0, NULL);
	bps_request_free(request);
	bps_client_close(client);
}

/* Of ten waits for a result that is then copied, how many looked. */
static unsigned looks_for_copies(void)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	enum { LEN = 32 << 20 };
	_cleanup_(freep) uint8_t *data = calloc(1, LEN);
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_client *client;
	struct bps_request *request;
	unsigned n_looked = 0;

	FAKE_SET(fake, hold, true);
	client = fake_join(fake, 0, 2);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, LEN, &tensor));
	params.input = params.output = data;
	for (unsigned i = 0; i < 10; i++) {
		ASSERT_OK(bps_submit(tensor, &params, &request));
		fake_await(fake, &fake->told.n_entries, i + 1);
		given_slot = told(fake)->entry.slot;
		giver = fake;
		n_yields = 0;
		if (bps_request_wait(request, 1)) {
			/* It sleeps. */
			fake_complete(fake, i, 0, NULL);
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		}
		n_looked += n_yields > 0;
		giver = NULL;
		bps_request_free(request);
	}
	bps_tensor_free(TAKE_PTR(tensor));
	bps_client_close(client);
	return n_looked;
}

/* What it takes to copy a result is no time in which others had the processor. Now and then some have it in just that moment. */
TEST_FULL_TIER(who_copies_results_goes_on_to_spin,
	       "who loses the processor while he looks, looks no more")
{
	unsigned n = 0;

	ASSERT_OK(setenv("BPS_SPIN_US", "10000", 1));
	for (unsigned i = 0; i < 10 && n < 10; i++)
		n = looks_for_copies();
	ASSERT_EQ(n, 10);
}

TEST(spins_of_no_length)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_open_params params = { .size = sizeof(params), .socket = fake->path };
	struct bps_client *client;

	ASSERT_OK(setenv("BPS_SPIN_US", "long", 1));
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "BPS_SPIN_US is \"long\"");
	ASSERT_OK(setenv("BPS_SPIN_US", "10001", 1));
	ASSERT_FAILS(bps_client_open(&params, &client), EINVAL, "too large");
	ASSERT_OK(setenv("BPS_SPIN_US", "10000", 1));
	ASSERT_OK(bps_client_open(&params, &client));
	bps_client_close(client);
}

TEST(many_wait_for_one)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	enum { LEN = 1 << 20 };
	_cleanup_(freep) uint8_t *data = calloc(1, LEN);
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_request *request;
	struct waiter waiters[8];
	pthread_t threads[8];

	FAKE_SET(fake, hold, true);
	ASSERT_OK(bps_tensor_declare(client, "t", BPS_UINT8, LEN, &tensor));
	params.input = params.output = data;
	ASSERT_OK(bps_submit(tensor, &params, &request));
	for (unsigned i = 0; i < 8; i++) {
		waiters[i].client = (struct bps_client *)request;
		ASSERT_OK(pthread_create(&threads[i], NULL, wait_only, &waiters[i]));
	}
	fake_await(fake, &fake->told.n_entries, 1);
	fake_complete(fake, 0, 0, NULL);
	for (unsigned i = 0; i < 8; i++) {
		ASSERT_OK(pthread_join(threads[i], NULL));
		ASSERT_EQ(waiters[i].result, 0);
	}
	ASSERT_EQ(data[0], 1);
	ASSERT_EQ(data[LEN - 1], 1);
	bps_request_free(request);
}

TEST(fd_tells_of_completions)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	int fd = bps_client_fd(client);

	FAKE_SET(fake, hold, true);
	for (unsigned i = 0; i < 50; i++) {
		struct bps_request *request = barrier(client);

		fake_await(fake, &fake->told.n_entries, i + 1);
		do {
			ASSERT_OK(bps_client_dispatch(client));
		} while (is_readable(fd, 0));
		fake_complete(fake, i, 0, NULL);
		while (!bps_request_poll(request)) {
			ASSERT_TRUE(is_readable(fd, -1));
			ASSERT_OK(bps_client_dispatch(client));
		}
		bps_request_free(request);
	}
}

/* A thread that waits sees the end of another's request: that one's loop must hear of it. */
TEST(fd_tells_of_what_a_waiter_saw)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *polled, *waited;
	int fd = bps_client_fd(client);

	FAKE_SET(fake, hold, true);
	polled = barrier(client);
	waited = barrier(client);
	fake_await(fake, &fake->told.n_entries, 2);
	do {
		ASSERT_OK(bps_client_dispatch(client));
	} while (is_readable(fd, 0));
	fake_complete(fake, 0, 0, NULL);
	fake_complete(fake, 1, 0, NULL);
	ASSERT_OK(bps_request_wait(waited, BPS_FOREVER));
	while (!bps_request_poll(polled)) {
		ASSERT_TRUE(is_readable(fd, -1));
		ASSERT_OK(bps_client_dispatch(client));
	}
	bps_request_free(polled);
	bps_request_free(waited);
}

/* So it must of what was seen beside one that was asked for, though the daemon's word for it has been taken since. */
TEST(fd_tells_of_what_was_seen_beside)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 2);
	struct bps_request *awaited, *polled, *waiting;
	int fd = bps_client_fd(client);

	FAKE_SET(fake, hold, true);
	awaited = barrier(client);
	polled = barrier(client);
	waiting = barrier(client);
	fake_await(fake, &fake->told.n_entries, 3);
	do {
		ASSERT_OK(bps_client_dispatch(client));
	} while (is_readable(fd, 0));
	fake_complete(fake, 0, 0, NULL);
	fake_complete(fake, 1, 0, NULL);
	ASSERT_EQ(bps_request_poll(polled), 1);
	ASSERT_EQ(bps_request_poll(waiting), 0);
	ASSERT_TRUE(is_readable(fd, 60000));
	ASSERT_OK(bps_client_dispatch(client));
	ASSERT_EQ(bps_request_poll(awaited), 1);
	fake_complete(fake, 2, 0, NULL);
	ASSERT_OK(bps_request_wait(waiting, BPS_FOREVER));
	bps_request_free(awaited);
	bps_request_free(polled);
	bps_request_free(waiting);
}

TEST(loop_without_wait)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = fake_join(fake, 0, 1);
	struct bps_request *requests[100];
	int fd = bps_client_fd(client);
	unsigned n_complete = 0;

	for (unsigned i = 0; i < 100; i++)
		requests[i] = barrier(client);
	while (n_complete < 100) {
		ASSERT_TRUE(is_readable(fd, -1));
		ASSERT_OK(bps_client_dispatch(client));
		while (n_complete < 100 && bps_request_poll(requests[n_complete]) == 1)
			bps_request_free(requests[n_complete++]);
	}
}
