/*
 * GRPC_TEST(name): a TEST() in whose process gRPC runs. The library leaves descriptors behind even after an orderly
 * shutdown: one epoll and one eventfd of its poller for good, and for a moment those of a thread that ends on its own
 * time. The end of such a test waits for the second kind and closes the first, one of each and no more: what our own
 * code leaks is still found.
 */
#pragma once

#include "test.h"

#include <dirent.h>
#include <poll.h>

#define GRPC_TEST_LEFT 1 /* of each kind, for good */

static inline bool grpc_test_is(int fd, const char *kind)
{
	char path[64], target[64] = "";

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	(void)!readlink(path, target, sizeof(target) - 1);
	return !strcmp(target, kind);
}

static inline unsigned grpc_test_count(const char *kind)
{
	unsigned n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += grpc_test_is(fd, kind);
	return n;
}

/* n_before: how many there were before the test. */
static inline void grpc_test_close_left(const char *kind, unsigned n_before)
{
	unsigned n;

	for (int tries = 0; tries < 1000; tries++) {
		n = grpc_test_count(kind);
		if (n <= n_before + GRPC_TEST_LEFT)
			break;
		(void)poll(NULL, 0, 10);
	}
	if (n > n_before + GRPC_TEST_LEFT)
		return; /* a leak: the runner's to tell */
	for (int fd = 1023; fd >= 0 && n > n_before; fd--) {
		if (!grpc_test_is(fd, kind))
			continue;
		fd_close(fd);
		n--;
	}
}

#define GRPC_TEST(test_name)                                                   \
	static void grpc_test_##test_name(void);                               \
	TEST(test_name)                                                        \
	{                                                                      \
		unsigned n_epolls = grpc_test_count("anon_inode:[eventpoll]"); \
		unsigned n_events = grpc_test_count("anon_inode:[eventfd]");   \
                                                                               \
		grpc_test_##test_name();                                       \
		grpc_test_close_left("anon_inode:[eventpoll]", n_epolls);      \
		grpc_test_close_left("anon_inode:[eventfd]", n_events);        \
	}                                                                      \
	static void grpc_test_##test_name(void)
