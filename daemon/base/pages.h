/* Memory by the page. */
#pragma once

#include <stddef.h>

#define HUGE_PAGE ((size_t)2 << 20)

/* len bytes that are zero, a multiple of 4096; of a huge page and more in huge pages, where there are some. NULL: there are none. */
void *pages_map(size_t len);
