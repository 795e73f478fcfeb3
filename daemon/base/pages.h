/* Memory by the page. */
#pragma once

#include <stddef.h>

/* Bytes of a page of this machine's: what the kernel maps and gives back. Any thread. */
size_t page_size(void);

#define HUGE_PAGE ((size_t)2 << 20)

/* len bytes that are zero, a multiple of 4096; of a huge page and more in huge pages, where there are some. NULL: there are none. */
void *pages_map(size_t len);
