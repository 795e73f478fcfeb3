/*
 * Accounts of users: shares, refusals and their words, use of an account by another, memory and
 * bulk that are charged.
 */
#include "base/memory/account.h"
#include "base/memory/bulk.h"
#include "test.h"
#include <pthread.h>
#include <stdio.h>

static struct accounts accounts;

static void begin(uint64_t limit, unsigned share)
{
	struct accounts_params params = { .share = share };

	for (unsigned kind = 0; kind < ACCOUNT_KINDS; kind++)
		params.limits[kind] = limit;
	accounts_init(&accounts, &params);
}

/* So many jobs, one by one, as it may have. */
static uint64_t take_all(struct account *account)
{
	struct failure failure = { 0 };
	uint64_t n = 0;

	while (!account_charge(account, ACCOUNT_JOBS, 1, &failure))
		n++;
	ASSERT_EQ(failure.status, -EDQUOT);
	return n;
}

TEST(one_alone_has_half_and_two_a_third_each)
{
	struct account *greedy, *another;

	begin(900, 50);
	greedy = account_get(&accounts, NULL, "user 1");
	another = account_get(&accounts, NULL, "user 2");
	ASSERT_EQ(take_all(greedy), 450);
	ASSERT_EQ(take_all(another), 225);
	account_release(greedy, ACCOUNT_JOBS, 450);
	ASSERT_EQ(take_all(another) + 225, 450);
	account_release(another, ACCOUNT_JOBS, 450);
	for (unsigned i = 0; i < 600; i++) {
		struct failure failure;
		int r = account_charge(i % 2 ? greedy : another, ACCOUNT_JOBS, 1, &failure);

		ASSERT_OK(r);
	}
	ASSERT_EQ(take_all(greedy) + take_all(another), 0);
	account_release(greedy, ACCOUNT_JOBS, 300);
	account_release(another, ACCOUNT_JOBS, 300);
	ASSERT_TRUE(!account_put(greedy) && !account_put(another));
	accounts_done(&accounts);
}

TEST(however_many_take_all_they_can_there_is_one_more)
{
	struct account *greedy[20];
	uint64_t n[20];
	struct failure failure;
	char name[16];

	begin(100000, 50);
	for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++) {
		(void)snprintf(name, sizeof(name), "user %u", i);
		greedy[i] = account_get(&accounts, NULL, name);
	}
	/* In turn, as no one waits until the others have taken theirs. */
	memset(n, 0, sizeof(n));
	for (bool more = true; more;) {
		more = false;
		for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++)
			if (!account_charge(greedy[i], ACCOUNT_JOBS, 1, &failure)) {
				n[i]++;
				more = true;
			}
	}
	for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++)
		ASSERT_TRUE(n[i] >= 100000 / 21 - 1 && n[i] <= 100000 / 21 + 1);
	for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++) {
		account_release(greedy[i], ACCOUNT_JOBS, n[i]);
		(void)account_put(greedy[i]);
	}
	accounts_done(&accounts);
}

/* Each is let have as much as is left: of what its peer may have, not of all. */
TEST(of_what_a_peer_may_have_each_of_its_users_has_a_share)
{
	struct account *peer, *other_peer, *greedy, *another, *elsewhere;
	struct failure failure;

	begin(900, 50);
	peer = account_get(&accounts, NULL, "peers from a");
	other_peer = account_get(&accounts, NULL, "peers from b");
	greedy = account_get(&accounts, peer, "user 1 of peers from a");
	another = account_get(&accounts, peer, "user 2 of peers from a");
	elsewhere = account_get(&accounts, other_peer, "user 1 of peers from b");
	ASSERT_TRUE(account_get(&accounts, peer, "user 1 of peers from a") == greedy);
	(void)account_put(greedy);

	ASSERT_EQ(take_all(greedy), 300);
	ASSERT_EQ(quota_available(account_quota(peer, ACCOUNT_JOBS)), 300);
	ASSERT_EQ(take_all(another), 100);
	ASSERT_EQ(account_charge(greedy, ACCOUNT_JOBS, 1, &failure), -EDQUOT);
	ASSERT_STR(failure.text,
		   "user 1 of peers from a has 300 jobs, and is over its share (user_share, 50 %) "
		   "with more: 400 of 900 are in use (max_jobs): end some, or raise either");
	/* As much as one alone has of the 500 that are left. */
	ASSERT_EQ(take_all(elsewhere), 167);
	ASSERT_EQ(quota_used(account_quota(peer, ACCOUNT_JOBS)), 400);

	/* A peer's account stays its own while one of its users' is held. */
	(void)account_put(peer);
	peer = account_get(&accounts, NULL, "peers from c");
	ASSERT_TRUE(peer != greedy->within);
	account_release(greedy, ACCOUNT_JOBS, 300);
	account_release(another, ACCOUNT_JOBS, 100);
	account_release(elsewhere, ACCOUNT_JOBS, 167);
	(void)account_put(greedy);
	(void)account_put(another);
	(void)account_put(elsewhere);
	(void)account_put(other_peer);
	(void)account_put(peer);
	accounts_done(&accounts);
}

TEST(a_share_of_all_leaves_nothing_and_a_limit_of_one_is_for_one)
{
	struct account *account;

	begin(7, 100);
	account = account_get(&accounts, NULL, "user 1");
	ASSERT_EQ(take_all(account), 7);
	account_release(account, ACCOUNT_JOBS, 7);
	(void)account_put(account);
	accounts_done(&accounts);

	begin(1, 50);
	account = account_get(&accounts, NULL, "user 1");
	ASSERT_EQ(take_all(account), 1);
	account_release(account, ACCOUNT_JOBS, 1);
	(void)account_put(account);
	accounts_done(&accounts);
}

TEST(the_words_say_who_what_how_much_and_what_to_do)
{
	struct account *account;
	struct failure failure;

	begin(4, 50);
	account = account_get(&accounts, NULL, "user 1000");
	ASSERT_EQ(take_all(account), 2);
	ASSERT_EQ(account_charge(account, ACCOUNT_JOBS, 1, &failure), -EDQUOT);
	ASSERT_STR(failure.text,
		   "user 1000 has 2 jobs, and is over its share (user_share, 50 %) with more: 2 of "
		   "4 are in use (max_jobs): end some, or raise either");
	ASSERT_EQ(account_no_memory(account, ENOMEM, &failure), -ENOMEM);
	ASSERT_STR(failure.text, "out of memory");
	account_release(account, ACCOUNT_JOBS, 2);
	(void)account_put(account);
	accounts_done(&accounts);
}

TEST(an_account_is_known_by_its_name_and_used_again_once_nothing_is_charged)
{
	struct account *a, *b;

	begin(100, 50);
	a = account_get(&accounts, NULL, "user 1");
	ASSERT_TRUE(account_get(&accounts, NULL, "user 1") == a);
	ASSERT_OK(quota_charge(account_quota(a, ACCOUNT_MEMORY), 10));
	(void)account_put(a);
	(void)account_put(a);
	/* Something is still held for it. */
	b = account_get(&accounts, NULL, "user 2");
	ASSERT_TRUE(b != a);
	ASSERT_TRUE(account_get(&accounts, NULL, "user 1") == a);
	quota_release(account_quota(a, ACCOUNT_MEMORY), 10);
	(void)account_put(a);
	ASSERT_TRUE(account_get(&accounts, NULL, "user 3") == a);
	(void)account_put(a);
	(void)account_put(b);
	accounts_done(&accounts);
}

TEST(nobody_is_charged_without_an_account)
{
	struct failure failure;

	ASSERT_OK(account_charge(NULL, ACCOUNT_MEMORY, UINT64_MAX, &failure));
	account_release(NULL, ACCOUNT_MEMORY, UINT64_MAX);
	ASSERT_TRUE(!account_put(NULL) && !account_ref(NULL));
}

TEST(held_memory_knows_whom_to_give_back_to)
{
	struct quota quota;
	char *data;

	quota_init(&quota, 1000, NULL);
	data = held_new(&quota, 700);
	ASSERT_TRUE(data && quota_used(&quota) >= 700 && !data[0] && !data[699]);
	ASSERT_TRUE(!held_new(&quota, 700) && errno == EDQUOT);
	ASSERT_TRUE(!held_new(&quota, SIZE_MAX) && errno == ENOMEM);
	ASSERT_TRUE(!held_free(data) && !held_free(NULL));
	ASSERT_EQ(quota_used(&quota), 0);
}

TEST(bulk_is_charged_as_it_is_used)
{
	struct bulk bulk = { 0 };
	struct quota quota;
	unsigned n = 0;

	quota_init(&quota, 256 << 10, NULL);
	bulk.quota = &quota;
	ASSERT_TRUE(bulk_take(&bulk, 64));
	ASSERT_TRUE(quota_used(&quota) && quota_used(&quota) <= 64 << 10);
	while (bulk_take(&bulk, 1000))
		n++;
	ASSERT_EQ(errno, EDQUOT);
	ASSERT_TRUE(n > 200 && n <= 262);
	bulk_done(&bulk);
	ASSERT_EQ(quota_used(&quota), 0);
	ASSERT_TRUE(bulk_take(&bulk, 64) && quota_used(&quota));
	bulk_done(&bulk);
}

TEST(a_batch_is_taken_from_the_parent_and_given_back)
{
	struct quota parent, child;

	quota_init(&parent, 10240, NULL);
	quota_init(&child, UINT64_MAX, &parent);
	child.batch = 1024;
	ASSERT_OK(quota_charge(&child, 10));
	ASSERT_EQ(quota_used(&parent), 1024);
	for (unsigned i = 0; i < 99; i++)
		ASSERT_OK(quota_charge(&child, 10));
	ASSERT_EQ(quota_used(&parent), 1024);
	ASSERT_OK(quota_charge(&child, 8700));
	ASSERT_EQ(quota_used(&parent), 10240);
	ASSERT_EQ(quota_charge(&child, 1000), QUOTA_E_FULL);
	ASSERT_EQ(quota_used(&child), 9700);
	quota_release(&child, 9200);
	ASSERT_TRUE(quota_used(&parent) >= 500 && quota_used(&parent) <= 2500);
	quota_release(&child, 500);
	ASSERT_EQ(quota_used(&parent), 0);
	/* Where there is no batch any more, what is missing is all that is taken. */
	ASSERT_OK(quota_charge(&parent, 9000));
	ASSERT_OK(quota_charge(&child, 1240));
	ASSERT_EQ(quota_used(&parent), 10240);
	ASSERT_EQ(quota_charge(&child, 1), QUOTA_E_FULL);
	quota_release(&child, 1240);
	ASSERT_EQ(quota_used(&parent), 9000);
	/* A charge that is refused leaves nothing. */
	ASSERT_EQ(quota_charge(&child, 1241), QUOTA_E_FULL);
	ASSERT_EQ(quota_used(&parent), 9000);
	quota_done(&child);
}

static void *charge_and_release(void *arg)
{
	struct quota *quota = arg;

	for (unsigned i = 0; i < 20000; i++) {
		uint64_t amount = i % 3 ? 700 : 2100;

		if (!quota_charge(quota, amount))
			quota_release(quota, amount);
	}
	return NULL;
}

TEST(nothing_is_taken_while_nothing_is_charged)
{
	pthread_t threads[4];
	struct quota parent, child;

	quota_init(&parent, 4096, NULL);
	quota_init(&child, UINT64_MAX, &parent);
	child.batch = 1024;
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, charge_and_release, &child));
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_join(threads[i], NULL));
	ASSERT_EQ(quota_used(&child), 0);
	ASSERT_EQ(quota_used(&parent), 0);
}
