/*
 * Loads NCCL and NVML, once in a process, and finds their functions. Only GPU workers use these
 * libraries: worker.c and group.c call.
 */
#include "gpu/nccl_abi.h"
#include "gpu/nvml_abi.h"
#include "proto/dl.h"
#include <pthread.h>
#include <stdio.h>

#define NEED_required true
#define NEED_optional false

#define NCCL_SYMBOL(need, name, result, parameters) \
	{ #name, offsetof(struct nccl, name), NEED_##need },
#define NVML_SYMBOL(need, name, version, result, parameters) \
	{ #name #version, offsetof(struct nvml, name), NEED_##need },

static const struct dl_symbol nccl_symbols[] = { NCCL_ABI_FUNCTIONS(NCCL_SYMBOL) };
static const struct dl_symbol nvml_symbols[] = { NVML_ABI_FUNCTIONS(NVML_SYMBOL) };

static struct {
	pthread_once_t once;
	int result;
	struct nccl table;
	char reason[256];
} nccl = { .once = PTHREAD_ONCE_INIT };

static struct {
	pthread_once_t once;
	int result;
	struct nvml table;
	char reason[256];
} nvml = { .once = PTHREAD_ONCE_INIT };

static void load_nccl(void)
{
	int version = 0;

	nccl.result = dl_load("libnccl.so.2", nccl_symbols, ARRAY_SIZE(nccl_symbols), &nccl.table,
			      nccl.reason, sizeof(nccl.reason));
	if (nccl.result)
		return;
	if (nccl.table.ncclGetVersion(&version) != ncclSuccess || version < NCCL_MIN) {
		snprintf(nccl.reason, sizeof(nccl.reason),
			 "NCCL is %d.%d, and %d.%d is the oldest that can be used", version / 10000,
			 version % 10000 / 100, NCCL_MIN / 10000, NCCL_MIN % 10000 / 100);
		nccl.result = -ENOTSUP;
	}
}

static void load_nvml(void)
{
	nvmlReturn_t r;

	nvml.result = dl_load("libnvidia-ml.so.1", nvml_symbols, ARRAY_SIZE(nvml_symbols),
			      &nvml.table, nvml.reason, sizeof(nvml.reason));
	if (nvml.result)
		return;
	r = nvml.table.nvmlInit();
	if (r != NVML_SUCCESS) {
		snprintf(nvml.reason, sizeof(nvml.reason), "libnvidia-ml.so.1 does not start: %s",
			 nvml.table.nvmlErrorString(r));
		nvml.result = -ENOTSUP;
	}
}

int nccl_load(const struct nccl **ret_nccl, const char **ret_reason)
{
	pthread_once(&nccl.once, load_nccl);
	if (nccl.result) {
		if (ret_reason)
			*ret_reason = nccl.reason;
		return nccl.result;
	}
	*ret_nccl = &nccl.table;
	return 0;
}

int nvml_load(const struct nvml **ret_nvml, const char **ret_reason)
{
	pthread_once(&nvml.once, load_nvml);
	if (nvml.result) {
		if (ret_reason)
			*ret_reason = nvml.reason;
		return nvml.result;
	}
	*ret_nvml = &nvml.table;
	return 0;
}
