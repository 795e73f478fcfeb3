/*
 * The memory of malloc(), in huge pages where the kernel has them for who asks. Thousands of tensors and rounds have their
 * turn once in a step each, and with small pages the processor's tables of pages miss as often as its caches do.
 */
#pragma once

/* Once, before there are threads. What a daemon without much to do needs stays in small pages. */
void heap_init(void);
/* It may have grown: whoever makes what there may be thousands of says so, where time does not matter. Any thread. */
void heap_look(void);
/* What there were thousands of is gone: gives memory back. Takes some ms. Any thread. */
void heap_rest(void);
