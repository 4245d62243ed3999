/* The checksum of a granule: CRC32C in four lanes.
 *
 * Lane l of 4 is the CRC32C, without final inversion, of the 8-byte words l, l + 4, l + 8, ... of the largest multiple
 * of 32 bytes. The result is the CRC32C of the four lanes (4 bytes each, little-endian), the remaining 0 to 31 bytes,
 * and the length as 8 bytes. Four lanes, because the CRC instruction takes three cycles and one can start each cycle.
 */
#ifndef MEGATIER_CHECKSUM_H
#define MEGATIER_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint32_t checksum(const void *bytes, size_t num_bytes);

/* Plain CRC32C, as files of other formats have it: in one lane, so half as fast. */
uint32_t crc32c(const void *bytes, size_t num_bytes);

#endif
