/*
 * Finds the functions of libibverbs and librdmacm by dlopen(3), once; rdma.c asks first and says
 * what is missing.
 */
#include "transport/rdma/verbs.h"

#include <dlfcn.h>
#include <stdio.h>

/* What the inline functions of verbs.h and their macros would be called instead. */
#undef ibv_query_port
#undef ibv_reg_mr

#define VERBS_LIBRARY "libibverbs.so.1"
#define CM_LIBRARY    "librdmacm.so.1"

static bool load(struct rdma_verbs *verbs, char *why, size_t size)
{
	void *verbs_library, *cm_library;

	verbs_library = dlopen(VERBS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
	cm_library = verbs_library ? dlopen(CM_LIBRARY, RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!cm_library) {
		(void)snprintf(
			why, size,
			"%s (Debian: apt-get install libibverbs1 librdmacm1 ibverbs-providers)",
			dlerror());
		return false;
	}
#define LOAD_(library, symbol, member)                                                         \
	*(void **)&verbs->member = dlsym(library, symbol);                                     \
	if (!verbs->member) {                                                                  \
		(void)snprintf(why, size, "%s is not in the rdma-core here, which is too old", \
			       symbol);                                                        \
		return false;                                                                  \
	}
#define VERB_(name, type, args) LOAD_(verbs_library, "ibv_" #name, name)
#define CM_(name, type, args)	LOAD_(cm_library, "rdma_" #name, cm_##name)
	RDMA_SYMBOLS(VERB_, CM_)
	*(void **)&verbs->reg_dmabuf_mr = dlsym(verbs_library, "ibv_reg_dmabuf_mr");
	return true;
}

const struct rdma_verbs *rdma_verbs(const char **ret_why)
{
	static struct rdma_verbs verbs;
	static char why[256];
	static enum { UNTRIED, MISSING, LOADED } state;

	if (state == UNTRIED)
		state = load(&verbs, why, sizeof(why)) ? LOADED : MISSING;
	if (state == LOADED)
		return &verbs;
	*ret_why = why;
	return NULL;
}
