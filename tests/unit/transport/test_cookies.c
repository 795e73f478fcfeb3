/* Cookies: each finds its call, and one that was used or made up finds none. */
#include "test.h"
#include "transport/lane/cookies.h"
#include "transport/transport.h"

TEST(each_finds_its_call)
{
	enum { N = 1000 };
	static struct call calls[N];
	static uint32_t names[N];
	struct cookies cookies = { 0 };

	for (unsigned i = 0; i < N; i++) {
		ASSERT_OK(cookies_add(&cookies, &calls[i], &names[i]));
		ASSERT_TRUE(names[i] != 0);
	}
	for (unsigned i = 0; i < N; i++)
		ASSERT_TRUE(cookies_find(&cookies, names[i]) == &calls[i]);
	for (unsigned i = 0; i < N; i += 2)
		cookies_remove(&cookies, names[i]);
	for (unsigned i = 0; i < N; i++)
		ASSERT_TRUE(cookies_find(&cookies, names[i]) == (i % 2 ? &calls[i] : NULL));
	cookies_done(&cookies);
}

TEST(a_used_cookie_is_not_its_successor)
{
	struct cookies cookies = { 0 };
	struct call call;
	uint32_t used[255], name;

	for (unsigned i = 0; i < ARRAY_SIZE(used); i++) {
		ASSERT_OK(cookies_add(&cookies, &call, &used[i]));
		ASSERT_TRUE(used[i] != 0);
		for (unsigned k = 0; k < i; k++)
			ASSERT_TRUE(!cookies_find(&cookies, used[k]));
		cookies_remove(&cookies, used[i]);
	}
	ASSERT_OK(cookies_add(&cookies, &call, &name));
	ASSERT_EQ(name, used[0]);
	cookies_done(&cookies);
}

TEST(hostile_cookies_find_nothing)
{
	struct cookies cookies = { 0 };
	struct call call;
	uint32_t name;

	ASSERT_TRUE(!cookies_find(&cookies, 0));
	ASSERT_TRUE(!cookies_find(&cookies, UINT32_MAX));
	ASSERT_OK(cookies_add(&cookies, &call, &name));
	for (uint32_t i = 0; i < 32; i++)
		ASSERT_TRUE(!cookies_find(&cookies, name ^ 1u << i));
	ASSERT_TRUE(!cookies_find(&cookies, 0));
	cookies_done(&cookies);
}
