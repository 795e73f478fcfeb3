/*
 * Libraries that are used if they are there: opened at run time, each function looked up into a table of pointers.
 */
#pragma once

#include "proto/c.h"

struct dl_symbol {
	const char *name;
	size_t offset; /* of its pointer in the table */
	bool required;
};

/*
 * Opens the library and fills the table, which holds one function pointer for each symbol and is NULL where an optional
 * one is missing. The library is never closed: code of it may run in threads that it started.
 *
 * Returns 0; -ENOENT where the library cannot be opened; -ENOTSUP where a required symbol is missing. On failure reason
 * holds one line that names the library and what it lacks, and the table is not to be used.
 */
int dl_load(const char *library, const struct dl_symbol *symbols, size_t n_symbols, void *table,
	    char *reason, size_t reason_len);
