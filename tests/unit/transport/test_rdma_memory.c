/*
 * Memory that is registered with devices while all else goes on. The double of tests/fakeverbs holds up who registers and
 * who unregisters until it is told to let them go: whoever waits for that meanwhile, waits for ever.
 */
#include "fake.h"
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"
#include "transport_pair.h"
#include <sched.h>
#include <sys/mman.h>

#define LEN   (100 << 10)
#define LARGE ((size_t)16 << 20) /* than what anything else here is in */

#define TEST_BOTH(name)                                                                     \
	static void name(struct pair *pair);                                                \
	TEST(name##_home)                                                                   \
	{                                                                                   \
		name(pair_of(&(struct pair_variant){ "rdma", false, 0, 1, true }));         \
		ASSERT_EQ(fake_n_objects(), 0);                                             \
	}                                                                                   \
	TEST(name##_thread)                                                                 \
	{                                                                                   \
		name(pair_of(&(struct pair_variant){ "rdma, thread", false, 1, 1, true })); \
		ASSERT_EQ(fake_n_objects(), 0);                                             \
	}                                                                                   \
	static void name(struct pair *pair)

/* Two owners. */
static const char one[1], other[1];

static struct transport_rdma_counters counters_of(const struct pair_side *side)
{
	struct transport_rdma_counters counters;

	transport_rdma_counters(side->transport, &counters);
	return counters;
}

/* Returns how many bytes were copied. */
static uint64_t echo(struct pair *pair, char *memory)
{
	uint64_t before = counters_of(&pair->a).bytes_copied;
	struct pair_call call;

	pair_fill(memory, LEN, 7);
	memset(memory + LEN, 0, LEN);
	pair_call_init(&call, memory, LEN, memory + LEN, LEN);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_TRUE(pair_check(memory + LEN, LEN, 7));
	return counters_of(&pair->a).bytes_copied - before;
}

static char *map(size_t len)
{
	char *data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(data != MAP_FAILED);
	return data;
}

/* All that lanes need is registered. */
static struct pair *pair_of(const struct pair_variant *variant)
{
	struct pair_config config = { .variant = *variant, .key_a = "key", .key_b = "key" };
	struct pair *pair = pair_new_with(&config);
	static char memory[2 * LEN];

	pair->server->on_call = pair_on_call_echo;
	ASSERT_EQ(echo(pair, memory), 2 * LEN);
	return pair;
}

static char *add(struct pair *pair, const char *owner, size_t len)
{
	char *data = map(len);

	ASSERT_OK(transport_memory_add(pair->a.transport, owner, data, len));
	return data;
}

/* It is used, and who registers it is held up. */
static char *add_held(struct pair *pair, const char *owner)
{
	char *data = add(pair, owner, LARGE);

	fake_hold("ibv_reg_mr", LARGE);
	ASSERT_EQ(echo(pair, data), 2 * LEN);
	PAIR_UNTIL(pair, fake_n_held());
	return data;
}

static char *add_registered(struct pair *pair, const char *owner)
{
	char *data = add(pair, owner, LARGE);

	(void)echo(pair, data);
	PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, data));
	ASSERT_EQ(echo(pair, data), 0);
	return data;
}

struct departure {
	struct mail mail;
	unsigned n;
};

static void on_gone(struct mail *mail)
{
	container_of(mail, struct departure, mail)->n++;
}

static bool removed(struct pair *pair, char *data, struct departure *departure)
{
	*departure = (struct departure){ .mail.run = on_gone };
	return transport_memory_remove(pair->a.transport, data, &departure->mail);
}

TEST_BOTH(what_is_being_registered_is_copied)
{
	char *large = add_held(pair, one), *small;
	struct departure departure;

	small = add(pair, one, (size_t)2 * LEN);
	ASSERT_EQ(echo(pair, small), 0);
	ASSERT_EQ(echo(pair, large), 2 * LEN);
	ASSERT_EQ(transport_memory_regions(pair->a.transport, large), 0);
	fake_hold(NULL, 0);
	PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, large));
	ASSERT_EQ(echo(pair, large), 0);

	ASSERT_TRUE(removed(pair, small, &departure));
	ASSERT_TRUE(!removed(pair, large, &departure));
	PAIR_UNTIL(pair, departure.n);
	(void)pair_free(pair);
	ASSERT_EQ(departure.n, 1);
}

TEST_BOTH(what_is_being_unregistered_is_away)
{
	char *data = add_registered(pair, one);
	unsigned n_regions = (unsigned)counters_of(&pair->a).regions;
	struct departure departure;

	fake_hold("ibv_dereg_mr", LARGE);
	ASSERT_TRUE(!removed(pair, data, &departure));
	PAIR_UNTIL(pair, fake_n_held());
	ASSERT_EQ(transport_memory_regions(pair->a.transport, data), 0);
	/* The same once more. */
	ASSERT_OK(transport_memory_add(pair->a.transport, one, data, LARGE));
	ASSERT_EQ(echo(pair, data), 2 * LEN);
	ASSERT_EQ(departure.n, 0);
	fake_hold(NULL, 0);
	PAIR_UNTIL(pair, departure.n);
	PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, data));
	ASSERT_EQ(echo(pair, data), 0);
	ASSERT_EQ(counters_of(&pair->a).regions, n_regions);
	(void)pair_free(pair);
}

TEST_BOTH(what_goes_while_it_is_registered)
{
	unsigned n_regions = (unsigned)counters_of(&pair->a).regions;
	char *data = add_held(pair, one), *waiting = add(pair, one, LARGE);
	struct departure departure, of_waiting;

	ASSERT_EQ(echo(pair, waiting), 2 * LEN);
	ASSERT_TRUE(removed(pair, waiting, &of_waiting));
	ASSERT_TRUE(!removed(pair, data, &departure));
	(void)echo(pair, add(pair, one, (size_t)2 * LEN));
	ASSERT_EQ(departure.n, 0);
	ASSERT_EQ(fake_n_held(), 1);
	fake_hold(NULL, 0);
	PAIR_UNTIL(pair, departure.n);
	ASSERT_EQ(counters_of(&pair->a).regions, n_regions + 1);
	(void)pair_free(pair);
	ASSERT_EQ(departure.n + of_waiting.n, 1);
}

/* Of two that are held up each has a thread, and what an owner has beside that waits for its own. */
TEST_BOTH(owners_do_not_wait_for_each_other)
{
	char *ones = add_held(pair, one), *others, *more = add(pair, one, LARGE / 2);
	struct departure departure;

	ASSERT_EQ(echo(pair, more), 2 * LEN);
	others = add(pair, other, LARGE / 2);
	(void)echo(pair, others);
	PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, others));
	ASSERT_EQ(echo(pair, others), 0);
	ASSERT_TRUE(!removed(pair, others, &departure));
	PAIR_UNTIL(pair, departure.n);
	ASSERT_EQ(transport_memory_regions(pair->a.transport, ones), 0);
	ASSERT_EQ(transport_memory_regions(pair->a.transport, more), 0);
	fake_hold(NULL, 0);
	PAIR_UNTIL(pair, transport_memory_regions(pair->a.transport, more));
	ASSERT_EQ(transport_memory_regions(pair->a.transport, ones), 1);
	(void)pair_free(pair);
}

TEST_BOTH(what_is_refused_is_asked_for_once)
{
	char *data = add(pair, one, LARGE);
	unsigned n_calls = fake_n_calls("ibv_reg_mr");

	fake_machine_set(&(struct fake_machine){ .memlock = 1 });
	ASSERT_EQ(echo(pair, data), 2 * LEN);
	PAIR_UNTIL(pair, fake_n_calls("ibv_reg_mr") > n_calls);
	for (unsigned i = 0; i < 3; i++)
		ASSERT_EQ(echo(pair, data), 2 * LEN);
	ASSERT_EQ(transport_memory_regions(pair->a.transport, data), 0);
	(void)pair_free(pair);
	ASSERT_EQ(fake_n_calls("ibv_reg_mr"), n_calls + 1);
}

/* As of a trainer that restarts: what its process before has locked is still being let go. */
TEST_BOTH(what_is_refused_while_other_memory_goes_is_asked_for_again)
{
	char *old = add_registered(pair, one), *data = add(pair, other, LARGE);
	unsigned n_calls = fake_n_calls("ibv_reg_mr");
	struct departure departure;

	fake_hold("ibv_dereg_mr", LARGE);
	ASSERT_TRUE(!removed(pair, old, &departure));
	PAIR_UNTIL(pair, fake_n_held());
	fake_machine_set(&(struct fake_machine){ .memlock = 1 });
	ASSERT_EQ(echo(pair, data), 2 * LEN);
	PAIR_UNTIL(pair, fake_n_calls("ibv_reg_mr") > n_calls);
	fake_machine_set(&(struct fake_machine){ 0 });
	do
		(void)echo(pair, data);
	while (!transport_memory_regions(pair->a.transport, data));
	ASSERT_EQ(echo(pair, data), 0);
	fake_hold(NULL, 0);
	PAIR_UNTIL(pair, departure.n);
	(void)pair_free(pair);
}

/* Lets go of who is held up as soon as the transport closes. */
static void *let_go(void *user)
{
	struct rdma_registrars *registrars = user;
	bool is_closing;

	do {
		(void)pthread_mutex_lock(&registrars->lock);
		is_closing = registrars->is_closing;
		(void)pthread_mutex_unlock(&registrars->lock);
	} while (!is_closing && !sched_yield());
	fake_hold(NULL, 0);
	return NULL;
}

/* It waits for who has begun, tells of what has gone, and begins nothing. */
TEST_BOTH(the_transport_closes)
{
	char *data = add_held(pair, one), *waiting = add(pair, one, LARGE);
	unsigned n_calls = fake_n_calls("ibv_reg_mr");
	struct departure departure;
	pthread_t thread;

	ASSERT_EQ(echo(pair, waiting), 2 * LEN);
	ASSERT_TRUE(!removed(pair, data, &departure));
	ASSERT_OK(pthread_create(&thread, NULL, let_go, &pair->a.transport->rdma->registrars));
	transport_close(pair->a.transport);
	ASSERT_EQ(departure.n, 1);
	ASSERT_EQ(fake_n_calls("ibv_reg_mr"), n_calls + 1);
	(void)pair_free(pair);
	ASSERT_OK(pthread_join(thread, NULL));
	ASSERT_EQ(departure.n, 1);
}
