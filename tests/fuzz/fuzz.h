/*
 * Every fuzz target is one file with the entry that libFuzzer calls. Without -Dfuzz=true the target is built with
 * replay.c instead, and is a test that runs its corpus.
 */
#pragma once

#include "proto/c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A broken promise: the run ends here, in release builds too. */
#define FUZZ_CHECK(x)            \
	do {                     \
		if (!(x))        \
			abort(); \
	} while (0)
