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

#define CRC32C_JOIN_MAX 4096

/*
 * The checksum of two pieces as one: of the first, and of the second, which has len bytes, at most CRC32C_JOIN_MAX. The time it takes
 * does not depend on len.
 */
uint32_t crc32c_join(uint32_t first, uint32_t second, size_t len);
uint32_t crc32c_join_portable(uint32_t first, uint32_t second, size_t len);
