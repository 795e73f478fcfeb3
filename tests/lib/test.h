/*
 * The test runner. TEST(name) { ... } registers a test; each runs in a child process of its own with a time limit, and
 * fails on a signal, a failed ASSERT_*, a leaked descriptor, or the limit. main() is the library's:
 *
 *	PROGRAM			runs all tests, prints one line each and last "N passed, N failed, N skipped"
 *	PROGRAM NAME...		runs those
 *	PROGRAM --list		prints the names of all that run without names
 *
 * TEST_FULL_TIER(name, "why") registers one that the gate leaves out (BPS_TEST_TIER other than full, unless it is named): its verdict depends
 * on how fast the machine is, or it takes long. TEST_SKIP("reason") ends a test as skipped. BPS_TEST_TIMEOUT_S changes the limit (default 60; sanitizer builds x 5).
 * What a test leaves running in its process group is killed, and then the test has failed.
 */
#pragma once

#include "proto/c.h"
#include <inttypes.h>
#include <stdio.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#endif

struct test {
	const char *name;
	void (*run)(void);
	unsigned timeout_s;    /* 0: default */
	const char *full_tier; /* why the gate leaves it out; NULL: the gate runs it */
	struct test *next;
};

void test_register(struct test *test);
_Noreturn void test_fail(const char *file, int line, const char *format, ...) _printf_(3, 4);
_Noreturn void test_skip(const char *format, ...) _printf_(1, 2);
/*
 * A directory for the running test, made at the first call and removed with all that is in it when the test is over,
 * however it ends. Its path is short enough for names of sockets below it.
 */
const char *test_dir(void);
/* A limit of so many seconds, longer in builds with a sanitizer. */
unsigned test_scale_s(unsigned seconds);
/* Whether the kernel has been asked for huge pages where some memory lies. */
bool test_is_huge(const void *data);

#define TEST_REGISTER(test_name, ...)                                                            \
	static void test_run_##test_name(void);                                                  \
	static struct test test_##test_name = { #test_name, test_run_##test_name, __VA_ARGS__ }; \
	__attribute__((constructor)) static void test_ctor_##test_name(void)                     \
	{                                                                                        \
		test_register(&test_##test_name);                                                \
	}                                                                                        \
	static void test_run_##test_name(void)
#define TEST(test_name)			 TEST_REGISTER(test_name, 0)
#define TEST_TIMEOUT(test_name, seconds) TEST_REGISTER(test_name, seconds)
#define TEST_FULL_TIER(test_name, why)	 TEST_REGISTER(test_name, 0, why)
#define TEST_SKIP(...)			 test_skip(__VA_ARGS__)

#define ASSERT_TRUE(x)                                                       \
	do {                                                                 \
		if (!(x))                                                    \
			test_fail(__FILE__, __LINE__, "%s is not true", #x); \
	} while (0)
#define ASSERT_INT(a, op, b)                                                                    \
	do {                                                                                    \
		intmax_t a_ = (intmax_t)(a), b_ = (intmax_t)(b);                                \
		if (!(a_ op b_))                                                                \
			test_fail(__FILE__, __LINE__, "%s %s %s: %jd and %jd", #a, #op, #b, a_, \
				  b_);                                                          \
	} while (0)
#define ASSERT_EQ(a, b) ASSERT_INT(a, ==, b)
#define ASSERT_OK(x)                                                         \
	do {                                                                 \
		int r_ = (x);                                                \
		if (r_)                                                      \
			test_fail(__FILE__, __LINE__, "%s: %d (%s)", #x, r_, \
				  strerror(r_ < 0 ? -r_ : r_));              \
	} while (0)
#define ASSERT_STR(a, b)                                                                       \
	do {                                                                                   \
		const char *a_ = (a), *b_ = (b);                                               \
		if (strcmp(a_, b_))                                                            \
			test_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #a, a_, b_); \
	} while (0)
#define ASSERT_CONTAINS(a, b)                                                                      \
	do {                                                                                       \
		const char *a_ = (a), *b_ = (b);                                                   \
		if (!strstr(a_, b_))                                                               \
			test_fail(__FILE__, __LINE__, "%s is \"%s\", without \"%s\"", #a, a_, b_); \
	} while (0)
#define ASSERT_MEM(a, b, len)                                                                  \
	do {                                                                                   \
		if (memcmp((a), (b), (len)))                                                   \
			test_fail(__FILE__, __LINE__, "%s and %s differ in %zu bytes", #a, #b, \
				  (size_t)(len));                                              \
	} while (0)
