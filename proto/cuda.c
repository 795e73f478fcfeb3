/*
 * Loads the CUDA driver's library, once in a process, and finds its functions. Called by the
 * client library for memory of a device, by the daemon to see whether there is a driver, and by
 * its GPU workers. Any thread.
 */
#include "proto/cuda_abi.h"

#include "proto/dl.h"
#include <pthread.h>
#include <stdio.h>

#define NEED_required true
#define NEED_optional false
#define SYMBOL(need, name, version, parameters) \
	{ #name #version, offsetof(struct cuda, name), NEED_##need },

static const struct dl_symbol symbols[] = { CUDA_ABI_FUNCTIONS(SYMBOL) };

static struct {
	pthread_once_t once;
	int result;
	struct cuda table;
	char reason[256];
} driver = { .once = PTHREAD_ONCE_INIT };

static void driver_load(void)
{
	int version = 0;

	driver.result = dl_load("libcuda.so.1", symbols, ARRAY_SIZE(symbols), &driver.table,
				driver.reason, sizeof(driver.reason));
	if (driver.result)
		return;
	/* The stub that developers link with answers everything with an error. */
	if (driver.table.cuDriverGetVersion(&version) != CUDA_SUCCESS) {
		snprintf(driver.reason, sizeof(driver.reason),
			 "libcuda.so.1 is not a driver: it does not tell its version");
		driver.result = -ENOTSUP;
	} else if (version < CUDA_DRIVER_MIN) {
		snprintf(driver.reason, sizeof(driver.reason),
			 "the driver's CUDA is %d.%d, and %d.%d is the oldest that can be used",
			 version / 1000, version % 1000 / 10, CUDA_DRIVER_MIN / 1000,
			 CUDA_DRIVER_MIN % 1000 / 10);
		driver.result = -ENOTSUP;
	}
}

int cuda_load(const struct cuda **ret_cuda, const char **ret_reason)
{
	pthread_once(&driver.once, driver_load);
	if (driver.result) {
		if (ret_reason)
			*ret_reason = driver.reason;
		return driver.result;
	}
	*ret_cuda = &driver.table;
	return 0;
}

const char *cuda_error_name(const struct cuda *cuda, CUresult result)
{
	/* The stub library leaves it unwritten. */
	const char *name = NULL;

	if (cuda->cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
		return "CUDA error";
	return name;
}
