/* What the daemon and its porter say to each other. Both are the same program. Private to base/porter*.c. */
#pragma once

#include "base/loop/porter.h"

#define PORTER_FD 3 /* the porter's end */
/* From here on, what others sent. A table is copied up to a multiple of 64: what is below stays, and is ours. */
#define PORTER_FIRST_FD 64

/*
 * A request is two packets: this one, with the descriptor beside it, and PORTER_ACT, which the daemon says when it has closed its own
 * copy. Until then the porter leaves the descriptor alone: if the porter were done first, the daemon would close last.
 */
struct porter_request {
	uint64_t id;
	uint32_t op; /* enum porter_want, or PORTER_CLOSE, or PORTER_SEAL */
	uint32_t zero;
};

#define PORTER_CLOSE 2
#define PORTER_SEAL  3

#define PORTER_ACT "act"

struct porter_answer {
	uint64_t id;
	int32_t status;
	uint8_t taken; /* whether status is of that, or of a seal; and a descriptor beside it */
	uint8_t over;
	uint16_t zero;
};

/* The process itself; socket: its end. */
_Noreturn void porter_main(int socket);
