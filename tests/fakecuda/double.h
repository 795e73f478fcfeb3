/* What tests of the doubles share: loading them, and calls that must succeed or fail in one way. */
#pragma once

#include "lib/cu.h"

static const struct cuda *cu;

#define CU_IS(result, call)                                                                \
	do {                                                                               \
		CUresult r_ = cu->call;                                                    \
		if (r_ != (result))                                                        \
			test_fail(__FILE__, __LINE__, "%s: %s, not %s", #call,             \
				  cuda_error_name(cu, r_), cuda_error_name(cu, (result))); \
	} while (0)

/* The device's primary context, retained and current. */
static inline CUcontext start(int device)
{
	CUcontext context;
	const char *reason;

	if (!cu && cuda_load(&cu, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&context, device));
	CU(cuCtxSetCurrent(context));
	return context;
}

/* Pinned memory of the host, of len bytes. */
static inline void *pinned(size_t len)
{
	void *p;

	CU(cuMemHostAlloc(&p, len, 0));
	return p;
}
