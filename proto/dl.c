/*
 * Opens a library and fills a table with its functions: CUDA's driver (cuda.c), NCCL and NVML
 * (daemon/gpu/worker/bind.c).
 */
#include "proto/dl.h"

#include <dlfcn.h>
#include <stdio.h>

int dl_load(const char *library, const struct dl_symbol *symbols, size_t n_symbols, void *table,
	    char *reason, size_t reason_len)
{
	const char *error;
	void *handle, *address;

	handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		error = dlerror();
		/* Says the name itself where it is the file that is missing, but not always. */
		snprintf(reason, reason_len, "%s%s%s", strstr(error, library) ? "" : library,
			 strstr(error, library) ? "" : ": ", error);
		return -ENOENT;
	}
	for (size_t i = 0; i < n_symbols; i++) {
		address = dlsym(handle, symbols[i].name);
		if (!address && symbols[i].required) {
			snprintf(reason, reason_len, "%s is too old: it has no %s", library,
				 symbols[i].name);
			return -ENOTSUP;
		}
		memcpy((char *)table + symbols[i].offset, &address, sizeof(address));
	}
	return 0;
}
