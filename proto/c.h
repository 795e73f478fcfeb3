/*
 * Our dialect of C: cleanup attribute, hand-over of pointers, container_of, checked arithmetic. Every file includes it
 * first. It needs the compiler and libc alone and defines nothing that runs by itself.
 */
#pragma once

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define _cleanup_(fn)	__attribute__((__cleanup__(fn)))
#define _printf_(f, a)	__attribute__((__format__(__printf__, f, a)))
#define _unused_	__attribute__((__unused__))
#define _noinline_	__attribute__((__noinline__))
#define _cold_		__attribute__((__cold__)) /* what leads to it stands apart from what is often run */
#define _must_check_	__attribute__((__warn_unused_result__))
#define likely(x)	__builtin_expect(!!(x), 1)
#define unlikely(x)	__builtin_expect(!!(x), 0)
#define ARRAY_SIZE(a)	(sizeof(a) / sizeof((a)[0]))
#define CACHE_LINE	64
#define _cache_aligned_ __attribute__((__aligned__(CACHE_LINE)))

/* Of functions that do nothing but fetch: gcc takes a call of one for a call without effect, and drops it, unless it is inlined first. */
#define _fetches_ inline __attribute__((__always_inline__))

/* Fetches memory that will be written soon, or not: any address will do. */
static _fetches_ void fetch_to_write(const void *data, size_t len)
{
#pragma GCC unroll 8
	for (size_t i = 0; i < len; i += CACHE_LINE)
		__builtin_prefetch((const char *)data + i, 1);
}

#define container_of(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

/* Hands a pointer over: yields it and leaves NULL behind, so that a _cleanup_ finds nothing to do. */
#define TAKE_PTR(ptr)                                \
	({                                           \
		__typeof__(ptr) *take_pp_ = &(ptr);  \
		__typeof__(ptr) take_p_ = *take_pp_; \
		*take_pp_ = NULL;                    \
		take_p_;                             \
	})

/* The same for a file descriptor. */
#define TAKE_FD(fd)                        \
	({                                 \
		int *take_fdp_ = &(fd);    \
		int take_fd_ = *take_fdp_; \
		*take_fdp_ = -1;           \
		take_fd_;                  \
	})

#define MIN(a, b)                                  \
	({                                         \
		__typeof__(a) min_a_ = (a);        \
		__typeof__(b) min_b_ = (b);        \
		min_a_ < min_b_ ? min_a_ : min_b_; \
	})

#define MAX(a, b)                                  \
	({                                         \
		__typeof__(a) max_a_ = (a);        \
		__typeof__(b) max_b_ = (b);        \
		max_a_ > max_b_ ? max_a_ : max_b_; \
	})

/* Checked arithmetic: true means overflow, and *ret is not to be used. */
#define ADD_OVERFLOW(a, b, ret) __builtin_add_overflow(a, b, ret)
#define MUL_OVERFLOW(a, b, ret) __builtin_mul_overflow(a, b, ret)

static inline uint64_t align_up(uint64_t value, uint64_t alignment)
{
	return (value + alignment - 1) & ~(alignment - 1);
}

/* For _cleanup_: each keeps errno. */
static inline void freep(void *pp)
{
	int saved = errno;

	free(*(void **)pp);
	*(void **)pp = NULL;
	errno = saved;
}

static inline int fd_close(int fd)
{
	int saved = errno;

	if (fd >= 0)
		(void)close(fd);
	errno = saved;
	return -1;
}

static inline void fd_closep(int *fdp)
{
	*fdp = fd_close(*fdp);
}

/* Defines NAMEp() for _cleanup_(NAMEp) from NAME(), which takes NULL and returns NULL. */
#define DEFINE_CLEANUP(type, name)           \
	static inline void name##p(type *pp) \
	{                                    \
		int saved_ = errno;          \
		if (*pp)                     \
			(void)name(*pp);     \
		*pp = NULL;                  \
		errno = saved_;              \
	}
