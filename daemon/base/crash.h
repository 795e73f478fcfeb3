/*
 * For tests: in builds with failpoints, a fault that ends the process leaves the calls that led to it on stderr, before the signal
 * does what it does. In a release, and under sanitizers, which say more, it is nothing. Main thread, once, at the beginning.
 */
#pragma once

#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(BPS_FAILPOINTS) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
	!__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer)
#define CRASH_IS_REPORTED 1
void crash_tell(void);
#else
#define CRASH_IS_REPORTED 0
static inline void crash_tell(void)
{
}
#endif
