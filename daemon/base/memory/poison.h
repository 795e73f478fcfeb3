/* Memory that is free but not given back: the address sanitizer is told, so that it says when somebody still uses it. */
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISON_IS_SEEN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define POISON_IS_SEEN 1
#endif

#if defined(POISON_IS_SEEN)
#include <sanitizer/asan_interface.h>
#define poison(data, len)   ASAN_POISON_MEMORY_REGION(data, len)
#define unpoison(data, len) ASAN_UNPOISON_MEMORY_REGION(data, len)
#else
#define POISON_IS_SEEN	    0
#define poison(data, len)   ((void)0)
#define unpoison(data, len) ((void)0)
#endif
