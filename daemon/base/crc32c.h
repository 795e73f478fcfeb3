/* CRC-32C (Castagnoli; iSCSI, ext4), the checksum of what travels between daemons. Any thread. */
#pragma once

#include "proto/c.h"

/*
 * Goes on with a checksum over len more bytes; crc is 0 before the first. crc32c(crc32c(0, a), b) is that of a and b in one
 * piece. Uses the processor's instruction for it where there is one.
 */
uint32_t crc32c(uint32_t crc, const void *data, size_t len);
/* The same without it, for machines that have none; the same value. */
uint32_t crc32c_portable(uint32_t crc, const void *data, size_t len);
