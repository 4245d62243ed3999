/* Reads and writes of extents: pread and pwrite loops that take nothing for granted, with a checksum per granule. */
#ifndef MEGATIER_BLOCK_IO_H
#define MEGATIER_BLOCK_IO_H

#include "thread_pool.h"

struct io_segment {
    int fd;
    int64_t file_offset;
    unsigned char *address;
    size_t num_bytes;
};

/* One batch, cut into requests of at most request_bytes (whole granules where checksums are used, at least one).
 * checksums NULL: none. Segment lengths are multiples of granule_bytes except the last's. NULL: no memory. */
struct batch *io_batch(bool write, const struct io_segment *segments, size_t num_segments, uint32_t *checksums,
                       size_t granule_bytes, size_t request_bytes);

/* Puts memory together from parts of files, whose addresses lie in it in order and apart; zeros are between them. A part
 * may begin at any byte of its file. At least one part; the checksum of every granule is compared. NULL: no memory. */
struct batch *gather_batch(unsigned char *address, size_t num_bytes, const struct io_segment *parts, size_t num_parts,
                           uint32_t *checksums, size_t granule_bytes, size_t request_bytes);

#endif
