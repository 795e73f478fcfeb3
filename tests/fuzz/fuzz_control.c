/* What a trainer sends to the daemon, and the daemon to a trainer. */
#include "control.pb-c.h"
#include "fuzz_pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	fuzz_unpack(&bps__control__request__descriptor, data, size);
	fuzz_unpack(&bps__control__message__descriptor, data, size);
	return 0;
}
